//! Where a request enters. In: any request; out: a future that either passes it on untouched, or
//! takes it on its [`journey`](crate::journey).

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::{
    BoxError,
    body::{RequestBody, ResponseBody},
    disposition::Disposition,
    future::ResponseFuture,
    guard::SlotEnd,
    journey::{Journey, walk},
    refusal::Refusal,
    settings::{Mode, Settings},
    shadow::{shadow, switched_off},
};

/// The service that [`IdempotencyLayer`](crate::IdempotencyLayer) puts around an inner one.
///
/// It is always ready. The inner service's readiness is awaited inside the call, on the very clone
/// that is then called, and only by requests that will reach it: a replay never waits for a permit
/// of the inner service, and never takes one.
///
/// Its error is the inner service's; everything the layer says itself is a response.
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> Idempotency<S> {
    pub(crate) fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutably.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Takes the inner service out.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, B, R> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError> + Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B, R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = &self.settings;
        let mode = settings.mode.get();
        if !settings.methods.contains(request.method()) {
            return self.pass(Disposition::Passed, request);
        }
        let (parts, body) = request.into_parts();
        if mode == Mode::Off {
            let parts = switched_off(settings, parts);
            return self.pass(Disposition::Passed, Request::from_parts(parts, body));
        }
        if settings.only.as_ref().is_some_and(|only| !only(&parts)) {
            return self.pass(Disposition::Passed, Request::from_parts(parts, body));
        }
        let key = match settings.key.read(&parts) {
            Ok(None) if settings.key_required => Err(Refusal::key_missing()),
            key => key.map_err(Refusal::key_invalid),
        };
        let key = match (key, mode) {
            (Ok(Some(key)), _) => key,
            (Ok(None), mode) => return self.unkeyed(Request::from_parts(parts, body), mode),
            (Err(refusal), Mode::Shadow) => {
                return self.pass(refusal.disposition(), Request::from_parts(parts, body));
            }
            (Err(refusal), _) => return self.refuse(refusal, &parts.headers),
        };
        let (settings, inner) = (Arc::clone(settings), self.inner.clone());
        let journey = Journey { settings, inner, key, parts, body };
        match mode {
            Mode::Shadow => ResponseFuture::guarded(shadow(journey)),
            _ => ResponseFuture::guarded(walk(journey)),
        }
    }
}

impl<S> Idempotency<S> {
    /// Passes a request on untouched.
    fn pass<B, R>(&self, disposition: Disposition, request: Request<B>) -> ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>> + Clone,
        R: Body,
    {
        self.settings.dispositions.count(disposition);
        ResponseFuture::pass(self.inner.clone(), request, None)
    }

    /// A request of a guarded method without a key: nothing to protect, but the guard is asked.
    fn unkeyed<B, R>(&self, request: Request<B>, mode: Mode) -> ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>> + Clone,
        R: Body,
    {
        let guard = self.settings.guard.as_ref();
        let Some(guard) = guard.filter(|guard| !guard.has_let_in(request.extensions())) else {
            return self.pass(Disposition::Passed, request);
        };
        let (mut parts, body) = request.into_parts();
        let Some(slot) = guard.enter(&parts) else {
            let refusal = Refusal::ceiling();
            return match mode {
                Mode::Shadow => {
                    parts.extensions.insert(guard.empty_slot());
                    self.pass(refusal.disposition(), Request::from_parts(parts, body))
                }
                _ => self.refuse(refusal, &parts.headers),
            };
        };
        self.settings.dispositions.count(Disposition::Passed);
        parts.extensions.insert(slot.clone());
        let request = Request::from_parts(parts, body);
        ResponseFuture::pass(self.inner.clone(), request, Some(SlotEnd(slot)))
    }

    /// Refuses a request with its body unread.
    fn refuse<B, R>(&self, refusal: Refusal, headers: &HeaderMap) -> ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
        R: Body,
    {
        self.settings.dispositions.count(refusal.disposition());
        ResponseFuture::refused(refusal.into_response(&self.settings.rendering, headers))
    }
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("settings", &self.settings)
            .finish()
    }
}
