//! SHA-256 over length-prefixed fields. In: the parts of an identity; out: 32 bytes that no other
//! parts can give. Operation ids and fingerprints are both made here.

use sha2::{Digest as _, Sha256};

/// A SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// A running SHA-256 whose every field is written behind its length, so that no two lists of
/// fields are the same bytes.
#[derive(Clone)]
pub(crate) struct Framed(Sha256);

impl Framed {
    /// Starts a digest in its own domain: equal fields in two domains never meet.
    pub(crate) fn new(domain: &str) -> Self {
        let mut framed = Self(Sha256::new());
        framed.field(domain.as_bytes());
        framed
    }

    /// One field, behind its length.
    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.update(bytes);
    }

    /// One number of fixed width: a length or a count.
    pub(crate) fn number(&mut self, number: usize) {
        self.0.update((number as u64).to_le_bytes());
    }

    /// Bytes whose length the caller writes itself, because it is known only at their end.
    pub(crate) fn unframed(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        self.0.finalize().into()
    }
}
