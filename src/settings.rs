//! All that can be set, with every default in one place, and all that is shared. Set by
//! [`layer`](crate::IdempotencyLayer), read by everybody after it.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, Method};

use crate::{
    capture::Capture,
    disposition::Dispositions,
    engine::{Engine, InFlight, OnFailure, OnLeave, Rules},
    guard::Guard,
    headers::HeaderPolicy,
    intake::Limits,
    record::StoredResponse,
    scope::ScopeOf,
    store::MemoryStore,
};

/// All that is set, and all that is shared.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) scope: Arc<ScopeOf>,
    pub(crate) methods: Arc<[Method]>,
    pub(crate) key_header: HeaderName,
    pub(crate) key_required: bool,
    pub(crate) key_strict: bool,
    pub(crate) guard: Option<Guard>,
    pub(crate) request_limits: Limits,
    pub(crate) fingerprint_headers: Arc<[HeaderName]>,
    pub(crate) capture: Capture,
    pub(crate) engine: Engine<StoredResponse>,
    pub(crate) dispositions: Dispositions,
}

impl Settings {
    /// Every default, in one place.
    pub(crate) fn new(scope: Arc<ScopeOf>) -> Self {
        const MIB: usize = 1024 * 1024;
        const MINUTE: Duration = Duration::from_secs(60);
        let rules = Rules {
            on_failure: OnFailure::Release,
            on_leave: OnLeave::Finish,
            in_flight: InFlight::Wait(Duration::from_secs(10)),
            retention: Duration::from_secs(60 * 60),
            finish_within: Duration::from_secs(5 * 60),
            store_timeout: Duration::from_secs(1),
            waiters_per_operation: 16,
            waiters: 1_024,
        };
        Self {
            scope,
            methods: Arc::new([Method::POST, Method::PATCH]),
            key_header: HeaderName::from_static("idempotency-key"),
            key_required: false,
            key_strict: false,
            guard: None,
            request_limits: Limits { bytes: MIB, idle: Duration::from_secs(15), total: MINUTE },
            fingerprint_headers: Arc::new([]),
            capture: Capture {
                limit: MIB,
                streams: true,
                headers: HeaderPolicy::default(),
                policy: None,
            },
            engine: Engine::new(Arc::new(MemoryStore::new()), rules),
            dispositions: Dispositions::default(),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("methods", &self.methods)
            .field("key_header", &self.key_header)
            .field("key_required", &self.key_required)
            .field("key_strict", &self.key_strict)
            .field("guard", &self.guard)
            .field("request_limits", &self.request_limits)
            .field("fingerprint_headers", &self.fingerprint_headers)
            .field("response_limit", &self.capture.limit)
            .field("record_streams", &self.capture.streams)
            .field("rules", &self.engine.rules)
            .finish_non_exhaustive()
    }
}
