//! Files that do not hold what the plan needs: the error names the fault, its place and the remedy
//! (C5).

use std::fs;

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::documents::write_index;
use super::harness::{Cat, Daemon, Ran, World, path};

/// Runs a stream with and without offload, and without daemons.
fn every_way(world: &World, target: &Daemon, dpu: &Daemon, name: &str, args: &[&str]) -> [Ran; 3] {
    let url = target.url(name);
    let through = Cat::through(world, dpu, &url, args).finish();
    let alone = Cat::alone(world, &url, args).finish();
    [through, alone, Cat::local(world, name, args).finish()]
}

#[test]
fn a_token_that_does_not_fit_is_named_after_all_batches_before_it() {
    let Some(world) = World::new("a_token_that_does_not_fit") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let good = Corpus::flat(&world.data("good.bin"), Dtype::U32, tokens(700_000, 1));
    // In the middle of the second block, of the first block, and the very first token.
    for (at, value) in [(400_123, 65_536), (99_999, 4_294_967_295), (0, 70_000_i128)] {
        let mut bad = good.tokens.clone();
        bad[at] = value;
        // A second one later on changes nothing.
        bad[650_000] = 80_000;
        Corpus::flat(&world.data("bad.bin"), Dtype::U32, bad);
        let plan = "window(1000) | narrow(u16) | batch(10)";
        let args = ["--plan", plan, "--batches", "60"];
        let batches = at as u64 / 10_000;
        let want = expected(plan, &[&good], 0..batches);
        for ran in every_way(&world, &target, &dpu, "bad", &args) {
            let (token, byte) = (format!("token {at}"), format!("byte {}", at * 4));
            ran.failed(1, &["bad.bin", &token, &byte, &value.to_string()], "narrow(u32)");
            assert_same(&ran.stdout, &want);
        }
    }
    assert!(target.status(&world).counter("target.overflow") >= 3);
}

#[test]
fn a_shuffled_or_blended_token_that_does_not_fit_is_named() {
    let Some(world) = World::new("a_shuffled_or_blended_token") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(400_000, 1));
    let code = Corpus::npy(&world.data("code.npy"), tokens(300_000, 2));
    let plan = "window(500) | shuffle(3, blocks=2) | blend(web=1, code=1) | narrow(u16) | batch(8)";
    let clean = expected(plan, &[&web, &code], 0..60);
    let mut bad = code.clone();
    bad.tokens[140_000] = -1;
    Corpus::npy(&bad.path, bad.tokens.clone());
    let header = fs::metadata(&bad.path).expect("it exists").len() - 300_000 * 8;
    let byte = format!("byte {}", header + 140_000 * 8);
    // The batch that holds the token, by the order of the clean files: the first that differs.
    bad.tokens[140_000] = 50_300;
    let marked = expected(plan, &[&web, &bad], 0..60);
    let differs = clean.iter().zip(&marked).position(|(a, b)| a != b);
    let whole = differs.map_or(clean.len(), |at| at / 8_000 * 8_000);
    assert!(whole < clean.len(), "the token is not in the part of the stream that is read");
    for ran in every_way(&world, &target, &dpu, "", &["--plan", plan, "--batches", "60"]) {
        ran.failed(1, &["code.npy", "token 140000", &byte, " -1"], "narrow(u32)");
        assert_same(&ran.stdout, &clean[..whole]);
    }
}

/// Of packed documents only the sample with the token fails, and every batch before it is
/// delivered.
#[test]
fn a_packed_token_that_does_not_fit_is_named_after_all_batches_before_it() {
    let Some(world) = World::new("a_packed_token_that_does_not_fit") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let lengths: Vec<u32> = (0..6_000).map(|i| i * 37 % 150).collect();
    let ids = tokens(lengths.iter().sum::<u32>() as usize, 1);
    let mut web = Corpus::with_documents(&world.data("web.bin"), ids, lengths.clone());
    web.dtype = Dtype::I64;
    let mut bad = web.tokens.clone();
    bad[100_123] = 70_000;
    Corpus::npy(&world.data("bad.npy"), bad);
    write_index(&world.data("bad.idx"), &lengths, (5, 8));
    let plan = "window(256) | pack(best) | shuffle(3, blocks=2) | narrow(u16) | batch(4)";
    let clean = expected(plan, &[&web], 0..440);
    web.tokens[100_123] = 50_300;
    let marked = expected(plan, &[&web], 0..440);
    let differs = clean.iter().zip(&marked).position(|(a, b)| a != b);
    let whole = differs.expect("an epoch has every token") / 2_048 * 2_048;
    // Not in the first batch of its block.
    assert!(whole > 0);
    for ran in every_way(&world, &target, &dpu, "bad", &["--plan", plan, "--batches", "440"]) {
        ran.failed(1, &["bad.npy", "token 100123", " 70000"], "narrow(u32)");
        assert_same(&ran.stdout, &clean[..whole]);
    }
    // Without an index nobody knows the documents; with none in it there is nothing to pack.
    Corpus::flat(&world.data("flat.bin"), Dtype::U16, tokens(5_000, 1));
    Corpus::with_documents(&world.data("empty.bin"), tokens(0, 1), vec![0, 0]);
    for (name, part, hint) in [
        ("flat", "has no index beside it", "dquant convert"),
        ("empty", "empty.bin: no document holds a token", "dquant inspect"),
    ] {
        for ran in every_way(&world, &target, &dpu, name, &["--plan", plan, "--batches", "4"]) {
            ran.failed(2, &[name, part], hint);
        }
    }
}

#[test]
fn a_file_cut_short_while_it_is_read_is_an_error() {
    let Some(world) = World::new("a_file_cut_short") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&["--memory", "64MiB"]));
    let plan = "window(1024) | narrow(u16) | batch(32)";
    let args = ["--plan", plan, "--slots", "2", "--slot-size", "64KiB"];
    for has_manifest in [true, false] {
        let manifest = world.data("web.bin.dquant.json");
        let _ = fs::remove_file(manifest);
        let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(3_000_000, 3));
        if has_manifest {
            let file = world.data("web.bin");
            world.run(&["inspect", path(&file), "--dtype", "u32", "--write-manifest"]).good();
        }
        let mut through = Cat::through(&world, &dpu, &target.url("web"), &args);
        let mut alone = Cat::alone(&world, &target.url("web"), &args);
        let mut local = Cat::local(&world, "web", &args);
        let heads = [through.read(100), alone.read(100), local.read(100)];
        // Eight blocks are on their way to each reader; what lies behind them is not read yet.
        let file = fs::File::options().write(true).open(&corpus.path).expect("it exists");
        file.set_len((9 << 20) + (1 << 19) + 12).expect("it can be cut");
        let want = expected(plan, &[&corpus], 0..2432 / 32);
        for (cat, head) in [through, alone, local].into_iter().zip(heads) {
            let ran = cat.finish();
            ran.failed(1, &["web.bin", "ends at byte 9961484", "truncated"], "that stores it");
            let got = [head, ran.stdout].concat();
            match has_manifest {
                // Every block of the manifest before the one that is cut; sample 2304 is the first
                // of that.
                true => assert_same(&got, &want[..2304 / 32 * (64 << 10)]),
                // What was read before the file changed.
                false => assert_same(&got, &want[..got.len()]),
            }
        }
    }
    assert!(target.status(&world).counter("target.changed_files") >= 4);
}

#[test]
fn a_file_emptied_while_it_is_read_is_said_to_be_empty() {
    let Some(world) = World::new("a_file_emptied") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(6_000_000, 3));
    let (target, dpu) = (world.target(&[]), world.dpu(&["--memory", "64MiB"]));
    let args = ["--plan", "window(1024) | narrow(u16)", "--slots", "2", "--slot-size", "64KiB"];
    let mut through = Cat::through(&world, &dpu, &target.url("web"), &args);
    through.read(100);
    fs::File::options().write(true).open(&corpus.path).expect("it exists").set_len(0).expect("cut");
    through.finish().failed(1, &["web.bin", "is empty now", "truncated"], "that stores it");
}

#[test]
fn types_that_do_not_go_with_the_file() {
    let Some(world) = World::new("types_that_do_not_go_with_the_file") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    fs::write(world.data("odd.bin"), [0; 4_003]).expect("writable");
    fs::write(world.data("short.bin"), [0; 400]).expect("writable");
    fs::write(world.data("empty.bin"), []).expect("writable");
    fs::write(world.data("broken.npy"), b"\x93NUMPY\x01\x00nonsense").expect("writable");
    fs::write(world.data("pair.bin"), [0; 64]).expect("writable");
    fs::write(world.data("pair.idx"), b"MMIDIDX\x00\x00nonsense").expect("writable");
    Corpus::megatron(&world.data("small.bin"), tokens(10_000, 1));
    type Case = (&'static str, &'static [&'static str], &'static [&'static str], &'static str);
    let cases: &[Case] = &[
        ("odd", &["--dtype", "u128"], &["odd.bin", "u128"], "--dtype"),
        ("odd", &[], &["odd.bin", "no header"], "--dtype"),
        ("odd", &["--dtype", "u32"], &["odd.bin", "4003"], "inspect"),
        ("short", &["--dtype", "u32"], &["short.bin", "2048", "100"], "window"),
        ("empty", &["--dtype", "u32"], &["empty.bin"], ""),
        ("broken", &[], &["broken.npy"], "inspect"),
        ("pair", &[], &["pair"], "inspect"),
        // Narrowing cannot widen.
        ("small", &["--plan", "window(8) | narrow(u32)"], &["u16", "narrow(u32)"], ""),
    ];
    for (name, args, parts, hint) in cases {
        for ran in every_way(&world, &target, &dpu, name, args) {
            ran.failed(2, parts, hint);
            assert!(ran.stdout.is_empty());
        }
    }
}
