//! What a record keeps of a response. In: the answer of the inner service; out: a
//! [`StoredResponse`] that stores hold and [`replay`](crate::replay) gives again.

use std::{fmt, sync::Arc};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::engine::Settlement;

/// Up to so many bytes a body is copied into the record. One that is larger is kept as it came, even
/// if that is a slice of something larger still.
///
/// What came over a connection is a slice of the buffer that it was read into: with hyper of 8 to
/// 408 KiB, headers and all. A record of a few bytes must not keep that alive; one of this size
/// keeps alive few times its own.
const COPIED_UP_TO: usize = 64 * 1024;

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
        mut headers: HeaderMap,
        mut body: Bytes,
        mut trailers: Option<HeaderMap>,
    ) -> Self {
        let copies_body = body.len() <= COPIED_UP_TO;
        let values = headers.values().chain(trailers.iter().flat_map(HeaderMap::values));
        let length = values.map(HeaderValue::len).sum::<usize>();
        let mut copy = BytesMut::with_capacity(length + if copies_body { body.len() } else { 0 });
        for value in headers.values_mut().chain(trailers.iter_mut().flat_map(HeaderMap::values_mut))
        {
            copy_value(value, &mut copy);
        }
        if copies_body {
            copy.extend_from_slice(&body);
            body = copy.freeze();
        }
        Self(Arc::new(Stored::Response { status, headers, body, trailers }))
    }

    /// Keeps no more of a response than that there was one, and its `Location`.
    pub(crate) fn tombstone(mut location: Option<HeaderValue>) -> Self {
        if let Some(location) = &mut location {
            copy_value(location, &mut BytesMut::new());
        }
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
        const LINE: usize = size_of::<(HeaderName, HeaderValue)>() + 32;
        let of = |headers: &HeaderMap| -> usize {
            let lines = headers.iter().map(|(name, value)| name.as_str().len() + value.len());
            lines.sum::<usize>() + headers.capacity() * LINE
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

/// Puts a copy in the place of a value that may be a slice of something larger. `copy` is where it
/// goes, so that one piece of memory serves many.
fn copy_value(value: &mut HeaderValue, copy: &mut BytesMut) {
    copy.extend_from_slice(value.as_bytes());
    let copied = HeaderValue::from_maybe_shared(copy.split().freeze());
    // It is what was a value before, so there is no error.
    if let Ok(mut copied) = copied {
        copied.set_sensitive(value.is_sensitive());
        *value = copied;
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
