//! What the crate promises, over real sockets, one file per promise. Most of it drives
//! `examples/server.rs` as a black box, and `examples/lab.rs` (`lab_…`) for every kind of answer,
//! failure and setting; what neither does is asked of a hyper server in here (`wire`), and the hyper
//! example is driven too.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod support;

mod callers;
mod capacity;
mod ceiling;
mod disconnects;
mod hostile;
mod http2;
mod hyper_example;
mod keys;
mod lab_budgets;
mod lab_failures;
mod lab_fidelity;
mod lab_leaving;
mod lab_modes;
mod lab_presets;
mod lab_records;
mod lab_settings;
mod lab_streams;
mod lab_trailers;
mod lab_uploads;
mod lab_waiting;
mod looking_in;
mod races;
mod retention;
mod retries;
mod settings;
mod shutdown;
mod uploads;
mod wire;
