//! Packets exchanged only by two of our own endpoints, decoded by tshark: it does not know their
//! meaning, but accepts them as whole packets. Skipped, with a message, where it is missing.

#[expect(clippy::disallowed_types, reason = "a test that is skipped says so in a file")]
#[path = "../../../testing/skip.rs"]
mod skip;

use std::io::Write;
use std::net::Ipv4Addr;
use std::process::{Command, Output, Stdio};

use roce::verbs::Qpn;
use roce::wire::capture::{Link, Writer};
use roce::wire::frame::{Ip, Ipv4, Packet, Udp};
use roce::wire::{
    Aeth, Bth, DEFAULT_PKEY, Ext, ExtKind, Headers, Opcode, Psn, ROCE_PORT, Reth, Sack, Service,
    Sreth, Syndrome,
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
        other => panic!("{other:?} is not one of ours"),
    }
}

fn bytes(opcode: Opcode, payload: &[u8]) -> Vec<u8> {
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
    let ip = Ipv4 {
        tos: 2,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        src: Ipv4Addr::new(10, 0, 0, 1),
        dst: Ipv4Addr::new(10, 0, 0, 2),
    };
    let udp = Udp { src_port: 49_152, dst_port: ROCE_PORT, checksum: 0 };
    let headers = Headers::new(bth, ext(opcode.ext_kind())).expect("legal");
    let mut packet = Packet { ip: Ip::V4(ip), udp, headers, payload, pad: [0; 3], icrc: [0; 4] };
    packet.icrc = packet.computed_icrc();
    let mut out = Vec::new();
    packet.emit(&mut out).expect("fits");
    out
}

/// What tshark says about a capture, in full.
fn tshark(capture: &[u8]) -> Option<Output> {
    let piped = Stdio::piped;
    let mut command = Command::new("tshark");
    command.args(["-V", "-r", "-"]).stdin(piped()).stdout(piped()).stderr(piped());
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
    let Some(out) = tshark(&writer.into_bytes()) else {
        skip::note("tshark_finds_nothing_malformed", "tshark is not installed");
        return;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8_lossy(&out.stdout).to_lowercase();
    assert_eq!(text.matches("base transport header").count() as u64, count);
    assert!(!text.contains("malformed"), "{text}");
}
