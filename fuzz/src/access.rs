//! The guard of a node's memory: the registered regions, their users, and the packet in progress.
//!
//! The endpoint is not trusted. An arriving packet may write only where its operation may: a WRITE
//! into a region that allows it, a SEND into a posted buffer, a response into the buffer of an
//! outstanding request. A packet being sent may read only what it may carry. Anything else panics.

use std::cell::{Cell, RefCell};

use roce::verbs::{Access, MemoryRegion, Qpn, SgList, Sge, WindowId};
use roce::wire::{Headers, Opcode, Operation};
use sim::memory::{Arena, BASE, Guard, Touch};
use sim::network::Packet;

use crate::ledger::Ledger;

/// Bytes of a memory range for one region; ranges have gaps between them.
pub(crate) const STRETCH_BYTES: u64 = 4096;
const GAP_BYTES: u64 = 64;

/// Memory ranges of an arena.
pub(crate) const STRETCHES: usize = 6;

/// Address of the first byte of a range.
pub(crate) const fn stretch(index: usize) -> u64 {
    BASE + GAP_BYTES + index as u64 * (STRETCH_BYTES + GAP_BYTES)
}

/// A registered region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) keys: MemoryRegion,
    /// Backing address of its first byte.
    pub(crate) backing: u64,
    pub(crate) access: Access,
    /// It is in the protection domain of the queue pairs; only then may it be accessed.
    pub(crate) reachable: bool,
}

impl Grant {
    fn holds(&self, addr: u64, len: u64) -> bool {
        addr >= self.backing && addr + len <= self.backing + self.keys.len
    }
}

/// Part of a region that may be bound to a memory window, with the rights that the window may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pane {
    pub(crate) window: WindowId,
    /// The queue pair it is bound to, if it is limited to one.
    pub(crate) only: Option<Qpn>,
    pub(crate) backing: u64,
    pub(crate) len: u64,
    pub(crate) access: Access,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct AccessCheck {
    pub(crate) grants: Vec<Grant>,
    pub(crate) panes: Vec<Pane>,
    pub(crate) ledger: Ledger,
    /// Atomics executed here.
    pub(crate) atomics: Cell<u64>,
    /// The packet being delivered, and its destination queue pair.
    pub(crate) arriving: Option<(Opcode, Qpn)>,
    /// Reads for packets being sent, in order; and how many of these reads were checked.
    reads: RefCell<Vec<(u64, u64)>>,
    checked: usize,
}

/// The memory of a node.
pub(crate) fn memory() -> Arena<AccessCheck> {
    let len = GAP_BYTES + STRETCHES as u64 * (STRETCH_BYTES + GAP_BYTES);
    Arena::with(vec![0x5a; len as usize], AccessCheck::default())
}

impl Guard for AccessCheck {
    fn registered(&mut self, region: &MemoryRegion, access: Access) {
        let backing = region.addr;
        self.grants.push(Grant { keys: *region, backing, access, reachable: true });
    }

    fn deregistered(&mut self, lkey: u32) {
        let at = self.grants.iter().position(|grant| grant.keys.lkey == lkey);
        self.grants.swap_remove(at.expect("an unknown key was accepted"));
    }

    fn check(&self, addr: u64, len: usize, touch: Touch) {
        match touch {
            Touch::Read => self.reads.borrow_mut().push((addr, len as u64)),
            Touch::Write => self.judge_write(addr, len as u64),
            Touch::Atomic => {
                assert_eq!(addr % 8, 0, "an atomic on a word that is not aligned");
                let allowed = self.open_to_peer(addr, 8, |access| access.remote_atomic);
                assert!(allowed, "an atomic at {addr:#x}, which it may not touch");
                self.atomics.set(self.atomics.get() + 1);
            }
        }
    }
}

impl AccessCheck {
    /// The same list by backing address; elements without a valid key are left out.
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
        let serves = |pane: &Pane| match (pane.only, self.arriving) {
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
        let (opcode, _) = self.arriving.expect("memory is written by packets only");
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

    /// Checks the payload of a sent packet: it may carry what was read for it.
    pub(crate) fn judge_sent(&mut self, packet: &Packet) -> Headers {
        let (headers, payload) = Headers::parse(&packet.bytes).expect("ours decodes");
        let mut left = payload.len() as u64;
        while left > 0 {
            let read = self.reads.borrow().get(self.checked).copied();
            let (addr, len) = read.expect("payload was read");
            self.checked += 1;
            self.judge_read(headers.bth().opcode, addr, len);
            self.ledger.gathered(addr, len);
            left = left.checked_sub(len).expect("one packet's payload at a time");
        }
        headers
    }

    /// Everything was sent.
    pub(crate) fn forget_reads(&mut self) {
        self.reads.borrow_mut().clear();
        self.checked = 0;
    }

    fn judge_read(&self, opcode: Opcode, addr: u64, len: u64) {
        let allowed = match opcode.operation() {
            Operation::ReadResponse => self.open_to_peer(addr, len, |access| access.remote_read),
            Operation::Send | Operation::Write => self.granted(addr, len, |_| true),
            _ => false,
        };
        assert!(allowed, "{opcode} carried {len} bytes from {addr:#x}, which it may not");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Flow, Queue};
    use roce::world::{AtomicOp, Memory as _, Staging as _};

    const QPN: Qpn = Qpn::new(9);

    /// An arena with one region, while a packet of this kind is being delivered.
    fn delivering(opcode: Opcode, access: Access) -> Arena<AccessCheck> {
        let mut arena = memory();
        arena.guard.arriving = Some((opcode, QPN));
        let keys = MemoryRegion { addr: 0, len: STRETCH_BYTES, lkey: 1, rkey: 2 };
        arena.guard.grants.push(Grant { keys, backing: stretch(0), access, reachable: true });
        arena
    }

    #[test]
    fn what_is_open_may_be_written() {
        let mut arena = delivering(Opcode::RcWriteOnly, Access::REMOTE_WRITE);
        assert_eq!(arena.bytes_mut(stretch(0) + STRETCH_BYTES - 8, 8).len(), 8);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_write_beyond_the_region_is_seen() {
        let mut arena = delivering(Opcode::RcWriteOnly, Access::REMOTE_WRITE);
        arena.bytes_mut(stretch(0) + STRETCH_BYTES - 7, 8);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_write_without_the_right_is_seen() {
        delivering(Opcode::RcWriteOnly, Access::LOCAL).bytes_mut(stretch(0), 8);
    }

    #[test]
    fn a_send_may_fill_what_was_posted() {
        let mut arena = delivering(Opcode::RcSendOnly, Access::LOCAL);
        let posted = SgList::from_iter([Sge { addr: 100, len: 8, lkey: 1 }]);
        let posted = arena.guard.backing_of(&posted);
        arena.guard.ledger.posted(Queue::Recv(QPN), true, Flow::In, posted);
        assert_eq!(arena.bytes_mut(stretch(0) + 100, 8).len(), 8);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_send_beside_its_receive_is_seen() {
        delivering(Opcode::RcSendOnly, Access::LOCAL).bytes_mut(stretch(0) + 100, 8);
    }

    #[test]
    #[should_panic(expected = "which it may not")]
    fn a_read_response_from_a_closed_region_is_seen() {
        let arena = delivering(Opcode::RcReadRequest, Access::LOCAL);
        arena.guard.judge_read(Opcode::RcReadResponseOnly, stretch(0), 8);
    }

    #[test]
    #[should_panic(expected = "not aligned")]
    fn an_atomic_across_words_is_seen() {
        let mut arena = delivering(Opcode::RcFetchAdd, Access::ALL);
        arena.atomic(stretch(0) + 4, AtomicOp::FetchAdd(1));
    }
}
