//! The concurrent core under shuttle: its threads are coroutines on one OS thread, and a schedule
//! says who runs after each step at a lock or an atomic. `scripts/interleavings` runs thousands of
//! schedules of each scenario, and prints the one that fails. What has no lock of shuttle's inside
//! (moka, tokio's channels) is one step.
//!
//! Built without `--cfg shuttle` this is empty.

#![cfg(all(shuttle, test))]

mod explore;
mod scene;

mod engine;
mod layer;
mod mutants;
mod store;
