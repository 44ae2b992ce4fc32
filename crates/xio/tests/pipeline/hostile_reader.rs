//! A reader that sends arbitrary requests: the target refuses with a reason, counts it, and serves
//! the others.

use roce::verbs::WcStatus;
use xio::capsule::{CAPSULE_BYTES, Outcome, ReadRequest, ReadResponse, Refusal};
use xio::dataset::Dtype;
use xio::kernel::crc32c;
use xio::target::BLOCK_BYTES;

use super::corpus::Corpus;
use sim::chance::Chance;

use super::raw::{Raw, first_sample, request};
use super::seeds::{Replay, seeds};
use super::world::{Setup, StreamSpec, TARGET, World};

/// A target with a correct reader that runs all the time.
fn world(corpus: &Corpus) -> World {
    let plain = Setup::plain(corpus, 40);
    let slow = StreamSpec { pace_ns: 50_000, ..plain.streams[0] };
    let setup = Setup { streams: vec![slow], ..plain };
    World::new(corpus, &setup)
}

/// Sends capsules and waits for as many responses.
fn ask(world: &mut World, raw: &mut Raw, capsules: &[Vec<u8>]) -> Vec<ReadResponse> {
    capsules.iter().for_each(|capsule| raw.send(&mut world.net, capsule));
    let mut answers = Vec::new();
    let answered = |world: &mut World| {
        raw.poll(&mut world.net);
        answers.extend(raw.answers());
        answers.len() >= capsules.len()
    };
    assert!(world.run_until(answered), "only {} answers: {:?}", answers.len(), raw.failures);
    answers
}

fn refused(world: &World, reason: Refusal) -> u64 {
    world.target.target.counters().refused[reason as usize - 1]
}

/// The correct reader gets its data, and no resources are held afterwards.
fn assert_unharmed(mut world: World) {
    world.run();
    world.assert_delivered();
    world.tear_down();
}

/// One request, well-formed as a capsule, and why it is refused.
fn assert_refused(change: impl Fn(&mut ReadRequest), reason: Refusal) {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(4);
    let mut bad = request(&raw, 1, &corpus);
    change(&mut bad);
    let answer = ask(&mut world, &mut raw, &[bad.encode(crc32c).to_vec()])[0];
    assert_eq!((answer.seq, answer.tag), (bad.seq, bad.tag));
    assert_eq!(answer.outcome, Outcome::Refused(reason));
    assert_eq!(refused(&world, reason), 1);
    assert_eq!(world.target.target.counters().refused.iter().sum::<u64>(), 1);
    assert_unharmed(world);
}

#[test]
fn requests_outside_the_session_are_refused() {
    assert_refused(|bad| bad.source = 1, Refusal::UnknownSource);
    assert_refused(|bad| bad.source = u32::MAX, Refusal::UnknownSource);
    // 403 windows of 16 tokens and a tail of 3.
    assert_refused(|bad| bad.first_token = 403 * 16 + 3, Refusal::OutOfRange);
    assert_refused(|bad| (bad.first_token, bad.tokens) = (403 * 16, 4), Refusal::OutOfRange);
    assert_refused(|bad| bad.first_token = u64::MAX, Refusal::OutOfRange);
    assert_refused(|bad| bad.tokens = u32::MAX, Refusal::OutOfRange);
    assert_refused(|bad| bad.tokens = 0, Refusal::BadLength);
    // Including the type of the file: the session agreed on `u16`.
    for deliver in [Dtype::U32, Dtype::U64, Dtype::I32, Dtype::U8, Dtype::I16] {
        assert_refused(|bad| bad.deliver = deliver, Refusal::BadType);
    }
    assert_refused(|bad| bad.seq = 0, Refusal::Replayed);
    assert_refused(|bad| bad.seq = 2, Refusal::Replayed);
    assert_refused(|bad| bad.seq = u64::MAX, Refusal::Replayed);
}

#[test]
fn a_request_larger_than_a_register_is_refused() {
    let corpus = Corpus::large_file(&mut Chance::new(1));
    let mut world = World::new(&corpus, &Setup { streams: Vec::new(), ..Setup::plain(&corpus, 0) });
    let mut raw = world.raw_session(4);
    let mut bad = request(&raw, 1, &corpus);
    bad.tokens = BLOCK_BYTES / 4 + 1;
    let answer = ask(&mut world, &mut raw, &[bad.encode(crc32c).to_vec()])[0];
    assert_eq!(answer.outcome, Outcome::Refused(Refusal::BadLength));
}

#[test]
fn every_damaged_byte_of_a_capsule_is_noticed() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    for at in 0..CAPSULE_BYTES {
        let mut raw = world.raw_session(4);
        let mut capsule = request(&raw, 1, &corpus).encode(crc32c).to_vec();
        capsule[at] ^= 1 << (at % 8);
        let answer = ask(&mut world, &mut raw, &[capsule])[0];
        assert_eq!(answer.outcome, Outcome::Refused(Refusal::BadCapsule), "byte {at}");
    }
    assert_eq!(refused(&world, Refusal::BadCapsule), CAPSULE_BYTES as u64);
    assert_unharmed(world);
}

#[test]
fn messages_that_are_no_capsule_are_refused() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let answer = ReadResponse { seq: 1, tag: 0, outcome: Outcome::Storage { errno: 5 } };
    for capsule in [Vec::new(), vec![0; 1], vec![0xff; 63], answer.encode(crc32c).to_vec()] {
        let mut raw = world.raw_session(4);
        let answer = ask(&mut world, &mut raw, &[capsule])[0];
        assert_eq!(answer.outcome, Outcome::Refused(Refusal::BadCapsule));
    }
    assert_eq!(refused(&world, Refusal::BadCapsule), 4);
    assert_unharmed(world);
}

#[test]
fn a_message_longer_than_a_capsule_ends_the_session() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(4);
    raw.send(&mut world.net, &[0; CAPSULE_BYTES + 1]);
    let failed = |world: &mut World| {
        raw.poll(&mut world.net);
        !raw.failures.is_empty()
    };
    assert!(world.run_until(failed));
    assert_eq!(raw.failures[0], WcStatus::RemoteInvalidRequest);
    assert!(world.target.target.counters().failed_work_requests > 0);
    assert_unharmed(world);
}

#[test]
fn immediate_data_is_no_capsule() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(8);
    // A WRITE of no bytes needs no key.
    raw.write_imm(&mut world.net, 0, 0, &[]);
    let capsule = request(&raw, 1, &corpus).encode(crc32c).to_vec();
    let answers = {
        let mut answers = Vec::new();
        raw.send(&mut world.net, &capsule);
        let both = |world: &mut World| {
            raw.poll(&mut world.net);
            answers.extend(raw.answers());
            answers.len() == 2
        };
        assert!(world.run_until(both));
        answers
    };
    assert_eq!(answers[0].outcome, Outcome::Refused(Refusal::BadCapsule));
    assert!(matches!(answers[1].outcome, Outcome::Done { .. }));
    assert_unharmed(world);
}

#[test]
fn numbers_that_come_twice_or_skip_are_refused() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(8);
    let capsules: Vec<Vec<u8>> =
        [1, 1, 3, 2].map(|seq| request(&raw, seq, &corpus).encode(crc32c).to_vec()).into();
    let mut answers = ask(&mut world, &mut raw, &capsules);
    answers.sort_by_key(|answer| matches!(answer.outcome, Outcome::Done { .. }));
    let mut done: Vec<u64> = answers[2..].iter().map(|answer| answer.seq).collect();
    // The disk completes reads in any order.
    done.sort_unstable();
    assert_eq!(answers[0].outcome, Outcome::Refused(Refusal::Replayed));
    assert_eq!(answers[1].outcome, Outcome::Refused(Refusal::Replayed));
    assert_eq!(done, [1, 2]);
    assert_eq!(refused(&world, Refusal::Replayed), 2);
    assert_unharmed(world);
}

#[test]
fn requests_beyond_the_credits_are_refused() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(32);
    // The session has 4 credits; no response is sent before the disk completes.
    let capsules: Vec<Vec<u8>> =
        (1..=8).map(|seq| request(&raw, seq, &corpus).encode(crc32c).to_vec()).collect();
    let answers = ask(&mut world, &mut raw, &capsules);
    let count = |wanted: fn(&Outcome) -> bool| {
        answers.iter().filter(|answer| wanted(&answer.outcome)).count() as u64
    };
    let without = count(|outcome| *outcome == Outcome::Refused(Refusal::NoCredit));
    assert!(without >= 1, "{answers:?}");
    assert_eq!(count(|outcome| matches!(outcome, Outcome::Done { .. })), 4);
    assert_eq!(refused(&world, Refusal::NoCredit), without);
    assert_unharmed(world);
}

#[test]
fn good_requests_are_served_beside_bad_ones() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let mut raw = world.raw_session(8);
    let good = request(&raw, 1, &corpus).encode(crc32c).to_vec();
    let answer = ask(&mut world, &mut raw, &[vec![7; 64], good]).pop().unwrap();
    let expected = first_sample(&corpus);
    let Outcome::Done { bytes, crc32c: sum, .. } = answer.outcome else {
        panic!("{answer:?}");
    };
    assert_eq!((bytes as usize, sum), (expected.len(), crc32c(0, &expected)));
    let arena = &mut world.net.nodes[super::world::READER].memory;
    assert!(arena.peek(raw.data.addr, expected.len()) == expected);
    assert_unharmed(world);
}

/// Keys and addresses that the reader has no right to use end its own session, nothing else.
#[test]
fn a_destination_that_is_not_registered_ends_the_session() {
    let corpus = Corpus::one_file(&mut Chance::new(1));
    let mut world = world(&corpus);
    let change: [fn(&mut ReadRequest); 3] =
        [|bad| bad.rkey ^= 0x100, |bad| bad.remote_addr -= 1, |bad| bad.remote_addr = u64::MAX - 3];
    for (index, change) in change.iter().enumerate() {
        let mut raw = world.raw_session(4);
        let mut bad = request(&raw, 1, &corpus);
        change(&mut bad);
        raw.send(&mut world.net, &bad.encode(crc32c));
        let failures = world.target.target.counters().failed_work_requests;
        let failed =
            |world: &mut World| world.target.target.counters().failed_work_requests > failures;
        assert!(world.run_until(failed), "change {index}");
    }
    assert_unharmed(world);
}

/// Random bytes, valid capsules with random fields, damaged ones, WRITEs: nothing panics, the
/// correct reader gets its bytes, and every staging buffer is freed.
#[test]
fn anything_at_all() {
    for seed in seeds(0..60) {
        let _replay = Replay { test: "anything_at_all", seed };
        let mut draw = Chance::new(seed);
        let corpus = Corpus::one_file(&mut draw);
        let mut world = world(&corpus);
        for _ in 0..6 {
            let receives = draw.pick(&[0, 1, 64]);
            let mut raw = world.raw_session(receives);
            for seq in 1..draw.between(2, 13) {
                random_message(&mut world, &mut raw, seq, &corpus, &mut draw);
            }
            let until = world.net.now() + roce::Duration::from_nanos(draw.below(400_000));
            world.run_until(|world| {
                raw.poll(&mut world.net);
                world.net.now() >= until
            });
        }
        assert!(world.net.nodes[TARGET].endpoint.counters().packets_received > 0);
        assert_unharmed(world);
    }
}

fn random_message(world: &mut World, raw: &mut Raw, seq: u64, corpus: &Corpus, draw: &mut Chance) {
    let mut capsule = random_request(raw, seq, corpus, draw).encode(crc32c).to_vec();
    match draw.below(8) {
        0 => capsule[draw.below(64) as usize] ^= draw.word() as u8,
        1 => capsule.truncate(draw.below(64) as usize),
        2 => capsule = (0..draw.below(80)).map(|_| draw.word() as u8).collect(),
        3 => return raw.write_imm(&mut world.net, 0, 0, &[]),
        4 if draw.per_mille(100) => {
            return raw.write(&mut world.net, 0x7f00_0000_0000, 1, &[1; 64]);
        }
        _ => {}
    }
    raw.send(&mut world.net, &capsule);
}

fn random_request(raw: &Raw, seq: u64, corpus: &Corpus, draw: &mut Chance) -> ReadRequest {
    let mut request = request(raw, seq, corpus);
    match draw.below(10) {
        0 => request.seq = draw.word(),
        1 => request.tag = draw.word() as u32,
        2 => request.source = draw.below(3) as u32,
        3 => request.first_token = draw.word() >> draw.below(64),
        4 => request.tokens = (draw.word() >> draw.between(32, 63)) as u32,
        5 => request.deliver = draw.pick(&Dtype::ALL),
        6 => request.remote_addr = draw.word() >> draw.below(64),
        7 => request.rkey = draw.word() as u32,
        _ => {}
    }
    request
}
