//! READ responses gathered before the requests behind them are executed.
//!
//! A READ is executed when its response packets are polled, which is when its bytes are read. A
//! later request of the same queue pair may arrive in between, and must not change what the READ
//! returns. So the responses are polled first and their bytes copied here; they are sent before
//! anything polled later.
//!
//! Each queue pair has a small share, so that one cannot starve the others, and little bypasses its
//! congestion control. If a queue pair's outstanding responses exceed its share, the later request
//! is held back.
//!
//! This is state of [`turn`](crate::world::turn), kept in the endpoint because it outlives a call.

use alloc::vec::Vec;

use arrayvec::ArrayVec;

use crate::io::{BURST_PACKETS, Memory, Payload, Telemetry, TxFrame};
use crate::qp::HELD_RESPONSES;
use crate::qp::context::Transmit;
use crate::verbs::{Path, Qpn};
use crate::wire::Headers;

/// Most packets of one queue pair: the number of responses behind which our requester still sends
/// requests.
const SHARE_PACKETS: usize = HELD_RESPONSES as usize;

/// Most packets in all, 8 MiB of payload.
const MAX_PACKETS: usize = 2048;

/// Payload buffers kept for later packets.
const KEPT_BUFFERS: usize = BURST_PACKETS;

#[derive(Debug)]
struct Gathered {
    qpn: Qpn,
    path: Path,
    headers: Headers,
    pad: u8,
    payload: Vec<u8>,
    /// The wire admits it.
    leaves: bool,
}

impl Gathered {
    fn frame(&self) -> TxFrame<'_> {
        let (header, payload) = (self.headers.emit(), Payload::Bytes(&self.payload));
        let (path, pad) = (self.path, self.pad);
        TxFrame { path, header, payload, pad, telemetry: Telemetry::None }
    }
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Oldest first.
    packets: Vec<Gathered>,
    buffers: Vec<Vec<u8>>,
}

impl Outbox {
    /// Whether this many more packets of this queue pair are within its share.
    pub(crate) fn has_room(&self, qpn: Qpn, packets: usize) -> bool {
        let waiting = self.packets.iter().filter(|packet| packet.qpn == qpn);
        waiting.count() + packets <= SHARE_PACKETS && self.packets.len() + packets <= MAX_PACKETS
    }

    /// Whether packets of this queue pair are queued: what it sends later must follow them.
    pub(crate) fn holds(&self, qpn: Qpn) -> bool {
        self.packets.iter().any(|packet| packet.qpn == qpn)
    }

    /// Packets queued.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Copies the payload of a packet and queues it.
    pub(crate) fn push<M: Memory>(&mut self, qpn: Qpn, transmit: Transmit, memory: &M) {
        let mut bytes = self.buffers.pop().unwrap_or_default();
        let Transmit { path, headers, pad, payload } = transmit;
        Payload::Gather(payload).append_to(&mut bytes, memory);
        self.packets.push(Gathered { qpn, path, headers, pad, payload: bytes, leaves: false });
    }

    /// Chooses the packets to send now, at most a burst, and returns how many. `admits` is called
    /// for each path and destination queue pair, oldest packet first. Behind a packet that was
    /// refused, no other of its queue pair leaves, though its destination may have made room
    /// meanwhile.
    pub(crate) fn choose(&mut self, admits: &mut dyn FnMut(&Path, Qpn) -> bool) -> usize {
        let (mut chosen, mut refused) = (0, Vec::new());
        for packet in &mut self.packets {
            let Gathered { qpn, path, headers, .. } = packet;
            let is_held = chosen == BURST_PACKETS || refused.contains(qpn);
            packet.leaves = !is_held && admits(path, headers.bth().dest_qp);
            chosen += usize::from(packet.leaves);
            refused.extend((!is_held && !packet.leaves).then_some(packet.qpn));
        }
        chosen
    }

    /// The chosen packets.
    pub(crate) fn frames(&self) -> ArrayVec<TxFrame<'_>, BURST_PACKETS> {
        let chosen = self.packets.iter().filter(|packet| packet.leaves);
        chosen.map(Gathered::frame).take(BURST_PACKETS).collect()
    }

    /// Removes the chosen packets after they were sent.
    pub(crate) fn remove_chosen(&mut self) {
        for packet in self.packets.extract_if(.., |packet| packet.leaves) {
            if self.buffers.len() < KEPT_BUFFERS {
                let mut buffer = packet.payload;
                buffer.clear();
                self.buffers.push(buffer);
            }
        }
    }
}
