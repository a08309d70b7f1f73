//! A record as moka holds it: its value, and all that it takes to answer from it without the table.

use std::{sync::Arc, time::Duration};

use moka::Expiry;
use tokio::time::Instant;

use crate::{
    fingerprint::Fingerprint,
    operation::OperationId,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// moka keeps a value this much longer than its entry lives, so that its own clock, which is
/// coarse and does not follow tokio's, never ends a record before we do.
pub(super) const BACKSTOP: Duration = Duration::from_secs(60);

/// Far enough to mean "for ever", near enough for every clock to add it.
pub(super) const FOR_EVER: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);

/// A record in moka, with all that it takes to answer from it: most repeats need no table.
pub(super) struct Kept<V> {
    record: Arc<Record<V>>,
    /// That of its entry.
    pub(super) deadline: Instant,
}

struct Record<V> {
    /// The digest of the exact bytes that the record answers.
    exact: [u8; 32],
    /// Emptied when the entry ends, for moka frees what it has removed only later, and somebody
    /// may just have found it.
    value: Mutex<Option<V>>,
}

impl<V> Kept<V> {
    pub(super) fn new(value: V, fingerprint: &Fingerprint, deadline: Instant) -> Self {
        let record = Record { exact: *fingerprint.exact(), value: Mutex::new(Some(value)) };
        Self { record: Arc::new(record), deadline }
    }

    /// The same record with another deadline.
    pub(super) fn until(self, deadline: Instant) -> Self {
        Self { deadline, ..self }
    }

    /// The value, if these are the exact bytes that it answers, and its time is not over.
    pub(super) fn answer_to(&self, exact: &[u8; 32]) -> Option<V>
    where
        V: Clone,
    {
        if self.record.exact != *exact || self.deadline <= Instant::now() {
            return None;
        }
        self.value().clone()
    }

    pub(super) fn value(&self) -> MutexGuard<'_, Option<V>> {
        self.record.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V> Clone for Kept<V> {
    fn clone(&self) -> Self {
        Self { record: Arc::clone(&self.record), deadline: self.deadline }
    }
}

/// moka keeps a value for what is left of its entry's time, and longer.
pub(super) struct KeepFor;

impl KeepFor {
    pub(super) fn of<V>(kept: &Kept<V>) -> Duration {
        kept.deadline.saturating_duration_since(Instant::now()) + BACKSTOP
    }
}

impl<V> Expiry<OperationId, Kept<V>> for KeepFor {
    fn expire_after_create(
        &self,
        _: &OperationId,
        kept: &Kept<V>,
        _: std::time::Instant,
    ) -> Option<Duration> {
        Some(Self::of(kept))
    }

    fn expire_after_update(
        &self,
        _: &OperationId,
        kept: &Kept<V>,
        _: std::time::Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(Self::of(kept))
    }
}

pub(super) fn deadline_after(retention: Duration) -> Instant {
    Instant::now() + retention.min(FOR_EVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(60 * 60);

    #[tokio::test(start_paused = true)]
    async fn the_one_who_holds_the_values_is_told_for_how_long_with_each() {
        let (id, now) = (OperationId::from_bytes([1; 32]), Instant::now().into_std());
        let kept = Kept::new("value", &Fingerprint::of(["x"]), deadline_after(HOUR));
        let told = Some(HOUR + BACKSTOP);
        assert_eq!(KeepFor.expire_after_create(&id, &kept, now), told);
        assert_eq!(KeepFor.expire_after_update(&id, &kept, now, Some(HOUR)), told);
    }
}
