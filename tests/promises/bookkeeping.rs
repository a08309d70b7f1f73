//! Whatever is done to a store in whatever order, it counts right: entries, bytes, claims in flight
//! and what each scope has left, after every step, against a model in the plainest words.

use std::{collections::BTreeMap, time::Duration};

use proptest::prelude::*;
use tokio::time::Instant;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Scope, ScopeId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership},
};

type Claimed = Box<dyn Claim<&'static str>>;

fn id(number: usize) -> OperationId {
    OperationId::new(&Scope::new("test"), &number.to_string())
}

fn scope_of(number: Option<u8>) -> Option<ScopeId> {
    number.map(|number| ScopeId::new(&Scope::new([number])))
}

/// What may be done to a store.
#[derive(Debug, Clone)]
enum Deed {
    Claim { id: usize, asked: u8, scope: Option<u8> },
    ClaimAgain { pick: usize },
    Complete { pick: usize, bytes: usize, seconds: u64 },
    Hold { pick: usize, seconds: u64 },
    Release { pick: usize },
    Drop { pick: usize },
    Withdraw { pick: usize },
    Expire { pick: usize },
    Retain { pick: usize, seconds: u64 },
    Remove { id: usize },
    Clear,
    Pass { seconds: u64 },
}

fn deed() -> impl Strategy<Value = Deed> {
    let pick = 0..8_usize;
    let seconds = 0..6_u64;
    let scope = proptest::option::weighted(0.8, 0..3_u8);
    prop_oneof![
        12 => (0..10_usize, 0..8_u8, scope)
            .prop_map(|(id, asked, scope)| Deed::Claim { id, asked: asked / 7, scope }),
        1 => pick.clone().prop_map(|pick| Deed::ClaimAgain { pick }),
        6 => (pick.clone(), 0..60_usize, seconds.clone())
            .prop_map(|(pick, bytes, seconds)| Deed::Complete { pick, bytes, seconds }),
        2 => (pick.clone(), seconds.clone())
            .prop_map(|(pick, seconds)| Deed::Hold { pick, seconds }),
        1 => pick.clone().prop_map(|pick| Deed::Release { pick }),
        1 => pick.clone().prop_map(|pick| Deed::Drop { pick }),
        1 => pick.clone().prop_map(|pick| Deed::Withdraw { pick }),
        1 => pick.clone().prop_map(|pick| Deed::Expire { pick }),
        1 => (pick, seconds.clone()).prop_map(|(pick, seconds)| Deed::Retain { pick, seconds }),
        1 => (0..10_usize).prop_map(|id| Deed::Remove { id }),
        1 => Just(Deed::Clear),
        4 => seconds.prop_map(|seconds| Deed::Pass { seconds }),
    ]
}

/// What is set.
#[derive(Debug, Clone, Copy)]
struct Rules {
    capacity: usize,
    bytes: usize,
    share: Option<usize>,
    evicts: bool,
}

fn rules() -> impl Strategy<Value = Rules> {
    (1..8_usize, 1..150_usize, proptest::option::of(1..4_usize), proptest::bool::ANY).prop_map(
        |(capacity, bytes, share, evicts)| Rules {
            capacity,
            bytes,
            share: share.map(|share| share.min(capacity)),
            evicts,
        },
    )
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Was {
    InFlight,
    Held,
    Recorded { bytes: usize, place: usize },
}

#[derive(Debug, Clone)]
struct Entry {
    token: Token,
    asked: u8,
    scope: Option<u8>,
    was: Was,
    deadline: Option<Instant>,
}

/// The store, told in the plainest words.
#[derive(Debug, Clone)]
struct Model {
    rules: Rules,
    entries: BTreeMap<usize, Entry>,
    places: usize,
}

impl Model {
    fn pass(&mut self) {
        let now = Instant::now();
        self.entries.retain(|_, entry| entry.deadline.is_none_or(|deadline| deadline > now));
    }

    fn bytes(&self) -> usize {
        let bytes = self.entries.values().map(|entry| match entry.was {
            Was::Recorded { bytes, .. } => bytes,
            _ => 0,
        });
        bytes.sum()
    }

    fn in_flight(&self) -> usize {
        self.entries.values().filter(|entry| entry.was == Was::InFlight).count()
    }

    fn of_scope(&self, scope: u8) -> usize {
        self.entries.values().filter(|entry| entry.scope == Some(scope)).count()
    }

    fn share_is_full(&self, scope: Option<u8>) -> bool {
        scope.zip(self.rules.share).is_some_and(|(scope, share)| self.of_scope(scope) >= share)
    }

    fn has_room(&self) -> bool {
        self.entries.len() < self.rules.capacity && self.bytes() < self.rules.bytes
    }

    /// Makes room for `scope`, if it may.
    fn make_room(&mut self, scope: Option<u8>) -> bool {
        if self.share_is_full(scope) {
            return false;
        }
        while !self.has_room() {
            let oldest = self
                .entries
                .iter()
                .filter_map(|(id, entry)| match entry.was {
                    Was::Recorded { place, .. } => Some((place, *id)),
                    _ => None,
                })
                .min();
            match oldest {
                Some((_, oldest)) if self.rules.evicts => self.entries.remove(&oldest),
                _ => return false,
            };
        }
        true
    }

    /// When a claim of `scope` would be let in, if nothing else happens.
    fn room_at(&self, scope: Option<u8>) -> Option<Instant> {
        let mut deadlines: Vec<_> =
            self.entries.values().filter_map(|entry| entry.deadline).collect();
        deadlines.sort_unstable();
        deadlines.into_iter().find(|at| {
            let mut then = self.clone();
            then.entries.retain(|_, entry| entry.deadline.is_none_or(|deadline| deadline > *at));
            then.make_room(scope)
        })
    }
}

/// A claim that was given out, and may be long over.
struct Given {
    id: usize,
    request: ClaimRequest,
    asked: u8,
    scope: Option<u8>,
    claim: Option<Claimed>,
}

fn request(number: usize, scope: Option<ScopeId>) -> ClaimRequest {
    ClaimRequest::new(id(number), Fingerprint::of([[0]]), Token::mint()).in_scope(scope)
}

async fn check(rules: Rules, deeds: Vec<Deed>) -> Result<(), TestCaseError> {
    let store = MemoryStore::new()
        .capacity(rules.capacity)
        .stored_bytes(rules.bytes)
        .evict_oldest(rules.evicts);
    let store = match rules.share {
        Some(share) => store.scope_share(share),
        None => store,
    };
    let mut model = Model { rules, entries: BTreeMap::new(), places: 0 };
    let mut given: Vec<Given> = Vec::new();
    for deed in deeds {
        model.pass();
        // The youngest claims first, for those are the ones that are still running.
        let index = |given: &Vec<Given>, pick: usize| given.len().checked_sub(pick + 1);
        let is_of = |model: &Model, given: &Given| {
            model.entries.get(&given.id).is_some_and(|entry| entry.token == given.request.token)
        };
        let is_running = |model: &Model, given: &Given| {
            is_of(model, given) && model.entries[&given.id].was == Was::InFlight
        };
        let ownership = |is_held| if is_held { Ownership::Held } else { Ownership::Lost };
        let after = |seconds| Some(Instant::now() + Duration::from_secs(seconds));
        match deed {
            Deed::Claim { id: number, asked, scope } => {
                let fingerprint = Fingerprint::of([[asked]]);
                let request = ClaimRequest::new(id(number), fingerprint, Token::mint())
                    .in_scope(scope_of(scope));
                let reply = store.claim(request).await.unwrap();
                let known = model.entries.get(&number).cloned();
                match (known, reply) {
                    (Some(entry), ClaimReply::Conflict) => prop_assert_ne!(entry.asked, asked),
                    (Some(entry), reply) => {
                        prop_assert_eq!(entry.asked, asked);
                        let is_right = match entry.was {
                            Was::InFlight => matches!(reply, ClaimReply::InFlight(_)),
                            Was::Held => matches!(reply, ClaimReply::Held),
                            Was::Recorded { .. } => matches!(reply, ClaimReply::Recorded("value")),
                        };
                        prop_assert!(is_right, "{:?} {:?}", entry, reply);
                    }
                    (None, ClaimReply::Full { room_in }) => {
                        let room_at = model.room_at(scope).map(|at| at - Instant::now());
                        prop_assert_eq!(room_in, room_at);
                        prop_assert!(!model.make_room(scope));
                    }
                    (None, ClaimReply::Mine(claim)) => {
                        prop_assert!(model.make_room(scope));
                        let token = request.token;
                        let entry =
                            Entry { token, asked, scope, was: Was::InFlight, deadline: None };
                        model.entries.insert(number, entry);
                        given.push(Given { id: number, request, asked, scope, claim: Some(claim) });
                    }
                    (None, reply) => prop_assert!(false, "{:?}", reply),
                }
            }
            Deed::ClaimAgain { pick } => {
                let Some(given) = index(&given, pick).map(|index| &given[index]) else { continue };
                if is_running(&model, given) {
                    let reply = store.claim(given.request).await.unwrap();
                    let ClaimReply::Mine(again) = reply else {
                        return Err(TestCaseError::fail("it is mine already"));
                    };
                    // Either settles it; a drop would, too.
                    std::mem::forget(again);
                    prop_assert_eq!((given.asked, given.scope), {
                        let entry = &model.entries[&given.id];
                        (entry.asked, entry.scope)
                    });
                }
            }
            Deed::Complete { pick, bytes, seconds } => {
                let Some(index) = index(&given, pick) else { continue };
                let Some(claim) = given[index].claim.take() else { continue };
                let held = is_running(&model, &given[index]);
                let completion =
                    Completion::new("value", Duration::from_secs(seconds)).bytes(bytes);
                prop_assert_eq!(claim.complete(completion).await.unwrap(), ownership(held));
                if held {
                    model.places += 1;
                    let place = model.places;
                    let entry = model.entries.get_mut(&given[index].id).unwrap();
                    entry.was = Was::Recorded { bytes, place };
                    entry.deadline = after(seconds);
                }
            }
            Deed::Hold { pick, seconds } => {
                let Some(index) = index(&given, pick) else { continue };
                let Some(claim) = given[index].claim.take() else { continue };
                let held = is_running(&model, &given[index]);
                let said = claim.hold(Duration::from_secs(seconds)).await.unwrap();
                prop_assert_eq!(said, ownership(held));
                if held {
                    let entry = model.entries.get_mut(&given[index].id).unwrap();
                    entry.was = Was::Held;
                    entry.deadline = after(seconds);
                }
            }
            Deed::Release { pick } | Deed::Drop { pick } | Deed::Withdraw { pick } => {
                let Some(index) = index(&given, pick) else { continue };
                let held = is_running(&model, &given[index]);
                let said = match deed {
                    Deed::Withdraw { .. } => {
                        let ClaimRequest { id, token, .. } = given[index].request;
                        store.withdraw(id, token).await.unwrap()
                    }
                    _ => {
                        let Some(claim) = given[index].claim.take() else { continue };
                        if matches!(deed, Deed::Drop { .. }) {
                            drop(claim);
                            ownership(held)
                        } else {
                            claim.release().await.unwrap()
                        }
                    }
                };
                prop_assert_eq!(said, ownership(held));
                if held {
                    model.entries.remove(&given[index].id);
                }
            }
            Deed::Expire { pick } | Deed::Retain { pick, .. } => {
                let Some(given) = index(&given, pick).map(|index| &given[index]) else { continue };
                let held = is_of(&model, given) && !is_running(&model, given);
                let ClaimRequest { id, token, .. } = given.request;
                if let Deed::Retain { seconds, .. } = deed {
                    let said = store.retain(id, token, Duration::from_secs(seconds)).await.unwrap();
                    prop_assert_eq!(said, ownership(held));
                    if held {
                        model.entries.get_mut(&given.id).unwrap().deadline = after(seconds);
                    }
                } else {
                    prop_assert_eq!(store.expire(id, token).await.unwrap(), ownership(held));
                    if held {
                        model.entries.remove(&given.id);
                    }
                }
            }
            Deed::Remove { id: number } => {
                let was = model.entries.get(&number).map(|entry| entry.was);
                let is_there = was.is_some_and(|was| was != Was::InFlight);
                prop_assert_eq!(store.remove(&id(number)), is_there);
                if is_there {
                    model.entries.remove(&number);
                }
            }
            Deed::Clear => {
                store.clear();
                model.entries.retain(|_, entry| entry.was == Was::InFlight);
            }
            Deed::Pass { seconds } => tokio::time::advance(Duration::from_secs(seconds)).await,
        }
        model.pass();
        prop_assert_eq!(store.len(), model.entries.len());
        prop_assert_eq!(store.bytes(), model.bytes());
        prop_assert_eq!(store.in_flight(), model.in_flight());
        prop_assert!(store.len() <= rules.capacity);
        // The places that each scope has left, counted by taking them; without evicting for it.
        for scope in 0..3 {
            let (Some(share), true) = (rules.share, model.has_room()) else { continue };
            let free = share - model.of_scope(scope);
            let all = rules.capacity - model.entries.len();
            let mut taken = Vec::new();
            for number in 100..100 + free.min(all) {
                let request = request(number, scope_of(Some(scope)));
                match store.claim(request).await.unwrap() {
                    ClaimReply::Mine(claim) => taken.push(claim),
                    reply => prop_assert!(false, "a place is missing: {:?}", reply),
                }
            }
            if free < all {
                let reply = store.claim(request(99, scope_of(Some(scope)))).await.unwrap();
                let is_full = matches!(reply, ClaimReply::Full { .. });
                prop_assert!(is_full, "a place too many");
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn whatever_is_done_in_whatever_order_nothing_is_miscounted(
        rules in rules(),
        deeds in proptest::collection::vec(deed(), 1..60),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(check(rules, deeds))?;
    }
}
