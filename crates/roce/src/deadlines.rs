//! The next deadline among many queue pairs: a binary heap that tracks the position of each queue
//! pair.
//!
//! A running transport moves deadlines far more often than they expire, so an entry is moved in
//! place instead of leaving stale ones behind: [`Deadlines::earliest`] is exact, and the heap never
//! holds more than one entry per queue pair. Ties go to the lower slot, which keeps runs
//! replayable.

use alloc::vec::Vec;

use crate::time::Time;

const ABSENT: u32 = u32::MAX;

/// Deadlines by queue pair slot.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    heap: Vec<(Time, u32)>,
    /// Where each slot's entry is in `heap`.
    positions: Vec<u32>,
}

impl Deadlines {
    /// The earliest deadline and its slot.
    pub(crate) fn earliest(&self) -> Option<(Time, u32)> {
        self.heap.first().copied()
    }

    /// Sets, moves or clears the deadline of `slot`.
    #[inline]
    pub(crate) fn set(&mut self, slot: u32, deadline: Option<Time>) {
        let position = self.positions.get(slot as usize).copied().unwrap_or(ABSENT);
        match (position, deadline) {
            (ABSENT, None) => {}
            (ABSENT, Some(time)) => self.insert(slot, time),
            (_, None) => self.remove(position as usize),
            (_, Some(time)) => self.replace(position as usize, time),
        }
    }

    fn insert(&mut self, slot: u32, time: Time) {
        if self.positions.len() <= slot as usize {
            self.positions.resize(slot as usize + 1, ABSENT);
        }
        self.heap.push((time, slot));
        self.positions[slot as usize] = self.heap.len() as u32 - 1;
        self.sift_up(self.heap.len() - 1);
    }

    fn remove(&mut self, at: usize) {
        let (_, slot) = self.heap.swap_remove(at);
        self.positions[slot as usize] = ABSENT;
        if at < self.heap.len() {
            self.restore(at);
        }
    }

    fn replace(&mut self, at: usize, time: Time) {
        if self.heap[at].0 != time {
            self.heap[at].0 = time;
            self.restore(at);
        }
    }

    /// Moves the entry at `at`, which may have any value, to where it belongs.
    fn restore(&mut self, at: usize) {
        self.positions[self.heap[at].1 as usize] = at as u32;
        let at = self.sift_up(at);
        self.sift_down(at);
    }

    fn sift_up(&mut self, mut at: usize) -> usize {
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.heap[parent] <= self.heap[at] {
                break;
            }
            self.swap(at, parent);
            at = parent;
        }
        at
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let children = 2 * at + 1..(2 * at + 3).min(self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.heap[child]) else {
                break;
            };
            if self.heap[at] <= self.heap[least] {
                break;
            }
            self.swap(at, least);
            at = least;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.positions[self.heap[a].1 as usize] = a as u32;
        self.positions[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use alloc::collections::BTreeMap;

    #[test]
    fn agrees_with_a_scan_of_all_deadlines() {
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let mut heap = Deadlines::default();
            let mut model = BTreeMap::new();
            for _ in 0..2_000 {
                let slot = rng.next_u32() % 40;
                let time = Time::from_nanos(u64::from(rng.next_u32() % 100));
                if rng.next_u32().is_multiple_of(3) {
                    heap.set(slot, None);
                    model.remove(&slot);
                } else {
                    heap.set(slot, Some(time));
                    model.insert(slot, time);
                }
                let expected = model.iter().map(|(&slot, &time)| (time, slot)).min();
                assert_eq!(heap.earliest(), expected, "seed {seed}");
            }
        }
    }
}
