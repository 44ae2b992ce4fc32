//! What a run of flows came to.

use alloc::vec::Vec;

use roce::report::QpProgress;
use roce::verbs::WcStatus;
use roce::{Duration, Time};

use crate::link::LinkStats;
use crate::network::{Deadlock, LinkReport, LossReport, QueueSample};

/// How a flow ended without arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// When its connection ended.
    pub at: Time,
    /// With which status.
    pub status: WcStatus,
}

/// One flow of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The sending host.
    pub from: u32,
    /// The receiving host.
    pub to: u32,
    /// Payload in bytes.
    pub bytes: u64,
    /// When it was posted, if it was.
    pub started: Option<Time>,
    /// When its last byte was there, if it was.
    pub arrived: Option<Time>,
    /// How long it would have taken alone.
    pub ideal: Duration,
    /// How its connection ended, if it failed.
    pub gave_up: Option<GivenUp>,
    /// It has not arrived, and no way led from its sender to its receiver when it gave up, or at
    /// the end of the run.
    pub is_cut: bool,
}

impl Record {
    /// Whether it has neither arrived nor failed.
    pub fn is_under_way(&self) -> bool {
        self.arrived.is_none() && self.gave_up.is_none()
    }

    /// From its start to its arrival.
    pub fn completion_time(&self) -> Option<Duration> {
        Some(self.arrived?.since(self.started?))
    }

    /// How much longer it took than alone, in 1/1,000: never below 1,000.
    pub fn slowdown_per_mille(&self) -> Option<u64> {
        let time = u128::from(self.completion_time()?.as_nanos());
        let ideal = u128::from(self.ideal.as_nanos()).max(1);
        Some(((time * 1_000 / ideal) as u64).max(1_000))
    }
}

/// What a run of flows came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The flows, by number.
    pub records: Vec<Record>,
    /// Flows whose connection ended in an error.
    pub failed: u32,
    /// When the last flow arrived, or the run was ended.
    pub ended: Time,
    /// All links.
    pub links: Vec<LinkReport>,
    /// Queues over time, where they were sampled.
    pub samples: Vec<QueueSample>,
    /// Where flows were sampled, too: those under way at the time of each sample, by number.
    pub progress: Vec<Vec<(u32, QpProgress)>>,
    /// Data and other packets that hosts sent, received, and sent again.
    pub packets: [u64; 3],
    /// Packets that had no way to their host.
    pub unrouted: u64,
    /// What failures have cost.
    pub losses: LossReport,
    /// Faults that have begun.
    pub faults: u32,
    /// Times that switches computed other routes.
    pub reroutes: u64,
    /// Links that wait for each other, where flows have not arrived.
    pub deadlock: Option<Deadlock>,
    /// Events of the simulation.
    pub events: u64,
}

/// Slowdowns of some flows, in 1/1,000.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slowdowns {
    /// How many flows.
    pub flows: u64,
    /// Mean.
    pub mean: u64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// The largest.
    pub max: u64,
}

impl Slowdowns {
    /// Of these slowdowns, in any order.
    pub fn of(mut slowdowns: Vec<u64>) -> Slowdowns {
        slowdowns.sort_unstable();
        let flows = slowdowns.len() as u64;
        // The smallest value that at least this share does not exceed.
        let quantile = |per_mille: u64| {
            let rank = (flows * per_mille).div_ceil(1_000).max(1);
            slowdowns.get(rank as usize - 1).copied().unwrap_or(0)
        };
        let sum: u128 = slowdowns.iter().map(|&one| u128::from(one)).sum();
        Slowdowns {
            flows,
            mean: (sum / u128::from(flows.max(1))) as u64,
            p50: quantile(500),
            p99: quantile(990),
            p999: quantile(999),
            max: slowdowns.last().copied().unwrap_or(0),
        }
    }
}

impl Outcome {
    /// Flows that have not arrived.
    pub fn unfinished(&self) -> u64 {
        self.records.iter().filter(|record| record.arrived.is_none()).count() as u64
    }

    /// Slowdowns of the flows that have arrived and are longer than `above` and not longer than
    /// `up_to` bytes.
    pub fn slowdowns(&self, above: u64, up_to: u64) -> Slowdowns {
        let sized = self.records.iter().filter(|flow| flow.bytes > above && flow.bytes <= up_to);
        Slowdowns::of(sized.filter_map(Record::slowdown_per_mille).collect())
    }

    /// Slowdowns by size: the flows that have arrived, sorted by size, in at most `groups` groups
    /// of about the same number, flows of one size in one group; the size of the largest flow of
    /// each, and its slowdowns.
    pub fn slowdowns_by_size(&self, groups: usize) -> Vec<(u64, Slowdowns)> {
        let arrived = self.records.iter().filter_map(|record| {
            record.slowdown_per_mille().map(|slowdown| (record.bytes, slowdown))
        });
        let mut flows: Vec<(u64, u64)> = arrived.collect();
        flows.sort_unstable();
        let least = flows.len().div_ceil(groups.max(1)).max(1);
        let (mut left, mut all) = (&flows[..], Vec::new());
        while let Some(&(last, _)) = left.get(least - 1).or(left.last()) {
            let end = left.partition_point(|&(bytes, _)| bytes <= last);
            let (group, rest) = left.split_at(end);
            all.push((last, Slowdowns::of(group.iter().map(|flow| flow.1).collect())));
            left = rest;
        }
        all
    }

    /// Payload of the flows that have arrived, in bytes.
    pub fn arrived_bytes(&self) -> u64 {
        let arrived = self.records.iter().filter(|record| record.arrived.is_some());
        arrived.map(|record| record.bytes).sum()
    }

    /// Bits per second of the payload of flows that have arrived, from the first start to the end.
    pub fn goodput_bps(&self) -> u64 {
        let first = self.records.iter().filter_map(|record| record.started).min();
        let span = first.map_or(Duration::ZERO, |first| self.ended.since(first));
        let bits = u128::from(self.arrived_bytes()) * 8_000_000_000;
        (bits / u128::from(span.as_nanos().max(1))) as u64
    }

    /// Jain's index of the rates of the flows that have arrived, in 1/1,000: 1,000 where all are
    /// equal, and 1,000/n where one has everything.
    pub fn fairness_per_mille(&self) -> u64 {
        let rate = |record: &Record| {
            let time = record.completion_time()?.as_nanos().max(1);
            Some(record.bytes as f64 / time as f64)
        };
        let (mut flows, mut sum, mut squares) = (0.0, 0.0, 0.0);
        for rate in self.records.iter().filter_map(rate) {
            flows += 1.0;
            sum += rate;
            squares += rate * rate;
        }
        if squares > 0.0 { (1_000.0 * sum * sum / (flows * squares) + 0.5) as u64 } else { 0 }
    }

    /// How long links were paused, in all.
    pub fn paused(&self) -> Duration {
        self.links.iter().fold(Duration::ZERO, |sum, link| sum + link.stats.paused)
    }

    /// The sum of a counter over all links.
    pub fn total(&self, counter: impl Fn(&LinkStats) -> u64) -> u64 {
        self.links.iter().map(|link| counter(&link.stats)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occurred() {
        let slowdowns = Slowdowns::of((1..=1_000).rev().collect());
        let expected =
            Slowdowns { flows: 1_000, mean: 500, p50: 500, p99: 990, p999: 999, max: 1_000 };
        assert_eq!(slowdowns, expected);
        assert_eq!(Slowdowns::of([7].into()).p999, 7);
        assert_eq!(Slowdowns::of(Vec::new()), Slowdowns::default());
    }

    #[test]
    fn fairness_is_jains_index() {
        let record = |bytes| Record {
            from: 0,
            to: 1,
            bytes,
            started: Some(Time::ZERO),
            arrived: Some(Time::from_nanos(1_000)),
            ideal: Duration::from_nanos(500),
            gave_up: None,
            is_cut: false,
        };
        let outcome = |all: &[u64]| Outcome {
            records: all.iter().map(|&bytes| record(bytes)).collect(),
            ..Outcome::default()
        };
        assert_eq!(outcome(&[4_000, 4_000]).fairness_per_mille(), 1_000);
        assert_eq!(outcome(&[3_000, 1_000]).fairness_per_mille(), 800);
        let groups = outcome(&[7, 7, 7, 9, 8, 7]).slowdowns_by_size(3);
        let groups: Vec<(u64, u64)> = groups.iter().map(|(size, of)| (*size, of.flows)).collect();
        assert_eq!(groups, [(7, 4), (9, 2)], "flows of one size are in one group");
        assert_eq!(outcome(&[1]).records[0].slowdown_per_mille(), Some(2_000));
    }
}
