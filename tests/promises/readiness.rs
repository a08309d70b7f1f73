//! The inner service is asked whether it is ready only for work that reaches it, on the very clone
//! that is then called; what is answered without it touches none of its permits.

use std::{
    convert::Infallible,
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use http::{HeaderName, Method, Request};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use tokio::{sync::Barrier, time::Instant};
use tower::{
    Layer, Service, ServiceExt,
    limit::{ConcurrencyLimit, ConcurrencyLimitLayer},
};
use tower_idempotency::{Ceiling, IdempotencyLayer, InFlight, MemoryStore, scope};

use crate::support::{
    Answer, Gate, keyed,
    probe::{Probe, Reply},
    send,
    steps::{Failed, settle},
    unkeyed, within,
};

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(scope::single_tenant())
}

/// The probe behind a limit on how many may run at once.
fn limited(probe: &Probe, limit: usize) -> ConcurrencyLimit<Probe> {
    ConcurrencyLimitLayer::new(limit).layer(probe.clone())
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_requests_that_are_answered_without_it_never_ask_the_inner_service() {
    let (gate, ceiling) = (Gate::default(), Ceiling::new(1));
    let probe = Probe::answering().runs_wait_at(&gate, 1);
    let store = MemoryStore::new().capacity(2);
    let layer = IdempotencyLayer::new(scope::from_header(HeaderName::from_static("x-tenant")))
        .store(store.clone())
        .in_flight(InFlight::Reject)
        .request_limit(100);
    let service = layer.layer(probe.clone());
    let at_its_ceiling = layer.clone().ceiling(&ceiling).layer(probe.clone());
    let needs_key = layer.clone().key_required(true).layer(probe.clone());
    let of_tenant = |key: &str, body: &str| {
        let mut request = keyed(key, body.to_owned());
        request.headers_mut().insert("x-tenant", "a".parse().unwrap());
        request
    };

    // The store is full now: one operation is in flight, one is recorded.
    let (running, request) = (service.clone(), of_tenant("running", "{}"));
    let running = tokio::spawn(async move { send(&running, request).await });
    gate.reached_by(1).await;
    assert_eq!(send(&service, of_tenant("done", "{}")).await.text(), "run 2");
    let _other_work = ceiling.try_acquire();
    let (polls, promised) = (probe.readiness_polls(), probe.promised());
    assert_eq!(promised, 1, "for the one that is running");

    for _ in 0..1_000 {
        let answer = send(&service, of_tenant("done", "{}")).await;
        assert_eq!((answer.text(), answer.is_replay()), ("run 2", true));
        let answer = send(&at_its_ceiling, of_tenant("done", "{}")).await;
        assert!(answer.is_replay());
        let refusals = [
            (send(&service, of_tenant("done", "[]")).await, 409, "idempotency_conflict"),
            (send(&service, of_tenant("running", "{}")).await, 409, "idempotency_in_progress"),
            (send(&service, of_tenant("not valid", "{}")).await, 400, "idempotency_key_invalid"),
            (send(&needs_key, unkeyed("{}")).await, 400, "idempotency_key_missing"),
            (send(&service, keyed("done", "{}")).await, 403, "idempotency_scope_unavailable"),
            (
                send(&service, of_tenant("done", &"x".repeat(101))).await,
                413,
                "idempotency_body_too_large",
            ),
            (send(&service, of_tenant("new", "{}")).await, 503, "idempotency_capacity"),
            (send(&at_its_ceiling, of_tenant("new", "{}")).await, 429, "concurrency_limit"),
        ];
        for (answer, status, code) in refusals {
            answer.assert_refused(status, code);
        }
    }
    assert_eq!((probe.readiness_polls(), probe.promised()), (polls, promised));
    assert_eq!((probe.runs(), probe.promises_broken()), (2, 0));
    gate.open();
    assert_eq!(running.await.unwrap().text(), "run 1");
    assert_eq!(probe.promised(), 0);
}

#[tokio::test]
async fn the_layer_is_ready_without_asking_the_inner_service() {
    let probe = Probe::answering();
    let mut service = layer().layer(probe.clone());
    for _ in 0..100 {
        let ready =
            poll_fn(|context| Service::<Request<Full<Bytes>>>::poll_ready(&mut service, context));
        assert_eq!(ready.now_or_never(), Some(Ok(())));
    }
    assert_eq!(probe.readiness_polls(), 0);
}

#[tokio::test]
async fn everything_that_reaches_the_inner_service_has_waited_for_its_readiness() {
    // The probe panics if it has not, or if another clone is called.
    let probe = Probe::answering();
    let layers = [layer(), layer().ceiling(&Ceiling::new(9))];
    for service in layers.map(|layer| layer.layer(probe.clone())) {
        let mut of_another_method = keyed("k", "");
        *of_another_method.method_mut() = Method::PUT;
        for request in [keyed("k", "{}"), unkeyed("{}"), of_another_method] {
            let (runs, polls) = (probe.runs(), probe.readiness_polls());
            assert_eq!(send(&service, request).await.text(), format!("run {}", runs + 1));
            assert_eq!(probe.readiness_polls() - polls, 2, "until it was ready, and no more");
        }
    }
    assert_eq!((probe.promised(), probe.promises_broken()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn new_work_waits_for_the_inner_service_after_its_claim_and_runs_when_it_is_ready() {
    let gate = Gate::default();
    let probe = Probe::answering().runs_wait_at(&gate, 1);
    let store = MemoryStore::new();
    let service = layer().store(store.clone()).layer(limited(&probe, 1));
    let spawn = |key: &str| {
        let (service, request) = (service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    };
    let first = spawn("a");
    gate.reached_by(1).await;
    let second = spawn("b");
    settle().await;
    assert_eq!((probe.runs(), store.in_flight()), (1, 2));
    gate.open();
    assert_eq!((first.await.unwrap().text(), second.await.unwrap().text()), ("run 1", "run 2"));
}

#[tokio::test(start_paused = true)]
async fn a_readiness_error_is_the_services_error_and_leaves_nothing() {
    let (probe, store, ceiling) = (Probe::answering(), MemoryStore::new(), Ceiling::new(1));
    let service = layer().store(store.clone()).ceiling(&ceiling).layer(probe.clone());
    probe.fail_next_readiness();
    assert_eq!(service.clone().oneshot(keyed("k", "{}")).await.unwrap_err(), Failed);
    assert_eq!((store.len(), store.in_flight(), ceiling.active(), probe.runs()), (0, 0, 0, 0));
    assert_eq!(send(&service, keyed("k", "{}")).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_while_the_inner_service_is_not_ready_keeps_no_permit() {
    let gate = Gate::default();
    let probe = Probe::answering().runs_wait_at(&gate, 1);
    let (store, ceiling) = (MemoryStore::new(), Ceiling::new(2));
    let mut inner = limited(&probe, 1);
    let service = layer().store(store.clone()).ceiling(&ceiling).layer(inner.clone());
    let spawn = |key: &str| {
        let (service, request) = (service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    };
    let running = spawn("a");
    gate.reached_by(1).await;
    let leaves = spawn("b");
    settle().await;
    assert_eq!((store.in_flight(), ceiling.active()), (2, 2));
    leaves.abort();
    settle().await;
    assert_eq!((store.in_flight(), ceiling.active()), (1, 1));

    gate.open();
    running.await.unwrap();
    // The only permit is free for somebody else.
    let ready = poll_fn(|context| {
        Service::<Request<tower_idempotency::RequestBody<Full<Bytes>>>>::poll_ready(
            &mut inner, context,
        )
    });
    within(ready).await.unwrap();
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_needs_no_execution_is_answered_at_once_while_the_inner_service_is_at_its_limit() {
    let gate = Gate::default();
    let probe = Probe::new(|_| Reply::Status(200)).runs_wait_at(&gate, 2);
    let service = layer().in_flight(InFlight::Reject).layer(limited(&probe, 1));
    let spawn = |key: &str| {
        let (service, request) = (service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    };
    let done = spawn("done");
    gate.reached_by(1).await;
    gate.let_through(1);
    done.await.unwrap();
    let running = spawn("running");
    gate.reached_by(2).await;

    let before = Instant::now();
    for _ in 0..50 {
        let answer = send(&service, keyed("done", "{}")).await;
        assert_eq!((answer.text(), answer.is_replay()), ("run 1", true));
        let refused = [("done", "[]", 409), ("running", "{}", 409), ("not valid", "{}", 400)];
        for (key, body, status) in refused {
            assert_eq!(send(&service, keyed(key, body)).await.status, status);
        }
    }
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert!(!running.is_finished());
    gate.open();
    assert_eq!(running.await.unwrap().text(), "run 2");
}

type AnyBody = UnsyncBoxBody<Bytes, Infallible>;

fn whole(request: Request<Full<Bytes>>) -> Request<AnyBody> {
    request.map(BodyExt::boxed_unsync)
}

/// An upload that has begun and never comes to its end.
fn trickling(key: &str) -> Request<AnyBody> {
    use stream::StreamExt;
    let begun = stream::iter([Ok(Frame::data(Bytes::from_static(b"{")))]);
    keyed(key, "").map(|_| StreamBody::new(begun.chain(stream::pending())).boxed_unsync())
}

#[tokio::test(start_paused = true)]
async fn uploads_that_trickle_hold_no_permit_and_no_place() {
    let (probe, store, ceiling) = (Probe::answering(), MemoryStore::new(), Ceiling::new(1));
    let service = layer().store(store.clone()).ceiling(&ceiling).layer(limited(&probe, 1));
    let uploads: Vec<_> = (0..10)
        .map(|number| {
            let (service, request) = (service.clone(), trickling(&format!("slow-{number}")));
            tokio::spawn(async move { send(&service, request).await })
        })
        .collect();
    settle().await;
    assert_eq!((store.len(), ceiling.active(), probe.promised()), (0, 0, 0));
    let before = Instant::now();
    assert_eq!(send(&service, whole(keyed("k", "{}"))).await.text(), "run 1");
    assert!(before.elapsed() < Duration::from_millis(100));
    for upload in uploads {
        upload.await.unwrap().assert_refused(408, "idempotency_body_unreadable");
    }
    assert_eq!((store.len(), ceiling.active(), probe.runs()), (1, 0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_identical_requests_at_every_limit_get_the_same_answer() {
    for round in 0..20 {
        let (probe, ceiling) = (Probe::answering(), Ceiling::new(1));
        let service = layer().ceiling(&ceiling).layer(limited(&probe, 1));
        let start = Arc::new(Barrier::new(50));
        let told_to_come_back = Arc::new(AtomicUsize::new(0));
        let clients: Vec<_> = (0..50)
            .map(|_| {
                let (start, service) = (Arc::clone(&start), service.clone());
                let told_to_come_back = Arc::clone(&told_to_come_back);
                tokio::spawn(async move {
                    start.wait().await;
                    loop {
                        let answer = send(&service, keyed("k", "{}")).await;
                        if answer.status == 200 {
                            break answer;
                        }
                        // There are more than may wait. Anything else would be a limit at work.
                        answer.assert_refused(409, "idempotency_in_progress");
                        told_to_come_back.fetch_add(1, Ordering::SeqCst);
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        let mut answers: Vec<Answer> = Vec::new();
        for client in clients {
            answers.push(client.await.unwrap());
        }
        assert!(answers.iter().all(|answer| answer.text() == "run 1"), "{round}");
        assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
        assert_eq!((probe.runs(), ceiling.active(), probe.promised()), (1, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn repeats_of_what_is_running_pass_the_ceiling_that_it_fills() {
    let gate = Gate::default();
    let (probe, ceiling) = (Probe::answering().runs_wait_at(&gate, 1), Ceiling::new(1));
    let service = layer().ceiling(&ceiling).layer(limited(&probe, 1));
    let spawn = |key: &str| {
        let (service, request) = (service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    };
    let first = spawn("k");
    gate.reached_by(1).await;
    let repeats: Vec<_> = (0..16).map(|_| spawn("k")).collect();
    settle().await;
    spawn("another").await.unwrap().assert_refused(429, "concurrency_limit");
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    for repeat in repeats {
        assert_eq!(repeat.await.unwrap().text(), "run 1");
    }
}
