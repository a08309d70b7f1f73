//! The layer and its setters. In: a scope and whatever else is set; out: an
//! [`Idempotency`] around each inner service, all of them one: every clone, route and connection
//! sees the same entries. A request enters in [`service`](crate::Idempotency).

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, Method, request::Parts};
use tower_layer::Layer;

use crate::{
    disposition::Dispositions,
    engine::{Engine, InFlight, OnFailure, OnLeave},
    guard::{Ceiling, Guard, Permit},
    record::StoredResponse,
    scope::Scope,
    service::Idempotency,
    settings::Settings,
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

    /// Where entries live. Default: a [`MemoryStore`] of this layer's own, with room for 1,000
    /// live entries.
    pub fn store(self, store: impl Store<StoredResponse>) -> Self {
        self.set(|settings| {
            settings.engine = Engine::new(Arc::new(store), settings.engine.rules);
        })
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
        self.set(|settings| settings.key_header = name)
    }

    /// Is a guarded request without a key refused (400 `idempotency_key_missing`)? Default: no, it
    /// passes through unprotected.
    pub fn key_required(self, required: bool) -> Self {
        self.set(|settings| settings.key_required = required)
    }

    /// Is only a structured-field String (`"…"`, RFC 9651 section 3.3.3) taken for a key? Default:
    /// no, because all common SDKs send bare keys. `"abc"` and `abc` are the same key.
    pub fn key_strict(self, strict: bool) -> Self {
        self.set(|settings| settings.key_strict = strict)
    }

    /// Headers that change what a request asks for, besides `Content-Type` and `Content-Encoding`:
    /// the same key with another value is a conflict. Default: none.
    pub fn fingerprint_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        let names = names.into_iter().collect();
        self.set(|settings| settings.fingerprint_headers = names)
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

    /// The largest response body that is recorded, in bytes. A larger one, or one of unknown
    /// length, is delivered in full and leaves a tombstone: a repeat gets 409
    /// `idempotency_not_replayable`, with the first answer's `Location`. Default: 1 MiB.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn response_limit(self, bytes: usize) -> Self {
        assert!(bytes > 0, "response_limit: has to be more than 0 bytes");
        self.set(|settings| settings.capture.limit = bytes)
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

    /// What becomes of an operation whose execution failed: with 408 or 5xx, an inner error, a
    /// panic, or a response body that broke. Default: [`OnFailure::Release`], the retry runs
    /// again.
    pub fn on_failure(self, rule: OnFailure) -> Self {
        self.set(|settings| settings.engine.rules.on_failure = rule)
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

#[track_caller]
fn assert_longer_than_zero(setting: &str, time: Duration) {
    assert!(!time.is_zero(), "{setting}: has to be longer than zero");
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Idempotency::new(inner, Arc::clone(&self.settings))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}
