//! What the server does in a turn: takes messages, answers pings, counts.

use arrayvec::ArrayVec;
use nic::pool::Pool;
use roce::Time;
use roce::device::Device;
use roce::verbs::{Completion, SendOp, SendWr};
use roce::world::Staging;

use super::ends::Ends;
use super::messages::Verdict;
use super::requester::check;
use super::test::{Mode, Operation, Service};

/// Completions taken at once.
const BATCH: usize = 16;

/// One queue pair.
#[derive(Clone, Debug, Default)]
struct Flow {
    /// The number that the next message has if none was lost.
    next: u64,
    /// Messages that arrived in receives, or pings that were seen.
    arrived: u64,
    /// The latest message in each buffer.
    latest: Vec<Option<u64>>,
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
    /// Answers that have not completed; their buffer is in use.
    pongs_under_way: u32,
    pong_waits: bool,
}

impl Responder {
    pub(super) fn new(ends: Ends) -> Responder {
        let flow = Flow { latest: vec![None; ends.test.slots() as usize], ..Flow::default() };
        Responder {
            flows: vec![flow; ends.qps.len()],
            ends,
            received: 0,
            lost: 0,
            failure: None,
            out_of_order: 0,
            pongs_under_way: 0,
            pong_waits: false,
        }
    }

    /// One turn; whether there was anything to do.
    pub(super) fn step<D: Device>(&mut self, now: Time, device: &mut D, pool: &mut Pool) -> bool {
        self.act(now, device, pool).unwrap_or_else(|why| {
            self.failure = Some(why);
            false
        })
    }

    fn act<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, String> {
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
            self.flows[0].arrived += 1;
            self.flows[0].latest[0] = Some(self.flows[0].next - 1);
            self.received += 1;
            self.pong_waits = true;
        }
        worked |= self.take_sends(device)?;
        if self.pong_waits && self.pongs_under_way == 0 {
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
    ) -> Result<bool, String> {
        let mut worked = false;
        loop {
            let mut done = ArrayVec::<Completion, BATCH>::new();
            device.poll_cq(self.ends.recv_cq, &mut done).map_err(|error| error.to_string())?;
            worked |= !done.is_empty();
            for completion in &done {
                self.take_message(completion, pool)?;
                let (qp, slot) = place(completion);
                if let Some(&qpn) = self.ends.qps.get(qp) {
                    let wr = self.ends.receive(qp, slot);
                    device.post_recv(now, qpn, &[wr]).map_err(|error| error.to_string())?;
                }
            }
            if done.len() < BATCH {
                return Ok(worked);
            }
        }
    }

    fn take_message(&mut self, done: &Completion, pool: &Pool) -> Result<(), String> {
        check(done)?;
        let (qp, slot) = place(done);
        let Some(flow) = self.flows.get_mut(qp) else { return Ok(()) };
        let stamped = match self.ends.test.has_immediate() {
            true => done.imm.map(|imm| widened(imm, flow.next)),
            false => self.ends.stamped(pool, qp, slot),
        };
        // Short messages have no room for a number: they count as the next.
        let number = stamped.unwrap_or(flow.next);
        if number < flow.next {
            self.out_of_order += 1;
        } else {
            self.lost += number - flow.next;
            flow.next = number + 1;
        }
        flow.arrived += 1;
        self.received += 1;
        let slot = if self.ends.test.has_immediate() { self.ends.slot(number) } else { slot };
        if let Some(latest) = flow.latest.get_mut(slot as usize) {
            *latest = Some(number);
        }
        self.pong_waits = self.ends.test.mode == Mode::Latency;
        Ok(())
    }

    fn take_sends<D: Device>(&mut self, device: &mut D) -> Result<bool, String> {
        let mut done = ArrayVec::<Completion, BATCH>::new();
        device.poll_cq(self.ends.send_cq, &mut done).map_err(|error| error.to_string())?;
        for completion in &done {
            check(completion)?;
            self.pongs_under_way -= self.pongs_under_way.min(1);
        }
        Ok(!done.is_empty())
    }

    /// Answers the latest message with its own number.
    fn pong<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<(), String> {
        let (ends, latest) = (&self.ends, self.flows[0].next.saturating_sub(1));
        ends.stamp(pool, 0, latest);
        let (base, rkey) = ends.remote;
        let op = match ends.test.operation {
            Operation::Write => SendOp::Write { remote_addr: ends.buffer(base, 0, 0, true), rkey },
            _ => SendOp::Send,
        };
        let wr = SendWr {
            op,
            sges: ends.sges(0, 0, false),
            signaled: true,
            to: ends.datagrams.first().copied(),
            ..SendWr::default()
        };
        device.post_send(now, ends.qps[0], &[wr]).map_err(|error| error.to_string())?;
        (self.pong_waits, self.pongs_under_way) = (false, self.pongs_under_way + 1);
        Ok(())
    }

    /// Compares everything that this side has received. `sent` is what the client says it sent on
    /// each queue pair.
    pub(super) fn verify(&self, pool: &Pool, sent: &[u64]) -> Verdict {
        let mut verdict = Verdict { out_of_order: self.out_of_order, ..Verdict::default() };
        let (ends, test) = (&self.ends, self.ends.test);
        for (qp, flow) in self.flows.iter().enumerate() {
            let sent = sent.get(qp).copied().unwrap_or(0);
            if test.operation == Operation::Atomic {
                let word = pool.bytes(ends.buffer(ends.region.addr, qp, 0, true), 8);
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

/// Queue pair and buffer of a receive.
fn place(done: &Completion) -> (usize, u32) {
    ((done.wr_id >> 32) as usize, done.wr_id as u32)
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
}
