//! What may happen next, where the model stands, and what it makes of that.

use std::collections::BTreeMap;

use proptest::{prelude::*, sample::select, strategy::Union};
use proptest_state_machine::ReferenceStateMachine;
use tower_idempotency::{OnFailure, OnLeave};

use super::{
    model::{Asking, At, Model},
    words::{Event, Heard, REQUESTS, Rules, Shape, Tell},
};

fn tells() -> BoxedStrategy<Tell> {
    let status = select(vec![200_u16, 201, 200, 303, 402, 404, 408, 422, 500, 503]);
    let shape = select(vec![Shape::Whole, Shape::Declared, Shape::Large, Shape::Unknown]);
    prop_oneof![
        2 => Just(Tell::EffectsBegin),
        10 => (status, shape).prop_map(|(status, body)| Tell::Answer { status, body }),
        1 => Just(Tell::Error),
        1 => Just(Tell::Panic),
    ]
    .boxed()
}

fn tells_of_a_body() -> BoxedStrategy<Tell> {
    prop_oneof![
        4 => Just(Tell::Piece),
        4 => Just(Tell::End),
        1 => Just(Tell::Break),
        1 => Just(Tell::BodyPanics),
    ]
    .boxed()
}

impl ReferenceStateMachine for Model {
    type State = Self;
    type Transition = Event;

    fn init_state() -> BoxedStrategy<Self> {
        let on_failure = select(vec![OnFailure::Release, OnFailure::Hold, OnFailure::Record]);
        let on_leave = select(vec![OnLeave::Finish, OnLeave::Cancel]);
        (1..4_usize, proptest::bool::weighted(0.8), on_failure, on_leave)
            .prop_map(|(capacity, waits, on_failure, on_leave)| Self {
                rules: Rules { capacity, waits, on_failure, on_leave },
                now: 0,
                requests: Vec::new(),
                executions: Vec::new(),
                entries: BTreeMap::new(),
            })
            .boxed()
    }

    fn transitions(model: &Self) -> BoxedStrategy<Event> {
        let mostly_0 = |of: u8| select(vec![0, 0, 0, of]);
        let send = (mostly_0(1), 0..3_u8, mostly_0(1), proptest::bool::weighted(0.2)).prop_map(
            |(scope, key, asks, slowly)| Event::Send { scope, key: key / 2, asks, slowly },
        );
        let pass = (1..5_u64).prop_map(|seconds| Event::Pass { seconds });
        let mut events: Vec<(u32, BoxedStrategy<Event>)> =
            vec![(8, send.boxed()), (2, pass.boxed())];
        let there = model.there(|at| at != At::Over);
        if !there.is_empty() {
            let leave = select(there).prop_map(|request| Event::Leave { request });
            events.push((2, leave.boxed()));
        }
        let reading = model.there(|at| at == At::ReadingBody);
        if !reading.is_empty() {
            let arrives = select(reading).prop_map(|request| Event::BodyArrives { request });
            events.push((3, arrives.boxed()));
        }
        for execution in model.running() {
            let what = match model.executions[execution].answered {
                None => tells(),
                Some(_) => tells_of_a_body(),
            };
            let tell = what.clone().prop_map(move |what| Event::Tell { execution, what });
            events.push((4, tell.boxed()));
            let there = model.there(|at| at != At::Over);
            if !there.is_empty() {
                let both = (what, select(there)).prop_map(move |(what, request)| {
                    Event::TellAndLeave { execution, what, request }
                });
                events.push((1, both.boxed()));
            }
        }
        Union::new_weighted(events).boxed()
    }

    fn preconditions(model: &Self, event: &Event) -> bool {
        let at = |request: usize| model.requests.get(request).map(|request| request.at);
        match *event {
            Event::Send { .. } => model.there(|at| at != At::Over).len() < REQUESTS,
            Event::BodyArrives { request } => at(request) == Some(At::ReadingBody),
            Event::Leave { request } => at(request).is_some_and(|at| at != At::Over),
            Event::Tell { execution, what } => model.may_tell(execution, what),
            Event::TellAndLeave { execution, what, request } => {
                at(request).is_some_and(|at| at != At::Over) && model.may_tell(execution, what)
            }
            Event::Pass { .. } => true,
        }
    }

    fn apply(mut model: Self, event: &Event) -> Self {
        match *event {
            Event::Send { scope, key, asks, slowly } => {
                let (at, heard) = (At::ReadingBody, Heard::default());
                model.requests.push(Asking { id: (scope, key), asks, at, heard });
                if !slowly {
                    model.claim(model.requests.len() - 1);
                }
            }
            Event::BodyArrives { request } => model.claim(request),
            Event::Leave { request } => model.leave(request),
            Event::Tell { execution, what } => model.tell(execution, what),
            Event::TellAndLeave { execution, what, request } => {
                model.leave(request);
                // It may have been cancelled with that.
                if !model.executions[execution].is_over {
                    model.tell(execution, what);
                }
            }
            Event::Pass { seconds } => (0..2 * seconds).for_each(|_| model.tick()),
        }
        model
    }
}
