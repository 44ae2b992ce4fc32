//! Which tokens are targets: kept from pair to pair, taken from columns, refused where a format
//! cannot say it.

use std::fs;
use std::path::Path;

use formats::convert::Job;
use formats::manifest::Contents;
use formats::{Kind, Manifest};
use xio::dataset::Dtype;
use xio::documents::{Dedup, Filter, Selection};

use super::kit::{Folder, job, refused, run};
use super::resume::stop_after;

/// Documents, each of sequences of ids.
type Sequences = Vec<Vec<Vec<i64>>>;

fn number<const N: usize>(bytes: &[u8], at: usize) -> i64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    i64::from_le_bytes(wide)
}

/// Reads a pair by the description of Megatron-core's index, with nothing of this crate. `width` is
/// that of the ids.
fn read_pair(path: &Path, width: usize) -> Sequences {
    let index = fs::read(path.with_extension("idx")).expect("an index");
    let tokens = fs::read(path.with_extension("bin")).expect("tokens");
    assert_eq!(&index[..9], b"MMIDIDX\0\0");
    let (sequences, documents) =
        (number::<8>(&index, 18) as usize, number::<8>(&index, 26) as usize);
    let (lengths, pointers, ends) = (34, 34 + 4 * sequences, 34 + 12 * sequences);
    assert_eq!(index.len(), ends + 8 * documents);
    let sequence = |at: usize| -> Vec<i64> {
        let pointer = number::<8>(&index, pointers + 8 * at) as usize;
        let bytes = &tokens[pointer..][..width * number::<4>(&index, lengths + 4 * at) as usize];
        let id = |bytes: &[u8]| match width {
            2 => number::<2>(bytes, 0),
            _ => number::<4>(bytes, 0),
        };
        bytes.chunks(width).map(id).collect()
    };
    let end = |at: usize| number::<8>(&index, ends + 8 * at) as usize;
    (1..documents).map(|at| (end(at - 1)..end(at)).map(sequence).collect()).collect()
}

/// Writes a pair of `u16` whose manifest says that its sequences take turns.
fn write_pair(path: &Path, documents: &Sequences) {
    let (mut data, mut lengths, mut pointers) = (Vec::new(), Vec::new(), Vec::new());
    let mut ends = vec![0_u64];
    for document in documents {
        for sequence in document {
            pointers.extend((data.len() as u64).to_le_bytes());
            lengths.extend((sequence.len() as u32).to_le_bytes());
            data.extend(sequence.iter().flat_map(|id| (*id as u16).to_le_bytes()));
        }
        ends.push(ends.last().expect("the start") + document.len() as u64);
    }
    let mut index = [&b"MMIDIDX\0\0"[..], &1_u64.to_le_bytes(), &[8]].concat();
    index.extend((lengths.len() as u64 / 4).to_le_bytes());
    index.extend((ends.len() as u64).to_le_bytes());
    index.extend([lengths, pointers].concat());
    index.extend(ends.iter().flat_map(|end| end.to_le_bytes()));
    let tokens = data.len() as u64 / 2;
    fs::write(path, data).expect("writable");
    fs::write(path.with_extension("idx"), index).expect("writable");
    let folder = path.parent().expect("a folder");
    let files = [path.file_name(), path.with_extension("idx").file_name()]
        .map(|name| name.expect("a name").into());
    let contents = Contents { tokens, targets: true, ..Contents::default() };
    let manifest =
        Manifest::create(("megatron", Dtype::U16), contents, folder, &files, &|_| ()).expect("new");
    manifest.store(path).expect("writable");
}

/// Documents of up to seven sequences, many of them empty.
fn made(count: usize, longest: u64) -> Sequences {
    let mut state = 5_u64;
    let mut next = move |below: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    };
    let mut sequence = |_| {
        let tokens = next(longest).saturating_sub(longest / 3);
        (0..tokens).map(|_| next(50_000) as i64).collect()
    };
    (0..count).map(|document| (0..1 + document * 5 % 7).map(&mut sequence).collect()).collect()
}

fn has_targets(path: &Path) -> bool {
    let manifest = Manifest::load(&path.with_extension("bin")).expect("valid").expect("written");
    manifest.targets
}

#[test]
fn a_pair_keeps_its_sequences() {
    let folder = Folder::new("targets-pair");
    let documents = made(200, 30);
    write_pair(&folder.path("chat.bin"), &documents);
    let convert = |name: &str, change: &dyn Fn(&mut Job)| {
        let mut job = job(&folder.path("chat.bin"), &folder.path(name), Kind::Megatron);
        change(&mut job);
        run(&job);
        assert!(has_targets(&job.output), "{name}");
        read_pair(&job.output, if job.dtype.is_some() { 4 } else { 2 })
    };
    assert!(convert("same.idx", &|_| ()) == documents);
    assert!(fs::read(folder.path("same.idx")).ok() == fs::read(folder.path("chat.idx")).ok());
    let wide = convert("wide.idx", &|job| {
        (job.dtype, job.tokenizer) = (Some(Dtype::I32), Some("cl100k_base".into()));
    });
    assert!(wide == documents);
    let filled: Sequences =
        documents.iter().filter(|document| !document.concat().is_empty()).cloned().collect();
    assert!(filled.len() < documents.len());
    assert!(convert("filled.idx", &|job| job.drop_empty = true) == filled);
    // A second time: its own output is a pair with targets, too.
    let again = job(&folder.path("wide.bin"), &folder.path("again.bin"), Kind::Megatron);
    run(&again);
    assert!(read_pair(&again.output, 4) == documents);
    // Without the word of a manifest, sequences of a document are joined.
    fs::remove_file(folder.path("chat.bin.dquant.json")).expect("written");
    let plain = job(&folder.path("chat.bin"), &folder.path("plain.bin"), Kind::Megatron);
    run(&plain);
    assert!(!has_targets(&plain.output));
    let joined: Sequences = documents.iter().map(|document| vec![document.concat()]).collect();
    assert!(read_pair(&plain.output, 2) == joined);
}

fn hash(document: &[Vec<i64>]) -> u64 {
    let ids: Vec<u8> = document.concat().iter().flat_map(|id| id.to_le_bytes()).collect();
    twox_hash::XxHash3_64::oneshot(&ids)
}

#[test]
fn documents_that_are_left_out_take_their_sequences_along() {
    let folder = Folder::new("targets-choice");
    let mut documents = made(150, 40);
    let copies = documents[20..50].to_vec();
    documents.splice(90..90, copies);
    write_pair(&folder.path("chat.bin"), &documents);
    let listed = |at: &usize| at % 4 == 1;
    let lines = (0..documents.len()).filter(listed).map(|at| hash(&documents[at]));
    let hashes: Vec<u64> = lines.collect();
    let text: String = hashes.iter().map(|hash| format!("{hash:016x}\n")).collect();
    fs::write(folder.path("list.txt"), text).expect("writable");
    for (keep, dedup) in [(true, false), (false, true), (true, true)] {
        let name = format!("{keep}-{dedup}.idx");
        let mut job = job(&folder.path("chat.bin"), &folder.path(&name), Kind::Megatron);
        let list = folder.path("list.txt").to_str().expect("UTF-8").to_owned();
        let dedup_within = dedup.then_some(Dedup::Within);
        job.selection = Selection { filter: Some(Filter { list, keep }), dedup: dedup_within };
        run(&job);
        let mut seen = Vec::new();
        let mut expected = documents.clone();
        expected.retain(|document| {
            let hash = hash(document);
            let passes = hashes.contains(&hash) == keep && !(dedup && seen.contains(&hash));
            seen.push(hash);
            passes
        });
        assert!(read_pair(&job.output, 2) == expected, "{name}");
        assert!(has_targets(&job.output));
    }
}

#[test]
fn a_run_that_was_stopped_keeps_sequences() {
    let folder = Folder::new("targets-resume");
    let documents = made(3_000, 3_000);
    write_pair(&folder.path("chat.bin"), &documents);
    let tokens = documents.iter().flatten().map(Vec::len).sum::<usize>() as u64;
    assert!(tokens > 3_000_000, "more than a few saves: {tokens}");
    let mut job = job(&folder.path("chat.bin"), &folder.path("out.idx"), Kind::Megatron);
    job.save_bytes = 300_000;
    stop_after(&job, tokens / 3);
    stop_after(&job, 2 * tokens / 3);
    let summary = run(&job);
    assert!(summary.resumed_tokens > tokens / 4, "{summary:?}");
    assert!(fs::read(folder.path("out.idx")).ok() == fs::read(folder.path("chat.idx")).ok());
    assert!(read_pair(&job.output, 2) == documents);
}

#[track_caller]
#[test]
fn what_cannot_keep_targets_is_refused() {
    let folder = Folder::new("targets-refused");
    write_pair(&folder.path("chat.bin"), &made(9, 20));
    for kind in super::kit::kinds().into_iter().filter(|kind| *kind != Kind::Megatron) {
        let job = job(&folder.path("chat.bin"), &folder.path("out"), kind);
        refused(&job, &format!("targets, which {kind} does not keep"), "--to megatron");
    }
    let mut cut = job(&folder.path("chat.bin"), &folder.path("cut.idx"), Kind::Megatron);
    cut.split = Some(10);
    refused(&cut, "--split cuts its documents anew", "leave it out");
    (cut.split, cut.eos) = (None, Some(7));
    refused(&cut, "--eos cuts its documents anew", "leave it out");
    (cut.eos, cut.read.targets) = (None, Some("labels".into()));
    refused(&cut, "is of the format megatron", "as Parquet");
    // What is left of a pair is not taken for a flat file.
    fs::remove_file(folder.path("chat.idx")).expect("written");
    let flat = job(&folder.path("chat.bin"), &folder.path("flat.npy"), Kind::Npy);
    refused(&flat, "no index that says where they are", "NAME.idx");
    let left = ["chat.bin", "chat.bin.dquant.json"];
    assert_eq!(folder.names(), left, "nothing is left behind");
}

/// A row: ids, and which of them are targets.
type Row = Vec<(i64, bool)>;

/// How a column says which tokens are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    #[cfg(feature = "parquet")]
    Booleans,
    Mask,
    Labels,
}

fn with_targets(source: &Path, output: &Path, column: &str) -> Job {
    let mut job = job(source, output, Kind::Megatron);
    (job.read.targets, job.dtype) = (Some(column.into()), Some(Dtype::I32));
    job
}

/// The rows that a pair holds, and whether its sequences take turns in as few as possible.
fn rows_of(path: &Path) -> (Vec<Row>, bool) {
    let documents = read_pair(path, 4);
    let row = |document: &Vec<Vec<i64>>| {
        let turns = document.iter().enumerate();
        turns.flat_map(|(at, ids)| ids.iter().map(move |id| (*id, at % 2 == 1))).collect()
    };
    let short = documents.iter().all(|document| {
        let empty = |ids: &Vec<i64>| ids.is_empty();
        !document.is_empty() && !document.iter().skip(1).any(empty)
    });
    (documents.iter().map(row).collect(), short)
}

#[cfg(feature = "parquet")]
mod columns {
    use std::fs::File;
    use std::sync::Arc;

    use arrow_array::builder::{BooleanBuilder, Int64Builder, LargeListBuilder, ListBuilder};
    use arrow_array::{ArrayRef, RecordBatch};
    use arrow_ipc::writer::{FileWriter, StreamWriter};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;
    use proptest::prelude::*;

    use super::*;

    /// A row group of Parquet or a batch of Arrow.
    const ROWS: usize = 3;

    fn integers(rows: &[Vec<Option<i64>>]) -> ArrayRef {
        let mut lists = ListBuilder::new(Int64Builder::new());
        rows.iter().for_each(|row| lists.append_value(row.iter().copied()));
        Arc::new(lists.finish())
    }

    fn column(rows: &[Row], form: Form) -> ArrayRef {
        let value = |(id, target): &(i64, bool)| match (form, target) {
            (Form::Labels, false) => Some(-100),
            (Form::Labels, true) => Some(*id),
            (_, target) => Some(i64::from(*target)),
        };
        if form != Form::Booleans {
            let rows: Vec<Vec<_>> =
                rows.iter().map(|row| row.iter().map(value).collect()).collect();
            return integers(&rows);
        }
        let mut lists = LargeListBuilder::new(BooleanBuilder::new());
        rows.iter().for_each(|row| lists.append_value(row.iter().map(|(_, target)| Some(*target))));
        Arc::new(lists.finish())
    }

    fn ids(rows: &[Row]) -> ArrayRef {
        let rows: Vec<Vec<_>> =
            rows.iter().map(|row| row.iter().map(|(id, _)| Some(*id)).collect()).collect();
        integers(&rows)
    }

    /// Writes a table in small parts.
    fn write(path: &Path, columns: &[(&str, ArrayRef)]) {
        let table = RecordBatch::try_from_iter(columns.iter().cloned()).expect("of one length");
        let file = File::create(path).expect("writable");
        let parts = (0..table.num_rows()).step_by(ROWS);
        let parts = parts.map(|at| table.slice(at, ROWS.min(table.num_rows() - at)));
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("parquet") => {
                let small = WriterProperties::builder().set_max_row_group_row_count(Some(ROWS));
                let mut writer =
                    ArrowWriter::try_new(file, table.schema(), Some(small.build())).expect("new");
                parts.for_each(|part| writer.write(&part).expect("writable"));
                writer.close().expect("writable");
            }
            Some("arrow") => {
                let mut writer = FileWriter::try_new(file, &table.schema()).expect("new");
                parts.for_each(|part| writer.write(&part).expect("writable"));
                writer.finish().expect("writable");
            }
            _ => {
                let mut writer = StreamWriter::try_new(file, &table.schema()).expect("new");
                parts.for_each(|part| writer.write(&part).expect("writable"));
                writer.finish().expect("writable");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn a_column_says_which_tokens_are_targets(
            rows in prop::collection::vec(prop::collection::vec((2_i64..100, any::<bool>()), 0..9), 1..20),
            form in prop_oneof![Just(Form::Booleans), Just(Form::Mask), Just(Form::Labels)],
            ending in prop_oneof![Just("parquet"), Just("arrow")],
            is_first in any::<bool>(),
        ) {
            let folder = Folder::new("targets-columns");
            let source = folder.path(&format!("rows.{ending}"));
            let mut columns = vec![("input_ids", ids(&rows)), ("wanted", column(&rows, form))];
            if is_first {
                columns.reverse();
            }
            write(&source, &columns);
            let job = with_targets(&source, &folder.path("out.bin"), "wanted");
            run(&job);
            prop_assert!(has_targets(&job.output));
            prop_assert_eq!(rows_of(&job.output), (rows, true));
        }
    }

    /// Ids 0 and 1 look like a mask; the first row that tells mask and labels apart decides.
    #[test]
    fn rows_that_fit_both_forms_follow_the_others() {
        let folder = Folder::new("targets-both");
        let pairs = |row: &[(i64, i64)]| row.iter().map(|(id, on)| (*id, *on == 1)).collect();
        let rows: Vec<Row> = vec![
            pairs(&[(0, 1), (1, 1), (1, 1)]),
            pairs(&[]),
            pairs(&[(1, 1)]),
            pairs(&[(7, 0), (0, 1), (9, 1)]),
        ];
        write(
            &folder.path("a.parquet"),
            &[("tokens", ids(&rows)), ("l", column(&rows, Form::Labels))],
        );
        let job = with_targets(&folder.path("a.parquet"), &folder.path("a.bin"), "l");
        run(&job);
        assert_eq!(rows_of(&job.output), (rows.clone(), true));
        write(
            &folder.path("b.parquet"),
            &[("tokens", ids(&rows)), ("m", column(&rows, Form::Mask))],
        );
        let job = with_targets(&folder.path("b.parquet"), &folder.path("b.bin"), "m");
        run(&job);
        assert_eq!(rows_of(&job.output), (rows, true));
    }

    /// Runs that are longer than a piece, and folders of files.
    #[test]
    fn long_rows_and_several_files_are_one_pair() {
        let folder = Folder::new("targets-long");
        fs::create_dir(folder.path("rows")).expect("writable");
        let long = |from: i64| -> Row {
            (0..400_000).map(|at| (2 + (from + at) % 30_000, at % 300_000 > 140_000)).collect()
        };
        let mut expected = Vec::new();
        for (name, from) in [("rows/0.parquet", 0), ("rows/1.parquet", 9_000)] {
            let rows = vec![long(from), vec![(5, true)], long(from + 3)];
            write(&folder.path(name), &[("ids", ids(&rows)), ("on", column(&rows, Form::Labels))]);
            expected.extend(rows);
        }
        let mut job = with_targets(&folder.path("rows"), &folder.path("out.idx"), "on");
        job.save_bytes = 500_000;
        stop_after(&job, 700_000);
        assert!(run(&job).resumed_tokens > 0);
        assert!(rows_of(&job.output) == (expected, true));
    }

    #[test]
    fn columns_that_do_not_fit_are_refused_by_row() {
        let folder = Folder::new("targets-bad");
        let some = |row: &[i64]| -> Vec<Option<i64>> { row.iter().copied().map(Some).collect() };
        let good = some(&[-100, 6, 7]);
        let tokens = integers(&vec![some(&[5, 6, 7]); 5]);
        let refuse = |fourth: Vec<Option<i64>>, why: &str, hint: &str| {
            let rows = [good.clone(), good.clone(), good.clone(), good.clone(), fourth];
            for name in ["bad.parquet", "bad.arrow", "bad.stream"] {
                write(
                    &folder.path(name),
                    &[("tokens", tokens.clone()), ("labels", integers(&rows))],
                );
                let mut job = with_targets(&folder.path(name), &folder.path("out.bin"), "labels");
                job.read.kind = (name == "bad.stream").then_some(Kind::Arrow);
                refused(&job, why, hint);
            }
        };
        let other = "row 4: token 1 is 6, and `labels` holds 5 for it";
        refuse(some(&[-100, 5, 7]), other, "labels hold -100 or the token itself");
        refuse(some(&[1, 6, 7]), "row 4: token 0 is 5, and `labels` holds 1", "a mask holds 1");
        refuse(some(&[-100, 6]), "row 4: `labels` holds 2 values for 3 tokens", "a mask");
        refuse(vec![Some(5), None, Some(7)], "row 4: a list or a value in it is missing", "drop");
        let mut job = with_targets(&folder.path("bad.parquet"), &folder.path("out.bin"), "mask");
        refused(&job, "has no column \"mask\"", "tokens, labels");
        job.read.targets = Some("tokens".into());
        job.read.column = Some("tokens".into());
        refused(&job, "0 of its columns", "--column");
        job = with_targets(&folder.path("bad.parquet"), &folder.path("out.npy"), "labels");
        job.write.kind = Kind::Npy;
        refused(&job, "which npy does not keep", "--to megatron");
        let words = Arc::new(arrow_array::StringArray::from(vec!["a", "b", "c", "d", "e"]));
        write(&folder.path("text.parquet"), &[("tokens", tokens.clone()), ("text", words)]);
        let job = with_targets(&folder.path("text.parquet"), &folder.path("out.bin"), "text");
        refused(&job, "holds no lists of booleans or integers", "a mask");
        assert!(
            !folder.names().iter().any(|name| name.starts_with("out") || name.starts_with('.'))
        );
    }
}

/// Samples of MosaicML, written by the description of the format.
pub(crate) mod samples {
    use proptest::prelude::*;

    use super::*;

    /// How a column of numbers is stored.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Stored {
        /// `ndarray`: every value of a sample has a header with type and shape.
        Dynamic,
        /// `ndarray:int64`.
        Typed,
        Bytes,
        /// A byte for each value.
        Narrow,
        /// `ndarray:float32`, a quarter of each value.
        Quarters,
        /// The same with a header with type and shape.
        DynamicQuarters,
    }

    fn encoded(values: &[i64], stored: Stored) -> Vec<u8> {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        // One axis of two bytes.
        let shape = [&[1 << 2 | 1][..], &(values.len() as u16).to_le_bytes()].concat();
        let quarters = || -> Vec<u8> {
            values.iter().flat_map(|value| (*value as f32 / 4.0).to_le_bytes()).collect()
        };
        match stored {
            Stored::Dynamic => [&[65][..], &shape, &bytes].concat(),
            Stored::Typed => [shape, bytes].concat(),
            Stored::Bytes => bytes,
            Stored::Narrow => values.iter().map(|value| *value as u8).collect(),
            Stored::Quarters => [shape, quarters()].concat(),
            Stored::DynamicQuarters => [&[34][..], &shape, &quarters()].concat(),
        }
    }

    const NAMES: [&str; 3] = ["id", "input_ids", "wanted"];

    /// Writes samples of three columns, the last two in this order or the other one, as shards of
    /// two.
    pub(crate) fn write(
        path: &Path,
        samples: &[(Vec<i64>, Vec<i64>)],
        stored: [Stored; 2],
        is_first: bool,
    ) {
        fs::create_dir(path).expect("writable");
        let order = if is_first { [0, 2, 1] } else { [0, 1, 2] };
        let encodings = ["int", "", ""].iter().zip([None, Some(stored[0]), Some(stored[1])]);
        let encodings: Vec<&str> = encodings
            .map(|(other, stored)| match stored {
                None => other,
                Some(Stored::Dynamic | Stored::DynamicQuarters) => "ndarray",
                Some(Stored::Quarters) => "ndarray:float32",
                Some(Stored::Typed) => "ndarray:int64",
                Some(_) => "bytes",
            })
            .collect();
        let quoted = |texts: &[&str]| order.map(|at| format!("{:?}", texts[at])).join(",");
        let mut shards = Vec::new();
        for (number, samples) in samples.chunks(2).enumerate() {
            let header = 4 + 4 * (samples.len() as u32 + 1);
            let (mut offsets, mut body) = (header.to_le_bytes().to_vec(), Vec::new());
            for (ids, marks) in samples {
                let columns = [
                    7_i64.to_le_bytes().to_vec(),
                    encoded(ids, stored[0]),
                    encoded(marks, stored[1]),
                ];
                let variable = order.into_iter().filter(|at| *at > 0);
                body.extend(variable.flat_map(|at| (columns[at].len() as u32).to_le_bytes()));
                body.extend(order.iter().flat_map(|at| &columns[*at]));
                offsets.extend((header + body.len() as u32).to_le_bytes());
            }
            let shard = [(samples.len() as u32).to_le_bytes().to_vec(), offsets, body].concat();
            let name = format!("shard.{number:05}.mds");
            fs::write(path.join(&name), &shard).expect("writable");
            shards.push(format!(
                r#"{{"column_encodings":[{}],"column_names":[{}],"column_sizes":[8,null,null],"compression":null,
                "format":"mds","hashes":[],"samples":{},"version":2,"zip_data":null,
                "raw_data":{{"basename":"{name}","bytes":{},"hashes":{{}}}}}}"#,
                quoted(&encodings),
                quoted(&NAMES),
                samples.len(),
                shard.len()
            ));
        }
        let index = format!(r#"{{"version":2,"shards":[{}]}}"#, shards.join(","));
        fs::write(path.join("index.json"), index).expect("writable");
    }

    fn of(rows: &[Row], form: Form) -> Vec<(Vec<i64>, Vec<i64>)> {
        let mark = |(id, target): &(i64, bool)| match (form, target) {
            (Form::Labels, false) => -100,
            (Form::Labels, true) => *id,
            _ => i64::from(*target),
        };
        let sample =
            |row: &Row| (row.iter().map(|(id, _)| *id).collect(), row.iter().map(mark).collect());
        rows.iter().map(sample).collect()
    }

    fn stored() -> impl Strategy<Value = Stored> {
        prop_oneof![Just(Stored::Dynamic), Just(Stored::Typed), Just(Stored::Bytes)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_column_of_samples_says_which_tokens_are_targets(
            rows in prop::collection::vec(prop::collection::vec((2_i64..100, any::<bool>()), 0..9), 1..9),
            // A column of tokens that is chosen by its name.
            tokens in prop_oneof![Just(Stored::Dynamic), Just(Stored::Typed)],
            marks in stored(),
            form in prop_oneof![Just(Form::Mask), Just(Form::Labels)],
            is_first in any::<bool>(),
        ) {
            let folder = Folder::new("targets-samples");
            write(&folder.path("mds"), &of(&rows, form), [tokens, marks], is_first);
            let job = with_targets(&folder.path("mds"), &folder.path("out.bin"), "wanted");
            run(&job);
            prop_assert!(has_targets(&job.output));
            prop_assert_eq!(rows_of(&job.output), (rows, true));
        }
    }

    /// As LLM Foundry writes tokens, with masks of one byte.
    #[test]
    fn plain_bytes_are_as_wide_as_the_tokens_or_one_each() {
        let folder = Folder::new("targets-plain");
        let rows: Vec<Row> =
            vec![vec![(300, false), (301, true), (302, true)], vec![], vec![(900, true)]];
        for (at, (form, marks)) in
            [(Form::Labels, Stored::Bytes), (Form::Mask, Stored::Narrow)].into_iter().enumerate()
        {
            let source = folder.path(&format!("mds{at}"));
            write(&source, &of(&rows, form), [Stored::Bytes, marks], false);
            let mut job = with_targets(&source, &folder.path(&format!("{at}.bin")), "wanted");
            job.read.dtype = Some(Dtype::I64);
            run(&job);
            assert_eq!(rows_of(&job.output), (rows.clone(), true));
        }
    }

    #[test]
    fn samples_that_do_not_fit_are_refused_by_number() {
        let folder = Folder::new("targets-bad-samples");
        let good = (vec![5, 6, 7], vec![-100, 6, 7]);
        let mut count = 0;
        let mut refuse = |marks: &[i64], why: &str| {
            count += 1;
            let source = folder.path(&format!("mds{count}"));
            let samples =
                [good.clone(), good.clone(), good.clone(), (good.0.clone(), marks.to_vec())];
            write(&source, &samples, [Stored::Typed; 2], false);
            let job = with_targets(&source, &folder.path("out.bin"), "wanted");
            refused(&job, why, "a mask holds 1");
        };
        // The second of the second shard.
        refuse(&[-100, 5, 7], "sample 1: token 1 is 6, and `wanted` holds 5 for it");
        refuse(&[1, 6, 7], "sample 1: token 0 is 5, and `wanted` holds 1");
        refuse(&[-100, 6], "sample 1: `wanted` holds 2 values for 3 tokens");
        // Labels of the token behind, in all samples.
        let short = vec![(vec![5, 6, 7], vec![6, 7]); 3];
        write(&folder.path("short"), &short, [Stored::Typed; 2], false);
        let job = with_targets(&folder.path("short"), &folder.path("out.bin"), "wanted");
        refused(&job, "sample 0: `wanted` holds 2 values for 3 tokens", "not the one behind it");
        // An index with columns as long as a number can say.
        let huge = fs::read_to_string(folder.path("short").join("index.json")).expect("written");
        let huge = huge.replace("[8,null,null]", "[null,18446744073709551615,null]");
        fs::write(folder.path("short").join("index.json"), huge).expect("writable");
        refused(&job, "its columns have 18446744073709551615 bytes", "");
        let source = folder.path("mds1");
        let mut job = with_targets(&source, &folder.path("out.bin"), "mask");
        refused(
            &job,
            "column \"mask\" does not exist or holds no integers",
            "wanted (ndarray:int64)",
        );
        job.read.targets = Some("id".into());
        refused(&job, "column \"id\" does not exist or holds no integers", "id (int)");
        (job.read.targets, job.read.column) = (Some("wanted".into()), Some("wanted".into()));
        refused(&job, "cannot hold two of tokens, targets", "its columns are");
        let zeros = vec![(vec![0, 1, 1], vec![0, 1, 1]); 2];
        write(&folder.path("unclear"), &zeros, [Stored::Typed; 2], false);
        let job = with_targets(&folder.path("unclear"), &folder.path("out.bin"), "wanted");
        refused(&job, "may be a mask or labels", "Parquet");
        assert!(
            !folder.names().iter().any(|name| name.starts_with("out") || name.starts_with('.'))
        );
    }
}
