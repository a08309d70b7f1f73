//! A shutdown loses nothing: what callers have left behind is finished and recorded, `drain` waits
//! for it and says what is left, and nothing is left behind for ever.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    pin::pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Waker},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{future::join, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use tokio::{runtime::Handle as Runtime, task::JoinHandle, time::Instant};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneSyncService};
use tower_idempotency::{
    IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, OnFailure, OnLeave, RequestBody,
    StoredResponse, scope,
};

use crate::support::{
    Answer, Gate, Runs,
    call::Call,
    interposed::Interposed,
    keyed,
    probe::{Probe, Reply},
    send,
    steps::{StepBody, settle},
    within,
};

type AnyBody = UnsyncBoxBody<Bytes, Infallible>;

/// An inner service in which the key says where the execution stays until it is let go.
struct Stages {
    layer: IdempotencyLayer,
    store: MemoryStore<StoredResponse>,
    runs: Runs,
    handler: Gate,
    body: Gate,
    /// The first completion to come to the store waits here.
    completion: Gate,
}

impl Stages {
    fn new() -> Self {
        let (store, completion) = (MemoryStore::new(), Gate::default());
        let interposed = Interposed::new(&store).before({
            let (completion, completions) = (completion.clone(), AtomicUsize::new(0));
            move |call| {
                let waits =
                    call == Call::Complete && completions.fetch_add(1, Ordering::SeqCst) == 0;
                let completion = completion.clone();
                async move {
                    if waits {
                        completion.pass().await;
                    }
                    Ok(())
                }
            }
        });
        Self {
            layer: IdempotencyLayer::new(scope::single_tenant())
                .store(interposed)
                .store_timeout(Duration::from_secs(1_000)),
            store,
            runs: Runs::default(),
            handler: Gate::default(),
            body: Gate::default(),
            completion,
        }
    }

    async fn handle(
        runs: Runs,
        handler: Gate,
        body: Gate,
        request: Request<RequestBody<Full<Bytes>>>,
    ) -> Result<Response<AnyBody>, Infallible> {
        runs.run();
        let key = request.extensions().get::<IdempotencyKey>().unwrap();
        let response = Response::builder();
        let gated = || {
            let frame = async move {
                body.pass().await;
                Ok(Frame::data(Bytes::from_static(b"done")))
            };
            StreamBody::new(stream::once(frame)).boxed_unsync()
        };
        Ok(match key.as_str() {
            "streaming" => response.body(gated()),
            "collecting" => response.header("content-length", 4).body(gated()),
            "handling" => {
                handler.pass().await;
                response.body(Full::from("done").boxed_unsync())
            }
            _ => response.body(Full::from("done").boxed_unsync()),
        }
        .unwrap())
    }

    fn service(
        &self,
    ) -> BoxCloneSyncService<
        Request<Full<Bytes>>,
        Response<tower_idempotency::ResponseBody<AnyBody>>,
        Infallible,
    > {
        let (runs, handler, body) = (self.runs.clone(), self.handler.clone(), self.body.clone());
        BoxCloneSyncService::new(self.layer.layer(service_fn(move |request| {
            Self::handle(runs.clone(), handler.clone(), body.clone(), request)
        })))
    }

    fn send(&self, key: &str) -> JoinHandle<Answer> {
        let (service, request) = (self.service(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    }

    /// Leaves an execution behind at each stage: its completion on its way to the store, in its
    /// handler, in a response body that is collected, and in one that is streamed.
    async fn leave_all(&self) {
        let mut callers = vec![self.send("recording")];
        self.completion.reached_by(1).await;
        callers.extend(["handling", "collecting", "streaming"].map(|key| self.send(key)));
        self.handler.reached_by(1).await;
        self.body.reached_by(2).await;
        for caller in callers {
            assert!(!caller.is_finished());
            caller.abort();
        }
        settle().await;
        assert_eq!((self.runs.count(), self.store.in_flight()), (4, 4));
    }

    fn drain(&self, timeout: Duration) -> JoinHandle<usize> {
        let layer = self.layer.clone();
        tokio::spawn(async move { layer.drain(timeout).await })
    }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn what_was_left_at_any_stage_is_recorded_when_drain_returns_zero() {
    let stages = Stages::new();
    stages.leave_all().await;
    let before = Instant::now();
    let drains = [stages.drain(LONG), stages.drain(LONG)];
    let open = [&stages.body, &stages.handler, &stages.completion];
    for gate in open {
        settle().await;
        assert!(drains.iter().all(|drain| !drain.is_finished()));
        gate.open();
    }
    for drain in drains {
        assert_eq!(drain.await.unwrap(), 0);
    }
    assert!(before.elapsed() < Duration::from_secs(1), "all who drain are told at once");
    assert_eq!((stages.store.in_flight(), stages.store.len()), (0, 4));
    for key in ["recording", "handling", "collecting", "streaming"] {
        let answer = send(&stages.service(), keyed(key, "{}")).await;
        assert_eq!((answer.text(), answer.is_replay()), ("done", true), "{key}");
    }
    assert_eq!(stages.runs.count(), 4);
}

#[tokio::test(start_paused = true)]
async fn drain_returns_after_its_time_with_the_number_that_is_left() {
    let stages = Stages::new();
    stages.leave_all().await;
    for (gate, left) in [
        (None, 4),
        (Some(&stages.handler), 3),
        (Some(&stages.body), 1),
        (Some(&stages.completion), 0),
    ] {
        if let Some(gate) = gate {
            gate.open();
            settle().await;
        }
        let before = Instant::now();
        assert_eq!(stages.layer.drain(Duration::from_secs(5)).await, left);
        let waited = if left > 0 { 5_000..5_010 } else { 0..1 };
        assert!(waited.contains(&before.elapsed().as_millis()), "{left}: {:?}", before.elapsed());
        assert_eq!(stages.layer.drain(Duration::ZERO).await, left);
    }
}

#[tokio::test(start_paused = true)]
async fn with_nothing_running_drain_returns_at_once() {
    let stages = Stages::new();
    let before = Instant::now();
    assert_eq!(stages.layer.drain(LONG).await, 0);
    stages.completion.open();
    send(&stages.service(), keyed("k", "{}")).await;
    assert_eq!(stages.layer.drain(LONG).await, 0);
    assert_eq!(before.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_is_dropped_leaves_what_it_waited_for_alone() {
    let stages = Stages::new();
    stages.leave_all().await;
    let drain = stages.drain(LONG);
    settle().await;
    drain.abort();
    assert!(drain.await.unwrap_err().is_cancelled());
    stages.handler.open();
    stages.body.open();
    stages.completion.open();
    assert_eq!(stages.layer.drain(LONG).await, 0);
    assert_eq!((stages.store.in_flight(), stages.store.len()), (0, 4));
}

#[tokio::test(start_paused = true)]
async fn an_execution_counts_while_it_runs_whether_its_caller_is_there_or_not() {
    let stages = Stages::new();
    stages.completion.open();
    let caller = stages.send("handling");
    stages.handler.reached_by(1).await;
    assert_eq!(stages.layer.drain(Duration::ZERO).await, 1);
    stages.handler.open();
    assert_eq!(stages.layer.drain(LONG).await, 0);
    assert_eq!(caller.await.unwrap().text(), "done");

    // A stream runs until it has ended, and it is its caller that reads it.
    let response = stages.service().oneshot(keyed("streaming", "{}")).await.unwrap();
    stages.body.open();
    assert_eq!(stages.layer.drain(Duration::from_secs(5)).await, 1);
    assert_eq!(Answer::read(response).await.text(), "done");
    assert_eq!(stages.layer.drain(Duration::ZERO).await, 0);
}

#[tokio::test(start_paused = true)]
async fn an_execution_that_is_finished_does_not_count_though_its_caller_reads_slowly() {
    let stages = Stages::new();
    stages.completion.open();
    stages.body.open();
    for key in ["k", "collecting"] {
        let unread = stages.service().oneshot(keyed(key, "{}")).await.unwrap();
        assert_eq!(stages.layer.drain(Duration::ZERO).await, 0, "{key}");
        assert_eq!(Answer::read(unread).await.text(), "done");
    }
}

/// An execution that waits at a gate, whose caller has left.
struct Left {
    layer: IdempotencyLayer,
    probe: Probe,
    store: MemoryStore<StoredResponse>,
    gate: Gate,
}

impl Left {
    async fn new(settings: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let (gate, store) = (Gate::default(), MemoryStore::new());
        let probe = Probe::answering().runs_wait_at(&gate, 1);
        let layer = settings(IdempotencyLayer::new(scope::single_tenant()).store(store.clone()));
        let service = layer.layer(probe.clone());
        let caller = tokio::spawn(async move { send(&service, keyed("k", "{}")).await });
        gate.reached_by(1).await;
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        Self { layer, probe, store, gate }
    }

    async fn retry(&self) -> Answer {
        send(&self.layer.layer(self.probe.clone()), keyed("k", "{}")).await
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_left_runs_five_minutes_at_most_and_then_ends_by_the_failure_rule() {
    for rule in [OnFailure::Release, OnFailure::Hold, OnFailure::Record] {
        let left = Left::new(|layer| layer.on_failure(rule)).await;
        let drain = left.layer.drain(Duration::from_secs(299)).await;
        assert_eq!((drain, left.store.in_flight(), left.probe.running()), (1, 1, 1));
        let before = Instant::now();
        assert_eq!(left.layer.drain(LONG).await, 0);
        assert!(before.elapsed() < Duration::from_millis(1_010));
        assert_eq!((left.store.in_flight(), left.probe.running()), (0, 0), "it was dropped");
        settle().await;
        assert_eq!(Runtime::current().metrics().num_alive_tasks(), 0, "and not handed on");
        let answer = left.retry().await;
        if rule == OnFailure::Release {
            assert_eq!((answer.text(), answer.is_replay()), ("run 2", false));
        } else {
            answer.assert_refused(409, "idempotency_outcome_unknown");
            assert_eq!(left.probe.runs(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_to_finish_can_be_set() {
    let settings = |layer: IdempotencyLayer| {
        let wait = Duration::from_secs(7);
        layer.finish_within(wait).in_flight(InFlight::Wait(wait))
    };
    let left = Left::new(settings).await;
    assert_eq!(left.layer.drain(Duration::from_millis(6_990)).await, 1);
    assert_eq!(left.layer.drain(Duration::from_millis(20)).await, 0);
    assert_eq!(left.retry().await.text(), "run 2");

    // In time, it is an execution like any other.
    let left = Left::new(settings).await;
    assert_eq!(left.layer.drain(Duration::from_millis(6_900)).await, 1);
    left.gate.open();
    assert_eq!(left.layer.drain(LONG).await, 0);
    let answer = left.retry().await;
    assert_eq!((answer.text(), answer.is_replay()), ("run 1", true));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_is_left_has_the_same_time_to_finish() {
    let stages = Stages::new();
    let response = stages.service().oneshot(keyed("streaming", "{}")).await.unwrap();
    drop(response);
    assert_eq!(stages.layer.drain(Duration::from_secs(299)).await, 1);
    assert_eq!(stages.layer.drain(Duration::from_secs(2)).await, 0);
    assert_eq!(stages.store.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn while_its_caller_waits_an_execution_has_all_the_time_it_needs() {
    let gate = Gate::default();
    let probe = Probe::answering().runs_wait_at(&gate, 1);
    let layer = IdempotencyLayer::new(scope::single_tenant())
        .finish_within(Duration::from_secs(1))
        .in_flight(InFlight::Reject);
    let mut response = pin!(layer.layer(probe.clone()).oneshot(keyed("k", "{}")));
    assert!(tokio::time::timeout(Duration::from_secs(3_600), &mut response).await.is_err());
    gate.open();
    let response = within(response).await.unwrap();
    assert_eq!(Answer::read(response).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn under_the_cancel_rule_nothing_is_left_to_drain() {
    let left = Left::new(|layer| layer.on_leave(OnLeave::Cancel)).await;
    assert_eq!(left.layer.drain(Duration::ZERO).await, 0);
    assert_eq!((left.store.len(), left.probe.running()), (0, 0));
    assert_eq!(Runtime::current().metrics().num_alive_tasks(), 0);
}

#[tokio::test(start_paused = true)]
async fn under_the_cancel_rule_a_record_on_its_way_to_the_store_still_arrives_and_is_drained() {
    let mut stages = Stages::new();
    stages.layer = stages.layer.clone().on_leave(OnLeave::Cancel);
    let caller = stages.send("recording");
    stages.completion.reached_by(1).await;
    caller.abort();
    let drain = stages.drain(LONG);
    settle().await;
    assert!(!drain.is_finished());
    stages.completion.open();
    assert_eq!(drain.await.unwrap(), 0);
    assert_eq!((stages.store.in_flight(), stages.store.len()), (0, 1));
    assert!(send(&stages.service(), keyed("recording", "{}")).await.is_replay());
}

/// Polls `future` to its end, and looks after each poll whether it has spawned anything.
async fn spawning_nothing<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let metrics = Runtime::current().metrics();
    let output = poll_fn(|context| {
        let poll = future.as_mut().poll(context);
        assert_eq!(metrics.num_alive_tasks(), 0, "something was spawned");
        poll
    })
    .await;
    settle().await;
    assert_eq!(metrics.num_alive_tasks(), 0, "something was spawned at the end");
    output
}

#[tokio::test(start_paused = true)]
async fn nothing_is_spawned_when_nobody_leaves() {
    let replies = [
        Reply::Status(200),
        Reply::Status(404),
        Reply::Status(500),
        Reply::Stream(200),
        Reply::Large(200),
        Reply::Error,
        Reply::BreakInBody { known_length: true },
        Reply::BreakInBody { known_length: false },
    ];
    for reply in replies {
        let store = MemoryStore::new();
        let layer = IdempotencyLayer::new(scope::single_tenant())
            .store(Interposed::stepping(&store))
            .response_limit(100);
        let service = layer.layer(Probe::new(move |_| reply));
        let request = |body| keyed("k", "").map(|_| StepBody::text(body));
        let exchange = async |body| {
            if let Ok(response) = service.clone().call(request(body)).await {
                // Whether it breaks is not asked here.
                let _whole = response.into_body().collect().await;
            }
        };
        // One that runs, and one that waits for it; then a repeat, and a conflict.
        spawning_nothing(join(exchange("{}"), exchange("{}"))).await;
        spawning_nothing(exchange("{}")).await;
        spawning_nothing(exchange("[]")).await;
        assert_eq!(store.in_flight(), 0, "{reply:?}");
    }
}

#[test]
fn without_a_runtime_an_execution_that_is_left_is_cancelled() {
    let (store, gate) = (MemoryStore::new(), Gate::default());
    let runs = Runs::default();
    let layer = IdempotencyLayer::new(scope::single_tenant()).store(store.clone());
    let mut service = layer.layer(service_fn({
        let (runs, gate) = (runs.clone(), gate.clone());
        move |_: Request<RequestBody<Full<Bytes>>>| {
            let (runs, gate) = (runs.clone(), gate.clone());
            async move {
                runs.run();
                gate.pass().await;
                Ok::<_, Infallible>(Response::new(Full::from("done")))
            }
        }
    }));
    let mut context = Context::from_waker(Waker::noop());
    let mut response = Box::pin(service.call(keyed("k", "{}")));
    assert!(response.as_mut().poll(&mut context).is_pending());
    assert_eq!((runs.count(), store.in_flight()), (1, 1));
    drop(response);
    assert_eq!(store.len(), 0);
    gate.open();
    let mut response = Box::pin(service.call(keyed("k", "{}")));
    assert!(response.as_mut().poll(&mut context).is_ready());
    assert_eq!((runs.count(), store.len()), (2, 1));
}
