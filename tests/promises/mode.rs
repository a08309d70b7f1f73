//! The mode can be switched while requests come in: in the shadow everything is counted and kept as
//! it would be and every request runs, and switched off the layer is not there.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full, Limited};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    Ceiling, Disposition, Handle, IdempotencyKey, IdempotencyLayer, InFlight, MemoryStore, Mode,
    OnFailure, PermitSlot, RequestBody, StoredResponse, scope, store::Ownership,
};

use crate::support::{
    Answer, Gate,
    call::Call,
    cue::{Cue, CueStore},
    keyed, send,
    stack::{AnyBody, Inner, Script, Stack, Step, any, layer, text, with_header},
    unkeyed, within,
};

fn reached(layer: &IdempotencyLayer) -> Vec<(Disposition, u64)> {
    layer.dispositions().iter().filter(|(_, count)| *count > 0).collect()
}

fn with_key(key: &str, request: Request<Full<Bytes>>) -> Request<AnyBody> {
    let mut request = request.map(any);
    request.headers_mut().insert("idempotency-key", key.parse().unwrap());
    request
}

fn of(script: Script) -> Request<AnyBody> {
    keyed("k", "").map(|_| any(script))
}

/// What a handler found of a request's body: its data, its trailers, and how it broke.
#[derive(Debug, PartialEq)]
struct Seen {
    data: Vec<u8>,
    trailers: Option<http::HeaderMap>,
    error: Option<String>,
}

async fn see<B>(mut body: B) -> Seen
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    let mut seen = Seen { data: Vec::new(), trailers: None, error: None };
    while let Some(frame) = body.frame().await {
        match frame.map(http_body::Frame::into_data) {
            Ok(Ok(data)) => seen.data.extend_from_slice(&data),
            Ok(Err(frame)) => seen.trailers = frame.into_trailers().ok(),
            Err(error) => seen.error = Some(error.to_string()),
        }
    }
    seen
}

/// Something that can happen: how the layer is set, how the handler's first run and all further
/// ones answer, and what is sent.
struct Scene {
    dispositions: &'static [Disposition],
    settings: fn(IdempotencyLayer) -> IdempotencyLayer,
    statuses: &'static [u16],
    requests: fn() -> Vec<Request<AnyBody>>,
    /// How many live entries there are in the end.
    entries: usize,
}

const LIMIT: usize = 10;

fn json(key: &str, body: &'static str) -> Request<AnyBody> {
    keyed(key, body).map(any)
}

fn scenes() -> Vec<Scene> {
    use Disposition as D;
    let scene = |dispositions, requests| Scene {
        dispositions,
        settings: |layer| layer,
        statuses: &[200],
        requests,
        entries: 1,
    };
    vec![
        scene(&[D::Executed], || vec![json("k", "{}")]),
        scene(&[D::Executed, D::Replayed, D::Replayed], || {
            vec![json("k", "{}"), json("k", "{}"), json("k", " {}")]
        }),
        scene(&[D::Executed, D::Conflict, D::Replayed], || {
            vec![json("k", "{}"), json("k", "[]"), json("k", "{}")]
        }),
        Scene {
            statuses: &[500, 404, 200],
            ..scene(&[D::Executed, D::Executed, D::Executed, D::Replayed], || {
                vec![json("k", "{}"), json("k", "{}"), json("k", "{}"), json("k", "{}")]
            })
        },
        Scene {
            settings: |layer| layer.on_failure(OnFailure::Hold),
            statuses: &[500],
            ..scene(&[D::Executed, D::OutcomeUnknown, D::Conflict], || {
                vec![json("k", "{}"), json("k", "{}"), json("k", "[]")]
            })
        },
        Scene {
            settings: |layer| layer.response_limit(1),
            ..scene(&[D::Executed, D::NotReplayable], || vec![json("k", "{}"), json("k", "{}")])
        },
        Scene {
            entries: 0,
            ..scene(&[D::RejectedKey, D::RejectedKey, D::RejectedKey], || {
                let mut twice = json("k", "{}");
                twice.headers_mut().append("idempotency-key", "l".parse().unwrap());
                vec![with_key("", unkeyed("{}")), with_key("a b", unkeyed("{}")), twice]
            })
        },
        Scene {
            settings: |layer| layer.key_required(true),
            entries: 0,
            ..scene(&[D::RejectedKey], || vec![unkeyed("{}").map(any)])
        },
        Scene { entries: 0, ..scene(&[D::Passed], || vec![unkeyed("{}").map(any)]) },
        Scene {
            settings: |_| IdempotencyLayer::new(|_| None),
            entries: 0,
            ..scene(&[D::RejectedScope], || vec![json("k", "{}")])
        },
        Scene {
            entries: 0,
            ..scene(&[D::TooLarge, D::TooLarge, D::TooLarge], || {
                let chunks = || ["12345", "67890", "1"].map(Step::data);
                let declared = with_key("k", unkeyed("12345678901"));
                vec![declared, of(Script::new(chunks())), of(Script::unknown_length("12345678901"))]
            })
        },
        Scene {
            entries: 0,
            ..scene(&[D::Unreadable, D::Unreadable], || {
                let broken = || Script::new([Step::data("half"), Step::Break]);
                vec![of(broken()), of(Script::new([Step::Sleep(SLOW), Step::data("late")]))]
            })
        },
        Scene {
            settings: |layer| {
                layer.guard(|parts| {
                    let is_in = !parts.headers.contains_key("x-out");
                    is_in.then(|| tower_idempotency::Permit::new(()))
                })
            },
            entries: 0,
            ..scene(&[D::Ceiling, D::Ceiling], || {
                [json("k", "{}"), unkeyed("{}").map(any)]
                    .map(|mut request| {
                        request.headers_mut().insert("x-out", "1".parse().unwrap());
                        request
                    })
                    .into()
            })
        },
        scene(&[D::Executed, D::Capacity, D::Replayed], || {
            vec![json("k", "{}"), json("another", "{}"), json("k", "{}")]
        }),
    ]
}

const SLOW: Duration = Duration::from_secs(20);

#[tokio::test(start_paused = true)]
async fn in_the_shadow_everything_is_counted_and_kept_as_it_would_be_but_every_request_runs() {
    for mode in [Mode::Enforce, Mode::Shadow] {
        for Scene { dispositions, settings, statuses, requests, entries } in scenes() {
            let store: MemoryStore<StoredResponse> = MemoryStore::new().capacity(1);
            let layer = layer().0.store(store.clone()).request_limit(LIMIT);
            let layer = settings(layer).mode(mode);
            let stack = Stack::answering(&layer, statuses);
            let mut answers: Vec<Answer> = Vec::new();
            for request in requests() {
                answers.push(stack.send(request).await);
            }
            let mut counted = Vec::new();
            for disposition in Disposition::ALL {
                let times = dispositions.iter().filter(|reached| *reached == disposition).count();
                if times > 0 {
                    counted.push((*disposition, times as u64));
                }
            }
            assert_eq!(reached(&layer), counted, "{mode:?}");
            assert_eq!((store.len(), store.in_flight()), (entries, 0), "{dispositions:?}");
            if mode == Mode::Shadow {
                assert_eq!(stack.runs.count(), answers.len(), "{dispositions:?}");
                for (run, answer) in (1..).zip(answers) {
                    assert_eq!(answer.text(), format!("run {run}"));
                    let status = statuses.get(run - 1).or(statuses.last());
                    assert_eq!(Some(&answer.status.as_u16()), status);
                    assert!(!answer.is_replay());
                }
            }
        }
    }
}

#[tokio::test]
async fn in_the_shadow_the_store_may_fail_and_every_request_runs() {
    for call in [Call::Lookup, Call::Claim] {
        let store = CueStore::default();
        store.cue(call, Cue::Fail);
        // With a guard, which needs the look-up.
        let layer = layer().0.store(store).ceiling(&Ceiling::new(8)).mode(Mode::Shadow);
        let stack = Stack::numbered(&layer);
        assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
        assert_eq!(reached(&layer), [(Disposition::StoreUnavailable, 1)]);
    }
}

#[tokio::test]
async fn in_the_shadow_a_repeat_runs_beside_the_first_and_is_counted_as_in_progress() {
    for in_flight in [InFlight::Reject, InFlight::Wait(Duration::from_secs(10))] {
        let gate = Gate::default();
        let (layer, store) = layer();
        let layer = layer.in_flight(in_flight).mode(Mode::Shadow);
        let stack = Stack::waiting_at(&gate, 1, &layer);
        let first = stack.spawn(keyed("k", "{}"));
        gate.reached_by(1).await;
        assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
        assert_eq!(stack.send(keyed("k", "[]")).await.text(), "run 3");
        assert_eq!((store.in_flight(), store.len()), (1, 1), "they touch nothing of it");
        gate.open();
        assert_eq!(first.await.unwrap().text(), "run 1");
        let counts =
            [(Disposition::Conflict, 1), (Disposition::InProgress, 1), (Disposition::Executed, 1)];
        assert_eq!(reached(&layer), counts);
        // What it kept is the first answer, as it would be.
        layer.set_mode(Mode::Enforce);
        let again = stack.send(keyed("k", "{}")).await;
        assert_eq!((again.text(), again.is_replay()), ("run 1", true));
    }
}

#[tokio::test]
async fn in_the_shadow_a_ceiling_that_is_full_lets_everything_through_and_takes_nothing() {
    let ceiling = Ceiling::new(1);
    let (layer, store) = layer();
    let layer = layer.ceiling(&ceiling).mode(Mode::Shadow);
    let stack = Stack::new(&layer, |run, request: Inner| async move {
        let slot = request.extensions().get::<PermitSlot>().expect("a slot, as ever");
        Ok(text(200, format!("run {run}, {}", slot.take_permit().is_some())))
    });
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1, true");
    let place = ceiling.try_acquire();
    assert_eq!(stack.send(keyed("new", "{}")).await.text(), "run 2, false");
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 3, false");
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 4, false", "it would be a replay");
    drop(place);
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 5, true");
    assert_eq!((ceiling.active(), store.len()), (0, 1));
    let counts = [
        (Disposition::Passed, 1),
        (Disposition::Ceiling, 2),
        (Disposition::Replayed, 1),
        (Disposition::Executed, 1),
    ];
    assert_eq!(reached(&layer), counts);
}

#[tokio::test]
async fn in_the_shadow_work_that_finds_the_guard_full_after_its_claim_gives_the_key_back() {
    let asked = crate::support::Runs::default();
    let (layer, store) = layer();
    let layer = layer.mode(Mode::Shadow).guard(move |_| {
        // Asked before the body, there is room; after the claim there is none.
        (asked.run() % 2 == 1).then(|| tower_idempotency::Permit::new(()))
    });
    let stack = Stack::numbered(&layer);
    for run in 1..=2 {
        assert_eq!(stack.send(keyed("k", "{}")).await.text(), format!("run {run}"));
        assert_eq!(store.len(), 0);
    }
    assert_eq!(reached(&layer), [(Disposition::Ceiling, 2)]);
}

/// A body, as often as it is wanted.
type Make = fn() -> Script;

#[tokio::test(start_paused = true)]
async fn in_the_shadow_every_body_reaches_the_handler_byte_for_byte_as_without_the_layer() {
    const BODIES: &[(Make, Disposition)] = &[
        (|| Script::new([]), Disposition::Executed),
        (|| Script::new(["", "one", "", "two"].map(Step::data)), Disposition::Executed),
        (|| Script::new([Step::data("one"), Step::trailer("x-sum", "1")]), Disposition::Executed),
        // Broken at once, midway, behind its trailers.
        (|| Script::new([Step::Break]), Disposition::Unreadable),
        (|| Script::new([Step::data("half"), Step::Break]), Disposition::Unreadable),
        (
            || Script::new([Step::data("half"), Step::trailer("x-sum", "1"), Step::Break]),
            Disposition::Unreadable,
        ),
        // Slow at once, midway, behind its trailers; and what is slow may break.
        (|| Script::new([Step::Sleep(SLOW), Step::data("late")]), Disposition::Unreadable),
        (
            || {
                let late = [Step::Sleep(SLOW), Step::data("late"), Step::trailer("x-sum", "1")];
                Script::new([Step::data("early")].into_iter().chain(late))
            },
            Disposition::Unreadable,
        ),
        (
            || {
                let early = [Step::data("early"), Step::trailer("x-sum", "1")];
                Script::new(early.into_iter().chain([Step::Sleep(SLOW)]))
            },
            Disposition::Unreadable,
        ),
        (
            || Script::new([Step::data("early"), Step::Sleep(SLOW), Step::Break]),
            Disposition::Unreadable,
        ),
        // Trickling, over the time for all of it.
        (
            || {
                let second = [0; 70].map(|_| [Step::Sleep(SLOW / 20), Step::data("x")]);
                Script::new(second.into_iter().flatten().chain([Step::trailer("x-sum", "1")]))
            },
            Disposition::Unreadable,
        ),
        // Too large by its word, in one frame, in the last of many; and what is too large may break.
        (|| Script::new([Step::data("x".repeat(300))]).says(300), Disposition::TooLarge),
        (|| Script::new([Step::data("x".repeat(300))]), Disposition::TooLarge),
        (
            || {
                let frames = [0; 300].map(|_| Step::data("y"));
                Script::new(frames.into_iter().chain([Step::trailer("x-sum", "1")]))
            },
            Disposition::TooLarge,
        ),
        (
            || Script::new([Step::data("z".repeat(101)), Step::data("z"), Step::Break]),
            Disposition::TooLarge,
        ),
    ];
    for (body, disposition) in BODIES {
        let (layer, store) = layer();
        let layer = layer.request_limit(100).mode(Mode::Shadow);
        let (sender, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let stack = Stack::new(&layer, move |_, request: Inner| {
            let sender = sender.clone();
            async move {
                let exact = request.body().size_hint().exact();
                sender.send((exact, see(request.into_body()).await)).unwrap();
                Ok(text(200, ""))
            }
        });
        let call = stack.service.clone().oneshot(of(body()).map(any));
        assert_eq!(call.await.unwrap().status(), 200);
        let (exact, seen) = seen.try_recv().unwrap();
        assert_eq!(seen, see(body()).await);
        if let Some(exact) = exact {
            assert_eq!(exact, seen.data.len() as u64);
        }
        assert_eq!(reached(&layer), [(*disposition, 1)], "{seen:?}");
        assert_eq!(store.len(), usize::from(*disposition == Disposition::Executed));
    }
}

#[tokio::test]
async fn in_the_shadow_a_body_that_does_not_fit_the_buffer_reaches_the_handler_whole() {
    let (layer, _) = layer();
    let layer = layer.request_limit(10).buffered_bytes(10).mode(Mode::Shadow);
    let stack = Stack::new(&layer, |_, request: Inner| async move {
        Ok(text(200, see(request.into_body()).await.data))
    });
    let gate = Gate::default();
    let waiting = [Step::data("123456"), Step::Pass(gate.clone())];
    let first = stack.spawn(of(Script::new(waiting)));
    gate.reached_by(1).await;
    let frames = ["1", "2345", "67"].map(Step::data);
    let other = keyed("other", "").map(|_| any(Script::new(frames)));
    assert_eq!(stack.send(other).await.text(), "1234567");
    assert_eq!(reached(&layer), [(Disposition::Capacity, 1)]);
    gate.open();
    assert_eq!(first.await.unwrap().text(), "123456");
}

#[tokio::test]
async fn in_the_shadow_a_limit_further_out_is_counted_as_too_large() {
    type Outer = Limited<Full<Bytes>>;
    for mode in [Mode::Enforce, Mode::Shadow] {
        let (layer, _) = layer();
        let layer = layer.mode(mode);
        let service = layer.layer(service_fn(|request: Request<RequestBody<Outer>>| async {
            let seen = see(request.into_body()).await;
            Ok::<_, Infallible>(Response::new(Full::from(seen.error.unwrap_or_default())))
        }));
        let request = keyed("k", "12345").map(|body| Limited::new(body, 4));
        let answer = send(&service, request).await;
        assert_eq!(answer.text() == "length limit exceeded", mode == Mode::Shadow);
        assert_eq!(reached(&layer), [(Disposition::TooLarge, 1)], "{mode:?}");
    }

    for mode in [Mode::Enforce, Mode::Shadow] {
        let (layer, _) = layer();
        let layer = layer.mode(mode);
        let service =
            layer.layer(service_fn(|request: Request<RequestBody<axum::body::Body>>| async {
                drop(request);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }));
        let request = keyed("k", "12345");
        let request = request.map(|body| axum::body::Body::new(Limited::new(body, 4)));
        send(&service, request).await;
        assert_eq!(reached(&layer), [(Disposition::TooLarge, 1)], "{mode:?}");
    }
}

#[tokio::test]
async fn in_the_shadow_a_handler_that_runs_beside_an_entry_finds_a_handle_that_changes_nothing() {
    let (layer, store) = layer();
    let layer = layer.mode(Mode::Shadow);
    let stack = Stack::new(&layer, |run, request: Inner| async move {
        let handle = request.extensions().get::<Handle>().expect("a handle").clone();
        assert_eq!(request.extensions().get::<IdempotencyKey>().expect("a key").as_str(), "k");
        if run == 1 {
            return Ok(text(200, handle.operation_id().to_string()));
        }
        handle.effects_begin();
        let lost = [
            handle.expire().await.unwrap(),
            handle.retain_for(Duration::from_secs(1)).await.unwrap(),
        ];
        assert_eq!(lost, [Ownership::Lost; 2]);
        assert!(handle.take_permit().is_none());
        Ok(text(500, handle.operation_id().to_string()))
    });
    let first = stack.send(keyed("k", "{}")).await;
    for body in ["{}", "[]", "{}"] {
        let beside = stack.send(keyed("k", body)).await;
        assert_eq!((beside.status.as_u16(), beside.text()), (500, first.text()));
    }
    assert_eq!(store.len(), 1);
    layer.set_mode(Mode::Enforce);
    assert!(stack.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test]
async fn in_the_shadow_the_layer_may_be_there_twice_and_counts_once() {
    let (layer, store) = layer();
    let layer = layer.mode(Mode::Shadow);
    let handler =
        crate::support::stack::Handler::new(
            |run, _| async move { Ok(text(200, format!("run {run}"))) },
        );
    let service = layer.layer(
        tower::ServiceBuilder::new()
            .map_request(|request: Inner| request.map(any))
            .map_response(|response: Response<tower_idempotency::ResponseBody<AnyBody>>| {
                response.map(any)
            })
            .layer(layer.clone())
            .service(handler),
    );
    for (run, body) in [(1, "{}"), (2, "{}"), (3, "[]")] {
        let answer = send(&service, keyed("k", body).map(any)).await;
        assert_eq!(answer.text(), format!("run {run}"));
    }
    let counts =
        [(Disposition::Conflict, 1), (Disposition::Replayed, 1), (Disposition::Executed, 1)];
    assert_eq!((reached(&layer), store.len()), (counts.to_vec(), 1));
}

#[tokio::test]
async fn in_the_shadow_a_caller_that_leaves_does_not_undo_what_is_kept() {
    let gate = Gate::default();
    let (layer, store) = layer();
    let layer = layer.mode(Mode::Shadow);
    let stack = Stack::new(&layer, {
        let gate = gate.clone();
        move |_, _| {
            let script = Script::new([Step::data("one"), Step::Pass(gate.clone())]);
            async { Ok(Response::new(any(script))) }
        }
    });
    let caller = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    caller.abort();
    gate.open();
    assert_eq!(within(layer.drain(Duration::from_secs(30))).await, 0);
    assert_eq!((store.len(), store.in_flight()), (1, 0));
}

#[tokio::test]
async fn switched_off_everything_passes_untouched_and_is_counted_as_passed() {
    let (layer, store) = layer();
    let ceiling = Ceiling::new(1);
    let _place = ceiling.try_acquire();
    let layer = layer
        .ceiling(&ceiling)
        .key_required(true)
        .request_limit(4)
        .only(|_| unreachable!("nobody is asked"))
        .mode(Mode::Off);
    let stack = Stack::new(&layer, |run, request: Inner| async move {
        // What a handler may ask for is there, and says that nothing is protected.
        let extensions = request.extensions();
        let is_guarded = request.method() != Method::GET;
        assert_eq!(extensions.get::<PermitSlot>().is_some(), is_guarded);
        assert!(extensions.get::<PermitSlot>().and_then(PermitSlot::take_permit).is_none());
        let key = request.headers().get("idempotency-key").filter(|key| *key == "k" && is_guarded);
        assert_eq!(extensions.get::<IdempotencyKey>().is_some(), key.is_some());
        assert_eq!(extensions.get::<Handle>().is_some(), key.is_some());
        if let Some(handle) = extensions.get::<Handle>() {
            assert_eq!(handle.expire().await.unwrap(), Ownership::Lost);
        }
        let seen = see(request.into_body()).await;
        Ok(with_header(text(200, format!("run {run}, {} bytes", seen.data.len())), "x", "y"))
    });
    let mut get = keyed("k", "").map(any);
    *get.method_mut() = Method::GET;
    let requests: Vec<(Request<AnyBody>, usize)> = vec![
        (json("k", "{}"), 2),
        (json("k", "{}"), 2),
        (json("k", "[1]"), 3),
        (unkeyed("").map(any), 0),
        (with_key("not a key", unkeyed("")), 0),
        (json("k", "12345"), 5),
        (get, 0),
    ];
    let all = requests.len();
    for (run, (request, bytes)) in (1..).zip(requests) {
        let answer = stack.send(request).await;
        assert_eq!(answer.text(), format!("run {run}, {bytes} bytes"));
        assert!(!answer.is_replay());
    }
    assert_eq!(reached(&layer), [(Disposition::Passed, all as u64)]);
    assert!(store.is_empty());
}

#[tokio::test]
async fn switched_off_a_hook_that_panics_breaks_nothing() {
    let bugs: [IdempotencyLayer; 3] = [
        IdempotencyLayer::new(|_| panic!("a hook with a bug")),
        layer().0.key(|_| panic!("a hook with a bug")),
        layer().0.guard(|_| panic!("a hook with a bug")),
    ];
    for layer in bugs {
        let stack = Stack::numbered(&layer.mode(Mode::Off));
        assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 1");
        assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 2");
    }
}

#[tokio::test]
async fn switched_off_a_body_streams_through_unread() {
    let layer = layer().0.mode(Mode::Off);
    let stack = Stack::new(&layer, |_, _| async { Ok(text(200, "unread")) });
    let body = Script::new([Step::Forever(|| Step::data("x"))]);
    let polls = body.polls();
    assert_eq!(stack.send(of(body)).await.text(), "unread");
    assert_eq!(polls.count(), 0);
}

#[tokio::test]
async fn the_mode_is_switched_for_all_clones_and_all_services_that_are_there() {
    let (layer, store) = layer();
    let clone = layer.clone().key_required(true);
    let stacks = [Stack::numbered(&layer), Stack::numbered(&clone)];
    for (mode, switch) in [
        (Mode::Off, &layer),
        (Mode::Shadow, &clone),
        (Mode::Enforce, &layer),
        (Mode::Off, &clone),
        (Mode::Enforce, &clone),
    ] {
        switch.set_mode(mode);
        for stack in &stacks {
            store.clear();
            let runs = stack.runs.count();
            stack.send(keyed("k", "{}")).await;
            let again = stack.send(keyed("k", "{}")).await;
            assert_eq!(again.is_replay(), mode == Mode::Enforce, "{mode:?}");
            assert_eq!(stack.runs.count() - runs, if mode == Mode::Enforce { 1 } else { 2 });
            assert_eq!(store.len(), usize::from(mode != Mode::Off), "{mode:?}");
        }
    }
}

#[tokio::test]
async fn a_layer_whose_mode_is_set_is_switched_with_its_own_clones_only() {
    let (layer, _) = layer();
    let other = layer.clone().mode(Mode::Shadow);
    let clone = other.clone();
    let stacks = [&layer, &other, &clone].map(Stack::numbered);
    let refused =
        async |stack: &Stack| stack.send(with_key("not a key", unkeyed(""))).await.status == 400;
    assert_eq!([refused(&stacks[0]).await, refused(&stacks[1]).await], [true, false]);
    clone.set_mode(Mode::Enforce);
    assert!(refused(&stacks[1]).await && refused(&stacks[2]).await);
    other.set_mode(Mode::Off);
    assert!(refused(&stacks[0]).await && !refused(&stacks[2]).await);
}

#[tokio::test]
async fn requests_on_their_way_go_on_as_they_began_when_the_mode_is_switched() {
    let on_its_way: [(Mode, Mode, fn(&Answer) -> bool); 4] = [
        (Mode::Enforce, Mode::Off, Answer::is_replay),
        (Mode::Enforce, Mode::Shadow, Answer::is_replay),
        (Mode::Off, Mode::Enforce, |answer| answer.text() == "run 2"),
        (Mode::Shadow, Mode::Enforce, |answer| answer.text() == "run 2"),
    ];
    for (before, after, is_right) in on_its_way {
        let (layer, _) = layer();
        let stack = Stack::new(&layer, |run, request: Inner| async move {
            see(request.into_body()).await;
            Ok(text(200, format!("run {run}")))
        });
        stack.send(keyed("k", "{}")).await;
        layer.set_mode(before);
        let gate = Gate::default();
        let body = Script::new([Step::data("{}"), Step::Pass(gate.clone())]);
        let repeat = stack.spawn(of(body));
        gate.reached_by(1).await;
        layer.set_mode(after);
        gate.open();
        assert!(is_right(&repeat.await.unwrap()), "{before:?} {after:?}");
    }
}

#[tokio::test]
async fn switched_on_again_an_execution_that_began_before_is_still_protected() {
    let gate = Gate::default();
    let store: MemoryStore<StoredResponse> = MemoryStore::new();
    let layer = IdempotencyLayer::new(scope::single_tenant()).store(store.clone());
    let stack = Stack::waiting_at(&gate, 1, &layer);
    let first = stack.spawn(keyed("k", "{}"));
    gate.reached_by(1).await;
    layer.set_mode(Mode::Off);
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "run 2");
    layer.set_mode(Mode::Enforce);
    let repeat = stack.spawn(keyed("k", "{}"));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!repeat.is_finished());
    gate.open();
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert_eq!(repeat.await.unwrap().text(), "run 1");
    assert_eq!((stack.runs.count(), store.len()), (2, 1));
}
