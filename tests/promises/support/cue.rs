//! A store that fails, hangs or waits on cue, around the one in memory. A claim whose settlement
//! fails stays in flight, as it would in a store that cannot be reached.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use http::Extensions;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Store, StoredResponse, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, StoreError, StoreFuture},
};

use super::{Gate, call::Call};

/// What becomes of it.
#[derive(Debug, Clone)]
pub enum Cue {
    /// It fails, and nothing is done.
    Fail,
    /// It never answers, and nothing is done.
    Hang,
    /// It is done, but the answer never comes.
    LoseAnswer,
    /// It is done after the gate.
    Wait(Gate),
    /// Of a settlement: the claim had been lost before.
    Lost,
}

/// What the claims of this store add to the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction(pub &'static str);

pub struct CueStore<V: 'static = StoredResponse> {
    pub memory: MemoryStore<V>,
    /// So many attempts before each claim ended unseen.
    pub attempts_before: u32,
    cues: Arc<Mutex<HashMap<Call, Cue>>>,
    calls: Arc<Mutex<Vec<Call>>>,
    /// The claims that were not settled.
    kept: Arc<Mutex<Vec<Box<dyn Claim<V>>>>>,
}

impl<V: Clone + Send + Sync + 'static> Default for CueStore<V> {
    fn default() -> Self {
        Self {
            memory: MemoryStore::new(),
            attempts_before: 0,
            cues: Arc::default(),
            calls: Arc::default(),
            kept: Arc::default(),
        }
    }
}

impl<V> Clone for CueStore<V> {
    fn clone(&self) -> Self {
        Self {
            memory: self.memory.clone(),
            attempts_before: self.attempts_before,
            cues: Arc::clone(&self.cues),
            calls: Arc::clone(&self.calls),
            kept: Arc::clone(&self.kept),
        }
    }
}

impl<V: Clone + Send + Sync + 'static> CueStore<V> {
    pub fn cue(&self, call: Call, cue: Cue) {
        self.cues.lock().unwrap().insert(call, cue);
    }

    /// All is well again.
    pub fn heal(&self) {
        self.cues.lock().unwrap().clear();
    }

    /// What it has been asked so far.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    pub fn called(&self, call: Call) -> usize {
        self.calls().into_iter().filter(|called| *called == call).count()
    }

    fn answer<T: Send + 'static>(
        &self,
        call: Call,
        answer: impl FnOnce() -> StoreFuture<T> + Send + 'static,
    ) -> StoreFuture<T> {
        self.calls.lock().unwrap().push(call);
        let cue = self.cues.lock().unwrap().get(&call).cloned();
        match cue {
            None | Some(Cue::Lost) => answer(),
            Some(Cue::Fail) => StoreFuture::failed(failure()),
            Some(Cue::Hang) => StoreFuture::new(std::future::pending()),
            Some(Cue::LoseAnswer) => {
                let answer = answer();
                StoreFuture::new(async move {
                    // What it did must not be undone by a drop of its answer.
                    std::mem::forget(answer.await);
                    std::future::pending().await
                })
            }
            Some(Cue::Wait(gate)) => StoreFuture::new(async move {
                gate.pass().await;
                answer().await
            }),
        }
    }
}

fn failure() -> StoreError {
    StoreError::new("secret-store-address refused the connection")
}

impl<V> fmt::Debug for CueStore<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CueStore").finish_non_exhaustive()
    }
}

impl<V: Clone + Send + Sync + 'static> Store<V> for CueStore<V> {
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>> {
        let memory = self.memory.clone();
        self.answer(Call::Lookup, move || memory.lookup(id))
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<V>> {
        let store = self.clone();
        self.answer(Call::Claim, move || {
            StoreFuture::new(async move {
                Ok(match store.memory.claim(request).await? {
                    ClaimReply::Mine(claim) => {
                        ClaimReply::Mine(Box::new(CueClaim { claim: Some(claim), store }))
                    }
                    other => other,
                })
            })
        })
    }

    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        let memory = self.memory.clone();
        self.answer(Call::Withdraw, move || memory.withdraw(id, token))
    }

    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership> {
        let memory = self.memory.clone();
        self.answer(Call::Expire, move || memory.expire(id, token))
    }

    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership> {
        let memory = self.memory.clone();
        self.answer(Call::Retain, move || memory.retain(id, token, retention))
    }
}

struct CueClaim<V: 'static> {
    claim: Option<Box<dyn Claim<V>>>,
    store: CueStore<V>,
}

impl<V: Clone + Send + Sync + 'static> CueClaim<V> {
    fn settle(
        mut self,
        call: Call,
        settle: impl FnOnce(Box<dyn Claim<V>>) -> StoreFuture<Ownership> + Send + 'static,
    ) -> StoreFuture<Ownership> {
        let claim = self.claim.take().unwrap();
        let cue = self.store.cues.lock().unwrap().get(&call).cloned();
        if let Some(Cue::Lost) = cue {
            return StoreFuture::ready(Ownership::Lost);
        }
        if let Some(Cue::Fail | Cue::Hang) = cue {
            self.store.kept.lock().unwrap().push(claim);
            return self.store.answer(call, || unreachable!("it fails or hangs"));
        }
        self.store.answer(call, move || settle(claim))
    }
}

impl<V: Clone + Send + Sync + 'static> Claim<V> for CueClaim<V> {
    fn attempt(&self) -> u32 {
        self.store.attempts_before + self.claim.as_ref().unwrap().attempt()
    }

    fn extend(&mut self, extensions: &mut Extensions) {
        extensions.insert(Transaction("begun"));
    }

    fn complete(self: Box<Self>, completion: Completion<V>) -> StoreFuture<Ownership> {
        (*self).settle(Call::Complete, move |claim| claim.complete(completion))
    }

    fn release(self: Box<Self>) -> StoreFuture<Ownership> {
        (*self).settle(Call::Release, <dyn Claim<V>>::release)
    }

    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership> {
        (*self).settle(Call::Hold, move |claim| claim.hold(retention))
    }
}
