//! A server that is asked to stop finishes what it has begun.
#![cfg(unix)]

use crate::support::{Post, Server, get, http1::Cut};

async fn assert_finishes_what_it_has_begun(example: &str, request: Post, body: &str, status: u16) {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start_example(example, &[]).await;
        let mut idle = server.connect().await;
        idle.write(get("/")).await;
        idle.answer().await;
        let mut connection = server.connect().await;
        connection.write(request.head_expecting(body.len())).await;
        connection.go_on().await;
        connection.write(&body[..1]).await;

        server.signal(signal).await;
        // It ends the connections that nothing is under way on, so it has heard the signal.
        assert_eq!(idle.try_answer().await, Err(Cut::Before));
        connection.write(&body[1..]).await;
        let answer = connection.answer().await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(connection.rest().await, b"");
        let ended = server.ended().await;
        assert!(ended.success(), "{example} {signal}: {ended}");
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
