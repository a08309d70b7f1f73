//! A record lives as long as it is to, and the run that it points to at least as long.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{Post, Server, eventually, get};

#[tokio::test]
async fn after_its_retention_a_key_is_new_work_and_the_old_run_is_forgotten() {
    let server = Server::start(&[("TTL_SECONDS", "1"), ("RUN_SECONDS", "0")]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let before = Instant::now();
    let first = server.send(&request).await;
    let id = first.run_id();
    let second = eventually(async || {
        let answer = server.send(&request).await;
        if !answer.is_replay() {
            return Some(answer);
        }
        // Replays do not make it live longer, or this would never end.
        assert_eq!(answer.lasting(), first.lasting());
        None
    })
    .await;
    assert_ne!(second.run_id(), id);
    assert!(before.elapsed() >= Duration::from_secs(1), "it did not live as long as it was to");
    assert_eq!(server.started().await, 2, "started runs are counted for ever");

    let path = format!("/v1/runs/{id}");
    eventually(async || (server.send(get(&path)).await.status == 404).then_some(())).await;
    eventually(async || (server.live_entries().await == 0).then_some(())).await;
    eventually(async || {
        let runs = server.json("/v1/runs").await;
        (runs["runs"].as_array().unwrap().is_empty()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_run_can_be_asked_for_as_long_as_its_key_replays() {
    let server = Server::start(&[("TTL_SECONDS", "0.5"), ("RUN_SECONDS", "0")]).await;
    for round in 0..4 {
        let request = Post::run().key(format!("key-{round}")).body(r#"{"input": "hello"}"#);
        let id = server.send(&request).await.run_id();
        let path = get(&format!("/v1/runs/{id}"));
        let mut connection = server.connect().await;
        loop {
            // In one go, so that nothing comes between the two: first the run, then its key.
            connection.write([&path[..], &request].concat()).await;
            let (run, again) = (connection.answer().await, connection.answer().await);
            if !again.is_replay() {
                break;
            }
            assert_eq!(again.run_id(), id);
            assert_eq!(run.status, 200, "the key still replays a run that is forgotten");
        }
    }
}

#[tokio::test]
async fn a_run_that_outlives_its_record_can_be_asked_for_to_its_end() {
    let server = Server::start(&[("TTL_SECONDS", "0.2")]).await;
    let request = Post::run().body(r#"{"input": "hello", "seconds": 3600}"#);
    let id = server.send(&request).await.run_id();
    let second = eventually(async || {
        let answer = server.send(&request).await;
        (!answer.is_replay()).then_some(answer)
    })
    .await;
    assert_ne!(second.run_id(), id);
    let run = server.json(&format!("/v1/runs/{id}")).await;
    assert_eq!(run["status"], "started");
}

#[tokio::test]
async fn a_run_without_a_key_is_forgotten_too() {
    let server = Server::start(&[("TTL_SECONDS", "0.2"), ("RUN_SECONDS", "0")]).await;
    let request = Post::run().without("idempotency-key").body(r#"{"input": "hello"}"#);
    let path = format!("/v1/runs/{}", server.send(request).await.run_id());
    eventually(async || (server.send(get(&path)).await.status == 404).then_some(())).await;
    assert_eq!(server.started().await, 1);
}
