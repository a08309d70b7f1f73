//! What several calls at once may do. Each race is run in both ways: the calls polled in turn, so
//! that a store which works in steps is met between them, and started together on threads, so that
//! one which works at once is met within them.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Barrier},
    task::Poll,
};

use tokio::runtime::Handle;

use super::{
    Broken, Checked, Suite,
    bench::{Bench, ROOMY, Seen, State, Value, asked, id, must, polled},
};
use crate::{
    operation::{OperationId, Token},
    store::{Claim, ClaimReply, ClaimRequest, Completion, Ownership, StoreError, StoreFuture},
};

#[derive(Debug, Clone, Copy)]
enum Race {
    InTurn,
    OnThreads,
}

/// Races are run so often: an interleaving that is rare is met in one of them.
const ROUNDS: u8 = 20;

/// So many run in each.
const RUNNERS: u8 = 6;

/// One call of a race, made when it starts.
type Call<T> = Box<dyn FnOnce() -> StoreFuture<T> + Send>;

impl Race {
    const BOTH: [Self; 2] = [Self::InTurn, Self::OnThreads];

    /// Runs `calls` against each other; their answers, in the order of the calls.
    async fn run<T: Send + 'static>(self, calls: Vec<Call<T>>) -> Checked<Vec<T>> {
        let answers = match self {
            Self::InTurn => in_turn(calls).await,
            Self::OnThreads => on_threads(calls).await?,
        };
        answers.into_iter().map(|answer| answer.map_err(Broken::from)).collect()
    }
}

async fn in_turn<T>(calls: Vec<Call<T>>) -> Vec<Result<T, StoreError>> {
    let mut running: Vec<_> = calls.into_iter().map(|call| call()).collect();
    let mut answers: Vec<_> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (call, answer) in running.iter_mut().zip(&mut answers) {
            if answer.is_none()
                && let Poll::Ready(ready) = Pin::new(call).poll(context)
            {
                *answer = Some(ready);
            }
        }
        if answers.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}

async fn on_threads<T: Send + 'static>(calls: Vec<Call<T>>) -> Checked<Vec<Result<T, StoreError>>> {
    let start = Arc::new(Barrier::new(calls.len()));
    let runtime = Handle::current();
    let running: Vec<_> = calls
        .into_iter()
        .map(|call| {
            let (start, runtime) = (Arc::clone(&start), runtime.clone());
            tokio::task::spawn_blocking(move || {
                start.wait();
                // The call too, not only its answer: a store may do all of its work in there.
                runtime.block_on(async move { call().await })
            })
        })
        .collect();
    let mut answers = Vec::new();
    for call in running {
        answers.push(call.await.map_err(|panic| Broken(format!("a call panicked: {panic}")))?);
    }
    Ok(answers)
}

fn claim<V: Value>(bench: &Bench<'_, V>, id: OperationId) -> Call<ClaimReply<V>> {
    let store = Arc::clone(&bench.store);
    Box::new(move || store.claim(ClaimRequest::new(id, asked(), Token::mint())))
}

fn settle<V: Value>(
    claim: Box<dyn Claim<V>>,
    settlement: impl FnOnce(Box<dyn Claim<V>>) -> StoreFuture<Ownership> + Send + 'static,
) -> Call<Ownership> {
    Box::new(move || settlement(claim))
}

/// One of `replies` has won, and all others are told that it is in flight.
async fn one_has_won<V: Value>(replies: Vec<ClaimReply<V>>, race: Race) -> Checked {
    let mut owners = Vec::new();
    for reply in replies {
        match reply {
            ClaimReply::Mine(claim) => owners.push(claim),
            reply => must(Seen::of(&reply), Seen::InFlight, format_args!("a loser, {race:?}"))?,
        }
    }
    must(owners.len(), 1, format_args!("how many won, {race:?}"))?;
    for owner in owners {
        must(owner.release().await?, Ownership::Held, "the winner's release")?;
    }
    Ok(())
}

pub(super) async fn claims_have_one_owner<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for race in Race::BOTH {
        for number in 0..ROUNDS {
            let calls = (0..RUNNERS).map(|_| claim(&bench, id(number))).collect();
            one_has_won(race.run(calls).await?, race).await?;
        }
    }
    Ok(())
}

pub(super) async fn claims_on_an_ended_entry<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for race in Race::BOTH {
        for state in State::LEFT {
            for _ in 0..4 {
                for number in 0..5 {
                    bench.put(id(number), state, suite.ticks(1)).await?;
                }
                suite.pass(2).await;
                for number in 0..5 {
                    let calls = (0..RUNNERS).map(|_| claim(&bench, id(number))).collect();
                    one_has_won(race.run(calls).await?, race).await?;
                }
            }
        }
    }
    Ok(())
}

/// A call is met after each of its first so many steps.
const STEPS: usize = 12;

pub(super) async fn claim_meets_an_end<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for state in [None, Some(State::Held), Some(State::Recorded)] {
        for steps in 0..STEPS {
            let own = bench.own(id(1)).await?;
            let token = own.token;
            let mut met = claim(&bench, id(1))();
            let early = polled(&mut met, steps).await;
            let is_early = early.is_some();
            let said = match state {
                None => own.release().await?,
                Some(State::Held) => own.hold(bench.long()).await?,
                Some(_) => own.complete(suite.value(1), bench.long()).await?,
            };
            must(said, Ownership::Held, "the end that a claim met")?;
            let reply = match early {
                Some(reply) => reply?,
                None => met.await?,
            };
            let seen = Seen::of(&reply);
            match (reply, state) {
                (ClaimReply::Mine(claim), None) => {
                    bench.finds(id(1), &Seen::InFlight, "a claim that met a release").await?;
                    must(claim.release().await?, Ownership::Held, "its release")?;
                }
                (ClaimReply::Held, Some(State::Held))
                | (ClaimReply::Recorded(_), Some(State::Recorded))
                | (ClaimReply::InFlight(_), _) => {}
                _ => return Err(Broken(format!("a claim met an end ({state:?}): {seen:?}"))),
            }
            if state.is_some() {
                must(bench.expire(id(1), token).await?, Ownership::Held, "clearing it")?;
            }
            bench.finds(id(1), &Seen::Nothing, "after a claim met an end").await?;
            if is_early {
                break;
            }
        }
    }
    Ok(())
}

pub(super) async fn settlements_have_one_winner<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let long = bench.long();
    for race in Race::BOTH {
        for number in 0..ROUNDS {
            let id = id(number);
            let own = bench.own(id).await?;
            let token = own.token;
            let store = Arc::clone(&bench.store);
            let mut calls: Vec<Call<Ownership>> = vec![Box::new(move || store.withdraw(id, token))];
            let mut left = vec![Seen::Nothing];
            let mut claims = vec![own.claim];
            // The same claim twice; that a repetition is recognised is a case of its own.
            if let ClaimReply::Mine(claim) = bench.claim(id, asked(), token).await? {
                claims.push(claim);
            }
            for (number, claim) in (1..).zip(claims) {
                let value = suite.value(number);
                left.push(Seen::Recorded(value.clone()));
                calls
                    .push(settle(claim, move |claim| claim.complete(Completion::new(value, long))));
            }
            // Whoever stands first has the better chance.
            if number % 2 == 0 {
                calls.reverse();
                left.reverse();
            }
            let said = race.run(calls).await?;
            let winners = left.iter().zip(&said).filter(|(_, said)| **said == Ownership::Held);
            let winners: Vec<_> = winners.map(|(left, _)| left).collect();
            must(winners.len(), 1, format_args!("how many settled it, {race:?}"))?;
            for winner in winners {
                bench.finds(id, winner, format_args!("after the race, {race:?}")).await?;
            }

            let ended: Vec<Call<Ownership>> = (0..2)
                .map(|_| {
                    let store = Arc::clone(&bench.store);
                    Box::new(move || store.expire(id, token)) as Call<Ownership>
                })
                .collect();
            let said = race.run(ended).await?;
            let held = said.iter().filter(|said| **said == Ownership::Held).count();
            if held > 1 {
                return Err(Broken(format!("{held} expired one record, {race:?}")));
            }
        }
    }
    Ok(())
}

pub(super) async fn claims_fill_the_room<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(usize::from(RUNNERS) - 2).await;
    for race in Race::BOTH {
        for _ in 0..ROUNDS {
            let calls = (0..RUNNERS).map(|number| claim(&bench, id(number))).collect();
            let mut owners = Vec::new();
            for reply in race.run(calls).await? {
                match reply {
                    ClaimReply::Mine(claim) => owners.push(claim),
                    reply => {
                        must(Seen::of(&reply), Seen::Full, format_args!("one too many, {race:?}"))?;
                    }
                }
            }
            let room = usize::from(RUNNERS) - 2;
            must(owners.len(), room, format_args!("how many were let in, {race:?}"))?;
            for owner in owners {
                must(owner.release().await?, Ownership::Held, "the release by one let in")?;
            }
        }
    }
    Ok(())
}

pub(super) async fn dropped_call_is_all_or_nothing<V: Value>(suite: &Suite<V>) -> Checked {
    // With room for one: whatever a dropped call keeps shows at the next.
    let bench = suite.store(1).await;
    for steps in 0..STEPS {
        let token = Token::mint();
        let mut call = bench.store.claim(ClaimRequest::new(id(1), asked(), token));
        let answered = polled(&mut call, steps).await.is_some();
        drop(call);
        // Written or not, it is taken back as the engine does it.
        let _if_it_was = bench.withdraw(id(1), token).await?;
        let when = format_args!("after a claim dropped at step {steps}");
        bench.finds_within_the_lease(id(2), &Seen::Nothing, when).await?;
        bench.finds_within_the_lease(id(1), &Seen::Nothing, when).await?;
        if answered {
            break;
        }
    }
    for steps in 0..STEPS {
        let own = bench.own(id(1)).await?;
        let token = own.token;
        let mut call = own.claim.complete(Completion::new(suite.value(1), bench.long()));
        let answered = polled(&mut call, steps).await.is_some();
        drop(call);
        let when = format_args!("after a completion dropped at step {steps}");
        match bench.sees(id(1), asked()).await? {
            Seen::Recorded(value) => must(value, suite.value(1), when)?,
            // Before it was written: the claim, or what its drop left.
            Seen::InFlight if !answered => {}
            Seen::Nothing if !answered && suite.lease.is_zero() => {}
            seen => return Err(Broken(format!("{when}: {seen:?} was found"))),
        }
        let _if_it_was = bench.expire(id(1), token).await?;
        let _if_it_was = bench.withdraw(id(1), token).await?;
        bench.finds_within_the_lease(id(2), &Seen::Nothing, when).await?;
        bench.finds_within_the_lease(id(1), &Seen::Nothing, when).await?;
        if answered {
            break;
        }
    }
    Ok(())
}
