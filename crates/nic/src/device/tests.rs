//! Several devices of this machine on loopback: steering, forwarding, multicast, and packets of
//! strangers.

use std::net::UdpSocket;

use roce::Duration;
use roce::verbs::{Qpn, Transport};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, icrc};
use roce::world::{Ecn, NoMemory, Origin, Path, Payload, Telemetry};

use super::*;
use crate::clock;
use crate::udp::{UdpConfig, UdpWire, pseudo};
use crate::waiter::Waiter;

/// Number of the loopback interface.
fn lo() -> u32 {
    let all = interfaces::interfaces().expect("a list");
    all.iter().find(|interface| interface.loopback).expect("loopback").index
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("literal")
}

fn device(addresses: &[&str]) -> DeviceWire {
    let addresses = addresses.iter().map(|text| ip(text)).collect();
    DeviceWire::open(&DeviceConfig::new(addresses, lo())).expect("loopback can be bound")
}

/// Where packets for a device's address are sent by a verbs program: always the RoCE port.
fn path_to(address: &str) -> Path {
    Path::new(SocketAddr::new(ip(address), ROCE_PORT))
}

/// A queue pair of the process with this slot.
fn qpn(slot: u8) -> u32 {
    u32::from(slot) << 16 | 0x23
}

fn headers(dest_qp: u32, psn: u32, payload_len: usize) -> Headers {
    let bth = Bth {
        opcode: Opcode::RcWriteMiddle,
        solicited: false,
        mig_req: false,
        pad: (4 - payload_len % 4) as u8 % 4,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: Qpn::new(dest_qp),
        ack_req: false,
        psn: Psn::new(psn),
    };
    Headers::new(bth, Ext::None).expect("legal")
}

fn frame(path: Path, dest_qp: u32, psn: u32, payload: &[u8]) -> TxFrame<'_> {
    let headers = headers(dest_qp, psn, payload.len());
    let pad = headers.bth().pad;
    TxFrame {
        path,
        header: headers.emit(),
        payload: Payload::Bytes(payload),
        pad,
        telemetry: Telemetry::None,
    }
}

/// What arrived: PSN, payload, origin.
type Seen = (u32, Vec<u8>, Origin);

/// Packets that arrive until `wanted` were accepted, or nothing comes for `patience`.
fn collect_for(wire: &mut DeviceWire, wanted: usize, patience: Duration) -> Vec<Seen> {
    let waiter = Waiter::new().expect("eventfd");
    let mut seen = Vec::new();
    while seen.len() < wanted {
        let arrived = wire.counters.rx.packets;
        wire.receive(clock::now(), &mut |frame| {
            seen.push((frame.headers.bth().psn.get(), frame.payload.to_vec(), frame.origin));
        });
        let idle = wire.counters.rx.packets == arrived;
        if idle && waiter.wait(&wire.fds(), Some(patience)).expect("poll").ready == 0 {
            break;
        }
    }
    seen
}

fn collect(wire: &mut DeviceWire, wanted: usize) -> Vec<Seen> {
    collect_for(wire, wanted, Duration::from_millis(2_000))
}

/// Checks that nothing arrives for a moment.
fn nothing(wire: &mut DeviceWire) {
    assert_eq!(collect_for(wire, 1, Duration::from_millis(30)), []);
}

fn psns(seen: &[Seen]) -> Vec<u32> {
    seen.iter().map(|(psn, ..)| *psn).collect()
}

/// A packet as a stranger's socket sends it, with the ICRC for identification 0.
fn sealed(from: SocketAddr, to: SocketAddr, dest_qp: u32, psn: u32, payload: &[u8]) -> Vec<u8> {
    let headers = headers(dest_qp, psn, payload.len());
    let mut packet = [&headers.emit()[..], payload].concat();
    packet.resize(packet.len() + usize::from(headers.bth().pad) + 4, 0);
    seal(from, to, packet)
}

fn seal(from: SocketAddr, to: SocketAddr, mut packet: Vec<u8>) -> Vec<u8> {
    let icrc = icrc::compute(&pseudo(from, to, 0).expect("one family"), &packet);
    let end = packet.len() - 4;
    packet[end..].copy_from_slice(&icrc.expect("long enough"));
    packet
}

#[test]
fn each_process_gets_a_slot_of_its_own() {
    let wires: Vec<DeviceWire> = (0..6).map(|_| device(&["127.8.1.1", "127.8.1.2"])).collect();
    let mut slots: Vec<u8> = wires.iter().map(DeviceWire::slot).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), 6);
    assert!(slots.iter().all(|slot| (1..=MAX_SLOT).contains(slot)));
    assert!(wires.iter().all(|wire| wire.why_not_shared().next().is_none()));
}

#[test]
fn a_slot_comes_back_when_its_process_ends_and_the_last_one_is_found() {
    let address = ip("127.8.2.1");
    let hold = |slot| UdpSocket::bind((address, process_port(slot)));
    let mut held: Vec<UdpSocket> =
        (1..=MAX_SLOT).map(|slot| hold(slot).expect("nobody else is here")).collect();
    let config = DeviceConfig::new(vec![address], lo());
    let error = DeviceWire::open(&config).expect_err("no slot is free");
    assert!(error.to_string().contains("254 processes") && error.hint().is_some(), "{error}");
    let free = held.swap_remove(99).local_addr().expect("bound").port();
    let wire = DeviceWire::open(&config).expect("one is free");
    assert_eq!(process_port(wire.slot()), free);
    drop(wire);
    assert_eq!(DeviceWire::open(&config).expect("free again").slot(), (free & 0xff) as u8);
}

#[test]
fn packets_on_one_machine_go_straight_to_their_process() {
    for address in ["127.8.3.1", "::1"] {
        let (mut a, mut b, mut c) = (device(&[address]), device(&[address]), device(&[address]));
        let payload = vec![7; 1024];
        let frames: Vec<_> =
            (0..100).map(|psn| frame(path_to(address), qpn(b.slot()), psn, &payload)).collect();
        a.send(clock::now(), &frames, &NoMemory);
        let seen = collect(&mut b, 100);
        assert_eq!(psns(&seen), (0..100).collect::<Vec<_>>(), "{address}");
        assert!(seen.iter().all(|(_, bytes, _)| *bytes == payload));
        assert_eq!(a.counters.tx.gso_batches, 2, "63 packets fit a send: {address}");
        assert_eq!(b.counters.rx.unexpected_ip_ids, 0, "{address}");
        for wire in [&mut a, &mut c] {
            nothing(wire);
            assert_eq!(wire.counters.rx.packets, 0, "{address}");
        }
    }
}

#[test]
fn one_burst_may_go_to_several_processes_and_to_oneself() {
    let mut wires = [(); 3].map(|()| device(&["127.8.4.1"]));
    let slots = [0, 1, 2].map(|i: usize| wires[i].slot());
    let frames: Vec<_> = (0..30)
        .map(|psn| frame(path_to("127.8.4.1"), qpn(slots[psn as usize % 3]), psn, b"abcd"))
        .collect();
    wires[0].send(clock::now(), &frames, &NoMemory);
    for (i, wire) in (0..).zip(&mut wires) {
        let wanted: Vec<u32> = (0..30).filter(|psn| psn % 3 == i).collect();
        assert_eq!(psns(&collect(wire, 10)), wanted);
    }
}

#[test]
fn what_arrives_at_the_shared_port_reaches_its_process_with_its_origin() {
    let here = ("127.8.5.1", "127.8.5.9");
    check_forwarding(here.0, here.1, ROCE_PORT);
    // Other tests share the RoCE port of the only IPv6 address that is always there.
    check_forwarding("::1", "::1", 24_791);
}

fn check_forwarding(address: &str, stranger: &str, port: u16) {
    const SOURCES: u32 = 24;
    let config = DeviceConfig { port, ..DeviceConfig::new(vec![ip(address)], lo()) };
    let [mut a, mut b] = [(); 2].map(|()| DeviceWire::open(&config).expect("loopback"));
    let to = SocketAddr::new(ip(address), port);
    let mut ports = Vec::new();
    for i in 0..SOURCES {
        let socket = UdpSocket::bind((ip(stranger), 0)).expect("bind");
        socket.set_ttl(77).expect("TTL");
        let from = socket.local_addr().expect("bound");
        let packet = sealed(from, to, qpn(b.slot()), i, b"from far away");
        socket.send_to(&packet, to).expect("send");
        ports.push(from.port());
    }
    collect_for(&mut a, 1, Duration::from_millis(50));
    let mut seen = collect(&mut b, SOURCES as usize);
    seen.sort_by_key(|(psn, ..)| *psn);
    assert_eq!(psns(&seen), (0..SOURCES).collect::<Vec<_>>(), "{address}");
    for ((_, payload, origin), port) in seen.iter().zip(ports) {
        assert_eq!(payload, b"from far away");
        assert_eq!(origin.source, SocketAddr::new(ip(stranger), port));
        assert_eq!((origin.dest, origin.via), (ip(address), 0));
        // std sets the IPv4 option only.
        let ttl = if ip(address).is_ipv4() { 77 } else { 64 };
        assert_eq!((origin.hop_limit, origin.ecn), (ttl, Ecn::NotEct));
    }
    let forwarded = a.counters.sharing.forwarded.packets;
    assert!(forwarded > 0, "24 flows over 2 sockets, all to one: 1 in 2^24");
    assert_eq!(b.counters.sharing.accepted, forwarded);
    assert_eq!(a.counters.rx.accepted, 0);
}

#[test]
fn forwarded_packets_are_taken_from_neighbours_only_and_never_sent_on_again() {
    let address = "127.8.6.1";
    let mut wire = device(&[address]);
    let own = SocketAddr::new(ip(address), process_port(wire.slot()));
    let other = 1 + wire.slot() % MAX_SLOT;
    let neighbour = UdpSocket::bind((ip(address), process_port(other))).expect("free");
    let stranger = UdpSocket::bind((ip(address), 0)).expect("free");
    let wrapped = |socket: &UdpSocket, slot: u8| {
        let from = socket.local_addr().expect("bound");
        let first: SocketAddr = "192.0.2.7:50000".parse().expect("literal");
        let inner = sealed(first, SocketAddr::new(ip(address), ROCE_PORT), qpn(slot), 3, b"hi");
        let mut header = [0; 28];
        (header[0], header[1], header[5]) = (0xff, 1, 60);
        header[8..10].copy_from_slice(&first.port().to_be_bytes());
        header[22..24].copy_from_slice(&[0xff; 2]);
        header[24..].copy_from_slice(&[192, 0, 2, 7]);
        seal(from, own, [&header[..], &inner, &[0; 4]].concat())
    };
    neighbour.send_to(&wrapped(&neighbour, wire.slot()), own).expect("send");
    let seen = collect(&mut wire, 1);
    assert_eq!(seen[0].2.source, "192.0.2.7:50000".parse().expect("literal"));
    stranger.send_to(&wrapped(&stranger, wire.slot()), own).expect("send");
    neighbour.send_to(&wrapped(&neighbour, other), own).expect("send");
    neighbour
        .send_to(&seal(neighbour.local_addr().expect("bound"), own, vec![0xff; 20]), own)
        .expect("send");
    let mut damaged = wrapped(&neighbour, wire.slot());
    damaged[50] ^= 1;
    neighbour.send_to(&damaged, own).expect("send");
    nothing(&mut wire);
    let UdpCounters { rx, sharing, .. } = wire.counters;
    assert_eq!((sharing.accepted, sharing.foreign, sharing.misrouted), (1, 1, 2));
    assert_eq!((rx.accepted, rx.bad_icrc, rx.packets), (1, 1, 5));
    assert_eq!(sharing.forwarded.packets, 0);
}

#[test]
fn a_port_held_by_someone_else_leaves_the_ways_on_this_machine() {
    let address = "127.8.7.1";
    let _holder = UdpSocket::bind((ip(address), ROCE_PORT)).expect("free");
    let (mut a, mut b) = (device(&[address]), device(&[address]));
    let (at, why) = a.why_not_shared().next().expect("a reason");
    assert!(at == ip(address) && why.contains("another process"), "{why}");
    assert!(a.to_string().contains("reached from this machine only"), "{a}");
    a.send(clock::now(), &[frame(path_to(address), qpn(b.slot()), 9, b"still")], &NoMemory);
    let seen = collect(&mut b, 1);
    assert_eq!(psns(&seen), [9]);
    assert_eq!(seen[0].2.source.port(), process_port(a.slot()));
}

#[test]
fn daemons_with_a_port_of_their_own_are_reached() {
    let mut wire = device(&["127.8.8.1"]);
    let mut daemon = UdpWire::bind(&UdpConfig::new(ip("127.8.8.2"))).expect("free");
    wire.send(clock::now(), &[frame(path_to("127.8.8.2"), 0x17, 4, b"daemon")], &NoMemory);
    let waiter = Waiter::new().expect("eventfd");
    waiter.wait(&[daemon.fd()], Some(Duration::from_millis(2_000))).expect("poll");
    let mut seen = Vec::new();
    daemon.receive(clock::now(), &mut |frame| {
        seen.push((frame.headers.bth().psn.get(), frame.origin.source));
    });
    assert_eq!(seen, [(4, SocketAddr::new(ip("127.8.8.1"), ROCE_PORT))]);
    let back = frame(path_to("127.8.8.1"), qpn(wire.slot()), 5, b"back");
    daemon.send(clock::now(), &[back], &NoMemory);
    assert_eq!(psns(&collect(&mut wire, 1)), [5], "alone on the shared port");
}

#[test]
fn the_path_chooses_source_marks_and_hop_limit() {
    let mut a = device(&["127.8.9.1", "::1", "127.8.9.3"]);
    let mut b = device(&["127.8.9.2", "::1"]);
    let (slot, v4, v6) = (b.slot(), path_to("127.8.9.2"), path_to("::1"));
    let paths = [
        Path { source: 2, dscp: 26, ecn: Ecn::Ce, hop_limit: 1, ..v4 },
        Path { source: 0, hop_limit: 255, ..v4 },
        Path { source: 1, dscp: 63, ecn: Ecn::NotEct, hop_limit: 9, ..v6 },
        Path { source: 1, hop_limit: 0, ..v6 },
        // No such source, and a source of the other IP version.
        Path { source: 3, ..v4 },
        Path { source: 1, ..v4 },
    ];
    let frames: Vec<_> =
        (0..).zip(paths).map(|(psn, path)| frame(path, qpn(slot), psn, b"x")).collect();
    a.send(clock::now(), &frames, &NoMemory);
    let mut seen = collect(&mut b, 4);
    seen.sort_by_key(|(psn, ..)| *psn);
    let origins: Vec<_> = seen
        .iter()
        .map(|(_, _, o)| (o.source.ip().to_string(), o.via, o.dscp, o.ecn, o.hop_limit))
        .collect();
    let wanted = [
        ("127.8.9.3".to_owned(), 0, 26, Ecn::Ce, 1),
        ("127.8.9.1".to_owned(), 0, 0, Ecn::Ect0, 255),
        ("::1".to_owned(), 1, 63, Ecn::NotEct, 9),
        ("::1".to_owned(), 1, 0, Ecn::Ect0, 64),
    ];
    assert_eq!(origins, wanted);
    assert_eq!(a.counters.tx.dropped.family, 2);
}

#[test]
fn every_member_of_a_group_gets_a_packet_once() {
    // Over IPv6 the loopback interface has no route for multicast: see `tests/namespaces.rs`.
    let (address, group) = ("127.8.10.1", "239.8.10.1");
    let mut wires = [(); 4].map(|()| device(&[address]));
    for wire in &mut wires[..3] {
        wire.join(ip(group)).expect("join");
    }
    let payload = vec![3; 256];
    let to = path_to(group);
    let burst: Vec<_> = (0..20).map(|psn| frame(to, 0x00ff_ffff, psn, &payload)).collect();
    wires[0].send(clock::now(), &burst, &NoMemory);
    for wire in &mut wires[..3] {
        let seen = collect(wire, 20);
        assert_eq!(psns(&seen), (0..20).collect::<Vec<_>>(), "{group}");
        let origin = seen[0].2;
        assert_eq!((origin.dest, origin.source.ip()), (ip(group), ip(address)));
        assert_eq!((origin.via, origin.hop_limit), (0, 64));
        nothing(wire);
    }
    nothing(&mut wires[3]);
    assert_eq!(wires[0].counters.tx.dropped.total(), 0);
}

#[test]
fn a_group_is_left_when_it_was_left_as_often_as_joined() {
    let (mut a, mut b) = (device(&["127.8.11.1"]), device(&["127.8.11.1"]));
    let (group, other) = (ip("239.8.11.1"), ip("239.8.11.2"));
    let mapped = "::ffff:239.8.11.1".parse().expect("literal");
    b.join(other).expect("join");
    b.join(group).expect("join");
    b.join(mapped).expect("the same group");
    b.leave(group).expect("once");
    let mut send = |psn| {
        a.send(clock::now(), &[frame(path_to("239.8.11.1"), 0x00ff_ffff, psn, b"m")], &NoMemory);
    };
    send(1);
    assert_eq!(psns(&collect(&mut b, 1)), [1]);
    b.leave(group).expect("twice");
    send(2);
    nothing(&mut b);
    assert_eq!(b.leave(group).expect_err("gone").kind(), io::ErrorKind::NotFound);
    b.leave(other).expect("the one that moved");
    for bad in ["10.0.0.1", "ff02::1"] {
        assert!(b.join(ip(bad)).is_err(), "{bad}: no group, or no address of its version");
    }
}

#[test]
fn devices_that_cannot_be_are_refused() {
    let open = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|text| ip(text)).collect();
        DeviceWire::open(&DeviceConfig::new(addresses, lo())).expect_err("refused")
    };
    assert!(open(&[]).to_string().contains("at least one address"));
    for (addresses, hint) in [
        (&["0.0.0.0"][..], "name one address"),
        (&["239.1.1.1"], "name one address"),
        (&["127.8.12.1", "192.0.2.1"], "address of this machine"),
    ] {
        assert!(open(addresses).hint().expect("a hint").contains(hint), "{addresses:?}");
    }
}

/// Garbage at every port, bare and with a right ICRC.
#[test]
fn garbage_is_counted_and_does_no_harm() {
    let address = "127.8.13.1";
    let mut wire = device(&[address]);
    let mut state = 13u64;
    let mut draw = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let neighbour = 1 + wire.slot() % MAX_SLOT;
    let sources = [0, process_port(neighbour)]
        .map(|port| UdpSocket::bind((ip(address), port)).expect("free"));
    let mut sent = 0;
    for round in 0..600 {
        let source = &sources[round % 2];
        let port = if draw() % 2 == 0 { ROCE_PORT } else { process_port(wire.slot()) };
        let to = SocketAddr::new(ip(address), port);
        let mut packet: Vec<u8> = (0..draw() % 90).map(|_| draw() as u8).collect();
        if let Some(first) = packet.first_mut().filter(|_| draw() % 2 == 0) {
            *first = 0xff;
        }
        if packet.len() >= 16 && draw() % 2 == 0 {
            packet = seal(source.local_addr().expect("bound"), to, packet);
        }
        source.send_to(&packet, to).expect("send");
        sent += 1;
        wire.receive(clock::now(), &mut |_| {});
    }
    let last = Waiter::new().expect("eventfd");
    while last.wait(&wire.fds(), Some(Duration::from_millis(30))).expect("poll").ready != 0 {
        wire.receive(clock::now(), &mut |_| {});
    }
    let UdpCounters { rx, sharing, .. } = wire.counters;
    assert_eq!(rx.packets, sent);
    let strays = sharing.forwarded.packets + sharing.forwarded.dropped.total() + sharing.probes;
    let refused =
        rx.bad_icrc + rx.unparsable.total() + rx.truncated + sharing.foreign + sharing.misrouted;
    assert_eq!(rx.accepted + refused + strays, sent, "{:?}", wire.counters);
    assert!(
        rx.bad_icrc > 50 && sharing.foreign > 20 && sharing.misrouted > 5,
        "{:?}",
        wire.counters
    );
}

/// One payload of the largest path MTU.
static PAYLOAD: [u8; 4096] = [0x5a; 4096];

/// Sends as much as `wire` admits, at most `limit` packets; returns how many.
fn send_as_there_is_room(wire: &mut DeviceWire, to: u8, address: &str, limit: usize) -> usize {
    let mut sent = 0;
    while sent < limit {
        let (path, wanted) = (path_to(address), 16.min(limit - sent));
        let room = wire.admits(clock::now(), &path, Qpn::new(qpn(to)), Transport::Rc, wanted);
        if room == 0 {
            break;
        }
        let frames: Vec<TxFrame<'_>> = (0..room)
            .map(|i| frame(path_to(address), qpn(to), (sent + i) as u32, &PAYLOAD))
            .collect();
        wire.send(clock::now(), &frames, &NoMemory);
        sent += room;
    }
    sent
}

/// Two devices with receive buffers of half a MiB, unless this kernel does not report their
/// occupancy.
fn small_devices(test: &str, address: &str) -> Option<[DeviceWire; 2]> {
    let open = || {
        let mut config = DeviceConfig::new(vec![ip(address)], lo());
        config.socket_buffer_bytes = 512 << 10;
        DeviceWire::open(&config).expect("loopback can be bound")
    };
    let wires = [open(), open()];
    if let Some(why) = wires[0].backlog.why_not() {
        crate::skip::note(test, why);
        return None;
    }
    Some(wires)
}

#[test]
fn a_full_receive_buffer_holds_packets_back_and_none_is_lost() {
    for address in ["127.8.21.1", "::1"] {
        let wires = small_devices("a_full_receive_buffer_holds_packets_back", address);
        let Some([mut a, mut b]) = wires else {
            return;
        };
        let total = 4_000;
        let (mut sent, mut got) = (0, 0);
        while got < total {
            let before = sent;
            sent += send_as_there_is_room(&mut a, b.slot(), address, total - sent);
            assert!(sent == total || a.next_wakeup().is_some(), "{sent} sent");
            // The receiver did not read while all of that was sent.
            let arrived = collect_for(&mut b, sent - before, Duration::from_millis(300)).len();
            assert_eq!(arrived, sent - before);
            got += arrived;
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        assert_eq!(b.overrun(), 0);
        assert!(a.counters().sharing.backpressure_waits > 4, "{:?}", a.counters().sharing);
    }
}

#[test]
fn a_process_that_never_reads_does_not_stop_its_peers_for_good() {
    let address = "127.8.22.1";
    let wires = small_devices("a_process_that_never_reads_does_not_stop_its_peers", address);
    let Some([mut a, stopped]) = wires else {
        return;
    };
    let patience = std::time::Instant::now();
    let mut sent = 0;
    while sent < 1_000 {
        sent += send_as_there_is_room(&mut a, stopped.slot(), address, 1_000 - sent);
        assert!(patience.elapsed().as_secs() < 5, "{sent} sent");
    }
    // Packets for it are dropped before they are sent.
    assert!(a.counters().tx.dropped.stopped > 0 && stopped.overrun() == 0);
    // A peer that reads is served meanwhile.
    let mut reads = device(&[address]);
    assert_eq!(send_as_there_is_room(&mut a, reads.slot(), address, 16), 16);
    assert_eq!(collect(&mut reads, 16).len(), 16);
}

#[test]
fn a_full_receive_buffer_slows_nobody_else() {
    let address = "127.8.24.1";
    let wires = small_devices("a_full_receive_buffer_slows_nobody_else", address);
    let Some([mut a, stopped]) = wires else {
        return;
    };
    let mut reads = device(&[address]);
    let mut rounds = 0;
    // Within one pause: what reaches `reads` now did not wait for the pause to end.
    while send_as_there_is_room(&mut a, stopped.slot(), address, 4_000) > 0 {}
    let (path, full) = (path_to(address), Qpn::new(qpn(stopped.slot())));
    assert_eq!(a.admits(clock::now(), &path, full, Transport::Rc, 1), 0);
    while a.admits(clock::now(), &path, full, Transport::Rc, 1) == 0 && rounds < 100 {
        assert_eq!(send_as_there_is_room(&mut a, reads.slot(), address, 16), 16, "{rounds}");
        assert_eq!(collect(&mut reads, 16).len(), 16);
        rounds += 1;
    }
    assert!(rounds > 0);
    assert_eq!(stopped.overrun(), 0);
}

#[test]
fn what_was_admitted_and_not_sent_is_not_held_against_anybody() {
    let address = "127.8.25.1";
    let wires = small_devices("what_was_admitted_and_not_sent", address);
    let Some([mut a, b]) = wires else {
        return;
    };
    let (path, to) = (path_to(address), Qpn::new(qpn(b.slot())));
    let now = clock::now();
    let all = a.admits(now, &path, to, Transport::Rc, usize::MAX);
    assert!(all > 0);
    assert_eq!(a.admits(now, &path, to, Transport::Rc, 1), 0, "all there is was admitted");
    // A queue pair whose turn came had nothing to send.
    a.receive(clock::now(), &mut |_| {});
    assert_eq!(a.admits(clock::now(), &path, to, Transport::Rc, all), all);
}

#[test]
fn a_process_that_reads_one_packet_after_the_other_is_not_stalled() {
    for (address, other) in [("127.8.26.1", "127.8.26.2"), ("::1", "::1")] {
        let mut a = device(&[address]);
        let mut b = device(&[other]);
        if let Some(why) = a.backlog.why_not() {
            return crate::skip::note("a_process_that_reads_one_packet_after_the_other", why);
        }
        let (path, to) = (path_to(other), Qpn::new(qpn(b.slot())));
        for round in 0..4 {
            a.send(clock::now(), &[frame(path, to.get(), round, b"one")], &NoMemory);
            assert_eq!(a.is_stalled(&path, to), round == 0, "{round}");
            assert_eq!(collect(&mut b, 1).len(), 1);
            nothing(&mut b);
        }
        let UdpCounters { rx, sharing, .. } = b.counters;
        assert_eq!((rx.packets, rx.accepted, sharing.probes, sharing.foreign), (8, 4, 4, 0));
    }
}

#[test]
fn a_process_that_is_gone_is_not_waited_for() {
    let address = "127.8.23.1";
    let wires = small_devices("a_process_that_is_gone_is_not_waited_for", address);
    let Some([mut a, gone]) = wires else {
        return;
    };
    let slot = gone.slot();
    assert!(send_as_there_is_room(&mut a, slot, address, 1_000) < 1_000);
    drop(gone);
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert_eq!(send_as_there_is_room(&mut a, slot, address, 1_000), 1_000);
}

/// Endpoints of daemons number their queue pairs freely: no number of theirs may be taken for one
/// of a process that shares the port.
#[test]
fn a_daemon_on_this_machine_is_reached_whatever_its_queue_pair_number() {
    let mut wire = device(&["127.8.33.1"]);
    if wire.backlog.why_not().is_some() {
        return;
    }
    let mut daemon = UdpWire::bind(&UdpConfig::new(ip("127.8.33.2"))).expect("free");
    let path = path_to("127.8.33.2");
    let mut reached = 0;
    for slot in 0..=255 {
        let dest = Qpn::new(qpn(slot));
        assert_eq!(wire.admits(clock::now(), &path, dest, Transport::Rc, 1), 1);
        wire.send(clock::now(), &[frame(path, qpn(slot), 0, b"daemon")], &NoMemory);
        let waiter = Waiter::new().expect("eventfd");
        waiter.wait(&[daemon.fd()], Some(Duration::from_millis(50))).expect("poll");
        daemon.receive(clock::now(), &mut |_| reached += 1);
    }
    assert_eq!(reached, 256);
}

mod many_small {
    use roce::device;
    use roce::endpoint::{Connect, Endpoint, EndpointConfig, Mtu, QpConfig};
    use roce::verbs::{Access, SendOp, SendWr, SgList, Sge};
    use roce::world::{self, AtomicOp, MemoryKind};

    use super::*;

    /// Zeros at every address.
    struct Zeros;

    impl Memory for Zeros {
        fn gather(&self, _: u64, into: &mut [u8]) {
            into.fill(0);
        }

        fn scatter(&mut self, _: u64, _: &[u8]) {}

        fn atomic(&mut self, _: u64, _: AtomicOp) -> u64 {
            0
        }

        fn kind(&self) -> MemoryKind {
            MemoryKind::Host
        }
    }

    /// Posts a WRITE of `len` bytes on each of `count` connections to a process of this machine.
    fn post(endpoint: &mut Endpoint, address: &str, slot: u8, count: u32, len: u32) {
        let (pd, cq) = (endpoint.alloc_pd(), endpoint.create_cq(16).expect("room"));
        let region = endpoint.register(pd, 1 << 30, 1 << 30, Access::ALL).expect("room");
        let now = clock::now();
        for _ in 0..count {
            let qp = endpoint.create_qp(QpConfig::rc(pd, cq, 4, 4)).expect("room");
            let to = Connect::new(path_to(address), Qpn::new(qpn(slot)), Psn::default());
            let peer = Connect { mtu: Mtu::M4096, timeout: 0, window_packets: 1 << 16, ..to };
            device::connect(endpoint, now, qp, &peer).expect("room");
            let sges = SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }]);
            let op = SendOp::Write { remote_addr: 0, rkey: 1 };
            endpoint.post_send(now, qp, SendWr { op, sges, ..SendWr::default() }).expect("room");
        }
    }

    fn endpoint() -> Endpoint {
        Endpoint::new(EndpointConfig { seed: 3, ..EndpointConfig::default() })
    }

    /// Wires of processes with the buffer of an ordinary user.
    fn processes<const N: usize>(address: &str) -> Option<[DeviceWire; N]> {
        let mut config = DeviceConfig::new(vec![ip(address)], lo());
        config.socket_buffer_bytes = 212_992;
        let wires = [(); N].map(|()| DeviceWire::open(&config).expect("loopback can be bound"));
        wires[0].backlog.why_not().is_none().then_some(wires)
    }

    /// Any 16 packets fit the empty buffer, so messages that fill one packet each leave in two
    /// turns.
    #[test]
    fn small_messages_of_many_connections_leave_together() {
        let Some([mut wire, peer]) = processes("127.8.31.1") else { return };
        let mut endpoint = endpoint();
        post(&mut endpoint, "127.8.31.1", peer.slot(), 16, 8);
        let mut turn =
            || world::turn(&mut endpoint, &mut wire, &mut Zeros, clock::now(), |_, _| false).sent;
        assert_eq!(turn() + turn(), 16);
    }

    /// Queue pairs that wait only for the next burst do not wait for the next query of a stopped
    /// process.
    #[test]
    fn a_full_buffer_elsewhere_delays_no_small_messages() {
        let Some([mut wire, stopped, mut peer]) = processes("127.8.32.1") else { return };
        let mut endpoint = endpoint();
        post(&mut endpoint, "127.8.32.1", stopped.slot(), 1, 64 << 20);
        let now = clock::now();
        while world::turn(&mut endpoint, &mut wire, &mut Zeros, now, |_, _| false).sent > 0 {}
        post(&mut endpoint, "127.8.32.1", peer.slot(), 100, 8);
        let (mut sent, mut turns) = (0, 0);
        // The clock stands still: no query of the stopped process comes due.
        while sent < 100 {
            sent += world::turn(&mut endpoint, &mut wire, &mut Zeros, now, |_, _| false).sent;
            peer.receive(now, &mut |_| ());
            turns += 1;
            assert!(turns <= 100, "{sent} sent");
        }
    }
}
