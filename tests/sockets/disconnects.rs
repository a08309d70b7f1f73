//! A client that is gone does not undo its work, and one that never said all of it starts none.

use std::collections::BTreeSet;

use crate::support::{Post, Server, eventually};

const RUN: &str = r#"{"input": "hello"}"#;

#[tokio::test]
async fn a_client_that_never_reads_its_answer_finds_it_by_a_retry() {
    let server = Server::start(&[]).await;
    let mut connection = server.connect().await;
    connection.write(Post::run().body(RUN)).await;
    eventually(async || (server.started().await == 1).then_some(())).await;
    drop(connection);

    let run = &server.json("/v1/runs").await["runs"][0];
    let again = server.send(Post::run().body(RUN)).await;
    assert!(again.is_replay());
    assert_eq!(again.run_id(), run["run_id"].as_str().unwrap());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_as_soon_as_all_is_sent_never_starts_it_twice() {
    let server = Server::start(&[("MAX_RUNS", "1000")]).await;
    let mut ids = BTreeSet::new();
    for key in 0..30 {
        let request = Post::run().key(format!("key-{key}")).body(RUN);
        let mut connection = server.connect().await;
        connection.write(&request).await;
        drop(connection);
        // Its retry may overtake it, come in the midst of it, or after it.
        let retried = server.send(&request).await;
        let again = server.send(&request).await;
        assert!(again.is_replay());
        assert_eq!(again.lasting(), retried.lasting());
        ids.insert(again.run_id());
    }
    assert_eq!(ids.len(), 30);
    server.assert_left(30, 30).await;
}

#[tokio::test]
async fn a_client_that_stops_sending_after_its_request_still_gets_its_answer() {
    let server = Server::start(&[]).await;
    for _ in 0..2 {
        let mut connection = server.connect().await;
        connection.write(Post::run().body(RUN)).await;
        let answer = connection.answer().await;
        answer.run_id();
        connection.finish_writing().await;
        assert_eq!(connection.rest().await, b"");
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_amid_its_upload_has_started_nothing() {
    let server = Server::start(&[]).await;
    let requests = [
        // The part that comes is a whole run by itself.
        [&Post::run().head_for(1000)[..], RUN.as_bytes()].concat(),
        [&Post::run().with("transfer-encoding", "chunked").head()[..], b"12\r\n", RUN.as_bytes()]
            .concat(),
        Post::run().head_for(RUN.len()),
    ];
    for request in requests {
        // It stops sending: the server sees the end, and may say so or just close.
        let mut connection = server.connect().await;
        connection.write(&request).await;
        connection.finish_writing().await;
        if let Ok(answer) = connection.try_answer().await {
            answer.assert_refused(400, "idempotency_body_unreadable");
        }
        assert_eq!(connection.rest().await, b"");

        // It is gone.
        let mut connection = server.connect().await;
        connection.write(&request).await;
        drop(connection);
    }
    server.assert_left(0, 0).await;
    let answer = server.send(Post::run().body(RUN)).await;
    assert!(!answer.is_replay());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_amid_its_retry_changes_nothing() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().body(RUN)).await;
    let mut connection = server.connect().await;
    connection.write(Post::run().head_expecting(RUN.len())).await;
    connection.go_on().await;
    connection.write("{").await;
    drop(connection);
    let again = server.send(Post::run().body(RUN)).await;
    assert_eq!(again.lasting(), first.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_thousand_connections_that_come_and_go_leave_a_working_server() {
    let server = Server::start(&[]).await;
    for number in 0..1000 {
        // Each leaves somewhere between its first byte and its last but one.
        let request = Post::run().key(format!("key-{number}")).body(RUN);
        let sent = number * 7919 % (request.len() - 1) + 1;
        server.connect().await.write(&request[..sent]).await;
    }
    let answer = server.send(Post::run().body(RUN)).await;
    assert!(!answer.is_replay());
    server.assert_left(1, 1).await;
}
