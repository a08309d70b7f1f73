//! Fingerprints: what of a request counts, and that no two requests share one.

use http::{HeaderValue, Request};

use super::*;

/// A request's fingerprint, its body split where the test says.
struct Asked {
    method: &'static str,
    uri: &'static str,
    headers: Vec<(&'static str, &'static str)>,
    body: Vec<&'static [u8]>,
    trailers: Vec<(&'static str, &'static str)>,
    selection: Option<Selection>,
}

fn json(body: &'static str) -> Asked {
    Asked {
        method: "POST",
        uri: "/v1/runs",
        headers: vec![("content-type", "application/json")],
        body: vec![body.as_bytes()],
        trailers: vec![],
        selection: None,
    }
}

fn bytes(body: &'static [u8]) -> Asked {
    Asked {
        headers: vec![("content-type", "application/octet-stream")],
        body: vec![body],
        ..json("")
    }
}

impl Asked {
    fn fingerprint(&self) -> Fingerprint {
        let mut request = Request::builder().method(self.method).uri(self.uri);
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        let parts = request.body(()).unwrap().into_parts().0;
        let mut counts = Counts::default();
        counts.set_headers(vec![HeaderName::from_static("x-session-key")]);
        counts.set_json(self.selection.clone());
        let mut made = counts.begin();
        for chunk in &self.body {
            made.data(chunk);
        }
        let trailers: HeaderMap = self
            .trailers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        let trailers = (!trailers.is_empty()).then_some(trailers);
        let body = self.body.concat().into();
        let content = Content { body: &body, trailers: trailers.as_ref() };
        made.finish(&counts, &parts, content).fingerprint(&counts, &parts, content)
    }
}

#[track_caller]
fn same(a: &Asked, b: &Asked) {
    assert_eq!(a.fingerprint(), b.fingerprint());
}

#[track_caller]
fn differ(a: &Asked, b: &Asked) {
    assert_ne!(a.fingerprint(), b.fingerprint());
}

#[test]
fn method_path_and_query_count() {
    let base = json("{}");
    differ(&base, &Asked { method: "PATCH", ..json("{}") });
    differ(&base, &Asked { uri: "/v1/run", ..json("{}") });
    differ(&base, &Asked { uri: "/v1/runs?", ..json("{}") });
    differ(&base, &Asked { uri: "/v1/runs?a=1", ..json("{}") });
    differ(&Asked { uri: "/a?b", ..json("") }, &Asked { uri: "/a/b", ..json("") });
}

#[test]
fn content_type_and_encoding_and_chosen_headers_count_and_no_others_do() {
    let base = json("{}");
    let with = |headers: Vec<_>| Asked { headers, ..json("{}") };
    let content = ("content-type", "application/json");
    differ(&base, &with(vec![("content-type", "application/json; charset=utf-8")]));
    differ(&base, &with(vec![("content-type", "Application/JSON")]));
    differ(&base, &with(vec![content, ("content-encoding", "gzip")]));
    differ(&base, &with(vec![content, ("x-session-key", "s")]));
    differ(
        &with(vec![content, ("x-session-key", "s"), ("x-session-key", "t")]),
        &with(vec![content, ("x-session-key", "st")]),
    );
    same(&base, &with(vec![content, ("x-request-id", "1"), ("authorization", "Bearer x")]));
}

#[test]
fn json_counts_by_meaning_where_the_content_type_says_json() {
    for kind in ["application/json", "application/vnd.api+json; v=1", "APPLICATION/JSON"] {
        let of = |body| Asked { headers: vec![("content-type", kind)], ..json(body) };
        same(&of(r#"{"a":1,"b":[2,"x"]}"#), &of("{ \"b\": [2, \"\\u0078\"],\n \"a\": 1 }"));
        differ(&of(r#"{"a":1}"#), &of(r#"{"a":2}"#));
        differ(&of(r#"{"a":1}"#), &of(r#"{"a":1.0}"#));
    }
    let body = [r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#];
    for headers in [
        vec![],
        vec![("content-type", "text/plain")],
        vec![("content-type", "+json")],
        vec![("content-type", "application/json"), ("content-type", "application/json")],
        vec![("content-type", "application/json"), ("content-encoding", "identity")],
    ] {
        let of = |body| Asked { headers: headers.clone(), ..json(body) };
        differ(&of(body[0]), &of(body[1]));
        same(&of(body[0]), &of(body[0]));
    }
}

#[test]
fn a_body_that_is_not_json_after_all_counts_by_its_bytes() {
    differ(&json(r#"{"a":1"#), &json(r#"{"a":1 "#));
    same(&json(r#"{"a":1"#), &json(r#"{"a":1"#));
    differ(&json(r#"{"a":1,"a":2}"#), &json(r#"{"a":2,"a":1}"#));
}

#[test]
fn every_byte_of_the_body_counts_however_it_is_split() {
    same(&Asked { body: vec![b"ab", b"", b"c"], ..bytes(b"") }, &bytes(b"abc"));
    differ(&bytes(b"abc"), &bytes(b"abd"));
    differ(&bytes(b""), &bytes(b"\0"));
    differ(&json(""), &json("{}"));
}

#[test]
fn trailers_count_and_never_pass_for_body() {
    let plain = json("{}");
    differ(&plain, &Asked { trailers: vec![("x-checksum", "1")], ..json("{}") });
    differ(
        &Asked { trailers: vec![("x-checksum", "1")], ..json("{}") },
        &Asked { trailers: vec![("x-checksum", "2")], ..json("{}") },
    );
    // The same bytes in the same order, once as a body and once as trailers.
    let mut body = Vec::new();
    for field in ["x-checksum", "1"] {
        body.extend_from_slice(&(field.len() as u64).to_le_bytes());
        body.extend_from_slice(field.as_bytes());
    }
    differ(&bytes(body.leak()), &Asked { trailers: vec![("x-checksum", "1")], ..bytes(b"") });
}

#[test]
fn the_exact_digest_tells_bytes_apart_that_mean_the_same() {
    let [first, again, respaced] = [r#"{"a":1}"#, r#"{"a":1}"#, r#"{"a": 1}"#].map(json);
    same(&first, &respaced);
    assert_eq!(first.fingerprint().exact(), again.fingerprint().exact());
    assert_ne!(first.fingerprint().exact(), respaced.fingerprint().exact());
}

fn selected(pointers: &[&str], body: &'static str) -> Asked {
    Asked { selection: Some(Selection::only(pointers).expect("pointers")), ..json(body) }
}

#[test]
fn under_a_selection_only_that_part_of_a_json_body_counts() {
    let [a, b, c] = [r#"{"a":1,"b":1}"#, r#"{"b":2,"a":1}"#, r#"{"a":2,"b":1}"#];
    same(&selected(&["/a"], a), &selected(&["/a"], b));
    differ(&selected(&["/a"], a), &selected(&["/a"], c));
    let trailer = Asked { trailers: vec![("x-checksum", "1")], ..selected(&["/a"], a) };
    differ(&selected(&["/a"], a), &trailer);
    // What is compared by its bytes is compared by all of them.
    let broken = [r#"{"a":1,"b":1"#, r#"{"a":1,"b":2"#];
    differ(&selected(&["/a"], broken[0]), &selected(&["/a"], broken[1]));
    same(&selected(&["/a"], broken[0]), &selected(&["/a"], broken[0]));
}

#[test]
fn what_one_selection_makes_is_never_like_what_another_or_none_makes() {
    // Other bodies are as they are without it.
    let plain = |selection| Asked { selection, ..bytes(b"{\"a\":1}") };
    same(&plain(None), &plain(selected(&["/a"], "").selection));
    for body in ["{}", "1", r#"{"a":1}"#, r#"{"a":{"b":1},"b":2}"#, "{", ""] {
        let except = Selection::except(["/a"]).expect("a pointer");
        let made = [
            json(body),
            selected(&[""], body),
            selected(&["/a"], body),
            selected(&["/a/b"], body),
            selected(&["/b"], body),
            selected(&["/a", "/b"], body),
            Asked { selection: except, ..json(body) },
        ];
        for (at, a) in made.iter().enumerate() {
            for b in &made[..at] {
                differ(a, b);
                // Nor is it recognised because the bytes are the same.
                assert_ne!(a.fingerprint().exact(), b.fingerprint().exact());
            }
        }
    }
}

#[test]
fn identical_bytes_under_the_same_selection_are_recognised() {
    let exact = |body| *selected(&["/a"], body).fingerprint().exact();
    assert_eq!(exact(r#"{"a":1}"#), exact(r#"{"a":1}"#));
    // What does not count is still another body.
    assert_ne!(exact(r#"{"a":1}"#), exact(r#"{"a":1,"b":1}"#));
}

#[test]
fn a_fingerprint_survives_its_bytes_and_is_not_printed() {
    let made = json("{}").fingerprint();
    let read = Fingerprint::from_bytes(&made.to_bytes());
    assert_eq!((read.exact, read.meaning), (made.exact, made.meaning));
    assert_eq!(format!("{made:?}"), "Fingerprint(..)");
}

#[test]
fn fields_of_a_caller_never_run_into_each_other() {
    assert_ne!(Fingerprint::of(["ab", "c"]), Fingerprint::of(["a", "bc"]));
    assert_ne!(Fingerprint::of(["a"]), Fingerprint::of(["a", ""]));
    assert_eq!(Fingerprint::of(["a", "b"]), Fingerprint::of(["a", "b"]));
}
