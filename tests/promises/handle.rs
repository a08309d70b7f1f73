//! What a handler may ask and say of its own execution.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::request::Parts;
use tower_idempotency::{
    Ceiling, Handle, IdempotencyKey, OnFailure, OnLeave, OperationId, Permit, PermitSlot, Scope,
    store::Ownership,
};

use crate::support::{
    Gate,
    call::Call,
    cue::{Cue, CueStore},
    keyed,
    stack::{Stack, layer, text},
    unkeyed, within,
};

/// What handlers left for a test to look at, the latest last.
type Kept<T> = Arc<Mutex<Vec<T>>>;

fn latest<T: Clone>(kept: &Kept<T>) -> T {
    kept.lock().unwrap().last().unwrap().clone()
}

/// A stack whose handlers leave their handles.
fn handles(layer: &tower_idempotency::IdempotencyLayer) -> (Stack, Kept<Handle>) {
    let handles = Kept::default();
    let stack = Stack::new(layer, {
        let handles = Kept::clone(&handles);
        move |run, request| {
            handles.lock().unwrap().push(request.extensions().get::<Handle>().unwrap().clone());
            async move { Ok(text(200, format!("run {run}"))) }
        }
    });
    (stack, handles)
}

#[tokio::test]
async fn a_handler_knows_its_operation_its_key_and_that_it_is_the_first_attempt() {
    let (layer, _) = layer();
    let (stack, handles) = handles(&layer);
    stack.send(keyed("k", "{}")).await;
    let handle = latest(&handles);
    let id = handle.operation_id();
    assert_eq!(handle.attempt(), 1);
    assert_eq!(id.to_string().parse(), Ok(id));
    stack.send(keyed("other", "{}")).await;
    assert_ne!(latest(&handles).operation_id(), id);

    let by_scope = tower_idempotency::IdempotencyLayer::new(|_: &Parts| Some(Scope::new("t")));
    let stack = Stack::new(&by_scope, |_, request| async move {
        let key = request.extensions().get::<IdempotencyKey>().unwrap();
        let id = request.extensions().get::<Handle>().unwrap().operation_id();
        Ok(text(200, format!("{} {id}", key.as_str())))
    });
    let answer = stack.send(keyed("\"k\"", "{}")).await;
    assert_eq!(answer.text(), format!("k {}", OperationId::new(&Scope::new("t"), "k")));
}

#[tokio::test]
async fn a_handler_knows_how_many_attempts_of_others_the_store_has_seen_no_end_of() {
    let mut store = CueStore::default();
    store.attempts_before = 2;
    let (stack, handles) = handles(&layer().0.store(store));
    stack.send(keyed("k", "{}")).await;
    assert_eq!(latest(&handles).attempt(), 3);
}

#[test]
fn a_wish_does_not_wait_for_an_end_that_was_cut_off_with_its_runtime() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = CueStore::default();
    store.cue(Call::Complete, Cue::Hang);
    let layer = layer().0.store(store.clone()).on_leave(OnLeave::Cancel);
    let (stack, handles) = handles(&layer);
    let first = runtime();
    first.block_on(async {
        let mut call = stack.call(keyed("k", "{}"));
        while store.called(Call::Complete) == 0 {
            assert!(futures_util::poll!(&mut call).is_pending());
        }
        // The store's answer is waited for in a task.
        drop(call);
    });
    drop(first);
    store.heal();
    runtime().block_on(async {
        // Whether there is a record now, only the store knows.
        let _either = within(latest(&handles).expire()).await;
    });
}

#[tokio::test]
async fn the_operation_id_is_the_same_in_every_retry() {
    let (layer, _) = layer();
    let (stack, handles) = handles(&layer);
    stack.send(keyed("k", "{}")).await;
    let first = latest(&handles);
    assert_eq!(first.expire().await.unwrap(), Ownership::Held);
    stack.send(keyed("k", "{}")).await;
    assert_eq!(latest(&handles).operation_id(), first.operation_id());
    assert_eq!(stack.runs.count(), 2);
}

#[tokio::test]
async fn there_is_no_handle_without_a_key() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, request| async move {
        let extensions = request.extensions();
        assert!(extensions.get::<Handle>().is_none());
        assert!(extensions.get::<IdempotencyKey>().is_none());
        assert!(extensions.get::<PermitSlot>().is_none());
        Ok(text(200, ""))
    });
    stack.send(unkeyed("{}")).await;
}

#[tokio::test]
async fn a_permit_is_taken_once_from_the_handle_or_from_the_slot() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(3);
    let (kept, permits): (Kept<Parts>, Kept<Option<Permit>>) = Default::default();
    let stack = Stack::new(&layer.ceiling(&ceiling), {
        let (kept, permits) = (Kept::clone(&kept), Kept::clone(&permits));
        let ceiling = ceiling.clone();
        move |run, request| {
            let (parts, _) = request.into_parts();
            let handle = parts.extensions.get::<Handle>().unwrap();
            let slot = parts.extensions.get::<PermitSlot>().unwrap();
            let permit = match run {
                1 => {
                    let permit = handle.take_permit();
                    assert!(handle.take_permit().is_none() && slot.take_permit().is_none());
                    permit
                }
                2 => {
                    let permit = slot.take_permit();
                    assert!(handle.take_permit().is_none() && slot.take_permit().is_none());
                    permit
                }
                // Left where it is.
                _ => None,
            };
            assert_eq!(permit.is_some(), run < 3);
            kept.lock().unwrap().push(parts);
            permits.lock().unwrap().push(permit);
            let active = ceiling.active();
            async move { Ok(text(200, active.to_string())) }
        }
    });
    for (key, active) in [("a", "1"), ("b", "2"), ("c", "3")] {
        assert_eq!(stack.send(keyed(key, "{}")).await.text(), active);
    }
    // The third handler left its permit, and keeps a clone of its request: the place is free.
    assert_eq!(ceiling.active(), 2);
    let parts = latest(&kept);
    assert!(parts.extensions.get::<Handle>().unwrap().take_permit().is_none());
    assert!(parts.extensions.get::<PermitSlot>().unwrap().take_permit().is_none());
    permits.lock().unwrap().clear();
    assert_eq!(ceiling.active(), 0);
}

#[tokio::test]
async fn a_permit_that_nobody_took_is_back_before_the_answer_is_there() {
    for fails in [false, true] {
        let (layer, _) = layer();
        let ceiling = Ceiling::new(1);
        let gate = Gate::default();
        let store = CueStore::default();
        store.cue(Call::Complete, Cue::Wait(gate.clone()));
        store.cue(Call::Release, Cue::Wait(gate.clone()));
        let kept: Kept<Parts> = Kept::default();
        let stack = Stack::new(&layer.store(store).ceiling(&ceiling), {
            let kept = Kept::clone(&kept);
            move |_, request| {
                kept.lock().unwrap().push(request.into_parts().0);
                async move { Ok(text(if fails { 500 } else { 200 }, "")) }
            }
        });
        let first = stack.spawn(keyed("k", "{}"));
        gate.reached_by(1).await;
        assert_eq!(ceiling.active(), 0, "it has answered, though it is not settled yet");
        gate.open();
        first.await.unwrap();
    }
}

#[tokio::test]
async fn a_permit_goes_back_when_the_handler_panics() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let kept: Kept<Parts> = Kept::default();
    let stack = Stack::new(&layer.ceiling(&ceiling), {
        let kept = Kept::clone(&kept);
        move |_, request| {
            kept.lock().unwrap().push(request.into_parts().0);
            async move { panic!("as it was told") }
        }
    });
    for request in [keyed("k", "{}"), unkeyed("{}")] {
        assert!(within(stack.spawn(request)).await.unwrap_err().is_panic());
        assert_eq!(ceiling.active(), 0);
    }
}

#[tokio::test]
async fn a_record_can_be_ended_after_the_response() {
    let (layer, store) = layer();
    let (stack, handles) = handles(&layer);
    stack.send(keyed("k", "{}")).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    let handle = latest(&handles);
    assert_eq!(handle.expire().await.unwrap(), Ownership::Held);
    assert!(store.is_empty());
    assert_eq!(handle.expire().await.unwrap(), Ownership::Lost);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}

#[tokio::test]
async fn a_record_ended_in_flight_is_never_born() {
    let (layer, store) = layer();
    let stack = Stack::new(&layer, |run, request| async move {
        let handle = request.extensions().get::<Handle>().unwrap();
        assert_eq!(handle.expire().await.unwrap(), Ownership::Held);
        Ok(text(200, format!("run {run}")))
    });
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    assert!(store.is_empty());
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}

#[tokio::test]
async fn a_held_entry_can_be_ended_or_kept_by_its_handler() {
    let (layer, store) = layer();
    let layer = layer.on_failure(OnFailure::Hold);
    let kept: Kept<Handle> = Kept::default();
    let stack = Stack::new(&layer, {
        let kept = Kept::clone(&kept);
        move |_, request| {
            kept.lock().unwrap().push(request.extensions().get::<Handle>().unwrap().clone());
            async move { Ok(text(500, "")) }
        }
    });
    stack.send(keyed("k", "{}")).await;
    let handle = latest(&kept);
    assert_eq!(handle.retain_for(Duration::from_secs(5)).await.unwrap(), Ownership::Held);
    stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
    assert_eq!(handle.expire().await.unwrap(), Ownership::Held);
    assert!(store.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_retention_said_in_flight_counts_from_completion() {
    let (layer, store) = layer();
    let stack = Stack::new(&layer, |_, request| async move {
        let handle = request.extensions().get::<Handle>().unwrap().clone();
        for seconds in [1, 500, 20] {
            // The last word counts.
            let said = handle.retain_for(Duration::from_secs(seconds)).await.unwrap();
            assert_eq!(said, Ownership::Held);
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
        Ok(text(200, ""))
    });
    stack.send(keyed("k", "{}")).await;
    tokio::time::advance(Duration::from_millis(19_999)).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(store.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_retention_said_afterwards_counts_from_then() {
    let (layer, store) = layer();
    let (stack, handles) = handles(&layer.retention(Duration::from_secs(60)));
    stack.send(keyed("k", "{}")).await;
    let handle = latest(&handles);
    tokio::time::advance(Duration::from_secs(50)).await;
    // Longer, then shorter, than what was left.
    assert_eq!(handle.retain_for(Duration::from_secs(100)).await.unwrap(), Ownership::Held);
    tokio::time::advance(Duration::from_secs(90)).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(handle.retain_for(Duration::from_secs(2)).await.unwrap(), Ownership::Held);
    tokio::time::advance(Duration::from_millis(1_999)).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(store.is_empty());
    assert_eq!(handle.retain_for(Duration::from_secs(9)).await.unwrap(), Ownership::Lost);
    assert_eq!(handle.expire().await.unwrap(), Ownership::Lost);
    assert!(store.is_empty(), "what has ended does not come back");
}

#[tokio::test(start_paused = true)]
async fn a_retention_too_long_for_a_clock_means_for_ever() {
    let (layer, store) = layer();
    let (stack, handles) = handles(&layer.retention(Duration::MAX));
    stack.send(keyed("k", "{}")).await;
    for _ in 0..2 {
        tokio::time::advance(Duration::from_secs(60 * 60 * 24 * 365 * 10)).await;
        assert!(stack.send(keyed("k", "{}")).await.is_replay());
        let said = latest(&handles).retain_for(Duration::MAX).await.unwrap();
        assert_eq!(said, Ownership::Held);
    }
    assert_eq!(store.len(), 1);
}

#[tokio::test]
async fn a_handle_has_no_power_over_a_later_entry_of_the_same_operation() {
    let (layer, store) = layer();
    let (stack, handles) = handles(&layer);
    stack.send(keyed("k", "{}")).await;
    let old = latest(&handles);
    assert_eq!(old.expire().await.unwrap(), Ownership::Held);
    stack.send(keyed("k", "{}")).await;
    let new = latest(&handles);
    assert_eq!(old.operation_id(), new.operation_id());
    assert_eq!(old.expire().await.unwrap(), Ownership::Lost);
    assert_eq!(old.retain_for(Duration::ZERO).await.unwrap(), Ownership::Lost);
    assert_eq!(store.len(), 1);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
    assert_eq!(new.expire().await.unwrap(), Ownership::Held);
}

#[tokio::test]
async fn a_handle_has_no_power_over_a_later_claim_in_flight() {
    let gate = Gate::default();
    let (layer, store) = layer();
    let kept: Kept<Handle> = Kept::default();
    let stack = Stack::new(&layer, {
        let (kept, gate) = (Kept::clone(&kept), gate.clone());
        move |run, request| {
            kept.lock().unwrap().push(request.extensions().get::<Handle>().unwrap().clone());
            let gate = gate.clone();
            async move {
                if run == 2 {
                    gate.pass().await;
                }
                Ok(text(if run == 1 { 500 } else { 200 }, format!("run {run}")))
            }
        }
    });
    stack.send(keyed("k", "{}")).await;
    let old = latest(&kept);
    let second = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    assert_eq!(old.expire().await.unwrap(), Ownership::Lost);
    assert_eq!(old.retain_for(Duration::ZERO).await.unwrap(), Ownership::Lost);
    old.effects_begin();
    assert_eq!(store.in_flight(), 1);
    gate.open();
    second.await.unwrap();
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_wish_said_while_the_record_is_being_written_waits_and_holds() {
    for ends in [false, true] {
        let (layer, _) = layer();
        let gate = Gate::default();
        let store = CueStore::default();
        store.cue(Call::Complete, Cue::Wait(gate.clone()));
        let (stack, handles) = handles(&layer.store(store.clone()));
        let first = stack.spawn(keyed("k", "{}"));
        gate.reached_by(1).await;
        let wish = tokio::spawn({
            let handle = latest(&handles);
            async move {
                if ends {
                    handle.expire().await
                } else {
                    handle.retain_for(Duration::from_secs(5)).await
                }
            }
        });
        tokio::task::yield_now().await;
        assert!(!wish.is_finished());
        gate.open();
        first.await.unwrap();
        assert_eq!(within(wish).await.unwrap().unwrap(), Ownership::Held);
        assert_eq!(store.memory.len(), usize::from(!ends));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(store.memory.len(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wish_that_the_store_fails_says_so() {
    let (layer, _) = layer();
    let store = CueStore::default();
    let (stack, handles) = handles(&layer.store(store.clone()));
    stack.send(keyed("k", "{}")).await;
    let handle = latest(&handles);
    store.cue(Call::Expire, Cue::Fail);
    store.cue(Call::Retain, Cue::Hang);
    assert!(!handle.expire().await.unwrap_err().is_timeout());
    let error = within(handle.retain_for(Duration::from_secs(1))).await.unwrap_err();
    assert!(error.is_timeout());
    store.heal();
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test]
async fn a_record_can_live_exactly_as_long_as_the_work_that_it_points_to() {
    let gate = Gate::default();
    let (layer, store) = layer();
    let layer = layer.retention(Duration::MAX);
    let ended = Gate::default();
    let stack = Stack::new(&layer, {
        let (gate, ended) = (gate.clone(), ended.clone());
        move |run, request| {
            let handle = request.extensions().get::<Handle>().unwrap().clone();
            let (gate, ended) = (gate.clone(), ended.clone());
            async move {
                tokio::spawn(async move {
                    gate.pass().await;
                    assert_eq!(handle.expire().await.unwrap(), Ownership::Held);
                    ended.pass().await;
                });
                Ok(text(202, format!("run {run}")))
            }
        }
    });
    stack.send(keyed("k", "{}")).await;
    gate.reached_by(1).await;
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    gate.let_through(1);
    ended.reached_by(1).await;
    assert!(store.is_empty());
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}
