//! A retry gets the first answer, and the work is done once.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_http::{
    cors::{AllowOrigin, CorsLayer},
    request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer},
    set_header::SetResponseHeaderLayer,
};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, RequestBody, scope};

use crate::support::{
    Answer, Runs, keyed, send,
    stack::{Script, Stack, Step, any, layer, text, with_extension, with_header},
    unkeyed,
};

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

#[tokio::test]
async fn other_keys_and_requests_without_one_are_new_work() {
    let (layer, store) = layer();
    let stack = Stack::numbered(&layer);
    assert_eq!(stack.send(keyed("a", "{}")).await.text(), "run 1");
    assert_eq!(stack.send(keyed("b", "{}")).await.text(), "run 2");
    for run in 3..=4 {
        let answer = stack.send(unkeyed("{}")).await;
        assert_eq!(answer.text(), format!("run {run}"));
        assert!(!answer.is_replay());
    }
    assert_eq!(store.len(), 2, "nothing is kept of a request without a key");
}

#[tokio::test]
async fn a_store_of_another_process_knows_nothing() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    stack.send(keyed("k", "{}")).await;
    let restarted = Stack::numbered(&layer.store(MemoryStore::new()));
    assert!(!restarted.send(keyed("k", "{}")).await.is_replay());
}

#[tokio::test]
async fn a_status_is_replayed_exactly_however_odd() {
    let (layer, _) = layer();
    let by_status = [200, 201, 202, 203, 206, 207, 226, 299, 300, 303, 308, 399, 402];
    let by_word = [400, 404, 406, 409, 418, 422, 451, 499, 500, 503, 599, 600, 799, 999];
    for (status, said) in by_status
        .into_iter()
        .map(|status| (status, None))
        .chain(by_word.into_iter().map(|status| (status, Some(Outcome::Final))))
    {
        let stack = Stack::new(&layer, move |run, _| async move {
            let response = text(status, format!("run {run}"));
            Ok(match said {
                Some(said) => with_extension(response, said),
                None => response,
            })
        });
        let key = format!("k{status}");
        let first = stack.send(keyed(&key, "{}")).await;
        let again = stack.send(keyed(&key, "{}")).await;
        assert_eq!((first.status.as_u16(), first.text()), (status, "run 1"));
        assert_eq!((again.status.as_u16(), again.text()), (status, "run 1"));
        assert!(!first.is_replay() && again.is_replay(), "{status}");
    }
}

#[tokio::test]
async fn an_empty_answer_is_an_answer() {
    let (layer, _) = layer();
    for status in [202, 204, 205, 304] {
        let stack = Stack::new(&layer, move |_, _| async move { Ok(text(status, "")) });
        let key = format!("k{status}");
        for is_replay in [false, true, true] {
            let response = stack.call(keyed(&key, "{}")).await.unwrap();
            assert_eq!(response.body().size_hint().exact(), Some(0));
            assert!(response.body().is_end_stream());
            let answer = Answer::read(response).await;
            assert_eq!((answer.status.as_u16(), answer.text()), (status, ""));
            assert_eq!(answer.is_replay(), is_replay);
            assert_eq!(answer.header("content-length"), None);
        }
        assert_eq!(stack.runs.count(), 1);
    }
}

fn lines(headers: &HeaderMap) -> Vec<(&str, &[u8])> {
    headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect()
}

#[tokio::test]
async fn every_header_line_that_still_means_the_same_is_replayed_in_order_and_byte_for_byte() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async move {
        let mut response = text(201, "a;b");
        for (name, value) in [
            ("content-type", &b"text/csv; charset=utf-8"[..]),
            ("location", b"/v1/runs/1"),
            ("link", b"<a>; rel=next"),
            ("etag", b"W/\"1\""),
            ("cache-control", b"max-age=60"),
            ("link", b"<b>; rel=prev"),
            ("content-disposition", b"attachment; filename=\"a,b.csv\""),
            ("x-latin", b"caf\xe9 \xff\x80"),
            ("x-empty", b""),
            ("vary", b"accept"),
            ("link", b"<a>; rel=next"),
        ] {
            response = with_header(response, name, value);
        }
        Ok(response)
    });
    let first = stack.send(keyed("k", "{}")).await;
    let mut again = stack.send(keyed("k", "{}")).await;
    assert!(again.is_replay());
    again.headers.remove("idempotent-replayed");
    assert_eq!(lines(&again.headers), lines(&first.headers));
    assert_eq!(first.headers.get_all("link").iter().count(), 3);
}

/// Headers of one exchange, and what they say.
const OF_ONE_EXCHANGE: [(&str, &str); 31] = [
    ("connection", "x-hop, close"),
    ("x-hop", "1"),
    ("keep-alive", "timeout=5"),
    ("proxy-connection", "close"),
    ("te", "trailers"),
    ("transfer-encoding", "chunked"),
    ("upgrade", "h2c"),
    ("content-length", "5"),
    ("date", "Mon, 01 Jan 2024 00:00:00 GMT"),
    ("server", "s"),
    ("via", "1.1 p"),
    ("age", "7"),
    ("alt-svc", "h3"),
    ("set-cookie", "session=secret"),
    ("www-authenticate", "Bearer"),
    ("proxy-authenticate", "Basic"),
    ("authentication-info", "nextnonce=1"),
    ("server-timing", "db;dur=53"),
    ("ratelimit", "limit=10"),
    ("ratelimit-policy", "10;w=1"),
    ("ratelimit-remaining", "3"),
    ("x-ratelimit-limit", "10"),
    ("x-ratelimit-reset", "9"),
    ("access-control-allow-origin", "https://a.example"),
    ("access-control-expose-headers", "x"),
    ("x-request-id", "1"),
    ("traceparent", "00-1-2-00"),
    ("trailer", "x-checksum"),
    ("retry-after", "5"),
    ("set-cookie", "csrf=secret"),
    ("x-kept", "1"),
];

#[tokio::test]
async fn what_belongs_to_one_exchange_reaches_the_first_caller_and_no_other() {
    let (layer, _) = layer();
    // Recorded, and neither 2xx nor 3xx: `Retry-After` belongs to the moment.
    let stack = Stack::new(&layer, |_, _| async move {
        let response = text(402, "12345");
        Ok(OF_ONE_EXCHANGE
            .into_iter()
            .fold(response, |response, (name, value)| with_header(response, name, value)))
    });
    let first = stack.send(keyed("k", "{}")).await;
    for (name, value) in OF_ONE_EXCHANGE {
        assert!(first.headers.get_all(name).iter().any(|line| line == value), "{name}");
    }
    for _ in 0..2 {
        let again = stack.send(keyed("k", "{}")).await;
        assert_eq!(
            lines(&again.headers),
            [("x-kept", &b"1"[..]), ("idempotent-replayed", b"true")]
        );
        assert_eq!(again.text(), "12345");
    }
}

#[tokio::test]
async fn retry_after_is_replayed_with_success_and_redirection_only() {
    let (layer, _) = layer();
    for (status, said) in
        [(202, Some("120")), (303, Some("120")), (402, None), (429, None), (503, None)]
    {
        let stack = Stack::new(&layer, move |_, _| async move {
            let response = with_header(text(status, ""), "retry-after", "120");
            Ok(with_extension(response, Outcome::Final))
        });
        let key = format!("k{status}");
        assert_eq!(stack.send(keyed(&key, "{}")).await.header("retry-after"), Some("120"));
        let again = stack.send(keyed(&key, "{}")).await;
        assert_eq!((again.status.as_u16(), again.header("retry-after")), (status, said));
    }
}

#[tokio::test]
async fn the_marker_is_there_once_and_on_replays_only_whatever_the_inner_service_sets() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async move {
        let response = with_header(text(200, ""), "idempotent-replayed", "true");
        Ok(with_header(response, "idempotent-replayed", "false"))
    });
    assert!(!stack.send(keyed("k", "{}")).await.is_replay());
    for _ in 0..3 {
        assert!(stack.send(keyed("k", "{}")).await.is_replay());
    }
}

#[tokio::test]
async fn a_hundred_replays_under_a_layer_that_appends_a_header_all_have_it_once() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .layer(SetResponseHeaderLayer::appending(
            HeaderName::from_static("x-outer"),
            HeaderValue::from_static("1"),
        ))
        .service(
            Stack::new(&layer, |run, _| async move {
                Ok(with_header(text(200, format!("run {run}")), "x-inner", "1"))
            })
            .service,
        );
    for repeat in 0..=100 {
        let answer = send(&service, keyed("k", "{}").map(any)).await;
        assert_eq!(answer.text(), "run 1");
        for name in ["x-outer", "x-inner"] {
            assert_eq!(answer.headers.get_all(name).iter().count(), 1, "{name} of {repeat}");
        }
    }
}

#[tokio::test]
async fn a_body_of_any_bytes_is_replayed_byte_for_byte() {
    let (layer, _) = layer();
    let every_byte: Vec<u8> = (0..=255).collect();
    let bodies = [
        Bytes::from_static(b"\0"),
        Bytes::from_static(b"\xff\xfe\0\xff"),
        Bytes::from_static(b"invalid \xc3\x28 utf-8 \xed\xa0\x80"),
        Bytes::from_static(b"{\"a\":1,\"a\":2,\"n\":12345678901234567890, \"e\": 1.0e0}\r\n"),
        Bytes::from(every_byte.repeat(1024)),
    ];
    for (index, body) in bodies.into_iter().enumerate() {
        let sent = body.clone();
        let stack = Stack::new(&layer, move |_, _| {
            let sent = sent.clone();
            async move { Ok(text(200, sent)) }
        });
        let key = format!("k{index}");
        for is_replay in [false, true] {
            let answer = stack.send(keyed(&key, "{}")).await;
            assert_eq!(answer.body, body);
            assert_eq!(answer.is_replay(), is_replay);
        }
    }
}

#[tokio::test]
async fn a_body_that_comes_in_many_frames_is_replayed_whole() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async move {
        let steps = ["", "one", "", " two", " three", ""].map(Step::data);
        Ok(Response::new(any(Script::new(steps).says(13))))
    });
    assert_eq!(stack.send(keyed("k", "{}")).await.text(), "one two three");
    let again = stack.call(keyed("k", "{}")).await.unwrap();
    assert_eq!(again.body().size_hint().exact(), Some(13));
    assert_eq!(Answer::read(again).await.text(), "one two three");
}

#[tokio::test]
async fn trailers_are_replayed_with_the_field_that_announces_them() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |_, _| async move {
        let steps = [Step::data("12345"), Step::trailer("x-checksum", "c")];
        let response = Response::new(any(Script::new(steps).says(5)));
        Ok(with_header(response, "trailer", "x-checksum"))
    });
    for is_replay in [false, true] {
        let response = stack.call(keyed("k", "{}")).await.unwrap();
        // hyper sends HTTP/1.1 trailers only behind a body of unknown length.
        assert_eq!(response.body().size_hint().exact(), None);
        let answer = Answer::read(response).await;
        assert_eq!(answer.is_replay(), is_replay);
        assert_eq!(answer.text(), "12345");
        assert_eq!(answer.header("trailer"), Some("x-checksum"));
        assert_eq!(answer.trailers.unwrap()["x-checksum"], "c");
    }
    assert_eq!(stack.runs.count(), 1);
}

#[tokio::test]
async fn extensions_of_a_response_are_for_the_first_caller() {
    #[derive(Debug, Clone, PartialEq)]
    struct Note(&'static str);

    let (layer, _) = layer();
    let stack =
        Stack::new(&layer, |_, _| async move { Ok(with_extension(text(200, ""), Note("first"))) });
    let first = stack.call(keyed("k", "{}")).await.unwrap();
    assert_eq!(first.extensions().get(), Some(&Note("first")));
    let again = stack.call(keyed("k", "{}")).await.unwrap();
    assert_eq!(again.extensions().get::<Note>(), None);
}

#[tokio::test]
async fn an_answer_that_was_lost_on_its_way_is_replayed_in_full() {
    let (layer, _) = layer();
    let stack = Stack::numbered(&layer);
    // The connection is gone before the body is sent.
    drop(stack.call(keyed("k", "{}")).await.unwrap());
    let again = stack.send(keyed("k", "{}")).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "run 1"));

    // An outer layer says something else instead.
    let outer = ServiceBuilder::new()
        .map_response(|_| text(502, "bad gateway"))
        .service(stack.service.clone());
    assert_eq!(send(&outer, keyed("other", "{}").map(any)).await.status, StatusCode::BAD_GATEWAY);
    let again = stack.send(keyed("other", "{}")).await;
    assert_eq!((again.status, again.text()), (StatusCode::OK, "run 2"));
    assert_eq!(stack.runs.count(), 2);
}

#[tokio::test]
async fn a_final_409_of_the_handler_is_told_from_the_layers_own() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |run, _| async move {
        Ok(match run {
            1 => with_extension(text(409, r#"{"code":"slot_taken"}"#), Outcome::Final),
            _ => text(201, "{}"),
        })
    });
    let first = stack.send(keyed("k", "{}")).await;
    let again = stack.send(keyed("k", "{}")).await;
    assert_eq!((again.status, &again.body), (StatusCode::CONFLICT, &first.body));
    assert!(again.is_replay());
    stack.send(keyed("k", "[]")).await.assert_refused(409, "idempotency_conflict");
}

#[tokio::test]
async fn a_replay_carries_the_cors_headers_of_its_own_exchange() {
    let (layer, _) = layer();
    let origins = ["https://a.example", "https://b.example"];
    let service = ServiceBuilder::new()
        .layer(
            CorsLayer::new()
                .allow_origin(AllowOrigin::list(origins.map(|origin| origin.parse().unwrap()))),
        )
        .service(
            Stack::new(&layer, |_, _| async move {
                // What an inner layer said of its own accord would stay with the record.
                Ok(with_header(text(200, ""), "access-control-max-age", "1"))
            })
            .service,
        );
    for (origin, is_replay) in origins.into_iter().zip([false, true]) {
        let mut request = keyed("k", "{}").map(any);
        request.headers_mut().insert("origin", origin.parse().unwrap());
        let answer = send(&service, request).await;
        assert_eq!(answer.is_replay(), is_replay);
        let allowed: Vec<_> =
            answer.headers.get_all("access-control-allow-origin").iter().collect();
        assert_eq!(allowed, [origin]);
        assert_eq!(answer.headers.contains_key("access-control-max-age"), !is_replay);
    }
}

#[tokio::test]
async fn a_replay_carries_the_request_id_of_its_own_exchange() {
    let (layer, _) = layer();
    let service = ServiceBuilder::new()
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(PropagateRequestIdLayer::x_request_id())
        .service(
            Stack::new(&layer, |_, request| async move {
                let id = request.headers()["x-request-id"].as_bytes().to_vec();
                Ok(with_header(text(200, ""), "x-request-id", id))
            })
            .service,
        );
    for (id, is_replay) in [("one", false), ("two", true)] {
        let mut request = keyed("k", "{}").map(any);
        request.headers_mut().insert("x-request-id", id.parse().unwrap());
        let answer = send(&service, request).await;
        assert_eq!(answer.is_replay(), is_replay);
        let ids: Vec<_> = answer.headers.get_all("x-request-id").iter().collect();
        assert_eq!(ids, [id]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_costs_no_time_of_the_handler() {
    let (layer, _) = layer();
    let stack = Stack::new(&layer, |run, _| async move {
        tokio::time::sleep(Duration::from_secs(20)).await;
        Ok(text(200, format!("run {run}")))
    });
    stack.send(keyed("k", "{}")).await;
    let began = tokio::time::Instant::now();
    let response = stack.service.clone().oneshot(keyed("k", "{}").map(any)).await.unwrap();
    assert_eq!(Answer::read(response).await.text(), "run 1");
    assert_eq!(began.elapsed(), Duration::ZERO);
}
