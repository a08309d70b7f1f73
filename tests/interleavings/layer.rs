//! The whole layer: what a handler says while its claim ends, permits, bodies and counts, each
//! given back or counted once.

use std::{
    convert::Infallible,
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use shuttle::{future::block_on, thread};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    Ceiling, Disposition, Handle, IdempotencyLayer, MemoryStore, PermitSlot, RequestBody,
    StoredResponse, scope, store::Ownership,
};

use crate::{
    explore::explore,
    scene::{all, job, key, pause, with_runtime},
};

type Inner = Request<RequestBody<Full<Bytes>>>;
type Called = Result<Response<Full<Bytes>>, Infallible>;

fn layer() -> (IdempotencyLayer, MemoryStore<StoredResponse>) {
    let store = MemoryStore::new();
    (IdempotencyLayer::new(scope::single_tenant()).store(store.clone()), store)
}

/// Sends a request through the layer around `handle`; the answer's status and body.
fn send<R>(
    layer: &IdempotencyLayer,
    key: &str,
    body: &'static str,
    handle: impl Fn(Inner) -> R + Clone + Send + 'static,
) -> (u16, Bytes)
where
    R: Future<Output = Called> + Send + 'static,
{
    let request = Request::post("/").header("idempotency-key", key.replace(' ', "-"));
    let request = request.body(Full::from(body)).expect("a request");
    let service = layer.layer(service_fn(handle));
    block_on(async move {
        let response = service.oneshot(request).await.expect("no error");
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.expect("a body").to_bytes())
    })
}

#[allow(clippy::unnecessary_wraps, reason = "what a handler returns")]
fn answer(body: impl Into<Bytes>) -> Called {
    Ok(Response::new(Full::new(body.into())))
}

/// A place where a handler leaves something for another thread.
#[derive(Clone)]
struct Left<T>(Arc<Mutex<Option<T>>>);

impl<T> Left<T> {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn leave(&self, thing: T) {
        *self.0.lock().expect("nobody panics in here") = Some(thing);
    }

    /// Waits for it.
    fn take(&self) -> T {
        loop {
            if let Some(thing) = self.0.lock().expect("nobody panics in here").take() {
                return thing;
            }
            thread::yield_now();
        }
    }
}

/// A request whose handler gives its handle away, and what others say through it meanwhile.
fn said_meanwhile<R>(
    layer: &IdempotencyLayer,
    say: impl Fn(Handle) -> R + Send + Clone + 'static,
) -> Vec<Ownership>
where
    R: Future<Output = Ownership>,
{
    let layer = layer.clone();
    let handles = [Left::new(), Left::new()];
    let given = handles.clone();
    let request = job(move || {
        let answered = send(&layer, "k", "", move |request| {
            let handle = request.extensions().get::<Handle>().expect("a handle").clone();
            for left in &given {
                left.leave(handle.clone());
            }
            async move {
                pause().await;
                answer("first")
            }
        });
        assert_eq!(answered.0, 200);
        None
    });
    let others = handles.map(|handle| {
        let say = say.clone();
        job(move || Some(block_on(say(handle.take()))))
    });
    all([request].into_iter().chain(others)).into_iter().flatten().collect()
}

#[test]
fn a_record_that_is_expired_while_it_is_written_is_gone() {
    explore(|| {
        with_runtime(|_| {
            let (layer, store) = layer();
            let said =
                said_meanwhile(
                    &layer,
                    |handle| async move { handle.expire().await.expect("no error") },
                );
            assert!(said.contains(&Ownership::Held), "nobody else ended it");
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (0, 0, 0));
        });
    });
}

#[test]
fn a_retention_that_is_said_while_the_record_is_written_counts() {
    explore(|| {
        with_runtime(|_| {
            const SOON: Duration = Duration::from_secs(10);
            let (layer, store) = layer();
            let said = said_meanwhile(&layer, |handle| async move {
                handle.retain_for(SOON).await.expect("no error")
            });
            assert_eq!(said, [Ownership::Held; 2], "there is a record, or will be one");
            assert_eq!(store.len(), 1);
            tokio::time::advance(SOON).now_or_never();
            assert_eq!((store.len(), store.bytes()), (0, 0), "it lives on as by default");
        });
    });
}

#[test]
fn a_permit_goes_to_one_or_back_and_once() {
    explore(|| {
        with_runtime(|_| {
            let ceiling = Ceiling::new(1);
            let layer = layer().0.ceiling(&ceiling);
            let slots = [Left::new(), Left::new()];
            let given = slots.clone();
            let sent = layer.clone();
            let request = job(move || {
                let answered = send(&sent, "k", "", move |request| {
                    let slot = request.extensions().get::<PermitSlot>().expect("a slot").clone();
                    for left in &given {
                        left.leave(slot.clone());
                    }
                    async move {
                        pause().await;
                        answer("")
                    }
                });
                assert_eq!(answered.0, 200);
                None
            });
            let takers = slots.map(|slot: Left<PermitSlot>| job(move || slot.take().take_permit()));
            let taken = all([request].into_iter().chain(takers));
            let taken: Vec<_> = taken.into_iter().flatten().collect();
            assert!(taken.len() <= 1, "there was one permit");
            assert_eq!(ceiling.active(), taken.len());
            drop(taken);
            assert_eq!(ceiling.active(), 0);
        });
    });
}

#[test]
fn no_more_run_than_there_are_permits_and_all_of_them_come_back() {
    explore(|| {
        with_runtime(|_| {
            let ceiling = Ceiling::new(2);
            let (layer, store) = layer();
            let layer = layer.ceiling(&ceiling);
            let (running, runs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            // Two of one key, so that a waiter is among them.
            let statuses = all([0, 0, 1, 2].map(|number| {
                let (layer, running, runs) = (layer.clone(), Arc::clone(&running), runs.clone());
                job(move || {
                    let handle = move |request: Inner| {
                        let running = Arc::clone(&running);
                        assert!(running.fetch_add(1, SeqCst) < 2, "more run than may");
                        runs.fetch_add(1, SeqCst);
                        let handle = request.extensions().get::<Handle>().cloned();
                        async move {
                            let permit = handle.filter(|_| number == 1).map(|it| it.take_permit());
                            pause().await;
                            running.fetch_sub(1, SeqCst);
                            drop(permit);
                            answer("")
                        }
                    };
                    send(&layer, key(number), "", handle).0
                })
            }));
            let refused = statuses.iter().filter(|status| **status == 429).count();
            assert!(statuses.iter().all(|status| matches!(status, 200 | 429)), "{statuses:?}");
            let runs = runs.load(SeqCst);
            assert!((1..=3).contains(&runs) && runs + refused <= 4);
            assert_eq!((ceiling.active(), store.len(), store.in_flight()), (0, runs, 0));
        });
    });
}

#[test]
fn the_room_for_bodies_is_never_exceeded_and_all_of_it_comes_back() {
    explore(|| {
        with_runtime(|_| {
            let layer = layer().0.request_limit(8).buffered_bytes(8);
            let taken = Arc::new(AtomicUsize::new(0));
            let statuses = all((0..3).map(|number| {
                let (layer, taken) = (layer.clone(), Arc::clone(&taken));
                job(move || {
                    let handle = move |request: Inner| {
                        let taken = Arc::clone(&taken);
                        // Until it is read, the body takes room.
                        assert!(
                            taken.fetch_add(4, SeqCst) <= 4,
                            "more room is taken than there is"
                        );
                        async move {
                            pause().await;
                            taken.fetch_sub(4, SeqCst);
                            let body = request.into_body().collect().await.expect("a body");
                            answer(body.to_bytes())
                        }
                    };
                    send(&layer, key(number), "body", handle).0
                })
            }));
            assert!(statuses.iter().all(|status| matches!(status, 200 | 503)), "{statuses:?}");
            assert!(statuses.contains(&200), "the first one has room");
            let all_of_it = send(&layer, "last", "8 bytes.", |_| async { answer("") });
            assert_eq!(all_of_it.0, 200, "some room did not come back");
        });
    });
}

#[test]
fn every_request_is_answered_alike_and_counted_once() {
    explore(|| {
        with_runtime(|_| {
            let (layer, store) = layer();
            let dispositions = layer.dispositions();
            let answers = all((0..4).map(|number: u8| {
                let layer = layer.clone();
                job(move || {
                    send(&layer, "k", "", move |_| async move {
                        pause().await;
                        answer(vec![number])
                    })
                })
            }));
            assert!(answers.iter().all(|said| *said == answers[0] && said.0 == 200), "{answers:?}");
            let repeats =
                dispositions.get(Disposition::Replayed) + dispositions.get(Disposition::Waited);
            assert_eq!((dispositions.get(Disposition::Executed), repeats), (1, 3));
            assert_eq!(dispositions.iter().map(|(_, count)| count).sum::<u64>(), 4);
            assert_eq!((store.len(), store.in_flight()), (1, 0));
        });
    });
}
