//! What a handler may ask and say of its own execution, from inside the inner service.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    engine::Progress,
    guard::{Permit, PermitSlot},
    operation::OperationId,
    record::StoredResponse,
    store::{Ownership, StoreError},
};

/// One execution of one operation, in the extensions of every keyed request that reaches the inner
/// service. Clones are the same handle.
///
/// It belongs to one claim, not to the operation: on a later entry of the same operation it
/// changes nothing and says [`Ownership::Lost`].
#[derive(Clone)]
pub struct Handle {
    progress: Arc<Progress<StoredResponse>>,
    slot: Option<PermitSlot>,
}

impl Handle {
    pub(crate) fn new(progress: &Arc<Progress<StoredResponse>>, slot: Option<&PermitSlot>) -> Self {
        Self { progress: Arc::clone(progress), slot: slot.cloned() }
    }

    /// The operation that is executed. Safe to log; stable over all retries, so it can be passed
    /// on as the idempotency key of a call to another service.
    #[must_use]
    pub fn operation_id(&self) -> OperationId {
        self.progress.id()
    }

    /// Which attempt this is, counting from 1: above that, an earlier execution was abandoned
    /// without an end. The in-memory store's executions cannot be, so there it is always 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.progress.attempt()
    }

    /// Marks the point of no return, just before the first effect that must not happen twice.
    ///
    /// From here every end without a recorded answer (an error, a panic, a cancellation, a 4xx, a
    /// 5xx that is not recorded) is held instead of released, whatever the failure rule, unless
    /// the handler says [`Outcome::NotExecuted`](crate::Outcome::NotExecuted).
    pub fn effects_begin(&self) {
        self.progress.effects_begin();
    }

    /// Takes the guard's permit out of its slot, to keep the place for longer than the handler
    /// runs. The same as [`PermitSlot::take_permit`].
    #[must_use]
    pub fn take_permit(&self) -> Option<Permit> {
        self.slot.as_ref()?.take_permit()
    }

    /// Ends this execution's own record, or held entry: the same key is new work from then on.
    ///
    /// Usable during the execution, when it is remembered and there will be no record, and at any
    /// time after the response. (What is remembered is for a record: an execution that ends with an
    /// unknown outcome is held all the same.)
    ///
    /// # Errors
    ///
    /// If the store fails or does not answer in time; the record then lives on to its deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it returns, the record may have ended or not.
    pub async fn expire(&self) -> Result<Ownership, StoreError> {
        self.progress.expire().await
    }

    /// Lets this execution's own record live for `retention`: from its completion if said during
    /// the execution, else from now. Longer or shorter than before; what is too long for a clock
    /// means "for ever". The last word counts.
    ///
    /// # Errors
    ///
    /// If the store fails or does not answer in time; the record then lives to its old deadline.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it returns, either deadline may hold.
    pub async fn retain_for(&self, retention: Duration) -> Result<Ownership, StoreError> {
        self.progress.retain_for(retention).await
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("operation_id", &self.operation_id())
            .field("attempt", &self.attempt())
            .finish_non_exhaustive()
    }
}
