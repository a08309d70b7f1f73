//! Refusals: every member and header of every one of them, however they are rendered.

use super::*;
use http_body_util::{BodyExt, Empty};

fn all() -> Vec<Refusal> {
    vec![
        Refusal::key_missing(),
        Refusal::no_scope(),
        Refusal::body_too_large(),
        Refusal::body_unreadable(),
        Refusal::body_too_slow(),
        Refusal::conflict(),
        Refusal::in_progress(),
        Refusal::not_replayable(Some(HeaderValue::from_static("/v1/runs/1"))),
        Refusal::outcome_unknown(),
        Refusal::ceiling(),
        Refusal::capacity(None),
        Refusal::store_unavailable(),
    ]
}

#[tokio::test]
async fn every_refusal_is_a_problem_with_all_its_members() {
    for refusal in all() {
        let response =
            refusal.clone().into_response::<Empty<Bytes>>(&Rendering::default(), &HeaderMap::new());
        assert_eq!(response.status(), refusal.status());
        assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
        assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
        let stop = refusal.retry() != Retry::SameKey;
        for name in ["stripe-should-retry", "x-should-retry"] {
            let said = response.headers().get(name).map(HeaderValue::as_bytes);
            assert_eq!(said, stop.then_some(&b"false"[..]), "{refusal}");
        }
        assert_eq!(response.extensions().get::<Refusal>(), Some(&refusal));
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            problem,
            serde_json::json!({
                "type": format!("urn:problem:tower-idempotency:{}", refusal.code()),
                "title": refusal.title(),
                "status": refusal.status().as_u16(),
                "detail": refusal.detail(),
                "code": refusal.code(),
                "retry": refusal.retry().name(),
                "error": {
                    "type": "idempotency_error",
                    "code": refusal.code(),
                    "message": refusal.detail(),
                },
            })
        );
    }
}

#[test]
fn a_capacity_refusal_asks_for_the_real_wait_within_a_minute() {
    let wait = |millis| Refusal::capacity(Some(Duration::from_millis(millis))).retry_after;
    assert_eq!([0, 1, 1_000, 1_001, 59_500, 3_600_000].map(wait), [1, 1, 1, 2, 60, 60].map(Some));
    assert_eq!(Refusal::capacity(None).retry_after, Some(1));
    assert_eq!(Refusal::capacity(Some(Duration::MAX)).retry_after, Some(60));
}

#[tokio::test]
async fn a_renderer_of_ones_own_gets_status_headers_and_texts_and_may_panic() {
    let conflict = StatusCode::UNPROCESSABLE_ENTITY;
    let link = HeaderValue::from_static("<https://example.com/docs>; rel=\"describedby\"");
    let mut rendering = Rendering {
        renderer: Some(Arc::new(error_object)),
        statuses: vec![(Reason::Conflict, StatusCode::CONFLICT), (Reason::Conflict, conflict)],
        documentation: Some(link.clone()),
    };
    let response = Refusal::conflict().into_response::<Empty<Bytes>>(&rendering, &HeaderMap::new());
    assert_eq!(response.status(), conflict);
    assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
    assert_eq!(response.headers()[LINK], link);
    assert_eq!(response.headers()["x-should-retry"], "false");
    assert_eq!(response.extensions().get::<Refusal>().unwrap().status(), conflict);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let error: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(error["error"]["code"], "idempotency_conflict");

    rendering.renderer = Some(Arc::new(|_| panic!("a renderer with a bug")));
    let response = Refusal::conflict().into_response::<Empty<Bytes>>(&rendering, &HeaderMap::new());
    assert_eq!(response.status(), conflict);
    assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
}

#[test]
fn a_grpc_client_gets_every_refusal_as_a_status_with_its_code() {
    let request = HeaderMap::from_iter([(CONTENT_TYPE, "application/grpc+proto".parse().unwrap())]);
    for refusal in all() {
        let code = refusal.code();
        let response = refusal.into_response::<Empty<Bytes>>(&Rendering::default(), &request);
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[CONTENT_TYPE], "application/grpc");
        assert_eq!(response.headers()["grpc-message"], code);
        let status: u16 = response.headers()["grpc-status"].to_str().unwrap().parse().unwrap();
        assert!((1..=16).contains(&status), "{code}: {status}");
    }
}

#[test]
fn a_tombstone_keeps_its_location() {
    let location = HeaderValue::from_static("/v1/runs/1");
    let response = Refusal::not_replayable(Some(location.clone()))
        .into_response::<Empty<Bytes>>(&Rendering::default(), &HeaderMap::new());
    assert_eq!(response.headers()[LOCATION], location);
}
