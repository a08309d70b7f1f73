//! A small HTTP/1.1 client that sends whatever bytes it is told to, in whatever pieces, and takes
//! nothing but well-formed answers.

use std::{fmt, io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::within;

/// A `POST` in the making, by default of a run by `alice` with the key `k`.
#[derive(Clone)]
pub(crate) struct Post {
    path: String,
    headers: Vec<(String, Vec<u8>)>,
}

impl Post {
    pub(crate) fn to(path: &str) -> Self {
        Self { path: path.to_owned(), headers: Vec::new() }.with("host", "localhost")
    }

    pub(crate) fn run() -> Self {
        Self::to("/v1/runs")
            .with("authorization", "Bearer alice")
            .with("content-type", "application/json")
            .with("idempotency-key", "k")
    }

    /// To a route of the lab, with its query.
    pub(crate) fn lab(path: &str) -> Self {
        Self::to(path).with("authorization", "Bearer alice").with("idempotency-key", "k")
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.headers.iter().map(|(name, value)| (&name[..], &value[..]))
    }

    /// Adds a line, whatever is there already.
    pub(crate) fn with(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_owned()));
        self
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(present, _)| present != name);
        self
    }

    /// Replaces all lines of this name.
    pub(crate) fn set(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.without(name).with(name, value)
    }

    pub(crate) fn key(self, key: impl AsRef<[u8]>) -> Self {
        self.set("idempotency-key", key)
    }

    pub(crate) fn caller(self, name: &str) -> Self {
        self.set("authorization", format!("Bearer {name}"))
    }

    /// The head, with the body's framing as it has been added, or not.
    pub(crate) fn head(&self) -> Vec<u8> {
        let mut head = format!("POST {} HTTP/1.1\r\n", self.path).into_bytes();
        for (name, value) in &self.headers {
            head.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        head.extend(b"\r\n");
        head
    }

    /// The head of a request with so many bytes of body.
    pub(crate) fn head_for(&self, length: usize) -> Vec<u8> {
        self.clone().with("content-length", length.to_string()).head()
    }

    /// The head of a request whose client waits for `100 Continue` before it sends the body.
    pub(crate) fn head_expecting(&self, length: usize) -> Vec<u8> {
        self.clone().with("expect", "100-continue").head_for(length)
    }

    /// The whole request.
    pub(crate) fn body(&self, body: impl AsRef<[u8]>) -> Vec<u8> {
        let body = body.as_ref();
        [&self.head_for(body.len())[..], body].concat()
    }

    /// The whole request, its body in these chunks.
    pub(crate) fn chunks<'a>(&self, chunks: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
        self.chunks_and_trailers(chunks, &[])
    }

    /// The whole request, its body in these chunks, and trailers behind it.
    pub(crate) fn chunks_and_trailers<'a>(
        &self,
        chunks: impl IntoIterator<Item = &'a [u8]>,
        trailers: &[(&str, &str)],
    ) -> Vec<u8> {
        let mut request = self.clone().with("transfer-encoding", "chunked").head();
        for data in chunks {
            request.extend(chunk(data));
        }
        request.extend(b"0\r\n");
        for (name, value) in trailers {
            request.extend(format!("{name}: {value}\r\n").bytes());
        }
        request.extend(b"\r\n");
        request
    }
}

/// One chunk of a chunked body.
pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

/// A whole `GET` by `alice`.
pub(crate) fn get(path: &str) -> Vec<u8> {
    get_as("alice", path)
}

pub(crate) fn get_as(caller: &str, path: &str) -> Vec<u8> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n");
    format!("{head}authorization: Bearer {caller}\r\n\r\n").into_bytes()
}

/// How an answer said where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// By its status: there is no body.
    None,
    Length(usize),
    Chunked,
    /// By HTTP/2's own means.
    Http2,
}

/// An answer, read whole.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Every line, in its order; names in lower case.
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) framing: Framing,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<(String, Vec<u8>)>,
}

impl Answer {
    /// The lines of this name.
    pub(crate) fn lines(&self, name: &str) -> Vec<&str> {
        lines(&self.headers, name)
    }

    /// The one line of this name, if there is one.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        match self.lines(name)[..] {
            [] => None,
            [value] => Some(value),
            _ => panic!("more than one {name}: {self:?}"),
        }
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a text body")
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    pub(crate) fn is_replay(&self) -> bool {
        match self.header("idempotent-replayed") {
            None => false,
            Some("true") => true,
            Some(_) => panic!("a marker with another value: {self:?}"),
        }
    }

    /// All that a replay has to repeat: everything but the marker and the date.
    pub(crate) fn lasting(&self) -> Self {
        let mut answer = self.clone();
        answer.headers.retain(|(name, _)| name != "date" && name != "idempotent-replayed");
        answer.headers.sort();
        answer
    }

    /// What it says, whichever way it came: all that a replay over any version has to repeat.
    pub(crate) fn content(&self) -> Self {
        let mut answer = self.lasting();
        answer.headers.retain(|(name, _)| name != "content-length" && name != "transfer-encoding");
        answer.framing = Framing::None;
        answer
    }

    /// The id of the run that this 202 says was started, now or before.
    #[track_caller]
    pub(crate) fn run_id(&self) -> String {
        assert_eq!(self.status, 202, "{self:?}");
        let json = self.json();
        let id = json["run_id"].as_str().expect("a run id");
        assert!(id.starts_with("run_"), "{id:?}");
        assert_eq!(json["status"], "started");
        assert_eq!(self.header("location"), Some(format!("/v1/runs/{id}").as_str()));
        id.to_owned()
    }

    /// Asserts that this is the layer's own refusal `code`, and returns its JSON.
    #[track_caller]
    pub(crate) fn assert_refused(&self, status: u16, code: &str) -> serde_json::Value {
        assert_eq!(self.status, status, "{self:?}");
        let json = self.json();
        assert_eq!((&json["code"], &json["error"]["code"]), (&code.into(), &code.into()));
        assert_eq!(json["status"], status);
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert!(!self.is_replay());
        json
    }

    /// Asserts that the client is told to come back in so many whole seconds, and returns them.
    #[track_caller]
    pub(crate) fn retry_after(&self) -> u64 {
        self.header("retry-after").expect("when to come back").parse().expect("in seconds")
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, headers, framing, body, trailers } = self;
        writeln!(f, "{status}, {framing:?}")?;
        for (name, value) in headers.iter().chain(trailers) {
            writeln!(f, "{name}: {}", String::from_utf8_lossy(value))?;
        }
        write!(f, "\n{}", String::from_utf8_lossy(body))
    }
}

fn lines<'a>(headers: &'a [(String, Vec<u8>)], name: &str) -> Vec<&'a str> {
    let lines = headers.iter().filter(|(present, _)| present == name);
    lines.map(|(_, value)| std::str::from_utf8(value).expect("a text value")).collect()
}

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The connection ended before the first byte of an answer.
    Before,
    /// The connection ended within an answer: how many bytes of its body had come.
    Within { body: usize },
}

/// One connection. Dropping it closes it.
pub(crate) struct Connection {
    stream: TcpStream,
    /// What has been read and not yet been taken.
    read: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(addr: SocketAddr) -> Self {
        let stream = within(TcpStream::connect(addr)).await.expect("it listens");
        stream.set_nodelay(true).unwrap();
        Self { stream, read: Vec::new() }
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_write(bytes).await.expect("the server reads on");
    }

    pub(crate) async fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        within(self.stream.write_all(bytes.as_ref())).await
    }

    /// Says that nothing more will be sent; answers can still be read.
    pub(crate) async fn finish_writing(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Reads until the server has closed the connection, and returns what it still sent.
    pub(crate) async fn rest(mut self) -> Vec<u8> {
        while self.more().await {}
        self.read
    }

    /// Reads one whole answer.
    #[track_caller]
    pub(crate) fn answer(&mut self) -> impl Future<Output = Answer> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            match self.try_answer().await {
                Ok(answer) => answer,
                Err(cut) => panic!("no answer: {cut:?}, at {caller}"),
            }
        }
    }

    /// Reads `100 Continue`: the server has begun to read the body.
    #[track_caller]
    pub(crate) fn go_on(&mut self) -> impl Future<Output = ()> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let answer = self.try_answer().await;
            let status = answer.as_ref().map(|answer| answer.status);
            assert_eq!(status, Ok(100), "at {caller}: {answer:?}");
        }
    }

    /// Reads the head of an answer, whose body is still to come.
    #[track_caller]
    pub(crate) fn answer_head(&mut self) -> impl Future<Output = Answer> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let head = self.try_head().await;
            head.unwrap_or_else(|cut| panic!("no answer: {cut:?}, at {caller}"))
        }
    }

    /// Reads one more chunk of an answer's body, from an answer that is chunked and goes on.
    #[track_caller]
    pub(crate) fn next_chunk(&mut self) -> impl Future<Output = Vec<u8>> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let mut data = Vec::new();
            let more = self.chunk(&mut data).await;
            assert_eq!(more, Some(true), "the answer is over, at {caller}");
            data
        }
    }

    /// Reads one whole answer, or finds the connection cut. What is no HTTP/1.1 fails the test.
    pub(crate) async fn try_answer(&mut self) -> Result<Answer, Cut> {
        let mut answer = self.try_head().await?;
        let whole = match answer.framing {
            Framing::None => Some(()),
            Framing::Length(length) => self.data(length, &mut answer.body).await,
            Framing::Chunked => self.rest_of(&mut answer).await,
            Framing::Http2 => unreachable!("this is HTTP/1.1"),
        };
        whole.map_or(Err(Cut::Within { body: answer.body.len() }), |()| Ok(answer))
    }

    async fn try_head(&mut self) -> Result<Answer, Cut> {
        let Some(status_line) = self.line().await else {
            assert!(self.read.is_empty(), "a cut within the status line");
            return Err(Cut::Before);
        };
        let status = status(&status_line);
        let headers = self.fields().await.ok_or(Cut::Within { body: 0 })?;
        let framing = framing(status, &headers);
        Ok(Answer { status, headers, framing, body: Vec::new(), trailers: Vec::new() })
    }

    /// Reads all that is missing of a chunked answer.
    pub(crate) async fn rest_of(&mut self, answer: &mut Answer) -> Option<()> {
        while self.chunk(&mut answer.body).await? {}
        answer.trailers = self.fields().await?;
        Some(())
    }

    /// Reads one chunk; false if it is the one that says that there are no more.
    async fn chunk(&mut self, into: &mut Vec<u8>) -> Option<bool> {
        let size = self.line().await?;
        assert!(size.bytes().all(|digit| digit.is_ascii_hexdigit()), "{size:?}");
        let size = usize::from_str_radix(&size, 16).expect("a chunk's size");
        if size > 0 {
            self.data(size, into).await?;
            assert_eq!(self.line().await?, "", "a chunk ends with its line");
        }
        Some(size > 0)
    }

    /// Header or trailer fields, to the empty line that ends them.
    async fn fields(&mut self) -> Option<Vec<(String, Vec<u8>)>> {
        let mut fields = Vec::new();
        loop {
            let line = self.line_bytes().await?;
            if line.is_empty() {
                return Some(fields);
            }
            let colon = line.iter().position(|byte| *byte == b':').expect("a name and a value");
            let (name, value) = (&line[..colon], &line[colon + 1..]);
            let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
            assert!(!name.is_empty() && name.iter().all(is_token), "{line:?}");
            let name = String::from_utf8(name.to_ascii_lowercase()).unwrap();
            fields.push((name, value.trim_ascii().to_owned()));
        }
    }

    async fn data(&mut self, length: usize, into: &mut Vec<u8>) -> Option<()> {
        let mut missing = length;
        while missing > 0 {
            if self.read.is_empty() && !self.more().await {
                return None;
            }
            let taken = missing.min(self.read.len());
            into.extend(self.read.drain(..taken));
            missing -= taken;
        }
        Some(())
    }

    async fn line(&mut self) -> Option<String> {
        Some(String::from_utf8(self.line_bytes().await?).expect("a text line"))
    }

    async fn line_bytes(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.read.drain(..=end).collect();
                assert!(line.ends_with(b"\r\n"), "a line ends with CR LF: {line:?}");
                line.truncate(line.len() - 2);
                return Some(line);
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// Reads what there is. False at the end of the connection, however it ended.
    async fn more(&mut self) -> bool {
        within(self.stream.read_buf(&mut self.read)).await.is_ok_and(|read| read > 0)
    }
}

fn status(line: &str) -> u16 {
    let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.split(' ').next());
    let status = status.filter(|digits| digits.len() == 3).expect("a status line");
    status.parse().expect("a status")
}

fn framing(status: u16, headers: &[(String, Vec<u8>)]) -> Framing {
    let length = lines(headers, "content-length");
    let coding = lines(headers, "transfer-encoding");
    match (&length[..], &coding[..]) {
        ([], []) if status < 200 || status == 204 || status == 304 => Framing::None,
        ([length], []) if status >= 200 && status != 204 => {
            Framing::Length(length.parse().expect("a length"))
        }
        ([], ["chunked"]) if status >= 200 && status != 204 => Framing::Chunked,
        _ => panic!("a {status} with these lengths and codings: {length:?} {coding:?}"),
    }
}
