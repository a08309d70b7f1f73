//! What a claim leaves, and who may change it.

use super::{
    Checked, Suite,
    bench::{Bench, Own, Put, ROOMY, Seen, State, Value, asked, id, must},
};
use crate::{
    operation::{OperationId, Token},
    store::{ClaimReply, Ownership},
};

pub(super) async fn record_comes_back<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let long = bench.long();
    for number in 0..8 {
        let own = bench.own(id(number)).await?;
        let said = own.complete(suite.value(number), long).await?;
        must(said, Ownership::Held, "the owner's completion")?;
    }
    for _ in 0..3 {
        for number in 0..8 {
            let recorded = Seen::Recorded(suite.value(number));
            bench.finds(id(number), &recorded, "after the completion").await?;
        }
    }
    Ok(())
}

pub(super) async fn record_never_changes<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let long = bench.long();
    for (number, settlement) in (0..).zip(Settlement::ALL) {
        let first = bench.own(id(number)).await?;
        let token = first.token;
        // The same claim twice: its token is right, but it comes second.
        let ClaimReply::Mine(claim) = bench.claim(id(number), asked(), token).await? else {
            // That repetitions are recognised is a case of its own.
            continue;
        };
        let second = Own { token, claim };
        must(first.complete(suite.value(1), long).await?, Ownership::Held, "the completion")?;
        let said = settlement.of(second, suite).await?;
        let when = format_args!("{settlement:?} after the completion");
        must(said, Ownership::Lost, when)?;
        bench.finds(id(number), &Seen::Recorded(suite.value(1)), when).await?;
    }
    Ok(())
}

pub(super) async fn release_leaves_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for _ in 0..3 {
        let own = bench.own(id(1)).await?;
        must(own.release().await?, Ownership::Held, "the owner's release")?;
        bench.looks_up(id(1), None, "after a release").await?;
    }
    let own = bench.own(id(1)).await?;
    let said = own.complete(suite.value(2), bench.long()).await?;
    must(said, Ownership::Held, "the completion of one that came after a release")?;
    bench.finds(id(1), &Seen::Recorded(suite.value(2)), "after that completion").await
}

pub(super) async fn hold_shuts_the_id<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let own = bench.own(id(1)).await?;
    must(own.hold(bench.long()).await?, Ownership::Held, "the owner's hold")?;
    for _ in 0..3 {
        bench.finds(id(1), &Seen::Held, "after the hold").await?;
    }
    Ok(())
}

/// The ways to settle a claim.
#[derive(Debug, Clone, Copy)]
enum Settlement {
    Complete,
    Release,
    Hold,
}

impl Settlement {
    const ALL: [Self; 3] = [Self::Complete, Self::Release, Self::Hold];

    async fn of<V: Value>(self, own: Own<V>, suite: &Suite<V>) -> Checked<Ownership> {
        // Other values and times than those of whoever is there now.
        match self {
            Self::Complete => own.complete(suite.value(7), suite.ticks(1)).await,
            Self::Release => own.release().await,
            Self::Hold => own.hold(suite.ticks(1)).await,
        }
    }
}

/// A claim whose time is over, and what has come after it: nothing, or another's entry.
async fn stale<V: Value>(
    bench: &Bench<'_, V>,
    id: OperationId,
    then: Option<State>,
) -> Checked<(Own<V>, Option<Put<V>>)> {
    let over = bench.own(id).await?;
    must(bench.withdraw(id, over.token).await?, Ownership::Held, "a withdrawal")?;
    let put = match then {
        Some(state) => Some(bench.put(id, state, bench.long()).await?),
        None => None,
    };
    Ok((over, put))
}

const THEN: [Option<State>; 4] =
    [None, Some(State::InFlight), Some(State::Held), Some(State::Recorded)];

/// What was there is still there, and whoever owns it can settle it.
async fn untouched<V: Value>(
    bench: &Bench<'_, V>,
    id: OperationId,
    put: Option<Put<V>>,
    when: &str,
) -> Checked {
    let Some(put) = put else {
        bench.looks_up(id, None, when).await?;
        return bench.finds(id, &Seen::Nothing, when).await;
    };
    // Not by its time either: what came late had a short one.
    bench.suite.pass(2).await;
    bench.finds(id, &put.seen, when).await?;
    match put.own {
        Some(own) => must(own.release().await?, Ownership::Held, format_args!("{when}, its owner")),
        None => Ok(()),
    }
}

pub(super) async fn stale_owner_settles_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let mut number = 0;
    for settlement in Settlement::ALL {
        for then in THEN {
            number += 1;
            let (over, put) = stale(&bench, id(number), then).await?;
            let when = format!("a late {settlement:?}, {then:?} in its place");
            must(settlement.of(over, suite).await?, Ownership::Lost, &when)?;
            untouched(&bench, id(number), put, &when).await?;
        }
    }
    Ok(())
}

pub(super) async fn stale_owner_drops_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, then) in (0..).zip(THEN) {
        let (over, put) = stale(&bench, id(number), then).await?;
        drop(over);
        let when = format!("a late drop, {then:?} in its place");
        untouched(&bench, id(number), put, &when).await?;
    }
    Ok(())
}

pub(super) async fn expire_ends_what_its_claim_left<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let nothing = bench.expire(id(9), Token::mint()).await?;
    must(nothing, Ownership::Lost, "expiring where nothing is")?;
    for (number, state) in (0..).zip(State::ALL) {
        let id = id(number);
        let put = bench.put(id, state, bench.long()).await?;
        let said = bench.expire(id, Token::mint()).await?;
        must(said, Ownership::Lost, format_args!("expiring what is {state:?} of another"))?;
        bench.finds(id, &put.seen, "after another tried to expire it").await?;
        let said = bench.expire(id, put.token).await?;
        if let Some(own) = put.own {
            must(said, Ownership::Lost, "expiring a claim in flight")?;
            bench.finds(id, &put.seen, "after expiring a claim in flight").await?;
            must(own.release().await?, Ownership::Held, "its owner's release")?;
            continue;
        }
        must(said, Ownership::Held, format_args!("expiring what is {state:?}"))?;
        bench.looks_up(id, None, "after it was expired").await?;
        bench.finds(id, &Seen::Nothing, "after it was expired").await?;
        must(bench.expire(id, put.token).await?, Ownership::Lost, "expiring it again")?;
        let next = bench.put(id, state, bench.long()).await?;
        must(bench.expire(id, put.token).await?, Ownership::Lost, "expiring the next one's")?;
        bench.finds(id, &next.seen, "after the one before tried to expire it").await?;

        must(bench.expire(id, next.token).await?, Ownership::Held, "expiring the next one")?;
        let last = bench.put(id, state, suite.ticks(1)).await?;
        suite.pass(2).await;
        must(bench.expire(id, last.token).await?, Ownership::Lost, "expiring what has expired")?;
    }
    Ok(())
}

pub(super) async fn retain_needs_what_its_claim_left<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    // Short and long: neither ends it early nor keeps it.
    for (round, retention) in [(0, suite.ticks(1)), (10, bench.long())] {
        let nothing = bench.retain(id(round), Token::mint(), retention).await?;
        must(nothing, Ownership::Lost, "retaining where nothing is")?;
        bench.finds(id(round), &Seen::Nothing, "after nothing was retained").await?;
        for (number, state) in (round + 1..).zip(State::ALL) {
            let id = id(number);
            let put = bench.put(id, state, suite.ticks(6)).await?;
            let said = bench.retain(id, Token::mint(), retention).await?;
            must(said, Ownership::Lost, format_args!("retaining what is {state:?} of another"))?;
            if let Some(own) = put.own {
                let said = bench.retain(id, put.token, retention).await?;
                must(said, Ownership::Lost, "retaining a claim in flight")?;
                suite.pass(2).await;
                bench.finds(id, &put.seen, "after retaining a claim in flight").await?;
                must(own.release().await?, Ownership::Held, "its owner's release")?;
                continue;
            }
            suite.pass(3).await;
            bench.finds(id, &put.seen, "after another tried to retain it for less").await?;
            suite.pass(5).await;
            // Nobody has looked since: there may be something left that could be revived.
            let said = bench.retain(id, put.token, retention).await?;
            must(said, Ownership::Lost, format_args!("retaining what was {state:?} and ended"))?;
            bench.finds(id, &Seen::Nothing, "when its own retention is over").await?;
        }
    }
    Ok(())
}
