//! A replay is the first answer again: status, header lines, body; whichever version the first
//! request and its retries come over.

use crate::support::{Post, Server, VERSIONS, Version, http1::Framing};

/// First over one version, then again over each.
async fn sent_thrice(
    server: &Server,
    version: Version,
    post: &Post,
    body: &[u8],
) -> (crate::support::Answer, [crate::support::Answer; 2]) {
    let first = version.send(server, post, body).await;
    assert!(!first.is_replay(), "{first:?}");
    let again = [
        Version::Http1.send(server, post, body).await,
        Version::Http2.send(server, post, body).await,
    ];
    (first, again)
}

#[tokio::test]
async fn header_lines_come_again_in_number_order_and_bytes() {
    const ONE_EXCHANGE: [&str; 2] = ["set-cookie", "www-authenticate"];
    for version in VERSIONS {
        let server = Server::lab(&[]).await;
        let (first, again) = sent_thrice(&server, version, &Post::lab("/lab/headers"), b"").await;
        assert_eq!((first.status, first.text()), (201, "n\n1\n"));
        assert_eq!(first.header("date"), Some("Tue, 01 Jan 2019 00:00:00 GMT"));
        for name in ONE_EXCHANGE {
            assert_eq!(first.lines(name).len(), 1, "the first caller gets {name}");
        }
        let mut expected = first.clone();
        expected.headers.retain(|(name, _)| !ONE_EXCHANGE.contains(&name.as_str()));
        for again in again {
            assert!(again.is_replay());
            assert_eq!(again.content(), expected.content(), "{version:?}");
            let value = |name: &str| again.header(name).unwrap();
            assert_eq!(value("content-type"), "text/csv; charset=utf-8");
            assert_eq!(value("location"), "/lab/headers/1");
            assert_eq!(value("etag"), "\"lab-1\"");
            assert_eq!(value("cache-control"), "private, max-age=60");
            assert_eq!(value("content-disposition"), "attachment; filename=\"last, first.csv\"");
            let links =
                ["</lab/headers?page=2>; rel=\"next\"", "</lab/headers?page=9>; rel=\"last\""];
            assert_eq!(again.lines("link"), links);
            let latin = again.headers.iter().find(|(name, _)| name == "x-latin");
            assert_eq!(latin.unwrap().1, b"caf\xe9 \xff");
            assert_ne!(value("date"), "Tue, 01 Jan 2019 00:00:00 GMT", "it is this message's own");
        }
        assert_eq!(server.executions("/lab/headers").await, 1);
    }
}

#[tokio::test]
async fn every_status_that_says_done_comes_again() {
    let server = Server::lab(&[]).await;
    let done = (200..=208).chain([226]).chain(300..=308).chain([399, 402]);
    for (status, version) in done.flat_map(|status| VERSIONS.map(|version| (status, version))) {
        let path = format!("/lab/status/{status}?over={version:?}");
        let post = Post::lab(&path).key(format!("{status}-{version:?}"));
        let (first, again) = sent_thrice(&server, version, &post, b"").await;
        assert_eq!(first.status, status);
        assert_eq!(first.header("x-n"), Some("1"));
        let is_empty = [204, 205, 304].contains(&status);
        assert_eq!(first.text(), if is_empty { "" } else { r#"{"n":1}"# }, "{status}");
        for again in again {
            assert!(again.is_replay(), "{status} over {version:?}: {again:?}");
            assert_eq!(again.content(), first.content());
        }
        assert_eq!(server.executions(&path).await, 1, "{status}");
    }
}

#[tokio::test]
async fn every_status_that_says_not_done_runs_again() {
    let server = Server::lab(&[]).await;
    let not_done = [400, 401, 403, 404, 405, 409, 410, 418, 422, 429, 451, 408, 500, 502, 503, 599];
    for (status, version) in
        not_done.into_iter().flat_map(|status| VERSIONS.map(|version| (status, version)))
    {
        let path = format!("/lab/status/{status}?over={version:?}");
        let post = Post::lab(&path);
        for n in 1..=2 {
            let answer = version.send(&server, &post, "").await;
            assert_eq!((answer.status, answer.is_replay()), (status, false));
            assert_eq!(answer.json()["n"], n, "{status} over {version:?}");
        }
    }
    assert_eq!(server.live_entries().await, 0);
}

#[tokio::test]
async fn statuses_without_a_body_are_framed_as_such_every_time() {
    let server = Server::lab(&[]).await;
    for status in [204, 304] {
        let post = Post::lab(&format!("/lab/status/{status}")).key(status.to_string());
        // On one connection, which a body would throw out of step.
        let mut connection = server.connect().await;
        for is_replay in [false, true, true] {
            connection.write(post.body("")).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.is_replay()), (status, is_replay));
            assert_eq!(answer.framing, Framing::None);
        }
    }
}

#[tokio::test]
async fn bodies_up_to_the_limit_come_again_whole() {
    const LIMIT: usize = 50_000;
    let server = Server::lab(&[("RESPONSE_LIMIT", "50000")]).await;
    for (size, chunked) in
        [0, 1, 16_384, 16_385, LIMIT - 1, LIMIT].into_iter().flat_map(|size| [(size, 0), (size, 1)])
    {
        for version in VERSIONS {
            let path = format!("/lab/large?bytes={size}&chunked={chunked}");
            let post = Post::lab(&path).key(format!("{size}-{chunked}-{version:?}"));
            let (first, again) = sent_thrice(&server, version, &post, b"").await;
            if version == Version::Http1 {
                let known = Framing::Length(size);
                assert_eq!(first.framing, if chunked == 1 { Framing::Chunked } else { known });
            }
            assert_eq!((first.status, first.body.len()), (200, size));
            for again in again {
                assert!(again.is_replay(), "{path}");
                assert_eq!(again.content(), first.content(), "{path}");
                // Whatever it was the first time, it is known now.
                assert_eq!(again.header("content-length"), Some(&*size.to_string()), "{path}");
            }
        }
    }
}

#[tokio::test]
async fn a_body_over_the_limit_comes_whole_and_its_retries_are_told_so() {
    for (settings, limit) in [(&[("RESPONSE_LIMIT", "50000")][..], 50_000), (&[][..], 1_048_576)] {
        let server = Server::lab(settings).await;
        for (chunked, version) in [0, 1].into_iter().flat_map(|x| VERSIONS.map(|v| (x, v))) {
            let over = limit + 1;
            let path = format!("/lab/large?bytes={over}&chunked={chunked}&over={version:?}");
            let post = Post::lab(&path).key(format!("{chunked}-{version:?}"));
            let (first, again) = sent_thrice(&server, version, &post, b"").await;
            let pattern = b"0123456789abcdef".iter().cycle().take(over);
            assert!(first.body.iter().eq(pattern), "{path}");
            for again in again {
                let problem = again.assert_refused(409, "idempotency_not_replayable");
                assert_eq!(problem["retry"], "never");
                assert_eq!(again.header("location"), first.header("location"));
            }
            assert_eq!(server.executions(&path).await, 1);
        }
        let post = Post::lab(&format!("/lab/large?bytes={limit}")).key("fits");
        let (_, again) = sent_thrice(&server, Version::Http1, &post, b"").await;
        assert!(again.iter().all(crate::support::Answer::is_replay));
    }
}

#[tokio::test]
async fn the_handler_gets_every_byte_and_its_answer_comes_again() {
    let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    for version in VERSIONS {
        let server = Server::lab(&[]).await;
        let post = Post::lab("/lab/echo").with("content-type", "image/x-\"odd\"; a=b");
        let (first, again) = sent_thrice(&server, version, &post, &bytes).await;
        assert!(first.body == bytes);
        assert_eq!(first.header("content-type"), Some("image/x-\"odd\"; a=b"));
        assert_eq!(first.header("x-n"), Some("1"));
        for again in again {
            assert!(again.is_replay());
            assert!(again.content() == first.content(), "{version:?}");
        }

        // The same, but for one bit of one byte.
        let mut other = bytes.clone();
        other[69_999] ^= 1;
        let conflict = version.send(&server, &post, &other).await;
        conflict.assert_refused(409, "idempotency_conflict");
        let no_type = version.send(&server, &Post::lab("/lab/echo").key("other"), "x").await;
        assert_eq!((no_type.text(), no_type.header("content-type")), ("x", None));
    }
}

#[tokio::test]
async fn a_request_body_is_taken_up_to_the_limit() {
    let server = Server::lab(&[("REQUEST_LIMIT", "1000")]).await;
    let (fits, over) = (vec![b'x'; 1000], vec![b'x'; 1001]);
    for version in VERSIONS {
        let post = Post::lab("/lab/echo").key(format!("{version:?}"));
        let refused = version.send(&server, &post, &over).await;
        let problem = refused.assert_refused(413, "idempotency_body_too_large");
        assert_eq!(problem["retry"], "never");
        let answer = version.send(&server, &post, &fits).await;
        assert_eq!((answer.status, answer.body.len()), (200, 1000));
        // A known key's record is not touched by what is too large to be read.
        version.send(&server, &post, &over).await.assert_refused(413, "idempotency_body_too_large");
        assert!(version.send(&server, &post, &fits).await.is_replay());
        // Without a key there is no limit.
        let unkeyed = post.without("idempotency-key");
        assert_eq!(version.send(&server, &unkeyed, &over).await.body.len(), 1001);
    }
    let chunked = Post::lab("/lab/echo").key("chunked");
    let refused = server.send(chunked.chunks(over.chunks(100))).await;
    refused.assert_refused(413, "idempotency_body_too_large");
    assert_eq!(server.send(chunked.chunks(fits.chunks(100))).await.body.len(), 1000);
}
