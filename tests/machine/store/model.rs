//! The store, told in the plainest words.

use std::collections::BTreeMap;

use super::words::{Deed, Rules, Said};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Was {
    InFlight,
    Held,
    Recorded { bytes: usize, place: usize },
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The number of its claim.
    pub(super) claim: usize,
    /// No other entry has the same.
    pub(super) life: usize,
    pub(super) asked: u8,
    pub(super) scope: Option<u8>,
    pub(super) was: Was,
    pub(super) deadline: Option<u64>,
}

/// A claim that was given out, and may be long over.
#[derive(Debug, Clone)]
pub(super) struct Given {
    pub(super) id: usize,
    pub(super) asked: u8,
    pub(super) scope: Option<u8>,
    /// It has not been consumed.
    pub(super) is_there: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) rules: Rules,
    /// In seconds.
    pub(super) now: u64,
    pub(super) entries: BTreeMap<usize, Entry>,
    pub(super) given: Vec<Given>,
    pub(super) places: usize,
    pub(super) lives: usize,
    pub(super) said: Said,
}

impl Model {
    pub(super) fn pass(&mut self) {
        let now = self.now;
        self.entries.retain(|_, entry| entry.deadline.is_none_or(|deadline| deadline > now));
    }

    pub(super) fn bytes(&self) -> usize {
        let bytes = self.entries.values().map(|entry| match entry.was {
            Was::Recorded { bytes, .. } => bytes,
            _ => 0,
        });
        bytes.sum()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.entries.values().filter(|entry| entry.was == Was::InFlight).count()
    }

    pub(super) fn of_scope(&self, scope: u8) -> usize {
        self.entries.values().filter(|entry| entry.scope == Some(scope)).count()
    }

    pub(super) fn share_is_full(&self, scope: Option<u8>) -> bool {
        scope.zip(self.rules.share).is_some_and(|(scope, share)| self.of_scope(scope) >= share)
    }

    pub(super) fn has_room(&self) -> bool {
        self.entries.len() < self.rules.capacity && self.bytes() < self.rules.bytes
    }

    /// Makes room for `scope`, if it may.
    pub(super) fn make_room(&mut self, scope: Option<u8>) -> bool {
        if self.share_is_full(scope) {
            return false;
        }
        while !self.has_room() {
            let oldest = self
                .entries
                .iter()
                .filter_map(|(id, entry)| match entry.was {
                    Was::Recorded { place, .. } => Some((place, *id)),
                    _ => None,
                })
                .min();
            match oldest {
                Some((_, oldest)) if self.rules.evicts => self.entries.remove(&oldest),
                _ => return false,
            };
        }
        true
    }

    /// When a claim of `scope` would be let in, if nothing else happens.
    pub(super) fn room_at(&self, scope: Option<u8>) -> Option<u64> {
        let mut deadlines: Vec<_> =
            self.entries.values().filter_map(|entry| entry.deadline).collect();
        deadlines.sort_unstable();
        deadlines.into_iter().find(|at| {
            let mut then = self.clone();
            then.entries.retain(|_, entry| entry.deadline.is_none_or(|deadline| deadline > *at));
            then.make_room(scope)
        })
    }

    pub(super) fn picked(&self, pick: usize) -> Option<usize> {
        self.given.len().checked_sub(pick + 1)
    }

    pub(super) fn claim(&mut self, claim: usize, id: usize, asked: u8, scope: Option<u8>) -> Said {
        if let Some(entry) = self.entries.get(&id) {
            return match entry.was {
                Was::InFlight if entry.claim == claim => Said::Mine,
                _ if entry.asked != asked => Said::Conflict,
                Was::InFlight => Said::InFlight,
                Was::Held => Said::Held,
                Was::Recorded { .. } => Said::Recorded { by: entry.claim },
            };
        }
        let before = self.clone();
        if !self.make_room(scope) {
            let room_at = before.room_at(scope);
            *self = before;
            return Said::Full { room_in: room_at.map(|at| at - self.now) };
        }
        self.lives += 1;
        let (life, was) = (self.lives, Was::InFlight);
        self.entries.insert(id, Entry { claim, life, asked, scope, was, deadline: None });
        Said::Mine
    }

    /// Is that claim in flight?
    pub(super) fn runs(&self, claim: usize) -> bool {
        let entry = self.entries.get(&self.given[claim].id);
        entry.is_some_and(|entry| entry.claim == claim && entry.was == Was::InFlight)
    }

    /// Has that claim left a record or a held entry?
    pub(super) fn is_left(&self, claim: usize) -> bool {
        let entry = self.entries.get(&self.given[claim].id);
        entry.is_some_and(|entry| entry.claim == claim && entry.was != Was::InFlight)
    }

    /// Ends that claim, if it is still in flight, and leaves this, or nothing.
    pub(super) fn settle(&mut self, claim: usize, left: Option<(Was, u64)>) -> Said {
        if !std::mem::take(&mut self.given[claim].is_there) {
            return Said::Nothing;
        }
        let runs = self.runs(claim);
        if runs {
            self.leave(claim, left);
        }
        Said::Owned(runs)
    }

    pub(super) fn leave(&mut self, claim: usize, left: Option<(Was, u64)>) {
        let id = self.given[claim].id;
        if let Some((was, seconds)) = left {
            let entry = self.entries.get_mut(&id).unwrap();
            entry.was = was;
            entry.deadline = Some(self.now + seconds);
        } else {
            self.entries.remove(&id);
        }
    }

    pub(super) fn deed(&mut self, deed: &Deed) -> Said {
        match *deed {
            Deed::Claim { id, asked, scope } => {
                let said = self.claim(self.given.len(), id, asked, scope);
                if said == Said::Mine {
                    self.given.push(Given { id, asked, scope, is_there: true });
                }
                said
            }
            Deed::Lookup { id } => {
                Said::Found { asked: self.entries.get(&id).map(|entry| entry.asked) }
            }
            Deed::Remove { id } => {
                let was = self.entries.get(&id).map(|entry| entry.was);
                let is_left = was.is_some_and(|was| was != Was::InFlight);
                if is_left {
                    self.entries.remove(&id);
                }
                Said::Ended(is_left)
            }
            Deed::Clear => {
                self.entries.retain(|_, entry| entry.was == Was::InFlight);
                Said::Nothing
            }
            Deed::Pass { seconds } => {
                self.now += seconds;
                Said::Nothing
            }
            Deed::ClaimAgain { pick }
            | Deed::Complete { pick, .. }
            | Deed::Hold { pick, .. }
            | Deed::Release { pick }
            | Deed::Drop { pick }
            | Deed::Withdraw { pick }
            | Deed::Expire { pick }
            | Deed::Retain { pick, .. } => match self.picked(pick) {
                Some(claim) => self.deed_with(claim, deed),
                None => Said::Nothing,
            },
        }
    }

    pub(super) fn deed_with(&mut self, claim: usize, deed: &Deed) -> Said {
        match *deed {
            Deed::ClaimAgain { .. } => {
                let Given { id, asked, scope, .. } = self.given[claim];
                let said = self.claim(claim, id, asked, scope);
                self.given[claim].is_there |= said == Said::Mine;
                said
            }
            Deed::Complete { bytes, seconds, .. } => {
                self.places += 1;
                let was = Was::Recorded { bytes, place: self.places };
                self.settle(claim, Some((was, seconds)))
            }
            Deed::Hold { seconds, .. } => self.settle(claim, Some((Was::Held, seconds))),
            Deed::Release { .. } => self.settle(claim, None),
            Deed::Drop { .. } => {
                self.settle(claim, None);
                Said::Nothing
            }
            Deed::Withdraw { .. } => {
                let runs = self.runs(claim);
                if runs {
                    self.leave(claim, None);
                }
                Said::Owned(runs)
            }
            Deed::Expire { .. } | Deed::Retain { .. } => {
                let is_left = self.is_left(claim);
                let id = self.given[claim].id;
                match *deed {
                    Deed::Retain { seconds, .. } if is_left => {
                        let entry = self.entries.get_mut(&id).unwrap();
                        entry.deadline = Some(self.now + seconds);
                    }
                    Deed::Expire { .. } if is_left => drop(self.entries.remove(&id)),
                    _ => {}
                }
                Said::Owned(is_left)
            }
            _ => Said::Nothing,
        }
    }
}
