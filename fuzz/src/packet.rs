//! Harness of the codec: any bytes as a packet, as a frame, as a capture file.
//!
//! Bytes that decode must encode to the same bytes, agree with the byte views, and survive being
//! rebuilt from their parts. Other bytes must be refused with an error, never a panic.

use controls::{Hpcc, HpccParams};
use roce::congestion::{Controller, Event};
use roce::wire::capture::{
    self, Capture, FILE_HEADER_BYTES, Link, MAX_DIFFERENCES, RECORD_HEADER_BYTES,
};
use roce::wire::frame::{ETHERTYPE_ROCE_V1, Frame, Packet};
use roce::wire::grh::GRH_BYTES;
use roce::wire::icrc::{self, Pseudo};
use roce::wire::telemetry::{Form, Hop, Report};
use roce::wire::views::{AethView, AtomicEthView, BthView, DethView, RethView};
use roce::wire::{BTH_BYTES, Ext, Headers, ICRC_BYTES};
use roce::{Duration, Time};

/// An entry point of the codec, chosen by the first byte.
pub fn check(input: &[u8]) {
    let Some((&way, bytes)) = input.split_first() else {
        return;
    };
    match way % 8 {
        0 | 1 => {
            transport(bytes);
            telemetry(bytes);
        }
        2 => {
            frame(bytes);
            frame(&mended_v1(bytes));
        }
        3 => ip_packet(bytes),
        4 => ip_packet(&mended_v4(bytes)),
        5 => ip_packet(&mended_v6(bytes)),
        6 => capture_file(bytes),
        _ => capture_records(bytes),
    }
}

/// BTH to ICRC.
fn transport(input: &[u8]) {
    let Ok((headers, payload)) = Headers::parse(input) else {
        return;
    };
    let encoded = headers.emit();
    assert_eq!(encoded.len(), headers.encoded_len());
    assert_eq!(encoded[..], input[..encoded.len()], "encoded again it differs");
    let pad = usize::from(headers.bth().pad);
    assert_eq!(encoded.len() + payload.len() + pad + ICRC_BYTES, input.len());
    assert_eq!(*payload, input[encoded.len()..][..payload.len()]);
    views_agree(&headers, input);
    parts_join(&headers);
    icrc_is_linear(input);
}

/// The header that switches stamp, and the control that reads it.
fn telemetry(input: &[u8]) {
    let (mut made, mut digest) = (Report::default(), Report::empty(Form::Digest));
    for link in input.chunks(4).take(2 * Report::MAX_HOPS) {
        let value = link.iter().fold(0, |value, &byte| value << 14 | u64::from(byte));
        made.stamp(Hop::new(value, value, value, value));
        digest.raise(value, value as u16);
    }
    assert_eq!(Report::parse(made.as_bytes()), Ok(made));
    assert_eq!(Report::parse(digest.as_bytes()), Ok(digest));
    let Ok(report) = Report::parse(input) else {
        return;
    };
    assert_eq!(report.as_bytes()[..], input[..report.as_bytes().len()]);
    assert!(report.hops().count() <= Report::MAX_HOPS);
    let (line_bps, base_rtt) = (100_000_000_000, Duration::from_micros(12));
    for params in [HpccParams::new(line_bps, base_rtt), HpccParams::pint(line_bps, base_rtt)] {
        let mut sender = Hpcc::new(params, 1_024);
        for report in [&report, &made, &digest, &report, &report.echoed()] {
            sender.handle(Time::ZERO, Event::Telemetry(report));
            sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight: 0, rtt: None });
            assert!((params.min_bps..=params.line_bps).contains(&sender.rate_bps()));
        }
    }
}

fn views_agree(headers: &Headers, input: &[u8]) {
    let view = BthView::new(input).expect("the BTH was parsed");
    assert_eq!(view.decode().as_ref(), Ok(headers.bth()));
    let ext = &input[BTH_BYTES..];
    match headers.ext() {
        Ext::Reth(reth)
        | Ext::RethImm(reth, _)
        | Ext::RethSreth(reth, _)
        | Ext::RethSrethImm(reth, ..) => {
            assert_eq!(RethView::new(ext).map(|view| view.decode()).as_ref(), Ok(reth));
        }
        Ext::Aeth(aeth)
        | Ext::AethAtomicAck(aeth, _)
        | Ext::AethSreth(aeth, _)
        | Ext::AethSack(aeth, _) => {
            assert_eq!(AethView::new(ext).and_then(|view| view.decode()).as_ref(), Ok(aeth));
        }
        Ext::AtomicEth(atomic) => {
            assert_eq!(AtomicEthView::new(ext).map(|view| view.decode()).as_ref(), Ok(atomic));
        }
        Ext::Deth(deth) | Ext::DethImm(deth, _) => {
            assert_eq!(DethView::new(ext).map(|view| view.decode()).as_ref(), Ok(deth));
        }
        Ext::None | Ext::Imm(_) | Ext::Ieth(_) | Ext::Cnp => {}
        // No view: it is this project's own, and the identity above covers it.
        Ext::Sreth(_) | Ext::SrethImm(..) | Ext::SrethIeth(..) => {}
    }
}

/// Headers rebuilt from their parts differ in ignored bits at most.
fn parts_join(headers: &Headers) {
    let joined = Headers::new(*headers.bth(), *headers.ext()).expect("the parts were legal");
    let mut bytes = joined.emit().to_vec();
    if !headers.has_ignored_bits() {
        assert_eq!(bytes[..], headers.emit()[..]);
    }
    bytes.resize(bytes.len() + usize::from(headers.bth().pad).next_multiple_of(4) + ICRC_BYTES, 0);
    let (again, _) = Headers::parse(&bytes).expect("what was encoded decodes");
    assert_eq!((again.bth(), again.ext()), (headers.bth(), headers.ext()));
}

/// The recovered identification is the one that was used.
fn icrc_is_linear(input: &[u8]) {
    let id = u16::from_le_bytes([input[0], input[input.len() - 1]]);
    let pseudo = |id| Pseudo::V4 {
        src: [10, 0, 0, 1].into(),
        dst: [10, 0, 0, 2].into(),
        id,
        dont_fragment: true,
        src_port: 0xc000,
        dst_port: roce::wire::ROCE_PORT,
    };
    let right = icrc::compute(&pseudo(id), input).expect("long enough for an ICRC");
    let mut packet = input.to_vec();
    if let Some(carried) = packet.last_chunk_mut() {
        *carried = right;
    }
    assert!(icrc::verify(&pseudo(id), &packet));
    assert_eq!(icrc::solve_id(&pseudo(!id), &packet), Some(id));
}

fn frame(input: &[u8]) {
    let Ok(frame) = Frame::parse(input) else {
        return;
    };
    let mut again = Vec::new();
    frame.emit(&mut again).expect("it was decoded");
    assert_eq!(again, input, "the frame encoded again differs");
    check_fields(&frame.packet);
}

fn ip_packet(input: &[u8]) {
    let Ok((packet, rest)) = Packet::parse(input) else {
        return;
    };
    let mut again = Vec::new();
    packet.emit(&mut again).expect("it was decoded");
    assert_eq!(again, input[..input.len() - rest.len()], "the packet encoded again differs");
    check_fields(&packet);
}

fn check_fields(packet: &Packet<'_>) {
    let right = Packet { icrc: packet.computed_icrc(), ..*packet };
    assert!(right.icrc_is_right());
    packet.udp_checksum().expect("it was decoded, so it is not too long");
}

const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;

/// The bytes with all fields that have one right value set to it: version, lengths, checksum.
fn mended_v4(input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    bytes.resize(bytes.len().clamp(IPV4_BYTES + UDP_BYTES, usize::from(u16::MAX)), 0);
    bytes[0] = 0x45;
    let len = bytes.len() as u16;
    bytes[2..4].copy_from_slice(&len.to_be_bytes());
    bytes[6] &= 0x40;
    bytes[7] = 0;
    bytes[9] = 17;
    bytes[10..12].fill(0);
    let sum: u32 = bytes[..IPV4_BYTES]
        .as_chunks::<2>()
        .0
        .iter()
        .map(|&[a, b]| u32::from(u16::from_be_bytes([a, b])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
    mend_udp(&mut bytes[IPV4_BYTES..]);
    bytes
}

fn mended_v6(input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    bytes.resize(bytes.len().clamp(IPV6_BYTES + UDP_BYTES, usize::from(u16::MAX)), 0);
    bytes[0] = 0x60 | bytes[0] & 0x0f;
    let len = (bytes.len() - IPV6_BYTES) as u16;
    bytes[4..6].copy_from_slice(&len.to_be_bytes());
    bytes[6] = 17;
    mend_udp(&mut bytes[IPV6_BYTES..]);
    bytes
}

/// A RoCEv1 frame of these bytes.
fn mended_v1(input: &[u8]) -> Vec<u8> {
    const ETHERNET_BYTES: usize = 14;
    let mut bytes = input.to_vec();
    let shortest = ETHERNET_BYTES + GRH_BYTES;
    bytes.resize(bytes.len().clamp(shortest, usize::from(u16::MAX)), 0);
    let len = (bytes.len() - shortest) as u16;
    bytes[12..14].copy_from_slice(&ETHERTYPE_ROCE_V1.to_be_bytes());
    bytes[14] = 0x60 | bytes[14] & 0x0f;
    bytes[18..20].copy_from_slice(&len.to_be_bytes());
    bytes[20] = 0x1b;
    bytes
}

fn mend_udp(udp: &mut [u8]) {
    let len = udp.len() as u16;
    udp[2..4].copy_from_slice(&roce::wire::ROCE_PORT.to_be_bytes());
    udp[4..6].copy_from_slice(&len.to_be_bytes());
}

fn capture_file(file: &[u8]) {
    let report = capture::check(file);
    assert_eq!(report.decoded, report.reproduced, "a decoded packet was encoded differently");
    assert!(report.differences.len() <= MAX_DIFFERENCES);
    let Ok(capture) = Capture::parse(file) else {
        assert!(report.damage.is_some());
        return;
    };
    let (mut records, mut bytes) = (0, 0);
    for record in capture.records().map_while(Result::ok) {
        records += 1;
        assert_eq!(record.number, records);
        bytes += record.bytes.len() + RECORD_HEADER_BYTES;
    }
    assert_eq!(records, report.packets);
    assert!(bytes + FILE_HEADER_BYTES <= file.len());
}

/// The records of a file with a right header.
fn capture_records(input: &[u8]) {
    let Some((link, records)) = input.split_first() else {
        return;
    };
    let link = [Link::Ethernet, Link::RawIp, Link::Sll, Link::Sll2][usize::from(link % 4)];
    let mut file = capture::file_header(link).to_vec();
    file.extend_from_slice(records);
    capture_file(&file);
}
