//! A body that stalls is given up; one that is slow and steady is not.

use std::time::Duration;

use crate::support::{
    Post, Server,
    http1::chunk,
    http2::{self, Http2},
    within,
};

#[tokio::test]
async fn an_upload_that_stalls_is_given_up_and_may_come_again() {
    let server = Server::lab(&[("BODY_IDLE_MS", "200")]).await;
    let post = Post::lab("/lab/echo");
    let chunked = post.clone().with("transfer-encoding", "chunked").head();
    let stalled =
        [post.head_for(10), [post.head_for(10), b"hello".to_vec()].concat(), chunked.clone(), {
            [chunked, chunk(b"hello")].concat()
        }];
    for request in stalled {
        let mut connection = server.connect().await;
        connection.write(request).await;
        let problem = connection.answer().await.assert_refused(408, "idempotency_body_unreadable");
        assert_eq!(problem["retry"], "same-key");
        assert_eq!(connection.rest().await, b"");
    }
    let http2 = Http2::connect(server.addr).await;
    let (sender, body) = http2::open();
    sender.send("hello".into()).await.unwrap();
    let refused = http2.send(http2::request(server.addr, &post, body)).await;
    refused.assert_refused(408, "idempotency_body_unreadable");
    drop(sender);

    assert_eq!((server.executions("/lab/echo").await, server.live_entries().await), (0, 0));
    assert_eq!(server.send(post.body("hello")).await.text(), "hello");
}

#[tokio::test]
async fn an_upload_that_goes_on_may_take_longer_than_a_stall() {
    let server = Server::lab(&[("BODY_IDLE_MS", "2000")]).await;
    let post = Post::lab("/lab/echo").key("http1");
    let http1 = async {
        let mut connection = server.connect().await;
        connection.write(post.head_for(10)).await;
        for byte in *b"and steady" {
            tokio::time::sleep(Duration::from_millis(250)).await;
            connection.write([byte]).await;
        }
        assert_eq!(connection.answer().await.text(), "and steady");
    };
    let http2 = async {
        let connection = Http2::connect(server.addr).await;
        let (sender, body) = http2::open();
        let upload = async move {
            for byte in *b"and steady" {
                tokio::time::sleep(Duration::from_millis(250)).await;
                within(sender.send(vec![byte].into())).await.unwrap();
            }
        };
        let request = http2::request(server.addr, &post.clone().key("http2"), body);
        let (reply, ()) = tokio::join!(connection.send(request), upload);
        assert_eq!(reply.body, "and steady");
    };
    tokio::join!(http1, http2);
}

#[tokio::test]
async fn an_upload_without_a_key_is_the_handlers_own_to_wait_for() {
    let server = Server::lab(&[("BODY_IDLE_MS", "100")]).await;
    let mut connection = server.connect().await;
    connection.write(Post::lab("/lab/echo").without("idempotency-key").head_for(5)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    connection.write("hello").await;
    assert_eq!(connection.answer().await.text(), "hello");
}
