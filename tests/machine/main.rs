//! Random things are done to the store and to the whole layer, each beside a model in the plainest
//! words; after every step both have said the same and counted the same. More of it:
//! `PROPTEST_CASES=10000 cargo test --test machine`. What is found is noted in `*.regressions` beside
//! the source, to be committed: it is tried again first.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod layer;
mod store;

use proptest::{prelude::ProptestConfig, test_runner::FileFailurePersistence};
use tokio::runtime::{Builder, Runtime};

/// So many runs of each machine unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 512;

fn config() -> ProptestConfig {
    let config = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { config.cases } else { CASES };
    let mut config = ProptestConfig { cases, ..config };
    if config.failure_persistence.is_some() {
        let noted = FileFailurePersistence::WithSource("regressions");
        config.failure_persistence = Some(Box::new(noted));
    }
    config
}

/// Where a machine runs: on a clock that goes when it is told to.
fn paused_clock() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}
