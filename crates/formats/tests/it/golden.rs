//! Datasets that the libraries themselves wrote (`interop/formats.py golden`) read back equal.

use std::fs;
use std::path::{Path, PathBuf};

use formats::{ReadOptions, convert};

use super::kit::documents;

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

pub(crate) fn expected() -> Vec<Vec<i64>> {
    let text = fs::read(golden("documents.json")).expect("it is checked in");
    serde_json::from_slice(&text).expect("lists of numbers")
}

#[test]
fn documents_written_by_the_libraries_read_back_equal() {
    for name in names() {
        assert_eq!(documents(&golden(name), &ReadOptions::default()), expected(), "{name}");
    }
    let array = documents(&golden("array.npy"), &ReadOptions::default());
    assert_eq!(array, [expected().concat()]);
}

/// The datasets of this build.
fn names() -> Vec<&'static str> {
    let mut names = vec![
        "megatron.idx",
        "megatron.bin",
        "mds",
        "mds-dynamic",
        "litdata",
        "litdata-tree",
        "webdataset",
    ];
    if cfg!(feature = "zstd") {
        names.extend(["mds-zstd", "litdata-zstd"]);
    }
    if cfg!(feature = "parquet") {
        names.extend(["rows.parquet", "file.arrow", "stream.arrow"]);
    }
    names
}

#[test]
fn parts_that_several_threads_read_do_not_disturb_each_other() {
    for name in names() {
        let source = formats::open(&golden(name), &ReadOptions::default()).expect("valid");
        let read =
            |threads| convert::census(&*source, None, threads, &mut |_, _| ()).expect("valid");
        let expected = read(1);
        for _ in 0..50 {
            let found = read(4);
            let same = (found.tokens(), found.documents(), found.digest());
            assert_eq!(
                same,
                (expected.tokens(), expected.documents(), expected.digest()),
                "{name}"
            );
        }
    }
}

#[test]
fn what_is_not_built_in_is_named_with_how_to_build_it() {
    let cases = [("mds-zstd", cfg!(feature = "zstd")), ("rows.parquet", cfg!(feature = "parquet"))];
    for (name, built) in cases {
        let source = formats::open(&golden(name), &ReadOptions::default());
        let read = source.and_then(|source| super::kit::read(&*source));
        assert_eq!(read.is_ok(), built, "{name}");
        if let Err(error) = read {
            assert!(error.hint().contains("--features"), "{name}: {error}: {}", error.hint());
        }
    }
}
