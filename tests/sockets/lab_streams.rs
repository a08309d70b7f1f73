//! A stream is delivered as it comes; its retries wait for its end and get all of it.

use tokio::time::Instant;

use crate::support::{Post, Server, VERSIONS, Version, http1::Framing};

/// So long, in milliseconds, that nobody waits for it.
const HOUR: u32 = 3_600_000;

fn line(kind: &str, number: u32) -> String {
    let line = format!(r#"{{"line":{number},"n":1}}"#);
    if kind == "sse" { format!("data: {line}\n\n") } else { format!("{line}\n") }
}

fn stream(kind: &str, lines: u32, ms: u32) -> Post {
    Post::lab(&format!("/lab/stream?lines={lines}&ms={ms}&type={kind}"))
}

#[tokio::test]
async fn the_first_line_comes_long_before_the_last_is_made_and_a_retry_gets_all() {
    const LINES: u32 = 8;
    let server = Server::lab(&[]).await;
    let one = async |version: Version, kind: &'static str, content_type: &str| {
        let path = format!("/lab/stream?lines={LINES}&ms=300&type={kind}&over={version:?}");
        let post = Post::lab(&path).key(format!("{version:?}-{kind}"));
        let asked = Instant::now();
        let mut coming = version.open(&server, &post, "").await;
        let first = coming.next().await;
        let waited = asked.elapsed();
        // Eight lines take over two seconds: what has come by now has not waited for them.
        let in_flight = server.in_flight().await;
        assert!(in_flight > 0, "it is all over after {waited:?}");
        assert!(asked.elapsed().as_millis() < 300 * u128::from(LINES - 1), "{waited:?}");
        assert_eq!(first, line(kind, 1));
        let second = coming.next().await;
        assert_eq!(second, line(kind, 2));
        let rest = coming.rest().await;
        assert_eq!(rest.header("content-type"), Some(content_type));
        let whole = (1..=LINES).map(|number| line(kind, number)).collect::<String>();
        assert_eq!(format!("{first}{second}{}", rest.text()), whole);

        for again in VERSIONS {
            let again = again.send(&server, &post, "").await;
            assert!(again.is_replay());
            assert_eq!((again.status, again.text()), (200, &*whole));
            assert_eq!(again.header("content-type"), Some(content_type));
            assert_eq!(again.header("content-length"), Some(&*whole.len().to_string()));
        }
    };
    tokio::join!(
        one(Version::Http1, "ndjson", "application/x-ndjson"),
        one(Version::Http1, "sse", "text/event-stream"),
        one(Version::Http2, "ndjson", "application/x-ndjson"),
        one(Version::Http2, "sse", "text/event-stream"),
    );
    assert_eq!(server.count("executed").await, 4);
    assert_eq!(server.count("replayed").await, 8);
}

#[tokio::test]
async fn a_retry_in_the_midst_of_a_stream_waits_for_all_of_it() {
    for version in VERSIONS {
        let server = Server::lab(&[]).await;
        let post = stream("ndjson", 3, 700);
        let mut coming = version.open(&server, &post, "").await;
        assert_eq!(coming.next().await, line("ndjson", 1));
        let retry = version.send(&server, &post, "").await;
        assert!(retry.is_replay());
        let whole = (1..=3).map(|number| line("ndjson", number)).collect::<String>();
        assert_eq!(retry.text(), whole);
        // The retry was answered when the stream was recorded: its last line is there already.
        let rest = coming.rest().await;
        assert_eq!(rest.text(), &whole[whole.find('\n').unwrap() + 1..]);
        assert_eq!((server.count("waited").await, server.count("executed").await), (1, 1));
        server.has_run("/lab/stream?lines=3&ms=700&type=ndjson", 1).await;
    }
}

#[tokio::test]
async fn a_retry_that_does_not_wait_is_told_that_the_stream_goes_on() {
    let server = Server::lab(&[("IN_FLIGHT", "reject")]).await;
    for version in VERSIONS {
        let post = stream("sse", 2, HOUR).key(format!("{version:?}"));
        let mut coming = version.open(&server, &post, "").await;
        coming.next().await;
        let retry = version.send(&server, &post, "").await;
        let problem = retry.assert_refused(409, "idempotency_in_progress");
        assert_eq!(problem["retry"], "same-key");
        assert!(retry.retry_after() >= 1);
        let other = version.send(&server, &post, "other").await;
        other.assert_refused(409, "idempotency_conflict");

        // Whoever has seen the end of one need not wait: by then it has been recorded.
        let post = stream("sse", 2, 1).key(format!("{version:?}-over"));
        for is_replay in [false, true, true] {
            assert_eq!(version.send(&server, &post, "").await.is_replay(), is_replay);
        }
    }
}

#[tokio::test]
async fn a_stream_that_gets_too_long_is_delivered_and_leaves_word_that_it_was() {
    let server = Server::lab(&[("RESPONSE_LIMIT", "10")]).await;
    for version in VERSIONS {
        let post = stream("ndjson", 2, 1500).key(format!("{version:?}"));
        let mut coming = version.open(&server, &post, "").await;
        assert!(coming.next().await.len() > 10);
        assert_eq!(server.in_flight().await, 1, "how it ends is not known yet");
        assert_eq!(coming.rest().await.text().lines().count(), 1);
        let again = version.send(&server, &post, "").await;
        again.assert_refused(409, "idempotency_not_replayable");
    }
}

#[tokio::test]
async fn a_stream_of_nothing_comes_again_as_nothing() {
    let server = Server::lab(&[]).await;
    let post = stream("ndjson", 0, 0);
    let first = Version::Http1.send(&server, &post, "").await;
    assert_eq!((first.text(), first.framing), ("", Framing::Chunked));
    for version in VERSIONS {
        let again = version.send(&server, &post, "").await;
        assert_eq!((again.text(), again.is_replay()), ("", true));
        assert_eq!(again.header("content-length"), Some("0"));
    }
}

#[tokio::test]
async fn a_stream_has_given_its_place_back_with_its_head() {
    let server = Server::lab(&[("MAX_RUNS", "1")]).await;
    for (version, others) in VERSIONS.into_iter().zip(1..) {
        let post = stream("ndjson", 2, HOUR).key(format!("{version:?}"));
        let mut coming = version.open(&server, &post, "").await;
        coming.next().await;
        let other = Post::lab("/lab/echo").key(format!("{version:?}-other"));
        assert_eq!(version.send(&server, &other, "at once").await.text(), "at once");
        assert_eq!(server.in_flight().await, others, "the stream goes on");
    }
}

#[tokio::test]
async fn a_stream_without_a_key_streams_and_is_not_kept() {
    let server = Server::lab(&[]).await;
    let post = stream("ndjson", 2, 300).without("idempotency-key");
    for version in VERSIONS {
        let mut coming = version.open(&server, &post, "").await;
        coming.next().await;
        assert_eq!(coming.rest().await.text().lines().count(), 1);
    }
    assert_eq!((server.count("passed").await, server.live_entries().await), (2, 0));
}
