//! Several streams at once through one target and one DPU of one machine: nobody stands still,
//! whoever opens, ends or is killed beside them.
//!
//! No time is compared with a limit: a stream stands still when it brings nothing within the
//! harness's patience.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use client::{Next, Options, open};
use sim::chance::Chance;
use xio::dataset::Dtype;

use super::corpus::{Corpus, assert_same, expected, tokens};
use super::harness::{Cat, Daemon, PATIENCE, TOKEN, World, eventually};

const PLAN: &str = "window(1024) | shuffle(11, blocks=2) | narrow(u16) | batch(32)";
const BATCHES: u64 = 150;
const ARGS: &[&str] = &["--plan", PLAN, "--batches", "150", "--slots", "2", "--slot-size", "64KiB"];
const ENDLESS: &[&str] = &["--plan", PLAN, "--slots", "2", "--slot-size", "64KiB"];

/// A file for each stream, and what it brings.
fn corpora(world: &World, count: usize) -> Vec<(String, Vec<u8>)> {
    let corpus = |number: usize| {
        let name = format!("f{number}");
        let path = world.data(&format!("{name}.bin"));
        let corpus = Corpus::flat(&path, Dtype::U32, tokens(400_000, number as u64));
        (name, expected(PLAN, &[&corpus], 0..BATCHES))
    };
    (0..count).map(corpus).collect()
}

fn options(dpu: &Daemon) -> Options {
    Options {
        dpu: dpu.socket().to_owned(),
        token: TOKEN.to_owned(),
        batches: Some(BATCHES),
        slot_bytes: 64 << 10,
        slots: 2,
        ..Options::from_env()
    }
}

/// All batches of a stream of this process, each of which is counted; fewer if it is told to stop.
fn read_all(url: &str, dpu: &Daemon, count: &AtomicU64, stop: &AtomicBool) -> Vec<u8> {
    let mut stream = open(url, PLAN, true, &options(dpu)).expect("it opens");
    let mut got = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match stream.next_view_within(PATIENCE).expect("good data") {
            Next::Batch(batch) => got.extend_from_slice(batch.bytes()),
            Next::End => break,
            nothing => panic!("{url} stands still after {} bytes: {nothing:?}", got.len()),
        }
        count.fetch_add(1, Ordering::Relaxed);
    }
    got
}

/// Streams that begin together, each of a thread of this process.
fn by_threads(target: &Daemon, dpu: &Daemon, files: &[(String, Vec<u8>)]) {
    let (together, count) = (Barrier::new(files.len()), AtomicU64::new(0));
    let never = AtomicBool::new(false);
    thread::scope(|scope| {
        for (name, want) in files {
            let (together, count, never) = (&together, &count, &never);
            scope.spawn(move || {
                together.wait();
                assert_same(&read_all(&target.url(name), dpu, count, never), want);
            });
        }
    });
}

/// Streams that begin together, each of a process of its own.
fn by_processes(world: &World, target: &Daemon, dpu: &Daemon, files: &[(String, Vec<u8>)]) {
    let start = |(name, _): &(String, _)| Cat::through(world, dpu, &target.url(name), ARGS);
    let cats: Vec<Cat> = files.iter().map(start).collect();
    thread::scope(|scope| {
        for (cat, (_, want)) in cats.into_iter().zip(files) {
            scope.spawn(move || assert_same(&cat.finish().good().stdout, want));
        }
    });
}

#[test]
fn streams_that_begin_at_once_all_end() {
    let Some(world) = World::new("streams_that_begin_at_once_all_end") else {
        return;
    };
    world.use_path("auto");
    let files = corpora(&world, 4);
    for streams in [2, 4, 2, 4] {
        // Daemons that have not met: they find each other with the first streams.
        let (target, dpu) = (world.target(&[]), world.dpu(&[]));
        by_threads(&target, &dpu, &files[..streams]);
        by_processes(&world, &target, &dpu, &files[..streams]);
        let (target, dpu) = (world.target(&[]), world.dpu(&[]));
        by_processes(&world, &target, &dpu, &files[..streams]);
    }
}

/// Streams of this process begin again and again, while others are opened and killed.
fn come_and_go(world: &World, files: &[(String, Vec<u8>)], draw: &mut Chance) {
    let (target, dpu) = (world.target(&[]), world.dpu(&[]));
    let stop = AtomicBool::new(false);
    let counts = [const { AtomicU64::new(0) }; 2];
    thread::scope(|scope| {
        for ((name, want), count) in files.iter().zip(&counts) {
            let (url, dpu, stop) = (target.url(name), &dpu, &stop);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let got = read_all(&url, dpu, count, stop);
                    assert_same(&got, &want[..got.len()]);
                }
            });
        }
        // The threads end also if this one fails.
        let _stops = Stops(&stop);
        let mut cats: Vec<Cat> = Vec::new();
        for _ in 0..24 {
            let which = draw.below(cats.len().max(1) as u64) as usize;
            match draw.below(3) {
                0 | 1 if cats.len() < 4 => {
                    let (name, _) = &files[draw.below(files.len() as u64) as usize];
                    cats.push(Cat::through(world, &dpu, &target.url(name), ENDLESS));
                }
                _ if !cats.is_empty() => cats.swap_remove(which).kill(),
                _ => {}
            }
            let before = counts.each_ref().map(|count| count.load(Ordering::Relaxed));
            // More than a pipe and a ring hold.
            cats.iter_mut().for_each(|cat| drop(cat.read(512 << 10)));
            eventually("batches of every stream", || {
                let now = counts.iter().zip(&before);
                now.into_iter()
                    .all(|(now, before)| now.load(Ordering::Relaxed) > *before)
                    .then_some(())
            });
        }
    });
}

/// Raises the flag when it is dropped.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_that_come_and_are_killed_stop_nobody() {
    let Some(world) = World::new("readers_that_come_and_are_killed_stop_nobody") else {
        return;
    };
    world.use_path("auto");
    let files = corpora(&world, 3);
    for seed in 0..2 {
        println!("seed {seed}");
        come_and_go(&world, &files, &mut Chance::new(seed));
    }
}
