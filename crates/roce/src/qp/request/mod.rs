//! A posted send work request in the requester, and its packets.
//!
//! | kind | PSNs | done by |
//! |---|---|---|
//! | message (SEND, WRITE) | its packets | an acknowledgement |
//! | READ | its response packets | all of its responses |
//! | atomic | 1 | its response |
//! | local (invalidate, bind) | none | execution |
//!
//! Opcodes and extension headers are decided only here (IBA table 35); those of the
//! selective-repeat mode in [`selective`].

mod selective;

use self::selective::form;
use super::Scope;
use super::context::{PacketHeaders, QpContext};
use crate::memory::region::AccessKind;
use crate::memory::sg::Extent;
use crate::verbs::{SendOp, SendWr, WcOpcode, WcStatus};
use crate::wire::{AtomicEth, Ext, Opcode, Psn, Reth};

/// Bytes of an atomic's operand, and of its result.
pub(super) const ATOMIC_BYTES: u32 = 8;

/// A posted send work request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    pub(super) len: u32,
    pub(super) first_psn: Psn,
    /// PSNs it takes: request packets, or for READ response packets.
    pub(super) packets: u32,
    /// PSNs acknowledged, or for READ responses placed.
    pub(super) done: u32,
    /// Message sequence number, 24 bits, circular like PSNs.
    pub(super) ssn: Psn,
    /// Request packets of all work requests posted before this one.
    pub(super) packets_before: u32,
    /// A local operation that was executed.
    pub(super) is_executed: bool,
    /// Why it cannot run.
    pub(super) fault: Option<WcStatus>,
}

impl Request {
    pub(super) fn is_read(&self) -> bool {
        matches!(self.wr.op, SendOp::Read { .. })
    }

    pub(super) fn is_atomic(&self) -> bool {
        matches!(self.wr.op, SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. })
    }

    /// READ or atomic: not done before its own response has arrived.
    pub(super) fn awaits_response(&self) -> bool {
        self.is_read() || self.is_atomic()
    }

    /// Executed locally, nothing is sent.
    pub(super) fn is_local(&self) -> bool {
        is_local(self.wr.op)
    }

    /// Must not start before earlier READs and atomics are done. Local operations invalidate keys
    /// that those may be using.
    pub(super) fn is_fenced(&self) -> bool {
        self.wr.fence || self.is_local()
    }

    pub(super) fn left(&self) -> u32 {
        self.packets - self.done
    }

    /// PSN of the last packet.
    pub(super) fn last_psn(&self) -> Psn {
        self.first_psn.plus(self.packets - 1)
    }

    pub(super) fn request_packets(&self) -> u32 {
        if self.is_read() { 1 } else { self.packets }
    }

    /// Whether the responder needs a posted receive for it.
    pub(super) fn takes_receive(&self) -> bool {
        use SendOp::{Send, SendImm, SendInvalidate, WriteImm};
        matches!(self.wr.op, Send | SendInvalidate(_) | SendImm(_) | WriteImm { .. })
    }

    /// The kind of access to its local buffers.
    pub(super) fn access_kind(&self) -> AccessKind {
        if self.awaits_response() { AccessKind::LocalWrite } else { AccessKind::LocalRead }
    }

    /// Bytes of packet `index`, or for READ of response `index`.
    pub(super) fn piece(&self, index: u32, mtu: u32) -> u32 {
        (self.len - index * mtu).min(mtu)
    }

    /// The byte count of its completion.
    pub(super) fn bytes_brought(&self) -> u32 {
        match self.awaits_response() {
            true if self.is_atomic() => ATOMIC_BYTES,
            true => self.len,
            false => 0,
        }
    }

    /// The packet at `index`, and the length of its payload.
    pub(super) fn packet(
        &self,
        index: u32,
        cx: &mut Scope<'_, '_>,
        ack_req: bool,
    ) -> Result<(PacketHeaders, u32), WcStatus> {
        if self.is_read() {
            Ok((self.read_packet(cx.qpc), 0))
        } else if let Some(atomic) = self.atomic_packet() {
            Ok((atomic, 0))
        } else {
            self.message_packet(index, cx, ack_req)
        }
    }

    /// The request for the missing part of a READ.
    fn read_packet(&self, qpc: &QpContext) -> PacketHeaders {
        let done_bytes = self.done * qpc.mtu;
        let (remote_addr, rkey) = remote(self.wr.op);
        let addr = remote_addr.wrapping_add(u64::from(done_bytes));
        let ext = Ext::Reth(Reth { addr, rkey, len: self.len - done_bytes });
        let psn = self.first_psn.plus(self.done);
        PacketHeaders { ack_req: true, ..PacketHeaders::new(Opcode::RcReadRequest, psn, ext) }
    }

    /// An atomic's only packet, the same for each transmission.
    fn atomic_packet(&self) -> Option<PacketHeaders> {
        let (opcode, atomic) = match self.wr.op {
            SendOp::CompareSwap { remote_addr: addr, rkey, compare, swap } => {
                (Opcode::RcCompareSwap, AtomicEth { addr, rkey, swap_or_add: swap, compare })
            }
            SendOp::FetchAdd { remote_addr: addr, rkey, add } => {
                (Opcode::RcFetchAdd, AtomicEth { addr, rkey, swap_or_add: add, compare: 0 })
            }
            _ => return None,
        };
        let ext = Ext::AtomicEth(atomic);
        Some(PacketHeaders { ack_req: true, ..PacketHeaders::new(opcode, self.first_psn, ext) })
    }

    /// Packet `index` of a SEND or WRITE.
    fn message_packet(
        &self,
        index: u32,
        cx: &mut Scope<'_, '_>,
        ack_req: bool,
    ) -> Result<(PacketHeaders, u32), WcStatus> {
        let is_last = index + 1 == self.packets;
        let extent = Extent { offset: index * cx.qpc.mtu, len: self.piece(index, cx.qpc.mtu) };
        cx.resolve(AccessKind::LocalRead, &self.wr.sges, extent)
            .map_err(|_| WcStatus::LocalProtectionError)?;
        let (opcode, ext) = match self.wr.op {
            _ if cx.qpc.is_selective() => form(self, index, extent),
            SendOp::Write { .. } | SendOp::WriteImm { .. } => {
                write_form(self.wr.op, self.len, index == 0, is_last)
            }
            op => send_form(op, index == 0, is_last),
        };
        let solicited = self.wr.solicited && is_last;
        let psn = self.first_psn.plus(index);
        Ok((
            PacketHeaders { ack_req, solicited, ..PacketHeaders::new(opcode, psn, ext) },
            extent.len,
        ))
    }
}

pub(super) fn is_local(op: SendOp) -> bool {
    matches!(op, SendOp::LocalInvalidate(_) | SendOp::BindWindow(_))
}

fn remote(op: SendOp) -> (u64, u32) {
    match op {
        SendOp::Write { remote_addr, rkey }
        | SendOp::WriteImm { remote_addr, rkey, .. }
        | SendOp::Read { remote_addr, rkey } => (remote_addr, rkey),
        _ => (0, 0),
    }
}

fn send_form(op: SendOp, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (op, is_first, is_last) {
        (_, true, false) => (Opcode::RcSendFirst, Ext::None),
        (_, false, false) => (Opcode::RcSendMiddle, Ext::None),
        (SendOp::SendImm(imm), false, true) => (Opcode::RcSendLastImm, Ext::Imm(imm)),
        (SendOp::SendImm(imm), true, true) => (Opcode::RcSendOnlyImm, Ext::Imm(imm)),
        (SendOp::SendInvalidate(rkey), false, true) => {
            (Opcode::RcSendLastInvalidate, Ext::Ieth(rkey))
        }
        (SendOp::SendInvalidate(rkey), true, true) => {
            (Opcode::RcSendOnlyInvalidate, Ext::Ieth(rkey))
        }
        (_, false, true) => (Opcode::RcSendLast, Ext::None),
        (_, true, true) => (Opcode::RcSendOnly, Ext::None),
    }
}

fn write_form(op: SendOp, len: u32, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    let (addr, rkey) = remote(op);
    let reth = Reth { addr, rkey, len };
    match (op, is_first, is_last) {
        (_, true, false) => (Opcode::RcWriteFirst, Ext::Reth(reth)),
        (_, false, false) => (Opcode::RcWriteMiddle, Ext::None),
        (SendOp::WriteImm { imm, .. }, false, true) => (Opcode::RcWriteLastImm, Ext::Imm(imm)),
        (SendOp::WriteImm { imm, .. }, true, true) => {
            (Opcode::RcWriteOnlyImm, Ext::RethImm(reth, imm))
        }
        (_, false, true) => (Opcode::RcWriteLast, Ext::None),
        (_, true, true) => (Opcode::RcWriteOnly, Ext::Reth(reth)),
    }
}

/// The completion opcode of a send work request.
pub(super) fn wc_opcode(op: SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendInvalidate(_) | SendOp::SendImm(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::Write,
        SendOp::Read { .. } => WcOpcode::Read,
        SendOp::CompareSwap { .. } => WcOpcode::CompareSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::LocalInvalidate(_) => WcOpcode::LocalInvalidate,
        SendOp::BindWindow(_) => WcOpcode::BindWindow,
    }
}

/// Returns why a work request of `bytes` bytes is invalid, if it is.
pub(super) fn why_invalid(wr: &SendWr, bytes: u64) -> Option<&'static str> {
    match wr.op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } if bytes != ATOMIC_BYTES.into() => {
            Some("an atomic returns 8 bytes: its scatter list must hold exactly these")
        }
        op if is_local(op) && !wr.sges.is_empty() => Some("a local operation has no buffers"),
        _ => None,
    }
}

/// Executes a local operation.
pub(super) fn execute_local(cx: &mut Scope<'_, '_>, op: SendOp) -> Result<(), WcStatus> {
    let qpc = cx.qpc;
    let (done, status) = match op {
        SendOp::LocalInvalidate(rkey) => {
            (cx.regions.invalidate(qpc.pd, qpc.qpn, rkey), WcStatus::LocalQpError)
        }
        SendOp::BindWindow(binding) => {
            (cx.regions.bind(qpc.pd, qpc.qpn, &binding), WcStatus::WindowBindError)
        }
        _ => return Ok(()),
    };
    done.map_err(|error| {
        cx.count_protection_error(error);
        status
    })
}
