//! The protocol as a model that can be searched to its end: callers, a store that keeps one
//! operation, and whatever may happen to either in between.

use std::fmt;

use stateright::{Model, Property, Representative};
use tower_idempotency::{OnFailure, OnLeave};

/// So many callers ask for the same operation. Each is one attempt of a client: a client that tries
/// again is another caller.
const CALLERS: usize = 3;

/// The same claim is sent at most so often by one caller.
const SENDS: u8 = 2;

/// What is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub on_failure: OnFailure,
    pub on_leave: OnLeave,
    /// Does the handler say when its effect begins?
    pub says_effects_begin: bool,
    pub abandoned: Abandoned,
}

/// What becomes of a claim that was not renewed, in a store with leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Abandoned {
    RunsAgain,
    Held,
}

impl Rules {
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for on_failure in [OnFailure::Release, OnFailure::Hold, OnFailure::Record] {
            for on_leave in [OnLeave::Finish, OnLeave::Cancel] {
                for says_effects_begin in [false, true] {
                    for abandoned in [Abandoned::RunsAgain, Abandoned::Held] {
                        all.push(Self { on_failure, on_leave, says_effects_begin, abandoned });
                    }
                }
            }
        }
        all
    }
}

impl Rules {
    /// The same, with one value for every rule that the model never asks for in `situation`.
    pub fn asked_for_in(mut self, situation: Situation) -> Self {
        let cancels = situation.leaves() && self.on_leave == OnLeave::Cancel;
        if !situation.fails() && !cancels {
            self.on_failure = OnFailure::Release;
        }
        if !situation.leaves() || situation.fails() {
            // A caller that leaves cuts the work off, and a failure does that anyhow.
            self.on_leave = OnLeave::Finish;
        }
        if !situation.is_shared() {
            self.abandoned = Abandoned::RunsAgain;
        }
        self
    }
}

/// What may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Situation {
    Calm,
    Fails,
    Leaves,
    ProcessDies,
    SharedDies,
    SharedLate,
    SharedAll,
}

impl Situation {
    /// The work may fail before or after its effect.
    fn fails(self) -> bool {
        matches!(self, Self::Fails | Self::SharedAll)
    }

    /// A caller may leave midway.
    fn leaves(self) -> bool {
        matches!(self, Self::Leaves | Self::SharedAll)
    }

    /// A caller's process may die, which ends nothing in the store.
    fn dies(self) -> bool {
        matches!(self, Self::SharedDies | Self::SharedAll)
    }

    /// A lease may end while its owner lives; what is sent may arrive late, in another order, or
    /// never.
    fn is_late(self) -> bool {
        matches!(self, Self::SharedLate | Self::SharedAll)
    }

    /// The store is apart from the callers: what is sent to it is on its way for a while.
    fn is_shared(self) -> bool {
        matches!(self, Self::SharedDies | Self::SharedLate | Self::SharedAll)
    }
}

/// A protocol that is wrong in one point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A completion is written whoever owns the claim.
    CompletionIsNotFenced,
    /// A release ends whatever claim is there.
    ReleaseIsNotFenced,
    /// A withdrawal ends whatever claim is there.
    WithdrawalIsNotFenced,
    /// Who is told "in flight" cleans up after itself, and so after the owner.
    LoserCleansUp,
    /// Who has waited goes on as the owner, without asking again.
    WaiterJustRuns,
    /// A request for something else under the same key takes the entry's place.
    ConflictEndsTheClaim,
    /// It looks whether it may claim, and claims later.
    ClaimTakesTwoSteps,
    /// A claim in flight is answered with a value that is not there yet.
    PlaceholderIsReplayed,
    /// A held entry can be claimed like a free one.
    HeldCanBeClaimed,
    /// What the handler said of its effects is forgotten.
    EffectsAreForgotten,
    /// An abandoned claim runs again, whatever the rule.
    AbandonedAlwaysRunsAgain,
    /// A claim has no lease.
    ClaimHasNoLease,
    /// A cancelled execution leaves its claim behind.
    CancelLeavesTheClaim,
}

pub struct Protocol {
    pub rules: Rules,
    pub situation: Situation,
    pub fault: Option<Fault>,
}

/// What an execution came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Value {
    by: u8,
    success: bool,
}

/// What the store has under the operation's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Entry {
    Free,
    Claimed { by: u8, lease_is_over: bool },
    Held,
    Recorded(Value),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum At {
    /// About to ask.
    Idle,
    /// It has sent its claim and heard nothing.
    Asking,
    /// It was told that another is in flight.
    Waiting,
    /// It is the owner, or believes so.
    Working(Phase),
    /// It has sent how its claim ends, and will say this.
    Ending(Option<Value>),
    /// It has its answer, or has gone without one, or its process has died.
    Over,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    Begun,
    /// It has said that its effect begins.
    Said,
    /// The effect has happened.
    Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Caller {
    at: At,
    /// How often it has sent its claim, where that counts.
    sent: u8,
}

/// How a claim ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Settlement {
    Complete(Value),
    Release,
    Hold,
}

/// What is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// Whose: the caller's number is its token, too.
    of: u8,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum What {
    Claim,
    Settle(Settlement),
    Withdraw,
    /// The second step of a claim that takes two.
    Take,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reply {
    Mine,
    InFlight,
    Held,
    Recorded(Value),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct State {
    entry: Entry,
    callers: [Caller; CALLERS],
    /// In order, each once.
    on_its_way: Vec<Message>,
    // What has happened, for the promises.
    effects: u8,
    first_record: Option<Value>,
    first_success: Option<Value>,
    broken: Broken,
}

/// Promises that a step has broken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(clippy::struct_excessive_bools, reason = "one for each promise")]
struct Broken {
    one_success: bool,
    record_stays: bool,
    owner_only: bool,
    replay_is_record: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Ask(u8),
    SendAgain(u8),
    GiveUp(u8),
    StopWaiting(u8),
    Wake(u8),
    SayEffectsBegin(u8),
    Effect(u8),
    Succeed(u8),
    /// A 4xx, before anything was done.
    SayNotDone(u8),
    /// A 5xx.
    FailWithAnswer(u8),
    /// An error, a panic, a body that breaks; or it is cut off.
    FailWithout(u8),
    Leave(u8),
    Die(u8),
    ProcessDies,
    LeaseEnds,
    Arrive(Message),
    /// It arrives, and the answer to it gets lost.
    ArriveUnheard(Message),
    /// A request for something else under the same key.
    Stranger,
}

/// What is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Promise {
    OneEffect,
    OneAtATime,
    OneSuccess,
    NeverHeld,
    RecordStays,
    OwnerOnly,
    ReplayIsRecord,
    NeverStuck,
}

impl Promise {
    /// Those that depend on rules and situation.
    pub const DEPENDING: [Self; 4] =
        [Self::OneEffect, Self::OneAtATime, Self::OneSuccess, Self::NeverHeld];

    /// Those that hold under every rule, in every situation.
    pub const ALWAYS: [Self; 4] =
        [Self::RecordStays, Self::OwnerOnly, Self::ReplayIsRecord, Self::NeverStuck];

    /// In the README's words.
    pub fn words(self) -> &'static str {
        match self {
            Self::OneEffect => "the effect happens at most once",
            Self::OneAtATime => "one execution at a time",
            Self::OneSuccess => "all hear of one success",
            Self::NeverHeld => "no key is held",
            Self::RecordStays => "a record never changes",
            Self::OwnerOnly => "only its owner ends or changes a claim",
            Self::ReplayIsRecord => "what is replayed is what was recorded",
            Self::NeverStuck => "no key stays in progress for ever",
        }
    }

    pub fn named(words: &str) -> Self {
        let all = Self::DEPENDING.into_iter().chain(Self::ALWAYS);
        all.into_iter().find(|promise| promise.words() == words).expect("a promise")
    }
}

impl State {
    fn caller(&mut self, number: u8) -> &mut Caller {
        &mut self.callers[usize::from(number)]
    }

    /// Do callers work on it who may do so now?
    fn working(&self) -> usize {
        self.callers.iter().filter(|caller| matches!(caller.at, At::Working(_))).count()
    }

    fn post(&mut self, message: Message) {
        if let Err(place) = self.on_its_way.binary_search(&message) {
            self.on_its_way.insert(place, message);
        }
    }

    /// A caller hears what the store answers to its claim, if it is still there to hear it.
    fn hear_of_store(&mut self, number: u8, reply: Reply) {
        if self.caller(number).at != At::Asking {
            return;
        }
        match reply {
            Reply::Mine => self.caller(number).at = At::Working(Phase::Begun),
            Reply::InFlight => self.caller(number).at = At::Waiting,
            Reply::Held => self.hear(number, None, false),
            Reply::Recorded(value) => self.hear(number, Some(value), true),
        }
    }

    /// Somebody hears this answer.
    fn hear(&mut self, number: u8, answer: Option<Value>, is_replay: bool) {
        self.caller(number).at = At::Over;
        let Some(value) = answer else { return };
        if is_replay && self.first_record != Some(value) {
            self.broken.replay_is_record = true;
        }
        if value.success {
            let first = *self.first_success.get_or_insert(value);
            self.broken.one_success |= first != value;
        }
    }

    /// The same with other numbers for the callers.
    fn renumbered(&self, new: [u8; CALLERS]) -> Self {
        let to = |number: u8| new[usize::from(number)];
        let value = |value: Value| Value { by: to(value.by), ..value };
        let mut callers = self.callers;
        for (number, caller) in self.callers.iter().enumerate() {
            let at = match caller.at {
                At::Ending(answer) => At::Ending(answer.map(value)),
                at => at,
            };
            callers[usize::from(new[number])] = Caller { at, ..*caller };
        }
        let message = |message: &Message| Message {
            of: to(message.of),
            what: match message.what {
                What::Settle(Settlement::Complete(of)) => {
                    What::Settle(Settlement::Complete(value(of)))
                }
                what => what,
            },
        };
        Self {
            entry: match self.entry {
                Entry::Claimed { by, lease_is_over } => {
                    Entry::Claimed { by: to(by), lease_is_over }
                }
                Entry::Recorded(of) => Entry::Recorded(value(of)),
                entry => entry,
            },
            callers,
            on_its_way: {
                let mut on_its_way: Vec<_> = self.on_its_way.iter().map(message).collect();
                on_its_way.sort_unstable();
                on_its_way
            },
            first_record: self.first_record.map(value),
            first_success: self.first_success.map(value),
            ..*self
        }
    }
}

impl Representative for State {
    /// It does not matter which caller is which.
    fn representative(&self) -> Self {
        const ORDERS: [[u8; CALLERS]; 6] =
            [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
        // Only the orders that sort the callers (but for whose answer they will say), and of those
        // the least.
        let sorted = |order: &[u8; CALLERS]| {
            let of = |place: usize| {
                let number = order.iter().position(|to| usize::from(*to) == place).unwrap_or(0);
                let Caller { at, sent } = self.callers[number];
                (if let At::Ending(_) = at { At::Ending(None) } else { at }, sent)
            };
            of(0) <= of(1) && of(1) <= of(2)
        };
        let orders = ORDERS.into_iter().filter(sorted);
        orders.map(|order| self.renumbered(order)).min().unwrap_or_else(|| self.clone())
    }
}

impl Protocol {
    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// How a claim ends whose execution left no answer.
    fn after_failure(&self, phase: Phase) -> Settlement {
        let begun = self.rules.says_effects_begin
            && phase != Phase::Begun
            && !self.is(Fault::EffectsAreForgotten);
        if self.rules.on_failure == OnFailure::Release && !begun {
            Settlement::Release
        } else {
            Settlement::Hold
        }
    }

    /// Sends something to the store, which is told at once if it is in the same process.
    fn send(&self, state: &mut State, of: u8, what: What) {
        let message = Message { of, what };
        if self.situation.is_shared() {
            state.post(message);
        } else {
            self.arrive(state, message);
        }
    }

    /// Sends how a claim ends.
    fn end(&self, state: &mut State, of: u8, settlement: Settlement, answer: Option<Value>) {
        if self.situation.is_late() {
            // Where nothing is sure to arrive in time, it says its answer unconfirmed.
            state.hear(of, answer, false);
        } else {
            state.caller(of).at = At::Ending(answer);
        }
        self.send(state, of, What::Settle(settlement));
    }

    fn arrive(&self, state: &mut State, Message { of, what }: Message) {
        let before = state.entry;
        match what {
            What::Claim => self.claim(state, of),
            What::Take => {
                state.entry = Entry::Claimed { by: of, lease_is_over: false };
                state.hear_of_store(of, Reply::Mine);
            }
            What::Settle(settlement) => self.settle(state, of, settlement),
            What::Withdraw => {
                let Entry::Claimed { by, .. } = state.entry else { return };
                if by == of || self.is(Fault::WithdrawalIsNotFenced) {
                    state.entry = Entry::Free;
                }
            }
        }
        // A claim may take what is free or abandoned; everything else needs to be the owner.
        let is_claim = matches!(what, What::Claim | What::Take);
        let may = match before {
            Entry::Free => is_claim,
            Entry::Claimed { by, lease_is_over } => by == of || (lease_is_over && is_claim),
            Entry::Held | Entry::Recorded(_) => false,
        };
        state.broken.owner_only |= state.entry != before && !may;
    }

    fn claim(&self, state: &mut State, of: u8) {
        let reply = match state.entry {
            Entry::Free | Entry::Claimed { lease_is_over: true, .. }
                if self.is(Fault::ClaimTakesTwoSteps) =>
            {
                state.post(Message { of, what: What::Take });
                return;
            }
            Entry::Claimed { by, lease_is_over: false } if by != of => {
                if self.is(Fault::LoserCleansUp) {
                    state.entry = Entry::Free;
                }
                if self.is(Fault::PlaceholderIsReplayed) {
                    Reply::Recorded(Value { by: of, success: true })
                } else {
                    Reply::InFlight
                }
            }
            Entry::Held if !self.is(Fault::HeldCanBeClaimed) => Reply::Held,
            Entry::Recorded(value) => Reply::Recorded(value),
            Entry::Free | Entry::Held | Entry::Claimed { .. } => {
                state.entry = Entry::Claimed { by: of, lease_is_over: false };
                Reply::Mine
            }
        };
        state.hear_of_store(of, reply);
    }

    fn settle(&self, state: &mut State, of: u8, settlement: Settlement) {
        let is_fenced = match settlement {
            Settlement::Complete(_) => !self.is(Fault::CompletionIsNotFenced),
            Settlement::Release => !self.is(Fault::ReleaseIsNotFenced),
            Settlement::Hold => true,
        };
        let is_owner = matches!(state.entry, Entry::Claimed { by, .. } if by == of);
        if is_owner || !is_fenced {
            state.entry = match settlement {
                Settlement::Complete(value) => Entry::Recorded(value),
                Settlement::Release => Entry::Free,
                Settlement::Hold => Entry::Held,
            };
        }
        // Held or lost, the caller gives its own answer.
        if let At::Ending(answer) = state.caller(of).at {
            state.hear(of, answer, false);
        }
    }

    fn caller_steps(&self, state: &State, of: u8, steps: &mut Vec<Step>) {
        let Caller { at, sent } = state.callers[usize::from(of)];
        match at {
            At::Idle => steps.push(Step::Ask(of)),
            At::Asking => {
                if self.situation.is_late() && sent < SENDS {
                    steps.push(Step::SendAgain(of));
                }
                if self.situation.is_late() || self.situation.leaves() {
                    steps.push(Step::GiveUp(of));
                }
            }
            At::Waiting => {
                if !matches!(state.entry, Entry::Claimed { lease_is_over: false, .. }) {
                    steps.push(Step::Wake(of));
                }
                steps.push(Step::StopWaiting(of));
            }
            At::Working(phase) => {
                match phase {
                    Phase::Begun if self.rules.says_effects_begin => {
                        steps.extend([Step::SayEffectsBegin(of), Step::SayNotDone(of)]);
                    }
                    Phase::Begun => steps.extend([Step::Effect(of), Step::SayNotDone(of)]),
                    Phase::Said => steps.push(Step::Effect(of)),
                    Phase::Effect => steps.push(Step::Succeed(of)),
                }
                if self.situation.fails() {
                    steps.extend([Step::FailWithAnswer(of), Step::FailWithout(of)]);
                }
                if self.situation.leaves() {
                    steps.push(Step::Leave(of));
                }
            }
            At::Ending(_) => {}
            At::Over => return,
        }
        if self.situation.dies() && at != At::Idle {
            steps.push(Step::Die(of));
        }
    }

    /// Is there somebody who renews the claim in time?
    fn is_renewed(&self, state: &State, by: u8) -> bool {
        let at = state.callers[usize::from(by)].at;
        matches!(at, At::Asking | At::Working(_) | At::Ending(_)) && !self.situation.is_late()
    }

    /// Is everything over that can happen?
    fn is_over(&self, state: &State) -> bool {
        let mut steps = Vec::new();
        self.actions(state, &mut steps);
        steps.iter().all(|step| *step == Step::Stranger)
    }

    fn fail(&self, state: &mut State, of: u8, answer: Option<Value>) {
        let At::Working(phase) = state.caller(of).at else { return };
        let settlement = match answer {
            Some(value) if self.rules.on_failure == OnFailure::Record => {
                Settlement::Complete(value)
            }
            _ => self.after_failure(phase),
        };
        self.end(state, of, settlement, answer);
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            entry: Entry::Free,
            callers: [Caller { at: At::Idle, sent: 0 }; CALLERS],
            on_its_way: Vec::new(),
            effects: 0,
            first_record: None,
            first_success: None,
            broken: Broken::default(),
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        for of in 0..=u8::MAX {
            if usize::from(of) == CALLERS {
                break;
            }
            self.caller_steps(state, of, steps);
        }
        if self.situation == Situation::ProcessDies {
            let lives = |caller: &Caller| !matches!(caller.at, At::Idle | At::Over);
            if state.entry != Entry::Free || state.callers.iter().any(lives) {
                steps.push(Step::ProcessDies);
            }
        }
        if let Entry::Claimed { by, lease_is_over: false } = state.entry
            && self.situation.is_shared()
            && !self.is_renewed(state, by)
            && !self.is(Fault::ClaimHasNoLease)
        {
            steps.push(Step::LeaseEnds);
        }
        for message in &state.on_its_way {
            steps.push(Step::Arrive(*message));
            if self.situation.is_late() && message.what == What::Claim {
                steps.push(Step::ArriveUnheard(*message));
            }
        }
        if state.entry != Entry::Free {
            steps.push(Step::Stranger);
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut next = last.clone();
        let state = &mut next;
        match step {
            Step::Ask(of) | Step::SendAgain(of) => {
                state.caller(of).at = At::Asking;
                if self.situation.is_late() {
                    state.caller(of).sent += 1;
                }
                self.send(state, of, What::Claim);
            }
            Step::GiveUp(of) => {
                state.caller(of).at = At::Over;
                self.send(state, of, What::Withdraw);
            }
            Step::Wake(of) if self.is(Fault::WaiterJustRuns) => {
                state.caller(of).at = At::Working(Phase::Begun);
            }
            // It asks again, with what is left of its time and of what it may send.
            Step::Wake(of) if last.callers[usize::from(of)].sent < SENDS => {
                state.caller(of).at = At::Idle;
            }
            Step::Wake(of) | Step::StopWaiting(of) | Step::Die(of) => {
                state.caller(of).at = At::Over;
            }
            Step::SayEffectsBegin(of) => state.caller(of).at = At::Working(Phase::Said),
            Step::Effect(of) => {
                state.caller(of).at = At::Working(Phase::Effect);
                state.effects = (state.effects + 1).min(2);
            }
            Step::Succeed(of) => {
                let value = Value { by: of, success: true };
                self.end(state, of, Settlement::Complete(value), Some(value));
            }
            Step::SayNotDone(of) => self.end(state, of, Settlement::Release, None),
            Step::FailWithAnswer(of) => {
                self.fail(state, of, Some(Value { by: of, success: false }));
            }
            Step::FailWithout(of) => self.fail(state, of, None),
            Step::Leave(of) => {
                if self.rules.on_leave == OnLeave::Finish {
                    // It goes on; and that nobody hears its answer takes nothing from the promises.
                    return None;
                }
                if self.is(Fault::CancelLeavesTheClaim) {
                    state.caller(of).at = At::Over;
                } else {
                    self.fail(state, of, None);
                }
            }
            Step::ProcessDies => {
                for caller in &mut state.callers {
                    if caller.at != At::Idle {
                        caller.at = At::Over;
                    }
                }
                // The store is forgotten with it, and nothing is left to be true to.
                state.entry = Entry::Free;
                state.first_record = None;
            }
            Step::LeaseEnds => {
                let Entry::Claimed { by, .. } = state.entry else { return None };
                state.entry = match self.rules.abandoned {
                    Abandoned::Held if !self.is(Fault::AbandonedAlwaysRunsAgain) => Entry::Held,
                    _ => Entry::Claimed { by, lease_is_over: true },
                };
            }
            Step::Arrive(message) => {
                state.on_its_way.retain(|other| *other != message);
                self.arrive(state, message);
            }
            Step::ArriveUnheard(message) => {
                let caller = *state.caller(message.of);
                // As if it were not there, and then it is again where it was.
                state.caller(message.of).at = At::Over;
                state.on_its_way.retain(|other| *other != message);
                self.arrive(state, message);
                *state.caller(message.of) = caller;
            }
            Step::Stranger => {
                if !self.is(Fault::ConflictEndsTheClaim) {
                    // It is refused, and nothing has changed.
                    return None;
                }
                state.broken.owner_only = true;
                state.entry = Entry::Free;
            }
        }
        if let Entry::Recorded(value) = state.entry {
            state.first_record.get_or_insert(value);
        }
        if let Some(first) = state.first_record {
            state.broken.record_stays |= state.entry != Entry::Recorded(first);
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn promise(promise: Promise, holds: fn(&Protocol, &State) -> bool) -> Property<Protocol> {
            Property::always(promise.words(), holds)
        }
        vec![
            promise(Promise::OneEffect, |_, state| state.effects <= 1),
            promise(Promise::OneAtATime, |_, state| state.working() <= 1),
            promise(Promise::OneSuccess, |_, state| !state.broken.one_success),
            promise(Promise::NeverHeld, |_, state| state.entry != Entry::Held),
            promise(Promise::RecordStays, |_, state| !state.broken.record_stays),
            promise(Promise::OwnerOnly, |_, state| !state.broken.owner_only),
            promise(Promise::ReplayIsRecord, |_, state| !state.broken.replay_is_record),
            promise(Promise::NeverStuck, |protocol, state| {
                !matches!(state.entry, Entry::Claimed { lease_is_over: false, .. })
                    || !protocol.is_over(state)
            }),
        ]
    }
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rules, situation, fault } = self;
        write!(f, "{situation:?} {rules:?} {fault:?}")
    }
}
