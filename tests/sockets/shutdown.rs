//! A server that is asked to stop finishes what it has begun.
#![cfg(unix)]

use tokio::net::TcpStream;

use crate::support::{Post, Server, eventually};

async fn assert_finishes_what_it_has_begun(example: &str, request: Post, body: &str, status: u16) {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start_example(example, &[]).await;
        let mut idle = server.connect().await;
        let mut connection = server.connect().await;
        connection.write(request.head_expecting(body.len())).await;
        connection.go_on().await;
        connection.write(&body[..1]).await;

        server.signal(signal).await;
        // It takes no new connections any more, so it has heard the signal.
        let addr = server.addr;
        eventually(async || TcpStream::connect(addr).await.is_err().then_some(())).await;
        connection.write(&body[1..]).await;
        let answer = connection.answer().await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(connection.rest().await, b"");
        assert!(idle.try_answer().await.is_err());
        assert!(server.ended().await.success(), "{example} {signal}");
    }
}

#[tokio::test]
async fn a_request_that_was_under_way_is_answered_before_the_server_ends() {
    let run = r#"{"input": "hello", "seconds": 3600}"#;
    assert_finishes_what_it_has_begun("server", Post::run(), run, 202).await;
    let without_key = Post::run().without("idempotency-key");
    assert_finishes_what_it_has_begun("server", without_key, run, 202).await;
}

#[tokio::test]
async fn the_hyper_example_ends_in_the_same_way() {
    let order = Post::to("/orders").with("authorization", "Bearer alice").key("k");
    assert_finishes_what_it_has_begun("hyper", order, "tea", 201).await;
}
