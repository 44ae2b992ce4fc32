//! Asynchronous events: from the endpoint to the context of their object.
//!
//! Destroying an object removes its events from the queue and waits until those already read have
//! been acknowledged.

use std::sync::atomic::{AtomicU32, Ordering};

use roce::endpoint::AsyncEvent;

use super::ack::Acks;
use super::{Context, Cq, Object, Qp, Srq};
use crate::abi::*;
use crate::process::errors::Outcome;

/// The object of an asynchronous event.
#[derive(Clone, Copy)]
pub(crate) enum Subject {
    Qp(&'static Qp),
    Cq(&'static Cq),
    Srq(&'static Srq),
}

/// An asynchronous event in a context's queue.
#[derive(Clone, Copy)]
pub(crate) struct QueuedEvent {
    subject: Subject,
    event_type: u32,
}

impl Subject {
    fn acks(&self) -> &'static Acks {
        match *self {
            Subject::Qp(qp) => &qp.async_acks,
            Subject::Cq(cq) => &cq.async_acks,
            Subject::Srq(srq) => &srq.async_acks,
        }
    }

    fn element(&self) -> ibv_event_element {
        match *self {
            Subject::Qp(qp) => ibv_event_element { qp: qp.handle().cast() },
            Subject::Cq(cq) => ibv_event_element { cq: cq.handle().cast() },
            Subject::Srq(srq) => ibv_event_element { srq: srq.handle() },
        }
    }

    /// The number of acknowledged events in the C structure.
    fn completed(&self) -> *mut u32 {
        // SAFETY: only the addresses of members are taken, of structures that exist.
        unsafe {
            match *self {
                Subject::Qp(qp) => &raw mut (*qp.base()).events_completed,
                Subject::Cq(cq) => &raw mut (*cq.c.get()).async_events_completed,
                Subject::Srq(srq) => &raw mut (*srq.c.get()).events_completed,
            }
        }
    }

    fn is(&self, other: &Subject) -> bool {
        std::ptr::eq(self.acks(), other.acks())
    }

    fn owner(&self) -> *mut ibv_context {
        match *self {
            Subject::Qp(qp) => qp.owner(),
            Subject::Cq(cq) => cq.owner(),
            Subject::Srq(srq) => srq.owner(),
        }
    }

    /// Queues an event for the context that the object belongs to.
    pub(super) fn deliver(self, event: AsyncEvent) {
        if let Some(context) = Context::arena().peek(self.owner()) {
            let event_type = type_of(event);
            context.async_events.push(QueuedEvent { subject: self, event_type });
        }
    }

    /// Called before an object is destroyed: removes its events, and waits until those read are
    /// acknowledged.
    pub(super) fn forget(self) {
        if let Some(context) = Context::arena().peek(self.owner()) {
            context.async_events.remove(|event| event.subject.is(&self));
        }
        self.acks().wait();
    }

    /// The program has acknowledged one event.
    pub(crate) fn acknowledge(self) {
        self.acks().acknowledge(1);
        // SAFETY: the member is aligned and changed here only; programs read it.
        unsafe { count(self.completed(), 1) };
    }
}

impl QueuedEvent {
    /// The C form.
    pub(crate) fn to_c(self) -> ibv_async_event {
        ibv_async_event { element: self.subject.element(), event_type: self.event_type }
    }
}

impl Context {
    /// The oldest event; see [`EventQueue::pop`](super::event_queue::EventQueue::pop).
    pub(crate) fn next_event(&self) -> Outcome<QueuedEvent> {
        self.async_events.pop(|event| event.subject.acks().read_one())
    }
}

/// The event's number in C.
fn type_of(event: AsyncEvent) -> u32 {
    match event {
        AsyncEvent::QpFatal(_) => IBV_EVENT_QP_FATAL,
        AsyncEvent::QpRequestError(_) => IBV_EVENT_QP_REQ_ERR,
        AsyncEvent::QpAccessError(_) => IBV_EVENT_QP_ACCESS_ERR,
        AsyncEvent::CommunicationEstablished(_) => IBV_EVENT_COMM_EST,
        AsyncEvent::SendQueueDrained(_) => IBV_EVENT_SQ_DRAINED,
        AsyncEvent::LastWqeReached(_) => IBV_EVENT_QP_LAST_WQE_REACHED,
        AsyncEvent::SrqLimitReached(_) => IBV_EVENT_SRQ_LIMIT_REACHED,
        AsyncEvent::CqError(_) => IBV_EVENT_CQ_ERR,
    }
}

/// Adds acknowledged events to the number in the C structure, as rdma-core does.
///
/// # Safety
/// `completed` points to such a member of a living object.
pub(super) unsafe fn count(completed: *mut u32, events: u32) {
    // SAFETY: as the caller promises.
    unsafe { AtomicU32::from_ptr(completed) }.fetch_add(events, Ordering::Relaxed);
}
