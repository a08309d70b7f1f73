//! What may be done next, and where the model starts.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;

use super::{
    model::Model,
    words::{Deed, Rules, Said},
};

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Deed;

    fn init_state() -> BoxedStrategy<Self> {
        (1..8_usize, 1..150_usize, proptest::option::of(1..4_usize), proptest::bool::ANY)
            .prop_map(|(capacity, bytes, share, evicts)| Self {
                rules: Rules { capacity, bytes, share: share.map(|s| s.min(capacity)), evicts },
                now: 0,
                entries: BTreeMap::new(),
                given: Vec::new(),
                places: 0,
                lives: 0,
                said: Said::Nothing,
            })
            .boxed()
    }

    fn transitions(_: &Self) -> BoxedStrategy<Deed> {
        let pick = 0..8_usize;
        let seconds = 0..6_u64;
        let scope = proptest::option::weighted(0.8, 0..3_u8);
        prop_oneof![
            12 => (0..10_usize, 0..8_u8, scope)
                .prop_map(|(id, asked, scope)| Deed::Claim { id, asked: asked / 7, scope }),
            1 => pick.clone().prop_map(|pick| Deed::ClaimAgain { pick }),
            6 => (pick.clone(), 0..60_usize, seconds.clone())
                .prop_map(|(pick, bytes, seconds)| Deed::Complete { pick, bytes, seconds }),
            2 => (pick.clone(), seconds.clone())
                .prop_map(|(pick, seconds)| Deed::Hold { pick, seconds }),
            1 => pick.clone().prop_map(|pick| Deed::Release { pick }),
            1 => pick.clone().prop_map(|pick| Deed::Drop { pick }),
            1 => pick.clone().prop_map(|pick| Deed::Withdraw { pick }),
            1 => pick.clone().prop_map(|pick| Deed::Expire { pick }),
            1 => (pick, seconds.clone()).prop_map(|(pick, seconds)| Deed::Retain { pick, seconds }),
            1 => (0..10_usize).prop_map(|id| Deed::Lookup { id }),
            1 => (0..10_usize).prop_map(|id| Deed::Remove { id }),
            1 => Just(Deed::Clear),
            4 => seconds.prop_map(|seconds| Deed::Pass { seconds }),
        ]
        .boxed()
    }

    fn apply(mut model: Self, deed: &Deed) -> Self {
        model.pass();
        model.said = model.deed(deed);
        model.pass();
        model
    }
}
