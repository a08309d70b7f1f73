//! The engine without HTTP: any async function runs once per operation, and every repeat gets the
//! value of that run.

use std::{collections::HashSet, error::Error, fmt, future::Future, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{sync::Barrier, task::JoinHandle, time::Instant};
use tower_idempotency::{
    Done, Engine, Fingerprint, InFlight, MemoryStore, OnFailure, OnLeave, Operation, OperationId,
    RunError, Scope, store::StoreError,
};

use crate::support::{
    GENEROUS, Gate, Runs, assert_impossible,
    call::Call,
    cue::{Cue, CueStore},
    within,
};

/// What the work fails with.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failed(usize);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run {} failed", self.0)
    }
}

impl Error for Failed {}

type Ran = Result<Done<String>, RunError<Failed>>;

/// An engine whose every run is counted and may wait at a gate, and its store.
#[derive(Clone)]
struct Desk {
    engine: Engine<String>,
    runs: Runs,
    gate: Gate,
}

impl Desk {
    fn new(engine: Engine<String>) -> Self {
        Self { engine, runs: Runs::default(), gate: Gate::default() }
    }

    /// Over a store in memory, which is returned.
    fn in_memory(
        set: impl FnOnce(Engine<String>) -> Engine<String>,
    ) -> (Self, MemoryStore<String>) {
        let store = MemoryStore::new();
        (Self::new(set(Engine::new(store.clone()))), store)
    }

    /// Over a store that takes its cues.
    fn on_cue(set: impl FnOnce(Engine<String>) -> Engine<String>) -> (Self, CueStore<String>) {
        let store = CueStore::default();
        (Self::new(set(Engine::new(store.clone()))), store)
    }

    /// Runs what says which run it was.
    async fn run(&self, operation: impl Into<Option<Operation>>) -> Ran {
        let runs = self.runs.clone();
        let work = async move { Ok(format!("run {}", runs.run())) };
        within(self.engine.run(operation.into(), work)).await
    }

    /// The same, in a task of its own, and after the gate.
    fn spawn(&self, operation: impl Into<Option<Operation>>) -> JoinHandle<Ran> {
        self.spawn_and(operation, |run| Ok(format!("run {run}")))
    }

    fn spawn_and(
        &self,
        operation: impl Into<Option<Operation>>,
        end: impl FnOnce(usize) -> Result<String, Failed> + Send + 'static,
    ) -> JoinHandle<Ran> {
        let (engine, operation) = (self.engine.clone(), operation.into());
        let (runs, gate) = (self.runs.clone(), self.gate.clone());
        tokio::spawn(async move {
            let work = async move {
                let run = runs.run();
                gate.pass().await;
                end(run)
            };
            engine.run(operation, work).await
        })
    }

    async fn fail(&self, operation: impl Into<Option<Operation>>) -> Ran {
        let runs = self.runs.clone();
        let work = async move { Err(Failed(runs.run())) };
        within(self.engine.run(operation.into(), work)).await
    }

    async fn panic(&self, operation: impl Into<Option<Operation>>) {
        let (engine, runs, operation) = (self.engine.clone(), self.runs.clone(), operation.into());
        let running = tokio::spawn(async move {
            let work = async move { panic!("run {} panics, as it was told to", runs.run()) };
            let ran: Result<_, RunError<Failed>> = engine.run(operation, work).await;
            drop(ran);
        });
        let panic = within(running).await.expect_err("it panics").into_panic();
        assert_eq!(panic.downcast_ref(), Some(&"run 1 panics, as it was told to".to_owned()));
    }

    /// Asks with work that is not to be polled.
    async fn ask(&self, operation: Operation) -> Ran {
        within(self.engine.run(Some(operation), never())).await
    }
}

/// Work that is not to run.
async fn never() -> Result<String, Failed> {
    panic!("it runs")
}

fn operation(key: &str) -> Operation {
    Operation::new(&Scope::new("tenant"), key)
}

fn asking(key: &str, asked: &str) -> Operation {
    operation(key).asking_for(Fingerprint::of([asked]))
}

fn done(value: &str, replayed: bool) -> (String, bool) {
    (value.to_owned(), replayed)
}

#[track_caller]
fn value(ran: Ran) -> (String, bool) {
    let Done { value, replayed, .. } = ran.unwrap();
    (value, replayed)
}

/// Everybody else goes as far as they can.
async fn others_go_on() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_repeat_gets_the_first_value_and_runs_nothing() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
    for _ in 0..3 {
        assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
    }
    assert_eq!((desk.runs.count(), store.len(), store.in_flight()), (1, 1, 0));
}

#[tokio::test]
async fn repeats_that_come_while_it_runs_wait_for_the_real_value() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    let first = desk.spawn(operation("k"));
    desk.gate.reached_by(1).await;
    let repeats: Vec<_> = (0..15).map(|_| desk.spawn(operation("k"))).collect();
    others_go_on().await;
    assert!(repeats.iter().all(|repeat| !repeat.is_finished()), "nothing is known yet");
    desk.gate.open();
    assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
    for repeat in repeats {
        assert_eq!(value(within(repeat).await.unwrap()), done("run 1", true));
    }
    assert_eq!((desk.runs.count(), store.len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_callers_who_race_exactly_one_runs_and_all_get_its_value() {
    for round in 0..50 {
        let (desk, store) = Desk::in_memory(|engine| engine);
        let start = Arc::new(Barrier::new(16));
        let racers: Vec<_> = (0..16)
            .map(|_| {
                let (desk, start) = (desk.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    start.wait().await;
                    desk.run(operation("k")).await
                })
            })
            .collect();
        let mut firsts = 0;
        for racer in racers {
            let (value, replayed) = value(within(racer).await.unwrap());
            assert_eq!(value, "run 1");
            firsts += usize::from(!replayed);
        }
        assert_eq!((firsts, desk.runs.count(), store.len()), (1, 1, 1), "{round}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_repeat_waits_as_long_as_was_set_and_is_then_told() {
    for (rule, waits) in [
        (None, Duration::from_secs(10)),
        (Some(InFlight::Wait(Duration::from_secs(3))), Duration::from_secs(3)),
        (Some(InFlight::Reject), Duration::ZERO),
    ] {
        let (desk, _) = Desk::in_memory(|engine| match rule {
            Some(rule) => engine.in_flight(rule),
            None => engine,
        });
        let first = desk.spawn(operation("k"));
        desk.gate.reached_by(1).await;
        let began = Instant::now();
        let told = desk.ask(operation("k")).await;
        assert!(matches!(told, Err(RunError::InProgress)), "{told:?}");
        assert_eq!(began.elapsed(), waits);
        desk.gate.open();
        assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
        assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
    }
}

#[tokio::test(start_paused = true)]
async fn as_many_wait_as_was_set_and_the_rest_is_told_at_once() {
    let (desk, _) = Desk::in_memory(|engine| engine.waiters(2, 3));
    for key in ["a", "b"] {
        drop(desk.spawn(operation(key)));
    }
    desk.gate.reached_by(2).await;
    let waiting: Vec<_> = ["a", "a", "b"].map(|key| desk.spawn(operation(key))).into();
    others_go_on().await;
    let began = Instant::now();
    for key in ["a", "b"] {
        let told = desk.ask(operation(key)).await;
        assert!(matches!(told, Err(RunError::InProgress)), "{key}: {told:?}");
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
    desk.gate.open();
    for repeat in waiting {
        assert!(value(within(repeat).await.unwrap()).1);
    }
}

#[tokio::test]
async fn a_first_run_that_fails_records_nothing_and_the_repeat_runs() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    for run in 1..=2 {
        let failed = desk.fail(operation("k")).await;
        assert!(matches!(failed, Err(RunError::Work(Failed(number))) if number == run));
        assert!(store.is_empty());
    }
    assert_eq!(value(desk.run(operation("k")).await), done("run 3", false));
    assert_eq!(value(desk.ask(operation("k")).await), done("run 3", true));
}

#[tokio::test]
async fn when_the_first_run_fails_one_of_those_who_wait_runs_and_the_others_get_its_value() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    let first = desk.spawn_and(operation("k"), |run| Err(Failed(run)));
    desk.gate.reached_by(1).await;
    let repeats: Vec<_> = (0..5).map(|_| desk.spawn(operation("k"))).collect();
    others_go_on().await;
    desk.gate.let_through(1);
    assert!(matches!(within(first).await.unwrap(), Err(RunError::Work(Failed(1)))));
    desk.gate.reached_by(2).await;
    others_go_on().await;
    assert!(repeats.iter().all(|repeat| !repeat.is_finished()), "they wait for the second");
    desk.gate.open();
    let mut firsts = 0;
    for repeat in repeats {
        let (value, replayed) = value(within(repeat).await.unwrap());
        assert_eq!(value, "run 2");
        firsts += usize::from(!replayed);
    }
    assert_eq!((firsts, desk.runs.count()), (1, 2));
}

#[tokio::test]
async fn a_panic_is_the_callers_own_and_the_repeat_runs() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    desk.panic(operation("k")).await;
    assert!(store.is_empty());
    assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
    assert_eq!(value(desk.run(operation("k")).await), done("run 2", false));
}

#[tokio::test]
async fn a_panic_wakes_those_who_wait() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    let first = desk.spawn_and(operation("k"), |_| panic!("it panics, as it was told to"));
    desk.gate.reached_by(1).await;
    let repeat = desk.spawn(operation("k"));
    others_go_on().await;
    desk.gate.open();
    assert!(within(first).await.unwrap_err().is_panic());
    assert_eq!(value(within(repeat).await.unwrap()), done("run 2", false));
}

#[tokio::test(start_paused = true)]
async fn held_failures_stay_shut_until_their_retention_ends() {
    let retention = Duration::from_secs(30);
    // There is no answer to record of a failure, so that rule holds too.
    for rule in [OnFailure::Hold, OnFailure::Record] {
        for panics in [false, true] {
            let (desk, store) =
                Desk::in_memory(|engine| engine.on_failure(rule).retention(retention));
            if panics {
                desk.panic(operation("k")).await;
            } else {
                assert!(matches!(desk.fail(operation("k")).await, Err(RunError::Work(Failed(1)))));
            }
            tokio::time::advance(retention - Duration::from_nanos(1)).await;
            let told = desk.ask(operation("k")).await;
            assert!(matches!(told, Err(RunError::OutcomeUnknown)), "{rule:?}: {told:?}");
            assert_eq!(store.len(), 1);
            tokio::time::advance(Duration::from_nanos(1)).await;
            assert_eq!(value(desk.run(operation("k")).await), done("run 2", false));
        }
    }
}

#[tokio::test]
async fn those_who_wait_for_what_is_then_held_are_told() {
    let (desk, store) = Desk::in_memory(|engine| engine.on_failure(OnFailure::Hold));
    let first = desk.spawn_and(operation("k"), |run| Err(Failed(run)));
    desk.gate.reached_by(1).await;
    let repeat = desk.spawn(operation("k"));
    others_go_on().await;
    desk.gate.open();
    assert!(within(first).await.unwrap().is_err());
    assert!(matches!(within(repeat).await.unwrap(), Err(RunError::OutcomeUnknown)));
    assert!(store.remove(&operation("k").id()));
    assert_eq!(value(desk.run(operation("k")).await), done("run 2", false));
}

#[tokio::test]
async fn without_an_operation_it_runs_always_and_keeps_nothing() {
    let (desk, store) = Desk::on_cue(|engine| engine);
    for call in [Call::Lookup, Call::Claim, Call::Withdraw, Call::Complete] {
        store.cue(call, Cue::Fail);
    }
    for run in 1..=3 {
        assert_eq!(value(desk.run(None).await), done(&format!("run {run}"), false));
    }
    assert!(matches!(desk.fail(None).await, Err(RunError::Work(Failed(4)))));
    assert!(store.calls().is_empty());
}

#[tokio::test]
async fn other_keys_and_other_scopes_are_other_operations() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    let operations =
        [("a", "b"), ("a", "c"), ("b", "b"), ("ab", ""), ("", "ab"), ("a", "B"), ("a", "b ")]
            .map(|(scope, key)| Operation::new(&Scope::new(scope), key));
    for (number, operation) in (1..).zip(operations) {
        let run = format!("run {number}");
        assert_eq!(value(desk.run(operation).await), done(&run, false));
        assert_eq!(value(desk.ask(operation).await), done(&run, true));
    }
    assert_eq!(store.len(), operations.len());
    let ids: HashSet<_> = operations.map(|operation| operation.id()).into();
    assert_eq!(ids.len(), operations.len());
    assert!(ids.contains(&OperationId::new(&Scope::new("a"), "b")));
}

#[tokio::test]
async fn a_key_used_for_something_else_is_a_conflict_where_that_is_said() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    let first = desk.spawn(asking("k", "one"));
    desk.gate.reached_by(1).await;
    let told = desk.ask(asking("k", "other")).await;
    assert!(matches!(told, Err(RunError::Conflict)), "while it runs, too: {told:?}");
    desk.gate.open();
    assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
    assert!(matches!(desk.ask(asking("k", "other")).await, Err(RunError::Conflict)));
    assert_eq!(value(desk.ask(asking("k", "one")).await), done("run 1", true));

    // What was said once counts: saying nothing asks for something else.
    assert!(matches!(desk.ask(operation("k")).await, Err(RunError::Conflict)));
}

#[tokio::test]
async fn where_it_is_not_said_what_is_asked_for_the_first_value_is_given() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
    assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
    assert!(matches!(desk.ask(asking("k", "one")).await, Err(RunError::Conflict)));
}

#[tokio::test(start_paused = true)]
async fn expired_keys_run_again_and_repeats_extend_nothing() {
    let five_minutes = Duration::from_secs(5 * 60);
    for (set, retention) in
        [(None, Duration::from_secs(60 * 60)), (Some(five_minutes), five_minutes)]
    {
        let (desk, store) = Desk::in_memory(|engine| match set {
            Some(retention) => engine.retention(retention),
            None => engine,
        });
        assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
        for _ in 0..2 {
            tokio::time::advance(retention / 2 - Duration::from_nanos(1)).await;
            assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
        }
        tokio::time::advance(Duration::from_nanos(2)).await;
        assert!(store.is_empty());
        assert_eq!(value(desk.run(operation("k")).await), done("run 2", false));
    }
}

#[tokio::test(start_paused = true)]
async fn retention_counts_from_completion() {
    let (desk, _) = Desk::in_memory(|engine| engine.retention(Duration::from_secs(30)));
    let first = desk.spawn(operation("k"));
    desk.gate.reached_by(1).await;
    tokio::time::advance(Duration::from_secs(100)).await;
    desk.gate.open();
    assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
    tokio::time::advance(Duration::from_secs(29)).await;
    assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
}

#[tokio::test(start_paused = true)]
async fn where_there_is_no_room_it_is_said_when_there_is() {
    let store = MemoryStore::new().capacity(2);
    let engine = Engine::new(store.clone()).retention(Duration::from_secs(100));
    let desk = Desk::new(engine);
    for key in ["a", "b"] {
        drop(desk.spawn(operation(key)));
    }
    desk.gate.reached_by(2).await;
    let full = desk.ask(operation("c")).await;
    assert!(matches!(full, Err(RunError::Full { room_in: None })), "nobody knows: {full:?}");
    desk.gate.let_through(1);
    others_go_on().await;
    tokio::time::advance(Duration::from_secs(40)).await;
    desk.gate.open();
    others_go_on().await;
    for _ in 0..2 {
        let Err(RunError::Full { room_in }) = desk.ask(operation("c")).await else {
            panic!("there is room")
        };
        assert_eq!(room_in, Some(Duration::from_secs(60)));
    }
    assert!(value(desk.ask(operation("a")).await).1, "what is known is answered");
    assert_eq!(store.len(), 2);
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(value(desk.run(operation("c")).await), done("run 3", false));
}

#[tokio::test(start_paused = true)]
async fn work_whose_caller_leaves_finishes_and_is_recorded() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    let first = desk.spawn(operation("k"));
    desk.gate.reached_by(1).await;
    first.abort();
    assert!(within(first).await.unwrap_err().is_cancelled());
    assert_eq!((store.len(), store.in_flight()), (1, 1));
    let repeat = desk.spawn(operation("k"));
    others_go_on().await;
    desk.gate.open();
    assert_eq!(value(within(repeat).await.unwrap()), done("run 1", true));
    assert_eq!(desk.runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn work_runs_on_without_its_caller_only_for_so_long() {
    for (rule, is_held) in [(OnFailure::Release, false), (OnFailure::Hold, true)] {
        let limit = Duration::from_secs(20);
        let (desk, store) = Desk::in_memory(|engine| engine.on_failure(rule).finish_within(limit));
        let first = desk.spawn(operation("k"));
        desk.gate.reached_by(1).await;
        first.abort();
        assert!(within(first).await.is_err());
        tokio::time::sleep(limit - Duration::from_millis(1)).await;
        assert_eq!(store.in_flight(), 1);
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert_eq!((store.in_flight(), store.len()), (0, usize::from(is_held)));
        assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
    }
}

#[tokio::test]
async fn with_the_other_rule_work_ends_with_its_caller() {
    for (rule, is_held) in [(OnFailure::Release, false), (OnFailure::Hold, true)] {
        let (desk, store) =
            Desk::in_memory(|engine| engine.on_leave(OnLeave::Cancel).on_failure(rule));
        let first = desk.spawn(operation("k"));
        desk.gate.reached_by(1).await;
        first.abort();
        assert!(within(first).await.is_err());
        assert_eq!((store.in_flight(), store.len()), (0, usize::from(is_held)));
        assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
        desk.gate.open();
        let repeat = within(desk.spawn(operation("k"))).await.unwrap();
        if is_held {
            assert!(matches!(repeat, Err(RunError::OutcomeUnknown)));
        } else {
            assert_eq!(value(repeat), done("run 2", false));
        }
    }
}

#[tokio::test]
async fn without_an_operation_work_ends_with_its_caller() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    let running = desk.spawn(None);
    desk.gate.reached_by(1).await;
    let held = Arc::new(());
    let (engine, gate, in_work) = (desk.engine.clone(), Gate::default(), Arc::clone(&held));
    let work = {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            drop(in_work);
            Ok::<_, Failed>(String::new())
        }
    };
    let leaving = tokio::spawn(async move { engine.run(None, work).await });
    gate.reached_by(1).await;
    leaving.abort();
    assert!(within(leaving).await.is_err());
    assert_eq!(Arc::strong_count(&held), 1, "the work is gone");
    desk.gate.open();
    assert_eq!(value(within(running).await.unwrap()), done("run 1", false));
}

#[tokio::test(start_paused = true)]
async fn a_caller_who_leaves_before_the_work_has_begun_leaves_nothing() {
    let (desk, store) = Desk::on_cue(|engine| engine.store_timeout(GENEROUS));
    let claiming = Gate::default();
    store.cue(Call::Claim, Cue::Wait(claiming.clone()));
    let first = desk.spawn(operation("k"));
    claiming.reached_by(1).await;
    first.abort();
    assert!(within(first).await.is_err());
    assert_eq!(store.called(Call::Withdraw), 1, "it may have been written");
    claiming.open();
    store.heal();
    others_go_on().await;
    assert!(store.memory.is_empty());
    assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
    assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
}

#[tokio::test]
async fn one_who_waits_and_leaves_takes_nothing_along() {
    let (desk, store) = Desk::in_memory(|engine| engine.waiters(1, 1));
    let first = desk.spawn(operation("k"));
    desk.gate.reached_by(1).await;
    for _ in 0..3 {
        let repeat = desk.spawn(operation("k"));
        others_go_on().await;
        assert!(!repeat.is_finished(), "there is a place to wait at");
        repeat.abort();
        assert!(within(repeat).await.unwrap_err().is_cancelled());
    }
    desk.gate.open();
    assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
    assert_eq!((store.len(), desk.runs.count()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_what_runs_and_counts_what_is_left() {
    let (desk, _) = Desk::in_memory(|engine| engine);
    let began = Instant::now();
    assert_eq!(desk.engine.drain(GENEROUS).await, 0);
    assert_eq!(began.elapsed(), Duration::ZERO);

    let (left, stays) = (desk.spawn(operation("a")), desk.spawn(operation("b")));
    desk.gate.reached_by(2).await;
    left.abort();
    assert!(within(left).await.is_err());
    let limit = Duration::from_secs(5);
    // Any clone of it knows.
    assert_eq!(desk.engine.clone().drain(limit).await, 2);
    assert_eq!(began.elapsed(), limit);
    let draining = tokio::spawn({
        let engine = desk.engine.clone();
        async move { engine.drain(GENEROUS).await }
    });
    others_go_on().await;
    desk.gate.let_through(1);
    others_go_on().await;
    assert!(!draining.is_finished());
    desk.gate.open();
    assert_eq!(within(draining).await.unwrap(), 0);
    assert!(value(desk.ask(operation("a")).await).1, "it was recorded before that");
    assert!(within(stays).await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_the_record_to_be_written() {
    let (desk, store) = Desk::on_cue(|engine| engine.store_timeout(GENEROUS));
    let completing = Gate::default();
    store.cue(Call::Complete, Cue::Wait(completing.clone()));
    desk.gate.open();
    let first = desk.spawn(operation("k"));
    completing.reached_by(1).await;
    assert_eq!(desk.engine.drain(Duration::from_secs(1)).await, 1);
    assert!(!first.is_finished(), "its value is kept first");
    completing.open();
    assert_eq!(value(within(first).await.unwrap()), done("run 1", false));
    assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
}

#[tokio::test(start_paused = true)]
async fn if_the_store_fails_first_the_work_is_not_run() {
    for (cue, is_timeout) in [(Cue::Fail, false), (Cue::Hang, true), (Cue::LoseAnswer, true)] {
        let (desk, store) = Desk::on_cue(|engine| engine.store_timeout(Duration::from_secs(7)));
        store.cue(Call::Claim, cue);
        let began = Instant::now();
        let Err(RunError::Store(error)) = desk.ask(operation("k")).await else {
            panic!("it went on")
        };
        assert_eq!(error.is_timeout(), is_timeout);
        assert_eq!(began.elapsed(), Duration::from_secs(if is_timeout { 7 } else { 0 }));
        assert_eq!(store.called(Call::Withdraw), 1);
        assert!(store.memory.is_empty());
        store.heal();
        assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
    }
}

#[tokio::test(start_paused = true)]
async fn if_the_store_does_not_confirm_the_record_the_caller_gets_the_value_all_the_same() {
    for (cue, is_recorded) in
        [(Cue::Fail, false), (Cue::Hang, false), (Cue::LoseAnswer, true), (Cue::Lost, false)]
    {
        let (desk, store) = Desk::on_cue(|engine| {
            engine.store_timeout(Duration::from_secs(7)).in_flight(InFlight::Reject)
        });
        let is_lost = matches!(cue, Cue::Lost);
        store.cue(Call::Complete, cue);
        assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
        store.heal();
        assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
        if is_recorded {
            assert_eq!(value(desk.ask(operation("k")).await), done("run 1", true));
        } else if !is_lost {
            let told = desk.ask(operation("k")).await;
            assert!(matches!(told, Err(RunError::InProgress)), "it is not run twice: {told:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn if_the_store_does_not_confirm_the_end_of_a_failure_the_error_is_the_works_own() {
    for rule in [OnFailure::Release, OnFailure::Hold] {
        for cue in [Cue::Fail, Cue::Hang, Cue::LoseAnswer] {
            let (desk, store) = Desk::on_cue(|engine| engine.on_failure(rule));
            store.cue(Call::Release, cue.clone());
            store.cue(Call::Hold, cue);
            assert!(matches!(desk.fail(operation("k")).await, Err(RunError::Work(Failed(1)))));
            assert_eq!(desk.engine.drain(Duration::ZERO).await, 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_is_not_to_run_is_never_polled_and_let_go() {
    let store = CueStore::default();
    let engine = Engine::new(store.clone()).on_failure(OnFailure::Hold).in_flight(InFlight::Reject);
    drop(store.memory.clone().capacity(3));
    let desk = Desk::new(engine);
    desk.run(asking("recorded", "one")).await.unwrap();
    desk.fail(operation("held")).await.unwrap_err();
    let running = desk.spawn(operation("running"));
    desk.gate.reached_by(1).await;
    let ask = |operation| {
        let kept = Arc::new(());
        let (engine, in_work) = (desk.engine.clone(), Arc::clone(&kept));
        async move {
            let work = async move {
                let _in_work = in_work;
                never().await
            };
            let ran = within(engine.run(Some(operation), work)).await;
            assert_eq!(Arc::strong_count(&kept), 1, "the work is gone");
            ran
        }
    };
    assert!(ask(asking("recorded", "one")).await.unwrap().replayed);
    assert!(matches!(ask(operation("recorded")).await, Err(RunError::Conflict)));
    assert!(matches!(ask(operation("held")).await, Err(RunError::OutcomeUnknown)));
    assert!(matches!(ask(operation("running")).await, Err(RunError::InProgress)));
    assert!(matches!(ask(operation("new")).await, Err(RunError::Full { .. })));
    store.cue(Call::Claim, Cue::Fail);
    assert!(matches!(ask(operation("new")).await, Err(RunError::Store(_))));
    desk.gate.open();
    assert_eq!(value(within(running).await.unwrap()), done("run 3", false));
}

#[tokio::test]
async fn clones_and_engines_over_one_store_share_their_operations() {
    let (desk, store) = Desk::in_memory(|engine| engine);
    let other = Desk::new(Engine::new(store).retention(Duration::from_secs(5)));
    assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
    assert_eq!(value(desk.clone().ask(operation("k")).await), done("run 1", true));
    assert_eq!(value(other.ask(operation("k")).await), done("run 1", true));
    let apart = Desk::new(Engine::new(MemoryStore::new()));
    assert_eq!(value(apart.run(operation("k")).await), done("run 1", false));
    assert_eq!(apart.runs.count(), 1);
}

#[test]
fn without_a_runtime_it_runs_and_repeats_all_the_same_but_does_not_wait() {
    fn now<T>(future: impl Future<Output = T>) -> T {
        future.now_or_never().expect("it waits for nobody")
    }
    let (desk, store) = Desk::in_memory(|engine| engine);
    let work = async { Ok::<_, Failed>("value".to_owned()) };
    assert_eq!(value(now(desk.engine.run(Some(operation("k")), work))), done("value", false));
    assert_eq!(value(now(desk.engine.run(Some(operation("k")), never()))), done("value", true));

    let gate = Gate::default();
    let work = {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            Ok::<_, Failed>(String::new())
        }
    };
    let mut running = Box::pin(desk.engine.run(Some(operation("l")), work));
    assert!(running.as_mut().now_or_never().is_none());
    let told = now(desk.engine.run(Some(operation("l")), never()));
    assert!(matches!(told, Err(RunError::InProgress)), "{told:?}");
    // There is nowhere to go on.
    drop(running);
    assert_eq!((store.len(), store.in_flight()), (1, 0));
}

/// Asserts that `set` panics with a message that begins with the setting's name.
#[track_caller]
fn assert_refused(setting: &str, set: impl FnOnce(Engine<String>) -> Engine<String>) {
    let engine = Engine::new(MemoryStore::new());
    assert_impossible(setting, || set(engine));
}

#[test]
fn impossible_values_are_refused_by_name() {
    let (zero, second) = (Duration::ZERO, Duration::from_secs(1));
    assert_refused("retention", |engine| engine.retention(zero));
    assert_refused("in_flight", |engine| engine.in_flight(InFlight::Wait(zero)));
    assert_refused("finish_within", |engine| engine.finish_within(zero));
    assert_refused("store_timeout", |engine| engine.store_timeout(zero));
    assert_refused("waiters", |engine| engine.waiters(0, 1));
    assert_refused("waiters", |engine| engine.waiters(2, 1));
    // A wait is for work that may go on at least as long.
    assert_refused("in_flight", |engine| engine.in_flight(InFlight::Wait(301 * second)));
    assert_refused("in_flight", |engine| engine.finish_within(9 * second));
}

#[tokio::test]
async fn the_smallest_and_the_largest_values_work() {
    for time in [Duration::from_nanos(1), Duration::MAX] {
        let (desk, _) = Desk::in_memory(|engine| {
            engine
                .finish_within(Duration::MAX)
                .in_flight(InFlight::Wait(time))
                .finish_within(time)
                .retention(time)
                .store_timeout(time)
                .waiters(1, usize::MAX)
        });
        assert_eq!(value(desk.run(operation("k")).await), done("run 1", false));
    }
}

#[test]
fn an_error_says_why_and_where_it_comes_from_but_nothing_of_the_caller() {
    let errors: [(RunError<Failed>, &str, Option<&str>); 6] = [
        (RunError::Work(Failed(1)), "the work failed", Some("run 1 failed")),
        (RunError::Conflict, "the key was used for something else", None),
        (RunError::InProgress, "the first execution is still running", None),
        (RunError::OutcomeUnknown, "the outcome of the first execution is unknown", None),
        (RunError::Full { room_in: None }, "there is no room for another operation", None),
        (
            RunError::Store(StoreError::new("it is down")),
            "the store failed before the work began",
            Some("the idempotency store failed"),
        ),
    ];
    for (error, text, source) in errors {
        assert_eq!(error.to_string(), text);
        assert_eq!(error.source().map(ToString::to_string).as_deref(), source, "{text}");
    }
    let operation = Operation::new(&Scope::new("secret-tenant"), "secret-key");
    assert!(!format!("{operation:?}").contains("secret"));
    let engine = Engine::<String>::new(MemoryStore::new()).retention(Duration::from_secs(99));
    assert!(format!("{engine:?}").contains("retention: 99s"));
}

#[test]
fn it_goes_where_tasks_need_it() {
    fn send_and_sync<T: Send + Sync + Clone + 'static>() {}
    fn send<T: Send>(_: &T) {}
    send_and_sync::<Engine<String>>();
    send_and_sync::<Operation>();
    send_and_sync::<Done<String>>();
    let engine = Engine::<String>::new(MemoryStore::new());
    send(&engine.run(None, never()));
}
