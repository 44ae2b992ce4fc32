//! The unreliable datagram service: one packet per message, to any destination (IBA 9.8.3).
//!
//! A datagram is received when the queue key matches and a receive has room for it and for the 40
//! bytes of route header in front; otherwise it is dropped silently and counted, and the receive
//! stays for the next. That includes datagrams longer than the receive: the specification does not
//! make them an error on an unreliable service, and neither does the kernel's soft-RoCE. Only a
//! receive that is not writable ends the queue pair.

use super::context::{PacketHeaders, QpContext};
use super::delivery::Insert;
use super::grh::route_header;
use super::recv_queue::RecvQueue;
use super::send_queue::SendQueue;
use super::{RxPacket, Scope};
use crate::io::Origin;
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent};
use crate::seeded::Bug;
use crate::srq::SrqTable;
use crate::verbs::{Completion, Datagram, GRH_BYTES, SendOp, SendWr, WcOpcode, WcStatus};
use crate::wire::{Deth, Ext, Opcode};

/// A request's queue key with this bit set stands for the sender's own (IBA 10.2.5).
const OWN_QKEY_BIT: u32 = 1 << 31;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Ud {
    pub(super) sends: SendQueue,
    pub(super) receives: RecvQueue,
}

impl Ud {
    /// Puts the next datagram into `cx.packet`, and the location of its payload into `cx.pieces`.
    pub(super) fn poll(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), WcStatus> {
        let Some((posted, _)) = self.sends.next() else {
            return Ok(());
        };
        let (wr, len) = (&posted.wr, posted.len);
        let to = wr.to.ok_or(WcStatus::LocalQpError)?;
        check_buffers(cx, wr, len)?;
        let (opcode, ext) = form(wr.op, deth(cx.qpc, &to));
        let header = PacketHeaders {
            solicited: wr.solicited,
            ..PacketHeaders::new(opcode, self.sends.psn(), ext)
        };
        self.sends.advance(cx, true);
        *cx.packet = Some((to.ah.path, cx.qpc.headers_to(to.dest_qp, header, len)));
        Ok(())
    }

    /// A datagram. An error is the status of the current receive, and ends the queue pair.
    pub(super) fn handle_datagram(
        &mut self,
        cx: &mut Scope<'_, '_>,
        origin: &Origin,
        packet: RxPacket<'_>,
    ) -> Result<(), WcStatus> {
        let Some(deth) = packet
            .headers
            .ext()
            .deth()
            .filter(|deth| deth.qkey == cx.qpc.qkey || cx.seeded.is(Bug::QueueKeyIgnored))
        else {
            cx.count(|c| &mut c.bad_qkey);
            return Ok(());
        };
        if packet.payload_len > cx.qpc.mtu as usize {
            cx.count(|c| &mut c.bad_length);
            return Ok(());
        }
        let Some(receive) = self.receives.current(cx) else {
            cx.count(|c| &mut c.no_receive);
            return Ok(());
        };
        let byte_len = GRH_BYTES + packet.payload_len as u32;
        if u64::from(byte_len) > receive.len {
            cx.count(|c| &mut c.receive_too_small);
            return Ok(());
        }
        let extent = Extent { offset: 0, len: byte_len };
        cx.resolve(AccessKind::LocalWrite, &receive.wr.sges, extent)
            .map_err(|_| WcStatus::LocalProtectionError)?;
        *cx.insert = Insert::RouteHeader(route_header(origin, packet.headers, packet.payload_len));
        let ipv4 = origin.source.ip().to_canonical().is_ipv4();
        let bare = Completion::new(0, WcStatus::Success, WcOpcode::Recv, cx.qpc.qpn);
        let completion = Completion { byte_len, src_qp: Some(deth.src_qp), ipv4, ..bare };
        self.receives.complete(cx, packet.headers, completion);
        Ok(())
    }

    /// Clears everything without completions.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.sends.reset();
        self.receives.reset(srqs);
    }
}

fn check_buffers(cx: &mut Scope<'_, '_>, wr: &SendWr, len: u32) -> Result<(), WcStatus> {
    let extent = Extent { offset: 0, len };
    let checked = sg::check_all(cx.regions, cx.qpc.pd, AccessKind::LocalRead, &wr.sges)
        .map_err(|error| cx.count_protection_error(error));
    checked
        .and_then(|()| cx.resolve(AccessKind::LocalRead, &wr.sges, extent).map_err(|_refusal| ()))
        .map_err(|()| WcStatus::LocalProtectionError)
}

fn deth(qpc: &QpContext, to: &Datagram) -> Deth {
    let qkey = if to.qkey & OWN_QKEY_BIT != 0 { qpc.qkey } else { to.qkey };
    Deth { qkey, src_qp: qpc.qpn }
}

fn form(op: SendOp, deth: Deth) -> (Opcode, Ext) {
    match op {
        SendOp::SendImm(imm) => (Opcode::UdSendOnlyImm, Ext::DethImm(deth, imm)),
        _ => (Opcode::UdSendOnly, Ext::Deth(deth)),
    }
}

/// Returns why this service cannot carry a message of `len` bytes, if it cannot; `mtu` is the
/// port's.
pub(super) fn why_invalid(wr: &SendWr, len: u64, mtu: u32) -> Option<&'static str> {
    if !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
        Some("UD supports only SEND, with or without immediate")
    } else if wr.to.is_none() {
        Some("a datagram needs an address handle")
    } else {
        (len > u64::from(mtu)).then_some("a datagram must fit the port's MTU")
    }
}
