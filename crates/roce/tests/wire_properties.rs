//! Properties of the packet codec, over fixed seeds: a failure is replayed by running the test
//! again.

use core::net::{Ipv4Addr, Ipv6Addr};
use std::fs;
use std::path::Path;

use proptest::array::{uniform4, uniform6, uniform16};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use roce::verbs::Qpn;
use roce::wire::capture::{Capture, CaptureError, Link, Reason, Writer, check};
use roce::wire::frame::{
    Ethernet, Frame, FrameError, Ip, Ipv4, Ipv6, Network, NotRoce, Packet, Udp, UdpChecksum,
};
use roce::wire::grh::{GRH_BYTES, Grh};
use roce::wire::icrc::{self, Icrc, Pseudo};
use roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Ext, ExtKind, Headers, Opcode, Psn, Reth, Sack,
    Sreth, Syndrome, WireError,
};

/// Fixed, because some properties fail for one packet in 2^16 or 2^32 by nature of a CRC.
fn config(seed: u64, cases: u32) -> ProptestConfig {
    let failure_persistence = None;
    ProptestConfig {
        cases,
        failure_persistence,
        rng_seed: RngSeed::Fixed(seed),
        ..Default::default()
    }
}

fn opcode() -> impl Strategy<Value = Opcode> {
    (0..Opcode::ALL.len()).prop_map(|i| Opcode::ALL[i])
}

prop_compose! {
    fn bth()(
        opcode in opcode(),
        flags in any::<[bool; 5]>(),
        pad in 0..4u8,
        pkey in any::<u16>(),
        dest_qp in any::<u32>(),
        psn in any::<u32>(),
    ) -> Bth {
        let [solicited, mig_req, fecn, becn, ack_req] = flags;
        let (dest_qp, psn) = (Qpn::new(dest_qp), Psn::new(psn));
        Bth { opcode, solicited, mig_req, pad, pkey, fecn, becn, dest_qp, ack_req, psn }
    }
}

fn syndrome() -> impl Strategy<Value = Syndrome> {
    any::<u8>().prop_filter_map("reserved", Syndrome::from_u8)
}

fn aeth() -> impl Strategy<Value = Aeth> {
    (syndrome(), 0..1u32 << 24).prop_map(|(syndrome, msn)| Aeth { syndrome, msn })
}

/// One value for every field that any extension header has.
#[derive(Clone, Debug)]
struct Fields {
    words: [u32; 4],
    longs: [u64; 3],
    aeth: Aeth,
}

fn fields() -> impl Strategy<Value = Fields> {
    (any::<[u32; 4]>(), any::<[u64; 3]>(), aeth()).prop_map(|(words, longs, aeth)| Fields {
        words,
        longs,
        aeth,
    })
}

fn ext(kind: ExtKind, fields: &Fields) -> Ext {
    let Fields { words: [rkey, len, imm, qkey], longs: [addr, swap_or_add, compare], aeth } =
        *fields;
    let reth = Reth { addr, rkey, len };
    let deth = Deth { qkey, src_qp: Qpn::new(len) };
    let sreth = Sreth { sequence: qkey >> 8, offset: len };
    let bits = u128::from(addr) << 64 | u128::from(compare);
    match kind {
        ExtKind::None => Ext::None,
        ExtKind::Imm => Ext::Imm(imm),
        ExtKind::Ieth => Ext::Ieth(rkey),
        ExtKind::Reth => Ext::Reth(reth),
        ExtKind::RethImm => Ext::RethImm(reth, imm),
        ExtKind::Aeth => Ext::Aeth(aeth),
        ExtKind::AtomicEth => Ext::AtomicEth(AtomicEth { addr, rkey, swap_or_add, compare }),
        ExtKind::AethAtomicAck => Ext::AethAtomicAck(aeth, AtomicAckEth { original: addr }),
        ExtKind::Deth => Ext::Deth(deth),
        ExtKind::DethImm => Ext::DethImm(deth, imm),
        ExtKind::Cnp => Ext::Cnp,
        ExtKind::Sreth => Ext::Sreth(sreth),
        ExtKind::SrethImm => Ext::SrethImm(sreth, imm),
        ExtKind::SrethIeth => Ext::SrethIeth(sreth, rkey),
        ExtKind::RethSreth => Ext::RethSreth(reth, sreth),
        ExtKind::RethSrethImm => Ext::RethSrethImm(reth, sreth, imm),
        ExtKind::AethSreth => Ext::AethSreth(aeth, sreth),
        ExtKind::AethSack => {
            let sack = Sack::new(imm, Psn::new(qkey), bits);
            Ext::AethSack(aeth, sack.followed(qkey >> 31 == 1))
        }
    }
}

/// Headers of any opcode with a payload that their pad count fits.
fn headers_and_payload() -> impl Strategy<Value = (Headers, Vec<u8>)> {
    (bth(), fields(), 1..80usize, any::<u8>()).prop_map(|(bth, fields, words, fill)| {
        let payload: Vec<u8> =
            (0..words * 4 - usize::from(bth.pad)).map(|i| fill.wrapping_add(i as u8)).collect();
        let headers = Headers::new(bth, ext(bth.opcode.ext_kind(), &fields));
        (headers.expect("legal by construction"), payload)
    })
}

/// BTH to ICRC, the ICRC still zero.
fn packet_bytes(headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut packet = headers.emit().to_vec();
    packet.extend(payload);
    packet.resize(packet.len() + usize::from(headers.bth().pad) + 4, 0);
    packet
}

fn pseudo_v4() -> impl Strategy<Value = Pseudo> {
    (uniform4(any::<u8>()), uniform4(any::<u8>()), any::<(u16, bool, u16)>()).prop_map(
        |(src, dst, (id, dont_fragment, src_port))| Pseudo::V4 {
            src: Ipv4Addr::from(src),
            dst: Ipv4Addr::from(dst),
            id,
            dont_fragment,
            src_port,
            dst_port: 4791,
        },
    )
}

fn pseudo_v6() -> impl Strategy<Value = Pseudo> {
    (uniform16(any::<u8>()), uniform16(any::<u8>()), any::<u16>()).prop_map(
        |(src, dst, src_port)| Pseudo::V6 {
            src: Ipv6Addr::from(src),
            dst: Ipv6Addr::from(dst),
            src_port,
            dst_port: 4791,
        },
    )
}

fn pseudo_grh() -> impl Strategy<Value = Pseudo> {
    (uniform16(any::<u8>()), uniform16(any::<u8>()))
        .prop_map(|(sgid, dgid)| Pseudo::Grh { sgid: sgid.into(), dgid: dgid.into() })
}

fn sealed(pseudo: &Pseudo, mut packet: Vec<u8>) -> Vec<u8> {
    let icrc = icrc::compute(pseudo, &packet).expect("longer than BTH and ICRC");
    let at = packet.len() - 4;
    packet[at..].copy_from_slice(&icrc);
    packet
}

fn with_id(pseudo: Pseudo, id: u16) -> Pseudo {
    match pseudo {
        Pseudo::V4 { src, dst, dont_fragment, src_port, dst_port, .. } => {
            Pseudo::V4 { src, dst, id, dont_fragment, src_port, dst_port }
        }
        v6 => v6,
    }
}

/// Parsed packets must be reproduced by the encoder.
fn assert_faithful(packet: &[u8]) {
    if let Ok((headers, payload)) = Headers::parse(packet) {
        let encoded = headers.emit();
        assert_eq!(encoded.as_slice(), &packet[..encoded.len()]);
        assert_eq!(encoded.len(), headers.encoded_len());
        let rest = payload.len() + usize::from(headers.bth().pad) + 4;
        assert_eq!(encoded.len() + rest, packet.len());
    }
}

proptest! {
    #![proptest_config(config(1, 2000))]

    #[test]
    fn headers_round_trip((headers, payload) in headers_and_payload()) {
        let packet = packet_bytes(&headers, &payload);
        prop_assert_eq!(Headers::parse(&packet), Ok((headers, payload.as_slice())));
    }

    #[test]
    fn arbitrary_bytes_are_parsed_faithfully_or_refused(packet in vec(any::<u8>(), 0..120)) {
        assert_faithful(&packet);
    }

    #[test]
    fn mutated_packets_are_parsed_faithfully_or_refused(
        (headers, payload) in headers_and_payload(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut packet = packet_bytes(&headers, &payload);
        for (at, value) in changes {
            let at = at.index(packet.len().min(48));
            packet[at] = value;
        }
        packet.truncate(if cut { keep.index(packet.len()) } else { packet.len() });
        assert_faithful(&packet);
    }

    #[test]
    fn one_flipped_bit_breaks_the_icrc(
        (headers, payload) in headers_and_payload(),
        pseudo in prop_oneof![pseudo_v4(), pseudo_v6(), pseudo_grh()],
        bit in any::<prop::sample::Index>(),
    ) {
        let mut packet = sealed(&pseudo, packet_bytes(&headers, &payload));
        prop_assert!(icrc::verify(&pseudo, &packet));
        let bit = bit.index(packet.len() * 8);
        packet[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(icrc::verify(&pseudo, &packet), bit / 8 == 4, "byte {}", bit / 8);
    }

    #[test]
    fn pieces_make_the_same_icrc(
        (headers, payload) in headers_and_payload(),
        pseudo in prop_oneof![pseudo_v4(), pseudo_v6(), pseudo_grh()],
        cut in any::<prop::sample::Index>(),
    ) {
        let packet = packet_bytes(&headers, &payload);
        let mut pieces = Icrc::new(&pseudo, packet.len());
        pieces.headers(&headers.emit());
        let (left, right) = payload.split_at(cut.index(payload.len() + 1));
        pieces.update(left);
        pieces.update(right);
        pieces.update(&[0; 3][..usize::from(headers.bth().pad)]);
        prop_assert_eq!(Some(pieces.finish()), icrc::compute(&pseudo, &packet));
    }

    #[test]
    fn any_identification_is_solved_for(
        (headers, payload) in headers_and_payload(),
        pseudo in pseudo_v4(),
        real in any::<u16>(),
    ) {
        let packet = sealed(&with_id(pseudo, real), packet_bytes(&headers, &payload));
        prop_assert_eq!(icrc::solve_id(&pseudo, &packet), Some(real));
        prop_assert_eq!(icrc::solve_id(&with_id(pseudo, real), &packet), Some(real));
    }

    #[test]
    fn no_identification_explains_a_corrupted_packet(
        (headers, payload) in headers_and_payload(),
        pseudo in pseudo_v4(),
        changes in vec((any::<prop::sample::Index>(), 1..=u8::MAX), 1..6),
    ) {
        let mut packet = sealed(&pseudo, packet_bytes(&headers, &payload));
        let original = packet.clone();
        for (at, flips) in changes {
            let at = at.index(packet.len());
            packet[at] ^= if at == 4 { 0 } else { flips };
        }
        let changed = packet != original;
        prop_assert_eq!(icrc::solve_id(&with_id(pseudo, 0), &packet).is_none(), changed);
    }
}

#[test]
fn every_other_extension_is_refused() {
    let aeth = Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 7 };
    let fields = Fields { words: [1, 2, 3, 4], longs: [5, 6, 7], aeth };
    for &opcode in Opcode::ALL {
        let bth = plain_bth(opcode);
        for &other in Opcode::ALL {
            let made = Headers::new(bth, ext(other.ext_kind(), &fields));
            assert_eq!(made.is_ok(), opcode.ext_kind() == other.ext_kind(), "{opcode} {other}");
        }
    }
}

fn plain_bth(opcode: Opcode) -> Bth {
    Bth {
        opcode,
        solicited: false,
        mig_req: false,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        dest_qp: Qpn::new(0x12),
        ack_req: false,
        psn: Psn::new(0x34_5678),
    }
}

#[test]
fn values_too_large_for_their_bits_are_refused() {
    let ack = |syndrome, msn| {
        Headers::new(plain_bth(Opcode::RcAcknowledge), Ext::Aeth(Aeth { syndrome, msn })).err()
    };
    let range = |field, value| Some(WireError::Range { field, value });
    assert_eq!(ack(Syndrome::SequenceError, 0xff_ffff), None);
    assert_eq!(ack(Syndrome::SequenceError, 1 << 24), range("message sequence number", 1 << 24));
    assert_eq!(ack(Syndrome::Ack { credits: 32 }, 0), range("credit count", 32));
    assert_eq!(ack(Syndrome::RnrNak { timer: 32 }, 0), range("RNR timer code", 32));
    let padded = Bth { pad: 4, ..plain_bth(Opcode::RcSendOnly) };
    assert_eq!(Headers::new(padded, Ext::None).err(), range("pad count", 4));
}

#[test]
fn refusals_give_the_reason() {
    let send = Headers::new(plain_bth(Opcode::RcSendOnly), Ext::None).expect("legal");
    let good = packet_bytes(&send, b"four");
    let refusal = |at: usize, value: u8| {
        let mut packet = good.clone();
        packet[at] = value;
        Headers::parse(&packet).err()
    };
    assert_eq!(refusal(0, 0x15), Some(WireError::UnknownOpcode(0x15)));
    assert_eq!(refusal(1, 0x05), Some(WireError::Version(5)));
    assert_eq!(refusal(0, 0x0c), Some(WireError::Truncated { have: 20, need: 32 }));
    assert_eq!(Headers::parse(&good[..11]), Err(WireError::Truncated { have: 11, need: 12 }));
    assert_eq!(Headers::parse(&good[..15]), Err(WireError::Truncated { have: 15, need: 16 }));
    assert_eq!(Headers::parse(&good[..19]), Err(WireError::Pad { pad: 0, len: 3 }));
    let mut padded = good[..16].to_vec();
    padded[1] = 0x30;
    assert_eq!(Headers::parse(&padded), Err(WireError::Pad { pad: 3, len: 0 }));

    let nak = Aeth { syndrome: Syndrome::RemoteOperation, msn: 0 };
    let nak = Headers::new(plain_bth(Opcode::RcAcknowledge), Ext::Aeth(nak)).expect("legal");
    for reserved in [0x40, 0x5f, 0x65, 0x7f, 0x80, 0xff] {
        let mut packet = packet_bytes(&nak, b"");
        packet[12] = reserved;
        assert_eq!(Headers::parse(&packet), Err(WireError::Syndrome(reserved)));
    }
    let cnp = Headers::new(plain_bth(Opcode::Cnp), Ext::Cnp).expect("legal");
    let mut packet = packet_bytes(&cnp, b"");
    assert_eq!(packet.len(), 32);
    packet[27] = 1;
    assert_eq!(Headers::parse(&packet), Err(WireError::Reserved("the CNP payload")));
}

#[test]
fn ignored_bits_are_carried_along() {
    let deth = Deth { qkey: 1, src_qp: Qpn::new(2) };
    let headers = Headers::new(plain_bth(Opcode::UdSendOnly), Ext::Deth(deth)).expect("legal");
    assert!(!headers.has_ignored_bits());
    for (at, bits) in [(4, 0x3f), (8, 0x7f), (16, 0xff)] {
        let mut packet = packet_bytes(&headers, b"four");
        packet[at] |= bits;
        let (odd, _) = Headers::parse(&packet).expect("receivers ignore these bits");
        assert!(odd.has_ignored_bits());
        assert_eq!((odd.bth(), odd.ext()), (headers.bth(), headers.ext()));
        assert_eq!(odd.emit().as_slice(), &packet[..20]);
    }
}

// Whole frames.

prop_compose! {
    fn ip()(
        v4 in any::<bool>(),
        bytes in any::<[u8; 2]>(),
        id in any::<u16>(),
        dont_fragment in any::<bool>(),
        flow_label in 0..1u32 << 20,
        src in uniform16(any::<u8>()),
        dst in uniform16(any::<u8>()),
    ) -> Ip {
        let ([tos, ttl], [a, b, c, d, ..]) = (bytes, src);
        let [e, f, g, h, ..] = dst;
        if v4 {
            let (src, dst) = (Ipv4Addr::new(a, b, c, d), Ipv4Addr::new(e, f, g, h));
            Ip::V4(Ipv4 { tos, id, dont_fragment, ttl, src, dst })
        } else {
            let (src, dst) = (Ipv6Addr::from(src), Ipv6Addr::from(dst));
            Ip::V6(Ipv6 { traffic_class: tos, flow_label, hop_limit: ttl, src, dst })
        }
    }
}

prop_compose! {
    fn grh()(
        bytes in any::<[u8; 2]>(),
        flow_label in 0..1u32 << 20,
        sgid in uniform16(any::<u8>()),
        dgid in uniform16(any::<u8>()),
    ) -> Grh {
        let [traffic_class, hop_limit] = bytes;
        Grh { traffic_class, flow_label, hop_limit, sgid: sgid.into(), dgid: dgid.into() }
    }
}

fn network() -> impl Strategy<Value = Network> {
    let udp = Udp { src_port: 0xc123, dst_port: 4791, checksum: 0 };
    prop_oneof![
        2 => ip().prop_map(move |ip| Network::Udp(ip, udp)),
        1 => grh().prop_map(Network::Grh),
    ]
}

fn packet(network: Network, headers: Headers, payload: &[u8]) -> Packet<'_> {
    let packet = Packet { network, headers, payload, pad: [0; 3], icrc: [0; 4] };
    Packet { icrc: packet.computed_icrc(), ..packet }
}

fn emitted(frame: &Frame<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    frame.emit(&mut out).expect("short enough");
    out
}

proptest! {
    #![proptest_config(config(2, 1000))]

    #[test]
    fn frames_round_trip(
        network in network(),
        (headers, payload) in headers_and_payload(),
        addresses in uniform6(any::<u8>()),
        vlan_tci in any::<Option<u16>>(),
        trailer in vec(any::<u8>(), 0..20),
    ) {
        let ethernet = Ethernet { dst: addresses, src: [2; 6], vlan_tci };
        let packet = packet(network, headers, &payload);
        let frame = Frame { ethernet, packet, trailer: &trailer };
        let bytes = emitted(&frame);
        prop_assert_eq!(Frame::parse(&bytes), Ok(frame));
        prop_assert!(packet.icrc_is_right());
    }

    /// Short, cut, or with any byte of Ethernet header, GRH and transport headers changed.
    #[test]
    fn mutated_roce_v1_frames_are_reproduced_or_refused(
        grh in grh(),
        (headers, payload) in headers_and_payload(),
        changes in vec((any::<prop::sample::Index>(), 1..=u8::MAX), 0..4),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let ethernet = Ethernet { dst: [4; 6], src: [2; 6], vlan_tci: None };
        let packet = packet(Network::Grh(grh), headers, &payload);
        let mut bytes = emitted(&Frame { ethernet, packet, trailer: &[] });
        for (at, flips) in &changes {
            let at = at.index(bytes.len().min(14 + GRH_BYTES + 64));
            bytes[at] ^= flips;
        }
        bytes.truncate(if cut { keep.index(bytes.len()) } else { bytes.len() });
        if let Ok(frame) = Frame::parse(&bytes) {
            prop_assert_eq!(emitted(&frame), bytes);
        } else {
            prop_assert!(cut || !changes.is_empty());
        }
    }

    #[test]
    fn arbitrary_frames_are_reproduced_or_refused(bytes in vec(any::<u8>(), 0..200), link in 0..4u8) {
        let link = [Link::Ethernet, Link::RawIp, Link::Sll, Link::Sll2][usize::from(link)];
        let mut writer = Writer::new(link);
        writer.record(0, &bytes);
        let report = check(&writer.into_bytes());
        prop_assert_eq!(report.packets, 1);
        prop_assert_eq!(report.decoded, report.reproduced);
    }
}

fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn first_frame(capture: &[u8]) -> Vec<u8> {
    let capture = Capture::parse(capture).expect("a committed capture");
    capture.records().next().expect("not empty").expect("complete").bytes.to_vec()
}

/// Puts the right checksum into the IPv4 header at byte 14, as a router would.
fn repair_ipv4_checksum(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let words = frame[14..34].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
}

/// Fields that routers may change, by offset in the frame: the rest is covered by the ICRC.
fn is_masked(v4: bool, at: usize, bit: usize) -> bool {
    let (udp, ip) = if v4 { (34, at - 14) } else { (54, at - 14) };
    let masked_ip = match (v4, ip) {
        (true, 1 | 8 | 10 | 11) | (false, 1..=3 | 7) => true,
        (false, 0) => bit < 4,
        _ => false,
    };
    masked_ip || at == udp + 6 || at == udp + 7 || at == udp + 12
}

#[test]
fn the_icrc_covers_exactly_what_routers_leave_alone() {
    for (name, v4) in [("rc_small.pcap", true), ("ud_v6.pcap", false)] {
        let original = first_frame(&golden(name));
        for at in 14..original.len() {
            for bit in 0..8 {
                let mut frame = original.clone();
                frame[at] ^= 1 << bit;
                if v4 {
                    repair_ipv4_checksum(&mut frame);
                }
                let right = Frame::parse(&frame).is_ok_and(|frame| frame.packet.icrc_is_right());
                assert_eq!(right, is_masked(v4, at, bit), "{name}: byte {at} bit {bit}");
            }
        }
    }
}

/// In the GRH: traffic class, flow label and hop limit; in the BTH the byte of FECN and BECN.
#[test]
fn the_icrc_of_roce_v1_covers_everything_else() {
    let original = first_frame(&golden("roce_v1.pcap"));
    for at in 14..original.len() {
        for bit in 0..8 {
            let mut frame = original.clone();
            frame[at] ^= 1 << bit;
            let right = Frame::parse(&frame).is_ok_and(|frame| frame.packet.icrc_is_right());
            let is_masked = match at - 14 {
                0 => bit < 4,
                at => matches!(at, 1..=3 | 7) || at == GRH_BYTES + 4,
            };
            assert_eq!(right, is_masked, "byte {at} bit {bit}");
        }
    }
}

#[test]
fn odd_roce_v1_packets_are_refused_with_the_reason() {
    let original = first_frame(&golden("roce_v1.pcap"));
    let refusal = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = original.clone();
        change(&mut frame);
        Frame::parse(&frame).err()
    };
    let have = original.len() - 14;
    let length = |claimed, have| Some(FrameError::Length { layer: "GRH", claimed, have });
    assert_eq!(refusal(&|_| {}), None);
    assert_eq!(refusal(&|frame| frame[14] = 0x80), Some(FrameError::GrhVersion(8)));
    assert_eq!(refusal(&|frame| frame[20] = 17), Some(FrameError::NextHeader(17)));
    assert_eq!(refusal(&|frame| frame.truncate(14 + 39)), length(40, 39));
    let body = have - GRH_BYTES;
    assert_eq!(refusal(&|frame| frame.truncate(14 + have - 1)), length(body, body - 1));
    let short = WireError::Truncated { have: 11, need: 12 };
    assert_eq!(refusal(&|frame| frame[18..20].copy_from_slice(&[0, 11])), Some(short.into()));
}

/// The UDP header of a packet that has one.
fn udp<'p>(packet: &'p mut Packet<'_>) -> &'p mut Udp {
    match &mut packet.network {
        Network::Udp(_, udp) => udp,
        Network::Grh(_) => panic!("RoCEv1"),
    }
}

#[test]
fn exactly_one_udp_checksum_is_right() {
    let bytes = first_frame(&golden("rc_small.pcap"));
    let mut frame = Frame::parse(&bytes).expect("a RoCE frame");
    assert_eq!(frame.packet.udp_checksum(), Ok(UdpChecksum::Unused));
    let mut right = Vec::new();
    for checksum in 1..=u16::MAX {
        udp(&mut frame.packet).checksum = checksum;
        if frame.packet.udp_checksum() == Ok(UdpChecksum::Right) {
            right.push(checksum);
        }
    }
    let datagram = &bytes[34..];
    let words = datagram.chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
    let addresses =
        bytes[26..34].chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
    let sum = words.chain(addresses).sum::<u64>() + 17 + datagram.len() as u64;
    assert_eq!(right, [0xffff - (sum % 0xffff) as u16]);
}

#[test]
fn odd_ip_packets_are_refused_with_the_reason() {
    let original = first_frame(&golden("rc_small.pcap"));
    let refusal = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = original.clone();
        change(&mut frame);
        repair_ipv4_checksum(&mut frame);
        Frame::parse(&frame).err()
    };
    let not_roce = |kind| Some(FrameError::NotRoce(kind));
    assert_eq!(refusal(&|frame| frame[20] = 0x20), Some(FrameError::Fragment));
    assert_eq!(refusal(&|frame| frame[20] = 0x80), Some(FrameError::ReservedFlag));
    assert_eq!(refusal(&|frame| frame[21] = 1), not_roce(NotRoce::LaterFragment));
    assert_eq!(refusal(&|frame| frame[23] = 6), not_roce(NotRoce::NotUdp));
    assert_eq!(refusal(&|frame| frame[37] = 0), not_roce(NotRoce::OtherPort));
    assert_eq!(refusal(&|frame| frame[14] = 0x65), not_roce(NotRoce::IpVersion));
    assert_eq!(refusal(&|frame| frame[12..14].fill(8)), not_roce(NotRoce::NotIp));
    let roce_v1 = refusal(&|frame| frame[12..14].copy_from_slice(&[0x89, 0x15]));
    assert_eq!(roce_v1, Some(FrameError::GrhVersion(4)));
    assert_eq!(refusal(&|frame| frame.truncate(37)), not_roce(NotRoce::TooShort));
    let length = |layer, claimed, have| Some(FrameError::Length { layer, claimed, have });
    assert_eq!(refusal(&|frame| frame[17] += 1), length("IPv4", 149, 148));
    assert_eq!(refusal(&|frame| frame[39] += 1), length("UDP", 129, 128));
    let mut wrong = original.clone();
    wrong[24] ^= 1;
    assert!(matches!(Frame::parse(&wrong), Err(FrameError::Ipv4Checksum { .. })));
    let mut options = original.clone();
    options[14] = 0x46;
    options.splice(34..34, [1, 1, 1, 0]);
    assert_eq!(Frame::parse(&options).err(), Some(FrameError::IpOptions(24)));
}

#[test]
fn payloads_beyond_an_ip_packet_are_refused() {
    let bytes = first_frame(&golden("rc_small.pcap"));
    let frame = Frame::parse(&bytes).expect("a RoCE frame");
    let payload = vec![0; 65_535];
    let packet = Packet { payload: &payload, ..frame.packet };
    let mut out = Vec::new();
    assert!(matches!(packet.emit(&mut out), Err(FrameError::TooLong(_))));
    assert!(out.is_empty());
}

// Capture files.

/// Rewrites a little-endian microsecond file in the other byte order, or with other numbers.
fn rewritten(capture: &[u8], big_endian: bool, nanoseconds: bool) -> Vec<u8> {
    let word = |value: u32| {
        if big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    };
    let half = |value: u16| {
        if big_endian { value.to_be_bytes() } else { value.to_le_bytes() }
    };
    let mut out = word(if nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 }).to_vec();
    out.extend(half(2));
    out.extend(half(4));
    out.extend([0; 8]);
    out.extend(word(65_535));
    out.extend(word(1));
    for record in Capture::parse(capture).expect("valid").records() {
        let record = record.expect("complete");
        let ns = record.time_ns;
        let fraction = ns % 1_000_000_000 / if nanoseconds { 1 } else { 1000 };
        out.extend(word((ns / 1_000_000_000) as u32));
        out.extend(word(fraction as u32));
        out.extend(word(record.bytes.len() as u32));
        out.extend(word(record.original_len));
        out.extend(record.bytes);
    }
    out
}

#[test]
fn all_four_magic_numbers_read_the_same() {
    let original = golden("rping_cm.pcap");
    let records = |bytes: &[u8]| -> Vec<(u64, Vec<u8>)> {
        let capture = Capture::parse(bytes).expect("valid");
        capture
            .records()
            .map(|r| r.map(|r| (r.time_ns, r.bytes.to_vec())).expect("complete"))
            .collect()
    };
    let expected = records(&original);
    for (big_endian, nanoseconds) in [(false, false), (false, true), (true, false), (true, true)] {
        let file = rewritten(&original, big_endian, nanoseconds);
        assert_eq!(records(&file), expected);
        assert!(check(&file).is_clean());
    }
}

#[test]
fn other_link_types_check_the_same() {
    let frame = first_frame(&golden("ud_v6.pcap"));
    let ip = &frame[14..];
    let mut cooked = vec![0, 4, 0, 1, 0, 6, 2, 2, 2, 2, 2, 2, 0, 0];
    cooked.extend([0x86, 0xdd]);
    let mut cooked2 = vec![0x86, 0xdd, 0, 0, 0, 0, 0, 3, 0, 1, 4, 6];
    cooked2.extend([2; 8]);
    let mut tagged = frame[..12].to_vec();
    tagged.extend([0x81, 0x00, 0x60, 0x05, 0x86, 0xdd]);
    let heads = [
        (Link::RawIp, vec![]),
        (Link::Sll, cooked),
        (Link::Sll2, cooked2),
        (Link::Ethernet, tagged),
    ];
    for (link, head) in heads {
        let mut writer = Writer::new(link);
        writer.record(7, &[&head, ip, b"trailer"].concat());
        let report = check(&writer.into_bytes());
        assert!(report.is_clean() && report.reproduced == 1, "{report}");
        assert_eq!(report.link, Some(link));
    }
}

#[test]
fn the_writer_makes_what_the_reader_reads() {
    let mut writer = Writer::new(Link::RawIp);
    writer.record(1_234_567_890_123, b"one");
    writer.record(2, &vec![7; 300_000]);
    let file = writer.into_bytes();
    let capture = Capture::parse(&file).expect("just written");
    let records: Vec<_> = capture.records().map(|record| record.expect("complete")).collect();
    assert_eq!((records[0].number, records[0].time_ns), (1, 1_234_567_890_123));
    assert_eq!((records[0].bytes, records[0].is_cut_short()), (b"one".as_slice(), false));
    assert_eq!((records[1].bytes.len(), records[1].original_len), (262_144, 300_000));
    assert!(records[1].is_cut_short());
}

#[test]
fn a_file_that_ends_early_gives_the_packets_before_the_damage() {
    let whole = golden("rc_small.pcap");
    let complete = check(&whole);
    for len in 0..whole.len() {
        let report = check(&whole[..len]);
        assert!(report.packets < complete.packets);
        assert_eq!(report.reproduced, report.packets);
        let at_boundary = len >= 24 && report.damage.is_none();
        assert_eq!(report.is_clean(), at_boundary);
    }
    let broken = Capture::parse(&whole[..100]).expect("the header is there");
    let error = CaptureError::RecordBytes { packet: 1, have: 60, need: 162 };
    assert_eq!(broken.records().collect::<Vec<_>>(), [Err(error)]);
}

#[test]
fn foreign_files_are_refused_with_the_reason() {
    let damage = |bytes: &[u8]| check(bytes).damage;
    let mut file = golden("rc_small.pcap");
    assert_eq!(damage(&[]), Some(CaptureError::TooShort(0)));
    assert_eq!(damage(&[0; 24]), Some(CaptureError::Magic(0)));
    let mut pcapng = [0; 28];
    pcapng[..4].copy_from_slice(&[0x0a, 0x0d, 0x0d, 0x0a]);
    assert_eq!(damage(&pcapng), Some(CaptureError::PcapNg));
    file[20] = 105;
    assert_eq!(damage(&file), Some(CaptureError::LinkType(105)));
    file[4] = 3;
    assert_eq!(damage(&file), Some(CaptureError::Version(3)));
}

#[test]
fn differences_name_packet_and_reason() {
    let mut file = golden("rc_small.pcap");
    let (second, last) = (24 + 16 + 162, file.len() - 1);
    file[last] ^= 1;
    file[second + 16 + 24] ^= 1;
    let report = check(&file);
    assert_eq!(report.difference_count, 2);
    assert!(matches!(
        report.differences[0].reason,
        Reason::Undecodable(FrameError::Ipv4Checksum { .. })
    ));
    assert!(matches!(report.differences[1].reason, Reason::Icrc { .. }));
    assert_eq!((report.differences[0].packet, report.differences[1].packet), (2, 20));
    let text = report.to_string();
    assert!(text.contains("packet 2: does not decode: IPv4 header checksum"), "{text}");
    assert!(text.contains("10  IPv4 RC SEND_ONLY"), "{text}");
}

#[test]
fn packets_cut_by_the_snap_length_are_reported() {
    let mut file = golden("rc_small.pcap");
    file.truncate(24 + 16 + 100);
    file[32..36].copy_from_slice(&100u32.to_le_bytes());
    let report = check(&file);
    assert_eq!(report.differences[0].reason, Reason::CutShort { captured: 100, original: 162 });
}

proptest! {
    #![proptest_config(config(3, 400))]

    #[test]
    fn mutated_files_never_pass_with_wrong_bytes(
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let mut file = golden("rping_cm.pcap");
        for (at, value) in changes {
            let at = at.index(file.len());
            file[at] = value;
        }
        let report = check(&file);
        prop_assert_eq!(report.decoded, report.reproduced);
        prop_assert_eq!(report.packets, report.roce + report.skipped_count());
        prop_assert!(!report.to_string().is_empty());
    }

    #[test]
    fn arbitrary_files_never_panic(bytes in vec(any::<u8>(), 0..200)) {
        let report = check(&bytes);
        prop_assert!(report.damage.is_some());
    }
}
