//! A body in one piece, and how long it says it is.

use bytes::Bytes;
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
    rest: Option<Vec<u8>>,
}

impl Collected {
    pub(crate) fn len(&self) -> usize {
        self.rest.as_ref().map_or(self.first.len(), Vec::len)
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if let Some(rest) = &mut self.rest {
            rest.extend_from_slice(&data);
        } else if self.first.is_empty() {
            self.first = data;
        } else if !data.is_empty() {
            let mut both = Vec::with_capacity((self.first.len() + data.len()) * 2);
            both.extend_from_slice(&std::mem::take(&mut self.first));
            both.extend_from_slice(&data);
            self.rest = Some(both);
        }
    }

    /// All of it, in no more memory than it takes.
    pub(crate) fn finish(self) -> Bytes {
        self.rest.map_or(self.first, |mut rest| {
            // It may be kept for long, and is counted by its length.
            rest.shrink_to_fit();
            rest.into()
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_is_alone_is_not_copied_whatever_empty_ones_are_around_it() {
        let frame = Bytes::from(vec![1; 10]);
        for before in [0, 2] {
            for after in [0, 2] {
                let mut collected = Collected::default();
                for _ in 0..before {
                    collected.push(Bytes::new());
                }
                collected.push(frame.clone());
                for _ in 0..after {
                    collected.push(Bytes::new());
                }
                assert_eq!(collected.finish().as_ptr(), frame.as_ptr());
            }
        }
    }

    #[test]
    fn what_was_collected_takes_no_more_memory_than_its_length_says() {
        let mut collected = Collected::default();
        for length in [1, 3, 500, 20, 7, 1_000] {
            collected.push(Bytes::from(vec![1; length]));
        }
        let collected = collected.finish();
        assert_eq!(collected.len(), 1_531);
        assert_eq!(collected.try_into_mut().unwrap().capacity(), 1_531);
    }
}
