//! A node's memory: real bytes with every access checked, or phantom bytes.
//!
//! [`Arena`] checks contract C3 independently of the transport: its [`Guard`] keeps its own list of
//! the accesses allowed. [`Regions`] is the guard for registered regions and memory lent to a
//! device; a test that knows more supplies its own guard. [`Phantom`] has no contents: payload is a
//! length, for experiments about speed rather than contents.

use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;

use roce::verbs::{Access, MemoryRegion};
use roce::world::{AtomicOp, Memory, MemoryKind, Staging};

use crate::chance::Chance;

/// First address of every arena: high, so that offsets mistaken for addresses are caught.
pub const BASE: u64 = 0x7f00_0000_0000;

/// The memory of a simulated node.
pub trait NodeMemory: Memory {
    /// The endpoint has registered a region; its address is that of the bytes.
    fn registered(&mut self, region: &MemoryRegion, access: Access);

    /// A region was deregistered.
    fn deregistered(&mut self, lkey: u32);
}

/// The kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Read.
    Read,
    /// Written.
    Write,
    /// Read and written as one word.
    Atomic,
}

/// Checks every access to an [`Arena`].
pub trait Guard {
    /// A region was registered; its address is that of the bytes.
    fn registered(&mut self, region: &MemoryRegion, access: Access);

    /// It was deregistered.
    fn deregistered(&mut self, lkey: u32);

    /// Checks an access before it happens. The guard chooses whether to record a violation or to
    /// panic.
    fn check(&self, addr: u64, len: usize, touch: Touch);
}

/// An access outside registered memory (C3), or to lent memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trespass {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: usize,
    /// The kind of access.
    pub touch: Touch,
}

impl fmt::Display for Trespass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trespass { addr, len, touch } = *self;
        let verb = if touch == Touch::Read { "read" } else { "wrote" };
        write!(f, "C3: {verb} {len} bytes at {addr:#x}, outside any region that allows it")
    }
}

#[derive(Clone, Copy, Debug)]
struct Known {
    lkey: u32,
    start: u64,
    end: u64,
    writable: bool,
}

/// The guard for registered regions, and memory lent to a device.
#[derive(Debug, Default)]
pub struct Regions {
    known: Vec<Known>,
    lent: Vec<(u64, u64)>,
    is_strict: bool,
    trespass: Cell<Option<Trespass>>,
}

impl Regions {
    /// Panics at the first violation, instead of recording it.
    pub fn strict() -> Regions {
        Regions { is_strict: true, ..Regions::default() }
    }

    /// Only the device may access these bytes until they are given back.
    pub fn lend(&mut self, addr: u64, len: u64) {
        self.check(addr, len as usize, Touch::Write);
        self.lent.push((addr, addr + len));
    }

    /// The device has finished with the bytes lent at `addr`.
    pub fn give_back(&mut self, addr: u64) {
        self.lent.retain(|&(start, _)| start != addr);
    }

    /// The first violation.
    pub fn trespass(&self) -> Option<Trespass> {
        self.trespass.get()
    }

    fn allows(&self, addr: u64, len: usize, touch: Touch) -> bool {
        let Some(end) = addr.checked_add(len as u64) else {
            return false;
        };
        let inside = |known: &Known| {
            known.start <= addr && end <= known.end && (known.writable || touch == Touch::Read)
        };
        let apart = |&(start, stop): &(u64, u64)| end <= start || stop <= addr;
        let aligned = touch != Touch::Atomic || addr.is_multiple_of(8);
        aligned && self.known.iter().any(inside) && self.lent.iter().all(apart)
    }
}

impl Guard for Regions {
    fn registered(&mut self, region: &MemoryRegion, access: Access) {
        let MemoryRegion { addr, len, lkey, .. } = *region;
        let writable = access.local_write;
        self.known.push(Known { lkey, start: addr, end: addr + len, writable });
    }

    fn deregistered(&mut self, lkey: u32) {
        self.known.retain(|known| known.lkey != lkey);
    }

    fn check(&self, addr: u64, len: usize, touch: Touch) {
        if self.trespass.get().is_none() && !self.allows(addr, len, touch) {
            let trespass = Trespass { addr, len, touch };
            assert!(!self.is_strict, "{trespass}");
            self.trespass.set(Some(trespass));
        }
    }
}

/// Real bytes from [`BASE`] on.
#[derive(Debug)]
pub struct Arena<G = Regions> {
    bytes: Vec<u8>,
    /// Checks every access.
    pub guard: G,
    /// Executes every atomic twice: a broken memory that a history checker must notice.
    pub doubles_atomics: bool,
    taken: u64,
}

impl Arena {
    /// First address of every arena.
    pub const BASE: u64 = BASE;

    /// `len` random bytes, guarded by [`Regions`] that record.
    pub fn new(len: usize, chance: &mut Chance) -> Arena {
        let mut bytes = vec![0; len];
        chance.fill(&mut bytes);
        Arena::with(bytes, Regions::default())
    }

    /// The same, guarded by [`Regions`] that panic.
    pub fn strict(len: usize, chance: &mut Chance) -> Arena {
        Arena { guard: Regions::strict(), ..Arena::new(len, chance) }
    }

    /// The first violation of C3.
    pub fn trespass(&self) -> Option<Trespass> {
        self.guard.trespass()
    }
}

impl<G: Guard> Arena<G> {
    /// These bytes, with a guard over them.
    pub const fn with(bytes: Vec<u8>, guard: G) -> Arena<G> {
        Arena { bytes, guard, doubles_atomics: false, taken: 0 }
    }

    /// The address of new memory on a page boundary, which is never freed; `None` when the arena is
    /// used up.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let addr = BASE + self.taken;
        self.taken += len.max(1).next_multiple_of(4096);
        (self.taken <= self.bytes.len() as u64).then_some(addr)
    }

    /// All bytes, registered or not.
    pub fn all(&self) -> &[u8] {
        &self.bytes
    }

    /// The `len` bytes at `addr`, registered or not.
    pub fn peek(&self, addr: u64, len: usize) -> &[u8] {
        let at = (addr - BASE) as usize;
        &self.bytes[at..at + len]
    }

    /// Writes as the program does, to its own memory.
    pub fn poke(&mut self, addr: u64, bytes: &[u8]) {
        let at = (addr - BASE) as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The offset in the arena of these bytes, if all of them are in it.
    fn locate(&self, addr: u64, len: usize) -> Option<usize> {
        let at = addr.checked_sub(BASE)? as usize;
        (at.checked_add(len)? <= self.bytes.len()).then_some(at)
    }
}

impl<G: Guard> Memory for Arena<G> {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        self.guard.check(addr, into.len(), Touch::Read);
        match self.locate(addr, into.len()) {
            Some(at) => into.copy_from_slice(&self.bytes[at..at + into.len()]),
            None => into.fill(0),
        }
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        self.guard.check(addr, from.len(), Touch::Write);
        if let Some(at) = self.locate(addr, from.len()) {
            self.bytes[at..at + from.len()].copy_from_slice(from);
        }
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        self.guard.check(addr, 8, Touch::Atomic);
        let Some(at) = self.locate(addr, 8) else {
            return 0;
        };
        let word = &mut self.bytes[at..at + 8];
        let original = op.apply_to(word);
        if self.doubles_atomics {
            op.apply_to(word);
        }
        original
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

/// Panics if the bytes are not in the arena.
impl<G: Guard> Staging for Arena<G> {
    fn bytes(&self, addr: u64, len: usize) -> &[u8] {
        self.guard.check(addr, len, Touch::Read);
        self.peek(addr, len)
    }

    fn bytes_mut(&mut self, addr: u64, len: usize) -> &mut [u8] {
        self.guard.check(addr, len, Touch::Write);
        let at = (addr - BASE) as usize;
        &mut self.bytes[at..at + len]
    }
}

impl<G: Guard> NodeMemory for Arena<G> {
    fn registered(&mut self, region: &MemoryRegion, access: Access) {
        self.guard.registered(region, access);
    }

    fn deregistered(&mut self, lkey: u32) {
        self.guard.deregistered(lkey);
    }
}

/// Addresses without contents.
#[derive(Debug, Default)]
pub struct Phantom;

impl Memory for Phantom {
    fn gather(&self, _: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn scatter(&mut self, _: u64, _: &[u8]) {}

    fn atomic(&mut self, _: u64, _: AtomicOp) -> u64 {
        0
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Phantom
    }
}

impl NodeMemory for Phantom {
    fn registered(&mut self, _: &MemoryRegion, _: Access) {}

    fn deregistered(&mut self, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(len: u64, access: Access) -> (Arena, MemoryRegion) {
        let mut arena = Arena::new(4096, &mut Chance::new(1));
        let region = MemoryRegion { addr: BASE + 64, len, lkey: 1, rkey: 2 };
        arena.registered(&region, access);
        (arena, region)
    }

    #[test]
    fn an_access_that_leaves_its_region_is_recorded() {
        let (mut arena, region) = arena(64, Access::LOCAL_READ);
        arena.gather(region.addr, &mut [0; 64]);
        assert_eq!(arena.trespass(), None);
        arena.scatter(region.addr, &[7]);
        let first = Trespass { addr: region.addr, len: 1, touch: Touch::Write };
        assert_eq!(arena.trespass(), Some(first));
        arena.gather(u64::MAX, &mut [0; 16]);
        assert_eq!(arena.trespass(), Some(first), "the first one stays");
    }

    #[test]
    fn one_byte_beyond_is_beyond() {
        let (arena, region) = arena(64, Access::LOCAL);
        arena.gather(region.addr, &mut [0; 65]);
        assert!(arena.trespass().is_some());
    }

    #[test]
    fn an_atomic_across_words_is_recorded() {
        let (mut arena, region) = arena(64, Access::LOCAL);
        arena.atomic(region.addr + 8, AtomicOp::FetchAdd(1));
        assert_eq!(arena.trespass(), None);
        arena.atomic(region.addr + 4, AtomicOp::FetchAdd(1));
        assert!(arena.trespass().is_some());
    }

    #[test]
    #[should_panic(expected = "C3: wrote 8 bytes")]
    fn what_is_lent_belongs_to_the_device() {
        let (mut arena, region) = arena(64, Access::LOCAL);
        arena.guard.is_strict = true;
        arena.guard.lend(region.addr + 8, 8);
        arena.bytes_mut(region.addr, 8);
        arena.guard.give_back(region.addr + 8);
        arena.bytes_mut(region.addr + 8, 8);
        arena.guard.lend(region.addr + 8, 8);
        arena.bytes_mut(region.addr + 1, 8);
    }
}
