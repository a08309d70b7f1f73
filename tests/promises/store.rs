//! What every store promises: the suite of `store::conformance` against the store that ships with
//! the crate, and against stores with one fault each, which it has to find.

use std::{collections::HashSet, thread, time::Duration};

use tower_idempotency::store::{
    MemoryStore,
    conformance::{Case, Suite},
};

use crate::support::{faults::Fault, naive_store::NaiveStore};

/// Longer than a case may take to clear up after others, shorter than it takes to be noticed.
const LEASE: Duration = Duration::from_secs(1);

fn memory() -> Suite<String> {
    Suite::new(|capacity| async move { MemoryStore::new().capacity(capacity) }, value)
}

fn naive(fault: Option<Fault>, lease: Option<Duration>) -> Suite<String> {
    let make = move |capacity| async move { NaiveStore::new(capacity, fault, lease) };
    Suite::new(make, value).leased(lease.unwrap_or_default())
}

fn value(number: u8) -> String {
    format!("value {number}")
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_every_promise() {
    memory().run().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_keeps_its_promises_to_those_who_race_on_a_running_clock() {
    // Not those that a slow machine could take for broken: that something still lives.
    for case in [
        Case::RacingClaimsHaveOneOwner,
        Case::RacingClaimsOnAnEndedEntry,
        Case::RacingSettlementsHaveOneWinner,
        Case::RacingClaimsFillTheRoom,
        Case::EveryEndWakesEveryWaiter,
    ] {
        memory().tick(Duration::from_millis(5)).check(case).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_works_in_steps_keeps_every_promise() {
    naive(None, None).run().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_with_leases_keeps_every_promise() {
    naive(None, Some(LEASE)).run().await;
}

#[test]
fn every_promise_has_a_fault_that_breaks_it() {
    let broken: HashSet<Case> = Fault::ALL.iter().map(|fault| fault.breaks()).collect();
    let unbroken: Vec<_> = Case::ALL.iter().filter(|case| !broken.contains(case)).collect();
    assert!(unbroken.is_empty(), "{unbroken:?}");
}

#[test]
fn every_fault_is_found_by_its_case_and_by_those_that_build_on_it() {
    // Each in a runtime of its own, whose clock is paused.
    let found_by = |fault: Fault| {
        let lease = fault.needs_a_lease().then_some(LEASE);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let suite = naive(Some(fault), lease);
            let mut found_by = Vec::new();
            for &case in Case::ALL {
                if let Err(failure) = suite.check(case).await {
                    assert_eq!(failure.case(), case);
                    found_by.push(case);
                }
            }
            found_by
        })
    };
    let check = |fault: Fault| {
        let mut found_by = found_by(fault);
        let by_its_own = found_by.iter().position(|case| *case == fault.breaks());
        let Some(by_its_own) = by_its_own else {
            return Some(format!("{fault:?}: {:?} does not find it", fault.breaks()));
        };
        found_by.remove(by_its_own);
        match fault.shows_in() {
            Some(shows_in) if shows_in != found_by => {
                Some(format!("{fault:?} shows in {found_by:?}, not in {shows_in:?}"))
            }
            _ => None,
        }
    };
    let wrong: Vec<_> = thread::scope(|scope| {
        let shares = Fault::ALL.chunks(Fault::ALL.len().div_ceil(4));
        let running: Vec<_> = shares
            .map(|share| {
                scope.spawn(|| share.iter().copied().filter_map(check).collect::<Vec<_>>())
            })
            .collect();
        running.into_iter().flat_map(|share| share.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = " promises:\n- ConflictComesFirst: Another \
                           fingerprint is a conflict, whatever the state of the entry. But with \
                           an entry that is Held: Held was found, Conflict is promised\n- Full")]
async fn a_run_names_every_promise_that_is_broken_and_how() {
    naive(Some(Fault::HeldBeforeConflict), None).run().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_without_a_capacity_need_not_refuse() {
    naive(Some(Fault::NothingIsTooMuch), None).unbounded().run().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_found_out() {
    let suite = Suite::new(
        |capacity| async move {
            std::future::pending::<()>().await;
            NaiveStore::new(capacity, None, None)
        },
        value,
    );
    let failure = suite.check(Case::OneOwner).await.unwrap_err();
    assert!(failure.to_string().ends_with("it hangs"), "{failure}");
}
