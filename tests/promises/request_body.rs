//! The handler sees the request as it was sent, and a keyed body is read within limits, before
//! anything is done.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Version};
use http_body::Body;
use http_body_util::{BodyExt, Full, Limited};
use tower_idempotency::Handle;

use crate::support::{
    keyed,
    stack::{AnyBody, Inner, Script, Stack, Step, any, layer, text, with_header},
    unkeyed, within,
};

/// What a handler saw of a request.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    method: http::Method,
    uri: http::Uri,
    version: Version,
    headers: HeaderMap,
    note: Option<Note>,
    body: Bytes,
    trailers: Option<HeaderMap>,
    exact: Option<u64>,
}

#[derive(Debug, Clone, PartialEq)]
struct Note(u8);

async fn see<B>(request: Request<B>) -> Seen
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = request.into_parts();
    let exact = body.size_hint().exact();
    let body = body.collect().await.unwrap();
    Seen {
        method: parts.method,
        uri: parts.uri,
        version: parts.version,
        headers: parts.headers,
        note: parts.extensions.get().cloned(),
        trailers: body.trailers().cloned(),
        body: body.to_bytes(),
        exact,
    }
}

/// A stack whose handler hands over what it saw.
fn seeing() -> (Stack, tokio::sync::mpsc::UnboundedReceiver<Seen>) {
    let (sender, seen) = tokio::sync::mpsc::unbounded_channel();
    let stack = Stack::new(&layer().0, move |_, request| {
        let sender = sender.clone();
        async move {
            sender.send(see(request).await).unwrap();
            Ok(text(200, ""))
        }
    });
    (stack, seen)
}

fn request(key: Option<&str>, content_type: &str, body: AnyBody) -> Request<AnyBody> {
    let mut request = unkeyed("").map(|_| body);
    *request.uri_mut() = "/v1/a%20b?x=1&y=%00".parse().unwrap();
    *request.version_mut() = Version::HTTP_2;
    let headers = request.headers_mut();
    headers.insert("content-type", content_type.parse().unwrap());
    headers.append("x-twice", "1".parse().unwrap());
    headers.append("x-twice", "2".parse().unwrap());
    if let Some(key) = key {
        headers.insert("idempotency-key", key.parse().unwrap());
    }
    request.extensions_mut().insert(Note(7));
    request
}

/// A content type, and what makes a body of it.
type Case = (&'static str, fn(Bytes) -> AnyBody);

#[tokio::test]
async fn a_handler_sees_the_same_request_as_without_a_key() {
    let big = Bytes::from(vec![7; 100_000]);
    let cases: [Case; 6] = [
        ("application/json", |_| any(Full::from(r#"{"a": 1,  "a": 2}"#))),
        ("application/x-www-form-urlencoded", |_| any(Full::from("a=1&b=%20"))),
        ("multipart/form-data; boundary=x", |_| any(Full::from("--x\r\n\r\n--x--"))),
        ("application/octet-stream", |big| any(Full::new(big))),
        ("text/plain", |_| any(Full::from(""))),
        ("text/plain", |_| any(Full::from("1"))),
    ];
    for (content_type, body) in cases {
        let (stack, mut seen) = seeing();
        stack.send(request(None, content_type, body(big.clone()))).await;
        stack.send(request(Some("k"), content_type, body(big.clone()))).await;
        let (unkeyed, mut keyed) = (seen.try_recv().unwrap(), seen.try_recv().unwrap());
        assert_eq!(keyed.headers.remove("idempotency-key").unwrap(), "k");
        assert_eq!(keyed, unkeyed, "{content_type}");
        assert_eq!(unkeyed.note, Some(Note(7)));
    }
}

#[tokio::test]
async fn a_chunked_body_reaches_the_handler_with_its_trailers() {
    let (stack, mut seen) = seeing();
    let body = || {
        let data = ["", "one", "", " two", ""].map(Step::data);
        any(Script::new(data.into_iter().chain([Step::trailer("x-sum", "1")])))
    };
    stack.send(request(None, "text/plain", body())).await;
    stack.send(request(Some("k"), "text/plain", body())).await;
    let (unkeyed, mut keyed) = (seen.try_recv().unwrap(), seen.try_recv().unwrap());
    keyed.headers.remove("idempotency-key");
    assert_eq!(keyed, unkeyed);
    assert_eq!(keyed.body, "one two");
    assert_eq!(keyed.trailers.unwrap()["x-sum"], "1");
}

#[tokio::test]
async fn a_chunked_body_that_was_read_says_how_long_it_is() {
    let (stack, mut seen) = seeing();
    let body = any(Script::new(["one", " two"].map(Step::data)));
    stack.send(request(Some("k"), "text/plain", body)).await;
    assert_eq!(seen.try_recv().unwrap().exact, Some(7));
}

/// A keyed body of `length` bytes that says so in one of four ways, or lies.
fn of_length(length: usize, way: usize) -> Request<AnyBody> {
    let data = Bytes::from(vec![b'x'; length]);
    let frames = data.chunks(3).map(|chunk| Step::data(chunk.to_vec())).collect::<Vec<_>>();
    let (body, says) = match way {
        0 => (any(Full::new(data)), None),
        1 => (any(Script::new(frames)), Some(length)),
        2 => (any(Script::new(frames)), None),
        // It says that it is short.
        _ => (any(Script::new(frames).says(1)), Some(1)),
    };
    let mut request = keyed(&format!("k{length}-{way}"), "").map(|_| body);
    if let Some(length) = says {
        request.headers_mut().insert("content-length", length.into());
    }
    request
}

#[tokio::test]
async fn a_body_up_to_the_limit_is_taken_and_a_longer_one_refused_however_it_comes() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.request_limit(10));
    for way in 0..4 {
        let live = store.len();
        for length in [0, 9, 10] {
            assert_eq!(stack.send(of_length(length, way)).await.status, 200, "{length} {way}");
        }
        for length in [11, 12, 100_000] {
            let refused = stack.send(of_length(length, way)).await;
            refused.assert_refused(413, "idempotency_body_too_large");
        }
        assert_eq!(store.len(), live + 3, "a refused body leaves nothing");
    }
    assert_eq!(stack.runs.count(), 12);
}

#[tokio::test]
async fn a_mebibyte_is_taken_by_default_and_no_more() {
    const MIB: usize = 1024 * 1024;

    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    assert_eq!(stack.send(keyed("a", vec![b'x'; MIB])).await.status, 200);
    let refused = stack.send(keyed("b", vec![b'x'; MIB + 1])).await;
    refused.assert_refused(413, "idempotency_body_too_large");
}

#[tokio::test]
async fn a_body_that_declares_too_much_is_never_read() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer.request_limit(10));
    for by_header in [false, true] {
        let script = Script::new([Step::Forever(|| Step::data("x"))]);
        let polls = script.polls();
        let request = keyed("k", "");
        let request = if by_header {
            let mut request = request.map(|_| script);
            request.headers_mut().insert("content-length", 11.into());
            request
        } else {
            request.map(|_| script.says(11))
        };
        stack.send(request).await.assert_refused(413, "idempotency_body_too_large");
        assert_eq!(polls.count(), 0);
    }
}

#[tokio::test]
async fn an_endless_body_is_read_no_further_than_the_limit() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.request_limit(100));
    let script = Script::new([Step::Forever(|| Step::data("0123456789"))]);
    let polls = script.polls();
    let refused = stack.send(keyed("k", "").map(|_| script)).await;
    refused.assert_refused(413, "idempotency_body_too_large");
    assert_eq!(polls.count(), 11);
    assert_eq!((stack.runs.count(), store.len()), (0, 0));
}

#[tokio::test]
async fn a_body_without_a_key_streams_through_unread_and_without_a_limit() {
    let (layer, store) = layer();
    let layer = layer.request_limit(10);
    let script = Script::new((0..1000).map(|_| Step::data(vec![0; 1024])));
    let polls = script.polls();
    let stack = Stack::new(&layer, {
        let polls = polls.clone();
        move |_, request| {
            assert_eq!(polls.count(), 0, "nothing was read of it");
            let polls = polls.clone();
            async move {
                let mut body = request.into_body();
                body.frame().await.unwrap().unwrap();
                assert_eq!(polls.count(), 1, "frame by frame");
                let rest = body.collect().await.unwrap().to_bytes().len();
                Ok(text(200, rest.to_string()))
            }
        }
    });
    let answer = stack.send(unkeyed("").map(|_| script)).await;
    assert_eq!(answer.text(), (999 * 1024).to_string());
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_limit_further_out_is_a_413_too() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    let limited = |frames: &'static [&'static str]| {
        keyed("k", "").map(|_| Limited::new(Script::new(frames.iter().map(|f| Step::data(*f))), 5))
    };
    let refused = stack.send(limited(&["123", "456"])).await;
    refused.assert_refused(413, "idempotency_body_too_large");
    assert!(store.is_empty());
    assert_eq!(stack.send(limited(&["123", "45"])).await.text(), "run 1");

    // However deep the error's source.
    let boxed = keyed("other", "").map(|_| any(Limited::new(Full::from("123456"), 5)));
    stack.send(boxed).await.assert_refused(413, "idempotency_body_too_large");
}

#[tokio::test]
async fn a_body_that_breaks_leaves_nothing_and_the_whole_retry_runs() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    for steps in [vec![Step::Break], vec![Step::data(r#"{"a":1}"#), Step::Break]] {
        let refused = stack.send(keyed("k", "").map(|_| Script::new(steps))).await;
        refused.assert_refused(400, "idempotency_body_unreadable");
        assert!(!refused.text().contains("the body broke"), "nothing of the error is told");
        assert!(store.is_empty());
    }
    assert_eq!(stack.send(keyed("k", r#"{"a":1}"#)).await.text(), "run 1");
}

#[tokio::test]
async fn a_refused_repeat_leaves_the_record_of_its_key_alone() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.request_limit(10));
    stack.send(keyed("k", "{}")).await;
    for (request, status) in [
        (keyed("k", "").map(|_| any(Full::from("12345678901"))), 413),
        (keyed("k", "").map(|_| any(Script::unknown_length("12345678901"))), 413),
        (keyed("k", "").map(|_| any(Script::new([Step::data("{}"), Step::Break]))), 400),
    ] {
        assert_eq!(stack.send(request).await.status, status);
    }
    assert_eq!(store.len(), 1);
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_stalls_is_given_up_after_the_idle_time() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.body_idle_timeout(Duration::from_secs(5)));
    let pause = |millis| Step::Sleep(Duration::from_millis(millis));
    // Each pause counts by itself.
    let slow = Script::new([pause(4_999), Step::data("{"), pause(4_999), Step::data("}")]);
    assert_eq!(stack.send(keyed("slow", "").map(|_| slow)).await.status, 200);
    for stalled in [
        Script::new([pause(5_001), Step::data("{}")]),
        Script::new([Step::data("{}"), pause(5_001)]),
    ] {
        let began = tokio::time::Instant::now();
        let refused = stack.send(keyed("k", "").map(|_| stalled)).await;
        refused.assert_refused(408, "idempotency_body_unreadable");
        assert_eq!(began.elapsed(), Duration::from_secs(5));
        assert_eq!(store.len(), 1);
    }
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_is_given_up_after_the_total_time() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.body_timeout(Duration::from_secs(20)));
    let trickle = || {
        let second = || [Step::Sleep(Duration::from_secs(1)), Step::data("x")];
        Script::new((0..1000).flat_map(move |_| second()))
    };
    let began = tokio::time::Instant::now();
    let refused = stack.send(keyed("k", "").map(|_| trickle())).await;
    refused.assert_refused(408, "idempotency_body_unreadable");
    assert_eq!(began.elapsed(), Duration::from_secs(20));
    assert!(store.is_empty());
}

#[tokio::test(start_paused = true)]
async fn by_default_a_body_may_stall_for_15_seconds_and_take_a_minute() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    for (pause, total) in [(15, 15), (14, 60)] {
        let body = Script::new((0..100).flat_map(move |_| {
            [Step::Sleep(Duration::from_millis(pause * 1000 + 1)), Step::data("x")]
        }));
        let call =
            tower::ServiceExt::oneshot(stack.service.clone(), keyed("k", "").map(|_| any(body)));
        let began = tokio::time::Instant::now();
        assert_eq!(call.await.unwrap().status(), 408);
        assert_eq!(began.elapsed(), Duration::from_secs(total));
    }
}

#[tokio::test]
async fn a_body_that_is_always_ready_ends_all_the_same_and_lets_others_run() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer.body_timeout(Duration::from_millis(20)));
    // Frames without a byte never come near the limit; of frames of one byte there are many.
    for endless in [Script::new([Step::Forever(|| Step::data(""))])] {
        let slow = stack.spawn(keyed("slow", "").map(|_| endless));
        assert_eq!(stack.send(keyed("quick", "{}")).await.status, 200);
        within(slow).await.unwrap().assert_refused(408, "idempotency_body_unreadable");
    }
    let tiny = Script::new((0..1_000_000).map(|_| Step::data("x")));
    let answer = stack.send(keyed("tiny", "").map(|_| tiny)).await;
    assert!([200, 408].contains(&answer.status.as_u16()));
    assert!(store.in_flight() == 0);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_says_that_it_has_ended_is_not_asked_for_more() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, request: Inner| async move {
        let body = request.into_body().collect().await.unwrap();
        let trailers = body.trailers().is_some();
        let answer = text(200, body.to_bytes());
        Ok(if trailers { with_header(answer, "x-trailers", "yes") } else { answer })
    });
    let trailer = || Step::trailer("x-checksum", "1");
    let wait = || Step::Sleep(Duration::from_secs(1));
    for (number, (steps, whole, seconds)) in [
        (vec![], "", 0),
        (vec![Step::data("{}")], "{}", 0),
        (vec![Step::data("{"), wait(), Step::data("}")], "{}", 1),
        (vec![Step::data("{}"), trailer()], "{}", 0),
        (vec![wait(), Step::data("{}"), wait(), trailer()], "{}", 2),
        // More than are read in a row.
        ((0..100).map(|_| Step::data("x")).collect(), &*"x".repeat(100), 0),
    ]
    .into_iter()
    .enumerate()
    {
        let has_trailers = steps.iter().any(|step| matches!(step, Step::Trailers(_)));
        let began = tokio::time::Instant::now();
        let body = Script::new(steps).knows_its_end();
        let answer = stack.send(keyed(&number.to_string(), "").map(|_| body)).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (200, whole), "{number}");
        assert_eq!(answer.headers.contains_key("x-trailers"), has_trailers, "{number}");
        assert_eq!(began.elapsed().as_secs(), seconds, "{number}");
    }
}

#[tokio::test]
async fn nothing_is_claimed_while_a_body_arrives() {
    let gate = crate::support::Gate::default();
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    let slow = Script::new([Step::data("{"), Step::Pass(gate.clone()), Step::data("}")]);
    let slow = stack.spawn(keyed("k", "").map(|_| slow));
    gate.reached_by(1).await;
    assert!(store.is_empty());
    // The one whose body is there first runs.
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    gate.open();
    let late = slow.await.unwrap();
    assert_eq!((late.text(), late.is_replay()), ("run 1", true));
}

#[tokio::test]
async fn a_handler_may_leave_the_body_unread() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, request| async move {
        let id = request.extensions().get::<Handle>().unwrap().operation_id();
        drop(request);
        Ok(with_header(text(200, ""), "x-id", id.to_string()))
    });
    stack.send(keyed("k", "{}")).await;
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}
