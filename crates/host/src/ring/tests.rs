//! One process, both ends: what must hold at any pace and in any order of drops.

#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng as _, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::*;
use crate::attach::Connection;

const LONG: Duration = Duration::from_secs(20);

#[derive(Clone)]
struct Rng(Pcg64);

impl Rng {
    fn new(seed: u64) -> Rng {
        Rng(Pcg64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Both ends of a ring; the connection represents the producer's life.
fn ring(slots: u32, slot_bytes: u64) -> (Producer, Consumer, Connection) {
    let (producer, fds) = Producer::create(RingConfig { slots, slot_bytes }).unwrap();
    let (ours, theirs) = Connection::pair().unwrap();
    let consumer = Consumer::attach(fds, theirs.liveness().unwrap()).unwrap();
    (producer, consumer, ours)
}

fn one_batch(bytes: u64, number: u64) -> SlotMeta {
    SlotMeta { bytes, first_batch: number, batch_count: 1, batch_bytes: bytes, crc32c: None }
}

fn publish_u64(producer: &mut Producer, value: u64) {
    let slot = producer.free_slot().unwrap();
    producer.write(slot, 0, &value.to_le_bytes()).unwrap();
    producer.publish(slot, one_batch(8, value)).unwrap();
}

/// Waits for a slot the way an engine does.
fn wait_for_slot(producer: &mut Producer) -> SlotIndex {
    loop {
        if let Some(slot) = producer.free_slot() {
            return slot;
        }
        if producer.arm_credit_wakeup() {
            let mut poll = [PollFd::from_borrowed_fd(producer.credit_fd(), PollFlags::IN)];
            let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
            let ready = rustix::event::poll(&mut poll, Some(&limit)).unwrap();
            producer.disarm_credit_wakeup();
            assert_ne!(ready, 0, "no credit came back");
        }
    }
}

/// The payload of publication `sequence` under `seed`, and its description.
fn payload(seed: u64, sequence: u64, slot_bytes: usize) -> (Vec<u8>, SlotMeta) {
    let mut rng = Rng::new(seed ^ sequence.wrapping_mul(0x2545_f491_4f6c_dd1d));
    let bytes = 1 + rng.below(slot_bytes);
    let batch_bytes = 1 + rng.below(bytes);
    let batch_count = bytes.div_ceil(batch_bytes) as u32;
    let data: Vec<u8> =
        (0..bytes.div_ceil(8)).flat_map(|_| rng.next().to_le_bytes()).take(bytes).collect();
    let crc32c = rng.next().is_multiple_of(2).then(|| checksum(&data));
    let meta = SlotMeta {
        bytes: bytes as u64,
        first_batch: sequence * 1_000_000,
        batch_count,
        batch_bytes: batch_bytes as u64,
        crc32c,
    };
    (data, meta)
}

fn pause(rng: &mut Rng) {
    match rng.below(8) {
        0 => thread::sleep(Duration::from_micros(rng.next() % 200)),
        1 | 2 => thread::yield_now(),
        _ => {}
    }
}

/// Publishes `count` slots in random pieces, often several slots under way at once.
fn produce(mut producer: Producer, seed: u64, count: u64) -> Producer {
    let mut rng = Rng::new(seed);
    let slot_bytes = producer.geometry().slot_bytes();
    for sequence in 0..count {
        let slot = wait_for_slot(&mut producer);
        let spare = producer.free_slot();
        let (data, meta) = payload(seed, sequence, slot_bytes);
        let cut = rng.below(data.len());
        producer.write(slot, cut, &data[cut..]).unwrap();
        if rng.next().is_multiple_of(2) {
            producer.slot_mut(slot).unwrap()[..cut].copy_from_slice(&data[..cut]);
        } else {
            producer.write(slot, 0, &data[..cut]).unwrap();
        }
        assert_eq!(producer.publish(slot, meta), Ok(sequence));
        if let Some(spare) = spare {
            producer.abandon(spare).unwrap();
        }
        producer.doorbell_if_needed(rng.below(4) as u32);
        pause(&mut rng);
    }
    producer.finish();
    producer
}

/// Checks the content of a batch; called when it is dropped, so that a premature overwrite is
/// found.
fn check_batch(batch: &BatchView, seed: u64, slot_bytes: usize) {
    let sequence = batch.number() / 1_000_000;
    let index = (batch.number() % 1_000_000) as usize;
    let (data, meta) = payload(seed, sequence, slot_bytes);
    let expected = data.chunks(meta.batch_bytes as usize).nth(index).unwrap();
    assert!(**batch == *expected, "batch {} differs", batch.number());
}

/// Takes everything, keeps views of up to all slots but one, and drops them in random order, some
/// on another thread.
fn consume(mut consumer: Consumer, seed: u64, count: u64) -> Consumer {
    let mut rng = Rng::new(seed ^ 0xc0de);
    let slot_bytes = consumer.geometry().slot_bytes();
    let keep = consumer.geometry().slots() as usize - 1;
    consumer.set_verify(true);
    let (send, elsewhere) = std::sync::mpsc::channel::<Vec<BatchView>>();
    let dropper = thread::spawn(move || {
        for batches in elsewhere {
            batches.iter().for_each(|batch| check_batch(batch, seed, slot_bytes));
        }
    });
    let mut kept: Vec<Vec<BatchView>> = Vec::new();
    for sequence in 0..count {
        let view = consumer.next(LONG).unwrap().unwrap();
        assert_eq!(view.sequence(), sequence);
        let (data, meta) = payload(seed, sequence, slot_bytes);
        assert_eq!(view.meta(), meta);
        assert!(*view == *data);
        assert_eq!(view.batches().len(), meta.batch_count as usize);
        kept.push(view.batches().take(3).chain(view.batches().last()).collect());
        drop(view);
        while kept.len() > keep || (!kept.is_empty() && rng.below(3) == 0) {
            let batches = kept.swap_remove(rng.below(kept.len()));
            if rng.next().is_multiple_of(4) {
                send.send(batches).unwrap();
            } else {
                batches.iter().for_each(|batch| check_batch(batch, seed, slot_bytes));
            }
        }
        pause(&mut rng);
    }
    assert!(consumer.next(LONG).unwrap().is_none());
    drop((kept, send));
    dropper.join().unwrap();
    consumer
}

#[test]
fn every_byte_arrives_and_no_slot_leaks() {
    let seeds = match std::env::var("DQUANT_SEED") {
        Ok(seed) => vec![seed.parse().expect("DQUANT_SEED is a number")],
        Err(_) => (0..24).collect(),
    };
    for seed in seeds {
        println!("replay: DQUANT_SEED={seed} cargo test -p host every_byte_arrives");
        let mut rng = Rng::new(seed);
        let slots = 1 + rng.below(6) as u32;
        let (producer, consumer, _life) = ring(slots, 4096 * (1 + rng.next() % 3));
        let writer = thread::spawn(move || produce(producer, seed, 150));
        let consumer = consume(consumer, seed, 150);
        let mut producer = writer.join().unwrap();
        let free = std::iter::from_fn(|| producer.free_slot()).count();
        assert_eq!(free, slots as usize, "slots leaked");
        let (made, taken) = (producer.counters(), consumer.counters());
        assert_eq!((made.slots, made.bytes), (taken.slots, taken.bytes));
        assert_eq!((made.bad_release_words, made.bad_sleep_words), (0, 0));
    }
}

/// A million sleeps, wakes and credits at full speed. A lost wake-up would end in the slice timer,
/// which `missed_doorbells` counts; a few come from the scheduler.
#[test]
fn a_million_slots_without_lost_wakeups() {
    const COUNT: u64 = 1_000_000;
    let (mut producer, mut consumer, _life) = ring(4, 4096);
    let writer = thread::spawn(move || {
        for value in 0..COUNT {
            let slot = wait_for_slot(&mut producer);
            producer.write(slot, 0, &value.to_le_bytes()).unwrap();
            producer.publish(slot, one_batch(8, value)).unwrap();
            producer.doorbell_if_needed(1 + (value % 3) as u32);
        }
        producer.finish();
        producer.counters()
    });
    let mut expected = 0u64;
    while let Some(view) = consumer.next(LONG).unwrap() {
        assert_eq!(*view, expected.to_le_bytes());
        expected += 1;
    }
    assert_eq!(expected, COUNT);
    let (made, taken) = (writer.join().unwrap(), consumer.counters());
    println!("{made:?}\n{taken:?}");
    assert!(taken.missed_doorbells * 100 < COUNT / 100, "{} lost wake-ups", taken.missed_doorbells);
}

#[test]
fn a_kept_view_costs_one_slot_and_blocks_nothing() {
    let (mut producer, mut consumer, _life) = ring(3, 4096);
    publish_u64(&mut producer, 0);
    let kept = consumer.next(LONG).unwrap().unwrap();
    for value in 1..100 {
        publish_u64(&mut producer, value);
        assert_eq!(*consumer.next(LONG).unwrap().unwrap(), value.to_le_bytes());
    }
    assert_eq!(*kept, 0u64.to_le_bytes());
    publish_u64(&mut producer, 100);
    publish_u64(&mut producer, 101);
    assert_eq!(producer.free_slot(), None);
    drop(kept);
    assert!(producer.free_slot().is_some());
}

#[test]
fn a_batch_keeps_its_slot_and_the_mapping() {
    let (mut producer, mut consumer, life) = ring(1, 4096);
    let slot = producer.free_slot().unwrap();
    producer.write(slot, 0, b"aaaabbbbcc").unwrap();
    let meta =
        SlotMeta { bytes: 10, first_batch: 40, batch_count: 3, batch_bytes: 4, crc32c: None };
    producer.publish(slot, meta).unwrap();
    let view = consumer.next(LONG).unwrap().unwrap();
    let batches: Vec<BatchView> = view.batches().collect();
    let found: Vec<(u64, &[u8])> = batches.iter().map(|b| (b.number(), &**b)).collect();
    assert_eq!(found, [(40, &b"aaaa"[..]), (41, b"bbbb"), (42, b"cc")]);
    let last = batches[2].clone();
    drop((view, batches));
    assert_eq!(producer.free_slot(), None);
    drop((consumer, life));
    assert_eq!(*last, *b"cc");
    thread::spawn(move || drop(last)).join().unwrap();
    assert_eq!(producer.free_slot(), Some(slot));
}

#[test]
fn slots_with_views_are_counted_as_held() {
    let (mut producer, mut consumer, _life) = ring(2, 4096);
    publish_u64(&mut producer, 1);
    publish_u64(&mut producer, 2);
    assert_eq!(consumer.held_slots(), 0, "published is not held");
    let first = consumer.next(LONG).unwrap().unwrap();
    let batch = first.batches().next().unwrap();
    let second = consumer.next(LONG).unwrap().unwrap();
    assert_eq!(consumer.held_slots(), 2);
    assert!(consumer.next(Duration::ZERO).unwrap_err().is_timeout());
    drop((first, second));
    assert_eq!(consumer.held_slots(), 1, "a batch holds its slot");
    drop(batch);
    assert_eq!(consumer.held_slots(), 0);
}

#[test]
fn endings_come_after_the_slots() {
    let (mut producer, mut consumer, _life) = ring(2, 4096);
    publish_u64(&mut producer, 7);
    let long = "é".repeat(MAX_END_TEXT_BYTES);
    producer.fail(42, &long);
    producer.finish();
    assert_eq!(*consumer.next(LONG).unwrap().unwrap(), 7u64.to_le_bytes());
    for _ in 0..2 {
        match consumer.next(LONG) {
            Err(RingError::StreamFailed { code: 42, message }) => {
                assert_eq!(message, "é".repeat(MAX_END_TEXT_BYTES / 2));
            }
            other => panic!("{other:?}"),
        }
    }
    let slot = producer.free_slot().unwrap();
    assert_eq!(producer.publish(slot, one_batch(8, 0)), Err(RingError::Ended));
}

#[test]
fn waiting_ends_in_time_and_goes_on_afterwards() {
    let (mut producer, mut consumer, _life) = ring(2, 4096);
    for wait in [Duration::ZERO, Duration::from_millis(3), Duration::from_millis(150)] {
        assert!(consumer.next(wait).unwrap_err().is_timeout());
    }
    publish_u64(&mut producer, 1);
    assert!(consumer.next(Duration::ZERO).unwrap().is_some());
}

#[test]
fn a_hung_up_producer_is_told_after_its_last_slot() {
    let (mut producer, mut consumer, life) = ring(2, 4096);
    publish_u64(&mut producer, 1);
    drop((producer, life));
    assert!(consumer.next(LONG).unwrap().is_some());
    let died = RingError::ProducerDied { taken: 1 };
    assert_eq!(consumer.next(LONG).unwrap_err(), died);
    assert_eq!(consumer.next(LONG).unwrap_err(), died);
}

#[test]
fn a_damaged_payload_is_found_when_asked_for() {
    let (mut producer, mut consumer, _life) = ring(1, 4096);
    consumer.set_verify(true);
    let slot = producer.free_slot().unwrap();
    let meta = SlotMeta { crc32c: Some(checksum(b"12345678") ^ 1), ..one_batch(8, 0) };
    producer.write(slot, 0, b"12345678").unwrap();
    producer.publish(slot, meta).unwrap();
    let fault = consumer.next(LONG).unwrap_err();
    assert_eq!(fault.reason(), "bad_descriptor");
    assert!(fault.to_string().contains("CRC32C"), "{fault}");
}

#[test]
fn misuse_by_the_engine_is_refused() {
    let (mut producer, _consumer, _life) = ring(1, 4096);
    let slot = producer.free_slot().unwrap();
    let reasons: Vec<&str> = [(4096, 1), (usize::MAX, 1), (0, 4097)]
        .map(|(offset, len)| producer.write(slot, offset, &vec![0; len]).unwrap_err().reason())
        .to_vec();
    assert_eq!(reasons, ["out_of_slot"; 3]);
    for meta in [
        one_batch(0, 0),
        one_batch(4097, 0),
        one_batch(8, u64::MAX),
        SlotMeta { batch_count: 2, ..one_batch(8, 0) },
        SlotMeta { batch_bytes: 0, ..one_batch(8, 0) },
    ] {
        assert_eq!(producer.publish(slot, meta).unwrap_err().reason(), "bad_meta");
    }
    producer.abandon(slot).unwrap();
    let not_filling = Err(RingError::NotFilling { slot: 0 });
    assert_eq!(producer.write(slot, 0, b"x"), not_filling);
    assert_eq!(producer.abandon(slot), not_filling);
}

#[test]
fn the_doorbell_can_ring_late() {
    let (mut producer, mut consumer, _life) = ring(4, 4096);
    let waiter = thread::spawn(move || consumer.next(LONG).map(|view| view.is_some()));
    while producer.words().sleep_word() == 0 {
        thread::yield_now();
    }
    publish_u64(&mut producer, 0);
    let early = producer.doorbell_if_needed(2);
    publish_u64(&mut producer, 1);
    let late = producer.doorbell_if_needed(2);
    assert_eq!(waiter.join().unwrap(), Ok(true));
    // The consumer's own check of the producer's life may come first; it needs no ring then.
    assert!(!early);
    println!("rung: {late}");
}

/// A data file that a test overwrites at will.
fn forged(words: &[[u64; layout::DESCRIPTOR_WORDS]], produced: u64) -> (Consumer, Connection) {
    let geometry = Geometry::new(2, 4096).unwrap();
    let header = layout::Header { geometry, nonce: 1 };
    let data = map::create_file("forged", geometry.data_bytes()).unwrap();
    let credit = map::create_file("forged", geometry.credit_bytes()).unwrap();
    let put = |fd: &OwnedFd, at: usize, bytes: &[u8]| {
        assert_eq!(rustix::io::pwrite(fd, bytes, at as u64).unwrap(), bytes.len());
    };
    put(&data, 0, &header.encode(RingFile::Data));
    put(&credit, 0, &header.encode(RingFile::Credit));
    put(&data, layout::PRODUCED_AT, &produced.to_ne_bytes());
    for (i, word) in words.iter().flatten().enumerate() {
        put(&data, geometry.descriptor_at(0) + 8 * i, &word.to_ne_bytes());
    }
    map::seal(&data, true).unwrap();
    map::seal(&credit, false).unwrap();
    let doorbell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let (ours, theirs) = Connection::pair().unwrap();
    let fds = RingFds { data, credit, doorbell };
    (Consumer::attach(fds, theirs.liveness().unwrap()).unwrap(), ours)
}

#[test]
fn impossible_counters_are_refused() {
    for produced in [3, u64::MAX, 1 << 32] {
        let (mut consumer, _life) = forged(&[], produced);
        let fault = consumer.next(LONG).unwrap_err();
        assert_eq!(fault, RingError::BadCounter { produced, taken: 0, slots: 2 });
    }
}

#[test]
fn a_slot_published_twice_is_refused() {
    let meta = one_batch(8, 0);
    let descriptors =
        [0, 1].map(|sequence| layout::Descriptor { sequence, slot: 1, meta }.encode());
    let (mut consumer, _life) = forged(&descriptors, 2);
    let _held = consumer.next(LONG).unwrap();
    let again = consumer.next(LONG).unwrap_err();
    let fault = DescriptorFault::Held { slot: 1 };
    assert_eq!(again, RingError::BadDescriptor { sequence: 1, fault });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn garbled_descriptors_give_an_error_or_a_view_in_bounds(
        word in 0..layout::DESCRIPTOR_WORDS, value: u64, small in 0u64..5000, pick: bool,
    ) {
        let mut words = layout::Descriptor { sequence: 0, slot: 1, meta: one_batch(64, 3) }.encode();
        words[word] = if pick { value } else { small };
        let (mut consumer, _life) = forged(&[words], 1);
        match consumer.next(LONG) {
            Ok(Some(view)) => {
                let total: usize = view.batches().take(5000).map(|batch| batch.len()).sum();
                prop_assert!(view.len() <= 4096 && total <= view.len());
            }
            Ok(None) => prop_assert!(false, "an end out of nothing"),
            Err(fault) => prop_assert_eq!(fault.reason(), "bad_descriptor"),
        }
    }
}

fn refusal(fds: RingFds) -> AttachRefusal {
    let (_ours, theirs) = Connection::pair().unwrap();
    match Consumer::attach(fds, theirs.liveness().unwrap()) {
        Err(RingError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

fn fds() -> RingFds {
    Producer::create(RingConfig { slots: 2, slot_bytes: 4096 }).unwrap().1
}

#[test]
fn files_that_are_no_ring_are_refused() {
    let RingFds { data, credit, doorbell } = fds();
    let swapped = RingFds { data: credit, credit: data, doorbell };
    assert_eq!(refusal(swapped).reason(), "attach_seals");
    let mixed = RingFds { credit: fds().credit, ..fds() };
    assert_eq!(refusal(mixed), AttachRefusal::Mixed);
    let twice = RingFds { credit: fds().data, ..fds() };
    assert_eq!(refusal(twice), AttachRefusal::WrongFile { file: RingFile::Credit });

    let unsealed = RingFds { data: map::create_file("loose", 4096).unwrap(), ..fds() };
    assert_eq!(refusal(unsealed).reason(), "attach_seals");
    for (bytes, reason) in [(8, "attach_size"), (4096, "attach_magic")] {
        let data = map::create_file("blank", bytes).unwrap();
        map::seal(&data, true).unwrap();
        assert_eq!(refusal(RingFds { data, ..fds() }).reason(), reason);
    }
    let pipe = OwnedFd::from(std::io::pipe().unwrap().0);
    let (_ours, theirs) = Connection::pair().unwrap();
    let odd = Consumer::attach(RingFds { data: pipe, ..fds() }, theirs.liveness().unwrap());
    assert_eq!(odd.unwrap_err().reason(), "os");
}

#[test]
fn a_header_that_promises_more_than_the_file_is_refused() {
    let header = layout::Header { geometry: Geometry::new(8, 8192).unwrap(), nonce: 1 };
    let data = map::create_file("short", 8192).unwrap();
    rustix::io::pwrite(&data, &header.encode(RingFile::Data), 0).unwrap();
    map::seal(&data, true).unwrap();
    let refused = refusal(RingFds { data, ..fds() });
    let expected = header.geometry.data_bytes();
    assert_eq!(refused, AttachRefusal::Size { file: RingFile::Data, found: 8192, expected });
}

/// A ring with several readers, each with a socket of its own.
fn shared(slots: u32, readers: u32) -> (Producer, Vec<Consumer>, Vec<Connection>) {
    let config = RingConfig { slots, slot_bytes: 4096 };
    let (producer, fds) = Producer::create_shared(config, readers).unwrap();
    let (ours, theirs): (Vec<_>, Vec<_>) = fds.iter().map(|_| Connection::pair().unwrap()).unzip();
    let attach = |(fds, socket): (RingFds, &Connection)| {
        Consumer::attach(fds, socket.liveness().unwrap()).unwrap()
    };
    let consumers = fds.into_iter().zip(&theirs).map(attach).collect();
    (producer, consumers, ours)
}

#[test]
fn a_slot_is_free_when_every_reader_has_returned_it() {
    let (mut producer, mut readers, _alive) = shared(2, 3);
    publish_u64(&mut producer, 7);
    publish_u64(&mut producer, 8);
    assert!(!producer.has_free_slot());
    let mut views: Vec<SlotView> =
        readers.iter_mut().map(|reader| reader.next(LONG).unwrap().unwrap()).collect();
    assert!(views.iter().all(|view| view[..] == 7_u64.to_le_bytes()));
    while let Some(view) = views.pop() {
        assert!(!producer.has_free_slot(), "a reader still has the slot");
        drop(view);
    }
    assert!(producer.has_free_slot());
    assert_eq!(producer.counters().bad_release_words, 0);
    publish_u64(&mut producer, 9);
    for reader in &mut readers {
        for value in [8_u64, 9] {
            assert_eq!(reader.next(LONG).unwrap().unwrap()[..], value.to_le_bytes());
        }
    }
}

/// Readers at paces of their own: nobody misses a slot, and
/// nobody sees one that is filled again.
#[test]
fn every_reader_gets_every_slot() {
    const COUNT: u64 = 3_000;
    let (mut producer, readers, _alive) = shared(5, 4);
    let reading: Vec<_> = (0..)
        .zip(readers)
        .map(|(seed, mut reader)| {
            thread::spawn(move || {
                let mut rng = Rng::new(seed);
                let mut held: Vec<(SlotView, u64)> = Vec::new();
                for value in 0..COUNT {
                    let view = reader.next(LONG).unwrap().unwrap();
                    held.push((view, value));
                    // One each: together they leave the producer a slot.
                    while held.len() > rng.below(2) {
                        let (view, value) = held.swap_remove(rng.below(held.len()));
                        assert_eq!(view[..], value.to_le_bytes());
                    }
                    if rng.below(200) == 0 {
                        thread::sleep(Duration::from_micros(300));
                    }
                }
                held.clear();
                assert!(reader.next(LONG).unwrap().is_none());
            })
        })
        .collect();
    for value in 0..COUNT {
        let slot = wait_for_slot(&mut producer);
        producer.write(slot, 0, &value.to_le_bytes()).unwrap();
        producer.publish(slot, one_batch(8, value)).unwrap();
        producer.doorbell_if_needed(2);
    }
    producer.finish();
    reading.into_iter().for_each(|reader| reader.join().unwrap());
    let counters = producer.counters();
    assert_eq!((counters.bad_release_words, counters.bad_sleep_words), (0, 0));
}

#[test]
fn a_ring_has_at_least_one_reader_and_not_too_many() {
    let config = RingConfig { slots: 2, slot_bytes: 4096 };
    for readers in [0, MAX_READERS + 1] {
        let refused = Producer::create_shared(config, readers).unwrap_err();
        assert!(matches!(refused, RingError::Limit { field: "readers", .. }), "{refused}");
    }
}

#[test]
fn slots_get_their_memory_shortly_before_they_are_needed() {
    let (slots, slot_bytes) = (32, 1 << 20);
    let (mut producer, fds) = Producer::create(RingConfig { slots, slot_bytes }).unwrap();
    let present = || rustix::fs::fstat(&fds.data).unwrap().st_blocks as u64 * 512 / slot_bytes;
    // Huge pages, where the kernel has them for such files, are larger than a slot.
    assert!(present() <= 4, "{} slots", present());
    for _ in 0..100 {
        let slot = producer.free_slot().unwrap();
        assert_eq!(slot.get(), 0);
        producer.abandon(slot).unwrap();
    }
    let all: Vec<SlotIndex> = std::iter::from_fn(|| producer.free_slot()).collect();
    assert_eq!(all.len(), slots as usize);
    assert!(present() >= u64::from(slots));
    for slot in &all {
        producer.slot_mut(*slot).unwrap().fill(1);
    }
    // Larger slots are there from the start.
    let slot_bytes = 8 << 20;
    let (_producer, fds) = Producer::create(RingConfig { slots: 3, slot_bytes }).unwrap();
    let blocks = rustix::fs::fstat(&fds.data).unwrap().st_blocks as u64;
    assert!(blocks * 512 >= 3 * slot_bytes);
}

/// Whether the producer's descriptor for credits is readable.
fn is_signalled(producer: &Producer) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(producer.credit_fd(), PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

/// A wait for credits is announced once, is ended by the first slot that comes back, and leaves no
/// signal behind for the next wait.
#[test]
fn each_wait_for_credits_has_one_signal() {
    let (mut producer, mut consumer, _life) = ring(3, 4096);
    for round in 0..3 {
        for value in 0..3 {
            publish_u64(&mut producer, 3 * round + value);
        }
        let views: Vec<_> = (0..3).map(|_| consumer.next(LONG).unwrap().unwrap()).collect();
        assert!(producer.arm_credit_wakeup() && !is_signalled(&producer), "round {round}");
        drop(views);
        assert_eq!(consumer.counters().credit_signals, round + 1, "one for the three slots");
        assert!(is_signalled(&producer));
        producer.disarm_credit_wakeup();
        assert!(!is_signalled(&producer), "the signal would end the next wait");
    }
    assert_eq!(producer.counters().spurious_credit_wakeups, 0);
}

/// Before an engine sleeps, it wakes a trainer whom it has left asleep because few slots were
/// ready.
#[test]
fn a_producer_that_waits_for_credits_leaves_nobody_asleep() {
    let (mut producer, _consumer, _life) = ring(4, 4096);
    let slots: Vec<_> = (0..3).map(|_| producer.free_slot().unwrap()).collect();
    // A thread would also wake by itself.
    assert!(producer.words().fall_asleep(0).is_some());
    publish_u64(&mut producer, 7);
    assert!(!producer.doorbell_if_needed(4), "one of four");
    // The others are being filled, so there is no free slot.
    assert!(producer.arm_credit_wakeup());
    assert_eq!(producer.counters().doorbells, 1);
    producer.disarm_credit_wakeup();
    slots.into_iter().for_each(|slot| producer.abandon(slot).unwrap());
}

/// Only the number of the publication returns a slot: any other is counted, and the slot stays the
/// reader's.
#[test]
fn a_release_of_another_publication_frees_nothing() {
    let (producer, fds) = Producer::create(RingConfig { slots: 2, slot_bytes: 4096 }).unwrap();
    let mut producer = producer;
    let credit = map::Region::map(
        fds.credit.as_fd(),
        producer.geometry().credit_bytes(),
        map::Access::ReadWrite,
    );
    let credit = credit.unwrap();
    publish_u64(&mut producer, 1);
    publish_u64(&mut producer, 2);
    for (bad, word) in [(1, 7), (2, u64::MAX)] {
        credit
            .u64_at(producer.geometry().released_at(0))
            .store(word, std::sync::atomic::Ordering::Release);
        assert!(!producer.has_free_slot(), "returned by {word}");
        assert_eq!(producer.counters().bad_release_words, bad);
    }
}
