//! `dquant capture check`: captures between two kernels, whole and damaged.

use std::fs;
use std::path::{Path, PathBuf};

use super::Folder;

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
