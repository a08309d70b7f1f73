//! Functions of one's own do what they say; one that panics breaks no more than its own request, and
//! leaves nothing behind.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Version};
use http_body::Body;
use serde_json::json;
use tower_idempotency::{
    Ceiling, Detached, Disposition, Fingerprint, Handle, IdempotencyKey, IdempotencyLayer,
    InvalidKey, MemoryStore, OnFailure, Outcome, Permit, Reason, Refusal, Scope, StoredResponse,
    error_object, problem_json, scope,
};

use crate::support::{
    Answer, Gate, Runs,
    call::Call,
    interposed::Interposed,
    keyed,
    stack::{AnyBody, Inner, Script, Stack, Step, any, layer, text, with_extension, with_header},
    unkeyed, within,
};

/// A request for this path and query, with this key in the usual header.
fn to(uri: &str, key: Option<&str>) -> Request<AnyBody> {
    let mut request = unkeyed("{}").map(any);
    *request.uri_mut() = uri.parse().unwrap();
    if let Some(key) = key {
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    }
    request
}

/// Sends a request whose hook panics; the panic is the caller's.
async fn panics(stack: &Stack, request: Request<AnyBody>) {
    let stack = stack.clone();
    let sent = tokio::spawn(async move { stack.send(request).await });
    assert!(within(sent).await.unwrap_err().is_panic());
}

/// A layer with room for one body, one entry and one piece of work: whatever is left behind of any
/// of them, nothing else can be done.
struct Narrow {
    layer: IdempotencyLayer,
    store: MemoryStore<StoredResponse>,
    ceiling: Ceiling,
}

/// As long as a body may be, and all bodies together.
const BODY: &str = "0123456789";

impl Narrow {
    fn new() -> Self {
        let (store, ceiling) = (MemoryStore::new().capacity(1), Ceiling::new(1));
        let layer = IdempotencyLayer::new(scope::single_tenant())
            .store(store.clone())
            .ceiling(&ceiling)
            .request_limit(BODY.len())
            .buffered_bytes(BODY.len());
        Self { layer, store, ceiling }
    }

    /// Asserts that nothing is left, and that another request runs.
    async fn assert_empty(&self) {
        assert_eq!(within(self.layer.drain(Duration::from_secs(30))).await, 0);
        assert_eq!((self.store.len(), self.store.in_flight(), self.ceiling.active()), (0, 0, 0));
        // One without hooks, over the same store, ceiling and buffer.
        let plain = self.layer.clone();
        let stack = Stack::numbered(&plain);
        assert_eq!(stack.send(keyed("plain", BODY)).await.text(), "run 1");
        assert!(stack.send(keyed("plain", BODY)).await.is_replay());
        self.store.clear();
    }
}

// The key.

/// Reads the key from the query.
fn from_query(parts: &http::request::Parts) -> Result<Option<IdempotencyKey>, InvalidKey> {
    parts.uri.query().map(IdempotencyKey::new).transpose()
}

#[tokio::test]
async fn a_key_may_come_from_anywhere_and_then_the_header_says_nothing() {
    let (layer, store) = layer();
    let stack = Stack::new(&layer.clone().key(from_query), |run, request: Inner| async move {
        let key = request.extensions().get::<IdempotencyKey>();
        Ok(text(200, format!("run {run}, {:?}", key.map(IdempotencyKey::as_str))))
    });
    assert_eq!(stack.send(to("/a?one", Some("x"))).await.text(), "run 1, Some(\"one\")");
    assert!(stack.send(to("/a?one", Some("not a key"))).await.is_replay());
    assert_eq!(stack.send(to("/a?two", Some("x"))).await.text(), "run 2, Some(\"two\")");
    assert_eq!(stack.send(to("/a", Some("x"))).await.text(), "run 3, None", "no key, no promise");
    assert_eq!(store.len(), 2);
    let required = Stack::numbered(&layer.key(from_query).key_required(true));
    required.send(to("/a", Some("x"))).await.assert_refused(400, "idempotency_key_missing");
}

#[tokio::test]
async fn the_last_word_says_where_the_key_is() {
    let name = HeaderName::from_static("x-token");
    let of = |layer: &IdempotencyLayer| {
        let stack = Stack::numbered(layer);
        async move {
            let mut request = to("/a?one", Some("usual"));
            request.headers_mut().insert("x-token", "token".parse().unwrap());
            stack.send(request).await;
            let mut found = Vec::new();
            for name in ["idempotency-key", "x-token", "query"] {
                let mut request = to("/a?one", Some("usual"));
                request.headers_mut().insert("x-token", "token".parse().unwrap());
                match name {
                    "query" => *request.uri_mut() = "/a?another".parse().unwrap(),
                    _ => drop(request.headers_mut().insert(name, "another".parse().unwrap())),
                }
                // Another key is new work; another query under the same key is a conflict.
                if stack.send(request).await.status == 200 && stack.runs.count() > 1 + found.len() {
                    found.push(name);
                }
            }
            found
        }
    };
    let layer = || layer().0;
    assert_eq!(of(&layer()).await, ["idempotency-key"]);
    assert_eq!(of(&layer().key(from_query)).await, ["query"]);
    assert_eq!(of(&layer().key(from_query).key_header(name.clone())).await, ["x-token"]);
    assert_eq!(of(&layer().key_header(name).key(from_query)).await, ["query"]);
}

#[tokio::test]
async fn a_key_that_a_hook_calls_invalid_is_refused_with_its_reason() {
    const REASON: &str = "say \"please\",\nor \\";
    let stack = Stack::numbered(&layer().0.key(|_| Err(InvalidKey::new(REASON))));
    let answer = stack.send(to("/a", Some("k"))).await;
    answer.assert_refused(400, "idempotency_key_invalid");
    assert_eq!(answer.json()["detail"], "say \"please\", or \\");
    let stack = Stack::numbered(&layer().0.key(from_query));
    let long = format!("/a?{}", "x".repeat(256));
    stack.send(to(&long, None)).await.assert_refused(400, "idempotency_key_invalid");
    assert_eq!(stack.runs.count(), 0);
}

// Which requests are guarded.

#[tokio::test]
async fn only_what_is_asked_for_is_guarded_and_the_rest_passes_untouched_even_with_a_key() {
    let (layer, store) = layer();
    let ceiling = Ceiling::new(1);
    let layer = layer
        .only(|parts| parts.uri.path() == "/guarded")
        .request_limit(1)
        .key_required(true)
        .ceiling(&ceiling);
    let stack = Stack::new(&layer, |run, request: Inner| async move {
        assert!(request.extensions().is_empty());
        Ok(text(200, format!("run {run}")))
    });
    let place = ceiling.try_acquire();
    let body = Script::new([Step::Forever(|| Step::data("x"))]);
    let polls = body.polls();
    let requests = [
        to("/other", Some("k")),
        to("/other", Some("k")),
        to("/other", None),
        to("/other", Some("not a key")),
        to("/other", Some("k")).map(|_| any(body)),
    ];
    for (run, request) in (1..).zip(requests) {
        assert_eq!(stack.send(request).await.text(), format!("run {run}"));
    }
    drop(place);
    assert_eq!(polls.count(), 0);
    assert!(store.is_empty());
    assert_eq!(layer.dispositions().get(Disposition::Passed), 5);
    stack.send(to("/guarded", None)).await.assert_refused(400, "idempotency_key_missing");
    stack.send(to("/guarded", Some("k"))).await.assert_refused(413, "idempotency_body_too_large");
    assert_eq!(stack.runs.count(), 5);
}

#[tokio::test]
async fn a_method_that_is_not_guarded_is_not_made_so() {
    let stack = Stack::numbered(&layer().0.only(|_| true));
    for run in 1..=2 {
        let mut request = to("/a", Some("k"));
        *request.method_mut() = http::Method::PUT;
        assert_eq!(stack.send(request).await.text(), format!("run {run}"));
    }
}

// What a request asks for.

#[tokio::test]
async fn a_fingerprint_of_ones_own_counts_besides_method_and_path_and_sees_the_whole_body() {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let (layer, _) = layer();
    let layer = layer.fingerprint_headers([HeaderName::from_static("x-session")]).fingerprint({
        let seen = Arc::clone(&seen);
        move |parts, body| {
            let text = String::from_utf8(body.to_vec()).unwrap();
            seen.lock().unwrap().push(format!("{} {text}", parts.uri));
            let kind = parts.headers.get("x-kind").map_or(&b""[..], HeaderValue::as_bytes);
            Fingerprint::of([kind, &body[..1]])
        }
    });
    let stack = Stack::numbered(&layer);
    let with = |uri: &str, body: [&'static str; 2]| {
        let steps = body.map(Step::data).into_iter().chain([Step::trailer("x-sum", "1")]);
        to(uri, Some("k")).map(|_| any(Script::new(steps)))
    };
    assert_eq!(stack.send(with("/a?1", ["{", "}"])).await.text(), "run 1");
    // Without trailers, which count no more than the rest.
    let mut same = to("/a?1", Some("k")).map(|_| any("{1234".to_owned()));
    for name in ["x-session", "content-encoding", "content-type"] {
        same.headers_mut().insert(name, "other".parse().unwrap());
    }
    assert!(stack.send(same).await.is_replay(), "it says that this is the same");
    let mut patch = with("/a?1", ["{", "}"]);
    *patch.method_mut() = http::Method::PATCH;
    let mut kind = with("/a?1", ["{", "}"]);
    kind.headers_mut().insert("x-kind", "other".parse().unwrap());
    let others = [
        with("/a?1", ["[", "]"]),
        kind,
        // These always count, whatever it says.
        with("/b?1", ["{", "}"]),
        with("/a?2", ["{", "}"]),
        patch,
    ];
    for other in others {
        stack.send(other).await.assert_refused(409, "idempotency_conflict");
    }
    let right = ["/a?1 {}", "/a?1 {1234", "/a?1 []", "/a?1 {}", "/b?1 {}", "/a?2 {}", "/a?1 {}"];
    assert_eq!(*seen.lock().unwrap(), right);
}

// What an answer means.

#[tokio::test]
async fn a_policy_says_by_the_head_what_an_answer_means_and_else_the_default_holds() {
    let policy = |parts: &http::response::Parts| match parts.headers.get("x-means")?.to_str() {
        Ok("final") => Some(Outcome::Final),
        Ok("not-executed") => Some(Outcome::NotExecuted),
        Ok("unknown") => Some(Outcome::Unknown),
        _ => panic!("a policy with a bug"),
    };
    // What it says, what the handler says, whether effects have begun; and what is left.
    for (status, means, said, effects, left) in [
        (404, Some("final"), None, false, Some("replay")),
        (500, Some("final"), None, true, Some("replay")),
        (200, Some("not-executed"), None, false, None),
        (200, Some("not-executed"), None, true, Some("held")),
        (200, Some("unknown"), None, false, Some("held")),
        (200, None, None, false, Some("replay")),
        (404, None, None, false, None),
        (404, None, None, true, Some("held")),
        // One that panics says nothing.
        (200, Some("bug"), None, false, Some("replay")),
        (404, Some("bug"), None, false, None),
        // The handler's word goes before.
        (404, Some("final"), Some(Outcome::NotExecuted), true, None),
        (404, Some("not-executed"), Some(Outcome::Final), false, Some("replay")),
    ] {
        for is_stream in [false, true] {
            let (layer, store) = layer();
            let stack =
                Stack::new(&layer.outcome_of(policy), move |_, request: Inner| async move {
                    if effects {
                        request.extensions().get::<Handle>().unwrap().effects_begin();
                    }
                    let mut response = text(status, "answer");
                    if is_stream {
                        response = response.map(|_| any(Script::unknown_length("answer")));
                    }
                    if let Some(means) = means {
                        response = with_header(response, "x-means", means);
                    }
                    Ok(match said {
                        Some(said) => with_extension(response, said),
                        None => response,
                    })
                });
            assert_eq!(stack.send(keyed("k", "{}")).await.text(), "answer");
            assert_eq!((store.len(), store.in_flight()), (usize::from(left.is_some()), 0));
            let again = stack.send(keyed("k", "{}")).await;
            match left {
                Some("replay") => assert!(again.is_replay(), "{status} {means:?}"),
                Some(_) => again.assert_refused(409, "idempotency_outcome_unknown"),
                None => assert_eq!(stack.runs.count(), 2, "{status} {means:?}"),
            }
        }
    }
}

// What of it is kept.

#[tokio::test]
async fn a_header_policy_says_by_status_and_name_which_are_kept_but_never_touches_framing() {
    let policy = |status: StatusCode, name: &HeaderName| match name.as_str() {
        "set-cookie"
        | "content-length"
        | "connection"
        | "transfer-encoding"
        | "x-hop"
        | "idempotent-replayed" => Some(true),
        "retry-after" => Some(status == 402),
        "etag" => Some(false),
        "x-bug" | "date" => panic!("a policy with a bug"),
        _ => None,
    };
    for is_stream in [false, true] {
        let stack =
            Stack::new(&layer().0.keep_header(policy), move |_, request: Inner| async move {
                let status = if request.uri().path() == "/402" { 402 } else { 200 };
                let body = if is_stream {
                    any(Script::unknown_length("one"))
                } else {
                    any("one".to_owned())
                };
                let response = text(status, "").map(|_| body);
                Ok([
                    ("set-cookie", "a=b"),
                    ("retry-after", "5"),
                    ("etag", "\"1\""),
                    ("x-bug", "1"),
                    ("date", "Mon, 01 Jan 2024 00:00:00 GMT"),
                    ("x-kept", "1"),
                    ("server", "s"),
                    ("connection", "x-hop"),
                    ("x-hop", "1"),
                    ("idempotent-replayed", "true"),
                ]
                .into_iter()
                .fold(response, |response, (name, value)| with_header(response, name, value)))
            });
        for (path, with_retry_after) in [("/200", false), ("/402", true)] {
            let first = stack.send(to(path, Some(&path[1..]))).await;
            assert_eq!(first.header("etag"), Some("\"1\""), "the first answer is as it was");
            let again = stack.send(to(path, Some(&path[1..]))).await;
            let mut names: Vec<_> = again.headers.keys().map(HeaderName::as_str).collect();
            names.sort_unstable();
            let mut right = vec!["idempotent-replayed", "set-cookie", "x-bug", "x-kept"];
            right.extend(with_retry_after.then_some("retry-after"));
            right.sort_unstable();
            assert_eq!(names, right, "a policy that panics says nothing");
            assert_eq!(again.text(), "one");
        }
    }
}

#[tokio::test]
async fn a_tombstone_keeps_the_location_unless_the_header_policy_drops_it() {
    for (said, kept) in [(None, Some("/v1/runs/1")), (Some(false), None)] {
        let policy = move |_, name: &HeaderName| said.filter(|_| name == "location");
        let layer = layer().0.response_limit(3).keep_header(policy);
        let stack = Stack::new(&layer, |_, _: Inner| async {
            Ok(with_header(text(202, "too long"), "location", "/v1/runs/1"))
        });
        let first = stack.send(keyed("k", "{}")).await;
        assert_eq!((first.text(), first.header("location")), ("too long", Some("/v1/runs/1")));
        let again = stack.send(keyed("k", "{}")).await;
        again.assert_refused(409, "idempotency_not_replayable");
        assert_eq!(again.header("location"), kept);
    }
}

// What a replay looks like.

#[tokio::test]
async fn a_replay_hook_rewrites_the_head_of_each_replay_and_of_nothing_else() {
    let replays = Runs::default();
    let gate = Gate::default();
    let (layer, store) = layer();
    let layer = layer.on_replay({
        let replays = replays.clone();
        move |request, response| {
            let status = format!("replay {} of {}", replays.run(), request.uri);
            response.status = StatusCode::OK;
            response.headers.insert("x-status", status.parse().unwrap());
            response.headers.remove("location");
        }
    });
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |_, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(with_header(text(202, "accepted"), "location", "/v1/runs/1"))
            }
        }
    });
    let first = stack.spawn(to("/a", Some("k")));
    gate.reached_by(1).await;
    let waiter = stack.spawn(to("/a", Some("k")));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status.as_u16(), first.header("x-status")), (202, None));
    let mut answers = vec![waiter.await.unwrap()];
    answers.push(stack.send(to("/a", Some("k"))).await);
    answers.push(stack.send(to("/a", Some("k"))).await);
    for (number, answer) in (1..).zip(answers) {
        let status = format!("replay {number} of /a");
        assert_eq!((answer.status.as_u16(), answer.header("x-status")), (200, Some(&*status)));
        assert_eq!((answer.text(), answer.header("location")), ("accepted", None));
        assert!(answer.is_replay());
    }
    stack.send(to("/b", Some("k"))).await.assert_refused(409, "idempotency_conflict");
    stack.send(to("/b", Some("other"))).await;
    assert_eq!((replays.count(), stack.runs.count()), (3, 2));
    // The record is as it was.
    let plain = Stack::numbered(&self::layer().0.store(store)).send(to("/a", Some("k"))).await;
    assert_eq!((plain.status.as_u16(), plain.header("location")), (202, Some("/v1/runs/1")));
}

#[tokio::test]
async fn a_replay_hook_that_panics_has_rewritten_nothing() {
    let (layer, _) = layer();
    let layer = layer.on_replay(|_, response| {
        response.status = StatusCode::IM_A_TEAPOT;
        response.version = Version::HTTP_3;
        response.headers.clear();
        response.extensions.insert("half done");
        panic!("a hook with a bug");
    });
    let stack = Stack::new(&layer, |_, _| async {
        Ok(with_header(text(201, "created"), "location", "/v1/runs/1"))
    });
    stack.send(keyed("k", "{}")).await;
    for _ in 0..2 {
        let response = stack.call(keyed("k", "{}")).await.unwrap();
        assert_eq!(response.version(), Version::HTTP_11);
        assert_eq!(response.extensions().get::<&str>(), None);
        let answer = Answer::read(response).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (201, "created"));
        assert_eq!(answer.header("location"), Some("/v1/runs/1"));
        assert!(answer.is_replay());
    }
    assert_eq!(layer.dispositions().get(Disposition::Replayed), 2);
}

// What a refusal looks like.

/// A refusal for each reason, and what leads to it.
async fn refused(layer: IdempotencyLayer, reason: Reason) -> (Answer, Refusal) {
    let first = |status: u16| move |_, _: Inner| async move { Ok(text(status, "twelve bytes")) };
    let body = |steps: Vec<Step>| keyed("k", "").map(|_| any(Script::new(steps)));
    let mut before = None;
    let mut request = keyed("k", "{}").map(any);
    let (layer, status): (IdempotencyLayer, u16) = match reason {
        Reason::KeyMissing => {
            request = unkeyed("{}").map(any);
            (layer.key_required(true), 200)
        }
        Reason::KeyInvalid => (layer.key(|_| Err(InvalidKey::new("no"))), 200),
        Reason::NoScope => {
            request = keyed("k", "{}").map(any);
            request.headers_mut().insert("x-nobody", "1".parse().unwrap());
            (layer, 200)
        }
        Reason::TooLarge => (layer.request_limit(1), 200),
        Reason::Unreadable => {
            request = body(vec![Step::Break]);
            (layer, 200)
        }
        Reason::TooSlow => {
            request = body(vec![Step::Pass(Gate::default())]);
            (layer.body_idle_timeout(Duration::from_millis(1)), 200)
        }
        Reason::Conflict => {
            before = Some(keyed("k", "[]"));
            (layer, 200)
        }
        Reason::NotReplayable => {
            before = Some(keyed("k", "{}"));
            (layer.response_limit(1), 200)
        }
        Reason::OutcomeUnknown => {
            before = Some(keyed("k", "{}"));
            (layer.on_failure(OnFailure::Hold), 500)
        }
        Reason::Ceiling => (layer.guard(|_| None), 200),
        Reason::Capacity => {
            before = Some(keyed("other", "{}"));
            (layer.store(MemoryStore::new().capacity(1)), 200)
        }
        other => panic!("{other:?} is not made here"),
    };
    let stack = Stack::new(&layer, first(status));
    if let Some(before) = before {
        stack.send(before).await;
    }
    let response = stack.call(request).await.unwrap();
    let refusal = response.extensions().get::<Refusal>().expect("it is attached").clone();
    assert_eq!(refusal.reason(), reason);
    (Answer::read(response).await, refusal)
}

const REASONS: [Reason; 11] = [
    Reason::KeyMissing,
    Reason::KeyInvalid,
    Reason::NoScope,
    Reason::TooLarge,
    Reason::Unreadable,
    Reason::TooSlow,
    Reason::Conflict,
    Reason::NotReplayable,
    Reason::OutcomeUnknown,
    Reason::Ceiling,
    Reason::Capacity,
];

fn for_refusals() -> IdempotencyLayer {
    IdempotencyLayer::new(|parts| {
        (!parts.headers.contains_key("x-nobody")).then(|| Scope::new("tenant"))
    })
}

#[tokio::test]
async fn a_refusal_may_look_as_the_clients_of_stripe_and_openai_expect_it() {
    for reason in REASONS {
        let (problem, _) = refused(for_refusals(), reason).await;
        let (answer, refusal) = refused(for_refusals().refusals(error_object), reason).await;
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let right = json!({"error": {
            "type": "idempotency_error",
            "code": refusal.code(),
            "message": refusal.detail(),
            "param": null,
        }});
        assert_eq!(answer.json(), right);
        // All but the body is as it is by default.
        let mut headers = problem.headers.clone();
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        assert_eq!((answer.status, &answer.headers), (problem.status, &headers), "{reason:?}");
    }
}

#[tokio::test]
async fn a_renderer_of_ones_own_says_all_of_what_a_refusal_looks_like() {
    for reason in REASONS {
        let layer = for_refusals().refusals(|refusal| {
            let mut response = refusal.response("text/plain", refusal.to_string());
            response.headers_mut().insert("x-retry", refusal.retry().name().parse().unwrap());
            response.extensions_mut().insert("mine");
            response
        });
        let (answer, refusal) = refused(layer, reason).await;
        assert_eq!(answer.status, refusal.status());
        assert_eq!(answer.header("content-type"), Some("text/plain"));
        assert_eq!(answer.text(), format!("{} {}", answer.status.as_u16(), refusal.code()));
        assert_eq!(answer.header("x-retry"), Some(refusal.retry().name()));
        assert_eq!(answer.header("cache-control"), Some("no-store"));
    }
    // Nothing of it is asked of: it may even start from nothing.
    let layer = layer().0.key_required(true).refusals(|_| Response::new(Bytes::from("no")));
    let response = Stack::numbered(&layer).call(unkeyed("{}")).await.unwrap();
    assert!(response.extensions().get::<Refusal>().is_some());
    assert_eq!(response.body().size_hint().exact(), Some(2));
    let answer = Answer::read(response).await;
    assert_eq!((answer.status.as_u16(), answer.headers.len(), answer.text()), (200, 0, "no"));
}

#[tokio::test]
async fn a_renderer_that_panics_does_not_turn_a_refusal_into_a_broken_connection() {
    for reason in REASONS {
        let bug = |_: &Refusal| -> Response<Bytes> { panic!("a renderer with a bug") };
        let layer = for_refusals()
            .refusals(bug)
            .refusal_status(reason, StatusCode::IM_A_TEAPOT)
            .documentation("https://api.example/idempotency");
        let (answer, refusal) = refused(layer, reason).await;
        answer.assert_refused(418, refusal.code());
        assert_eq!(answer.body, problem_json(&refusal).into_body());
        assert_eq!(answer.headers, *problem_json(&refusal).headers());
    }
}

#[tokio::test]
async fn each_reason_may_have_another_status_and_the_last_word_counts() {
    for reason in REASONS {
        let (by_default, refusal) = refused(for_refusals(), reason).await;
        let layer = for_refusals()
            .refusal_status(reason, StatusCode::GONE)
            .refusal_status(reason, StatusCode::IM_A_TEAPOT);
        // Those of all other reasons stay as they are.
        let layer =
            REASONS.into_iter().filter(|other| *other != reason).fold(layer, |layer, other| {
                layer.refusal_status(other, StatusCode::INSUFFICIENT_STORAGE)
            });
        let (answer, changed) = refused(layer, reason).await;
        answer.assert_refused(418, refusal.code());
        assert_eq!(answer.json()["status"], 418);
        assert_eq!((changed.status(), changed.detail()), (answer.status, refusal.detail()));
        assert_eq!(answer.headers, by_default.headers);
    }
}

#[tokio::test]
async fn every_refusal_and_nothing_else_links_to_the_documentation_where_there_is_some() {
    const URI: &str = "https://api.example/docs?about=keys";
    for reason in REASONS {
        for layer in [for_refusals(), for_refusals().refusals(error_object)] {
            let (answer, _) = refused(layer.clone(), reason).await;
            assert_eq!(answer.header("link"), None);
            let (answer, _) = refused(layer.documentation(URI), reason).await;
            let link = format!("<{URI}>; rel=\"describedby\"");
            assert_eq!(answer.header("link"), Some(&*link), "{reason:?}");
        }
    }
    let stack = Stack::numbered(&layer().0.documentation(URI));
    for _ in 0..2 {
        assert_eq!(stack.send(keyed("k", "{}")).await.header("link"), None);
    }
}

// What goes on without its caller.

tokio::task_local! {
    static SPAN: &'static str;
}

#[tokio::test]
async fn work_that_goes_on_without_its_caller_is_wrapped_and_other_work_is_not() {
    let wrapped = Runs::default();
    let gate = Gate::default();
    let (layer, _) = layer();
    let layer = layer.detach_with({
        let wrapped = wrapped.clone();
        move |work: Detached| {
            wrapped.run();
            Box::pin(SPAN.scope("detached", work))
        }
    });
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |_, request: Inner| {
            let gate = gate.clone();
            async move {
                if request.uri().path() == "/waits" {
                    gate.pass().await;
                }
                Ok(text(200, SPAN.try_with(|span| *span).unwrap_or("with its caller")))
            }
        }
    });
    assert_eq!(stack.send(to("/a", Some("a"))).await.text(), "with its caller");
    let caller = stack.spawn(to("/waits", Some("b")));
    gate.reached_by(1).await;
    assert_eq!(wrapped.count(), 0, "nobody has left");
    caller.abort();
    gate.open();
    assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
    assert_eq!(wrapped.count(), 1);
    let again = stack.send(to("/waits", Some("b"))).await;
    assert_eq!((again.text(), again.is_replay()), ("detached", true));
}

/// A wrapper of work that goes on without its caller.
type Wrap = fn(Detached) -> Detached;

#[tokio::test]
async fn work_that_its_wrapper_loses_ends_by_the_failure_rule() {
    const WRAPS: [Wrap; 5] = [
        |_| panic!("a wrapper with a bug"),
        |work| {
            drop(work);
            Box::pin(async {})
        },
        |_| Box::pin(async { panic!("a wrapper with a bug") }),
        |mut work| {
            Box::pin(async move {
                assert!(Pin::new(&mut work).now_or_never().is_none());
                panic!("a wrapper with a bug, midway")
            })
        },
        |mut work| {
            Box::pin(async move {
                let _begun = Pin::new(&mut work).now_or_never();
            })
        },
    ];
    for (number, wrap) in WRAPS.into_iter().enumerate() {
        for (rule, is_released) in
            [(OnFailure::Release, true), (OnFailure::Hold, false), (OnFailure::Record, false)]
        {
            for is_stream in [false, true] {
                let narrow = Narrow::new();
                let wrapped = narrow.layer.clone().on_failure(rule).detach_with(wrap);
                let gate = Gate::default();
                let stack = Stack::new(&wrapped, {
                    let gate = gate.clone();
                    move |run, _| {
                        let gate = gate.clone();
                        async move {
                            if run == 1 && is_stream {
                                return Ok(Response::new(any(Script::new([Step::Pass(gate)]))));
                            }
                            if run == 1 {
                                gate.pass().await;
                            }
                            Ok(text(200, "done"))
                        }
                    }
                });
                let caller = stack.spawn(keyed("k", BODY));
                gate.reached_by(1).await;
                caller.abort();
                assert!(caller.await.unwrap_err().is_cancelled());
                assert_eq!(within(wrapped.drain(Duration::from_secs(30))).await, 0);
                assert_eq!(narrow.ceiling.active(), 0);
                let again = stack.send(keyed("k", BODY)).await;
                if is_released {
                    assert_eq!((again.text(), again.is_replay()), ("done", false), "{number}");
                } else {
                    again.assert_refused(409, "idempotency_outcome_unknown");
                }
                narrow.store.clear();
                narrow.assert_empty().await;
            }
        }
    }
}

// What panics before the work has begun.

#[tokio::test]
async fn a_hook_that_panics_before_the_work_has_begun_leaves_nothing_behind() {
    /// A hook that panics, by its name.
    type Bug = fn(IdempotencyLayer) -> IdempotencyLayer;
    const BUGS: [(&str, Bug); 5] = [
        ("key", |layer| layer.key(|_| panic!("a hook with a bug"))),
        ("only", |layer| layer.only(|_| panic!("a hook with a bug"))),
        ("fingerprint", |layer| layer.fingerprint(|_, _| panic!("a hook with a bug"))),
        ("guard", |layer| layer.guard(|_| panic!("a hook with a bug"))),
        ("guard, after the claim", |layer| {
            let asked = AtomicUsize::new(0);
            layer.guard(move |_| {
                assert!(
                    asked.fetch_add(1, Ordering::SeqCst).is_multiple_of(2),
                    "a hook with a bug"
                );
                Some(Permit::new(()))
            })
        }),
    ];
    for (name, bug) in BUGS {
        for mode in [tower_idempotency::Mode::Enforce, tower_idempotency::Mode::Shadow] {
            let narrow = Narrow::new();
            let layer = bug(narrow.layer.clone()).mode(mode);
            let stack = Stack::numbered(&layer);
            for _ in 0..3 {
                panics(&stack, keyed("k", BODY).map(any)).await;
                assert_eq!(stack.runs.count(), 0, "{name}");
                narrow.assert_empty().await;
            }
        }
    }
}

#[tokio::test]
async fn a_scope_that_panics_leaves_nothing_behind() {
    let narrow = Narrow::new();
    let layer = IdempotencyLayer::new(|_: &_| panic!("a hook with a bug"))
        .store(narrow.store.clone())
        .ceiling(&narrow.ceiling);
    let stack = Stack::numbered(&layer);
    panics(&stack, keyed("k", BODY).map(any)).await;
    assert_eq!(stack.runs.count(), 0);
    narrow.assert_empty().await;
}

#[tokio::test]
async fn those_who_wait_go_on_when_the_hook_of_one_of_them_panics() {
    let (gate, claims) = (Gate::default(), Runs::default());
    let store = MemoryStore::new();
    // The first claim is written and its answer is still on its way.
    let interposed = Interposed::new(&store).after({
        let (gate, claims) = (gate.clone(), claims.clone());
        move |call| {
            let is_first = call == Call::Claim && claims.run() == 1;
            let gate = gate.clone();
            async move {
                if is_first {
                    gate.pass().await;
                }
                Ok(())
            }
        }
    });
    let layer = layer().0.store(interposed).store_timeout(Duration::from_secs(60)).guard({
        let asked = Runs::default();
        move |_| {
            // The first request asks twice, and panics the second time: it has claimed the key.
            assert_ne!(asked.run(), 2, "a hook with a bug");
            Some(Permit::new(()))
        }
    });
    let stack = Stack::numbered(&layer);
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    let waiters = [0; 3].map(|_| stack.spawn(keyed("k", "{}")));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!((store.in_flight(), stack.runs.count()), (1, 0));
    gate.open();
    assert!(within(first).await.unwrap_err().is_panic());
    for waiter in waiters {
        assert_eq!(within(waiter).await.unwrap().text(), "run 1");
    }
    assert_eq!((store.in_flight(), store.len()), (0, 1));
}
