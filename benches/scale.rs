//! What many live entries and a second thread cost: `cargo bench --bench scale [-- ENTRIES ...]`.
//!
//! One service for each number of entries, all of them alive at once and measured in turn, round by
//! round; the figures are those of the quietest tenth. The keys of replays are drawn evenly from
//! all entries, so with a million of them the processor's caches hold next to nothing of what is
//! asked for. First calls are removed after each round, so the number of entries stays. Each thread
//! has a runtime of its own; they share the service. `machine` is what two threads do that share
//! nothing: what is possible here. `moka` is the map by itself, with keys and values of the same
//! sizes and as many entries, each with a deadline of its own: what it has of the time of a replay
//! and of the memory of an entry.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench that prints a table")]
#![allow(clippy::disallowed_methods, reason = "it measures real time")]
#![allow(clippy::cast_precision_loss, reason = "figures for a table")]

mod common;

use std::{
    convert::Infallible,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use common::{ANSWER, Answer, Sent, call, key, percentile};
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use moka::{Expiry, sync::Cache};
use tower::{Layer, Service};
use tower_idempotency::{
    Idempotency, IdempotencyLayer, MemoryStore, OperationId, Scope, StoredResponse,
};

const ROUNDS: usize = 201;
/// Calls of one thread in one round.
const BATCH: usize = 500;
const SCOPE: &str = "tenant";
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// moka by itself, with so many entries.
struct Moka {
    records: Cache<[u8; 32], [u64; 3]>,
    bytes: f64,
    gets: Vec<f64>,
}

struct ForADay;

impl Expiry<[u8; 32], [u64; 3]> for ForADay {
    fn expire_after_create(&self, _: &[u8; 32], _: &[u64; 3], _: Instant) -> Option<Duration> {
        Some(DAY)
    }
}

impl Moka {
    fn new(live: usize) -> Self {
        let before = resident();
        let records = Cache::builder().expire_after(ForADay).build();
        for number in 0..live {
            records.insert(Self::key(number), [1; 3]);
        }
        let bytes = (resident() - before) / live as f64;
        Self { records, bytes, gets: Vec::new() }
    }

    fn key(number: usize) -> [u8; 32] {
        *OperationId::new(&Scope::new(SCOPE), &number.to_string()).as_bytes()
    }

    fn round(&mut self, round: usize, live: usize) {
        let mut draw = Draw(round as u64);
        let keys: Vec<_> = (0..BATCH).map(|_| Self::key(draw.below(live))).collect();
        let start = Instant::now();
        for key in &keys {
            assert_eq!(self.records.get(key), Some([1; 3]));
        }
        self.gets.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
    }
}

/// Services with so many live entries, and what was measured of them.
struct Scale {
    live: usize,
    store: MemoryStore<StoredResponse>,
    service: Idempotency<Answer>,
    /// What an entry takes as the system sees it, the allocator's waste and all.
    bytes: f64,
    replays: Timed,
    firsts: Timed,
    moka: Moka,
}

/// Nanoseconds per call in each round, by one thread and by two at once.
#[derive(Default)]
struct Timed {
    one: Vec<f64>,
    two: Vec<f64>,
}

impl Timed {
    /// How much more two threads do than one.
    fn gain(&self) -> f64 {
        undisturbed(&self.one) / undisturbed(&self.two)
    }

    fn each(&mut self, mut measure: impl FnMut(usize) -> f64) {
        self.one.push(measure(1));
        self.two.push(measure(2));
    }
}

/// What a call takes while nobody else wants the processors: a tenth of the rounds took less.
/// (The rounds are short, so that some get through between what else runs here. Two threads need
/// both processors at once, which a median would never see on a machine that is shared.)
fn undisturbed(rounds: &[f64]) -> f64 {
    percentile(rounds, 10)
}

/// Evenly drawn numbers, the same in each run (a linear congruential generator).
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((u128::from(self.0) * end as u128) >> 64).unwrap()
    }
}

fn sent() -> Sent {
    Sent::new("application/json", 256)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

/// The memory that the system has given to this process, where it tells.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib * 1024.0)
}

/// Body, header names and header values of a record.
fn payload() -> usize {
    ANSWER.len() + "content-type".len() + "application/json".len()
}

impl Scale {
    fn new(live: usize) -> Self {
        let before = resident();
        let store =
            MemoryStore::new().capacity(live + ROUNDS * BATCH * 4).stored_bytes(usize::MAX / 2);
        let service = IdempotencyLayer::new(|_| Some(Scope::new(SCOPE)))
            .store(store.clone())
            .retention(DAY)
            .layer(Answer::new());
        let sent = sent();
        runtime().block_on(async {
            for number in 0..live {
                let request = sent.request::<Full<Bytes>>(Some(&key(number)));
                assert_eq!(call(&service, request).await, 202);
            }
        });
        assert_eq!(store.len(), live);
        let bytes = (resident() - before) / live as f64;
        let (replays, firsts) = (Timed::default(), Timed::default());
        Self { live, store, service, bytes, replays, firsts, moka: Moka::new(live) }
    }

    fn round(&mut self, round: usize) {
        let (live, service) = (self.live, &self.service);
        self.replays.each(|threads| {
            let seed = |thread| (round * 4 + threads * 2 + thread) as u64;
            time(service, threads, |thread| {
                let mut draw = Draw(seed(thread));
                (0..BATCH).map(|_| draw.below(live)).collect()
            })
        });
        self.firsts.each(|threads| {
            let new = |thread| (0..BATCH).map(move |number| live + thread * BATCH + number);
            let taken = time(service, threads, |thread| new(thread).collect());
            for number in (0..threads).flat_map(new) {
                let id = OperationId::new(&Scope::new(SCOPE), key(number).to_str().unwrap());
                assert!(self.store.remove(&id));
            }
            taken
        });
        assert_eq!(self.store.len(), self.live);
        self.moka.round(round, live);
    }
}

/// Lets each thread call `service` with its keys, all beginning at once; returns the time over the
/// number of calls of all of them.
fn time<S, R>(service: &S, threads: usize, keys: impl Fn(usize) -> Vec<usize> + Sync) -> f64
where
    S: Service<Request<Full<Bytes>>, Response = Response<R>, Error = Infallible> + Clone + Sync,
    R: Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let start = Barrier::new(threads);
    let run = |thread| {
        // A body of each thread's own: two that share one count of its owners get in each other's way.
        let sent = sent();
        let requests: Vec<_> =
            keys(thread).into_iter().map(|number| sent.request(Some(&key(number)))).collect();
        runtime().block_on(async {
            start.wait();
            let start = Instant::now();
            for request in requests {
                assert_eq!(call(service, request).await, 202);
            }
            start.elapsed()
        })
    };
    let taken = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    });
    taken.as_nanos() as f64 / (threads * BATCH) as f64
}

fn main() {
    let sizes: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![1_000, 100_000, 1_000_000] } else { sizes };
    let mut scales: Vec<_> = sizes.into_iter().map(Scale::new).collect();
    let mut machine = Timed::default();
    for round in 0..ROUNDS {
        machine.each(|threads| time(&Answer::<Full<Bytes>>::new(), threads, |_| vec![0; BATCH]));
        for scale in &mut scales {
            scale.round(round);
        }
    }

    println!(
        "| live entries | replay, ns | of it moka | two threads | first call, ns | two threads \
         | bytes per entry | of it moka |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for Scale { live, bytes, replays, firsts, moka, .. } in &scales {
        println!(
            "| {live} | {:.0} | {:.0} | × {:.2} | {:.0} | × {:.2} | {bytes:.0} | {:.0} |",
            undisturbed(&replays.one),
            undisturbed(&moka.gets),
            replays.gain(),
            undisturbed(&firsts.one),
            firsts.gain(),
            moka.bytes,
        );
    }
    println!(
        "\nA record's payload is {} bytes; two threads that share nothing: × {:.2}.",
        payload(),
        machine.gain()
    );
    let (least, most) = (&scales[0], &scales[scales.len() - 1]);
    println!(
        "replay({})/replay({})={:.2} first({0})/first({1})={:.2} \
         replay(2 threads)/replay(1 thread)={:.2} first(2 threads)/first(1 thread)={:.2} \
         machine(2 threads)/machine(1 thread)={:.2} bytes(entry)-payload={:.0} bytes(moka)={:.0}",
        most.live,
        least.live,
        undisturbed(&most.replays.one) / undisturbed(&least.replays.one),
        undisturbed(&most.firsts.one) / undisturbed(&least.firsts.one),
        least.replays.gain(),
        least.firsts.gain(),
        machine.gain(),
        most.bytes - payload() as f64,
        most.moka.bytes,
    );
}
