//! What every store promises: the suite of `store::conformance` against the store that ships with
//! the crate, and against stores with one fault each, which it has to find.

use std::time::Duration;

use tower_idempotency::store::{
    MemoryStore,
    conformance::{Case, Suite},
};

use crate::support::naive_store::{Fault, NaiveStore};

fn memory() -> Suite<String> {
    Suite::new(|capacity| async move { MemoryStore::new().capacity(capacity) }, value)
}

fn naive(fault: Option<Fault>, lease: Option<Duration>) -> Suite<String> {
    Suite::new(move |capacity| async move { NaiveStore::leased(capacity, fault, lease) }, value)
        .leased(lease.unwrap_or_default())
}

fn value(number: u8) -> String {
    format!("value {number}")
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_every_promise() {
    memory().run().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_keeps_every_promise_on_a_running_clock() {
    memory().tick(Duration::from_millis(10)).run().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_works_in_steps_keeps_every_promise() {
    naive(None, None).run().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_with_leases_keeps_every_promise() {
    naive(None, Some(Duration::from_secs(1))).run().await;
}
