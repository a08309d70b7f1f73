//! What is not JSON that everybody understands alike, and is compared by its bytes.

use std::time::Duration;

use tokio::time::Instant;

use super::{all_different, by_bytes, digest, same};

#[test]
fn duplicate_names_compare_by_bytes() {
    by_bytes(&[
        br#"{"a":1,"a":2}"#,
        br#"{"a":1,"a":1}"#,
        br#"{"a":1,"b":2,"\u0061":3}"#,
        br#"[{"x":{"a":1,"b":[],"a":2}}]"#,
        br#"{"":0,"":0}"#,
    ]);
    // The same name in different objects is no duplicate.
    same(&[r#"{"a":{"a":1},"b":[{"a":1},{"a":1}]}"#, r#"{"b":[{"a":1},{"a":1}],"a":{"a":1}}"#]);
}

#[test]
fn broken_json_compares_by_bytes() {
    by_bytes(&[
        b"",
        b" ",
        b"\n",
        b"{",
        b"[",
        b"}",
        b"]",
        b"[1",
        b"[1,",
        b"[1,]",
        b"[,1]",
        b"[1 2]",
        b"[1]]",
        b"[}",
        b"{]",
        b"{\"a\"}",
        b"{\"a\":}",
        b"{\"a\":1,}",
        b"{,}",
        b"{\"a\" 1}",
        b"{\"a\":1 \"b\":2}",
        b"{a:1}",
        b"{1:1}",
        b"{'a':1}",
        b"{null:1}",
        b"nul",
        b"nulll",
        b"True",
        b"truefalse",
        b"[truefalse]",
        b"NaN",
        b"Infinity",
        b"01",
        b"-",
        b"+1",
        b"-01",
        b".5",
        b"1.",
        b"1.e1",
        b"1e",
        b"1e+",
        b"0x1",
        b"1_0",
        b"\"",
        b"\"a",
        b"\"\\\"",
        b"\"\\x\"",
        b"\"\\u12\"",
        b"\"\\u12G4\"",
        b"\"\\u+123\"",
        b"// c\n1",
        b"1 // c",
        b"\"a\nb\"",
        b"\"\t\"",
        b"\"\0\"",
        b"\x0C1",
        b"1\0",
        b"1\xC2\xA0",
    ]);
}

#[test]
fn data_after_the_value_compares_by_bytes() {
    by_bytes(&[b"1 2", b"{}{}", b"{} x", b"[],", b"null null", b"\"a\"\"b\"", b"{}\xEF\xBB\xBF"]);
    same(&["{}", " {} ", "{}\r\n"]);
}

#[test]
fn a_byte_order_mark_compares_by_bytes() {
    by_bytes(&[
        b"\xEF\xBB\xBF{}",
        b"\xEF\xBB\xBF",
        b" \xEF\xBB\xBF{}",
        b"\xEF\xBB\xBF\xEF\xBB\xBF{}",
    ]);
    all_different(&["\"\u{FEFF}\"", "\"\""]);
}

#[test]
fn invalid_utf8_compares_by_bytes() {
    by_bytes(&[
        b"\"\xFF\"",
        b"\"\x80\"",
        b"\"\xC3\"",
        b"\"\xC3\\n\"",
        b"\"\\n\xC3\"",
        b"\"\xC0\xAF\"",
        b"\"\xED\xA0\x80\"",
        b"\"\xF4\x90\x80\x80\"",
        b"{\"\xFF\":1}",
        b"\xFF",
        b"{}\xFF",
    ]);
}

#[test]
fn lone_surrogates_compare_by_bytes() {
    by_bytes(&[
        br#""\ud800""#,
        br#""\udc00""#,
        br#""\ud800\ud800""#,
        br#""\udc00\ud800""#,
        br#""\ud800abcdef""#,
        br#""\ud800\n\n\n""#,
        br#""\ud800\u0041""#,
        br#"{"\udfff":1}"#,
        br#""\ud83d\\ude02""#,
    ]);
    // What a careless reader would put in their place stays comparable.
    assert!(digest(br#""\ufffd""#).is_some());
}

#[test]
fn deep_nesting_compares_by_bytes() {
    let nested =
        |depth, open: &str, close: &str| format!("{}1{}", open.repeat(depth), close.repeat(depth));
    for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[{\"a\":", "}]")] {
        let deepest = 128 / close.len();
        assert!(digest(nested(deepest, open, close).as_bytes()).is_some());
        assert_eq!(digest(nested(deepest + 1, open, close).as_bytes()), None);
    }
    all_different(&[&nested(127, "[", "]"), &nested(128, "[", "]")]);
    // Width is not depth.
    assert!(digest(format!("[{}1]", "[[]],".repeat(1000)).as_bytes()).is_some());
}

/// The bound is a hundred times what is needed and far below what quadratic work would take.
#[test]
fn hostile_bodies_take_linear_work() {
    let nested = "[".repeat(1 << 20);
    let objects = "{\"a\":".repeat(200_000);
    let wide: Vec<String> = (0..100_000).map(|n| format!("\"member{n}\":{n}")).collect();
    let duplicate = format!("{{{},\"member7\":0}}", wide.join(","));
    let reversed: Vec<String> = wide.iter().rev().cloned().collect();
    let wide = format!("{{{}}}", wide.join(","));
    let reversed = format!("{{{}}}", reversed.join(","));
    let unterminated = format!("[{}\"", "\"\\u0041\",".repeat(100_000));
    let start = Instant::now();
    by_bytes(&[
        nested.as_bytes(),
        objects.as_bytes(),
        duplicate.as_bytes(),
        unterminated.as_bytes(),
    ]);
    same(&[&wide, &reversed]);
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
}
