//! Rate limits and transmission gates of a host, by DSCP: the rules of [`roce::shaping`] over plain
//! cells.
//!
//! The processes of a real machine share words in memory; a simulated host is one process with a
//! table of its own. Whoever is held back waits in its queue pair, so that a limit reorders nothing
//! and fills no queue. Time is that of the simulation, and so is Unix time: gates open at their
//! shift after its beginning. No rule of when a packet may leave belongs here.

use core::array;
use core::cell::Cell;

use roce::Time;
use roce::shaping::{
    Arrivals, CODE_POINTS, ClockReading, ExchangeWords, Exchanges, Limiter, Shaper, Table,
    TransmissionGate,
};

/// What is set for a DSCP, and what its senders share.
#[derive(Debug, Default)]
struct Entry {
    limiter: Option<Limiter>,
    gate: Option<TransmissionGate>,
    full_at: Cell<u64>,
    exchanges: ExchangeWords<Cell<u64>>,
}

/// What is set for each DSCP of a host. Values above 63 are those of their lower six bits.
#[derive(Debug)]
pub struct CellTable {
    entries: [Entry; CODE_POINTS],
    gated: u64,
    unix_offset_ns: u64,
    is_supervised: bool,
}

impl Default for CellTable {
    fn default() -> CellTable {
        let entries = array::from_fn(|_| Entry::default());
        CellTable { entries, gated: 0, unix_offset_ns: 0, is_supervised: true }
    }
}

impl CellTable {
    fn entry(&mut self, dscp: u8) -> &mut Entry {
        &mut self.entries[usize::from(dscp) % CODE_POINTS]
    }

    /// Limits what has this DSCP, or no longer.
    pub fn set_limiter(&mut self, dscp: u8, limiter: Option<Limiter>) {
        self.entry(dscp).limiter = limiter;
    }

    /// Gives a DSCP a gate, or takes it away.
    pub fn set_gate(&mut self, dscp: u8, gate: Option<TransmissionGate>) {
        self.entry(dscp).gate = gate;
        let bit = 1 << (usize::from(dscp) % CODE_POINTS);
        self.gated = if gate.is_some() { self.gated | bit } else { self.gated & !bit };
    }

    /// How far Unix time is ahead of the host's clock, in nanoseconds; wraps around.
    pub fn set_unix_offset(&mut self, ns: u64) {
        self.unix_offset_ns = ns;
    }

    /// Whether an agent watches how long exchanges wait. Without one, the host itself ignores a
    /// gate that holds a job back too long.
    pub fn set_supervised(&mut self, is_supervised: bool) {
        self.is_supervised = is_supervised;
    }

    /// How exchanges of a DSCP with a gate have begun.
    pub fn counted(&self, dscp: u8) -> Exchanges {
        self.exchanges(usize::from(dscp) % CODE_POINTS).counted()
    }
}

impl Table for CellTable {
    type Word = Cell<u64>;

    fn limiter(&self, dscp: usize) -> Option<Limiter> {
        self.entries[dscp].limiter
    }

    fn gated(&self) -> u64 {
        self.gated
    }

    fn gate(&self, dscp: usize) -> Option<TransmissionGate> {
        self.entries[dscp].gate
    }

    fn full_at(&self, dscp: usize) -> &Cell<u64> {
        &self.entries[dscp].full_at
    }

    fn exchanges(&self, dscp: usize) -> &ExchangeWords<Cell<u64>> {
        &self.entries[dscp].exchanges
    }

    /// An agent that never stops reading it.
    fn clock(&self) -> ClockReading {
        let read_at = Time::from_nanos(u64::MAX);
        ClockReading { unix_offset_ns: self.unix_offset_ns, read_at }
    }

    fn is_supervised(&self) -> bool {
        self.is_supervised
    }
}

/// The limits of a host, and its one sender.
#[derive(Debug, Default)]
pub(crate) struct HostLimits {
    pub(crate) table: CellTable,
    pub(crate) shaper: Shaper,
}

impl HostLimits {
    /// Whether arrivals have to be told.
    pub(crate) fn watches(&self) -> bool {
        self.table.gated != 0
    }

    pub(crate) fn received(&mut self, now: Time, arrivals: &Arrivals) {
        self.shaper.received(&self.table, now, arrivals);
    }
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use super::*;

    #[test]
    fn a_limit_admits_its_rate_and_a_burst() {
        let HostLimits { mut table, mut shaper } = HostLimits::default();
        let (now, peer) = (Time::ZERO, IpAddr::from([10, 0, 0, 1]));
        // A packet of 4,196 bytes takes 33.6 us.
        table.set_limiter(8, Some(Limiter::exact(1_000_000_000, 10_000)));
        assert_eq!(shaper.admits(&table, now, (9, peer), 64), 64, "others are not limited");
        assert_eq!(shaper.admits(&table, now, (8, peer), 64), 2);
        assert_eq!(shaper.admits(&table, now, (9, peer), 64), 64);
        shaper.sent(&table, now, [(8, 4_400), (8, 4_400)]);
        assert_eq!(shaper.admits(&table, now, (8, peer), 64), 0);
        let at = shaper.next_wakeup().unwrap();
        // 1,200 bytes were left: 2,996 are missing.
        assert_eq!(at, Time::from_nanos(23_968));
        assert_eq!(shaper.admits(&table, at, (8, peer), 64), 1);
        assert_eq!(shaper.admits(&table, at, (9, peer), 64), 64);
        assert!(shaper.next_wakeup().is_none(), "nobody waits");
        assert_eq!(shaper.admits(&table, at, (8, peer), 64), 0, "what was granted is gone");
        table.set_limiter(8, None);
        assert_eq!(shaper.admits(&table, at, (8, peer), 64), 64);
    }
}
