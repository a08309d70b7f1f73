//! Settings that go together, as a draft and as a well-known API have them.

use std::time::Duration;

use http::StatusCode;

use super::IdempotencyLayer;
use crate::{engine::OnFailure, outcome::Policy, refusal::Reason};

impl IdempotencyLayer {
    /// As draft-ietf-httpapi-idempotency-key-header-07 wants it: a key is required and quoted
    /// ([`key_required`](Self::key_required), [`key_strict`](Self::key_strict)), a conflict is
    /// answered with 422, and 4xx are recorded where they are final.
    ///
    /// **All common SDKs send bare keys, which are refused under it.** Follow it with
    /// `.key_strict(false)` to take both. A setter called after a preset overrides it.
    ///
    /// Not final are 400, 401, 403, 404, 405, 407, 408, 409, 411, 413, 414, 415, 417, 421, 423,
    /// 425, 426, 428, 429 and 431.
    pub fn ietf(self) -> Self {
        self.key_required(true)
            .key_strict(true)
            .refusal_status(Reason::Conflict, StatusCode::UNPROCESSABLE_ENTITY)
            .set(|settings| settings.capture.policy = Some(Policy::Ietf))
    }

    /// As Stripe's API does it: a conflict is answered with 400, records live for 24 hours, 5xx are
    /// recorded ([`OnFailure::Record`]) and 4xx where they are final, as under
    /// [`ietf`](Self::ietf); but 408, 429, 503 (gRPC: UNAVAILABLE) and an error of the inner service
    /// release the key. A setter called after a preset overrides it: another
    /// [`on_failure`](Self::on_failure) holds for all failures.
    pub fn stripe(self) -> Self {
        self.on_failure(OnFailure::Record)
            .refusal_status(Reason::Conflict, StatusCode::BAD_REQUEST)
            .retention(Duration::from_secs(24 * 60 * 60))
            .set(|settings| {
                settings.capture.policy = Some(Policy::Stripe);
                settings.engine.rules.on_error = Some(OnFailure::Release);
            })
    }
}
