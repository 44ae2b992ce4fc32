//! Responses: whole ones, refusals with a hint, and the headers that all have.

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::counters::Count;

/// The body of a response.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// A response.
pub type Reply = Response<Body>;

/// Why a request gets no answer.
#[derive(Debug)]
pub struct Refusal {
    pub(super) count: Count,
    status: StatusCode,
    error: String,
    hint: &'static str,
}

impl Refusal {
    /// A refusal that is counted, and said with the next thing to try.
    pub fn new(
        count: Count,
        status: StatusCode,
        error: impl Into<String>,
        hint: &'static str,
    ) -> Refusal {
        Refusal { count, status, error: error.into(), hint }
    }

    pub(super) fn into_reply(self) -> Reply {
        let Refusal { status, error, hint, .. } = self;
        let mut reply =
            whole(status, "application/json", json!({ "error": error, "hint": hint }).to_string());
        if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        reply
    }
}

/// A response of one piece.
pub fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// The same with status 200.
pub fn good(kind: &'static str, body: impl Into<Bytes>) -> Reply {
    whole(StatusCode::OK, kind, body)
}

/// Adds what keeps browsers from doing more with a response than they were asked, and `close` where
/// the connection `ends` with it.
pub(super) fn guard(headers: &mut HeaderMap, ends: bool) {
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-resource-policy", "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    let policy = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'");
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(policy);
    if ends {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
}
