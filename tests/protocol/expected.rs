//! What is expected: for each situation, under which rules each promise holds. The README's table
//! is this one, in words.

use tower_idempotency::{OnFailure, OnLeave};

use crate::model::{Abandoned, Promise, Rules, Situation};

/// A rule, or two that go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    FailureHolds,
    FailureRecords,
    FailureReleasesUnlessEffects,
    LeaveFinishes,
    EffectsAreSaid,
    AbandonedRunsAgain,
    AbandonedIsHeld,
}

use Rule::{
    AbandonedIsHeld, AbandonedRunsAgain, EffectsAreSaid, FailureHolds, FailureRecords,
    FailureReleasesUnlessEffects, LeaveFinishes,
};

impl Rule {
    fn is_in(self, rules: Rules) -> bool {
        let Rules { on_failure, on_leave, says_effects_begin, abandoned } = rules;
        match self {
            FailureHolds => on_failure == OnFailure::Hold,
            FailureRecords => on_failure == OnFailure::Record,
            FailureReleasesUnlessEffects => on_failure == OnFailure::Release && !says_effects_begin,
            LeaveFinishes => on_leave == OnLeave::Finish,
            EffectsAreSaid => says_effects_begin,
            AbandonedRunsAgain => abandoned == Abandoned::RunsAgain,
            AbandonedIsHeld => abandoned == Abandoned::Held,
        }
    }

    fn words(self) -> &'static str {
        match self {
            FailureHolds => "`OnFailure::Hold`",
            FailureRecords => "`OnFailure::Record`",
            FailureReleasesUnlessEffects => "`OnFailure::Release` without `effects_begin()`",
            LeaveFinishes => "`OnLeave::Finish`",
            EffectsAreSaid => "`effects_begin()`",
            AbandonedRunsAgain => "abandoned claims run again",
            AbandonedIsHeld => "abandoned claims are held",
        }
    }
}

/// With which rules: one at least of each of these lists.
#[derive(Debug, Clone, Copy)]
pub enum When {
    Always,
    Never,
    With(&'static [&'static [Rule]]),
}

impl When {
    fn holds(self, rules: Rules) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::With(lists) => lists.iter().all(|list| list.iter().any(|rule| rule.is_in(rules))),
        }
    }

    pub fn words(self) -> String {
        let lists = match self {
            Self::Always => return "always".to_owned(),
            Self::Never => return "never".to_owned(),
            Self::With(lists) => lists,
        };
        let one_of = |list: &&[Rule]| {
            let words: Vec<_> = list.iter().map(|rule| rule.words()).collect();
            match words.split_last() {
                Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
                _ => words.concat(),
            }
        };
        lists.iter().map(one_of).collect::<Vec<_>>().join("; and ")
    }
}

impl Situation {
    pub fn words(self) -> &'static str {
        match self {
            Self::Calm => "nothing goes wrong",
            Self::Fails => "the work fails, before its effect or after it, or is cut off",
            Self::Leaves => "a caller leaves midway",
            Self::ProcessDies => "the process dies, and the in-memory store with it",
            Self::SharedDies => "shared store: a process dies",
            Self::SharedLate => {
                "shared store: an owner is slower than its lease; messages are late or lost"
            }
            Self::SharedAll => "shared store: all of this",
        }
    }
}

/// In the order of [`Promise::DEPENDING`].
pub const TABLE: [(Situation, [When; 4]); 7] = {
    use When::{Always, Never, With};
    const SAFE: &[Rule] = &[FailureHolds, FailureRecords, EffectsAreSaid];
    [
        (Situation::Calm, [Always, Always, Always, Always]),
        (
            Situation::Fails,
            [With(&[SAFE]), Always, Always, With(&[&[FailureReleasesUnlessEffects]])],
        ),
        (
            Situation::Leaves,
            [
                With(&[&[LeaveFinishes, FailureHolds, FailureRecords, EffectsAreSaid]]),
                Always,
                Always,
                With(&[&[LeaveFinishes, FailureReleasesUnlessEffects]]),
            ],
        ),
        (Situation::ProcessDies, [Never, Always, Never, Always]),
        (
            Situation::SharedDies,
            [With(&[&[AbandonedIsHeld]]), Always, Always, With(&[&[AbandonedRunsAgain]])],
        ),
        (
            Situation::SharedLate,
            [
                With(&[&[AbandonedIsHeld]]),
                With(&[&[AbandonedIsHeld]]),
                With(&[&[AbandonedIsHeld]]),
                With(&[&[AbandonedRunsAgain]]),
            ],
        ),
        (
            Situation::SharedAll,
            [
                With(&[&[AbandonedIsHeld], SAFE]),
                With(&[&[AbandonedIsHeld]]),
                With(&[&[AbandonedIsHeld]]),
                With(&[&[AbandonedRunsAgain], &[FailureReleasesUnlessEffects]]),
            ],
        ),
    ]
};

/// Does `promise` hold there, by the table?
pub fn keeps(situation: Situation, rules: Rules, promise: Promise) -> bool {
    let Some(column) = Promise::DEPENDING.iter().position(|depending| *depending == promise) else {
        return true;
    };
    let row = TABLE.iter().find(|(of, _)| *of == situation).expect("a row for each situation");
    row.1[column].holds(rules)
}
