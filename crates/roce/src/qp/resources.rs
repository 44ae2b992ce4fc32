//! Responder resources: the READs and atomics with responses to send, and the latest ones executed,
//! in case they are requested again (IBA 9.7.5.2, responder side).
//!
//! Responses are sent in PSN order, so jobs are in PSN order. A READ is executed while its
//! responses are sent, and again for a duplicate request. An atomic is executed once, when it
//! arrives; a duplicate gets the original value of that time.
//!
//! As many requests are kept as the peer may have READs and atomics outstanding, so every one that
//! it can still be waiting for is among them, even if its response was sent and lost. An older one
//! that arrives again is a stray of the network, and one that differs from what was executed is
//! forged: both are dropped, and above all not executed.

use alloc::collections::VecDeque;

use super::context::QpContext;
use crate::io::AtomicOp;
use crate::memory::region::Range;
use crate::wire::{Psn, Reth};

/// A response to send.
#[derive(Debug)]
pub(super) struct Job {
    /// PSN of the next response.
    pub(super) psn: Psn,
    /// PSN after the last response.
    pub(super) end: Psn,
    pub(super) msn: u32,
    /// A duplicate request. Gives way to new jobs.
    pub(super) is_retransmission: bool,
    pub(super) work: Work,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Read(ReadWork),
    /// The word's original value, once it is known.
    Atomic(Option<u64>),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ReadWork {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    /// Bytes still to be sent.
    pub(super) left: u32,
    /// No response has been sent since it was (last) requested.
    pub(super) fresh: bool,
}

/// The peer's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerRequest {
    Read(Range),
    Atomic(Range, AtomicOp),
}

/// A READ or an atomic that was executed, or is about to be.
#[derive(Clone, Copy, Debug)]
struct Performed {
    psn: Psn,
    /// The number of its PSNs.
    psns: u32,
    request: PeerRequest,
    /// The word's original value, once it is known.
    original: Option<u64>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Resources {
    jobs: VecDeque<Job>,
    performed: VecDeque<Performed>,
}

impl Job {
    pub(super) fn read(psn: Psn, reth: &Reth, qpc: &QpContext, msn: u32) -> Job {
        let Reth { addr, rkey, len } = *reth;
        let work = Work::Read(ReadWork { addr, rkey, left: len, fresh: true });
        Job { psn, end: psn.plus(qpc.packets(len)), msn, is_retransmission: false, work }
    }

    fn atomic(psn: Psn, msn: u32) -> Job {
        Job { psn, end: psn.next(), msn, is_retransmission: false, work: Work::Atomic(None) }
    }
}

impl ReadWork {
    pub(super) fn remaining(&self) -> Range {
        Range { key: self.rkey, addr: self.addr, len: self.left }
    }
}

impl Resources {
    /// Starts with room for `limit` jobs. Nothing is allocated after that, unless the limit is
    /// raised while the queue pair runs.
    pub(super) fn reset(&mut self, limit: usize) {
        self.jobs.clear();
        self.performed.clear();
        self.jobs.reserve_exact(limit);
        self.performed.reserve_exact(limit);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Whether a READ has responses to send.
    pub(super) fn owes_read(&self) -> bool {
        self.jobs.iter().any(|job| matches!(job.work, Work::Read(_)))
    }

    /// Responses still to be sent.
    pub(super) fn owed_packets(&self) -> u32 {
        let packets = |job: &Job| job.end.distance_from(job.psn).unsigned_abs();
        self.jobs.iter().map(packets).fold(0, u32::saturating_add)
    }

    /// The next response.
    pub(super) fn front(&self) -> Option<&Job> {
        self.jobs.front()
    }

    /// `len` more bytes of the READ at the front were sent, in one packet.
    pub(super) fn advance_read(&mut self, len: u32) {
        if let Some(Job { psn, work: Work::Read(read), .. }) = self.jobs.front_mut() {
            *psn = psn.next();
            read.addr = read.addr.wrapping_add(u64::from(len));
            read.left -= len;
            read.fresh = false;
        }
    }

    pub(super) fn pop_front(&mut self) {
        self.jobs.pop_front();
    }

    /// Drops all pending responses.
    pub(super) fn clear_jobs(&mut self) {
        self.jobs.clear();
    }

    /// Makes room for a new job among at most `limit`, besides `others` kept elsewhere. A peer that
    /// respects the limit has as many outstanding requests as there are slots only if all others
    /// are retransmissions, so those are dropped first.
    pub(super) fn make_room(&mut self, others: usize, limit: usize) -> bool {
        if self.jobs.len() + others >= limit
            && let Some(index) = self.jobs.iter().position(|job| job.is_retransmission)
        {
            self.jobs.remove(index);
        }
        self.jobs.len() + others < limit
    }

    /// Adds a new READ, for which room was made.
    pub(super) fn begin_read(&mut self, job: Job) {
        self.jobs.push_back(job);
    }

    /// Adds a new atomic, for which room was made. Its result follows.
    pub(super) fn begin_atomic(&mut self, psn: Psn, msn: u32) {
        self.jobs.push_back(Job::atomic(psn, msn));
    }

    /// Keeps a request of `psns` PSNs that is being executed, in case it is requested again; the
    /// latest `limit` are kept.
    pub(super) fn keep(&mut self, psn: Psn, psns: u32, request: PeerRequest, limit: usize) {
        while self.performed.len() >= limit.max(1) {
            self.performed.pop_front();
        }
        self.performed.push_back(Performed { psn, psns, request, original: None });
    }

    /// The kept request that contains `psn`, and its first PSN.
    pub(super) fn kept(&self, psn: Psn) -> Option<(Psn, PeerRequest)> {
        let is_its = |one: &&Performed| psn.minus(one.psn.get()).get() < one.psns;
        self.performed.iter().rev().find(is_its).map(|one| (one.psn, one.request))
    }

    /// The result of the atomic with this PSN.
    pub(super) fn complete_atomic(&mut self, psn: Psn, original: u64) {
        let waits =
            |performed: &&mut Performed| performed.psn == psn && performed.original.is_none();
        if let Some(performed) = self.performed.iter_mut().rev().find(waits) {
            performed.original = Some(original);
        }
        for job in self.jobs.iter_mut().filter(|job| job.psn == psn) {
            if let Work::Atomic(value @ None) = &mut job.work {
                *value = Some(original);
            }
        }
    }

    /// Sends a response again, from the job's PSN on. Without room nothing happens: the peer's
    /// timer will request it again.
    pub(super) fn retransmit(&mut self, job: Job, limit: usize) {
        let Job { psn, end, .. } = job;
        let at = self.jobs.iter().position(|job| psn.is_before(job.end)).unwrap_or(self.jobs.len());
        if let Some(running) = self.jobs.get_mut(at).filter(|running| running.end == end) {
            if let (Work::Read(_), Work::Read(_)) = (job.work, running.work) {
                *running =
                    Job { msn: running.msn, is_retransmission: running.is_retransmission, ..job };
            }
        } else if self.jobs.len() < limit {
            self.jobs.insert(at, Job { is_retransmission: true, ..job });
        }
    }

    /// The response of the atomic with this PSN, if it is still kept.
    pub(super) fn performed(&self, psn: Psn, msn: u32) -> Option<Job> {
        let performed = self.performed.iter().rev().find(|performed| performed.psn == psn)?;
        Some(Job { work: Work::Atomic(performed.original), ..Job::atomic(psn, msn) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: PeerRequest =
        PeerRequest::Atomic(Range { key: 1, addr: 8, len: 8 }, AtomicOp::FetchAdd(1));

    #[test]
    fn a_request_is_found_by_each_of_its_psns() {
        let mut resources = Resources::default();
        let read = PeerRequest::Read(Range { key: 1, addr: 8, len: 700 });
        let first = Psn::new(0xff_ffff);
        resources.keep(first, 3, read, 2);
        resources.keep(first.plus(3), 1, ADD, 2);
        for (ahead, wanted) in [(0, read), (1, read), (2, read), (3, ADD)] {
            let psn = if wanted == ADD { first.plus(3) } else { first };
            assert_eq!(resources.kept(first.plus(ahead)), Some((psn, wanted)));
        }
        assert_eq!(resources.kept(first.minus(1)), None);
        assert_eq!(resources.kept(first.plus(4)), None);
    }

    #[test]
    fn the_latest_results_are_kept_and_no_others() {
        let mut resources = Resources::default();
        for n in 0..10 {
            assert!(resources.make_room(0, 3));
            resources.keep(Psn::new(n), 1, ADD, 3);
            resources.begin_atomic(Psn::new(n), n);
            resources.complete_atomic(Psn::new(n), 100 + u64::from(n));
            resources.pop_front();
        }
        for n in 0..10 {
            let again = resources.performed(Psn::new(n), 0).map(|job| job.work);
            let kept = match again {
                Some(Work::Atomic(value)) => value,
                _ => None,
            };
            assert_eq!(kept, (n >= 7).then_some(100 + u64::from(n)));
        }
    }

    #[test]
    fn a_retransmission_of_what_is_still_owed_adds_nothing() {
        let mut resources = Resources::default();
        resources.keep(Psn::new(5), 1, ADD, 2);
        resources.begin_atomic(Psn::new(5), 1);
        resources.complete_atomic(Psn::new(5), 42);
        for _ in 0..4 {
            let again = resources.performed(Psn::new(5), 1).unwrap();
            resources.retransmit(again, 2);
        }
        assert_eq!(resources.jobs.len(), 1);
        assert!(!resources.jobs[0].is_retransmission);
    }
}
