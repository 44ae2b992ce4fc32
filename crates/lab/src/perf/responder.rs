//! What the server does in a turn: takes messages, answers pings, counts.

use comm::mesh::{BATCH, Completions, MeshError, Place};
use nic::pool::Pool;
use roce::Time;
use roce::device::Device;
use roce::verbs::{Completion, SendOp, SendWr};
use roce::world::Staging;

use super::ends::{Ends, in_words};
use super::messages::Verdict;
use super::test::{Mode, Operation, Service};

/// One queue pair.
#[derive(Clone, Debug, Default)]
struct Flow {
    /// The number that the next message has if none was lost.
    next: u64,
    /// The latest message in each buffer.
    latest: Vec<Option<u64>>,
}

impl Flow {
    /// How many were lost before the message of this number; nothing if it came out of order. The
    /// number is from whoever knows the queue pair, so it may be any.
    fn take(&mut self, number: u64) -> Option<u64> {
        let lost = number.checked_sub(self.next)?;
        self.next = number.saturating_add(1);
        Some(lost)
    }
}

/// The server's side of a test.
#[derive(Debug)]
pub(super) struct Responder {
    pub(super) ends: Ends,
    flows: Vec<Flow>,
    pub(super) received: u64,
    pub(super) lost: u64,
    /// Why the test cannot go on.
    pub(super) failure: Option<String>,
    out_of_order: u64,
    /// An answer is due.
    pong_waits: bool,
}

impl Responder {
    pub(super) fn new(ends: Ends) -> Responder {
        let flow = Flow { latest: vec![None; ends.test.slots() as usize], ..Flow::default() };
        Responder {
            flows: vec![flow; ends.mesh.links().len()],
            ends,
            received: 0,
            lost: 0,
            failure: None,
            out_of_order: 0,
            pong_waits: false,
        }
    }

    /// One turn; whether there was anything to do.
    pub(super) fn step<D: Device>(&mut self, now: Time, device: &mut D, pool: &mut Pool) -> bool {
        self.act(now, device, pool).unwrap_or_else(|error| {
            self.failure = Some(in_words(&error));
            false
        })
    }

    fn act<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, MeshError> {
        let test = self.ends.test;
        let mut worked = false;
        if test.has_receives() {
            worked |= self.take_messages(now, device, pool)?;
        }
        if !test.has_pong() {
            return Ok(worked);
        }
        if test.operation == Operation::Write && self.sees_ping(pool) {
            self.flows[0].next += 1;
            self.flows[0].latest[0] = Some(self.flows[0].next - 1);
            self.received += 1;
            self.pong_waits = true;
        }
        worked |= self.take_sends(device)?;
        // The buffer of an answer is in use until it has completed.
        if self.pong_waits && self.ends.mesh.links()[0].under_way() == 0 {
            self.pong(now, device, pool)?;
            worked = true;
        }
        Ok(worked)
    }

    /// A WRITE is seen by its last bytes. Where one can be lost, the client goes on with the next.
    fn sees_ping(&mut self, pool: &Pool) -> bool {
        let flow = &mut self.flows[0];
        if self.ends.has_stamp(pool, 0, 0, flow.next) {
            return true;
        }
        let skipped =
            self.ends.test.service != Service::Rc && self.ends.has_stamp(pool, 0, 0, flow.next + 1);
        if skipped {
            (flow.next, self.lost) = (flow.next + 1, self.lost + 1);
        }
        skipped
    }

    fn take_messages<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &Pool,
    ) -> Result<bool, MeshError> {
        let mut worked = false;
        loop {
            let done: Completions = self.ends.mesh.poll_messages(device)?;
            worked |= !done.is_empty();
            for completion in &done {
                let place = self.take_message(completion, pool)?;
                self.ends.mesh.post_receive(device, now, place)?;
            }
            if done.len() < BATCH {
                return Ok(worked);
            }
        }
    }

    fn take_message(&mut self, done: &Completion, pool: &Pool) -> Result<Place, MeshError> {
        let place = self.ends.mesh.take_message(done)?;
        let Place { link: qp, slot } = place;
        let flow = &mut self.flows[qp];
        let stamped = match self.ends.test.has_immediate() {
            true => done.imm.map(|imm| widened(imm, flow.next)),
            false => self.ends.stamped(pool, qp, slot),
        };
        // Short messages have no room for a number: they count as the next.
        let number = stamped.unwrap_or(flow.next);
        match flow.take(number) {
            Some(lost) => self.lost = self.lost.saturating_add(lost),
            None => self.out_of_order += 1,
        }
        self.received += 1;
        let slot = if self.ends.test.has_immediate() { self.ends.slot(number) } else { slot };
        if let Some(latest) = flow.latest.get_mut(slot as usize) {
            *latest = Some(number);
        }
        self.pong_waits = self.ends.test.mode == Mode::Latency;
        Ok(place)
    }

    fn take_sends<D: Device>(&mut self, device: &mut D) -> Result<bool, MeshError> {
        let done = self.ends.mesh.poll_sends(device)?;
        for completion in &done {
            self.ends.mesh.take_send(completion)?;
        }
        Ok(!done.is_empty())
    }

    /// Answers the latest message with its own number.
    fn pong<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<(), MeshError> {
        let (ends, latest) = (&self.ends, self.flows[0].next.saturating_sub(1));
        ends.stamp(pool, 0, latest);
        let (base, rkey) = ends.remote;
        let op = match ends.test.operation {
            Operation::Write => SendOp::Write { remote_addr: ends.buffer(base, 0, 0, true), rkey },
            _ => SendOp::Send,
        };
        let place = Place { link: 0, slot: 0 };
        let request = ends.mesh.request(place, op, ends.sges(0, 0, false));
        let wr = SendWr { to: ends.datagrams.first().copied(), ..request };
        self.pong_waits = false;
        self.ends.mesh.post(device, now, 0, &[wr])
    }

    /// Compares everything that this side has received. `sent` is what the client says it sent on
    /// each queue pair.
    pub(super) fn verify(&self, pool: &Pool, sent: &[u64]) -> Verdict {
        let mut verdict = Verdict { out_of_order: self.out_of_order, ..Verdict::default() };
        let (ends, test) = (&self.ends, self.ends.test);
        for (qp, flow) in self.flows.iter().enumerate() {
            let sent = sent.get(qp).copied().unwrap_or(0);
            if test.operation == Operation::Atomic {
                let word = pool.bytes(ends.buffer(ends.mesh.region.addr, qp, 0, true), 8);
                verdict.verified_bytes += 8;
                verdict.wrong_buffers += u64::from(word != sent.to_ne_bytes());
                continue;
            }
            for slot in 0..test.slots() {
                let latest = match (test.operation, test.has_receives()) {
                    (Operation::Read, _) => None,
                    (_, true) => flow.latest[slot as usize],
                    // Memory that is only written holds the last message that was sent there.
                    _ if test.service == Service::Rc => ends.last_in(sent, slot),
                    _ => flow.latest[slot as usize],
                };
                // Of a WRITE that was lost in part nothing is known, and short messages have no
                // number.
                let is_reliable = test.service == Service::Rc;
                let is_known =
                    is_reliable || (!test.has_immediate() || self.lost == 0) && test.bytes >= 8;
                if let Some(number) = latest.filter(|_| is_known) {
                    ends.verify(pool, qp, slot, Some(number), &mut verdict);
                }
            }
        }
        verdict
    }
}

/// The number near `next` whose last 32 bits these are.
fn widened(low: u32, next: u64) -> u64 {
    next.wrapping_add(i64::from(low.wrapping_sub(next as u32) as i32) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_numbers_are_widened_around_the_expected_one() {
        for next in [0_u64, 5, 0xffff_fff0, 0x1_0000_0003, 0x5_8000_0000] {
            for number in [next, next + 7, next.saturating_sub(3)] {
                assert_eq!(widened(number as u32, next), number, "{next} {number}");
            }
        }
    }

    #[test]
    fn no_number_of_a_stranger_overflows() {
        let mut flow = Flow::default();
        assert_eq!((flow.take(0), flow.take(3), flow.take(1)), (Some(0), Some(2), None));
        assert_eq!((flow.take(u64::MAX), flow.take(0)), (Some(u64::MAX - 4), None));
        assert_eq!(flow.take(u64::MAX), Some(0));
    }
}
