//! Iterations: after which time traffic repeats, and where each one begins and ends.

use alloc::vec::Vec;

use super::{ProfileError, Sample};

/// Parts of the recorded time that are told apart, at first and at last.
const FEWEST_BINS: usize = 64;
const BINS: usize = 1024;

/// Bins of an iteration that tell it from others.
const ENOUGH: usize = 6;

/// Edges are put together to so many series.
const SERIES: usize = 16;

/// Parts of an iteration in which quiet times are looked for.
const FINE: u64 = 128;

/// One iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Its first moment, within a quiet time.
    pub first_ns: u64,
    /// Where communication begins.
    pub begin_ns: u64,
    /// Where communication ends.
    pub done_ns: u64,
    /// One past its last moment.
    pub end_ns: u64,
}

/// All iterations that were seen whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Iterations {
    /// The time of one.
    pub period_ns: u64,
    /// From the first to the last byte, in the median iteration.
    pub communication_ns: u64,
    /// At least two, in order.
    pub bounds: Vec<Bounds>,
}

/// The iterations of samples that are in order.
///
/// # Errors
/// When nothing repeats, or there are fewer than two whole ones.
pub fn find(samples: &[Sample], known_ns: Option<u64>) -> Result<Iterations, ProfileError> {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return Err(ProfileError::Nothing);
    };
    let recorded = (last.at_ns - first.at_ns).saturating_add(1);
    let period = match known_ns {
        Some(known) => known.max(1),
        None => period(samples, recorded).ok_or(ProfileError::NoPeriod(recorded / 1_000_000))?,
    };
    let bounds = bounds(samples, period, first.at_ns, recorded);
    if bounds.len() < 2 {
        let (period_ms, recorded_ms) = (period / 1_000_000, recorded / 1_000_000);
        return Err(ProfileError::TooShort { period_ms, recorded_ms });
    }
    let median = |mut times: Vec<u64>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let communication = median(bounds.iter().map(|own| own.done_ns - own.begin_ns).collect());
    let starts = bounds.windows(2).map(|pair| pair[1].begin_ns - pair[0].begin_ns);
    Ok(Iterations { period_ns: median(starts.collect()), communication_ns: communication, bounds })
}

/// How alike traffic is to itself later, by bins of the recorded time.
struct Likeness {
    by_lag: Vec<i64>,
}

impl Likeness {
    /// In so many bins, up to half of the recorded time.
    fn new(samples: &[Sample], recorded: u64, bins: usize) -> Likeness {
        let series = series(samples, recorded, bins);
        let alike = |lag: usize| -> i64 {
            let products = series.iter().map(|own| {
                let later = own[lag..].iter();
                own.iter().zip(later).map(|(a, b)| a * b).sum::<i64>()
            });
            products.sum::<i64>() / (bins - lag) as i64
        };
        let sharp: Vec<i64> = (0..=bins / 2).map(alike).collect();
        // Iterations that differ by a bin are alike as well.
        let around = |lag: usize| {
            let before = sharp[lag.abs_diff(1)];
            sharp[lag] + before + sharp.get(lag + 1).copied().unwrap_or(before)
        };
        Likeness { by_lag: (0..sharp.len()).map(around).collect() }
    }

    fn at(&self, lag: usize) -> i64 {
        self.by_lag.get(lag).copied().unwrap_or(i64::MIN)
    }

    /// The first lag at which it is nearly as alike as at any, beyond that of the burst itself.
    fn first_peak(&self) -> Option<usize> {
        let all = self.by_lag.len();
        let fallen = self.by_lag.iter().position(|own| *own < self.at(0) / 2)?;
        let rising = (fallen..all).find(|lag| self.at(lag + 1) > self.at(*lag))?;
        let most = self.by_lag[rising..].iter().copied().max()?;
        let is_peak = |lag: &usize| {
            let mut around = lag.saturating_sub(1).max(rising)..(lag + 2).min(all);
            self.at(*lag) >= most / 10 * 7 && around.all(|other| self.at(other) <= self.at(*lag))
        };
        let is_alike = most > 0 && most >= self.at(0) / 3;
        (rising..all.saturating_sub(1)).find(is_peak).filter(|_| is_alike)
    }

    /// A part of a lag after which traffic is as alike, and in between is not.
    fn shorter(&self, lag: usize) -> Option<usize> {
        (2..=12).rev().map(|part| lag / part).find(|short| {
            let around = short.saturating_sub(1)..short + 2;
            let own = around.map(|lag| self.at(lag)).max().unwrap_or(0);
            let dips = (1..*short).any(|between| self.at(between) < own / 2);
            dips && own >= self.at(lag) / 10 * 8
        })
    }

    /// The lag of one iteration, from the latest of its multiples at which traffic is still alike.
    fn exact(&self, lag: usize) -> (usize, usize) {
        let mut exact = (lag, 1);
        for times in 2.. {
            let expected = exact.0 * times / exact.1;
            let slack = (lag / 4).max(1);
            if expected + slack >= self.by_lag.len() {
                break;
            }
            let around = expected - slack..=expected + slack;
            let best = around.max_by_key(|lag| self.at(*lag)).unwrap_or(expected);
            if self.at(best) < self.at(0) / 4 {
                break;
            }
            exact = (best, times);
        }
        exact
    }
}

/// Bytes by bin of the recorded time, less the mean, for each series of edges.
fn series(samples: &[Sample], recorded: u64, bins: usize) -> Vec<Vec<i64>> {
    let mut series = alloc::vec![alloc::vec![0_i64; bins]; SERIES];
    let first = samples.first().map_or(0, |sample| sample.at_ns);
    for sample in samples {
        let since = u128::from(sample.at_ns - first);
        let bin = (since * bins as u128 / u128::from(recorded)) as usize;
        let edge = sample.from.wrapping_mul(0x9e37_79b9) ^ sample.to.wrapping_mul(0x85eb_ca6b);
        let own = &mut series[(edge >> 16) as usize % SERIES][bin.min(bins - 1)];
        *own = own.saturating_add(i64::try_from(sample.bytes).unwrap_or(i64::MAX));
    }
    let most = series.iter().flatten().copied().max().unwrap_or(1).max(1);
    for own in &mut series {
        // Small enough that no sum of products overflows.
        let scaled = |bytes: i64| (i128::from(bytes) * 4096 / i128::from(most)) as i64;
        own.iter_mut().for_each(|bytes| *bytes = scaled(*bytes));
        let mean = own.iter().sum::<i64>() / bins as i64;
        own.iter_mut().for_each(|bytes| *bytes -= mean);
    }
    series
}

/// The shortest time after which traffic is most alike. Bins are coarse at first, so that packets
/// of a burst are not told apart, and made finer until an iteration has enough of them.
fn period(samples: &[Sample], recorded: u64) -> Option<u64> {
    if recorded < BINS as u64 || samples.is_empty() {
        return None;
    }
    let mut bins = FEWEST_BINS;
    while bins <= BINS {
        let likeness = Likeness::new(samples, recorded, bins);
        if let Some(lag) = likeness.first_peak().filter(|lag| *lag >= ENOUGH) {
            let finer = Likeness::new(samples, recorded, 4 * bins);
            let lag = 4 * lag;
            let exact = finer.exact(finer.shorter(lag).unwrap_or(lag));
            let period = u128::from(recorded) * exact.0 as u128 / exact.1 as u128;
            let period = u64::try_from(period / (4 * bins) as u128).ok();
            return period.filter(|period| *period > 0);
        }
        bins *= 2;
    }
    None
}

/// Where each whole iteration begins and ends: in the longest quiet times that are about a period
/// apart.
fn bounds(samples: &[Sample], period: u64, first: u64, recorded: u64) -> Vec<Bounds> {
    let width = (period / FINE).max(1);
    let Ok(count) = usize::try_from(recorded / width + 1) else { return Vec::new() };
    // More iterations than anyone records.
    if count > 1 << 24 {
        return Vec::new();
    }
    let mut bytes = alloc::vec![0_u64; count];
    for sample in samples {
        let own = &mut bytes[((sample.at_ns - first) / width) as usize];
        *own = own.saturating_add(sample.bytes);
    }
    let mean = bytes.iter().map(|own| u128::from(*own)).sum::<u128>() / count as u128;
    let quiet = u64::try_from(mean / 10).unwrap_or(u64::MAX);
    let fine = FINE as usize;
    // The middle of the longest quiet time in a window, or else its quietest bin.
    let quietest = |from: usize, to: usize| {
        let to = to.min(count);
        let (mut best, mut run) = ((0, from), 0);
        for (at, own) in bytes.iter().enumerate().take(to).skip(from) {
            run = if *own <= quiet { run + 1 } else { 0 };
            if run > best.0 {
                best = (run, at + 1 - run);
            }
        }
        match best {
            (0, _) => (from..to).min_by_key(|at| bytes[*at]),
            (run, begin) => Some(begin + run / 2),
        }
    };
    let mut cuts: Vec<usize> = Vec::new();
    let mut next = quietest(0, fine);
    while let Some(at) = next {
        cuts.push(at);
        // The last window may be short of a whole iteration: then there is no cut.
        next = match at + fine * 3 / 4 + fine / 2 <= count {
            true => quietest(at + fine * 3 / 4, at + fine * 5 / 4),
            false => None,
        };
    }
    // What lies before the first cut and behind the last may be whole, too: then it is as large as
    // the others.
    let mut spans: Vec<(usize, usize)> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let sum = |(from, to): (usize, usize)| {
        bytes[from..to].iter().fold(0_u64, |sum, own| sum.saturating_add(*own))
    };
    let mut sums: Vec<u64> = spans.iter().map(|span| sum(*span)).collect();
    sums.sort_unstable();
    if let (Some(usual), Some(head), Some(tail)) =
        (sums.get(sums.len() / 2), cuts.first(), cuts.last())
    {
        let is_whole = |span: (usize, usize)| sum(span) >= usual / 10 * 9;
        if is_whole((0, *head)) {
            spans.insert(0, (0, *head));
        }
        if is_whole((*tail, count)) {
            spans.push((*tail, count));
        }
    }
    let moment = |bin: usize| first.saturating_add((bin as u64).saturating_mul(width));
    // What is small beside most others is no iteration: a beginning, an end, a pause of the job.
    let usual = sums.get(sums.len() * 3 / 4).copied().unwrap_or(0);
    let bounds = spans.into_iter().filter(|span| sum(*span) >= usual / 2);
    let bounds = bounds.filter_map(|(from, to)| {
        let begin = (from..to).find(|at| bytes[*at] > quiet)?;
        let done = (from..to).rev().find(|at| bytes[*at] > quiet)? + 1;
        Some(Bounds {
            first_ns: moment(from),
            begin_ns: moment(begin),
            done_ns: moment(done),
            end_ns: moment(to),
        })
    });
    bounds.collect()
}
