//! The key header: never panics, takes what a plain reading of the rules takes, and both spellings
//! of a key are one operation.
//!
//! Bytes: flags (strict; a second line), then the value of the header.

use bytes::Bytes;
use http::{HeaderValue, Request};
use http_body_util::Full;
use tower_idempotency::{IdempotencyKey, OperationId};

use super::{
    input::Input,
    probe::{Seen, probe, scope},
};

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let flags = input.byte();
    let (strict, twice) = (flags & 1 == 1, flags & 6 == 6);
    let Ok(value) = HeaderValue::from_bytes(input.0) else { return };
    let seen = send(strict, twice, &value);
    if twice {
        assert_eq!(seen, Seen::Refused(400), "two lines are no key");
        return;
    }
    let expected = read(value.as_bytes(), strict);
    let Seen::Claim(id, _) = seen else {
        assert_eq!(seen, Seen::Refused(400));
        assert!(!matches!(expected, Expected::Key(_)), "refused: {value:?}");
        return;
    };
    let (Expected::Key(key) | Expected::IfParametersAreValid(key)) = expected else {
        panic!("taken: {value:?}");
    };
    assert_eq!(id, OperationId::new(&scope(), &key), "read as another key: {value:?}");
    assert!(IdempotencyKey::new(&key).is_ok());

    let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
    same_key(strict, id, &quoted);
    same_key(strict, id, &format!(" \t{quoted}\t "));
    if !strict && key.bytes().all(is_bare) {
        same_key(strict, id, &key);
    }
}

fn same_key(strict: bool, id: OperationId, spelling: &str) {
    let value = HeaderValue::from_str(spelling).expect("visible characters");
    match send(strict, false, &value) {
        Seen::Claim(same, _) => assert_eq!(same, id, "{spelling:?} is another key"),
        other => panic!("{spelling:?} is {other:?}"),
    }
}

fn send(strict: bool, twice: bool, value: &HeaderValue) -> Seen {
    let mut request = Request::post("/").header("idempotency-key", value);
    if twice {
        request = request.header("idempotency-key", value);
    }
    probe(strict, request.body(Full::new(Bytes::new())).expect("a request"))
}

enum Expected {
    Key(String),
    IfParametersAreValid(String),
    Refused,
}

/// The rules, read plainly.
fn read(line: &[u8], strict: bool) -> Expected {
    if line.len() > 4096 {
        return Expected::Refused;
    }
    let line: Vec<char> = line.iter().map(|byte| char::from(*byte)).collect();
    let line: String = line.into_iter().collect();
    let field = line.trim_matches([' ', '\t']);
    if field.starts_with('"') {
        return read_quoted(field);
    }
    let fits = (1..=255).contains(&field.len());
    if strict || !fits || !field.bytes().all(is_bare) {
        return Expected::Refused;
    }
    Expected::Key(field.to_owned())
}

fn read_quoted(field: &str) -> Expected {
    let (mut key, mut rest) = (String::new(), field.chars().skip(1));
    loop {
        match rest.next() {
            Some('"') => break,
            Some('\\') => match rest.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Expected::Refused,
            },
            Some(plain @ ' '..='~') => key.push(plain),
            _ => return Expected::Refused,
        }
    }
    let rest: String = rest.collect();
    if !(1..=255).contains(&key.len()) || !(rest.is_empty() || rest.starts_with(';')) {
        return Expected::Refused;
    }
    // Parameters without values are told apart here; the others are the parser's.
    let is_name = |name: &str| {
        let name = name.trim_start_matches(' ');
        name.starts_with(|first: char| first.is_ascii_lowercase() || first == '*')
            && name
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*'))
    };
    if rest.split(';').skip(1).all(is_name) {
        Expected::Key(key)
    } else {
        Expected::IfParametersAreValid(key)
    }
}

fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !b"\",\\".contains(&byte)
}
