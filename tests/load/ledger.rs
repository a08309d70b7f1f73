//! What really happened: how often each key's work ran, how it ended, and what callers were told of
//! it. Whatever breaks a promise is written down here.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
};

#[derive(Default)]
pub(crate) struct Ledger {
    keys: Mutex<HashMap<String, Key>>,
    broken: Mutex<Vec<String>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

#[derive(Default)]
struct Key {
    executions: u32,
    running: bool,
    /// The execution that succeeded.
    done: Option<u32>,
    /// Has a caller been given the answer as the one of its own execution?
    told: bool,
}

impl Ledger {
    fn keys(&self) -> MutexGuard<'_, HashMap<String, Key>> {
        self.keys.lock().unwrap()
    }

    /// Writes down a broken promise.
    pub(crate) fn broken(&self, what: String) {
        self.broken.lock().unwrap().push(what);
    }

    pub(crate) fn is_broken(&self) -> bool {
        !self.broken.lock().unwrap().is_empty()
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.counts.lock().unwrap().entry(what).or_default() += 1;
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.counts.lock().unwrap().clone()
    }

    pub(crate) fn begin(self: &Arc<Self>, name: &str) -> Execution {
        let mut keys = self.keys();
        let key = keys.entry(name.to_owned()).or_default();
        key.executions += 1;
        let number = key.executions;
        if std::mem::replace(&mut key.running, true) {
            self.broken(format!("two executions of {name} at once"));
        }
        if let Some(done) = key.done {
            self.broken(format!("execution {number} of {name}, although {done} had succeeded"));
        }
        Execution { ledger: Arc::clone(self), key: name.to_owned(), number, ended: false }
    }

    /// A caller has the whole answer of an execution that succeeded.
    pub(crate) fn told(&self, name: &str, execution: u32, replayed: bool) {
        let mut keys = self.keys();
        let key = keys.entry(name.to_owned()).or_default();
        if key.done != Some(execution) {
            let done = key.done;
            self.broken(format!("told of execution {execution} of {name}, but done is {done:?}"));
        }
        if !replayed && std::mem::replace(&mut key.told, true) {
            self.broken(format!("two callers were told that they executed {name}"));
        }
    }

    /// Begins anew, and returns how many keys' work was done, and what was broken.
    pub(crate) fn close(&self) -> (usize, Vec<String>) {
        let done = self.keys().drain().filter(|(_, key)| key.done.is_some()).count();
        (done, std::mem::take(&mut self.broken.lock().unwrap()))
    }
}

/// One execution. Dropped before it has ended by itself, it was cut off; that must not happen, for
/// work goes on when its caller leaves.
pub(crate) struct Execution {
    ledger: Arc<Ledger>,
    key: String,
    pub(crate) number: u32,
    ended: bool,
}

impl Execution {
    /// It ends by itself; nothing, where there is no key.
    pub(crate) fn end(execution: Option<Self>, succeeds: bool) {
        let Some(mut execution) = execution else { return };
        execution.ended = true;
        if let Some(key) = execution.ledger.keys().get_mut(&execution.key)
            && succeeds
        {
            key.done = Some(execution.number);
        }
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        if let Some(key) = self.ledger.keys().get_mut(&self.key) {
            key.running = false;
        }
        if !self.ended {
            self.ledger.broken(format!("execution {} of {} was cut off", self.number, self.key));
        }
    }
}
