//! Walking through a future one step at a time, and dropping it anywhere: futures and bodies that
//! are pending once at every await, and a walker that knows when a future waits for somebody else.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

/// How long each await is pending. Time is paused, so nobody waits; but however often it is polled
/// before the clock moves, it stays pending, and that is a moment to leave at.
const MOMENT: Duration = Duration::from_millis(1);

/// Pending for one moment.
pub async fn pend_once() {
    sleep(MOMENT).await;
}

/// Lets everything come to its end that needs nobody else. With paused time this is exact: the
/// clock moves only when all tasks are idle.
pub async fn settle() {
    sleep(100 * MOMENT).await;
}

/// What a body or an inner service fails with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it failed")
    }
}

impl std::error::Error for Failed {}

/// What a [`StepBody`] does next.
#[derive(Debug, Clone)]
pub enum Step {
    Data(Bytes),
    Trailers(HeaderMap),
    Fail,
    Panic,
}

/// A body that is pending for a moment before each of its steps, and before its end.
pub struct StepBody {
    steps: VecDeque<Step>,
    pending: Option<Pin<Box<Sleep>>>,
    known_length: bool,
    /// Dropped as soon as the body has ended, however it ends.
    until_the_end: Option<Box<dyn Send>>,
}

impl StepBody {
    pub fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            steps: steps.into_iter().collect(),
            pending: None,
            known_length: false,
            until_the_end: None,
        }
    }

    /// `text`, in two pieces.
    pub fn text(text: &str) -> Self {
        let (first, second) = text.split_at(text.len() / 2);
        Self::new([first, second].map(|piece| Step::Data(Bytes::copy_from_slice(piece.as_bytes()))))
    }

    pub fn of_known_length(self) -> Self {
        Self { known_length: true, ..self }
    }

    pub fn holding(self, until_the_end: impl Send + 'static) -> Self {
        Self { until_the_end: Some(Box::new(until_the_end)), ..self }
    }
}

impl Body for StepBody {
    type Data = Bytes;
    type Error = Failed;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failed>>> {
        ready!(self.pending.get_or_insert_with(|| Box::pin(sleep(MOMENT))).as_mut().poll(context));
        self.pending = None;
        match self.steps.pop_front() {
            Some(Step::Data(data)) => Poll::Ready(Some(Ok(Frame::data(data)))),
            Some(Step::Trailers(trailers)) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Some(Step::Fail) => {
                self.until_the_end = None;
                Poll::Ready(Some(Err(Failed)))
            }
            Some(Step::Panic) => {
                self.until_the_end = None;
                panic!("the body panics, as it was told to")
            }
            None => {
                self.until_the_end = None;
                Poll::Ready(None)
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        if !self.known_length {
            return SizeHint::new();
        }
        SizeHint::with_exact(self.steps.iter().fold(0, |length, step| match step {
            Step::Data(data) => length + data.len() as u64,
            _ => length,
        }))
    }
}

/// How far a walk came.
#[derive(Debug)]
pub enum Walked<T> {
    /// All steps were made; the future has been dropped where it stood.
    Dropped,
    /// It was ready before that.
    Ended(T),
    /// It panicked before that.
    Panicked,
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Makes `steps` steps with `future`, then drops it. A step is a poll, or, when the future waits
/// for somebody else, a call of `nudge`. Everybody else makes a step at the same time.
pub async fn walk<F: Future>(
    future: F,
    steps: usize,
    mut nudge: impl FnMut(),
) -> Walked<F::Output> {
    let mut future = Box::pin(future);
    let woken = Arc::new(Flag(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    for step in 0..steps {
        assert!(step < 1_000, "it waits for nobody");
        if step > 0 {
            pend_once().await;
        }
        if !woken.0.swap(false, Ordering::SeqCst) {
            nudge();
            continue;
        }
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context))) {
            Ok(Poll::Ready(output)) => return Walked::Ended(output),
            Ok(Poll::Pending) => {}
            Err(_panic) => return Walked::Panicked,
        }
    }
    Walked::Dropped
}
