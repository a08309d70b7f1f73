//! The faults that a store can have, and which promise each of them breaks.

use tower_idempotency::store::conformance::Case;

macro_rules! faults {
    ($($fault:ident: $breaks:ident $(and $also:tt)?;)*) => {
        /// What is wrong with a store.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Fault {
            $($fault,)*
        }

        impl Fault {
            pub const ALL: &'static [Self] = &[$(Self::$fault),*];

            /// The promise that it breaks.
            pub fn breaks(self) -> Case {
                match self {
                    $(Self::$fault => Case::$breaks,)*
                }
            }

            /// The other cases that find it, for they use what it breaks; none where that is so
            /// plain a step that many do.
            pub fn shows_in(self) -> Option<&'static [Case]> {
                match self {
                    $(Self::$fault => also!($($also)?),)*
                }
            }
        }
    };
}

macro_rules! also {
    () => { Some(&[]) };
    (..) => { None };
    ([$($case:ident),*]) => { Some(&[$(Case::$case),*]) };
}

// The fault, the promise that it breaks, and where else it shows: nowhere, in these, or in many.
faults! {
    // Claims.
    NewcomerTakesOver: OneOwner and ..;
    RefusalFreesTheClaim: RefusedClaimFreesNothing and ..;
    ConflictFreesTheClaim: RefusedClaimFreesNothing and [ConflictChangesNothing];
    RepetitionIsInFlight: RepeatedClaimIsTheSame and [FullStoreAnswers];
    RepetitionIsAnotherAttempt: RepeatedClaimIsTheSame;
    TokenIsRecognisedForEver: RepeatAfterTheEndIsNot;
    WithdrawDoesNothing: WithdrawTakesBack and ..;
    WithdrawAlwaysHolds: WithdrawTakesBack and [WithdrawNeedsTheClaim, RefusalLeavesNothing];
    WithdrawIsUnfenced: WithdrawNeedsTheClaim;
    WithdrawEndsRecords: WithdrawNeedsTheClaim and [RacingSettlementsHaveOneWinner];
    DropKeepsTheClaim: DroppedClaimEnds
        and [EveryEndWakesEveryWaiter, EndBeforeTheWaitIsSeen, EveryEndGivesRoomBack];
    EveryClaimIsAnAttempt: AttemptsCountOpenEnds;
    AbandonedAttemptIsForgotten: AttemptsCountOpenEnds;

    // Settlements.
    ReplayTakesTheRecord: RecordComesBack and ..;
    AllRecordsShareTheValue: RecordComesBack and [IdsNeverMeet];
    CompletesTwice: RecordNeverChanges and [RacingSettlementsHaveOneWinner];
    ReleaseEndsRecords: RecordNeverChanges;
    ReleaseLeavesHeld: ReleaseLeavesNothing and ..;
    HoldReleases: HoldShutsTheId and ..;
    CompleteIsUnfenced: StaleOwnerSettlesNothing;
    CompleteNeedsNoClaim: StaleOwnerSettlesNothing and [RacingSettlementsHaveOneWinner];
    ReleaseIsUnfenced: StaleOwnerSettlesNothing;
    HoldIsUnfenced: StaleOwnerSettlesNothing;
    LateSettlementSaysHeld: StaleOwnerSettlesNothing and ..;
    DropIsUnfenced: StaleOwnerDropsNothing;
    ExpireDoesNothing: ExpireEndsWhatItsClaimLeft and ..;
    ExpireIsUnfenced: ExpireEndsWhatItsClaimLeft;
    ExpireEndsClaims: ExpireEndsWhatItsClaimLeft;
    RetainIsUnfenced: RetainNeedsWhatItsClaimLeft;
    RetainRevives: RetainNeedsWhatItsClaimLeft and [ExpireEndsWhatItsClaimLeft];
    RetainEndsClaims: RetainNeedsWhatItsClaimLeft;

    // Identity.
    InFlightBeforeConflict: ConflictComesFirst and [MeaningDecides, FullStoreAnswers];
    HeldBeforeConflict: ConflictComesFirst and [FullStoreAnswers];
    ReplaysToAnyRequest: ConflictComesFirst and [FullStoreAnswers];
    ConflictTakesTheFingerprint: ConflictChangesNothing
        and [RefusedClaimFreesNothing, QuestionsExtendNothing, FullStoreAnswers];
    ConflictExtends: ConflictChangesNothing and [QuestionsExtendNothing];
    FingerprintsCompareAllBytes: MeaningDecides;
    FingerprintsCompareExactBytes: MeaningDecides;
    IdsAreCutShort: IdsNeverMeet;
    IdsAreText: IdsNeverMeet;
    DeadEntryConflicts: EndedEntryIsNoConflict and [EveryEndGivesRoomBack, RoomComesWhenItSays];
    LookupSeesTheDead: LookupAgrees and ..;
    LookupMissesHeld: LookupAgrees and [ConflictChangesNothing, RetainLengthens, FullStoreAnswers];
    LookupTellsHalf: LookupAgrees;
    LookupClaims: LookupChangesNothing and ..;
    LookupExpires: LookupChangesNothing
        and [ConflictChangesNothing, QuestionsExtendNothing, RetainLengthens, FullStoreAnswers];
    RecallSeesTheDead: RecallAgrees;
    RecallComparesNothing: RecallAgrees;
    RecallTellsTheLast: RecallAgrees;

    // Waiters.
    CompleteWakesNobody: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    ReleaseWakesNobody: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    HoldWakesNobody: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    WithdrawWakesNobody: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    DropWakesNobody: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    EndWakesOne: EveryEndWakesEveryWaiter and [EndBeforeTheWaitIsSeen];
    WaitBeginsLate: EndBeforeTheWaitIsSeen;
    WaitEndsAtOnce: WaitingIsQuiet;
    WaitersWakeEachOther: WaitingIsQuiet;

    // Retention.
    RecordLivesFromTheClaim: RecordLivesForItsRetention and [ClaimOutlivesRetentions];
    RecordLivesForEver: RecordLivesForItsRetention and ..;
    HeldLivesFromTheClaim: HeldLivesForItsRetention;
    HeldLivesForEver: HeldLivesForItsRetention and ..;
    ReplayExtends: QuestionsExtendNothing and ..;
    LookupExtends: QuestionsExtendNothing and [ConflictChangesNothing, RetainLengthens];
    ClaimExpires: ClaimOutlivesRetentions and [EveryEndGivesRoomBack];
    OldDeadlineStays: EveryEntryHasItsOwnRetention;
    OnlySomeOfTheDeadAreGone: ManyEndAtOnce;
    ZeroIsForEver: ZeroRetentionLeavesNothing and [EveryEndGivesRoomBack];
    EndlessWrapsAround: EndlessRetentionHolds;
    EndlessRetainWrapsAround: EndlessRetentionHolds;
    RetainCountsFromCompletion: RetainLengthens;
    RetainNeverLengthens: RetainLengthens and [RecallAgrees, EndlessRetentionHolds];
    RetainNeverShortens: RetainShortens and [RecallAgrees, ZeroRetentionLeavesNothing, EveryEndGivesRoomBack];

    // Room.
    NothingIsTooMuch: CapacityIsHard and ..;
    RecordIsEvicted: CapacityIsHard
        and [EveryStateTakesRoom, EveryEndGivesRoomBack, RoomComesWhenItSays];
    ClaimsTakeNoRoom: EveryStateTakesRoom
        and [CapacityIsHard, EveryEndGivesRoomBack, RefusalLeavesNothing, RacingClaimsFillTheRoom];
    HeldTakesNoRoom: EveryStateTakesRoom
        and [CapacityIsHard, EveryEndGivesRoomBack, RoomComesWhenItSays];
    RecordsTakeNoRoom: EveryStateTakesRoom
        and [CapacityIsHard, EveryEndGivesRoomBack, RoomComesWhenItSays];
    DeadTakeRoom: EveryEndGivesRoomBack and [RoomComesWhenItSays];
    WithdrawKeepsRoom: EveryEndGivesRoomBack;
    ExpireGivesRoomTwice: EveryEndGivesRoomBack;
    RefusalIsWritten: RefusalLeavesNothing
        and [EveryEndGivesRoomBack, RoomComesWhenItSays, RacingClaimsFillTheRoom];
    RoomComesWithTheLast: RoomComesWhenItSays;
    RoomComesAtOnce: RoomComesWhenItSays;
    FullBeforeAnythingElse: FullStoreAnswers
        and [
            RepeatedClaimIsTheSame, LookupChangesNothing, CapacityIsHard, DroppedCallIsAllOrNothing
        ];

    // Races.
    LooksThenWrites: RacingClaimsHaveOneOwner and [RacingClaimsOnAnEndedEntry];
    LooksThenWritesOnThreads: RacingClaimsHaveOneOwner and [RacingClaimsOnAnEndedEntry];
    TakesOverTheDeadInSteps: RacingClaimsOnAnEndedEntry;
    LostClaimReadsNothing: ClaimMeetsAnEnd;
    SettlesInSteps: RacingSettlementsHaveOneWinner;
    CountsThenWrites: RacingClaimsFillTheRoom;
    RoomIsTakenBeforeTheEntry: DroppedCallIsAllOrNothing;
    CompletesInSteps: DroppedCallIsAllOrNothing and [LookupAgrees];
}

impl Fault {
    /// Does it show only where the claims of those who are gone live on for a while?
    pub fn needs_a_lease(self) -> bool {
        matches!(self, Self::AbandonedAttemptIsForgotten | Self::CompletesInSteps)
    }
}
