//! The RoCEv1 wire between two network namespaces: every byte in both directions, loss, captures,
//! hostile frames, peers that do not answer, interfaces that go down or disappear, and processes
//! without privileges.
//!
//! Needs root and `ip`; without them every test reports that and passes.

#[path = "../../../testing/skip.rs"]
mod skip;
#[path = "../../nic/tests/veth/mod.rs"]
mod veth;
#[path = "../../nic/tests/veth/host.rs"]
mod veth_host;

use std::fs;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

use adapter::owned::{Adapter, Software, Trouble};
use nic::capture::Capture;
use nic::clock;
use nic::pool::Pool;
use nic::ready::ReadySet;
use nic::roce_v1::{RESOLVE_LIMIT, RoceV1Error, RoceV1Wire};
use nic::udp::SocketWire;
use roce::Duration;
use roce::device::{self, Device};
use roce::endpoint::{Endpoint, EndpointConfig, Mtu, QpConfig};
use roce::verbs::{Access, Datagram, MemoryRegion, Qpn, RecvWr, SendWr, SgList, Sge, Transport};
use roce::wire::capture::{self, Link};
use roce::wire::frame::{Ethernet, Frame, Network, NetworkType, Packet};
use roce::wire::grh::{Grh, gid_of};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn};
use roce::world::{self, Ecn, NoMemory, Origin, Path, Payload, Staging, Telemetry, TxFrame, Wire};

use veth::{Lab, address, ip};
use veth_host::{Host, LIMIT, transfer};

/// Addresses of a lab's interfaces.
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0x79, 1], [2, 0, 0, 0, 0x79, 2]];

fn open(lab: &Lab, side: usize, v6: bool) -> RoceV1Wire {
    lab.on(side, || RoceV1Wire::open(address(side, v6))).expect("root, and an Ethernet interface")
}

/// A wire that knows its peer.
fn resolved(lab: &Lab, side: usize, v6: bool) -> RoceV1Wire {
    let mut wire = open(lab, side, v6);
    wire.resolve(address(1 - side, v6), RESOLVE_LIMIT).expect("the peer answers");
    wire
}

fn assert_used(wire: &RoceV1Wire) {
    let counters = wire.counters();
    let (tx, rx) = (counters.tx, counters.rx);
    assert!(tx.packets > 100 && rx.accepted > 100, "{counters:?}");
    assert_eq!((tx.dropped.total(), counters.tx_unresolved), (0, 0), "{counters:?}");
    assert_eq!(rx.packets, rx.accepted, "{counters:?}");
}

#[test]
fn both_ends_carry_every_byte_with_both_kinds_of_gids() {
    for (link, mtu) in [(1500, Mtu::M1024), (9000, Mtu::M4096)] {
        for v6 in [false, true] {
            let Some(lab) = Lab::unresolved(link) else { return };
            let mut a = Host::new(resolved(&lab, 0, v6), 0, 0);
            let mut b = Host::new(resolved(&lab, 1, v6), 1, 0);
            assert!(a.wire.inner().payload_limit() >= mtu.bytes());
            transfer(&mut a, &mut b, v6, mtu);
            assert_used(a.wire.inner());
            assert_used(b.wire.inner());
        }
    }
}

#[test]
fn loss_is_repaired() {
    let Some(lab) = Lab::new(1500) else { return };
    let mut a = Host::new(resolved(&lab, 0, false), 0, 10_000);
    let mut b = Host::new(resolved(&lab, 1, false), 1, 10_000);
    transfer(&mut a, &mut b, false, Mtu::M1024);
    assert!(a.wire.dropped() + b.wire.dropped() > 0, "the loss was real");
}

/// A packet that only its number tells from others.
fn headers(psn: u32, fecn: bool) -> Headers {
    let bth = Bth {
        opcode: Opcode::UcSendOnly,
        solicited: false,
        mig_req: false,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn,
        becn: false,
        dest_qp: Qpn::new(2),
        ack_req: false,
        psn: Psn::new(psn),
    };
    Headers::new(bth, Ext::None).expect("no extension")
}

fn send_one(wire: &mut RoceV1Wire, to: IpAddr, psn: u32, payload: &[u8]) {
    let path = Path { dscp: 46, hop_limit: 7, ..Path::new((to, 4791).into()) };
    let header = headers(psn, false).emit();
    let payload = Payload::Bytes(payload);
    let frame = TxFrame { path, header, payload, pad: 0, telemetry: Telemetry::None };
    wire.send(clock::now(), &[frame], &NoMemory);
}

/// What arrives until this packet has.
fn receive_until(wire: &mut RoceV1Wire, last: u32) -> Vec<(u32, Origin)> {
    let (deadline, mut seen) = (clock::now() + LIMIT, Vec::new());
    while seen.last().is_none_or(|&(psn, _)| psn != last) {
        assert!(clock::now() < deadline, "{seen:?}, {:?}", wire.counters());
        wire.receive(clock::now(), &mut |frame| {
            seen.push((frame.headers.bth().psn.get(), frame.origin));
        });
    }
    seen
}

fn psns(seen: &[(u32, Origin)]) -> Vec<u32> {
    seen.iter().map(|(psn, _)| *psn).collect()
}

#[test]
fn an_origin_has_what_the_grh_says() {
    for v6 in [false, true] {
        let Some(lab) = Lab::new(1500) else { return };
        let (mut a, mut b) = (resolved(&lab, 0, v6), resolved(&lab, 1, v6));
        send_one(&mut a, address(1, v6), 9, b"text");
        let seen = receive_until(&mut b, 9);
        let expected = Origin {
            dscp: 46,
            hop_limit: 7,
            // Not ECN capable: the path says so, but the header has no place for it.
            version_tclass_flow: (6_u32 << 28 | 46 << 22).try_into().ok(),
            ..Origin::new((address(0, v6), 4791).into(), address(1, v6))
        };
        assert_eq!(seen, [(9, expected)]);
    }
}

/// A socket that sends any frame from machine 0.
struct Forger(OwnedFd);

impl Forger {
    fn on(lab: &Lab) -> Forger {
        lab.on(0, || {
            // SAFETY: no pointers are passed.
            let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
            assert!(raw >= 0, "root");
            // SAFETY: `raw` was just opened and belongs to nobody else.
            let fd = unsafe { OwnedFd::from_raw_fd(raw) };
            let all = nic::interfaces::interfaces().expect("a list");
            let index = all.iter().find(|one| one.name == "v0").expect("the lab's").index;
            // SAFETY: all zeroes is a valid address.
            let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            link.sll_family = libc::AF_PACKET as u16;
            link.sll_ifindex = index as i32;
            let len = size_of_val(&link) as libc::socklen_t;
            // SAFETY: `link` is readable for `len` bytes.
            let rc = unsafe { libc::bind(fd.as_raw_fd(), (&raw const link).cast(), len) };
            assert_eq!(rc, 0);
            Forger(fd)
        })
    }

    fn send(&self, frame: &[u8]) {
        // SAFETY: the frame is readable for its length.
        let rc = unsafe { libc::send(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        assert_eq!(rc, frame.len() as isize);
    }
}

/// A frame from machine 0 to machine 1, changed by `change` before its ICRC is computed.
fn frame(psn: u32, change: impl FnOnce(&mut Ethernet, &mut Grh, &mut bool)) -> Vec<u8> {
    let mut ethernet = Ethernet { dst: MACS[1], src: MACS[0], vlan_tci: None };
    let [sgid, dgid] = [0, 1].map(|side| gid_of(address(side, false)));
    let mut grh = Grh { traffic_class: 0, flow_label: 0, hop_limit: 1, sgid, dgid };
    let mut fecn = false;
    change(&mut ethernet, &mut grh, &mut fecn);
    let (network, headers) = (Network::Grh(grh), headers(psn, fecn));
    let packet = Packet { network, headers, payload: b"evil", pad: [0; 3], icrc: [0; 4] };
    let packet = Packet { icrc: packet.computed_icrc(), ..packet };
    let mut bytes = Vec::new();
    Frame { ethernet, packet, trailer: &[] }.emit(&mut bytes).expect("short");
    bytes
}

#[test]
fn hostile_frames_are_refused_and_counted_by_reason() {
    let Some(lab) = Lab::new(9000) else { return };
    let forger = Forger::on(&lab);
    let mut wire = open(&lab, 1, false);
    let good = |psn| frame(psn, |_, _, _| {});
    let foreign = [
        frame(1, |_, grh, _| grh.dgid = "fd79::2".parse().expect("good")),
        frame(1, |_, grh, _| grh.sgid = "::".parse().expect("good")),
        frame(1, |_, grh, _| grh.sgid = "ff02::1".parse().expect("good")),
        frame(1, |_, grh, _| grh.sgid = "::ffff:224.0.0.1".parse().expect("good")),
        frame(1, |_, grh, _| grh.sgid = grh.dgid),
        frame(1, |ethernet, _, _| ethernet.dst = [0xff; 6]),
        frame(1, |ethernet, _, _| ethernet.dst = [2, 0, 0, 0, 0x79, 9]),
    ];
    let changed = |at: usize, value: u8| {
        let mut bytes = good(1);
        bytes[at] = value;
        bytes
    };
    let mut long = good(1);
    long.resize(5000, 0);
    let short: Vec<_> = [14, 15, 53].map(|len| good(1)[..len].to_vec()).to_vec();
    let malformed = [changed(14, 0x80), changed(20, 17), changed(18, 1), changed(19, 22), long];
    let malformed: Vec<_> = malformed.into_iter().chain(short).collect();
    let bad_icrc = [changed(60, 1), changed(37, 99), changed(70, b'E')];
    let unparsable = [changed(54, 0x15), changed(55, 5), changed(19, 12)];
    let all = foreign.iter().chain(&malformed).chain(&bad_icrc).chain(&unparsable);
    all.for_each(|bytes| forger.send(bytes));
    // Not RoCEv1: the socket does not see it.
    let mut other = good(1);
    other[12..14].copy_from_slice(&[0x88, 0xb5]);
    forger.send(&other);
    forger.send(&frame(8, |_, _, fecn| *fecn = true));
    forger.send(&good(9));
    let seen = receive_until(&mut wire, 9);
    assert_eq!(psns(&seen), [8, 9]);
    assert_eq!([seen[0].1.ecn, seen[1].1.ecn], [Ecn::Ce, Ecn::NotEct]);
    let rx = wire.counters().rx;
    assert_eq!(rx.foreign, foreign.len() as u64, "{rx:?}");
    assert_eq!(rx.malformed, malformed.len() as u64, "{rx:?}");
    assert_eq!(rx.bad_icrc, bad_icrc.len() as u64, "{rx:?}");
    assert_eq!(rx.unparsable.total(), unparsable.len() as u64, "{rx:?}");
    assert_eq!((rx.accepted, rx.fecn), (2, 1));
    let sum = rx.accepted + rx.foreign + rx.malformed + rx.bad_icrc + rx.unparsable.total();
    assert_eq!(sum, rx.packets, "{rx:?}");
}

/// A VLAN that this machine has no interface for, and a priority without a VLAN.
#[test]
fn tagged_frames_are_refused_unless_the_tag_is_only_a_priority() {
    let Some(lab) = Lab::new(1500) else { return };
    let forger = Forger::on(&lab);
    let mut wire = open(&lab, 1, false);
    let tagged = |psn, tci: u16| {
        let plain = frame(psn, |_, _, _| {});
        [&plain[..12], &[0x81, 0], &tci.to_be_bytes(), &plain[12..]].concat()
    };
    forger.send(&tagged(1, 100));
    forger.send(&tagged(2, 5 << 13));
    forger.send(&frame(3, |_, _, _| {}));
    assert_eq!(psns(&receive_until(&mut wire, 3)), [2, 3]);
    assert_eq!(wire.counters().rx.foreign, 1, "{:?}", wire.counters());
}

/// Whoever is in a VLAN reaches the interface of that VLAN, and not the one below it.
#[test]
fn a_vlan_has_a_wire_of_its_own() {
    let Some(lab) = Lab::new(1500) else { return };
    let tagged = |side: usize| IpAddr::from([10, 79, 1, side as u8 + 1]);
    for (side, name) in lab.names.iter().enumerate() {
        let made = ip(&format!("-n {name} link add link v0 name v0.100 type vlan id 100"))
            && ip(&format!("-n {name} addr add {}/24 dev v0.100", tagged(side)))
            && ip(&format!("-n {name} link set v0.100 up"));
        if !made {
            return skip::note("roce_v1::a_vlan_has_a_wire_of_its_own", "no VLANs in this kernel");
        }
    }
    let on_vlan = |side| {
        lab.on(side, || {
            let mut wire = RoceV1Wire::open(tagged(side)).expect("root");
            wire.resolve(tagged(1 - side), RESOLVE_LIMIT).expect("the peer answers");
            wire
        })
    };
    let (mut a, mut b) = (on_vlan(0), on_vlan(1));
    let mut below = open(&lab, 1, false);
    send_one(&mut a, tagged(1), 1, b"text");
    receive_until(&mut b, 1);
    // The same, but for the address of the interface below.
    let forged = frame(2, |_, _, _| {});
    let in_vlan = [&forged[..12], &[0x81, 0, 0, 100], &forged[12..]].concat();
    let unknown = [&forged[..12], &[0x81, 0, 0, 101], &forged[12..]].concat();
    let forger = Forger::on(&lab);
    forger.send(&in_vlan);
    forger.send(&unknown);
    forger.send(&frame(3, |_, _, _| {}));
    assert_eq!(psns(&receive_until(&mut below, 3)), [3]);
    assert_eq!(below.counters().rx.foreign, 3, "{:?}", below.counters());
}

/// The 40 bytes in front of a received datagram are the header that arrived.
#[test]
fn a_datagram_begins_with_its_grh() {
    const QKEY: u32 = 7;
    let Some(lab) = Lab::new(1500) else { return };
    let mut sides = [0, 1].map(|side| {
        let mut pool = Pool::new(1 << 16).expect("memory");
        let config = EndpointConfig { seed: side as u64 + 1, ..EndpointConfig::default() };
        let mut endpoint = Endpoint::new(config);
        let pd = endpoint.alloc_pd();
        let cq = endpoint.create_cq(8).expect("room");
        let region = endpoint.register(pd, pool.base(), pool.len(), Access::ALL).expect("room");
        let config = QpConfig { transport: Transport::Ud, ..QpConfig::rc(pd, cq, 4, 4) };
        let qpn = endpoint.create_qp(config).expect("room");
        let psn = Psn::new(side as u32);
        device::start_datagrams(&mut endpoint, clock::now(), qpn, QKEY, psn).expect("new");
        pool.bytes_mut(region.addr, 64).fill(0x55);
        (endpoint, resolved(&lab, side, false), pool, pd, cq, region, qpn)
    });
    let [
        (from, from_wire, from_pool, pd, _, region, sender),
        (to, to_wire, to_pool, _, cq, into, qpn),
    ] = &mut sides;
    let sge = |region: &MemoryRegion, len| {
        SgList::from_iter([Sge { addr: region.addr, len, lkey: region.lkey }])
    };
    let receive = RecvWr { wr_id: 1, sges: sge(into, 104) };
    to.post_recv(clock::now(), *qpn, receive).expect("room");
    let path = Path { dscp: 46, hop_limit: 7, ..Path::new((address(1, false), 4791).into()) };
    let ah = from.create_ah(*pd, &path).expect("room");
    let datagram = Datagram { ah, dest_qp: *qpn, qkey: QKEY };
    let wr = SendWr { to: Some(datagram), sges: sge(region, 64), ..SendWr::default() };
    from.post_send(clock::now(), *sender, wr).expect("room");
    let deadline = clock::now() + LIMIT;
    while to.poll_cq(*cq).is_none() {
        assert!(clock::now() < deadline, "{:?}", to_wire.counters());
        world::turn(from, from_wire, from_pool, clock::now(), |_, _| false);
        world::turn(to, to_wire, to_pool, clock::now(), |_, _| false);
    }
    let [sgid, dgid] = [0, 1].map(|side| gid_of(address(side, false)));
    let sent = Grh { traffic_class: 46 << 2, flow_label: 0, hop_limit: 7, sgid, dgid };
    let bth_deth_icrc = 12 + 8 + 4;
    assert_eq!(to_pool.bytes(into.addr, 40), sent.encode(bth_deth_icrc + 64));
    assert_eq!(to_pool.bytes(into.addr + 40, 64), [0x55; 64]);
}

/// Byte patterns from a fixed seed, half of them with a good beginning.
#[test]
fn random_frames_never_pass() {
    let Some(lab) = Lab::new(1500) else { return };
    let forger = Forger::on(&lab);
    let mut wire = open(&lab, 1, false);
    let good = frame(1, |_, _, _| {});
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize
    };
    for _ in 0..20 {
        for _ in 0..100 {
            let keep = 14 + random() % 100;
            let mut bytes: Vec<u8> = good.iter().copied().take(keep).collect();
            bytes.resize(14 + random() % 300, random() as u8);
            bytes[..14].copy_from_slice(&good[..14]);
            // Whatever follows a packet is no part of it.
            if !bytes.starts_with(&good) {
                forger.send(&bytes);
            }
        }
        let before = wire.counters().rx.packets;
        while wire.receive(clock::now(), &mut |frame| panic!("{frame:?}")) > 0 {}
        assert!(wire.counters().rx.packets > before);
    }
}

#[test]
fn a_capture_has_whole_frames() {
    let Some(lab) = Lab::new(1500) else { return };
    let file = |side| {
        let name = format!("roce_v1-{}-{side}.pcap", std::process::id());
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
    };
    let captured = |side| {
        let mut wire = resolved(&lab, side, false);
        let capture = Capture::create_for(Link::Ethernet, &file(side), 64 << 20).expect("writable");
        wire.capture_to(Some(capture));
        wire
    };
    let mut a = Host::new(captured(0), 0, 0);
    let mut b = Host::new(captured(1), 1, 0);
    transfer(&mut a, &mut b, false, Mtu::M1024);
    let sent: u64 = [&a, &b].map(|host| host.wire.inner().counters().tx.packets).iter().sum();
    drop((a, b));
    let bytes = fs::read(file(0)).expect("just written");
    let report = capture::check(&bytes);
    assert!(report.is_clean() && report.roce == report.packets, "{report}");
    assert!(report.by_opcode.keys().all(|(network, _)| *network == NetworkType::RoceV1));
    assert!(report.roce > 1000 && report.roce <= sent, "{report}");
    let tshark = Command::new("tshark")
        .args(["-Y", "infiniband.bth", "-T", "fields", "-e", "infiniband.bth.psn", "-r"])
        .arg(file(0))
        .stderr(Stdio::null())
        .output();
    [0, 1].into_iter().for_each(|side| fs::remove_file(file(side)).expect("ours"));
    let Ok(tshark) = tshark else {
        return skip::note("roce_v1::a_capture_has_whole_frames", "tshark is not installed");
    };
    let records = capture::Capture::parse(&bytes).expect("checked").records();
    let own: Vec<String> = records
        .map(|record| Frame::parse(record.expect("checked").bytes).expect("checked"))
        .map(|frame| frame.packet.headers.bth().psn.get().to_string())
        .collect();
    assert_eq!(String::from_utf8_lossy(&tshark.stdout).lines().collect::<Vec<_>>(), own);
}

/// An IP capture keeps out frames that it could not describe.
#[test]
fn a_capture_of_ip_packets_leaves_frames_out() {
    let Some(lab) = Lab::new(1500) else { return };
    let name = format!("roce_v1-{}-ip.pcap", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut wire = resolved(&lab, 0, false);
    wire.capture_to(Some(Capture::create(&path, 1 << 20).expect("writable")));
    send_one(&mut wire, address(1, false), 1, b"text");
    wire.capture_to(None);
    let report = capture::check(&fs::read(&path).expect("written"));
    fs::remove_file(&path).expect("ours");
    assert_eq!((wire.counters().tx.packets, report.packets, report.damage), (1, 0, None));
}

#[test]
fn a_peer_that_does_not_answer_is_an_error_within_the_limit() {
    let Some(lab) = Lab::unresolved(1500) else { return };
    let mut wire = open(&lab, 0, false);
    let nobody = IpAddr::from([10, 79, 0, 77]);
    let start = clock::now();
    let error = wire.resolve(nobody, Duration::from_millis(200)).expect_err("nobody has it");
    let waited = clock::now().since(start);
    assert!((200..2000).contains(&(waited.as_nanos() / 1_000_000)), "{waited:?}");
    assert!(matches!(error, RoceV1Error::Silent { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.starts_with("10.79.0.77 does not answer on v0: no Ethernet address after 2"),
        "{text}"
    );
    assert!(error.hint().is_some());
    // Packets to it are dropped and counted, not queued.
    send_one(&mut wire, nobody, 1, b"text");
    assert_eq!((wire.counters().tx_unresolved, wire.counters().tx.packets), (1, 0));
}

#[test]
fn peers_that_no_frame_reaches_are_refused_with_the_reason() {
    let Some(lab) = Lab::new(1500) else { return };
    let name = &lab.names[0];
    assert!(ip(&format!("-n {name} route add 10.80.0.0/16 via 10.79.0.2")));
    let mut wire = open(&lab, 0, false);
    let mut why = |peer: IpAddr| wire.resolve(peer, RESOLVE_LIMIT).expect_err("no way");
    let own = why(address(0, false));
    assert!(matches!(own, RoceV1Error::ThisMachine(_)), "{own:?}");
    let routed = why([10, 80, 0, 1].into());
    assert!(matches!(routed, RoceV1Error::Routed { router, .. } if router == address(1, false)));
    let elsewhere = why([192, 0, 2, 1].into());
    assert!(matches!(elsewhere, RoceV1Error::Elsewhere { .. }), "{elsewhere:?}");
    let family = why(address(1, true));
    assert!(matches!(family, RoceV1Error::Family { .. }), "{family:?}");
    assert!([own, routed, elsewhere, family].iter().all(|error| error.hint().is_some()));
    send_one(&mut wire, address(1, true), 1, b"text");
    assert_eq!(wire.counters().tx.dropped.family, 1);
}

#[test]
fn addresses_without_an_ethernet_interface_are_refused() {
    for ip in ["127.0.0.1", "::1", "192.0.2.1", "0.0.0.0"] {
        let error = RoceV1Wire::open(ip.parse().expect("literal")).expect_err("no Ethernet");
        assert!(matches!(error, RoceV1Error::NoInterface(_)), "{error:?}");
        assert!(error.hint().is_some_and(|hint| hint.contains("loopback")));
    }
    let Some(lab) = Lab::new(1500) else { return };
    assert!(ip(&format!("-n {} link set v0 down", lab.names[0])));
    let down = lab.on(0, || RoceV1Wire::open(address(0, false))).expect_err("down");
    assert!(matches!(down, RoceV1Error::Down(_)), "{down:?}");
}

/// Frames are lost while it is down, and pass again afterwards without a new socket.
#[test]
fn an_interface_that_goes_down_and_up_again_is_used_again() {
    let Some(lab) = Lab::new(1500) else { return };
    let (mut a, mut b) = (resolved(&lab, 0, false), resolved(&lab, 1, false));
    let link = |state: &str| assert!(ip(&format!("-n {} link set v0 {state}", lab.names[0])));
    let neighbour = "neigh replace 10.79.0.2 lladdr 02:00:00:00:79:02 dev v0 nud permanent";
    send_one(&mut a, address(1, false), 1, b"text");
    link("down");
    send_one(&mut a, address(1, false), 2, b"text");
    a.receive(clock::now(), &mut |_| {});
    assert_eq!((a.counters().tx.dropped.refused, a.gone()), (1, None), "{:?}", a.counters());
    assert_eq!(a.counters().tx.dropped.last_errno, libc::ENETDOWN);
    link("up");
    // The kernel forgets local peers when an interface goes down.
    assert!(ip(&format!("-n {} {neighbour}", lab.names[0])));
    let deadline = clock::now() + LIMIT;
    let mut seen = Vec::new();
    while !seen.contains(&3) {
        assert!(clock::now() < deadline, "{seen:?} {:?} {:?}", a.counters(), b.counters());
        send_one(&mut a, address(1, false), 3, b"text");
        b.receive(clock::now(), &mut |frame| seen.push(frame.headers.bth().psn.get()));
        thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!((seen[0], seen.contains(&2)), (1, false));
}

/// A sleeping side is woken, and told that its device is gone.
#[test]
fn an_interface_that_disappears_ends_the_device() {
    let Some(lab) = Lab::new(1500) else { return };
    let wire = resolved(&lab, 1, false);
    let mut device = Software::on(wire, 1 << 16, 0, 1).expect("memory");
    let watched = ReadySet::new().expect("descriptors");
    device.watch(&watched).expect("a socket");
    let mut turn = || device.turn(clock::now(), |_, _| false);
    turn();
    assert!(ip(&format!("-n {} link del v0", lab.names[0])), "both ends of the pair");
    let mut ready = rustix::event::PollFd::new(&watched, rustix::event::PollFlags::IN);
    let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
    let woken = rustix::event::poll(std::slice::from_mut(&mut ready), Some(&limit));
    assert_eq!(woken, Ok(1), "the removal wakes a sleeper");
    turn();
    let trouble = device.poll_trouble();
    let Some(Trouble::Gone(why)) = trouble else { panic!("{trouble:?}") };
    assert_eq!(why, "the interface v0 was removed");
    assert_eq!(device.poll_trouble(), None, "once");
}

/// The right is needed to open the socket, not to use it. Only this thread loses it.
#[test]
fn a_process_may_drop_its_privileges_afterwards() {
    let Some(lab) = Lab::unresolved(1500) else { return };
    let (a, b) = (open(&lab, 0, false), open(&lab, 1, false));
    const NOBODY: libc::c_long = 65_534;
    let unprivileged = move || {
        // SAFETY: the system call takes three numbers, and changes only the credentials of this
        // thread.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(rc, 0);
        let refused = RoceV1Wire::open(address(0, false));
        // This namespace has no such address; a socket would be refused, too.
        assert!(matches!(refused, Err(RoceV1Error::NoInterface(_))), "{refused:?}");
        let wires = [(a, 1), (b, 0)].map(|(mut wire, peer)| {
            wire.resolve(address(peer, false), RESOLVE_LIMIT).expect("the peer answers");
            wire
        });
        let [mut a, mut b] = wires.map(|wire| {
            let side = usize::from(wire.local().ip() == address(1, false));
            Host::new(wire, side, 0)
        });
        transfer(&mut a, &mut b, false, Mtu::M1024);
    };
    thread::scope(|scope| scope.spawn(unprivileged).join().expect("it works without"));
    let forbidden = lab.on(0, || {
        // SAFETY: as above.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(rc, 0);
        RoceV1Wire::open(address(0, false))
    });
    let forbidden = forbidden.expect_err("no right");
    assert!(matches!(forbidden, RoceV1Error::Forbidden(_)), "{forbidden:?}");
    assert_eq!(forbidden.hint(), Some("run as root, or with CAP_NET_RAW"));
}

/// A frame longer than the link carries is refused by the kernel and counted.
#[test]
fn packets_that_do_not_fit_the_link_are_counted() {
    let Some(lab) = Lab::new(1500) else { return };
    let mut wire = resolved(&lab, 0, false);
    assert_eq!(wire.payload_limit(), 1500 - 40 - 44);
    send_one(&mut wire, address(1, false), 1, &[7; 2048]);
    send_one(&mut wire, address(1, false), 2, &[7; 1024]);
    let tx = wire.counters().tx;
    assert_eq!((tx.packets, tx.dropped.too_long), (1, 1), "{tx:?}");
}
