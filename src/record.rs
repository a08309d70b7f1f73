//! What a record keeps of a response. In: the answer of the inner service; out: a
//! [`StoredResponse`] that stores hold and [`replay`](crate::replay) gives again.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header::LOCATION, response::Parts};

use crate::headers;

/// The value of a record: a finished response, or a tombstone. Opaque; a clone costs no copy.
#[derive(Clone)]
pub struct StoredResponse(Arc<Stored>);

pub(crate) enum Stored {
    Response {
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// Done, but the response cannot be replayed.
    Tombstone {
        location: Option<HeaderValue>,
    },
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

    pub(crate) fn get(&self) -> &Stored {
        &self.0
    }
}

/// The `Location` that a tombstone keeps.
pub(crate) fn location(parts: &Parts) -> Option<HeaderValue> {
    parts.headers.get(LOCATION).cloned()
}

impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A response is its caller's: nothing of it belongs in a log.
        f.write_str(match self.get() {
            Stored::Response { .. } => "StoredResponse(response)",
            Stored::Tombstone { .. } => "StoredResponse(tombstone)",
        })
    }
}
