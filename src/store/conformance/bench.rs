//! What the cases put a store on. In: plain steps (own this id, put that entry there, what is seen
//! now?); out: what was found, or what is [`Broken`] about it.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use super::{Broken, Checked, Suite};
use crate::{
    fingerprint::Fingerprint,
    operation::{OperationId, Token},
    scope::Scope,
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, Store, StoreFuture},
};

/// What can be recorded here.
pub(super) trait Value: Clone + PartialEq + fmt::Debug + Send + Sync + 'static {}

impl<V: Clone + PartialEq + fmt::Debug + Send + Sync + 'static> Value for V {}

/// Room enough where a case is not about room.
pub(super) const ROOMY: usize = 200;

/// So many ticks are longer than any case takes.
pub(super) const LONG: u32 = 10_000;

/// One of many ids.
pub(super) fn id(number: u8) -> OperationId {
    OperationId::new(&Scope::new("conformance"), &number.to_string())
}

/// What is asked for, unless a case says otherwise.
pub(super) fn asked() -> Fingerprint {
    Fingerprint::of(["asked"])
}

/// What something else is asked for with.
pub(super) fn other() -> Fingerprint {
    Fingerprint::of(["other"])
}

/// A store that is examined.
pub(super) struct Bench<'s, V> {
    pub(super) suite: &'s Suite<V>,
    pub(super) store: Arc<dyn Store<V>>,
}

/// A claim that was won.
pub(super) struct Own<V: 'static> {
    pub(super) token: Token,
    pub(super) claim: Box<dyn Claim<V>>,
}

impl<V: 'static> Own<V> {
    pub(super) async fn complete(self, value: V, retention: Duration) -> Checked<Ownership> {
        Ok(self.claim.complete(Completion::new(value, retention)).await?)
    }

    pub(super) async fn release(self) -> Checked<Ownership> {
        Ok(self.claim.release().await?)
    }

    pub(super) async fn hold(self, retention: Duration) -> Checked<Ownership> {
        Ok(self.claim.hold(retention).await?)
    }
}

/// What a claim was answered.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Seen<V> {
    /// Nothing was there: the claim was won.
    Nothing,
    Conflict,
    Recorded(V),
    Held,
    InFlight,
    Full,
}

impl<V: Value> Seen<V> {
    pub(super) fn of(reply: &ClaimReply<V>) -> Self {
        match reply {
            ClaimReply::Mine(_) => Self::Nothing,
            ClaimReply::Conflict => Self::Conflict,
            ClaimReply::Recorded(value) => Self::Recorded(value.clone()),
            ClaimReply::Held => Self::Held,
            ClaimReply::InFlight(_) => Self::InFlight,
            ClaimReply::Full { .. } => Self::Full,
        }
    }
}

/// The states that an entry can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    InFlight,
    Held,
    Recorded,
}

impl State {
    pub(super) const ALL: [Self; 3] = [Self::InFlight, Self::Held, Self::Recorded];

    /// Those of an entry that lives on without a claim.
    pub(super) const LEFT: [Self; 2] = [Self::Held, Self::Recorded];
}

/// An entry that a case has put there.
pub(super) struct Put<V: 'static> {
    pub(super) token: Token,
    /// How it looks to others.
    pub(super) seen: Seen<V>,
    /// There while it is in flight.
    pub(super) own: Option<Own<V>>,
}

impl<'s, V: Value> Bench<'s, V> {
    pub(super) fn new(suite: &'s Suite<V>, store: Arc<dyn Store<V>>) -> Self {
        Self { suite, store }
    }

    pub(super) fn long(&self) -> Duration {
        self.suite.ticks(LONG)
    }

    pub(super) async fn claim(
        &self,
        id: OperationId,
        fingerprint: Fingerprint,
        token: Token,
    ) -> Checked<ClaimReply<V>> {
        Ok(self.store.claim(ClaimRequest::new(id, fingerprint, token)).await?)
    }

    /// Claims `id`, which nothing may stand in the way of.
    pub(super) async fn own(&self, id: OperationId) -> Checked<Own<V>> {
        let token = Token::mint();
        match self.claim(id, asked(), token).await? {
            ClaimReply::Mine(claim) => Ok(Own { token, claim }),
            reply => Err(Broken(format!(
                "a claim with nothing in its way was answered {:?}",
                Seen::of(&reply)
            ))),
        }
    }

    /// Puts an entry under `id`, to live for `retention` once it is settled.
    pub(super) async fn put(
        &self,
        id: OperationId,
        state: State,
        retention: Duration,
    ) -> Checked<Put<V>> {
        let own = self.own(id).await?;
        let token = own.token;
        let value = self.suite.value(1);
        let (seen, own, said) = match state {
            State::InFlight => (Seen::InFlight, Some(own), Ownership::Held),
            State::Held => (Seen::Held, None, own.hold(retention).await?),
            State::Recorded => {
                let said = own.complete(value.clone(), retention).await?;
                (Seen::Recorded(value), None, said)
            }
        };
        must(said, Ownership::Held, "the owner's settlement")?;
        Ok(Put { token, seen, own })
    }

    /// What a newcomer sees who asks for `fingerprint`. It leaves nothing behind.
    pub(super) async fn sees(&self, id: OperationId, fingerprint: Fingerprint) -> Checked<Seen<V>> {
        let reply = self.claim(id, fingerprint, Token::mint()).await?;
        let seen = Seen::of(&reply);
        if let ClaimReply::Mine(claim) = reply {
            must(claim.release().await?, Ownership::Held, "the release of a claim just won")?;
        }
        Ok(seen)
    }

    /// A newcomer has to see this.
    pub(super) async fn finds(
        &self,
        id: OperationId,
        promised: &Seen<V>,
        when: impl fmt::Display,
    ) -> Checked {
        must(&self.sees(id, asked()).await?, promised, when)
    }

    /// A newcomer has to see this in the end, at most after the lease.
    pub(super) async fn finds_within_the_lease(
        &self,
        id: OperationId,
        promised: &Seen<V>,
        when: impl fmt::Display,
    ) -> Checked {
        let mut waited = Duration::ZERO;
        loop {
            let seen = self.sees(id, asked()).await?;
            if seen == *promised || waited > self.suite.lease {
                return must(&seen, promised, when);
            }
            self.suite.pass(1).await;
            waited += self.suite.tick;
        }
    }

    pub(super) async fn looks_up(
        &self,
        id: OperationId,
        promised: Option<Fingerprint>,
        when: impl fmt::Display,
    ) -> Checked {
        let found = self.store.lookup(id).await?;
        match (found.map(|it| it.to_bytes()), promised.map(|it| it.to_bytes())) {
            (found, promised) if found == promised => Ok(()),
            (None, Some(_)) => Err(Broken(format!("{when}: a look-up finds nothing"))),
            (Some(_), None) => Err(Broken(format!("{when}: a look-up finds an entry"))),
            _ => Err(Broken(format!("{when}: a look-up finds another fingerprint"))),
        }
    }

    pub(super) async fn withdraw(&self, id: OperationId, token: Token) -> Checked<Ownership> {
        Ok(self.store.withdraw(id, token).await?)
    }

    pub(super) async fn expire(&self, id: OperationId, token: Token) -> Checked<Ownership> {
        Ok(self.store.expire(id, token).await?)
    }

    pub(super) async fn retain(
        &self,
        id: OperationId,
        token: Token,
        retention: Duration,
    ) -> Checked<Ownership> {
        Ok(self.store.retain(id, token, retention).await?)
    }
}

/// What was found has to be what is promised.
#[allow(clippy::needless_pass_by_value, reason = "most of what is compared was just made")]
pub(super) fn must<T: PartialEq + fmt::Debug>(
    found: T,
    promised: T,
    when: impl fmt::Display,
) -> Checked {
    if found == promised {
        return Ok(());
    }
    Err(Broken(format!("{when}: {found:?} was found, {promised:?} is promised")))
}

/// Polls `answer` so often, with time in between for others to run. The answer, if it came.
pub(super) async fn polled<T>(answer: &mut StoreFuture<T>, times: usize) -> Option<Checked<T>> {
    for _ in 0..times {
        if let Poll::Ready(answer) =
            poll_fn(|context| Poll::Ready(Pin::new(&mut *answer).poll(context))).await
        {
            return Some(answer.map_err(Broken::from));
        }
        tokio::task::yield_now().await;
    }
    None
}
