//! A packet on its way out, built in place.

use core::mem;

use crate::io::{Payload, Telemetry, TxFrame};
use crate::qp::context::Transmit;
use crate::qp::delivery::Delivery;
use crate::verbs::Path;
use crate::wire::Headers;

/// A packet that a queue pair puts out.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Where its payload is.
    pub(super) delivery: Delivery,
    pub(super) packet: Option<(Path, Headers)>,
    pub(super) telemetry: Telemetry,
}

impl Output {
    pub(super) fn clear(&mut self) {
        self.delivery.pieces.clear();
        self.packet = None;
    }

    pub(super) fn parts(&mut self) -> (&mut Delivery, &mut Option<(Path, Headers)>) {
        (&mut self.delivery, &mut self.packet)
    }

    pub(super) fn into_transmit(self) -> Option<Transmit> {
        let (path, headers) = self.packet?;
        Some(Transmit { path, headers, payload: self.delivery.pieces, pad: headers.bth().pad })
    }

    /// The packet as a frame, with its headers encoded.
    pub(crate) fn frame(&mut self) -> Option<TxFrame<'static>> {
        let (path, headers) = self.packet.as_ref()?;
        let pieces = mem::take(&mut self.delivery.pieces);
        Some(TxFrame {
            path: *path,
            header: headers.emit(),
            payload: Payload::Gather(pieces),
            pad: headers.bth().pad,
            telemetry: mem::take(&mut self.telemetry),
        })
    }
}
