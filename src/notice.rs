//! What an operator should hear of, as events of `tracing` (feature `tracing`); without the feature,
//! nothing is said. No event names a key, a scope or a body.

#![cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "nothing is said"))]

/// The in-memory store is filling up.
pub(crate) fn filling_up(live: usize, capacity: usize) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        live,
        capacity,
        "80 % of the idempotency entries are live; at the capacity new keys are refused"
    );
}

/// The layer has been switched off or on, or was made switched off.
pub(crate) fn switched(mode: &dyn std::fmt::Debug) {
    #[cfg(feature = "tracing")]
    tracing::warn!(?mode, "the idempotency layer has been switched");
}

/// The store failed, before the inner service was called or after it.
pub(crate) fn store_failed(error: &crate::store::StoreError) {
    #[cfg(feature = "tracing")]
    tracing::error!(error = error as &dyn std::error::Error, "the idempotency store failed");
}
