//! Which batches of the global order one stream delivers, and to which of its rings.
//!
//! A step of a job with R data-parallel ranks consumes R consecutive batches of the order, one for
//! each rank:
//!
//! ```text
//! batch       0 1 2 3 | 4 5 6 7 | 8 9 …          R = 4
//! rank        0 1 2 3 | 0 1 2 3 | 0 1 …
//! step           0    |    1    | 2
//! ```
//!
//! A stream serves the ranks of one machine, `count` of them from `first` on. Every other batch is
//! walked over: which samples come next does not depend on the share. The union of all shares is
//! the order, and the batches of a step are consecutive samples whatever R is.

/// The ranks that a stream serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Data-parallel ranks of the job, at least one.
    pub ranks: u32,
    /// The first one served.
    pub first: u32,
    /// How many are served, at least one; each has a ring of its own.
    pub count: u32,
}

impl Share {
    /// The most ranks of a job.
    pub const MAX_RANKS: u32 = 1 << 20;

    /// All batches, in one ring.
    pub const WHOLE: Share = Share { ranks: 1, first: 0, count: 1 };

    /// Whether there are such ranks.
    pub fn is_valid(&self) -> bool {
        let end = self.first.checked_add(self.count);
        self.ranks <= Share::MAX_RANKS && self.count > 0 && end.is_some_and(|end| end <= self.ranks)
    }

    /// The step and the rank of the `index`-th batch of a stream, counted over all ranks.
    pub(super) fn place(&self, index: u64) -> (u64, u32) {
        let ranks = u64::from(self.ranks);
        (index / ranks, (index % ranks) as u32)
    }

    /// The ring of a rank, if it is served.
    pub(super) fn ring(&self, rank: u32) -> Option<u32> {
        rank.checked_sub(self.first).filter(|ring| *ring < self.count)
    }
}
