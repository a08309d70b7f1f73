//! What the layer makes of a request, seen by its store: the operation and the fingerprint. The
//! store is full, so nothing runs.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    Fingerprint, IdempotencyLayer, OperationId, RequestBody, Scope, Store, StoredResponse, Token,
    store::{ClaimReply, ClaimRequest, Ownership, StoreFuture},
};

/// What came of it.
#[derive(Debug, PartialEq)]
pub(crate) enum Seen {
    /// The store was asked for this.
    Claim(OperationId, Fingerprint),
    /// It was refused before, with this status.
    Refused(u16),
    /// The inner service was called: there was no key.
    Passed,
}

pub(crate) fn scope() -> Scope {
    Scope::new("tenant")
}

pub(crate) fn probe(strict: bool, request: Request<Full<Bytes>>) -> Seen {
    thread_local! {
        // Made once, for a store and its cache cost more than the rest.
        static LAYERS: [(IdempotencyLayer, Asked); 2] = [false, true].map(|strict| {
            let asked = Asked::default();
            let layer = IdempotencyLayer::new(|_| Some(scope()))
                .store(Recording(Arc::clone(&asked)))
                .key_strict(strict);
            (layer, asked)
        });
    }
    LAYERS.with(|layers| {
        let (layer, asked) = &layers[usize::from(strict)];
        let inner = service_fn(|_: Request<RequestBody<Full<Bytes>>>| async {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::new())))
        });
        let answer = layer.layer(inner).oneshot(request).now_or_never();
        let response = answer.expect("all of it is there").expect("no error");
        match asked.lock().expect("a lock").take() {
            Some(ClaimRequest { id, fingerprint, .. }) => Seen::Claim(id, fingerprint),
            None if response.status().is_success() => Seen::Passed,
            None => Seen::Refused(response.status().as_u16()),
        }
    })
}

type Asked = Arc<Mutex<Option<ClaimRequest>>>;

/// Keeps what it is asked for.
struct Recording(Asked);

impl Store<StoredResponse> for Recording {
    fn lookup(&self, _: OperationId) -> StoreFuture<Option<Fingerprint>> {
        StoreFuture::ready(None)
    }

    fn claim(&self, request: ClaimRequest) -> StoreFuture<ClaimReply<StoredResponse>> {
        *self.0.lock().expect("a lock") = Some(request);
        StoreFuture::ready(ClaimReply::Full { room_in: None })
    }

    fn withdraw(&self, _: OperationId, _: Token) -> StoreFuture<Ownership> {
        StoreFuture::ready(Ownership::Lost)
    }

    fn expire(&self, _: OperationId, _: Token) -> StoreFuture<Ownership> {
        StoreFuture::ready(Ownership::Lost)
    }

    fn retain(&self, _: OperationId, _: Token, _: Duration) -> StoreFuture<Ownership> {
        StoreFuture::ready(Ownership::Lost)
    }
}
