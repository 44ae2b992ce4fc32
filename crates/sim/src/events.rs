//! The event queue: events by time, ties in the order in which they were added.
//!
//! Nearly all events of a network are a few microseconds ahead: the end of a packet's departure,
//! its arrival. They are in a wheel with a slot for each nanosecond, in which the events of one
//! instant form a list in the order of adding, so that neither adding nor taking compares anything.
//! The others, mostly timers, are in a heap until their time comes near enough. Every event in the
//! wheel is earlier than every one in the heap.

use alloc::collections::BinaryHeap;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;

use roce::Time;

/// Slots of the wheel, one per nanosecond; a multiple of the square of a word's bits, for two
/// levels of bitmaps.
const SLOTS: usize = 8_192;

const WORD: usize = 64;

/// No entry.
const NONE: u32 = u32::MAX;

/// Events by time. Of two at the same instant, the one added first comes first, so a run does not
/// depend on this implementation.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    /// The earliest time that may be in the wheel, in nanoseconds: that of the last event taken.
    base: u64,
    /// By time modulo [`SLOTS`]: first and last entry.
    slots: Vec<[u32; 2]>,
    /// Slots that have entries, and words of this bitmap that are not 0.
    filled: [u64; SLOTS / WORD],
    filled_words: [u64; SLOTS / WORD / WORD],
    /// The time of the first event in the wheel, while it is known.
    first_at: Option<u64>,
    entries: Vec<Entry<E>>,
    /// The first entry that is not in use.
    free: u32,
    far: BinaryHeap<Reverse<Far<E>>>,
    added: u64,
}

/// An event in the wheel.
#[derive(Debug)]
struct Entry<E> {
    event: Option<E>,
    next: u32,
}

/// An event beyond the wheel.
#[derive(Debug)]
struct Far<E> {
    /// Time in the high half, order of adding in the low one: one comparison.
    key: u128,
    event: E,
}

impl<E> PartialEq for Far<E> {
    fn eq(&self, other: &Far<E>) -> bool {
        self.key == other.key
    }
}

impl<E> Eq for Far<E> {}

impl<E> PartialOrd for Far<E> {
    fn partial_cmp(&self, other: &Far<E>) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Far<E> {
    fn cmp(&self, other: &Far<E>) -> core::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

impl<E> Far<E> {
    fn at(&self) -> u64 {
        (self.key >> 64) as u64
    }
}

impl<E> EventQueue<E> {
    pub(crate) fn new() -> EventQueue<E> {
        EventQueue {
            base: 0,
            slots: vec![[NONE; 2]; SLOTS],
            filled: [0; SLOTS / WORD],
            filled_words: [0; SLOTS / WORD / WORD],
            first_at: None,
            entries: Vec::new(),
            free: NONE,
            far: BinaryHeap::new(),
            added: 0,
        }
    }

    /// Adds an event at a time that is not before that of the last event taken.
    pub(crate) fn add(&mut self, at: Time, event: E) {
        let at = at.as_nanos();
        debug_assert!(at >= self.base, "time does not go back");
        if at - self.base < SLOTS as u64 {
            return self.add_near(at, event);
        }
        let key = u128::from(at) << 64 | u128::from(self.added);
        self.added += 1;
        self.far.push(Reverse(Far { key, event }));
    }

    fn add_near(&mut self, at: u64, event: E) {
        let entry = self.entry(event);
        self.first_at = self.first_at.map(|first| first.min(at));
        let slot = at as usize % SLOTS;
        let [first, last] = &mut self.slots[slot];
        match *first {
            NONE => *first = entry,
            _ => self.entries[*last as usize].next = entry,
        }
        *last = entry;
        self.filled[slot / WORD] |= 1 << (slot % WORD);
        self.filled_words[slot / WORD / WORD] |= 1 << (slot / WORD % WORD);
    }

    fn entry(&mut self, event: E) -> u32 {
        let new = Entry { event: Some(event), next: NONE };
        match self.entries.get_mut(self.free as usize) {
            Some(unused) => {
                let at = core::mem::replace(&mut self.free, unused.next);
                *unused = new;
                at
            }
            None => {
                self.entries.push(new);
                self.entries.len() as u32 - 1
            }
        }
    }

    /// The time of the first event in the wheel.
    fn near_at(&mut self) -> Option<u64> {
        if self.first_at.is_none() {
            self.first_at = self.search();
        }
        self.first_at
    }

    fn search(&self) -> Option<u64> {
        let start = self.base as usize % SLOTS;
        let slot = self.first_from(start).or_else(|| self.first_from(0))?;
        // Slots before the start belong to the next turn of the wheel.
        let ahead = (slot + SLOTS - start) % SLOTS;
        Some(self.base + ahead as u64)
    }

    /// The first filled slot from this one to the end of the wheel.
    fn first_from(&self, slot: usize) -> Option<usize> {
        let word = slot / WORD;
        let here = self.filled[word] & (u64::MAX << (slot % WORD));
        if here != 0 {
            return Some(word * WORD + here.trailing_zeros() as usize);
        }
        let mut group = (word + 1) / WORD;
        let mut words = *self.filled_words.get(group)? & (u64::MAX << ((word + 1) % WORD));
        while words == 0 {
            group += 1;
            words = *self.filled_words.get(group)?;
        }
        let word = group * WORD + words.trailing_zeros() as usize;
        Some(word * WORD + self.filled[word].trailing_zeros() as usize)
    }

    /// The next event, and when it is due.
    pub(crate) fn peek(&mut self) -> Option<(Time, &E)> {
        if let Some(at) = self.near_at() {
            let [first, _] = self.slots[at as usize % SLOTS];
            let event = self.entries[first as usize].event.as_ref()?;
            return Some((Time::from_nanos(at), event));
        }
        self.far.peek().map(|Reverse(far)| (Time::from_nanos(far.at()), &far.event))
    }

    /// When the next event is due.
    pub(crate) fn next_at(&mut self) -> Option<Time> {
        let far = |queue: &Self| queue.far.peek().map(|Reverse(far)| far.at());
        self.near_at().or_else(|| far(self)).map(Time::from_nanos)
    }

    /// The next event, if it is due at `now`.
    pub(crate) fn pop_due(&mut self, now: Time) -> Option<E> {
        if now.as_nanos() == self.base {
            // All events of this instant are in its slot.
            let [first, _] = self.slots[self.base as usize % SLOTS];
            return if first == NONE { None } else { self.take_near(self.base) };
        }
        let at = self.next_at().filter(|&at| at <= now)?.as_nanos();
        self.turn_to(at);
        self.take_near(at)
    }

    /// Drops the next event, whenever it is due: time does not move, and earlier ones may still be
    /// added.
    pub(crate) fn drop_next(&mut self) {
        match self.near_at() {
            Some(at) => drop(self.take_near(at)),
            None => drop(self.far.pop()),
        }
    }

    /// The first event at this time, which is in the wheel.
    fn take_near(&mut self, at: u64) -> Option<E> {
        let slot = at as usize % SLOTS;
        let [first, _] = self.slots[slot];
        let entry = &mut self.entries[first as usize];
        let event = entry.event.take();
        let next = core::mem::replace(&mut entry.next, self.free);
        self.free = first;
        self.slots[slot][0] = next;
        if next == NONE {
            self.empty(slot);
            self.first_at = None;
        }
        event
    }

    /// Takes what has come near enough into the wheel, before anything is added to the same slots.
    fn turn_to(&mut self, at: u64) {
        self.base = at;
        while let Some(Reverse(far)) = self.far.peek()
            && far.at() - at < SLOTS as u64
        {
            if let Some(Reverse(far)) = self.far.pop() {
                self.add_near(far.at(), far.event);
            }
        }
    }

    fn empty(&mut self, slot: usize) {
        self.filled[slot / WORD] &= !(1 << (slot % WORD));
        if self.filled[slot / WORD] == 0 {
            self.filled_words[slot / WORD / WORD] &= !(1 << (slot / WORD % WORD));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;
    use alloc::collections::BTreeMap;

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

    #[test]
    fn it_does_what_a_sorted_map_does() {
        for seed in 0..50 {
            let mut chance = Chance::new(seed);
            let (mut queue, mut model) = (EventQueue::new(), BTreeMap::new());
            let mut now = chance.below(1 << 40);
            for number in 0..4_000_u64 {
                // Ties, the end of the wheel and its wrap, and far beyond it.
                let wheel = SLOTS as u64;
                let span = [1, 2, 100, wheel, wheel + 2, 3 * wheel, 1 << 30];
                let span = chance.pick(&span);
                let at = now + chance.below(span) + if span > 100 { chance.below(3) } else { 0 };
                queue.add(Time::from_nanos(at), number);
                model.insert((at, number), ());
                if chance.per_mille(450) {
                    continue;
                }
                if chance.per_mille(100) {
                    queue.drop_next();
                    model.pop_first();
                    continue;
                }
                let due = Time::from_nanos(now + chance.below(2 * wheel));
                let first = model.first_key_value().map(|(&key, ())| key);
                assert_eq!(queue.peek().map(|(at, &event)| (at.as_nanos(), event)), first);
                let first = first.filter(|&(at, _)| at <= due.as_nanos());
                assert_eq!(queue.pop_due(due), first.map(|(_, event)| event), "seed {seed}");
                if let Some((at, event)) = first {
                    now = at;
                    model.remove(&(at, event));
                }
            }
            let rest: Vec<u64> =
                core::iter::from_fn(|| queue.pop_due(Time::from_nanos(u64::MAX))).collect();
            assert_eq!(rest, model.into_keys().map(|(_, event)| event).collect::<Vec<u64>>());
        }
    }
}
