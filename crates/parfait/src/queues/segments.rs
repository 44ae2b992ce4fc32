//! The best partition of a sequence into few runs, by dynamic programming.
//!
//! Runs are enough where each element costs as much as the largest of its part: it belongs to the
//! part with the smallest largest element that is not below it, and these are runs of the sorted
//! sequence.

use alloc::vec::Vec;

/// A partition.
pub(super) struct Partition {
    /// One past the last element of each part.
    pub(super) ends: Vec<usize>,
    /// What each part costs.
    pub(super) costs: Vec<u128>,
}

/// A way to partition the first elements.
#[derive(Clone, Copy)]
struct Way {
    total: u128,
    /// The last part: its first element, cost, and how many of its elements are left out.
    from: usize,
    cost: u128,
    left_out: usize,
}

/// The partition of `len` elements into at most `most` runs that leaves out fewest elements, and
/// then costs least; `None` if all cost more than the limit. `costs` says what a part costs with
/// none, one, two … elements left out.
pub(super) fn best(
    len: usize,
    most: usize,
    limit: u128,
    costs: impl Fn(usize, usize) -> Vec<u128>,
) -> Option<Partition> {
    let start = Way { total: 0, from: 0, cost: 0, left_out: 0 };
    // By number of parts, elements and those left out.
    let mut ways = alloc::vec![alloc::vec![alloc::vec![None; len + 1]; len + 1]; most + 1];
    ways[0][0][0] = Some(start);
    for (from, to) in (0..len).flat_map(|from| (from + 1..=len).map(move |to| (from, to))) {
        for (left_out, cost) in costs(from, to).into_iter().enumerate() {
            for (parts, before) in (0..most).flat_map(|p| (0..=from).map(move |b| (p, b))) {
                let Some(way): Option<Way> = ways[parts][from][before] else { continue };
                let total = way.total.saturating_add(cost);
                let place = &mut ways[parts + 1][to][before + left_out];
                if total <= limit && place.is_none_or(|other: Way| total < other.total) {
                    *place = Some(Way { total, from, cost, left_out });
                }
            }
        }
    }
    let mut left_out =
        (0..=len).find(|left_out| ways.iter().any(|w| w[len][*left_out].is_some()))?;
    let total = |parts: &usize| ways[*parts][len][left_out].map_or(u128::MAX, |way| way.total);
    let parts = (0..=most).min_by_key(total)?;
    let mut partition = Partition { ends: Vec::new(), costs: Vec::new() };
    let mut end = len;
    for parts in (1..=parts).rev() {
        let way = ways[parts][end][left_out]?;
        partition.ends.push(end);
        partition.costs.push(way.cost);
        (end, left_out) = (way.from, left_out - way.left_out);
    }
    partition.ends.reverse();
    partition.costs.reverse();
    Some(partition)
}

/// The parts of a partition.
pub(super) fn split<T: Clone>(elements: &[T], ends: &[usize]) -> Vec<Vec<T>> {
    let mut from = 0;
    let part = |end: &usize| elements[core::mem::replace(&mut from, *end)..*end].to_vec();
    ends.iter().map(part).collect()
}
