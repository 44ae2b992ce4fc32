//! Shared receive queues: receives used by several queue pairs (IBA 10.2.9).
//!
//! A receive belongs to the queue until a queue pair takes it for a message; from then on that
//! queue pair completes it, or returns it if it took it ahead of its turn and failed. If the queue
//! pair is reset or destroyed before the program has polled that completion, the receive returns to
//! the front of the queue (NICs only free its slot, and the program never learns what became of its
//! buffer). So the queue keeps what it has lent until then: at most as many receives as queue pairs
//! and completion queues hold. The limit is one-shot: an event is raised when fewer receives than
//! that are left, and the limit is 0 from then on.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::events::EventQueue;
use crate::memory::sg;
use crate::rng::Rng;
use crate::slab::{Layout, Slab};
use crate::verbs::{AsyncEvent, PdId, RecvWr, SrqConfig, SrqId, VerbsError};

/// Most shared receive queues of an endpoint.
const MAX_SRQS: u32 = 1 << 16;

/// A posted receive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) wr: RecvWr,
    /// Room for a message in bytes.
    pub(crate) len: u64,
    /// Where it is returned if its completion is discarded.
    pub(crate) srq_slot: Option<SrqSlot>,
}

/// A receive that a shared queue has lent to a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SrqSlot {
    srq: SrqId,
    slot: u32,
}

impl Receive {
    pub(crate) fn new(wr: RecvWr) -> Receive {
        let len = sg::total_bytes(&wr.sges);
        Receive { wr, len, srq_slot: None }
    }
}

#[derive(Debug)]
struct Srq {
    config: SrqConfig,
    /// Slots of the receives that are posted, oldest first.
    queue: VecDeque<u32>,
    /// Receives posted or lent.
    slots: Vec<RecvWr>,
    free: Vec<u32>,
    users: u32,
}

/// All shared receive queues of an endpoint.
#[derive(Debug)]
pub(crate) struct SrqTable {
    slab: Slab<Srq>,
}

impl SrqTable {
    pub(crate) fn new(rng: &mut Rng) -> SrqTable {
        SrqTable { slab: Slab::new(Layout::new(MAX_SRQS, u32::BITS), rng.next_u32()) }
    }

    pub(crate) fn create(&mut self, config: SrqConfig) -> Result<SrqId, VerbsError> {
        check_limit(&config, config.limit)?;
        let room = config.max_wr as usize;
        let (queue, free) = (VecDeque::with_capacity(room), Vec::with_capacity(room));
        let slots = Vec::with_capacity(room);
        self.slab
            .insert_with(|_, _| Srq { config, queue, slots, free, users: 0 })
            .map(SrqId)
            .ok_or(VerbsError::TableFull { what: "shared receive queues", limit: MAX_SRQS })
    }

    /// Removes a queue that no queue pair uses, and returns the domain that it belonged to.
    pub(crate) fn destroy(&mut self, srq: SrqId) -> Result<PdId, VerbsError> {
        match self.slab.get(srq.0) {
            Some(entry) if entry.users > 0 => Err(VerbsError::SrqInUse(srq.0)),
            _ => {
                self.slab.remove(srq.0).map(|entry| entry.config.pd).ok_or(VerbsError::NoSrq(srq.0))
            }
        }
    }

    /// Whether a queue pair of `pd` may use it.
    pub(crate) fn check(&self, srq: SrqId, pd: PdId) -> Result<(), VerbsError> {
        match self.slab.get(srq.0) {
            None => Err(VerbsError::NoSrq(srq.0)),
            Some(entry) if entry.config.pd != pd => Err(VerbsError::SrqPd(srq.0)),
            Some(_) => Ok(()),
        }
    }

    pub(crate) fn query(&self, srq: SrqId) -> Result<SrqConfig, VerbsError> {
        self.slab.get(srq.0).map(|entry| entry.config).ok_or(VerbsError::NoSrq(srq.0))
    }

    pub(crate) fn attach(&mut self, srq: SrqId) {
        if let Some(entry) = self.slab.get_mut(srq.0) {
            entry.users += 1;
        }
    }

    pub(crate) fn detach(&mut self, srq: SrqId) {
        if let Some(entry) = self.slab.get_mut(srq.0) {
            entry.users = entry.users.saturating_sub(1);
        }
    }

    pub(crate) fn post(&mut self, srq: SrqId, wr: RecvWr) -> Result<(), VerbsError> {
        let entry = self.slab.get_mut(srq.0).ok_or(VerbsError::NoSrq(srq.0))?;
        let limit = entry.config.max_wr;
        if entry.queue.len() >= limit as usize {
            return Err(VerbsError::TableFull { what: "shared receive work requests", limit });
        }
        let slot = match entry.free.pop() {
            Some(slot) => {
                entry.slots[slot as usize] = wr;
                slot
            }
            None => {
                entry.slots.push(wr);
                entry.slots.len() as u32 - 1
            }
        };
        entry.queue.push_back(slot);
        Ok(())
    }

    /// Arms the limit. If fewer receives are left already, the event is raised immediately: nothing
    /// else would report the fall.
    pub(crate) fn set_limit(
        &mut self,
        srq: SrqId,
        limit: u32,
        events: &mut EventQueue,
    ) -> Result<(), VerbsError> {
        let entry = self.slab.get_mut(srq.0).ok_or(VerbsError::NoSrq(srq.0))?;
        check_limit(&entry.config, limit)?;
        entry.config.limit = limit;
        entry.spring(srq, events);
        Ok(())
    }

    /// The oldest receive, lent until [`settle`](SrqTable::settle) or
    /// [`give_back`](SrqTable::give_back).
    pub(crate) fn take(&mut self, srq: SrqId, events: &mut EventQueue) -> Option<Receive> {
        let entry = self.slab.get_mut(srq.0)?;
        let slot = entry.queue.pop_front()?;
        entry.spring(srq, events);
        let wr = entry.slots[slot as usize].clone();
        Some(Receive { srq_slot: Some(SrqSlot { srq, slot }), ..Receive::new(wr) })
    }

    /// Receives not taken.
    pub(crate) fn left(&self, srq: SrqId) -> usize {
        self.slab.get(srq.0).map_or(0, |entry| entry.queue.len())
    }

    /// Frees the slot of a receive whose completion was polled or discarded.
    pub(crate) fn settle(&mut self, srq_slot: SrqSlot) {
        if let Some(entry) = self.slab.get_mut(srq_slot.srq.0) {
            entry.free.push(srq_slot.slot);
        }
    }

    /// Puts receives in front of all others, in the order given. Receives posted since they were
    /// taken stay: the queue may then exceed its limit, by as many as were lent.
    pub(crate) fn give_back(&mut self, srq_slots: impl DoubleEndedIterator<Item = SrqSlot>) {
        for srq_slot in srq_slots.rev() {
            if let Some(entry) = self.slab.get_mut(srq_slot.srq.0) {
                entry.queue.push_front(srq_slot.slot);
            }
        }
    }
}

impl Srq {
    fn spring(&mut self, srq: SrqId, events: &mut EventQueue) {
        if (self.queue.len() as u64) < u64::from(self.config.limit) {
            self.config.limit = 0;
            events.raise(AsyncEvent::SrqLimitReached(srq));
        }
    }
}

fn check_limit(config: &SrqConfig, limit: u32) -> Result<(), VerbsError> {
    let max_wr = config.max_wr;
    let too_high = VerbsError::TableFull { what: "shared receives below the limit", limit: max_wr };
    if limit <= max_wr { Ok(()) } else { Err(too_high) }
}
