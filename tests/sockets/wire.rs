//! What a first answer and its replay look like on the wire, for every kind of body, over HTTP/1.1
//! and HTTP/2; and what becomes of work whose client leaves. The layer is around a hyper service.

use std::{
    convert::Infallible,
    error::Error,
    fmt,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    sync::{Semaphore, watch},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{Disposition, IdempotencyLayer, RequestBody, ResponseBody, scope};

use crate::support::{
    Connection, Post, eventually,
    http1::{Cut, Framing, chunk},
    http2::{self, Http2},
    within,
};

type Body = UnsyncBoxBody<Bytes, Broken>;

/// What a body breaks with.
#[derive(Debug)]
struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken")
    }
}

impl Error for Broken {}

/// What a body that does not break breaks with.
fn never(never: Infallible) -> Broken {
    match never {}
}

/// A date that the server itself would not send.
const LONG_AGO: &str = "Thu, 01 Jan 1970 00:00:00 GMT";

/// The largest response that the site records.
const LIMIT: usize = 1000;

/// A hyper server in this process, with the layer around its handler.
#[derive(Clone)]
struct Site {
    addr: SocketAddr,
    layer: IdempotencyLayer,
    inside: Arc<Inside>,
}

/// What the handler counts, and waits for.
struct Inside {
    calls: AtomicUsize,
    /// How many are at the gate of `/wait`, and how many may go on.
    waiting: watch::Sender<usize>,
    may_go_on: Semaphore,
    /// How many requests were dropped by the server before there was an answer.
    left: watch::Sender<usize>,
}

impl Site {
    async fn start() -> Self {
        Self::start_with(|layer| layer).await
    }

    async fn start_with(set: impl FnOnce(IdempotencyLayer) -> IdempotencyLayer) -> Self {
        let inside = Arc::new(Inside {
            calls: AtomicUsize::new(0),
            waiting: watch::Sender::new(0),
            may_go_on: Semaphore::new(0),
            left: watch::Sender::new(0),
        });
        let layer = set(IdempotencyLayer::new(scope::single_tenant()).response_limit(LIMIT));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let site = Self {
            addr: listener.local_addr().unwrap(),
            layer: layer.clone(),
            inside: Arc::clone(&inside),
        };

        let handler = Arc::clone(&inside);
        let handler = service_fn(move |request| handle(Arc::clone(&handler), request));
        let guarded = layer.layer(handler);
        let service = service_fn(move |request: Request<Incoming>| {
            let (guarded, inside) = (guarded.clone(), Arc::clone(&inside));
            async move {
                let mut leaving = Leaving { inside, answered: false };
                let answer: Result<Response<ResponseBody<Body>>, _> =
                    guarded.oneshot(request).await;
                leaving.answered = true;
                answer
            }
        });
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = TowerToHyperService::new(service.clone());
                tokio::spawn(async move {
                    let server = auto::Builder::new(TokioExecutor::new());
                    // A connection that a client or a broken body has cut is what is tested.
                    let _cut = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        site
    }

    async fn connect(&self) -> Connection {
        Connection::open(self.addr).await
    }

    fn calls(&self) -> usize {
        self.inside.calls.load(Ordering::SeqCst)
    }

    fn count(&self, disposition: Disposition) -> u64 {
        self.layer.dispositions().get(disposition)
    }
}

/// Tells that the server has dropped a request before there was an answer.
struct Leaving {
    inside: Arc<Inside>,
    answered: bool,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if !self.answered {
            self.inside.left.send_modify(|left| *left += 1);
        }
    }
}

async fn handle(
    inside: Arc<Inside>,
    request: Request<RequestBody<Incoming>>,
) -> Result<Response<Body>, Infallible> {
    let call = inside.calls.fetch_add(1, Ordering::SeqCst) + 1;
    let answer = Response::builder().header("x-call", call);
    let text = |text: &'static str| Full::from(text).map_err(never).boxed_unsync();
    let response = match request.uri().path() {
        "/length" => answer.body(text("hello")),
        "/empty" => answer.body(text("")),
        "/created" => answer
            .status(StatusCode::CREATED)
            .header("location", "/things/1")
            .header("link", "<a>; rel=next")
            .header("etag", "\"1\"")
            .header("link", "<b>; rel=prev")
            .header("content-type", "text/csv; charset=utf-8")
            .header("content-disposition", "attachment; filename=\"a,b\"")
            .header("x-latin", http::HeaderValue::from_bytes(b"caf\xe9").unwrap())
            .header("x-empty", "")
            .header("set-cookie", "session=secret")
            .header("www-authenticate", "Bearer")
            .header("x-request-id", "1")
            .header("date", LONG_AGO)
            .header("connection", "x-hop")
            .header("x-hop", "1")
            .body(text("a,b\n")),
        "/no-content" => answer.status(StatusCode::NO_CONTENT).body(text("")),
        "/see-other" => {
            answer.status(StatusCode::SEE_OTHER).header("location", "/things/1").body(text(""))
        }
        "/said-length" => {
            answer.header("content-length", 10).body(frames([Ok("hello"), Ok("hello")]))
        }
        "/stream" => {
            answer.header("location", "/things/1").body(frames([Ok("hello "), Ok("world")]))
        }
        "/large" => {
            let large = Full::from(vec![b'x'; LIMIT + 1]).map_err(never);
            answer.header("location", "/things/1").body(large.boxed_unsync())
        }
        "/trailers" => {
            let trailers = HeaderMap::from_iter([("x-checksum".parse().unwrap(), 5.into())]);
            let body = Full::from("hello").with_trailers(async { Some(Ok(trailers)) });
            answer.header("trailer", "x-checksum").body(body.map_err(never).boxed_unsync())
        }
        "/broken" => answer.body(frames([Ok("hello"), Err(Broken)])),
        "/broken-known" => {
            let body = KnownLength { body: frames([Ok("hello"), Err(Broken)]), length: 10 };
            answer.body(body.boxed_unsync())
        }
        "/broken-length" => {
            answer.header("content-length", 10).body(frames([Ok("hello"), Err(Broken)]))
        }
        "/broken-at-its-end" => {
            let body = frames([Ok("hello"), Ok("hello"), Err(Broken)]);
            answer.header("content-length", 10).body(body)
        }
        "/broken-at-its-end-known" => {
            let body = KnownLength { body: frames([Ok("hello"), Err(Broken)]), length: 5 };
            answer.body(body.boxed_unsync())
        }
        "/broken-large-at-its-end" => {
            let large = Full::from(vec![b'x'; LIMIT + 1]).map_err(never);
            let body = large.with_trailers(async { Some(Err(Broken)) });
            answer.header("content-length", LIMIT + 1).body(body.boxed_unsync())
        }
        "/broken-large" => {
            let body = frames([Ok("hello"), Ok("hello"), Err(Broken)]);
            answer.header("content-length", LIMIT + 1).body(body)
        }
        "/echo" => answer.body(request.into_body().map_err(|_| Broken).boxed_unsync()),
        "/wait" => {
            inside.waiting.send_modify(|waiting| *waiting += 1);
            inside.may_go_on.acquire().await.unwrap().forget();
            answer.body(text("at last"))
        }
        path => panic!("no such path: {path}"),
    };
    Ok(response.unwrap())
}

/// A body of unknown length, which may break.
fn frames<const N: usize>(frames: [Result<&'static str, Broken>; N]) -> Body {
    let frames = frames.map(|frame| frame.map(|data| Frame::data(Bytes::from(data))));
    StreamBody::new(stream::iter(frames)).boxed_unsync()
}

/// A body that knows its length, and no more than another whether it gets there.
struct KnownLength {
    body: Body,
    length: u64,
}

impl http_body::Body for KnownLength {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.length)
    }
}

fn post(path: &str) -> Post {
    Post::to(path).key("k")
}

fn h2_post(site: &Site, path: &str) -> Request<http2::Upload> {
    Request::post(format!("http://{}{path}", site.addr))
        .header("idempotency-key", "k")
        .body(http2::whole(""))
        .unwrap()
}

#[tokio::test]
async fn a_body_of_known_length_has_that_length_the_first_time_and_again() {
    for (path, status, framing, body) in [
        ("/length", 200, Framing::Length(5), "hello"),
        ("/empty", 200, Framing::Length(0), ""),
        ("/created", 201, Framing::Length(4), "a,b\n"),
        ("/no-content", 204, Framing::None, ""),
        ("/see-other", 303, Framing::Length(0), ""),
        ("/said-length", 200, Framing::Length(10), "hellohello"),
    ] {
        let site = Site::start().await;
        // All on one connection, which a wrong length would throw out of step.
        let mut connection = site.connect().await;
        for is_replay in [false, true, true] {
            connection.write(post(path).body("")).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.framing), (status, framing), "{path}: {answer:?}");
            assert_eq!((answer.text(), answer.is_replay()), (body, is_replay), "{path}");
            assert_eq!(answer.header("x-call"), Some("1"), "{path}");
            assert_eq!(answer.trailers, []);
        }
        let connection = Http2::connect(site.addr).await;
        let again = connection.send(h2_post(&site, path)).await;
        assert_eq!((again.status, &again.body[..]), (status, body.as_bytes()), "{path}");
        assert!(again.is_replay() && again.trailers.is_none());
        assert_eq!(site.calls(), 1, "{path}");
    }
}

#[tokio::test]
async fn the_first_answer_over_http2_is_replayed_over_http1() {
    for path in ["/length", "/empty", "/created", "/no-content", "/see-other", "/said-length"] {
        let site = Site::start().await;
        let connection = Http2::connect(site.addr).await;
        let first = connection.send(h2_post(&site, path)).await;
        let again = connection.send(h2_post(&site, path)).await;
        assert!(!first.is_replay() && again.is_replay());
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{path}");
        let length = first.headers.get("content-length");
        assert_eq!(again.headers.get("content-length"), length, "{path}");
        let mut connection = site.connect().await;
        connection.write(post(path).body("")).await;
        let again = connection.answer().await;
        assert_eq!((again.status, &again.body[..]), (first.status, &first.body[..]), "{path}");
        assert!(again.is_replay());
        assert_eq!(site.calls(), 1, "{path}");
    }
}

#[tokio::test]
async fn a_replay_has_all_header_lines_but_those_of_one_exchange() {
    let site = Site::start().await;
    let mut connection = site.connect().await;
    connection.write(post("/created").body("")).await;
    let first = connection.answer().await;
    connection.write(post("/created").body("")).await;
    let again = connection.answer().await;

    let one_exchange = ["set-cookie", "www-authenticate", "x-request-id", "connection", "x-hop"];
    for name in one_exchange {
        assert_eq!(first.lines(name).len(), 1, "the first caller gets {name}");
        assert_eq!(again.lines(name), [""; 0], "{name}");
    }
    let mut expected = first.clone();
    expected.headers.retain(|(name, _)| !one_exchange.contains(&name.as_str()));
    assert_eq!(again.lasting(), expected.lasting());
    assert_eq!(again.lines("link"), ["<a>; rel=next", "<b>; rel=prev"]);
    assert_eq!(again.headers.iter().find(|(name, _)| name == "x-latin").unwrap().1, b"caf\xe9");
    assert_eq!(first.header("date"), Some(LONG_AGO));
    assert_ne!(again.header("date").expect("a date of its own"), LONG_AGO);
}

#[tokio::test]
async fn trailers_behind_a_body_of_known_length_come_again() {
    let site = Site::start().await;
    let mut connection = site.connect().await;
    for is_replay in [false, true] {
        connection.write(post("/trailers").with("te", "trailers").body("")).await;
        let answer = connection.answer().await;
        assert_eq!((answer.text(), answer.is_replay()), ("hello", is_replay));
        assert_eq!(answer.header("trailer"), Some("x-checksum"));
        assert_eq!(answer.trailers, [("x-checksum".to_owned(), b"5".to_vec())]);
    }
    // Whoever has not said that it takes trailers gets the same without them.
    connection.write(post("/trailers").body("")).await;
    let without = connection.answer().await;
    assert_eq!((without.text(), without.is_replay()), ("hello", true));
    assert_eq!(without.trailers, []);

    let connection = Http2::connect(site.addr).await;
    let again = connection.send(h2_post(&site, "/trailers")).await;
    assert_eq!((&again.body[..], again.is_replay()), (&b"hello"[..], true));
    assert_eq!(again.trailers.unwrap()["x-checksum"], "5");
    assert_eq!(site.calls(), 1);
}

#[tokio::test]
async fn a_body_over_the_limit_comes_whole_and_is_not_done_again() {
    let site = Site::start().await;
    let mut connection = site.connect().await;
    connection.write(post("/large").body("")).await;
    let first = connection.answer().await;
    let whole = Framing::Length(LIMIT + 1);
    assert_eq!((first.status, first.framing, first.body.len()), (200, whole, LIMIT + 1));
    assert!(!first.is_replay());
    for _ in 0..2 {
        connection.write(post("/large").body("")).await;
        let again = connection.answer().await;
        let problem = again.assert_refused(409, "idempotency_not_replayable");
        assert_eq!(problem["retry"], "never");
        assert_eq!(again.header("location"), Some("/things/1"));
    }
    let connection = Http2::connect(site.addr).await;
    let again = connection.send(h2_post(&site, "/large")).await;
    again.assert_refused(409, "idempotency_not_replayable");
    assert_eq!(again.headers["location"], "/things/1");
    assert_eq!(site.calls(), 1);
}

#[tokio::test]
async fn a_body_of_unknown_length_comes_as_it_is_made_and_again_with_its_length() {
    let site = Site::start().await;
    let mut connection = site.connect().await;
    connection.write(post("/stream").body("")).await;
    let first = connection.answer().await;
    assert_eq!((first.status, first.framing, first.body.len()), (200, Framing::Chunked, 11));
    assert!(!first.is_replay());
    for _ in 0..2 {
        connection.write(post("/stream").body("")).await;
        let again = connection.answer().await;
        assert_eq!((again.status, again.framing), (200, Framing::Length(11)));
        assert_eq!(again.body, first.body);
        assert!(again.is_replay());
    }
    let connection = Http2::connect(site.addr).await;
    let again = connection.send(h2_post(&site, "/stream")).await;
    assert_eq!((again.status, &again.body[..]), (200, &first.body[..]));
    assert_eq!(site.calls(), 1);
}

#[tokio::test]
async fn a_body_that_breaks_is_a_cut_for_its_client_and_no_record() {
    for path in [
        "/broken",
        "/broken-known",
        "/broken-length",
        "/broken-large",
        // All bytes that it had declared have come by then.
        "/broken-at-its-end",
        "/broken-at-its-end-known",
        "/broken-large-at-its-end",
    ] {
        let site = Site::start().await;
        for call in 1..=2 {
            let mut connection = site.connect().await;
            connection.write(post(path).body("")).await;
            let cut = connection.try_answer().await;
            assert!(matches!(cut, Err(Cut::Before | Cut::Within { .. })), "{path}: {cut:?}");
            eventually(async || (site.count(Disposition::Executed) == call).then_some(())).await;
        }
        let connection = Http2::connect(site.addr).await;
        connection.try_send(h2_post(&site, path)).await.expect_err("a cut");
        assert_eq!(site.calls(), 3, "{path}");
        // The stream is cut, not the connection.
        let mut other = h2_post(&site, "/length");
        other.headers_mut().insert("idempotency-key", "other".parse().unwrap());
        assert_eq!(connection.send(other).await.body, "hello");
    }
}

#[tokio::test]
async fn the_handler_gets_the_body_as_it_was_sent() {
    let site = Site::start().await;
    let body: Vec<u8> = (0..=255).cycle().take(900).collect();
    let mut connection = site.connect().await;
    connection.write(post("/echo").chunks(body.chunks(7))).await;
    let first = connection.answer().await;
    assert_eq!((&first.body, first.framing), (&body, Framing::Length(900)));
    connection.write(post("/echo").body(&body)).await;
    let again = connection.answer().await;
    assert!(again.is_replay());
    assert_eq!(again.lasting(), first.lasting());
}

#[tokio::test]
async fn an_upload_that_stalls_is_given_up() {
    let stall = Duration::from_millis(100);
    let site = Site::start_with(|layer| layer.body_idle_timeout(stall)).await;
    for begun in [&b""[..], &chunk(b"hello")] {
        let mut connection = site.connect().await;
        let head = post("/echo").with("transfer-encoding", "chunked").head();
        connection.write([&head[..], begun].concat()).await;
        let answer = connection.answer().await;
        let problem = answer.assert_refused(408, "idempotency_body_unreadable");
        assert_eq!(problem["retry"], "same-key");
        assert_eq!(connection.rest().await, b"");
    }
    assert_eq!(site.calls(), 0);
    let mut connection = site.connect().await;
    connection.write(post("/echo").body("hello")).await;
    assert_eq!(connection.answer().await.text(), "hello");
}

#[tokio::test]
async fn work_whose_client_leaves_goes_on_and_its_retry_gets_the_answer() {
    let site = Site::start().await;
    let mut connection = site.connect().await;
    connection.write(post("/wait").body("")).await;
    at_the_gate(&site, 1).await;
    drop(connection);
    has_left(&site, 1).await;

    // A retry while it is running waits for it ...
    let mut retry = site.connect().await;
    retry.write(post("/wait").body("")).await;
    assert_eq!(site.layer.drain(Duration::from_millis(10)).await, 1, "it is running");
    site.inside.may_go_on.add_permits(1);
    let waited = retry.answer().await;
    assert_eq!((waited.text(), waited.is_replay()), ("at last", true));
    // ... and one after it gets the record.
    retry.write(post("/wait").body("")).await;
    assert_eq!(retry.answer().await.lasting(), waited.lasting());
    assert_eq!((site.layer.drain(Duration::from_secs(60)).await, site.calls()), (0, 1));
}

#[tokio::test]
async fn work_whose_stream_is_reset_goes_on_and_its_retry_gets_the_answer() {
    let site = Site::start().await;
    let connection = Http2::connect(site.addr).await;
    let abandoned = {
        let (connection, request) = (connection.clone(), h2_post(&site, "/wait"));
        tokio::spawn(async move { connection.try_send(request).await })
    };
    at_the_gate(&site, 1).await;
    abandoned.abort();
    has_left(&site, 1).await;
    site.inside.may_go_on.add_permits(1);
    let again = connection.send(h2_post(&site, "/wait")).await;
    assert_eq!((&again.body[..], again.is_replay()), (&b"at last"[..], true));
    assert_eq!(site.calls(), 1);
}

#[tokio::test]
async fn a_waiting_retry_that_leaves_leaves_the_work_alone() {
    let site = Site::start().await;
    let mut first = site.connect().await;
    first.write(post("/wait").body("")).await;
    at_the_gate(&site, 1).await;
    let mut retry = site.connect().await;
    retry.write(post("/wait").body("")).await;
    drop(retry);
    has_left(&site, 1).await;
    site.inside.may_go_on.add_permits(1);
    let answer = first.answer().await;
    assert_eq!((answer.text(), answer.is_replay(), site.calls()), ("at last", false, 1));
}

async fn at_the_gate(site: &Site, number: usize) {
    let mut waiting = site.inside.waiting.subscribe();
    within(waiting.wait_for(|waiting| *waiting >= number)).await.unwrap();
}

async fn has_left(site: &Site, number: usize) {
    let mut left = site.inside.left.subscribe();
    within(left.wait_for(|left| *left >= number)).await.unwrap();
}
