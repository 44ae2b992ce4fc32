//! The AF_XDP wire between two network namespaces: one end or both, long and short packets, loss,
//! other programs, `kill -9`.
//!
//! Needs root, `ip` and a kernel with AF_XDP; without them every test reports that and passes.
#![cfg(feature = "xdp")]

#[path = "../../../testing/skip.rs"]
mod skip;
mod veth;
#[path = "veth/host.rs"]
mod veth_host;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration as StdDuration;

use nic::clock;
use nic::udp::{UdpConfig, UdpWire};
use nic::xdp::{Mode, XdpConfig, XdpError, XdpWire};
use roce::Time;
use roce::endpoint::Mtu;
use roce::verbs::{Qpn, SendOp};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
use roce::world::{NoMemory, Path, Payload, Telemetry, TxFrame, Wire};

use veth::{Lab, address, enter, ip};
use veth_host::{Host, LIMIT, transfer};

/// Set for the process that attaches a program and waits to be killed.
const HOLD: &str = "NIC_XDP_TEST_HOLDS";

/// Two machines that know each other, so that all packets take the shorter way; `None`, with the
/// reason reported, where the kernel has no AF_XDP.
fn lab(mtu: u32) -> Option<Lab> {
    Lab::new(mtu).filter(has_xdp)
}

/// The same with empty tables of neighbours.
fn unresolved(mtu: u32) -> Option<Lab> {
    Lab::unresolved(mtu).filter(has_xdp)
}

fn has_xdp(lab: &Lab) -> bool {
    let opened = lab.on(0, || XdpWire::open(&config(0, false)));
    if let Err(error) = &opened {
        let test = thread::current().name().unwrap_or("xdp").to_owned();
        skip::note(&test, &format!("no AF_XDP here: {error}"));
    }
    opened.is_ok()
}

fn has_program(lab: &Lab, side: usize) -> bool {
    let arguments = ["-n", &lab.names[side], "-d", "link", "show", "dev", "v0"];
    let run = Command::new("ip").args(arguments).output().expect("it ran before");
    String::from_utf8_lossy(&run.stdout).contains("prog/xdp")
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
            let Some(lab) = lab(link) else { return };
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
            let Some(lab) = lab(link) else { return };
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
    let Some(lab) = unresolved(1500) else { return };
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
    let Some(lab) = lab(9000) else { return };
    let mut a = Host::new(xdp(&lab, 0, false), 0, 0);
    let mut b = Host::new(xdp(&lab, 1, false), 1, 0);
    transfer(&mut a, &mut b, false, Mtu::M4096);
    let counters = a.wire.inner().counters();
    assert!(counters.tx_long > 100 && counters.tx_packets > 0, "{counters:?}");
}

#[test]
fn the_generic_attachment_works_too() {
    let Some(lab) = lab(1500) else { return };
    let generic = |side| XdpConfig { modes: vec![Mode::Generic], ..config(side, false) };
    let (a, b) = (open(&lab, 0, &generic(0)), open(&lab, 1, &generic(1)));
    assert_eq!(a.mode(), Mode::Generic);
    let (mut a, mut b) = (Host::new(a, 0, 0), Host::new(b, 1, 0));
    transfer(&mut a, &mut b, false, Mtu::M1024);
    assert_used(a.wire.inner());
}

/// The kernel refuses a send while the interface is down. The frame stays in the ring, and no other
/// packet follows that would take it along.
#[test]
fn a_frame_that_the_kernel_refused_leaves_at_a_later_turn() {
    let Some(lab) = lab(1500) else { return };
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
    let Some(lab) = lab(1500) else { return };
    let mut a = Host::new(xdp(&lab, 0, false), 0, 10_000);
    let mut b = Host::new(udp(&lab, 1, false), 1, 10_000);
    transfer(&mut a, &mut b, false, Mtu::M1024);
    assert!(a.wire.dropped() + b.wire.dropped() > 0, "the loss was real");
}

#[test]
fn another_program_is_not_replaced_and_dropping_the_wire_detaches() {
    let Some(lab) = lab(1500) else { return };
    let first = xdp(&lab, 0, false);
    assert!(has_program(&lab, 0));
    // Another address, but the same interface.
    let second = lab.on(0, || XdpWire::open(&config(0, true)));
    let refused = second.expect_err("one program for each interface");
    assert!(refused.hint().is_some(), "{refused}");
    assert!(matches!(refused, XdpError::Occupied), "{refused:?}");
    assert!(has_program(&lab, 0), "the first one's");
    drop(first);
    wait_until(|| !has_program(&lab, 0));
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
    let Some(lab) = lab(1500) else { return };
    let mut holder = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "hold_until_killed", "--nocapture"])
        .env(HOLD, &lab.names[0])
        .stdout(Stdio::piped())
        .spawn()
        .expect("this test runs again");
    let output = BufReader::new(holder.stdout.take().expect("piped"));
    let attached = output.lines().map_while(Result::ok).any(|line| line == "attached");
    let had_program = has_program(&lab, 0);
    holder.kill().expect("it is ours");
    holder.wait().expect("it is ours");
    assert!(attached && had_program);
    wait_until(|| !has_program(&lab, 0));
    drop(xdp(&lab, 0, false));
}
