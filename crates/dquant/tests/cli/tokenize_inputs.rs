//! `dquant tokenize`: what it reads, from which containers, and what it leaves out.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use tiktoken_rs::CoreBPE;

use super::seeds::{Replay, seeds};
use super::tokenize::words;
use super::{Folder, Ran};

/// A generator with a fixed stream per seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound.max(1)
    }

    /// Text of fewer than `parts` parts that vocabularies treat differently.
    pub(super) fn text(&mut self, parts: usize) -> String {
        const PARTS: &[&str] = &[
            "hello",
            " world",
            "It isn't",
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "1234567",
            "…",
            "中文",
            "。",
            "é",
            "e\u{301}",
            "😀",
            "\u{3000}",
            "\u{feff}",
            "/",
            "=>",
            "'S",
            "<|endoftext|>",
            "</s>",
            "SHOUTing",
            "ſ",
            "\u{0}",
            "dquant",
        ];
        (0..self.below(parts)).map(|_| PARTS[self.below(PARTS.len())]).collect()
    }
}

/// The ids of each document of an output, by its index.
pub(super) fn documents(folder: &Folder, name: &str) -> Vec<Vec<u32>> {
    let index = folder.read(&name.replace(".bin", ".idx"));
    let number = |at: usize| u64::from_le_bytes(index[at..][..8].try_into().expect("8 bytes"));
    let (sequences, ends) = (number(18) as usize, number(26) as usize);
    assert_eq!(ends, sequences + 1, "one sequence per document");
    let (lengths, _) = index[34..][..4 * sequences].as_chunks::<4>();
    let mut ids = words(&folder.read(name)).into_iter();
    let documents: Vec<Vec<u32>> = lengths
        .iter()
        .map(|length| ids.by_ref().take(u32::from_le_bytes(*length) as usize).collect())
        .collect();
    assert_eq!(ids.next(), None, "every id belongs to a document");
    documents
}

/// A line of JSON, and the document it holds: `Err` when it is broken, `None` when there is nothing
/// to count.
type Line = (Vec<u8>, Result<Option<String>, ()>);

fn line(random: &mut Random) -> Line {
    let text = match random.below(40) {
        0 => random.text(20_000),
        _ => random.text(60),
    };
    let json =
        serde_json::json!({ "id": 7, "text": text, "more": [null, { "text": 1 }] }).to_string();
    match random.below(12) {
        0 => (Vec::new(), Ok(None)),
        1 => (b" \t".to_vec(), Ok(None)),
        2 => (json.as_bytes()[..json.len() - 1 - random.below(5)].to_vec(), Err(())),
        3 => ([b"{\"text\":\"", &[0xff][..], b"\"}"].concat(), Err(())),
        4 => (br#"{"other":"text"}"#.to_vec(), Err(())),
        5 => (br#"{"text":null}"#.to_vec(), Err(())),
        _ => (json.into_bytes(), Ok(Some(text))),
    }
}

/// The lines of a file with either line end, perhaps a byte order mark, perhaps no end of the last
/// line.
fn file_of(lines: &[Line], random: &mut Random) -> Vec<u8> {
    let mut file = Vec::new();
    if random.below(3) == 0 {
        file.extend("\u{feff}".as_bytes());
    }
    for (line, _) in lines {
        file.extend(line);
        file.extend(if random.below(2) == 0 { &b"\n"[..] } else { b"\r\n" });
    }
    if random.below(2) == 0 {
        file.pop();
    }
    file
}

fn ids(bpe: &CoreBPE, text: &str) -> Vec<u32> {
    let mut ids = bpe.encode_ordinary(text);
    ids.push(50_256);
    ids
}

#[test]
fn random_lines_become_their_documents() {
    let bpe = tiktoken_rs::r50k_base().expect("ranks");
    let folder = Folder::new("tokenize-jsonl");
    for seed in seeds(0..12) {
        let _replay = Replay { test: "random_lines_become_their_documents", seed };
        let mut random = Random::new(seed);
        let lines: Vec<Line> = (0..=random.below(120)).map(|_| line(&mut random)).collect();
        let wanted: Vec<&str> = lines
            .iter()
            .filter_map(|(_, text)| text.as_ref().ok()?.as_deref())
            .filter(|text| !text.is_empty())
            .collect();
        folder.write("a.jsonl", file_of(&lines, &mut random));
        let args = ["tokenize", "a.jsonl", "--encoding", "r50k_base", "-o", "a.bin", "--json"];
        let jobs = ["--force", "--jobs", "3", "--chunk", "64KiB"];
        let ran = folder.run(&[&args[..], &jobs].concat());
        if wanted.is_empty() {
            assert_eq!(ran.exit, Some(1), "{ran:?}");
            continue;
        }
        let summary = ran.good().json();
        let wanted: Vec<Vec<u32>> = wanted.iter().map(|text| ids(&bpe, text)).collect();
        assert!(documents(&folder, "a.bin") == wanted, "seed {seed}: other documents");
        let broken = lines.iter().filter(|(_, text)| text.is_err()).count();
        let empty = lines.iter().filter(|(_, text)| *text == Ok(Some(String::new()))).count();
        assert_eq!(summary["skipped_broken"], broken);
        assert_eq!(summary["skipped_empty"], empty);
        let first = lines.iter().position(|(_, text)| text.is_err());
        let place = first.map(|at| format!("a.jsonl:{}: ", at + 1)).unwrap_or_default();
        assert!(summary["first_broken"].as_str().unwrap_or("").starts_with(&place));
        let strict = folder.run(&[&args[..], &["--force", "--strict"]].concat());
        match first {
            Some(_) => strict.failed(1, &place, "without --strict"),
            None => drop(strict.good()),
        }
    }
}

#[test]
fn random_files_become_their_documents() {
    let bpe = tiktoken_rs::r50k_base().expect("ranks");
    for seed in seeds(0..8) {
        let _replay = Replay { test: "random_files_become_their_documents", seed };
        let folder = Folder::new(&format!("tokenize-files-{seed}"));
        let mut random = Random::new(seed);
        let (mut wanted, mut not_utf8, mut empty) = (Vec::new(), 0, 0);
        for file in 100..100 + 1 + random.below(20) {
            let name = format!("t/{file}.txt");
            // Some files are longer than a chunk, and invalid only behind it.
            let parts = [60, 60, 60, 60_000][random.below(4)];
            let mut content = random.text(parts).into_bytes();
            if random.below(3) == 0 {
                content.extend([b'x', 0xc3]);
                not_utf8 += 1;
            } else if content.is_empty() {
                empty += 1;
            } else {
                wanted.push(ids(&bpe, str::from_utf8(&content).expect("text")));
            }
            folder.write(&name, content);
        }
        let args = ["tokenize", "t", "--encoding", "r50k_base", "-o", "a.bin", "--json"];
        let ran = folder.run(&[&args[..], &["--jobs", "3", "--chunk", "64KiB"]].concat());
        if wanted.is_empty() {
            assert_eq!(ran.exit, Some(1), "{ran:?}");
            continue;
        }
        let summary = ran.good().json();
        assert!(documents(&folder, "a.bin") == wanted, "seed {seed}: other documents");
        assert_eq!(summary["skipped_not_utf8"], not_utf8);
        assert_eq!(summary["skipped_empty"], empty);
        let ran = folder.run(&[&args[..], &["--force", "--strict"]].concat());
        assert_eq!(ran.exit, Some(i32::from(not_utf8 > 0)), "{ran:?}");
    }
}

/// Runs with this on standard input.
fn piped(folder: &Folder, args: &[&str], input: &[u8]) -> Ran {
    let mut command = folder.command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    // The program may stop before it has read everything.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no panic");
    Ran::new(&output)
}

#[test]
fn standard_input_is_text_or_what_the_user_says() {
    let folder = Folder::new("tokenize-stdin");
    let args = ["tokenize", "-", "--encoding", "r50k_base", "-o", "a.bin"];
    piped(&folder, &args, b"hello world").good();
    assert_eq!(documents(&folder, "a.bin"), [[31373, 995, 50256]]);
    let lines = b"{\"body\":\"hello\"}\n{\"body\":\"hello world\"}\n";
    let args = [&args[..], &["--force", "--format", "jsonl", "--field", "body"]].concat();
    piped(&folder, &args, lines).good();
    assert_eq!(documents(&folder, "a.bin"), [&[31373, 50256][..], &[31373, 995, 50256]]);
    let ran = piped(&folder, &[&args[..], &["-"]].concat(), b"");
    ran.failed(2, "standard input is named twice", "once");
}

#[test]
fn the_end_of_a_document_can_be_left_out_or_chosen() {
    let folder = Folder::new("tokenize-eos-choice");
    folder.write("a.txt", "hello");
    let base = ["tokenize", "a.txt", "--encoding", "cl100k_base", "-o", "a.bin", "--json"];
    for (eos, id) in [("none", None), ("7", Some(7)), ("<|fim_prefix|>", Some(100_258))] {
        let summary = folder.run(&[&base[..], &["--force", "--eos", eos]].concat()).good().json();
        assert_eq!(summary["eos"], serde_json::to_value(id).expect("a number"));
        let ids: Vec<u32> = [15339].into_iter().chain(id).collect();
        assert_eq!(documents(&folder, "a.bin"), [ids]);
    }
    let ran = folder.run(&[&base[..], &["--force", "--eos", "</s>"]].concat());
    ran.failed(2, "cl100k_base has no token `</s>`", "--eos");
}

#[test]
fn an_output_without_index_is_asked_for() {
    let folder = Folder::new("tokenize-flat");
    folder.write("a.txt", "hello");
    let args = ["tokenize", "a.txt", "--encoding", "r50k_base", "-o"];
    folder.run(&[&args[..], &["a.tokens"]].concat()).failed(2, "a.tokens is no name", "--flat");
    folder.run(&[&args[..], &["a.tokens", "--flat"]].concat()).good();
    assert_eq!(words(&folder.read("a.tokens")), [31373, 50256]);
    assert!(!folder.0.join("a.idx").exists());
    // An index of an earlier output would not match.
    folder.run(&[&args[..], &["a.bin"]].concat()).good();
    assert!(folder.0.join("a.idx").exists());
    folder.run(&[&args[..], &["a.bin", "--flat", "--force"]].concat()).good();
    assert!(!folder.0.join("a.idx").exists());
}

#[test]
fn documents_are_appended_to_an_output() {
    let folder = Folder::new("tokenize-append");
    folder.write("a.txt", "hello world");
    folder.write("b.jsonl", "{\"text\":\"hello\"}\n{\"text\":\"world\"}\n");
    let run = |input: &str, more: &[&str]| {
        let args = ["tokenize", input, "--encoding", "r50k_base", "-o", "a.bin", "--json"];
        folder.run(&[&args[..], more].concat())
    };
    run("a.txt", &["--append", "--dtype", "u16"]).good();
    let summary = run("b.jsonl", &["--append"]).good().json();
    assert_eq!(summary["dtype"], "u16", "as the output");
    assert_eq!((&summary["tokens"], &summary["tokens_before"]), (&4.into(), &3.into()));
    let inspected = folder.run(&["inspect", "a.bin", "--json"]).good().json();
    assert_eq!((&inspected["documents"], &inspected["tokens"]), (&3.into(), &7.into()));
    let before = folder.read("a.bin");
    run("b.jsonl", &["--append", "--dtype", "u32"]).failed(2, "cannot append u32", "--dtype");
    run("none.jsonl", &["--append"]).failed(2, "none.jsonl", "");
    folder.write("a.idx", "broken");
    run("b.jsonl", &["--append"]).failed(2, "cannot append: a.idx: ", "inspect");
    fs::remove_file(folder.0.join("a.idx")).expect("there");
    let ran = run("b.jsonl", &["--append"]);
    assert_eq!(ran.exit, Some(2), "{ran:?}");
    assert_eq!(folder.read("a.bin"), before);
    run("b.jsonl", &["--append", "--flat", "--dtype", "u16"]).good();
    assert_eq!(folder.read("a.bin").len(), before.len() + 8);
}

#[test]
fn the_manifest_describes_the_output_and_what_was_appended() {
    let folder = Folder::new("tokenize-manifest");
    folder.write("a.txt", "hello world");
    folder.write("b.txt", "hello");
    let run = |input: &str, encoding: &str, more: &[&str]| {
        let args = ["tokenize", input, "--encoding", encoding, "-o", "a.bin"];
        folder.run(&[&args[..], more].concat())
    };
    let check = |documents: u32, tokenizer: Option<&str>, eos: Option<u32>| {
        folder.run(&["inspect", "a.bin", "--verify"]).good();
        let manifest: serde_json::Value =
            serde_json::from_slice(&folder.read("a.bin.dquant.json")).expect("JSON");
        assert_eq!(manifest["documents"], documents);
        assert_eq!(manifest.get("tokenizer").and_then(|name| name.as_str()), tokenizer);
        assert_eq!(manifest.get("eos"), eos.map(serde_json::Value::from).as_ref());
    };
    run("a.txt", "cl100k_base", &[]).good();
    check(1, Some("cl100k_base"), Some(100_257));
    run("b.txt", "cl100k_base", &["--append"]).good();
    check(2, Some("cl100k_base"), Some(100_257));
    let before = folder.read("a.bin");
    let ran = run("b.txt", "r50k_base", &["--append"]);
    ran.failed(2, "a.bin.dquant.json: the ids are those of cl100k_base", "--force");
    let ran = run("b.txt", "cl100k_base", &["--append", "--eos", "none"]);
    ran.failed(2, "end with id 100257 there, and with no id of their own now", "--force");
    assert_eq!(folder.read("a.bin"), before);
    // What is not known of the old part is not said of the whole.
    fs::remove_file(folder.0.join("a.bin.dquant.json")).expect("there");
    run("b.txt", "cl100k_base", &["--append"]).good();
    check(3, None, None);
    // An id that occurs in text marks no end.
    run("a.txt", "cl100k_base", &["--eos", "7", "--force"]).good();
    check(1, Some("cl100k_base"), None);
    run("a.txt", "cl100k_base", &["--flat", "--force"]).good();
    check(1, Some("cl100k_base"), Some(100_257));
    run("b.txt", "cl100k_base", &["--flat", "--append"]).good();
    check(2, Some("cl100k_base"), Some(100_257));
    folder.write("a.bin.dquant.json", "{}");
    let ran = run("b.txt", "cl100k_base", &["--flat", "--append"]);
    assert!(ran.exit != Some(0) && ran.stderr.contains("a.bin.dquant.json"), "{ran:?}");
}

/// A line of more than the 64 MiB that are read at once.
#[test]
fn a_line_that_is_too_long_is_passed_over() {
    let folder = Folder::new("tokenize-long-line");
    let long = format!("{{\"text\":\"{}\"}}\n", "x".repeat(65 << 20));
    let lines = ["{\"text\":\"hello\"}\n", &long, "{\"text\":\"world\"}"].concat();
    folder.write("a.jsonl", lines);
    let args = ["tokenize", "a.jsonl", "--encoding", "r50k_base", "-o", "a.bin", "--json"];
    let summary = folder.run(&args).good().json();
    assert_eq!(summary["documents"], 2);
    assert_eq!(summary["first_broken"], "a.jsonl:2: longer than 64 MiB");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_build_without_parquet_says_so() {
    let folder = Folder::new("tokenize-no-parquet");
    folder.write("a.parquet", "PAR1");
    let args = ["tokenize", "a.parquet", "--encoding", "r50k_base", "-o", "a.bin"];
    folder.run(&args).failed(2, "a.parquet needs the feature `parquet`", "--features full");
}

#[cfg(not(feature = "compressed"))]
#[test]
fn a_build_without_decompression_says_so() {
    let folder = Folder::new("tokenize-no-compressed");
    folder.write("a.gz", [0x1f, 0x8b, 8, 0]);
    folder.write("b.zst", [0x28, 0xb5, 0x2f, 0xfd]);
    for name in ["a.gz", "b.zst"] {
        let args = ["tokenize", name, "--encoding", "r50k_base", "-o", "a.bin"];
        folder.run(&args).failed(2, "needs the feature `compressed`", "--features full");
    }
}

#[cfg(feature = "compressed")]
pub(super) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(bytes).expect("memory");
    gzip.finish().expect("memory")
}

#[cfg(feature = "compressed")]
mod compressed {
    use super::*;

    #[test]
    fn compressed_inputs_are_read_as_if_they_were_not() {
        let folder = Folder::new("tokenize-compressed");
        let mut random = Random::new(5);
        let lines: Vec<Line> = (0..400).map(|_| line(&mut random)).collect();
        let plain = file_of(&lines, &mut random);
        let (first, second) = plain.split_at(plain.len() / 2);
        // Both formats may consist of several members, one after the other.
        let zst = |bytes: &[u8]| zstd::encode_all(bytes, 1).expect("memory");
        let containers = [
            ("b.jsonl.gz", [gzip(first), gzip(second)].concat()),
            ("c.ndjson.zst", [zst(first), zst(second)].concat()),
            ("d.JSONL.ZST", zst(&plain)),
        ];
        folder.write("a.jsonl", &plain);
        let args = ["--encoding", "r50k_base", "-o", "a.bin", "--force"];
        let run = |name: &str| folder.run(&[&["tokenize", name][..], &args].concat()).good();
        run("a.jsonl");
        let (ids, index) = (folder.read("a.bin"), folder.read("a.idx"));
        for (name, content) in &containers {
            folder.write(name, content);
            run(name);
            assert!(folder.read("a.bin") == ids && folder.read("a.idx") == index, "{name}");
            let args = [&["tokenize", "-", "--format", "jsonl"][..], &args].concat();
            piped(&folder, &args, content).good();
            assert!(folder.read("a.bin") == ids && folder.read("a.idx") == index, "{name} piped");
        }
    }

    #[test]
    fn damaged_compression_is_an_error_and_leaves_no_output() {
        let folder = Folder::new("tokenize-damaged");
        let text = Random::new(3).text(9_000);
        let zst = zstd::encode_all(text.as_bytes(), 1).expect("memory");
        for (name, content) in [("a.txt.gz", gzip(text.as_bytes())), ("a.txt.zst", zst)] {
            let args = ["tokenize", name, "--encoding", "r50k_base", "-o", "a.bin"];
            folder.write(name, &content[..content.len() * 2 / 3]);
            folder.run(&args).failed(2, &format!("cannot read {name}"), "incomplete");
            let mut flipped = content.clone();
            let middle = flipped.len() / 2;
            for byte in &mut flipped[middle..middle + 8] {
                *byte ^= 0x55;
            }
            folder.write(name, flipped);
            folder.run(&args).failed(2, &format!("cannot read {name}"), "");
            folder.write(name, "not compressed");
            folder.run(&args).failed(2, "is not compressed with", "rename");
            folder.write(name, "");
            folder.run(&args).failed(2, &format!("cannot read {name}"), "incomplete");
        }
        assert!(!folder.0.join("a.bin").exists());
    }
}

#[cfg(feature = "parquet")]
pub(super) mod parquet_files {
    use std::sync::Arc;

    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// A file with a number and a text per row, in groups of so many rows.
    pub(crate) fn parquet(rows: &[Option<Vec<u8>>], group: usize, codec: Compression) -> Vec<u8> {
        let schema = "message rows { required int32 id; optional binary text (UTF8); }";
        let schema = Arc::new(parse_message_type(schema).expect("a schema"));
        let properties = WriterProperties::builder().set_compression(codec);
        let properties = Arc::new(properties.set_data_page_size_limit(1 << 12).build());
        let mut file = SerializedFileWriter::new(Vec::new(), schema, properties).expect("memory");
        for rows in rows.chunks(group) {
            let mut out = file.next_row_group().expect("memory");
            let mut column = out.next_column().expect("memory").expect("id");
            let ids: Vec<i32> = (0..rows.len() as i32).collect();
            column.typed::<Int32Type>().write_batch(&ids, None, None).expect("memory");
            column.close().expect("memory");
            let mut column = out.next_column().expect("memory").expect("text");
            let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
            let texts: Vec<ByteArray> =
                rows.iter().flatten().map(|row| ByteArray::from(row.clone())).collect();
            let written = column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None);
            assert_eq!(written.expect("memory"), texts.len());
            column.close().expect("memory");
            out.close().expect("memory");
        }
        file.into_inner().expect("memory")
    }

    #[test]
    fn random_rows_become_their_documents() {
        let bpe = tiktoken_rs::r50k_base().expect("ranks");
        let folder = Folder::new("tokenize-parquet");
        for seed in seeds(0..8) {
            let _replay = Replay { test: "random_rows_become_their_documents", seed };
            let mut random = Random::new(seed);
            let row = |random: &mut Random| match random.below(8) {
                0 => None,
                1 => Some(vec![b'a', 0xff]),
                _ => Some(random.text(40).into_bytes()),
            };
            let rows: Vec<Option<Vec<u8>>> = (0..900).map(|_| row(&mut random)).collect();
            let codecs = [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::LZ4_RAW];
            let file = parquet(&rows, 1 + random.below(400), codecs[random.below(3)]);
            folder.write("a.parquet", &file);
            let args = ["--encoding", "r50k_base", "-o", "a.bin", "--force", "--json"];
            let ran = folder.run(&[&["tokenize", "a.parquet"][..], &args].concat()).good();
            let texts = rows.iter().flatten().filter_map(|row| str::from_utf8(row).ok());
            let wanted: Vec<Vec<u32>> =
                texts.filter(|text| !text.is_empty()).map(|text| ids(&bpe, text)).collect();
            assert!(documents(&folder, "a.bin") == wanted, "seed {seed}: other documents");
            let broken = |row: &&Option<Vec<u8>>| {
                row.as_ref().is_none_or(|row| str::from_utf8(row).is_err())
            };
            let first = rows.iter().position(|row| broken(&row)).expect("one of 900");
            let summary = ran.json();
            assert_eq!(summary["skipped_broken"], rows.iter().filter(broken).count());
            let place = format!("a.parquet, row {first}: ");
            assert!(summary["first_broken"].as_str().expect("one").starts_with(&place));
            let args = [&["tokenize", "-", "--format", "parquet"][..], &args].concat();
            piped(&folder, &args, &file).good();
            assert!(documents(&folder, "a.bin") == wanted, "seed {seed}: piped");
            assert!(!folder.0.join(".a.bin.spool").exists());
        }
    }

    #[test]
    fn broken_parquet_files_and_columns_are_named() {
        let folder = Folder::new("tokenize-bad-parquet");
        let file = parquet(&[Some(b"hello".to_vec())], 1, Compression::UNCOMPRESSED);
        let run = |field: &str| {
            let args = ["tokenize", "a.parquet", "--encoding", "r50k_base", "-o", "a.bin"];
            folder.run(&[&args[..], &["--force", "--field", field]].concat())
        };
        folder.write("a.parquet", &file);
        run("body").failed(2, "no text column `body`: the columns are id, text", "--field");
        run("id").failed(2, "no text column `id`: it holds INT32", "--field");
        for cut in [0, 3, file.len() / 2, file.len() - 1] {
            folder.write("a.parquet", &file[..cut]);
            run("text").failed(2, "a.parquet: ", "incomplete");
        }
        // Damage anywhere is an error or another text, never a panic.
        for seed in seeds(0..40) {
            let _replay = Replay { test: "broken_parquet_files_and_columns_are_named", seed };
            let mut damaged = file.clone();
            damaged[Random::new(seed).below(file.len())] ^= 0xff;
            folder.write("a.parquet", damaged);
            let ran = run("text");
            assert!(matches!(ran.exit, Some(0..=2)) && !ran.stderr.contains("panicked"), "{ran:?}");
        }
    }
}
