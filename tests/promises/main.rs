//! What the crate promises, one file per promise. Everything runs in process; what needs a socket
//! is in `tests/sockets`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(
    clippy::err_expect,
    clippy::items_after_statements,
    clippy::large_futures,
    clippy::no_effect_underscore_binding,
    clippy::result_large_err,
    clippy::similar_names,
    clippy::single_match_else,
    clippy::too_many_lines,
    clippy::type_complexity,
    clippy::unchecked_time_subtraction,
    clippy::unnecessary_wraps,
    clippy::unused_async,
    reason = "a test may say what it does in the order in which it does it"
)]
#![allow(dead_code, reason = "helpers may be for tests that a feature turns off")]

mod support;

mod budgets;
mod buffered;
mod cancellation;
mod capacity;
mod conflict;
mod dispositions;
mod drain;
mod engine;
mod failure;
mod guard;
mod handle;
mod hooks;
mod key;
mod layering;
mod memory_store;
mod middleware;
mod mode;
mod notices;
mod presets;
mod readiness;
mod readme;
mod refusals;
mod replay;
mod request_body;
mod response_body;
mod retention;
mod scope;
mod settings;
mod single_flight;
mod store;
mod store_failure;
mod streams;
