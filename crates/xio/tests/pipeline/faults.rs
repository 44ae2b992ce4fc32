//! Data that cannot be delivered, and connections that are not restored: the stream ends with an
//! error that names the position, after every batch before it.

use roce::Time;
use xio::disk::Change;
use xio::reader::StreamError;
use xio::stage::Limit;
use xio::target::SessionFailure;

use super::corpus::Corpus;
use super::disk::{EIO, SimFile};
use sim::chance::Chance;

use super::raw::request;
use super::ring::End;
use super::seeds::{Replay, seeds};
use super::world::{Kill, READER, Setup, TARGET, World};

/// The first sample at or after `first` that holds a token.
fn first_use(corpus: &Corpus, first: u64, dataset: usize, token: u64) -> u64 {
    let holds = |n: &u64| {
        let (of, start) = corpus.sample(*n);
        of == dataset && (start..start + u64::from(corpus.window)).contains(&token)
    };
    (first..).find(holds).unwrap()
}

/// The stream delivers whole batches up to sample `until`, and then this error.
fn assert_fails(mut world: World, corpus: &Corpus, until: u64, error: StreamError) {
    world.run();
    let host = &world.readers[0];
    assert_eq!(host.ring.end(), Some(End::Failed(error)));
    let first = host.spec.first_batch;
    let batches = until / u64::from(corpus.batch_samples) - first;
    assert_eq!(host.ring.batches_seen, batches);
    assert!(host.ring.seen == corpus.expected(first, batches));
    world.tear_down();
}

/// A corpus and a setup in which every dataset is drawn from, with a stream long enough to meet any
/// token, and one token of it.
fn any_place(draw: &mut Chance) -> (Corpus, Setup, usize, u64) {
    let corpus = Corpus::draw(draw);
    let mut setup = Setup::draw(&corpus, draw);
    setup.streams.truncate(1);
    setup.streams[0].batches = None;
    let used = |index: &usize| corpus.order.draws(*index);
    let used: Vec<usize> = (0..corpus.datasets.len()).filter(used).collect();
    let dataset = draw.pick(&used);
    let layout = corpus.datasets[dataset].layout;
    let token = draw.below(layout.samples * u64::from(layout.window));
    (corpus, setup, dataset, token)
}

fn first_sample(corpus: &Corpus, setup: &Setup) -> u64 {
    setup.streams[0].first_batch * u64::from(corpus.batch_samples)
}

#[test]
fn a_token_that_does_not_fit_is_named() {
    let mut tried = 0;
    for seed in seeds(0..120) {
        let _replay = Replay { test: "a_token_that_does_not_fit_is_named", seed };
        let mut draw = Chance::new(seed);
        let (mut corpus, setup, dataset, token) = any_place(&mut draw);
        let from = corpus.datasets[dataset].layout.file.dtype;
        let (low, high) = (from.range().0, from.range().1);
        let value = match from.is_signed() && draw.per_mille(500) {
            true => low,
            false => high,
        };
        if from == corpus.deliver || value <= corpus.deliver.range().1 && value >= 0 {
            continue;
        }
        tried += 1;
        corpus.datasets[dataset].set_token(token, value);
        let until = first_use(&corpus, first_sample(&corpus, &setup), dataset, token);
        let byte = corpus.datasets[dataset].byte_of(token);
        for narrow_at_target in [true, false] {
            let setup = Setup { narrow_at_target, ..setup.clone() };
            let limit = Limit::Type(corpus.deliver);
            let error =
                StreamError::Overflow { dataset: dataset as u32, token, byte, value, limit };
            let mut world = World::new(&corpus, &setup);
            for _ in 0..draw.below(3) {
                world.plan_kill(3_000_000, draw.pick(&Kill::ALL));
            }
            assert_fails(world, &corpus, until, error);
        }
    }
    assert!(tried > 40, "only {tried} seeds had a type that is too wide");
}

#[test]
fn a_file_cut_short_is_named() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "a_file_cut_short_is_named", seed };
        let mut draw = Chance::new(seed);
        let (corpus, setup, dataset, _) = any_place(&mut draw);
        let layout = corpus.datasets[dataset].layout;
        let file = &corpus.datasets[dataset];
        let whole = file.byte_of(layout.samples * u64::from(layout.window));
        let at_byte = draw.below(whole);
        let mut files = corpus.files();
        files[dataset].cut = Some((Time::ZERO, at_byte));
        let broken = |n: &u64| {
            let (of, start) = corpus.sample(*n);
            of == dataset && file.byte_of(start + u64::from(corpus.window)) > at_byte
        };
        let until = (first_sample(&corpus, &setup)..).find(broken).unwrap();
        // A read that begins after the end reports where it began.
        let page = file.byte_of(corpus.sample(until).1) / 4096 * 4096;
        let error = StreamError::Truncated { dataset: dataset as u32, at_byte: at_byte.max(page) };
        let world = World::with_files(&corpus, &setup, files);
        assert_fails(world, &corpus, until, error);
    }
}

/// What was read before a file is truncated is delivered; later reads fail.
#[test]
fn a_file_cut_while_it_is_read_never_gives_other_bytes() {
    for seed in seeds(0..40) {
        let _replay = Replay { test: "a_file_cut_while_it_is_read_never_gives_other_bytes", seed };
        let mut draw = Chance::new(seed);
        let (corpus, mut setup, dataset, token) = any_place(&mut draw);
        setup.streams[0].batches = Some(400);
        let mut files = corpus.files();
        let at = Time::from_nanos(draw.below(5_000_000));
        let len = corpus.datasets[dataset].byte_of(token);
        files[dataset].cut = Some((at, len));
        let mut world = World::with_files(&corpus, &setup, files);
        world.run();
        let ring = &world.readers[0].ring;
        let first = setup.streams[0].first_batch;
        assert!(ring.seen == corpus.expected(first, ring.batches_seen));
        match ring.end() {
            Some(End::Failed(StreamError::Truncated { .. }) | End::Finished) => {}
            other => panic!("{other:?}"),
        }
        world.tear_down();
    }
}

/// With manifests the same batches arrive, and with files that are overwritten in place no other
/// ones do: with a manifest the error names the block, and without one the disk tells that the file
/// was written.
#[test]
fn a_file_overwritten_in_place_is_never_mixed() {
    let mut ended = [0; 2];
    for seed in seeds(0..80) {
        let _replay = Replay { test: "a_file_overwritten_in_place_is_never_mixed", seed };
        let mut draw = Chance::new(seed);
        let (corpus, mut setup, dataset, token) = any_place(&mut draw);
        setup.streams[0].batches = Some(draw.between(1, 200));
        setup.manifests = draw.per_mille(600);
        let mut files = corpus.files();
        if draw.per_mille(800) {
            let at = Time::from_nanos(draw.below(8_000_000));
            let mut other = corpus.datasets[dataset].bytes.to_vec();
            other[corpus.datasets[dataset].byte_of(token) as usize] ^= 1;
            files[dataset].overwritten = Some((at, other.into()));
        }
        let mut world = World::with_files(&corpus, &setup, files);
        world.run();
        let ring = &world.readers[0].ring;
        let first = setup.streams[0].first_batch;
        assert!(ring.seen == corpus.expected(first, ring.batches_seen));
        match ring.end() {
            Some(End::Finished) => {}
            Some(End::Failed(StreamError::Changed { dataset: at, change })) => {
                assert_eq!(at, dataset as u32);
                let by_block = matches!(change, Change::Block { .. });
                assert_eq!(by_block, setup.manifests, "{change:?}");
                ended[usize::from(by_block)] += 1;
            }
            other => panic!("{other:?}"),
        }
        world.tear_down();
    }
    assert!(ended.iter().all(|count| *count > 5), "too few changes were met: {ended:?}");
}

#[test]
fn a_storage_error_is_named() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "a_storage_error_is_named", seed };
        let mut draw = Chance::new(seed);
        let (corpus, setup, dataset, token) = any_place(&mut draw);
        let bad_byte = corpus.datasets[dataset].byte_of(token);
        let mut files: Vec<SimFile> = corpus.files();
        files[dataset].bad_byte = Some(bad_byte);
        // Reads are of whole pages, so neighbours fail too.
        let layout = corpus.datasets[dataset].layout;
        let block = u64::from(layout.samples_per_block) * u64::from(layout.window);
        let file = &corpus.datasets[dataset];
        let pages = |start: u64| {
            let end = (start + block).min(layout.samples * u64::from(layout.window));
            let first = file.byte_of(start) / 4096 * 4096;
            first..file.byte_of(end).next_multiple_of(4096)
        };
        let broken = |n: &u64| {
            let (of, start) = corpus.sample(*n);
            of == dataset && pages(start / block * block).contains(&bad_byte)
        };
        let until = (first_sample(&corpus, &setup)..).find(broken).unwrap();
        let error = StreamError::Storage { dataset: dataset as u32, errno: EIO };
        let world = World::with_files(&corpus, &setup, files);
        assert_fails(world, &corpus, until, error);
    }
}

/// Memory corrupted between the WRITE and the reader's check.
#[test]
fn memory_that_flips_is_noticed() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 20));
    let mut flips = 0;
    let flipped = |world: &mut World| {
        let region = world.readers[0].data;
        // Every staging buffer's first byte, at one instant in which blocks are in flight.
        if world.readers[0].ledger.outstanding() == 4 && flips < 3 {
            flips += 1;
            world.run_target_only();
            for at in (0..region.len).step_by(4096) {
                let memory = &mut world.net.nodes[READER].memory;
                let byte = memory.peek(region.addr + at, 1)[0];
                memory.poke(region.addr + at, &[byte ^ 0x80]);
            }
        }
        flips == 3
    };
    assert!(world.run_until(flipped));
    world.run();
    // Blocks checked before the flip cannot be recovered; those requested again are delivered
    // right.
    assert!(world.readers[0].reader.counters().corrupt_blocks > 0);
}

#[test]
fn an_abandoned_connection_ends_the_stream_once() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 2_000));
    world.readers[0].reconnects = false;
    assert!(world.run_until(|world| world.readers[0].ring.batches_seen >= 10));
    world.readers[0].reader.drop_connection(0);
    assert!(world.run_until(|world| world.readers[0].lines[0].is_none()));
    let host = &mut world.readers[0];
    host.reader.abandon(&mut host.ring, 0);
    // The control plane may give up twice, or on a stream that has ended.
    host.reader.abandon(&mut host.ring, 0);
    world.run();
    let host = &world.readers[0];
    let error = StreamError::Lost { connection: 0 };
    assert_eq!(host.ring.end(), Some(End::Failed(error)));
    assert!(host.ring.seen == corpus.expected(0, host.ring.batches_seen));
    world.tear_down();
}

#[test]
fn giving_up_a_finished_stream_changes_nothing() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 5));
    world.run();
    let host = &mut world.readers[0];
    host.reader.abandon(&mut host.ring, 0);
    world.assert_delivered();
}

/// Responses to an abandoned connection find its queue pair gone.
#[test]
fn late_answers_of_a_lost_connection_touch_nothing() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 60));
    for round in 0..6 {
        let full = |world: &mut World| world.readers[0].ledger.outstanding() == 4;
        assert!(world.run_until(full), "round {round}");
        // The control plane is fast: the new connection exists before the old responses arrive.
        world.readers[0].reconnects = false;
        world.readers[0].reader.drop_connection(0);
        world.settle();
        world.readers[0].reconnects = true;
        world.connect(0, 0);
    }
    world.run();
    world.assert_delivered();
    assert!(world.net.nodes[READER].endpoint.counters().unknown_qp > 0, "nothing came late");
    let counters = world.readers[0].reader.counters();
    assert_eq!((counters.corrupt_blocks, counters.bad_responses), (0, 0));
    assert_eq!(counters.lost_connections, 6);
}

/// A new queue pair replaces one whose loss was not reported.
#[test]
fn connecting_anew_asks_again_for_what_was_outstanding() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 20));
    let full = |world: &mut World| world.readers[0].ledger.outstanding() == 4;
    assert!(world.run_until(full));
    world.replace(0, 0);
    world.run();
    world.assert_delivered();
    assert_eq!(world.readers[0].reader.counters().retried_requests, 4);
}

#[test]
fn keys_of_a_stream_are_useless_once_it_is_gone() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 2_000));
    let full = |world: &mut World| world.readers[0].ledger.outstanding() == 4;
    assert!(world.run_until(full));
    // The stream's memory is deregistered while the target writes to it.
    let data = world.readers[0].data;
    world.net.nodes[READER].endpoint.deregister(data.lkey).unwrap();
    let failed = |world: &mut World| world.target.target.counters().failed_work_requests > 0;
    assert!(world.run_until(failed));
    assert!(world.net.nodes[READER].endpoint.counters().bad_key > 0);
    world.readers[0].reconnects = false;
    world.tear_down();
}

/// What the failure of a session says of the path: data that nothing acknowledged, or something
/// else.
#[test]
fn only_data_that_nothing_acknowledges_is_evidence_of_the_path() {
    let corpus = Corpus::one_file(&mut Chance::new(3));
    let setup = Setup { streams: Vec::new(), ..Setup::plain(&corpus, 0) };
    let bytes = corpus.window * corpus.deliver.bytes();
    for (receives, is_cut, why) in [
        (8, true, SessionFailure::Unacknowledged { bytes }),
        // Data arrives, and the response finds no receive.
        (0, false, SessionFailure::QueuePair),
    ] {
        let mut world = World::new(&corpus, &setup);
        let mut raw = world.raw_session(receives);
        raw.send(&mut world.net, &request(&raw, 1, &corpus).encode(xio::kernel::crc32c));
        let is_read = |world: &mut World| !world.target.disk.log.is_empty();
        assert!(world.run_until(is_read));
        world.net.set_cable(TARGET as u32, !is_cut);
        assert!(world.run_until(|world| !world.failures.is_empty()));
        assert_eq!(world.failures, [why]);
        world.tear_down();
    }
}
