//! READ answers that were gathered before the requests behind them were executed.
//!
//! A READ is answered when its packets are polled, and its bytes are read then. A later request of the
//! same queue pair may arrive in between, and must not change what the READ returns. So the answers
//! are polled first and their bytes copied here; they leave before everything that is polled later.
//! What does not fit stays with the queue pair, which holds such requests back until it is answered.
//!
//! This is memory of [`drain`](crate::world::drain), kept in the endpoint because it outlives a call.

use alloc::vec::Vec;
use core::ops::Range;

use arrayvec::ArrayVec;

use crate::endpoint::{Mtu, Transmit};
use crate::verbs::MAX_SGE;
use crate::world::{BURST_PACKETS, MAX_HEADER_BYTES, Memory, Path, TxFrame};

/// Most packets kept. With [`HELD_RESPONSES`](crate::qp::HELD_RESPONSES) of each, eight queue pairs of
/// our own find room.
const MAX_PACKETS: usize = BURST_PACKETS;

#[derive(Debug)]
struct Gathered {
    path: Path,
    header: ArrayVec<u8, MAX_HEADER_BYTES>,
    pad: u8,
    payload: Range<usize>,
}

/// See the module's text. At most [`MAX_PACKETS`] packets, and so at most 512 KiB of payload.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    packets: Vec<Gathered>,
    bytes: Vec<u8>,
    /// Packets at the front that have been sent.
    sent: usize,
}

impl Outbox {
    pub(crate) fn has_room(&self) -> bool {
        self.packets.len() < MAX_PACKETS
    }

    /// Packets that wait to be sent.
    pub(crate) fn len(&self) -> usize {
        self.packets.len() - self.sent
    }

    /// Copies the payload of a packet and keeps it.
    pub(crate) fn push<M: Memory>(&mut self, transmit: &Transmit, memory: &M) {
        if self.packets.capacity() == 0 {
            self.packets.reserve_exact(MAX_PACKETS);
            self.bytes.reserve_exact(MAX_PACKETS * Mtu::M4096.bytes() as usize);
        }
        let start = self.bytes.len();
        for piece in &transmit.payload {
            self.bytes.extend_from_slice(memory.bytes(piece.addr, piece.len as usize));
        }
        let header = transmit.headers.emit();
        let payload = start..self.bytes.len();
        self.packets.push(Gathered { path: transmit.path, header, pad: transmit.pad, payload });
    }

    /// Hands up to `room` packets to `send`, oldest first, and returns how many.
    pub(crate) fn send(&mut self, room: usize, send: impl FnOnce(&[TxFrame<'_>])) -> usize {
        let count = room.min(self.len());
        let end = self.sent + count;
        let frames: ArrayVec<TxFrame<'_>, MAX_PACKETS> =
            self.packets[self.sent..end].iter().map(|packet| self.frame(packet)).collect();
        if !frames.is_empty() {
            send(&frames);
        }
        drop(frames);
        self.sent = end;
        if self.len() == 0 {
            self.packets.clear();
            self.bytes.clear();
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
