//! What the benches share: the service below the layer, what is sent to it, and how figures are
//! summed up.

#![allow(dead_code, unreachable_pub, reason = "each bench uses a part of it")]

use std::{
    convert::Infallible,
    fmt::Write as _,
    future::{Ready, ready},
    marker::PhantomData,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tower::{Service, ServiceExt};

/// Answers 202 with some JSON: what is measured is everything around it.
pub struct Answer<R = Full<Bytes>>(PhantomData<fn() -> R>);

pub const ANSWER: &[u8] = br#"{"run_id":"run_0123456789abcdef","status":"started","input":"a prompt of a few words","session":"s_0123456789"}"#;

impl<R> Answer<R> {
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

impl<R> Clone for Answer<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Answer<R> {}

impl<B, R: From<Bytes>> Service<Request<B>> for Answer<R> {
    type Response = Response<R>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        let mut response = Response::new(R::from(Bytes::from_static(ANSWER)));
        *response.status_mut() = StatusCode::ACCEPTED;
        let kind = HeaderValue::from_static("application/json");
        response.headers_mut().insert("content-type", kind);
        ready(Ok(response))
    }
}

/// What is sent.
#[derive(Clone)]
pub struct Sent {
    pub body: Bytes,
    pub kind: &'static str,
}

impl Sent {
    pub fn request<B: From<Bytes>>(&self, key: Option<&HeaderValue>) -> Request<B> {
        let mut request = Request::post("/v1/runs")
            .header("content-type", self.kind)
            .header("user-agent", "bench")
            .header("accept", "*/*")
            .body(B::from(self.body.clone()))
            .unwrap();
        if let Some(key) = key {
            request.headers_mut().insert("idempotency-key", key.clone());
        }
        request
    }

    /// A JSON object of about `length` bytes, or as many other bytes.
    pub fn new(kind: &'static str, length: usize) -> Self {
        let mut body = String::from(r#"{"input":""#);
        if kind == "application/json" {
            body.push_str(&"lorem ipsum ".repeat(length / 24));
            body.push('"');
            let mut member = 0;
            while body.len() < length {
                member += 1;
                write!(body, r#","field_{member}":{member}"#).unwrap();
            }
            body.push('}');
        } else {
            body = "x".repeat(length);
        }
        Self { body: body.into(), kind }
    }
}

/// A key as SDKs make them: a UUID.
pub fn key(number: usize) -> HeaderValue {
    HeaderValue::from_str(&format!("0f8fad5b-d9cb-469f-a165-{number:012x}")).unwrap()
}

/// Sends a request and collects the answer.
pub async fn call<S, B, R>(service: &S, request: Request<B>) -> StatusCode
where
    S: Service<Request<B>, Response = Response<R>, Error = Infallible> + Clone,
    R: Body<Data = Bytes>,
    R::Error: std::fmt::Debug,
{
    let response = service.clone().oneshot(request).await.unwrap();
    let status = response.status();
    std::hint::black_box(response.into_body().collect().await.unwrap().to_bytes());
    status
}

pub fn median(values: &[f64]) -> f64 {
    percentile(values, 50)
}

/// The value that so many of a hundred are not over.
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}
