//! Who owns an id, and how a claim ends without a settlement.

use super::{
    Broken, Checked, Suite,
    bench::{Bench, Own, ROOMY, Seen, State, Value, asked, id, must, other},
};
use crate::{
    operation::{OperationId, Token},
    store::{ClaimReply, Ownership},
};

pub(super) async fn one_owner<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let own = bench.own(id(1)).await?;
    for _ in 0..3 {
        bench.finds(id(1), &Seen::InFlight, "while the claim is in flight").await?;
    }
    bench.finds(id(2), &Seen::Nothing, "another id meanwhile").await?;
    must(own.release().await?, Ownership::Held, "the owner's release")
}

pub(super) async fn refused_claim_frees_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::ALL) {
        let put = bench.put(id(number), state, bench.long()).await?;
        for fingerprint in [asked(), other(), asked()] {
            // Its answer is dropped at once, as by a caller that leaves.
            drop(bench.claim(id(number), fingerprint, Token::mint()).await?);
            bench.finds(id(number), &put.seen, "after another claim was refused").await?;
        }
        if let Some(own) = put.own {
            must(own.release().await?, Ownership::Held, "the owner's release after a refusal")?;
        }
    }
    Ok(())
}

/// Asks once more with the token of `own`.
async fn repeat<V: Value>(bench: &Bench<'_, V>, id: OperationId, own: &Own<V>) -> Checked<Own<V>> {
    match bench.claim(id, asked(), own.token).await? {
        ClaimReply::Mine(claim) => Ok(Own { token: own.token, claim }),
        reply => Err(Broken(format!(
            "the repetition of a claim in flight was answered {:?}",
            Seen::of(&reply)
        ))),
    }
}

pub(super) async fn repeated_claim_is_the_same<V: Value>(suite: &Suite<V>) -> Checked {
    // With room for one: a repetition takes none.
    let bench = suite.store(1).await;
    for repeated_settles in [false, true] {
        let first = bench.own(id(1)).await?;
        let repeated = repeat(&bench, id(1), &first).await?;
        must(repeated.claim.attempt(), first.claim.attempt(), "the attempt of the repetition")?;
        bench.finds(id(1), &Seen::InFlight, "after a repetition").await?;
        let (settles, comes_late) =
            if repeated_settles { (repeated, first) } else { (first, repeated) };
        must(settles.release().await?, Ownership::Held, "the first settlement")?;
        bench.finds(id(1), &Seen::Nothing, "after the first settlement").await?;
        must(comes_late.release().await?, Ownership::Lost, "the second settlement")?;
    }
    Ok(())
}

pub(super) async fn repeat_after_the_end_is_not<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::LEFT) {
        let put = bench.put(id(number), state, bench.long()).await?;
        let reply = bench.claim(id(number), asked(), put.token).await?;
        must(&Seen::of(&reply), &put.seen, "the claim repeated after its settlement")?;
    }
    let first = bench.own(id(9)).await?;
    must(bench.withdraw(id(9), first.token).await?, Ownership::Held, "the withdrawal")?;
    let second = bench.own(id(9)).await?;
    let reply = bench.claim(id(9), asked(), first.token).await?;
    must(&Seen::of(&reply), &Seen::InFlight, "the claim repeated when another is in flight")?;
    drop(reply);
    must(second.release().await?, Ownership::Held, "the owner's release after that")
}

pub(super) async fn withdraw_takes_back<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let own = bench.own(id(1)).await?;
    must(bench.withdraw(id(1), own.token).await?, Ownership::Held, "a withdrawal")?;
    bench.looks_up(id(1), None, "after a withdrawal").await?;
    bench.finds(id(1), &Seen::Nothing, "after a withdrawal").await?;
    must(bench.withdraw(id(1), own.token).await?, Ownership::Lost, "the second withdrawal")?;
    must(own.release().await?, Ownership::Lost, "the release of what was withdrawn")
}

pub(super) async fn withdraw_needs_the_claim<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    must(
        bench.withdraw(id(9), Token::mint()).await?,
        Ownership::Lost,
        "a withdrawal where nothing is",
    )?;
    for (number, state) in (0..).zip(State::ALL) {
        let put = bench.put(id(number), state, bench.long()).await?;
        // A token that was refused, and one that was never seen.
        let refused = Token::mint();
        drop(bench.claim(id(number), asked(), refused).await?);
        for foreign in [refused, Token::mint()] {
            let said = bench.withdraw(id(number), foreign).await?;
            must(said, Ownership::Lost, format_args!("a foreign withdrawal, {state:?}"))?;
            bench.finds(id(number), &put.seen, "after a foreign withdrawal").await?;
        }
        if put.own.is_none() {
            let said = bench.withdraw(id(number), put.token).await?;
            must(said, Ownership::Lost, format_args!("the withdrawal of what is {state:?}"))?;
            bench.finds(id(number), &put.seen, "after the withdrawal of what is settled").await?;
        }
    }
    Ok(())
}

pub(super) async fn dropped_claim_ends<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for _ in 0..2 {
        drop(bench.own(id(1)).await?);
        bench.finds_within_the_lease(id(1), &Seen::Nothing, "after its owner is gone").await?;
    }
    Ok(())
}

pub(super) async fn attempts_count_open_ends<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let first = bench.own(id(1)).await?;
    must(first.claim.attempt(), 1, "the first attempt")?;
    must(first.release().await?, Ownership::Held, "the release")?;
    let second = bench.own(id(1)).await?;
    must(second.claim.attempt(), 1, "the attempt after a release")?;
    must(bench.withdraw(id(1), second.token).await?, Ownership::Held, "the withdrawal")?;
    let third = bench.own(id(1)).await?;
    must(third.claim.attempt(), 1, "the attempt after a withdrawal")?;
    let said = third.complete(suite.value(1), suite.ticks(2)).await?;
    must(said, Ownership::Held, "the completion")?;
    suite.pass(4).await;
    let fourth = bench.own(id(1)).await?;
    must(fourth.claim.attempt(), 1, "the attempt after a record has expired")?;
    if !suite.lease.is_zero() {
        drop(fourth);
        // Not by asking in between: whoever asks too late is the next attempt itself.
        let mut waited = std::time::Duration::ZERO;
        while waited <= suite.lease {
            suite.pass(1).await;
            waited += suite.tick;
        }
        let fifth = bench.own(id(1)).await?;
        must(fifth.claim.attempt(), 2, "the attempt after one that was abandoned")?;
    }
    Ok(())
}
