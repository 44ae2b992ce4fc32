//! `kill -9` of the trainer, and clients that come and go: what they held is freed.

use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, World, eventually};

const PLAN: &str = "window(1024) | shuffle(2, blocks=3) | narrow(u16) | batch(16)";
const ENDLESS: &[&str] = &["--plan", PLAN, "--slots", "4", "--slot-size", "64KiB"];

/// Resources of a pair of daemons that clients could make them leak.
#[derive(Debug, PartialEq)]
struct Holdings {
    sessions: u64,
    free_buffers: u64,
    streams: u64,
    free_bytes: u64,
    /// Open descriptors of target and DPU.
    descriptors: (usize, usize),
}

fn holdings(world: &World, target: &Daemon, dpu: &Daemon) -> Holdings {
    let (served, fed) = (target.status(world), dpu.status(world));
    Holdings {
        sessions: served.counter("target.sessions"),
        free_buffers: served.counter("target.free_staging_buffers"),
        streams: fed.counter("dpu.streams"),
        free_bytes: fed.counter("dpu.memory_free_bytes"),
        descriptors: (target.descriptors(), dpu.descriptors()),
    }
}

/// Waits until everything is as before.
#[track_caller]
fn wait_for(world: &World, target: &Daemon, dpu: &Daemon, want: &Holdings) {
    let mut last = None;
    eventually("everything given back", || {
        let now = holdings(world, target, dpu);
        let same = now == *want;
        if !same && last.as_ref() != Some(&now) {
            eprintln!("holds {now:?}, wanted {want:?}");
            last = Some(now);
        }
        same.then_some(())
    });
}

/// Resources without clients, once a first call has warmed up the control planes.
fn at_rest(world: &World, target: &Daemon, dpu: &Daemon) -> Holdings {
    holdings(world, target, dpu);
    let rest = eventually("rest", || {
        let now = holdings(world, target, dpu);
        (now == holdings(world, target, dpu)).then_some(now)
    });
    assert_eq!((rest.sessions, rest.streams), (0, 0));
    assert_eq!(rest.free_buffers, target.status(world).counter("target.staging_buffers"));
    rest
}

#[test]
fn what_a_killed_trainer_held_comes_back() {
    let Some(world) = World::new("what_a_killed_trainer_held_comes_back") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 7));
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let rest = at_rest(&world, &target, &dpu);

    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ENDLESS);
    // It now waits for room in the pipe, holding a slot.
    cat.read(1 << 20);
    let during = holdings(&world, &target, &dpu);
    assert_eq!((during.sessions, during.streams), (1, 1));
    assert!(during.free_bytes < rest.free_bytes);
    cat.kill();
    wait_for(&world, &target, &dpu, &rest);

    let args = ["--plan", PLAN, "--batches", "60"];
    let next = Cat::through(&world, &dpu, &target.url("web"), &args).finish().good();
    assert_same(&next.stdout, &expected(PLAN, &[&corpus], 0..60));
    wait_for(&world, &target, &dpu, &rest);
}

#[test]
fn many_clients_leave_nothing_behind() {
    let Some(world) = World::new("many_clients_leave_nothing_behind") else {
        return;
    };
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 8));
    // Room for four rings: a leaked one would be missed soon.
    let (target, dpu) = (world.target(&[]), world.dpu(&["--rings", "1MiB"]));
    let rest = at_rest(&world, &target, &dpu);
    let want = expected(PLAN, &[&corpus], 0..20);
    let url = target.url("web");
    for round in 0..12 {
        match round % 4 {
            0 => {
                let args = [ENDLESS, &["--batches", "20"]].concat();
                let ran = Cat::through(&world, &dpu, &url, &args).finish().good();
                assert_same(&ran.stdout, &want);
            }
            // Killed at any moment between its start and the first batches.
            1 => Cat::through(&world, &dpu, &url, ENDLESS).kill(),
            2 => {
                let mut cat = Cat::through(&world, &dpu, &url, ENDLESS);
                cat.read(1 + round * 10_000);
                cat.kill();
            }
            _ => {
                let ran = Cat::through(&world, &dpu, &target.url("none"), ENDLESS).finish();
                ran.failed(2, &["none"], "--root");
            }
        }
    }
    wait_for(&world, &target, &dpu, &rest);
}

#[test]
fn a_full_dpu_refuses_and_recovers() {
    let Some(world) = World::new("a_full_dpu_refuses_and_recovers") else {
        return;
    };
    Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(300_000, 9));
    // Room for two streams of eight staging buffers of half a block.
    let (target, dpu) = (world.target(&[]), world.dpu(&["--memory", "9MiB"]));
    let plan = ["--plan", "window(1024) | narrow(u16) | batch(16)", "--slots", "2"];
    let url = target.url("web");
    let start = || {
        let mut cat = Cat::through(&world, &dpu, &url, &plan);
        cat.read(1);
        cat
    };
    let streams = [start(), start()];
    let refused = Cat::through(&world, &dpu, &url, &plan).finish();
    refused.failed(2, &["bytes of staging buffers", "needed", "free"], "--memory");
    let [first, second] = streams;
    first.kill();
    eventually("room", || (dpu.status(&world).counter("dpu.streams") == 1).then_some(()));
    start().kill();
    second.kill();
}
