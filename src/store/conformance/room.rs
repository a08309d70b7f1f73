//! How many entries a store takes, and what it says to one more.

use std::time::Duration;

use super::{
    Broken, Checked, Suite,
    bench::{Bench, Own, Seen, State, Value, asked, id, must, other},
};
use crate::{
    operation::Token,
    store::{ClaimReply, Ownership},
};

/// An id that is not among those that fill a store.
const ONE_MORE: u8 = 100;

/// Fills `bench` with one entry in each state, to live for ever, and returns what is to be seen.
async fn fill<V: Value>(bench: &Bench<'_, V>) -> Checked<(Own<V>, [Seen<V>; 3])> {
    let [in_flight, held, recorded] = State::ALL;
    let in_flight = bench.put(id(0), in_flight, bench.long()).await?;
    let held = bench.put(id(1), held, bench.long()).await?;
    let recorded = bench.put(id(2), recorded, bench.long()).await?;
    let own = in_flight.own.ok_or_else(|| Broken("a claim in flight has no owner".to_owned()))?;
    Ok((own, [in_flight.seen, held.seen, recorded.seen]))
}

pub(super) async fn capacity_is_hard<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(3).await;
    let (own, seen) = fill(&bench).await?;
    for number in ONE_MORE..ONE_MORE + 6 {
        bench.finds(id(number), &Seen::Full, "a claim on a full store").await?;
    }
    for (number, seen) in (0..).zip(&seen) {
        bench.finds(id(number), seen, "after others found no room").await?;
    }
    must(own.release().await?, Ownership::Held, "the release after others found no room")
}

pub(super) async fn every_state_takes_room<V: Value>(suite: &Suite<V>) -> Checked {
    for state in State::ALL {
        let bench = suite.store(2).await;
        let first = bench.put(id(0), state, bench.long()).await?;
        bench.finds(id(ONE_MORE), &Seen::Nothing, "with room for one more").await?;
        let second = bench.put(id(1), state, bench.long()).await?;
        let when = format_args!("with two that are {state:?} and room for two");
        bench.finds(id(ONE_MORE), &Seen::Full, when).await?;
        drop((first, second));
    }
    Ok(())
}

/// The ends of an entry.
#[derive(Debug, Clone, Copy)]
enum End {
    Release,
    Withdraw,
    Drop,
    NoRetention,
    Expiry(State),
    Expire(State),
    RetainForNoTime(State),
}

const ENDS: [End; 10] = [
    End::Release,
    End::Withdraw,
    End::Drop,
    End::NoRetention,
    End::Expiry(State::Held),
    End::Expiry(State::Recorded),
    End::Expire(State::Held),
    End::Expire(State::Recorded),
    End::RetainForNoTime(State::Held),
    End::RetainForNoTime(State::Recorded),
];

pub(super) async fn every_end_gives_room_back<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(2).await;
    let stays = bench.own(id(0)).await?;
    // Twice: an end that gives back too little or too much shows at the latest then.
    for (number, end) in (1..).zip(ENDS.into_iter().chain(ENDS)) {
        let id_of_it = id(number);
        let said = match end {
            End::Release => bench.own(id_of_it).await?.release().await?,
            End::Withdraw => {
                let own = bench.own(id_of_it).await?;
                let said = bench.withdraw(id_of_it, own.token).await?;
                must(own.release().await?, Ownership::Lost, "releasing what was withdrawn")?;
                said
            }
            End::Drop => {
                drop(bench.own(id_of_it).await?);
                bench.finds_within_the_lease(id(ONE_MORE), &Seen::Nothing, "after a drop").await?;
                Ownership::Held
            }
            End::NoRetention => {
                bench.own(id_of_it).await?.complete(suite.value(1), Duration::ZERO).await?
            }
            End::Expiry(state) => {
                bench.put(id_of_it, state, suite.ticks(2)).await?;
                bench.finds(id(ONE_MORE), &Seen::Full, "until it expires").await?;
                suite.pass(4).await;
                Ownership::Held
            }
            End::Expire(state) => {
                let put = bench.put(id_of_it, state, bench.long()).await?;
                bench.expire(id_of_it, put.token).await?
            }
            End::RetainForNoTime(state) => {
                let put = bench.put(id_of_it, state, bench.long()).await?;
                bench.retain(id_of_it, put.token, Duration::ZERO).await?
            }
        };
        must(said, Ownership::Held, format_args!("the owner's {end:?}"))?;

        let admitted = bench.own(id(ONE_MORE)).await?;
        let when = format_args!("after {end:?} and one that took its room");
        bench.finds(id(ONE_MORE + 1), &Seen::Full, when).await?;
        must(admitted.release().await?, Ownership::Held, "its release")?;
    }
    must(stays.release().await?, Ownership::Held, "the release of the one that stayed")
}

pub(super) async fn refusal_leaves_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(1).await;
    let own = bench.own(id(0)).await?;
    let refused = Token::mint();
    let reply = bench.claim(id(ONE_MORE), asked(), refused).await?;
    must(Seen::of(&reply), Seen::Full, "a claim on a full store")?;
    drop(reply);
    bench.looks_up(id(ONE_MORE), None, "after it was refused").await?;
    let said = bench.withdraw(id(ONE_MORE), refused).await?;
    must(said, Ownership::Lost, "withdrawing what was refused")?;
    must(own.release().await?, Ownership::Held, "the release that makes room")?;
    // Whoever asks now, and for whatever.
    let seen = bench.sees(id(ONE_MORE), other()).await?;
    must(seen, Seen::Nothing, "an id that was refused, when there is room")
}

pub(super) async fn room_comes_when_it_says<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(3).await;
    // The earliest is neither the first nor the last that came.
    bench.put(id(0), State::Recorded, bench.long()).await?;
    bench.put(id(1), State::Held, suite.ticks(6)).await?;
    bench.put(id(2), State::Recorded, bench.long()).await?;
    suite.pass(1).await;
    match bench.claim(id(ONE_MORE), asked(), Token::mint()).await? {
        ClaimReply::Full { room_in: Some(room_in) } => {
            if room_in > suite.ticks(5) {
                let left = suite.ticks(5);
                return Err(Broken(format!("there is room in {left:?}, not {room_in:?}")));
            }
            (suite.pass)(room_in + suite.tick).await;
            bench.finds(id(ONE_MORE), &Seen::Nothing, "when room was said to come").await
        }
        // It need not know.
        ClaimReply::Full { room_in: None } => Ok(()),
        reply => must(Seen::of(&reply), Seen::Full, "a claim on a full store"),
    }
}

pub(super) async fn full_store_answers<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(3).await;
    let (own, seen) = fill(&bench).await?;
    for (number, seen) in (0..).zip(&seen) {
        bench.looks_up(id(number), Some(asked()), "on a full store").await?;
        bench.finds(id(number), seen, "on a full store").await?;
        let conflict = bench.sees(id(number), other()).await?;
        must(conflict, Seen::Conflict, "another fingerprint on a full store")?;
    }
    let repeated = bench.claim(id(0), asked(), own.token).await?;
    must(Seen::of(&repeated), Seen::Nothing, "the claim repeated on a full store")?;
    let said = own.complete(suite.value(3), bench.long()).await?;
    must(said, Ownership::Held, "a completion on a full store")?;
    bench.finds(id(0), &Seen::Recorded(suite.value(3)), "after that completion").await?;
    drop(repeated);
    bench.finds(id(0), &Seen::Recorded(suite.value(3)), "after the repetition was dropped").await
}
