//! Random requests: their kinds, lengths, sources and targets.
//!
//! Sources are constant, or they are overwritten at the moment the request completes; targets are
//! always bytes that nothing else uses.

use alloc::vec::Vec;

use roce::verbs::{SendOp, SgList, Transport, WcOpcode, WcStatus};
use roce::world::AtomicOp;

use super::scenario::Kind;
use super::side::{At, Effect, Holder};
use super::space::{SINKS, Use, WORDS};
use super::{Checked, Run};

/// WRITEs over the bytes of another one in flight, per mille.
const REWRITES: u32 = 250;

/// Longest datagram of the endpoints' configuration.
const DATAGRAM_BYTES: u64 = 4_096;

/// The programs of an unreliable pair reconnect after this many sends of one side: targets of
/// unacknowledged WRITEs cannot be reused before.
pub(super) const RETIRE_AFTER: u64 = 150;

/// A request about to be posted.
pub(super) struct Draft {
    pub(super) op: SendOp,
    pub(super) opcode: WcOpcode,
    pub(super) sges: SgList,
    pub(super) volatile: SgList,
    pub(super) effect: Effect,
    pub(super) must: WcStatus,
    /// It is signaled in any case.
    pub(super) signaled: bool,
    /// It waits for READs and atomics before it.
    pub(super) fence: bool,
    /// What the peer receives: immediate, bytes, and where they are if not in the receive.
    pub(super) tells: Option<(Option<u32>, Vec<u8>, Option<u64>)>,
}

impl Draft {
    pub(super) fn new(op: SendOp, opcode: WcOpcode, sges: SgList) -> Draft {
        let (volatile, must) = (SgList::new(), WcStatus::Success);
        Draft {
            op,
            opcode,
            sges,
            volatile,
            effect: Effect::None,
            must,
            signaled: false,
            fence: false,
            tells: None,
        }
    }
}

/// A source of bytes, and the part that has to be freed.
pub(super) struct Source {
    pub(super) sges: SgList,
    pub(super) volatile: SgList,
    pub(super) bytes: Vec<u8>,
}

impl Run {
    /// Lengths around all boundaries: nothing, one byte, the MTU and its multiples.
    pub(super) fn draw_len(&mut self, at: At) -> u32 {
        let mtu = u64::from(self.pairs[at.pair].params.mtu.bytes());
        let chance = &mut self.chance;
        let len = match chance.below(20) {
            0 => 0,
            1..=7 => chance.between(1, 80),
            8..=12 => chance.below(mtu + 1),
            13..=15 => mtu * chance.between(1, 4) + chance.below(3) - 1,
            16..=18 => chance.below(4 * mtu),
            _ => chance.below(self.scenario.max_len),
        };
        let is_ud = self.pairs[at.pair].params.transport == Transport::Ud;
        let most = if is_ud { DATAGRAM_BYTES } else { self.scenario.max_len };
        len.min(most).min(self.scenario.max_len) as u32
    }

    /// A length that fits its receive; rarely, one that does not.
    pub(super) fn draw_message_len(&mut self, at: At) -> Checked<u32> {
        let len = self.draw_len(at);
        let peer = self.side(at.peer())?;
        if peer.shares {
            let pool = self.pools[peer.node as usize].as_ref();
            return Ok(pool.map_or(len, |pool| len.min(pool.len)));
        }
        if !self.pairs[at.pair].params.is_reliable() {
            return Ok(len);
        }
        let Some(receive) = peer.receives.get(peer.announced.len()) else {
            return Ok(len);
        };
        let (capacity, number) = (receive.capacity, peer.messages);
        let fails = peer.fails_at.is_none() && u64::from(capacity) + 100 < self.scenario.max_len;
        if fails && self.chance.per_mille(self.scenario.too_long) {
            self.side_mut(at.peer())?.fails_at = Some(number);
            self.pair_mut(at).is_excused = true;
            return Ok(capacity + self.chance.between(1, 100) as u32);
        }
        Ok(len.min(capacity))
    }

    pub(super) fn draw_source(&mut self, node: u32, len: u32) -> Option<Source> {
        let space = &mut self.spaces[node as usize];
        let is_volatile = self.chance.per_mille(400);
        let (sges, volatile) = if is_volatile {
            let sges = space.take_list([Use::Volatile; 2], len, &mut self.chance)?;
            (sges.clone(), sges)
        } else {
            (space.lasting_source(len, &mut self.chance), SgList::new())
        };
        let bytes = space.expected_list(&sges);
        Some(Source { sges, volatile, bytes })
    }

    pub(super) fn draft_send(&mut self, at: At, kind: Kind) -> Checked<Option<Draft>> {
        let len = self.draw_message_len(at)?;
        let node = self.side(at)?.node;
        let Some(Source { sges, volatile, bytes }) = self.draw_source(node, len) else {
            return Ok(None);
        };
        let imm = (kind == Kind::SendImm).then(|| self.chance.word() as u32);
        let op = imm.map_or(SendOp::Send, SendOp::SendImm);
        let tells = Some((imm, bytes, None));
        Ok(Some(Draft { volatile, tells, ..Draft::new(op, WcOpcode::Send, sges) }))
    }

    pub(super) fn draft_write(&mut self, at: At, kind: Kind) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        if self.chance.per_mille(REWRITES)
            && let Some(draft) = self.draft_rewrite(at, kind)?
        {
            return Ok(Some(draft));
        }
        let len = self.draw_len(at);
        let space = &mut self.spaces[peer as usize];
        let Some(target) = space.take_one(Use::Window, len, &mut self.chance) else {
            if !self.pairs[at.pair].params.is_reliable() {
                self.side_mut(at)?.posted = RETIRE_AFTER;
            }
            return Ok(None);
        };
        let Some(source) = self.draw_source(node, len) else {
            self.spaces[peer as usize].give(target.addr, len);
            return Ok(None);
        };
        Ok(Some(self.write_to((peer, target.addr), kind, source, &[])))
    }

    /// A WRITE over the bytes of the latest one in flight, or over the first of them. Whatever the
    /// network does to their packets, these bytes are there in the end.
    fn draft_rewrite(&mut self, at: At, kind: Kind) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let is_reliable = self.pairs[at.pair].params.is_reliable();
        let Some((wr_id, target, before)) = self.last_write(at, true)?.filter(|_| is_reliable)
        else {
            return Ok(None);
        };
        let len = self.draw_len(at).min(before.len() as u32);
        let Some(source) = self.draw_source(node, len) else {
            return Ok(None);
        };
        self.take_over(at, wr_id, Holder::Write)?;
        let kept = &before[len as usize..];
        Ok(Some(self.write_to((peer, target), kind, source, kept)))
    }

    /// A WRITE to a slot of this node, which holds the bytes `kept` behind it.
    fn write_to(
        &mut self,
        (peer, target): (u32, u64),
        kind: Kind,
        Source { sges, volatile, mut bytes }: Source,
        kept: &[u8],
    ) -> Draft {
        let space = &self.spaces[peer as usize];
        let (remote_addr, rkey) =
            (space.remote(Use::Window, target), space.region(Use::Window).rkey);
        let imm = (kind == Kind::WriteImm).then(|| self.chance.word() as u32);
        let op = match imm {
            Some(imm) => SendOp::WriteImm { remote_addr, rkey, imm },
            None => SendOp::Write { remote_addr, rkey },
        };
        let tells = imm.map(|imm| (Some(imm), bytes.clone(), Some(target)));
        bytes.extend_from_slice(kept);
        let effect = Effect::Write { target, bytes, held_by: Holder::Own };
        Draft { volatile, effect, tells, ..Draft::new(op, WcOpcode::Write, sges) }
    }

    pub(super) fn draft_read(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let readable = self.spaces[peer as usize].access(Use::Window).remote_read;
        let read_back = self.chance.per_mille(400) && readable;
        let written = if read_back { self.last_write(at, false)? } else { None };
        let (addr, of, bytes, write) = match written {
            Some((wr_id, target, bytes)) => (target, Use::Window, bytes, Some(wr_id)),
            None => {
                let len = self.draw_len(at);
                let space = &self.spaces[peer as usize];
                let library = space.region(Use::Library);
                let addr = library.addr + self.chance.below(library.len - u64::from(len) + 1);
                (addr, Use::Library, space.expected(addr, len as usize).to_vec(), None)
            }
        };
        let rkey = self.spaces[peer as usize].region(of).rkey;
        let remote_addr = self.spaces[peer as usize].remote(of, addr);
        let len = bytes.len() as u32;
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_list(SINKS, len, &mut self.chance) else {
            return Ok(None);
        };
        if let Some(wr_id) = write {
            self.take_over(at, wr_id, Holder::Read)?;
        }
        let source = write.map(|_| (addr, len));
        let op = SendOp::Read { remote_addr, rkey };
        let effect = Effect::Read { landing: landing.clone(), bytes, source, lends_landing: false };
        Ok(Some(Draft { effect, ..Draft::new(op, WcOpcode::Read, landing) }))
    }

    /// A READ, and a SEND of the bytes it returns. Without the fence it would send old bytes.
    pub(super) fn post_read_send(&mut self, at: At) -> Checked<bool> {
        let depth = self.pairs[at.pair].params.depth as usize;
        let node = self.side(at)?.node;
        if self.side(at)?.sends.len() + 2 > depth {
            return self.post_if_silent(at);
        }
        let len = self.draw_message_len(at)?;
        let peer = self.side(at.peer())?.node;
        let space = &self.spaces[peer as usize];
        let library = space.region(Use::Library);
        let addr = library.addr + self.chance.below(library.len - u64::from(len) + 1);
        let bytes = space.expected(addr, len as usize).to_vec();
        let remote_addr = space.remote(Use::Library, addr);
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_list(SINKS, len, &mut self.chance) else {
            return Ok(false);
        };
        let op = SendOp::Read { remote_addr, rkey: library.rkey };
        let (tells, volatile) = (Some((None, bytes.clone(), None)), landing.clone());
        let (source, lends_landing) = (None, true);
        let effect = Effect::Read { landing: landing.clone(), bytes, source, lends_landing };
        let read = Draft { effect, ..Draft::new(op, WcOpcode::Read, landing.clone()) };
        self.submit(at, read)?;
        let send = Draft::new(SendOp::Send, WcOpcode::Send, landing);
        self.submit(at, Draft { volatile, tells, fence: true, ..send })?;
        Ok(true)
    }

    pub(super) fn draft_atomic(&mut self, at: At) -> Checked<Option<Draft>> {
        let (node, peer) = (self.side(at)?.node, self.side(at.peer())?.node);
        let space = &mut self.spaces[node as usize];
        let Some(landing) = space.take_one(Use::SinkA, 8, &mut self.chance) else {
            return Ok(None);
        };
        let word = self.chance.below(WORDS) as usize;
        let words = self.spaces[peer as usize].region(Use::Words);
        let addr = words.addr + 8 * word as u64;
        let remote_addr = self.spaces[peer as usize].remote(Use::Words, addr);
        let known = self.last_values[peer as usize][word];
        let (op, opcode) = self.draw_atomic(remote_addr, words.rkey, known);
        let effect = Effect::Atomic { landing, word, op: applied(op) };
        let draft = Draft::new(op, opcode, [landing].into_iter().collect());
        Ok(Some(Draft { effect, ..draft }))
    }

    pub(super) fn draw_atomic(
        &mut self,
        remote_addr: u64,
        rkey: u32,
        known: u64,
    ) -> (SendOp, WcOpcode) {
        let (compare, swap) = (self.chance.pick(&[known, known, !known]), self.chance.word());
        if self.chance.per_mille(500) {
            return (SendOp::FetchAdd { remote_addr, rkey, add: swap }, WcOpcode::FetchAdd);
        }
        let op = SendOp::CompareSwap { remote_addr, rkey, compare, swap };
        (op, WcOpcode::CompareSwap)
    }

    /// The latest outstanding WRITE that still holds its target; if `silent`, one that the peer is
    /// not told of, so that it does not look at the bytes.
    fn last_write(&self, at: At, silent: bool) -> Checked<Option<(u64, u64, Vec<u8>)>> {
        let found = self.side(at)?.sends.iter().rev().find_map(|send| match &send.effect {
            Effect::Write { target, bytes, held_by: Holder::Own }
                if !silent || send.message.is_none() =>
            {
                Some((send.wr_id, *target, bytes.clone()))
            }
            _ => None,
        });
        Ok(found)
    }

    /// The target of this WRITE is now held by another request.
    fn take_over(&mut self, at: At, wr_id: u64, holder: Holder) -> Checked<()> {
        let mut sends = self.side_mut(at)?.sends.iter_mut();
        let write = sends.find(|send| send.wr_id == wr_id).map(|send| &mut send.effect);
        if let Some(Effect::Write { held_by, .. }) = write {
            *held_by = holder;
        }
        Ok(())
    }

    /// A request without any bytes, which needs no key either.
    pub(super) fn empty_draft(&self, at: At) -> Draft {
        let is_ud = self.pairs[at.pair].params.transport == Transport::Ud;
        let may_write = self.side(at.peer()).is_ok_and(|peer| peer.access.remote_write);
        if is_ud || !may_write {
            let tells = Some((None, Vec::new(), None));
            return Draft { tells, ..Draft::new(SendOp::Send, WcOpcode::Send, SgList::new()) };
        }
        let op = SendOp::Write { remote_addr: 0, rkey: 0 };
        Draft::new(op, WcOpcode::Write, SgList::new())
    }
}

/// The operation on the peer's word.
pub(super) fn applied(op: SendOp) -> AtomicOp {
    match op {
        SendOp::CompareSwap { compare, swap, .. } => AtomicOp::CompareSwap { compare, swap },
        SendOp::FetchAdd { add, .. } => AtomicOp::FetchAdd(add),
        _ => AtomicOp::FetchAdd(0),
    }
}
