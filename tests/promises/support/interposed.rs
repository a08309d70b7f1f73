//! The in-memory store with something in between: each call can be halted, or fail, before and
//! after it takes effect. So a call can also have been written without its answer arriving.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, StoredResponse, Token,
    store::{Claim, ClaimReply, ClaimRequest, Ownership, Store, StoreError, StoreFuture},
};

use super::steps::pend_once;

/// A call of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Lookup,
    Claim,
    Withdraw,
    Expire,
    Retain,
    Complete,
    Release,
    Hold,
}

impl Call {
    pub fn is_settlement(self) -> bool {
        matches!(self, Self::Complete | Self::Release | Self::Hold)
    }
}

type Hook = Arc<dyn Fn(Call) -> BoxFuture<'static, Result<(), StoreError>> + Send + Sync>;

/// The store. Its hooks are called at once when the store is; what they return is awaited before
/// and after the call takes effect.
#[derive(Clone)]
pub struct Interposed {
    store: MemoryStore<StoredResponse>,
    before: Hook,
    after: Hook,
}

impl Interposed {
    /// Halts nowhere.
    pub fn new(store: &MemoryStore<StoredResponse>) -> Self {
        let nothing: Hook = Arc::new(|_| Box::pin(async { Ok(()) }));
        Self { store: store.clone(), before: Arc::clone(&nothing), after: nothing }
    }

    /// Pending once before and once after every call takes effect.
    pub fn stepping(store: &MemoryStore<StoredResponse>) -> Self {
        let step = |_| async {
            pend_once().await;
            Ok(())
        };
        Self::new(store).before(step).after(step)
    }

    pub fn before<F>(self, hook: impl Fn(Call) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), StoreError>> + Send + 'static,
    {
        Self { before: Arc::new(move |call| Box::pin(hook(call))), ..self }
    }

    pub fn after<F>(self, hook: impl Fn(Call) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), StoreError>> + Send + 'static,
    {
        Self { after: Arc::new(move |call| Box::pin(hook(call))), ..self }
    }

    fn around<T: Send + 'static>(
        &self,
        call: Call,
        effect: impl FnOnce() -> StoreFuture<T> + Send + 'static,
    ) -> StoreFuture<T> {
        let (before, after) = ((self.before)(call), (self.after)(call));
        StoreFuture::new(async move {
            before.await?;
            let answer = effect().await;
            after.await?;
            answer
        })
    }
}

impl Store<StoredResponse> for Interposed {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        let store = self.store.clone();
        self.around(Call::Lookup, move || store.lookup(id))
    }

    fn lookup_is_cheap(&self) -> bool {
        true
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<StoredResponse>> {
        let store = self.clone();
        self.around(Call::Claim, move || {
            StoreFuture::new(async move {
                Ok(match store.store.claim(request).await? {
                    ClaimReply::Mine(claim) => {
                        ClaimReply::Mine(Box::new(InterposedClaim { claim, store: store.clone() }))
                    }
                    reply => reply,
                })
            })
        })
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        let store = self.store.clone();
        self.around(Call::Withdraw, move || store.withdraw(id, token))
    }

    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        let store = self.store.clone();
        self.around(Call::Expire, move || store.expire(id, token))
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership> {
        let store = self.store.clone();
        self.around(Call::Retain, move || store.retain(id, token, retention))
    }
}

struct InterposedClaim {
    claim: Box<dyn Claim<StoredResponse>>,
    store: Interposed,
}

impl Claim<StoredResponse> for InterposedClaim {
    fn attempt(&self) -> u32 {
        self.claim.attempt()
    }

    fn complete(
        self: Box<Self>,
        value: StoredResponse,
        retention: Duration,
    ) -> StoreFuture<Ownership> {
        let Self { claim, store } = *self;
        store.around(Call::Complete, move || claim.complete(value, retention))
    }

    fn release(self: Box<Self>) -> StoreFuture<Ownership> {
        let Self { claim, store } = *self;
        store.around(Call::Release, move || claim.release())
    }

    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        let Self { claim, store } = *self;
        store.around(Call::Hold, move || claim.hold(retention))
    }
}
