//! Transport headers: the base header and the extension headers of each opcode (IBA chapter 9).
//!
//! The rest of the crate works with [`Headers`], which can only hold legal combinations.
//! [`Headers::parse`] never panics on any input; [`Headers::emit`] reproduces exactly the bytes
//! that were parsed. Bits that senders clear and receivers ignore (six and seven in the BTH, a byte
//! in the DETH) are therefore kept, hidden from queue pairs; reserved *codes* (version, opcode,
//! syndrome) and a filled congestion notification are refused. The byte views beneath are in
//! [`views`](super::views).

use arrayvec::ArrayVec;
use thiserror::Error;

use super::opcode::ExtKind;
use super::views::{AethView, AtomicEthView, BthView, DethView, RethView};
use super::{Opcode, Psn, Qpn};

/// Longest header stack: BTH, RETH and immediate, or BTH, AtomicETH.
pub const MAX_HEADER_BYTES: usize = 64;

/// Length of the base transport header.
pub const BTH_BYTES: usize = 12;

/// Length of the invariant CRC that ends every packet.
pub const ICRC_BYTES: usize = 4;

/// Base transport header, 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// The opcode.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// Migration state.
    pub mig_req: bool,
    /// Zero bytes after the payload, 0–3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward explicit congestion notification (not in the ICRC).
    pub fecn: bool,
    /// Backward explicit congestion notification (not in the ICRC).
    pub becn: bool,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// The sender requests an acknowledgement.
    pub ack_req: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

/// RDMA extended transport header, 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// First byte in the responder's region.
    pub addr: u64,
    /// Key of that region.
    pub rkey: u32,
    /// Length of the whole message in bytes.
    pub len: u32,
}

/// The meaning of an acknowledgement (IBA table 47: AETH syndrome).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Everything up to the PSN arrived; 5 bits of encoded credit count (31: no credits are given).
    Ack {
        /// Encoded credit count, 0–31.
        credits: u8,
    },
    /// No receive is posted: retry after the delay of the 5-bit code.
    RnrNak {
        /// Timer code, 0–31 (IBA table 45).
        timer: u8,
    },
    /// A packet is missing: the PSN is the one expected.
    SequenceError,
    /// NAK code 1.
    InvalidRequest,
    /// NAK code 2.
    RemoteAccess,
    /// NAK code 3.
    RemoteOperation,
    /// NAK code 4.
    InvalidRdRequest,
}

/// ACK extended transport header, 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Positive or negative.
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits: messages completed by the responder.
    pub msn: u32,
}

/// Atomic extended transport header, 28 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address of the 64-bit operand, in the responder's region.
    pub addr: u64,
    /// Key of that region.
    pub rkey: u32,
    /// Value to add, or to store if the comparison holds.
    pub swap_or_add: u64,
    /// Value to compare with.
    pub compare: u64,
}

/// Atomic acknowledgement header, 8 bytes: the operand's original value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicAckEth {
    /// Original value.
    pub original: u64,
}

/// Datagram extended transport header, 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// The sender's queue pair.
    pub src_qp: Qpn,
}

/// Extended transport header of the selective-repeat mode, 8 bytes: where to place a packet's
/// payload while packets before it are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sreth {
    /// The responder's receive, as the number of receives consumed on this connection before it, 24
    /// bits. Zero for READ.
    pub sequence: u32,
    /// Offset of the payload in its message, in bytes.
    pub offset: u32,
}

/// Selective acknowledgement of the selective-repeat mode, 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sack {
    /// Number of this SACK, rising from SACK to SACK.
    pub serial: u32,
    /// The PSN of the first bit.
    pub start: Psn,
    /// Another SACK follows, for more packets that had arrived by then.
    pub more: bool,
    /// Low and high half of one bit per packet from `start` on: whether it has arrived.
    halves: [u64; 2],
}

impl Sack {
    /// Packets covered by one SACK.
    pub const BITS: u32 = 128;

    /// A SACK for the packets from `start` on, the first in the lowest bit.
    pub const fn new(serial: u32, start: Psn, bits: u128) -> Sack {
        Sack { serial, start, more: false, halves: [bits as u64, (bits >> 64) as u64] }
    }

    /// The same, and whether another SACK follows.
    #[must_use]
    pub const fn followed(self, more: bool) -> Sack {
        Sack { more, ..self }
    }

    /// One bit per packet, the first in the lowest.
    pub const fn bits(&self) -> u128 {
        (self.halves[1] as u128) << 64 | self.halves[0] as u128
    }
}

/// The extension headers of a packet. Which variant is legal follows from the opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants name the headers they hold")]
pub enum Ext {
    None,
    Imm(u32),
    /// The rkey to invalidate.
    Ieth(u32),
    Reth(Reth),
    RethImm(Reth, u32),
    Aeth(Aeth),
    AtomicEth(AtomicEth),
    AethAtomicAck(Aeth, AtomicAckEth),
    Deth(Deth),
    DethImm(Deth, u32),
    /// 16 reserved bytes of a congestion notification packet.
    Cnp,
    Sreth(Sreth),
    SrethImm(Sreth, u32),
    SrethIeth(Sreth, u32),
    RethSreth(Reth, Sreth),
    RethSrethImm(Reth, Sreth, u32),
    AethSreth(Aeth, Sreth),
    AethSack(Aeth, Sack),
}

/// Why bytes are not a packet, or a representation is not legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// Too short for its own headers.
    #[error("packet of {have} bytes is too short, {need} needed")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Opcode that no supported service defines.
    #[error("opcode {0:#04x} is not defined")]
    UnknownOpcode(u8),
    /// Transport header version other than 0.
    #[error("transport header version {0} is not 0")]
    Version(u8),
    /// AETH syndrome in a reserved range.
    #[error("AETH syndrome {0:#04x} is reserved")]
    Syndrome(u8),
    /// Pad count larger than the payload, or payload and pad not a multiple of four.
    #[error("pad count {pad} does not fit {len} bytes of payload and pad")]
    Pad {
        /// Pad count in the BTH.
        pad: u8,
        /// Payload and pad bytes in the packet.
        len: usize,
    },
    /// Reserved bits that must be zero are set.
    #[error("reserved bits of {0} are set")]
    Reserved(&'static str),
    /// A number does not fit its header field.
    #[error("{field} {value} is out of range")]
    Range {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// The extension headers are not those of the opcode.
    #[error("extension headers do not belong to {0:?}")]
    ExtMismatch(Opcode),
}

impl Syndrome {
    /// Decodes the first byte of an AETH.
    pub const fn from_u8(byte: u8) -> Option<Syndrome> {
        let low = byte & 0x1f;
        match (byte >> 5, low) {
            (0, _) => Some(Syndrome::Ack { credits: low }),
            (1, _) => Some(Syndrome::RnrNak { timer: low }),
            (3, 0) => Some(Syndrome::SequenceError),
            (3, 1) => Some(Syndrome::InvalidRequest),
            (3, 2) => Some(Syndrome::RemoteAccess),
            (3, 3) => Some(Syndrome::RemoteOperation),
            (3, 4) => Some(Syndrome::InvalidRdRequest),
            _ => None,
        }
    }

    /// The first byte of the AETH; credit counts and timer codes are cut to five bits.
    pub const fn as_u8(self) -> u8 {
        match self {
            Syndrome::Ack { credits } => credits & 0x1f,
            Syndrome::RnrNak { timer } => 0x20 | timer & 0x1f,
            Syndrome::SequenceError => 0x60,
            Syndrome::InvalidRequest => 0x61,
            Syndrome::RemoteAccess => 0x62,
            Syndrome::RemoteOperation => 0x63,
            Syndrome::InvalidRdRequest => 0x64,
        }
    }

    /// Refuses codes that five bits cannot hold.
    fn check(self) -> Result<(), WireError> {
        match self {
            Syndrome::Ack { credits } => in_range("credit count", credits.into(), 0x1f),
            Syndrome::RnrNak { timer } => in_range("RNR timer code", timer.into(), 0x1f),
            _ => Ok(()),
        }
    }
}

impl Aeth {
    fn check(self) -> Result<(), WireError> {
        self.syndrome.check()?;
        in_range("message sequence number", self.msn, 0x00ff_ffff)
    }
}

impl Ext {
    /// Which headers these are.
    pub const fn kind(&self) -> ExtKind {
        match self {
            Ext::None => ExtKind::None,
            Ext::Imm(_) => ExtKind::Imm,
            Ext::Ieth(_) => ExtKind::Ieth,
            Ext::Reth(_) => ExtKind::Reth,
            Ext::RethImm(..) => ExtKind::RethImm,
            Ext::Aeth(_) => ExtKind::Aeth,
            Ext::AtomicEth(_) => ExtKind::AtomicEth,
            Ext::AethAtomicAck(..) => ExtKind::AethAtomicAck,
            Ext::Deth(_) => ExtKind::Deth,
            Ext::DethImm(..) => ExtKind::DethImm,
            Ext::Cnp => ExtKind::Cnp,
            Ext::Sreth(_) => ExtKind::Sreth,
            Ext::SrethImm(..) => ExtKind::SrethImm,
            Ext::SrethIeth(..) => ExtKind::SrethIeth,
            Ext::RethSreth(..) => ExtKind::RethSreth,
            Ext::RethSrethImm(..) => ExtKind::RethSrethImm,
            Ext::AethSreth(..) => ExtKind::AethSreth,
            Ext::AethSack(..) => ExtKind::AethSack,
        }
    }

    /// The RETH, if there is one.
    pub const fn reth(&self) -> Option<&Reth> {
        match self {
            Ext::Reth(reth) | Ext::RethImm(reth, _) => Some(reth),
            Ext::RethSreth(reth, _) | Ext::RethSrethImm(reth, ..) => Some(reth),
            _ => None,
        }
    }

    /// The AETH, if there is one.
    pub const fn aeth(&self) -> Option<&Aeth> {
        match self {
            Ext::Aeth(aeth) | Ext::AethAtomicAck(aeth, _) => Some(aeth),
            Ext::AethSreth(aeth, _) | Ext::AethSack(aeth, _) => Some(aeth),
            _ => None,
        }
    }

    /// The DETH, if there is one.
    pub const fn deth(&self) -> Option<&Deth> {
        match self {
            Ext::Deth(deth) | Ext::DethImm(deth, _) => Some(deth),
            _ => None,
        }
    }

    /// The immediate data, if there is some.
    pub const fn imm(&self) -> Option<u32> {
        match self {
            Ext::Imm(imm) | Ext::RethImm(_, imm) | Ext::DethImm(_, imm) => Some(*imm),
            Ext::SrethImm(_, imm) | Ext::RethSrethImm(_, _, imm) => Some(*imm),
            _ => None,
        }
    }

    /// The SRETH, if there is one.
    pub const fn sreth(&self) -> Option<&Sreth> {
        match self {
            Ext::Sreth(sreth)
            | Ext::SrethImm(sreth, _)
            | Ext::SrethIeth(sreth, _)
            | Ext::RethSreth(_, sreth)
            | Ext::RethSrethImm(_, sreth, _)
            | Ext::AethSreth(_, sreth) => Some(sreth),
            _ => None,
        }
    }

    /// The selective acknowledgement, if there is one.
    pub const fn sack(&self) -> Option<&Sack> {
        match self {
            Ext::AethSack(_, sack) => Some(sack),
            _ => None,
        }
    }

    fn check(&self) -> Result<(), WireError> {
        if let Some(sreth) = self.sreth() {
            in_range("receive sequence number", sreth.sequence, 0x00ff_ffff)?;
        }
        self.aeth().map_or(Ok(()), |aeth| aeth.check())
    }
}

fn in_range(field: &'static str, value: u32, max: u32) -> Result<(), WireError> {
    if value <= max { Ok(()) } else { Err(WireError::Range { field, value }) }
}

/// Bits that senders clear and receivers ignore, kept so that a packet re-encodes exactly. Two ends
/// of ours may agree to use `bth_ack` ([`Headers::hint`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ignored {
    /// Low six bits of BTH byte 4, next to FECN and BECN.
    bth_flags: u8,
    /// Low seven bits of BTH byte 8, next to the acknowledge request.
    bth_ack: u8,
    /// DETH byte 4, before the source queue pair.
    deth: u8,
}

/// All transport headers of a packet, in legal combination only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    bth: Bth,
    ext: Ext,
    ignored: Ignored,
}

impl Headers {
    /// Combines the two if the opcode has exactly these extension headers and every number fits its
    /// field (`pad` 0–3, credit count and timer code 0–31, MSN 24 bits).
    pub fn new(bth: Bth, ext: Ext) -> Result<Headers, WireError> {
        if bth.opcode.ext_kind() != ext.kind() {
            return Err(WireError::ExtMismatch(bth.opcode));
        }
        in_range("pad count", bth.pad.into(), 3)?;
        ext.check()?;
        Ok(Headers { bth, ext, ignored: Ignored::default() })
    }

    /// The base header.
    pub fn bth(&self) -> &Bth {
        &self.bth
    }

    /// The extension headers.
    pub fn ext(&self) -> &Ext {
        &self.ext
    }

    /// Length of the encoded headers in bytes.
    pub fn encoded_len(&self) -> usize {
        BTH_BYTES + self.ext.kind().len()
    }

    /// Seven bits of the BTH, beside the request for an acknowledgement, that other senders clear
    /// and receivers ignore. The ICRC covers them. 0 means nothing.
    pub fn hint(&self) -> u8 {
        self.ignored.bth_ack
    }

    /// The same headers with these seven bits; an eighth is cut off.
    #[must_use]
    pub fn with_hint(mut self, hint: u8) -> Headers {
        self.ignored.bth_ack = hint & 0x7f;
        self
    }

    /// Whether the packet has bits set that senders must clear. They mean nothing to a receiver,
    /// and [`emit`](Headers::emit) reproduces them.
    pub fn has_ignored_bits(&self) -> bool {
        self.ignored != Ignored::default()
    }

    /// Decodes the headers at the start of `packet` (BTH up to and including the ICRC) and returns
    /// them with the payload, without pad and ICRC. Neither the ICRC nor the value of the pad bytes
    /// is checked.
    pub fn parse(packet: &[u8]) -> Result<(Headers, &[u8]), WireError> {
        let view = BthView::new(packet)?;
        let bth = view.decode()?;
        let headers_len = BTH_BYTES + bth.opcode.ext_kind().len();
        let need = headers_len + ICRC_BYTES;
        if packet.len() < need {
            return Err(WireError::Truncated { have: packet.len(), need });
        }
        let (ext_bytes, rest) = packet[BTH_BYTES..].split_at(headers_len - BTH_BYTES);
        let payload = strip_pad(&rest[..rest.len() - ICRC_BYTES], bth.pad)?;
        let ext = decode_ext(bth.opcode.ext_kind(), ext_bytes)?;
        let ignored = Ignored {
            bth_flags: view.reserved_flags(),
            bth_ack: view.reserved_ack(),
            deth: if ext.deth().is_some() { DethView::new(ext_bytes)?.reserved() } else { 0 },
        };
        Ok((Headers { bth, ext, ignored }, payload))
    }

    /// Encodes the headers.
    pub fn emit(&self) -> ArrayVec<u8, MAX_HEADER_BYTES> {
        let mut out = ArrayVec::new();
        put(&mut out, self.emit_bth());
        emit_ext(&self.ext, self.ignored.deth, &mut out);
        out
    }

    fn emit_bth(&self) -> [u8; BTH_BYTES] {
        let Bth { opcode, solicited, mig_req, pad, pkey, fecn, becn, dest_qp, ack_req, psn } =
            self.bth;
        let mut out = [0; BTH_BYTES];
        out[0] = opcode.as_u8();
        out[1] = u8::from(solicited) << 7 | u8::from(mig_req) << 6 | pad << 4;
        out[2..4].copy_from_slice(&pkey.to_be_bytes());
        out[4..8].copy_from_slice(&dest_qp.get().to_be_bytes());
        out[4] = u8::from(fecn) << 7 | u8::from(becn) << 6 | self.ignored.bth_flags;
        out[8..12].copy_from_slice(&psn.get().to_be_bytes());
        out[8] = u8::from(ack_req) << 7 | self.ignored.bth_ack;
        out
    }
}

/// Emitting cannot overflow: the longest stack is BTH and AtomicETH.
const _: () = assert!(BTH_BYTES + ExtKind::AtomicEth.len() <= MAX_HEADER_BYTES);

/// Removes `pad` bytes from the end of the bytes between headers and ICRC.
fn strip_pad(body: &[u8], pad: u8) -> Result<&[u8], WireError> {
    match body.len().checked_sub(pad.into()) {
        Some(len) if body.len().is_multiple_of(4) => Ok(&body[..len]),
        _ => Err(WireError::Pad { pad, len: body.len() }),
    }
}

/// The 32-bit field at `at`, zero where the bytes end before it.
fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |&word| u32::from_be_bytes(word))
}

/// Decodes `kind.len()` bytes of extension headers.
fn decode_ext(kind: ExtKind, bytes: &[u8]) -> Result<Ext, WireError> {
    Ok(match kind {
        ExtKind::None => Ext::None,
        ExtKind::Imm => Ext::Imm(word(bytes, 0)),
        ExtKind::Ieth => Ext::Ieth(word(bytes, 0)),
        ExtKind::Reth => Ext::Reth(RethView::new(bytes)?.decode()),
        ExtKind::RethImm => Ext::RethImm(RethView::new(bytes)?.decode(), word(bytes, 16)),
        ExtKind::Aeth => Ext::Aeth(AethView::new(bytes)?.decode()?),
        ExtKind::AtomicEth => Ext::AtomicEth(AtomicEthView::new(bytes)?.decode()),
        ExtKind::AethAtomicAck => {
            let original = u64::from(word(bytes, 4)) << 32 | u64::from(word(bytes, 8));
            Ext::AethAtomicAck(AethView::new(bytes)?.decode()?, AtomicAckEth { original })
        }
        ExtKind::Deth => Ext::Deth(DethView::new(bytes)?.decode()),
        ExtKind::DethImm => Ext::DethImm(DethView::new(bytes)?.decode(), word(bytes, 8)),
        ExtKind::Sreth => Ext::Sreth(sreth(bytes, 0)?),
        ExtKind::SrethImm => Ext::SrethImm(sreth(bytes, 0)?, word(bytes, 8)),
        ExtKind::SrethIeth => Ext::SrethIeth(sreth(bytes, 0)?, word(bytes, 8)),
        ExtKind::RethSreth => Ext::RethSreth(RethView::new(bytes)?.decode(), sreth(bytes, 16)?),
        ExtKind::RethSrethImm => {
            let reth = RethView::new(bytes)?.decode();
            Ext::RethSrethImm(reth, sreth(bytes, 16)?, word(bytes, 24))
        }
        ExtKind::AethSreth => Ext::AethSreth(AethView::new(bytes)?.decode()?, sreth(bytes, 4)?),
        ExtKind::AethSack => Ext::AethSack(AethView::new(bytes)?.decode()?, sack(bytes)?),
        ExtKind::Cnp if bytes.iter().all(|&byte| byte == 0) => Ext::Cnp,
        ExtKind::Cnp => return Err(WireError::Reserved("the CNP payload")),
    })
}

/// A number of 24 bits below a byte of zeros.
fn low_24(bytes: &[u8], at: usize, what: &'static str) -> Result<u32, WireError> {
    let value = word(bytes, at);
    if value < 1 << 24 { Ok(value) } else { Err(WireError::Reserved(what)) }
}

fn sreth(bytes: &[u8], at: usize) -> Result<Sreth, WireError> {
    Ok(Sreth { sequence: low_24(bytes, at, "the SRETH")?, offset: word(bytes, at + 4) })
}

/// The SACK after an AETH.
fn sack(bytes: &[u8]) -> Result<Sack, WireError> {
    let place = word(bytes, 8);
    if place & 0x7f00_0000 != 0 {
        return Err(WireError::Reserved("the selective acknowledgement"));
    }
    let half = |at| u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4));
    let halves = [half(20), half(12)];
    Ok(Sack { serial: word(bytes, 4), start: Psn::new(place), more: place >> 31 == 1, halves })
}

/// Appends a header, for which there is always room (the assertion above).
fn put<const N: usize>(out: &mut ArrayVec<u8, MAX_HEADER_BYTES>, header: [u8; N]) {
    let put = out.try_extend_from_slice(&header);
    debug_assert!(put.is_ok(), "longer than any legal stack");
}

fn emit_ext(ext: &Ext, deth_reserved: u8, out: &mut ArrayVec<u8, MAX_HEADER_BYTES>) {
    match ext {
        Ext::None => {}
        Ext::Imm(value) | Ext::Ieth(value) => put(out, value.to_be_bytes()),
        Ext::Reth(reth) => put(out, reth.emit()),
        Ext::RethImm(reth, imm) => {
            put(out, reth.emit());
            put(out, imm.to_be_bytes());
        }
        Ext::Aeth(aeth) => put(out, aeth.emit()),
        Ext::AtomicEth(atomic) => put(out, atomic.emit()),
        Ext::AethAtomicAck(aeth, ack) => {
            put(out, aeth.emit());
            put(out, ack.original.to_be_bytes());
        }
        Ext::Deth(deth) => put(out, deth.emit(deth_reserved)),
        Ext::DethImm(deth, imm) => {
            put(out, deth.emit(deth_reserved));
            put(out, imm.to_be_bytes());
        }
        Ext::Cnp => put(out, [0; 16]),
        Ext::Sreth(sreth) => put(out, sreth.emit()),
        Ext::SrethImm(sreth, word) | Ext::SrethIeth(sreth, word) => {
            put(out, sreth.emit());
            put(out, word.to_be_bytes());
        }
        Ext::RethSreth(reth, sreth) => {
            put(out, reth.emit());
            put(out, sreth.emit());
        }
        Ext::RethSrethImm(reth, sreth, imm) => {
            put(out, reth.emit());
            put(out, sreth.emit());
            put(out, imm.to_be_bytes());
        }
        Ext::AethSreth(aeth, sreth) => {
            put(out, aeth.emit());
            put(out, sreth.emit());
        }
        Ext::AethSack(aeth, sack) => {
            put(out, aeth.emit());
            put(out, sack.emit());
        }
    }
}

impl Sreth {
    fn emit(&self) -> [u8; 8] {
        let mut out = [0; 8];
        out[..4].copy_from_slice(&self.sequence.to_be_bytes());
        out[4..].copy_from_slice(&self.offset.to_be_bytes());
        out
    }
}

impl Sack {
    fn emit(&self) -> [u8; 24] {
        let mut out = [0; 24];
        out[..4].copy_from_slice(&self.serial.to_be_bytes());
        out[4..8].copy_from_slice(&self.start.get().to_be_bytes());
        out[4] = u8::from(self.more) << 7;
        out[8..].copy_from_slice(&self.bits().to_be_bytes());
        out
    }
}

impl Reth {
    fn emit(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }
}

impl Aeth {
    fn emit(&self) -> [u8; 4] {
        (u32::from(self.syndrome.as_u8()) << 24 | self.msn & 0x00ff_ffff).to_be_bytes()
    }
}

impl AtomicEth {
    fn emit(&self) -> [u8; 28] {
        let mut out = [0; 28];
        out[..8].copy_from_slice(&self.addr.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..20].copy_from_slice(&self.swap_or_add.to_be_bytes());
        out[20..].copy_from_slice(&self.compare.to_be_bytes());
        out
    }
}

impl Deth {
    fn emit(&self, reserved: u8) -> [u8; 8] {
        let mut out = [0; 8];
        out[..4].copy_from_slice(&self.qkey.to_be_bytes());
        out[4..].copy_from_slice(&self.src_qp.get().to_be_bytes());
        out[4] = reserved;
        out
    }
}
