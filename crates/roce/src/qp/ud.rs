//! The unreliable datagram service: one packet per message, to whoever is named (IBA 9.8.3).
//!
//! A datagram is heard when the queue key matches and a receive has room for it and for the 40 bytes
//! of route header in front; otherwise it is dropped in silence, with a counter, and the receive
//! stays for the next. That holds for datagrams longer than the receive too: the specification makes
//! no error of them on an unreliable service, and neither does the kernel's soft-RoCE. Only a
//! receive that cannot be written ends the queue pair.

use super::Context;
use super::grh::route_header;
use super::link::{Draft, Link};
use super::recv_queue::RecvQueue;
use super::send_queue::SendQueue;
use crate::endpoint::Insert;
use crate::planted::Bug;
use crate::region::Purpose;
use crate::sg::{self, Extent};
use crate::srq::SrqTable;
use crate::verbs::{Completion, Datagram, GRH_BYTES, SendOp, SendWr, WcOpcode, WcStatus};
use crate::wire::{Deth, Ext, Headers, Opcode};
use crate::world::Origin;

/// A request's queue key with this bit set stands for the sender's own (IBA 10.2.5).
const OWN_QKEY_BIT: u32 = 1 << 31;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Ud {
    pub(super) sends: SendQueue,
    pub(super) receives: RecvQueue,
}

impl Ud {
    /// Leaves in `cx.packet` the next datagram, and in `cx.pieces` where its payload lies.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        let Some((posted, _)) = self.sends.next() else {
            return Ok(());
        };
        let (wr, len) = (&posted.wr, posted.len);
        let to = wr.to.ok_or(WcStatus::LocalQpError)?;
        check_buffers(cx, link, wr, len)?;
        let (opcode, ext) = form(wr.op, deth(link, &to));
        let draft = Draft { solicited: wr.solicited, ..Draft::new(opcode, self.sends.psn(), ext) };
        self.sends.advance(cx, link, true);
        *cx.packet = Some((to.path, link.headers_to(to.dest_qp, draft, len)));
        Ok(())
    }

    /// A datagram. An error is how the current receive ends, and the queue pair with it.
    pub(super) fn handle_datagram(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        origin: &Origin,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), WcStatus> {
        let Some(deth) = headers
            .ext()
            .deth()
            .filter(|deth| deth.qkey == link.qkey || cx.planted.is(Bug::QueueKeyIgnored))
        else {
            cx.count(|c| &mut c.bad_qkey);
            return Ok(());
        };
        if payload_len > link.mtu as usize {
            cx.count(|c| &mut c.bad_length);
            return Ok(());
        }
        let Some(receive) = self.receives.current(cx) else {
            cx.count(|c| &mut c.no_receive);
            return Ok(());
        };
        let byte_len = GRH_BYTES + payload_len as u32;
        if u64::from(byte_len) > receive.len {
            cx.count(|c| &mut c.receive_too_small);
            return Ok(());
        }
        let extent = Extent { offset: 0, len: byte_len };
        cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent)
            .map_err(|_| WcStatus::LocalProtectionError)?;
        *cx.insert = Insert::RouteHeader(route_header(origin, headers, payload_len));
        let ipv4 = origin.source.ip().to_canonical().is_ipv4();
        let bare = Completion::new(0, WcStatus::Success, WcOpcode::Recv, link.qpn);
        let told = Completion { byte_len, src_qp: Some(deth.src_qp), ipv4, ..bare };
        self.receives.complete(cx, link, headers, told);
        Ok(())
    }

    /// Forgets everything without completions.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.sends.reset();
        self.receives.reset(srqs);
    }
}

fn check_buffers(cx: &mut Context<'_>, link: &Link, wr: &SendWr, len: u32) -> Result<(), WcStatus> {
    let extent = Extent { offset: 0, len };
    let checked = sg::check_all(cx.regions, link.pd, Purpose::LocalRead, &wr.sges)
        .map_err(|refusal| cx.count_refusal(refusal));
    checked
        .and_then(|()| {
            cx.stretch(link, Purpose::LocalRead, &wr.sges, extent).map_err(|_refusal| ())
        })
        .map_err(|()| WcStatus::LocalProtectionError)
}

fn deth(link: &Link, to: &Datagram) -> Deth {
    let qkey = if to.qkey & OWN_QKEY_BIT != 0 { link.qkey } else { to.qkey };
    Deth { qkey, src_qp: link.qpn }
}

fn form(op: SendOp, deth: Deth) -> (Opcode, Ext) {
    match op {
        SendOp::SendImm(imm) => (Opcode::UdSendOnlyImm, Ext::DethImm(deth, imm)),
        _ => (Opcode::UdSendOnly, Ext::Deth(deth)),
    }
}

/// Why the service cannot carry the work request, whose message has `len` bytes; `mtu` is the port's.
pub(super) fn refusal(wr: &SendWr, len: u64, mtu: u32) -> Option<&'static str> {
    if !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
        Some("datagrams are only sent, with or without immediate")
    } else if wr.to.is_none() {
        Some("a datagram needs to know where to go")
    } else {
        (len > u64::from(mtu)).then_some("a datagram is no longer than the port's MTU")
    }
}
