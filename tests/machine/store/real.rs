//! The real store, and who has claimed in it and who waits.

use std::{cell::RefCell, fmt, time::Duration};

use tokio::runtime::Runtime;
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Scope, ScopeId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, StoreFuture},
};

use super::{
    model::{Entry, Model},
    words::{Deed, Said},
};

type Claimed = Box<dyn Claim<usize>>;

/// The store. A value is the number of the claim that it was completed by.
pub(super) struct Real {
    pub(super) runtime: Option<Runtime>,
    pub(super) store: MemoryStore<usize>,
    pub(super) given: Vec<(ClaimRequest, Option<Claimed>)>,
    /// Those who wait, and for the end of which life.
    pub(super) waiting: RefCell<Vec<(usize, StoreFuture<()>)>>,
}

impl fmt::Debug for Real {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

pub(super) fn id(number: usize) -> OperationId {
    OperationId::new(&Scope::new("test"), &number.to_string())
}

pub(super) fn asked(number: u8) -> Fingerprint {
    Fingerprint::of([[number]])
}

pub(super) fn request(number: usize, fingerprint: u8, scope: Option<u8>) -> ClaimRequest {
    let scope = scope.map(|number| ScopeId::new(&Scope::new([number])));
    ClaimRequest::new(id(number), asked(fingerprint), Token::mint()).in_scope(scope)
}

pub(super) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub(super) fn owned(ownership: Ownership) -> Said {
    Said::Owned(ownership == Ownership::Held)
}

impl Real {
    pub(super) async fn claim(
        &mut self,
        request: ClaimRequest,
        claim: usize,
        model: &Model,
    ) -> Said {
        match self.store.claim(request).await.unwrap() {
            ClaimReply::Mine(mine) => {
                if claim == self.given.len() {
                    self.given.push((request, Some(mine)));
                } else {
                    // Either settles it. The other is not dropped, for that would settle it, too.
                    let before = self.given[claim].1.replace(mine);
                    std::mem::forget(before);
                }
                Said::Mine
            }
            ClaimReply::Conflict => Said::Conflict,
            ClaimReply::Recorded(by) => Said::Recorded { by },
            ClaimReply::Held => Said::Held,
            ClaimReply::InFlight(ended) => {
                let lives = model.entries.values().find(|entry| id_of(entry, model) == request.id);
                self.waiting.borrow_mut().push((lives.expect("it is there").life, ended));
                Said::InFlight
            }
            ClaimReply::Full { room_in } => {
                let room_in = room_in.map(|room_in| room_in.as_secs());
                Said::Full { room_in }
            }
            reply => panic!("what is {reply:?}?"),
        }
    }

    pub(super) async fn deed(&mut self, deed: Deed, model: &Model) -> Said {
        let store = self.store.clone();
        let pick = match deed {
            Deed::Claim { id, asked, scope } => {
                return self.claim(request(id, asked, scope), self.given.len(), model).await;
            }
            Deed::Lookup { id: number } => {
                let found = store.lookup(id(number)).await.unwrap();
                let which = found.map(|found| (0..2).find(|which| found == asked(*which)).unwrap());
                return Said::Found { asked: which };
            }
            Deed::Remove { id: number } => return Said::Ended(store.remove(&id(number))),
            Deed::Clear => {
                store.clear();
                return Said::Nothing;
            }
            Deed::Pass { seconds: passed } => {
                tokio::time::advance(seconds(passed)).await;
                return Said::Nothing;
            }
            Deed::ClaimAgain { pick }
            | Deed::Complete { pick, .. }
            | Deed::Hold { pick, .. }
            | Deed::Release { pick }
            | Deed::Drop { pick }
            | Deed::Withdraw { pick }
            | Deed::Expire { pick }
            | Deed::Retain { pick, .. } => pick,
        };
        let Some(number) = self.given.len().checked_sub(pick + 1) else { return Said::Nothing };
        let (request, claim) = &mut self.given[number];
        let ClaimRequest { id, token, .. } = *request;
        match deed {
            Deed::ClaimAgain { .. } => {
                let request = *request;
                return self.claim(request, number, model).await;
            }
            Deed::Withdraw { .. } => return owned(store.withdraw(id, token).await.unwrap()),
            Deed::Expire { .. } => return owned(store.expire(id, token).await.unwrap()),
            Deed::Retain { seconds: retention, .. } => {
                return owned(store.retain(id, token, seconds(retention)).await.unwrap());
            }
            _ => {}
        }
        let Some(claim) = claim.take() else { return Said::Nothing };
        match deed {
            Deed::Complete { bytes, seconds: retention, .. } => {
                let completion = Completion::new(number, seconds(retention)).bytes(bytes);
                owned(claim.complete(completion).await.unwrap())
            }
            Deed::Hold { seconds: retention, .. } => {
                owned(claim.hold(seconds(retention)).await.unwrap())
            }
            Deed::Release { .. } => owned(claim.release().await.unwrap()),
            _ => {
                drop(claim);
                Said::Nothing
            }
        }
    }
}

pub(super) fn id_of(entry: &Entry, model: &Model) -> OperationId {
    id(model.given[entry.claim].id)
}
