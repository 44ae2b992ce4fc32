//! What the client does in a turn: posts, takes completions, measures.

use arrayvec::ArrayVec;
use nic::clock;
use nic::pool::Pool;
use roce::device::Device;
use roce::verbs::{Completion, RecvWr, SendOp, SendWr, WcStatus};
use roce::world::Staging;
use roce::{Duration, Time};

use super::ends::Ends;
use super::histogram::Histogram;
use super::messages::Verdict;
use super::test::{Mode, Operation, Service};

/// Completions taken at once, and work requests posted at once.
const BATCH: usize = 16;

/// A ping whose pong does not come is lost after this time, where messages can be lost.
const PONG_LIMIT: Duration = Duration::from_millis(500);

/// One queue pair.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    posted: u64,
    completed: u64,
}

/// The client's side of a test.
#[derive(Debug)]
pub(super) struct Requester {
    pub(super) ends: Ends,
    flows: Vec<Flow>,
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
            flows: vec![Flow::default(); ends.qps.len()],
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
        self.pinged.is_none() && self.flows.iter().all(|flow| flow.posted == flow.completed)
    }

    /// Messages posted on each queue pair.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.flows.iter().map(|flow| flow.posted).collect()
    }

    /// One turn; whether there was anything to do.
    pub(super) fn step<D: Device>(&mut self, now: Time, device: &mut D, pool: &mut Pool) -> bool {
        let worked = match self.ends.test.mode {
            Mode::Bandwidth => self.stream(now, device, pool),
            Mode::Latency => self.ping(now, device, pool),
        };
        worked.unwrap_or_else(|why| {
            self.failure = Some(why);
            false
        })
    }

    fn stream<D: Device>(
        &mut self,
        now: Time,
        device: &mut D,
        pool: &mut Pool,
    ) -> Result<bool, String> {
        let mut worked = self.take_sends(device, pool)?;
        if self.is_ending {
            return Ok(worked);
        }
        for qp in 0..self.flows.len() {
            let flow = self.flows[qp];
            let room = u64::from(self.ends.test.slots()) - (flow.posted - flow.completed);
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
    ) -> Result<(), String> {
        let first = self.flows[qp].posted;
        self.batch.clear();
        for number in first..first + count {
            let wr = self.request(pool, qp, number);
            self.batch.push(wr);
        }
        device.post_send(now, self.ends.qps[qp], &self.batch).map_err(|error| error.to_string())?;
        self.flows[qp].posted += count;
        Ok(())
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
        SendWr {
            wr_id: (qp as u64) << 32 | u64::from(slot),
            op,
            sges: ends.sges(qp, slot, is_fetched),
            signaled: true,
            to: ends.datagrams.get(qp).copied(),
            ..SendWr::default()
        }
    }

    /// Takes completions of what was posted.
    fn take_sends<D: Device>(&mut self, device: &mut D, pool: &Pool) -> Result<bool, String> {
        let mut worked = false;
        loop {
            let mut done = ArrayVec::<Completion, BATCH>::new();
            device.poll_cq(self.ends.send_cq, &mut done).map_err(|error| error.to_string())?;
            worked |= !done.is_empty();
            for completion in &done {
                self.finish(completion, pool)?;
            }
            if done.len() < BATCH {
                return Ok(worked);
            }
        }
    }

    fn finish(&mut self, done: &Completion, pool: &Pool) -> Result<(), String> {
        check(done)?;
        let (qp, slot) = ((done.wr_id >> 32) as usize, done.wr_id as u32);
        let ends = &self.ends;
        let Some(flow) = self.flows.get_mut(qp) else { return Ok(()) };
        if ends.test.operation == Operation::Atomic {
            // The word counts the operations on its queue pair.
            let value = pool.bytes(ends.buffer(ends.region.addr, qp, slot, true), 8);
            let expected = flow.completed.to_ne_bytes();
            self.verdict.verified_bytes += 8;
            self.verdict.out_of_order += u64::from(value != expected);
        }
        flow.completed += 1;
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
    ) -> Result<bool, String> {
        let mut worked = self.take_sends(device, pool)?;
        let answered = match self.ends.test.operation {
            Operation::Read | Operation::Atomic => self.flows[0].posted == self.flows[0].completed,
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
        let is_free = self.flows[0].posted == self.flows[0].completed;
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
    ) -> Result<bool, String> {
        let mut done = ArrayVec::<Completion, 1>::new();
        device.poll_cq(self.ends.recv_cq, &mut done).map_err(|error| error.to_string())?;
        let Some(completion) = done.pop() else { return Ok(false) };
        check(&completion)?;
        let is_latest = self.sees_pong(pool);
        let wr: RecvWr = self.ends.receive(0, 0);
        device.post_recv(now, self.ends.qps[0], &[wr]).map_err(|error| error.to_string())?;
        Ok(is_latest)
    }

    fn sees_pong(&self, pool: &Pool) -> bool {
        let latest = self.flows[0].posted.checked_sub(1);
        latest.is_some_and(|latest| self.ends.has_stamp(pool, 0, 0, latest))
    }

    /// Compares what this side has received.
    pub(super) fn verify(&self, pool: &Pool) -> Verdict {
        let mut verdict = self.verdict;
        if self.ends.test.operation == Operation::Read {
            for (qp, flow) in self.flows.iter().enumerate() {
                for slot in 0..self.ends.test.slots() {
                    if self.ends.last_in(flow.completed, slot).is_some() {
                        self.ends.verify(pool, qp, slot, None, &mut verdict);
                    }
                }
            }
        }
        verdict
    }
}

/// The error of a completion, in words.
pub(super) fn check(done: &Completion) -> Result<(), String> {
    match done.status {
        WcStatus::Success => Ok(()),
        WcStatus::RetryExceeded => {
            Err("the other side does not acknowledge (retries exceeded); if small messages pass, the path drops large packets: --mtu 1024".into())
        }
        status => Err(format!("a work request ended with {status:?}")),
    }
}
