//! Asynchronous events (IBA 11.6.3), queued until the program polls them.
//!
//! An event that is already queued is not queued twice: the second adds no information. So the
//! queue is bounded by the kinds of events times the objects that exist, and a peer cannot make it
//! grow beyond that. Events of an object are removed when it is destroyed.

use alloc::collections::{BTreeSet, VecDeque};

use crate::verbs::AsyncEvent;

/// Events in the order in which they happened.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    queue: VecDeque<AsyncEvent>,
    waiting: BTreeSet<(u8, u32)>,
}

impl EventQueue {
    /// Adds an event unless the same one is queued.
    pub(crate) fn raise(&mut self, event: AsyncEvent) {
        if self.waiting.insert(identity(event)) {
            self.queue.push_back(event);
        }
    }

    pub(crate) fn poll(&mut self) -> Option<AsyncEvent> {
        let event = self.queue.pop_front()?;
        self.waiting.remove(&identity(event));
        Some(event)
    }

    /// Drops the events selected by `is_gone`: their object no longer exists.
    pub(crate) fn forget(&mut self, is_gone: impl Fn(AsyncEvent) -> bool) {
        self.queue.retain(|&event| !is_gone(event));
        self.waiting = self.queue.iter().map(|&event| identity(event)).collect();
    }
}

/// Kind of event and object.
fn identity(event: AsyncEvent) -> (u8, u32) {
    match event {
        AsyncEvent::QpFatal(qpn) => (0, qpn.get()),
        AsyncEvent::QpRequestError(qpn) => (1, qpn.get()),
        AsyncEvent::QpAccessError(qpn) => (2, qpn.get()),
        AsyncEvent::CommunicationEstablished(qpn) => (3, qpn.get()),
        AsyncEvent::SendQueueDrained(qpn) => (4, qpn.get()),
        AsyncEvent::LastWqeReached(qpn) => (5, qpn.get()),
        AsyncEvent::SrqLimitReached(srq) => (6, srq.0),
        AsyncEvent::CqError(cq) => (7, cq.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{CqId, Qpn, SrqId};

    #[test]
    fn the_same_event_waits_once_and_may_come_again() {
        let mut events = EventQueue::default();
        let (fatal, limit) =
            (AsyncEvent::QpFatal(Qpn::new(7)), AsyncEvent::SrqLimitReached(SrqId(7)));
        for event in [fatal, limit, fatal] {
            events.raise(event);
        }
        assert_eq!((events.poll(), events.poll(), events.poll()), (Some(fatal), Some(limit), None));
        events.raise(fatal);
        assert_eq!(events.poll(), Some(fatal));
    }

    #[test]
    fn events_go_with_their_object() {
        let mut events = EventQueue::default();
        let (gone, kept) = (AsyncEvent::CqError(CqId(1)), AsyncEvent::CqError(CqId(2)));
        events.raise(gone);
        events.raise(kept);
        events.forget(|event| event == gone);
        events.raise(gone);
        assert_eq!((events.poll(), events.poll(), events.poll()), (Some(kept), Some(gone), None));
    }
}
