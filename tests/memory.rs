//! What the records take of the machine's memory: by the allocator's count, and as the system sees
//! it. A program of its own, with one test, for both figures are of the whole process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{alloc::System, convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody, scope};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// What the default budget of stored bytes is.
const STORED_BYTES: usize = 256 * MIB;

/// How many small ones.
const ENTRIES: usize = 10_000;

const RETENTION: Duration = Duration::from_secs(60);

/// How many bytes are allocated now that were not when `since` began.
fn allocated(since: &Region<'_, System>) -> usize {
    let change = since.change();
    change.bytes_allocated.saturating_sub(change.bytes_deallocated)
}

/// The memory that the system has given to this process, where it tells.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok().map(|kib| kib * KIB)
}

/// Answers with as many bytes as the path says.
async fn answer(
    request: Request<RequestBody<Full<Bytes>>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let length = request.uri().path()[1..].parse().unwrap();
    Ok(Response::new(Full::from(vec![b'x'; length])))
}

/// Set where this program runs as it is to be measured.
const MEASURED: &str = "TOWER_IDEMPOTENCY_MEASURED";

#[test]
fn a_thousand_records_of_the_largest_size_stay_within_the_budget_and_give_it_back() {
    if std::env::var_os(MEASURED).is_none() {
        // Again, with an allocator that gives large pieces back to the system: glibc's keeps them
        // for itself by default. Others do not know the variable.
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--nocapture", "--test-threads=1"])
            .envs([(MEASURED, "1"), ("MALLOC_MMAP_THRESHOLD_", "65536")])
            .status();
        assert!(status.unwrap().success());
        return;
    }
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(measure());
}

async fn measure() {
    let store = MemoryStore::new();
    let layer =
        IdempotencyLayer::new(scope::single_tenant()).store(store.clone()).retention(RETENTION);
    let service = layer.layer(service_fn(answer));
    let send = async |key: String, length: usize| {
        let request = Request::post(format!("/{length}")).header("idempotency-key", key);
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let Ok(response) = service.clone().oneshot(request).await;
        let status = response.status();
        drop(response.into_body().collect().await);
        status
    };

    // What is made once and stays is there from here on.
    assert_eq!(send("before".to_owned(), MIB).await, 200);
    tokio::time::advance(RETENTION).await;
    assert!(store.is_empty());
    let (before, resident_before) = (Region::new(ALLOCATOR), resident());

    for round in 0..3 {
        let mut recorded = 0;
        for key in 0..1_000 {
            match send(format!("{round}-{key}"), MIB).await {
                StatusCode::OK => recorded += 1,
                status => assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE),
            }
        }
        // Not one was let in at or over the budget; one was running when it was reached.
        assert_eq!((recorded, store.len()), (STORED_BYTES / MIB, STORED_BYTES / MIB));
        assert!((STORED_BYTES..STORED_BYTES + MIB).contains(&store.bytes()));
        let all = allocated(&before);
        assert!((STORED_BYTES..STORED_BYTES + 2 * MIB).contains(&all), "{round}: {all}");
        let grown = resident().zip(resident_before).map(|(now, before)| now.saturating_sub(before));
        // The system's figure has the allocator's waste in it.
        assert!(grown.is_none_or(|grown| grown < STORED_BYTES + 64 * MIB), "{round}: {grown:?}");

        tokio::time::advance(RETENTION).await;
        assert!(store.is_empty());
        let left = allocated(&before);
        assert!(left < 256 * KIB, "{round}: {left}");
        let grown = resident().zip(resident_before).map(|(now, before)| now.saturating_sub(before));
        assert!(grown.is_none_or(|grown| grown < 64 * MIB), "{round}: {grown:?}");
    }

    // What an entry takes besides the bytes that it counts for.
    drop(store.clone().capacity(ENTRIES));
    for key in 0..ENTRIES {
        assert_eq!(send(format!("small-{key}"), 0).await, 200);
    }
    let besides = (allocated(&before) - store.bytes()) / ENTRIES;
    // The README says about 800.
    assert!((600..900).contains(&besides), "{besides}");
}
