//! Which entries are live, until when, and what they take: exact, and nothing of moka. In: one
//! change at a time, under the store's lock; out: what that means for the values.

use std::collections::{BTreeMap, BTreeSet, HashMap, hash_map};

use tokio::{sync::watch, time::Instant};

use crate::{
    fingerprint::Fingerprint,
    operation::{OperationId, Token},
    scope::ScopeId,
};

/// So many entries are looked at to say when there is room. It takes more of them only where the
/// bytes of few records are in the way and many small ones end before them.
const LOOK_AHEAD: usize = 1_000;

/// What the entries may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) capacity: usize,
    pub(super) stored_bytes: usize,
    pub(super) scope_share: Option<usize>,
    pub(super) evict_oldest: bool,
}

/// Hashes ids. They are SHA-256 digests, so a hash that is fast will do: all that is needed is a
/// seed that nobody outside knows, so that no choice of keys can make them collide.
pub(super) type Hashed = foldhash::fast::RandomState;

/// Every live entry, and when it ends.
pub(super) struct Table {
    pub(super) room: Room,
    pub(super) in_flight: usize,
    /// What the records take together.
    pub(super) bytes: usize,
    entries: HashMap<OperationId, Live, Hashed>,
    /// One line for each entry that ends by itself.
    deadlines: BTreeSet<(Instant, OperationId)>,
    /// The same for the entries of each scope, while shares are given.
    scopes: HashMap<ScopeId, OfScope>,
    /// The records in the order of their completion, while the oldest may be evicted.
    completed: BTreeMap<u64, OperationId>,
    completions: u64,
}

#[derive(Default)]
struct OfScope {
    entries: usize,
    deadlines: BTreeSet<(Instant, OperationId)>,
}

/// One live entry.
pub(super) struct Live {
    pub(super) token: Token,
    pub(super) fingerprint: Fingerprint,
    /// Whose share it counts to, while shares are given; boxed, for most give none.
    scope: Option<Box<ScopeId>>,
    pub(super) state: State,
}

pub(super) enum State {
    /// Dropping the sender, with the entry, wakes all who wait: no end can forget to.
    InFlight {
        ended: Option<watch::Sender<()>>,
    },
    Held {
        deadline: Instant,
    },
    /// There is a value in moka. `completion` is its place in the order of completions.
    Recorded {
        deadline: Instant,
        bytes: usize,
        completion: u64,
    },
}

impl Live {
    fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::InFlight { .. } => None,
            State::Held { deadline } | State::Recorded { deadline, .. } => Some(deadline),
        }
    }

    pub(super) fn has_ended(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }

    fn bytes(&self) -> usize {
        match self.state {
            State::InFlight { .. } | State::Held { .. } => 0,
            State::Recorded { bytes, .. } => bytes,
        }
    }

    pub(super) fn is_recorded(&self) -> bool {
        matches!(self.state, State::Recorded { .. })
    }
}

/// What a claim leaves behind, other than nothing.
pub(super) enum Left {
    Held,
    Record { bytes: usize },
}

impl Table {
    pub(super) fn new(room: Room) -> Self {
        Self {
            room,
            in_flight: 0,
            bytes: 0,
            entries: HashMap::default(),
            deadlines: BTreeSet::new(),
            scopes: HashMap::new(),
            completed: BTreeMap::new(),
            completions: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entry of `id`, which may have ended and not been cleared yet.
    pub(super) fn get_mut(&mut self, id: &OperationId) -> Option<&mut Live> {
        self.entries.get_mut(id)
    }

    /// The entry of `id`, if it still lives.
    pub(super) fn get(&self, id: &OperationId, now: Instant) -> Option<&Live> {
        self.entries.get(id).filter(|live| !live.has_ended(now))
    }

    /// Is there a record or held entry under `id` that the claim with `token` left?
    pub(super) fn was_left_by(&self, id: &OperationId, token: Token, now: Instant) -> bool {
        let live = self.get(id, now);
        live.is_some_and(|live| live.token == token && live.deadline().is_some())
    }

    /// Puts a claim under `id`, where there is nothing.
    pub(super) fn claim(
        &mut self,
        id: OperationId,
        token: Token,
        fingerprint: Fingerprint,
        scope: Option<ScopeId>,
    ) {
        let scope = scope.filter(|_| self.room.scope_share.is_some());
        if let Some(scope) = scope {
            self.scopes.entry(scope).or_default().entries += 1;
        }
        self.in_flight += 1;
        let state = State::InFlight { ended: None };
        let scope = scope.map(Box::new);
        self.entries.insert(id, Live { token, fingerprint, scope, state });
    }

    /// Turns the claim of `token` under `id` into what it left; `None` if there is no such claim.
    /// Returned is what those who wait hang on: to be dropped when the table is unlocked.
    pub(super) fn settle(
        &mut self,
        id: OperationId,
        token: Token,
        left: &Left,
        deadline: Instant,
    ) -> Option<State> {
        let live = self
            .entries
            .get_mut(&id)
            .filter(|live| live.token == token && matches!(live.state, State::InFlight { .. }))?;
        let state = match left {
            Left::Held => State::Held { deadline },
            Left::Record { bytes } => {
                let completion = self.completions;
                self.completions += 1;
                self.bytes += bytes;
                if self.room.evict_oldest {
                    self.completed.insert(completion, id);
                }
                State::Recorded { deadline, bytes: *bytes, completion }
            }
        };
        let claimed = std::mem::replace(&mut live.state, state);
        let scope = live.scope.as_deref().copied();
        self.in_flight -= 1;
        self.note_deadline(scope, deadline, id);
        Some(claimed)
    }

    /// Is there a claim of `token` under `id`, and on what?
    pub(super) fn claimed_by(&self, id: &OperationId, token: Token) -> Option<&Fingerprint> {
        let live = self.entries.get(id)?;
        let is_claimed = live.token == token && matches!(live.state, State::InFlight { .. });
        is_claimed.then_some(&live.fingerprint)
    }

    /// Gives the record or held entry under `id` another deadline.
    pub(super) fn retain(&mut self, id: OperationId, later: Instant) {
        let Some(live) = self.entries.get_mut(&id) else { return };
        let before = match &mut live.state {
            State::InFlight { .. } => return,
            State::Held { deadline } | State::Recorded { deadline, .. } => {
                std::mem::replace(deadline, later)
            }
        };
        let scope = live.scope.as_deref().copied();
        self.forget_deadline(scope, before, id);
        self.note_deadline(scope, later, id);
    }

    /// Takes an entry out, with all that is noted of it.
    pub(super) fn end(&mut self, id: &OperationId) -> Option<Live> {
        let live = self.entries.remove(id)?;
        let scope = live.scope.as_deref().copied();
        match live.state {
            State::InFlight { .. } => self.in_flight -= 1,
            State::Held { deadline } => self.forget_deadline(scope, deadline, *id),
            State::Recorded { deadline, bytes, completion } => {
                self.forget_deadline(scope, deadline, *id);
                self.bytes -= bytes;
                self.completed.remove(&completion);
            }
        }
        if let Some(scope) = scope
            && let hash_map::Entry::Occupied(mut of_scope) = self.scopes.entry(scope)
        {
            of_scope.get_mut().entries -= 1;
            if of_scope.get().entries == 0 {
                of_scope.remove();
            }
        }
        Some(live)
    }

    /// The entry that ends first, if it has ended.
    pub(super) fn first_ended(&self, now: Instant) -> Option<OperationId> {
        self.deadlines.first().filter(|(deadline, _)| *deadline <= now).map(|(_, id)| *id)
    }

    /// Any entry that is not in flight.
    pub(super) fn first_left(&self) -> Option<OperationId> {
        self.deadlines.first().map(|(_, id)| *id)
    }

    /// What keeps another entry of `scope` out, entries that have ended and are not cleared yet
    /// included.
    pub(super) fn no_room(&self, scope: Option<ScopeId>) -> Option<NoRoom> {
        let full_share = self.full_share(scope);
        if full_share.is_none() && self.has_room_for_all(self.entries.len(), self.bytes) {
            return None;
        }
        let deadlines = full_share.map_or(&self.deadlines, |(of_scope, _)| &of_scope.deadlines);
        let oldest = self.completed.first_key_value().map(|(_, oldest)| *oldest);
        Some(NoRoom {
            earliest: deadlines.first().copied(),
            evict: oldest.filter(|_| full_share.is_none()),
        })
    }

    /// The share that keeps `scope` out, if it does.
    fn full_share(&self, scope: Option<ScopeId>) -> Option<(&OfScope, usize)> {
        let share = self.room.scope_share?;
        let of_scope = self.scopes.get(&scope?)?;
        (of_scope.entries >= share).then_some((of_scope, share))
    }

    fn has_room_for_all(&self, entries: usize, bytes: usize) -> bool {
        entries < self.room.capacity && bytes < self.room.stored_bytes
    }

    /// When so much will have ended by itself that `scope` has room; or, where that takes very many
    /// ends, when it may have at the earliest. Nobody knows while it depends on what is in flight.
    pub(super) fn room_at(&self, scope: Option<ScopeId>) -> Option<Instant> {
        let in_share = match self.full_share(scope) {
            Some((of_scope, share)) => {
                let (deadline, _) = of_scope.deadlines.iter().nth(of_scope.entries - share)?;
                Some(*deadline)
            }
            None => None,
        };
        let (mut entries, mut bytes) = (self.entries.len(), self.bytes);
        if self.has_room_for_all(entries, bytes) || !self.completed.is_empty() {
            // Or it is made, once there is room in the share.
            return in_share;
        }
        let mut last = None;
        for (deadline, id) in self.deadlines.iter().take(LOOK_AHEAD) {
            last = Some(*deadline);
            entries -= 1;
            bytes -= self.entries.get(id).map_or(0, Live::bytes);
            if self.has_room_for_all(entries, bytes) {
                break;
            }
            if entries == self.in_flight {
                return None;
            }
        }
        // Nothing is earlier than something.
        last.map(|last| in_share.map_or(last, |in_share| last.max(in_share)))
    }

    fn note_deadline(&mut self, scope: Option<ScopeId>, deadline: Instant, id: OperationId) {
        self.deadlines.insert((deadline, id));
        if let Some(of_scope) = scope.and_then(|scope| self.scopes.get_mut(&scope)) {
            of_scope.deadlines.insert((deadline, id));
        }
    }

    fn forget_deadline(&mut self, scope: Option<ScopeId>, deadline: Instant, id: OperationId) {
        self.deadlines.remove(&(deadline, id));
        if let Some(of_scope) = scope.and_then(|scope| self.scopes.get_mut(&scope)) {
            of_scope.deadlines.remove(&(deadline, id));
        }
    }
}

/// Why there is no room, and what would make some.
pub(super) struct NoRoom {
    /// The entry whose end will be the first that helps.
    pub(super) earliest: Option<(Instant, OperationId)>,
    /// The record that may be evicted for it.
    pub(super) evict: Option<OperationId>,
}
