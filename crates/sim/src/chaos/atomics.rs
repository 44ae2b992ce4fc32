//! Checks that atomics were executed exactly once: a serial order that explains every original
//! value.
//!
//! Each 64-bit word has a history: its first value, and per connection the atomics sent to it, in
//! order, with the original values returned. Operands are random 64-bit numbers, so a value
//! identifies the operation that wrote it. The history is valid if there is an order of all
//! operations that keeps the order of each connection, yields each original value, and ends at the
//! word's last value. An operation whose connection failed before the response may have happened or
//! not; such operations are at the end of their connection.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;

use roce::world::AtomicOp;

/// One operation, and its original value, if that is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) op: AtomicOp,
    pub(super) former: Option<u64>,
}

/// The history of one word.
#[derive(Clone, Debug)]
pub(super) struct WordHistory {
    first: u64,
    streams: Vec<(u64, Vec<Attempt>)>,
}

/// States that the search visits before it leaves the question open. Only histories with very many
/// operations without a response come near.
const MAX_STATES: usize = 50_000;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// There is a serial order.
    Explained,
    /// There is none; at best this many operations are explained.
    Impossible { explained: usize },
    /// Too many orders are possible to try them all.
    Open,
}

impl WordHistory {
    pub(super) fn new(first: u64) -> WordHistory {
        WordHistory { first, streams: Vec::new() }
    }

    /// Adds the next attempt of a connection.
    pub(super) fn add(&mut self, stream: u64, attempt: Attempt) {
        match self.streams.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, attempts)) => attempts.push(attempt),
            None => self.streams.push((stream, Vec::from([attempt]))),
        }
    }

    /// Whether a serial order explains the history. `last` is the word's value now, unless it is
    /// lost.
    pub(super) fn judge(&self, last: Option<u64>) -> Verdict {
        let attempts = self.streams.iter().map(|(_, attempts)| attempts.as_slice()).collect();
        let mut search = Search { attempts, last, tried: BTreeSet::new(), deepest: 0 };
        let heads = vec![0; self.streams.len()];
        if search.explains(self.first, heads) {
            return Verdict::Explained;
        }
        match search.tried.len() < MAX_STATES {
            true => Verdict::Impossible { explained: search.deepest },
            false => Verdict::Open,
        }
    }

    /// How many operations it has.
    pub(super) fn len(&self) -> usize {
        self.streams.iter().map(|(_, attempts)| attempts.len()).sum()
    }
}

/// Depth first, through the operations without a response only: the known ones follow from the
/// value.
struct Search<'a> {
    attempts: Vec<&'a [Attempt]>,
    last: Option<u64>,
    /// States that lead nowhere, or are being visited: value, and the next operation of each
    /// stream.
    tried: BTreeSet<(u64, Vec<usize>)>,
    deepest: usize,
}

impl Search<'_> {
    /// Takes every operation known to have returned `value`, then tries those that may have been
    /// executed.
    fn explains(&mut self, mut value: u64, mut heads: Vec<usize>) -> bool {
        while let Some(stream) = self.known(value, &heads) {
            value = self.attempts[stream][heads[stream]].op.apply(value);
            heads[stream] += 1;
        }
        self.deepest = self.deepest.max(heads.iter().sum());
        if self.is_complete(value, &heads) {
            return true;
        }
        if self.tried.len() >= MAX_STATES || !self.tried.insert((value, heads.clone())) {
            return false;
        }
        let mut guesses: Vec<_> =
            (0..heads.len()).filter_map(|s| self.guess(s, value, &heads)).collect();
        // Those that lead directly to a known operation come first.
        guesses.sort_by_key(|&(_, _, next)| !self.is_wanted(next, &heads));
        guesses.into_iter().any(|(stream, head, next)| {
            let mut heads = heads.clone();
            heads[stream] = head;
            self.explains(next, heads)
        })
    }

    /// A connection whose next operation returned `value`; those that did not change it come first.
    fn known(&self, value: u64, heads: &[usize]) -> Option<usize> {
        let next = |stream: usize| self.attempts[stream].get(heads[stream]);
        let found = |stream: &usize| next(*stream).is_some_and(|a| a.former == Some(value));
        let leaves = |stream: &usize| next(*stream).is_some_and(|a| a.op.apply(value) == value);
        let idle = (0..heads.len()).find(|stream| found(stream) && leaves(stream));
        idle.or_else(|| (0..heads.len()).find(found))
    }

    fn is_complete(&self, value: u64, heads: &[usize]) -> bool {
        let open = |stream: usize| self.attempts[stream][heads[stream]..].iter();
        let all_known = (0..heads.len()).all(|at| open(at).all(|a| a.former.is_none()));
        all_known && self.last.is_none_or(|last| last == value)
    }

    /// The next operation without a response of a stream that would change the value, the place
    /// after it, and the new value. Those before it would change nothing now, executed or not.
    fn guess(&self, stream: usize, value: u64, heads: &[usize]) -> Option<(usize, usize, u64)> {
        let open = self.attempts[stream][heads[stream]..].iter();
        let mut open = open.take_while(|attempt| attempt.former.is_none()).enumerate();
        open.find_map(|(place, attempt)| {
            let next = attempt.op.apply(value);
            (next != value).then_some((stream, heads[stream] + place + 1, next))
        })
    }

    /// Whether some operation is known to have returned `value`, or the word holds it now.
    fn is_wanted(&self, value: u64, heads: &[usize]) -> bool {
        let is_next = |stream: usize| {
            let next = self.attempts[stream].get(heads[stream]);
            next.is_some_and(|attempt| attempt.former == Some(value))
        };
        self.last == Some(value) || (0..heads.len()).any(is_next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    const SWAP: fn(u64, u64) -> AtomicOp = |compare, swap| AtomicOp::CompareSwap { compare, swap };

    fn is_impossible(verdict: Verdict) -> bool {
        matches!(verdict, Verdict::Impossible { .. })
    }

    /// A word with the operations of several connections, executed one after the other.
    fn history(seed: u64, unanswered: bool) -> (WordHistory, u64) {
        let mut chance = Chance::new(seed);
        let mut value = chance.word();
        let mut history = WordHistory::new(value);
        for _ in 0..60 {
            let op = match chance.below(3) {
                0 => AtomicOp::FetchAdd(chance.word()),
                1 => SWAP(value, chance.word()),
                _ => SWAP(chance.word(), chance.word()),
            };
            history.add(chance.below(4), Attempt { op, former: Some(value) });
            value = op.apply(value);
        }
        // The first of them was executed on one connection, and two on another.
        for (stream, carried_out) in
            [(0, 0), (1, 1), (2, 2), (3, 0)].into_iter().filter(|_| unanswered)
        {
            for place in 0..3 {
                let op = AtomicOp::FetchAdd(chance.word());
                history.add(stream, Attempt { op, former: None });
                value = if place < carried_out { op.apply(value) } else { value };
            }
        }
        (history, value)
    }

    #[test]
    fn a_true_history_is_explained() {
        for seed in 0..50 {
            let (history, last) = history(seed, false);
            assert_eq!(history.judge(Some(last)), Verdict::Explained);
            assert_eq!(history.judge(None), Verdict::Explained);
        }
    }

    #[test]
    fn unanswered_ones_may_or_may_not_have_happened() {
        let add = AtomicOp::FetchAdd;
        let mut history = WordHistory::new(10);
        history.add(0, Attempt { op: add(100), former: Some(10) });
        history.add(1, Attempt { op: add(7), former: None });
        history.add(2, Attempt { op: add(1_000), former: Some(117) });
        assert_eq!(history.judge(Some(1_117)), Verdict::Explained);
        assert!(is_impossible(history.judge(Some(1_110))));
        assert!(is_impossible(history.judge(Some(1_124))));
    }

    #[test]
    fn an_operation_done_twice_or_not_at_all_is_noticed() {
        for seed in 0..50 {
            let (history, last) = history(seed, true);
            let [twice, never] = [last.wrapping_add(12_345), last ^ 1];
            assert_eq!(history.judge(Some(last)), Verdict::Explained);
            assert!(is_impossible(history.judge(Some(twice))));
            assert!(is_impossible(history.judge(Some(never))));
        }
    }

    #[test]
    fn the_order_of_a_connection_is_kept() {
        let mut history = WordHistory::new(1);
        history.add(0, Attempt { op: AtomicOp::FetchAdd(2), former: Some(3) });
        history.add(0, Attempt { op: AtomicOp::FetchAdd(2), former: Some(1) });
        assert!(is_impossible(history.judge(Some(5))));
    }
}
