//! Queues of events with a descriptor, for contexts and completion channels.
//!
//! The descriptor that programs see is a counting eventfd, one count or one promised count for each
//! queued event, so that the program can choose whether reading it blocks (`fcntl`).

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::process::counter::{Counter, Signal};
use crate::process::errors::Outcome;

/// A queue with a descriptor that is readable while the queue is not empty.
pub(crate) struct EventQueue<T> {
    inner: Mutex<Inner<T>>,
}

struct Inner<T> {
    /// `None` once the queue is closed. A reader holds a reference meanwhile, so that the number is
    /// not reused for another file.
    count: Option<Arc<Counter>>,
    queue: VecDeque<T>,
    /// Most of them; beyond that the oldest are dropped, as the program does not read them.
    most: usize,
}

impl<T: Copy> EventQueue<T> {
    pub(crate) fn new(most: usize) -> Outcome<EventQueue<T>> {
        let count = Arc::new(Counter::new()?);
        let inner = Inner { count: Some(count), queue: VecDeque::new(), most };
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
        drop(self.push_once(event, |_| false));
    }

    /// Adds an event unless an equivalent one is queued. Nobody sees it before the signal has been
    /// dropped.
    pub(crate) fn push_once(&self, event: T, is_same: impl Fn(&T) -> bool) -> Option<Signal> {
        let mut inner = self.lock();
        let count = inner.count.as_ref()?;
        if inner.queue.iter().any(is_same) {
            return None;
        }
        let signal = (inner.queue.len() < inner.most).then(|| count.promise());
        if signal.is_none() {
            inner.queue.pop_front();
        }
        inner.queue.push_back(event);
        signal
    }

    /// The oldest event. Blocks or not, depending on the descriptor's mode.
    ///
    /// # Errors
    /// `EINVAL` when the queue is closed, also while a thread is blocked here.
    pub(crate) fn pop(&self, taken: impl FnOnce(&T)) -> Outcome<T> {
        loop {
            let count = self.lock().count.clone().ok_or(Errno::INVAL)?;
            count.take()?;
            let mut inner = self.lock();
            // A count without an event is left when this races with removing one.
            if let Some(event) = inner.queue.pop_front() {
                taken(&event);
                return Ok(event);
            }
        }
    }

    /// Removes the events selected by `unwanted`.
    pub(crate) fn remove(&self, unwanted: impl Fn(&T) -> bool) {
        let mut inner = self.lock();
        let before = inner.queue.len();
        inner.queue.retain(|event| !unwanted(event));
        let Some(count) = &inner.count else { return };
        // There is a count for each entry, or a promise, unless a reader has just taken it, and
        // then finds the queue shorter.
        (inner.queue.len()..before).for_each(|_| count.take_back());
    }

    /// Closes it: threads that wait for events return, and the last of them closes the descriptor.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.queue.clear();
        if let Some(count) = inner.count.take() {
            let readers = Arc::strong_count(&count) as u64 - 1;
            if readers > 0 {
                count.add(readers);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_dropped_only_beyond_the_bound() {
        let queue = EventQueue::new(5_000).unwrap();
        for event in 0..5_001 {
            drop(queue.push_once(event, |known| *known == event));
        }
        for event in 1..5_001 {
            assert_eq!(queue.pop(|_| {}), Ok(event));
        }
    }
}
