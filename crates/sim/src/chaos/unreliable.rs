//! The promises of the unreliable transports: a message is received whole or not at all, with its own
//! bytes, immediate and sender; and not more often than it was sent.
//!
//! Messages may be lost and, when the network delays packets, reordered. They are identified by their
//! bytes. When the network duplicates packets, a message may be received twice: sequence numbers of
//! these transports only detect losses, and those of datagrams have no meaning.

use alloc::string::String;
use core::net::IpAddr;

use roce::verbs::{Completion, GRH_BYTES, Sge, Transport, WcOpcode, WcStatus};

use super::side::{Announced, At, Open, PostedReceive};
use super::space::gather;
use super::{Checked, Run, ensure};
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
        let memory = &self.fabric.node(node).memory;
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
        let memory = &self.fabric.node(node).memory;
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
        let there = gather(&self.fabric.node(node).memory, &receive.sges, done.byte_len as usize);
        ensure!(there.len() == done.byte_len as usize, "longer than its receive");
        let Some((grh, payload)) = there.split_at_checked(GRH_BYTES as usize) else {
            return Err(String::from("a datagram without its 40 bytes of route header"));
        };
        // After a restart the peer has a new number; earlier packets are still in flight.
        let is_from_peer = done.src_qp == Some(peer_qpn);
        ensure!(is_from_peer, "a datagram from somebody else");
        let ip = |node| self.fabric.path_to(node).remote.ip();
        ensure!(grh_names(grh, ip(peer_node), ip(node)), "the route header names others");
        self.find_heard(at, done, |message, _| message.bytes == payload)?;
        let memory = &self.fabric.node(node).memory;
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
        let node = self.side(at)?.node;
        let sides = self.pairs[at.pair].sides.as_mut();
        let memory = &self.fabric.node(node).memory;
        let told = |message: &Announced| {
            message.opcode == done.opcode
                && message.imm == done.imm
                && message.solicited == done.solicited
        };
        let mut announced = sides.into_iter().flat_map(|sides| &mut sides[at.side].announced);
        let found = announced.find(|message| {
            !message.is_secret && message.heard < most && told(message) && matches(message, memory)
        });
        let Some(message) = found else {
            return Err(String::from("nothing like it was sent, or it was heard before"));
        };
        message.heard += 1;
        self.summary.bytes_checked += message.bytes.len() as u64;
        Ok(())
    }
}

/// Whether the route header has the right source and destination: an IPv6 header, or 20 bytes and an
/// IPv4 header (IBA annex A17).
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
