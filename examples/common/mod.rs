//! What the example servers have in common: settings from the environment, who is calling, a look
//! inside, and the way from the first connection to a shutdown that loses nothing.

mod signals;

use std::{
    env, fmt::Display, net::SocketAddr, ops::RangeInclusive, process::ExitCode, str::FromStr,
    sync::Arc, time::Duration,
};

use axum::{
    Json, Router,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode,
        header::{AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE},
    },
    middleware::Next,
    response::{IntoResponse, Response},
    routing::get,
    serve::ListenerExt,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Notify};
use tower_idempotency::{IdempotencyLayer, MemoryStore, StoredResponse};

// ---- Settings ----

/// The settings that every server has.
pub(crate) struct Common {
    pub(crate) addr: SocketAddr,
    pub(crate) capacity: usize,
    pub(crate) max_runs: usize,
    pub(crate) ttl: Option<Duration>,
}

impl Common {
    pub(crate) fn from_env() -> Result<Self, String> {
        // It is not repeated: the address of a store may have a password in it.
        if env::var_os("STORE").is_some_and(|store| store != "memory") {
            return Err("STORE: not available; use \"memory\"".to_owned());
        }
        let ttl = seconds("TTL_SECONDS", 0.0..=1e9)?;
        if ttl.is_some_and(|ttl| ttl.is_zero()) {
            return Err("TTL_SECONDS: has to be more than 0".to_owned());
        }
        Ok(Self {
            addr: given("ADDR")?.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 3000))),
            capacity: number("CAPACITY", 1..=MANY)?.unwrap_or(1000),
            max_runs: number("MAX_RUNS", 1..=MANY)?.unwrap_or(10),
            ttl,
        })
    }
}

/// Far below what would overflow a count, far above what a demonstration can hold.
pub(crate) const MANY: usize = 1_000_000_000;

/// Reads a setting from the environment; what is wrong with it is said with its name.
pub(crate) fn given<T: FromStr<Err: Display>>(name: &str) -> Result<Option<T>, String> {
    match env::var(name) {
        Ok(text) => match text.parse() {
            Ok(value) => Ok(Some(value)),
            Err(error) => Err(format!("{name}: {text:?}: {error}")),
        },
        Err(env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

pub(crate) fn number(name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, String> {
    let number = given(name)?;
    if let Some(number) = number.filter(|number| !range.contains(number)) {
        return Err(format!("{name}: {number} is not from {} to {}", range.start(), range.end()));
    }
    Ok(number)
}

pub(crate) fn seconds(name: &str, range: RangeInclusive<f64>) -> Result<Option<Duration>, String> {
    let Some(number) = given::<f64>(name)? else { return Ok(None) };
    if !range.contains(&number) {
        let (least, most) = range.into_inner();
        return Err(format!("{name}: {number} is not a number of seconds from {least} to {most}"));
    }
    let seconds = Duration::try_from_secs_f64(number);
    seconds.map(Some).map_err(|error| format!("{name}: {number}: {error}"))
}

// ---- From start to end ----

/// Serves `app` over HTTP/1.1 and cleartext HTTP/2 until the process is asked to stop, then lets
/// everything that has begun come to its end.
pub(crate) async fn serve(
    addr: SocketAddr,
    app: Router,
    layer: &IdempotencyLayer,
) -> Result<(), String> {
    // Before anybody can be told to stop us, or the signal would kill us.
    let asked_to_stop = signals::asked_to_stop().map_err(|error| format!("signals: {error}"))?;
    let listener = TcpListener::bind(addr).await;
    let listener = listener.map_err(|error| format!("ADDR: cannot listen on {addr}: {error}"))?;
    let local = listener.local_addr().map_err(|error| format!("ADDR: {error}"))?;
    println!("listening on http://{local}");

    let listener = listener.tap_io(|connection| {
        // What is written is to go out at once; that it would go out later is no reason to fail.
        let _as_it_is = connection.set_nodelay(true);
    });
    let stopping = Arc::new(Notify::new());
    let stop = Arc::clone(&stopping);
    let serving = axum::serve(listener, app).with_graceful_shutdown(async move {
        asked_to_stop.await;
        stop.notify_one();
    });
    let out_of_patience = async {
        stopping.notified().await;
        tokio::time::sleep(GRACE).await;
    };
    let served = tokio::select! {
        served = serving => served,
        // Somebody keeps a half-sent request open: cut.
        () = out_of_patience => Ok(()),
    };
    // Connections are closed; executions whose callers had left may still be running.
    let left = layer.drain(Duration::from_secs(30)).await;
    if left > 0 {
        println!("{left} executions did not finish in time");
    }
    served.map_err(|error| error.to_string())
}

/// How long connections may take to come to their end when the process is asked to stop.
const GRACE: Duration = Duration::from_secs(10);

/// Ends the program, and says why if it is not to be.
pub(crate) fn exit(program: &str, outcome: Result<(), String>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{program}: {problem}");
            ExitCode::FAILURE
        }
    }
}

// ---- Who is calling ----

/// Whom the caller has shown to be. Keys are unique within it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Profile(String);

impl AsRef<str> for Profile {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// A demonstration: whatever credentials are sent name the profile. A real service looks them up,
/// and takes for the profile a stable id of who they belong to, so that a new token is not a new
/// profile.
pub(crate) async fn authenticate(mut request: Request, next: Next) -> Response {
    let Some(profile) = profile(request.headers()) else {
        let challenge = [(WWW_AUTHENTICATE, "Bearer")];
        return problem(StatusCode::UNAUTHORIZED, "who are you?", challenge);
    };
    request.extensions_mut().insert(profile);
    next.run(request).await
}

fn profile(headers: &HeaderMap) -> Option<Profile> {
    // Of two lines somebody else may have believed the other one.
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return None };
    let (scheme, credentials) = line.to_str().ok()?.trim().split_once(' ')?;
    let known = ["bearer", "basic"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let credentials = credentials.trim();
    (known && !credentials.is_empty()).then(|| Profile(credentials.to_owned()))
}

pub(crate) fn problem<const N: usize>(
    status: StatusCode,
    detail: &str,
    headers: [(HeaderName, &'static str); N],
) -> Response {
    let title = status.canonical_reason().unwrap_or_default();
    let body = json!({ "title": title, "status": status.as_u16(), "detail": detail });
    let mut response = (status, headers, Json(body)).into_response();
    let kind = HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

// ---- Looking in ----

/// `GET /debug/idempotency`: what the layer did so far, and what it holds.
pub(crate) fn debug_routes(store: MemoryStore<StoredResponse>, layer: IdempotencyLayer) -> Router {
    Router::new()
        .route("/debug/idempotency", get(debug_idempotency))
        .with_state(Inspected { store, layer })
}

#[derive(Clone)]
struct Inspected {
    store: MemoryStore<StoredResponse>,
    layer: IdempotencyLayer,
}

async fn debug_idempotency(State(inspected): State<Inspected>) -> Json<Value> {
    let Inspected { store, layer } = inspected;
    let dispositions: serde_json::Map<_, _> = layer
        .dispositions()
        .iter()
        .map(|(disposition, count)| (disposition.to_string(), count.into()))
        .collect();
    Json(json!({
        "live_entries": store.len(),
        "in_flight": store.in_flight(),
        "capacity": store.max_len(),
        "dispositions": dispositions,
    }))
}
