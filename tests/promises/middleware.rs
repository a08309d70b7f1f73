//! Among what tower and tower-http have, in the order that the README recommends, and what becomes
//! of it in the orders that it warns of.

use std::{
    convert::Infallible,
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use flate2::read::GzDecoder;
use http::{
    HeaderName, HeaderValue, Method, Request, Response, StatusCode,
    header::{
        ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, AUTHORIZATION,
        CONTENT_ENCODING, CONTENT_TYPE, ORIGIN,
    },
};
use http_body_util::{BodyExt, Full};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_http::{
    catch_panic::CatchPanicLayer,
    compression::CompressionLayer,
    cors::CorsLayer,
    decompression::RequestDecompressionLayer,
    limit::RequestBodyLimitLayer,
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    set_header::SetResponseHeaderLayer,
    timeout::TimeoutLayer,
    trace::TraceLayer,
    validate_request::ValidateRequestHeaderLayer,
};
use tower_idempotency::{
    Disposition, IdempotencyLayer, MemoryStore, OnFailure, RequestBody, StoredResponse, cors, scope,
};

use crate::support::{
    Answer, Gate, keyed, send,
    stack::{AnyBody, AnyError, BoxError, Handler, any, layer, text, with_header},
    unkeyed, within,
};

/// Answers 200 and the number of its run.
fn numbered() -> Handler {
    Handler::new(|run, _| async move { Ok(text(200, format!("run {run}"))) })
}

fn with(
    mut request: Request<Full<Bytes>>,
    headers: &[(HeaderName, &'static str)],
) -> Request<AnyBody> {
    for (name, value) in headers {
        request.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    request.map(any)
}

fn lines(answer: &Answer, name: impl http::header::AsHeaderName) -> Vec<&str> {
    answer.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
}

// CORS.

const ONE: &str = "https://one.example";
const OTHER: &str = "https://other.example";

fn cors_layer() -> CorsLayer {
    CorsLayer::new()
        .allow_origin([ONE, OTHER].map(HeaderValue::from_static))
        .allow_methods([Method::POST])
        .allow_headers(cors::ALLOW_HEADERS.into_iter().chain([CONTENT_TYPE]).collect::<Vec<_>>())
        .expose_headers(cors::EXPOSE_HEADERS)
}

/// The names in a list of them.
fn names(answer: &Answer, name: &str) -> Vec<HeaderName> {
    lines(answer, name)
        .into_iter()
        .flat_map(|line| line.split(','))
        .map(|name| name.trim().parse().unwrap())
        .collect()
}

#[tokio::test]
async fn under_cors_each_origin_is_told_what_holds_for_it_on_replays_and_refusals_too() {
    let (layer, store) = layer();
    let handler = numbered();
    let runs = handler.runs.clone();
    let service = ServiceBuilder::new().layer(cors_layer()).layer(layer).service(handler);
    let from = |origin, body: &'static str| with(keyed("k", body), &[(ORIGIN, origin)]);
    let first = send(&service, from(ONE, "{}")).await;
    let replay = send(&service, from(OTHER, "{}")).await;
    let refusal = send(&service, from(OTHER, "[]")).await;
    refusal.assert_refused(409, "idempotency_conflict");
    assert!(!first.is_replay() && replay.is_replay());
    for (answer, origin) in [(&first, ONE), (&replay, OTHER), (&refusal, OTHER)] {
        assert_eq!(lines(answer, ACCESS_CONTROL_ALLOW_ORIGIN), [origin]);
        // What there is to read can be read by a script.
        let exposed = names(answer, "access-control-expose-headers");
        for name in cors::EXPOSE_HEADERS {
            assert!(exposed.contains(&name), "{name}");
        }
    }
    assert_eq!((runs.count(), store.len()), (1, 1));
}

#[tokio::test]
async fn under_cors_a_preflight_is_answered_without_a_key_and_allows_to_send_one() {
    let (layer, store) = layer();
    let layer = layer.key_required(true);
    let handler = numbered();
    let runs = handler.runs.clone();
    let service = ServiceBuilder::new().layer(cors_layer()).layer(layer.clone()).service(handler);
    let request = Request::builder()
        .method(Method::OPTIONS)
        .uri("/v1/runs")
        .header("origin", ONE)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "content-type,idempotency-key");
    let answer = send(&service, request.body(any(Full::default())).unwrap()).await;
    assert_eq!(answer.status, 200);
    let allowed = names(&answer, "access-control-allow-headers");
    for name in cors::ALLOW_HEADERS {
        assert!(allowed.contains(&name), "{name}");
    }
    assert_eq!((runs.count(), store.len()), (0, 0));
    assert!(layer.dispositions().iter().all(|(_, count)| count == 0), "it never came to the layer");
}

#[test]
fn the_lists_for_cors_have_all_that_is_sent_and_said() {
    assert!(cors::ALLOW_HEADERS.contains(&HeaderName::from_static("idempotency-key")));
    for name in ["idempotent-replayed", "retry-after", "location", "link", "x-should-retry"] {
        assert!(cors::EXPOSE_HEADERS.contains(&HeaderName::from_static(name)), "{name}");
    }
}

#[tokio::test]
async fn over_cors_neither_a_replay_nor_a_refusal_may_be_read_by_anybody() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new().layer(layer).layer(cors_layer()).service(numbered());
    let from = |body: &'static str| with(keyed("k", body), &[(ORIGIN, ONE)]);
    assert_eq!(lines(&send(&service, from("{}")).await, ACCESS_CONTROL_ALLOW_ORIGIN), [ONE]);
    // Better than to tell one origin what held for another.
    for body in ["{}", "[]"] {
        let answer = send(&service, from(body)).await;
        assert!(lines(&answer, ACCESS_CONTROL_ALLOW_ORIGIN).is_empty());
        assert!(lines(&answer, ACCESS_CONTROL_EXPOSE_HEADERS).is_empty());
    }
}

// Compression.

const LONG: &str = "long enough that it is worth to compress it, and then some more of the same";

fn unzipped(answer: &Answer) -> String {
    let mut text = String::new();
    GzDecoder::new(&answer.body[..]).read_to_string(&mut text).unwrap();
    text
}

#[tokio::test]
async fn under_compression_each_caller_gets_the_encoding_that_it_takes() {
    let (layer, store) = layer();
    let handler = Handler::new(|_, _| async {
        Ok(with_header(text(200, LONG), "content-type", "text/plain"))
    });
    let runs = handler.runs.clone();
    let service =
        ServiceBuilder::new().layer(CompressionLayer::new()).layer(layer).service(handler);
    let zipped = [(ACCEPT_ENCODING, "gzip")];
    for (headers, is_replay) in [(&zipped[..], false), (&[], true), (&zipped, true)] {
        let answer = send(&service, with(keyed("k", "{}"), headers)).await;
        assert_eq!(answer.is_replay(), is_replay);
        if headers.is_empty() {
            assert_eq!((answer.text(), answer.header("content-encoding")), (LONG, None));
        } else {
            assert_eq!(answer.header("content-encoding"), Some("gzip"));
            assert_eq!(unzipped(&answer), LONG);
        }
    }
    assert_eq!((runs.count(), store.len()), (1, 1));
}

#[tokio::test]
async fn over_compression_every_replay_has_the_first_callers_encoding() {
    let (layer, _) = layer();
    let handler = Handler::new(|_, _| async {
        Ok(with_header(text(200, LONG), "content-type", "text/plain"))
    });
    let service =
        ServiceBuilder::new().layer(layer).layer(CompressionLayer::new()).service(handler);
    send(&service, with(keyed("k", "{}"), &[(ACCEPT_ENCODING, "gzip")])).await;
    let plain = send(&service, with(keyed("k", "{}"), &[])).await;
    assert!(plain.is_replay());
    assert_eq!(plain.header("content-encoding"), Some("gzip"), "though it did not ask for it");
    assert_eq!(unzipped(&plain), LONG);
}

fn zip(text: &str) -> Bytes {
    let mut zipped = Vec::new();
    let level = flate2::Compression::default();
    flate2::read::GzEncoder::new(text.as_bytes(), level).read_to_end(&mut zipped).unwrap();
    zipped.into()
}

#[tokio::test]
async fn under_decompression_a_retry_in_another_encoding_is_the_same_request() {
    let (layer, _) = layer();
    let handler = Handler::new(|run, request| async move {
        assert!(!request.headers().contains_key(CONTENT_ENCODING));
        let body = request.into_body().collect().await.unwrap().to_bytes();
        Ok(text(200, format!("run {run}: {}", str::from_utf8(&body).unwrap())))
    });
    let service = ServiceBuilder::new()
        .layer(RequestDecompressionLayer::new())
        .map_request(|request: Request<_>| request.map(any))
        .layer(layer)
        .service(handler);
    let zipped = with(keyed("k", zip("{\"a\": 1}")), &[(CONTENT_ENCODING, "gzip")]);
    assert_eq!(send(&service, zipped).await.text(), "run 1: {\"a\": 1}");
    let plain = send(&service, with(keyed("k", "{ \"a\":1 }"), &[])).await;
    assert!(plain.is_replay());
    let other = with(keyed("k", zip("{\"a\": 2}")), &[(CONTENT_ENCODING, "gzip")]);
    send(&service, other).await.assert_refused(409, "idempotency_conflict");
}

#[tokio::test]
async fn over_decompression_another_encoding_is_another_request() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .layer(layer)
        .layer(RequestDecompressionLayer::new())
        .map_request(|request: Request<_>| request.map(any))
        .service_fn(|request: Request<AnyBody>| async {
            let body = request.into_body().collect().await?.to_bytes();
            Ok::<_, AnyError>(text(200, body))
        });
    let zipped = || with(keyed("k", zip("{}")), &[(CONTENT_ENCODING, "gzip")]);
    assert_eq!(send(&service, zipped()).await.text(), "{}");
    assert!(send(&service, zipped()).await.is_replay());
    let plain = send(&service, with(keyed("k", "{}"), &[])).await;
    plain.assert_refused(409, "idempotency_conflict");
}

// Limits of bodies.

#[tokio::test]
async fn under_a_body_limit_what_is_too_large_is_refused_and_leaves_nothing() {
    let (layer, store) = layer();
    let handler = numbered();
    let runs = handler.runs.clone();
    let service = ServiceBuilder::new()
        .layer(RequestBodyLimitLayer::new(10))
        .map_request(|request: Request<_>| request.map(any))
        .layer(layer)
        .service(handler);
    // Where the length is declared, the limit itself says so.
    let mut declared = with(keyed("k", "x".repeat(11)), &[]);
    declared.headers_mut().insert("content-length", HeaderValue::from_static("11"));
    assert_eq!(send(&service, declared).await.status, StatusCode::PAYLOAD_TOO_LARGE);
    let undeclared = with(keyed("k", "x".repeat(11)), &[]);
    send(&service, undeclared).await.assert_refused(413, "idempotency_body_too_large");
    assert_eq!((runs.count(), store.len()), (0, 0));
    assert_eq!(send(&service, with(keyed("k", "x".repeat(10)), &[])).await.text(), "run 1");
}

// Who is calling.

/// Lets in who has the token, as long as `known` holds.
fn authentication(
    known: &Arc<AtomicBool>,
) -> ValidateRequestHeaderLayer<
    impl FnMut(&mut Request<AnyBody>) -> Result<(), Response<AnyBody>> + Clone + use<>,
> {
    let known = Arc::clone(known);
    ValidateRequestHeaderLayer::custom(move |request: &mut Request<AnyBody>| {
        let is_right =
            request.headers().get(AUTHORIZATION).is_some_and(|value| value == "Bearer t");
        if is_right && known.load(Ordering::SeqCst) { Ok(()) } else { Err(text(401, "who?")) }
    })
}

const TOKEN: (HeaderName, &str) = (AUTHORIZATION, "Bearer t");

#[tokio::test]
async fn under_authentication_a_caller_whose_access_was_taken_away_gets_nothing_of_a_record() {
    let (layer, store) = layer();
    let known = Arc::new(AtomicBool::new(true));
    let handler = Handler::new(|_, _| async { Ok(text(201, "a secret")) });
    let runs = handler.runs.clone();
    let service = ServiceBuilder::new()
        .map_response(|response: Response<_>| response.map(any))
        .layer(authentication(&known))
        .map_response(|response: Response<_>| response.map(any))
        .layer(layer.clone())
        .service(handler);
    let nobody = send(&service, with(keyed("k", "{}"), &[])).await;
    assert_eq!((nobody.status, store.len()), (StatusCode::UNAUTHORIZED, 0));
    assert_eq!(send(&service, with(keyed("k", "{}"), &[TOKEN])).await.text(), "a secret");
    assert!(send(&service, with(keyed("k", "{}"), &[TOKEN])).await.is_replay());
    known.store(false, Ordering::SeqCst);
    for (key, body) in [("k", "{}"), ("k", "[]"), ("new", "{}"), ("a b", "{}")] {
        let revoked = send(&service, with(keyed(key, body), &[TOKEN])).await;
        assert_eq!((revoked.status, revoked.text()), (StatusCode::UNAUTHORIZED, "who?"));
        assert!(!revoked.is_replay());
    }
    // Nor is anything of it seen.
    assert_eq!((runs.count(), store.len()), (1, 1));
    assert_eq!(layer.dispositions().iter().map(|(_, count)| count).sum::<u64>(), 2);
}

#[tokio::test]
async fn over_authentication_a_record_is_given_to_a_caller_whose_access_was_taken_away() {
    let (layer, store) = layer();
    let known = Arc::new(AtomicBool::new(true));
    let service = ServiceBuilder::new()
        .layer(layer)
        .map_request(|request: Request<_>| request.map(any))
        .layer(authentication(&known))
        .service_fn(|_: Request<AnyBody>| async { Ok::<_, Infallible>(text(200, "secret")) });
    let nobody = send(&service, with(keyed("k", "{}"), &[])).await;
    // At least its refusal is no record.
    assert_eq!((nobody.status, store.len()), (StatusCode::UNAUTHORIZED, 0));
    assert_eq!(send(&service, with(keyed("k", "{}"), &[TOKEN])).await.text(), "secret");
    known.store(false, Ordering::SeqCst);
    assert!(send(&service, with(keyed("k", "{}"), &[TOKEN])).await.is_replay());
}

// Traces, names, panics.

#[tokio::test]
async fn under_tracing_every_answer_is_seen_and_inside_only_what_runs() {
    let (layer, _) = layer();
    let (outside, inside) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    fn trace<B>(
        seen: &Arc<AtomicUsize>,
    ) -> impl Fn(&Response<B>, Duration, &tracing::Span) + Clone + use<B> {
        let seen = Arc::clone(seen);
        move |_, _, _| {
            seen.fetch_add(1, Ordering::SeqCst);
        }
    }
    let service = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http().on_response(trace(&outside)))
        .layer(layer)
        .layer(TraceLayer::new_for_http().on_response(trace(&inside)))
        .service(numbered());
    for is_replay in [false, true] {
        let answer = send(&service, with(keyed("k", "{}"), &[])).await;
        assert_eq!((answer.text(), answer.is_replay()), ("run 1", is_replay));
    }
    send(&service, with(keyed("k", "[]"), &[])).await.assert_refused(409, "idempotency_conflict");
    assert_eq!((outside.load(Ordering::SeqCst), inside.load(Ordering::SeqCst)), (3, 1));
}

#[tokio::test]
async fn under_request_ids_each_answer_has_its_own() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(layer)
        .service(numbered());
    let mut ids = Vec::new();
    for is_replay in [false, true, true] {
        let answer = send(&service, with(keyed("k", "{}"), &[])).await;
        assert_eq!(answer.is_replay(), is_replay);
        let [id] = lines(&answer, "x-request-id")[..] else { panic!("not one id") };
        ids.push(id.to_owned());
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[tokio::test]
async fn over_request_ids_a_replay_has_none_rather_than_the_first_ones() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .layer(layer)
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(PropagateRequestIdLayer::x_request_id())
        .service(numbered());
    for count in [1, 0] {
        let answer = send(&service, with(keyed("k", "{}"), &[])).await;
        assert_eq!(lines(&answer, "x-request-id").len(), count);
    }
}

#[tokio::test]
async fn what_an_outer_layer_adds_is_there_once_and_what_an_inner_one_adds_is_recorded() {
    let (layer, _) = layer();
    fn numbers<B>(
        count: &Arc<AtomicUsize>,
    ) -> impl Fn(&Response<B>) -> Option<HeaderValue> + Clone + use<B> {
        let count = Arc::clone(count);
        move |_| Some(HeaderValue::from(count.fetch_add(1, Ordering::SeqCst)))
    }
    let count = Arc::new(AtomicUsize::new(0));
    let name = HeaderName::from_static;
    let service = ServiceBuilder::new()
        .layer(SetResponseHeaderLayer::appending(name("x-outer"), numbers(&count)))
        .layer(layer)
        .layer(SetResponseHeaderLayer::appending(name("x-inner"), numbers(&count)))
        .service(numbered());
    for outer in ["1", "2"] {
        let answer = send(&service, with(keyed("k", "{}"), &[])).await;
        assert_eq!(
            (lines(&answer, "x-outer"), lines(&answer, "x-inner")),
            (vec![outer], vec!["0"])
        );
    }
}

#[tokio::test]
async fn a_panic_is_a_failure_whether_it_is_caught_outside_or_inside() {
    let panicking = || {
        Handler::new(|run, _| async move {
            assert!(run > 1, "the first run panics, as it was told to");
            Ok(text(200, format!("run {run}")))
        })
    };
    // Inside there is an answer, which the rule "record" records.
    for (rule, outside, inside) in [
        (OnFailure::Release, (200, "run 2"), (200, "run 2")),
        (OnFailure::Hold, (409, "unknown"), (409, "unknown")),
        (OnFailure::Record, (409, "unknown"), (500, "Service panicked")),
    ] {
        let (layer, _) = layer();
        let under = ServiceBuilder::new()
            .layer(CatchPanicLayer::new())
            .layer(layer.clone().on_failure(rule).store(MemoryStore::new()))
            .service(panicking());
        let over = ServiceBuilder::new()
            .layer(layer.on_failure(rule).store(MemoryStore::new()))
            .layer(CatchPanicLayer::new())
            .service(panicking());
        for (number, (status, text)) in [outside, inside].into_iter().enumerate() {
            for (status, text) in [(500, "Service panicked"), (status, text)] {
                let request = with(keyed("k", "{}"), &[]);
                let answer = match number {
                    0 => send(&under, request).await,
                    _ => send(&over, request).await,
                };
                assert_eq!(answer.status, status, "{rule:?} {number}");
                assert!(answer.text().contains(text), "{rule:?} {number}: {}", answer.text());
            }
        }
    }
}

// Time, and room for new work.

#[tokio::test(start_paused = true)]
async fn over_a_time_out_the_work_ends_and_the_failure_rule_applies() {
    for (rule, is_held) in [(OnFailure::Release, false), (OnFailure::Hold, true)] {
        for answers in [false, true] {
            let (layer, store) = layer();
            let layer = layer.on_failure(rule);
            let handler = Handler::new(|run, _| async move {
                tokio::time::sleep(Duration::from_secs(if run == 1 { 20 } else { 0 })).await;
                Ok(text(200, format!("run {run}")))
            });
            let runs = handler.runs.clone();
            let began = Instant::now();
            let limit = Duration::from_secs(5);
            let request = || with(keyed("k", "{}"), &[]);
            // One that answers, and one that fails.
            let again = if answers {
                let status = StatusCode::GATEWAY_TIMEOUT;
                let inner = TimeoutLayer::with_status_code(status, limit);
                let service = ServiceBuilder::new().layer(layer).layer(inner).service(handler);
                assert_eq!(send(&service, request()).await.status, status);
                send(&service, request()).await
            } else {
                let service = ServiceBuilder::new().layer(layer).timeout(limit).service(handler);
                let error = within(service.clone().oneshot(request())).await.err().unwrap();
                assert!(error.is::<tower::timeout::error::Elapsed>());
                send(&service, request()).await
            };
            assert_eq!(began.elapsed(), limit);
            if is_held {
                again.assert_refused(409, "idempotency_outcome_unknown");
            } else {
                assert_eq!(again.text(), "run 2");
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!((runs.count(), store.len()), (if is_held { 1 } else { 2 }, 1));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn under_a_rate_limit_repeats_spend_it() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .buffer(8)
        .rate_limit(2, Duration::from_secs(50))
        .layer(layer)
        .service(numbered());
    let began = Instant::now();
    for run in 1..=3 {
        let answer = send(&service, with(keyed("k", "{}"), &[])).await;
        assert_eq!(answer.is_replay(), run > 1);
    }
    assert!(began.elapsed() >= Duration::from_secs(50), "the third one waited");
}

/// Waits at the gate if it is asked for `/slow`.
fn slow(gate: &Gate) -> Handler {
    let gate = gate.clone();
    Handler::new(move |run, request| {
        let gate = gate.clone();
        async move {
            if request.uri().path() == "/slow" {
                gate.pass().await;
            }
            Ok(text(200, format!("run {run}")))
        }
    })
}

fn to_slow(key: &str) -> Request<AnyBody> {
    let mut request = keyed(key, "{}").map(any);
    *request.uri_mut() = http::Uri::from_static("/slow");
    request
}

#[tokio::test]
async fn under_a_concurrency_limit_a_repeat_waits_for_a_permit() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let service = ServiceBuilder::new().concurrency_limit(1).layer(layer).service(slow(&gate));
    send(&service, with(keyed("k", "{}"), &[])).await;
    let running = tokio::spawn(service.clone().oneshot(to_slow("slow")));
    gate.reached_by(1).await;
    let repeat = tokio::spawn(service.clone().oneshot(with(keyed("k", "{}"), &[])));
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    assert!(!repeat.is_finished(), "though it needs nothing of the service below");
    gate.open();
    assert!(within(running).await.unwrap().is_ok());
    let repeat = within(repeat).await.unwrap().unwrap();
    assert!(Answer::read(repeat).await.is_replay());
}

#[tokio::test]
async fn under_load_shedding_a_repeat_is_shed_although_its_answer_is_there() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let service =
        ServiceBuilder::new().load_shed().concurrency_limit(1).layer(layer).service(slow(&gate));
    let known = within(service.clone().oneshot(with(keyed("k", "{}"), &[]))).await.unwrap();
    drop(Answer::read(known).await);
    let running = tokio::spawn({
        let call = service.clone().oneshot(to_slow("slow"));
        async move { call.await.is_ok() }
    });
    gate.reached_by(1).await;
    let repeat = within(service.clone().oneshot(with(keyed("k", "{}"), &[]))).await;
    assert!(repeat.err().unwrap().is::<tower::load_shed::error::Overloaded>());
    gate.open();
    assert!(within(running).await.unwrap());
}

// All of them, in the order of the README.

#[tokio::test(start_paused = true)]
async fn in_the_recommended_order_all_of_them_work_together() {
    let known = Arc::new(AtomicBool::new(true));
    let layer = IdempotencyLayer::new(scope::from_header(AUTHORIZATION));
    let handler = Handler::new(|run, _| async move { Ok(text(200, format!("run {run}: {LONG}"))) });
    let runs = handler.runs.clone();
    let service = ServiceBuilder::new()
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(TraceLayer::new_for_http())
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(30)))
        .layer(CompressionLayer::new())
        .layer(cors_layer())
        .map_response(|response: Response<_>| response.map(any))
        .layer(authentication(&known))
        .map_response(|response: Response<_>| response.map(any))
        .layer(layer.clone())
        .layer(tower::util::MapErrLayer::new(|error: BoxError| AnyError::new(error)))
        .buffer(8)
        .rate_limit(2, Duration::from_secs(1_000))
        .concurrency_limit(1)
        .timeout(Duration::from_secs(20))
        .service(handler);
    let began = Instant::now();
    let headers = [TOKEN, (ORIGIN, ONE), (ACCEPT_ENCODING, "gzip")];
    for is_replay in [false, true, true, true] {
        let answer = send(&service, with(keyed("k", "{}"), &headers)).await;
        assert_eq!((answer.status.as_u16(), answer.is_replay()), (200, is_replay));
        assert_eq!(unzipped(&answer), format!("run 1: {LONG}"));
        assert_eq!(lines(&answer, ACCESS_CONTROL_ALLOW_ORIGIN), [ONE]);
        assert_eq!(lines(&answer, "x-request-id").len(), 1);
    }
    assert_eq!(send(&service, with(unkeyed("{}"), &headers)).await.status, 200);
    assert_eq!(send(&service, with(keyed("k", "{}"), &[])).await.status, 401);
    assert_eq!((began.elapsed(), runs.count()), (Duration::ZERO, 2));
    assert_eq!(layer.dispositions().get(Disposition::Replayed), 3);
}

/// Everything above is one service type after the other; this one is the plainest.
#[test]
fn the_layer_needs_no_more_of_its_neighbours_than_a_clone() {
    fn is_service<S: Service<Request<AnyBody>, Error = Infallible> + Clone>(_: S) {}
    let layer =
        IdempotencyLayer::new(scope::single_tenant()).store(MemoryStore::<StoredResponse>::new());
    is_service(layer.layer(tower::service_fn(|_: Request<RequestBody<AnyBody>>| async {
        Ok::<_, Infallible>(text(200, ""))
    })));
}
