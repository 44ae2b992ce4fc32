//! The same bytes are delivered under any fault (C4), within bounded memory (C6).

use roce::endpoint::Mtu;
use xio::capsule::{Outcome, ReadRequest};
use xio::dataset::Dtype;
use xio::kernel::crc32c;
use xio::plan::Plan;
use xio::reader::buffers_per_lane;
use xio::reference::Reference;
use xio::sums::SUM_BYTES;

use super::corpus::{Corpus, Recipe, Shape};
use sim::chance::Chance;

use super::raw::request;
use super::seeds::{Replay, seeds};
use super::world::{Kill, READER, Setup, World, faults};
use sim::faults::FaultMix;

/// Events over all seeds, so that paths never taken are noticed.
#[derive(Debug, Default)]
struct Tally {
    kills: u64,
    packets_lost: u64,
    connections_lost: u64,
    retried_requests: u64,
    waits_for_host: u64,
    waits_for_data: u64,
    epochs_crossed: u64,
    full_disk: u64,
    most_outstanding: usize,
    receiver_not_ready: u64,
}

impl Tally {
    fn add(&mut self, world: &World) {
        self.kills += world.kills;
        self.packets_lost += world.net.lost();
        let nodes = world.net.nodes.iter();
        let naks = nodes.map(|node| node.endpoint.counters().rnr_naks_sent);
        self.receiver_not_ready += naks.sum::<u64>();
        self.full_disk += world.target.disk.refused;
        for host in &world.readers {
            let counters = host.reader.counters();
            let per_batch = u64::from(world.corpus().batch_samples);
            let spec = host.spec;
            let last = (spec.first_batch + spec.batches.unwrap_or(0)) * per_batch - 1;
            let epoch_of = |n| world.corpus().order.at(n).place.epoch;
            let first = spec.first_batch * per_batch;
            self.epochs_crossed += u64::from(epoch_of(first) < epoch_of(last));
            self.waits_for_data += counters.waits_for_data;
            self.connections_lost += counters.lost_connections;
            self.retried_requests += counters.retried_requests;
            self.waits_for_host += counters.waits_for_host;
            self.most_outstanding = self.most_outstanding.max(host.ledger.most);
        }
    }
}

impl Tally {
    fn assert_every_path_was_taken(&self) {
        for taken in [
            self.kills,
            self.packets_lost,
            self.connections_lost,
            self.retried_requests,
            self.waits_for_host,
            self.waits_for_data,
            self.epochs_crossed,
            self.full_disk,
        ] {
            assert!(taken > 100, "a path is hardly taken: {self:?}");
        }
    }
}

fn run(corpus: &Corpus, setup: &Setup, kills: &[(u64, Kill)]) -> World {
    let mut world = World::new(corpus, setup);
    for (within_ns, kill) in kills {
        world.plan_kill(*within_ns, *kill);
    }
    world.run();
    world.assert_delivered();
    for host in &world.readers {
        let counters = host.reader.counters();
        assert_eq!(counters.corrupt_blocks, 0, "nothing damages memory here");
        assert_eq!(counters.bad_responses, 0, "the target is honest");
    }
    world.tear_down();
    world
}

/// Leaves out batches of every other stream, within it and beyond.
fn leave_out_some(setup: &mut Setup, draw: &mut Chance) {
    for spec in &mut setup.streams {
        if draw.per_mille(500) {
            continue;
        }
        let first = spec.first_batch + draw.below(spec.batches.unwrap_or(0) + 2);
        spec.left_out = (first, draw.pick(&[1, 2, 7, 40]));
    }
}

#[test]
fn any_corpus_any_faults() {
    let mut tally = Tally::default();
    for seed in seeds(0..300) {
        let _replay = Replay { test: "any_corpus_any_faults", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::draw(&mut draw);
        for narrow_at_target in [true, false] {
            let mut setup = Setup { narrow_at_target, ..Setup::draw(&corpus, &mut draw) };
            leave_out_some(&mut setup, &mut draw);
            let count = draw.pick(&[0, 0, 1, 3, 8]);
            let span = draw.pick(&[100_000, 3_000_000, 20_000_000]);
            let kills: Vec<(u64, Kill)> =
                (0..count).map(|_| (span, draw.pick(&Kill::ALL))).collect();
            tally.add(&run(&corpus, &setup, &kills));
        }
    }
    println!("{tally:?}");
    // A single seed does not take every path.
    if seeds(0..300) == (0..300) {
        tally.assert_every_path_was_taken();
    }
}

/// An undisturbed stream requests every needed block once, and no other.
#[test]
fn nothing_is_read_twice_or_for_nothing() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "nothing_is_read_twice_or_for_nothing", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::draw(&mut draw);
        let mut setup = Setup {
            narrow_at_target: false,
            faults: FaultMix::NONE,
            ..Setup::draw(&corpus, &mut draw)
        };
        leave_out_some(&mut setup, &mut draw);
        let world = run(&corpus, &setup, &[]);
        for host in &world.readers {
            let [before, after] = host.spec.runs().map(|(first, n)| corpus.blocks(first, n));
            let needed = (before.0 + after.0, before.1 + after.1);
            assert_eq!((host.ledger.requests, host.ledger.asked_bytes), needed);
        }
    }
}

/// Groups of so many samples that those of a block are not counted where a stream begins or ends
/// inside one: its staging buffers are freed with the group, and still no block is read twice or
/// for nothing.
#[test]
fn streams_begin_and_end_anywhere_in_large_groups() {
    for seed in seeds(0..40) {
        let _replay = Replay { test: "streams_begin_and_end_anywhere_in_large_groups", seed };
        let mut draw = Chance::new(seed);
        let shape = Shape {
            dtype: Dtype::U32,
            data_offset: 64,
            samples: 3_300,
            tail_tokens: 1,
            per_block: 300,
        };
        let recipe = Recipe {
            window: 2,
            batch_samples: 8,
            deliver: Dtype::U16,
            weights: vec![1],
            group: Some(draw.between(2, 4) as u32),
            seed,
        };
        let corpus = Corpus::new(&[shape], &recipe, &mut draw);
        let batches = draw.pick(&[1, 20, 100, 400]);
        let mut setup = Setup { narrow_at_target: false, ..Setup::plain(&corpus, batches) };
        setup.streams[0].first_batch = draw.below(800);
        let kills = [(3_000_000, draw.pick(&Kill::ALL))];
        let kills = &kills[..draw.below(2) as usize];
        let world = run(&corpus, &setup, kills);
        let (host, spec) = (&world.readers[0], setup.streams[0]);
        let needed = corpus.blocks(spec.first_batch, spec.batches.unwrap());
        if host.reader.counters().retried_requests == 0 {
            assert_eq!((host.ledger.requests, host.ledger.asked_bytes), needed);
        }
    }
}

/// A slow host finds many tiny samples waiting: they are copied a few at a time (`assert_bounded`).
#[test]
fn tiny_samples_are_copied_in_bounded_pieces() {
    let mut draw = Chance::new(1);
    let shape = Shape {
        dtype: Dtype::U32,
        data_offset: 0,
        samples: 60_000,
        tail_tokens: 0,
        per_block: 3_000,
    };
    let recipe = Recipe {
        window: 2,
        batch_samples: 8,
        deliver: Dtype::U16,
        weights: vec![1],
        group: None,
        seed: 1,
    };
    let corpus = Corpus::new(&[shape], &recipe, &mut draw);
    let mut setup = Setup::plain(&corpus, 5_000);
    let stream = &mut setup.streams[0];
    (stream.slot_bytes, stream.pace_ns) = (1_024 * corpus.batch_bytes(), 50_000_000);
    run(&corpus, &setup, &[]);
}

/// Plans in the language that users write, blocks of 1 MiB, and the crate's own reference.
#[test]
fn plans_deliver_what_the_reference_says() {
    let plans = [
        ("window(40000) | batch(3)", &[(Dtype::U32, 128, 13, 77)][..]),
        (
            "window(2048) | shuffle(9, blocks=2) | narrow(u16) | batch(64)",
            &[(Dtype::U32, 80, 1_400, 0)],
        ),
        (
            "window(30000) | shuffle(7, blocks=3) | blend(a=5, b=2, c=1) | narrow(u16) | batch(4)",
            &[(Dtype::U32, 0, 40, 5), (Dtype::I64, 128, 9, 29_999), (Dtype::U16, 4_095, 70, 1)],
        ),
        (
            "window(131072) | shuffle(3, blocks=8) | blend(a=1, b=1) | narrow(u32) | batch(1)",
            &[(Dtype::I32, 64, 5, 1), (Dtype::U32, 1, 3, 9)],
        ),
    ];
    for (index, (text, files)) in (0..).zip(plans) {
        let _replay = Replay { test: "plans_deliver_what_the_reference_says", seed: index };
        let mut draw = Chance::new(index);
        let plan = Plan::parse(text, None).unwrap();
        let shape = |&(dtype, data_offset, samples, tail_tokens): &(Dtype, u64, u64, u64)| Shape {
            dtype,
            data_offset,
            samples,
            tail_tokens,
            per_block: 1,
        };
        let shapes: Vec<Shape> = files.iter().map(shape).collect();
        let corpus = Corpus::of_plan(&plan, &shapes, &mut draw);
        let mut reference = Reference::new(&plan, corpus.token_readers()).unwrap();
        for narrow_at_target in [true, false] {
            let mut setup = Setup {
                narrow_at_target,
                mtu: Mtu::M4096,
                faults: faults([1, 1, 1]),
                ..Setup::plain(&corpus, 9)
            };
            setup.streams[0].first_batch = draw.below(40);
            let world = run(&corpus, &setup, &[(20_000_000, Kill::Control)]);
            let first = setup.streams[0].first_batch;
            let batches = (first..first + 9).map(|batch| reference.batch(batch).unwrap());
            assert!(world.readers[0].ring.seen == batches.flatten().collect::<Vec<u8>>());
        }
    }
}

/// A dataset of no weight costs neither memory nor a request.
#[test]
fn a_dataset_of_no_weight_costs_nothing() {
    let corpus = Corpus::draw_with_weights(&mut Chance::new(11), &[0, 3, 0, 1]);
    let setup = Setup::plain(&corpus, 30);
    let world = run(&corpus, &setup, &[]);
    let read: Vec<u32> = world.target.disk.log.iter().map(|read| read.file.0).collect();
    assert!(read.iter().all(|file| [1, 3].contains(file)), "{read:?}");
    let group = |dataset| corpus.order.shuffle(dataset).unwrap().group_blocks() as u32;
    let buffers: u32 = [1, 3].map(|dataset| buffers_per_lane(group(dataset), 2)).iter().sum();
    assert_eq!(world.readers[0].reader.buffer_count(), buffers as usize);
}

#[test]
fn a_stream_of_no_batches_ends_at_once() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let world = run(&corpus, &Setup::plain(&corpus, 0), &[]);
    assert_eq!(world.readers[0].ledger.requests, 0);
}

/// Starting in the middle of any group of any epoch delivers the same as a stream from the start
/// does there.
#[test]
fn every_first_batch_gives_the_same_batches() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    for first_batch in (0..230).chain([100_000, 1 << 40]) {
        let mut setup = Setup::plain(&corpus, 7);
        setup.streams[0].first_batch = first_batch;
        run(&corpus, &setup, &[]);
    }
}

#[test]
fn a_request_always_finds_a_receive() {
    for seed in seeds(0..30) {
        let _replay = Replay { test: "a_request_always_finds_a_receive", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::draw(&mut draw);
        let setup = Setup { faults: FaultMix::NONE, ..Setup::draw(&corpus, &mut draw) };
        let world = run(&corpus, &setup, &[]);
        for node in &world.net.nodes {
            assert_eq!(node.endpoint.counters().rnr_naks_sent, 0);
        }
    }
}

/// Blocks of a manifest are longer than those of a stream, so one of a stream may begin in one and
/// end in the next: it is sent when both have been compared, and neither is read whole twice,
/// however many requests wait for it.
#[test]
fn a_request_across_two_blocks_of_a_manifest_waits_for_both() {
    let corpus = Corpus::large_file(&mut Chance::new(7));
    let plain = Setup::plain(&corpus, 0);
    let setup =
        Setup { streams: Vec::new(), manifests: true, credits: 8, staging_buffers: 8, ..plain };
    let mut world = World::new(&corpus, &setup);
    let mut raw = world.raw_session(8);
    let first_token = SUM_BYTES / 4 - 5;
    for seq in 1..=3 {
        let wanted = ReadRequest { first_token, ..request(&raw, seq, &corpus) };
        raw.send(&mut world.net, &wanted.encode(crc32c));
    }
    let mut answers = Vec::new();
    assert!(world.run_until(|world| {
        raw.poll(&mut world.net);
        answers.extend(raw.answers());
        answers.len() == 3
    }));
    let at = corpus.datasets[0].byte_of(first_token) as usize;
    let tokens = corpus.datasets[0].bytes[at..].chunks(4).take(corpus.window as usize);
    let want: Vec<u8> = tokens.flat_map(|token| token[..2].to_vec()).collect();
    for answer in answers {
        let Outcome::Done { crc32c: sum, .. } = answer.outcome else { panic!("{answer:?}") };
        assert_eq!(sum, crc32c(0, &want), "other bytes are sent");
    }
    assert_eq!(world.net.nodes[READER].memory.peek(raw.data.addr, want.len()), want);
    assert_eq!(world.target.target.counters().proven_blocks, 2);
    world.tear_down();
}
