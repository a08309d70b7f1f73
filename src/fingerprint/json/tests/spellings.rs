//! Generated documents, each spelled in many ways: equal digests for equal meanings, and for no others.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use proptest::prelude::*;

use super::digest;

/// A document by its meaning: names are unique and sorted, numbers are texts. Equality is what the digest must follow.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Meaning {
    Null,
    Boolean(bool),
    Number(String),
    String(String),
    Array(Vec<Meaning>),
    Object(BTreeMap<String, Meaning>),
}

/// Small steps of a generator, so that one number decides on a whole spelling.
struct Choices(u64);

impl Choices {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

impl Meaning {
    fn spell(&self, choices: &mut Choices, out: &mut String) {
        space(choices, out);
        match self {
            Self::Null => out.push_str("null"),
            Self::Boolean(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(text) => out.push_str(text),
            Self::String(text) => spell_text(text, choices, out),
            Self::Array(elements) => {
                out.push('[');
                for (n, element) in elements.iter().enumerate() {
                    if n > 0 {
                        out.push(',');
                    }
                    element.spell(choices, out);
                }
                space(choices, out);
                out.push(']');
            }
            Self::Object(members) => {
                let mut left: Vec<_> = members.iter().collect();
                out.push('{');
                while !left.is_empty() {
                    let pick = usize::try_from(choices.below(left.len() as u64)).expect("small");
                    let (name, value) = left.swap_remove(pick);
                    space(choices, out);
                    spell_text(name, choices, out);
                    space(choices, out);
                    out.push(':');
                    value.spell(choices, out);
                    if !left.is_empty() {
                        out.push(',');
                    }
                }
                space(choices, out);
                out.push('}');
            }
        }
        space(choices, out);
    }

    fn spelled(&self, seed: u64) -> String {
        let mut out = String::new();
        self.spell(&mut Choices(seed), &mut out);
        out
    }

    /// Changes one place, chosen by `choices`. May by chance give the same document.
    fn altered(&self, choices: &mut Choices) -> Self {
        let mut copy = self.clone();
        match &mut copy {
            Self::Array(elements) if !elements.is_empty() => {
                let pick = usize::try_from(choices.below(elements.len() as u64)).expect("small");
                match choices.below(4) {
                    0 => drop(elements.remove(pick)),
                    1 => elements.swap(0, pick),
                    _ => elements[pick] = elements[pick].altered(choices),
                }
            }
            Self::Object(members) if !members.is_empty() => {
                let pick = usize::try_from(choices.below(members.len() as u64)).expect("small");
                let name = members.keys().nth(pick).expect("there").clone();
                let value = members.remove(&name).expect("there");
                match choices.below(4) {
                    0 => {}
                    1 => drop(members.insert(format!("{name}a"), value)),
                    _ => drop(members.insert(name, value.altered(choices))),
                }
            }
            Self::String(text) if choices.below(2) == 0 => text.push('a'),
            Self::Number(text) => copy = Self::String(text.clone()),
            _ => copy = Self::Array(vec![copy]),
        }
        copy
    }
}

fn space(choices: &mut Choices, out: &mut String) {
    for _ in 0..choices.below(3) {
        out.push([' ', '\t', '\n', '\r'][usize::try_from(choices.below(4)).expect("small")]);
    }
}

fn spell_text(text: &str, choices: &mut Choices, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        let must = matches!(character, '"' | '\\') || character < ' ';
        let short = match character {
            '"' | '\\' | '/' => Some(character),
            '\n' => Some('n'),
            '\t' => Some('t'),
            _ => None,
        };
        match (choices.below(3), short) {
            (0, _) if !must => out.push(character),
            (1, Some(short)) => out.extend(['\\', short]),
            (pick, _) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let written = if pick == 1 {
                        write!(out, "\\u{unit:04X}")
                    } else {
                        write!(out, "\\u{unit:04x}")
                    };
                    written.expect("a string takes all");
                }
            }
        }
    }
    out.push('"');
}

/// Few and alike texts, so that equal and nearly equal documents are common.
fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[ab]{0,2}",
        1 => "[a\"\\\\/\n\t\u{0}\u{7F}é€😂]{0,4}",
        1 => any::<String>(),
        1 => "a{126,130}",
    ]
}

fn meanings() -> impl Strategy<Value = Meaning> {
    let leaf = prop_oneof![
        Just(Meaning::Null),
        any::<bool>().prop_map(Meaning::Boolean),
        "-?(0|[1-9][0-9]{0,1})(\\.[0-9]{1,2})?([eE][+-]?[0-9]{1,2})?".prop_map(Meaning::Number),
        (0..3_u8).prop_map(|n| Meaning::Number(n.to_string())),
        texts().prop_map(Meaning::String),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Meaning::Array),
            prop::collection::btree_map(texts(), inner, 0..4).prop_map(Meaning::Object),
        ]
    })
}

proptest! {
    #[test]
    fn spelling_does_not_matter(meaning in meanings(), a: u64, b: u64) {
        let (a, b) = (meaning.spelled(a), meaning.spelled(b));
        prop_assert!(digest(a.as_bytes()).is_some(), "{}", a);
        prop_assert_eq!(digest(a.as_bytes()), digest(b.as_bytes()), "{} {}", a, b);
    }

    #[test]
    fn digests_are_equal_exactly_when_meanings_are(
        first in meanings(), other in meanings(), alter: bool, seed: u64,
    ) {
        let second = if alter { first.altered(&mut Choices(seed)) } else { other };
        let (a, b) = (first.spelled(seed), second.spelled(!seed));
        let (a_digest, b_digest) = (digest(a.as_bytes()), digest(b.as_bytes()));
        prop_assert!(a_digest.is_some() && b_digest.is_some());
        prop_assert_eq!(a_digest == b_digest, first == second, "{} {}", a, b);
    }

    /// What gets a digest is JSON for another parser too, or else a lenient reading could merge two bodies.
    #[test]
    fn only_json_gets_a_digest(pieces in prop::collection::vec(prop::sample::select(vec![
        "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\"b\"", "\\", "\\u", "d800", "0041", "0", "1", "-", ".", "e", "+",
        "null", "true", "false", "nul", " ", "\n", "\t", "\u{FEFF}", "\u{0}", "é", "\"a\":", "1,", "//",
    ]), 0..9)) {
        let body = pieces.concat();
        if digest(body.as_bytes()).is_some() {
            match serde_json::from_str::<serde_json::Value>(&body) {
                Ok(_) => {}
                // Not a matter of grammar: the other parser goes through floats.
                Err(error) => prop_assert!(error.to_string().contains("number out of range"), "{} {}", body, error),
            }
        }
    }

    /// A missing digest is always correct, but for plain JSON it would compare by bytes for no reason.
    #[test]
    fn a_change_of_one_byte_never_goes_unnoticed(meaning in meanings(), seed: u64, at: prop::sample::Index, byte: u8) {
        let body = meaning.spelled(seed);
        let mut changed = body.clone().into_bytes();
        let at = at.index(changed.len());
        changed[at] = byte;
        if let (Some(digest), Ok(text)) = (digest(&changed), std::str::from_utf8(&changed)) {
            // Equal digests are right only where another reader sees equal values too.
            let before = serde_json::from_str::<serde_json::Value>(&body);
            let after = serde_json::from_str::<serde_json::Value>(text);
            if let (Ok(before), Ok(after)) = (before, after) && before != after {
                prop_assert_ne!(Some(digest), super::digest(body.as_bytes()), "{} {}", body, text);
            }
        }
    }
}
