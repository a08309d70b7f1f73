//! What is still running. In: a [`Ticket`] per execution; out: a wait for the last of them, for a
//! shutdown that loses nothing.

use std::{sync::Arc, time::Duration};

use tokio::sync::Notify;

use crate::sync::atomic::{AtomicUsize, Ordering};

/// The executions between their begin and the end of their settlement. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Running(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    running: AtomicUsize,
    none_left: Notify,
}

impl Running {
    pub(super) fn enter(&self) -> Ticket {
        self.0.running.fetch_add(1, Ordering::AcqRel);
        Ticket(Arc::clone(&self.0))
    }

    /// Waits for all of them, at most for `timeout`; returns how many were left.
    pub(super) async fn drained(&self, timeout: Duration) -> usize {
        let none_left = async {
            loop {
                // Before the look, or the last one could end in between.
                let none_left = self.0.none_left.notified();
                if self.count() == 0 {
                    break;
                }
                none_left.await;
            }
        };
        match tokio::time::timeout(timeout, none_left).await {
            Ok(()) => 0,
            Err(_elapsed) => self.count(),
        }
    }

    fn count(&self) -> usize {
        self.0.running.load(Ordering::Acquire)
    }
}

/// One execution that is running.
#[derive(Debug)]
pub(super) struct Ticket(Arc<Count>);

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none_left.notify_waiters();
        }
    }
}
