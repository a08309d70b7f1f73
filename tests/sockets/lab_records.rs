//! What a handler does with its own record; batches, whose parts have records of their own; and who
//! sees what.

use crate::support::{Post, Server, VERSIONS, eventually};

#[tokio::test]
async fn a_record_lives_for_as_long_as_its_handler_says() {
    let server = Server::lab(&[("TTL_SECONDS", "0.3")]).await;
    for version in VERSIONS {
        let longer = Post::lab("/lab/retain?seconds=3600").key(format!("{version:?}"));
        let usual = Post::lab("/lab/status/200").key(format!("{version:?}-usual"));
        let first = version.send(&server, &longer, "").await;
        assert_eq!((first.status, first.is_replay()), (200, false));
        assert_eq!(version.send(&server, &usual, "").await.status, 200);
        // When the other, born later, has ended, this one would have too.
        let has_ended =
            async || (!version.send(&server, &usual, "").await.is_replay()).then_some(());
        eventually(has_ended).await;
        let again = version.send(&server, &longer, "").await;
        assert!(again.is_replay());
        assert_eq!(again.content(), first.content());
    }

    let server = Server::lab(&[]).await;
    let shorter = Post::lab("/lab/retain?seconds=0.2");
    assert_eq!(server.send(shorter.body("")).await.json()["n"], 1);
    eventually(async || (server.live_entries().await == 0).then_some(())).await;
    assert_eq!(server.send(shorter.body("")).await.json()["n"], 2);

    for for_ever in ["1e300", "inf"] {
        let post = Post::lab(&format!("/lab/retain?seconds={for_ever}")).key(for_ever);
        assert_eq!(server.send(post.body("")).await.status, 200);
        assert!(server.send(post.body("")).await.is_replay(), "{for_ever}");
    }
    for no_time in ["-1", "nan", "x"] {
        let post = Post::lab(&format!("/lab/retain?seconds={no_time}")).key(no_time);
        assert_eq!(server.send(post.body("")).await.status, 400, "{no_time}");
    }
}

#[tokio::test]
async fn a_record_that_its_handler_ended_is_none() {
    let server = Server::lab(&[]).await;
    let post = Post::lab("/lab/expire");
    for (version, n) in VERSIONS.into_iter().chain(VERSIONS).zip(1..) {
        let answer = version.send(&server, &post, "").await;
        assert_eq!((answer.status, answer.is_replay()), (200, false));
        assert_eq!(answer.json()["n"], n);
        assert_eq!(server.live_entries().await, 0);
    }
}

#[tokio::test]
async fn without_a_key_there_is_no_record_to_speak_of() {
    let server = Server::lab(&[]).await;
    for path in ["/lab/retain?seconds=60", "/lab/expire", "/lab/effects", "/lab/outcome/final"] {
        for n in 1..=2 {
            let post = Post::lab(path).without("idempotency-key");
            let answer = server.send(post.body("")).await;
            assert_eq!((answer.status, &answer.json()["n"]), (200, &n.into()), "{path}");
        }
    }
    assert_eq!((server.live_entries().await, server.count("passed").await), (0, 8));
}

const PARTS: [&str; 2] = ["/lab/status/200?part=1", "/lab/status/200?part=2"];

#[tokio::test]
async fn a_batch_and_each_of_its_parts_have_records_of_their_own() {
    for (settings, key) in [(&[][..], "k"), (&[("PRESET", "ietf")], "\"k\"")] {
        for version in VERSIONS {
            let server = Server::lab(settings).await;
            let post = Post::lab("/lab/batch").key(key);
            let first = version.send(&server, &post, "").await;
            assert_eq!(first.status, 200);
            for part in 0..2 {
                let part = &first.json()["parts"][part];
                assert_eq!((&part["status"], &part["replayed"]), (&200.into(), &false.into()));
                assert_eq!(part["body"]["n"], 1);
            }
            assert_eq!(server.live_entries().await, 3);
            let again = version.send(&server, &post, "").await;
            assert!(again.is_replay());
            assert_eq!(again.content(), first.content());

            // A part can be asked for alone, by whoever sent the batch.
            for (number, path) in PARTS.into_iter().enumerate() {
                let part = Post::lab(path).key(format!("\"k-{}\"", number + 1));
                assert!(version.send(&server, &part, "").await.is_replay());
                let others = part.caller("bob");
                assert_eq!(version.send(&server, &others, "").await.json()["n"], 2);
                assert_eq!(server.executions(path).await, 2);
            }
            assert_eq!(server.executions("/lab/batch").await, 1);
        }
    }
}

#[tokio::test]
async fn a_part_that_was_done_before_its_batch_is_not_done_again() {
    let server = Server::lab(&[]).await;
    let part = Post::lab(PARTS[1]).key("k-2");
    assert_eq!(server.send(part.body("")).await.json()["n"], 1);
    let batch = server.send(Post::lab("/lab/batch").body("")).await.json();
    assert_eq!(batch["parts"][0]["replayed"], false);
    assert_eq!(batch["parts"][1]["replayed"], true);
    for path in PARTS {
        assert_eq!(server.executions(path).await, 1);
    }
}

#[tokio::test]
async fn the_parts_of_a_batch_need_room_too_and_those_without_keys_run_each_time() {
    let server = Server::lab(&[("MAX_RUNS", "1")]).await;
    let batch = server.send(Post::lab("/lab/batch").body("")).await.json();
    assert_eq!(
        (&batch["parts"][0]["status"], &batch["parts"][1]["status"]),
        (&429.into(), &429.into())
    );
    // Without a key, a part runs in the place of its batch.
    let unkeyed = Post::lab("/lab/batch").without("idempotency-key");
    for n in 1..=2 {
        let batch = server.send(unkeyed.body("")).await.json();
        assert_eq!(batch["parts"][1]["body"]["n"], n);
    }
}

#[tokio::test]
async fn callers_have_keys_of_their_own_and_none_without_credentials() {
    let server = Server::lab(&[]).await;
    for version in VERSIONS {
        let post = Post::lab("/lab/echo").key(format!("{version:?}"));
        assert_eq!(version.send(&server, &post, "alice's").await.text(), "alice's");
        let bob = version.send(&server, &post.clone().caller("bob"), "bob's").await;
        assert_eq!((bob.text(), bob.is_replay()), ("bob's", false));
        let basic = post.clone().set("authorization", "Basic alice");
        assert!(version.send(&server, &basic, "alice's").await.is_replay());
        let session = post.clone().with("x-session-key", "other");
        let other_session = version.send(&server, &session, "alice's").await;
        other_session.assert_refused(409, "idempotency_conflict");
        let nobody = post.without("authorization");
        let answer = version.send(&server, &nobody, "alice's").await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")));
    }
    // Who looks in needs none.
    for path in ["/lab/executions", "/debug/idempotency"] {
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        assert_eq!(server.send(request).await.status, 200);
    }
    assert_eq!(server.executions("/lab/echo").await, 4);
}

#[tokio::test]
async fn executions_are_counted_by_path_and_query() {
    let server = Server::lab(&[]).await;
    let paths = ["/lab/status/200", "/lab/status/200?", "/lab/status/200?a=1", "/lab/status/201"];
    for (path, times) in paths.into_iter().zip(1..) {
        for n in 1..=times {
            let post = Post::lab(path).without("idempotency-key");
            assert_eq!(server.send(post.body("")).await.header("x-n"), Some(&*n.to_string()));
        }
        assert_eq!(server.executions(path).await, times, "{path}");
    }
    let refused = server.send(Post::lab("/lab/status/99").body("")).await;
    assert_eq!((refused.status, server.executions("/lab/status/99").await), (400, 0));
}
