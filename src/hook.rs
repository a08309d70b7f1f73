//! Functions of the user's own that are asked when the work has been done: a panic in one of them
//! must not undo what was done.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `hook` says, or nothing if it panics. (The panic's message has been printed by then.)
pub(crate) fn quietly<T>(hook: impl FnOnce() -> T) -> Option<T> {
    // Nothing of ours is in the hook's hands but what it is lent to read.
    catch_unwind(AssertUnwindSafe(hook)).ok()
}
