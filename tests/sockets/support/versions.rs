//! The same request over HTTP/1.1 or HTTP/2, for what is the same over both.

use http_body_util::BodyExt;

use super::{
    Answer, Connection, Post, Server,
    http1::Cut,
    http2::{self, Http2, Reply},
    within,
};

/// How a request goes, and its answer comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    Http1,
    Http2,
}

/// Each of them.
pub(crate) const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

impl Version {
    /// Sends one request over a connection of its own.
    #[track_caller]
    pub(crate) fn send<'a>(
        self,
        server: &'a Server,
        post: &'a Post,
        body: impl AsRef<[u8]> + 'a,
    ) -> impl Future<Output = Answer> + 'a {
        let caller = std::panic::Location::caller();
        async move {
            let answer = self.try_send(server, post, body).await;
            answer.unwrap_or_else(|cut| panic!("no answer: {cut:?} over {self:?}, at {caller}"))
        }
    }

    /// Sends one request over a connection of its own, which may be cut before its answer is whole.
    pub(crate) async fn try_send(
        self,
        server: &Server,
        post: &Post,
        body: impl AsRef<[u8]>,
    ) -> Result<Answer, Cut> {
        match self {
            Self::Http1 => {
                let mut connection = server.connect().await;
                connection.write(post.body(body)).await;
                connection.try_answer().await
            }
            Self::Http2 => {
                let connection = Http2::connect(server.addr).await;
                let body = http2::whole(body.as_ref().to_vec());
                let request = http2::request(server.addr, post, body);
                let response = connection.open(request).await.map_err(|_| Cut::Before)?;
                let reply = Reply::read(response).await;
                // How much had come is not looked at here.
                reply.map(Reply::into_answer).map_err(|_| Cut::Within { body: 0 })
            }
        }
    }

    /// Sends one request over a connection of its own, and reads the head of its answer. Dropped,
    /// its client has left.
    pub(crate) async fn open(self, server: &Server, post: &Post, body: &str) -> Coming {
        match self {
            Self::Http1 => {
                let mut connection = server.connect().await;
                connection.write(post.body(body)).await;
                let head = connection.answer_head().await;
                Coming::Http1 { connection, head }
            }
            Self::Http2 => {
                let connection = Http2::connect(server.addr).await;
                let body = http2::whole(body.to_owned());
                let request = http2::request(server.addr, post, body);
                Coming::Http2 { response: connection.open(request).await.unwrap(), connection }
            }
        }
    }
}

/// An answer on its way.
pub(crate) enum Coming {
    Http1 { connection: Connection, head: Answer },
    Http2 { response: http::Response<hyper::body::Incoming>, connection: Http2 },
}

impl Coming {
    /// The next data of its body.
    pub(crate) async fn next(&mut self) -> String {
        let data = match self {
            Self::Http1 { connection, .. } => connection.next_chunk().await,
            Self::Http2 { response, .. } => {
                let frame = within(response.body_mut().frame()).await.expect("it goes on");
                frame.unwrap().into_data().expect("data").to_vec()
            }
        };
        String::from_utf8(data).unwrap()
    }

    /// What is left of it, as one answer.
    pub(crate) async fn rest(self) -> Answer {
        match self {
            Self::Http1 { mut connection, mut head } => {
                connection.rest_of(&mut head).await.expect("it is not cut");
                head
            }
            Self::Http2 { response, connection } => {
                let reply = Reply::read(response).await.unwrap();
                drop(connection);
                reply.into_answer()
            }
        }
    }
}
