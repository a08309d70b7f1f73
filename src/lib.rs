//! Makes retries safe: a tower layer that runs a request once per idempotency key and replays its
//! first answer, for axum, hyper and tonic.
//!
//! A client sends `POST /v1/runs`, the server does the work, the answer is lost. The client retries
//! with the same `Idempotency-Key`, and gets the first answer again; the work happens once.
//!
//! - Retries are answered even while the service is too busy for new work.
//! - Work that was begun is finished and recorded although its caller leaves.
//! - The same key for another request is refused; JSON bodies are compared by meaning.
//! - Bounded: at the cap new keys are refused, and nothing live is dropped.
//!
//! # With axum
//!
//! ```
//! use std::time::Duration;
//!
//! use axum::{Router, http::StatusCode, routing::post};
//! use tower_idempotency::{Handle, IdempotencyLayer, MemoryStore, Scope};
//!
//! async fn start_run(handle: Option<Handle>) -> StatusCode {
//!     if let Some(handle) = handle {
//!         // From here a failure is not run again, but held.
//!         handle.effects_begin();
//!     }
//!     StatusCode::ACCEPTED
//! }
//!
//! // Who is calling is what your authentication has put into the request's extensions.
//! #[derive(Clone)]
//! struct UserId(u64);
//!
//! let idempotency = IdempotencyLayer::new(|parts| {
//!     let user: &UserId = parts.extensions.get()?;
//!     Some(Scope::new(user.0.to_be_bytes()))
//! })
//! .retention(Duration::from_secs(60 * 60))
//! .store(MemoryStore::new().capacity(36_000));
//!
//! let app: Router = Router::new().route("/v1/runs", post(start_run)).layer(idempotency);
//! # drop(app);
//! ```
//!
//! # With hyper
//!
//! The handler's request has the body [`RequestBody<Incoming>`](RequestBody); everything else stays
//! as it is.
//!
//! ```
//! use std::convert::Infallible;
//!
//! use bytes::Bytes;
//! use http_body_util::{BodyExt, Full};
//! use hyper::{Request, Response, body::Incoming};
//! use hyper_util::service::TowerToHyperService;
//! use tower::{Layer, service_fn};
//! use tower_idempotency::{IdempotencyLayer, RequestBody, scope};
//!
//! async fn echo(
//!     request: Request<RequestBody<Incoming>>,
//! ) -> Result<Response<Full<Bytes>>, Infallible> {
//!     let body = request.into_body().collect().await.map(|body| body.to_bytes());
//!     Ok(Response::new(Full::new(body.unwrap_or_default())))
//! }
//!
//! let layer = IdempotencyLayer::new(scope::single_tenant());
//! let service = TowerToHyperService::new(layer.layer(service_fn(echo)));
//! # fn serves(_: impl hyper::service::Service<Request<Incoming>>) {}
//! # serves(service);
//! ```
//!
//! # The journey of a request
//!
//! ```text
//! request ─▶ guarded? ── no ─▶ inner service, untouched
//!    │ key ─▶ 400   scope ─▶ 403   declared length ─▶ 413
//!    │ something there already?  no, and the guard is full ─▶ 429, body never read
//!    │ body, read and digested ─▶ 413, 400, 408        nothing is held meanwhile
//!    ▼
//!  CLAIM ─┬─ other fingerprint ─▶ 409 conflict
//!         ├─ record ────────────▶ replay               tombstone ─▶ 409 not_replayable
//!         ├─ held ──────────────▶ 409 outcome_unknown
//!         ├─ in flight ─────────▶ wait, then as above, or back to the claim
//!         ├─ full ──────────────▶ 503 capacity
//!         └─ mine ─▶ permit of the guard ─▶ readiness ─▶ inner service
//!                       ─▶ capture ─▶ record, release or hold ─▶ answer
//! ```
//!
//! Everything that the layer answers itself is a response, a [`Refusal`]; the service's error stays
//! the inner one.
//!
//! # Where it goes in a stack
//!
//! Outside to inside: tracing, compression, CORS, authentication, **idempotency**, rate limit,
//! concurrency limit, time-out, handler. `ServiceBuilder` lists layers in this order;
//! `Router::layer` calls in the reverse one.
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `axum` | no | [`axum`](mod@crate::axum): extractors, a layer that restores axum's body, original URIs under nested routers |
//! | `tracing` | no | events for operators: the store fills up or fails, the mode is switched |
//! | `test-util` | no | [`store::conformance`]: the contract of a store as tests |

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Any error, boxed: what a request body's error has to turn into.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

// A request walks through these in order.
mod layer;
mod settings;
mod service;
mod future;
mod journey;
mod shadow;
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
mod executing;
mod capture;
mod follow;
mod record;
mod replay;
mod headers;
mod refusal;
mod disposition;
// What all of them use.
mod body;
mod buffer;
mod collect;
mod hook;
mod notice;
mod digest;
#[cfg(not(shuttle))]
mod sync;
#[cfg(shuttle)]
#[doc(hidden)]
pub mod sync;
// What a framework, or a browser, needs besides.
pub mod cors;
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
pub mod axum;

pub use body::{RequestBody, ResponseBody};
pub use disposition::{Disposition, Dispositions};
pub use engine::{Detached, Done, Engine, InFlight, OnFailure, OnLeave, Operation, RunError};
pub use fingerprint::Fingerprint;
pub use future::ResponseFuture;
pub use guard::{Ceiling, Permit, PermitSlot};
pub use handle::Handle;
pub use headers::REPLAYED;
pub use key::{IdempotencyKey, InvalidKey};
pub use layer::IdempotencyLayer;
pub use operation::{OperationId, ParseOperationIdError, Token};
pub use outcome::{Outcome, RetainFor};
pub use record::StoredResponse;
pub use refusal::{Reason, Refusal, Retry, error_object, problem_json};
pub use scope::{Scope, ScopeId};
pub use service::Idempotency;
pub use settings::Mode;
pub use store::{MemoryStore, Store};
