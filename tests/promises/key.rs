//! Which requests are guarded, and what counts as their key.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use tower_idempotency::{IdempotencyKey, IdempotencyLayer, MemoryStore, Scope, StoredResponse};

use crate::support::{
    keyed,
    stack::{AnyBody, Script, Stack, Step, any, layer, text},
    unkeyed,
};

/// A `POST` whose key header has these lines, byte for byte.
fn with_lines(lines: &[&[u8]]) -> Request<AnyBody> {
    let mut request = unkeyed("{}").map(any);
    for line in lines {
        let line = HeaderValue::from_bytes(line).unwrap();
        request.headers_mut().append("idempotency-key", line);
    }
    request
}

fn with_method(method: Method, key: Option<&str>) -> Request<AnyBody> {
    let mut request = unkeyed("{}").map(any);
    *request.method_mut() = method;
    if let Some(key) = key {
        request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    }
    request
}

/// Answers with the key that the handler sees.
fn echoing(layer: &IdempotencyLayer) -> Stack {
    Stack::new(layer, |_, request| async move {
        let key = request.extensions().get::<IdempotencyKey>();
        Ok(text(200, key.map_or("none", IdempotencyKey::as_str).to_owned()))
    })
}

#[tokio::test]
async fn a_key_is_the_same_however_it_is_spelled() {
    let (layer, store) = layer();
    let stack = echoing(&layer);
    for (index, line) in [
        &b"abc"[..],
        b"\"abc\"",
        b" abc",
        b"abc\t ",
        b"\t\"abc\" ",
        b"\"abc\";a=1",
        b"\"abc\"; b=\"x\";c",
    ]
    .into_iter()
    .enumerate()
    {
        let answer = stack.send(with_lines(&[line])).await;
        assert_eq!((answer.text(), answer.is_replay()), ("abc", index > 0), "{line:?}");
    }
    // Escapes are decoded; what a bare key cannot hold, a quoted one can.
    for (line, key) in [
        (&br#""a\"b""#[..], "a\"b"),
        (br#""a\\b""#, "a\\b"),
        (b"\"a,b\"", "a,b"),
        (b"\"a b\"", "a b"),
        (b"\" abc\"", " abc"),
        (b"'abc'", "'abc'"),
        (b"ABC", "ABC"),
        (b"0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-469f-a165-70867728950e"),
        (b"abc;a=1", "abc;a=1"),
    ] {
        let answer = stack.send(with_lines(&[line])).await;
        assert_eq!((answer.text(), answer.is_replay()), (key, false), "{line:?}");
    }
    assert_eq!(store.len(), 10);
}

/// Lines that are no key.
const MALFORMED: [&[u8]; 26] = [
    b"",
    b" ",
    b"\t",
    b"\"\"",
    b"\"",
    b"\"abc",
    b"abc\"",
    b"a\"bc",
    b"\"abc\" x",
    b"\"abc\"\"def\"",
    b"\"a\\bc\"",
    b"\"abc\\\"",
    b"\"abc\";",
    b"\"abc\";A=1",
    b"\"abc\", \"def\"",
    b"a b",
    b"a\tb",
    b"a,b",
    b"a\\b",
    b"k\x80",
    b"k\xff",
    b"\"k\xc3\xbc\"",
    b"\xc3\xbc",
    b"\"a\tb\"",
    b"\xef\xbb\xbfabc",
    b"abc\xa0",
];

#[tokio::test]
async fn a_malformed_key_is_refused_and_never_runs_unprotected() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    for line in MALFORMED {
        stack.send(with_lines(&[line])).await.assert_refused(400, "idempotency_key_invalid");
    }
    assert_eq!((stack.runs.count(), store.len()), (0, 0));
}

#[tokio::test]
async fn a_key_sent_more_than_once_is_refused_even_if_all_lines_are_the_same() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    for lines in [&[&b"k"[..], b"k"][..], &[b"k", b"l"], &[b"\"k", b"l\""], &[b"k", b""]] {
        let refused = stack.send(with_lines(lines)).await;
        refused.assert_refused(400, "idempotency_key_invalid");
    }
    let mut both_cases = keyed("k", "{}");
    let shouted = HeaderName::from_bytes(b"IDEMPOTENCY-KEY").unwrap();
    both_cases.headers_mut().append(shouted, "k".parse().unwrap());
    stack.send(both_cases).await.assert_refused(400, "idempotency_key_invalid");
    assert_eq!((stack.runs.count(), store.len()), (0, 0));
    assert_eq!(stack.send(with_lines(&[b"k"])).await.text(), "run 1");
}

#[tokio::test]
async fn a_key_has_at_most_255_bytes_counted_as_decoded() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    let bare = |length| "k".repeat(length);
    let quoted = |length| format!("\"{}\"", "k".repeat(length));
    let escaped = |length| format!("\"{}\"", "\\\"".repeat(length));
    for (key, is_replay) in [
        (bare(1), false),
        (bare(254), false),
        (bare(255), false),
        (quoted(255), true),
        (escaped(255), false),
    ] {
        let answer = stack.send(with_lines(&[key.as_bytes()])).await;
        assert_eq!((answer.status, answer.is_replay()), (StatusCode::OK, is_replay));
    }
    let live = store.len();
    for key in [
        bare(256),
        quoted(256),
        escaped(256),
        bare(64 * 1024),
        quoted(64 * 1024),
        "ü".repeat(127),
        "ü".repeat(255),
    ] {
        let refused = stack.send(with_lines(&[key.as_bytes()])).await;
        refused.assert_refused(400, "idempotency_key_invalid");
    }
    assert_eq!((stack.runs.count(), store.len()), (4, live));
}

#[tokio::test]
async fn keys_that_differ_in_one_byte_are_two() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    for (run, key) in ["k", "K", "k1", "k.", "k-", "k_", "k:", "k/"].into_iter().enumerate() {
        assert_eq!(stack.send(keyed(key, "{}")).await.text(), format!("run {}", run + 1));
    }
}

#[tokio::test]
async fn a_malformed_key_is_refused_before_scope_store_and_body() {
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = IdempotencyLayer::new({
        let asked = Arc::clone(&asked);
        move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            None::<Scope>
        }
    });
    let stack = Stack::numbered(&layer);
    let body = Script::new([Step::Forever(|| Step::data("x"))]);
    let polls = body.polls();
    let request = with_lines(&[b"a b"]).map(|_| body);
    stack.send(request).await.assert_refused(400, "idempotency_key_invalid");
    assert_eq!((asked.load(Ordering::SeqCst), polls.count()), (0, 0));
}

#[tokio::test]
async fn without_a_key_a_request_passes_untouched_and_unstored_unless_one_is_required() {
    for required in [false, true] {
        let (layer, store) = layer();
        let stack = Stack::numbered(&layer.key_required(required));
        for method in [Method::POST, Method::PATCH] {
            let answer = stack.send(with_method(method.clone(), None)).await;
            if required {
                answer.assert_refused(400, "idempotency_key_missing");
            } else {
                assert_eq!(answer.status, StatusCode::OK);
            }
        }
        // Of a method that is not guarded nothing is required.
        assert_eq!(stack.send(with_method(Method::GET, None)).await.status, StatusCode::OK);
        assert_eq!(stack.runs.count(), if required { 1 } else { 3 });
        assert!(store.is_empty());
        assert_eq!(stack.send(keyed("k", "{}")).await.status, StatusCode::OK);
        assert!(stack.send(keyed("k", "{}")).await.is_replay());
    }
}

#[tokio::test]
async fn strict_keys_are_quoted_keys() {
    let (layer, _) = layer();
    let stack = echoing(&layer.key_strict(true));
    for line in [&b"abc"[..], b"0f8fad5b", b"'abc'", b"abc;a=1"] {
        stack.send(with_lines(&[line])).await.assert_refused(400, "idempotency_key_invalid");
    }
    for (line, is_replay) in [(&b"\"abc\""[..], false), (b" \"abc\";a=1", true)] {
        let answer = stack.send(with_lines(&[line])).await;
        assert_eq!((answer.text(), answer.is_replay()), ("abc", is_replay));
    }
}

#[tokio::test]
async fn another_header_may_carry_the_key_and_then_only_that_one_does() {
    let (layer, store) = layer();
    let layer = layer.key_header(HeaderName::from_static("x-request-token")).key_required(true);
    let stack = Stack::numbered(&layer);
    stack.send(keyed("k", "{}")).await.assert_refused(400, "idempotency_key_missing");
    for is_replay in [false, true] {
        let mut request = unkeyed("{}");
        request.headers_mut().insert("X-Request-Token", "k".parse().unwrap());
        // What the usual header says does not matter, not even if it is malformed.
        request.headers_mut().insert("idempotency-key", "a, b".parse().unwrap());
        assert_eq!(stack.send(request).await.is_replay(), is_replay);
    }
    assert_eq!(store.len(), 1);
}

/// Sends a request of `method` with a key three times and says how often it ran.
async fn runs_of(layer: &IdempotencyLayer, method: &Method, key: &str) -> usize {
    let stack = Stack::numbered(layer);
    for _ in 0..3 {
        stack.send(with_method(method.clone(), Some(key))).await;
    }
    stack.runs.count()
}

#[tokio::test]
async fn a_method_that_is_not_guarded_passes_every_time_even_with_a_key() {
    let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(1);
    let layer = layer().0.store(store.clone()).key_required(true).key_strict(true);
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "QUERY", "post"] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        // A key of somebody else's making must not break a route that is not guarded.
        for key in ["\"k\"", "not, a key", ""] {
            assert_eq!(runs_of(&layer, &method, key).await, 3, "{method}");
        }
    }
    assert!(store.is_empty());
}

#[tokio::test]
async fn the_guarded_methods_are_those_that_are_set() {
    let by_default = layer().0;
    let put = layer().0.methods([Method::PUT, Method::DELETE]);
    for (method, default_runs, put_runs) in [
        (Method::POST, 1, 3),
        (Method::PATCH, 1, 3),
        (Method::PUT, 3, 1),
        (Method::DELETE, 3, 1),
        (Method::GET, 3, 3),
    ] {
        assert_eq!(runs_of(&by_default, &method, method.as_str()).await, default_runs, "{method}");
        assert_eq!(runs_of(&put, &method, method.as_str()).await, put_runs, "{method}");
    }
}

#[tokio::test]
async fn a_get_sees_each_change_between_two_posts() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    stack.send(keyed("k", "{}")).await;
    let get = || with_method(Method::GET, Some("k"));
    assert_eq!(stack.send(get()).await.text(), "run 2");
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(stack.send(get()).await.text(), "run 3");
}

#[tokio::test]
async fn an_upgrade_passes_with_all_that_belongs_to_it() {
    #[derive(Debug, Clone, PartialEq)]
    struct OnUpgrade(u8);

    let (layer, store) = layer();
    let stack = Stack::new(&layer, |_, request| async move {
        let mut response = text(101, "");
        let on_upgrade = request.extensions().get::<OnUpgrade>().unwrap().clone();
        response.extensions_mut().insert(on_upgrade);
        response.headers_mut().insert("upgrade", "websocket".parse().unwrap());
        Ok(response)
    });
    for _ in 0..2 {
        let mut handshake = with_method(Method::GET, Some("k"));
        handshake.headers_mut().insert("upgrade", "websocket".parse().unwrap());
        handshake.extensions_mut().insert(OnUpgrade(1));
        let response = stack.call(handshake).await.unwrap();
        assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
        assert_eq!(response.headers()["upgrade"], "websocket");
        assert_eq!(response.extensions().get(), Some(&OnUpgrade(1)));
    }
    assert_eq!((stack.runs.count(), store.len()), (2, 0));
}
