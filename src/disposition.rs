//! What the layer did with a request: the closed list, counted. Every request ends in one of them, but
//! for those that come by a copy of the layer twice (counted once), whose caller left before the
//! inner service was called, or whose inner service was not ready and failed.

use std::{fmt, sync::Arc};

use crate::{
    store::{Ownership, StoreError},
    sync::atomic::{AtomicU64, Ordering},
};

macro_rules! dispositions {
    ($($(#[$doc:meta])+ $variant:ident = $name:literal,)+) => {
        /// What the layer did with one request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Disposition {
            $($(#[$doc])+ $variant,)+
        }

        impl Disposition {
            /// All of them, in the order of a request's journey.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The name to count and log it by, such as `in_progress`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

dispositions! {
    /// Went through unprotected: it is not guarded, it has no key, or the layer is switched off.
    Passed = "passed",
    /// 400: the key is malformed, or one is required and missing.
    RejectedKey = "rejected_key",
    /// 403: there is no scope.
    RejectedScope = "rejected_scope",
    /// 413: the request's body is over the limit.
    TooLarge = "too_large",
    /// 400 or 408: the request's body broke or was too slow.
    Unreadable = "unreadable",
    /// 429: the guard has no room for new work.
    Ceiling = "ceiling",
    /// 503: the store failed before the inner service was called.
    StoreUnavailable = "store_unavailable",
    /// 503: there is no room for another live entry.
    Capacity = "capacity",
    /// 409: the key was used for another request.
    Conflict = "conflict",
    /// 409: the first execution is still running.
    InProgress = "in_progress",
    /// 409: done, but the response was not kept.
    NotReplayable = "not_replayable",
    /// 409: the outcome of the first execution is unknown.
    OutcomeUnknown = "outcome_unknown",
    /// Answered from a record that was there.
    Replayed = "replayed",
    /// Waited for the first execution and was answered from its record.
    Waited = "waited",
    /// The inner service was called, and its claim ended as it should: recorded, released or held.
    Executed = "executed",
    /// The inner service was called, but its claim had been lost when it ended: another execution's
    /// record stands.
    NotRecorded = "not_recorded",
    /// The inner service was called, but the store did not confirm the end of its claim.
    CompletionUnconfirmed = "completion_unconfirmed",
}

impl fmt::Display for Disposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How often each disposition was reached. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct Dispositions(Arc<[AtomicU64; Disposition::ALL.len()]>);

impl Dispositions {
    /// How often `disposition` was reached so far.
    #[must_use]
    pub fn get(&self, disposition: Disposition) -> u64 {
        self.0[disposition as usize].load(Ordering::Relaxed)
    }

    /// All counts, those that are zero too.
    pub fn iter(&self) -> impl Iterator<Item = (Disposition, u64)> + '_ {
        Disposition::ALL.iter().map(|disposition| (*disposition, self.get(*disposition)))
    }

    pub(crate) fn count(&self, disposition: Disposition) {
        self.0[disposition as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// An execution, to be counted when it ends, whatever ends it.
    pub(crate) fn execution(&self) -> Execution {
        Execution { dispositions: self.clone(), disposition: Disposition::Executed }
    }
}

/// One execution, counted when dropped.
#[derive(Debug)]
pub(crate) struct Execution {
    dispositions: Dispositions,
    disposition: Disposition,
}

impl Execution {
    /// Counts it by how its settlement ended.
    pub(crate) fn settled(mut self, settlement: &Result<Ownership, StoreError>) {
        self.disposition = match settlement {
            Ok(Ownership::Held) => Disposition::Executed,
            Ok(Ownership::Lost) => Disposition::NotRecorded,
            Err(_) => Disposition::CompletionUnconfirmed,
        };
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        self.dispositions.count(self.disposition);
    }
}
