//! The journey of a keyed request that is only watched (`Mode::Shadow`): the same steps, and entries
//! and counts as they would be; but nothing is refused or replayed, and every request runs. Also
//! what a keyed request gets when the layer is switched off.

use std::future::poll_fn;

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tower::ServiceExt as _;
use tower_service::Service;

use crate::{
    BoxError,
    body::{RequestBody, ResponseBody},
    disposition::Disposition,
    engine::{Decision, InFlight, Progress, Wanted},
    guard::PermitSlot,
    handle::Handle,
    hook::quietly,
    intake,
    journey::{Inside, Journey, execute, let_in, operation, permit, release},
    key::IdempotencyKey,
    operation::OperationId,
    record::{Stored, StoredResponse},
    settings::Settings,
};

/// Takes the request through all steps, to the inner service in any case.
pub(crate) async fn shadow<S, B, R>(
    journey: Journey<S, B>,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError> + Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    let Journey { settings, mut inner, key, mut parts, body } = journey;
    let pass = async |disposition, inner: S, parts, body| {
        settings.dispositions.count(disposition);
        let request = Request::from_parts(parts, body);
        inner.oneshot(request).await.map(|response| response.map(ResponseBody::inner))
    };

    let Some((id, scope)) = operation(&settings, &parts, &key) else {
        parts.extensions.insert(key);
        let body = RequestBody::untouched(body);
        return pass(Disposition::RejectedScope, inner, parts, body).await;
    };
    if Inside::has(&parts, id) {
        let request = Request::from_parts(parts, RequestBody::untouched(body));
        return inner.oneshot(request).await.map(|response| response.map(ResponseBody::inner));
    }
    let stopped =
        if intake::declares_more_than(settings.request_limits.bytes, &body, &parts.headers) {
            Some(Disposition::TooLarge)
        } else {
            let_in(&settings, &parts, id).await.err().map(|refusal| refusal.disposition())
        };
    if let Some(disposition) = stopped {
        let parts = unclaimed(&settings, id, key, parts);
        return pass(disposition, inner, parts, RequestBody::untouched(body)).await;
    }

    let mut making = settings.counts.begin();
    let mut body = Box::pin(body);
    let limits = &settings.request_limits;
    let read = intake::read(body.as_mut(), limits, |data| making.data(data));
    let intake = match read.await {
        Ok(intake) => intake,
        Err(unread) => {
            let disposition = unread.disposition();
            let parts = unclaimed(&settings, id, key, parts);
            return pass(disposition, inner, parts, unread.into_body(body)).await;
        }
    };
    let exact = making.finish(&settings.counts, &parts, intake.content());
    if let Some(value) = settings.engine.store.recall(&id, &exact.digest) {
        let parts = unclaimed(&settings, id, key, parts);
        return pass(again(&value), inner, parts, intake.into_body()).await;
    }
    let fingerprint = exact.fingerprint(&settings.counts, &parts, intake.content());
    let wanted = Wanted { id, fingerprint, scope };
    let body = intake.into_body();

    // Nobody waits in the shadow: who would have is counted as in progress.
    let reject = InFlight::Reject;
    let disposition = match settings.engine.claim(wanted, reject).await {
        Ok(Decision::Mine(claim)) => match permit(&settings, &parts) {
            Ok(slot) => {
                if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
                    drop(slot);
                    release(claim).await;
                    return Err(error);
                }
                let request = Request::from_parts(parts, body);
                return execute(settings, inner, request, key, claim, slot).await;
            }
            Err(refusal) => {
                release(claim).await;
                refusal.disposition()
            }
        },
        Ok(Decision::Recorded { value, .. }) => again(&value),
        Ok(Decision::Conflict) => Disposition::Conflict,
        Ok(Decision::Held) => Disposition::OutcomeUnknown,
        Ok(Decision::InFlight) => Disposition::InProgress,
        Ok(Decision::Full { .. }) => Disposition::Capacity,
        Err(_) => Disposition::StoreUnavailable,
    };
    let parts = unclaimed(&settings, id, key, parts);
    pass(disposition, inner, parts, body).await
}

/// What would have been made of a record.
fn again(value: &StoredResponse) -> Disposition {
    match value.get() {
        Stored::Response { .. } => Disposition::Replayed,
        Stored::Tombstone { .. } => Disposition::NotReplayable,
    }
}

/// Gives a keyed request that is not guarded because the layer is switched off what its handler may
/// ask for: an operator must be able to switch it off and break nothing.
pub(crate) fn switched_off(settings: &Settings, mut parts: Parts) -> Parts {
    // It may be switched off because of a hook that panics.
    let key = quietly(|| settings.key.read(&parts)).and_then(Result::ok).flatten();
    let scope = key.as_ref().and_then(|_| quietly(|| (settings.scope)(&parts)).flatten());
    match (key, scope) {
        (Some(key), Some(scope)) => {
            let id = OperationId::new(&scope, key.as_str());
            if Inside::has(&parts, id) {
                // A layer further out is not switched off: what its handler may ask for is there.
                return parts;
            }
            // It is not marked as inside: a layer further in that is not switched off guards it.
            say_unclaimed(settings, id, key, &mut parts);
        }
        (Some(key), None) => {
            parts.extensions.insert(key);
        }
        (None, _)
            if settings.guard.as_ref().is_some_and(|guard| guard.has_let_in(&parts.extensions)) =>
        {
            return parts;
        }
        (None, _) => {}
    }
    if settings.guard.is_some() {
        // Of no guard: one further in has yet to be asked.
        parts.extensions.insert(PermitSlot::of_no_guard());
    }
    parts
}

/// Gives a request that runs beside the entry of its operation what a handler may ask for: the key,
/// a handle that is not that entry's, and a slot without a permit.
fn unclaimed(settings: &Settings, id: OperationId, key: IdempotencyKey, mut parts: Parts) -> Parts {
    Inside::add(&mut parts.extensions, id);
    say_unclaimed(settings, id, key, &mut parts);
    if let Some(guard) = &settings.guard {
        parts.extensions.insert(guard.empty_slot());
    }
    parts
}

/// Gives a request the key, and a handle that is no entry's.
fn say_unclaimed(settings: &Settings, id: OperationId, key: IdempotencyKey, parts: &mut Parts) {
    let progress = Progress::unclaimed(&settings.engine, id);
    parts.extensions.insert(Handle::new(&progress.into(), None));
    parts.extensions.insert(key);
}
