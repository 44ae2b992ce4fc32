//! The context of a queue pair: its connection parameters and queues. They are fixed while it runs,
//! except those that SQD may change.

use crate::memory::sg::Placement;
use crate::verbs::{Access, Connect, CqId, Path, PdId, Qpn, Reliability, ShortList, Transport};
use crate::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, Service};

/// A packet to send: headers, and the location of its payload.
///
/// The addresses are valid until the endpoint is next changed: turn it into bytes before that.
#[derive(Clone, Debug)]
pub struct Transmit {
    /// The path to its destination.
    pub path: Path,
    /// Transport headers.
    pub headers: Headers,
    /// Payload, in order, in registered memory.
    pub payload: ShortList<Placement>,
    /// Zero bytes after the payload, 0–3, as the BTH says.
    pub pad: u8,
}

impl Transmit {
    /// Payload bytes, without pad.
    pub fn payload_len(&self) -> usize {
        self.payload.iter().map(|piece| piece.len as usize).sum()
    }
}

/// A packet's headers, without the fields common to all packets of a queue pair.
pub(super) struct PacketHeaders {
    pub(super) opcode: Opcode,
    pub(super) psn: Psn,
    pub(super) ext: Ext,
    pub(super) ack_req: bool,
    pub(super) solicited: bool,
    /// Selective repeat: not to be placed out of order. Signalled by a migration bit of 0 in the
    /// BTH.
    pub(super) ordered: bool,
}

impl PacketHeaders {
    /// A packet without flags.
    pub(super) fn new(opcode: Opcode, psn: Psn, ext: Ext) -> PacketHeaders {
        PacketHeaders { opcode, psn, ext, ack_req: false, solicited: false, ordered: false }
    }
}

/// A queue pair's own context, as seen by its requester and responder.
#[derive(Clone, Debug)]
pub(super) struct QpContext {
    pub(super) qpn: Qpn,
    pub(super) transport: Transport,
    pub(super) pd: PdId,
    pub(super) send_cq: CqId,
    pub(super) recv_cq: CqId,
    /// Payload bytes of a full packet: of the path, or for UD of the port.
    pub(super) mtu: u32,
    /// What the peer may do; only the remote flags apply.
    pub(super) access: Access,
    /// Queue key, for UD.
    pub(super) qkey: u32,
    /// Rate limit in bits per second, 0 for none.
    pub(super) rate_limit_bps: u64,
    pub(super) peer: Connect,
}

impl QpContext {
    /// Whether losses are recovered by selective repeat.
    pub(super) fn is_selective(&self) -> bool {
        self.peer.reliability == Reliability::Selective
    }

    /// Whether packets of this service are accepted.
    pub(super) fn offers(&self, service: Service) -> bool {
        match self.transport {
            Transport::Rc if service == Service::Selective => self.is_selective(),
            Transport::Rc => service == Service::Rc,
            Transport::Uc => service == Service::Uc,
            Transport::Ud => service == Service::Ud,
        }
    }

    /// PSNs that a request of `len` bytes takes. In go-back-N a READ takes one for each response;
    /// in selective repeat requests are counted without gaps, and responses by their offset.
    pub(super) fn psns(&self, len: u32, is_read: bool) -> u32 {
        if is_read && self.is_selective() { 1 } else { self.packets(len) }
    }

    /// Packets that a message of `len` bytes takes; an empty message takes one.
    pub(super) fn packets(&self, len: u32) -> u32 {
        len.div_ceil(self.mtu).max(1)
    }

    /// A congestion notification to the peer (IBA annex A17.9.3).
    pub(super) fn notification(&self) -> Headers {
        let plain = self.headers(PacketHeaders::new(Opcode::Cnp, Psn::default(), Ext::Cnp), 0);
        let bth = Bth { becn: true, ..*plain.bth() };
        Headers::new(bth, Ext::Cnp).unwrap_or(plain)
    }

    /// The headers of a packet with `payload_len` bytes of payload, to the peer.
    pub(super) fn headers(&self, header: PacketHeaders, payload_len: u32) -> Headers {
        self.headers_to(self.peer.dest_qp, header, payload_len)
    }

    /// The same, to another queue pair.
    pub(super) fn headers_to(
        &self,
        dest_qp: Qpn,
        header: PacketHeaders,
        payload_len: u32,
    ) -> Headers {
        let bth = Bth {
            opcode: header.opcode,
            solicited: header.solicited,
            mig_req: !header.ordered,
            pad: (payload_len.wrapping_neg() & 3) as u8,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            dest_qp,
            ack_req: header.ack_req,
            psn: header.psn,
        };
        // Callers pair each opcode with its extension in one match, `pad` is two bits, and credit,
        // timer and MSN fields come from types and masks of their width.
        Headers::new(bth, header.ext).expect("callers make legal combinations")
    }
}
