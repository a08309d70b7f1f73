//! Repeats while the first is running: they wait, for so long, or are told at once; and the number
//! of handlers that run is limited.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use crate::support::{Post, Server, VERSIONS, Version};

#[tokio::test]
async fn repeats_at_once_wait_for_one_execution_and_all_get_its_answer() {
    let server = Server::lab(&[("IN_FLIGHT", "wait"), ("MAX_RUNS", "1")]).await;
    let path = "/lab/status/201?ms=300";
    let post = Post::lab(path);
    let requests = (0..10).map(|number| VERSIONS[number % 2].send(&server, &post, ""));
    let answers = join_all(requests).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.content()), (201, answers[0].content()));
    }
    assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
    assert_eq!(server.executions(path).await, 1);
}

#[tokio::test]
async fn a_repeat_waits_for_so_long_and_is_told_to_come_back() {
    let server = Server::lab(&[("WAIT_MS", "300")]).await;
    let path = "/lab/status/200?ms=3600000";
    let post = Post::lab(path);
    let mut first = server.connect().await;
    first.write(post.body("")).await;
    server.has_run(path, 1).await;
    for version in VERSIONS {
        let asked = Instant::now();
        let told = version.send(&server, &post, "").await;
        assert!(asked.elapsed() >= Duration::from_millis(300), "{:?}", asked.elapsed());
        let problem = told.assert_refused(409, "idempotency_in_progress");
        assert_eq!(problem["retry"], "same-key");
        assert!(told.retry_after() >= 1);
        // Nobody waits for what cannot be the answer.
        let other = version.send(&server, &post, "other").await;
        other.assert_refused(409, "idempotency_conflict");
    }
    assert_eq!(server.count("in_progress").await, 2);
}

#[tokio::test]
async fn under_reject_a_repeat_is_told_at_once_and_waits_for_nothing() {
    let server = Server::lab(&[("IN_FLIGHT", "reject")]).await;
    let path = "/lab/status/200?ms=3600000";
    let post = Post::lab(path);
    let mut first = server.connect().await;
    first.write(post.body("")).await;
    server.has_run(path, 1).await;
    for version in VERSIONS {
        let told = version.send(&server, &post, "").await;
        told.assert_refused(409, "idempotency_in_progress");
        assert!(told.retry_after() >= 1);
        let done = Post::lab("/lab/status/200").key(format!("{version:?}"));
        for is_replay in [false, true] {
            assert_eq!(version.send(&server, &done, "").await.is_replay(), is_replay);
        }
    }
    assert_eq!((server.count("waited").await, server.executions(path).await), (0, 1));
}

#[tokio::test]
async fn handlers_that_have_not_answered_are_limited_and_retries_are_not() {
    let server = Server::lab(&[("MAX_RUNS", "2")]).await;
    let known = Post::lab("/lab/echo").key("known");
    assert_eq!(server.send(known.body("hello")).await.status, 200);
    let path = "/lab/status/200?ms=3600000";
    let busy = Post::lab(path).key("busy");
    let unkeyed = Post::lab(path).without("idempotency-key");
    let mut first = server.connect().await;
    first.write(busy.body("")).await;
    let mut second = server.connect().await;
    second.write(unkeyed.body("")).await;
    server.has_run(path, 2).await;

    for version in VERSIONS {
        let new = Post::lab("/lab/echo").key("new");
        for refused in [new.clone(), new.without("idempotency-key")] {
            let answer = version.send(&server, &refused, "").await;
            let problem = answer.assert_refused(429, "concurrency_limit");
            assert_eq!(problem["retry"], "same-key");
            assert!(answer.retry_after() >= 1);
        }
        assert!(version.send(&server, &known, "hello").await.is_replay());
    }
    // An unkeyed client that leaves takes its handler with it.
    drop(second);
    let post = Post::lab("/lab/echo").key("new");
    let let_in = async || {
        let answer = server.send(post.body("")).await;
        (answer.status == 200).then_some(())
    };
    crate::support::eventually(let_in).await;
}

#[tokio::test]
async fn a_handler_gives_its_place_back_however_it_ends() {
    let server = Server::lab(&[("MAX_RUNS", "1")]).await;
    for path in
        ["/lab/panic", "/lab/break", "/lab/status/500", "/lab/effects?then=panic", "/lab/expire"]
    {
        for (number, version) in VERSIONS.into_iter().enumerate() {
            let keyed = Post::lab(path).key(format!("{path}-{number}"));
            for post in [keyed.clone(), keyed.without("idempotency-key")] {
                drop(version.try_send(&server, &post, "").await);
            }
        }
        assert_eq!(server.executions(path).await, 4, "{path}");
    }
    assert_eq!(server.count("ceiling").await, 0);
    let answer = Version::Http1.send(&server, &Post::lab("/lab/echo"), "at last").await;
    assert_eq!(answer.text(), "at last");
}
