//! A finished response, kept and given again. In: what the inner service answered; out: that
//! answer, with the marker that it is a replay. Nothing is called.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header::LOCATION, response::Parts};
use http_body::Body;

use crate::{
    body::ResponseBody,
    headers::{self, REPLAYED},
    refusal::Refusal,
};

/// The value of a record: a finished response, or a tombstone. Opaque; a clone costs no copy.
#[derive(Clone)]
pub struct StoredResponse(Arc<Stored>);

enum Stored {
    Response { status: StatusCode, headers: HeaderMap, body: Bytes, trailers: Option<HeaderMap> },
    Tombstone { location: Option<HeaderValue> },
}

impl StoredResponse {
    /// Keeps a whole response.
    pub(crate) fn response(parts: &Parts, body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self(Arc::new(Stored::Response {
            status: parts.status,
            headers: headers::kept(parts.status, &parts.headers, trailers.is_some()),
            body,
            trailers,
        }))
    }

    /// Keeps no more of a response than that there was one, and its `Location`.
    pub(crate) fn tombstone(location: Option<HeaderValue>) -> Self {
        Self(Arc::new(Stored::Tombstone { location }))
    }

    /// The response again, or the refusal that a tombstone is answered with.
    pub(crate) fn replay<B: Body>(&self) -> Result<Response<ResponseBody<B>>, Refusal> {
        let (status, headers, body, trailers) = match &*self.0 {
            Stored::Response { status, headers, body, trailers } => {
                (status, headers, body, trailers)
            }
            Stored::Tombstone { location } => {
                return Err(Refusal::not_replayable(location.clone()));
            }
        };
        let mut response = Response::new(ResponseBody::whole(body.clone(), trailers.clone()));
        *response.status_mut() = *status;
        *response.headers_mut() = headers.clone();
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        Ok(response)
    }
}

/// The `Location` that a tombstone keeps.
pub(crate) fn location(parts: &Parts) -> Option<HeaderValue> {
    parts.headers.get(LOCATION).cloned()
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A response is its caller's: nothing of it belongs in a log.
        f.write_str(match &*self.0 {
            Stored::Response { .. } => "StoredResponse(response)",
            Stored::Tombstone { .. } => "StoredResponse(tombstone)",
        })
    }
}
