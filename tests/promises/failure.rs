//! What becomes of a key whose execution failed, said no, or ended without anybody knowing how.

use std::time::Duration;

use http::StatusCode;
use http_body_util::BodyExt;
use tower_idempotency::{Disposition, Handle, OnFailure, OnLeave, Outcome, RetainFor};

use crate::support::{
    Gate, keyed,
    stack::{AnyError, Script, Stack, Step, any, layer, text, with_extension, with_header},
    within,
};

const RULES: [OnFailure; 3] = [OnFailure::Release, OnFailure::Hold, OnFailure::Record];
const FAILURES: [u16; 7] = [408, 500, 502, 503, 504, 507, 599];

#[tokio::test]
async fn a_failed_execution_leaves_nothing_and_the_retry_runs() {
    let (layer, store) = layer();
    for status in FAILURES {
        let stack = Stack::new(&layer, move |run, _| async move {
            Ok(text(if run == 1 { status } else { 201 }, format!("run {run}")))
        });
        let key = format!("k{status}");
        let live = store.len();
        let failed = stack.send(keyed(&key, "{}")).await;
        assert_eq!((failed.status.as_u16(), failed.text()), (status, "run 1"));
        assert_eq!(store.len(), live, "its slot is free");
        let retried = stack.send(keyed(&key, "{}")).await;
        assert_eq!((retried.status, retried.text()), (StatusCode::CREATED, "run 2"));
        assert!(!retried.is_replay());
        let again = stack.send(keyed(&key, "{}")).await;
        assert_eq!((again.status, again.text()), (StatusCode::CREATED, "run 2"));
        assert!(again.is_replay());
    }
}

#[tokio::test]
async fn a_failed_execution_is_held_where_the_rule_says_hold() {
    let (layer, store) = layer();
    let layer = layer.on_failure(OnFailure::Hold);
    for status in FAILURES {
        let stack = Stack::new(&layer, move |_, _| async move { Ok(text(status, "it failed")) });
        let key = format!("k{status}");
        let failed = stack.send(keyed(&key, "{}")).await;
        assert_eq!((failed.status.as_u16(), failed.text()), (status, "it failed"));
        for _ in 0..2 {
            stack.send(keyed(&key, "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
        }
        stack.send(keyed(&key, "[]")).await.assert_refused(409, "idempotency_conflict");
        assert_eq!(stack.runs.count(), 1);
    }
    assert_eq!(store.len(), FAILURES.len());
}

#[tokio::test]
async fn a_failed_execution_is_replayed_where_the_rule_says_record() {
    let (layer, _) = layer();
    let layer = layer.on_failure(OnFailure::Record);
    for status in FAILURES {
        let stack = Stack::new(&layer, move |_, _| async move {
            Ok(with_header(text(status, "it \0 failed"), "x-why", "because"))
        });
        let key = format!("k{status}");
        for is_replay in [false, true, true] {
            let answer = stack.send(keyed(&key, "{}")).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (status, "it \0 failed"));
            assert_eq!(answer.header("x-why"), Some("because"));
            assert_eq!(answer.is_replay(), is_replay);
        }
        assert_eq!(stack.runs.count(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_held_key_opens_again_when_its_retention_ends() {
    let (layer, store) = layer();
    let layer = layer.on_failure(OnFailure::Hold).retention(Duration::from_secs(60));
    let stack = Stack::answering(&layer, &[500, 201]);
    stack.send(keyed("k", "{}")).await;
    tokio::time::advance(Duration::from_secs(59)).await;
    stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
    assert_eq!(store.len(), 1);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(store.len(), 0);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
}

#[tokio::test]
async fn a_held_key_opens_again_when_an_operator_removes_it() {
    let (layer, store) = layer();
    let stack = Stack::new(&layer.on_failure(OnFailure::Hold), |run, request| async move {
        let id = request.extensions().get::<Handle>().unwrap().operation_id();
        Ok(text(if run == 1 { 500 } else { 201 }, id.to_string()))
    });
    let failed = stack.send(keyed("k", "{}")).await;
    stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
    // The id, as an operator reads it in a log.
    assert!(store.remove(&failed.text().parse().unwrap()));
    assert_eq!(stack.send(keyed("k", "{}")).await.status, StatusCode::CREATED);
    assert_eq!(stack.runs.count(), 2);
}

#[tokio::test]
async fn an_inner_error_reaches_the_caller_and_is_never_recorded() {
    for rule in RULES {
        let (layer, store) = layer();
        let stack = Stack::new(&layer.on_failure(rule), |run, _| async move {
            match run {
                1 => Err(AnyError::new("the handler's own error")),
                _ => Ok(text(201, format!("run {run}"))),
            }
        });
        let error = stack.call(keyed("k", "{}")).await.unwrap_err();
        assert_eq!(error.to_string(), "the handler's own error");
        assert_eq!(store.in_flight(), 0);
        let retried = stack.send(keyed("k", "{}")).await;
        if rule == OnFailure::Release {
            assert_eq!(retried.text(), "run 2");
        } else {
            retried.assert_refused(409, "idempotency_outcome_unknown");
            assert_eq!(stack.runs.count(), 1);
        }
    }
}

#[tokio::test]
async fn a_panic_goes_on_to_the_caller_when_the_key_is_settled() {
    for rule in RULES {
        let (layer, store) = layer();
        let stack = Stack::new(&layer.on_failure(rule), |run, _| async move {
            assert_ne!(run, 1, "the handler panics");
            Ok(text(201, format!("run {run}")))
        });
        let call = stack.spawn(keyed("k", "{}"));
        let panic = within(call).await.unwrap_err().into_panic();
        assert!(panic.downcast_ref::<String>().unwrap().contains("the handler panics"));
        assert_eq!(store.in_flight(), 0);
        let retried = stack.send(keyed("k", "{}")).await;
        if rule == OnFailure::Release {
            assert_eq!(retried.text(), "run 2");
        } else {
            retried.assert_refused(409, "idempotency_outcome_unknown");
            assert_eq!(stack.runs.count(), 1);
        }
    }
}

#[tokio::test]
async fn a_no_frees_the_key_and_its_slot_whatever_the_rule() {
    for rule in RULES {
        for status in [400, 401, 403, 404, 405, 409, 410, 415, 418, 422, 423, 425, 429, 451, 499] {
            let (layer, store) = layer();
            let stack = Stack::new(&layer.on_failure(rule), move |run, _| async move {
                Ok(text(if run == 1 { status } else { 201 }, format!("run {run}")))
            });
            assert_eq!(stack.send(keyed("k", "{}")).await.status.as_u16(), status);
            assert!(store.is_empty(), "{status}");
            // Corrected, it may run under the same key.
            let corrected = stack.send(keyed("k", r#"{"corrected":true}"#)).await;
            assert_eq!((corrected.status, corrected.text()), (StatusCode::CREATED, "run 2"));
        }
    }
}

#[tokio::test]
async fn an_interim_status_is_never_recorded() {
    let (layer, store) = layer();
    for status in [100, 101, 103] {
        let stack = Stack::answering(&layer, &[101, 200]);
        let key = format!("k{status}");
        stack.send(keyed(&key, "{}")).await;
        assert_eq!(stack.send(keyed(&key, "{}")).await.text(), "run 2");
    }
    assert_eq!(store.len(), 3);
}

#[tokio::test]
async fn what_a_limiter_further_in_refuses_is_not_kept() {
    let (layer, store) = layer();
    for status in [429, 503] {
        let stack = Stack::new(&layer, move |run, _| async move {
            Ok(text(if run < 3 { status } else { 202 }, format!("run {run}")))
        });
        let key = format!("k{status}");
        for _ in 0..2 {
            let refused = stack.send(keyed(&key, "{}")).await;
            assert_eq!(refused.status.as_u16(), status);
            assert!(!refused.is_replay());
        }
        assert_eq!(stack.send(keyed(&key, "{}")).await.text(), "run 3");
        assert_eq!(stack.send(keyed(&key, "{}")).await.text(), "run 3");
    }
    assert_eq!(store.len(), 2);
}

#[tokio::test]
async fn success_redirection_and_402_are_recorded_whatever_the_rule() {
    for rule in RULES {
        let (layer, _) = layer();
        let layer = layer.on_failure(rule);
        for status in [200, 201, 202, 204, 299, 301, 303, 307, 399, 402] {
            let stack =
                Stack::new(&layer, move |run, _| async move { Ok(text(status, run.to_string())) });
            let key = format!("k{status}");
            stack.send(keyed(&key, "{}")).await;
            assert!(stack.send(keyed(&key, "{}")).await.is_replay(), "{status}");
        }
    }
}

/// What is left of an operation after one execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Record,
    Nothing,
    Held,
}

/// Sends a request twice and says what the first one left.
async fn left_by(stack: &Stack) -> Left {
    let first = tokio::spawn({
        let call = stack.call(keyed("k", "{}"));
        async move { call.await?.into_body().collect().await.map(drop) }
    });
    let _ended = within(first).await;
    let again = stack.send(keyed("k", "{}")).await;
    if again.is_replay() {
        assert_eq!(stack.runs.count(), 1);
        Left::Record
    } else if stack.runs.count() == 2 {
        Left::Nothing
    } else {
        again.assert_refused(409, "idempotency_outcome_unknown");
        assert_eq!(stack.runs.count(), 1);
        Left::Held
    }
}

#[tokio::test]
async fn what_a_handler_says_of_its_outcome_goes_before_its_status() {
    for rule in RULES {
        for status in [200, 302, 402, 404, 408, 429, 500, 503] {
            for (said, left) in [
                (Outcome::Final, Left::Record),
                (Outcome::NotExecuted, Left::Nothing),
                (Outcome::Unknown, Left::Held),
            ] {
                let stack = Stack::new(&layer().0.on_failure(rule), move |_, _| async move {
                    Ok(with_extension(text(status, ""), said))
                });
                assert_eq!(left_by(&stack).await, left, "{rule:?} {status} {said:?}");
            }
        }
    }
}

#[tokio::test]
async fn what_a_handler_says_of_its_outcome_holds_though_its_body_breaks() {
    for (said, rule, left) in [
        (Outcome::NotExecuted, OnFailure::Hold, Left::Nothing),
        (Outcome::NotExecuted, OnFailure::Record, Left::Nothing),
        (Outcome::Unknown, OnFailure::Release, Left::Held),
    ] {
        for is_stream in [false, true] {
            let stack = Stack::new(&layer().0.on_failure(rule), move |run, _| async move {
                if run > 1 {
                    return Ok(text(200, "again"));
                }
                let body = Script::new([Step::data("half"), Step::Break]);
                let body = if is_stream { body } else { body.says(8) };
                Ok(with_extension(text(200, "").map(|_| any(body)), said))
            });
            assert_eq!(left_by(&stack).await, left, "{said:?} {rule:?} {is_stream}");
        }
    }
}

/// How a handler ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Status(u16),
    Said(u16, Outcome),
    Error,
    Panic,
    BrokenBody,
    BrokenStream,
}

#[tokio::test]
async fn past_the_point_of_no_return_every_end_without_a_recorded_answer_is_held() {
    use Left::{Held, Nothing, Record};
    // What is left under the rules release, hold and record.
    for (end, left) in [
        (End::Status(200), [Record, Record, Record]),
        (End::Status(303), [Record, Record, Record]),
        (End::Status(402), [Record, Record, Record]),
        (End::Status(404), [Held, Held, Held]),
        (End::Status(429), [Held, Held, Held]),
        (End::Status(408), [Held, Held, Record]),
        (End::Status(500), [Held, Held, Record]),
        (End::Said(404, Outcome::Final), [Record, Record, Record]),
        (End::Said(500, Outcome::NotExecuted), [Nothing, Nothing, Nothing]),
        (End::Said(200, Outcome::Unknown), [Held, Held, Held]),
        (End::Error, [Held, Held, Held]),
        (End::Panic, [Held, Held, Held]),
        (End::BrokenBody, [Held, Held, Held]),
        (End::BrokenStream, [Held, Held, Held]),
    ] {
        for (rule, left) in RULES.into_iter().zip(left) {
            let stack = Stack::new(&layer().0.on_failure(rule), move |_, request| async move {
                request.extensions().get::<Handle>().unwrap().effects_begin();
                match end {
                    End::Status(status) => Ok(text(status, "")),
                    End::Said(status, said) => Ok(with_extension(text(status, ""), said)),
                    End::Error => Err(AnyError::new("an error")),
                    End::Panic => panic!("as it was told"),
                    End::BrokenBody => Ok(text(200, "")
                        .map(|_| any(Script::new([Step::data("1"), Step::Break]).says(2)))),
                    End::BrokenStream => {
                        Ok(text(200, "").map(|_| any(Script::new([Step::data("1"), Step::Break]))))
                    }
                }
            });
            assert_eq!(left_by(&stack).await, left, "{rule:?} {end:?}");
        }
    }
}

#[tokio::test]
async fn a_cancelled_execution_ends_by_the_rule_or_is_held_past_its_point_of_no_return() {
    for (rule, effects, left) in [
        (OnFailure::Release, false, Left::Nothing),
        (OnFailure::Release, true, Left::Held),
        (OnFailure::Hold, false, Left::Held),
        (OnFailure::Record, false, Left::Held),
    ] {
        let gate = Gate::default();
        let (layer, store) = layer();
        let layer = layer.on_failure(rule).on_leave(OnLeave::Cancel);
        let stack = Stack::new(&layer, {
            let gate = gate.clone();
            move |run, request| {
                let gate = gate.clone();
                async move {
                    if effects {
                        request.extensions().get::<Handle>().unwrap().effects_begin();
                    }
                    if run == 1 {
                        gate.pass().await;
                    }
                    Ok(text(200, format!("run {run}")))
                }
            }
        });
        let first = stack.spawn(keyed("k", "{}"));
        gate.reached_by(1).await;
        first.abort();
        assert!(within(first).await.unwrap_err().is_cancelled());
        assert_eq!(store.in_flight(), 0);
        let again = stack.send(keyed("k", "{}")).await;
        if left == Left::Nothing {
            assert_eq!(again.text(), "run 2");
        } else {
            again.assert_refused(409, "idempotency_outcome_unknown");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_chooses_the_retention_of_its_own_record() {
    let (layer, store) = layer();
    let layer = layer.retention(Duration::from_secs(60));
    for (said, seconds) in [(1, 1), (60, 60), (7200, 7200), (0, 0)] {
        let stack = Stack::new(&layer, move |_, _| async move {
            Ok(with_extension(text(200, ""), RetainFor(Duration::from_secs(said))))
        });
        let key = format!("k{said}");
        stack.send(keyed(&key, "{}")).await;
        if seconds > 0 {
            tokio::time::advance(Duration::from_millis(seconds * 1_000 - 1)).await;
            assert!(stack.send(keyed(&key, "{}")).await.is_replay(), "{said}");
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(store.is_empty(), "{said}");
        assert!(!stack.send(keyed(&key, "{}")).await.is_replay(), "{said}");
        store.clear();
    }
}

#[tokio::test(start_paused = true)]
async fn the_handles_word_on_retention_goes_before_the_responses() {
    let (layer, store) = layer();
    let stack = Stack::new(&layer, |_, request| async move {
        let handle = request.extensions().get::<Handle>().unwrap().clone();
        let _held = handle.retain_for(Duration::from_secs(5)).await.unwrap();
        Ok(with_extension(text(200, ""), RetainFor(Duration::from_secs(500))))
    });
    stack.send(keyed("k", "{}")).await;
    tokio::time::advance(Duration::from_secs(4)).await;
    assert_eq!(store.len(), 1);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn a_grpc_answer_is_judged_by_its_grpc_status() {
    for (status, rules) in [
        (Some("0"), [Left::Record; 3]),
        (Some("5"), [Left::Nothing; 3]),
        (Some("8"), [Left::Nothing; 3]),
        (Some("14"), [Left::Nothing, Left::Held, Left::Record]),
        (None, [Left::Nothing, Left::Held, Left::Record]),
    ] {
        for (rule, left) in RULES.into_iter().zip(rules) {
            let stack = Stack::new(&layer().0.on_failure(rule), move |_, _| async move {
                let trailers = status.map(|status| Step::trailer("grpc-status", status));
                let steps = [Step::data("message")].into_iter().chain(trailers);
                let response = text(200, "").map(|_| any(Script::new(steps).says(7)));
                Ok(with_header(response, "content-type", "application/grpc+proto"))
            });
            assert_eq!(left_by(&stack).await, left, "{rule:?} {status:?}");
        }
    }
}

#[tokio::test]
async fn a_failure_counts_as_executed() {
    let (layer, _) = layer();
    let stack = Stack::answering(&layer, &[500, 404, 200]);
    for _ in 0..3 {
        stack.send(keyed("k", "{}")).await;
    }
    assert_eq!(layer.dispositions().get(Disposition::Executed), 3);
}
