//! Idempotent triggers of an agent runtime, without HTTP: `cargo run --example trigger`.
//!
//! A runtime has entry points. `trigger` starts one and returns the execution's id at once;
//! `trigger_and_wait` returns its result. Both take an optional idempotency key: a repeat gets the
//! first real id, or the first result, and starts nothing. The program shows each promise, and
//! fails if one is broken.

#![allow(clippy::print_stdout, reason = "a program that shows what it does")]

use std::{
    collections::HashMap,
    fmt,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;
use tower_idempotency::{Engine, Fingerprint, MemoryStore, Operation, RunError, Scope};

/// What an entry point does with its input.
type EntryPoint = Arc<dyn Fn(String) -> Result<String, String> + Send + Sync>;

/// An execution's name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ExecutionId(u64);

impl fmt::Display for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exec_{}", self.0)
    }
}

/// Why nothing was started, or nothing came of it.
#[derive(Debug, PartialEq, Eq)]
enum TriggerError {
    UnknownEntryPoint,
    Failed(String),
}

impl fmt::Display for TriggerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownEntryPoint => f.write_str("there is no such entry point"),
            Self::Failed(why) => write!(f, "it failed: {why}"),
        }
    }
}

impl std::error::Error for TriggerError {}

/// What the runtime is made with.
struct Options {
    retention: Duration,
    keys: usize,
    /// At the limit of keys, end the oldest completed one instead of refusing new ones.
    evict_oldest: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { retention: Duration::from_secs(5 * 60), keys: 10_000, evict_oldest: false }
    }
}

/// The runtime. Ids and results are kept apart: a key of one call style is not one of the other.
#[derive(Clone)]
struct Runtime {
    entry_points: Arc<HashMap<&'static str, EntryPoint>>,
    started: Arc<AtomicU64>,
    ids: Engine<ExecutionId>,
    ids_kept: MemoryStore<ExecutionId>,
    results: Engine<String>,
}

impl Runtime {
    fn new(options: &Options, entry_points: HashMap<&'static str, EntryPoint>) -> Self {
        let ids_kept = MemoryStore::new().capacity(options.keys).evict_oldest(options.evict_oldest);
        let results_kept =
            MemoryStore::new().capacity(options.keys).evict_oldest(options.evict_oldest);
        Self {
            entry_points: Arc::new(entry_points),
            started: Arc::default(),
            ids: Engine::new(ids_kept.clone()).retention(options.retention),
            ids_kept,
            results: Engine::new(results_kept).retention(options.retention),
        }
    }

    /// Starts `entry` with `input` and returns the execution's id at once.
    async fn trigger(
        &self,
        entry: &str,
        input: &str,
        key: Option<&str>,
    ) -> Result<ExecutionId, RunError<TriggerError>> {
        let operation = key.map(|key| operation(entry, input, key));
        let start = start(self.clone(), entry.to_owned(), input.to_owned());
        let done = self.ids.run(operation, async move {
            let (id, execution) = start.await?;
            // The execution goes on by itself; its id is real from here on.
            tokio::spawn(async move { drop(execution()) });
            Ok(id)
        });
        Ok(done.await?.value)
    }

    /// Starts `entry` with `input` and returns its result.
    async fn trigger_and_wait(
        &self,
        entry: &str,
        input: &str,
        key: Option<&str>,
    ) -> Result<String, RunError<TriggerError>> {
        let operation = key.map(|key| operation(entry, input, key));
        let start = start(self.clone(), entry.to_owned(), input.to_owned());
        let done = self.results.run(operation, async move {
            let (_, execution) = start.await?;
            execution().map_err(TriggerError::Failed)
        });
        Ok(done.await?.value)
    }

    fn started(&self) -> u64 {
        self.started.load(Ordering::SeqCst)
    }
}

/// A key is unique within its entry point; another input under it is a conflict.
fn operation(entry: &str, input: &str, key: &str) -> Operation {
    Operation::new(&Scope::new(entry), key).asking_for(Fingerprint::of([input]))
}

/// Begins an execution: its id, and what is left to do.
async fn start(
    runtime: Runtime,
    entry: String,
    input: String,
) -> Result<(ExecutionId, impl FnOnce() -> Result<String, String>), TriggerError> {
    let entry_point =
        runtime.entry_points.get(entry.as_str()).cloned().ok_or(TriggerError::UnknownEntryPoint)?;
    let id = ExecutionId(runtime.started.fetch_add(1, Ordering::SeqCst) + 1);
    // As a real runtime would, let others run before anything is decided.
    tokio::task::yield_now().await;
    Ok((id, move || entry_point(input)))
}

/// Counts the promises that are broken.
#[derive(Default)]
struct Promises {
    kept: usize,
    broken: usize,
}

impl Promises {
    fn check(&mut self, promise: &str, holds: bool) {
        if holds {
            self.kept += 1;
            println!("kept    {promise}");
        } else {
            self.broken += 1;
            println!("BROKEN  {promise}");
        }
    }
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> ExitCode {
    let mut promises = Promises::default();
    let failures = Arc::new(AtomicU64::new(1));
    let entry_points = HashMap::from([
        ("greet", Arc::new(|input: String| Ok(format!("hello {input}"))) as EntryPoint),
        (
            "flaky",
            Arc::new(move |input: String| match failures.swap(0, Ordering::SeqCst) {
                0 => Ok(format!("at last {input}")),
                _ => Err("not yet".to_owned()),
            }) as EntryPoint,
        ),
    ]);
    let runtime = Runtime::new(&Options::default(), entry_points.clone());

    ids(&runtime, &mut promises).await;
    results(&runtime, &mut promises).await;
    concurrent_repeats(&runtime, &mut promises).await;

    let before = runtime.trigger("greet", "ann", Some("ages ago")).await.ok();
    tokio::time::advance(Duration::from_secs(5 * 60)).await;
    let after = runtime.trigger("greet", "ann", Some("ages ago")).await.ok();
    promises.check("a key that has expired runs again", before.is_some() && before != after);
    promises.check("what has expired takes no room", runtime.ids_kept.len() == 1);

    at_the_limit(entry_points, &mut promises).await;

    println!("{} promises kept, {} broken", promises.kept, promises.broken);
    if promises.broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn ids(runtime: &Runtime, promises: &mut Promises) {
    let first = runtime.trigger("greet", "ann", Some("k1")).await.ok();
    let again = runtime.trigger("greet", "ann", Some("k1")).await.ok();
    println!("        trigger(greet, ann, k1) gave {}", first.as_ref().map_or(0, |id| id.0));
    promises.check("a repeat gets the first execution id", first.is_some() && first == again);
    promises.check("and starts nothing", runtime.started() == 1);

    let other = runtime.trigger("greet", "ann", Some("k2")).await.ok();
    promises.check("another key starts another execution", other.is_some() && other != first);

    let conflict = runtime.trigger("greet", "bob", Some("k1")).await;
    let is_conflict = matches!(conflict, Err(RunError::Conflict));
    promises.check("the same key for another input is a conflict", is_conflict);

    let kept = runtime.ids_kept.len();
    let (one, two) =
        (runtime.trigger("greet", "ann", None).await, runtime.trigger("greet", "ann", None).await);
    promises.check("without a key it starts each time", one.ok() != two.ok());
    promises.check("and keeps nothing", runtime.ids_kept.len() == kept);

    let unknown = runtime.trigger("nothing", "ann", Some("k3")).await;
    let is_error = matches!(unknown, Err(RunError::Work(TriggerError::UnknownEntryPoint)));
    promises.check("an unknown entry point is an error", is_error);
    promises.check("and records nothing", runtime.ids_kept.len() == kept);
}

async fn results(runtime: &Runtime, promises: &mut Promises) {
    let first = runtime.trigger_and_wait("greet", "ann", Some("k1")).await.ok();
    let again = runtime.trigger_and_wait("greet", "ann", Some("k1")).await.ok();
    println!("        trigger_and_wait(greet, ann, k1) gave {first:?}");
    promises.check("a repeat gets the first result", first.is_some() && first == again);

    let failed = runtime.trigger_and_wait("flaky", "bob", Some("k4")).await;
    let is_error =
        matches!(&failed, Err(RunError::Work(TriggerError::Failed(why))) if why == "not yet");
    promises.check("a failing first execution is an error", is_error);
    let again = runtime.trigger_and_wait("flaky", "bob", Some("k4")).await.ok();
    promises.check("and its repeat runs", again.as_deref() == Some("at last bob"));
}

async fn concurrent_repeats(runtime: &Runtime, promises: &mut Promises) {
    let before = runtime.started();
    let together = Arc::new(Notify::new());
    let callers: Vec<_> = (0..15)
        .map(|_| {
            let (runtime, together) = (runtime.clone(), Arc::clone(&together));
            tokio::spawn(async move {
                together.notified().await;
                runtime.trigger("greet", "eve", Some("at once")).await.ok()
            })
        })
        .collect();
    tokio::task::yield_now().await;
    together.notify_waiters();
    let mut ids = Vec::new();
    for caller in callers {
        ids.push(caller.await.ok().flatten());
    }
    let same = ids.iter().all(|id| id.is_some() && *id == ids[0]);
    promises.check("15 callers at once get one id, and a real one", same);
    promises.check("of one execution", runtime.started() == before + 1);
}

async fn at_the_limit(entry_points: HashMap<&'static str, EntryPoint>, promises: &mut Promises) {
    for evict_oldest in [false, true] {
        let options = Options { keys: 2, evict_oldest, ..Options::default() };
        let runtime = Runtime::new(&options, entry_points.clone());
        let first = runtime.trigger("greet", "a", Some("1")).await.ok();
        let _second = runtime.trigger("greet", "b", Some("2")).await;
        let third = runtime.trigger("greet", "c", Some("3")).await;
        let again = runtime.trigger("greet", "a", Some("1")).await.ok();
        if evict_oldest {
            promises.check("with eviction, one key too many is taken", third.is_ok());
            promises.check("and the oldest runs again", again.is_some() && again != first);
        } else {
            let is_full = matches!(third, Err(RunError::Full { .. }));
            promises.check("one key too many is refused", is_full);
            promises.check("and no key is forgotten for it", again.is_some() && again == first);
        }
        promises.check("there are never more keys than the limit", runtime.ids_kept.len() == 2);
    }
}
