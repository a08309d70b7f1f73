//! What operators hear of, as events of `tracing`: once, at the moment it is worth hearing, and
//! without a key, a scope or a body.

#![cfg(feature = "tracing")]

use std::{
    cell::RefCell,
    fmt::{Debug, Write as _},
    sync::Once,
    time::Duration,
};

use tower_idempotency::{
    Fingerprint, MemoryStore, Mode, OperationId, Scope, Store, Token,
    store::{ClaimReply, ClaimRequest},
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use crate::support::{
    call::Call,
    cue::{Cue, CueStore},
    keyed,
    stack::{Stack, layer},
};

/// Every event of this crate that a thread listens to, as its level and what it says.
///
/// There is one subscriber for all threads, for as long as the process runs: those that come and go
/// can make tracing forget for a moment that somebody wants an event.
struct Heard;

type Said = Vec<(Level, String)>;

thread_local! {
    static HEARD: RefCell<Option<Said>> = const { RefCell::new(None) };
}

impl Heard {
    /// Hears what is said on this thread from now on.
    fn listen() -> Self {
        static SUBSCRIBED: Once = Once::new();
        SUBSCRIBED.call_once(|| tracing::subscriber::set_global_default(Everything).unwrap());
        HEARD.set(Some(Vec::new()));
        Self
    }

    fn take(&self) -> Said {
        let Self = self;
        HEARD.replace(Some(Vec::new())).unwrap_or_default()
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        HEARD.set(None);
    }
}

struct Everything;

impl Subscriber for Everything {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tower_idempotency")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut said = Text(String::new());
        event.record(&mut said);
        HEARD.with_borrow_mut(|heard| {
            if let Some(heard) = heard {
                heard.push((*event.metadata().level(), said.0));
            }
        });
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[tokio::test]
async fn a_store_says_once_that_80_percent_are_live() {
    for (capacity, silent_until) in [(1, 0), (3, 2), (4, 3), (5, 3), (9, 7), (10, 7), (100, 79)] {
        let heard = Heard::listen();
        let store = MemoryStore::<()>::new().capacity(capacity);
        let fill = async |from: usize, to: usize| {
            let mut claims = Vec::new();
            for number in from..to {
                let id = OperationId::new(&Scope::new("secret-scope"), &number.to_string());
                let request = ClaimRequest::new(id, Fingerprint::of(["asked"]), Token::mint());
                let ClaimReply::Mine(claim) = store.claim(request).await.unwrap() else {
                    panic!("{number} of {capacity} find no room");
                };
                claims.push(claim);
            }
            claims
        };
        let claims = fill(0, silent_until).await;
        assert_eq!(heard.take(), [], "{silent_until} of {capacity}");
        let more = fill(silent_until, capacity).await;
        let said = heard.take();
        assert_eq!(said.len(), 1, "{capacity}: {said:?}");
        assert_eq!(said[0].0, Level::WARN);
        let counts = format!("live={} capacity={capacity} ", silent_until + 1);
        assert!(said[0].1.contains(&counts), "{said:?}");
        drop((claims, more));
        let _again = fill(0, capacity).await;
        assert_eq!(heard.take(), [], "{capacity}: it is said once");
    }
}

#[tokio::test]
async fn a_layer_says_that_it_is_switched() {
    let heard = Heard::listen();
    let (layer, _store) = layer();
    assert_eq!(heard.take(), []);
    for (mode, name) in [(Mode::Off, "Off"), (Mode::Enforce, "Enforce")] {
        layer.set_mode(mode);
        let said = heard.take();
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].0, Level::WARN);
        assert!(said[0].1.contains(name), "{said:?}");
    }
}

#[tokio::test]
async fn a_layer_that_is_made_to_protect_nothing_says_so_once() {
    let heard = Heard::listen();
    for (mode, name) in [(Mode::Off, "Off"), (Mode::Shadow, "Shadow")] {
        let layer = layer().0.mode(mode);
        let stack = Stack::numbered(&layer.clone());
        for key in ["a", "b"] {
            stack.send(keyed(key, "{}")).await;
        }
        let said = heard.take();
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].0, Level::WARN);
        assert!(said[0].1.contains(name), "{said:?}");
    }
    let _usual = layer().0.mode(Mode::Enforce);
    assert_eq!(heard.take(), []);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_an_error_that_names_no_key() {
    for call in [Call::Claim, Call::Complete] {
        for cue in [Cue::Fail, Cue::Hang] {
            let store = CueStore::default();
            let layer = layer().0.store(store.clone()).store_timeout(Duration::from_secs(1));
            let stack = Stack::numbered(&layer);
            let heard = Heard::listen();
            store.cue(call, cue.clone());
            let _answer = stack.send(keyed("secret-key", "secret-body")).await;
            let said = heard.take();
            assert_eq!(said.len(), 1, "{call:?} {cue:?}: {said:?}");
            assert_eq!(said[0].0, Level::ERROR);
            assert!(!said[0].1.contains("secret-key") && !said[0].1.contains("secret-body"));
        }
    }
}
