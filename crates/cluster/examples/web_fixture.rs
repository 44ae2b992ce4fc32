//! The web server of a brain that does not exist: a cluster whose figures move, to look at the page
//! and to test it.
//!
//! `cargo run -p cluster --example web_fixture -- --help`

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cluster::view::{
    Alarm, BrainView, ClusterEvent, CycleView, JobView, LinkJob, LinkView, NodeView, Placed,
    TurnView, View,
};
use cluster::web::{EventLog, Limits, Options, Sources, WebServer};
use tokio::sync::watch;

const HELP: &str = "\
Serves the page of a cluster that does not exist, until it is killed

Options:
  --listen IP:PORT   where [default: 127.0.0.1:0; the first line says which port it is]
  --hosts N          hosts of the cluster, 1 to 4096 [default: 8]
  --token TOKEN      what the page asks for [default: none]
  --hostile          job names that would do harm if they were taken for HTML
  --standby          a brain that stands by and has no topology
  --empty            a brain that has nothing to show yet
  --unlimited        without limits of requests per second, to measure them

Examples:
  cargo run -p cluster --example web_fixture
  cargo run -p cluster --example web_fixture -- --listen 127.0.0.1:4796 --hosts 128 --token secret";

const GBIT: u64 = 1_000_000_000;
const HOST_BPS: u64 = 100 * GBIT;
const UPLINK_BPS: u64 = 200 * GBIT;
const SLOTS: u32 = 8;

/// Names that users may give their jobs.
const HOSTILE: [&str; 4] = [
    "<img src=x onerror=alert(1)>",
    "</script><script>document.title='taken'</script>",
    "\"' onmouseover='alert(2)' & <b>bold</b>",
    "javascript:alert(3)//\u{202e}gnp.exe",
];
const NAMES: [&str; 4] = ["llama-70b-pretrain", "vision-moe", "rl-rollouts", "checkpoint-copy"];
const OWNERS: [&str; 4] = ["team-language", "team-vision", "team-agents", "storage"];
const REQUESTS: [&str; 4] = [
    "ring(4) x 8 slots, 30 Gbit/s per edge, burst 1 MiB",
    "all-to-all(4) x 4 slots, 8 Gbit/s per pair, burst 256 KiB",
    "ps(1 server, 3 workers) x 2 slots, 15 Gbit/s per worker",
    "pipeline(2) x 1 slot, 10 Gbit/s",
];

struct Choice {
    listen: SocketAddr,
    hosts: u32,
    token: Option<String>,
    hostile: bool,
    standby: bool,
    empty: bool,
    unlimited: bool,
}

fn choice(mut args: impl Iterator<Item = String>) -> Result<Choice, String> {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let (hostile, standby, empty, unlimited) = Default::default();
    let mut choice = Choice { listen, hosts: 8, token: None, hostile, standby, empty, unlimited };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--listen" => choice.listen = value()?.parse().map_err(|_| "--listen takes IP:PORT")?,
            "--hosts" => choice.hosts = value()?.parse().map_err(|_| "--hosts takes a number")?,
            "--token" => choice.token = Some(value()?),
            "--hostile" => choice.hostile = true,
            "--standby" => choice.standby = true,
            "--empty" => choice.empty = true,
            "--unlimited" => choice.unlimited = true,
            other => return Err(format!("there is no option {other}")),
        }
    }
    if (1..=4096).contains(&choice.hosts) { Ok(choice) } else { Err("--hosts is 1 to 4096".into()) }
}

/// Hosts, switches, and the links between them.
struct Net {
    nodes: Vec<NodeView>,
    links: Vec<LinkView>,
    /// Links by their ends.
    between: BTreeMap<(u32, u32), usize>,
    /// The switch above each host, and the switches above each switch.
    above: Vec<Vec<u32>>,
}

impl Net {
    /// Two layers of switches, three for many hosts.
    fn new(hosts: u32) -> Net {
        let per_leaf = if hosts <= 8 {
            2
        } else if hosts <= 128 {
            8
        } else {
            16
        };
        let leaves = hosts.div_ceil(per_leaf);
        let mut net = Net {
            nodes: Vec::new(),
            links: Vec::new(),
            between: BTreeMap::new(),
            above: Vec::new(),
        };
        (0..hosts).for_each(|at| net.node(format!("host-{at}"), "host", SLOTS));
        let first_leaf = net.nodes.len() as u32;
        (0..leaves).for_each(|at| net.node(format!("leaf-{at}"), "switch", 0));
        let pods = if leaves > 16 { leaves.div_ceil(8) } else { 1 };
        let spines = if hosts <= 8 { 2 } else { 4 };
        let first_spine = net.nodes.len() as u32;
        (0..pods * spines).for_each(|at| net.node(format!("spine-{at}"), "switch", 0));
        let first_core = net.nodes.len() as u32;
        let cores = if pods > 1 { 2 * spines } else { 0 };
        (0..cores).for_each(|at| net.node(format!("core-{at}"), "switch", 0));
        (0..hosts).for_each(|host| net.cable(host, first_leaf + host / per_leaf, HOST_BPS));
        for leaf in 0..leaves {
            let pod = if pods > 1 { leaf / 8 } else { 0 };
            (0..spines).for_each(|at| {
                net.cable(first_leaf + leaf, first_spine + pod * spines + at, UPLINK_BPS);
            });
        }
        for spine in 0..if cores > 0 { pods * spines } else { 0 } {
            let at = spine % spines;
            for core in [2 * at, 2 * at + 1] {
                net.cable(first_spine + spine, first_core + core, UPLINK_BPS);
            }
        }
        net
    }

    fn node(&mut self, name: String, kind: &str, slots: u32) {
        let agent = if kind == "host" { "enforcing" } else { "none" };
        let heard_ms = (kind == "host").then_some(400);
        self.nodes.push(NodeView {
            name,
            kind: kind.into(),
            slots,
            free_slots: slots,
            agent: agent.into(),
            heard_ms,
            note: None,
        });
        self.above.push(Vec::new());
    }

    fn cable(&mut self, low: u32, high: u32, capacity_bps: u64) {
        for (from, to) in [(low, high), (high, low)] {
            let port =
                self.links.iter().rev().take(4096).filter(|link| link.from == from).count() as u32;
            self.between.insert((from, to), self.links.len());
            self.links.push(LinkView {
                from,
                to,
                port,
                capacity_bps,
                used_bps: Some(0),
                ..LinkView::default()
            });
        }
        self.above[low as usize].push(high);
    }

    /// The links from a host to another, on the way that this job takes.
    fn path(&self, from: u32, to: u32, job: usize) -> Vec<usize> {
        let (mut up, mut down) = (vec![from], vec![to]);
        while up.last() != down.last() && up.len() < 5 {
            for side in [&mut up, &mut down] {
                let above = &self.above[side[side.len() - 1] as usize];
                let Some(next) = above.get(job % above.len().max(1)) else { return Vec::new() };
                side.push(*next);
            }
        }
        down.pop();
        let way: Vec<u32> = up.into_iter().chain(down.into_iter().rev()).collect();
        way.windows(2).filter_map(|ends| self.between.get(&(ends[0], ends[1])).copied()).collect()
    }
}

/// How much of its reservation a job uses now, in percent: it computes and exchanges in turn.
fn activity(job: usize, seconds: f64) -> u64 {
    let period = [7.0, 5.0, 11.0, 9.0][job % 4];
    let wave = 0.5 + 0.5 * (std::f64::consts::TAU * (seconds / period + 0.23 * job as f64)).sin();
    match job % 4 {
        // It takes what the others leave.
        1 => (120.0 + 60.0 * wave) as u64,
        // Its port is not governed: it does not get what it has reserved.
        3 => (31.0 + 6.0 * wave) as u64,
        _ => (25.0 + 70.0 * wave) as u64,
    }
}

const RESERVED_BPS: [u64; 4] = [30 * GBIT, 24 * GBIT, 15 * GBIT, 10 * GBIT];

/// Places the jobs: the same four kinds again and again, one set for each 8 hosts.
fn place(net: &mut Net, hostile: bool) -> Vec<JobView> {
    let hosts = net.nodes.iter().filter(|node| node.kind == "host").count() as u32;
    let mut jobs = Vec::new();
    for number in 0..4 * (hosts / 8).clamp(1, 32) {
        let kind = (number % 4) as usize;
        let base = number / 4 * 8;
        let at: &[u32] = [&[0, 2, 4, 6][..], &[1, 3, 4, 5], &[0, 1, 3, 6], &[5, 7]][kind];
        let slots = [4, 2, 1, 1][kind];
        let names = if hostile { HOSTILE } else { NAMES };
        let suffix = if number < 4 { String::new() } else { format!("-{}", number / 4) };
        let mut workers = Vec::new();
        for (rank, host) in at.iter().map(|host| (base + host) % hosts).enumerate() {
            workers.push(Placed { host, first: rank as u32 * slots, count: slots });
            let node = &mut net.nodes[host as usize];
            node.free_slots = node.free_slots.saturating_sub(slots);
        }
        jobs.push(JobView {
            id: u64::from(number) + 1,
            name: format!("{}{suffix}", names[kind]),
            owner: OWNERS[kind].into(),
            request: REQUESTS[kind].into(),
            dscp: 10 + 8 * kind as u8,
            workers,
            state: if kind == 3 { "degraded" } else { "running" }.into(),
            cycle: cycle(number),
        });
    }
    jobs
}

/// The first two kinds of a set take turns, the third says a cycle that meets no other.
fn cycle(number: u32) -> Option<CycleView> {
    let kind = number % 4;
    let turn = TurnView { period_ns: 24_100_000, shift_ns: 11_000_000 * u64::from(kind) };
    let cycle = CycleView { period_ns: 24_000_000, exchange_ns: 7_000_000, ..CycleView::default() };
    match kind {
        0 | 1 => {
            let other = if kind == 0 { number + 2 } else { number };
            Some(CycleView { turn: Some(turn), with: vec![other.into()], ..cycle })
        }
        2 => Some(CycleView {
            why: Some("it fills no link together with other jobs that say their cycle".into()),
            ..cycle
        }),
        _ => None,
    }
}

/// The loads of all jobs on all links, at this time.
fn load(net: &mut Net, jobs: &[JobView], seconds: f64) {
    for link in &mut net.links {
        (link.reserved_bps, link.used_bps) = (0, Some(0));
        link.jobs.clear();
    }
    for (number, job) in jobs.iter().enumerate() {
        let kind = number % 4;
        let used = RESERVED_BPS[kind] * activity(number, seconds) / 100;
        let ring = job.workers.iter().zip(job.workers.iter().cycle().skip(1));
        for (from, to) in ring {
            for at in net.path(from.host, to.host, number) {
                let link = &mut net.links[at];
                let is_new = link.jobs.iter().all(|on| on.job != job.id);
                if is_new {
                    let on = LinkJob {
                        job: job.id,
                        queue: Some(kind as u32 + 1),
                        used_bps: Some(0),
                        ..LinkJob::default()
                    };
                    link.jobs.push(on);
                }
                let room = link.capacity_bps - link.used_bps.unwrap_or(0);
                let gets = used.min(room);
                let Some(on) = link.jobs.iter_mut().find(|on| on.job == job.id) else { continue };
                on.reserved_bps += RESERVED_BPS[kind];
                on.used_bps = on.used_bps.map(|used| used + gets);
                on.pace_bps = (kind != 1).then_some(on.reserved_bps);
                on.backlog_bytes = if kind == 3 { 2 << 20 } else { used / 2_000_000 };
                on.dropped_packets = if kind == 3 { 17 + seconds as u64 / 3 } else { 0 };
                link.used_bps = link.used_bps.map(|used| used + gets);
                link.reserved_bps += RESERVED_BPS[kind];
            }
        }
    }
    for (at, node) in net.nodes.iter_mut().enumerate() {
        node.heard_ms =
            node.heard_ms.map(|_| if at == 7 { 41_000 + (seconds * 1000.0) as u64 } else { 200 });
    }
    if let Some(silent) = net.nodes.get_mut(7).filter(|node| node.kind == "host") {
        silent.agent = "silent".into();
        silent.note = Some("its last plan stays in force".into());
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn alarm() -> Alarm {
    Alarm {
        level: "error".into(),
        text: "job 4 gets 3.4 of its 10 Gbit/s from host-7, and 2 MiB wait: the agent of host-7 has been silent for \
               more than 40 s"
            .into(),
        hint: "see `systemctl status dquant-agent` on host-7; its last plan stays in force".into(),
    }
}

fn brain(address: SocketAddr, state: &str) -> BrainView {
    BrainView {
        address: address.to_string(),
        state: state.into(),
        term: if state == "leading" { 3 } else { 0 },
        leader: (state == "standby").then(|| "10.0.0.7:4795".into()),
        log_index: 1204,
        store: "etcd at 10.0.0.5:2379".into(),
    }
}

fn happen(events: &EventLog, number: u64, jobs: &[JobView]) {
    let job = jobs.get(number as usize % jobs.len().max(1));
    let name = job.map_or("nobody", |job| job.name.as_str());
    let (kind, text) = match number % 4 {
        1 => {
            ("admitted", format!("job '{name}' admitted: 4 hosts, the worst link is 60 % reserved"))
        }
        2 => ("agent", "agent of host-7 is silent; its last plan stays in force".into()),
        3 => (
            "moved",
            format!("job '{name}': queue 2 of leaf-1 port 3 bound anew, nothing was lost"),
        ),
        _ => ("refused", "job 'too-large' refused: link leaf-0 -> spine-1 lacks 12 Gbit/s".into()),
    };
    let (kind, job) = (kind.into(), job.map(|job| job.id));
    events.push(ClusterEvent { number, unix_ms: unix_ms(), kind, job, text });
}

fn serve(choice: Choice) -> std::io::Result<()> {
    let listener = TcpListener::bind(choice.listen)?;
    let address = listener.local_addr()?;
    let (sender, view) = watch::channel(Arc::default());
    let events = Arc::new(EventLog::new(unix_ms()));
    let mut options = Options { token: choice.token, ..Options::default() };
    if choice.unlimited {
        options.limits = Limits { per_client: 1_000_000, strangers: 1_000_000, ..options.limits };
    }
    let _server =
        WebServer::start(listener, Sources { view, events: Arc::clone(&events) }, options)?;
    println!("http://{address}/");
    let mut net = Net::new(choice.hosts);
    let jobs = place(&mut net, choice.hostile);
    let (begun, mut number) = (Instant::now(), 0);
    loop {
        let seconds = begun.elapsed().as_secs_f64();
        let mut next =
            View { unix_ms: unix_ms(), brain: brain(address, "leading"), ..View::default() };
        if choice.standby {
            next.brain = brain(address, "standby");
        } else if choice.empty {
            next.brain = brain(address, "opening");
        } else {
            load(&mut net, &jobs, seconds);
            (next.nodes, next.links, next.jobs) =
                (net.nodes.clone(), net.links.clone(), jobs.clone());
            next.alarms = vec![alarm()];
            while number < 6 + seconds as u64 / 4 {
                number += 1;
                happen(&events, number, &jobs);
            }
        }
        next.counters.insert("brain.admitted".into(), jobs.len() as u64);
        sender.send_replace(Arc::new(next));
        thread::sleep(Duration::from_secs(1));
    }
}

fn main() -> ExitCode {
    let args = std::env::args().skip(1);
    if std::env::args().any(|arg| arg == "--help") {
        println!("{HELP}");
        return ExitCode::SUCCESS;
    }
    match choice(args)
        .map_err(|error| error + "\nhint: --help lists the options")
        .and_then(|choice| serve(choice).map_err(|error| error.to_string()))
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
