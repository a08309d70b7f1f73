//! A whole request through the layer, and one that follows it: the layer never panics by itself, the
//! work is done once wherever an entry says so, and the second answer is the first one's or a
//! refusal.
//!
//! Bytes: choices for the layer, the first request, its handler, and what the second one changes.

use std::{
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, resume_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    Handle, IdempotencyLayer, InFlight, MemoryStore, OnFailure, OnLeave, Outcome, REPLAYED,
    Refusal, RequestBody, Scope,
};

use super::input::Input;

const CODES: [&str; 12] = [
    "idempotency_key_missing",
    "idempotency_key_invalid",
    "idempotency_scope_unavailable",
    "idempotency_body_too_large",
    "idempotency_body_unreadable",
    "idempotency_conflict",
    "idempotency_in_progress",
    "idempotency_not_replayable",
    "idempotency_outcome_unknown",
    "concurrency_limit",
    "idempotency_capacity",
    "idempotency_store_unavailable",
];

/// What bodies and handlers fail with.
#[derive(Debug)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("as it was told")
    }
}

impl std::error::Error for Broken {}

pub(crate) fn run(bytes: &[u8]) {
    thread_local! {
        static RUNTIME: RefCell<Runtime> = RefCell::new(
            Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .expect("a runtime"),
        );
    }
    let mut input = Input(bytes);
    if input.bit() {
        RUNTIME.with_borrow(|runtime| runtime.block_on(both(&mut input, true)));
    } else {
        // Nothing waits here for longer than once.
        both(&mut input, false).now_or_never().expect("nothing to wait for");
    }
}

async fn both(input: &mut Input<'_>, has_runtime: bool) {
    let store = MemoryStore::new().capacity(2);
    let layer = layer(input, has_runtime).store(store.clone());
    let first = Asked::read(input, has_runtime);
    let handler = Arc::new(Script::read(input, has_runtime));
    let second = first.follow(input);
    let leave_after = input.bit().then(|| input.under(4));

    let one = first.send(&layer, &handler, leave_after).await;
    if has_runtime {
        assert_eq!(layer.drain(Duration::from_secs(3600)).await, 0, "all of it ends");
    }
    assert_eq!(store.in_flight(), 0, "what has ended is not in flight");
    let (runs, live) = (handler.runs(), store.len());
    assert!(runs <= 1 && live <= runs, "{live} entries of {runs} runs");

    let two = second.send(&layer, &handler, None).await;
    if has_runtime {
        assert_eq!(layer.drain(Duration::from_secs(3600)).await, 0, "all of it ends");
    }
    assert_eq!(store.in_flight(), 0, "what has ended is not in flight");
    assert!(store.len() <= 2);

    let asks_the_same = first.operation == second.operation && first.operation.is_some();
    if live == 1 && asks_the_same {
        assert_eq!(handler.runs(), runs, "an entry, and the work was done again");
        match &two {
            Came::Answer(answer) => {
                assert!(answer.replayed, "not run, not refused and not replayed: {answer:?}");
                assert!(second.is_like(&first), "another request was answered with a replay");
                if let Came::Answer(first) = &one {
                    assert!(!first.replayed);
                    assert_eq!((answer.status, &answer.body), (first.status, &first.body));
                    assert_eq!(answer.tag, first.tag, "a header of the handler's");
                }
            }
            Came::Refusal => {}
            other => panic!("{other:?} where there is an entry"),
        }
    }
    let same = first.uri == second.uri && first.method == second.method;
    if live == 1 && asks_the_same && same && first.headers == second.headers {
        let Came::Answer(answer) = &one else { return };
        let same_body = first.body == second.body && first.says == second.says;
        if same_body && answer.status.is_success() && handler.answers_plainly() {
            assert!(matches!(two, Came::Answer(_)), "recorded, and not replayed");
        }
    }
    // An inner error, a panic or a broken body is the handler's.
    let told_to_fail = handler.told_to_fail();
    for came in [&one, &two] {
        assert!(
            told_to_fail || !matches!(came, Came::Failed),
            "{came:?} of a handler that does not"
        );
    }
}

fn layer(input: &mut Input<'_>, has_runtime: bool) -> IdempotencyLayer {
    let choices = input.byte();
    let on = |bit: u8| choices >> bit & 1 == 1;
    let mut layer = IdempotencyLayer::new(|parts| {
        parts.headers.get("tenant").map(|tenant| Scope::new(tenant.as_bytes()))
    })
    .request_limit(64)
    .response_limit(32)
    .on_failure(input.one_of(&[OnFailure::Release, OnFailure::Hold, OnFailure::Record]))
    .key_strict(on(0))
    .key_required(on(1))
    .record_streams(on(2));
    if on(3) {
        layer = layer.fingerprint_json_only(["/a", "/b/0"]);
    }
    if on(4) {
        layer = layer.in_flight(InFlight::Reject);
    }
    if on(5) || !has_runtime {
        layer = layer.on_leave(OnLeave::Cancel);
    }
    layer
}

/// A request, before it is made.
#[derive(Clone)]
struct Asked {
    method: Method,
    uri: &'static str,
    headers: Vec<(&'static str, HeaderValue)>,
    /// The scope and key that it names, where the key is one that needs no reading.
    operation: Option<(HeaderValue, &'static str)>,
    body: Vec<Step>,
    says: Option<u64>,
}

#[derive(Clone, PartialEq, Debug)]
enum Step {
    Data(Bytes),
    Trailer(u8),
    Wait,
    /// Waits for so many seconds; for ever without a clock, so there it does not.
    Sleep(u64),
    Break,
}

impl Step {
    fn read_all(input: &mut Input<'_>, has_runtime: bool) -> Vec<Self> {
        let count = input.under(5);
        let mut steps = Vec::new();
        for _ in 0..count {
            steps.push(match input.under(12) {
                0..=4 => {
                    let length = input.under(12);
                    Self::Data(Bytes::copy_from_slice(input.bytes(length)))
                }
                5 | 6 => Self::Data(Bytes::from_static(input.one_of(&JSON).as_bytes())),
                7 => Self::Trailer(input.byte()),
                8 => Self::Break,
                9 => Self::Data(Bytes::from(vec![b'x'; input.under(80)])),
                _ if !has_runtime => Self::Data(Bytes::new()),
                10 => Self::Wait,
                _ => Self::Sleep(input.byte().into()),
            });
        }
        steps
    }
}

impl Step {
    /// How long the body says that it is: nothing, the truth, or a lie.
    fn length(steps: &[Self], input: &mut Input<'_>) -> Option<u64> {
        match input.under(4) {
            0 => None,
            3 => Some(input.under(96) as u64),
            _ => Some(data(steps).len() as u64),
        }
    }
}

/// All that a body consists of.
fn data(steps: &[Step]) -> Vec<u8> {
    let data = steps.iter().filter_map(|step| match step {
        Step::Data(data) => Some(&data[..]),
        _ => None,
    });
    data.collect::<Vec<_>>().concat()
}

const JSON: [&str; 4] = ["{\"a\":1,", "\"b\":[2]}", " ", "{\"b\":[2],\"a\":1}"];
const KEYS: [&str; 4] = ["k", "\"k\"", "l", "\"\""];
const TYPES: [&str; 4] =
    ["application/json", "application/grpc", "text/plain", "application/json; charset=utf-8"];

impl Asked {
    fn read(input: &mut Input<'_>, has_runtime: bool) -> Self {
        let method = input.one_of(&["POST", "PATCH", "PUT", "GET", "POST", "POST"]);
        let mut asked = Self {
            method: method.parse().expect("a method"),
            uri: input.one_of(&["/", "/a?b=c", "http://host/a"]),
            headers: Vec::new(),
            operation: None,
            body: Vec::new(),
            says: None,
        };
        for _ in 0..input.under(3) {
            let name = input.one_of(&["content-length", "content-encoding", "expect", "trailer"]);
            let length = input.under(8);
            if let Ok(value) = HeaderValue::from_bytes(input.bytes(length)) {
                asked.headers.push((name, value));
            }
        }
        if input.under(4) < 3 {
            asked.headers.push(("content-type", HeaderValue::from_static(input.one_of(&TYPES))));
        }
        let tenant = HeaderValue::from_static(input.one_of(&["one", "two"]));
        if input.under(8) < 7 {
            asked.headers.push(("tenant", tenant.clone()));
        }
        match input.under(8) {
            0 => {}
            1 => {
                let length = input.under(16);
                if let Ok(value) = HeaderValue::from_bytes(input.bytes(length)) {
                    asked.headers.push(("idempotency-key", value));
                }
            }
            _ => {
                let key = input.one_of(&KEYS);
                asked.headers.push(("idempotency-key", HeaderValue::from_static(key)));
                asked.operation = Some((tenant, key.trim_matches('"')));
            }
        }
        asked.body = Step::read_all(input, has_runtime);
        asked.says = Step::length(&asked.body, input);
        asked
    }

    /// The request that comes after it.
    fn follow(&self, input: &mut Input<'_>) -> Self {
        let mut second = self.clone();
        match input.under(8) {
            // In one piece, or with pauses: the same bytes.
            0 => second.body.retain(|step| !matches!(step, Step::Wait | Step::Sleep(_))),
            1 => second.body.push(Step::Data(Bytes::from_static(b"more"))),
            2 => drop(second.body.pop()),
            3 => {
                second.method =
                    if self.method == Method::POST { Method::PATCH } else { Method::POST }
            }
            4 => second.uri = if self.uri == "/" { "/other" } else { "/" },
            5 => {
                // The other spelling of the key.
                if let Some((_, key)) = &self.operation {
                    let quoted = format!("\"{key}\"");
                    for (name, value) in &mut second.headers {
                        if *name == "idempotency-key" {
                            *value = HeaderValue::from_str(&quoted).expect("a value");
                        }
                    }
                }
            }
            6 => second.headers.retain(|(name, _)| *name != "content-type"),
            _ => {}
        }
        second
    }

    /// Does it say the same, as far as is known for sure to count or not to? (JSON may be spelled in
    /// two ways, but not by what [`follow`](Self::follow) changes.)
    fn is_like(&self, first: &Self) -> bool {
        let kind =
            |asked: &Self| asked.headers.iter().find(|(name, _)| *name == "content-type").cloned();
        let path = |asked: &Self| if asked.uri.starts_with("http") { "/a" } else { asked.uri };
        // Of a JSON body under a selection only parts count.
        let same_body = data(&self.body) == data(&first.body)
            || kind(self)
                .is_some_and(|(_, value)| value.as_bytes().starts_with(b"application/json"));
        self.method == first.method
            && path(self) == path(first)
            && kind(self) == kind(first)
            && same_body
    }

    async fn send(
        &self,
        layer: &IdempotencyLayer,
        handler: &Arc<Script>,
        leave_after: Option<usize>,
    ) -> Came {
        let mut request = Request::new(Steps::new(&self.body, self.says));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.parse().expect("an address");
        for (name, value) in &self.headers {
            request.headers_mut().append(*name, value.clone());
        }
        let handler = Arc::clone(handler);
        let inner = service_fn(move |request: Request<RequestBody<Steps>>| {
            let handler = Arc::clone(&handler);
            async move { handler.handle(request).await }
        });
        let call = layer.layer(inner).oneshot(request);
        let whole = async move {
            let response = call.await.map_err(|_| ())?;
            let refusal = response.extensions().get::<Refusal>().cloned();
            let (head, body) = response.into_parts();
            let body = body.collect().await.map_err(|_| ())?.to_bytes();
            if let Some(refusal) = refusal {
                assert!(CODES.contains(&refusal.code()), "{}", refusal.code());
                if let Some(message) = head.headers.get("grpc-message") {
                    assert_eq!(
                        (head.status, message.as_bytes()),
                        (StatusCode::OK, refusal.code().as_bytes())
                    );
                } else {
                    assert_eq!(refusal.status(), head.status);
                    let code = format!("\"code\":\"{}\"", refusal.code());
                    assert!(String::from_utf8_lossy(&body).contains(&code));
                }
                assert!(!head.headers.contains_key(&REPLAYED));
                return Ok(Came::Refusal);
            }
            Ok(Came::Answer(Answer {
                status: head.status,
                replayed: head.headers.contains_key(&REPLAYED),
                tag: head.headers.get("etag").cloned(),
                body,
            }))
        };
        let whole = AssertUnwindSafe(whole).catch_unwind();
        let came = match leave_after {
            None => whole.await,
            Some(polls) => {
                let mut whole = Box::pin(whole);
                let mut left = polls;
                let came = std::future::poll_fn(|context| match whole.as_mut().poll(context) {
                    Poll::Pending if left == 0 => Poll::Ready(None),
                    Poll::Pending => {
                        left -= 1;
                        Poll::Pending
                    }
                    Poll::Ready(came) => Poll::Ready(Some(came)),
                });
                match came.await {
                    Some(came) => came,
                    None => return Came::Nothing,
                }
            }
        };
        match came {
            Ok(Ok(came)) => came,
            Ok(Err(())) => Came::Failed,
            Err(panic) if is_told(&*panic) => Came::Failed,
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// A handler's own panic.
struct Told;

fn is_told(panic: &(dyn Any + Send)) -> bool {
    panic.is::<Told>()
}

#[derive(Debug)]
enum Came {
    Answer(Answer),
    Refusal,
    /// An error or a panic, of the handler's or of a body's.
    Failed,
    /// The caller left.
    Nothing,
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    replayed: bool,
    tag: Option<HeaderValue>,
    body: Bytes,
}

/// What the handler does.
#[allow(clippy::struct_excessive_bools, reason = "each is one thing that it does or not")]
struct Script {
    runs: AtomicUsize,
    reads: bool,
    effects: bool,
    expires: bool,
    waits: bool,
    end: u8,
    status: u16,
    outcome: Option<Outcome>,
    grpc_status: Option<u8>,
    body: Vec<Step>,
    says: Option<u64>,
}

impl Script {
    fn read(input: &mut Input<'_>, has_runtime: bool) -> Self {
        let choices = input.byte();
        let on = |bit: u8| choices >> bit & 1 == 1;
        let body = Step::read_all(input, has_runtime);
        Self {
            runs: AtomicUsize::new(0),
            reads: on(0),
            effects: on(1),
            expires: on(2) && on(3),
            waits: on(4) && has_runtime,
            end: input.byte() % 8,
            status: input.one_of(&[200, 202, 201, 204, 304, 400, 402, 404, 408, 429, 500, 503]),
            outcome: input.one_of(&[
                None,
                Some(Outcome::Final),
                Some(Outcome::NotExecuted),
                Some(Outcome::Unknown),
            ]),
            grpc_status: (choices >> 6 == 3).then(|| input.byte() % 20),
            says: Step::length(&body, input),
            body,
        }
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }

    /// Is there anything in it that ends without an answer, or with half of one?
    fn told_to_fail(&self) -> bool {
        self.end >= 6 || self.body.contains(&Step::Break)
    }

    /// Is it an answer that is recorded, if anything is?
    fn answers_plainly(&self) -> bool {
        let length = data(&self.body).len();
        self.grpc_status.is_none()
            && !matches!(self.outcome, Some(Outcome::Unknown | Outcome::NotExecuted))
            && self.says == Some(length as u64)
            && length <= 32
    }

    async fn handle(
        &self,
        request: Request<RequestBody<Steps>>,
    ) -> Result<Response<Steps>, Broken> {
        self.runs.fetch_add(1, SeqCst);
        let handle = request.extensions().get::<Handle>().cloned();
        if self.reads {
            let head = request.method().clone();
            let keyed = handle.is_some();
            let body = request.into_body().collect().await;
            // A keyed request that broke does not come here.
            assert!(!keyed || body.is_ok(), "{head}: a body that was read, and is not there");
        }
        if let Some(handle) = &handle {
            if self.effects {
                handle.effects_begin();
            }
            if self.expires {
                let _either = handle.expire().await;
            }
        }
        if self.waits {
            tokio::task::yield_now().await;
        }
        match self.end {
            6 => return Err(Broken),
            7 => resume_unwind(Box::new(Told)),
            _ => {}
        }
        let mut response = Response::new(Steps::new(&self.body, self.says));
        *response.status_mut() = StatusCode::from_u16(self.status).expect("a status");
        response.headers_mut().insert("etag", HeaderValue::from_static("\"first\""));
        if let Some(status) = self.grpc_status {
            let headers = response.headers_mut();
            headers.insert("content-type", HeaderValue::from_static("application/grpc"));
            headers.insert("grpc-status", HeaderValue::from(u16::from(status)));
        }
        if let Some(outcome) = self.outcome {
            response.extensions_mut().insert(outcome);
        }
        Ok(response)
    }
}

/// A body that does step by step what it is told.
struct Steps {
    left: VecDeque<Step>,
    says: Option<u64>,
    sleep: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Steps {
    fn new(steps: &[Step], says: Option<u64>) -> Self {
        Self { left: steps.iter().cloned().collect(), says, sleep: None }
    }
}

impl Body for Steps {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                std::task::ready!(sleep.as_mut().poll(context));
                self.sleep = None;
            }
            return match self.left.pop_front() {
                None => Poll::Ready(None),
                Some(Step::Data(data)) => Poll::Ready(Some(Ok(Frame::data(data)))),
                Some(Step::Trailer(value)) => {
                    let value = HeaderValue::from(u16::from(value));
                    let trailers = HeaderMap::from_iter([(http::header::ETAG, value)]);
                    Poll::Ready(Some(Ok(Frame::trailers(trailers))))
                }
                Some(Step::Wait) => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                Some(Step::Sleep(seconds)) => {
                    let time = Duration::from_secs(seconds);
                    self.sleep = Some(Box::pin(tokio::time::sleep(time)));
                    continue;
                }
                Some(Step::Break) => {
                    self.left.clear();
                    Poll::Ready(Some(Err(Broken)))
                }
            };
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.says.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
