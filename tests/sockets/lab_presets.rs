//! What the presets change, and that what is set besides goes before them.

use crate::support::{Answer, Post, Server, VERSIONS};

/// A request that asks for this status, with a key of its own, in quotes.
fn asking_for(status: u16) -> Post {
    Post::lab(&format!("/lab/status/{status}")).key(format!("\"key-{status}\""))
}

async fn assert_recorded(server: &Server, statuses: impl IntoIterator<Item = u16>, recorded: bool) {
    for status in statuses {
        let post = asking_for(status);
        let [first, again] = [server.send(post.body("")).await, server.send(post.body("")).await];
        assert_eq!((first.status, again.status), (status, status));
        assert!(!first.is_replay());
        assert_eq!(again.is_replay(), recorded, "{status}");
        let n = if recorded { 1 } else { 2 };
        assert_eq!(again.json()["n"], n, "{status}");
    }
}

async fn conflict(server: &Server) -> Answer {
    let post = Post::lab("/lab/echo").key("\"conflict\"");
    assert_eq!(server.send(post.body("one")).await.status, 200);
    server.send(post.body("two")).await
}

/// The 4xx that say nothing final: by no preset are they recorded.
const NOT_FINAL: [u16; 20] = [
    400, 401, 403, 404, 405, 407, 408, 409, 411, 413, 414, 415, 417, 421, 423, 425, 426, 428, 429,
    431,
];
const FINAL: [u16; 6] = [402, 406, 410, 418, 422, 451];

#[tokio::test]
async fn without_a_preset_a_key_is_optional_and_bare_and_a_conflict_is_409() {
    let server = Server::lab(&[]).await;
    let post = Post::lab("/lab/echo");
    assert_eq!(server.send(post.clone().without("idempotency-key").body("")).await.status, 200);
    assert_eq!(server.send(post.clone().key("bare").body("")).await.status, 200);
    assert!(server.send(post.key("\"bare\"").body("")).await.is_replay());
    conflict(&server).await.assert_refused(409, "idempotency_conflict");
    assert_recorded(&server, [200, 303, 402], true).await;
    assert_recorded(&server, FINAL[1..].iter().copied().chain(NOT_FINAL), false).await;
}

#[tokio::test]
async fn ietf_wants_quoted_keys_and_answers_422_on_a_conflict() {
    let server = Server::lab(&[("PRESET", "ietf")]).await;
    for version in VERSIONS {
        let post = Post::lab("/lab/echo");
        let missing = post.clone().without("idempotency-key");
        let missing = version.send(&server, &missing, "x").await;
        let problem = missing.assert_refused(400, "idempotency_key_missing");
        assert_eq!(problem["retry"], "new-key");
        let bare = version.send(&server, &post.clone().key("bare"), "x").await;
        bare.assert_refused(400, "idempotency_key_invalid");
        let quoted = version.send(&server, &post.key(format!("\"{version:?}\"")), "x").await;
        assert_eq!((quoted.status, quoted.is_replay()), (200, false));
    }
    conflict(&server).await.assert_refused(422, "idempotency_conflict");
    assert_recorded(&server, FINAL.into_iter().chain([200, 303]), true).await;
    assert_recorded(&server, NOT_FINAL.into_iter().chain([500, 502, 503, 504]), false).await;
}

#[tokio::test]
async fn stripe_records_failures_but_not_those_that_say_later_and_answers_400_on_a_conflict() {
    let server = Server::lab(&[("PRESET", "stripe")]).await;
    conflict(&server).await.assert_refused(400, "idempotency_conflict");
    let recorded = [200, 303, 500, 501, 502, 504, 599];
    assert_recorded(&server, FINAL.into_iter().chain(recorded), true).await;
    assert_recorded(&server, NOT_FINAL.into_iter().chain([503]), false).await;
    // Keys are optional, and bare.
    let post = Post::lab("/lab/echo");
    assert_eq!(server.send(post.clone().without("idempotency-key").body("")).await.status, 200);
    assert_eq!(server.send(post.key("bare").body("")).await.status, 200);
    // A panic leaves no answer to record.
    let post = Post::lab("/lab/panic").key("panic");
    let mut connection = server.connect().await;
    connection.write(post.body("")).await;
    connection.try_answer().await.expect_err("a cut");
    server.send(post.body("")).await.assert_refused(409, "idempotency_outcome_unknown");
}

#[tokio::test]
async fn what_is_set_goes_before_the_preset() {
    let server = Server::lab(&[("PRESET", "stripe"), ("ON_FAILURE", "release")]).await;
    assert_recorded(&server, [500, 502, 503], false).await;
    assert_recorded(&server, [422], true).await;
    let server = Server::lab(&[("PRESET", "stripe"), ("ON_FAILURE", "hold")]).await;
    for status in [408, 500, 503] {
        assert_eq!(server.send(asking_for(status).body("")).await.status, status);
        let held = server.send(asking_for(status).body("")).await;
        held.assert_refused(409, "idempotency_outcome_unknown");
    }

    let server = Server::lab(&[("PRESET", "ietf"), ("REQUIRED", "0")]).await;
    let unkeyed = Post::lab("/lab/echo").without("idempotency-key");
    assert_eq!(server.send(unkeyed.body("")).await.status, 200);
    let server = Server::lab(&[("PRESET", "ietf"), ("ON_FAILURE", "record")]).await;
    assert_recorded(&server, [500, 422], true).await;

    // Not the preset's 24 hours.
    let server = Server::lab(&[("PRESET", "stripe"), ("TTL_SECONDS", "0.2")]).await;
    assert_eq!(server.send(asking_for(200).body("")).await.status, 200);
    let gone = async || (server.live_entries().await == 0).then_some(());
    crate::support::eventually(gone).await;
}

#[tokio::test]
async fn a_key_can_be_required_without_a_preset() {
    let server = Server::lab(&[("REQUIRED", "1")]).await;
    let post = Post::lab("/lab/echo");
    let missing = server.send(post.clone().without("idempotency-key").body("")).await;
    missing.assert_refused(400, "idempotency_key_missing");
    assert_eq!(server.send(post.key("bare").body("")).await.status, 200);
    assert_eq!(server.executions("/lab/echo").await, 1);
    // What is not guarded needs none.
    assert_eq!(server.send(crate::support::get("/lab/executions")).await.status, 200);
}
