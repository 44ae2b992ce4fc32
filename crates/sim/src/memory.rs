//! A node's memory: real bytes with every access checked, or phantom bytes.
//!
//! [`Arena`] is the one that checks contract C3 from outside the transport: it keeps its own list of
//! what is registered and how, and an access that leaves it is recorded and fails the run, whatever
//! the transport's own checks said. [`Phantom`] has no contents: payload is a length, for
//! experiments that ask how fast and not what.

use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;

use roce::verbs::{Access, MemoryRegion};
use roce::world::{AtomicOp, Memory, MemoryKind};

use crate::chance::Chance;

/// What a simulated node can have as memory.
pub trait NodeMemory: Memory {
    /// Whether packets carry bytes, and an ICRC over them.
    const REAL: bool;

    /// Takes note of a region that the endpoint has registered.
    fn registered(&mut self, region: &MemoryRegion, access: Access);

    /// Takes note that it is no more.
    fn deregistered(&mut self, lkey: u32);
}

/// An access outside what was registered (C3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trespass {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: usize,
    /// Whether it would have written.
    pub writes: bool,
}

impl fmt::Display for Trespass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Trespass { addr, len, writes } = *self;
        let verb = if writes { "wrote" } else { "read" };
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

/// Real bytes from [`Arena::BASE`] on.
#[derive(Debug)]
pub struct Arena {
    bytes: Vec<u8>,
    known: Vec<Known>,
    trespass: Cell<Option<Trespass>>,
}

impl Arena {
    /// First address of every arena: high, so that offsets mistaken for addresses are caught.
    pub const BASE: u64 = 0x7f00_0000_0000;

    /// `len` random bytes.
    pub fn new(len: usize, chance: &mut Chance) -> Arena {
        let mut bytes = vec![0; len];
        chance.fill(&mut bytes);
        Arena { bytes, known: Vec::new(), trespass: Cell::new(None) }
    }

    /// Everything, registered or not.
    pub fn all(&self) -> &[u8] {
        &self.bytes
    }

    /// The `len` bytes at `addr`, registered or not.
    pub fn peek(&self, addr: u64, len: usize) -> &[u8] {
        let at = (addr - Arena::BASE) as usize;
        &self.bytes[at..at + len]
    }

    /// Writes as the program does, to its own memory.
    pub fn poke(&mut self, addr: u64, bytes: &[u8]) {
        let at = (addr - Arena::BASE) as usize;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The first access that broke C3.
    pub fn trespass(&self) -> Option<Trespass> {
        self.trespass.get()
    }

    /// Where in the arena the access goes, if it is all inside; takes note if it may not be.
    fn locate(&self, addr: u64, len: usize, writes: bool) -> Option<usize> {
        let end = addr.checked_add(len as u64);
        let allows = |known: &Known| {
            known.start <= addr
                && end.is_some_and(|end| end <= known.end)
                && (known.writable || !writes)
        };
        if !self.known.iter().any(allows) && self.trespass.get().is_none() {
            self.trespass.set(Some(Trespass { addr, len, writes }));
        }
        let at = addr.checked_sub(Arena::BASE)? as usize;
        (at.checked_add(len)? <= self.bytes.len()).then_some(at)
    }
}

impl Memory for Arena {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        match self.locate(addr, into.len(), false) {
            Some(at) => into.copy_from_slice(&self.bytes[at..at + into.len()]),
            None => into.fill(0),
        }
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        if let Some(at) = self.locate(addr, from.len(), true) {
            self.bytes[at..at + from.len()].copy_from_slice(from);
        }
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        self.locate(addr, 8, true).map_or(0, |at| op.apply_to(&mut self.bytes[at..at + 8]))
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }
}

impl NodeMemory for Arena {
    const REAL: bool = true;

    fn registered(&mut self, region: &MemoryRegion, access: Access) {
        let MemoryRegion { addr, len, lkey, .. } = *region;
        let writable = access.local_write;
        self.known.push(Known { lkey, start: addr, end: addr + len, writable });
    }

    fn deregistered(&mut self, lkey: u32) {
        self.known.retain(|known| known.lkey != lkey);
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
    const REAL: bool = false;

    fn registered(&mut self, _: &MemoryRegion, _: Access) {}

    fn deregistered(&mut self, _: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_that_leaves_its_region_is_recorded() {
        let mut arena = Arena::new(4096, &mut Chance::new(1));
        let region = MemoryRegion { addr: Arena::BASE + 64, len: 64, lkey: 1, rkey: 2 };
        arena.registered(&region, Access::LOCAL_READ);
        arena.gather(region.addr, &mut [0; 64]);
        assert_eq!(arena.trespass(), None);
        arena.scatter(region.addr, &[7]);
        let first = Trespass { addr: region.addr, len: 1, writes: true };
        assert_eq!(arena.trespass(), Some(first));
        arena.gather(u64::MAX, &mut [0; 16]);
        assert_eq!(arena.trespass(), Some(first), "the first one stays");
    }

    #[test]
    fn one_byte_beyond_is_beyond() {
        let mut arena = Arena::new(4096, &mut Chance::new(1));
        let region = MemoryRegion { addr: Arena::BASE, len: 64, lkey: 1, rkey: 2 };
        arena.registered(&region, Access::LOCAL);
        arena.gather(region.addr, &mut [0; 65]);
        assert!(arena.trespass().is_some());
    }
}
