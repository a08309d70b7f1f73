//! Over HTTP/2 it is all the same: many requests on one connection, and retries of those that came
//! over HTTP/1.1.

use futures_util::future::{join, join_all};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};

use crate::support::{
    Post, Server, eventually,
    http2::{Http2, Reply, Upload, open, run, whole},
    within,
};

const RUN: &str = r#"{"input": "hello"}"#;
const LONG_RUN: &str = r#"{"input": "hello", "seconds": 3600}"#;

#[tokio::test]
async fn a_retry_gets_the_same_answer_whichever_way_it_comes() {
    let server = Server::start(&[]).await;
    let first = server.send(Post::run().body(RUN)).await;
    let connection = Http2::connect(server.addr).await;
    for _ in 0..3 {
        let again = connection.send(run(server.addr, whole(RUN))).await;
        assert_eq!((again.run_id(), again.is_replay()), (first.run_id(), true));
        assert_eq!(again.headers["location"], first.header("location").unwrap());
        assert_eq!(again.headers["content-length"], first.body.len().to_string());
        assert_eq!(again.body, first.body);
    }
    assert!(server.send(Post::run().body(RUN)).await.is_replay());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn an_ordinary_client_retries_over_either_version() {
    let server = Server::start(&[]).await;
    let executor = TokioExecutor::new;
    let http1 = Client::builder(executor()).build_http::<Upload>();
    let http2 = Client::builder(executor()).http2_only(true).build_http::<Upload>();
    let send = async |client: &Client<_, _>| {
        let response = client.request(run(server.addr, whole(RUN))).await.unwrap();
        Reply::read(response).await.unwrap()
    };
    let first = send(&http2).await;
    for client in [&http1, &http2, &http1, &http2] {
        let again = send(client).await;
        assert!(again.is_replay());
        assert_eq!(again.lasting(), first.lasting());
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn fifty_identical_requests_at_once_on_one_connection_start_one_run() {
    let server = Server::start(&[("MAX_RUNS", "1"), ("RUN_SECONDS", "3600")]).await;
    let connection = Http2::connect(server.addr).await;
    let replies = join_all((0..50).map(|_| connection.send(run(server.addr, whole(RUN))))).await;
    let (answered, told): (Vec<_>, Vec<_>) =
        replies.into_iter().partition(|reply| reply.status == 202);
    for reply in told {
        reply.assert_refused(409, "idempotency_in_progress");
    }
    assert_eq!(answered.iter().filter(|reply| !reply.is_replay()).count(), 1);
    for reply in &answered {
        assert_eq!(reply.lasting(), answered[0].lasting());
    }
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_refusal_does_not_wait_for_the_body_and_the_connection_goes_on() {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    let connection = Http2::connect(server.addr).await;
    let busy = connection.send(run(server.addr, whole(LONG_RUN))).await;

    let with_key = |key: &'static str, body: Upload| {
        let mut request = run(server.addr, body);
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
        request
    };
    let (_kept, body) = open();
    connection.send(with_key("new", body)).await.assert_refused(429, "concurrency_limit");
    let (_kept, body) = open();
    let mut unkeyed = run(server.addr, body);
    unkeyed.headers_mut().remove("idempotency-key");
    connection.send(unkeyed).await.assert_refused(429, "concurrency_limit");
    let (_kept, body) = open();
    let no_key = connection.send(with_key("two words", body)).await;
    no_key.assert_refused(400, "idempotency_key_invalid");
    let (_kept, body) = open();
    let mut large = with_key("k", body);
    large.headers_mut().insert("content-length", 2_000_000.into());
    connection.send(large).await.assert_refused(413, "idempotency_body_too_large");

    let again = connection.send(run(server.addr, whole(LONG_RUN))).await;
    assert!(again.is_replay());
    assert_eq!(again.lasting(), busy.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_body_that_gets_too_large_is_refused_and_the_connection_goes_on() {
    let server = Server::start(&[]).await;
    let connection = Http2::connect(server.addr).await;
    let (sender, body) = open();
    // It does not end by itself.
    let upload = async { while sender.send(vec![b' '; 16 * 1024].into()).await.is_ok() {} };
    let (large, ()) = join(connection.send(run(server.addr, body)), within(upload)).await;
    large.assert_refused(413, "idempotency_body_too_large");
    assert!(!connection.send(run(server.addr, whole(RUN))).await.is_replay());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_body_that_trickles_blocks_no_other_on_its_connection() {
    let server = Server::start(&[("MAX_RUNS", "1")]).await;
    let connection = Http2::connect(server.addr).await;
    let (sender, body) = open();
    let slow = {
        let (connection, addr) = (connection.clone(), server.addr);
        tokio::spawn(async move { connection.send(run(addr, body)).await })
    };
    let (begun, rest) = LONG_RUN.split_at(2);
    for byte in begun.bytes() {
        sender.send(vec![byte].into()).await.unwrap();
    }
    let quick = connection.send(run(server.addr, whole(LONG_RUN))).await;
    for byte in rest.bytes() {
        sender.send(vec![byte].into()).await.unwrap();
    }
    drop(sender);
    let slow = slow.await.unwrap();
    assert!(slow.is_replay());
    assert_eq!(slow.lasting(), quick.lasting());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_stream_that_is_reset_amid_its_upload_has_started_nothing() {
    let server = Server::start(&[]).await;
    let connection = Http2::connect(server.addr).await;
    for _ in 0..10 {
        let (sender, body) = open();
        let abandoned = {
            let (connection, addr) = (connection.clone(), server.addr);
            tokio::spawn(async move { connection.send(run(addr, body)).await })
        };
        sender.send(RUN.into()).await.unwrap();
        sender.send(" ".into()).await.unwrap();
        // This comes after it on the same connection: the server has seen it by then.
        let list = http::Request::get(format!("http://{}/v1/runs", server.addr));
        let list = list.header("authorization", "Bearer alice").body(whole("")).unwrap();
        assert_eq!(connection.send(list).await.json()["started"], 0);
        abandoned.abort();
        assert!(abandoned.await.unwrap_err().is_cancelled());
    }
    server.assert_left(0, 0).await;
    assert!(!connection.send(run(server.addr, whole(RUN))).await.is_replay());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn a_stream_that_is_reset_before_its_answer_never_starts_it_twice() {
    let server = Server::start(&[]).await;
    let connection = Http2::connect(server.addr).await;
    let abandoned = {
        let (connection, addr) = (connection.clone(), server.addr);
        tokio::spawn(async move { connection.send(run(addr, whole(RUN))).await })
    };
    eventually(async || (server.started().await == 1).then_some(())).await;
    abandoned.abort();
    assert!(connection.send(run(server.addr, whole(RUN))).await.is_replay());
    server.assert_left(1, 1).await;
}

#[tokio::test]
async fn the_hyper_example_speaks_it_too() {
    let server = Server::start_example("hyper", &[]).await;
    let connection = Http2::connect(server.addr).await;
    let order = || {
        let mut order = run(server.addr, whole("tea"));
        *order.uri_mut() = format!("http://{}/orders", server.addr).parse().unwrap();
        order
    };
    let first = connection.send(order()).await;
    let again = connection.send(order()).await;
    assert_eq!((first.status, &first.body[..]), (201, &b"order 1: tea\n"[..]));
    assert!(!first.is_replay() && again.is_replay());
    assert_eq!(again.lasting(), first.lasting());
    let over_http1 = Post::to("/orders")
        .with("authorization", "Bearer alice")
        .with("content-type", "application/json")
        .key("k");
    let over_http1 = server.send(over_http1.body("tea")).await;
    assert!(over_http1.is_replay());
    assert_eq!(over_http1.text(), "order 1: tea\n");
}
