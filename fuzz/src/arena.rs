//! Memory that judges every access: what was registered, for whom, and which packet is at work.
//!
//! The endpoint is trusted with nothing. A packet that arrived may write only where its operation
//! may: a WRITE into a region open to it, a SEND into a buffer that was posted, an answer into the
//! buffer of a request that waits for one. A packet that leaves may read only what it may carry.
//! Anything else panics.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use roce::verbs::{Access, MemoryRegion, Qpn, SgList, Sge, WindowId};
use roce::wire::{Opcode, Operation};
use roce::world::{AtomicOp, Memory, MemoryKind};

use crate::ledger::Ledger;

/// First address of every arena: high, so that offsets mistaken for addresses are caught.
pub(crate) const BASE: u64 = 0x7f00_0000_0000;

/// Bytes of one stretch that a region is registered over; stretches have gaps between them.
pub(crate) const STRETCH_BYTES: u64 = 4096;
const GAP_BYTES: u64 = 64;

/// Stretches of an arena.
pub(crate) const STRETCHES: usize = 6;

/// Address of the first byte of a stretch.
pub(crate) const fn stretch(index: usize) -> u64 {
    BASE + GAP_BYTES + index as u64 * (STRETCH_BYTES + GAP_BYTES)
}

/// A region that is registered now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) keys: MemoryRegion,
    /// Where its first byte lies.
    pub(crate) backing: u64,
    pub(crate) access: Access,
    /// Belongs to the protection domain of the queue pairs; nobody may touch one that does not.
    pub(crate) reachable: bool,
}

impl Grant {
    fn holds(&self, addr: u64, len: u64) -> bool {
        addr >= self.backing && addr + len <= self.backing + self.keys.len
    }
}

/// Part of a region that a memory window may show, with the rights it may have been given.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pane {
    pub(crate) window: WindowId,
    /// The queue pair that it serves, if it serves one only.
    pub(crate) only: Option<Qpn>,
    pub(crate) backing: u64,
    pub(crate) len: u64,
    pub(crate) access: Access,
}

/// What wire and memory of a node tell each other.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// The packet that is being delivered, and the queue pair that it is for.
    pub(crate) arriving: Cell<Option<(Opcode, Qpn)>>,
    /// What was read for packets that leave, in order.
    pub(crate) reads: RefCell<Vec<(u64, u64)>>,
}

#[derive(Debug)]
pub(crate) struct Arena {
    bytes: Vec<u8>,
    pub(crate) grants: Vec<Grant>,
    pub(crate) panes: Vec<Pane>,
    pub(crate) ledger: Ledger,
    /// Atomics that were carried out here.
    pub(crate) atomics: u64,
    watch: Rc<Watch>,
}

impl Arena {
    pub(crate) fn new(watch: Rc<Watch>) -> Arena {
        let len = GAP_BYTES + STRETCHES as u64 * (STRETCH_BYTES + GAP_BYTES);
        Arena {
            bytes: vec![0x5a; len as usize],
            grants: Vec::with_capacity(STRETCHES),
            panes: Vec::new(),
            ledger: Ledger::default(),
            atomics: 0,
            watch,
        }
    }

    /// The same list by where the bytes lie; elements whose key names nothing are left out.
    pub(crate) fn backing_of(&self, sges: &SgList) -> SgList {
        let translate = |sge: &Sge| {
            let grant = self.grants.iter().find(|grant| grant.keys.lkey == sge.lkey)?;
            let addr = sge.addr.wrapping_sub(grant.keys.addr).wrapping_add(grant.backing);
            Some(Sge { addr, ..*sge })
        };
        sges.iter().filter_map(translate).collect()
    }

    fn granted(&self, addr: u64, len: u64, may: impl Fn(&Access) -> bool) -> bool {
        let region =
            |grant: &Grant| grant.reachable && grant.holds(addr, len) && may(&grant.access);
        self.grants.iter().any(region)
    }

    fn shown(&self, addr: u64, len: u64, may: impl Fn(&Access) -> bool) -> bool {
        let serves = |pane: &Pane| match (pane.only, self.watch.arriving.get()) {
            (Some(only), Some((_, qpn))) => only == qpn,
            _ => true,
        };
        let holds = |pane: &Pane| addr >= pane.backing && addr + len <= pane.backing + pane.len;
        self.panes.iter().any(|pane| holds(pane) && serves(pane) && may(&pane.access))
            && self.granted(addr, len, |_| true)
    }

    fn open_to_peer(&self, addr: u64, len: u64, may: impl Fn(&Access) -> bool + Copy) -> bool {
        self.granted(addr, len, may) || self.shown(addr, len, may)
    }

    fn judge_write(&self, addr: u64, len: u64) {
        let (opcode, _) = self.watch.arriving.get().expect("memory is written by packets only");
        let allowed = match opcode.operation() {
            Operation::Write => self.open_to_peer(addr, len, |access| access.remote_write),
            Operation::Send => {
                self.granted(addr, len, |access| access.local_write)
                    && self.ledger.receives_into(addr, len)
            }
            Operation::ReadResponse | Operation::AtomicAcknowledge => {
                self.granted(addr, len, |access| access.local_write)
                    && self.ledger.awaits_into(addr, len)
            }
            _ => false,
        };
        assert!(allowed, "{opcode} wrote {len} bytes at {addr:#x}, which it may not");
    }

    /// Judges what went out as payload of a packet.
    pub(crate) fn judge_read(&self, opcode: Opcode, addr: u64, len: u64) {
        let allowed = match opcode.operation() {
            Operation::ReadResponse => self.open_to_peer(addr, len, |access| access.remote_read),
            Operation::Send | Operation::Write => self.granted(addr, len, |_| true),
            _ => false,
        };
        assert!(allowed, "{opcode} carried {len} bytes from {addr:#x}, which it may not");
    }

    fn at(&self, addr: u64, len: usize) -> std::ops::Range<usize> {
        let start = addr.checked_sub(BASE).expect("address below the arena") as usize;
        start..start + len
    }
}

impl Memory for Arena {
    fn gather(&self, addr: u64, into: &mut [u8]) {
        self.watch.reads.borrow_mut().push((addr, into.len() as u64));
        into.copy_from_slice(&self.bytes[self.at(addr, into.len())]);
    }

    fn scatter(&mut self, addr: u64, from: &[u8]) {
        self.judge_write(addr, from.len() as u64);
        let range = self.at(addr, from.len());
        self.bytes[range].copy_from_slice(from);
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn atomic(&mut self, addr: u64, op: AtomicOp) -> u64 {
        assert_eq!(addr % 8, 0, "an atomic on a word that is not aligned");
        let allowed = self.open_to_peer(addr, 8, |access| access.remote_atomic);
        assert!(allowed, "an atomic at {addr:#x}, which it may not touch");
        self.atomics += 1;
        let range = self.at(addr, 8);
        op.apply_to(&mut self.bytes[range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Flow, Queue};

    const QPN: Qpn = Qpn::new(9);

    /// An arena with one region, in which a packet of this kind is being delivered.
    fn delivering(opcode: Opcode, access: Access) -> Arena {
        let watch = Rc::new(Watch::default());
        watch.arriving.set(Some((opcode, QPN)));
        let mut arena = Arena::new(watch);
        let keys = MemoryRegion { addr: 0, len: STRETCH_BYTES, lkey: 1, rkey: 2 };
        arena.grants.push(Grant { keys, backing: stretch(0), access, reachable: true });
        arena
    }

    #[test]
    fn what_is_open_may_be_written() {
        let mut arena = delivering(Opcode::RcWriteOnly, Access::REMOTE_WRITE);
        arena.scatter(stretch(0) + STRETCH_BYTES - 8, &[0; 8]);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_write_beyond_the_region_is_seen() {
        let mut arena = delivering(Opcode::RcWriteOnly, Access::REMOTE_WRITE);
        arena.scatter(stretch(0) + STRETCH_BYTES - 7, &[0; 8]);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_write_without_the_right_is_seen() {
        delivering(Opcode::RcWriteOnly, Access::LOCAL).scatter(stretch(0), &[0; 8]);
    }

    #[test]
    fn a_send_may_fill_what_was_posted() {
        let mut arena = delivering(Opcode::RcSendOnly, Access::LOCAL);
        let posted = SgList::from_iter([Sge { addr: 100, len: 8, lkey: 1 }]);
        let posted = arena.backing_of(&posted);
        arena.ledger.posted(Queue::Recv(QPN), true, Flow::In, posted);
        arena.scatter(stretch(0) + 100, &[0; 8]);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_send_beside_its_receive_is_seen() {
        delivering(Opcode::RcSendOnly, Access::LOCAL).scatter(stretch(0) + 100, &[0; 8]);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_read_response_from_a_closed_region_is_seen() {
        let arena = delivering(Opcode::RcReadRequest, Access::LOCAL);
        arena.judge_read(Opcode::RcReadResponseOnly, stretch(0), 8);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn an_atomic_across_words_is_seen() {
        let mut arena = delivering(Opcode::RcFetchAdd, Access::ALL);
        arena.atomic(stretch(0) + 4, AtomicOp::FetchAdd(1));
    }
}
