//! A setting that makes no sense stops the server, which says which one it is.

use std::net::TcpListener;

use crate::support::{Server, server::run_to_its_end};

async fn assert_stops(example: &str, name: &str, value: &str) {
    let output = run_to_its_end(example, &[(name, value)]).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{name}={value}");
    assert!(said.contains(name), "{name}={value}: {said}");
    assert!(!said.contains("panicked"), "{name}={value}: {said}");
    assert!(output.stdout.is_empty(), "{name}={value}: it never listened");
}

#[tokio::test]
async fn a_setting_that_makes_no_sense_stops_the_server_and_is_named() {
    for (name, values) in [
        ("CAPACITY", &["0", "-1", "x", "", "1.5", "1e3", "99999999999999999999"][..]),
        ("MAX_RUNS", &["0", "-1", "x", "", "18446744073709551615"]),
        ("TTL_SECONDS", &["0", "-0", "-1", "nan", "inf", "-inf", "x", "", "1e300", "1e-300"]),
        ("RUN_SECONDS", &["-1", "nan", "inf", "x", "", "3601"]),
        ("STORE", &["foo", "", "MEMORY", "redis://127.0.0.1:1", "postgres://127.0.0.1:1"]),
        ("ADDR", &["nonsense", "", "127.0.0.1", "127.0.0.1:99999", ":3000", "localhost:0"]),
    ] {
        for value in values {
            assert_stops("server", name, value).await;
        }
    }
}

#[tokio::test]
async fn a_store_that_is_not_available_is_refused_without_its_password() {
    for example in ["server", "lab"] {
        let address = "postgres://service:hunter2@db.internal/keys";
        let output = run_to_its_end(example, &[("STORE", address)]).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("STORE") && said.contains("memory"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

#[tokio::test]
async fn an_address_that_is_taken_stops_the_server() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    for example in ["server", "hyper"] {
        assert_stops(example, "ADDR", &addr).await;
    }
    assert_stops("hyper", "ADDR", "nonsense").await;
}

#[tokio::test]
async fn settings_at_their_bounds_are_taken() {
    for setting in [
        ("CAPACITY", "1"),
        ("CAPACITY", "1000000000"),
        ("MAX_RUNS", "1"),
        ("TTL_SECONDS", "0.001"),
        ("TTL_SECONDS", "1000000000"),
        ("RUN_SECONDS", "0"),
        ("RUN_SECONDS", "3600"),
        ("STORE", "memory"),
    ] {
        let server = Server::start(&[setting]).await;
        let debug = server.json("/debug/idempotency").await;
        let capacity = if setting.0 == "CAPACITY" { setting.1 } else { "1000" };
        assert_eq!(debug["capacity"].to_string(), capacity, "{setting:?}");
        let unkeyed = crate::support::Post::run().without("idempotency-key");
        server.send(unkeyed.body(r#"{"input": "hello"}"#)).await.run_id();
    }
}
