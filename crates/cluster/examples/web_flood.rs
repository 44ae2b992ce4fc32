//! Floods of several kinds against the web server: how many requests are refused, what the server's
//! thread costs, and what a client elsewhere and a brain in the same process notice.
//!
//! `cargo run --release -p cluster --example web_flood`, with `-- --seconds 5` for a longer one.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::view::{BrainView, LinkView, NodeView, View};
use cluster::web::{EventLog, Options, Sources, WebServer};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::timeout;

/// Hosts of the cluster that is shown; each has a link both ways.
const HOSTS: u32 = 1024;

/// Threads of the flood, and connections of each.
const THREADS: usize = 4;
const CONNECTIONS: usize = 32;

/// How often the brain in this process has something to do.
const BRAIN_TICK: Duration = Duration::from_millis(1);

/// How often it publishes.
const TICKS_PER_VIEW: u64 = 250;

/// A way to flood: what a connection sends, and whether it is kept.
struct Flood {
    name: &'static str,
    /// `None`: it says nothing.
    request: Option<&'static str>,
    keeps_connection: bool,
    waits: bool,
}

const FLOODS: [Flood; 5] = [
    Flood { name: "none", request: None, keeps_connection: true, waits: true },
    Flood {
        name: "GET /api/view, connections kept",
        request: Some("GET /api/view HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        keeps_connection: true,
        waits: true,
    },
    Flood {
        name: "GET /, a connection each",
        request: Some("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        keeps_connection: false,
        waits: true,
    },
    Flood {
        name: "connections that do not wait",
        request: Some("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        keeps_connection: false,
        waits: false,
    },
    Flood {
        name: "headers that do not end",
        request: Some("GET / HTTP/1.1\r\nA:"),
        keeps_connection: false,
        waits: false,
    },
];

/// CPU time of the server's thread so far.
fn server_cpu() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let is_web = |path: &std::path::Path| {
        fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "dquant-web")
    };
    let path = tasks.map(|task| task.path()).find(|path| is_web(path));
    let text = path.and_then(|path| fs::read_to_string(path.join("schedstat")).ok());
    let ns = text.and_then(|text| text.split(' ').next().and_then(|ns| ns.parse().ok()));
    Duration::from_nanos(ns.unwrap_or(0))
}

fn resident_mib() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn view(number: u64) -> Arc<View> {
    let node =
        |at| NodeView { name: format!("host-{at}"), kind: "host".into(), ..NodeView::default() };
    let link = |from, to| LinkView { from, to, used_bps: Some(number), ..LinkView::default() };
    let nodes = (0..=HOSTS).map(node).collect();
    let links = (0..HOSTS).flat_map(|at| [link(at, HOSTS), link(HOSTS, at)]).collect();
    let brain = BrainView { state: "leading".into(), ..BrainView::default() };
    Arc::new(View { unix_ms: number, brain, nodes, links, ..View::default() })
}

/// One connection of the flood, again and again; counts what is refused.
fn flood(flood: &Flood, address: SocketAddr, stop: &AtomicBool, sent: &AtomicU64) {
    let Some(request) = flood.request else { return };
    // Clients are on other machines: what they cost is not to be taken from the server.
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
    let mut streams: Vec<Option<TcpStream>> = (0..CONNECTIONS).map(|_| None).collect();
    let mut reply = vec![0; 1 << 16];
    while !stop.load(Ordering::Relaxed) {
        for place in &mut streams {
            let stream = match place.take() {
                Some(stream) => stream,
                None => match TcpStream::connect(address) {
                    Ok(stream) => stream,
                    Err(_) => continue,
                },
            };
            *place = once(flood, request, stream, &mut reply, sent);
        }
    }
}

/// Sends a request, and reads what came for the one before; the connection, if it is kept.
fn once(
    flood: &Flood,
    request: &str,
    mut stream: TcpStream,
    reply: &mut [u8],
    sent: &AtomicU64,
) -> Option<TcpStream> {
    sent.fetch_add(1, Ordering::Relaxed);
    stream.write_all(request.as_bytes()).ok()?;
    if flood.waits && !flood.keeps_connection {
        stream.set_read_timeout(Some(Duration::from_millis(300))).ok()?;
        let _ = stream.read(reply);
    } else if flood.waits {
        stream.set_nonblocking(true).ok()?;
        let ended = matches!(stream.read(reply), Ok(0));
        stream.set_nonblocking(false).ok()?;
        return (!ended).then_some(stream);
    }
    flood.keeps_connection.then_some(stream)
}

/// A connection from an address that the flood does not have.
fn from_elsewhere(runtime: &Runtime, server: SocketAddr) -> io::Result<TcpStream> {
    let stream = runtime.block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from(([127, 0, 0, 2], 0)))?;
        timeout(Duration::from_secs(5), socket.connect(server)).await?
    })?;
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A client that asks ten times a second from an address of its own, and how long it waits.
fn visitor(server: SocketAddr, token: &str, stop: &AtomicBool) -> (Vec<Duration>, usize) {
    let (mut waits, mut failed) = (Vec::new(), 0);
    let Ok(runtime) = service::runtime::current_thread() else { return (waits, 1) };
    let request = format!(
        "GET /api/view HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let answered = from_elsewhere(&runtime, server).and_then(|mut stream| {
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.write_all(request.as_bytes())?;
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply)?;
            if reply.starts_with(b"HTTP/1.1 200") {
                Ok(())
            } else {
                Err(io::ErrorKind::Other.into())
            }
        });
        match answered {
            Ok(()) => waits.push(begun.elapsed()),
            Err(_) => failed += 1,
        }
        thread::sleep(Duration::from_millis(100));
    }
    (waits, failed)
}

/// Work at each tick, as a brain has it; how late each tick was.
fn brain(publish: &watch::Sender<Arc<View>>, stop: &AtomicBool) -> Vec<Duration> {
    let (begun, mut late) = (Instant::now(), Vec::new());
    for tick in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let due = begun + BRAIN_TICK * tick as u32;
        thread::sleep(due.saturating_duration_since(Instant::now()));
        late.push(due.elapsed());
        if tick % TICKS_PER_VIEW == 0 {
            publish.send_replace(view(tick));
        }
    }
    late
}

fn percentile(times: &mut [Duration], share: f64) -> Duration {
    times.sort_unstable();
    let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
    times.get(at).copied().unwrap_or_default()
}

fn run(kind: &Flood, seconds: u64) -> io::Result<()> {
    let (publish, views) = watch::channel(view(0));
    let token = "a-token-of-the-flood";
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let sources = Sources { view: views, events: Arc::new(EventLog::new(1)) };
    let server = WebServer::start(
        listener,
        sources,
        Options { token: Some(token.into()), ..Options::default() },
    )?;
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let cpu = server_cpu();
    let (mut late, (mut waits, failed)) = thread::scope(|scope| {
        let late = scope.spawn(|| brain(&publish, &stop));
        let visitor = scope.spawn(|| visitor(address, token, &stop));
        (0..THREADS).for_each(|_| {
            scope.spawn(|| flood(kind, address, &stop, &sent));
        });
        thread::sleep(Duration::from_secs(seconds));
        stop.store(true, Ordering::Relaxed);
        (late.join().unwrap_or_default(), visitor.join().unwrap_or_default())
    });
    let cpu = server_cpu().saturating_sub(cpu);
    let counted = server.counters();
    let per_second = |name: &str| counted.get(name).copied().unwrap_or(0) / seconds;
    println!(
        "{:<32} {:>9} {:>9} {:>9} {:>7.0} % {:>8.1} {:>8.1} {:>6} {:>9.2} {:>8}",
        kind.name,
        sent.load(Ordering::Relaxed) / seconds,
        per_second("web.refused.rate"),
        per_second("web.connections.closed.evicted"),
        100.0 * cpu.as_secs_f64() / seconds as f64,
        percentile(&mut waits, 0.5).as_secs_f64() * 1000.0,
        percentile(&mut waits, 0.99).as_secs_f64() * 1000.0,
        failed,
        percentile(&mut late, 0.99).as_secs_f64() * 1000.0,
        resident_mib(),
    );
    Ok(())
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let seconds =
        args.windows(2).find(|pair| pair[0] == "--seconds").and_then(|pair| pair[1].parse().ok());
    println!(
        "per second: requests sent, refused with 429, connections that gave way; CPU of the server's thread"
    );
    println!(
        "a visitor with the token: ms until the view of {HOSTS} hosts is there, p50 and p99, and failures"
    );
    println!("a brain in this process: ms that its ticks are late, p99; MiB resident");
    println!(
        "{:<32} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>6} {:>9} {:>8}",
        "flood", "sent", "refused", "gave way", "CPU", "p50", "p99", "failed", "late", "MiB"
    );
    FLOODS.iter().try_for_each(|kind| run(kind, seconds.unwrap_or(3)))
}
