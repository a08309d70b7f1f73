//! Recorded before it looks complete. In: what the inner service answered, and the claim; out: the
//! response for the caller, its claim settled, or (if its length is unknown or too large) about to
//! be settled as the body goes by ([`follow`](crate::follow)).

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, Response};
use http_body::{Body, Frame};

use crate::{
    body::ResponseBody,
    collect::{Collected, declared_length},
    engine::{
        Settlement,
        execute::{Panic, catch_poll},
    },
    executing::Executing,
    follow::{Follow, Followed, Head},
    headers::{HeaderPolicy, REPLAYED},
    outcome::{Answered, Outcome, Policy, RetainFor, Verdict},
    record::StoredResponse,
};

/// What of a response is recorded.
#[derive(Clone)]
pub(crate) struct Capture {
    /// The largest body, in bytes.
    pub(crate) limit: usize,
    /// Are bodies of unknown length recorded?
    pub(crate) streams: bool,
    pub(crate) headers: HeaderPolicy,
    pub(crate) policy: Option<Policy>,
}

/// Captures `response` and settles its claim.
pub(crate) fn capture<B>(
    response: Response<B>,
    executing: Executing,
    capture: &Capture,
) -> impl Future<Output = Response<ResponseBody<B>>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    // Taken apart out here: what an async function takes apart inside, its future holds twice.
    let (mut parts, body) = response.into_parts();
    // The marker is ours: on a first answer it would be a lie.
    parts.headers.remove(REPLAYED);
    let answered = Answered::new(&parts, capture.policy.as_ref());
    if let Some(RetainFor(retention)) = parts.extensions.get() {
        executing.claim.progress().wish_to_retain_for(*retention);
    }
    // It holds for every end from here on: also where the body breaks or is never finished.
    match parts.extensions.get() {
        Some(Outcome::Unknown) => executing.claim.progress().effects_begin(),
        Some(Outcome::NotExecuted) => executing.claim.progress().not_executed(),
        Some(Outcome::Final) | None => {}
    }

    let declared = body.size_hint().exact().or_else(|| match parts.status.as_u16() {
        // These have no body, whatever length they talk of (RFC 9112, section 6.3): with its head
        // such a response looks complete.
        100..=199 | 204 | 304 => Some(0),
        _ => declared_length(&parts.headers),
    });
    let within = |length| usize::try_from(length).ok().filter(|length| *length <= capture.limit);
    let length = declared.and_then(within);
    async move {
        let Some(length) = length else {
            // Only a body of unknown length may turn out to be short enough.
            let limit = (declared.is_none() && capture.streams).then_some(capture.limit);
            let head = Head {
                status: parts.status,
                headers: parts.headers.clone(),
                policy: capture.headers.clone(),
            };
            let follow = Follow::new(Box::pin(body), executing, answered, head, declared, limit);
            return Response::from_parts(parts, ResponseBody::followed(Followed::new(follow)));
        };
        // In an option, to be dropped in its place: what it holds, such as a permit or a
        // transaction, is given back before anybody who waits can ask for it.
        let mut inner = pin!(Some(body));
        let collected = collect(inner.as_mut(), length).await;
        inner.set(None);
        let body = match collected {
            Ok((data, trailers)) => {
                let settlement = match executing.verdict(&answered, trailers.as_deref()) {
                    Verdict::Record => {
                        let headers =
                            capture.headers.kept(parts.status, &parts.headers, trailers.is_some());
                        let (data, trailers) = (data.clone(), trailers.as_deref());
                        StoredResponse::response(parts.status, &headers, data, trailers).recorded()
                    }
                    Verdict::Release => Settlement::Release,
                    Verdict::Hold => Settlement::Hold,
                };
                executing.settle(settlement).await;
                ResponseBody::whole(data, trailers)
            }
            Err(broke) => {
                executing.fail().await;
                match broke {
                    Break::Short(data) => ResponseBody::short(data, length),
                    Break::Error(mut data, error) => {
                        // With all that it declared, it would look whole to its caller.
                        data.truncate(length.saturating_sub(1));
                        ResponseBody::broken(data, error)
                    }
                    Break::Panic(panic) => panic.resume(),
                }
            }
        };
        Response::from_parts(parts, body)
    }
}

/// How a body ended before its end.
enum Break<E> {
    /// It just ended, short of the length that it declared.
    Short(Bytes),
    Error(Bytes, E),
    Panic(Panic),
}

/// Reads a body that declares that it is `length` bytes long. What goes on past that is cut off, as
/// it would be on its way to the caller.
async fn collect<B>(
    mut body: Pin<&mut Option<B>>,
    length: usize,
) -> Result<(Bytes, Option<Box<HeaderMap>>), Break<B::Error>>
where
    B: Body<Data = Bytes>,
{
    let mut collected = Collected::default();
    let mut trailers: Option<Box<HeaderMap>> = None;
    loop {
        let next = |context: &mut Context<'_>| match body.as_mut().as_pin_mut() {
            Some(body) => catch_poll(|| body.poll_frame(context)),
            None => Poll::Ready(Ok(None)),
        };
        let frame = poll_fn(next).await;
        match frame.map_err(Break::Panic)?.map(|frame| frame.map(Frame::into_data)) {
            None if collected.len() < length => {
                return Err(Break::Short(collected.finish()));
            }
            None => return Ok((collected.finish(), trailers)),
            Some(Ok(Ok(mut data))) => {
                let room = length - collected.len();
                let goes_on = data.len() > room;
                data.truncate(room);
                collected.push(data);
                if goes_on {
                    return Ok((collected.finish(), trailers));
                }
            }
            Some(Ok(Err(frame))) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
            // Its head was all that it had to say, and breaks no more.
            Some(Err(_)) if length == 0 => return Ok((collected.finish(), trailers)),
            Some(Err(error)) => return Err(Break::Error(collected.finish(), error)),
        }
    }
}
