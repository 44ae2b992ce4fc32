//! The words of the files `rates` and `buckets`, as they lie in memory.

use std::sync::atomic::{AtomicU64, Ordering};

use roce::Time;
use roce::shaping::{
    CODE_POINTS, ClockReading, ExchangeWords, Limiter, RateLimit, Table, TransmissionGate, Word,
};

use super::mapping::Mapped;

/// Bytes of a file.
pub(super) const FILE_BYTES: u64 = 4096;

/// First word of `rates`.
pub(super) const MAGIC: u64 = u64::from_ne_bytes(*b"dqpaces2");

/// A word that processes share. Words do not depend on each other: each is believed or not by
/// itself.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(super) struct SharedWord(AtomicU64);

impl SharedWord {
    #[cfg(test)]
    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Word for SharedWord {
    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn replace(&self, old: u64, new: u64) -> bool {
        self.0.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn raise(&self, least: u64) {
        self.0.fetch_max(least, Ordering::Relaxed);
    }
}

/// The file `rates`.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct Rates {
    magic: AtomicU64,
    /// Unix time minus the monotonic clock, in nanoseconds.
    unix_offset_ns: AtomicU64,
    /// When the agent read both clocks last, in nanoseconds of the monotonic one.
    followed_at: AtomicU64,
    /// By bit: DSCPs that have a gate.
    gated: AtomicU64,
    bps: [AtomicU64; CODE_POINTS],
    burst_bytes: [AtomicU64; CODE_POINTS],
    gates: [GateWords; CODE_POINTS],
}

impl Rates {
    /// Whether the file has this format.
    pub(super) fn is_ours(&self) -> bool {
        self.magic.load(Ordering::Acquire) == MAGIC
    }

    pub(super) fn limit(&self, dscp: usize) -> RateLimit {
        RateLimit {
            bps: self.bps[dscp].load(Ordering::Relaxed),
            burst_bytes: self.burst_bytes[dscp].load(Ordering::Relaxed),
        }
    }

    pub(super) fn set_limit(&self, dscp: usize, limit: RateLimit) {
        self.burst_bytes[dscp].store(limit.burst_bytes, Ordering::Relaxed);
        self.bps[dscp].store(limit.bps, Ordering::Relaxed);
    }

    pub(super) fn gated(&self) -> u64 {
        self.gated.load(Ordering::Acquire)
    }

    pub(super) fn gate(&self, dscp: usize) -> Option<TransmissionGate> {
        (self.gated() & 1 << dscp != 0).then(|| self.gates[dscp].load())
    }

    /// Only the agent calls this.
    pub(super) fn set_gate(&self, dscp: usize, gate: Option<TransmissionGate>) {
        if gate == self.gate(dscp) {
            return;
        }
        // Nobody reads a gate that changes.
        self.gated.fetch_and(!(1 << dscp), Ordering::Release);
        if let Some(gate) = gate {
            self.gates[dscp].store(gate);
            self.gated.fetch_or(1 << dscp, Ordering::Release);
        }
    }

    pub(super) fn clock(&self) -> ClockReading {
        ClockReading {
            unix_offset_ns: self.unix_offset_ns.load(Ordering::Relaxed),
            read_at: Time::from_nanos(self.followed_at.load(Ordering::Relaxed)),
        }
    }

    pub(super) fn set_unix_offset(&self, ns: u64) {
        self.unix_offset_ns.store(ns, Ordering::Relaxed);
    }

    pub(super) fn set_followed(&self, now: Time) {
        self.followed_at.store(now.as_nanos(), Ordering::Relaxed);
    }
}

/// A [`TransmissionGate`] in memory.
#[derive(Debug, Default)]
#[repr(C)]
struct GateWords {
    period_ns: AtomicU64,
    shift_ns: AtomicU64,
    tolerance_ns: AtomicU64,
    quiet_ns: AtomicU64,
}

impl GateWords {
    fn load(&self) -> TransmissionGate {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        TransmissionGate {
            period_ns: word(&self.period_ns),
            shift_ns: word(&self.shift_ns),
            tolerance_ns: word(&self.tolerance_ns),
            quiet_ns: word(&self.quiet_ns),
        }
    }

    fn store(&self, gate: TransmissionGate) {
        self.period_ns.store(gate.period_ns, Ordering::Relaxed);
        self.shift_ns.store(gate.shift_ns, Ordering::Relaxed);
        self.tolerance_ns.store(gate.tolerance_ns, Ordering::Relaxed);
        self.quiet_ns.store(gate.quiet_ns, Ordering::Relaxed);
    }
}

/// What senders share of a DSCP, on a cache line of its own. Instants are in nanoseconds of the
/// monotonic clock.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Bucket {
    pub(super) full_at: SharedWord,
    pub(super) bytes: SharedWord,
    pub(super) exchanges: ExchangeWords<SharedWord>,
}

impl Bucket {
    /// From its words, in their order in memory.
    pub(super) fn of(mut words: impl Iterator<Item = u64>) -> Bucket {
        let mut word = || SharedWord(AtomicU64::new(words.next().unwrap_or(0)));
        // Fields of a literal are evaluated in the order in which they are written.
        Bucket {
            full_at: word(),
            bytes: word(),
            exchanges: ExchangeWords {
                active_at: word(),
                held_at: word(),
                begun: word(),
                waited_ns: word(),
                late: word(),
            },
        }
    }
}

/// The file `buckets`.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct Buckets(pub(super) [Bucket; CODE_POINTS]);

const _: () = assert!(size_of::<Rates>() as u64 == FILE_BYTES);
const _: () = assert!(size_of::<Buckets>() as u64 == FILE_BYTES);

/// Whose buckets a process takes from.
#[derive(Debug)]
pub(super) enum Shared {
    ByAll(Mapped<Buckets>),
    /// The process may not write the file.
    Own(Box<[Bucket; CODE_POINTS]>),
}

impl Shared {
    pub(super) fn own() -> Shared {
        Shared::Own(Box::new(std::array::from_fn(|_| Bucket::default())))
    }
}

/// Both files, as a sender has them.
#[derive(Debug)]
pub(super) struct SharedTable {
    pub(super) rates: Mapped<Rates>,
    pub(super) buckets: Shared,
}

impl SharedTable {
    pub(super) fn bucket(&self, dscp: usize) -> &Bucket {
        match &self.buckets {
            Shared::ByAll(mapped) => &mapped.get().0[dscp],
            Shared::Own(own) => &own[dscp],
        }
    }
}

impl Table for SharedTable {
    type Word = SharedWord;

    fn limiter(&self, dscp: usize) -> Option<Limiter> {
        self.rates.get().limit(dscp).limiter()
    }

    fn gated(&self) -> u64 {
        self.rates.get().gated()
    }

    fn gate(&self, dscp: usize) -> Option<TransmissionGate> {
        self.rates.get().gate(dscp)
    }

    fn full_at(&self, dscp: usize) -> &SharedWord {
        &self.bucket(dscp).full_at
    }

    fn exchanges(&self, dscp: usize) -> &ExchangeWords<SharedWord> {
        &self.bucket(dscp).exchanges
    }

    fn clock(&self) -> ClockReading {
        self.rates.get().clock()
    }

    /// Nobody else sees the counters of own buckets.
    fn is_supervised(&self) -> bool {
        matches!(self.buckets, Shared::ByAll(_))
    }
}
