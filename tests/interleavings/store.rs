//! The memory store: one owner at a time, everybody told the truth, slots exact, whatever the
//! interleaving.

use std::time::Duration;

use shuttle::{future::block_on, thread};
use tower_idempotency::{
    OperationId, Scope, ScopeId, Store, Token,
    store::{Claim, ClaimReply, Completion, Ownership},
};

use crate::{
    explore::explore,
    scene::{Ledger, Values, all, decided, held, id, job, mine, now, request, with_runtime},
};

const HOUR: Duration = Duration::from_secs(60 * 60);

fn value(value: u32) -> Completion<u32> {
    Completion::new(value, HOUR).bytes(10)
}

/// How a claim ends.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Complete,
    Release,
    Hold,
    Drop,
    Withdraw,
}

fn end(store: &Values, id: OperationId, token: Token, claim: Box<dyn Claim<u32>>, end: End) {
    let said = match end {
        End::Complete => now(claim.complete(value(7))),
        End::Release => now(claim.release()),
        End::Hold => now(claim.hold(HOUR)),
        End::Drop => {
            drop(claim);
            return;
        }
        End::Withdraw => {
            let said = now(store.withdraw(id, token));
            assert_eq!(now(claim.complete(value(8))), Ownership::Lost, "it was withdrawn");
            said
        }
    };
    assert_eq!(said, Ownership::Held, "nobody else could have ended it");
}

/// Four callers of one id, whose owners all end their claims by `how`. None waits for ever, or
/// shuttle reports a deadlock.
fn four_callers(how: End) {
    with_runtime(|_| {
        let (store, ledger) = (Values::new().capacity(1), Ledger::default());
        all((0..4).map(|_| {
            let (store, ledger) = (store.clone(), ledger.clone());
            job(move || {
                let token = Token::mint();
                match (decided(&store, id(1), token), how) {
                    (ClaimReply::Mine(claim), _) => {
                        let executing = ledger.begin();
                        thread::yield_now();
                        assert_eq!((store.len(), store.in_flight()), (1, 1));
                        drop(executing);
                        end(&store, id(1), token, claim, how);
                    }
                    (ClaimReply::Recorded(7), End::Complete) | (ClaimReply::Held, End::Hold) => {}
                    (other, _) => panic!("{other:?} is not what has happened"),
                }
            })
        }));
        let (executions, left) = match how {
            End::Complete | End::Hold => (1, 1),
            End::Release | End::Drop | End::Withdraw => (4, 0),
        };
        assert_eq!(ledger.executions(), executions);
        assert_eq!((store.len(), store.in_flight()), (left, 0));
    });
}

#[test]
fn a_completion_is_seen_by_everybody() {
    explore(|| four_callers(End::Complete));
}

#[test]
fn a_release_lets_the_next_one_in_and_nobody_sleeps_on() {
    explore(|| four_callers(End::Release));
}

#[test]
fn a_hold_is_seen_by_everybody() {
    explore(|| four_callers(End::Hold));
}

#[test]
fn a_claim_that_is_dropped_lets_the_next_one_in_and_nobody_sleeps_on() {
    explore(|| four_callers(End::Drop));
}

#[test]
fn a_claim_that_is_withdrawn_lets_the_next_one_in_and_nobody_sleeps_on() {
    explore(|| four_callers(End::Withdraw));
}

/// Two claims of one token, settled at once, while a third caller is after the id.
pub(crate) fn settled_twice() {
    with_runtime(|_| {
        let (store, token) = (Values::new(), Token::mint());
        let (first, second) = (mine(&store, id(1), token), mine(&store, id(1), token));
        assert_eq!((store.len(), store.in_flight()), (1, 1), "the same claim");
        let withdrawn = store.clone();
        let after_it = store.clone();
        let said = all([
            job(move || now(first.release())),
            job(move || now(second.release())),
            job(move || now(withdrawn.withdraw(id(1), token))),
            job(move || {
                let ClaimReply::Mine(claim) = decided(&after_it, id(1), Token::mint()) else {
                    panic!("it was released");
                };
                thread::yield_now();
                now(claim.complete(value(3)))
            }),
        ]);
        assert_eq!(held(&said[..3]), 1, "one claim is settled once");
        assert_eq!(said[3], Ownership::Held, "the claim of another token was ended");
        assert_eq!((store.len(), store.in_flight(), store.bytes()), (1, 0, 10));
    });
}

#[test]
fn of_two_settlements_of_one_claim_one_counts_and_none_ends_anothers() {
    explore(settled_twice);
}

#[test]
fn a_completion_and_a_release_of_one_claim_are_one_of_the_two() {
    explore(|| {
        with_runtime(|_| {
            let (store, token) = (Values::new(), Token::mint());
            let (first, second) = (mine(&store, id(1), token), mine(&store, id(1), token));
            let after_it = store.clone();
            let said = all([
                job(move || now(first.complete(value(1)))),
                job(move || now(second.release())),
                job(move || match decided(&after_it, id(1), Token::mint()) {
                    ClaimReply::Mine(claim) => now(claim.complete(value(2))),
                    ClaimReply::Recorded(1) => Ownership::Lost,
                    other => panic!("{other:?} is not what has happened"),
                }),
            ]);
            assert_eq!(held(&said[..2]), 1, "one claim is settled once");
            assert_eq!(said[2], said[1], "released is what the third one claims");
            let expected = if said[0] == Ownership::Held { 1 } else { 2 };
            match decided(&store, id(1), Token::mint()) {
                ClaimReply::Recorded(value) => assert_eq!(value, expected),
                other => panic!("{other:?} instead of the record"),
            }
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (1, 0, 10));
        });
    });
}

#[test]
fn what_expires_a_record_finds_it_or_comes_too_early_and_it_ends_once() {
    explore(|| {
        with_runtime(|_| {
            let (store, token) = (Values::new(), Token::mint());
            let claim = mine(&store, id(1), token);
            let (first, second, retained) = (store.clone(), store.clone(), store.clone());
            let said = all([
                job(move || now(claim.complete(value(1)))),
                job(move || now(first.expire(id(1), token))),
                job(move || now(second.expire(id(1), token))),
                job(move || now(retained.retain(id(1), token, 2 * HOUR))),
            ]);
            assert_eq!(said[0], Ownership::Held, "only its owner ends a claim in flight");
            let expired = held(&said[1..3]);
            assert!(expired <= 1, "it was there once");
            let left = 1 - expired;
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (left, 0, 10 * left));
        });
    });
}

/// Callers of one id, an operator who removes it and one who clears everything.
pub(crate) fn removed() {
    with_runtime(|_| {
        let (store, ledger) = (Values::new().capacity(1), Ledger::default());
        let caller = || {
            let (store, ledger) = (store.clone(), ledger.clone());
            job(move || match decided(&store, id(1), Token::mint()) {
                ClaimReply::Mine(claim) => {
                    let executing = ledger.begin();
                    thread::yield_now();
                    drop(executing);
                    let said = now(claim.complete(value(7)));
                    assert_eq!(said, Ownership::Held, "a claim in flight was removed");
                    false
                }
                ClaimReply::Recorded(7) => false,
                other => panic!("{other:?} is not what has happened"),
            })
        };
        let (removed, cleared) = (store.clone(), store.clone());
        let said = all([
            caller(),
            caller(),
            caller(),
            job(move || removed.remove(&id(1))),
            job(move || {
                cleared.clear();
                true
            }),
        ]);
        let ends = said.iter().filter(|ended| **ended).count();
        assert!((1..=1 + ends).contains(&ledger.executions()));
        let left = store.len();
        assert!(left <= 1);
        assert_eq!((store.in_flight(), store.bytes()), (0, 10 * left));
    });
}

/// A recall asks without the lock of all the others.
#[test]
fn what_has_ended_is_recalled_by_nobody_and_what_came_after_it_stays() {
    explore(|| {
        with_runtime(|_| {
            let (store, first) = (Values::new(), Token::mint());
            let claim = mine(&store, id(1), first);
            let asked = request(id(1), first).fingerprint;
            let recall = {
                let store = store.clone();
                move || store.recall(&id(1), asked.exact())
            };
            assert_eq!(recall(), None, "a claim in flight was recalled");
            assert_eq!(now(claim.complete(value(1))), Ownership::Held);
            assert_eq!(recall(), Some(1));
            let [after_removal, twice] = [recall.clone(), recall.clone()];
            let (removed, retained, again) = (store.clone(), store.clone(), store.clone());
            all([
                job(move || {
                    assert!(removed.remove(&id(1)));
                    assert_ne!(after_removal(), Some(1), "what was removed was recalled");
                }),
                job(move || {
                    let _either = now(retained.retain(id(1), first, 2 * HOUR));
                }),
                job(move || match decided(&again, id(1), Token::mint()) {
                    ClaimReply::Mine(claim) => {
                        assert_eq!(now(claim.complete(value(2))), Ownership::Held);
                    }
                    ClaimReply::Recorded(1) => {}
                    other => panic!("{other:?} is not what has happened"),
                }),
                job(move || {
                    let (before, after) = (twice(), twice());
                    assert!(before != Some(2) || after == Some(2), "{before:?}, then {after:?}");
                }),
            ]);
            let left = usize::from(recall().is_some());
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (left, 0, 10 * left));
        });
    });
}

#[test]
fn nobody_removes_a_claim_in_flight() {
    explore(removed);
}

#[test]
fn the_cap_is_never_exceeded_and_every_slot_comes_back() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger) = (Values::new().capacity(2), Ledger::default());
            all((0..4).map(|number| {
                let (store, ledger) = (store.clone(), ledger.clone());
                job(move || match decided(&store, id(number), Token::mint()) {
                    ClaimReply::Mine(claim) => {
                        ledger.enter(2);
                        assert!(store.len() <= 2);
                        if number == 0 {
                            assert_eq!(now(claim.complete(value(7))), Ownership::Held);
                        } else {
                            ledger.leave();
                            assert_eq!(now(claim.release()), Ownership::Held);
                        }
                    }
                    ClaimReply::Full { room_in } => assert!(room_in.is_none_or(|in_| in_ <= HOUR)),
                    other => panic!("{other:?} is not what has happened"),
                })
            }));
            let left = ledger.live();
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (left, 0, 10 * left));
        });
    });
}

#[test]
fn a_slot_that_is_free_is_never_refused() {
    explore(|| {
        with_runtime(|_| {
            let store = Values::new().capacity(3);
            all((0..3).map(|number| {
                let store = store.clone();
                job(move || {
                    for _ in 0..2 {
                        let claim = mine(&store, id(number), Token::mint());
                        assert_eq!(now(claim.release()), Ownership::Held);
                    }
                })
            }));
            assert!(store.is_empty());
        });
    });
}

#[test]
fn eviction_makes_room_and_never_takes_a_claim_in_flight() {
    explore(|| {
        with_runtime(|_| {
            let store = Values::new().capacity(2).evict_oldest(true);
            assert_eq!(now(mine(&store, id(9), Token::mint()).complete(value(9))), Ownership::Held);
            let in_flight = Ledger::default();
            let completed = all((0..4).map(|number| {
                let (store, in_flight) = (store.clone(), in_flight.clone());
                job(move || match decided(&store, id(number), Token::mint()) {
                    ClaimReply::Mine(claim) => {
                        in_flight.enter(2);
                        assert!(store.len() <= 2);
                        in_flight.leave();
                        assert_eq!(
                            now(claim.complete(value(7))),
                            Ownership::Held,
                            "it was evicted"
                        );
                        1
                    }
                    ClaimReply::Full { .. } => 0,
                    other => panic!("{other:?} is not what has happened"),
                })
            }));
            let completed: usize = completed.into_iter().sum();
            assert!(completed >= 2, "two have room at any time");
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (2, 0, 20));
        });
    });
}

#[test]
fn the_share_of_a_scope_and_the_bytes_of_all_are_never_exceeded() {
    explore(|| {
        with_runtime(|_| {
            let store = Values::new().capacity(4).scope_share(1).stored_bytes(20);
            let ledgers = [Ledger::default(), Ledger::default()];
            all((0..4_u8).map(|number| {
                let (store, ledger) = (store.clone(), ledgers[usize::from(number % 2)].clone());
                let scope = ScopeId::new(&Scope::new([number % 2]));
                let asked = request(id(number), Token::mint()).in_scope(Some(scope));
                job(move || match now(store.claim(asked)) {
                    ClaimReply::Mine(claim) => {
                        ledger.enter(1);
                        if number < 2 {
                            ledger.leave();
                            assert_eq!(now(claim.release()), Ownership::Held);
                        } else {
                            assert_eq!(now(claim.complete(value(7))), Ownership::Held);
                        }
                    }
                    ClaimReply::Full { .. } => {}
                    other => panic!("{other:?} is not what has happened"),
                })
            }));
            let left = ledgers[0].live() + ledgers[1].live();
            assert_eq!((store.len(), store.in_flight(), store.bytes()), (left, 0, 10 * left));
        });
    });
}

#[test]
fn an_entry_whose_time_has_come_is_claimed_by_one() {
    explore(|| {
        with_runtime(|_| {
            let (store, ledger, first) = (Values::new(), Ledger::default(), Token::mint());
            let soon = Completion::new(1, Duration::from_secs(10)).bytes(10);
            assert_eq!(now(mine(&store, id(1), first).complete(soon)), Ownership::Held);
            let clock = job(|| block_on(tokio::time::advance(Duration::from_secs(10))));
            let (retained, swept) = (store.clone(), store.clone());
            let others = [
                job(move || {
                    let _either = now(retained.retain(id(1), first, Duration::from_secs(10)));
                }),
                job(move || assert!(swept.len() <= 1)),
            ];
            let callers = (0..3).map(|_| {
                let (store, ledger) = (store.clone(), ledger.clone());
                job(move || match decided(&store, id(1), Token::mint()) {
                    ClaimReply::Mine(claim) => {
                        let executing = ledger.begin();
                        thread::yield_now();
                        drop(executing);
                        assert_eq!(now(claim.complete(value(2))), Ownership::Held);
                    }
                    ClaimReply::Recorded(1 | 2) => {}
                    other => panic!("{other:?} is not what has happened"),
                })
            });
            all(callers.chain([clock]).chain(others));
            assert!(ledger.executions() <= 1);
            let left = store.len();
            assert_eq!((store.in_flight(), store.bytes()), (0, 10 * left));
        });
    });
}
