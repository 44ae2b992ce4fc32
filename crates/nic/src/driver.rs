//! The one loop of every thread that moves packets: targets, DPUs and the progress thread of
//! libibverbs.
//!
//! The application receives, carries out what is due, does its own work and sends in each turn
//! ([`roce::world::turn`] keeps that order). The driver decides when the next turn comes: at once
//! while there is work, and for a short while after ([`Application::SPIN`]); then when a watched
//! descriptor is readable, a [`Waker`] is used, or the deadline of the application has passed.
//!
//! A sleep watches any number of descriptors, so streams and sessions are not bounded here.
//! Protocols, commands and counters do not belong here.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use roce::{Duration, Time};

use crate::clock;
use crate::ready::ReadySet;
use crate::waiter::{Waiter, Waker};

/// Longest sleep, so that a lost wake-up does no lasting harm. One that it ends is a fault, and
/// counted ([`Application::note_rescue`]).
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// Work that has been there for this long at the end of a sleep was not announced. A process that
/// makes work may lose its processor before it announces it; it has it back by then.
const OVERDUE: Duration = Duration::from_millis(20);

/// What a program tells people of a rescue.
pub const RESCUED: &str = "a wake-up was lost: work has waited for the periodic look of a sleeping thread; please report this";

/// Sleep when descriptors cannot be waited for: the kernel lacks memory, or the program closed
/// them.
const BROKEN_SLEEP: std::time::Duration = std::time::Duration::from_millis(10);

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// There may be more to do at once.
    Busy,
    /// There is nothing to do before this time, unless a descriptor becomes readable or a waker is
    /// used.
    Idle(Option<Time>),
    /// There is nothing to do before this time, and another thread handles the descriptors: they
    /// are not watched.
    Nap(Time),
    /// The application ends.
    Stop,
}

/// What a driver drives.
pub trait Application {
    /// How long to spin without work before a sleep. A wake-up costs about 30 µs of latency and 5
    /// µs of CPU, so a little spinning pays and a lot does not. Zero where other threads poll.
    const SPIN: Duration;

    /// One turn.
    fn turn(&mut self, now: Time) -> Turn;

    /// Called before a sleep: the last chance to announce it to other threads and to notice work
    /// that they left meanwhile. `false`: take another turn.
    fn prepare_sleep(&mut self) -> bool;

    /// Called when a prepared sleep is over or did not begin. A turn follows.
    fn woken(&mut self);

    /// Asked during a sleep that nothing has ended: whether there is work in shared memory that its
    /// maker should have announced by a descriptor or a waker. Does none of it.
    fn has_work(&mut self) -> bool;

    /// A sleep has ended by time although there was work, and had been for 20 ms: a wake-up was
    /// lost. The program counts and reports it.
    fn note_rescue(&mut self);
}

/// See the module's text.
#[derive(Debug)]
pub struct Driver {
    waiter: Waiter,
    watched: ReadySet,
}

impl Driver {
    /// A driver that watches no descriptors yet.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<Driver> {
        Ok(Driver { waiter: Waiter::new()?, watched: ReadySet::new()? })
    }

    /// Ends the sleep of the driver, or its next one, from any thread.
    pub fn waker(&self) -> Waker {
        self.waiter.waker()
    }

    /// The descriptors that end a sleep when they are readable. The application may keep a handle,
    /// and add and remove descriptors as streams open and close.
    pub fn watched(&self) -> &ReadySet {
        &self.watched
    }

    /// The driver's own descriptors.
    pub fn fds(&self) -> [BorrowedFd<'_>; 2] {
        [self.waiter.as_fd(), self.watched.as_fd()]
    }

    /// Takes turns until the application stops.
    pub fn run<A: Application>(&self, application: &mut A) {
        let mut idle_since = None;
        loop {
            let now = clock::now();
            let (until, watch) = match application.turn(now) {
                Turn::Stop => return,
                Turn::Busy => {
                    idle_since = None;
                    continue;
                }
                Turn::Idle(_) if now.since(*idle_since.get_or_insert(now)) < A::SPIN => {
                    std::hint::spin_loop();
                    continue;
                }
                Turn::Idle(until) => (until, true),
                Turn::Nap(until) => (Some(until), false),
            };
            self.sleep(application, until, watch);
            idle_since = None;
        }
    }

    fn sleep<A: Application>(&self, application: &mut A, until: Option<Time>, watch: bool) {
        if application.prepare_sleep() {
            let left = until.map_or(LONGEST_SLEEP, |at| at.since(clock::now()).min(LONGEST_SLEEP));
            if watch && left > OVERDUE {
                self.sleep_in_two(application, left);
            } else {
                self.wait(watch, left);
            }
        }
        application.woken();
    }

    /// A sleep at whose end one can tell that work which is there was not announced: it was there
    /// some time before.
    fn sleep_in_two<A: Application>(&self, application: &mut A, left: Duration) {
        let first = Duration::from_nanos(left.as_nanos() - OVERDUE.as_nanos());
        if !self.wait(true, first) {
            return;
        }
        let had_work = application.has_work();
        if self.wait(true, OVERDUE) && had_work && application.has_work() {
            application.note_rescue();
        }
    }

    /// Sleeps; returns whether it was the time that ended it.
    fn wait(&self, watch: bool, left: Duration) -> bool {
        let watched = watch.then(|| self.watched.as_fd());
        match self.waiter.wait(watched.as_slice(), Some(left)) {
            Ok(woken) if woken.is_broken => std::thread::sleep(BROKEN_SLEEP),
            Ok(woken) if woken.ready != 0 => {
                // Edges would end every sleep from now on.
                if self.watched.has_edges() {
                    drop(self.watched.take());
                }
            }
            Ok(woken) => return !woken.by_waker,
            Err(_) => std::thread::sleep(BROKEN_SLEEP),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::write;

    use super::*;

    /// Follows its script, then stops, and counts the calls it receives.
    #[derive(Default)]
    struct Scripted {
        turns: Vec<Turn>,
        taken: usize,
        refuses_sleep: bool,
        prepared: u32,
        /// When there is work that nobody announces.
        works: Option<(Time, Time)>,
        rescues: u32,
    }

    impl Application for Scripted {
        const SPIN: Duration = Duration::from_micros(5);

        fn turn(&mut self, _now: Time) -> Turn {
            let turn = self.turns.get(self.taken).copied().unwrap_or(Turn::Stop);
            // Idle turns are spun through before a sleep comes.
            if !matches!(turn, Turn::Idle(_)) {
                self.taken += 1;
            }
            turn
        }

        fn prepare_sleep(&mut self) -> bool {
            self.prepared += 1;
            !self.refuses_sleep
        }

        fn woken(&mut self) {
            self.taken += 1;
        }

        fn has_work(&mut self) -> bool {
            let now = clock::now();
            self.works.is_some_and(|(from, to)| (from..to).contains(&now))
        }

        fn note_rescue(&mut self) {
            self.rescues += 1;
        }
    }

    fn run(driver: &Driver, turns: &[Turn]) -> Scripted {
        let mut app = Scripted { turns: turns.to_vec(), ..Scripted::default() };
        driver.run(&mut app);
        app
    }

    /// Whether a sleep without any event ends at once.
    fn wakes_at_once(driver: &Driver) -> bool {
        let began = clock::now();
        run(driver, &[Turn::Idle(None)]);
        clock::now().since(began) < LONGEST_SLEEP
    }

    #[test]
    fn busy_turns_come_without_sleep_and_idle_ones_end_in_one() {
        let driver = Driver::new().expect("descriptors");
        let soon = Some(clock::now() + Duration::from_millis(1));
        let app = run(&driver, &[Turn::Busy, Turn::Busy, Turn::Idle(soon), Turn::Busy]);
        assert_eq!((app.prepared, app.taken), (1, 5));
    }

    #[test]
    fn a_sleep_that_is_refused_is_followed_by_a_turn() {
        let driver = Driver::new().expect("descriptors");
        let turns = vec![Turn::Idle(None), Turn::Idle(None)];
        let mut app = Scripted { turns, refuses_sleep: true, ..Scripted::default() };
        driver.run(&mut app);
        assert_eq!(app.prepared, 2);
    }

    /// The rescues of a sleep during which there is work from a time to another, counted from its
    /// beginning.
    fn rescues(driver: &Driver, [from, to]: [u64; 2], until: Option<Duration>) -> u32 {
        let now = clock::now();
        let works = Some((now + Duration::from_millis(from), now + Duration::from_millis(to)));
        let turns = vec![Turn::Idle(until.map(|after| now + after))];
        let mut app = Scripted { turns, works, ..Scripted::default() };
        driver.run(&mut app);
        app.rescues
    }

    #[test]
    fn work_that_a_sleeper_finds_late_is_a_rescue_unless_it_was_announced_or_has_just_come() {
        const LONG: u64 = 1 << 30;
        let driver = Driver::new().expect("descriptors");
        assert_eq!(rescues(&driver, [0, LONG], None), 1);
        assert_eq!(rescues(&driver, [LONG, 2 * LONG], None), 0, "there was none");
        let later = Some(Duration::from_millis(50));
        assert_eq!(rescues(&driver, [0, LONG], later), 1, "a deadline hides nothing");
        let soon = Some(Duration::from_millis(5));
        assert_eq!(rescues(&driver, [0, LONG], soon), 0, "it may have come just now");
        driver.waker().wake();
        assert_eq!(rescues(&driver, [0, LONG], None), 0, "a waker was used");
        let readable = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
        driver.watched().add(readable.as_fd(), 0).expect("watched");
        assert_eq!(rescues(&driver, [0, LONG], None), 0, "a descriptor was readable");
    }

    #[test]
    fn any_of_many_descriptors_ends_a_sleep() {
        let driver = Driver::new().expect("descriptors");
        let fds: Vec<_> =
            (0..100).map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd")).collect();
        for (name, fd) in (0..).zip(&fds) {
            driver.watched().add(fd.as_fd(), name).expect("watched");
        }
        write(&fds[70], &1_u64.to_ne_bytes()).expect("eventfd");
        assert!(wakes_at_once(&driver));
        driver.watched().remove(fds[70].as_fd()).expect("it was added");
        assert!(!wakes_at_once(&driver));
    }

    #[test]
    fn an_edge_ends_one_sleep_and_the_next_edge_another() {
        let driver = Driver::new().expect("descriptors");
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        driver.watched().add_edges(fd.as_fd(), 0).expect("watched");
        for _ in 0..2 {
            write(&fd, &1_u64.to_ne_bytes()).expect("eventfd");
            assert!(wakes_at_once(&driver));
            assert!(!wakes_at_once(&driver), "it stays readable, but nothing is new");
        }
    }

    #[test]
    fn a_nap_looks_at_no_descriptor_but_a_waker_ends_it() {
        let driver = Driver::new().expect("descriptors");
        let readable = eventfd(1, EventfdFlags::CLOEXEC).expect("eventfd");
        driver.watched().add(readable.as_fd(), 7).expect("watched");
        let until = clock::now() + Duration::from_millis(50);
        run(&driver, &[Turn::Nap(until)]);
        assert!(clock::now() >= until);

        let (waker, woken) = (driver.waker(), Arc::new(AtomicU32::new(0)));
        let seen = Arc::clone(&woken);
        let thread = std::thread::spawn(move || {
            seen.store(1, Ordering::SeqCst);
            waker.wake();
        });
        let naps: Vec<_> = (0..600).map(|_| Turn::Nap(clock::now() + LONGEST_SLEEP)).collect();
        // Naps go on until the waker was used, and one ends with it.
        while woken.load(Ordering::SeqCst) == 0 {
            run(&driver, &naps[..1]);
        }
        thread.join().expect("thread");
    }
}
