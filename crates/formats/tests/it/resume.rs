//! A run that stops anywhere is continued by the next one, and gives the same bytes.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use formats::Kind;
use formats::convert::{self, Event, Job};
use xio::documents::{Filter, Selection};

use super::kit::{Folder, flat, job, kinds, made, name_of, run};

/// All files of a dataset, by name.
fn contents(output: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut paths = vec![output.to_owned()];
    if output.is_dir() {
        paths = fs::read_dir(output)
            .expect("a folder")
            .map(|entry| entry.expect("readable").path())
            .collect();
    } else if output.with_extension("idx").exists() {
        paths.push(output.with_extension("idx"));
    }
    paths.sort();
    let named = |path: PathBuf| {
        (path.strip_prefix(output).unwrap_or(&path).to_owned(), fs::read(&path).expect("a file"))
    };
    let mut found: Vec<_> = paths.into_iter().map(named).collect();
    found
        .iter_mut()
        .for_each(|(name, _)| *name = name.file_name().map(PathBuf::from).unwrap_or_default());
    found
}

/// Runs the job and stops it, as a crash would, after so many tokens.
pub(crate) fn stop_after(job: &Job, most: u64) {
    let stopped = catch_unwind(AssertUnwindSafe(|| {
        convert::convert(job, &mut |event| {
            if let Event::Copied { tokens, .. } = event {
                assert!(tokens < most, "stopped as planned");
            }
        })
    }));
    assert!(stopped.is_err(), "it was stopped");
}

#[test]
fn every_format_goes_on_where_it_was_stopped() {
    let folder = Folder::new("resume");
    flat(&folder.path("made.bin"), &made(3_000, 4_000));
    let mut to_source = job(&folder.path("made.bin"), &folder.path("source.idx"), Kind::Megatron);
    to_source.eos = Some(50_256);
    let tokens = run(&to_source).tokens;
    for kind in kinds() {
        let prepare = |name: &str| {
            let mut job = job(&folder.path("source.bin"), &folder.path(name), kind);
            (job.save_bytes, job.write.shard_bytes) = (300_000, 200_000);
            job
        };
        let whole = prepare(&format!("whole-{}", name_of(kind)));
        let digest = run(&whole).digest;
        let stopped = prepare(&format!("stopped-{}", name_of(kind)));
        stop_after(&stopped, tokens / 3);
        assert!(!stopped.output.exists(), "{kind}: nothing half done under the final name");
        stop_after(&stopped, 2 * tokens / 3);
        let summary = run(&stopped);
        assert_eq!(summary.digest, digest, "{kind}");
        // One file of columns ends with an index of all of them: it starts over.
        let starts_over = matches!(kind, Kind::Parquet | Kind::Arrow);
        assert_eq!(summary.resumed_tokens > tokens / 4, !starts_over, "{kind}");
        let [whole, stopped] = [&whole, &stopped].map(|job| contents(&job.output));
        let manifest = PathBuf::from("dquant.json");
        for ((_, expected), (name, found)) in
            whole.iter().zip(&stopped).filter(|(_, (name, _))| *name != manifest)
        {
            assert!(expected == found, "{kind}: {name:?} differs");
        }
        assert_eq!(whole.len(), stopped.len(), "{kind}");
    }
    assert!(!folder.names().iter().any(|name| name.starts_with('.')), "{:?}", folder.names());
}

/// Documents that are not written are passed over on both sides of a stop, and a list with other
/// hashes is another job.
#[test]
fn a_run_that_chooses_documents_goes_on_where_it_was_stopped() {
    let folder = Folder::new("resume-choice");
    let documents = made(3_000, 4_000);
    flat(&folder.path("made.bin"), &documents);
    let hash = |document: &Vec<u16>| {
        let ids: Vec<u8> = document.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
        format!("{:016x}\n", twox_hash::XxHash3_64::oneshot(&ids))
    };
    let list = |name: &str, step: usize| {
        let lines: String = documents.iter().step_by(step).map(hash).collect();
        fs::write(folder.path(name), lines).expect("writable");
        let list = folder.path(name).to_str().expect("UTF-8").to_owned();
        Selection { filter: Some(Filter { list, keep: false }), dedup: None }
    };
    let prepare = |name: &str| {
        let mut job = job(&folder.path("made.bin"), &folder.path(name), Kind::Megatron);
        (job.eos, job.save_bytes) = (Some(50_256), 300_000);
        job.selection = list("list.txt", 3);
        job
    };
    let whole = run(&prepare("whole.idx"));
    assert_eq!(whole.documents, Some(2_000));
    let stopped = prepare("stopped.idx");
    stop_after(&stopped, whole.tokens / 3);
    stop_after(&stopped, 2 * whole.tokens / 3);
    let summary = run(&stopped);
    assert!(summary.resumed_tokens > whole.tokens / 4, "{summary:?}");
    assert_eq!((&summary.digest, summary.dropped), (&whole.digest, whole.dropped));
    let read = |name: &str| {
        ["bin", "idx"].map(|end| fs::read(folder.path(name).with_extension(end)).expect("written"))
    };
    assert!(read("whole") == read("stopped"));
    let mut other = prepare("other.idx");
    stop_after(&other, whole.tokens / 3);
    other.selection = list("list.txt", 2);
    assert_eq!(run(&other).resumed_tokens, 0);
}

#[test]
fn a_run_of_another_job_starts_over() {
    let folder = Folder::new("other");
    flat(&folder.path("made.bin"), &made(3_000, 2_000));
    let mut first = job(&folder.path("made.bin"), &folder.path("out.bin"), Kind::Flat);
    first.save_bytes = 100_000;
    stop_after(&first, 2_000_000);
    let resumed = |job: &Job| run(job).resumed_tokens;
    let mut other = first.clone();
    other.dtype = Some(xio::dataset::Dtype::U32);
    assert_eq!(resumed(&other), 0);
    fs::remove_file(&first.output).expect("written");
    stop_after(&first, 2_000_000);
    // The same bytes, but no longer the same file.
    let copy = fs::read(&first.source).expect("readable");
    fs::write(&first.source, copy).expect("writable");
    assert_eq!(resumed(&first), 0);
}
