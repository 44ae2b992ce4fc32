//! Queue pairs: states, and the code shared by the transport services.
//!
//! Each service handles packets in its own module ([`rc`], [`uc`], [`ud`]). This module has what
//! they share: the state (IBA 10.3.1), which decides what may be posted and received, and the
//! handling of failures. [`transition`] has the legal state transitions.
//!
//! | state | receives | arriving packets | sends |
//! |---|---|---|---|
//! | Reset, Init | queued | dropped | refused |
//! | Rtr | queued | requests served | refused |
//! | Rts | queued | served | executed |
//! | Sqd | queued | served | queued; started ones are finished |
//! | Sqe | queued | served | flushed |
//! | Error | flushed | dropped | flushed |
//!
//! The verbs refuse receives in Reset; here they are accepted, so that a program that connects in
//! one step can post first.
//!
//! Nothing in here looks at payload, keeps time or allocates per packet.

mod codes;
mod congestion;
pub(crate) mod context;
pub(crate) mod delivery;
mod direct;
mod executor;
mod grh;
mod handed;
mod held;
mod inbound;
mod rc;
mod recovery;
mod recv_queue;
mod report;
mod request;
mod requester;
mod requests;
mod resources;
mod responder;
mod send_queue;
mod uc;
mod ud;

use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};

use crate::congestion::advertised::Level;
use crate::congestion::rtt::RttMeter;
use crate::congestion::{AdvertisedParams, Watermark, WindowReport};
use crate::counters::Counters;
use crate::cq::{CqTable, Pushed};
use crate::events::EventQueue;
use crate::io::{Origin, Telemetry};
use crate::memory::region::{AccessKind, ProtectionError, RegionTable};
use crate::memory::sg::{self, Extent, Placements};
use crate::report::{Cause, LastError, TimeoutReason};
use crate::seeded::{Bug, Seeded};
use crate::srq::{Receive, SrqSlot, SrqTable};
use crate::time::Time;
use crate::verbs::{
    Access, AsyncEvent, AttrMask, Completion, Connect, CqId, Ecn, MAX_MESSAGE_BYTES, Mtu, Path,
    PdId, QpAttr, QpConfig, QpState, Qpn, RecvWr, SendOp, SendWr, Sge, SrqId, Transport,
    VerbsError, WcOpcode, WcStatus,
    transition::{self, RETRY_BITS, RNR_TIMER_BITS},
};
use crate::wire::telemetry::Report;
use crate::wire::{DEFAULT_PKEY, Headers, Operation, Psn, Service, Syndrome};
use congestion::Congestion;
use context::{PacketHeaders, QpContext};
use delivery::Insert;
use executor::Fatal;
use rc::{Failure, Rc};
use recv_queue::RecvQueue;
use request::Request;
use requester::Requester;
use requests::Fault;
use responder::Responder;
use send_queue::SendQueue;
use uc::Uc;
use ud::Ud;

/// Most responses that READs may still miss when a request behind them is sent. Our responder
/// gathers that many; behind more, the request would be held back and have to be retransmitted.
pub(crate) const HELD_RESPONSES: u32 = 16;

/// Whether the peer at this path and queue pair number is stalled ([`Wire`](crate::io::Wire)).
pub(crate) type IsStalled<'a> = dyn FnMut(&Path, Qpn) -> bool + 'a;

/// The rest of the endpoint, for a queue pair handling one event.
pub(crate) struct Context<'a> {
    pub(crate) now: Time,
    pub(crate) regions: &'a mut RegionTable,
    pub(crate) cqs: &'a mut CqTable,
    pub(crate) srqs: &'a mut SrqTable,
    pub(crate) events: &'a mut EventQueue,
    /// The queue pair's counters.
    pub(crate) own: &'a mut Counters,
    /// The endpoint's counters.
    pub(crate) all: &'a mut Counters,
    /// The location of the payload of the packet being placed or built. It is filled in place:
    /// returning it by value would cost more than all other work per packet.
    pub(crate) pieces: &'a mut Placements,
    /// What is placed before that payload, or executed instead.
    pub(crate) insert: &'a mut Insert,
    /// See [`Delivery::owed_packets`](delivery::Delivery).
    pub(crate) owed_packets: &'a mut u32,
    /// The packet that was built, and its path; in place for the same reason.
    pub(crate) packet: &'a mut Option<(Path, Headers)>,
    /// Messages of the endpoint that are handed over and without an acknowledgement.
    pub(crate) handed_over: &'a mut u64,
    /// A completion was lost because its queue was full.
    pub(crate) cq_overflowed: bool,
    pub(crate) seeded: Seeded,
}

impl<'a> Context<'a> {
    pub(crate) fn count(&mut self, which: impl Fn(&mut Counters) -> &mut u64) {
        self.add(1, which);
    }

    pub(crate) fn add(&mut self, amount: u64, which: impl Fn(&mut Counters) -> &mut u64) {
        *which(self.own) += amount;
        *which(self.all) += amount;
    }

    fn count_protection_error(&mut self, error: ProtectionError) {
        self.count(|c| match error {
            ProtectionError::Key => &mut c.bad_key,
            ProtectionError::Pd => &mut c.bad_pd,
            ProtectionError::Access => &mut c.bad_access,
            ProtectionError::Bounds => &mut c.bad_bounds,
        });
    }

    fn take_shared(&mut self, srq: SrqId) -> Option<Receive> {
        self.srqs.take(srq, self.events)
    }

    fn complete(&mut self, cq: CqId, completion: Completion, srq_slot: Option<SrqSlot>) {
        let pushed = self.cqs.push(cq, completion, srq_slot);
        if self.seeded.is(Bug::CompletionsSwapped) {
            self.cqs.swap_last(cq);
        }
        if pushed == Pushed::Added {
            return;
        }
        // Its completion is lost, so the receive is never reported.
        srq_slot.into_iter().for_each(|srq_slot| self.srqs.settle(srq_slot));
        self.cq_overflowed = true;
        self.count(|c| &mut c.cq_overflows);
        if pushed == Pushed::Overran {
            self.events.raise(AsyncEvent::CqError(cq));
        }
    }

    /// An event on the queue pair with this context.
    fn of<'b>(&'b mut self, qpc: &'b QpContext) -> Scope<'a, 'b> {
        Scope { qpc, cx: self }
    }
}

/// A packet that arrived, without its payload.
#[derive(Clone, Copy)]
pub(crate) struct RxPacket<'a> {
    headers: &'a Headers,
    payload_len: usize,
}

/// An event on one queue pair: the queue pair's own context, and the rest of the endpoint.
pub(crate) struct Scope<'a, 'b> {
    qpc: &'b QpContext,
    cx: &'b mut Context<'a>,
}

impl<'a> Deref for Scope<'a, '_> {
    type Target = Context<'a>;

    fn deref(&self) -> &Context<'a> {
        self.cx
    }
}

impl<'a> DerefMut for Scope<'a, '_> {
    fn deref_mut(&mut self) -> &mut Context<'a> {
        self.cx
    }
}

impl Scope<'_, '_> {
    /// Resolves a byte range of a message in registered memory, or counts a protection error.
    fn resolve(
        &mut self,
        kind: AccessKind,
        sges: &[Sge],
        extent: Extent,
    ) -> Result<(), ProtectionError> {
        let cx = &mut *self.cx;
        sg::resolve(cx.regions, self.qpc.pd, kind, sges, extent, cx.pieces)
            .inspect_err(|&error| cx.count_protection_error(error))
    }

    /// Emits a packet to the peer, with `payload_len` bytes of payload.
    fn emit(&mut self, header: PacketHeaders, payload_len: u32) {
        *self.cx.packet = Some((self.qpc.peer.path, self.qpc.headers(header, payload_len)));
    }

    fn complete_send(&mut self, request: &Request, status: WcStatus, byte_len: u32) {
        let opcode = request::wc_opcode(request.wr.op);
        let bare = Completion::new(request.wr.wr_id, status, opcode, self.qpc.qpn);
        self.cx.complete(self.qpc.send_cq, Completion { byte_len, ..bare }, None);
    }

    fn fail_recv(&mut self, receive: &Receive, status: WcStatus) {
        let bare = Completion::new(receive.wr.wr_id, status, WcOpcode::Recv, self.qpc.qpn);
        self.cx.complete(self.qpc.recv_cq, bare, receive.srq_slot);
    }
}

/// The service, with its queues.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most queue pairs are reliable connections")]
enum Kind {
    Rc(Rc),
    Uc(Uc),
    Ud(Ud),
}

/// One queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    state: QpState,
    qpc: QpContext,
    first_psn: Psn,
    srq: Option<SrqId>,
    /// A packet has arrived since it was reset.
    established: bool,
    /// Raise an event when the send queue has drained.
    drain_event: bool,
    congestion: Congestion,
    /// Why it last failed.
    last_error: Option<LastError>,
    kind: Kind,
}

impl Qp {
    /// `unconnected` is used until the peer is known; `port_mtu` bounds datagrams.
    pub(crate) fn new(
        qpn: Qpn,
        config: &QpConfig,
        first_psn: Psn,
        unconnected: Connect,
        port_mtu: Mtu,
    ) -> Qp {
        let QpConfig { transport, pd, send_cq, recv_cq, max_send_wr, max_recv_wr, srq } = *config;
        let qpc = QpContext {
            qpn,
            transport,
            pd,
            send_cq,
            recv_cq,
            mtu: port_mtu.bytes(),
            access: Access::ALL,
            qkey: 0,
            rate_limit_bps: 0,
            peer: unconnected,
        };
        let receives = RecvQueue::new(max_recv_wr, srq);
        let kind = match transport {
            Transport::Rc => {
                let requester = Requester::new(max_send_wr, first_psn);
                Kind::Rc(Rc::new(requester, Responder::new(receives)))
            }
            Transport::Uc => Kind::Uc(Uc::new(SendQueue::new(max_send_wr), receives)),
            Transport::Ud => Kind::Ud(Ud { sends: SendQueue::new(max_send_wr), receives }),
        };
        let state = QpState::Reset;
        Qp {
            state,
            congestion: Congestion::start(&qpc),
            qpc,
            first_psn,
            srq,
            established: false,
            drain_event: false,
            last_error: None,
            kind,
        }
    }

    /// Round-trip times, for reliable connections.
    pub(crate) fn rtt(&self) -> Option<&RttMeter> {
        match &self.kind {
            Kind::Rc(rc) => Some(rc.requester.rtt()),
            Kind::Uc(_) | Kind::Ud(_) => None,
        }
    }

    /// The rate that congestion control allows now.
    pub(crate) fn rate_bps(&self) -> Option<u64> {
        self.congestion.rate_bps()
    }

    /// The state of congestion control by delay.
    pub(crate) fn window_report(&self) -> Option<WindowReport> {
        self.congestion.window_report()
    }

    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    pub(crate) fn qpn(&self) -> Qpn {
        self.qpc.qpn
    }

    pub(crate) fn transport(&self) -> Transport {
        self.qpc.transport
    }

    /// Where the next packet goes; `None` if no datagram is next.
    pub(crate) fn next_destination(&self) -> Option<(Path, Qpn)> {
        match &self.kind {
            Kind::Rc(_) | Kind::Uc(_) => Some((self.qpc.peer.path, self.qpc.peer.dest_qp)),
            Kind::Ud(ud) => {
                let to = ud.sends.next()?.0.wr.to?;
                Some((to.ah.path, to.dest_qp))
            }
        }
    }

    pub(crate) fn pd(&self) -> PdId {
        self.qpc.pd
    }

    pub(crate) fn cqs(&self) -> [CqId; 2] {
        [self.qpc.send_cq, self.qpc.recv_cq]
    }

    pub(crate) fn srq(&self) -> Option<SrqId> {
        self.srq
    }

    fn expect_state(&self, allowed: &[QpState]) -> Result<(), VerbsError> {
        let (qpn, state) = (self.qpc.qpn.get(), self.state);
        let wrong = VerbsError::WrongState { qpn, state: state.name() };
        allowed.contains(&state).then_some(()).ok_or(wrong)
    }

    fn invalid(&self, why: &'static str) -> VerbsError {
        VerbsError::Invalid { qpn: self.qpc.qpn.get(), why }
    }

    // ---- states --------------------------------------------------------------------------------

    /// Changes state and attributes; does nothing if that is not legal.
    pub(crate) fn modify(
        &mut self,
        cx: &mut Context<'_>,
        attr: &QpAttr,
        port_mtu: Mtu,
    ) -> Result<(), VerbsError> {
        let from = self.state;
        let to = if attr.mask.contains(AttrMask::STATE) { attr.state } else { from };
        transition::check(self.qpc.transport, from, to, attr).map_err(|why| {
            let (qpn, from, to) = (self.qpc.qpn.get(), from.name(), to.name());
            VerbsError::Transition { qpn, from, to, why }
        })?;
        transition::check_values(attr, port_mtu).map_err(|why| self.invalid(why))?;
        self.set_attributes(attr);
        if attr.mask.contains(AttrMask::RATE_LIMIT) {
            self.congestion.set_limit(attr.rate_limit_bps);
        }
        if let Kind::Rc(rc) = &mut self.kind {
            rc.requester.follow(&self.qpc, attr.mask);
        }
        if to == QpState::Rtr {
            self.qpc.peer.window_packets = attr.window_packets.max(1);
            self.qpc.peer.reliability = attr.reliability;
            self.qpc.peer.congestion = attr.congestion.clone();
        }
        self.enter(cx, from, to);
        Ok(())
    }

    fn set_attributes(&mut self, attr: &QpAttr) {
        let Qp { qpc, first_psn, drain_event, .. } = self;
        let peer = &mut qpc.peer;
        set(attr, AttrMask::EN_SQD_ASYNC_NOTIFY, drain_event, attr.sqd_notify);
        set(attr, AttrMask::ACCESS_FLAGS, &mut qpc.access, attr.access);
        set(attr, AttrMask::QKEY, &mut qpc.qkey, attr.qkey);
        set(attr, AttrMask::RATE_LIMIT, &mut qpc.rate_limit_bps, attr.rate_limit_bps);
        set(attr, AttrMask::AV, &mut peer.path, attr.path);
        set(attr, AttrMask::PATH_MTU, &mut peer.mtu, attr.mtu);
        set(attr, AttrMask::PATH_MTU, &mut qpc.mtu, attr.mtu.bytes());
        set(attr, AttrMask::TIMEOUT, &mut peer.timeout, attr.timeout);
        set(attr, AttrMask::RETRY_CNT, &mut peer.retry_count, attr.retry_count & RETRY_BITS);
        set(attr, AttrMask::RNR_RETRY, &mut peer.rnr_retry, attr.rnr_retry & RETRY_BITS);
        set(attr, AttrMask::RQ_PSN, &mut peer.remote_psn, attr.rq_psn);
        set(attr, AttrMask::SQ_PSN, first_psn, attr.sq_psn);
        set(attr, AttrMask::MAX_QP_RD_ATOMIC, &mut peer.max_rd_atomic, attr.max_rd_atomic);
        set(
            attr,
            AttrMask::MAX_DEST_RD_ATOMIC,
            &mut peer.max_dest_rd_atomic,
            attr.max_dest_rd_atomic,
        );
        let min_rnr_timer = attr.min_rnr_timer & RNR_TIMER_BITS;
        set(attr, AttrMask::MIN_RNR_TIMER, &mut peer.min_rnr_timer, min_rnr_timer);
        set(attr, AttrMask::DEST_QPN, &mut peer.dest_qp, attr.dest_qp);
    }

    /// The effects of a legal transition besides setting attributes.
    fn enter(&mut self, cx: &mut Context<'_>, from: QpState, to: QpState) {
        if to == QpState::Error {
            return self.fail(cx);
        }
        self.state = to;
        match (from, to) {
            (_, QpState::Reset) => self.reset(cx),
            (QpState::Init, QpState::Rtr) => self.start_receiving(),
            (QpState::Rtr, QpState::Rts) => self.start_sending(),
            (QpState::Rts, QpState::Sqd) => self.pause(true),
            // A queue pair that drained when it failed is paused in SQE, too.
            (QpState::Sqd | QpState::Sqe, QpState::Rts) => self.pause(false),
            _ => {}
        }
    }

    fn start_receiving(&mut self) {
        self.congestion = Congestion::start(&self.qpc);
        match &mut self.kind {
            Kind::Rc(rc) => rc.responder.start(&self.qpc),
            Kind::Uc(uc) => uc.start(self.qpc.peer.remote_psn),
            Kind::Ud(_) => {}
        }
    }

    fn start_sending(&mut self) {
        match &mut self.kind {
            Kind::Rc(rc) => {
                rc.requester.reset(self.first_psn);
                rc.requester.start(&self.qpc);
                rc.requester.limit_window(self.congestion.window_packets());
            }
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.start(self.first_psn),
        }
    }

    fn pause(&mut self, paused: bool) {
        self.drain_event &= paused;
        match &mut self.kind {
            Kind::Rc(rc) => rc.requester.pause(paused),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.pause(paused),
        }
    }

    /// Discards all work and all unpolled completions. Receives of a shared queue return to it, in
    /// the order in which they were taken.
    pub(crate) fn reset(&mut self, cx: &mut Context<'_>) {
        let mut srq_slots = Vec::new();
        for cq in self.cqs() {
            cx.cqs.purge(cq, self.qpc.qpn, &mut srq_slots);
        }
        (self.established, self.drain_event) = (false, false);
        self.congestion = Congestion::default();
        self.qpc.rate_limit_bps = 0;
        match &mut self.kind {
            Kind::Rc(rc) => {
                *cx.handed_over -= rc.requester.reset(self.first_psn) as u64;
                rc.responder.reset(cx.srqs);
            }
            Kind::Uc(uc) => uc.reset(cx.srqs),
            Kind::Ud(ud) => ud.reset(cx.srqs),
        }
        // In front of those it had taken since.
        cx.srqs.give_back(srq_slots.into_iter());
    }

    /// All current attributes.
    pub(crate) fn query(&self) -> QpAttr {
        let qpc = &self.qpc;
        QpAttr {
            mask: AttrMask::FIELDS,
            state: self.state,
            cur_state: self.state,
            sqd_notify: self.drain_event,
            access: qpc.access,
            qkey: qpc.qkey,
            sq_psn: self.first_psn,
            rate_limit_bps: qpc.rate_limit_bps,
            ..QpAttr::of(&qpc.peer)
        }
    }

    /// Raises the event of a drained send queue if it is due.
    pub(crate) fn notice_drained(&mut self, cx: &mut Context<'_>) {
        if self.drain_event && self.state == QpState::Sqd && self.is_drained() {
            self.drain_event = false;
            cx.events.raise(AsyncEvent::SendQueueDrained(self.qpc.qpn));
        }
    }

    fn is_drained(&self) -> bool {
        match &self.kind {
            Kind::Rc(rc) => rc.requester.is_drained(),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.is_drained(),
        }
    }

    // ---- failures ------------------------------------------------------------------------------

    /// Stops the queue pair and flushes its work requests; nothing more is sent.
    fn fail(&mut self, cx: &mut Context<'_>) {
        self.record_peer_failure(cx, Cause::Program, None);
        self.enter_error(cx, None, WcStatus::WrFlushError, false);
    }

    /// Stops it because of an error that none of its work requests reports.
    pub(crate) fn fail_fatally(&mut self, cx: &mut Context<'_>) {
        if self.state != QpState::Error {
            cx.events.raise(AsyncEvent::QpFatal(self.qpc.qpn));
        }
        self.record_peer_failure(cx, Cause::CqOverrun, None);
        self.enter_error(cx, None, WcStatus::WrFlushError, false);
    }

    /// `psn` is that of the packet that caused it, if one did.
    fn handle_failure(&mut self, cx: &mut Context<'_>, failure: Failure, psn: Option<Psn>) {
        self.record_failure(cx, &failure, psn);
        match failure {
            Failure::Send(fault) => self.fail_send(cx, fault),
            Failure::Request(fatal) => self.refuse_request(cx, fatal),
        }
    }

    /// A reliable connection fails with its first failed send; the other services only stop
    /// sending.
    fn fail_send(&mut self, cx: &mut Context<'_>, fault: Fault) {
        match fault.status {
            WcStatus::RetryExceeded => cx.count(|c| &mut c.retries_exceeded),
            WcStatus::RnrRetryExceeded => cx.count(|c| &mut c.rnr_retries_exceeded),
            _ => {}
        }
        if self.qpc.transport == Transport::Rc {
            return self.enter_error(cx, Some(fault), WcStatus::WrFlushError, false);
        }
        self.flush_sends(cx, Some(fault));
        self.state = QpState::Sqe;
        cx.count(|c| &mut c.send_queue_errors);
    }

    fn refuse_request(&mut self, cx: &mut Context<'_>, fatal: Fatal) {
        let qpn = self.qpc.qpn;
        match fatal.nak {
            // The receive reports it.
            _ if fatal.recv_status != WcStatus::WrFlushError => {}
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => {
                cx.events.raise(AsyncEvent::QpRequestError(qpn));
            }
            Syndrome::RemoteAccess => cx.events.raise(AsyncEvent::QpAccessError(qpn)),
            _ => cx.events.raise(AsyncEvent::QpFatal(qpn)),
        }
        self.enter_error(cx, None, fatal.recv_status, true);
    }

    /// Completes every work request: `fault` gives the status of one send, `recv_status` that of
    /// the oldest receive, all others are flushed.
    fn enter_error(
        &mut self,
        cx: &mut Context<'_>,
        fault: Option<Fault>,
        recv_status: WcStatus,
        keep_answers: bool,
    ) {
        if self.state == QpState::Error {
            return;
        }
        self.state = QpState::Error;
        cx.count(|c| &mut c.qp_errors);
        if let (Kind::Rc(rc), true) = (&mut self.kind, cx.seeded.is(Bug::FlushForgotten)) {
            rc.requester.take_front();
        }
        self.flush_sends(cx, fault);
        self.flush_receives(cx, recv_status);
        if let Kind::Rc(rc) = &mut self.kind {
            rc.requester.stop();
            rc.responder.stop(keep_answers);
        }
        if self.srq.is_some() {
            cx.events.raise(AsyncEvent::LastWqeReached(self.qpc.qpn));
        }
    }

    fn flush_sends(&mut self, cx: &mut Context<'_>, fault: Option<Fault>) {
        let status_of = |index| {
            let own = fault.filter(|fault| fault.index == index).map(|fault| fault.status);
            own.unwrap_or(WcStatus::WrFlushError)
        };
        self.release_handed(cx);
        if let Kind::Rc(rc) = &mut self.kind {
            rc.requester.release_held(&self.qpc);
        }
        let mut index = 0;
        while self.flush_send(cx, status_of(index)) {
            index += 1;
        }
    }

    /// Completes the oldest send; false if there is none.
    fn flush_send(&mut self, cx: &mut Context<'_>, status: WcStatus) -> bool {
        let qpc = &self.qpc;
        let flushed = match &mut self.kind {
            Kind::Rc(rc) => rc
                .requester
                .take_front()
                .map(|request| cx.of(qpc).complete_send(&request, status, 0)),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => {
                sends.take_front().map(|posted| posted.complete(&mut cx.of(qpc), status))
            }
        };
        flushed.is_some()
    }

    fn flush_receives(&mut self, cx: &mut Context<'_>, mut status: WcStatus) {
        while let Some(receive) = self.take_receive() {
            cx.of(&self.qpc).fail_recv(&receive, status);
            status = WcStatus::WrFlushError;
        }
        if let Kind::Rc(rc) = &mut self.kind {
            rc.responder.give_back(cx.srqs);
        }
    }

    fn take_receive(&mut self) -> Option<Receive> {
        match &mut self.kind {
            Kind::Rc(rc) => rc.responder.take_front(),
            Kind::Uc(uc) => uc.inbound.receives.take_own(),
            Kind::Ud(ud) => ud.receives.take_own(),
        }
    }

    // ---- verbs ---------------------------------------------------------------------------------

    pub(crate) fn post_send(
        &mut self,
        cx: &mut Context<'_>,
        mut wr: SendWr,
    ) -> Result<(), VerbsError> {
        use QpState::{Error, Rts, Sqd, Sqe};
        self.expect_state(&[Rts, Sqd, Sqe, Error])?;
        let len = self.check_send(&wr)?;
        let (vacant, limit) = self.send_room();
        if vacant == 0 {
            return Err(self.queue_full("send", limit));
        }
        // Windows of type 1 get their new key now.
        if let SendOp::BindWindow(binding) = &mut wr.op {
            cx.regions.draw_key(binding);
        }
        wr.fence &= !cx.seeded.is(Bug::FenceIgnored);
        match &mut self.kind {
            Kind::Rc(rc)
                if rc.requester.is_holding()
                    || rc.requester.has_handed_over()
                    || self.state == Rts && rc.requester.held().holds_all() =>
            {
                rc.requester.hold(wr, len);
            }
            Kind::Rc(rc) => rc.requester.post(&self.qpc, wr, len),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.post(wr, len),
        }
        if matches!(self.state, Error | Sqe) {
            self.flush_send(cx, WcStatus::WrFlushError);
        }
        Ok(())
    }

    /// Whether all these would be accepted if posted now, one after the other.
    pub(crate) fn check_sends<'w>(
        &self,
        mut wrs: impl ExactSizeIterator<Item = &'w SendWr>,
    ) -> Result<(), VerbsError> {
        use QpState::{Error, Rts, Sqd, Sqe};
        self.expect_state(&[Rts, Sqd, Sqe, Error])?;
        let (vacant, limit) = self.send_room();
        // In these states nothing stays in the queue.
        if wrs.len() > vacant && !matches!(self.state, Error | Sqe) {
            return Err(self.queue_full("send", limit));
        }
        wrs.try_for_each(|wr| self.check_send(wr).map(|_len| ()))
    }

    /// Sends that may still be posted, and the limit.
    fn send_room(&self) -> (usize, u32) {
        match &self.kind {
            Kind::Rc(rc) => (rc.requester.vacant(), rc.requester.limit()),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => {
                (sends.vacant(), sends.limit())
            }
        }
    }

    /// Posted sends that have not completed.
    pub(crate) fn sends_under_way(&self) -> u32 {
        let (vacant, limit) = self.send_room();
        limit.saturating_sub(u32::try_from(vacant).unwrap_or(limit))
    }

    /// The length of a message that this service can carry.
    fn check_send(&self, wr: &SendWr) -> Result<u32, VerbsError> {
        let bytes = sg::total_bytes(&wr.sges);
        let why = match self.qpc.transport {
            Transport::Rc => request::why_invalid(wr, bytes),
            Transport::Uc => uc::why_invalid(wr, bytes),
            Transport::Ud => ud::why_invalid(wr, bytes, self.qpc.mtu),
        };
        match why {
            Some(why) => Err(self.invalid(why)),
            None => message_len(bytes),
        }
    }

    pub(crate) fn post_recv(&mut self, cx: &mut Context<'_>, wr: RecvWr) -> Result<(), VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::SharedReceives(self.qpc.qpn.get()));
        }
        if self.state == QpState::Error {
            cx.of(&self.qpc).fail_recv(&Receive::new(wr), WcStatus::WrFlushError);
            return Ok(());
        }
        let receives = self.receives();
        if receives.is_full() {
            return Err(self.queue_full("receive", receives.limit()));
        }
        match &mut self.kind {
            Kind::Rc(rc) => rc.responder.post(wr),
            Kind::Uc(uc) => uc.inbound.receives.post(wr),
            Kind::Ud(ud) => ud.receives.post(wr),
        }
        Ok(())
    }

    fn receives(&self) -> &RecvQueue {
        match &self.kind {
            Kind::Rc(rc) => rc.responder.receives(),
            Kind::Uc(uc) => &uc.inbound.receives,
            Kind::Ud(ud) => &ud.receives,
        }
    }

    fn queue_full(&self, queue: &'static str, limit: u32) -> VerbsError {
        VerbsError::QueueFull { qpn: self.qpc.qpn.get(), queue, limit }
    }

    // ---- packets and time ----------------------------------------------------------------------

    /// Puts the placement of the payload into `cx`.
    pub(crate) fn handle_packet(
        &mut self,
        cx: &mut Context<'_>,
        origin: &Origin,
        headers: &Headers,
        payload_len: usize,
    ) {
        if !self.accepts(cx, origin, headers) {
            return;
        }
        if origin.ecn == Ecn::Ce {
            self.note_congestion(cx);
        }
        if self.state == QpState::Rtr && !self.established {
            cx.events.raise(AsyncEvent::CommunicationEstablished(self.qpc.qpn));
        }
        self.established = true;
        let packet = RxPacket { headers, payload_len };
        if headers.hint() != 0 && self.is_advertised() {
            self.execute_with_hint(cx, origin, packet);
        } else {
            self.execute(cx, origin, packet);
        }
        self.tell_controller(cx);
        let placed = sg::placed_bytes(cx.pieces);
        cx.add(placed, |c| &mut c.bytes_received);
    }

    /// An accepted packet that was held back because READs before it were outstanding.
    pub(crate) fn handle_held(
        &mut self,
        cx: &mut Context<'_>,
        headers: &Headers,
        payload_len: usize,
    ) {
        let Kind::Rc(rc) = &mut self.kind else {
            return;
        };
        // Responding to the READs may have failed.
        if self.state == QpState::Error {
            return;
        }
        let packet = RxPacket { headers, payload_len };
        if let Err(fatal) = rc.responder.handle_held(&mut cx.of(&self.qpc), packet) {
            self.handle_failure(cx, fatal.into(), Some(headers.bth().psn));
        }
        let placed = sg::placed_bytes(cx.pieces);
        cx.add(placed, |c| &mut c.bytes_received);
    }

    fn execute(&mut self, cx: &mut Context<'_>, origin: &Origin, packet: RxPacket<'_>) {
        let qpc = &self.qpc;
        let receive_error = match &mut self.kind {
            Kind::Rc(rc) => {
                if let Err(failure) = rc.handle_packet(&mut cx.of(qpc), packet) {
                    self.handle_failure(cx, failure, Some(packet.headers.bth().psn));
                }
                return;
            }
            Kind::Uc(uc) => uc.handle_request(&mut cx.of(qpc), packet),
            Kind::Ud(ud) => ud.handle_datagram(&mut cx.of(qpc), origin, packet),
        };
        if let Err(status) = receive_error {
            self.record_peer_failure(cx, Cause::Receive(status), Some(packet.headers.bth().psn));
            self.enter_error(cx, None, status, false);
        }
    }

    /// Reports the progress of request packets to congestion control.
    fn tell_controller(&mut self, cx: &mut Context<'_>) {
        if let Kind::Rc(rc) = &mut self.kind
            && let Some(progress) = rc.requester.take_progress()
        {
            let competitions = self.congestion.note_progress(cx.now, progress);
            if competitions > 0 {
                cx.add(competitions, |c| &mut c.competitions);
            }
            rc.requester.limit_window(self.congestion.window_packets());
        }
    }

    /// A packet that says something about our window, or its sender's demand.
    #[cold]
    fn execute_with_hint(&mut self, cx: &mut Context<'_>, origin: &Origin, packet: RxPacket<'_>) {
        let level = Level::from_bits(packet.headers.hint());
        let expected = level.and_then(|level| self.handle_window(cx, packet.headers, level));
        self.execute(cx, origin, packet);
        if let (Some(level), Some(expected)) = (level, expected) {
            self.handle_demand(cx, packet.headers, level, expected);
        }
    }

    /// What an acknowledgement says about our window. It has to acknowledge something that is under
    /// way, or everything before it: one from another time says nothing any more. Returns the PSN
    /// of the peer's next request.
    fn handle_window(&mut self, cx: &Context<'_>, headers: &Headers, level: Level) -> Option<Psn> {
        let Kind::Rc(rc) = &mut self.kind else {
            return None;
        };
        let bth = headers.bth();
        if bth.opcode.operation() == Operation::Acknowledge && rc.requester.is_current(bth.psn) {
            self.congestion.handle_hint(cx.now, Operation::Acknowledge, level);
            rc.requester.limit_window(self.congestion.window_packets());
        }
        Some(rc.responder.expected())
    }

    /// What data says about the peer's demand: data that was executed, or came early.
    fn handle_demand(&mut self, cx: &Context<'_>, headers: &Headers, level: Level, expected: Psn) {
        let Kind::Rc(rc) = &self.kind else {
            return;
        };
        let bth = headers.bth();
        let is_executed = rc.responder.expected() != expected;
        let is_early = self.qpc.is_selective() && expected.is_before(bth.psn);
        if bth.opcode.is_request() && (is_executed || is_early) {
            self.congestion.handle_hint(cx.now, bth.opcode.operation(), level);
        }
    }

    /// The demand that the peer's latest data has announced, with what the receiver needs to know
    /// beside it.
    pub(crate) fn take_demand(&mut self) -> Option<(AdvertisedParams, u32, u32)> {
        let demand = self.congestion.take_demand()?;
        Some((*self.congestion.advertised()?, self.qpc.mtu, demand))
    }

    /// Whether its receiver advertises windows.
    #[inline]
    pub(crate) fn is_advertised(&self) -> bool {
        self.congestion.advertised().is_some()
    }

    /// The peer has another window: an acknowledgement says so.
    pub(crate) fn owe_window(&mut self) {
        let is_connected = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        if let Kind::Rc(rc) = &mut self.kind
            && self.established
            && is_connected
        {
            rc.responder.acknowledge_again();
        }
    }

    /// Completes a packet with what is left to be sent, or the window of the peer.
    #[cold]
    pub(crate) fn put_hint(&mut self, packet: &mut (Path, Headers), window: Option<u32>) {
        if let Kind::Rc(rc) = &self.kind {
            self.congestion.put_hint(packet, rc.requester.unsent(), window);
        }
    }

    /// What switches have written into a packet that follows.
    pub(crate) fn handle_telemetry(
        &mut self,
        now: Time,
        origin: &Origin,
        operation: Operation,
        report: &Report,
    ) {
        let is_connected = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        if is_connected && self.qpc.transport == Transport::Rc && self.is_peer(origin) {
            self.congestion.handle_telemetry(now, operation, report);
        }
    }

    /// The longest queue on the path; false if it is no reliable connection that sends.
    pub(crate) fn handle_watermark(&mut self, now: Time, watermark: &Watermark) -> bool {
        let is_connected = self.state == QpState::Rts && self.qpc.transport == Transport::Rc;
        if is_connected {
            self.congestion.handle_watermark(now, watermark);
        }
        is_connected
    }

    /// Whether its packets may carry anything for switches.
    #[inline]
    pub(crate) fn has_telemetry(&self) -> bool {
        self.congestion.has_telemetry()
    }

    /// What the packet in `cx.packet` carries for switches, or returns.
    #[cold]
    pub(crate) fn take_telemetry(&mut self, cx: &Context<'_>) -> Telemetry {
        let packet = cx.packet.as_ref();
        let packet = packet.filter(|_| self.qpc.transport == Transport::Rc);
        packet.map_or(Telemetry::None, |(_, headers)| self.congestion.take_telemetry(headers))
    }

    /// A packet for this queue pair was marked on its way.
    fn note_congestion(&mut self, cx: &mut Context<'_>) {
        cx.count(|c| &mut c.ecn_marked);
        // Datagrams have many senders: it is not known whom to notify.
        if self.qpc.transport != Transport::Ud {
            self.congestion.marked(cx.now, cx.seeded);
        }
    }

    /// The checks of every packet (IBA 9.6), each with its counter.
    fn accepts(&mut self, cx: &mut Context<'_>, origin: &Origin, headers: &Headers) -> bool {
        let bth = headers.bth();
        let state_accepts = match self.state {
            QpState::Rts | QpState::Sqd | QpState::Sqe => true,
            QpState::Rtr => bth.opcode.is_request(),
            QpState::Reset | QpState::Init | QpState::Error => false,
        };
        if !state_accepts {
            cx.count(|c| &mut c.wrong_state);
        } else if !self.is_peer(origin) {
            cx.count(|c| &mut c.wrong_source);
        } else if !same_partition(bth.pkey) {
            cx.count(|c| &mut c.bad_pkey);
        } else if bth.opcode.service() == Service::Cnp {
            cx.count(|c| &mut c.cnps_received);
            self.congestion.notified(cx.now);
        } else if !self.qpc.offers(bth.opcode.service()) {
            cx.count(|c| &mut c.bad_opcode);
        } else {
            return true;
        }
        false
    }

    /// Connections accept packets from their peer's address only, datagram queue pairs from any.
    fn is_peer(&self, origin: &Origin) -> bool {
        self.qpc.transport == Transport::Ud || origin.source.ip() == self.qpc.peer.path.remote.ip()
    }

    /// The original value of the word of a peer's atomic.
    pub(crate) fn complete_atomic(&mut self, psn: Psn, original: u64) {
        if let Kind::Rc(rc) = &mut self.kind {
            rc.responder.complete_atomic(psn, original);
        }
    }

    pub(crate) fn handle_timeout(&mut self, cx: &mut Context<'_>, is_stalled: &mut IsStalled<'_>) {
        self.congestion.handle_timeout(cx.now);
        let Kind::Rc(rc) = &mut self.kind else {
            return;
        };
        let Connect { path, dest_qp, .. } = &self.qpc.peer;
        rc.requester.handle_stall(&mut cx.of(&self.qpc), || is_stalled(path, *dest_qp));
        if let Err(fault) = rc.requester.handle_timeout(&mut cx.of(&self.qpc)) {
            self.record_retry_exceeded(cx, fault);
            self.fail_send(cx, fault);
        }
        self.tell_controller(cx);
    }

    pub(crate) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        let service = match &self.kind {
            Kind::Rc(rc) => rc.requester.deadline(),
            Kind::Uc(_) | Kind::Ud(_) => None,
        };
        match (service, self.congestion.deadline()) {
            (Some(service), Some(congestion)) if congestion.0 < service.0 => Some(congestion),
            (service, congestion) => service.or(congestion),
        }
    }

    /// Whether [`poll_transmit`](Qp::poll_transmit) may return a packet.
    pub(crate) fn wants_to_send(&self) -> bool {
        let replies = matches!(&self.kind, Kind::Rc(rc) if rc.responder.has_reply());
        let is_free = !self.congestion.is_holding();
        replies || self.congestion.has_notification() || (is_free && self.has_data())
    }

    /// Whether an acknowledgement, of a connection that misses nothing, is all that is to be sent.
    pub(crate) fn owes_only_ack(&self) -> bool {
        let waits = matches!(&self.kind, Kind::Rc(rc) if rc.responder.ack_may_wait());
        waits && !self.has_data() && !self.congestion.has_notification()
    }

    /// Whether there are packets paced by congestion control.
    fn has_data(&self) -> bool {
        match &self.kind {
            Kind::Rc(rc) => rc.has_data(),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.has_unsent(),
        }
    }

    /// Another queue pair's burst begins.
    pub(crate) fn end_burst(&mut self) {
        if let Kind::Rc(rc) = &mut self.kind {
            rc.end_burst();
        }
    }

    /// Puts the next packet, if there is one, into `cx.packet`, and the location of its payload
    /// into `cx.pieces`.
    pub(crate) fn poll_transmit(&mut self, cx: &mut Context<'_>) {
        self.congestion.poll_notification(cx, &self.qpc);
        // After a failure a response may still have to be sent; nothing fails twice.
        if cx.packet.is_none()
            && let Err(failure) = self.poll_kind(cx)
        {
            self.handle_failure(cx, failure, None);
            let _ = self.poll_kind(cx);
        }
        self.count_sent(cx);
    }

    /// Puts the next response to a READ or atomic into `cx.packet`. Congestion control counts it
    /// but does not delay it: a request waits behind it, and the outbox takes few.
    pub(crate) fn poll_response(&mut self, cx: &mut Context<'_>) {
        let Kind::Rc(rc) = &mut self.kind else {
            return;
        };
        match rc.responder.poll_response(&mut cx.of(&self.qpc)) {
            Ok(()) => self.count_sent(cx),
            Err(fatal) => self.handle_failure(cx, fatal.into(), None),
        }
    }

    fn count_sent(&mut self, cx: &mut Context<'_>) {
        if cx.packet.is_some() {
            cx.count(|c| &mut c.packets_sent);
            let sent = sg::placed_bytes(cx.pieces);
            cx.add(sent, |c| &mut c.bytes_sent);
            self.congestion.sent(cx, sent);
        }
    }

    fn poll_kind(&mut self, cx: &mut Context<'_>) -> Result<(), Failure> {
        let may_send = !self.has_data() || self.congestion.may_send(cx);
        let cx = &mut cx.of(&self.qpc);
        match &mut self.kind {
            Kind::Rc(rc) if !may_send => rc.responder.poll_reply(cx),
            _ if !may_send => {}
            Kind::Rc(rc) => rc.poll(cx)?,
            Kind::Uc(uc) => uc.poll(cx)?,
            Kind::Ud(ud) => ud.poll(cx)?,
        }
        Ok(())
    }
}

/// Sets `field` if the attribute is set.
fn set<T>(attr: &QpAttr, bit: AttrMask, field: &mut T, value: T) {
    if attr.mask.contains(bit) {
        *field = value;
    }
}

/// Full and limited members of the default partition.
fn same_partition(pkey: u16) -> bool {
    pkey | 0x8000 == DEFAULT_PKEY
}

fn message_len(bytes: u64) -> Result<u32, VerbsError> {
    u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= MAX_MESSAGE_BYTES)
        .ok_or(VerbsError::TooLong(bytes))
}
