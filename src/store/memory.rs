//! The in-process store. In: claims and settlements; out: exact answers from one lock. moka holds
//! the finished values; which ids are live, and until when, is decided here alone.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use moka::{Expiry, sync::Cache};
use tokio::{sync::watch, time::Instant};

use super::{Claim, ClaimReply, ClaimRequest, Ownership, Store, StoreFuture};
use crate::{
    fingerprint::Fingerprint,
    operation::{OperationId, Token},
};

/// The most live entries a store holds unless told otherwise.
const CAPACITY: usize = 1_000;

/// moka keeps a value this much longer than its entry lives, so that its own clock, which is
/// coarse and does not follow tokio's, never ends a record before we do.
const BACKSTOP: Duration = Duration::from_secs(60);

/// Far enough to mean "for ever", near enough for every clock to add it.
const FOR_EVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// At most so many dead entries are cleared by one claim. Each claim adds one at most, so dead
/// entries never pile up, and none pays for all.
const SWEEP_BATCH: usize = 64;

/// Keeps entries in this process; when it ends they are forgotten.
///
/// Clones share everything. At most [`capacity`](MemoryStore::capacity) entries are live at once:
/// a claim over that is refused and nothing live is dropped. So plan for keyed requests per second
/// × retention.
///
/// The clock is tokio's, which tests may pause. Nothing runs in the background: entries that have
/// ended are cleared by later calls, and count no more from the moment they end.
pub struct MemoryStore<V> {
    shared: Arc<Shared<V>>,
}

struct Shared<V> {
    table: Mutex<Table>,
    /// The values of the entries that are [`State::Recorded`]. Written only with the table locked.
    records: Cache<OperationId, Kept<V>>,
}

/// Every live entry, and when it ends.
struct Table {
    capacity: usize,
    in_flight: usize,
    entries: HashMap<OperationId, Live>,
    /// One line for each entry that ends by itself.
    deadlines: BTreeSet<(Instant, OperationId)>,
}

struct Live {
    token: Token,
    fingerprint: Fingerprint,
    state: State,
}

enum State {
    /// Dropping the sender, with the entry, wakes all who wait: no end can forget to.
    InFlight {
        ended: Option<watch::Sender<()>>,
    },
    Held {
        deadline: Instant,
    },
    Recorded {
        deadline: Instant,
    },
}

impl Live {
    fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::InFlight { .. } => None,
            State::Held { deadline } | State::Recorded { deadline } => Some(deadline),
        }
    }

    fn has_ended(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }
}

/// A value in moka, with the time that moka may keep it.
#[derive(Clone)]
struct Kept<V> {
    value: V,
    keep_for: Duration,
}

struct KeepFor;

impl<V> Expiry<OperationId, Kept<V>> for KeepFor {
    fn expire_after_create(
        &self,
        _: &OperationId,
        kept: &Kept<V>,
        _: std::time::Instant,
    ) -> Option<Duration> {
        Some(kept.keep_for)
    }

    fn expire_after_update(
        &self,
        _: &OperationId,
        kept: &Kept<V>,
        _: std::time::Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(kept.keep_for)
    }
}

impl<V: Clone + Send + Sync + 'static> MemoryStore<V> {
    /// An empty store with room for 1,000 live entries.
    #[must_use]
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                table: Mutex::new(Table {
                    capacity: CAPACITY,
                    in_flight: 0,
                    entries: HashMap::new(),
                    deadlines: BTreeSet::new(),
                }),
                records: Cache::builder().expire_after(KeepFor).build(),
            }),
        }
    }

    /// The most entries that may be live at once, of all scopes together: in flight, held, records
    /// and tombstones. Default: 1,000. Clones share it.
    ///
    /// # Panics
    ///
    /// If `entries` is zero.
    #[must_use]
    #[track_caller]
    pub fn capacity(self, entries: usize) -> Self {
        assert!(entries > 0, "capacity: a store needs room for at least 1 entry");
        self.shared.table().capacity = entries;
        self
    }

    /// How many entries are live now.
    #[must_use]
    pub fn len(&self) -> usize {
        let mut table = self.shared.table();
        self.shared.sweep(&mut table, Instant::now(), usize::MAX);
        table.entries.len()
    }

    /// Is no entry live?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many of the live entries are claims in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.table().in_flight
    }

    /// The most entries that may be live at once.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.shared.table().capacity
    }

    /// Ends the record, tombstone or held entry of `id`, as an operator would after looking into
    /// it. A claim in flight is left alone, for its execution is still running. Says whether there
    /// was something to end.
    #[allow(clippy::must_use_candidate, reason = "whether it was there may not matter")]
    pub fn remove(&self, id: &OperationId) -> bool {
        let mut table = self.shared.table();
        let now = Instant::now();
        match table.entries.get(id) {
            Some(live) if live.deadline().is_some_and(|deadline| deadline > now) => {
                self.shared.end(&mut table, id);
                true
            }
            _ => false,
        }
    }

    /// Ends every record, tombstone and held entry. Claims in flight are left alone.
    pub fn clear(&self) {
        let mut table = self.shared.table();
        while let Some((_, id)) = table.deadlines.first().copied() {
            self.shared.end(&mut table, &id);
        }
    }
}

impl<V> Shared<V> {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing of ours panics with the table half changed, so a poisoned lock is a sound one.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V: Clone + Send + Sync + 'static> Shared<V> {
    /// Ends one entry: its slot, its line among the deadlines and its value. Returned is what those
    /// who wait for it hang on: to be dropped when the table is unlocked.
    fn end(&self, table: &mut Table, id: &OperationId) -> Option<Live> {
        let live = table.entries.remove(id)?;
        match live.state {
            State::InFlight { .. } => table.in_flight -= 1,
            State::Held { deadline } => {
                table.deadlines.remove(&(deadline, *id));
            }
            State::Recorded { deadline } => {
                table.deadlines.remove(&(deadline, *id));
                self.records.invalidate(id);
            }
        }
        Some(live)
    }

    /// Clears up to `most` entries whose deadline has passed.
    fn sweep(&self, table: &mut Table, now: Instant, most: usize) {
        for _ in 0..most {
            match table.deadlines.first().copied() {
                Some((deadline, id)) if deadline <= now => drop(self.end(table, &id)),
                _ => break,
            }
        }
    }

    /// The entry that the claim with `token` left, if it still lives.
    fn left_by<'t>(
        table: &'t mut Table,
        id: &OperationId,
        token: Token,
        now: Instant,
    ) -> Option<&'t mut Live> {
        table.entries.get_mut(id).filter(|live| {
            live.token == token && live.deadline().is_some_and(|deadline| deadline > now)
        })
    }

    fn claim(self: &Arc<Self>, request: ClaimRequest) -> ClaimReply<V> {
        let ClaimRequest { id, fingerprint, token } = request;
        let mut table = self.table();
        let table = &mut *table;
        let now = Instant::now();
        self.sweep(table, now, SWEEP_BATCH);

        if let Some(live) = table.entries.get_mut(&id) {
            let matches = live.fingerprint == fingerprint;
            let has_ended = live.has_ended(now);
            match &mut live.state {
                _ if has_ended => {}
                State::InFlight { .. } if live.token == token => {
                    return ClaimReply::Mine(Box::new(MemoryClaim::new(self, id, token)));
                }
                State::InFlight { .. } | State::Held { .. } if !matches => {
                    return ClaimReply::Conflict;
                }
                State::InFlight { ended } => {
                    let ended = ended.get_or_insert_with(|| watch::Sender::new(()));
                    let mut ended = ended.subscribe();
                    return ClaimReply::InFlight(StoreFuture::new(async move {
                        // An error is the sender gone: the very end that is waited for.
                        let _gone = ended.changed().await;
                        Ok(())
                    }));
                }
                State::Held { .. } => return ClaimReply::Held,
                State::Recorded { .. } => match self.records.get(&id) {
                    Some(_) if !matches => return ClaimReply::Conflict,
                    Some(kept) => return ClaimReply::Recorded(kept.value),
                    // A slot without its value is an entry that has ended.
                    None => {}
                },
            }
            self.end(table, &id);
        }

        if table.entries.len() >= table.capacity {
            let earliest = table.deadlines.first();
            return ClaimReply::Full {
                room_in: earliest.map(|(deadline, _)| deadline.saturating_duration_since(now)),
            };
        }
        table.in_flight += 1;
        table
            .entries
            .insert(id, Live { token, fingerprint, state: State::InFlight { ended: None } });
        ClaimReply::Mine(Box::new(MemoryClaim::new(self, id, token)))
    }

    /// Ends the claim of `token` on `id` and puts `state` in its place, or nothing.
    fn settle(&self, id: OperationId, token: Token, left: Left<V>) -> Ownership {
        let mut table = self.table();
        let Entry::Occupied(mut entry) = table.entries.entry(id) else { return Ownership::Lost };
        if entry.get().token != token || !matches!(entry.get().state, State::InFlight { .. }) {
            return Ownership::Lost;
        }
        let (state, deadline) = match left {
            Left::Nothing => {
                let ended = self.end(&mut table, &id);
                // Those who wait wake when nothing is locked any more; so below.
                drop(table);
                drop(ended);
                return Ownership::Held;
            }
            Left::Held(retention) => {
                let deadline = deadline_after(retention);
                (State::Held { deadline }, deadline)
            }
            Left::Record(value, retention) => {
                let deadline = deadline_after(retention);
                // The value first: an entry that says "recorded" always has one behind it.
                self.records.insert(id, Kept { value, keep_for: keep_for(retention) });
                (State::Recorded { deadline }, deadline)
            }
        };
        let claimed = std::mem::replace(&mut entry.get_mut().state, state);
        table.in_flight -= 1;
        table.deadlines.insert((deadline, id));
        drop(table);
        drop(claimed);
        Ownership::Held
    }

    fn expire(&self, id: OperationId, token: Token) -> Ownership {
        let mut table = self.table();
        if Self::left_by(&mut table, &id, token, Instant::now()).is_none() {
            return Ownership::Lost;
        }
        self.end(&mut table, &id);
        Ownership::Held
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> Ownership {
        let mut table = self.table();
        let Some(live) = Self::left_by(&mut table, &id, token, Instant::now()) else {
            return Ownership::Lost;
        };
        let later = deadline_after(retention);
        let (State::Held { deadline } | State::Recorded { deadline }) = &mut live.state else {
            return Ownership::Lost;
        };
        let before = std::mem::replace(deadline, later);
        let recorded = matches!(live.state, State::Recorded { .. });
        table.deadlines.remove(&(before, id));
        table.deadlines.insert((later, id));
        if recorded && let Some(kept) = self.records.get(&id) {
            self.records.insert(id, Kept { keep_for: keep_for(retention), ..kept });
        }
        Ownership::Held
    }
}

/// What a claim leaves behind when it ends.
enum Left<V> {
    Nothing,
    Held(Duration),
    Record(V, Duration),
}

fn deadline_after(retention: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(retention.min(FOR_EVER)).unwrap_or(now)
}

fn keep_for(retention: Duration) -> Duration {
    retention.min(FOR_EVER) + BACKSTOP
}

impl<V: Clone + Send + Sync + 'static> Store<V> for MemoryStore<V> {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        let table = self.shared.table();
        let now = Instant::now();
        let live = table.entries.get(&id).filter(|live| !live.has_ended(now));
        StoreFuture::ready(live.map(|live| live.fingerprint))
    }

    fn lookup_is_cheap(&self) -> bool {
        true
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<V>> {
        StoreFuture::ready(self.shared.claim(request))
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        StoreFuture::ready(self.shared.settle(id, token, Left::Nothing))
    }

    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        StoreFuture::ready(self.shared.expire(id, token))
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership> {
        StoreFuture::ready(self.shared.retain(id, token, retention))
    }
}

impl<V> Clone for MemoryStore<V> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<V: Clone + Send + Sync + 'static> Default for MemoryStore<V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<V> fmt::Debug for MemoryStore<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.shared.table();
        f.debug_struct("MemoryStore")
            .field("capacity", &table.capacity)
            .field("entries", &table.entries.len())
            .field("in_flight", &table.in_flight)
            .finish_non_exhaustive()
    }
}

/// A claim in this process. Dropped unsettled, it is released: its owner is gone, and here nobody
/// else could ever end it.
struct MemoryClaim<V: Clone + Send + Sync + 'static> {
    shared: Option<Arc<Shared<V>>>,
    id: OperationId,
    token: Token,
}

impl<V: Clone + Send + Sync + 'static> MemoryClaim<V> {
    fn new(shared: &Arc<Shared<V>>, id: OperationId, token: Token) -> Self {
        Self { shared: Some(Arc::clone(shared)), id, token }
    }

    fn settle(&mut self, left: Left<V>) -> StoreFuture<Ownership> {
        StoreFuture::ready(match self.shared.take() {
            Some(shared) => shared.settle(self.id, self.token, left),
            None => Ownership::Lost,
        })
    }
}

impl<V: Clone + Send + Sync + 'static> Claim<V> for MemoryClaim<V> {
    fn attempt(&self) -> u32 {
        1
    }

    fn complete(mut self: Box<Self>, value: V, retention: Duration) -> StoreFuture<Ownership> {
        self.settle(Left::Record(value, retention))
    }

    fn release(mut self: Box<Self>) -> StoreFuture<Ownership> {
        self.settle(Left::Nothing)
    }

    fn hold(mut self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        self.settle(Left::Held(retention))
    }
}

impl<V: Clone + Send + Sync + 'static> Drop for MemoryClaim<V> {
    fn drop(&mut self) {
        let _unsettled = self.settle(Left::Nothing);
    }
}
