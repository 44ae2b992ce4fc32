//! Totals of runs.

use alloc::vec::Vec;

use roce::endpoint::Counters;

use crate::faults::FaultCounts;
use crate::network::Conduct;

/// What one seed, or many, executed and checked.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Seeds run.
    pub seeds: u64,
    /// Send work requests posted.
    pub sends: u64,
    /// Receive work requests posted.
    pub receives: u64,
    /// Completions checked, good and bad.
    pub completions: u64,
    /// Failed completions among these.
    pub failures: u64,
    /// Payload bytes compared at their completion.
    pub bytes_checked: u64,
    /// Atomics whose original value was part of a serial order.
    pub atomics: u64,
    /// Atomics on words whose history allows too many orders to try all.
    pub atomics_open: u64,
    /// Request packets of reliable connections that the wire rules were applied to.
    pub requests_checked: u64,
    /// Request packets skipped: their sender was unknown.
    pub requests_skipped: u64,
    /// Packets forged by hostile peers.
    pub forged: u64,
    /// Connections made.
    pub connections: u64,
    /// Connections that failed: retries ran out, a program misbehaved, a node restarted.
    pub broken: u64,
    /// Packets sent.
    pub packets: u64,
    /// Packets retransmitted.
    pub retransmitted: u64,
    /// Packets that found a queue full.
    pub queue_drops: u64,
    /// Times that a port paused the other end of its link.
    pub pauses: u64,
    /// What switches did because of failures.
    pub conduct: Conduct,
    /// Damaged packets accepted because the ICRC does not cover the damage.
    pub harmless: u64,
    /// Faults by kind.
    pub faults: FaultCounts,
    /// Events of the simulation.
    pub events: u64,
    /// Simulated time in nanoseconds.
    pub simulated_ns: u64,
    /// For each seed: the time from the end of the faults until everything had finished, and its
    /// computed bound; nanoseconds.
    pub recoveries: Vec<(u64, u64)>,
    /// Totals of the endpoints' counters, by name, in the order of their declaration.
    pub counters: Vec<(&'static str, u64)>,
}

impl Summary {
    /// Adds another run.
    pub fn add(&mut self, other: &Summary) {
        self.seeds += other.seeds;
        self.sends += other.sends;
        self.receives += other.receives;
        self.completions += other.completions;
        self.failures += other.failures;
        self.bytes_checked += other.bytes_checked;
        self.atomics += other.atomics;
        self.atomics_open += other.atomics_open;
        self.requests_checked += other.requests_checked;
        self.requests_skipped += other.requests_skipped;
        self.forged += other.forged;
        self.connections += other.connections;
        self.broken += other.broken;
        self.packets += other.packets;
        self.retransmitted += other.retransmitted;
        self.queue_drops += other.queue_drops;
        self.pauses += other.pauses;
        self.conduct.add(&other.conduct);
        self.harmless += other.harmless;
        self.faults.add(&other.faults);
        self.events += other.events;
        self.simulated_ns += other.simulated_ns;
        self.recoveries.extend_from_slice(&other.recoveries);
        self.add_counters(other.counters.iter().copied());
    }

    /// Adds the counters of an endpoint.
    pub(super) fn add_endpoint(&mut self, counters: &Counters) {
        self.add_counters(counters.named());
    }

    fn add_counters(&mut self, more: impl Iterator<Item = (&'static str, u64)>) {
        for (at, (name, value)) in more.enumerate() {
            match self.counters.get_mut(at) {
                Some((_, sum)) => *sum += value,
                None => self.counters.push((name, value)),
            }
        }
    }

    /// A counter of the endpoints, by name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    }

    /// The recovery time that this percentage of seeds did not exceed; nanoseconds.
    pub fn recovery_ns(&self, percent: u64) -> u64 {
        let mut times: Vec<u64> = self.recoveries.iter().map(|(time, _)| *time).collect();
        times.sort_unstable();
        let rank = (times.len() as u64 * percent).div_ceil(100).max(1) as usize;
        times.get(rank - 1).copied().unwrap_or(0)
    }

    /// Share of the request packets of reliable connections that the wire rules were applied to, in
    /// per mille.
    pub fn requests_checked_per_mille(&self) -> u64 {
        let all = self.requests_checked + self.requests_skipped;
        (self.requests_checked * 1_000).checked_div(all).unwrap_or(1_000)
    }

    /// The seed that came closest to its bound: recovery time over bound, in per mille.
    pub fn closest_to_bound_per_mille(&self) -> u64 {
        let share = |&(time, bound): &(u64, u64)| time * 1_000 / bound.max(1);
        self.recoveries.iter().map(share).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_ranks() {
        let recoveries = (1..=200).map(|at| (at, 1_000)).collect();
        let summary = Summary { recoveries, ..Summary::default() };
        assert_eq!([50, 99, 100].map(|p| summary.recovery_ns(p)), [100, 198, 200]);
        assert_eq!(summary.closest_to_bound_per_mille(), 200);
        assert_eq!(Summary::default().recovery_ns(50), 0);
    }
}
