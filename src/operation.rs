//! What one logical operation is called. In: scope and key; out: the [`OperationId`] that stores
//! and logs see, and the [`Token`] that tells one claim on it from every other.

use std::{
    cell::Cell,
    fmt,
    hash::{BuildHasher, RandomState},
    str::FromStr,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{digest::Framed, scope::Scope};

/// The name of one logical operation: SHA-256 over the length-prefixed scope and key.
///
/// It is what stores are keyed by and what logs may show; the raw key is in neither. Displays as
/// 64 hexadecimal digits, which [`OperationId::from_str`] reads back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId([u8; 32]);

impl OperationId {
    /// The id of `key` within `scope`. Two different pairs never share one.
    #[must_use]
    pub fn new(scope: &Scope, key: &str) -> Self {
        Self::of(scope, key.as_bytes())
    }

    pub(crate) fn of(scope: &Scope, key: &[u8]) -> Self {
        static START: LazyLock<Framed> =
            LazyLock::new(|| Framed::new("tower-idempotency operation 1"));
        let mut framed = START.clone();
        framed.field(scope.as_bytes());
        framed.field(key);
        Self(framed.finish())
    }

    /// An id that was kept as bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The id as bytes, for a store to key its entries by.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperationId({self})")
    }
}

/// A text that is not 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParseOperationIdError;

impl fmt::Display for ParseOperationIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an operation id is 64 hexadecimal digits")
    }
}

impl std::error::Error for ParseOperationIdError {}

impl FromStr for OperationId {
    type Err = ParseOperationIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(ParseOperationIdError);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let pair = str::from_utf8(pair).map_err(|_| ParseOperationIdError)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| ParseOperationIdError)?;
        }
        Ok(Self(bytes))
    }
}

/// The fencing token of one claim: 128 bits, minted by the caller before the store is asked, so
/// that a claim whose answer was lost can still be recognised or taken back.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A token that no other call, here or in another process, has minted.
    #[must_use]
    pub fn mint() -> Self {
        // A random number for this process, and one that is counted: no system call and no hash per
        // request. Each thread counts numbers of its own, so that none waits for another's.
        const BLOCK: u64 = 1 << 16;
        static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(()));
        static BLOCKS: AtomicU64 = AtomicU64::new(0);
        thread_local! {
            static NEXT: Cell<u64> = const { Cell::new(0) };
        }
        let number = match NEXT.get() {
            spent if spent % BLOCK == 0 => BLOCKS.fetch_add(1, Ordering::Relaxed) * BLOCK,
            next => next,
        };
        NEXT.set(number + 1);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&PROCESS.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        Self(bytes)
    }

    /// The token as bytes, for a store to keep.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A token is what a claim is settled with: it does not belong in a log.
        f.write_str("Token(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_and_key_never_run_into_each_other() {
        let parts = [
            "", "a", "b", "c", ":", "a:b", "b:c", "a:b:c", "ab", "bc", "a_b", "b_c", "a|b", "ü",
            "a/b",
        ];
        let mut seen = std::collections::HashMap::new();
        for scope in parts {
            for key in parts {
                let id = OperationId::new(&Scope::new(scope), key);
                assert_eq!(seen.insert(id, (scope, key)), None, "{scope:?} {key:?}");
            }
        }
    }

    #[test]
    fn an_id_reads_back_from_its_text_and_nothing_else_does() {
        let id = OperationId::new(&Scope::new("tenant"), "k");
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in ["", "00", &"g".repeat(64), &"ü".repeat(32), &"+1".repeat(32)] {
            assert_eq!(text.parse::<OperationId>(), Err(ParseOperationIdError));
        }
    }

    #[test]
    fn tokens_are_never_minted_twice() {
        // More than a thread takes at once.
        let mint = || (0..100_000).map(|_| Token::mint()).collect::<Vec<_>>();
        let threads = [std::thread::spawn(mint), std::thread::spawn(mint)];
        let mut tokens: std::collections::HashSet<_> = mint().into_iter().collect();
        for thread in threads {
            tokens.extend(thread.join().unwrap());
        }
        assert_eq!(tokens.len(), 300_000);
    }
}
