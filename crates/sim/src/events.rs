//! The event queue: events by time, ties in the order in which they were added.

use alloc::collections::BinaryHeap;
use core::cmp::Reverse;

use roce::Time;

/// Events by time. Of two at the same instant, the one added first comes first, so a run does not
/// depend on the heap's implementation.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    added: u64,
}

#[derive(Debug)]
struct Entry<E> {
    /// Time in the high half, order of adding in the low one: one comparison.
    key: u128,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Entry<E>) -> bool {
        self.key == other.key
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Entry<E>) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Entry<E>) -> core::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl<E> Entry<E> {
    fn at(&self) -> Time {
        Time::from_nanos((self.key >> 64) as u64)
    }
}

impl<E> EventQueue<E> {
    pub(crate) fn new() -> EventQueue<E> {
        EventQueue { heap: BinaryHeap::new(), added: 0 }
    }

    pub(crate) fn add(&mut self, at: Time, event: E) {
        let key = u128::from(at.as_nanos()) << 64 | u128::from(self.added);
        self.added += 1;
        self.heap.push(Reverse(Entry { key, event }));
    }

    /// The next event, and when it is due.
    pub(crate) fn peek(&self) -> Option<(Time, &E)> {
        self.heap.peek().map(|Reverse(entry)| (entry.at(), &entry.event))
    }

    /// When the next event is due.
    pub(crate) fn next_at(&self) -> Option<Time> {
        self.peek().map(|(at, _)| at)
    }

    /// The next event, if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<E> {
        let due = self.next_at().is_some_and(|at| at <= now);
        if due { self.heap.pop().map(|Reverse(entry)| entry.event) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn time_first_then_the_order_of_adding() {
        let mut queue = EventQueue::new();
        for (at, event) in [(5, 'd'), (1, 'a'), (5, 'e'), (1, 'b'), (2, 'c')] {
            queue.add(Time::from_nanos(at), event);
        }
        assert_eq!(queue.pop_due(Time::ZERO), None);
        let all = Time::from_nanos(9);
        let order: Vec<char> = core::iter::from_fn(|| queue.pop_due(all)).collect();
        assert_eq!(order, ['a', 'b', 'c', 'd', 'e']);
    }
}
