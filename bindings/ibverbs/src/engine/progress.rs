//! The progress thread: serves the peer while the program does something else.
//!
//! A program that polls drains the wire itself, and a second thread would only fight for the lock.
//! A program that sleeps or computes needs one: the peer's WRITEs and READs have to be served, and
//! lost packets sent again. The thread tells the two apart by the time of the program's last drain:
//!
//! - *watching*: it sleeps on the sockets and drains as soon as a packet comes;
//! - *backing off*: the program polls, so it sleeps without looking at the sockets, each time twice
//!   as long up to [`LONGEST_NAP`], and looks again once the program has been away for
//!   [`PROGRAM_AWAY`]. A program that arms a completion queue ends this at once.
//!
//! In both it wakes every [`LONGEST_SLEEP`], and for the endpoint's next deadline, which program threads bring forward when they
//! post ([`Driver::note_deadline`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nic::clock;
use roce::{Duration, Time};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{Engine, FULL_DRAIN};
use crate::descriptor::Descriptor;
use crate::errors::Outcome;
use crate::signals::SignalsBlocked;

/// A program that has not drained for this long is away.
const PROGRAM_AWAY: Duration = Duration::from_micros(20);

/// First sleep without looking at the sockets.
const SHORTEST_NAP: Duration = Duration::from_micros(20);

/// Longest one: what a program that stops polling may have to wait once.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// Longest sleep of all. Whoever closes the bell cannot ring it, so the thread looks by itself whether it
/// is to stop.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// Sleep when descriptors are gone: there is nothing left to wait for.
const LOST_NAP: std::time::Duration = std::time::Duration::from_millis(10);

/// Rounds of draining before the thread looks around.
const ROUNDS: u32 = 16;

/// What program threads and the progress thread tell each other.
pub(super) struct Driver {
    /// `None` once the thread has ended.
    bell: Mutex<Option<Arc<Descriptor>>>,
    /// When a program thread last drained, in nanoseconds.
    program_seen: AtomicU64,
    /// When the thread will wake by itself; 0 while it is awake, `u64::MAX` for never.
    wakes_at: AtomicU64,
    /// The thread is not looking at the sockets.
    napping: AtomicBool,
    stop: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    pub(super) fn new() -> Outcome<Driver> {
        Ok(Driver {
            bell: Mutex::new(Some(Arc::new(Descriptor::event(EventfdFlags::NONBLOCK)?))),
            program_seen: AtomicU64::new(0),
            wakes_at: AtomicU64::new(0),
            napping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            thread: Mutex::new(None),
        })
    }

    pub(super) fn wake(&self) {
        if let Some(bell) = &*self.bell() {
            // A full counter means that the bell is ringing already.
            let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
        }
    }

    fn bell(&self) -> MutexGuard<'_, Option<Arc<Descriptor>>> {
        self.bell.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn program_was_here(&self, now: Time) {
        self.program_seen.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Wakes the thread if it would sleep past this deadline. Called with the core locked, as the
    /// thread's own announcement is.
    pub(super) fn note_deadline(&self, deadline: Option<Time>) {
        if deadline.is_some_and(|at| at.as_nanos() < self.wakes_at.load(Ordering::Relaxed)) {
            self.wakes_at.store(0, Ordering::Relaxed);
            self.wake();
        }
    }

    pub(super) fn expect_sleep(&self) {
        self.program_seen.store(0, Ordering::Relaxed);
        if self.napping.swap(false, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Ends the thread and waits for it.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread has been printed; there is nothing to add.
            let _ = thread.join();
        }
        drop(self.bell().take());
    }

    fn program_is_polling(&self, now: Time) -> bool {
        let seen = Time::from_nanos(self.program_seen.load(Ordering::Relaxed));
        seen > now || now.since(seen) < PROGRAM_AWAY
    }
}

/// Starts the thread. It takes no signal: those are for the program's threads.
pub(super) fn spawn(engine: &Arc<Engine>) -> Outcome<()> {
    let own = Arc::clone(engine);
    let blocked = SignalsBlocked::all();
    let made = std::thread::Builder::new().name("dquant-verbs".to_owned()).spawn(move || run(&own));
    drop(blocked);
    let thread = made.map_err(|_| Errno::AGAIN)?;
    *engine.driver.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(())
}

fn run(engine: &Engine) {
    // Without this the kernel rounds short sleeps up by 50 us.
    // SAFETY: sets an attribute of the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64, 0_u64, 0_u64, 0_u64) };
    let mut nap = None;
    while !engine.driver.stop.load(Ordering::Relaxed) {
        let busy = serve(engine, nap);
        if !busy {
            sleep(engine, nap);
        }
        nap = next_nap(&engine.driver, nap);
    }
}

/// Does what there is to do; `true` if there may be more.
fn serve(engine: &Engine, nap: Option<Duration>) -> bool {
    let driver = &engine.driver;
    let mut core = engine.lock();
    driver.wakes_at.store(0, Ordering::Relaxed);
    let now = clock::now();
    let due = core.deadline().is_some_and(|at| at <= now);
    if nap.is_none() || due {
        for _ in 0..ROUNDS {
            let progress = core.drain(clock::now());
            if progress.received == 0 && progress.sent < FULL_DRAIN {
                announce(driver, core.deadline(), nap);
                return false;
            }
        }
        return true;
    }
    announce(driver, core.deadline(), nap);
    false
}

/// Says until when the thread is going to sleep.
fn announce(driver: &Driver, deadline: Option<Time>, nap: Option<Duration>) {
    let now = clock::now();
    let nap_ends = nap.map(|nap| now.as_nanos() + nap.as_nanos());
    let deadline = deadline.map(|at| at.as_nanos());
    let wakes_at = nap_ends.into_iter().chain(deadline).min().unwrap_or(u64::MAX);
    driver.wakes_at.store(wakes_at, Ordering::Relaxed);
    driver.napping.store(nap.is_some(), Ordering::Relaxed);
}

fn sleep(engine: &Engine, nap: Option<Duration>) {
    let driver = &engine.driver;
    let Some(bell) = driver.bell().clone() else { return };
    let mut watched = vec![PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)];
    if nap.is_none() {
        for socket in &engine.sockets {
            // SAFETY: we close the sockets only after this thread has ended; polling a number that
            // the program has closed is answered with POLLNVAL.
            let socket = unsafe { BorrowedFd::borrow_raw(socket.fd) };
            watched.push(PollFd::from_borrowed_fd(socket, PollFlags::IN));
        }
    }
    let left = driver.wakes_at.load(Ordering::Relaxed).saturating_sub(clock::now().as_nanos());
    let left = left.min(LONGEST_SLEEP.as_nanos());
    let timeout = Timespec { tv_sec: 0, tv_nsec: left as i64 };
    let polled = poll(&mut watched, Some(&timeout));
    let is_lost = |one: &PollFd<'_>| one.revents().contains(PollFlags::NVAL);
    // No signal is for this thread; other errors, and descriptors that are gone, would make it spin.
    if polled.is_err() || watched.iter().any(is_lost) {
        std::thread::sleep(LOST_NAP);
    } else if watched[0].revents().contains(PollFlags::IN) {
        let _ = rustix::io::read(&*bell, &mut [0_u8; 8]);
    }
}

/// How to sleep next: `None` looks at the sockets.
fn next_nap(driver: &Driver, nap: Option<Duration>) -> Option<Duration> {
    if !driver.program_is_polling(clock::now()) {
        return None;
    }
    let longer = nap.map_or(SHORTEST_NAP.as_nanos(), |nap| nap.as_nanos() * 2);
    Some(Duration::from_nanos(longer.min(LONGEST_NAP.as_nanos())))
}
