//! Completion queues: bounded, in order, never overwritten.
//!
//! A completion that arrives at a full queue is lost, which breaks the promise that every work
//! request completes (C2). So the queue is marked *overrun*, takes no more, and every queue pair
//! that uses it goes to the error state (IBA 10.10.4). Its contents can still be polled.
//!
//! Completions of a queue pair that is reset or destroyed are purged, as NIC libraries do: the
//! program has freed what their `wr_id` refers to. Notifications that they generated remain.
//!
//! An *armed* queue generates one notification, for a completion of the requested kind, and is
//! disarmed by it. A completion that arrived while the queue was not armed generates one when the
//! queue is armed next, if it has not been polled by then: a program may poll, arm and sleep in any
//! order. Each completion generates at most one notification: programs that arm before they poll,
//! and take one completion for each event (perftest does), are not woken in vain. A notification
//! that has not been taken yet covers later ones too.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::rng::Rng;
use crate::seeded::{Bug, Seeded};
use crate::slab::{Layout, Slab};
use crate::srq::SrqSlot;
use crate::verbs::{Completion, CqId, Qpn, VerbsError, WcStatus};

/// The outcome of adding a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It waits to be polled.
    Added,
    /// It is lost because the queue was full, and the queue is overrun.
    Overran,
    /// It is lost: the queue was overrun before.
    Lost,
}

/// Which completion generates a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Armed {
    No,
    /// The next solicited completion, or one that is an error.
    Solicited,
    /// The next completion.
    Next,
}

#[derive(Debug)]
struct Entry {
    completion: Completion,
    /// The receive lent by a shared receive queue until the completion is polled.
    srq_slot: Option<SrqSlot>,
    /// A notification was generated for it.
    notified: bool,
}

impl Entry {
    fn answers(&self, armed: Armed) -> bool {
        match armed {
            Armed::No => false,
            Armed::Solicited => is_urgent(&self.completion),
            Armed::Next => true,
        }
    }
}

#[derive(Debug)]
struct Cq {
    entries: VecDeque<Entry>,
    depth: u32,
    overrun: bool,
    users: u32,
    /// Entries without a notification, and how many of these are solicited or errors.
    unnotified: u32,
    urgent_unnotified: u32,
    armed: Armed,
    /// In the queue of notifications.
    notified: bool,
}

impl Cq {
    fn new(depth: u32) -> Cq {
        let entries = VecDeque::with_capacity(depth as usize);
        Cq {
            entries,
            depth,
            overrun: false,
            users: 0,
            unnotified: 0,
            urgent_unnotified: 0,
            armed: Armed::No,
            notified: false,
        }
    }

    /// Whether the queue is armed for an entry that has no notification yet.
    fn is_due(&self) -> bool {
        match self.armed {
            Armed::No => false,
            Armed::Solicited => self.urgent_unnotified > 0,
            Armed::Next => self.unnotified > 0,
        }
    }

    /// Disarms the queue for the oldest such entry.
    fn disarm(&mut self) {
        let armed = core::mem::replace(&mut self.armed, Armed::No);
        if let Some(entry) =
            self.entries.iter_mut().find(|entry| !entry.notified && entry.answers(armed))
        {
            entry.notified = true;
            self.unnotified -= 1;
            self.urgent_unnotified -= u32::from(is_urgent(&entry.completion));
        }
    }

    fn forget(&mut self, entry: &Entry) {
        if !entry.notified {
            self.unnotified -= 1;
            self.urgent_unnotified -= u32::from(is_urgent(&entry.completion));
        }
    }
}

/// Whether a queue that is armed for solicited completions is notified of this one.
fn is_urgent(completion: &Completion) -> bool {
    completion.solicited || completion.status != WcStatus::Success
}

/// All completion queues of an endpoint.
#[derive(Debug)]
pub(crate) struct CqTable {
    slab: Slab<Cq>,
    /// Queues whose notification has not been taken, each once.
    notified: VecDeque<CqId>,
    pub(crate) seeded: Seeded,
}

impl CqTable {
    pub(crate) fn new(limit: u32, rng: &mut Rng) -> CqTable {
        let slab = Slab::new(Layout::new(limit, u32::BITS), rng.next_u32());
        CqTable { slab, notified: VecDeque::new(), seeded: Seeded::default() }
    }

    pub(crate) fn create(&mut self, depth: u32) -> Result<CqId, VerbsError> {
        let limit = self.slab.layout().limit;
        self.slab
            .insert_with(|_, _| Cq::new(depth))
            .map(CqId)
            .ok_or(VerbsError::TableFull { what: "completion queues", limit })
    }

    pub(crate) fn destroy(&mut self, cq: CqId) -> Result<(), VerbsError> {
        match self.slab.get(cq.0) {
            None => Err(VerbsError::NoCq(cq.0)),
            Some(queue) if queue.users > 0 => Err(VerbsError::CqInUse(cq.0)),
            Some(_) => {
                self.slab.remove(cq.0);
                self.notified.retain(|&notified| notified != cq);
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

    /// Changes the depth. It must hold the entries now in the queue.
    pub(crate) fn resize(&mut self, cq: CqId, depth: u32) -> Result<(), VerbsError> {
        let queue = self.slab.get_mut(cq.0).ok_or(VerbsError::NoCq(cq.0))?;
        let waiting = queue.entries.len();
        if waiting > depth as usize {
            let what = "completion queue entries";
            return Err(VerbsError::TableFull { what, limit: depth });
        }
        queue.entries.reserve_exact(depth as usize - waiting);
        queue.depth = depth;
        Ok(())
    }

    /// Requests a notification, immediately if a matching completion is in the queue. Of two
    /// requests, the one that matches more completions takes effect.
    pub(crate) fn arm(&mut self, cq: CqId, solicited_only: bool) -> Result<(), VerbsError> {
        let queue = self.slab.get_mut(cq.0).ok_or(VerbsError::NoCq(cq.0))?;
        let wanted = if solicited_only { Armed::Solicited } else { Armed::Next };
        queue.armed = queue.armed.max(wanted);
        if !self.seeded.is(Bug::ArmIgnoresWaiting) {
            self.notify_if_due(cq);
        }
        Ok(())
    }

    fn notify_if_due(&mut self, cq: CqId) {
        let Some(queue) = self.slab.get_mut(cq.0).filter(|queue| queue.is_due()) else {
            return;
        };
        queue.disarm();
        if !queue.notified {
            queue.notified = true;
            self.notified.push_back(cq);
        }
    }

    /// The next queue with a notification.
    #[inline]
    pub(crate) fn poll_notified(&mut self) -> Option<CqId> {
        let cq = self.notified.pop_front()?;
        if let Some(queue) = self.slab.get_mut(cq.0) {
            queue.notified = false;
        }
        Some(cq)
    }

    /// Adds a completion, unless the queue is full or was overrun before.
    pub(crate) fn push(
        &mut self,
        cq: CqId,
        completion: Completion,
        srq_slot: Option<SrqSlot>,
    ) -> Pushed {
        let Some(queue) = self.slab.get_mut(cq.0) else {
            return Pushed::Lost;
        };
        if queue.overrun {
            return Pushed::Lost;
        }
        if queue.entries.len() >= queue.depth as usize {
            queue.overrun = true;
            return Pushed::Overran;
        }
        queue.unnotified += 1;
        queue.urgent_unnotified += u32::from(is_urgent(&completion));
        queue.entries.push_back(Entry { completion, srq_slot, notified: false });
        self.notify_if_due(cq);
        Pushed::Added
    }

    /// Whether the queue takes another completion.
    pub(crate) fn has_room(&self, cq: CqId) -> bool {
        let room = |queue: &Cq| !queue.overrun && queue.entries.len() < queue.depth as usize;
        self.slab.get(cq.0).is_some_and(room)
    }

    /// Swaps the two completions added last; see [`seeded`](crate::seeded).
    pub(crate) fn swap_last(&mut self, cq: CqId) {
        if let Some(queue) = self.slab.get_mut(cq.0)
            && let Some(before) = queue.entries.len().checked_sub(2)
        {
            queue.entries.swap(before, before + 1);
        }
    }

    pub(crate) fn poll(&mut self, cq: CqId) -> Option<(Completion, Option<SrqSlot>)> {
        let queue = self.slab.get_mut(cq.0)?;
        let entry = queue.entries.pop_front()?;
        queue.forget(&entry);
        Some((entry.completion, entry.srq_slot))
    }

    pub(crate) fn has_entry(&self, cq: CqId) -> bool {
        self.slab.get(cq.0).is_some_and(|queue| !queue.entries.is_empty())
    }

    /// Removes the completions of a queue pair, and adds the receives lent for them to `srq_slots`.
    pub(crate) fn purge(&mut self, cq: CqId, qpn: Qpn, srq_slots: &mut Vec<SrqSlot>) {
        let Some(queue) = self.slab.get_mut(cq.0) else {
            return;
        };
        if self.seeded.is(Bug::CompletionsKept) {
            return;
        }
        let (unnotified, urgent_unnotified) = (&mut queue.unnotified, &mut queue.urgent_unnotified);
        queue.entries.retain(|entry| {
            let stays = entry.completion.qpn != qpn;
            if !stays {
                *unnotified -= u32::from(!entry.notified);
                *urgent_unnotified -= u32::from(!entry.notified && is_urgent(&entry.completion));
                srq_slots.extend(entry.srq_slot);
            }
            stays
        });
    }

    pub(crate) fn overrun(&self, cq: CqId) -> Option<bool> {
        self.slab.get(cq.0).map(|queue| queue.overrun)
    }
}
