//! A retry gets the first answer, and the work is done once.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, service_fn};
use tower_idempotency::{IdempotencyLayer, RequestBody, scope};

use crate::support::{Runs, keyed, send};

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_the_work_is_done_once() {
    let runs = Runs::default();
    let service = IdempotencyLayer::new(scope::single_tenant()).layer(service_fn({
        let runs = runs.clone();
        move |_: Request<RequestBody<Full<Bytes>>>| {
            let run = runs.run();
            async move { Ok::<_, Infallible>(Response::new(Full::from(format!("run {run}")))) }
        }
    }));
    let first = send(&service, keyed("k", "{}")).await;
    let again = send(&service, keyed("k", "{}")).await;
    assert_eq!((first.text(), again.text()), ("run 1", "run 1"));
    assert!(!first.is_replay() && again.is_replay());
    assert_eq!(runs.count(), 1);
}
