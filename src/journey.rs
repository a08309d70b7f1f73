//! The journey of a keyed request, step by step. In: the request and its key; out: the answer.
//!
//! ```text
//! scope ─▶ length ─▶ lookup, guard ─▶ body ─▶ CLAIM ─▶ permit ─▶ readiness ─▶ inner ─▶ capture
//! ```
//!
//! What a drop leaves behind, await by await: until the claim, nothing; a claim that is being
//! written is taken back; from the claim to the call of the inner service it is released; from
//! there on the execution goes on without its caller.

use std::{future::poll_fn, pin::pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, request::Parts};
use http_body::Body;
use tokio::runtime::Handle as Runtime;
use tower::ServiceExt as _;
use tower_service::Service;

use crate::{
    BoxError,
    body::{RequestBody, ResponseBody},
    capture::capture,
    disposition::Disposition,
    engine::{
        Decision, OwnedClaim, Settlement, Wanted,
        execute::{HandOver, catch},
    },
    executing::Executing,
    fingerprint::Fingerprint,
    guard::{PermitSlot, SlotEnd},
    handle::Handle,
    hook::quietly,
    intake::{self, Intake},
    key::IdempotencyKey,
    operation::OperationId,
    record::StoredResponse,
    refusal::Refusal,
    replay::replay,
    scope::ScopeId,
    settings::{OnReplay, Settings},
};

/// A keyed request of a guarded method, on its way.
pub(crate) struct Journey<S, B> {
    pub(crate) settings: Arc<Settings>,
    pub(crate) inner: S,
    pub(crate) runtime: Option<Runtime>,
    pub(crate) key: IdempotencyKey,
    pub(crate) request: Request<B>,
}

/// Takes the request through all its steps.
pub(crate) async fn walk<S, B, R>(
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
    let Journey { settings, inner, runtime, key, request } = journey;
    let (parts, body) = request.into_parts();
    let refuse = |refusal: Refusal, headers: &HeaderMap| {
        settings.dispositions.count(refusal.disposition());
        Ok(refusal.into_response(&settings.rendering, headers))
    };

    // Whose key is it?
    let Some(scope) = (settings.scope)(&parts) else {
        return refuse(Refusal::no_scope(), &parts.headers);
    };
    let id = OperationId::new(&scope, key.as_str());
    let scope = settings.engine.store.counts_scopes().then(|| ScopeId::new(&scope));
    if Inside::has(&parts, id) {
        // An outer copy of this layer guards the operation already.
        let request = Request::from_parts(parts, RequestBody::untouched(body));
        return inner.oneshot(request).await.map(|response| response.map(ResponseBody::inner));
    }

    // Is it worth reading?
    if intake::declares_more_than(settings.request_limits.bytes, &body, &parts.headers) {
        return refuse(Refusal::body_too_large(), &parts.headers);
    }
    let known = match known(&settings, &parts, id).await {
        Ok(known) => known,
        Err(refusal) => return refuse(refusal, &parts.headers),
    };

    // Read it, holding nothing but room for it.
    let mut making = settings.counts.begin(&parts);
    let limits = &settings.request_limits;
    let read = {
        let body = pin!(body);
        intake::read(body, limits, runtime.is_some(), |data| making.data(data)).await
    };
    let Intake { body, trailers, room } = match read {
        Ok(intake) => intake,
        Err(unread) => return refuse(unread.into(), &parts.headers),
    };
    let fingerprint = making.finish(&parts, &body, trailers.as_ref(), known);
    let wanted = Wanted { id, fingerprint, scope };

    // The one step that decides.
    let in_flight = settings.engine.rules.in_flight;
    let claim = match settings.engine.claim(wanted, in_flight, runtime.as_ref()).await {
        Ok(Decision::Mine(claim)) => claim,
        Ok(Decision::Recorded { value, waited }) => match replay(&value) {
            Ok(mut response) => {
                if let Some(on_replay) = settings.on_replay.as_deref() {
                    rewrite(&parts, &mut response, on_replay);
                }
                let disposition = if waited { Disposition::Waited } else { Disposition::Replayed };
                settings.dispositions.count(disposition);
                return Ok(response);
            }
            Err(refusal) => return refuse(refusal, &parts.headers),
        },
        Ok(Decision::Conflict) => return refuse(Refusal::conflict(), &parts.headers),
        Ok(Decision::Held) => return refuse(Refusal::outcome_unknown(), &parts.headers),
        Ok(Decision::InFlight) => return refuse(Refusal::in_progress(), &parts.headers),
        Ok(Decision::Full { room_in }) => {
            return refuse(Refusal::capacity(room_in), &parts.headers);
        }
        Err(_) => return refuse(Refusal::store_unavailable(), &parts.headers),
    };

    // From here to the call, a return or a drop releases the claim.
    let slot = match permit(&settings, &parts) {
        Ok(slot) => slot,
        Err(refusal) => {
            release(claim).await;
            return refuse(refusal, &parts.headers);
        }
    };
    let request = Request::from_parts(parts, RequestBody::read(body, trailers, room));
    run(settings, inner, request, key, claim, slot).await
}

/// A permit of the guard, where there is one.
pub(crate) fn permit(settings: &Settings, parts: &Parts) -> Result<Option<SlotEnd>, Refusal> {
    match &settings.guard {
        None => Ok(None),
        Some(guard) => match guard.enter(parts) {
            Some(slot) => Ok(Some(SlotEnd(slot))),
            None => Err(Refusal::ceiling()),
        },
    }
}

/// Lets the user's hook at the head of a replay.
fn rewrite<R: Body>(parts: &Parts, response: &mut Response<ResponseBody<R>>, on_replay: &OnReplay) {
    let (mut head, body) = std::mem::take(response).into_parts();
    let recorded = head.clone();
    // A hook that panics has rewritten nothing.
    if quietly(|| on_replay(parts, &mut head)).is_none() {
        head = recorded;
    }
    *response = Response::from_parts(head, body);
}

/// What is already under this id. Advisory, and asked only where it saves work or a guard needs it.
///
/// New work that the guard has no room for is refused here, with its body unread.
pub(crate) async fn known(
    settings: &Settings,
    parts: &Parts,
    id: OperationId,
) -> Result<Option<Fingerprint>, Refusal> {
    let lookup =
        async || settings.engine.lookup(id).await.map_err(|_| Refusal::store_unavailable());
    if settings.guard.is_none() && !settings.engine.store.lookup_is_cheap() {
        return Ok(None);
    }
    let known = lookup().await?;
    match &settings.guard {
        Some(guard) if known.is_none() && !guard.has_room(parts) => {
            // The guard may be full because this very operation has just begun.
            lookup().await?.map(Some).ok_or_else(Refusal::ceiling)
        }
        _ => Ok(known),
    }
}

/// Ends a claim whose work has not begun. If the store does not confirm it, its lease ends it.
pub(crate) async fn release(claim: OwnedClaim<StoredResponse>) {
    let _unconfirmed = claim.settle(Settlement::Release).await;
}

/// Awaits the inner service's readiness and calls it.
pub(crate) async fn run<S, B, R>(
    settings: Arc<Settings>,
    mut inner: S,
    request: Request<RequestBody<B>>,
    key: IdempotencyKey,
    claim: OwnedClaim<StoredResponse>,
    slot: Option<SlotEnd>,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
        drop(slot);
        release(claim).await;
        return Err(error);
    }
    // The call, and all that follows from it: not to be undone because the caller leaves.
    let leave = claim.leave();
    HandOver::new(execute(settings, inner, request, key, claim, slot), leave, |answer| {
        Box::pin(async move {
            if let Ok(response) = answer {
                response.into_body().finish().await;
            }
        })
    })
    .await
}

/// Calls the inner service, which is ready, and settles the claim by what comes of it.
async fn execute<S, B, R>(
    settings: Arc<Settings>,
    mut inner: S,
    mut request: Request<RequestBody<B>>,
    key: IdempotencyKey,
    mut claim: OwnedClaim<StoredResponse>,
    slot: Option<SlotEnd>,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    B: Body,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let extensions = request.extensions_mut();
    Inside::add(extensions, claim.progress().id());
    extensions.insert(Handle::new(claim.progress(), slot.as_ref().map(|end| &end.0)));
    extensions.insert(key);
    match &slot {
        Some(end) => extensions.insert(end.0.clone()),
        // The outer request's slot, if this one is part of a batch, is not for this work.
        None => extensions.remove::<PermitSlot>(),
    };
    claim.extend(extensions);
    claim.begin();
    let executing = Executing { claim, execution: settings.dispositions.execution() };
    // After the claim, so that it is dropped before it: also when the caller leaves and the
    // execution is cancelled, the permit goes back before anybody who waits can ask for it.
    let slot = slot;

    let answer = catch(async { inner.call(request).await }).await;
    // A permit that nobody took goes back before anybody who waits can ask for it.
    drop(slot);
    match answer {
        Ok(Ok(response)) => Ok(capture(response, executing, &settings.capture).await),
        Ok(Err(error)) => {
            executing.fail_with_error().await;
            Err(error)
        }
        Err(panic) => {
            executing.fail().await;
            panic.resume()
        }
    }
}

/// Marks a request as inside this layer, for the operations that are guarded already. Another key
/// or scope further in is guarded as usual.
#[derive(Clone)]
pub(crate) struct Inside(Vec<OperationId>);

impl Inside {
    pub(crate) fn has(parts: &Parts, id: OperationId) -> bool {
        parts.extensions.get::<Self>().is_some_and(|inside| inside.0.contains(&id))
    }

    pub(crate) fn add(extensions: &mut http::Extensions, id: OperationId) {
        extensions.get_or_insert_with(|| Self(Vec::with_capacity(1))).0.push(id);
    }
}
