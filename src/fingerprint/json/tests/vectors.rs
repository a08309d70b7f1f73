//! The public vectors for the canonical form of JSON (RFC 8785).

use std::fs;
use std::path::Path;

use super::{digest, same};

/// The canonical form keeps order, white space and escapes fixed, but also respells numbers, which are compared by
/// their text here.
#[test]
fn the_public_canonicalisation_vectors_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/jcs");
    let respelled = ["structures.json", "values.json"];
    let mut names = Vec::new();
    for file in fs::read_dir(folder.join("input")).expect("the vectors are there") {
        let name =
            file.expect("a readable folder").file_name().into_string().expect("a plain name");
        let read = |side| fs::read(folder.join(side).join(&name)).expect("a readable file");
        let input = digest(&read("input")).expect("comparable by meaning");
        let output = digest(&read("output")).expect("comparable by meaning");
        assert_eq!(input == output, !respelled.contains(&name.as_str()), "{name}");
        names.push(name);
    }
    names.sort();
    let expected = [
        "arrays.json",
        "french.json",
        "structures.json",
        "unicode.json",
        "values.json",
        "weird.json",
    ];
    assert_eq!(names, expected);
}

/// With the canonical spelling of numbers put in by hand, the remaining vectors agree as well.
#[test]
fn only_number_spelling_separates_the_respelled_vectors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/jcs");
    for (name, numbers) in [
        ("structures.json", &[("56.0", "56")][..]),
        (
            "values.json",
            &[
                ("333333333.33333329", "333333333.3333333"),
                ("1E30", "1e+30"),
                ("4.50", "4.5"),
                ("2e-3", "0.002"),
                ("0.000000000000000000000000001", "1e-27"),
            ],
        ),
    ] {
        let read =
            |side| fs::read_to_string(folder.join(side).join(name)).expect("a readable file");
        let input =
            numbers.iter().fold(read("input"), |text, (from, to)| text.replacen(from, to, 1));
        same(&[&input, &read("output")]);
    }
}
