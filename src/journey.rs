//! The journey of a keyed request, step by step. In: the request and its key; out: the answer.
//!
//! ```text
//! scope ─▶ length ─▶ guard ─▶ body ─▶ recall ─▶ CLAIM ─▶ permit ─▶ readiness ─▶ inner ─▶ capture
//! ```
//!
//! What a drop leaves behind, await by await: until the claim, nothing; a claim that is being
//! written is taken back; from the claim to the call of the inner service it is released; from
//! there on the execution goes on without its caller.

use std::{future::poll_fn, pin::pin, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, request::Parts};
use http_body::Body;
use tower::ServiceExt as _;
use tower_service::Service;

use crate::{
    BoxError,
    body::{RequestBody, ResponseBody},
    capture::capture,
    disposition::Disposition,
    engine::{
        Decision, OwnedClaim, Settlement, Wanted,
        execute::{HandOver, catch, catch_call},
    },
    executing::Executing,
    guard::{PermitSlot, SlotEnd},
    handle::Handle,
    hook::quietly,
    intake,
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
    pub(crate) key: IdempotencyKey,
    pub(crate) parts: Parts,
    pub(crate) body: B,
}

/// Takes the request through all its steps.
pub(crate) fn walk<S, B, R>(
    journey: Journey<S, B>,
) -> impl Future<Output = Result<Response<ResponseBody<R>>, S::Error>> + Send
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError> + Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    // Taken apart out here: what an async function takes apart inside, its future holds twice.
    let Journey { settings, mut inner, key, parts, body } = journey;
    async move {
        let refuse =
            |refusal: Refusal, headers: &HeaderMap| Ok(refused(&settings, refusal, headers));

        // Whose key is it?
        let Some((id, scope)) = operation(&settings, &parts, &key) else {
            return refuse(Refusal::no_scope(), &parts.headers);
        };
        if Inside::has(&parts, id) {
            // An outer copy of this layer guards the operation already.
            let request = Request::from_parts(parts, RequestBody::untouched(body));
            let answer = Box::pin(inner.oneshot(request)).await;
            return answer.map(|response| response.map(ResponseBody::inner));
        }

        // Is it worth reading?
        if intake::declares_more_than(settings.request_limits.bytes, &body, &parts.headers) {
            return refuse(Refusal::body_too_large(), &parts.headers);
        }
        if let Err(refusal) = let_in(&settings, &parts, id).await {
            return refuse(refusal, &parts.headers);
        }

        // Read it, holding nothing but room for it.
        let (fingerprint, intake) = {
            let mut making = settings.counts.begin();
            let read = {
                let body = pin!(body);
                intake::read(body, &settings.request_limits, |data| making.data(data)).await
            };
            let intake = match read {
                Ok(intake) => intake,
                Err(unread) => return refuse(unread.into(), &parts.headers),
            };
            let exact = making.finish(&settings.counts, &parts, intake.content());
            // Most repeats bring the very same bytes: no need to read what they mean, or to claim.
            if let Some(value) = settings.engine.store.recall(&id, &exact.digest) {
                return Ok(answer_again(&settings, &parts, &value, Disposition::Replayed));
            }
            (exact.fingerprint(&settings.counts, &parts, intake.content()), intake)
        };
        let wanted = Wanted { id, fingerprint, scope };

        // The one step that decides.
        let in_flight = settings.engine.rules.in_flight;
        let claim = match settings.engine.claim(wanted, in_flight).await {
            Ok(Decision::Mine(claim)) => claim,
            Ok(Decision::Recorded { value, waited }) => {
                let disposition = if waited { Disposition::Waited } else { Disposition::Replayed };
                return Ok(answer_again(&settings, &parts, &value, disposition));
            }
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
                Box::pin(release(claim)).await;
                return refuse(refusal, &parts.headers);
            }
        };
        if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
            drop(slot);
            Box::pin(release(claim)).await;
            return Err(error);
        }
        let request = Request::from_parts(parts, intake.into_body());
        execute(settings, inner, request, key, claim, slot).await
    }
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

/// Answers from a record.
fn answer_again<R: Body>(
    settings: &Settings,
    parts: &Parts,
    value: &StoredResponse,
    disposition: Disposition,
) -> Response<ResponseBody<R>> {
    match replay(value) {
        Ok(mut response) => {
            if let Some(on_replay) = settings.on_replay.as_deref() {
                rewrite(parts, &mut response, on_replay);
            }
            settings.dispositions.count(disposition);
            response
        }
        Err(refusal) => refused(settings, refusal, &parts.headers),
    }
}

fn refused<R: Body>(
    settings: &Settings,
    refusal: Refusal,
    headers: &HeaderMap,
) -> Response<ResponseBody<R>> {
    settings.dispositions.count(refusal.disposition());
    refusal.into_response(&settings.rendering, headers)
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

/// Which operation is it, and in whose share is it counted? None without a scope.
pub(crate) fn operation(
    settings: &Settings,
    parts: &Parts,
    key: &IdempotencyKey,
) -> Option<(OperationId, Option<ScopeId>)> {
    let scope = (settings.scope)(parts)?;
    let id = OperationId::of(&scope, key.as_bytes());
    Some((id, settings.engine.store.counts_scopes().then(|| ScopeId::new(&scope))))
}

/// Does the guard let this request in? Repeats of what is known pass it by; new work that it has no
/// room for is refused here, with its body unread.
pub(crate) async fn let_in(
    settings: &Settings,
    parts: &Parts,
    id: OperationId,
) -> Result<(), Refusal> {
    let Some(guard) = &settings.guard else { return Ok(()) };
    let lookup =
        async || settings.engine.lookup(id).await.map_err(|_| Refusal::store_unavailable());
    if lookup().await?.is_some() || guard.has_room(parts) {
        return Ok(());
    }
    // The guard may be full because this very operation has just begun.
    lookup().await?.map(|_| ()).ok_or_else(Refusal::ceiling)
}

/// Ends a claim whose work has not begun. If the store does not confirm it, its lease ends it.
pub(crate) async fn release(claim: OwnedClaim<StoredResponse>) {
    let _unconfirmed = claim.settle(Settlement::Release).finish().await;
}

/// Calls the inner service, which is ready, and settles the claim by what comes of it: not to be
/// undone because the caller leaves.
pub(crate) fn execute<S, B, R>(
    settings: Arc<Settings>,
    mut inner: S,
    mut request: Request<RequestBody<B>>,
    key: IdempotencyKey,
    mut claim: OwnedClaim<StoredResponse>,
    slot: Option<SlotEnd>,
) -> HandOver<impl Future<Output = Result<Response<ResponseBody<R>>, S::Error>> + Send + 'static>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send + 'static,
{
    let leave = claim.leave();
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

    // Called out here: what an async function is called with, its future holds as long as it lives.
    let called = catch_call(|| inner.call(request));
    let work = async move {
        // After the claim, so that it is dropped before it: also when the caller leaves and the
        // execution is cancelled, the permit goes back before anybody who waits can ask for it.
        let slot = slot;
        let answer = match called {
            Ok(work) => catch(work).await,
            Err(panic) => Err(panic),
        };
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
    };
    HandOver::new(work, leave, |answer| {
        Box::pin(async move {
            if let Ok(response) = answer {
                response.into_body().finish().await;
            }
        })
    })
}

/// Marks a request as inside this layer, for the operations that are guarded already. Another key
/// or scope further in is guarded as usual.
#[derive(Clone)]
pub(crate) struct Inside {
    innermost: OperationId,
    around: Option<Arc<Self>>,
}

impl Inside {
    pub(crate) fn has(parts: &Parts, id: OperationId) -> bool {
        let mut next = parts.extensions.get::<Self>();
        while let Some(inside) = next {
            if inside.innermost == id {
                return true;
            }
            next = inside.around.as_deref();
        }
        false
    }

    pub(crate) fn add(extensions: &mut http::Extensions, id: OperationId) {
        let around = extensions.remove::<Self>().map(Arc::new);
        extensions.insert(Self { innermost: id, around });
    }
}
