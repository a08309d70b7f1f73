//! The bodies of all keyed requests that are read or waiting take no more than their budget
//! together, and every end gives the room back.

use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use tokio::task::JoinHandle;
use tower_idempotency::{
    Ceiling, Disposition, IdempotencyLayer, InFlight, MemoryStore, StoredResponse,
};

use crate::support::{
    Answer, Gate, keyed,
    stack::{AnyBody, Inner, Script, Stack, Step, any, layer, text},
    unkeyed, within,
};

/// What all bodies together may take, and so may one.
const ALL: usize = 10;

/// A body of the whole budget.
const WHOLE: &str = "0123456789";

fn narrow() -> (IdempotencyLayer, MemoryStore<StoredResponse>) {
    let (layer, store) = layer();
    (layer.request_limit(ALL).buffered_bytes(ALL), store)
}

fn script(key: &str, steps: impl IntoIterator<Item = Step>) -> Request<AnyBody> {
    keyed(key, "").map(|_| any(Script::new(steps)))
}

/// A body that has come so far and stays there.
async fn begun(stack: &Stack, key: &str, data: &'static str) -> (JoinHandle<Answer>, Gate) {
    let gate = Gate::default();
    let sent = stack.spawn(script(key, [Step::data(data), Step::Pass(gate.clone())]));
    gate.reached_by(1).await;
    (sent, gate)
}

/// Asserts that there is room for the whole budget.
async fn assert_empty(stack: &Stack) {
    let answer = stack.send(keyed("is-there-room", WHOLE)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// Asserts that so many bytes are free, and no more.
async fn assert_free(stack: &Stack, bytes: usize) {
    let too_much = if bytes < ALL { 503 } else { 413 };
    for (bytes, status) in [(bytes, 200), (bytes + 1, too_much)] {
        let answer = stack.send(keyed(&format!("free-{bytes}"), "x".repeat(bytes))).await;
        assert_eq!(answer.status, status, "{bytes}");
    }
}

#[tokio::test]
async fn a_body_that_does_not_fit_beside_the_others_is_refused_and_nothing_is_done() {
    let (layer, store) = narrow();
    let stack = Stack::numbered(&layer);
    let (first, gate) = begun(&stack, "first", "123456").await;
    let answer = stack.send(keyed("k", "12345")).await;
    answer.assert_refused(503, "idempotency_capacity");
    assert_eq!(
        (answer.header("retry-after"), &answer.json()["retry"]),
        (Some("1"), &"same-key".into())
    );
    assert_eq!((stack.runs.count(), store.len()), (0, 0));
    assert_eq!(layer.dispositions().get(Disposition::Capacity), 1);
    assert_eq!(stack.send(keyed("k", "1234")).await.text(), "run 1", "that fits");
    assert_free(&stack, 4).await;
    gate.open();
    assert_eq!(first.await.unwrap().status, 200);
    assert_empty(&stack).await;
}

#[tokio::test]
async fn a_body_that_comes_in_pieces_is_refused_at_the_piece_that_does_not_fit() {
    let stack = Stack::numbered(&narrow().0);
    let (_first, _gate) = begun(&stack, "first", "123456").await;
    let body = Script::new([Step::data("12"), Step::data("34"), Step::data("5"), Step::Panic]);
    let polls = body.polls();
    let answer = stack.send(keyed("k", "").map(|_| any(body))).await;
    answer.assert_refused(503, "idempotency_capacity");
    assert_eq!(polls.count(), 3);
}

#[tokio::test]
async fn one_body_of_the_whole_budget_fits_when_it_is_alone() {
    let stack = Stack::numbered(&narrow().0);
    for number in 0..100 {
        assert_eq!(stack.send(keyed(&format!("k{number}"), WHOLE)).await.status, 200);
    }
}

#[tokio::test]
async fn requests_without_a_key_take_nothing_of_it() {
    let (layer, _) = narrow();
    let stack = Stack::new(&layer, |_, request: Inner| async move {
        let body = request.into_body().collect().await.unwrap().to_bytes();
        Ok(text(200, body.len().to_string()))
    });
    let (_first, _gate) = begun(&stack, "first", WHOLE).await;
    assert_eq!(stack.send(unkeyed(WHOLE.repeat(9))).await.text(), "90");
}

#[tokio::test]
async fn the_bodies_of_those_who_wait_count_until_they_are_answered() {
    let gate = Gate::default();
    let (layer, _) = narrow();
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |run, request: Inner| {
            let gate = gate.clone();
            async move {
                // The owner's body is taken over by its handler, and counts no more.
                let _body = request.into_body().collect().await.unwrap();
                if run == 1 {
                    gate.pass().await;
                }
                Ok(text(200, format!("run {run}")))
            }
        }
    });
    let first = stack.spawn(keyed("k", "123"));
    gate.reached_by(1).await;
    assert_free(&stack, 10).await;
    let mut waiters = Vec::new();
    for free in [7, 4, 1] {
        waiters.push(stack.spawn(keyed("k", "123")));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_free(&stack, free).await;
    }
    stack.send(keyed("k", "123")).await.assert_refused(503, "idempotency_capacity");
    // One of them leaves.
    waiters.pop().unwrap().abort();
    tokio::task::yield_now().await;
    assert_free(&stack, 4).await;
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    for waiter in waiters {
        assert!(waiter.await.unwrap().is_replay());
    }
    assert_empty(&stack).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_time_is_up_gives_its_room_back() {
    let gate = Gate::default();
    let (layer, _) = narrow();
    let layer = layer.in_flight(InFlight::Wait(Duration::from_secs(3)));
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |run, request: Inner| {
            let gate = gate.clone();
            async move {
                drop(request);
                if run == 1 {
                    gate.pass().await;
                }
                Ok(text(200, ""))
            }
        }
    });
    let _first = stack.spawn(keyed("k", WHOLE));
    gate.reached_by(1).await;
    stack.send(keyed("k", WHOLE)).await.assert_refused(409, "idempotency_in_progress");
    assert_empty(&stack).await;
}

#[tokio::test]
async fn a_body_counts_until_its_handler_takes_it_over_or_drops_it() {
    for takes_over in [true, false] {
        let (layer, _) = narrow();
        let gates = [Gate::default(), Gate::default()];
        let stack = Stack::new(&layer, {
            let gates = gates.clone();
            move |run, request: Inner| {
                let [untouched, touched] = gates.clone();
                async move {
                    if run == 1 {
                        untouched.pass().await;
                        if takes_over {
                            let mut body = request.into_body();
                            let _data = body.frame().await;
                            touched.pass().await;
                            drop(body);
                        } else {
                            drop(request);
                            touched.pass().await;
                        }
                    }
                    Ok(text(200, ""))
                }
            }
        });
        let first = stack.spawn(keyed("k", "123456"));
        gates[0].reached_by(1).await;
        assert_free(&stack, 4).await;
        gates[0].open();
        gates[1].reached_by(1).await;
        assert_free(&stack, 10).await;
        gates[1].open();
        assert_eq!(first.await.unwrap().status, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn every_end_gives_the_room_back() {
    type Case = fn(&Stack) -> Request<AnyBody>;
    const CASES: [(&str, Case, Option<u16>); 14] = [
        ("executed", |_| keyed("k", WHOLE).map(any), Some(200)),
        ("replayed", |_| keyed("recorded", WHOLE).map(any), Some(200)),
        ("conflict", |_| keyed("recorded", "123456789x").map(any), Some(409)),
        ("not replayable", |_| keyed("tombstone", WHOLE).map(any), Some(409)),
        ("held", |_| keyed("held", WHOLE).map(any), Some(409)),
        ("too large", |_| script("k", [Step::data(WHOLE), Step::data("x")]), Some(413)),
        ("too large at once", |_| script("k", [Step::data("01234567890")]), Some(413)),
        ("broken", |_| script("k", [Step::data(WHOLE), Step::Break]), Some(400)),
        (
            "slow",
            |_| script("k", [Step::data(WHOLE), Step::Sleep(Duration::from_secs(20))]),
            Some(408),
        ),
        ("panicking body", |_| script("k", [Step::data(WHOLE), Step::Panic]), None),
        ("failed", |_| keyed("fails", WHOLE).map(any), Some(500)),
        ("panicking handler", |_| keyed("panics", WHOLE).map(any), None),
        ("unread", |_| keyed("unread", WHOLE).map(any), Some(200)),
        ("full store", |_| keyed("one-too-many", WHOLE).map(any), Some(503)),
    ];
    for (name, request, status) in CASES {
        let (layer, _) = narrow();
        let layer = layer
            .store(MemoryStore::new().capacity(if name == "full store" { 3 } else { 100 }))
            .response_limit(5);
        let stack = Stack::new(&layer, |run, request: Inner| async move {
            let key = request.extensions().get::<tower_idempotency::IdempotencyKey>();
            let key = key.unwrap().as_str().to_owned();
            if key != "unread" {
                request.into_body().collect().await.unwrap();
            }
            assert_ne!(key, "panics");
            let response = match &*key {
                "tombstone" => text(200, "too long"),
                "fails" => text(500, ""),
                _ => text(200, run.to_string()),
            };
            let is_held = key == "held";
            Ok(if is_held {
                crate::support::stack::with_extension(response, tower_idempotency::Outcome::Unknown)
            } else {
                response
            })
        });
        for key in ["recorded", "tombstone", "held"] {
            stack.send(keyed(key, WHOLE)).await;
        }
        let answer = within(stack.spawn(request(&stack))).await;
        assert_eq!(answer.ok().map(|answer| answer.status.as_u16()), status, "{name}");
        let held = stack.send(keyed("held", WHOLE)).await;
        held.assert_refused(409, "idempotency_outcome_unknown");
    }
}

#[tokio::test]
async fn a_caller_that_leaves_while_its_body_is_read_gives_the_room_back() {
    let stack = Stack::numbered(&narrow().0);
    let (first, _gate) = begun(&stack, "k", WHOLE).await;
    assert_free(&stack, 0).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert_empty(&stack).await;
}

#[tokio::test]
async fn a_request_that_is_refused_by_the_guard_after_it_was_read_gives_the_room_back() {
    let ceiling = Ceiling::new(1);
    let (layer, store) = narrow();
    let stack = Stack::numbered(&layer.ceiling(&ceiling));
    let gate = Gate::default();
    let late = stack.spawn(script("k", [Step::data(WHOLE), Step::Pass(gate.clone())]));
    gate.reached_by(1).await;
    let place = ceiling.try_acquire().expect("a body takes no place");
    gate.open();
    late.await.unwrap().assert_refused(429, "concurrency_limit");
    drop(place);
    assert_eq!(store.len(), 0);
    assert_empty(&stack).await;
}

#[tokio::test]
async fn clones_share_the_budget_unless_they_are_given_one_of_their_own() {
    let (layer, _) = narrow();
    let stacks = [&layer, &layer.clone().key_required(true)].map(Stack::numbered);
    let own = Stack::numbered(&layer.clone().buffered_bytes(ALL));
    let (_first, _gate) = begun(&stacks[0], "first", "123456").await;
    for stack in &stacks {
        stack.send(keyed("k", "12345")).await.assert_refused(503, "idempotency_capacity");
    }
    assert_eq!(own.send(keyed("k", WHOLE)).await.status, 200);
}

// Paused, for it takes a busy machine long to hash so much: no body may be late for that.
#[tokio::test(start_paused = true)]
async fn by_default_64_mebibytes_are_read_at_once_and_no_more() {
    const MIB: usize = 1024 * 1024;
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    // One frame for all of them, for the test's own sake.
    let frame = bytes::Bytes::from(vec![b'x'; MIB]);
    let mut begun = Vec::new();
    for number in 0..64 {
        let gate = Gate::default();
        let steps = [Step::data(frame.clone()), Step::Pass(gate.clone())];
        begun.push(stack.spawn(script(&format!("k{number}"), steps)));
        gate.reached_by(1).await;
    }
    stack.send(keyed("k", "x")).await.assert_refused(503, "idempotency_capacity");
    begun.pop().unwrap().abort();
    tokio::task::yield_now().await;
    assert_eq!(stack.send(keyed("k", frame)).await.text(), "run 1");
}
