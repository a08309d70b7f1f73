//! The in-memory store with something in between: each call can be halted, or fail, before and
//! after it takes effect. So a call can also have been written without its answer arriving, and, as
//! in a store that is shared, nothing but a settlement or a withdrawal ends a claim.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, StoredResponse, Token,
    store::{
        Claim, ClaimReply, ClaimRequest, Completion, Ownership, Store, StoreError, StoreFuture,
    },
};

use super::{call::Call, steps::pend_once};

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

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<StoredResponse>> {
        let store = self.clone();
        self.around(Call::Claim, move || {
            StoreFuture::new(async move {
                Ok(match store.store.claim(request).await? {
                    ClaimReply::Mine(claim) => {
                        let claim = Some(claim);
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
    /// There until it is settled.
    claim: Option<Box<dyn Claim<StoredResponse>>>,
    store: Interposed,
}

impl InterposedClaim {
    fn settle(
        mut self: Box<Self>,
        call: Call,
        settle: impl FnOnce(Box<dyn Claim<StoredResponse>>) -> StoreFuture<Ownership> + Send + 'static,
    ) -> StoreFuture<Ownership> {
        let store = self.store.clone();
        store.around(call, move || match self.claim.take() {
            Some(claim) => settle(claim),
            None => StoreFuture::ready(Ownership::Lost),
        })
    }
}

impl Drop for InterposedClaim {
    fn drop(&mut self) {
        // The claim in memory would notice that its owner is gone.
        std::mem::forget(self.claim.take());
    }
}

impl Claim<StoredResponse> for InterposedClaim {
    fn attempt(&self) -> u32 {
        self.claim.as_ref().map_or(0, |claim| claim.attempt())
    }

    fn complete(self: Box<Self>, completion: Completion<StoredResponse>) -> StoreFuture<Ownership> {
        self.settle(Call::Complete, move |claim| claim.complete(completion))
    }

    fn release(self: Box<Self>) -> StoreFuture<Ownership> {
        self.settle(Call::Release, Claim::release)
    }

    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        self.settle(Call::Hold, move |claim| claim.hold(retention))
    }
}
