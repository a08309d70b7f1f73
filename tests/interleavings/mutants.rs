//! Faults that the scenarios have to find: the real code under locks that do not hold.

use tower_idempotency::sync::with_leaky_locks;

use crate::{engine, explore::must_fail, store};

#[test]
fn a_lock_that_is_let_go_between_look_and_settlement_is_found() {
    let said = with_leaky_locks(|| must_fail(store::settled_twice));
    assert!(
        said.contains("one claim is settled once") || said.contains("of another token"),
        "{said}"
    );
}

#[test]
fn a_lock_that_is_let_go_between_look_and_removal_is_found() {
    let said = with_leaky_locks(|| must_fail(store::removed));
    assert!(said.contains("a claim in flight was removed"), "{said}");
}

#[test]
fn a_lock_that_is_let_go_between_look_and_entry_is_found() {
    let said = with_leaky_locks(|| must_fail(engine::places_of_all_waiters));
    assert!(said.contains("exceeded max_steps"), "{said}");
}
