//! Where entries live. In: an operation id with a fingerprint; out: the one atomic decision about
//! it. [`Store`] is the contract, [`MemoryStore`] the default; `conformance` (feature
//! `test-util`) is the contract as tests, for any store.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use crate::{
    fingerprint::Fingerprint,
    operation::{OperationId, Token},
    scope::ScopeId,
};

mod memory;

#[cfg(feature = "test-util")]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub mod conformance;

pub use memory::MemoryStore;

/// Holds the entries, generic over the value that a record keeps.
///
/// There is at most one entry under an id: a claim in flight, a held entry, or a record. (A
/// tombstone is a record whose value says that there is no response to replay.) What a store
/// promises of them, and the suite in `store::conformance` (feature `test-util`) checks:
///
/// - **One owner.** [`claim`](Store::claim) is one atomic step. Of claims that race for an id,
///   exactly one wins, also when they find an entry that has just ended; the others change
///   nothing, whatever they were answered and whatever becomes of the answer.
/// - **Fenced.** Only the token of a claim settles it, and only once. Whoever comes later, or with
///   another token, changes nothing and is told [`Ownership::Lost`], whatever is there by then.
/// - **Written once.** A record gives back its value, the same to everybody, until it ends.
/// - **By its retention.** A record or held entry lives from its settlement for as long as was said
///   then, or last with [`retain`](Store::retain): not from the claim, and no longer for being
///   asked about. Zero leaves nothing; [`Duration::MAX`] is as good as for ever. A claim in flight
///   has no retention. An entry that has ended is as if it had never been: no conflict, no room
///   taken, nothing to settle, retain or expire, whether it has been cleared or not.
/// - **Never evicting.** Every live entry takes room, whatever its state, and every end gives it
///   back. Where there is none, a new id is refused, nothing live is dropped, and the refusal
///   leaves nothing behind. Ids that have an entry are answered all the same.
/// - **Heard by all.** Every end of a claim wakes everybody who was told that it is in flight.
/// - **All or nothing.** A call may be dropped at any await: it leaves what was there before or
///   what would be there after. The engine drops calls, for it puts a time-out around each.
///
/// An id is 32 bytes, all of which count and which are not text. Fingerprints are the same if they
/// compare equal (`==`), which is not to say that all of their bytes are.
///
/// A store that cannot read what it finds answers with an error, never with a claim: its caller
/// refuses the request, and nothing runs unprotected.
pub trait Store<V>: Send + Sync + 'static {
    /// What is under `id`: the whole fingerprint that it was claimed with, or nothing. It changes
    /// nothing and claims nothing.
    ///
    /// It sees what was there at some moment between call and answer, so nothing is decided by it.
    /// It is done only where a guard needs it.
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>>;

    /// The value recorded under `id`, if it was claimed with the same [exact](Fingerprint::exact)
    /// digest: what [`claim`](Store::claim) would answer. So a repeat of the very same bytes is
    /// recognised before their meaning is read. It changes nothing and claims nothing; `None`
    /// decides nothing. Asked for every request before its claim, so only for a store that can say
    /// so at once. Default: `None`.
    fn recall(&self, id: &OperationId, exact: &[u8; 32]) -> Option<V> {
        let _ = (id, exact);
        None
    }

    /// Does it give each scope a share of its room? Only then is a claim asked with its scope.
    /// Default: no.
    fn counts_scopes(&self) -> bool {
        false
    }

    /// Claims `request.id`, or says what is there instead, in one atomic step.
    ///
    /// Where several answers hold, the first of these is given: [`Mine`](ClaimReply::Mine) to the
    /// token of the claim in flight, [`Conflict`](ClaimReply::Conflict), what is there,
    /// [`Full`](ClaimReply::Full).
    ///
    /// A claim repeated with the token of a claim in flight is the same claim: the same attempt, no
    /// room taken, and either of the two settles it, for both. So a request whose answer was lost
    /// may be sent again. Once it has been settled, its token is a token like any other here.
    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<V>>;

    /// Takes back a claim in flight whose answer never arrived, by its token, and leaves nothing.
    /// [`Ownership::Lost`] if there is no claim of that token in flight, which is no error.
    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership>;

    /// Ends the record or held entry that the claim with this token left. [`Ownership::Lost`] if
    /// there is none, also while that claim is in flight.
    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership>;

    /// Lets the record or held entry that the claim with this token left live for `retention` from
    /// now, longer or shorter than before. [`Ownership::Lost`] if there is none, also while that
    /// claim is in flight; what has ended is not revived.
    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership>;
}

/// The exclusive right to execute one operation. It ends in exactly one of complete, release and
/// hold.
///
/// Dropped unsettled, it ends by itself and leaves nothing: at once in a store whose entries end
/// with its process; elsewhere within a lease, for a process that dies drops nothing. A claim that
/// is over ends nothing of others when it is dropped. While its owner lives it goes on, however
/// long that takes: a store with leases renews them.
pub trait Claim<V>: Send + Sync + 'static {
    /// Which execution of this operation it is, counting from 1 and only those that the store saw
    /// begin and not end: above 1, an earlier one was abandoned. After a settlement, or a
    /// withdrawal, it is 1 again.
    fn attempt(&self) -> u32;

    /// Adds what the handler may need of this claim, such as a transaction, to the request's
    /// extensions. Adds nothing by default.
    fn extend(&mut self, _extensions: &mut http::Extensions) {}

    /// Records a value, to live for its retention from now. On an error it may be there all the
    /// same; and dropped before it has answered, it must not release: the work has been done.
    fn complete(self: Box<Self>, completion: Completion<V>) -> StoreFuture<Ownership>;

    /// Ends the claim and leaves nothing: the next one runs.
    fn release(self: Box<Self>) -> StoreFuture<Ownership>;

    /// Ends the claim and keeps its id shut for `retention` from now: the outcome is unknown.
    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership>;
}

/// What a claim is completed with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Completion<V> {
    /// What the record keeps.
    pub value: V,
    /// How long it lives, from now.
    pub retention: Duration,
    /// About how many bytes of memory the value takes, for a store that budgets them.
    pub bytes: usize,
}

impl<V> Completion<V> {
    /// Records `value` for `retention`. It counts with the size of its type.
    #[must_use]
    pub fn new(value: V, retention: Duration) -> Self {
        Self { value, retention, bytes: size_of::<V>() }
    }

    /// Says how many bytes the value takes, what it points to included.
    #[must_use]
    pub fn bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }
}

/// What a claim is asked with.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ClaimRequest {
    /// The operation.
    pub id: OperationId,
    /// What the request asks for.
    pub fingerprint: Fingerprint,
    /// The token that the claim is fenced with.
    pub token: Token,
    /// The scope of the operation, where it has one, for a store that gives each scope a share of
    /// its room.
    pub scope: Option<ScopeId>,
}

impl ClaimRequest {
    /// Asks for `id` in the name of `token`.
    #[must_use]
    pub fn new(id: OperationId, fingerprint: Fingerprint, token: Token) -> Self {
        Self { id, fingerprint, token, scope: None }
    }

    /// Counts the entry to the share of `scope`.
    #[must_use]
    pub fn in_scope(self, scope: Option<ScopeId>) -> Self {
        Self { scope, ..self }
    }
}

/// What a store answers to a claim.
#[non_exhaustive]
pub enum ClaimReply<V> {
    /// The caller executes.
    Mine(Box<dyn Claim<V>>),
    /// There is an entry, with another fingerprint, whatever its state. It stays as it was.
    Conflict,
    /// The finished value.
    Recorded(V),
    /// An execution ended with an unknown outcome.
    Held,
    /// Another claim is in flight. The future resolves, at the latest, soon after that claim ends,
    /// also if it ended before the first poll. It may resolve early, so the waiter claims again and
    /// sees; but not again and again, for then the waiter would be busy.
    InFlight(StoreFuture<()>),
    /// No room for another entry, and nothing live is dropped for one.
    Full {
        /// How long until entries that expire will have made room, where the store knows: never
        /// more, and when it is over there is room.
        room_in: Option<Duration>,
    },
}

impl<V> fmt::Debug for ClaimReply<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mine(_) => "Mine",
            Self::Conflict => "Conflict",
            Self::Recorded(_) => "Recorded",
            Self::Held => "Held",
            Self::InFlight(_) => "InFlight",
            Self::Full { .. } => "Full",
        })
    }
}

/// Was the claim still the caller's when it settled it?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a lost claim means that nothing was written"]
pub enum Ownership {
    /// Yes, and it is done.
    Held,
    /// No: it had ended or been taken over, and nothing was changed.
    Lost,
}

/// The answer of a store call: there at once, without an allocation, or a boxed future.
#[must_use = "futures do nothing unless polled"]
pub struct StoreFuture<T>(Answer<T>);

enum Answer<T> {
    Ready(Option<Result<T, StoreError>>),
    Pending(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> StoreFuture<T> {
    /// An answer that is there already.
    pub fn ready(answer: T) -> Self {
        Self(Answer::Ready(Some(Ok(answer))))
    }

    /// A failure that is known already.
    pub fn failed(error: StoreError) -> Self {
        Self(Answer::Ready(Some(Err(error))))
    }

    pub(crate) fn is_there(&self) -> bool {
        matches!(self.0, Answer::Ready(_))
    }

    /// Takes the answer, if it is there already.
    pub(crate) fn at_once(&mut self) -> Option<Result<T, StoreError>> {
        match &mut self.0 {
            Answer::Ready(answer) => answer.take(),
            Answer::Pending(_) => None,
        }
    }

    /// An answer that has to be waited for.
    pub fn new(answer: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(Answer::Pending(Box::pin(answer)))
    }
}

// The answer is moved out of its place, never pinned in it.
impl<T> Unpin for StoreFuture<T> {}

impl<T> Future for StoreFuture<T> {
    type Output = Result<T, StoreError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.get_mut().0 {
            Answer::Ready(answer) => Poll::Ready(answer.take().expect("polled after completion")),
            Answer::Pending(answer) => answer.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for StoreFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreFuture").finish_non_exhaustive()
    }
}

/// A store did not answer, or answered with an error. Its source is the store's own error.
#[derive(Debug)]
pub struct StoreError {
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl StoreError {
    /// The store failed with `source`.
    pub fn new(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self { source: Some(source.into()) }
    }

    pub(crate) fn timed_out() -> Self {
        Self { source: None }
    }

    /// Did the store not answer in time?
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        self.source.is_none()
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_timeout() {
            "the idempotency store did not answer in time"
        } else {
            "the idempotency store failed"
        })
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
