//! Makes retries safe: runs a request once per idempotency key and replays its first answer.

#![cfg_attr(docsrs, feature(doc_cfg))]

/// Any error, boxed: what a request body's error has to turn into.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

// A request walks through these in order.
mod layer;
mod service;
mod future;
mod journey;
// What is read from it.
mod key;
pub mod scope;
mod operation;
mod intake;
mod fingerprint;
mod guard;
// One execution per operation.
mod engine;
pub mod store;
// What comes of it.
mod handle;
mod outcome;
mod capture;
mod follow;
mod replay;
mod headers;
mod refusal;
mod disposition;
// What all of them use.
mod body;
mod digest;
// What a framework needs besides.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub mod axum;

pub use body::{RequestBody, ResponseBody};
pub use disposition::{Disposition, Dispositions};
pub use engine::{InFlight, OnFailure, OnLeave};
pub use fingerprint::Fingerprint;
pub use future::ResponseFuture;
pub use guard::{Ceiling, Permit, PermitSlot};
pub use handle::Handle;
pub use headers::REPLAYED;
pub use key::IdempotencyKey;
pub use layer::IdempotencyLayer;
pub use operation::{OperationId, ParseOperationIdError, Token};
pub use outcome::{Outcome, RetainFor};
pub use refusal::{Refusal, Retry};
pub use replay::StoredResponse;
pub use scope::Scope;
pub use service::Idempotency;
pub use store::{MemoryStore, Store};
