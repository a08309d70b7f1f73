//! Which headers a record keeps. In: a response's headers; out: those that still mean the same in
//! a replay: all their lines, in their order, byte for byte.

use http::{
    HeaderMap, HeaderName, StatusCode,
    header::{CONNECTION, RETRY_AFTER, TRAILER},
};

/// Marks a replay: `Idempotent-Replayed: true`, on replays and on nothing else.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Not kept: what belongs to one connection, one message or one caller's exchange, and what outer
/// layers say anew each time.
const DROPPED: [&str; 21] = [
    // Connection fields and framing (RFC 9110, sections 7.6.1 and 8.6).
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
    "content-length",
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
    // Ours to set.
    "idempotent-replayed",
];

/// Families of the same kind: quotas of the moment, and what CORS says to one origin.
const DROPPED_FAMILIES: [&str; 3] = ["ratelimit", "x-ratelimit-", "access-control-"];

/// The headers of `headers` that a record keeps.
pub(crate) fn kept(status: StatusCode, headers: &HeaderMap, has_trailers: bool) -> HeaderMap {
    let may_wait = status.is_success() || status.is_redirection();
    let is_kept = |name: &HeaderName| {
        let text = name.as_str();
        !(DROPPED.contains(&text)
            || DROPPED_FAMILIES.iter().any(|family| text.starts_with(family))
            || (name == RETRY_AFTER && !may_wait)
            || (name == TRAILER && !has_trailers)
            || is_named_by_connection(headers, name))
    };
    let mut kept = HeaderMap::with_capacity(headers.len());
    for (name, value) in headers {
        if is_kept(name) {
            kept.append(name, value.clone());
        }
    }
    kept
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
        assert_eq!(kept(StatusCode::CREATED, &sent, false), sent);
        let lines: Vec<_> = kept(StatusCode::CREATED, &sent, false).into_iter().collect();
        assert_eq!(lines, sent.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn what_belongs_to_one_exchange_is_dropped() {
        for name in DROPPED.into_iter().chain([
            "ratelimit",
            "ratelimit-policy",
            "x-ratelimit-remaining",
            "access-control-allow-origin",
            "trailer",
        ]) {
            let sent = headers(&[(name, b"x"), ("x-kept", b"y")]);
            let kept = kept(StatusCode::OK, &sent, false);
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
        assert_eq!(kept(StatusCode::OK, &sent, false), headers(&[("x-kept", b"3")]));
    }

    #[test]
    fn retry_after_is_kept_with_success_and_redirection_only() {
        let sent = headers(&[("retry-after", b"5")]);
        for (status, is_kept) in [(202, true), (303, true), (402, false), (503, false)] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(kept(status, &sent, false).contains_key(RETRY_AFTER), is_kept, "{status}");
        }
    }

    #[test]
    fn trailer_is_kept_where_there_are_trailers() {
        let sent = headers(&[("trailer", b"x-checksum")]);
        assert_eq!(kept(StatusCode::OK, &sent, true), sent);
    }
}
