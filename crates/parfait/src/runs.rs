//! Runs of consecutive ranks: what a host, or all hosts below a switch, hold of a job.

/// The ranks from `first` up to, not including, `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// The first rank.
    pub first: u32,
    /// One past the last. A run whose end is not past its first rank is empty.
    pub end: u32,
}

impl Run {
    /// From `first` up to `end`.
    pub const fn new(first: u32, end: u32) -> Run {
        Run { first, end }
    }

    /// How many ranks it has.
    pub const fn len(self) -> u32 {
        self.end.saturating_sub(self.first)
    }

    /// Whether it has none.
    pub const fn is_empty(self) -> bool {
        self.end <= self.first
    }

    /// What both have.
    pub fn and(self, other: Run) -> Run {
        Run { first: self.first.max(other.first), end: self.end.min(other.end) }
    }

    /// Each rank moved up; ranks that would be too large are left out.
    pub fn up(self, by: u32) -> Run {
        Run { first: self.first.saturating_add(by), end: self.end.saturating_add(by) }
    }

    /// Each rank moved down; ranks that would be negative are left out.
    pub fn down(self, by: u32) -> Run {
        Run { first: self.first.saturating_sub(by), end: self.end.saturating_sub(by) }
    }
}

/// How many ranks of a run leave `remainder` when divided by `modulus`, which is greater.
pub(crate) fn congruent(run: Run, remainder: u32, modulus: u32) -> u64 {
    if run.is_empty() {
        return 0;
    }
    let below = |end: u32| {
        let (end, modulus) = (u64::from(end), u64::from(modulus));
        (end + modulus - 1 - u64::from(remainder)) / modulus
    };
    below(run.end) - below(run.first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn congruent_ranks_are_those_that_a_filter_finds() {
        for (first, end) in (0..20).flat_map(|first| (0..20).map(move |end| (first, end))) {
            for (modulus, remainder) in (1..6).flat_map(|m| (0..m).map(move |r| (m, r))) {
                let found = (first..end).filter(|rank| rank % modulus == remainder).count() as u64;
                assert_eq!(congruent(Run::new(first, end), remainder, modulus), found);
            }
        }
    }
}
