//! Is it the same request? In: a request's head, its body as it arrives, its trailers; out: a
//! versioned [`Fingerprint`]. Next, the operation is claimed with it.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, Uri,
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
        let mut framed = Framed::new("tower-idempotency fields 1");
        for field in fields {
            framed.field(field.as_ref());
        }
        let digest = framed.finish();
        Self { exact: digest, meaning: digest }
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
#[derive(Clone, Default)]
pub(crate) struct Counts {
    /// These headers, besides the content's own.
    pub(crate) headers: Vec<HeaderName>,
    /// These parts of a JSON body, instead of all of it.
    pub(crate) json: Option<Selection>,
    /// What a function of the user's own says, instead of all the rest.
    pub(crate) own: Option<Arc<OwnFingerprint>>,
}

pub(crate) type OwnFingerprint = dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync;

impl Counts {
    /// Starts on a request by its head.
    pub(crate) fn begin(&self, parts: &Parts) -> Making<'_> {
        match &self.own {
            None => Making::Content(Fingerprinter::new(parts, &self.headers, self.json.as_ref())),
            Some(own) => Making::Own(&**own),
        }
    }
}

/// A fingerprint in the making.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one")]
pub(crate) enum Making<'a> {
    Content(Fingerprinter<'a>),
    Own(&'a OwnFingerprint),
}

impl Making<'_> {
    /// Takes in the next bytes of the body.
    pub(crate) fn data(&mut self, chunk: &[u8]) {
        match self {
            Self::Content(fingerprinter) => fingerprinter.data(chunk),
            Self::Own(_) => {}
        }
    }

    /// The fingerprint, now that all of the request is there; see [`Fingerprinter::finish`].
    pub(crate) fn finish(
        self,
        parts: &Parts,
        body: &Bytes,
        trailers: Option<&HeaderMap>,
        known: Option<Fingerprint>,
    ) -> Fingerprint {
        match self {
            Self::Content(fingerprinter) => fingerprinter.finish(body, trailers, known),
            Self::Own(own) => {
                let mut framed = head("tower-idempotency own request 1", parts);
                framed.field(&own(parts, body).meaning);
                let digest = framed.finish();
                Fingerprint { exact: digest, meaning: digest }
            }
        }
    }
}

/// Makes a fingerprint of a request's content while the body arrives.
pub(crate) struct Fingerprinter<'a> {
    /// The digest of the head: where the body's bytes and the body's meaning part ways.
    head: Framed,
    exact: Framed,
    body_length: usize,
    is_json: bool,
    selection: Option<&'a Selection>,
}

impl<'a> Fingerprinter<'a> {
    /// Takes in the head. `chosen` are the headers that count besides the content's own, `selection`
    /// is what counts of a JSON body.
    fn new(parts: &Parts, chosen: &[HeaderName], selection: Option<&'a Selection>) -> Self {
        let is_json = is_json(&parts.headers);
        let selection = selection.filter(|_| is_json);
        let mut head = head("tower-idempotency request 1", parts);
        // In front of the body's bytes too: they have another meaning under another selection, and
        // must not be recognised.
        head.field(selection.map_or(&[], |selection| selection.id()));
        head.number(chosen.len());
        for name in [CONTENT_TYPE, CONTENT_ENCODING].iter().chain(chosen) {
            head.field(name.as_str().as_bytes());
            let lines = parts.headers.get_all(name);
            head.number(lines.iter().count());
            for line in lines {
                head.field(line.as_bytes());
            }
        }
        let mut exact = head.clone();
        exact.field(b"bytes");
        Self { head, exact, body_length: 0, is_json, selection }
    }

    fn data(&mut self, chunk: &[u8]) {
        self.exact.unframed(chunk);
        self.body_length += chunk.len();
    }

    /// The fingerprint. `body` is all that [`data`](Self::data) was given; `known` is what the
    /// store has under the same id: if the bytes are the same, so is their meaning, and nothing
    /// is parsed.
    fn finish(
        mut self,
        body: &[u8],
        trailers: Option<&HeaderMap>,
        known: Option<Fingerprint>,
    ) -> Fingerprint {
        let trailers_length = write_trailers(&mut self.exact, trailers);
        // A stream's length is known at its end. Two numbers of fixed width there divide what came
        // before into head, body and trailers, in one way only.
        self.exact.number(self.body_length);
        self.exact.number(trailers_length);
        let exact = self.exact.finish();
        if let Some(known) = known
            && known.exact == exact
        {
            return known;
        }
        let value = match (self.is_json, self.selection) {
            (false, _) => None,
            (true, None) => json::digest(body),
            (true, Some(selection)) => json::digest_selected(body, selection),
        };
        let meaning = match value {
            None => exact,
            Some(value) => {
                let mut meaning = self.head;
                meaning.field(b"json");
                meaning.field(&value);
                write_trailers(&mut meaning, trailers);
                meaning.finish()
            }
        };
        Fingerprint { exact, meaning }
    }
}

/// What every fingerprint begins with: to which resource something is done.
fn head(domain: &str, parts: &Parts) -> Framed {
    let mut head = Framed::new(domain);
    head.field(parts.method.as_str().as_bytes());
    // Both, for the original one may be that of a request around this one: a batch handler copies
    // it with the other extensions.
    for uri in [original_uri(parts), &parts.uri] {
        head.field(uri.path().as_bytes());
        // "No query" and "an empty query" are two requests.
        head.number(usize::from(uri.query().is_some()));
        head.field(uri.query().unwrap_or_default().as_bytes());
    }
    head
}

/// Writes the trailers, and returns how many bytes that took.
fn write_trailers(framed: &mut Framed, trailers: Option<&HeaderMap>) -> usize {
    let mut written = 0;
    for (name, value) in trailers.into_iter().flatten() {
        framed.field(name.as_str().as_bytes());
        framed.field(value.as_bytes());
        written += 16 + name.as_str().len() + value.len();
    }
    written
}

/// The URI as the client sent it: a nested axum router shows its routes a shortened one.
fn original_uri(parts: &Parts) -> &Uri {
    #[cfg(feature = "axum")]
    if let Some(::axum::extract::OriginalUri(uri)) = parts.extensions.get() {
        return uri;
    }
    &parts.uri
}

/// `application/json` or `…+json`, said once, and not encoded.
fn is_json(headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    if headers.contains_key(CONTENT_ENCODING) {
        return false;
    }
    let line = line.as_bytes();
    let essence = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let ends_with = |suffix: &[u8]| {
        essence.len() > suffix.len()
            && essence[essence.len() - suffix.len()..].eq_ignore_ascii_case(suffix)
    };
    essence.eq_ignore_ascii_case(b"application/json") || ends_with(b"+json")
}

#[cfg(test)]
mod tests;
