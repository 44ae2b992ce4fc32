//! `dquant inspect`: flat, NumPy and Megatron files, and files that are none of them.

use super::Folder;

fn u32s(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn u16s(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[test]
fn a_flat_file_needs_its_type() {
    let folder = Folder::new("inspect-flat");
    folder.write("a.bin", u32s(&[7, 65_535, 3]));
    let report = folder.run(&["inspect", "a.bin", "--dtype", "u32", "--json"]).good().json();
    assert_eq!(report["schema"], "dquant.inspect/1");
    assert_eq!(report["format"], "flat");
    assert_eq!(report["dtype"], "u32");
    assert_eq!(report["tokens"], 3);
    assert_eq!((&report["min_id"], &report["max_id"]), (&3.into(), &65_535.into()));
    assert_eq!(report["fits_u16"], true);
    folder.run(&["inspect", "a.bin"]).failed(2, "a.bin: has no header", "--dtype");
    folder.run(&["inspect", "a.bin", "--dtype", "u64"]).failed(
        2,
        "a.bin: length of 12 bytes",
        "another type",
    );
}

#[test]
fn datasets_of_targets_are_listed_by_another_command() {
    let folder = Folder::new("inspect-remote");
    let ran = folder.run(&["inspect", "dq://10.0.0.5/web"]);
    ran.failed(2, "has to be a file of this machine", "dquant datasets dq://HOST/NAME");
}

#[test]
fn one_id_beyond_sixteen_bits_is_seen() {
    let folder = Folder::new("inspect-wide");
    let mut ids = vec![1_u32; 300_000];
    ids[299_999] = 65_536;
    folder.write("a.bin", u32s(&ids));
    let report = folder.run(&["inspect", "a.bin", "--dtype", "u32", "--json"]).good().json();
    assert_eq!(report["max_id"], 65_536);
    assert_eq!(report["fits_u16"], false);
    folder.write("b.bin", (-1_i32).to_le_bytes());
    let report = folder.run(&["inspect", "b.bin", "--dtype", "i32", "--json"]).good().json();
    assert_eq!(report["min_id"], -1);
    assert_eq!(report["fits_u16"], false);
}

#[test]
fn an_empty_file_holds_no_ids() {
    let folder = Folder::new("inspect-empty");
    folder.write("a.bin", "");
    let ran = folder.run(&["inspect", "a.bin", "--dtype", "u16"]).good();
    assert!(ran.stdout.contains("ids          none"), "{ran:?}");
}

fn npy(descr: &str, tokens: usize, data: &[u8]) -> Vec<u8> {
    let header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({tokens},), }}\n");
    let len = u16::try_from(header.len()).expect("a short header");
    [b"\x93NUMPY\x01\x00", &len.to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn a_numpy_file_tells_its_type() {
    let folder = Folder::new("inspect-npy");
    folder.write("a.npy", npy("<u2", 3, &u16s(&[1, 2, 3])));
    let report = folder.run(&["inspect", "a.npy", "--json"]).good().json();
    assert_eq!((&report["format"], &report["dtype"]), (&"npy".into(), &"u16".into()));
    assert_eq!(report["tokens"], 3);
    folder.run(&["inspect", "a.npy", "--dtype", "u32"]).failed(2, "holds u16, not u32", "--dtype");
    folder.write("b.npy", npy("<f4", 3, &[0; 12]));
    folder.run(&["inspect", "b.npy"]).failed(2, "b.npy: dtype `<f4`", "Megatron");
    folder.write("c.npy", npy("<u2", 4, &u16s(&[1, 2, 3])));
    folder.run(&["inspect", "c.npy"]).failed(2, "c.npy: npy file ends early", "Megatron");
}

/// An index as Megatron-LM writes it, for documents of one sequence each and 16-bit tokens.
fn megatron_index(lengths: &[i32]) -> Vec<u8> {
    let mut index = b"MMIDIDX\x00\x00".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((lengths.len() as u64 + 1).to_le_bytes());
    index.extend(lengths.iter().flat_map(|len| len.to_le_bytes()));
    let mut pointer = 0_i64;
    for len in lengths {
        index.extend(pointer.to_le_bytes());
        pointer += i64::from(*len) * 2;
    }
    index.extend((0..=lengths.len() as i64).flat_map(i64::to_le_bytes));
    index
}

#[test]
fn either_half_of_a_megatron_pair_will_do() {
    let folder = Folder::new("inspect-megatron");
    folder.write("a.idx", megatron_index(&[2, 3]));
    folder.write("a.bin", u16s(&[1, 2, 3, 4, 50_000]));
    for name in ["a.idx", "a.bin"] {
        let report = folder.run(&["inspect", name, "--json"]).good().json();
        assert_eq!(report["file"], "a.bin");
        assert_eq!(report["format"], "megatron");
        assert_eq!((&report["documents"], &report["sequences"]), (&2.into(), &2.into()));
        assert_eq!((&report["tokens"], &report["max_id"]), (&5.into(), &50_000.into()));
    }
    folder.write("b.idx", megatron_index(&[2, 3]));
    folder.run(&["inspect", "b.idx"]).failed(2, "b.bin", "exists");
    folder.write("b.bin", u16s(&[1, 2, 3, 4]));
    folder.run(&["inspect", "b.bin"]).failed(2, "b.idx", "incomplete");
}

#[test]
fn bytes_behind_the_array_of_a_npy_are_a_note() {
    let folder = Folder::new("inspect-trailing");
    let dict = "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }";
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((dict.len() as u16).to_le_bytes());
    file.extend(dict.as_bytes());
    file.extend([1, 0, 2, 0, 3, 0]);
    folder.write("exact.npy", &file);
    file.extend([7; 5]);
    folder.write("more.npy", &file);
    let more = folder.run(&["inspect", "more.npy"]).good().stdout;
    assert!(more.contains("3 u16 tokens") && more.contains("5 bytes behind the array"), "{more}");
    let json = folder.run(&["inspect", "more.npy", "--json"]).good().json();
    assert_eq!((&json["tokens"], &json["trailing_bytes"]), (&3.into(), &5.into()));
    assert!(!folder.run(&["inspect", "exact.npy"]).good().stdout.contains("note"));
}
