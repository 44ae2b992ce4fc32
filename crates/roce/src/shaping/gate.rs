//! Transmission gates: when the exchanges of a DSCP may begin.
//!
//! Jobs that compute and exchange in turn can share a link without contending for it. A gate lets
//! an exchange of a job begin at `shift + n * period` of Unix time, or up to the gate's tolerance
//! later; one that is later waits for the next time.
//!
//! - An exchange lasts until the DSCP was silent for the gate's quiet time. It is not cut, however
//!   long it lasts.
//! - What a host receives is activity, too: a peer has begun in time. So acknowledgements and
//!   responses are never held back, and clocks may differ by a little.
//! - The first packet of an exchange that is held back dates it, so the counters say how long
//!   exchanges have waited.
//! - A job whose period is longer than its gate's would wait in every iteration. [`Punctuality`]
//!   tells such a job from one that was late by chance; its gate is then dropped.

use super::word::Word;
use crate::time::{Duration, Time};

/// The least quiet time of a gate: well above a round trip and the wake-up of a thread, so that no
/// exchange is cut.
pub const LEAST_QUIET: Duration = Duration::from_millis(1);

/// A gate whose clock was not read for so long is open: nobody would notice that it does harm.
pub const GATES_LAST: Duration = Duration::from_millis(60_000);

/// A job is judged by at least so many exchanges: the first one, and single ones that a busy
/// machine made late, do not decide.
pub const JUDGED_EXCHANGES: u64 = 32;

/// Exchanges that wait for more than this part of their period, on average, show that the job does
/// not keep it. Periods that were lengthened to fit each other, and a job's own variation, are
/// below that.
const MOST_WAIT_PARTS: u64 = 10;

/// When the exchanges of a DSCP may begin: at `shift_ns + n * period_ns` of Unix time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransmissionGate {
    /// From one time to the next, in nanoseconds; not 0.
    pub period_ns: u64,
    /// When that is, in nanoseconds.
    pub shift_ns: u64,
    /// By how much an exchange may begin later.
    pub tolerance_ns: u64,
    /// An exchange has ended when the DSCP was neither sent nor received for so long; at least
    /// [`LEAST_QUIET`] is kept.
    pub quiet_ns: u64,
}

impl TransmissionGate {
    /// When an exchange that wants to begin at `now` may; `None` for at once.
    pub fn opens_at(&self, now: Time, clock: ClockReading) -> Option<Time> {
        let unix = now.as_nanos().wrapping_add(clock.unix_offset_ns);
        let period = self.period_ns.max(1);
        let late_ns = (unix % period + period - self.shift_ns % period) % period;
        (late_ns > self.tolerance_ns).then(|| now + Duration::from_nanos(period - late_ns))
    }

    /// Whether an exchange goes on that was last active at `active_at`. That may be a little later
    /// than `now`: another process has read its clock since. What is further in the future is not
    /// believed.
    pub fn is_running(&self, active_at: u64, now: Time) -> bool {
        now.as_nanos().abs_diff(active_at) <= self.quiet_ns.max(LEAST_QUIET.as_nanos())
    }
}

/// How Unix time and the clock of the senders go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// Unix time minus the senders' clock, in nanoseconds; wraps around.
    pub unix_offset_ns: u64,
    /// When that was read last, by the senders' clock.
    pub read_at: Time,
}

impl ClockReading {
    /// Whether it is recent enough for gates to be closed.
    pub fn is_recent(&self, now: Time) -> bool {
        now <= self.read_at + GATES_LAST
    }
}

/// What senders share of the exchanges of a DSCP. Instants are nanoseconds of their clock. The
/// order is part of the file format of `nic`.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ExchangeWords<W> {
    /// When the DSCP was last active: sent or received. Kept for DSCPs with a gate.
    pub active_at: W,
    /// When the first packet of the next exchange was held back, if that is after the last
    /// activity.
    pub held_at: W,
    /// Exchanges that have begun.
    pub begun: W,
    /// How long they have waited.
    pub waited_ns: W,
    /// How many of them waited for more than the gate's tolerance.
    pub late: W,
}

impl<W: Word> ExchangeWords<W> {
    /// Whether an exchange goes on.
    pub fn is_running(&self, gate: &TransmissionGate, now: Time) -> bool {
        gate.is_running(self.active_at.get(), now)
    }

    /// The DSCP is active: its exchange goes on, or begins.
    pub fn mark_active(&self, gate: &TransmissionGate, now: Time) {
        let last = self.active_at.get();
        if gate.is_running(last, now) {
            self.active_at.raise(now.as_nanos());
        } else if self.active_at.replace(last, now.as_nanos()) {
            // Otherwise another sender has begun it.
            self.count_begun(gate, last, now);
        }
    }

    /// An exchange begins; `last` is when the one before was active.
    fn count_begun(&self, gate: &TransmissionGate, last: u64, now: Time) {
        self.begun.add(1);
        let held_at = self.held_at.get();
        if held_at <= last {
            return;
        }
        // Nobody waits for more than a period: who was held back longer has ended without
        // beginning.
        let waited_ns = now.as_nanos().checked_sub(held_at);
        let waited_ns = waited_ns.filter(|ns| *ns <= gate.period_ns.saturating_mul(2)).unwrap_or(0);
        self.waited_ns.add(waited_ns);
        self.late.add(u64::from(waited_ns > gate.tolerance_ns));
    }

    /// A packet of the next exchange is held back: the first one dates its wait.
    pub fn mark_held(&self, now: Time) {
        let (held_at, last) = (self.held_at.get(), self.active_at.get());
        let is_dated = held_at > last && held_at <= now.as_nanos();
        if !is_dated {
            // If it fails, another sender has dated it.
            self.held_at.replace(held_at, now.as_nanos());
        }
    }

    /// Whether exchanges have waited so long that the gate does harm.
    pub fn waits_too_long(&self, gate: &TransmissionGate) -> bool {
        let mean_ns = self.counted().mean_wait_ns();
        mean_ns.is_some_and(|mean_ns| wait_is_too_long(mean_ns, gate.period_ns))
    }

    /// The counters.
    pub fn counted(&self) -> Exchanges {
        Exchanges {
            begun: self.begun.get(),
            waited_ns: self.waited_ns.get(),
            late: self.late.get(),
        }
    }
}

/// How exchanges of a DSCP have begun, since its counters began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanges {
    /// How many, by this host or its peers.
    pub begun: u64,
    /// How long they have waited for their gate, in nanoseconds.
    pub waited_ns: u64,
    /// How many have waited for more than the gate's tolerance.
    pub late: u64,
}

impl Exchanges {
    /// The exchanges since `before`; `None` if a counter went backwards, which any process that may
    /// write the words can cause.
    pub fn since(self, before: Exchanges) -> Option<Exchanges> {
        Some(Exchanges {
            begun: self.begun.checked_sub(before.begun)?,
            waited_ns: self.waited_ns.checked_sub(before.waited_ns)?,
            late: self.late.checked_sub(before.late)?,
        })
    }

    /// How long they have waited on average, in nanoseconds, if there are enough to judge a job by.
    pub fn mean_wait_ns(self) -> Option<u64> {
        (self.begun >= JUDGED_EXCHANGES).then(|| self.waited_ns / self.begun)
    }
}

/// Whether exchanges that wait for so long on average show that their job does not keep its period.
pub fn wait_is_too_long(mean_wait_ns: u64, period_ns: u64) -> bool {
    mean_wait_ns > period_ns / MOST_WAIT_PARTS
}

/// Whether a job keeps the period that it has declared, judged from its counters from time to time.
#[derive(Clone, Copy, Debug)]
pub struct Punctuality {
    /// What was counted when it was judged last.
    judged: Exchanges,
    /// Whether it waited too long then.
    waits: bool,
}

impl Punctuality {
    /// From these counters on.
    pub fn since(counted: Exchanges) -> Punctuality {
        Punctuality { judged: counted, waits: false }
    }

    /// Judges what was counted since the last time, if it is enough. Returns the mean wait of a job
    /// that waited too long twice in a row, which is not by chance.
    pub fn assess(&mut self, counted: Exchanges, period_ns: u64) -> Option<u64> {
        let Some(recent) = counted.since(self.judged) else {
            self.judged = counted;
            return None;
        };
        let mean_ns = recent.mean_wait_ns()?;
        self.judged = counted;
        let waited = self.waits;
        self.waits = wait_is_too_long(mean_ns, period_ns);
        (waited && self.waits).then_some(mean_ns)
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    const MS: u64 = 1_000_000;

    const GATE: TransmissionGate = TransmissionGate {
        period_ns: 100 * MS,
        shift_ns: 30 * MS,
        tolerance_ns: 5 * MS,
        quiet_ns: 20 * MS,
    };

    fn ms(ms: u64) -> Time {
        Time::from_nanos(1_000 * MS + ms * MS)
    }

    #[test]
    fn a_gate_opens_at_its_times_of_unix_time() {
        let opens = |at, unix_offset_ns| {
            GATE.opens_at(ms(at), ClockReading { unix_offset_ns, read_at: Time::ZERO })
        };
        assert_eq!([30, 35, 130].map(|at| opens(at, 0)), [None; 3]);
        assert_eq!([29, 36, 129].map(|at| opens(at, 0)), [30, 130, 130].map(|at| Some(ms(at))));
        assert_eq!((opens(10, 20 * MS), opens(75, 0u64.wrapping_sub(45 * MS))), (None, None));
    }

    #[test]
    fn an_exchange_ends_by_silence_and_its_wait_is_counted() {
        let words = ExchangeWords::<Cell<u64>>::default();
        words.mark_held(ms(60));
        words.mark_held(ms(70));
        words.mark_active(&GATE, ms(130));
        words.mark_active(&GATE, ms(149));
        assert!(words.is_running(&GATE, ms(169)) && !words.is_running(&GATE, ms(170)));
        assert_eq!(words.counted(), Exchanges { begun: 1, waited_ns: 70 * MS, late: 1 });
        words.mark_active(&GATE, ms(230));
        assert_eq!(words.counted(), Exchanges { begun: 2, waited_ns: 70 * MS, late: 1 });
    }

    #[test]
    fn a_job_is_judged_by_enough_exchanges_and_twice_in_a_row() {
        let counted =
            |begun, mean_ms| Exchanges { begun, waited_ns: begun * mean_ms * MS, late: 0 };
        let mut job = Punctuality::since(Exchanges::default());
        assert_eq!(job.assess(counted(JUDGED_EXCHANGES - 1, 50), GATE.period_ns), None);
        assert_eq!(job.assess(counted(32, 50), GATE.period_ns), None, "once is by chance");
        assert_eq!(job.assess(counted(64, 50), GATE.period_ns), Some(50 * MS));
        // Counters of a new file begin at 0.
        assert_eq!(job.assess(counted(1, 0), GATE.period_ns), None);
        assert_eq!(job.assess(counted(40, 5), GATE.period_ns), None);
        assert_eq!(job.assess(counted(80, 5), GATE.period_ns), None, "it is on time again");
    }

    #[test]
    fn a_clock_that_nobody_reads_closes_no_gate() {
        let clock = ClockReading { unix_offset_ns: 0, read_at: ms(0) };
        assert!(clock.is_recent(ms(60_000)) && !clock.is_recent(ms(60_001)));
        assert!(clock.is_recent(Time::ZERO), "another process reads it while this one looks");
    }
}
