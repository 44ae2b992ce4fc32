//! A bounded table whose entries are named by number, and whose numbers do not come back soon.
//!
//! An id is `generation << index_bits | index`: the lookup is one array access and one comparison,
//! and an id that outlived its entry names nothing until the generation has gone all the way round.
//! Free slots are reused first in, first out, which delays that further.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    layout: Layout,
    first_generation: u32,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// How ids are put together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Most entries.
    pub(crate) limit: u32,
    /// Bits of an id that hold the index.
    pub(crate) index_bits: u32,
    /// Bits of an id above the index.
    pub(crate) generation_bits: u32,
}

impl Layout {
    /// Ids of `id_bits` bits for up to `limit` entries; at least four bits are left for generations.
    pub(crate) fn new(limit: u32, id_bits: u32) -> Layout {
        let limit = limit.clamp(1, 1 << (id_bits - 4));
        let index_bits = (u32::BITS - (limit - 1).leading_zeros()).max(1);
        Layout { limit, index_bits, generation_bits: id_bits - index_bits }
    }

    /// The slot that an id means.
    pub(crate) fn index_of(self, id: u32) -> u32 {
        id & ((1 << self.index_bits) - 1)
    }

    fn id(self, index: u32, generation: u32) -> u32 {
        generation << self.index_bits | index
    }

    /// Neither 0 nor all ones, so that small and all-ones ids stay free for the reserved ones.
    fn legal(self, generation: u32) -> u32 {
        let top = (1 << self.generation_bits) - 1;
        match generation & top {
            0 => 1,
            masked if masked == top => 1,
            masked => masked,
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn new(layout: Layout, first_generation: u32) -> Slab<T> {
        Slab { slots: Vec::new(), free: VecDeque::new(), layout, first_generation }
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    /// Adds what `make` returns for the new id and generation; `None` when the table is full.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(u32, u32) -> T) -> Option<u32> {
        let index = self.take_free()?;
        let layout = self.layout;
        let slot = &mut self.slots[index as usize];
        slot.generation = layout.legal(slot.generation.wrapping_add(1));
        let id = layout.id(index, slot.generation);
        slot.value = Some(make(id, slot.generation));
        Some(id)
    }

    fn take_free(&mut self) -> Option<u32> {
        let grown = self.slots.len() as u32;
        if grown < self.layout.limit {
            self.slots.push(Slot { generation: self.first_generation, value: None });
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
    pub(crate) fn find(&self, id: u32) -> Option<u32> {
        let index = self.layout.index_of(id);
        let slot = self.slots.get(index as usize)?;
        let live = slot.value.is_some() && self.layout.id(index, slot.generation) == id;
        live.then_some(index)
    }

    pub(crate) fn get(&self, id: u32) -> Option<&T> {
        self.find(id).and_then(|index| self.at(index))
    }

    pub(crate) fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.find(id).and_then(|index| self.at_mut(index))
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

    #[test]
    fn reserved_ids_are_never_handed_out() {
        let layout = Layout::new(1, 8);
        let mut slab = Slab::new(layout, 0);
        let ids: Vec<u32> = (0..600)
            .map(|_| {
                let id = slab.insert_with(|_, _| ()).unwrap();
                slab.remove(id);
                id
            })
            .collect();
        assert!(ids.iter().all(|&id| id > 1 && id < 0xff));
    }
}
