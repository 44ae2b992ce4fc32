//! Sends that need no packets ([`crate::direct`]): what this side of the connection checks, and the
//! completion. A refused request is posted as any other.

use super::held::Held;
use super::request::wc_opcode;
use super::{Context, Kind, Qp};
use crate::congestion::CongestionControl;
use crate::counters::Counters;
use crate::direct::{
    Backlog, Direct, DirectKind, DirectRefusal, DirectRequest, Holding, MAX_DIRECT_BYTES, Posted,
};
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent, Placements};
use crate::planted::{Bug, Planted};
use crate::verbs::{Access, Completion, PdId, QpState, SendWr, Transport, VerbsError, WcStatus};

impl Qp {
    /// Carries a send out at once, queues it, or lets it wait for the packets before it.
    pub(crate) fn post_direct(
        &mut self,
        cx: &mut Context<'_>,
        wr: &mut SendWr,
        direct: &mut dyn Direct,
    ) -> Result<Posted, VerbsError> {
        if self.has_held() {
            self.post_send(cx, wr)?;
            cx.count(|c| &mut c.direct_held);
            return Ok(Posted::Held);
        }
        let refusal = match self.may_be_direct(cx.planted, wr, direct) {
            Ok(len) if len > MAX_DIRECT_BYTES => return self.hold(cx, wr),
            Ok(len) => match self.carry_out(cx, wr, len, direct, Extent { offset: 0, len }) {
                Ok(()) => {
                    self.held(|held| held.note_direct());
                    return Ok(Posted::Done);
                }
                Err(refusal) => refusal,
            },
            Err(refusal) => refusal,
        };
        let only_outstanding = refusal == DirectRefusal::Outstanding && self.state == QpState::Rts;
        if self.send_room().0 > 0
            && self.held(|held| held.should_wait(only_outstanding)) == Some(true)
        {
            return self.hold(cx, wr);
        }
        self.count_refusal(cx, refusal);
        self.post_send(cx, wr).map(|()| Posted::Queued)
    }

    /// Lets a send wait until [`carry_out_held`](Qp::carry_out_held).
    fn hold(&mut self, cx: &mut Context<'_>, wr: &SendWr) -> Result<Posted, VerbsError> {
        let len = self.check_send(wr)?;
        let (vacant, limit) = self.send_room();
        if vacant == 0 {
            return Err(self.queue_full("send", limit));
        }
        self.held(|held| held.push(wr.clone(), len));
        cx.count(|c| &mut c.direct_held);
        Ok(Posted::Held)
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
                self.release_messages(direct);
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
            let offset = rc.requester.held().done();
            let is_whole = matches!(DirectKind::of(&wr.op), Some((DirectKind::Atomic(_), ..)));
            let part = if is_whole { len } else { (len - offset).min(*budget) };
            let part = Extent { offset, len: part };
            let permitted = self.may_be_direct(cx.planted, wr, direct);
            let done = permitted.and_then(|_| self.carry_out(cx, wr, len, direct, part));
            let Kind::Rc(rc) = &mut self.kind else {
                return Backlog::Empty;
            };
            let held = rc.requester.held_mut();
            match done {
                Ok(()) if offset + part.len < len => held.advance(part.len),
                Ok(()) => {
                    held.pop();
                    held.note_direct();
                }
                Err(refusal) => {
                    held.note_refused();
                    rc.requester.release_held(&self.qpc);
                    self.count_refusal(cx, refusal);
                    return Backlog::Empty;
                }
            }
            *budget = budget.saturating_sub(part.len);
        }
    }

    /// Where all requests wait, those that are never direct become packets when their turn comes. What is behind them
    /// waits until they are acknowledged.
    fn release_messages(&mut self, direct: &dyn Direct) {
        let qpn = self.qpc.qpn;
        let Kind::Rc(rc) = &mut self.kind else { return };
        let is_message = |(wr, _): &(SendWr, u32)| match DirectKind::of(&wr.op) {
            Some((kind @ DirectKind::Atomic(_), ..)) => !direct.reaches(qpn, kind),
            other => other.is_none(),
        };
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

    /// Whether sends wait until [`carry_out_held`](Qp::carry_out_held).
    pub(crate) fn has_held(&self) -> bool {
        matches!(&self.kind, Kind::Rc(rc) if rc.requester.is_holding())
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

    /// Carries out a part of a send of `len` bytes that [`may_be_direct`](Qp::may_be_direct), and completes it if that is the
    /// last one.
    fn carry_out(
        &self,
        cx: &mut Context<'_>,
        wr: &SendWr,
        len: u32,
        direct: &mut dyn Direct,
        part: Extent,
    ) -> Result<(), DirectRefusal> {
        let (kind, remote_addr, rkey) = DirectKind::of(&wr.op).ok_or(DirectRefusal::NotDirect)?;
        let mut local = Placements::new();
        let access = match kind {
            DirectKind::Write => AccessKind::LocalRead,
            DirectKind::Read | DirectKind::Atomic(_) => AccessKind::LocalWrite,
        };
        let mut resolve =
            |extent| sg::resolve(cx.regions, self.qpc.pd, access, &wr.sges, extent, &mut local);
        // All of it has to be permitted, whatever the part.
        let mut resolved = resolve(Extent { offset: 0, len });
        if part.len < len {
            resolved = resolved.and_then(|()| resolve(part));
        }
        if resolved.is_err() || wr.signaled && !cx.cqs.has_room(self.qpc.send_cq) {
            return Err(DirectRefusal::Local);
        }
        let (path, qpn, dest_qp) = (self.qpc.peer.path, self.qpc.qpn, self.qpc.peer.dest_qp);
        let local = &local[..];
        let request =
            DirectRequest { kind, path, qpn, dest_qp, rkey, remote_addr, len, part, local };
        direct.carry_out(&request)?;
        cx.add(part.len.into(), |c| &mut c.direct_bytes);
        if part.offset + part.len == len {
            self.complete_direct(cx, wr, kind, len);
        }
        Ok(())
    }

    /// A send was carried out directly.
    fn complete_direct(&self, cx: &mut Context<'_>, wr: &SendWr, kind: DirectKind, len: u32) {
        cx.count(|c| match kind {
            DirectKind::Write => &mut c.direct_writes,
            DirectKind::Read => &mut c.direct_reads,
            DirectKind::Atomic(_) => &mut c.direct_atomics,
        });
        if wr.signaled || cx.planted.is(Bug::UnsignaledCompleted) {
            let opcode = wc_opcode(wr.op);
            let bare = Completion::new(wr.wr_id, WcStatus::Success, opcode, self.qpc.qpn);
            let byte_len = if kind == DirectKind::Write { 0 } else { len };
            cx.complete(self.qpc.send_cq, Completion { byte_len, ..bare }, None);
        }
    }

    /// The length of a request that this side could carry out now.
    fn may_be_direct(
        &self,
        planted: Planted,
        wr: &SendWr,
        direct: &dyn Direct,
    ) -> Result<u32, DirectRefusal> {
        let (kind, ..) = DirectKind::of(&wr.op).ok_or(DirectRefusal::NotDirect)?;
        let Kind::Rc(rc) = &self.kind else {
            return Err(DirectRefusal::NotDirect);
        };
        if !direct.reaches(self.qpc.qpn, kind) {
            return Err(DirectRefusal::NotDirect);
        }
        let may_read = kind == DirectKind::Write || self.qpc.peer.max_rd_atomic > 0;
        let len = self.check_send(wr).ok().filter(|&len| len > 0 && may_read);
        let len = len.ok_or(DirectRefusal::NotDirect)?;
        let is_paced = self.qpc.rate_limit_bps > 0
            || !matches!(self.qpc.peer.congestion, CongestionControl::Off);
        match () {
            () if is_paced => Err(DirectRefusal::Paced),
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
        DirectRefusal::Local => |c| &mut c.direct_refused_local,
        DirectRefusal::Peer => |c| &mut c.direct_refused_peer,
        DirectRefusal::Region => |c| &mut c.direct_refused_region,
        DirectRefusal::System => |c| &mut c.direct_refused_system,
    })
}
