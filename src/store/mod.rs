//! Where entries live. In: an operation id with a fingerprint; out: the one atomic decision about
//! it. [`Store`] is the contract, [`MemoryStore`] the default; the [conformance
//! suite](crate::store::conformance) (feature `test-util`) is the contract as tests.

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
};

mod memory;

#[cfg(feature = "test-util")]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub mod conformance;

pub use memory::MemoryStore;

/// Holds the entries, generic over the value that a record keeps.
///
/// [`claim`](Store::claim) is the one step that decides; everything a store promises follows from
/// its being atomic:
///
/// - one id has at most one entry, and at most one claim on it is in flight;
/// - only the token of a claim settles it: a late or foreign settlement changes nothing and says
///   [`Ownership::Lost`];
/// - a record never changes, and nothing live is dropped to make room.
///
/// The engine puts a time-out around every call. A call may be dropped at any await; a store then
/// leaves either what was there before or what would be there after.
pub trait Store<V>: Send + Sync + 'static {
    /// What is under `id` right now: its fingerprint, or nothing. Advisory: the answer may be old
    /// when it arrives, so nothing is decided by it.
    fn lookup(&self, id: OperationId) -> StoreFuture<Option<Fingerprint>>;

    /// Is a look-up so cheap that it saves work to do one before each claim? Otherwise it is done
    /// only where a guard needs it.
    fn lookup_is_cheap(&self) -> bool;

    /// Claims `request.id`, or says what is there instead, in one atomic step. A claim repeated
    /// with the token of a claim that is still in flight is the same claim.
    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<V>>;

    /// Takes back a claim in flight whose answer never arrived, by its token. Nothing to take back
    /// is no error.
    fn withdraw(&self, id: OperationId, token: Token) -> StoreFuture<Ownership>;

    /// Ends the record or held entry that the claim with this token left.
    fn expire(&self, id: OperationId, token: Token) -> StoreFuture<Ownership>;

    /// Lets the record or held entry that the claim with this token left live for `retention` from
    /// now, longer or shorter than before.
    fn retain(&self, id: OperationId, token: Token, retention: Duration) -> StoreFuture<Ownership>;
}

/// The exclusive right to execute one operation. It ends in exactly one of complete, release and
/// hold.
pub trait Claim<V>: Send + Sync + 'static {
    /// Which execution of this operation it is that a store has seen begin without an end,
    /// counting from 1.
    fn attempt(&self) -> u32;

    /// Adds what the handler may need of this claim, such as a transaction, to the request's
    /// extensions. Adds nothing by default.
    fn extend(&mut self, _extensions: &mut http::Extensions) {}

    /// Records `value`, to live for `retention` from now.
    fn complete(self: Box<Self>, value: V, retention: Duration) -> StoreFuture<Ownership>;

    /// Ends the claim and leaves nothing: the next one runs.
    fn release(self: Box<Self>) -> StoreFuture<Ownership>;

    /// Ends the claim and keeps its id shut for `retention` from now: the outcome is unknown.
    fn hold(self: Box<Self>, retention: Duration) -> StoreFuture<Ownership>;
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
}

impl ClaimRequest {
    /// Asks for `id` in the name of `token`.
    #[must_use]
    pub fn new(id: OperationId, fingerprint: Fingerprint, token: Token) -> Self {
        Self { id, fingerprint, token }
    }
}

/// What a store answers to a claim.
#[non_exhaustive]
pub enum ClaimReply<V> {
    /// The caller executes.
    Mine(Box<dyn Claim<V>>),
    /// There is an entry, with another fingerprint: whatever its state.
    Conflict,
    /// The finished value.
    Recorded(V),
    /// An execution ended with an unknown outcome.
    Held,
    /// Another claim is in flight. The future resolves, at the latest, soon after that claim ends;
    /// it may resolve early, so the waiter claims again and sees.
    InFlight(StoreFuture<()>),
    /// No room for another entry, and nothing live is dropped for one.
    Full {
        /// How long until the earliest entry expires, where the store knows.
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
