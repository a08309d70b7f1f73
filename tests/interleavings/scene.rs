//! What every scenario needs: threads, a clock that stands still, and a ledger of who executes.

use std::{
    future::Future,
    sync::{Arc, Mutex},
};

use futures_util::FutureExt;
use shuttle::{future::block_on, thread};
use tokio::runtime::{Builder, Runtime};
use tower_idempotency::{
    Fingerprint, MemoryStore, OperationId, Store, Token,
    store::{Claim, ClaimReply, ClaimRequest, Ownership, StoreFuture},
};

/// Plays `scene` in a tokio runtime that nobody drives (unless [`drive`] does) and whose clock
/// stands still: whoever waits has to be woken, for no time-out will do it.
pub(crate) fn with_runtime<T>(scene: impl FnOnce(&Arc<Runtime>) -> T) -> T {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = Arc::new(runtime.expect("a runtime"));
    let _entered = runtime.enter();
    scene(&runtime)
}

/// Runs what was spawned, until `over` says so. By one thread only: another would be parked, and
/// all threads of a schedule with it.
pub(crate) fn drive(runtime: &Runtime, over: impl Fn() -> bool) {
    while !over() {
        turn(runtime);
        thread::yield_now();
    }
    // What the last of the others has left behind.
    turn(runtime);
}

/// Two yields: after each, everything that is ready is run, and who was deferred is woken.
fn turn(runtime: &Runtime) {
    runtime.block_on(async {
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
    });
}

pub(crate) type Job<T> = Box<dyn FnOnce() -> T + Send>;

/// A job, of a type that goes in a list with others.
pub(crate) fn job<T>(job: impl FnOnce() -> T + Send + 'static) -> Job<T> {
    Box::new(job)
}

/// Runs every job in a thread of its own, and gives what they return, in order.
pub(crate) fn all<T: Send + 'static>(jobs: impl IntoIterator<Item = Job<T>>) -> Vec<T> {
    let threads: Vec<_> = jobs.into_iter().map(thread::spawn).collect();
    threads.into_iter().map(|thread| thread.join().expect("a thread of the scenario")).collect()
}

/// Lets others run, in the midst of work.
pub(crate) async fn pause() {
    shuttle::future::yield_now().await;
}

/// Who executes, as an outsider sees it. Its lock is std's, so looking at it is no step.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    executing: usize,
    executions: usize,
    live: usize,
}

impl Ledger {
    fn book<T>(&self, look: impl FnOnce(&mut Book) -> T) -> T {
        look(&mut self.0.lock().expect("nobody panics in here"))
    }

    /// An execution begins; there must be no other.
    pub(crate) fn begin(&self) -> Executing {
        let alone = self.book(|book| {
            book.executing += 1;
            book.executions += 1;
            book.executing == 1
        });
        assert!(alone, "two executions of one operation at once");
        Executing(self.clone())
    }

    /// How many executions have begun.
    pub(crate) fn executions(&self) -> usize {
        self.book(|book| book.executions)
    }

    /// An entry is live from here on; never more than `cap` of them.
    pub(crate) fn enter(&self, cap: usize) {
        let live = self.book(|book| {
            book.live += 1;
            book.live
        });
        assert!(live <= cap, "{live} live entries where {cap} may be");
    }

    /// An entry is about to end.
    pub(crate) fn leave(&self) {
        self.book(|book| book.live -= 1);
    }

    pub(crate) fn live(&self) -> usize {
        self.book(|book| book.live)
    }
}

/// An execution, until it is dropped.
pub(crate) struct Executing(Ledger);

impl Drop for Executing {
    fn drop(&mut self) {
        self.0.book(|book| book.executing -= 1);
    }
}

pub(crate) type Values = MemoryStore<u32>;

pub(crate) fn id(number: u8) -> OperationId {
    OperationId::from_bytes([number; 32])
}

pub(crate) fn request(id: OperationId, token: Token) -> ClaimRequest {
    ClaimRequest::new(id, Fingerprint::of(["what is asked for"]), token)
}

/// The answer of a store that answers at once.
pub(crate) fn now<T>(answer: StoreFuture<T>) -> T {
    answer.now_or_never().expect("an answer at once").expect("no error")
}

/// The claim on what nobody has claimed.
pub(crate) fn mine(store: &Values, id: OperationId, token: Token) -> Box<dyn Claim<u32>> {
    match now(store.claim(request(id, token))) {
        ClaimReply::Mine(claim) => claim,
        other => panic!("{other:?} instead of a claim"),
    }
}

/// Asks until it is decided, waiting for each end of a claim in flight.
pub(crate) fn decided(store: &Values, id: OperationId, token: Token) -> ClaimReply<u32> {
    loop {
        match now(store.claim(request(id, token))) {
            ClaimReply::InFlight(ended) => block_on(ended).expect("no error"),
            decided => return decided,
        }
    }
}

/// How many say that it was theirs.
pub(crate) fn held(said: &[Ownership]) -> usize {
    said.iter().filter(|said| **said == Ownership::Held).count()
}

/// The output of `future`, unless it panics.
pub(crate) fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    block_on(std::panic::AssertUnwindSafe(future).catch_unwind()).ok()
}

/// The key of an operation, by its number.
pub(crate) fn key(number: usize) -> &'static str {
    ["the first key", "the second key", "the third key"][number]
}
