//! Waiting for a claim in flight. In: an operation id; out: a [`Turn`] with a deadline, or none if
//! too many wait already. A waiter never becomes owner by itself: it goes back to the claim.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::Handle as Runtime,
    time::{Instant, timeout_at},
};

use super::Rules;
use crate::{
    operation::OperationId,
    store::{StoreError, StoreFuture},
};

/// What a repeat does while the first execution is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InFlight {
    /// It waits so long in all, then gets 409 `idempotency_in_progress`.
    Wait(Duration),
    /// It gets the 409 at once.
    Reject,
}

/// A wait that no clock can add to is for ever; a year is enough for that.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How many wait for each operation. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Waiters(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    in_all: usize,
    by_operation: HashMap<OperationId, usize>,
}

impl Waiters {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place among those who wait for `id`. There is none where the rules say not to wait, where
    /// too many do, or without a runtime, for then no wait would end.
    pub(super) fn enter(
        &self,
        id: OperationId,
        in_flight: InFlight,
        rules: &Rules,
        runtime: Option<&Runtime>,
    ) -> Option<Turn> {
        let InFlight::Wait(at_most) = in_flight else { return None };
        runtime?;
        let now = Instant::now();
        let deadline = now.checked_add(at_most).unwrap_or_else(|| now + FOR_EVER);
        let mut waiting = self.lock();
        if waiting.in_all >= rules.waiters {
            return None;
        }
        let here = waiting.by_operation.entry(id).or_default();
        if *here >= rules.waiters_per_operation {
            return None;
        }
        *here += 1;
        waiting.in_all += 1;
        drop(waiting);
        Some(Turn { waiters: self.clone(), id, deadline })
    }
}

/// A place among the waiters, given back when dropped.
#[derive(Debug)]
pub(super) struct Turn {
    waiters: Waiters,
    id: OperationId,
    deadline: Instant,
}

impl Turn {
    /// Waits for `ended`, at most until the turn's own deadline. True if it is worth asking again.
    pub(super) async fn wait(&self, ended: StoreFuture<()>) -> Result<bool, StoreError> {
        // A store may wake early, and again and again: the deadline holds all the same.
        if Instant::now() >= self.deadline {
            return Ok(false);
        }
        match timeout_at(self.deadline, ended).await {
            Ok(ended) => {
                // One that wakes at once, each time, must not keep others from running.
                tokio::task::yield_now().await;
                ended.map(|()| true)
            }
            Err(_elapsed) => Ok(false),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
        waiting.in_all -= 1;
        if let Some(here) = waiting.by_operation.get_mut(&self.id) {
            *here -= 1;
            if *here == 0 {
                waiting.by_operation.remove(&self.id);
            }
        }
    }
}
