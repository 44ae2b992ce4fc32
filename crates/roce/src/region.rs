//! Memory regions: which bytes may be touched, by whom, under which key (contract C3).
//!
//! Every access of the transport, local or remote, passes [`RegionTable::check`] at the moment the
//! packet is built or placed; nothing is remembered from an earlier check, so a region that is
//! deregistered in the middle of a message stops it there. The table never sees payload.
//!
//! A key is the region's slot in the low bits and a tag above it. The tag comes from a permutation
//! of the slot's registration count: keys look unrelated, and none comes back before the count has
//! gone round. `lkey` and `rkey` differ, so a peer does not learn the local one.

use crate::rng::SplitMix64;
use crate::slab::{Layout, Slab};
use crate::verbs::{Access, MemoryRegion, PdId, VerbsError};

/// Why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No region has the key.
    Key,
    /// The region belongs to another protection domain.
    Pd,
    /// The region does not allow this kind of access.
    Access,
    /// The range is not inside the region.
    Bounds,
}

/// What an access is for, and so which key and which flag it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Gather a local buffer; always allowed.
    LocalRead,
    /// Place into a local buffer.
    LocalWrite,
    /// The peer's READ.
    RemoteRead,
    /// The peer's WRITE.
    RemoteWrite,
}

/// A range of bytes that a work request or a peer names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

#[derive(Debug)]
struct Region {
    pd: PdId,
    access: Access,
    keys: MemoryRegion,
    id: u32,
}

/// All regions of an endpoint.
#[derive(Debug)]
pub(crate) struct RegionTable {
    slab: Slab<Region>,
    lkey_seed: u64,
    rkey_seed: u64,
}

impl RegionTable {
    pub(crate) fn new(limit: u32, rng: &mut SplitMix64) -> RegionTable {
        let layout = Layout::new(limit, u32::BITS);
        let slab = Slab::new(layout, rng.next_u32());
        RegionTable { slab, lkey_seed: rng.next_u64(), rkey_seed: rng.next_u64() }
    }

    pub(crate) fn register(
        &mut self,
        pd: PdId,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        if let Some(why) = contradiction(addr, len, access) {
            return Err(VerbsError::BadRegion { addr, len, why });
        }
        let layout = self.slab.layout();
        let (lkey_seed, rkey_seed) = (self.lkey_seed, self.rkey_seed);
        let made = self.slab.insert_with(|id, generation| {
            let lkey = key(layout, id, generation, lkey_seed);
            let rkey = key(layout, id, generation, rkey_seed);
            Region { pd, access, keys: MemoryRegion { addr, len, lkey, rkey }, id }
        });
        made.and_then(|id| self.slab.get(id))
            .map(|region| region.keys)
            .ok_or(VerbsError::TableFull { what: "memory regions", limit: layout.limit })
    }

    pub(crate) fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        let index = self.slab.layout().index_of(lkey);
        let named = self.slab.at(index).filter(|region| region.keys.lkey == lkey);
        let id = named.map(|region| region.id).ok_or(VerbsError::NoRegion(lkey))?;
        self.slab.remove(id);
        Ok(())
    }

    /// Whether a queue pair of `pd` may access `range` for `purpose`. Ranges of no bytes touch
    /// nothing and need no key (IBA 9.7.4.1.5).
    #[inline]
    pub(crate) fn check(&self, pd: PdId, purpose: Purpose, range: Range) -> Result<(), Refusal> {
        if range.len == 0 {
            return Ok(());
        }
        let index = self.slab.layout().index_of(range.key);
        let region = self.slab.at(index).ok_or(Refusal::Key)?;
        let (own_key, allowed) = match purpose {
            Purpose::LocalRead => (region.keys.lkey, true),
            Purpose::LocalWrite => (region.keys.lkey, region.access.local_write),
            Purpose::RemoteRead => (region.keys.rkey, region.access.remote_read),
            Purpose::RemoteWrite => (region.keys.rkey, region.access.remote_write),
        };
        if own_key != range.key {
            return Err(Refusal::Key);
        }
        if region.pd != pd {
            return Err(Refusal::Pd);
        }
        if !allowed {
            return Err(Refusal::Access);
        }
        region.holds(range).then_some(()).ok_or(Refusal::Bounds)
    }
}

impl Region {
    fn holds(&self, range: Range) -> bool {
        range.addr.checked_sub(self.keys.addr).is_some_and(|offset| {
            offset <= self.keys.len && u64::from(range.len) <= self.keys.len - offset
        })
    }
}

fn contradiction(addr: u64, len: u64, access: Access) -> Option<&'static str> {
    if addr.checked_add(len).is_none() {
        return Some("it runs past the end of the address space");
    }
    (access.remote_write && !access.local_write).then_some("remote write needs local write")
}

/// The tag 0 is left out, so that no region answers to key 0. Its place is taken by the image of
/// generation 0, which does not occur.
fn key(layout: Layout, id: u32, generation: u32, seed: u64) -> u32 {
    let index = layout.index_of(id);
    let slot_seed = SplitMix64::new(seed ^ u64::from(index)).next_u64();
    let tag = match permute(generation, layout.generation_bits, slot_seed) {
        0 => permute(0, layout.generation_bits, slot_seed),
        tag => tag,
    };
    tag << layout.index_bits | index
}

/// A permutation of the `bits`-bit numbers chosen by `seed`: each step can be undone, so different
/// inputs keep different outputs.
fn permute(value: u32, bits: u32, seed: u64) -> u32 {
    let mask = u32::MAX >> (u32::BITS - bits);
    let half = (bits / 2).max(1);
    let mut x = value & mask;
    for round in 0..3 {
        let [add, factor] = [(seed >> (7 * round)) as u32, (seed >> (32 + 5 * round)) as u32 | 1];
        x = x.wrapping_add(add).wrapping_mul(factor) & mask;
        x ^= x >> half;
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    const PD: PdId = PdId(1);

    fn table() -> RegionTable {
        RegionTable::new(16, &mut SplitMix64::new(3))
    }

    fn range(key: u32, addr: u64, len: u32) -> Range {
        Range { key, addr, len }
    }

    #[test]
    fn bounds_are_exact_and_overflow_is_refused() {
        let mut table = table();
        let region = table.register(PD, 0x1000, 0x100, Access::ALL).unwrap();
        let check =
            |addr, len| table.check(PD, Purpose::RemoteWrite, range(region.rkey, addr, len));
        assert_eq!(check(0x1000, 0x100), Ok(()));
        assert_eq!(check(0x10ff, 1), Ok(()));
        assert_eq!(check(0x1100, 1), Err(Refusal::Bounds));
        assert_eq!(check(0xfff, 2), Err(Refusal::Bounds));
        assert_eq!(check(0x1001, 0x100), Err(Refusal::Bounds));
        assert_eq!(check(u64::MAX, u32::MAX), Err(Refusal::Bounds));
        assert_eq!(check(0xdead_0000, 0), Ok(()));
    }

    #[test]
    fn each_purpose_needs_its_key_and_flag() {
        let mut table = table();
        let region = table.register(PD, 0, 64, Access::LOCAL_READ).unwrap();
        let check = |purpose, key| table.check(PD, purpose, range(key, 0, 8));
        assert_eq!(check(Purpose::LocalRead, region.lkey), Ok(()));
        assert_eq!(check(Purpose::LocalRead, region.rkey), Err(Refusal::Key));
        assert_eq!(check(Purpose::LocalWrite, region.lkey), Err(Refusal::Access));
        assert_eq!(check(Purpose::RemoteRead, region.rkey), Err(Refusal::Access));
        assert_eq!(check(Purpose::RemoteRead, region.lkey), Err(Refusal::Key));
        let other = table.check(PdId(2), Purpose::LocalRead, range(region.lkey, 0, 8));
        assert_eq!(other, Err(Refusal::Pd));
    }

    #[test]
    fn keys_are_fresh() {
        let mut table = table();
        let mut seen = BTreeSet::new();
        for _ in 0..10_000 {
            let region = table.register(PD, 0, 1, Access::ALL).unwrap();
            assert!(seen.insert(region.lkey), "lkey {:#x} came back", region.lkey);
            table.deregister(region.lkey).unwrap();
            let stale = table.check(PD, Purpose::LocalRead, range(region.lkey, 0, 1));
            assert_eq!(stale, Err(Refusal::Key));
            assert_eq!(table.deregister(region.lkey), Err(VerbsError::NoRegion(region.lkey)));
        }
    }

    #[test]
    fn no_key_is_zero() {
        let layout = Layout::new(1 << 28, u32::BITS);
        for seed in 0..200 {
            let keys: BTreeSet<u32> =
                (1..15).map(|generation| key(layout, 0, generation, seed)).collect();
            assert_eq!((keys.len(), keys.contains(&0)), (14, false));
        }
    }

    #[test]
    fn permutation_has_no_collisions() {
        for seed in [0, 1, 0xdead_beef_0bad_cafe] {
            let image: BTreeSet<u32> = (0..1 << 12).map(|x| permute(x, 12, seed)).collect();
            assert_eq!(image.len(), 1 << 12);
        }
    }

    #[test]
    fn contradictory_regions_are_refused() {
        let mut table = table();
        let write_only = Access { remote_write: true, ..Access::LOCAL_READ };
        assert!(table.register(PD, 0, 8, write_only).is_err());
        assert!(table.register(PD, u64::MAX, 2, Access::LOCAL).is_err());
        for _ in 0..16 {
            table.register(PD, 0, 8, Access::LOCAL).unwrap();
        }
        let full = table.register(PD, 0, 8, Access::LOCAL);
        assert_eq!(full, Err(VerbsError::TableFull { what: "memory regions", limit: 16 }));
    }
}
