//! The same request over HTTP/1.1 or HTTP/2, for what is the same over both.

use super::{
    Answer, Post, Server,
    http1::Cut,
    http2::{self, Http2},
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
                let reply = http2::Reply::read(response).await;
                // How much had come is not looked at here.
                reply.map(http2::Reply::into_answer).map_err(|_| Cut::Within { body: 0 })
            }
        }
    }
}
