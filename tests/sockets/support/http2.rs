//! One HTTP/2 connection in clear text, and answers read whole.

use std::{convert::Infallible, net::SocketAddr};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{net::TcpStream, sync::mpsc};

use super::{Answer, Post, http1::Framing, within};

pub(crate) type Upload = UnsyncBoxBody<Bytes, Infallible>;

/// A body that is all there.
pub(crate) fn whole(data: impl Into<Bytes>) -> Upload {
    Full::new(data.into()).boxed_unsync()
}

/// A body of unknown length that goes on until the sender is dropped. There is room for one piece
/// in it: when a second has been sent, the first is on its way.
pub(crate) fn open() -> (mpsc::Sender<Bytes>, Upload) {
    let (sender, mut receiver) = mpsc::channel(1);
    let frames = futures_util::stream::poll_fn(move |context| {
        receiver.poll_recv(context).map(|data| data.map(|data| Ok(Frame::data(data))))
    });
    (sender, StreamBody::new(frames).boxed_unsync())
}

/// A run of `alice`'s with the key `k`.
pub(crate) fn run(addr: SocketAddr, body: Upload) -> Request<Upload> {
    Request::post(format!("http://{addr}/v1/runs"))
        .header("authorization", "Bearer alice")
        .header("content-type", "application/json")
        .header("idempotency-key", "k")
        .body(body)
        .unwrap()
}

/// The same request as over HTTP/1.1, with this body.
pub(crate) fn request(addr: SocketAddr, post: &Post, body: Upload) -> Request<Upload> {
    let mut request = Request::post(format!("http://{addr}{}", post.path()));
    for (name, value) in post.headers().filter(|(name, _)| *name != "host") {
        request = request.header(name, value);
    }
    request.body(body).unwrap()
}

/// A body that is all there, and trailers behind it.
pub(crate) fn with_trailers(data: &'static str, trailers: &[(&'static str, &str)]) -> Upload {
    let mut map = HeaderMap::new();
    for (name, value) in trailers {
        map.append(*name, value.parse().unwrap());
    }
    Full::from(data).with_trailers(async { Some(Ok(map)) }).boxed_unsync()
}

/// An answer, read whole.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Reply {
    /// Reads the body; an error if it is cut.
    pub(crate) async fn read(response: Response<Incoming>) -> Result<Self, hyper::Error> {
        let (parts, body) = response.into_parts();
        let body = within(body.collect()).await?;
        let trailers = body.trailers().cloned();
        let (status, headers) = (parts.status.as_u16(), parts.headers);
        Ok(Self { status, headers, body: body.to_bytes(), trailers })
    }

    /// The same, as the HTTP/1.1 client would put it.
    pub(crate) fn into_answer(self) -> Answer {
        let lines = |headers: &HeaderMap| {
            let lines = headers.iter();
            lines.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect()
        };
        Answer {
            status: self.status,
            headers: lines(&self.headers),
            framing: Framing::Http2,
            body: self.body.to_vec(),
            trailers: self.trailers.as_ref().map(lines).unwrap_or_default(),
        }
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    #[track_caller]
    pub(crate) fn run_id(&self) -> String {
        assert_eq!(self.status, 202, "{self:?}");
        self.json()["run_id"].as_str().expect("a run id").to_owned()
    }

    #[track_caller]
    pub(crate) fn assert_refused(&self, status: u16, code: &str) {
        assert_eq!((self.status, &self.json()["code"]), (status, &code.into()), "{self:?}");
    }

    /// All that a replay has to repeat.
    pub(crate) fn lasting(&self) -> (u16, HeaderMap, Bytes, Option<HeaderMap>) {
        let mut headers = self.headers.clone();
        headers.remove("date");
        headers.remove("idempotent-replayed");
        (self.status, headers, self.body.clone(), self.trailers.clone())
    }
}

/// One connection, with as many streams as are sent.
#[derive(Clone)]
pub(crate) struct Http2(http2::SendRequest<Upload>);

impl Http2 {
    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        let stream = TokioIo::new(within(TcpStream::connect(addr)).await.unwrap());
        let (sender, connection) =
            within(http2::handshake(TokioExecutor::new(), stream)).await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    /// Sends a request and reads the head of its answer.
    pub(crate) async fn open(
        &self,
        request: Request<Upload>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        within(self.0.clone().send_request(request)).await
    }

    pub(crate) async fn try_send(&self, request: Request<Upload>) -> Result<Reply, hyper::Error> {
        Reply::read(self.open(request).await?).await
    }

    #[track_caller]
    pub(crate) fn send(&self, request: Request<Upload>) -> impl Future<Output = Reply> + '_ {
        let caller = std::panic::Location::caller();
        async move {
            let reply = self.try_send(request).await;
            reply.unwrap_or_else(|error| panic!("no answer: {error:?}, at {caller}"))
        }
    }
}
