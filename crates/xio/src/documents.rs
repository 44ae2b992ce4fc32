//! The documents of a token file: where each begins and how long it is.
//!
//! A table, because document lengths follow no rule. It is read once when a stream opens, and every
//! sampler that respects documents works on it; how it gets here (an index beside the file, a reply
//! of the target) does not belong here.

mod select;
mod targets;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use thiserror::Error;

pub use select::{
    Count, Dedup, Filter, HashList, Hashed, Kept, MAX_LIST, PartOf, Selection, select,
};
pub use targets::{TARGET_BYTES, Targets, TargetsBuilder};

/// Most documents of a dataset: 2.3 GiB of table, as many as in the largest index that is read.
pub const MAX_DOCUMENTS: usize = 200_000_000;

/// The documents of a file, in the order of the file. Between two of them there may be tokens of
/// none, as where documents were filtered out. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Documents {
    starts: Arc<[u64]>,
    lengths: Arc<[u32]>,
    targets: Option<Targets>,
}

/// Why runs of tokens are no documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DocumentsError {
    /// More than [`MAX_DOCUMENTS`].
    #[error("{documents} documents, at most {MAX_DOCUMENTS} are supported")]
    TooMany {
        /// How many.
        documents: usize,
    },
    /// A document begins before the end of the one before it.
    #[error("document {document} begins at token {start}, before the end of the one before it")]
    Overlap {
        /// Which one, from 0.
        document: usize,
        /// Its first token.
        start: u64,
    },
    /// A document has more than 2^32 - 1 tokens.
    #[error("document {document} has {tokens} tokens, at most 4,294,967,295 are supported")]
    TooLong {
        /// Which one, from 0.
        document: usize,
        /// Its tokens.
        tokens: u64,
    },
}

impl Documents {
    /// Documents at these tokens of the file, in ascending order. Empty ones are allowed.
    ///
    /// # Errors
    /// When two overlap, and when there are too many or one is too long.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Result<Documents, DocumentsError> {
        let (mut starts, mut lengths, mut end) = (Vec::new(), Vec::new(), 0);
        for (document, range) in ranges.into_iter().enumerate() {
            if document == MAX_DOCUMENTS {
                return Err(DocumentsError::TooMany { documents: document + 1 });
            }
            if range.start < end {
                return Err(DocumentsError::Overlap { document, start: range.start });
            }
            let tokens = range.end.saturating_sub(range.start);
            let too_long = |_| DocumentsError::TooLong { document, tokens };
            starts.push(range.start);
            lengths.push(u32::try_from(tokens).map_err(too_long)?);
            end = range.start + tokens;
        }
        Ok(Documents { starts: starts.into(), lengths: lengths.into(), targets: None })
    }

    /// Documents of these lengths in tokens, one after the other from the first token on.
    ///
    /// # Errors
    /// As [`new`](Documents::new).
    pub fn contiguous(lengths: impl IntoIterator<Item = u32>) -> Result<Documents, DocumentsError> {
        let mut end = 0u64;
        Documents::new(lengths.into_iter().map(|tokens| {
            let start = end;
            end += u64::from(tokens);
            start..end
        }))
    }

    /// The same documents, of whose tokens these are targets.
    #[must_use]
    pub fn with_targets(self, targets: Option<Targets>) -> Documents {
        Documents { targets, ..self }
    }

    /// Which of their tokens are targets; none where all are.
    pub fn targets(&self) -> Option<&Targets> {
        self.targets.as_ref()
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The tokens of a document, which must be one of [`len`](Documents::len).
    pub fn range(&self, document: usize) -> Range<u64> {
        let start = self.starts[document];
        start..start + u64::from(self.lengths[document])
    }

    /// Tokens of each document.
    pub fn lengths(&self) -> &[u32] {
        &self.lengths
    }

    /// The tokens of every document, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Range<u64>> + '_ {
        (0..self.len()).map(|document| self.range(document))
    }

    /// Tokens of all documents together.
    pub fn tokens(&self) -> u64 {
        self.lengths.iter().map(|tokens| u64::from(*tokens)).sum()
    }

    /// Those that hold a token.
    #[must_use]
    pub fn without_empty(self) -> Documents {
        self.retain(|document, _| !document.is_empty())
    }

    /// Those that [`borders`](Documents::borders) are of: an empty one at the end of another has
    /// none of its own.
    #[must_use]
    pub fn with_borders(self) -> Documents {
        self.retain(|document, end_before| !document.is_empty() || document.start > end_before)
    }

    /// Those that `keeps` says, which gets the end of the one before.
    fn retain(self, keeps: impl Fn(&Range<u64>, u64) -> bool + Copy) -> Documents {
        let kept = || {
            let mut end = 0;
            self.iter().filter(move |document| {
                let before = core::mem::replace(&mut end, document.end);
                keeps(document, before)
            })
        };
        if kept().count() == self.len() {
            return self;
        }
        let starts = kept().map(|document| document.start).collect();
        Documents {
            starts,
            lengths: kept().map(|document| (document.end - document.start) as u32).collect(),
            targets: self.targets.clone(),
        }
    }

    /// Where documents begin or end inside a range of tokens, in order; not at the ends of the
    /// range.
    pub fn borders(&self, range: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let first = self.starts.partition_point(|start| *start <= range.start).saturating_sub(1);
        let reached = (first..self.len()).map(|document| self.range(document));
        let reached = reached.take_while(move |document| document.start < range.end);
        let mut last = range.start;
        reached.flat_map(|document| [document.start, document.end]).filter(move |token| {
            let inside = (last + 1..range.end).contains(token);
            last = if inside { *token } else { last };
            inside
        })
    }

    /// The token after the last document.
    pub fn end(&self) -> u64 {
        self.len().checked_sub(1).map_or(0, |last| self.range(last).end)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn documents_are_where_they_were_said_to_be() {
        let documents = Documents::new([0..3, 3..3, 5..9]).unwrap();
        assert_eq!(documents.iter().collect::<Vec<_>>(), [0..3, 3..3, 5..9]);
        assert_eq!((documents.len(), documents.tokens(), documents.end()), (3, 7, 9));
        assert_eq!(Documents::contiguous([3, 0, 4]).unwrap().range(2), 3..7);
        assert!(Documents::default().is_empty());
        let filled = Documents::new([0..3, 5..9]).unwrap();
        assert_eq!(documents.without_empty(), filled);
        assert_eq!(filled.clone().without_empty(), filled);
        let gaps = Documents::new([0..0, 0..3, 3..3, 4..4, 4..4, 5..9]).unwrap();
        assert_eq!(gaps.borders(0..9).collect::<Vec<_>>(), [3, 4, 5]);
        let fewer = gaps.with_borders();
        assert_eq!((fewer.len(), fewer.borders(0..9).count()), (3, 3));
    }

    #[test]
    fn borders_lie_inside_a_range() {
        let documents = Documents::new([0..3, 3..3, 3..5, 8..9]).unwrap();
        let inside = |range| documents.borders(range).collect::<Vec<_>>();
        assert_eq!(inside(0..9), [3, 5, 8]);
        assert_eq!((inside(1..3), inside(2..4), inside(3..9)), (vec![], vec![3], vec![5, 8]));
        assert_eq!((inside(4..8), inside(5..8), inside(6..20)), (vec![5], vec![], vec![8, 9]));
        assert_eq!(Documents::default().borders(0..9).count(), 0);
    }

    #[test]
    fn overlaps_and_long_documents_are_refused() {
        let overlap = Documents::new([0..3, 2..4]);
        assert_eq!(overlap, Err(DocumentsError::Overlap { document: 1, start: 2 }));
        let tokens = 1 << 32;
        let long = Documents::new(core::iter::once(0..tokens));
        assert_eq!(long, Err(DocumentsError::TooLong { document: 0, tokens }));
    }
}
