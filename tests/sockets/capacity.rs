//! There are never more live entries than the cap, and what lives is never dropped for what comes.

use crate::support::{Answer, Connection, Post, Server, eventually};

const RUN: &str = r#"{"input": "hello"}"#;

#[tokio::test]
async fn of_many_keys_at_once_exactly_as_many_as_there_is_room_for_are_kept() {
    let server = Server::start(&[("CAPACITY", "5"), ("MAX_RUNS", "1000")]).await;
    // All of them have passed the look-up when the first body is complete.
    let mut connections = Vec::new();
    for key in 0..40 {
        let mut connection = server.connect().await;
        let request = Post::run().key(format!("key-{key}"));
        connection.write(request.head_expecting(RUN.len())).await;
        connection.go_on().await;
        connections.push(connection);
    }
    for connection in &mut connections {
        connection.write(RUN).await;
    }
    let answers = futures_util::future::join_all(connections.iter_mut().map(Connection::answer));
    let answers = answers.await;
    for answer in answers.iter().filter(|answer| answer.status != 202) {
        let problem = answer.assert_refused(503, "idempotency_capacity");
        assert_eq!(problem["retry"], "same-key");
        assert!((1..=60).contains(&answer.retry_after()));
    }
    let is_kept = |answer: &&Answer| answer.status == 202;
    assert_eq!(answers.iter().filter(is_kept).count(), 5);
    server.assert_left(5, 5).await;
    assert_eq!((server.count("executed").await, server.count("capacity").await), (5, 35));

    // Nothing that lives has gone: those five replay, and the others find no room still.
    for (key, first) in answers.iter().enumerate() {
        let again = server.send(Post::run().key(format!("key-{key}")).body(RUN)).await;
        assert_eq!(again.status, first.status);
        assert_eq!(again.is_replay(), first.status == 202);
        if again.is_replay() {
            assert_eq!(again.lasting(), first.lasting());
        }
    }
}

#[tokio::test]
async fn work_without_a_key_needs_no_room() {
    let server = Server::start(&[("CAPACITY", "1")]).await;
    server.send(Post::run().body(RUN)).await.run_id();
    let full = server.send(Post::run().key("another").body(RUN)).await;
    full.assert_refused(503, "idempotency_capacity");
    server.send(Post::run().without("idempotency-key").body(RUN)).await.run_id();
    server.assert_left(2, 1).await;
}

#[tokio::test]
async fn there_is_room_again_when_a_record_has_ended() {
    let server = Server::start(&[("CAPACITY", "1"), ("TTL_SECONDS", "1")]).await;
    server.send(Post::run().body(RUN)).await.run_id();
    let other = Post::run().key("another").body(RUN);
    let answer = eventually(async || {
        let answer = server.send(&other).await;
        if answer.status == 202 {
            return Some(answer);
        }
        answer.assert_refused(503, "idempotency_capacity");
        assert_eq!(answer.retry_after(), 1, "the record has less than a second left");
        None
    })
    .await;
    assert!(!answer.is_replay());
    assert_eq!(server.started().await, 2);
}

#[tokio::test]
async fn a_request_that_came_to_nothing_takes_no_room() {
    let server = Server::start(&[("CAPACITY", "1")]).await;
    for key in 0..10 {
        let refused = server.send(Post::run().key(format!("key-{key}")).body("nonsense")).await;
        assert_eq!(refused.status, 400);
    }
    server.send(Post::run().body(RUN)).await.run_id();
    server.assert_left(1, 1).await;
}
