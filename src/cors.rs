//! What a CORS layer has to let through, so that scripts in a browser can send keys and read what
//! they are told. CORS goes outside of this layer: it answers preflights itself, and says to each
//! origin what holds for it, on replays as well.
//!
//! ```
//! use http::{HeaderValue, Method, header::CONTENT_TYPE};
//! use tower_http::cors::CorsLayer;
//! use tower_idempotency::cors;
//!
//! let cors = CorsLayer::new()
//!     .allow_origin([HeaderValue::from_static("https://app.example")])
//!     .allow_methods([Method::POST])
//!     .allow_headers(cors::ALLOW_HEADERS.into_iter().chain([CONTENT_TYPE]).collect::<Vec<_>>())
//!     .expose_headers(cors::EXPOSE_HEADERS);
//! # drop(cors);
//! ```

use http::{
    HeaderName,
    header::{LINK, LOCATION, RETRY_AFTER},
};

use crate::headers::REPLAYED;

/// The request header that carries the key (unless another was set with
/// [`key_header`](crate::IdempotencyLayer::key_header)), for `Access-Control-Allow-Headers`. What
/// else your requests have, such as `Content-Type: application/json` and `Authorization`, has to be
/// allowed as well.
pub const ALLOW_HEADERS: [HeaderName; 1] = [HeaderName::from_static("idempotency-key")];

/// The response headers that say something about a retry, for `Access-Control-Expose-Headers`: the
/// marker of a replay, `Retry-After`, `Location` (which a tombstone keeps), `Link` (to the
/// [`documentation`](crate::IdempotencyLayer::documentation)), and the two that tell SDKs not to
/// retry in vain.
pub const EXPOSE_HEADERS: [HeaderName; 6] = [
    REPLAYED,
    RETRY_AFTER,
    LOCATION,
    LINK,
    HeaderName::from_static("stripe-should-retry"),
    HeaderName::from_static("x-should-retry"),
];
