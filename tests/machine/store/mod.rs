//! Whatever is done to a store in whatever order, it says and counts what it has to: answers,
//! entries, bytes, claims in flight, who is woken, and what each scope has left.

use std::{cell::RefCell, pin::Pin};

use proptest_state_machine::{StateMachineTest, prop_state_machine};
use tower_idempotency::{MemoryStore, Store, store::ClaimReply};

mod deeds;
mod model;
mod real;
mod words;

use model::{Model, Was};
use real::{Real, request};
use words::{Deed, Rules};

struct Machine;

impl StateMachineTest for Machine {
    type SystemUnderTest = Real;
    type Reference = Model;

    fn init_test(model: &Model) -> Real {
        let Rules { capacity, bytes, share, evicts } = model.rules;
        let store = MemoryStore::new().capacity(capacity).stored_bytes(bytes).evict_oldest(evicts);
        let store = match share {
            Some(share) => store.scope_share(share),
            None => store,
        };
        let runtime = Some(super::paused_clock());
        Real { runtime, store, given: Vec::new(), waiting: RefCell::default() }
    }

    fn apply(mut real: Real, model: &Model, deed: Deed) -> Real {
        let runtime = real.runtime.take().unwrap();
        let said = runtime.block_on(real.deed(deed.clone(), model));
        real.runtime = Some(runtime);
        assert_eq!(said, model.said, "{deed:?}");
        real
    }

    fn check_invariants(real: &Real, model: &Model) {
        let _clock = real.runtime.as_ref().unwrap().enter();
        let store = &real.store;
        assert_eq!(store.len(), model.entries.len());
        assert_eq!(store.bytes(), model.bytes());
        assert_eq!(store.in_flight(), model.in_flight());
        assert!(store.len() <= model.rules.capacity);

        // Who waits is woken by the end, and not before.
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        real.waiting.borrow_mut().retain_mut(|(life, ended)| {
            let has_ended = !model
                .entries
                .values()
                .any(|entry| entry.life == *life && entry.was == Was::InFlight);
            assert_eq!(Future::poll(Pin::new(ended), &mut context).is_ready(), has_ended);
            !has_ended
        });

        // The places that each scope has left, counted by taking them; without evicting for it.
        for scope in 0..3 {
            let (Some(share), true) = (model.rules.share, model.has_room()) else { continue };
            let free = share - model.of_scope(scope);
            let all = model.rules.capacity - model.entries.len();
            let mut claim = |number| {
                let mut reply = store.claim(request(number, 0, Some(scope)));
                match Future::poll(Pin::new(&mut reply), &mut context) {
                    std::task::Poll::Ready(reply) => reply.unwrap(),
                    std::task::Poll::Pending => panic!("it has to answer at once"),
                }
            };
            let claims: Vec<_> = (100..100 + free.min(all)).map(&mut claim).collect();
            let all_mine = claims.iter().all(|reply| matches!(reply, ClaimReply::Mine(_)));
            assert!(all_mine, "a place is missing: {claims:?}");
            let is_full = free >= all || matches!(claim(99), ClaimReply::Full { .. });
            assert!(is_full, "a place too many");
        }
    }
}

prop_state_machine! {
    #![proptest_config(super::config())]

    #[test]
    fn whatever_is_done_in_whatever_order_the_store_says_and_counts_what_the_model_does(
        sequential 1..60 => Machine
    );
}
