//! One execution that has begun: its claim, and its place in the counts, ended together.

use http::HeaderMap;

use crate::{
    disposition::Execution,
    engine::{OwnedClaim, Settlement, Settling},
    outcome::{Answered, Verdict},
    record::StoredResponse,
};

/// The claim of one execution, and its place in the counts.
pub(crate) struct Executing {
    pub(crate) claim: OwnedClaim<StoredResponse>,
    pub(crate) execution: Execution,
}

impl Executing {
    /// Ends the claim, and counts how that went.
    pub(crate) fn settle(self, settlement: Settlement<StoredResponse>) -> impl Future<Output = ()> {
        let Self { claim, execution } = self;
        settled(execution, claim.settle(settlement))
    }

    /// Ends the claim of an execution that left no answer.
    pub(crate) fn fail(self) -> impl Future<Output = ()> {
        let Self { claim, execution } = self;
        settled(execution, claim.fail())
    }

    /// Ends the claim of an execution that ended with the inner service's error.
    pub(crate) fn fail_with_error(self) -> impl Future<Output = ()> {
        let Self { claim, execution } = self;
        settled(execution, claim.fail_with_error())
    }

    /// What the answer means, now that all of it is there.
    pub(crate) fn verdict(&self, answered: &Answered, trailers: Option<&HeaderMap>) -> Verdict {
        let effects = self.claim.progress().effects_begun();
        answered.verdict(trailers, self.claim.rules().on_failure, effects)
    }
}

#[allow(clippy::manual_async_fn, reason = "an async function's future holds its arguments twice")]
fn settled(
    execution: Execution,
    mut settling: Settling<StoredResponse>,
) -> impl Future<Output = ()> {
    async move { execution.settled(&settling.finish().await) }
}
