//! Selections: which pointers are taken, and which bodies are alike under them.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::*;
use crate::fingerprint::json::{digest, digest_selected};

#[track_caller]
fn only(pointers: &[&str]) -> Selection {
    Selection::only(pointers).expect("pointers")
}

#[track_caller]
fn except(pointers: &[&str]) -> Selection {
    Selection::except(pointers).expect("pointers").expect("at least one")
}

#[track_caller]
fn same(selection: &Selection, bodies: &[&str]) {
    let of = |body: &str| digest_selected(body.as_bytes(), selection).expect(body);
    for body in bodies {
        assert_eq!(of(body), of(bodies[0]), "{selection:?} sees {body} unlike {}", bodies[0]);
    }
}

#[track_caller]
fn all_different(selection: &Selection, bodies: &[&str]) {
    let of = |body: &str| digest_selected(body.as_bytes(), selection).expect(body);
    for (at, a) in bodies.iter().enumerate() {
        for b in &bodies[..at] {
            assert_ne!(of(a), of(b), "{selection:?} sees {a} like {b}");
        }
    }
}

#[test]
fn only_what_is_pointed_at_counts() {
    let selection = only(&["/amount", "/to/iban"]);
    same(
        &selection,
        &[
            r#"{"amount":1,"to":{"iban":"x"}}"#,
            r#"{"to":{"name":"y","iban":"\u0078"},"nonce":[1,{}],"amount":1}"#,
        ],
    );
    all_different(
        &selection,
        &[
            r#"{"amount":1,"to":{"iban":"x"}}"#,
            r#"{"amount":2,"to":{"iban":"x"}}"#,
            r#"{"amount":1.0,"to":{"iban":"x"}}"#,
            r#"{"amount":1,"to":{"iban":"y"}}"#,
            r#"{"amount":"x","to":{"iban":1}}"#,
            r#"{"amount":[1],"to":{"iban":"x"}}"#,
            r#"{"amount":{"amount":1},"to":{"iban":"x"}}"#,
        ],
    );
}

#[test]
fn a_missing_member_is_not_a_null_one() {
    let bodies = [r#"{"a":null,"b":1}"#, r#"{"b":1}"#, r#"{"a":{},"b":1}"#, r#"{"a":[],"b":1}"#];
    all_different(&only(&["/a"]), &bodies);
    all_different(&except(&["/b"]), &bodies);
    all_different(&only(&["/a/x", "/b"]), &[r#"{"a":{"x":null},"b":1}"#, bodies[1]]);
}

#[test]
fn where_nothing_is_pointed_at_nothing_counts() {
    let nothing = ["{}", "[]", "null", "1", r#""a""#, r#"{"a":1}"#, r#"{"a":{"c":1}}"#, "[[1]]"];
    same(&only(&["/a/b"]), &nothing);
    all_different(&only(&["/a/b"]), &["{}", r#"{"a":{"b":null}}"#, r#"{"a":{"b":{}}}"#]);
}

#[test]
fn all_counts_but_what_is_pointed_at() {
    let selection = except(&["/meta/nonce", "/sent_at"]);
    same(
        &selection,
        &[
            r#"{"a":1,"meta":{"v":2,"nonce":1},"sent_at":"now"}"#,
            r#"{"meta":{"nonce":{"x":[]},"v":2},"a":1,"sent_at":null}"#,
            r#"{"meta":{"v":2},"a":1}"#,
        ],
    );
    all_different(
        &selection,
        &[
            r#"{"a":1,"meta":{"v":2}}"#,
            r#"{"a":2,"meta":{"v":2}}"#,
            r#"{"a":1,"meta":{"v":3}}"#,
            r#"{"a":1,"meta":{"v":2},"nonce":1}"#,
            r#"{"a":1,"meta":{"v":2},"more":{"sent_at":1}}"#,
            r#"{"a":1,"meta":{"v":{"nonce":2}}}"#,
            // A way to nothing is still there.
            r#"{"a":1,"meta":{}}"#,
            r#"{"a":1,"meta":[]}"#,
            r#"{"a":1,"meta":null}"#,
            r#"{"a":1}"#,
        ],
    );
    same(&selection, &[r#"{"meta":{}}"#, r#"{"meta":{"nonce":1}}"#]);
}

#[test]
fn elements_count_by_their_index() {
    let selection = only(&["/rows/1/id", "/rows/10"]);
    same(
        &selection,
        &[
            r#"{"rows":[0,{"id":5},2,3,4,5,6,7,8,9,true]}"#,
            r#"{"rows":["x",{"id":5,"n":1},{"id":6},3,4,5,6,7,8,9,true,11]}"#,
        ],
    );
    all_different(
        &selection,
        &[
            r#"{"rows":[{"id":5},{"id":6}]}"#,
            r#"{"rows":[{"id":6},{"id":5}]}"#,
            r#"{"rows":[{"id":5}]}"#,
            // A name is not an index, even where it looks like one.
            r#"{"rows":{"1":{"id":5}}}"#,
            r#"{"rows":{"1":{"id":6}}}"#,
        ],
    );
    // Neither is an element that is there taken for one before it that has nothing to count.
    all_different(&only(&["/0/x", "/1/x"]), &[r#"[{"x":5}]"#, r#"[null,{"x":5}]"#]);
    // What is left out leaves its place behind, if something comes after it.
    all_different(&except(&["/1"]), &["[1]", "[1,2,3]", "[1,2,3,4]", "[1,2,4]", "[3,1]", "[]"]);
    same(&except(&["/1"]), &["[1,2,3]", "[1,[],3]"]);
    same(&except(&["/1"]), &["[1]", "[1,2]"]);
    all_different(&except(&["/1/x"]), &[r#"[1,{"x":1}]"#, "[1]", "[1,[]]"]);
    // No element has these for an index.
    for pointer in ["/01", "/-", "/+1", "/1 ", "/-1", "/99999999999999999999999999"] {
        all_different(&except(&[pointer]), &["[1]", "[1,2]", "[1,3]"]);
        same(&only(&[pointer]), &["[1]", "[1,2]", "{}"]);
    }
    all_different(&only(&["/01", "/-"]), &[r#"{"01":1}"#, r#"{"-":1}"#, r#"{"1":1}"#]);
    for length in [127, 128, 129, 1000] {
        let body = |last| format!("[{}{last}]", "0,".repeat(length));
        let pointer = format!("/{length}");
        all_different(&only(&[&pointer]), &[&body(1), &body(2), "[]"]);
        same(&except(&[&pointer]), &[&body(1), &body(2)]);
    }
}

#[test]
fn names_are_pointed_at_by_their_characters() {
    for (pointer, name) in [
        ("/a~1b", "a/b"),
        ("/m~0n", "m~n"),
        ("/~01", "~1"),
        ("/~10", "/0"),
        ("/", ""),
        ("/ ", " "),
        ("/é", r"\u00e9"),
        ("/\"\\", r#"\"\\"#),
        ("/0", "0"),
        ("/😀", r"\ud83d\uDE00"),
    ] {
        let body = |value| format!(r#"{{"x":0,"{name}":{value}}}"#);
        all_different(&only(&[pointer]), &[&body("1"), &body("2"), r#"{"x":0}"#]);
        same(&except(&[pointer]), &[&body("1"), &body("2"), r#"{"x":0}"#]);
    }
    for length in [127, 128, 200, 16_384] {
        let name = "n".repeat(length);
        let body = |value| format!(r#"{{"{name}":{value}}}"#);
        all_different(&only(&[&format!("/{name}")]), &[&body("1"), &body("2"), "{}"]);
    }
    same(&only(&["/é"]), &["{}", "{\"e\u{301}\":1}", r#"{"É":1}"#]);
}

#[test]
fn the_empty_pointer_is_all_of_the_body() {
    let bodies = ["{}", "[]", "1", "null", r#"{"a":1}"#, r#"{"a":2}"#];
    all_different(&only(&[""]), &bodies);
    all_different(&only(&["/a", ""]), &bodies);
    assert!(Selection::except([""]).is_err());
    assert!(Selection::except(["/a", ""]).is_err());
}

#[test]
fn what_is_no_pointer_is_refused_and_says_so() {
    for pointer in ["a", "a/b", "#/a", " /a", "~", "~0", "/~", "/~2", "/a~/b", "/~0~", "$.a"] {
        for why in [
            Selection::only(["/fine", pointer]).expect_err(pointer),
            Selection::except(["/fine", pointer]).expect_err(pointer),
        ] {
            assert!(why.starts_with(&format!("{pointer:?} is not a JSON Pointer: ")), "{why}");
        }
    }
    assert!(Selection::only([""; 0]).is_err());
    assert!(Selection::except([""; 0]).expect("nothing to refuse").is_none());
}

#[test]
fn a_selection_is_known_by_its_parts_however_it_is_put() {
    for (a, b) in [
        (only(&["/a", "/b"]), only(&["/b", "/a", "/b"])),
        (only(&["/a", "/a!"]), only(&["/a", "/a/b", "/a!", "/a/b/c", "/a!/0"])),
        (except(&["/a"]), except(&["/a/b", "/a", "/a/0"])),
        (only(&[""]), only(&["", "/a"])),
    ] {
        assert_eq!(a.id(), b.id(), "{a:?} {b:?}");
        assert_eq!(format!("{a:?}"), format!("{b:?}"));
    }
    let different = [
        only(&["/a"]),
        except(&["/a"]),
        only(&["/b"]),
        only(&["/a", "/b"]),
        only(&["/a/b"]),
        only(&["/a~1b"]),
        only(&["/a", "/c"]),
        only(&[""]),
        only(&["/"]),
        only(&["//"]),
        only(&["/0"]),
        only(&["/00"]),
    ];
    for (at, a) in different.iter().enumerate() {
        for b in &different[..at] {
            assert_ne!(a.id(), b.id(), "{a:?} {b:?}");
        }
    }
    assert_eq!(format!("{:?}", only(&["/b~1", "/a/0"])), r#"Only(["/a/0", "/b~1"])"#);
}

#[test]
fn what_does_not_count_has_to_be_json_all_the_same() {
    let deep = format!("{{\"a\":1,\"b\":{}{}}}", "[".repeat(128), "]".repeat(128));
    for selection in [only(&["/a"]), except(&["/b"]), except(&["/b/c", "/b/0"])] {
        for body in [
            r#"{"a":1,"b":}"#,
            r#"{"a":1,"b":01}"#,
            r#"{"a":1,"b":"\ud800"}"#,
            r#"{"a":1,"b":{"\udc00":1}}"#,
            r#"{"a":1,"b":{"x":1,"x":1}}"#,
            r#"{"a":1,"b":[{"x":{},"y":[],"x":1}]}"#,
            r#"{"a":1,"b":1,"b":1}"#,
            r#"{"a":1,"b":1} 2"#,
            &deep,
        ] {
            assert_eq!(digest_selected(body.as_bytes(), &selection), None, "{selection:?} {body}");
        }
        assert_eq!(digest_selected(b"{\"a\":1,\"b\":\"\xff\"}", &selection), None);
    }
}

/// The bound is many times what is needed and below what quadratic work would take.
#[test]
fn a_hostile_body_takes_linear_work_under_a_selection_too() {
    let pointers: Vec<_> = (0..50_000).map(|n| format!("/{n}")).collect();
    let array = format!("[{}0]", "0,".repeat(100_000));
    let members: Vec<_> = (0..20_000).map(|n| format!("\"{n}\":{n}")).collect();
    let object = format!("{{{}}}", members.join(","));
    let deep = format!("{}{}", "{\"0\":[".repeat(64), "]}".repeat(64));
    let way = "/0".repeat(128);
    let start = Instant::now();
    for selection in [
        Selection::only(&pointers).expect("pointers"),
        Selection::except(&pointers).expect("pointers").expect("some"),
        only(&[&way]),
        except(&[&way]),
    ] {
        for body in [&array, &object, &deep] {
            assert!(digest_selected(body.as_bytes(), &selection).is_some());
        }
    }
    assert!(start.elapsed() < Duration::from_secs(120), "{:?}", start.elapsed());
}

/// What is left of a value, written out as a tree: an array of which something may be missing is an object under a name
/// that no generated document has. The paths are the rests of those that lead here.
fn left(value: &Value, paths: &[&[String]], only: bool) -> Option<Value> {
    if paths.is_empty() {
        return (!only).then(|| value.clone());
    }
    if paths.iter().any(|path| path.is_empty()) {
        return only.then(|| value.clone());
    }
    let inside = |name: &str, value: &Value| {
        let paths: Vec<_> =
            paths.iter().filter(|path| path[0] == name).map(|path| &path[1..]).collect();
        left(value, &paths, only).map(|value| (name.to_owned(), value))
    };
    let (mut kept, is_array): (Map<String, Value>, bool) = match value {
        Value::Object(members) => {
            (members.iter().filter_map(|(name, value)| inside(name, value)).collect(), false)
        }
        Value::Array(elements) => {
            let elements = elements.iter().enumerate();
            (elements.filter_map(|(at, value)| inside(&at.to_string(), value)).collect(), true)
        }
        scalar => return (!only).then(|| scalar.clone()),
    };
    if only && kept.is_empty() {
        return None;
    }
    if is_array {
        kept = Map::from_iter([("an array".to_owned(), Value::Object(kept))]);
    }
    Some(Value::Object(kept))
}

const NAMES: [&str; 7] = ["", "a", "b", "0", "1", "a/b", "~1"];

fn documents() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        (0..3_u8).prop_map(|number| json!(number)),
        "[ab]{0,1}".prop_map(Value::String),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let name = prop::sample::select(&NAMES[..]).prop_map(str::to_owned);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::btree_map(name, inner, 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn paths() -> impl Strategy<Value = Vec<Vec<String>>> {
    let token = prop::sample::select(vec!["", "a", "b", "0", "1", "2", "00", "-", "a/b", "~1"])
        .prop_map(str::to_owned);
    prop::collection::vec(prop::collection::vec(token, 1..4), 1..4)
}

/// Changes one place, often one that is pointed at.
fn alter(value: &mut Value, steps: &[prop::sample::Index]) {
    let ([step, steps @ ..], true) = (steps, !is_leaf(value)) else {
        *value = if value.is_null() { json!(7) } else { Value::Null };
        return;
    };
    match value {
        Value::Array(elements) => match step.index(elements.len() + 1) {
            0 => drop(elements.remove(0)),
            at => alter(&mut elements[at - 1], steps),
        },
        Value::Object(members) => {
            let at = step.index(members.len() + 1);
            let name = members.keys().nth(at.saturating_sub(1)).expect("there").clone();
            if at == 0 {
                drop(members.remove(&name));
            } else {
                alter(members.get_mut(&name).expect("there"), steps);
            }
        }
        _ => {}
    }
}

fn is_leaf(value: &Value) -> bool {
    match value {
        Value::Array(elements) => elements.is_empty(),
        Value::Object(members) => members.is_empty(),
        _ => true,
    }
}

proptest! {
    #[test]
    fn digests_are_equal_exactly_when_what_is_left_is(
        first in documents(),
        other in documents(),
        changed in prop::option::of(prop::collection::vec(any::<prop::sample::Index>(), 1..4)),
        paths in paths(),
        is_only: bool,
    ) {
        let second = match changed {
            None => other,
            Some(steps) => {
                let mut altered = first.clone();
                alter(&mut altered, &steps);
                altered
            }
        };
        let written = |token: &String| token.replace('~', "~0").replace('/', "~1");
        let written = |path: &Vec<String>| path.iter().map(written).collect::<Vec<_>>().join("/");
        let pointers: Vec<_> = paths.iter().map(|path| format!("/{}", written(path))).collect();
        let selection = if is_only {
            Selection::only(&pointers).expect("pointers")
        } else {
            Selection::except(&pointers).expect("pointers").expect("some")
        };
        let paths: Vec<_> = paths.iter().map(Vec::as_slice).collect();
        let of = |value: &Value| {
            digest_selected(value.to_string().as_bytes(), &selection).expect("JSON")
        };
        prop_assert_eq!(
            of(&first) == of(&second),
            left(&first, &paths, is_only) == left(&second, &paths, is_only),
            "{:?} {} {}", selection, first, second
        );
        // Pretty, and by another way of writing it.
        let pretty = serde_json::to_string_pretty(&first).expect("JSON");
        prop_assert_eq!(digest_selected(pretty.as_bytes(), &selection), Some(of(&first)));
    }

    #[test]
    fn a_selection_of_everything_takes_in_what_none_does(document in documents()) {
        let body = document.to_string();
        prop_assert_eq!(digest_selected(body.as_bytes(), &only(&[""])), digest(body.as_bytes()));
    }
}
