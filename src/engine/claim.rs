//! A claim that is ours. In: the store's claim; out: exactly one settlement, whatever happens.
//! Before the work begins, dropping it releases; from then on, dropping it applies the failure
//! rule.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use tokio::{runtime::Handle as Runtime, sync::Notify};

use super::{Engine, OnFailure, Rules, bounded, drain::Ticket, execute::Leave};
use crate::{
    notice,
    operation::{OperationId, Token},
    store::{Claim, Completion, Ownership, StoreError, StoreFuture},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// How a claim ends.
#[derive(Debug)]
pub(crate) enum Settlement<V> {
    /// With this value, which takes about so many bytes, to be given to every repeat.
    Record { value: V, bytes: usize },
    /// With nothing: a repeat executes.
    Release,
    /// With an unknown outcome: a repeat is refused.
    Hold,
}

/// The exclusive right to execute one operation.
pub(crate) struct OwnedClaim<V: 'static> {
    /// There until it is settled.
    claim: Option<Box<dyn Claim<V>>>,
    progress: Arc<Progress<V>>,
    runtime: Option<Runtime>,
    /// There from [`begin`](Self::begin) to the end of the settlement.
    running: Option<Ticket>,
}

impl<V: 'static> OwnedClaim<V> {
    pub(super) fn new(
        engine: &Engine<V>,
        id: OperationId,
        token: Token,
        claim: Box<dyn Claim<V>>,
    ) -> Self {
        let progress = Progress {
            engine: engine.clone(),
            id,
            token,
            attempt: claim.attempt(),
            effects: AtomicBool::new(false),
            not_executed: AtomicBool::new(false),
            life: Mutex::new(Life::Running { wish: None }),
            settled: Notify::new(),
        };
        Self {
            claim: Some(claim),
            progress: Arc::new(progress),
            runtime: Runtime::try_current().ok(),
            running: None,
        }
    }

    /// What the one who executes may ask and say.
    pub(crate) fn progress(&self) -> &Arc<Progress<V>> {
        &self.progress
    }

    /// Where this execution goes if its caller leaves.
    pub(crate) fn leave(&self) -> Option<Leave> {
        Leave::new(self.runtime.as_ref(), &self.progress.engine)
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.progress.engine.rules
    }

    /// Adds what the store's claim has for the one who executes.
    pub(crate) fn extend(&mut self, extensions: &mut http::Extensions) {
        if let Some(claim) = &mut self.claim {
            claim.extend(extensions);
        }
    }

    /// The work begins: from here the claim's end may leave effects behind.
    pub(crate) fn begin(&mut self) {
        self.running = Some(self.progress.engine.running.enter());
    }

    /// Ends the claim: the write begins at once.
    pub(crate) fn settle(mut self, settlement: Settlement<V>) -> Settling<V> {
        Settling(self.write(settlement))
    }

    /// Ends the claim of an execution that left no answer, by the failure rule.
    pub(crate) fn fail(self) -> Settling<V> {
        let settlement = self.after_failure(self.progress.engine.rules.on_failure);
        self.settle(settlement)
    }

    /// Ends the claim of an execution that ended with an error.
    pub(crate) fn fail_with_error(self) -> Settling<V> {
        let rules = &self.progress.engine.rules;
        let settlement = self.after_failure(rules.on_error.unwrap_or(rules.on_failure));
        self.settle(settlement)
    }

    fn after_failure(&self, rule: OnFailure) -> Settlement<V> {
        if self.progress.not_executed.load(Ordering::Acquire) {
            return Settlement::Release;
        }
        match rule {
            OnFailure::Release if !self.progress.effects_begun() => Settlement::Release,
            _ => Settlement::Hold,
        }
    }

    fn write(&mut self, settlement: Settlement<V>) -> Option<Writing<V>> {
        let claim = self.claim.take()?;
        let retention = self.progress.engine.rules.retention;
        let wish = self.progress.settle();
        let write = match (settlement, wish) {
            (Settlement::Record { .. }, Some(Wish::End)) | (Settlement::Release, _) => {
                claim.release()
            }
            (Settlement::Record { value, bytes }, wish) => {
                let retention = match wish {
                    Some(Wish::RetainFor(retention)) => retention,
                    _ => retention,
                };
                claim.complete(Completion::new(value, retention).bytes(bytes))
            }
            // A wish is for a record. An unknown outcome stays shut for as long as the rules say.
            (Settlement::Hold, _) => claim.hold(retention),
        };
        Some(Writing {
            write: Some(write),
            limit: self.progress.engine.rules.store_timeout,
            progress: Arc::clone(&self.progress),
            runtime: self.runtime.take(),
            running: self.running.take(),
        })
    }
}

impl<V: 'static> Drop for OwnedClaim<V> {
    fn drop(&mut self) {
        let settlement = match self.running {
            Some(_) => self.after_failure(self.progress.engine.rules.on_failure),
            None => Settlement::Release,
        };
        // Dropping the write sends it to the background, unless it is done at once.
        drop(self.write(settlement));
    }
}

impl<V: 'static> fmt::Debug for OwnedClaim<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedClaim").field("progress", &self.progress).finish_non_exhaustive()
    }
}

/// The end of a claim. Dropped before it is [finished](Self::finish), it goes on in the background.
#[must_use]
pub(crate) struct Settling<V: 'static>(Option<Writing<V>>);

impl<V: 'static> Settling<V> {
    /// Waits for the store's word. Not an async function of the claim, whose future would hold all
    /// of that twice.
    pub(crate) async fn finish(&mut self) -> Result<Ownership, StoreError> {
        match &mut self.0 {
            Some(writing) => writing.finish().await,
            None => Ok(Ownership::Lost),
        }
    }
}

/// A settlement on its way to the store. It is independent of who asked for it: dropped, it goes
/// on in the background.
struct Writing<V: 'static> {
    /// There until it has been answered.
    write: Option<StoreFuture<Ownership>>,
    limit: Duration,
    progress: Arc<Progress<V>>,
    runtime: Option<Runtime>,
    running: Option<Ticket>,
}

impl<V: 'static> Writing<V> {
    async fn finish(&mut self) -> Result<Ownership, StoreError> {
        let answer = match &mut self.write {
            Some(write) => bounded(write, self.limit).await,
            None => Ok(Ownership::Lost),
        };
        if let Err(error) = &answer {
            notice::store_failed(error);
        }
        self.write = None;
        self.progress.settled();
        self.running = None;
        answer
    }
}

impl<V: 'static> Drop for Writing<V> {
    fn drop(&mut self) {
        let Some(mut write) = self.write.take() else { return };
        let mut context = Context::from_waker(Waker::noop());
        if Pin::new(&mut write).poll(&mut context).is_pending()
            && let Some(runtime) = self.runtime.take()
        {
            let limit = self.limit;
            let settled = Settled(Arc::clone(&self.progress));
            let running = self.running.take();
            runtime.spawn(async move {
                if let Err(error) = bounded(&mut write, limit).await {
                    notice::store_failed(&error);
                }
                drop(settled);
                drop(running);
            });
        } else {
            self.progress.settled();
        }
    }
}

/// Says that a claim is settled when dropped, even if the runtime ends before its store answers:
/// whoever waits for it must not wait for ever.
struct Settled<V: 'static>(Arc<Progress<V>>);

impl<V: 'static> Drop for Settled<V> {
    fn drop(&mut self) {
        self.0.settled();
    }
}

/// One execution as seen by the one who executes. It belongs to one claim: on a later entry of the
/// same id it changes nothing, and says so.
pub(crate) struct Progress<V: 'static> {
    engine: Engine<V>,
    id: OperationId,
    token: Token,
    attempt: u32,
    effects: AtomicBool,
    not_executed: AtomicBool,
    life: Mutex<Life>,
    /// Notified when `life` becomes [`Life::Settled`].
    settled: Notify,
}

/// Where a claim is on its way; a wish that comes before its end is remembered, one that comes
/// while the end is being written waits for it.
enum Life {
    Running { wish: Option<Wish> },
    Settling,
    Settled,
}

/// What the one who executes wants to become of the record.
#[derive(Clone, Copy)]
enum Wish {
    End,
    RetainFor(Duration),
}

impl<V: 'static> Progress<V> {
    /// An execution that has no claim: whatever is said of its record is lost.
    pub(crate) fn unclaimed(engine: &Engine<V>, id: OperationId) -> Self {
        Self {
            engine: engine.clone(),
            id,
            token: Token::mint(),
            attempt: 1,
            effects: AtomicBool::new(false),
            not_executed: AtomicBool::new(false),
            life: Mutex::new(Life::Settled),
            settled: Notify::new(),
        }
    }

    pub(crate) fn id(&self) -> OperationId {
        self.id
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.attempt
    }

    pub(crate) fn effects_begin(&self) {
        self.effects.store(true, Ordering::Release);
    }

    /// The one who executes says that nothing has happened, whatever becomes of its answer.
    pub(crate) fn not_executed(&self) {
        self.not_executed.store(true, Ordering::Release);
    }

    pub(crate) fn effects_begun(&self) -> bool {
        self.effects.load(Ordering::Acquire)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The retention that the record is to have, if it has been said here.
    pub(crate) fn wish_to_retain_for(&self, retention: Duration) {
        if let Life::Running { wish: wish @ None } = &mut *self.life() {
            *wish = Some(Wish::RetainFor(retention));
        }
    }

    fn settle(&self) -> Option<Wish> {
        match std::mem::replace(&mut *self.life(), Life::Settling) {
            Life::Running { wish } => wish,
            Life::Settling | Life::Settled => None,
        }
    }

    fn settled(&self) {
        *self.life() = Life::Settled;
        self.settled.notify_waiters();
    }

    pub(crate) async fn expire(&self) -> Result<Ownership, StoreError> {
        if self.remembered(Wish::End).await {
            return Ok(Ownership::Held);
        }
        let mut answer = self.engine.store.expire(self.id, self.token);
        bounded(&mut answer, self.engine.rules.store_timeout).await
    }

    pub(crate) async fn retain_for(&self, retention: Duration) -> Result<Ownership, StoreError> {
        if self.remembered(Wish::RetainFor(retention)).await {
            return Ok(Ownership::Held);
        }
        let mut answer = self.engine.store.retain(self.id, self.token, retention);
        bounded(&mut answer, self.engine.rules.store_timeout).await
    }

    /// Leaves a wish with the claim if it is still in flight; otherwise waits for its end.
    async fn remembered(&self, wanted: Wish) -> bool {
        loop {
            // Before the look, or the end could slip in between.
            let settled = self.settled.notified();
            match &mut *self.life() {
                Life::Running { wish } => {
                    *wish = Some(wanted);
                    return true;
                }
                Life::Settling => {}
                Life::Settled => return false,
            }
            settled.await;
        }
    }
}

impl<V: 'static> fmt::Debug for Progress<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("id", &self.id)
            .field("attempt", &self.attempt)
            .field("effects_begun", &self.effects_begun())
            .finish_non_exhaustive()
    }
}
