//! The server under load: hyper, the layer, and a handler that ends as the request says. It can be
//! given a fault, to show that the load finds it.

use std::{
    convert::Infallible,
    error::Error,
    fmt,
    future::pending,
    net::SocketAddr,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::{Builder, Runtime},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    Ceiling, IdempotencyLayer, MemoryStore, PermitSlot, StoredResponse, scope,
};

use crate::ledger::{Execution, Ledger};

type AnyBody = UnsyncBoxBody<Bytes, Failure>;

/// How the handler, or a body of its, fails.
#[derive(Debug)]
struct Failure(&'static str);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for Failure {}

pub(crate) const REQUEST_LIMIT: usize = 4 * 1024;
const RESPONSE_LIMIT: usize = 16 * 1024;

/// So many executions at once; clients are more.
const CEILING: usize = 16;

/// What a panic of the handler says, so that it can be kept out of the output.
pub(crate) const PANIC: &str = "a handler that panics as it was told to";

/// Something wrong that the load has to find. Each happens once in so many times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Memory,
    Task,
    Permit,
    Socket,
    SecondRun,
    OtherAnswer,
}

pub(crate) const FAULTS: [(Fault, &str, &str); 6] = [
    (Fault::Memory, "memory", "MiB more than at the beginning"),
    (Fault::Task, "task", "tasks are left"),
    (Fault::Permit, "permit", "permits are left"),
    (Fault::Socket, "socket", "sockets are left"),
    (Fault::SecondRun, "second-run", "broken promises"),
    (Fault::OtherAnswer, "other-answer", "told of execution"),
];

impl FromStr for Fault {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let fault = FAULTS.iter().find(|(_, known, _)| *known == name);
        fault.map(|(fault, ..)| *fault).ok_or_else(|| format!("no such fault: {name}"))
    }
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) runtime: Runtime,
    pub(crate) layer: IdempotencyLayer,
    pub(crate) store: MemoryStore<StoredResponse>,
    pub(crate) ceiling: Ceiling,
}

impl Server {
    pub(crate) fn start(ledger: Arc<Ledger>, fault: Option<Fault>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let store = MemoryStore::new().capacity(20_000);
        let ceiling = Ceiling::new(CEILING);
        let mut layer = IdempotencyLayer::new(scope::single_tenant())
            .store(store.clone())
            .ceiling(&ceiling)
            .request_limit(REQUEST_LIMIT)
            .response_limit(RESPONSE_LIMIT);
        if fault == Some(Fault::OtherAnswer) {
            layer = layer.on_replay(|_, head| {
                head.headers.insert("x-execution", HeaderValue::from_static("0"));
            });
        }
        let work = Arc::new(Work { ledger, fault, happened: AtomicUsize::new(0) });
        runtime.spawn(accept(listener, layer.clone(), work));
        Self { address, runtime, layer, store, ceiling }
    }

    pub(crate) fn tasks(&self) -> usize {
        self.runtime.metrics().num_alive_tasks()
    }
}

async fn accept(listener: TcpListener, layer: IdempotencyLayer, work: Arc<Work>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        tokio::spawn(serve(stream, layer.clone(), Arc::clone(&work)));
    }
}

/// Serves one connection. How it ends is the client's affair: many are cut on purpose.
async fn serve(stream: TcpStream, layer: IdempotencyLayer, work: Arc<Work>) {
    if work.is_faulty(Fault::Socket) {
        std::mem::forget(std::net::UdpSocket::bind("127.0.0.1:0"));
    }
    let handler = {
        let work = Arc::clone(&work);
        service_fn(move |request| handle(Arc::clone(&work), request))
    };
    let layered = layer.layer(handler);
    let service = service_fn(move |request: Request<Incoming>| {
        let (layered, work) = (layered.clone(), Arc::clone(&work));
        async move {
            if work.is_faulty(Fault::SecondRun) {
                return handle(work, request).await;
            }
            let response = layered.oneshot(request).await;
            response.map(|response| response.map(BodyExt::boxed_unsync))
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new());
    let _ended =
        http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await;
}

struct Work {
    ledger: Arc<Ledger>,
    fault: Option<Fault>,
    happened: AtomicUsize,
}

impl Work {
    /// Is it time for the fault?
    fn is_faulty(&self, fault: Fault) -> bool {
        // Some permits have to be left until everything is looked at.
        let every = if fault == Fault::Permit { 200 } else { 20 };
        self.fault == Some(fault)
            && self.happened.fetch_add(1, Ordering::Relaxed) % every == every - 1
    }
}

/// The value of `name` in the query.
fn asked<B>(request: &Request<B>, name: &str) -> Option<String> {
    let query = request.uri().query()?;
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(asked, _)| *asked == name).map(|(_, value)| value.to_owned())
}

/// Executes, and ends as `ends` says: one word for each execution of the key, the last for all that
/// follow.
async fn handle<B: Body>(
    work: Arc<Work>,
    request: Request<B>,
) -> Result<Response<AnyBody>, Failure> {
    let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
    // Without a key nothing is promised.
    let execution = key.as_ref().map(|key| work.ledger.begin(key));
    let number = execution.as_ref().map_or(0, |execution| execution.number);
    work.ledger.count("executions");
    if let Some(slot) = request.extensions().get::<PermitSlot>()
        && asked(&request, "background").is_some()
    {
        // Work that goes on behind the answer, in the place that was given to it.
        let permit = slot.take_permit();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            drop(permit);
        });
    } else if work.is_faulty(Fault::Permit) {
        let slot = request.extensions().get::<PermitSlot>();
        std::mem::forget(slot.and_then(PermitSlot::take_permit));
    }
    if work.is_faulty(Fault::Memory) {
        std::mem::forget(std::hint::black_box(vec![1_u8; 1024 * 1024]));
    }
    if work.is_faulty(Fault::Task) {
        tokio::spawn(pending::<()>());
    }
    let ends = asked(&request, "ends").unwrap();
    let pause = asked(&request, "pause").and_then(|pause| pause.parse().ok()).unwrap_or(0);
    if request.into_body().collect().await.is_err() {
        return Err(Failure("the caller's body broke"));
    }
    if pause > 0 {
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    let ends: Vec<_> = ends.split(',').collect();
    let end = ends[(number.max(1) as usize - 1).min(ends.len() - 1)];
    let (status, body) = match end {
        "panic" | "error" => {
            Execution::end(execution, false);
            if end == "panic" {
                std::panic::panic_any(PANIC);
            }
            return Err(Failure("a service that fails as it was told to"));
        }
        "stream" | "break" => (200, pieces(execution, key.as_deref(), number, end == "break")),
        status => {
            let status = match status {
                "ok" | "large" => 201,
                status => status.parse().unwrap(),
            };
            Execution::end(execution, status < 300);
            let length = if end == "large" { RESPONSE_LIMIT + 1 } else { 0 };
            let body = answer(key.as_deref(), number, length);
            (status, Full::from(body).map_err(|never: Infallible| match never {}).boxed_unsync())
        }
    };
    let response = Response::builder().status(status).header("x-execution", number);
    Ok(response.body(body).unwrap())
}

/// What the execution of a key answers; at least so long.
pub(crate) fn answer(key: Option<&str>, execution: u32, length: usize) -> String {
    let mut answer = format!("execution {execution} of {}\n", key.unwrap_or("no key"));
    while answer.len() < length {
        answer.push('.');
    }
    answer
}

/// The same in pieces, of unknown length, with pauses; perhaps it breaks before its end.
fn pieces(execution: Option<Execution>, key: Option<&str>, number: u32, breaks: bool) -> AnyBody {
    let answer = Bytes::from(answer(key, number, 0));
    let pieces = stream::unfold((answer, execution), move |(mut left, execution)| async move {
        if left.is_empty() {
            Execution::end(execution, true);
            return None;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        if breaks && left.len() < 12 {
            // The execution has ended before anybody hears of it.
            Execution::end(execution, false);
            let broken = Failure("a body that breaks as it was told to");
            return Some((Err(broken), (Bytes::new(), None)));
        }
        let piece = left.split_to(left.len().min(9));
        Some((Ok(Frame::data(piece)), (left, execution)))
    });
    BodyExt::boxed_unsync(StreamBody::new(pieces))
}
