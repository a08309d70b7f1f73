//! While a body is on its way nothing is held for it, and one that is too large is not waited for.

use crate::support::{Connection, Post, Server, http1::chunk};

const RUN: &str = r#"{"input": "hello"}"#;
const LONG_RUN: &str = r#"{"input": "hello", "seconds": 3600}"#;
const MIB: usize = 1024 * 1024;

/// A connection whose request is being read, and whose body has only begun.
async fn trickling(server: &Server, key: &str, body: &str) -> Connection {
    let mut connection = server.connect().await;
    connection.write(Post::run().key(key).head_expecting(body.len())).await;
    connection.go_on().await;
    connection.write(&body[..1]).await;
    connection
}

#[tokio::test]
async fn a_body_that_trickles_blocks_nobody_not_even_under_its_own_key() {
    let server = Server::start(&[("CAPACITY", "1"), ("MAX_RUNS", "1")]).await;
    let mut slow = trickling(&server, "k", LONG_RUN).await;
    let mut other = trickling(&server, "other", RUN).await;
    let debug = server.json("/debug/idempotency").await;
    assert_eq!((&debug["live_entries"], &debug["in_flight"]), (&0.into(), &0.into()));

    let quick = server.send(Post::run().body(LONG_RUN)).await;
    assert!(!quick.is_replay());
    for byte in LONG_RUN[1..].bytes() {
        slow.write([byte]).await;
    }
    let answer = slow.answer().await;
    assert!(answer.is_replay());
    assert_eq!(answer.lasting(), quick.lasting());

    // The other one finds room neither for an entry nor for a run, as if it had just come.
    other.write(&RUN[1..]).await;
    other.answer().await.assert_refused(503, "idempotency_capacity");
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn bodies_that_trickle_take_no_place_under_the_ceiling() {
    let server = Server::start(&[("MAX_RUNS", "10")]).await;
    let mut slow = Vec::new();
    for number in 0..10 {
        slow.push(trickling(&server, &format!("slow-{number}"), RUN).await);
    }
    for number in 0..10 {
        let request = Post::run().key(format!("quick-{number}")).body(LONG_RUN);
        assert_eq!(server.send(request).await.status, 202, "{number}");
    }
    // Now there are ten runs, and those who were slow are told so.
    for connection in &mut slow {
        connection.write(&RUN[1..]).await;
        connection.answer().await.assert_refused(429, "concurrency_limit");
    }
    server.assert_left(10, 10).await;
}

#[tokio::test]
async fn a_body_declared_too_large_is_refused_before_it_is_sent() {
    let server = Server::start(&[]).await;
    for length in [MIB + 1, 5_000_000_000, usize::MAX / 2] {
        for head in [Post::run().head_expecting(length), Post::run().head_for(length)] {
            let mut connection = server.connect().await;
            connection.write(head).await;
            let answer = connection.answer().await;
            let problem = answer.assert_refused(413, "idempotency_body_too_large");
            assert_eq!(problem["retry"], "never");
            assert_eq!(
                connection.rest().await,
                b"",
                "and nothing follows, no `100 Continue` either"
            );
        }
    }
    assert_eq!(server.count("too_large").await, 6);
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn a_chunked_body_is_refused_when_it_gets_too_large() {
    let server = Server::start(&[]).await;
    let data = vec![b' '; MIB + 1];
    let mut connection = server.connect().await;
    connection.write(Post::run().with("transfer-encoding", "chunked").head()).await;
    // Not a byte more than it takes: what hyper has not read would cut off the answer.
    let upload = chunk(&data);
    connection.write(&upload[..upload.len() - 2]).await;
    connection.answer().await.assert_refused(413, "idempotency_body_too_large");
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn a_body_of_exactly_the_limit_is_taken() {
    let server = Server::start(&[]).await;
    let body = format!("{RUN}{}", " ".repeat(MIB - RUN.len()));
    let first = server.send(Post::run().body(&body)).await;
    assert!(!first.is_replay());
    let again = server.send(Post::run().chunks(body.as_bytes().chunks(10_000))).await;
    assert!(again.is_replay());
    assert_eq!(again.lasting(), first.lasting());
    let meaning_the_same = server.send(Post::run().body(RUN)).await;
    assert_eq!(meaning_the_same.lasting(), first.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_body_is_the_same_however_it_is_cut() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().body(RUN)).await;
    for size in [1, 2, 7, RUN.len()] {
        let again = server.send(Post::run().chunks(RUN.as_bytes().chunks(size))).await;
        assert!(again.is_replay());
        assert_eq!(again.lasting(), first.lasting());
    }
    let mut connection = server.connect().await;
    for byte in Post::run().body(RUN) {
        connection.write([byte]).await;
    }
    assert_eq!(connection.answer().await.lasting(), first.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_retry_that_is_too_large_leaves_the_record_as_it_is() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().body(RUN)).await;
    let mut connection = server.connect().await;
    connection.write(Post::run().head_for(MIB + 1)).await;
    connection.answer().await.assert_refused(413, "idempotency_body_too_large");
    assert_eq!(server.send(Post::run().body(RUN)).await.lasting(), first.lasting());
}
