//! Loss weights: taken from columns, kept beside the tokens from file to file, refused where they
//! do not fit.

use std::fs;
use std::path::Path;

use formats::convert::{self, Job};
use formats::{Kind, Manifest};
use proptest::prelude::*;
use xio::dataset::Dtype;
use xio::documents::{Dedup, Selection};

use super::kit::{Folder, documents, job, refused, run};
use super::resume::stop_after;
use super::targets::samples::{self, Stored};

/// Rows of ids, and of quarters of weights.
type Rows = Vec<Vec<(i64, i64)>>;

/// The weights of a `.npy` of `float32`, by the description of NumPy's format.
fn weights_of(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).expect("weights");
    let head = u16::from_le_bytes([bytes[8], bytes[9]]) as usize + 10;
    let text = String::from_utf8_lossy(&bytes[10..head]).into_owned();
    assert!(text.contains("'<f4'") && text.contains("'fortran_order': False"), "{text}");
    let values = bytes[head..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let values: Vec<f32> = values.collect();
    assert!(text.contains(&format!("({},)", values.len())), "{text}");
    values
}

/// Writes a `.npy` of `float32`.
fn write_weights(path: &Path, weights: &[f32]) {
    let count = weights.len();
    let dict = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({count},), }}");
    let text = format!("{dict:117}\n");
    let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
    bytes.extend(text.as_bytes());
    assert_eq!(bytes.len(), 128);
    bytes.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
    fs::write(path, bytes).expect("writable");
}

fn with_weights(source: &Path, output: &Path, kind: Kind) -> Job {
    let mut job = job(source, output, kind);
    (job.read.loss_weights, job.dtype) = (Some("wanted".into()), Some(Dtype::I32));
    job
}

/// The documents of a dataset with their weights, which have to have a manifest.
fn read(path: &Path) -> Vec<Vec<(i64, f32)>> {
    let beside = path.with_extension("loss_weights.npy");
    let weights = weights_of(&beside);
    let manifest = Manifest::load(&beside).expect("valid").expect("written");
    assert_eq!((manifest.dtype(), manifest.tokens), (Dtype::F32, weights.len() as u64));
    let mut weights = weights.into_iter();
    let row = |ids: Vec<i64>| {
        ids.into_iter().map(|id| (id, weights.next().expect("one for each"))).collect()
    };
    let documents = documents(path, &Default::default());
    let rows = documents.into_iter().map(row).collect();
    assert_eq!(weights.count(), 0);
    rows
}

fn expected(rows: &Rows) -> Vec<Vec<(i64, f32)>> {
    let row = |row: &Vec<(i64, i64)>| row.iter().map(|(id, of)| (*id, *of as f32 / 4.0)).collect();
    rows.iter().map(row).collect()
}

fn columns(rows: &Rows) -> Vec<(Vec<i64>, Vec<i64>)> {
    rows.iter().map(|row| row.iter().copied().unzip()).collect()
}

fn rows() -> impl Strategy<Value = Rows> {
    prop::collection::vec(prop::collection::vec((0_i64..100, -3_i64..20), 0..9), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Weights follow their tokens from samples to a pair, and from pair to pair, to an array and
    /// to a flat file.
    #[test]
    fn weights_follow_their_tokens(
        rows in rows(),
        weights in prop_oneof![Just(Stored::Quarters), Just(Stored::DynamicQuarters)],
        is_first in any::<bool>(),
        (drops, dedup, split) in (any::<bool>(), any::<bool>(), prop::option::of(1u64..5)),
    ) {
        let folder = Folder::new("weights-samples");
        samples::write(&folder.path("mds"), &columns(&rows), [Stored::Dynamic, weights], is_first);
        let pair = with_weights(&folder.path("mds"), &folder.path("out.bin"), Kind::Megatron);
        let summary = run(&pair);
        prop_assert_eq!(summary.loss_weights, Some(folder.path("out.loss_weights.npy")));
        prop_assert_eq!(read(&pair.output), expected(&rows));
        let mut next = job(&pair.output, &folder.path("next.idx"), Kind::Megatron);
        (next.read.weights_beside, next.drop_empty, next.split) = (true, drops, split);
        next.selection = Selection { filter: None, dedup: dedup.then_some(Dedup::Within) };
        next.dtype = Some(Dtype::U16);
        let (mut kept, mut seen): (Rows, Vec<Vec<i64>>) = (Vec::new(), Vec::new());
        for row in &rows {
            let ids: Vec<i64> = row.iter().map(|(id, _)| *id).collect();
            let repeated = dedup && seen.contains(&ids);
            seen.push(ids);
            if repeated || drops && row.is_empty() {
                continue;
            }
            match split {
                Some(split) if !row.is_empty() => kept.extend(row.chunks(split as usize).map(<[_]>::to_vec)),
                _ => kept.push(row.clone()),
            }
        }
        run(&next);
        prop_assert_eq!(read(&folder.path("next.bin")), expected(&kept));
        for (name, kind) in [("flat.bin", Kind::Flat), ("array.npy", Kind::Npy)] {
            let mut run_on = job(&folder.path("next.bin"), &folder.path(name), kind);
            run_on.read.weights_beside = true;
            run(&run_on);
            let all = weights_of(&folder.path(name).with_extension("loss_weights.npy"));
            let wanted: Vec<f32> = expected(&kept).concat().iter().map(|(_, weight)| *weight).collect();
            prop_assert_eq!(all, wanted);
        }
    }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_its_weights() {
    let folder = Folder::new("weights-resume");
    let row = |from: i64| (0..40_000).map(|at| (at % 30_000, (from + at) % 4_001)).collect();
    let rows: Rows = (0..60).map(|at| row(at * 7)).collect();
    samples::write(
        &folder.path("mds"),
        &columns(&rows),
        [Stored::Dynamic, Stored::Quarters],
        false,
    );
    let mut job = with_weights(&folder.path("mds"), &folder.path("out.bin"), Kind::Megatron);
    job.save_bytes = 400_000;
    stop_after(&job, 700_000);
    stop_after(&job, 1_500_000);
    let names = folder.names();
    assert!(names.iter().all(|name| !name.starts_with("out.")), "{names:?}");
    assert!(run(&job).resumed_tokens > 400_000);
    assert!(read(&job.output) == expected(&rows));
    assert_eq!(folder.names().len(), 6, "two files, weights, two manifests, and the source");
}

/// A run that ends while it gives its files their names is repeated, and leaves what one leaves
/// that did not.
#[test]
fn files_that_were_named_before_the_end_are_taken_back() {
    for (kind, output) in [(Kind::Megatron, "out.bin"), (Kind::Npy, "out.npy")] {
        let folder = Folder::new(&format!("weights-named-{kind}"));
        let rows: Rows = (0..50).map(|at| vec![(at, at), (at + 1, 2)]).collect();
        samples::write(
            &folder.path("mds"),
            &columns(&rows),
            [Stored::Dynamic, Stored::Quarters],
            false,
        );
        let of = |name: &str| with_weights(&folder.path("mds"), &folder.path(name), kind);
        let job = of(output);
        run(&of(&output.replace("out", "whole")));
        // The last of the names cannot be given.
        let manifest = folder.path(&format!("{output}.dquant.json"));
        fs::create_dir(&manifest).expect("writable");
        convert::convert(&job, &mut |_| ()).expect_err("the manifest cannot get its name");
        assert!(folder.path(output).exists(), "it was named before");
        fs::remove_dir(&manifest).expect("empty");
        run(&job);
        for name in folder.names().iter().filter(|name| name.starts_with("whole")) {
            let same = fs::read(folder.path(name)).ok()
                == fs::read(folder.path(&name.replace("whole", "out"))).ok();
            assert!(same || name.ends_with("json"), "{name}");
        }
        let count =
            |start: &str| folder.names().iter().filter(|name| name.starts_with(start)).count();
        assert_eq!((count("out"), count("."), count("whole")), (count("whole"), 0, count("out")));
        // An output that is complete is refused, and stays.
        refused(&job, "exists", "choose another name");
        assert!(folder.path(output).exists());
    }
}

#[track_caller]
#[test]
fn what_is_no_weight_is_refused() {
    let folder = Folder::new("weights-refused");
    let rows: Rows = vec![vec![(5, 4), (6, 2)], vec![(7, 1)]];
    let mut samples = columns(&rows);
    samples::write(&folder.path("good"), &samples, [Stored::Dynamic, Stored::Quarters], false);
    samples[1].1.push(9);
    samples::write(&folder.path("bad"), &samples, [Stored::Dynamic, Stored::Quarters], false);
    let of = |name: &str, kind| with_weights(&folder.path(name), &folder.path("out.bin"), kind);
    refused(&of("bad", Kind::Megatron), "sample 1: `wanted` holds 2 values for 1 tokens", "finite");
    let mut job = of("good", Kind::Megatron);
    job.read.loss_weights = Some("weights".into());
    refused(
        &job,
        "column \"weights\" does not exist or holds no float32",
        "wanted (ndarray:float32)",
    );
    (job.read.loss_weights, job.read.targets) = (Some("wanted".into()), Some("wanted".into()));
    refused(&job, "\"wanted\" does not exist or holds no integers", "wanted (ndarray:float32)");
    for kind in super::kit::kinds() {
        if matches!(kind, Kind::Flat | Kind::Npy | Kind::Megatron) {
            continue;
        }
        let mut job = of("good", kind);
        job.output = folder.path("out");
        refused(&job, &format!("has loss weights, which {kind} does not keep"), "DST.npy");
    }
    // Weights that lie where those of the output would be seen.
    write_weights(&folder.path("out.loss_weights.npy"), &[1.0]);
    refused(&of("good", Kind::Megatron), "out.loss_weights.npy: exists", "remove it");
    fs::remove_file(folder.path("out.loss_weights.npy")).expect("written");
    fs::write(folder.path("flat.bin"), [1, 0, 2, 0, 3, 0]).expect("writable");
    let mut job = self::job(&folder.path("flat.bin"), &folder.path("copy.npy"), Kind::Npy);
    (job.read.dtype, job.read.weights_beside) = (Some(Dtype::U16), true);
    write_weights(&folder.path("flat.loss_weights.npy"), &[1.0, 2.0]);
    refused(&job, "holds 2 loss weights for the 3 tokens", "a float32 for each token");
    write_weights(&folder.path("flat.loss_weights.npy"), &[1.0, 2.0, 0.5]);
    job.read.loss_weights = Some("w".into());
    refused(&job, "a column of loss weights is read of parquet", "as Parquet");
    job.read.loss_weights = None;
    run(&job);
    assert_eq!(weights_of(&folder.path("copy.loss_weights.npy")), [1.0, 2.0, 0.5]);
    // Written over, after a manifest was made of them.
    write_weights(&folder.path("copy.loss_weights.npy"), &[1.0, 2.0]);
    let mut again = self::job(&folder.path("copy.npy"), &folder.path("again.npy"), Kind::Npy);
    again.read.weights_beside = true;
    refused(&again, "holds 2 loss weights", "a float32 for each token");
    assert!(!folder.names().iter().any(|name| name.starts_with('.') || name.starts_with("again")));
}

#[cfg(feature = "parquet")]
mod rows {
    use std::fs::File;
    use std::sync::Arc;

    use arrow_array::builder::{Float32Builder, Float64Builder, Int64Builder, ListBuilder};
    use arrow_array::{ArrayRef, RecordBatch};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    use super::*;

    fn integers(rows: &[Vec<i64>]) -> ArrayRef {
        let mut lists = ListBuilder::new(Int64Builder::new());
        rows.iter().for_each(|row| lists.append_value(row.iter().copied().map(Some)));
        Arc::new(lists.finish())
    }

    fn floats(rows: &[Vec<f64>], is_double: bool) -> ArrayRef {
        let (mut doubles, mut singles) =
            (ListBuilder::new(Float64Builder::new()), ListBuilder::new(Float32Builder::new()));
        for row in rows {
            doubles.append_value(row.iter().copied().map(Some));
            singles.append_value(row.iter().map(|value| Some(*value as f32)));
        }
        if is_double { Arc::new(doubles.finish()) } else { Arc::new(singles.finish()) }
    }

    fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
        let table = RecordBatch::try_from_iter(columns).expect("of one length");
        let file = File::create(path).expect("writable");
        let small = WriterProperties::builder().set_max_row_group_row_count(Some(3));
        let mut writer =
            ArrowWriter::try_new(file, table.schema(), Some(small.build())).expect("new");
        writer.write(&table).expect("writable");
        writer.close().expect("writable");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Beside targets and without, as single, double or whole numbers, in any order of the
        /// columns.
        #[test]
        fn columns_of_numbers_are_weights(
            rows in rows(), form in 0..3usize, with_targets in any::<bool>(), order in 0..6usize,
        ) {
            let folder = Folder::new("weights-columns");
            let (ids, of): (Vec<Vec<i64>>, Vec<Vec<i64>>) = columns(&rows).into_iter().unzip();
            let scaled = |scale: f64| -> Vec<Vec<f64>> {
                of.iter().map(|row| row.iter().map(|of| *of as f64 * scale).collect()).collect()
            };
            let weights = match form {
                0 => floats(&scaled(0.25), false),
                1 => floats(&scaled(0.25), true),
                _ => integers(&of),
            };
            let scale = if form == 2 { 1.0 } else { 0.25 };
            let marks: Vec<Vec<i64>> =
                of.iter().map(|row| row.iter().map(|of| i64::from(*of > 3)).collect()).collect();
            let mut all = vec![("tokens", integers(&ids)), ("wanted", weights), ("mask", integers(&marks))];
            all.swap(order / 2, order % 3);
            write(&folder.path("rows.parquet"), all);
            let mut job = with_weights(&folder.path("rows.parquet"), &folder.path("out.bin"), Kind::Megatron);
            job.read.column = Some("tokens".into());
            job.read.targets = with_targets.then(|| "mask".into());
            let summary = run(&job);
            let spoken = marks.concat().iter().sum::<i64>() as u64;
            // Ids of 0 and 1 alone could be labels.
            prop_assert_eq!(summary.targets, with_targets.then_some(spoken));
            let got = read(&job.output);
            let want = ids.iter().zip(&of).map(|(ids, of)| {
                ids.iter().zip(of).map(|(id, of)| (*id, (*of as f64 * scale) as f32)).collect()
            });
            prop_assert_eq!(got, want.collect::<Vec<Vec<_>>>());
        }
    }

    #[test]
    fn numbers_that_are_no_weights_are_refused_by_row() {
        let folder = Folder::new("weights-bad-rows");
        let tokens = || ("tokens", integers(&vec![vec![5, 6]; 5]));
        for (value, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (1e300, "1000000")] {
            let mut rows = vec![vec![1.0, 0.5]; 5];
            rows[4][1] = value;
            write(&folder.path("bad.parquet"), vec![tokens(), ("wanted", floats(&rows, true))]);
            let job =
                with_weights(&folder.path("bad.parquet"), &folder.path("out.bin"), Kind::Megatron);
            refused(&job, &format!("row 4: `wanted` holds {shown}"), "finite");
        }
        let mut job =
            with_weights(&folder.path("bad.parquet"), &folder.path("out.bin"), Kind::Megatron);
        job.read.loss_weights = Some("tokens".into());
        job.read.column = Some("tokens".into());
        refused(&job, "0 of its columns", "--column");
    }
}
