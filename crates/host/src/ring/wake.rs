//! The two wake-up protocols of the ring, free of system calls so that they can be model-checked.
//!
//! Both are Dekker's pattern: each side stores its own word, passes a sequentially consistent
//! fence, then loads the other's word. With both fences at least one side sees the other's store,
//! so either the sleeper notices the work or the worker notices the sleeper. A system call is made
//! only in the second case.
//!
//! *Slots, producer to consumer.* The consumer stores `sleep = 1 + taken`, fences, reads `bell`,
//! then `produced` and `end`; if nothing came it waits while `bell` keeps the value read. The
//! producer stores `produced`, fences, reads `sleep`; to wake it changes `bell` and calls the
//! futex. The value of `sleep` identifies one sleep: after a signal for it the consumer never uses
//! it again, because `produced` has passed it. So one signal per value is enough, and the
//! difference to `produced` is the number of waiting slots, which lets the producer signal late on
//! purpose.
//!
//! *Credits, consumer to producer.* The producer stores `credit_wait = n` (a new number each time),
//! fences, looks for a released slot, and sleeps if there is none. The consumer stores the release
//! word, fences, reads `credit_wait`, and signals once per number.
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
            fn load(&self, order: Ordering) -> $value {
                <$atomic>::load(self, order)
            }
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value, order);
            }
            fn fence(order: Ordering) {
                std::sync::atomic::fence(order);
            }
        }
    };
}
real_word!(AtomicU32, u32);
real_word!(AtomicU64, u64);

/// An acquire load that also works on read-only memory, where Rust promises relaxed loads only.
pub(super) fn load_acquire<T, W: Word<T>>(word: &W) -> T {
    let value = word.load(Relaxed);
    W::fence(Acquire);
    value
}

/// The words of the slot protocol.
#[derive(Debug)]
pub(super) struct SlotWords<'a, A32, A64> {
    pub(super) produced: &'a A64,
    pub(super) bell: &'a A32,
    pub(super) end: &'a A32,
    pub(super) sleep: &'a A64,
}

impl<A32: Word<u32>, A64: Word<u64>> SlotWords<'_, A32, A64> {
    /// Consumer: announces sleep after `taken` slots. `Some(bell)` if nothing came meanwhile: wait
    /// while the bell has this value, then call [`awake`](Self::awake).
    pub(super) fn fall_asleep(&self, taken: u64) -> Option<u32> {
        self.sleep.store(taken.wrapping_add(1), Relaxed);
        A64::fence(SeqCst);
        // The bell is read before the words it announces: a signal between the two then changes the
        // value that the futex compares.
        let bell = load_acquire(self.bell);
        let idle = load_acquire(self.produced) == taken && load_acquire(self.end) == 0;
        if !idle {
            self.awake();
        }
        idle.then_some(bell)
    }

    /// Consumer: awake, needs no signal.
    pub(super) fn awake(&self) {
        self.sleep.store(0, Relaxed);
    }

    /// Producer: makes the descriptors and slots before number `produced` visible.
    pub(super) fn publish(&self, produced: u64) {
        self.produced.store(produced, Release);
    }

    /// Producer: the consumer's sleep word, loaded after everything published so far.
    pub(super) fn sleep_word(&self) -> u64 {
        A64::fence(SeqCst);
        self.sleep.load(Acquire)
    }

    /// Producer: changes the bell; the futex call is the caller's.
    pub(super) fn ring(&self) {
        // Only the producer writes the bell, so load and store need not be one operation.
        self.bell.store(self.bell.load(Relaxed).wrapping_add(1), Release);
    }
}

/// Producer: decides when to signal, once per sleep.
#[derive(Debug, Default)]
pub(super) struct Doorbell {
    /// Sleep word of the last signal.
    signaled_for: u64,
}

/// Reaction to a sleep word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DoorbellAction {
    /// The consumer is awake, has nothing to wake for, or was signalled already.
    Quiet,
    /// It sleeps, and fewer slots are ready than requested.
    Defer,
    /// Wake it.
    Ring,
    /// No correct consumer writes this word.
    Bad,
}

impl Doorbell {
    /// Evaluates sleep word `sleep` with `produced` slots published on a ring of `slots`. Below
    /// `min_ready` waiting slots (0 counts as 1) the consumer is left asleep.
    pub(super) fn judge(
        &mut self,
        sleep: u64,
        produced: u64,
        slots: u32,
        min_ready: u32,
    ) -> DoorbellAction {
        let Some(taken) = sleep.checked_sub(1) else {
            return DoorbellAction::Quiet;
        };
        if sleep == self.signaled_for {
            return DoorbellAction::Quiet;
        }
        // More than the ring holds can never be ready.
        let needed = u64::from(min_ready.clamp(1, slots));
        match produced.checked_sub(taken) {
            Some(0) => DoorbellAction::Quiet,
            Some(waiting) if waiting > u64::from(slots) => DoorbellAction::Bad,
            Some(waiting) if waiting < needed => DoorbellAction::Defer,
            Some(_) => {
                self.signaled_for = sleep;
                DoorbellAction::Ring
            }
            None => DoorbellAction::Bad,
        }
    }
}

/// Producer: announces wait number `wait` (never 0) for credits. The caller checks for a released
/// slot afterwards and sleeps only if there is none.
pub(super) fn announce_credit_wait<W: Word<u64>>(credit_wait: &W, wait: u64) {
    credit_wait.store(wait, Relaxed);
    W::fence(SeqCst);
}

/// Producer: no longer waits for credits.
pub(super) fn end_credit_wait<W: Word<u64>>(credit_wait: &W) {
    credit_wait.store(0, Relaxed);
}

/// Consumer: returns a slot, and yields the number of the producer's wait, 0 for none.
pub(super) fn release<W: Word<u64>>(released: &W, word: u64, credit_wait: &W) -> u64 {
    released.store(word, Release);
    W::fence(SeqCst);
    load_acquire(credit_wait)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_once_per_sleep_and_not_before_enough_is_ready() {
        let mut bell = Doorbell::default();
        assert_eq!(bell.judge(0, 5, 4, 1), DoorbellAction::Quiet, "awake");
        assert_eq!(bell.judge(6, 5, 4, 1), DoorbellAction::Quiet, "nothing new");
        assert_eq!(bell.judge(6, 6, 4, 2), DoorbellAction::Defer);
        assert_eq!(bell.judge(6, 7, 4, 2), DoorbellAction::Ring);
        assert_eq!(bell.judge(6, 8, 4, 2), DoorbellAction::Quiet, "rung for already");
        assert_eq!(bell.judge(9, 9, 4, 0), DoorbellAction::Ring);
        assert_eq!(bell.judge(10, 13, 4, 99), DoorbellAction::Ring, "a full ring is always enough");
    }

    #[test]
    fn impossible_sleep_words_are_told() {
        let mut bell = Doorbell::default();
        for sleep in [u64::MAX, 7, 1] {
            assert_eq!(bell.judge(sleep, 5, 4, 1), DoorbellAction::Bad);
        }
    }
}

/// Interleavings with up to three preemptions, and the reorderings that loom models.
#[cfg(test)]
mod model {
    use super::*;
    use loom::sync::atomic::{AtomicU32 as Loom32, AtomicU64 as Loom64};
    use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    use loom::thread;

    macro_rules! loom_word {
        ($atomic:ty, $value:ty) => {
            impl Word<$value> for $atomic {
                fn load(&self, order: Ordering) -> $value {
                    <$atomic>::load(self, order)
                }
                fn store(&self, value: $value, order: Ordering) {
                    <$atomic>::store(self, value, order);
                }
                fn fence(order: Ordering) {
                    loom::sync::atomic::fence(order);
                }
            }
        };
    }
    loom_word!(Loom32, u32);
    loom_word!(Loom64, u64);

    /// The kernel's part: it compares and goes to sleep under the lock that a waker takes.
    #[derive(Default)]
    struct Sleepers {
        lock: Mutex<()>,
        wake: Condvar,
    }

    impl Sleepers {
        fn lock(&self) -> MutexGuard<'_, ()> {
            self.lock.lock().expect("no model thread panics with the lock held")
        }

        fn wait_while(&self, same: impl Fn() -> bool) {
            let guard = self.lock();
            if same() {
                drop(self.wake.wait(guard));
            }
        }

        fn wake(&self) {
            let _guard = self.lock();
            self.wake.notify_one();
        }
    }

    #[derive(Default)]
    struct Shared {
        produced: Loom64,
        bell: Loom32,
        end: Loom32,
        sleep: Loom64,
        payload: [Loom64; 2],
        futex: Sleepers,
    }

    impl Shared {
        fn words(&self) -> SlotWords<'_, Loom32, Loom64> {
            SlotWords {
                produced: &self.produced,
                bell: &self.bell,
                end: &self.end,
                sleep: &self.sleep,
            }
        }

        fn ring(&self) {
            self.words().ring();
            self.futex.wake();
        }
    }

    /// Takes `count` slots, sleeping without a time limit: a lost wake-up is a deadlock, which loom
    /// reports.
    fn consume(shared: &Shared, count: u64) {
        let words = shared.words();
        let mut taken = 0;
        while taken < count {
            while load_acquire(words.produced) == taken {
                if let Some(bell) = words.fall_asleep(taken) {
                    shared.futex.wait_while(|| shared.bell.load(Relaxed) == bell);
                    words.awake();
                }
            }
            assert_eq!(shared.payload[taken as usize].load(Relaxed), taken + 1);
            taken += 1;
        }
    }

    fn produce(shared: &Shared, count: u64, min_ready: u32) {
        let mut doorbell = Doorbell::default();
        for produced in 1..=count {
            shared.payload[produced as usize - 1].store(produced, Relaxed);
            shared.words().publish(produced);
            let idle = if produced == count { 1 } else { min_ready };
            let sleep = shared.words().sleep_word();
            if doorbell.judge(sleep, produced, 2, idle) == DoorbellAction::Ring {
                shared.ring();
            }
        }
    }

    fn check(body: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(body);
    }

    fn no_lost_slot(min_ready: u32) {
        check(move || {
            let shared = Arc::new(Shared::default());
            let other = Arc::clone(&shared);
            let consumer = thread::spawn(move || consume(&other, 2));
            produce(&shared, 2, min_ready);
            consumer.join().expect("consumer");
        });
    }

    #[test]
    fn no_slot_is_missed() {
        no_lost_slot(1);
    }

    #[test]
    fn no_slot_is_missed_when_rung_late() {
        no_lost_slot(2);
    }

    #[test]
    fn no_end_is_missed() {
        check(|| {
            let shared = Arc::new(Shared::default());
            let other = Arc::clone(&shared);
            let consumer = thread::spawn(move || {
                let words = other.words();
                while load_acquire(words.end) == 0 {
                    if let Some(bell) = words.fall_asleep(0) {
                        other.futex.wait_while(|| other.bell.load(Relaxed) == bell);
                        words.awake();
                    }
                }
            });
            shared.end.store(1, Release);
            shared.ring();
            consumer.join().expect("consumer");
        });
    }

    /// Two views of two slots dropped on two threads; the producer needs both slots, one by one.
    #[test]
    fn no_credit_is_missed() {
        #[derive(Default)]
        struct Credits {
            credit_wait: Loom64,
            released: [Loom64; 2],
            signalled: Loom64,
            eventfd: Loom64,
            poll: Sleepers,
        }
        fn give_back(shared: &Credits, slot: usize) {
            let wait = release(&shared.released[slot], 1, &shared.credit_wait);
            if wait != 0 && shared.signalled.swap(wait, Relaxed) != wait {
                shared.eventfd.fetch_add(1, Release);
                shared.poll.wake();
            }
        }
        check(|| {
            let shared = Arc::new(Credits::default());
            let droppers: Vec<_> = (0..2)
                .map(|slot| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || give_back(&shared, slot))
                })
                .collect();
            let free = || shared.released.iter().filter(|w| w.load(Acquire) == 1).count();
            let mut waits = 0;
            for needed in 1..=2 {
                while free() < needed {
                    waits += 1;
                    announce_credit_wait(&shared.credit_wait, waits);
                    if free() < needed {
                        shared.poll.wait_while(|| shared.eventfd.load(Acquire) == 0);
                        shared.eventfd.store(0, Relaxed);
                    }
                    end_credit_wait(&shared.credit_wait);
                }
            }
            for dropper in droppers {
                dropper.join().expect("dropper");
            }
        });
    }
}
