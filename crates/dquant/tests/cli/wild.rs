//! Files as practitioners have them, through the commands: the same answer from each, with its
//! evidence, and no document lost or made up in silence.

use super::{Folder, Ran};

fn u16s(count: u64) -> Vec<u8> {
    let mix = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (1..=count).flat_map(|i| ((mix(i) % 50_257) as u16).to_le_bytes()).collect()
}

fn llm_c(number: u32, tokens: &[u8]) -> Vec<u8> {
    let header = [number, 1, tokens.len() as u32 / 2];
    let mut file: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
    file.resize(1_024, 0);
    [&file[..], tokens].concat()
}

/// Documents of an output of `tokenize`.
fn documents(folder: &Folder, name: &str) -> u64 {
    let index = folder.read(&name.replace(".bin", ".idx"));
    u64::from_le_bytes(index[26..34].try_into().expect("8 bytes")) - 1
}

fn tokenize(folder: &Folder, inputs: &[&str], more: &[&str]) -> Ran {
    let args = ["--encoding", "r50k_base", "-o", "out.bin", "--force"];
    folder.run(&[&["tokenize"], inputs, &args, more].concat())
}

#[test]
fn every_command_reads_behind_a_known_header() {
    let folder = Folder::new("wild-known");
    let tokens = u16s(9_000);
    folder.write("gpt2.bin", llm_c(20_240_520, &tokens));
    let origin = "file: its header of 1024 bytes, as llm.c writes it";
    let report = folder.run(&["inspect", "gpt2.bin", "--json"]).good().json();
    assert_eq!((&report["tokens"], &report["dtype_origin"]), (&9_000.into(), &origin.into()));
    let report = folder.run(&["convert", "gpt2.bin", "out.npy", "--json"]).good().json();
    assert_eq!((&report["tokens"], &report["dtype_origin"]), (&9_000.into(), &origin.into()));
    assert!(folder.read("out.npy").ends_with(&tokens));
    let cat = ["cat", "gpt2.bin", "--plan", "window(64) | batch(1)", "--batches", "1", "-o", "a"];
    folder.run(&cat).good();
    assert_eq!(folder.read("a"), tokens[..128]);
    let plan = ["plan", "explain", "window(64) | batch(1)", "gpt2.bin"];
    let shown = folder.run(&plan).good().stdout;
    assert!(shown.contains("9000 tokens of u16, as its header says"), "{shown}");
    // A manifest of it is one of its tokens.
    folder.run(&["inspect", "gpt2.bin", "--write-manifest"]).good();
    folder.run(&["inspect", "gpt2.bin", "--verify"]).good();
    folder.run(&cat).good();
    assert_eq!(folder.read("a"), tokens[..128]);
}

/// As other programs do, `-` stands for standard output, and makes no file.
#[test]
fn a_dash_is_standard_output() {
    let folder = Folder::new("wild-dash");
    folder.write("a.bin", b"A\0B\0C\0D\0");
    let plan = "window(2) | batch(1)";
    let cat = ["cat", "a.bin", "--dtype", "u16", "--plan", plan, "--batches", "2"];
    for more in [&[][..], &["-o", "-"]] {
        let ran = folder.run(&[&cat, more].concat());
        assert_eq!(ran.good().stdout, "A\0B\0C\0D\0", "{more:?}");
    }
    assert!(!folder.0.join("-").exists());
    folder.run(&[&cat[..], &["-o", "./-"]].concat()).good();
    assert_eq!(folder.read("-"), b"A\0B\0C\0D\0");
}

/// A header counts more than an index beside it, and an index more than the name of an array.
#[test]
fn every_command_agrees_on_what_an_index_describes() {
    let folder = Folder::new("wild-beside");
    let tokens = u16s(9_000);
    folder.write("flat.bin", &tokens);
    folder.run(&["convert", "flat.bin", "olmo.idx"]).good();
    std::fs::remove_file(folder.0.join("olmo.bin.dquant.json")).expect("written");
    std::fs::rename(folder.0.join("olmo.bin"), folder.0.join("olmo.npy")).expect("writable");
    folder.write("gpt2.bin", llm_c(20_240_520, &tokens));
    folder.write("gpt2.idx", folder.read("olmo.idx"));
    let header = "file: its header of 1024 bytes, as llm.c writes it";
    for (name, format, origin) in [
        ("gpt2.bin", "flat", header),
        ("olmo.npy", "megatron", "file"),
        ("olmo.idx", "megatron", "file"),
    ] {
        let report = folder.run(&["inspect", name, "--json"]).good().json();
        let found = (&report["format"], &report["dtype_origin"], &report["tokens"]);
        assert_eq!(found, (&format.into(), &origin.into(), &9_000.into()), "{name}");
        let out = format!("{name}.npy");
        let report = folder.run(&["convert", name, &out, "--json"]).good().json();
        assert_eq!(report["dtype_origin"], origin, "{name}");
        assert!(folder.read(&out).ends_with(&tokens), "{name}");
    }
    for name in ["gpt2.bin", "olmo.npy"] {
        let plan = "window(64) | batch(1)";
        folder.run(&["cat", name, "--plan", plan, "--batches", "1", "-o", "a"]).good();
        assert_eq!(folder.read("a"), tokens[..128], "{name}");
        let shown = folder.run(&["plan", "explain", plan, name]).good().stdout;
        assert!(shown.contains("9000 tokens of u16, as its header says"), "{shown}");
    }
}

#[test]
fn every_command_refuses_an_unknown_header_and_other_formats() {
    let folder = Folder::new("wild-unknown");
    folder.write("own.bin", llm_c(20_250_211, &u16s(9_000)));
    folder.write("zip.bin", [&b"PK\x03\x04"[..], &u16s(9_000)].concat());
    folder.write(
        "big.bin",
        u16s(9_000).chunks(2).flat_map(|b| [0, 0, b[1], b[0]]).collect::<Vec<_>>(),
    );
    for (name, why, hint) in [
        ("own.bin", "own.bin: begins with an unknown header", "tail -c"),
        ("zip.bin", "zip.bin: is a zip archive", "numpy.save"),
        ("big.bin", "big-endian ids of 4 bytes", "--dtype"),
    ] {
        let plan = "window(64) | batch(1)";
        for args in [
            &["inspect", name][..],
            &["convert", name, "out.npy"],
            &["cat", name, "--plan", plan, "--batches", "1", "-o", "a"],
            &["cat", name, "--plan", plan, "--batches", "1", "-o", "a", "--dtype", "u16"],
            &["plan", "explain", plan, name],
        ] {
            // As u16, every second id of the big-endian file is 0.
            if name == "big.bin" && args.contains(&"--dtype") {
                continue;
            }
            folder.run(args).failed(2, why, hint);
        }
    }
}

#[test]
fn json_is_read_by_line_or_refused() {
    let folder = Folder::new("wild-json");
    let lines: String =
        (0..5).map(|n| format!("{{\"id\":{n},\"text\":\"number {n}\"}}\n")).collect();
    folder.write("part.json", &lines);
    tokenize(&folder, &["part.json"], &[]).good();
    assert_eq!(documents(&folder, "out.bin"), 5);
    #[cfg(feature = "compressed")]
    {
        folder.write("part.json.gz", super::tokenize_inputs::gzip(lines.as_bytes()));
        tokenize(&folder, &["part.json.gz"], &[]).good();
        assert_eq!(documents(&folder, "out.bin"), 5);
    }
    folder.write("list.json", format!("[{}]", lines.trim().replace('\n', ",\n")));
    folder.write("one.json", "{\n  \"text\": \"a\"\n}\n");
    folder.write("rows.csv", "id,text\n1,a\n");
    folder.write("crawl.warc", "WARC/1.0\r\n\r\n");
    for (name, what) in [
        ("list.json", "a JSON list"),
        ("one.json", "one JSON object over several lines"),
        ("rows.csv", "a table"),
        ("crawl.warc", "a web archive"),
    ] {
        tokenize(&folder, &[name], &[]).failed(2, &format!("{name} is {what}"), "--format");
        // The user knows better.
        tokenize(&folder, &[name], &["--format", "text"]).good();
        assert_eq!(documents(&folder, "out.bin"), 1);
    }
}

#[test]
fn what_lies_beside_the_texts_of_a_folder_is_left_out_and_named() {
    let folder = Folder::new("wild-folder");
    folder.write("t/a.jsonl", "{\"text\":\"a\"}\n");
    folder.write("t/dataset_info.json", "{\n  \"features\": {}\n}\n");
    folder.write("t/index.csv", "a\n");
    folder.write("t/notes.odd", "text");
    folder.write("t/main.rs", "fn main() {}");
    folder.write("t/LICENSE", "MIT");
    let ran = tokenize(&folder, &["t"], &[]).good();
    assert_eq!(documents(&folder, "out.bin"), 4);
    for note in [
        "t/dataset_info.json is left out: it is one JSON object over several lines",
        "t/index.csv is left out: it is a table",
        "t/notes.odd is read as plain text, one document: --format says otherwise",
    ] {
        assert!(ran.stderr.contains(note), "{note}: {}", ran.stderr);
    }
    assert!(!ran.stderr.contains("main.rs") && !ran.stderr.contains("LICENSE"), "{}", ran.stderr);
    tokenize(&folder, &["t"], &["--format", "text"]).good();
    assert_eq!(documents(&folder, "out.bin"), 6);
}

#[test]
fn what_describes_token_files_is_no_text() {
    let folder = Folder::new("wild-sidecars");
    folder.write("t/a.jsonl", "{\"text\":\"a\"}\n");
    folder.write("t/b.bin.dquant.json", "{}\n");
    folder.write("t/c.ds.metadata", "some/tokenizer|50257|2|1\n");
    for name in ["t/b.bin.dochash", "t/c.ds.index", "t/c.ds.loss"] {
        folder.write(name, u16s(500));
    }
    for more in [&[][..], &["--format", "jsonl", "--strict"]] {
        let ran = tokenize(&folder, &["t"], more).good();
        assert_eq!(documents(&folder, "out.bin"), 1);
        assert!(!ran.stderr.contains("read as plain text"), "{}", ran.stderr);
    }
}

#[test]
fn lines_as_python_writes_them_lose_no_document() {
    let folder = Folder::new("wild-lines");
    for (name, lines, count) in [
        (
            "nan",
            &b"{\"text\":\"one\",\"score\":NaN}\n{\"score\":-Infinity,\"text\":\"two\"}\n"[..],
            2,
        ),
        ("half", b"{\"text\":\"before \\ud83d after\"}\n{\"text\":\"two\"}\n", 2),
        ("mark", b"\xef\xbb\xbf{\"text\":\"one\"}\n\xef\xbb\xbf{\"text\":\"two\"}\n", 2),
        ("two", b"{\"text\":\"one\"}{\"text\":\"two\"}\n{\"text\":\"three\"}\n", 3),
    ] {
        folder.write("a.jsonl", lines);
        tokenize(&folder, &["a.jsonl"], &["--strict"]).good();
        assert_eq!(documents(&folder, "out.bin"), count, "{name}");
    }
    // A second object that is broken is named, and the first is kept.
    folder.write("a.jsonl", "{\"text\":\"one\"}{\"text\":\n{\"text\":\"two\"}\n");
    let summary = tokenize(&folder, &["a.jsonl"], &["--json"]).good().json();
    assert_eq!((&summary["documents"], &summary["skipped_broken"]), (&2.into(), &1.into()));
    tokenize(&folder, &["a.jsonl"], &["--strict"]).failed(1, "a.jsonl:1: ", "--strict");
}

#[cfg(feature = "compressed")]
mod compressed {
    use super::super::tokenize_inputs::gzip;
    use super::*;

    const LINES: &[u8] = b"{\"text\":\"one\"}\n{\"text\":\"two\"}\n";

    fn reads(folder: &Folder, name: &str, content: &[u8]) {
        folder.write(name, content);
        tokenize(folder, &[name], &[]).good();
        assert_eq!(documents(folder, "out.bin"), 2, "{name}");
    }

    #[test]
    fn what_lies_around_compressed_data_is_passed_over() {
        let folder = Folder::new("wild-padding");
        let zeros = |count| vec![0; count];
        reads(&folder, "a.jsonl.gz", &[gzip(LINES), zeros(512)].concat());
        reads(&folder, "b.jsonl.gz", &[gzip(LINES), zeros(100_000)].concat());
        let (first, second) = LINES.split_at(16);
        reads(&folder, "c.jsonl.gz", &[gzip(first), zeros(7), gzip(second)].concat());
        folder.write("d.jsonl.gz", [&gzip(LINES)[..], b"garbage that is no member"].concat());
        tokenize(&folder, &["d.jsonl.gz"], &[]).failed(2, "cannot read d.jsonl.gz", "damaged");
        let frame = zstd::encode_all(LINES, 1).expect("memory");
        for magic in [0x184d_2a50_u32, 0x184d_2a5f] {
            let skipped = [&magic.to_le_bytes()[..], &4_u32.to_le_bytes(), &[1, 2, 3, 4]].concat();
            reads(&folder, "e.jsonl.zst", &[skipped.clone(), frame.clone()].concat());
            reads(&folder, "f.jsonl.zst", &[frame.clone(), skipped].concat());
        }
    }

    #[test]
    fn long_windows_are_read() {
        let folder = Folder::new("wild-window");
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("memory");
        // As `zstd --long=28` and without the size, which would make the window smaller.
        encoder.window_log(28).expect("a window");
        encoder.include_contentsize(false).expect("a setting");
        std::io::Write::write_all(&mut encoder, LINES).expect("memory");
        reads(&folder, "a.jsonl.zst", &encoder.finish().expect("memory"));
    }

    #[test]
    fn a_compressed_file_of_no_bytes_is_incomplete() {
        let folder = Folder::new("wild-no-bytes");
        folder.write("t/a.jsonl.gz", gzip(LINES));
        for name in ["t/b.jsonl.gz", "t/b.jsonl.zst"] {
            folder.write(name, "");
            tokenize(&folder, &["t"], &[]).failed(2, &format!("cannot read {name}"), "incomplete");
            std::fs::remove_file(folder.0.join(name)).expect("there");
        }
        tokenize(&folder, &["t"], &[]).good();
    }
}

#[test]
fn an_index_that_forgot_documents_is_refused_by_every_command() {
    let folder = Folder::new("wild-merged");
    folder.write("a.bin", u16s(5_000));
    let mut index = b"MMIDIDX\x00\x00".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend([50_u64, 21].iter().flat_map(|count| count.to_le_bytes()));
    index.extend((0..50).flat_map(|_| 100_i32.to_le_bytes()));
    index.extend((0..50_i64).flat_map(|sequence| (200 * sequence).to_le_bytes()));
    index.extend((0..21_i64).flat_map(i64::to_le_bytes));
    folder.write("a.idx", index);
    let plan = "window(64) | batch(1)";
    for args in [
        &["documents", "a.bin"][..],
        &["inspect", "a.bin"],
        &["convert", "a.idx", "out.npy"],
        &["cat", "a.bin", "--plan", plan, "--batches", "1", "-o", "a"],
    ] {
        folder.run(args).failed(2, "ends with sequence 20, but there are 50", "Megatron-core");
    }
}
