//! READ answers that were gathered before the requests behind them were executed.
//!
//! A READ is answered when its packets are polled, and its bytes are read then. A later request of the
//! same queue pair may arrive in between, and must not change what the READ returns. So the answers
//! are polled first and their bytes copied here; they leave before everything that is polled later.
//!
//! Each queue pair has a small share, so that one cannot take what others need, and little passes its
//! congestion control. A queue pair that owes more than its share holds the later request back.
//!
//! This is memory of [`drain`](crate::world::drain), kept in the endpoint because it outlives a call.

use alloc::vec::Vec;
use core::ops::Range;

use arrayvec::ArrayVec;

use crate::endpoint::{Mtu, Transmit};
use crate::qp::HELD_RESPONSES;
use crate::verbs::{MAX_SGE, Qpn};
use crate::world::{BURST_PACKETS, MAX_HEADER_BYTES, Memory, Path, TxFrame};

/// Most packets of one queue pair: as many as a requester of ours lets requests wait behind.
const SHARE_PACKETS: usize = HELD_RESPONSES as usize;

/// Most packets in all, 8 MiB of payload. They leave with the next burst that the wire takes.
const MAX_PACKETS: usize = 2048;

/// Packets whose memory is kept when nothing waits.
const KEPT_PACKETS: usize = BURST_PACKETS;

#[derive(Debug)]
struct Gathered {
    qpn: Qpn,
    path: Path,
    header: ArrayVec<u8, MAX_HEADER_BYTES>,
    pad: u8,
    payload: Range<usize>,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    packets: Vec<Gathered>,
    bytes: Vec<u8>,
    /// Packets at the front that have been sent.
    sent: usize,
}

impl Outbox {
    /// Whether so many packets more of this queue pair are within its share.
    pub(crate) fn has_room(&self, qpn: Qpn, packets: usize) -> bool {
        let waiting = self.packets[self.sent..].iter().filter(|packet| packet.qpn == qpn);
        waiting.count() + packets <= SHARE_PACKETS && self.packets.len() + packets <= MAX_PACKETS
    }

    /// Packets that wait to be sent.
    pub(crate) fn len(&self) -> usize {
        self.packets.len() - self.sent
    }

    /// Copies the payload of a packet and keeps it.
    pub(crate) fn push<M: Memory>(&mut self, qpn: Qpn, transmit: &Transmit, memory: &M) {
        let start = self.bytes.len();
        for piece in &transmit.payload {
            self.bytes.extend_from_slice(memory.bytes(piece.addr, piece.len as usize));
        }
        let header = transmit.headers.emit();
        let payload = start..self.bytes.len();
        let Transmit { path, pad, .. } = *transmit;
        self.packets.push(Gathered { qpn, path, header, pad, payload });
    }

    /// Hands up to `room` packets, a burst at most, to `send`, oldest first, and returns how many.
    pub(crate) fn send(&mut self, room: usize, send: impl FnOnce(&[TxFrame<'_>])) -> usize {
        let count = room.min(self.len()).min(BURST_PACKETS);
        let end = self.sent + count;
        let frames: ArrayVec<TxFrame<'_>, BURST_PACKETS> =
            self.packets[self.sent..end].iter().map(|packet| self.frame(packet)).collect();
        if !frames.is_empty() {
            send(&frames);
        }
        drop(frames);
        self.sent = end;
        if self.len() == 0 {
            self.packets.clear();
            self.bytes.clear();
            self.packets.shrink_to(KEPT_PACKETS);
            self.bytes.shrink_to(KEPT_PACKETS * Mtu::M4096.bytes() as usize);
            self.sent = 0;
        }
        count
    }

    fn frame(&self, packet: &Gathered) -> TxFrame<'_> {
        let bytes = &self.bytes[packet.payload.clone()];
        let payload: ArrayVec<&[u8], MAX_SGE> =
            (!bytes.is_empty()).then_some(bytes).into_iter().collect();
        TxFrame { path: packet.path, header: packet.header.clone(), payload, pad: packet.pad }
    }
}
