//! A service that starts runs, with retries made safe: `cargo run --example server`.
//!
//! `POST /v1/runs` starts a run in the background and answers 202 with its id. A retry with the
//! same `Idempotency-Key` gets the same 202 and id, even while the service is too busy for new
//! runs. `GET /` says what to try.

#![allow(clippy::print_stdout, reason = "a program that talks to its user")]

mod common;

use std::{
    collections::{BTreeMap, HashMap},
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Json, Router,
    body::Body,
    extract::{Extension, Path, State, rejection::PathRejection},
    http::{
        HeaderMap, HeaderName, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, LOCATION, RETRY_AFTER},
    },
    middleware::from_fn,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::ServiceBuilder;
use tower_idempotency::{Ceiling, Handle, IdempotencyLayer, MemoryStore, PermitSlot, scope};

use common::{Common, Profile, authenticate, debug_routes, problem, seconds};

/// The largest body that the handler reads.
const BODY_LIMIT: usize = 1024 * 1024;

/// The longest time that it waits for it.
const BODY_TIME: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> ExitCode {
    common::exit("server", run().await)
}

async fn run() -> Result<(), String> {
    let Common { addr, capacity, max_runs, ttl } = Common::from_env()?;
    let run_time = seconds("RUN_SECONDS", 0.0..=LONGEST_RUN)?.unwrap_or(Duration::from_secs(1));
    let ttl = ttl.unwrap_or(Duration::from_secs(60 * 60));

    let store = MemoryStore::new().capacity(capacity);
    let ceiling = Ceiling::new(max_runs);
    let layer = IdempotencyLayer::new(scope::from_extension::<Profile>())
        .store(store.clone())
        .retention(ttl)
        .fingerprint_headers([HeaderName::from_static("x-session-key")])
        .ceiling(&ceiling);
    let service = Service { runs: Arc::default(), ceiling, ttl, run_time };
    let app = app(service, layer.clone()).merge(debug_routes(store, layer.clone()));
    common::serve(addr, app, &layer).await
}

/// Authentication goes first, so that a rejected caller learns nothing about keys; then the layer;
/// then the handlers.
fn app(service: Service, layer: IdempotencyLayer) -> Router {
    let guarded = ServiceBuilder::new().layer(from_fn(authenticate)).layer(layer);
    Router::new()
        .route("/v1/runs", post(start_run).get(list_runs))
        .route("/v1/runs/{id}", get(show_run))
        .layer(guarded)
        .route("/", get(playground))
        .route("/debug/runs", get(debug_runs))
        .with_state(service)
}

// ---- Runs ----

#[derive(Clone)]
struct Service {
    runs: Arc<Mutex<Runs>>,
    ceiling: Ceiling,
    ttl: Duration,
    run_time: Duration,
}

impl Service {
    fn runs(&self) -> MutexGuard<'_, Runs> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct Runs {
    by_id: BTreeMap<String, Run>,
    started: HashMap<Profile, u64>,
    last: u64,
}

impl Runs {
    fn of<'a>(&'a self, profile: &'a Profile) -> impl Iterator<Item = Value> + 'a {
        self.by_id.iter().filter(move |(_, run)| run.profile == *profile).map(Run::view)
    }
}

struct Run {
    profile: Profile,
    input: String,
    status: &'static str,
}

impl Run {
    fn view((id, run): (&String, &Self)) -> Value {
        json!({ "run_id": id, "status": run.status, "input": run.input })
    }
}

const STARTED: &str = "started";
const COMPLETED: &str = "completed";

const LONGEST_RUN: f64 = 3600.0;

#[derive(Deserialize)]
struct StartRun {
    input: String,
    seconds: Option<f64>,
}

#[derive(Serialize)]
struct Started<'a> {
    run_id: &'a str,
    status: &'a str,
}

async fn start_run(
    State(service): State<Service>,
    Extension(profile): Extension<Profile>,
    handle: Option<Handle>,
    slot: Option<PermitSlot>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    // The body of a keyed request has been read; another may still trickle in. Meanwhile no place
    // under the ceiling is taken: the ceiling counts runs.
    let mut permit = slot.and_then(|slot| slot.take_permit());
    if handle.is_none() {
        permit = None;
    }
    let body = match read_body(body).await {
        Ok(body) => body,
        Err((status, detail)) => return problem(status, detail, []),
    };
    let wanted = match read_run(&headers, &body) {
        Ok(wanted) => wanted,
        Err(problem_with_it) => return problem(StatusCode::BAD_REQUEST, &problem_with_it, []),
    };
    let run_time = wanted.seconds.map_or(service.run_time, Duration::from_secs_f64);
    let Some(permit) = permit.or_else(|| service.ceiling.try_acquire()) else {
        return too_many_runs();
    };
    // A run of no time is over before its answer is sent: its place is free for whoever reads that.
    let permit = (!run_time.is_zero()).then_some(permit);
    let status = if permit.is_some() { STARTED } else { COMPLETED };

    let run_id = {
        let mut runs = service.runs();
        runs.last += 1;
        *runs.started.entry(profile.clone()).or_default() += 1;
        let run_id = format!("run_{:08}", runs.last);
        let run = Run { profile, input: wanted.input, status };
        runs.by_id.insert(run_id.clone(), run);
        run_id
    };

    // The run goes on after the answer, and keeps its place under the ceiling until it ends.
    let entry_ends = Instant::now() + service.ttl.min(FOR_EVER);
    let (id, background) = (run_id.clone(), service.clone());
    tokio::spawn(async move {
        if let Some(permit) = permit {
            tokio::time::sleep(run_time).await;
            let mut runs = background.runs();
            if let Some(run) = runs.by_id.get_mut(&id) {
                run.status = COMPLETED;
            }
            // While nobody can look: whoever sees that it is completed finds its place free.
            drop(permit);
        }
        // What a retry is pointed to is there for as long as the retry is answered: the entry, a
        // moment younger than this clock, is ended first.
        if let Some(handle) = handle {
            tokio::time::sleep_until(entry_ends).await;
            let _already_ended = handle.expire().await;
        } else {
            tokio::time::sleep(background.ttl.min(FOR_EVER)).await;
        }
        background.runs().by_id.remove(&id);
    });

    let location = [(LOCATION, format!("/v1/runs/{run_id}"))];
    let started = Json(Started { run_id: &run_id, status: STARTED });
    (StatusCode::ACCEPTED, location, started).into_response()
}

/// What the layer says where the ceiling is full, for work that it had let in: without a key, whose
/// body came late.
fn too_many_runs() -> Response {
    let detail = "Too many runs are active. Nothing was done.";
    let code = "concurrency_limit";
    let body = json!({
        "type": format!("urn:problem:tower-idempotency:{code}"),
        "title": "Too much work in progress",
        "status": 429,
        "detail": detail,
        "code": code,
        "retry": "same-key",
        "error": { "type": "idempotency_error", "code": code, "message": detail },
    });
    let headers = [
        (CONTENT_TYPE, "application/problem+json"),
        (CACHE_CONTROL, "no-store"),
        (RETRY_AFTER, "1"),
    ];
    (StatusCode::TOO_MANY_REQUESTS, headers, body.to_string()).into_response()
}

/// Reads a body within the same limits as the layer does.
async fn read_body(body: Body) -> Result<Bytes, (StatusCode, &'static str)> {
    match tokio::time::timeout(BODY_TIME, Limited::new(body, BODY_LIMIT).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err((StatusCode::PAYLOAD_TOO_LARGE, "the body is over 1 MiB"))
        }
        Ok(Err(_)) => Err((StatusCode::BAD_REQUEST, "the body broke off")),
        Err(_elapsed) => Err((StatusCode::REQUEST_TIMEOUT, "the body was too slow")),
    }
}

/// Long enough for a demonstration, short enough for every clock to add it.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

fn read_run(headers: &HeaderMap, body: &[u8]) -> Result<StartRun, String> {
    let is_form = headers.get(CONTENT_TYPE).is_some_and(|kind| {
        kind.as_bytes().to_ascii_lowercase().starts_with(b"application/x-www-form-urlencoded")
    });
    let wanted: StartRun = if is_form {
        serde_urlencoded::from_bytes(body).map_err(|error| error.to_string())?
    } else if body.trim_ascii_start().starts_with(b"{") {
        serde_json::from_slice(body).map_err(|error| error.to_string())?
    } else {
        return Err("the body has to be a JSON object or a form".to_owned());
    };
    match wanted.seconds {
        Some(seconds) if !(0.0..=LONGEST_RUN).contains(&seconds) => {
            Err(format!("seconds has to be from 0 to {LONGEST_RUN}"))
        }
        _ => Ok(wanted),
    }
}

async fn show_run(
    State(service): State<Service>,
    Extension(profile): Extension<Profile>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    // What cannot be an id is not one.
    let id = id.map(|Path(id)| id).unwrap_or_default();
    match service.runs().by_id.get_key_value(&id) {
        Some((id, run)) if run.profile == profile => Json(Run::view((id, run))).into_response(),
        // Another profile's run does not exist for this one.
        _ => problem(StatusCode::NOT_FOUND, "no such run", []),
    }
}

async fn list_runs(
    State(service): State<Service>,
    Extension(profile): Extension<Profile>,
) -> Json<Value> {
    let runs = service.runs();
    let started = runs.started.get(&profile).copied().unwrap_or_default();
    Json(json!({ "runs": runs.of(&profile).collect::<Vec<_>>(), "started": started }))
}

// ---- Looking in ----

async fn debug_runs(State(service): State<Service>) -> Json<Vec<Value>> {
    Json(service.runs().by_id.iter().map(Run::view).collect())
}

async fn playground() -> &'static str {
    r#"Retries made safe: a request with an Idempotency-Key runs once, and every
retry of it gets its first answer. Try:

  # Start a run. Imagine that the answer is lost on its way back ...
  curl -i localhost:3000/v1/runs -H 'Authorization: Bearer alice' \
    -H 'Idempotency-Key: first' -H 'Content-Type: application/json' \
    -d '{"input": "hello", "seconds": 5}'

  # ... and send the very same again: the same run_id, marked
  # "Idempotent-Replayed: true". Nothing was started twice:
  curl localhost:3000/v1/runs -H 'Authorization: Bearer alice'

  # The same key for something else: 409 idempotency_conflict.
  curl -i localhost:3000/v1/runs -H 'Authorization: Bearer alice' \
    -H 'Idempotency-Key: first' -H 'Content-Type: application/json' \
    -d '{"input": "other"}'

  # The same key of somebody else: a run of their own.
  curl -i localhost:3000/v1/runs -H 'Authorization: Bearer bob' \
    -H 'Idempotency-Key: first' -H 'Content-Type: application/json' \
    -d '{"input": "hello"}'

  # What the layer did so far, and what it holds:
  curl localhost:3000/debug/idempotency
  curl localhost:3000/debug/runs

Start it with MAX_RUNS=1 and two long runs to see new work refused with 429
while retries of known keys are still answered. Other settings: ADDR,
RUN_SECONDS, TTL_SECONDS, CAPACITY, STORE.
"#
}
