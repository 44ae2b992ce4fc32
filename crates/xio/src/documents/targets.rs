//! Which tokens of a file are targets: what a model is trained to say, such as the answers of a
//! conversation.
//!
//! A table of runs, because masks are long runs of one value: two numbers for each run in place of
//! one for each token, which neither lie on the disk beside every token nor cross the wire with it.
//! Where they come from does not belong here.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

/// Bytes of memory that a run takes.
pub const TARGET_BYTES: u64 = 16;

/// The runs of targets of a file. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// The first token of each run and the token after its last, ascending.
    borders: Arc<[u64]>,
}

impl Targets {
    /// The runs, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<u64>> + '_ {
        self.borders.chunks_exact(2).map(|run| run[0]..run[1])
    }

    /// Tokens of all runs together.
    pub fn tokens(&self) -> u64 {
        self.iter().map(|run| run.end - run.start).sum()
    }

    /// What is no target in a range of tokens, in order.
    pub fn others(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        // The borders up to the first token: an odd number means that it lies in a run.
        let begun = self.borders.partition_point(|border| *border <= range.start);
        let lies_in_run = !begun.is_multiple_of(2);
        let first = (!lies_in_run && !range.is_empty()).then_some(range.start);
        let within = self.borders[begun..].iter().copied();
        let mut borders = first.into_iter().chain(within.take_while(move |at| *at < range.end));
        core::iter::from_fn(move || {
            let start = borders.next()?;
            Some(start..borders.next().unwrap_or(range.end))
        })
    }
}

/// Collects the runs of a file from its sequences.
#[derive(Debug, Default)]
pub struct TargetsBuilder {
    borders: Vec<u64>,
    at: u64,
}

impl TargetsBuilder {
    /// One with room for so many runs.
    pub fn with_capacity(runs: usize) -> TargetsBuilder {
        TargetsBuilder { borders: Vec::with_capacity(2 * runs), at: 0 }
    }

    /// Adds the next tokens of the file.
    pub fn push(&mut self, tokens: u64, are_targets: bool) {
        let start = self.at;
        self.at += tokens;
        if !are_targets || tokens == 0 {
            return;
        }
        match self.borders.last_mut() {
            Some(end) if *end == start => *end = self.at,
            _ => self.borders.extend([start, self.at]),
        }
    }

    /// The runs.
    pub fn finish(self) -> Targets {
        Targets { borders: self.borders.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    fn of(sequences: &[(u64, bool)]) -> Targets {
        let mut builder = TargetsBuilder::default();
        sequences.iter().for_each(|(tokens, are_targets)| builder.push(*tokens, *are_targets));
        builder.finish()
    }

    #[test]
    fn runs_that_touch_are_one() {
        let targets = of(&[(0, false), (3, true), (0, false), (2, true), (4, false), (1, true)]);
        assert_eq!(targets.iter().collect::<Vec<_>>(), [0..5, 9..10]);
        assert_eq!(targets.tokens(), 6);
        assert_eq!(targets.others(0..20).collect::<Vec<_>>(), [5..9, 10..20]);
        assert_eq!(targets.others(2..5).count(), 0);
        assert_eq!(targets.others(4..6).collect::<Vec<_>>(), vec![5..6; 1]);
        assert_eq!(Targets::default().others(3..7).collect::<Vec<_>>(), vec![3..7; 1]);
        assert_eq!(targets.others(7..7).count(), 0);
    }

    proptest! {
        #[test]
        fn every_token_is_a_target_or_another(
            sequences in prop::collection::vec((0u64..6, any::<bool>()), 0..20), from in 0u64..60, tokens in 0u64..40,
        ) {
            let targets = of(&sequences);
            let mask: Vec<bool> =
                sequences.iter().flat_map(|(tokens, is)| vec![*is; *tokens as usize]).collect();
            let others: Vec<u64> = targets.others(from..from + tokens).flatten().collect();
            let want = (from..from + tokens).filter(|at| mask.get(*at as usize) != Some(&true));
            prop_assert_eq!(others, want.collect::<Vec<_>>());
        }
    }
}
