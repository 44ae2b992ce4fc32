//! A target that sends arbitrary responses: the reader neither accepts them nor fails.

use std::cell::Cell;
use std::rc::Rc;

use xio::capsule::{CAPSULE_BYTES, Outcome, ReadRequest, ReadResponse, Refusal};
use xio::disk::Change;
use xio::kernel::crc32c;
use xio::reader::StreamError;

use super::corpus::Corpus;
use sim::chance::Chance;

use super::raw::{Fake, Reply, done};
use super::ring::End;
use super::seeds::{Replay, seeds};
use super::world::{Setup, World};

/// More than an epoch.
const BATCHES: u64 = 110;

fn corpus() -> Corpus {
    Corpus::one_file(&mut Chance::new(7))
}

fn world(corpus: &Corpus, policy: impl FnMut(&ReadRequest, &mut Reply) + 'static) -> World {
    let fake = Fake::new(corpus, policy);
    World::with_fake(corpus, &Setup::plain(corpus, BATCHES), fake)
}

/// Lets `lie` change the response to the fourth request, all others are correct. The reader drops
/// the connection, makes another, and delivers every byte.
fn assert_survives(lie: impl Fn(&ReadRequest, &mut Reply) + 'static) {
    let corpus = corpus();
    let mut count = 0;
    let mut world = world(&corpus, move |request, reply| {
        count += 1;
        if count == 4 {
            lie(request, reply);
        }
    });
    world.run();
    world.assert_delivered();
    let counters = world.readers[0].reader.counters();
    assert_eq!(counters.bad_responses, 1);
    assert_eq!(counters.lost_connections, 1);
    assert!(counters.retried_requests >= 1);
    assert_eq!(counters.corrupt_blocks, 0);
}

#[test]
fn every_damaged_byte_of_an_answer_is_noticed() {
    for at in 0..CAPSULE_BYTES {
        assert_survives(move |_, reply| {
            let mut capsule = reply.response.encode(crc32c).to_vec();
            capsule[at] ^= 1 << (at % 8);
            reply.capsule = Some(capsule);
        });
    }
}

#[test]
fn answers_to_nothing_are_refused() {
    assert_survives(|_, reply| reply.response.tag ^= 1);
    assert_survives(|_, reply| reply.response.tag = u32::MAX);
    assert_survives(|_, reply| reply.response.seq += 1);
    assert_survives(|_, reply| reply.response.seq = 0);
    assert_survives(|_, reply| reply.response.seq = u64::MAX);
    assert_survives(|_, reply| reply.times = 2);
}

#[test]
fn messages_that_are_no_answer_are_refused() {
    assert_survives(|_, reply| reply.capsule = Some(Vec::new()));
    assert_survives(|_, reply| reply.capsule = Some(vec![0xff; 63]));
    assert_survives(|request, reply| reply.capsule = Some(request.encode(crc32c).to_vec()));
}

/// The completion of such a WRITE has its own length, which is unrelated to the receive.
#[test]
fn a_write_with_immediate_is_no_answer() {
    assert_survives(|_, reply| {
        reply.as_write_imm = true;
        reply.data.resize(reply.data.len() + 64, 0);
        reply.data.truncate(96);
    });
}

#[test]
fn errors_outside_the_block_asked_for_are_not_believed() {
    let outside = |change: fn(&ReadRequest) -> Outcome| {
        assert_survives(move |request, reply| reply.response.outcome = change(request));
    };
    outside(|_| Outcome::Overflow { token: u64::MAX, value: 70_000, stage: 0 });
    outside(|request| Outcome::Overflow {
        token: request.first_token + u64::from(request.tokens),
        value: 70_000,
        stage: 0,
    });
    outside(|request| Outcome::Overflow {
        token: request.first_token.wrapping_sub(1),
        value: 70_000,
        stage: 0,
    });
    // A value that does fit.
    outside(|request| Outcome::Overflow { token: request.first_token, value: 5, stage: 0 });
    // Stages that refuse no token, or are none.
    for stage in [1, 2, 255] {
        assert_survives(move |request, reply| {
            let (token, value) = (request.first_token, 70_000);
            reply.response.outcome = Outcome::Overflow { token, value, stage };
        });
    }
    // A missing byte after the block.
    outside(|_| Outcome::Truncated { at_byte: u64::MAX });
}

/// The reader and the target disagree on the state of the connection: reconnect.
#[test]
fn a_refused_number_or_credit_begins_afresh() {
    for reason in [Refusal::Replayed, Refusal::NoCredit, Refusal::BadCapsule] {
        let corpus = corpus();
        let mut count = 0;
        let mut world = world(&corpus, move |_, reply| {
            count += 1;
            if count == 5 {
                reply.response.outcome = Outcome::Refused(reason);
            }
        });
        world.run();
        world.assert_delivered();
        let counters = world.readers[0].reader.counters();
        assert_eq!((counters.lost_connections, counters.bad_responses), (1, 0));
    }
}

/// Responds with `lie` for one block each time it is requested, up to `times`.
fn lie_about_a_block(times: u32, lie: impl Fn(&mut Reply) + 'static) -> (World, Rc<Cell<u32>>) {
    let corpus = corpus();
    let told = Rc::new(Cell::new(0));
    let count = Rc::clone(&told);
    let world = world(&corpus, move |request, reply| {
        if request.first_token == 64 && count.get() < times {
            count.set(count.get() + 1);
            lie(reply);
        }
    });
    (world, told)
}

fn damage(reply: &mut Reply) {
    reply.data[3] ^= 1;
}

fn shorten(reply: &mut Reply) {
    if let Outcome::Done { bytes, .. } = &mut reply.response.outcome {
        *bytes -= 2;
    }
}

#[test]
fn a_damaged_block_is_asked_for_again() {
    for lie in [damage, shorten] {
        let (mut world, told) = lie_about_a_block(2, lie);
        world.run();
        world.assert_delivered();
        assert_eq!(told.get(), 2);
        let counters = world.readers[0].reader.counters();
        assert_eq!((counters.corrupt_blocks, counters.lost_connections), (2, 0));
    }
}

#[test]
fn a_block_damaged_every_time_ends_the_stream_where_it_is_due() {
    for lie in [damage, shorten] {
        let (mut world, told) = lie_about_a_block(u32::MAX, lie);
        world.run();
        let error = StreamError::Damaged { dataset: 0, first_token: 64 };
        assert_eq!(world.readers[0].ring.end(), Some(End::Failed(error)));
        assert_eq!(told.get(), 3);
        assert_eq!(world.readers[0].reader.counters().corrupt_blocks, 3);
        assert_prefix(&world);
    }
}

/// All batches before the block in question were delivered, and no other.
fn assert_prefix(world: &World) {
    let corpus = corpus();
    let block_of = |n: u64| corpus.sample(n).1 / 64;
    let first = (0..).find(|n| block_of(*n) == 1).unwrap();
    let batches = first / u64::from(corpus.batch_samples);
    let ring = &world.readers[0].ring;
    assert_eq!(ring.batches_seen, batches);
    assert!(ring.seen == corpus.expected(0, batches));
}

/// A claim that could be true is checked: the samples of the block turn out to be there.
#[test]
fn errors_that_a_target_makes_up_cost_nothing_but_time() {
    let made_up: [fn(&mut Reply); 2] = [
        |reply| reply.response.outcome = Outcome::Overflow { token: 70, value: 70_000, stage: 0 },
        |reply| reply.response.outcome = Outcome::Truncated { at_byte: 128 },
    ];
    for lie in made_up {
        let (mut world, told) = lie_about_a_block(1, lie);
        world.run();
        world.assert_delivered();
        assert_eq!(told.get(), 1);
        assert_eq!(world.readers[0].reader.counters().lost_connections, 0);
    }
}

/// A block that the manifest cannot have, or that the request does not touch.
#[test]
fn a_change_that_cannot_be_costs_the_connection() {
    for at_byte in [1, 1 << 20, u64::MAX] {
        let (mut world, _) = lie_about_a_block(1, move |reply| {
            reply.response.outcome = Outcome::Changed(Change::Block { at_byte });
        });
        world.run();
        world.assert_delivered();
        let counters = world.readers[0].reader.counters();
        assert_eq!((counters.bad_responses, counters.lost_connections), (1, 1));
    }
}

#[test]
fn a_refusal_that_will_not_change_ends_the_stream() {
    for reason in
        [Refusal::UnknownSource, Refusal::OutOfRange, Refusal::BadLength, Refusal::BadType]
    {
        let (mut world, _) = lie_about_a_block(1, move |reply| {
            reply.response.outcome = Outcome::Refused(reason);
        });
        world.run();
        let error = StreamError::Refused { dataset: 0, reason };
        assert_eq!(world.readers[0].ring.end(), Some(End::Failed(error)));
        assert_prefix(&world);
    }
}

/// Whatever arrives, nothing panics and only the right bytes are delivered.
#[test]
fn anything_at_all() {
    let mut finished = 0;
    for seed in seeds(0..80) {
        let _replay = Replay { test: "anything_at_all", seed };
        let mut draw = Chance::new(seed);
        let corpus = corpus();
        let mut lies = Chance::new(draw.word());
        let rate = draw.pick(&[20, 60]);
        let mut world = world(&corpus, move |request, reply| {
            if lies.per_mille(rate) {
                any_lie(request, reply, &mut lies);
            }
        });
        world.run();
        let ring = &world.readers[0].ring;
        let expected = corpus.expected(0, ring.batches_seen);
        assert!(ring.seen == expected, "wrong bytes were delivered");
        finished += u64::from(ring.end() == Some(End::Finished));
    }
    assert!(finished > 10, "lies ended nearly every stream: {finished}");
}

fn any_lie(request: &ReadRequest, reply: &mut Reply, draw: &mut Chance) {
    match draw.below(10) {
        0 => reply.response.tag = draw.word() as u32,
        1 => reply.response.seq = draw.word(),
        2 => reply.times = draw.below(4) as u32 + 1,
        3 => reply.capsule = Some((0..draw.below(200)).map(|_| draw.word() as u8).collect()),
        4 => reply.as_write_imm = true,
        5 => {
            let at = draw.below(reply.data.len() as u64) as usize;
            reply.data[at] ^= 0x10;
        }
        6 => {
            let mut capsule = reply.response.encode(crc32c);
            capsule[draw.below(64) as usize] ^= 4;
            reply.capsule = Some(capsule.to_vec());
        }
        7 => {
            let (len, at_byte) = (draw.word() >> draw.below(64), draw.word() & 1 << 20);
            let changes = [Change::Written { len }, Change::Block { at_byte }, Change::Removed];
            reply.response.outcome = Outcome::Changed(draw.pick(&changes));
        }
        8 => {
            let token = request.first_token.wrapping_add(draw.word() >> draw.below(64));
            let value = i128::from(draw.word());
            let stage = draw.below(4) as u8;
            reply.response.outcome = Outcome::Overflow { token, value, stage };
        }
        _ => {
            let (seq, tag) = (request.seq, request.tag);
            let outcome = done(draw.word() as u32, draw.word() as u32, u32::MAX);
            reply.response = ReadResponse { seq, tag, outcome };
        }
    }
}
