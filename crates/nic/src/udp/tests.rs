//! Two wires on loopback, and packets that a hostile or merely different peer may send.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use roce::endpoint::Placement;
use roce::verbs::Qpn;
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, icrc};
use roce::world::{AtomicOp, Ecn, Memory, MemoryKind, NoMemory, Path, Payload, Telemetry};

use super::message::Arrival;
use super::*;
use crate::clock;
use crate::waiter::Waiter;

/// Seeded, so that a failing seed can be replayed.
struct Random(Pcg64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(Pcg64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

fn wire_at(local: &str) -> UdpWire {
    let local = local.parse().expect("literal");
    UdpWire::bind(&UdpConfig::at(local)).expect("loopback can be bound")
}

fn pair(v6: bool) -> (UdpWire, UdpWire) {
    if v6 {
        (wire_at("[::1]:0"), wire_at("[::1]:0"))
    } else {
        (wire_at("127.9.1.1:0"), wire_at("127.9.1.2:0"))
    }
}

fn path_to(wire: &UdpWire) -> Path {
    Path { dscp: 26, ..Path::new(wire.local()) }
}

/// A WRITE packet.
fn frame(path: Path, psn: u32, payload: &[u8]) -> TxFrame<'_> {
    let pad = (4 - payload.len() % 4) as u8 % 4;
    let bth = Bth {
        opcode: Opcode::RcWriteMiddle,
        solicited: false,
        mig_req: false,
        pad,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: false,
        dest_qp: Qpn::new(17),
        ack_req: false,
        psn: Psn::new(psn),
    };
    let header = Headers::new(bth, Ext::None).expect("legal").emit();
    TxFrame { path, header, payload: Payload::Bytes(payload), pad, telemetry: Telemetry::None }
}

fn frames<'a>(path: Path, payloads: &'a [Vec<u8>]) -> Vec<TxFrame<'a>> {
    let make = |(i, payload): (usize, &'a Vec<u8>)| frame(path, i as u32, payload);
    payloads.iter().enumerate().map(make).collect()
}

/// Packets that arrive until `wanted` have been seen (good or bad), or nothing comes for 2 s.
fn collect(wire: &mut UdpWire, wanted: u64) -> Vec<(u32, Ecn, Vec<u8>)> {
    let waiter = Waiter::new().expect("eventfd");
    let mut seen = Vec::new();
    let last = wire.counters.rx.packets + wanted;
    while wire.counters.rx.packets < last {
        let before = wire.counters.rx.packets;
        wire.receive(clock::now(), &mut |frame| {
            seen.push((frame.headers.bth().psn.get(), frame.origin.ecn, frame.payload.to_vec()));
        });
        if wire.counters.rx.packets == before {
            let patience = Some(Duration::from_millis(2_000));
            if waiter.wait(&[wire.fd()], patience).expect("poll").ready == 0 {
                break;
            }
        }
    }
    seen
}

fn assert_arrived(seen: &[(u32, Ecn, Vec<u8>)], payloads: &[Vec<u8>], context: &str) {
    assert_eq!(seen.len(), payloads.len(), "{context}");
    for (i, (psn, ecn, payload)) in seen.iter().enumerate() {
        assert_eq!((*psn as usize, *ecn), (i, Ecn::Ect0), "{context}");
        assert!(payload == &payloads[i], "{context}: payload {i} differs");
    }
}

/// A mix of runs of equal length (which become segmented sends) and stragglers.
fn draw_payloads(random: &mut Random) -> Vec<Vec<u8>> {
    let sizes = [0, 1, 3, 4, 8, 63, 256, 1023, 1024, 4096, 4096, 9001];
    let mut payloads = Vec::new();
    for _ in 0..1 + random.below(6) {
        let size = sizes[random.below(sizes.len())];
        let run = 1 + random.below(24);
        payloads.extend((0..run).map(|_| random.bytes(size)));
    }
    payloads
}

#[test]
fn bursts_of_every_shape_arrive_in_order() {
    for seed in 0..24 {
        let v6 = seed % 2 == 1;
        let context = format!("replay: seed {seed}, v6 {v6}");
        let (mut a, mut b) = pair(v6);
        let payloads = draw_payloads(&mut Random::new(seed));
        a.send(clock::now(), &frames(path_to(&b), &payloads), &NoMemory);
        let seen = collect(&mut b, payloads.len() as u64);
        assert_arrived(&seen, &payloads, &context);
        assert_eq!(a.counters.tx.bytes, b.counters.rx.bytes, "{context}");
        assert_eq!(a.counters.tx.dropped.total(), 0, "{context}");
        assert_eq!(b.counters.rx.unexpected_ip_ids, 0, "{context}");
    }
}

/// Bytes at addresses from 0 on.
struct Ground(Vec<u8>);

impl Memory for Ground {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[addr as usize..][..into.len()]);
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        self.0[addr as usize..][..from.len()].copy_from_slice(from);
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        op.apply_to(&mut self.0[addr as usize..][..8])
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

#[test]
fn payload_is_gathered_piece_by_piece() {
    let (mut a, mut b) = pair(false);
    let memory = Ground((0..9000_u32).map(|i| ((i * 7) >> 3) as u8).collect());
    let lists: [&[(u64, u32)]; 4] =
        [&[(8000, 1000)], &[(10, 1), (3, 2), (400, 997)], &[(0, 3), (5000, 997)], &[(77, 2)]];
    let piece = |&(addr, len)| Placement { addr, len };
    let mut frames = Vec::new();
    for (psn, list) in (0..).zip(lists) {
        let len: u32 = list.iter().map(|(_, len)| len).sum();
        let payload = Payload::Gather(list.iter().map(piece).collect());
        frames.push(TxFrame { payload, ..frame(path_to(&b), psn, &[0; 1000][..len as usize]) });
    }
    a.send(clock::now(), &frames, &memory);
    let seen = collect(&mut b, 4);
    for (list, (.., payload)) in lists.iter().zip(seen) {
        let expected: Vec<u8> = list
            .iter()
            .flat_map(|&(addr, len)| &memory.0[addr as usize..][..len as usize])
            .copied()
            .collect();
        assert_eq!(payload, expected);
    }
}

#[test]
fn equal_frames_leave_in_segmented_sends_and_arrive_joined() {
    for v6 in [false, true] {
        let (mut a, mut b) = pair(v6);
        let payloads = vec![vec![0xa5; 4096]; 64];
        a.send(clock::now(), &frames(path_to(&b), &payloads), &NoMemory);
        assert_arrived(&collect(&mut b, 64), &payloads, "64 x 4096");
        assert_eq!(a.why_no_gso(), None);
        let tx = a.counters.tx;
        assert_eq!((tx.packets, tx.bytes), (64, 64 * 4112));
        assert_eq!(tx.gso_batches, 5, "15 packets of 4112 bytes fit a send");
        assert_eq!(tx.syscalls, 2, "three of these fit the staging buffer");
        assert_eq!(b.counters.rx.gro_batches, 5);
    }
}

#[test]
fn small_frames_leave_in_sends_of_64() {
    let (mut a, mut b) = pair(false);
    let payloads = vec![vec![7; 8]; 64];
    a.send(clock::now(), &frames(path_to(&b), &payloads), &NoMemory);
    assert_arrived(&collect(&mut b, 64), &payloads, "64 x 8");
    assert_eq!(a.counters.tx.gso_batches, 1);
}

#[test]
fn frames_for_several_peers_share_a_call() {
    let (mut a, mut b) = pair(false);
    let mut c = wire_at("127.9.1.3:0");
    let payload = [1, 2, 3, 4];
    let burst: Vec<_> =
        (0..20).map(|i| frame(path_to(if i % 3 == 0 { &b } else { &c }), i, &payload)).collect();
    a.send(clock::now(), &burst, &NoMemory);
    assert_eq!(collect(&mut b, 7).len(), 7);
    assert_eq!(collect(&mut c, 13).len(), 13);
    assert_eq!(a.counters.tx.syscalls, 1);
}

#[test]
fn without_segmentation_packets_go_one_by_one_and_the_reason_is_kept() {
    let (mut a, mut b) = pair(false);
    // A socket that sends no UDP checksums cannot segment: the kernel returns EINVAL, as an old one
    // does.
    socket::set(&a.socket.fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).expect("SO_NO_CHECK");
    let payloads = draw_payloads(&mut Random::new(5));
    assert!(payloads.len() > 20);
    a.send(clock::now(), &frames(path_to(&b), &payloads), &NoMemory);
    assert_arrived(&collect(&mut b, payloads.len() as u64), &payloads, "fallback");
    let why = a.why_no_gso().expect("a reason").to_owned();
    assert!(why.contains("UDP_SEGMENT"), "{why}");
    assert!(a.to_string().contains("single sends"), "{a}");
    assert_eq!(a.counters.tx.gso_batches, 0);
    assert_eq!(a.counters.tx.packets, payloads.len() as u64);
    assert_eq!(b.counters.rx.unexpected_ip_ids, 0, "the ICRCs were computed anew");
}

#[test]
fn both_offloads_can_be_turned_off() {
    let (mut plain, mut joined) = (None, None);
    for gso in [true, false] {
        let config = |local: &str| UdpConfig {
            gso,
            gro: false,
            ..UdpConfig::at(local.parse().expect("literal"))
        };
        let mut a = UdpWire::bind(&config("127.9.1.4:0")).expect("bind");
        let mut b = UdpWire::bind(&config("127.9.1.5:0")).expect("bind");
        let payloads = vec![vec![9; 1024]; 40];
        a.send(clock::now(), &frames(path_to(&b), &payloads), &NoMemory);
        assert_arrived(&collect(&mut b, 40), &payloads, "no joining");
        assert_eq!(b.counters.rx.gro_batches, 0);
        assert!(b.why_no_gro().is_some());
        let slot = if gso { &mut joined } else { &mut plain };
        *slot = Some((a.counters.tx.gso_batches, b.counters.rx.unexpected_ip_ids));
    }
    assert_eq!(plain, Some((0, 0)));
    // Cut by the kernel into single datagrams, the packets keep the identifications 0 to 39 of
    // their places in the send, of which the receiver can only expect the first.
    assert_eq!(joined, Some((1, 39)));
}

#[test]
fn marks_are_seen_by_the_receiver() {
    for v6 in [false, true] {
        let (mut a, mut b) = pair(v6);
        for (ecn, bits) in [(Ecn::NotEct, 0), (Ecn::Ect1, 1), (Ecn::Ect0, 2), (Ecn::Ce, 3)] {
            for dscp in [0u8, 26, 63] {
                let path = Path { ecn, dscp, ..path_to(&b) };
                a.send(clock::now(), &[frame(path, 3, &[])], &NoMemory);
                assert_eq!(collect(&mut b, 1), [(3, ecn, vec![])]);
                // SAFETY: the receiver's control bytes are as the last receive left them.
                let arrival = unsafe { Arrival::decode(&b.receiver.messages[0].msg_hdr) };
                assert_eq!(arrival.tos, dscp << 2 | bits);
            }
        }
    }
}

#[test]
fn packets_too_long_or_for_the_other_ip_version_are_dropped_and_counted() {
    let (mut a, mut b) = pair(false);
    let (huge, fine) = (vec![0; 65_508], vec![1; 100]);
    let foreign = Path { remote: "[::1]:9".parse().expect("literal"), ..path_to(&b) };
    let path = path_to(&b);
    a.send(
        clock::now(),
        &[
            frame(path, 0, &huge),
            frame(path, 1, &fine),
            frame(foreign, 2, &fine),
            frame(foreign, 3, &fine),
            frame(path, 4, &fine),
        ],
        &NoMemory,
    );
    let psns: Vec<u32> = collect(&mut b, 2).iter().map(|(psn, ..)| *psn).collect();
    assert_eq!(psns, [1, 4]);
    let dropped = a.counters.tx.dropped;
    assert_eq!((dropped.too_long, dropped.family, dropped.total()), (1, 2, 3));
    assert_eq!(a.why_no_gso(), None, "a long packet is no reason against segmentation");
}

#[test]
fn what_a_slow_receiver_missed_is_known() {
    for v6 in [false, true] {
        let (mut a, _) = pair(v6);
        let mut config = UdpConfig::at(a.local());
        config.local.set_port(0);
        config.socket_buffer_bytes = 256 << 10;
        let mut b = UdpWire::bind(&config).expect("bind");
        let payloads = vec![vec![1; 4096]; 60];
        let burst = frames(path_to(&b), &payloads);
        assert_eq!(b.overrun(), Some(0));
        (0..10).for_each(|_| a.send(clock::now(), &burst, &NoMemory));
        while b.receive(clock::now(), &mut |_| {}) > 0 {}
        let missed = a.counters.tx.packets - b.counters.rx.packets;
        let overrun = u64::from(b.overrun().expect("a count"));
        // The kernel counts a joined run of 15 packets as one or as many.
        let plausible = overrun > 0 && overrun <= missed && missed <= overrun * 15;
        assert!(plausible, "v6 {v6}: {overrun} of {missed} missed");
    }
}

#[test]
fn an_unreachable_peer_is_counted() {
    let (mut a, _b) = pair(false);
    let path = Path { remote: "255.255.255.255:9".parse().expect("literal"), ..path_to(&a) };
    a.send(clock::now(), &[frame(path, 0, &[])], &NoMemory);
    assert_eq!(a.counters.tx.dropped.refused, 1);
    assert_ne!(a.counters.tx.dropped.last_errno, 0);
}

#[test]
fn wires_that_cannot_be_are_refused_with_a_hint() {
    for wildcard in ["0.0.0.0:4791", "[::]:4791", "224.0.0.1:4791"] {
        let error = UdpWire::bind(&UdpConfig::at(wildcard.parse().expect("literal")));
        let error = error.expect_err("not a specific address");
        assert!(error.hint().is_some() && error.to_string().contains(wildcard), "{error}");
    }
    let taken = wire_at("127.9.1.6:0");
    let error = UdpWire::bind(&UdpConfig::at(taken.local())).expect_err("taken");
    assert!(error.hint().expect("a hint").contains("another process"), "{error}");
    let error = UdpWire::bind(&UdpConfig::at("192.0.2.1:0".parse().expect("literal")));
    let hint = error.expect_err("foreign").hint().expect("a hint");
    assert!(hint.contains("address of this machine"), "{hint}");
}

#[test]
fn several_addresses_share_the_roce_port() {
    let wires = ["127.9.77.1", "127.9.77.2", "127.9.77.3"];
    let wires = wires.map(|ip| UdpConfig::new(ip.parse().expect("literal")));
    let bound: Vec<_> = wires.iter().map(|config| UdpWire::bind(config).expect("bind")).collect();
    assert!(bound.iter().all(|wire| wire.local().port() == ROCE_PORT));
}

/// A well-formed packet from `source` to `wire`, with the ICRC for identification `id`.
fn sealed(source: &UdpSocket, wire: &UdpWire, id: u16, payload: &[u8]) -> Vec<u8> {
    let frame = frame(path_to(wire), 5, payload);
    let mut packet = frame.header.to_vec();
    packet.extend_from_slice(payload);
    packet.resize(packet.len() + usize::from(frame.pad), 0);
    seal(source, wire, id, packet)
}

fn seal(source: &UdpSocket, wire: &UdpWire, id: u16, mut packet: Vec<u8>) -> Vec<u8> {
    packet.extend_from_slice(&[0; 4]);
    let from = source.local_addr().expect("bound");
    let pseudo = pseudo(from, wire.local(), id).expect("same family");
    if let Some(icrc) = icrc::compute(&pseudo, &packet) {
        let end = packet.len() - 4;
        packet[end..].copy_from_slice(&icrc);
    }
    packet
}

fn stranger(v6: bool) -> UdpSocket {
    UdpSocket::bind(if v6 { "[::1]:0" } else { "127.9.1.7:0" }).expect("bind")
}

#[test]
fn any_flipped_bit_is_noticed() {
    for v6 in [false, true] {
        let (mut wire, _) = pair(v6);
        let source = stranger(v6);
        let good = sealed(&source, &wire, 0, b"some payload");
        let bits = good.len() * 8;
        // Byte 4 of the BTH is changed by switches and not covered.
        let covered: Vec<usize> = (0..bits).filter(|bit| bit / 8 != 4).collect();
        for bit in &covered {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            source.send_to(&bad, wire.local()).expect("send");
        }
        assert_eq!(collect(&mut wire, covered.len() as u64), []);
        assert_eq!(wire.counters.rx.bad_icrc, covered.len() as u64);
        source.send_to(&good, wire.local()).expect("send");
        assert_eq!(collect(&mut wire, 1), [(5, Ecn::NotEct, b"some payload".to_vec())]);
    }
}

#[test]
fn a_corrupted_packet_passes_when_the_check_is_off() {
    let mut config = UdpConfig::at("127.9.1.8:0".parse().expect("literal"));
    config.check = IcrcCheck::Off;
    let mut wire = UdpWire::bind(&config).expect("bind");
    let source = stranger(false);
    let mut packet = sealed(&source, &wire, 0, b"1234");
    packet[12] ^= 1;
    source.send_to(&packet, wire.local()).expect("send");
    assert_eq!(collect(&mut wire, 1), [(5, Ecn::NotEct, b"0234".to_vec())]);
    assert_eq!(wire.counters.rx.bad_icrc, 0);
}

#[test]
fn a_peer_that_counts_identifications_is_understood() {
    let (mut wire, _) = pair(false);
    let source = stranger(false);
    for id in [0, 1, 0x1234, u16::MAX] {
        let packet = sealed(&source, &wire, id, b"x");
        source.send_to(&packet, wire.local()).expect("send");
    }
    assert_eq!(collect(&mut wire, 4).len(), 4);
    assert_eq!(wire.counters.rx.unexpected_ip_ids, 3);
}

/// Garbage of every length, bare and with a correct ICRC: all of it is counted, nothing panics, and
/// the wire works afterwards.
#[test]
fn garbage_is_counted_and_does_no_harm() {
    for seed in 0..6 {
        let v6 = seed % 2 == 1;
        let mut random = Random::new(1000 + seed);
        let (mut wire, _) = pair(v6);
        let source = stranger(v6);
        for _ in 0..300 {
            let len = random.below(80);
            let mut packet = random.bytes(len);
            if random.below(2) == 0 {
                packet = seal(&source, &wire, 0, packet);
            }
            source.send_to(&packet, wire.local()).expect("send");
        }
        let accepted = collect(&mut wire, 300).len() as u64;
        let rx = wire.counters.rx;
        assert_eq!(rx.packets, 300, "replay: seed {seed}");
        assert_eq!(rx.accepted, accepted, "replay: seed {seed}");
        let refused = rx.bad_icrc + rx.unparsable.total() + rx.truncated;
        assert_eq!(accepted + refused, 300, "replay: seed {seed}: {rx:?}");
        assert!(rx.bad_icrc > 50 && rx.unparsable.total() > 50, "replay: seed {seed}: {rx:?}");
        let good = sealed(&source, &wire, 0, b"still here");
        source.send_to(&good, wire.local()).expect("send");
        assert_eq!(collect(&mut wire, 1).len(), 1, "replay: seed {seed}");
    }
}

#[test]
fn a_wire_wakes_a_waiter() {
    let (mut a, b) = pair(false);
    let waiter = Waiter::new().expect("eventfd");
    let asleep = waiter.wait(&[b.fd()], Some(Duration::ZERO)).expect("poll");
    assert_eq!(asleep.ready, 0);
    a.send(clock::now(), &[frame(path_to(&b), 0, &[])], &NoMemory);
    assert_eq!(waiter.wait(&[b.socket.fd.as_fd()], None).expect("poll").ready, 1);
}

#[test]
fn groups_keep_to_the_limits_of_a_segmented_send() {
    let route = wire_at("127.9.1.9:0");
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let (b, c) = ("127.0.0.1:1", "127.0.0.1:2");
        let payloads = draw_payloads(&mut random);
        let path = |to: &str| Path::new(to.parse().expect("literal"));
        let burst: Vec<_> = (payloads.iter().enumerate())
            .map(|(i, payload)| {
                let to = if random.below(30) == 0 { c } else { b };
                frame(path(to), i as u32, payload)
            })
            .collect();
        let (mut groups, mut rest) = (Vec::new(), &burst[..]);
        while !rest.is_empty() {
            send::plan(&route.socket, rest, 64, &mut groups);
            let mut next = 0;
            for send::Group { frames, segment, .. } in &groups {
                let group = &rest[frames.clone()];
                assert_eq!(frames.start, next, "replay: seed {seed}");
                next = frames.end;
                let bytes: usize = group.iter().map(TxFrame::udp_payload_len).sum();
                assert!(group.len() <= 64 && (bytes <= 65_507 || group.len() == 1));
                assert!(group.iter().all(|frame| frame.path == group[0].path));
                let (last, full) = group.split_last().expect("no empty group");
                assert!(full.iter().all(|frame| frame.udp_payload_len() == *segment));
                assert!(last.udp_payload_len() <= *segment, "replay: seed {seed}");
            }
            let bytes: usize = groups.iter().map(|group| group.bytes).sum();
            assert!(bytes <= (128 << 10) + 65_507 || groups.len() == 1, "replay: seed {seed}");
            assert!(next > 0, "replay: seed {seed}");
            rest = &rest[next..];
        }
    }
}
