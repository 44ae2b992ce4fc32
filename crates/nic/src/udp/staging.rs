//! Packets as they leave, side by side: where they get their payload and their ICRC.
//!
//! The bytes of the buffer are initialised once. A packet is written over older ones, and no byte
//! is cleared before.

use std::net::SocketAddr;

use roce::wire::icrc::{SEAL_BYTES, seal};
use roce::world::{Memory, TxFrame};

use super::pseudo;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Room for the ICRC of the first packet, then packets.
    buffer: Vec<u8>,
    /// Where the next packet begins.
    end: usize,
}

impl Staging {
    /// For packets of so many bytes in all. It grows for more.
    pub(crate) fn new(bytes: usize) -> Staging {
        Staging { buffer: vec![0; SEAL_BYTES + bytes], end: SEAL_BYTES }
    }

    pub(crate) fn clear(&mut self) {
        self.end = SEAL_BYTES;
    }

    /// The packets since the last `clear`.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[SEAL_BYTES..self.end]
    }

    /// Adds a frame as it is sent: headers, payload, pad, and the ICRC for its place in a segmented
    /// send.
    pub(crate) fn push(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        frame: &TxFrame<'_>,
        memory: &dyn Memory,
        place: u16,
    ) {
        let (start, end) = (self.end, self.end + frame.udp_payload_len());
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        let (header, rest) = self.buffer[start..end].split_at_mut(frame.header.len());
        header.copy_from_slice(&frame.header);
        let (payload, tail) = rest.split_at_mut(frame.payload.len());
        frame.payload.copy_to(payload, memory);
        tail.fill(0);
        // Frames of the other IP version were dropped before, so there is always a pseudo header.
        let is_sealed = pseudo(local, remote, place)
            .is_some_and(|pseudo| seal(&pseudo, &mut self.buffer[start - SEAL_BYTES..end]));
        debug_assert!(is_sealed, "a frame without BTH, or of another IP version");
        self.end = end;
    }
}
