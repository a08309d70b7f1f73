//! Running the work that a claim was won for. In: a future; out: its output, even if its caller
//! leaves or it panics. Foreign code runs under [`catch`], the whole execution in a [`HandOver`].

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::runtime::Handle as Runtime;

use super::{Engine, OnLeave};

/// A panic that was caught, to be let go when the claim is settled.
pub(crate) struct Panic(Box<dyn Any + Send>);

impl Panic {
    /// Lets the panic go on. Its message has been printed already.
    pub(crate) fn resume(self) -> ! {
        resume_unwind(self.0)
    }
}

/// Runs `call` and catches its panic.
pub(crate) fn catch_call<T>(call: impl FnOnce() -> T) -> Result<T, Panic> {
    // As below.
    catch_unwind(AssertUnwindSafe(call)).map_err(Panic)
}

/// Runs `poll` and catches its panic.
pub(crate) fn catch_poll<T>(poll: impl FnOnce() -> Poll<T>) -> Poll<Result<T, Panic>> {
    // What the panic leaves half done is dropped by the caller and never looked at again.
    match catch_unwind(AssertUnwindSafe(poll)) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(panic) => Poll::Ready(Err(Panic(panic))),
    }
}

/// Catches a panic of `work`, in any of its polls.
pub(crate) fn catch<F: Future>(work: F) -> Catch<F> {
    Catch { work: Some(work) }
}

pin_project! {
    /// The future of [`catch`]. A future that has panicked is dropped and never polled again.
    pub(crate) struct Catch<F> {
        #[pin]
        work: Option<F>,
    }
}

impl<F: Future> Future for Catch<F> {
    type Output = Result<F::Output, Panic>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let work = this.work.as_mut().as_pin_mut().expect("polled after completion");
        let output = catch_poll(|| work.poll(context));
        if output.is_ready() {
            this.work.set(None);
        }
        output
    }
}

/// Work that goes on without its caller.
pub type Detached = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Wraps work that goes on without its caller.
pub(crate) type Detach = dyn Fn(Detached) -> Detached + Send + Sync;

/// Where work goes whose caller leaves.
pub(crate) struct Leave {
    runtime: Runtime,
    finish_within: Duration,
    detach_with: Option<Arc<Detach>>,
}

impl Leave {
    /// None where there is no runtime, or the rules say to cancel.
    pub(super) fn new<V: 'static>(runtime: Option<&Runtime>, engine: &Engine<V>) -> Option<Self> {
        match engine.rules.on_leave {
            OnLeave::Finish => Some(Self {
                runtime: runtime?.clone(),
                finish_within: engine.rules.finish_within,
                detach_with: engine.detach_with.clone(),
            }),
            OnLeave::Cancel => None,
        }
    }

    /// Lets `work` go on without a caller, at most for `finish_within`; then it is dropped, and the
    /// claim in it ends by the failure rule.
    pub(crate) fn finish(self, work: impl Future<Output = ()> + Send + 'static) {
        let Self { runtime, finish_within, detach_with } = self;
        let work = async move {
            // Nobody is left to tell; what came of it is in the store.
            let _elapsed = tokio::time::timeout(finish_within, work).await;
        };
        match detach_with {
            None => drop(runtime.spawn(work)),
            // The hook runs in the task: if it panics there, the work is dropped there, and the
            // claim in it ends by the failure rule.
            Some(detach) => drop(runtime.spawn(async move { detach(Box::pin(work)).await })),
        }
    }
}

/// An execution that does not end because its caller leaves: dropped unfinished, it is handed to
/// the runtime. What is handed over does not hand itself over again: what is still to be done when
/// its output is there is the rest of the same work, within the same time.
pub(crate) struct HandOver<F: Future<Output: Send> + Send + 'static> {
    work: Option<Pin<Box<F>>>,
    leave: Option<Leave>,
    rest: fn(F::Output) -> Detached,
}

impl<F: Future<Output: Send> + Send + 'static> HandOver<F> {
    pub(crate) fn new(work: F, leave: Option<Leave>, rest: fn(F::Output) -> Detached) -> Self {
        Self { work: Some(Box::pin(work)), leave, rest }
    }
}

impl<F: Future<Output: Send> + Send + 'static> Future for HandOver<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // Out of its place while it is polled: if the poll panics, there is nothing to hand over.
        let mut work = self.work.take().expect("polled after completion");
        let output = work.as_mut().poll(context);
        if output.is_pending() {
            self.work = Some(work);
        }
        output
    }
}

impl<F: Future<Output: Send> + Send + 'static> Drop for HandOver<F> {
    fn drop(&mut self) {
        if let (Some(work), Some(leave)) = (self.work.take(), self.leave.take()) {
            let rest = self.rest;
            leave.finish(async move { rest(work.await).await });
        }
    }
}
