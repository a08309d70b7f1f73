//! Which rule keeps which promise: the protocol of claims as a model, searched to its end for every
//! rule in every situation, and compared with the README's table.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(unreachable_pub, reason = "shared by the modules of this test")]

mod expected;
mod model;

use std::collections::BTreeSet;

use expected::{TABLE, When, keeps};
use model::{Abandoned, Fault, Promise, Protocol, Rules, Situation};
use stateright::{Checker, Model};
use tower_idempotency::{OnFailure, OnLeave};

const README: &str = include_str!("../../README.md");

/// The promises that `protocol` breaks in some run, each looked for through all of them.
fn broken_by(protocol: Protocol) -> BTreeSet<Promise> {
    let checker = protocol.checker().symmetry().spawn_dfs().join();
    checker.discoveries().into_keys().map(Promise::named).collect()
}

/// A shortest run that breaks `promise`, to be read.
fn run_that_breaks(protocol: Protocol, promise: Promise) -> String {
    let checker = protocol.checker().spawn_bfs().join();
    let steps = checker.discovery(promise.words()).map(stateright::Path::into_actions);
    let steps = steps.unwrap_or_default();
    steps.iter().map(|step| format!("    {step:?}")).collect::<Vec<_>>().join("\n")
}

/// Asserts that the promises are kept and broken in `situation` exactly as the table says.
fn assert_as_expected(situation: Situation) {
    let mut known = Vec::new();
    for rules in Rules::all() {
        // Rules that are never asked for in this situation make no other model.
        let asked = rules.asked_for_in(situation);
        let found = known.iter().find(|(of, _)| *of == asked).map(|(_, broken)| broken);
        let broken: BTreeSet<Promise> = found.cloned().unwrap_or_else(|| {
            let broken = broken_by(Protocol { rules: asked, situation, fault: None });
            known.push((asked, broken.clone()));
            broken
        });
        for promise in Promise::DEPENDING.into_iter().chain(Promise::ALWAYS) {
            let is_kept = !broken.contains(&promise);
            if is_kept == keeps(situation, rules, promise) {
                continue;
            }
            let promised = promise.words();
            assert!(!is_kept, "{situation:?} {rules:?}: not expected to hold: {promised}");
            let run = run_that_breaks(Protocol { rules: asked, situation, fault: None }, promise);
            panic!("{situation:?} {rules:?}: {promised}: it does not, by\n{run}");
        }
    }
}

#[test]
fn when_nothing_goes_wrong_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::Calm);
}

#[test]
fn when_work_fails_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::Fails);
}

#[test]
fn when_callers_leave_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::Leaves);
}

#[test]
fn when_the_process_dies_with_its_store_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::ProcessDies);
}

#[test]
fn when_processes_die_beside_a_shared_store_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::SharedDies);
}

#[test]
fn when_leases_end_and_messages_are_late_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::SharedLate);
}

#[test]
fn when_all_of_it_happens_promises_hold_as_the_table_says() {
    assert_as_expected(Situation::SharedAll);
}

/// Each fault, where it shows, and the promise that it breaks there and that holds without it.
const FAULTS: [(Fault, Situation, Rules, Promise); 15] = {
    use Promise as P;
    use Situation as S;
    const DEFAULT: Rules = Rules {
        on_failure: OnFailure::Release,
        on_leave: OnLeave::Finish,
        says_effects_begin: false,
        abandoned: Abandoned::RunsAgain,
    };
    const HELD: Rules = Rules { abandoned: Abandoned::Held, ..DEFAULT };
    const EFFECTS: Rules = Rules { says_effects_begin: true, ..DEFAULT };
    const HOLD: Rules = Rules { on_failure: OnFailure::Hold, ..DEFAULT };
    const CANCEL: Rules = Rules { on_leave: OnLeave::Cancel, ..DEFAULT };
    [
        (Fault::CompletionIsNotFenced, S::SharedLate, DEFAULT, P::RecordStays),
        (Fault::CompletionIsNotFenced, S::SharedLate, HELD, P::OwnerOnly),
        (Fault::ReleaseIsNotFenced, S::SharedLate, DEFAULT, P::OwnerOnly),
        (Fault::ReleaseIsNotFenced, S::SharedLate, DEFAULT, P::RecordStays),
        (Fault::WithdrawalIsNotFenced, S::SharedLate, HELD, P::OneAtATime),
        (Fault::LoserCleansUp, S::Calm, DEFAULT, P::OneAtATime),
        (Fault::WaiterJustRuns, S::Calm, DEFAULT, P::OneEffect),
        (Fault::ConflictEndsTheClaim, S::Calm, DEFAULT, P::OneEffect),
        (Fault::ClaimTakesTwoSteps, S::SharedDies, HELD, P::OneAtATime),
        (Fault::PlaceholderIsReplayed, S::Calm, DEFAULT, P::ReplayIsRecord),
        (Fault::HeldCanBeClaimed, S::Fails, HOLD, P::OneEffect),
        (Fault::EffectsAreForgotten, S::Fails, EFFECTS, P::OneEffect),
        (Fault::AbandonedAlwaysRunsAgain, S::SharedDies, HELD, P::OneEffect),
        (Fault::ClaimHasNoLease, S::SharedDies, DEFAULT, P::NeverStuck),
        (Fault::CancelLeavesTheClaim, S::Leaves, CANCEL, P::NeverStuck),
    ]
};

#[test]
fn every_protocol_that_is_wrong_in_one_point_is_found() {
    for (fault, situation, rules, promise) in FAULTS {
        let broken = broken_by(Protocol { rules, situation, fault: Some(fault) });
        assert!(broken.contains(&promise), "{fault:?} goes unnoticed: {}", promise.words());
        assert!(keeps(situation, rules, promise), "{fault:?} shows nothing: it breaks anyhow");
    }
}

/// The cells of each row of the README's table that has `first` as the heading of its first column.
fn rows_of_the_readme(first: &str) -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| -> Option<Vec<_>> {
        Some(line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect())
    };
    let table = README.lines().skip_while(|line| !line.starts_with(&format!("| {first} |")));
    let lines: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
    assert!(lines.len() > 2, "there is a table {first}");
    [lines[0]].into_iter().chain(lines[2..].iter().copied()).filter_map(cells).collect()
}

#[test]
fn the_readmes_table_says_what_the_model_proves() {
    let mut right = vec![
        [vec!["what may happen".to_owned()], Promise::DEPENDING.map(|p| p.words().into()).to_vec()]
            .concat(),
    ];
    for (situation, when) in TABLE {
        let cells = when.map(When::words).to_vec();
        right.push([vec![situation.words().to_owned()], cells].concat());
    }
    assert_eq!(rows_of_the_readme("what may happen"), right);
}

#[test]
fn what_the_readme_says_to_hold_always_is_what_the_model_proves_to() {
    let (_, after) = README.split_once("Under every rule, whatever happens:\n\n").expect("a list");
    let (items, _) = after.split_once("\n\n").unwrap();
    let said: Vec<_> = items.lines().map(|line| line.trim_start_matches("- ")).collect();
    let mut right = Promise::ALWAYS.map(|promise| format!("{};", promise.words())).to_vec();
    let last = right.last_mut().unwrap();
    *last = last.replace(';', ".");
    assert_eq!(said, right);
}
