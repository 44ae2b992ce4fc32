//! The context of a queue pair: its connection parameters and queues. They stay fixed while it runs, but
//! for those that SQD changes.

use arrayvec::ArrayVec;

use crate::attributes::Reliability;
use crate::dcqcn::CongestionControl;
use crate::sg::Placement;
use crate::verbs::{Access, CqId, MAX_SGE, PdId, Qpn, Transport};
use crate::wire::{Bth, DEFAULT_PKEY, Ext, Headers, Opcode, Psn, Service};
use crate::world::Path;

/// Path MTU: payload bytes of a full packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    M256,
    /// 512 bytes.
    M512,
    /// 1024 bytes: the most that fits Ethernet frames of 1500 bytes.
    M1024,
    /// 2048 bytes.
    M2048,
    /// 4096 bytes.
    M4096,
}

impl Mtu {
    /// Every MTU, smallest first.
    pub const ALL: [Mtu; 5] = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096];

    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        256 << self as u32
    }

    /// The MTU of exactly this many bytes.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes)
    }
}

/// Everything a queue pair has to know about its peer and how to treat it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Where packets go. Packets from any other IP address are dropped.
    pub path: Path,
    /// The peer's queue pair.
    pub dest_qp: Qpn,
    /// Path MTU, the same on both sides.
    pub mtu: Mtu,
    /// PSN of the first request that the peer will send.
    pub remote_psn: Psn,
    /// PSN of the first request that we send.
    pub local_psn: Psn,
    /// Local ACK timeout: 4.096 us * 2^n, n up to 31; 0 waits for ever.
    pub timeout: u8,
    /// Retries after timeouts and sequence errors before giving up, 0–7.
    pub retry_count: u8,
    /// Retries after "receiver not ready" before giving up, 0–6; 7 retries for ever.
    pub rnr_retry: u8,
    /// Timer code that our RNR NAKs carry, 0–31 (IBA table 45; 12 is 0.64 ms).
    pub min_rnr_timer: u8,
    /// Most READs of ours in flight; at most the peer's `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
    /// Most READs of the peer that we serve at once; more are refused.
    pub max_dest_rd_atomic: u8,
    /// Most unacknowledged request packets, at least 1.
    pub window_packets: u32,
    /// How losses are repaired, the same on both sides.
    pub reliability: Reliability,
    /// What is done about congestion. The peer is told of marked packets in any case.
    pub congestion: CongestionControl,
}

impl Connect {
    /// Usual attributes for a peer: MTU 1024, 67 ms timeout, 7 retries, RNR for ever, 16 READs each
    /// way, a window of 128 packets.
    pub const fn new(path: Path, dest_qp: Qpn, remote_psn: Psn) -> Connect {
        Connect {
            path,
            dest_qp,
            mtu: Mtu::M1024,
            remote_psn,
            local_psn: Psn::new(0),
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            window_packets: 128,
            reliability: Reliability::GoBackN,
            congestion: CongestionControl::Off,
        }
    }

    /// The same for a peer that is this implementation and has agreed: losses are repaired by
    /// selective repeat, with a window of 512 packets.
    pub const fn selective(self) -> Connect {
        Connect { reliability: Reliability::Selective, window_packets: 512, ..self }
    }
}

/// A packet to send: headers, and where its payload lies.
///
/// The addresses hold until the endpoint is next changed: turn it into bytes before that.
#[derive(Clone, Debug)]
pub struct Transmit {
    /// Where to.
    pub path: Path,
    /// Transport headers.
    pub headers: Headers,
    /// Payload, in order, in registered memory.
    pub payload: ArrayVec<Placement, MAX_SGE>,
    /// Zero bytes after the payload, 0–3, as the BTH says.
    pub pad: u8,
}

impl Transmit {
    /// Payload bytes, without pad.
    pub fn payload_len(&self) -> usize {
        self.payload.iter().map(|piece| piece.len as usize).sum()
    }
}

/// A packet's headers before the fields that are the same for all packets of a queue pair.
pub(super) struct PacketHeaders {
    pub(super) opcode: Opcode,
    pub(super) psn: Psn,
    pub(super) ext: Ext,
    pub(super) ack_req: bool,
    pub(super) solicited: bool,
    /// Selective repeat: not to be placed before its turn. The BTH says so by a migration bit of 0.
    pub(super) ordered: bool,
}

impl PacketHeaders {
    /// A packet without flags.
    pub(super) fn new(opcode: Opcode, psn: Psn, ext: Ext) -> PacketHeaders {
        PacketHeaders { opcode, psn, ext, ack_req: false, solicited: false, ordered: false }
    }
}

/// A queue pair's own context, as its halves see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpContext {
    pub(super) qpn: Qpn,
    pub(super) transport: Transport,
    pub(super) pd: PdId,
    pub(super) send_cq: CqId,
    pub(super) recv_cq: CqId,
    /// Payload bytes of a full packet: of the path, or for UD of the port.
    pub(super) mtu: u32,
    /// What the peer may do; only the remote flags count.
    pub(super) access: Access,
    /// Queue key, for UD.
    pub(super) qkey: u32,
    /// Bits per second that may be sent, 0 for any.
    pub(super) rate_limit_bps: u64,
    pub(super) peer: Connect,
}

impl QpContext {
    /// Whether losses are repaired by selective repeat.
    pub(super) fn is_selective(&self) -> bool {
        self.peer.reliability == Reliability::Selective
    }

    /// Whether packets of this service are heard.
    pub(super) fn offers(&self, service: Service) -> bool {
        match self.transport {
            Transport::Rc if service == Service::Selective => self.is_selective(),
            Transport::Rc => service == Service::Rc,
            Transport::Uc => service == Service::Uc,
            Transport::Ud => service == Service::Ud,
        }
    }

    /// PSNs that a request of `len` bytes takes. In go-back-N a READ takes one for each response; in
    /// selective repeat requests are counted without gaps, and responses by their offset.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_bytes_round_trip() {
        for mtu in Mtu::ALL {
            assert_eq!(Mtu::from_bytes(mtu.bytes()), Some(mtu));
        }
        assert_eq!(Mtu::from_bytes(1500), None);
    }
}
