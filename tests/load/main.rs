//! Many requests over real sockets, with everything that goes wrong out there: callers that leave
//! at any point, panics, failures, bodies that are too large, slow or of unknown length, repeats one
//! after the other and at once. Nothing runs twice, everybody is told the same, and afterwards
//! nothing is left: no slot, permit, task or socket, and no memory.
//!
//! `scripts/load [REQUESTS [SEED]]` for a million of them. A program of its own, for memory and
//! sockets are of the whole process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(clippy::print_stdout, reason = "it says what it did")]

mod client;
mod dice;
mod ledger;
mod server;

use std::{
    env,
    process::{Command, Output},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, sleep};

use client::Client;
use ledger::Ledger;
use server::{FAULTS, PANIC, Server};

const CLIENTS: usize = 48;

/// After so many requests everything is settled, looked at and cleared.
const EPOCH: usize = 5_000;

/// After so many epochs, what is made once and stays is there.
const WARM_UP: usize = 2;

/// By so much memory may differ from what it was after the warm-up: the allocator's own affairs. A
/// million requests that lost 64 bytes each would be found.
const TOLERANCE: f64 = 32.0;

const AT_MOST: Duration = Duration::from_secs(60);

/// Set where this program runs as it is to be measured.
const MEASURED: &str = "TOWER_IDEMPOTENCY_LOAD";

fn setting<T: std::str::FromStr<Err: std::fmt::Debug>>(name: &str) -> Option<T> {
    env::var(name).ok().map(|value| value.parse().expect(name))
}

#[test]
fn nothing_runs_twice_and_nothing_is_left_behind() {
    if env::var_os(MEASURED).is_some() {
        load();
        return;
    }
    let Output { status, stdout, stderr } = measured(None);
    println!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success());
}

#[test]
fn each_seeded_fault_is_found() {
    if env::var_os(MEASURED).is_some() {
        return;
    }
    for (_, fault, finding) in FAULTS {
        let Output { status, stdout, stderr } = measured(Some(fault));
        let said = [stdout, stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(!status.success() && said.contains(finding), "{fault}: {said}");
    }
}

/// Runs the load in a process of its own.
fn measured(fault: Option<&str>) -> Output {
    let test = "nothing_runs_twice_and_nothing_is_left_behind";
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(MEASURED, "1");
    if let Some(fault) = fault {
        command.env("LOAD_FAULT", fault).env("LOAD_REQUESTS", "12000");
    }
    command.output().unwrap()
}

fn load() {
    let requests: usize = setting("LOAD_REQUESTS").unwrap_or(20_000);
    let seed: u64 = setting("LOAD_SEED").unwrap_or(1);
    let fault = setting("LOAD_FAULT");
    println!("load: {requests} requests, LOAD_SEED={seed}");

    // Panics that the handler was told to are none of ours.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref() != Some(&PANIC) {
            usual(panic);
        }
    }));

    let ledger = Arc::new(Ledger::default());
    let server = Server::start(Arc::clone(&ledger), fault);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut run = Run {
        ledger,
        seed,
        keys: Arc::default(),
        sent: Arc::default(),
        tasks: server.tasks(),
        sockets: sockets(),
        server,
        // What a fault leaves behind does not go.
        patience: if fault.is_some() { Duration::from_secs(2) } else { AT_MOST },
        memory: Vec::new(),
    };
    let began = Instant::now();
    while run.sent.load(Ordering::Relaxed) < requests {
        runtime.block_on(run.epoch());
    }
    let (first, last) =
        (run.memory[(WARM_UP - 1).min(run.memory.len() - 1)], *run.memory.last().unwrap());
    let (sent, keys) = (run.sent.load(Ordering::Relaxed), run.keys.load(Ordering::Relaxed));
    println!("load: {sent} requests, {keys} keys, {:.0} s", began.elapsed().as_secs_f64());
    for (what, count) in run.ledger.counts() {
        println!("load: {count} {what}");
    }
    println!("load: memory {first:.1} MiB after the warm-up, {last:.1} MiB at the end");
    assert!(last - first < TOLERANCE, "{:.1} MiB more than at the beginning", last - first);
    for what in [
        "replays",
        "failures",
        "not replayable",
        "too large",
        "conflicts",
        "ceiling",
        "at once",
        "closed without an answer",
        "left in the body",
        "left behind the body",
        "left in the answer",
    ] {
        assert!(run.ledger.counts().contains_key(what), "there was nothing of: {what}");
    }
}

struct Run {
    ledger: Arc<Ledger>,
    server: Server,
    seed: u64,
    keys: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
    /// What there was before the first request.
    tasks: usize,
    sockets: usize,
    /// How long what is left may take to go.
    patience: Duration,
    /// After each epoch, in MiB.
    memory: Vec<f64>,
}

impl Run {
    async fn epoch(&mut self) {
        let end = self.sent.load(Ordering::Relaxed) + EPOCH;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let (address, seed) = (self.server.address, self.seed);
                let ledger = Arc::clone(&self.ledger);
                let (keys, sent) = (Arc::clone(&self.keys), Arc::clone(&self.sent));
                tokio::spawn(async move {
                    let mut client = Client { address, ledger, seed, kept: None };
                    while sent.load(Ordering::Relaxed) < end && !client.ledger.is_broken() {
                        let requests = client.story(keys.fetch_add(1, Ordering::Relaxed)).await;
                        sent.fetch_add(requests, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        self.settle().await;
    }

    /// Nobody is connected any more: is everything as it was, but for the records?
    async fn settle(&mut self) {
        let Server { layer, store, ceiling, .. } = &self.server;
        let drained = layer.drain(AT_MOST).await;
        let (done, broken) = self.ledger.close();
        assert!(
            broken.is_empty(),
            "{} broken promises: {:#?}",
            broken.len(),
            &broken[..broken.len().min(9)]
        );
        assert_eq!(drained, 0, "work has no end");
        let left = async |what: &str, count: &dyn Fn() -> usize, usual: usize| {
            let until = Instant::now() + self.patience;
            while count() > usual && Instant::now() < until {
                sleep(Duration::from_millis(2)).await;
            }
            assert!(count() <= usual, "{} {what} are left", count() - usual);
        };
        left("permits", &|| ceiling.active(), 0).await;
        left("tasks", &|| self.server.tasks(), self.tasks).await;
        left("sockets", &sockets, self.sockets).await;

        assert_eq!((store.in_flight(), store.len()), (0, done), "(in flight, records)");
        store.clear();
        assert_eq!((store.len(), store.bytes()), (0, 0), "(records, bytes) that cannot be cleared");
        self.memory.push(resident());
    }
}

/// How many sockets this process has open, where the system tells.
fn sockets() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let names = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    names.filter(|name| name.to_string_lossy().starts_with("socket:")).count()
}

/// The memory that the system has given to this process, in MiB, where it tells.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}
