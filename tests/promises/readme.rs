//! The README's tables of settings are complete and true: every setter is in them, nothing else is,
//! and each default is the one that there really is.

use std::time::Duration;

use tower_idempotency::{Engine, IdempotencyLayer, MemoryStore, StoredResponse, scope};

const README: &str = include_str!("../../README.md");

/// The part under a heading.
fn section(heading: &str) -> &'static str {
    let (_, after) = README.split_once(&format!("\n## {heading}\n")).expect("the section is there");
    after.split_once("\n## ").map_or(after, |(section, _)| section)
}

/// What stands between the backticks in `text`.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The rows of the table whose first column has this heading: the names of settings, and their
/// default.
fn table(heading: &str) -> Vec<(Vec<&'static str>, &'static str)> {
    let mut lines = section("Settings").lines().skip_while(|line| {
        !line.strip_prefix("| ").is_some_and(|line| line.starts_with(&format!("{heading} |")))
    });
    assert!(lines.next().is_some(), "there is a table {heading}");
    lines
        .skip(1)
        .take_while(|line| line.starts_with("| "))
        .map(|line| {
            let cells: Vec<_> = line.split(" | ").collect();
            let [names, default, _] = cells[..] else { panic!("three columns: {line}") };
            (quoted(names), default)
        })
        .collect()
}

/// The public methods in `source` that take `self`, whole, and return it.
fn setters(source: &'static str) -> Vec<&'static str> {
    let is_setter = |head: &str| {
        let (arguments, returns) = head.split_once("->").unwrap_or((head, ""));
        let takes_self = arguments.split_once('(').is_some_and(|(_, first)| {
            first.trim_start().trim_start_matches("mut ").starts_with("self")
        });
        takes_self && returns.trim_start().starts_with("Self")
    };
    source
        .split("\n    pub fn ")
        .skip(1)
        .filter(|method| is_setter(method.split_once('{').unwrap().0))
        .map(|method| method.split(['(', '<']).next().unwrap())
        .collect()
}

/// A default in the README's words, as it is shown where it is real.
fn shown(default: &str) -> Vec<String> {
    let number = |text: &str| text.replace(',', "").parse::<u64>().ok();
    let text = default.trim_matches('`');
    let by = text.strip_prefix("wait up to ").unwrap_or(text);
    let shown =
        match by.split_once(' ').map_or((number(by), ""), |(first, unit)| (number(first), unit)) {
            (Some(count), "") => count.to_string(),
            (Some(count), "MiB") => (count * 1024 * 1024).to_string(),
            (Some(count), "s") => format!("{:?}", Duration::from_secs(count)),
            (Some(count), "minutes") => format!("{:?}", Duration::from_secs(count * 60)),
            (Some(count), "hour") => format!("{:?}", Duration::from_secs(count * 3_600)),
            _ => match text {
                "none" => return vec!["None".to_owned(), "[]".to_owned()],
                "no" => "false".to_owned(),
                "yes" => "true".to_owned(),
                "POST, PATCH" => "[POST, PATCH]".to_owned(),
                "enforce" | "release" | "finish" => text[..1].to_uppercase() + &text[1..],
                _ if default.starts_with('`') => format!("{text:?}"),
                _ => panic!("what is {default:?}?"),
            },
        };
    vec![if by == text { shown } else { format!("Wait({shown})") }]
}

/// Asserts that `name` is shown in `all` with `default`.
#[track_caller]
fn assert_default(all: &str, name: &str, default: &str) {
    let is_shown = shown(default).iter().any(|value| {
        [", ", "{ "].iter().any(|before| {
            [", ", " }"]
                .iter()
                .any(|after| all.contains(&format!("{before}{name}: {value}{after}")))
        })
    });
    assert!(is_shown, "{name} is not {default}: {all}");
}

/// Asserts that each of `setters` is among `named`, and nothing else is.
#[track_caller]
fn assert_complete(mut setters: Vec<&str>, mut named: Vec<&str>) {
    setters.sort_unstable();
    named.sort_unstable();
    assert_eq!(setters, named);
}

#[test]
fn every_setting_of_the_layer_is_in_the_table_with_its_real_default() {
    let all = format!("{:?}", IdempotencyLayer::new(scope::single_tenant()));
    let rows = table("setting");
    let mut named = Vec::new();
    for (names, default) in &rows {
        match (&names[..], *default) {
            (["IdempotencyLayer::new(scope)"], "required") => continue,
            // What they default to is in a table of its own, or nothing.
            (["store"], "a `MemoryStore`") | (["ietf", "stripe"], "not set") => {}
            (["ceiling", "guard"], default) => assert_default(&all, "guard", default),
            (["fingerprint_json_only", "fingerprint_json_except"], default) => {
                assert_default(&all, "fingerprint_json", default);
            }
            (["waiters"], default) => {
                let (per_operation, in_all) = default.split_once(" and ").unwrap();
                assert_default(&all, "waiters_per_operation", per_operation);
                assert_default(&all, "waiters", in_all);
            }
            ([name], default) => assert_default(&all, name, default),
            (names, _) => panic!("one setting a row: {names:?}"),
        }
        named.extend(names);
    }
    let sources = concat!(
        include_str!("../../src/layer.rs"),
        include_str!("../../src/layer/request.rs"),
        include_str!("../../src/layer/response.rs"),
        include_str!("../../src/layer/execution.rs"),
        include_str!("../../src/layer/presets.rs"),
    );
    assert_complete(setters(sources), named);
}

#[test]
fn every_setting_of_the_memory_store_is_in_the_table_with_its_real_default() {
    let all = format!("{:?}", MemoryStore::<StoredResponse>::new());
    let rows = table("`MemoryStore`");
    for (names, default) in &rows {
        let [name] = names[..] else { panic!("one setting a row: {names:?}") };
        assert_default(&all, name, default);
    }
    let named = rows.iter().flat_map(|(names, _)| names).copied().collect();
    assert_complete(setters(include_str!("../../src/store/memory/mod.rs")), named);
}

#[test]
fn every_setting_of_the_engine_is_named_and_has_the_default_of_the_layers() {
    let settings = section("Settings");
    let (_, sentence) = settings.split_once("`Engine` has ").expect("there is a sentence");
    let (named, _) = sentence.split_once("of these").unwrap();
    let named = quoted(named);
    assert_complete(
        setters(include_str!("../../src/engine/run.rs"))
            .into_iter()
            // An operation's, not the engine's.
            .filter(|setter| *setter != "asking_for")
            .collect(),
        named.clone(),
    );
    let all = format!("{:?}", Engine::<()>::new(MemoryStore::new()));
    for (names, default) in table("setting") {
        match &names[..] {
            ["waiters"] => {
                let (per_operation, in_all) = default.split_once(" and ").unwrap();
                assert_default(&all, "waiters_per_operation", per_operation);
                assert_default(&all, "waiters", in_all);
            }
            [name] if named.contains(name) => assert_default(&all, name, default),
            _ => {}
        }
    }
}

#[test]
fn what_the_readme_says_of_memory_is_what_is_set() {
    let text = section("Operations");
    let (_, memory) = text.split_once("**Memory.** ").unwrap();
    let (memory, _) = memory.split_once("\n\n").unwrap();
    let all = format!(
        "{:?} {:?}",
        MemoryStore::<StoredResponse>::new(),
        IdempotencyLayer::new(scope::single_tenant())
    );
    for (name, default) in [("stored_bytes", 256), ("response_limit", 1), ("buffered_bytes", 64)] {
        assert!(memory.contains(&format!("`{name}`")), "{name}");
        assert!(memory.contains(&format!("{default} MiB")), "{name}");
        assert_default(&all, name, &format!("{default} MiB"));
    }
}
