//! What the tests share: an example started as a process ([`server`]), a strict HTTP/1.1 client
//! ([`http1`]), one HTTP/2 connection ([`http2`]), the same request over either ([`versions`]), and
//! polls with a deadline.

pub(crate) mod http1;
pub(crate) mod http2;
pub(crate) mod server;
pub(crate) mod versions;

use std::{future::Future, time::Duration};

use tokio::time::Instant;

pub(crate) use http1::{Answer, Connection, Post, get};
pub(crate) use server::Server;
pub(crate) use versions::{VERSIONS, Version};

/// Longer than anything takes that works.
pub(crate) const GENEROUS: Duration = Duration::from_secs(60);

/// Fails the test if `future` hangs.
#[track_caller]
pub(crate) fn within<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let caller = std::panic::Location::caller();
    async move {
        let output = tokio::time::timeout(GENEROUS, future).await;
        output.unwrap_or_else(|_elapsed| panic!("it hangs, at {caller}"))
    }
}

/// Asks until there is an answer, and fails the test if none comes.
#[track_caller]
pub(crate) fn eventually<T, F>(mut ask: impl FnMut() -> F) -> impl Future<Output = T>
where
    F: Future<Output = Option<T>>,
{
    let caller = std::panic::Location::caller();
    async move {
        let deadline = Instant::now() + GENEROUS;
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            assert!(Instant::now() < deadline, "it never happens, at {caller}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
