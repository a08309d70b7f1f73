//! The cost of one call, allocations included. A file of its own, because counting them slows
//! down what runs on several threads.

#![allow(dead_code, unreachable_pub, reason = "each bench uses a part of it")]

use std::{
    alloc::System,
    time::{Duration, Instant},
};

use http::Request;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

use crate::common::median;

#[global_allocator]
pub static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Nanoseconds and allocations of one call, one figure a round.
#[derive(Default, Clone)]
pub struct Figures {
    pub nanos: Vec<f64>,
    pub allocations: Vec<f64>,
}

impl Figures {
    pub async fn measure<B>(
        &mut self,
        requests: Vec<Request<B>>,
        mut call: impl AsyncFnMut(Request<B>),
    ) {
        let count = requests.len() as f64;
        let region = Region::new(ALLOCATOR);
        let start = Instant::now();
        for request in requests {
            call(request).await;
        }
        let taken: Duration = start.elapsed();
        self.nanos.push(taken.as_nanos() as f64 / count);
        self.allocations.push(region.change().allocations as f64 / count);
    }

    pub fn nanos(&self) -> f64 {
        median(&self.nanos)
    }

    pub fn allocations(&self) -> f64 {
        median(&self.allocations)
    }
}
