//! Comes in: a JSON body. Goes out: one digest for all spellings of the same document, or `None` when the body has to
//! be compared by its bytes. Next: the digest is one input of the request's fingerprint.
//!
//! Member order, white space and escapes do not matter. Numbers compare by their text, because a reading through
//! floats would merge different amounts. Whatever two readers could understand differently (duplicate names, lone
//! surrogates, a byte order mark, broken JSON) is `None`.
//!
//! Every value has one self-delimiting encoding: a tag, then for numbers and strings their length and text, for arrays
//! and objects their digest. An array's digest is taken over its tag and elements. An object's is taken over its tag,
//! the number of members, and the members sorted by name, each as name length, name and value. So two documents share
//! an input to the hash only if they mean the same.

use std::borrow::Cow;

use json_event_parser::{JsonEvent, LowLevelJsonParser};
use sha2::{Digest as _, Sha256};

#[cfg(test)]
mod tests;

/// Arrays and objects inside each other; deeper bodies are compared by their bytes.
const MAX_DEPTH: usize = 128;

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

const NULL: u8 = b'n';
const FALSE: u8 = b'f';
const TRUE: u8 = b't';
const NUMBER: u8 = b'0';
const STRING: u8 = b's';
const ARRAY: u8 = b'a';
const OBJECT: u8 = b'o';

enum Value<'a> {
    Null,
    Boolean(bool),
    Number(Cow<'a, str>),
    String(Cow<'a, str>),
    Array([u8; 32]),
    Object([u8; 32]),
}

struct Member<'a> {
    name: Cow<'a, str>,
    value: Value<'a>,
}

/// An array or object whose end has not been read, with the place where its part of the shared buffers begins.
enum Open {
    /// Its encoded elements are the rest of `encoded`.
    Array(usize),
    /// Its members are the rest of `members`.
    Object(usize),
}

/// The digest of a JSON document by meaning, or `None` when it has to be compared by its bytes.
///
/// Takes n log n time in the size of the body at most, and no stack that grows with its depth.
pub(crate) fn digest(body: &[u8]) -> Option<[u8; 32]> {
    // The parser would skip the mark, and then two different bodies were one.
    if body.starts_with(BYTE_ORDER_MARK) {
        return None;
    }
    // The parser's slice reader wraps this one and costs a fifth more in copies of its events.
    let mut parser = LowLevelJsonParser::new();
    let mut rest = body;
    let mut open = Vec::with_capacity(8);
    // Both buffers are used as stacks: what is open inside lies above what is open around it.
    let mut members = Vec::with_capacity(16);
    let mut encoded = Vec::with_capacity(body.len().min(1024));
    let mut root = None;
    loop {
        let step = parser.parse_next(rest, true);
        rest = &rest[step.consumed_bytes..];
        let value = match step.event?.ok()? {
            JsonEvent::Null => Value::Null,
            JsonEvent::Boolean(value) => Value::Boolean(value),
            JsonEvent::Number(text) => Value::Number(text),
            JsonEvent::String(text) => Value::String(text),
            JsonEvent::StartArray => {
                if open.len() == MAX_DEPTH {
                    return None;
                }
                open.push(Open::Array(encoded.len()));
                encoded.push(ARRAY);
                continue;
            }
            JsonEvent::StartObject => {
                if open.len() == MAX_DEPTH {
                    return None;
                }
                open.push(Open::Object(members.len()));
                continue;
            }
            JsonEvent::ObjectKey(name) => {
                // Its value comes next, or after all that is nested in it.
                members.push(Member { name, value: Value::Null });
                continue;
            }
            JsonEvent::EndArray => {
                let Some(Open::Array(start)) = open.pop() else {
                    return None;
                };
                Value::Array(close(&mut encoded, start))
            }
            JsonEvent::EndObject => {
                let Some(Open::Object(start)) = open.pop() else {
                    return None;
                };
                let value = Value::Object(object(&mut members[start..], &mut encoded)?);
                members.truncate(start);
                value
            }
            // The parser has checked that exactly one value came before.
            JsonEvent::Eof => return root,
        };
        match open.last() {
            Some(Open::Array(_)) => value.encode(&mut encoded),
            Some(Open::Object(_)) => members.last_mut()?.value = value,
            None => {
                root = Some(match value {
                    Value::Array(digest) | Value::Object(digest) => digest,
                    scalar => {
                        scalar.encode(&mut encoded);
                        close(&mut encoded, 0)
                    }
                });
            }
        }
    }
}

/// The digest of an object, or `None` if two members have the same name.
fn object(members: &mut [Member<'_>], encoded: &mut Vec<u8>) -> Option<[u8; 32]> {
    members.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if members.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return None;
    }
    let start = encoded.len();
    encoded.push(OBJECT);
    push_length(encoded, members.len());
    for member in members {
        push_text(encoded, &member.name);
        member.value.encode(encoded);
    }
    Some(close(encoded, start))
}

/// Replaces the encoding from `start` on with its digest.
fn close(encoded: &mut Vec<u8>, start: usize) -> [u8; 32] {
    let digest = Sha256::digest(&encoded[start..]).into();
    encoded.truncate(start);
    digest
}

impl Value<'_> {
    fn encode(&self, encoded: &mut Vec<u8>) {
        let (tag, digest) = match self {
            Self::Null => return encoded.push(NULL),
            Self::Boolean(false) => return encoded.push(FALSE),
            Self::Boolean(true) => return encoded.push(TRUE),
            Self::Number(text) => {
                encoded.push(NUMBER);
                return push_text(encoded, text);
            }
            Self::String(text) => {
                encoded.push(STRING);
                return push_text(encoded, text);
            }
            Self::Array(digest) => (ARRAY, digest),
            Self::Object(digest) => (OBJECT, digest),
        };
        encoded.push(tag);
        encoded.extend_from_slice(digest);
    }
}

fn push_text(encoded: &mut Vec<u8>, text: &str) {
    push_length(encoded, text.len());
    encoded.extend_from_slice(text.as_bytes());
}

/// Seven bits a byte, the lowest first; the top bit says that more follow. One byte for nearly every name and value.
fn push_length(encoded: &mut Vec<u8>, mut length: usize) {
    loop {
        let [low, ..] = length.to_le_bytes();
        length >>= 7;
        if length == 0 {
            return encoded.push(low & 0x7F);
        }
        encoded.push(low | 0x80);
    }
}
