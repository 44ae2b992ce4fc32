//! From a request to its response: which paths there are, and what they serve.
//!
//! The order of the checks: how often the client asks, where the request comes from (both in the
//! kit, `service::http`), the token, the path, its method.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;
use service::http::{Client, Count, Guard, Refusal, Reply, good, is_json, whole};
use service::metrics::Format;
use tokio::time::timeout;

use super::events::Position;
use super::{HookError, MAX_BODY_BYTES, Site, metrics};

/// The page: everything in one file. `NONCE` stands for the number that its style and its script
/// have to carry.
const PAGE: &str = include_str!("page.html");

/// Silence after which a subscriber hears that the connection stands.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Answers a request.
pub(super) async fn answer(
    site: Arc<Site>,
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let guard = match request.uri().path() {
        "/healthz" => Guard::Health,
        path if site.hooks.contains_key(path) => Guard::Call,
        _ => Guard::Asked,
    };
    let has_token = site.http.check(&client, guard, &request).await?;
    let (path, is_read) =
        (request.uri().path(), matches!(*request.method(), Method::GET | Method::HEAD));
    match (path, is_read) {
        ("/", true) => return Ok(page(&site)),
        ("/healthz", true) => return Ok(health(&site, &request)),
        _ if !has_token => {
            let hint =
                "send `Authorization: Bearer TOKEN` with the token that the brain was started with";
            let error = "the token is missing or wrong";
            return Err(Refusal::new(Count::RefusedToken, StatusCode::UNAUTHORIZED, error, hint));
        }
        ("/api/view", true) => return Ok(view(&site, &request)),
        ("/api/history", true) => return history(&site, &request),
        ("/api/events", true) => return events(&site, &client, &request),
        ("/metrics", true) => return Ok(prometheus(&site, &request)),
        _ => {}
    }
    let known = ["/", "/healthz", "/api/view", "/api/history", "/api/events", "/metrics"];
    match site.hooks.contains_key(path) {
        true if *request.method() == Method::POST => call(&site, request).await,
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

/// The page, with a policy that lets only its own style and script run.
fn page(site: &Site) -> Reply {
    let nonce = site.nonces.next();
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

/// Whether the brain serves. With `?leading`, only the leader is healthy: for a balancer that looks
/// for it.
fn health(site: &Site, request: &Request<Incoming>) -> Reply {
    let view = &site.newest.get().view;
    let state = view.brain.state.as_str();
    let wants_leader = request.uri().query() == Some("leading");
    let is_good = state == "leading" || state == "standby" && !wants_leader;
    let status = if is_good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body =
        json!({ "state": state, "term": view.brain.term, "needs_token": site.http.needs_token() });
    whole(status, "application/json", body.to_string())
}

fn view(site: &Site, request: &Request<Incoming>) -> Reply {
    let newest = site.newest.get();
    let tag = format!("\"{:x}-{}\"", site.series, newest.version);
    let known = request.headers().get(header::IF_NONE_MATCH).map(HeaderValue::as_bytes);
    let mut reply = match known == Some(tag.as_bytes()) {
        true => whole(StatusCode::NOT_MODIFIED, "application/json", Bytes::new()),
        false => good("application/json", newest.json(&site.counters)),
    };
    let headers = reply.headers_mut();
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        headers.insert(header::ETAG, tag);
    }
    headers.insert("dquant-age-ms", HeaderValue::from(newest.age().as_millis() as u64));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
    reply
}

fn history(site: &Site, request: &Request<Incoming>) -> Result<Reply, Refusal> {
    let query = request.uri().query().unwrap_or_default();
    let number = query.strip_prefix("link=").and_then(|number| number.parse().ok());
    let refused = |status, error: &str| {
        let hint = "ask for ?link=N, where N is the index of a link in /api/view";
        Refusal::new(Count::RefusedQuery, status, error, hint)
    };
    let number: usize =
        number.ok_or_else(|| refused(StatusCode::BAD_REQUEST, "no link is named"))?;
    let newest = site.newest.get();
    let mut history = site.history();
    history.begin(&newest.view, newest.age() < super::STALE, super::unix_ms());
    let found = history.of_link(number).map(|found| serde_json::to_vec(&found).unwrap_or_default());
    drop(history);
    let json = found.ok_or_else(|| refused(StatusCode::NOT_FOUND, "there is no such link"))?;
    Ok(good("application/json", json))
}

fn prometheus(site: &Site, request: &Request<Incoming>) -> Reply {
    let accept = request.headers().get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::accepted(accept);
    let newest = site.newest.get();
    let bytes = site.history().bytes();
    good(format.content_type(), metrics::text(format, &newest.view, &site.counted(), bytes))
}

/// Subscribes to events.
fn events(
    site: &Arc<Site>,
    client: &Client,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let Some(seat) = site.seats.take(client.origin()) else {
        let hint = "close other pages of this brain, or ask /api/view";
        let error = "as many subscribers as may be are there";
        return Err(Refusal::new(Count::RefusedBusy, StatusCode::SERVICE_UNAVAILABLE, error, hint));
    };
    site.counters.subscriptions.fetch_add(1, Ordering::Relaxed);
    let last = request.headers().get("last-event-id").and_then(|value| value.to_str().ok());
    let position = last.and_then(Position::parse);
    let (sender, body) = Channel::new(1);
    let site = Arc::clone(site);
    tokio::spawn(async move {
        let _seat = seat;
        feed(&site, sender, position).await;
    });
    let mut reply = Response::new(body.boxed_unsync());
    let kind = HeaderValue::from_static("text/event-stream");
    reply.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(reply)
}

/// Sends events until the client goes. A client that reads slowly is waited for; what it misses, it
/// is told.
async fn feed(site: &Site, mut sender: Sender<Bytes>, mut position: Option<Position>) {
    let mut news = site.events.subscribe();
    // At once, so that the client knows that it is connected.
    let mut text = String::from("retry: 1000\n\n");
    loop {
        let (more, next) = site.events.after(position);
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
async fn call(site: &Arc<Site>, request: Request<Incoming>) -> Result<Reply, Refusal> {
    let refused = |count, status, error: &str, hint| Err(Refusal::new(count, status, error, hint));
    let Some(hook) = site.hooks.get(request.uri().path()).cloned() else {
        return refused(Count::RefusedPath, StatusCode::NOT_FOUND, "there is no such path", "");
    };
    if !is_json(&request) {
        let (error, hint) = ("the body is not JSON", "send `Content-Type: application/json`");
        return refused(Count::RefusedType, StatusCode::UNSUPPORTED_MEDIA_TYPE, error, hint);
    }
    let Ok(permit) = Arc::clone(&site.calls).try_acquire_owned() else {
        let (error, hint) = ("as many calls as may be are under way", "try again");
        return refused(Count::RefusedBusy, StatusCode::SERVICE_UNAVAILABLE, error, hint);
    };
    let hint = "let Kubernetes send names only: nodeCacheCapable";
    let body = site.http.body(request, MAX_BODY_BYTES, hint).await?;
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
