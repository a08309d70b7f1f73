//! Runs a scenario under many schedules, or under the one that is to be replayed.

use std::{
    env,
    panic::{AssertUnwindSafe, catch_unwind},
};

use shuttle::{
    Config, FailurePersistence, MaxSteps, Runner,
    scheduler::{PctScheduler, RandomScheduler},
};

/// Schedules of one scenario: so many with a random choice at each step, and so many in which a few
/// switches are made at the worst of times (PCT), which finds what takes a long run of one thread.
const RANDOM: usize = 450;
const PCT: usize = 300;
const SWITCHES: usize = 3;

/// Explores `scenario`. Fails with the schedule that made it fail.
///
/// - `INTERLEAVING=<schedule>` replays one instead;
/// - `INTERLEAVINGS_SEED=<number>` explores others than always the same;
/// - `INTERLEAVINGS_TIMES=<number>` explores so many times as many.
pub(crate) fn explore(scenario: impl Fn() + Send + Sync + Clone + 'static) {
    if let Ok(schedule) = env::var("INTERLEAVING") {
        // As it was printed, in several lines.
        let schedule: String = schedule.split_whitespace().collect();
        return shuttle::replay(scenario, &schedule);
    }
    let schedules =
        run(&scenario, number("INTERLEAVINGS_TIMES").unwrap_or(1), FailurePersistence::Print);
    println!("{schedules} schedules");
}

/// Explores `mutant` and says how it failed; fails if it never does.
pub(crate) fn must_fail(mutant: impl Fn() + Send + Sync + Clone + 'static) -> String {
    let found = catch_unwind(AssertUnwindSafe(|| run(&mutant, 4, FailurePersistence::None)));
    let Err(panic) = found else { panic!("no schedule found the fault") };
    let said = panic.downcast_ref::<String>().cloned();
    said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

fn run(
    scenario: &(impl Fn() + Send + Sync + Clone + 'static),
    times: usize,
    persistence: FailurePersistence,
) -> usize {
    let mut config = Config::new();
    config.failure_persistence = persistence;
    // Futures of the whole layer are large, and run on the stack of a coroutine.
    config.stack_size = 256 * 1024;
    config.silence_warnings = true;
    // Whoever goes round and round for something that never comes has been forgotten.
    config.max_steps = MaxSteps::FailAfter(50_000);
    let seed = number("INTERLEAVINGS_SEED").unwrap_or(0) as u64;
    let random = RandomScheduler::new_from_seed(seed, RANDOM * times);
    let pct = PctScheduler::new_from_seed(seed, SWITCHES, PCT * times);
    Runner::new(random, config.clone()).run(scenario.clone())
        + Runner::new(pct, config).run(scenario.clone())
}

fn number(name: &str) -> Option<usize> {
    let value = env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}
