//! The engine: one execution per operation, everybody told the truth and nobody left asleep,
//! whoever fails, panics or leaves; and a drain that misses nobody.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::FutureExt;
use shuttle::future::block_on;
use tower_idempotency::{Done, Engine, OnFailure, OnLeave, Operation, RunError, Scope};

use crate::{
    explore::explore,
    scene::{Ledger, Values, all, caught, drive, job, key, pause, with_runtime},
};

/// For ever, for the clock stands still.
const LONG: Duration = Duration::from_secs(60);

type Ran = Result<Done<u32>, RunError<&'static str>>;

fn operation() -> Operation {
    Operation::new(&Scope::new("tenant"), "key")
}

/// Runs work that says `answer`, after a while.
async fn run(engine: &Engine<u32>, ledger: &Ledger, answer: Result<u32, &'static str>) -> Ran {
    let ledger = ledger.clone();
    let work = async move {
        let executing = ledger.begin();
        pause().await;
        drop(executing);
        answer
    };
    engine.run(Some(operation()), work).await
}

#[test]
fn of_many_callers_one_runs_and_all_get_its_value() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger) = (Values::new().capacity(1), Ledger::default());
            let engine = Engine::new(store.clone());
            let done = all((0..4).map(|number| {
                let (engine, ledger) = (engine.clone(), ledger.clone());
                job(move || block_on(run(&engine, &ledger, Ok(number))).expect("a value"))
            }));
            let first: Vec<_> = done.iter().filter(|done| !done.replayed).collect();
            assert_eq!((ledger.executions(), first.len()), (1, 1));
            assert!(done.iter().all(|done| done.value == first[0].value));
            assert_eq!((store.len(), store.in_flight()), (1, 0));
        });
    });
}

#[test]
fn a_failure_lets_the_next_caller_run_and_is_told_to_its_own() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger) = (Values::new(), Ledger::default());
            let engine = Engine::new(store.clone());
            all((0..4).map(|_| {
                let (engine, ledger) = (engine.clone(), ledger.clone());
                job(move || match block_on(run(&engine, &ledger, Err("no"))) {
                    Err(RunError::Work("no")) => {}
                    other => panic!("{other:?} of work that fails always"),
                })
            }));
            assert_eq!(ledger.executions(), 4);
            assert!(store.is_empty());
        });
    });
}

#[test]
fn a_failure_that_is_held_is_told_to_everybody() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger) = (Values::new(), Ledger::default());
            let engine = Engine::new(store.clone()).on_failure(OnFailure::Hold);
            let failed = all((0..4).map(|_| {
                let (engine, ledger) = (engine.clone(), ledger.clone());
                job(move || match block_on(run(&engine, &ledger, Err("no"))) {
                    Err(RunError::Work("no")) => 1,
                    Err(RunError::OutcomeUnknown) => 0,
                    other => panic!("{other:?} of work that fails and is held"),
                })
            }));
            assert_eq!((ledger.executions(), failed.iter().sum()), (1, 1));
            assert_eq!((store.len(), store.in_flight()), (1, 0));
        });
    });
}

#[test]
fn work_that_panics_leaves_nobody_asleep() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger) = (Values::new(), Ledger::default());
            let engine = Engine::new(store.clone());
            let panicking = (engine.clone(), ledger.clone());
            let panicked = job(move || {
                let (engine, ledger) = panicking;
                let work = async move {
                    let _executing = ledger.begin();
                    pause().await;
                    std::panic::resume_unwind(Box::new("as it was told"))
                };
                match caught(engine.run(Some(operation()), work)) {
                    None => {}
                    Some(Ok::<_, RunError<&str>>(done)) => assert!(done.replayed),
                    Some(Err(error)) => panic!("{error:?} instead of a value or a panic"),
                }
            });
            let others = (0..2).map(|_| {
                let (engine, ledger) = (engine.clone(), ledger.clone());
                job(move || {
                    assert_eq!(block_on(run(&engine, &ledger, Ok(7))).expect("a value").value, 7);
                })
            });
            all([panicked].into_iter().chain(others));
            assert!((1..=2).contains(&ledger.executions()));
            assert_eq!((store.len(), store.in_flight()), (1, 0));
        });
    });
}

/// Callers of whom the first leaves in the midst, by `rule`.
fn one_leaves(rule: OnLeave) {
    with_runtime(|runtime| {
        let (store, ledger) = (Values::new(), Ledger::default());
        let engine = Engine::new(store.clone()).on_leave(rule);
        let left = Arc::new(AtomicUsize::new(3));
        let over = {
            let left = Arc::clone(&left);
            move || left.load(SeqCst) == 0
        };
        let leaver = {
            let (engine, ledger, left) = (engine.clone(), ledger.clone(), Arc::clone(&left));
            job(move || {
                // Polled once, and dropped.
                match run(&engine, &ledger, Ok(1)).now_or_never() {
                    None | Some(Ok(Done { replayed: true, .. })) => {}
                    Some(other) => panic!("{other:?} at the first poll"),
                }
                left.fetch_sub(1, SeqCst);
            })
        };
        let others = (0..2).map(|_| {
            let (engine, ledger, left) = (engine.clone(), ledger.clone(), Arc::clone(&left));
            job(move || {
                let done = block_on(run(&engine, &ledger, Ok(2))).expect("a value");
                assert!(done.replayed || done.value == 2);
                left.fetch_sub(1, SeqCst);
            })
        });
        let runtime = Arc::clone(runtime);
        all([leaver].into_iter().chain(others).chain([job(move || drive(&runtime, over))]));
        let most = if rule == OnLeave::Finish { 1 } else { 2 };
        assert!((1..=most).contains(&ledger.executions()));
        assert_eq!((store.len(), store.in_flight()), (1, 0));
        let drained = engine.drain(LONG).now_or_never();
        assert_eq!(drained, Some(0), "nothing is running any more");
    });
}

#[test]
fn a_caller_that_leaves_does_not_undo_the_work_or_leave_others_asleep() {
    explore(|| one_leaves(OnLeave::Finish));
}

#[test]
fn work_that_is_cancelled_with_its_caller_lets_the_next_one_run() {
    explore(|| one_leaves(OnLeave::Cancel));
}

/// Owners that go on until somebody is refused, among callers one too many for those who may wait;
/// twice, so that the places are seen to come back.
fn one_too_many(operations: usize, callers_of_each: usize, waiters: (usize, usize)) {
    with_runtime(|_| {
        let engine = Engine::new(Values::new()).waiters(waiters.0, waiters.1);
        for scope in ["tenant", "another"] {
            let refused = Arc::new(AtomicUsize::new(0));
            let executions = Arc::new(AtomicUsize::new(0));
            let told = all((0..operations * callers_of_each).map(|caller| {
                let operation = Operation::new(&Scope::new(scope), key(caller % operations));
                let (engine, executions) = (engine.clone(), Arc::clone(&executions));
                let (refused, seen) = (Arc::clone(&refused), Arc::clone(&refused));
                job(move || {
                    let work = async move {
                        executions.fetch_add(1, SeqCst);
                        while seen.load(SeqCst) == 0 {
                            pause().await;
                        }
                        Ok::<_, &str>(1)
                    };
                    match block_on(engine.run(Some(operation), work)) {
                        Ok(done) => done.value,
                        Err(RunError::InProgress) => {
                            refused.fetch_add(1, SeqCst);
                            0
                        }
                        other => panic!("{other:?} is not what has happened"),
                    }
                })
            }));
            assert_eq!(told.iter().filter(|told| **told == 0).count(), 1, "one is refused");
            assert_eq!(executions.load(SeqCst), operations);
        }
    });
}

#[test]
fn no_more_wait_for_one_operation_than_may_and_every_place_comes_back() {
    explore(|| one_too_many(1, 3, (1, 2)));
}

pub(crate) fn places_of_all_waiters() {
    one_too_many(2, 2, (1, 1));
}

#[test]
fn no_more_wait_in_all_than_may_and_every_place_comes_back() {
    explore(places_of_all_waiters);
}

#[test]
fn a_drain_misses_nobody_who_had_begun_and_sleeps_on_for_nobody() {
    explore(|| {
        with_runtime(|_| {
            let store = Values::new();
            let engine = Engine::new(store.clone());
            let operations = [0, 1, 2].map(|at| Operation::new(&Scope::new("tenant"), key(at)));
            let begun: Arc<[AtomicBool; 3]> = Arc::default();
            let runners = (0..3).map(|at| {
                let (engine, begun) = (engine.clone(), Arc::clone(&begun));
                job(move || {
                    let work = async move {
                        begun[at].store(true, SeqCst);
                        pause().await;
                        Ok::<_, &str>(1)
                    };
                    block_on(engine.run(Some(operations[at]), work)).expect("a value");
                })
            });
            let drains = (0..2).map(|_| {
                let (engine, begun) = (engine.clone(), Arc::clone(&begun));
                job(move || {
                    let before = [0, 1, 2].map(|at| begun[at].load(SeqCst));
                    assert_eq!(block_on(engine.drain(LONG)), 0);
                    for at in (0..3).filter(|at| before[*at]) {
                        let again = engine.run(Some(operations[at]), async { Err("again") });
                        let done = again.now_or_never().expect("drained before it had ended");
                        assert!(done.is_ok_and(|done| done.replayed), "not recorded, but drained");
                    }
                })
            });
            all(runners.chain(drains));
            assert_eq!((store.len(), store.in_flight()), (3, 0));
        });
    });
}
