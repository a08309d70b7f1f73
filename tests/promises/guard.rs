//! New work is let in by the guard; repeats of what is known pass it by.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tower_idempotency::{Ceiling, OnFailure, Permit, PermitSlot};

use crate::support::{
    Gate, keyed,
    stack::{Script, Stack, Step, any, layer, text},
    unkeyed,
};

/// A body that must not be read, and how often it was.
fn unread() -> (Script, crate::support::stack::Polls) {
    let body = Script::new([Step::Forever(|| Step::data("x"))]);
    let polls = body.polls();
    (body, polls)
}

#[tokio::test]
async fn over_the_ceiling_new_work_is_refused_unread_and_leaves_nothing() {
    let (layer, store) = layer();
    let ceiling = Ceiling::new(2);
    let stack = Stack::numbered(&layer.ceiling(&ceiling));
    let places = [ceiling.try_acquire().unwrap(), ceiling.try_acquire().unwrap()];
    for request in [keyed("k", ""), unkeyed("")] {
        let (body, polls) = unread();
        let refused = stack.send(request.map(|_| body)).await;
        refused.assert_refused(429, "concurrency_limit");
        assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
        assert_eq!(polls.count(), 0);
    }
    assert_eq!((stack.runs.count(), store.len(), ceiling.active()), (0, 0, 2));
    drop(places);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 2");
    assert_eq!(ceiling.active(), 0);
}

#[tokio::test]
async fn known_keys_are_answered_though_the_ceiling_is_full() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let layer = layer.ceiling(&ceiling).on_failure(OnFailure::Hold).response_limit(8);
    let stack = Stack::new(&layer, |run, request| async move {
        let key = request.extensions().get::<tower_idempotency::IdempotencyKey>().unwrap();
        Ok(match key.as_str() {
            "held" => text(500, ""),
            "tombstone" => text(200, "nine bytes"),
            _ => text(202, format!("run {run}")),
        })
    });
    for key in ["record", "held", "tombstone"] {
        stack.send(keyed(key, "{}")).await;
    }
    let _place = ceiling.try_acquire().unwrap();
    stack.send(unkeyed("{}")).await.assert_refused(429, "concurrency_limit");
    let again = stack.send(keyed("record", "{}")).await;
    assert_eq!((again.text(), again.is_replay()), ("run 1", true));
    stack.send(keyed("record", "[]")).await.assert_refused(409, "idempotency_conflict");
    stack.send(keyed("held", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
    stack.send(keyed("tombstone", "{}")).await.assert_refused(409, "idempotency_not_replayable");
    assert_eq!(stack.runs.count(), 3);
}

#[tokio::test]
async fn a_repeat_of_the_very_work_that_fills_the_ceiling_waits_for_it() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let gate = Gate::default();
    let stack = Stack::new(&layer.ceiling(&ceiling), {
        let gate = gate.clone();
        move |run, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(text(202, format!("run {run}")))
            }
        }
    });
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    let repeat = stack.spawn(keyed("k", "{}"));
    tokio::task::yield_now().await;
    stack.send(keyed("other", "{}")).await.assert_refused(429, "concurrency_limit");
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    let repeat = repeat.await.unwrap();
    assert_eq!((repeat.text(), repeat.is_replay()), ("run 1", true));
}

#[tokio::test]
async fn a_place_is_taken_while_the_handler_runs_keyed_or_not() {
    for is_keyed in [true, false] {
        let (layer, _) = layer();
        let ceiling = Ceiling::new(1);
        let gate = Gate::default();
        let stack = Stack::new(&layer.ceiling(&ceiling), {
            let gate = gate.clone();
            move |_, _| {
                let gate = gate.clone();
                async move {
                    gate.pass().await;
                    Ok(text(200, ""))
                }
            }
        });
        let running = stack.spawn(if is_keyed { keyed("k", "{}") } else { unkeyed("{}") });
        gate.reached_by(1).await;
        assert_eq!(ceiling.active(), 1);
        for other in [keyed("other", "{}"), unkeyed("{}")] {
            stack.send(other).await.assert_refused(429, "concurrency_limit");
        }
        gate.open();
        running.await.unwrap();
        assert_eq!(ceiling.active(), 0);
    }
}

#[tokio::test]
async fn a_handler_that_takes_its_permit_keeps_the_place_keyed_or_not() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(2);
    let (sender, mut permits) = tokio::sync::mpsc::unbounded_channel();
    let stack = Stack::new(&layer.ceiling(&ceiling), move |_, request| {
        let permit = request.extensions().get::<PermitSlot>().unwrap().take_permit();
        sender.send(permit.unwrap()).unwrap();
        async { Ok(text(202, "")) }
    });
    stack.send(keyed("k", "{}")).await;
    stack.send(unkeyed("{}")).await;
    assert_eq!(ceiling.active(), 2);
    stack.send(keyed("new", "{}")).await.assert_refused(429, "concurrency_limit");
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    drop(permits.recv().await);
    assert_eq!(stack.send(keyed("new", "{}")).await.status, 202);
}

#[tokio::test]
async fn a_place_is_free_again_after_every_end() {
    for status in [200, 404, 500] {
        let (layer, _) = layer();
        let ceiling = Ceiling::new(1);
        let stack =
            Stack::new(&layer.ceiling(&ceiling), move |_, _| async move { Ok(text(status, "")) });
        for request in [keyed("k", "{}"), unkeyed("{}")] {
            assert_eq!(stack.send(request).await.status.as_u16(), status);
            assert_eq!(ceiling.active(), 0);
        }
    }
}

#[tokio::test]
async fn requests_that_reach_nothing_never_ask_for_a_place() {
    let (layer, _) = layer();
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = layer.request_limit(10).guard({
        let asked = Arc::clone(&asked);
        move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            Some(Permit::new(()))
        }
    });
    let stack = Stack::numbered(&layer);
    let asked = || asked.swap(0, Ordering::SeqCst);

    // Before the body is read, when its permit is dropped at once, and after the claim.
    stack.send(keyed("k", "{}")).await;
    assert_eq!(asked(), 2);
    // A request without a key has no need to be asked twice.
    stack.send(unkeyed("{}")).await;
    assert_eq!(asked(), 1);
    stack.send(keyed("k", "{}")).await;
    stack.send(keyed("k", "[]")).await;
    stack.send(keyed("too large", "x".repeat(11))).await;
    stack.send(keyed("malformed key", "{}")).await;
    let mut get = unkeyed("{}");
    *get.method_mut() = http::Method::GET;
    stack.send(get).await;
    assert_eq!(asked(), 0);
}

#[tokio::test]
async fn a_guard_of_ones_own_decides_by_the_request_and_is_told_of_the_end() {
    struct Place(Arc<AtomicUsize>);

    impl Drop for Place {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    let (layer, store) = layer();
    let active = Arc::new(AtomicUsize::new(0));
    let layer = layer.guard({
        let active = Arc::clone(&active);
        move |parts| {
            (parts.headers.get("x-plan")? == "paid").then(|| {
                active.fetch_add(1, Ordering::SeqCst);
                Permit::new(Place(Arc::clone(&active)))
            })
        }
    });
    let seen = Arc::clone(&active);
    let stack = Stack::new(&layer, move |_, request| {
        assert!(request.extensions().get::<PermitSlot>().is_some());
        let seen = seen.load(Ordering::SeqCst);
        async move { Ok(text(200, seen.to_string())) }
    });
    for mut request in [keyed("k", "{}"), unkeyed("{}")] {
        let refused = stack.send(request.clone()).await;
        refused.assert_refused(429, "concurrency_limit");
        request.headers_mut().insert("x-plan", "paid".parse().unwrap());
        assert_eq!(stack.send(request).await.text(), "1", "one place while it runs");
        assert_eq!(active.load(Ordering::SeqCst), 0);
    }
    // Known by now: its plan does not matter.
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(store.len(), 1);
}

#[tokio::test]
async fn a_slow_upload_takes_no_place() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let gate = Gate::default();
    let stack = Stack::numbered(&layer.ceiling(&ceiling));
    let slow = Script::new([Step::Pass(gate.clone()), Step::data("{}")]);
    let slow = stack.spawn(keyed("slow", "").map(|_| any(slow)));
    gate.reached_by(1).await;
    assert_eq!(ceiling.active(), 0);
    assert_eq!(stack.send(keyed("quick", "{}")).await.text(), "run 1");
    gate.open();
    assert_eq!(slow.await.unwrap().text(), "run 2");
}

#[tokio::test]
async fn work_that_finds_the_ceiling_full_after_its_claim_gives_the_key_back() {
    let (layer, store) = layer();
    let ceiling = Ceiling::new(1);
    let gate = Gate::default();
    let stack = Stack::numbered(&layer.ceiling(&ceiling));
    let slow = Script::new([Step::Pass(gate.clone()), Step::data("{}")]);
    let slow = stack.spawn(keyed("k", "").map(|_| any(slow)));
    gate.reached_by(1).await;
    let place = ceiling.try_acquire().unwrap();
    gate.open();
    slow.await.unwrap().assert_refused(429, "concurrency_limit");
    assert!(store.is_empty());
    drop(place);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
}

#[tokio::test]
async fn the_last_guard_that_is_set_is_the_one_that_is_asked() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let _place = ceiling.try_acquire().unwrap();
    let open = layer.clone().ceiling(&ceiling).guard(|_| Some(Permit::new(())));
    assert_eq!(Stack::numbered(&open).send(unkeyed("{}")).await.status, 200);
    let full = layer.guard(|_| Some(Permit::new(()))).ceiling(&ceiling);
    assert_eq!(Stack::numbered(&full).send(unkeyed("{}")).await.status, 429);
}
