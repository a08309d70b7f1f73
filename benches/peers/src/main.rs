//! What others take for the same work: `scripts/bench-peers`.
//!
//! Each variant wraps the same service, with the same body type, and gets the same requests. A
//! round sends a batch through every variant in turn, another one first in each round; requests are
//! made outside the timing, the answer is collected inside it. Everything runs on one thread. The
//! table shows medians and the middle eight tenths; the last line the medians of what a peer took
//! over what this crate took, round by round.
//!
//! Only layers that can be put around any service are here, driven unmodified and with their own
//! defaults (CONTRIBUTING says which others are left out, and why). autumn-web and idempotent check
//! the body; axum-idempotent, with a key from a header, does not.

#![allow(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../common/mod.rs"]
mod common;
#[path = "../../common/counted.rs"]
mod counted;

use std::{convert::Infallible, fmt::Debug, sync::Arc, time::Duration};

use axum::{body::Body, extract::FromRequestParts};
use bytes::Bytes;
use common::{Answer, Sent, call, key, median, percentile};
use counted::Figures;
use http::{HeaderValue, Request, Response, header};
use http_body::Body as HttpBody;
use ruts::{
    CookieOptions, Session, SessionLayer,
    store::{Ttl, moka::MokaStore},
};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_cookies::CookieManagerLayer;

const ROUNDS: usize = 101;
const BATCH: usize = 1_000;
const RETENTION: Duration = Duration::from_secs(60 * 60);

/// Makes a service around [`Answer`], with nothing in its store, and the cookie that its callers
/// have to send.
trait Peer {
    const NAME: &str;

    type Service: Clone;

    fn service() -> impl Future<Output = (Self::Service, Option<HeaderValue>)>;
}

struct Bare;

impl Peer for Bare {
    const NAME: &str = "bare service";

    type Service = Answer<Body>;

    async fn service() -> (Self::Service, Option<HeaderValue>) {
        (Answer::new(), None)
    }
}

struct Ours;

impl Peer for Ours {
    const NAME: &str = "tower-idempotency";

    type Service = tower_idempotency::Idempotency<Answer<Body>>;

    async fn service() -> (Self::Service, Option<HeaderValue>) {
        use tower_idempotency::{IdempotencyLayer, MemoryStore, scope};

        let layer = IdempotencyLayer::new(scope::single_tenant());
        let store = MemoryStore::new().capacity(2 * BATCH);
        (layer.store(store).retention(RETENTION).layer(Answer::new()), None)
    }
}

struct AutumnWeb;

impl Peer for AutumnWeb {
    const NAME: &str = "autumn-web 0.9.0";

    type Service = autumn_web::idempotency::IdempotencyService<Answer<Body>>;

    async fn service() -> (Self::Service, Option<HeaderValue>) {
        use autumn_web::idempotency::{IdempotencyLayer, MemoryIdempotencyStore};

        let store = MemoryIdempotencyStore::new(RETENTION);
        (IdempotencyLayer::new(Arc::new(store)).layer(Answer::new()), None)
    }
}

struct AxumIdempotent;

type Sessions<S> = tower_cookies::CookieManager<ruts::SessionService<S, MokaStore>>;

impl Peer for AxumIdempotent {
    const NAME: &str = "axum-idempotent 0.6.0";

    type Service = Sessions<axum_idempotent::IdempotentService<Answer<Body>, MokaStore>>;

    async fn service() -> (Self::Service, Option<HeaderValue>) {
        use axum_idempotent::{IdempotentLayer, IdempotentOptions};

        let seconds = RETENTION.as_secs();
        let age = i64::try_from(seconds).unwrap();
        let options = IdempotentOptions::default()
            .use_idempotency_key_header(Some("Idempotency-Key"), true)
            .expire_after(age);
        let cookie = CookieOptions::build().name("session").max_age(seconds).path("/");
        let sessions =
            SessionLayer::new(Arc::new(MokaStore::builder().build())).with_cookie_options(cookie);

        // It keeps records for callers that have a session. So one is made first.
        let begin = service_fn(async |request: Request<Body>| {
            let (mut parts, _) = request.into_parts();
            let session = Session::<MokaStore>::from_request_parts(&mut parts, &()).await.unwrap();
            session.set("user", &"alice".to_owned(), Ttl::new(age).unwrap(), None).await.unwrap();
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        let begin = CookieManagerLayer::new().layer(sessions.layer(begin));
        let begun = begin.oneshot(Request::new(Body::empty())).await.unwrap();
        let cookie = begun.headers()[header::SET_COOKIE].to_str().unwrap();
        let cookie = cookie.split(';').next().unwrap().parse().unwrap();

        let layered = IdempotentLayer::<MokaStore>::new(options).layer(Answer::new());
        (CookieManagerLayer::new().layer(sessions.layer(layered)), Some(cookie))
    }
}

struct Idempotent;

impl Peer for Idempotent {
    const NAME: &str = "idempotent 2.0.0";

    type Service =
        idempotent::middleware::IdempotencyService<idempotent::memory::MemoryStore, Answer<Body>>;

    async fn service() -> (Self::Service, Option<HeaderValue>) {
        use idempotent::{memory::MemoryStore, middleware::IdempotencyLayer};

        let store = MemoryStore::builder().try_build().unwrap();
        (IdempotencyLayer::new(store).layer(Answer::new()), None)
    }
}

/// What is measured of a variant, for one kind of body.
const MEASURED: [&str; 3] =
    ["first call, new key", "replay, 1 live key", "replay, 1,000 live keys"];
const FIRST: usize = 0;
const REPLAY_OF_1000: usize = 2;

/// A variant whose type is its own affair.
trait Variant {
    fn name(&self) -> &'static str;
    fn figures(&self) -> &[Figures; 3];
    fn round(&mut self, runtime: &Runtime);
}

struct Measured<P: Peer> {
    sent: Sent,
    /// With 1 live key, and with 1,000.
    live: [(usize, P::Service, Option<HeaderValue>); 2],
    figures: [Figures; 3],
}

impl<P, R> Measured<P>
where
    P: Peer<Service: Service<Request<Body>, Response = Response<R>, Error = Infallible>>,
    R: HttpBody<Data = Bytes, Error: Debug>,
{
    async fn new(sent: &Sent) -> Self {
        let live = async |live| {
            let (service, cookie) = P::service().await;
            for request in requests(sent, cookie.as_ref(), 0..live) {
                assert_eq!(call(&service, request).await, 202, "{}", P::NAME);
            }
            (live, service, cookie)
        };
        let live = [live(1).await, live(1_000).await];
        Self { sent: sent.clone(), live, figures: Default::default() }
    }

    async fn measure(&mut self) {
        let Self { sent, live, figures: [first, replays @ ..] } = self;
        let (service, cookie) = P::service().await;
        let new = requests(sent, cookie.as_ref(), 0..BATCH);
        first.measure(new, async |request| assert_eq!(call(&service, request).await, 202)).await;
        for ((live, service, cookie), figures) in live.iter().zip(replays) {
            let known = requests(sent, cookie.as_ref(), (0..BATCH).map(|number| number % live));
            let replay = async |request| assert_eq!(call(service, request).await, 202);
            figures.measure(known, replay).await;
        }
    }
}

impl<P, R> Variant for Measured<P>
where
    P: Peer<Service: Service<Request<Body>, Response = Response<R>, Error = Infallible>>,
    R: HttpBody<Data = Bytes, Error: Debug>,
{
    fn name(&self) -> &'static str {
        P::NAME
    }

    fn figures(&self) -> &[Figures; 3] {
        &self.figures
    }

    fn round(&mut self, runtime: &Runtime) {
        runtime.block_on(self.measure());
    }
}

fn requests(
    sent: &Sent,
    cookie: Option<&HeaderValue>,
    keys: impl IntoIterator<Item = usize>,
) -> Vec<Request<Body>> {
    let request = |number| {
        let mut request = sent.request(Some(&key(number)));
        if let Some(cookie) = cookie {
            request.headers_mut().insert(header::COOKIE, cookie.clone());
        }
        request
    };
    keys.into_iter().map(request).collect()
}

/// Measures all variants with one kind of body.
fn run(runtime: &Runtime, sent: &Sent) -> Vec<Box<dyn Variant>> {
    let mut variants: Vec<Box<dyn Variant>> = runtime.block_on(async {
        vec![
            Box::new(Measured::<Bare>::new(sent).await) as Box<dyn Variant>,
            Box::new(Measured::<Ours>::new(sent).await),
            Box::new(Measured::<AutumnWeb>::new(sent).await),
            Box::new(Measured::<AxumIdempotent>::new(sent).await),
            Box::new(Measured::<Idempotent>::new(sent).await),
        ]
    });
    for round in 0..ROUNDS {
        let count = variants.len();
        for turn in 0..count {
            variants[(round + turn) % count].round(runtime);
        }
    }
    let bare = variants[0].figures().each_ref().map(Figures::nanos);
    for variant in &variants {
        print!("| {} | {} |", sent.kind, variant.name());
        for (figures, bare) in variant.figures().iter().zip(bare) {
            print!(
                " {:.0} ({:.0}–{:.0}), × {:.1}, {:.0} allocations |",
                figures.nanos(),
                percentile(&figures.nanos, 10),
                percentile(&figures.nanos, 90),
                figures.nanos() / bare,
                figures.allocations(),
            );
        }
        println!();
    }
    variants
}

/// What each peer took over what this crate took.
fn ratios(what: &str, variants: &[Box<dyn Variant>], measured: usize) -> String {
    let rounds = |variant: &dyn Variant| variant.figures()[measured].nanos.clone();
    let ours = rounds(&*variants[1]);
    let mut line = format!("{what}:");
    for peer in &variants[2..] {
        let ratios =
            rounds(&**peer).iter().zip(&ours).map(|(peer, ours)| peer / ours).collect::<Vec<_>>();
        let name = peer.name().split(' ').next().unwrap();
        line.push_str(&format!(" {name}/ours={:.2}", median(&ratios)));
    }
    line
}

fn main() {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    print!("| body of 256 B | variant |");
    for measured in MEASURED {
        print!(" {measured}, ns |");
    }
    println!("\n|---|---|{}", "---|".repeat(MEASURED.len()));
    let json = run(&runtime, &Sent::new("application/json", 256));
    let bytes = run(&runtime, &Sent::new("application/octet-stream", 256));
    println!(
        "{}  {}  {}  {}",
        ratios("replay", &json, REPLAY_OF_1000),
        ratios("replay bytes", &bytes, REPLAY_OF_1000),
        ratios("first json", &json, FIRST),
        ratios("first bytes", &bytes, FIRST),
    );
}
