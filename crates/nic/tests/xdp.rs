//! The AF_XDP wire between two network namespaces: one end or both, long and short packets, loss, other programs,
//! `kill -9`.
//!
//! Needs root, `ip` and a kernel with AF_XDP; without them every test reports that and passes.
#![cfg(feature = "xdp")]

#[path = "../../../testing/skip.rs"]
mod skip;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration as StdDuration;

use nic::clock;
use nic::fault::LossyWire;
use nic::pool::Pool;
use nic::udp::{UdpConfig, UdpWire};
use nic::xdp::{Mode, XdpConfig, XdpError, XdpWire};
use roce::device;
use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, CqId, MemoryRegion, Qpn, SendOp, SendWr, Sge, WcStatus};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
use roce::world::{self, NoMemory, Path, Payload, Staging, Telemetry, TxFrame, Wire};
use roce::{Duration, Time};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

const MIB: usize = 1 << 20;

/// How long a transfer may take before it counts as stuck.
const LIMIT: Duration = Duration::from_millis(60_000);

/// Set for the process that attaches a program and waits to be killed.
const HOLD: &str = "NIC_XDP_TEST_HOLDS";

/// Two namespaces with a link: 10.79.0.1 and .2, fd79::1 and ::2.
struct Lab {
    names: [String; 2],
}

fn ip(arguments: &str) -> bool {
    let run = Command::new("ip").args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

impl Lab {
    /// `None`, with the reason reported, where it cannot be built or the kernel has no AF_XDP.
    fn new(mtu: u32) -> Option<Lab> {
        let lab = Lab::unresolved(mtu)?;
        // From here on no packet waits for a neighbour, so all take the shorter way.
        for side in 0..2 {
            let (name, host) = (&lab.names[side], 2 - side);
            for peer in [format!("10.79.0.{host}"), format!("fd79::{host}")] {
                let entry = format!("{peer} lladdr 02:00:00:00:79:0{host} dev v0 nud permanent");
                assert!(ip(&format!("-n {name} neigh replace {entry}")));
            }
        }
        Some(lab)
    }

    /// The same with empty tables of neighbours.
    fn unresolved(mtu: u32) -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("xdp{}-{number}{side}", std::process::id());
        let lab = Lab { names: [name('a'), name('b')] };
        let [a, b] = &lab.names;
        let link =
            format!("link add v0 netns {a} mtu {mtu} type veth peer name v0 mtu {mtu} netns {b}");
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&link);
        let up = made
            && lab.names.iter().zip(1..).all(|(name, host)| {
                ip(&format!("-n {name} link set v0 address 02:00:00:00:79:0{host}"))
                    && ip(&format!("-n {name} addr add 10.79.0.{host}/24 dev v0"))
                    && ip(&format!("-n {name} addr add fd79::{host}/64 dev v0 nodad"))
                    && ip(&format!("-n {name} link set v0 up"))
            });
        let test = thread::current().name().unwrap_or("xdp").to_owned();
        if !up {
            skip::note(&test, "network namespaces need root and iproute2");
            return None;
        }
        match lab.on(0, || XdpWire::open(&config(0, false))) {
            Ok(_) => Some(lab),
            Err(error) => {
                skip::note(&test, &format!("no AF_XDP here: {error}"));
                None
            }
        }
    }

    /// Runs something on machine 0 or 1.
    fn on<R: Send>(&self, side: usize, work: impl FnOnce() -> R + Send) -> R {
        let enter = move || {
            enter(&self.names[side]);
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join().expect("the work does not panic"))
    }

    fn has_program(&self, side: usize) -> bool {
        let arguments = ["-n", &self.names[side], "-d", "link", "show", "dev", "v0"];
        let run = Command::new("ip").args(arguments).output().expect("it ran before");
        String::from_utf8_lossy(&run.stdout).contains("prog/xdp")
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| {
            ip(&format!("netns del {name}"));
        });
    }
}

fn enter(name: &str) {
    let namespace = File::open(format!("/run/netns/{name}")).expect("just made");
    let kind = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(namespace.as_fd(), kind).expect("root");
}

fn address(side: usize, v6: bool) -> std::net::IpAddr {
    let text = if v6 { format!("fd79::{}", side + 1) } else { format!("10.79.0.{}", side + 1) };
    text.parse().expect("an address")
}

fn config(side: usize, v6: bool) -> XdpConfig {
    XdpConfig::new(address(side, v6))
}

fn xdp(lab: &Lab, side: usize, v6: bool) -> XdpWire {
    open(lab, side, &config(side, v6))
}

/// Opens a wire once the kernel has released what an earlier one used.
fn open(lab: &Lab, side: usize, config: &XdpConfig) -> XdpWire {
    let deadline = clock::now() + LIMIT;
    loop {
        match lab.on(side, || XdpWire::open(config)) {
            Ok(wire) => return wire,
            Err(error) if clock::now() >= deadline => panic!("{error}"),
            Err(_) => thread::sleep(StdDuration::from_millis(20)),
        }
    }
}

fn udp(lab: &Lab, side: usize, v6: bool) -> UdpWire {
    lab.on(side, || UdpWire::bind(&UdpConfig::new(address(side, v6)))).expect("the address is here")
}

/// An endpoint with one queue pair, its wire and its memory.
struct Host<W> {
    endpoint: Endpoint,
    wire: LossyWire<W>,
    pool: Pool,
    region: MemoryRegion,
    cq: CqId,
    qpn: Qpn,
    side: usize,
    completed: u64,
}

impl<W: Wire> Host<W> {
    fn new(wire: W, side: usize, loss_ppm: u32) -> Host<W> {
        let seed = side as u64 + 1;
        let pool = Pool::new(4 * MIB as u64).expect("pool");
        let mut endpoint = Endpoint::new(EndpointConfig { seed, ..EndpointConfig::default() });
        let pd = endpoint.alloc_pd();
        let cq = endpoint.create_cq(64).expect("cq");
        let region = endpoint.register(pd, pool.base(), pool.len(), Access::ALL).expect("region");
        let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 32, 32)).expect("qp");
        let wire = LossyWire::new(wire, loss_ppm, seed);
        Host { endpoint, wire, pool, region, cq, qpn, side, completed: 0 }
    }

    fn connect<P: Wire>(&mut self, peer: &Host<P>, v6: bool, mtu: Mtu) {
        let remote = (address(peer.side, v6), 4791).into();
        let psn = peer.endpoint.query_qp(peer.qpn).expect("qp").sq_psn;
        let local_psn = self.endpoint.query_qp(self.qpn).expect("qp").sq_psn;
        let connect = Connect::new(Path::new(remote), peer.qpn, psn);
        let connect = Connect { mtu, local_psn, ..connect };
        device::connect(&mut self.endpoint, clock::now(), self.qpn, &connect).expect("connect");
    }

    fn post(&mut self, op: SendOp, from: usize, len: usize) {
        let sge =
            Sge { addr: self.pool.base() + from as u64, len: len as u32, lkey: self.region.lkey };
        let wr = SendWr {
            wr_id: 1,
            op,
            sges: [sge].into_iter().collect(),
            signaled: true,
            ..SendWr::default()
        };
        self.endpoint.post_send(clock::now(), self.qpn, wr).expect("post");
    }

    fn bytes(&mut self, from: usize, len: usize) -> &mut [u8] {
        let base = self.pool.base();
        self.pool.bytes_mut(base + from as u64, len)
    }

    fn step(&mut self) {
        let Host { endpoint, wire, pool, .. } = self;
        world::turn(endpoint, wire, pool, clock::now(), |_, _| false);
        while let Some(completion) = self.endpoint.poll_cq(self.cq) {
            assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
            self.completed += 1;
        }
    }
}

fn content(at: usize, seed: usize) -> u8 {
    ((at + 1).wrapping_mul(seed * 2 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// WRITEs in both directions and a READ at once; every byte is compared.
fn transfer<A: Wire, B: Wire>(a: &mut Host<A>, b: &mut Host<B>, v6: bool, mtu: Mtu) {
    const LEN: usize = MIB / 2 + 13;
    a.connect(b, v6, mtu);
    b.connect(a, v6, mtu);
    a.bytes(0, LEN).iter_mut().enumerate().for_each(|(at, byte)| *byte = content(at, 1));
    b.bytes(0, LEN).iter_mut().enumerate().for_each(|(at, byte)| *byte = content(at, 2));
    let (to_a, to_b) = (a.pool.base(), b.pool.base());
    let (a_key, b_key) = (a.region.rkey, b.region.rkey);
    a.post(SendOp::Write { remote_addr: to_b + MIB as u64, rkey: b_key }, 0, LEN);
    b.post(SendOp::Write { remote_addr: to_a + MIB as u64, rkey: a_key }, 0, LEN);
    a.post(SendOp::Read { remote_addr: to_b, rkey: b_key }, 2 * MIB, LEN);
    let deadline = clock::now() + LIMIT;
    while a.completed + b.completed < 3 {
        assert!(clock::now() < deadline, "stuck after {} and {}", a.completed, b.completed);
        a.step();
        b.step();
    }
    let differs = |bytes: &[u8], seed| (0..LEN).find(|&at| bytes[at] != content(at, seed));
    assert_eq!(differs(b.bytes(MIB, LEN), 1), None);
    assert_eq!(differs(a.bytes(MIB, LEN), 2), None);
    assert_eq!(differs(a.bytes(2 * MIB, LEN), 2), None);
}

fn assert_used(wire: &XdpWire) {
    let counters = wire.counters();
    assert!(counters.tx_packets > 100 && counters.rx_accepted > 100, "{counters:?}");
    let refused = counters.rx_malformed + counters.rx_foreign + counters.rx_headers;
    assert_eq!((refused, counters.rx_bad_icrc), (0, 0), "{counters:?}");
}

#[test]
fn both_ends_carry_every_byte_with_both_versions_of_ip() {
    for (link, mtu) in [(1500, Mtu::M1024), (9000, Mtu::M2048)] {
        for v6 in [false, true] {
            let Some(lab) = Lab::new(link) else { return };
            let mut a = Host::new(xdp(&lab, 0, v6), 0, 0);
            let mut b = Host::new(xdp(&lab, 1, v6), 1, 0);
            transfer(&mut a, &mut b, v6, mtu);
            assert_used(a.wire.inner());
            assert_used(b.wire.inner());
        }
    }
}

#[test]
fn a_peer_on_udp_notices_no_difference() {
    for (link, mtu) in [(1500, Mtu::M1024), (9000, Mtu::M2048)] {
        for v6 in [false, true] {
            let Some(lab) = Lab::new(link) else { return };
            let mut a = Host::new(xdp(&lab, 0, v6), 0, 0);
            let mut b = Host::new(udp(&lab, 1, v6), 1, 0);
            transfer(&mut a, &mut b, v6, mtu);
            assert_used(a.wire.inner());
            assert_eq!(b.wire.inner().counters().rx.bad_icrc, 0);
        }
    }
}

#[test]
fn an_unknown_neighbour_is_resolved_by_the_kernel() {
    let Some(lab) = Lab::unresolved(1500) else { return };
    let mut a = Host::new(xdp(&lab, 0, false), 0, 0);
    let mut b = Host::new(xdp(&lab, 1, false), 1, 0);
    transfer(&mut a, &mut b, false, Mtu::M1024);
    let deadline = clock::now() + LIMIT;
    while a.wire.inner().counters().tx_packets == 0 {
        assert!(clock::now() < deadline, "{:?}", a.wire.inner().counters());
        let (before, key) = (a.completed, b.region.rkey);
        a.post(SendOp::Write { remote_addr: b.pool.base(), rkey: key }, 0, 8);
        while a.completed == before {
            assert!(clock::now() < deadline, "{:?}", a.wire.inner().counters());
            a.step();
            b.step();
        }
    }
    assert!(a.wire.inner().counters().tx_unresolved > 0);
}

#[test]
fn packets_that_fit_no_frame_take_the_udp_socket() {
    let Some(lab) = Lab::new(9000) else { return };
    let mut a = Host::new(xdp(&lab, 0, false), 0, 0);
    let mut b = Host::new(xdp(&lab, 1, false), 1, 0);
    transfer(&mut a, &mut b, false, Mtu::M4096);
    let counters = a.wire.inner().counters();
    assert!(counters.tx_long > 100 && counters.tx_packets > 0, "{counters:?}");
}

#[test]
fn the_generic_attachment_works_too() {
    let Some(lab) = Lab::new(1500) else { return };
    let generic = |side| XdpConfig { modes: vec![Mode::Generic], ..config(side, false) };
    let (a, b) = (open(&lab, 0, &generic(0)), open(&lab, 1, &generic(1)));
    assert_eq!(a.mode(), Mode::Generic);
    let (mut a, mut b) = (Host::new(a, 0, 0), Host::new(b, 1, 0));
    transfer(&mut a, &mut b, false, Mtu::M1024);
    assert_used(a.wire.inner());
}

/// The kernel refuses a send while the interface is down. The frame stays in the ring, and no other packet follows that
/// would take it along.
#[test]
fn a_frame_that_the_kernel_refused_leaves_at_a_later_turn() {
    let Some(lab) = Lab::new(1500) else { return };
    let (mut a, mut b) = (xdp(&lab, 0, false), udp(&lab, 1, false));
    let start = clock::now();
    let link = |state: &str| assert!(ip(&format!("-n {} link set v0 {state}", lab.names[0])));
    // The next hop is remembered for a second of this time, which does not pass.
    send_one(&mut a, start, 0);
    receive_until(&mut a, &mut b, start, &[0]);
    link("down");
    send_one(&mut a, start, 1);
    assert_eq!(a.counters().tx_packets, 2, "{:?}", a.counters());
    let due = a.next_wakeup().expect("a sleeping sender is woken for the frame");
    assert!(due > start);
    a.receive(start, &mut |_| {});
    assert_eq!(a.counters().tx_retries, 0, "before it is due");
    a.receive(due, &mut |_| {});
    assert_eq!(a.counters().tx_retries, 1);
    link("up");
    let later = a.next_wakeup().expect("it is still there");
    receive_until(&mut a, &mut b, later, &[1]);
    assert_eq!(a.next_wakeup(), None);
}

/// Sends a packet that only its number tells from others.
fn send_one(wire: &mut XdpWire, now: Time, number: u32) {
    let bth = Bth {
        opcode: Opcode::UcSendOnly,
        solicited: false,
        mig_req: false,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: Qpn::new(2),
        ack_req: false,
        psn: Psn::new(number),
    };
    let header = Headers::new(bth, Ext::None).expect("no extension").emit();
    let path = Path::new((address(1, false), 4791).into());
    let frame = TxFrame {
        path,
        header,
        payload: Payload::Bytes(&[7; 64]),
        pad: 0,
        telemetry: Telemetry::None,
    };
    wire.send(now, &[frame], &NoMemory);
}

/// Turns of both until these packets have arrived. The sender's time is `now` all along.
fn receive_until(a: &mut XdpWire, b: &mut UdpWire, now: Time, numbers: &[u32]) {
    let (deadline, mut arrived) = (clock::now() + LIMIT, Vec::new());
    while arrived != numbers {
        assert!(clock::now() < deadline, "{arrived:?} arrived, not {numbers:?}");
        a.receive(now, &mut |_| {});
        b.receive(now, &mut |frame| arrived.push(frame.headers.bth().psn.get()));
    }
}

#[test]
fn loss_is_repaired() {
    let Some(lab) = Lab::new(1500) else { return };
    let mut a = Host::new(xdp(&lab, 0, false), 0, 10_000);
    let mut b = Host::new(udp(&lab, 1, false), 1, 10_000);
    transfer(&mut a, &mut b, false, Mtu::M1024);
    assert!(a.wire.dropped() + b.wire.dropped() > 0, "the loss was real");
}

#[test]
fn another_program_is_not_replaced_and_dropping_the_wire_detaches() {
    let Some(lab) = Lab::new(1500) else { return };
    let first = xdp(&lab, 0, false);
    assert!(lab.has_program(0));
    // Another address, but the same interface.
    let second = lab.on(0, || XdpWire::open(&config(0, true)));
    let refused = second.expect_err("one program for each interface");
    assert!(refused.hint().is_some(), "{refused}");
    assert!(matches!(refused, XdpError::Occupied), "{refused:?}");
    assert!(lab.has_program(0), "the first one's");
    drop(first);
    wait_until(|| !lab.has_program(0));
    drop(xdp(&lab, 0, true));
}

#[test]
fn loopback_and_other_ports_are_refused_with_a_hint() {
    let loopback = XdpWire::open(&XdpConfig::new("127.0.0.1".parse().expect("literal")));
    assert!(matches!(loopback, Err(XdpError::NoInterface(_))), "{loopback:?}");
    let udp = UdpConfig::at("10.79.0.1:5000".parse().expect("literal"));
    let port = XdpWire::open(&XdpConfig { udp, ..config(0, false) }).expect_err("not 4791");
    assert!(matches!(port, XdpError::Port(5000)) && port.hint().is_some());
}

/// Waits for something that the kernel does soon.
fn wait_until(done: impl Fn() -> bool) {
    let deadline = clock::now() + LIMIT;
    while !done() {
        assert!(clock::now() < deadline, "nothing happened for a minute");
        thread::sleep(StdDuration::from_millis(20));
    }
}

/// The process that [`nothing_stays_attached_after_kill_9`] kills; alone it does nothing.
#[test]
fn hold_until_killed() {
    let Ok(name) = std::env::var(HOLD) else { return };
    enter(&name);
    let deadline = clock::now() + LIMIT;
    let _wire = loop {
        match XdpWire::open(&config(0, false)) {
            Ok(wire) => break wire,
            Err(error) if clock::now() >= deadline => panic!("{error}"),
            Err(_) => thread::sleep(StdDuration::from_millis(20)),
        }
    };
    println!("\nattached");
    thread::sleep(StdDuration::from_secs(120));
}

#[test]
fn nothing_stays_attached_after_kill_9() {
    let Some(lab) = Lab::new(1500) else { return };
    let mut holder = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "hold_until_killed", "--nocapture"])
        .env(HOLD, &lab.names[0])
        .stdout(Stdio::piped())
        .spawn()
        .expect("this test runs again");
    let output = BufReader::new(holder.stdout.take().expect("piped"));
    let attached = output.lines().map_while(Result::ok).any(|line| line == "attached");
    let had_program = lab.has_program(0);
    holder.kill().expect("it is ours");
    holder.wait().expect("it is ours");
    assert!(attached && had_program);
    wait_until(|| !lab.has_program(0));
    drop(xdp(&lab, 0, false));
}
