//! Devices on two machines, as far as the network can tell: two network namespaces and a veth link.
//!
//! Needs root and `ip`; without them every test reports that and passes.

#[path = "../../../testing/skip.rs"]
mod skip;

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use nic::capture::Capture;
use nic::clock;
use nic::device::{DeviceConfig, DeviceWire};
use nic::interfaces::{Interface, interfaces};
use nic::packet::PacketTap;
use nic::udp::IcrcCheck;
use nic::waiter::Waiter;
use roce::Duration;
use roce::verbs::Qpn;
use roce::wire::frame::{self, Ip, Ipv4, Network};
use roce::wire::icrc::{self, Pseudo};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, ROCE_PORT, capture};
use roce::world::{NoMemory, Origin, Path, Payload, Telemetry, TxFrame, Wire};
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Two namespaces, each with one end of a link: 10.78.0.1 and .2, fd78::1 and ::2, and link-local
/// ones.
struct Lab {
    names: [String; 2],
}

fn ip(arguments: &str) -> bool {
    let run = Command::new("ip").args(arguments.split_whitespace()).output();
    run.is_ok_and(|output| output.status.success())
}

impl Lab {
    /// `None`, with the reason reported, where namespaces cannot be created.
    fn new(mtu: u32) -> Option<Lab> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("nic{}-{number}{side}", std::process::id());
        let lab = Lab { names: [name('a'), name('b')] };
        if lab.build(mtu) {
            return Some(lab);
        }
        let name = thread::current().name().unwrap_or("namespaces").to_owned();
        skip::note(&name, "network namespaces need root and iproute2");
        None
    }

    fn build(&self, mtu: u32) -> bool {
        let [a, b] = &self.names;
        let link =
            format!("link add v0 netns {a} mtu {mtu} type veth peer name v0 mtu {mtu} netns {b}");
        let made = ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&link);
        made && self.names.iter().zip(1..).all(|(name, host)| {
            ip(&format!("-n {name} addr add 10.78.0.{host}/24 dev v0"))
                && ip(&format!("-n {name} addr add fd78::{host}/64 dev v0 nodad"))
                && ip(&format!("-n {name} link set v0 up"))
                && ip(&format!("-n {name} link set lo up"))
        })
    }

    /// Runs something on machine 0 or 1.
    fn on<R: Send>(&self, side: usize, work: impl FnOnce() -> R + Send) -> R {
        let path = format!("/run/netns/{}", self.names[side]);
        let enter = move || {
            let namespace = File::open(path).expect("just made");
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind).expect("root");
            work()
        };
        thread::scope(|scope| scope.spawn(enter).join().expect("the work does not panic"))
    }

    /// The link's end on one side, once all its addresses are usable.
    fn link(&self, side: usize) -> Interface {
        self.link_of(side, 3)
    }

    fn link_of(&self, side: usize, addresses: usize) -> Interface {
        for _ in 0..200 {
            let all = self.on(side, interfaces).expect("a list");
            let link = all.into_iter().find(|interface| interface.name == "v0").expect("made");
            if link.addresses.len() == addresses && link.running && !self.has_tentative(side) {
                return link;
            }
            thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("duplicate address detection takes two seconds, not ten");
    }

    /// Whether addresses of the link are still being checked for duplicates.
    fn has_tentative(&self, side: usize) -> bool {
        let name = &self.names[side];
        let arguments = ["-n", name, "-6", "addr", "show", "dev", "v0", "tentative"];
        let run = Command::new("ip").args(arguments).output().expect("it ran before");
        !run.stdout.is_empty()
    }

    fn device_with(
        &self,
        side: usize,
        change: impl FnOnce(&mut DeviceConfig) + Send,
    ) -> DeviceWire {
        let link = self.link(side);
        self.on(side, || {
            let mut config = DeviceConfig::new(link.addresses, link.index);
            change(&mut config);
            DeviceWire::open(&config).expect("the addresses are here")
        })
    }

    fn device(&self, side: usize) -> DeviceWire {
        self.device_with(side, |_| {})
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| {
            ip(&format!("netns del {name}"));
        });
    }
}

fn headers(dest_qp: u32, psn: u32) -> Headers {
    let bth = Bth {
        opcode: Opcode::UcSendOnly,
        solicited: false,
        mig_req: false,
        pad: 0,
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
    let header = headers(dest_qp, psn).emit();
    TxFrame { path, header, payload: Payload::Bytes(payload), pad: 0, telemetry: Telemetry::None }
}

fn qpn(wire: &DeviceWire) -> u32 {
    u32::from(wire.slot()) << 16 | 5
}

fn path(to: IpAddr, source: u8) -> Path {
    Path { source, ..Path::new(SocketAddr::new(to, ROCE_PORT)) }
}

/// Packets received until `wanted` have arrived or nothing has come for a while.
fn collect(wire: &mut DeviceWire, wanted: usize) -> Vec<(u32, Origin)> {
    let waiter = Waiter::new().expect("eventfd");
    let mut seen = Vec::new();
    let (mut idle, patience) = (0, Duration::from_millis(100));
    // With nothing wanted it drains what is there.
    while (seen.len() < wanted && idle < 10) || (wanted == 0 && idle < 2) {
        idle += 1;
        wire.receive(clock::now(), &mut |frame| {
            idle = 0;
            seen.push((frame.headers.bth().psn.get(), frame.origin));
        });
        waiter.wait(&wire.fds(), Some(patience)).expect("poll");
    }
    seen
}

fn psns(seen: &[(u32, Origin)]) -> Vec<u32> {
    seen.iter().map(|(psn, _)| *psn).collect()
}

#[test]
fn every_pair_of_addresses_connects_two_machines() {
    let Some(lab) = Lab::new(9000) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    assert_eq!((a.payload_limit(), a.addresses().len()), (4096, 3));
    let payload = vec![1; 1024];
    for (source, to) in (0..).zip(b.addresses().to_vec()) {
        let from = a.addresses()[usize::from(source)];
        assert_eq!(from.is_ipv4(), to.is_ipv4(), "both list the same kinds in the same order");
        let (path, qpn) = (path(to, source), qpn(&b));
        let batches = a.counters().tx.gso_batches;
        let burst: Vec<_> = (0..100).map(|psn| frame(path, qpn, psn, &payload)).collect();
        lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
        let seen = lab.on(1, || collect(&mut b, 100));
        assert_eq!(psns(&seen), (0..100).collect::<Vec<_>>(), "{from} to {to}");
        let origin = seen[0].1;
        assert_eq!((origin.source.ip(), origin.source.port()), (from, ROCE_PORT));
        assert_eq!((origin.dest, origin.via, origin.hop_limit), (to, source, 64));
        assert_eq!(a.counters().tx.gso_batches - batches, 2, "segmented over the link too");
    }
    assert_eq!(b.counters().rx.unexpected_ip_ids, 0, "places in joined runs are identifications");
}

#[test]
fn a_device_opens_while_its_addresses_are_checked_for_duplicates() {
    let Some(lab) = Lab::new(4500) else {
        return;
    };
    lab.link(0);
    let new = format!("-n {} addr add fd78::77/64 dev v0", lab.names[0]);
    assert!(ip(&new));
    assert!(lab.has_tentative(0), "the check takes a second");
    let all = lab.on(0, interfaces).expect("a list");
    let link = all.into_iter().find(|interface| interface.name == "v0").expect("made");
    let (v6, count) = ("fd78::77".parse().expect("literal"), link.addresses.len());
    let source = link.addresses.iter().position(|address| *address == v6).expect("listed") as u8;
    assert_eq!(count, 4);
    let config = DeviceConfig::new(link.addresses, link.index);
    let mut early = lab.on(0, || DeviceWire::open(&config)).expect("all can be bound");
    lab.link_of(0, count);
    let mut peer = lab.device(1);
    let to = qpn(&peer);
    lab.on(0, || {
        early.send(
            clock::now(),
            &[frame(path("fd78::2".parse().expect("literal"), source), to, 7, b"soon")],
            &NoMemory,
        );
    });
    let seen = collect(&mut peer, 1);
    assert_eq!((psns(&seen), seen[0].1.source.ip()), (vec![7], v6));
}

#[test]
fn two_processes_share_what_another_machine_sends() {
    let Some(lab) = Lab::new(1500) else { return };
    let mut senders = [(); 6].map(|()| lab.device(0));
    let (mut b, mut c) = (lab.device(1), lab.device(1));
    assert_eq!(b.payload_limit(), 1024);
    let payload = vec![2; 1024];
    let link = lab.link(1);
    let paths: Vec<Path> =
        (0..).zip(&link.addresses).map(|(source, to)| path(*to, source)).collect();
    let (qpn_b, qpn_c) = (qpn(&b), qpn(&c));
    for (i, sender) in (0..).zip(&mut senders) {
        let burst: Vec<_> = (paths.iter())
            .flat_map(|path| [frame(*path, qpn_b, i, &payload), frame(*path, qpn_c, i, &payload)])
            .collect();
        lab.on(0, || sender.send(clock::now(), &burst, &NoMemory));
    }
    // Each drains the shared port for the other as well.
    lab.on(1, || {
        let mut count = [0, 0];
        for _ in 0..300 {
            count[0] += b.receive(clock::now(), &mut |_| {});
            count[1] += c.receive(clock::now(), &mut |_| {});
            if count == [18, 18] {
                break;
            }
            thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(count, [18, 18]);
    });
    // Everything is sent from port 4791, so each of the three address pairs is one flow with one
    // owner.
    let forwarded = b.counters().sharing.forwarded.packets + c.counters().sharing.forwarded.packets;
    assert_eq!(forwarded, 18);
    assert_eq!(b.counters().sharing.accepted + c.counters().sharing.accepted, 18);
}

#[test]
fn groups_reach_members_on_both_machines_once() {
    let Some(lab) = Lab::new(1500) else { return };
    let (mut a, mut a2) = (lab.device(0), lab.device(0));
    let (mut b, mut b2) = (lab.device(1), lab.device(1));
    for group in ["239.78.0.1", "ff02::78", "ff0e::78"] {
        let group: IpAddr = group.parse().expect("literal");
        lab.on(0, || [&mut a, &mut a2].map(|wire| wire.join(group).expect("join")));
        lab.on(1, || [&mut b, &mut b2].map(|wire| wire.join(group).expect("join")));
        let source = a.addresses().iter().position(|ip| ip.is_ipv4() == group.is_ipv4());
        let path = path(group, source.expect("one of each") as u8);
        let payload = vec![3; 512];
        let burst: Vec<_> = (0..40).map(|psn| frame(path, 0x00ff_ffff, psn, &payload)).collect();
        lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
        for (side, wire) in [(0, &mut a), (0, &mut a2), (1, &mut b), (1, &mut b2)] {
            let seen = lab.on(side, || collect(wire, 40));
            assert_eq!(psns(&seen), (0..40).collect::<Vec<_>>(), "{group} on machine {side}");
            assert_eq!(seen[0].1.dest, group);
            assert_eq!(lab.on(side, || collect(wire, 0)), [], "{group}: once");
            wire.leave(group).expect("joined");
        }
        assert_eq!(a.counters().rx.bad_icrc + b.counters().rx.bad_icrc, 0, "{group}");
    }
}

/// Groups of the scope "interface" (RFC 4291, 2.7) never leave the machine.
#[test]
fn groups_of_the_interface_reach_members_on_this_machine_only() {
    let Some(lab) = Lab::new(1500) else { return };
    let (mut a, mut a2, mut b) = (lab.device(0), lab.device(0), lab.device(1));
    let group: IpAddr = "ff01::78".parse().expect("literal");
    lab.on(0, || [&mut a, &mut a2].map(|wire| wire.join(group).expect("join")));
    lab.on(1, || b.join(group).expect("join"));
    let source = a.addresses().iter().position(IpAddr::is_ipv6).expect("one") as u8;
    let path = path(group, source);
    let burst: Vec<_> = (0..40).map(|psn| frame(path, 0x00ff_ffff, psn, &[3; 512])).collect();
    lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
    for wire in [&mut a, &mut a2] {
        let seen = lab.on(0, || collect(wire, 40));
        assert_eq!(psns(&seen), (0..40).collect::<Vec<_>>());
        assert_eq!(seen[0].1.dest, group);
    }
    assert_eq!(lab.on(1, || collect(&mut b, 0)), []);
}

#[test]
fn packets_longer_than_the_link_are_dropped_and_counted() {
    let Some(lab) = Lab::new(1500) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    let to = path(Ipv4Addr::new(10, 78, 0, 2).into(), 0);
    let source = a.addresses().iter().position(IpAddr::is_ipv4).expect("one") as u8;
    let (large, fits, path) = (vec![0; 2048], vec![0; 1024], Path { source, ..to });
    let qpn = qpn(&b);
    let burst = [(0, &large), (1, &large), (2, &fits)].map(|(psn, p)| frame(path, qpn, psn, p));
    lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
    assert_eq!(psns(&lab.on(1, || collect(&mut b, 1))), [2]);
    assert_eq!((a.counters().tx.dropped.too_long, a.why_no_gso()), (2, None));
}

/// A packet from machine 0 to machine 1 with an IPv4 identification of our choice, and an ICRC for
/// another or the same one, as a device that is not a UDP socket sends it.
fn raw_packet(dest_qp: u32, psn: u32, id: u16, icrc_id: u16) -> Vec<u8> {
    let (src, dst) = (Ipv4Addr::new(10, 78, 0, 1), Ipv4Addr::new(10, 78, 0, 2));
    let mut body = [&headers(dest_qp, psn).emit()[..], b"from a NIC..", &[0; 4]].concat();
    let (src_port, dst_port) = (50_000, ROCE_PORT);
    let pseudo = Pseudo::V4 { src, dst, id: icrc_id, dont_fragment: true, src_port, dst_port };
    let end = body.len() - 4;
    let icrc = icrc::compute(&pseudo, &body).expect("long enough");
    body[end..].copy_from_slice(&icrc);
    let ip = Ip::V4(Ipv4 { tos: 2, id, dont_fragment: true, ttl: 61, src, dst });
    let mut out = Vec::new();
    frame::datagram(&ip, src_port, dst_port, [&body[..]], &mut out).expect("fits");
    out
}

fn send_raw(lab: &Lab, packets: &[Vec<u8>]) {
    lab.on(0, || {
        let fd = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::RAW)).expect("root");
        let to = SocketAddr::from(([10, 78, 0, 2], 0));
        for packet in packets {
            sendto(&fd, packet, SendFlags::empty(), &to).expect("a route");
        }
    });
}

#[test]
fn the_strict_check_sees_what_a_socket_cannot() {
    let Some(lab) = Lab::new(9000) else { return };
    for (check, accepted, bad) in
        [(IcrcCheck::Verify, vec![1, 2, 3], 0), (IcrcCheck::Strict, vec![1, 3], 1)]
    {
        let mut b = lab.device_with(1, |config| config.check = check);
        let qpn = qpn(&b);
        send_raw(
            &lab,
            &[
                raw_packet(qpn, 1, 0x1234, 0x1234),
                // Damaged so that another identification explains it.
                raw_packet(qpn, 2, 0x1234, 0x4321),
                raw_packet(qpn, 3, 0, 0),
            ],
        );
        let seen = lab.on(1, || collect(&mut b, accepted.len() + 1));
        assert_eq!(psns(&seen), accepted, "{check:?}");
        assert_eq!(b.counters().rx.bad_icrc, bad, "{check:?}");
        let origin = seen[0].1;
        assert_eq!(origin.source, SocketAddr::from(([10, 78, 0, 1], 50_000)), "{check:?}");
        assert_eq!((origin.hop_limit, origin.ecn), (61, roce::world::Ecn::Ect0), "{check:?}");
        assert_eq!(origin.dest, IpAddr::from([10, 78, 0, 2]), "{check:?}");
    }
}

#[test]
fn the_strict_check_takes_everything_once_from_both_kinds_of_neighbours() {
    let Some(lab) = Lab::new(9000) else { return };
    let strict = |config: &mut DeviceConfig| config.check = IcrcCheck::Strict;
    let (mut a, mut b) = (lab.device(0), lab.device_with(1, strict));
    assert!(b.check_in_force().contains("packet socket"), "{b}");
    let mut near = lab.device_with(1, strict);
    let payload = vec![4; 1024];
    let qpn = qpn(&b);
    for (source, to) in (0..).zip(b.addresses().to_vec()) {
        let burst: Vec<_> =
            (0..100).map(|psn| frame(path(to, source), qpn, psn, &payload)).collect();
        for side in [0, 1] {
            lab.on(side, || {
                if side == 0 {
                    a.send(clock::now(), &burst, &NoMemory);
                } else {
                    near.send(clock::now(), &burst, &NoMemory);
                }
            });
            // Over IPv6 the shared port may have given the packets to the other process.
            lab.on(1, || collect(&mut near, 0));
            let mut seen = lab.on(1, || collect(&mut b, 100));
            seen.extend(lab.on(1, || collect(&mut b, 0)));
            assert_eq!(psns(&seen), (0..100).collect::<Vec<_>>(), "from machine {side} to {to}");
        }
    }
    assert_eq!(b.counters().rx.bad_icrc, 0);
}

#[test]
fn a_tap_sees_segmented_sends_as_the_packets_that_they_are() {
    let Some(lab) = Lab::new(9000) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    let link = lab.link(1);
    let mut tap = lab.on(1, || PacketTap::open(Some(link.index))).expect("root");
    let payload = vec![5; 1024];
    let qpn = qpn(&b);
    for (source, to) in (0..).zip(b.addresses().to_vec()) {
        let burst: Vec<_> =
            (0..100).map(|psn| frame(path(to, source), qpn, psn, &payload)).collect();
        lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
        assert_eq!(lab.on(1, || collect(&mut b, 100)).len(), 100);
    }
    let file = std::env::temp_dir().join(format!("nic-tap-{}.pcap", std::process::id()));
    let mut recorded = Capture::create(&file, u64::MAX).expect("a temporary file");
    while tap.receive(&mut |time, packet| recorded.packet(time, packet)).expect("up") > 0 {}
    drop(recorded);
    let report = capture::check(&fs::read(&file).expect("just written"));
    fs::remove_file(&file).expect("ours");
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.roce, report.udp_checksum_right), (300, 300), "{report}");
    let counters = tap.counters();
    assert_eq!((counters.packets, counters.unknown, counters.overrun), (300, 0, 0));
    assert_eq!(counters.coalesced, 6, "two segmented sends for each address");
}

/// What an ICMP error quotes: the head of a packet from `from`, and its length on the wire.
fn quoted(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let udp = [&from.port().to_be_bytes()[..], &to.port().to_be_bytes(), &[0x10, 0x38, 0, 0]];
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let fixed = [0x45, 0, 0x10, 0x4c, 0, 0, 0x40, 0, 64, 17, 0, 0];
            [&fixed[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let fixed = [0x60, 0, 0, 0, 0x10, 0x38, 17, 64];
            [&fixed[..], &from.octets(), &to.octets()].concat()
        }
        mixed => panic!("{mixed:?}"),
    };
    [ip, udp.concat(), vec![0; 64]].concat()
}

/// An ICMP error from machine 1 to machine 0: type, code and the second word of its header.
fn send_icmp(lab: &Lab, kind: [u8; 2], word: u32, from: SocketAddr, to: SocketAddr) {
    let mut icmp = [&[kind[0], kind[1], 0, 0][..], &word.to_be_bytes()].concat();
    icmp.extend(quoted(from, to));
    if from.is_ipv4() {
        let words = icmp.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let sum: u32 = words.sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        icmp[2..4].copy_from_slice(&checksum.to_be_bytes());
    }
    let (family, protocol) = match from {
        SocketAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        // The kernel fills in the checksum.
        SocketAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    lab.on(1, || {
        let fd = socket(family, SocketType::RAW, Some(protocol)).expect("root");
        sendto(&fd, &icmp, SendFlags::empty(), &SocketAddr::new(from.ip(), 0)).expect("a route");
    });
}

/// The kernel's route from machine 0 to an address.
fn route_of(lab: &Lab, to: IpAddr) -> String {
    let arguments = ["-n", &lab.names[0], "route", "get", &to.to_string()];
    let run = Command::new("ip").args(arguments).output().expect("it ran before");
    String::from_utf8_lossy(&run.stdout).into_owned()
}

/// Both kinds of address, the ICMP error that claims a smaller MTU, and the minimum that Linux
/// accepts.
fn too_big() -> [(SocketAddr, SocketAddr, [u8; 2], u32); 2] {
    let at = |ip: &str| SocketAddr::new(ip.parse().expect("literal"), ROCE_PORT);
    [(at("10.78.0.1"), at("10.78.0.2"), [3, 4], 600), (at("fd78::1"), at("fd78::2"), [2, 0], 1280)]
}

/// Sends a burst of the longest packets from `a` to `b` and checks, on the wire, that they are the
/// same as without an attack.
fn carries_the_largest(lab: &Lab, a: &mut DeviceWire, b: &mut DeviceWire, to: IpAddr) {
    let link = lab.link(1);
    let mut tap = lab.on(1, || PacketTap::open(Some(link.index))).expect("root");
    let source = a.addresses().iter().position(|from| from.is_ipv4() == to.is_ipv4());
    let (payload, qpn) = (vec![6; 4096], qpn(b));
    let path = path(to, source.expect("one of each") as u8);
    let burst: Vec<_> = (0..40).map(|psn| frame(path, qpn, psn, &payload)).collect();
    let batches = a.counters().tx.gso_batches;
    lab.on(0, || a.send(clock::now(), &burst, &NoMemory));
    let seen = lab.on(1, || collect(b, 40));
    assert_eq!(a.counters().tx.dropped.total(), 0, "{to}: {:?}", a.counters().tx.dropped);
    assert_eq!(psns(&seen), (0..40).collect::<Vec<_>>(), "{to}");
    assert!(a.counters().tx.gso_batches > batches && a.why_no_gso().is_none(), "{to}: segmented");
    let mut packets = Vec::new();
    while tap.receive(&mut |_, packet| packets.push(packet.to_vec())).expect("up") > 0 {}
    assert_eq!(packets.len(), 40, "{to}");
    for packet in &packets {
        let (parsed, _) = frame::Packet::parse(packet).expect("RoCE");
        assert!(parsed.icrc_is_right(), "{to}");
        let fragments = matches!(parsed.network, Network::Udp(Ip::V4(ip), _) if !ip.dont_fragment);
        assert!(!fragments, "{to}");
    }
}

#[test]
fn spoofed_icmp_about_the_mtu_changes_nothing() {
    let Some(lab) = Lab::new(9000) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    for (from, to, kind, mtu) in too_big() {
        send_icmp(&lab, kind, mtu, from, to);
        // Over IPv4 the route learns it, and only the socket ignores it.
        let learnt = route_of(&lab, to.ip()).contains(&format!("mtu {mtu}"));
        assert_eq!(learnt, to.is_ipv4(), "{}", route_of(&lab, to.ip()));
        carries_the_largest(&lab, &mut a, &mut b, to.ip());
    }
}

#[test]
fn a_route_poisoned_through_another_socket_harms_neither_packets_nor_the_path_mtu() {
    let Some(lab) = Lab::new(9000) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    for (from, to, kind, mtu) in too_big() {
        let before = lab.on(0, || nic::udp::payload_limit(from.ip(), to)).expect("a route");
        // Any service of the machine will do: the kernel stores what it learns by address.
        let other = lab.on(0, || UdpSocket::bind(SocketAddr::new(from.ip(), 53))).expect("free");
        send_icmp(&lab, kind, mtu, SocketAddr::new(from.ip(), 53), to);
        let learnt = format!("mtu {mtu}");
        assert!(route_of(&lab, to.ip()).contains(&learnt), "{}", route_of(&lab, to.ip()));
        drop(other);
        carries_the_largest(&lab, &mut a, &mut b, to.ip());
        let limit = lab.on(0, || nic::udp::payload_limit(from.ip(), to)).expect("a route");
        assert_eq!(limit, before, "{to}");
        assert!(limit >= 4096, "{to}: {limit}");
    }
}

#[test]
fn the_path_mtu_is_the_least_of_the_link_and_of_what_the_operator_says_of_the_route() {
    let Some(lab) = Lab::new(4500) else { return };
    lab.link(0);
    let name = &lab.names[0];
    for (from, to, kind, mtu) in too_big() {
        let headers = if to.is_ipv4() { 28 + 36 } else { 48 + 36 };
        let limit = |to| lab.on(0, || nic::udp::payload_limit(from.ip(), to)).expect("a route");
        assert_eq!(limit(to), 4500 - headers, "{to}");
        // To itself, a machine sends over loopback.
        assert!(limit(SocketAddr::new(from.ip(), ROCE_PORT)) > 65_000, "{from}");
        assert!(ip(&format!("-n {name} route add {} dev v0 mtu 3000", to.ip())));
        assert_eq!(limit(to), 3000 - headers, "{to}");
        let _other = lab.on(0, || UdpSocket::bind(SocketAddr::new(from.ip(), 53))).expect("free");
        send_icmp(&lab, kind, mtu, SocketAddr::new(from.ip(), 53), to);
        assert!(route_of(&lab, to.ip()).contains(&format!("mtu {mtu}")));
        assert_eq!(limit(to), 3000 - headers, "{to}");
    }
}

/// Unreachable networks, hosts, protocols, ports; prohibited; a route that is too long: none of
/// them reaches an unconnected socket as an error.
#[test]
fn other_spoofed_icmp_errors_reach_no_socket() {
    let Some(lab) = Lab::new(9000) else { return };
    let (mut a, mut b) = (lab.device(0), lab.device(1));
    for (from, to, _, _) in too_big() {
        let kinds: &[[u8; 2]] = match from.is_ipv4() {
            true => &[[3, 0], [3, 1], [3, 2], [3, 3], [3, 5], [3, 13], [11, 0], [12, 0], [4, 0]],
            false => &[[1, 0], [1, 1], [1, 3], [1, 4], [1, 5], [3, 0], [4, 0]],
        };
        for kind in kinds {
            send_icmp(&lab, *kind, 0, from, to);
        }
        carries_the_largest(&lab, &mut a, &mut b, to.ip());
        assert_eq!(lab.on(0, || collect(&mut a, 0)), []);
    }
    assert_eq!((a.counters().rx.errors, a.counters().tx.dropped.last_errno), (0, 0));
}
