//! Asynchronous events: from the endpoint to the context whose object is concerned.
//!
//! The descriptor that programs see is a counting eventfd, one count for each event in the queue, so
//! that whether reading it blocks is the program's choice (`fcntl`). Destroying an object takes its
//! events out of the queue and waits until those that were read have been acknowledged.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use roce::endpoint::AsyncEvent;
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::abi::*;
use crate::ack::Acks;
use crate::context::Context;
use crate::cq::Cq;
use crate::descriptor::Descriptor;
use crate::errors::{Outcome, or_minus_one};
use crate::object::{Object, living};
use crate::qp::Qp;
use crate::srq::Srq;

/// Most events that wait; more are dropped, oldest first, as the program does not read them.
const MAX_QUEUED: usize = 4096;

/// A queue with a descriptor that is readable while something is in it.
pub(crate) struct EventQueue<T> {
    inner: Mutex<Inner<T>>,
}

struct Inner<T> {
    /// `None` once the queue is closed. Whoever reads holds a reference meanwhile, so that the number
    /// is not another file's by then.
    count: Option<Arc<Descriptor>>,
    queue: VecDeque<T>,
}

impl<T: Copy> EventQueue<T> {
    pub(crate) fn new() -> Outcome<EventQueue<T>> {
        let count = Arc::new(Descriptor::event(EventfdFlags::SEMAPHORE)?);
        let inner = Inner { count: Some(count), queue: VecDeque::new() };
        Ok(EventQueue { inner: Mutex::new(inner) })
    }

    /// The descriptor that programs see; -1 once it is closed.
    pub(crate) fn fd(&self) -> RawFd {
        self.lock().count.as_ref().map_or(-1, |count| count.as_raw_fd())
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, event: T) {
        self.push_once(event, |_| false);
    }

    /// Adds an event unless one waits that says the same.
    pub(crate) fn push_once(&self, event: T, is_same: impl Fn(&T) -> bool) {
        let mut inner = self.lock();
        let Some(count) = &inner.count else { return };
        if inner.queue.iter().any(is_same) {
            return;
        }
        if inner.queue.len() == MAX_QUEUED {
            inner.queue.pop_front();
        } else {
            // The counter holds 2^64 - 2 counts: this neither blocks nor fails.
            let _ = rustix::io::write(count, &1_u64.to_ne_bytes());
        }
        inner.queue.push_back(event);
    }

    /// The oldest event. Blocks, or not, as the descriptor says.
    ///
    /// # Errors
    /// `EINVAL` when the queue is closed, also while a thread waits here.
    pub(crate) fn pop(&self, taken: impl FnOnce(&T)) -> Outcome<T> {
        loop {
            let count = self.lock().count.clone().ok_or(Errno::INVAL)?;
            rustix::io::read(&*count, &mut [0_u8; 8])?;
            let mut inner = self.lock();
            // Removing an event leaves its count behind when the two race.
            if let Some(event) = inner.queue.pop_front() {
                taken(&event);
                return Ok(event);
            }
        }
    }

    /// Takes out the events that `unwanted` names.
    pub(crate) fn remove(&self, unwanted: impl Fn(&T) -> bool) {
        let mut inner = self.lock();
        let before = inner.queue.len();
        inner.queue.retain(|event| !unwanted(event));
        let Some(count) = &inner.count else { return };
        for _ in inner.queue.len()..before {
            // There is a count for each entry unless a reader has just taken it, and then finds
            // the queue shorter; the descriptor may be in blocking mode, so look first.
            let mut fds = [rustix::event::PollFd::new(count, rustix::event::PollFlags::IN)];
            if rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())) == Ok(1) {
                let _ = rustix::io::read(count, &mut [0_u8; 8]);
            }
        }
    }

    /// Ends it: threads that wait for events return, and the last of them closes the descriptor.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.queue.clear();
        if let Some(count) = inner.count.take() {
            let readers = Arc::strong_count(&count) as u64 - 1;
            if readers > 0 {
                let _ = rustix::io::write(&*count, &readers.to_ne_bytes());
            }
        }
    }
}

/// What an asynchronous event is about.
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
}

pub(crate) fn of_qp(qp: &'static Qp, event: AsyncEvent) {
    let event_type = match event {
        AsyncEvent::QpRequestError(_) => IBV_EVENT_QP_REQ_ERR,
        AsyncEvent::QpAccessError(_) => IBV_EVENT_QP_ACCESS_ERR,
        AsyncEvent::CommunicationEstablished(_) => IBV_EVENT_COMM_EST,
        AsyncEvent::SendQueueDrained(_) => IBV_EVENT_SQ_DRAINED,
        AsyncEvent::LastWqeReached(_) => IBV_EVENT_QP_LAST_WQE_REACHED,
        _ => IBV_EVENT_QP_FATAL,
    };
    deliver(qp.owner(), Subject::Qp(qp), event_type);
}

pub(crate) fn of_cq(cq: &'static Cq) {
    deliver(cq.owner(), Subject::Cq(cq), IBV_EVENT_CQ_ERR);
}

pub(crate) fn of_srq(srq: &'static Srq) {
    deliver(srq.owner(), Subject::Srq(srq), IBV_EVENT_SRQ_LIMIT_REACHED);
}

fn deliver(owner: *mut ibv_context, subject: Subject, event_type: u32) {
    if let Some(context) = Context::arena().peek(owner) {
        context.async_events.push(QueuedEvent { subject, event_type });
    }
}

/// Before an object goes: no event of it is read any more, and all that were are acknowledged.
pub(crate) fn forget(owner: *mut ibv_context, subject: Subject) {
    if let Some(context) = Context::arena().peek(owner) {
        context.async_events.remove(|event| event.subject.is(&subject));
    }
    subject.acks().wait();
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // An event that has been taken out must have a place to go.
    let next = if event.is_null() { Err(Errno::INVAL) } else { next_event(context) };
    or_minus_one(next.map(|next| {
        let made = ibv_async_event { element: next.subject.element(), event_type: next.event_type };
        // SAFETY: the caller's place for an event.
        unsafe { event.write(made) };
        0
    }))
}

fn next_event(context: *mut ibv_context) -> Outcome<QueuedEvent> {
    let context = living::<Context>(context)?;
    context.async_events.pop(|event| event.subject.acks().read_one())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    if event.is_null() {
        return;
    }
    // SAFETY: the caller's event; which member is meant follows from its type.
    let found = unsafe { subject_of(&*event) };
    if let Some(subject) = found {
        subject.acks().acknowledge(1);
        // SAFETY: the member is aligned and changed here only; programs read it.
        unsafe { count(subject.completed(), 1) };
    }
}

/// Adds acknowledged events to the number in the C structure, as rdma-core does.
///
/// # Safety
/// `completed` points to such a member of a living object.
pub(crate) unsafe fn count(completed: *mut u32, events: u32) {
    // SAFETY: as the caller promises.
    unsafe { AtomicU32::from_ptr(completed) }.fetch_add(events, Ordering::Relaxed);
}

/// # Safety
/// `event` was filled by `ibv_get_async_event`, or at least holds a pointer or null.
unsafe fn subject_of(event: &ibv_async_event) -> Option<Subject> {
    // SAFETY: all pointer members have the same size; which is meant follows from the type.
    unsafe {
        match event.event_type {
            IBV_EVENT_CQ_ERR => Cq::arena().find(event.element.cq.cast()).map(Subject::Cq),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                Srq::arena().find(event.element.srq).map(Subject::Srq)
            }
            IBV_EVENT_QP_FATAL..=IBV_EVENT_SQ_DRAINED | IBV_EVENT_QP_LAST_WQE_REACHED => {
                Qp::arena().find(event.element.qp.cast()).map(Subject::Qp)
            }
            _ => None,
        }
    }
}
