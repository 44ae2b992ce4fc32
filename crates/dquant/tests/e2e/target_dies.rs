//! `kill -9` of the storage target while a stream runs.
//!
//! The reader of the stream is stopped after a few batches, so that the kill always falls into the
//! middle of it: the rest is more than ring, pipe and staging buffers hold.

use std::time::{Duration, Instant};

use tonic::Status;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, World, eventually, fresh_ip};
use super::hostile_packets::runtime;
use super::relay::Relay;

/// 64 KiB a batch; shuffled, so that a block requested twice would show.
const PLAN: &str = "window(1024) | shuffle(11, blocks=2) | narrow(u16) | batch(32)";
const BATCHES: u64 = 300;
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "300", "--slots", "2", "--slot-size", "64KiB"];

/// Three blocks of the disk.
fn corpus(world: &World) -> Corpus {
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 4))
}

#[test]
fn a_restarted_target_is_found_again() {
    let Some(world) = World::new("a_restarted_target_is_found_again") else {
        return;
    };
    let corpus = corpus(&world);
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    for kills in [1, 2] {
        let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
        let mut got = Vec::new();
        for _ in 0..kills {
            got.extend(cat.read(5 << 20));
            target.kill();
            target.restart(&world);
        }
        let rest = cat.finish().good();
        got.extend(rest.stdout);
        assert_same(&got, &want);
    }
    let status = dpu.status(&world);
    assert!(status.counter("stream.lost_connections") >= 3, "{status:?}");
    assert_eq!(status.counter("stream.corrupt_blocks"), 0);
}

#[test]
fn without_offload_too() {
    let Some(world) = World::new("target_dies::without_offload_too") else {
        return;
    };
    let corpus = corpus(&world);
    let mut target = world.target(&[]);
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let mut cat = Cat::alone(&world, &target.url("web"), ARGS);
    let mut got = cat.read(1 << 20);
    target.kill();
    // The reader meets a target that is not there before it meets the new one.
    std::thread::sleep(Duration::from_millis(200));
    target.restart(&world);
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &want);
}

/// Tokens and their loss weights come from two files over one connection, which is lost in the
/// middle.
#[test]
fn loss_weights_stay_with_their_tokens() {
    let Some(world) = World::new("loss_weights_stay_with_their_tokens") else {
        return;
    };
    corpus(&world);
    let mut weights = formats::npy_header(Dtype::F32, 786_432);
    weights.extend((0..786_432).flat_map(|at| (at as f32 / 8.0).to_le_bytes()));
    std::fs::write(world.data("web.loss_weights.npy"), weights).expect("writable");
    let plan = "window(1025, overlap=1) | shuffle(11, blocks=2) | narrow(u16) | pairs | loss_weights | batch(7)";
    let args = ["--plan", plan, "--batches", "600", "--slots", "2", "--slot-size", "64KiB"];
    // That of the reference (`xio/tests/local.rs`), on any disk.
    let want = Cat::local(&world, "web", &args).finish().good().stdout;
    assert_eq!(want.len(), 600 * 7 * 1024 * (2 + 2 + 4));
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let open = |target: &Daemon| {
        let through = Cat::through(&world, &dpu, &target.url("web"), &args);
        [through, Cat::alone(&world, &target.url("web"), &args)]
    };
    let mut cats = open(&target);
    let mut got = [Vec::new(), Vec::new()];
    for _ in 0..2 {
        for (cat, got) in cats.iter_mut().zip(&mut got) {
            got.extend(cat.read(5 << 20));
        }
        target.kill();
        target.restart(&world);
    }
    for (cat, mut got) in cats.into_iter().zip(got) {
        got.extend(cat.finish().good().stdout);
        assert_same(&got, &want);
    }
    // Another file of weights is another stream.
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), &args);
    cat.read(1 << 20);
    target.kill();
    let mut weights = formats::npy_header(Dtype::F32, 786_432);
    weights.resize(128 + 4 * 786_432, 0);
    std::fs::write(world.data("web.loss_weights.npy"), weights).expect("writable");
    target.restart(&world);
    cat.finish().failed(3, &["has changed since the stream was opened"], "open the stream again");
}

#[test]
fn a_target_that_stays_away_ends_the_stream() {
    let Some(world) = World::new("a_target_that_stays_away_ends_the_stream") else {
        return;
    };
    let corpus = corpus(&world);
    let (mut target, dpu) = (world.target(&[]), world.dpu(&["--reconnect", "2s"]));
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let mut through = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let alone_args = [ARGS, &["--reconnect", "2s"]].concat();
    let mut alone = Cat::alone(&world, &target.url("web"), &alone_args);
    let heads = [through.read(1 << 20), alone.read(1 << 20)];
    let control = target.control().to_owned();
    let died = Instant::now();
    target.kill();
    for (cat, head) in [through, alone].into_iter().zip(heads) {
        let ran = cat.finish();
        ran.failed(3, &["target", &control, "could not be restored"], "--reconnect");
        assert!(died.elapsed() >= Duration::from_secs(2), "it gave up before its time");
        // Correct, whole batches up to where it ended.
        let got = [head, ran.stdout].concat();
        assert_eq!(got.len() % (64 << 10), 0);
        assert_same(&got, &want[..got.len()]);
    }
    eventually("the end of the stream", || {
        (dpu.status(&world).counter("dpu.streams") == 0).then_some(())
    });
}

/// The served file changes while the target is down: the stream ends with an error that names it,
/// after correct batches only.
fn refused_after(name: &str, change: impl FnOnce(&World, &Corpus)) {
    let Some(world) = World::new(name) else {
        return;
    };
    let corpus = corpus(&world);
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let head = cat.read(1 << 20);
    target.kill();
    change(&world, &corpus);
    target.restart(&world);
    let ran = cat.finish();
    ran.failed(3, &["web.bin", "has changed since", target.control()], "");
    let got = [head, ran.stdout].concat();
    assert_same(&got, &expected(PLAN, &[&corpus], 0..got.len() as u64 / (64 << 10)));
}

#[test]
fn refusals_that_may_pass_are_tried_again_and_others_are_not() {
    let Some(world) = World::new("refusals_that_may_pass") else {
        return;
    };
    let corpus = corpus(&world);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let runtime = runtime();
    let relay = Relay::start(&runtime, &target, true);
    let want = expected(PLAN, &[&corpus], 0..BATCHES);

    let mut cat = Cat::through(&world, &dpu, &relay.url("web"), ARGS);
    let mut got = cat.read(1 << 20);
    relay.cut(vec![
        Status::internal("the disk hiccups"),
        Status::unavailable("the engine is overloaded: its queue is full"),
        Status::resource_exhausted("sessions: 65 needed, 64 free"),
    ]);
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &want);
    assert_eq!(relay.refusals_left(), 0);

    let mut cat = Cat::through(&world, &dpu, &relay.url("web"), ARGS);
    cat.read(1 << 20);
    relay.cut(vec![Status::internal("never asked"), Status::not_found("web: no such dataset")]);
    cat.finish().failed(3, &["no such dataset"], "--reconnect");
    assert_eq!(relay.refusals_left(), 1, "it was tried again");
}

#[test]
fn a_dataset_that_changed_meanwhile_is_refused() {
    refused_after("a_dataset_that_changed_meanwhile", |_, corpus| {
        Corpus::flat(&corpus.path, Dtype::U32, tokens(400_000, 5));
    });
}

#[test]
fn a_dataset_of_the_same_length_in_its_place_is_refused() {
    refused_after("a_dataset_of_the_same_length", |world, corpus| {
        let other = world.data("other.part");
        Corpus::flat(&other, Dtype::U32, tokens(786_432, 5));
        std::fs::rename(&other, &corpus.path).expect("in the same folder");
    });
}

#[test]
fn a_target_that_never_was_is_unreachable() {
    let Some(world) = World::new("a_target_that_never_was_is_unreachable") else {
        return;
    };
    let dpu = world.dpu(&[]);
    let address = format!("{}:4790", fresh_ip());
    let url = format!("dq://{address}/web");
    for ran in [Cat::through(&world, &dpu, &url, &[]), Cat::alone(&world, &url, &[])] {
        let ran = ran.finish();
        ran.failed(3, &["target", &address, "refused"], "dquant serve");
        assert!(ran.stdout.is_empty());
    }
    world.run(&["status", "--control", &address]).failed(3, &["daemon", &address], "dquant dpu");
}
