//! Damaged datasets: an error or other tokens, never a panic, and no memory beyond what the file is
//! worth.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use formats::{Kind, ReadOptions};

use super::kit::{Folder, flat, job, kinds, made, name_of, read, run};

/// Every file of a dataset.
fn files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        let index = path.with_extension("idx");
        return [path.to_owned(), index].into_iter().filter(|path| path.exists()).collect();
    }
    let mut files: Vec<PathBuf> = fs::read_dir(path)
        .expect("a folder")
        .map(|entry| entry.expect("readable").path())
        .collect();
    files.sort();
    files
}

fn datasets(folder: &Folder) -> Vec<(Kind, PathBuf)> {
    flat(&folder.path("made.bin"), &made(60, 60));
    let write = |kind: Kind| {
        let output = folder.path(name_of(kind));
        let mut job = job(&folder.path("made.bin"), &output, kind);
        (job.eos, job.write.shard_bytes) = (Some(50_256), 1_500);
        run(&job);
        // The parser of the format is under test, not the checksums.
        let _ = fs::remove_file(formats::manifest::path_of(&output));
        (kind, output)
    };
    let mut made: Vec<(Kind, PathBuf)> = kinds().into_iter().map(write).collect();
    if cfg!(feature = "zstd") {
        let output = folder.path("zstd");
        let mut job = job(&folder.path("made.bin"), &output, Kind::Mds);
        (job.eos, job.write.shard_bytes, job.write.zstd_level) = (Some(50_256), 1_500, Some(3));
        run(&job);
        made.push((Kind::Mds, output));
    }
    made
}

fn open_and_read(path: &Path) {
    if let Ok(source) = formats::open(path, &ReadOptions::default()) {
        let _ = read(&*source);
    }
}

#[test]
fn every_cut_of_every_file_is_survived() {
    let folder = Folder::new("cuts");
    for (kind, path) in datasets(&folder) {
        for file in files(&path) {
            let whole = fs::read(&file).expect("readable");
            let step = whole.len().div_ceil(60).max(1);
            for len in (0..whole.len()).step_by(step) {
                fs::write(&file, &whole[..len]).expect("writable");
                let found =
                    formats::open(&path, &ReadOptions::default()).and_then(|source| read(&*source));
                // Cuts of a flat file leave a flat file; archives may end after any member.
                let may_pass = matches!(kind, Kind::Flat | Kind::WebDataset);
                assert!(found.is_err() || may_pass, "{kind}: {file:?} cut to {len} bytes");
            }
            fs::write(&file, whole).expect("writable");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn no_change_of_a_few_bytes_panics(changes in proptest::collection::vec((any::<u32>(), any::<u8>(), any::<bool>()), 60)) {
        let folder = Folder::new("bytes");
        for (_, path) in datasets(&folder) {
            for file in files(&path) {
                let whole = fs::read(&file).expect("readable");
                if whole.is_empty() {
                    continue;
                }
                for &(at, byte, near_start) in &changes {
                    let mut changed = whole.clone();
                    let range = if near_start { whole.len().min(600) } else { whole.len() };
                    changed[at as usize % range] = byte;
                    fs::write(&file, &changed).expect("writable");
                    open_and_read(&path);
                }
                fs::write(&file, whole).expect("writable");
            }
        }
    }
}

#[test]
fn names_in_an_index_stay_in_its_folder() {
    let folder = Folder::new("names");
    flat(&folder.path("made.bin"), &made(20, 60));
    for kind in [Kind::Mds, Kind::LitData] {
        let output = folder.path(name_of(kind));
        run(&job(&folder.path("made.bin"), &output, kind));
        let index = output.join("index.json");
        let text = fs::read_to_string(&index).expect("written");
        let name = if kind == Kind::Mds { "shard.00000.mds" } else { "chunk-0-0.bin" };
        for outside in ["../made.bin", "/etc/passwd", "a/../../made.bin"] {
            fs::write(&index, text.replace(name, outside)).expect("writable");
            let error =
                formats::open(&output, &ReadOptions::default()).err().expect("refused").to_string();
            assert!(error.contains("in the folder"), "{outside}: {error}");
        }
    }
}

/// Hashes in the index of MosaicML's shards: a shard that differs is refused before a token of it
/// is used.
#[test]
fn a_shard_that_differs_from_a_hash_in_its_index_is_refused() {
    let folder = Folder::new("hashes");
    let (output, index) = (folder.path("mds"), folder.path("mds").join("index.json"));
    flat(&folder.path("made.bin"), &made(60, 60));
    let mut job = job(&folder.path("made.bin"), &output, Kind::Mds);
    (job.eos, job.write.shard_bytes) = (Some(50_256), 1_500);
    run(&job);
    fs::remove_file(formats::manifest::path_of(&output)).expect("it was written");
    let plain = fs::read_to_string(&index).expect("readable");
    let opened = || formats::open(&output, &ReadOptions::default()).expect("it opens");
    let want = read(&*opened()).expect("it reads");
    // Of the first shard only.
    let record = |hashes: &str| {
        let text = plain.replacen("\"hashes\":{}", &format!("\"hashes\":{hashes}"), 1);
        assert_ne!(text, plain, "the index has a place for hashes");
        fs::write(&index, text).expect("writable");
    };
    record("{\"xxh64\":\"0123456789abcdef\"}");
    let error = read(&*opened()).expect_err("the hash is wrong").to_string();
    assert!(error.contains("records 0123456789abcdef"), "{error}");
    let found = error.split("its xxh64 is ").nth(1).and_then(|rest| rest.get(..16));
    let found = found.expect("the error has the hash of the file").to_owned();
    record(&format!("{{\"xxh64\":\"{found}\",\"blake9\":\"00\"}}"));
    let source = opened();
    assert_eq!(read(&*source).expect("the hash is right"), want);
    let note = source.layout().note.clone().unwrap_or_default();
    assert!(note.contains("hashes of blake9 are not checked"), "{note}");
    record("{\"xxh64\":7}");
    assert!(formats::open(&output, &ReadOptions::default()).is_err());
}
