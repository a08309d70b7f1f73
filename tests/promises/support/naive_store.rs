//! A small store that is easy to read and keeps every promise, and the same store with one fault.
//! Its calls work in several steps, as those over a network do, and its claims may have a lease.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{self, ThreadId},
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    task::yield_now,
    time::Instant,
};
use tower_idempotency::{
    Fingerprint, OperationId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, StoreFuture},
};

use super::{
    GENEROUS,
    faults::Fault::{self, self as F},
};

#[derive(Clone)]
pub struct NaiveStore(Arc<Shared>);

struct Shared {
    table: Mutex<Table>,
    fault: Option<Fault>,
    lease: Option<Duration>,
    made_on: ThreadId,
    in_the_window: Mutex<usize>,
    another: Condvar,
}

#[derive(Default)]
struct Table {
    capacity: usize,
    entries: HashMap<Vec<u8>, Entry>,
    /// Claims begun whose end was not seen.
    attempts: HashMap<Vec<u8>, u32>,
    /// Room that is taken or given by mistake.
    mistaken: isize,
    /// The deadlines of entries that are gone.
    old: HashMap<Vec<u8>, Instant>,
    /// Those who wait for these wait for ever.
    unheard: Vec<watch::Sender<()>>,
    last_value: String,
}

struct Entry {
    token: Token,
    fingerprint: Fingerprint,
    state: State,
    claimed: Instant,
    settled: Instant,
    retention: Duration,
    ends: Option<Instant>,
    notify: Arc<Notify>,
}

enum State {
    InFlight(watch::Sender<()>),
    Held,
    Recorded(String),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Complete,
    Release,
    Hold,
    Withdraw,
    Drop,
}

enum Left {
    Nothing,
    Held(Duration),
    Record(String, Duration),
}

/// Longer than any claim in the cases, but that of the one case that is about it.
const CLAIMS_EXPIRE_AFTER: Duration = Duration::from_millis(650);

const FOR_EVER: Duration = Duration::from_secs(1_000_000_000);

impl Entry {
    fn is_in_flight(&self) -> bool {
        matches!(self.state, State::InFlight(_))
    }

    fn has_ended(&self) -> bool {
        self.ends.is_some_and(|ends| ends <= Instant::now())
    }
}

impl NaiveStore {
    /// With a lease, a claim dropped unsettled goes on for so long, as if its process had died.
    pub fn new(capacity: usize, fault: Option<Fault>, lease: Option<Duration>) -> Self {
        Self(Arc::new(Shared {
            table: Mutex::new(Table { capacity, ..Table::default() }),
            fault,
            lease,
            made_on: thread::current().id(),
            in_the_window: Mutex::new(0),
            another: Condvar::new(),
        }))
    }

    fn is(&self, fault: Fault) -> bool {
        self.0.fault == Some(fault)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap()
    }

    fn key(&self, id: OperationId) -> Vec<u8> {
        match self.0.fault {
            Some(F::IdsAreCutShort) => id.as_bytes()[..8].to_vec(),
            Some(F::IdsAreText) => String::from_utf8_lossy(id.as_bytes()).into_owned().into(),
            _ => id.as_bytes().to_vec(),
        }
    }

    fn same(&self, one: Fingerprint, other: Fingerprint) -> bool {
        match self.0.fault {
            Some(F::FingerprintsCompareAllBytes) => one.to_bytes() == other.to_bytes(),
            Some(F::FingerprintsCompareExactBytes) => {
                one.to_bytes()[..32] == other.to_bytes()[..32]
            }
            _ => one == other,
        }
    }

    /// Answers in steps.
    fn answer<T: Send + 'static>(
        &self,
        answer: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> StoreFuture<T> {
        let store = self.clone();
        StoreFuture::new(async move {
            yield_now().await;
            let answer = answer(&store);
            yield_now().await;
            Ok(answer)
        })
    }

    fn mine(&self, request: &ClaimRequest, attempt: u32) -> ClaimReply<String> {
        ClaimReply::Mine(Box::new(NaiveClaim {
            store: self.clone(),
            id: request.id,
            token: request.token,
            attempt,
            is_settled: false,
        }))
    }

    fn clear_the_dead(&self, table: &mut Table) {
        if self.is(F::OldDeadlineStays) {
            let now = Instant::now();
            let Table { old, entries, .. } = table;
            old.retain(|key, ends| {
                let is_over = *ends <= now;
                if is_over {
                    entries.remove(key);
                }
                !is_over
            });
        }
        if self.is(F::OnlySomeOfTheDeadAreGone) {
            let dead = table.entries.iter().filter(|(_, entry)| entry.has_ended());
            let some: Vec<_> = dead.map(|(key, _)| key.clone()).take(20).collect();
            for key in some {
                table.entries.remove(&key);
            }
            // For the others the deadline is forgotten.
            table.entries.values_mut().filter(|entry| entry.has_ended()).for_each(|entry| {
                entry.ends = None;
            });
            return;
        }
        if !self.is(F::DeadTakeRoom) && !self.is(F::DeadEntryConflicts) {
            table.entries.retain(|_, entry| !entry.has_ended());
        }
    }

    /// What is there already, and the answer that it gives.
    fn there(&self, table: &mut Table, request: &ClaimRequest) -> Option<ClaimReply<String>> {
        let key = self.key(request.id);
        let attempt = table.attempts.get(&key).copied().unwrap_or(1);
        if let Some(entry) = table.entries.get(&key)
            && entry.has_ended()
        {
            if self.is(F::DeadEntryConflicts) && !self.same(entry.fingerprint, request.fingerprint)
            {
                return Some(ClaimReply::Conflict);
            }
            table.entries.remove(&key);
        }
        let last_value = table.last_value.clone();
        let entry = table.entries.get_mut(&key)?;
        let in_flight = entry.is_in_flight();
        if entry.token == request.token
            && (in_flight || self.is(F::TokenIsRecognisedForEver))
            && !self.is(F::RepetitionIsInFlight)
        {
            let more = u32::from(self.is(F::RepetitionIsAnotherAttempt));
            return Some(self.mine(request, attempt + more));
        }
        if !self.same(entry.fingerprint, request.fingerprint) {
            let is_overlooked = match entry.state {
                State::InFlight(_) => self.is(F::InFlightBeforeConflict),
                State::Held => self.is(F::HeldBeforeConflict),
                State::Recorded(_) => self.is(F::ReplaysToAnyRequest),
            };
            if !is_overlooked {
                if self.is(F::ConflictTakesTheFingerprint) {
                    entry.fingerprint = request.fingerprint;
                }
                if self.is(F::ConflictExtends) && !in_flight {
                    entry.ends = Some(Instant::now() + entry.retention);
                }
                if self.is(F::ConflictFreesTheClaim) && in_flight {
                    table.entries.remove(&key);
                }
                return Some(ClaimReply::Conflict);
            }
        }
        if self.is(F::ReplayExtends) && !in_flight {
            entry.ends = Some(Instant::now() + entry.retention);
        }
        match &mut entry.state {
            State::InFlight(_) if self.is(F::NewcomerTakesOver) => None,
            State::InFlight(ended) => {
                if self.is(F::WaitersWakeEachOther) {
                    // For the new one alone: the others take theirs being gone for the end.
                    *ended = watch::Sender::new(());
                }
                let ended = self.wait(ended, Arc::clone(&entry.notify));
                if self.is(F::RefusalFreesTheClaim) {
                    table.entries.remove(&key);
                }
                Some(ClaimReply::InFlight(ended))
            }
            State::Held => Some(ClaimReply::Held),
            State::Recorded(value) => {
                let value =
                    if self.is(F::AllRecordsShareTheValue) { last_value } else { value.clone() };
                if self.is(F::ReplayTakesTheRecord) {
                    table.entries.remove(&key);
                }
                Some(ClaimReply::Recorded(value))
            }
        }
    }

    fn wait(&self, ended: &watch::Sender<()>, notify: Arc<Notify>) -> StoreFuture<()> {
        let mut ended = ended.subscribe();
        let lease = self.0.lease;
        let by_notify = self.is(F::EndWakesOne) || self.is(F::WaitBeginsLate);
        if self.is(F::WaitEndsAtOnce) {
            return StoreFuture::ready(());
        }
        StoreFuture::new(async move {
            if by_notify {
                notify.notified().await;
                return Ok(());
            }
            let changed = ended.changed();
            let _gone = match lease {
                // A lease that is over wakes nobody: they have to look.
                Some(lease) => tokio::time::timeout(lease / 2, changed).await.is_ok(),
                None => changed.await.is_ok(),
            };
            Ok(())
        })
    }

    fn has_room(&self, table: &Table) -> bool {
        let taken = table.entries.values().filter(|entry| match entry.state {
            State::InFlight(_) => !self.is(F::ClaimsTakeNoRoom),
            State::Held => !self.is(F::HeldTakesNoRoom),
            State::Recorded(_) => !self.is(F::RecordsTakeNoRoom),
        });
        let taken = taken.count().saturating_add_signed(table.mistaken);
        taken < table.capacity || self.is(F::NothingIsTooMuch)
    }

    fn full(&self, table: &mut Table, request: &ClaimRequest) -> ClaimReply<String> {
        if self.is(F::RefusalIsWritten) {
            std::mem::forget(self.admit(table, request));
            table.mistaken -= 1;
        }
        let ends = table.entries.values().filter_map(|entry| entry.ends);
        let ends = if self.is(F::RoomComesWithTheLast) { ends.max() } else { ends.min() };
        let room_in = ends.map(|ends| ends.saturating_duration_since(Instant::now()));
        ClaimReply::Full {
            room_in: if self.is(F::RoomComesAtOnce) { Some(Duration::ZERO) } else { room_in },
        }
    }

    /// Writes the claim, over whatever is there.
    fn admit(&self, table: &mut Table, request: &ClaimRequest) -> ClaimReply<String> {
        let now = Instant::now();
        let key = self.key(request.id);
        let attempt = table.attempts.entry(key.clone()).or_default();
        *attempt += 1;
        if self.is(F::AbandonedAttemptIsForgotten) {
            *attempt = 1;
        }
        let attempt = *attempt;
        let entry = Entry {
            token: request.token,
            fingerprint: request.fingerprint,
            state: State::InFlight(watch::Sender::new(())),
            claimed: now,
            settled: now,
            retention: Duration::ZERO,
            ends: self.is(F::ClaimExpires).then(|| now + CLAIMS_EXPIRE_AFTER),
            notify: Arc::default(),
        };
        table.entries.insert(key, entry);
        self.mine(request, attempt)
    }

    async fn claim_in_steps(self, request: ClaimRequest) -> ClaimReply<String> {
        yield_now().await;
        let key = self.key(request.id);
        match self.0.fault {
            Some(F::LooksThenWrites | F::LooksThenWritesOnThreads) => {
                let there = {
                    let mut table = self.table();
                    self.clear_the_dead(&mut table);
                    self.there(&mut table, &request)
                };
                if let Some(reply) = there {
                    return reply;
                }
                if self.is(F::LooksThenWrites) {
                    yield_now().await;
                } else {
                    self.until_another_is_in_the_window();
                }
                let mut table = self.table();
                if !self.has_room(&table) {
                    return self.full(&mut table, &request);
                }
                return self.admit(&mut table, &request);
            }
            Some(F::TakesOverTheDeadInSteps) => {
                let is_dead = self.table().entries.get(&key).is_some_and(Entry::has_ended);
                if is_dead {
                    yield_now().await;
                    return self.admit(&mut self.table(), &request);
                }
            }
            Some(F::LostClaimReadsNothing) => {
                let is_lost = self.table().entries.get(&key).is_some_and(|entry| {
                    entry.token != request.token && entry.is_in_flight() && !entry.has_ended()
                });
                if is_lost {
                    yield_now().await;
                    if !self.table().entries.contains_key(&key) {
                        return self.mine(&request, 1);
                    }
                }
            }
            Some(F::CountsThenWrites) => {
                let has_room = {
                    let mut table = self.table();
                    self.clear_the_dead(&mut table);
                    self.has_room(&table)
                };
                yield_now().await;
                let mut table = self.table();
                if let Some(reply) = self.there(&mut table, &request) {
                    return reply;
                }
                if !has_room {
                    return self.full(&mut table, &request);
                }
                return self.admit(&mut table, &request);
            }
            Some(F::RoomIsTakenBeforeTheEntry) => {
                let is_new = !self.table().entries.contains_key(&key);
                if is_new {
                    self.table().mistaken += 1;
                    yield_now().await;
                    self.table().mistaken -= 1;
                }
            }
            _ => {}
        }
        let reply = self.claim_at_once(&request);
        yield_now().await;
        reply
    }

    fn claim_at_once(&self, request: &ClaimRequest) -> ClaimReply<String> {
        let mut table = self.table();
        self.clear_the_dead(&mut table);
        if self.is(F::FullBeforeAnythingElse) && !self.has_room(&table) {
            return self.full(&mut table, request);
        }
        if let Some(reply) = self.there(&mut table, request) {
            return reply;
        }
        if !self.has_room(&table) {
            let evicted = table.entries.iter().find(|(_, entry)| !entry.is_in_flight());
            match evicted.map(|(key, _)| key.clone()) {
                Some(key) if self.is(F::RecordIsEvicted) => table.entries.remove(&key),
                _ => return self.full(&mut table, request),
            };
        }
        self.admit(&mut table, request)
    }

    /// The first claim that races on a thread of its own waits here for the second.
    fn until_another_is_in_the_window(&self) {
        if thread::current().id() == self.0.made_on {
            return;
        }
        let mut came = self.0.in_the_window.lock().unwrap();
        *came += 1;
        self.0.another.notify_all();
        let alone = |came: &mut usize| *came < 2;
        drop(self.0.another.wait_timeout_while(came, GENEROUS, alone).unwrap());
    }

    fn ends_after(&self, entry: &Entry, how: How, retention: Duration) -> Instant {
        let from = match (self.0.fault, how) {
            (Some(F::RecordLivesFromTheClaim), How::Complete)
            | (Some(F::HeldLivesFromTheClaim), How::Hold) => entry.claimed,
            _ => Instant::now(),
        };
        let retention = match (self.0.fault, how) {
            (Some(F::RecordLivesForEver), How::Complete)
            | (Some(F::HeldLivesForEver), How::Hold) => FOR_EVER,
            (Some(F::ZeroIsForEver), _) if retention.is_zero() => FOR_EVER,
            (Some(F::EndlessWrapsAround), _) if retention > FOR_EVER => Duration::ZERO,
            _ => retention.min(FOR_EVER),
        };
        from + retention
    }

    fn settle(&self, id: OperationId, token: Token, how: How, left: Left) -> Ownership {
        let mut table = self.table();
        self.clear_the_dead(&mut table);
        let table = &mut *table;
        let key = self.key(id);
        let late = if self.is(F::LateSettlementSaysHeld) && how != How::Withdraw {
            Ownership::Held
        } else {
            Ownership::Lost
        };
        if how == How::Complete
            && self.is(F::CompleteNeedsNoClaim)
            && !table.entries.contains_key(&key)
        {
            let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), token);
            std::mem::forget(self.admit(table, &request));
        }
        let Some(entry) = table.entries.get_mut(&key) else {
            return match (self.0.fault, how) {
                (Some(F::WithdrawAlwaysHolds), How::Withdraw) => Ownership::Held,
                _ => late,
            };
        };
        let is_fenced = !matches!(
            (self.0.fault, how),
            (Some(F::CompleteIsUnfenced), How::Complete)
                | (Some(F::ReleaseIsUnfenced), How::Release)
                | (Some(F::HoldIsUnfenced), How::Hold)
                | (Some(F::WithdrawIsUnfenced), How::Withdraw)
                | (Some(F::DropIsUnfenced), How::Drop)
        );
        let ends_records = match self.0.fault {
            Some(F::CompletesTwice) => how == How::Complete,
            Some(F::ReleaseEndsRecords) => how == How::Release,
            Some(F::WithdrawEndsRecords) => how == How::Withdraw,
            _ => false,
        };
        if (is_fenced && entry.token != token) || (!entry.is_in_flight() && !ends_records) {
            return late;
        }
        if how == How::Withdraw && self.is(F::WithdrawDoesNothing) {
            return Ownership::Held;
        }
        let nobody_wakes = matches!(
            (self.0.fault, how),
            (Some(F::CompleteWakesNobody), How::Complete)
                | (Some(F::ReleaseWakesNobody), How::Release)
                | (Some(F::HoldWakesNobody), How::Hold)
                | (Some(F::WithdrawWakesNobody), How::Withdraw)
                | (Some(F::DropWakesNobody), How::Drop)
        );
        if self.is(F::EndWakesOne) {
            entry.notify.notify_one();
        } else {
            entry.notify.notify_waiters();
        }
        if !self.is(F::EveryClaimIsAnAttempt) {
            table.attempts.remove(&key);
        }
        if how == How::Withdraw && self.is(F::WithdrawKeepsRoom) {
            table.mistaken += 1;
        }
        let left = match (left, how) {
            (Left::Nothing, How::Release) if self.is(F::ReleaseLeavesHeld) => Left::Held(FOR_EVER),
            (Left::Held(_), _) if self.is(F::HoldReleases) => Left::Nothing,
            (left, _) => left,
        };
        let before = match left {
            Left::Nothing => table.entries.remove(&key).map(|entry| entry.state),
            Left::Held(retention) => {
                entry.ends = Some(self.ends_after(entry, how, retention));
                (entry.settled, entry.retention) = (Instant::now(), retention.min(FOR_EVER));
                Some(std::mem::replace(&mut entry.state, State::Held))
            }
            Left::Record(value, retention) => {
                table.last_value.clone_from(&value);
                entry.ends = Some(self.ends_after(entry, how, retention));
                (entry.settled, entry.retention) = (Instant::now(), retention.min(FOR_EVER));
                Some(std::mem::replace(&mut entry.state, State::Recorded(value)))
            }
        };
        if let Some(State::InFlight(ended)) = before
            && nobody_wakes
        {
            table.unheard.push(ended);
        }
        Ownership::Held
    }

    /// The entry that the claim of `token` left.
    fn left_by<'t>(
        &self,
        table: &'t mut Table,
        id: OperationId,
        token: Token,
        unfenced: Fault,
        any_state: Fault,
    ) -> Option<&'t mut Entry> {
        if !self.is(F::RetainRevives) {
            self.clear_the_dead(table);
        }
        table.entries.get_mut(&self.key(id)).filter(|entry| {
            (entry.token == token || self.is(unfenced))
                && (!entry.is_in_flight() || self.is(any_state))
                && (!entry.has_ended() || self.is(F::RetainRevives))
        })
    }

    fn expire_at_once(&self, id: OperationId, token: Token) -> Ownership {
        let mut table = self.table();
        let table = &mut *table;
        let entry = self.left_by(table, id, token, F::ExpireIsUnfenced, F::ExpireEndsClaims);
        let Some(entry) = entry else { return Ownership::Lost };
        let ends = entry.ends;
        if self.is(F::ExpireDoesNothing) {
            return Ownership::Held;
        }
        let key = self.key(id);
        if let Some(ends) = ends {
            table.old.insert(key.clone(), ends);
        }
        table.entries.remove(&key);
        if self.is(F::ExpireGivesRoomTwice) {
            table.mistaken -= 1;
        }
        Ownership::Held
    }

    fn retain_at_once(&self, id: OperationId, token: Token, retention: Duration) -> Ownership {
        let mut table = self.table();
        let entry = self.left_by(&mut table, id, token, F::RetainIsUnfenced, F::RetainEndsClaims);
        let Some(entry) = entry else { return Ownership::Lost };
        let now = Instant::now();
        let endless = retention > FOR_EVER;
        let wraps = self.is(F::EndlessRetainWrapsAround) && endless;
        let until = if wraps { now } else { self.ends_after(entry, How::Drop, retention) };
        let before = entry.ends.unwrap_or(until);
        entry.ends = Some(match self.0.fault {
            Some(F::RetainCountsFromCompletion) => entry.settled + retention.min(FOR_EVER),
            Some(F::RetainNeverLengthens) => before.min(until),
            Some(F::RetainNeverShortens) => before.max(until),
            _ => until,
        });
        entry.retention = retention.min(FOR_EVER);
        Ownership::Held
    }

    fn lookup_at_once(&self, id: OperationId) -> Option<Fingerprint> {
        let mut table = self.table();
        if !self.is(F::LookupSeesTheDead) {
            self.clear_the_dead(&mut table);
        }
        let key = self.key(id);
        if self.is(F::LookupClaims) && !table.entries.contains_key(&key) {
            let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), Token::mint());
            std::mem::forget(self.admit(&mut table, &request));
            return None;
        }
        let entry = table.entries.get_mut(&key)?;
        if entry.has_ended() && !self.is(F::LookupSeesTheDead) {
            return None;
        }
        if self.is(F::LookupMissesHeld) && matches!(entry.state, State::Held) {
            return None;
        }
        if self.is(F::LookupExtends) && !entry.is_in_flight() {
            entry.ends = Some(Instant::now() + entry.retention);
        }
        let mut bytes = entry.fingerprint.to_bytes();
        if self.is(F::LookupTellsHalf) {
            bytes.copy_within(32.., 0);
        }
        if self.is(F::LookupExpires) && !entry.is_in_flight() {
            table.entries.remove(&key);
        }
        Some(Fingerprint::from_bytes(&bytes))
    }
}

impl Store<String> for NaiveStore {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        self.answer(move |store| store.lookup_at_once(id))
    }

    fn recall(&self, id: &OperationId, exact: &[u8; 32]) -> Option<String> {
        let table = self.table();
        let entry = table.entries.get(&self.key(*id))?;
        let is_alive = !entry.has_ended() || self.is(F::RecallSeesTheDead);
        let is_asked = entry.fingerprint.exact() == exact || self.is(F::RecallComparesNothing);
        match &entry.state {
            State::Recorded(value) if is_alive && is_asked => Some(value.clone()),
            _ if self.is(F::RecallTellsTheLast) => Some(table.last_value.clone()),
            _ => None,
        }
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<String>> {
        let store = self.clone();
        StoreFuture::new(async move { Ok(store.claim_in_steps(request).await) })
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        self.answer(move |store| store.settle(id, token, How::Withdraw, Left::Nothing))
    }

    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        self.answer(move |store| store.expire_at_once(id, token))
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership> {
        self.answer(move |store| store.retain_at_once(id, token, retention))
    }
}

struct NaiveClaim {
    store: NaiveStore,
    id: OperationId,
    token: Token,
    attempt: u32,
    is_settled: bool,
}

impl NaiveClaim {
    fn settle(mut self: Box<Self>, how: How, left: Left) -> StoreFuture<Ownership> {
        StoreFuture::new(async move {
            yield_now().await;
            let (store, id, token) = (self.store.clone(), self.id, self.token);
            if store.is(F::SettlesInSteps) {
                let key = store.key(id);
                let is_ours = store
                    .table()
                    .entries
                    .get(&key)
                    .is_some_and(|entry| entry.token == token && entry.is_in_flight());
                yield_now().await;
                if is_ours {
                    let mut table = store.table();
                    let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), token);
                    if !table.entries.get(&key).is_some_and(Entry::is_in_flight) {
                        std::mem::forget(store.admit(&mut table, &request));
                    }
                }
            }
            // Dropped before this, nothing has happened yet.
            self.is_settled = true;
            if store.is(F::CompletesInSteps) && how == How::Complete {
                if store.settle(id, token, How::Release, Left::Nothing) == Ownership::Lost {
                    return Ok(Ownership::Lost);
                }
                yield_now().await;
                let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), token);
                std::mem::forget(store.admit(&mut store.table(), &request));
            }
            let said = store.settle(id, token, how, left);
            yield_now().await;
            Ok(said)
        })
    }
}

impl Claim<String> for NaiveClaim {
    fn attempt(&self) -> u32 {
        self.attempt
    }

    fn complete(self: Box<Self>, completion: Completion<String>) -> StoreFuture<Ownership> {
        let Completion { value, retention, .. } = completion;
        self.settle(How::Complete, Left::Record(value, retention))
    }

    fn release(self: Box<Self>) -> StoreFuture<Ownership> {
        self.settle(How::Release, Left::Nothing)
    }

    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        self.settle(How::Hold, Left::Held(retention))
    }
}

impl Drop for NaiveClaim {
    fn drop(&mut self) {
        if self.is_settled || self.store.is(F::DropKeepsTheClaim) {
            return;
        }
        let Some(lease) = self.store.0.lease else {
            let _said = self.store.settle(self.id, self.token, How::Drop, Left::Nothing);
            return;
        };
        let mut table = self.store.table();
        let entry = table.entries.get_mut(&self.store.key(self.id));
        if let Some(entry) = entry.filter(|it| it.token == self.token && it.is_in_flight()) {
            entry.ends = Some(Instant::now() + lease);
        }
    }
}
