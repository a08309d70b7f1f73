//! Requests that come, repeat, leave and wait, handlers and bodies that end in every way, time that
//! passes: the layer answers, runs and counts what it has to, after every step.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    convert::Infallible,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use proptest::{
    prelude::*,
    sample::select,
    strategy::{Union, ValueTree},
    test_runner::TestRunner,
};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use tokio::{runtime::Runtime, sync::mpsc, task::yield_now};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{
    Handle, Idempotency, IdempotencyLayer, InFlight, MemoryStore, OnFailure, OnLeave, RequestBody,
    Scope, StoredResponse,
};

/// The clock goes in half seconds, and what lasts ends between two of them: so no two things end at
/// the same time by chance. Whoever does something does it at a whole second.
const TICK: Duration = Duration::from_millis(500);

/// How long it lasts, and by how many ticks it is over. Work is only cut off between two seconds.
const WAIT: (Duration, u64) = (Duration::from_millis(2_750), 6);
const RETENTION: (Duration, u64) = (Duration::from_millis(6_250), 13);
const FINISH_WITHIN: (Duration, u64) = (Duration::from_millis(4_250), 9);

/// The largest body that is recorded.
const LIMIT: usize = 7;

/// A piece of a body of unknown length. One is within the limit, two are not.
const PIECE: &str = "abcd";

/// So many requests are there at once.
const REQUESTS: usize = 8;

/// One operation.
type Id = (u8, u8);

/// What happens next.
#[derive(Debug, Clone)]
enum Event {
    Send {
        scope: u8,
        key: u8,
        asks: u8,
        slowly: bool,
    },
    /// The body of a request that is slow is there.
    BodyArrives {
        request: usize,
    },
    /// The caller leaves, wherever its request is.
    Leave {
        request: usize,
    },
    Tell {
        execution: usize,
        what: Tell,
    },
    /// The same, and a caller leaves before anything comes of it.
    TellAndLeave {
        execution: usize,
        what: Tell,
        request: usize,
    },
    Pass {
        seconds: u64,
    },
}

/// What a handler, or the body of its answer, does next.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tell {
    EffectsBegin,
    Answer { status: u16, body: Shape },
    Error,
    Panic,
    // The body:
    Piece,
    End,
    Break,
    BodyPanics,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    /// All there, of declared length.
    Whole,
    /// Of declared length, and still to come.
    Declared,
    /// Of declared length, too large to be recorded, and still to come.
    Large,
    /// Of unknown length, and still to come.
    Unknown,
}

impl Shape {
    /// Does the caller see it as it comes?
    fn is_followed(self) -> bool {
        matches!(self, Self::Large | Self::Unknown)
    }
}

/// What is set.
#[derive(Debug, Clone, Copy)]
struct Rules {
    capacity: usize,
    waits: bool,
    on_failure: OnFailure,
    on_leave: OnLeave,
}

/// What a caller has heard.
#[derive(Debug, Clone, Default, PartialEq)]
struct Heard {
    /// 0 without any.
    status: u16,
    is_replay: bool,
    /// The body so far; the code, of a refusal.
    text: String,
    end: End,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum End {
    #[default]
    Open,
    Whole,
    Broken,
    Panicked,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    ReadingBody,
    Waiting { until: u64 },
    Executing(usize),
    Over,
}

#[derive(Debug, Clone)]
struct Asking {
    id: Id,
    asks: u8,
    at: At,
    heard: Heard,
}

#[derive(Debug, Clone)]
struct Execution {
    id: Id,
    /// The how-manieth of its operation it is. (Those of two operations may begin in any order,
    /// where they begin at the same time.)
    nth: usize,
    /// Whose, while its caller is there.
    caller: Option<usize>,
    /// When it is cut off.
    until: Option<u64>,
    effects: bool,
    answered: Option<(u16, Shape)>,
    body: String,
    is_over: bool,
}

#[derive(Debug, Clone)]
enum Entry {
    InFlight { asks: u8 },
    Held { asks: u8, until: u64 },
    Recorded { asks: u8, until: u64, status: u16, body: Option<String> },
}

impl Entry {
    fn asks(&self) -> u8 {
        match self {
            Self::InFlight { asks } | Self::Held { asks, .. } | Self::Recorded { asks, .. } => {
                *asks
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    Record,
    Release,
    Hold,
}

/// The layer, told in the plainest words.
#[derive(Debug, Clone)]
struct Model {
    rules: Rules,
    /// In ticks.
    now: u64,
    requests: Vec<Asking>,
    executions: Vec<Execution>,
    entries: BTreeMap<Id, Entry>,
}

impl Model {
    fn refuse(&mut self, request: usize, status: u16, code: &str) {
        let heard = Heard { status, text: code.to_owned(), end: End::Whole, ..Heard::default() };
        self.hear(request, heard);
    }

    fn hear(&mut self, request: usize, heard: Heard) {
        self.requests[request].heard = heard;
        self.requests[request].at = At::Over;
    }

    fn claim(&mut self, request: usize) {
        let Asking { id, asks, at, .. } = self.requests[request];
        let entry = self.entries.get(&id).cloned();
        match entry {
            Some(entry) if entry.asks() != asks => {
                self.refuse(request, 409, "idempotency_conflict");
            }
            Some(Entry::InFlight { .. }) if !self.rules.waits => {
                self.refuse(request, 409, "idempotency_in_progress");
            }
            Some(Entry::InFlight { .. }) => {
                let until = match at {
                    At::Waiting { until } => until,
                    _ => self.now + WAIT.1,
                };
                self.requests[request].at = At::Waiting { until };
            }
            Some(Entry::Held { .. }) => self.refuse(request, 409, "idempotency_outcome_unknown"),
            Some(Entry::Recorded { body: None, .. }) => {
                self.refuse(request, 409, "idempotency_not_replayable");
            }
            Some(Entry::Recorded { status, body: Some(text), .. }) => {
                self.hear(request, Heard { status, is_replay: true, text, end: End::Whole });
            }
            None if self.entries.len() >= self.rules.capacity => {
                self.refuse(request, 503, "idempotency_capacity");
            }
            None => {
                self.entries.insert(id, Entry::InFlight { asks });
                self.requests[request].at = At::Executing(self.executions.len());
                let nth = self.executions.iter().filter(|other| other.id == id).count();
                self.executions.push(Execution {
                    id,
                    nth,
                    caller: Some(request),
                    until: None,
                    effects: false,
                    answered: None,
                    body: String::new(),
                    is_over: false,
                });
            }
        }
    }

    /// How an execution ends that has left no answer.
    fn failed(&self, execution: usize) -> Verdict {
        if self.rules.on_failure == OnFailure::Release && !self.executions[execution].effects {
            Verdict::Release
        } else {
            Verdict::Hold
        }
    }

    /// How an execution ends that has answered.
    fn verdict(&self, execution: usize, status: u16) -> Verdict {
        let verdict = match status {
            200..=399 | 402 => Verdict::Record,
            408 | 500.. => match self.rules.on_failure {
                OnFailure::Release => Verdict::Release,
                OnFailure::Hold => Verdict::Hold,
                _ => Verdict::Record,
            },
            _ => Verdict::Release,
        };
        match verdict {
            Verdict::Release if self.executions[execution].effects => Verdict::Hold,
            verdict => verdict,
        }
    }

    /// Ends an execution; its caller hears `heard`, and those who wait go back to the claim in the
    /// order in which they came.
    fn end(&mut self, execution: usize, verdict: Verdict, heard: Option<Heard>) {
        let Execution { id, caller, answered, body, .. } = self.executions[execution].clone();
        self.executions[execution].is_over = true;
        if let Some(caller) = caller {
            match heard {
                Some(heard) => self.hear(caller, heard),
                None => self.requests[caller].at = At::Over,
            }
        }
        let asks = self.entries[&id].asks();
        let until = self.now + RETENTION.1;
        match verdict {
            Verdict::Release => drop(self.entries.remove(&id)),
            Verdict::Hold => drop(self.entries.insert(id, Entry::Held { asks, until })),
            Verdict::Record => {
                let (status, _) = answered.unwrap();
                let body = Some(body).filter(|body| body.len() <= LIMIT);
                self.entries.insert(id, Entry::Recorded { asks, until, status, body });
            }
        }
        for request in 0..self.requests.len() {
            let Asking { id: of, at, .. } = self.requests[request];
            if of == id && matches!(at, At::Waiting { .. }) {
                self.claim(request);
            }
        }
    }

    fn tell(&mut self, execution: usize, what: Tell) {
        let Execution { answered, nth, .. } = self.executions[execution];
        let body = &mut self.executions[execution].body;
        match what {
            Tell::EffectsBegin => self.executions[execution].effects = true,
            Tell::Answer { status, body: shape } => {
                self.executions[execution].answered = Some((status, shape));
                match shape {
                    Shape::Whole => {
                        self.executions[execution].body = whole(nth, shape);
                        self.finish(execution, End::Whole);
                    }
                    Shape::Declared => {}
                    Shape::Large | Shape::Unknown => self.show(execution),
                }
            }
            Tell::Error | Tell::Panic => {
                let end = if what == Tell::Error { End::Broken } else { End::Panicked };
                let heard = Heard { end, ..Heard::default() };
                self.end(execution, self.failed(execution), Some(heard));
            }
            Tell::Piece => {
                body.push_str(piece(answered));
                self.show(execution);
            }
            Tell::End => {
                if let Some((_, shape @ (Shape::Declared | Shape::Large))) = answered {
                    *body = whole(nth, shape);
                }
                self.finish(execution, End::Whole);
            }
            Tell::Break => self.finish(execution, End::Broken),
            Tell::BodyPanics => self.finish(execution, End::Panicked),
        }
    }

    /// The caller sees what is there of a body of unknown length.
    fn show(&mut self, execution: usize) {
        let Execution { caller, answered, body, .. } = self.executions[execution].clone();
        let answered = answered.filter(|(_, shape)| shape.is_followed());
        if let (Some(caller), Some((status, _))) = (caller, answered) {
            self.requests[caller].heard = Heard { status, text: body, ..Heard::default() };
        }
    }

    fn finish(&mut self, execution: usize, end: End) {
        let Execution { answered, body, .. } = self.executions[execution].clone();
        let (status, shape) = answered.unwrap();
        let verdict = match end {
            End::Whole => self.verdict(execution, status),
            _ => self.failed(execution),
        };
        let heard = match (end, shape) {
            // It was never answered: its body was still being collected.
            (End::Panicked, Shape::Declared) => Heard { end, ..Heard::default() },
            _ => Heard { status, text: body, end, is_replay: false },
        };
        self.end(execution, verdict, Some(heard));
    }

    fn leave(&mut self, request: usize) {
        if let At::Executing(execution) = self.requests[request].at {
            self.executions[execution].caller = None;
            match self.rules.on_leave {
                OnLeave::Finish => {
                    self.executions[execution].until = Some(self.now + FINISH_WITHIN.1);
                }
                _ => self.end(execution, self.failed(execution), None),
            }
        }
        self.requests[request].at = At::Over;
    }

    fn tick(&mut self) {
        self.now += 1;
        let now = self.now;
        self.entries.retain(|_, entry| match entry {
            Entry::InFlight { .. } => true,
            Entry::Held { until, .. } | Entry::Recorded { until, .. } => *until > now,
        });
        for request in 0..self.requests.len() {
            if matches!(self.requests[request].at, At::Waiting { until } if until <= now) {
                self.refuse(request, 409, "idempotency_in_progress");
            }
        }
        for execution in 0..self.executions.len() {
            let Execution { until, is_over, .. } = self.executions[execution];
            if !is_over && until.is_some_and(|until| until <= now) {
                self.end(execution, self.failed(execution), None);
            }
        }
    }

    /// Which requests are there, and which of them have a body that is still to come.
    fn there(&self, is: impl Fn(At) -> bool) -> Vec<usize> {
        (0..self.requests.len()).filter(|request| is(self.requests[*request].at)).collect()
    }

    fn running(&self) -> Vec<usize> {
        (0..self.executions.len()).filter(|number| !self.executions[*number].is_over).collect()
    }

    fn may_tell(&self, execution: usize, what: Tell) -> bool {
        let Some(Execution { answered, body, is_over: false, .. }) = self.executions.get(execution)
        else {
            return false;
        };
        let is_of_the_body =
            matches!(what, Tell::Piece | Tell::End | Tell::Break | Tell::BodyPanics);
        let goes_on = match answered {
            // Half of it, once; the end brings the other half.
            Some((_, Shape::Declared | Shape::Large)) => body.is_empty(),
            _ => true,
        };
        is_of_the_body == answered.is_some() && (what != Tell::Piece || goes_on)
    }
}

/// The body of an execution's answer, where it is not of unknown length.
fn whole(nth: usize, shape: Shape) -> String {
    format!("run {nth:03}{}", if shape == Shape::Large { ", and more" } else { "" })
}

/// A piece of the body.
fn piece(answered: Option<(u16, Shape)>) -> &'static str {
    if let Some((_, Shape::Unknown)) = answered { PIECE } else { "run" }
}

fn tells() -> BoxedStrategy<Tell> {
    let status = select(vec![200_u16, 201, 200, 303, 402, 404, 408, 422, 500, 503]);
    let shape = select(vec![Shape::Whole, Shape::Declared, Shape::Large, Shape::Unknown]);
    prop_oneof![
        2 => Just(Tell::EffectsBegin),
        10 => (status, shape).prop_map(|(status, body)| Tell::Answer { status, body }),
        1 => Just(Tell::Error),
        1 => Just(Tell::Panic),
    ]
    .boxed()
}

fn tells_of_a_body() -> BoxedStrategy<Tell> {
    prop_oneof![
        4 => Just(Tell::Piece),
        4 => Just(Tell::End),
        1 => Just(Tell::Break),
        1 => Just(Tell::BodyPanics),
    ]
    .boxed()
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Event;

    fn init_state() -> BoxedStrategy<Self> {
        let on_failure = select(vec![OnFailure::Release, OnFailure::Hold, OnFailure::Record]);
        let on_leave = select(vec![OnLeave::Finish, OnLeave::Cancel]);
        (1..4_usize, proptest::bool::weighted(0.8), on_failure, on_leave)
            .prop_map(|(capacity, waits, on_failure, on_leave)| Self {
                rules: Rules { capacity, waits, on_failure, on_leave },
                now: 0,
                requests: Vec::new(),
                executions: Vec::new(),
                entries: BTreeMap::new(),
            })
            .boxed()
    }

    fn transitions(model: &Self) -> BoxedStrategy<Event> {
        let mostly_0 = |of: u8| select(vec![0, 0, 0, of]);
        let send = (mostly_0(1), 0..3_u8, mostly_0(1), proptest::bool::weighted(0.2)).prop_map(
            |(scope, key, asks, slowly)| Event::Send { scope, key: key / 2, asks, slowly },
        );
        let pass = (1..5_u64).prop_map(|seconds| Event::Pass { seconds });
        let mut events: Vec<(u32, BoxedStrategy<Event>)> =
            vec![(8, send.boxed()), (2, pass.boxed())];
        let there = model.there(|at| at != At::Over);
        if !there.is_empty() {
            let leave = select(there).prop_map(|request| Event::Leave { request });
            events.push((2, leave.boxed()));
        }
        let reading = model.there(|at| at == At::ReadingBody);
        if !reading.is_empty() {
            let arrives = select(reading).prop_map(|request| Event::BodyArrives { request });
            events.push((3, arrives.boxed()));
        }
        for execution in model.running() {
            let what = match model.executions[execution].answered {
                None => tells(),
                Some(_) => tells_of_a_body(),
            };
            let tell = what.clone().prop_map(move |what| Event::Tell { execution, what });
            events.push((4, tell.boxed()));
            let there = model.there(|at| at != At::Over);
            if !there.is_empty() {
                let both = (what, select(there)).prop_map(move |(what, request)| {
                    Event::TellAndLeave { execution, what, request }
                });
                events.push((1, both.boxed()));
            }
        }
        Union::new_weighted(events).boxed()
    }

    fn preconditions(model: &Self, event: &Event) -> bool {
        let at = |request: usize| model.requests.get(request).map(|request| request.at);
        match *event {
            Event::Send { .. } => model.there(|at| at != At::Over).len() < REQUESTS,
            Event::BodyArrives { request } => at(request) == Some(At::ReadingBody),
            Event::Leave { request } => at(request).is_some_and(|at| at != At::Over),
            Event::Tell { execution, what } => model.may_tell(execution, what),
            Event::TellAndLeave { execution, what, request } => {
                at(request).is_some_and(|at| at != At::Over) && model.may_tell(execution, what)
            }
            Event::Pass { .. } => true,
        }
    }

    fn apply(mut model: Self, event: &Event) -> Self {
        match *event {
            Event::Send { scope, key, asks, slowly } => {
                let (at, heard) = (At::ReadingBody, Heard::default());
                model.requests.push(Asking { id: (scope, key), asks, at, heard });
                if !slowly {
                    model.claim(model.requests.len() - 1);
                }
            }
            Event::BodyArrives { request } => model.claim(request),
            Event::Leave { request } => model.leave(request),
            Event::Tell { execution, what } => model.tell(execution, what),
            Event::TellAndLeave { execution, what, request } => {
                model.leave(request);
                // It may have been cancelled with that.
                if !model.executions[execution].is_over {
                    model.tell(execution, what);
                }
            }
            Event::Pass { seconds } => (0..2 * seconds).for_each(|_| model.tick()),
        }
        model
    }
}

#[derive(Debug)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it broke, as it was told to")
    }
}

impl std::error::Error for Broken {}

/// What handlers have done, and how they are told what to do.
#[derive(Clone, Default)]
struct Desk(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    /// Those of each operation, in the order in which they began.
    executions: BTreeMap<Id, Vec<mpsc::UnboundedSender<Tell>>>,
    running: BTreeMap<Id, usize>,
    /// It happened that two ran at once.
    two_at_once: bool,
}

impl Desk {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap()
    }

    fn begin(&self, id: Id) -> (usize, mpsc::UnboundedReceiver<Tell>, Running) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut told = self.told();
        let of_it = told.executions.entry(id).or_default();
        of_it.push(sender);
        let nth = of_it.len() - 1;
        let running = told.running.entry(id).or_default();
        *running += 1;
        let two_at_once = *running > 1;
        told.two_at_once |= two_at_once;
        (nth, receiver, Running { desk: self.clone(), id })
    }
}

/// An execution that runs, until it is dropped.
struct Running {
    desk: Desk,
    id: Id,
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.desk.told().running.get_mut(&self.id).unwrap() -= 1;
    }
}

/// The body of an answer, that does what it is told.
struct Answer {
    number: usize,
    answered: (u16, Shape),
    sent: usize,
    ready: VecDeque<Bytes>,
    has_ended: bool,
    told: mpsc::UnboundedReceiver<Tell>,
    running: Option<Running>,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if let Some(data) = self.ready.pop_front() {
            self.sent += data.len();
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        if self.has_ended {
            self.running = None;
            return Poll::Ready(None);
        }
        let what = ready!(self.told.poll_recv(context)).expect("the test holds the other end");
        match what {
            Tell::Piece => {
                let piece = piece(Some(self.answered));
                self.ready.push_back(Bytes::from_static(piece.as_bytes()));
            }
            Tell::End => {
                self.has_ended = true;
                if let shape @ (Shape::Declared | Shape::Large) = self.answered.1 {
                    let rest = whole(self.number, shape).split_off(self.sent);
                    self.ready.push_back(rest.into());
                }
            }
            Tell::Break => {
                self.running = None;
                return Poll::Ready(Some(Err(Broken)));
            }
            _ => {
                self.running = None;
                // Like a panic, but it prints nothing.
                resume_unwind(Box::new("the body panics, as it was told to"));
            }
        }
        self.poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        match self.answered.1 {
            Shape::Unknown => SizeHint::new(),
            shape => SizeHint::with_exact((whole(self.number, shape).len() - self.sent) as u64),
        }
    }
}

/// The inner service.
#[derive(Clone)]
struct Handler(Desk);

impl Service<Request<RequestBody<Asked>>> for Handler {
    type Response = Response<Answer>;
    type Error = Broken;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, Broken>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Asked>>) -> Self::Future {
        let number = |name| request.headers()[name].to_str().unwrap().parse().unwrap();
        let id = (number("x-scope"), number("idempotency-key"));
        let (number, mut told, running) = self.0.begin(id);
        Box::pin(async move {
            let handle: Handle = request.extensions().get().cloned().unwrap();
            loop {
                match told.recv().await.expect("the test holds the other end") {
                    Tell::EffectsBegin => handle.effects_begin(),
                    Tell::Answer { status, body: shape } => {
                        let mut ready = VecDeque::new();
                        if shape == Shape::Whole {
                            ready.push_back(whole(number, shape).into());
                        }
                        let body = Answer {
                            number,
                            answered: (status, shape),
                            sent: 0,
                            ready,
                            has_ended: shape == Shape::Whole,
                            told,
                            running: Some(running),
                        };
                        return Ok(Response::builder().status(status).body(body).unwrap());
                    }
                    Tell::Error => return Err(Broken),
                    _ => resume_unwind(Box::new("the handler panics, as it was told to")),
                }
            }
        })
    }
}

/// The body of a request: one frame, when it is there.
struct Asked {
    data: Option<Bytes>,
    arrives: Option<tokio::sync::oneshot::Receiver<()>>,
}

impl Body for Asked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(arrives) = &mut self.arrives {
            let _arrived = ready!(Pin::new(arrives).poll(context));
            self.arrives = None;
        }
        Poll::Ready(self.data.take().map(|data| Ok(Frame::data(data))))
    }
}

/// A request on its way, polled only when it was woken.
struct Caller {
    /// There until it is over.
    work: Option<Pin<Box<dyn Future<Output = ()>>>>,
    woken: Arc<Woken>,
    arrives: Option<tokio::sync::oneshot::Sender<()>>,
    heard: Arc<Mutex<Heard>>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Caller {
    fn poll(&mut self) {
        let Some(work) = &mut self.work else { return };
        let waker = Waker::from(Arc::clone(&self.woken));
        let mut context = Context::from_waker(&waker);
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(&mut context)));
        if polled.is_err() {
            self.heard.lock().unwrap().end = End::Panicked;
        }
        if !matches!(polled, Ok(Poll::Pending)) {
            self.work = None;
        }
    }
}

/// The real one.
struct Real {
    runtime: Option<Runtime>,
    service: Idempotency<Handler>,
    store: MemoryStore<StoredResponse>,
    desk: Desk,
    callers: Vec<Caller>,
}

impl Real {
    fn send(&mut self, (scope, key): Id, asks: u8, slowly: bool) {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let arrives = slowly.then_some(receiver);
        let request = Request::post("/")
            .header("idempotency-key", key.to_string())
            .header("x-scope", scope.to_string())
            .body(Asked { data: Some(Bytes::from(asks.to_string())), arrives })
            .unwrap();
        let heard = Arc::new(Mutex::new(Heard::default()));
        let work = listen(self.service.clone(), request, Arc::clone(&heard));
        self.callers.push(Caller {
            work: Some(Box::pin(work)),
            woken: Arc::new(Woken(AtomicBool::new(true))),
            arrives: Some(sender),
            heard,
        });
    }

    /// Lets everybody go on who can, until nobody can. Who is woken at the same time goes on in the
    /// order of the requests.
    async fn settle(&mut self) {
        loop {
            let woken: Vec<_> = self
                .callers
                .iter_mut()
                .filter(|caller| caller.woken.0.swap(false, Ordering::SeqCst))
                .collect();
            let nobody = woken.is_empty();
            woken.into_iter().for_each(Caller::poll);
            // Those whose callers have left are tasks.
            for _ in 0..4 {
                yield_now().await;
            }
            if nobody && self.callers.iter().all(|caller| !caller.woken.0.load(Ordering::SeqCst)) {
                break;
            }
        }
    }

    fn tell(&self, execution: &Execution, what: Tell) {
        let _over = self.desk.told().executions[&execution.id][execution.nth].send(what);
    }

    async fn event(&mut self, event: Event, model: &Model) {
        match event {
            Event::Send { scope, key, asks, slowly } => self.send((scope, key), asks, slowly),
            Event::BodyArrives { request } => {
                let _left = self.callers[request].arrives.take().unwrap().send(());
            }
            Event::Leave { request } => self.callers[request].work = None,
            Event::Tell { execution, what } => {
                self.tell(&model.executions[execution], what);
            }
            Event::TellAndLeave { execution, what, request } => {
                self.tell(&model.executions[execution], what);
                self.callers[request].work = None;
            }
            Event::Pass { seconds } => {
                for _ in 0..2 * seconds {
                    tokio::time::advance(TICK).await;
                    self.settle().await;
                }
            }
        }
        self.settle().await;
    }
}

/// Sends a request and notes what is heard of its answer.
async fn listen(service: Idempotency<Handler>, request: Request<Asked>, heard: Arc<Mutex<Heard>>) {
    let Ok(response) = service.oneshot(request).await else {
        heard.lock().unwrap().end = End::Broken;
        return;
    };
    let (parts, mut body) = response.into_parts();
    {
        let mut heard = heard.lock().unwrap();
        heard.status = parts.status.as_u16();
        heard.is_replay = parts.headers.contains_key("idempotent-replayed");
    }
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            heard.lock().unwrap().end = End::Broken;
            return;
        };
        let data = frame.into_data().expect("there are no trailers");
        heard.lock().unwrap().text.push_str(std::str::from_utf8(&data).unwrap());
    }
    let mut heard = heard.lock().unwrap();
    heard.end = End::Whole;
    if parts.headers.get("content-type").is_some_and(|kind| kind == "application/problem+json") {
        let problem: serde_json::Value = serde_json::from_str(&heard.text).unwrap();
        problem["code"].as_str().unwrap().clone_into(&mut heard.text);
    }
}

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Real;
    type Reference = Model;

    fn init_test(model: &Model) -> Real {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let Rules { capacity, waits, on_failure, on_leave } = model.rules;
        let store = MemoryStore::new().capacity(capacity);
        let scope = |parts: &http::request::Parts| {
            parts.headers.get("x-scope").map(|scope| Scope::new(scope.as_bytes()))
        };
        let layer = IdempotencyLayer::new(scope)
            .store(store.clone())
            .on_failure(on_failure)
            .on_leave(on_leave)
            .in_flight(if waits { InFlight::Wait(WAIT.0) } else { InFlight::Reject })
            .retention(RETENTION.0)
            .finish_within(FINISH_WITHIN.0)
            .body_idle_timeout(Duration::from_secs(1_000_000))
            .body_timeout(Duration::from_secs(1_000_000))
            .response_limit(LIMIT);
        let desk = Desk::default();
        let service = layer.layer(Handler(desk.clone()));
        Real { runtime: Some(runtime), service, store, desk, callers: Vec::new() }
    }

    fn apply(mut real: Real, model: &Model, event: Event) -> Real {
        let runtime = real.runtime.take().unwrap();
        runtime.block_on(real.event(event, model));
        real.runtime = Some(runtime);
        real
    }

    fn check_invariants(real: &Real, model: &Model) {
        let _clock = real.runtime.as_ref().unwrap().enter();
        for (number, (caller, right)) in real.callers.iter().zip(&model.requests).enumerate() {
            assert_eq!(*caller.heard.lock().unwrap(), right.heard, "request {number}");
        }
        let told = real.desk.told();
        assert!(!told.two_at_once, "two executions of one operation at once");
        for (id, began) in &told.executions {
            let right = model.executions.iter().filter(|execution| execution.id == *id).count();
            assert_eq!(began.len(), right, "executions of {id:?}");
        }
        let began: usize = told.executions.values().map(Vec::len).sum();
        assert_eq!(began, model.executions.len(), "executions");
        let running: usize = told.running.values().sum();
        assert_eq!(running, model.running().len(), "executions that run");
        assert_eq!(real.store.len(), model.entries.len(), "entries");
        let in_flight = model.entries.values().filter(|e| matches!(e, Entry::InFlight { .. }));
        assert_eq!(real.store.in_flight(), in_flight.count(), "claims in flight");
    }

    fn teardown(mut real: Real, _: Model) {
        // What is still running has nobody to run it any more.
        let _clock = real.runtime.as_ref().unwrap().enter();
        real.callers.clear();
    }
}

prop_state_machine! {
    #![proptest_config(super::config())]

    #[test]
    fn whatever_happens_in_whatever_order_the_layer_answers_runs_and_counts_what_the_model_does(
        sequential 1..60 => Machine
    );
}

/// What can come of a request, by the names of it.
fn kinds(model: &Model) -> BTreeSet<String> {
    let answers = model.requests.iter().map(|Asking { heard, at, .. }| match (heard, at) {
        (Heard { is_replay: true, status, .. }, _) => format!("replay of {}xx", status / 100),
        (Heard { text, .. }, _) if text.starts_with("idempotency_") => text.clone(),
        (Heard { status: 0, end, .. }, At::Over) => format!("no answer, {end:?}"),
        (Heard { end, .. }, At::Over) => format!("answer, {end:?}"),
        (_, at) => format!("{at:?}").split([' ', '(']).next().unwrap().to_owned(),
    });
    let executions = model.executions.iter().map(|execution| match execution {
        Execution { caller: None, is_over: true, until: Some(until), .. }
            if *until <= model.now =>
        {
            "left, over by the time it would be cut off".to_owned()
        }
        Execution { caller: None, is_over, .. } => format!("left, over: {is_over}"),
        Execution { effects, is_over, .. } => format!("effects: {effects}, over: {is_over}"),
    });
    answers.chain(executions).collect()
}

#[test]
fn the_runs_of_the_layer_get_everywhere() {
    let mut runner = TestRunner::deterministic();
    let strategy = Model::sequential_strategy(1..60);
    let mut seen = BTreeSet::new();
    for _ in 0..200 {
        let (mut model, events, _) = strategy.new_tree(&mut runner).unwrap().current();
        for event in events {
            model = Model::apply(model, &event);
            seen.extend(kinds(&model));
        }
    }
    let all = [
        "Executing",
        "ReadingBody",
        "Waiting",
        "answer, Broken",
        "answer, Open",
        "answer, Panicked",
        "answer, Whole",
        "effects: false, over: false",
        "effects: false, over: true",
        "effects: true, over: false",
        "effects: true, over: true",
        "idempotency_capacity",
        "idempotency_conflict",
        "idempotency_in_progress",
        "idempotency_not_replayable",
        "idempotency_outcome_unknown",
        "left, over by the time it would be cut off",
        "left, over: false",
        "left, over: true",
        "no answer, Broken",
        "no answer, Open",
        "no answer, Panicked",
        "replay of 2xx",
        "replay of 3xx",
        "replay of 4xx",
        "replay of 5xx",
    ];
    assert_eq!(seen, all.map(str::to_owned).into());
}
