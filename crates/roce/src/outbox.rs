//! READ responses that were gathered before the requests behind them were executed.
//!
//! A READ is answered when its packets are polled, and its bytes are read then. A later request of the
//! same queue pair may arrive in between, and must not change what the READ returns. So the responses
//! are polled first and their bytes copied here; they leave before everything that is polled later.
//!
//! Each queue pair has a small share, so that one cannot take what others need, and little passes its
//! congestion control. A queue pair that owes more than its share holds the later request back.
//!
//! This is memory of [`drain`](crate::world::drain), kept in the endpoint because it outlives a call.

use alloc::vec::Vec;

use arrayvec::ArrayVec;

use crate::endpoint::Transmit;
use crate::qp::HELD_RESPONSES;
use crate::verbs::Qpn;
use crate::wire::Headers;
use crate::world::{BURST_PACKETS, Memory, Path, Payload, TxFrame, gather};

/// Most packets of one queue pair: as many as a requester of ours lets requests wait behind.
const SHARE_PACKETS: usize = HELD_RESPONSES as usize;

/// Most packets in all, 8 MiB of payload.
const MAX_PACKETS: usize = 2048;

/// Payload buffers that are kept for later packets.
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
        TxFrame { path: self.path, header, payload, pad: self.pad }
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
    /// Whether so many packets more of this queue pair are within its share.
    pub(crate) fn has_room(&self, qpn: Qpn, packets: usize) -> bool {
        let waiting = self.packets.iter().filter(|packet| packet.qpn == qpn);
        waiting.count() + packets <= SHARE_PACKETS && self.packets.len() + packets <= MAX_PACKETS
    }

    /// Whether packets of this queue pair wait: what it sends later has to wait behind them.
    pub(crate) fn holds(&self, qpn: Qpn) -> bool {
        self.packets.iter().any(|packet| packet.qpn == qpn)
    }

    /// Packets that wait to be sent.
    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    /// Copies the payload of a packet and keeps it.
    pub(crate) fn push<M: Memory>(&mut self, qpn: Qpn, transmit: Transmit, memory: &M) {
        let mut bytes = self.buffers.pop().unwrap_or_default();
        gather(&transmit.payload, memory, &mut bytes);
        let Transmit { path, headers, pad, .. } = transmit;
        self.packets.push(Gathered { qpn, path, headers, pad, payload: bytes, leaves: false });
    }

    /// Chooses the packets that may leave now, a burst at most, and returns how many. `admits` is asked
    /// for each path and destination queue pair, oldest packet first.
    pub(crate) fn choose(&mut self, admits: &mut dyn FnMut(&Path, Qpn) -> bool) -> usize {
        let mut chosen = 0;
        for packet in &mut self.packets {
            let Gathered { path, headers, .. } = packet;
            packet.leaves = chosen < BURST_PACKETS && admits(path, headers.bth().dest_qp);
            chosen += usize::from(packet.leaves);
        }
        chosen
    }

    /// The chosen packets.
    pub(crate) fn frames(&self) -> ArrayVec<TxFrame<'_>, BURST_PACKETS> {
        let chosen = self.packets.iter().filter(|packet| packet.leaves);
        chosen.map(Gathered::frame).take(BURST_PACKETS).collect()
    }

    /// Forgets the chosen packets: they were sent.
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
