//! Memory regions: which bytes a peer or work request may access, and under which key (contract
//! C3).
//!
//! Every access of the transport, local or remote, passes [`RegionTable::check`] or
//! [`RegionTable::check_remote`] when the packet is built or placed. No check is cached, so
//! deregistering a region in the middle of a message stops the message there. The table never sees
//! payload.
//!
//! Work requests and peers address bytes by the region's own addresses, which start where the
//! program chose; a check that passes returns the backing addresses.
//!
//! A local key is the region's slot in the low bits and a tag above it. The tag comes from a
//! permutation of the slot's registration count: keys look unrelated, and none is reused before the
//! count has wrapped. A remote key is slot and count together, encrypted ([`Cipher`]): its 31 bits
//! reveal nothing about any other key, and guessing finds a given region once in 2^31 - 1 tries.
//! The top bit of a region's keys is 0; keys that have it set are those of memory windows
//! ([`window`]).

mod window;

use alloc::collections::BTreeMap;

use crate::rng::{Cipher, Rng, permute};
use crate::seeded::{Bug, Seeded};
use crate::slab::{Layout, Slab};
use crate::verbs::{Access, MemoryRegion, PdId, Qpn, VerbsError};
use window::WindowTable;

/// Bits of a region's keys, slot and tag together.
const KEY_BITS: u32 = 31;

/// A protection error: why an access was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProtectionError {
    /// No region or window has the key.
    Key,
    /// The region or window belongs to another protection domain, or the window to another queue
    /// pair.
    Pd,
    /// The region or window does not allow this kind of access.
    Access,
    /// The range is not inside the region or window.
    Bounds,
}

/// The kind of an access, which determines the key and the flag it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessKind {
    /// Gather a local buffer; always allowed.
    LocalRead,
    /// Place into a local buffer.
    LocalWrite,
    /// The peer's READ.
    RemoteRead,
    /// The peer's WRITE.
    RemoteWrite,
    /// The peer's atomic.
    RemoteAtomic,
}

/// A range of bytes addressed by a work request or a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u32,
}

impl Range {
    /// Whether it lies within `whole` and begins `offset` bytes into it.
    pub(crate) fn is_part_of(self, whole: Range, offset: u64) -> bool {
        self.key == whole.key
            && self.addr == whole.addr.wrapping_add(offset)
            && offset + u64::from(self.len) <= u64::from(whole.len)
            && (self.len == 0) == (whole.len == 0)
    }
}

/// Addresses `first .. first + len` as work requests use them, and where they are backed.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    first: u64,
    len: u64,
    backing: u64,
}

#[derive(Debug)]
struct Region {
    pd: PdId,
    access: Access,
    keys: MemoryRegion,
    backing: u64,
    id: u32,
    /// Windows bound to it.
    windows: u32,
}

/// The parameters of a registration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) pd: PdId,
    /// First byte, as work requests and peers address it.
    pub(crate) addr: u64,
    pub(crate) len: u64,
    /// Backing address of the first byte.
    pub(crate) backing: u64,
    pub(crate) access: Access,
}

/// All regions and windows of an endpoint.
#[derive(Debug)]
pub(crate) struct RegionTable {
    slab: Slab<Region>,
    windows: WindowTable,
    /// Regions and windows by protection domain.
    users: BTreeMap<PdId, u32>,
    lkey_seed: u64,
    rkeys: Cipher,
    pub(crate) seeded: Seeded,
}

impl RegionTable {
    /// Room for `limit` regions and as many windows.
    pub(crate) fn new(limit: u32, rng: &mut Rng) -> RegionTable {
        let layout = Layout::new(limit, KEY_BITS);
        let slab = Slab::new(layout, rng.next_u32());
        let (lkey_seed, rkeys) = (rng.next_u64(), Cipher::new(KEY_BITS, rng));
        let windows = WindowTable::new(limit, rng);
        let (users, seeded) = (BTreeMap::new(), Seeded::default());
        RegionTable { slab, windows, users, lkey_seed, rkeys, seeded }
    }

    pub(crate) fn register(&mut self, wanted: Registration) -> Result<MemoryRegion, VerbsError> {
        let Registration { pd, addr, len, backing, access } = wanted;
        if let Some(why) = contradiction(&wanted) {
            return Err(VerbsError::BadRegion { addr, len, why });
        }
        let layout = self.slab.layout();
        let (lkey_seed, rkeys) = (self.lkey_seed, &self.rkeys);
        let made = self.slab.insert_with(|id, generation| {
            let lkey = key(layout, id, generation, lkey_seed);
            let rkey = seal_key(rkeys, id);
            let keys = MemoryRegion { addr, len, lkey, rkey };
            Region { pd, access, keys, backing, id, windows: 0 }
        });
        let keys = made
            .and_then(|id| self.slab.get(id))
            .map(|region| region.keys)
            .ok_or(VerbsError::TableFull { what: "memory regions", limit: layout.limit })?;
        self.add_user(pd);
        Ok(keys)
    }

    /// Forgets a region that no window is bound to.
    pub(crate) fn deregister(&mut self, lkey: u32) -> Result<(), VerbsError> {
        let region = self.by_lkey(lkey).ok_or(VerbsError::NoRegion(lkey))?;
        let (id, pd) = (region.id, region.pd);
        if region.windows > 0 {
            return Err(VerbsError::RegionInUse(lkey));
        }
        self.slab.remove(id);
        self.remove_user(pd);
        Ok(())
    }

    /// Moves a region without bound windows into another domain or changes its rights. Keys and
    /// bytes stay: peers keep using the key they have.
    pub(crate) fn change(&mut self, lkey: u32, pd: PdId, access: Access) -> Result<(), VerbsError> {
        let region = self.by_lkey(lkey).ok_or(VerbsError::NoRegion(lkey))?;
        if region.windows > 0 {
            return Err(VerbsError::RegionInUse(lkey));
        }
        let (id, before) = (region.id, region.pd);
        let MemoryRegion { addr, len, .. } = region.keys;
        let wanted = Registration { pd, addr, len, backing: region.backing, access };
        if let Some(why) = contradiction(&wanted) {
            return Err(VerbsError::BadRegion { addr, len, why });
        }
        if let Some(region) = self.slab.get_mut(id) {
            (region.pd, region.access) = (pd, access);
        }
        self.add_user(pd);
        self.remove_user(before);
        Ok(())
    }

    #[inline]
    fn by_lkey(&self, lkey: u32) -> Option<&Region> {
        let index = self.slab.layout().index_of(lkey);
        self.slab.at(index).filter(|region| region.keys.lkey == lkey)
    }

    /// The region with this remote key.
    #[inline]
    fn by_rkey(&self, rkey: u32) -> Option<&Region> {
        let id = open_key(&self.rkeys, rkey);
        self.slab.get(id).filter(|region| region.keys.rkey == rkey)
    }

    /// Whether regions or windows belong to a protection domain.
    pub(crate) fn uses_pd(&self, pd: PdId) -> bool {
        self.users.contains_key(&pd)
    }

    fn add_user(&mut self, pd: PdId) {
        *self.users.entry(pd).or_default() += 1;
    }

    fn remove_user(&mut self, pd: PdId) {
        match self.users.get_mut(&pd) {
            Some(users) if *users > 1 => *users -= 1,
            _ => drop(self.users.remove(&pd)),
        }
    }

    /// Checks that a queue pair of `pd` may access `range` of a region for `kind`, and returns the
    /// backing address. Empty ranges need no key (IBA 9.7.4.1.5).
    #[inline]
    pub(crate) fn check(
        &self,
        pd: PdId,
        kind: AccessKind,
        range: Range,
    ) -> Result<u64, ProtectionError> {
        if range.len == 0 {
            return Ok(range.addr);
        }
        let found = match kind {
            AccessKind::LocalRead | AccessKind::LocalWrite => self.by_lkey(range.key),
            _ => self.by_rkey(range.key),
        };
        let region = found.ok_or(ProtectionError::Key)?;
        if region.pd != pd && !self.seeded.is(Bug::KeyOfOtherDomain) {
            return Err(ProtectionError::Pd);
        }
        if !allows(region.access, kind) {
            return Err(ProtectionError::Access);
        }
        let span = region.span();
        let extra = u64::from(self.seeded.is(Bug::BoundsOffByOne));
        Mapping { len: span.len + extra, ..span }.locate(range)
    }

    /// The same for the peer of queue pair `qpn`, with a key of a region or a window.
    #[inline]
    pub(crate) fn check_remote(
        &self,
        pd: PdId,
        qpn: Qpn,
        kind: AccessKind,
        range: Range,
    ) -> Result<u64, ProtectionError> {
        if window::is_window_key(range.key) {
            return self.windows.check(pd, qpn, kind, range);
        }
        self.check(pd, kind, range)
    }

    /// Checks that queue pair `qpn` of `pd` may invalidate a remote key, in a work request of its
    /// own or of its peer: only that of a type 2 window bound to it. A region belongs to the
    /// program: a peer could otherwise revoke it for all others (IBA 10.6.5 leaves this to regions
    /// made for fast registration, which do not exist here).
    pub(crate) fn check_invalidate(
        &self,
        pd: PdId,
        qpn: Qpn,
        rkey: u32,
    ) -> Result<(), ProtectionError> {
        if window::is_window_key(rkey) {
            return self.windows.check_invalidate(pd, qpn, rkey);
        }
        match self.by_rkey(rkey) {
            None => Err(ProtectionError::Key),
            Some(region) if region.pd != pd => Err(ProtectionError::Pd),
            Some(_) => Err(ProtectionError::Access),
        }
    }

    /// Invalidates a window's key.
    pub(crate) fn invalidate(
        &mut self,
        pd: PdId,
        qpn: Qpn,
        rkey: u32,
    ) -> Result<(), ProtectionError> {
        self.check_invalidate(pd, qpn, rkey)?;
        self.unbind(rkey);
        Ok(())
    }
}

impl Region {
    fn span(&self) -> Mapping {
        Mapping { first: self.keys.addr, len: self.keys.len, backing: self.backing }
    }
}

impl Mapping {
    /// The backing address of `range`.
    #[inline]
    fn locate(&self, range: Range) -> Result<u64, ProtectionError> {
        self.locate_long(range.addr, range.len.into())
    }

    #[inline]
    fn locate_long(&self, addr: u64, len: u64) -> Result<u64, ProtectionError> {
        let offset = addr.checked_sub(self.first).ok_or(ProtectionError::Bounds)?;
        let holds = offset <= self.len && len <= self.len - offset;
        holds.then(|| self.backing + offset).ok_or(ProtectionError::Bounds)
    }
}

/// Whether `access` covers `kind`.
#[inline]
fn allows(access: Access, kind: AccessKind) -> bool {
    match kind {
        AccessKind::LocalRead => true,
        AccessKind::LocalWrite => access.local_write,
        AccessKind::RemoteRead => access.remote_read,
        AccessKind::RemoteWrite => access.remote_write,
        AccessKind::RemoteAtomic => access.remote_atomic,
    }
}

/// Remote rights that need the local right to write (IBA 10.6.3).
fn writes_remotely(access: Access) -> bool {
    access.remote_write || access.remote_atomic
}

fn contradiction(wanted: &Registration) -> Option<&'static str> {
    let Registration { addr, len, backing, access, .. } = *wanted;
    // The last byte may be the last of all addresses; no program's memory reaches that far.
    let has_last = addr.checked_add(len.saturating_sub(1)).is_some();
    if !has_last || backing.checked_add(len).is_none() {
        return Some("it runs past the end of the address space");
    }
    (writes_remotely(access) && !access.local_write)
        .then_some("remote write and remote atomic need local write")
}

/// The remote key of region `id`. No region has the key 0: the image of 0, which is no region's id,
/// is used in its place.
fn seal_key(rkeys: &Cipher, id: u32) -> u32 {
    match rkeys.seal(id) {
        0 => rkeys.seal(0),
        key => key,
    }
}

/// The id of the region with this key; 0 if there can be none.
#[inline]
fn open_key(rkeys: &Cipher, rkey: u32) -> u32 {
    match rkeys.open(rkey) {
        _ if rkey == 0 => 0,
        0 => rkeys.open(0),
        id => id,
    }
}

/// The tag 0 is excluded, so that no region has key 0. The image of generation 0, which does not
/// occur, is used in its place.
fn key(layout: Layout, id: u32, generation: u32, seed: u64) -> u32 {
    let index = layout.index_of(id);
    let slot_seed = Rng::new(seed ^ u64::from(index)).next_u64();
    let tag = match permute(generation, layout.generation_bits, slot_seed) {
        0 => permute(0, layout.generation_bits, slot_seed),
        tag => tag,
    };
    tag << layout.index_bits | index
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::WindowBinding;
    use alloc::collections::BTreeSet;

    const PD: PdId = PdId(1);

    fn table() -> RegionTable {
        RegionTable::new(16, &mut Rng::new(3))
    }

    fn range(key: u32, addr: u64, len: u32) -> Range {
        Range { key, addr, len }
    }

    fn at(addr: u64, len: u64, access: Access) -> Registration {
        Registration { pd: PD, addr, len, backing: addr, access }
    }

    #[test]
    fn bounds_are_exact_and_overflow_is_refused() {
        let mut table = table();
        let region = table.register(at(0x1000, 0x100, Access::ALL)).unwrap();
        let check =
            |addr, len| table.check(PD, AccessKind::RemoteWrite, range(region.rkey, addr, len));
        assert_eq!(check(0x1000, 0x100), Ok(0x1000));
        assert_eq!(check(0x10ff, 1), Ok(0x10ff));
        assert_eq!(check(0x1100, 1), Err(ProtectionError::Bounds));
        assert_eq!(check(0xfff, 2), Err(ProtectionError::Bounds));
        assert_eq!(check(0x1001, 0x100), Err(ProtectionError::Bounds));
        assert_eq!(check(u64::MAX, u32::MAX), Err(ProtectionError::Bounds));
        assert_eq!(check(0xdead_0000, 0), Ok(0xdead_0000));
    }

    #[test]
    fn each_purpose_needs_its_key_and_flag() {
        let mut table = table();
        let region = table.register(at(0, 64, Access::LOCAL_READ)).unwrap();
        let check = |kind, key| table.check(PD, kind, range(key, 0, 8));
        assert_eq!(check(AccessKind::LocalRead, region.lkey), Ok(0));
        assert_eq!(check(AccessKind::LocalRead, region.rkey), Err(ProtectionError::Key));
        assert_eq!(check(AccessKind::LocalWrite, region.lkey), Err(ProtectionError::Access));
        assert_eq!(check(AccessKind::RemoteRead, region.rkey), Err(ProtectionError::Access));
        assert_eq!(check(AccessKind::RemoteRead, region.lkey), Err(ProtectionError::Key));
        let other = table.check(PdId(2), AccessKind::LocalRead, range(region.lkey, 0, 8));
        assert_eq!(other, Err(ProtectionError::Pd));
    }

    #[test]
    fn keys_are_fresh() {
        let mut table = table();
        let mut seen = BTreeSet::new();
        for _ in 0..10_000 {
            let region = table.register(at(0, 1, Access::ALL)).unwrap();
            assert!(seen.insert(region.lkey), "lkey {:#x} came back", region.lkey);
            table.deregister(region.lkey).unwrap();
            let stale = table.check(PD, AccessKind::LocalRead, range(region.lkey, 0, 1));
            assert_eq!(stale, Err(ProtectionError::Key));
            assert_eq!(table.deregister(region.lkey), Err(VerbsError::NoRegion(region.lkey)));
        }
    }

    /// Remote keys of neighbouring slots, and successive keys of one slot, are spread over all
    /// numbers.
    #[test]
    fn remote_keys_have_no_bits_in_common() {
        let mut table = RegionTable::new(1 << 14, &mut Rng::new(4));
        let mut seen = BTreeSet::new();
        let mut ones = [0_u32; 32];
        for _ in 0..4_000 {
            let region = table.register(at(0, 1, Access::ALL)).unwrap();
            assert!(seen.insert(region.rkey) && !window::is_window_key(region.rkey));
            (0..32).for_each(|bit| ones[bit] += region.rkey >> bit & 1);
            let known = table.check(PD, AccessKind::RemoteRead, range(region.rkey, 0, 1));
            assert_eq!(known, Ok(0));
            if region.lkey.is_multiple_of(3) {
                table.deregister(region.lkey).unwrap();
                let stale = table.check(PD, AccessKind::RemoteRead, range(region.rkey, 0, 1));
                assert_eq!(stale, Err(ProtectionError::Key));
            }
        }
        assert!(ones[..31].iter().all(|ones| (1_800..2_200).contains(ones)), "{ones:?}");
        for bit in 0..32 {
            let near = seen.iter().filter(|&&key| seen.contains(&(key ^ 1 << bit))).count();
            assert!(near < 4, "{near} keys differ in bit {bit} alone");
        }
    }

    #[test]
    fn no_remote_key_is_zero() {
        for seed in 0..200 {
            let cipher = Cipher::new(6, &mut Rng::new(seed));
            let keys: BTreeSet<u32> = (1..64).map(|id| seal_key(&cipher, id)).collect();
            assert_eq!((keys.len(), keys.contains(&0)), (63, false));
            assert!((1..64).all(|id| open_key(&cipher, seal_key(&cipher, id)) == id));
            assert_eq!(open_key(&cipher, 0), 0);
        }
    }

    #[test]
    fn no_key_is_zero() {
        let layout = Layout::new(1 << 27, KEY_BITS);
        for seed in 0..200 {
            let keys: BTreeSet<u32> =
                (1..15).map(|generation| key(layout, 0, generation, seed)).collect();
            assert_eq!((keys.len(), keys.contains(&0)), (14, false));
        }
    }

    #[test]
    fn contradictory_regions_are_refused() {
        let mut table = table();
        let write_only = Access { remote_write: true, ..Access::LOCAL_READ };
        let atomic_only = Access { remote_atomic: true, ..Access::LOCAL_READ };
        assert!(table.register(at(0, 8, write_only)).is_err());
        assert!(table.register(at(0, 8, atomic_only)).is_err());
        let high = Registration { backing: u64::MAX - 6, ..at(0, 8, Access::LOCAL) };
        assert!(table.register(high).is_err());
        assert!(table.register(at(u64::MAX, 2, Access::LOCAL)).is_err());
        for _ in 0..16 {
            table.register(at(0, 8, Access::LOCAL)).unwrap();
        }
        let full = table.register(at(0, 8, Access::LOCAL));
        assert_eq!(full, Err(VerbsError::TableFull { what: "memory regions", limit: 16 }));
    }

    #[test]
    fn addresses_are_translated() {
        let mut table = table();
        let wanted = Registration { backing: 0x7000, ..at(0, 64, Access::ALL) };
        let region = table.register(wanted).unwrap();
        let check =
            |addr, len| table.check(PD, AccessKind::LocalWrite, range(region.lkey, addr, len));
        assert_eq!(check(0, 64), Ok(0x7000));
        assert_eq!(check(63, 1), Ok(0x703f));
        assert_eq!(check(0x7000, 1), Err(ProtectionError::Bounds));
    }

    #[test]
    fn a_region_may_end_with_the_last_address() {
        let mut table = table();
        let first = u64::MAX - 63;
        let wanted = Registration { backing: 0x7000, ..at(first, 64, Access::ALL) };
        let region = table.register(wanted).unwrap();
        let check =
            |addr, len| table.check(PD, AccessKind::RemoteWrite, range(region.rkey, addr, len));
        assert_eq!(check(first, 64), Ok(0x7000));
        assert_eq!(check(u64::MAX, 1), Ok(0x703f));
        for (addr, len) in [(first, 65), (u64::MAX, 2), (0, 1), (first - 1, 1)] {
            assert_eq!(check(addr, len), Err(ProtectionError::Bounds), "{addr:#x}, {len}");
        }
        let (window, key) = table.alloc_window(PD, false).unwrap();
        let mut binding = WindowBinding {
            window,
            rkey: key,
            lkey: region.lkey,
            addr: first + 32,
            len: 32,
            access: Access::ALL,
            zero_based: false,
        };
        table.draw_key(&mut binding);
        table.bind(PD, Qpn::new(7), &binding).unwrap();
        let last = range(binding.rkey, u64::MAX, 1);
        let found = table.check_remote(PD, Qpn::new(7), AccessKind::RemoteRead, last);
        assert_eq!(found, Ok(0x703f));
        assert!(table.register(Registration { len: 65, ..wanted }).is_err());
        assert!(table.register(Registration { backing: first, ..wanted }).is_err());
    }

    #[test]
    fn nobody_takes_a_region_away() {
        let mut table = table();
        let region = table.register(at(0, 64, Access::ALL)).unwrap();
        let qpn = Qpn::new(7);
        assert_eq!(table.invalidate(PD, qpn, region.lkey), Err(ProtectionError::Key));
        assert_eq!(table.invalidate(PdId(2), qpn, region.rkey), Err(ProtectionError::Pd));
        assert_eq!(table.invalidate(PD, qpn, region.rkey), Err(ProtectionError::Access));
        let remote = table.check_remote(PD, qpn, AccessKind::RemoteRead, range(region.rkey, 0, 8));
        assert_eq!(remote, Ok(0));
    }

    #[test]
    fn a_changed_region_keeps_its_keys() {
        let mut table = table();
        let region = table.register(at(0, 64, Access::LOCAL)).unwrap();
        let check = |table: &RegionTable, pd| {
            table.check(pd, AccessKind::RemoteWrite, range(region.rkey, 0, 8))
        };
        assert_eq!(check(&table, PD), Err(ProtectionError::Access));
        table.change(region.lkey, PD, Access::ALL).unwrap();
        assert_eq!(check(&table, PD), Ok(0));
        table.change(region.lkey, PdId(2), Access::ALL).unwrap();
        assert_eq!((check(&table, PD), check(&table, PdId(2))), (Err(ProtectionError::Pd), Ok(0)));
        assert!(!table.uses_pd(PD) && table.uses_pd(PdId(2)));
        let write_only = Access { remote_write: true, ..Access::LOCAL_READ };
        assert!(table.change(region.lkey, PD, write_only).is_err());
        assert_eq!(check(&table, PdId(2)), Ok(0));
        table.deregister(region.lkey).unwrap();
        assert_eq!(
            table.change(region.lkey, PD, Access::ALL),
            Err(VerbsError::NoRegion(region.lkey))
        );
        assert!(!table.uses_pd(PdId(2)));
    }

    #[test]
    fn protection_domains_are_in_use_while_something_belongs_to_them() {
        let mut table = table();
        assert!(!table.uses_pd(PD));
        let regions = [0, 1].map(|addr| table.register(at(addr, 8, Access::LOCAL)).unwrap());
        let (window, _) = table.alloc_window(PD, true).unwrap();
        for region in regions {
            assert!(table.uses_pd(PD));
            table.deregister(region.lkey).unwrap();
        }
        assert!(table.uses_pd(PD));
        table.dealloc_window(window).unwrap();
        assert!(!table.uses_pd(PD));
    }
}
