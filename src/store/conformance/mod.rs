//! What every store promises, as tests that any store can run. In: a way to make a fresh store;
//! out: nothing, or every promise that it breaks.
//!
//! [`Case`] is the closed list of the promises, each a sentence. They are those of [`Store`] and
//! [`Claim`](super::Claim), and no more: a store that passes can be put under the layer.
//!
//! # Running it
//!
//! In a test of your store, with the feature `test-util`:
//!
//! ```
//! use tower_idempotency::store::{MemoryStore, conformance::Suite};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # tokio::time::pause();
//! Suite::new(
//!     |capacity| async move { MemoryStore::new().capacity(capacity) },
//!     |number| format!("value {number}"),
//! )
//! .run()
//! .await;
//! # }
//! ```
//!
//! The first closure makes a store that is empty and has room for so many live entries; it is
//! called once or more in each case, so over a shared server give every store a prefix or a schema
//! of its own. The second makes values to record, different ones for different numbers, as large
//! and as odd as your encoding has to bear.
//!
//! A store that clears claims by a lease says so with [`Suite::leased`], one without a capacity
//! with [`Suite::unbounded`].
//!
//! # Time
//!
//! The cases that need time let it pass with tokio's `sleep`. Against a server's clock that is
//! real time, so make [`Suite::tick`] longer than a call takes; all cases together then last about
//! 300 ticks. For a store in process whose clock is tokio's, pause it
//! (`#[tokio::test(start_paused = true)]`) and they last no time. For a clock of your own, there is
//! [`Suite::passing_time_by`].
//!
//! # One promise
//!
//! [`Suite::check`] runs one case and returns what it found. This is the way to show that a store
//! with a known gap has no other:
//!
//! ```
//! use tower_idempotency::store::{MemoryStore, conformance::{Case, Suite}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # tokio::time::pause();
//! let suite = Suite::new(
//!     |capacity| async move { MemoryStore::new().capacity(capacity) },
//!     |number| vec![number; 4],
//! );
//! assert!(suite.check(Case::HoldShutsTheId).await.is_ok());
//! # }
//! ```
//!
//! # What it cannot see
//!
//! A black box shows neither what a store does with data that it cannot read (it must answer with
//! an error, never with a claim), nor what happens when its server stops in the middle of a call.
//! Those tests are the store's own.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use super::{Store, StoreError};

mod bench;
mod claiming;
mod identity;
mod racing;
mod retention;
mod room;
mod settling;
mod waiting;

use bench::{Bench, Value};

/// Runs the cases against one kind of store.
pub struct Suite<V> {
    make: Make<V>,
    value: Box<dyn Fn(u8) -> V + Send + Sync>,
    pass: Box<dyn Fn(Duration) -> Passing + Send + Sync>,
    tick: Duration,
    lease: Duration,
    bounded: bool,
}

type Make<V> = Box<dyn Fn(usize) -> Making<V> + Send + Sync>;
type Making<V> = Pin<Box<dyn Future<Output = Arc<dyn Store<V>>> + Send>>;
type Passing = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<V: Clone + PartialEq + fmt::Debug + Send + Sync + 'static> Suite<V> {
    /// A suite for the stores that `make` makes, empty and with room for the given number of live
    /// entries, and for the values that `value` makes, different for different numbers.
    #[must_use]
    pub fn new<S: Store<V>, F: Future<Output = S> + Send + 'static>(
        make: impl Fn(usize) -> F + Send + Sync + 'static,
        value: impl Fn(u8) -> V + Send + Sync + 'static,
    ) -> Self {
        Self {
            make: Box::new(move |capacity| {
                let making = make(capacity);
                Box::pin(async move { Arc::new(making.await) as Arc<dyn Store<V>> })
            }),
            value: Box::new(value),
            pass: Box::new(|time| Box::pin(tokio::time::sleep(time))),
            tick: Duration::from_millis(100),
            lease: Duration::ZERO,
            bounded: true,
        }
    }

    /// The unit of all times in the cases; every call has to be answered in less. Default: 100 ms.
    ///
    /// # Panics
    ///
    /// If `tick` is zero.
    #[must_use]
    #[track_caller]
    pub fn tick(mut self, tick: Duration) -> Self {
        assert!(!tick.is_zero(), "tick: time has to pass");
        self.tick = tick;
        self
    }

    /// How time is made to pass. Default: tokio's `sleep`.
    #[must_use]
    pub fn passing_time_by<F: Future<Output = ()> + Send + 'static>(
        mut self,
        pass: impl Fn(Duration) -> F + Send + Sync + 'static,
    ) -> Self {
        self.pass = Box::new(move |time| Box::pin(pass(time)));
        self
    }

    /// The store ends a claim that was dropped unsettled after at most `lease`, and lets the next
    /// one run. Default: zero, it ends with the drop.
    #[must_use]
    pub fn leased(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The store takes entries without limit, so the cases about its capacity are left out.
    #[must_use]
    pub fn unbounded(mut self) -> Self {
        self.bounded = false;
        self
    }

    /// Runs all cases, one after the other.
    ///
    /// # Panics
    ///
    /// If the store breaks a promise: the message names all that it breaks, and how.
    pub async fn run(&self) {
        let mut failures = Vec::new();
        for &case in Case::ALL {
            if let Err(failure) = self.check(case).await {
                failures.push(failure.to_string());
            }
        }
        assert!(
            failures.is_empty(),
            "the store breaks {} of {} promises:\n- {}",
            failures.len(),
            Case::ALL.len(),
            failures.join("\n- "),
        );
    }

    /// Runs one case. One about the capacity always passes for a store [without
    /// one](Self::unbounded).
    ///
    /// # Errors
    ///
    /// The store breaks the promise, fails, or does not answer.
    pub async fn check(&self, case: Case) -> Result<(), Failure> {
        if case.needs_a_capacity() && !self.bounded {
            return Ok(());
        }
        // Far more than any case takes: what is still running then hangs.
        let limit = Duration::from_secs(60) + 20 * self.lease + 500 * self.tick;
        match tokio::time::timeout(limit, case.check(self)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(Broken(what))) => Err(Failure { case, what }),
            Err(_elapsed) => Err(Failure { case, what: "it hangs".to_owned() }),
        }
    }

    /// A fresh store.
    async fn store(&self, capacity: usize) -> Bench<'_, V> {
        Bench::new(self, (self.make)(capacity).await)
    }

    fn value(&self, number: u8) -> V {
        (self.value)(number)
    }

    fn ticks(&self, number: u32) -> Duration {
        number * self.tick
    }

    async fn pass(&self, ticks: u32) {
        (self.pass)(self.ticks(ticks)).await;
    }
}

impl<V> fmt::Debug for Suite<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Suite")
            .field("tick", &self.tick)
            .field("lease", &self.lease)
            .field("bounded", &self.bounded)
            .finish_non_exhaustive()
    }
}

/// A promise that a store broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    case: Case,
    what: String,
}

impl Failure {
    /// Which promise it was.
    #[must_use]
    pub fn case(&self) -> Case {
        self.case
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {} But {}", self.case, self.case, self.what)
    }
}

impl std::error::Error for Failure {}

/// How a case finds the promise broken.
#[derive(Debug)]
struct Broken(String);

impl From<StoreError> for Broken {
    fn from(error: StoreError) -> Self {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        Self(format!("{error}{}", source.unwrap_or_default()))
    }
}

type Checked<T = ()> = Result<T, Broken>;

macro_rules! cases {
    ($($case:ident: $sentence:literal = $check:path;)*) => {
        /// A promise of every store. Displays as a sentence.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Case {
            $(#[doc = $sentence] $case,)*
        }

        impl Case {
            /// All of them, the plainest first.
            pub const ALL: &'static [Self] = &[$(Self::$case),*];

            /// What is promised.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self {
                    $(Self::$case => $sentence,)*
                }
            }

            async fn check<V: Value>(self, suite: &Suite<V>) -> Checked {
                match self {
                    $(Self::$case => Box::pin($check(suite)).await,)*
                }
            }
        }
    };
}

cases! {
    OneOwner: "The first to claim an id owns it, and nobody else while it is in flight."
        = claiming::one_owner;
    RefusedClaimFreesNothing: "A refused claim does not free the one in flight."
        = claiming::refused_claim_frees_nothing;
    RepeatedClaimIsTheSame: "A claim repeated with its token is the same claim."
        = claiming::repeated_claim_is_the_same;
    RepeatAfterTheEndIsNot: "A claim repeated after it was settled is not the same claim."
        = claiming::repeat_after_the_end_is_not;
    WithdrawTakesBack: "A withdrawal takes back a claim in flight, once."
        = claiming::withdraw_takes_back;
    WithdrawNeedsTheClaim: "A withdrawal without a claim of that token in flight changes nothing."
        = claiming::withdraw_needs_the_claim;
    DroppedClaimEnds: "A claim dropped unsettled ends, within the lease, and leaves nothing."
        = claiming::dropped_claim_ends;
    AttemptsCountOpenEnds: "The attempts count from 1, and only executions whose end was not seen."
        = claiming::attempts_count_open_ends;

    RecordComesBack: "A record gives back the value it was completed with, to everybody."
        = settling::record_comes_back;
    RecordNeverChanges: "A record never changes: what comes after its completion is lost."
        = settling::record_never_changes;
    ReleaseLeavesNothing: "A released claim leaves nothing, and the next one runs."
        = settling::release_leaves_nothing;
    HoldShutsTheId: "A held entry answers that it is held, to everybody."
        = settling::hold_shuts_the_id;
    StaleOwnerSettlesNothing: "A claim that is over settles nothing, whatever is there instead."
        = settling::stale_owner_settles_nothing;
    StaleOwnerDropsNothing: "A claim that is over and dropped ends nothing of others."
        = settling::stale_owner_drops_nothing;
    ExpireEndsWhatItsClaimLeft: "Its token expires a record or held entry, once, and nothing else."
        = settling::expire_ends_what_its_claim_left;
    RetainNeedsWhatItsClaimLeft: "Only its own token retains a record or held entry, while it lives."
        = settling::retain_needs_what_its_claim_left;

    ConflictComesFirst: "Another fingerprint is a conflict, whatever the state of the entry."
        = identity::conflict_comes_first;
    ConflictChangesNothing: "A conflict leaves the entry as it was."
        = identity::conflict_changes_nothing;
    MeaningDecides: "Fingerprints are the same if they compare equal, not byte by byte."
        = identity::meaning_decides;
    IdsNeverMeet: "Different ids never meet, wherever they differ."
        = identity::ids_never_meet;
    EndedEntryIsNoConflict: "An entry that has ended conflicts with nothing."
        = identity::ended_entry_is_no_conflict;
    LookupAgrees: "A look-up tells the whole fingerprint of what is there, and of nothing else."
        = identity::lookup_agrees;
    LookupChangesNothing: "A look-up neither claims an id nor touches its entry."
        = identity::lookup_changes_nothing;
    RecallAgrees: "A recall gives nothing but the live record of exactly those bytes."
        = identity::recall_agrees;

    EveryEndWakesEveryWaiter: "Every end of a claim wakes everybody who waits for it."
        = waiting::every_end_wakes_every_waiter;
    EndBeforeTheWaitIsSeen: "An end that comes between the answer and the wait is not missed."
        = waiting::end_before_the_wait_is_seen;
    WaitingIsQuiet: "A waiter is not woken again and again while the claim is in flight."
        = waiting::waiting_is_quiet;

    RecordLivesForItsRetention: "A record lives for its retention, counted from its completion."
        = retention::record_lives_for_its_retention;
    HeldLivesForItsRetention: "A held entry lives for its retention, counted from the hold."
        = retention::held_lives_for_its_retention;
    QuestionsExtendNothing: "Replays, refusals and look-ups do not make an entry live longer."
        = retention::questions_extend_nothing;
    ClaimOutlivesRetentions: "A claim in flight has no retention, and what was there before it leaves none."
        = retention::claim_outlives_retentions;
    EveryEntryHasItsOwnRetention: "The retention of an entry that is gone does not end a later one."
        = retention::every_entry_has_its_own_retention;
    ManyEndAtOnce: "However many entries end at once, all of them are gone, and no others."
        = retention::many_end_at_once;
    ZeroRetentionLeavesNothing: "What is kept for no time is not kept."
        = retention::zero_retention_leaves_nothing;
    EndlessRetentionHolds: "The longest retention there is keeps an entry, and does not wrap around."
        = retention::endless_retention_holds;
    RetainLengthens: "An entry that is retained for longer lives so long from then on."
        = retention::retain_lengthens;
    RetainShortens: "An entry that is retained for less ends so much earlier."
        = retention::retain_shortens;

    CapacityIsHard: "One entry more than there is room for is refused, and nothing is evicted for it."
        = room::capacity_is_hard;
    EveryStateTakesRoom: "Claims, held entries and records all take room."
        = room::every_state_takes_room;
    EveryEndGivesRoomBack: "Every end of an entry gives its room back, to exactly one."
        = room::every_end_gives_room_back;
    RefusalLeavesNothing: "A claim refused for want of room leaves nothing behind."
        = room::refusal_leaves_nothing;
    RoomComesWhenItSays: "The time that a refusal names is when the earliest entry expires."
        = room::room_comes_when_it_says;
    FullStoreAnswers: "A full store still answers for the entries it has, and settles its claims."
        = room::full_store_answers;

    RacingClaimsHaveOneOwner: "Of claims that race for one id exactly one wins."
        = racing::claims_have_one_owner;
    RacingClaimsOnAnEndedEntry: "Of claims that race for the id of an ended entry exactly one wins."
        = racing::claims_on_an_ended_entry;
    ClaimMeetsAnEnd: "A claim that meets the end of another is a whole claim, or is refused."
        = racing::claim_meets_an_end;
    RacingSettlementsHaveOneWinner: "Of settlements that race exactly one holds."
        = racing::settlements_have_one_winner;
    RacingClaimsFillTheRoom: "Claims that race for the last room get it all, and no more."
        = racing::claims_fill_the_room;
    DroppedCallIsAllOrNothing: "A call dropped halfway leaves what was there before or what would be after."
        = racing::dropped_call_is_all_or_nothing;
}

impl Case {
    /// Is it about a store's limit on live entries?
    #[must_use]
    pub const fn needs_a_capacity(self) -> bool {
        matches!(
            self,
            Self::CapacityIsHard
                | Self::EveryStateTakesRoom
                | Self::EveryEndGivesRoomBack
                | Self::RefusalLeavesNothing
                | Self::RoomComesWhenItSays
                | Self::FullStoreAnswers
                | Self::RacingClaimsFillTheRoom
        )
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sentence())
    }
}
