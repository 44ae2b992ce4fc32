//! Memory windows: parts of regions that a peer may access under separate keys (IBA 10.6.7).
//!
//! | | type 1 | type 2 (bound to a queue pair: 2B) |
//! |---|---|---|
//! | key is chosen by | the endpoint, anew for each binding | the program: its low 8 bits |
//! | may be used by the peers of | every queue pair of the domain | the queue pair it was bound on |
//! | bound again | at any time; the old key becomes invalid | only after it was invalidated |
//! | ends when | bound to nothing, deallocated | invalidated by either side, deallocated, its queue pair destroyed |
//!
//! A window is self-contained: bounds, rights and backing address are copied when it is bound, as
//! the region underneath cannot be deregistered while a window is bound to it.
//!
//! A window's key has the top bit set, then 23 bits of tag and slot, encrypted ([`Cipher`]), and 8
//! more bits of the tag at the bottom, which the program chooses for type 2. Tags of a slot come
//! from a permutation of a count.

use alloc::vec::Vec;

use super::{AccessKind, Mapping, ProtectionError, Range, RegionTable, allows, writes_remotely};
use crate::rng::{Cipher, Rng, permute};
use crate::slab::{Layout, Slab};
use crate::verbs::{Access, PdId, Qpn, VerbsError, WindowBinding, WindowId};

/// Set in the keys of windows, clear in those of regions.
const WINDOW_BIT: u32 = 1 << 31;

/// Low bits of a key, which programs choose for windows of type 2.
const CHOICE_BITS: u32 = 8;
const CHOICE: u32 = (1 << CHOICE_BITS) - 1;

/// Encrypted bits of a key.
const SEALED_BITS: u32 = 31 - CHOICE_BITS;

/// Most windows: leaves four bits of each key that neither index the slot nor are chosen.
const MAX_WINDOWS: u32 = 1 << (31 - CHOICE_BITS - 4);

pub(super) fn is_window_key(key: u32) -> bool {
    key & WINDOW_BIT != 0
}

#[derive(Debug)]
struct Window {
    pd: PdId,
    is_type_2: bool,
    /// Its current key, or its last one.
    key: u32,
    /// The last key drawn for it: its key once all bindings posted so far have been executed.
    drawn: u32,
    bound: Option<Bound>,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    /// Id of the region underneath.
    region: u32,
    span: Mapping,
    access: Access,
    /// The queue pair it is bound to, for type 2.
    qpn: Option<Qpn>,
}

#[derive(Debug)]
pub(super) struct WindowTable {
    slab: Slab<Window>,
    /// Keys drawn so far, by slot.
    draws: Vec<u32>,
    seed: u64,
    cipher: Cipher,
}

impl WindowTable {
    pub(super) fn new(limit: u32, rng: &mut Rng) -> WindowTable {
        let layout = Layout::new(limit.min(MAX_WINDOWS), u32::BITS);
        let slab = Slab::new(layout, rng.next_u32());
        let cipher = Cipher::new(SEALED_BITS, rng);
        WindowTable { slab, draws: Vec::new(), seed: rng.next_u64(), cipher }
    }

    /// A key that the slot has not had for as long as possible.
    fn draw(&mut self, index: u32) -> u32 {
        if self.draws.len() <= index as usize {
            self.draws.resize(index as usize + 1, 0);
        }
        let draws = &mut self.draws[index as usize];
        *draws = draws.wrapping_add(1);
        let index_bits = self.slab.layout().index_bits;
        let slot_seed = Rng::new(self.seed ^ u64::from(index)).next_u64();
        let tag = permute(*draws, 31 - index_bits, slot_seed);
        let sealed = self.cipher.seal(tag >> CHOICE_BITS << index_bits | index);
        WINDOW_BIT | sealed << CHOICE_BITS | tag & CHOICE
    }

    fn index_of(&self, key: u32) -> u32 {
        self.slab.layout().index_of(self.cipher.open(key >> CHOICE_BITS))
    }

    /// The bound window with this key.
    fn by_key(&self, key: u32) -> Option<(&Window, &Bound)> {
        let window = self.slab.at(self.index_of(key)).filter(|window| window.key == key)?;
        window.bound.as_ref().map(|bound| (window, bound))
    }

    pub(super) fn check(
        &self,
        pd: PdId,
        qpn: Qpn,
        kind: AccessKind,
        range: Range,
    ) -> Result<u64, ProtectionError> {
        if range.len == 0 {
            return Ok(range.addr);
        }
        let (window, bound) = self.by_key(range.key).ok_or(ProtectionError::Key)?;
        if !serves(window, bound, pd, qpn) {
            return Err(ProtectionError::Pd);
        }
        if !allows(bound.access, kind) {
            return Err(ProtectionError::Access);
        }
        bound.span.locate(range)
    }

    pub(super) fn check_invalidate(
        &self,
        pd: PdId,
        qpn: Qpn,
        key: u32,
    ) -> Result<(), ProtectionError> {
        let (window, bound) = self.by_key(key).ok_or(ProtectionError::Key)?;
        if !serves(window, bound, pd, qpn) {
            return Err(ProtectionError::Pd);
        }
        window.is_type_2.then_some(()).ok_or(ProtectionError::Access)
    }

    fn get(&self, id: WindowId) -> Result<&Window, VerbsError> {
        self.slab.get(id.0).ok_or(VerbsError::NoWindow(id.0))
    }
}

fn serves(window: &Window, bound: &Bound, pd: PdId, qpn: Qpn) -> bool {
    window.pd == pd && bound.qpn.is_none_or(|only| only == qpn)
}

impl RegionTable {
    /// An unbound window, and its first key.
    pub(crate) fn alloc_window(
        &mut self,
        pd: PdId,
        is_type_2: bool,
    ) -> Result<(WindowId, u32), VerbsError> {
        let windows = &mut self.windows;
        let made = windows.slab.insert_with(|_, _| Window {
            pd,
            is_type_2,
            key: 0,
            drawn: 0,
            bound: None,
        });
        let limit = windows.slab.layout().limit;
        let id = made.ok_or(VerbsError::TableFull { what: "memory windows", limit })?;
        let key = windows.draw(windows.slab.layout().index_of(id));
        if let Some(window) = windows.slab.get_mut(id) {
            (window.key, window.drawn) = (key, key);
        }
        self.add_user(pd);
        Ok((WindowId(id), key))
    }

    pub(crate) fn dealloc_window(&mut self, id: WindowId) -> Result<(), VerbsError> {
        let window = self.windows.slab.remove(id.0).ok_or(VerbsError::NoWindow(id.0))?;
        self.release(window.bound);
        self.remove_user(window.pd);
        Ok(())
    }

    pub(crate) fn is_type_2(&self, id: WindowId) -> Result<bool, VerbsError> {
        self.windows.get(id).map(|window| window.is_type_2)
    }

    /// The key of a window once all its bindings posted so far have been executed.
    pub(crate) fn last_drawn_key(&self, id: WindowId) -> Result<u32, VerbsError> {
        self.windows.get(id).map(|window| window.drawn)
    }

    /// Completes a binding being posted: type 1 gets a new key.
    pub(crate) fn draw_key(&mut self, binding: &mut WindowBinding) {
        if self.is_type_2(binding.window) == Ok(false) {
            let index = self.windows.slab.layout().index_of(binding.window.0);
            binding.rkey = self.windows.draw(index);
            if let Some(window) = self.windows.slab.get_mut(binding.window.0) {
                window.drawn = binding.rkey;
            }
        }
    }

    /// Executes a binding on queue pair `qpn` of `pd`.
    pub(crate) fn bind(
        &mut self,
        pd: PdId,
        qpn: Qpn,
        binding: &WindowBinding,
    ) -> Result<(), ProtectionError> {
        let window = self.windows.get(binding.window).map_err(|_| ProtectionError::Key)?;
        if window.pd != pd {
            return Err(ProtectionError::Pd);
        }
        if window.is_type_2 {
            check_type_2(window, binding)?;
        }
        let qpn = window.is_type_2.then_some(qpn);
        let bound = match binding.len {
            0 => None,
            _ => Some(self.make_bound(pd, qpn, binding)?),
        };
        self.replace_bound(binding, bound);
        Ok(())
    }

    /// Region, rights and bounds of a binding (IBA C10-72 to C10-75).
    fn make_bound(
        &self,
        pd: PdId,
        qpn: Option<Qpn>,
        binding: &WindowBinding,
    ) -> Result<Bound, ProtectionError> {
        let region = self.by_lkey(binding.lkey).ok_or(ProtectionError::Key)?;
        if region.pd != pd {
            return Err(ProtectionError::Pd);
        }
        let is_legal = region.access.bind_window
            && (region.access.local_write || !writes_remotely(binding.access));
        if !is_legal {
            return Err(ProtectionError::Access);
        }
        let backing = region.span().locate_long(binding.addr, binding.len)?;
        let first = if binding.zero_based { 0 } else { binding.addr };
        let span = Mapping { first, len: binding.len, backing };
        Ok(Bound { region: region.id, span, access: binding.access, qpn })
    }

    fn replace_bound(&mut self, binding: &WindowBinding, bound: Option<Bound>) {
        let Some(window) = self.windows.slab.get_mut(binding.window.0) else {
            return;
        };
        let before = core::mem::replace(&mut window.bound, bound);
        window.key = binding.rkey;
        if let Some(region) = bound.and_then(|bound| self.slab.get_mut(bound.region)) {
            region.windows += 1;
        }
        self.release(before);
    }

    /// Unbinds the window with this key.
    pub(super) fn unbind(&mut self, key: u32) {
        let index = self.windows.index_of(key);
        let window = self.windows.slab.at_mut(index).filter(|window| window.key == key);
        let before = window.and_then(|window| window.bound.take());
        self.release(before);
    }

    /// Unbinds the windows of a destroyed queue pair. Its number is reused later, and the next peer
    /// with that number must not be able to use an old window.
    pub(crate) fn forget_qp(&mut self, qpn: Qpn) {
        let is_its = |window: &&Window| window.bound.is_some_and(|bound| bound.qpn == Some(qpn));
        let keys: Vec<u32> =
            self.windows.slab.iter().filter(is_its).map(|window| window.key).collect();
        for key in keys {
            self.unbind(key);
        }
    }

    fn release(&mut self, bound: Option<Bound>) {
        if let Some(region) = bound.and_then(|bound| self.slab.get_mut(bound.region)) {
            region.windows -= 1;
        }
    }
}

/// The rules of type 2 (IBA 10.6.7.2): the window is free, the binding is not empty, and the new
/// key differs from the old one only in its low bits.
fn check_type_2(window: &Window, binding: &WindowBinding) -> Result<(), ProtectionError> {
    if window.bound.is_some() || binding.len == 0 {
        return Err(ProtectionError::Access);
    }
    let changed = window.key ^ binding.rkey;
    (changed != 0 && changed <= CHOICE).then_some(()).ok_or(ProtectionError::Key)
}

#[cfg(test)]
mod tests {
    use super::super::Registration;
    use super::*;
    use crate::verbs::MemoryRegion;
    use alloc::collections::BTreeSet;

    const PD: PdId = PdId(1);
    const QPN: Qpn = Qpn::new(77);

    fn table() -> (RegionTable, MemoryRegion) {
        let mut table = RegionTable::new(16, &mut Rng::new(5));
        let wanted =
            Registration { pd: PD, addr: 0x1000, len: 0x100, backing: 0x9000, access: Access::ALL };
        let region = table.register(wanted).unwrap();
        (table, region)
    }

    fn binding(window: WindowId, rkey: u32, region: &MemoryRegion) -> WindowBinding {
        let (lkey, access) = (region.lkey, Access::ALL);
        WindowBinding { window, rkey, lkey, addr: 0x1040, len: 0x20, access, zero_based: false }
    }

    fn look(table: &RegionTable, qpn: Qpn, key: u32, addr: u64) -> Result<u64, ProtectionError> {
        table.check_remote(PD, qpn, AccessKind::RemoteWrite, Range { key, addr, len: 8 })
    }

    #[test]
    fn type_2_serves_its_queue_pair_until_it_is_invalidated() {
        let (mut table, region) = table();
        let (window, first) = table.alloc_window(PD, true).unwrap();
        assert_eq!(look(&table, QPN, first, 0x1040), Err(ProtectionError::Key));
        let key = first & !CHOICE | first.wrapping_add(1) & CHOICE;
        let wanted = binding(window, key, &region);
        table.bind(PD, QPN, &wanted).unwrap();
        assert_eq!(look(&table, QPN, key, 0x1040), Ok(0x9040));
        assert_eq!(look(&table, QPN, key, 0x1059), Err(ProtectionError::Bounds));
        assert_eq!(look(&table, QPN, key, 0x103f), Err(ProtectionError::Bounds));
        assert_eq!(look(&table, Qpn::new(78), key, 0x1040), Err(ProtectionError::Pd));
        let again = WindowBinding { rkey: key ^ 1, ..wanted };
        assert_eq!(table.bind(PD, QPN, &again), Err(ProtectionError::Access));
        assert_eq!(table.deregister(region.lkey), Err(VerbsError::RegionInUse(region.lkey)));
        assert_eq!(table.invalidate(PD, QPN, region.rkey), Err(ProtectionError::Access));
        assert_eq!(table.invalidate(PD, Qpn::new(78), key), Err(ProtectionError::Pd));
        table.invalidate(PD, QPN, key).unwrap();
        assert_eq!(look(&table, QPN, key, 0x1040), Err(ProtectionError::Key));
        assert_eq!(table.bind(PD, QPN, &wanted), Err(ProtectionError::Key), "the same key again");
        table.bind(PD, QPN, &again).unwrap();
        table.dealloc_window(window).unwrap();
        assert_eq!(look(&table, QPN, again.rkey, 0x1040), Err(ProtectionError::Key));
        table.deregister(region.lkey).unwrap();
    }

    #[test]
    fn type_2_ends_with_its_queue_pair() {
        let (mut table, region) = table();
        let other = Qpn::new(78);
        let [mine, kept, shared] =
            [true, true, false].map(|type_2| table.alloc_window(PD, type_2).unwrap());
        let next = |key: u32| key & !CHOICE | key.wrapping_add(1) & CHOICE;
        let [a, b, c] =
            [mine, kept, shared].map(|(window, key)| binding(window, next(key), &region));
        table.bind(PD, QPN, &a).unwrap();
        table.bind(PD, other, &b).unwrap();
        table.bind(PD, QPN, &c).unwrap();
        table.forget_qp(QPN);
        assert_eq!(look(&table, QPN, a.rkey, 0x1040), Err(ProtectionError::Key));
        assert_eq!(look(&table, other, b.rkey, 0x1040), Ok(0x9040));
        assert_eq!(look(&table, other, c.rkey, 0x1040), Ok(0x9040), "type 1 is the domain's");
        table.bind(PD, other, &WindowBinding { rkey: next(a.rkey), ..a }).unwrap();
        for (window, _) in [mine, kept, shared] {
            table.dealloc_window(window).unwrap();
        }
        table.deregister(region.lkey).unwrap();
    }

    #[test]
    fn type_1_gets_a_new_key_for_each_binding() {
        let (mut table, region) = table();
        let (window, mut old) = table.alloc_window(PD, false).unwrap();
        let mut seen = BTreeSet::new();
        for _ in 0..500 {
            let mut wanted = binding(window, 0, &region);
            table.draw_key(&mut wanted);
            assert_eq!(table.last_drawn_key(window), Ok(wanted.rkey));
            table.bind(PD, QPN, &wanted).unwrap();
            assert!(seen.insert(wanted.rkey));
            assert_eq!(look(&table, QPN, old, 0x1040), Err(ProtectionError::Key));
            assert_eq!(look(&table, Qpn::new(5), wanted.rkey, 0x1040), Ok(0x9040));
            old = wanted.rkey;
        }
        assert_eq!(table.invalidate(PD, QPN, old), Err(ProtectionError::Access));
        let nothing = WindowBinding { len: 0, rkey: old ^ 1, ..binding(window, 0, &region) };
        table.bind(PD, QPN, &nothing).unwrap();
        assert_eq!(look(&table, QPN, nothing.rkey, 0x1040), Err(ProtectionError::Key));
        table.deregister(region.lkey).unwrap();
    }

    #[test]
    fn what_a_window_shows_is_checked_when_it_is_bound() {
        let (mut table, region) = table();
        let (window, first) = table.alloc_window(PD, false).unwrap();
        let good = binding(window, first, &region);
        let cases = [
            (WindowBinding { lkey: region.rkey, ..good }, ProtectionError::Key),
            (WindowBinding { window: WindowId(0), ..good }, ProtectionError::Key),
            (WindowBinding { addr: 0xfff, ..good }, ProtectionError::Bounds),
            (WindowBinding { len: 0xc1, ..good }, ProtectionError::Bounds),
            (WindowBinding { len: u64::MAX, ..good }, ProtectionError::Bounds),
        ];
        for (bad, refusal) in cases {
            assert_eq!(table.bind(PD, QPN, &bad), Err(refusal), "{bad:?}");
        }
        assert_eq!(table.bind(PdId(2), QPN, &good), Err(ProtectionError::Pd));
        let plain = Registration {
            pd: PD,
            addr: 0x1000,
            len: 0x100,
            backing: 0,
            access: Access { bind_window: true, ..Access::LOCAL_READ },
        };
        let read_only = table.register(plain).unwrap();
        let writes = WindowBinding { lkey: read_only.lkey, ..good };
        assert_eq!(table.bind(PD, QPN, &writes), Err(ProtectionError::Access));
        let reads = Access { remote_read: true, ..Access::default() };
        table.bind(PD, QPN, &WindowBinding { access: reads, ..writes }).unwrap();
        assert_eq!(look(&table, QPN, good.rkey, 0x1040), Err(ProtectionError::Access));
        let closed = table.register(Registration { access: Access::LOCAL, ..plain }).unwrap();
        let unwanted = WindowBinding { lkey: closed.lkey, ..good };
        assert_eq!(table.bind(PD, QPN, &unwanted), Err(ProtectionError::Access));
    }

    #[test]
    fn a_zero_based_window_counts_from_its_first_byte() {
        let (mut table, region) = table();
        let (window, first) = table.alloc_window(PD, true).unwrap();
        let wanted = binding(window, first ^ 3, &region);
        table.bind(PD, QPN, &WindowBinding { zero_based: true, ..wanted }).unwrap();
        assert_eq!(look(&table, QPN, wanted.rkey, 0x18), Ok(0x9058));
        assert_eq!(look(&table, QPN, wanted.rkey, 0x19), Err(ProtectionError::Bounds));
    }

    #[test]
    fn keys_name_their_slots() {
        let mut table = RegionTable::new(1 << 14, &mut Rng::new(9));
        let mut seen = BTreeSet::new();
        for _ in 0..3_000 {
            let (_, key) = table.alloc_window(PD, true).unwrap();
            assert!(is_window_key(key) && seen.insert(key >> CHOICE_BITS));
        }
    }
}
