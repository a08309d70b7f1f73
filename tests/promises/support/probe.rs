//! A strict inner service: it panics when it is called unready, or on a clone that was not the one
//! made ready; it counts what is running and what it has promised to whom; and it is pending
//! at every await.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use tower::Service;
use tower_idempotency::RequestBody;

use super::{
    Gate, Runs,
    steps::{Failed, Step, StepBody, pend_once},
};

/// What one run of the inner service comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// This status, and `run <number>` as a body of known length.
    Status(u16),
    /// The same, as a body of unknown length.
    Stream(u16),
    /// The same, padded to [`LARGE`] bytes of known length.
    Large(u16),
    Error,
    PanicInCall,
    PanicInFuture,
    /// A body, of known length or not, that panics midway.
    PanicInBody {
        known_length: bool,
    },
    /// A body, of known length or not, that fails midway.
    BreakInBody {
        known_length: bool,
    },
}

/// How long a [`Reply::Large`] is.
pub const LARGE: usize = 200;

type Script = dyn Fn(usize) -> Reply + Send + Sync;

/// The inner service. Clones share all but their readiness.
pub struct Probe {
    shared: Arc<Shared>,
    asked: bool,
    ready: Option<Promise>,
}

struct Shared {
    script: Box<Script>,
    runs: Runs,
    /// So many runs, the first ones, wait here.
    gate: Option<(Gate, usize)>,
    readiness_polls: AtomicUsize,
    readiness_errors_left: AtomicUsize,
    promised: AtomicUsize,
    promises_broken: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
}

impl Probe {
    /// An inner service whose run with each number, from 1, comes to what `script` says.
    pub fn new(script: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        let zero = AtomicUsize::default;
        let shared = Shared {
            script: Box::new(script),
            runs: Runs::default(),
            gate: None,
            readiness_polls: zero(),
            readiness_errors_left: zero(),
            promised: zero(),
            promises_broken: zero(),
            running: zero(),
            most_running: zero(),
        };
        Self { shared: Arc::new(shared), asked: false, ready: None }
    }

    /// Every run answers 200 with its number.
    pub fn answering() -> Self {
        Self::new(|_| Reply::Status(200))
    }

    /// Lets the first `runs` runs wait at `gate`. Only before the first clone.
    pub fn runs_wait_at(mut self, gate: &Gate, runs: usize) -> Self {
        Arc::get_mut(&mut self.shared).unwrap().gate = Some((gate.clone(), runs));
        self
    }

    /// Lets the next time that somebody asks whether it is ready fail.
    pub fn fail_next_readiness(&self) {
        self.shared.readiness_errors_left.store(1, Ordering::SeqCst);
    }

    pub fn make_ready_again(&self) {
        self.shared.readiness_errors_left.store(0, Ordering::SeqCst);
    }

    /// How often it has been called.
    pub fn runs(&self) -> usize {
        self.shared.runs.count()
    }

    /// How often it has been asked whether it is ready.
    pub fn readiness_polls(&self) -> usize {
        self.shared.readiness_polls.load(Ordering::SeqCst)
    }

    /// How many have been told that it is ready and have not been answered yet: the permits that a
    /// concurrency limit would have given out.
    pub fn promised(&self) -> usize {
        self.shared.promised.load(Ordering::SeqCst)
    }

    /// How many were told that it is ready and then did not call it.
    pub fn promises_broken(&self) -> usize {
        self.shared.promises_broken.load(Ordering::SeqCst)
    }

    /// How many runs are between their call and the end of their response body.
    pub fn running(&self) -> usize {
        self.shared.running.load(Ordering::SeqCst)
    }

    /// How many runs there were at most at one moment.
    pub fn most_running(&self) -> usize {
        self.shared.most_running.load(Ordering::SeqCst)
    }
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), asked: false, ready: None }
    }
}

/// "You may call me": given back after the answer.
struct Promise {
    shared: Arc<Shared>,
    called: bool,
}

impl Promise {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.promised.fetch_add(1, Ordering::SeqCst);
        Self { shared: Arc::clone(shared), called: false }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.shared.promised.fetch_sub(1, Ordering::SeqCst);
        if !self.called {
            self.shared.promises_broken.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// One run, until its answer has ended or is gone.
struct Running(Arc<Shared>);

impl Running {
    fn new(shared: &Arc<Shared>) -> Self {
        let running = shared.running.fetch_add(1, Ordering::SeqCst) + 1;
        shared.most_running.fetch_max(running, Ordering::SeqCst);
        Self(Arc::clone(shared))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<B: Send + 'static> Service<Request<RequestBody<B>>> for Probe {
    type Response = Response<StepBody>;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<Response<StepBody>, Failed>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        self.shared.readiness_polls.fetch_add(1, Ordering::SeqCst);
        if !std::mem::replace(&mut self.asked, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let left = &self.shared.readiness_errors_left;
        if left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
        {
            return Poll::Ready(Err(Failed));
        }
        self.ready.get_or_insert_with(|| Promise::new(&self.shared));
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<B>>) -> Self::Future {
        let mut promise = self.ready.take().expect("called without being ready, or on a clone");
        self.asked = false;
        promise.called = true;
        let running = Running::new(&self.shared);
        let number = self.shared.runs.run();
        let reply = (self.shared.script)(number);
        assert!(reply != Reply::PanicInCall, "the call panics, as it was told to");
        let gate = self.shared.gate.clone().filter(|(_, runs)| number <= *runs);
        Box::pin(async move {
            let _promise = promise;
            pend_once().await;
            if let Some((gate, _)) = gate {
                gate.pass().await;
            }
            drop(request);
            pend_once().await;
            answer(reply, number, running)
        })
    }
}

fn answer(reply: Reply, number: usize, running: Running) -> Result<Response<StepBody>, Failed> {
    let text = format!("run {number}");
    let midway = |step, known_length| {
        let body = StepBody::new([Step::Data(Bytes::from_static(b"half")), step]);
        if known_length { body.of_known_length() } else { body }
    };
    let (status, body) = match reply {
        Reply::Status(status) => (status, StepBody::text(&text).of_known_length()),
        Reply::Stream(status) => (status, StepBody::text(&text)),
        Reply::Large(status) => {
            (status, StepBody::text(&format!("{text:LARGE$}")).of_known_length())
        }
        Reply::Error => return Err(Failed),
        Reply::PanicInCall => unreachable!("it has panicked"),
        Reply::PanicInFuture => panic!("the future panics, as it was told to"),
        Reply::PanicInBody { known_length } => (200, midway(Step::Panic, known_length)),
        Reply::BreakInBody { known_length } => (200, midway(Step::Fail, known_length)),
    };
    let response = Response::builder().status(status).header("location", "/v1/runs/1");
    Ok(response.body(body.holding(running)).unwrap())
}
