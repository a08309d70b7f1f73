//! Trailers come through, both ways, and come again, over HTTP/1.1 and HTTP/2.

use crate::support::{
    Post, Server, VERSIONS, Version,
    http2::{self, Http2},
};

/// The sum of the bytes of `{"n":1}`.
const CHECKSUM: &str = "533";

fn checksum() -> Vec<(String, Vec<u8>)> {
    vec![("x-checksum".to_owned(), CHECKSUM.into())]
}

#[tokio::test]
async fn an_answers_trailers_come_again_over_either_version() {
    for version in VERSIONS {
        let server = Server::lab(&[]).await;
        let post = Post::lab("/lab/trailers").with("te", "trailers");
        let first = version.send(&server, &post, "").await;
        assert_eq!((first.text(), first.is_replay()), (r#"{"n":1}"#, false));
        assert_eq!(first.header("trailer"), Some("x-checksum"));
        assert_eq!(first.trailers, checksum(), "{version:?}");
        for again in VERSIONS.into_iter().chain(VERSIONS) {
            let replay = again.send(&server, &post, "").await;
            assert!(replay.is_replay());
            assert_eq!(replay.content(), first.content(), "first {version:?}, then {again:?}");
        }
        assert_eq!(server.executions("/lab/trailers").await, 1);
    }
}

#[tokio::test]
async fn who_takes_no_trailers_over_http1_gets_the_same_without_them() {
    let server = Server::lab(&[]).await;
    let takes_none = Post::lab("/lab/trailers");
    for is_replay in [false, true] {
        let answer = server.send(takes_none.body("")).await;
        assert_eq!((answer.text(), answer.is_replay()), (r#"{"n":1}"#, is_replay));
        assert_eq!(answer.trailers, []);
    }
    // They were kept all the same, for whoever takes them.
    let takes_some = takes_none.with("te", "trailers");
    assert_eq!(server.send(takes_some.body("")).await.trailers, checksum());
    let over_http2 = Version::Http2.send(&server, &takes_some, "").await;
    assert_eq!((over_http2.trailers.clone(), over_http2.is_replay()), (checksum(), true));
}

#[tokio::test]
async fn a_requests_trailers_reach_the_handler_and_belong_to_the_request() {
    const LINES: [(&str, &str); 2] = [("x-first", "1"), ("x-second", "two, three")];
    let lines: Vec<_> =
        LINES.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect();
    let server = Server::lab(&[]).await;
    let post = Post::lab("/lab/echo").with("te", "trailers").with("trailer", "x-first, x-second");
    let request = |trailers| post.chunks_and_trailers([&b"hel"[..], b"lo"], trailers);
    let http2 = Http2::connect(server.addr).await;

    let first = server.send(request(&LINES)).await;
    assert_eq!((first.status, first.text(), first.is_replay()), (200, "hello", false));
    let mut named: Vec<_> = first.header("trailer").unwrap().split(", ").collect();
    named.sort_unstable();
    assert_eq!(named, ["x-first", "x-second"]);
    let mut trailers = first.trailers.clone();
    trailers.sort();
    assert_eq!(trailers, lines);
    let again = server.send(request(&LINES)).await;
    assert!(again.is_replay());
    assert_eq!(again.content(), first.content());
    let body = http2::with_trailers("hello", &LINES);
    let over_http2 = http2.send(http2::request(server.addr, &post, body)).await;
    assert!(over_http2.is_replay());
    assert_eq!(over_http2.into_answer().content(), first.content());

    // Without them, or with others, it is another request.
    for other in [&[][..], &LINES[..1], &[("x-first", "2"), LINES[1]]] {
        server.send(request(other)).await.assert_refused(409, "idempotency_conflict");
        let body = http2::with_trailers("hello", other);
        let over_http2 = http2.send(http2::request(server.addr, &post, body)).await;
        over_http2.assert_refused(409, "idempotency_conflict");
    }
    assert_eq!(server.executions("/lab/echo").await, 1);
}
