//! Settings: impossible values are refused by name, and what is set can be read without secrets.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use http::{HeaderName, Method, StatusCode};
use tower_idempotency::{
    Ceiling, Disposition, Dispositions, Fingerprint, Handle, Idempotency, IdempotencyKey,
    IdempotencyLayer, InFlight, MemoryStore, Mode, OnFailure, OnLeave, OperationId, Permit,
    PermitSlot, Reason, Refusal, RequestBody, ResponseBody, ResponseFuture, Scope, StoredResponse,
    Token, scope,
};

use crate::support::{
    Gate, assert_impossible, keyed,
    stack::{AnyBody, Handler, Stack, layer, text},
};

#[test]
fn impossible_values_are_refused_by_name() {
    let layer = || IdempotencyLayer::new(scope::single_tenant());
    let zero = Duration::ZERO;
    assert_impossible("retention", || layer().retention(zero));
    assert_impossible("methods", || layer().methods([]));
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::CONNECT] {
        assert_impossible("methods", || layer().methods([Method::POST, method]));
    }
    assert_impossible("fingerprint_json_only", || layer().fingerprint_json_only([""; 0]));
    assert_impossible("fingerprint_json_except", || layer().fingerprint_json_except(["/a", ""]));
    for pointer in ["amount", "#/amount", "$.amount", "/a~", "/a~2"] {
        assert_impossible("fingerprint_json_only", || layer().fingerprint_json_only([pointer]));
        assert_impossible("fingerprint_json_except", || layer().fingerprint_json_except([pointer]));
    }
    assert_impossible("request_limit", || layer().request_limit(0));
    assert_impossible("buffered_bytes", || layer().buffered_bytes(0));
    assert_impossible("waiters", || layer().waiters(0, 1));
    assert_impossible("waiters", || layer().waiters(2, 1));
    assert_impossible("refusal_status", || {
        layer().refusal_status(Reason::Conflict, StatusCode::FOUND)
    });
    assert_impossible("refusal_status", || {
        layer().refusal_status(Reason::Conflict, StatusCode::OK)
    });
    assert_impossible("documentation", || layer().documentation("no URI at all"));
    assert_impossible("documentation", || layer().documentation("https://a.example/\r\nx: y"));
    assert_impossible("documentation", || layer().documentation(""));
    assert_impossible("response_limit", || layer().response_limit(0));
    assert_impossible("body_idle_timeout", || layer().body_idle_timeout(zero));
    assert_impossible("body_timeout", || layer().body_timeout(zero));
    assert_impossible("in_flight", || layer().in_flight(InFlight::Wait(zero)));
    assert_impossible("finish_within", || layer().finish_within(zero));
    assert_impossible("store_timeout", || layer().store_timeout(zero));
    assert_impossible("capacity", || MemoryStore::<StoredResponse>::new().capacity(0));
    assert_impossible("ceiling", || Ceiling::new(0));
    assert_impossible("ceiling", || Ceiling::new(usize::MAX));
}

/// The message with which the layer refuses to be put around a service.
#[track_caller]
fn refused_when_built(layer: &IdempotencyLayer) -> String {
    let built = catch_unwind(AssertUnwindSafe(|| drop(tower::Layer::layer(layer, ()))));
    *built.expect_err("it is built").downcast::<String>().unwrap()
}

#[test]
fn a_wait_longer_than_any_execution_runs_is_refused_when_built_and_both_settings_are_named() {
    let second = Duration::from_secs(1);
    let layer = || IdempotencyLayer::new(scope::single_tenant());
    // In whatever order they are set, and where one is a default.
    for layer in [
        layer().finish_within(5 * second).in_flight(InFlight::Wait(6 * second)),
        layer().in_flight(InFlight::Wait(6 * second)).finish_within(5 * second),
        layer().finish_within(9 * second),
        layer().in_flight(InFlight::Wait(301 * second)),
    ] {
        let message = refused_when_built(&layer);
        assert!(message.starts_with("in_flight: "), "{message}");
        assert!(message.contains("finish_within"), "{message}");
    }
    for layer in [
        layer().finish_within(6 * second).in_flight(InFlight::Wait(6 * second)),
        layer().finish_within(second).in_flight(InFlight::Reject),
        layer().in_flight(InFlight::Wait(300 * second)),
    ] {
        tower::Layer::layer(&layer, ());
    }
}

#[test]
fn one_body_that_does_not_fit_the_buffer_is_refused_when_built_and_both_settings_are_named() {
    let layer = || IdempotencyLayer::new(scope::single_tenant());
    for layer in [
        layer().request_limit(11).buffered_bytes(10),
        layer().buffered_bytes(10).request_limit(11),
        layer().buffered_bytes(1024 * 1024 - 1),
        layer().request_limit(64 * 1024 * 1024 + 1),
    ] {
        let message = refused_when_built(&layer);
        assert!(message.starts_with("buffered_bytes: "), "{message}");
        assert!(message.contains("request_limit"), "{message}");
    }
    for layer in [layer().request_limit(10).buffered_bytes(10), layer().buffered_bytes(1024 * 1024)]
    {
        tower::Layer::layer(&layer, ());
    }
}

#[tokio::test]
async fn the_smallest_and_the_largest_values_work() {
    let smallest = Duration::from_nanos(1);
    for (time, number) in [(smallest, 2), (Duration::MAX, usize::MAX)] {
        let layer = IdempotencyLayer::new(scope::single_tenant())
            .store(MemoryStore::new().capacity(number))
            .retention(time)
            .request_limit(number)
            .buffered_bytes(number)
            .response_limit(number)
            .waiters(number, number)
            .body_idle_timeout(time)
            .body_timeout(time)
            .in_flight(InFlight::Wait(time))
            .finish_within(time)
            .store_timeout(time)
            .on_leave(OnLeave::Finish);
        let stack = Stack::new(&layer, |_, _| async { Ok(text(200, "")) });
        for _ in 0..2 {
            assert_eq!(stack.send(keyed("k", "{}")).await.status, 200);
        }
    }
}

#[tokio::test]
async fn a_wait_too_long_for_a_clock_is_a_wait() {
    let gate = Gate::default();
    let (layer, _) = layer();
    let layer = layer.in_flight(InFlight::Wait(Duration::MAX)).finish_within(Duration::MAX);
    let stack = Stack::waiting_at(&gate, usize::MAX, &layer);
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    let repeat = stack.spawn(keyed("k", "{}"));
    tokio::task::yield_now().await;
    gate.open();
    first.await.unwrap();
    assert_eq!(repeat.await.unwrap().text(), "run 1");
}

#[test]
fn what_is_set_can_be_read() {
    let layer = IdempotencyLayer::new(scope::single_tenant())
        .methods([Method::PUT])
        .key_header(HeaderName::from_static("x-token"))
        .key_required(true)
        .key_strict(true)
        .ceiling(&Ceiling::new(77))
        .request_limit(1_234)
        .response_limit(4_321)
        .retention(Duration::from_secs(99))
        .fingerprint_headers([HeaderName::from_static("x-session-key")])
        .fingerprint_json_only(["/amount"])
        .on_failure(OnFailure::Hold)
        .on_leave(OnLeave::Cancel)
        .in_flight(InFlight::Reject)
        .body_idle_timeout(Duration::from_secs(11))
        .body_timeout(Duration::from_secs(22))
        .store_timeout(Duration::from_secs(33))
        .finish_within(Duration::from_secs(44))
        .mode(Mode::Shadow)
        .record_streams(false)
        .buffered_bytes(987_654)
        .waiters(3, 55);
    let service = tower::Layer::layer(&layer, ());
    for text in [format!("{layer:?}"), format!("{service:?}")] {
        for set in [
            "PUT",
            "x-token",
            "key_required: true",
            "strict: true",
            "limit: 77",
            "1234",
            "4321",
            "retention: 99s",
            "x-session-key",
            "/amount",
            "Hold",
            "Cancel",
            "Reject",
            "11s",
            "22s",
            "33s",
            "44s",
            "mode: Shadow",
            "record_streams: false",
            "buffered_bytes: 987654",
            "waiters_per_operation: 3",
            "waiters: 55",
        ] {
            assert!(text.contains(set), "{set}: {text}");
        }
    }
}

#[tokio::test]
async fn a_setter_changes_the_layer_it_is_called_on_and_its_clones_share_the_rest() {
    let (layer, store) = layer();
    let required = layer.clone().key_required(true);
    let (plain, strict) = (Stack::numbered(&layer), Stack::numbered(&required));
    assert_eq!(plain.send(crate::support::unkeyed("{}")).await.status, 200);
    assert_eq!(strict.send(crate::support::unkeyed("{}")).await.status, 400);
    // One store, one count.
    plain.send(keyed("k", "{}")).await;
    assert!(strict.send(keyed("k", "{}")).await.is_replay());
    assert_eq!(store.len(), 1);
    for layer in [&layer, &required] {
        let counts = layer.dispositions();
        assert_eq!(counts.get(Disposition::RejectedKey), 1);
        assert_eq!(counts.get(Disposition::Replayed), 1);
    }
}

#[tokio::test]
async fn services_of_one_layer_share_its_store_and_those_of_two_do_not() {
    let one = IdempotencyLayer::new(scope::single_tenant());
    let other = IdempotencyLayer::new(scope::single_tenant());
    let stacks = [Stack::numbered(&one), Stack::numbered(&one.clone()), Stack::numbered(&other)];
    for (stack, is_replay) in stacks.iter().zip([false, true, false]) {
        assert_eq!(stack.send(keyed("k", "{}")).await.is_replay(), is_replay);
    }
}

#[test]
fn everything_goes_where_tasks_need_it() {
    fn send_and_sync<T: Send + Sync + 'static>() {}
    fn send<T: Send + 'static>() {}
    fn unpin<T: Unpin>() {}

    send_and_sync::<IdempotencyLayer>();
    send_and_sync::<Idempotency<Handler>>();
    send::<ResponseFuture<Handler, AnyBody, AnyBody>>();
    send::<RequestBody<AnyBody>>();
    send::<ResponseBody<AnyBody>>();
    unpin::<ResponseBody<AnyBody>>();
    send_and_sync::<MemoryStore<StoredResponse>>();
    send_and_sync::<StoredResponse>();
    send_and_sync::<Dispositions>();
    send_and_sync::<Ceiling>();
    send::<Permit>();
    send_and_sync::<PermitSlot>();
    send_and_sync::<Handle>();
    send_and_sync::<IdempotencyKey>();
    send_and_sync::<Refusal>();
    send_and_sync::<(Scope, OperationId, Token, Fingerprint)>();
}
