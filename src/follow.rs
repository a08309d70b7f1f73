//! A response that is delivered as it comes. In: a body of unknown length, or one too large to
//! keep; out: its frames, and its claim settled before the last of them, even if the caller leaves
//! midway.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header::LOCATION};
use http_body::{Body, Frame, SizeHint};

use crate::{
    collect::{Collected, plus},
    engine::{
        Settlement,
        execute::{Leave, Panic, catch_poll},
    },
    executing::Executing,
    headers::HeaderPolicy,
    outcome::{Answered, Verdict},
    record::StoredResponse,
};

/// A body on its way to the caller, and the claim that it still holds.
pub(crate) struct Follow<B: Body> {
    /// There until its end is known: what it holds is given back before the claim is settled.
    body: Option<Pin<Box<B>>>,
    /// There until the end of the body is known.
    executing: Option<Executing>,
    answered: Answered,
    head: Head,
    /// The data so far, while it may still be recorded.
    capture: Option<Capturing>,
    leave: Option<Leave>,
    /// How many bytes the receiver takes for all, where it has been told.
    declared: Option<u64>,
    delivered: u64,
    /// There while the claim is being settled. (The mutexes only make it `Sync`.)
    settling: Option<Mutex<Settling>>,
    /// The data that makes the response look complete, kept back until the claim is settled.
    last_data: Option<Bytes>,
    /// What comes after the data, kept back likewise.
    end: Option<End<B::Error>>,
}

impl<B: Body> Follow<B> {
    fn is_settled(&self) -> bool {
        self.executing.is_none() && self.settling.is_none()
    }

    /// Is there nothing more to come, the end of the claim included?
    fn is_over(&self) -> bool {
        self.is_settled() && self.last_data.is_none() && self.end.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let body = self.body.as_ref().map(Body::size_hint);
        let body = body.unwrap_or_else(|| SizeHint::with_exact(0));
        plus(body, self.last_data.as_ref().map_or(0, Bytes::len))
    }
}

/// What of the response's head a record may keep.
pub(crate) struct Head {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) policy: HeaderPolicy,
}

/// A body that is captured as it goes by.
struct Capturing {
    limit: usize,
    data: Collected,
}

type Settling = Pin<Box<dyn Future<Output = ()> + Send>>;

/// How a body ends, other than by just ending.
enum End<E> {
    Trailers(HeaderMap),
    Error(E),
    Panic(Mutex<Panic>),
}

impl<B> Follow<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    pub(crate) fn new(
        body: Pin<Box<B>>,
        executing: Executing,
        answered: Answered,
        head: Head,
        declared: Option<u64>,
        limit: Option<usize>,
    ) -> Self {
        Self {
            body: Some(body),
            leave: executing.claim.leave(),
            executing: Some(executing),
            answered,
            head,
            capture: limit.map(|limit| Capturing { limit, data: Collected::default() }),
            declared,
            delivered: 0,
            settling: None,
            last_data: None,
            end: None,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        loop {
            if let Some(settling) = &mut self.settling {
                let settling = settling.get_mut().unwrap_or_else(PoisonError::into_inner);
                ready!(settling.as_mut().poll(context));
                self.settling = None;
            }
            let Some(body) = &mut self.body else {
                return Poll::Ready(self.take_kept_back());
            };
            match ready!(catch_poll(|| body.as_mut().poll_frame(context))) {
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        if let Some(data) = self.pass(data) {
                            return Poll::Ready(Some(Ok(Frame::data(data))));
                        }
                    }
                    Err(frame) => match frame.into_trailers() {
                        Ok(trailers) => {
                            self.over(Some(&trailers));
                            self.end = Some(End::Trailers(trailers));
                        }
                        // A kind of frame that is not known yet: not ours to judge.
                        Err(frame) => return Poll::Ready(Some(Ok(frame))),
                    },
                },
                Ok(None) => self.over(None),
                Ok(Some(Err(error))) => {
                    self.broke();
                    self.end = Some(End::Error(error));
                }
                Err(panic) => {
                    self.broke();
                    self.end = Some(End::Panic(Mutex::new(panic)));
                }
            }
        }
    }

    /// Drives a body that nobody receives to its end.
    async fn finish(&mut self) {
        while poll_fn(|context| self.poll(context)).await.is_some() {
            // A body that is always ready would never let its time be up.
            tokio::task::consume_budget().await;
        }
    }

    /// The data to pass on now. What would make the response look complete is kept back; what goes
    /// on past the declared length is cut off here, as it would be on its way.
    fn pass(&mut self, mut data: Bytes) -> Option<Bytes> {
        let Some(declared) = self.declared else {
            self.keep(&data);
            return Some(data);
        };
        let room = usize::try_from(declared - self.delivered).unwrap_or(usize::MAX);
        if data.len() > room {
            data.truncate(room);
            self.ended(None);
        }
        self.delivered += data.len() as u64;
        if self.delivered < declared {
            return Some(data);
        }
        if !data.is_empty() {
            self.last_data = Some(data);
        }
        None
    }

    /// Keeps data for the record, until there is too much of it.
    fn keep(&mut self, data: &Bytes) {
        if let Some(Capturing { limit, data: kept }) = &mut self.capture {
            if data.len() > *limit - kept.len() {
                self.capture = None;
            } else {
                kept.push(data.clone());
            }
        }
    }

    fn take_kept_back(&mut self) -> Option<Result<Frame<Bytes>, B::Error>> {
        if let Some(data) = self.last_data.take() {
            return Some(Ok(Frame::data(data)));
        }
        match self.end.take()? {
            End::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
            End::Error(error) => Some(Err(error)),
            End::Panic(panic) => {
                panic.into_inner().unwrap_or_else(PoisonError::into_inner).resume()
            }
        }
    }

    /// The body has come to its end, which may be short of the length that it declared.
    fn over(&mut self, trailers: Option<&HeaderMap>) {
        if self.declared.is_some_and(|declared| self.delivered < declared) {
            self.broke();
        } else {
            self.ended(trailers);
        }
    }

    /// The body is all there: its claim ends as the answer means.
    fn ended(&mut self, trailers: Option<&HeaderMap>) {
        self.body = None;
        if let Some(executing) = self.executing.take() {
            let settlement = match executing.verdict(&self.answered, trailers) {
                Verdict::Record => {
                    let Head { status, headers, policy } = &self.head;
                    let headers = policy.kept(*status, headers, trailers.is_some());
                    let value = if let Some(Capturing { data, .. }) = self.capture.take() {
                        StoredResponse::response(*status, &headers, data.finish(), trailers)
                    } else {
                        let location = headers.iter().find(|(name, _)| *name == LOCATION);
                        StoredResponse::tombstone(location.map(|(_, location)| *location))
                    };
                    value.recorded()
                }
                Verdict::Release => Settlement::Release,
                Verdict::Hold => Settlement::Hold,
            };
            self.settling = Some(Mutex::new(Box::pin(executing.settle(settlement))));
        }
    }

    /// The body broke: a failure, whatever its head said. What would make it look complete all the
    /// same is not sent.
    fn broke(&mut self) {
        self.last_data = None;
        self.body = None;
        if let Some(executing) = self.executing.take() {
            self.settling = Some(Mutex::new(Box::pin(executing.fail())));
        }
    }
}

/// A [`Follow`] that goes on without its caller: dropped midway, it is driven to its end.
pub(crate) struct Followed<B: Body> {
    follow: Option<Box<Follow<B>>>,
    /// [`poll_follow`] and [`hand_over`], which know bounds that a body type cannot name.
    poll: PollFollow<B>,
    hand_over: fn(Box<Follow<B>>),
}

type PollFollow<B> =
    fn(&mut Follow<B>, &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, <B as Body>::Error>>>;

impl<B> Followed<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    pub(crate) fn new(follow: Follow<B>) -> Self {
        Self { follow: Some(Box::new(follow)), poll: Follow::poll, hand_over }
    }

    /// Drives it to its end. Dropped before that, it is not handed over, but ends.
    pub(crate) async fn finish(mut self) {
        if let Some(mut follow) = self.follow.take() {
            follow.finish().await;
        }
    }
}

impl<B: Body> Followed<B> {
    pub(crate) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        // Out of its place while it is polled: if the poll panics, nothing is handed over.
        let Some(mut follow) = self.follow.take() else { return Poll::Ready(None) };
        let frame = (self.poll)(&mut follow, context);
        if !matches!(frame, Poll::Ready(None)) {
            self.follow = Some(follow);
        }
        frame
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.follow.as_ref().is_none_or(|follow| follow.is_over())
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.follow.as_ref().map_or_else(|| SizeHint::with_exact(0), |follow| follow.size_hint())
    }
}

impl<B: Body> Drop for Followed<B> {
    fn drop(&mut self) {
        if let Some(follow) = self.follow.take() {
            (self.hand_over)(follow);
        }
    }
}

/// Drives a body that nobody receives to its end, so that its claim ends as it would have.
fn hand_over<B>(mut follow: Box<Follow<B>>)
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    if let (Some(leave), false) = (follow.leave.take(), follow.is_settled()) {
        leave.finish(async move { follow.finish().await });
    }
}
