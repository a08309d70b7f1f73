//! Over the ceiling no new work is taken on, and nobody is made to send it; what is known is
//! answered all the same.

use crate::support::{Connection, Post, Server, eventually};

const RUN: &str = r#"{"input": "hello"}"#;
const LONG_RUN: &str = r#"{"input": "hello", "seconds": 3600}"#;

/// A server with one run that does not end, under the key `busy`, and no room for another.
async fn busy() -> Server {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    server.send(Post::run().key("busy").body(LONG_RUN)).await.run_id();
    server
}

/// A request for new work, with a key and without.
fn new_work() -> [Post; 2] {
    [Post::run().key("new"), Post::run().without("idempotency-key")]
}

#[tokio::test]
async fn new_work_is_refused_and_says_when_to_come_back() {
    let server = busy().await;
    for request in new_work() {
        let refused = server.send(request.body(RUN)).await;
        let problem = refused.assert_refused(429, "concurrency_limit");
        assert_eq!(problem["retry"], "same-key");
        assert!(refused.retry_after() >= 1);
        assert_eq!(refused.header("stripe-should-retry"), None);
    }
    assert_eq!(server.count("ceiling").await, 2);
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn new_work_is_refused_before_its_client_is_asked_to_send_it() {
    let server = busy().await;
    for request in new_work() {
        let mut connection = server.connect().await;
        connection.write(request.head_expecting(RUN.len())).await;
        connection.answer().await.assert_refused(429, "concurrency_limit");
        assert_eq!(connection.rest().await, b"", "and nothing follows, no `100 Continue` either");
    }
}

#[tokio::test]
async fn new_work_is_refused_though_its_body_never_comes() {
    let server = busy().await;
    for request in new_work() {
        for head in [
            request.head_for(RUN.len()),
            request.clone().with("transfer-encoding", "chunked").head(),
        ] {
            let mut connection = server.connect().await;
            connection.write(head).await;
            connection.answer().await.assert_refused(429, "concurrency_limit");
        }
    }
}

#[tokio::test]
async fn a_known_key_is_answered_as_ever() {
    let server = busy().await;
    let again = server.send(Post::run().key("busy").body(LONG_RUN)).await;
    assert!(again.is_replay());
    again.run_id();

    // Its client is asked for the body, for only that tells a retry from a conflict.
    let mut connection = server.connect().await;
    connection.write(Post::run().key("busy").head_expecting(LONG_RUN.len())).await;
    connection.go_on().await;
    connection.write(LONG_RUN).await;
    assert_eq!(connection.answer().await.lasting(), again.lasting());

    let other = server.send(Post::run().key("busy").body(RUN)).await;
    other.assert_refused(409, "idempotency_conflict");
    assert_eq!(server.count("ceiling").await, 0);
}

#[tokio::test]
async fn the_refused_key_is_new_work_as_soon_as_there_is_room() {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    let first = server.send(Post::run().body(r#"{"input": "hello", "seconds": 1}"#)).await;
    let request = Post::run().key("new").body(RUN);
    server.send(&request).await.assert_refused(429, "concurrency_limit");
    let second = eventually(async || {
        let answer = server.send(&request).await;
        if answer.status == 202 {
            return Some(answer);
        }
        answer.assert_refused(429, "concurrency_limit");
        None
    })
    .await;
    assert!(!second.is_replay());
    assert_ne!(second.run_id(), first.run_id());
    let run = server.json(&format!("/v1/runs/{}", first.run_id())).await;
    assert_eq!(run["status"], "completed", "the room is that of the run that has ended");
    server.assert_left(2, 2).await;
}

#[tokio::test]
async fn a_handler_that_refuses_its_request_gives_its_place_back() {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    for request in new_work() {
        for _ in 0..3 {
            assert_eq!(server.send(request.body("nonsense")).await.status, 400);
        }
    }
    server.send(Post::run().body(RUN)).await.run_id();
}

#[tokio::test]
async fn of_many_at_once_exactly_as_many_as_there_is_room_for_are_taken_on() {
    for keyed in [true, false] {
        let server = Server::start(&[("MAX_RUNS", "5")]).await;
        // All of them have passed the look at the ceiling when the first body is complete.
        let mut connections = Vec::new();
        for key in 0..40 {
            let mut connection = server.connect().await;
            let request = Post::run().key(format!("key-{key}"));
            let request = if keyed { request } else { request.without("idempotency-key") };
            connection.write(request.head_expecting(LONG_RUN.len())).await;
            connection.go_on().await;
            connections.push(connection);
        }
        for connection in &mut connections {
            connection.write(LONG_RUN).await;
        }
        let answers =
            futures_util::future::join_all(connections.iter_mut().map(Connection::answer));
        let (taken_on, refused): (Vec<_>, Vec<_>) =
            answers.await.into_iter().partition(|answer| answer.status == 202);
        assert_eq!(taken_on.len(), 5);
        for answer in &refused {
            let problem = answer.assert_refused(429, "concurrency_limit");
            assert_eq!(problem["retry"], "same-key");
            assert!(answer.retry_after() >= 1);
        }
        // What is counted is what the layer did. It had let all in that have no key: of those whose
        // bodies came too late, the handler said so.
        let counts = &server.json("/debug/idempotency").await["dispositions"];
        let counted = ["executed", "ceiling", "passed"].map(|name| counts[name].as_u64().unwrap());
        assert_eq!(counted, if keyed { [5, 35, 0] } else { [0, 0, 40] });
        server.assert_left(5, if keyed { 5 } else { 0 }).await;
    }
}

#[tokio::test]
async fn a_run_of_no_time_is_over_when_it_is_answered_and_takes_no_place_from_the_next() {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    for number in 0..50 {
        let key = format!("key-{number}");
        let run = Post::run().key(key).body(r#"{"input": "hello", "seconds": 0}"#);
        let run = server.send(run).await.run_id();
        let run = server.json(&format!("/v1/runs/{run}")).await;
        assert_eq!(run["status"], "completed");
    }
}
