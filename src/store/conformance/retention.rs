//! How long an entry lives.

use std::time::Duration;

use super::{
    Checked, Suite,
    bench::{ROOMY, Seen, State, Value, asked, id, must, other},
};
use crate::{operation::Token, store::Ownership};

pub(super) async fn record_lives_for_its_retention<V: Value>(suite: &Suite<V>) -> Checked {
    lives_for_its_retention(suite, State::Recorded).await
}

pub(super) async fn held_lives_for_its_retention<V: Value>(suite: &Suite<V>) -> Checked {
    lives_for_its_retention(suite, State::Held).await
}

async fn lives_for_its_retention<V: Value>(suite: &Suite<V>, state: State) -> Checked {
    let bench = suite.store(ROOMY).await;
    let own = bench.own(id(1)).await?;
    // The work takes longer than the retention has left room for, were it counted from here.
    suite.pass(4).await;
    let (said, seen) = match state {
        State::Recorded => {
            let value = suite.value(1);
            (own.complete(value.clone(), suite.ticks(5)).await?, Seen::Recorded(value))
        }
        _ => (own.hold(suite.ticks(5)).await?, Seen::Held),
    };
    must(said, Ownership::Held, "the owner's settlement")?;
    suite.pass(3).await;
    bench.finds(id(1), &seen, "within its retention").await?;
    suite.pass(4).await;
    bench.looks_up(id(1), None, "after its retention").await?;
    bench.finds(id(1), &Seen::Nothing, "after its retention").await
}

pub(super) async fn questions_extend_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let id = id(number);
        let put = bench.put(id, state, suite.ticks(5)).await?;
        for _ in 0..3 {
            suite.pass(1).await;
            let _advisory = bench.store.lookup(id).await?;
            drop(bench.claim(id, other(), Token::mint()).await?);
            bench.finds(id, &put.seen, "within its retention").await?;
        }
        suite.pass(4).await;
        bench.finds(id, &Seen::Nothing, "after its retention").await?;
    }
    Ok(())
}

pub(super) async fn claim_outlives_retentions<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, before) in (0..).zip(State::LEFT) {
        let id = id(number);
        bench.put(id, before, suite.ticks(2)).await?;
        suite.pass(3).await;
        let own = bench.own(id).await?;
        for _ in 0..3 {
            suite.pass(3).await;
            bench.finds(id, &Seen::InFlight, "a claim that runs for long").await?;
        }
        let said = own.complete(suite.value(2), suite.ticks(3)).await?;
        must(said, Ownership::Held, "the completion after long")?;
        bench.finds(id, &Seen::Recorded(suite.value(2)), "after that completion").await?;
    }
    Ok(())
}

pub(super) async fn every_entry_has_its_own_retention<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let id = id(number);
        let first = bench.put(id, state, suite.ticks(3)).await?;
        must(bench.expire(id, first.token).await?, Ownership::Held, "expiring the first")?;
        let own = bench.own(id).await?;
        suite.pass(4).await;
        bench.finds(id, &Seen::InFlight, "when the first would have ended").await?;
        must(own.release().await?, Ownership::Held, "the owner's release")?;

        let first = bench.put(id, state, suite.ticks(3)).await?;
        must(bench.expire(id, first.token).await?, Ownership::Held, "expiring the first")?;
        let second = bench.put(id, state, bench.long()).await?;
        suite.pass(4).await;
        bench.finds(id, &second.seen, "when the first would have ended").await?;
    }
    Ok(())
}

pub(super) async fn many_end_at_once<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let mut ids: Vec<_> = (0..150).map(id).collect();
    for (number, &id) in (0..).zip(&ids) {
        let state = State::LEFT[number % 2];
        bench.put(id, state, suite.ticks(2)).await?;
    }
    suite.pass(4).await;
    // The greatest first: a store that clears some at a time, in order, has not come to it.
    ids.sort();
    let mut owners = Vec::new();
    for &id in ids.iter().rev() {
        bench.looks_up(id, None, "one of many that have ended").await?;
        owners.push((id, bench.own(id).await?));
    }
    // Nor does what was left to be cleared take the new ones with it.
    for (id, own) in owners {
        bench.finds(id, &Seen::InFlight, "one that came after many").await?;
        must(own.release().await?, Ownership::Held, "its owner's release")?;
    }
    Ok(())
}

pub(super) async fn zero_retention_leaves_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let id = id(number);
        bench.put(id, state, Duration::ZERO).await?;
        // Looked up before a claim could clear it.
        bench.looks_up(id, None, "what is kept for no time").await?;
        bench.finds(id, &Seen::Nothing, "what is kept for no time").await?;

        let put = bench.put(id, state, bench.long()).await?;
        let said = bench.retain(id, put.token, Duration::ZERO).await?;
        must(said, Ownership::Held, "retaining for no time")?;
        bench.looks_up(id, None, "what is retained for no time").await?;
        bench.finds(id, &Seen::Nothing, "what is retained for no time").await?;
    }
    Ok(())
}

pub(super) async fn endless_retention_holds<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    // The last of all, and one that no clock that counts nanoseconds in 64 bits can add.
    for (round, endless) in [(0, Duration::MAX), (10, Duration::from_secs(u64::MAX / 1_000))] {
        for (number, state) in (round..).zip(State::LEFT) {
            let kept = bench.put(id(number), state, endless).await?;
            let retained = bench.put(id(number + 5), state, suite.ticks(2)).await?;
            let said = bench.retain(id(number + 5), retained.token, endless).await?;
            must(said, Ownership::Held, "retaining for ever")?;
            suite.pass(4).await;
            bench.finds(id(number), &kept.seen, "what is kept for ever").await?;
            bench.finds(id(number + 5), &retained.seen, "what is retained for ever").await?;
        }
    }
    Ok(())
}

pub(super) async fn retain_lengthens<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let id = id(number);
        let put = bench.put(id, state, suite.ticks(4)).await?;
        suite.pass(2).await;
        // Until eight. Counted from the completion, which is wrong, it would be six.
        let said = bench.retain(id, put.token, suite.ticks(6)).await?;
        must(said, Ownership::Held, "retaining for longer")?;
        suite.pass(3).await;
        bench.finds(id, &put.seen, "after its first retention").await?;
        bench.looks_up(id, Some(asked()), "after its first retention").await?;
        suite.pass(2).await;
        bench.finds(id, &put.seen, "within its new retention").await?;
        suite.pass(3).await;
        bench.finds(id, &Seen::Nothing, "after its new retention").await?;
    }
    Ok(())
}

pub(super) async fn retain_shortens<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let id = id(number);
        let put = bench.put(id, state, bench.long()).await?;
        let said = bench.retain(id, put.token, suite.ticks(3)).await?;
        must(said, Ownership::Held, "retaining for less")?;
        suite.pass(1).await;
        bench.finds(id, &put.seen, "within its new retention").await?;
        suite.pass(4).await;
        bench.looks_up(id, None, "after its new retention").await?;
        bench.finds(id, &Seen::Nothing, "after its new retention").await?;
    }
    Ok(())
}
