//! The setters for what comes in: which requests are guarded, where their key is, what of them
//! counts, and how much of it all there may be at once.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, Method, request::Parts};

use super::{IdempotencyLayer, accept};
use crate::{
    buffer::Buffer,
    engine::assert_longer_than_zero,
    fingerprint::{Fingerprint, Selection},
    guard::{Ceiling, Guard, Permit},
    key::{IdempotencyKey, InvalidKey},
};

impl IdempotencyLayer {
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
}
