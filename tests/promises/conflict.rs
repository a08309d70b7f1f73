//! One key is for one request and its retries: another request under the same key is a conflict,
//! and two requests that mean the same are the same.

use std::time::Duration;

use ::axum::{Router, extract::OriginalUri, routing::any as any_method};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use tower::ServiceExt;
use tower_idempotency::IdempotencyLayer;

use crate::support::{
    Gate, Runs, keyed, send,
    stack::{AnyBody, Script, Stack, Step, any, layer},
    unkeyed,
};

/// A `POST /v1/runs` of JSON with the key `k`, changed.
fn changed(change: impl FnOnce(&mut Request<AnyBody>)) -> Request<AnyBody> {
    let mut request = keyed("k", r#"{"a":1}"#).map(any);
    change(&mut request);
    request
}

fn with_uri(uri: &'static str) -> Request<AnyBody> {
    changed(|request| *request.uri_mut() = Uri::from_static(uri))
}

fn with_header(name: &'static str, value: &'static [u8]) -> Request<AnyBody> {
    changed(|request| {
        request.headers_mut().append(name, HeaderValue::from_bytes(value).unwrap());
    })
}

fn with_body(body: impl Into<Bytes>) -> Request<AnyBody> {
    keyed("k", body).map(any)
}

/// A body of this type.
fn typed(content_type: &'static str, body: impl Into<Bytes>) -> Request<AnyBody> {
    let mut request = with_body(body);
    request.headers_mut().insert("content-type", content_type.parse().unwrap());
    request
}

/// Asserts that `other`, after `first`, is refused while the record of `first` stays.
async fn assert_conflict(
    layer: &IdempotencyLayer,
    first: impl Fn() -> Request<AnyBody>,
    other: impl Fn() -> Request<AnyBody>,
) {
    let stack = Stack::numbered(layer);
    stack.send(first()).await;
    for _ in 0..2 {
        stack.send(other()).await.assert_refused(409, "idempotency_conflict");
    }
    assert!(stack.send(first()).await.is_replay(), "the original still replays");
    assert_eq!(stack.runs.count(), 1);
}

async fn assert_same(
    layer: &IdempotencyLayer,
    first: impl Fn() -> Request<AnyBody>,
    other: impl Fn() -> Request<AnyBody>,
) {
    let stack = Stack::numbered(layer);
    stack.send(first()).await;
    assert!(stack.send(other()).await.is_replay());
}

#[tokio::test]
async fn another_path_query_or_method_is_another_request() {
    for other in ["/v1/runs/1", "/v1/runs/", "/v1/Runs", "/v1/run%73", "/v1/runs?", "/v1/runs?a=1"]
    {
        assert_conflict(&layer().0, || changed(|_| {}), || with_uri(other)).await;
    }
    for (first, other) in
        [("/?a=1&b=2", "/?b=2&a=1"), ("/a?b", "/a%3Fb"), ("/a?", "/a"), ("/a/b", "/a?b")]
    {
        assert_conflict(&layer().0, || with_uri(first), || with_uri(other)).await;
    }
    let patch = || changed(|request| *request.method_mut() = Method::PATCH);
    assert_conflict(&layer().0, || changed(|_| {}), patch).await;
    assert_conflict(&layer().0, patch, || changed(|_| {})).await;
}

#[tokio::test]
async fn the_authority_and_other_headers_do_not_matter() {
    assert_same(&layer().0, || changed(|_| {}), || with_uri("http://host.example/v1/runs")).await;
    for name in ["user-agent", "authorization", "accept", "x-session-key", "traceparent"] {
        assert_same(&layer().0, || changed(|_| {}), || with_header(name, b"other")).await;
    }
}

#[tokio::test]
async fn another_content_type_or_encoding_is_another_request() {
    for (first, other) in [
        ("application/json", "application/json; charset=utf-8"),
        ("application/json", "application/vnd.api+json"),
        ("application/json", "Application/Json"),
        ("text/plain", "text/html"),
    ] {
        assert_conflict(&layer().0, || typed(first, "{}"), || typed(other, "{}")).await;
    }
    let untyped = || {
        changed(|request| {
            request.headers_mut().remove("content-type");
        })
    };
    assert_conflict(&layer().0, || changed(|_| {}), untyped).await;
    assert_conflict(&layer().0, || changed(|_| {}), || with_header("content-type", b"a/b")).await;
    for encoding in [&b"gzip"[..], b"identity"] {
        let encoded = || with_header("content-encoding", encoding);
        assert_conflict(&layer().0, || changed(|_| {}), encoded).await;
    }
}

#[tokio::test]
async fn chosen_headers_count_in_addition_to_the_body() {
    let chosen = || {
        let names = ["x-session-key", "x-api-version"].map(HeaderName::from_static);
        layer().0.fingerprint_headers(names)
    };
    let session = |value| move || with_header("x-session-key", value);
    assert_conflict(&chosen(), session(b"one"), session(b"two")).await;
    assert_conflict(&chosen(), session(b"\xfe"), session(b"\xff")).await;
    assert_conflict(&chosen(), session(b""), || changed(|_| {})).await;
    let twice = |first: &'static str, second: &'static str| {
        move || {
            changed(|request| {
                request.headers_mut().append("x-session-key", first.parse().unwrap());
                request.headers_mut().append("x-session-key", second.parse().unwrap());
            })
        }
    };
    assert_conflict(&chosen(), twice("ab", "c"), twice("a", "bc")).await;
    assert_conflict(&chosen(), twice("a", "b"), twice("b", "a")).await;
    // The value of one header is never taken for that of another.
    assert_conflict(&chosen(), session(b"one"), || with_header("x-api-version", b"one")).await;
    assert_same(&chosen(), session(b"one"), session(b"one")).await;
    let other_body = || {
        let mut request = with_body(r#"{"a":2}"#);
        request.headers_mut().insert("x-session-key", "one".parse().unwrap());
        request
    };
    assert_conflict(&chosen(), session(b"one"), other_body).await;
}

#[tokio::test]
async fn every_byte_of_a_body_counts() {
    let bytes = |body: &'static [u8]| move || typed("application/octet-stream", body);
    for (first, other) in [
        (&b"\0\0"[..], &b"\0\x01"[..]),
        (b"a", b"a\0"),
        (b"\xff", b"\xfe"),
        (b"\xc3\x28", b"\xef\xbf\xbd"),
        (b"{\"a\":1}", b"{\"a\": 1}"),
        (b"a\r\n", b"a\n"),
    ] {
        assert_conflict(&layer().0, bytes(first), bytes(other)).await;
        assert_same(&layer().0, bytes(first), bytes(first)).await;
    }
}

#[tokio::test]
async fn an_empty_body_is_a_body() {
    let empty = || with_body("");
    assert_same(&layer().0, empty, empty).await;
    for other in ["{}", " ", "null", "\"\""] {
        assert_conflict(&layer().0, empty, move || with_body(other)).await;
    }
}

#[tokio::test]
async fn large_chunked_bodies_that_share_all_but_their_last_byte_are_two() {
    const FRAMES: usize = 48;

    let chunked = |last: &'static str| {
        move || {
            let frames = (0..FRAMES).map(|_| Step::data(vec![b'x'; 64 * 1024]));
            let script = Script::new(frames.chain([Step::data(last)]));
            typed("text/plain", "").map(|_| any(script))
        }
    };
    let large = || layer().0.request_limit(4 * 1024 * 1024);
    assert_conflict(&large(), chunked("a"), chunked("b")).await;
    assert_same(&large(), chunked("a"), chunked("a")).await;
    // How a body is cut into frames says nothing.
    let whole = || {
        let mut body = vec![b'x'; FRAMES * 64 * 1024];
        body.push(b'a');
        typed("text/plain", body)
    };
    assert_same(&large(), chunked("a"), whole).await;
}

#[tokio::test]
async fn a_form_upload_with_another_boundary_never_runs_twice() {
    let upload = |content_type: &'static str, body: &'static str| move || typed(content_type, body);
    assert_conflict(
        &layer().0,
        upload("multipart/form-data; boundary=a", "--a\r\n\r\nx\r\n--a--"),
        upload("multipart/form-data; boundary=b", "--b\r\n\r\nx\r\n--b--"),
    )
    .await;
    // Nor is a form taken apart: what it says it is does not matter.
    let form = |body: &'static str| move || typed("application/json", body);
    assert_conflict(&layer().0, form("a=1&b=2"), form("b=2&a=1")).await;
    assert_same(&layer().0, form("a=1&b=2"), form("a=1&b=2")).await;
}

#[tokio::test]
async fn json_that_means_the_same_is_the_same_request() {
    for (first, other) in [
        (r#"{"a":1,"b":[1,2]}"#, "{\n  \"b\": [1, 2],\r\n\t\"a\": 1 }\n"),
        (r#"{"a":{"x":1,"y":2}}"#, r#"{"a":{"y":2,"x":1}}"#),
        (r#"{"a":"\u00e9\n\/"}"#, "{\"a\":\"é\\u000a/\"}"),
        (r#"{"\u0061":1}"#, r#"{"a":1}"#),
        (r#"["\ud83d\ude00"]"#, "[\"😀\"]"),
    ] {
        for content_type in
            ["application/json", "application/merge-patch+json", "APPLICATION/JSON; x=y"]
        {
            assert_same(
                &layer().0,
                move || typed(content_type, first),
                move || typed(content_type, other),
            )
            .await;
        }
        // Only where it is said to be JSON, and is not encoded.
        assert_conflict(
            &layer().0,
            move || typed("text/plain", first),
            move || typed("text/plain", other),
        )
        .await;
        let encoded = |body: &'static str| {
            move || {
                let mut request = with_body(body);
                request.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
                request
            }
        };
        assert_conflict(&layer().0, encoded(first), encoded(other)).await;
    }
}

#[tokio::test]
async fn json_that_could_mean_something_else_is_another_request() {
    for (first, other) in [
        // Numbers compare by their text: none is ever rounded into another.
        ("9007199254740993", "9007199254740992"),
        ("1", "1.0"),
        ("1", "1e0"),
        ("0", "-0"),
        ("12345678901234567890", "12345678901234567891"),
        ("1", "\"1\""),
        ("null", "\"null\""),
        ("[1,2]", "[2,1]"),
        ("[[1],2]", "[1,[2]]"),
        ("[]", "{}"),
        (r#"{"a":1}"#, r#"{"a":2}"#),
        (r#"{"a":1}"#, r#"{"A":1}"#),
        (r#"{"a":1}"#, r#"{"a":1,"b":null}"#),
        (r#"{"a":"b"}"#, r#"{"b":"a"}"#),
        (r#""é""#, "\"e\u{301}\""),
        (r#""a""#, r#""a ""#),
        // Members said twice: by their bytes.
        (r#"{"a":1,"a":2}"#, r#"{"a":2,"a":1}"#),
        (r#"{"a":1,"a":2}"#, r#"{"a":1, "a":2}"#),
        (r#"{"a":1,"a":2}"#, r#"{"a":2}"#),
        // Broken JSON: by its bytes, never all alike.
        ("{", "["),
        ("{\"a\":1", "{\"a\":2"),
        ("{\"a\":1", "{\"a\": 1"),
        ("nul", "tru"),
        ("\"\\ud800\"", "\"\\ud801\""),
        ("{} {}", "{}  {}"),
    ] {
        assert_conflict(&layer().0, move || with_body(first), move || with_body(other)).await;
        assert_same(&layer().0, move || with_body(first), move || with_body(first)).await;
    }
}

#[tokio::test]
async fn json_too_deep_to_be_understood_is_compared_by_its_bytes() {
    let deep = |inside: &str| format!("{}{inside}{}", "[".repeat(10_000), "]".repeat(10_000));
    assert_same(&layer().0, || with_body(deep("1")), || with_body(deep("1"))).await;
    assert_conflict(&layer().0, || with_body(deep("1")), || with_body(deep("2"))).await;
    assert_conflict(&layer().0, || with_body(deep("1")), || with_body(deep(" 1"))).await;
}

#[tokio::test]
async fn only_the_chosen_parts_of_a_json_body_count() {
    let chosen = || layer().0.fingerprint_json_only(["/amount", "/items/0/sku"]);
    let first = || with_body(r#"{"amount":1,"items":[{"sku":"a","n":1}],"sent":1}"#);
    for same in [
        r#"{"amount":1,"items":[{"sku":"a","n":1}],"sent":2}"#,
        r#"{"items":[{"n":2,"sku":"\u0061"},{"sku":"b"}],"amount":1}"#,
    ] {
        assert_same(&chosen(), first, move || with_body(same)).await;
        assert_conflict(&layer().0, first, move || with_body(same)).await;
    }
    for other in [
        r#"{"amount":2,"items":[{"sku":"a","n":1}],"sent":1}"#,
        r#"{"amount":1,"items":[{"sku":"b","n":1}],"sent":1}"#,
        r#"{"amount":1,"items":[{},{"sku":"a","n":1}],"sent":1}"#,
        r#"{"amount":null,"items":[{"sku":"a","n":1}],"sent":1}"#,
        r#"{"items":[{"sku":"a","n":1}],"sent":1}"#,
    ] {
        assert_conflict(&chosen(), first, move || with_body(other)).await;
    }
    // What is not of the body counts as ever.
    assert_conflict(&chosen(), || changed(|_| {}), || with_uri("/v1/other")).await;
}

#[tokio::test]
async fn parts_of_a_json_body_can_be_left_out() {
    let chosen = || layer().0.fingerprint_json_except(["/meta/nonce", "/sent~1at"]);
    let first = || with_body(r#"{"a":1,"meta":{"nonce":1,"v":1},"sent/at":1}"#);
    for same in
        [r#"{"a":1,"meta":{"nonce":[2],"v":1}}"#, r#"{"sent/at":null,"meta":{"v":1},"a":1}"#]
    {
        assert_same(&chosen(), first, move || with_body(same)).await;
        assert_conflict(&layer().0, first, move || with_body(same)).await;
    }
    for other in [
        r#"{"a":2,"meta":{"nonce":1,"v":1},"sent/at":1}"#,
        r#"{"a":1,"meta":{"nonce":1,"v":2},"sent/at":1}"#,
        r#"{"a":1,"meta":{"nonce":1,"v":1},"sent/at":1,"nonce":1}"#,
    ] {
        assert_conflict(&chosen(), first, move || with_body(other)).await;
    }
    let everything = || chosen().fingerprint_json_except([""; 0]);
    assert_conflict(&everything(), first, || with_body(r#"{"a":1,"meta":{"v":1}}"#)).await;
}

#[tokio::test]
async fn a_body_that_is_not_understood_counts_whole_whatever_is_chosen() {
    for chosen in
        [|| layer().0.fingerprint_json_only(["/a"]), || layer().0.fingerprint_json_except(["/b"])]
    {
        for (first, other) in [
            (r#"{"a":1,"b":1"#, r#"{"a":1,"b":2"#),
            (r#"{"a":1,"b":1,"b":1}"#, r#"{"a":1,"b":1,"b":2}"#),
            (r#"{"a":1,"b":"\ud800"}"#, r#"{"a":1,"b":"\ud801"}"#),
            (r#"{"a":1,"b":1} x"#, r#"{"a":1,"b":2} x"#),
        ] {
            assert_conflict(&chosen(), move || with_body(first), move || with_body(other)).await;
            assert_same(&chosen(), move || with_body(first), move || with_body(first)).await;
        }
        let plain = |body: &'static str| move || typed("text/plain", body);
        let bodies = [r#"{"a":1,"b":1}"#, r#"{"a":1,"b":2}"#];
        assert_conflict(&chosen(), plain(bodies[0]), plain(bodies[1])).await;
        assert_same(&chosen(), move || with_body(bodies[0]), move || with_body(bodies[1])).await;
    }
}

#[tokio::test]
async fn the_last_choice_of_parts_holds() {
    let [a, b] = [r#"{"a":1,"b":1}"#, r#"{"a":1,"b":2}"#].map(|body| move || with_body(body));
    let only_a = || layer().0.fingerprint_json_except(["/a"]).fingerprint_json_only(["/a"]);
    assert_same(&only_a(), a, b).await;
    assert_conflict(&only_a().fingerprint_json_except(["/a"]), a, b).await;
    assert_conflict(&only_a().fingerprint_json_only(["/b"]), a, b).await;
}

#[tokio::test]
async fn another_choice_of_parts_never_replays_what_was_recorded_under_the_first() {
    // The clones share their state, as the old and the new version of a service share a store.
    let (layer, _) = layer();
    let body = || with_body(r#"{"a":1}"#);
    let stack = Stack::numbered(&layer.clone().fingerprint_json_only(["/a"]));
    stack.send(body()).await;
    for other in [
        layer.clone(),
        layer.clone().fingerprint_json_only(["/b"]),
        layer.clone().fingerprint_json_only(["/a", "/b"]),
        layer.clone().fingerprint_json_except(["/a"]),
    ] {
        let other = Stack::numbered(&other);
        other.send(body()).await.assert_refused(409, "idempotency_conflict");
    }
    assert!(stack.send(body()).await.is_replay());
}

#[tokio::test]
async fn request_trailers_count() {
    let with = |trailer: Option<(&'static str, &'static str)>, body: &'static str| {
        move || {
            let trailer = trailer.map(|(name, value)| Step::trailer(name, value));
            let script = Script::new([Step::data(body)].into_iter().chain(trailer));
            keyed("k", "").map(|_| any(script))
        }
    };
    for body in [r#"{"a":1}"#, "{"] {
        let first = || with(Some(("x-sum", "1")), body);
        assert_same(&layer().0, first(), first()).await;
        assert_conflict(&layer().0, first(), with(Some(("x-sum", "2")), body)).await;
        assert_conflict(&layer().0, first(), with(Some(("x-other", "1")), body)).await;
        assert_conflict(&layer().0, first(), with(None, body)).await;
        assert_conflict(&layer().0, with(None, body), first()).await;
    }
}

#[tokio::test]
async fn another_request_is_a_conflict_at_once_while_the_first_is_running() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let stack = Stack::waiting_at(&gate, usize::MAX, &layer);
    let first = stack.spawn(changed(|_| {}));
    gate.reached_by(1).await;
    stack.send(with_body("{}")).await.assert_refused(409, "idempotency_conflict");
    stack.send(with_uri("/v1/other")).await.assert_refused(409, "idempotency_conflict");
    assert!(!first.is_finished());
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert!(stack.send(changed(|_| {})).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_key_whose_record_has_ended_may_be_used_for_another_request() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer.retention(Duration::from_secs(60)));
    stack.send(with_body("[1]")).await;
    tokio::time::advance(Duration::from_secs(59)).await;
    stack.send(with_body("[2]")).await.assert_refused(409, "idempotency_conflict");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(stack.send(with_body("[2]")).await.text(), "run 2");
    stack.send(with_body("[1]")).await.assert_refused(409, "idempotency_conflict");
}

#[tokio::test]
async fn under_nested_routers_the_original_path_counts() {
    let runs = Runs::default();
    let tickets = |layer: IdempotencyLayer| {
        let runs = runs.clone();
        Router::new()
            .route(
                "/{id}",
                any_method(move |OriginalUri(uri): OriginalUri| async move {
                    format!("run {} of {uri}", runs.run())
                }),
            )
            .layer(layer)
    };
    let (layer, _) = layer();
    // The layer sees `/1` three times.
    let router = Router::new()
        .nest("/tickets", tickets(layer.clone()))
        .nest("/v2/tickets", tickets(layer.clone()))
        .nest_service("/orders", tickets(layer.clone()));
    let ask = |method: Method, uri: &'static str| {
        let mut request = keyed("k", "{}").map(::axum::body::Body::new);
        *request.method_mut() = method;
        *request.uri_mut() = Uri::from_static(uri);
        request
    };
    let first = send(&router, ask(Method::POST, "/tickets/1?x=1")).await;
    assert_eq!(first.text(), "run 1 of /tickets/1?x=1");
    for (method, uri) in [
        (Method::POST, "/tickets/2?x=1"),
        (Method::POST, "/v2/tickets/1?x=1"),
        (Method::POST, "/orders/1?x=1"),
        (Method::POST, "/tickets/1?x=2"),
        (Method::PATCH, "/tickets/1?x=1"),
    ] {
        let refused = send(&router, ask(method, uri)).await;
        refused.assert_refused(409, "idempotency_conflict");
    }
    assert!(send(&router, ask(Method::POST, "/tickets/1?x=1")).await.is_replay());
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_request_inside_another_is_known_by_its_own_path_too() {
    // A batch handler copies the extensions of its request, the original path among them.
    let runs = Runs::default();
    let (layer, _) = layer();
    let parts = Router::new()
        .route(
            "/{id}",
            any_method({
                let runs = runs.clone();
                move |uri: Uri| async move { format!("run {} of {uri}", runs.run()) }
            }),
        )
        .layer(layer.clone());
    let batch = Router::new().route(
        "/batch",
        any_method(move |request: ::axum::extract::Request| async move {
            let (outer, _) = request.into_parts();
            let mut answers = Vec::new();
            for (key, uri) in [("k-1", "/1"), ("k-1", "/2"), ("k-1", "/1")] {
                let mut part = unkeyed("{}").map(::axum::body::Body::new);
                *part.uri_mut() = Uri::from_static(uri);
                *part.extensions_mut() = outer.extensions.clone();
                part.headers_mut().insert("idempotency-key", key.parse().unwrap());
                let answer = parts.clone().oneshot(part).await.unwrap();
                answers.push(format!("{uri}: {}", answer.status().as_u16()));
            }
            answers.join(", ")
        })
        .layer(layer),
    );
    let mut request = keyed("k", "{}").map(::axum::body::Body::new);
    *request.uri_mut() = Uri::from_static("/batch");
    assert_eq!(send(&batch, request).await.text(), "/1: 200, /2: 409, /1: 200");
    assert_eq!(runs.count(), 1);
}
