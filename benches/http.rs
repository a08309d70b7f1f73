//! What the layer costs over a socket: `cargo bench --bench http`.
//!
//! Servers, each a process of its own on one thread: axum with a handler, the same with a layer
//! that does nothing, and with this one, for requests without a key, with new keys, and with known
//! ones. One client keeps a few HTTP/1.1 connections busy, sends the next request on each when its
//! answer is there, and goes from server to server in short rounds, so that all of them see the
//! same machine. Now and then all servers are begun anew, because where a process happens to lie in
//! memory counts too.
//!
//! CPU is what the system says that the server ran, its share of the kernel's work on the socket
//! included.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a bench that prints a table")]
#![allow(clippy::disallowed_methods, reason = "it measures real time")]
#![allow(clippy::cast_precision_loss, reason = "figures for a table")]

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use axum::{Router, routing::post};
use bytes::Bytes;
use common::{ANSWER, Sent, key, median, percentile};
use http::{StatusCode, header};
use tower::layer::util::Identity;
use tower_idempotency::{IdempotencyLayer, MemoryStore, scope};

/// How often the servers are begun anew, and the rounds in between.
const GENERATIONS: usize = 6;
const ROUNDS: usize = 25;
/// Requests of one round to one server.
const BATCH: usize = 1_600;
const CONNECTIONS: usize = 8;
/// Known keys of the server that replays.
const LIVE: usize = 1_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Variant {
    Bare,
    /// With a layer that does nothing: what any layer costs in axum, which boxes the route and the
    /// bodies anew for it.
    EmptyLayer,
    PassThrough,
    First,
    Replay,
}

impl Variant {
    /// What its server puts around the handler.
    fn with(self) -> &'static str {
        match self {
            Self::Bare => "nothing",
            Self::EmptyLayer => "empty layer",
            Self::PassThrough | Self::First | Self::Replay => "layer",
        }
    }
}

const VARIANTS: [(Variant, &str); 5] = [
    (Variant::Bare, "axum"),
    (Variant::EmptyLayer, "an empty layer"),
    (Variant::PassThrough, "pass-through"),
    (Variant::First, "first call"),
    (Variant::Replay, "replay"),
];

/// Set where this program is one of the servers.
const SERVE: &str = "TOWER_IDEMPOTENCY_SERVE";

async fn handler(
    body: Bytes,
) -> (StatusCode, [(header::HeaderName, &'static str); 1], &'static [u8]) {
    std::hint::black_box(body);
    (StatusCode::ACCEPTED, [(header::CONTENT_TYPE, "application/json")], ANSWER)
}

#[tokio::main(flavor = "current_thread")]
async fn serve(with: &str) {
    let app = Router::new().route("/v1/runs", post(handler));
    let app = match with {
        "nothing" => app,
        "empty layer" => app.layer(Identity::new()),
        _ => {
            let store = MemoryStore::new().capacity(LIVE + ROUNDS * BATCH);
            app.layer(IdempotencyLayer::new(scope::single_tenant()).store(store))
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    axum::serve(listener, app).await.unwrap();
}

/// A server in a process of its own, and the connections to it.
struct Server {
    variant: Variant,
    process: Child,
    connections: Vec<TcpStream>,
    requests: usize,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Server {
    fn new(variant: Variant, sent: &Sent) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env(SERVE, variant.with())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address: SocketAddr = line.trim().parse().unwrap();
        let connect = |_| {
            let connection = TcpStream::connect(address).unwrap();
            connection.set_nodelay(true).unwrap();
            connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            connection
        };
        let connections = (0..CONNECTIONS).map(connect).collect();
        let mut server = Self { variant, process, connections, requests: 0 };
        if variant == Variant::Replay {
            server.exchange((0..LIVE).map(|number| render(sent, Some(number))), false);
        }
        server
    }

    /// The time that the system says this server's thread ran.
    fn cpu(&self) -> Duration {
        let path = format!("/proc/{}/schedstat", self.process.id());
        let ran = std::fs::read_to_string(path).unwrap();
        Duration::from_nanos(ran.split(' ').next().unwrap().parse().unwrap())
    }

    /// One round: nanoseconds of wall clock and of CPU per request.
    fn round(&mut self, sent: &Sent) -> (f64, f64) {
        let key = |number| match self.variant {
            Variant::Bare | Variant::EmptyLayer | Variant::PassThrough => None,
            Variant::First => Some(self.requests + number),
            Variant::Replay => Some(number % LIVE),
        };
        let requests: Vec<_> = (0..BATCH).map(|number| render(sent, key(number))).collect();
        self.requests += BATCH;
        let (before, start) = (self.cpu(), Instant::now());
        self.exchange(requests, self.variant == Variant::Replay);
        let (taken, ran) = (start.elapsed(), self.cpu().checked_sub(before).unwrap());
        (taken.as_nanos() as f64 / BATCH as f64, ran.as_nanos() as f64 / BATCH as f64)
    }

    /// Sends the requests, one after the other on each connection.
    fn exchange(&mut self, requests: impl IntoIterator<Item = Vec<u8>>, replayed: bool) {
        let mut requests = requests.into_iter();
        let mut busy = vec![false; CONNECTIONS];
        loop {
            for (connection, busy) in self.connections.iter_mut().zip(&mut busy) {
                if *busy {
                    receive(connection, replayed);
                }
                *busy = match requests.next() {
                    Some(request) => {
                        connection.write_all(&request).unwrap();
                        true
                    }
                    None => false,
                };
            }
            if busy.iter().all(|busy| !busy) {
                return;
            }
        }
    }
}

/// Reads one answer, and looks at whether it is the right one.
fn receive(connection: &mut TcpStream, replayed: bool) {
    let mut answer = [0; 1_024];
    let mut length = 0;
    while !answer[..length].ends_with(ANSWER) {
        let more = connection.read(&mut answer[length..]).unwrap();
        assert!(more > 0, "no whole answer: {}", String::from_utf8_lossy(&answer[..length]));
        length += more;
    }
    let answer = &answer[..length];
    let marked = answer.windows(19).any(|window| window == b"idempotent-replayed");
    let right = answer.starts_with(b"HTTP/1.1 202 ") && marked == replayed;
    assert!(right, "not the right answer: {}", String::from_utf8_lossy(answer));
}

fn render(sent: &Sent, number: Option<usize>) -> Vec<u8> {
    let mut request = format!(
        "POST /v1/runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: {}\r\nuser-agent: bench\r\n\
         accept: */*\r\ncontent-length: {}\r\n",
        sent.kind,
        sent.body.len()
    )
    .into_bytes();
    if let Some(number) = number {
        request.extend_from_slice(b"idempotency-key: ");
        request.extend_from_slice(key(number).as_bytes());
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(&sent.body);
    request
}

fn main() {
    if let Ok(with) = std::env::var(SERVE) {
        serve(&with);
        return;
    }
    let sent = Sent::new("application/json", 256);
    let mut wall: [Vec<f64>; VARIANTS.len()] = Default::default();
    let mut cpu = wall.clone();
    for _ in 0..GENERATIONS {
        let mut servers = VARIANTS.map(|(variant, _)| Server::new(variant, &sent));
        // What is done once, for example growing a table, is done before it counts.
        for server in &mut servers {
            server.round(&sent);
        }
        for round in 1..ROUNDS {
            for turn in 0..VARIANTS.len() {
                let which = (round + turn) % VARIANTS.len();
                let (taken, ran) = servers[which].round(&sent);
                wall[which].push(taken);
                cpu[which].push(ran);
            }
        }
    }

    println!(
        "| JSON of 256 B, {CONNECTIONS} connections | requests/s | CPU per request, ns | × axum |"
    );
    println!("|---|---|---|---|");
    let ratio = |of: &[Vec<f64>; VARIANTS.len()], which: usize| {
        let paired = of[which].iter().zip(&of[0]).map(|(with, bare)| with / bare);
        median(&paired.collect::<Vec<_>>())
    };
    let mut line = Vec::new();
    for (which, (_, name)) in VARIANTS.iter().enumerate() {
        println!(
            "| {name} | {:.0} | {:.0} ({:.0}–{:.0}) | {:.2} |",
            1e9 / median(&wall[which]),
            median(&cpu[which]),
            percentile(&cpu[which], 10),
            percentile(&cpu[which], 90),
            ratio(&cpu, which),
        );
        if which > 0 {
            let name = name.replace(' ', "-");
            line.push(format!("{name}/bare={:.3} (cpu)", ratio(&cpu, which)));
            line.push(format!("{name}/bare={:.3} (time)", ratio(&wall, which)));
        }
    }
    println!("{}", line.join(" "));
}
