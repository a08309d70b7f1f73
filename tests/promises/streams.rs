//! A response of unknown length reaches its caller while it is made, is recorded before its end is
//! seen, and is replayed whole.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Response};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::Instant;
use tower_idempotency::{
    Detached, Handle, IdempotencyLayer, InFlight, OnFailure, OnLeave, ResponseBody,
};

use crate::support::{
    Answer, Gate,
    call::Call,
    cue::{Cue, CueStore},
    keyed,
    stack::{AnyBody, Script, Stack, Step, any, layer, text, with_header},
    within,
};

/// A stack whose handler answers 200 with these steps and a `Location`, each time anew.
fn streaming<I>(layer: &IdempotencyLayer, steps: impl Fn() -> I + Send + Sync + 'static) -> Stack
where
    I: IntoIterator<Item = Step>,
{
    Stack::new(layer, move |_, _| {
        let response = Response::new(any(Script::new(steps())));
        async move { Ok(with_header(response, "location", "/v1/runs/1")) }
    })
}

async fn start(stack: &Stack) -> ResponseBody<AnyBody> {
    stack.call(keyed("k", "{}")).await.unwrap().into_body()
}

async fn retry(stack: &Stack) -> Answer {
    stack.send(keyed("k", "{}")).await
}

/// All frames that are there without anybody's doing, as text.
fn there(body: &mut ResponseBody<AnyBody>) -> String {
    let mut there = String::new();
    while let Some(frame) = body.frame().now_or_never() {
        let data = frame.expect("not its end").unwrap().into_data().expect("data");
        there.push_str(std::str::from_utf8(&data).unwrap());
    }
    there
}

#[tokio::test(start_paused = true)]
async fn each_line_reaches_the_caller_when_it_is_made_and_a_retry_gets_all_of_them_at_once() {
    const MS: Duration = Duration::from_millis(1);
    let (layer, _) = layer();
    let stack = streaming(&layer, || {
        ["{\"n\":1}\n", "{\"n\":2}\n", "{\"n\":3}\n"]
            .into_iter()
            .flat_map(|line| [Step::Sleep(300 * MS), Step::data(line)])
    });
    let before = Instant::now();
    let mut body = start(&stack).await;
    assert_eq!(before.elapsed(), Duration::ZERO, "the head waits for nothing");
    for line in 1..=3 {
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(frame, format!("{{\"n\":{line}}}\n"));
        assert_eq!(before.elapsed().as_millis() / 10, line * 30);
    }
    assert!(body.frame().await.is_none());
    let before = Instant::now();
    let again = retry(&stack).await;
    assert_eq!(again.text(), "{\"n\":1}\n{\"n\":2}\n{\"n\":3}\n");
    assert!(again.is_replay() && before.elapsed() == Duration::ZERO);
}

#[tokio::test]
async fn the_end_of_a_stream_waits_until_it_is_recorded() {
    for with_trailers in [false, true] {
        let gate = Gate::default();
        let store = CueStore::default();
        store.cue(Call::Complete, Cue::Wait(gate.clone()));
        let stack = streaming(&layer().0.store(store.clone()), move || {
            let trailers = with_trailers.then(|| Step::trailer("x-sum", "1"));
            ["one", "two"].map(Step::data).into_iter().chain(trailers)
        });
        let mut body = start(&stack).await;
        assert_eq!(there(&mut body), "onetwo", "all of its data is there");
        gate.reached_by(1).await;
        assert!(body.frame().now_or_never().is_none(), "but neither trailers nor end");
        assert!(!body.is_end_stream());
        assert_eq!(store.memory.in_flight(), 1);
        gate.open();
        if with_trailers {
            let trailers = within(body.frame()).await.unwrap().unwrap().into_trailers().unwrap();
            assert_eq!(trailers["x-sum"], "1");
        } else {
            assert!(within(body.frame()).await.is_none());
        }
        assert_eq!(store.memory.in_flight(), 0);
        assert!(body.is_end_stream());
        assert_eq!(retry(&stack).await.text(), "onetwo");
    }
}

#[tokio::test]
async fn the_end_of_a_stream_that_was_too_long_waits_until_its_tombstone_is_written() {
    let gate = Gate::default();
    let store = CueStore::default();
    store.cue(Call::Complete, Cue::Wait(gate.clone()));
    let layer = layer().0.response_limit(5).store(store.clone());
    let stack = streaming(&layer, || ["one", "two"].map(Step::data));
    let mut body = start(&stack).await;
    assert_eq!(there(&mut body), "onetwo");
    gate.reached_by(1).await;
    assert!(!body.is_end_stream());
    gate.open();
    assert!(within(body.frame()).await.is_none());
    retry(&stack).await.assert_refused(409, "idempotency_not_replayable");
}

#[tokio::test]
async fn a_stream_up_to_the_limit_is_recorded_and_one_byte_more_leaves_a_tombstone_at_its_end() {
    const LIMIT: usize = 16;
    for (length, is_recorded) in
        [(0, true), (1, true), (LIMIT - 1, true), (LIMIT, true), (LIMIT + 1, false), (999, false)]
    {
        for size in [1, 3, LIMIT - 1, LIMIT, 1_000] {
            for trailing in [
                [].as_slice(),
                &[Step::data as fn(&'static str) -> Step],
                &[Step::data, |_| Step::trailer("x-sum", "1")],
            ] {
                let (layer, store) = layer();
                let layer = layer.response_limit(LIMIT).in_flight(InFlight::Reject);
                let data = Bytes::from("x".repeat(length));
                let stack = streaming(&layer, move || {
                    let frames = data.chunks(size).map(|frame| Step::data(frame.to_vec()));
                    let trailing = trailing.iter().map(|step| step(""));
                    frames.chain(trailing).collect::<Vec<_>>()
                });
                let mut body = start(&stack).await;
                let mut received = 0;
                while received < length {
                    let frame = within(body.frame()).await.unwrap().unwrap();
                    received += frame.into_data().unwrap().len();
                    // However much has gone by, it is decided at the end.
                    assert_eq!(store.in_flight(), 1);
                    retry(&stack).await.assert_refused(409, "idempotency_in_progress");
                }
                within(body.collect()).await.unwrap();
                let again = retry(&stack).await;
                if is_recorded {
                    assert_eq!(again.text(), "x".repeat(length));
                    assert!(again.is_replay());
                } else {
                    again.assert_refused(409, "idempotency_not_replayable");
                }
                assert_eq!(again.header("location"), Some("/v1/runs/1"));
                assert_eq!((stack.runs.count(), store.len()), (1, 1), "{length} {size}");
            }
        }
    }
}

#[tokio::test]
async fn a_mebibyte_of_a_stream_is_kept_by_default_and_no_more() {
    const HALF: usize = 512 * 1024;
    for (more, is_recorded) in [(0, true), (1, false)] {
        let stack = streaming(&layer().0, move || {
            [HALF, HALF, more].map(|length| Step::data(vec![b'x'; length]))
        });
        assert_eq!(retry(&stack).await.body.len(), 2 * HALF + more);
        assert_eq!(retry(&stack).await.is_replay(), is_recorded);
    }
}

#[tokio::test(start_paused = true)]
async fn wherever_its_caller_leaves_the_rest_is_drained_and_a_retry_gets_the_whole_stream() {
    let steps = || {
        let frames = ["one", "", "two", "three"]
            .into_iter()
            .flat_map(|data| [Step::Sleep(Duration::from_secs(20)), Step::data(data)]);
        frames.chain([Step::trailer("x-sum", "1")])
    };
    for is_recorded in [true, false] {
        for read in 0..=5 {
            let (layer, store) = layer();
            let layer = layer.response_limit(if is_recorded { 11 } else { 10 });
            let stack = streaming(&layer, steps);
            let mut body = start(&stack).await;
            for _ in 0..read {
                body.frame().await.unwrap().unwrap();
            }
            assert_eq!(store.in_flight(), usize::from(read < 5));
            drop(body);
            assert_eq!(layer.drain(Duration::from_secs(100)).await, 0);
            let again = retry(&stack).await;
            if is_recorded {
                assert_eq!((again.text(), again.is_replay()), ("onetwothree", true), "{read}");
                assert_eq!(again.trailers.unwrap()["x-sum"], "1");
            } else {
                again.assert_refused(409, "idempotency_not_replayable");
            }
            assert_eq!((stack.runs.count(), store.in_flight()), (1, 0));
        }
    }
}

/// A handler that takes a while to answer, and then a while for its stream.
fn slow(layer: &IdempotencyLayer, head: Duration, body: Duration) -> Stack {
    Stack::new(layer, move |_, _| async move {
        tokio::time::sleep(head).await;
        Ok(Response::new(any(Script::new([Step::Sleep(body), Step::data("done")]))))
    })
}

#[tokio::test(start_paused = true)]
async fn what_is_left_before_its_head_has_one_time_for_head_and_stream_together() {
    const SECOND: Duration = Duration::from_secs(1);
    for (head, body, is_in_time) in [(4, 2, true), (4, 4, false), (1, 7, false), (8, 0, false)] {
        let (layer, store) = layer();
        let wrapped = Arc::new(AtomicUsize::new(0));
        let layer = layer.finish_within(7 * SECOND).in_flight(InFlight::Reject).detach_with({
            let wrapped = Arc::clone(&wrapped);
            move |work| {
                wrapped.fetch_add(1, Ordering::SeqCst);
                work
            }
        });
        let stack = slow(&layer, head * SECOND, body * SECOND);
        let caller = stack.spawn(keyed("k", "{}"));
        tokio::time::sleep(SECOND / 1_000).await;
        caller.abort();
        assert_eq!(layer.drain(Duration::from_millis(7_010)).await, 0, "{head} {body}");
        assert_eq!(wrapped.load(Ordering::SeqCst), 1, "it is handed over once");
        assert_eq!((store.in_flight(), store.len()), (0, usize::from(is_in_time)));
        if is_in_time {
            let again = retry(&stack).await;
            assert_eq!((again.text(), again.is_replay()), ("done", true));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn while_its_caller_reads_a_stream_has_all_the_time_it_needs() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let (layer, _) = layer();
    let stack = slow(&layer, HOUR, HOUR);
    let call = tower::ServiceExt::oneshot(stack.service.clone(), keyed("k", "{}").map(any));
    let first = Answer::read(call.await.unwrap()).await;
    assert_eq!(first.text(), "done");
    assert!(retry(&stack).await.is_replay());
}

#[tokio::test]
async fn a_stream_that_breaks_or_panics_is_a_failure_whatever_went_before_and_whoever_is_there() {
    for end in [|| Step::Break, || Step::Panic] {
        for (limit, caller_stays) in [(100, true), (100, false), (3, true), (3, false)] {
            for (rule, is_released) in
                [(OnFailure::Release, true), (OnFailure::Hold, false), (OnFailure::Record, false)]
            {
                let (layer, store) = layer();
                let layer = layer.on_failure(rule).response_limit(limit);
                let stack = Stack::new(&layer, move |run, _| async move {
                    if run > 1 {
                        return Ok(text(200, "two"));
                    }
                    Ok(Response::new(any(Script::new([Step::data("half"), end()]))))
                });
                let mut body = start(&stack).await;
                assert!(body.frame().await.unwrap().is_ok());
                if caller_stays {
                    let read = tokio::spawn(async move { body.frame().await.unwrap().is_err() });
                    // The error, or the panic, is the caller's.
                    assert!(within(read).await.unwrap_or(true));
                } else {
                    drop(body);
                    assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
                }
                assert_eq!(store.in_flight(), 0);
                let again = retry(&stack).await;
                if is_released {
                    assert_eq!((again.text(), again.is_replay()), ("two", false));
                } else {
                    again.assert_refused(409, "idempotency_outcome_unknown");
                }
            }
        }
    }
}

#[tokio::test]
async fn past_the_point_of_no_return_a_stream_that_breaks_or_is_refused_is_held() {
    for (status, breaks) in [(200, true), (404, false), (500, false)] {
        let stack = Stack::new(&layer().0, move |_, request| async move {
            request.extensions().get::<Handle>().unwrap().effects_begin();
            let steps = [Step::data("half")].into_iter().chain(breaks.then_some(Step::Break));
            Ok(text(status, "").map(|_| any(Script::new(steps))))
        });
        let body = start(&stack).await;
        let _how_it_ends = within(body.collect()).await;
        retry(&stack).await.assert_refused(409, "idempotency_outcome_unknown");
        assert_eq!(stack.runs.count(), 1);
    }
}

#[tokio::test]
async fn trailers_of_a_stream_are_replayed_behind_its_body() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async {
        let mut trailers = HeaderMap::new();
        for (name, value) in [("x-sum", &b"1"[..]), ("x-note", b"a"), ("x-note", b"\xe9")] {
            trailers.append(name, http::HeaderValue::from_bytes(value).unwrap());
        }
        let steps = [Step::data("one"), Step::data("two"), Step::Trailers(trailers)];
        let response = Response::new(any(Script::new(steps)));
        Ok(with_header(response, "trailer", "x-sum, x-note"))
    });
    let first = retry(&stack).await;
    for _ in 0..2 {
        let response = stack.call(keyed("k", "{}")).await.unwrap();
        // With an exact size, hyper would send no trailers over HTTP/1.1.
        assert_eq!(response.body().size_hint().exact(), None);
        assert_eq!(response.body().size_hint().lower(), 6);
        assert_eq!(response.headers().get("content-length"), None);
        let again = Answer::read(response).await;
        assert!(again.is_replay());
        assert_eq!((again.text(), &again.trailers), ("onetwo", &first.trailers));
        assert_eq!(again.header("trailer"), Some("x-sum, x-note"));
    }
    assert_eq!(first.trailers.unwrap().get_all("x-note").iter().count(), 2);
}

#[tokio::test]
async fn a_replayed_stream_says_how_long_it_is_and_announces_no_trailers_that_do_not_come() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async {
        let response = Response::new(any(Script::new(["one", "two"].map(Step::data))));
        Ok(with_header(response, "trailer", "x-sum"))
    });
    retry(&stack).await;
    let response = stack.call(keyed("k", "{}")).await.unwrap();
    assert_eq!(response.body().size_hint().exact(), Some(6));
    assert_eq!(Answer::read(response).await.header("trailer"), None);
}

#[tokio::test]
async fn trailers_may_be_all_that_there_is() {
    let (layer, _) = layer();
    let stack = streaming(&layer, || [Step::trailer("x-sum", "0")]);
    for is_replay in [false, true] {
        let answer = retry(&stack).await;
        assert_eq!((answer.text(), answer.is_replay()), ("", is_replay));
        assert_eq!(answer.trailers.unwrap()["x-sum"], "0");
    }
}

#[tokio::test]
async fn a_grpc_stream_is_judged_by_its_trailers_and_replayed_with_them() {
    for (code, released) in [
        (Some("0"), false),
        (Some("5"), true),
        (Some("7"), true),
        (Some("1"), true),
        (Some("2"), true),
        (Some("4"), true),
        (Some("13"), true),
        (Some("14"), true),
        (Some("15"), true),
        (None, true),
    ] {
        for caller_stays in [true, false] {
            let (layer, store) = layer();
            let stack = Stack::new(&layer, move |run, _| async move {
                let code = if run == 1 { code } else { Some("0") };
                let mut trailers = HeaderMap::new();
                if let Some(code) = code {
                    trailers.insert("grpc-status", code.parse().unwrap());
                    trailers.insert("grpc-message", "m".parse().unwrap());
                }
                let message = Step::data(format!("message {run}"));
                let steps = match code {
                    Some(_) => vec![message, Step::Trailers(trailers)],
                    None => vec![message],
                };
                let response = Response::new(any(Script::new(steps)));
                Ok(with_header(response, "content-type", "application/grpc"))
            });
            if caller_stays {
                let mut body = start(&stack).await;
                assert!(within(body.frame()).await.is_some());
                assert_eq!(store.in_flight(), 1, "what it means is known at its end");
                let rest = within(body.collect()).await.unwrap();
                assert_eq!(rest.trailers().is_some(), code.is_some());
            } else {
                drop(start(&stack).await);
                assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
            }
            let again = retry(&stack).await;
            assert_eq!(again.text(), if released { "message 2" } else { "message 1" }, "{code:?}");
            assert_eq!(again.is_replay(), !released);
            let trailers = again.trailers.unwrap();
            assert_eq!(trailers["grpc-status"], "0");
            assert_eq!(trailers["grpc-message"], "m");
        }
    }
}

#[tokio::test]
async fn a_grpc_stream_that_was_not_kept_is_judged_by_its_trailers_all_the_same() {
    for (code, is_kept) in [("0", true), ("14", false)] {
        let stack = Stack::new(&layer().0.record_streams(false), move |_, _| async move {
            let steps = [Step::data("message"), Step::trailer("grpc-status", code)];
            let response = Response::new(any(Script::new(steps)));
            Ok(with_header(response, "content-type", "application/grpc"))
        });
        retry(&stack).await;
        let again = retry(&stack).await;
        assert_eq!(stack.runs.count(), if is_kept { 1 } else { 2 });
        if is_kept {
            again.assert_refused(409, "idempotency_not_replayable");
        }
    }
}

#[tokio::test]
async fn an_answer_without_a_body_is_recorded_however_its_body_says_that_it_is_empty() {
    // 204 and 304 have no body, whatever length they talk of; the others may have an empty one.
    for (status, length) in
        [(204, None), (304, None), (304, Some("1234")), (204, Some("0")), (200, None), (202, None)]
    {
        for exact in [true, false] {
            let (layer, store) = layer();
            let stack = Stack::new(&layer, move |_, _| async move {
                let script = Script::new([]);
                let script = if exact { script.says(0) } else { script };
                let mut response = text(status, "").map(|_| any(script));
                if let Some(length) = length {
                    response = with_header(response, "content-length", length);
                }
                Ok(with_header(response, "etag", "\"1\""))
            });
            let first = retry(&stack).await;
            assert_eq!(first.header("content-length"), length, "the first answer is as it was");
            assert_eq!((store.in_flight(), store.len()), (0, 1), "{status} {length:?} {exact}");
            let response = stack.call(keyed("k", "{}")).await.unwrap();
            assert_eq!(response.body().size_hint().exact(), Some(0));
            let again = Answer::read(response).await;
            assert_eq!((again.status.as_u16(), again.text()), (status, ""));
            assert!(again.is_replay());
            assert_eq!(again.header("etag"), Some("\"1\""));
            assert_eq!(again.header("content-length"), None);
        }
    }
}

#[tokio::test]
async fn many_tiny_frames_come_one_by_one_and_are_replayed_as_one_piece() {
    const FRAMES: usize = 100_000;
    let (layer, _) = layer();
    let stack = streaming(&layer, || {
        (0..FRAMES).map(|number| Step::data(vec![u8::try_from(number % 251).unwrap()]))
    });
    let mut body = start(&stack).await;
    for number in 0..FRAMES {
        let data = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(data[..], [u8::try_from(number % 251).unwrap()]);
    }
    assert!(body.frame().await.is_none());
    let mut again = start(&stack).await;
    let data = again.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(data.len(), FRAMES);
    assert!(data.iter().enumerate().all(|(number, byte)| usize::from(*byte) == number % 251));
    assert!(again.frame().await.is_none());
}

/// Frames that know how many of them, and of their bytes, are alive.
#[derive(Clone, Default)]
struct Alive(Arc<AtomicUsize>);

struct Counted(Vec<u8>, Alive);

impl Alive {
    fn frame(&self, length: usize) -> Bytes {
        self.0.fetch_add(length, Ordering::SeqCst);
        Bytes::from_owner(Counted(vec![b'x'; length], self.clone()))
    }

    fn bytes(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.0.fetch_sub(self.0.len(), Ordering::SeqCst);
    }
}

#[tokio::test]
async fn of_a_stream_that_goes_by_no_more_is_held_than_the_limit() {
    const FRAME: usize = 10;
    const LIMIT: usize = 1_000;
    // How a frame is made while it is sent.
    static ALIVE: std::sync::OnceLock<Alive> = std::sync::OnceLock::new();
    let alive = ALIVE.get_or_init(Alive::default);
    for (streams, limit) in [(true, LIMIT), (true, FRAME - 1), (false, LIMIT)] {
        let (layer, _) = layer();
        let layer = layer.response_limit(limit).record_streams(streams).on_leave(OnLeave::Cancel);
        let stack =
            streaming(&layer, || [Step::Forever(|| Step::data(ALIVE.get().unwrap().frame(FRAME)))]);
        let mut body = start(&stack).await;
        for number in 1..=2 * LIMIT / FRAME {
            drop(body.frame().await.unwrap().unwrap());
            let kept = if streams && number * FRAME <= limit { LIMIT } else { 0 };
            assert!(alive.bytes() <= kept, "{} after {number} frames", alive.bytes());
        }
        drop(body);
        assert_eq!(alive.bytes(), 0);
    }
}

#[tokio::test]
async fn a_record_of_many_frames_keeps_none_of_them_alive() {
    let alive = Alive::default();
    let (layer, _) = layer();
    let stack = streaming(&layer, {
        let alive = alive.clone();
        move || (0..100).map(|_| Step::data(alive.frame(10))).collect::<Vec<_>>()
    });
    assert_eq!(retry(&stack).await.body.len(), 1_000);
    assert_eq!(alive.bytes(), 0);
    assert_eq!(retry(&stack).await.body.len(), 1_000);
}

#[tokio::test]
async fn a_stream_that_is_drained_without_its_caller_is_given_to_the_hook_once() {
    let hooked: Arc<Mutex<Vec<&str>>> = Arc::default();
    let (layer, _) = layer();
    let layer = layer.detach_with({
        let hooked = Arc::clone(&hooked);
        move |work: Detached| {
            let hooked = Arc::clone(&hooked);
            hooked.lock().unwrap().push("begin");
            Box::pin(async move {
                work.await;
                hooked.lock().unwrap().push("end");
            })
        }
    });
    let stack = streaming(&layer, || ["one", "two"].map(Step::data));
    drop(start(&stack).await);
    assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
    assert_eq!(*hooked.lock().unwrap(), ["begin", "end"]);
    assert_eq!(retry(&stack).await.text(), "onetwo");
}
