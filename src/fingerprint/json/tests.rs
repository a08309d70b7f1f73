//! Comes in: JSON bodies, written here, from public vectors and generated. Goes out: which of them share a digest.
//! Next: nothing.

use std::collections::BTreeMap;

use super::digest;

mod left_alone;
mod spellings;
mod vectors;

#[track_caller]
fn same(bodies: &[&str]) {
    let first = digest(bodies[0].as_bytes()).expect("comparable by meaning");
    for body in bodies {
        assert_eq!(digest(body.as_bytes()), Some(first), "{body} differs from {}", bodies[0]);
    }
}

#[track_caller]
fn all_different(bodies: &[&str]) {
    let mut seen = BTreeMap::new();
    for body in bodies {
        let digest = digest(body.as_bytes()).expect(body);
        assert_eq!(seen.insert(digest, body), None, "{body} is like another");
    }
}

#[track_caller]
fn by_bytes(bodies: &[&[u8]]) {
    for body in bodies {
        assert_eq!(digest(body), None, "{}", body.escape_ascii());
    }
}

#[test]
fn member_order_and_white_space_do_not_matter() {
    same(&[
        r#"{"a":1,"b":[true,{"c":null,"d":"x"}]}"#,
        "\r\n { \"b\" : [ true ,\t{\"d\":\"x\", \"c\" :null}\n] , \"a\":1 } ",
    ]);
}

#[test]
fn white_space_inside_strings_matters() {
    all_different(&[r#""a""#, r#"" a""#, r#""a ""#]);
}

#[test]
fn strings_and_names_compare_by_decoded_characters() {
    same(&[r#""A""#, r#""\u0041""#]);
    same(&[r#""€😂/""#, r#""\u20AC\uD83D\ude02\/""#]);
    same(&[r#"{"A":1,"b":2}"#, r#"{"\u0062":2,"\u0041":1}"#]);
    same(&[r#""\b\f\n\r\t\"\\""#, r#""\u0008\u000c\u000a\u000d\u0009\u0022\u005c""#]);
    // No Unicode normalisation: the composed and the decomposed form are different characters.
    all_different(&["\"\u{C5}\"", "\"A\u{30A}\"", r#""A""#, r#""a""#]);
}

#[test]
fn numbers_compare_by_their_text() {
    all_different(&["1", "1.0", "1e0", "1E0", "1e+0", "10e-1", "-1", "0", "-0", "0.0"]);
    all_different(&["9007199254740992", "9007199254740993", "9007199254740992.0"]);
    all_different(&[
        "1e400",
        "1e401",
        "123456789012345678901234567890",
        "123456789012345678901234567891",
    ]);
}

#[test]
fn array_order_matters() {
    all_different(&[
        "[1,2]", "[2,1]", "[1]", "[1,2,2]", "[[1],2]", "[[1,2]]", "[]", "[[]]", "[[],[]]",
    ]);
}

#[test]
fn kinds_are_never_confused() {
    all_different(&[
        "null",
        "true",
        "false",
        "0",
        r#""null""#,
        r#""true""#,
        r#""0""#,
        r#""""#,
        "[]",
        "{}",
        "[null]",
        "[0]",
        r#"[""]"#,
        r#"{"":null}"#,
        r#"{"":""}"#,
        r#"["",null]"#,
        "[{}]",
        r#"{"":{}}"#,
        r#"{"":[]}"#,
    ]);
}

#[test]
fn a_byte_moved_over_any_border_changes_the_digest() {
    all_different(&[r#"{"ab":"c"}"#, r#"{"a":"bc"}"#, r#"{"abc":""}"#, r#"{"":"abc"}"#]);
    all_different(&[
        r#"["ab","c"]"#,
        r#"["a","bc"]"#,
        r#"["abc"]"#,
        r#"["abc",""]"#,
        r#"["","abc"]"#,
    ]);
    all_different(&["[12,3]", "[1,23]", "[123]"]);
    all_different(&[r#"{"a":1,"b":2}"#, r#"{"a":2,"b":1}"#, r#"{"a":1}"#, r#"[{"a":1},{"b":2}]"#]);
    all_different(&[r#"{"a":{"b":1},"c":2}"#, r#"{"a":{"b":1,"c":2}}"#, r#"{"a":{},"b":1,"c":2}"#]);
    let long = |length| format!("\"{}\"", "x".repeat(length));
    let lengths = [127, 128, 129, 255, 256, 16_383, 16_384, 16_385].map(long);
    all_different(&lengths.each_ref().map(String::as_str));
}

/// Texts made of what the encoding puts between two values: they collide as soon as a length is missing or cut.
#[test]
fn text_that_looks_like_the_encoding_is_still_text() {
    all_different(&[r#"["a","b"]"#, r#"["asb"]"#, r#"["as\u0001b"]"#]);
    all_different(&["[1,0]", "[100]"]);
    all_different(&[r#"{"a":"bn"}"#, r#"{"asb":null}"#, r#"{"as\u0002b":null}"#]);
    all_different(&[r#"{"a":null,"b":null}"#, r#"{"anb":null}"#, r#"{"an\u0001b":null}"#]);
    for length in [127, 128, 129, 255, 256, 257, 16_384] {
        let mut bodies = Vec::new();
        for text in [0, 1, length % 128, length / 128, length % 256, length / 256, length] {
            let body = format!("[\"{}\"{}]", "n".repeat(text), ",null".repeat(length - text));
            if !bodies.contains(&body) {
                bodies.push(body);
            }
        }
        all_different(&bodies.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// Computed apart from this code. A change here makes every stored fingerprint of a JSON body a conflict, so it needs a
/// new fingerprint version.
#[test]
fn the_encoding_stays_as_it_is() {
    let digest =
        digest("{\"b\":[null,true,false,{\"c\":\"é\"}],\"a\":1.0}".as_bytes()).expect("JSON");
    let hex = digest.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    assert_eq!(hex, "eb39b394f29d67f6ec0d6a249e539b5483c61c93272f6be30d211e3ccd2ca51c");
}
