//! The HTTP server over real connections: what it serves, and what it refuses of whom.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use cluster::view::{BrainView, ClusterEvent, JobView, LinkView, NodeView, View};
use cluster::web::{EventLog, HookError, Limits, MAX_BODY_BYTES, Options, Sources, WebServer};
use serde_json::Value;
use tokio::sync::watch;

const TOKEN: &str = "a-token-of-the-tests";

struct Brain {
    web: WebServer,
    view: watch::Sender<Arc<View>>,
    events: Arc<EventLog>,
}

fn view(name: &str) -> Arc<View> {
    let node = |name: &str| NodeView { name: name.into(), slots: 8, ..NodeView::default() };
    let link = |from, to| LinkView {
        from,
        to,
        capacity_bps: 100,
        used_bps: Some(7_000),
        ..LinkView::default()
    };
    let brain = BrainView { state: "leading".into(), term: 3, ..BrainView::default() };
    Arc::new(View {
        brain,
        nodes: vec![node("h0"), node("s0")],
        links: vec![link(0, 1), link(1, 0)],
        jobs: vec![JobView { id: 1, name: name.into(), ..JobView::default() }],
        ..View::default()
    })
}

/// Limits that no test reaches unless it is about them.
fn generous() -> Limits {
    Limits { per_client: 10_000, strangers: 10_000, ..Limits::default() }
}

fn brain(options: Options) -> Brain {
    let (sender, receiver) = watch::channel(view("first"));
    let events = Arc::new(EventLog::new(1));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let sources = Sources { view: receiver, events: Arc::clone(&events) };
    let web = WebServer::start(listener, sources, options).expect("it starts");
    Brain { web, view: sender, events }
}

fn with_token() -> Brain {
    brain(Options { token: Some(TOKEN.into()), limits: generous(), ..Options::default() })
}

/// A response: status, headers in lower case, body.
#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    fn header(&self, name: &str) -> Option<&str> {
        let found = self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        found.map(str::trim)
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
    stream
}

fn parse(text: &str) -> Response {
    let (head, body) =
        text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let (first, rest) = head.split_once("\r\n").unwrap_or((head, ""));
    let names = rest.split("\r\n").map(|line| match line.split_once(':') {
        Some((name, value)) => format!("{}:{value}\n", name.to_lowercase()),
        None => String::new(),
    });
    Response { status, head: format!("{first}\n{}", names.collect::<String>()), body: body.into() }
}

/// Sends a request as it is written, and reads to the end of the connection.
fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(request).expect("it reads");
    let mut text = Vec::new();
    let read = stream.read_to_end(&mut text);
    assert!(read.is_ok() || !text.is_empty(), "{read:?}");
    String::from_utf8_lossy(&text).into_owned()
}

fn ask(brain: &Brain, method: &str, path: &str, headers: &str, body: &str) -> Response {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}",
        brain.web.address()
    );
    parse(&raw(brain.web.address(), request.as_bytes()))
}

fn bearer() -> String {
    format!("Authorization: Bearer {TOKEN}\r\n")
}

fn get(brain: &Brain, path: &str) -> Response {
    ask(brain, "GET", path, &bearer(), "")
}

fn counted(brain: &Brain, name: &str) -> u64 {
    brain.web.counters()[name]
}

/// Waits until a counter has this value at least.
fn wait_for(brain: &Brain, name: &str, value: u64) {
    while counted(brain, name) < value {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_view_is_served_and_written_once_per_change() {
    let brain = with_token();
    let first = get(&brain, "/api/view");
    let served: View = serde_json::from_str(&first.body).expect("a view");
    assert_eq!((first.status, &served), (200, &*view("first")));
    let tag = first.header("etag").expect("a tag").to_owned();
    let again =
        ask(&brain, "GET", "/api/view", &format!("{}If-None-Match: {tag}\r\n", bearer()), "");
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    for _ in 0..10 {
        assert_eq!(get(&brain, "/api/view").body, first.body);
    }
    assert_eq!(counted(&brain, "web.views_serialised"), 1);
    brain.view.send_replace(view("second"));
    assert!(get(&brain, "/api/view").body.contains("second"));
    assert_eq!(counted(&brain, "web.views_serialised"), 2);
}

#[test]
fn only_the_page_and_the_health_need_no_token() {
    let brain = with_token();
    for path in ["/api/view", "/api/history?link=0", "/api/events", "/metrics", "/nothing"] {
        let refused = ask(&brain, "GET", path, "Authorization: Bearer wrong\r\n", "");
        assert_eq!(refused.status, 401, "{path}");
        assert!(refused.json()["hint"].as_str().is_some_and(|hint| hint.contains("Bearer TOKEN")));
    }
    assert_eq!(counted(&brain, "web.refused.token"), 5);
    let page = ask(&brain, "GET", "/", "", "");
    assert_eq!(page.status, 200);
    let health = ask(&brain, "GET", "/healthz", "", "");
    assert_eq!((health.status, &health.json()["state"]), (200, &Value::from("leading")));
    // "any:a-token-of-the-tests"
    let basic = "Authorization: Basic YW55OmEtdG9rZW4tb2YtdGhlLXRlc3Rz\r\n";
    assert_eq!(ask(&brain, "GET", "/api/view", basic, "").status, 200);
}

#[test]
fn the_health_tells_the_leader_from_the_others() {
    let brain = with_token();
    for (state, any, leading) in
        [("leading", 200, 200), ("standby", 200, 503), ("opening", 503, 503)]
    {
        let state = BrainView { state: state.into(), ..BrainView::default() };
        brain.view.send_replace(Arc::new(View { brain: state, ..View::default() }));
        assert_eq!(ask(&brain, "GET", "/healthz", "", "").status, any);
        assert_eq!(ask(&brain, "GET", "/healthz?leading", "", "").status, leading);
    }
}

#[test]
fn the_page_lets_only_its_own_script_run() {
    let brain = with_token();
    let (one, other) = (ask(&brain, "GET", "/", "", ""), ask(&brain, "GET", "/", "", ""));
    let nonce = |page: &Response| {
        let policy = page.header("content-security-policy").expect("a policy").to_owned();
        assert!(
            policy.starts_with("default-src 'none';") && !policy.contains("unsafe"),
            "{policy}"
        );
        policy
            .split("script-src 'nonce-")
            .nth(1)
            .and_then(|rest| rest.split('\'').next())
            .map(String::from)
    };
    let (first, second) = (nonce(&one).expect("a nonce"), nonce(&other).expect("a nonce"));
    assert_ne!(first, second);
    assert!(one.body.contains(&format!("<script nonce=\"{first}\">")));
    assert!(!one.body.contains("NONCE") && !one.body.contains("innerHTML"));
    assert!(
        !one.body.contains("http://")
            || one.body.matches("http://").count()
                == one.body.matches("http://www.w3.org/").count()
    );
    let policy = get(&brain, "/api/view").header("content-security-policy").map(String::from);
    assert_eq!(policy.as_deref(), Some("default-src 'none'; frame-ancestors 'none'"));
}

#[test]
fn what_is_not_there_is_refused_with_a_reason() {
    let brain = with_token();
    let cases = [
        ("GET", "/nothing", 404, "web.refused.path"),
        ("POST", "/api/view", 405, "web.refused.method"),
        ("DELETE", "/", 405, "web.refused.method"),
        ("GET", "/api/history", 400, "web.refused.query"),
        ("GET", "/api/history?link=-1", 400, "web.refused.query"),
        ("GET", "/api/history?link=99999999999999999999", 400, "web.refused.query"),
        ("GET", "/api/history?link=7", 404, "web.refused.query"),
    ];
    for (method, path, status, counter) in cases {
        let before = counted(&brain, counter);
        let refused = ask(&brain, method, path, &bearer(), "");
        assert_eq!(refused.status, status, "{method} {path}");
        assert!(!refused.json()["error"].as_str().unwrap_or_default().is_empty());
        assert_eq!(counted(&brain, counter), before + 1, "{method} {path}");
    }
}

#[test]
fn the_history_has_a_sample_at_once_and_the_metrics_are_those_of_the_view() {
    let brain = with_token();
    let history = get(&brain, "/api/history?link=1").json();
    assert_eq!((&history["from"], &history["to"]), (&Value::from("s0"), &Value::from("h0")));
    assert_eq!(history["used_kbps"][0], 7);
    let metrics = get(&brain, "/metrics").body;
    let link = "dquant_link_used_bits_per_second{from=\"h0\",to=\"s0\",port=\"0\"} 7000\n";
    assert!(metrics.contains(link), "{metrics}");
    assert!(metrics.contains("\ndquant_web_requests "), "{metrics}");
}

#[test]
fn metrics_come_in_the_format_that_is_asked_for() {
    let brain = with_token();
    let accept = format!("{}Accept: application/openmetrics-text;version=1.0.0\r\n", bearer());
    let open = ask(&brain, "GET", "/metrics", &accept, "");
    let kind = open.header("content-type").expect("a type");
    assert!(kind.starts_with("application/openmetrics-text; version=1.0.0"), "{kind}");
    assert!(open.body.contains("# UNIT dquant_web_history_bytes bytes\n"), "{}", open.body);
    assert!(open.body.ends_with("\n# EOF\n"), "{}", open.body);
    let plain = get(&brain, "/metrics");
    let kind = plain.header("content-type").expect("a type");
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    assert!(!plain.body.contains("# UNIT"), "{}", plain.body);
}

#[test]
fn a_connection_without_the_token_is_closed_after_a_few_refusals() {
    let brain = with_token();
    let refused = "GET /api/view HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(20);
    let replies = raw(brain.web.address(), refused.as_bytes());
    assert_eq!(replies.matches("HTTP/1.1 401").count(), 16, "{replies}");
    assert_eq!(counted(&brain, "web.connections.closed.refused"), 1);
    // Once it had the token, it stays.
    let known = format!("GET /api/view HTTP/1.1\r\nHost: localhost\r\n{}\r\n", bearer());
    let last = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let replies = raw(brain.web.address(), format!("{known}{refused}{last}").as_bytes());
    assert_eq!(replies.matches("HTTP/1.1 401").count(), 20, "{replies}");
    assert_eq!(counted(&brain, "web.connections.closed.refused"), 1);
}

/// Reads from `stream` until `text` contains `what`.
fn read_until(stream: &mut TcpStream, text: &mut String, what: &str) {
    let mut bytes = [0; 4096];
    while !text.contains(what) {
        let length = stream.read(&mut bytes).expect("it is sent");
        assert!(length > 0, "the connection ended before {what:?}: {text}");
        text.push_str(&String::from_utf8_lossy(&bytes[..length]));
    }
}

fn subscribe(brain: &Brain, headers: &str) -> TcpStream {
    let mut stream = connect(brain.web.address());
    let request =
        format!("GET /api/events HTTP/1.1\r\nHost: localhost\r\n{}{headers}\r\n", bearer());
    stream.write_all(request.as_bytes()).expect("it reads");
    stream
}

fn push(brain: &Brain, number: u64) {
    let text = format!("event {number}");
    brain.events.push(ClusterEvent { number, text, ..ClusterEvent::default() });
}

#[test]
fn events_come_as_they_happen_and_resume() {
    let brain = with_token();
    push(&brain, 1);
    let (mut stream, mut text) = (subscribe(&brain, ""), String::new());
    read_until(&mut stream, &mut text, "id: 1-1\n");
    push(&brain, 2);
    read_until(&mut stream, &mut text, "\"text\":\"event 2\"");
    drop(stream);
    push(&brain, 3);
    let (mut stream, mut text) = (subscribe(&brain, "Last-Event-ID: 1-2\r\n"), String::new());
    read_until(&mut stream, &mut text, "id: 1-3\n");
    assert!(!text.contains("id: 1-2") && text.contains("text/event-stream"), "{text}");
}

#[test]
fn subscribers_have_a_bound_per_address() {
    let brain = with_token();
    let mut streams: Vec<_> = (0..16).map(|_| subscribe(&brain, "")).collect();
    for stream in &mut streams {
        read_until(stream, &mut String::new(), "retry: 1000");
    }
    let refused = get(&brain, "/api/events");
    assert_eq!((refused.status, counted(&brain, "web.refused.busy")), (503, 1));
    assert_eq!(get(&brain, "/api/view").status, 200, "others are served");
    drop(streams.pop());
    push(&brain, 1);
    // The place is free once the server has noticed.
    let (mut stream, mut text) = loop {
        let (mut stream, mut text) = (subscribe(&brain, ""), String::new());
        read_until(&mut stream, &mut text, "\r\n\r\n");
        if text.starts_with("HTTP/1.1 200") {
            break (stream, text);
        }
        push(&brain, 2);
    };
    read_until(&mut stream, &mut text, "retry: 1000");
}

#[test]
fn a_client_that_floods_is_refused_and_others_are_served() {
    let limits = Limits { per_client: 5, ..Limits::default() };
    let brain = brain(Options { token: Some(TOKEN.into()), limits, ..Options::default() });
    let flood: Vec<u16> = std::thread::scope(|scope| {
        let one =
            || scope.spawn(|| (0..10).map(|_| get(&brain, "/api/view").status).collect::<Vec<_>>());
        let threads: Vec<_> = (0..8).map(|_| one()).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    let refused = flood.iter().filter(|status| **status == 429).count();
    assert!(refused > 40, "{refused} of 80");
    assert!(flood.iter().all(|status| matches!(status, 200 | 429)));
    assert_eq!(counted(&brain, "web.refused.rate"), refused as u64);
    let stranger = ask(&brain, "GET", "/healthz", "", "");
    assert_eq!(stranger.status, 200, "those without the token have a bucket of their own");
}

#[test]
fn slow_and_silent_clients_are_cut() {
    let timeout = Duration::from_millis(300);
    let limits = Limits { header_timeout: timeout, body_timeout: timeout, ..generous() };
    let hook = || Arc::new(|_: &[u8]| Ok(Vec::new()));
    let hooks = [("/kubernetes/filter".to_owned(), hook() as cluster::web::Hook)].into();
    let brain = brain(Options { token: Some(TOKEN.into()), limits, hooks });
    // Headers that do not end, and a connection that says nothing.
    assert_eq!(raw(brain.web.address(), b"GET / HTTP/1.1\r\nHost: "), "");
    assert_eq!(raw(brain.web.address(), b""), "");
    wait_for(&brain, "web.connections.closed.slow_headers", 2);
    // One that asks once and then stays.
    let idle = raw(brain.web.address(), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(idle.starts_with("HTTP/1.1 200"), "{idle}");
    wait_for(&brain, "web.connections.closed.idle", 1);
    // A body that does not end.
    let head = format!(
        "POST /kubernetes/filter HTTP/1.1\r\nHost: localhost\r\n{}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{",
        bearer()
    );
    assert_eq!(parse(&raw(brain.web.address(), head.as_bytes())).status, 408);
    assert_eq!(counted(&brain, "web.refused.body_slow"), 1);
}

#[test]
fn a_client_that_does_not_read_is_cut() {
    let limits = Limits { response_timeout: Duration::from_millis(300), ..generous() };
    let brain = brain(Options { token: Some(TOKEN.into()), limits, ..Options::default() });
    // More than the buffers of two sockets hold.
    brain.view.send_replace(view(&"x".repeat(32 << 20)));
    let mut stream = connect(brain.web.address());
    let request = format!("GET /api/view HTTP/1.1\r\nHost: localhost\r\n{}\r\n", bearer());
    stream.write_all(request.as_bytes()).expect("it reads");
    wait_for(&brain, "web.connections.closed.slow_reader", 1);
    drop(stream);
    assert_eq!(get(&brain, "/api/view").body.len() >> 20, 32, "a client that reads gets all of it");
}

#[test]
fn what_is_not_http_is_refused_and_ends_only_its_own_connection() {
    let brain = with_token();
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "A: b\r\n".repeat(100));
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nA: {}\r\n\r\n", "b".repeat(64 << 10));
    let path = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "b".repeat(64 << 10));
    let bad: [&[u8]; 7] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        many.as_bytes(),
        long.as_bytes(),
        path.as_bytes(),
    ];
    for (number, request) in bad.into_iter().enumerate() {
        let mut stream = connect(brain.web.address());
        // It may be closed while this is still being written.
        let _ = stream.write_all(request);
        let mut reply = Vec::new();
        match stream.read_to_end(&mut reply) {
            Ok(_) => assert!(reply.is_empty() || reply.starts_with(b"HTTP/1.1 4"), "case {number}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "case {number}"),
        }
        wait_for(&brain, "web.connections.closed.malformed", number as u64 + 1);
    }
    assert_eq!(get(&brain, "/api/view").status, 200);
}

fn with_hook(token: Option<&str>) -> Brain {
    let hook = |body: &[u8]| match body {
        b"\"bad\"" => Err(HookError::Invalid("no such pod".into())),
        b"\"standby\"" => Err(HookError::Unavailable("this brain stands by".into())),
        b"\"panic\"" => panic!("a hook that panics, which is part of this test"),
        _ => Ok([b"[", body, b"]"].concat()),
    };
    let hooks = [("/kubernetes/filter".to_owned(), Arc::new(hook) as cluster::web::Hook)].into();
    brain(Options { token: token.map(String::from), hooks, limits: generous() })
}

fn post(brain: &Brain, headers: &str, body: &str) -> u16 {
    let headers = format!("Content-Type: application/json\r\n{headers}");
    ask(brain, "POST", "/kubernetes/filter", &headers, body).status
}

#[test]
fn hooks_answer_who_has_the_token_and_refuse_with_a_reason() {
    let brain = with_hook(Some(TOKEN));
    let headers = format!("Content-Type: application/json\r\n{}", bearer());
    let reply = ask(&brain, "POST", "/kubernetes/filter", &headers, "{}");
    assert_eq!((reply.status, reply.body.as_str()), (200, "[{}]"));
    assert_eq!(post(&brain, "", "{}"), 401);
    assert_eq!(ask(&brain, "GET", "/kubernetes/filter", &bearer(), "").status, 405);
    assert_eq!(ask(&brain, "POST", "/kubernetes/filter", &bearer(), "{}").status, 415);
    assert_eq!(post(&brain, &bearer(), "\"bad\""), 400);
    assert_eq!(post(&brain, &bearer(), "\"standby\""), 503);
    assert_eq!(post(&brain, &bearer(), "\"panic\""), 500);
    assert_eq!(counted(&brain, "web.refused.hook"), 3);
    assert_eq!(post(&brain, &bearer(), "{}"), 200, "it goes on");
}

#[test]
fn a_body_that_is_too_large_is_refused() {
    let brain = with_hook(Some(TOKEN));
    assert_eq!(post(&brain, &bearer(), &" ".repeat(MAX_BODY_BYTES)), 200);
    let mut stream = connect(brain.web.address());
    let length = MAX_BODY_BYTES + 1;
    let head = format!(
        "POST /kubernetes/filter HTTP/1.1\r\nHost: localhost\r\n{}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n",
        bearer()
    );
    stream.write_all(head.as_bytes()).expect("it reads");
    let _ = stream.write_all(&vec![b' '; length]);
    wait_for(&brain, "web.refused.body_size", 1);
}

#[test]
fn without_a_token_pages_of_other_sites_get_nothing() {
    let brain = with_hook(None);
    assert_eq!(ask(&brain, "GET", "/api/view", "", "").status, 200);
    assert_eq!(post(&brain, "", "{}"), 200);
    // A simple request, which browsers send to any site without asking.
    assert_eq!(
        ask(&brain, "POST", "/kubernetes/filter", "Content-Type: text/plain\r\n", "{}").status,
        415
    );
    assert_eq!(post(&brain, "Sec-Fetch-Site: cross-site\r\n", "{}"), 403);
    // A name that its owner has pointed at this address.
    let rebound = b"GET /api/view HTTP/1.1\r\nHost: evil.example:4796\r\nConnection: close\r\n\r\n";
    assert_eq!(parse(&raw(brain.web.address(), rebound)).status, 403);
    assert_eq!(counted(&brain, "web.refused.host"), 1);
}

#[test]
fn a_server_ends_with_its_subscribers_and_frees_its_port() {
    let brain = with_token();
    let mut stream = subscribe(&brain, "");
    read_until(&mut stream, &mut String::new(), "retry: 1000");
    let address = brain.web.address();
    drop(brain);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(TcpStream::connect(address).is_err());
}
