//! Every file of the fuzzing corpus, through the body of its target: what was found once is not
//! found again.

#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::print_stdout, reason = "the name of the file, shown if it fails")]

#[path = "../fuzz/bodies/mod.rs"]
mod bodies;

use std::{fs, path::Path};

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        run(&fs::read(path).unwrap());
        files += 1;
    }
    assert!(files > 0, "the corpus is empty");
}

#[test]
fn key() {
    replay("key", bodies::key::run);
}

#[test]
fn json() {
    replay("json", bodies::json::run);
}

#[test]
fn request() {
    replay("request", bodies::request::run);
}
