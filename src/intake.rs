//! Reads the body of a keyed request. In: a body and its limits; out: all its bytes and its
//! trailers, or 413, 400, 408, 503. No slot and no permit is held meanwhile.

use std::{
    any::Any, error::Error, future::poll_fn, pin::Pin, sync::Mutex, task::Poll, time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use http_body_util::LengthLimitError;
use tokio::{
    runtime::Handle as Runtime,
    time::{Instant, timeout_at},
};

use crate::{
    BoxError,
    body::{RequestBody, Rest},
    buffer::{Buffer, Room},
    collect::{Collected, declared_length},
    disposition::Disposition,
    engine::at_once,
    fingerprint::Content,
    refusal::Refusal,
};

/// How much of a body is read, and for how long.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) bytes: usize,
    pub(crate) idle: Duration,
    pub(crate) total: Duration,
    /// What all bodies together may take.
    pub(crate) buffer: Buffer,
}

/// A request's body, read.
pub(crate) struct Intake {
    body: Bytes,
    trailers: Option<Box<HeaderMap>>,
    room: Room,
}

impl Intake {
    /// What of it makes the fingerprint.
    pub(crate) fn content(&self) -> Content<'_> {
        Content { body: &self.body, trailers: self.trailers.as_deref() }
    }

    /// The body again, for the inner service.
    pub(crate) fn into_body<B>(self) -> RequestBody<B> {
        RequestBody::read(self.body, self.trailers, self.room)
    }
}

/// A body that was not read to its end: why, and what had been read.
pub(crate) struct Unread<E> {
    why: Why<E>,
    data: Bytes,
    trailers: Option<Box<HeaderMap>>,
    room: Room,
}

enum Why<E> {
    TooLarge,
    TooSlow,
    NoRoom,
    Broke(E),
}

impl<E: 'static> Unread<E> {
    /// What the layer would do with such a request.
    pub(crate) fn disposition(&self) -> Disposition {
        match &self.why {
            Why::TooLarge => Disposition::TooLarge,
            Why::Broke(error) if may_be_over_a_limit(error) => Disposition::TooLarge,
            Why::TooSlow | Why::Broke(_) => Disposition::Unreadable,
            Why::NoRoom => Disposition::Capacity,
        }
    }

    /// The body as it was, for whoever wants it all the same: what had been read of it, and then
    /// its own error if that is why, else its rest.
    pub(crate) fn into_body<B>(self, rest: Pin<Box<B>>) -> RequestBody<B>
    where
        E: Send + 'static,
    {
        let rest = match self.why {
            Why::Broke(error) => Rest::Error(Mutex::new(Some(Box::new(error)))),
            Why::TooLarge | Why::TooSlow | Why::NoRoom => Rest::More(rest),
        };
        RequestBody::part(self.data, self.trailers, self.room, rest)
    }
}

impl<E: Into<BoxError>> From<Unread<E>> for Refusal {
    fn from(unread: Unread<E>) -> Self {
        match unread.why {
            Why::TooLarge => Self::body_too_large(),
            Why::TooSlow => Self::body_too_slow(),
            Why::NoRoom => Self::capacity(None),
            Why::Broke(error) => {
                if is_over_a_limit(&*error.into()) {
                    Self::body_too_large()
                } else {
                    Self::body_unreadable()
                }
            }
        }
    }
}

/// So many frames that are there at once are read in one go.
const FRAMES_IN_A_ROW: u32 = 32;

/// Is the body longer than `limit` by its own word, or by the header's?
pub(crate) fn declares_more_than(limit: usize, body: &impl Body, headers: &HeaderMap) -> bool {
    let limit = limit as u64;
    body.size_hint().lower() > limit
        || declared_length(headers).is_some_and(|length| length > limit)
}

/// Reads all of `body`, showing `seen` each piece of data.
///
/// Cancel safe in that nothing is held but room in the buffer, which is given back.
pub(crate) async fn read<B>(
    mut body: Pin<&mut B>,
    limits: &Limits,
    mut seen: impl FnMut(&[u8]),
) -> Result<Intake, Unread<B::Error>>
where
    B: Body<Data = Bytes>,
{
    let mut reading = Reading::new(limits);
    // Most bodies are there at once.
    for _ in 0..FRAMES_IN_A_ROW {
        // One that knows its end need not come back only to say so, and may never do.
        if body.is_end_stream() {
            return reading.end(Ok(()));
        }
        let mut next = poll_fn(|context| body.as_mut().poll_frame(context));
        let Poll::Ready(frame) = at_once(&mut next).await else { break };
        if let Some(end) = reading.take(frame, &mut seen) {
            return reading.end(end);
        }
    }
    // Boxed, or every request would carry the room that few need.
    let end = Box::pin(reading.rest(body, limits, &mut seen)).await;
    reading.end(end)
}

/// What has been read of a body.
struct Reading {
    data: Collected,
    trailers: Option<Box<HeaderMap>>,
    room: Room,
    limit: usize,
}

/// How a body ended: whole, or not.
type End<E> = Result<(), Why<E>>;

impl Reading {
    fn new(limits: &Limits) -> Self {
        let room = limits.buffer.room();
        Self { data: Collected::default(), trailers: None, room, limit: limits.bytes }
    }

    /// Takes in what came next, and says whether that was the end.
    fn take<E>(
        &mut self,
        frame: Option<Result<Frame<Bytes>, E>>,
        seen: &mut impl FnMut(&[u8]),
    ) -> Option<End<E>> {
        let frame = match frame {
            None => return Some(Ok(())),
            Some(Err(error)) => return Some(Err(Why::Broke(error))),
            Some(Ok(frame)) => frame,
        };
        match frame.into_data() {
            Ok(data) => {
                let too_large = data.len() > self.limit - self.data.len();
                let fits = self.room.grow(data.len());
                seen(&data);
                self.data.push(data);
                if too_large {
                    return Some(Err(Why::TooLarge));
                }
                if !fits {
                    return Some(Err(Why::NoRoom));
                }
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    self.trailers.get_or_insert_default().extend(more);
                }
            }
        }
        None
    }

    /// Reads the rest of a body that keeps us waiting, or is long.
    async fn rest<B>(
        &mut self,
        mut body: Pin<&mut B>,
        limits: &Limits,
        seen: &mut impl FnMut(&[u8]),
    ) -> End<B::Error>
    where
        B: Body<Data = Bytes>,
    {
        let timed = Runtime::try_current().is_ok();
        let mut pace = Pace { limits, deadline: None, in_a_row: 0 };
        loop {
            if body.is_end_stream() {
                return Ok(());
            }
            let mut next = poll_fn(|context| body.as_mut().poll_frame(context));
            let (frame, late) = match at_once(&mut next).await {
                Poll::Ready(frame) => (frame, timed && pace.is_late_at_once()),
                Poll::Pending if timed => match pace.wait(next).await {
                    Some(frame) => (frame, false),
                    None => return Err(Why::TooSlow),
                },
                Poll::Pending => (next.await, false),
            };
            match self.take(frame, seen) {
                Some(end) => return end,
                None if late => return Err(Why::TooSlow),
                None => {}
            }
            if timed && pace.is_long_in_a_row() {
                tokio::task::yield_now().await;
            }
        }
    }

    fn end<E>(self, end: End<E>) -> Result<Intake, Unread<E>> {
        let Self { data, trailers, room, .. } = self;
        let data = data.finish();
        match end {
            Ok(()) => Ok(Intake { body: data, trailers, room }),
            Err(why) => Err(Unread { why, data, trailers, room }),
        }
    }
}

/// How fast a body comes.
struct Pace<'a> {
    limits: &'a Limits,
    /// Set when the body first keeps us waiting: most never do, and cost no clock.
    deadline: Option<Instant>,
    in_a_row: u32,
}

impl Pace<'_> {
    /// A frame was there at once. Now and then the clock is looked at: a body can trickle without
    /// ever keeping us waiting.
    fn is_late_at_once(&mut self) -> bool {
        self.in_a_row += 1;
        self.is_long_in_a_row() && self.deadline(Instant::now()).is_none()
    }

    /// Is it time to give others a turn?
    fn is_long_in_a_row(&self) -> bool {
        self.in_a_row > 0 && self.in_a_row.is_multiple_of(FRAMES_IN_A_ROW)
    }

    /// Waits for a frame, within both limits.
    async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Option<T> {
        self.in_a_row = 0;
        let now = Instant::now();
        let deadline = self.deadline(now)?;
        timeout_at(after(now, self.limits.idle).min(deadline), next).await.ok()
    }

    /// When all of the body has to be there; none if that is over.
    fn deadline(&mut self, now: Instant) -> Option<Instant> {
        let deadline = *self.deadline.get_or_insert(after(now, self.limits.total));
        (now < deadline).then_some(deadline)
    }
}

fn after(now: Instant, time: Duration) -> Instant {
    // What cannot be added is for ever; a day is enough for that here.
    now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(86_400))
}

/// Has a limit further out cut the body off?
fn is_over_a_limit(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<LengthLimitError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// The same of an error that is still needed, and so cannot be turned into a boxed one: that of the
/// bodies in use is known.
fn may_be_over_a_limit(error: &dyn Any) -> bool {
    #[cfg(feature = "axum")]
    if let Some(error) = error.downcast_ref::<::axum::Error>() {
        return is_over_a_limit(error);
    }
    error.downcast_ref::<BoxError>().is_some_and(|error| is_over_a_limit(&**error))
}
