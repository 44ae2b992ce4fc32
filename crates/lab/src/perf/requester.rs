//! What the client does in a turn: posts, takes completions, measures.

use comm::mesh::{BATCH, MeshError, Place};
use nic::clock;
use nic::pool::Pool;
use roce::device::Device;
use roce::verbs::{Completion, SendOp, SendWr};
use roce::world::Staging;
use roce::{Duration, Time};

use super::ends::{Ends, in_words};
use super::histogram::Histogram;
use super::messages::Verdict;
use super::test::{Mode, Operation, Service};

/// A ping whose pong does not come is lost after this time, where messages can be lost.
const PONG_LIMIT: Duration = Duration::from_millis(500);

/// The client's side of a test.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) ends: Ends,
    /// Messages completed; in latency tests round trips.
    pub(super) completed: u64,
    /// Messages without an answer.
    pub(super) lost: u64,
    pub(super) latencies: Histogram,
    pub(super) is_measuring: bool,
    /// Post nothing more.
    pub(super) is_ending: bool,
    /// Why the test cannot go on.
    pub(super) failure: Option<String>,
    /// When the message under way was posted, in latency tests.
    pinged: Option<Time>,
    verdict: Verdict,
    batch: Vec<SendWr>,
}

impl Requester {
    pub(super) fn new(ends: Ends) -> Requester {
        Requester {
            ends,
            completed: 0,
            lost: 0,
            latencies: Histogram::new(),
            is_measuring: false,
            is_ending: false,
            failure: None,
            pinged: None,
            verdict: Verdict::default(),
            batch: Vec::with_capacity(BATCH),
        }
    }

    /// Whether nothing is under way.
    pub(super) fn is_drained(&self) -> bool {
        self.pinged.is_none() && self.ends.mesh.links().iter().all(|link| link.under_way() == 0)
    }

    /// Messages posted on each queue pair.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.ends.mesh.links().iter().map(|link| link.posted).collect()
    }

    /// One turn; whether there was anything to do.
    pub(super) fn step<D: Device>(&mut self, now: Time, device: &mut D, pool: &mut Pool) -> bool {
        let worked = match self.ends.test.mode {
            Mode::Bandwidth => self.stream(now, device, pool),
            Mode::Latency => self.ping(now, device, pool),
        };
        worked.unwrap_or_else(|error| {
            self.failure = Some(in_words(&error));
            false
        })
    }

    fn stream<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, MeshError> {
        let mut worked = self.take_sends(device, pool)?;
        if self.is_ending {
            return Ok(worked);
        }
        for qp in 0..self.ends.mesh.links().len() {
            let link = &self.ends.mesh.links()[qp];
            let room = u64::from(link.wanted.outbox.slots) - link.under_way();
            let count = room.min(BATCH as u64);
            if count > 0 {
                self.post(now, device, pool, qp, count)?;
                worked = true;
            }
        }
        Ok(worked)
    }

    fn post<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
        qp: usize,
        count: u64,
    ) -> Result<(), MeshError> {
        let first = self.ends.mesh.links()[qp].posted;
        self.batch.clear();
        for number in first..first + count {
            let wr = self.request(pool, qp, number);
            self.batch.push(wr);
        }
        self.ends.mesh.post(device, now, qp, &self.batch)
    }

    fn request(&self, pool: &mut Pool, qp: usize, number: u64) -> SendWr {
        let (ends, slot) = (&self.ends, self.ends.slot(number));
        let operation = ends.test.operation;
        let (base, rkey) = ends.remote;
        if matches!(operation, Operation::Send | Operation::Write) {
            ends.stamp(pool, qp, number);
        }
        let remote_addr = |is_in| ends.buffer(base, qp, slot, is_in);
        let op = match operation {
            Operation::Send => SendOp::Send,
            Operation::Write if ends.test.has_immediate() => {
                SendOp::WriteImm { remote_addr: remote_addr(true), rkey, imm: number as u32 }
            }
            Operation::Write => SendOp::Write { remote_addr: remote_addr(true), rkey },
            Operation::Read => SendOp::Read { remote_addr: remote_addr(false), rkey },
            Operation::Atomic => {
                SendOp::FetchAdd { remote_addr: ends.buffer(base, qp, 0, true), rkey, add: 1 }
            }
        };
        let is_fetched = matches!(operation, Operation::Read | Operation::Atomic);
        let place = Place { link: qp, slot };
        SendWr {
            to: ends.datagrams.get(qp).copied(),
            ..ends.mesh.request(place, op, ends.sges(qp, slot, is_fetched))
        }
    }

    /// Takes completions of what was posted.
    fn take_sends<D: Device>(&mut self, device: &mut D, pool: &Pool) -> Result<bool, MeshError> {
        let mut worked = false;
        loop {
            let done = self.ends.mesh.poll_sends(device)?;
            worked |= !done.is_empty();
            for completion in &done {
                self.finish(completion, pool)?;
            }
            if done.len() < BATCH {
                return Ok(worked);
            }
        }
    }

    fn finish(&mut self, done: &Completion, pool: &Pool) -> Result<(), MeshError> {
        let Place { link: qp, slot } = self.ends.mesh.take_send(done)?;
        let ends = &self.ends;
        if ends.test.operation == Operation::Atomic {
            // The word counts the operations on its queue pair.
            let value = pool.bytes(ends.buffer(ends.mesh.region.addr, qp, slot, true), 8);
            let expected = (ends.mesh.links()[qp].completed - 1).to_ne_bytes();
            self.verdict.verified_bytes += 8;
            self.verdict.out_of_order += u64::from(value != expected);
        }
        if ends.test.mode == Mode::Bandwidth {
            self.completed += 1;
        }
        Ok(())
    }

    /// One message, then its answer: a completion, a SEND, or a WRITE that memory shows.
    fn ping<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, MeshError> {
        let mut worked = self.take_sends(device, pool)?;
        let answered = match self.ends.test.operation {
            Operation::Read | Operation::Atomic => self.ends.mesh.links()[0].under_way() == 0,
            Operation::Send => self.take_pong(now, device, pool)?,
            Operation::Write => self.sees_pong(pool),
        };
        if let Some(pinged) = self.pinged {
            if answered {
                let took = clock::now().since(pinged).as_nanos();
                let one_way = self.ends.test.has_pong();
                self.pinged = None;
                self.completed += 1;
                if self.is_measuring {
                    self.latencies.add(if one_way { took / 2 } else { took });
                }
                worked = true;
            } else if self.ends.test.service != Service::Rc && now.since(pinged) > PONG_LIMIT {
                self.pinged = None;
                self.lost += 1;
            }
        }
        // A buffer is used again when its message has completed.
        let is_free = self.ends.mesh.links()[0].under_way() == 0;
        if self.pinged.is_none() && is_free && !self.is_ending {
            self.pinged = Some(clock::now());
            self.post(now, device, pool, 0, 1)?;
            worked = true;
        }
        Ok(worked)
    }

    /// Whether the server's SEND for the latest message has arrived; its receive is posted again.
    fn take_pong<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &Pool,
    ) -> Result<bool, MeshError> {
        let mesh = &mut self.ends.mesh;
        let Some(completion) = mesh.poll_messages::<1, D>(device)?.pop() else { return Ok(false) };
        let place = mesh.take_message(&completion)?;
        let is_latest = self.sees_pong(pool);
        self.ends.mesh.post_receive(device, now, place)?;
        Ok(is_latest)
    }

    fn sees_pong(&self, pool: &Pool) -> bool {
        let latest = self.ends.mesh.links()[0].posted.checked_sub(1);
        latest.is_some_and(|latest| self.ends.has_stamp(pool, 0, 0, latest))
    }

    /// Compares what this side has received.
    pub(super) fn verify(&self, pool: &Pool) -> Verdict {
        let mut verdict = self.verdict;
        if self.ends.test.operation == Operation::Read {
            for (qp, link) in self.ends.mesh.links().iter().enumerate() {
                for slot in 0..self.ends.test.slots() {
                    if self.ends.last_in(link.completed, slot).is_some() {
                        self.ends.verify(pool, qp, slot, None, &mut verdict);
                    }
                }
            }
        }
        verdict
    }
}
