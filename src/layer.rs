//! The layer and its setters. In: a scope and whatever else is set; out: an
//! [`Idempotency`] around each inner service, all of them one: every clone, route and connection
//! sees the same entries. A request enters in [`service`](crate::Idempotency).

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request::Parts, response};
use tower_layer::Layer;

use crate::{
    buffer::Buffer,
    disposition::Dispositions,
    engine::{Detached, InFlight, OnFailure, OnLeave, assert_longer_than_zero, assert_waiters},
    fingerprint::{Fingerprint, Selection},
    guard::{Ceiling, Guard, Permit},
    key::{IdempotencyKey, InvalidKey},
    notice,
    outcome::{Outcome, Policy},
    record::StoredResponse,
    refusal::{Reason, Refusal},
    scope::Scope,
    service::Idempotency,
    settings::{Mode, ModeSwitch, Settings},
    store::Store,
};

/// Makes retries safe: the first request with an idempotency key runs, and every repeat gets its
/// answer again.
///
/// One line in an axum, tonic or plain tower stack. The state is in the layer: its clones, and all
/// services made from them, share one store, one count and one drain; a setter changes only the
/// layer it is called on.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, scope};
///
/// #[derive(Clone)]
/// struct Tenant(String); // put into the request's extensions by your authentication
///
/// impl AsRef<str> for Tenant {
///     fn as_ref(&self) -> &str {
///         &self.0
///     }
/// }
///
/// // 10 keyed requests a second, kept for an hour: 36,000 entries.
/// let layer = IdempotencyLayer::new(scope::from_extension::<Tenant>())
///     .store(MemoryStore::new().capacity(36_000))
///     .retention(Duration::from_secs(60 * 60));
/// # drop(layer);
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put around a service"]
pub struct IdempotencyLayer {
    settings: Arc<Settings>,
}

impl IdempotencyLayer {
    /// A layer with every default, whose keys are unique within what `scope` says.
    ///
    /// `scope` is given the head of each keyed request: ready-made ones are in
    /// [`scope`](mod@crate::scope); a closure `|parts| …` needs no annotations. Where it says `None`
    /// the request is refused with 403.
    pub fn new<F>(scope: F) -> Self
    where
        F: Fn(&Parts) -> Option<Scope> + Send + Sync + 'static,
    {
        Self { settings: Arc::new(Settings::new(Arc::new(scope))) }
    }

    fn set(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        set(Arc::make_mut(&mut self.settings));
        self
    }

    /// Where entries live. Default: a [`MemoryStore`](crate::MemoryStore) of this layer's own, with room for 1,000
    /// live entries.
    pub fn store(self, store: impl Store<StoredResponse>) -> Self {
        self.set(|settings| settings.engine.store = Arc::new(store))
    }

    /// How long a record lives, counted from completion and never extended by replays. Default: 1
    /// hour. Handlers can choose another for their own record.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn retention(self, retention: Duration) -> Self {
        assert_longer_than_zero("retention", retention);
        self.set(|settings| settings.engine.rules.retention = retention)
    }

    /// Which methods are guarded. Requests of others pass untouched, even with a key. Default:
    /// POST and PATCH, the two that are neither safe nor idempotent (RFC 9110, section 9.2).
    ///
    /// # Panics
    ///
    /// If there are none, or if GET, HEAD, OPTIONS, TRACE or CONNECT is among them: they have no
    /// effect that could happen twice, or no response that could be kept.
    #[track_caller]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        let methods: Arc<[Method]> = methods.into_iter().collect();
        assert!(!methods.is_empty(), "methods: without any, nothing is guarded");
        for method in methods.iter() {
            let has_effects = !method.is_safe() && method != Method::CONNECT;
            assert!(has_effects, "methods: {method} cannot be guarded");
        }
        self.set(|settings| settings.methods = methods)
    }

    /// The request header that carries the key. Default: `Idempotency-Key`
    /// (draft-ietf-httpapi-idempotency-key-header-07).
    pub fn key_header(self, name: HeaderName) -> Self {
        self.set(|settings| {
            settings.key.header = name;
            settings.key.own = None;
        })
    }

    /// Is a guarded request without a key refused (400 `idempotency_key_missing`)? Default: no, it
    /// passes through unprotected.
    pub fn key_required(self, required: bool) -> Self {
        self.set(|settings| settings.key_required = required)
    }

    /// Is only a structured-field String (`"…"`, RFC 9651 section 3.3.3) taken for a key? Default:
    /// no, because all common SDKs send bare keys. `"abc"` and `abc` are the same key.
    pub fn key_strict(self, strict: bool) -> Self {
        self.set(|settings| settings.key.strict = strict)
    }

    /// Reads the key from elsewhere than a header: from the path, the query, an extension. `None` is
    /// no key; what is [invalid](crate::InvalidKey) is refused with 400. Replaces
    /// [`key_header`](Self::key_header), and is replaced by it.
    ///
    /// A panic in it goes through to the caller; nothing is held by then.
    pub fn key<F>(self, key: F) -> Self
    where
        F: Fn(&Parts) -> Result<Option<IdempotencyKey>, InvalidKey> + Send + Sync + 'static,
    {
        self.set(|settings| settings.key.own = Some(Arc::new(key)))
    }

    /// Guards only the requests of which `only` says so, besides their method; all others pass
    /// untouched, even with a key. Default: all.
    ///
    /// A request is guarded by the **outermost** layer that it meets; one further in lets the same
    /// operation through. So to give a route other settings, put clones of the layer on each route
    /// (they share their state), or take the route out of the outer layer with `only`.
    pub fn only<F>(self, only: F) -> Self
    where
        F: Fn(&Parts) -> bool + Send + Sync + 'static,
    {
        self.set(|settings| settings.only = Some(Arc::new(only)))
    }

    /// Headers that change what a request asks for, besides `Content-Type` and `Content-Encoding`:
    /// the same key with another value is a conflict. Default: none.
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        let names = names.into_iter().collect();
        self.set(|settings| settings.counts.set_headers(names))
    }

    /// The parts of a JSON body that count, as JSON Pointers (RFC 6901): `/amount`, `/items/0/sku`.
    /// What is elsewhere may change from one try to the next. Default: all of it. Replaces
    /// [`fingerprint_json_except`], and is replaced by it.
    ///
    /// It holds for bodies that are compared by their meaning. Two of them are alike if the same
    /// pointers point at something, and at equal values: a member that is missing is not one that
    /// is `null`, but bodies without any of the parts are all alike. Other bodies (of another type,
    /// encoded, broken, with a name twice in one object, too deep) count with every byte.
    ///
    /// With other pointers, repeats of JSON requests that came before are conflicts.
    ///
    /// ```
    /// # use tower_idempotency::{IdempotencyLayer, scope};
    /// let layer = IdempotencyLayer::new(scope::single_tenant())
    ///     .fingerprint_json_only(["/amount", "/currency", "/items"]);
    /// # drop(layer);
    /// ```
    ///
    /// # Panics
    ///
    /// If there are none, or one is not a JSON Pointer: it is empty (all of the body) or begins
    /// with `/`, and in a name `~` is written `~0`, and `/` `~1`.
    ///
    /// [`fingerprint_json_except`]: Self::fingerprint_json_except
    #[track_caller]
    pub fn fingerprint_json_only<P: AsRef<str>>(
        self,
        pointers: impl IntoIterator<Item = P>,
    ) -> Self {
        let selection = accept("fingerprint_json_only", Selection::only(pointers));
        self.set(|settings| settings.counts.set_json(selection))
    }

    /// The parts of a JSON body that do not count, as JSON Pointers (RFC 6901): a nonce, the time
    /// it was sent (`/meta/sent_at`). Two bodies are alike if they are so without those parts. An
    /// element that does not count leaves its place behind: the others keep their index. Default:
    /// none. Replaces [`fingerprint_json_only`], and is replaced by it; without any pointer all of
    /// the body counts.
    ///
    /// Which bodies it holds for, and what changing it does, is as for [`fingerprint_json_only`].
    ///
    /// # Panics
    ///
    /// If one is not a JSON Pointer, or is the empty one, which is all of the body.
    ///
    /// [`fingerprint_json_only`]: Self::fingerprint_json_only
    #[track_caller]
    pub fn fingerprint_json_except<P: AsRef<str>>(
        self,
        pointers: impl IntoIterator<Item = P>,
    ) -> Self {
        let selection = accept("fingerprint_json_except", Selection::except(pointers));
        self.set(|settings| settings.counts.set_json(selection.flatten()))
    }

    /// Says what a request asks for besides its method and its path and query, which always count;
    /// instead of headers, body and trailers. It is given the head and the whole body. Two requests
    /// with one key and different fingerprints are a conflict.
    /// [`Fingerprint::of`](crate::Fingerprint::of) makes one of fields.
    pub fn fingerprint<F>(self, fingerprint: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync + 'static,
    {
        self.set(|settings| settings.counts.own = Some(Arc::new(fingerprint)))
    }

    /// Lets only so much new work run at once; over that 429 `concurrency_limit`, before the body
    /// is read. Repeats of known keys pass it by. Default: no ceiling. Replaces a
    /// [`guard`](Self::guard).
    pub fn ceiling(self, ceiling: &Ceiling) -> Self {
        self.set(|settings| settings.guard = Some(Guard::Ceiling(ceiling.clone())))
    }

    /// Asks `guard` for a permit for each request of a guarded method that would reach the inner
    /// service, keyed or not; without one the answer is 429 `concurrency_limit`. Repeats of known
    /// keys pass it by. Default: none. Replaces a [`ceiling`](Self::ceiling).
    ///
    /// For a keyed request it is asked twice: before the body is read, when its permit is dropped
    /// at once, and after the claim, when the permit goes to the handler
    /// ([`PermitSlot`](crate::PermitSlot)).
    pub fn guard<F>(self, guard: F) -> Self
    where
        F: Fn(&Parts) -> Option<Permit> + Send + Sync + 'static,
    {
        self.set(|settings| settings.guard = Some(Guard::Own(Arc::new(guard))))
    }

    /// The largest body of a keyed request, in bytes; over it 413 `idempotency_body_too_large`.
    /// Bodies without a key stream through, unread and without a limit. Default: 1 MiB.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn request_limit(self, bytes: usize) -> Self {
        assert!(bytes > 0, "request_limit: has to be more than 0 bytes");
        self.set(|settings| settings.request_limits.bytes = bytes)
    }

    /// The longest time between two frames of a keyed request's body; over it 408
    /// `idempotency_body_unreadable`. Default: 15 seconds.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn body_idle_timeout(self, timeout: Duration) -> Self {
        assert_longer_than_zero("body_idle_timeout", timeout);
        self.set(|settings| settings.request_limits.idle = timeout)
    }

    /// The longest time for all of a keyed request's body; over it 408
    /// `idempotency_body_unreadable`. Default: 60 seconds.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn body_timeout(self, timeout: Duration) -> Self {
        assert_longer_than_zero("body_timeout", timeout);
        self.set(|settings| settings.request_limits.total = timeout)
    }

    /// What the request bodies that are being read, and those of requests that wait, may take
    /// together, in bytes; over it 503 `idempotency_capacity`. Default: 64 MiB.
    ///
    /// # Panics
    ///
    /// If it is zero; and where the layer is put around a service, if one body of
    /// [`request_limit`](Self::request_limit) does not fit.
    #[track_caller]
    pub fn buffered_bytes(self, bytes: usize) -> Self {
        assert!(bytes > 0, "buffered_bytes: has to be more than 0 bytes");
        self.set(|settings| settings.request_limits.buffer = Buffer::new(bytes))
    }

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

    /// What a repeat does while the first execution is running. Default: it waits up to 10
    /// seconds, then gets 409 `idempotency_in_progress`. At most 16 wait for one operation and
    /// 1,024 in all; further ones get the 409 at once.
    ///
    /// # Panics
    ///
    /// If it is a wait of zero: that is [`InFlight::Reject`].
    #[track_caller]
    pub fn in_flight(self, in_flight: InFlight) -> Self {
        if let InFlight::Wait(at_most) = in_flight {
            assert_longer_than_zero("in_flight", at_most);
        }
        self.set(|settings| settings.engine.rules.in_flight = in_flight)
    }

    /// How many repeats may wait, for one operation and in all; further ones get 409
    /// `idempotency_in_progress` at once. Default: 16 and 1,024.
    ///
    /// # Panics
    ///
    /// If one is zero (that is [`InFlight::Reject`]), or the first is larger than the second.
    #[track_caller]
    pub fn waiters(self, per_operation: usize, in_all: usize) -> Self {
        assert_waiters(per_operation, in_all);
        self.set(|settings| {
            settings.engine.rules.waiters_per_operation = per_operation;
            settings.engine.rules.waiters = in_all;
        })
    }

    /// What becomes of an operation whose execution failed: with 408 or 5xx, an inner error, a
    /// panic, or a response body that broke. Default: [`OnFailure::Release`], the retry runs
    /// again.
    pub fn on_failure(self, rule: OnFailure) -> Self {
        self.set(|settings| {
            settings.engine.rules.on_failure = rule;
            settings.engine.rules.on_error = None;
            if let Some(policy @ Policy::Stripe) = &mut settings.capture.policy {
                // That releases some failures. Of the rest of it they both are the same.
                *policy = Policy::Ietf;
            }
        })
    }

    /// What becomes of a running execution whose caller leaves. Default: [`OnLeave::Finish`].
    pub fn on_leave(self, rule: OnLeave) -> Self {
        self.set(|settings| settings.engine.rules.on_leave = rule)
    }

    /// The longest time that an execution runs on after its caller has left; then it is cancelled
    /// and the failure rule applies. Default: 5 minutes.
    ///
    /// # Panics
    ///
    /// If it is zero: that is [`OnLeave::Cancel`].
    #[track_caller]
    pub fn finish_within(self, time: Duration) -> Self {
        assert_longer_than_zero("finish_within", time);
        self.set(|settings| settings.engine.rules.finish_within = time)
    }

    /// Wraps work that goes on without its caller, to give it what it would miss as a task of its
    /// own: a tracing span, a task-local. (A task-local of a layer further out is not there, and
    /// asking for it panics.) Default: nothing.
    pub fn detach_with<F>(self, detach: F) -> Self
    where
        F: Fn(Detached) -> Detached + Send + Sync + 'static,
    {
        self.set(|settings| settings.engine.detach_with = Some(Arc::new(detach)))
    }

    /// The longest time for one call of the store. Over it, before the inner service is called,
    /// the answer is 503 `idempotency_store_unavailable`. Default: 1 second.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn store_timeout(self, timeout: Duration) -> Self {
        assert_longer_than_zero("store_timeout", timeout);
        self.set(|settings| settings.engine.rules.store_timeout = timeout)
    }

    /// As draft-ietf-httpapi-idempotency-key-header-07 wants it: a key is required and quoted
    /// ([`key_required`](Self::key_required), [`key_strict`](Self::key_strict)), a conflict is
    /// answered with 422, and 4xx are recorded where they are final.
    ///
    /// **All common SDKs send bare keys, which are refused under it.** Follow it with
    /// `.key_strict(false)` to take both. A setter called after a preset overrides it.
    ///
    /// Not final are 400, 401, 403, 404, 405, 407, 408, 409, 411, 413, 414, 415, 417, 421, 423,
    /// 425, 426, 428, 429 and 431.
    pub fn ietf(self) -> Self {
        self.key_required(true)
            .key_strict(true)
            .refusal_status(Reason::Conflict, StatusCode::UNPROCESSABLE_ENTITY)
            .set(|settings| settings.capture.policy = Some(Policy::Ietf))
    }

    /// As Stripe's API does it: a conflict is answered with 400, records live for 24 hours, 5xx are
    /// recorded ([`OnFailure::Record`]) and 4xx where they are final, as under
    /// [`ietf`](Self::ietf); but 408, 429, 503 (gRPC: UNAVAILABLE) and an error of the inner service
    /// release the key. A setter called after a preset overrides it: another
    /// [`on_failure`](Self::on_failure) holds for all failures.
    pub fn stripe(self) -> Self {
        self.on_failure(OnFailure::Record)
            .refusal_status(Reason::Conflict, StatusCode::BAD_REQUEST)
            .retention(Duration::from_secs(24 * 60 * 60))
            .set(|settings| {
                settings.capture.policy = Some(Policy::Stripe);
                settings.engine.rules.on_error = Some(OnFailure::Release);
            })
    }

    /// Does the layer do what it is for? Default: [`Mode::Enforce`]. This layer and the clones that
    /// are made of it from here on can be switched together later ([`set_mode`](Self::set_mode)).
    pub fn mode(self, mode: Mode) -> Self {
        if mode != Mode::Enforce {
            notice::switched(&mode);
        }
        let switch = ModeSwitch::default();
        switch.set(mode);
        self.set(|settings| settings.mode = switch)
    }

    /// Switches the mode at run time, for this layer, its clones and their services. Requests that
    /// are on their way go on as they began.
    pub fn set_mode(&self, mode: Mode) {
        notice::switched(&mode);
        self.settings.mode.set(mode);
    }

    /// How often each [`Disposition`](crate::Disposition) was reached, counted over all clones of
    /// this layer.
    #[must_use]
    pub fn dispositions(&self) -> Dispositions {
        self.settings.dispositions.clone()
    }

    /// For a shutdown that loses nothing: waits until no execution is running any more, whether
    /// its caller is there or has left, at most for `timeout`. Returns how many were left.
    ///
    /// Call it when no new requests come in: after axum's or hyper's graceful shutdown has
    /// returned.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the wait and nothing else.
    pub async fn drain(&self, timeout: Duration) -> usize {
        self.settings.engine.drain(timeout).await
    }
}

/// What a setting was given, unless there is something to say against it.
#[track_caller]
fn accept<T>(setting: &str, given: Result<T, String>) -> Option<T> {
    if let Err(why) = &given {
        assert!(why.is_empty(), "{setting}: {why}");
    }
    given.ok()
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    /// Puts the layer around `inner`.
    ///
    /// # Panics
    ///
    /// If two settings contradict each other, with a message that names them.
    fn layer(&self, inner: S) -> Self::Service {
        self.settings.validate();
        Idempotency::new(inner, Arc::clone(&self.settings))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}
