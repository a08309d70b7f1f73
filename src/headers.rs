//! Which headers a record keeps. In: a response's headers; out: those that still mean the same in
//! a replay: all their lines, in their order, byte for byte.

use std::sync::Arc;

use http::{
    HeaderMap, HeaderName, StatusCode,
    header::{CONNECTION, RETRY_AFTER, TRAILER},
};

use crate::{hook::quietly, record::Line};

/// Marks a replay: `Idempotent-Replayed: true`, on replays and on nothing else.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Not kept by default: what belongs to one message or one caller's exchange, and what outer layers
/// say anew each time.
const DROPPED: [&str; 13] = [
    // One message's way here.
    "date",
    "server",
    "via",
    "age",
    "alt-svc",
    // Credentials of the first caller.
    "set-cookie",
    "www-authenticate",
    "proxy-authenticate",
    "authentication-info",
    "proxy-authentication-info",
    // One exchange's measurements and names.
    "server-timing",
    "x-request-id",
    "traceparent",
];

/// Families of the same kind: quotas of the moment, and what CORS says to one origin.
const DROPPED_FAMILIES: [&str; 3] = ["ratelimit", "x-ratelimit-", "access-control-"];

/// Never kept, whatever the policy: connection fields and framing (RFC 9110, sections 7.6.1 and
/// 8.6), which are made anew for each message, and the marker, which is ours.
const NEVER_KEPT: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "idempotent-replayed",
];

/// Which headers a record keeps.
#[derive(Clone, Default)]
pub(crate) struct HeaderPolicy {
    /// Asked first; where it says nothing, the default holds.
    pub(crate) own: Option<Arc<OwnHeaderPolicy>>,
}

/// What a user says of one header of a response of one status: keep it, drop it, or nothing.
pub(crate) type OwnHeaderPolicy = dyn Fn(StatusCode, &HeaderName) -> Option<bool> + Send + Sync;

impl HeaderPolicy {
    /// The lines of `headers` that a record keeps.
    pub(crate) fn kept<'h>(
        &self,
        status: StatusCode,
        headers: &'h HeaderMap,
        has_trailers: bool,
    ) -> Vec<Line<'h>> {
        let has_connection = headers.contains_key(CONNECTION);
        let is_kept = |name: &HeaderName| {
            let text = name.as_str();
            if NEVER_KEPT.contains(&text)
                || (name == TRAILER && !has_trailers)
                || (has_connection && is_named_by_connection(headers, name))
            {
                return false;
            }
            // A policy that panics says nothing: the work has been done, and is recorded.
            let said = self.own.as_ref().and_then(|own| quietly(|| own(status, name)).flatten());
            said.unwrap_or_else(|| is_kept_by_default(status, name))
        };
        headers.iter().filter(|(name, _)| is_kept(name)).collect()
    }
}

fn is_kept_by_default(status: StatusCode, name: &HeaderName) -> bool {
    let text = name.as_str();
    let may_wait = status.is_success() || status.is_redirection();
    !(DROPPED.contains(&text)
        || DROPPED_FAMILIES.iter().any(|family| text.starts_with(family))
        || (name == RETRY_AFTER && !may_wait))
}

/// `Connection` may name further fields that are for this connection only.
fn is_named_by_connection(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(CONNECTION).iter().any(|line| {
        line.as_bytes()
            .split(|byte| *byte == b',')
            .any(|named| named.trim_ascii().eq_ignore_ascii_case(name.as_str().as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn headers(lines: &[(&'static str, &'static [u8])]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    fn as_map(lines: Vec<Line<'_>>) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name, value.clone());
        }
        map
    }

    fn by_default(status: StatusCode, headers: &HeaderMap, has_trailers: bool) -> HeaderMap {
        as_map(HeaderPolicy::default().kept(status, headers, has_trailers))
    }

    #[test]
    fn all_other_lines_are_kept_in_order_and_byte_for_byte() {
        let sent = headers(&[
            ("content-type", b"text/csv; charset=utf-8"),
            ("link", b"<a>; rel=next"),
            ("etag", b"\"1\""),
            ("link", b"<b>; rel=prev"),
            ("content-disposition", b"attachment; filename=\"a,b\""),
            ("x-latin", b"caf\xe9 \xff"),
            ("cache-control", b"no-store"),
            ("location", b"/v1/runs/1"),
        ]);
        assert_eq!(by_default(StatusCode::CREATED, &sent, false), sent);
        let lines: Vec<_> = by_default(StatusCode::CREATED, &sent, false).into_iter().collect();
        assert_eq!(lines, sent.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn what_belongs_to_one_exchange_is_dropped() {
        for name in DROPPED.into_iter().chain(NEVER_KEPT).chain([
            "ratelimit",
            "ratelimit-policy",
            "x-ratelimit-remaining",
            "access-control-allow-origin",
            "trailer",
        ]) {
            let sent = headers(&[(name, b"x"), ("x-kept", b"y")]);
            let kept = by_default(StatusCode::OK, &sent, false);
            assert_eq!(kept, headers(&[("x-kept", b"y")]), "{name}");
        }
    }

    #[test]
    fn what_connection_names_is_dropped_too() {
        let sent = headers(&[
            ("connection", b"close, X-Hop"),
            ("connection", b"x-other"),
            ("x-hop", b"1"),
            ("x-other", b"2"),
            ("x-kept", b"3"),
        ]);
        assert_eq!(by_default(StatusCode::OK, &sent, false), headers(&[("x-kept", b"3")]));
    }

    #[test]
    fn retry_after_is_kept_with_success_and_redirection_only() {
        let sent = headers(&[("retry-after", b"5")]);
        for (status, is_kept) in [(202, true), (303, true), (402, false), (503, false)] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(
                by_default(status, &sent, false).contains_key(RETRY_AFTER),
                is_kept,
                "{status}"
            );
        }
    }

    #[test]
    fn trailer_is_kept_where_there_are_trailers() {
        let sent = headers(&[("trailer", b"x-checksum")]);
        assert_eq!(by_default(StatusCode::OK, &sent, true), sent);
    }

    #[test]
    fn a_policy_of_ones_own_goes_first_but_never_touches_framing() {
        let policy = HeaderPolicy {
            own: Some(Arc::new(|_, name: &HeaderName| match name.as_str() {
                "set-cookie" | "content-length" => Some(true),
                "etag" => Some(false),
                "x-panic" => panic!("a policy with a bug"),
                _ => None,
            })),
        };
        let sent = headers(&[
            ("set-cookie", b"a=b"),
            ("content-length", b"3"),
            ("etag", b"e"),
            ("x-panic", b"x"),
            ("date", b"d"),
        ]);
        let right = headers(&[("set-cookie", b"a=b"), ("x-panic", b"x")]);
        assert_eq!(as_map(policy.kept(StatusCode::OK, &sent, false)), right);
    }
}
