//! Requests that come, repeat, leave and wait, handlers and bodies that end in every way, time that
//! passes: the layer answers, runs and counts what it has to, after every step.

use std::{collections::BTreeSet, time::Duration};

use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use tower::Layer;
use tower_idempotency::{IdempotencyLayer, InFlight, MemoryStore, Scope};

mod events;
mod handler;
mod model;
mod real;
mod words;

use handler::{Desk, Handler};
use model::{Asking, At, Entry, Execution, Model};
use real::Real;
use words::{Event, FINISH_WITHIN, Heard, LIMIT, RETENTION, Rules, WAIT};

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Real;
    type Reference = Model;

    fn init_test(model: &Model) -> Real {
        let Rules { capacity, waits, on_failure, on_leave } = model.rules;
        let store = MemoryStore::new().capacity(capacity);
        let scope = |parts: &http::request::Parts| {
            parts.headers.get("x-scope").map(|scope| Scope::new(scope.as_bytes()))
        };
        let layer = IdempotencyLayer::new(scope)
            .store(store.clone())
            .on_failure(on_failure)
            .on_leave(on_leave)
            .in_flight(if waits { InFlight::Wait(WAIT.0) } else { InFlight::Reject })
            .retention(RETENTION.0)
            .finish_within(FINISH_WITHIN.0)
            .body_idle_timeout(Duration::from_secs(1_000_000))
            .body_timeout(Duration::from_secs(1_000_000))
            .response_limit(LIMIT);
        let desk = Desk::default();
        let service = layer.layer(Handler(desk.clone()));
        let runtime = Some(super::paused_clock());
        Real { runtime, service, store, desk, callers: Vec::new() }
    }

    fn apply(mut real: Real, model: &Model, event: Event) -> Real {
        let runtime = real.runtime.take().unwrap();
        runtime.block_on(real.event(event, model));
        real.runtime = Some(runtime);
        real
    }

    fn check_invariants(real: &Real, model: &Model) {
        let _clock = real.runtime.as_ref().unwrap().enter();
        for (number, (caller, right)) in real.callers.iter().zip(&model.requests).enumerate() {
            assert_eq!(*caller.heard.lock().unwrap(), right.heard, "request {number}");
        }
        let told = real.desk.told();
        assert!(!told.two_at_once, "two executions of one operation at once");
        for (id, began) in &told.executions {
            let right = model.executions.iter().filter(|execution| execution.id == *id).count();
            assert_eq!(began.len(), right, "executions of {id:?}");
        }
        let began: usize = told.executions.values().map(Vec::len).sum();
        assert_eq!(began, model.executions.len(), "executions");
        let running: usize = told.running.values().sum();
        assert_eq!(running, model.running().len(), "executions that run");
        assert_eq!(real.store.len(), model.entries.len(), "entries");
        let in_flight = model.entries.values().filter(|e| matches!(e, Entry::InFlight { .. }));
        assert_eq!(real.store.in_flight(), in_flight.count(), "claims in flight");
    }

    fn teardown(mut real: Real, _: Model) {
        // What is still running has nobody to run it any more.
        let _clock = real.runtime.as_ref().unwrap().enter();
        real.callers.clear();
    }
}

prop_state_machine! {
    #![proptest_config(super::config())]

    #[test]
    fn whatever_happens_in_whatever_order_the_layer_answers_runs_and_counts_what_the_model_does(
        sequential 1..60 => Machine
    );
}

/// What can come of a request, by the names of it.
fn kinds(model: &Model) -> BTreeSet<String> {
    let answers = model.requests.iter().map(|Asking { heard, at, .. }| match (heard, at) {
        (Heard { is_replay: true, status, .. }, _) => format!("replay of {}xx", status / 100),
        (Heard { text, .. }, _) if text.starts_with("idempotency_") => text.clone(),
        (Heard { status: 0, end, .. }, At::Over) => format!("no answer, {end:?}"),
        (Heard { end, .. }, At::Over) => format!("answer, {end:?}"),
        (_, at) => format!("{at:?}").split([' ', '(']).next().unwrap().to_owned(),
    });
    let executions = model.executions.iter().map(|execution| match execution {
        Execution { caller: None, is_over: true, until: Some(until), .. }
            if *until <= model.now =>
        {
            "left, over by the time it would be cut off".to_owned()
        }
        Execution { caller: None, is_over, .. } => format!("left, over: {is_over}"),
        Execution { effects, is_over, .. } => format!("effects: {effects}, over: {is_over}"),
    });
    answers.chain(executions).collect()
}

#[test]
fn the_runs_of_the_layer_get_everywhere() {
    let mut runner = TestRunner::deterministic();
    let strategy = Model::sequential_strategy(1..60);
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let (mut model, events, _) = strategy.new_tree(&mut runner).unwrap().current();
        for event in events {
            model = Model::apply(model, &event);
            seen.extend(kinds(&model));
        }
    }
    let all = [
        "Executing",
        "ReadingBody",
        "Waiting",
        "answer, Broken",
        "answer, Open",
        "answer, Panicked",
        "answer, Whole",
        "effects: false, over: false",
        "effects: false, over: true",
        "effects: true, over: false",
        "effects: true, over: true",
        "idempotency_capacity",
        "idempotency_conflict",
        "idempotency_in_progress",
        "idempotency_not_replayable",
        "idempotency_outcome_unknown",
        "left, over by the time it would be cut off",
        "left, over: false",
        "left, over: true",
        "no answer, Broken",
        "no answer, Open",
        "no answer, Panicked",
        "replay of 2xx",
        "replay of 3xx",
        "replay of 4xx",
        "replay of 5xx",
    ];
    assert_eq!(seen, all.map(str::to_owned).into());
}
