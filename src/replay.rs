//! A record, given again. In: a [`StoredResponse`]; out: that answer, marked as a replay, or the
//! refusal that a tombstone means. Nothing is called.

use http::{HeaderValue, Response};
use http_body::Body;

use crate::{
    body::ResponseBody,
    headers::REPLAYED,
    record::{Stored, StoredResponse},
    refusal::Refusal,
};

pub(crate) fn replay<B: Body>(
    value: &StoredResponse,
) -> Result<Response<ResponseBody<B>>, Refusal> {
    match value.get() {
        Stored::Response { status, headers, body, trailers } => {
            let trailers = trailers.as_ref().map(|trailers| Box::new(trailers.to_map(0)));
            let mut response = Response::new(ResponseBody::whole(body.clone(), trailers));
            *response.status_mut() = *status;
            *response.headers_mut() = headers.to_map(1);
            response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            Ok(response)
        }
        Stored::Tombstone { location } => Err(Refusal::not_replayable(location.clone())),
    }
}
