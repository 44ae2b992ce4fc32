//! From a request to its response.
//!
//! The order of the checks: how often the client asks, where the request comes from, the token, the path, its method.
//! Refusals are counted by reason and say what to do.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::channel::{Channel, Sender};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::access;
use super::counters::Count;
use super::events::Position;
use super::gate::{Admission, Rate};
use super::{HookError, Server, metrics};

pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;
type Reply = Response<Body>;

/// The page: everything in one file. `NONCE` stands for the number that its style and its script have to carry.
const PAGE: &str = include_str!("page.html");

/// How long a refused client waits for the refusal, so that a flood costs little.
const REFUSAL_DELAY: Duration = Duration::from_millis(100);

/// Silence after which a subscriber hears that the connection stands.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Why a request gets no answer.
struct Refusal {
    count: Count,
    status: StatusCode,
    error: String,
    hint: &'static str,
}

impl Refusal {
    fn new(
        count: Count,
        status: StatusCode,
        error: impl Into<String>,
        hint: &'static str,
    ) -> Refusal {
        Refusal { count, status, error: error.into(), hint }
    }

    fn reply(self) -> Reply {
        let Refusal { status, error, hint, .. } = self;
        let mut reply =
            whole(status, "application/json", json!({ "error": error, "hint": hint }).to_string());
        if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        reply
    }
}

/// Answers a request.
pub(super) async fn answer(
    server: Arc<Server>,
    place: Arc<Admission>,
    request: Request<Incoming>,
) -> Result<Reply, Infallible> {
    server.counters.count(Count::Requests);
    let mut reply = match checked(&server, &place, request).await {
        Ok(reply) => reply,
        Err(refusal) => {
            server.counters.count(refusal.count);
            refusal.reply()
        }
    };
    let headers = reply.headers_mut();
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
    Ok(reply)
}

async fn checked(
    server: &Arc<Server>,
    place: &Admission,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let has_token = server.access.has_token(&request);
    if has_token {
        place.is_known();
    }
    // Calls of programs with the token are bounded by how many are under way, not by how often they come.
    let is_call = has_token && server.hooks.contains_key(request.uri().path());
    let rate = match has_token {
        _ if request.uri().path() == "/healthz" => Rate::Probe,
        true => Rate::User,
        false => Rate::Stranger,
    };
    if !is_call && !server.gate.may_ask(place.origin, rate, Instant::now()) {
        sleep(REFUSAL_DELAY).await;
        let hint = "ask less often: the limit is per address, and the page asks once a second";
        return Err(Refusal::new(
            Count::RefusedRate,
            StatusCode::TOO_MANY_REQUESTS,
            "too many requests",
            hint,
        ));
    }
    if let Some(count) = server.access.is_foreign(&request) {
        let hint = "use the IP address, or start the brain with a token";
        return Err(Refusal::new(
            count,
            StatusCode::FORBIDDEN,
            "the request may be another site's",
            hint,
        ));
    }
    let (path, is_read) =
        (request.uri().path(), matches!(*request.method(), Method::GET | Method::HEAD));
    match (path, is_read) {
        ("/", true) => return Ok(page(server)),
        ("/healthz", true) => return Ok(health(server, &request)),
        _ if !has_token => {
            let hint =
                "send `Authorization: Bearer TOKEN` with the token that the brain was started with";
            let error = "the token is missing or wrong";
            return Err(Refusal::new(Count::RefusedToken, StatusCode::UNAUTHORIZED, error, hint));
        }
        ("/api/view", true) => return Ok(view(server, &request)),
        ("/api/history", true) => return history(server, &request),
        ("/api/events", true) => return events(server, place, &request),
        ("/metrics", true) => return Ok(prometheus(server)),
        _ => {}
    }
    let known = ["/", "/healthz", "/api/view", "/api/history", "/api/events", "/metrics"];
    match server.hooks.contains_key(path) {
        true if *request.method() == Method::POST => call(server, request).await,
        is_hook if is_hook || known.contains(&path) => {
            let hint = if is_hook { "use POST" } else { "use GET" };
            let error = format!("{path} has no method {}", request.method());
            Err(Refusal::new(Count::RefusedMethod, StatusCode::METHOD_NOT_ALLOWED, error, hint))
        }
        _ => {
            let hint = "there are /, /api/view, /api/history, /api/events, /metrics and /healthz";
            Err(Refusal::new(
                Count::RefusedPath,
                StatusCode::NOT_FOUND,
                "there is no such path",
                hint,
            ))
        }
    }
}

fn whole(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(Full::new(body.into()).boxed_unsync());
    *reply.status_mut() = status;
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

fn good(kind: &'static str, body: impl Into<Bytes>) -> Reply {
    whole(StatusCode::OK, kind, body)
}

/// The page, with a policy that lets only its own style and script run.
fn page(server: &Server) -> Reply {
    let nonce = server.nonces.next();
    let mut reply = good("text/html; charset=utf-8", PAGE.replace("NONCE", &nonce));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        reply.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    reply
}

/// Whether the brain serves. With `?leading`, only the leader is healthy: for a balancer that looks for it.
fn health(server: &Server, request: &Request<Incoming>) -> Reply {
    let view = &server.newest.get().view;
    let state = view.brain.state.as_str();
    let wants_leader = request.uri().query() == Some("leading");
    let is_good = state == "leading" || state == "standby" && !wants_leader;
    let status = if is_good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({ "state": state, "term": view.brain.term, "needs_token": server.access.needs_token() });
    whole(status, "application/json", body.to_string())
}

fn view(server: &Server, request: &Request<Incoming>) -> Reply {
    let newest = server.newest.get();
    let tag = format!("\"{:x}-{}\"", server.series, newest.version);
    let known = request.headers().get(header::IF_NONE_MATCH).map(HeaderValue::as_bytes);
    let mut reply = match known == Some(tag.as_bytes()) {
        true => whole(StatusCode::NOT_MODIFIED, "application/json", Bytes::new()),
        false => good("application/json", newest.json(&server.counters)),
    };
    let headers = reply.headers_mut();
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    headers.insert("dquant-age-ms", HeaderValue::from(newest.age().as_millis() as u64));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    reply
}

fn history(server: &Server, request: &Request<Incoming>) -> Result<Reply, Refusal> {
    let query = request.uri().query().unwrap_or_default();
    let number = query.strip_prefix("link=").and_then(|number| number.parse().ok());
    let refused = |status, error: &str| {
        let hint = "ask for ?link=N, where N is the index of a link in /api/view";
        Refusal::new(Count::RefusedQuery, status, error, hint)
    };
    let number: usize =
        number.ok_or_else(|| refused(StatusCode::BAD_REQUEST, "no link is named"))?;
    let newest = server.newest.get();
    let mut history = server.history();
    history.begin(&newest.view, newest.age() < super::STALE, super::unix_ms());
    let found = history.of_link(number).map(|found| serde_json::to_vec(&found).unwrap_or_default());
    drop(history);
    let json = found.ok_or_else(|| refused(StatusCode::NOT_FOUND, "there is no such link"))?;
    Ok(good("application/json", json))
}

fn prometheus(server: &Server) -> Reply {
    let newest = server.newest.get();
    let bytes = server.history().bytes();
    let text = metrics::text(&newest.view, &server.counters.by_name(), bytes);
    good("text/plain; version=0.0.4; charset=utf-8", text)
}

/// Subscribes to events.
fn events(
    server: &Arc<Server>,
    place: &Admission,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let Some(seat) = server.seats.take(place.origin) else {
        let hint = "close other pages of this brain, or ask /api/view";
        let error = "as many subscribers as may be are there";
        return Err(Refusal::new(Count::RefusedBusy, StatusCode::SERVICE_UNAVAILABLE, error, hint));
    };
    server.counters.count(Count::Subscriptions);
    let last = request.headers().get("last-event-id").and_then(|value| value.to_str().ok());
    let position = last.and_then(Position::parse);
    let (sender, body) = Channel::new(1);
    let server = Arc::clone(server);
    tokio::spawn(async move {
        let _seat = seat;
        feed(&server, sender, position).await;
    });
    let mut reply = Response::new(body.boxed_unsync());
    let kind = HeaderValue::from_static("text/event-stream");
    reply.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(reply)
}

/// Sends events until the client goes. A client that reads slowly is waited for; what it misses, it is told.
async fn feed(server: &Server, mut sender: Sender<Bytes>, mut position: Option<Position>) {
    let mut news = server.events.subscribe();
    // At once, so that the client knows that it is connected.
    let mut text = String::from("retry: 1000\n\n");
    loop {
        let (more, next) = server.events.after(position);
        position = next;
        text.push_str(&more);
        if !text.is_empty()
            && sender.send_data(Bytes::from(std::mem::take(&mut text))).await.is_err()
        {
            return;
        }
        if more.is_empty() {
            match timeout(HEARTBEAT, news.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return,
                Err(_) => text.push_str(":\n\n"),
            }
        }
    }
}

/// Hands the body to the hook of the path.
async fn call(server: &Arc<Server>, request: Request<Incoming>) -> Result<Reply, Refusal> {
    let refused = |count, status, error: &str, hint| Err(Refusal::new(count, status, error, hint));
    let Some(hook) = server.hooks.get(request.uri().path()).cloned() else {
        return refused(Count::RefusedPath, StatusCode::NOT_FOUND, "there is no such path", "");
    };
    if !access::is_json(&request) {
        let (error, hint) = ("the body is not JSON", "send `Content-Type: application/json`");
        return refused(Count::RefusedType, StatusCode::UNSUPPORTED_MEDIA_TYPE, error, hint);
    }
    let Ok(permit) = Arc::clone(&server.calls).try_acquire_owned() else {
        let (error, hint) = ("as many calls as may be are under way", "try again");
        return refused(Count::RefusedBusy, StatusCode::SERVICE_UNAVAILABLE, error, hint);
    };
    let body = Limited::new(request.into_body(), super::MAX_BODY_BYTES);
    let Ok(body) = timeout(server.limits.body_timeout, body.collect()).await else {
        let (error, hint) = ("the body did not arrive in time", "try again");
        return refused(Count::RefusedSlow, StatusCode::REQUEST_TIMEOUT, error, hint);
    };
    let Ok(body) = body else {
        let (error, hint) = (
            "the body is cut off or larger than 4 MiB",
            "let Kubernetes send names only: nodeCacheCapable",
        );
        return refused(Count::RefusedBody, StatusCode::PAYLOAD_TOO_LARGE, error, hint);
    };
    let body = body.to_bytes();
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        hook(&body)
    });
    match done.await {
        Ok(Ok(answer)) => Ok(good("application/json", answer)),
        Ok(Err(HookError::Invalid(error))) => {
            let hint = "send the ExtenderArgs of Kubernetes' scheduler as JSON (docs/cluster.md, Kubernetes)";
            Err(Refusal::new(Count::RefusedHook, StatusCode::BAD_REQUEST, error, hint))
        }
        Ok(Err(HookError::Unavailable(error))) => {
            let hint = "ask the leader, or try again";
            Err(Refusal::new(Count::RefusedHook, StatusCode::SERVICE_UNAVAILABLE, error, hint))
        }
        Err(_) => {
            let (error, hint) = ("the call was ended", "report it: the brain's log has the reason");
            refused(Count::RefusedHook, StatusCode::INTERNAL_SERVER_ERROR, error, hint)
        }
    }
}
