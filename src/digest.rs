//! SHA-256 over length-prefixed fields. In: the parts of an identity; out: 32 bytes that no other
//! parts can give. Operation ids and fingerprints are both made here.
//!
//! What is the same for many requests (the domain, the settings) fills whole blocks of the hash, so
//! that it is hashed once and each request goes on from there.

use sha2::block_api::compress256;

/// A SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// The block of SHA-256, in bytes.
const BLOCK: usize = 64;

/// Where every SHA-256 starts (FIPS 180-4, section 5.3.3).
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// A running SHA-256 whose every field is written behind its length, so that no two lists of
/// fields are the same bytes.
///
/// The block that is being filled is kept here, and only the compression is the library's: its own
/// hasher is slow to take many short fields and to be cloned and finished, which together were as
/// much work as the compression itself.
#[derive(Clone)]
pub(crate) struct Framed {
    state: [u32; 8],
    block: [u8; BLOCK],
    /// How much of the block is filled; never all of it.
    filled: usize,
    blocks: u64,
}

impl Framed {
    /// Starts a digest in its own domain: equal fields in two domains never meet.
    pub(crate) fn new(domain: &str) -> Self {
        let mut framed = Self { state: START, block: [0; BLOCK], filled: 0, blocks: 0 };
        framed.field(domain.as_bytes());
        framed.fill_block()
    }

    /// Ends what many digests begin with. What follows begins a block, wherever this ended: the
    /// fields themselves say where they end, so the filling says nothing.
    pub(crate) fn fill_block(mut self) -> Self {
        while self.filled > 0 {
            self.byte(0);
        }
        self
    }

    /// One field, behind its length.
    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.unframed(bytes);
    }

    /// One number: a length or a count. Seven bits a byte, the lowest first; the top bit says that
    /// more follow. One byte for nearly every length.
    pub(crate) fn number(&mut self, mut number: usize) {
        loop {
            let [low, ..] = number.to_le_bytes();
            number >>= 7;
            if number == 0 {
                return self.byte(low & 0x7F);
            }
            self.byte(low | 0x80);
        }
    }

    /// Bytes whose length the caller writes itself, because it is known only at their end.
    pub(crate) fn unframed(&mut self, mut bytes: &[u8]) {
        if self.filled > 0 {
            let room = BLOCK - self.filled;
            if bytes.len() < room {
                return self.keep(bytes);
            }
            let (head, rest) = bytes.split_at(room);
            self.keep(head);
            self.end_block();
            bytes = rest;
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        compress256(&mut self.state, blocks);
        self.blocks += blocks.len() as u64;
        self.keep(rest);
    }

    /// The digest, with the end that SHA-256 asks for: a one, zeros, and the length in bits in the
    /// last eight bytes of a block (FIPS 180-4, section 5.1.1).
    pub(crate) fn finish(&mut self) -> Digest {
        let bits = (self.blocks * BLOCK as u64 + self.filled as u64) * 8;
        self.byte(0x80);
        if self.filled > BLOCK - 8 {
            self.block[self.filled..].fill(0);
            self.end_block();
        }
        let (zeros, length) = self.block.split_at_mut(BLOCK - 8);
        zeros[self.filled..].fill(0);
        length.copy_from_slice(&bits.to_be_bytes());
        self.end_block();
        let mut digest = [0; 32];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }

    fn byte(&mut self, byte: u8) {
        self.block[self.filled] = byte;
        self.filled += 1;
        if self.filled == BLOCK {
            self.end_block();
        }
    }

    fn end_block(&mut self) {
        compress256(&mut self.state, &[self.block]);
        self.blocks += 1;
        self.filled = 0;
    }

    /// Keeps bytes for which there is room in the block.
    fn keep(&mut self, bytes: &[u8]) {
        self.block[self.filled..][..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn of(fields: &[&[u8]]) -> Digest {
        let mut framed = Framed::new("test");
        for field in fields {
            framed.field(field);
        }
        framed.finish()
    }

    #[test]
    fn it_is_sha_256_whatever_the_length_and_however_it_comes() {
        use sha2::Digest as _;
        let bytes: Vec<u8> = (0..400_u32).map(|number| (number % 251) as u8).collect();
        for length in 0..bytes.len() {
            let bytes = &bytes[..length];
            let right: Digest = sha2::Sha256::digest([&[0; BLOCK][..], bytes].concat()).into();
            for at in [0, length / 3, length / 2, length.saturating_sub(1), length] {
                // A domain without a name is a block of zeros.
                let mut framed = Framed::new("");
                framed.unframed(&bytes[..at]);
                framed.unframed(&bytes[at..]);
                assert_eq!(framed.finish(), right, "{length} bytes, in two at {at}");
            }
        }
    }

    #[test]
    fn no_two_lists_of_fields_share_a_digest() {
        let mut seen = HashMap::new();
        let fields =
            [&b""[..], b"a", b"aa", b"\0", b"\x01a", b"\x02", &[0; 62], &[0; 127], &[0; 128]];
        let mut lists: Vec<Vec<&[u8]>> = vec![vec![]];
        for first in fields {
            lists.push(vec![first]);
            for second in fields {
                lists.push(vec![first, second]);
                lists.extend(fields.iter().map(|third| vec![first, second, third]));
            }
        }
        for list in lists {
            if let Some(other) = seen.insert(of(&list), list.clone()) {
                panic!("{other:?} and {list:?}");
            }
        }
    }

    #[test]
    fn equal_fields_in_two_domains_never_meet() {
        let domains =
            ["", "a", "b", "test", "a domain whose name takes more than one whole block of it"];
        let digests: std::collections::HashSet<_> =
            domains.iter().map(|domain| Framed::new(domain).finish()).collect();
        assert_eq!(digests.len(), domains.len());
    }

    #[test]
    fn numbers_are_read_back_in_one_way_only() {
        let numbers = [0, 1, 127, 128, 129, 16_383, 16_384, usize::MAX];
        let digest = |numbers: &[usize]| {
            let mut framed = Framed::new("test");
            for number in numbers {
                framed.number(*number);
            }
            framed.finish()
        };
        let mut seen = std::collections::HashSet::new();
        for first in numbers {
            assert!(seen.insert(digest(&[first])), "{first}");
            for second in numbers {
                assert!(seen.insert(digest(&[first, second])), "{first} {second}");
            }
        }
    }
}
