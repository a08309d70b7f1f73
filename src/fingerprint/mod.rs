//! Is it the same request? In: a request's head, its body as it arrives, its trailers; out: a
//! versioned [`Fingerprint`]. Next, the operation is claimed with it.

use std::{
    fmt,
    sync::{Arc, LazyLock},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    request::Parts,
};

use crate::digest::{Digest, Framed};

pub(crate) use selection::Selection;

mod json;
mod selection;

/// What a request asks for, as two SHA-256 digests: of its exact bytes, and of its meaning.
///
/// Both cover the method, the path and query (the original ones too, under nested routers), every `Content-Type` and
/// `Content-Encoding` line, the chosen headers, the body and the trailers, each behind its length
/// or in front of it, and a version. They differ only where a JSON body was understood: then the
/// meaning covers its value, or what is selected of it, instead of its bytes.
///
/// Two fingerprints are equal if their meanings are. The exact digest is there to recognise
/// identical bytes without parsing them again.
#[derive(Clone, Copy)]
pub struct Fingerprint {
    exact: Digest,
    meaning: Digest,
}

impl Fingerprint {
    /// A fingerprint of `fields`, for a caller that has no HTTP request. Every field counts, with
    /// its length and in its place.
    #[must_use]
    pub fn of<F: AsRef<[u8]>>(fields: impl IntoIterator<Item = F>) -> Self {
        static START: LazyLock<Framed> =
            LazyLock::new(|| Framed::new("tower-idempotency fields 1"));
        let mut framed = START.clone();
        for field in fields {
            framed.field(field.as_ref());
        }
        let digest = framed.finish();
        Self { exact: digest, meaning: digest }
    }

    /// The digest of the exact bytes.
    #[must_use]
    pub const fn exact(&self) -> &[u8; 32] {
        &self.exact
    }

    /// A fingerprint that was kept as bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        let (mut exact, mut meaning) = ([0; 32], [0; 32]);
        exact.copy_from_slice(&bytes[..32]);
        meaning.copy_from_slice(&bytes[32..]);
        Self { exact, meaning }
    }

    /// The fingerprint as bytes, for a store to keep.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&self.exact);
        bytes[32..].copy_from_slice(&self.meaning);
        bytes
    }
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        self.meaning == other.meaning
    }
}

impl Eq for Fingerprint {}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The digest of a short body can be guessed from, so it does not belong in a log.
        f.write_str("Fingerprint(..)")
    }
}

/// What of a request counts.
#[derive(Clone)]
pub(crate) struct Counts {
    headers: Vec<HeaderName>,
    json: Option<Selection>,
    /// What a function of the user's own says, instead of all the rest.
    pub(crate) own: Option<Arc<OwnFingerprint>>,
    /// What the digests of exact bytes begin with, and those of meanings.
    bytes: Framed,
    meaning: Framed,
}

pub(crate) type OwnFingerprint = dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync;

impl Default for Counts {
    fn default() -> Self {
        Self::new(Vec::new(), None, None)
    }
}

impl Counts {
    fn new(
        headers: Vec<HeaderName>,
        json: Option<Selection>,
        own: Option<Arc<OwnFingerprint>>,
    ) -> Self {
        let start = |domain| {
            let mut start = Framed::new(domain);
            start.number(headers.len());
            for name in &headers {
                start.field(name.as_str().as_bytes());
            }
            start.fill_block()
        };
        let bytes = start("tower-idempotency request 1");
        let meaning = start("tower-idempotency request by meaning 1");
        Self { headers, json, own, bytes, meaning }
    }

    /// The headers that count besides the content's own.
    pub(crate) fn headers(&self) -> &[HeaderName] {
        &self.headers
    }

    /// What counts of a JSON body, where that is not all of it.
    pub(crate) fn json(&self) -> Option<&Selection> {
        self.json.as_ref()
    }

    pub(crate) fn set_headers(&mut self, headers: Vec<HeaderName>) {
        *self = Self::new(headers, self.json.take(), self.own.take());
    }

    pub(crate) fn set_json(&mut self, json: Option<Selection>) {
        *self = Self::new(std::mem::take(&mut self.headers), json, self.own.take());
    }

    /// Starts on a request.
    pub(crate) fn begin(&self) -> Making {
        Making { exact: self.bytes.clone(), body_length: 0 }
    }

    /// What every fingerprint of a request's content covers besides the body: to which resource
    /// something is done, and how the body is to be read. Returns whether that is as JSON.
    fn write_head(&self, framed: &mut Framed, parts: &Parts) -> bool {
        let headers = &parts.headers;
        write_resource(framed, parts);
        let kind = write_lines(framed, headers, &CONTENT_TYPE);
        let encoding = write_lines(framed, headers, &CONTENT_ENCODING);
        for name in &self.headers {
            write_lines(framed, headers, name);
        }
        let is_json = encoding == Lines::None && matches!(kind, Lines::One(kind) if is_json(kind));
        // Exact bytes of JSON have another meaning under another selection, and must not be
        // recognised.
        let selection = self.json.as_ref().filter(|_| is_json);
        framed.field(selection.map_or(&[], |selection| selection.id()));
        is_json
    }
}

/// What a request carries behind its head, when all of it is there.
#[derive(Clone, Copy)]
pub(crate) struct Content<'r> {
    pub(crate) body: &'r Bytes,
    pub(crate) trailers: Option<&'r HeaderMap>,
}

/// A fingerprint in the making, while the body arrives.
pub(crate) struct Making {
    /// The digest of the exact bytes. The body comes first in it, so nothing else has to be kept
    /// while it arrives.
    exact: Framed,
    body_length: u64,
}

impl Making {
    /// Takes in the next bytes of the body.
    pub(crate) fn data(&mut self, chunk: &[u8]) {
        self.exact.unframed(chunk);
        self.body_length += chunk.len() as u64;
    }

    /// The body is all there. `content` has all that [`data`](Self::data) was given.
    pub(crate) fn finish(self, counts: &Counts, parts: &Parts, content: Content<'_>) -> Exact {
        if let Some(own) = &counts.own {
            static START: LazyLock<Framed> =
                LazyLock::new(|| Framed::new("tower-idempotency own request 1"));
            let mut framed = START.clone();
            framed.field(&own(parts, content.body).meaning);
            write_resource(&mut framed, parts);
            return Exact { digest: framed.finish(), is_json: false };
        }
        let Self { exact: mut framed, body_length } = self;
        let is_json = counts.write_head(&mut framed, parts);
        write_trailers(&mut framed, content.trailers);
        // A stream's length is known at its end. A number of fixed width there divides what came
        // before into body and head, in one way only.
        framed.unframed(&body_length.to_le_bytes());
        Exact { digest: framed.finish(), is_json }
    }
}

/// What a request asks for by its exact bytes.
pub(crate) struct Exact {
    pub(crate) digest: Digest,
    /// May other bytes mean the same?
    is_json: bool,
}

impl Exact {
    /// The fingerprint, with what the bytes mean.
    pub(crate) fn fingerprint(
        &self,
        counts: &Counts,
        parts: &Parts,
        content: Content<'_>,
    ) -> Fingerprint {
        let exact = self.digest;
        let value = match &counts.json {
            _ if !self.is_json => None,
            None => json::digest(content.body),
            Some(selection) => json::digest_selected(content.body, selection),
        };
        let meaning = value.map_or(exact, |value| {
            let mut meaning = counts.meaning.clone();
            meaning.field(&value);
            counts.write_head(&mut meaning, parts);
            write_trailers(&mut meaning, content.trailers);
            meaning.finish()
        });
        Fingerprint { exact, meaning }
    }
}

/// What is done to which resource.
fn write_resource(framed: &mut Framed, parts: &Parts) {
    framed.field(parts.method.as_str().as_bytes());
    write_uri(framed, &parts.uri);
    // Both, for the original one may be that of a request around this one: a batch handler copies
    // it with the other extensions.
    match original_uri(parts) {
        None => framed.number(0),
        Some(original) => {
            framed.number(1);
            write_uri(framed, original);
        }
    }
}

/// How often a header is there.
#[derive(PartialEq)]
enum Lines<'a> {
    None,
    One(&'a HeaderValue),
    Several,
}

/// Writes all lines of a header.
fn write_lines<'a>(framed: &mut Framed, headers: &'a HeaderMap, name: &HeaderName) -> Lines<'a> {
    let mut lines = Lines::None;
    for line in headers.get_all(name) {
        framed.number(1 + line.len());
        framed.unframed(line.as_bytes());
        lines = if lines == Lines::None { Lines::One(line) } else { Lines::Several };
    }
    framed.number(0);
    lines
}

fn write_uri(framed: &mut Framed, uri: &Uri) {
    framed.field(uri.path().as_bytes());
    // "No query" and "an empty query" are two requests.
    match uri.query() {
        None => framed.number(0),
        Some(query) => {
            framed.number(1 + query.len());
            framed.unframed(query.as_bytes());
        }
    }
}

fn write_trailers(framed: &mut Framed, trailers: Option<&HeaderMap>) {
    framed.number(trailers.map_or(0, HeaderMap::len));
    for (name, value) in trailers.into_iter().flatten() {
        framed.field(name.as_str().as_bytes());
        framed.field(value.as_bytes());
    }
}

/// The URI as the client sent it, where that is another one: a nested axum router shows its routes
/// a shortened one.
fn original_uri(parts: &Parts) -> Option<&Uri> {
    #[cfg(feature = "axum")]
    if let Some(::axum::extract::OriginalUri(uri)) = parts.extensions.get() {
        return (uri.path_and_query() != parts.uri.path_and_query()).then_some(uri);
    }
    let _ = parts;
    None
}

/// `application/json` or `…+json`.
fn is_json(kind: &HeaderValue) -> bool {
    let kind = kind.as_bytes();
    let essence = kind.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let ends_with = |suffix: &[u8]| {
        essence.len() > suffix.len()
            && essence[essence.len() - suffix.len()..].eq_ignore_ascii_case(suffix)
    };
    essence.eq_ignore_ascii_case(b"application/json") || ends_with(b"+json")
}

#[cfg(test)]
mod tests;
