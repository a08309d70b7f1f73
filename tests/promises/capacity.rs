//! There are never more live entries than the cap: what lives is never dropped for what comes, a
//! refused request leaves nothing, and every entry that ends gives its place back, whatever ends
//! it.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::{sync::Barrier, task::JoinHandle};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_idempotency::{
    Disposition, Fingerprint, Idempotency, IdempotencyLayer, InFlight, MemoryStore, OnFailure,
    OnLeave, OperationId, RequestBody, Scope, StoredResponse, Token, scope,
    store::{ClaimReply, ClaimRequest, Completion, Ownership, Store},
};

use crate::support::{
    Answer, Gate, Runs,
    interposed::Interposed,
    keyed,
    probe::{LARGE, Probe, Reply},
    send,
    steps::{Step, StepBody, Walked, settle, walk},
    unkeyed,
};

/// A handler that answers at once.
fn at_once(
    runs: &Runs,
) -> impl Service<
    Request<RequestBody<Full<Bytes>>>,
    Response = Response<Full<Bytes>>,
    Error = Infallible,
    Future: Send,
>
+ Clone
+ Send
+ Sync
+ 'static
+ use<> {
    let runs = runs.clone();
    service_fn(move |_| {
        let run = runs.run();
        async move { Ok(Response::new(Full::from(format!("run {run}")))) }
    })
}

/// Asserts that there was no room, and returns when there may be.
#[track_caller]
fn assert_full(answer: &Answer) -> u64 {
    answer.assert_refused(503, "idempotency_capacity");
    assert_eq!(answer.json()["retry"], "same-key");
    let seconds = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    seconds
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_two_hundred_racing_new_keys_as_many_are_let_in_as_there_is_room_for() {
    for round in 0..5 {
        let (runs, store) = (Runs::default(), MemoryStore::new());
        let layer = IdempotencyLayer::new(scope::single_tenant()).store(store.clone());
        let service = layer.layer(at_once(&runs));
        for key in 0..995 {
            assert_eq!(send(&service, keyed(&format!("old-{key}"), "{}")).await.status, 200);
        }
        let start = Arc::new(Barrier::new(200));
        let racers: Vec<_> = (0..200)
            .map(|key| {
                let (start, service) = (Arc::clone(&start), service.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    send(&service, keyed(&format!("new-{key}"), "{}")).await
                })
            })
            .collect();
        let mut let_in = 0;
        for racer in racers {
            let answer = racer.await.unwrap();
            if answer.status == 200 {
                let_in += 1;
            } else {
                assert_full(&answer);
            }
        }
        assert_eq!((let_in, runs.count(), store.len()), (5, 1_000, 1_000), "{round}");
        let counts = layer.dispositions();
        assert_eq!(counts.get(Disposition::Capacity), 195);
        assert_eq!(counts.get(Disposition::Executed), 1_000);
        for key in 0..995 {
            assert!(send(&service, keyed(&format!("old-{key}"), "{}")).await.is_replay());
        }
    }
}

/// A layer of some capacity, with a strict inner service whose first runs wait at a gate.
struct Small {
    layer: IdempotencyLayer,
    service: Idempotency<Probe>,
    store: MemoryStore<StoredResponse>,
    probe: Probe,
    gate: Gate,
}

impl Small {
    fn new(capacity: usize, waiting: usize, script: fn(usize) -> Reply) -> Self {
        let (store, gate) = (MemoryStore::new().capacity(capacity), Gate::default());
        let probe = Probe::new(script).runs_wait_at(&gate, waiting);
        let layer = IdempotencyLayer::new(scope::single_tenant())
            .store(store.clone())
            .response_limit(LARGE - 1)
            .retention(Duration::from_secs(30));
        Self { service: layer.layer(probe.clone()), layer, store, probe, gate }
    }

    async fn send(&self, key: &str) -> Answer {
        send(&self.service, keyed(key, "{}")).await
    }

    fn spawn(&self, key: &str) -> JoinHandle<Answer> {
        let (service, request) = (self.service.clone(), keyed(key, "{}"));
        tokio::spawn(async move { send(&service, request).await })
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_store_still_answers_for_every_key_that_it_knows() {
    let small = Small::new(4, 0, |run| match run {
        2 => Reply::Stream(200),
        3 => Reply::Large(200),
        _ => Reply::Status(200),
    });
    for key in ["a", "stream", "large", "d"] {
        assert_eq!(small.send(key).await.status, 200);
    }
    for _ in 0..3 {
        assert_full(&small.send("new").await);
        assert_eq!(
            (small.send("a").await.text(), small.send("d").await.text()),
            ("run 1", "run 4")
        );
        assert_eq!(small.send("stream").await.text(), "run 2");
        small.send("large").await.assert_refused(409, "idempotency_not_replayable");
        let conflict = send(&small.service, keyed("a", "[]")).await;
        conflict.assert_refused(409, "idempotency_conflict");
    }
    assert_eq!((small.probe.runs(), small.store.len()), (4, 4));
    assert_eq!(send(&small.service, unkeyed("{}")).await.text(), "run 5", "needs no room");
}

#[tokio::test(start_paused = true)]
async fn there_is_room_from_the_moment_an_entry_expires_and_callers_are_told_when() {
    let small = Small::new(2, 0, |_| Reply::Status(200));
    small.send("a").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    small.send("b").await;
    // "a" has some 20 of its 30 seconds left.
    assert_eq!(assert_full(&small.send("c").await), 20);
    tokio::time::sleep(Duration::from_millis(19_900)).await;
    assert_eq!(assert_full(&small.send("c").await), 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(small.store.len(), 1, "and nobody had to ask");
    assert_eq!(small.send("c").await.text(), "run 3");
    assert_eq!(assert_full(&small.send("d").await), 10);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(small.store.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_long_retention_asks_nobody_to_come_back_later_than_in_a_minute() {
    let small = Small::new(1, 1, |_| Reply::Status(200));
    let service = small.layer.clone().retention(Duration::from_secs(3_600));
    let service = service.layer(small.probe.clone());
    let (first, request) = (service.clone(), keyed("a", "{}"));
    let first = tokio::spawn(async move { send(&first, request).await });
    small.gate.reached_by(1).await;
    assert_eq!(assert_full(&send(&service, keyed("b", "{}")).await), 1, "it may end any time");
    small.gate.open();
    first.await.unwrap();
    assert_eq!(assert_full(&send(&service, keyed("b", "{}")).await), 60);
}

#[tokio::test(start_paused = true)]
async fn a_refused_key_leaves_nothing_while_those_in_flight_stay_single() {
    let small = Small::new(3, 3, |_| Reply::Status(200));
    let keys = ["a", "b", "c"];
    let mut running = Vec::new();
    for (number, key) in keys.iter().enumerate() {
        running.push(small.spawn(key));
        small.gate.reached_by(number + 1).await;
    }
    for _ in 0..5 {
        assert_full(&small.send("refused").await);
    }
    let repeats = keys.map(|key| small.spawn(key));
    settle().await;
    assert_eq!((small.probe.runs(), small.store.len(), small.store.in_flight()), (3, 3, 3));
    small.gate.open();
    for (first, repeat) in running.into_iter().zip(repeats) {
        let (first, repeat) = (first.await.unwrap(), repeat.await.unwrap());
        assert_eq!((first.text(), first.is_replay()), (repeat.text(), false));
        assert!(repeat.is_replay());
    }
    assert_full(&small.send("refused").await);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert_eq!(small.send("refused").await.text(), "run 4", "it was never run before");
}

#[tokio::test(start_paused = true)]
async fn an_entry_in_flight_never_expires() {
    let small = Small::new(1, 1, |_| Reply::Status(200));
    let service = small.service.clone();
    let running = tokio::spawn(async move { service.oneshot(keyed("a", "{}")).await });
    small.gate.reached_by(1).await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert_eq!((small.store.len(), small.store.in_flight()), (1, 1));
        assert_full(&small.send("b").await);
        small.send("a").await.assert_refused(409, "idempotency_in_progress");
        small.store.clear();
    }
    small.gate.open();
    let answer = Answer::read(running.await.unwrap().unwrap()).await;
    assert_eq!(answer.text(), "run 1");
    // Its retention has only begun.
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert!(small.send("a").await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn whatever_ends_an_execution_without_a_record_gives_its_place_back_at_once() {
    let small = Small::new(1, 0, |run| match run {
        1 => Reply::Status(500),
        2 => Reply::Status(404),
        3 => Reply::Error,
        4 => Reply::PanicInCall,
        5 => Reply::PanicInFuture,
        6 => Reply::PanicInBody { known_length: true },
        7 => Reply::PanicInBody { known_length: false },
        8 => Reply::BreakInBody { known_length: true },
        9 => Reply::BreakInBody { known_length: false },
        10 => Reply::Stream(503),
        _ => Reply::Status(200),
    });
    for run in 1..=10 {
        // A task of its own, because some panic.
        let _answer = small.spawn(&format!("k{run}")).await;
        assert_eq!((small.probe.runs(), small.store.len()), (run, 0));
    }
    assert_eq!(small.send("k11").await.text(), "run 11");
    assert_full(&small.send("k12").await);
}

#[tokio::test(start_paused = true)]
async fn a_held_entry_keeps_its_place_until_it_expires() {
    let small = Small::new(1, 0, |_| Reply::Status(500));
    let service = small.layer.clone().on_failure(OnFailure::Hold).layer(small.probe.clone());
    assert_eq!(send(&service, keyed("a", "{}")).await.status, 500);
    send(&service, keyed("a", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
    assert_full(&send(&service, keyed("b", "{}")).await);
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(small.store.is_empty());
    assert_eq!(send(&service, keyed("b", "{}")).await.status, 500);
}

#[tokio::test(start_paused = true)]
async fn the_cap_counts_the_entries_of_all_scopes_together() {
    let (runs, store) = (Runs::default(), MemoryStore::new().capacity(2));
    let tenant = http::HeaderName::from_static("x-tenant");
    let layer = IdempotencyLayer::new(scope::from_header(tenant.clone())).store(store.clone());
    let service = layer.layer(at_once(&runs));
    let of = |name: &str| {
        let mut request = keyed("k", "{}");
        request.headers_mut().insert(tenant.clone(), name.parse().unwrap());
        request
    };
    assert_eq!(send(&service, of("a")).await.text(), "run 1");
    assert_eq!(send(&service, of("b")).await.text(), "run 2");
    assert_full(&send(&service, of("c")).await);
    assert_eq!(send(&service, of("b")).await.text(), "run 2");
}

/// Numbers that look random and are the same in every run of the test (xorshift).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % sides
    }
}

fn any_reply(run: usize) -> Reply {
    match Dice(0x9e37_79b9_7f4a_7c15 ^ run as u64).roll(12) {
        0 => Reply::Status(500),
        1 => Reply::Status(404),
        2 => Reply::Stream(200),
        3 => Reply::Large(200),
        4 => Reply::Error,
        5 => Reply::PanicInCall,
        6 => Reply::PanicInFuture,
        7 => Reply::PanicInBody { known_length: run.is_multiple_of(2) },
        8 => Reply::BreakInBody { known_length: run.is_multiple_of(2) },
        _ => Reply::Status(200),
    }
}

#[tokio::test(start_paused = true)]
async fn after_five_thousand_requests_that_end_in_every_way_the_count_is_exact() {
    const CAPACITY: usize = 60;
    for (seed, on_leave) in [(1, OnLeave::Finish), (2, OnLeave::Cancel)] {
        let store = MemoryStore::new().capacity(CAPACITY);
        let probe = Probe::new(any_reply);
        let layer = IdempotencyLayer::new(scope::single_tenant())
            .store(Interposed::stepping(&store))
            .retention(Duration::from_secs(3))
            .request_limit(100)
            .response_limit(100)
            .on_leave(on_leave)
            .in_flight(InFlight::Wait(Duration::from_millis(20)));
        let service = layer.layer(probe.clone());
        let (mut dice, mut left, mut most_live) = (Dice(seed), 0, 0);
        for number in 0..2_500 {
            // An old key now and then: a repeat, a conflict, or new work if it has ended.
            let key =
                format!("k{}", if dice.roll(4) == 0 { dice.roll(number + 1) } else { number });
            let body = match dice.roll(10) {
                0 => StepBody::text(&"too large".repeat(20)),
                1 => StepBody::new([Step::Data(Bytes::from_static(b"{")), Step::Fail]),
                2 => StepBody::text(r#"{"another": 1}"#),
                _ => StepBody::text("{}"),
            };
            let response = service.clone().call(keyed(&key, "").map(|_| body));
            let exchange = async {
                let Ok(response) = response.await else { return };
                let _whole = http_body_util::BodyExt::collect(response.into_body()).await;
            };
            // Half of the callers stay.
            let steps = if dice.roll(2) == 0 { dice.roll(30) } else { usize::MAX };
            if matches!(walk(exchange, steps, || ()).await, Walked::Dropped) {
                left += 1;
            }
            most_live = most_live.max(store.len());
        }
        assert!(left > 300 && probe.runs() > 500, "{left} left, {} ran", probe.runs());
        assert_eq!(most_live, CAPACITY, "it was full, and never more than that");
        settle().await;
        assert_eq!((store.in_flight(), probe.running(), probe.promised()), (0, 0, 0));
        assert_eq!(layer.drain(Duration::ZERO).await, 0);

        // What answers for itself is what the store says is there, and the rest of the places are
        // free.
        let runs = Runs::default();
        let counting = layer.layer(at_once(&runs));
        let live = store.len();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(live <= CAPACITY && store.is_empty());
        for key in 0..CAPACITY {
            assert_eq!(send(&counting, keyed(&format!("new-{key}"), "{}")).await.status, 200);
            assert_eq!(store.len(), key + 1);
        }
        assert_full(&send(&counting, keyed("one-too-many", "{}")).await);
        assert_eq!(runs.count(), CAPACITY);
    }
}

#[tokio::test(start_paused = true)]
async fn the_places_that_live_entries_leave_free_are_free() {
    const CAPACITY: usize = 100;
    let store = MemoryStore::new().capacity(CAPACITY);
    let probe = Probe::new(any_reply);
    let layer = IdempotencyLayer::new(scope::single_tenant())
        .store(Interposed::stepping(&store))
        .response_limit(100)
        .in_flight(InFlight::Reject);
    let service = layer.layer(probe.clone());
    let mut dice = Dice(3);
    for key in 0..150 {
        let exchange = async {
            let request = keyed(&format!("k{key}"), "").map(|_| StepBody::text("{}"));
            let Ok(response) = service.clone().call(request).await else { return };
            let _whole = http_body_util::BodyExt::collect(response.into_body()).await;
        };
        let _walked = walk(exchange, dice.roll(30), || ()).await;
    }
    settle().await;
    let live = store.len();
    assert!((20..CAPACITY).contains(&live), "{live}");

    // Every entry that is counted answers for itself, and every place that is not takes new work.
    let nothing = layer.layer(service_fn(|_: Request<RequestBody<Full<Bytes>>>| async {
        let response = Response::builder().status(404).body(Full::<Bytes>::default());
        Ok::<_, Infallible>(response.unwrap())
    }));
    let mut known = 0;
    for key in 0..150 {
        let answer = send(&nothing, keyed(&format!("k{key}"), "{}")).await;
        known += usize::from(answer.status != 404);
    }
    assert_eq!(known, live);
    let runs = Runs::default();
    let service = layer.layer(at_once(&runs));
    for key in live..CAPACITY {
        assert_eq!(send(&service, keyed(&format!("new-{key}"), "{}")).await.status, 200);
    }
    assert_full(&send(&service, keyed("one-too-many", "{}")).await);
    assert_eq!(store.len(), CAPACITY);
}

#[tokio::test(start_paused = true)]
async fn keys_that_come_and_go_for_a_long_time_leave_no_residue() {
    const KEYS: u32 = 100_000;
    let store = MemoryStore::new().capacity(500);
    // The store's values are clones of this one, so its count says how many the store still has.
    let value = Arc::new(());
    let (scope, fingerprint) = (Scope::new("tenant"), Fingerprint::of(["request"]));
    for key in 0..KEYS {
        let id = OperationId::new(&scope, &key.to_string());
        let claim = match store.claim(ClaimRequest::new(id, fingerprint, Token::mint())).await {
            Ok(ClaimReply::Mine(claim)) => claim,
            other => panic!("{key}: {other:?}"),
        };
        let ended = match key % 8 {
            0 => claim.release(),
            1 => claim.hold(Duration::from_millis(1)),
            _ => claim.complete(Completion::new(Arc::clone(&value), Duration::from_millis(1))),
        };
        assert_eq!(ended.await.unwrap(), Ownership::Held);
        if key % 300 == 0 {
            tokio::time::advance(Duration::from_millis(2)).await;
        }
        if key % 1_000 == 0 {
            assert!(Arc::strong_count(&value) <= 2_000, "{key}: {}", Arc::strong_count(&value));
        }
    }
    tokio::time::advance(Duration::from_millis(2)).await;
    assert_eq!((store.len(), store.in_flight()), (0, 0));
    // What is left are removals on their way, which each further write takes along.
    assert!(Arc::strong_count(&value) <= 2_000, "{}", Arc::strong_count(&value));
}
