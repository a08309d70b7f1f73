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
        headers: Lines,
        body: Bytes,
        trailers: Option<Lines>,
    },
    /// Done, but the response cannot be replayed.
    Tombstone {
        location: Option<HeaderValue>,
    },
}

/// The lines of headers or trailers. A `HeaderMap` takes several times as much memory, for which a
/// record has no use.
pub(crate) struct Lines(Box<[(HeaderName, HeaderValue)]>);

impl Lines {
    /// Copies lines, their values into `memory`.
    fn copy<'h>(lines: impl ExactSizeIterator<Item = Line<'h>>, memory: &mut BytesMut) -> Self {
        let mut copies = Vec::with_capacity(lines.len());
        for (name, value) in lines {
            copies.push((name.clone(), copy_value(value, memory)));
        }
        Self(copies.into())
    }

    /// All lines as headers again, with room for `more`.
    pub(crate) fn to_map(&self, more: usize) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(self.0.len() + more);
        for (name, value) in &self.0 {
            headers.append(name, value.clone());
        }
        headers
    }

    fn bytes(&self) -> usize {
        let texts = self.0.iter().map(|(name, value)| name.as_str().len() + value.len());
        texts.sum::<usize>() + size_of_val(&*self.0)
    }
}

/// A line of somebody else's headers or trailers.
pub(crate) type Line<'h> = (&'h HeaderName, &'h HeaderValue);

impl StoredResponse {
    /// Keeps a whole response, with these of its headers.
    pub(crate) fn response(
        status: StatusCode,
        headers: &[Line<'_>],
        mut body: Bytes,
        trailers: Option<&HeaderMap>,
    ) -> Self {
        let copies_body = body.len() <= COPIED_UP_TO;
        let trailers = trailers.map(Vec::from_iter);
        let lines = headers.iter().chain(trailers.iter().flatten());
        let length = lines.map(|(_, value)| value.len()).sum::<usize>();
        // One piece of memory for all.
        let mut memory = BytesMut::with_capacity(length + if copies_body { body.len() } else { 0 });
        let headers = Lines::copy(headers.iter().copied(), &mut memory);
        let trailers = trailers.map(|trailers| Lines::copy(trailers.into_iter(), &mut memory));
        if copies_body {
            memory.extend_from_slice(&body);
            body = memory.freeze();
        }
        Self(Arc::new(Stored::Response { status, headers, body, trailers }))
    }

    /// Keeps no more of a response than that there was one, and its `Location`.
    pub(crate) fn tombstone(location: Option<&HeaderValue>) -> Self {
        let location = location.map(|location| copy_value(location, &mut BytesMut::new()));
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
        size_of::<Stored>()
            + match self.get() {
                Stored::Response { headers, body, trailers, .. } => {
                    headers.bytes() + body.len() + trailers.as_ref().map_or(0, Lines::bytes)
                }
                Stored::Tombstone { location } => location.as_ref().map_or(0, HeaderValue::len),
            }
    }
}

/// A copy of a value that may be a slice of something larger. `memory` is where it goes.
fn copy_value(value: &HeaderValue, memory: &mut BytesMut) -> HeaderValue {
    memory.extend_from_slice(value.as_bytes());
    // It is what was a value before, so there is no error.
    let copied = HeaderValue::from_maybe_shared(memory.split().freeze());
    let mut copied = copied.unwrap_or_else(|_| value.clone());
    copied.set_sensitive(value.is_sensitive());
    copied
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_copied_out_of_what_it_came_in_up_to_64_kib() {
        let read_into = Bytes::from(vec![b'x'; 128 * 1024]);
        for (length, is_copied) in [(0, true), (1, true), (64 * 1024, true), (64 * 1024 + 1, false)]
        {
            let came = read_into.slice(..length);
            let kept = StoredResponse::response(StatusCode::OK, &[], came.clone(), None);
            let Stored::Response { body, .. } = kept.get() else { panic!("a response") };
            assert_eq!(*body, came);
            assert_eq!(body.as_ptr() != came.as_ptr(), is_copied, "{length}");
        }
    }
}
