//! However many ask for one operation at the same time, it is executed once; the others wait, in
//! bounded number and for a bounded time, and get that execution's answer.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use tokio::{sync::Barrier, task::JoinHandle, time::Instant};
use tower::{Layer, ServiceExt};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, InFlight, MemoryStore, OnFailure, StoredResponse, scope,
};

use crate::support::{
    Answer, Gate, keyed,
    probe::{Probe, Reply},
    send,
    steps::settle,
};

/// A layer with a strict inner service, whose first runs wait at a gate.
struct Held {
    service: Idempotency<Probe>,
    store: MemoryStore<StoredResponse>,
    probe: Probe,
    gate: Gate,
}

impl Held {
    /// The first `runs` runs wait at the gate, then come to what `script` says.
    fn new(runs: usize, script: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        Self::with(runs, script, |layer| layer)
    }

    fn with(
        runs: usize,
        script: impl Fn(usize) -> Reply + Send + Sync + 'static,
        settings: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer,
    ) -> Self {
        let (gate, store) = (Gate::default(), MemoryStore::new().capacity(10_000));
        let probe = Probe::new(script).runs_wait_at(&gate, runs);
        let layer = IdempotencyLayer::new(scope::single_tenant()).store(store.clone());
        Self { service: settings(layer).layer(probe.clone()), store, probe, gate }
    }

    fn send(&self, key: &str) -> JoinHandle<Answer> {
        let (service, request) = (self.service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    }

    /// Starts an execution, which comes to the gate.
    async fn start(&self, key: &str) -> JoinHandle<Answer> {
        let before = self.probe.runs();
        let owner = self.send(key);
        self.gate.reached_by(before + 1).await;
        owner
    }

    /// Sends `number` repeats, and lets them come as far as they can.
    async fn repeat(&self, key: &str, number: usize) -> Vec<JoinHandle<Answer>> {
        let repeats = (0..number).map(|_| self.send(key)).collect();
        settle().await;
        repeats
    }
}

fn waiting(repeats: &[JoinHandle<Answer>]) -> usize {
    repeats.iter().filter(|repeat| !repeat.is_finished()).count()
}

async fn answers(repeats: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    let mut answers = Vec::new();
    for repeat in repeats {
        answers.push(repeat.await.unwrap());
    }
    answers
}

/// Asserts that this says "still in progress", and when to come back.
#[track_caller]
fn assert_in_progress(answer: &Answer) {
    answer.assert_refused(409, "idempotency_in_progress");
    assert_eq!(answer.json()["retry"], "same-key");
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!(seconds >= 1);
}

#[track_caller]
fn assert_replay_of(answer: &Answer, run: usize) {
    assert_eq!((answer.status.as_u16(), answer.text()), (200, &*format!("run {run}")));
    assert!(answer.is_replay());
}

/// Sends the same request from as many tasks as there are services, all at the same moment.
async fn race(services: Vec<Idempotency<Probe>>, key: &str) -> Vec<Answer> {
    let start = Arc::new(Barrier::new(services.len()));
    let racers = services.into_iter().map(|service| {
        let (start, request) = (Arc::clone(&start), keyed(key, "{}"));
        tokio::spawn(async move {
            start.wait().await;
            send(&service, request).await
        })
    });
    answers(racers.collect::<Vec<_>>()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn sixty_four_identical_requests_racing_are_executed_once() {
    let probe = Probe::answering();
    let service = IdempotencyLayer::new(scope::single_tenant()).layer(probe.clone());
    for round in 1..=40 {
        let answers = race(vec![service.clone(); 64], &format!("k{round}")).await;
        assert_eq!(probe.runs(), round);
        let (executed, repeats): (Vec<_>, Vec<_>) =
            answers.iter().partition(|answer| answer.status == 200 && !answer.is_replay());
        assert_eq!(executed.len(), 1);
        for repeat in repeats {
            if repeat.status == 200 {
                assert_replay_of(repeat, round);
            } else {
                assert_in_progress(repeat);
            }
        }
    }
    assert_eq!(probe.running(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn as_many_as_may_wait_all_get_the_one_answer() {
    let probe = Probe::answering();
    let service = IdempotencyLayer::new(scope::single_tenant()).layer(probe.clone());
    for round in 1..=40 {
        let answers = race(vec![service.clone(); 17], &format!("k{round}")).await;
        assert_eq!(probe.runs(), round);
        assert!(answers.iter().all(|answer| answer.text() == format!("run {round}")));
        assert_eq!(answers.iter().filter(|answer| answer.is_replay()).count(), 16);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn all_services_made_from_one_layer_execute_once_together() {
    let probe = Probe::answering();
    let layer = IdempotencyLayer::new(scope::single_tenant());
    for round in 1..=20 {
        // As routes and connections have them: each its own service, made from its own clone.
        let services = (0..17).map(|_| layer.clone().layer(probe.clone())).collect();
        let answers = race(services, &format!("k{round}")).await;
        assert_eq!(probe.runs(), round);
        assert!(answers.iter().all(|answer| answer.text() == format!("run {round}")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn racing_after_failures_never_runs_two_at_once() {
    // Every other run fails, so that the place goes from hand to hand among those who wait.
    let probe = Probe::new(|run| match run % 4 {
        0 => Reply::Status(200),
        1 => Reply::Error,
        2 => Reply::Status(500),
        _ => Reply::BreakInBody { known_length: true },
    });
    let service = IdempotencyLayer::new(scope::single_tenant()).layer(probe.clone());
    for round in 1..=20 {
        let start = Arc::new(Barrier::new(17));
        let racers: Vec<_> = (0..17)
            .map(|_| {
                let (start, service) = (Arc::clone(&start), service.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    // What the failed ones say is their own; only the count matters here.
                    let _answer = service.oneshot(keyed(&format!("k{round}"), "{}")).await;
                })
            })
            .collect();
        for racer in racers {
            racer.await.unwrap();
        }
        assert_eq!(probe.runs(), 4 * round, "three that failed, and one that is kept");
        assert_eq!((probe.most_running(), probe.running()), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn sixteen_wait_for_one_operation_and_the_next_are_refused_at_once() {
    let held = Held::new(2, |_| Reply::Status(200));
    for (round, key) in [(1, "k1"), (2, "k2")] {
        let owner = held.start(key).await;
        let repeats = held.repeat(key, 49).await;
        assert_eq!(waiting(&repeats), 16);
        held.gate.let_through(1);
        assert!(!owner.await.unwrap().is_replay());
        let (refused, replayed): (Vec<_>, Vec<_>) =
            answers(repeats).await.into_iter().partition(|answer| answer.status == 409);
        assert_eq!((refused.len(), replayed.len()), (33, 16));
        refused.iter().for_each(assert_in_progress);
        for answer in &replayed {
            assert_replay_of(answer, round);
        }
        assert_eq!(held.probe.runs(), round, "and the places are free for the next round");
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_and_twenty_four_wait_in_all() {
    let held = Held::new(65, |_| Reply::Status(200));
    let mut owners = Vec::new();
    let mut repeats = HashMap::new();
    for number in 0..65 {
        let key = format!("k{number}");
        owners.push(held.start(&key).await);
        repeats.insert(number, held.repeat(&key, 16).await);
    }
    for (number, repeats) in &repeats {
        assert_eq!(waiting(repeats), if *number < 64 { 16 } else { 0 }, "{number}");
    }
    held.gate.open();
    for (number, repeats) in repeats {
        for answer in answers(repeats).await {
            if number < 64 { assert!(answer.is_replay()) } else { assert_in_progress(&answer) }
        }
    }
    assert_eq!(held.probe.runs(), 65);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_makes_room_for_another() {
    let held = Held::new(1, |_| Reply::Status(200));
    let _owner = held.start("k").await;
    // More often than there are places in all.
    for _ in 0..70 {
        let repeats = held.repeat("k", 16).await;
        assert_eq!(waiting(&repeats), 16);
        for repeat in repeats {
            repeat.abort();
        }
        settle().await;
    }
    let repeats = held.repeat("k", 17).await;
    assert_eq!(waiting(&repeats), 16);
}

#[tokio::test(start_paused = true)]
async fn where_repeats_are_rejected_they_are_refused_at_once() {
    let held = Held::with(1, |_| Reply::Status(200), |layer| layer.in_flight(InFlight::Reject));
    let owner = held.start("k").await;
    let before = Instant::now();
    assert_in_progress(&send(&held.service, keyed("k", "{}")).await);
    assert_eq!(before.elapsed(), Duration::ZERO);
    held.gate.open();
    assert!(!owner.await.unwrap().is_replay());
    assert_replay_of(&send(&held.service, keyed("k", "{}")).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_waits_ten_seconds_and_the_execution_goes_on() {
    let held = Held::new(1, |_| Reply::Status(200));
    let owner = held.start("k").await;
    let before = Instant::now();
    assert_in_progress(&send(&held.service, keyed("k", "{}")).await);
    let waited = before.elapsed();
    assert!((10_000..10_010).contains(&waited.as_millis()), "{waited:?}");
    assert!(!owner.is_finished());
    held.gate.open();
    assert!(!owner.await.unwrap().is_replay());
    assert_replay_of(&send(&held.service, keyed("k", "{}")).await, 1);
    assert_eq!(held.probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_goes_back_to_the_claim_has_only_what_is_left_of_its_time() {
    let held = Held::new(2, |_| Reply::Status(500));
    let _owner = held.start("k").await;
    let before = Instant::now();
    let repeats = held.repeat("k", 2).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    held.gate.let_through(1);
    held.gate.reached_by(2).await;
    assert_eq!(waiting(&repeats), 2, "one of them runs now, the other waits on");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(waiting(&repeats), 1);
    assert!(before.elapsed() < Duration::from_secs(12));
    let given_up = repeats.into_iter().find(JoinHandle::is_finished).unwrap();
    assert_in_progress(&given_up.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn waiters_are_woken_by_the_record_at_once() {
    let held = Held::new(1, |_| Reply::Status(200));
    let owner = held.start("k").await;
    let repeats = held.repeat("k", 16).await;
    let before = Instant::now();
    held.gate.open();
    owner.await.unwrap();
    for answer in answers(repeats).await {
        assert_replay_of(&answer, 1);
    }
    assert!(before.elapsed() < Duration::from_millis(100), "nobody polls for it");
}

#[tokio::test(start_paused = true)]
async fn after_a_release_exactly_one_waiter_executes_and_the_others_wait_for_it() {
    for failure in [Reply::Status(500), Reply::Status(404), Reply::Stream(500)] {
        let held = Held::new(2, move |run| if run == 1 { failure } else { Reply::Status(200) });
        let owner = held.start("k").await;
        let repeats = held.repeat("k", 16).await;
        held.gate.let_through(1);
        held.gate.reached_by(2).await;
        settle().await;
        assert_eq!((held.probe.runs(), waiting(&repeats)), (2, 16), "{failure:?}");
        assert_ne!(owner.await.unwrap().status, 200);
        held.gate.open();
        let answers = answers(repeats).await;
        assert!(answers.iter().all(|answer| answer.text() == "run 2"));
        assert_eq!(answers.iter().filter(|answer| answer.is_replay()).count(), 15);
        assert_eq!((held.probe.runs(), held.probe.most_running()), (2, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_go_on_when_the_execution_panics_errs_or_breaks() {
    let failures = [
        Reply::Error,
        Reply::PanicInFuture,
        Reply::PanicInBody { known_length: true },
        Reply::PanicInBody { known_length: false },
        Reply::BreakInBody { known_length: true },
        Reply::BreakInBody { known_length: false },
    ];
    for failure in failures {
        let held = Held::new(1, move |run| if run == 1 { failure } else { Reply::Status(200) });
        let owner = held.start("k").await;
        let repeats = held.repeat("k", 5).await;
        held.gate.open();
        assert!(owner.await.is_err(), "{failure:?}");
        let answers = answers(repeats).await;
        assert!(answers.iter().all(|answer| answer.text() == "run 2"), "{failure:?}");
        assert_eq!((held.probe.runs(), held.probe.most_running()), (2, 1), "{failure:?}");
        assert_eq!((held.store.len(), held.store.in_flight()), (1, 0), "{failure:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_are_told_when_the_outcome_is_unknown() {
    let held = Held::with(1, |_| Reply::Status(500), |layer| layer.on_failure(OnFailure::Hold));
    let owner = held.start("k").await;
    let repeats = held.repeat("k", 16).await;
    held.gate.open();
    assert_eq!(owner.await.unwrap().status, 500);
    for answer in answers(repeats).await {
        answer.assert_refused(409, "idempotency_outcome_unknown");
    }
    assert_eq!(held.probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_stream_get_all_of_it_when_it_has_ended() {
    let held = Held::new(1, |_| Reply::Stream(200));
    let owner = held.start("k").await;
    let repeats = held.repeat("k", 3).await;
    held.gate.open();
    assert_eq!(owner.await.unwrap().text(), "run 1");
    for answer in answers(repeats).await {
        assert_eq!((answer.text(), answer.is_replay()), ("run 1", true));
        assert_eq!(answer.header("location"), Some("/v1/runs/1"));
    }
    assert_eq!(held.probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_stream_are_told_that_it_cannot_be_replayed_when_it_has_ended() {
    let held = Held::with(1, |_| Reply::Stream(200), |layer| layer.record_streams(false));
    let owner = held.start("k").await;
    let repeats = held.repeat("k", 3).await;
    held.gate.open();
    assert_eq!(owner.await.unwrap().text(), "run 1");
    for answer in answers(repeats).await {
        answer.assert_refused(409, "idempotency_not_replayable");
        assert_eq!(answer.header("location"), Some("/v1/runs/1"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_answered_at_once_while_the_first_request_is_running() {
    for in_flight in [InFlight::Wait(Duration::from_secs(10)), InFlight::Reject] {
        let held = Held::with(1, |_| Reply::Status(200), |layer| layer.in_flight(in_flight));
        let owner = held.start("k").await;
        // Nor does it matter that nobody else may wait.
        let _repeats = held.repeat("k", 20).await;
        let before = Instant::now();
        let answer = send(&held.service, keyed("k", r#"{"another": 1}"#)).await;
        answer.assert_refused(409, "idempotency_conflict");
        assert_eq!(before.elapsed(), Duration::ZERO);
        held.gate.open();
        assert_eq!(owner.await.unwrap().text(), "run 1");
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_for_one_operation_holds_up_no_other() {
    let held = Held::new(1, |_| Reply::Status(200));
    let _owner = held.start("k").await;
    let repeats = held.repeat("k", 16).await;
    assert_eq!(send(&held.service, keyed("another", "{}")).await.text(), "run 2");
    assert_eq!(waiting(&repeats), 16);
}

#[tokio::test(start_paused = true)]
async fn different_keys_run_side_by_side() {
    let held = Held::new(3, |_| Reply::Status(200));
    let mut owners = Vec::new();
    for key in ["a", "b", "c"] {
        owners.push(held.start(key).await);
    }
    assert_eq!(held.probe.most_running(), 3);
    held.gate.open();
    for owner in owners {
        assert!(!owner.await.unwrap().is_replay());
    }
}

#[test]
fn those_who_wait_are_woken_with_nothing_locked() {
    /// An executor that looks into the store before it wakes a task.
    struct Looks(MemoryStore<StoredResponse>, AtomicUsize);
    impl Wake for Looks {
        fn wake(self: Arc<Self>) {
            let _live = self.0.len();
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }

    let endings = [
        (Reply::Status(200), OnFailure::Release),
        (Reply::Status(500), OnFailure::Release),
        (Reply::Status(500), OnFailure::Hold),
    ];
    for (reply, rule) in endings {
        // A thread of its own, because a lock that is taken twice hangs it.
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let held = Held::with(1, move |_| reply, |layer| layer.on_failure(rule));
                let owner = held.start("k").await;
                let looks = Arc::new(Looks(held.store.clone(), AtomicUsize::new(0)));
                let waker = Waker::from(Arc::clone(&looks));
                let mut waiter = Box::pin(held.service.clone().oneshot(keyed("k", "{}")));
                assert!(waiter.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                held.gate.open();
                owner.await.unwrap();
                done.send(looks.1.load(Ordering::SeqCst)).unwrap();
            });
        });
        let woken = is_done.recv_timeout(Duration::from_secs(30)).expect("it hangs");
        assert_eq!(woken, 1, "{reply:?} {rule:?}");
    }
}
