//! Every answer that the layer gives by itself. In: why; out: a response that a person, a program
//! and the common SDKs understand: `application/problem+json` (RFC 9457), or what the user renders.

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE, LINK, LOCATION, RETRY_AFTER},
};
use http_body::Body;

use crate::{
    body::ResponseBody, disposition::Disposition, hook::quietly, key::InvalidKey, outcome,
};

/// A request that the layer answered itself, with the inner service not called.
///
/// It is in the extensions of its response, for outer layers to log or rewrite. It holds no key,
/// no credential and nothing of anybody's request or response but a tombstone's `Location`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    reason: Reason,
    status: StatusCode,
    detail: &'static str,
    retry_after: Option<u64>,
    location: Option<HeaderValue>,
    documentation: Option<HeaderValue>,
}

/// What a client may do after a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retry {
    /// Send the same request with the same key again.
    SameKey,
    /// Correct the request and send it with a new key.
    NewKey,
    /// Do not send it again.
    Never,
}

impl Retry {
    /// The value of the member `retry`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameKey => "same-key",
            Self::NewKey => "new-key",
            Self::Never => "never",
        }
    }
}

/// Why a request is refused: the closed list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// 400: a key is required.
    KeyMissing,
    /// 400: the key is empty, malformed, too long, or there are several.
    KeyInvalid,
    /// 403: it is not known whose key it is.
    NoScope,
    /// 413: the request's body is over the limit.
    TooLarge,
    /// 400: the request's body broke off.
    Unreadable,
    /// 408: the request's body was too slow.
    TooSlow,
    /// 409: the key was used for another request.
    Conflict,
    /// 409: the first execution is still running.
    InProgress,
    /// 409: done, but the response was not kept.
    NotReplayable,
    /// 409: the outcome of the first execution is unknown.
    OutcomeUnknown,
    /// 429: the guard has no room for new work.
    Ceiling,
    /// 503: no room for another entry, or for another body.
    Capacity,
    /// 503: the store failed before the inner service was called.
    StoreUnavailable,
}

/// What each reason looks like to the caller, and in the counts.
struct Row {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    retry: Retry,
    disposition: Disposition,
    /// The status code for a gRPC client.
    grpc: u16,
}

impl Reason {
    #[rustfmt::skip]
    const fn row(self) -> Row {
        use Retry::{Never, NewKey, SameKey};
        use Disposition as D;
        use StatusCode as S;
        let (status, code, title, retry, disposition, grpc) = match self {
            Self::KeyMissing => (S::BAD_REQUEST, "idempotency_key_missing", "Idempotency key missing", NewKey, D::RejectedKey, 3),
            Self::KeyInvalid => (S::BAD_REQUEST, "idempotency_key_invalid", "Idempotency key invalid", NewKey, D::RejectedKey, 3),
            Self::NoScope => (S::FORBIDDEN, "idempotency_scope_unavailable", "No scope for the idempotency key", Never, D::RejectedScope, 7),
            Self::TooLarge => (S::PAYLOAD_TOO_LARGE, "idempotency_body_too_large", "Request body too large", Never, D::TooLarge, 11),
            Self::Unreadable => (S::BAD_REQUEST, "idempotency_body_unreadable", "Request body unreadable", SameKey, D::Unreadable, 15),
            Self::TooSlow => (S::REQUEST_TIMEOUT, "idempotency_body_unreadable", "Request body too slow", SameKey, D::Unreadable, 4),
            Self::Conflict => (S::CONFLICT, "idempotency_conflict", "Idempotency key used for another request", NewKey, D::Conflict, 6),
            Self::InProgress => (S::CONFLICT, "idempotency_in_progress", "First request still in progress", SameKey, D::InProgress, 10),
            Self::NotReplayable => (S::CONFLICT, "idempotency_not_replayable", "Done, but the response was not kept", Never, D::NotReplayable, 9),
            Self::OutcomeUnknown => (S::CONFLICT, "idempotency_outcome_unknown", "Outcome of the first request unknown", Never, D::OutcomeUnknown, 2),
            Self::Ceiling => (S::TOO_MANY_REQUESTS, "concurrency_limit", "Too much work in progress", SameKey, D::Ceiling, 8),
            Self::Capacity => (S::SERVICE_UNAVAILABLE, "idempotency_capacity", "No room for another idempotency key", SameKey, D::Capacity, 8),
            Self::StoreUnavailable => (S::SERVICE_UNAVAILABLE, "idempotency_store_unavailable", "Idempotency store unavailable", SameKey, D::StoreUnavailable, 14),
        };
        Row { status, code, title, retry, disposition, grpc }
    }
}

/// The shortest and the longest wait that a capacity refusal asks for, in seconds.
const SHORTEST_WAIT: u64 = 1;
const LONGEST_WAIT: u64 = 60;

impl Refusal {
    const fn new(reason: Reason, detail: &'static str) -> Self {
        let status = reason.row().status;
        Self { reason, status, detail, retry_after: None, location: None, documentation: None }
    }

    fn come_back_in(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    pub(crate) fn key_missing() -> Self {
        Self::new(Reason::KeyMissing, "This request needs an Idempotency-Key header.")
    }

    pub(crate) fn key_invalid(invalid: InvalidKey) -> Self {
        Self::new(Reason::KeyInvalid, invalid.reason)
    }

    pub(crate) fn no_scope() -> Self {
        Self::new(Reason::NoScope, "A request with an idempotency key has to say whose it is.")
    }

    pub(crate) fn body_too_large() -> Self {
        Self::new(
            Reason::TooLarge,
            "With an idempotency key the request body is read before anything is done, and this \
             one is over the limit. Nothing was done.",
        )
    }

    pub(crate) fn body_unreadable() -> Self {
        Self::new(Reason::Unreadable, "The request body broke off. Nothing was done.")
    }

    pub(crate) fn body_too_slow() -> Self {
        Self::new(Reason::TooSlow, "The request body took too long to arrive. Nothing was done.")
    }

    pub(crate) fn conflict() -> Self {
        Self::new(
            Reason::Conflict,
            "This idempotency key was used for another request. A key is for one request and its \
             retries.",
        )
    }

    pub(crate) fn in_progress() -> Self {
        Self::new(
            Reason::InProgress,
            "The first request with this idempotency key is still being worked on. Its answer \
             will be given to a later retry.",
        )
        .come_back_in(SHORTEST_WAIT)
    }

    pub(crate) fn not_replayable(location: Option<HeaderValue>) -> Self {
        let refusal = Self::new(
            Reason::NotReplayable,
            "The first request with this idempotency key was done, but its response could not be \
             kept. It was not done again.",
        );
        Self { location, ..refusal }
    }

    pub(crate) fn outcome_unknown() -> Self {
        Self::new(
            Reason::OutcomeUnknown,
            "The first request with this idempotency key ended without a known outcome. It may \
             have been done, so it was not done again.",
        )
    }

    pub(crate) fn ceiling() -> Self {
        Self::new(Reason::Ceiling, "No new work is taken on right now. Nothing was done.")
            .come_back_in(SHORTEST_WAIT)
    }

    pub(crate) fn capacity(room_in: Option<Duration>) -> Self {
        // Rounded up: a client that comes back too early is refused again.
        let seconds = room_in
            .map_or(0, |wait| wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)));
        Self::new(
            Reason::Capacity,
            "No further idempotency key can be kept right now. Nothing was done.",
        )
        .come_back_in(seconds.clamp(SHORTEST_WAIT, LONGEST_WAIT))
    }

    pub(crate) fn store_unavailable() -> Self {
        Self::new(
            Reason::StoreUnavailable,
            "Whether this request has been done before cannot be found out right now. Nothing was \
             done.",
        )
    }

    /// Why.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// The response's status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The member `code`, such as `idempotency_conflict`: stable, for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.reason.row().code
    }

    /// The member `title`: what happened, in a few words.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.reason.row().title
    }

    /// The member `detail`: what happened and what it means, for a person.
    #[must_use]
    pub fn detail(&self) -> &'static str {
        self.detail
    }

    /// The member `retry`: what a client may do now.
    #[must_use]
    pub fn retry(&self) -> Retry {
        self.reason.row().retry
    }

    /// In how many seconds it is worth coming back, where that is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.retry_after
    }

    /// A response with this refusal's status, its headers and the given body: what a renderer
    /// starts from.
    ///
    /// The headers are `Content-Type`, `Cache-Control: no-store`, and where they apply
    /// `Retry-After`, `Location`, `Link` with `rel="describedby"`, and those that stop the SDKs
    /// which would retry in vain.
    #[must_use]
    pub fn response(&self, content_type: &'static str, body: impl Into<Bytes>) -> Response<Bytes> {
        let mut response = Response::new(body.into());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if self.retry() != Retry::SameKey {
            // SDKs that would retry a 409 by themselves look for these.
            for name in ["stripe-should-retry", "x-should-retry"] {
                headers.insert(HeaderName::from_static(name), HeaderValue::from_static("false"));
            }
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(location) = &self.location {
            headers.insert(LOCATION, location.clone());
        }
        if let Some(link) = &self.documentation {
            headers.insert(LINK, link.clone());
        }
        response
    }

    pub(crate) fn disposition(&self) -> Disposition {
        self.reason.row().disposition
    }

    /// The refusal with what has been set for all of them.
    pub(crate) fn with(mut self, rendering: &Rendering) -> Self {
        let changed = rendering.statuses.iter().rev().find(|(reason, _)| *reason == self.reason);
        if let Some((_, status)) = changed {
            self.status = *status;
        }
        self.documentation.clone_from(&rendering.documentation);
        self
    }

    /// The response that the caller of `request` gets.
    pub(crate) fn into_response<B: Body>(
        self,
        rendering: &Rendering,
        request: &HeaderMap,
    ) -> Response<ResponseBody<B>> {
        let refusal = self.with(rendering);
        let asked_in_grpc =
            request.get(CONTENT_TYPE).is_some_and(|kind| outcome::is_grpc(kind.as_bytes()));
        let response = if asked_in_grpc {
            grpc(&refusal)
        } else {
            let render = rendering.renderer.as_ref();
            // A renderer that panics must not turn a refusal into a broken connection.
            let rendered = render.and_then(|render| quietly(|| render(&refusal)));
            rendered.unwrap_or_else(|| problem_json(&refusal))
        };
        let mut response = response.map(|body| ResponseBody::whole(body, None));
        response.extensions_mut().insert(refusal);
        response
    }
}

/// How refusals look.
#[derive(Clone, Default)]
pub(crate) struct Rendering {
    pub(crate) renderer: Option<Arc<Renderer>>,
    /// Statuses other than the table's; the last word counts.
    pub(crate) statuses: Vec<(Reason, StatusCode)>,
    /// The value of `Link`.
    pub(crate) documentation: Option<HeaderValue>,
}

pub(crate) type Renderer = dyn Fn(&Refusal) -> Response<Bytes> + Send + Sync;

/// Renders a refusal as `application/problem+json` (RFC 9457), with the further members `code`,
/// `retry` and `error`. The default.
#[must_use]
pub fn problem_json(refusal: &Refusal) -> Response<Bytes> {
    let Refusal { detail, status, .. } = refusal;
    let (code, title, retry) = (refusal.code(), refusal.title(), refusal.retry().name());
    let status = status.as_u16();
    let detail = escaped(detail);
    let problem = format!(
        "{{\"type\":\"urn:problem:tower-idempotency:{code}\",\"title\":\"{title}\",\
         \"status\":{status},\"detail\":\"{detail}\",\"code\":\"{code}\",\
         \"retry\":\"{retry}\",\"error\":{{\"type\":\"idempotency_error\",\
         \"code\":\"{code}\",\"message\":\"{detail}\"}}}}"
    );
    refusal.response("application/problem+json", problem)
}

/// What a gRPC client understands: 200, with the refusal as a status and its code as the message, in
/// the head, for there is nothing else ("Trailers-Only").
fn grpc(refusal: &Refusal) -> Response<Bytes> {
    let mut response = refusal.response("application/grpc", Bytes::new());
    *response.status_mut() = StatusCode::OK;
    let status = refusal.reason.row().grpc;
    response.headers_mut().insert("grpc-status", HeaderValue::from(status));
    let code = HeaderValue::from_static(refusal.code());
    response.headers_mut().insert("grpc-message", code);
    response
}

/// Renders a refusal as the clients of Stripe and `OpenAI` expect errors: an object `error` with
/// `type`, `code`, `message` and `param`.
#[must_use]
pub fn error_object(refusal: &Refusal) -> Response<Bytes> {
    let (code, detail) = (refusal.code(), escaped(refusal.detail));
    let error = format!(
        "{{\"error\":{{\"type\":\"idempotency_error\",\"code\":\"{code}\",\
         \"message\":\"{detail}\",\"param\":null}}}}"
    );
    refusal.response("application/json", error)
}

/// A text as it stands in JSON. Ours need no escapes; a key hook's reason may.
fn escaped(text: &'static str) -> Cow<'static, str> {
    if !text.contains(|char: char| char < ' ' || char == '"' || char == '\\') {
        return text.into();
    }
    let mut escaped = String::new();
    for char in text.chars() {
        match char {
            '"' | '\\' => escaped.extend(['\\', char]),
            char if char < ' ' => escaped.push(' '),
            char => escaped.push(char),
        }
    }
    escaped.into()
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.status().as_u16(), self.code())
    }
}

#[cfg(test)]
mod tests;
