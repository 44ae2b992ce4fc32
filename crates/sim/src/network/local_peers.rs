//! Nodes that reach each other's memory without packets, as processes of one machine do
//! (`roce::direct`).
//!
//! Each node has a segment with the regions that it has registered. Queue pairs are looked up at
//! the peer's endpoint: a real segment follows it (`nic::local_peers`). A request is carried out at
//! one instant of virtual time; between its parts, in the order of [`landing_order`], a program of
//! the peer looks at its memory.
//!
//! A message that is handed over lies in the peer's mailbox until the peer runs next, some time
//! later, and its acknowledgement takes as long to come back. The messages of a node that ends are
//! lost.
//!
//! [`Flaw`] is what an implementation may get wrong here and what no endpoint can: it is seeded to
//! test the checks of [`chaos`](crate::chaos).

use alloc::vec;
use alloc::vec::Vec;
use core::net::IpAddr;

use roce::direct::{
    Direct, DirectKind, DirectRefusal, DirectRequest, Handed, Message, MessageAck, MessageHeader,
    RegionDescriptor, admit, landing_order,
};
use roce::endpoint::{Endpoint, Placement};
use roce::verbs::Qpn;
use roce::{Time, world};

use super::node::Node;
use super::segment::{Letter, Mailbox};
use super::{Event, Network};
use crate::events::EventQueue;
use crate::memory::NodeMemory;

/// How late the bytes are with [`Flaw::CompletedEarly`], in nanoseconds.
const LATE_NS: u64 = 5_000;

/// A bug of this path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flaw {
    /// None.
    #[default]
    None,
    /// A region reaches one byte further than it was registered.
    Bounds,
    /// Keys stay on the segment when their regions are deregistered.
    StaleKeys,
    /// A WRITE completes before its bytes have arrived.
    CompletedEarly,
    /// The end of a WRITE arrives before its beginning.
    TailFirst,
    /// An atomic reads the word, and stores the new value later.
    AtomicTorn,
    /// Refused messages are reported as taken.
    RefusalLost,
}

/// Messages to one node that it has not decided on: more are refused for lack of room.
const MAX_MESSAGES: usize = 24;

/// Bytes of a WRITE that has completed without them.
#[derive(Debug)]
pub(super) struct Late {
    at: Time,
    ip: IpAddr,
    addr: u64,
    bytes: Vec<u8>,
}

/// The local peers of all nodes.
#[derive(Debug, Default)]
pub(super) struct Neighbourhood {
    pub(super) flaw: Flaw,
    late: Vec<Late>,
    torn: u64,
}

impl<M: NodeMemory> Network<M> {
    /// Plants a bug, before any region is registered.
    pub fn plant_flaw(&mut self, flaw: Flaw) {
        self.neighbourhood.flaw = flaw;
        for node in &mut self.nodes {
            node.segment.keeps_stale = flaw == Flaw::StaleKeys;
        }
    }

    /// A node's endpoint with the memory of all others: every peer is a local peer. The node runs
    /// before time moves on.
    pub fn with_neighbours<T>(
        &mut self,
        node: u32,
        act: impl FnOnce(&mut Endpoint, &mut dyn Direct) -> T,
    ) -> Option<T> {
        self.mark_dirty(node);
        let now = self.now;
        let (before, rest) = self.nodes.split_at_mut(node as usize);
        let (own, after) = rest.split_first_mut()?;
        let ip = own.ip();
        let Node { endpoint, memory, .. } = own;
        let (neighbourhood, events) = (&mut self.neighbourhood, &mut self.events);
        let others = [before, after];
        let from = node;
        let mut direct = LocalPeers { ip, from, memory, others, neighbourhood, events, now };
        Some(act(endpoint, &mut direct))
    }

    /// A node takes the messages and acknowledgements that have arrived.
    pub(super) fn take_mail(&mut self, node: u32) -> bool {
        let (now, flaw) = (self.now, self.neighbourhood.flaw);
        let entry = &mut self.nodes[node as usize];
        let mut is_busy = false;
        while let Some((_, handed, ack)) = entry.mail.acks.pop_front_if(|(at, ..)| *at <= now) {
            entry.endpoint.handle_message_ack(now, handed, ack);
            is_busy = true;
        }
        entry.endpoint.note_acks_looked_for(now);
        while let Some(letter) =
            self.nodes[node as usize].mail.letters.pop_front_if(|letter| letter.at <= now)
        {
            let Node { endpoint, memory, .. } = &mut self.nodes[node as usize];
            let Letter { from: (from, ip), header, bytes, .. } = letter;
            let taken = world::take_message(endpoint, memory, now, ip, (&header, &bytes));
            let is_said_to_be = taken || flaw == Flaw::RefusalLost;
            let ack = if is_said_to_be { MessageAck::Taken } else { MessageAck::Refused };
            self.tell(from, header, ack);
            is_busy = true;
        }
        is_busy
    }

    fn tell(&mut self, to: u32, header: MessageHeader, ack: MessageAck) {
        let handed = Handed { source: header.source, round: header.round };
        if let Some(sender) = self.nodes.get_mut(to as usize) {
            let at = sender.mail.tell(self.now, handed, ack);
            self.events.add(at, Event::Mail(to));
        }
    }

    /// Messages for a node that ends are lost.
    pub(super) fn lose_mail(&mut self, mail: Mailbox) {
        for Letter { from: (from, _), header, .. } in mail.letters {
            self.tell(from, header, MessageAck::Lost);
        }
    }

    /// WRITEs of which a program saw the last byte before another one: always a bug.
    pub fn torn_writes(&self) -> u64 {
        self.neighbourhood.torn
    }

    /// Places bytes that come late.
    pub(super) fn land_late_bytes(&mut self) {
        let now = self.now;
        let is_due = |late: &mut Late| late.at <= now;
        for late in self.neighbourhood.late.extract_if(.., is_due) {
            if let Some(node) = self.nodes.iter_mut().find(|node| node.ip() == late.ip) {
                node.memory.scatter(late.addr, &late.bytes);
            }
        }
    }
}

/// The nodes beside one.
struct LocalPeers<'a, M> {
    ip: IpAddr,
    from: u32,
    memory: &'a mut M,
    others: [&'a mut [Node<M>]; 2],
    neighbourhood: &'a mut Neighbourhood,
    events: &'a mut EventQueue<Event>,
    now: Time,
}

impl<M: NodeMemory> Direct for LocalPeers<'_, M> {
    fn reaches(&self, _qpn: Qpn, _kind: DirectKind) -> bool {
        true
    }

    fn carry_out(&mut self, request: &DirectRequest<'_>) -> Result<(), DirectRefusal> {
        let LocalPeers { ip, memory, others, neighbourhood, now, .. } = self;
        let remote = request.path.remote.ip();
        let mut nodes = others.iter_mut().flat_map(|nodes| nodes.iter_mut());
        let peer = nodes.find(|node| node.ip() == remote).ok_or(DirectRefusal::Peer)?;
        let first = permitted(request, *ip, peer, neighbourhood.flaw)?;
        let mut bytes = vec![0; request.part.len as usize];
        match request.kind {
            DirectKind::Write => {}
            DirectKind::Read => {
                peer.memory.gather(first, &mut bytes);
                spread(*memory, request.local, &bytes);
                return Ok(());
            }
            DirectKind::Atomic(op) if neighbourhood.flaw == Flaw::AtomicTorn => {
                peer.memory.gather(first, &mut bytes);
                spread(*memory, request.local, &bytes);
                op.apply_to(&mut bytes);
                let at = Time::from_nanos(now.as_nanos() + LATE_NS);
                neighbourhood.late.push(Late { at, ip: remote, addr: first, bytes });
                return Ok(());
            }
            DirectKind::Atomic(op) => {
                let original = peer.memory.atomic(first, op);
                spread(*memory, request.local, &original.to_ne_bytes());
                return Ok(());
            }
        }
        let mut at = 0;
        for piece in request.local {
            memory.gather(piece.addr, &mut bytes[at..at + piece.len as usize]);
            at += piece.len as usize;
        }
        if neighbourhood.flaw == Flaw::CompletedEarly {
            let at = Time::from_nanos(now.as_nanos() + LATE_NS);
            neighbourhood.late.push(Late { at, ip: remote, addr: first, bytes });
            return Ok(());
        }
        let is_reversed = neighbourhood.flaw == Flaw::TailFirst;
        neighbourhood.torn += u64::from(write(&mut peer.memory, first, &bytes, is_reversed));
        Ok(())
    }

    fn takes_messages(&self, _qpn: Qpn) -> bool {
        true
    }

    fn hand_over(&mut self, message: &Message<'_>) -> Result<(), DirectRefusal> {
        let Message { header, path, local } = *message;
        let mut nodes = self.others.iter_mut().flat_map(|nodes| nodes.iter_mut());
        let peer = nodes.find(|node| node.ip() == path.remote.ip()).ok_or(DirectRefusal::Peer)?;
        let letters = &mut peer.mail.letters;
        if letters.len() >= MAX_MESSAGES {
            return Err(DirectRefusal::Full);
        }
        let mut bytes = vec![0; header.len as usize];
        let mut at = 0;
        for piece in local {
            self.memory.gather(piece.addr, &mut bytes[at..at + piece.len as usize]);
            at += piece.len as usize;
        }
        let before = letters.back().map(|letter| letter.at);
        let at = Mailbox::arrival(self.now, before, header.dest.get().into());
        letters.push_back(Letter { at, from: (self.from, self.ip), header, bytes });
        self.events.add(at, Event::Mail(peer.port.node));
        Ok(())
    }
}

/// Places bytes in the pieces, one after the other.
fn spread(memory: &mut impl NodeMemory, pieces: &[Placement], bytes: &[u8]) {
    let mut rest = bytes;
    for piece in pieces {
        let (part, later) = rest.split_at(piece.len as usize);
        memory.scatter(piece.addr, part);
        rest = later;
    }
}

/// The first byte of the part in the peer's memory, if its descriptors permit the request.
fn permitted<M: NodeMemory>(
    request: &DirectRequest<'_>,
    own: IpAddr,
    peer: &Node<M>,
    flaw: Flaw,
) -> Result<u64, DirectRefusal> {
    let address = |_| Some(peer.ip());
    let qp = peer.endpoint.qp_descriptor(request.dest_qp, address).ok_or(DirectRefusal::Peer)?;
    let mut regions = peer.segment.regions.iter().map(|(_, descriptor)| descriptor);
    let region =
        regions.find(|descriptor| descriptor.rkey == request.rkey).ok_or(DirectRefusal::Region)?;
    let further = u64::from(flaw == Flaw::Bounds);
    admit(request, own, &qp, &RegionDescriptor { len: region.len + further, ..*region })
}

/// Writes part after part; returns whether a program that polls the last byte saw it before another
/// one.
fn write(memory: &mut impl NodeMemory, first: u64, bytes: &[u8], is_reversed: bool) -> bool {
    let mut parts = landing_order(first, bytes.len() as u64);
    if is_reversed {
        parts.reverse();
    }
    let mut seen = vec![0; bytes.len()];
    memory.gather(first, &mut seen);
    let is_new = seen.last() != bytes.last();
    let mut is_torn = false;
    for (addr, len) in parts {
        let offset = (addr - first) as usize;
        memory.scatter(addr, &bytes[offset..offset + len as usize]);
        memory.gather(first, &mut seen);
        is_torn |= is_new && seen.last() == bytes.last() && seen != bytes;
    }
    is_torn
}
