//! Queues of events with a descriptor, for contexts and completion channels.
//!
//! The descriptor that programs see is a counting eventfd, one count for each event in the queue, so
//! that whether reading it blocks is the program's choice (`fcntl`).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::process::descriptor::Descriptor;
use crate::process::errors::Outcome;

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
