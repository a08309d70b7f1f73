//! The bodies that go in and out of the layer: the inner service's own, untouched, or one that the
//! layer has read or made. Their error is the inner body's.

use std::{
    any::Any,
    fmt,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{buffer::Room, collect::plus, follow::Followed};

/// Data and trailers that are all there.
#[derive(Debug, Clone, Default)]
struct Whole {
    data: Bytes,
    trailers: Option<Box<HeaderMap>>,
}

impl Whole {
    fn next_frame(&mut self) -> Option<Frame<Bytes>> {
        if self.data.is_empty() {
            self.trailers.take().map(|trailers| Frame::trailers(*trailers))
        } else {
            Some(Frame::data(std::mem::take(&mut self.data)))
        }
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.data.len() as u64;
        if self.trailers.is_none() {
            return SizeHint::with_exact(length);
        }
        // hyper sends HTTP/1.1 trailers only behind a body of unknown length.
        let mut hint = SizeHint::new();
        hint.set_lower(length);
        hint
    }
}

pin_project! {
    /// The body that the inner service is called with: the caller's own, or what the layer has
    /// read of it, byte for byte, trailers included.
    pub struct RequestBody<B> {
        #[pin]
        kind: RequestKind<B>,
    }
}

pin_project! {
    #[project = RequestKindProject]
    enum RequestKind<B> {
        Untouched { #[pin] body: B },
        Read { whole: Whole, room: Option<Room> },
        Part { whole: Whole, room: Option<Room>, rest: Rest<B> },
    }
}

/// What follows the part of a body that was read.
pub(crate) enum Rest<B> {
    More(Pin<Box<B>>),
    /// A `B::Error`. It is erased so that users who name a `RequestBody<B>` need not say `B: Body`.
    Error(Mutex<Option<Box<dyn Any + Send>>>),
}

/// Takes what is in a mutex that is there only to make it `Sync`.
fn taken<T>(mutex: &mut Mutex<Option<T>>) -> Option<T> {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner).take()
}

impl<B> RequestBody<B> {
    pub(crate) fn untouched(body: B) -> Self {
        Self { kind: RequestKind::Untouched { body } }
    }

    /// A body that has been read whole, and its room in the buffer until it is taken over.
    pub(crate) fn read(data: Bytes, trailers: Option<Box<HeaderMap>>, room: Room) -> Self {
        Self { kind: RequestKind::Read { whole: Whole { data, trailers }, room: Some(room) } }
    }

    /// A body that has been read in part.
    pub(crate) fn part(
        data: Bytes,
        trailers: Option<Box<HeaderMap>>,
        room: Room,
        rest: Rest<B>,
    ) -> Self {
        let whole = Whole { data, trailers };
        Self { kind: RequestKind::Part { whole, room: Some(room), rest } }
    }
}

impl<B: Body<Data = Bytes> + 'static> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            RequestKindProject::Untouched { body } => body.poll_frame(context),
            RequestKindProject::Read { whole, room } => {
                *room = None;
                Poll::Ready(whole.next_frame().map(Ok))
            }
            RequestKindProject::Part { whole, room, rest } => {
                *room = None;
                match (whole.next_frame(), rest) {
                    (Some(frame), _) => Poll::Ready(Some(Ok(frame))),
                    (None, Rest::More(body)) => body.as_mut().poll_frame(context),
                    (None, Rest::Error(error)) => {
                        let error = taken(error).and_then(|error| error.downcast().ok());
                        Poll::Ready(error.map(|error| Err(*error)))
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Untouched { body } => body.is_end_stream(),
            RequestKind::Read { whole, .. } => whole.is_end_stream(),
            RequestKind::Part { whole, rest, .. } => {
                whole.is_end_stream()
                    && match rest {
                        Rest::More(body) => body.is_end_stream(),
                        Rest::Error(_) => false,
                    }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Untouched { body } => body.size_hint(),
            RequestKind::Read { whole, .. } => whole.size_hint(),
            RequestKind::Part { whole, rest, .. } => match rest {
                Rest::More(body) => plus(body.size_hint(), whole.data.len()),
                Rest::Error(_) => SizeHint::new(),
            },
        }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

pin_project! {
    /// The body that the layer answers with: the inner service's own, a recorded one, or that of a
    /// refusal.
    pub struct ResponseBody<B: Body> {
        #[pin]
        kind: ResponseKind<B>,
    }
}

pin_project! {
    #[project = ResponseKindProject]
    enum ResponseKind<B: Body> {
        Inner { #[pin] body: B },
        Whole { whole: Whole },
        Short { whole: Whole, declared: u64 },
        Broken { whole: Whole, error: Option<B::Error> },
        Followed { followed: Followed<B> },
    }
}

impl<B: Body> ResponseBody<B> {
    /// The inner service's body, of a request that the layer let pass.
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: ResponseKind::Inner { body } }
    }

    /// A body that is all there.
    pub(crate) fn whole(data: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Self { kind: ResponseKind::Whole { whole: Whole { data, trailers } } }
    }

    /// A body that ended short of the length that it declared. It declares it still, so that
    /// whoever sends it cuts the connection, and the caller sees that something is missing.
    pub(crate) fn short(data: Bytes, declared: usize) -> Self {
        let whole = Whole { data, trailers: None };
        Self { kind: ResponseKind::Short { whole, declared: declared as u64 } }
    }

    /// What came of a body before it broke, and how it broke.
    pub(crate) fn broken(data: Bytes, error: B::Error) -> Self {
        let whole = Whole { data, trailers: None };
        Self { kind: ResponseKind::Broken { whole, error: Some(error) } }
    }

    /// A body that is delivered as it comes.
    pub(crate) fn followed(followed: Followed<B>) -> Self {
        Self { kind: ResponseKind::Followed { followed } }
    }
}

impl<B> ResponseBody<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    /// Drives a body that nobody receives to its end, where a claim depends on it.
    pub(crate) async fn finish(self) {
        if let ResponseKind::Followed { followed } = self.kind {
            followed.finish().await;
        }
    }
}

/// Empty: what layers further out (CORS, time-outs, authentication) answer with by themselves.
impl<B: Body> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::whole(Bytes::new(), None)
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Send,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            ResponseKindProject::Inner { body } => body.poll_frame(context),
            ResponseKindProject::Whole { whole } => Poll::Ready(whole.next_frame().map(Ok)),
            ResponseKindProject::Short { whole, declared } => {
                *declared -= whole.data.len() as u64;
                Poll::Ready(whole.next_frame().map(Ok))
            }
            ResponseKindProject::Broken { whole, error } => Poll::Ready(match whole.next_frame() {
                Some(frame) => Some(Ok(frame)),
                None => error.take().map(Err),
            }),
            ResponseKindProject::Followed { followed } => followed.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ResponseKind::Inner { body } => body.is_end_stream(),
            ResponseKind::Whole { whole } => whole.is_end_stream(),
            // It is not: something is missing.
            ResponseKind::Short { .. } => false,
            ResponseKind::Broken { whole, error } => whole.is_end_stream() && error.is_none(),
            ResponseKind::Followed { followed } => followed.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            ResponseKind::Inner { body } => body.size_hint(),
            ResponseKind::Whole { whole } => whole.size_hint(),
            ResponseKind::Short { declared, .. } => SizeHint::with_exact(*declared),
            // How long it would have been is not known here; its own header may say.
            ResponseKind::Broken { .. } => SizeHint::new(),
            ResponseKind::Followed { followed } => followed.size_hint(),
        }
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
