//! The unreliable connection service: messages of any length, never acknowledged, never
//! retransmitted (IBA 9.8.2).
//!
//! For the program, a message arrives whole or not at all. The responder follows the sequence
//! numbers only to detect missing packets:
//!
//! | packet | what happens |
//! |---|---|
//! | next in sequence, fits the message | placed |
//! | first or only | starts a message; an unfinished one is abandoned |
//! | anything else | dropped, and the message in progress abandoned |
//!
//! An abandoned message leaves its receive for the next one. What a WRITE has placed until then
//! stays. Requests that are refused (key, bound, length, no receive) are dropped silently and
//! counted; only a receive that is not writable ends the queue pair.

use super::context::{PacketHeaders, QpContext};
use super::inbound::{Inbound, Message, Violation};
use super::recv_queue::RecvQueue;
use super::send_queue::{Posted, SendQueue};
use super::{RxPacket, Scope, request};
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent};
use crate::seeded::Bug;
use crate::srq::SrqTable;
use crate::verbs::{SendOp, SendWr, WcStatus};
use crate::wire::{Ext, Headers, Opcode, Psn, Reth};

/// See the module's text.
#[derive(Debug)]
pub(super) struct Uc {
    pub(super) sends: SendQueue,
    pub(super) inbound: Inbound,
    expected: Psn,
}

impl Uc {
    pub(super) fn new(sends: SendQueue, receives: RecvQueue) -> Uc {
        Uc { sends, inbound: Inbound::new(receives), expected: Psn::default() }
    }

    /// Ready to receive, from this PSN on.
    pub(super) fn start(&mut self, expected: Psn) {
        self.expected = expected;
        self.inbound.message = Message::None;
    }

    // ---- sending -------------------------------------------------------------------------------

    /// Puts the next packet into `cx.packet`, and the location of its payload into `cx.pieces`.
    pub(super) fn poll(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), WcStatus> {
        self.execute_local(cx)?;
        let Some((posted, index)) = self.sends.next() else {
            return Ok(());
        };
        let is_last = index + 1 == cx.qpc.packets(posted.len);
        let extent = packet_extent(posted, index, cx.qpc);
        check_buffers(cx, posted, index)?;
        cx.resolve(AccessKind::LocalRead, &posted.wr.sges, extent)
            .map_err(|_| WcStatus::LocalProtectionError)?;
        let (opcode, ext) = form(posted.wr.op, posted.len, index == 0, is_last);
        let solicited = posted.wr.solicited && is_last;
        let header =
            PacketHeaders { solicited, ..PacketHeaders::new(opcode, self.sends.psn(), ext) };
        self.sends.advance(cx, is_last);
        cx.emit(header, extent.len);
        Ok(())
    }

    /// Executes the bindings and invalidations that are next.
    fn execute_local(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), WcStatus> {
        while let Some((posted, _)) = self.sends.next().filter(|(posted, _)| posted.is_local()) {
            request::execute_local(cx, posted.wr.op)?;
            self.sends.finish(cx);
        }
        Ok(())
    }

    // ---- receiving -----------------------------------------------------------------------------

    /// A request packet. An error is the status of the current receive, and ends the queue pair.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), WcStatus> {
        if cx.seeded.is(Bug::GapForever) && packet.headers.bth().psn != self.expected {
            return Ok(());
        }
        self.follow_sequence(cx, packet.headers);
        if self.inbound.message == Message::None && !packet.headers.bth().opcode.starts_message() {
            cx.count(|c| &mut c.orphan_packets);
            return Ok(());
        }
        let Err(violation) = self.inbound.execute(cx, packet, Some(0)) else {
            return Ok(());
        };
        self.inbound.message = Message::None;
        match violation {
            Violation::BadReceive => return Err(WcStatus::LocalProtectionError),
            Violation::NoReceive => cx.count(|c| &mut c.no_receive),
            _ => {}
        }
        cx.count(|c| &mut c.broken_messages);
        Ok(())
    }

    /// Abandons the message in progress if this packet is not the next, or starts another message.
    fn follow_sequence(&mut self, cx: &mut Scope<'_, '_>, headers: &Headers) {
        let bth = headers.bth();
        let in_sequence = bth.psn == self.expected || cx.seeded.is(Bug::GapIgnored);
        self.expected = bth.psn.next();
        if !in_sequence {
            cx.count(|c| &mut c.out_of_sequence);
        }
        let goes_on = in_sequence && !bth.opcode.starts_message();
        if self.inbound.message != Message::None && !goes_on {
            cx.count(|c| &mut c.broken_messages);
            self.inbound.message = Message::None;
        }
    }

    /// Clears everything without completions.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.sends.reset();
        self.inbound.reset(srqs);
    }
}

/// The part of its message that packet `index` carries.
fn packet_extent(posted: &Posted, index: u32, qpc: &QpContext) -> Extent {
    let offset = index * qpc.mtu;
    Extent { offset, len: (posted.len - offset).min(qpc.mtu) }
}

/// All local buffers are checked before the first packet is sent, so that a message that cannot be
/// sent as a whole is not started.
fn check_buffers(cx: &mut Scope<'_, '_>, posted: &Posted, index: u32) -> Result<(), WcStatus> {
    if index > 0 {
        return Ok(());
    }
    sg::check_all(cx.regions, cx.qpc.pd, AccessKind::LocalRead, &posted.wr.sges).map_err(|error| {
        cx.count_protection_error(error);
        WcStatus::LocalProtectionError
    })
}

/// Returns why this service cannot carry out a work request of `bytes` bytes, if it cannot.
pub(super) fn why_invalid(wr: &SendWr, bytes: u64) -> Option<&'static str> {
    use SendOp::{BindWindow, LocalInvalidate, Send, SendImm, Write, WriteImm};
    match wr.op {
        Send | SendImm(_) | Write { .. } | WriteImm { .. } => None,
        LocalInvalidate(_) | BindWindow(_) => request::why_invalid(wr, bytes),
        _ => Some("UC supports only SEND and WRITE"),
    }
}

/// Opcode and extension headers of a packet by its position in the message (IBA table 35).
fn form(op: SendOp, len: u32, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match op {
        SendOp::Write { remote_addr: addr, rkey } => {
            write_form(Reth { addr, rkey, len }, None, is_first, is_last)
        }
        SendOp::WriteImm { remote_addr: addr, rkey, imm } => {
            write_form(Reth { addr, rkey, len }, Some(imm), is_first, is_last)
        }
        SendOp::SendImm(imm) => send_form(Some(imm), is_first, is_last),
        _ => send_form(None, is_first, is_last),
    }
}

fn send_form(imm: Option<u32>, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (is_first, is_last, imm) {
        (true, false, _) => (Opcode::UcSendFirst, Ext::None),
        (false, false, _) => (Opcode::UcSendMiddle, Ext::None),
        (false, true, None) => (Opcode::UcSendLast, Ext::None),
        (false, true, Some(imm)) => (Opcode::UcSendLastImm, Ext::Imm(imm)),
        (true, true, None) => (Opcode::UcSendOnly, Ext::None),
        (true, true, Some(imm)) => (Opcode::UcSendOnlyImm, Ext::Imm(imm)),
    }
}

fn write_form(reth: Reth, imm: Option<u32>, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    match (is_first, is_last, imm) {
        (true, false, _) => (Opcode::UcWriteFirst, Ext::Reth(reth)),
        (false, false, _) => (Opcode::UcWriteMiddle, Ext::None),
        (false, true, None) => (Opcode::UcWriteLast, Ext::None),
        (false, true, Some(imm)) => (Opcode::UcWriteLastImm, Ext::Imm(imm)),
        (true, true, None) => (Opcode::UcWriteOnly, Ext::Reth(reth)),
        (true, true, Some(imm)) => (Opcode::UcWriteOnlyImm, Ext::RethImm(reth, imm)),
    }
}
