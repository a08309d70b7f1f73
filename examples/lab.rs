//! A server for tests and checks, with a route for everything that can become of a response:
//! `cargo run --example lab`, over HTTP/1.1 and cleartext HTTP/2.
//!
//! All routes under `/lab` want an `Authorization: Bearer <name>` and are guarded; `n` is how often
//! the handler ran for this path and query, in the header `x-n` too.
//!
//! | route | what it does |
//! |---|---|
//! | `POST /lab/echo` | the request's body, content type and trailers as they came |
//! | `POST /lab/status/{code}?ms=` | that status after so many milliseconds, `{"n": n}` |
//! | `POST /lab/headers` | a 201 with headers of every kind |
//! | `POST /lab/large?bytes=&chunked=1` | so many bytes, of known or unknown length |
//! | `POST /lab/stream?lines=&ms=&type=ndjson\|sse` | a line every so many milliseconds |
//! | `POST /lab/trailers` | a body and the trailer `x-checksum` |
//! | `POST /lab/panic?ms=`, `/lab/break` | panics; breaks off after half a body |
//! | `POST /lab/effects?then=ok\|500\|panic&ms=` | effects begin, then that end |
//! | `POST /lab/outcome/{final\|not-executed\|unknown}?status=` | that status with that outcome |
//! | `POST /lab/retain?seconds=`, `/lab/expire` | its record is kept so long; is ended |
//! | `POST /lab/batch` | two requests with the keys `<key>-1` and `<key>-2` through the same layer |
//! | `GET /lab/executions` | `{"<path?query>": n}`, for everybody |
//! | `GET /debug/idempotency` | what the layer did so far, and what it holds, for everybody |
//!
//! Settings, from the environment: `ADDR`, `MAX_RUNS` (handlers that have not answered), `CAPACITY`,
//! `TTL_SECONDS` and `STORE` as for the example `server`; `PRESET` (`ietf`, `stripe`), and over it
//! `ON_FAILURE` (`release`, `hold`, `record`), `IN_FLIGHT` (`wait`, `reject`), `WAIT_MS`, `REQUIRED`
//! (`1`, `0`), `REQUEST_LIMIT`, `RESPONSE_LIMIT`, `STORED_BYTES`, `BUFFERED_BYTES` (bytes),
//! `SCOPE_SHARE` (entries), `MODE` (`enforce`, `shadow`, `off`), `ON_LEAVE` (`finish`, `cancel`),
//! `FINISH_WITHIN_MS`, `BODY_IDLE_MS`.

#![allow(clippy::print_stdout, reason = "a program that talks to its user")]

mod common;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    io,
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{FromRequestParts, OriginalUri, Path, Query, Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode, Uri,
        header::{
            CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE, DATE, ETAG, LINK,
            LOCATION, SET_COOKIE, TRAILER, WWW_AUTHENTICATE,
        },
        request::Parts,
    },
    middleware::from_fn,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use futures_util::stream;
use http_body::Frame;
use http_body_util::{BodyExt, Collected, Limited, StreamBody};
use serde::{Deserialize, Deserializer, de};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_idempotency::{
    Ceiling, Handle, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, Mode, OnFailure,
    OnLeave, Outcome, StoredResponse, scope,
};

use common::{Common, MANY, Profile, authenticate, debug_routes, given, number, problem};

#[tokio::main]
async fn main() -> ExitCode {
    common::exit("lab", run().await)
}

async fn run() -> Result<(), String> {
    let common = Common::from_env()?;
    let (layer, store) = layer(&common)?;
    let app = app(&layer).merge(debug_routes(store, layer.clone()));
    common::serve(common.addr, app, &layer).await
}

/// Authentication goes first; then the layer; then the handlers. What a batch handler sends on goes
/// through the layer once more, but not through authentication.
fn app(layer: &IdempotencyLayer) -> Router {
    let lab = Lab::default();
    let stack = Router::new()
        .route("/lab/echo", post(echo))
        .route("/lab/status/{code}", post(status))
        .route("/lab/headers", post(headers))
        .route("/lab/large", post(large))
        .route("/lab/stream", post(lines))
        .route("/lab/trailers", post(trailers))
        .route("/lab/panic", post(panics))
        .route("/lab/break", post(breaks))
        .route("/lab/effects", post(effects))
        .route("/lab/outcome/{said}", post(outcome))
        .route("/lab/retain", post(retain))
        .route("/lab/expire", post(expire))
        .layer(layer.clone())
        .with_state(lab.clone());
    let batch = Router::new()
        .route("/lab/batch", post(batch))
        .layer(Extension(stack.clone()))
        .layer(layer.clone())
        .with_state(lab.clone());
    stack
        .merge(batch)
        .layer(from_fn(authenticate))
        .merge(Router::new().route("/lab/executions", get(executions)).with_state(lab))
}

// ---- Settings ----

fn layer(common: &Common) -> Result<(IdempotencyLayer, MemoryStore<StoredResponse>), String> {
    let mut store = MemoryStore::new().capacity(common.capacity);
    if let Some(bytes) = number("STORED_BYTES", BYTES)? {
        store = store.stored_bytes(bytes);
    }
    if let Some(entries) = number("SCOPE_SHARE", 1..=MANY)? {
        if entries > common.capacity {
            let capacity = common.capacity;
            return Err(format!("SCOPE_SHARE: {entries} are more than CAPACITY ({capacity})"));
        }
        store = store.scope_share(entries);
    }

    let mut layer = IdempotencyLayer::new(scope::from_extension::<Profile>())
        .store(store.clone())
        .fingerprint_headers([HeaderName::from_static("x-session-key")])
        .ceiling(&Ceiling::new(common.max_runs));
    layer = match one_of("PRESET", &[("ietf", Preset::Ietf), ("stripe", Preset::Stripe)])? {
        None => layer,
        Some(Preset::Ietf) => layer.ietf(),
        Some(Preset::Stripe) => layer.stripe(),
    };
    // What is given overrides the preset, so it comes after it.
    if let Some(ttl) = common.ttl {
        layer = layer.retention(ttl);
    }
    if let Some(rule) = one_of("ON_FAILURE", &RULES)? {
        layer = layer.on_failure(rule);
    }
    let on_leave = one_of("ON_LEAVE", &[("finish", OnLeave::Finish), ("cancel", OnLeave::Cancel)])?;
    if let Some(rule) = on_leave {
        layer = layer.on_leave(rule);
    }
    if let Some(required) = one_of("REQUIRED", &[("1", true), ("0", false)])? {
        layer = layer.key_required(required);
    }
    if let Some(mode) = one_of("MODE", &MODES)? {
        layer = layer.mode(mode);
    }
    if let Some(bytes) = number("RESPONSE_LIMIT", BYTES)? {
        layer = layer.response_limit(bytes);
    }
    if let Some(idle) = milliseconds("BODY_IDLE_MS")? {
        layer = layer.body_idle_timeout(idle);
    }
    layer = in_flight(layer)?;
    layer = buffers(layer)?;
    Ok((layer, store))
}

const RULES: [(&str, OnFailure); 3] =
    [("release", OnFailure::Release), ("hold", OnFailure::Hold), ("record", OnFailure::Record)];

const MODES: [(&str, Mode); 3] =
    [("enforce", Mode::Enforce), ("shadow", Mode::Shadow), ("off", Mode::Off)];

#[derive(Clone, Copy)]
enum Preset {
    Ietf,
    Stripe,
}

/// A wait is not to be longer than executions last. Where only one of the two is given, the other's
/// default gives way.
fn in_flight(layer: IdempotencyLayer) -> Result<IdempotencyLayer, String> {
    let (default_wait, default_finish) = (Duration::from_secs(10), Duration::from_secs(5 * 60));
    let wait = milliseconds("WAIT_MS")?;
    let finish = milliseconds("FINISH_WITHIN_MS")?;
    let waits = one_of("IN_FLIGHT", &[("wait", true), ("reject", false)])?.unwrap_or(true);
    let (wait, finish) = match (wait, finish) {
        (Some(wait), Some(finish)) if waits && wait > finish => {
            return Err(format!("WAIT_MS: {wait:?} is longer than FINISH_WITHIN_MS ({finish:?})"));
        }
        (Some(wait), Some(finish)) => (wait, finish),
        (Some(wait), None) => (wait, default_finish.max(wait)),
        (None, Some(finish)) => (default_wait.min(finish), finish),
        (None, None) => (default_wait, default_finish),
    };
    let in_flight = if waits { InFlight::Wait(wait) } else { InFlight::Reject };
    Ok(layer.finish_within(finish).in_flight(in_flight))
}

/// One body has to fit into the room for all. Where only one of the two is given, the other's
/// default gives way.
fn buffers(layer: IdempotencyLayer) -> Result<IdempotencyLayer, String> {
    const MIB: usize = 1024 * 1024;
    let (limit, room) = match (number("REQUEST_LIMIT", BYTES)?, number("BUFFERED_BYTES", BYTES)?) {
        (Some(limit), Some(room)) if limit > room => {
            return Err(format!("REQUEST_LIMIT: {limit} is more than BUFFERED_BYTES ({room})"));
        }
        (Some(limit), Some(room)) => (limit, room),
        (Some(limit), None) => (limit, limit.max(64 * MIB)),
        (None, Some(room)) => (room.min(MIB), room),
        (None, None) => return Ok(layer),
    };
    Ok(layer.request_limit(limit).buffered_bytes(room))
}

/// What a number of bytes may be.
const BYTES: std::ops::RangeInclusive<usize> = 1..=usize::MAX / 4;

fn one_of<T: Copy>(name: &str, choices: &[(&str, T)]) -> Result<Option<T>, String> {
    let Some(text) = given::<String>(name)? else { return Ok(None) };
    let chosen = choices.iter().find(|(choice, _)| *choice == text);
    chosen.map(|(_, value)| Some(*value)).ok_or_else(|| {
        let choices: Vec<_> = choices.iter().map(|(choice, _)| *choice).collect();
        format!("{name}: {text:?} is none of {}", choices.join(", "))
    })
}

fn milliseconds(name: &str) -> Result<Option<Duration>, String> {
    let milliseconds = number(name, 1..=MANY)?;
    Ok(milliseconds.map(|number| Duration::from_millis(number as u64)))
}

// ---- Executions ----

/// How often which handler ran, by the path and query it was called with.
#[derive(Clone, Default)]
struct Lab {
    executions: Arc<Mutex<BTreeMap<String, u64>>>,
}

impl Lab {
    fn executions(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.executions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn executions(State(lab): State<Lab>) -> Json<BTreeMap<String, u64>> {
    Json(lab.executions().clone())
}

/// One execution, counted as its handler begins: the last of what a handler asks for.
struct Execution {
    n: u64,
}

impl FromRequestParts<Lab> for Execution {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, lab: &Lab) -> Result<Self, Infallible> {
        let mut executions = lab.executions();
        let n = executions.entry(path_and_query(&parts.uri).to_owned()).or_default();
        *n += 1;
        Ok(Self { n: *n })
    }
}

fn path_and_query(uri: &Uri) -> &str {
    uri.path_and_query().map_or("/", |path| path.as_str())
}

impl Execution {
    /// Which execution it was, as a header.
    fn header(&self) -> [(HeaderName, HeaderValue); 1] {
        [(HeaderName::from_static("x-n"), self.n.into())]
    }

    /// That status, with the number in the body where there can be one.
    fn answer(&self, status: StatusCode) -> Response {
        match status {
            StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED => {
                (status, self.header()).into_response()
            }
            _ => (status, self.header(), Json(json!({ "n": self.n }))).into_response(),
        }
    }
}

/// A status that an answer can have.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "u16")]
struct Status(StatusCode);

impl TryFrom<u16> for Status {
    type Error = &'static str;

    fn try_from(code: u16) -> Result<Self, Self::Error> {
        let status = StatusCode::from_u16(code).ok();
        let status = status.filter(|status| !status.is_informational());
        status.map(Self).ok_or("the status of an answer is from 200 to 999")
    }
}

/// How long a handler takes.
#[derive(Deserialize)]
struct Delay {
    #[serde(default)]
    ms: u64,
}

impl Delay {
    async fn wait(&self) {
        sleep(Duration::from_millis(self.ms)).await;
    }
}

// ---- Every kind of answer ----

/// The most that is sent back, of a body without a key; the layer has its own limit for those with
/// one.
const ECHO_LIMIT: usize = 64 * 1024 * 1024;

async fn echo(execution: Execution, request: Request) -> Response {
    let content_type = request.headers().get(CONTENT_TYPE).cloned();
    let Ok(body) = Limited::new(request.into_body(), ECHO_LIMIT).collect().await else {
        return problem(StatusCode::BAD_REQUEST, "the body broke off or is over 64 MiB", []);
    };
    let trailers = body.trailers().cloned();
    let mut response = match trailers {
        None => Body::from(body.to_bytes()).into_response(),
        Some(trailers) => with_trailers(body.to_bytes(), trailers),
    };
    response.headers_mut().remove(CONTENT_TYPE);
    response.headers_mut().extend(content_type.map(|value| (CONTENT_TYPE, value)));
    (execution.header(), response).into_response()
}

/// A body, of unknown length or there would be no trailers over HTTP/1.1, and trailers that the
/// head names.
fn with_trailers(data: Bytes, trailers: HeaderMap) -> Response {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    let names = names.join(", ");
    let data = (!data.is_empty()).then(|| Frame::data(data));
    let frames = data.into_iter().chain([Frame::trailers(trailers)]);
    let body = Body::new(StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>))));
    ([(TRAILER, names)], body).into_response()
}

async fn status(
    Path(status): Path<Status>,
    Query(delay): Query<Delay>,
    execution: Execution,
) -> Response {
    delay.wait().await;
    execution.answer(status.0)
}

async fn headers(execution: Execution) -> Response {
    let text = HeaderValue::from_static;
    // "café" in ISO 8859-1, as some old service would say it: no UTF-8, and no less a value.
    let latin = HeaderValue::from_bytes(b"caf\xe9 \xff").unwrap_or(text("caf?"));
    let lines = [
        (CONTENT_TYPE, text("text/csv; charset=utf-8")),
        (LOCATION, text("/lab/headers/1")),
        (ETAG, text("\"lab-1\"")),
        (CACHE_CONTROL, text("private, max-age=60")),
        (LINK, text("</lab/headers?page=2>; rel=\"next\"")),
        (LINK, text("</lab/headers?page=9>; rel=\"last\"")),
        (CONTENT_DISPOSITION, text("attachment; filename=\"last, first.csv\"")),
        (HeaderName::from_static("x-latin"), latin),
        (SET_COOKIE, text("session=secret; HttpOnly")),
        (WWW_AUTHENTICATE, text("Bearer realm=\"lab\"")),
        (DATE, text("Tue, 01 Jan 2019 00:00:00 GMT")),
    ];
    let body = format!("n\n{}\n", execution.n);
    let mut response = (StatusCode::CREATED, execution.header(), Body::from(body)).into_response();
    for (name, value) in lines {
        response.headers_mut().append(name, value);
    }
    response
}

#[derive(Deserialize)]
struct Large {
    bytes: u64,
    #[serde(default, deserialize_with = "flag")]
    chunked: bool,
}

/// What is on in a query: `name=1`, `name=true` or just `name`.
fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    match String::deserialize(deserializer)?.as_str() {
        "" | "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        other => Err(de::Error::custom(format!("{other:?} is neither 1 nor 0"))),
    }
}

async fn large(Query(large): Query<Large>, execution: Execution) -> Response {
    const PIECE: u64 = 16 * 1024;
    let piece = Bytes::from(b"0123456789abcdef".repeat(1024));
    let pieces = (0..large.bytes.div_ceil(PIECE)).map(move |number| {
        let length = PIECE.min(large.bytes - number * PIECE);
        Ok::<_, Infallible>(piece.slice(..usize::try_from(length).unwrap_or_default()))
    });
    let length = (!large.chunked).then_some((CONTENT_LENGTH, HeaderValue::from(large.bytes)));
    let location = format!("/lab/large/{}", execution.n);
    let body = Body::from_stream(stream::iter(pieces));
    let mut response = (execution.header(), [(LOCATION, location)], body).into_response();
    response.headers_mut().extend(length);
    response
}

#[derive(Deserialize)]
struct Streamed {
    #[serde(default = "three")]
    lines: u64,
    #[serde(default)]
    ms: u64,
    #[serde(default, rename = "type")]
    kind: Kind,
}

fn three() -> u64 {
    3
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    #[default]
    Ndjson,
    Sse,
}

/// The first line comes at once, each further one so much later.
async fn lines(Query(wanted): Query<Streamed>, execution: Execution) -> Response {
    let Streamed { lines, ms, kind } = wanted;
    let n = execution.n;
    let lines = stream::unfold(0, move |line| async move {
        if line == lines {
            return None;
        }
        if line > 0 {
            sleep(Duration::from_millis(ms)).await;
        }
        let text = json!({ "n": n, "line": line + 1 });
        let text = match kind {
            Kind::Ndjson => format!("{text}\n"),
            Kind::Sse => format!("data: {text}\n\n"),
        };
        Some((Ok::<_, Infallible>(text), line + 1))
    });
    let content_type = match kind {
        Kind::Ndjson => "application/x-ndjson",
        Kind::Sse => "text/event-stream",
    };
    (execution.header(), [(CONTENT_TYPE, content_type)], Body::from_stream(lines)).into_response()
}

async fn trailers(execution: Execution) -> Response {
    let body = json!({ "n": execution.n }).to_string();
    let checksum: u64 = body.bytes().map(u64::from).sum();
    let name = HeaderName::from_static("x-checksum");
    let trailers = HeaderMap::from_iter([(name, checksum.into())]);
    let content_type = [(CONTENT_TYPE, "application/json")];
    (execution.header(), content_type, with_trailers(body.into(), trailers)).into_response()
}

// ---- Every kind of end ----

#[allow(clippy::panic, reason = "it is what it is for")]
async fn panics(Query(delay): Query<Delay>, execution: Execution) -> Response {
    delay.wait().await;
    panic!("execution {} panics, as it was asked to", execution.n)
}

async fn breaks(execution: Execution) -> Response {
    let half = stream::unfold(Some(execution.n), |half| async move {
        if let Some(n) = half {
            return Some((Ok(format!("{{\"n\": {n}, \"half\": ")), None));
        }
        // The half is to be on its way first, so that it is a cut that the client sees.
        sleep(Duration::from_millis(50)).await;
        Some((Err(io::Error::other("it breaks, as it was asked to")), None))
    });
    (execution.header(), Body::from_stream(half)).into_response()
}

#[derive(Deserialize)]
struct Effects {
    #[serde(default)]
    then: Then,
    #[serde(default)]
    ms: u64,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Then {
    #[default]
    Ok,
    #[serde(rename = "500")]
    Fail,
    Panic,
}

#[allow(clippy::panic, reason = "it is what it is for")]
async fn effects(
    Query(wanted): Query<Effects>,
    handle: Option<Handle>,
    execution: Execution,
) -> Response {
    if let Some(handle) = handle {
        handle.effects_begin();
    }
    Delay { ms: wanted.ms }.wait().await;
    match wanted.then {
        Then::Ok => execution.answer(StatusCode::OK),
        Then::Fail => execution.answer(StatusCode::INTERNAL_SERVER_ERROR),
        Then::Panic => panic!("execution {} panics, as it was asked to", execution.n),
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Said {
    Final,
    NotExecuted,
    Unknown,
}

#[derive(Deserialize)]
struct WithStatus {
    status: Option<Status>,
}

async fn outcome(
    Path(said): Path<Said>,
    Query(wanted): Query<WithStatus>,
    execution: Execution,
) -> Response {
    let outcome = match said {
        Said::Final => Outcome::Final,
        Said::NotExecuted => Outcome::NotExecuted,
        Said::Unknown => Outcome::Unknown,
    };
    let Status(status) = wanted.status.unwrap_or(Status(StatusCode::OK));
    (Extension(outcome), execution.answer(status)).into_response()
}

// ---- The record of one's own ----

#[derive(Deserialize)]
struct Retain {
    seconds: f64,
}

/// As good as for ever, in seconds.
const LONGEST: f64 = 1e18;

async fn retain(
    Query(wanted): Query<Retain>,
    handle: Option<Handle>,
    execution: Execution,
) -> Response {
    let seconds = if wanted.seconds > LONGEST { LONGEST } else { wanted.seconds };
    let Ok(time) = Duration::try_from_secs_f64(seconds) else {
        return problem(StatusCode::BAD_REQUEST, "seconds has to be a time", []);
    };
    if let Some(handle) = handle {
        // In flight it is remembered; in the shadow there may be no record to keep.
        let _held_or_lost = handle.retain_for(time).await;
    }
    execution.answer(StatusCode::OK)
}

async fn expire(handle: Option<Handle>, execution: Execution) -> Response {
    if let Some(handle) = handle {
        let _held_or_lost = handle.expire().await;
    }
    execution.answer(StatusCode::OK)
}

// ---- Many in one ----

/// Sends its parts through the same layer, in the name of the same caller, each with a key of its
/// own made of the batch's. A batch without a key has parts without keys.
async fn batch(
    Extension(stack): Extension<Router>,
    key: Option<IdempotencyKey>,
    execution: Execution,
    parts: Parts,
) -> Response {
    let mut answers = Vec::new();
    for part in 1..=2 {
        let uri = format!("/lab/status/200?part={part}");
        let mut request = Request::new(Body::empty());
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() = Uri::try_from(uri).unwrap_or_default();
        *request.extensions_mut() = parts.extensions.clone();
        // A part is asked for what it says itself, whoever asks: a retry of it alone is the same.
        let original = OriginalUri(request.uri().clone());
        request.extensions_mut().insert(original);
        let key = key.as_ref().and_then(|key| part_key(key.as_str(), part));
        request.headers_mut().extend(key.map(|key| (IDEMPOTENCY_KEY, key)));

        let Ok(response) = stack.clone().oneshot(request).await;
        let replayed = response.headers().contains_key(tower_idempotency::REPLAYED);
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.map(Collected::to_bytes);
        let body: Value = serde_json::from_slice(&body.unwrap_or_default()).unwrap_or_default();
        answers.push(json!({ "status": status, "replayed": replayed, "body": body }));
    }
    (execution.header(), Json(json!({ "n": execution.n, "parts": answers }))).into_response()
}

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The key of a part, quoted, which is taken whatever form is required.
fn part_key(key: &str, part: u32) -> Option<HeaderValue> {
    let key = key.replace('\\', "\\\\").replace('"', "\\\"");
    HeaderValue::try_from(format!("\"{key}-{part}\"")).ok()
}
