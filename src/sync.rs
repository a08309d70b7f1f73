//! Locks and atomics for what is shared between requests: std's, or under `--cfg shuttle` those of
//! shuttle, whose scheduler `tests/interleavings` drives. Nothing else in here knows of it.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, atomic};

#[cfg(shuttle)]
pub use explored::with_leaky_locks;
#[cfg(shuttle)]
pub(crate) use explored::{Mutex, MutexGuard};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::PoisonError;
#[cfg(shuttle)]
pub(crate) mod atomic {
    pub(crate) use super::explored::AtomicUsize;
    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
}

/// shuttle's locks and counts, with a step after each use; and the locks can be told to be bad ones,
/// to see that the tests notice.
#[cfg(shuttle)]
mod explored {
    use std::{
        cell::Cell,
        ops::{Deref, DerefMut},
    };

    use super::{PoisonError, atomic::Ordering};

    thread_local! {
        /// A schedule runs all of its threads on one.
        static LEAKY: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs `explore` with locks that let others in before each change: what was looked at under
    /// the lock may be another when it is changed.
    pub fn with_leaky_locks<T>(explore: impl FnOnce() -> T) -> T {
        struct Sound;
        impl Drop for Sound {
            fn drop(&mut self) {
                LEAKY.set(false);
            }
        }
        let _sound = Sound;
        LEAKY.set(true);
        explore()
    }

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T> {
        value: shuttle::sync::Mutex<T>,
        after: Step,
    }

    /// A step that does nothing. shuttle lets others run before each step, not after: without this
    /// one, what follows in code without any would happen at once.
    #[derive(Debug, Default)]
    struct Step(shuttle::sync::atomic::AtomicBool);

    impl Step {
        fn take(&self) {
            let _nothing = self.0.load(Ordering::SeqCst);
        }
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self { value: shuttle::sync::Mutex::new(value), after: Step::default() }
        }

        // As std's, so that nobody has to know.
        #[allow(clippy::unnecessary_wraps, reason = "std's lock may be poisoned")]
        pub(crate) fn lock(&self) -> Result<MutexGuard<'_, T>, PoisonError<MutexGuard<'_, T>>> {
            Ok(MutexGuard { mutex: self, locked: Some(self.locked()) })
        }

        fn locked(&self) -> shuttle::sync::MutexGuard<'_, T> {
            self.value.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    pub(crate) struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        locked: Option<shuttle::sync::MutexGuard<'a, T>>,
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.locked.as_ref().expect("locked until it is dropped")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            if LEAKY.get() {
                self.locked = None;
            }
            self.locked.get_or_insert_with(|| self.mutex.locked())
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {
            self.locked = None;
            if !std::thread::panicking() {
                self.mutex.after.take();
            }
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct AtomicUsize {
        count: shuttle::sync::atomic::AtomicUsize,
        after: Step,
    }

    impl AtomicUsize {
        pub(crate) fn load(&self, ordering: Ordering) -> usize {
            let count = self.count.load(ordering);
            self.after.take();
            count
        }

        pub(crate) fn fetch_add(&self, more: usize, ordering: Ordering) -> usize {
            let before = self.count.fetch_add(more, ordering);
            self.after.take();
            before
        }

        pub(crate) fn fetch_sub(&self, less: usize, ordering: Ordering) -> usize {
            let before = self.count.fetch_sub(less, ordering);
            self.after.take();
            before
        }
    }
}
