//! What the tests share: requests, answers read whole, a counter of executions, and a gate that
//! holds executions until a test lets them go.

#![allow(unreachable_pub, reason = "shared by the test modules")]

pub mod call;
pub mod cue;
pub mod faults;
pub mod interposed;
pub mod naive_store;
pub mod probe;
pub mod stack;
pub mod steps;

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio::sync::{Semaphore, watch};
use tower::{Service, ServiceExt};

/// Longer than any test takes that works.
pub const GENEROUS: Duration = Duration::from_secs(60);

/// A `POST` of JSON with a key.
pub fn keyed(key: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let mut request = unkeyed(body);
    request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    request
}

/// A `POST` of JSON without a key.
pub fn unkeyed(body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::builder()
        .method(Method::POST)
        .uri("/v1/runs")
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .unwrap()
}

/// A response, read whole.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    pub async fn read<B>(response: Response<B>) -> Self
    where
        B: Body<Data = Bytes>,
        B::Error: std::fmt::Debug,
    {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("the body is whole");
        let trailers = body.trailers().cloned();
        Self { status: parts.status, headers: parts.headers, body: body.to_bytes(), trailers }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a text body")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub fn is_replay(&self) -> bool {
        match self.headers.get_all("idempotent-replayed").iter().collect::<Vec<_>>()[..] {
            [] => false,
            [value] => {
                assert_eq!(value, "true");
                true
            }
            _ => panic!("the marker is there more than once"),
        }
    }

    /// Asserts that this is the refusal `code`.
    #[track_caller]
    pub fn assert_refused(&self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), self.json()["code"].as_str()), (status, Some(code)));
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert!(!self.is_replay());
    }
}

/// Sends one request through a clone of `service` and reads the answer.
pub async fn send<S, B, R>(service: &S, request: Request<B>) -> Answer
where
    S: Service<Request<B>, Response = Response<R>> + Clone,
    S::Error: std::fmt::Debug,
    R: Body<Data = Bytes>,
    R::Error: std::fmt::Debug,
{
    within(async { Answer::read(service.clone().oneshot(request).await.unwrap()).await }).await
}

/// Fails the test if `future` hangs.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(GENEROUS, future).await.expect("it hangs")
}

/// How often the inner service has been called.
#[derive(Debug, Clone, Default)]
pub struct Runs(Arc<AtomicUsize>);

impl Runs {
    /// Counts one run, and returns its number from 1.
    pub fn run(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// Holds whoever passes it until it is opened.
#[derive(Debug, Clone)]
pub struct Gate {
    inside: watch::Sender<usize>,
    permits: Arc<Semaphore>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { inside: watch::Sender::new(0), permits: Arc::new(Semaphore::new(0)) }
    }
}

impl Gate {
    /// Waits here until the gate is opened.
    pub async fn pass(&self) {
        self.inside.send_modify(|inside| *inside += 1);
        // An error is the gate open for good.
        if let Ok(permit) = self.permits.acquire().await {
            permit.forget();
        }
    }

    /// Waits until `number` have come to the gate since it was made.
    pub async fn reached_by(&self, number: usize) {
        within(self.inside.subscribe().wait_for(|inside| *inside >= number)).await.unwrap();
    }

    /// Lets `number` through.
    pub fn let_through(&self, number: usize) {
        self.permits.add_permits(number);
    }

    /// Lets everybody through from now on.
    pub fn open(&self) {
        self.permits.close();
    }
}

/// Asserts that `set` panics with a message that begins with the setting's name.
#[track_caller]
pub fn assert_impossible<T>(setting: &str, set: impl FnOnce() -> T) {
    let panic = catch_unwind(AssertUnwindSafe(set)).err().expect("an impossible value is taken");
    let message = panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap();
    assert!(message.starts_with(&format!("{setting}: ")), "{setting}: {message:?}");
}
