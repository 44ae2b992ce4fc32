//! A bounded table whose entries have numeric ids that are not reused soon.
//!
//! An id is `prefix | generation << index_bits | index`: the lookup is one array access and one
//! comparison. The generations of a slot are a permutation of its own, so that ids of one slot look
//! unrelated, and a stale id matches nothing until all generations have been used. Free slots are
//! reused first in, first out, and only when many are free, which delays that further: 512, and
//! more where few bits are left for generations. Beyond that the table grows with what it holds at
//! a time, not with what it has ever held. Of 4,096 slots with ids of 16 bits all have to be free,
//! so all are used before one is reused.
//!
//! Ids that peers send back are encrypted: generation and index go through a [`Cipher`], so that no
//! bit of an id can be predicted without its key. Most lookups skip the decryption: a small table
//! has the slot that last got an id with the same low bits, and the slot says whether it is the
//! right one.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::rng::{Cipher, Rng, permute};

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    layout: Layout,
    seed: u32,
    cipher: Option<Cipher>,
    /// Slots by the low bits of their encrypted ids, the last of each kind: a power of two of them,
    /// which grows until no two ids share a place or the table has its full size.
    shortcuts: Vec<u32>,
}

/// Most entries of [`Slab::shortcuts`], and how many there are at first.
const MAX_SHORTCUTS: u32 = 1 << 12;
const FIRST_SHORTCUTS: usize = 16;

/// Free slots from which on they are reused before the table grows, where generations have 7 bits
/// or more. With ids of 24 bits and 4,096 slots they have 12, so an id returns after 512 * 4,094
/// other entries.
const MANY_FREE: usize = 1 << 9;

/// With fewer bits, more slots have to be free, so that an id returns after about this many other
/// entries. Two generations of each slot are illegal: with ids of 16 bits and 4,096 slots it
/// returns after 4,096 * 14 = 57,344.
const BEFORE_RETURN: usize = 1 << 16;

#[derive(Debug)]
struct Slot<T> {
    id: u32,
    /// How often the slot was filled, not counting illegal values.
    count: u32,
    value: Option<T>,
}

/// The layout of ids.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Most entries.
    pub(crate) limit: u32,
    /// Bits of an id that hold the index.
    pub(crate) index_bits: u32,
    /// Bits of an id above the index.
    pub(crate) generation_bits: u32,
    /// The fixed bits of every id above those.
    prefix: u32,
}

impl Layout {
    /// Ids of `id_bits` bits for up to `limit` entries; at least four bits are left for
    /// generations.
    pub(crate) fn new(limit: u32, id_bits: u32) -> Layout {
        let limit = limit.clamp(1, 1 << (id_bits - 4));
        let index_bits = (u32::BITS - (limit - 1).leading_zeros()).max(1);
        Layout { limit, index_bits, generation_bits: id_bits - index_bits, prefix: 0 }
    }

    /// The same with fixed bits above the id's own.
    pub(crate) fn with_prefix(self, prefix: u32) -> Layout {
        let id_bits = self.index_bits + self.generation_bits;
        Layout { prefix: prefix << id_bits, ..self }
    }

    /// Free slots from which on they are reused before the table grows.
    fn many_free(self) -> usize {
        MANY_FREE.max(BEFORE_RETURN >> self.generation_bits)
    }

    /// The slot of an id.
    pub(crate) fn index_of(self, id: u32) -> u32 {
        id & ((1 << self.index_bits) - 1)
    }

    fn id(self, index: u32, generation: u32) -> u32 {
        self.prefix | generation << self.index_bits | index
    }

    /// Neither 0 nor all ones, so that the small and the all-ones ids stay reserved.
    fn is_legal(self, generation: u32) -> bool {
        generation != 0 && generation != (1 << self.generation_bits) - 1
    }

    /// Largest id without prefix.
    fn mask(self) -> u32 {
        u32::MAX >> (u32::BITS - self.index_bits - self.generation_bits)
    }

    /// Ids that are never assigned, without prefix.
    fn is_reserved(self, id: u32) -> bool {
        id <= 1 || id == self.mask()
    }

    /// Encrypts an id among those that are not reserved: a reserved image is encrypted again until
    /// the result is not reserved.
    fn seal(self, cipher: &Cipher, id: u32) -> u32 {
        let mut image = cipher.seal(id & self.mask());
        while self.is_reserved(image) {
            image = cipher.seal(image);
        }
        self.prefix | image
    }

    /// Decrypts an id.
    fn open(self, cipher: &Cipher, image: u32) -> u32 {
        let mut id = image & self.mask();
        if self.is_reserved(id) {
            return 0;
        }
        // Starting from an id that is not reserved, the cycle returns to it at the latest.
        id = cipher.open(id);
        while self.is_reserved(id) {
            id = cipher.open(id);
        }
        id
    }

    /// The number after `count`, skipping illegal values.
    fn next(self, count: u32) -> u32 {
        if self.is_legal(count + 1) { count + 1 } else { 1 }
    }

    /// Permutes the legal numbers: an illegal image is permuted again until the result is legal.
    fn generation(self, count: u32, seed: u64) -> u32 {
        let mut image = permute(count, self.generation_bits, seed);
        while !self.is_legal(image) {
            image = permute(image, self.generation_bits, seed);
        }
        image
    }
}

impl<T> Slab<T> {
    /// An empty table; `seed` chooses the order of the ids.
    pub(crate) fn new(layout: Layout, seed: u32) -> Slab<T> {
        let (slots, free, shortcuts) = (Vec::new(), VecDeque::new(), Vec::new());
        Slab { slots, free, layout, seed, cipher: None, shortcuts }
    }

    /// The same with encrypted ids.
    pub(crate) fn sealed(layout: Layout, rng: &mut Rng) -> Slab<T> {
        let cipher = Cipher::new(layout.index_bits + layout.generation_bits, rng);
        Slab { cipher: Some(cipher), ..Slab::new(layout, rng.next_u32()) }
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Adds what `make` returns for the new id and generation; `None` when the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(u32, u32) -> T) -> Option<u32> {
        let index = self.take_free()?;
        let layout = self.layout;
        let seed = Rng::new(u64::from(index) << 32 | u64::from(self.seed)).next_u64();
        let slot = &mut self.slots[index as usize];
        slot.count = layout.next(slot.count);
        let generation = layout.generation(slot.count, seed);
        slot.id = layout.id(index, generation);
        if let Some(cipher) = &self.cipher {
            slot.id = layout.seal(cipher, slot.id);
        }
        let id = slot.id;
        slot.value = Some(make(id, generation));
        if self.cipher.is_some() {
            self.add_shortcut(id, index);
        }
        Some(id)
    }

    fn add_shortcut(&mut self, id: u32, index: u32) {
        let most = self.layout.limit.next_power_of_two().min(MAX_SHORTCUTS) as usize;
        // A new id replaces a shortcut of another slot only in the largest table.
        while self.shortcuts.len() < most && self.is_taken(id, index) {
            let count = (2 * self.shortcuts.len()).max(FIRST_SHORTCUTS).min(most);
            self.rebuild_shortcuts(count);
        }
        let at = id as usize & (self.shortcuts.len() - 1);
        self.shortcuts[at] = index;
    }

    /// Whether there is no shortcut for this id, or one that leads to the live entry of another
    /// slot.
    fn is_taken(&self, id: u32, index: u32) -> bool {
        let low = id as usize & self.shortcuts.len().wrapping_sub(1);
        let there = self.shortcuts.get(low).filter(|&&there| there != index);
        let slot = there.and_then(|&there| self.slots.get(there as usize));
        let is_live = slot.is_some_and(|slot| {
            slot.value.is_some() && (slot.id ^ id) as usize & (self.shortcuts.len() - 1) == 0
        });
        self.shortcuts.is_empty() || is_live
    }

    fn rebuild_shortcuts(&mut self, count: usize) {
        self.shortcuts.clear();
        self.shortcuts.resize(count, 0);
        for (index, slot) in (0..).zip(&self.slots).filter(|(_, slot)| slot.value.is_some()) {
            self.shortcuts[slot.id as usize & (count - 1)] = index;
        }
    }

    fn take_free(&mut self) -> Option<u32> {
        let grown = self.slots.len() as u32;
        if grown < self.layout.limit && self.free.len() < self.layout.many_free() {
            self.slots.push(Slot { id: 0, count: 0, value: None });
            return Some(grown);
        }
        self.free.pop_front()
    }

    pub(crate) fn remove(&mut self, id: u32) -> Option<T> {
        let index = self.find(id)?;
        self.free.push_back(index);
        self.slots[index as usize].value.take()
    }

    /// The index of the live entry `id`.
    #[inline]
    pub(crate) fn find(&self, id: u32) -> Option<u32> {
        let low = id as usize & self.shortcuts.len().wrapping_sub(1);
        let is_it = |index: &&u32| self.is_at(id, **index);
        self.shortcuts.get(low).filter(is_it).copied().or_else(|| self.find_slowly(id))
    }

    fn is_at(&self, id: u32, index: u32) -> bool {
        let slot = self.slots.get(index as usize);
        slot.is_some_and(|slot| slot.id == id && slot.value.is_some())
    }

    fn find_slowly(&self, id: u32) -> Option<u32> {
        let plain = self.cipher.as_ref().map_or(id, |cipher| self.layout.open(cipher, id));
        let index = self.layout.index_of(plain);
        self.is_at(id, index).then_some(index)
    }

    pub(crate) fn get(&self, id: u32) -> Option<&T> {
        self.find(id).and_then(|index| self.at(index))
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.find(id).and_then(|index| self.at_mut(index))
    }

    /// All entries, in the order of their slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.value.as_ref())
    }

    /// The entry in slot `index`, whatever its generation.
    pub(crate) fn at(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.value.as_ref()
    }

    /// The entry in slot `index`, whatever its generation.
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    #[test]
    fn full_table_refuses_and_stale_ids_find_nothing() {
        let mut slab = Slab::new(Layout::new(2, 24), 7);
        let first = slab.insert_with(|_, _| 'a').unwrap();
        let second = slab.insert_with(|_, _| 'b').unwrap();
        assert_eq!(slab.insert_with(|_, _| 'c'), None);
        assert_eq!(slab.remove(first), Some('a'));
        let third = slab.insert_with(|_, _| 'c').unwrap();
        assert_ne!(first, third);
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!((slab.get(second), slab.get(third)), (Some(&'b'), Some(&'c')));
    }

    /// A process that opens and closes a queue pair after another for weeks does not grow.
    #[test]
    fn a_table_grows_with_what_it_holds_at_a_time() {
        let mut slab = Slab::sealed(Layout::new(1 << 12, 24), &mut Rng::new(11));
        let _stays: Vec<_> = (0..40).map(|number| slab.insert_with(|_, _| number)).collect();
        let mut seen = BTreeSet::new();
        for number in 0..100_000 {
            let id = slab.insert_with(|_, _| number).expect("there is room");
            assert!(seen.insert(id), "{id:#x} after {number} others");
            assert_eq!(slab.remove(id), Some(number));
        }
        assert!(slab.slots.len() <= 41 + MANY_FREE, "{}", slab.slots.len());
        // Queue pairs of verbs programs have 16 bits of their own, below a port's.
        assert_eq!(Layout::new(1 << 12, 16).many_free(), 1 << 12);
    }

    /// More entries than shortcuts: many share the low bits of their ids.
    #[test]
    fn encrypted_ids_find_their_own_entry_with_and_without_a_shortcut() {
        let mut rng = Rng::new(5);
        let mut slab = Slab::sealed(Layout::new(4 * MAX_SHORTCUTS, 24), &mut rng);
        let ids: Vec<u32> =
            (0..4 * MAX_SHORTCUTS).map(|number| slab.insert_with(|_, _| number).unwrap()).collect();
        assert_eq!(slab.shortcuts.len() as u32, MAX_SHORTCUTS);
        for (number, &id) in (0..).zip(&ids) {
            assert_eq!((slab.get(id), slab.find_slowly(id)), (Some(&number), Some(number)));
        }
        for &id in ids.iter().step_by(3) {
            slab.remove(id);
        }
        for (number, &id) in (0..).zip(&ids) {
            assert_eq!(slab.get(id), (number % 3 != 0).then_some(&number));
        }
        // Ids of nothing, whose shortcuts lead to something.
        let strange = (0..1000).map(|_| rng.next_u32() & 0xff_ffff).filter(|id| !ids.contains(id));
        assert!(strange.into_iter().all(|id| slab.get(id).is_none()));
    }

    #[test]
    fn reserved_ids_are_never_handed_out() {
        let layout = Layout::new(1, 8);
        let sealed = (0..50).map(|seed| Slab::sealed(layout, &mut Rng::new(seed)));
        for mut slab in sealed.chain([Slab::new(layout, 0)]) {
            for _ in 0..600 {
                let id = slab.insert_with(|_, _| ()).unwrap();
                assert!(id > 1 && id < 0xff);
                assert_eq!(slab.find(id), Some(0));
                assert!([0, 1, 0xff].iter().all(|&id| slab.find(id).is_none()));
                slab.remove(id);
            }
        }
    }

    /// Without the key, ids look random: those of one slot and of local peers are spread over all
    /// numbers, and none is reused before the slot's generations are used up.
    #[test]
    fn sealed_ids_are_spread_over_all_numbers() {
        let mut slab = Slab::sealed(Layout::new(1 << 12, 24), &mut Rng::new(2));
        let first: Vec<u32> = (0..1 << 12).filter_map(|_| slab.insert_with(|_, _| ())).collect();
        let mut seen: BTreeSet<u32> = first.iter().copied().collect();
        let mut buckets = [0_u32; 64];
        let mut id = first[0];
        for _ in 0..4_000 {
            slab.remove(id);
            id = slab.insert_with(|_, _| ()).unwrap();
            assert!(seen.insert(id), "{id:#x} came back");
            assert!(slab.get(id).is_some());
        }
        seen.iter().for_each(|id| buckets[(id >> 18) as usize] += 1);
        assert!(buckets.iter().all(|count| (70..190).contains(count)), "{buckets:?}");
    }

    #[test]
    fn ids_come_back_only_when_all_were_used_and_in_no_simple_order() {
        let layout = Layout::new(1, 16);
        for seed in 0..8 {
            let mut slab = Slab::new(layout, seed);
            let mut fresh = || {
                let id = slab.insert_with(|_, _| ()).unwrap();
                slab.remove(id);
                id
            };
            let legal = (1 << layout.generation_bits) - 2;
            let ids: Vec<u32> = (0..legal).map(|_| fresh()).collect();
            let distinct: BTreeSet<u32> = ids.iter().copied().collect();
            assert_eq!(distinct.len(), legal as usize);
            assert_eq!(fresh(), ids[0]);
            let steps: BTreeSet<u32> =
                ids.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
            assert!(steps.len() > 20, "seed {seed}: {} different steps", steps.len());
        }
    }

    #[test]
    fn slots_do_not_share_their_order() {
        let mut slab = Slab::new(Layout::new(16, 24), 3);
        let ids: Vec<u32> = (0..16).filter_map(|_| slab.insert_with(|_, _| ())).collect();
        let generations: BTreeSet<u32> = ids.iter().map(|id| id >> 4).collect();
        assert_eq!(generations.len(), 16);
    }

    #[test]
    fn prefixes_tell_tables_apart() {
        let table = |prefix| Slab::new(Layout::new(4, 16).with_prefix(prefix), 9);
        let (mut ours, mut theirs) = (table(0xff), table(7));
        let id = ours.insert_with(|_, _| 'a').unwrap();
        let other = theirs.insert_with(|_, _| 'b').unwrap();
        assert_eq!((id >> 16, other >> 16), (0xff, 7));
        assert!(id != 0x00ff_ffff);
        assert_eq!((ours.get(id), ours.get(other), theirs.get(id)), (Some(&'a'), None, None));
        assert_eq!(ours.get(id & 0xffff), None);
    }
}
