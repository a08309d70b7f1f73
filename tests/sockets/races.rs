//! However many send the same at once, it is done once.

use futures_util::future::join_all;

use crate::support::{Answer, Connection, Post, Server};

const RUN: &str = r#"{"input": "hello"}"#;

/// Sends the same request over so many connections at once, and returns all answers.
///
/// Every one of them has been looked up, found new and let past the ceiling when the first is
/// complete: what is left is the step that decides.
async fn all_at_once(server: &Server, number: usize) -> Vec<Answer> {
    let mut connections = Vec::new();
    for _ in 0..number {
        let mut connection = server.connect().await;
        connection.write(Post::run().head_expecting(RUN.len())).await;
        connection.go_on().await;
        connection.write(&RUN[..RUN.len() - 1]).await;
        connections.push(connection);
    }
    for connection in &mut connections {
        connection.write(&RUN[RUN.len() - 1..]).await;
    }
    join_all(connections.iter_mut().map(Connection::answer)).await
}

async fn assert_one_run(server: &Server, answers: Vec<Answer>) {
    // So many as wait for one operation get its answer; more than that may be told to come back.
    let (answered, told): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| answer.status == 202);
    for answer in told {
        answer.assert_refused(409, "idempotency_in_progress");
        assert!(answer.retry_after() >= 1);
    }
    assert_eq!(answered.iter().filter(|answer| !answer.is_replay()).count(), 1);
    assert!(answered.len() > 16, "{} were answered", answered.len());
    let again = server.send(Post::run().body(RUN)).await;
    for answer in answered {
        assert_eq!(answer.lasting(), again.lasting());
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn fifty_identical_requests_at_once_start_one_run() {
    let server = Server::start(&[]).await;
    let answers = all_at_once(&server, 50).await;
    assert_one_run(&server, answers).await;
}

#[tokio::test]
async fn fifty_identical_requests_at_once_start_one_run_where_there_is_room_for_one() {
    let server = Server::start(&[("MAX_RUNS", "1"), ("RUN_SECONDS", "3600")]).await;
    let answers = all_at_once(&server, 50).await;
    assert_one_run(&server, answers).await;
    assert_eq!(server.count("ceiling").await, 0);
}

#[tokio::test]
async fn identical_requests_that_nobody_holds_back_start_one_run() {
    for _ in 0..10 {
        let server = Server::start(&[("MAX_RUNS", "1"), ("RUN_SECONDS", "3600")]).await;
        let request = Post::run().body(RUN);
        let answers = join_all((0..10).map(|_| server.send(&request))).await;
        let first = answers[0].run_id();
        assert!(answers.iter().all(|answer| answer.run_id() == first), "{answers:?}");
        server.assert_left(1, 1).await;
    }
}

#[tokio::test]
async fn of_different_requests_at_once_under_one_key_one_is_done_and_the_others_conflict() {
    let server = Server::start(&[]).await;
    let body = |number: usize| format!(r#"{{"input": "hello {}"}}"#, number % 10);
    let mut connections = Vec::new();
    for number in 0..40 {
        let mut connection = server.connect().await;
        connection.write(Post::run().head_expecting(body(number).len())).await;
        connection.go_on().await;
        connections.push(connection);
    }
    for (number, connection) in connections.iter_mut().enumerate() {
        connection.write(body(number)).await;
    }
    let answers = join_all(connections.iter_mut().map(Connection::answer)).await;
    let winner = answers.iter().position(|answer| answer.status == 202).unwrap() % 10;
    let id = answers[winner].run_id();
    for (number, answer) in answers.iter().enumerate() {
        if number % 10 == winner {
            assert_eq!(answer.run_id(), id);
        } else {
            answer.assert_refused(409, "idempotency_conflict");
        }
    }
    server.assert_left(1, 1).await;
}
