//! At a budget's end new keyed work is refused; what is there stays, and what needs no room goes on.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Answer, Post, Server, VERSIONS, Version, eventually};

fn large(key: &str, bytes: usize) -> Post {
    Post::lab(&format!("/lab/large?bytes={bytes}")).key(key)
}

#[track_caller]
fn assert_no_room(answer: &Answer) -> u64 {
    let problem = answer.assert_refused(503, "idempotency_capacity");
    assert_eq!(problem["retry"], "same-key");
    let wait = answer.retry_after();
    assert!((1..=60).contains(&wait), "{wait}");
    wait
}

#[tokio::test]
async fn when_records_take_all_stored_bytes_new_keys_are_refused_and_known_ones_are_not() {
    let server = Server::lab(&[("STORED_BYTES", "10000")]).await;
    // Below the budget a claim is let in, and what it completes with always fits.
    for key in ["a", "b"] {
        assert_eq!(server.send(large(key, 9_000).body("")).await.status, 200);
    }
    for version in VERSIONS {
        for refused in [large("c", 1), Post::lab("/lab/status/404").key("d")] {
            let wait = assert_no_room(&version.send(&server, &refused, "").await);
            assert_eq!(wait, 60, "the records live for an hour");
            assert_eq!(server.executions(refused.path()).await, 0);
        }
        for known in ["a", "b"] {
            let again = version.send(&server, &large(known, 9_000), "").await;
            assert_eq!((again.is_replay(), again.body.len()), (true, 9_000));
        }
        let unkeyed = large("", 9_000).without("idempotency-key");
        assert_eq!(version.send(&server, &unkeyed, "").await.status, 200);
    }
    assert_eq!((server.live_entries().await, server.count("capacity").await), (2, 4));
}

#[tokio::test]
async fn stored_bytes_come_back_when_records_end() {
    let server = Server::lab(&[("STORED_BYTES", "1000"), ("TTL_SECONDS", "1")]).await;
    for round in 0..2 {
        let first = large(&format!("{round}-a"), 2_000);
        assert_eq!(server.send(first.body("")).await.status, 200);
        let second = large(&format!("{round}-b"), 500);
        let refused = server.send(second.body("")).await;
        // Should it have taken so long that the record has ended, there is nothing to see.
        if refused.status == 503 {
            assert_eq!(assert_no_room(&refused), 1);
        }
        eventually(async || (server.send(second.body("")).await.status == 200).then_some(())).await;
        eventually(async || (server.live_entries().await == 0).then_some(())).await;
    }
    // What was told that it failed, or was too large to keep, takes next to nothing.
    let server = Server::lab(&[("STORED_BYTES", "3000"), ("RESPONSE_LIMIT", "1000")]).await;
    for key in ["a", "b", "c"] {
        assert_eq!(server.send(large(key, 5_000).body("")).await.body.len(), 5_000);
    }
    assert_eq!(server.live_entries().await, 3);
}

/// Sends an upload of so many bytes, with a key of its own.
async fn upload(version: Version, server: &Server, bytes: usize) -> Answer {
    static UPLOADS: AtomicUsize = AtomicUsize::new(0);
    let number = UPLOADS.fetch_add(1, Ordering::Relaxed);
    let post = Post::lab("/lab/echo").key(format!("upload-{number}"));
    version.send(server, &post, vec![b'x'; bytes]).await
}

#[tokio::test]
async fn uploads_share_the_bytes_that_may_be_buffered() {
    let server = Server::lab(&[("BUFFERED_BYTES", "1000")]).await;
    let attempt = AtomicUsize::new(0);
    // One has come in part, and another finds no room beside it. Whichever is read first has it, so
    // it may take more than one attempt.
    let (mut slow, refused) = eventually(async || {
        let attempt = attempt.fetch_add(1, Ordering::Relaxed);
        let mut slow = server.connect().await;
        slow.write(Post::lab("/lab/echo").key(format!("slow-{attempt}")).head_for(800)).await;
        slow.write([b'x'; 700]).await;
        let answer = upload(Version::Http1, &server, 700).await;
        if answer.status == 503 {
            return Some((slow, answer));
        }
        // Refused or not, it is over before the next attempt.
        let _refused_meanwhile = slow.try_write([b'x'; 100]).await;
        drop(slow.try_answer().await);
        None
    })
    .await;
    assert_no_room(&refused);
    for version in VERSIONS {
        assert_no_room(&upload(version, &server, 301).await);
        // What fits beside it is let in, and what has no key is not counted.
        assert_eq!(upload(version, &server, 300).await.status, 200);
        let unkeyed = Post::lab("/lab/echo").without("idempotency-key");
        assert_eq!(version.send(&server, &unkeyed, [b'x'; 2000]).await.status, 200);
    }
    slow.write([b'x'; 100]).await;
    assert_eq!(slow.answer().await.body.len(), 800);
    for version in VERSIONS {
        assert_eq!(upload(version, &server, 1000).await.status, 200);
    }
}

#[tokio::test]
async fn the_bodies_of_retries_that_wait_are_buffered_too() {
    let server = Server::lab(&[("BUFFERED_BYTES", "1000"), ("WAIT_MS", "300000")]).await;
    let path = "/lab/status/200?ms=3600000";
    let busy = Post::lab(path).body([b'x'; 700]);
    let mut first = server.connect().await;
    first.write(&busy).await;
    server.has_run(path, 1).await;
    // The handler has taken its body over: that of the first takes no room here.
    assert_eq!(upload(Version::Http1, &server, 1000).await.status, 200);
    let (retry, refused) = eventually(async || {
        let mut retry = server.connect().await;
        retry.write(&busy).await;
        let answer = upload(Version::Http1, &server, 700).await;
        (answer.status == 503).then_some((retry, answer))
    })
    .await;
    assert_no_room(&refused);
    drop(retry);
    let has_room = async || upload(Version::Http1, &server, 1000).await.status == 200;
    eventually(async || has_room().await.then_some(())).await;
}

#[tokio::test]
async fn a_scope_has_its_share_and_no_more() {
    let server = Server::lab(&[("SCOPE_SHARE", "2"), ("CAPACITY", "5")]).await;
    let echo = |caller: &str, key: &str| Post::lab("/lab/echo").caller(caller).key(key);
    for caller in ["alice", "bob"] {
        for key in ["a", "b"] {
            assert_eq!(server.send(echo(caller, key).body("")).await.status, 200);
        }
        for version in VERSIONS {
            assert_no_room(&version.send(&server, &echo(caller, "c"), "").await);
            assert!(version.send(&server, &echo(caller, "a"), "").await.is_replay());
            let unkeyed = echo(caller, "").without("idempotency-key");
            assert_eq!(version.send(&server, &unkeyed, "").await.status, 200);
        }
    }
    // The last place of all is for whoever comes.
    assert_eq!(server.send(echo("carol", "a").body("")).await.status, 200);
    assert_no_room(&server.send(echo("carol", "b").body("")).await);
    assert_eq!(server.live_entries().await, 5);
}

#[tokio::test]
async fn what_ends_in_nothing_takes_no_share() {
    let server = Server::lab(&[("SCOPE_SHARE", "1")]).await;
    for path in ["/lab/status/404", "/lab/status/500", "/lab/expire", "/lab/outcome/not-executed"] {
        for version in VERSIONS {
            let post = Post::lab(path).key(format!("{path}-{version:?}"));
            assert!(version.send(&server, &post, "").await.status != 503, "{path}");
        }
    }
    assert_eq!(server.live_entries().await, 0);
}
