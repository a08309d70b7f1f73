//! The layer around a bare hyper service, without a framework: `cargo run --example hyper`.
//!
//! `POST /orders` places an order and answers 201 with its number, over HTTP/1.1 and cleartext
//! HTTP/2. However often it is sent with the same `Idempotency-Key`, one order is placed:
//!
//! ```text
//! curl -i localhost:3000/orders -H 'Authorization: Bearer alice' -H 'Idempotency-Key: 1' -d tea
//! ```

#![allow(clippy::print_stdout, reason = "a program that talks to its user")]

#[path = "common/signals.rs"]
mod signals;

use std::{
    convert::Infallible,
    env,
    error::Error,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Request, Response, StatusCode,
    header::{AUTHORIZATION, WWW_AUTHENTICATE},
};
use http_body_util::{BodyExt, Either, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::net::TcpListener;
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{IdempotencyLayer, RequestBody, scope};

/// The largest body that the handler reads. The layer has a limit for keyed requests; requests
/// without a key come as they are.
const BODY_LIMIT: usize = 64 * 1024;

/// How long connections, and then executions without one, may take to finish at shutdown.
const GRACE: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let addr = env::var("ADDR").unwrap_or_else(|_| "127.0.0.1:3000".to_owned());
    let addr: SocketAddr = addr.parse().map_err(|error| format!("ADDR: {addr:?}: {error}"))?;
    let mut stop = Box::pin(signals::asked_to_stop()?);
    let listener = TcpListener::bind(addr)
        .await
        .map_err(|error| format!("ADDR: cannot listen on {addr}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);

    // One layer and one service for the whole process: every connection gets a clone, and all
    // clones share the same entries.
    let layer = IdempotencyLayer::new(scope::from_extension::<Customer>());
    let orders = Arc::<AtomicU64>::default();
    let orders = layer.layer(service_fn(move |request| place_order(Arc::clone(&orders), request)));

    // Authentication goes first: it decides whose keys they are, and a caller it turns away learns
    // nothing about anybody's.
    let service = service_fn(move |mut request: Request<Incoming>| {
        let orders = orders.clone();
        async move {
            let Some(customer) = Customer::of(request.headers()) else {
                return Ok(unauthorized().map(Either::Left));
            };
            request.extensions_mut().insert(customer);
            let answer: Result<_, Infallible> = orders.oneshot(request).await;
            answer.map(|response| response.map(Either::Right))
        }
    });

    let mut server = auto::Builder::new(TokioExecutor::new());
    // With a timer, hyper closes connections that never finish a request's head.
    server.http1().timer(TokioTimer::new());
    server.http2().timer(TokioTimer::new());
    let connections = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, for example: it passes when connections close.
                    eprintln!("accept: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let service = TowerToHyperService::new(service.clone());
        let connection = server.serve_connection(TokioIo::new(stream), service).into_owned();
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                eprintln!("connection: {error}");
            }
        });
    }

    // First no new connections, then an end of those there are; what is still running after that
    // are executions whose callers have left. Their retries are to find an answer.
    drop(listener);
    if tokio::time::timeout(GRACE, connections.shutdown()).await.is_err() {
        eprintln!("some connections did not finish in time");
    }
    let left = layer.drain(GRACE).await;
    if left > 0 {
        eprintln!("{left} executions did not finish in time");
    }
    Ok(())
}

/// The handler, as it would be without the layer but for the type of its body: `RequestBody` is
/// hyper's own where the request has no key, and what the layer has read of it where it has one.
async fn place_order(
    orders: Arc<AtomicU64>,
    request: Request<RequestBody<Incoming>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() != "/orders" {
        return Ok(answer(StatusCode::NOT_FOUND, "there is only /orders"));
    }
    if request.method() != Method::POST {
        return Ok(answer(StatusCode::METHOD_NOT_ALLOWED, "send a POST"));
    }
    let Ok(what) = Limited::new(request.into_body(), BODY_LIMIT).collect().await else {
        // Every 4xx but 402 tells the layer that nothing was done: a retry may try again.
        return Ok(answer(StatusCode::BAD_REQUEST, "the body broke off or is too long"));
    };
    let what = what.to_bytes();
    if what.is_empty() {
        return Ok(answer(StatusCode::BAD_REQUEST, "what is it to be?"));
    }

    let number = orders.fetch_add(1, Ordering::Relaxed) + 1;
    let text = format!("order {number}: {}\n", String::from_utf8_lossy(&what));
    Ok(answer(StatusCode::CREATED, text))
}

/// Who is ordering. Keys are unique within it.
#[derive(Clone)]
struct Customer(String);

impl AsRef<str> for Customer {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Customer {
    /// A demonstration: the token is the customer. A real service verifies the token and takes a
    /// stable id of the customer from it, so that a new token does not make a retry a new order.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let token = headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")?;
        (!token.is_empty()).then(|| Self(token.to_owned()))
    }
}

fn unauthorized() -> Response<Full<Bytes>> {
    let mut response = answer(StatusCode::UNAUTHORIZED, "who are you?");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn answer(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response
}
