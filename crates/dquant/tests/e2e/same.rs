//! The bytes of a stream depend only on data, plan and batch number (C4).

use std::path::{Path, PathBuf};

use xio::dataset::Dtype;
use xio::documents::Documents;
use xio::plan::Plan;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, World, path};

/// Loses one packet of a hundred on the receiving side of each endpoint.
const LOSSY: &[&str] = &["--loss", "1%", "--seed", "7"];

/// 3 MiB of 32-bit tokens: three blocks, so that a stream of some epochs takes no time.
fn one_corpus(world: &World) -> Corpus {
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(800_000, 1))
}

/// A flat file, a NumPy file and a Megatron pair, of three token types.
fn three_corpora(world: &World) -> [Corpus; 3] {
    [
        Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(700_000, 1)),
        Corpus::npy(&world.data("code.npy"), tokens(300_000, 2)),
        Corpus::megatron(&world.data("books.bin"), tokens(450_001, 3)),
    ]
}

/// Reads a stream with and without offload, and without daemons, and compares each with `want`.
fn every_way(world: &World, target: &Daemon, dpu: &Daemon, args: &[&str], want: &[u8]) {
    let through = Cat::through(world, dpu, &target.url(args[0]), &args[1..]).finish().good();
    assert_same(&through.stdout, want);
    let alone = Cat::alone(world, &target.url(args[0]), &args[1..]).finish().good();
    assert_same(&alone.stdout, want);
    let local = Cat::local(world, args[0], &args[1..]).finish().good();
    assert_same(&local.stdout, want);
}

/// Windows in the order of the file, by hand: what the reference is checked against.
fn windows_in_order(corpus: &Corpus, window: usize, samples: usize) -> Vec<u8> {
    let whole = corpus.tokens.len() / window * window;
    let endless = corpus.tokens[..whole].iter().cycle().take(samples * window);
    endless.flat_map(|token| (*token as u16).to_le_bytes()).collect()
}

#[test]
fn one_corpus_in_order() {
    let Some(world) = World::new("one_corpus_in_order") else {
        return;
    };
    let corpus = one_corpus(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(1000) | narrow(u16) | batch(16)";
    let want = expected(plan, &[&corpus], 0..120);
    assert_same(&want, &windows_in_order(&corpus, 1000, 16 * 120));
    let args = ["web", "--plan", plan, "--batches", "120"];
    every_way(&world, &target, &dpu, &args, &want);
    let served = target.status(&world);
    assert!(served.counter("target.requests_done") > 0);
    assert_eq!(served.counter("control.auth_failures"), 0);
}

#[test]
fn three_corpora_blended_and_shuffled() {
    let Some(world) = World::new("three_corpora_blended_and_shuffled") else {
        return;
    };
    let [web, code, books] = three_corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(500) | shuffle(7, blocks=2) | blend(web=0.5, code=0.3, books=0.2) \
                | narrow(u16) | batch(24)";
    let want = expected(plan, &[&web, &code, &books], 0..150);
    let args = ["", "--plan", plan, "--batches", "150", "--slots", "3", "--slot-size", "64KiB"];
    every_way(&world, &target, &dpu, &args, &want);
}

/// Documents of 0 to 2,400 tokens, most of them short.
fn documents(world: &World, name: &str, salt: u64) -> Corpus {
    let length = |i: u64| {
        ((i * i * 7_919 + salt * 31) % if i.is_multiple_of(9) { 2_401 } else { 300 }) as u32
    };
    let lengths: Vec<u32> = (0..2_500).map(length).collect();
    let all = lengths.iter().sum::<u32>() as usize;
    Corpus::with_documents(&world.data(name), tokens(all, salt), lengths)
}

#[test]
fn documents_packed_into_samples() {
    let Some(world) = World::new("documents_packed_into_samples") else {
        return;
    };
    let corpora = [documents(&world, "web.bin", 1), documents(&world, "code.bin", 2)];
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    for plan in [
        "window(1025) | pack(best, pad=50256) | shuffle(7) | blend(web=2, code=1) | widen(i64) \
         | pairs(ignore=-100) | positions | batch(4)",
        "window(512) | pack(first) | blend(web=2, code=1) | batch(4)",
        "window(700) | pack(single, pad=1) | shuffle(3, blocks=2) | blend(web=1, code=1) | positions | batch(3)",
        "window(900, overlap=100) | shuffle(7) | blend(web=2, code=1) | widen(i32) | pairs(ignore=-1) \
         | positions | batch(2)",
    ] {
        let want = expected(plan, &[&corpora[0], &corpora[1]], 0..300);
        every_way(&world, &target, &dpu, &["", "--plan", plan, "--batches", "300"], &want);
    }
}

/// Megatron-core's order: the tokens of each sample from the ranges that the order lists, by hand.
#[test]
fn the_order_of_megatron() {
    let Some(world) = World::new("the_order_of_megatron") else {
        return;
    };
    let corpora = [documents(&world, "web.bin", 1), documents(&world, "code.bin", 2)];
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(1025, overlap=1) | order(megatron, seed=1234, samples=1500) \
                | blend(web=0.7, code=0.3) | batch(4)";
    let known = |corpus: &Corpus| Documents::new(corpus.documents.iter().cloned()).expect("sound");
    let order = Plan::parse(plan, None).expect("a plan");
    let order = order.megatron_order(corpora.iter().map(known).collect(), 1 << 30);
    let order = order.expect("asked for").expect("documents with tokens");
    let tokens = order.cursor_at(0).take(1_500).flat_map(|(dataset, k)| {
        let tokens = &corpora[dataset].tokens;
        let pieces = order.pieces(dataset, k).collect::<Vec<_>>().into_iter();
        pieces.flat_map(|piece| tokens[piece.start as usize..piece.end as usize].to_vec())
    });
    let want: Vec<u8> = tokens.flat_map(|token| (token as u16).to_le_bytes()).collect();
    // Without a number of batches the stream ends with the last whole batch.
    every_way(&world, &target, &dpu, &["", "--plan", plan], &want[..375 * 4 * 1025 * 2]);
    let late = ["", "--plan", plan, "--first-batch", "300", "--batches", "10"];
    let batch = 4 * 1025 * 2;
    every_way(&world, &target, &dpu, &late, &want[300 * batch..310 * batch]);
    let beyond = [&target.url(""), "--plan", plan, "--first-batch", "370", "--batches", "6"];
    let refused = Cat::through(&world, &dpu, beyond[0], &beyond[1..]).finish();
    refused.failed(2, &["the order has 5 from batch 370 on"], "samples=");
}

#[test]
fn other_placements_and_types() {
    let Some(world) = World::new("other_placements_and_types") else {
        return;
    };
    let [web, code, books] = three_corpora(&world);
    let (target, dpu) = (world.target(&["--io", "buffered"]), world.dpu(&[]));
    // As it is, narrowed to 32 bits, and with a window that fills a block on its own.
    for (plan, name, corpus) in [
        ("window(64) | shuffle(3) | batch(100)", "web", &web),
        ("window(777) | narrow(u32) | batch(5)", "code.npy", &code),
        ("window(4096) | shuffle(seed) | batch(2)", "books", &books),
        ("window(131072) | narrow(u16) | batch(1)", "web.bin", &web),
        // Forms of frameworks: larger types, inputs and labels, windows that overlap.
        ("window(65, overlap=1) | narrow(u16) | widen(i64) | pairs | batch(7)", "web", &web),
        ("window(129, overlap=1) | shuffle(4) | widen(i32) | pairs | batch(16)", "books", &books),
        ("window(300, overlap=299) | narrow(u32) | widen(i64) | batch(9)", "code", &code),
    ] {
        let want = expected(plan, &[corpus], 0..40);
        every_way(&world, &target, &dpu, &[name, "--plan", plan, "--batches", "40"], &want);
    }
}

#[test]
fn lost_packets_change_nothing() {
    let Some(world) = World::new("lost_packets_change_nothing") else {
        return;
    };
    let [web, code, books] = three_corpora(&world);
    let (target, dpu) = (world.target(LOSSY), world.dpu(LOSSY));
    let plan = "window(512) | shuffle(9, blocks=3) | blend(web=2, code=1, books=1) \
                | narrow(u16) | batch(32)";
    let want = expected(plan, &[&web, &code, &books], 0..400);
    let args = ["--plan", plan, "--batches", "400"];
    let through = Cat::through(&world, &dpu, &target.url(""), &args).finish().good();
    assert_same(&through.stdout, &want);
    let with_loss = [&args[..], &["--loss", "1%"]].concat();
    let alone = Cat::alone(&world, &target.url(""), &with_loss).finish().good();
    assert_same(&alone.stdout, &want);
    // A target receives few packets, so it may have lost none; a DPU receives all the data.
    assert!(dpu.status(&world).counter("udp.injected_drops") > 0);
    assert!(target.status(&world).counter("roce.retransmitted_packets") > 0);
}

/// On one machine only `delay` controls: `auto` knows that no link is shared.
#[test]
fn congestion_control_changes_nothing_and_is_shown() {
    let Some(world) = World::new("congestion_control_changes_nothing_and_is_shown") else {
        return;
    };
    let [web, code, books] = three_corpora(&world);
    let plan = "window(512) | shuffle(9, blocks=3) | blend(web=2, code=1, books=1) \
                | narrow(u16) | batch(32)";
    let want = expected(plan, &[&web, &code, &books], 0..200);
    for control in ["delay", "auto"] {
        let with = ["--cc", control];
        let (target, dpu) = (world.target(&with), world.dpu(&with));
        let args = ["--plan", plan, "--batches", "200"];
        let through = Cat::through(&world, &dpu, &target.url(""), &args).finish().good();
        assert_same(&through.stdout, &want);
        let shown = format!("congestion control: {control}");
        for daemon in [&target, &dpu] {
            let status = daemon.status(&world);
            let notes = status.0["notes"].as_array().expect("a list");
            assert!(notes.iter().any(|note| *note == *shown), "{notes:?}");
            assert!(status.0["counters"]["congestion.window_packets"].is_u64(), "{status:?}");
        }
    }
}

/// The library of this workspace. Cargo puts it beside the program, or in the folder of the tests,
/// when it was built.
fn built_library() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_BIN_EXE_dquant")).parent()?;
    let places = ["libibverbs.so", "deps/libibverbs.so"].map(|name| folder.join(name));
    places.into_iter().find(|place| place.exists())
}

#[test]
fn a_device_of_a_library_changes_nothing() {
    const TEST: &str = "a_device_of_a_library_changes_nothing";
    let Some(world) = World::new(TEST) else {
        return;
    };
    let Some(library) = built_library() else {
        let reason = "no libibverbs.so beside the program: cargo build -p ibverbs";
        return crate::skip::note(&format!("e2e::{TEST}"), reason);
    };
    let [web, code, books] = three_corpora(&world);
    let device = ["--device", "dq_lo", "--verbs-library", path(&library)];
    let (target, dpu) = (world.target(&device), world.dpu(&device));
    let plan = "window(512) | shuffle(9, blocks=3) | blend(web=2, code=1, books=1) \
                | narrow(u16) | batch(32)";
    let want = expected(plan, &[&web, &code, &books], 0..200);
    let args = ["--plan", plan, "--batches", "200"];
    let through = Cat::through(&world, &dpu, &target.url(""), &args).finish().good();
    assert_same(&through.stdout, &want);
    for daemon in [&target, &dpu] {
        let counters = &daemon.status(&world).0["counters"];
        assert!(counters["device.notifications"].is_u64(), "not on the library: {counters}");
        assert!(counters["roce.retransmitted_packets"].is_null(), "on both: {counters}");
    }
}

#[test]
fn a_stream_resumes_at_any_batch() {
    let Some(world) = World::new("a_stream_resumes_at_any_batch") else {
        return;
    };
    let [web, code, books] = three_corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let plan = "window(256) | shuffle(5, blocks=2) | blend(web=0.6, code=0.1, books=0.3) \
                | narrow(u16) | batch(50)";
    let corpora = [&web, &code, &books];
    let batch_bytes = 256 * 50 * 2;
    let full = expected(plan, &corpora, 0..200);
    // In the first and a later group, in later epochs of some corpora, and at the end.
    for first in [1, 37, 111, 199_usize] {
        let (from, count) = (first.to_string(), (200 - first).to_string());
        let args = ["", "--plan", plan, "--first-batch", &from, "--batches", &count];
        every_way(&world, &target, &dpu, &args, &full[first * batch_bytes..]);
    }
    // The others keep their numbers and bytes.
    let without = [
        &full[..3 * batch_bytes],
        &full[50 * batch_bytes..60 * batch_bytes],
        &full[199 * batch_bytes..],
    ];
    let leave_out = ["--leave-out", "60..199", "--leave-out", "3..50"];
    let args = [&["", "--plan", plan, "--batches", "200"][..], &leave_out].concat();
    every_way(&world, &target, &dpu, &args, &without.concat());
    let far = expected(plan, &corpora, 2_000..2_005);
    let args = ["", "--plan", plan, "--first-batch", "2000", "--batches", "5"];
    every_way(&world, &target, &dpu, &args, &far);
}

/// More datasets than there was memory for when each took two groups of 8 MiB, and weights that
/// change.
#[test]
fn many_datasets_open_with_default_settings() {
    let Some(world) = World::new("many_datasets_open_with_default_settings") else {
        return;
    };
    let name = |i: u64| format!("d{i:02}");
    let corpora: Vec<Corpus> = (0..40)
        .map(|i| {
            Corpus::flat(&world.data(&format!("{}.bin", name(i))), Dtype::U32, tokens(600_000, i))
        })
        .collect();
    let weights: Vec<String> =
        (0..40).map(|i| format!("{}={}:{}", name(i), 1 + i % 3, 40 - i)).collect();
    let plan = format!(
        "window(512) | shuffle(9) | blend({}) | phases(1000) | batch(20)",
        weights.join(", ")
    );
    let corpora: Vec<&Corpus> = corpora.iter().collect();
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let args = ["", "--plan", &plan, "--batches", "120"];
    every_way(&world, &target, &dpu, &args, &expected(&plan, &corpora, 0..120));
}

#[test]
fn the_last_batch_that_can_be_counted() {
    let Some(world) = World::new("the_last_batch_that_can_be_counted") else {
        return;
    };
    let [web, ..] = three_corpora(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let first = (1_u64 << 53) / 8 - 3;
    let from = first.to_string();
    // In order: sample n is sample n modulo the samples of the file.
    let plan = "window(1000) | narrow(u16) | batch(8)";
    let samples = (first * 8..(first + 3) * 8).map(|sample| (sample % 700) as usize);
    let tokens = samples.flat_map(|sample| web.tokens[sample * 1000..][..1000].iter());
    let want: Vec<u8> = tokens.flat_map(|token| (*token as u16).to_le_bytes()).collect();
    let args = ["web", "--plan", plan, "--first-batch", &from, "--batches", "3"];
    every_way(&world, &target, &dpu, &args, &want);
    // Blended and shuffled, there is no formula; both ways agree.
    let plan = "window(1000) | shuffle(1) | blend(web=0.7, code=0.2, books=0.1) | narrow(u16) \
                | batch(8)";
    let args = ["--plan", plan, "--first-batch", &from, "--batches", "3"];
    let through = Cat::through(&world, &dpu, &target.url(""), &args).finish().good();
    assert_eq!(through.stdout.len(), 3 * 8 * 1000 * 2);
    let alone = Cat::alone(&world, &target.url(""), &args).finish().good();
    assert_same(&alone.stdout, &through.stdout);
    let beyond = ["--plan", plan, "--first-batch", &from, "--batches", "4"];
    let ran = Cat::through(&world, &dpu, &target.url(""), &beyond).finish();
    ran.failed(2, &[&from, "beyond the last"], "--first-batch");
}
