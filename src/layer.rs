//! The layer, and its setters by what they are about. In: a scope and whatever else is set; out: an
//! [`Idempotency`] around each inner service, all of them one: every clone, route and connection
//! sees the same entries. A request enters in [`service`](crate::Idempotency).

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;
use tower_layer::Layer;

mod execution;
mod presets;
mod request;
mod response;

use crate::{
    disposition::Dispositions,
    engine::assert_longer_than_zero,
    notice,
    record::StoredResponse,
    scope::Scope,
    service::Idempotency,
    settings::{Mode, ModeSwitch, Settings},
    store::Store,
};

/// Makes retries safe: the first request with an idempotency key runs, and every repeat gets its
/// answer again.
///
/// One line in an axum, tonic or plain tower stack. The state is in the layer: its clones, and all
/// services made from them, share one store, one count and one drain; a setter changes only the
/// layer it is called on.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, scope};
///
/// #[derive(Clone)]
/// struct Tenant(String); // put into the request's extensions by your authentication
///
/// impl AsRef<str> for Tenant {
///     fn as_ref(&self) -> &str {
///         &self.0
///     }
/// }
///
/// // 10 keyed requests a second, kept for an hour: 36,000 entries.
/// let layer = IdempotencyLayer::new(scope::from_extension::<Tenant>())
///     .store(MemoryStore::new().capacity(36_000))
///     .retention(Duration::from_secs(60 * 60));
/// # drop(layer);
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put around a service"]
pub struct IdempotencyLayer {
    settings: Arc<Settings>,
}

impl IdempotencyLayer {
    /// A layer with every default, whose keys are unique within what `scope` says.
    ///
    /// `scope` is given the head of each keyed request: ready-made ones are in
    /// [`scope`](mod@crate::scope); a closure `|parts| …` needs no annotations. Where it says `None`
    /// the request is refused with 403.
    pub fn new<F>(scope: F) -> Self
    where
        F: Fn(&Parts) -> Option<Scope> + Send + Sync + 'static,
    {
        Self { settings: Arc::new(Settings::new(Arc::new(scope))) }
    }

    fn set(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        set(Arc::make_mut(&mut self.settings));
        self
    }

    /// Where entries live. Default: a [`MemoryStore`](crate::MemoryStore) of this layer's own, with room for 1,000
    /// live entries.
    pub fn store(self, store: impl Store<StoredResponse>) -> Self {
        self.set(|settings| settings.engine.store = Arc::new(store))
    }

    /// How long a record lives, counted from completion and never extended by replays. Default: 1
    /// hour. Handlers can choose another for their own record.
    ///
    /// # Panics
    ///
    /// If it is zero.
    #[track_caller]
    pub fn retention(self, retention: Duration) -> Self {
        assert_longer_than_zero("retention", retention);
        self.set(|settings| settings.engine.rules.retention = retention)
    }

    /// Does the layer do what it is for? Default: [`Mode::Enforce`]. This layer and the clones that
    /// are made of it from here on can be switched together later ([`set_mode`](Self::set_mode)).
    pub fn mode(self, mode: Mode) -> Self {
        if mode != Mode::Enforce {
            notice::switched(&mode);
        }
        let switch = ModeSwitch::default();
        switch.set(mode);
        self.set(|settings| settings.mode = switch)
    }

    /// Switches the mode at run time, for this layer, its clones and their services. Requests that
    /// are on their way go on as they began.
    pub fn set_mode(&self, mode: Mode) {
        notice::switched(&mode);
        self.settings.mode.set(mode);
    }

    /// How often each [`Disposition`](crate::Disposition) was reached, counted over all clones of
    /// this layer.
    #[must_use]
    pub fn dispositions(&self) -> Dispositions {
        self.settings.dispositions.clone()
    }

    /// For a shutdown that loses nothing: waits until no execution is running any more, whether
    /// its caller is there or has left, at most for `timeout`. Returns how many were left.
    ///
    /// Call it when no new requests come in: after axum's or hyper's graceful shutdown has
    /// returned.
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the wait and nothing else.
    pub async fn drain(&self, timeout: Duration) -> usize {
        self.settings.engine.drain(timeout).await
    }
}

/// What a setting was given, unless there is something to say against it.
#[track_caller]
fn accept<T>(setting: &str, given: Result<T, String>) -> Option<T> {
    if let Err(why) = &given {
        assert!(why.is_empty(), "{setting}: {why}");
    }
    given.ok()
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    /// Puts the layer around `inner`.
    ///
    /// # Panics
    ///
    /// If two settings contradict each other, with a message that names them.
    fn layer(&self, inner: S) -> Self::Service {
        self.settings.validate();
        Idempotency::new(inner, Arc::clone(&self.settings))
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.fmt(f)
    }
}
