//! Blocks that the target writes into its reader's memory without packets.
//!
//! Whatever happens to either process, the stream has the bytes that it has with packets, and both
//! daemons give everything back. Where something forbids this path, both ends use packets.

use rustix::process::Signal;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, World, eventually};

const PLAN: &str = "window(1024) | shuffle(11, blocks=2) | narrow(u16) | batch(32)";
const BATCHES: u64 = 300;
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "300", "--slots", "2", "--slot-size", "64KiB"];

/// The world of a test, whose programs use `path`, and its file of three blocks.
fn world(test: &str, path: &'static str) -> Option<(World, Corpus)> {
    let world = World::new(test)?;
    world.use_path(path);
    let corpus = Corpus::flat(&world.data("web.bin"), Dtype::U32, tokens(786_432, 4));
    Some((world, corpus))
}

/// Whether this machine allows the path, as the target's log says of its first session.
fn is_direct(target: &Daemon) -> bool {
    let log = target.stderr();
    let begins = log.lines().find(|line| line.contains(" begins: ")).expect("a session began");
    let is_direct = begins.ends_with(", direct");
    assert!(is_direct || begins.contains(", packets ("), "{begins}");
    is_direct
}

/// WRITEs of the target without packets, and with them.
fn writes(world: &World, target: &Daemon) -> (u64, u64) {
    let status = target.status(world);
    let direct = status.counter("roce.direct_writes");
    (direct, status.counter("target.requests_done") - direct)
}

#[test]
fn blocks_are_the_same_and_none_is_a_packet() {
    let Some((world, corpus)) = world("blocks_are_the_same_and_none_is_a_packet", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let through = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let alone = Cat::alone(&world, &target.url("web"), ARGS);
    for cat in [through, alone] {
        assert_same(&cat.finish().good().stdout, &want);
    }
    if is_direct(&target) {
        let (direct, packets) = writes(&world, &target);
        assert!(direct > 0 && packets == 0, "{direct} direct, {packets} as packets");
    }
}

#[test]
fn what_forbids_it_at_either_end_leads_to_packets() {
    let Some((world, corpus)) = world("what_forbids_it_at_either_end", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let check = |target: &Daemon, dpu: &Daemon| {
        let cat = Cat::through(&world, dpu, &target.url("web"), ARGS);
        assert_same(&cat.finish().good().stdout, &want);
        assert!(!is_direct(target));
        assert_eq!(writes(&world, target).0, 0);
    };
    // Losses that a daemon was told to make must be made.
    check(&world.target(&[]), &world.dpu(&["--loss", "1%"]));
    check(&world.target(&["--loss", "1%"]), &world.dpu(&[]));
    check(&world.target(&["--cc", "delay"]), &world.dpu(&[]));
    let dpu = world.dpu(&[]);
    world.use_path("udp");
    check(&world.target(&[]), &dpu);
}

#[test]
fn a_killed_target_is_found_again() {
    let Some((world, corpus)) = world("same_host::a_killed_target_is_found_again", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let (mut target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let mut got = Vec::new();
    for _ in 0..2 {
        got.extend(cat.read(5 << 20));
        target.kill();
        target.restart(&world);
    }
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &want);
    assert_eq!(dpu.status(&world).counter("stream.corrupt_blocks"), 0);
    assert!(writes(&world, &target).0 > 0 || !is_direct(&target));
}

#[test]
fn a_killed_reader_leaves_nothing_behind() {
    let Some((world, corpus)) = world("a_killed_reader_leaves_nothing_behind", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let (target, mut dpu) = (world.target(&[]), world.dpu(&[]));
    let own = target.mapped_pools();
    for _ in 0..3 {
        let mut through = Cat::through(&world, &dpu, &target.url("web"), ARGS);
        let mut alone = Cat::alone(&world, &target.url("web"), ARGS);
        through.read(1 << 20);
        alone.read(1 << 20);
        // Reserved huge pages are never mapped by others.
        let reserved = std::fs::read_to_string("/proc/sys/vm/nr_hugepages").expect("Linux");
        assert!(
            reserved.trim() != "0" || target.mapped_pools() > own,
            "blocks are copied by the kernel"
        );
        dpu.kill();
        alone.kill();
        through.kill();
        dpu.restart(&world);
    }
    eventually("the end of all sessions", || {
        let status = target.status(&world);
        let free = status.counter("target.free_staging_buffers");
        (status.counter("target.sessions") == 0 && free == status.counter("target.staging_buffers"))
            .then_some(())
    });
    assert_eq!(target.status(&world).counter("neighbours.queue_pairs"), 0);
    eventually("no pool of the dead", || (target.mapped_pools() == own).then_some(()));
    let cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    assert_same(&cat.finish().good().stdout, &want);
}

/// A stopped target writes nothing, and goes on where it was, or is given up and connected again.
#[test]
fn a_stopped_target_goes_on() {
    let Some((world, corpus)) = world("same_host::a_stopped_target_goes_on", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let mut got = Vec::new();
    for round in 0..5 {
        target.signal(Signal::STOP);
        // In the last round the queue pair runs out of retries meanwhile.
        let pause = if round == 4 { 2_000 } else { 20 };
        std::thread::sleep(std::time::Duration::from_millis(pause));
        target.signal(Signal::CONT);
        got.extend(cat.read(3 << 20));
    }
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &want);
    assert_eq!(dpu.status(&world).counter("stream.corrupt_blocks"), 0);
    eventually("all memory given back", || {
        (dpu.status(&world).counter("neighbours.awaited_ranges") == 0).then_some(())
    });
}

/// A stopped reader takes no message, and its memory can be written meanwhile.
#[test]
fn a_stopped_reader_goes_on() {
    let Some((world, corpus)) = world("same_host::a_stopped_reader_goes_on", "auto") else {
        return;
    };
    let want = expected(PLAN, &[&corpus], 0..BATCHES);
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let mut cat = Cat::through(&world, &dpu, &target.url("web"), ARGS);
    let mut got = cat.read(1 << 20);
    for _ in 0..5 {
        dpu.signal(Signal::STOP);
        std::thread::sleep(std::time::Duration::from_millis(20));
        dpu.signal(Signal::CONT);
        got.extend(cat.read(2 << 20));
    }
    got.extend(cat.finish().good().stdout);
    assert_same(&got, &want);
}
