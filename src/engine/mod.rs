//! One execution per operation, whatever the value. In: an operation id and a fingerprint; out: a
//! [`Decision`]. Whoever gets [`Decision::Mine`] executes ([`execute`]) and settles its
//! [`OwnedClaim`]; everybody else is told what is there, after a bounded wait. [`run`] is all of it
//! for a caller without HTTP.
//!
//! Nothing in here knows HTTP.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::runtime::Handle as Runtime;

use crate::{
    fingerprint::Fingerprint,
    notice,
    operation::{OperationId, Token},
    scope::ScopeId,
    store::{ClaimReply, ClaimRequest, Store, StoreError, StoreFuture},
};

mod claim;
mod drain;
mod run;
pub(crate) mod execute;
mod wait;

pub(crate) use claim::{OwnedClaim, Progress, Settlement, Settling};
use drain::Running;
pub(crate) use execute::Detach;
pub use execute::Detached;
pub use run::{Done, Operation, RunError};
pub use wait::InFlight;
use wait::Waiters;

/// What becomes of an operation whose execution failed without an answer to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnFailure {
    /// The entry ends and a retry runs again. Right where a failure means that nothing happened,
    /// or where running twice does no harm.
    #[default]
    Release,
    /// The entry is held: retries get 409 `idempotency_outcome_unknown`, until an operator or the
    /// retention ends it. Right for payments.
    Hold,
    /// The failure's own answer is recorded and replayed, as Stripe does. Without one (an error, a
    /// panic, a body that broke) the entry is held.
    Record,
}

/// What becomes of a running execution whose caller leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnLeave {
    /// It is handed to the runtime, finishes there and is recorded.
    #[default]
    Finish,
    /// It is dropped where it stands, and the failure rule applies.
    Cancel,
}

/// How the engine behaves; plain values, checked by whoever sets them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) on_failure: OnFailure,
    /// For an error of the work; `on_failure` where there is none.
    pub(crate) on_error: Option<OnFailure>,
    pub(crate) on_leave: OnLeave,
    pub(crate) in_flight: InFlight,
    pub(crate) retention: Duration,
    pub(crate) finish_within: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) waiters_per_operation: usize,
    pub(crate) waiters: usize,
}

impl Default for Rules {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_secs(60);
        Self {
            on_failure: OnFailure::Release,
            on_error: None,
            on_leave: OnLeave::Finish,
            in_flight: InFlight::Wait(Duration::from_secs(10)),
            retention: 60 * MINUTE,
            finish_within: 5 * MINUTE,
            store_timeout: Duration::from_secs(1),
            waiters_per_operation: 16,
            waiters: 1_024,
        }
    }
}

impl Rules {
    /// Checks what only goes together or not at all.
    ///
    /// # Panics
    ///
    /// With a message that names the settings.
    #[track_caller]
    pub(crate) fn validate(&self) {
        let Self { in_flight, finish_within, .. } = *self;
        if let InFlight::Wait(wait) = in_flight {
            assert!(
                wait <= finish_within,
                "in_flight: a wait of {wait:?} is longer than finish_within ({finish_within:?})"
            );
        }
    }
}

#[track_caller]
pub(crate) fn assert_longer_than_zero(setting: &str, time: Duration) {
    assert!(!time.is_zero(), "{setting}: has to be longer than zero");
}

#[track_caller]
pub(crate) fn assert_waiters(per_operation: usize, in_all: usize) {
    assert!(per_operation > 0, "waiters: has to be more than 0 per operation");
    assert!(
        per_operation <= in_all,
        "waiters: {per_operation} per operation are more than {in_all} in all"
    );
}

/// One execution per operation, for any async function: the engine that
/// [`IdempotencyLayer`](crate::IdempotencyLayer) is a client of, without HTTP.
///
/// It claims operations in a store, runs what nobody has run, gives every repeat the first value,
/// and knows what is still running. Clones share all of it; a setter changes only the engine that
/// it is called on. See [`run`](Engine::run).
pub struct Engine<V: 'static> {
    pub(crate) store: Arc<dyn Store<V>>,
    pub(crate) rules: Rules,
    pub(crate) detach_with: Option<Arc<Detach>>,
    running: Running,
    waiters: Waiters,
}

/// Which operation is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) id: OperationId,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) scope: Option<ScopeId>,
}

/// What is to be done with one request.
pub(crate) enum Decision<V: 'static> {
    /// Execute it, and settle the claim.
    Mine(OwnedClaim<V>),
    /// The same operation was asked for something else.
    Conflict,
    /// It is done, and this is what came out; `waited` if an execution was in flight on arrival.
    Recorded { value: V, waited: bool },
    /// It ended with an unknown outcome.
    Held,
    /// It is running still, after as long a wait as the rules allow.
    InFlight,
    /// There is no room for it.
    Full { room_in: Option<Duration> },
}

impl<V: 'static> Engine<V> {
    /// An engine with every default, over `store`.
    pub fn new(store: impl Store<V>) -> Self {
        Self {
            store: Arc::new(store),
            rules: Rules::default(),
            detach_with: None,
            running: Running::default(),
            waiters: Waiters::default(),
        }
    }

    /// What is under `id` right now. Advisory.
    pub(crate) fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        let mut call = self.store.lookup(id);
        if call.is_there() {
            return call;
        }
        let limit = self.rules.store_timeout;
        StoreFuture::new(async move { in_time(&mut call, limit).await })
    }

    /// Claims `id`, waiting for a claim in flight as `in_flight` says.
    ///
    /// Dropped before it returns, it leaves nothing behind: a claim whose answer has not arrived
    /// is taken back by its token.
    pub(crate) async fn claim(
        &self,
        wanted: Wanted,
        in_flight: InFlight,
    ) -> Result<Decision<V>, StoreError> {
        let Wanted { id, fingerprint, scope } = wanted;
        let request = ClaimRequest::new(id, fingerprint, Token::mint()).in_scope(scope);
        let mut call = self.store.claim(request);
        let call = match call.at_once() {
            Some(Ok(ClaimReply::InFlight(ended))) => {
                StoreFuture::ready(ClaimReply::InFlight(ended))
            }
            Some(Ok(reply)) => return Ok(self.decide(request, reply, false)),
            Some(Err(error)) => StoreFuture::failed(error),
            None => call,
        };
        // Boxed, or every request would carry the room that few need.
        Box::pin(self.claim_in_time(request, call, in_flight)).await
    }

    /// The same where there is something to wait for: the store's answer, or a claim in flight.
    async fn claim_in_time(
        &self,
        request: ClaimRequest,
        mut call: StoreFuture<ClaimReply<V>>,
        in_flight: InFlight,
    ) -> Result<Decision<V>, StoreError> {
        let runtime = Runtime::try_current().ok();
        let mut turn = None;
        loop {
            match self.answer(request, call, runtime.as_ref()).await? {
                ClaimReply::InFlight(ended) => {
                    if turn.is_none() {
                        turn = self.waiters.enter(
                            request.id,
                            in_flight,
                            &self.rules,
                            runtime.as_ref(),
                        );
                    }
                    match &turn {
                        Some(turn) if turn.wait(ended).await? => {}
                        _ => return Ok(Decision::InFlight),
                    }
                }
                reply => return Ok(self.decide(request, reply, turn.is_some())),
            }
            call = self.store.claim(request);
        }
    }

    /// What the store's answer means to the one who asked; `waited` says whether it was in flight
    /// before.
    fn decide(&self, request: ClaimRequest, reply: ClaimReply<V>, waited: bool) -> Decision<V> {
        match reply {
            ClaimReply::Mine(claim) => {
                Decision::Mine(OwnedClaim::new(self, request.id, request.token, claim))
            }
            ClaimReply::Conflict => Decision::Conflict,
            ClaimReply::Recorded(value) => Decision::Recorded { value, waited },
            ClaimReply::Held => Decision::Held,
            ClaimReply::InFlight(_) => Decision::InFlight,
            ClaimReply::Full { room_in } => Decision::Full { room_in },
        }
    }

    /// Waits for the answer to one claim; without it the claim is taken back.
    async fn answer(
        &self,
        request: ClaimRequest,
        mut call: StoreFuture<ClaimReply<V>>,
        runtime: Option<&Runtime>,
    ) -> Result<ClaimReply<V>, StoreError> {
        let ClaimRequest { id, token, .. } = request;
        let mut unanswered = Unanswered { engine: self, id, token, runtime, answered: false };
        let reply = bounded(&mut call, self.rules.store_timeout).await;
        unanswered.answered = reply.is_ok();
        if let Err(error) = &reply {
            notice::store_failed(error);
        }
        reply
    }
}

impl<V: 'static> Clone for Engine<V> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            rules: self.rules,
            detach_with: self.detach_with.clone(),
            running: self.running.clone(),
            waiters: self.waiters.clone(),
        }
    }
}

impl<V: 'static> fmt::Debug for Engine<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("rules", &self.rules).finish_non_exhaustive()
    }
}

/// A claim on its way to the store. Dropped without an answer (the caller left, the store failed
/// or took too long) it may have been written all the same, so it is taken back.
struct Unanswered<'a, V: 'static> {
    engine: &'a Engine<V>,
    id: OperationId,
    token: Token,
    runtime: Option<&'a Runtime>,
    answered: bool,
}

impl<V: 'static> Drop for Unanswered<'_, V> {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        let mut withdrawal = self.engine.store.withdraw(self.id, self.token);
        let mut context = Context::from_waker(Waker::noop());
        if let (Poll::Pending, Some(runtime)) =
            (Pin::new(&mut withdrawal).poll(&mut context), self.runtime)
        {
            let limit = self.engine.rules.store_timeout;
            // If this fails too, the store's lease ends the claim.
            runtime.spawn(async move { bounded(&mut withdrawal, limit).await });
        }
    }
}

/// Waits for a store's answer, at most for `limit`. An answer that is there at once costs no timer.
/// Without a tokio runtime there is no timer, and so no limit.
pub(crate) async fn bounded<T>(
    answer: &mut StoreFuture<T>,
    limit: Duration,
) -> Result<T, StoreError> {
    match answer.at_once() {
        Some(answer) => answer,
        // Boxed, or every request would carry the room that few need.
        None => Box::pin(in_time(answer, limit)).await,
    }
}

async fn in_time<T>(answer: &mut StoreFuture<T>, limit: Duration) -> Result<T, StoreError> {
    if let Poll::Ready(answer) = at_once(answer).await {
        return answer;
    }
    if Runtime::try_current().is_err() {
        return answer.await;
    }
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(StoreError::timed_out()),
    }
}

/// Polls `future` once and says whether it was ready.
pub(crate) async fn at_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context))).await
}
