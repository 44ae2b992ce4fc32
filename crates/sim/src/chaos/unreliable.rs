//! The promises of the unreliable transports: a message is received whole or not at all, with its
//! own bytes, immediate and sender; and not more often than it was sent.
//!
//! Messages may be lost and, when the network delays packets, reordered. They are identified by
//! their bytes. When the network duplicates packets, a message may be received twice: sequence
//! numbers of these transports only detect losses, and those of datagrams have no meaning.
//!
//! A network that does none of this delivers messages in order; one that loses nothing either
//! delivers every message that finds a large enough receive. And whatever happened before, the next
//! message arrives when the network is empty and has no faults: at the end, both sides say
//! farewell.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;

use roce::endpoint::QpState;
use roce::verbs::{Completion, GRH_BYTES, SendOp, SgList, Sge, Transport, WcOpcode, WcStatus};
use roce::wire::grh::gid_of;

use super::draft::Draft;
use super::side::{Announced, At, Open, PairState, PostedReceive, Side};
use super::space::gather;
use super::{Checked, Run, Sabotage, ensure};
use crate::faults::Fault;

impl Run {
    /// A receive completion of an unreliable queue pair.
    pub(super) fn check_heard(
        &mut self,
        at: At,
        receive: &PostedReceive,
        done: &Completion,
    ) -> Checked<()> {
        let node = self.side(at)?.node;
        if done.status != WcStatus::Success {
            ensure!(done.status == WcStatus::WrFlushError, "it cannot end like this");
            self.side_mut(at)?.receive_errors += 1;
            self.leave_any(at, node, &receive.sges);
            return Ok(());
        }
        ensure!(self.side(at)?.receive_errors == 0, "a success after an error");
        match self.pairs[at.pair].params.transport {
            Transport::Ud => self.check_datagram(at, receive, done)?,
            _ => self.check_uc(at, receive, done)?,
        }
        self.spaces[node as usize].give_all(&receive.sges);
        Ok(())
    }

    /// These buffers may hold bytes of messages that were never completed.
    pub(super) fn leave_any(&mut self, at: At, node: u32, list: &[Sge]) {
        let pair = self.pair_mut(at);
        for sge in list {
            let bytes = alloc::vec![0; sge.len as usize];
            pair.open.push(Open { node, addr: sge.addr, bytes, any: true });
            pair.held.push((node, sge.addr, sge.len));
        }
    }

    fn check_uc(&mut self, at: At, receive: &PostedReceive, done: &Completion) -> Checked<()> {
        let (node, len) = (self.side(at)?.node, done.byte_len as usize);
        ensure!(done.src_qp.is_none(), "a message of a connection that names its sender");
        let memory = &self.network.node(node).memory;
        let there = match done.opcode {
            WcOpcode::Recv => Some(gather(memory, &receive.sges, len)),
            _ => None,
        };
        if let Some(bytes) = &there {
            ensure!(bytes.len() == len, "{len} bytes in a receive of {}", bytes.len());
        }
        self.find_heard(at, done, |message, memory| match (&there, message.target) {
            (Some(there), None) => *there == message.bytes,
            (None, Some(addr)) => memory.peek(addr, len) == message.bytes,
            _ => false,
        })?;
        let memory = &self.network.node(node).memory;
        for sge in &receive.sges {
            self.spaces[node as usize].adopt(memory, sge.addr, sge.len as usize);
        }
        Ok(())
    }

    fn check_datagram(
        &mut self,
        at: At,
        receive: &PostedReceive,
        done: &Completion,
    ) -> Checked<()> {
        let (node, shares) = (self.side(at)?.node, self.side(at)?.shares);
        let peer = self.side(at.peer())?;
        let (peer_node, peer_qpn) = (peer.node, peer.qpn);
        let there = gather(&self.network.node(node).memory, &receive.sges, done.byte_len as usize);
        ensure!(there.len() == done.byte_len as usize, "longer than its receive");
        let Some((grh, payload)) = there.split_at_checked(GRH_BYTES as usize) else {
            return Err(String::from("a datagram without its 40 bytes of route header"));
        };
        // After a restart the peer has a new number; earlier packets are still in flight.
        let is_from_peer = done.src_qp == Some(peer_qpn);
        ensure!(is_from_peer, "a datagram from somebody else");
        let ip = |node| self.network.path_to(node).remote.ip();
        let names = if self.network.is_roce_v1() { gids_name } else { grh_names };
        ensure!(names(grh, ip(peer_node), ip(node)), "the route header names others");
        self.find_heard(at, done, |message, _| message.bytes == payload)?;
        let memory = &self.network.node(node).memory;
        let space = &mut self.spaces[node as usize];
        space.put_list(&receive.sges, &there);
        for sge in receive.sges.iter().filter(|_| shares) {
            space.adopt(memory, sge.addr, sge.len as usize);
        }
        Ok(())
    }

    /// Finds this message among those sent.
    fn find_heard(
        &mut self,
        at: At,
        done: &Completion,
        matches: impl Fn(&Announced, &crate::memory::Arena) -> bool,
    ) -> Checked<()> {
        let most = if self.scenario.mix.has(Fault::Duplicate) { 2 } else { 1 };
        let is_orderly = self.scenario.mix.has_none(&DISORDER) && !self.reorders();
        let Side { node, heard_until, .. } = *self.side(at)?;
        let first = if is_orderly { heard_until } else { 0 };
        let sides = self.pairs[at.pair].sides.as_mut();
        let memory = &self.network.node(node).memory;
        let told = |message: &Announced| {
            message.number >= first
                && message.opcode == done.opcode
                && message.imm == done.imm
                && message.solicited == done.solicited
        };
        let mut announced = sides.into_iter().flat_map(|sides| &mut sides[at.side].announced);
        let found = announced.find(|message| {
            !message.is_secret && message.heard < most && told(message) && matches(message, memory)
        });
        let Some(message) = found else {
            return Err(String::from(
                "nothing like it was sent, or it or a later one was heard before",
            ));
        };
        message.heard += 1;
        let number = message.number;
        self.summary.bytes_checked += message.bytes.len() as u64;
        let side = self.side_mut(at)?;
        side.received += 1;
        side.heard_until = number + 1;
        Ok(())
    }

    // ---- the end -------------------------------------------------------------------------------

    /// In an empty network without faults, one more message of each side arrives.
    pub(super) fn say_farewell(&mut self) -> Checked<()> {
        let up = (0..self.pairs.len()).filter(|&pair| self.pairs[pair].state == PairState::Up);
        let sides: Vec<At> = up.flat_map(|pair| [0, 1].map(|side| At { pair, side })).collect();
        if self.options.sabotage == Sabotage::Silence {
            (0..self.network.len()).for_each(|node| self.network.set_cable(node, false));
        }
        self.scenario.trespass = 0;
        for &at in &sides {
            self.collect_side(at)?;
            self.check_losses(at)?;
        }
        for &at in &sides {
            self.post_farewell(at)?;
        }
        self.run_dry()?;
        for &at in &sides {
            self.collect_side(at)?;
            let Side { node, qpn, .. } = *self.side(at)?;
            let state = self.network.node(node).endpoint.qp_state(qpn);
            ensure!(state == Some(QpState::Rts), "{qpn:?} is in {state:?} though nothing failed");
            let heard = self.side(at)?.announced.back().map(|message| message.heard);
            ensure!(heard == Some(1), "the farewell was heard {heard:?} times");
        }
        Ok(())
    }

    /// A message to the peer, and room for it.
    fn post_farewell(&mut self, at: At) -> Checked<()> {
        let Side { node, shares, .. } = *self.side(at.peer())?;
        if shares {
            self.refill(node, 1_000)?;
        } else if self.side(at.peer())?.receives.is_empty() {
            self.post_receive(at.peer(), Some(GRH_BYTES))?;
        }
        let imm = self.chance.word() as u32;
        let draft = Draft::new(SendOp::SendImm(imm), WcOpcode::Send, SgList::new());
        let tells = Some((Some(imm), Vec::new(), None));
        self.submit(at, Draft { signaled: true, tells, ..draft })
    }

    /// Whether packets take several ways.
    fn reorders(&self) -> bool {
        self.scenario.conditions.as_ref().is_some_and(|conditions| conditions.reorders)
    }

    /// Where the network loses nothing, a message that was sent is received, or its receive was
    /// missing, too small, or under another key.
    fn check_losses(&mut self, at: At) -> Checked<()> {
        let is_uc = self.pairs[at.pair].params.transport == Transport::Uc;
        let mix = self.scenario.mix;
        let is_disordered = !mix.has_none(&DISORDER) || self.reorders();
        let loses = !mix.has_none(&LOSSES) || is_uc && is_disordered;
        let has_bit_errors = self
            .scenario
            .conditions
            .as_ref()
            .is_some_and(|conditions| conditions.faults.bit_errors > 0);
        let loses = loses || has_bit_errors || self.network.conduct().watchdog_drops > 0;
        let is_struck = !self.scenario.strikes.is_empty();
        if loses || is_struck || self.network.queue_drops() > 0 {
            return Ok(());
        }
        let Side { node, qpn, received, .. } = *self.side(at)?;
        let said = self.side(at.peer())?.delivered;
        let counters = self.network.node(node).endpoint.qp_counters(qpn);
        let dropped = counters.map_or(0, |c| c.no_receive + c.receive_too_small + c.bad_qkey);
        ensure!(
            said <= received + dropped,
            "{said} messages sent, {received} received, {dropped} dropped"
        );
        Ok(())
    }
}

/// Faults that change the order of packets; UC loses messages to them.
const DISORDER: [Fault; 3] = [Fault::Duplicate, Fault::Reorder, Fault::Delay];

/// Faults that lose packets, or make a message that is received look like another one received
/// twice.
const LOSSES: [Fault; 4] = [Fault::Loss, Fault::Flip, Fault::Truncate, Fault::Duplicate];

/// The same for a GRH: the next header that only it has, and GIDs.
fn gids_name(grh: &[u8], from: IpAddr, to: IpAddr) -> bool {
    let [from, to] = [from, to].map(|ip| gid_of(ip).octets());
    grh[6] == 0x1b && grh[8..24] == from && grh[24..40] == to
}

/// Whether the route header has the right source and destination: an IPv6 header, or 20 bytes and
/// an IPv4 header (IBA annex A17).
fn grh_names(grh: &[u8], from: IpAddr, to: IpAddr) -> bool {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            grh[32..36] == from.octets() && grh[36..40] == to.octets()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            grh[8..24] == from.octets() && grh[24..40] == to.octets()
        }
        _ => false,
    }
}
