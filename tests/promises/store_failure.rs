//! Keyed work never runs unprotected, and what has run is never run again, when the store fails.

use std::time::Duration;

use tower_idempotency::{Ceiling, Disposition, InFlight, OnFailure};

use crate::support::{
    Gate,
    call::Call,
    cue::{Cue, CueStore, Transaction},
    keyed,
    stack::{AnyError, Stack, layer, text},
    unkeyed,
};

/// A layer over a store that can fail.
fn failing() -> (tower_idempotency::IdempotencyLayer, CueStore) {
    let store = CueStore::default();
    (layer().0.store(store.clone()), store)
}

#[tokio::test(start_paused = true)]
async fn without_the_store_a_keyed_request_is_refused_and_one_without_a_key_runs() {
    for call in [Call::Lookup, Call::Claim] {
        for cue in [Cue::Fail, Cue::Hang] {
            let (layer, store) = failing();
            // With a guard, which needs the look-up.
            let layer = layer.ceiling(&Ceiling::new(8));
            let stack = Stack::numbered(&layer);
            store.cue(call, cue.clone());
            let refused = stack.send(keyed("k", "{}")).await;
            refused.assert_refused(503, "idempotency_store_unavailable");
            assert!(!refused.text().contains("secret-store-address"));
            assert_eq!(stack.runs.count(), 0, "{call:?} {cue:?}");
            assert_eq!(layer.dispositions().get(Disposition::StoreUnavailable), 1);
            let asked = store.calls().len();
            assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 1");
            assert_eq!(store.calls().len(), asked, "it is not even asked");
            // What it holds of the failed claim is nothing.
            store.heal();
            assert!(store.memory.is_empty());
            assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_has_a_second_to_answer_unless_told_otherwise() {
    for (timeout, millis) in [(None, 1_000), (Some(Duration::from_millis(70)), 70)] {
        let (layer, store) = failing();
        let layer = match timeout {
            Some(timeout) => layer.store_timeout(timeout),
            None => layer,
        };
        let stack = Stack::numbered(&layer);
        store.cue(Call::Claim, Cue::Hang);
        let began = tokio::time::Instant::now();
        let refused = stack.send(keyed("k", "{}")).await;
        refused.assert_refused(503, "idempotency_store_unavailable");
        assert_eq!(began.elapsed(), Duration::from_millis(millis));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_is_taken_back() {
    let (layer, store) = failing();
    let stack = Stack::numbered(&layer);
    store.cue(Call::Claim, Cue::LoseAnswer);
    let refused = stack.send(keyed("k", "{}")).await;
    refused.assert_refused(503, "idempotency_store_unavailable");
    assert_eq!(store.called(Call::Withdraw), 1);
    assert!(store.memory.is_empty(), "no wedged key");
    store.heal();
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn when_completion_fails_the_caller_gets_its_answer_and_nobody_runs_it_again() {
    for cue in [Cue::Fail, Cue::Hang] {
        let (layer, store) = failing();
        let layer = layer.in_flight(InFlight::Wait(Duration::from_secs(3)));
        let stack = Stack::numbered(&layer);
        store.cue(Call::Complete, cue.clone());
        let first = stack.send(keyed("k", "{}")).await;
        assert_eq!((first.status.as_u16(), first.text()), (200, "run 1"), "{cue:?}");
        assert_eq!(store.memory.in_flight(), 1, "the claim is kept");
        store.heal();
        stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_in_progress");
        stack.send(keyed("k", "[]")).await.assert_refused(409, "idempotency_conflict");
        assert_eq!(stack.runs.count(), 1);
        let dispositions = layer.dispositions();
        assert_eq!(dispositions.get(Disposition::CompletionUnconfirmed), 1);
        assert_eq!(dispositions.get(Disposition::Executed), 0);
        // Others are none the worse for it.
        assert_eq!(stack.send(keyed("other", "{}")).await.text(), "run 2");
        assert_eq!(layer.drain(Duration::from_secs(1)).await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_completion_whose_answer_was_lost_is_a_record_all_the_same() {
    let (layer, store) = failing();
    let stack = Stack::numbered(&layer);
    store.cue(Call::Complete, Cue::LoseAnswer);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    assert_eq!(layer.dispositions().get(Disposition::CompletionUnconfirmed), 1);
    let again = stack.send(keyed("k", "{}")).await;
    assert_eq!((again.text(), again.is_replay()), ("run 1", true));
}

#[tokio::test(start_paused = true)]
async fn when_a_release_or_hold_fails_the_caller_gets_what_the_handler_said() {
    for (rule, call) in [(OnFailure::Release, Call::Release), (OnFailure::Hold, Call::Hold)] {
        for cue in [Cue::Fail, Cue::Hang] {
            let (layer, store) = failing();
            let layer = layer.on_failure(rule).in_flight(InFlight::Reject);
            store.cue(call, cue);
            let stack = Stack::new(&layer, |run, _| async move {
                match run {
                    1 => Ok(text(500, "the handler's own")),
                    _ => Err(AnyError::new("the handler's own")),
                }
            });
            let answer = stack.send(keyed("status", "{}")).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (500, "the handler's own"));
            let error = stack.call(keyed("error", "{}")).await.unwrap_err();
            assert_eq!(error.to_string(), "the handler's own");
            assert_eq!(layer.dispositions().get(Disposition::CompletionUnconfirmed), 2);
            for key in ["status", "error"] {
                let refused = stack.send(keyed(key, "{}")).await;
                refused.assert_refused(409, "idempotency_in_progress");
            }
            assert_eq!(stack.runs.count(), 2);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn when_the_release_of_refused_work_fails_the_refusal_stands() {
    let (layer, store) = failing();
    let ceiling = Ceiling::new(1);
    let gate = Gate::default();
    let stack = Stack::numbered(&layer.ceiling(&ceiling));
    store.cue(Call::Claim, Cue::Wait(gate.clone()));
    store.cue(Call::Release, Cue::Fail);
    // The guard has room at first, and none when the claim is there.
    let late = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    let place = ceiling.try_acquire().unwrap();
    gate.open();
    late.await.unwrap().assert_refused(429, "concurrency_limit");
    assert_eq!(stack.runs.count(), 0);
    drop(place);
}

#[tokio::test]
async fn what_the_stores_claim_adds_reaches_the_handler_and_no_other() {
    let (layer, _) = failing();
    let stack = Stack::new(&layer, |_, request| async move {
        let transaction = request.extensions().get::<Transaction>();
        Ok(text(200, transaction.map_or("none", |transaction| transaction.0)))
    });
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "begun");
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "none");
}

#[tokio::test]
async fn a_store_far_away_is_asked_once_for_a_replay_and_twice_for_a_first_call() {
    let store = CueStore::default();
    let stack = Stack::numbered(&layer().0.store(store.clone()));
    stack.send(keyed("k", "{}")).await;
    assert_eq!(store.calls(), [Call::Claim, Call::Complete]);
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(store.calls()[2..], [Call::Claim]);
}

#[tokio::test]
async fn a_store_far_away_is_looked_into_first_where_a_guard_needs_it() {
    let store = CueStore::default();
    let ceiling = Ceiling::new(1);
    let stack = Stack::numbered(&layer().0.store(store.clone()).ceiling(&ceiling));
    stack.send(keyed("k", "{}")).await;
    assert_eq!(store.calls(), [Call::Lookup, Call::Claim, Call::Complete]);
    let _place = ceiling.try_acquire().unwrap();
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    // New work, with no room for it: it is looked for once more, and never claimed.
    let asked = store.calls().len();
    stack.send(keyed("new", "{}")).await.assert_refused(429, "concurrency_limit");
    assert_eq!(store.calls()[asked..], [Call::Lookup, Call::Lookup]);
}
