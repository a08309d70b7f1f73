//! What the server says of itself, to whoever asks.

use std::collections::BTreeMap;

use tower_idempotency::Disposition;

use crate::support::{Post, Server, http1::get_as};

const RUN: &str = r#"{"input": "hello"}"#;

fn without_credentials(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

#[tokio::test]
async fn every_disposition_is_counted_and_every_request_once() {
    let server = Server::start(&[("CAPACITY", "2"), ("MAX_RUNS", "3")]).await;
    let long = r#"{"input": "hello", "seconds": 3600}"#;
    let run = Post::run();
    for (request, status) in [
        (run.body(long), 202),
        (run.body(long), 202),
        (run.body(long), 202),
        (run.body(RUN), 409),
        (run.clone().key("bad").body("nonsense"), 400),
        (run.clone().key("two words").body(long), 400),
        (run.clone().key("second").body(long), 202),
        (run.clone().key("third").body(long), 503),
        (run.clone().without("idempotency-key").body(long), 202),
        (run.clone().key("fourth").body(long), 429),
        (run.clone().without("idempotency-key").body(long), 429),
        (run.clone().without("authorization").body(long), 401),
        (get_as("alice", "/v1/runs"), 200),
        (get_as("alice", "/v1/runs/run_0"), 404),
    ] {
        let answer = server.send(request).await;
        assert_eq!(answer.status, status, "{answer:?}");
    }
    let mut large = server.connect().await;
    large.write(run.head_for(2_000_000)).await;
    assert_eq!(large.answer().await.status, 413);

    let answer = server.send(without_credentials("/debug/idempotency")).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
    let debug = answer.json();
    let mut expected: BTreeMap<_, _> =
        Disposition::ALL.iter().map(|disposition| (disposition.name(), 0)).collect();
    expected.extend([
        ("executed", 3),
        ("replayed", 2),
        ("conflict", 1),
        ("rejected_key", 1),
        ("capacity", 1),
        ("passed", 3),
        ("ceiling", 2),
        ("too_large", 1),
    ]);
    assert_eq!(
        debug,
        serde_json::json!({
            "live_entries": 2,
            "in_flight": 0,
            "capacity": 2,
            "dispositions": expected,
        })
    );
}

#[tokio::test]
async fn the_runs_of_all_callers_are_listed() {
    let server = Server::start(&[("RUN_SECONDS", "3600")]).await;
    let empty = server.send(without_credentials("/debug/runs")).await;
    assert_eq!((empty.status, empty.json()), (200, serde_json::json!([])));
    let alice = server.send(Post::run().body(r#"{"input": "one"}"#)).await.run_id();
    let bob = Post::run().caller("bob").body(r#"{"input": "two", "seconds": 0}"#);
    let bob = server.send(bob).await.run_id();
    let runs = crate::support::eventually(async || {
        let runs = server.send(without_credentials("/debug/runs")).await.json();
        (runs[1]["status"] == "completed").then_some(runs)
    })
    .await;
    assert_eq!(
        runs,
        serde_json::json!([
            { "run_id": alice, "status": "started", "input": "one" },
            { "run_id": bob, "status": "completed", "input": "two" },
        ])
    );
    let of_bob = server.send(get_as("bob", "/v1/runs")).await.json();
    assert_eq!(of_bob, serde_json::json!({ "runs": [runs[1]], "started": 1 }));
}

#[tokio::test]
async fn the_front_page_says_what_to_try() {
    let server = Server::start(&[]).await;
    let page = server.send(without_credentials("/")).await;
    assert_eq!(page.status, 200);
    assert_eq!(page.header("content-type"), Some("text/plain; charset=utf-8"));
    assert!(page.text().contains("Idempotency-Key"));
}
