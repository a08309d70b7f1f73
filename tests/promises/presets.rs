//! The presets: `ietf()` and `stripe()` do what they say, a setter after them overrides them, and a
//! route may have settings of its own without a state of its own.

use std::time::Duration;

use http::{Response, StatusCode};
use tower_idempotency::{
    Disposition, Handle, IdempotencyLayer, OnFailure, Outcome, Reason, RetainFor,
};

use crate::support::{
    Answer, keyed,
    stack::{AnyError, Inner, Script, Stack, Step, any, layer, text, with_extension, with_header},
    unkeyed,
};

/// A key as the draft wants it, which everybody takes.
const QUOTED: &str = "\"k\"";

/// What is left of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Record,
    Nothing,
    Held,
}

async fn left_by(stack: &Stack) -> Left {
    // A panic is the caller's.
    let _first = stack.spawn(keyed(QUOTED, "{}")).await;
    let runs = stack.runs.count();
    let Ok(again) = stack.spawn(keyed(QUOTED, "{}")).await else { return Left::Nothing };
    match (again.is_replay(), stack.runs.count() - runs) {
        (true, 0) => Left::Record,
        (false, 1) => Left::Nothing,
        _ => {
            again.assert_refused(409, "idempotency_outcome_unknown");
            Left::Held
        }
    }
}

async fn left_by_status(layer: &IdempotencyLayer, status: u16) -> Left {
    left_by(&Stack::new(layer, move |_, _| async move { Ok(text(status, "")) })).await
}

/// What the first execution leaves that ends with an error; all further ones answer 200.
async fn left_by_an_error(layer: &IdempotencyLayer) -> Left {
    let stack = Stack::new(layer, |run, _| async move {
        if run == 1 { Err(AnyError::new("it failed")) } else { Ok(text(200, "")) }
    });
    assert!(stack.call(keyed(QUOTED, "{}")).await.is_err());
    let again = stack.send(keyed(QUOTED, "{}")).await;
    if again.status == 200 {
        return Left::Nothing;
    }
    again.assert_refused(409, "idempotency_outcome_unknown");
    Left::Held
}

async fn left_by_a_panic(layer: &IdempotencyLayer) -> Left {
    let stack = Stack::new(layer, |run, _| async move {
        assert!(run > 1, "the first run panics, as it was told");
        Ok(text(200, ""))
    });
    left_by(&stack).await
}

async fn left_by_broken(layer: &IdempotencyLayer) -> Left {
    let stack = Stack::new(layer, |run, _| async move {
        let broken = Script::new([Step::data("half"), Step::Break]);
        Ok(if run == 1 { Response::new(any(broken)) } else { text(200, "") })
    });
    left_by(&stack).await
}

fn ietf() -> IdempotencyLayer {
    layer().0.ietf()
}

fn stripe() -> IdempotencyLayer {
    layer().0.stripe()
}

/// The 4xx that both presets leave unrecorded.
fn is_not_final(status: u16) -> bool {
    matches!(
        status,
        400 | 401 | 403..=405 | 407..=409 | 411 | 413..=415 | 417 | 421 | 423 | 425 | 426 | 428
            | 429 | 431
    )
}

/// What a preset leaves of a status that is no failure.
fn left_of_no_failure(status: u16) -> Left {
    match status {
        200..=399 => Left::Record,
        400..=499 if !is_not_final(status) => Left::Record,
        _ => Left::Nothing,
    }
}

#[tokio::test]
async fn by_default_of_all_4xx_only_402_is_recorded() {
    for status in 400..500 {
        let left = if status == 402 { Left::Record } else { Left::Nothing };
        assert_eq!(left_by_status(&layer().0, status).await, left, "{status}");
    }
}

#[tokio::test]
async fn ietf_records_what_is_final_and_leaves_failures_to_the_rule() {
    for status in 200..600 {
        let left = left_by_status(&ietf(), status).await;
        assert_eq!(left, left_of_no_failure(status), "{status}");
    }
    // A setter after it: what fails is held, what is not final frees the key as before.
    for status in (400..600).step_by(3).chain([408, 503]) {
        let left = left_by_status(&ietf().on_failure(OnFailure::Hold), status).await;
        let is_failure = status == 408 || status >= 500;
        let right = if is_failure { Left::Held } else { left_of_no_failure(status) };
        assert_eq!(left, right, "{status}");
    }
}

#[tokio::test]
async fn stripe_records_what_is_final_and_failures_too_unless_they_say_later() {
    for status in 200..600 {
        let right = match status {
            408 | 429 | 503 => Left::Nothing,
            500.. => Left::Record,
            _ => left_of_no_failure(status),
        };
        assert_eq!(left_by_status(&stripe(), status).await, right, "{status}");
    }
}

#[tokio::test]
async fn stripe_takes_unavailable_of_grpc_for_the_503_that_it_is() {
    let another_policy = || stripe().outcome_of(|_| None);
    let same_rule = || layer().0.on_failure(OnFailure::Record);
    for (name, layer, unavailable) in [
        ("stripe", &stripe as &dyn Fn() -> IdempotencyLayer, Left::Nothing),
        ("stripe, another policy", &another_policy, Left::Record),
        ("the same rule", &same_rule, Left::Record),
    ] {
        for (code, right) in [
            ("0", Left::Record),
            ("4", Left::Record),
            ("8", Left::Nothing),
            ("13", Left::Record),
            ("14", unavailable),
        ] {
            for in_trailers in [false, true] {
                let stack = Stack::new(&layer(), move |_, _| async move {
                    let response = text(200, "").map(|body| {
                        let steps = [Step::data("m"), Step::trailer("grpc-status", code)];
                        if in_trailers { any(Script::new(steps)) } else { body }
                    });
                    let response = with_header(response, "content-type", "application/grpc");
                    Ok(if in_trailers {
                        response
                    } else {
                        with_header(response, "grpc-status", code)
                    })
                });
                assert_eq!(left_by(&stack).await, right, "{name}: {code}, {in_trailers}");
            }
        }
    }
}

#[tokio::test]
async fn an_execution_without_an_answer_is_released_by_ietf_and_held_by_stripe_unless_it_is_an_error()
 {
    assert_eq!(left_by_an_error(&ietf()).await, Left::Nothing);
    assert_eq!(left_by_a_panic(&ietf()).await, Left::Nothing);
    assert_eq!(left_by_broken(&ietf()).await, Left::Nothing);

    assert_eq!(left_by_an_error(&stripe()).await, Left::Nothing);
    // There is no answer that could be recorded.
    assert_eq!(left_by_a_panic(&stripe()).await, Left::Held);
    assert_eq!(left_by_broken(&stripe()).await, Left::Held);
    // Without the preset, the same rule holds an error too.
    assert_eq!(left_by_an_error(&layer().0.on_failure(OnFailure::Record)).await, Left::Held);
}

#[tokio::test]
async fn past_its_point_of_no_return_nothing_is_released_by_a_preset() {
    for (layer, status, left) in [
        (ietf(), 400, Left::Held),
        (ietf(), 503, Left::Held),
        (ietf(), 422, Left::Record),
        (stripe(), 429, Left::Held),
        (stripe(), 503, Left::Held),
        (stripe(), 408, Left::Held),
        (stripe(), 400, Left::Held),
        (stripe(), 500, Left::Record),
        (stripe(), 422, Left::Record),
    ] {
        let stack = Stack::new(&layer, move |_, request: Inner| async move {
            request.extensions().get::<Handle>().unwrap().effects_begin();
            Ok(text(status, ""))
        });
        assert_eq!(left_by(&stack).await, left, "{status}");
    }
    let stack = Stack::new(&stripe(), |_, request: Inner| async move {
        request.extensions().get::<Handle>().unwrap().effects_begin();
        Err::<Response<_>, _>(AnyError::new("it failed"))
    });
    assert!(stack.call(keyed("k", "{}")).await.is_err());
    stack.send(keyed("k", "{}")).await.assert_refused(409, "idempotency_outcome_unknown");
}

#[tokio::test]
async fn what_a_handler_says_goes_before_a_preset() {
    for (status, said, left) in [
        (422, Outcome::NotExecuted, Left::Nothing),
        (200, Outcome::Unknown, Left::Held),
        (503, Outcome::Final, Left::Record),
        (500, Outcome::NotExecuted, Left::Nothing),
        (400, Outcome::Final, Left::Record),
    ] {
        for layer in [ietf(), stripe()] {
            let stack = Stack::new(&layer, move |_, _| async move {
                Ok(with_extension(text(status, ""), said))
            });
            assert_eq!(left_by(&stack).await, left, "{status} {said:?}");
        }
    }
}

/// The answer to another request with the same key.
async fn conflict(layer: &IdempotencyLayer) -> Answer {
    let stack = Stack::numbered(layer);
    stack.send(keyed(QUOTED, "{}")).await;
    stack.send(keyed(QUOTED, "[]")).await
}

#[tokio::test]
async fn each_preset_has_its_own_status_for_a_conflict_and_for_nothing_else() {
    for (layer, status) in [(layer().0, 409), (ietf(), 422), (stripe(), 400)] {
        let answer = conflict(&layer).await;
        answer.assert_refused(status, "idempotency_conflict");
        let json = answer.json();
        assert_eq!(json["status"], status);
        assert_eq!(json["error"]["type"], "idempotency_error");
        assert_eq!(json["retry"], "new-key");
        assert_eq!(answer.header("x-should-retry"), Some("false"));

        let held = Stack::new(&layer, |_, _| async {
            Ok(with_extension(text(200, ""), Outcome::Unknown))
        });
        held.send(keyed("\"held\"", "{}")).await;
        let again = held.send(keyed("\"held\"", "{}")).await;
        again.assert_refused(409, "idempotency_outcome_unknown");
        let malformed = held.send(keyed("\"", "{}")).await;
        malformed.assert_refused(400, "idempotency_key_invalid");
    }
}

#[tokio::test]
async fn ietf_wants_a_key_and_wants_it_quoted() {
    let stack = Stack::numbered(&ietf());
    stack.send(unkeyed("{}")).await.assert_refused(400, "idempotency_key_missing");
    let bare = keyed("8e03978e-40d5-43dd-bc93-6894a57f9324", "{}");
    stack.send(bare).await.assert_refused(400, "idempotency_key_invalid");
    let quoted = keyed("\"8e03978e-40d5-43dd-bc93-6894a57f9324\"", "{}");
    assert_eq!(stack.send(quoted).await.text(), "run 1");

    // A setter after it overrides it, each by itself.
    let stack = Stack::numbered(&ietf().key_strict(false));
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    assert!(stack.send(keyed(QUOTED, "{}")).await.is_replay());
    stack.send(unkeyed("{}")).await.assert_refused(400, "idempotency_key_missing");
    let stack = Stack::numbered(&ietf().key_required(false));
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 1");
    stack.send(keyed("k", "{}")).await.assert_refused(400, "idempotency_key_invalid");
}

#[tokio::test]
async fn stripe_takes_bare_keys_and_requests_without_one() {
    let stack = Stack::numbered(&stripe());
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
    assert!(stack.send(keyed(QUOTED, "{}")).await.is_replay());
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 2");
}

/// Asserts that a record lives exactly so long.
async fn assert_retention(layer: &IdempotencyLayer, seconds: u64) {
    let stack = Stack::numbered(layer);
    stack.send(keyed(QUOTED, "{}")).await;
    tokio::time::advance(Duration::from_secs(seconds) - Duration::from_millis(1)).await;
    assert!(stack.send(keyed(QUOTED, "{}")).await.is_replay());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(stack.send(keyed(QUOTED, "{}")).await.text(), "run 2");
}

#[tokio::test(start_paused = true)]
async fn stripe_keeps_a_record_for_24_hours_unless_another_time_is_set_after_it() {
    const HOUR: u64 = 60 * 60;
    assert_retention(&ietf(), HOUR).await;
    assert_retention(&stripe(), 24 * HOUR).await;
    assert_retention(&stripe().retention(Duration::from_secs(7)), 7).await;
    assert_retention(&layer().0.retention(Duration::from_secs(7)).stripe(), 24 * HOUR).await;
    let stack = Stack::new(&stripe(), |_, _| async {
        Ok(with_extension(text(200, ""), RetainFor(Duration::from_secs(7))))
    });
    stack.send(keyed("k", "{}")).await;
    tokio::time::advance(Duration::from_secs(7)).await;
    assert!(!stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test]
async fn a_setter_after_a_preset_overrides_it_and_one_before_is_overridden() {
    for preset in [IdempotencyLayer::ietf, IdempotencyLayer::stripe] {
        let teapot = preset(layer().0).refusal_status(Reason::Conflict, StatusCode::IM_A_TEAPOT);
        assert_eq!(conflict(&teapot).await.status, 418);
        let before = preset(layer().0.refusal_status(Reason::Conflict, StatusCode::IM_A_TEAPOT));
        assert_ne!(conflict(&before).await.status, 418);

        let none = preset(layer().0).outcome_of(|_| None);
        assert_eq!(left_by_status(&none, 422).await, Left::Nothing);
        assert_eq!(left_by_status(&none, 402).await, Left::Record);
        let before = preset(layer().0.outcome_of(|_| Some(Outcome::Unknown)));
        assert_eq!(left_by_status(&before, 200).await, Left::Record);
        assert_eq!(left_by_status(&before, 422).await, Left::Record);
    }
    // The failure rule is one setting, its exception for errors included.
    for (rule, left) in [(OnFailure::Release, Left::Nothing), (OnFailure::Hold, Left::Held)] {
        let layer = || stripe().on_failure(rule);
        assert_eq!(left_by_status(&layer(), 500).await, left);
        assert_eq!(left_by_an_error(&layer()).await, left);
        assert_eq!(left_by_a_panic(&layer()).await, left);
        for later in [408, 503] {
            assert_eq!(left_by_status(&layer(), later).await, left, "{later} {rule:?}");
        }
        assert_eq!(left_by_status(&layer(), 429).await, Left::Nothing, "no failure");
        assert_eq!(left_by_status(&layer(), 422).await, Left::Record, "the policy is another");
    }
    // A policy after the preset stays, whatever failure rule comes after it.
    let own = || stripe().outcome_of(|_| Some(Outcome::Unknown)).on_failure(OnFailure::Release);
    assert_eq!(left_by_status(&own(), 503).await, Left::Held);
    let before = || layer().0.on_failure(OnFailure::Hold).stripe();
    assert_eq!(left_by_status(&before(), 500).await, Left::Record);
    assert_eq!(left_by_an_error(&before()).await, Left::Nothing);
    // One preset after the other: the last word counts, word by word.
    let both = || layer().0.stripe().ietf();
    assert_eq!(conflict(&both()).await.status, 422);
    assert_eq!(left_by_status(&both(), 500).await, Left::Record);
    let both = || layer().0.ietf().stripe();
    assert_eq!(conflict(&both()).await.status, 400);
    assert_eq!(left_by_status(&both(), 503).await, Left::Nothing);
}

#[tokio::test]
async fn a_route_with_a_preset_of_its_own_shares_entries_counts_and_drain_with_the_others() {
    let (layer, store) = layer();
    let routes = [layer.clone(), layer.clone().ietf(), layer.clone().stripe()];
    let stacks = routes.each_ref().map(Stack::numbered);
    assert_eq!(stacks[0].send(keyed(QUOTED, "{}")).await.text(), "run 1");
    for (stack, status) in stacks.iter().zip([409, 422, 400]) {
        assert!(stack.send(keyed(QUOTED, "{}")).await.is_replay());
        let other = stack.send(keyed(QUOTED, "[]")).await;
        other.assert_refused(status, "idempotency_conflict");
    }
    assert_eq!(store.len(), 1);
    for route in &routes {
        assert_eq!(route.dispositions().get(Disposition::Replayed), 3);
        assert_eq!(route.dispositions().get(Disposition::Conflict), 3);
    }

    // What one of them is doing, all of them wait for.
    let gate = crate::support::Gate::default();
    let stack = Stack::new(&routes[2], {
        let gate = gate.clone();
        move |_, _| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Ok(with_header(text(500, "failed"), "x-route", "stripe"))
            }
        }
    });
    let running = stack.spawn(keyed("\"running\"", "{}"));
    gate.reached_by(1).await;
    assert_eq!(routes[0].drain(Duration::ZERO).await, 1);
    let waiting = stacks[1].spawn(keyed("\"running\"", "{}"));
    gate.open();
    assert_eq!(running.await.unwrap().text(), "failed");
    let waited = waiting.await.unwrap();
    assert_eq!((waited.text(), waited.header("x-route")), ("failed", Some("stripe")));
    assert_eq!(routes[1].drain(Duration::ZERO).await, 0);
}
