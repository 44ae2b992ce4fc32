//! The progress thread: serves the peer while the program is not polling.
//!
//! A program that polls takes turns itself, and a second thread would only contend for the lock. A
//! program that sleeps or computes needs the thread: the peer's WRITEs and READs have to be served,
//! and lost packets retransmitted. The thread distinguishes the two by the time of the program's
//! last turn, and by what that turn found ([`POLLING_AWAY`], [`WORKING_AWAY`]), or that it yielded
//! since ([`YIELDING_AWAY`]):
//!
//! - *watching*: it sleeps on the sockets and takes a turn as soon as a packet arrives; where
//!   packets of local peers may follow, it looks for them a little longer before it sleeps again
//!   ([`LINGER`]);
//! - *backing off*: the program polls, or lets others run between two polls, so it sleeps without
//!   watching the sockets, each time twice as long up to [`LONGEST_NAP`], and watches again once
//!   the program is away. A program that arms a completion queue, or polls an armed one in vain,
//!   ends this at once: it is about to sleep.
//!
//! While it watches, it wakes for the endpoint's next deadline, which program threads bring forward
//! when they post ([`Progress::note_deadline`]), and for packets of local peers in shared memory;
//! while it backs off, the program's own turns see to both. It wakes periodically in any case: a
//! program that has closed the thread's descriptors cannot wake it.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nic::clock;
use nic::driver::{Application, Driver, Turn};
use nic::waiter::Waker;
use roce::{Duration, Time};
use rustix::io::Errno;

use super::core::Acks;
use super::descriptor::Watched;
use super::signals::SignalsBlocked;
use super::{FULL_TURN, Listener, SharedDevice};

/// A program that polled a queue in vain is away when it has not polled again for this long. It
/// will most likely poll again: more often than not it just does not have the processor, which a
/// turn of this thread would keep from it.
const POLLING_AWAY: Duration = Duration::from_micros(100);

/// A program that lets others run is away when it has not come back for this long, about a slice of
/// one that computes. A peer with the shortest timeouts that make sense waits for longer than this.
const YIELDING_AWAY: Duration = Duration::from_millis(4);

/// A program whose last turn did something is away when it has taken no other for this long: it may
/// be computing, or polling memory that a peer writes.
const WORKING_AWAY: Duration = Duration::from_micros(20);

/// First sleep without watching the sockets.
const SHORTEST_NAP: Duration = Duration::from_micros(20);

/// Longest one: the extra delay that a program may see once when it stops polling.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// How long the thread looks for more after it has done something. Local peers need not wake it
/// meanwhile: a wake-up costs both sides more than a message of 64 KiB.
const LINGER: Duration = Duration::from_micros(20);

/// The same after many packets: a local peer takes as long to fill its FIFO with the next ones.
const LONG_LINGER: Duration = Duration::from_micros(60);

/// Packets of a turn that are many.
const MANY: usize = 16;

/// A yield that takes longer was the slice of a process that computes, not a local peer's work on a
/// message.
const COMPUTED: Duration = Duration::from_micros(500);

/// How long the thread does not linger after that: it sleeps, because a thread that is woken comes
/// before those that compute, and one that yields after them.
const NO_LINGER: Duration = Duration::from_millis(100);

/// Turns in a row that are left to a program thread that has the lock: it may only be posting.
const MOST_LEFT: u32 = 4;

/// State shared by program threads and the progress thread.
pub(super) struct Progress {
    /// `None` once the thread has ended.
    waker: Mutex<Option<ManuallyDrop<Waker>>>,
    /// The driver's descriptors.
    fds: Vec<Watched>,
    /// When the program counts as away if it takes no other turn, in nanoseconds.
    away_at: AtomicU64,
    /// When the thread will wake by timeout; 0 while it is awake, `u64::MAX` for never.
    wakes_at: AtomicU64,
    /// The thread is not watching the sockets.
    napping: AtomicBool,
    stop: AtomicBool,
    thread: Mutex<Option<JoinHandle<ManuallyDrop<Driver>>>>,
}

impl Progress {
    /// For the thread that will run `driver`.
    pub(super) fn new(driver: &Driver) -> Result<Progress, Errno> {
        Ok(Progress {
            waker: Mutex::new(Some(ManuallyDrop::new(driver.waker()))),
            fds: driver.fds().into_iter().map(Watched::new).collect::<Result<_, _>>()?,
            away_at: AtomicU64::new(0),
            wakes_at: AtomicU64::new(0),
            napping: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            thread: Mutex::new(None),
        })
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = &*self.waker() {
            waker.wake();
        }
    }

    fn waker(&self) -> MutexGuard<'_, Option<ManuallyDrop<Waker>>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread of the program took a turn.
    pub(super) fn note_program_turn(&self, now: Time, is_idle: bool) {
        let away = if is_idle { POLLING_AWAY } else { WORKING_AWAY };
        self.away_at.store((now + away).as_nanos(), Ordering::Relaxed);
    }

    /// A thread of the program that polls is about to yield. When it has a processor again, it
    /// notes a turn.
    pub(super) fn note_yield(&self, now: Time) {
        self.away_at.store((now + YIELDING_AWAY).as_nanos(), Ordering::Relaxed);
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
        self.away_at.store(0, Ordering::Relaxed);
        if self.napping.swap(false, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Ends the thread and waits for it.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A panic of the thread has been printed already.
        let driver = thread.and_then(|thread| thread.join().ok());
        let waker = self.waker().take();
        if self.fds.iter().all(Watched::is_there) {
            // Otherwise the program has closed them, and their numbers may have been reused.
            driver.map(ManuallyDrop::into_inner);
            waker.map(ManuallyDrop::into_inner);
        }
    }

    /// Whether the thread has left everything to the program, deadlines too.
    pub(super) fn is_napping(&self) -> bool {
        self.napping.load(Ordering::Relaxed)
    }

    fn program_is_polling(&self, now: Time) -> bool {
        now.as_nanos() < self.away_at.load(Ordering::Relaxed)
    }
}

/// Starts the thread. It blocks all signals: those are for the program's threads.
pub(super) fn spawn<L: Listener>(
    device: &Arc<SharedDevice<L>>,
    driver: Driver,
) -> Result<(), Errno> {
    let mut served = Served {
        device: Arc::clone(device),
        nap: None,
        lingers_from: Time::ZERO,
        lingers_until: Time::ZERO,
        left: 0,
    };
    let driver = ManuallyDrop::new(driver);
    let blocked = SignalsBlocked::all();
    let thread = std::thread::Builder::new().name("dquant-verbs".to_owned());
    let made = thread.spawn(move || {
        // Without this the kernel rounds short sleeps up by 50 us.
        // SAFETY: sets an attribute of the calling thread.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_u64, 0_u64, 0_u64, 0_u64) };
        driver.run(&mut served);
        driver
    });
    drop(blocked);
    let thread = made.map_err(|_| Errno::AGAIN)?;
    *device.progress.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    Ok(())
}

/// The progress thread's view of a device.
struct Served<L: Listener> {
    device: Arc<SharedDevice<L>>,
    /// How long the thread sleeps without watching the sockets; `None` while it watches them.
    nap: Option<Duration>,
    /// From when until when it may linger.
    lingers_from: Time,
    lingers_until: Time,
    /// Turns in a row that were left to a thread of the program, because it had the lock.
    left: u32,
}

impl<L: Listener> Served<L> {
    /// It has just done something.
    fn may_linger(&self, now: Time) -> bool {
        (self.lingers_from..self.lingers_until).contains(&now)
    }

    /// Lets whoever has been woken by what was done have this processor.
    fn linger(&mut self) {
        let begin = clock::now();
        std::thread::yield_now();
        let end = clock::now();
        if end.since(begin) > COMPUTED {
            self.lingers_from = end + NO_LINGER;
        }
    }
}

impl<L: Listener> Application for Served<L> {
    /// A thread of the program may want the lock.
    const SPIN: Duration = Duration::ZERO;

    fn turn(&mut self, now: Time) -> Turn {
        let progress = &self.device.progress;
        if progress.stop.load(Ordering::Relaxed) {
            return Turn::Stop;
        }
        self.nap = next_nap(progress, now, self.nap);
        if let Some(nap) = self.nap {
            return progress.nap_until(now + nap);
        }
        // Often a packet that the program sends wakes this thread on the same processor in the
        // middle of the call. To wait for the lock would be two switches for nothing.
        let free = self.device.try_lock();
        if free.is_none() && self.left < MOST_LEFT {
            self.left += 1;
            if self.may_linger(now) {
                drop(free);
                self.linger();
                return Turn::Busy;
            }
            self.nap = Some(SHORTEST_NAP);
            progress.note_program_turn(now, true);
            return progress.nap_until(now + SHORTEST_NAP);
        }
        // Declared before the lock, so it is dropped after it.
        let signals;
        let mut core = free.unwrap_or_else(|| self.device.lock());
        self.left = 0;
        progress.wakes_at.store(0, Ordering::Relaxed);
        let reads_fifos = core.reads_fifos();
        // What has waited once leaves now.
        let acks = if core.gather.waits() { Acks::Leave } else { Acks::WaitForProgram };
        core.gather.sent(now);
        core.signals = Some(Vec::new());
        let done = core.turn(now, acks);
        signals = core.signals.take();
        // This thread is awake.
        core.rung = false;
        if done.received > 0 {
            core.gather.received();
        }
        if done.received > 0 || done.worked || done.sent > 0 {
            // It may have taken longer than the thread lingers.
            let end = clock::now();
            let linger = if done.received >= MANY { LONG_LINGER } else { LINGER };
            self.lingers_until = self.lingers_until.max(end + linger);
        }
        let waits = core.gather.waits();
        let is_busy = done.received > 0 || done.worked || done.sent >= FULL_TURN;
        if is_busy && (reads_fifos || !waits) {
            return Turn::Busy;
        }
        if reads_fifos && self.may_linger(now) {
            drop(core);
            drop(signals);
            self.linger();
            return Turn::Busy;
        }
        let late = waits.then(|| core.gather.late_at());
        progress.sleep_until(core.deadline().into_iter().chain(late).min())
    }

    /// While the program polls, it finds the packets of local peers; in other sleeps they wake the
    /// thread.
    fn prepare_sleep(&mut self) -> bool {
        self.nap.is_some() || self.device.lock().fall_asleep()
    }

    fn woken(&mut self) {
        self.device.wake_up();
    }

    fn has_work(&mut self) -> bool {
        self.device.lock().has_work()
    }

    fn note_rescue(&mut self) {
        self.device.lock().note_rescue();
    }
}

impl Progress {
    /// The thread leaves everything to the program, which polls: also deadlines, and without the
    /// lock. A program that stops polling waits for the end of the nap once.
    fn nap_until(&self, until: Time) -> Turn {
        self.wakes_at.store(0, Ordering::Relaxed);
        self.napping.store(true, Ordering::Relaxed);
        Turn::Nap(until)
    }

    /// Publishes until when the thread is going to sleep. Called with the core locked.
    fn sleep_until(&self, deadline: Option<Time>) -> Turn {
        self.wakes_at.store(deadline.map_or(u64::MAX, Time::as_nanos), Ordering::Relaxed);
        self.napping.store(false, Ordering::Relaxed);
        Turn::Idle(deadline)
    }
}

/// How to sleep next: `None` watches the sockets.
fn next_nap(progress: &Progress, now: Time, nap: Option<Duration>) -> Option<Duration> {
    if !progress.program_is_polling(now) {
        return None;
    }
    let longer = nap.map_or(SHORTEST_NAP.as_nanos(), |nap| nap.as_nanos() * 2);
    Some(Duration::from_nanos(longer.min(LONGEST_NAP.as_nanos())))
}
