//! One execution that has begun: its claim, and its place in the counts, ended together.

use http::HeaderMap;

use crate::{
    disposition::Execution,
    engine::{OwnedClaim, Settlement},
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
    pub(crate) async fn settle(self, settlement: Settlement<StoredResponse>) {
        let Self { claim, execution } = self;
        execution.settled(&claim.settle(settlement).await);
    }

    /// Ends the claim of an execution that left no answer.
    pub(crate) async fn fail(self) {
        let Self { claim, execution } = self;
        execution.settled(&claim.fail().await);
    }

    /// Ends the claim of an execution that ended with the inner service's error.
    pub(crate) async fn fail_with_error(self) {
        let Self { claim, execution } = self;
        execution.settled(&claim.fail_with_error().await);
    }

    /// What the answer means, now that all of it is there.
    pub(crate) fn verdict(&self, answered: &Answered, trailers: Option<&HeaderMap>) -> Verdict {
        let effects = self.claim.progress().effects_begun();
        answered.verdict(trailers, self.claim.rules().on_failure, effects)
    }
}
