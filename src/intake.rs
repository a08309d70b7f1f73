//! Reads the body of a keyed request. In: a body and its limits; out: all its bytes, its trailers
//! and the request's fingerprint, or 413, 400, 408. Nothing is held meanwhile.

use std::{error::Error, future::poll_fn, pin::pin, task::Poll, time::Duration};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use http_body_util::LengthLimitError;
use tokio::time::{Instant, timeout_at};

use crate::{
    BoxError,
    collect::{Collected, declared_length},
    engine::at_once,
    fingerprint::{Fingerprint, Fingerprinter},
    refusal::Refusal,
};

/// How much of a body is read, and for how long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) bytes: usize,
    pub(crate) idle: Duration,
    pub(crate) total: Duration,
}

/// A request's body, read.
pub(crate) struct Intake {
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) fingerprint: Fingerprint,
}

/// So many frames that are there at once are read in one go.
const FRAMES_IN_A_ROW: u32 = 32;

/// Is the body longer than `limit` by its own word, or by the header's?
pub(crate) fn declares_more_than(limit: usize, body: &impl Body, headers: &HeaderMap) -> bool {
    let limit = limit as u64;
    body.size_hint().lower() > limit
        || declared_length(headers).is_some_and(|length| length > limit)
}

/// Reads all of `body`. `timed` says whether there is a runtime to time it by; `known` is the
/// fingerprint of what is already there under the same id.
///
/// Cancel safe in that nothing is held: dropped midway, it only drops the body.
pub(crate) async fn read<B>(
    body: B,
    mut fingerprinter: Fingerprinter,
    limits: &Limits,
    timed: bool,
    known: Option<Fingerprint>,
) -> Result<Intake, Refusal>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let mut body = pin!(body);
    let mut pace = Pace { limits, deadline: None, in_a_row: 0 };
    let mut collected = Collected::default();
    let mut trailers: Option<HeaderMap> = None;
    loop {
        let mut next =
            poll_fn(|context| body.as_mut().poll_frame(context).map(|frame| frame.map(readable)));
        let frame = match at_once(&mut next).await {
            Poll::Ready(frame) if timed => {
                pace.at_once().await?;
                frame
            }
            Poll::Ready(frame) => frame,
            Poll::Pending if timed => pace.wait(next).await?,
            Poll::Pending => next.await,
        };
        let Some(frame) = frame.transpose()? else { break };
        match frame.into_data() {
            Ok(data) => {
                if data.len() > limits.bytes - collected.len() {
                    return Err(Refusal::body_too_large());
                }
                fingerprinter.data(&data);
                collected.push(data);
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
        }
    }
    let body = collected.finish();
    let fingerprint = fingerprinter.finish(&body, trailers.as_ref(), known);
    Ok(Intake { body, trailers, fingerprint })
}

/// How fast a body comes.
struct Pace<'a> {
    limits: &'a Limits,
    /// Set when the body first keeps us waiting: most never do, and cost no clock.
    deadline: Option<Instant>,
    in_a_row: u32,
}

impl Pace<'_> {
    /// A frame was there at once. Now and then others get a turn, and the clock is looked at: a
    /// body can trickle without ever being late.
    async fn at_once(&mut self) -> Result<(), Refusal> {
        self.in_a_row += 1;
        if self.in_a_row >= FRAMES_IN_A_ROW {
            self.in_a_row = 0;
            self.deadline(Instant::now())?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Waits for a frame, within both limits.
    async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Result<T, Refusal> {
        self.in_a_row = 0;
        let now = Instant::now();
        let deadline = self.deadline(now)?;
        timeout_at(after(now, self.limits.idle).min(deadline), next)
            .await
            .map_err(|_elapsed| Refusal::body_too_slow())
    }

    fn deadline(&mut self, now: Instant) -> Result<Instant, Refusal> {
        let deadline = *self.deadline.get_or_insert(after(now, self.limits.total));
        if now >= deadline { Err(Refusal::body_too_slow()) } else { Ok(deadline) }
    }
}

/// A frame, or the refusal that its error means.
fn readable<E: Into<BoxError>>(frame: Result<Frame<Bytes>, E>) -> Result<Frame<Bytes>, Refusal> {
    frame.map_err(|error| {
        if is_over_a_limit(&*error.into()) {
            Refusal::body_too_large()
        } else {
            Refusal::body_unreadable()
        }
    })
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
