//! Blocks in other forms on the wire, and tokens that are replaced: the same batches in every
//! placement, and what is refused.

use std::fs;

use xio::dataset::Dtype;
use xio::plan::Plan;
use xio::reference::Reference;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, Ran, World, path};

/// Runs a stream with and without offload, and without daemons.
fn every_way(world: &World, target: &Daemon, dpu: &Daemon, name: &str, args: &[&str]) -> [Ran; 3] {
    let url = target.url(name);
    let through = Cat::through(world, dpu, &url, args).finish();
    let alone = Cat::alone(world, &url, args).finish();
    [through, alone, Cat::local(world, name, args).finish()]
}

/// Tokens of which some do not fit 16 bits.
fn with_large(count: usize) -> Vec<i128> {
    let large = |(at, token)| if at % 70_001 == 70_000 { 100_000 + token } else { token };
    tokens(count, 5).into_iter().enumerate().map(large).collect()
}

#[test]
fn every_form_delivers_the_same_batches() {
    let Some(world) = World::new("every_form_delivers_the_same") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(700_000, 1));
    let large = Corpus::flat(&world.data("large.bin"), Dtype::U32, with_large(900_000));
    let small = Corpus::flat(&world.data("small.bin"), Dtype::U16, tokens(500_000, 3));
    let escape = "narrow(u16, overflow=escape) | widen(u32)";
    for (corpus, form) in [
        (&web, "narrow(u16) | compress(lz4, when=always)"),
        (&web, "narrow(u16) | compress(zstd, level=3, when=always)"),
        (&web, "compress(zstd)"),
        (&web, "bitpack(16)"),
        (&large, "bitpack(18)"),
        (&large, "bitpack(18) | widen(i64) | pairs"),
        (&large, "narrow(u16, overflow=saturate(7))"),
        (&large, "narrow(u16, overflow=saturate(7)) | compress(zstd, when=always)"),
        (&large, escape),
        (&large, "narrow(u16, overflow=escape) | widen(i64) | compress(lz4, when=always)"),
        (&small, escape),
    ] {
        let plan = format!("window(500) | shuffle(3, blocks=2) | batch(20) | {form}");
        let name = corpus.path.file_stem().and_then(|name| name.to_str()).expect("a name");
        let want = expected(&plan, &[corpus], 0..100);
        let args = ["--plan", &plan, "--batches", "100", "--dtype", corpus.dtype.name()];
        for ran in every_way(&world, &target, &dpu, name, &args) {
            assert_same(&ran.good().stdout, &want);
        }
    }
    // Files of different types, of which only one has tokens that escape.
    let plan = format!("window(500) | blend(small=1, large=1) | batch(20) | {escape}");
    let manifests = [&small, &large].map(|corpus| (path(&corpus.path), corpus.dtype.name()));
    for (file, dtype) in manifests {
        world
            .program(&["inspect", file, "--dtype", dtype, "--write-manifest"])
            .output()
            .expect("it runs");
    }
    let want = expected(&plan, &[&small, &large], 0..100);
    for ran in every_way(&world, &target, &dpu, "", &["--plan", &plan, "--batches", "100"]) {
        assert_same(&ran.good().stdout, &want);
    }
    let status = target.status(&world);
    for counter in ["packed_blocks", "compressed_blocks", "codec_ns"] {
        assert!(status.counter(&format!("target.{counter}")) > 0, "{counter}");
    }
    let status = dpu.status(&world);
    for counter in ["compressed_blocks", "escaped_blocks", "replaced_tokens"] {
        assert!(status.counter(&format!("stream.{counter}")) > 0, "{counter}");
    }
}

#[test]
fn replaced_tokens_are_counted_wherever_they_are_replaced() {
    let Some(world) = World::new("replaced_tokens_are_counted") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    Corpus::flat(&world.data("large.bin"), Dtype::U32, with_large(900_000));
    let plan = "window(1000) | narrow(u16, overflow=saturate(0)) | batch(10)";
    // Every block once.
    let args = ["--plan", plan, "--batches", "90", "--dtype", "u32"];
    for ran in every_way(&world, &target, &dpu, "large", &args) {
        let said = "12 tokens of the blocks read did not fit and were replaced";
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
        ran.good();
    }
    assert_eq!(target.status(&world).counter("target.replaced_tokens"), 12);
}

#[test]
fn tokens_are_replaced_by_a_table_beside_the_datasets() {
    let Some(world) = World::new("tokens_are_replaced_by_a_table") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let web = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(500_000, 1));
    let table: Vec<i128> = (0..50_257).map(|id| (id * 7_919 + 3) % 50_257).collect();
    let ids: Vec<u32> = table.iter().map(|id| *id as u32).collect();
    fs::create_dir_all(world.data("tables")).expect("writable");
    let stored = Corpus::flat(&world.data("tables/new.bin"), Dtype::U32, table);
    let form = "narrow(u16) | compress(zstd, when=always) | batch(10)";
    let plan = |table: &str| format!("window(500) | shuffle(7) | remap(\"{table}\") | {form}");
    let tokens = web.tokens.clone();
    let file = xio::dataset::flat(Dtype::U32, 2_000_000).expect("whole tokens");
    let read = move |index: u64| tokens.get(index as usize).copied();
    let parsed = Plan::parse(&plan("t"), None).expect("a plan");
    let reference = Reference::new(&parsed, vec![(file, read)]).expect("it fits");
    let mut reference = reference.with_table(ids);
    let want: Vec<u8> =
        (0..90).flat_map(|batch| reference.batch(batch).expect("it fits")).collect();
    let (remote, local) = (plan("tables/new"), plan(path(&stored.path)));
    let args = |plan| ["--plan", plan, "--batches", "90", "--dtype", "u32"];
    let url = target.url("web");
    for ran in [
        Cat::through(&world, &dpu, &url, &args(&remote)).finish(),
        Cat::alone(&world, &url, &args(&remote)).finish(),
        Cat::local(&world, "web", &args(&local)).finish(),
    ] {
        assert_same(&ran.good().stdout, &want);
    }
    // A token without an entry, and tables that are none.
    Corpus::flat(&stored.path, Dtype::U32, (0..40_000).collect());
    Corpus::flat(&world.data("tables/empty.bin"), Dtype::U32, vec![]);
    Corpus::npy(&world.data("tables/long.npy"), (0..100).collect());
    Corpus::flat(&world.data("small.bin"), Dtype::U16, vec![5; 10_000]);
    Corpus::flat(&world.data("tables/wide.bin"), Dtype::U32, (70_000..70_100).collect());
    let first = web.tokens.iter().position(|token| *token >= 40_000).expect("a large token");
    let named = format!("token {first} ");
    let plan = |table: &str| format!("window(500) | remap(\"{table}\") | batch(10)");
    let cases: [(&str, &str, &str, i32, &[&str]); 6] = [
        ("web", "tables/new", "u32", 1, &["web.bin", &named, "the table of remap has 40000 ids"]),
        ("web", "tables/none", "u32", 2, &["tables/none", "no such"]),
        ("web", "../outside", "u32", 2, &["outside"]),
        ("web", "tables/long", "u32", 2, &["tables/long.npy", "it holds i64"]),
        ("small", "tables/wide", "u16", 2, &["do not fit u16"]),
        ("web", "tables/empty", "u32", 2, &["tables/empty.bin"]),
    ];
    for (name, table, dtype, code, parts) in cases {
        let (remote, local) = (plan(table), plan(path(&world.data(table))));
        let args = |plan| ["--plan", plan, "--batches", "20", "--dtype", dtype];
        let url = target.url(name);
        for ran in [
            Cat::through(&world, &dpu, &url, &args(&remote)).finish(),
            Cat::alone(&world, &url, &args(&remote)).finish(),
            Cat::local(&world, name, &args(&local)).finish(),
        ] {
            ran.failed(code, parts, "");
        }
    }
}

#[test]
fn tokens_that_do_not_fit_their_bits_are_named() {
    let Some(world) = World::new("tokens_that_do_not_fit_their_bits") else {
        return;
    };
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut ids = tokens(700_000, 1);
    let good = Corpus::flat(&world.data("good.bin"), Dtype::U32, ids.clone());
    ids[400_123] = 131_072;
    Corpus::flat(&world.data("bad.bin"), Dtype::U32, ids);
    let plan = "window(1000) | bitpack(17) | batch(10)";
    let want = expected(plan, &[&good], 0..40);
    let args = ["--plan", plan, "--batches", "60", "--dtype", "u32"];
    for ran in every_way(&world, &target, &dpu, "bad", &args) {
        let parts = ["bad.bin", "token 400123", "is 131072", "does not fit 17 bits"];
        ran.failed(1, &parts, "more bits");
        assert_same(&ran.stdout, &want);
    }
    for (plan, parts, hint) in [
        ("bitpack(17) | narrow(u16)", "not fewer than u16 has", "leave bitpack out"),
        ("narrow(u16, overflow=escape)", "escape needs", "widen(u32)"),
        ("compress(zstd, level=19)", "no level `19`", "-7 to 3"),
    ] {
        let plan = format!("window(1000) | {plan}");
        for ran in every_way(&world, &target, &dpu, "good", &["--plan", &plan]) {
            ran.failed(2, &[parts], hint);
        }
    }
}
