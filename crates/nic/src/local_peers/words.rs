//! The protocols of the words that local peers share, free of system calls so that they can be
//! model-checked: entries of a segment, announcements of accesses, and sleeps. The FIFO's is in
//! [`fifo`](super::fifo), over the same words.
//!
//! *Entries* change under a sequence number. A reader that finds the same even number before and
//! after has a whole one.
//!
//! *Accesses.* An initiator announces an access, then reads the entries that permit it. Their owner
//! withdraws an entry, then looks for announcements. Between its own store and its look at the
//! other's word each side passes a sequentially consistent fence, so one of them sees the other:
//! the initiator finds no entry, or the owner waits for the end.
//!
//! *Sleeps.* Who is going to sleep says so, then looks for work. Who leaves work looks afterwards
//! whether the other sleeps. With the same fences one of them sees the other. The number of a sleep
//! is one that was never used before, so one ring for each number is enough.
//!
//! Functions are generic over the atomic type because the model checker brings its own.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An atomic word, real or modelled.
pub(super) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    /// A fence of the same memory model.
    fn fence(order: Ordering);
}

macro_rules! real_word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $value {
                <$atomic>::load(self, order)
            }
            #[inline]
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
            #[inline]
            fn fence(order: Ordering) {
                std::sync::atomic::fence(order);
            }
        }
    };
}
real_word!(AtomicU32, u32);
real_word!(AtomicU64, u64);

/// Attempts to read an entry that its owner is changing.
const ATTEMPTS: usize = 4;

/// Words that change together.
#[repr(C, align(64))]
pub(super) struct Entry<W, const N: usize> {
    sequence: W,
    words: [W; N],
}

impl<W: Word<u64>, const N: usize> Entry<W, N> {
    /// Only one thread at a time calls this.
    pub(super) fn write(&self, words: &[u64; N]) {
        let before = self.sequence.load(Relaxed);
        self.sequence.store(before | 1, Relaxed);
        W::fence(Release);
        for (place, word) in self.words.iter().zip(words) {
            place.store(*word, Relaxed);
        }
        self.sequence.store((before | 1).wrapping_add(1), Release);
    }

    /// The first word, which may be of another entry than the others are.
    pub(super) fn first(&self) -> u64 {
        self.words[0].load(Relaxed)
    }

    /// The whole entry; `None` if it changes all the time.
    pub(super) fn read(&self) -> Option<[u64; N]> {
        for _ in 0..ATTEMPTS {
            let before = self.sequence.load(Acquire);
            let words = self.words.each_ref().map(|word| word.load(Relaxed));
            W::fence(Acquire);
            if before & 1 == 0 && self.sequence.load(Relaxed) == before {
                return Some(words);
            }
        }
        None
    }
}

/// Announces an access to the process with this slot. What is read from its segment afterwards is
/// either still valid, or its owner waits for the end of the access. Announcements are counted
/// from 1.
pub(super) fn announce<W: Word<u64>>(busy: &W, slot: u8, count: u64) {
    busy.store(count << 8 | u64::from(slot), Relaxed);
    W::fence(SeqCst);
}

/// The announced access is over.
pub(super) fn retire<W: Word<u64>>(busy: &W) {
    busy.store(0, Release);
}

/// The announcement of an access to the process with this slot, if there is one: of all that have
/// read what the caller has withdrawn before.
pub(super) fn busy_with<W: Word<u64>>(busy: &W, slot: u8) -> Option<u64> {
    W::fence(SeqCst);
    let busy = busy.load(Acquire);
    // Announcements are counted from 1, so this is none in slot 0 either.
    (busy != 0 && busy as u8 == slot).then_some(busy)
}

/// Tells others to wake this process. Whoever does not see it has left its work before, where the
/// caller now finds it.
pub(super) fn fall_asleep<W: Word<u64>>(sleeps: &W) {
    sleeps.store(sleeps.load(Relaxed) | 1, Relaxed);
    W::fence(SeqCst);
}

/// Undoes [`fall_asleep`], if need be.
pub(super) fn wake_up<W: Word<u64>>(sleeps: &W) {
    let now = sleeps.load(Relaxed);
    if now & 1 == 1 {
        sleeps.store(now.wrapping_add(1), Relaxed);
    }
}

/// The sleep of this word's owner, if it sleeps: of all that have not seen what the caller has left
/// for them before.
pub(super) fn sleep<W: Word<u64>>(sleeps: &W) -> Option<u64> {
    W::fence(SeqCst);
    let sleeps = sleeps.load(Acquire);
    (sleeps & 1 == 1).then_some(sleeps)
}

/// The last sleep that one process woke another from.
#[derive(Debug, Default)]
pub(super) struct Rung(u64);

impl Rung {
    /// Whether the other is to be woken from this sleep, which then is done once and for all.
    pub(super) fn must_ring(&mut self, sleep: u64) -> bool {
        std::mem::replace(&mut self.0, sleep) != sleep
    }
}

/// Interleavings with up to three preemptions and the reorderings that loom models; and orderings
/// that are too weak, which it has to find.
#[cfg(test)]
pub(super) mod model {
    use std::marker::PhantomData;
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicU32 as Loom32, AtomicU64 as Loom64, fence};
    use loom::sync::{Condvar, Mutex};
    use loom::thread;

    use super::*;

    /// What an ordering is weakened to.
    pub(in super::super) trait Fault: 'static {
        fn load(order: Ordering) -> Ordering {
            order
        }
        fn store(order: Ordering) -> Ordering {
            order
        }
        fn fences(_order: Ordering) -> bool {
            true
        }
    }

    /// As it is written.
    pub(in super::super) struct Exact;
    impl Fault for Exact {}

    /// Loads that acquire nothing.
    pub(in super::super) struct LoadsRelaxed;
    impl Fault for LoadsRelaxed {
        fn load(_: Ordering) -> Ordering {
            Relaxed
        }
    }

    /// Stores that release nothing.
    pub(in super::super) struct StoresRelaxed;
    impl Fault for StoresRelaxed {
        fn store(_: Ordering) -> Ordering {
            Relaxed
        }
    }

    /// No fence of one kind.
    pub(in super::super) struct Without<const FENCE: u8>;
    pub(in super::super) const SEQ_CST: u8 = 0;
    pub(in super::super) const ACQUIRE: u8 = 1;
    pub(in super::super) const RELEASE: u8 = 2;
    impl<const FENCE: u8> Fault for Without<FENCE> {
        fn fences(order: Ordering) -> bool {
            order != [SeqCst, Acquire, Release][usize::from(FENCE)]
        }
    }

    /// A word of the model checker with a fault.
    pub(in super::super) struct Modelled<A, F>(A, PhantomData<F>);

    impl<A: Default, F> Default for Modelled<A, F> {
        fn default() -> Self {
            Modelled(A::default(), PhantomData)
        }
    }

    macro_rules! loom_word {
        ($atomic:ty, $value:ty) => {
            impl<F: Fault> Word<$value> for Modelled<$atomic, F> {
                fn load(&self, order: Ordering) -> $value {
                    self.0.load(F::load(order))
                }
                fn store(&self, value: $value, order: Ordering) {
                    self.0.store(value, F::store(order));
                }
                fn fence(order: Ordering) {
                    if F::fences(order) {
                        fence(order);
                    }
                }
            }
        };
    }
    loom_word!(Loom32, u32);
    loom_word!(Loom64, u64);

    pub(in super::super) type Modelled32<F> = Modelled<Loom32, F>;
    pub(in super::super) type Modelled64<F> = Modelled<Loom64, F>;

    pub(in super::super) fn check(body: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(body);
    }

    impl<F> Default for Entry<Modelled64<F>, 2> {
        fn default() -> Self {
            Entry { sequence: Default::default(), words: Default::default() }
        }
    }

    /// An owner changes an entry twice while another reads it.
    fn entries_are_whole<F: Fault>() {
        check(|| {
            let entry = Arc::new(Entry::<Modelled64<F>, 2>::default());
            let owner = Arc::clone(&entry);
            let writing = thread::spawn(move || [1, 2].map(|word| owner.write(&[word, word])));
            if let Some([first, second]) = entry.read() {
                assert_eq!(first, second, "half an entry");
            }
            writing.join().expect("no panic");
            assert_eq!(entry.read(), Some([2, 2]));
        });
    }

    #[test]
    fn an_entry_is_read_whole_or_not_at_all() {
        entries_are_whole::<Exact>();
    }

    #[test]
    #[should_panic(expected = "half an entry")]
    fn seeded_the_new_entry_is_not_released() {
        entries_are_whole::<StoresRelaxed>();
    }

    #[test]
    #[should_panic(expected = "half an entry")]
    fn seeded_the_entry_is_not_acquired() {
        entries_are_whole::<LoadsRelaxed>();
    }

    #[test]
    #[should_panic(expected = "half an entry")]
    fn seeded_an_entry_changes_before_its_number() {
        entries_are_whole::<Without<RELEASE>>();
    }

    #[test]
    #[should_panic(expected = "half an entry")]
    fn seeded_the_second_look_comes_first() {
        entries_are_whole::<Without<ACQUIRE>>();
    }

    const SLOT: u8 = 7;

    /// An initiator accesses memory that its owner withdraws and frees.
    fn no_access_outlives_its_entry<F: Fault>(announces_first: bool, frees_late: bool) {
        struct Shared<F> {
            busy: Modelled64<F>,
            entry: Entry<Modelled64<F>, 2>,
            memory: loom::cell::UnsafeCell<u64>,
        }
        // SAFETY: the protocol keeps the two threads apart, which is what the model checks.
        unsafe impl<F> Sync for Shared<F> {}
        // SAFETY: words and a number.
        unsafe impl<F> Send for Shared<F> {}
        check(move || {
            let shared = Arc::new(Shared::<F> {
                busy: Modelled64::default(),
                entry: Entry::default(),
                memory: loom::cell::UnsafeCell::new(1),
            });
            shared.entry.write(&[1, 1]);
            let other = Arc::clone(&shared);
            let initiator = thread::spawn(move || {
                if announces_first {
                    announce(&other.busy, SLOT, 1);
                }
                if other.entry.read().is_some_and(|entry| entry[0] == 1) {
                    // SAFETY: only read, and `loom` reports a write at the same time.
                    let read = other.memory.with(|memory| unsafe { *memory });
                    assert_eq!(read, 1, "accessed after the end");
                }
                if !announces_first {
                    announce(&other.busy, SLOT, 1);
                }
                retire(&other.busy);
            });
            shared.entry.write(&[0, 0]);
            if frees_late && let Some(since) = busy_with(&shared.busy, SLOT) {
                while busy_with(&shared.busy, SLOT) == Some(since) {
                    thread::yield_now();
                }
            }
            // SAFETY: `loom` reports an access at the same time.
            shared.memory.with_mut(|memory| unsafe { *memory = 0 });
            initiator.join().expect("no panic");
        });
    }

    #[test]
    fn who_withdraws_an_entry_waits_for_whoever_has_seen_it() {
        no_access_outlives_its_entry::<Exact>(true, true);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeded_an_access_is_announced_after_it() {
        no_access_outlives_its_entry::<Exact>(false, true);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeded_nobody_waits_for_the_end_of_accesses() {
        no_access_outlives_its_entry::<Exact>(true, false);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeded_announcement_and_withdrawal_without_fences() {
        no_access_outlives_its_entry::<Without<SEQ_CST>>(true, true);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeded_the_end_of_an_access_is_not_released() {
        no_access_outlives_its_entry::<StoresRelaxed>(true, true);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn seeded_the_end_of_an_access_is_not_acquired() {
        no_access_outlives_its_entry::<LoadsRelaxed>(true, true);
    }

    /// The sockets of a process and the descriptor that its own threads wake its progress thread
    /// by.
    #[derive(Default)]
    struct Sockets {
        /// Datagrams, and wakes by the process itself.
        readable: Mutex<(u64, u64)>,
        changed: Condvar,
    }

    impl Sockets {
        fn ring(&self) {
            self.readable.lock().expect("no panic").0 += 1;
            self.changed.notify_one();
        }

        fn wake(&self) {
            self.readable.lock().expect("no panic").1 += 1;
            self.changed.notify_one();
        }

        fn poll(&self) {
            let mut readable = self.readable.lock().expect("no panic");
            while *readable == (0, 0) {
                readable = self.changed.wait(readable).expect("no panic");
            }
            readable.1 = 0;
        }

        /// Reads the datagrams; returns whether there were any.
        fn receive(&self) -> bool {
            std::mem::take(&mut self.readable.lock().expect("no panic").0) > 0
        }
    }

    /// Where a seeded fault is.
    #[derive(Clone, Copy, PartialEq)]
    enum Seeded {
        Nothing,
        LooksBeforeItSays,
        AsksBeforeItLeaves,
        OneRingForAllSleeps,
        KeepsTheRing,
    }

    /// A process with two pieces of work to do, whose progress thread sleeps without a time limit.
    struct Process<F> {
        sleeps: Modelled64<F>,
        /// Work left.
        left: Modelled64<F>,
        sockets: Sockets,
        /// Work done, under the engine's lock.
        done: Mutex<u64>,
    }

    impl<F: Fault> Process<F> {
        fn has_work(&self, done: u64) -> bool {
            self.left.load(Acquire) != done
        }

        fn progress(&self, seeded: Seeded) {
            loop {
                let mut done = self.done.lock().expect("no panic");
                self.sockets.receive();
                *done = self.left.load(Acquire);
                if *done == 2 {
                    break;
                }
                let looked = self.has_work(*done);
                fall_asleep(&self.sleeps);
                let has_work = match seeded {
                    Seeded::LooksBeforeItSays => looked,
                    _ => self.has_work(*done),
                };
                drop(done);
                if !has_work {
                    self.sockets.poll();
                }
                let _core = self.done.lock().expect("no panic");
                wake_up(&self.sleeps);
            }
        }

        /// A turn of a thread of the program, which passes on a ring that it has taken.
        fn program(&self, seeded: Seeded) {
            let mut done = self.done.lock().expect("no panic");
            *done = self.left.load(Acquire);
            let is_rung = self.sockets.receive();
            let asleep = sleep(&self.sleeps).is_some();
            if is_rung && asleep && seeded != Seeded::KeepsTheRing {
                self.sockets.wake();
            }
            // The last piece may be done here: the thread that sleeps has nothing to look for then.
            if *done == 2 {
                self.sockets.wake();
            }
        }

        fn leave(&self, rung: &mut Rung, work: u64, seeded: Seeded) {
            let must_ring = match seeded {
                Seeded::AsksBeforeItLeaves => {
                    let must = sleep(&self.sleeps).is_some_and(|sleep| rung.must_ring(sleep));
                    self.left.store(work, Release);
                    must
                }
                Seeded::OneRingForAllSleeps => {
                    self.left.store(work, Release);
                    sleep(&self.sleeps).is_some_and(|_| rung.must_ring(1))
                }
                _ => {
                    self.left.store(work, Release);
                    sleep(&self.sleeps).is_some_and(|sleep| rung.must_ring(sleep))
                }
            };
            if must_ring {
                self.sockets.ring();
            }
        }
    }

    /// A lost wake-up is a deadlock. A thread of the program takes a turn meanwhile, if there is
    /// one.
    fn all_work_is_done<F: Fault>(program_turns: bool, seeded: Seeded) {
        check(move || {
            let process = Arc::new(Process::<F> {
                sleeps: Modelled64::default(),
                left: Modelled64::default(),
                sockets: Sockets::default(),
                done: Mutex::new(0),
            });
            let progress = Arc::clone(&process);
            let mut threads = vec![thread::spawn(move || progress.progress(seeded))];
            if program_turns {
                let program = Arc::clone(&process);
                threads.push(thread::spawn(move || program.program(seeded)));
            }
            let mut rung = Rung::default();
            (1..=2).for_each(|work| process.leave(&mut rung, work, seeded));
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }

    #[test]
    fn a_sleeper_is_woken_for_all_that_is_left_for_it() {
        all_work_is_done::<Exact>(false, Seeded::Nothing);
    }

    #[test]
    fn a_ring_that_a_thread_of_the_program_takes_is_passed_on() {
        all_work_is_done::<Exact>(true, Seeded::Nothing);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn seeded_a_ring_is_not_passed_on() {
        all_work_is_done::<Exact>(true, Seeded::KeepsTheRing);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn seeded_the_look_comes_before_the_sleep() {
        all_work_is_done::<Exact>(false, Seeded::LooksBeforeItSays);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn seeded_work_is_left_after_the_look_at_the_sleeper() {
        all_work_is_done::<Exact>(false, Seeded::AsksBeforeItLeaves);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn seeded_one_ring_is_for_all_sleeps() {
        all_work_is_done::<Exact>(false, Seeded::OneRingForAllSleeps);
    }

    #[test]
    #[should_panic(expected = "deadlock")]
    fn seeded_sleeps_without_fences() {
        all_work_is_done::<Without<SEQ_CST>>(false, Seeded::Nothing);
    }
}
