//! Comes in: the request's headers. Goes out: the decoded key, no key, or why it is refused.
//! Next: the scope and the key become the operation id; a refusal is answered with 400.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::{HeaderMap, HeaderName, request::Parts};
use sfv::visitor::{Ignored, ParameterVisitor, parameter_visitor_with};
use sfv::{BareItemFromInput, Parser, StringRef};

#[cfg(test)]
mod tests;

/// The longest key, in decoded bytes.
const MAX_KEY: usize = 255;

/// The longest field value worth parsing. A key of 255 escaped characters needs 512 bytes; the rest is room for
/// parameters, which are ignored.
const MAX_RAW: usize = 4096;

/// The client's token for one logical operation: 1 to 255 bytes of printable ASCII.
///
/// The quoted and the bare spelling (`"abc"` and `abc`) decode to the same key. `Debug` does not print it, since
/// who knows a key can ask for the answer recorded under it.
#[derive(Clone)]
pub struct IdempotencyKey(Text);

#[derive(Clone)]
enum Text {
    /// Most are as short as a UUID: kept without an allocation, and without what the header came in.
    Short {
        text: [u8; SHORT],
        length: u8,
    },
    Long(Arc<[u8]>),
}

/// The longest key that is kept in place.
const SHORT: usize = 54;

impl Text {
    /// Keeps a key that has been checked: it is ASCII.
    fn new(key: &[u8]) -> Self {
        let mut text = [0; SHORT];
        match (text.get_mut(..key.len()), u8::try_from(key.len())) {
            (Some(start), Ok(length)) => {
                start.copy_from_slice(key);
                Self::Short { text, length }
            }
            _ => Self::Long(Arc::from(key)),
        }
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short { text, length } => &text[..usize::from(*length)],
            Self::Long(key) => key,
        }
    }
}

impl IdempotencyKey {
    /// A key from elsewhere than the header: any text of 1 to 255 printable ASCII characters.
    ///
    /// # Errors
    ///
    /// If it is empty, longer, or has other characters.
    pub fn new(key: &str) -> Result<Self, InvalidKey> {
        check_length(key.len())?;
        if !key.bytes().all(|byte| matches!(byte, 0x20..=0x7E)) {
            return Err(NOT_ASCII);
        }
        Ok(Self(Text::new(key.as_bytes())))
    }

    /// The decoded key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // It was seen to be ASCII: an empty answer would make all keys one, so it must not be the fallback.
        std::str::from_utf8(self.as_bytes()).unwrap_or_else(|_| unreachable!("a key is ASCII"))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IdempotencyKey(<redacted>)")
    }
}

/// Why a key is refused, in words for the client. Never repeats what the client sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidKey {
    pub(crate) reason: &'static str,
}

impl InvalidKey {
    /// A reason of your own, for a hook that reads keys; a sentence for the client, that repeats
    /// nothing of what it sent.
    #[must_use]
    pub const fn new(reason: &'static str) -> Self {
        Self { reason }
    }
}

impl fmt::Display for InvalidKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl std::error::Error for InvalidKey {}

/// Where a request's key is.
#[derive(Clone)]
pub(crate) struct KeyFrom {
    /// In this header, unless a function says where.
    pub(crate) header: HeaderName,
    /// Is only the quoted form taken?
    pub(crate) strict: bool,
    pub(crate) own: Option<Arc<OwnKey>>,
}

impl KeyFrom {
    pub(crate) fn read(&self, parts: &Parts) -> Result<Option<IdempotencyKey>, InvalidKey> {
        match &self.own {
            None => read(&parts.headers, &self.header, self.strict),
            Some(own) => own(parts),
        }
    }
}

pub(crate) type OwnKey = dyn Fn(&Parts) -> Result<Option<IdempotencyKey>, InvalidKey> + Send + Sync;

const REPEATED: InvalidKey = InvalidKey::new("the key header is sent more than once");
const EMPTY: InvalidKey = InvalidKey::new("the key is empty");
const TOO_LONG: InvalidKey = InvalidKey::new("the key is longer than 255 bytes");
const NOT_ASCII: InvalidKey =
    InvalidKey::new("the key holds other than printable ASCII characters");
const NOT_QUOTED: InvalidKey = InvalidKey::new("the key has to stand in double quotes");
const BAD_BARE: InvalidKey = InvalidKey::new(
    "a key without quotes holds visible ASCII characters only, without quotes, commas and backslashes",
);
const BAD_QUOTED: InvalidKey =
    InvalidKey::new("the quoted key is not a structured-field string of printable ASCII");

/// Reads the key from the field `name`; `quoted_only` refuses the bare form.
fn read(
    headers: &HeaderMap,
    name: &HeaderName,
    quoted_only: bool,
) -> Result<Option<IdempotencyKey>, InvalidKey> {
    let mut lines = headers.get_all(name).iter();
    let Some(value) = lines.next() else {
        return Ok(None);
    };
    // Even equal lines: a proxy that joins or drops one would turn the retry into another key.
    if lines.next().is_some() {
        return Err(REPEATED);
    }
    let raw = value.as_bytes();
    if raw.len() > MAX_RAW {
        return Err(TOO_LONG);
    }
    let start = raw.iter().position(|byte| !is_blank(*byte)).unwrap_or(raw.len());
    let end = raw.iter().rposition(|byte| !is_blank(*byte)).map_or(start, |last| last + 1);
    let field = &raw[start..end];

    let text = match field.first() {
        None => return Err(EMPTY),
        Some(b'"') => Text::new(quoted(field)?.as_str().as_bytes()),
        Some(_) if quoted_only => return Err(NOT_QUOTED),
        Some(_) => {
            // All bytes, without stopping at the first that is wrong: that takes many in one step.
            if !field.iter().fold(true, |are_bare, byte| are_bare & is_bare(*byte)) {
                return Err(BAD_BARE);
            }
            check_length(field.len())?;
            Text::new(field)
        }
    };
    Ok(Some(IdempotencyKey(text)))
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// A comma could be two lines that a proxy has joined; a quote or backslash is a broken quoted key.
fn is_bare(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E) && !matches!(byte, b'"' | b',' | b'\\')
}

fn check_length(len: usize) -> Result<(), InvalidKey> {
    match len {
        0 => Err(EMPTY),
        1..=MAX_KEY => Ok(()),
        _ => Err(TOO_LONG),
    }
}

fn quoted(field: &[u8]) -> Result<Cow<'_, StringRef>, InvalidKey> {
    let key = Parser::new(field).parse_item_with_visitor(only_string).map_err(|_| BAD_QUOTED)?;
    check_length(key.as_str().len())?;
    Ok(key)
}

/// Takes the item's string; its parameters are checked by the parser and dropped.
fn only_string(
    item: BareItemFromInput<'_>,
) -> Result<impl ParameterVisitor<'_, Out = Cow<'_, StringRef>>, fmt::Error> {
    match item {
        BareItemFromInput::String(key) => Ok(parameter_visitor_with(Ignored, move |()| Ok(key))),
        _ => Err(fmt::Error),
    }
}
