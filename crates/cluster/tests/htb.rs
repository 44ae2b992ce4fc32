//! Plans in the kernel's queues, between two network namespaces: what `tc` shows of them, what they
//! do to packets, and what happens on changes, restarts and refusals.
//!
//! Needs root, iproute2 and HTB; without them every test reports that and passes.

#[path = "../../../testing/skip.rs"]
mod skip;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::enforce::htb::Htb;
use cluster::enforce::{EnforceError, Enforcer, PortPlan, Sent};
use parfait::job::Latency;
use parfait::queues::{Dscp, Guarantee, Plan, Port, Scheme};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, move_into_link_name_space};

const MBIT: u64 = 1_000_000;
const ROCE_PORT: u16 = 4791;

/// Two namespaces, each with one end of a link: 10.79.0.1 and .2, fd79::1 and ::2.
struct Lab {
    names: [String; 2],
}

fn run(program: &str, arguments: &str) -> Option<String> {
    let output = Command::new(program).args(arguments.split_whitespace()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Lab {
    /// `None`, with the reason reported, where this cannot be tested.
    fn new() -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("htb{}-{number}{side}", std::process::id());
        let lab = Lab { names: [name('a'), name('b')] };
        let reason = match lab.build() {
            None => "network namespaces need root and iproute2",
            Some(()) if lab.tc("qdisc add dev v0 root handle 5: htb").is_none() => {
                "the kernel has no HTB"
            }
            Some(()) => {
                lab.tc("qdisc del dev v0 root").expect("it was added");
                return Some(lab);
            }
        };
        skip::note(thread::current().name().unwrap_or("htb"), reason);
        None
    }

    fn build(&self) -> Option<()> {
        let [a, b] = &self.names;
        run("ip", &format!("netns add {a}"))?;
        run("ip", &format!("netns add {b}"))?;
        run("ip", &format!("link add v0 netns {a} type veth peer name v0 netns {b}"))?;
        for (name, host) in self.names.iter().zip(1..) {
            run("ip", &format!("-n {name} addr add 10.79.0.{host}/24 dev v0"))?;
            run("ip", &format!("-n {name} addr add fd79::{host}/64 dev v0 nodad"))?;
            run("ip", &format!("-n {name} link set v0 up"))?;
            run("ip", &format!("-n {name} link set lo up"))?;
        }
        Some(())
    }

    /// Runs something in a namespace.
    fn on<R: Send>(&self, side: usize, work: impl FnOnce() -> R + Send) -> R {
        let path = format!("/run/netns/{}", self.names[side]);
        let enter = move || {
            let namespace = File::open(path).expect("just made");
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).expect("root");
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join().expect("the work does not panic"))
    }

    fn tc(&self, arguments: &str) -> Option<String> {
        run("tc", &format!("-n {} {arguments}", self.names[0]))
    }

    fn root(&self) -> String {
        self.tc("qdisc show dev v0 root").expect("tc")
    }

    fn classes(&self) -> String {
        self.tc("class show dev v0").expect("tc")
    }

    fn enforcer(&self) -> Htb {
        self.on(0, || Htb::open().expect("netlink"))
    }

    /// Watches what changes in the queues of the first namespace.
    fn watch(&self) -> Watch {
        let mut command = Command::new("tc");
        command.args(["-n", &self.names[0], "monitor"]).stdout(Stdio::piped());
        let child = command.spawn().expect("tc");
        // There is no sign that it has begun: it is there when it says what changed.
        thread::sleep(Duration::from_millis(200));
        Watch(child)
    }

    /// A socket whose packets have the code point.
    fn sender(&self, is_v6: bool, dscp: u8) -> UdpSocket {
        let address: SocketAddr = match is_v6 {
            false => (Ipv4Addr::new(10, 79, 0, 1), 0).into(),
            true => ("fd79::1".parse::<Ipv6Addr>().expect("an address"), 0).into(),
        };
        let socket = self.on(0, || UdpSocket::bind(address).expect("an address of the link"));
        let class = dscp << 2;
        match is_v6 {
            false => rustix::net::sockopt::set_ip_tos(&socket, class).expect("an option"),
            true => {
                rustix::net::sockopt::set_ipv6_tclass(&socket, class.into()).expect("an option");
            }
        }
        socket
    }

    fn receiver(&self, port: u16) -> UdpSocket {
        let any = (Ipv6Addr::UNSPECIFIED, port);
        let socket = self.on(1, || UdpSocket::bind(any).expect("a free port"));
        socket.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout");
        socket
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| {
            let _ = run("ip", &format!("netns del {name}"));
        });
    }
}

struct Watch(Child);

impl Watch {
    /// What has changed since.
    fn end(mut self) -> String {
        thread::sleep(Duration::from_millis(200));
        self.0.kill().expect("it runs");
        let mut text = String::new();
        self.0.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
        self.0.wait().expect("it has ended");
        text
    }
}

fn peer(is_v6: bool, port: u16) -> SocketAddr {
    match is_v6 {
        false => (Ipv4Addr::new(10, 79, 0, 2), port).into(),
        true => ("fd79::2".parse::<Ipv6Addr>().expect("an address"), port).into(),
    }
}

/// Jobs by number, DSCP and guarantee in bit/s.
fn plan(rate_bps: u64, jobs: &[(u64, u8, u64)]) -> Vec<PortPlan> {
    plan_with(rate_bps, jobs, |_| (Latency::Normal, 0))
}

/// The same, with the latency class and the burst in bytes of each job.
fn plan_with(
    rate_bps: u64,
    jobs: &[(u64, u8, u64)],
    besides: impl Fn(u64) -> (Latency, u64),
) -> Vec<PortPlan> {
    let port = Port {
        rate_bps,
        queues: 7,
        weight_units: 100,
        quantum_bytes: 1500,
        frame_bytes: 1518,
        buffer_bytes: 1 << 20,
    };
    let guarantee = |(job, dscp, bps): &(u64, u8, u64)| Guarantee {
        job: *job,
        dscp: Dscp::new(*dscp).expect("a code point"),
        bps: *bps,
        flows: 1,
        latency: besides(*job).0,
        burst_bytes: besides(*job).1,
        is_contended: true,
    };
    let guarantees: Vec<Guarantee> = jobs.iter().map(guarantee).collect();
    let plan = Plan::new(port, Scheme::Matched, &guarantees).expect("a plan");
    vec![PortPlan { interface: "v0".to_owned(), plan }]
}

fn bytes_of(sent: &[Sent], job: u64) -> u64 {
    sent.iter().find(|sent| sent.job == job).expect("the job has a plan").bytes
}

#[test]
fn tc_shows_the_plan_and_its_end() {
    let Some(lab) = Lab::new() else { return };
    let before = lab.root();
    let mut htb = lab.enforcer();
    let plan = plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 12, 200 * MBIT)]);
    htb.apply(&plan).expect("root");
    assert!(lab.root().starts_with("qdisc htb daa0: "), "{}", lab.root());
    let classes = lab.classes();
    for line in [
        "class htb daa0:1 root rate 1Gbit ceil 1Gbit ",
        "class htb daa0:10a parent daa0:1 leaf db0a: prio 1 rate 400Mbit ceil 1Gbit ",
        "class htb daa0:10c parent daa0:1 leaf db0c: prio 1 rate 200Mbit ceil 1Gbit ",
        "class htb daa0:130 parent daa0:1 leaf db30: prio 0 rate 5Mbit ceil 50Mbit ",
        "class htb daa0:2 parent daa0:1 leaf db40: prio 3 rate 395Mbit ceil 1Gbit ",
    ] {
        assert!(classes.contains(line), "{line:?} in {classes}");
    }
    assert_eq!(htb.sent().expect("counters").len(), 2);
    htb.apply(&[]).expect("root");
    assert_eq!(lab.root(), before);
    assert!(htb.sent().expect("counters").is_empty());
}

#[test]
fn a_plan_that_is_in_force_changes_nothing_and_outlives_its_agent() {
    let Some(lab) = Lab::new() else { return };
    let first = plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 12, 200 * MBIT)]);
    // Rates above 32 bits of bytes per second, and limits, come back from the kernel, too.
    let fast = plan(400_000 * MBIT, &[(1, 10, 100_000 * MBIT), (2, 12, 1)]);
    for plan in [first, fast] {
        lab.enforcer().apply(&plan).expect("root");
        let watch = lab.watch();
        let mut second = lab.enforcer();
        second.apply(&plan).expect("root");
        second.apply(&plan).expect("root");
        assert_eq!(watch.end(), "", "an agent that takes over changed something");
    }
    let watch = lab.watch();
    lab.enforcer().apply(&plan(1000 * MBIT, &[(1, 10, 300 * MBIT)])).expect("root");
    let changes = watch.end();
    assert!(changes.contains("daa0:10a") && changes.contains("deleted class"), "{changes}");
}

/// The namespace of the process that is killed.
const AGENT: &str = "DQUANT_TEST_AGENT";

/// What an agent's process and the one after it apply.
fn plan_of_agents() -> Vec<PortPlan> {
    plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 12, 200 * MBIT)])
}

#[test]
#[ignore = "the process that the next test kills"]
fn an_agent_that_stays() {
    let path = std::env::var_os(AGENT).expect("a namespace");
    let namespace = File::open(path).expect("made by the test");
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("root");
    let mut htb = Htb::open().expect("netlink");
    htb.apply(&plan_of_agents()).expect("root");
    println!("applied");
    thread::sleep(Duration::from_secs(60));
}

#[test]
fn queues_outlive_an_agent_that_is_killed_and_the_next_one_takes_them_over() {
    let Some(lab) = Lab::new() else { return };
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args(["--exact", "an_agent_that_stays", "--ignored", "--nocapture"]);
    command.env(AGENT, format!("/run/netns/{}", lab.names[0])).stdout(Stdio::piped());
    let mut agent = command.spawn().expect("this test runs");
    let output = BufReader::new(agent.stdout.take().expect("a pipe"));
    assert!(output.lines().any(|line| line.is_ok_and(|line| line.ends_with("applied"))));
    let before = lab.classes();
    let sender = lab.sender(false, 10);
    sender.send_to(&[0; 958], peer(false, ROCE_PORT)).expect("room");
    // SIGKILL.
    agent.kill().expect("it runs");
    agent.wait().expect("it has ended");
    assert_eq!(lab.classes(), before);
    let watch = lab.watch();
    let mut next = lab.enforcer();
    next.apply(&plan_of_agents()).expect("root");
    sender.send_to(&[0; 458], peer(false, ROCE_PORT)).expect("room");
    assert_eq!(bytes_of(&next.sent().expect("counters"), 1), 500, "from its own beginning");
    assert_eq!(watch.end(), "");
}

#[test]
fn packets_are_classified_by_dscp_port_and_protocol() {
    let Some(lab) = Lab::new() else { return };
    let mut htb = lab.enforcer();
    htb.apply(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 63, 200 * MBIT)])).expect("root");
    // One size for each case tells by the counters where it went.
    let cases = [
        (false, 10, ROCE_PORT, 100),
        (true, 10, ROCE_PORT, 1000),
        (false, 63, ROCE_PORT, 200),
        (true, 63, ROCE_PORT, 1100),
        (false, 48, ROCE_PORT, 300),
        (false, 0, ROCE_PORT, 400),
        (false, 12, ROCE_PORT, 500),
        (false, 10, 4790, 600),
        (true, 10, 4792, 700),
        // Cut into fragments, of which only the first has a port.
        (false, 10, ROCE_PORT, 4000),
    ];
    for (is_v6, dscp, port, bytes) in cases {
        let sender = lab.sender(is_v6, dscp);
        sender.send_to(&vec![0; bytes], peer(is_v6, port)).expect("room");
    }
    let v4 = |bytes: u64| 14 + 20 + 8 + bytes;
    let v6 = |bytes: u64| 14 + 40 + 8 + bytes;
    // The first packets wait until the peer's Ethernet address is known.
    let wanted = v4(100) + v6(1000) + v4(200) + v6(1100);
    let mut sent = Vec::new();
    for _ in 0..100 {
        sent = htb.sent().expect("counters");
        if sent.iter().map(|sent| sent.bytes).sum::<u64>() >= wanted {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(bytes_of(&sent, 1), v4(100) + v6(1000));
    assert_eq!(bytes_of(&sent, 2), v4(200) + v6(1100));
    assert!(sent.iter().all(|sent| sent.dropped_packets == 0 && sent.backlog_bytes == 0));
    let notifications = lab.tc("-s class show dev v0 classid daa0:130").expect("tc");
    assert!(notifications.contains(&format!("Sent {} bytes 1 pkt", v4(300))), "{notifications}");
}

#[test]
fn counters_follow_a_job_to_another_code_point() {
    let Some(lab) = Lab::new() else { return };
    let send = |dscp: u8, bytes: usize| {
        lab.sender(false, dscp).send_to(&vec![0; bytes], peer(false, ROCE_PORT)).expect("room");
    };
    let mut htb = lab.enforcer();
    htb.apply(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT)])).expect("root");
    send(10, 958);
    htb.apply(&plan(1000 * MBIT, &[(1, 12, 400 * MBIT), (2, 10, 100 * MBIT)])).expect("root");
    send(10, 58);
    send(12, 458);
    let sent = htb.sent().expect("counters");
    assert_eq!((bytes_of(&sent, 1), bytes_of(&sent, 2)), (1000 + 500, 100));
    // Another agent begins anew.
    let mut second = lab.enforcer();
    second.apply(&plan(1000 * MBIT, &[(1, 12, 400 * MBIT), (2, 10, 100 * MBIT)])).expect("root");
    assert!(second.sent().expect("counters").iter().all(|sent| sent.bytes == 0));
}

#[test]
fn changes_of_a_plan_lose_and_reorder_nothing() {
    let Some(lab) = Lab::new() else { return };
    let mut htb = lab.enforcer();
    let steady = (1, 10, 40 * MBIT);
    htb.apply(&plan(1000 * MBIT, &[steady])).expect("root");
    let receiver = lab.receiver(ROCE_PORT);
    let sender = lab.sender(false, 10);
    let (stop, packets) = (AtomicBool::new(false), 1000);
    let received = thread::scope(|scope| {
        let received = scope.spawn(|| {
            let mut buffer = [0; 2048];
            let next = || receiver.recv(&mut buffer).ok().map(|_| u32_of(&buffer));
            std::iter::from_fn(next).collect::<Vec<u32>>()
        });
        scope.spawn(|| {
            for number in 0..packets {
                let mut packet = [0; 1400];
                packet[..4].copy_from_slice(&u32::to_ne_bytes(number));
                sender.send_to(&packet, peer(false, ROCE_PORT)).expect("room");
                thread::sleep(Duration::from_micros(500));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut changes = 0u64;
        while !stop.load(Ordering::Relaxed) {
            let other = 10 * MBIT + changes % 7 * MBIT;
            let jobs = [steady, (2, 12, other), (3, 14 + (changes % 3) as u8 * 2, 20 * MBIT)];
            let rate = [100 * MBIT, 1000 * MBIT, 400 * MBIT][(changes % 3) as usize];
            htb.apply(&plan(rate, &jobs[..1 + (changes % 4).min(2) as usize])).expect("root");
            changes += 1;
        }
        assert!(changes > 20, "only {changes} changes");
        received.join().expect("the receiver")
    });
    assert_eq!(received, (0..packets).collect::<Vec<u32>>());
}

fn u32_of(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(*bytes.first_chunk().expect("four bytes"))
}

#[test]
fn queues_of_an_administrator_stay_unless_they_may_be_replaced() {
    let Some(lab) = Lab::new() else { return };
    lab.tc("qdisc add dev v0 root handle 5: tbf rate 1mbit burst 10kb latency 50ms").expect("tbf");
    let plan = plan(1000 * MBIT, &[(1, 10, 400 * MBIT)]);
    let before = lab.root();
    let error = lab.enforcer().apply(&plan).expect_err("it is not ours");
    assert!(matches!(&error, EnforceError::Occupied { found, .. } if found == "tbf 5:"), "{error}");
    lab.enforcer().apply(&[]).expect("nothing to do");
    assert_eq!(lab.root(), before);
    lab.enforcer().replacing().apply(&plan).expect("it may be replaced");
    assert!(lab.root().starts_with("qdisc htb daa0: "));
}

#[test]
fn all_ports_follow_their_plans_or_none() {
    let Some(lab) = Lab::new() else { return };
    let mut htb = lab.enforcer();
    let first = plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 12, 200 * MBIT)]);
    let mut next = plan(100 * MBIT, &[(1, 10, 10 * MBIT), (3, 14, 20 * MBIT)]);
    // An interface that is not there is found before anything changes.
    next.push(PortPlan { interface: "none-such".to_owned(), ..next[0].clone() });
    let fresh = lab.root();
    let error = htb.apply(&next).expect_err("one is missing");
    assert!(matches!(&error, EnforceError::NoInterface(name) if name == "none-such"), "{error}");
    assert_eq!(lab.root(), fresh);
    next[1].interface = "v0".to_owned();
    assert!(matches!(htb.apply(&next), Err(EnforceError::Refused { .. })), "two plans for one");
    next.pop();
    // Half-way: somebody has put a filter of another kind in the place of ours.
    htb.apply(&first).expect("root");
    lab.tc("filter del dev v0 parent daa0: prio 1").expect("ours");
    lab.tc("filter add dev v0 parent daa0: prio 1 protocol ip u32 match u32 0 0 classid daa0:2")
        .expect("another");
    let before = lab.classes();
    let error = htb.apply(&next).expect_err("the filter cannot be replaced");
    assert!(error.to_string().contains("classification by BPF"), "{error}");
    assert_eq!(lab.classes(), before, "{error}");
    // A port that had no queues of ours has none afterwards.
    htb.apply(&[]).expect("root");
    assert_eq!(lab.root(), fresh);
}

#[test]
fn without_the_privilege_the_reason_is_said() {
    let Some(lab) = Lab::new() else { return };
    let error = lab.on(0, || {
        let mut sets = rustix::thread::capabilities(None).expect("own");
        sets.effective.remove(CapabilitySet::NET_ADMIN);
        rustix::thread::set_capabilities(None, sets).expect("fewer");
        let mut htb = Htb::open().expect("needs no privilege");
        htb.apply(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT)])).expect_err("no privilege")
    });
    assert!(error.to_string().contains("not permitted"), "{error}");
    assert!(error.hint().contains("CAP_NET_ADMIN"));
}

/// Sends as fast as the queues take it.
fn flood(socket: &UdpSocket, stop: &AtomicBool) {
    // Packets in a queue count as the socket's, so it waits when there are so many.
    rustix::net::sockopt::set_socket_send_buffer_size(socket, 100_000).expect("an option");
    while !stop.load(Ordering::Relaxed) {
        socket.send_to(&[0; 1400], peer(false, ROCE_PORT)).expect("room");
    }
}

/// Bit/s of each job of `jobs`, of which those in `senders` flood.
fn measure(lab: &Lab, htb: &mut Htb, jobs: &[(u64, u8, u64)], senders: &[usize]) -> Vec<f64> {
    let stop = AtomicBool::new(false);
    let sockets: Vec<UdpSocket> = senders.iter().map(|at| lab.sender(false, jobs[*at].1)).collect();
    thread::scope(|scope| {
        sockets.iter().for_each(|socket| {
            scope.spawn(|| flood(socket, &stop));
        });
        thread::sleep(Duration::from_millis(500));
        let (before, from) = (htb.sent().expect("counters"), Instant::now());
        thread::sleep(Duration::from_secs(2));
        let (after, took) = (htb.sent().expect("counters"), from.elapsed().as_secs_f64());
        stop.store(true, Ordering::Relaxed);
        let bytes = |job| bytes_of(&after, job) - bytes_of(&before, job);
        jobs.iter().map(|(job, _, _)| bytes(*job) as f64 * 8.0 / took).collect()
    })
}

/// Measures until it fits, five times at most.
fn one_of_five(mut measure: impl FnMut() -> Vec<f64>, fits: impl Fn(&Vec<f64>) -> bool) {
    let mut seen = Vec::new();
    while seen.len() < 5 {
        seen.push(measure());
        if seen.last().is_some_and(&fits) {
            return;
        }
    }
    panic!("bit/s of the jobs, none as guaranteed: {seen:?}");
}

#[test]
fn backlogged_jobs_get_their_guarantees_and_what_idle_ones_leave() {
    let Some(lab) = Lab::new() else { return };
    let mut htb = lab.enforcer();
    let rate = 100 * MBIT;
    let jobs = [(1, 10, 50 * MBIT), (2, 12, 30 * MBIT), (3, 14, 20 * MBIT)];
    htb.apply(&plan(rate, &jobs)).expect("root");
    // A sender that a busy machine does not let run is not backlogged, so one of five measurements
    // has to fit.
    let fits = |all: &Vec<f64>| {
        let mut ratios = jobs.iter().zip(all).map(|((_, _, bps), measured)| measured / *bps as f64);
        ratios.all(|ratio| (ratio - 1.0).abs() < 0.02)
    };
    one_of_five(|| measure(&lab, &mut htb, &jobs, &[0, 1, 2]), fits);
    let fits = |two: &Vec<f64>| {
        let is_shared = (two[0] / two[1] - 5.0 / 3.0).abs() < 0.1;
        two[2] == 0.0 && two[0] + two[1] > 0.97 * rate as f64 && is_shared
    };
    one_of_five(|| measure(&lab, &mut htb, &jobs, &[0, 1]), fits);
}

/// Sends so many packets of a size with a pause before each, beside job 2, which floods; how long
/// each took in milliseconds, in order. Lost ones are missing.
fn beside_a_flood(lab: &Lab, packets: u32, bytes: usize, pause: Duration) -> Vec<f64> {
    const OTHER_PORT: u16 = ROCE_PORT;
    let begun = Instant::now();
    let receiver = lab.receiver(OTHER_PORT);
    let stop = AtomicBool::new(false);
    let (own, other) = (lab.sender(false, 10), lab.sender(false, 12));
    rustix::net::sockopt::set_socket_send_buffer_size(&own, 4 << 20).expect("an option");
    thread::scope(|scope| {
        scope.spawn(|| flood(&other, &stop));
        let took = scope.spawn(|| {
            let mut buffer = [0; 2048];
            let mut took = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let Ok(len) = receiver.recv(&mut buffer) else { continue };
                let sent = Duration::from_micros(u64_of(&buffer));
                // Those of the flood are of another size.
                if len == bytes {
                    took.push((begun.elapsed().saturating_sub(sent)).as_secs_f64() * 1e3);
                }
            }
            took
        });
        // The buckets of the flood are empty by then.
        thread::sleep(Duration::from_millis(300));
        for _ in 0..packets {
            thread::sleep(pause);
            let mut packet = vec![0; bytes];
            packet[..8].copy_from_slice(&(begun.elapsed().as_micros() as u64).to_ne_bytes());
            own.send_to(&packet, peer(false, OTHER_PORT)).expect("room");
        }
        thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::Relaxed);
        took.join().expect("the receiver")
    })
}

fn u64_of(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(*bytes.first_chunk().expect("eight bytes"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// Job 1 sends messages of 1,200 bytes, about 8 Mbit/s of which 2 are guaranteed, beside job 2 that
/// is backlogged. What it sends beyond its guarantee comes first if it minds waiting, and last if
/// it does not; job 2 has its guarantee either way.
#[test]
fn messages_of_a_job_that_minds_waiting_pass_a_backlogged_one() {
    let Some(lab) = Lab::new() else { return };
    let jobs = [(1, 10, 2 * MBIT), (2, 12, 50 * MBIT)];
    let mut htb = lab.enforcer();
    let mut took = |latency| {
        let besides = |job| if job == 1 { (latency, 0) } else { (Latency::Normal, 0) };
        htb.apply(&plan_with(100 * MBIT, &jobs, besides)).expect("root");
        let (before, from) = (htb.sent().expect("counters"), Instant::now());
        let took = beside_a_flood(&lab, 800, 1200, Duration::from_micros(1100));
        let (after, seconds) = (htb.sent().expect("counters"), from.elapsed().as_secs_f64());
        let bps = |job| (bytes_of(&after, job) - bytes_of(&before, job)) as f64 * 8.0 / seconds;
        println!(
            "{latency:?}: {:.3} ms, job 1 {:.0} bit/s, job 2 {:.0}",
            median(took.clone()),
            bps(1),
            bps(2)
        );
        (median(took), bps(2))
    };
    // One of five measurements has to fit: on a busy machine the flood, or who measures, may not
    // run.
    let fits = |_| {
        let ((low_ms, beside_low), (bulk_ms, beside_bulk)) =
            (took(Latency::Low), took(Latency::Bulk));
        let has_guarantee = [beside_low, beside_bulk].iter().all(|bps| *bps > 50e6 * 0.98);
        has_guarantee && low_ms < 2.0 && bulk_ms > 5.0 * low_ms
    };
    assert!(
        (0..5).any(fits),
        "job 1 waits as long as if it did not mind, or job 2 lacks its guarantee"
    );
}

/// What a job has saved up leaves at once, as far as its bucket goes, beside one that is
/// backlogged.
#[test]
fn a_burst_leaves_at_the_rate_of_the_port() {
    let Some(lab) = Lab::new() else { return };
    let jobs = [(1, 10, 20 * MBIT), (2, 12, 170 * MBIT)];
    let mut htb = lab.enforcer();
    let mut last_ms = |burst_bytes| {
        let besides = |job| (Latency::Normal, if job == 1 { burst_bytes } else { 0 });
        htb.apply(&plan_with(200 * MBIT, &jobs, besides)).expect("root");
        // 160 kB at once. The port carries 250 kB in 10 ms, of which job 2's bucket has 85 kB: job
        // 1's has the rest.
        let took = beside_a_flood(&lab, 114, 1401, Duration::ZERO);
        println!(
            "a bucket for {burst_bytes} bytes: {} packets, the last after {:?} ms",
            took.len(),
            took.last()
        );
        took.last().copied().unwrap_or(f64::INFINITY)
    };
    let mut fits = |_| last_ms(200_000) < 0.7 * last_ms(0);
    assert!((0..5).any(|round: u32| fits(round)), "a larger bucket makes no difference");
}
