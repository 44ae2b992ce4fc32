//! Packets that arrived out of order, until their turn comes.
//!
//! A ring by PSN. The caller decides what is kept for each packet. How far ahead of the expected
//! packet anything is accepted is bounded by what the sender can have in flight: all packets
//! missing from the expected one on are in flight, which is a window of packets at most. So a
//! forger has to guess a PSN within the window.
//!
//! The ring reaches as far as packets were out of order at a time, in powers of two: where paths
//! differ little and nothing is lost it stays small, or empty. Packets in their turn touch nothing
//! of it while nothing is kept.

use alloc::boxed::Box;

use crate::wire::{Psn, Sack};

/// Packets are accepted at most this far ahead of the expected one.
pub(crate) const MAX_AHEAD: u32 = 2048;

/// How far the first ring reaches.
const FIRST_PACKETS: usize = 8;

/// How far ahead of the oldest missing packet the sender sends, and the receiver accepts, with a
/// window of this many packets in flight: a packet is known to be lost one window later, and its
/// retransmission arrives after another one; the rest is for packets lost twice.
pub(crate) const fn horizon(window_packets: u32) -> u32 {
    let wanted = window_packets.saturating_mul(4);
    if wanted < MAX_AHEAD { wanted } else { MAX_AHEAD }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Arrivals<T> {
    /// By PSN modulo its length, a power of two; empty until the first packet is kept.
    ring: Box<[Option<T>]>,
    /// Most packets that the sender has in flight.
    window: u32,
    count: u32,
    /// One past the furthest packet that is or was kept.
    furthest: Psn,
}

/// Whether a packet may be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// It is new, and there is room.
    Free,
    /// It is there already.
    Taken,
    /// It is further ahead than any packet in flight can be.
    Beyond,
}

impl<T> Arrivals<T> {
    /// For a sender with `window` packets in flight at most.
    pub(crate) fn new(expected: Psn, window: u32) -> Arrivals<T> {
        Arrivals { ring: Box::default(), window, count: 0, furthest: expected }
    }

    fn slot(&self, psn: Psn) -> usize {
        psn.get() as usize & self.ring.len().wrapping_sub(1)
    }

    /// Makes the ring reach `ahead` packets beyond the expected one.
    #[cold]
    fn grow(&mut self, expected: Psn, ahead: usize) {
        let count = self.count;
        let slots = (ahead + 1).next_power_of_two().max(FIRST_PACKETS);
        let mut ring: Box<[Option<T>]> = core::iter::repeat_with(|| None).take(slots).collect();
        let mut psn = expected;
        for _ in 0..self.ring.len() {
            ring[psn.get() as usize & (slots - 1)] = self.take(psn);
            psn = psn.next();
        }
        (self.ring, self.count) = (ring, count);
    }

    fn is_within(&self, expected: Psn, psn: Psn) -> bool {
        let ahead = psn.distance_from(expected);
        ahead >= 0 && (ahead as usize) < self.ring.len()
    }

    /// Whether the sender can have `psn` in flight: the packets missing up to there fit its window.
    fn is_in_flight(&self, expected: Psn, psn: Psn) -> bool {
        let most = horizon(self.window).min(self.window.saturating_add(self.count));
        psn.distance_from(expected) < most as i32
    }

    /// Whether nothing is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Packets kept.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// One past the furthest packet kept, at least `expected`.
    pub(crate) fn furthest(&self, expected: Psn) -> Psn {
        if self.furthest.is_before(expected) { expected } else { self.furthest }
    }

    /// Whether `psn`, which is not before `expected`, may be kept.
    pub(crate) fn room(&self, expected: Psn, psn: Psn) -> Room {
        match self.is_in_flight(expected, psn) {
            _ if self.is_within(expected, psn) && self.get(psn).is_some() => Room::Taken,
            false => Room::Beyond,
            true => Room::Free,
        }
    }

    /// Keeps a packet for which there is room.
    pub(crate) fn keep(&mut self, expected: Psn, psn: Psn, what: T) {
        debug_assert_eq!(self.room(expected, psn), Room::Free);
        let ahead = psn.distance_from(expected).unsigned_abs() as usize;
        if ahead >= self.ring.len() {
            self.grow(expected, ahead);
        }
        let slot = self.slot(psn);
        self.count += u32::from(self.ring[slot].replace(what).is_none());
        self.furthest = self.furthest(expected);
        if !psn.is_before(self.furthest) {
            self.furthest = psn.next();
        }
    }

    /// Removes and returns what is kept for `psn`.
    pub(crate) fn take(&mut self, psn: Psn) -> Option<T> {
        if self.count == 0 {
            return None;
        }
        let slot = self.slot(psn);
        let taken = self.ring.get_mut(slot)?.take()?;
        self.count -= 1;
        Some(taken)
    }

    /// What is kept for `psn`.
    pub(crate) fn get(&self, psn: Psn) -> Option<&T> {
        self.ring.get(self.slot(psn))?.as_ref()
    }

    /// Discards every packet after `psn` selected by `conflicts`. Returns how many.
    pub(crate) fn forget_after(
        &mut self,
        expected: Psn,
        psn: Psn,
        mut conflicts: impl FnMut(&T) -> bool,
    ) -> u32 {
        let before = self.count;
        let end = self.furthest(expected);
        let mut at = psn.next();
        while self.count > 0 && at.is_before(end) {
            if self.get(at).is_some_and(&mut conflicts) {
                self.take(at);
            }
            at = at.next();
        }
        before - self.count
    }

    /// Which of the packets from `start` on are kept.
    pub(crate) fn bits(&self, expected: Psn, start: Psn) -> u128 {
        let kept = |&bit: &u32| {
            let psn = start.plus(bit);
            self.is_within(expected, psn) && self.get(psn).is_some()
        };
        (0..Sack::BITS).filter(kept).fold(0, |bits, bit| bits | 1 << bit)
    }
}

/// Which packets the sender has not been notified of yet, in blocks as long as a SACK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unreported {
    /// One bit per block, by the block's number modulo 32.
    blocks: u32,
}

/// Blocks within the horizon, including partial ones, have different bits.
const _: () = assert!(MAX_AHEAD / Sack::BITS + 1 < u32::BITS);

impl Unreported {
    fn bit(psn: Psn) -> u32 {
        1 << (psn.get() / Sack::BITS % u32::BITS)
    }

    /// This packet has to be reported.
    pub(crate) fn note(&mut self, psn: Psn) {
        self.blocks |= Unreported::bit(psn);
    }

    /// Where the next SACK starts; every call is another SACK. Packets before `expected` need none.
    /// The last SACK always covers the last packets before `furthest`, as SACKs get lost.
    pub(crate) fn next(&mut self, expected: Psn, furthest: Psn) -> Option<Psn> {
        let mut block = expected.minus(expected.get() % Sack::BITS);
        while self.blocks != 0 && block.is_before(furthest) {
            let bit = Unreported::bit(block);
            let is_wanted = self.blocks & bit != 0;
            self.blocks &= !bit;
            if is_wanted {
                let is_last = !block.plus(Sack::BITS).is_before(furthest);
                return Some(if is_last { furthest.minus(Sack::BITS) } else { block });
            }
            block = block.plus(Sack::BITS);
        }
        self.blocks = 0;
        None
    }

    /// Whether nothing is left to report.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use alloc::collections::BTreeMap;

    #[test]
    fn what_is_missing_fits_the_window() {
        let expected = Psn::new(0xff_fffe);
        let mut arrivals = Arrivals::new(expected, 8);
        assert_eq!(arrivals.room(expected, expected.plus(7)), Room::Free);
        assert_eq!(arrivals.room(expected, expected.plus(8)), Room::Beyond);
        arrivals.keep(expected, expected.plus(7), 'x');
        assert_eq!(arrivals.room(expected, expected.plus(7)), Room::Taken);
        assert_eq!(arrivals.room(expected, expected.plus(8)), Room::Free);
        assert_eq!(arrivals.room(expected, expected.plus(9)), Room::Beyond);
        assert_eq!(arrivals.furthest(expected), expected.plus(8));
        assert_eq!(arrivals.bits(expected, expected), 1 << 7);
        assert_eq!(arrivals.bits(expected, expected.minus(100)), 1 << 107);
        assert_eq!(arrivals.take(expected.plus(7)), Some('x'));
        assert!(arrivals.is_empty());
        for ahead in 1..32 {
            assert_eq!(arrivals.room(expected, expected.plus(ahead)), Room::Free);
            arrivals.keep(expected, expected.plus(ahead), 'x');
        }
        assert_eq!(arrivals.room(expected, expected.plus(32)), Room::Beyond, "four windows");
    }

    /// Every noted packet that is not before the expected one is in one of the SACKs, and there are
    /// no more SACKs than blocks.
    #[test]
    fn sacks_reach_what_they_are_about() {
        for seed in 0..2_000 {
            let mut rng = Rng::new(seed);
            let expected = Psn::new(rng.next_u32());
            let ahead = 1 + rng.next_u32() % MAX_AHEAD;
            let furthest = expected.plus(ahead);
            let mut unreported = Unreported::default();
            let noted: alloc::vec::Vec<Psn> =
                (0..rng.next_u32() % 20).map(|_| expected.plus(rng.next_u32() % ahead)).collect();
            noted.iter().for_each(|&psn| unreported.note(psn));
            unreported.note(expected.minus(200));
            let mut starts = alloc::vec::Vec::new();
            while let Some(start) = unreported.next(expected, furthest) {
                starts.push(start);
            }
            assert!(unreported.is_empty());
            assert!(starts.len() <= noted.len() + 1 && starts.len() <= 18, "seed {seed}");
            for psn in noted {
                let tells =
                    |start: &Psn| (0..Sack::BITS as i32).contains(&psn.distance_from(*start));
                assert!(starts.iter().any(tells), "seed {seed}");
            }
        }
    }

    /// Behaves like a sorted map.
    #[test]
    fn agrees_with_a_sorted_map() {
        for seed in 0..100 {
            let mut rng = Rng::new(seed);
            let first = Psn::new(rng.next_u32());
            let mut arrivals = Arrivals::new(first, 100);
            // By distance from `first`.
            let mut model = BTreeMap::new();
            let mut base = 0;
            for _ in 0..2_000 {
                let (expected, at) = (first.plus(base), base + rng.next_u32() % 450);
                let psn = first.plus(at);
                let most = 400.min(100 + model.len() as u32);
                let room = match at - base {
                    _ if model.contains_key(&at) => Room::Taken,
                    ahead if ahead >= most => Room::Beyond,
                    _ => Room::Free,
                };
                assert_eq!(arrivals.room(expected, psn), room, "seed {seed}");
                match rng.next_u32() % 8 {
                    0 => {
                        while model.remove(&base).is_some() {
                            assert!(arrivals.take(first.plus(base)).is_some());
                            base += 1;
                        }
                    }
                    1 => {
                        let odd = rng.next_u32() % 7;
                        let before = model.len();
                        model.retain(|&key, value| key <= at || *value % 7 != odd);
                        let gone = arrivals.forget_after(expected, psn, |value| value % 7 == odd);
                        assert_eq!(gone as usize, before - model.len(), "seed {seed}");
                    }
                    2 => {
                        model.remove(&base);
                        arrivals.take(expected);
                        base += 1;
                    }
                    _ if room == Room::Free => {
                        let value = rng.next_u32();
                        arrivals.keep(expected, psn, value);
                        model.insert(at, value);
                    }
                    _ => {}
                }
                let expected = first.plus(base);
                assert_eq!(arrivals.count() as usize, model.len());
                let start = base + rng.next_u32() % 300;
                let bits = model.range(start..start + Sack::BITS);
                let bits = bits.fold(0_u128, |bits, (key, _)| bits | 1 << (key - start));
                assert_eq!(arrivals.bits(expected, first.plus(start)), bits, "seed {seed}");
            }
        }
    }
}
