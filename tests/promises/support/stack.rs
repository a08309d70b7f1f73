//! The layer around a handler that counts its runs, with bodies of one type, and bodies that do
//! step by step what a test tells them.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use tokio::task::JoinHandle;
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, MemoryStore, RequestBody, ResponseBody, StoredResponse, scope,
};

use super::{Answer, Gate, Runs, within};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The error of every body and handler in these tests. (A type with a name: rustc cannot prove a
/// task `Send` that holds a `dyn Error` within a body's type.)
#[derive(Debug)]
pub struct AnyError(BoxError);

impl AnyError {
    pub fn new(error: impl Into<BoxError>) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for AnyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for AnyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.0)
    }
}

/// The body of every request and response in these tests.
pub type AnyBody = UnsyncBoxBody<Bytes, AnyError>;

/// A request as a handler gets it.
pub type Inner = Request<RequestBody<AnyBody>>;

type Handle =
    dyn Fn(usize, Inner) -> BoxFuture<'static, Result<Response<AnyBody>, AnyError>> + Send + Sync;

/// A handler that counts its runs; each is told its number, from 1.
#[derive(Clone)]
pub struct Handler {
    pub runs: Runs,
    handle: Arc<Handle>,
}

impl Handler {
    pub fn new<F, R>(handle: F) -> Self
    where
        F: Fn(usize, Inner) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Response<AnyBody>, AnyError>> + Send + 'static,
    {
        let handle: Arc<Handle> = Arc::new(move |run, request| Box::pin(handle(run, request)));
        Self { runs: Runs::default(), handle }
    }
}

impl Service<Inner> for Handler {
    type Response = Response<AnyBody>;
    type Error = AnyError;
    type Future = BoxFuture<'static, Result<Response<AnyBody>, AnyError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), AnyError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Inner) -> Self::Future {
        (self.handle)(self.runs.run(), request)
    }
}

/// The layer around one [`Handler`].
#[derive(Clone)]
pub struct Stack {
    pub service: Idempotency<Handler>,
    pub runs: Runs,
}

impl Stack {
    pub fn new<F, R>(layer: &IdempotencyLayer, handle: F) -> Self
    where
        F: Fn(usize, Inner) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Response<AnyBody>, AnyError>> + Send + 'static,
    {
        let handler = Handler::new(handle);
        Self { runs: handler.runs.clone(), service: layer.layer(handler) }
    }

    /// Around a handler that answers 200 and the number of its run.
    pub fn numbered(layer: &IdempotencyLayer) -> Self {
        Self::new(layer, |run, _| async move { Ok(text(200, format!("run {run}"))) })
    }

    /// The same, but so many runs, the first ones, wait at `gate` before they answer.
    pub fn waiting_at(gate: &Gate, runs: usize, layer: &IdempotencyLayer) -> Self {
        let gate = gate.clone();
        Self::new(layer, move |run, _| {
            let gate = gate.clone();
            async move {
                if run <= runs {
                    gate.pass().await;
                }
                Ok(text(200, format!("run {run}")))
            }
        })
    }

    /// Around a handler that answers one status after the other, the last one for ever.
    pub fn answering(layer: &IdempotencyLayer, statuses: &'static [u16]) -> Self {
        Self::new(layer, move |run, _| async move {
            let status = statuses.get(run - 1).or(statuses.last()).unwrap();
            Ok(text(*status, format!("run {run}")))
        })
    }

    /// Sends one request through a clone of the service; the body is not read.
    pub fn call<B>(&self, request: Request<B>) -> BoxFuture<'static, Called>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let call: BoxFuture<'static, Called> =
            Box::pin(self.service.clone().oneshot(request.map(any)));
        Box::pin(async move { within(call).await })
    }

    /// Sends one request and reads the answer.
    pub fn send<B>(&self, request: Request<B>) -> BoxFuture<'static, Answer>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let call = self.call(request);
        Box::pin(async move { within(Answer::read(call.await.unwrap())).await })
    }

    /// Sends one request and reads the answer, in a task of its own.
    pub fn spawn<B>(&self, request: Request<B>) -> JoinHandle<Answer>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        tokio::spawn(self.send(request))
    }
}

/// What comes of a call.
pub type Called = Result<Response<ResponseBody<AnyBody>>, AnyError>;

/// A layer with one tenant, and its store.
pub fn layer() -> (IdempotencyLayer, MemoryStore<StoredResponse>) {
    let store = MemoryStore::new();
    (IdempotencyLayer::new(scope::single_tenant()).store(store.clone()), store)
}

pub fn any<B>(body: B) -> AnyBody
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(AnyError::new).boxed_unsync()
}

/// A response whose length is known.
pub fn text(status: u16, body: impl Into<Bytes>) -> Response<AnyBody> {
    let mut response = Response::new(any(Full::new(body.into())));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

pub fn with_header(
    mut response: Response<AnyBody>,
    name: &'static str,
    value: impl AsRef<[u8]>,
) -> Response<AnyBody> {
    response.headers_mut().append(name, http::HeaderValue::from_bytes(value.as_ref()).unwrap());
    response
}

pub fn with_extension<T: Clone + Send + Sync + 'static>(
    mut response: Response<AnyBody>,
    extension: T,
) -> Response<AnyBody> {
    response.extensions_mut().insert(extension);
    response
}

/// What a [`Script`] does next.
pub enum Step {
    Data(Bytes),
    Trailers(HeaderMap),
    /// Ends with an error.
    Break,
    Panic,
    /// Waits at a gate.
    Pass(Gate),
    Sleep(Duration),
    /// The same step for ever.
    Forever(fn() -> Self),
}

impl Step {
    pub fn data(data: impl Into<Bytes>) -> Self {
        Self::Data(data.into())
    }

    pub fn trailer(name: &'static str, value: &'static str) -> Self {
        Self::Trailers(HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]))
    }
}

/// A body that does what it is told, step by step.
pub struct Script {
    steps: VecDeque<Step>,
    hint: SizeHint,
    waiting: Option<BoxFuture<'static, ()>>,
    polls: Polls,
    knows_its_end: bool,
}

/// How often a body has been polled.
#[derive(Debug, Clone, Default)]
pub struct Polls(Arc<AtomicUsize>);

impl Polls {
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Script {
    /// A body that does not say how long it is.
    pub fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            steps: steps.into_iter().collect(),
            hint: SizeHint::default(),
            waiting: None,
            polls: Polls::default(),
            knows_its_end: false,
        }
    }

    /// A body of one frame that says nothing of its length.
    pub fn unknown_length(data: impl Into<Bytes>) -> Self {
        Self::new([Step::Data(data.into())])
    }

    /// It says, rightly or not, that it is `length` bytes long.
    pub fn says(mut self, length: u64) -> Self {
        self.hint = SizeHint::with_exact(length);
        self
    }

    /// It says so when it has ended, and whoever asks it once more hears nothing.
    pub fn knows_its_end(mut self) -> Self {
        self.knows_its_end = true;
        self
    }

    pub fn polls(&self) -> Polls {
        self.polls.clone()
    }
}

#[derive(Debug)]
pub struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the body broke")
    }
}

impl std::error::Error for Broken {}

impl Body for Script {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.polls.0.fetch_add(1, Ordering::SeqCst);
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(context));
                self.waiting = None;
            }
            let Some(mut step) = self.steps.pop_front() else {
                return if self.knows_its_end { Poll::Pending } else { Poll::Ready(None) };
            };
            if let Step::Forever(make) = step {
                self.steps.push_front(Step::Forever(make));
                step = make();
            }
            return match step {
                Step::Data(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
                Step::Trailers(trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
                Step::Break => Poll::Ready(Some(Err(Broken))),
                Step::Panic => panic!("a body panics, as it was told"),
                Step::Pass(gate) => {
                    self.waiting = Some(Box::pin(async move { gate.pass().await }));
                    continue;
                }
                Step::Sleep(time) => {
                    self.waiting = Some(Box::pin(tokio::time::sleep(time)));
                    continue;
                }
                Step::Forever(_) => unreachable!("a step for ever makes others"),
            };
        }
    }

    fn is_end_stream(&self) -> bool {
        self.knows_its_end && self.steps.is_empty() && self.waiting.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}
