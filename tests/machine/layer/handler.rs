//! The inner service, whose handlers and bodies do what they are told.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    future::Future,
    panic::resume_unwind,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;
use tower::Service;
use tower_idempotency::{Handle, RequestBody};

use super::{
    real::Asked,
    words::{Id, Shape, Tell, piece, whole},
};

#[derive(Debug)]
pub(super) struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it broke, as it was told to")
    }
}

impl std::error::Error for Broken {}

/// What handlers have done, and how they are told what to do.
#[derive(Clone, Default)]
pub(super) struct Desk(pub(super) Arc<Mutex<Told>>);

#[derive(Default)]
pub(super) struct Told {
    /// Those of each operation, in the order in which they began.
    pub(super) executions: BTreeMap<Id, Vec<mpsc::UnboundedSender<Tell>>>,
    pub(super) running: BTreeMap<Id, usize>,
    /// It happened that two ran at once.
    pub(super) two_at_once: bool,
}

impl Desk {
    pub(super) fn told(&self) -> MutexGuard<'_, Told> {
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
pub(super) struct Running {
    desk: Desk,
    id: Id,
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.desk.told().running.get_mut(&self.id).unwrap() -= 1;
    }
}

/// The body of an answer, that does what it is told.
pub(super) struct Answer {
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
pub(super) struct Handler(pub(super) Desk);

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
