//! `dquant capture`: captures between two kernels, intact and damaged; and our own captures.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use nic::device::{DeviceConfig, DeviceWire};
use nic::packet::PacketTap;
use roce::Time;
use roce::verbs::Qpn;
use roce::wire::capture::Capture;
use roce::wire::frame::{Ip, Network, Packet};
use roce::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, ROCE_PORT};
use roce::world::{NoMemory, Path as WirePath, Payload, Telemetry, TxFrame, Wire};

use super::{Folder, Ran, skip};

const FILE_HEADER_BYTES: usize = 24;
const RECORD_HEADER_BYTES: usize = 16;

/// Captures of Linux soft-RoCE on both ends.
fn golden() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../roce/tests/golden");
    let entries = fs::read_dir(folder).expect("the captures are in the repository");
    let mut captures: Vec<PathBuf> = entries
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|name| name == "pcap"))
        .collect();
    captures.sort();
    assert!(!captures.is_empty());
    captures
}

fn one() -> Vec<u8> {
    fs::read(&golden()[0]).expect("readable")
}

#[test]
fn captures_between_kernels_have_no_difference() {
    let folder = Folder::new("capture-golden");
    let captures = golden();
    let names: Vec<&str> = captures.iter().map(|path| path.to_str().expect("UTF-8")).collect();
    let text = folder.run(&[&["capture", "check"], &names[..]].concat()).good();
    assert_eq!(text.stdout.matches(": no differences").count(), captures.len());
    let json = folder.run(&[&["capture", "check", "--json"], &names[..]].concat()).good();
    assert_eq!(json.stdout.lines().count(), captures.len());
    for line in json.stdout.lines() {
        let report: serde_json::Value = serde_json::from_str(line).expect("a JSON object");
        assert_eq!(report["schema"], "dquant.capture.check/1");
        assert_eq!(report["difference_count"], 0);
        assert_eq!(report["roce"], report["reproduced"]);
        let counted = report["by_opcode"].as_object().expect("a table").values();
        let counted: u64 = counted.map(|count| count.as_u64().expect("a count")).sum();
        assert_eq!(Some(counted), report["roce"].as_u64());
    }
}

#[test]
fn one_changed_byte_is_found_and_its_packet_named() {
    let folder = Folder::new("capture-changed");
    let mut capture = one();
    let len = capture[FILE_HEADER_BYTES + 8..].first_chunk::<4>().expect("a record");
    let second = FILE_HEADER_BYTES + RECORD_HEADER_BYTES + u32::from_le_bytes(*len) as usize;
    let len = capture[second + 8..].first_chunk::<4>().expect("a second record");
    let last_byte = second + RECORD_HEADER_BYTES + u32::from_le_bytes(*len) as usize - 1;
    capture[last_byte] ^= 0x01;
    folder.write("changed.pcap", &capture);
    let ran = folder.run(&["capture", "check", "changed.pcap"]);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    assert!(ran.stdout.starts_with("changed.pcap: DIFFERS\n"), "{ran:?}");
    assert!(ran.stdout.contains("packet 2: ICRC"), "{ran:?}");
    let report = folder.run(&["capture", "check", "changed.pcap", "--json"]).json();
    assert_eq!(report["clean"], false);
    assert_eq!(report["differences"][0]["packet"], 2);
}

#[test]
fn a_capture_that_breaks_off_is_no_success() {
    let folder = Folder::new("capture-cut");
    let capture = one();
    folder.write("cut.pcap", &capture[..capture.len() - 1]);
    let ran = folder.run(&["capture", "check", "cut.pcap", "--json"]);
    assert_eq!(ran.exit, Some(1), "{ran:?}");
    assert!(ran.json()["damage"].as_str().is_some_and(|damage| damage.contains("ends after")));
}

#[test]
fn a_file_that_is_no_capture_is_refused() {
    let folder = Folder::new("capture-foreign");
    folder.write("a.txt", "this is text, and long enough for a header");
    folder.run(&["capture", "check", "a.txt"]).failed(2, "a.txt: magic number", "tcpdump -w");
    folder.write("b.pcapng", [&[0x0a, 0x0d, 0x0d, 0x0a][..], &[0; 40]].concat());
    folder.run(&["capture", "check", "b.pcapng"]).failed(2, "pcapng", "");
}

#[test]
fn a_capture_without_roce_says_so() {
    let folder = Folder::new("capture-empty");
    folder.write("empty.pcap", &one()[..FILE_HEADER_BYTES]);
    let ran = folder.run(&["capture", "check", "empty.pcap"]).good();
    assert!(ran.stderr.contains("no packet to UDP port 4791"), "{ran:?}");
}

fn frame(to: IpAddr, dest_qp: u32, psn: u32, payload: &[u8]) -> TxFrame<'_> {
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
    let header = Headers::new(bth, Ext::None).expect("legal").emit();
    let path = WirePath::new(SocketAddr::new(to, ROCE_PORT));
    TxFrame { path, header, payload: Payload::Bytes(payload), pad: 0, telemetry: Telemetry::None }
}

/// Sends 64 packets from a device to itself: a few segmented sends.
fn traffic(address: IpAddr) {
    let mut device = DeviceWire::open(&DeviceConfig::new(vec![address], 0)).expect("loopback");
    let qpn = u32::from(device.slot()) << 16 | 9;
    let payload = [0x5a; 1024];
    let frames: Vec<_> = (0..64).map(|psn| frame(address, qpn, psn, &payload)).collect();
    device.send(Time::ZERO, &frames, &NoMemory);
    assert!(device.counters().tx.gso_batches > 0);
}

/// A recording that has started.
fn recording(folder: &Folder, args: &[&str]) -> Child {
    let args = [&["capture", "live", "--interface", "lo", "-o", "live.pcap"], args].concat();
    let mut command = folder.command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut first = String::new();
    let stderr = child.stderr.as_mut().expect("piped");
    BufReader::new(stderr).read_line(&mut first).expect("a line");
    assert!(first.starts_with("recording"), "{first}");
    child
}

/// PSNs of the valid packets between addresses of this test: others use the interface too.
fn recorded(folder: &Folder, address: IpAddr) -> Vec<u32> {
    let file = folder.read("live.pcap");
    let mut psns = Vec::new();
    for record in Capture::parse(&file).expect("a capture").records() {
        let Ok((packet, _)) = Packet::parse(record.expect("whole").bytes) else {
            continue;
        };
        let Network::Udp(Ip::V4(ip), _) = packet.network else {
            continue;
        };
        if IpAddr::V4(ip.src) == address {
            assert!(packet.icrc_is_right());
            psns.push(packet.headers.bth().psn.get());
        }
    }
    psns
}

fn may_listen(test: &str) -> bool {
    let allowed = PacketTap::open(None).is_ok();
    if !allowed {
        skip::note(test, "no packet sockets without CAP_NET_RAW");
    }
    allowed
}

#[test]
fn a_live_capture_has_every_packet_once_and_ends_when_asked() {
    if !may_listen("a_live_capture_has_every_packet_once_and_ends_when_asked") {
        return;
    }
    let folder = Folder::new("capture-live");
    let address = IpAddr::from([127, 6, 1, 1]);
    let child = recording(&folder, &["--json"]);
    traffic(address);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    let ran = Ran::new(&child.wait_with_output().expect("it ends")).good();
    let report = ran.json();
    assert_eq!(report["schema"], "dquant.capture.live/1");
    assert!(
        report["packets"].as_u64() >= Some(64) && report["coalesced"].as_u64() >= Some(1),
        "{report}"
    );
    assert_eq!(recorded(&folder, address), (0..64).collect::<Vec<_>>());
}

#[test]
fn a_live_capture_that_is_killed_leaves_what_it_had() {
    if !may_listen("a_live_capture_that_is_killed_leaves_what_it_had") {
        return;
    }
    let folder = Folder::new("capture-killed");
    let address = IpAddr::from([127, 6, 1, 2]);
    let mut child = recording(&folder, &[]);
    traffic(address);
    std::thread::sleep(std::time::Duration::from_millis(500));
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert_eq!(recorded(&folder, address), (0..64).collect::<Vec<_>>());
}

#[test]
fn a_live_capture_ends_by_count_and_by_time() {
    if !may_listen("a_live_capture_ends_by_count_and_by_time") {
        return;
    }
    let folder = Folder::new("capture-bounds");
    let child = recording(&folder, &["--count", "10", "--json"]);
    traffic(IpAddr::from([127, 6, 1, 3]));
    let report = Ran::new(&child.wait_with_output().expect("it ends")).good().json();
    assert_eq!(report["packets"], 10);
    let args = ["capture", "live", "--interface", "lo", "--duration", "10ms", "-o", "live.pcap"];
    folder.run(&args).good();
}

#[test]
fn a_live_capture_says_what_it_cannot_do() {
    let folder = Folder::new("capture-refused");
    let args = ["capture", "live", "--interface", "nowhere", "-o", "live.pcap"];
    folder.run(&args).failed(2, "there is no interface nowhere", "lo");
    if PacketTap::open(None).is_ok() {
        let args = ["capture", "live", "--interface", "lo", "-o", "no/such/folder.pcap"];
        folder.run(&args).failed(2, "cannot write no/such/folder.pcap", "writable");
    } else {
        let args = ["capture", "live", "--interface", "lo", "-o", "live.pcap"];
        folder.run(&args).failed(2, "cannot listen", "setcap");
    }
}
