//! What records may take: a budget of bytes, a share of the entries for each scope, and, where that
//! is wanted, the oldest record ends for a new one. Each is exact, refuses before any work is done,
//! and has its room back from every end.

use std::{collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::Full;
use tokio::sync::Barrier;
use tower_idempotency::{
    Engine, Fingerprint, Handle, IdempotencyLayer, MemoryStore, Operation, OperationId, RunError,
    Scope, ScopeId, StoredResponse, Token, scope,
    store::{
        Claim, ClaimReply, ClaimRequest, Completion, Ownership, Store, StoreFuture,
        conformance::Suite,
    },
};

use crate::support::{
    assert_impossible, keyed,
    stack::{Script, Stack, Step, any, text, with_header},
    unkeyed, within,
};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn id(number: usize) -> OperationId {
    OperationId::new(&Scope::new("test"), &number.to_string())
}

fn tenant(name: &str) -> Option<ScopeId> {
    Some(ScopeId::new(&Scope::new(name)))
}

fn request(number: usize, scope: Option<ScopeId>) -> ClaimRequest {
    ClaimRequest::new(id(number), Fingerprint::of(["asked"]), Token::mint()).in_scope(scope)
}

type Reply = ClaimReply<&'static str>;
type Claimed = Box<dyn Claim<&'static str>>;

/// A store of values whose size is what a test says.
#[derive(Clone)]
struct Shelf(MemoryStore<&'static str>);

impl Shelf {
    async fn ask(&self, number: usize, scope: Option<ScopeId>) -> Reply {
        self.0.claim(request(number, scope)).await.unwrap()
    }

    async fn claim(&self, number: usize, scope: Option<ScopeId>) -> Claimed {
        match self.ask(number, scope).await {
            ClaimReply::Mine(claim) => claim,
            reply => panic!("{number}: {reply:?}"),
        }
    }

    async fn record(&self, number: usize, bytes: usize, retention: Duration) {
        let claim = self.claim(number, None).await;
        complete(claim, bytes, retention).await;
    }

    /// Asserts that there is no room, and returns when there is.
    async fn full(&self, number: usize, scope: Option<ScopeId>) -> Option<Duration> {
        match self.ask(number, scope).await {
            ClaimReply::Full { room_in } => room_in,
            reply => panic!("{number}: {reply:?}"),
        }
    }
}

async fn complete(claim: Claimed, bytes: usize, retention: Duration) {
    let said = claim.complete(Completion::new("value", retention).bytes(bytes)).await.unwrap();
    assert_eq!(said, Ownership::Held);
}

/// The ways in which a record or a held entry ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Deadline,
    Expire,
    RetainForNothing,
    Remove,
    Clear,
}

impl End {
    const ALL: [Self; 5] =
        [Self::Deadline, Self::Expire, Self::RetainForNothing, Self::Remove, Self::Clear];

    async fn bring<V: Clone + Send + Sync + 'static>(
        self,
        store: &MemoryStore<V>,
        asked: &ClaimRequest,
    ) {
        let ClaimRequest { id, token, .. } = *asked;
        let said = match self {
            Self::Deadline => {
                tokio::time::advance(HOUR).await;
                Ownership::Held
            }
            Self::Expire => store.expire(id, token).await.unwrap(),
            Self::RetainForNothing => store.retain(id, token, Duration::ZERO).await.unwrap(),
            Self::Remove => {
                assert!(store.remove(&id));
                Ownership::Held
            }
            Self::Clear => {
                store.clear();
                Ownership::Held
            }
        };
        assert_eq!(said, Ownership::Held, "{self:?}");
    }
}

// A budget of bytes.

#[tokio::test(start_paused = true)]
async fn at_the_byte_budget_nothing_new_is_claimed_and_one_byte_below_it_is() {
    for (bytes, is_full) in [(99, false), (100, true), (101, true)] {
        let shelf = Shelf(MemoryStore::new().stored_bytes(100));
        shelf.record(0, bytes, HOUR).await;
        assert_eq!(shelf.0.bytes(), bytes);
        if is_full {
            assert_eq!(shelf.full(1, None).await, Some(HOUR));
            assert!(matches!(shelf.ask(0, None).await, ClaimReply::Recorded("value")));
            assert_eq!(shelf.0.len(), 1, "the refusal leaves nothing");
        } else {
            assert_eq!(shelf.claim(1, None).await.release().await.unwrap(), Ownership::Held);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_completion_always_fits() {
    let shelf = Shelf(MemoryStore::new().stored_bytes(1));
    let mut claims = Vec::new();
    for number in 0..5 {
        claims.push(shelf.claim(number, None).await);
    }
    for claim in claims {
        complete(claim, 1_000, HOUR).await;
    }
    assert_eq!((shelf.0.bytes(), shelf.0.len()), (5_000, 5));
    for number in 0..5 {
        assert!(matches!(shelf.ask(number, None).await, ClaimReply::Recorded("value")));
    }
    assert_eq!(shelf.full(5, None).await, Some(HOUR));
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_bytes_is_the_one_after_which_there_are_enough() {
    let shelf = Shelf(MemoryStore::new().stored_bytes(100));
    let late = shelf.claim(2, None).await;
    shelf.record(0, 1, 10 * SECOND).await;
    shelf.record(1, 1, 20 * SECOND).await;
    complete(late, 200, 30 * SECOND).await;
    // The first two ends do not help.
    for passed in 0..30 {
        assert_eq!(shelf.full(9, None).await, Some((30 - passed) * SECOND));
        tokio::time::advance(SECOND).await;
    }
    assert_eq!(shelf.claim(9, None).await.release().await.unwrap(), Ownership::Held);
    assert_eq!((shelf.0.bytes(), shelf.0.len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn every_end_of_a_record_gives_its_bytes_back_once() {
    for end in End::ALL {
        let store = MemoryStore::new().stored_bytes(100);
        let asked = request(0, None);
        let ClaimReply::Mine(claim) = store.claim(asked).await.unwrap() else {
            panic!("it is mine")
        };
        complete(claim, 100, HOUR).await;
        let shelf = Shelf(store);
        shelf.full(1, None).await;
        end.bring(&shelf.0, &asked).await;
        assert_eq!((shelf.0.bytes(), shelf.0.len()), (0, 0), "{end:?}");
        // Room for exactly as much as before.
        shelf.record(2, 60, HOUR).await;
        shelf.record(3, 60, HOUR).await;
        assert_eq!(shelf.0.bytes(), 120, "{end:?}");
        shelf.full(4, None).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_or_held_takes_no_bytes() {
    let shelf = Shelf(MemoryStore::new().stored_bytes(10));
    let in_flight = shelf.claim(0, None).await;
    assert_eq!(shelf.claim(1, None).await.hold(HOUR).await.unwrap(), Ownership::Held);
    assert_eq!(shelf.claim(2, None).await.release().await.unwrap(), Ownership::Held);
    drop(shelf.claim(3, None).await);
    assert_eq!((shelf.0.bytes(), shelf.0.len()), (0, 2));
    drop(in_flight);
}

/// Requests in scopes, which are what `x-tenant` says.
fn of(tenant: &str, key: &str) -> Request<Full<Bytes>> {
    let mut request = keyed(key, "{}");
    request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
    request
}

fn layer(store: &MemoryStore<StoredResponse>) -> IdempotencyLayer {
    IdempotencyLayer::new(scope::from_header(HeaderName::from_static("x-tenant")))
        .store(store.clone())
}

#[tokio::test(start_paused = true)]
async fn over_the_byte_budget_requests_with_new_keys_are_refused_before_anything_is_done() {
    let store = MemoryStore::new().stored_bytes(3_000);
    let stack = Stack::new(&layer(&store).retention(30 * SECOND), |run, _| async move {
        Ok(text(200, format!("{run:01000}")))
    });
    for key in ["a", "b", "c"] {
        assert_eq!(stack.send(of("t", key)).await.status, 200, "{key}");
        tokio::time::advance(SECOND).await;
    }
    assert!((3_000..6_000).contains(&store.bytes()), "{}", store.bytes());
    let refused = stack.send(of("t", "d")).await;
    refused.assert_refused(503, "idempotency_capacity");
    // Three seconds of the first one's thirty have passed.
    assert_eq!(refused.header("retry-after"), Some("27"));
    assert!(stack.send(of("t", "a")).await.is_replay(), "what is known is answered");
    assert_eq!(stack.send(unkeyed("{}")).await.status, 200, "needs no room");
    assert_eq!((stack.runs.count(), store.len(), store.in_flight()), (4, 3, 0));
    tokio::time::advance(27 * SECOND).await;
    assert_eq!(stack.send(of("t", "d")).await.status, 200);
}

#[tokio::test]
async fn a_record_counts_for_no_less_than_what_it_keeps() {
    let bytes_of = async |layer: fn(IdempotencyLayer) -> IdempotencyLayer,
                          response: fn() -> Response<_>| {
        let store = MemoryStore::new();
        let stack =
            Stack::new(&layer(self::layer(&store)), move |_, _| async move { Ok(response()) });
        assert_eq!(stack.send(of("t", "k")).await.status, 200);
        assert_eq!(store.len(), 1);
        store.bytes()
    };
    let same = |layer| layer;
    let bare = bytes_of(same, || text(200, "")).await;
    assert!(bare > 0);
    let body = bytes_of(same, || text(200, vec![b'x'; 10_000])).await;
    assert!((bare + 10_000..bare + 10_100).contains(&body), "{body}");
    let stream = bytes_of(same, || {
        let half = || Step::data(vec![b'x'; 5_000]);
        Response::new(any(Script::new([half(), half()])))
    })
    .await;
    assert!((bare + 10_000..bare + 10_100).contains(&stream), "{stream}");
    let header = bytes_of(same, || with_header(text(200, ""), "x-large", [b'x'; 10_000])).await;
    assert!((bare + 10_000..bare + 11_000).contains(&header), "{header}");
    // Many small ones take far more than their text.
    let headers = bytes_of(same, || {
        let mut response = text(200, "");
        for _ in 0..100 {
            response.headers_mut().append("x", HeaderValue::from_static("y"));
        }
        response
    })
    .await;
    assert!(headers > bare + 7_000, "{headers}");
    let trailers = bytes_of(same, || {
        Response::new(any(Script::new([Step::data("x"), Step::trailer("x-sum", "0123456789")])))
    })
    .await;
    assert!(trailers > bare + 16, "{trailers}");
    let tombstone =
        bytes_of(|layer| layer.response_limit(10), || text(200, vec![b'x'; 10_000])).await;
    assert!(tombstone <= bare, "{tombstone}");
}

/// A buffer that is known to be gone.
fn large() -> (Bytes, std::sync::Weak<Vec<u8>>) {
    struct Owner(Arc<Vec<u8>>);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    let buffer = Arc::new(vec![b'x'; 400 * 1024]);
    let known = Arc::downgrade(&buffer);
    (Bytes::from_owner(Owner(buffer)), known)
}

#[tokio::test]
async fn a_record_keeps_no_buffer_alive_that_is_much_larger_than_itself() {
    // As a proxy does it, whose responses are slices of what came over its connection.
    let part = |buffer: &Bytes| HeaderValue::from_maybe_shared(buffer.slice(7..9)).unwrap();
    type Make = Box<dyn Fn(Bytes) -> Response<crate::support::stack::AnyBody> + Send + Sync>;
    let body: Make = Box::new(|buffer| text(200, buffer.slice(100..150)));
    let body_in_pieces: Make = Box::new(|buffer| {
        let steps = [Step::Data(buffer.slice(1..2)), Step::Data(buffer.slice(4..6))];
        Response::new(any(Script::new(steps)))
    });
    let stream: Make =
        Box::new(|buffer| Response::new(any(Script::unknown_length(buffer.slice(1..2)))));
    let header: Make = Box::new(move |buffer| {
        let mut response = text(200, "");
        response.headers_mut().insert("x-part", part(&buffer));
        response
    });
    let trailer: Make = Box::new(move |buffer| {
        let trailers = [(HeaderName::from_static("x-part"), part(&buffer))];
        Response::new(any(Script::new([Step::Trailers(trailers.into_iter().collect())])))
    });
    let tombstone: Make = Box::new(move |buffer| {
        let mut response = text(200, vec![b'x'; 2 * 1024 * 1024]);
        response.headers_mut().insert("location", part(&buffer));
        response
    });
    for (number, make) in
        [body, body_in_pieces, stream, header, trailer, tombstone].into_iter().enumerate()
    {
        let (buffer, known) = large();
        let store = MemoryStore::new();
        let once = std::sync::Mutex::new(Some(buffer));
        let stack = Stack::new(&layer(&store), move |_, _| {
            let response = make(once.lock().unwrap().take().unwrap());
            async move { Ok(response) }
        });
        let first = stack.send(of("t", "k")).await;
        let again = stack.send(of("t", "k")).await;
        if first.body.len() < 1_000_000 {
            assert!(again.is_replay());
            assert_eq!((&first.body, &first.trailers), (&again.body, &again.trailers));
            assert_eq!(first.headers.get("x-part"), again.headers.get("x-part"));
        } else {
            assert_eq!(first.headers.get("location"), again.headers.get("location"));
        }
        drop(first);
        assert!(known.upgrade().is_none(), "{number}");
        assert_eq!(store.len(), 1);
    }
}

#[tokio::test]
async fn a_secret_header_value_stays_marked_as_one_in_the_record() {
    let store = MemoryStore::new();
    let stack = Stack::new(&layer(&store), |_, _| async {
        let mut response = text(200, "");
        let mut value = HeaderValue::from_static("secret");
        value.set_sensitive(true);
        response.headers_mut().insert("x-secret", value);
        response.headers_mut().insert("x-plain", HeaderValue::from_static("plain"));
        Ok(response)
    });
    for is_replay in [false, true] {
        let answer = stack.send(of("t", "k")).await;
        assert_eq!(answer.is_replay(), is_replay);
        assert!(answer.headers["x-secret"].is_sensitive());
        assert!(!answer.headers["x-plain"].is_sensitive());
    }
}

// A share for each scope.

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_those_who_race_each_scope_gets_exactly_its_share() {
    for round in 0..20 {
        let shelf = Shelf(MemoryStore::new().capacity(100).scope_share(5));
        let start = Arc::new(Barrier::new(80));
        let racers: Vec<_> = (0..80)
            .map(|number| {
                let (shelf, start) = (shelf.clone(), Arc::clone(&start));
                tokio::spawn(async move {
                    let scope = if number % 2 == 0 { "a" } else { "b" };
                    start.wait().await;
                    match shelf.ask(number, tenant(scope)).await {
                        ClaimReply::Mine(claim) => {
                            complete(claim, 1, HOUR).await;
                            Some(scope)
                        }
                        ClaimReply::Full { .. } => None,
                        reply => panic!("{reply:?}"),
                    }
                })
            })
            .collect();
        let mut let_in = HashMap::<_, usize>::new();
        for racer in racers {
            if let Some(scope) = within(racer).await.unwrap() {
                *let_in.entry(scope).or_default() += 1;
            }
        }
        assert_eq!(let_in, HashMap::from([("a", 5), ("b", 5)]), "{round}");
        assert_eq!(shelf.0.len(), 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_scope_whose_share_is_full_takes_nothing_from_the_others() {
    let store = MemoryStore::new().capacity(10).scope_share(2);
    let stack = Stack::numbered(&layer(&store).retention(40 * SECOND));
    for key in ["1", "2"] {
        assert_eq!(stack.send(of("a", key)).await.status, 200);
    }
    for _ in 0..3 {
        let refused = stack.send(of("a", "3")).await;
        refused.assert_refused(503, "idempotency_capacity");
        assert_eq!(refused.header("retry-after"), Some("40"));
    }
    assert!(stack.send(of("a", "1")).await.is_replay(), "what is known is answered");
    for other in ["b", "c"] {
        for key in ["1", "2"] {
            assert_eq!(stack.send(of(other, key)).await.status, 200, "{other} {key}");
        }
    }
    assert_eq!((store.len(), stack.runs.count()), (6, 6));
}

#[tokio::test(start_paused = true)]
async fn the_wait_of_a_full_share_is_that_of_the_scopes_own_entries() {
    let shelf = Shelf(MemoryStore::new().capacity(5).scope_share(2));
    complete(shelf.claim(0, tenant("b")).await, 1, 5 * SECOND).await;
    let first = shelf.claim(1, tenant("a")).await;
    let second = shelf.claim(2, tenant("a")).await;
    assert_eq!(shelf.full(9, tenant("a")).await, None, "all of it is running");
    complete(first, 1, 30 * SECOND).await;
    assert_eq!(shelf.full(9, tenant("a")).await, Some(30 * SECOND));
    complete(second, 1, 20 * SECOND).await;
    assert_eq!(shelf.full(9, tenant("a")).await, Some(20 * SECOND));
    tokio::time::advance(20 * SECOND).await;
    assert_eq!(shelf.claim(9, tenant("a")).await.release().await.unwrap(), Ownership::Held);
}

#[tokio::test(start_paused = true)]
async fn where_share_and_bytes_are_full_the_wait_is_for_both() {
    let shelf = Shelf(MemoryStore::new().stored_bytes(100).scope_share(1));
    let large = shelf.claim(0, tenant("b")).await;
    complete(shelf.claim(1, tenant("a")).await, 1, 20 * SECOND).await;
    complete(large, 100, 50 * SECOND).await;
    assert_eq!(shelf.full(9, tenant("a")).await, Some(50 * SECOND));
    assert_eq!(shelf.full(9, tenant("c")).await, Some(50 * SECOND));
    tokio::time::advance(20 * SECOND).await;
    assert_eq!(shelf.full(9, tenant("a")).await, Some(30 * SECOND));
    tokio::time::advance(30 * SECOND).await;
    assert_eq!(shelf.claim(9, tenant("a")).await.release().await.unwrap(), Ownership::Held);
}

#[tokio::test(start_paused = true)]
async fn every_end_gives_the_scope_its_place_back_once() {
    let store = MemoryStore::new().scope_share(2);
    let shelf = Shelf(store.clone());
    let mut number = 0;
    let mut place = |scope| {
        number += 1;
        request(number, tenant(scope))
    };
    let _stays = shelf.claim(0, tenant("a")).await;
    let mine = async |asked: ClaimRequest| match store.claim(asked).await.unwrap() {
        ClaimReply::Mine(claim) => claim,
        reply => panic!("{reply:?}"),
    };
    // Exactly one place is free, after each.
    let assert_one_free = async || {
        let claim = shelf.claim(1_000, tenant("a")).await;
        assert_eq!(shelf.full(1_001, tenant("a")).await, None);
        drop(claim);
    };
    assert_eq!(mine(place("a")).await.release().await.unwrap(), Ownership::Held);
    assert_one_free().await;
    drop(mine(place("a")).await);
    assert_one_free().await;
    let asked = place("a");
    let claim = mine(asked).await;
    assert_eq!(store.withdraw(asked.id, asked.token).await.unwrap(), Ownership::Held);
    assert_one_free().await;
    drop(claim);
    assert_one_free().await;
    for end in End::ALL {
        for is_held in [false, true] {
            let asked = place("a");
            let claim = mine(asked).await;
            if is_held {
                assert_eq!(claim.hold(HOUR).await.unwrap(), Ownership::Held);
            } else {
                complete(claim, 1, HOUR).await;
            }
            shelf.full(1_000, tenant("a")).await;
            end.bring(&store, &asked).await;
            assert_one_free().await;
        }
    }
    assert_eq!((store.len(), store.in_flight()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn without_a_share_or_a_scope_only_the_capacity_counts() {
    let shelf = Shelf(MemoryStore::new().capacity(4));
    let _claims = [shelf.claim(0, tenant("a")).await, shelf.claim(1, tenant("a")).await];
    let shelf = Shelf(MemoryStore::new().capacity(4).scope_share(1));
    let mut claims = vec![shelf.claim(0, tenant("a")).await];
    for number in 1..4 {
        claims.push(shelf.claim(number, None).await);
    }
    assert_eq!(shelf.full(4, None).await, None);
    assert_eq!(shelf.full(4, tenant("b")).await, None);
}

#[tokio::test]
async fn operations_of_the_engine_count_to_the_share_of_their_scope() {
    let engine = Engine::new(MemoryStore::new().scope_share(1));
    let run = async |scope: &str, key: &str| {
        let operation = Operation::new(&Scope::new(scope), key);
        engine.run(Some(operation), async { Ok::<_, std::convert::Infallible>(1) }).await
    };
    assert!(run("a", "1").await.is_ok());
    assert!(matches!(run("a", "2").await, Err(RunError::Full { room_in: Some(_) })));
    assert!(run("a", "1").await.unwrap().replayed);
    assert!(run("b", "2").await.is_ok());
}

#[test]
fn a_share_or_a_budget_that_cannot_work_is_refused_by_name() {
    let store = MemoryStore::<u8>::new;
    assert_impossible("stored_bytes", || store().stored_bytes(0));
    assert_impossible("scope_share", || store().scope_share(0));
    assert_impossible("scope_share", || store().scope_share(1_001));
    assert_impossible("scope_share", || store().capacity(10).scope_share(11));
    assert_impossible("capacity", || store().scope_share(11).capacity(10));
    drop(store().capacity(10).scope_share(10).capacity(10));
}

// The oldest record ends for a new one.

#[tokio::test(start_paused = true)]
async fn the_record_that_was_completed_first_ends_for_a_new_operation() {
    let shelf = Shelf(MemoryStore::new().capacity(3).evict_oldest(true));
    // Claimed first, completed last; and what ends by itself first is not what is oldest.
    let last = shelf.claim(3, None).await;
    shelf.record(1, 1, HOUR).await;
    shelf.record(2, 1, SECOND).await;
    complete(last, 1, HOUR).await;
    // To be asked for does not make it younger.
    assert!(matches!(shelf.ask(1, None).await, ClaimReply::Recorded(_)));
    for (new, gone) in [(4, 1), (5, 2), (6, 3), (7, 4)] {
        assert!(matches!(shelf.ask(gone, None).await, ClaimReply::Recorded(_)), "{gone}");
        shelf.record(new, 1, HOUR).await;
        assert_eq!(shelf.0.lookup(id(gone)).await.unwrap(), None, "{gone}");
        assert_eq!((shelf.0.len(), shelf.0.bytes()), (3, 3));
    }
}

#[tokio::test(start_paused = true)]
async fn what_has_ended_goes_before_what_is_oldest() {
    let shelf = Shelf(MemoryStore::new().capacity(2).evict_oldest(true));
    shelf.record(1, 1, HOUR).await;
    shelf.record(2, 1, SECOND).await;
    tokio::time::advance(SECOND).await;
    shelf.record(3, 1, HOUR).await;
    assert!(matches!(shelf.ask(1, None).await, ClaimReply::Recorded(_)));
}

#[tokio::test(start_paused = true)]
async fn neither_what_is_in_flight_nor_what_is_held_is_evicted() {
    let shelf = Shelf(MemoryStore::new().capacity(2).evict_oldest(true));
    let running = shelf.claim(0, None).await;
    assert_eq!(shelf.claim(1, None).await.hold(HOUR).await.unwrap(), Ownership::Held);
    for _ in 0..3 {
        assert_eq!(shelf.full(2, None).await, Some(HOUR));
    }
    assert!(matches!(shelf.ask(0, None).await, ClaimReply::InFlight(_)));
    assert!(matches!(shelf.ask(1, None).await, ClaimReply::Held));
    complete(running, 1, HOUR).await;
    shelf.record(2, 1, HOUR).await;
    assert!(matches!(shelf.ask(1, None).await, ClaimReply::Held));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_evicted_for_a_scope_whose_own_share_is_full() {
    let shelf = Shelf(MemoryStore::new().capacity(3).scope_share(2).evict_oldest(true));
    for (number, scope) in [(0, "b"), (1, "a"), (2, "a")] {
        complete(shelf.claim(number, tenant(scope)).await, 1, HOUR).await;
    }
    assert_eq!(shelf.full(3, tenant("a")).await, Some(HOUR));
    assert_eq!(shelf.0.len(), 3);
    // Others take the place of the oldest.
    complete(shelf.claim(3, tenant("c")).await, 1, HOUR).await;
    assert_eq!(shelf.0.lookup(id(0)).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn as_many_records_are_evicted_as_the_bytes_take() {
    let shelf = Shelf(MemoryStore::new().stored_bytes(100).evict_oldest(true));
    let last = shelf.claim(9, None).await;
    for number in 0..4 {
        shelf.record(number, 20, HOUR).await;
    }
    complete(last, 50, HOUR).await;
    assert_eq!(shelf.0.bytes(), 130);
    drop(shelf.claim(10, None).await);
    assert_eq!((shelf.0.bytes(), shelf.0.len()), (90, 3));
    assert_eq!(shelf.0.lookup(id(1)).await.unwrap(), None);
    assert!(shelf.0.lookup(id(2)).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_retry_of_an_evicted_key_runs_again_and_its_old_handle_is_lost() {
    let store = MemoryStore::new().capacity(1).evict_oldest(true);
    let (sender, mut handles) = tokio::sync::mpsc::unbounded_channel();
    let stack = Stack::new(&layer(&store), move |run, request| {
        sender.send(request.extensions().get::<Handle>().unwrap().clone()).unwrap();
        async move { Ok(text(200, format!("run {run}"))) }
    });
    assert_eq!(stack.send(of("t", "a")).await.text(), "run 1");
    assert_eq!(stack.send(of("t", "b")).await.text(), "run 2");
    assert_eq!(stack.send(of("t", "a")).await.text(), "run 3");
    assert!(stack.send(of("t", "a")).await.is_replay());
    let old = handles.recv().await.unwrap();
    assert_eq!(old.expire().await.unwrap(), Ownership::Lost);
    assert_eq!(old.retain_for(HOUR).await.unwrap(), Ownership::Lost);
    assert!(stack.send(of("t", "a")).await.is_replay());
    assert_eq!(store.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn unless_it_is_wanted_nothing_is_evicted() {
    for store in [MemoryStore::new(), MemoryStore::new().evict_oldest(true).evict_oldest(false)] {
        let shelf = Shelf(store.capacity(1));
        shelf.record(0, 1, HOUR).await;
        assert_eq!(shelf.full(1, None).await, Some(HOUR));
    }
}

#[tokio::test(start_paused = true)]
async fn the_value_of_a_record_is_let_go_in_the_moment_it_ends() {
    for end in End::ALL {
        let (store, value) = (MemoryStore::new(), Arc::new(()));
        let asked = request(0, None);
        let ClaimReply::Mine(claim) = store.claim(asked).await.unwrap() else {
            panic!("it is mine")
        };
        let said = claim.complete(Completion::new(Arc::clone(&value), HOUR)).await.unwrap();
        assert_eq!((said, Arc::strong_count(&value)), (Ownership::Held, 2));
        end.bring(&store, &asked).await;
        assert!(store.is_empty());
        assert_eq!(Arc::strong_count(&value), 1, "{end:?}");
    }
    // By those who come later, too.
    let (store, value) = (MemoryStore::new().capacity(1).evict_oldest(true), Arc::new(()));
    for number in 0..3 {
        let ClaimReply::Mine(claim) = store.claim(request(number, None)).await.unwrap() else {
            panic!("it is mine")
        };
        assert_eq!(Arc::strong_count(&value), 1);
        let completion = Completion::new(Arc::clone(&value), HOUR);
        assert_eq!(claim.complete(completion).await.unwrap(), Ownership::Held);
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_may_use_the_store_while_it_is_let_go() {
    #[derive(Clone)]
    struct Asks(Option<MemoryStore<Asks>>, Arc<std::sync::atomic::AtomicUsize>);

    impl Drop for Asks {
        fn drop(&mut self) {
            if let Some(store) = &self.0 {
                self.1.fetch_add(store.len() + 1, std::sync::atomic::Ordering::SeqCst);
            }
        }
    }

    for end in End::ALL {
        let (store, asked) = (MemoryStore::new(), request(0, None));
        let dropped = Arc::default();
        let ClaimReply::Mine(claim) = store.claim(asked).await.unwrap() else {
            panic!("it is mine")
        };
        let value = Asks(Some(store.clone()), Arc::clone(&dropped));
        assert_eq!(claim.complete(Completion::new(value, HOUR)).await.unwrap(), Ownership::Held);
        end.bring(&store, &asked).await;
        assert!(store.is_empty());
        assert_eq!(dropped.load(std::sync::atomic::Ordering::SeqCst), 1, "{end:?}");
    }
}

// What every store promises holds with each of them.

fn suite(store: fn(usize) -> MemoryStore<String>) -> Suite<String> {
    Suite::new(move |capacity| async move { store(capacity) }, |number| format!("value {number}"))
}

#[tokio::test(start_paused = true)]
async fn with_a_budget_of_bytes_or_a_share_the_store_keeps_every_promise() {
    suite(|capacity| MemoryStore::new().capacity(capacity).stored_bytes(1_000_000)).run().await;
    suite(|capacity| MemoryStore::new().capacity(capacity).scope_share(capacity)).run().await;
}

#[tokio::test(start_paused = true)]
async fn with_eviction_the_store_keeps_every_promise_but_that_it_never_evicts() {
    suite(|capacity| MemoryStore::new().capacity(capacity).evict_oldest(true))
        .unbounded()
        .run()
        .await;
}

/// A store of which the suite sees one scope, and so its share.
struct OneScope(MemoryStore<String>);

impl Store<String> for OneScope {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        self.0.lookup(id)
    }

    fn recall(&self, id: &OperationId, exact: &[u8; 32]) -> Option<String> {
        self.0.recall(id, exact)
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<String>> {
        self.0.claim(request.in_scope(tenant("seen")))
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        self.0.withdraw(id, token)
    }

    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        self.0.expire(id, token)
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership> {
        self.0.retain(id, token, retention)
    }
}

#[tokio::test(start_paused = true)]
async fn a_share_keeps_every_promise_that_a_capacity_keeps_with_and_without_eviction() {
    for evicts in [false, true] {
        let make = move |share| async move {
            let store = MemoryStore::new().capacity(share * 10).scope_share(share);
            let store = store.evict_oldest(evicts);
            let others = Fingerprint::of(["other"]);
            for number in 0..share {
                let asked = ClaimRequest::new(id(number), others, Token::mint());
                let asked = asked.in_scope(tenant("other"));
                let ClaimReply::Mine(claim) = store.claim(asked).await.unwrap() else {
                    panic!("there is room")
                };
                let completion = Completion::new(String::new(), SECOND / 1_000);
                assert_eq!(claim.complete(completion).await.unwrap(), Ownership::Held);
            }
            OneScope(store)
        };
        Suite::new(make, |number: u8| format!("value {number}")).run().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_scope_hears_when_its_share_has_room_where_the_rest_will_be_evicted() {
    let store = MemoryStore::new().stored_bytes(100).scope_share(1).evict_oldest(true);
    let shelf = Shelf(store);
    complete(shelf.claim(1, tenant("a")).await, 10, SECOND).await;
    complete(shelf.claim(2, tenant("b")).await, 100, HOUR).await;
    // The bytes stay over the budget when the first has ended; the second then makes room.
    assert_eq!(shelf.full(3, tenant("a")).await, Some(SECOND));
    tokio::time::advance(SECOND).await;
    drop(shelf.claim(3, tenant("a")).await);
}
