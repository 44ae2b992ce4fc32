//! Which documents a plan keeps: a filter by a list of hashes, and deduplication.
//!
//! A pure function of tables, hashes and list. How they get here does not belong here, nor does how
//! a hash is computed: two documents are the same when their hashes are.

use alloc::string::String;
use alloc::vec::Vec;

use super::{Documents, DocumentsError};

/// Most hashes of a list: 0.8 GB.
pub const MAX_LIST: usize = 100_000_000;

/// The `filter` action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Name of the list of hashes: a name at the target, or a path of a local file.
    pub list: String,
    /// Whether the documents in the list are kept, and the others dropped.
    pub keep: bool,
}

/// The `dedup` action: of documents with one hash the first is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dedup {
    /// The first of each dataset.
    Within,
    /// The first of all datasets, in the order of the plan.
    Across,
}

/// The actions of a plan that drop documents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The filter, which comes first.
    pub filter: Option<Filter>,
    /// The deduplication of what the filter leaves.
    pub dedup: Option<Dedup>,
}

impl Selection {
    /// Whether it keeps everything.
    pub fn is_empty(&self) -> bool {
        self.filter.is_none() && self.dedup.is_none()
    }
}

/// Hashes in ascending order, each once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashList(Vec<u64>);

impl HashList {
    /// A list of these hashes, in any order.
    pub fn new(mut hashes: Vec<u64>) -> HashList {
        hashes.sort_unstable();
        hashes.dedup();
        HashList(hashes)
    }

    /// Whether it has this hash.
    pub fn contains(&self, hash: u64) -> bool {
        self.0.binary_search(&hash).is_ok()
    }
}

/// A dataset to select from.
#[derive(Clone, Debug)]
pub struct Hashed {
    /// Its documents.
    pub documents: Documents,
    /// The hash of each.
    pub hashes: Vec<u64>,
    /// Whether the plan draws from it. One of weight 0 has no part in the deduplication across
    /// datasets.
    pub drawn: bool,
}

/// Documents, and their tokens together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// How many.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
}

/// What is left of a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Its documents, with gaps between them.
    pub documents: Documents,
    /// What the filter dropped.
    pub filtered: Count,
    /// What the deduplication dropped.
    pub duplicates: Count,
}

/// Marks the documents of a file, of so many, that are of the part that is delivered.
pub type PartOf<'a> = &'a dyn Fn(usize) -> Vec<bool>;

/// Selects from all datasets of a plan, in the order of its blend. `list` is that of the filter. Of
/// what is left the documents of the part are delivered; it is told by their numbers in the file.
///
/// # Errors
/// Never for documents that were a table before, each of which has a hash.
pub fn select(
    selection: &Selection,
    part: PartOf<'_>,
    list: &HashList,
    datasets: &[Hashed],
) -> Result<Vec<Kept>, DocumentsError> {
    let keep = selection.filter.as_ref().map(|filter| filter.keep);
    let passes = |hash: &u64| keep.is_none_or(|keep| list.contains(*hash) == keep);
    let passed = |dataset: &Hashed| match selection.is_empty() {
        // Without their hashes, which nothing needs.
        true => alloc::vec![true; dataset.documents.len()],
        false => dataset.hashes.iter().map(passes).collect(),
    };
    let passed: Vec<Vec<bool>> = datasets.iter().map(passed).collect();
    let mut unique = passed.clone();
    match selection.dedup {
        None => {}
        Some(Dedup::Within) => {
            for dataset in 0..datasets.len() {
                drop_repeated(datasets, &[dataset], &mut unique);
            }
        }
        Some(Dedup::Across) => {
            let drawn = |dataset: &usize| datasets[*dataset].drawn;
            let drawn: Vec<usize> = (0..datasets.len()).filter(drawn).collect();
            drop_repeated(datasets, &drawn, &mut unique);
        }
    }
    let marks = passed.iter().zip(&unique);
    datasets
        .iter()
        .zip(marks)
        .map(|(dataset, (passed, unique))| {
            kept(dataset, passed, unique, &part(dataset.documents.len()))
        })
        .collect()
}

/// Unmarks the documents of these datasets whose hash a marked one before them has.
fn drop_repeated(datasets: &[Hashed], of: &[usize], marks: &mut [Vec<bool>]) {
    // Sorted, because a table of hashes would be slow for hashes that someone chose.
    let mut all: Vec<(u64, u32, u32)> = Vec::new();
    for (place, dataset) in (0..).zip(of) {
        let marked = (0..).zip(&datasets[*dataset].hashes).zip(&marks[*dataset]);
        let marked = marked.filter(|(_, marked)| **marked);
        all.extend(marked.map(|((document, hash), _)| (*hash, place, document)));
    }
    all.sort_unstable();
    for pair in all.windows(2) {
        let [(before, ..), (hash, place, document)] = pair else { continue };
        if before == hash {
            marks[of[*place as usize]][*document as usize] = false;
        }
    }
}

fn kept(
    dataset: &Hashed,
    passed: &[bool],
    unique: &[bool],
    own: &[bool],
) -> Result<Kept, DocumentsError> {
    let (mut filtered, mut duplicates) = (Count::default(), Count::default());
    let mut ranges = Vec::new();
    let marks = passed.iter().zip(unique).zip(own);
    for (range, ((passed, unique), own)) in dataset.documents.iter().zip(marks) {
        let dropped = match (passed, unique) {
            (_, true) => {
                ranges.extend(Some(range).filter(|_| *own));
                continue;
            }
            (true, false) => &mut duplicates,
            (false, false) => &mut filtered,
        };
        dropped.documents += 1;
        dropped.tokens += range.end - range.start;
    }
    let documents = Documents::new(ranges)?.with_targets(dataset.documents.targets().cloned());
    Ok(Kept { documents, filtered, duplicates })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use proptest::prelude::*;
    use std::vec;

    const WHOLE: PartOf<'_> = &|documents| vec![true; documents];

    fn hashed(lengths: &[u32], hashes: &[u64]) -> Hashed {
        let documents = Documents::contiguous(lengths.iter().copied()).unwrap();
        Hashed { documents, hashes: hashes.to_vec(), drawn: true }
    }

    fn filter(keep: bool) -> Selection {
        Selection { filter: Some(Filter { list: "l".into(), keep }), dedup: None }
    }

    #[test]
    fn filters_drop_or_keep_what_is_listed() {
        let data = [hashed(&[3, 0, 5, 2], &[7, 8, 7, 9])];
        let list = HashList::new(vec![9, 7, 7, 1]);
        let dropped = select(&filter(false), WHOLE, &list, &data).unwrap();
        assert_eq!(dropped[0].documents.iter().collect::<Vec<_>>(), vec![3..3; 1]);
        assert_eq!(dropped[0].filtered, Count { documents: 3, tokens: 10 });
        let kept = select(&filter(true), WHOLE, &list, &data).unwrap();
        assert_eq!(kept[0].documents, Documents::new([0..3, 3..8, 8..10]).unwrap());
        let half: PartOf<'_> = &|documents| (0..documents).map(|at| at % 2 == 0).collect();
        let part = select(&filter(true), half, &list, &data).unwrap();
        assert_eq!(part[0].documents, Documents::new([0..3, 3..8]).unwrap());
        assert_eq!(part[0].filtered, kept[0].filtered);
        let all = select(&Selection::default(), WHOLE, &list, &data).unwrap();
        assert_eq!(all[0].documents, data[0].documents);
    }

    #[test]
    fn the_first_of_the_same_is_kept() {
        let mut data = [hashed(&[1, 2, 3], &[5, 5, 6]), hashed(&[4, 5], &[6, 7])];
        let select = |dedup, data: &[Hashed]| {
            let selection = Selection { filter: None, dedup: Some(dedup) };
            let kept = select(&selection, WHOLE, &HashList::default(), data).unwrap();
            let ranges = |kept: &Kept| kept.documents.iter().collect::<Vec<_>>();
            (kept.iter().map(ranges).collect::<Vec<_>>(), kept[0].duplicates)
        };
        let one = Count { documents: 1, tokens: 2 };
        assert_eq!(select(Dedup::Within, &data), (vec![vec![0..1, 3..6], vec![0..4, 4..9]], one));
        assert_eq!(select(Dedup::Across, &data), (vec![vec![0..1, 3..6], vec![4..9]], one));
        // What is never drawn displaces nothing.
        data[0].drawn = false;
        let (ranges, none) = select(Dedup::Across, &data);
        assert_eq!((ranges[1].len(), none), (2, Count::default()));
    }

    proptest! {
        #[test]
        fn selection_is_that_of_a_set(
            sets in prop::collection::vec(prop::collection::vec((0u32..9, 0u64..12), 0..30), 1..4),
            list in prop::collection::vec(0u64..12, 0..6), keep in any::<bool>(), across in any::<bool>(),
        ) {
            let data: Vec<Hashed> = sets.iter().map(|set| {
                let (lengths, hashes): (Vec<u32>, Vec<u64>) = set.iter().copied().unzip();
                hashed(&lengths, &hashes)
            }).collect();
            let dedup = Some(if across { Dedup::Across } else { Dedup::Within });
            let selection = Selection { dedup, ..filter(keep) };
            let kept = select(&selection, WHOLE, &HashList::new(list.clone()), &data).unwrap();
            let mut seen = BTreeSet::new();
            for (data, kept) in data.iter().zip(&kept) {
                if !across {
                    seen.clear();
                }
                let want: Vec<_> = data.documents.iter().zip(&data.hashes)
                    .filter(|(_, hash)| list.contains(hash) == keep && seen.insert(**hash))
                    .map(|(range, _)| range).collect();
                prop_assert_eq!(kept.documents.iter().collect::<Vec<_>>(), want);
                let dropped = kept.filtered.documents + kept.duplicates.documents;
                prop_assert_eq!(dropped + kept.documents.len() as u64, data.documents.len() as u64);
                let tokens = kept.filtered.tokens + kept.duplicates.tokens + kept.documents.tokens();
                prop_assert_eq!(tokens, data.documents.tokens());
            }
        }
    }
}
