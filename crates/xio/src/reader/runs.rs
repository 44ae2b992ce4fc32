//! Batches that a stream leaves out, and the runs of batches that remain.
//!
//! Batches keep the numbers that the plan gives them, so a range that is left out changes neither
//! the bytes nor the position of any other batch: a stream goes from the batch before a range to
//! the batch after it.

use alloc::vec::Vec;
use core::ops::Range;

use thiserror::Error;

/// Most ranges of batches that a stream leaves out.
pub const MAX_LEFT_OUT: usize = 64;

/// Why batches cannot be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LeaveOutError {
    /// A range without a batch.
    #[error("the range {start}..{end} of batches to leave out is empty")]
    Empty {
        /// First batch.
        start: u64,
        /// The batch after the last.
        end: u64,
    },
    /// More than [`MAX_LEFT_OUT`], after ranges that touch were joined.
    #[error("{ranges} ranges of batches are left out, at most {MAX_LEFT_OUT} can be")]
    TooMany {
        /// How many.
        ranges: usize,
    },
}

/// Ranges of batches to leave out, by the plan's numbers: in rising order, neither overlapping nor
/// touching.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaveOut(Vec<Range<u64>>);

/// Batches from the first number up to the second, or without end.
pub(super) type Run = (u64, Option<u64>);

impl LeaveOut {
    /// Takes ranges in any order, which may overlap.
    ///
    /// # Errors
    /// When a range is empty, and when there are too many.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Result<LeaveOut, LeaveOutError> {
        let mut given: Vec<Range<u64>> = ranges.into_iter().collect();
        if let Some(Range { start, end }) = given.iter().find(|range| range.is_empty()).cloned() {
            return Err(LeaveOutError::Empty { start, end });
        }
        given.sort_unstable_by_key(|range| range.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for range in given {
            match joined.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => joined.push(range),
            }
        }
        match joined.len() {
            ..=MAX_LEFT_OUT => Ok(LeaveOut(joined)),
            ranges => Err(LeaveOutError::TooMany { ranges }),
        }
    }

    /// The ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Whether what is left out from batch `first` on are whole steps of `ranks` batches.
    pub fn is_of_steps(&self, first: u64, ranks: u32) -> bool {
        let whole = |batch: u64| batch.saturating_sub(first).is_multiple_of(ranks.max(1).into());
        self.0.iter().all(|range| whole(range.start) && whole(range.end))
    }

    /// What remains of the batches from `first` up to `end`, in order; none of the runs is empty.
    pub(super) fn runs(&self, first: u64, end: Option<u64>) -> Vec<Run> {
        let (mut at, mut runs) = (first, Vec::new());
        for gap in self.0.iter().filter(|gap| gap.end > first) {
            let until = end.map_or(gap.start, |end| gap.start.min(end));
            if at < until {
                runs.push((at, Some(until)));
            }
            at = at.max(gap.end);
        }
        if end.is_none_or(|end| at < end) {
            runs.push((at, end));
        }
        runs
    }
}
