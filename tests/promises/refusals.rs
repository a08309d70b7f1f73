//! Every answer that the layer gives by itself: what it looks like, which goes first, and that it
//! tells nobody's secrets.

use std::{fmt::Write as _, time::Duration};

use futures_util::{FutureExt, future::BoxFuture};
use http::{HeaderMap, HeaderValue, Request};
use serde_json::json;
use tower_idempotency::{
    Ceiling, Handle, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, OnFailure,
    PermitSlot, Refusal, Scope, StoredResponse, Token,
};

use crate::support::{
    Answer, Gate,
    call::Call,
    cue::{Cue, CueStore},
    keyed,
    stack::{AnyBody, Script, Stack, Step, any, layer, text, with_header},
    unkeyed,
};

/// A refusal as a caller, and as an outer layer, sees it.
struct Refused {
    answer: Answer,
    refusal: Refusal,
}

async fn refused(stack: &Stack, request: Request<AnyBody>) -> Refused {
    let response = stack.call(request).await.unwrap();
    let refusal = response.extensions().get::<Refusal>().cloned().expect("it is attached");
    Refused { answer: Answer::read(response).await, refusal }
}

/// One row of the table: its code, and what leads to it.
type Row = (&'static str, fn() -> BoxFuture<'static, Refused>);

const KEY: &str = "secret-key";
const BODY: &str = r#"{"a":"secret-body"}"#;

fn request() -> Request<AnyBody> {
    with_credential(keyed(KEY, BODY).map(any))
}

fn with_credential(mut request: Request<AnyBody>) -> Request<AnyBody> {
    request.headers_mut().insert("authorization", "Bearer secret-credential".parse().unwrap());
    request
}

fn with_body(body: Script) -> Request<AnyBody> {
    request().map(|_| any(body))
}

fn scoped() -> IdempotencyLayer {
    IdempotencyLayer::new(|_: &_| Some(Scope::new("secret-scope")))
}

async fn in_flight(layer: IdempotencyLayer, repeat: Request<AnyBody>) -> Refused {
    let gate = Gate::default();
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |_, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(text(200, "secret-answer"))
            }
        }
    });
    let first = stack.spawn(request());
    gate.reached_by(1).await;
    let refused = refused(&stack, repeat).await;
    gate.open();
    first.await.unwrap();
    refused
}

const ROWS: [Row; 16] = [
    ("idempotency_key_missing", || {
        async {
            let stack = Stack::numbered(&scoped().key_required(true));
            refused(&stack, with_credential(unkeyed(BODY).map(any))).await
        }
        .boxed()
    }),
    ("idempotency_key_invalid", || {
        async {
            let stack = Stack::numbered(&scoped());
            let mut request = request();
            request.headers_mut().insert("idempotency-key", "secret key".parse().unwrap());
            refused(&stack, request).await
        }
        .boxed()
    }),
    ("idempotency_scope_unavailable", || {
        async {
            let layer = IdempotencyLayer::new(|_: &_| None::<Scope>);
            refused(&Stack::numbered(&layer), request()).await
        }
        .boxed()
    }),
    ("idempotency_body_too_large", || {
        async { refused(&Stack::numbered(&scoped().request_limit(4)), request()).await }.boxed()
    }),
    ("idempotency_body_too_large", || {
        async {
            let stack = Stack::numbered(&scoped().request_limit(4));
            refused(&stack, with_body(Script::unknown_length(BODY))).await
        }
        .boxed()
    }),
    ("idempotency_body_unreadable", || {
        async {
            let body = Script::new([Step::data(BODY), Step::Break]);
            refused(&Stack::numbered(&scoped()), with_body(body)).await
        }
        .boxed()
    }),
    ("idempotency_body_too_slow", || {
        async {
            let body = Script::new([Step::data(BODY), Step::Sleep(Duration::from_secs(30))]);
            refused(&Stack::numbered(&scoped()), with_body(body)).await
        }
        .boxed()
    }),
    ("idempotency_conflict", || {
        async {
            let stack = Stack::numbered(&scoped());
            stack.send(request()).await;
            refused(&stack, with_body(Script::unknown_length("{}"))).await
        }
        .boxed()
    }),
    ("idempotency_in_progress", || {
        async { in_flight(scoped().in_flight(InFlight::Reject), request()).await }.boxed()
    }),
    // After the whole wait.
    ("idempotency_in_progress", || async { in_flight(scoped(), request()).await }.boxed()),
    ("idempotency_not_replayable", || {
        async {
            let stack = Stack::new(&scoped().response_limit(4), |_, _| async {
                let answer = with_header(text(200, "secret-answer"), "location", "/v1/runs/1");
                Ok(with_header(answer, "x-answer", "secret-answer"))
            });
            stack.send(request()).await;
            refused(&stack, request()).await
        }
        .boxed()
    }),
    ("idempotency_outcome_unknown", || {
        async {
            let layer = scoped().on_failure(OnFailure::Hold);
            let stack = Stack::new(&layer, |_, _| async { Ok(text(500, "secret-answer")) });
            stack.send(request()).await;
            refused(&stack, request()).await
        }
        .boxed()
    }),
    ("concurrency_limit", || {
        async {
            let ceiling = Ceiling::new(1);
            let _place = ceiling.try_acquire().unwrap();
            refused(&Stack::numbered(&scoped().ceiling(&ceiling)), request()).await
        }
        .boxed()
    }),
    ("concurrency_limit", || {
        async {
            let stack = Stack::numbered(&scoped().guard(|_| None));
            refused(&stack, with_credential(unkeyed(BODY).map(any))).await
        }
        .boxed()
    }),
    ("idempotency_capacity", || {
        async {
            let stack = Stack::numbered(&scoped().store(MemoryStore::new().capacity(1)));
            stack.send(with_credential(keyed("secret-other", BODY).map(any))).await;
            tokio::time::advance(Duration::from_secs(3_570)).await;
            refused(&stack, request()).await
        }
        .boxed()
    }),
    ("idempotency_store_unavailable", || {
        async {
            let store = CueStore::default();
            store.cue(Call::Claim, Cue::Fail);
            refused(&Stack::numbered(&scoped().store(store)), request()).await
        }
        .boxed()
    }),
];

/// The status, the member `retry` and the further headers of each code.
fn expected(code: &str) -> (u16, &'static str, Vec<(&'static str, &'static str)>) {
    match code {
        "idempotency_key_missing" | "idempotency_key_invalid" => (400, "new-key", vec![]),
        "idempotency_scope_unavailable" => (403, "never", vec![]),
        "idempotency_body_too_large" => (413, "never", vec![]),
        "idempotency_body_unreadable" => (400, "same-key", vec![]),
        "idempotency_body_too_slow" => (408, "same-key", vec![]),
        "idempotency_conflict" => (409, "new-key", vec![]),
        "idempotency_in_progress" => (409, "same-key", vec![("retry-after", "1")]),
        "idempotency_not_replayable" => (409, "never", vec![("location", "/v1/runs/1")]),
        "idempotency_outcome_unknown" => (409, "never", vec![]),
        "concurrency_limit" => (429, "same-key", vec![("retry-after", "1")]),
        "idempotency_capacity" => (503, "same-key", vec![("retry-after", "30")]),
        "idempotency_store_unavailable" => (503, "same-key", vec![]),
        _ => unreachable!("{code}"),
    }
}

#[tokio::test(start_paused = true)]
async fn each_refusal_is_a_problem_that_programs_people_and_sdks_understand() {
    for (code, refuse) in ROWS {
        let Refused { answer, refusal } = refuse().await;
        let (status, retry, mut headers) = expected(code);
        // Too slow and broken off are one code, told apart by their status.
        let code = if code.ends_with("too_slow") { "idempotency_body_unreadable" } else { code };
        assert_eq!(answer.status.as_u16(), status, "{code}");
        headers
            .extend([("content-type", "application/problem+json"), ("cache-control", "no-store")]);
        if retry != "same-key" {
            headers.extend([("stripe-should-retry", "false"), ("x-should-retry", "false")]);
        }
        let headers: HeaderMap = headers
            .into_iter()
            .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .collect();
        assert_eq!(answer.headers, headers, "{code}");
        let (title, detail) = (refusal.title(), refusal.detail());
        assert!(!title.is_empty() && !detail.is_empty());
        assert_eq!(
            answer.json(),
            json!({
                "type": format!("urn:problem:tower-idempotency:{code}"),
                "title": title,
                "status": status,
                "detail": detail,
                "code": code,
                "retry": retry,
                "error": { "type": "idempotency_error", "code": code, "message": detail },
            })
        );
        assert_eq!(answer.trailers, None);
        // What an outer layer finds attached says the same.
        assert_eq!(
            (refusal.status().as_u16(), refusal.code(), refusal.retry().name()),
            (status, code, retry)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn no_refusal_tells_a_key_a_credential_a_scope_a_body_or_an_answer() {
    for (code, refuse) in ROWS {
        let Refused { answer, refusal } = refuse().await;
        let told = format!("{:?} {} {refusal:?} {refusal}", answer.headers, answer.text());
        assert!(!told.contains("secret"), "{code}: {told}");
    }
}

#[tokio::test]
async fn nothing_that_can_be_printed_tells_a_secret() {
    let (sender, mut printed) = tokio::sync::mpsc::unbounded_channel();
    let store: MemoryStore<StoredResponse> = MemoryStore::new();
    let layer = scoped().store(store.clone()).ceiling(&Ceiling::new(1));
    let stack = Stack::new(&layer, move |_, request| {
        let extensions = request.extensions();
        let key = extensions.get::<IdempotencyKey>().unwrap();
        let handle = extensions.get::<Handle>().unwrap();
        let id = handle.operation_id();
        assert!(key.as_str().contains("secret"));
        let slot = extensions.get::<PermitSlot>().unwrap();
        let permit = handle.take_permit();
        let body = request.body();
        sender
            .send(format!("{key:?} {handle:?} {id} {id:?} {slot:?} {permit:?} {body:?}"))
            .unwrap();
        async { Ok(text(200, "secret-answer")) }
    });
    let response = stack.call(request()).await.unwrap();
    let mut told = printed.recv().await.unwrap();
    write!(told, "{:?} {layer:?} {store:?}", response.body()).unwrap();
    write!(told, "{:?} {:?}", Scope::new("secret-scope"), Token::mint()).unwrap();
    assert!(!told.contains("secret"), "{told}");
}

#[tokio::test]
async fn where_several_hold_the_first_of_the_table_is_told() {
    let store = CueStore::default();
    store.cue(Call::Lookup, Cue::Fail);
    let ceiling = Ceiling::new(1);
    let place = ceiling.try_acquire().unwrap();
    let layer = IdempotencyLayer::new(|parts: &http::request::Parts| {
        parts.headers.contains_key("x-tenant").then(|| Scope::new("t"))
    })
    .store(store.clone())
    .ceiling(&ceiling)
    .request_limit(10);
    let stack = Stack::numbered(&layer);
    let broken = |declared: u64| {
        let body = Script::new([Step::data("0123456789"), Step::data("x"), Step::Break]);
        keyed("k", "").map(|_| any(body.says(declared)))
    };
    let tenant = |mut request: Request<AnyBody>| {
        request.headers_mut().insert("x-tenant", "t".parse().unwrap());
        request
    };

    let mut malformed = broken(11);
    malformed.headers_mut().insert("idempotency-key", "a b".parse().unwrap());
    stack.send(malformed).await.assert_refused(400, "idempotency_key_invalid");
    stack.send(broken(11)).await.assert_refused(403, "idempotency_scope_unavailable");
    stack.send(tenant(broken(11))).await.assert_refused(413, "idempotency_body_too_large");
    let refused = stack.send(tenant(broken(5))).await;
    refused.assert_refused(503, "idempotency_store_unavailable");
    store.heal();
    stack.send(tenant(broken(5))).await.assert_refused(429, "concurrency_limit");
    drop(place);
    stack.send(tenant(broken(5))).await.assert_refused(413, "idempotency_body_too_large");
    assert_eq!((stack.runs.count(), store.memory.len()), (0, 0));
}

#[tokio::test]
async fn a_conflict_goes_before_every_other_409_and_before_a_full_store() {
    let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(2);
    let layer = scoped().store(store.clone()).on_failure(OnFailure::Hold).response_limit(4);
    let stack = Stack::new(&layer, |run, _| async move {
        Ok(if run == 1 { text(500, "") } else { text(200, "five!") })
    });
    for (key, code) in
        [("held", "idempotency_outcome_unknown"), ("tombstone", "idempotency_not_replayable")]
    {
        stack.send(keyed(key, "{}")).await;
        stack.send(keyed(key, "[]")).await.assert_refused(409, "idempotency_conflict");
        stack.send(keyed(key, "{}")).await.assert_refused(409, code);
    }
    // The store is full now; what is known is still told.
    stack.send(keyed("held", "[]")).await.assert_refused(409, "idempotency_conflict");
    stack.send(keyed("new", "{}")).await.assert_refused(503, "idempotency_capacity");
    let other = in_flight(scoped().in_flight(InFlight::Reject), keyed(KEY, "[]").map(any)).await;
    other.answer.assert_refused(409, "idempotency_conflict");
}

#[tokio::test]
async fn a_full_ceiling_goes_before_a_full_store() {
    let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(1);
    let ceiling = Ceiling::new(1);
    let stack = Stack::numbered(&layer().0.store(store).ceiling(&ceiling));
    stack.send(keyed("k", "{}")).await;
    stack.send(keyed("new", "{}")).await.assert_refused(503, "idempotency_capacity");
    let _place = ceiling.try_acquire().unwrap();
    stack.send(keyed("new", "{}")).await.assert_refused(429, "concurrency_limit");
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}
