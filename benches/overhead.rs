//! What the layer costs, in process: `cargo bench --bench overhead`.
//!
//! Each variant is one service; a round sends a batch through every variant in turn, so that all of
//! them see the same machine. The table shows medians over all rounds; the last line the ratios.
//! `floor` is what any such layer has to do, written out with the same libraries: two SHA-256
//! passes, the map, the body, and a clone of the stored parts.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench that prints a table")]
#![allow(clippy::disallowed_methods, reason = "it measures real time")]
#![allow(clippy::cast_precision_loss, reason = "figures for a table")]

use std::{
    alloc::System,
    convert::Infallible,
    fmt::Write as _,
    future::{Ready, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use sha2::{Digest, Sha256};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, scope};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const ROUNDS: usize = 101;
const BATCH: usize = 500;

/// Answers 202 with some JSON: what is measured is everything around it.
#[derive(Clone, Copy)]
struct Answer;

const ANSWER: &[u8] = br#"{"run_id":"run_0123456789abcdef","status":"started","input":"a prompt of a few words","session":"s_0123456789"}"#;

impl<B> Service<Request<B>> for Answer {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let mut response = Response::new(Full::from(Bytes::from_static(ANSWER)));
        *response.status_mut() = StatusCode::ACCEPTED;
        let kind = HeaderValue::from_static("application/json");
        response.headers_mut().insert("content-type", kind);
        ready(Ok(response))
    }
}

/// What is sent.
#[derive(Clone)]
struct Sent {
    body: Bytes,
    kind: &'static str,
}

impl Sent {
    fn request(&self, key: Option<&HeaderValue>) -> Request<Full<Bytes>> {
        let mut request = Request::post("/v1/runs")
            .header("content-type", self.kind)
            .header("user-agent", "bench")
            .header("accept", "*/*")
            .body(Full::new(self.body.clone()))
            .unwrap();
        if let Some(key) = key {
            request.headers_mut().insert("idempotency-key", key.clone());
        }
        request
    }

    /// A JSON object of about `length` bytes, or as many other bytes.
    fn new(kind: &'static str, length: usize) -> Self {
        let mut body = String::from(r#"{"input":""#);
        if kind == "application/json" {
            body.push_str(&"lorem ipsum ".repeat(length / 24));
            body.push('"');
            let mut member = 0;
            while body.len() < length {
                member += 1;
                write!(body, r#","field_{member}":{member}"#).unwrap();
            }
            body.push('}');
        } else {
            body = "x".repeat(length);
        }
        Self { body: body.into(), kind }
    }
}

fn key(number: usize) -> HeaderValue {
    HeaderValue::from_str(&format!("0f8fad5b-d9cb-469f-a165-{number:012x}")).unwrap()
}

async fn call<S, B>(service: &S, request: Request<Full<Bytes>>) -> StatusCode
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible> + Clone,
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let response = service.clone().oneshot(request).await.unwrap();
    let status = response.status();
    std::hint::black_box(response.into_body().collect().await.unwrap().to_bytes());
    status
}

fn layered(live: usize) -> Idempotency<Answer> {
    IdempotencyLayer::new(scope::single_tenant())
        .store(MemoryStore::new().capacity(live + BATCH * 2))
        .layer(Answer)
}

/// The floor: a map from operation digest to the stored parts and the body's digest.
struct Floor {
    records: moka::sync::Cache<[u8; 32], Stored>,
}

type Stored = std::sync::Arc<([u8; 32], StatusCode, HeaderMap, Bytes)>;

impl Floor {
    async fn call(&self, request: Request<Full<Bytes>>) -> StatusCode {
        let (parts, body) = request.into_parts();
        let id = Sha256::digest(parts.headers["idempotency-key"].as_bytes()).into();
        let body = body.collect().await.unwrap().to_bytes();
        let digest: [u8; 32] = Sha256::digest(&body).into();
        let found = self.records.get(&id);
        let (status, headers, body) = if let Some(found) = found {
            assert_eq!(found.0, digest);
            (found.1, found.2.clone(), found.3.clone())
        } else {
            let response =
                Answer.oneshot(Request::from_parts(parts, Full::new(body))).await.unwrap();
            let (parts, body) = response.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let headers = parts.headers.clone();
            self.records.insert(id, Stored::new((digest, parts.status, headers, body.clone())));
            (parts.status, parts.headers, body)
        };
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        std::hint::black_box(response.into_body().collect().await.unwrap().to_bytes());
        status
    }
}

/// Nanoseconds and allocations of one call, one figure a round.
#[derive(Default, Clone)]
struct Figures {
    nanos: Vec<f64>,
    allocations: Vec<f64>,
}

impl Figures {
    async fn measure(
        &mut self,
        requests: Vec<Request<Full<Bytes>>>,
        mut call: impl AsyncFnMut(Request<Full<Bytes>>),
    ) {
        let count = requests.len() as f64;
        let region = Region::new(ALLOCATOR);
        let start = Instant::now();
        for request in requests {
            call(request).await;
        }
        let taken: Duration = start.elapsed();
        self.nanos.push(taken.as_nanos() as f64 / count);
        self.allocations.push(region.change().allocations as f64 / count);
    }

    fn median(mut values: Vec<f64>) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn nanos(&self) -> f64 {
        Self::median(self.nanos.clone())
    }

    fn allocations(&self) -> f64 {
        Self::median(self.allocations.clone())
    }
}

const VARIANTS: [&str; 7] =
    ["bare", "pass-through", "replay", "first", "conflict", "floor replay", "floor first"];

/// Runs all variants in turn and returns their figures.
async fn run(sent: &Sent, live: usize) -> [Figures; 7] {
    let mut figures: [Figures; 7] = Default::default();
    let other = Sent { body: Bytes::from_static(b"{\"other\":true}"), kind: sent.kind };
    let service = layered(live);
    let floor = Floor { records: moka::sync::Cache::builder().build() };
    for number in 0..live.max(1) {
        assert_eq!(call(&service, sent.request(Some(&key(number)))).await, 202);
        floor.call(sent.request(Some(&key(number)))).await;
    }
    let batch = |sent: &Sent, keyed: bool| -> Vec<_> {
        let key = |number: usize| keyed.then(|| key(number % live.max(1)));
        (0..BATCH).map(|number| sent.request(key(number).as_ref())).collect()
    };
    let new_keys = || (0..BATCH).map(|number| sent.request(Some(&key(live + number)))).collect();
    for _ in 0..ROUNDS {
        let [bare, pass, replay, first, conflict, floor_replay, floor_first] = &mut figures;
        bare.measure(batch(sent, false), async |request| {
            call(&Answer, request).await;
        })
        .await;
        pass.measure(batch(sent, false), async |request| {
            call(&service, request).await;
        })
        .await;
        replay
            .measure(batch(sent, true), async |request| {
                assert_eq!(call(&service, request).await, 202);
            })
            .await;
        conflict
            .measure(batch(&other, true), async |request| {
                assert_eq!(call(&service, request).await, 409);
            })
            .await;
        floor_replay
            .measure(batch(sent, true), async |request| {
                assert_eq!(floor.call(request).await, 202);
            })
            .await;
        // New keys need new stores, or the live entries would grow with the rounds.
        let fresh = layered(0);
        first
            .measure(new_keys(), async |request| {
                assert_eq!(call(&fresh, request).await, 202);
            })
            .await;
        let fresh = Floor { records: moka::sync::Cache::builder().build() };
        floor_first
            .measure(new_keys(), async |request| {
                assert_eq!(fresh.call(request).await, 202);
            })
            .await;
    }
    figures
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    println!("| body | live entries | variant | ns | × bare | allocations |");
    println!("|---|---|---|---|---|---|");
    let mut summary = String::new();
    for (kind, length, live) in [
        ("application/json", 256, 1),
        ("application/json", 256, 1_000),
        ("application/json", 4_096, 1_000),
        ("application/json", 65_536, 1_000),
        ("application/octet-stream", 256, 1_000),
        ("application/octet-stream", 4_096, 1_000),
        ("application/octet-stream", 65_536, 1_000),
    ] {
        let figures = run(&Sent::new(kind, length), live).await;
        let bare = figures[0].nanos();
        for (variant, figures) in VARIANTS.iter().zip(&figures) {
            let (nanos, allocations) = (figures.nanos(), figures.allocations());
            println!(
                "| {kind} {length} B | {live} | {variant} | {nanos:.0} | {:.2} | {allocations:.1} |",
                nanos / bare
            );
        }
        if (kind, length, live) == ("application/json", 256, 1_000) {
            let [bare, pass, replay, first, _, floor_replay, floor_first] = &figures;
            summary = format!(
                "replay/floor={:.2} first/floor={:.2} pass/bare={:.2} \
                 allocs(pass)-allocs(bare)={:.1} allocs(replay)={:.1} allocs(first)={:.1}",
                replay.nanos() / floor_replay.nanos(),
                first.nanos() / floor_first.nanos(),
                pass.nanos() / bare.nanos(),
                pass.allocations() - bare.allocations(),
                replay.allocations(),
                first.allocations(),
            );
        }
    }
    println!("{summary}");
}
