//! A body in one piece, and how long it says it is.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::SizeHint;

/// What `Content-Length` says, if it says one thing.
pub(crate) fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(http::header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// The data frames of a body as one piece: the frame itself where there is only one.
#[derive(Default)]
pub(crate) struct Collected {
    first: Bytes,
    rest: Option<BytesMut>,
}

impl Collected {
    pub(crate) fn len(&self) -> usize {
        self.rest.as_ref().map_or(self.first.len(), BytesMut::len)
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if let Some(rest) = &mut self.rest {
            rest.extend_from_slice(&data);
        } else if self.first.is_empty() {
            self.first = data;
        } else if !data.is_empty() {
            let mut both = BytesMut::with_capacity((self.first.len() + data.len()) * 2);
            both.extend_from_slice(&self.first);
            both.extend_from_slice(&data);
            self.rest = Some(both);
        }
    }

    pub(crate) fn finish(self) -> Bytes {
        self.rest.map_or(self.first, BytesMut::freeze)
    }
}

/// The hint of a body before which so many bytes come.
pub(crate) fn plus(hint: SizeHint, bytes: usize) -> SizeHint {
    let mut sum = SizeHint::new();
    if let Some(upper) = hint.upper() {
        sum.set_upper(upper.saturating_add(bytes as u64));
    }
    sum.set_lower(hint.lower().saturating_add(bytes as u64));
    sum
}
