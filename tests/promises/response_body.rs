//! A response is recorded before it looks complete, and never in part.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use tower_idempotency::{
    Disposition, InFlight, OnFailure, OnLeave, Outcome, ResponseBody, RetainFor,
};

use crate::support::{
    Answer, Gate,
    call::Call,
    cue::{Cue, CueStore},
    interposed::Interposed,
    keyed,
    stack::{AnyBody, Script, Stack, Step, any, layer, text, with_extension, with_header},
    within,
};

type Delivered = ResponseBody<AnyBody>;

/// The next data frame, as text; `None` at the end.
async fn next(body: &mut Delivered) -> Option<String> {
    let frame = within(body.frame()).await?.expect("a frame, not an error");
    Some(String::from_utf8(frame.into_data().expect("data").to_vec()).unwrap())
}

/// Asserts that `again` is what a stream leaves: all of it, or its tombstone.
#[track_caller]
fn assert_left(again: &Answer, is_recorded: bool, body: &str) {
    if is_recorded {
        assert_eq!((again.status.as_u16(), again.text(), again.is_replay()), (200, body, true));
    } else {
        again.assert_refused(409, "idempotency_not_replayable");
    }
    assert_eq!(again.header("location"), Some("/v1/runs/1"));
}

/// Responses with a body of this kind, and a `Location`.
fn stack_of<F>(layer: &tower_idempotency::IdempotencyLayer, body: F) -> Stack
where
    F: Fn() -> AnyBody + Clone + Send + Sync + 'static,
{
    Stack::new(layer, move |_, _| {
        let body = body.clone();
        async move { Ok(with_header(Response::new(body()), "location", "/v1/runs/1")) }
    })
}

#[tokio::test]
async fn a_body_up_to_the_limit_is_replayed_and_a_larger_one_is_delivered_whole_but_not_kept() {
    let (layer, store) = layer();
    let layer = layer.response_limit(8);
    for (length, is_kept) in [(0, true), (7, true), (8, true), (9, false), (80_000, false)] {
        // Three ways to say how long it is: by the body, by the header, and both.
        for way in 0..3 {
            let stack = Stack::new(&layer, move |_, _| async move {
                let data = Bytes::from("x".repeat(length));
                let halves = [data.slice(..length / 2), data.slice(length / 2..)];
                let script = Script::new(halves.map(Step::data));
                let script = if way == 1 { script } else { script.says(length as u64) };
                let response = if way == 0 {
                    text(201, data)
                } else {
                    let response = text(201, "").map(|_| any(script));
                    with_header(response, "content-length", length.to_string())
                };
                Ok(with_header(response, "location", "/v1/runs/1"))
            });
            let key = format!("k{length}-{way}");
            let first = stack.send(keyed(&key, "{}")).await;
            assert_eq!((first.status.as_u16(), first.body.len()), (201, length));
            assert_eq!(store.in_flight(), 0);
            for _ in 0..2 {
                let again = stack.send(keyed(&key, "{}")).await;
                if is_kept {
                    assert_eq!((again.status.as_u16(), again.body.len()), (201, length));
                    assert!(again.is_replay());
                } else {
                    again.assert_refused(409, "idempotency_not_replayable");
                    assert_eq!(again.header("location"), Some("/v1/runs/1"));
                }
            }
            assert_eq!(stack.runs.count(), 1, "{length} {way}");
        }
    }
}

#[tokio::test]
async fn a_mebibyte_is_kept_by_default_and_no_more() {
    const MIB: usize = 1024 * 1024;

    let (layer, _) = layer();
    for (length, is_kept) in [(MIB, true), (MIB + 1, false)] {
        let stack = Stack::new(&layer, move |_, _| async move { Ok(text(200, vec![0; length])) });
        let key = format!("k{length}");
        assert_eq!(stack.send(keyed(&key, "{}")).await.body.len(), length);
        let again = stack.send(keyed(&key, "{}")).await;
        assert_eq!(again.is_replay(), is_kept);
        assert_eq!(again.body.len() == length, is_kept);
    }
}

#[tokio::test]
async fn a_body_of_unknown_length_is_delivered_while_it_is_made_and_is_in_flight_meanwhile() {
    for is_recorded in [true, false] {
        let gate = Gate::default();
        let (layer, store) = layer();
        let layer = layer.in_flight(InFlight::Reject).record_streams(is_recorded);
        let stack = stack_of(&layer, {
            let gate = gate.clone();
            move || {
                any(Script::new([Step::data("one"), Step::Pass(gate.clone()), Step::data("two")]))
            }
        });
        let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
        assert_eq!(next(&mut body).await.as_deref(), Some("one"));
        assert!(body.frame().now_or_never().is_none(), "the rest is not there yet");
        stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_in_progress");
        stack.send(keyed("k", "[]")).await.assert_refused(409, "idempotency_conflict");
        gate.open();
        assert_eq!(next(&mut body).await.as_deref(), Some("two"));
        assert_eq!(store.in_flight(), 1, "that could have been all or not");
        assert!(!body.is_end_stream());
        assert_eq!(next(&mut body).await, None);
        assert_eq!(store.in_flight(), 0, "settled before its end is seen");
        assert!(body.is_end_stream());
        assert_left(&stack.send(keyed("k", "{}")).await, is_recorded, "onetwo");
        assert_eq!(stack.runs.count(), 1);
    }
}

#[tokio::test]
async fn a_repeat_of_a_stream_waits_for_its_end_and_gets_all_of_it_or_hears_that_it_is_done() {
    for is_recorded in [true, false] {
        let gate = Gate::default();
        let (layer, _) = layer();
        let stack = stack_of(&layer.record_streams(is_recorded), {
            let gate = gate.clone();
            move || any(Script::new([Step::data("one"), Step::Pass(gate.clone())]))
        });
        let first = stack.spawn(keyed("k", "{}"));
        gate.reached_by(1).await;
        let repeat = stack.spawn(keyed("k", "{}"));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert!(!repeat.is_finished());
        gate.open();
        assert_eq!(first.await.unwrap().text(), "one");
        assert_left(&repeat.await.unwrap(), is_recorded, "one");
        assert_eq!(stack.runs.count(), 1);
    }
}

#[tokio::test]
async fn an_endless_stream_is_delivered_frame_by_frame() {
    let (layer, store) = layer();
    let stack = stack_of(&layer.on_leave(OnLeave::Cancel), || {
        any(Script::new([Step::Forever(|| Step::data("event\n"))]))
    });
    let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
    for _ in 0..10_000 {
        assert_eq!(next(&mut body).await.as_deref(), Some("event\n"));
    }
    assert_eq!(store.in_flight(), 1);
    drop(body);
    assert_eq!(store.in_flight(), 0);
}

#[tokio::test]
async fn the_trailers_of_a_stream_come_when_it_is_settled() {
    let (layer, store) = layer();
    let stack =
        stack_of(&layer, || any(Script::new([Step::data("one"), Step::trailer("x-sum", "1")])));
    let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
    assert_eq!(next(&mut body).await.as_deref(), Some("one"));
    assert_eq!(store.in_flight(), 1);
    let trailers = within(body.frame()).await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(trailers["x-sum"], "1");
    assert_eq!((store.in_flight(), store.len()), (0, 1));
    assert!(body.is_end_stream());
    assert_eq!(next(&mut body).await, None);
}

#[tokio::test]
async fn a_recorded_response_is_sent_only_when_it_is_recorded() {
    let gate = Gate::default();
    let store = CueStore::default();
    store.cue(Call::Complete, Cue::Wait(gate.clone()));
    let stack = Stack::numbered(&layer().0.store(store.clone()));
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    tokio::task::yield_now().await;
    assert!(!first.is_finished());
    assert_eq!(store.memory.in_flight(), 1);
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test]
async fn the_last_frame_of_a_declared_length_waits_until_it_is_settled() {
    // Empty frames after the last byte change nothing: with that byte it looks complete.
    for frames in
        [&["1234", "56789"][..], &["123456789"], &["1234", "56789", ""], &["", "123456789", "", ""]]
    {
        for by_header in [false, true] {
            let gate = Gate::default();
            let store = CueStore::default();
            store.cue(Call::Complete, Cue::Wait(gate.clone()));
            let layer = layer().0.response_limit(8).store(store.clone());
            let stack = Stack::new(&layer, move |_, _| async move {
                let script = Script::new(frames.iter().map(|frame| Step::data(*frame)));
                Ok(if by_header {
                    with_header(Response::new(any(script)), "content-length", "9")
                } else {
                    Response::new(any(script.says(9)))
                })
            });
            let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
            let mut received = String::new();
            while let Some(frame) = body.frame().now_or_never() {
                let data = frame.expect("not its end").unwrap().into_data().unwrap();
                received.push_str(std::str::from_utf8(&data).unwrap());
            }
            assert!(received.len() < 9, "{frames:?}: it looks complete and is not settled");
            assert!(!body.is_end_stream());
            gate.reached_by(1).await;
            gate.open();
            while let Some(frame) = next(&mut body).await {
                received.push_str(&frame);
            }
            assert_eq!(received, "123456789");
            stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_not_replayable");
        }
    }
}

#[tokio::test]
async fn a_large_body_still_says_how_long_it_is() {
    let (layer, _) = layer();
    let stack =
        stack_of(&layer.response_limit(8), || any(Script::new([Step::data("123456789")]).says(9)));
    let response = stack.call(keyed("k", "{}")).await.unwrap();
    assert_eq!(response.body().size_hint().exact(), Some(9));
}

#[tokio::test]
async fn a_body_that_breaks_is_a_failure_and_never_a_record() {
    for declared in [None, Some(8)] {
        for (rule, is_released) in
            [(OnFailure::Release, true), (OnFailure::Hold, false), (OnFailure::Record, false)]
        {
            let (layer, store) = layer();
            let stack = Stack::new(&layer.on_failure(rule), move |run, _| async move {
                if run > 1 {
                    return Ok(text(200, "whole"));
                }
                let script = Script::new([Step::data("half"), Step::Break]);
                Ok(Response::new(any(match declared {
                    Some(length) => script.says(length),
                    None => script,
                })))
            });
            let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
            assert_eq!(next(&mut body).await.as_deref(), Some("half"));
            assert!(!body.is_end_stream());
            let error = within(body.frame()).await.unwrap().unwrap_err();
            assert_eq!(error.to_string(), "the body broke", "the first caller sees that it broke");
            assert!(body.is_end_stream());
            assert_eq!(store.in_flight(), 0);
            let again = stack.send(keyed("k", "{}")).await;
            if is_released {
                assert_eq!(again.text(), "whole");
            } else {
                again.assert_refused(409, "idempotency_outcome_unknown");
            }
        }
    }
}

#[tokio::test]
async fn a_body_that_breaks_with_all_its_bytes_there_does_not_look_whole() {
    // Kept, or too large for it.
    for limit in [100, 3] {
        let (layer, store) = layer();
        for by_header in [false, true] {
            let stack = Stack::new(&layer.clone().response_limit(limit), move |_, _| async move {
                let script = Script::new([Step::data("who"), Step::data("le"), Step::Break]);
                Ok(if by_header {
                    with_header(Response::new(any(script)), "content-length", "5")
                } else {
                    Response::new(any(script.says(5)))
                })
            });
            for run in 1..=2 {
                let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
                let mut data = String::new();
                let broke = loop {
                    match within(body.frame()).await.unwrap() {
                        Ok(frame) => data += str::from_utf8(&frame.into_data().unwrap()).unwrap(),
                        Err(error) => break error,
                    }
                };
                assert_eq!(broke.to_string(), "the body broke");
                assert!(data.len() < 5, "who counts {data:?} must not think that it is all");
                assert_eq!((stack.runs.count(), store.len()), (run, 0));
            }
        }
    }
}

#[tokio::test]
async fn an_answer_without_a_body_is_whole_with_its_head_and_breaks_no_more() {
    for (status, length) in [(204, None), (200, Some("0"))] {
        let stack = Stack::new(&layer().0, move |_, _| async move {
            let mut broken = Response::new(any(Script::new([Step::Break])));
            *broken.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok(match length {
                Some(length) => with_header(broken, "content-length", length),
                None => broken,
            })
        });
        for is_replay in [false, true] {
            let answer = stack.send(keyed("k", "{}")).await;
            let seen = (answer.status.as_u16(), answer.text(), answer.is_replay());
            assert_eq!(seen, (status, "", is_replay));
        }
    }
}

#[tokio::test]
async fn a_body_that_ends_short_of_its_length_is_a_failure_and_never_a_record() {
    let (layer, store) = layer();
    for (limit, by_header) in [(100, false), (100, true), (3, false), (3, true)] {
        let layer = layer.clone().response_limit(limit);
        let stack = Stack::new(&layer, move |run, _| async move {
            Ok(match (run, by_header) {
                (2.., _) => text(200, "whole"),
                (_, false) => Response::new(any(Script::unknown_length("half").says(8))),
                (_, true) => with_header(
                    Response::new(any(Script::unknown_length("half"))),
                    "content-length",
                    "8",
                ),
            })
        });
        let key = format!("k{limit}{by_header}");
        assert_eq!(stack.send(keyed(&key, "{}")).await.text(), "half");
        assert_eq!(store.in_flight(), 0);
        assert_eq!(stack.send(keyed(&key, "{}")).await.text(), "whole");
    }
}

#[tokio::test]
async fn a_body_that_goes_on_past_its_length_is_cut_there_for_everybody() {
    for (limit, is_kept) in [(100, true), (4, false)] {
        for by_header in [false, true] {
            let stack = Stack::new(&layer().0.response_limit(limit), move |_, _| async move {
                let steps = [Step::data("123"), Step::Forever(|| Step::data("4567"))];
                let endless = Script::new(steps);
                Ok(if by_header {
                    with_header(Response::new(any(endless)), "content-length", "5")
                } else {
                    Response::new(any(endless.says(5)))
                })
            });
            assert_eq!(stack.send(keyed("k", "{}")).await.text(), "12345");
            let again = stack.send(keyed("k", "{}")).await;
            if is_kept {
                assert_eq!((again.text(), again.is_replay()), ("12345", true));
            } else {
                again.assert_refused(409, "idempotency_not_replayable");
            }
        }
    }
}

#[tokio::test]
async fn an_endless_stream_whose_caller_leaves_lets_others_run_until_its_time_is_up() {
    let (layer, store) = layer();
    let layer = layer.finish_within(Duration::from_millis(20)).in_flight(InFlight::Reject);
    let stack = stack_of(&layer, || any(Script::new([Step::Forever(|| Step::data("event\n"))])));
    drop(stack.call(keyed("k", "{}")).await.unwrap());
    assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_body_that_panics_lets_its_panic_go_when_the_key_is_settled() {
    for declared in [None, Some(8)] {
        let (layer, store) = layer();
        let stack = Stack::new(&layer, move |run, _| async move {
            if run > 1 {
                return Ok(text(200, "whole"));
            }
            let script = Script::new([Step::data("half"), Step::Panic]);
            Ok(Response::new(any(match declared {
                Some(length) => script.says(length),
                None => script,
            })))
        });
        assert!(within(stack.spawn(keyed("k", "{}"))).await.unwrap_err().is_panic());
        assert_eq!((store.in_flight(), store.len()), (0, 0));
        assert_eq!(layer.drain(Duration::ZERO).await, 0);
        assert_eq!(stack.send(keyed("k", "{}")).await.text(), "whole");
    }
}

#[tokio::test]
async fn a_stream_whose_caller_leaves_is_driven_to_its_end_and_a_retry_gets_all_of_it() {
    for is_recorded in [true, false] {
        let gate = Gate::default();
        let (layer, store) = layer();
        let layer = layer.record_streams(is_recorded);
        let stack = stack_of(&layer, {
            let gate = gate.clone();
            move || {
                any(Script::new([Step::data("one"), Step::Pass(gate.clone()), Step::data("two")]))
            }
        });
        let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
        assert_eq!(next(&mut body).await.as_deref(), Some("one"));
        drop(body);
        gate.reached_by(1).await;
        assert_eq!(store.in_flight(), 1);
        assert_eq!(layer.drain(Duration::ZERO).await, 1);
        gate.open();
        assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
        assert_left(&stack.send(keyed("k", "{}")).await, is_recorded, "onetwo");
        assert_eq!(stack.runs.count(), 1);
    }
}

#[tokio::test]
async fn a_stream_that_nobody_reads_is_driven_to_its_end_too() {
    for is_recorded in [true, false] {
        let (layer, _) = layer();
        let layer = layer.record_streams(is_recorded);
        let stack = stack_of(&layer, || any(Script::unknown_length("one")));
        drop(stack.call(keyed("k", "{}")).await.unwrap());
        assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
        assert_left(&stack.send(keyed("k", "{}")).await, is_recorded, "one");
    }
}

#[tokio::test]
async fn a_stream_whose_caller_leaves_ends_by_the_failure_rule_where_that_is_chosen() {
    for (rule, is_released) in [(OnFailure::Release, true), (OnFailure::Hold, false)] {
        let (layer, _) = layer();
        let stack = stack_of(&layer.on_leave(OnLeave::Cancel).on_failure(rule), || {
            any(Script::unknown_length("one"))
        });
        drop(stack.call(keyed("k", "{}")).await.unwrap());
        let again = stack.send(keyed("k", "{}")).await;
        if is_released {
            assert_eq!((again.text(), stack.runs.count()), ("one", 2));
        } else {
            again.assert_refused(409, "idempotency_outcome_unknown");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_a_caller_is_cancelled_when_its_time_is_up() {
    let (layer, store) = layer();
    let layer = layer.finish_within(Duration::from_secs(7)).in_flight(InFlight::Reject);
    let stack = stack_of(&layer, || any(Script::new([Step::Pass(Gate::default())])));
    drop(stack.call(keyed("k", "{}")).await.unwrap());
    assert_eq!(layer.drain(Duration::from_millis(6_999)).await, 1);
    assert_eq!(layer.drain(Duration::from_millis(2)).await, 0);
    assert!(store.is_empty());
}

#[tokio::test]
async fn a_stream_is_judged_by_its_status_when_it_has_ended() {
    let (layer, store) = layer();
    for (status, is_recorded, is_kept) in [
        (200, true, true),
        (200, false, true),
        (402, true, true),
        (404, true, false),
        (404, false, false),
        (500, true, false),
        (500, false, false),
    ] {
        let layer = layer.clone().record_streams(is_recorded);
        let stack = Stack::new(&layer, move |_, _| async move {
            Ok(text(status, "").map(|_| any(Script::unknown_length("one"))))
        });
        let key = format!("k{status}{is_recorded}");
        let mut body = stack.call(keyed(&key, "{}")).await.unwrap().into_body();
        assert_eq!(next(&mut body).await.as_deref(), Some("one"));
        assert_eq!(store.in_flight(), 1);
        assert_eq!(next(&mut body).await, None);
        assert_eq!(store.in_flight(), 0);
        let again = stack.send(keyed(&key, "{}")).await;
        assert_eq!(stack.runs.count(), if is_kept { 1 } else { 2 });
        match (is_kept, is_recorded) {
            (true, true) => {
                assert_eq!((again.status.as_u16(), again.text()), (status, "one"));
                assert!(again.is_replay());
            }
            (true, false) => again.assert_refused(409, "idempotency_not_replayable"),
            (false, _) => assert!(!again.is_replay()),
        }
    }
}

#[tokio::test]
async fn what_a_handler_says_of_its_outcome_holds_for_streams_too() {
    for (status, said) in
        [(500, Outcome::Final), (200, Outcome::Unknown), (200, Outcome::NotExecuted)]
    {
        for is_recorded in [true, false] {
            let layer = layer().0.record_streams(is_recorded);
            let stack = Stack::new(&layer, move |_, _| async move {
                let response = text(status, "").map(|_| any(Script::unknown_length("one")));
                Ok(with_extension(response, said))
            });
            stack.send(keyed("k", "{}")).await;
            let again = stack.send(keyed("k", "{}")).await;
            match said {
                Outcome::Final if is_recorded => {
                    assert_eq!((again.status.as_u16(), again.text()), (500, "one"));
                    assert!(again.is_replay());
                }
                Outcome::Final => again.assert_refused(409, "idempotency_not_replayable"),
                Outcome::Unknown => again.assert_refused(409, "idempotency_outcome_unknown"),
                _ => assert!(!again.is_replay()),
            }
            assert_eq!(stack.runs.count(), if said == Outcome::NotExecuted { 2 } else { 1 });
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_or_tombstone_lives_from_the_end_of_its_stream() {
    for is_recorded in [true, false] {
        let (layer, store) = layer();
        let stack = Stack::new(&layer.record_streams(is_recorded), |_, _| async move {
            let script = Script::new([Step::Sleep(Duration::from_secs(100)), Step::data("one")]);
            let response = with_header(Response::new(any(script)), "location", "/v1/runs/1");
            Ok(with_extension(response, RetainFor(Duration::from_secs(60))))
        });
        let response = stack.call(keyed("k", "{}")).await.unwrap();
        // The test's own limit would end the wait: time is advanced by the body alone.
        assert_eq!(Answer::read(response).await.text(), "one");
        tokio::time::advance(Duration::from_millis(59_999)).await;
        assert_left(&stack.send(keyed("k", "{}")).await, is_recorded, "one");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(store.is_empty());
    }
}

#[tokio::test]
async fn a_stream_counts_as_one_execution_when_it_ends() {
    let (layer, _) = layer();
    let stack = stack_of(&layer, || any(Script::unknown_length("one")));
    let mut body = stack.call(keyed("k", "{}")).await.unwrap().into_body();
    assert_eq!(next(&mut body).await.as_deref(), Some("one"));
    assert_eq!(layer.dispositions().get(Disposition::Executed), 0);
    assert_eq!(next(&mut body).await, None);
    assert_eq!(layer.dispositions().get(Disposition::Executed), 1);
}

#[tokio::test]
async fn what_a_body_holds_is_given_back_before_its_key_is_settled() {
    type End = fn() -> Step;
    let ends: [(&str, Option<End>); 3] =
        [("whole", None), ("broken", Some(|| Step::Break)), ("panic", Some(|| Step::Panic))];
    for (end, step) in ends {
        // Collected, too large to be kept, and of unknown length.
        for says in [Some(8), Some(2_000), None] {
            let held = Arc::new(());
            let (layer, memory) = layer();
            let holders = Arc::new(Mutex::new(Vec::new()));
            let store = Interposed::new(&memory).before({
                let (holders, held) = (Arc::clone(&holders), Arc::downgrade(&held));
                move |call: Call| {
                    if call.is_settlement() {
                        holders.lock().unwrap().push(held.strong_count());
                    }
                    async { Ok(()) }
                }
            });
            let stack = Stack::new(&layer.store(store).response_limit(1_000), {
                let held = Arc::clone(&held);
                move |_, _| {
                    let length = usize::try_from(says.unwrap_or(8)).unwrap();
                    let steps = [Step::data(vec![b'x'; length - 1]), Step::data("x")];
                    let body = Script::new(steps.into_iter().chain(step.map(|step| step())));
                    let body = match says {
                        Some(length) => body.says(length),
                        None => body,
                    };
                    // Until it is dropped it holds what its closure does: a permit, a transaction.
                    let body = body.map_err({
                        let held = Arc::clone(&held);
                        move |error| {
                            let _held = &held;
                            error
                        }
                    });
                    async move { Ok(text(200, "").map(|_| any(body))) }
                }
            });
            let call = stack.call(keyed("k", "{}"));
            let first =
                tokio::spawn(async move { call.await?.into_body().collect().await.map(drop) });
            let _ended = within(first).await;
            // This test and the handler.
            assert_eq!(*holders.lock().unwrap(), [2], "{end} {says:?}");
        }
    }
}
