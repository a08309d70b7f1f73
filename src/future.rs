//! The future of one request. In: what [`service`](crate::Idempotency) chose; out: the inner
//! service's answer, a recorded one, or a refusal. Only a keyed request is boxed.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use crate::{
    body::{RequestBody, ResponseBody},
    guard::SlotEnd,
};

type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

pin_project! {
    /// The future of [`Idempotency`](crate::Idempotency).
    ///
    /// # Cancel safety
    ///
    /// Dropped before the inner service is called, it leaves nothing behind. Dropped after that,
    /// the execution is handed to the runtime, finishes and is recorded (or, with
    /// [`OnLeave::Cancel`](crate::OnLeave::Cancel), ends by the failure rule). A request that
    /// passes through unprotected is dropped as it would be without the layer.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
        R: Body,
    {
        #[pin]
        way: Way<S, B, R>,
    }
}

pin_project! {
    #[project = WayProject]
    enum Way<S, B, R>
    where
        S: Service<Request<RequestBody<B>>>,
        R: Body,
    {
        Passed {
            #[pin]
            inner: Oneshot<S, Request<RequestBody<B>>>,
            slot: Option<SlotEnd>,
        },
        Guarded { journey: Pin<Box<dyn Future<Output = Answer<R, S::Error>> + Send>> },
        Refused { response: Option<Response<ResponseBody<R>>> },
    }
}

impl<S, B, R> ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
    R: Body,
{
    /// The inner service's own answer, its body untouched; `slot` is closed when it is there.
    pub(crate) fn pass(inner: S, request: Request<B>, slot: Option<SlotEnd>) -> Self {
        let inner = Oneshot::new(inner, request.map(RequestBody::untouched));
        Self { way: Way::Passed { inner, slot } }
    }

    pub(crate) fn guarded(
        journey: impl Future<Output = Answer<R, S::Error>> + Send + 'static,
    ) -> Self {
        Self { way: Way::Guarded { journey: Box::pin(journey) } }
    }

    pub(crate) fn refused(response: Response<ResponseBody<R>>) -> Self {
        Self { way: Way::Refused { response: Some(response) } }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>, Response = Response<R>>,
    R: Body,
{
    type Output = Answer<R, S::Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().way.project() {
            WayProject::Passed { inner, slot } => {
                let answer = ready!(inner.poll(context));
                drop(slot.take());
                Poll::Ready(answer.map(|response| response.map(ResponseBody::inner)))
            }
            WayProject::Guarded { journey } => journey.as_mut().poll(context),
            WayProject::Refused { response } => {
                Poll::Ready(Ok(response.take().expect("polled after completion")))
            }
        }
    }
}

impl<S, B, R> fmt::Debug for ResponseFuture<S, B, R>
where
    S: Service<Request<RequestBody<B>>>,
    R: Body,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
