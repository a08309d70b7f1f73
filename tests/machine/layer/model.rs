//! The layer, told in the plainest words.

use std::collections::BTreeMap;

use tower_idempotency::{OnFailure, OnLeave};

use super::words::{
    End, FINISH_WITHIN, Heard, Id, LIMIT, RETENTION, Rules, Shape, Tell, WAIT, piece, whole,
};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum At {
    ReadingBody,
    Waiting { until: u64 },
    Executing(usize),
    Over,
}

#[derive(Debug, Clone)]
pub(super) struct Asking {
    pub(super) id: Id,
    pub(super) asks: u8,
    pub(super) at: At,
    pub(super) heard: Heard,
}

#[derive(Debug, Clone)]
pub(super) struct Execution {
    pub(super) id: Id,
    /// The how-manieth of its operation it is. (Those of two operations may begin in any order,
    /// where they begin at the same time.)
    pub(super) nth: usize,
    /// Whose, while its caller is there.
    pub(super) caller: Option<usize>,
    /// When it is cut off.
    pub(super) until: Option<u64>,
    pub(super) effects: bool,
    pub(super) answered: Option<(u16, Shape)>,
    pub(super) body: String,
    pub(super) is_over: bool,
}

#[derive(Debug, Clone)]
pub(super) enum Entry {
    InFlight { asks: u8 },
    Held { asks: u8, until: u64 },
    Recorded { asks: u8, until: u64, status: u16, body: Option<String> },
}

impl Entry {
    fn asks(&self) -> u8 {
        match self {
            Self::InFlight { asks } | Self::Held { asks, .. } | Self::Recorded { asks, .. } => {
                *asks
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Verdict {
    Record,
    Release,
    Hold,
}

/// The layer, told in the plainest words.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) rules: Rules,
    /// In ticks.
    pub(super) now: u64,
    pub(super) requests: Vec<Asking>,
    pub(super) executions: Vec<Execution>,
    pub(super) entries: BTreeMap<Id, Entry>,
}

impl Model {
    fn refuse(&mut self, request: usize, status: u16, code: &str) {
        let heard = Heard { status, text: code.to_owned(), end: End::Whole, ..Heard::default() };
        self.hear(request, heard);
    }

    fn hear(&mut self, request: usize, heard: Heard) {
        self.requests[request].heard = heard;
        self.requests[request].at = At::Over;
    }

    pub(super) fn claim(&mut self, request: usize) {
        let Asking { id, asks, at, .. } = self.requests[request];
        let entry = self.entries.get(&id).cloned();
        match entry {
            Some(entry) if entry.asks() != asks => {
                self.refuse(request, 409, "idempotency_conflict");
            }
            Some(Entry::InFlight { .. }) if !self.rules.waits => {
                self.refuse(request, 409, "idempotency_in_progress");
            }
            Some(Entry::InFlight { .. }) => {
                let until = match at {
                    At::Waiting { until } => until,
                    _ => self.now + WAIT.1,
                };
                self.requests[request].at = At::Waiting { until };
            }
            Some(Entry::Held { .. }) => self.refuse(request, 409, "idempotency_outcome_unknown"),
            Some(Entry::Recorded { body: None, .. }) => {
                self.refuse(request, 409, "idempotency_not_replayable");
            }
            Some(Entry::Recorded { status, body: Some(text), .. }) => {
                self.hear(request, Heard { status, is_replay: true, text, end: End::Whole });
            }
            None if self.entries.len() >= self.rules.capacity => {
                self.refuse(request, 503, "idempotency_capacity");
            }
            None => {
                self.entries.insert(id, Entry::InFlight { asks });
                self.requests[request].at = At::Executing(self.executions.len());
                let nth = self.executions.iter().filter(|other| other.id == id).count();
                self.executions.push(Execution {
                    id,
                    nth,
                    caller: Some(request),
                    until: None,
                    effects: false,
                    answered: None,
                    body: String::new(),
                    is_over: false,
                });
            }
        }
    }

    /// How an execution ends that has left no answer.
    fn failed(&self, execution: usize) -> Verdict {
        if self.rules.on_failure == OnFailure::Release && !self.executions[execution].effects {
            Verdict::Release
        } else {
            Verdict::Hold
        }
    }

    /// How an execution ends that has answered.
    fn verdict(&self, execution: usize, status: u16) -> Verdict {
        let verdict = match status {
            200..=399 | 402 => Verdict::Record,
            408 | 500.. => match self.rules.on_failure {
                OnFailure::Release => Verdict::Release,
                OnFailure::Hold => Verdict::Hold,
                _ => Verdict::Record,
            },
            _ => Verdict::Release,
        };
        match verdict {
            Verdict::Release if self.executions[execution].effects => Verdict::Hold,
            verdict => verdict,
        }
    }

    /// Ends an execution; its caller hears `heard`, and those who wait go back to the claim in the
    /// order in which they came.
    fn end(&mut self, execution: usize, verdict: Verdict, heard: Option<Heard>) {
        let Execution { id, caller, answered, body, .. } = self.executions[execution].clone();
        self.executions[execution].is_over = true;
        if let Some(caller) = caller {
            match heard {
                Some(heard) => self.hear(caller, heard),
                None => self.requests[caller].at = At::Over,
            }
        }
        let asks = self.entries[&id].asks();
        let until = self.now + RETENTION.1;
        match verdict {
            Verdict::Release => drop(self.entries.remove(&id)),
            Verdict::Hold => drop(self.entries.insert(id, Entry::Held { asks, until })),
            Verdict::Record => {
                let (status, _) = answered.unwrap();
                let body = Some(body).filter(|body| body.len() <= LIMIT);
                self.entries.insert(id, Entry::Recorded { asks, until, status, body });
            }
        }
        for request in 0..self.requests.len() {
            let Asking { id: of, at, .. } = self.requests[request];
            if of == id && matches!(at, At::Waiting { .. }) {
                self.claim(request);
            }
        }
    }

    pub(super) fn tell(&mut self, execution: usize, what: Tell) {
        let Execution { answered, nth, .. } = self.executions[execution];
        let body = &mut self.executions[execution].body;
        match what {
            Tell::EffectsBegin => self.executions[execution].effects = true,
            Tell::Answer { status, body: shape } => {
                self.executions[execution].answered = Some((status, shape));
                match shape {
                    Shape::Whole => {
                        self.executions[execution].body = whole(nth, shape);
                        self.finish(execution, End::Whole);
                    }
                    Shape::Declared => {}
                    Shape::Large | Shape::Unknown => self.show(execution),
                }
            }
            Tell::Error | Tell::Panic => {
                let end = if what == Tell::Error { End::Broken } else { End::Panicked };
                let heard = Heard { end, ..Heard::default() };
                self.end(execution, self.failed(execution), Some(heard));
            }
            Tell::Piece => {
                body.push_str(piece(answered));
                self.show(execution);
            }
            Tell::End => {
                if let Some((_, shape @ (Shape::Declared | Shape::Large))) = answered {
                    *body = whole(nth, shape);
                }
                self.finish(execution, End::Whole);
            }
            Tell::Break => self.finish(execution, End::Broken),
            Tell::BodyPanics => self.finish(execution, End::Panicked),
        }
    }

    /// The caller sees what is there of a body of unknown length.
    fn show(&mut self, execution: usize) {
        let Execution { caller, answered, body, .. } = self.executions[execution].clone();
        let answered = answered.filter(|(_, shape)| shape.is_followed());
        if let (Some(caller), Some((status, _))) = (caller, answered) {
            self.requests[caller].heard = Heard { status, text: body, ..Heard::default() };
        }
    }

    fn finish(&mut self, execution: usize, end: End) {
        let Execution { answered, body, .. } = self.executions[execution].clone();
        let (status, shape) = answered.unwrap();
        let verdict = match end {
            End::Whole => self.verdict(execution, status),
            _ => self.failed(execution),
        };
        let heard = match (end, shape) {
            // It was never answered: its body was still being collected.
            (End::Panicked, Shape::Declared) => Heard { end, ..Heard::default() },
            _ => Heard { status, text: body, end, is_replay: false },
        };
        self.end(execution, verdict, Some(heard));
    }

    pub(super) fn leave(&mut self, request: usize) {
        if let At::Executing(execution) = self.requests[request].at {
            self.executions[execution].caller = None;
            match self.rules.on_leave {
                OnLeave::Finish => {
                    self.executions[execution].until = Some(self.now + FINISH_WITHIN.1);
                }
                _ => self.end(execution, self.failed(execution), None),
            }
        }
        self.requests[request].at = At::Over;
    }

    pub(super) fn tick(&mut self) {
        self.now += 1;
        let now = self.now;
        self.entries.retain(|_, entry| match entry {
            Entry::InFlight { .. } => true,
            Entry::Held { until, .. } | Entry::Recorded { until, .. } => *until > now,
        });
        for request in 0..self.requests.len() {
            if matches!(self.requests[request].at, At::Waiting { until } if until <= now) {
                self.refuse(request, 409, "idempotency_in_progress");
            }
        }
        for execution in 0..self.executions.len() {
            let Execution { until, is_over, .. } = self.executions[execution];
            if !is_over && until.is_some_and(|until| until <= now) {
                self.end(execution, self.failed(execution), None);
            }
        }
    }

    /// Which requests are there, and which of them have a body that is still to come.
    pub(super) fn there(&self, is: impl Fn(At) -> bool) -> Vec<usize> {
        (0..self.requests.len()).filter(|request| is(self.requests[*request].at)).collect()
    }

    pub(super) fn running(&self) -> Vec<usize> {
        (0..self.executions.len()).filter(|number| !self.executions[*number].is_over).collect()
    }

    pub(super) fn may_tell(&self, execution: usize, what: Tell) -> bool {
        let Some(Execution { answered, body, is_over: false, .. }) = self.executions.get(execution)
        else {
            return false;
        };
        let is_of_the_body =
            matches!(what, Tell::Piece | Tell::End | Tell::Break | Tell::BodyPanics);
        let goes_on = match answered {
            // Half of it, once; the end brings the other half.
            Some((_, Shape::Declared | Shape::Large)) => body.is_empty(),
            _ => true,
        };
        is_of_the_body == answered.is_some() && (what != Tell::Piece || goes_on)
    }
}
