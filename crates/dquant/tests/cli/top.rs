//! `dquant top`: a view from a file and from a real web server, and what is refused.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;

use cluster::view::{BrainView, JobView, LinkView, NodeView, View};
use cluster::web::{EventLog, Options, Sources, WebServer};
use tokio::sync::watch;

use super::Folder;

const TOKEN: &str = "a-token-of-the-tests";

fn view() -> View {
    let node = |name: &str| NodeView {
        name: name.into(),
        kind: "host".into(),
        agent: "enforcing".into(),
        ..NodeView::default()
    };
    let link = LinkView { to: 1, capacity_bps: 100, used_bps: Some(50), ..LinkView::default() };
    View {
        brain: BrainView { state: "leading".into(), term: 7, ..BrainView::default() },
        nodes: vec![node("alpha"), node("beta")],
        links: vec![link],
        jobs: vec![JobView { id: 1, name: "ring\u{1b}[2J".into(), ..JobView::default() }],
        ..View::default()
    }
}

#[test]
fn a_view_from_a_file_is_drawn_and_comes_back_as_json() {
    let folder = Folder::new("top-file");
    folder.write("view.json", serde_json::to_vec(&view()).expect("JSON"));
    let text = folder.run(&["top", "--cluster", "--view", "view.json"]).good().stdout;
    for part in ["leading, term 7", "alpha -> beta", "[########........]", "ring\u{fffd}[2J"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let json = folder.run(&["top", "--cluster", "--view", "view.json", "--json"]).good();
    assert_eq!(json.json()["schema"], "dquant.cluster/1");
    folder.write("again.json", &json.stdout);
    let again = folder.run(&["top", "--cluster", "--view", "again.json"]).good().stdout;
    assert_eq!(again, text);
}

#[test]
fn a_view_comes_from_a_brain_that_gets_the_token() {
    let folder = Folder::new("top-brain");
    folder.write("token", TOKEN);
    let (_publish, views) = watch::channel(Arc::new(view()));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let sources = Sources { view: views, events: Arc::new(EventLog::new(1)) };
    let options = Options { token: Some(TOKEN.into()), ..Options::default() };
    let server = WebServer::start(listener, sources, options).expect("it starts");
    let url = format!("http://{}/", server.address());
    let top = ["top", "--cluster", "--from", &url];
    let text = folder.run(&[&top[..], &["--token-file", "token"]].concat()).good().stdout;
    assert!(text.contains("alpha -> beta"), "{text}");
    folder.run(&top).failed(2, "refuses the token", "--token-file");
    drop(server);
    folder.run(&top).failed(3, "web server", "address of the page");
}

#[test]
fn what_is_no_view_is_refused() {
    let folder = Folder::new("top-bad");
    folder.write("bad.json", "{\"nodes\":[]}");
    let top = |source: &[&str]| folder.run(&[&["top", "--cluster"], source].concat());
    top(&["--view", "bad.json"]).failed(2, "no view of a cluster", "this version");
    top(&["--view", "missing.json"]).failed(2, "missing.json", "exists");
    top(&["--from", "https://brain"]).failed(2, "TLS", "ssh -L");
    assert_eq!(top(&[]).exit, Some(2));
}
