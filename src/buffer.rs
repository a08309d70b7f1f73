//! What the request bodies that are read may take together. In: bytes; out: [`Room`] for them, for
//! as long as the layer keeps them.

use std::sync::Arc;

use crate::sync::atomic::{AtomicUsize, Ordering};

/// What the bodies of all requests together may take, while they are read and until the inner
/// service has taken them over. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    taken: Arc<AtomicUsize>,
    pub(crate) limit: usize,
}

impl Buffer {
    pub(crate) fn new(limit: usize) -> Self {
        Self { taken: Arc::default(), limit }
    }

    pub(crate) fn room(&self) -> Room {
        Room { buffer: self.clone(), bytes: 0 }
    }
}

/// What one body takes of the buffer, given back when dropped.
#[derive(Debug)]
pub(crate) struct Room {
    buffer: Buffer,
    bytes: usize,
}

impl Room {
    /// Takes so many bytes more; false if that is over the limit, and then they are taken all the
    /// same, for they are there.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        self.bytes += bytes;
        let before = self.buffer.taken.fetch_add(bytes, Ordering::Relaxed);
        before.saturating_add(bytes) <= self.buffer.limit
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.buffer.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
