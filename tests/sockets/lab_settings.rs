//! A setting of the lab that makes no sense, by itself or beside another, stops it, and is named.

use crate::support::{Post, Server, server::run_to_its_end};

async fn assert_stops(settings: &[(&str, &str)]) {
    let output = run_to_its_end("lab", settings).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{settings:?}");
    for (name, _) in settings {
        assert!(said.contains(name), "{settings:?}: {said}");
    }
    assert!(!said.contains("panicked"), "{settings:?}: {said}");
    assert!(output.stdout.is_empty(), "{settings:?}: it never listened");
}

#[tokio::test]
async fn a_value_that_makes_no_sense_stops_it() {
    for (name, values) in [
        ("ADDR", &["nonsense", ""][..]),
        ("CAPACITY", &["0", "x"]),
        ("MAX_RUNS", &["0", "x"]),
        ("TTL_SECONDS", &["0", "-1", "nan"]),
        ("STORE", &["foo", "redis://127.0.0.1:1"]),
        ("PRESET", &["", "IETF", "openai"]),
        ("ON_FAILURE", &["", "ignore", "Hold"]),
        ("IN_FLIGHT", &["", "queue"]),
        ("WAIT_MS", &["", "0", "-1", "1.5", "10s", "18446744073709551616"]),
        ("REQUIRED", &["", "yes", "2"]),
        ("REQUEST_LIMIT", &["", "0", "-1", "1k", "18446744073709551615"]),
        ("RESPONSE_LIMIT", &["", "0", "-1", "18446744073709551615"]),
        ("STORED_BYTES", &["", "0", "-1", "18446744073709551615"]),
        ("BUFFERED_BYTES", &["", "0", "-1", "18446744073709551615"]),
        ("SCOPE_SHARE", &["", "0", "-1", "1001", "18446744073709551615"]),
        ("MODE", &["", "on", "Shadow"]),
        ("ON_LEAVE", &["", "stay"]),
        ("FINISH_WITHIN_MS", &["", "0", "-1", "x"]),
        ("BODY_IDLE_MS", &["", "0", "-1", "x"]),
    ] {
        for value in values {
            assert_stops(&[(name, value)]).await;
        }
    }
}

#[tokio::test]
async fn settings_that_contradict_each_other_stop_it() {
    assert_stops(&[("WAIT_MS", "2000"), ("FINISH_WITHIN_MS", "1999")]).await;
    assert_stops(&[("SCOPE_SHARE", "6"), ("CAPACITY", "5")]).await;
    assert_stops(&[("REQUEST_LIMIT", "1001"), ("BUFFERED_BYTES", "1000")]).await;
}

#[tokio::test]
async fn settings_that_go_together_are_taken_and_defaults_give_way() {
    for settings in [
        &[("WAIT_MS", "2000"), ("FINISH_WITHIN_MS", "2000")][..],
        &[("FINISH_WITHIN_MS", "1")],
        &[("WAIT_MS", "1000000000")],
        &[("WAIT_MS", "2000"), ("FINISH_WITHIN_MS", "1000"), ("IN_FLIGHT", "reject")],
        &[("SCOPE_SHARE", "5"), ("CAPACITY", "5")],
        &[("SCOPE_SHARE", "1000")],
        &[("REQUEST_LIMIT", "1000"), ("BUFFERED_BYTES", "1000")],
        &[("BUFFERED_BYTES", "1000")],
        &[("REQUEST_LIMIT", "1000000000")],
        &[("STORED_BYTES", "1000000000000"), ("RESPONSE_LIMIT", "1000000000000")],
        &[("MAX_RUNS", "1"), ("TTL_SECONDS", "0.5"), ("STORE", "memory"), ("BODY_IDLE_MS", "1000")],
        &[("PRESET", "stripe"), ("MODE", "enforce"), ("ON_LEAVE", "cancel"), ("REQUIRED", "0")],
    ] {
        let server = Server::lab(settings).await;
        assert_eq!(server.send(Post::lab("/lab/echo").body("hello")).await.text(), "hello");
        assert!(server.send(Post::lab("/lab/echo").body("hello")).await.is_replay());
    }
}
