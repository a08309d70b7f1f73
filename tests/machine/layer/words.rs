//! The words in which model and machine talk: what may happen, and what is heard of it.

use std::time::Duration;

use tower_idempotency::{OnFailure, OnLeave};

/// The clock goes in half seconds, and what lasts ends between two of them: so no two things end at
/// the same time by chance. Whoever does something does it at a whole second.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// How long it lasts, and by how many ticks it is over. Work is only cut off between two seconds.
pub(super) const WAIT: (Duration, u64) = (Duration::from_millis(2_750), 6);
pub(super) const RETENTION: (Duration, u64) = (Duration::from_millis(6_250), 13);
pub(super) const FINISH_WITHIN: (Duration, u64) = (Duration::from_millis(4_250), 9);

/// The largest body that is recorded.
pub(super) const LIMIT: usize = 7;

/// A piece of a body of unknown length. One is within the limit, two are not.
pub(super) const PIECE: &str = "abcd";

/// So many requests are there at once.
pub(super) const REQUESTS: usize = 8;

/// One operation.
pub(super) type Id = (u8, u8);

/// What happens next.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Send {
        scope: u8,
        key: u8,
        asks: u8,
        slowly: bool,
    },
    /// The body of a request that is slow is there.
    BodyArrives {
        request: usize,
    },
    /// The caller leaves, wherever its request is.
    Leave {
        request: usize,
    },
    Tell {
        execution: usize,
        what: Tell,
    },
    /// The same, and a caller leaves before anything comes of it.
    TellAndLeave {
        execution: usize,
        what: Tell,
        request: usize,
    },
    Pass {
        seconds: u64,
    },
}

/// What a handler, or the body of its answer, does next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Tell {
    EffectsBegin,
    Answer { status: u16, body: Shape },
    Error,
    Panic,
    // The body:
    Piece,
    End,
    Break,
    BodyPanics,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Shape {
    /// All there, of declared length.
    Whole,
    /// Of declared length, and still to come.
    Declared,
    /// Of declared length, too large to be recorded, and still to come.
    Large,
    /// Of unknown length, and still to come.
    Unknown,
}

impl Shape {
    /// Does the caller see it as it comes?
    pub(super) fn is_followed(self) -> bool {
        matches!(self, Self::Large | Self::Unknown)
    }
}

/// What is set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) capacity: usize,
    pub(super) waits: bool,
    pub(super) on_failure: OnFailure,
    pub(super) on_leave: OnLeave,
}

/// What a caller has heard.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Heard {
    /// 0 without any.
    pub(super) status: u16,
    pub(super) is_replay: bool,
    /// The body so far; the code, of a refusal.
    pub(super) text: String,
    pub(super) end: End,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) enum End {
    #[default]
    Open,
    Whole,
    Broken,
    Panicked,
}

/// The body of an execution's answer, where it is not of unknown length.
pub(super) fn whole(nth: usize, shape: Shape) -> String {
    format!("run {nth:03}{}", if shape == Shape::Large { ", and more" } else { "" })
}

/// A piece of the body.
pub(super) fn piece(answered: Option<(u16, Shape)>) -> &'static str {
    if let Some((_, Shape::Unknown)) = answered { PIECE } else { "run" }
}
