//! What axum handlers and stacks need besides the layer (feature `axum`): extractors for
//! [`IdempotencyKey`], [`Handle`] and [`PermitSlot`], and [`AxumBodyLayer`]. With the feature on,
//! the fingerprint covers the original URI under nested routers.

use std::task::{Context, Poll};

use ::axum::{
    body::Body as AxumBody,
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{Request, StatusCode, request::Parts};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use crate::{BoxError, Handle, IdempotencyKey, PermitSlot};

/// Turns the request's body back into [`axum::body::Body`], below
/// [`IdempotencyLayer`](crate::IdempotencyLayer).
///
/// axum's routes take any body, so most stacks do not need it. `axum::middleware::from_fn` and
/// other middleware that names axum's body does: put this layer between it and the
/// `IdempotencyLayer`.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct AxumBodyLayer;

impl AxumBodyLayer {
    /// The layer; it has no settings.
    #[must_use]
    pub const fn new() -> Self {
        Self
    }
}

impl<S> Layer<S> for AxumBodyLayer {
    type Service = AxumBodyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        AxumBodyService { inner }
    }
}

/// The service of [`AxumBodyLayer`].
#[derive(Debug, Clone)]
pub struct AxumBodyService<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for AxumBodyService<S>
where
    S: Service<Request<AxumBody>>,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> S::Future {
        self.inner.call(request.map(AxumBody::new))
    }
}

/// Why an extractor of this crate found nothing: 500, because it is the program's mistake, not the
/// caller's.
///
/// The request carried no key (then take an `Option`, or set
/// [`key_required`](crate::IdempotencyLayer::key_required)), its method is not guarded, or the
/// route is not under the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct NotGuarded;

impl IntoResponse for NotGuarded {
    fn into_response(self) -> Response {
        let text = "the handler needs a request with an idempotency key, under the layer";
        (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
    }
}

macro_rules! extension_extractor {
    ($($extension:ty),+) => {$(
        impl<S: Send + Sync> FromRequestParts<S> for $extension {
            type Rejection = NotGuarded;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NotGuarded> {
                parts.extensions.get().cloned().ok_or(NotGuarded)
            }
        }

        impl<S: Send + Sync> OptionalFromRequestParts<S> for $extension {
            type Rejection = std::convert::Infallible;

            async fn from_request_parts(
                parts: &mut Parts,
                _: &S,
            ) -> Result<Option<Self>, Self::Rejection> {
                Ok(parts.extensions.get().cloned())
            }
        }
    )+};
}

extension_extractor!(IdempotencyKey, Handle, PermitSlot);
