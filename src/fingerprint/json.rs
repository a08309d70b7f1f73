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
//!
//! Under a selection, what does not count is read and left out: the whole body has to be JSON. In an array of which
//! something may be left out each element stands behind its index; which arrays these are depends on the selection
//! alone. A document of which nothing is left has no encoding, and the digest of that.

use hifijson::{
    Expect, Read as _, SliceLexer, escape::Lex as _, num::LexWrite as _, token::Lex as _,
};
use sha2::{Digest as _, Sha256};

use super::selection::{Part, Selection};

#[cfg(test)]
mod tests;

/// Arrays and objects inside each other; deeper bodies are compared by their bytes. It also bounds the stack.
const MAX_DEPTH: usize = 128;

const NULL: u8 = b'n';
const FALSE: u8 = b'f';
const TRUE: u8 = b't';
const NUMBER: u8 = b'0';
const STRING: u8 = b's';
const ARRAY: u8 = b'a';
const OBJECT: u8 = b'o';

/// The digest of a JSON document by meaning, or `None` when it has to be compared by its bytes.
///
/// Takes n log n time in the size of the body at most.
pub(crate) fn digest(body: &[u8]) -> Option<[u8; 32]> {
    digest_part(body, Part::All)
}

/// The digest of what is selected of a JSON document, or `None` when all of it has to be compared by its bytes.
pub(crate) fn digest_selected(body: &[u8], selection: &Selection) -> Option<[u8; 32]> {
    digest_part(body, selection.root())
}

fn digest_part(body: &[u8], part: Part<'_>) -> Option<[u8; 32]> {
    // Once for all strings.
    std::str::from_utf8(body).ok()?;
    let mut lexer = SliceLexer::new(body);
    let mut reader = Reader {
        // Members are there twice for a while: as they came, and in order.
        encoded: Vec::with_capacity((2 * body.len()).clamp(256, 16_384)),
        members: Vec::with_capacity(16),
    };
    let first = lexer.ws_peek()?;
    reader.value(first, &mut lexer, part, MAX_DEPTH).ok()?;
    if lexer.ws_peek().is_some() {
        return None;
    }
    match &reader.encoded[..] {
        [ARRAY | OBJECT, digest @ ..] => digest.try_into().ok(),
        encoded => Some(Sha256::digest(encoded).into()),
    }
}

/// The body is not JSON, or not JSON that everybody understands alike.
struct ByBytes;

impl From<Expect> for ByBytes {
    fn from(_: Expect) -> Self {
        Self
    }
}

/// Both buffers are used as stacks: what is open inside lies above what is open around it.
struct Reader {
    /// Encoded elements and members of what is open.
    encoded: Vec<u8>,
    members: Vec<Member>,
}

/// Where a member is among what is encoded.
struct Member {
    /// Its name's length begins here.
    start: usize,
    name: usize,
    value: usize,
    end: usize,
    /// How its name begins, in an order that its first bytes have too.
    begins: u64,
}

impl Member {
    fn counts(&self) -> bool {
        self.value < self.end
    }
}

impl Reader {
    /// Reads a value that begins with `first`, and encodes what counts of it. `depth` more arrays and objects may be
    /// open.
    fn value(
        &mut self,
        first: u8,
        lexer: &mut SliceLexer<'_>,
        part: Part<'_>,
        depth: usize,
    ) -> Result<(), ByBytes> {
        let start = self.encoded.len();
        match first {
            b'"' => {
                self.encoded.push(STRING);
                self.text(lexer.discarded())?;
            }
            b'-' | b'0'..=b'9' => {
                let (text, _) = lexer.num_bytes().validated().map_err(|_| ByBytes)?;
                self.encoded.push(NUMBER);
                push_length(&mut self.encoded, text.len());
                self.encoded.extend_from_slice(text);
            }
            b'{' => {
                return self.object(lexer.discarded(), part, depth.checked_sub(1).ok_or(ByBytes)?);
            }
            b'[' => {
                return self.array(lexer.discarded(), part, depth.checked_sub(1).ok_or(ByBytes)?);
            }
            _ => self.encoded.push(match lexer.null_or_bool().ok_or(ByBytes)? {
                None => NULL,
                Some(false) => FALSE,
                Some(true) => TRUE,
            }),
        }
        if !part.by_itself() {
            self.encoded.truncate(start);
        }
        Ok(())
    }

    /// Reads the rest of an array.
    fn array(
        &mut self,
        lexer: &mut SliceLexer<'_>,
        part: Part<'_>,
        depth: usize,
    ) -> Result<(), ByBytes> {
        let start = self.encoded.len();
        let by_index = part.is_inside();
        self.encoded.push(ARRAY);
        let mut index = 0;
        lexer.seq(b']', SliceLexer::ws_peek, |first, lexer| {
            let start = self.encoded.len();
            if by_index {
                push_length(&mut self.encoded, index);
            }
            let value = self.encoded.len();
            self.value(first, lexer, part.of_element(index), depth)?;
            if self.encoded.len() == value {
                self.encoded.truncate(start);
            }
            index += 1;
            Ok::<_, ByBytes>(())
        })?;
        if part.by_itself() || self.encoded.len() > start + 1 {
            self.close(ARRAY, start, start);
        } else {
            self.encoded.truncate(start);
        }
        Ok(())
    }

    /// Reads the rest of an object.
    fn object(
        &mut self,
        lexer: &mut SliceLexer<'_>,
        part: Part<'_>,
        depth: usize,
    ) -> Result<(), ByBytes> {
        let start = self.encoded.len();
        let first_member = self.members.len();
        let mut count = 0;
        lexer.seq(b'}', SliceLexer::ws_peek, |first, lexer| {
            let start = self.encoded.len();
            lexer.expect(|_| Some(first), b'"').ok_or(ByBytes)?;
            let name = self.text(lexer)?;
            let value = self.encoded.len();
            lexer.expect(SliceLexer::ws_peek, b':').ok_or(ByBytes)?;
            let first = lexer.ws_peek().ok_or(ByBytes)?;
            let part = part.of_member(&self.encoded[name..]);
            self.value(first, lexer, part, depth)?;
            let begins = first_bytes(&self.encoded[name..value]);
            let member = Member { start, name, value, end: self.encoded.len(), begins };
            count += usize::from(member.counts());
            self.members.push(member);
            Ok::<_, ByBytes>(())
        })?;
        let members = &mut self.members[first_member..];
        let encoded = &mut self.encoded;
        let name = |member: &Member| &encoded[member.name..member.value];
        // Most names differ in how they begin, which is compared in one step.
        members.sort_unstable_by(|a, b| a.begins.cmp(&b.begins).then_with(|| name(a).cmp(name(b))));
        if members.windows(2).any(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(ByBytes);
        }
        if count > 0 || part.by_itself() {
            let sorted = encoded.len();
            encoded.push(OBJECT);
            push_length(encoded, count);
            for member in members.iter().filter(|member| member.counts()) {
                encoded.extend_from_within(member.start..member.end);
            }
            self.close(OBJECT, start, sorted);
        } else {
            encoded.truncate(start);
        }
        self.members.truncate(first_member);
        Ok(())
    }

    /// Reads the rest of a string and encodes it, behind its length. Returns where it begins.
    fn text(&mut self, lexer: &mut SliceLexer<'_>) -> Result<usize, ByBytes> {
        let start = self.encoded.len();
        // Room for its length, which most often is one byte.
        self.encoded.push(0);
        loop {
            let rest = lexer.as_slice();
            let (plain, rest) = rest.split_at(plain_length(rest));
            self.encoded.extend_from_slice(plain);
            *lexer = SliceLexer::new(rest);
            match lexer.take_next() {
                Some(b'"') => break,
                Some(b'\\') => {
                    let kind = lexer.take_next().ok_or(ByBytes)?;
                    let character = lexer.escape(kind).map_err(|_| ByBytes)?;
                    let utf8 = &mut [0; 4];
                    self.encoded.extend_from_slice(character.encode_utf8(utf8).as_bytes());
                }
                // A control character, or the end.
                _ => return Err(ByBytes),
            }
        }
        let length = self.encoded.len() - start - 1;
        if let Ok(length @ ..0x80) = u8::try_from(length) {
            self.encoded[start] = length;
            return Ok(start + 1);
        }
        let mut prefix = Vec::with_capacity(10);
        push_length(&mut prefix, length);
        self.encoded.splice(start..=start, prefix.iter().copied());
        Ok(start + prefix.len())
    }

    /// Puts the digest of what is encoded from `from` on, behind a tag, into the place of all from `start` on.
    fn close(&mut self, tag: u8, start: usize, from: usize) {
        let digest = Sha256::digest(&self.encoded[from..]);
        self.encoded.truncate(start);
        self.encoded.push(tag);
        self.encoded.extend_from_slice(&digest);
    }
}

/// How far a string goes as it is: up to a quote, an escape or a control character.
#[allow(clippy::needless_bitwise_bool, reason = "a branch for each byte is what takes the time")]
fn plain_length(text: &[u8]) -> usize {
    let ends = |byte: &u8| (*byte == b'"') | (*byte == b'\\') | (*byte < 0x20);
    // A processor looks at all bytes of a piece at once.
    let (pieces, _) = text.as_chunks::<16>();
    let is_plain = |piece: &&[u8; 16]| !piece.iter().fold(false, |any, byte| any | ends(byte));
    let plain = pieces.iter().take_while(is_plain).count() * 16;
    let rest = &text[plain..];
    plain + rest.iter().position(ends).unwrap_or(rest.len())
}

/// The first eight bytes as a number, zeros where there are fewer. Of two names the one whose number
/// is smaller comes first.
fn first_bytes(name: &[u8]) -> u64 {
    let mut first = [0; 8];
    let length = name.len().min(first.len());
    first[..length].copy_from_slice(&name[..length]);
    u64::from_be_bytes(first)
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
