//! What does the inner answer mean? In: its status, what the handler said, gRPC's status; out:
//! record, release or hold. Pure: nothing is done here.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE, response::Parts};

use crate::{engine::OnFailure, hook::quietly};

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

impl From<Outcome> for Verdict {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Final => Self::Record,
            Outcome::NotExecuted => Self::Release,
            Outcome::Unknown => Self::Hold,
        }
    }
}

/// What a user makes of a response by its head: an outcome, or nothing, and then the table holds.
pub(crate) type RecordPolicy = dyn Fn(&Parts) -> Option<Outcome> + Send + Sync;

/// What is asked before the table: a policy of the user's own, or that of a preset.
#[derive(Clone)]
pub(crate) enum Policy {
    Own(Arc<RecordPolicy>),
    Ietf,
    Stripe,
}

impl Policy {
    /// By a response's head.
    fn of_head(&self, parts: &Parts) -> Option<Outcome> {
        match self {
            Self::Own(own) => quietly(|| own(parts)).flatten(),
            Self::Ietf => client_errors_are_final(parts.status),
            Self::Stripe => as_stripe_records(parts.status),
        }
    }

    /// By gRPC's UNAVAILABLE: it says "later", as 503 does, whose head would have been 200.
    fn of_unavailable(&self) -> Option<Outcome> {
        matches!(self, Self::Stripe).then_some(Outcome::NotExecuted)
    }
}

/// The 4xx that say nothing final about the operation itself: that it is not allowed, not found,
/// malformed, too early, too much. All other 4xx are recorded under both presets.
const NOT_FINAL: [u16; 20] = [
    400, 401, 403, 404, 405, 407, 408, 409, 411, 413, 414, 415, 417, 421, 423, 425, 426, 428, 429,
    431,
];

/// The record policy of the preset `ietf()`: 4xx are final, but for those that are not.
fn client_errors_are_final(status: StatusCode) -> Option<Outcome> {
    (status.is_client_error() && !NOT_FINAL.contains(&status.as_u16())).then_some(Outcome::Final)
}

/// The record policy of the preset `stripe()`: the same, and what says "later" releases.
fn as_stripe_records(status: StatusCode) -> Option<Outcome> {
    match status.as_u16() {
        408 | 429 | 503 => Some(Outcome::NotExecuted),
        _ => client_errors_are_final(status),
    }
}

/// What of a response's head decides its verdict.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered {
    status: StatusCode,
    said: Option<Outcome>,
    /// What the record policy makes of the status. Weaker than what the handler says.
    policy: Option<Outcome>,
    /// And of gRPC's UNAVAILABLE, which may come only with the trailers.
    unavailable: Option<Outcome>,
    is_grpc: bool,
    /// gRPC's status where the head has it already.
    grpc_status: Option<u32>,
}

impl Answered {
    pub(crate) fn new(parts: &Parts, policy: Option<&Policy>) -> Self {
        let content_type = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        Self {
            status: parts.status,
            said: parts.extensions.get().copied(),
            policy: policy.and_then(|policy| policy.of_head(parts)),
            unavailable: policy.and_then(Policy::of_unavailable),
            is_grpc: content_type.is_some_and(is_grpc),
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
                    Some(14) => self.unavailable.map_or(failed, Verdict::from),
                    // CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, DATA_LOSS; and
                    // a stream that ended without saying is as good as UNKNOWN.
                    Some(1 | 2 | 4 | 13 | 15) | None => failed,
                    Some(_) => Verdict::Release,
                }
            }
            200..=399 | 402 => Verdict::Record,
            408 | 500.. => failed,
            // Every other 4xx says that the work was not done. A 1xx is no answer yet.
            _ => Verdict::Release,
        };
        match self.said {
            Some(said) => said.into(),
            None => match self.policy.map_or_else(by_status, Verdict::from) {
                // Past its point of no return, "not done" is no longer believed.
                Verdict::Release if effects_begun => Verdict::Hold,
                verdict => verdict,
            },
        }
    }
}

/// gRPC proper: `application/grpc`, `application/grpc+proto` and the like. (gRPC-Web is not: its
/// status is in its body. So the layer belongs inside the one that translates it.)
pub(crate) fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let (essence, rest) = content_type.split_at(GRPC.len().min(content_type.len()));
    essence.eq_ignore_ascii_case(GRPC)
        && matches!(rest.first(), None | Some(b'+' | b';' | b' ' | b'\t'))
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
        Answered::new(&response.into_parts().0, None)
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
            assert_eq!(Answered::new(&in_head, None).verdict(None, OnFailure::Hold, false), right);

            let grpc = Response::builder().header("content-type", "application/grpc");
            let head = grpc.body(()).unwrap().into_parts().0;
            let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), code.into())]);
            let trailers = Some(&trailers);
            assert_eq!(Answered::new(&head, None).verdict(trailers, OnFailure::Hold, false), right);
        }
        let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
        let silent = Answered::new(&head.into_parts().0, None);
        assert_eq!(silent.verdict(None, OnFailure::Release, false), Verdict::Release);
    }

    #[test]
    fn only_what_is_grpc_proper_is_judged_by_its_grpc_status() {
        for (kind, right) in [
            ("application/grpc-web+proto", Verdict::Record),
            ("application/grpc-web-text", Verdict::Record),
            ("application/grpc", Verdict::Release),
            ("application/grpc+json", Verdict::Release),
            ("application/grpc; charset=x", Verdict::Release),
            // The case of a media type does not matter.
            ("Application/gRPC", Verdict::Release),
            ("Application/gRPC-Web", Verdict::Record),
            ("application/grp", Verdict::Record),
        ] {
            let head = Response::builder().header("content-type", kind).body(()).unwrap();
            let answered = Answered::new(&head.into_parts().0, None);
            assert_eq!(answered.verdict(None, OnFailure::Release, false), right, "{kind}");
        }
    }

    #[test]
    fn a_policy_goes_before_the_status_and_behind_the_handler_and_the_effects() {
        let head = |said: Option<Outcome>| {
            let mut response = Response::builder().status(422).body(()).unwrap();
            if let Some(said) = said {
                response.extensions_mut().insert(said);
            }
            response.into_parts().0
        };
        let verdict = |said, policy: fn(&Parts) -> Option<Outcome>, effects| {
            let policy = Policy::Own(Arc::new(policy));
            Answered::new(&head(said), Some(&policy)).verdict(None, OnFailure::Release, effects)
        };
        assert_eq!(verdict(None, |_| Some(Outcome::Final), false), Verdict::Record);
        assert_eq!(verdict(None, |_| Some(Outcome::NotExecuted), true), Verdict::Hold);
        assert_eq!(verdict(None, |_| None, false), Verdict::Release);
        assert_eq!(verdict(None, |_| panic!("a policy with a bug"), false), Verdict::Release);
        let said = Some(Outcome::NotExecuted);
        assert_eq!(verdict(said, |_| Some(Outcome::Final), true), Verdict::Release);
    }

    #[test]
    fn the_presets_record_client_errors_but_for_those_that_are_not_final() {
        for status in 100..=999_u16 {
            let parts = Response::builder().status(status).body(()).unwrap().into_parts().0;
            let is_final = (400..500).contains(&status) && !NOT_FINAL.contains(&status);
            let ietf = is_final.then_some(Outcome::Final);
            assert_eq!(Policy::Ietf.of_head(&parts), ietf, "{status}");
            let later = [408, 429, 503].contains(&status).then_some(Outcome::NotExecuted);
            assert_eq!(Policy::Stripe.of_head(&parts), later.or(ietf), "{status}");
        }
    }
}
