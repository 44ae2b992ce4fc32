//! Files that change while a stream reads them: whatever the way, no batch holds a byte of the new
//! contents.
//!
//! The stream stalls after its first batches and reads the file twice, so a change always falls
//! into the middle of it. With a manifest every byte is compared; without one the attributes of the
//! file tell.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};

/// 64 KiB a batch.
const PLAN: &str = "window(1024) | shuffle(5, blocks=2) | narrow(u16) | batch(32)";
const BATCH_BYTES: usize = 64 << 10;
const BATCHES: u64 = 160;
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "160", "--slots", "2", "--slot-size", "64KiB"];

/// More than the ring, the pipe and the staging buffers hold; a bit more than half of the stream.
const TOKENS: usize = 2_500_000;

fn corpus(world: &World) -> Corpus {
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(TOKENS, 4))
}

fn write_manifest(world: &World, file: &Path) {
    world.run(&["inspect", path(file), "--dtype", "u32", "--write-manifest"]).good();
}

fn remove_manifest(file: &Path) {
    let _ = fs::remove_file(format!("{}.dquant.json", path(file)));
}

/// Another file of the same length and time of modification, beside the first.
fn other(world: &World, corpus: &Corpus) -> PathBuf {
    let other = Corpus::flat(&world.path("other"), Dtype::U32, tokens(TOKENS, 5));
    let modified = fs::metadata(&corpus.path).and_then(|found| found.modified()).expect("a time");
    let file = File::options().write(true).open(&other.path).expect("it exists");
    file.set_modified(modified).expect("it is ours");
    other.path
}

/// What ends a stream after a change.
#[derive(Clone, Copy)]
enum End {
    /// An error whose text has one of these, with a manifest and without.
    Error(&'static [&'static str]),
    /// The file that was opened is still whole.
    Good,
}

/// Changes the file in the middle of streams of all kinds, and checks what they deliver and how
/// they end.
fn during(test: &str, ends: [End; 2], change: impl Fn(&World, &Corpus)) {
    let Some(world) = World::new(test) else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let want = expected(PLAN, &[&corpus(&world)], 0..BATCHES);
    for (has_manifest, end) in [true, false].into_iter().zip(ends) {
        remove_manifest(&world.data("web.bin"));
        let corpus = corpus(&world);
        if has_manifest {
            write_manifest(&world, &corpus.path);
        }
        let mut cats = every_way(&world, &target, &dpu);
        let heads = cats.each_mut().map(|cat| cat.read(1 << 20));
        change(&world, &corpus);
        for (cat, head) in cats.into_iter().zip(heads) {
            let ran = cat.finish();
            let got = [&head[..], &ran.stdout].concat();
            assert_eq!(got.len() % BATCH_BYTES, 0);
            assert_same(&got, &want[..got.len()]);
            check_end(&ran, end, got.len() == want.len());
        }
    }
}

fn every_way(world: &World, target: &Daemon, dpu: &Daemon) -> [Cat; 3] {
    let url = target.url("web");
    let through = Cat::through(world, dpu, &url, ARGS);
    [through, Cat::alone(world, &url, ARGS), Cat::local(world, "web", ARGS)]
}

#[track_caller]
fn check_end(ran: &Ran, end: End, is_whole: bool) {
    match end {
        End::Good => assert!(ran.exit == Some(0) && is_whole, "{}", ran.stderr),
        End::Error(texts) => {
            ran.failed(1, &["web.bin"], "");
            let found = texts.iter().any(|text| ran.stderr.contains(text));
            assert!(found, "none of {texts:?} is in {}", ran.stderr);
        }
    }
}

const WRITTEN: End = End::Error(&["was changed while it was read"]);

#[test]
fn overwritten_in_place() {
    // The time of modification is set back: the checksum and the time of change tell.
    let ends = [End::Error(&["block 9 (from byte 9437184) differs from the manifest"]), WRITTEN];
    during("overwritten_in_place", ends, |_, corpus| {
        let modified = fs::metadata(&corpus.path).and_then(|found| found.modified());
        let file = File::options().write(true).open(&corpus.path).expect("it exists");
        // One token, in the last block.
        file.write_all_at(&[1, 2, 3, 0], 9_900_000).expect("it can be written");
        file.set_modified(modified.expect("a time")).expect("it is ours");
    });
}

#[test]
fn another_copied_over_it_with_its_time() {
    // `cp` cuts the file and writes it anew: a read may meet it at any length.
    let blocks = End::Error(&["differs from the manifest", "was truncated while"]);
    let without = End::Error(&["was changed while it was read", "was truncated while"]);
    during("another_copied_over_it", [blocks, without], |world, corpus| {
        let other = other(world, corpus);
        let copied = Command::new("cp").arg("-p").args([&other, &corpus.path]).status();
        assert!(copied.expect("cp is there").success());
    });
}

/// `rsync -t` writes a hidden file beside it, sets its time and renames it. With `--inplace` it
/// does what `cp` does.
#[test]
fn another_synchronised_over_it_with_its_time() {
    let has_rsync = Command::new("rsync").arg("--version").output().is_ok();
    if !has_rsync {
        super::skip::note("e2e::never_mixed with rsync itself", "no rsync: its rename is imitated");
    }
    during("another_synchronised", [End::Good, REMOVED], |world, corpus| {
        let other = other(world, corpus);
        if has_rsync {
            let ran = Command::new("rsync")
                .arg("-t")
                .arg("--checksum")
                .args([&other, &corpus.path])
                .status();
            assert!(ran.expect("it is there").success());
            return;
        }
        let hidden = corpus.path.with_file_name(".web.bin.a1B2c3");
        fs::copy(&other, &hidden).expect("the folder is writable");
        let modified = fs::metadata(&other).and_then(|found| found.modified()).expect("a time");
        let file = File::options().write(true).open(&hidden).expect("it exists");
        file.set_modified(modified).expect("it is ours");
        fs::rename(&hidden, &corpus.path).expect("in the same folder");
    });
}

const REMOVED: End = End::Error(&["was removed or replaced while it was read"]);

#[test]
fn replaced_by_rename() {
    // The file that is open keeps its contents: with a manifest they are proven, and the stream
    // goes on.
    during("replaced_by_rename", [End::Good, REMOVED], |world, corpus| {
        let other = other(world, corpus);
        let inode = |path: &Path| fs::metadata(path).expect("it exists").ino();
        let before = inode(&corpus.path);
        fs::rename(&other, &corpus.path).expect("on the same file system");
        assert_ne!(inode(&corpus.path), before);
    });
}

#[test]
fn truncated() {
    let truncated = End::Error(&["now ends at byte 6000000: it was truncated while it was read"]);
    during("truncated", [truncated, truncated], |_, corpus| {
        let file = File::options().write(true).open(&corpus.path).expect("it exists");
        file.set_len(6_000_000).expect("it can be cut");
    });
}

/// Attributes that change without the contents: with a manifest that does not matter.
#[test]
fn touched() {
    during("touched", [End::Good, WRITTEN], |_, corpus| {
        let file = File::options().write(true).open(&corpus.path).expect("it exists");
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("it is ours");
    });
}

/// The target is away while the file changes.
fn between(test: &str, has_manifest: bool, change: impl FnOnce(&World, &Corpus)) -> Option<Ran> {
    let world = World::new(test)?;
    let corpus = corpus(&world);
    if has_manifest {
        write_manifest(&world, &corpus.path);
    }
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let head = cat.read(1 << 20);
    target.kill();
    change(&world, &corpus);
    target.restart(&world);
    let mut ran = cat.finish();
    ran.stdout = [head, ran.stdout].concat();
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    assert_same(&ran.stdout, &want[..ran.stdout.len()]);
    Some(ran)
}

fn overwrite(corpus: &Corpus) {
    let file = File::options().write(true).open(&corpus.path).expect("it exists");
    file.write_all_at(&[1, 2, 3, 0], 9_900_000).expect("it can be written");
}

#[test]
fn overwritten_while_the_target_is_away() {
    let test = "overwritten_while_away";
    if let Some(ran) = between(test, false, |_, corpus| overwrite(corpus)) {
        ran.failed(
            3,
            &["web.bin has changed since", "written or replaced"],
            "open the stream again",
        );
    }
    // With a manifest the contents decide, block by block.
    if let Some(ran) = between(test, true, |_, corpus| overwrite(corpus)) {
        ran.failed(1, &["web.bin: block 9 (from byte 9437184)"], "--write-manifest");
    }
    let anew = |world: &World, corpus: &Corpus| {
        overwrite(corpus);
        write_manifest(world, &corpus.path);
    };
    if let Some(ran) = between(test, true, anew) {
        ran.failed(3, &["web.bin has changed since", "manifest describes other contents"], "");
    }
}

#[test]
fn a_manifest_that_comes_or_goes_or_a_copy_with_its_manifest_is_the_same_dataset() {
    let test = "a_manifest_that_comes_or_goes";
    let is_whole = |ran: Option<Ran>| {
        let Some(ran) = ran else { return };
        assert_eq!(ran.good().stdout.len(), BATCHES as usize * BATCH_BYTES);
    };
    is_whole(between(test, false, |world, corpus| write_manifest(world, &corpus.path)));
    is_whole(between(test, true, |_, corpus| remove_manifest(&corpus.path)));
    is_whole(between(test, true, |world, corpus| {
        let copy = world.path("copy");
        fs::copy(&corpus.path, &copy).expect("there is room");
        fs::rename(&copy, &corpus.path).expect("on the same file system");
    }));
}
