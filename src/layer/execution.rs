//! The setters for what runs: who waits for it, what becomes of its failures and of its callers'
//! leaving, and how long each may take.

use std::{sync::Arc, time::Duration};

use super::IdempotencyLayer;
use crate::{
    engine::{Detached, InFlight, OnFailure, OnLeave, assert_longer_than_zero, assert_waiters},
    outcome::Policy,
};

impl IdempotencyLayer {
    /// What a repeat does while the first execution is running. Default: it waits up to 10
    /// seconds, then gets 409 `idempotency_in_progress`. At most 16 wait for one operation and
    /// 1,024 in all; further ones get the 409 at once.
    ///
    /// # Panics
    ///
    /// If it is a wait of zero: that is [`InFlight::Reject`].
    #[track_caller]
    pub fn in_flight(self, in_flight: InFlight) -> Self {
        if let InFlight::Wait(at_most) = in_flight {
            assert_longer_than_zero("in_flight", at_most);
        }
        self.set(|settings| settings.engine.rules.in_flight = in_flight)
    }

    /// How many repeats may wait, for one operation and in all; further ones get 409
    /// `idempotency_in_progress` at once. Default: 16 and 1,024.
    ///
    /// # Panics
    ///
    /// If one is zero (that is [`InFlight::Reject`]), or the first is larger than the second.
    #[track_caller]
    pub fn waiters(self, per_operation: usize, in_all: usize) -> Self {
        assert_waiters(per_operation, in_all);
        self.set(|settings| {
            settings.engine.rules.waiters_per_operation = per_operation;
            settings.engine.rules.waiters = in_all;
        })
    }

    /// What becomes of an operation whose execution failed: with 408 or 5xx, an inner error, a
    /// panic, or a response body that broke. Default: [`OnFailure::Release`], the retry runs
    /// again.
    pub fn on_failure(self, rule: OnFailure) -> Self {
        self.set(|settings| {
            settings.engine.rules.on_failure = rule;
            settings.engine.rules.on_error = None;
            if let Some(policy @ Policy::Stripe) = &mut settings.capture.policy {
                // That releases some failures. Of the rest of it they both are the same.
                *policy = Policy::Ietf;
            }
        })
    }

    /// What becomes of a running execution whose caller leaves. Default: [`OnLeave::Finish`].
    pub fn on_leave(self, rule: OnLeave) -> Self {
        self.set(|settings| settings.engine.rules.on_leave = rule)
    }

    /// The longest time that an execution runs on after its caller has left; then it is cancelled
    /// and the failure rule applies. Default: 5 minutes.
    ///
    /// # Panics
    ///
    /// If it is zero: that is [`OnLeave::Cancel`].
    #[track_caller]
    pub fn finish_within(self, time: Duration) -> Self {
        assert_longer_than_zero("finish_within", time);
        self.set(|settings| settings.engine.rules.finish_within = time)
    }

    /// Wraps work that goes on without its caller, to give it what it would miss as a task of its
    /// own: a tracing span, a task-local. (A task-local of a layer further out is not there, and
    /// asking for it panics.) Default: nothing.
    pub fn detach_with<F>(self, detach: F) -> Self
    where
        F: Fn(Detached) -> Detached + Send + Sync + 'static,
    {
        self.set(|settings| settings.engine.detach_with = Some(Arc::new(detach)))
    }

    /// The longest time for one call of the store. Over it, before the inner service is called,
    /// the answer is 503 `idempotency_store_unavailable`. Default: 1 second.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn store_timeout(self, timeout: Duration) -> Self {
        assert_longer_than_zero("store_timeout", timeout);
        self.set(|settings| settings.engine.rules.store_timeout = timeout)
    }
}
