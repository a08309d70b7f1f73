//! Is there room for new work? In: the head of a request that would reach the inner service; out:
//! a [`Permit`], or none (429). A request whose entry is found passes the guard by.

use std::{any::Any, fmt, sync::Arc};

use http::request::Parts;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    hook::quietly,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The right to do one piece of new work. Dropping it gives the place back.
pub struct Permit {
    _place: Place,
}

enum Place {
    Ceiling { _permit: OwnedSemaphorePermit },
    Own { _permit: Box<dyn Any + Send> },
}

impl Permit {
    /// A permit of a guard of your own: whatever gives the place back when dropped.
    #[must_use]
    pub fn new(place: impl Send + 'static) -> Self {
        Self { _place: Place::Own { _permit: Box::new(place) } }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").finish_non_exhaustive()
    }
}

/// A guard that lets so many pieces of work run at once. Clones share the count.
///
/// A place is taken until the permit is dropped. A handler that only starts the work takes the
/// permit ([`PermitSlot::take_permit`]) and moves it to where the work is done.
#[derive(Debug, Clone)]
pub struct Ceiling {
    places: Arc<Semaphore>,
    limit: usize,
}

impl Ceiling {
    /// Lets `limit` pieces of work run at once.
    ///
    /// # Panics
    ///
    /// If `limit` is zero, or so large (over `usize::MAX / 8`) that it limits nothing.
    #[must_use]
    #[track_caller]
    pub fn new(limit: usize) -> Self {
        assert!(limit > 0, "ceiling: nothing could ever run under a limit of 0");
        assert!(limit <= Semaphore::MAX_PERMITS, "ceiling: {limit} is more than can be counted");
        Self { places: Arc::new(Semaphore::new(limit)), limit }
    }

    /// A permit, if there is room.
    #[must_use]
    pub fn try_acquire(&self) -> Option<Permit> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(Permit { _place: Place::Ceiling { _permit: permit } })
    }

    /// How many pieces of work are running.
    #[must_use]
    pub fn active(&self) -> usize {
        self.limit - self.places.available_permits()
    }

    /// How many may run at once.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }
}

/// Who is asked for permits.
#[derive(Clone)]
pub(crate) enum Guard {
    Ceiling(Ceiling),
    Own(Arc<OwnGuard>),
}

/// A guard of the user's own.
pub(crate) type OwnGuard = dyn Fn(&Parts) -> Option<Permit> + Send + Sync;

impl Guard {
    /// Would there be a permit now? Takes none.
    pub(crate) fn has_room(&self, parts: &Parts) -> bool {
        match self {
            Self::Ceiling(ceiling) => ceiling.places.available_permits() > 0,
            Self::Own(guard) => guard(parts).is_some(),
        }
    }

    /// Takes a permit, and the slot in which it goes to the handler.
    pub(crate) fn enter(&self, parts: &Parts) -> Option<PermitSlot> {
        let permit = match self {
            Self::Ceiling(ceiling) => ceiling.try_acquire(),
            Self::Own(guard) => guard(parts),
        }?;
        Some(PermitSlot { permit: Arc::new(Mutex::new(Some(permit))), guard: self.identity() })
    }

    /// A slot with no permit in it, for a request that runs although this guard was not asked, or
    /// has refused it.
    pub(crate) fn empty_slot(&self) -> PermitSlot {
        PermitSlot { permit: Arc::default(), guard: self.identity() }
    }

    /// Has this guard let the request in already, in an outer copy of the layer?
    pub(crate) fn has_let_in(&self, extensions: &http::Extensions) -> bool {
        extensions.get::<PermitSlot>().is_some_and(|slot| slot.guard == self.identity())
    }

    /// What tells this guard from another: where its count or its function lives.
    fn identity(&self) -> usize {
        match self {
            Self::Ceiling(ceiling) => Arc::as_ptr(&ceiling.places).addr(),
            Self::Own(guard) => Arc::as_ptr(guard).cast::<()>().addr(),
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ceiling(ceiling) => ceiling.fmt(f),
            Self::Own(_) => f.write_str(".."),
        }
    }
}

/// The way of a permit to the handler: an extension of every request that a guard let in.
///
/// A permit that is still in the slot when the handler has answered goes back then, whoever still
/// holds a clone of the request.
#[derive(Clone)]
pub struct PermitSlot {
    permit: Arc<Mutex<Option<Permit>>>,
    guard: usize,
}

impl PermitSlot {
    /// A slot with no permit in it, which says nothing of any guard.
    pub(crate) fn of_no_guard() -> Self {
        // No guard lives there.
        Self { permit: Arc::default(), guard: 0 }
    }

    /// Takes the permit out, to keep the place for longer than the handler runs. There is one, and
    /// only until the handler has answered.
    #[must_use]
    pub fn take_permit(&self) -> Option<Permit> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Permit>> {
        self.permit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PermitSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitSlot").field("taken", &self.lock().is_none()).finish()
    }
}

/// The layer's own end of a slot: dropped when the handler has answered, has panicked or is gone.
#[derive(Debug)]
pub(crate) struct SlotEnd(pub(crate) PermitSlot);

impl Drop for SlotEnd {
    fn drop(&mut self) {
        // A permit that panics when it is given back must not undo what has been done.
        let permit = self.0.take_permit();
        let _panicked = quietly(|| drop(permit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ceiling_lets_in_exactly_its_limit_and_again_after_a_drop() {
        let ceiling = Ceiling::new(2);
        assert_eq!((ceiling.active(), ceiling.limit()), (0, 2));
        let (first, second) = (ceiling.try_acquire(), ceiling.try_acquire());
        assert!(first.is_some() && second.is_some());
        assert!(ceiling.clone().try_acquire().is_none());
        assert_eq!((ceiling.active(), ceiling.limit()), (2, 2));
        drop(first);
        assert!(ceiling.try_acquire().is_some());
        assert_eq!(ceiling.active(), 1);
    }

    #[test]
    fn a_permit_is_taken_once_and_never_after_the_answer() {
        let ceiling = Ceiling::new(1);
        let parts = http::Request::new(()).into_parts().0;
        let guard = Guard::Ceiling(ceiling.clone());
        let slot = guard.enter(&parts).unwrap();
        let kept = slot.clone();
        let permit = slot.take_permit();
        assert!(permit.is_some() && kept.take_permit().is_none());
        drop(SlotEnd(slot));
        assert_eq!(ceiling.active(), 1, "the handler has it");
        drop(permit);

        let slot = guard.enter(&parts).unwrap();
        let kept = slot.clone();
        drop(SlotEnd(slot));
        assert_eq!(ceiling.active(), 0, "nobody took it");
        assert!(kept.take_permit().is_none());
    }

    #[test]
    fn a_guard_takes_its_own_slots_for_its_own_and_no_others() {
        let own = || Guard::Own(Arc::new(|_: &Parts| Some(Permit::new(()))));
        let ceiling = || Guard::Ceiling(Ceiling::new(1));
        let guards = [ceiling(), ceiling(), own(), own()];
        for (number, asked) in guards.iter().enumerate() {
            let mut parts = http::Request::new(()).into_parts().0;
            let slot = asked.enter(&parts).unwrap();
            for slot in [slot, asked.empty_slot()] {
                parts.extensions.insert(slot);
                let let_in: Vec<_> = guards
                    .iter()
                    .map(|guard| guard.clone().has_let_in(&parts.extensions))
                    .collect();
                let right: Vec<_> = (0..guards.len()).map(|other| other == number).collect();
                assert_eq!(let_in, right);
            }
        }
    }

    #[test]
    #[should_panic(expected = "ceiling")]
    fn a_ceiling_of_zero_is_refused_by_name() {
        let _ceiling = Ceiling::new(0);
    }
}
