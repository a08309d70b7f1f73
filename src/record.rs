//! What a record keeps of a response. In: the answer of the inner service; out: a
//! [`StoredResponse`] that stores hold and [`replay`](crate::replay) gives again.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};

use crate::engine::Settlement;

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
    /// Keeps a whole response, with the headers that a record keeps.
    pub(crate) fn response(
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
        trailers: Option<HeaderMap>,
    ) -> Self {
        Self(Arc::new(Stored::Response { status, headers, body, trailers }))
    }

    /// Keeps no more of a response than that there was one, and its `Location`.
    pub(crate) fn tombstone(location: Option<HeaderValue>) -> Self {
        Self(Arc::new(Stored::Tombstone { location }))
    }

    /// The end of a claim with this value.
    pub(crate) fn recorded(self) -> Settlement<Self> {
        Settlement::Record { bytes: self.bytes(), value: self }
    }

    pub(crate) fn get(&self) -> &Stored {
        &self.0
    }

    /// About how many bytes it takes, for the store's budget.
    fn bytes(&self) -> usize {
        let of = |headers: &HeaderMap| -> usize {
            headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum()
        };
        size_of::<Stored>()
            + match self.get() {
                Stored::Response { headers, body, trailers, .. } => {
                    of(headers) + body.len() + trailers.as_ref().map_or(0, of)
                }
                Stored::Tombstone { location } => location.as_ref().map_or(0, HeaderValue::len),
            }
    }
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
