//! A client that leaves in the midst of its handler or its stream: the work goes on, or is
//! cancelled, and its retry finds out.

use std::time::Duration;

use crate::support::{
    Connection, Post, Server, VERSIONS, Version, eventually,
    http2::{self, Http2},
};

/// What keeps a request going until it is dropped.
enum Client {
    Http1 { _connection: Connection },
    Http2 { request: tokio::task::JoinHandle<()> },
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Self::Http2 { request } = self {
            request.abort();
        }
    }
}

/// Sends a request, waits until its handler runs, and leaves.
async fn leave_handler(version: Version, server: &Server, path: &str, post: &Post) {
    let client = match version {
        Version::Http1 => {
            let mut connection = server.connect().await;
            connection.write(post.body("")).await;
            Client::Http1 { _connection: connection }
        }
        Version::Http2 => {
            let connection = Http2::connect(server.addr).await;
            let request = http2::request(server.addr, post, http2::whole(""));
            let request = async move { drop(connection.open(request).await) };
            Client::Http2 { request: tokio::spawn(request) }
        }
    };
    server.has_run(path, 1).await;
    drop(client);
}

/// Sends a request for a stream, waits until it has begun, and leaves.
async fn leave_stream(version: Version, server: &Server, post: &Post) {
    let mut coming = version.open(server, post, "").await;
    assert!(coming.next().await.starts_with("{\"line\":1,"));
}

#[tokio::test]
async fn a_handler_whose_client_left_finishes_and_a_retry_gets_its_answer() {
    for settings in [&[][..], &[("ON_LEAVE", "finish")]] {
        for version in VERSIONS {
            let server = Server::lab(settings).await;
            let path = "/lab/status/201?ms=300";
            leave_handler(version, &server, path, &Post::lab(path)).await;
            let retry = version.send(&server, &Post::lab(path), "").await;
            assert_eq!((retry.status, retry.is_replay()), (201, true));
            assert_eq!(server.executions(path).await, 1);
        }
    }
}

#[tokio::test]
async fn a_stream_whose_client_left_goes_on_and_a_retry_gets_all_of_it() {
    for version in VERSIONS {
        let server = Server::lab(&[]).await;
        let path = "/lab/stream?lines=4&ms=150";
        leave_stream(version, &server, &Post::lab(path)).await;
        let retry = version.send(&server, &Post::lab(path), "").await;
        assert!(retry.is_replay());
        assert_eq!(retry.text().lines().count(), 4);
        assert_eq!(server.executions(path).await, 1);
    }
}

#[tokio::test]
async fn under_cancel_work_ends_with_its_client_and_by_the_failure_rule() {
    for (rule, then_live) in [("release", 0), ("hold", 1), ("record", 1)] {
        for version in VERSIONS {
            let server = Server::lab(&[("ON_LEAVE", "cancel"), ("ON_FAILURE", rule)]).await;
            // Either would take an hour.
            let handler = "/lab/status/200?ms=3600000";
            let stream = "/lab/stream?lines=2&ms=3600000";
            let in_handler = Post::lab(handler).key("handler");
            let in_stream = Post::lab(stream).key("stream");
            leave_handler(version, &server, handler, &in_handler).await;
            leave_stream(version, &server, &in_stream).await;
            eventually(async || (server.in_flight().await == 0).then_some(())).await;
            assert_eq!(server.live_entries().await, 2 * then_live, "{rule} over {version:?}");
            if rule == "release" {
                leave_handler_again(&server, handler, &in_handler).await;
                let mut coming = version.open(&server, &in_stream, "").await;
                assert_eq!(coming.next().await, "{\"line\":1,\"n\":2}\n");
            } else {
                for post in [in_handler, in_stream] {
                    let retry = version.send(&server, &post, "").await;
                    retry.assert_refused(409, "idempotency_outcome_unknown");
                }
            }
        }
    }
}

async fn leave_handler_again(server: &Server, path: &str, post: &Post) {
    let mut connection = server.connect().await;
    connection.write(post.body("")).await;
    server.has_run(path, 2).await;
}

#[tokio::test]
async fn under_cancel_work_whose_effects_have_begun_is_held() {
    for version in VERSIONS {
        let server = Server::lab(&[("ON_LEAVE", "cancel")]).await;
        let path = "/lab/effects?ms=3600000";
        leave_handler(version, &server, path, &Post::lab(path)).await;
        eventually(async || (server.in_flight().await == 0).then_some(())).await;
        let retry = version.send(&server, &Post::lab(path), "").await;
        retry.assert_refused(409, "idempotency_outcome_unknown");
        assert_eq!(server.executions(path).await, 1);
    }
}

#[tokio::test]
async fn under_cancel_a_client_that_stays_gets_its_answer() {
    let server = Server::lab(&[("ON_LEAVE", "cancel")]).await;
    for version in VERSIONS {
        let post = Post::lab("/lab/stream?lines=3&ms=50").key(format!("{version:?}"));
        let first = version.send(&server, &post, "").await;
        assert_eq!(first.text().lines().count(), 3);
        assert!(version.send(&server, &post, "").await.is_replay());
    }
}

#[tokio::test]
async fn work_without_a_client_has_its_time_and_no_more() {
    let settings = [("FINISH_WITHIN_MS", "300"), ("ON_FAILURE", "hold"), ("IN_FLIGHT", "reject")];
    for version in VERSIONS {
        let server = Server::lab(&settings).await;
        let handler = "/lab/status/200?ms=3600000";
        let stream = "/lab/stream?lines=36000&ms=100";
        let in_handler = Post::lab(handler).key("handler");
        let in_stream = Post::lab(stream).key("stream");
        leave_handler(version, &server, handler, &in_handler).await;
        leave_stream(version, &server, &in_stream).await;
        eventually(async || (server.in_flight().await == 0).then_some(())).await;
        for post in [in_handler, in_stream] {
            let retry = version.send(&server, &post, "").await;
            retry.assert_refused(409, "idempotency_outcome_unknown");
        }
    }
}

#[tokio::test]
async fn work_whose_client_stays_has_all_the_time_that_it_takes() {
    let server = Server::lab(&[("FINISH_WITHIN_MS", "100")]).await;
    for version in VERSIONS {
        let handler = Post::lab("/lab/status/200?ms=500").key(format!("{version:?}"));
        assert_eq!(version.send(&server, &handler, "").await.status, 200);
        let stream = Post::lab("/lab/stream?lines=3&ms=200").key(format!("{version:?}-stream"));
        assert_eq!(version.send(&server, &stream, "").await.text().lines().count(), 3);
        for post in [handler, stream] {
            assert!(version.send(&server, &post, "").await.is_replay());
        }
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_shutdown_waits_for_work_whose_client_left() {
    use tokio::{net::TcpStream, time::timeout};

    let mut server = Server::lab(&[]).await;
    let path = "/lab/stream?lines=3&ms=1500";
    leave_stream(Version::Http1, &server, &Post::lab(path)).await;
    server.signal("TERM").await;
    // It listens no more while it is still at work.
    let closed = async || TcpStream::connect(server.addr).await.err().map(drop);
    eventually(closed).await;
    let still_running = timeout(Duration::from_millis(100), server.ended()).await;
    assert!(still_running.is_err(), "it ended at once: {still_running:?}");
    assert!(server.ended().await.success());
}
