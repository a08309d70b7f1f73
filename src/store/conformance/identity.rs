//! Which entry is asked about, and whether it is the same that is asked for.

use super::{
    Checked, Suite,
    bench::{ROOMY, Seen, State, Value, asked, id, must, other},
};
use crate::{
    fingerprint::Fingerprint,
    operation::{OperationId, Token},
    store::{ClaimReply, Completion, Ownership},
};

pub(super) async fn conflict_comes_first<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::ALL) {
        let _put = bench.put(id(number), state, bench.long()).await?;
        let seen = bench.sees(id(number), other()).await?;
        must(seen, Seen::Conflict, format_args!("with an entry that is {state:?}"))?;
    }
    Ok(())
}

pub(super) async fn conflict_changes_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, state) in (0..).zip(State::ALL) {
        let id = id(number);
        let put = bench.put(id, state, suite.ticks(6)).await?;
        let when = format_args!("after a conflict with what is {state:?}");
        for _ in 0..2 {
            suite.pass(1).await;
            drop(bench.claim(id, other(), Token::mint()).await?);
            bench.looks_up(id, Some(asked()), when).await?;
            bench.finds(id, &put.seen, when).await?;
        }
        if let Some(own) = put.own {
            must(own.release().await?, Ownership::Held, "the owner's release after a conflict")?;
        } else {
            suite.pass(5).await;
            bench.finds(id, &Seen::Nothing, "when its own retention is over").await?;
        }
    }
    Ok(())
}

/// Fingerprints of these two digests.
fn fingerprint(exact: u8, meaning: u8) -> Fingerprint {
    let mut bytes = [exact; 64];
    bytes[32..].fill(meaning);
    Fingerprint::from_bytes(&bytes)
}

pub(super) async fn meaning_decides<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let token = Token::mint();
    let ClaimReply::Mine(_claim) = bench.claim(id(1), fingerprint(1, 2), token).await? else {
        return Ok(());
    };
    let seen = bench.sees(id(1), fingerprint(3, 2)).await?;
    must(seen, Seen::InFlight, "other bytes of the same meaning")?;
    let seen = bench.sees(id(1), fingerprint(1, 4)).await?;
    must(seen, Seen::Conflict, "the same bytes with another meaning")
}

/// Ids that differ in one byte each, among them such as are no text.
fn close_ids() -> Vec<OperationId> {
    let mut ids: Vec<_> = [0, 1, b'a', b'A', 0x80, 0xFE, 0xFF].map(|byte| [byte; 32]).into();
    for position in 0..32 {
        for byte in [0xFE, 0xFF] {
            let mut bytes = [b'a'; 32];
            bytes[position] = byte;
            ids.push(bytes);
        }
    }
    ids.into_iter().map(OperationId::from_bytes).collect()
}

pub(super) async fn ids_never_meet<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, id) in (0..).zip(close_ids()) {
        bench.finds(id, &Seen::Nothing, "an id that was not used yet").await?;
        let said = bench.own(id).await?.complete(suite.value(number), bench.long()).await?;
        must(said, Ownership::Held, "its completion")?;
    }
    for (number, id) in (0..).zip(close_ids()) {
        let recorded = Seen::Recorded(suite.value(number));
        bench.finds(id, &recorded, "an id among many").await?;
    }
    Ok(())
}

pub(super) async fn ended_entry_is_no_conflict<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let released = bench.own(id(1)).await?;
    must(released.release().await?, Ownership::Held, "the release")?;
    for (number, state) in (2..).zip(State::LEFT) {
        bench.put(id(number), state, suite.ticks(2)).await?;
    }
    suite.pass(4).await;
    for number in 1..4 {
        let seen = bench.sees(id(number), other()).await?;
        must(seen, Seen::Nothing, "another fingerprint after the entry has ended")?;
    }
    Ok(())
}

pub(super) async fn lookup_agrees<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    bench.looks_up(id(1), None, "with nothing there").await?;

    // Of other bytes than meaning: both are kept.
    let whole = fingerprint(1, 2);
    let token = Token::mint();
    if let ClaimReply::Mine(claim) = bench.claim(id(1), whole, token).await? {
        bench.looks_up(id(1), Some(whole), "with a claim in flight").await?;
        let said = claim.complete(Completion::new(suite.value(1), suite.ticks(4))).await?;
        must(said, Ownership::Held, "the completion")?;
        bench.looks_up(id(1), Some(whole), "with a record").await?;
        suite.pass(6).await;
        bench.looks_up(id(1), None, "with a record that has expired").await?;
    }
    bench.put(id(2), State::Held, suite.ticks(4)).await?;
    bench.looks_up(id(2), Some(asked()), "with a held entry").await?;
    bench.looks_up(id(3), None, "another id").await?;
    suite.pass(6).await;
    bench.looks_up(id(2), None, "with a held entry that has ended").await
}

pub(super) async fn lookup_changes_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(1).await;
    // Among them more ids than there is room for.
    for number in 1..4 {
        let _advisory = bench.store.lookup(id(number)).await?;
    }
    for state in State::ALL {
        let put = bench.put(id(1), state, suite.ticks(4)).await?;
        for _ in 0..3 {
            let _advisory = bench.store.lookup(id(1)).await?;
        }
        bench.finds(id(1), &put.seen, "after look-ups").await?;
        match put.own {
            Some(own) => must(own.release().await?, Ownership::Held, "its owner's release")?,
            None => suite.pass(6).await,
        }
    }
    Ok(())
}

/// A store need not recall anything; so what is promised is only what it may.
pub(super) async fn recall_agrees<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let recalls = |id, asked: Fingerprint, promised: Option<u8>, when: &str| match bench
        .store
        .recall(&id, asked.exact())
    {
        None => Ok(()),
        recalled => must(recalled, promised.map(|number| suite.value(number)), when),
    };
    let (exactly, respelt) = (fingerprint(1, 3), fingerprint(2, 3));
    recalls(id(1), exactly, None, "a recall with nothing there")?;
    if let ClaimReply::Mine(claim) = bench.claim(id(1), exactly, Token::mint()).await? {
        recalls(id(1), exactly, None, "a recall with a claim in flight")?;
        let said = claim.complete(Completion::new(suite.value(1), suite.ticks(4))).await?;
        must(said, Ownership::Held, "the completion")?;
        recalls(id(1), exactly, Some(1), "a recall with a record")?;
        recalls(id(1), respelt, None, "a recall with other bytes of the same meaning")?;
        recalls(id(2), exactly, None, "a recall of another id")?;
        suite.pass(6).await;
        recalls(id(1), exactly, None, "a recall with a record that has ended")?;
    }
    for (number, state) in (3..).zip(State::LEFT) {
        let recorded = (state == State::Recorded).then_some(1);
        let put = bench.put(id(number), state, suite.ticks(2)).await?;
        recalls(id(number), asked(), recorded, "a recall with what a claim left")?;
        let said = bench.retain(id(number), put.token, bench.long()).await?;
        must(said, Ownership::Held, "retaining for longer")?;
        suite.pass(4).await;
        recalls(id(number), asked(), recorded, "a recall with what was retained for longer")?;
        let said = bench.retain(id(number), put.token, suite.ticks(1)).await?;
        must(said, Ownership::Held, "retaining for less")?;
        suite.pass(2).await;
        recalls(id(number), asked(), None, "a recall with what was retained for less")?;
        let put = bench.put(id(number), state, bench.long()).await?;
        must(bench.expire(id(number), put.token).await?, Ownership::Held, "expiring it")?;
        recalls(id(number), asked(), None, "a recall with what was expired")?;
    }
    Ok(())
}
