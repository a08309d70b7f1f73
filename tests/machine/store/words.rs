//! The words in which model and machine talk: what may be done, what is set, and what is answered.

/// What may be done to a store. A claim is picked by its age: the youngest is 0, for those are the
/// ones that are still running.
#[derive(Debug, Clone)]
pub(super) enum Deed {
    Claim {
        id: usize,
        asked: u8,
        scope: Option<u8>,
    },
    /// The same request once more, with the same token, whatever has become of it.
    ClaimAgain {
        pick: usize,
    },
    Complete {
        pick: usize,
        bytes: usize,
        seconds: u64,
    },
    Hold {
        pick: usize,
        seconds: u64,
    },
    Release {
        pick: usize,
    },
    Drop {
        pick: usize,
    },
    Withdraw {
        pick: usize,
    },
    Expire {
        pick: usize,
    },
    Retain {
        pick: usize,
        seconds: u64,
    },
    Lookup {
        id: usize,
    },
    Remove {
        id: usize,
    },
    Clear,
    Pass {
        seconds: u64,
    },
}

/// What is set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) capacity: usize,
    pub(super) bytes: usize,
    pub(super) share: Option<usize>,
    pub(super) evicts: bool,
}

/// What a store answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Said {
    Nothing,
    Mine,
    Conflict,
    Recorded { by: usize },
    Held,
    InFlight,
    Full { room_in: Option<u64> },
    Owned(bool),
    Ended(bool),
    Found { asked: Option<u8> },
}
