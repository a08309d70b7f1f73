//! The bodies of the fuzz targets: each takes any bytes, and panics if they break a promise.

#![allow(dead_code, reason = "each target uses one of them")]
#![allow(clippy::panic, reason = "to panic is how they say that a promise is broken")]

pub(crate) mod input;
pub(crate) mod json;
pub(crate) mod key;
pub(crate) mod probe;
pub(crate) mod request;
