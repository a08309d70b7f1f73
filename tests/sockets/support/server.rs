//! An example, built by cargo and started as a process on a port of its own. Killed when dropped.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{ExitStatus, Output, Stdio},
    time::SystemTime,
};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use super::{Answer, Connection, eventually, get, within};

/// What the examples read from the environment: the tests' own is not passed on.
const SETTINGS: [&str; 20] = [
    "ADDR",
    "CAPACITY",
    "MAX_RUNS",
    "RUN_SECONDS",
    "STORE",
    "TTL_SECONDS",
    // The lab's own.
    "PRESET",
    "ON_FAILURE",
    "IN_FLIGHT",
    "WAIT_MS",
    "REQUIRED",
    "REQUEST_LIMIT",
    "RESPONSE_LIMIT",
    "STORED_BYTES",
    "BUFFERED_BYTES",
    "SCOPE_SHARE",
    "MODE",
    "ON_LEAVE",
    "FINISH_WITHIN_MS",
    "BODY_IDLE_MS",
];

pub(crate) struct Server {
    process: Child,
    pub(crate) addr: SocketAddr,
}

impl Server {
    /// Starts `examples/server.rs` with these settings.
    pub(crate) async fn start(settings: &[(&str, &str)]) -> Self {
        Self::start_example("server", settings).await
    }

    /// Starts `examples/lab.rs` with these settings.
    pub(crate) async fn lab(settings: &[(&str, &str)]) -> Self {
        Self::start_example("lab", settings).await
    }

    /// Starts an example and waits until it says where it listens.
    pub(crate) async fn start_example(example: &str, settings: &[(&str, &str)]) -> Self {
        let mut command = command(example, settings);
        if example == "lab" {
            // It panics as often as it is asked to, and says so each time.
            command.stderr(Stdio::null());
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = within(output.next_line()).await.unwrap().expect("it says where it listens");
        let addr = line.strip_prefix("listening on http://").expect("where it listens is a URL");
        let addr = addr.parse().expect("where it listens is an address with its real port");
        // Whatever else it prints is read, so that it never blocks on a full pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = output.next_line().await {} });
        Self { process, addr }
    }

    pub(crate) async fn connect(&self) -> Connection {
        Connection::open(self.addr).await
    }

    /// Sends one request over a connection of its own.
    pub(crate) async fn send(&self, request: impl AsRef<[u8]>) -> Answer {
        let mut connection = self.connect().await;
        connection.write(request).await;
        connection.answer().await
    }

    /// The JSON under `path`, as `alice`.
    pub(crate) async fn json(&self, path: &str) -> Value {
        let answer = self.send(get(path)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// How many runs of `alice` were ever started.
    pub(crate) async fn started(&self) -> u64 {
        self.json("/v1/runs").await["started"].as_u64().unwrap()
    }

    pub(crate) async fn live_entries(&self) -> u64 {
        self.json("/debug/idempotency").await["live_entries"].as_u64().unwrap()
    }

    /// How often the lab's handler ran for `path`, its query included.
    pub(crate) async fn executions(&self, path: &str) -> u64 {
        self.json("/lab/executions").await[path].as_u64().unwrap_or(0)
    }

    /// Waits until the lab's handler has begun to run for `path` so often.
    pub(crate) async fn has_run(&self, path: &str, times: u64) {
        eventually(async || (self.executions(path).await == times).then_some(())).await;
    }

    pub(crate) async fn in_flight(&self) -> u64 {
        self.json("/debug/idempotency").await["in_flight"].as_u64().unwrap()
    }

    /// How often the layer did `disposition`.
    pub(crate) async fn count(&self, disposition: &str) -> u64 {
        let debug = self.json("/debug/idempotency").await;
        debug["dispositions"][disposition].as_u64().unwrap()
    }

    /// Asserts that the server answers, and has started and keeps so much.
    #[track_caller]
    pub(crate) fn assert_left(
        &self,
        started: u64,
        live_entries: u64,
    ) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let left = (self.started().await, self.live_entries().await);
            assert_eq!(left, (started, live_entries), "started and live entries, at {caller}");
        }
    }

    /// Sends a signal, by its name.
    #[cfg(unix)]
    pub(crate) async fn signal(&self, name: &str) {
        let id = self.process.id().expect("it runs").to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status().await.unwrap();
        assert!(sent.success());
    }

    /// Waits until the process has ended by itself.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        within(self.process.wait()).await.unwrap()
    }
}

/// Runs an example that is expected to stop by itself.
pub(crate) async fn run_to_its_end(example: &str, settings: &[(&str, &str)]) -> Output {
    within(command(example, settings).output()).await.unwrap()
}

fn command(example: &str, settings: &[(&str, &str)]) -> Command {
    let mut command = Command::new(built(example));
    for name in SETTINGS {
        command.env_remove(name);
    }
    command.env("ADDR", "127.0.0.1:0").envs(settings.iter().copied());
    command.stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// Where cargo has put the example. Refuses one that is older than its source: a test that passes
/// against yesterday's code says nothing.
fn built(example: &str) -> PathBuf {
    const HINT: &str = "`cargo test` builds the examples; with `--test sockets`, run \
                        `cargo build --examples` first";
    let deps = std::env::current_exe().unwrap();
    let profile = deps.parent().and_then(Path::parent).expect("a test runs from <profile>/deps");
    let path =
        profile.join("examples").join(example).with_extension(std::env::consts::EXE_EXTENSION);
    let Ok(built) = std::fs::metadata(&path).and_then(|file| file.modified()) else {
        panic!("the example {example:?} is not built, {} is not there: {HINT}", path.display());
    };
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let examples = package.join("examples");
    let source = examples.join(example).with_extension("rs");
    let sources = [source, examples.join("common"), package.join("src")];
    let changed = sources.iter().filter_map(|path| last_change(path)).max();
    assert!(changed <= Some(built), "the example {example:?} is older than its source: {HINT}");
    path
}

/// When a file, or any file in a folder, was changed last. None if the source is not here.
fn last_change(path: &Path) -> Option<SystemTime> {
    if let Ok(folder) = std::fs::read_dir(path) {
        return folder.filter_map(|entry| last_change(&entry.ok()?.path())).max();
    }
    std::fs::metadata(path).and_then(|file| file.modified()).ok()
}
