//! Sends that need no packets ([`crate::direct`]): what this side of the connection checks, and the
//! completion. A refused request is posted as any other.

use super::held::Held;
use super::{Context, Kind, Qp};
use crate::congestion::CongestionControl;
use crate::counters::Counters;
use crate::direct::{
    Backlog, Direct, DirectKind, DirectRefusal, DirectRequest, Holding, MAX_DIRECT_BYTES, Posted,
};
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent, Placements};
use crate::planted::{Bug, Planted};
use crate::verbs::{
    Access, Completion, PdId, QpState, SendOp, SendWr, Transport, VerbsError, WcOpcode, WcStatus,
};

impl Qp {
    /// Carries a send out at once, queues it, or lets it wait for the packets before it.
    pub(crate) fn post_direct(
        &mut self,
        cx: &mut Context<'_>,
        wr: &mut SendWr,
        direct: &mut dyn Direct,
    ) -> Result<Posted, VerbsError> {
        if matches!(&self.kind, Kind::Rc(rc) if rc.requester.is_holding()) {
            self.post_send(cx, wr)?;
            cx.count(|c| &mut c.direct_held);
            return Ok(Posted::Held);
        }
        let Err(refusal) = self.carry_out(cx, wr, direct) else {
            self.held(|held| held.note_direct());
            return Ok(Posted::Done);
        };
        let only_outstanding = refusal == DirectRefusal::Outstanding && self.state == QpState::Rts;
        let (vacant, _) = self.send_room();
        if vacant > 0 && self.held(|held| held.should_wait(only_outstanding)) == Some(true) {
            let len = self.check_send(wr)?;
            self.held(|held| held.push(wr.clone(), len));
            cx.count(|c| &mut c.direct_held);
            return Ok(Posted::Held);
        }
        self.count_refusal(cx, refusal);
        self.post_send(cx, wr).map(|()| Posted::Queued)
    }

    /// Carries out requests that have waited for the packets before them while `budget` lasts, and takes their
    /// bytes off it. If one is refused, all become packets.
    pub(crate) fn carry_out_held(
        &mut self,
        cx: &mut Context<'_>,
        direct: &mut dyn Direct,
        budget: &mut u32,
    ) -> Backlog {
        loop {
            if self.state == QpState::Rts {
                self.release_messages();
            }
            let Kind::Rc(rc) = &self.kind else {
                return Backlog::Empty;
            };
            let Some(&(ref wr, len)) = rc.requester.held().front() else {
                return Backlog::Empty;
            };
            if self.state != QpState::Rts || !rc.requester.lets_pass(wr) {
                return Backlog::Waiting;
            }
            if *budget == 0 {
                return Backlog::Ready;
            }
            let done = self.carry_out(cx, wr, direct);
            let Kind::Rc(rc) = &mut self.kind else {
                return Backlog::Empty;
            };
            if let Err(refusal) = done {
                rc.requester.held_mut().note_refused();
                rc.requester.release_held(&self.qpc);
                self.count_refusal(cx, refusal);
                return Backlog::Empty;
            }
            rc.requester.held_mut().pop();
            rc.requester.held_mut().note_direct();
            *budget = budget.saturating_sub(len);
        }
    }

    /// Where all requests wait, those that are never direct become packets when their turn comes. What is behind them
    /// waits until they are acknowledged.
    fn release_messages(&mut self) {
        let Kind::Rc(rc) = &mut self.kind else { return };
        let is_message =
            |(wr, _): &(SendWr, u32)| !matches!(wr.op, SendOp::Write { .. } | SendOp::Read { .. });
        while rc.requester.held().holds_all() && rc.requester.held().front().is_some_and(is_message)
        {
            rc.requester.release_first(&self.qpc);
        }
    }

    /// Lets every send wait until [`carry_out_held`](Qp::carry_out_held), or no longer: those that wait become packets.
    pub(crate) fn hold_sends(&mut self, holding: Holding) {
        self.held(|held| held.set_holding(holding));
        if let (Kind::Rc(rc), Holding::Runs) = (&mut self.kind, holding) {
            rc.requester.release_held(&self.qpc);
        }
    }

    fn held<T>(&mut self, change: impl FnOnce(&mut Held) -> T) -> Option<T> {
        match &mut self.kind {
            Kind::Rc(rc) => Some(change(rc.requester.held_mut())),
            Kind::Uc(_) | Kind::Ud(_) => None,
        }
    }

    fn count_refusal(&self, cx: &mut Context<'_>, refusal: DirectRefusal) {
        if let Some(counter) = counter_of(refusal) {
            cx.count(counter);
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
        let len = self.may_be_direct(cx.planted, kind, wr, direct)?;
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
    fn may_be_direct(
        &self,
        planted: Planted,
        kind: DirectKind,
        wr: &SendWr,
        direct: &dyn Direct,
    ) -> Result<u32, DirectRefusal> {
        let Kind::Rc(rc) = &self.kind else {
            return Err(DirectRefusal::NotDirect);
        };
        if !direct.reaches(self.qpc.qpn) {
            return Err(DirectRefusal::NotDirect);
        }
        let may_read = kind == DirectKind::Write || self.qpc.peer.max_rd_atomic > 0;
        let len = self.check_send(wr).ok().filter(|&len| len > 0 && may_read);
        let len = len.ok_or(DirectRefusal::NotDirect)?;
        let is_paced = self.qpc.rate_limit_bps > 0
            || !matches!(self.qpc.peer.congestion, CongestionControl::Off);
        match () {
            () if is_paced => Err(DirectRefusal::Paced),
            () if len > MAX_DIRECT_BYTES => Err(DirectRefusal::Length),
            () if self.state != QpState::Rts
                || !rc.requester.lets_pass(wr) && !planted.is(Bug::DirectOvertakes) =>
            {
                Err(DirectRefusal::Outstanding)
            }
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
