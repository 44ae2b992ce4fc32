//! A descriptor that counts events, and counts that are promised: an event is queued with a lock
//! held, and whoever waits for it may want that lock, so it is woken afterwards.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};

use super::descriptor::Descriptor;
use super::errors::Outcome;

/// A counting eventfd. A program reads it, and chooses whether that blocks (`fcntl`).
pub(crate) struct Counter {
    descriptor: Descriptor,
    promises: Mutex<Promises>,
}

#[derive(Default)]
struct Promises {
    /// Signals that have not been dropped.
    made: u64,
    /// How many of them are void: their events are gone.
    void: u64,
}

impl Counter {
    pub(crate) fn new() -> Outcome<Counter> {
        let descriptor = Descriptor::event(EventfdFlags::SEMAPHORE)?;
        Ok(Counter { descriptor, promises: Mutex::default() })
    }

    /// One more is counted when the signal is dropped.
    pub(crate) fn promise(self: &Arc<Counter>) -> Signal {
        self.promises().made += 1;
        Signal(Arc::clone(self))
    }

    /// Adds to the count.
    pub(crate) fn add(&self, count: u64) {
        // The counter holds 2^64 - 2 counts: this neither blocks nor fails.
        let _ = write(&self.descriptor, &count.to_ne_bytes());
    }

    /// Waits for a count and takes it, or does not wait, depending on the descriptor's mode.
    pub(crate) fn take(&self) -> Outcome<()> {
        read(&self.descriptor, &mut [0_u8; 8])?;
        Ok(())
    }

    /// Takes one back that was counted, or is promised. Where it is neither, a reader has just
    /// taken it. An old kernel cannot take a count without waiting; there it stays, and a reader
    /// finds no event for it.
    pub(crate) fn take_back(&self) {
        let mut promises = self.promises();
        let was_counted = self.take_now().unwrap_or_else(|| self.is_readable());
        if !was_counted && promises.void < promises.made {
            promises.void += 1;
        }
    }

    /// Takes a count and returns whether there was one, whatever the descriptor's mode; `None`
    /// where the kernel reads no eventfd without waiting (before Linux 5.12). A read that may wait
    /// would do so with locks held if a reader came first.
    fn take_now(&self) -> Option<bool> {
        let mut bytes = [0_u8; 8];
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        match preadv2(&self.descriptor, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::SPIPE) => None,
            taken => Some(taken.is_ok()),
        }
    }

    fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(&self.descriptor, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(1)
    }

    fn promises(&self) -> MutexGuard<'_, Promises> {
        self.promises.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Counter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl AsRawFd for Counter {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

/// A promised count: see [`Counter::promise`].
pub(crate) struct Signal(Arc<Counter>);

impl Drop for Signal {
    fn drop(&mut self) {
        let mut promises = self.0.promises();
        promises.made -= 1;
        if promises.void > 0 {
            promises.void -= 1;
        } else {
            self.0.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(counter: &Counter) -> u32 {
        (0..).take_while(|_| counter.take_now() == Some(true)).count() as u32
    }

    #[test]
    fn a_signal_counts_once_it_is_dropped() {
        let counter = Arc::new(Counter::new().unwrap());
        let signals = [counter.promise(), counter.promise()];
        assert_eq!(count(&counter), 0);
        drop(signals);
        assert_eq!(count(&counter), 2);
    }

    /// A queue is destroyed between its event and the wake-up.
    #[test]
    fn what_was_taken_back_is_never_counted() {
        let counter = Arc::new(Counter::new().unwrap());
        let late = counter.promise();
        counter.take_back();
        drop(late);
        assert_eq!(count(&counter), 0);
        // Another event has been counted: its count goes, and the promise is kept in its place.
        let late = counter.promise();
        counter.add(1);
        counter.take_back();
        drop(late);
        assert_eq!(count(&counter), 1);
        // A reader has it: nothing is owed.
        counter.take_back();
        drop(counter.promise());
        assert_eq!(count(&counter), 1);
    }

    /// A reader may take the count just before: the descriptor is in blocking mode.
    #[test]
    fn taking_back_does_not_wait() {
        let counter = Counter::new().unwrap();
        counter.take_back();
        assert!(!counter.is_readable());
        counter.add(1);
        assert!(counter.is_readable());
        counter.take_back();
        assert!(!counter.is_readable());
    }
}
