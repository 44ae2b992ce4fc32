//! Packets that no capture has, decoded by tshark: those exchanged only by two of our own
//! endpoints, whose meaning it does not know, but which it accepts as whole packets, and RoCEv1. It
//! shows ICRCs and verifies none. Skipped, with a message, where it is missing.

#[expect(clippy::disallowed_types, reason = "a test that is skipped says so in a file")]
#[path = "../../../testing/skip.rs"]
mod skip;

use std::io::Write;
use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};

use roce::verbs::Qpn;
use roce::wire::capture::{Link, Writer};
use roce::wire::frame::{Ethernet, Frame, Ip, Ipv4, Network, Packet, Udp};
use roce::wire::grh::{Grh, gid_of};
use roce::wire::{
    Aeth, AtomicAckEth, AtomicEth, Bth, DEFAULT_PKEY, Deth, Ext, ExtKind, Headers, Opcode, Psn,
    ROCE_PORT, Reth, Sack, Service, Sreth, Syndrome,
};

fn ext(kind: ExtKind) -> Ext {
    let reth = Reth { addr: 0x7f00_0000_1000, rkey: 0x1234_5678, len: 1024 };
    let sreth = Sreth { sequence: 77, offset: 4096 };
    let aeth = Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 5 };
    match kind {
        ExtKind::Sreth => Ext::Sreth(sreth),
        ExtKind::SrethImm => Ext::SrethImm(sreth, 9),
        ExtKind::SrethIeth => Ext::SrethIeth(sreth, 9),
        ExtKind::RethSreth => Ext::RethSreth(reth, sreth),
        ExtKind::RethSrethImm => Ext::RethSrethImm(reth, sreth, 9),
        ExtKind::AethSreth => Ext::AethSreth(aeth, sreth),
        ExtKind::AethSack => Ext::AethSack(aeth, Sack::new(3, Psn::new(4), u128::MAX << 1)),
        ExtKind::Cnp => Ext::Cnp,
        ExtKind::None => Ext::None,
        ExtKind::Imm => Ext::Imm(9),
        ExtKind::Ieth => Ext::Ieth(9),
        ExtKind::Reth => Ext::Reth(reth),
        ExtKind::RethImm => Ext::RethImm(reth, 9),
        ExtKind::Aeth => Ext::Aeth(aeth),
        ExtKind::AtomicEth => {
            Ext::AtomicEth(AtomicEth { addr: 8, rkey: 1, swap_or_add: 2, compare: 3 })
        }
        ExtKind::AethAtomicAck => Ext::AethAtomicAck(aeth, AtomicAckEth { original: 4 }),
        ExtKind::Deth => Ext::Deth(Deth { qkey: 5, src_qp: Qpn::new(6) }),
        ExtKind::DethImm => Ext::DethImm(Deth { qkey: 5, src_qp: Qpn::new(6) }, 9),
    }
}

const ENDS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];

fn over_udp() -> Network {
    let [src, dst] = ENDS;
    let ip = Ipv4 { tos: 2, id: 0, dont_fragment: true, ttl: 64, src, dst };
    Network::Udp(Ip::V4(ip), Udp { src_port: 49_152, dst_port: ROCE_PORT, checksum: 0 })
}

fn in_a_grh() -> Network {
    let [sgid, dgid] = ENDS.map(|ip| gid_of(ip.into()));
    Network::Grh(Grh { traffic_class: 0x20, flow_label: 0x12345, hop_limit: 64, sgid, dgid })
}

fn packet(network: Network, opcode: Opcode, payload: &[u8]) -> Packet<'_> {
    let bth = Bth {
        opcode,
        solicited: false,
        mig_req: true,
        pad: 0,
        pkey: DEFAULT_PKEY,
        fecn: false,
        becn: opcode == Opcode::Cnp,
        dest_qp: Qpn::new(0x11),
        ack_req: true,
        psn: Psn::new(1000),
    };
    let headers = Headers::new(bth, ext(opcode.ext_kind())).expect("legal");
    let packet = Packet { network, headers, payload, pad: [0; 3], icrc: [0; 4] };
    Packet { icrc: packet.computed_icrc(), ..packet }
}

fn bytes(opcode: Opcode, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    packet(over_udp(), opcode, payload).emit(&mut out).expect("fits");
    out
}

/// What tshark says about a capture.
fn tshark(capture: &[u8], arguments: &[&str]) -> Option<Output> {
    let piped = Stdio::piped;
    let mut command = Command::new("tshark");
    command.args(["-r", "-"]).args(arguments).stdin(piped()).stdout(piped()).stderr(piped());
    let mut child = command.spawn().ok()?;
    let mut input = child.stdin.take()?;
    input.write_all(capture).expect("tshark reads to the end");
    drop(input);
    Some(child.wait_with_output().expect("tshark ends"))
}

#[test]
fn tshark_finds_nothing_malformed() {
    let ours = |opcode: &&Opcode| matches!(opcode.service(), Service::Selective | Service::Cnp);
    let mut writer = Writer::new(Link::RawIp);
    let mut count = 0;
    for &opcode in Opcode::ALL.iter().filter(ours) {
        let payloads: &[&[u8]] = if opcode.carries_payload() { &[&[], &[7; 1024]] } else { &[&[]] };
        for payload in payloads {
            writer.record(count, &bytes(opcode, payload));
            count += 1;
        }
    }
    let Some(out) = tshark(&writer.into_bytes(), &["-V"]) else {
        skip::note("tshark_finds_nothing_malformed", "tshark is not installed");
        return;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout).to_lowercase();
    assert_eq!(text.matches("base transport header").count() as u64, count);
    assert!(!text.contains("malformed"), "{text}");
}

#[test]
fn tshark_reads_roce_v1_fields() {
    let services = [Service::Rc, Service::Uc, Service::Ud];
    let of_the_standard = |opcode: &&Opcode| services.contains(&opcode.service());
    let ethernet = Ethernet { dst: [2, 0, 0, 0, 0, 2], src: [2, 0, 0, 0, 0, 1], vlan_tci: None };
    let (mut writer, mut expected) = (Writer::new(Link::Ethernet), Vec::new());
    for &opcode in Opcode::ALL.iter().filter(of_the_standard) {
        let packet =
            packet(in_a_grh(), opcode, if opcode.carries_payload() { &[7; 64] } else { &[] });
        let mut bytes = Vec::new();
        Frame { ethernet, packet, trailer: &[] }.emit(&mut bytes).expect("fits");
        writer.record(expected.len() as u64, &bytes);
        let icrc = u32::from_be_bytes(packet.icrc);
        expected.push(format!("::ffff:10.0.0.1|{}|0x000011|1000|{icrc:#010x}", opcode.as_u8()));
    }
    let fields = ["sgid", "bth.opcode", "bth.destqp", "bth.psn", "invariant.crc"];
    let fields = fields.map(|name| {
        let layer = if name == "sgid" { "infiniband.grh" } else { "infiniband" };
        format!("-e {layer}.{name}")
    });
    let arguments = format!("-T fields -E separator=| {}", fields.join(" "));
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let Some(out) = tshark(&writer.into_bytes(), &arguments) else {
        skip::note("tshark_reads_roce_v1_fields", "tshark is not installed");
        return;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}
