//! The source of a queue pair's receives: its own queue, or a shared one.
//!
//! The two differ only in who posts. A message takes its receive when it first needs one: a SEND
//! with its first packet, a WRITE with immediate with its last. From then on the receive is the
//! *current* one until it completes; a message that is lost on the way leaves it for the next.
//!
//! In selective repeat a message may arrive before earlier ones, which need receives too. From a
//! shared queue these are taken with it, so that the order stays that of the messages, but only few
//! for messages of which nothing has arrived: one packet must not take what others are waiting for.
//! Receives that were taken ahead and not used return to the front of the queue.

use alloc::collections::VecDeque;

use super::Scope;
use super::codes::{NO_CREDITS, credit_code};
use crate::seeded::Bug;
use crate::srq::{Receive, SrqTable};
use crate::verbs::{Completion, RecvWr, SrqId};
use crate::wire::Headers;

/// Most receives taken from a shared queue for messages of which nothing has arrived, and the
/// largest fraction of those left in it, as one part in this many. With 1 % of 512 packets in
/// flight lost, about 5 are missing at a time.
const MAX_IDLE: usize = 16;
const MAX_IDLE_PART: usize = 8;

/// See the module's text.
#[derive(Debug)]
pub(super) struct RecvQueue {
    source: Source,
    current: Option<Receive>,
    /// Taken from a shared queue for messages that arrived out of order, and for those before them.
    taken: VecDeque<Taken>,
    /// How many of these no packet has arrived for.
    idle: usize,
}

#[derive(Debug)]
struct Taken {
    receive: Receive,
    is_idle: bool,
}

#[derive(Debug)]
enum Source {
    Own { queue: VecDeque<Receive>, limit: u32 },
    Shared(SrqId),
}

impl RecvQueue {
    pub(super) fn new(limit: u32, srq: Option<SrqId>) -> RecvQueue {
        let own = || Source::Own { queue: VecDeque::with_capacity(limit as usize), limit };
        RecvQueue {
            source: srq.map_or_else(own, Source::Shared),
            current: None,
            taken: VecDeque::new(),
            idle: 0,
        }
    }

    /// Most receives in the own queue; 0 if there is none.
    pub(super) fn limit(&self) -> u32 {
        match self.source {
            Source::Own { limit, .. } => limit,
            Source::Shared(_) => 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        match &self.source {
            Source::Own { queue, limit } => {
                queue.len() + usize::from(self.current.is_some()) >= *limit as usize
            }
            Source::Shared(_) => true,
        }
    }

    /// Receives posted and not completed; `None` if they are shared.
    pub(super) fn len(&self) -> Option<u32> {
        match &self.source {
            Source::Own { queue, .. } => Some((queue.len() + self.current.iter().len()) as u32),
            Source::Shared(_) => None,
        }
    }

    /// Adds to the own queue, which must not be full.
    pub(super) fn post(&mut self, wr: RecvWr) {
        if let Source::Own { queue, .. } = &mut self.source {
            queue.push_back(Receive::new(wr));
        }
    }

    /// The receive that the message in progress fills; a new one is taken if there is none.
    pub(super) fn current(&mut self, cx: &mut Scope<'_, '_>) -> Option<&Receive> {
        if self.current.is_none() {
            self.current = match &mut self.source {
                Source::Own { queue, .. } => queue.pop_front(),
                Source::Shared(srq) => match self.taken.pop_front() {
                    Some(taken) => {
                        self.idle -= usize::from(taken.is_idle);
                        Some(taken.receive)
                    }
                    None => cx.take_shared(*srq),
                },
            };
        }
        self.current.as_ref()
    }

    /// The receive that will be current once `index` others have completed, for a packet that has
    /// arrived. From a shared queue it is taken, with those before it, if these are not too many.
    pub(super) fn ahead(&mut self, cx: &mut Scope<'_, '_>, index: usize) -> Option<&Receive> {
        let Some(later) = index.checked_sub(1) else {
            return self.current(cx);
        };
        if !self.may_take_ahead(cx, index) {
            return None;
        }
        self.current(cx)?;
        let srq = match &self.source {
            Source::Own { queue, .. } => return queue.get(later),
            Source::Shared(srq) => *srq,
        };
        while self.taken.len() <= later {
            let receive = cx.take_shared(srq)?;
            self.taken.push_back(Taken { receive, is_idle: true });
            self.idle += 1;
        }
        let taken = self.taken.get_mut(later)?;
        self.idle -= usize::from(core::mem::take(&mut taken.is_idle));
        Some(&taken.receive)
    }

    /// Whether few enough receives are missing up to `index` to be taken for one packet.
    fn may_take_ahead(&self, cx: &Scope<'_, '_>, index: usize) -> bool {
        let Source::Shared(srq) = self.source else {
            return true;
        };
        let missing = (index + 1).saturating_sub(self.taken.len() + self.current.iter().len());
        let left = cx.srqs.left(srq);
        let most = MAX_IDLE.min(left / MAX_IDLE_PART);
        let is_fair = missing <= left && self.idle + missing.saturating_sub(1) <= most;
        missing == 0 || is_fair || cx.seeded.is(Bug::SharedReceivesHoarded)
    }

    /// Completes the current receive with `completion`; immediate and solicited are those of the
    /// packet.
    pub(super) fn complete(
        &mut self,
        cx: &mut Scope<'_, '_>,
        headers: &Headers,
        completion: Completion,
    ) {
        let (imm, solicited) = (headers.ext().imm(), headers.bth().solicited);
        self.complete_with(cx, Completion { imm, solicited, ..completion });
    }

    /// Completes the current receive.
    pub(super) fn complete_with(&mut self, cx: &mut Scope<'_, '_>, completion: Completion) {
        if let Some(receive) = self.current.take() {
            let completion = Completion { wr_id: receive.wr.wr_id, ..completion };
            let recv_cq = cx.qpc.recv_cq;
            cx.complete(recv_cq, completion, receive.srq_slot);
        }
    }

    /// The oldest receive owned by this queue pair alone; for flushing.
    pub(super) fn take_own(&mut self) -> Option<Receive> {
        let current = self.current.take();
        current.or_else(|| match &mut self.source {
            Source::Own { queue, .. } => queue.pop_front(),
            Source::Shared(_) => None,
        })
    }

    /// Returns receives that were taken ahead to the shared queue.
    pub(super) fn give_back(&mut self, srqs: &mut SrqTable) {
        self.idle = 0;
        srqs.give_back(self.taken.drain(..).filter_map(|taken| taken.receive.srq_slot));
    }

    /// The AETH credit code for the current receives. The message in progress is not counted in the
    /// MSN yet, so its receive counts as a credit. Receives that others may take cannot be
    /// promised: with a shared queue no credits are given (IBA 9.7.7.2), and the RNR NAK takes
    /// their place.
    pub(super) fn credits(&self) -> u8 {
        match &self.source {
            Source::Own { queue, .. } => {
                credit_code((queue.len() + usize::from(self.current.is_some())) as u32)
            }
            Source::Shared(_) => NO_CREDITS,
        }
    }

    /// Clears everything without completions; shared receives return to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.give_back(srqs);
        srqs.give_back(self.current.take().and_then(|current| current.srq_slot).into_iter());
        while self.take_own().is_some() {}
    }
}
