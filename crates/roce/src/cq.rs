//! Completion queues: bounded, in order, never overwritten.
//!
//! A completion that finds its queue full is lost to the program, and one that is lost breaks the
//! promise that every work request completes (C2). So the queue is marked *overrun*, takes no more,
//! and every queue pair that needs it goes to the error state (IBA 10.10.4). What was in the queue
//! can still be polled.

use alloc::collections::VecDeque;

use crate::rng::SplitMix64;
use crate::slab::{Layout, Slab};
use crate::verbs::{Completion, CqId, VerbsError};

#[derive(Debug)]
struct Cq {
    entries: VecDeque<Completion>,
    depth: u32,
    overrun: bool,
    users: u32,
}

/// All completion queues of an endpoint.
#[derive(Debug)]
pub(crate) struct CqTable {
    slab: Slab<Cq>,
}

impl CqTable {
    pub(crate) fn new(limit: u32, rng: &mut SplitMix64) -> CqTable {
        CqTable { slab: Slab::new(Layout::new(limit, u32::BITS), rng.next_u32()) }
    }

    pub(crate) fn create(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        let entries = VecDeque::with_capacity(depth as usize);
        let limit = self.slab.layout().limit;
        self.slab
            .insert_with(|_, _| Cq { entries, depth, overrun: false, users: 0 })
            .map(CqId)
            .ok_or(VerbsError::TableFull { what: "completion queues", limit })
    }

    pub(crate) fn destroy(&mut self, cq: CqId) -> Result<(), VerbsError> {
        match self.slab.get(cq.0) {
            None => Err(VerbsError::NoCq(cq.0)),
            Some(queue) if queue.users > 0 => Err(VerbsError::CqInUse(cq.0)),
            Some(_) => {
                self.slab.remove(cq.0);
                Ok(())
            }
        }
    }

    pub(crate) fn exists(&self, cq: CqId) -> Result<(), VerbsError> {
        self.slab.find(cq.0).map(|_| ()).ok_or(VerbsError::NoCq(cq.0))
    }

    pub(crate) fn attach(&mut self, cq: CqId) {
        if let Some(queue) = self.slab.get_mut(cq.0) {
            queue.users += 1;
        }
    }

    pub(crate) fn detach(&mut self, cq: CqId) {
        if let Some(queue) = self.slab.get_mut(cq.0) {
            queue.users = queue.users.saturating_sub(1);
        }
    }

    /// Adds a completion; false when the queue is, or just became, overrun.
    #[must_use]
    pub(crate) fn push(&mut self, cq: CqId, completion: Completion) -> bool {
        let Some(queue) = self.slab.get_mut(cq.0) else {
            return false;
        };
        queue.overrun |= queue.entries.len() >= queue.depth as usize;
        if !queue.overrun {
            queue.entries.push_back(completion);
        }
        !queue.overrun
    }

    pub(crate) fn poll(&mut self, cq: CqId) -> Option<Completion> {
        self.slab.get_mut(cq.0)?.entries.pop_front()
    }

    pub(crate) fn overrun(&self, cq: CqId) -> Option<bool> {
        self.slab.get(cq.0).map(|queue| queue.overrun)
    }
}
