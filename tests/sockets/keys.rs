//! What is a key, as it comes over the wire, and what is refused before anything else is looked at.

use crate::support::{Answer, Post, Server};

const RUN: &str = r#"{"input": "hello"}"#;

#[tokio::test]
async fn a_key_of_255_bytes_is_taken_and_a_longer_one_is_refused() {
    let server = Server::start(&[]).await;
    for (key, taken) in [
        ("x".repeat(255), true),
        ("x".repeat(256), false),
        (format!("\"{}\"", "y".repeat(255)), true),
        (format!("\"{}\"", "y".repeat(256)), false),
        // Counted as decoded: 510 bytes on the wire.
        (format!("\"{}\"", "\\\"".repeat(255)), true),
        (format!("\"{}\"", "\\\"".repeat(256)), false),
        ("z".repeat(64 * 1024), false),
    ] {
        // No body: of so long a head's request, what hyper has not read would cut off the answer.
        let request = Post::run().key(&key);
        let answer = server.send(request.body("")).await;
        if taken {
            assert_eq!(answer.json().get("code"), None, "it has come to the handler");
            let first = server.send(request.body(RUN)).await;
            assert_eq!(server.send(request.body(RUN)).await.run_id(), first.run_id());
        } else {
            assert_invalid(&answer, &key);
        }
    }
    server.assert_left(3, 3).await;
}

#[track_caller]
fn assert_invalid(answer: &Answer, key: &str) {
    let problem = answer.assert_refused(400, "idempotency_key_invalid");
    assert_eq!(problem["retry"], "new-key");
    assert_eq!(answer.header("stripe-should-retry"), Some("false"));
    assert!(key.len() < 4 || !answer.text().contains(key), "the key is not repeated: {answer:?}");
}

#[tokio::test]
async fn what_is_no_key_is_refused_with_the_body_unread() {
    let server = Server::start(&[]).await;
    let keys: [&[u8]; 16] = [
        b"",
        b" \t ",
        b"two words",
        b"tab\there",
        b"a,b",
        b"back\\slash",
        b"quote\"inside",
        b"\"open",
        b"\"\"",
        b"\"two\" \"strings\"",
        b"\"one\", \"two\"",
        b"\"tab\tinside\"",
        b"\"not \\an escape\"",
        "schl\u{fc}ssel".as_bytes(),
        b"latin-\xe9",
        "\"schl\u{fc}ssel\"".as_bytes(),
    ];
    for key in keys {
        let mut connection = server.connect().await;
        connection.write(Post::run().key(key).head_expecting(RUN.len())).await;
        assert_invalid(&connection.answer().await, &String::from_utf8_lossy(key));
        assert_eq!(connection.rest().await, b"", "and nothing follows, no `100 Continue` either");
    }
    assert_eq!(server.count("rejected_key").await, 16);
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn two_lines_are_refused_even_if_they_say_the_same() {
    let server = Server::start(&[]).await;
    for second in ["k", "\"k\"", "other", ""] {
        let answer = server.send(Post::run().with("idempotency-key", second).body(RUN)).await;
        assert_invalid(&answer, second);
    }
    let split_by_case = Post::run().with("IDEMPOTENCY-KEY", "k");
    assert_invalid(&server.send(split_by_case.body(RUN)).await, "k");
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn every_spelling_of_a_key_is_the_same_key() {
    let server = Server::start(&[]).await;
    let bare = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    let first = server.send(Post::run().key(bare).body(RUN)).await;
    for same in [
        format!("\"{bare}\""),
        format!("  {bare}\t"),
        format!("\t \"{bare}\" "),
        format!("\"{bare}\";a=1;b=\"x\""),
    ] {
        let again = server.send(Post::run().key(&same).body(RUN)).await;
        assert!(again.is_replay(), "{same:?}");
        assert_eq!(again.lasting(), first.lasting());
    }
    for other in [bare.to_uppercase(), format!("{bare}0"), format!("\" {bare}\"")] {
        let answer = server.send(Post::run().key(&other).body(RUN)).await;
        assert!(!answer.is_replay(), "{other:?}");
        assert_ne!(answer.run_id(), first.run_id());
    }
    server.assert_left(4, 4).await;
}
