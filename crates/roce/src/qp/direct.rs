//! Sends that need no packets ([`crate::direct`]): what this side of the connection checks, and the
//! completion. A refused request is posted as any other.

use super::{Context, Kind, Qp};
use crate::congestion::CongestionControl;
use crate::counters::Counters;
use crate::direct::{Direct, DirectKind, DirectRefusal, DirectRequest, MAX_DIRECT_BYTES};
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent, Placements};
use crate::planted::Bug;
use crate::verbs::{
    Access, Completion, PdId, QpState, SendOp, SendWr, Transport, VerbsError, WcOpcode, WcStatus,
};

impl Qp {
    /// Carries a send out at once, or queues it. Returns whether it is done.
    pub(crate) fn post_direct(
        &mut self,
        cx: &mut Context<'_>,
        wr: SendWr,
        direct: &mut dyn Direct,
    ) -> Result<bool, VerbsError> {
        match self.carry_out(cx, &wr, direct) {
            Ok(()) => Ok(true),
            Err(refusal) => {
                if let Some(counter) = counter_of(refusal) {
                    cx.count(counter);
                }
                self.post_send(cx, wr).map(|()| false)
            }
        }
    }

    fn carry_out(
        &self,
        cx: &mut Context<'_>,
        wr: &SendWr,
        direct: &mut dyn Direct,
    ) -> Result<(), DirectRefusal> {
        let (kind, remote_addr, rkey) = match wr.op {
            SendOp::Write { remote_addr, rkey } => (DirectKind::Write, remote_addr, rkey),
            SendOp::Read { remote_addr, rkey } => (DirectKind::Read, remote_addr, rkey),
            _ => return Err(DirectRefusal::NotDirect),
        };
        let len = self.may_be_direct(kind, wr)?;
        let mut local = Placements::new();
        let (access, opcode, byte_len) = match kind {
            DirectKind::Write => (AccessKind::LocalRead, WcOpcode::Write, 0),
            DirectKind::Read => (AccessKind::LocalWrite, WcOpcode::Read, len),
        };
        let whole = Extent { offset: 0, len };
        let resolved = sg::resolve(cx.regions, self.qpc.pd, access, &wr.sges, whole, &mut local);
        if resolved.is_err() || wr.signaled && !cx.cqs.has_room(self.qpc.send_cq) {
            return Err(DirectRefusal::Local);
        }
        let (path, qpn, dest_qp) = (self.qpc.peer.path, self.qpc.qpn, self.qpc.peer.dest_qp);
        let local = &local[..];
        let request = DirectRequest { kind, path, qpn, dest_qp, rkey, remote_addr, len, local };
        direct.carry_out(&request)?;
        cx.add(len.into(), |c| &mut c.direct_bytes);
        cx.count(|c| match kind {
            DirectKind::Write => &mut c.direct_writes,
            DirectKind::Read => &mut c.direct_reads,
        });
        if wr.signaled || cx.planted.is(Bug::UnsignaledCompleted) {
            let bare = Completion::new(wr.wr_id, WcStatus::Success, opcode, qpn);
            cx.complete(self.qpc.send_cq, Completion { byte_len, ..bare }, None);
        }
        Ok(())
    }

    /// The length of a request that this side could carry out now.
    fn may_be_direct(&self, kind: DirectKind, wr: &SendWr) -> Result<u32, DirectRefusal> {
        let Kind::Rc(rc) = &self.kind else {
            return Err(DirectRefusal::NotDirect);
        };
        let may_read = kind == DirectKind::Write || self.qpc.peer.max_rd_atomic > 0;
        let len = self.check_send(wr).ok().filter(|&len| len > 0 && may_read);
        let len = len.ok_or(DirectRefusal::NotDirect)?;
        let is_paced = self.qpc.rate_limit_bps > 0
            || !matches!(self.qpc.peer.congestion, CongestionControl::Off);
        match () {
            () if self.state != QpState::Rts || rc.requester.len() > 0 => {
                Err(DirectRefusal::Outstanding)
            }
            () if is_paced => Err(DirectRefusal::Paced),
            () if len > MAX_DIRECT_BYTES => Err(DirectRefusal::Length),
            () => Ok(len),
        }
    }

    /// What neighbours need to know about it: its domain, what its peer may do, and whether it serves
    /// requests, and READs.
    pub(crate) fn offers_directly(&self) -> (PdId, Access, bool, bool) {
        // The first request of a peer raises an event in RTR, so it is a packet.
        let connected = matches!(self.state, QpState::Rts | QpState::Sqd)
            || self.state == QpState::Rtr && self.established;
        let serves = connected && self.qpc.transport == Transport::Rc;
        (self.qpc.pd, self.qpc.access, serves, self.qpc.peer.max_dest_rd_atomic > 0)
    }
}

fn counter_of(refusal: DirectRefusal) -> Option<fn(&mut Counters) -> &mut u64> {
    Some(match refusal {
        DirectRefusal::NotDirect => return None,
        DirectRefusal::Outstanding => |c| &mut c.direct_refused_outstanding,
        DirectRefusal::Paced => |c| &mut c.direct_refused_paced,
        DirectRefusal::Length => |c| &mut c.direct_refused_length,
        DirectRefusal::Local => |c| &mut c.direct_refused_local,
        DirectRefusal::Peer => |c| &mut c.direct_refused_peer,
        DirectRefusal::Region => |c| &mut c.direct_refused_region,
        DirectRefusal::System => |c| &mut c.direct_refused_system,
    })
}
