//! All that can be set, with every default in one place, and all that is shared. Set by
//! [`layer`](crate::IdempotencyLayer), read by everybody after it.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, Method, request, response};

use crate::{
    buffer::Buffer,
    capture::Capture,
    disposition::Dispositions,
    engine::Engine,
    fingerprint::Counts,
    guard::Guard,
    headers::HeaderPolicy,
    intake::Limits,
    key::KeyFrom,
    record::StoredResponse,
    refusal::Rendering,
    scope::ScopeOf,
    store::MemoryStore,
    sync::atomic::{AtomicU8, Ordering},
};

/// Does the layer do what it is for? Switched at run time, over all clones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
#[repr(u8)]
pub enum Mode {
    /// Yes.
    #[default]
    Enforce,
    /// It only watches: entries and dispositions are as they would be, but nothing is refused or
    /// replayed and every request runs, with a [`Handle`](crate::Handle) that says "lost" where it
    /// runs beside an entry. Nobody waits: who would have is counted as in progress. For a first
    /// look at real traffic.
    Shadow,
    /// No: every request passes through unprotected. A keyed one still brings its handler the key
    /// and a [`Handle`](crate::Handle), one that says "lost": switching off breaks no handler.
    Off,
}

/// A [`Mode`] that can be switched. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModeSwitch(Arc<AtomicU8>);

impl ModeSwitch {
    pub(crate) fn get(&self) -> Mode {
        match self.0.load(Ordering::Relaxed) {
            0 => Mode::Enforce,
            1 => Mode::Shadow,
            _ => Mode::Off,
        }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.0.store(mode as u8, Ordering::Relaxed);
    }
}

/// All that is set, and all that is shared.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) mode: ModeSwitch,
    pub(crate) methods: Arc<[Method]>,
    pub(crate) only: Option<Arc<Only>>,
    pub(crate) key: KeyFrom,
    pub(crate) key_required: bool,
    pub(crate) scope: Arc<ScopeOf>,
    pub(crate) guard: Option<Guard>,
    pub(crate) request_limits: Limits,
    pub(crate) counts: Counts,
    pub(crate) capture: Capture,
    pub(crate) on_replay: Option<Arc<OnReplay>>,
    pub(crate) rendering: Rendering,
    pub(crate) engine: Engine<StoredResponse>,
    pub(crate) dispositions: Dispositions,
}

/// Is this request one to guard?
pub(crate) type Only = dyn Fn(&request::Parts) -> bool + Send + Sync;

/// Rewrites the head of a replay.
pub(crate) type OnReplay = dyn Fn(&request::Parts, &mut response::Parts) + Send + Sync;

impl Settings {
    /// Every default, in one place.
    pub(crate) fn new(scope: Arc<ScopeOf>) -> Self {
        const MIB: usize = 1024 * 1024;
        const MINUTE: Duration = Duration::from_secs(60);
        Self {
            mode: ModeSwitch::default(),
            methods: Arc::new([Method::POST, Method::PATCH]),
            only: None,
            key: KeyFrom {
                header: HeaderName::from_static("idempotency-key"),
                strict: false,
                own: None,
            },
            key_required: false,
            scope,
            guard: None,
            request_limits: Limits {
                bytes: MIB,
                idle: Duration::from_secs(15),
                total: MINUTE,
                buffer: Buffer::new(64 * MIB),
            },
            counts: Counts::default(),
            capture: Capture {
                limit: MIB,
                streams: true,
                headers: HeaderPolicy::default(),
                policy: None,
            },
            on_replay: None,
            rendering: Rendering::default(),
            engine: Engine::new(MemoryStore::new()),
            dispositions: Dispositions::default(),
        }
    }

    /// Checks what only goes together or not at all.
    ///
    /// # Panics
    ///
    /// With a message that names the settings.
    #[track_caller]
    pub(crate) fn validate(&self) {
        self.engine.rules.validate();
        let (request, buffer) = (self.request_limits.bytes, self.request_limits.buffer.limit);
        assert!(
            request <= buffer,
            "buffered_bytes: {buffer} bytes have no room for one body of request_limit ({request})"
        );
    }
}

impl fmt::Debug for Settings {
    /// By the names of the setters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn own<T>(hook: Option<&T>) -> Option<fmt::Arguments<'_>> {
            hook.map(|_| format_args!(".."))
        }
        let Self { key, request_limits, counts, capture, rendering, engine, .. } = self;
        let rules = &engine.rules;
        f.debug_struct("IdempotencyLayer")
            .field("mode", &self.mode.get())
            .field("methods", &self.methods)
            .field("only", &own(self.only.as_ref()))
            .field("key_header", &key.header)
            .field("key_strict", &key.strict)
            .field("key_required", &self.key_required)
            .field("key", &own(key.own.as_ref()))
            .field("fingerprint_headers", &counts.headers())
            .field("fingerprint_json", &counts.json())
            .field("fingerprint", &own(counts.own.as_ref()))
            .field("guard", &self.guard)
            .field("request_limit", &request_limits.bytes)
            .field("body_idle_timeout", &request_limits.idle)
            .field("body_timeout", &request_limits.total)
            .field("buffered_bytes", &request_limits.buffer.limit)
            .field("response_limit", &capture.limit)
            .field("record_streams", &capture.streams)
            .field("outcome_of", &own(capture.policy.as_ref()))
            .field("keep_header", &own(capture.headers.own.as_ref()))
            .field("on_replay", &own(self.on_replay.as_ref()))
            .field("refusals", &own(rendering.renderer.as_ref()))
            .field("refusal_status", &rendering.statuses)
            .field("documentation", &rendering.documentation)
            .field("retention", &rules.retention)
            .field("in_flight", &rules.in_flight)
            .field("waiters_per_operation", &rules.waiters_per_operation)
            .field("waiters", &rules.waiters)
            .field("on_failure", &rules.on_failure)
            .field("on_leave", &rules.on_leave)
            .field("finish_within", &rules.finish_within)
            .field("detach_with", &own(engine.detach_with.as_ref()))
            .field("store_timeout", &rules.store_timeout)
            .finish_non_exhaustive()
    }
}
