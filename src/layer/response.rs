//! The setters for what goes out: what is recorded of an answer, how it is given again, and how the
//! layer's own answers look.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, request::Parts, response};

use super::IdempotencyLayer;
use crate::{
    outcome::{Outcome, Policy},
    refusal::{Reason, Refusal},
};

impl IdempotencyLayer {
    /// The largest response body that is recorded, in bytes. A larger one is delivered in full and
    /// leaves a tombstone: a repeat gets 409 `idempotency_not_replayable`, with the first answer's
    /// `Location`. Default: 1 MiB.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn response_limit(self, bytes: usize) -> Self {
        assert!(bytes > 0, "response_limit: has to be more than 0 bytes");
        self.set(|settings| settings.capture.limit = bytes)
    }

    /// Are responses of unknown length (event streams, chunked bodies) recorded, when they have
    /// ended within the limit? Otherwise they leave a tombstone. Either way they are delivered as
    /// they come. Default: yes.
    pub fn record_streams(self, record: bool) -> Self {
        self.set(|settings| settings.capture.streams = record)
    }

    /// What a response means for its operation, by its head: an outcome, or `None`, and then the
    /// default holds (2xx, 3xx and 402 are recorded, 408 and 5xx are failures, every other 4xx
    /// frees the key). What the handler says itself ([`Outcome`](crate::Outcome)) goes before it,
    /// and after `effects_begin()` it releases nothing. One that panics says nothing.
    pub fn outcome_of<F>(self, policy: F) -> Self
    where
        F: Fn(&response::Parts) -> Option<Outcome> + Send + Sync + 'static,
    {
        self.set(|settings| settings.capture.policy = Some(Policy::Own(Arc::new(policy))))
    }

    /// Which headers a record keeps: `Some(true)` keeps, `Some(false)` drops, and where it says
    /// nothing the default holds (see the README). Framing, connection fields and the marker are
    /// never kept. Of a response that is too long to be recorded, only `Location` can be. One
    /// that panics says nothing.
    pub fn keep_header<F>(self, policy: F) -> Self
    where
        F: Fn(StatusCode, &HeaderName) -> Option<bool> + Send + Sync + 'static,
    {
        self.set(|settings| settings.capture.headers.own = Some(Arc::new(policy)))
    }

    /// Rewrites the head of each replay, with the request that it answers; for example to say what
    /// became of a run since. The record stays as it is. By default a replay is the first answer,
    /// byte for byte. One that panics has rewritten nothing.
    pub fn on_replay<F>(self, rewrite: F) -> Self
    where
        F: Fn(&Parts, &mut response::Parts) + Send + Sync + 'static,
    {
        self.set(|settings| settings.on_replay = Some(Arc::new(rewrite)))
    }

    /// How the layer's own answers look: [`problem_json`](crate::problem_json) (the default),
    /// [`error_object`](crate::error_object), or a function of your own, which may start from
    /// [`Refusal::response`]. If it panics, the default is sent.
    pub fn refusals<F>(self, render: F) -> Self
    where
        F: Fn(&Refusal) -> Response<Bytes> + Send + Sync + 'static,
    {
        self.set(|settings| settings.rendering.renderer = Some(Arc::new(render)))
    }

    /// Another status for one reason to refuse. Default: the README's table.
    ///
    /// # Panics
    ///
    /// If it is not a 4xx or 5xx: a refusal must not look like a success.
    #[track_caller]
    pub fn refusal_status(self, reason: Reason, status: StatusCode) -> Self {
        let is_error = status.is_client_error() || status.is_server_error();
        assert!(is_error, "refusal_status: {status} does not look like an error");
        self.set(|settings| settings.rendering.statuses.push((reason, status)))
    }

    /// Where the service's use of idempotency keys is written down: each refusal then has a `Link`
    /// with `rel="describedby"` (draft-07, section 2.7). Default: none.
    ///
    /// # Panics
    ///
    /// If it is not a URI.
    #[track_caller]
    pub fn documentation(self, uri: &str) -> Self {
        let link = HeaderValue::from_str(&format!("<{uri}>; rel=\"describedby\"")).ok();
        let link = link.filter(|_| uri.parse::<http::Uri>().is_ok());
        assert!(link.is_some(), "documentation: {uri:?} is not a URI");
        self.set(|settings| settings.rendering.documentation = link)
    }
}
