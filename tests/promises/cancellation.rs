//! A caller may leave at any moment: before the inner service is called that leaves nothing, and
//! from then on the work is done once and its answer kept.
//!
//! Every branch of a request's journey is walked step by step, with everything pending at every
//! await, and the caller leaves after each number of steps: each time in a world of its own, once
//! with a retry that comes when all is quiet, and once with one that comes at once.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::Request;
use http_body::Body;
use tokio::runtime::Handle as Runtime;
use tower::{Layer, Service};
use tower_idempotency::{
    Ceiling, Disposition, Idempotency, IdempotencyLayer, MemoryStore, OnFailure, OnLeave, Permit,
    StoredResponse, scope, store::StoreError,
};

use crate::support::{
    Answer, Gate,
    call::Call,
    interposed::Interposed,
    keyed,
    probe::{LARGE, Probe, Reply},
    send,
    steps::{Failed, StepBody, Walked, pend_once, settle, walk},
};

/// One way that a request can go.
#[derive(Clone, Copy)]
struct Branch {
    name: &'static str,
    /// The fewest steps that this way can have: with fewer, the walk has missed it.
    at_least: usize,
    settings: fn(IdempotencyLayer) -> IdempotencyLayer,
    script: fn(usize) -> Reply,
    before: Before,
    body: &'static str,
    /// What a caller gets who stays.
    ends: &'static str,
    /// What a retry gets if this request had not reached the inner service, and if it had.
    not_called: Retry,
    called: Retry,
}

/// What is there when the request comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Record,
    /// An execution of the same request, which ends when nobody else can go on.
    InFlight,
    /// Other work has the only permit.
    GuardFull,
    /// Other work takes the only permit between the two times that the guard is asked.
    GuardFullAtTheClaim,
    /// The inner service fails when it is asked whether it is ready.
    NotReady,
    /// The store writes this call, and then fails.
    StoreFails(Call),
}

/// What a retry gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Retry {
    /// The answer of the run with this number, again.
    Replay(usize),
    /// The answer of a run of its own, which has this number.
    Run(usize),
    Refusal(u16, &'static str),
    /// Either: the caller left while that was being decided.
    ReplayOrRun(usize, usize),
    /// This branch never calls the inner service.
    Never,
}

const BODY: &str = r#"{"input": "a"}"#;

impl Branch {
    /// A fresh request that is executed, answers 200 and is replayed to a retry.
    const FRESH: Self = Self {
        name: "a fresh request",
        at_least: 11,
        settings: |layer| layer,
        script: |_| Reply::Status(200),
        before: Before::Nothing,
        body: BODY,
        ends: "200",
        not_called: Retry::Run(1),
        called: Retry::Replay(1),
    };

    async fn holds(self) {
        let mut seen = Vec::new();
        for rushed in [false, true] {
            let mut steps = 0;
            loop {
                let world = World::new(self).await;
                let (called, ended) = world.leave_after(steps).await;
                seen.push(called);
                let expected = if called { self.called } else { self.not_called };
                let moment = format!("{}, {steps} steps, rushed: {rushed}", self.name);
                world.retry(expected, rushed, &moment).await;
                if let Some(ended) = ended {
                    assert_eq!(ended, self.ends, "{moment}");
                    break;
                }
                steps += 1;
            }
            #[allow(clippy::print_stdout, reason = "how far the walk went, for whoever looks")]
            {
                println!("{}: the caller left after 0 to {steps} steps", self.name);
            }
            assert!(steps >= self.at_least, "{}: only {steps} steps", self.name);
        }
        assert!(seen.contains(&false));
        assert_eq!(seen.contains(&true), self.called != Retry::Never, "{}", self.name);
    }
}

/// A layer, its store and its inner service, all of them pending at every await.
struct World {
    branch: Branch,
    layer: IdempotencyLayer,
    service: Idempotency<Probe>,
    store: MemoryStore<StoredResponse>,
    probe: Probe,
    gate: Gate,
    ceiling: Ceiling,
    other_work: Mutex<Option<Permit>>,
    /// Whether what the branch says to be there before is there.
    disturbed: Arc<AtomicBool>,
    /// Whether the inner service answers everything with 200, whatever the branch says.
    calm: Arc<AtomicBool>,
    /// The most permits that were out at any moment at which a claim was about to end.
    permits_at_settlement: Arc<AtomicUsize>,
    runs_before: usize,
}

impl World {
    async fn new(branch: Branch) -> Self {
        let (gate, ceiling, store) = (Gate::default(), Ceiling::new(1), MemoryStore::new());
        let disturbed = Arc::new(AtomicBool::new(false));
        let permits_at_settlement = Arc::new(AtomicUsize::new(0));
        let calm = Arc::new(AtomicBool::new(false));
        let mut probe = Probe::new({
            let calm = Arc::clone(&calm);
            move |run| {
                if calm.load(Ordering::SeqCst) { Reply::Status(200) } else { (branch.script)(run) }
            }
        });
        if branch.before == Before::InFlight {
            probe = probe.runs_wait_at(&gate, 1);
        }
        let interposed = Interposed::stepping(&store)
            .before({
                let (permits, ceiling) = (Arc::clone(&permits_at_settlement), ceiling.clone());
                move |call| {
                    if call.is_settlement() {
                        permits.fetch_max(ceiling.active(), Ordering::SeqCst);
                    }
                    async {
                        pend_once().await;
                        Ok(())
                    }
                }
            })
            .after({
                let disturbed = Arc::clone(&disturbed);
                move |call| {
                    let fails = branch.before == Before::StoreFails(call)
                        && disturbed.load(Ordering::SeqCst);
                    async move {
                        pend_once().await;
                        if fails { Err(StoreError::new(Failed)) } else { Ok(()) }
                    }
                }
            });
        let mut layer = IdempotencyLayer::new(scope::single_tenant())
            .store(interposed)
            .ceiling(&ceiling)
            .request_limit(100)
            .response_limit(LARGE - 1);
        if branch.before == Before::GuardFullAtTheClaim {
            let (disturbed, asked) = (Arc::clone(&disturbed), AtomicUsize::new(0));
            layer = layer.guard(move |_| {
                let is_full = disturbed.load(Ordering::SeqCst)
                    && asked.fetch_add(1, Ordering::SeqCst) % 2 == 1;
                (!is_full).then(|| Permit::new(()))
            });
        }
        let layer = (branch.settings)(layer);
        let service = layer.layer(probe.clone());
        let other_work = Mutex::default();
        let mut world = Self {
            branch,
            layer,
            service,
            store,
            probe,
            gate,
            ceiling,
            other_work,
            disturbed,
            calm,
            permits_at_settlement,
            runs_before: 0,
        };
        world.disturb().await;
        world
    }

    /// Puts there what is to be there before.
    async fn disturb(&mut self) {
        match self.branch.before {
            Before::Nothing | Before::GuardFullAtTheClaim | Before::StoreFails(_) => {}
            Before::Record => {
                send(&self.service, request(BODY)).await;
            }
            Before::InFlight => {
                let service = self.service.clone();
                tokio::spawn(async move { send(&service, request(BODY)).await });
                self.gate.reached_by(1).await;
            }
            Before::GuardFull => *self.other_work.lock().unwrap() = self.ceiling.try_acquire(),
            Before::NotReady => self.probe.fail_next_readiness(),
        }
        self.disturbed.store(true, Ordering::SeqCst);
        self.runs_before = self.probe.runs();
    }

    /// Takes it away again.
    fn calm(&self) {
        self.disturbed.store(false, Ordering::SeqCst);
        self.calm.store(true, Ordering::SeqCst);
        self.probe.make_ready_again();
        *self.other_work.lock().unwrap() = None;
        self.gate.open();
    }

    /// Sends the request and leaves after so many steps. Says whether it had reached the inner
    /// service by then, and how it ended if it did.
    async fn leave_after(&self, steps: usize) -> (bool, Option<String>) {
        // Called before the first step: a caller may also leave without a single poll.
        let response = self.service.clone().call(request(self.branch.body));
        let exchange = async {
            let Ok(response) = response.await else { return "error".to_owned() };
            let (head, mut body) = response.into_parts();
            let mut to_come = body.size_hint().exact().or(declared_length(&head.headers));
            pend_once().await;
            loop {
                let frame = poll_fn(|context| {
                    let frame = Pin::new(&mut body).poll_frame(context);
                    let looks_complete = body.is_end_stream() || to_come == Some(0);
                    let in_flight = self.has_called() && self.store.in_flight() > 0;
                    assert!(!looks_complete || !in_flight, "not recorded yet");
                    frame
                });
                let Some(frame) = frame.await else { break };
                match frame.map(http_body::Frame::into_data) {
                    Err(_) => return "broken".to_owned(),
                    Ok(Ok(data)) => {
                        to_come = to_come.map(|to_come| to_come - data.len() as u64);
                    }
                    Ok(Err(_trailers)) => {}
                }
                pend_once().await;
            }
            head.status.as_str().to_owned()
        };
        let walked = walk(exchange, steps, || self.gate.open()).await;
        let called = self.has_called();
        if called && !matches!(walked, Walked::Dropped) {
            // However it ends, the caller sees that only when the claim has ended.
            assert_eq!(self.store.in_flight(), 0, "ended before its claim");
        }
        let ended = match walked {
            Walked::Dropped => None,
            Walked::Ended(how) => Some(how),
            Walked::Panicked => Some("panic".to_owned()),
        };
        (called, ended)
    }

    /// Has the request reached the inner service?
    fn has_called(&self) -> bool {
        self.probe.runs() > self.runs_before
    }

    /// Retries, at once or when everything is quiet, and looks at what was left behind.
    async fn retry(&self, expected: Retry, rushed: bool, moment: &str) {
        self.calm();
        let mut expected = expected;
        if !rushed {
            self.is_quiet(moment).await;
            let left = self.store.len();
            if let Retry::ReplayOrRun(recorded, run) = expected {
                expected = if left == 1 { Retry::Replay(recorded) } else { Retry::Run(run) };
            }
            let expected = usize::from(!matches!(expected, Retry::Run(_)));
            assert_eq!(left, expected, "live entries left: {moment}");
        }
        let answer = send(&self.service, request(BODY)).await;
        let runs = expected.check(&answer, moment);
        self.is_quiet(moment).await;
        assert_eq!(self.store.len(), 1, "live entries in the end: {moment}");
        assert_eq!(self.probe.runs(), runs, "runs: {moment}");
    }

    /// Waits until everything is quiet; nothing may be running, waiting or lent out then.
    async fn is_quiet(&self, moment: &str) {
        settle().await;
        assert_eq!(Runtime::current().metrics().num_alive_tasks(), 0, "tasks: {moment}");
        assert_eq!(self.store.in_flight(), 0, "in flight: {moment}");
        assert_eq!(self.layer.drain(Duration::ZERO).await, 0, "running: {moment}");
        assert_eq!(self.ceiling.active(), 0, "guard permits: {moment}");
        let probe = &self.probe;
        assert_eq!((probe.running(), probe.promised()), (0, 0), "inner permits: {moment}");
        assert_eq!(probe.promises_broken(), 0, "ready, but not called: {moment}");
        assert!(probe.most_running() <= 1, "two ran at once: {moment}");
        assert_eq!(
            self.permits_at_settlement.load(Ordering::SeqCst),
            0,
            "a claim ended before its permit went back: {moment}"
        );
        let counts = self.layer.dispositions();
        let executions =
            [Disposition::Executed, Disposition::NotRecorded, Disposition::CompletionUnconfirmed];
        let counted: u64 = executions.map(|execution| counts.get(execution)).iter().sum();
        assert_eq!(counted, probe.runs() as u64, "executions counted: {moment}");
    }
}

impl Retry {
    /// Checks that `answer` is this; returns how many runs there have to be in all.
    fn check(self, answer: &Answer, moment: &str) -> usize {
        let replayed = |run: usize| answer.is_replay() && answer.text() == format!("run {run}");
        match self {
            Self::Replay(run) => {
                assert!(replayed(run), "not run {run} replayed: {answer:?}: {moment}");
                run
            }
            Self::Run(run) => {
                let is_run = !answer.is_replay() && answer.text() == format!("run {run}");
                assert!(is_run, "not run {run}: {answer:?}: {moment}");
                run
            }
            Self::ReplayOrRun(recorded, _) if replayed(recorded) => recorded,
            Self::ReplayOrRun(_, run) => Self::Run(run).check(answer, moment),
            Self::Refusal(status, code) => {
                assert_eq!(answer.status.as_u16(), status, "{moment}");
                answer.assert_refused(status, code);
                1
            }
            Self::Never => panic!("the inner service was called: {moment}"),
        }
    }
}

fn request(body: &str) -> Request<StepBody> {
    keyed("k", "").map(|_| StepBody::text(body))
}

fn declared_length(headers: &http::HeaderMap) -> Option<u64> {
    headers.get("content-length")?.to_str().ok()?.parse().ok()
}

const NOT_REPLAYABLE: Retry = Retry::Refusal(409, "idempotency_not_replayable");
const OUTCOME_UNKNOWN: Retry = Retry::Refusal(409, "idempotency_outcome_unknown");

/// The first run comes to `first`, every other one is answered with 200.
macro_rules! first {
    ($first:expr) => {
        |run| if run == 1 { $first } else { Reply::Status(200) }
    };
}

/// A test for each branch.
macro_rules! branches {
    ($($(#[$attribute:meta])* $name:ident: { $($field:ident: $value:expr),+ $(,)? })+) => {$(
        #[tokio::test(start_paused = true)]
        $(#[$attribute])*
        async fn $name() {
            Branch { name: stringify!($name), $($field: $value,)+ ..Branch::FRESH }.holds().await;
        }
    )+};
}

branches! {
    leaving_a_fresh_request_leaves_nothing_or_its_record: { at_least: 17 }

    leaving_a_stream_leaves_nothing_or_its_record: {
        script: first!(Reply::Stream(200)),
        at_least: 17,
    }

    leaving_a_stream_that_is_not_recorded_leaves_nothing_or_its_tombstone: {
        settings: |layer| layer.record_streams(false),
        script: first!(Reply::Stream(200)),
        called: NOT_REPLAYABLE,
        at_least: 17,
    }

    leaving_a_stream_that_is_too_long_leaves_nothing_or_its_tombstone: {
        settings: |layer| layer.response_limit(4),
        script: first!(Reply::Stream(200)),
        called: NOT_REPLAYABLE,
        at_least: 17,
    }

    leaving_a_large_answer_leaves_nothing_or_its_tombstone: {
        script: first!(Reply::Large(200)),
        called: NOT_REPLAYABLE,
        at_least: 17,
    }

    leaving_a_replay_changes_nothing: {
        before: Before::Record,
        not_called: Retry::Replay(1),
        called: Retry::Never,
        at_least: 8,
    }

    leaving_a_conflict_changes_nothing: {
        before: Before::Record,
        body: r#"{"input": "another"}"#,
        ends: "409",
        not_called: Retry::Replay(1),
        called: Retry::Never,
        at_least: 8,
    }

    leaving_while_waiting_for_a_record_changes_nothing: {
        before: Before::InFlight,
        not_called: Retry::Replay(1),
        called: Retry::Never,
        at_least: 12,
    }

    leaving_while_waiting_for_a_release_leaves_the_place_to_another: {
        before: Before::InFlight,
        script: first!(Reply::Status(500)),
        not_called: Retry::Run(2),
        called: Retry::Replay(2),
        at_least: 22,
    }

    leaving_when_the_guard_is_full_before_the_body_leaves_nothing: {
        before: Before::GuardFull,
        ends: "429",
        called: Retry::Never,
        at_least: 5,
    }

    leaving_when_the_guard_is_full_after_the_claim_leaves_nothing: {
        before: Before::GuardFullAtTheClaim,
        ends: "429",
        called: Retry::Never,
        at_least: 10,
    }

    leaving_when_the_inner_service_is_not_ready_leaves_nothing: {
        before: Before::NotReady,
        ends: "error",
        called: Retry::Never,
        at_least: 10,
    }

    leaving_when_the_store_fails_after_writing_the_claim_leaves_nothing: {
        before: Before::StoreFails(Call::Claim),
        ends: "503",
        called: Retry::Never,
        at_least: 8,
    }

    leaving_when_the_store_fails_after_looking_up_leaves_nothing: {
        before: Before::StoreFails(Call::Lookup),
        ends: "503",
        called: Retry::Never,
        at_least: 3,
    }

    leaving_when_the_store_fails_after_writing_the_record_keeps_the_record: {
        before: Before::StoreFails(Call::Complete),
        at_least: 17,
    }

    leaving_a_request_that_is_too_large_leaves_nothing: {
        body: r#"{"input": "too large too large too large too large too large too large too large too large too large too large"}"#,
        ends: "413",
        called: Retry::Never,
        at_least: 4,
    }

    leaving_before_or_after_an_inner_error_leaves_nothing: {
        script: first!(Reply::Error),
        ends: "error",
        called: Retry::Run(2),
    }

    leaving_before_or_after_a_panic_in_the_call_leaves_nothing: {
        script: first!(Reply::PanicInCall),
        ends: "panic",
        called: Retry::Run(2),
        at_least: 9,
    }

    leaving_before_or_after_a_panic_in_the_future_leaves_nothing: {
        script: first!(Reply::PanicInFuture),
        ends: "panic",
        called: Retry::Run(2),
    }

    leaving_before_or_after_a_panic_in_the_body_leaves_nothing: {
        script: first!(Reply::PanicInBody { known_length: true }),
        ends: "panic",
        called: Retry::Run(2),
    }

    leaving_before_or_after_a_panic_in_a_stream_leaves_nothing: {
        script: first!(Reply::PanicInBody { known_length: false }),
        ends: "panic",
        called: Retry::Run(2),
    }

    leaving_before_or_after_a_body_breaks_leaves_nothing: {
        script: first!(Reply::BreakInBody { known_length: true }),
        ends: "broken",
        called: Retry::Run(2),
    }

    leaving_before_or_after_a_stream_breaks_leaves_nothing: {
        script: first!(Reply::BreakInBody { known_length: false }),
        ends: "broken",
        called: Retry::Run(2),
    }

    leaving_a_request_that_is_answered_with_4xx_leaves_nothing: {
        script: first!(Reply::Status(404)),
        ends: "404",
        called: Retry::Run(2),
    }

    leaving_a_stream_that_is_answered_with_5xx_leaves_nothing: {
        script: first!(Reply::Stream(500)),
        ends: "500",
        called: Retry::Run(2),
    }

    leaving_a_failure_under_the_hold_rule_holds_it: {
        settings: |layer| layer.on_failure(OnFailure::Hold),
        script: first!(Reply::Status(500)),
        ends: "500",
        called: OUTCOME_UNKNOWN,
    }

    leaving_a_panic_under_the_hold_rule_holds_it: {
        settings: |layer| layer.on_failure(OnFailure::Hold),
        script: first!(Reply::PanicInFuture),
        ends: "panic",
        called: OUTCOME_UNKNOWN,
    }

    leaving_a_failure_under_the_record_rule_records_it: {
        settings: |layer| layer.on_failure(OnFailure::Record),
        script: first!(Reply::Status(500)),
        ends: "500",
    }

    leaving_a_broken_body_under_the_record_rule_holds_it: {
        settings: |layer| layer.on_failure(OnFailure::Record),
        script: first!(Reply::BreakInBody { known_length: true }),
        ends: "broken",
        called: OUTCOME_UNKNOWN,
    }

    leaving_under_the_cancel_rule_ends_the_execution: {
        settings: |layer| layer.on_leave(OnLeave::Cancel),
        called: Retry::ReplayOrRun(1, 2),
    }

    leaving_a_waiter_under_the_cancel_rule_ends_its_own_execution: {
        settings: |layer| layer.on_leave(OnLeave::Cancel),
        before: Before::InFlight,
        script: first!(Reply::Status(500)),
        not_called: Retry::Run(2),
        called: Retry::ReplayOrRun(2, 3),
    }

    leaving_under_the_cancel_and_hold_rules_records_or_holds: {
        settings: |layer| layer.on_leave(OnLeave::Cancel).on_failure(OnFailure::Hold),
        script: first!(Reply::Error),
        ends: "error",
        called: OUTCOME_UNKNOWN,
    }
}
