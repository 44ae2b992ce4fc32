//! Sleeping until there is something to do: a packet, a disk completion, another thread's call.
//!
//! Data-path threads poll; they sleep only when several rounds brought nothing. A [`Waiter`] owns
//! an eventfd that other threads signal through [`Waker`]; sockets and rings are borrowed for each
//! sleep, so nothing here outlives them. A wake-up before the sleep is not lost: the eventfd keeps
//! it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use roce::Duration;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};

/// Most file descriptors that one sleep can watch.
pub const MAX_FDS: usize = 15;

/// Puts one thread to sleep until a file descriptor is ready, a [`Waker`] is used or time is up.
#[derive(Debug)]
pub struct Waiter {
    event: Arc<OwnedFd>,
}

/// Ends the sleep of a [`Waiter`] from any thread.
#[derive(Clone, Debug)]
pub struct Waker {
    event: Arc<OwnedFd>,
}

/// Why a sleep ended. All false: the time was up, or a signal came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Woken {
    /// A [`Waker`] was used since the last sleep.
    pub by_waker: bool,
    /// Bit `i` is set when the file descriptor at place `i` of the list is ready (or broken).
    pub ready: u16,
    /// A descriptor is not open: it was closed elsewhere.
    pub is_broken: bool,
}

impl Waiter {
    /// Creates the eventfd.
    pub fn new() -> std::io::Result<Waiter> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waiter { event: Arc::new(event) })
    }

    /// A handle for other threads.
    pub fn waker(&self) -> Waker {
        Waker { event: Arc::clone(&self.event) }
    }

    /// Sleeps until one of `fds` is readable, a waker is used, or `timeout` has passed (`None`: no
    /// limit). Only the first [`MAX_FDS`] descriptors are watched. A signal ends the sleep early
    /// and is no error.
    pub fn wait(
        &self,
        fds: &[BorrowedFd<'_>],
        timeout: Option<Duration>,
    ) -> std::io::Result<Woken> {
        let mut polled = watch_list(&self.event, fds);
        let timeout = timeout.map(timespec);
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Woken::default()),
            Err(error) => return Err(error.into()),
        }
        let is_broken = polled.iter().any(|one| one.revents().contains(PollFlags::NVAL));
        let by_waker = polled[0].revents().contains(PollFlags::IN);
        if by_waker {
            self.reset()?;
        }
        Ok(Woken { by_waker, ready: ready_bits(&polled[1..]), is_broken })
    }

    /// Resets the eventfd, so that the next sleep does not end at once.
    fn reset(&self) -> std::io::Result<()> {
        match read(&self.event, &mut [0u8; 8]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Waiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Waker {
    /// Ends the waiter's sleep, or its next one if it is awake.
    pub fn wake(&self) {
        // A full counter (EAGAIN) means that a wake-up is already waiting to be seen.
        let _ = write(&self.event, &1u64.to_ne_bytes());
    }
}

fn watch_list<'fd>(event: &'fd OwnedFd, fds: &'fd [BorrowedFd<'_>]) -> Vec<PollFd<'fd>> {
    let watched = fds.iter().take(MAX_FDS).map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
    std::iter::once(PollFd::from_borrowed_fd(event.as_fd(), PollFlags::IN)).chain(watched).collect()
}

fn ready_bits(polled: &[PollFd<'_>]) -> u16 {
    let set = |(i, fd): (usize, &PollFd<'_>)| u16::from(!fd.revents().is_empty()) << i;
    polled.iter().enumerate().map(set).fold(0, |bits, bit| bits | bit)
}

pub(crate) fn timespec(span: Duration) -> Timespec {
    let ns = span.as_nanos();
    Timespec {
        tv_sec: (ns / 1_000_000_000).try_into().unwrap_or(i64::MAX),
        tv_nsec: (ns % 1_000_000_000) as _,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_ends_a_sleep() {
        let waiter = Waiter::new().expect("eventfd");
        let woken = waiter.wait(&[], Some(Duration::from_micros(100))).expect("poll");
        assert_eq!(woken, Woken::default());
    }

    #[test]
    fn a_wake_up_before_the_sleep_is_kept_once() {
        let waiter = Waiter::new().expect("eventfd");
        waiter.waker().wake();
        waiter.waker().wake();
        assert!(waiter.wait(&[], None).expect("poll").by_waker);
        assert!(!waiter.wait(&[], Some(Duration::ZERO)).expect("poll").by_waker);
    }

    #[test]
    fn another_thread_wakes() {
        let waiter = Waiter::new().expect("eventfd");
        let waker = waiter.waker();
        let thread = std::thread::spawn(move || waker.wake());
        assert!(waiter.wait(&[], None).expect("poll").by_waker);
        thread.join().expect("thread");
    }

    #[test]
    fn tells_which_descriptor_is_ready() {
        let waiter = Waiter::new().expect("eventfd");
        let idle = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let ready = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
        let woken = waiter.wait(&[idle.as_fd(), ready.as_fd()], None).expect("poll");
        assert_eq!(woken, Woken { ready: 0b10, ..Woken::default() });
    }
}
