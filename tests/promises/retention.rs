//! A record lives for its retention, counted from completion, and not a moment longer.

use std::time::Duration;

use tokio::time::{Instant, advance};
use tower_idempotency::{InFlight, MemoryStore, StoredResponse};

use crate::support::{
    Gate, keyed,
    stack::{Stack, layer, text},
    within,
};

const MILLISECOND: Duration = Duration::from_millis(1);

/// A millisecond less than so many seconds.
fn just_before(seconds: u64) -> Duration {
    Duration::from_millis(seconds * 1_000 - 1)
}

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

#[tokio::test(start_paused = true)]
async fn a_record_is_replayed_until_its_deadline_and_new_work_from_then_on() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.retention(seconds(60)));
    stack.send(keyed("k", "{}")).await;
    advance(just_before(60)).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(store.len(), 1);
    advance(MILLISECOND).await;
    assert_eq!(store.len(), 0);
    let fresh = stack.send(keyed("k", "{}")).await;
    assert_eq!((fresh.text(), fresh.is_replay()), ("run 2", false));
}

#[tokio::test(start_paused = true)]
async fn an_hour_is_the_default() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    stack.send(keyed("k", "{}")).await;
    advance(just_before(3_600)).await;
    assert_eq!(store.len(), 1);
    advance(MILLISECOND).await;
    assert_eq!(store.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn retention_counts_from_completion_and_replays_do_not_extend_it() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer.retention(seconds(10)), |run, _| async move {
        tokio::time::sleep(seconds(8)).await;
        Ok(text(200, format!("run {run}")))
    });
    stack.send(keyed("k", "{}")).await;
    let completed = Instant::now();
    for _ in 0..9 {
        advance(seconds(1)).await;
        assert!(stack.send(keyed("k", "{}")).await.is_replay());
    }
    advance(just_before(1)).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    advance(MILLISECOND).await;
    assert_eq!(completed.elapsed(), seconds(10));
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}

#[tokio::test(start_paused = true)]
async fn what_is_running_never_ends_by_time() {
    let gate = Gate::default();
    let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(1);
    let layer = layer().0.store(store.clone()).retention(seconds(1)).in_flight(InFlight::Reject);
    let stack = Stack::waiting_at(&gate, usize::MAX, &layer);
    let first = tokio::spawn(tower::ServiceExt::oneshot(
        stack.service.clone(),
        keyed("k", "{}").map(crate::support::stack::any),
    ));
    gate.reached_by(1).await;
    advance(seconds(60 * 60 * 48)).await;
    assert_eq!((store.len(), store.in_flight()), (1, 1));
    stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_in_progress");
    stack.send(keyed("k", "[]")).await.assert_refused(409, "idempotency_conflict");
    stack.send(keyed("new", "{}")).await.assert_refused(503, "idempotency_capacity");
    gate.open();
    within(first).await.unwrap().unwrap();
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(stack.runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_record_that_has_ended_gives_its_slot_back_without_any_traffic() {
    let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(3);
    let layer = layer().0.store(store.clone()).retention(seconds(60));
    let stack = Stack::numbered(&layer);
    for key in ["a", "b", "c"] {
        stack.send(keyed(key, "{}")).await;
        advance(seconds(1)).await;
    }
    let refused = stack.send(keyed("d", "{}")).await;
    refused.assert_refused(503, "idempotency_capacity");
    assert_eq!(refused.header("retry-after"), Some("57"), "when the first of them ends");
    for known in ["a", "b", "c"] {
        assert!(stack.send(keyed(known, "{}")).await.is_replay(), "nothing live is dropped");
    }
    advance(seconds(57)).await;
    assert_eq!(store.len(), 2);
    assert_eq!(stack.send(keyed("d", "{}")).await.text(), "run 4");
    stack.send(keyed("a", "{}")).await.assert_refused(503, "idempotency_capacity");
    assert!(stack.send(keyed("b", "{}")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn many_records_that_end_in_the_same_moment_have_all_ended() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer.retention(seconds(60)));
    let keys: Vec<_> = (0..500).map(|number| number.to_string()).collect();
    for key in &keys {
        stack.send(keyed(key, "{}")).await;
    }
    advance(seconds(60)).await;
    // They are cleared some at a time; what is not cleared yet has ended all the same.
    for key in &keys {
        assert!(!stack.send(keyed(key, "{}")).await.is_replay());
    }
}

#[tokio::test(start_paused = true)]
async fn many_keys_over_time_leave_nothing_behind() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.retention(seconds(1)));
    for round in 0..40 {
        for key in 0..500 {
            stack.send(keyed(&format!("{round}-{key}"), "{}")).await;
        }
        advance(seconds(1)).await;
        assert_eq!(store.len(), 0);
    }
    assert_eq!(stack.runs.count(), 20_000);
    assert!(format!("{store:?}").contains("entries: 0"));
}
