//! What a retry gets after each kind of end, under each failure rule.

use crate::support::{Answer, Post, Server, VERSIONS, Version, eventually, http1::Cut};

/// What the retry of a request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It runs.
    Again,
    /// It gets the first answer.
    Replayed,
    /// It is told that nobody knows.
    Held,
}
use Then::{Again, Held, Replayed};

/// How each request ends, and what then, by the rule: release, hold, record.
const ENDS: [(&str, [Then; 3]); 19] = [
    ("/lab/status/500", [Again, Held, Replayed]),
    ("/lab/status/503", [Again, Held, Replayed]),
    ("/lab/status/408", [Again, Held, Replayed]),
    // There is no answer that could be recorded.
    ("/lab/panic", [Again, Held, Held]),
    ("/lab/panic?ms=50", [Again, Held, Held]),
    ("/lab/break", [Again, Held, Held]),
    // Not a failure: it was not done.
    ("/lab/status/404", [Again; 3]),
    ("/lab/status/429", [Again; 3]),
    ("/lab/status/402", [Replayed; 3]),
    // Effects have begun.
    ("/lab/effects?then=ok", [Replayed; 3]),
    ("/lab/effects?then=500", [Held, Held, Replayed]),
    ("/lab/effects?then=panic", [Held; 3]),
    ("/lab/effects?then=panic&ms=50", [Held; 3]),
    // The handler says it itself.
    ("/lab/outcome/final?status=500", [Replayed; 3]),
    ("/lab/outcome/final?status=404", [Replayed; 3]),
    ("/lab/outcome/not-executed?status=500", [Again; 3]),
    ("/lab/outcome/not-executed?status=201", [Again; 3]),
    ("/lab/outcome/unknown?status=500", [Held; 3]),
    ("/lab/outcome/unknown?status=202", [Held; 3]),
];

fn assert_same_end(first: &Result<Answer, Cut>, second: &Result<Answer, Cut>) {
    let status = |end: &Result<Answer, Cut>| end.as_ref().ok().map(|answer| answer.status);
    assert_eq!(status(first), status(second));
}

async fn assert_ends(settings: &[(&str, &str)], rule: usize) {
    let server = &Server::lab(settings).await;
    let one = async |version: Version, end: &str, then: Then| {
        let seen = format!("{end} over {version:?} under {settings:?}");
        let sign = if end.contains('?') { '&' } else { '?' };
        let path = format!("{end}{sign}over={version:?}");
        let post = Post::lab(&path).key(path.as_bytes());
        let first = version.try_send(server, &post, "").await;
        assert_eq!(first.is_err(), end.contains("panic") || end.contains("break"), "{seen}");
        assert!(!first.as_ref().is_ok_and(Answer::is_replay));
        // A client that sees its answer cut may be faster than the end of the claim: then its retry
        // waits for that.
        let second = version.try_send(server, &post, "").await;
        let executions = server.executions(&path).await;
        match then {
            Again => {
                assert_same_end(&first, &second);
                assert!(!second.is_ok_and(|answer| answer.is_replay()), "{seen}");
                assert_eq!(executions, 2, "{seen}");
            }
            Replayed => {
                let (first, second) = (first.unwrap(), second.unwrap());
                assert!(second.is_replay(), "{seen}");
                assert_eq!(second.content(), first.content(), "{seen}");
                assert_eq!(executions, 1, "{seen}");
            }
            Held => {
                let problem = second.unwrap().assert_refused(409, "idempotency_outcome_unknown");
                assert_eq!((&problem["retry"], executions), (&"never".into(), 1), "{seen}");
            }
        }
    };
    for (end, then) in ENDS {
        for version in VERSIONS {
            one(version, end, then[rule]).await;
        }
    }
    let kept = ENDS.iter().filter(|(_, then)| then[rule] != Again).count() * 2;
    eventually(async || (server.live_entries().await == kept as u64).then_some(())).await;
}

#[tokio::test]
async fn by_default_a_failure_frees_the_key() {
    assert_ends(&[], 0).await;
}

#[tokio::test]
async fn under_release_a_failure_frees_the_key() {
    assert_ends(&[("ON_FAILURE", "release")], 0).await;
}

#[tokio::test]
async fn under_hold_a_failure_shuts_the_key() {
    assert_ends(&[("ON_FAILURE", "hold")], 1).await;
}

#[tokio::test]
async fn under_record_a_failure_is_an_answer_where_there_is_one() {
    assert_ends(&[("ON_FAILURE", "record")], 2).await;
}

#[tokio::test]
async fn what_is_held_is_free_when_the_retention_is_over() {
    let server = Server::lab(&[("ON_FAILURE", "hold"), ("TTL_SECONDS", "2")]).await;
    let post = Post::lab("/lab/status/500");
    assert_eq!(server.send(post.body("")).await.json()["n"], 1);
    server.send(post.body("")).await.assert_refused(409, "idempotency_outcome_unknown");
    eventually(async || {
        let answer = server.send(post.body("")).await;
        (answer.status == 500).then(|| assert_eq!(answer.json()["n"], 2))
    })
    .await;
}

#[tokio::test]
async fn a_retry_that_waits_for_a_failure_runs_after_it_under_release_and_only_then() {
    for (rule, then) in [("release", Again), ("hold", Held), ("record", Replayed)] {
        for version in VERSIONS {
            let server = Server::lab(&[("ON_FAILURE", rule)]).await;
            let path = "/lab/status/500?ms=300";
            let post = Post::lab(path);
            let retry = async {
                server.has_run(path, 1).await;
                version.send(&server, &post, "").await
            };
            let (first, retry) = tokio::join!(version.send(&server, &post, ""), retry);
            assert_eq!((first.status, &first.json()["n"]), (500, &1.into()));
            match then {
                Again => assert_eq!((retry.status, &retry.json()["n"]), (500, &2.into())),
                Held => drop(retry.assert_refused(409, "idempotency_outcome_unknown")),
                Replayed => assert_eq!(retry.content(), first.content()),
            }
            assert_eq!(retry.is_replay(), then == Replayed);
        }
    }
}

#[tokio::test]
async fn a_client_sees_a_stream_that_breaks_as_cut_after_what_had_come() {
    let server = Server::lab(&[]).await;
    let mut connection = server.connect().await;
    connection.write(Post::lab("/lab/break").body("")).await;
    let cut = connection.try_answer().await;
    assert_eq!(cut, Err(Cut::Within { body: r#"{"n": 1, "half": "#.len() }));
}
