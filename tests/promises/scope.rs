//! A caller only ever sees records of its own scope.

use http::{HeaderName, HeaderValue, Request, Response, StatusCode, request::Parts};
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope, StoredResponse, scope};

use crate::support::{
    Answer, keyed, send,
    stack::{AnyBody, AnyError, Stack, any, text},
    unkeyed,
};

#[derive(Debug, Clone)]
struct Tenant(String);

impl AsRef<str> for Tenant {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

fn by_tenant() -> (Stack, MemoryStore<StoredResponse>) {
    let store = MemoryStore::new();
    let layer = IdempotencyLayer::new(scope::from_extension::<Tenant>()).store(store.clone());
    let stack = Stack::new(&layer, |run, request| async move {
        let tenant = request.extensions().get::<Tenant>().map_or("nobody", |tenant| &tenant.0);
        Ok(text(200, format!("run {run} of {tenant}")))
    });
    (stack, store)
}

fn of(tenant: &str, request: Request<impl Into<AnyBodyOf>>) -> Request<AnyBody> {
    let mut request = request.map(|body| body.into().0);
    request.extensions_mut().insert(Tenant(tenant.to_owned()));
    request
}

struct AnyBodyOf(AnyBody);

impl From<http_body_util::Full<bytes::Bytes>> for AnyBodyOf {
    fn from(body: http_body_util::Full<bytes::Bytes>) -> Self {
        Self(any(body))
    }
}

#[tokio::test]
async fn two_tenants_with_the_same_key_and_request_never_meet() {
    let (stack, store) = by_tenant();
    for (tenant, text, is_replay) in [
        ("a", "run 1 of a", false),
        ("b", "run 2 of b", false),
        ("a", "run 1 of a", true),
        ("b", "run 2 of b", true),
    ] {
        let answer = stack.send(of(tenant, keyed("k", "{}"))).await;
        assert_eq!((answer.text(), answer.is_replay()), (text, is_replay));
    }
    assert_eq!(store.len(), 2);
}

#[tokio::test]
async fn a_key_taken_in_another_scope_is_free() {
    let (stack, _) = by_tenant();
    // Somebody else guesses the key first, and uses it for something else.
    stack.send(of("b", keyed("commit-1", r#"{"mischief":true}"#))).await;
    let answer = stack.send(of("a", keyed("commit-1", "{}"))).await;
    assert_eq!((answer.status, answer.text()), (StatusCode::OK, "run 2 of a"));
}

#[tokio::test]
async fn without_a_scope_a_keyed_request_is_refused_and_shares_no_bucket() {
    let (stack, store) = by_tenant();
    for _two_callers in 0..2 {
        let refused = stack.send(keyed("k", "{}")).await;
        refused.assert_refused(403, "idempotency_scope_unavailable");
    }
    assert_eq!((stack.runs.count(), store.len()), (0, 0));
    assert_eq!(stack.send(unkeyed("{}")).await.text(), "run 1 of nobody");
}

#[tokio::test]
async fn scope_and_key_never_run_into_each_other() {
    let (stack, store) = by_tenant();
    let mut pairs = Vec::new();
    for joint in [":", "_", "|", "/", "ü", "", "."] {
        let spell = |parts: &[&str]| parts.join(joint);
        pairs.push((spell(&["a", "b"]), "c".to_owned()));
        if joint.is_ascii() {
            pairs.push(("a".to_owned(), spell(&["b", "c"])));
        }
    }
    pairs.extend([(String::new(), "abc".to_owned()), ("a\0".to_owned(), "bc".to_owned())]);
    let number = pairs.len();
    for (tenant, key) in pairs {
        let answer = stack.send(of(&tenant, keyed(&key, "{}"))).await;
        assert!(!answer.is_replay(), "{tenant:?} {key:?}");
    }
    assert_eq!((stack.runs.count(), store.len()), (number, number));
}

#[tokio::test]
async fn scopes_of_several_parts_are_told_apart_by_their_parts() {
    let layer = IdempotencyLayer::new(|parts: &Parts| {
        let parts = parts.headers.get_all("x-part").iter();
        Some(Scope::from_parts(parts.map(HeaderValue::as_bytes)))
    });
    let stack = Stack::numbered(&layer);
    let mut run = 0;
    for parts in [&["ab", "c"][..], &["a", "bc"], &["abc"], &["abc", ""], &["", "abc"], &[]] {
        run += 1;
        for _ in 0..2 {
            let mut request = keyed("k", "{}");
            for part in parts {
                request.headers_mut().append("x-part", part.parse().unwrap());
            }
            assert_eq!(stack.send(request).await.text(), format!("run {run}"));
        }
    }
}

#[tokio::test]
async fn however_scopes_are_made_two_names_are_two_scopes() {
    // One name that reads like the inside of a scope of parts.
    let mut crafted = 1_u64.to_le_bytes().to_vec();
    crafted.push(b'a');
    assert_ne!(Scope::new(&crafted), Scope::from_parts(["a"]));
    assert_eq!(Scope::new("a"), Scope::from_parts(["a"]), "a scope of one part");
    assert_ne!(Scope::new(""), Scope::from_parts([""; 0]));
}

#[tokio::test]
async fn a_scope_header_sent_twice_or_not_at_all_is_no_scope() {
    let layer = IdempotencyLayer::new(scope::from_header(HeaderName::from_static("x-tenant")));
    let stack = Stack::numbered(&layer);
    let with = |tenants: &[&str]| {
        let mut request = keyed("k", "{}");
        for tenant in tenants {
            request.headers_mut().append("x-tenant", tenant.parse().unwrap());
        }
        request
    };
    for tenants in [&[][..], &["a", "a"], &["a", "b"]] {
        let refused = stack.send(with(tenants)).await;
        refused.assert_refused(403, "idempotency_scope_unavailable");
    }
    assert_eq!(stack.send(with(&["a"])).await.text(), "run 1");
    assert_eq!(stack.send(with(&["b"])).await.text(), "run 2");
    assert!(stack.send(with(&["a"])).await.is_replay());
}

#[tokio::test]
async fn an_unauthenticated_caller_learns_nothing_and_leaves_nothing() {
    let (stack, store) = by_tenant();
    let service = stack.service.clone();
    let authenticated = ServiceBuilder::new().service(service_fn({
        move |mut request: Request<AnyBody>| {
            let service = service.clone();
            async move {
                match request.headers().get("authorization").map(|value| value.to_str().unwrap()) {
                    Some("Bearer valid") => {
                        request.extensions_mut().insert(Tenant("a".to_owned()));
                        let answer = Answer::read(service.oneshot(request).await?).await;
                        Ok::<_, AnyError>(respond(&answer))
                    }
                    _ => Ok(text(401, "")),
                }
            }
        }
    }));
    let with = |token: &'static str, key: &str| {
        let mut request = keyed(key, "{}").map(any);
        request.headers_mut().insert("authorization", token.parse().unwrap());
        request
    };
    assert_eq!(send(&authenticated, with("Bearer valid", "k")).await.text(), "run 1 of a");
    for (token, key) in [("Bearer revoked", "k"), ("Bearer revoked", "fresh")] {
        let refused = send(&authenticated, with(token, key)).await;
        assert_eq!((refused.status, refused.text()), (StatusCode::UNAUTHORIZED, ""));
    }
    assert_eq!(store.len(), 1);
    assert_eq!(send(&authenticated, with("Bearer valid", "k")).await.text(), "run 1 of a");
    assert_eq!(stack.runs.count(), 1);
}

fn respond(answer: &Answer) -> Response<AnyBody> {
    text(answer.status.as_u16(), answer.body.clone())
}
