//! What the layer costs, in process: `cargo bench --bench overhead`.
//!
//! Each variant is one service; a round sends a batch through every variant in turn, so that all of
//! them see the same machine. The table shows medians over all rounds; the last line the ratios.
//! `floor` is what any such layer has to do, written out with the same libraries: a tower service
//! with two SHA-256 passes (key, body), the map, the body, and a clone of the stored parts. It
//! checks nothing else, waits for nobody and survives nothing.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench that prints a table")]
#![allow(clippy::disallowed_methods, reason = "it measures real time")]
#![allow(clippy::cast_precision_loss, reason = "figures for a table")]

mod common;
#[path = "common/counted.rs"]
mod counted;

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use common::{Answer, Sent, call, key};
use counted::Figures;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use sha2::{Digest, Sha256};
use tower::{Layer, Service, ServiceExt};
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, scope};

const ROUNDS: usize = 101;
const BATCH: usize = 500;

fn layered(live: usize) -> Idempotency<Answer> {
    IdempotencyLayer::new(scope::single_tenant())
        .store(MemoryStore::new().capacity(live + BATCH * 2))
        .layer(Answer::new())
}

/// The floor: a map from operation digest to the stored parts and the body's digest. As every
/// service around any other, it is called through a clone of its own and answers in a boxed future.
#[derive(Clone)]
struct Floor {
    records: moka::sync::Cache<[u8; 32], Stored>,
}

type Stored = std::sync::Arc<([u8; 32], StatusCode, HeaderMap, Bytes)>;

impl Floor {
    fn new() -> Self {
        Self { records: moka::sync::Cache::builder().build() }
    }
}

impl Service<Request<Full<Bytes>>> for Floor {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let records = self.records.clone();
        let (parts, body) = request.into_parts();
        Box::pin(async move {
            let id = Sha256::digest(parts.headers["idempotency-key"].as_bytes()).into();
            let body = body.collect().await.unwrap().to_bytes();
            let digest: [u8; 32] = Sha256::digest(&body).into();
            let (status, headers, body) = if let Some(found) = records.get(&id) {
                assert_eq!(found.0, digest);
                (found.1, found.2.clone(), found.3.clone())
            } else {
                let request = Request::from_parts(parts, Full::new(body));
                let response = Answer::<Full<Bytes>>::new().oneshot(request).await?;
                let (parts, body) = response.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let headers = parts.headers.clone();
                records.insert(id, Stored::new((digest, parts.status, headers, body.clone())));
                (parts.status, parts.headers, body)
            };
            let mut response = Response::new(Full::new(body));
            *response.status_mut() = status;
            *response.headers_mut() = headers;
            Ok(response)
        })
    }
}

const VARIANTS: [&str; 7] =
    ["bare", "pass-through", "replay", "first", "conflict", "floor replay", "floor first"];

/// Runs all variants in turn and returns their figures.
async fn run(sent: &Sent, live: usize) -> [Figures; 7] {
    let mut figures: [Figures; 7] = Default::default();
    let other = Sent { body: Bytes::from_static(b"{\"other\":true}"), kind: sent.kind };
    let service = layered(live);
    let floor = Floor::new();
    for number in 0..live.max(1) {
        assert_eq!(call(&service, sent.request::<Full<Bytes>>(Some(&key(number)))).await, 202);
        call(&floor, sent.request(Some(&key(number)))).await;
    }
    let batch = |sent: &Sent, keyed: bool| -> Vec<_> {
        let key = |number: usize| keyed.then(|| key(number % live.max(1)));
        (0..BATCH).map(|number| sent.request(key(number).as_ref())).collect()
    };
    let new_keys = || (0..BATCH).map(|number| sent.request(Some(&key(live + number)))).collect();
    for _ in 0..ROUNDS {
        let [bare, pass, replay, first, conflict, floor_replay, floor_first] = &mut figures;
        bare.measure(batch(sent, false), async |request| {
            call(&Answer::<Full<Bytes>>::new(), request).await;
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
                assert_eq!(call(&floor, request).await, 202);
            })
            .await;
        // New keys need new stores, or the live entries would grow with the rounds.
        let fresh = layered(0);
        first
            .measure(new_keys(), async |request| {
                assert_eq!(call(&fresh, request).await, 202);
            })
            .await;
        let fresh = Floor::new();
        floor_first
            .measure(new_keys(), async |request| {
                assert_eq!(call(&fresh, request).await, 202);
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
