//! `dquant convert`, and manifests: as a user meets them.

use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use super::{Folder, Ran, skip};

/// Ids as a tokenizer makes them, with documents that end with 50,256.
fn ids(count: u64) -> Vec<u32> {
    let mix = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (1..=count).map(|i| if i % 500 == 0 { 50_256 } else { (mix(i) % 50_000) as u32 }).collect()
}

fn stored(ids: &[u32], bytes: usize) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()[..bytes].to_vec()).collect()
}

#[test]
fn a_dataset_goes_round_through_other_formats() {
    let folder = Folder::new("convert-round");
    let ids = ids(20_000);
    folder.write("web.bin", stored(&ids, 4));
    let steps: [&[&str]; 6] = [
        &["web.bin", "pair.idx", "--eos", "50256", "--tokenizer", "r50k_base"],
        &["pair.idx", "mds", "--to", "mds", "--zstd", "3", "--shard-size", "20KiB"],
        &["mds", "web.parquet", "--to-column", "input_ids"],
        &["web.parquet", "lit", "--to", "litdata", "--to-dtype", "u16"],
        &["lit", "web.tar"],
        &["web.tar", "back.bin", "--to-dtype", "u32"],
    ];
    let mut digests = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        let ran = folder.run(&[&["convert"], *step, &["--json"]].concat()).good();
        // Only a flat file without a manifest is a guess.
        assert_eq!(ran.stderr.contains("u32 is a guess"), at == 0, "{step:?}: {}", ran.stderr);
        let report = ran.json();
        assert_eq!(report["schema"], "dquant.convert/1");
        assert_eq!(
            (&report["documents"], &report["eos"]),
            (&40.into(), &50_256.into()),
            "{step:?}"
        );
        digests.push(report["digest"].clone());
        folder.run(&["inspect", step[1], "--verify"]).good();
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
    assert_eq!(folder.read("back.bin"), folder.read("web.bin"));
    let report = folder.run(&["inspect", "back.bin", "--json"]).good().json();
    assert_eq!(
        (&report["dtype_origin"], &report["tokenizer"]),
        (&"manifest".into(), &"r50k_base".into())
    );
}

#[test]
fn what_cannot_be_converted_is_named() {
    let folder = Folder::new("convert-refused");
    let mut large = ids(3_000);
    large[1_234] = 70_000;
    folder.write("web.bin", stored(&large, 4));
    folder.write("taken.npy", "precious");
    folder.write("word.txt", "some words\n".repeat(100));
    let run = |args: &[&str]| folder.run(&[&["convert"], args].concat());
    run(&["web.bin", "narrow.bin", "--to-dtype", "u16"]).failed(
        1,
        "web.bin: token 1234 has id 70000, which u16 cannot hold",
        "--to-dtype u32",
    );
    run(&["web.bin", "taken.npy"]).failed(2, "taken.npy: exists", "another name");
    run(&["web.bin", "v1.2", "--to", "megatron"]).failed(2, "v1.2", ".idx");
    run(&["web.bin", "somewhere"]).failed(2, "somewhere tells no format", "--to");
    run(&["none", "a.bin"]).failed(2, "none", "exists");
    run(&["web.bin", "a.bin", "--dtype", "u16"]).failed(2, "is not u16 but u32", "--dtype");
    // Seen in the samples, and where no sample shows it.
    run(&["web.bin", "a.bin", "--vocab", "60000"]).failed(2, "web.bin", "");
    let mut rare = ids(400_000);
    rare[100_001] = 50_300;
    folder.write("rare.bin", stored(&rare, 4));
    run(&["rare.bin", "a.npy", "--vocab", "50257"]).failed(
        1,
        "rare.bin: token 100001 has id 50300, beyond the vocabulary of 50257",
        "tokenizer",
    );
    std::fs::remove_file(folder.0.join("rare.bin")).expect("written");
    run(&["word.txt", "a.bin"]).failed(2, "text", "--dtype");
    run(&["web.bin", "a.bin", "--zstd", "3"]).failed(2, "--zstd does not go with flat", "mds");
    let left = std::fs::read_dir(&folder.0).expect("readable").count();
    assert_eq!(left, 3, "nothing is left behind");
}

#[test]
fn a_killed_run_goes_on() {
    let folder = Folder::new("convert-killed");
    let data = stored(&ids(24_000_000), 2);
    folder.write("web.bin", &data);
    let args = ["convert", "web.bin", "out.npy", "--dtype", "u16", "--save-every", "1MiB"];
    let mut run =
        folder.command(&args).stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("starts");
    let journal = folder.0.join(".out.npy.dquant-convert/journal.json");
    let mut looks = 0;
    while !journal.exists() && looks < 6_000 {
        assert!(
            run.try_wait().expect("a child").is_none() || journal.exists(),
            "it ended too early"
        );
        sleep(Duration::from_millis(1));
        looks += 1;
    }
    run.kill().expect("a child");
    run.wait().expect("a child");
    assert!(!folder.0.join("out.npy").exists());
    let ran = folder.run(&args).good();
    assert!(ran.stderr.contains("going on after"), "{}", ran.stderr);
    assert!(folder.read("out.npy")[128..] == data, "the array is the file");
    assert!(!folder.0.join(".out.npy.dquant-convert").exists());
}

#[test]
fn a_full_disk_leaves_nothing_under_the_name() {
    let folder = Folder::new("convert-full");
    folder.write("web.bin", stored(&ids(3_000_000), 2));
    let program = env!("CARGO_BIN_EXE_dquant");
    let script = format!(
        "mount -t tmpfs -o size=2m none small || exit 77\n\
         {program} convert web.bin small/out.npy --save-every 256KiB; echo exit $?; ls -A small"
    );
    folder.write("small/.keep", "");
    let mut command = std::process::Command::new("unshare");
    let output = command.args(["-rm", "sh", "-c", &script]).current_dir(&folder.0).output();
    let Some(ran) = output.ok().map(|output| Ran::new(&output)).filter(|ran| ran.exit == Some(0))
    else {
        skip::note(
            "a_full_disk_leaves_nothing_under_the_name",
            "no tmpfs in a namespace of its own",
        );
        return;
    };
    assert!(ran.stderr.contains("No space left on device"), "{ran:?}");
    assert!(ran.stderr.contains("hint: free some space and run the same command again"), "{ran:?}");
    assert!(ran.stdout.starts_with("exit 2\n"), "{ran:?}");
    let names: Vec<&str> = ran.stdout.lines().skip(1).collect();
    assert!(names.iter().all(|name| name.starts_with('.')), "{names:?}");
}

#[test]
fn manifests_are_written_verified_and_believed() {
    let folder = Folder::new("manifests");
    let ids = ids(2_000);
    folder.write("web.bin", stored(&ids, 2));
    let inspect = |args: &[&str]| folder.run(&[&["inspect", "web.bin"], args].concat());
    inspect(&["--verify"]).failed(2, "web.bin has no manifest", "--write-manifest");
    inspect(&["--dtype", "u32"]).failed(2, "is not u32 but u16", "--force");
    inspect(&["--vocab", "50000"]).failed(2, "web.bin", "");
    folder.run(&["convert", "web.bin", "web.npy"]).good();
    std::fs::remove_file(folder.0.join("web.npy.dquant.json")).expect("written");
    folder.run(&["inspect", "web.npy", "--vocab", "50257"]).good();
    folder.run(&["inspect", "web.npy", "--vocab", "50256"]).failed(
        2,
        "beyond the vocabulary",
        "tokenizer",
    );
    let written =
        ["--dtype", "u16", "--eos", "50256", "--tokenizer", "r50k_base", "--write-manifest"];
    inspect(&written).good();
    let report = inspect(&["--verify", "--json"]).good().json();
    assert_eq!((&report["documents"], &report["tokenizer"]), (&4.into(), &"r50k_base".into()));
    inspect(&["--dtype", "u32"]).failed(2, "u16 according to its manifest, not u32", "--dtype");
    let mut changed = stored(&ids, 2);
    changed[3_000] ^= 1;
    folder.write("web.bin", &changed);
    inspect(&["--verify"]).failed(1, "web.bin: block 0", "disk");
    folder.write("web.bin", &changed[2..]);
    inspect(&[]).failed(2, "has 3998 bytes, its manifest describes 4000", "--write-manifest");
    inspect(&["--write-manifest", "--dtype", "u16"]).good();
    inspect(&["--verify"]).good();
    // What the bytes deny needs a word of its own.
    inspect(&["--write-manifest", "--dtype", "u8"]).failed(2, "is not u8 but u16", "--force");
    inspect(&["--write-manifest", "--dtype", "u8", "--force"]).good();
    assert_eq!(inspect(&["--json"]).good().json()["tokens"], 3_998);
}

#[test]
fn tokenize_writes_a_manifest() {
    let folder = Folder::new("manifest-tokenize");
    folder.write("a.txt", "It was the best of times, it was the worst of times. ".repeat(40));
    folder.write("b.txt", "Call me Ishmael. ".repeat(40));
    let tokenize = ["tokenize", "a.txt", "b.txt", "--encoding", "r50k_base", "-o"];
    for (output, origin) in [(&["t.bin", "--flat"][..], "manifest"), (&["pair.bin"], "file")] {
        folder.run(&[&tokenize, output].concat()).good();
        let ran = folder.run(&["inspect", output[0], "--verify", "--json"]).good();
        assert_eq!(ran.stderr, "");
        let report = ran.json();
        assert_eq!((&report["dtype_origin"], &report["documents"]), (&origin.into(), &2.into()));
    }
    let report = folder.run(&["convert", "t.bin", "again.idx", "--json"]).good().json();
    assert_eq!((&report["documents"], &report["eos"]), (&2.into(), &50_256.into()));
}

/// The hashes that `dquant documents` shows, of all documents.
fn hashes(folder: &Folder, name: &str) -> Vec<String> {
    folder.run(&["documents", name, "--hash"]).good();
    let listing = folder.run(&["documents", name, "--hashes", "--json"]).good().json();
    serde_json::from_value(listing["hashes"].clone()).expect("digits")
}

/// What a plan with `filter`, `filter(keep=)` and `dedup` keeps is what `convert` writes.
#[test]
fn only_the_wanted_documents_are_written() {
    let folder = Folder::new("convert-choice");
    let mut ids = ids(30_000);
    // The documents of 500 tokens from 10 on are those before, once more.
    let (first, second) = ids.split_at_mut(5_000);
    second[..5_000].copy_from_slice(first);
    folder.write("all.bin", stored(&ids, 2));
    let run = |args: &[&str]| folder.run(&[&["convert"], args, &["--json"]].concat());
    run(&["all.bin", "web.idx", "--eos", "50256", "--tokenizer", "r50k_base"]).good();
    let all = hashes(&folder, "web.bin");
    assert_eq!((all.len(), &all[..10]), (60, &all[10..20]));
    let listed: Vec<usize> = (0..60).filter(|document| document % 7 == 3).collect();
    let lines: Vec<String> = listed.iter().map(|document| all[*document].clone() + "\n").collect();
    folder.write("list.txt", lines.concat());
    let in_list = |document: &usize| listed.iter().any(|other| all[*other] == all[*document]);
    let is_first = |document: &usize| !all[..*document].contains(&all[*document]);
    let every: Vec<usize> = (0..60).collect();
    let only = |wanted: &dyn Fn(&usize) -> bool| -> Vec<usize> {
        every.iter().copied().filter(|document| wanted(document)).collect()
    };
    for (name, args, wanted) in [
        ("keep", &["--keep", "list.txt"][..], only(&in_list)),
        ("filter", &["--filter", "list.txt"], only(&|document| !in_list(document))),
        ("dedup", &["--dedup", "within"], only(&is_first)),
        (
            "both",
            &["--keep", "list.txt", "--dedup", "within"],
            only(&|document| in_list(document) && is_first(document)),
        ),
    ] {
        let output = format!("{name}.idx");
        let summary = run(&[&["web.bin", &output][..], args].concat()).good().json();
        let tokens = wanted.iter().flat_map(|document| &ids[500 * document..][..500]);
        let expected: Vec<u32> = tokens.copied().collect();
        let output = format!("{name}.bin");
        assert!(folder.read(&output) == stored(&expected, 2), "{name}: other documents");
        let expected: Vec<&String> = wanted.iter().map(|document| &all[*document]).collect();
        assert_eq!(hashes(&folder, &output).iter().collect::<Vec<_>>(), expected, "{name}");
        assert_eq!(summary["documents"], wanted.len());
        // As the listing counts them.
        let listing = folder.run(&[&["documents", "web.bin", "--json"], args].concat()).good();
        let counts =
            ["filtered_documents", "filtered_tokens", "duplicate_documents", "duplicate_tokens"];
        for count in counts {
            assert_eq!(summary[count], listing.json()[count], "{name}: {count}");
        }
        let report = folder.run(&["inspect", &output, "--verify", "--json"]).good().json();
        assert_eq!(
            (&report["tokenizer"], report["documents"].as_u64()),
            (&"r50k_base".into(), Some(wanted.len() as u64))
        );
    }
    // From a flat file, into another format, cut.
    let cut = ["all.bin", "lit", "--to", "litdata", "--eos", "50256", "--split", "100"];
    let summary = run(&[&cut[..], &["--filter", "list.txt"]].concat()).good().json();
    let left = only(&|document| !in_list(document)).len();
    assert_eq!(summary["documents"], 5 * left);
    std::fs::remove_file(folder.0.join("web.bin")).expect("written");
    run(&["all.bin", "a.idx", "--keep", "list.txt"]).failed(2, "no documents to choose", "--eos");
}

#[test]
fn lists_that_leave_nothing_or_are_none_are_refused() {
    let folder = Folder::new("convert-choice-refused");
    folder.write("web.bin", stored(&ids(5_000), 2));
    folder.write("none.txt", "0000000000000000\n");
    folder.write("bad.txt", "0xff\n");
    let run = |args: &[&str]| {
        folder.run(&[&["convert", "web.bin", "out.idx", "--eos", "50256"], args].concat())
    };
    run(&["--keep", "none.txt"]).failed(2, "none of its 10 documents is kept", "documents");
    run(&["--keep", "bad.txt"]).failed(2, "bad.txt: line 1 is not a hash", "16 hexadecimal");
    run(&["--filter", "no.txt"]).failed(2, "no.txt", "exists");
    run(&["--filter", "."]).failed(2, "is not a file", "a list is");
    run(&["--filter", "none.txt", "--keep", "none.txt"]).failed(2, "cannot be used with", "");
    assert_eq!(std::fs::read_dir(&folder.0).expect("readable").count(), 3, "nothing is left");
}

/// The lengths of the sequences of each document in a Megatron index.
fn sequences(index: &[u8]) -> Vec<Vec<u32>> {
    let number = |at: usize| u64::from_le_bytes(index[at..at + 8].try_into().expect("8 bytes"));
    let (count, documents) = (number(18) as usize, number(26) as usize);
    let length =
        |at: usize| index[34 + 4 * at..].first_chunk().map(|four| u32::from_le_bytes(*four));
    let end = |at: usize| number(34 + 12 * count + 8 * at) as usize;
    let lengths = |at: usize| (end(at - 1)..end(at)).filter_map(length).collect();
    (1..documents).map(lengths).collect()
}

/// Rows that pyarrow wrote, whose targets are every second run of three.
#[cfg(feature = "parquet")]
#[test]
fn a_column_of_targets_becomes_sequences() {
    let folder = Folder::new("convert-targets");
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../formats/tests/golden/");
    let rows = std::fs::read(format!("{golden}targets.parquet")).expect("it is checked in");
    folder.write("sft.parquet", rows);
    let documents: Vec<Vec<u32>> = serde_json::from_slice(
        &std::fs::read(format!("{golden}documents.json")).expect("it is checked in"),
    )
    .expect("documents");
    let expected: Vec<Vec<bool>> = (0..)
        .zip(&documents)
        .map(|(row, ids)| (0..ids.len()).map(|at| (row + at) / 3 % 2 == 1).collect())
        .collect();
    let run = |args: &[&str]| folder.run(&[&["convert"], args].concat());
    for column in ["labels", "flags", "mask"] {
        let (bin, idx) = (format!("{column}.bin"), format!("{column}.idx"));
        let args = ["sft.parquet", &bin, "--column", "input_ids", "--targets", column, "--json"];
        let summary = run(&args).good().json();
        let targets = expected.iter().flatten().filter(|is_target| **is_target).count();
        assert_eq!(
            (&summary["documents"], &summary["targets"]),
            (&documents.len().into(), &targets.into())
        );
        let held = folder.run(&["inspect", &bin, "--json"]).good().json();
        assert_eq!((&held["targets"], &held["target_tokens"]), (&true.into(), &targets.into()));
        assert!(folder.read(&bin) == stored(&documents.concat(), 2));
        let kinds = |lengths: &Vec<u32>| -> Vec<bool> {
            let turns = lengths.iter().enumerate();
            turns.flat_map(|(at, length)| (0..*length).map(move |_| at % 2 == 1)).collect()
        };
        let found: Vec<Vec<bool>> = sequences(&folder.read(&idx)).iter().map(kinds).collect();
        assert_eq!(found, expected, "{column}");
        folder.run(&["inspect", &bin, "--verify"]).good();
    }
    // What names no pair is refused, and so is what a pair cannot become.
    let flat = ["sft.parquet", "flat.bin", "--targets", "mask", "--column", "input_ids"];
    let hint = "name it NAME.idx, or add --to megatron";
    run(&[&flat[..], &["--to", "flat"]].concat()).failed(2, "which flat does not keep", hint);
    run(&["labels.idx", "out.npy"]).failed(2, "labels.idx: says which tokens are targets", hint);
    run(&["labels.bin", "out.bin"]).failed(2, "which flat does not keep", hint);
    run(&["labels.bin", "again.idx", "--to-dtype", "i32"]).good();
    assert_eq!(sequences(&folder.read("again.idx")), sequences(&folder.read("labels.idx")));
    run(&["sft.parquet", "o.idx", "--column", "mask", "--targets", "labels"]).failed(
        2,
        "sft.parquet: row 1: token 2 is 1, and `labels` holds",
        "labels hold -100 or the token itself",
    );
    // What is not read is named.
    let ran = run(&["sft.parquet", "plain.npy", "--column", "input_ids"]).good();
    assert!(ran.stderr.contains("column `labels` is not read"), "{}", ran.stderr);
    // The wrong column is not passed on in silence.
    let ran = run(&["sft.parquet", "labels.npy", "--column", "labels"]).good();
    assert!(ran.stderr.contains("ids begin at -100"), "{}", ran.stderr);
    run(&["sft.parquet", "v.npy", "--column", "labels", "--vocab", "60000"])
        .failed(1, "id -100", "");
}
