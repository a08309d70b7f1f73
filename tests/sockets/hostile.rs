//! Whatever comes, there is a prompt answer, nothing is left behind, and the next one is served.

use crate::support::{
    Answer, Post, Server,
    http1::{Cut, chunk},
};

const RUN: &str = r#"{"input": "hello"}"#;

/// Asserts that this is a handler's or the layer's 400.
#[track_caller]
fn assert_bad(answer: &Answer, what: &str) {
    assert_eq!(answer.status, 400, "{what}: {answer:?}");
    assert!(!answer.is_replay());
}

#[tokio::test]
async fn bodies_that_are_no_run_are_refused_and_leave_nothing() {
    let server = Server::start(&[]).await;
    let member = |number: usize| format!("\"{number:x}\":0,");
    let many_members: String = (0..100_000).map(member).collect();
    let same_member = "\"input\":1,".repeat(100_000);
    let bodies: [(&str, Vec<u8>); 16] = [
        ("no bytes", b"".into()),
        ("white space", b" \r\n\t".into()),
        ("deep arrays", b"[".repeat(100_000)),
        ("deep and balanced arrays", [b"[".repeat(100_000), b"]".repeat(100_000)].concat()),
        ("deep objects", b"{\"input\":".repeat(100_000)),
        ("no UTF-8", b"{\"input\": \"\xff\xfe\"}".into()),
        ("a lone surrogate", b"{\"input\": \"\\ud800\"}".into()),
        ("nothing but zeros", vec![0; 100_000]),
        ("many members, no run", format!("{{{many_members}\"x\":0}}").into()),
        ("one member many times", format!("{{{same_member}\"x\":0}}").into()),
        ("a huge number", format!("{{\"input\": {}}}", "9".repeat(500_000)).into()),
        ("a huge exponent", b"{\"input\": \"x\", \"seconds\": 1e99999999999999999999}".into()),
        ("a run cut short", b"{\"input\": \"hello\"".into()),
        ("two runs", format!("{RUN}{RUN}").into()),
        ("a run with a mark before it", format!("\u{feff}{RUN}").into()),
        ("a form", b"input=hello".into()),
    ];
    for (what, body) in &bodies {
        assert_bad(&server.send(Post::run().body(body)).await, what);
        assert_bad(&server.send(Post::run().chunks(body.chunks(65_536))).await, what);
    }
    server.assert_left(0, 0).await;
    server.send(Post::run().body(RUN)).await.run_id();
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_run_with_a_hundred_thousand_members_more_is_one_run() {
    let server = Server::start(&[]).await;
    let member = |number: usize| format!(",\"{number:x}\":0");
    let members: String = (0..100_000).map(member).collect();
    let forth = format!("{{\"input\":\"hello\"{members}}}");
    let members: String = (0..100_000).rev().map(member).collect();
    let back = format!("{{\"input\":\"hello\"{members}}}");
    let first = server.send(Post::run().body(forth)).await;
    let again = server.send(Post::run().body(back)).await;
    assert!(again.is_replay());
    assert_eq!(again.lasting(), first.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_wrong_or_missing_content_type_is_the_handlers_matter() {
    let server = Server::start(&[]).await;
    for (number, kind) in
        ["text/plain", "application/xml", "application/json;", "\u{e9}", ""].into_iter().enumerate()
    {
        let request = Post::run().key(format!("key-{number}")).set("content-type", kind);
        assert_bad(&server.send(request.body("input=hello")).await, kind);
        let first = server.send(request.body(RUN)).await;
        assert_eq!(server.send(request.body(RUN)).await.run_id(), first.run_id());
    }
    let without = Post::run().without("content-type");
    let first = server.send(without.body(RUN)).await;
    assert_eq!(server.send(without.body(RUN)).await.run_id(), first.run_id());
}

#[tokio::test]
async fn a_stream_that_never_ends_is_cut_off() {
    let server = Server::start(&[]).await;
    for (request, size) in [
        (Post::run(), 64 * 1024),
        (Post::run(), 1024),
        (Post::run().without("idempotency-key"), 64 * 1024),
    ] {
        let mut connection = server.connect().await;
        connection.write(request.with("transfer-encoding", "chunked").head()).await;
        let upload = chunk(&vec![b' '; size]);
        // Far more than the limit and all buffers on the way: it ends because the server ends it.
        let most = 64 * 1024 * 1024 / size;
        let mut written = 0;
        while written < most && connection.try_write(&upload).await.is_ok() {
            written += 1;
        }
        assert!(written < most, "the server takes whatever comes");
        // The answer may have been lost with the connection; it is no other.
        match connection.try_answer().await {
            Ok(answer) => assert!(matches!(answer.status, 400 | 413), "{answer:?}"),
            Err(cut) => assert_eq!(cut, Cut::Before),
        }
    }
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn what_follows_a_body_that_lies_about_its_length_is_no_request() {
    let server = Server::start(&[]).await;
    let mut connection = server.connect().await;
    // The first ten bytes are no run; what comes after them is no request.
    let request = [&Post::run().head_for(10)[..], RUN.as_bytes(), b"\r\n\r\n"].concat();
    connection.write(request).await;
    assert_bad(&connection.answer().await, "the body as long as it says");
    assert_eq!(connection.answer().await.status, 400, "what is no request");
    assert_eq!(connection.rest().await, b"");
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn requests_whose_framing_is_in_doubt_are_refused() {
    let server = Server::start(&[]).await;
    let run = Post::run();
    let length = RUN.len().to_string();
    let framings = [
        ("two lengths", run.clone().with("content-length", "5").with("content-length", &length)),
        ("a negative length", run.clone().with("content-length", "-1")),
        ("a length that is no number", run.clone().with("content-length", "x")),
        ("a length past all numbers", run.clone().with("content-length", "9".repeat(30))),
        ("a coding that is not chunked", run.clone().with("transfer-encoding", "identity")),
    ];
    for (what, request) in framings {
        let mut connection = server.connect().await;
        connection.write([&request.head()[..], RUN.as_bytes()].concat()).await;
        let answer = connection.answer().await;
        assert!((400..500).contains(&answer.status), "{what}: {answer:?}");
    }
    for broken in ["x\r\n", "-1\r\n", "5\r\n{}\r\n\r\n\r\n0\r\n\r\n", "ffffffffffffffffff\r\n"] {
        let mut connection = server.connect().await;
        let head = run.clone().with("transfer-encoding", "chunked").head();
        connection.write([&head[..], broken.as_bytes()].concat()).await;
        connection.answer().await.assert_refused(400, "idempotency_body_unreadable");
    }
    server.assert_left(0, 0).await;
}

#[tokio::test]
async fn heads_that_are_no_http_are_refused() {
    let server = Server::start(&[]).await;
    for head in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"nonsense\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nidempotency-key: a\x00b\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nidempotency-key : k\r\n\r\n",
    ] {
        let mut connection = server.connect().await;
        connection.write(head).await;
        connection.finish_writing().await;
        if let Ok(answer) = connection.try_answer().await {
            assert!((400..500).contains(&answer.status), "{answer:?}");
        }
    }
    server.assert_left(0, 0).await;
}
