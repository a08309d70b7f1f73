//! In the shadow everything runs and is counted as it would have been; off, everything passes.

use crate::support::{Post, Server, VERSIONS};

#[tokio::test]
async fn in_the_shadow_nothing_is_refused_or_replayed() {
    let server =
        Server::lab(&[("MODE", "shadow"), ("REQUEST_LIMIT", "100"), ("REQUIRED", "1")]).await;
    for (version, round) in VERSIONS.into_iter().zip(0..) {
        let key = format!("{version:?}");
        let post = Post::lab("/lab/echo").key(&key);
        let send = async |post: &Post, body: &str| {
            let answer = version.send(&server, post, body).await;
            assert_eq!((answer.status, answer.text(), answer.is_replay()), (200, body, false));
        };
        send(&post, "hello").await;
        send(&post, "hello").await;
        send(&post, "other").await;
        send(&post.clone().key("two words"), "hello").await;
        send(&post.clone().without("idempotency-key"), "hello").await;
        send(&post, &"x".repeat(101)).await;
        for (disposition, count) in [
            ("executed", 1),
            ("replayed", 1),
            ("conflict", 1),
            ("rejected_key", 2),
            ("too_large", 1),
            ("passed", 0),
        ] {
            assert_eq!(server.count(disposition).await, count * (round + 1), "{disposition}");
        }
        assert_eq!(server.executions("/lab/echo").await, 6 * (round + 1));
        assert_eq!(server.live_entries().await, round + 1);
    }
}

#[tokio::test]
async fn in_the_shadow_repeats_run_beside_the_first_and_what_is_full_is_only_counted() {
    let server = Server::lab(&[("MODE", "shadow"), ("MAX_RUNS", "1"), ("CAPACITY", "1")]).await;
    let post = Post::lab("/lab/stream?lines=2&ms=3600000");
    let mut running = Vec::new();
    for (version, n) in VERSIONS.into_iter().zip(1..) {
        let mut coming = version.open(&server, &post, "").await;
        assert_eq!(coming.next().await, format!("{{\"line\":1,\"n\":{n}}}\n"));
        running.push(coming);
    }
    assert_eq!(server.count("in_progress").await, 1);

    let other = Post::lab("/lab/echo").key("other");
    assert_eq!(server.send(other.body("hello")).await.text(), "hello");
    assert_eq!(server.count("capacity").await, 1);
    let busy = "/lab/status/200?ms=3600000";
    let mut connection = server.connect().await;
    connection.write(Post::lab(busy).without("idempotency-key").body("")).await;
    server.has_run(busy, 1).await;
    assert_eq!(server.send(other.body("hello")).await.text(), "hello");
    assert_eq!((server.count("ceiling").await, server.live_entries().await), (1, 1));
    drop(running);
}

#[tokio::test]
async fn off_everything_passes() {
    let server = Server::lab(&[("MODE", "off"), ("REQUIRED", "1"), ("REQUEST_LIMIT", "3")]).await;
    for version in VERSIONS {
        let post = Post::lab("/lab/echo");
        let keys = [post.clone(), post.clone(), post.clone().key("two words")];
        for post in keys.into_iter().chain([post.without("idempotency-key")]) {
            let answer = version.send(&server, &post, "hello").await;
            assert_eq!((answer.status, answer.text(), answer.is_replay()), (200, "hello", false));
        }
    }
    assert_eq!((server.count("passed").await, server.live_entries().await), (8, 0));
    assert_eq!(server.executions("/lab/echo").await, 8);
}

#[tokio::test]
async fn enforce_is_what_it_does_unless_it_is_told() {
    for settings in [&[][..], &[("MODE", "enforce")]] {
        let server = Server::lab(settings).await;
        let post = Post::lab("/lab/echo");
        assert!(!server.send(post.body("")).await.is_replay());
        assert!(server.send(post.body("")).await.is_replay());
    }
}
