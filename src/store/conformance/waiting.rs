//! How those who were told "in flight" learn of the end.

use std::{
    future::{Future, poll_fn},
    task::Poll,
    time::Duration,
};

use super::{
    Broken, Checked, Suite,
    bench::{Bench, Own, ROOMY, Seen, Value, asked, id, must, polled},
};
use crate::{
    operation::{OperationId, Token},
    store::{ClaimReply, Ownership, StoreFuture},
};

/// The ends of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Complete,
    Release,
    Hold,
    Withdraw,
    Drop,
}

impl End {
    const ALL: [Self; 5] = [Self::Complete, Self::Release, Self::Hold, Self::Withdraw, Self::Drop];
}

/// A claim in flight, and several that wait for it.
async fn awaited<V: Value>(
    bench: &Bench<'_, V>,
    id: OperationId,
) -> Checked<(Own<V>, Vec<StoreFuture<()>>)> {
    let own = bench.own(id).await?;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        match bench.claim(id, asked(), Token::mint()).await? {
            ClaimReply::InFlight(ended) => waiters.push(ended),
            reply => must(Seen::of(&reply), Seen::InFlight, "while the claim is in flight")?,
        }
    }
    Ok((own, waiters))
}

/// Ends the claim on `id`; returns what there is to see then.
async fn end<V: Value>(
    bench: &Bench<'_, V>,
    id: OperationId,
    own: Own<V>,
    end: End,
) -> Checked<Seen<V>> {
    let value = bench.suite.value(1);
    let (said, seen) = match end {
        End::Complete => (own.complete(value.clone(), bench.long()).await?, Seen::Recorded(value)),
        End::Release => (own.release().await?, Seen::Nothing),
        End::Hold => (own.hold(bench.long()).await?, Seen::Held),
        End::Withdraw => (bench.withdraw(id, own.token).await?, Seen::Nothing),
        End::Drop => {
            drop(own);
            let mut waited = Duration::ZERO;
            while waited < bench.suite.lease {
                bench.suite.pass(1).await;
                waited += bench.suite.tick;
            }
            (Ownership::Held, Seen::Nothing)
        }
    };
    must(said, Ownership::Held, format_args!("the owner's {end:?}"))?;
    Ok(seen)
}

/// Waits, as the engine does: a waiter that wakes asks again, and sees.
async fn wait<V: Value>(
    bench: &Bench<'_, V>,
    id: OperationId,
    mut ended: StoreFuture<()>,
    promised: &Seen<V>,
    end: End,
) -> Checked {
    let waiting = async {
        loop {
            ended.await?;
            let reply = bench.claim(id, asked(), Token::mint()).await?;
            let seen = Seen::of(&reply);
            match reply {
                ClaimReply::InFlight(again) => ended = again,
                ClaimReply::Mine(claim) => {
                    must(claim.release().await?, Ownership::Held, "the release by a waiter")?;
                    return Checked::Ok(seen);
                }
                _ => return Ok(seen),
            }
            tokio::task::yield_now().await;
        }
    };
    let soon = Duration::from_secs(5) + bench.suite.ticks(10);
    match tokio::time::timeout(soon, waiting).await {
        Ok(seen) => must(&seen?, promised, format_args!("a waiter, woken after {end:?}")),
        Err(_elapsed) => Err(Broken(format!("a waiter does not wake after {end:?}"))),
    }
}

pub(super) async fn every_end_wakes_every_waiter<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, how) in (0..).zip(End::ALL) {
        let id = id(number);
        let (own, waiters) = awaited(&bench, id).await?;
        let mut waiters: Vec<_> = waiters.into_iter().map(Some).collect();
        for waiter in &mut waiters {
            // They wait already when the end comes.
            if let Some(ended) = waiter
                && polled(ended, 2).await.is_some()
            {
                *waiter = None;
            }
        }
        let seen = end(&bench, id, own, how).await?;
        for waiter in waiters {
            // One that woke early has asked again, and waits like the others.
            let waiter = waiter.unwrap_or_else(|| StoreFuture::ready(()));
            wait(&bench, id, waiter, &seen, how).await?;
        }
    }
    Ok(())
}

pub(super) async fn end_before_the_wait_is_seen<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    for (number, how) in (0..).zip(End::ALL) {
        let id = id(number);
        let (own, waiters) = awaited(&bench, id).await?;
        let seen = end(&bench, id, own, how).await?;
        for waiter in waiters {
            wait(&bench, id, waiter, &seen, how).await?;
        }
    }
    Ok(())
}

/// More often than any store has to look, within two ticks.
const TOO_OFTEN: usize = 50;

pub(super) async fn waiting_is_quiet<V: Value>(suite: &Suite<V>) -> Checked {
    let bench = suite.store(ROOMY).await;
    let (own, waiters) = awaited(&bench, id(1)).await?;
    let waiting = waiters.into_iter().map(|mut ended| {
        let bench = &bench;
        Box::pin(async move {
            for _ in 0..TOO_OFTEN {
                ended.await?;
                match bench.claim(id(1), asked(), Token::mint()).await? {
                    ClaimReply::InFlight(again) => ended = again,
                    reply => return must(Seen::of(&reply), Seen::InFlight, "a waiter that woke"),
                }
            }
            Err(Broken(format!("a waiter was woken {TOO_OFTEN} times in two ticks")))
        })
    });
    // Together, for they might wake each other. None of them ends but by a failure.
    let mut waiting: Vec<_> = waiting.collect();
    let any = poll_fn(|context| {
        let polled = waiting.iter_mut().map(|waiter| waiter.as_mut().poll(context));
        polled
            .reduce(|one, other| if one.is_ready() { one } else { other })
            .unwrap_or(Poll::Pending)
    });
    if let Ok(failed) = tokio::time::timeout(suite.ticks(2), any).await {
        failed?;
    }
    drop(waiting);
    must(own.release().await?, Ownership::Held, "the owner's release")
}
