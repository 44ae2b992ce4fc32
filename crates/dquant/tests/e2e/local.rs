//! Streams over files of this machine: no target, no DPU, no socket.

use std::fs;
use std::os::unix::fs::symlink;

use client::{Options, Stream, open, open_all};
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, World, path};

fn read(stream: &mut Stream) -> Vec<u8> {
    let batches = stream.batches().map(|batch| batch.expect("good data").bytes().to_vec());
    batches.collect::<Vec<_>>().concat()
}

/// Descriptors of this process that are sockets.
fn sockets() -> Vec<String> {
    let fds = fs::read_dir("/proc/self/fd").expect("the kernel lists descriptors").flatten();
    let links = fds.filter_map(|entry| fs::read_link(entry.path()).ok());
    let names = links.map(|link| link.display().to_string());
    let mut sockets: Vec<String> = names.filter(|name| name.starts_with("socket:")).collect();
    sockets.sort();
    sockets
}

#[test]
fn a_local_stream_opens_no_socket() {
    let Some(world) = World::new("a_local_stream_opens_no_socket") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(400_000, 1));
    let plan = "window(100) | shuffle(7) | narrow(u16) | batch(8)";
    let before = sockets();
    let options = Options { batches: Some(300), ..Options::from_env() };
    let mut stream = open(path(&corpus.path), plan, true, &options).expect("it opens");
    let bytes = read(&mut stream);
    assert_eq!(sockets(), before);
    assert_same(&bytes, &expected(plan, &[&corpus], 0..300));
    let status = stream.status().expect("the engine answers");
    assert_eq!((status.batches, status.delivered_bytes), (300, bytes.len() as u64));
    assert_eq!(
        (status.wire_bytes, status.source_bytes),
        (0, 4 * 400_000),
        "read once, sent nowhere"
    );
}

/// Files of 3, 1 and 2 parts of the samples are drawn 3 : 1 : 2, whatever their types, and whether
/// samples overlap.
#[test]
fn several_files_are_blended_in_proportion_to_their_samples() {
    let Some(world) = World::new("several_files_are_blended") else {
        return;
    };
    let corpora = [
        Corpus::flat(&world.data("part-0.bin"), Dtype::U32, tokens(30_050, 1)),
        Corpus::megatron(&world.data("part-1.bin"), tokens(10_001, 2)),
        Corpus::npy(&world.data("part-2.npy"), tokens(20_099, 3)),
    ];
    let name = |corpus: &Corpus| format!("\"{}\"", path(&corpus.path));
    let [a, b, c] = corpora.each_ref().map(name);
    for (window, tokens) in [("window(100)", 100), ("window(101, overlap=1)", 101)] {
        let (plan, rest) = (format!("{window} | shuffle(5)"), "narrow(u16) | batch(30)");
        let blended = format!("{plan} | blend({a}=3, {b}=1, {c}=2) | {rest}");
        let want = expected(&blended, &corpora.each_ref(), 0..50);
        let plan = format!("{plan} | {rest}");
        let args = ["--plan", &plan, "--batches", "50"];
        let local = Cat::local(&world, "part-*", &args).finish().good();
        assert_same(&local.stdout, &want);
        // One epoch of all files: every sample once.
        let epoch = &want[..600 * 2 * tokens];
        let mut samples: Vec<&[u8]> = epoch.chunks(2 * tokens).collect();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), 600);
    }
}

/// A pattern names whatever lies in the folder: what describes a file of tokens is none.
#[test]
fn a_pattern_leaves_out_what_describes_the_files() {
    let Some(world) = World::new("a_pattern_leaves_out") else {
        return;
    };
    fs::create_dir(world.data("corpus")).expect("a folder for tests");
    let name = |file: &str| world.data(&format!("corpus/{file}"));
    let corpus = Corpus::with_documents(&name("a.bin"), tokens(30_000, 1), vec![100; 300]);
    world.run(&["documents", path(&corpus.path), "--hash"]).good();
    world.run(&["inspect", path(&corpus.path), "--write-manifest"]).good();
    for sidecar in ["x.ds.index", "x.ds.metadata", "x.ds.loss"] {
        Corpus::flat(&name(sidecar), Dtype::U32, tokens(30_000, 2));
    }
    let beside = fs::read_dir(world.data("corpus")).expect("readable").count();
    assert_eq!(beside, 7, "a.bin, a.idx, a.bin.dochash, a.bin.dquant.json, and those of x.ds");
    let plan = "window(100) | shuffle(3) | batch(10)";
    let args = ["--plan", plan, "--batches", "30"];
    let local = Cat::local(&world, "corpus/*", &args).finish().good();
    assert_same(&local.stdout, &expected(plan, &[&corpus], 0..30));
    fs::remove_file(&corpus.path).expect("its own");
    let none = Cat::local(&world, "corpus/*", &args).finish();
    none.failed(2, &["no file matches"], "corpora/*.bin");
}

/// Two names of a file, in a list or of one pattern: it would be drawn twice as often as another.
#[test]
fn one_file_under_two_names_is_refused() {
    let Some(world) = World::new("one_file_under_two_names") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(30_000, 1));
    fs::hard_link(&corpus.path, world.data("hard.bin")).expect("a folder for tests");
    symlink("web.bin", world.data("soft.bin")).expect("a folder for tests");
    let name = |file: &str| path(&world.data(file)).to_owned();
    let plan = "window(100) | shuffle(3) | batch(10)";
    let others = ["web", "hard.bin", "soft.bin"];
    let options = Options { batches: Some(1), ..Options::from_env() };
    for other in others {
        let files = [name("web.bin"), name(other)];
        let error = open_all(&files, plan, &options).expect_err("one file");
        let text = error.to_string();
        assert!(text.contains("are the same file, which would be drawn twice"), "{text}");
        assert!(text.contains(&files[0]) && text.contains(&files[1]), "{text}");
    }
    let args = ["--plan", plan, "--batches", "1"];
    let all = Cat::local(&world, "*.bin", &args).finish();
    all.failed(2, &["hard.bin and", "are the same file"], "name it once");
    // With weights somebody has said how often each is drawn.
    let blended = "window(100) | shuffle(3) | blend(web.bin=2, hard.bin=1) | batch(10)";
    Cat::local(&world, "", &["--plan", blended, "--batches", "1"]).finish().good();
}

/// Packed files are drawn in proportion to the samples that their documents fill, which may be
/// shorter than one.
#[test]
fn packed_files_are_blended_in_proportion_to_their_packed_samples() {
    let Some(world) = World::new("packed_files_are_blended") else {
        return;
    };
    let corpus = |part: usize, (count, length): (usize, u32)| {
        let path = world.data(&format!("part-{part}.bin"));
        let ids = tokens(count * length as usize, part as u64);
        Corpus::with_documents(&path, ids, vec![length; count])
    };
    // 1,200 tokens, 60 and 1,280.
    let corpora = [(30, 40), (10, 6), (20, 64)];
    let corpora: Vec<Corpus> =
        corpora.into_iter().enumerate().map(|(part, of)| corpus(part, of)).collect();
    let all: Vec<&Corpus> = corpora.iter().collect();
    let names: Vec<&str> = corpora.iter().map(|corpus| path(&corpus.path)).collect();
    for (fit, counts) in [("single", [30, 10, 20]), ("best", [30, 1, 20])] {
        let samples = format!("window(64) | pack({fit}) | shuffle(5)");
        let parts: Vec<String> =
            names.iter().zip(counts).map(|(name, count)| format!("\"{name}\"={count}")).collect();
        let blended = format!("{samples} | blend({}) | batch(3)", parts.join(", "));
        let want = expected(&blended, &all, 0..60);
        let plan = format!("{samples} | batch(3)");
        let args = ["--plan", &plan, "--batches", "60"];
        let local = Cat::local(&world, "part-*.bin", &args).finish().good();
        assert_same(&local.stdout, &want);
        // One epoch of all files: every sample once.
        let epoch = &want[..counts.iter().sum::<usize>() * 128];
        let mut samples: Vec<&[u8]> = epoch.chunks(128).collect();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), counts.iter().sum::<usize>(), "{fit}");
    }
    // No window is cut from the short one, and none at all where all are short.
    let plan = ["--plan", "window(64) | batch(3)", "--batches", "1"];
    let ran = Cat::local(&world, "part-*.bin", &plan).finish().good();
    assert!(ran.stderr.contains("part-1.bin: it has no sample"), "{}", ran.stderr);
    let plan = ["--plan", "window(5000) | batch(3)", "--batches", "1"];
    let refused = Cat::local(&world, "part-*.bin", &plan).finish();
    refused.failed(2, &["none of 3 files has a sample of 5000"], "smaller window");
}

#[test]
fn local_files_may_be_links_to_elsewhere() {
    let Some(world) = World::new("local_files_may_be_links") else {
        return;
    };
    let corpus = Corpus::megatron(&world.path("elsewhere.bin"), tokens(50_000, 1));
    symlink(&corpus.path, world.data("link.bin")).expect("a folder for tests");
    let plan = "window(128) | batch(4)";
    let local = Cat::local(&world, "link", &["--plan", plan, "--batches", "9"]).finish().good();
    assert_same(&local.stdout, &expected(plan, &[&corpus], 0..9));
}

#[test]
fn local_names_that_do_not_exist_are_explained() {
    let Some(world) = World::new("local_names_that_do_not_exist") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(5_000, 1));
    for (name, says, hint) in [
        ("nothing", "no such file", "dq://HOST/NAME"),
        ("", "is a folder", "FOLDER/*.bin"),
        ("*.npy", "no file matches", "corpora/*.bin"),
        ("[", "invalid range pattern", "corpora/*.bin"),
        ("***", "\"", "corpora/*.bin"),
    ] {
        let ran = Cat::local(&world, name, &["--batches", "1"]).finish();
        ran.failed(2, &[says], hint);
    }
    // A window larger than the file, and staging buffers larger than allowed.
    let ran = Cat::local(&world, "web", &["--plan", "window(6000)", "--batches", "1"]).finish();
    ran.failed(2, &["web.bin", "5000 tokens"], "smaller window");
    let small = ["--plan", "window(100)", "--batches", "1", "--memory", "64KiB"];
    Cat::local(&world, "web", &small).finish().failed(2, &["staging buffers"], "--memory");
}
