//! The type of a flat file: from its manifest, from the user, or from its bytes; never a silent
//! mistake.

use std::fs;
use std::path::{Path, PathBuf};

use formats::Manifest;
use formats::manifest::Contents;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World};

const PLAN: &str = "window(1000) | batch(10)";

const ARGS: [&str; 4] = ["--plan", PLAN, "--batches", "9"];

fn both_ways(world: &World, dpu: &Daemon, url: &str, args: &[&str]) -> [Ran; 2] {
    let args = [&ARGS[..], args].concat();
    [Cat::through(world, dpu, url, &args).finish(), Cat::alone(world, url, &args).finish()]
}

fn describe(corpus: &Corpus) -> Manifest {
    let largest = corpus.tokens.iter().copied().max().expect("tokens");
    let contents = Contents {
        tokens: corpus.tokens.len() as u64,
        max_id: Some(largest),
        ..Contents::default()
    };
    let folder = corpus.path.parent().expect("a folder");
    let files = [PathBuf::from(corpus.path.file_name().expect("a name"))];
    Manifest::create(("flat", corpus.dtype), contents, folder, &files, &|_| ()).expect("readable")
}

#[test]
fn a_wrong_type_is_refused_and_a_guess_is_reported() {
    let Some(world) = World::new("a_wrong_type_is_refused") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let all =
        [("narrow", Dtype::U16, "u32"), ("wide", Dtype::U32, "u16"), ("long", Dtype::I64, "u16")];
    for (name, dtype, wrong) in all {
        let corpus = Corpus::flat(&world.data(&format!("{name}.bin")), dtype, tokens(400_000, 3));
        let want = expected(PLAN, &[&corpus], 0..9);
        let parts = [name, &format!("is not {wrong} but {dtype}")];
        let through = |args: &[&str]| {
            Cat::through(&world, &dpu, &target.url(name), &[&ARGS[..], args].concat()).finish()
        };
        let ran = through(&["--dtype", wrong]);
        ran.failed(2, &parts, "--force");
        assert!(ran.stdout.is_empty());
        let given = through(&["--dtype", dtype.name()]);
        assert!(!given.stderr.contains("guess"), "{}", given.stderr);
        assert_same(&given.good().stdout, &want);
        through(&["--vocab", "1000"]).failed(2, &[name], "");
        let guess = format!("{name}.bin: {dtype} is a guess");
        for ran in both_ways(&world, &dpu, &target.url(name), &[]) {
            assert!(ran.stderr.contains(&guess), "{}", ran.stderr);
            assert_same(&ran.good().stdout, &want);
        }
    }
}

#[test]
fn a_manifest_tells_the_type_and_must_be_of_the_file() {
    let Some(world) = World::new("a_manifest_tells_the_type") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    // All ids alike: the bytes tell nothing.
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U16, vec![7; 200_000]);
    let url = target.url("web");
    for ran in both_ways(&world, &dpu, &url, &[]) {
        ran.failed(2, &["web.bin", "no header that tells the type"], "--dtype");
    }
    let stored = describe(&web).store(&web.path).expect("writable");
    let want = expected(PLAN, &[&web], 0..9);
    for ran in both_ways(&world, &dpu, &url, &["--vocab", "8"]) {
        assert!(!ran.stderr.contains("guess"), "{}", ran.stderr);
        assert_same(&ran.good().stdout, &want);
    }
    let refused = |args: &[&str], parts: &[&str], hint: &str| {
        let args = [&ARGS[..], args].concat();
        Cat::through(&world, &dpu, &url, &args).finish().failed(2, parts, hint);
    };
    refused(&["--dtype", "u32"], &["web.bin", "u16 according to its manifest, not u32"], "--dtype");
    refused(&["--vocab", "7"], &["web.bin", "id 7", "vocabulary of 7"], "tokenizer");
    let ran = Cat::through(&world, &dpu, &target.url("web.bin.dquant.json"), &ARGS).finish();
    ran.failed(2, &["web.bin.dquant.json", "holds no tokens"], "describes");
    let text = fs::read_to_string(&stored).expect("it was stored");
    let breaks =
        [("200000", "200001", "edited"), ("{", "", "invalid"), ("400000", "4000000", "cover")];
    for (from, to, part) in breaks {
        fs::write(&stored, text.replacen(from, to, 1)).expect("writable");
        refused(&[], &["web.bin.dquant.json", part], "--write-manifest");
    }
    fs::write(&stored, text).expect("writable");
    cut(&web.path, 399_998);
    refused(&[], &["web.bin: has 399998 bytes, its manifest describes 400000"], "--write-manifest");
}

fn cut(path: &Path, len: u64) {
    fs::File::options()
        .write(true)
        .open(path)
        .and_then(|file| file.set_len(len))
        .expect("writable");
}

/// A header of llm.c in front of the tokens: the target reads behind it, and refuses one that
/// nobody knows.
#[test]
fn headers_are_no_tokens_at_the_target_either() {
    let Some(world) = World::new("headers_are_no_tokens") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let corpus = Corpus::flat(&world.data("plain.bin"), Dtype::U16, tokens(400_000, 3));
    let want = expected(PLAN, &[&corpus], 0..9);
    let plain = fs::read(&corpus.path).expect("it was written");
    let file = |number: u32| {
        let words = [number, 1, plain.len() as u32 / 2].map(u32::to_le_bytes);
        let mut file = words.concat();
        file.resize(1_024, 0);
        [&file[..], &plain].concat()
    };
    fs::write(world.data("known.bin"), file(20_240_520)).expect("writable");
    for ran in both_ways(&world, &dpu, &target.url("known"), &[]) {
        assert!(!ran.stderr.contains("guess"), "{}", ran.stderr);
        assert_same(&ran.good().stdout, &want);
    }
    fs::write(world.data("own.bin"), file(20_250_211)).expect("writable");
    fs::write(world.data("own.bin.dochash"), &plain).expect("writable");
    for args in [&[][..], &["--dtype", "u16"]] {
        for ran in both_ways(&world, &dpu, &target.url("own"), args) {
            ran.failed(2, &["own.bin", "begins with an unknown header"], "tail -c");
        }
    }
    for ran in both_ways(&world, &dpu, &target.url("own.bin.dochash"), &["--dtype", "u16"]) {
        ran.failed(2, &["own.bin.dochash", "holds no tokens"], "describes");
    }
}
