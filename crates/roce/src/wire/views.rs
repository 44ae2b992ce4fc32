//! Byte views of the transport headers: a checked constructor, then named fields.
//!
//! A view borrows the bytes of one header. Its constructor refuses slices that are too short and
//! ignores the rest; after that no accessor can fail or panic. Views return raw values; `decode`
//! turns them into the representations of [`wire`](super), where reserved codes are refused.

use super::Qpn;
use super::{Aeth, AtomicEth, Bth, Deth, Opcode, Psn, Reth, Syndrome, WireError};

/// The first `N` bytes, or the reason why there are none.
fn head<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], WireError> {
    bytes.first_chunk().ok_or(WireError::Truncated { have: bytes.len(), need: N })
}

fn be16(bytes: [u8; 2]) -> u16 {
    u16::from_be_bytes(bytes)
}

fn be32(bytes: [u8; 4]) -> u32 {
    u32::from_be_bytes(bytes)
}

fn be64(high: [u8; 4], low: [u8; 4]) -> u64 {
    u64::from(be32(high)) << 32 | u64::from(be32(low))
}

/// Base transport header (IBA 9.2).
#[derive(Clone, Copy, Debug)]
pub struct BthView<'a>(&'a [u8; 12]);

impl<'a> BthView<'a> {
    /// Views the first 12 bytes.
    pub fn new(bytes: &'a [u8]) -> Result<BthView<'a>, WireError> {
        head(bytes).map(BthView)
    }

    /// Opcode, defined or not.
    pub fn opcode(&self) -> u8 {
        self.0[0]
    }

    /// Solicited event.
    pub fn solicited(&self) -> bool {
        self.0[1] & 0x80 != 0
    }

    /// Migration state.
    pub fn mig_req(&self) -> bool {
        self.0[1] & 0x40 != 0
    }

    /// Pad count, 0–3.
    pub fn pad(&self) -> u8 {
        self.0[1] >> 4 & 3
    }

    /// Transport header version.
    pub fn version(&self) -> u8 {
        self.0[1] & 0x0f
    }

    /// Partition key.
    pub fn pkey(&self) -> u16 {
        be16([self.0[2], self.0[3]])
    }

    /// Forward explicit congestion notification.
    pub fn fecn(&self) -> bool {
        self.0[4] & 0x80 != 0
    }

    /// Backward explicit congestion notification.
    pub fn becn(&self) -> bool {
        self.0[4] & 0x40 != 0
    }

    /// The six reserved bits next to FECN and BECN.
    pub fn reserved_flags(&self) -> u8 {
        self.0[4] & 0x3f
    }

    /// Destination queue pair.
    pub fn dest_qp(&self) -> Qpn {
        Qpn::new(be32([0, self.0[5], self.0[6], self.0[7]]))
    }

    /// The sender requests an acknowledgement.
    pub fn ack_req(&self) -> bool {
        self.0[8] & 0x80 != 0
    }

    /// The seven reserved bits next to the acknowledge request.
    pub fn reserved_ack(&self) -> u8 {
        self.0[8] & 0x7f
    }

    /// Packet sequence number.
    pub fn psn(&self) -> Psn {
        Psn::new(be32([0, self.0[9], self.0[10], self.0[11]]))
    }

    /// The representation, if version and opcode are known.
    pub fn decode(&self) -> Result<Bth, WireError> {
        if self.version() != 0 {
            return Err(WireError::Version(self.version()));
        }
        Ok(Bth {
            opcode: Opcode::try_from(self.opcode())?,
            solicited: self.solicited(),
            mig_req: self.mig_req(),
            pad: self.pad(),
            pkey: self.pkey(),
            fecn: self.fecn(),
            becn: self.becn(),
            dest_qp: self.dest_qp(),
            ack_req: self.ack_req(),
            psn: self.psn(),
        })
    }
}

/// RDMA extended transport header (IBA 9.3.3).
#[derive(Clone, Copy, Debug)]
pub struct RethView<'a>(&'a [u8; 16]);

impl<'a> RethView<'a> {
    /// Views the first 16 bytes.
    pub fn new(bytes: &'a [u8]) -> Result<RethView<'a>, WireError> {
        head(bytes).map(RethView)
    }

    /// First byte in the responder's region.
    pub fn addr(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = *self.0;
        be64([a, b, c, d], [e, f, g, h])
    }

    /// Key of that region.
    pub fn rkey(&self) -> u32 {
        let [.., a, b, c, d, _, _, _, _] = *self.0;
        be32([a, b, c, d])
    }

    /// Length of the whole message in bytes.
    pub fn len(&self) -> u32 {
        let [.., a, b, c, d] = *self.0;
        be32([a, b, c, d])
    }

    /// Whether the message has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The representation.
    pub fn decode(&self) -> Reth {
        Reth { addr: self.addr(), rkey: self.rkey(), len: self.len() }
    }
}

/// ACK extended transport header (IBA 9.3.5).
#[derive(Clone, Copy, Debug)]
pub struct AethView<'a>(&'a [u8; 4]);

impl<'a> AethView<'a> {
    /// Views the first 4 bytes.
    pub fn new(bytes: &'a [u8]) -> Result<AethView<'a>, WireError> {
        head(bytes).map(AethView)
    }

    /// Syndrome byte, defined or not.
    pub fn syndrome(&self) -> u8 {
        self.0[0]
    }

    /// Message sequence number, 24 bits.
    pub fn msn(&self) -> u32 {
        be32([0, self.0[1], self.0[2], self.0[3]])
    }

    /// The representation, if the syndrome is defined.
    pub fn decode(&self) -> Result<Aeth, WireError> {
        let syndrome =
            Syndrome::from_u8(self.syndrome()).ok_or(WireError::Syndrome(self.syndrome()))?;
        Ok(Aeth { syndrome, msn: self.msn() })
    }
}

/// Atomic extended transport header (IBA 9.3.4).
#[derive(Clone, Copy, Debug)]
pub struct AtomicEthView<'a>(&'a [u8; 28]);

impl<'a> AtomicEthView<'a> {
    /// Views the first 28 bytes.
    pub fn new(bytes: &'a [u8]) -> Result<AtomicEthView<'a>, WireError> {
        head(bytes).map(AtomicEthView)
    }

    /// Address of the operand.
    pub fn addr(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = *self.0;
        be64([a, b, c, d], [e, f, g, h])
    }

    /// Key of its region.
    pub fn rkey(&self) -> u32 {
        be32([self.0[8], self.0[9], self.0[10], self.0[11]])
    }

    /// Value to add, or to store if the comparison holds.
    pub fn swap_or_add(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h, _, _, _, _, _, _, _, _] = *self.0;
        be64([a, b, c, d], [e, f, g, h])
    }

    /// Value to compare with.
    pub fn compare(&self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = *self.0;
        be64([a, b, c, d], [e, f, g, h])
    }

    /// The representation.
    pub fn decode(&self) -> AtomicEth {
        AtomicEth {
            addr: self.addr(),
            rkey: self.rkey(),
            swap_or_add: self.swap_or_add(),
            compare: self.compare(),
        }
    }
}

/// Datagram extended transport header (IBA 9.3.2).
#[derive(Clone, Copy, Debug)]
pub struct DethView<'a>(&'a [u8; 8]);

impl<'a> DethView<'a> {
    /// Views the first 8 bytes.
    pub fn new(bytes: &'a [u8]) -> Result<DethView<'a>, WireError> {
        head(bytes).map(DethView)
    }

    /// Queue key.
    pub fn qkey(&self) -> u32 {
        be32([self.0[0], self.0[1], self.0[2], self.0[3]])
    }

    /// The reserved byte before the source queue pair.
    pub fn reserved(&self) -> u8 {
        self.0[4]
    }

    /// The sender's queue pair.
    pub fn src_qp(&self) -> Qpn {
        Qpn::new(be32([0, self.0[5], self.0[6], self.0[7]]))
    }

    /// The representation.
    pub fn decode(&self) -> Deth {
        Deth { qkey: self.qkey(), src_qp: self.src_qp() }
    }
}
