//! The fingerprint of JSON bodies: two documents are equal exactly by member order, white space
//! and string escapes.
//!
//! Bytes: flags, then either a body, or choices for a document, two spellings and one change. That
//! reading is linear in time has a test of its own; here a time-out bounds it.

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde::de::IgnoredAny;
use tower_idempotency::Fingerprint;

use super::{
    input::Input,
    probe::{Seen, probe},
};

/// Deeper documents are compared by their bytes.
const MAX_DEPTH: usize = 128;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.under(4) {
        0 => any_bytes(input.0),
        1 => nested(&mut input),
        _ => document(&mut input),
    }
}

fn fingerprint(body: impl Into<Bytes>) -> Fingerprint {
    let request = Request::post("/")
        .header("idempotency-key", "key")
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .expect("a request");
    match probe(false, request) {
        Seen::Claim(_, fingerprint) => fingerprint,
        other => panic!("{other:?} instead of a claim"),
    }
}

/// Is the body compared by its meaning?
fn is_understood(body: &[u8], before: &[u8], after: &[u8]) -> bool {
    fingerprint(body.to_vec()) == fingerprint([before, body, after].concat())
}

fn any_bytes(body: &[u8]) {
    if body.len() > 65_536 {
        return;
    }
    let first = fingerprint(body.to_vec());
    assert_eq!(first, fingerprint(body.to_vec()));
    let understood = is_understood(body, b"", b" ");
    assert_eq!(understood, is_understood(body, b"\n", b""), "white space is white space");
    // A lenient reader, for numbers of any size and lone surrogates, so in one direction only.
    if understood {
        assert!(serde_json::from_slice::<IgnoredAny>(body).is_ok(), "understood, but no JSON");
    }
    // What is not there is not equal to what is.
    assert_ne!(first, fingerprint([body, b"x"].concat()));
}

/// Arrays inside each other, up to the limit and over it.
fn nested(input: &mut Input<'_>) {
    let depth = 4 * input.under(64) + input.under(4);
    let (open, close) = input.one_of(&[("[", "]"), ("{\"a\":", "}")]);
    let inside = if open == "[" { "" } else { "1" };
    let body = format!("{}{inside}{}", open.repeat(depth), close.repeat(depth));
    // An array or object holds what is inside of it one deeper.
    let understood = is_understood(body.as_bytes(), b" ", b"");
    if depth == 0 && inside.is_empty() {
        assert!(!understood, "nothing is no JSON");
    } else if depth + 1 < MAX_DEPTH {
        assert!(understood, "{depth} deep is not too deep");
    } else if depth > MAX_DEPTH + 1 {
        assert!(!understood, "{depth} deep is too deep");
    }
}

fn document(input: &mut Input<'_>) {
    let mut document = Value::read(input, 0);
    let mut spelled = String::new();
    document.spell(input, &mut spelled);
    let mut another = String::new();
    document.spell(input, &mut another);
    assert!(serde_json::from_str::<IgnoredAny>(&spelled).is_ok(), "not JSON: {spelled}");
    let meaning = fingerprint(spelled.clone());
    assert!(meaning == fingerprint(another.clone()), "{spelled} differs from {another}");

    let at = input.under(document.count());
    document.change(at);
    let mut changed = String::new();
    document.spell(input, &mut changed);
    assert!(meaning != fingerprint(changed.clone()), "{spelled} is like {changed}");
}

#[derive(Debug)]
enum Value {
    Literal(&'static str),
    Number(&'static str),
    String(String),
    Array(Vec<Self>),
    /// Names are unique.
    Object(Vec<(String, Self)>),
}

const NUMBERS: [&str; 12] = [
    "0",
    "-0",
    "1",
    "1.0",
    "1e0",
    "1E0",
    "10",
    "-1",
    "1e400",
    "0.1",
    "9007199254740992",
    "9007199254740993",
];
const LITERALS: [&str; 3] = ["null", "true", "false"];

impl Value {
    fn read(input: &mut Input<'_>, depth: usize) -> Self {
        let kinds = if depth < 6 { 6 } else { 3 };
        match input.under(kinds) {
            0 => Self::Literal(input.one_of(&LITERALS)),
            1 => Self::Number(input.one_of(&NUMBERS)),
            2 => Self::String(read_string(input)),
            3 | 5 => {
                let members = (0..input.under(5)).map(|at| {
                    // Told apart by their place, wherever their names would be the same.
                    (format!("{}{at}", read_string(input)), Self::read(input, depth + 1))
                });
                Self::Object(members.collect())
            }
            _ => Self::Array((0..input.under(5)).map(|_| Self::read(input, depth + 1)).collect()),
        }
    }

    /// How many values there are, this one included.
    fn count(&self) -> usize {
        let inside: usize = match self {
            Self::Array(elements) => elements.iter().map(Self::count).sum(),
            Self::Object(members) => members.iter().map(|(_, value)| value.count()).sum(),
            _ => 0,
        };
        // Under 256, for a choice is a byte.
        (1 + inside).min(256)
    }

    /// Changes the value at this place to one that means something else.
    fn change(&mut self, at: usize) {
        if at > 0 {
            let mut at = at - 1;
            let inside: &mut dyn Iterator<Item = &mut Self> = match self {
                Self::Array(elements) => &mut elements.iter_mut(),
                Self::Object(members) => &mut members.iter_mut().map(|(_, value)| value),
                _ => unreachable!("nothing is inside"),
            };
            for value in inside {
                let count = value.count();
                if at < count {
                    return value.change(at);
                }
                at -= count;
            }
        }
        match self {
            Self::Literal(literal) => *literal = next(&LITERALS, literal),
            Self::Number(number) => *number = next(&NUMBERS, number),
            Self::String(string) => string.push(' '),
            Self::Array(elements) if elements.len() == 1 => *self = elements.remove(0),
            Self::Array(elements) if elements.len() > 2 => drop(elements.pop()),
            Self::Array(elements) => elements.push(Self::Array(Vec::new())),
            Self::Object(members) => match members.first_mut() {
                Some((name, _)) => name.push('x'),
                None => *self = Self::Array(Vec::new()),
            },
        }
    }

    fn spell(&self, input: &mut Input<'_>, out: &mut String) {
        spell_space(input, out);
        match self {
            Self::Literal(text) | Self::Number(text) => out.push_str(text),
            Self::String(string) => spell_string(string, input, out),
            Self::Array(elements) => {
                out.push('[');
                for (at, element) in elements.iter().enumerate() {
                    out.push_str(if at > 0 { "," } else { "" });
                    element.spell(input, out);
                }
                spell_space(input, out);
                out.push(']');
            }
            Self::Object(members) => {
                out.push('{');
                let mut left: Vec<_> = members.iter().collect();
                while !left.is_empty() {
                    out.push_str(if left.len() < members.len() { "," } else { "" });
                    let (name, value) = left.remove(input.under(left.len()));
                    spell_space(input, out);
                    spell_string(name, input, out);
                    spell_space(input, out);
                    out.push(':');
                    value.spell(input, out);
                }
                spell_space(input, out);
                out.push('}');
            }
        }
        spell_space(input, out);
    }
}

fn next(texts: &[&'static str], text: &str) -> &'static str {
    let at = texts.iter().position(|it| *it == text).expect("one of them");
    texts[(at + 1) % texts.len()]
}

fn read_string(input: &mut Input<'_>) -> String {
    const CHARACTERS: [char; 16] = [
        'a',
        'b',
        '0',
        '"',
        '\\',
        '/',
        '\n',
        '\0',
        '\u{7f}',
        '\u{1f}',
        'é',
        'e',
        '\u{301}',
        '\u{ffff}',
        '😂',
        '\u{10ffff}',
    ];
    (0..input.under(4)).map(|_| input.one_of(&CHARACTERS)).collect()
}

fn spell_space(input: &mut Input<'_>, out: &mut String) {
    let choice = input.byte();
    // Mostly none.
    if choice >= 240 {
        out.extend((0..choice % 4).map(|_| input.one_of(&[' ', '\t', '\r', '\n'])));
    }
}

fn spell_string(string: &str, input: &mut Input<'_>, out: &mut String) {
    out.push('"');
    for character in string.chars() {
        let choice = input.byte();
        let short = match character {
            '"' => Some("\\\""),
            '\\' => Some("\\\\"),
            '/' => Some("\\/"),
            '\n' => Some("\\n"),
            _ => None,
        };
        let needs_escape = character < ' ' || matches!(character, '"' | '\\');
        match short {
            Some(short) if choice & 1 == 1 => out.push_str(short),
            _ if !needs_escape && choice & 2 == 0 => out.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    out.push_str("\\u");
                    for shift in [12, 8, 4, 0] {
                        let digit = char::from_digit(u32::from(*unit >> shift & 15), 16);
                        let digit = digit.expect("a digit");
                        out.push(if choice & 4 == 4 { digit.to_ascii_uppercase() } else { digit });
                    }
                }
            }
        }
    }
    out.push('"');
}
