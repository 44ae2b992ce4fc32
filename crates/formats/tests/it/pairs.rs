//! Conversion between all pairs of formats keeps tokens and documents.

use std::fs;
use std::path::Path;

use formats::convert::{self, Job};
use formats::{Kind, Manifest, ReadOptions};
use xio::dataset::Dtype;

use super::kit::{Folder, documents, flat, job, kinds, made, name_of, run};

/// A format with the choices that are its own.
#[derive(Clone, Copy, Debug)]
struct Form {
    kind: Kind,
    /// The type of tokens, where it is not the same as in the source.
    dtype: Option<Dtype>,
    zstd_level: Option<i32>,
}

impl Form {
    /// Every format, flat files of every type, and shards with and without compression.
    fn all() -> Vec<Form> {
        let plain = |kind| Form { kind, dtype: None, zstd_level: None };
        let types = [Dtype::U8, Dtype::U16, Dtype::U32, Dtype::I32, Dtype::I64];
        let flat = types.map(|dtype| Form { dtype: Some(dtype), ..plain(Kind::Flat) });
        let others = kinds().into_iter().filter(|kind| *kind != Kind::Flat).map(plain);
        let packed =
            cfg!(feature = "zstd").then_some(Form { zstd_level: Some(3), ..plain(Kind::Mds) });
        flat.into_iter().chain(others).chain(packed).collect()
    }

    fn name(&self) -> String {
        let Form { kind, dtype, zstd_level } = self;
        let dtype = dtype.map_or("", Dtype::name);
        let level = if zstd_level.is_some() { "zstd" } else { "" };
        format!("{dtype}{level}{}", name_of(*kind))
    }

    fn job(&self, source: &Path, output: &Path) -> Job {
        let mut job = job(source, output, self.kind);
        (job.dtype, job.write.zstd_level, job.write.shard_bytes) =
            (self.dtype, self.zstd_level, 4_000);
        job
    }
}

#[test]
fn all_pairs_keep_tokens_and_documents() {
    let folder = Folder::new("pairs");
    const EOS: u16 = 255;
    // Ids that fit every type.
    let mut made = made(120, 300);
    for document in &mut made {
        let last = document.len() - 1;
        document[..last].iter_mut().for_each(|id| *id %= EOS);
        document[last] = EOS;
    }
    let flat_file = folder.path("made.bin");
    flat(&flat_file, &made);
    let tokens: Vec<Vec<i64>> =
        made.iter().map(|tokens| tokens.iter().map(|id| i64::from(*id)).collect()).collect();
    let mut digest = None;
    for from in Form::all() {
        let first = folder.path(&from.name());
        let mut to_first = from.job(&flat_file, &first);
        to_first.eos = Some(EOS.into());
        let summary = run(&to_first);
        assert_eq!((summary.documents, summary.eos), (Some(120), Some(EOS.into())), "{from:?}");
        assert_eq!(*digest.get_or_insert(summary.digest.clone()), summary.digest);
        for to in Form::all() {
            let second = folder.path(&format!("from-{}-{}", from.name(), to.name()));
            let summary = run(&to.job(&first, &second));
            assert_eq!(Some(&summary.digest), digest.as_ref(), "{from:?} to {to:?}");
            assert_eq!(summary.documents, Some(120), "{from:?} to {to:?}");
            let found = documents(&second, &ReadOptions::default());
            match to.kind.has_documents() {
                true => assert!(found == tokens, "{from:?} to {to:?}"),
                false => assert!(found == [tokens.concat()], "{from:?} to {to:?}"),
            }
            let manifest = Manifest::load(&second).expect("valid").expect("written");
            assert_eq!((manifest.tokens, manifest.documents), (summary.tokens, Some(120)));
            let asked = to.dtype.or(from.dtype).unwrap_or(Dtype::U16);
            assert_eq!(manifest.dtype(), to.kind.stored(asked), "{from:?} to {to:?}");
            let below = if to.kind.is_folder() { second.clone() } else { folder.path("") };
            manifest.verify(&below, &|_| ()).expect("the files are as described");
        }
    }
    assert!(!folder.names().iter().any(|name| name.starts_with('.')), "{:?}", folder.names());
}

#[test]
fn types_are_converted_where_every_id_fits() {
    let folder = Folder::new("types");
    let made = made(40, 900);
    flat(&folder.path("made.bin"), &made);
    for kind in kinds() {
        let mut last = folder.path("made.bin");
        for (step, dtype) in [Dtype::I64, Dtype::I32, Dtype::U16].into_iter().enumerate() {
            let next = folder.path(&format!("{step}-{}", name_of(kind)));
            let mut job = job(&last, &next, kind);
            job.dtype = Some(dtype);
            assert_eq!(run(&job).dtype, dtype.name(), "{kind}");
            last = next;
        }
        let bytes = |name: &str| fs::read(folder.path(name)).expect("it exists");
        if kind == Kind::Flat {
            assert!(bytes("made.bin") == bytes("2-flat.bin"));
        }
        let mut narrow = job(&last, &folder.path(&format!("narrow-{}", name_of(kind))), kind);
        narrow.dtype = Some(Dtype::U8);
        let error = convert::convert(&narrow, &mut |_| ()).expect_err("an id too large");
        let position = made.concat().iter().position(|id| *id > 255).expect("a large id");
        let id = made.concat()[position];
        let part = format!("token {position} has id {id}, which u8 cannot hold");
        assert!(error.to_string().contains(&part), "{kind}: {error}");
        assert!(error.to_string().contains(&folder.path("2-").display().to_string()), "{error}");
    }
    assert!(!folder.names().iter().any(|name| name.starts_with("narrow") || name.starts_with('.')));
}

#[test]
fn documents_are_cut_and_empty_ones_left_out() {
    let folder = Folder::new("cut");
    let made: Vec<Vec<u16>> =
        vec![(0..1000).collect(), vec![], (0..500).collect(), vec![7; 501], vec![]];
    flat(&folder.path("a.bin"), &made);
    // An index of five documents, two of them empty.
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(8);
    index.extend(5_u64.to_le_bytes());
    index.extend(6_u64.to_le_bytes());
    index.extend(made.iter().flat_map(|tokens| (tokens.len() as u32).to_le_bytes()));
    let starts = made
        .iter()
        .scan(0_u64, |at, tokens| Some(std::mem::replace(at, *at + 2 * tokens.len() as u64)));
    index.extend(starts.flat_map(u64::to_le_bytes));
    index.extend((0..=5_u64).flat_map(u64::to_le_bytes));
    fs::write(folder.path("a.idx"), index).expect("writable");
    let lengths = |split, drop_empty, kind, name: &str| -> Vec<usize> {
        let mut job = job(&folder.path("a.idx"), &folder.path(name), kind);
        (job.split, job.drop_empty) = (split, drop_empty);
        run(&job);
        documents(&folder.path(name), &ReadOptions::default()).iter().map(Vec::len).collect()
    };
    assert_eq!(lengths(None, false, Kind::LitData, "kept"), [1000, 0, 500, 501, 0]);
    assert_eq!(lengths(None, true, Kind::Mds, "dropped"), [1000, 500, 501]);
    assert_eq!(lengths(Some(500), true, Kind::Mds, "cut"), [500, 500, 500, 500, 1]);
    assert_eq!(lengths(Some(500), false, Kind::Megatron, "b.bin"), [500, 500, 0, 500, 500, 1, 0]);
    let refused =
        convert::convert(&job(&folder.path("a.idx"), &folder.path("mds"), Kind::Mds), &mut |_| ());
    let error = refused.expect_err("an array without values");
    assert!(error.hint().contains("--drop-empty"), "{error}: {}", error.hint());
}

#[test]
fn an_empty_dataset_is_converted_too() {
    let folder = Folder::new("empty");
    fs::write(folder.path("none.bin"), []).expect("writable");
    for kind in kinds() {
        let output = folder.path(name_of(kind));
        let mut job = job(&folder.path("none.bin"), &output, kind);
        job.read.dtype = Some(Dtype::U16);
        let summary = run(&job);
        assert_eq!((summary.tokens, summary.max_id), (0, None), "{kind}");
    }
}

#[test]
fn an_output_that_exists_is_not_replaced() {
    let folder = Folder::new("exists");
    flat(&folder.path("made.bin"), &made(3, 200));
    fs::write(folder.path("a.bin"), "precious").expect("writable");
    for (name, kind) in [("a.bin", Kind::Flat), ("a.idx", Kind::Megatron), ("made.bin", Kind::Flat)]
    {
        let refused =
            convert::convert(&job(&folder.path("made.bin"), &folder.path(name), kind), &mut |_| ());
        let error = refused.expect_err("it exists").to_string();
        assert!(error.ends_with("exists"), "{error}");
    }
    assert_eq!(fs::read(folder.path("a.bin")).expect("still there"), b"precious");
}
