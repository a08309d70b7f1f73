//! Waiting for a claim in flight. In: an operation id; out: a [`Turn`] with a deadline, or none if
//! too many wait already. A waiter never becomes owner by itself: it goes back to the claim.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle as Runtime,
    time::{Instant, timeout_at},
};

use super::Rules;
use crate::{
    operation::OperationId,
    store::{StoreError, StoreFuture},
    sync::{Mutex, MutexGuard, PoisonError},
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

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn enter(waiters: &Waiters, id: OperationId, at_most: Duration) -> Option<Turn> {
        let rules = Rules { waiters_per_operation: 2, waiters: 3, ..Rules::default() };
        let runtime = Runtime::current();
        waiters.enter(id, InFlight::Wait(at_most), &rules, Some(&runtime))
    }

    #[tokio::test]
    async fn places_are_counted_for_each_operation_and_in_all_and_nothing_is_left_of_them() {
        let waiters = Waiters::default();
        let ids = [1, 2, 3].map(|number| OperationId::from_bytes([number; 32]));
        let counts = || {
            let waiting = waiters.lock();
            (waiting.in_all, ids.map(|id| waiting.by_operation.get(&id).copied()))
        };
        let first = enter(&waiters, ids[0], DAY).unwrap();
        let second = enter(&waiters, ids[0], DAY).unwrap();
        assert!(enter(&waiters, ids[0], DAY).is_none(), "two wait for it");
        let third = enter(&waiters, ids[1], DAY).unwrap();
        assert!(enter(&waiters, ids[2], DAY).is_none(), "three wait in all");
        assert_eq!(counts(), (3, [Some(2), Some(1), None]));
        drop(first);
        assert_eq!(counts(), (2, [Some(1), Some(1), None]));
        drop(second);
        assert_eq!(counts(), (1, [None, Some(1), None]));
        drop(third);
        assert_eq!(counts(), (0, [None; 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_no_clock_can_add_to_is_for_ever() {
        let turn = enter(&Waiters::default(), OperationId::from_bytes([1; 32]), Duration::MAX);
        assert!(turn.unwrap().deadline >= Instant::now() + 365 * DAY);
    }
}
