//! Where a queue pair's receives come from: its own queue, or one that it shares.
//!
//! The two differ only in who posts. A message takes its receive when it first needs one: a SEND
//! with its first packet, a WRITE with immediate with its last. From then on the receive is the
//! *current* one until it completes; a message that is lost on the way leaves it there for the next.

use alloc::collections::VecDeque;

use super::Context;
use super::codes::{NO_CREDITS, credit_code};
use crate::srq::Receive;
use crate::verbs::{RecvWr, SrqId};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Receives {
    source: Source,
    current: Option<Receive>,
    /// Taken from a shared queue for messages that began to arrive before their turn.
    taken: VecDeque<Receive>,
}

#[derive(Debug)]
enum Source {
    Own { queue: VecDeque<Receive>, limit: u32 },
    Shared(SrqId),
}

impl Receives {
    pub(super) fn new(limit: u32, srq: Option<SrqId>) -> Receives {
        let own = || Source::Own { queue: VecDeque::with_capacity(limit as usize), limit };
        Receives {
            source: srq.map_or_else(own, Source::Shared),
            current: None,
            taken: VecDeque::new(),
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

    /// Adds to the own queue, which is not full.
    pub(super) fn post(&mut self, wr: RecvWr) {
        if let Source::Own { queue, .. } = &mut self.source {
            queue.push_back(Receive::new(wr));
        }
    }

    /// The receive that the message in progress fills; a new one is taken if there is none.
    pub(super) fn current(&mut self, cx: &mut Context<'_>) -> Option<&Receive> {
        if self.current.is_none() {
            self.current = match &mut self.source {
                Source::Own { queue, .. } => queue.pop_front(),
                Source::Shared(srq) => {
                    self.taken.pop_front().or_else(|| cx.srqs.take(*srq, cx.events))
                }
            };
        }
        self.current.as_ref()
    }

    /// The receive that will be current once `index` others have completed. From a shared queue it
    /// is taken, with those before it: from then on they are this queue pair's alone.
    pub(super) fn ahead(&mut self, cx: &mut Context<'_>, index: usize) -> Option<&Receive> {
        let Some(later) = index.checked_sub(1) else {
            return self.current(cx);
        };
        self.current(cx)?;
        match &mut self.source {
            Source::Own { queue, .. } => queue.get(later),
            Source::Shared(srq) => {
                while self.taken.len() <= later {
                    self.taken.push_back(cx.srqs.take(*srq, cx.events)?);
                }
                self.taken.get(later)
            }
        }
    }

    /// The current receive, to be completed.
    pub(super) fn finish(&mut self) -> Option<Receive> {
        self.current.take()
    }

    /// The oldest receive that is this queue pair's alone; for flushing.
    pub(super) fn take_own(&mut self) -> Option<Receive> {
        let current = self.current.take();
        current.or_else(|| match &mut self.source {
            Source::Own { queue, .. } => queue.pop_front(),
            Source::Shared(_) => self.taken.pop_front(),
        })
    }

    /// The AETH credit code for the receives of this moment. The message in progress is not counted
    /// in the MSN yet, so its receive counts as a credit. Receives that others may take are no
    /// promise: with a shared queue no credits are given (IBA 9.7.7.2), and the RNR NAK has to do.
    pub(super) fn credits(&self) -> u8 {
        match &self.source {
            Source::Own { queue, .. } => {
                credit_code((queue.len() + usize::from(self.current.is_some())) as u32)
            }
            Source::Shared(_) => NO_CREDITS,
        }
    }

    /// Forgets everything without completions.
    pub(super) fn reset(&mut self) {
        while self.take_own().is_some() {}
    }
}
