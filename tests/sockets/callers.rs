//! A caller only ever sees what is its own.

use crate::support::{Post, Server, get, http1::get_as};

const RUN: &str = r#"{"input": "hello"}"#;

#[tokio::test]
async fn two_callers_with_one_key_have_a_run_each() {
    let server = Server::start(&[]).await;
    let alice = server.send(Post::run().body(RUN)).await;
    let bob = server.send(Post::run().caller("bob").body(RUN)).await;
    assert!(!bob.is_replay());
    assert_ne!(bob.run_id(), alice.run_id());

    // Bob's other work under the key is a conflict with his own run, not with alice's.
    let other = Post::run().caller("carol").body(r#"{"input": "other"}"#);
    assert!(!server.send(&other).await.is_replay());
    for (caller, first) in [("alice", &alice), ("bob", &bob)] {
        let again = server.send(Post::run().caller(caller).body(RUN)).await;
        assert!(again.is_replay());
        assert_eq!(again.run_id(), first.run_id());
    }

    // Nor does bob find alice's run by its id.
    let path = format!("/v1/runs/{}", alice.run_id());
    assert_eq!(server.send(get(&path)).await.status, 200);
    assert_eq!(server.send(get_as("bob", &path)).await.status, 404);
    let runs = server.send(get_as("bob", "/v1/runs")).await.json();
    assert_eq!((&runs["started"], runs["runs"].as_array().unwrap().len()), (&1.into(), 1));
}

#[tokio::test]
async fn every_scheme_of_credentials_names_the_same_caller() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().set("authorization", "Bearer alice").body(RUN)).await;
    for credentials in ["Basic alice", "bearer alice", "BEARER   alice"] {
        let again = server.send(Post::run().set("authorization", credentials).body(RUN)).await;
        assert!(again.is_replay(), "{credentials}");
        assert_eq!(again.run_id(), first.run_id());
    }
}

#[tokio::test]
async fn a_caller_with_two_lines_of_credentials_is_neither_of_the_two() {
    let server = Server::start(&[]).await;
    server.send(Post::run().body(RUN)).await.run_id();
    for other in ["Bearer alice", "Bearer bob"] {
        let both = Post::run().set("authorization", "Bearer alice").with("authorization", other);
        assert_eq!(server.send(both.body(RUN)).await.status, 401, "{other}");
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn without_credentials_a_caller_learns_nothing_and_leaves_nothing() {
    let server = Server::start(&[]).await;
    server.send(Post::run().key("known").body(RUN)).await.run_id();
    for credentials in [None, Some(""), Some("Bearer"), Some("Bearer  "), Some("Magic alice")] {
        let mut request = Post::run().without("authorization");
        if let Some(credentials) = credentials {
            request = request.with("authorization", credentials);
        }
        // Of a key that is known, of one that is not, of a broken one, and of no key at all.
        let answers = [
            server.send(request.clone().key("known").body(RUN)).await,
            server.send(request.clone().key("unknown").body(RUN)).await,
            server.send(request.clone().key("two words").body(RUN)).await,
            server.send(request.clone().without("idempotency-key").body(RUN)).await,
        ];
        for answer in &answers {
            assert_eq!(answer.status, 401, "{credentials:?}: {answer:?}");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
            assert_eq!(answer.lasting(), answers[0].lasting());
        }
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn without_credentials_the_body_is_not_read() {
    let server = Server::start(&[]).await;
    let mut connection = server.connect().await;
    connection.write(Post::run().without("authorization").head_expecting(1000)).await;
    assert_eq!(connection.answer().await.status, 401);
}

#[tokio::test]
async fn another_session_under_the_same_key_is_a_conflict() {
    let server = Server::start(&[]).await;
    let in_session = |name: &str| Post::run().with("x-session-key", name);
    let first = server.send(in_session("one").body(RUN)).await;
    assert_eq!(server.send(in_session("one").body(RUN)).await.run_id(), first.run_id());
    for other in [
        in_session("two"),
        in_session("ONE"),
        in_session("one").with("x-session-key", "one"),
        Post::run(),
    ] {
        server.send(other.body(RUN)).await.assert_refused(409, "idempotency_conflict");
    }
    server.assert_left(1, 1).await;
}
