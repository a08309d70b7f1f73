//! The clients under whose load the server is: each key has a story of requests, drawn by its dice,
//! at whose end its work is done and has been asked for again.

use std::{fmt::Write as _, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use crate::{
    dice::Dice,
    ledger::Ledger,
    server::{REQUEST_LIMIT, answer},
};

/// Longer than anything takes, however slow the machine is.
const AT_MOST: Duration = Duration::from_secs(60);

/// So long is a key asked for until its work is done.
const DONE_WITHIN: Duration = Duration::from_secs(30);

/// How executions of a key end, one after the other. What does not end with a success never does.
const ENDS: [&str; 20] = [
    "ok",
    "ok",
    "ok",
    "ok",
    "ok",
    "ok",
    "ok",
    "stream",
    "stream",
    "large",
    "panic,ok",
    "500,ok",
    "error,ok",
    "break,ok",
    "break,stream",
    "503,panic,break,error,ok",
    "422,ok",
    "422",
    "500",
    "panic,stream",
];

/// When the client leaves.
#[derive(Clone, Copy)]
enum Leaves {
    /// With the body sent in part.
    InTheBody,
    /// With all of it sent, after so many milliseconds.
    After(usize),
    /// With some bytes of the answer read.
    InTheAnswer,
}

/// What came of a request.
enum Came {
    /// The client has left.
    Left,
    /// The server closed before the answer was whole.
    Closed,
    Answer(Answer),
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .into_iter()
            .find(|(present, _)| present.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    fn is_replayed(&self) -> bool {
        self.header("idempotent-replayed").is_some()
    }

    fn execution(&self) -> Option<u32> {
        self.header("x-execution")?.parse().ok()
    }

    fn says(&self, code: &str) -> bool {
        String::from_utf8_lossy(&self.body).contains(code)
    }
}

/// One kind of request, sent again and again.
#[derive(Clone)]
struct Order {
    key: Option<String>,
    path: String,
    body: Vec<u8>,
    /// Its length is not declared.
    chunked: bool,
    /// In pieces, with pauses.
    slow: bool,
}

impl Order {
    fn render(&self) -> (Vec<u8>, Vec<u8>) {
        let mut head = format!("POST {} HTTP/1.1\r\nhost: localhost\r\n", self.path);
        if let Some(key) = &self.key {
            write!(head, "idempotency-key: {key}\r\n").unwrap();
        }
        if self.chunked {
            head += "transfer-encoding: chunked\r\n\r\n";
            let mut body = Vec::new();
            for piece in self.body.chunks(700) {
                body.extend(format!("{:x}\r\n", piece.len()).bytes());
                body.extend_from_slice(piece);
                body.extend_from_slice(b"\r\n");
            }
            body.extend_from_slice(b"0\r\n\r\n");
            (head.into_bytes(), body)
        } else {
            write!(head, "content-length: {}\r\n\r\n", self.body.len()).unwrap();
            (head.into_bytes(), self.body.clone())
        }
    }
}

pub(crate) struct Client {
    pub(crate) address: SocketAddr,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) seed: u64,
    /// The connection that is kept, if there is one.
    pub(crate) kept: Option<TcpStream>,
}

impl Client {
    /// Lives the story of key `number`, and returns how many requests it took.
    pub(crate) async fn story(&mut self, number: usize) -> usize {
        let mut dice = Dice::new(self.seed, number);
        let ends = dice.one_of(&ENDS);
        let background = if dice.percent(10) { "&background=1" } else { "" };
        let order = Order {
            key: Some(format!("key-{number}")),
            path: format!("/work?ends={ends}&pause={}{background}", dice.below(4)),
            body: vec![b'x'; dice.below(2_000)],
            chunked: dice.percent(20),
            slow: dice.percent(5),
        };
        let mut sent = 0;
        if dice.percent(5) {
            sent += self.unkeyed(&order, &mut dice).await;
        }
        if dice.percent(5) {
            sent += self.too_large(&order).await;
        }
        while dice.percent(20) {
            let leaves = match dice.below(3) {
                0 => Leaves::InTheBody,
                1 => Leaves::After(dice.below(4)),
                _ => Leaves::InTheAnswer,
            };
            self.send(&order, Some(leaves)).await;
            sent += 1;
        }
        if dice.percent(15) {
            sent += self.at_once(&order, 2 + dice.below(3)).await;
        }
        let (tries, done) = self.until_done(&order, ends).await;
        sent += tries;
        if done {
            for _ in 0..dice.below(3) {
                self.ledger.count("asked again");
                sent += self.until_done(&order, ends).await.0;
            }
            if dice.percent(5) {
                sent += self.conflict(&order).await;
            }
        }
        sent
    }

    /// Asks until the key's work is done; says whether it is, or never will be.
    async fn until_done(&mut self, order: &Order, ends: &str) -> (usize, bool) {
        let until = Instant::now() + DONE_WITHIN;
        let mut tries = 0;
        while Instant::now() < until {
            tries += 1;
            match self.send(order, None).await {
                Came::Answer(answer) => match self.judge(order, ends, &answer) {
                    Some(done) => return (tries, done),
                    None => sleep(Duration::from_millis(1)).await,
                },
                Came::Closed | Came::Left => self.ledger.count("closed without an answer"),
            }
        }
        self.ledger.broken(format!("{:?} ({ends}) does not get done", order.key));
        (tries, false)
    }

    /// Is the work done? `None` for: ask again.
    fn judge(&self, order: &Order, ends: &str, answer: &Answer) -> Option<bool> {
        let last = ends.rsplit(',').next().unwrap();
        match (answer.status, answer.execution()) {
            (200 | 201, Some(execution)) => {
                self.told(order, ends, execution, answer);
                Some(true)
            }
            (409, None) if ends.contains("large") && answer.says("idempotency_not_replayable") => {
                self.ledger.count("not replayable");
                Some(true)
            }
            (409, None) if answer.says("idempotency_in_progress") => {
                self.ledger.count("in progress");
                None
            }
            (429, None) if answer.says("concurrency_limit") => {
                self.ledger.count("ceiling");
                None
            }
            (422 | 500 | 503, Some(_)) if !answer.is_replayed() => {
                self.ledger.count("failures");
                (last == answer.status.to_string()).then_some(false)
            }
            (status, _) => {
                let body = String::from_utf8_lossy(&answer.body);
                self.ledger.broken(format!("{:?} ({ends}): {status} {body}", order.key));
                Some(false)
            }
        }
    }

    /// A success: is it the one answer of this key?
    fn told(&self, order: &Order, ends: &str, execution: u32, told: &Answer) {
        let key = order.key.as_deref();
        let right = answer(key, execution, 0);
        let body = String::from_utf8_lossy(&told.body);
        let same = if ends.contains("large") { body.starts_with(&right) } else { body == right };
        if !same {
            self.ledger.broken(format!("{key:?}, execution {execution}: told {body:?}"));
        }
        if let Some(key) = key {
            self.ledger.told(key, execution, told.is_replayed());
        }
        self.ledger.count(if told.is_replayed() { "replays" } else { "first answers" });
    }

    /// Nothing is promised without a key, but that it is answered or closed.
    async fn unkeyed(&mut self, order: &Order, dice: &mut Dice) -> usize {
        let path = "/work?ends=ok".to_owned();
        let order = Order { key: None, path, ..order.clone() };
        let leaves = dice.percent(30).then_some(Leaves::InTheBody);
        if let Came::Answer(answer) = self.send(&order, leaves).await
            && (!matches!(answer.status, 201 | 429) || answer.is_replayed())
        {
            self.ledger.broken(format!("without a key: {}", answer.head));
        }
        self.ledger.count("without a key");
        1
    }

    /// 413, or a connection that is closed while the body is still on its way.
    async fn too_large(&mut self, order: &Order) -> usize {
        let order = Order { body: vec![b'x'; 3 * REQUEST_LIMIT], ..order.clone() };
        if let Came::Answer(answer) = self.send(&order, None).await {
            match answer.status {
                413 => self.ledger.count("too large"),
                429 => self.ledger.count("ceiling"),
                status => self.ledger.broken(format!("{:?}, too large: {status}", order.key)),
            }
        }
        1
    }

    /// Another body under the key of work that is done.
    async fn conflict(&mut self, order: &Order) -> usize {
        let order = Order { body: b"another".to_vec(), slow: false, ..order.clone() };
        if let Came::Answer(answer) = self.send(&order, None).await {
            if answer.status == 409 && answer.says("idempotency_conflict") {
                self.ledger.count("conflicts");
            } else {
                self.ledger.broken(format!("{:?}, another body: {}", order.key, answer.status));
            }
        }
        1
    }

    /// The same request, on so many connections at once.
    async fn at_once(&mut self, order: &Order, count: usize) -> usize {
        let ends = order.path.split(['=', '&']).nth(1).unwrap();
        let repeats = (0..count).map(|_| {
            let Self { address, seed, .. } = *self;
            let ledger = Arc::clone(&self.ledger);
            async move {
                let mut client = Self { address, ledger, seed, kept: None };
                client.ledger.count("at once");
                if let Came::Answer(answer) = client.send(order, None).await {
                    client.judge(order, ends, &answer);
                }
            }
        });
        futures_util::future::join_all(repeats).await;
        count
    }

    async fn send(&mut self, order: &Order, leaves: Option<Leaves>) -> Came {
        let Ok(came) = timeout(AT_MOST, self.exchange(order, leaves)).await else {
            self.ledger.broken(format!("{:?}: no end of it", order.key));
            return Came::Closed;
        };
        came
    }

    async fn exchange(&mut self, order: &Order, leaves: Option<Leaves>) -> Came {
        let mut connection = match self.kept.take() {
            Some(kept) => kept,
            None => match TcpStream::connect(self.address).await {
                Ok(connection) => connection,
                Err(error) => {
                    self.ledger.broken(format!("no connection: {error}"));
                    return Came::Closed;
                }
            },
        };
        let (head, mut body) = order.render();
        if let Some(Leaves::InTheBody) = leaves {
            body.truncate(body.len() / 2);
        }
        // An error here is the server that has answered and closed: the answer may still be there.
        let _sent = write(&mut connection, &head, &body, order.slow).await;
        match leaves {
            Some(Leaves::InTheBody) => {
                self.ledger.count("left in the body");
                return Came::Left;
            }
            Some(Leaves::After(milliseconds)) => {
                sleep(Duration::from_millis(milliseconds as u64)).await;
                self.ledger.count("left behind the body");
                return Came::Left;
            }
            Some(Leaves::InTheAnswer) => {
                let _read = connection.read(&mut [0; 20]).await;
                self.ledger.count("left in the answer");
                return Came::Left;
            }
            None => {}
        }
        match read(&mut connection).await {
            Some(answer) => {
                if answer.header("connection") != Some("close") {
                    self.kept = Some(connection);
                }
                Came::Answer(answer)
            }
            None => Came::Closed,
        }
    }
}

async fn write(
    connection: &mut TcpStream,
    head: &[u8],
    body: &[u8],
    slow: bool,
) -> std::io::Result<()> {
    if !slow {
        return connection.write_all(&[head, body].concat()).await;
    }
    connection.write_all(head).await?;
    for piece in body.chunks(400) {
        sleep(Duration::from_millis(1)).await;
        connection.write_all(piece).await?;
    }
    Ok(())
}

/// Reads an answer, if it comes whole.
async fn read(connection: &mut TcpStream) -> Option<Answer> {
    let mut came = Vec::with_capacity(1_024);
    let head = loop {
        if let Some(end) = came.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if connection.read_buf(&mut came).await.ok()? == 0 {
            return None;
        }
    };
    let body = came.split_off(head);
    let head = String::from_utf8(came).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let mut answer = Answer { status, head, body };
    if let Some(length) = answer.header("content-length") {
        let length: usize = length.parse().ok()?;
        while answer.body.len() < length {
            if connection.read_buf(&mut answer.body).await.ok()? == 0 {
                return None;
            }
        }
    } else if answer.header("transfer-encoding") == Some("chunked") {
        while !answer.body.ends_with(b"0\r\n\r\n") {
            if connection.read_buf(&mut answer.body).await.ok()? == 0 {
                return None;
            }
        }
        answer.body = unchunk(&answer.body)?;
    }
    Some(answer)
}

fn unchunk(mut chunked: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let line = chunked.windows(2).position(|window| window == b"\r\n")?;
        let length = usize::from_str_radix(str::from_utf8(&chunked[..line]).ok()?, 16).ok()?;
        if length == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(chunked.get(line + 2..line + 2 + length)?);
        chunked = chunked.get(line + 2 + length + 2..)?;
    }
}
