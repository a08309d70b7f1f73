//! The real layer, with callers that are polled when they were woken, and in order.

use std::{
    convert::Infallible,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker, ready},
};

use bytes::Bytes;
use http::Request;
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use tokio::{runtime::Runtime, task::yield_now};
use tower::ServiceExt;
use tower_idempotency::{Idempotency, MemoryStore, StoredResponse};

use super::{
    handler::{Desk, Handler},
    model::{Execution, Model},
    words::{End, Event, Heard, Id, TICK, Tell},
};

/// The body of a request: one frame, when it is there.
pub(super) struct Asked {
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
pub(super) struct Caller {
    /// There until it is over.
    pub(super) work: Option<Pin<Box<dyn Future<Output = ()>>>>,
    pub(super) woken: Arc<Woken>,
    pub(super) arrives: Option<tokio::sync::oneshot::Sender<()>>,
    pub(super) heard: Arc<Mutex<Heard>>,
}

pub(super) struct Woken(pub(super) AtomicBool);

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
pub(super) struct Real {
    pub(super) runtime: Option<Runtime>,
    pub(super) service: Idempotency<Handler>,
    pub(super) store: MemoryStore<StoredResponse>,
    pub(super) desk: Desk,
    pub(super) callers: Vec<Caller>,
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

    pub(super) async fn event(&mut self, event: Event, model: &Model) {
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
pub(super) async fn listen(
    service: Idempotency<Handler>,
    request: Request<Asked>,
    heard: Arc<Mutex<Heard>>,
) {
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
