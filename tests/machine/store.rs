//! Whatever is done to a store in whatever order, it says and counts what it has to: answers,
//! entries, bytes, claims in flight, who is woken, and what each scope has left.

use std::{cell::RefCell, collections::BTreeMap, fmt, pin::Pin, time::Duration};

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use tokio::runtime::Runtime;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Scope, ScopeId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, StoreFuture},
};

/// What may be done to a store. A claim is picked by its age: the youngest is 0, for those are the
/// ones that are still running.
#[derive(Debug, Clone)]
enum Deed {
    Claim {
        id: usize,
        asked: u8,
        scope: Option<u8>,
    },
    /// The same request once more, with the same token, whatever has become of it.
    ClaimAgain {
        pick: usize,
    },
    Complete {
        pick: usize,
        bytes: usize,
        seconds: u64,
    },
    Hold {
        pick: usize,
        seconds: u64,
    },
    Release {
        pick: usize,
    },
    Drop {
        pick: usize,
    },
    Withdraw {
        pick: usize,
    },
    Expire {
        pick: usize,
    },
    Retain {
        pick: usize,
        seconds: u64,
    },
    Lookup {
        id: usize,
    },
    Remove {
        id: usize,
    },
    Clear,
    Pass {
        seconds: u64,
    },
}

/// What is set.
#[derive(Debug, Clone, Copy)]
struct Rules {
    capacity: usize,
    bytes: usize,
    share: Option<usize>,
    evicts: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Was {
    InFlight,
    Held,
    Recorded { bytes: usize, place: usize },
}

#[derive(Debug, Clone)]
struct Entry {
    /// The number of its claim.
    claim: usize,
    /// No other entry has the same.
    life: usize,
    asked: u8,
    scope: Option<u8>,
    was: Was,
    deadline: Option<u64>,
}

/// A claim that was given out, and may be long over.
#[derive(Debug, Clone)]
struct Given {
    id: usize,
    asked: u8,
    scope: Option<u8>,
    /// It has not been consumed.
    is_there: bool,
}

/// What a store answers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Said {
    Nothing,
    Mine,
    Conflict,
    Recorded { by: usize },
    Held,
    InFlight,
    Full { room_in: Option<u64> },
    Owned(bool),
    Ended(bool),
    Found { asked: Option<u8> },
}

/// The store, told in the plainest words.
#[derive(Debug, Clone)]
struct Model {
    rules: Rules,
    /// In seconds.
    now: u64,
    entries: BTreeMap<usize, Entry>,
    given: Vec<Given>,
    places: usize,
    lives: usize,
    said: Said,
}

impl Model {
    fn pass(&mut self) {
        let now = self.now;
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
    fn room_at(&self, scope: Option<u8>) -> Option<u64> {
        let mut deadlines: Vec<_> =
            self.entries.values().filter_map(|entry| entry.deadline).collect();
        deadlines.sort_unstable();
        deadlines.into_iter().find(|at| {
            let mut then = self.clone();
            then.entries.retain(|_, entry| entry.deadline.is_none_or(|deadline| deadline > *at));
            then.make_room(scope)
        })
    }

    fn picked(&self, pick: usize) -> Option<usize> {
        self.given.len().checked_sub(pick + 1)
    }

    fn claim(&mut self, claim: usize, id: usize, asked: u8, scope: Option<u8>) -> Said {
        if let Some(entry) = self.entries.get(&id) {
            return match entry.was {
                Was::InFlight if entry.claim == claim => Said::Mine,
                _ if entry.asked != asked => Said::Conflict,
                Was::InFlight => Said::InFlight,
                Was::Held => Said::Held,
                Was::Recorded { .. } => Said::Recorded { by: entry.claim },
            };
        }
        let before = self.clone();
        if !self.make_room(scope) {
            let room_at = before.room_at(scope);
            *self = before;
            return Said::Full { room_in: room_at.map(|at| at - self.now) };
        }
        self.lives += 1;
        let (life, was) = (self.lives, Was::InFlight);
        self.entries.insert(id, Entry { claim, life, asked, scope, was, deadline: None });
        Said::Mine
    }

    /// Is that claim in flight?
    fn runs(&self, claim: usize) -> bool {
        let entry = self.entries.get(&self.given[claim].id);
        entry.is_some_and(|entry| entry.claim == claim && entry.was == Was::InFlight)
    }

    /// Has that claim left a record or a held entry?
    fn is_left(&self, claim: usize) -> bool {
        let entry = self.entries.get(&self.given[claim].id);
        entry.is_some_and(|entry| entry.claim == claim && entry.was != Was::InFlight)
    }

    /// Ends that claim, if it is still in flight, and leaves this, or nothing.
    fn settle(&mut self, claim: usize, left: Option<(Was, u64)>) -> Said {
        if !std::mem::take(&mut self.given[claim].is_there) {
            return Said::Nothing;
        }
        let runs = self.runs(claim);
        if runs {
            self.leave(claim, left);
        }
        Said::Owned(runs)
    }

    fn leave(&mut self, claim: usize, left: Option<(Was, u64)>) {
        let id = self.given[claim].id;
        if let Some((was, seconds)) = left {
            let entry = self.entries.get_mut(&id).unwrap();
            entry.was = was;
            entry.deadline = Some(self.now + seconds);
        } else {
            self.entries.remove(&id);
        }
    }

    fn deed(&mut self, deed: &Deed) -> Said {
        match *deed {
            Deed::Claim { id, asked, scope } => {
                let said = self.claim(self.given.len(), id, asked, scope);
                if said == Said::Mine {
                    self.given.push(Given { id, asked, scope, is_there: true });
                }
                said
            }
            Deed::Lookup { id } => {
                Said::Found { asked: self.entries.get(&id).map(|entry| entry.asked) }
            }
            Deed::Remove { id } => {
                let was = self.entries.get(&id).map(|entry| entry.was);
                let is_left = was.is_some_and(|was| was != Was::InFlight);
                if is_left {
                    self.entries.remove(&id);
                }
                Said::Ended(is_left)
            }
            Deed::Clear => {
                self.entries.retain(|_, entry| entry.was == Was::InFlight);
                Said::Nothing
            }
            Deed::Pass { seconds } => {
                self.now += seconds;
                Said::Nothing
            }
            Deed::ClaimAgain { pick }
            | Deed::Complete { pick, .. }
            | Deed::Hold { pick, .. }
            | Deed::Release { pick }
            | Deed::Drop { pick }
            | Deed::Withdraw { pick }
            | Deed::Expire { pick }
            | Deed::Retain { pick, .. } => match self.picked(pick) {
                Some(claim) => self.deed_with(claim, deed),
                None => Said::Nothing,
            },
        }
    }

    fn deed_with(&mut self, claim: usize, deed: &Deed) -> Said {
        match *deed {
            Deed::ClaimAgain { .. } => {
                let Given { id, asked, scope, .. } = self.given[claim];
                let said = self.claim(claim, id, asked, scope);
                self.given[claim].is_there |= said == Said::Mine;
                said
            }
            Deed::Complete { bytes, seconds, .. } => {
                self.places += 1;
                let was = Was::Recorded { bytes, place: self.places };
                self.settle(claim, Some((was, seconds)))
            }
            Deed::Hold { seconds, .. } => self.settle(claim, Some((Was::Held, seconds))),
            Deed::Release { .. } => self.settle(claim, None),
            Deed::Drop { .. } => {
                self.settle(claim, None);
                Said::Nothing
            }
            Deed::Withdraw { .. } => {
                let runs = self.runs(claim);
                if runs {
                    self.leave(claim, None);
                }
                Said::Owned(runs)
            }
            Deed::Expire { .. } | Deed::Retain { .. } => {
                let is_left = self.is_left(claim);
                let id = self.given[claim].id;
                match *deed {
                    Deed::Retain { seconds, .. } if is_left => {
                        let entry = self.entries.get_mut(&id).unwrap();
                        entry.deadline = Some(self.now + seconds);
                    }
                    Deed::Expire { .. } if is_left => drop(self.entries.remove(&id)),
                    _ => {}
                }
                Said::Owned(is_left)
            }
            _ => Said::Nothing,
        }
    }
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Deed;

    fn init_state() -> BoxedStrategy<Self> {
        (1..8_usize, 1..150_usize, proptest::option::of(1..4_usize), proptest::bool::ANY)
            .prop_map(|(capacity, bytes, share, evicts)| Self {
                rules: Rules { capacity, bytes, share: share.map(|s| s.min(capacity)), evicts },
                now: 0,
                entries: BTreeMap::new(),
                given: Vec::new(),
                places: 0,
                lives: 0,
                said: Said::Nothing,
            })
            .boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Deed> {
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
            1 => (0..10_usize).prop_map(|id| Deed::Lookup { id }),
            1 => (0..10_usize).prop_map(|id| Deed::Remove { id }),
            1 => Just(Deed::Clear),
            4 => seconds.prop_map(|seconds| Deed::Pass { seconds }),
        ]
        .boxed()
    }

    fn apply(mut model: Self, deed: &Deed) -> Self {
        model.pass();
        model.said = model.deed(deed);
        model.pass();
        model
    }
}

type Claimed = Box<dyn Claim<usize>>;

/// The real one. A value is the number of the claim that it was completed by.
struct Real {
    runtime: Runtime,
    store: MemoryStore<usize>,
    given: Vec<(ClaimRequest, Option<Claimed>)>,
    /// Those who wait, and for the end of which life.
    waiting: RefCell<Vec<(usize, StoreFuture<()>)>>,
}

impl fmt::Debug for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

fn id(number: usize) -> OperationId {
    OperationId::new(&Scope::new("test"), &number.to_string())
}

fn asked(number: u8) -> Fingerprint {
    Fingerprint::of([[number]])
}

fn request(number: usize, fingerprint: u8, scope: Option<u8>) -> ClaimRequest {
    let scope = scope.map(|number| ScopeId::new(&Scope::new([number])));
    ClaimRequest::new(id(number), asked(fingerprint), Token::mint()).in_scope(scope)
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn owned(ownership: Ownership) -> Said {
    Said::Owned(ownership == Ownership::Held)
}

impl Real {
    async fn claim(&mut self, request: ClaimRequest, claim: usize, model: &Model) -> Said {
        match self.store.claim(request).await.unwrap() {
            ClaimReply::Mine(mine) => {
                if claim == self.given.len() {
                    self.given.push((request, Some(mine)));
                } else {
                    // Either settles it. The other is not dropped, for that would settle it, too.
                    let before = self.given[claim].1.replace(mine);
                    std::mem::forget(before);
                }
                Said::Mine
            }
            ClaimReply::Conflict => Said::Conflict,
            ClaimReply::Recorded(by) => Said::Recorded { by },
            ClaimReply::Held => Said::Held,
            ClaimReply::InFlight(ended) => {
                let lives = model.entries.values().find(|entry| id_of(entry, model) == request.id);
                self.waiting.borrow_mut().push((lives.expect("it is there").life, ended));
                Said::InFlight
            }
            ClaimReply::Full { room_in } => {
                let room_in = room_in.map(|room_in| room_in.as_secs());
                Said::Full { room_in }
            }
            reply => panic!("what is {reply:?}?"),
        }
    }

    async fn deed(&mut self, deed: Deed, model: &Model) -> Said {
        let store = self.store.clone();
        let pick = match deed {
            Deed::Claim { id, asked, scope } => {
                return self.claim(request(id, asked, scope), self.given.len(), model).await;
            }
            Deed::Lookup { id: number } => {
                let found = store.lookup(id(number)).await.unwrap();
                let which = found.map(|found| (0..2).find(|which| found == asked(*which)).unwrap());
                return Said::Found { asked: which };
            }
            Deed::Remove { id: number } => return Said::Ended(store.remove(&id(number))),
            Deed::Clear => {
                store.clear();
                return Said::Nothing;
            }
            Deed::Pass { seconds: passed } => {
                tokio::time::advance(seconds(passed)).await;
                return Said::Nothing;
            }
            Deed::ClaimAgain { pick }
            | Deed::Complete { pick, .. }
            | Deed::Hold { pick, .. }
            | Deed::Release { pick }
            | Deed::Drop { pick }
            | Deed::Withdraw { pick }
            | Deed::Expire { pick }
            | Deed::Retain { pick, .. } => pick,
        };
        let Some(number) = self.given.len().checked_sub(pick + 1) else { return Said::Nothing };
        let (request, claim) = &mut self.given[number];
        let ClaimRequest { id, token, .. } = *request;
        match deed {
            Deed::ClaimAgain { .. } => {
                let request = *request;
                return self.claim(request, number, model).await;
            }
            Deed::Withdraw { .. } => return owned(store.withdraw(id, token).await.unwrap()),
            Deed::Expire { .. } => return owned(store.expire(id, token).await.unwrap()),
            Deed::Retain { seconds: retention, .. } => {
                return owned(store.retain(id, token, seconds(retention)).await.unwrap());
            }
            _ => {}
        }
        let Some(claim) = claim.take() else { return Said::Nothing };
        match deed {
            Deed::Complete { bytes, seconds: retention, .. } => {
                let completion = Completion::new(number, seconds(retention)).bytes(bytes);
                owned(claim.complete(completion).await.unwrap())
            }
            Deed::Hold { seconds: retention, .. } => {
                owned(claim.hold(seconds(retention)).await.unwrap())
            }
            Deed::Release { .. } => owned(claim.release().await.unwrap()),
            _ => {
                drop(claim);
                Said::Nothing
            }
        }
    }
}

fn id_of(entry: &Entry, model: &Model) -> OperationId {
    id(model.given[entry.claim].id)
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Real;
    type Reference = Model;

    fn init_test(model: &Model) -> Real {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let Rules { capacity, bytes, share, evicts } = model.rules;
        let store = MemoryStore::new().capacity(capacity).stored_bytes(bytes).evict_oldest(evicts);
        let store = match share {
            Some(share) => store.scope_share(share),
            None => store,
        };
        Real { runtime, store, given: Vec::new(), waiting: RefCell::default() }
    }

    fn apply(mut real: Real, model: &Model, deed: Deed) -> Real {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let runtime = std::mem::replace(&mut real.runtime, runtime);
        let said = runtime.block_on(real.deed(deed.clone(), model));
        real.runtime = runtime;
        assert_eq!(said, model.said, "{deed:?}");
        real
    }

    fn check_invariants(real: &Real, model: &Model) {
        let _clock = real.runtime.enter();
        let store = &real.store;
        assert_eq!(store.len(), model.entries.len());
        assert_eq!(store.bytes(), model.bytes());
        assert_eq!(store.in_flight(), model.in_flight());
        assert!(store.len() <= model.rules.capacity);

        // Who waits is woken by the end, and not before.
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        real.waiting.borrow_mut().retain_mut(|(life, ended)| {
            let has_ended = !model
                .entries
                .values()
                .any(|entry| entry.life == *life && entry.was == Was::InFlight);
            assert_eq!(Future::poll(Pin::new(ended), &mut context).is_ready(), has_ended);
            !has_ended
        });

        // The places that each scope has left, counted by taking them; without evicting for it.
        for scope in 0..3 {
            let (Some(share), true) = (model.rules.share, model.has_room()) else { continue };
            let free = share - model.of_scope(scope);
            let all = model.rules.capacity - model.entries.len();
            let mut claim = |number| {
                let mut reply = store.claim(request(number, 0, Some(scope)));
                match Future::poll(Pin::new(&mut reply), &mut context) {
                    std::task::Poll::Ready(reply) => reply.unwrap(),
                    std::task::Poll::Pending => panic!("it has to answer at once"),
                }
            };
            let claims: Vec<_> = (100..100 + free.min(all)).map(&mut claim).collect();
            let all_mine = claims.iter().all(|reply| matches!(reply, ClaimReply::Mine(_)));
            assert!(all_mine, "a place is missing: {claims:?}");
            let is_full = free >= all || matches!(claim(99), ClaimReply::Full { .. });
            assert!(is_full, "a place too many");
        }
    }
}

prop_state_machine! {
    #![proptest_config(super::config())]

    #[test]
    fn whatever_is_done_in_whatever_order_the_store_says_and_counts_what_the_model_does(
        sequential 1..60 => Machine
    );
}
