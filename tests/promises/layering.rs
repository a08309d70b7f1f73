//! The layer among others: twice on one path, under time-outs, over limits, in axum.

use std::{
    convert::Infallible,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ::axum::{
    Router,
    body::Body as AxumBody,
    extract::Request as AxumRequest,
    middleware::{Next, from_fn},
    response::Response as AxumResponse,
    routing::post,
};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{
    Ceiling, Handle, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, Mode, PermitSlot,
    RequestBody, ResponseBody, StoredResponse, axum::AxumBodyLayer, scope,
};

use crate::support::{
    Gate, Runs, keyed, send,
    stack::{
        AnyBody, AnyError, Handler, Inner, Script, Stack, Step, any, layer, text, with_header,
    },
    unkeyed, within,
};

/// One layer around another around a handler.
fn twice(
    outer: &IdempotencyLayer,
    inner: &IdempotencyLayer,
    handler: Handler,
) -> impl Service<
    Request<AnyBody>,
    Response = Response<ResponseBody<ResponseBody<AnyBody>>>,
    Error = AnyError,
> + Clone
+ use<> {
    ServiceBuilder::new()
        .layer(outer.clone())
        .map_request(|request: Request<RequestBody<AnyBody>>| request.map(any))
        .layer(inner.clone())
        .service(handler)
}

#[tokio::test]
async fn applied_twice_it_serves_its_own_request_and_guards_it_once() {
    for (own_store, own_ceiling) in
        [(false, None), (true, None), (false, Some(false)), (true, Some(true))]
    {
        let (outer, store) = layer();
        let inner = if own_store { outer.clone().store(MemoryStore::new()) } else { outer.clone() };
        let ceiling = Ceiling::new(1);
        let (outer, inner) = match own_ceiling {
            None => (outer, inner),
            Some(false) => (outer.ceiling(&ceiling), inner.ceiling(&ceiling)),
            Some(true) => (outer.ceiling(&ceiling), inner.ceiling(&Ceiling::new(1))),
        };
        let handler = Handler::new(move |run, request| {
            let slot = request.extensions().get::<PermitSlot>();
            assert_eq!(slot.is_some(), own_ceiling.is_some());
            async move { Ok(text(200, format!("run {run}"))) }
        });
        let runs = handler.runs.clone();
        let service = twice(&outer, &inner, handler);
        for is_replay in [false, true, true] {
            let answer = send(&service, keyed("k", "{}").map(any)).await;
            assert_eq!((answer.text(), answer.is_replay()), ("run 1", is_replay));
        }
        for run in 2..=3 {
            let answer = send(&service, unkeyed("{}").map(any)).await;
            assert_eq!(answer.text(), format!("run {run}"));
        }
        send(&service, keyed("k", "[]").map(any)).await.assert_refused(409, "idempotency_conflict");
        assert_eq!((runs.count(), store.len(), ceiling.active()), (3, 1, 0));
    }
}

#[tokio::test]
async fn applied_twice_it_takes_one_place_of_a_ceiling_and_hands_it_to_the_handler() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(1);
    let layer = layer.ceiling(&ceiling);
    let (sender, mut permits) = tokio::sync::mpsc::unbounded_channel();
    let handler = Handler::new(move |_, request| {
        let slot = request.extensions().get::<PermitSlot>().unwrap();
        sender.send(slot.take_permit().expect("the permit is there")).unwrap();
        assert!(slot.take_permit().is_none());
        async { Ok(text(202, "")) }
    });
    let service = twice(&layer, &layer, handler);
    for request in [keyed("k", "{}"), unkeyed("{}")] {
        assert_eq!(send(&service, request.map(any)).await.status, StatusCode::ACCEPTED);
        assert_eq!(ceiling.active(), 1);
        send(&service, unkeyed("{}").map(any)).await.assert_refused(429, "concurrency_limit");
        drop(permits.recv().await);
        assert_eq!(ceiling.active(), 0);
    }
}

#[tokio::test]
async fn what_is_switched_off_leaves_the_work_to_a_layer_further_in() {
    let (inner, store) = layer();
    let ceiling = Ceiling::new(1);
    let inner = inner.ceiling(&ceiling);
    let outer = inner.clone().mode(Mode::Off);
    let handler = Handler::new(|run, request| {
        let slot = request.extensions().get::<PermitSlot>().unwrap();
        assert!(slot.take_permit().is_some(), "the permit is there");
        async move { Ok(text(200, format!("run {run}"))) }
    });
    let service = twice(&outer, &inner, handler);
    for is_replay in [false, true] {
        let answer = send(&service, keyed("k", "{}").map(any)).await;
        assert_eq!((answer.text(), answer.is_replay(), store.len()), ("run 1", is_replay, 1));
    }
    assert_eq!(send(&service, unkeyed("{}").map(any)).await.text(), "run 2");
    let _full = ceiling.try_acquire().unwrap();
    for new_work in [unkeyed("{}"), keyed("other", "{}")] {
        send(&service, new_work.map(any)).await.assert_refused(429, "concurrency_limit");
    }
}

#[tokio::test]
async fn what_is_switched_off_further_in_takes_nothing_from_the_handler() {
    let (outer, store) = layer();
    let ceiling = Ceiling::new(1);
    let outer = outer.ceiling(&ceiling);
    let inner = outer.clone().mode(Mode::Off);
    let handler = Handler::new(|_, request| {
        let extensions = request.extensions();
        let slot = extensions.get::<PermitSlot>().unwrap();
        assert!(slot.take_permit().is_some(), "the permit is there");
        if let Some(handle) = extensions.get::<Handle>() {
            handle.effects_begin();
        }
        async { Ok(text(500, "")) }
    });
    let service = twice(&outer, &inner, handler);
    assert_eq!(send(&service, unkeyed("{}").map(any)).await.status, 500);
    assert_eq!(send(&service, keyed("k", "{}").map(any)).await.status, 500);
    let again = send(&service, keyed("k", "{}").map(any)).await;
    again.assert_refused(409, "idempotency_outcome_unknown");
    assert_eq!((store.len(), ceiling.active()), (1, 0));
}

#[tokio::test]
async fn applied_twice_a_stream_comes_as_it_is_made_and_leaves_one_record_or_tombstone() {
    for is_recorded in [true, false] {
        let (layer, store) = layer();
        let layer = layer.record_streams(is_recorded);
        let handler = Handler::new(|_, _| async {
            Ok(Response::new(any(Script::new(["one", " two"].map(Step::data)))))
        });
        let service = twice(&layer, &layer, handler);
        assert_eq!(send(&service, keyed("k", "{}").map(any)).await.text(), "one two");
        assert_eq!((store.len(), store.in_flight()), (1, 0));
        let again = send(&service, keyed("k", "{}").map(any)).await;
        if is_recorded {
            assert_eq!((again.text(), again.is_replay()), ("one two", true));
        } else {
            again.assert_refused(409, "idempotency_not_replayable");
        }
    }
}

#[tokio::test]
async fn applied_twice_with_two_scopes_both_guard() {
    let store: MemoryStore<StoredResponse> = MemoryStore::new();
    let by_header = |name| {
        IdempotencyLayer::new(scope::from_header(http::HeaderName::from_static(name)))
            .store(store.clone())
    };
    let handler = Handler::new(|run, _| async move { Ok(text(200, format!("run {run}"))) });
    let service = twice(&by_header("x-tenant"), &by_header("x-user"), handler);
    let of = |tenant: &str, user: &str| {
        let mut request = keyed("k", "{}").map(any);
        request.headers_mut().insert("x-tenant", tenant.parse().unwrap());
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request
    };
    assert_eq!(send(&service, of("t1", "u1")).await.text(), "run 1");
    assert_eq!(store.len(), 2);
    // The inner one replays to the outer one, for which it is a first answer.
    let other = send(&service, of("t2", "u1")).await;
    assert_eq!((other.text(), other.is_replay()), ("run 1", false));
    assert_eq!(send(&service, of("t2", "u2")).await.text(), "run 1");
}

/// A stack whose handler, asked for `/batch`, sends two requests with keys of their own through
/// the very same stack, the extensions of its request copied. Others answer with their key.
fn batching(layer: &IdempotencyLayer, keys: &'static [&'static str]) -> Stack {
    let whole: Arc<OnceLock<Stack>> = Arc::default();
    let stack = Stack::new(layer, {
        let whole = Arc::clone(&whole);
        move |run, request: Inner| {
            let whole = Arc::clone(&whole);
            async move {
                if request.uri().path() != "/batch" {
                    let key = request.extensions().get::<IdempotencyKey>().unwrap();
                    return Ok(text(200, format!("{}: run {run}", key.as_str())));
                }
                let mut answers = Vec::new();
                for key in keys {
                    let mut part = keyed(key, "{}");
                    *part.uri_mut() = Uri::from_static("/part");
                    *part.extensions_mut() = request.extensions().clone();
                    let answer = whole.get().unwrap().send(part).await;
                    answers.push(format!("{} {}", answer.text(), answer.is_replay()));
                }
                Ok(text(200, answers.join(", ")))
            }
        }
    });
    assert!(whole.set(stack.clone()).is_ok());
    stack
}

fn batch(key: &str) -> Request<AnyBody> {
    let mut request = keyed(key, "{}").map(any);
    *request.uri_mut() = Uri::from_static("/batch");
    request
}

#[tokio::test]
async fn other_keys_inside_a_request_are_guarded_as_usual() {
    let (layer, store) = layer();
    let stack = batching(&layer, &["k-1", "k-2", "k-1"]);
    let first = stack.send(batch("k")).await;
    assert_eq!(first.text(), "k-1: run 2 false, k-2: run 3 false, k-1: run 2 true");
    assert!(stack.send(batch("k")).await.is_replay());
    // The parts are known from then on, in any batch.
    let other = stack.send(batch("other")).await;
    assert_eq!(other.text(), "k-1: run 2 true, k-2: run 3 true, k-1: run 2 true");
    assert_eq!((stack.runs.count(), store.len()), (4, 4));
}

#[tokio::test]
async fn a_request_inside_with_the_same_key_does_not_wait_for_itself() {
    let (layer, store) = layer();
    let stack = batching(&layer, &["k", "k"]);
    let answer = stack.send(batch("k")).await;
    assert_eq!(answer.text(), "k: run 2 false, k: run 3 false");
    assert_eq!(store.len(), 1);
}

#[tokio::test]
async fn each_request_inside_has_a_permit_of_its_own() {
    let (layer, _) = layer();
    let ceiling = Ceiling::new(2);
    let stack = batching(&layer.ceiling(&ceiling), &["k-1", "k-2"]);
    let answer = stack.send(batch("k")).await;
    assert_eq!(answer.text(), "k-1: run 2 false, k-2: run 3 false");
    assert_eq!(ceiling.active(), 0);
}

#[tokio::test(start_paused = true)]
async fn under_a_time_out_the_work_goes_on_and_its_true_answer_is_replayed() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer.in_flight(InFlight::Reject), |run, _| async move {
        tokio::time::sleep(Duration::from_secs(20)).await;
        Ok(with_header(text(201, format!("run;{run}")), "content-type", "text/csv"))
    });
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, Duration::from_secs(5)))
        .service(stack.service.clone());
    let began = Instant::now();
    let first = send(&service, keyed("k", "{}").map(any)).await;
    assert_eq!(first.status, StatusCode::GATEWAY_TIMEOUT);
    assert_eq!(began.elapsed(), Duration::from_secs(5));
    let during = send(&service, keyed("k", "{}").map(any)).await;
    during.assert_refused(409, "idempotency_in_progress");
    tokio::time::sleep(Duration::from_secs(16)).await;
    let after = send(&service, keyed("k", "{}").map(any)).await;
    assert_eq!((after.status, after.text()), (StatusCode::CREATED, "run;1"));
    assert_eq!(after.header("content-type"), Some("text/csv"));
    assert!(after.is_replay());
    assert_eq!(stack.runs.count(), 1);
}

#[tokio::test]
async fn over_a_concurrency_limit_only_new_work_waits_for_a_permit() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let handler = Handler::new({
        let gate = gate.clone();
        move |run, request: Inner| {
            let gate = gate.clone();
            async move {
                if request.uri().path() == "/slow" {
                    gate.pass().await;
                }
                Ok(text(200, format!("run {run}")))
            }
        }
    });
    let service = ServiceBuilder::new().layer(layer).concurrency_limit(1).service(handler);
    send(&service, keyed("k", "{}").map(any)).await;
    let mut slow = keyed("slow", "{}").map(any);
    *slow.uri_mut() = Uri::from_static("/slow");
    let slow = tokio::spawn(service.clone().oneshot(slow));
    gate.reached_by(1).await;

    let again = send(&service, keyed("k", "{}").map(any)).await;
    assert_eq!((again.text(), again.is_replay()), ("run 1", true));
    let conflict = send(&service, keyed("k", "[]").map(any)).await;
    conflict.assert_refused(409, "idempotency_conflict");
    let invalid = send(&service, keyed("a b", "{}").map(any)).await;
    invalid.assert_refused(400, "idempotency_key_invalid");
    let fresh = tokio::spawn(service.clone().oneshot(keyed("new", "{}").map(any)));
    let unguarded = tokio::spawn(service.clone().oneshot(unkeyed("{}").map(any)));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!fresh.is_finished() && !unguarded.is_finished());
    gate.open();
    for call in [slow, fresh, unguarded] {
        assert_eq!(within(call).await.unwrap().unwrap().status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn over_load_shedding_what_is_shed_leaves_nothing() {
    let gate = Gate::default();
    let (layer, store) = layer();
    let handler = Handler::new({
        let gate = gate.clone();
        move |run, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(text(200, format!("run {run}")))
            }
        }
    });
    let runs = handler.runs.clone();
    let service =
        ServiceBuilder::new().layer(layer).load_shed().concurrency_limit(1).service(handler);
    let slow = tokio::spawn({
        let call = service.clone().oneshot(keyed("slow", "{}").map(any));
        async move { call.await.is_ok() }
    });
    gate.reached_by(1).await;
    let shed = within(service.clone().oneshot(keyed("k", "{}").map(any))).await.unwrap_err();
    assert!(shed.is::<tower::load_shed::error::Overloaded>());
    assert_eq!(store.len(), 1);
    gate.open();
    assert!(within(slow).await.unwrap());
    assert_eq!(send(&service, keyed("k", "{}").map(any)).await.text(), "run 2");
    assert_eq!(runs.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn over_a_rate_limit_repeats_cost_nothing() {
    let (layer, _) = layer();
    let handler = Handler::new(|run, _| async move { Ok(text(200, format!("run {run}"))) });
    let service = ServiceBuilder::new()
        .layer(layer)
        .buffer(8)
        .rate_limit(2, Duration::from_secs(50))
        .service(handler);
    let began = Instant::now();
    for _ in 0..20 {
        assert_eq!(send(&service, keyed("a", "{}").map(any)).await.text(), "run 1");
    }
    assert_eq!(send(&service, keyed("b", "{}").map(any)).await.text(), "run 2");
    assert_eq!(began.elapsed(), Duration::ZERO, "the second place was still there");
    assert_eq!(send(&service, keyed("c", "{}").map(any)).await.text(), "run 3");
    assert!(began.elapsed() >= Duration::from_secs(50));
}

#[tokio::test]
async fn what_inner_layers_make_of_the_request_does_not_change_its_identity() {
    let (layer, store) = layer();
    let runs = Runs::default();
    let service = ServiceBuilder::new()
        .layer(layer)
        .map_request(|request: Inner| {
            let (mut parts, _) = request.into_parts();
            parts.uri = Uri::from_static("/elsewhere");
            parts.method = http::Method::PUT;
            parts.headers.clear();
            parts.headers.insert("idempotency-key", HeaderValue::from_static("another"));
            parts.extensions.clear();
            Request::from_parts(parts, any(http_body_util::Full::from("another body")))
        })
        .service_fn(move |request: Request<AnyBody>| {
            assert_eq!(request.uri(), "/elsewhere");
            let run = runs.run();
            async move { Ok::<_, Infallible>(text(200, format!("run {run}"))) }
        });
    for is_replay in [false, true] {
        let answer = send(&service, keyed("k", "{}").map(any)).await;
        assert_eq!((answer.text(), answer.is_replay()), ("run 1", is_replay));
    }
    assert_eq!((store.len(), store.in_flight()), (1, 0));
}

fn axum_request(uri: &'static str, key: Option<&str>) -> Request<AxumBody> {
    let request = key.map_or_else(|| unkeyed("{}"), |key| keyed(key, "{}"));
    let mut request = request.map(AxumBody::new);
    *request.uri_mut() = Uri::from_static(uri);
    request
}

#[tokio::test]
async fn all_routes_of_an_axum_router_share_one_store() {
    let runs = Runs::default();
    let handler = || {
        let runs = runs.clone();
        post(move || async move { format!("run {}", runs.run()) })
    };
    let (layer, store) = layer();
    let router = Router::new().route("/a", handler()).route("/b", handler()).layer(layer.clone());
    // One clone for each connection.
    assert_eq!(send(&router.clone(), axum_request("/a", Some("k"))).await.text(), "run 1");
    assert!(send(&router.clone(), axum_request("/a", Some("k"))).await.is_replay());
    let other = send(&router, axum_request("/b", Some("k"))).await;
    other.assert_refused(409, "idempotency_conflict");
    assert_eq!(send(&router, axum_request("/b", Some("l"))).await.text(), "run 2");
    assert_eq!(store.len(), 2);

    // On single routes, too.
    let router = Router::new()
        .route("/a", handler().layer(layer.clone()))
        .route("/c", handler())
        .route_layer(layer);
    assert!(send(&router, axum_request("/a", Some("k"))).await.is_replay());
    let other = send(&router, axum_request("/c", Some("k"))).await;
    other.assert_refused(409, "idempotency_conflict");
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn an_unknown_route_of_an_axum_router_leaves_nothing() {
    let (layer, store) = layer();
    let router = Router::new().route("/a", post(|| async {})).layer(layer);
    let missing = send(&router, axum_request("/missing", Some("k"))).await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    assert!(store.is_empty());
}

/// Middleware that names axum's own body.
async fn middleware(request: AxumRequest, next: Next) -> AxumResponse {
    let key = request.extensions().get::<IdempotencyKey>().unwrap().as_str().to_owned();
    let mut response = next.run(request).await;
    response.headers_mut().insert("x-seen", key.parse().unwrap());
    response
}

#[tokio::test]
async fn middleware_that_names_axums_body_works_below() {
    let (layer, _) = layer();
    let router = Router::new().route("/a", post(|body: String| async move { body })).layer(
        ServiceBuilder::new().layer(layer).layer(AxumBodyLayer::new()).layer(from_fn(middleware)),
    );
    for is_replay in [false, true] {
        let answer = send(&router, axum_request("/a", Some("k"))).await;
        assert_eq!((answer.text(), answer.is_replay()), ("{}", is_replay));
        assert_eq!(answer.header("x-seen"), Some("k"));
    }
}

#[tokio::test]
async fn handlers_take_key_handle_and_permit_as_arguments() {
    let (layer, _) = layer();
    let layer = layer.ceiling(&Ceiling::new(1));
    let router =
        Router::new()
            .route(
                "/all",
                post(|key: IdempotencyKey, handle: Handle, slot: PermitSlot| async move {
                    let permit = slot.take_permit().is_some();
                    format!("{} {} {permit}", key.as_str(), handle.attempt())
                }),
            )
            .route(
                "/optional",
                post(
                    |key: Option<IdempotencyKey>,
                     handle: Option<Handle>,
                     slot: Option<PermitSlot>| async move {
                        format!("{} {} {}", key.is_some(), handle.is_some(), slot.is_some())
                    },
                ),
            )
            .layer(layer);
    assert_eq!(send(&router, axum_request("/all", Some("k"))).await.text(), "k 1 true");
    assert_eq!(send(&router, axum_request("/optional", Some("l"))).await.text(), "true true true");
    // A permit is there without a key, too.
    let unkeyed = send(&router, axum_request("/optional", None)).await;
    assert_eq!(unkeyed.text(), "false false true");
    let missing = send(&router, axum_request("/all", None)).await;
    assert_eq!(missing.status, StatusCode::INTERNAL_SERVER_ERROR, "the program's mistake");
}

#[tokio::test]
async fn without_the_layer_the_arguments_are_missing_and_the_optional_ones_none() {
    let router = Router::new()
        .route("/key", post(|_: IdempotencyKey| async {}))
        .route("/handle", post(|_: Handle| async {}))
        .route("/slot", post(|_: PermitSlot| async {}))
        .route(
            "/optional",
            post(|key: Option<IdempotencyKey>, handle: Option<Handle>| async move {
                format!("{} {}", key.is_some(), handle.is_some())
            }),
        );
    for uri in ["/key", "/handle", "/slot"] {
        let answer = send(&router, axum_request(uri, Some("k"))).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{uri}");
    }
    let optional = send(&router, axum_request("/optional", Some("k"))).await;
    assert_eq!(optional.text(), "false false");
}

#[tokio::test]
async fn a_service_that_never_fails_stays_one_that_never_fails() {
    let (layer, _) = layer();
    let service =
        layer.layer(tower::service_fn(|_: Inner| async { Ok::<_, Infallible>(text(200, "")) }));
    let Ok(response) = service.oneshot(keyed("k", "{}").map(any)).await;
    assert_eq!(response.status(), StatusCode::OK);
}
