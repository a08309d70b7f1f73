//! The in-process store. In: claims and settlements; out: exact answers from one lock. moka holds
//! the finished values; which ids are live, and until when, is decided here alone.

use std::{fmt, sync::Arc, time::Duration};

use moka::sync::Cache;
use tokio::{sync::watch, time::Instant};

use super::{ClaimReply, ClaimRequest, Completion, Ownership, Store, StoreFuture};
use crate::{
    fingerprint::Fingerprint,
    notice,
    operation::{OperationId, Token},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

mod claim;
mod kept;
mod table;

use claim::MemoryClaim;
use kept::{KeepFor, Kept, deadline_after};
use table::{Hashed, Left, Live, NoRoom, Room, State, Table};

/// The most live entries a store holds unless told otherwise.
const CAPACITY: usize = 1_000;

/// The most bytes that records keep together unless told otherwise.
const STORED_BYTES: usize = 256 * 1024 * 1024;

/// At most so many dead entries are cleared by one claim. Each claim adds one at most, so dead
/// entries never pile up, and none pays for all.
const SWEEP_BATCH: usize = 64;

/// Keeps entries in this process; when it ends they are forgotten.
///
/// Clones share everything. At most [`capacity`](MemoryStore::capacity) entries are live at once:
/// a claim over that is refused and nothing live is dropped. So plan for keyed requests per second
/// × retention.
///
/// Values are cloned and dropped with the store locked: their `Clone` and `Drop` must not call the
/// store, and had better be cheap, as an `Arc`'s are.
///
/// The clock is tokio's, which tests may pause. Nothing runs in the background: entries that have
/// ended are cleared by later calls, and count no more from the moment they end.
pub struct MemoryStore<V> {
    shared: Arc<Shared<V>>,
}

struct Shared<V> {
    table: Mutex<Table>,
    /// The values of the entries that are [`State::Recorded`]. Written only with the table locked.
    records: Cache<OperationId, Kept<V>, Hashed>,
    /// Is there a share of each scope? Asked for every request, so not of the table.
    counts_scopes: AtomicBool,
    /// Has it been said that it is filling up? It is said once.
    warned: AtomicBool,
}

/// What has ended: its value, and what those who wait hang on. Dropped when the table is unlocked,
/// for either may run code that is not ours. So it is made before the table is locked.
type Gone<V> = Vec<(Live, Option<V>)>;

impl<V: Clone + Send + Sync + 'static> MemoryStore<V> {
    /// An empty store with room for 1,000 live entries.
    #[must_use]
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                table: Mutex::new(Table::new(Room {
                    capacity: CAPACITY,
                    stored_bytes: STORED_BYTES,
                    scope_share: None,
                    evict_oldest: false,
                })),
                records: Cache::builder()
                    .expire_after(KeepFor)
                    .build_with_hasher(Hashed::default()),
                counts_scopes: AtomicBool::new(false),
                warned: AtomicBool::new(false),
            }),
        }
    }

    /// The most entries that may be live at once, of all scopes together: in flight, held, records
    /// and tombstones. Default: 1,000. Clones share it.
    ///
    /// # Panics
    ///
    /// If `entries` is zero, or less than the [share](Self::scope_share) of a scope.
    #[must_use]
    #[track_caller]
    pub fn capacity(self, entries: usize) -> Self {
        assert!(entries > 0, "capacity: a store needs room for at least 1 entry");
        let share = self.shared.table().room.scope_share;
        assert!(
            share.is_none_or(|share| share <= entries),
            "capacity: {entries} entries are less than the scope_share ({share:?})"
        );
        self.shared.table().room.capacity = entries;
        self
    }

    /// The most bytes that all records may keep together. At or over it no new operation is claimed
    /// until records end; a completion always fits, so the overshoot is at most what is in flight ×
    /// the response limit. Default: 256 MiB. Clones share it.
    ///
    /// # Panics
    ///
    /// If `bytes` is zero.
    #[must_use]
    #[track_caller]
    pub fn stored_bytes(self, bytes: usize) -> Self {
        assert!(bytes > 0, "stored_bytes: a store needs room for more than 0 bytes");
        self.shared.table().room.stored_bytes = bytes;
        self
    }

    /// The most live entries of one scope, so that one tenant cannot take all the room. Set it
    /// after [`capacity`](Self::capacity), and before the store is used. Default: no limit but the
    /// capacity. Clones share it.
    ///
    /// # Panics
    ///
    /// If `entries` is zero, or more than the capacity.
    #[must_use]
    #[track_caller]
    pub fn scope_share(self, entries: usize) -> Self {
        let capacity = self.max_len();
        assert!(entries > 0, "scope_share: a scope needs room for at least 1 entry");
        assert!(entries <= capacity, "scope_share: {entries} is over the capacity ({capacity})");
        self.shared.table().room.scope_share = Some(entries);
        self.shared.counts_scopes.store(true, Ordering::Relaxed);
        self
    }

    /// Makes room for a new operation, when there is none, by ending the record that was completed
    /// first: its key is new work from then on. Never a claim in flight, never a held entry, and
    /// not for a scope whose own share is full. Default: no, new operations are refused. Set it
    /// before the store is used. Clones share it.
    ///
    /// **A retry of an evicted key runs again.** Right where a retry comes soon or never, and
    /// refusing new work is worse than running a late retry twice.
    #[must_use]
    pub fn evict_oldest(self, evict: bool) -> Self {
        self.shared.table().room.evict_oldest = evict;
        self
    }

    /// How many bytes the records keep together now.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shared.swept(|table| table.bytes)
    }

    /// How many entries are live now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.swept(Table::len)
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
        self.shared.table().room.capacity
    }

    /// Ends the record, tombstone or held entry of `id`, as an operator would after looking into
    /// it. A claim in flight is left alone, for its execution is still running. Says whether there
    /// was something to end.
    #[allow(clippy::must_use_candidate, reason = "whether it was there may not matter")]
    pub fn remove(&self, id: &OperationId) -> bool {
        let mut gone = Gone::new();
        let mut table = self.shared.table();
        let live = table.get(id, Instant::now());
        let is_left = live.is_some_and(|live| !matches!(live.state, State::InFlight { .. }));
        if is_left {
            self.shared.end(&mut table, id, &mut gone);
        }
        is_left
    }

    /// Ends every record, tombstone and held entry. Claims in flight are left alone.
    pub fn clear(&self) {
        let mut gone = Gone::new();
        let mut table = self.shared.table();
        while let Some(id) = table.first_left() {
            self.shared.end(&mut table, &id, &mut gone);
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
    /// The value of a record; asked with the table locked.
    fn recorded(&self, id: &OperationId) -> Option<V> {
        self.records.get(id).and_then(|kept| kept.value().clone())
    }

    /// Ends one entry.
    fn end(&self, table: &mut Table, id: &OperationId, gone: &mut Gone<V>) {
        let Some(live) = table.end(id) else { return };
        let kept = live.is_recorded().then(|| self.records.remove(id)).flatten();
        gone.push((live, kept.and_then(|kept| kept.value().take())));
    }

    /// Clears up to `most` entries whose deadline has passed.
    fn sweep(&self, table: &mut Table, now: Instant, most: usize, gone: &mut Gone<V>) {
        for _ in 0..most {
            let Some(id) = table.first_ended(now) else { break };
            self.end(table, &id, gone);
        }
    }

    /// Looks at the table when all that has ended is cleared.
    fn swept<T>(&self, look: impl FnOnce(&Table) -> T) -> T {
        let mut gone = Gone::new();
        let mut table = self.table();
        self.sweep(&mut table, Instant::now(), usize::MAX, &mut gone);
        look(&table)
    }

    fn claim(self: &Arc<Self>, request: ClaimRequest) -> ClaimReply<V> {
        let ClaimRequest { id, fingerprint, token, scope } = request;
        let mut gone = Gone::new();
        let mut table = self.table();
        let table = &mut *table;
        let now = Instant::now();
        self.sweep(table, now, SWEEP_BATCH, &mut gone);

        if let Some(live) = table.get_mut(&id) {
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
                State::Recorded { .. } => {
                    match self.recorded(&id) {
                        Some(_) if !matches => return ClaimReply::Conflict,
                        Some(value) => return ClaimReply::Recorded(value),
                        // A slot without its value is an entry that has ended.
                        None => {}
                    }
                }
            }
            self.end(table, &id, &mut gone);
        }

        while let Some(NoRoom { earliest, evict }) = table.no_room(scope) {
            let ended = earliest.filter(|(deadline, _)| *deadline <= now).map(|(_, id)| id);
            // What has ended goes first, then what may be evicted.
            let Some(id) = ended.or(evict) else {
                let room_in = table.room_at(scope).map(|at| at - now);
                return ClaimReply::Full { room_in };
            };
            self.end(table, &id, &mut gone);
        }
        table.claim(id, token, fingerprint, scope);
        let (live, capacity) = (table.len(), table.room.capacity);
        let is_filling_up = live.saturating_mul(5) >= capacity.saturating_mul(4);
        if is_filling_up && !self.warned.swap(true, Ordering::Relaxed) {
            notice::filling_up(live, capacity);
        }
        ClaimReply::Mine(Box::new(MemoryClaim::new(self, id, token)))
    }

    /// Ends the claim of `token` on `id` and leaves nothing.
    fn release(&self, id: OperationId, token: Token) -> Ownership {
        let mut gone = Gone::new();
        let mut table = self.table();
        if table.claimed_by(&id, token).is_none() {
            return Ownership::Lost;
        }
        self.end(&mut table, &id, &mut gone);
        Ownership::Held
    }

    fn hold(&self, id: OperationId, token: Token, retention: Duration) -> Ownership {
        let mut table = self.table();
        let claimed = table.settle(id, token, &Left::Held, deadline_after(retention));
        // Those who wait wake when nothing is locked any more; so below.
        drop(table);
        claimed.map_or(Ownership::Lost, |_| Ownership::Held)
    }

    fn complete(&self, id: OperationId, token: Token, completion: Completion<V>) -> Ownership {
        let Completion { value, retention, bytes } = completion;
        let mut table = self.table();
        let Some(fingerprint) = table.claimed_by(&id, token) else { return Ownership::Lost };
        let deadline = deadline_after(retention);
        // The value first: an entry that says "recorded" always has one behind it.
        self.records.insert(id, Kept::new(value, fingerprint, deadline));
        let claimed = table.settle(id, token, &Left::Record { bytes }, deadline);
        drop(table);
        claimed.map_or(Ownership::Lost, |_| Ownership::Held)
    }

    fn expire(&self, id: OperationId, token: Token) -> Ownership {
        let mut gone = Gone::new();
        let mut table = self.table();
        if !table.was_left_by(&id, token, Instant::now()) {
            return Ownership::Lost;
        }
        self.end(&mut table, &id, &mut gone);
        Ownership::Held
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> Ownership {
        let mut table = self.table();
        if !table.was_left_by(&id, token, Instant::now()) {
            return Ownership::Lost;
        }
        let deadline = deadline_after(retention);
        table.retain(id, deadline);
        if let Some(kept) = self.records.get(&id) {
            self.records.insert(id, kept.until(deadline));
        }
        Ownership::Held
    }
}

impl<V: Clone + Send + Sync + 'static> Store<V> for MemoryStore<V> {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        let table = self.shared.table();
        StoreFuture::ready(table.get(&id, Instant::now()).map(|live| live.fingerprint))
    }

    fn recall(&self, id: &OperationId, exact: &[u8; 32]) -> Option<V> {
        // Without the table, which others may be waiting for: an entry that ends takes its value
        // with it, so one that is found is live.
        self.shared.records.get(id)?.answer_to(exact)
    }

    fn counts_scopes(&self) -> bool {
        self.shared.counts_scopes.load(Ordering::Relaxed)
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<V>> {
        StoreFuture::ready(self.shared.claim(request))
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        StoreFuture::ready(self.shared.release(id, token))
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
            .field("room", &table.room)
            .field("entries", &table.len())
            .field("in_flight", &table.in_flight)
            .field("bytes", &table.bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use super::kept::{BACKSTOP, FOR_EVER};

    const HOUR: Duration = Duration::from_secs(60 * 60);

    #[tokio::test(start_paused = true)]
    async fn a_retention_that_is_changed_is_followed_by_the_one_who_holds_the_value() {
        let store = MemoryStore::new();
        let id = OperationId::from_bytes([1; 32]);
        let request = ClaimRequest::new(id, Fingerprint::of(["x"]), Token::mint());
        let ClaimReply::Mine(claim) = store.claim(request).await.unwrap() else {
            panic!("there is nothing yet");
        };
        let completion = Completion::new("value", Duration::from_secs(1));
        assert_eq!(claim.complete(completion).await.unwrap(), Ownership::Held);
        for retention in [HOUR, Duration::from_secs(1), Duration::MAX] {
            let said = store.retain(id, request.token, retention).await.unwrap();
            assert_eq!(said, Ownership::Held);
            let kept = store.shared.records.get(&id).unwrap();
            assert_eq!(kept.deadline, deadline_after(retention));
            let keep_for = retention.min(FOR_EVER) + BACKSTOP;
            assert_eq!(KeepFor::of(&kept), keep_for);
        }
    }
}
