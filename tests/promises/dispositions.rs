//! Every request ends in exactly one disposition, and is counted once.

use std::collections::HashSet;

use tower_idempotency::{
    Ceiling, Disposition, IdempotencyLayer, InFlight, MemoryStore, OnFailure, scope,
};

use crate::support::{
    Gate,
    call::Call,
    cue::{Cue, CueStore},
    keyed,
    stack::{Script, Stack, Step, layer, text},
    unkeyed,
};

/// Asserts what has been counted, and that nothing else was.
#[track_caller]
fn assert_counted(layer: &IdempotencyLayer, counted: &[(Disposition, u64)]) {
    let counts = layer.dispositions();
    let reached: Vec<_> = counts.iter().filter(|(_, count)| *count > 0).collect();
    let mut right = counted.to_vec();
    right.sort_by_key(|(disposition, _)| {
        Disposition::ALL.iter().position(|listed| listed == disposition)
    });
    assert_eq!(reached, right);
}

#[test]
fn the_names_are_told_apart_and_stay_as_they_are() {
    let names: Vec<_> = Disposition::ALL.iter().map(|disposition| disposition.name()).collect();
    let mut right = vec![
        "executed",
        "replayed",
        "waited",
        "conflict",
        "in_progress",
        "not_replayable",
        "outcome_unknown",
        "rejected_key",
        "rejected_scope",
        "too_large",
        "unreadable",
        "ceiling",
        "capacity",
        "store_unavailable",
        "not_recorded",
        "completion_unconfirmed",
        "passed",
    ];
    assert_eq!(names.iter().copied().collect::<HashSet<_>>().len(), names.len());
    let mut sorted = names.clone();
    sorted.sort_unstable();
    right.sort_unstable();
    assert_eq!(sorted, right);
    assert_eq!(Disposition::InProgress.to_string(), "in_progress");
}

#[tokio::test]
async fn passed() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer.clone().ceiling(&Ceiling::new(1)));
    stack.send(unkeyed("{}")).await;
    let mut get = keyed("k", "{}");
    *get.method_mut() = http::Method::GET;
    stack.send(get).await;
    assert_counted(&layer, &[(Disposition::Passed, 2)]);
}

#[tokio::test]
async fn executed_replayed_and_conflict() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    for body in ["{}", "{}", "[]"] {
        stack.send(keyed("k", body)).await;
    }
    assert_counted(
        &layer,
        &[(Disposition::Executed, 1), (Disposition::Replayed, 1), (Disposition::Conflict, 1)],
    );
}

#[tokio::test]
async fn waited_and_in_progress() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let handle = {
        let gate = gate.clone();
        move |_, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(text(200, ""))
            }
        }
    };
    let stack = Stack::new(&layer, handle);
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    let impatient = Stack::numbered(&layer.clone().in_flight(InFlight::Reject));
    impatient.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_in_progress");
    assert_counted(&layer, &[(Disposition::InProgress, 1)]);
    let repeat = stack.spawn(keyed("k", "{}"));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    gate.open();
    first.await.unwrap();
    assert!(repeat.await.unwrap().is_replay());
    assert_counted(
        &layer,
        &[(Disposition::InProgress, 1), (Disposition::Executed, 1), (Disposition::Waited, 1)],
    );
}

#[tokio::test]
async fn not_replayable_and_outcome_unknown() {
    let (layer, _) = layer();
    let layer = layer.on_failure(OnFailure::Hold).response_limit(8);
    let stack = Stack::new(&layer, |run, _| async move {
        Ok(if run == 1 { text(500, "") } else { text(200, "nine bytes") })
    });
    for key in ["held", "held", "tombstone", "tombstone"] {
        stack.send(keyed(key, "{}")).await;
    }
    assert_counted(
        &layer,
        &[
            (Disposition::Executed, 2),
            (Disposition::OutcomeUnknown, 1),
            (Disposition::NotReplayable, 1),
        ],
    );
}

#[tokio::test]
async fn rejected_key() {
    let (layer, _) = layer();
    let layer = layer.key_required(true);
    let stack = Stack::numbered(&layer);
    stack.send(unkeyed("{}")).await;
    stack.send(keyed("a b", "{}")).await;
    assert_counted(&layer, &[(Disposition::RejectedKey, 2)]);
}

#[tokio::test]
async fn rejected_scope() {
    let layer = IdempotencyLayer::new(scope::from_extension::<String>());
    Stack::numbered(&layer).send(keyed("k", "{}")).await;
    assert_counted(&layer, &[(Disposition::RejectedScope, 1)]);
}

#[tokio::test(start_paused = true)]
async fn too_large_and_unreadable() {
    let (layer, _) = layer();
    let layer = layer.request_limit(4);
    let stack = Stack::numbered(&layer);
    stack.send(keyed("k", "12345")).await;
    stack.send(keyed("k", "").map(|_| Script::unknown_length("12345"))).await;
    assert_counted(&layer, &[(Disposition::TooLarge, 2)]);
    stack.send(keyed("k", "").map(|_| Script::new([Step::Break]))).await;
    let stalls = Script::new([Step::Sleep(std::time::Duration::from_secs(30))]);
    stack.send(keyed("k", "").map(|_| stalls)).await;
    assert_counted(&layer, &[(Disposition::TooLarge, 2), (Disposition::Unreadable, 2)]);
}

#[tokio::test]
async fn ceiling() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let stack = Stack::numbered(&layer.clone().ceiling(&ceiling));
    let place = ceiling.try_acquire().unwrap();
    stack.send(unkeyed("{}")).await;
    stack.send(keyed("k", "{}")).await;
    assert_counted(&layer, &[(Disposition::Ceiling, 2)]);
    drop(place);

    // After the claim, too.
    let gate = Gate::default();
    let slow = Script::new([Step::Pass(gate.clone())]);
    let slow = stack.spawn(keyed("k", "").map(|_| slow));
    gate.reached_by(1).await;
    let _place = ceiling.try_acquire().unwrap();
    gate.open();
    slow.await.unwrap();
    assert_counted(&layer, &[(Disposition::Ceiling, 3)]);
}

#[tokio::test]
async fn capacity() {
    let layer = layer().0.store(MemoryStore::new().capacity(1));
    let stack = Stack::numbered(&layer);
    stack.send(keyed("a", "{}")).await;
    stack.send(keyed("b", "{}")).await;
    assert_counted(&layer, &[(Disposition::Executed, 1), (Disposition::Capacity, 1)]);
}

#[tokio::test]
async fn store_unavailable() {
    let store = CueStore::default();
    let layer = layer().0.store(store.clone());
    let stack = Stack::numbered(&layer);
    store.cue(Call::Claim, Cue::Fail);
    stack.send(keyed("k", "{}")).await;
    store.cue(Call::Lookup, Cue::Fail);
    stack.send(keyed("k", "{}")).await;
    assert_counted(&layer, &[(Disposition::StoreUnavailable, 2)]);
}

#[tokio::test]
async fn not_recorded_and_completion_unconfirmed() {
    for (cue, disposition) in
        [(Cue::Lost, Disposition::NotRecorded), (Cue::Fail, Disposition::CompletionUnconfirmed)]
    {
        for (status, call) in [(200, Call::Complete), (404, Call::Release)] {
            let store = CueStore::default();
            let layer = layer().0.store(store.clone());
            let stack = Stack::new(&layer, move |_, _| async move { Ok(text(status, "own")) });
            store.cue(call, cue.clone());
            // Whatever became of its claim, it has run: the caller gets the handler's answer.
            let answer = stack.send(keyed("k", "{}")).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (status, "own"));
            assert_counted(&layer, &[(disposition, 1)]);
        }
    }
}

#[tokio::test]
async fn an_execution_is_counted_however_it_ends() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |run, _| async move {
        match run {
            1 => Err(crate::support::stack::AnyError::new("an error")),
            2 => panic!("as it was told"),
            _ => Ok(text(500, "")),
        }
    });
    stack.call(keyed("k", "{}")).await.unwrap_err();
    assert!(stack.spawn(keyed("k", "{}")).await.unwrap_err().is_panic());
    stack.send(keyed("k", "{}")).await;
    assert_counted(&layer, &[(Disposition::Executed, 3)]);
}
