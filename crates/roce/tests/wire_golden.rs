//! Captures of the Linux kernel's soft-RoCE, and RoCEv1 packets built with scapy, decode, verify
//! and encode again byte for byte.
//!
//! The captures beside this file are always checked. `DQUANT_GOLDEN` may name a directory with
//! more; without it, `shared/rxelab/golden` beside the workspace is used if it exists.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use roce::wire::capture::{Capture, CaptureReport, check};
use roce::wire::frame::{Frame, Ip, IpVersion, Ipv4, Network, NetworkType};
use roce::wire::grh::gid_of;
use roce::wire::{Ext, Opcode, ROCE_PORT, Syndrome, icrc};

fn manifest() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn committed(name: &str) -> Vec<u8> {
    let path = manifest().join("tests/golden").join(name);
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn captures_in(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut captures: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|ext| ext == "pcap")).collect();
    captures.sort();
    captures
}

fn assert_clean(path: &Path, report: &CaptureReport) {
    assert!(report.is_clean(), "{}:\n{report}", path.display());
    assert_ne!(report.roce, 0, "{}: no RoCE packet", path.display());
    assert_eq!(report.icrc_right, report.roce, "{}", path.display());
    assert_eq!(report.reproduced, report.roce, "{}", path.display());
}

#[test]
fn committed_captures_are_clean() {
    let captures = captures_in(&manifest().join("tests/golden"));
    assert_eq!(captures.len(), 11);
    for path in captures {
        let bytes = fs::read(&path).expect("listed a moment ago");
        assert_clean(&path, &check(&bytes));
    }
}

#[test]
fn every_capture_at_hand_is_clean() {
    let directory = std::env::var_os("DQUANT_GOLDEN").map(PathBuf::from);
    let named = directory.is_some();
    let directory = directory.unwrap_or_else(|| manifest().join("../../../shared/rxelab/golden"));
    let captures = captures_in(&directory);
    if captures.is_empty() {
        assert!(!named, "DQUANT_GOLDEN={} has no pcap file", directory.display());
        println!("skipped: no captures in {}; set DQUANT_GOLDEN", directory.display());
        return;
    }
    for path in captures {
        let bytes = fs::read(&path).expect("listed a moment ago");
        let report = check(&bytes);
        println!("{}\n{report}\n", path.display());
        assert_clean(&path, &report);
    }
}

/// Counts as an independent decoder gives them.
#[test]
fn opcodes_are_counted() {
    const V4: NetworkType = NetworkType::RoceV2(IpVersion::V4);
    const V6: NetworkType = NetworkType::RoceV2(IpVersion::V6);
    let expect = |name: &str, counts: &[((NetworkType, Opcode), u64)]| {
        let counts: BTreeMap<_, _> = counts.iter().copied().collect();
        assert_eq!(check(&committed(name)).by_opcode, counts, "{name}");
    };
    expect("rc_small.pcap", &[((V4, Opcode::RcSendOnly), 10), ((V4, Opcode::RcAcknowledge), 10)]);
    expect("ud_v6.pcap", &[((V6, Opcode::UdSendOnly), 6)]);
    expect(
        "uc.pcap",
        &[
            ((V4, Opcode::UcSendFirst), 6),
            ((V4, Opcode::UcSendMiddle), 6),
            ((V4, Opcode::UcSendLast), 6),
        ],
    );
    expect(
        "fetch_add.pcap",
        &[((V4, Opcode::RcFetchAdd), 5), ((V4, Opcode::RcAtomicAcknowledge), 5)],
    );
    expect(
        "read_only.pcap",
        &[((V4, Opcode::RcReadRequest), 5), ((V4, Opcode::RcReadResponseOnly), 5)],
    );
    expect(
        "rping_cm.pcap",
        &[
            ((V4, Opcode::RcSendOnly), 8),
            ((V4, Opcode::RcWriteOnly), 2),
            ((V4, Opcode::RcReadRequest), 2),
            ((V4, Opcode::RcReadResponseOnly), 2),
            ((V4, Opcode::RcAcknowledge), 10),
            ((V4, Opcode::UdSendOnly), 5),
        ],
    );
}

/// Soft-RoCE has no version 1: these are the packets of `interop/roce_v1.py`.
#[test]
fn fields_of_roce_v1() {
    let bytes = committed("roce_v1.pcap");
    let report = check(&bytes);
    let frames = frames(&bytes);
    assert_eq!(report.icrc_right, 8);
    assert!(report.by_opcode.keys().all(|(network, _)| *network == NetworkType::RoceV1));
    let grh_of = |at: usize| match frames[at].packet.network {
        Network::Grh(grh) => grh,
        Network::Udp(..) => panic!("packet {at} has no GRH"),
    };
    let v4: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
    let v6: [IpAddr; 2] = ["fd00::1", "fe80::200:ff:fe00:2"].map(|ip| ip.parse().expect("good"));
    for (at, [from, to]) in [(0, v4), (4, v6)] {
        let grh = grh_of(at);
        assert_eq!((grh.sgid, grh.dgid), (gid_of(from), gid_of(to)), "packet {at}");
    }
    let marked = grh_of(6);
    assert_eq!((marked.traffic_class, marked.flow_label), (0xb8, 0xabcde));
    assert_eq!((marked.hop_limit, frames[6].packet.headers.bth().fecn), (64, true));
    let opcodes: Vec<Opcode> =
        frames.iter().map(|frame| frame.packet.headers.bth().opcode).collect();
    use Opcode::*;
    let expected = [RcSendOnly, RcWriteFirst, RcAcknowledge, RcReadRequest, UdSendOnly, Cnp];
    assert_eq!(opcodes[..6], expected);
    assert_eq!(opcodes[6..], [RcSendMiddle, UcWriteOnly]);
}

/// Immediate data, keys to invalidate, and every refusal, as an independent decoder counts them.
#[test]
fn opcodes_of_rarer_operations_are_counted() {
    use Opcode::*;
    let expect = |name: &str, counts: &[(Opcode, u64)]| {
        let network = NetworkType::RoceV2(IpVersion::V4);
        let counts: BTreeMap<_, _> =
            counts.iter().map(|&(opcode, count)| ((network, opcode), count)).collect();
        assert_eq!(check(&committed(name)).by_opcode, counts, "{name}");
    };
    expect(
        "write_imm.pcap",
        &[
            (RcWriteFirst, 1),
            (RcWriteMiddle, 1),
            (RcWriteLastImm, 1),
            (RcWriteOnlyImm, 2),
            (RcAcknowledge, 3),
        ],
    );
    expect(
        "send_imm.pcap",
        &[
            (RcSendFirst, 1),
            (RcSendMiddle, 1),
            (RcSendLastImm, 1),
            (RcSendOnlyImm, 2),
            (RcAcknowledge, 3),
        ],
    );
    expect(
        "send_inv.pcap",
        &[
            (RcSendFirst, 1),
            (RcSendMiddle, 1),
            (RcSendLastInvalidate, 1),
            (RcSendOnlyInvalidate, 1),
            (RcWriteOnly, 3),
            (RcAcknowledge, 5),
        ],
    );
}

/// PSN, syndrome and MSN of every refusal: each names the first packet of its request.
#[test]
fn fields_of_refusals() {
    let bytes = committed("refusals.pcap");
    let frames = frames(&bytes);
    let mut requests = Vec::new();
    let mut refusals = Vec::new();
    for headers in frames.iter().map(|frame| &frame.packet.headers) {
        let bth = headers.bth();
        match headers.ext().aeth() {
            Some(aeth) => refusals.push((bth.psn, aeth.syndrome, aeth.msn)),
            None if bth.opcode.starts_message() => requests.push(bth.psn),
            None => {}
        }
    }
    let rnr = Syndrome::RnrNak { timer: 20 };
    let syndromes = [Syndrome::RemoteAccess; 3].into_iter().chain([
        Syndrome::RemoteOperation,
        rnr,
        rnr,
        rnr,
        rnr,
    ]);
    let mut expected: Vec<_> =
        requests.iter().zip(syndromes).map(|(&psn, syndrome)| (psn, syndrome, 0)).collect();
    expected.push((requests[8], Syndrome::Ack { credits: 31 }, 1));
    assert_eq!(refusals, expected);
}

/// The keys invalidated by two SENDs are those that the WRITEs before them used.
#[test]
fn invalidated_keys_are_the_windows() {
    let bytes = committed("send_inv.pcap");
    let frames = frames(&bytes);
    let mut written = Vec::new();
    let mut invalidated = Vec::new();
    for frame in &frames {
        match frame.packet.headers.ext() {
            Ext::Reth(reth) => written.push(reth.rkey),
            Ext::Ieth(key) => invalidated.push(*key),
            _ => {}
        }
    }
    assert_eq!(written[..2], invalidated[..]);
    assert_eq!(written[2], invalidated[1], "the refused WRITE");
    assert_ne!(invalidated[0], invalidated[1]);
}

fn frames(capture: &[u8]) -> Vec<Frame<'_>> {
    let capture = Capture::parse(capture).expect("a committed capture");
    capture
        .records()
        .map(|record| Frame::parse(record.expect("complete").bytes).expect("a RoCE frame"))
        .collect()
}

#[test]
fn fields_of_a_send_and_its_acknowledgement() {
    let bytes = committed("rc_small.pcap");
    let frames = frames(&bytes);
    let send = &frames[0].packet;
    let Network::Udp(Ip::V4(ip), udp) = send.network else { panic!("not over IPv4") };
    assert_eq!(udp.dst_port, ROCE_PORT);
    assert_eq!((ip.id, ip.dont_fragment, ip.ttl), (0xb5f3, true, 64));
    let bth = send.headers.bth();
    assert_eq!((bth.opcode, bth.pad, bth.pkey), (Opcode::RcSendOnly, 3, 0xffff));
    assert_eq!((bth.dest_qp.get(), bth.psn.get(), bth.ack_req), (0x11, 0xfe_d06e, true));
    assert_eq!((bth.mig_req, bth.solicited, bth.fecn, bth.becn), (false, false, false, false));
    assert_eq!(send.payload, [b'{'; 101]);

    let aeth = frames.iter().find_map(|frame| frame.packet.headers.ext().aeth());
    let aeth = aeth.expect("the capture has acknowledgements");
    assert_eq!((aeth.syndrome, aeth.msn), (Syndrome::Ack { credits: 31 }, 1));
}

#[test]
fn fields_of_a_datagram_to_the_connection_manager() {
    let bytes = committed("rping_cm.pcap");
    let frames = frames(&bytes);
    let request = &frames[0].packet;
    assert_eq!(request.headers.bth().dest_qp.get(), 1);
    assert!(matches!(request.headers.ext(), Ext::Deth(deth)
        if deth.qkey == 0x8001_0000 && deth.src_qp.get() == 1));
    assert_eq!(request.payload.len(), 256);
}

/// The identification that a UDP socket would not see is found from the ICRC alone.
#[test]
fn hidden_identifications_are_solved() {
    for name in ["rc_small.pcap", "uc.pcap", "rping_cm.pcap"] {
        let bytes = committed(name);
        for frame in frames(&bytes) {
            let Network::Udp(Ip::V4(ip), udp) = frame.packet.network else {
                panic!("{name} is IPv4")
            };
            let mut encoded = Vec::new();
            frame.packet.emit(&mut encoded).expect("it was parsed");
            let mut blind = frame.packet;
            blind.network = Network::Udp(Ip::V4(Ipv4 { id: 0, ..ip }), udp);
            assert_eq!(icrc::solve_id(&blind.pseudo(), &encoded[28..]), Some(ip.id), "{name}");
        }
    }
}
