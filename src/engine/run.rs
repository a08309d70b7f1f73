//! The engine's face for any async function. In: an operation, or none, and the work; out: its
//! value, of this execution or of the first one.

use std::{
    error::Error,
    fmt,
    future::{Future, ready},
    time::Duration,
};

use super::{
    Decision, Engine, InFlight, OnFailure, OnLeave, OwnedClaim, Settlement, Wanted,
    assert_longer_than_zero, assert_waiters,
    execute::{HandOver, catch},
};
use crate::{
    fingerprint::Fingerprint,
    operation::OperationId,
    scope::{Scope, ScopeId},
    store::StoreError,
};

/// One logical operation, by the caller's key, and what is asked for under it.
#[derive(Debug, Clone, Copy)]
pub struct Operation(Wanted);

impl Operation {
    /// The operation `key` of `scope`.
    #[must_use]
    pub fn new(scope: &Scope, key: &str) -> Self {
        Self(Wanted {
            id: OperationId::new(scope, key),
            fingerprint: Fingerprint::of::<[u8; 0]>([]),
            scope: Some(ScopeId::new(scope)),
        })
    }

    /// Says what is asked for, so that the same key for something else is a conflict; and to say it
    /// at one call and not at another is something else. Where it is said at none, whoever repeats
    /// the key gets the first value.
    #[must_use]
    pub fn asking_for(mut self, fingerprint: Fingerprint) -> Self {
        self.0.fingerprint = fingerprint;
        self
    }

    /// The operation's id.
    #[must_use]
    pub fn id(&self) -> OperationId {
        self.0.id
    }
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Done<V> {
    /// The value of its one execution.
    pub value: V,
    /// Was that an execution before this call?
    pub replayed: bool,
}

/// Why an operation has no value.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work itself failed. Under [`OnFailure::Release`] a repeat runs again.
    Work(E),
    /// The key was used for something else.
    Conflict,
    /// The first execution is running still, after as long a wait as was set.
    InProgress,
    /// The outcome of the first execution is unknown.
    OutcomeUnknown,
    /// There is no room for another operation.
    Full {
        /// How long until there is, where that is known.
        room_in: Option<Duration>,
    },
    /// The store failed before the work began.
    Store(StoreError),
}

impl<E> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Work(_) => "the work failed",
            Self::Conflict => "the key was used for something else",
            Self::InProgress => "the first execution is still running",
            Self::OutcomeUnknown => "the outcome of the first execution is unknown",
            Self::Full { .. } => "there is no room for another operation",
            Self::Store(_) => "the store failed before the work began",
        })
    }
}

impl<E: Error + 'static> Error for RunError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Work(error) => Some(error),
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}

impl<V: Clone + Send + Sync + 'static> Engine<V> {
    /// Runs `work` once per operation: the first call runs it, every repeat gets the value of that
    /// run, and repeats that come while it is running wait for it. Without an operation it runs
    /// always, and nothing is kept.
    ///
    /// ```
    /// use std::{convert::Infallible, time::Duration};
    /// use tower_idempotency::{Engine, MemoryStore, Operation, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let engine = Engine::new(MemoryStore::new().capacity(10_000))
    ///     .retention(Duration::from_secs(5 * 60));
    /// let tenant = Scope::new("acme");
    /// for replayed in [false, true] {
    ///     let work = async { Ok::<_, Infallible>("execution 1".to_owned()) };
    ///     let done = engine.run(Some(Operation::new(&tenant, "a key")), work).await.unwrap();
    ///     assert_eq!((done.value.as_str(), done.replayed), ("execution 1", replayed));
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RunError::Work`] is the work's own error, and nothing is kept of it but by the failure
    /// rule. All others say that the work was not run by this call.
    ///
    /// # Panics
    ///
    /// If the work does, when its claim is settled.
    ///
    /// # Cancel safety
    ///
    /// Dropped before the work has begun, it leaves nothing behind. Dropped after that, the work is
    /// handed to the runtime, finishes and is recorded ([`OnLeave`]). Without an operation the work
    /// is dropped.
    pub async fn run<F, E>(
        &self,
        operation: Option<Operation>,
        work: F,
    ) -> Result<Done<V>, RunError<E>>
    where
        F: Future<Output = Result<V, E>> + Send + 'static,
        E: Send + 'static,
    {
        let done = |value| Done { value, replayed: false };
        let Some(Operation(wanted)) = operation else {
            return work.await.map(done).map_err(RunError::Work);
        };
        match self.claim(wanted, self.rules.in_flight).await {
            Ok(Decision::Mine(claim)) => {
                let leave = claim.leave();
                let value =
                    HandOver::new(execute(claim, work), leave, |_| Box::pin(ready(()))).await;
                value.map(done).map_err(RunError::Work)
            }
            Ok(Decision::Recorded { value, .. }) => Ok(Done { value, replayed: true }),
            Ok(Decision::Conflict) => Err(RunError::Conflict),
            Ok(Decision::Held) => Err(RunError::OutcomeUnknown),
            Ok(Decision::InFlight) => Err(RunError::InProgress),
            Ok(Decision::Full { room_in }) => Err(RunError::Full { room_in }),
            Err(error) => Err(RunError::Store(error)),
        }
    }
}

/// Runs the work that the claim was won for, and settles it. If the store does not confirm that,
/// the value is the caller's all the same.
async fn execute<V, E>(
    mut claim: OwnedClaim<V>,
    work: impl Future<Output = Result<V, E>>,
) -> Result<V, E>
where
    V: Clone + Send + Sync + 'static,
{
    claim.begin();
    match catch(work).await {
        Ok(Ok(value)) => {
            let record = Settlement::Record { value: value.clone(), bytes: size_of::<V>() };
            let _unconfirmed = claim.settle(record).finish().await;
            Ok(value)
        }
        Ok(Err(error)) => {
            let _unconfirmed = claim.fail_with_error().finish().await;
            Err(error)
        }
        Err(panic) => {
            let _unconfirmed = claim.fail().finish().await;
            panic.resume()
        }
    }
}

impl<V: 'static> Engine<V> {
    /// How long a value is kept, counted from completion and never extended by repeats. Default: 1
    /// hour.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[must_use]
    #[track_caller]
    pub fn retention(mut self, retention: Duration) -> Self {
        assert_longer_than_zero("retention", retention);
        self.rules.retention = retention;
        self
    }

    /// What a repeat does while the first execution is running. Default: it waits up to 10
    /// seconds, with not too many [others](Self::waiters).
    ///
    /// # Panics
    ///
    /// If it is a wait of zero (that is [`InFlight::Reject`]), or one longer than
    /// [`finish_within`](Self::finish_within) at that point.
    #[must_use]
    #[track_caller]
    pub fn in_flight(mut self, in_flight: InFlight) -> Self {
        if let InFlight::Wait(at_most) = in_flight {
            assert_longer_than_zero("in_flight", at_most);
        }
        self.rules.in_flight = in_flight;
        self.rules.validate();
        self
    }

    /// How many repeats may wait, for one operation and in all; further ones are told
    /// [`RunError::InProgress`] at once. Default: 16 and 1,024.
    ///
    /// # Panics
    ///
    /// If one is zero (that is [`InFlight::Reject`]), or the first is larger than the second.
    #[must_use]
    #[track_caller]
    pub fn waiters(mut self, per_operation: usize, in_all: usize) -> Self {
        assert_waiters(per_operation, in_all);
        self.rules.waiters_per_operation = per_operation;
        self.rules.waiters = in_all;
        self
    }

    /// What becomes of an operation whose work failed, with an error or a panic. Default:
    /// [`OnFailure::Release`]. There is no answer to keep, so [`OnFailure::Record`] holds.
    #[must_use]
    pub fn on_failure(mut self, rule: OnFailure) -> Self {
        self.rules.on_failure = rule;
        self
    }

    /// What becomes of work whose caller leaves. Default: [`OnLeave::Finish`].
    #[must_use]
    pub fn on_leave(mut self, rule: OnLeave) -> Self {
        self.rules.on_leave = rule;
        self
    }

    /// The longest time that work runs on after its caller has left. Default: 5 minutes.
    ///
    /// # Panics
    ///
    /// If it is zero (that is [`OnLeave::Cancel`]), or shorter than the wait of
    /// [`in_flight`](Self::in_flight) at that point.
    #[must_use]
    #[track_caller]
    pub fn finish_within(mut self, time: Duration) -> Self {
        assert_longer_than_zero("finish_within", time);
        self.rules.finish_within = time;
        self.rules.validate();
        self
    }

    /// The longest time for one call of the store. Default: 1 second.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[must_use]
    #[track_caller]
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        assert_longer_than_zero("store_timeout", timeout);
        self.rules.store_timeout = timeout;
        self
    }

    /// Waits until nothing that this engine started is running, at most for `timeout`; for a
    /// shutdown that loses nothing. Returns how many executions were left.
    pub async fn drain(&self, timeout: Duration) -> usize {
        self.running.drained(timeout).await
    }
}
