//! A retry gets the first answer again, and the work is done once.

use crate::support::{Post, Server, eventually, get, http1::Framing};

#[tokio::test]
async fn a_retry_gets_the_same_answer_marked_and_starts_nothing() {
    let server = Server::start(&[]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let first = server.send(&request).await;
    let again = server.send(&request).await;

    let id = first.run_id();
    assert!(!first.is_replay() && again.is_replay());
    assert_eq!(again.lasting(), first.lasting());
    assert_eq!(again.framing, Framing::Length(first.body.len()));
    assert_eq!(server.started().await, 1);
    let run = server.json(&format!("/v1/runs/{id}")).await;
    assert_eq!((&run["run_id"], &run["input"]), (&id.into(), &"hello".into()));
}

#[tokio::test]
async fn a_hundred_replays_on_one_connection_are_all_the_same() {
    let server = Server::start(&[]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let first = server.send(&request).await;
    let mut connection = server.connect().await;
    for _ in 0..100 {
        connection.write(&request).await;
        let again = connection.answer().await;
        assert!(again.is_replay());
        assert_eq!(again.lasting(), first.lasting());
    }
    assert_eq!((server.started().await, server.count("replayed").await), (1, 100));
}

#[tokio::test]
async fn a_replay_has_one_date_and_it_is_its_own() {
    let server = Server::start(&[]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let first = server.send(&request).await;
    let first_date = first.header("date").expect("a date");
    // A date of the record would stay the same for ever; the server's own moves on in a second.
    eventually(async || {
        let again = server.send(&request).await;
        assert!(again.is_replay());
        (again.header("date").expect("one date") != first_date).then_some(())
    })
    .await;
}

#[tokio::test]
async fn other_work_under_the_same_key_is_a_conflict_and_changes_nothing() {
    let server = Server::start(&[]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let first = server.send(&request).await;
    let other = server.send(Post::run().body(r#"{"input": "other"}"#)).await;

    let problem = other.assert_refused(409, "idempotency_conflict");
    assert_eq!((&problem["retry"], &problem["type"]), (&"new-key".into(), &problem["type"]));
    assert_eq!(problem["error"]["type"], "idempotency_error");
    assert_eq!(other.header("stripe-should-retry"), Some("false"));
    assert_eq!(other.header("x-should-retry"), Some("false"));
    assert_eq!(other.header("cache-control"), Some("no-store"));
    assert!(!other.text().contains("hello"), "nothing of the first request: {other:?}");

    assert_eq!(server.send(&request).await.lasting(), first.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn json_that_means_the_same_is_the_same_request() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().body(r#"{"input": "hé", "seconds": 1}"#)).await;
    for same in [
        r#"{"seconds": 1, "input": "hé"}"#,
        r#"{"input":"hé","seconds":1}"#,
        "\n{\t\"seconds\" : 1 ,\r\n \"input\" : \"h\\u00e9\" } ",
    ] {
        let again = server.send(Post::run().body(same)).await;
        assert!(again.is_replay(), "{same}");
        assert_eq!(again.lasting(), first.lasting());
    }
    // Numbers compare by their text, and an absent member is not a null one.
    for other in [
        r#"{"input": "hé", "seconds": 1.0}"#,
        r#"{"input": "hé"}"#,
        r#"{"input": "hé", "seconds": null}"#,
    ] {
        let other = server.send(Post::run().body(other)).await;
        other.assert_refused(409, "idempotency_conflict");
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_form_is_the_same_work_but_not_the_same_request() {
    let server = Server::start(&[]).await;
    let form = Post::run().set("content-type", "application/x-www-form-urlencoded");
    let first = server.send(form.body("input=hello+world&seconds=0")).await;
    let again = server.send(form.body("input=hello+world&seconds=0")).await;
    assert_eq!(again.lasting(), first.lasting());
    assert!(again.is_replay());
    let run = server.json(&format!("/v1/runs/{}", first.run_id())).await;
    assert_eq!(run["input"], "hello world");

    // A form is compared by its bytes, and the type counts.
    for other in [
        form.body("seconds=0&input=hello+world"),
        Post::run().body("input=hello+world&seconds=0"),
        Post::run().body(r#"{"input": "hello world", "seconds": 0}"#),
    ] {
        server.send(other).await.assert_refused(409, "idempotency_conflict");
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn without_a_key_every_request_is_its_own() {
    let server = Server::start(&[]).await;
    let request = Post::run().without("idempotency-key").body(r#"{"input": "hello"}"#);
    let (first, second) = (server.send(&request).await, server.send(&request).await);
    assert_ne!(first.run_id(), second.run_id());
    assert!(!first.is_replay() && !second.is_replay());
    server.assert_left(2, 0).await;
}

#[tokio::test]
async fn a_get_with_a_key_passes_and_is_never_kept() {
    let server = Server::start(&[]).await;
    for started in 0..3 {
        let keyed_get = "GET /v1/runs HTTP/1.1\r\nhost: localhost\r\n\
                         authorization: Bearer alice\r\nidempotency-key: k\r\n\r\n";
        let list = server.send(keyed_get).await;
        assert!(!list.is_replay());
        assert_eq!(list.json()["started"], started);
        let unkeyed = Post::run().without("idempotency-key");
        server.send(unkeyed.body(r#"{"input": "hello"}"#)).await.run_id();
    }
    assert_eq!(server.live_entries().await, 0);
}

#[tokio::test]
async fn a_request_that_the_handler_refuses_is_not_kept_and_can_be_corrected() {
    let server = Server::start(&[]).await;
    for bad in [
        r#"{"input": 1}"#,
        "{}",
        "",
        r#"{"input": "x", "seconds": -1}"#,
        r#"{"input": "x", "seconds": 3601}"#,
        r#"{"input": "x", "seconds": 1e999}"#,
    ] {
        let refused = server.send(Post::run().body(bad)).await;
        assert_eq!(refused.status, 400, "{bad}: {refused:?}");
        assert_eq!(refused.json().get("code"), None, "it is the handler's own answer");
    }
    let corrected = server.send(Post::run().body(r#"{"input": "x"}"#)).await;
    assert!(!corrected.is_replay());
    corrected.run_id();
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_connection_goes_on_after_replays_and_after_refusals_that_have_read_the_body() {
    let server = Server::start(&[("CAPACITY", "1")]).await;
    let mut connection = server.connect().await;
    let mut send = async |request: Vec<u8>| {
        connection.write(request).await;
        connection.answer().await
    };
    let run = r#"{"input": "hello"}"#;
    let id = send(Post::run().body(run)).await.run_id();
    assert_eq!(send(Post::run().body(run)).await.run_id(), id);
    let conflict = send(Post::run().body(r#"{"input": "other"}"#)).await;
    conflict.assert_refused(409, "idempotency_conflict");
    let full = send(Post::run().key("another").body(run)).await;
    full.assert_refused(503, "idempotency_capacity");
    assert_eq!(send(Post::run().body("nonsense")).await.status, 409);
    assert_eq!(send(get("/v1/runs")).await.json()["started"], 1);
    assert!(send(Post::run().body(run)).await.is_replay());
}

#[tokio::test]
async fn requests_in_a_row_on_one_connection_are_answered_in_their_order() {
    let server = Server::start(&[]).await;
    let request = Post::run().body(r#"{"input": "hello"}"#);
    let other = Post::run().body(r#"{"input": "other"}"#);
    let mut connection = server.connect().await;
    connection.write([&request[..], &request, &other, &request].concat()).await;
    let first = connection.answer().await;
    let id = first.run_id();
    assert!(!first.is_replay());
    assert_eq!(connection.answer().await.run_id(), id);
    connection.answer().await.assert_refused(409, "idempotency_conflict");
    assert_eq!(connection.answer().await.run_id(), id);
}
