//! The hyper example does what it says: one order for each key.

use crate::support::{Post, Server};

#[tokio::test]
async fn however_often_an_order_is_sent_it_is_placed_once() {
    let server = Server::start_example("hyper", &[]).await;
    let order = Post::to("/orders").with("authorization", "Bearer alice");
    let keyed = order.clone().key("k");
    let first = server.send(keyed.body("tea")).await;
    assert_eq!((first.status, first.text(), first.is_replay()), (201, "order 1: tea\n", false));
    for _ in 0..3 {
        let again = server.send(keyed.body("tea")).await;
        assert!(again.is_replay());
        assert_eq!(again.lasting(), first.lasting());
    }
    server.send(keyed.body("coffee")).await.assert_refused(409, "idempotency_conflict");
    // Other keys, other customers and orders without a key are orders of their own.
    let mut numbers = Vec::new();
    for request in [order.clone().key("other"), keyed.clone().caller("bob"), order.clone(), order] {
        let answer = server.send(request.body("tea")).await;
        assert!(!answer.is_replay());
        numbers.push(answer.text().to_owned());
    }
    let placed = ["order 2: tea\n", "order 3: tea\n", "order 4: tea\n", "order 5: tea\n"];
    assert_eq!(numbers, placed);
}

#[tokio::test]
async fn what_is_no_order_is_refused() {
    let server = Server::start_example("hyper", &[]).await;
    let order = Post::to("/orders").with("authorization", "Bearer alice").key("k");
    assert_eq!(server.send(order.clone().without("authorization").body("tea")).await.status, 401);
    assert_eq!(server.send(order.body("")).await.status, 400);
    assert_eq!(server.send(order.body("x".repeat(64 * 1024 + 1))).await.status, 400);
    let elsewhere = Post::to("/").with("authorization", "Bearer alice");
    assert_eq!(server.send(elsewhere.body("tea")).await.status, 404);
    assert_eq!(server.send(crate::support::get("/orders")).await.status, 405);
    // None of it has been kept: the key is still good for an order, the first.
    assert_eq!(server.send(order.body("tea")).await.text(), "order 1: tea\n");
}
