//! A claim on an entry of the in-process store. In: its one settlement; out: whether it was still
//! held.

use std::{sync::Arc, time::Duration};

use super::Shared;
use crate::{
    operation::{OperationId, Token},
    store::{Claim, Completion, Ownership, StoreFuture},
};

/// A claim in this process. Dropped unsettled, it is released: its owner is gone, and here nobody
/// else could ever end it.
pub(super) struct MemoryClaim<V: Clone + Send + Sync + 'static> {
    shared: Option<Arc<Shared<V>>>,
    id: OperationId,
    token: Token,
}

impl<V: Clone + Send + Sync + 'static> MemoryClaim<V> {
    pub(super) fn new(shared: &Arc<Shared<V>>, id: OperationId, token: Token) -> Self {
        Self { shared: Some(Arc::clone(shared)), id, token }
    }

    /// Settles the claim, once.
    fn settle(
        &mut self,
        settle: impl FnOnce(&Shared<V>, OperationId, Token) -> Ownership,
    ) -> StoreFuture<Ownership> {
        StoreFuture::ready(match self.shared.take() {
            Some(shared) => settle(&shared, self.id, self.token),
            None => Ownership::Lost,
        })
    }
}

impl<V: Clone + Send + Sync + 'static> Claim<V> for MemoryClaim<V> {
    fn attempt(&self) -> u32 {
        1
    }

    fn complete(mut self: Box<Self>, completion: Completion<V>) -> StoreFuture<Ownership> {
        self.settle(|shared, id, token| shared.complete(id, token, completion))
    }

    fn release(mut self: Box<Self>) -> StoreFuture<Ownership> {
        self.settle(Shared::release)
    }

    fn hold(mut self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        self.settle(|shared, id, token| shared.hold(id, token, retention))
    }
}

impl<V: Clone + Send + Sync + 'static> Drop for MemoryClaim<V> {
    fn drop(&mut self) {
        let _unsettled = self.settle(Shared::release);
    }
}
