//! Files as practitioners have them: with headers of their own, beside sidecars, in folders with
//! caches. What they hold is read, or they are refused by name; nothing else is taken for tokens.

use std::fs;
use std::path::Path;

use formats::{Error, Kind, ReadOptions};
use xio::dataset::Dtype;

#[cfg(feature = "parquet")]
use super::golden::{expected, golden};
use super::kit::{Folder, documents, flat, job, made, read, run};

fn given(dtype: Dtype) -> ReadOptions {
    ReadOptions { dtype: Some(dtype), ..ReadOptions::default() }
}

#[track_caller]
fn refused(path: &Path, options: &ReadOptions, why: &str, hint: &str) {
    let error = match formats::open(path, options) {
        Err(error) => error,
        Ok(source) => read(&*source).expect_err("refused"),
    };
    assert!(error.to_string().contains(why), "{error}");
    assert!(error.hint().contains(hint), "{}", error.hint());
}

/// Ids of one document, as bytes of this width.
fn ids(count: u64, vocabulary: u64) -> Vec<u64> {
    let mut state = 3_u64;
    let mut next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % vocabulary
    };
    (0..count).map(|_| next()).collect()
}

fn stored(ids: &[u64], width: usize) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()[..width].to_vec()).collect()
}

fn words(words: &[u32], length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(length, 0);
    bytes
}

fn signed(ids: &[u64]) -> Vec<Vec<i64>> {
    vec![ids.iter().map(|id| *id as i64).collect()]
}

#[test]
fn tokens_are_read_behind_known_headers() {
    let folder = Folder::new("wild-headers");
    let (small, wide) = (ids(9_000, 50_257), ids(9_000, 128_256));
    let lit = [&b"LITPKDS"[..], &1_u64.to_le_bytes(), &[8], &9_000_u64.to_le_bytes()].concat();
    for (name, header, ids, width, dtype) in [
        ("gpt2.bin", words(&[20_240_520, 1, 9_000], 1_024), &small, 2, Dtype::U16),
        ("llama3.bin", words(&[20_240_801, 7, 9_000], 1_024), &wide, 4, Dtype::U32),
        ("packed.bin", lit, &small, 2, Dtype::U16),
    ] {
        let path = folder.path(name);
        fs::write(&path, [header.clone(), stored(ids, width)].concat()).expect("writable");
        for options in [ReadOptions::default(), given(dtype)] {
            let source = formats::open(&path, &options).expect("valid");
            let layout = source.layout();
            assert_eq!((layout.kind, layout.dtype), (Kind::Flat, dtype));
            assert!(layout.origin.to_string().starts_with("file: its header of "), "{name}");
            assert!(layout.note.as_ref().is_some_and(|note| note.contains("behind a header")));
            assert_eq!(documents(&path, &options), signed(ids), "{name}");
        }
        refused(&path, &given(Dtype::U64), &format!("holds {dtype}, not u64"), "header");
        let output = folder.path(&format!("{name}.npy"));
        assert_eq!(run(&job(&path, &output, Kind::Npy)).tokens, 9_000);
        assert_eq!(documents(&output, &ReadOptions::default()), signed(ids), "{name}");
        // The header counts.
        fs::write(&path, [header, stored(&ids[1..], width)].concat()).expect("writable");
        refused(&path, &ReadOptions::default(), "header of its own ends early", "");
    }
}

/// A manifest that took the header for tokens is of another program's making, and does not pass.
#[test]
fn a_manifest_does_not_make_tokens_of_a_known_header() {
    let folder = Folder::new("wild-manifest");
    let path = folder.path("gpt2.bin");
    let file = [words(&[20_240_520, 1, 9_000], 1_024), stored(&ids(9_000, 50_257), 2)].concat();
    fs::write(&path, &file).expect("writable");
    let contents =
        formats::manifest::Contents { tokens: file.len() as u64 / 2, ..Default::default() };
    let manifest = formats::Manifest::create(
        ("flat", Dtype::U16),
        contents,
        path.parent().expect("a folder"),
        &["gpt2.bin".into()],
        &|_| (),
    );
    manifest.expect("readable").store(&path).expect("writable");
    refused(&path, &ReadOptions::default(), "its manifest says 9512 u16", "--write-manifest");
}

#[test]
fn unknown_headers_and_other_formats_are_refused_by_name() {
    let folder = Folder::new("wild-foreign");
    let path = folder.path("a.bin");
    let (small, wide) = (ids(9_000, 50_257), ids(9_000, 128_256));
    let write = |bytes: &[u8]| fs::write(&path, bytes).expect("writable");
    let plain = ReadOptions::default();
    for (ids, width, dtype) in [(&small, 2, Dtype::U16), (&wide, 4, Dtype::U32)] {
        let header = words(&[20_250_211, 1, 9_000], 1_024);
        write(&[header, stored(ids, width)].concat());
        for options in [&plain, &given(dtype)] {
            refused(&path, options, "begins with an unknown header", "tail -c");
        }
        // What the user insists on is done.
        let trusted = ReadOptions { trusted: true, ..given(dtype) };
        assert!(formats::open(&path, &trusted).is_ok());
        write(&stored(ids, width));
        assert_eq!(documents(&path, &given(dtype)), signed(ids));
    }
    let big: Vec<u8> = small.iter().flat_map(|id| (*id as u32).to_be_bytes()).collect();
    write(&big);
    refused(&path, &plain, "big-endian ids of 4 bytes", "--dtype");
    refused(&path, &given(Dtype::U32), "big-endian ids of 4 bytes", "--dtype");
    for (head, what, hint) in [
        (&b"PK\x03\x04\x14\0\0\0"[..], "zip archive", "numpy.save"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "gzip", "decompress"),
        (b"\x89HDF\r\n\x1a\n", "HDF5", "tofile"),
        (b"\x40\0\0\0\0\0\0\0{\"tokens\":", "safetensors", "tofile"),
        (b"GGUF\x03\0\0\0", "GGUF", "another"),
        (&20_240_522_u32.to_le_bytes(), "evaluation file of llm.c", "another"),
        (b"TNTIDX\0\0", "index of fairseq", "describes"),
        (b"DQDOCHSH", "hashes of documents", "describes"),
    ] {
        write(&[head, &stored(&small, 2)].concat());
        for options in [&plain, &given(Dtype::U16)] {
            refused(&path, options, what, hint);
        }
    }
    write(&br#"{"tokens": [15, 62, 883]}"#.repeat(90));
    refused(&path, &given(Dtype::U16), "its bytes are text", "--force");
}

#[test]
fn a_name_does_not_make_an_array() {
    let folder = Folder::new("wild-names");
    // As OLMo has them: ids alone, under the name of an array.
    let (ids, path) = (ids(9_000, 50_257), folder.path("part-0.npy"));
    fs::write(&path, stored(&ids, 2)).expect("writable");
    assert_eq!(documents(&path, &ReadOptions::default()), signed(&ids));
    // And an array under the name of a flat file.
    let path = folder.path("part-0.bin");
    let source = folder.path("part-0.npy");
    run(&job(&source, &folder.path("array.npy"), Kind::Npy));
    fs::rename(folder.path("array.npy"), &path).expect("writable");
    let opened = formats::open(&path, &ReadOptions::default()).expect("valid");
    assert_eq!((opened.layout().kind, opened.layout().dtype), (Kind::Npy, Dtype::U16));
    assert_eq!(documents(&path, &ReadOptions::default()), signed(&ids));
}

/// The target and `cat` give the same answers: a test of `engine::catalog` compares them.
#[test]
fn a_header_counts_more_than_an_index_beside_it_and_an_index_more_than_a_name() {
    let folder = Folder::new("wild-beside");
    let all = made(40, 90);
    flat(&folder.path("flat.bin"), &all);
    let mut convert = job(&folder.path("flat.bin"), &folder.path("part.idx"), Kind::Megatron);
    convert.eos = Some(50_256);
    run(&convert);
    fs::remove_file(folder.path("part.bin.dquant.json")).expect("written");
    let tokens = fs::read(folder.path("part.bin")).expect("written");
    let plain = ReadOptions::default();
    let want = documents(&folder.path("part.bin"), &plain);
    assert_eq!(want.len(), 40);
    // As OLMo has them, and with an index.
    fs::rename(folder.path("part.bin"), folder.path("part.npy")).expect("writable");
    for name in ["part.npy", "part.idx"] {
        let source = formats::open(&folder.path(name), &plain).expect("valid");
        let layout = source.layout();
        assert_eq!((layout.kind, &layout.files[0]), (Kind::Megatron, &"part.npy".into()), "{name}");
        assert_eq!(documents(&folder.path(name), &plain), want, "{name}");
    }
    let output = folder.path("part.tar");
    assert_eq!(run(&job(&folder.path("part.npy"), &output, Kind::WebDataset)).documents, Some(40));
    // An index of the same name, whose `.bin` has a header of its own.
    let header = words(&[20_240_520, 1, tokens.len() as u32 / 2], 1_024);
    fs::write(folder.path("part.bin"), [&header, &tokens[..]].concat()).expect("writable");
    let source = formats::open(&folder.path("part.bin"), &plain).expect("valid");
    assert_eq!((source.layout().kind, source.layout().dtype), (Kind::Flat, Dtype::U16));
    assert_eq!(documents(&folder.path("part.bin"), &plain), [want.concat()]);
    let output = folder.path("flat.npy");
    let done = run(&job(&folder.path("part.bin"), &output, Kind::Npy));
    assert_eq!(done.tokens, tokens.len() as u64 / 2);
}

#[test]
fn a_name_counts_where_nothing_marks_the_file() {
    let folder = Folder::new("wild-unmarked");
    let (ids, plain) = (stored(&ids(9_000, 50_257), 2), ReadOptions::default());
    let open = |name: &str, bytes: &[u8]| {
        fs::write(folder.path(name), bytes).expect("writable");
        formats::open(&folder.path(name), &plain).map(|source| source.layout().kind)
    };
    // What it holds is no archive, and no stream.
    for name in ["ids.tar", "ids.arrow"] {
        assert!(open(name, &ids).is_err(), "{name}");
    }
    assert_eq!(open("ids.parquet", &ids).expect("valid"), Kind::Flat);
    // The mark of an Arrow file has eight bytes.
    let begins = |mark: &[u8]| [mark, &ids].concat();
    assert_eq!(open("six.bin", &begins(b"ARROW1\x05\x06")).expect("valid"), Kind::Flat);
    assert!(open("eight.bin", &begins(b"ARROW1\0\0")).is_err());
    tar(&folder.path("members.bin"), "bin", std::slice::from_ref(&ids));
    refused(&folder.path("members.bin"), &plain, "the field bin does not record", "--dtype");
}

#[test]
fn sidecars_are_no_data() {
    let folder = Folder::new("wild-sidecars");
    let ends: Vec<u64> = (1..2_000).map(|n| n * 37 + n % 5).collect();
    let datatrove = ["0.ds.index", "0.ds.loss", "0.ds.metadata"];
    for name in [&datatrove[..], &["a.bin.dochash", "a.bin.dquant.json", "dquant.json"]].concat() {
        fs::write(folder.path(name), stored(&ends, 8)).expect("writable");
        refused(&folder.path(name), &given(Dtype::I64), "describes a dataset", "describes");
    }
    fs::write(folder.path("ends.bin"), stored(&ends, 8)).expect("writable");
    refused(&folder.path("ends.bin"), &ReadOptions::default(), "only rise", "--dtype");
    // Who says that they are tokens is believed.
    assert!(formats::open(&folder.path("ends.bin"), &given(Dtype::I64)).is_ok());
}

/// A tar archive of members with raw bytes.
fn tar(path: &Path, field: &str, members: &[Vec<u8>]) {
    let mut archive = tar::Builder::new(fs::File::create(path).expect("writable"));
    for (number, bytes) in members.iter().enumerate() {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        let name = format!("{number:06}.{field}");
        archive.append_data(&mut header, name, &bytes[..]).expect("writable");
    }
    archive.finish().expect("writable");
}

#[test]
fn plain_bytes_of_a_wider_type_are_noticed() {
    let folder = Folder::new("wild-plain");
    let samples: Vec<Vec<u64>> = ids(6_000, 50_257).chunks(100).map(<[u64]>::to_vec).collect();
    let members = |width| samples.iter().map(|ids| stored(ids, width)).collect::<Vec<_>>();
    let path = folder.path("a.tar");
    tar(&path, "bin", &members(8));
    refused(&path, &given(Dtype::U16), "the field bin is not u16 but i64", "--dtype");
    assert_eq!(documents(&path, &given(Dtype::I64)).len(), 60);
    tar(&path, "bin", &members(2));
    refused(&path, &given(Dtype::U32), "the field bin is not u32 but u16", "--dtype");
    assert_eq!(documents(&path, &given(Dtype::U16)).len(), 60);
    // LLM Foundry writes i64 into a column of bytes.
    let mds = folder.path("mds");
    fs::create_dir(&mds).expect("writable");
    let header = 4 + 4 * (samples.len() as u32 + 1);
    let (mut offsets, mut body) = (vec![header], Vec::new());
    for bytes in members(8) {
        body.extend((bytes.len() as u32).to_le_bytes());
        body.extend(bytes);
        offsets.push(header + body.len() as u32);
    }
    let shard =
        [words(&[samples.len() as u32], 4), words(&offsets, 4 * offsets.len()), body].concat();
    fs::write(mds.join("shard.00000.mds"), &shard).expect("writable");
    let index = format!(
        r#"{{"version":2,"shards":[{{"column_encodings":["bytes"],"column_names":["tokens"],"column_sizes":[null],
        "compression":null,"format":"mds","hashes":[],"samples":{},"version":2,"zip_data":null,
        "raw_data":{{"basename":"shard.00000.mds","bytes":{},"hashes":{{}}}}}}]}}"#,
        samples.len(),
        shard.len()
    );
    fs::write(mds.join("index.json"), index).expect("writable");
    refused(&mds, &given(Dtype::U16), "column is not u16 but i64", "--dtype");
    assert_eq!(
        documents(&mds, &given(Dtype::I64)),
        samples.iter().flat_map(|s| signed(s)).collect::<Vec<_>>()
    );
}

#[test]
fn plain_bytes_behind_a_header_are_refused() {
    let folder = Folder::new("wild-plain-header");
    let (path, ids) = (folder.path("a.tar"), ids(40_000, 50_257));
    let tokens = stored(&ids, 2);
    let array =
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<u2', 'fortran_order': False, 'shape': (40000,), }";
    let own = words(&[20_250_211, 1, 40_000], 1_024);
    let known = words(&[20_240_520, 1, 40_000], 1_024);
    for (header, what) in [
        (&own[..], "begins with an unknown header, not with u16"),
        (&known, "is not u16 but tokens behind a header"),
        (array, "is not u16 but an array with NumPy's header"),
        (b"\x1f\x8b\x08\0", "is not u16 but a gzip file"),
    ] {
        tar(&path, "bin", &[[header, &tokens].concat()]);
        refused(&path, &given(Dtype::U16), &format!("the field bin {what}"), "without a header");
    }
    // Text is no header of bytes.
    let text = b"GGUF, an acronym, is a format of files for weights. ".repeat(900);
    tar(&path, "bin", std::slice::from_ref(&text));
    assert_eq!(documents(&path, &given(Dtype::U8))[0].len(), text.len());
    // The beginning of a sample says nothing about its length.
    let chance = [&(32_766_u32).to_le_bytes(), &tokens[..]].concat();
    tar(&path, "bin", &[chance]);
    assert_eq!(documents(&path, &given(Dtype::U16))[0][2..], signed(&ids)[0]);
}

#[test]
fn an_index_that_forgot_documents_is_refused() {
    let folder = Folder::new("wild-merged");
    let all = made(40, 90);
    flat(&folder.path("flat.bin"), &all);
    let mut convert = job(&folder.path("flat.bin"), &folder.path("pair.idx"), Kind::Megatron);
    convert.eos = Some(50_256);
    run(&convert);
    let index = fs::read(folder.path("pair.idx")).expect("written");
    let documents_at = 34 + 12 * all.len();
    for kept in [0, 1, 21] {
        // A merge that forgot the list, or what follows its first part.
        let mut forgotten = index[..documents_at + 8 * kept].to_vec();
        forgotten[26..34].copy_from_slice(&(kept as u64).to_le_bytes());
        fs::write(folder.path("pair.idx"), forgotten).expect("writable");
        fs::remove_file(folder.path("pair.bin.dquant.json")).ok();
        let path = folder.path("pair.bin");
        refused(&path, &ReadOptions::default(), "the last document of the index", "Megatron-core");
    }
}

#[cfg(feature = "parquet")]
#[test]
fn a_folder_means_what_its_own_index_lists() {
    let folder = Folder::new("wild-folders");
    flat(&folder.path("a.bin"), &made(30, 60));
    flat(&folder.path("b.bin"), &made(10, 60));
    let convert = |from: &str, to: &Path, kind| {
        let mut job = job(&folder.path(from), to, kind);
        job.eos = Some(50_256);
        run(&job);
    };
    let saved = folder.path("saved");
    fs::create_dir(&saved).expect("writable");
    convert("a.bin", &saved.join("data-00000-of-00001.arrow"), Kind::Arrow);
    let want = documents(&saved.join("data-00000-of-00001.arrow"), &ReadOptions::default());
    assert_eq!(want.len(), 30);
    convert("b.bin", &saved.join("cache-0123456789abcdef.arrow"), Kind::Arrow);
    // As in a folder of the cache: no index, but a known name.
    assert_eq!(documents(&saved, &ReadOptions::default()), want);
    convert("b.bin", &saved.join("other.arrow"), Kind::Arrow);
    let state = |text: &str| fs::write(saved.join("state.json"), text).expect("writable");
    state(r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}"#);
    assert_eq!(documents(&saved, &ReadOptions::default()), want);
    state(r#"{"_data_files": [{"filename": "gone.arrow"}]}"#);
    refused(&saved, &ReadOptions::default(), "gone.arrow", "");
    state(r#"{"_data_files": [{"filename": "../a.bin"}]}"#);
    refused(&saved, &ReadOptions::default(), "names no file in the folder", "");
    state(
        r#"{"_data_files": [{"filename": "other.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]}"#,
    );
    refused(&saved, &ReadOptions::default(), "indices", "flatten_indices");
    let rows = folder.path("rows");
    fs::create_dir(&rows).expect("writable");
    convert("a.bin", &rows.join("0.parquet"), Kind::Parquet);
    for hidden in [".1.parquet", "_metadata.parquet"] {
        convert("b.bin", &rows.join(hidden), Kind::Parquet);
    }
    assert_eq!(documents(&rows, &ReadOptions::default()), want);
}

/// Arrow's Rust library pads the magic bytes of a file to 64, others to 8.
#[cfg(feature = "parquet")]
#[test]
fn arrow_files_begin_with_any_padding() {
    let folder = Folder::new("wild-padding");
    let bytes = fs::read(golden("file.arrow")).expect("it is checked in");
    let padded = [&bytes[..8], &[0; 56], &bytes[8..]].concat();
    fs::write(folder.path("padded.arrow"), padded).expect("writable");
    assert_eq!(documents(&folder.path("padded.arrow"), &ReadOptions::default()), expected());
}

#[test]
fn errors_name_the_file() {
    let folder = Folder::new("wild-errors");
    let path = folder.path("short.bin");
    fs::write(&path, 20_240_520_u32.to_le_bytes()).expect("writable");
    let error: Error = formats::open(&path, &ReadOptions::default()).err().expect("refused");
    assert!(error.to_string().contains("short.bin: header of llm.c ends early"), "{error}");
}

/// What leaves no type is named: nothing to look at, or a vocabulary that is another's.
#[test]
fn empty_files_and_other_vocabularies_are_no_doubt_about_the_type() {
    let folder = Folder::new("wild-empty");
    let path = folder.path("a.bin");
    fs::write(&path, "").expect("writable");
    refused(&path, &ReadOptions::default(), "is empty: it holds no tokens", "leave it out");
    assert_eq!(documents(&path, &given(Dtype::U16)), Vec::<Vec<i64>>::new());
    fs::write(&path, stored(&ids(20_000, 50_257), 2)).expect("writable");
    let with = |vocabulary| ReadOptions { vocabulary: Some(vocabulary), ..ReadOptions::default() };
    let why = "holds ids beyond the vocabulary of 32000, if they are u16";
    refused(&path, &with(32_000), why, "is it the tokenizer");
    assert!(formats::open(&path, &with(50_257)).is_ok());
}
