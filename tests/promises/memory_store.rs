//! What the in-memory store lets an operator see and do, beyond what every store promises.

use std::{sync::Arc, time::Duration};

use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Scope, ScopeId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership},
};

const HOUR: Duration = Duration::from_secs(3_600);

fn id(number: usize) -> OperationId {
    OperationId::new(&Scope::new("test"), &number.to_string())
}

async fn claim<V: Clone + Send + Sync + 'static>(
    store: &MemoryStore<V>,
    number: usize,
) -> ClaimReply<V> {
    let request = ClaimRequest::new(id(number), Fingerprint::of(["asked"]), Token::mint());
    store.claim(request).await.unwrap()
}

async fn own<V: Clone + Send + Sync + 'static>(
    store: &MemoryStore<V>,
    number: usize,
) -> Box<dyn Claim<V>> {
    match claim(store, number).await {
        ClaimReply::Mine(claim) => claim,
        reply => panic!("{reply:?}"),
    }
}

/// One entry in flight, one held, one recorded.
async fn one_of_each(store: &MemoryStore<&'static str>) -> Box<dyn Claim<&'static str>> {
    let in_flight = own(store, 0).await;
    assert_eq!(own(store, 1).await.hold(HOUR).await.unwrap(), Ownership::Held);
    assert_eq!(
        own(store, 2).await.complete(Completion::new("value", HOUR)).await.unwrap(),
        Ownership::Held
    );
    in_flight
}

#[tokio::test(start_paused = true)]
async fn the_live_entries_are_counted_and_the_claims_among_them() {
    let store = MemoryStore::new();
    assert!(store.is_empty());
    let in_flight = one_of_each(&store).await;
    assert_eq!((store.len(), store.in_flight(), store.is_empty()), (3, 1, false));
    drop(in_flight);
    assert_eq!((store.len(), store.in_flight()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn it_recalls_a_live_record_of_the_very_same_bytes_and_nothing_else() {
    let store = MemoryStore::new();
    let asked = Fingerprint::of(["asked"]);
    // The same meaning, spelt in other bytes.
    let mut bytes = asked.to_bytes();
    bytes[0] ^= 1;
    let respelt = Fingerprint::from_bytes(&bytes);
    assert_eq!(asked, respelt);
    let _in_flight = one_of_each(&store).await;
    for number in 0..4 {
        let recorded = (number == 2).then_some("value");
        assert_eq!(store.recall(&id(number), asked.exact()), recorded, "{number}");
        assert_eq!(store.recall(&id(number), respelt.exact()), None, "{number}");
    }
    assert_eq!((store.len(), store.in_flight()), (3, 1));
    tokio::time::advance(HOUR).await;
    assert_eq!(store.recall(&id(2), asked.exact()), None);
}

#[tokio::test(start_paused = true)]
async fn entries_that_have_ended_are_not_counted_even_if_nobody_came_since() {
    let store = MemoryStore::new();
    let _in_flight = one_of_each(&store).await;
    tokio::time::advance(HOUR).await;
    assert_eq!((store.len(), store.in_flight()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_operator_ends_what_is_settled_but_not_what_is_running() {
    let store = MemoryStore::new();
    let in_flight = one_of_each(&store).await;
    assert!(!store.remove(&id(0)));
    assert!(store.remove(&id(1)));
    assert!(store.remove(&id(2)));
    assert!(!store.remove(&id(2)), "it is gone");
    assert!(!store.remove(&id(3)), "it never was");
    assert_eq!(store.len(), 1);
    assert!(matches!(claim(&store, 1).await, ClaimReply::Mine(_)));
    assert!(matches!(claim(&store, 2).await, ClaimReply::Mine(_)));
    assert_eq!(in_flight.release().await.unwrap(), Ownership::Held);
}

#[tokio::test(start_paused = true)]
async fn what_has_expired_cannot_be_removed() {
    let store = MemoryStore::new();
    let _in_flight = one_of_each(&store).await;
    tokio::time::advance(HOUR).await;
    assert!(!store.remove(&id(1)));
    assert!(!store.remove(&id(2)));
}

#[tokio::test(start_paused = true)]
async fn clearing_ends_all_that_is_settled_and_nothing_that_is_running() {
    let store = MemoryStore::new();
    let in_flight = one_of_each(&store).await;
    store.clear();
    assert_eq!((store.len(), store.in_flight()), (1, 1));
    assert!(matches!(claim(&store, 0).await, ClaimReply::InFlight(_)));
    assert!(matches!(claim(&store, 1).await, ClaimReply::Mine(_)));
    assert!(matches!(claim(&store, 2).await, ClaimReply::Mine(_)));
    assert_eq!(in_flight.release().await.unwrap(), Ownership::Held);
}

#[tokio::test(start_paused = true)]
async fn clones_are_the_same_store() {
    let store = MemoryStore::new();
    let clone = store.clone().capacity(1);
    assert_eq!(store.max_len(), 1);
    let _in_flight: Box<dyn Claim<u8>> = own(&store, 0).await;
    assert!(matches!(claim(&clone, 0).await, ClaimReply::InFlight(_)));
    assert!(matches!(claim(&clone, 1).await, ClaimReply::Full { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_entries_fit_unless_told_otherwise() {
    let store = MemoryStore::new();
    for number in 0..1_000 {
        assert_eq!(
            own(&store, number).await.complete(Completion::new((), HOUR)).await.unwrap(),
            Ownership::Held
        );
    }
    let ClaimReply::Full { room_in } = claim(&store, 1_000).await else { panic!("it fits") };
    assert_eq!(room_in, Some(HOUR));
}

#[tokio::test(start_paused = true)]
async fn the_value_of_a_record_that_has_ended_is_let_go() {
    let store = MemoryStore::new();
    let value = Arc::new(());
    for round in 0..20 {
        // Other ids each time, so that no value is overwritten by a later one.
        let ids = round * 100..(round + 1) * 100;
        for number in ids.clone() {
            let claim = own(&store, number).await;
            let said = claim.complete(Completion::new(Arc::clone(&value), HOUR)).await.unwrap();
            assert_eq!(said, Ownership::Held);
        }
        match round % 3 {
            0 => tokio::time::advance(HOUR).await,
            1 => store.clear(),
            _ => ids.for_each(|number| assert!(store.remove(&id(number)))),
        }
        assert!(store.is_empty());
    }
    // moka frees what it has removed a little later, so some of 2,000 may be left.
    let held = Arc::strong_count(&value) - 1;
    assert!(held < 1_000, "{held} values are held");
}

/// So many that no claim clears them all.
const MANY: usize = 300;

#[tokio::test(start_paused = true)]
async fn what_has_ended_is_new_work_however_many_have_ended_before_it() {
    let store = MemoryStore::new();
    for number in 0..MANY {
        let retention = HOUR + Duration::from_secs(number as u64);
        let claim = own(&store, number).await;
        if number % 2 == 0 {
            assert_eq!(claim.hold(retention).await.unwrap(), Ownership::Held);
        } else {
            let completion = Completion::new("value", retention);
            assert_eq!(claim.complete(completion).await.unwrap(), Ownership::Held);
        }
    }
    tokio::time::advance(2 * HOUR).await;
    let _last = [own(&store, MANY - 1).await, own(&store, MANY - 2).await];
    assert_eq!((store.len(), store.in_flight()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_share_has_room_however_much_of_others_has_ended_before_its_own() {
    let store = MemoryStore::new().scope_share(MANY);
    let fill = async |tenant: &str, entries: usize, retention: Duration| {
        let scope = Scope::new(tenant);
        for number in 0..entries {
            let id = OperationId::new(&scope, &number.to_string());
            let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), Token::mint());
            let request = request.in_scope(Some(ScopeId::new(&scope)));
            let ClaimReply::Mine(claim) = store.claim(request).await.unwrap() else {
                panic!("{tenant} has no room for {number}");
            };
            let completion = Completion::new("value", retention);
            assert_eq!(claim.complete(completion).await.unwrap(), Ownership::Held);
        }
    };
    fill("one", MANY, HOUR).await;
    fill("other", MANY, 2 * HOUR).await;
    tokio::time::advance(3 * HOUR).await;
    let scope = Scope::new("other");
    let id = OperationId::new(&scope, "one more");
    let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), Token::mint());
    let reply = store.claim(request.in_scope(Some(ScopeId::new(&scope)))).await.unwrap();
    assert!(matches!(reply, ClaimReply::Mine(_)), "{reply:?}");
}
