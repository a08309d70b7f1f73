//! What does the inner answer mean? In: its status, what the handler said, gRPC's status; out:
//! record, release or hold. Pure: nothing is done here.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE, response::Parts};

use crate::engine::OnFailure;

/// What a handler says of its own work, as an extension of its response. It goes before anything
/// the status says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// This is the answer, whatever its status: record it.
    Final,
    /// Nothing has happened: a retry may run.
    NotExecuted,
    /// Something may have happened: hold the entry until an operator or the retention ends it.
    Unknown,
}

/// How long this response's record is to live, as an extension of the response; counted from
/// completion. Default: the layer's [`retention`](crate::IdempotencyLayer::retention). What the
/// handler said through its [`Handle`](crate::Handle) goes before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetainFor(pub Duration);

/// What becomes of an operation that was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Record,
    Release,
    Hold,
}

/// What of a response's head decides its verdict.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered {
    status: StatusCode,
    said: Option<Outcome>,
    is_grpc: bool,
    /// gRPC's status where the head has it already.
    grpc_status: Option<u32>,
}

impl Answered {
    pub(crate) fn new(parts: &Parts) -> Self {
        let content_type = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        Self {
            status: parts.status,
            said: parts.extensions.get().copied(),
            is_grpc: content_type.is_some_and(|value| value.starts_with(b"application/grpc")),
            grpc_status: grpc_status(&parts.headers),
        }
    }

    /// The verdict, once the whole answer is there.
    pub(crate) fn verdict(
        &self,
        trailers: Option<&HeaderMap>,
        on_failure: OnFailure,
        effects_begun: bool,
    ) -> Verdict {
        let failed = match on_failure {
            OnFailure::Release => Verdict::Release,
            OnFailure::Hold => Verdict::Hold,
            OnFailure::Record => Verdict::Record,
        };
        let by_status = || match self.status.as_u16() {
            200..=399 if self.is_grpc => {
                match self.grpc_status.or_else(|| trailers.and_then(grpc_status)) {
                    Some(0) => Verdict::Record,
                    // CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE, DATA_LOSS; and
                    // a stream that ended without saying is as good as UNKNOWN.
                    Some(1 | 2 | 4 | 13 | 14 | 15) | None => failed,
                    Some(_) => Verdict::Release,
                }
            }
            200..=399 | 402 => Verdict::Record,
            408 | 500.. => failed,
            // Every other 4xx says that the work was not done. A 1xx is no answer yet.
            _ => Verdict::Release,
        };
        match self.said {
            Some(Outcome::Final) => Verdict::Record,
            Some(Outcome::NotExecuted) => Verdict::Release,
            Some(Outcome::Unknown) => Verdict::Hold,
            None => match by_status() {
                // Past its point of no return, "not done" is no longer believed.
                Verdict::Release if effects_begun => Verdict::Hold,
                verdict => verdict,
            },
        }
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<u32> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Response;

    const RULES: [OnFailure; 3] = [OnFailure::Release, OnFailure::Hold, OnFailure::Record];

    fn answered(status: u16, said: Option<Outcome>) -> Answered {
        let mut response = Response::builder().status(status).body(()).unwrap();
        if let Some(said) = said {
            response.extensions_mut().insert(said);
        }
        Answered::new(&response.into_parts().0)
    }

    #[test]
    fn every_status_has_the_verdict_of_the_table() {
        for status in 100..=999 {
            let verdicts = RULES.map(|rule| answered(status, None).verdict(None, rule, false));
            let right = match status {
                200..=399 | 402 => [Verdict::Record; 3],
                408 | 500.. => [Verdict::Release, Verdict::Hold, Verdict::Record],
                _ => [Verdict::Release; 3],
            };
            assert_eq!(verdicts, right, "{status}");
        }
    }

    #[test]
    fn after_effects_have_begun_nothing_is_released_by_its_status() {
        for status in 100..=999 {
            for rule in RULES {
                let verdict = answered(status, None).verdict(None, rule, true);
                assert_ne!(verdict, Verdict::Release, "{status} {rule:?}");
            }
        }
    }

    #[test]
    fn what_the_handler_says_goes_before_status_rule_and_effects() {
        for status in 100..=999 {
            for (rule, effects) in RULES.into_iter().zip([true, false, true]) {
                for (said, right) in [
                    (Outcome::Final, Verdict::Record),
                    (Outcome::NotExecuted, Verdict::Release),
                    (Outcome::Unknown, Verdict::Hold),
                ] {
                    assert_eq!(answered(status, Some(said)).verdict(None, rule, effects), right);
                }
            }
        }
    }

    #[test]
    fn grpc_is_judged_by_its_own_status_in_head_or_trailers() {
        for code in 0..=16_u32 {
            let right = match code {
                0 => Verdict::Record,
                1 | 2 | 4 | 13 | 14 | 15 => Verdict::Hold,
                _ => Verdict::Release,
            };
            let grpc = Response::builder().header("content-type", "application/grpc+proto");
            let in_head = grpc.header("grpc-status", code).body(()).unwrap().into_parts().0;
            assert_eq!(Answered::new(&in_head).verdict(None, OnFailure::Hold, false), right);

            let grpc = Response::builder().header("content-type", "application/grpc");
            let head = grpc.body(()).unwrap().into_parts().0;
            let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), code.into())]);
            let trailers = Some(&trailers);
            assert_eq!(Answered::new(&head).verdict(trailers, OnFailure::Hold, false), right);
        }
        let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let silent = Answered::new(&head.into_parts().0);
        assert_eq!(silent.verdict(None, OnFailure::Release, false), Verdict::Release);
    }
}
