//! Latencies in bounded memory: buckets of 1.6 % width, whatever the range.

/// Buckets between two powers of two.
const PER_OCTAVE: u64 = 64;

/// Times in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    lowest: u64,
    highest: u64,
}

impl Histogram {
    pub(super) fn new() -> Histogram {
        let buckets = index(u64::MAX) + 1;
        Histogram { counts: vec![0; buckets], total: 0, lowest: u64::MAX, highest: 0 }
    }

    pub(super) fn add(&mut self, ns: u64) {
        self.counts[index(ns)] += 1;
        self.total += 1;
        self.lowest = self.lowest.min(ns);
        self.highest = self.highest.max(ns);
    }

    /// The lowest and the highest sample.
    pub(super) fn range(&self) -> Option<(u64, u64)> {
        (self.total > 0).then_some((self.lowest, self.highest))
    }

    /// The time that this share of the samples does not exceed, to the width of a bucket.
    pub(super) fn percentile(&self, share: f64) -> Option<u64> {
        let (lowest, highest) = self.range()?;
        let rank = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(middle(bucket).clamp(lowest, highest))
    }
}

fn index(ns: u64) -> usize {
    if ns < PER_OCTAVE {
        return ns as usize;
    }
    let octave = u64::from(ns.ilog2() - PER_OCTAVE.ilog2());
    // From PER_OCTAVE to twice that, less one.
    let place = ns >> octave;
    (octave * PER_OCTAVE + place) as usize
}

fn middle(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < PER_OCTAVE {
        return bucket;
    }
    let octave = bucket / PER_OCTAVE - 1;
    let place = bucket - octave * PER_OCTAVE;
    (place << octave) + ((1 << octave) >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_near_the_middle_of_its_bucket() {
        let mut last = 0;
        for ns in (0..2_000).chain((11..64).map(|bit| 1_u64 << bit)).chain([u64::MAX]) {
            let bucket = index(ns);
            assert!(bucket >= last, "{ns}");
            last = bucket;
            let error = middle(bucket).abs_diff(ns) as f64;
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
