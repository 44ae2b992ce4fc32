//! Sends that need no packets ([`crate::direct`]): what this side of the connection checks, and the
//! completion. A refused request is posted as any other.

use core::mem;
use core::net::IpAddr;

use super::handed::Settled;
use super::held::Held;
use super::request::wc_opcode;
use super::requests::Fault;
use super::{Context, Kind, Qp};
use crate::counters::Counters;
use crate::direct::{
    Backlog, Direct, DirectKind, DirectRefusal, DirectRequest, Handed, Holding, MAX_DIRECT_BYTES,
    MAX_HANDED_BYTES, Message, MessageAck, MessageHeader, Posted,
};
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent, Placements};
use crate::seeded::{Bug, Seeded};
use crate::verbs::{
    Access, AsyncEvent, Completion, PdId, QpState, SendOp, SendWr, Transport, VerbsError, WcOpcode,
    WcStatus,
};

impl Qp {
    /// Carries a send out at once, queues it, or lets it wait for the packets before it. It is
    /// taken where it has to be kept: moving every request here would be much of what a direct one
    /// costs.
    pub(crate) fn post_direct(
        &mut self,
        cx: &mut Context<'_>,
        wr: &mut SendWr,
        direct: &mut dyn Direct,
    ) -> Result<Posted, VerbsError> {
        if self.has_held() {
            self.post_send(cx, mem::take(wr))?;
            cx.count(|c| &mut c.direct_held);
            return Ok(Posted::Held);
        }
        let refusal = match self.try_direct(cx, wr, direct) {
            Ok((Posted::Held, _)) => return self.hold(cx, wr),
            Ok((done, len)) => {
                self.held(|held| held.note_direct());
                if done == Posted::HandedOver {
                    self.keep_handed(mem::take(wr), len);
                }
                return Ok(done);
            }
            Err(refusal) => refusal,
        };
        if self.has_handed_over() {
            return self.hold(cx, wr);
        }
        let only_outstanding = refusal == DirectRefusal::Outstanding && self.state == QpState::Rts;
        if self.send_room().0 > 0
            && self.held(|held| held.should_wait(only_outstanding)) == Some(true)
        {
            return self.hold(cx, wr);
        }
        self.count_refusal(cx, refusal);
        self.post_send(cx, mem::take(wr)).map(|()| Posted::Queued)
    }

    /// Carries a send out or hands it over, if nothing is against that; a long one has to wait for
    /// its turn.
    fn try_direct(
        &mut self,
        cx: &mut Context<'_>,
        wr: &SendWr,
        direct: &mut dyn Direct,
    ) -> Result<(Posted, u32), DirectRefusal> {
        if let Some(imm) = immediate_of(&wr.op) {
            let len = self.may_be_handed_over(cx.seeded, wr, direct)?;
            self.hand_over(cx, wr, (len, imm), direct)?;
            return Ok((Posted::HandedOver, len));
        }
        let len = self.may_be_direct(cx.seeded, wr, direct)?;
        if len > MAX_DIRECT_BYTES {
            return Ok((Posted::Held, len));
        }
        let whole = Extent { offset: 0, len };
        self.carry_out(cx, wr, len, direct, whole)?;
        Ok((Posted::Done, len))
    }

    /// Lets a send wait until [`carry_out_held`](Qp::carry_out_held).
    fn hold(&mut self, cx: &mut Context<'_>, wr: &mut SendWr) -> Result<Posted, VerbsError> {
        let len = self.check_send(wr)?;
        let (vacant, limit) = self.send_room();
        if vacant == 0 {
            return Err(self.queue_full("send", limit));
        }
        self.held(|held| held.push(mem::take(wr), len));
        cx.count(|c| &mut c.direct_held);
        Ok(Posted::Held)
    }

    /// Carries out requests that have waited for the packets before them while `budget` lasts, and
    /// takes their bytes off it. If one is refused, all become packets.
    pub(crate) fn carry_out_held(
        &mut self,
        cx: &mut Context<'_>,
        direct: &mut dyn Direct,
        budget: &mut u32,
    ) -> Backlog {
        loop {
            if self.state == QpState::Rts {
                self.release_messages(cx, direct, budget);
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
            let permitted = self.may_be_direct(cx.seeded, wr, direct);
            let done = permitted.and_then(|_| self.carry_out(cx, wr, len, direct, part));
            let Kind::Rc(rc) = &mut self.kind else {
                return Backlog::Empty;
            };
            let is_behind_messages = rc.requester.has_handed_over();
            let held = rc.requester.held_mut();
            match done {
                Ok(()) if offset + part.len < len => held.advance(part.len),
                Ok(()) => {
                    held.pop();
                    held.note_direct();
                }
                // It has passed them, and packets may not.
                Err(_) if is_behind_messages => return Backlog::Waiting,
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

    /// SENDs are handed over when their turn comes. Where all requests wait, those that are never
    /// direct become packets then. What is behind them waits until they are acknowledged.
    fn release_messages(
        &mut self,
        cx: &mut Context<'_>,
        direct: &mut dyn Direct,
        budget: &mut u32,
    ) {
        let qpn = self.qpc.qpn;
        while let Kind::Rc(rc) = &self.kind
            && let Some((wr, _)) = rc.requester.held().front()
            && *budget > 0
        {
            let refusal = match (immediate_of(&wr.op), DirectKind::of(&wr.op)) {
                (Some(imm), _) => {
                    let wr = wr.clone();
                    let permitted = self.may_be_handed_over(cx.seeded, &wr, direct);
                    let done = permitted.and_then(|len| {
                        *budget = budget.saturating_sub(len.max(1));
                        self.hand_over(cx, &wr, (len, imm), direct).map(|()| len)
                    });
                    match done {
                        Ok(len) => {
                            self.held(|held| held.pop());
                            self.keep_handed(wr, len);
                            continue;
                        }
                        Err(refusal) => refusal,
                    }
                }
                (None, Some((kind @ DirectKind::Atomic(_), ..))) if !direct.reaches(qpn, kind) => {
                    DirectRefusal::NotDirect
                }
                (None, Some(_)) => return,
                (None, None) => DirectRefusal::NotDirect,
            };
            let Kind::Rc(rc) = &mut self.kind else { return };
            if rc.requester.has_handed_over() || !rc.requester.held().holds_all() {
                return;
            }
            rc.requester.release_first(&self.qpc);
            self.count_refusal(cx, refusal);
        }
    }

    /// Lets every send wait until [`carry_out_held`](Qp::carry_out_held), or no longer: those that
    /// wait become packets, unless they are behind messages that were handed over.
    pub(crate) fn hold_sends(&mut self, holding: Holding) {
        self.held(|held| held.set_holding(holding));
        if let (Kind::Rc(rc), Holding::Runs) = (&mut self.kind, holding)
            && !rc.requester.has_handed_over()
        {
            rc.requester.release_held(&self.qpc);
        }
    }

    fn has_handed_over(&self) -> bool {
        matches!(&self.kind, Kind::Rc(rc) if rc.requester.has_handed_over())
    }

    /// The length of a SEND that could be handed over now.
    fn may_be_handed_over(
        &mut self,
        seeded: Seeded,
        wr: &SendWr,
        direct: &dyn Direct,
    ) -> Result<u32, DirectRefusal> {
        if self.qpc.transport != Transport::Rc || !direct.takes_messages(self.qpc.qpn) {
            return Err(DirectRefusal::NotDirect);
        }
        let len = self.check_send(wr).ok().filter(|&len| len <= MAX_HANDED_BYTES);
        let len = len.ok_or(DirectRefusal::NotDirect)?;
        if self.is_paced() {
            return Err(DirectRefusal::Paced);
        }
        let Kind::Rc(rc) = &mut self.kind else {
            return Err(DirectRefusal::NotDirect);
        };
        match () {
            () if self.state != QpState::Rts
                || !rc.requester.has_no_packets() && !seeded.is(Bug::DirectOvertakes) =>
            {
                Err(DirectRefusal::Outstanding)
            }
            () if rc.requester.vacant() == 0 && !rc.requester.is_holding() => {
                Err(DirectRefusal::Local)
            }
            () if !rc.requester.handed_mut().may_hand_over() => Err(DirectRefusal::Resting),
            () => Ok(len),
        }
    }

    /// Hands a SEND over that [`may_be_handed_over`](Qp::may_be_handed_over). The caller then
    /// [keeps it](Qp::keep_handed).
    fn hand_over(
        &mut self,
        cx: &mut Context<'_>,
        wr: &SendWr,
        (len, imm): (u32, Option<u32>),
        direct: &mut dyn Direct,
    ) -> Result<(), DirectRefusal> {
        let Kind::Rc(rc) = &mut self.kind else {
            return Err(DirectRefusal::NotDirect);
        };
        let (whole, mut local) = (Extent { offset: 0, len }, Placements::new());
        let pd = self.qpc.pd;
        sg::resolve(cx.regions, pd, AccessKind::LocalRead, &wr.sges, whole, &mut local)
            .map_err(|_| DirectRefusal::Local)?;
        let header = MessageHeader {
            source: self.qpc.qpn,
            dest: self.qpc.peer.dest_qp,
            first_psn: self.first_psn,
            round: rc.requester.handed_mut().round(),
            imm,
            solicited: wr.solicited,
            len,
        };
        direct.hand_over(&Message { header, path: self.qpc.peer.path, local: &local })?;
        *cx.handed_over += 1;
        cx.count(|c| &mut c.direct_sends);
        cx.add(len.into(), |c| &mut c.direct_bytes);
        Ok(())
    }

    /// Keeps a SEND that was handed over until its acknowledgement.
    fn keep_handed(&mut self, wr: SendWr, len: u32) {
        if let Kind::Rc(rc) = &mut self.kind {
            rc.requester.handed_mut().push(wr, len);
        }
    }

    /// A local peer has decided on the oldest message of this round.
    pub(crate) fn handle_message_ack(
        &mut self,
        cx: &mut Context<'_>,
        handed: Handed,
        ack: MessageAck,
    ) {
        let Kind::Rc(rc) = &mut self.kind else { return };
        let messages = rc.requester.handed_mut();
        if messages.is_empty() || messages.round() != handed.round {
            return;
        }
        if ack == MessageAck::Lost {
            return self.fail_handed(cx);
        }
        match messages.settle(ack) {
            Settled::Waiting => {}
            Settled::Done { wr_id, signaled } => {
                *cx.handed_over -= 1;
                if signaled || cx.seeded.is(Bug::UnsignaledCompleted) {
                    let (status, opcode) = (WcStatus::Success, WcOpcode::Send);
                    let done = Completion::new(wr_id, status, opcode, self.qpc.qpn);
                    cx.complete(self.qpc.send_cq, done, None);
                }
            }
            Settled::RoundOver => {
                cx.add(messages.len() as u64, |c| &mut c.direct_sends_refused);
                self.release_handed(cx);
            }
        }
    }

    /// Messages without an acknowledgement become packets.
    pub(super) fn release_handed(&mut self, cx: &mut Context<'_>) {
        let Kind::Rc(rc) = &mut self.kind else { return };
        *cx.handed_over -= rc.requester.handed_mut().len() as u64;
        rc.requester.release_handed(&self.qpc);
    }

    /// There will be no more acknowledgements.
    fn fail_handed(&mut self, cx: &mut Context<'_>) {
        self.release_handed(cx);
        let fault = Fault { index: 0, status: WcStatus::RetryExceeded };
        self.record_retry_exceeded(cx, fault);
        self.fail_send(cx, fault);
    }

    /// A message that a local peer hands over: puts its placement into `cx.pieces` and completes a
    /// receive. Returns false if it is refused; the local peer then sends it as packets.
    pub(crate) fn handle_message(
        &mut self,
        cx: &mut Context<'_>,
        from: IpAddr,
        header: &MessageHeader,
    ) -> bool {
        let Qp { state, qpc, kind: Kind::Rc(rc), established, .. } = self else {
            return false;
        };
        let receives = matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let peer = &qpc.peer;
        let is_connected = receives
            && header.source == peer.dest_qp
            && header.first_psn == peer.remote_psn
            && from == peer.path.remote.ip().to_canonical();
        if is_connected && *state == QpState::Rtr && !*established {
            cx.events.raise(AsyncEvent::CommunicationEstablished(qpc.qpn));
        }
        *established |= is_connected;
        let is_taken = is_connected && rc.responder.take_message(&mut cx.of(qpc), header);
        if is_taken {
            cx.count(|c| &mut c.direct_receives);
            cx.add(header.len.into(), |c| &mut c.direct_bytes_received);
        } else {
            cx.count(|c| &mut c.direct_receives_refused);
        }
        is_taken
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

    /// Carries out a part of a send of `len` bytes that [`may_be_direct`](Qp::may_be_direct), and
    /// completes it if that is the last one.
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
        if wr.signaled || cx.seeded.is(Bug::UnsignaledCompleted) {
            let opcode = wc_opcode(wr.op);
            let bare = Completion::new(wr.wr_id, WcStatus::Success, opcode, self.qpc.qpn);
            let byte_len = if kind == DirectKind::Write { 0 } else { len };
            cx.complete(self.qpc.send_cq, Completion { byte_len, ..bare }, None);
        }
    }

    /// The length of a request that this side could carry out now.
    fn may_be_direct(
        &self,
        seeded: Seeded,
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
        match () {
            () if self.is_paced() => Err(DirectRefusal::Paced),
            () if self.state != QpState::Rts
                || !rc.requester.lets_pass(wr) && !seeded.is(Bug::DirectOvertakes) =>
            {
                Err(DirectRefusal::Outstanding)
            }
            () => Ok(len),
        }
    }

    fn is_paced(&self) -> bool {
        self.qpc.rate_limit_bps > 0 || !self.qpc.peer.congestion.is_off()
    }

    /// What local peers need to know about it: its domain, what its peer may do, and whether it
    /// serves requests, and READs.
    pub(crate) fn offers_directly(&self) -> (PdId, Access, bool, bool) {
        // The first request of a peer raises an event in RTR, so it is a packet.
        let connected = matches!(self.state, QpState::Rts | QpState::Sqd)
            || self.state == QpState::Rtr && self.established;
        let serves = connected && self.qpc.transport == Transport::Rc;
        (self.qpc.pd, self.qpc.access, serves, self.qpc.peer.max_dest_rd_atomic > 0)
    }
}

/// The immediate data of a SEND that may be handed over; `None` for other requests.
#[expect(clippy::option_option, reason = "SENDs have immediate data or not")]
fn immediate_of(op: &SendOp) -> Option<Option<u32>> {
    match *op {
        SendOp::Send => Some(None),
        SendOp::SendImm(imm) => Some(Some(imm)),
        _ => None,
    }
}

fn counter_of(refusal: DirectRefusal) -> Option<fn(&mut Counters) -> &mut u64> {
    Some(match refusal {
        DirectRefusal::NotDirect | DirectRefusal::Resting => return None,
        DirectRefusal::Outstanding => |c| &mut c.direct_refused_outstanding,
        DirectRefusal::Paced => |c| &mut c.direct_refused_paced,
        DirectRefusal::Local => |c| &mut c.direct_refused_local,
        DirectRefusal::Peer => |c| &mut c.direct_refused_peer,
        DirectRefusal::Region => |c| &mut c.direct_refused_region,
        DirectRefusal::System => |c| &mut c.direct_refused_system,
        DirectRefusal::Full => |c| &mut c.direct_refused_full,
    })
}
