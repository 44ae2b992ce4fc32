//! A device that reports completions that cannot be: the session concerned ends with a reason, no
//! memory outside its slots is touched, and all others are served.

use roce::verbs::{Completion, VerbsError, WcOpcode};
use sim::chance::Chance;
use xio::reader::StreamError;
use xio::target::SessionFailure;

use super::corpus::Corpus;
use super::ledger::Lie;
use super::ring::End;
use super::world::{READER, Setup, TARGET, World};

const UNREADABLE: VerbsError = VerbsError::Device { call: "ibv_poll_cq", errno: 5 };

/// A world whose device at `node` changes the fourth completion of this kind.
fn world(node: usize, opcode: WcOpcode, lie: impl Fn(&mut Completion) + 'static) -> World {
    let corpus = Corpus::one_file(&mut Chance::new(7));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 40));
    let mut count = 0;
    let changes: Lie = Box::new(move |completions| {
        for done in completions.iter_mut().filter(|done| done.opcode == opcode) {
            count += 1;
            if count == 4 {
                lie(done);
            }
        }
        Ok(())
    });
    world.lies[node] = Some(changes);
    world
}

fn wr_ids() -> [u64; 4] {
    [u64::MAX - 15, 0xffff_0000_ffff, 1 << 32, 1_000]
}

#[test]
fn a_target_survives_completions_of_no_work_request() {
    for opcode in [WcOpcode::Recv, WcOpcode::Send] {
        for wr_id in wr_ids() {
            let mut world = world(TARGET, opcode, move |done| done.wr_id = wr_id);
            world.run();
            world.assert_delivered();
            assert_eq!(world.failures[0], SessionFailure::BadCompletion, "{opcode:?} {wr_id:#x}");
            assert!(world.target.target.counters().bad_completions > 0);
            world.tear_down();
        }
    }
}

#[test]
fn a_reader_survives_completions_of_no_work_request() {
    // The last is that of the first slot that a reader with four credits does not have.
    for opcode in [WcOpcode::Recv, WcOpcode::Send] {
        for wr_id in wr_ids().into_iter().chain([4]) {
            let mut world = world(READER, opcode, move |done| done.wr_id = wr_id);
            world.run();
            world.assert_delivered();
            let counters = world.readers[0].reader.counters();
            assert!(counters.bad_completions > 0, "{opcode:?} {wr_id:#x}: {counters:?}");
            world.tear_down();
        }
    }
}

/// The number is one of a slot, but of none with a work request that can complete.
#[test]
fn a_target_believes_no_completion_twice() {
    let corpus = Corpus::one_file(&mut Chance::new(7));
    let mut world = World::new(&corpus, &Setup::plain(&corpus, 40));
    let mut first = None;
    world.lies[TARGET] = Some(Box::new(move |completions| {
        for done in completions.iter_mut().filter(|done| done.opcode == WcOpcode::Recv) {
            match first {
                None => first = Some(done.wr_id),
                Some(slot) => done.wr_id = slot,
            }
        }
        Ok(())
    }));
    let failed = |world: &mut World| !world.failures.is_empty();
    assert!(world.run_until(failed));
    assert_eq!(world.failures[0], SessionFailure::BadCompletion);
}

#[test]
fn a_queue_that_cannot_be_read_ends_the_sessions_of_a_target() {
    let mut world = world(TARGET, WcOpcode::Recv, |_| ());
    let mut polls = 0;
    world.lies[TARGET] = Some(Box::new(move |_| {
        polls += 1;
        if polls == 50 { Err(UNREADABLE) } else { Ok(()) }
    }));
    world.run();
    world.assert_delivered();
    assert_eq!(world.failures, [SessionFailure::Completions(UNREADABLE)]);
    world.tear_down();
}

#[test]
fn a_queue_that_cannot_be_read_ends_a_stream_with_the_reason() {
    let mut world = world(READER, WcOpcode::Recv, |_| ());
    let mut polls = 0;
    world.lies[READER] = Some(Box::new(move |_| {
        polls += 1;
        if polls >= 50 { Err(UNREADABLE) } else { Ok(()) }
    }));
    world.run();
    let end = world.readers[0].ring.end();
    assert_eq!(end, Some(End::Failed(StreamError::Device(UNREADABLE))));
}
