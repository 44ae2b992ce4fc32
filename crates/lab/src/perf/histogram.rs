//! Latencies in bounded memory: buckets of at most 1.6 % width, whatever the range.
//!
//! What is kept besides, exactly, are the extremes.

use hdrhistogram::Histogram as Buckets;

/// Decimal digits that differ from one bucket to another.
const DIGITS: u8 = 2;

/// Times in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    buckets: Buckets<u64>,
    lowest: u64,
    highest: u64,
}

impl Histogram {
    pub(super) fn new() -> Histogram {
        let buckets = Buckets::new_with_bounds(1, u64::MAX, DIGITS);
        let buckets = buckets.expect("0 to 5 digits and a range from 1 are allowed");
        Histogram { buckets, lowest: u64::MAX, highest: 0 }
    }

    pub(super) fn add(&mut self, ns: u64) {
        self.buckets.saturating_record(ns);
        self.lowest = self.lowest.min(ns);
        self.highest = self.highest.max(ns);
    }

    /// The lowest and the highest sample.
    pub(super) fn range(&self) -> Option<(u64, u64)> {
        (!self.buckets.is_empty()).then_some((self.lowest, self.highest))
    }

    /// The time that this share of the samples does not exceed, to the width of a bucket.
    pub(super) fn percentile(&self, share: f64) -> Option<u64> {
        let (lowest, highest) = self.range()?;
        let middle = self.buckets.median_equivalent(self.buckets.value_at_quantile(share));
        Some(middle.clamp(lowest, highest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_near_the_middle_of_its_bucket() {
        for ns in (0..2_000).chain((11..64).map(|bit| 1_u64 << bit)).chain([u64::MAX]) {
            let mut times = Histogram::new();
            // The extremes are exact, so one beyond each side leaves the bucket alone.
            [0, ns, u64::MAX].into_iter().for_each(|ns| times.add(ns));
            let middle = times.percentile(0.5).expect("samples");
            let error = middle.abs_diff(ns) as f64;
            assert!(error <= ns as f64 / 64.0, "{ns}: {error}");
        }
    }

    #[test]
    fn percentiles_are_those_of_the_samples() {
        let mut times = Histogram::new();
        assert_eq!(times.percentile(0.5), None);
        (1..=1000).for_each(|us| times.add(us * 1000));
        let near = |share: f64, ns: u64| {
            let found = times.percentile(share).expect("samples");
            assert!(found.abs_diff(ns) as f64 <= ns as f64 * 0.016, "{share}: {found}");
        };
        near(0.5, 500_000);
        near(0.99, 990_000);
        near(0.999, 999_000);
        assert_eq!(times.range(), Some((1000, 1_000_000)));
    }
}
