//! Comes in: field values, from the public structured-field vectors and generated. Goes out: what `read` makes of
//! them. Next: nothing.

use std::fs;
use std::path::Path;

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use serde_json::Value;

use super::*;

const NAME: HeaderName = HeaderName::from_static("idempotency-key");

fn headers<'a>(lines: impl IntoIterator<Item = &'a [u8]>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(NAME, HeaderValue::from_bytes(line).expect("a legal field value"));
    }
    headers
}

fn read_line(line: impl AsRef<[u8]>) -> Result<String, InvalidKey> {
    let key = read(&headers([line.as_ref()]), &NAME, false)?;
    Ok(key.expect("the header is there").as_str().to_owned())
}

fn quote(key: &str) -> String {
    format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""))
}

#[test]
fn no_header_is_no_key() {
    assert!(read(&headers([]), &NAME, false).expect("valid").is_none());
    assert!(read(&headers([]), &NAME, true).expect("valid").is_none());
}

#[test]
fn bare_and_quoted_forms_are_the_same_key() {
    for line in ["abc", "\"abc\"", " \t abc\t ", "\t\"abc\" \t", "\"abc\";a=1;b=\"x\""] {
        assert_eq!(read_line(line).as_deref(), Ok("abc"), "{line:?}");
    }
}

#[test]
fn a_quoted_key_may_hold_what_a_bare_one_may_not() {
    assert_eq!(read_line(r#"" a, \"b\" \\ ""#).as_deref(), Ok(r#" a, "b" \ "#));
}

#[test]
fn two_lines_are_refused_even_when_equal() {
    for lines in [[&b"a"[..], b"a"], [b"a", b"b"], [b"\"a", b"b\""], [b"", b""]] {
        assert_eq!(read(&headers(lines), &NAME, false).expect_err("refused"), REPEATED);
    }
}

#[test]
fn an_empty_key_is_refused_in_both_forms() {
    for line in ["", "   ", "\t", "\"\"", " \"\" "] {
        assert_eq!(read_line(line), Err(EMPTY), "{line:?}");
    }
}

#[test]
fn a_bare_key_holds_only_visible_ascii_without_delimiters() {
    let bad: [&[u8]; 8] =
        [b"a b", b"a\tb", b"a,b", b"a\"b", b"a\\b", b"a\"", b"a\x80b", "schlüssel".as_bytes()];
    for line in bad {
        assert_eq!(read_line(line), Err(BAD_BARE), "{line:?}");
    }
    for byte in 0x80..=0xFF {
        assert_eq!(read_line([byte]), Err(BAD_BARE), "{byte:#x}");
    }
}

#[test]
fn a_malformed_quoted_key_is_refused() {
    let bad = [
        "\"",
        "\"abc",
        "\"abc\"x",
        "\"abc\" x",
        "\"abc\",\"abc\"",
        "\"a\\b\"",
        "\"a\\",
        "\"a\tb\"",
        "\"ü\"",
        "\"abc\";",
        "\"abc\";A=1",
        "\"abc\";a=\"",
        "\"abc\"\t;a",
    ];
    for line in bad {
        assert_eq!(read_line(line), Err(BAD_QUOTED), "{line:?}");
    }
}

#[test]
fn length_counts_decoded_bytes() {
    let longest = "k".repeat(255);
    let too_long = "k".repeat(256);
    assert_eq!(read_line(&longest).as_ref(), Ok(&longest));
    assert_eq!(read_line(quote(&longest)).as_ref(), Ok(&longest));
    assert_eq!(read_line(&too_long), Err(TOO_LONG));
    assert_eq!(read_line(quote(&too_long)), Err(TOO_LONG));
    for escaped in ["\\", "\""] {
        let longest = escaped.repeat(255);
        assert_eq!(read_line(quote(&longest)).as_ref(), Ok(&longest));
        assert_eq!(read_line(quote(&escaped.repeat(256))), Err(TOO_LONG));
    }
    // Parameters are read and ignored, but not without end.
    let parameter = |length: usize| format!("\"k\";a=\"{}\"", "x".repeat(length - 8));
    assert_eq!(parameter(MAX_RAW).len(), MAX_RAW);
    assert_eq!(read_line(parameter(MAX_RAW)).as_deref(), Ok("k"));
    assert_eq!(read_line(parameter(MAX_RAW + 1)), Err(TOO_LONG));
    assert_eq!(read_line("k".repeat(64 * 1024)), Err(TOO_LONG));
    assert_eq!(read_line(format!("\"k\";a=\"{}\"", "x".repeat(64 * 1024))), Err(TOO_LONG));
}

#[test]
fn a_refusal_says_why() {
    assert_eq!(IdempotencyKey::new("").unwrap_err().to_string(), "the key is empty");
    assert_eq!(InvalidKey::new("it has to be a UUID").to_string(), "it has to be a UUID");
}

#[test]
fn quoted_only_refuses_the_bare_form() {
    assert_eq!(read(&headers([&b"abc"[..]]), &NAME, true).expect_err("refused"), NOT_QUOTED);
    let key = read(&headers([&b"\"abc\""[..]]), &NAME, true).expect("valid").expect("there");
    assert_eq!(key.as_str(), "abc");
}

#[test]
fn neither_a_key_nor_a_refusal_prints_the_key() {
    let key = read(&headers([&b"s3cret"[..]]), &NAME, false).expect("valid").expect("there");
    assert!(!format!("{key:?} {:#?}", key.clone()).contains("s3cret"));
    let refusal = read(&headers([&b"s3cret,s3cret"[..]]), &NAME, false).expect_err("refused");
    assert!(!format!("{refusal:?}").contains("s3cret"));
}

/// The item vectors of the HTTP working group. A key is a String, so a vector that begins with a quote and whose
/// expectation is a string of 1 to 255 bytes must decode to it; all others that begin with a quote must be refused.
#[test]
fn the_public_structured_field_vectors_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/structured-field-tests");
    let (mut keys, mut refused, mut cannot_arrive, mut optional, mut several_lines) =
        (0, 0, 0, 0, 0);
    for file in fs::read_dir(folder).expect("the vectors are there") {
        let file = file.expect("a readable folder").path();
        if file.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = fs::read(&file).expect("a readable file");
        let vectors: Vec<Value> = serde_json::from_slice(&text).expect("a list of vectors");
        for vector in vectors.iter().filter(|vector| vector["header_type"] == "item") {
            let name = &vector["name"];
            let raw: Vec<&str> = vector["raw"]
                .as_array()
                .expect("lines")
                .iter()
                .map(|line| line.as_str().expect("text"))
                .collect();
            let [raw] = raw[..] else {
                // The joined lines may be a legal Item, but two lines are refused whatever they hold.
                let lines = headers(raw.iter().map(|line| line.as_bytes()));
                assert_eq!(read(&lines, &NAME, false).expect_err("refused"), REPEATED, "{name}");
                several_lines += 1;
                continue;
            };
            if !raw.trim_matches([' ', '\t']).starts_with('"') {
                continue;
            }
            if HeaderValue::from_bytes(raw.as_bytes()).is_err() {
                // Control characters never get as far as a header map.
                assert_eq!(vector["must_fail"], true, "{name}");
                cannot_arrive += 1;
                continue;
            }
            let expected =
                vector["expected"][0].as_str().filter(|key| (1..=255).contains(&key.len()));
            match (read_line(raw), expected) {
                (Ok(key), Some(expected)) => {
                    assert_eq!(key, expected, "{name}");
                    keys += 1;
                }
                (Err(_), Some(_)) if vector["can_fail"] == true => optional += 1,
                (Err(_), None) => refused += 1,
                (outcome, expected) => panic!("{name}: {outcome:?} instead of {expected:?}"),
            }
        }
    }
    assert_eq!((keys, refused, cannot_arrive, optional, several_lines), (99, 106, 65, 0, 2));
}

proptest! {
    #[test]
    fn every_key_survives_both_forms(key in "[ -~]{1,255}") {
        prop_assert_eq!(read_line(quote(&key)), Ok(key.clone()));
        let bare = key.bytes().all(|byte| byte != b' ' && !b"\",\\".contains(&byte));
        prop_assert_eq!(read_line(&key) == Ok(key.clone()), bare);
    }

    #[test]
    fn different_keys_stay_different(a in "[ab\"\\\\;=, ]{1,4}", b in "[ab\"\\\\;=, ]{1,4}") {
        prop_assert_eq!(read_line(quote(&a)) == read_line(quote(&b)), a == b);
    }

    #[test]
    fn a_bare_key_is_its_own_bytes(line in prop::collection::vec(prop_oneof![Just(b'\t'), 0x20..=0x7E_u8, 0x80..=0xFF_u8], 0..300)) {
        if let Ok(key) = read_line(&line) && !key.is_empty() {
            let field = line.trim_ascii();
            prop_assert!(field.starts_with(b"\"") || field == key.as_bytes());
        }
    }
}
