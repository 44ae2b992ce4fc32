//! The requester half of a reliable connection: posted sends become request packets, responses
//! complete them (IBA 9.7.3 to 9.7.7, requester side).
//!
//! [`Requests`] holds what is posted and sends it in order. The handling of responses, losses and
//! timeouts depends on the mode that both ends have agreed on: [`GoBackN`] or [`Selective`]. The
//! requester joins the two, and keeps the timers that both have.

use alloc::boxed::Box;

use super::codes::ack_timeout;
use super::context::QpContext;
use super::handed::HandedOver;
use super::held::Held;
use super::recovery::go_back_n::requester::GoBackN;
use super::recovery::selective::requester::Selective;
use super::recovery::{Mode, with_mode};
use super::request::Request;
use super::requests::{Fault, Progress, Requests, SendRecovery};
use super::{RxPacket, Scope, TimeoutReason};
use crate::congestion::rtt::RttMeter;
use crate::report::Flow;
use crate::time::{Duration, Time};
use crate::verbs::{AttrMask, SendOp, SendWr};
use crate::wire::Psn;

/// An ACK timer handled this late proves nothing about the peer: this process was not running, and
/// the responses may be waiting.
const LATE: Duration = Duration::from_millis(100);

/// How long timeouts use no retry while the peer is stalled.
const MAX_STALL: Duration = Duration::from_millis(300_000);

type Recovery = Mode<GoBackN, Selective>;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Requester {
    requests: Requests,
    recovery: Recovery,
    /// Behind all requests.
    handed: HandedOver,
    /// Behind all of these.
    held: Held,
}

impl Requester {
    pub(super) fn new(limit: u32, first_psn: Psn) -> Requester {
        let requests = Requests::new(limit, first_psn);
        let recovery = Mode::GoBackN(GoBackN::default());
        Requester { requests, recovery, handed: HandedOver::new(), held: Held::default() }
    }

    /// Clears everything, including posted work requests: the queue pair goes back to RESET.
    /// Returns how many were handed over.
    pub(super) fn reset(&mut self, first_psn: Psn) -> usize {
        self.requests.reset(first_psn);
        self.held.clear();
        self.recovery = Mode::GoBackN(GoBackN::default());
        self.handed.clear()
    }

    pub(super) fn start(&mut self, qpc: &QpContext) {
        self.requests.retries_left = qpc.peer.retry_count;
        self.requests.rnr_retries_left = qpc.peer.rnr_retry;
        if qpc.is_selective() {
            let selective = Selective::new(qpc, self.requests.post_psn);
            self.recovery = Mode::Selective(Box::new(selective));
        }
    }

    /// Attributes have changed while the connection runs: updates what was derived from them.
    pub(super) fn follow(&mut self, qpc: &QpContext, changed: AttrMask) {
        if changed.contains(AttrMask::RETRY_CNT) {
            self.requests.retries_left = qpc.peer.retry_count;
        }
        if changed.contains(AttrMask::RNR_RETRY) {
            self.requests.rnr_retries_left = qpc.peer.rnr_retry;
        }
        if changed.contains(AttrMask::TIMEOUT) {
            let timeout = ack_timeout(qpc.peer.timeout);
            let requests = &mut self.requests;
            with_mode!(&mut self.recovery, mode => mode.set_ack_timeout(requests, timeout));
        }
    }

    /// Round-trip times of this connection.
    pub(super) fn rtt(&self) -> &RttMeter {
        &self.requests.rtt
    }

    /// The progress of request packets since the last call, if any.
    pub(super) fn take_progress(&mut self) -> Option<Progress> {
        let Progress { acknowledged, lost, has_timed_out, .. } = self.requests.progress;
        let has_news = acknowledged > 0 || lost > 0 || has_timed_out;
        has_news.then(|| {
            let requests = &self.requests;
            let in_flight = with_mode!(&self.recovery, mode => mode.in_flight(requests));
            let is_idle = in_flight == 0 && requests.unsent() == 0;
            Progress { in_flight, is_idle, ..core::mem::take(&mut self.requests.progress) }
        })
    }

    /// Request packets still to be sent.
    pub(super) fn unsent(&self) -> u32 {
        self.requests.unsent()
    }

    /// Whether an acknowledgement with this PSN is about what is under way, or about all before it.
    pub(super) fn is_current(&self, psn: Psn) -> bool {
        let Requests { una, sent_end, .. } = self.requests;
        una != sent_end && !psn.next().is_before(una) && psn.is_before(sent_end)
    }

    /// Limits the request packets in flight to what congestion control allows.
    pub(super) fn limit_window(&mut self, window_packets: Option<u32>) {
        self.requests.congestion_window = window_packets;
    }

    /// Requests that may still be posted.
    pub(super) fn vacant(&self) -> usize {
        (self.requests.limit as usize).saturating_sub(self.len() as usize)
    }

    pub(super) fn limit(&self) -> u32 {
        self.requests.limit
    }

    /// Stops before the next unstarted request, or resumes.
    pub(super) fn pause(&mut self, is_paused: bool) {
        self.requests.is_paused = is_paused;
    }

    /// Whether all started requests are done.
    pub(super) fn is_drained(&self) -> bool {
        self.handed.is_empty()
            && with_mode!(&self.recovery, mode => mode.is_drained(&self.requests))
    }

    /// Work requests posted and not completed.
    pub(super) fn len(&self) -> u32 {
        (self.requests.queue.len() + self.handed.len() + self.held.len()) as u32
    }

    /// Whether none of them is sent, or to be sent, as packets.
    pub(super) fn has_no_packets(&self) -> bool {
        self.requests.queue.is_empty()
    }

    /// Whether a direct request may be carried out before these are done: there are none, or the
    /// order is relaxed, `wr` completes unseen, and they are all SENDs.
    pub(super) fn lets_pass(&self, wr: &SendWr) -> bool {
        use SendOp::{Send, SendImm, SendInvalidate, Write};
        let is_send =
            |before: &Request| matches!(before.wr.op, Send | SendImm(_) | SendInvalidate(_));
        let is_quiet_write = || matches!(wr.op, Write { .. }) && !wr.signaled && !wr.fence;
        self.has_no_packets() && self.handed.is_empty()
            || self.held.is_relaxed() && is_quiet_write() && self.requests.queue.iter().all(is_send)
    }

    /// The oldest PSN that is not acknowledged.
    pub(super) fn unacknowledged_psn(&self) -> Psn {
        self.requests.una
    }

    /// Work request and first unacknowledged PSN of a request in the queue.
    pub(super) fn posted_at(&self, index: usize) -> Option<(u64, Psn)> {
        let request = self.requests.queue.get(index)?;
        Some((request.wr.wr_id, request.first_psn.plus(request.done)))
    }

    /// Its positions; those of the responder are left at their default.
    pub(super) fn flow(&self, qpc: &QpContext) -> Flow {
        let requests = &self.requests;
        Flow {
            unacknowledged: requests.una,
            next: requests.sent_end,
            expected: Psn::default(),
            in_flight_packets: with_mode!(&self.recovery, mode => mode.in_flight(requests)),
            window_packets: requests.allowed(qpc.peer.window_packets),
            credits: requests.credits(),
            retries_left: requests.retries_left,
            rnr_retries_left: requests.rnr_retries_left,
        }
    }

    /// Queues a request of `len` bytes, which must be within limits.
    pub(super) fn post(&mut self, qpc: &QpContext, wr: SendWr, len: u32) {
        self.requests.post(qpc, wr, len);
    }

    // ---- messages handed to a local peer --------------------------------------------------------

    pub(super) fn has_handed_over(&self) -> bool {
        !self.handed.is_empty()
    }

    pub(super) fn handed_mut(&mut self) -> &mut HandedOver {
        &mut self.handed
    }

    /// Those without an acknowledgement become packets. Receives that the others have taken are
    /// none of the credits any more.
    pub(super) fn release_handed(&mut self, qpc: &QpContext) {
        self.requests.forget_credits();
        while let Some((wr, len)) = self.handed.pop() {
            self.requests.post(qpc, wr, len);
        }
        self.handed.end_round();
    }

    // ---- requests that wait to be direct -------------------------------------------------------

    pub(super) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Queues a request behind all others, until it is direct or released.
    pub(super) fn hold(&mut self, wr: SendWr, len: u32) {
        self.held.push(wr, len);
    }

    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    pub(super) fn held_mut(&mut self) -> &mut Held {
        &mut self.held
    }

    /// The oldest that waits becomes packets.
    pub(super) fn release_first(&mut self, qpc: &QpContext) {
        if let Some((wr, len)) = self.held.pop() {
            self.requests.post(qpc, wr, len);
        }
    }

    /// All that wait become packets.
    pub(super) fn release_held(&mut self, qpc: &QpContext) {
        while let Some((wr, len)) = self.held.pop() {
            self.requests.post(qpc, wr, len);
        }
    }

    /// Removes and returns the oldest request; for flushing.
    pub(super) fn take_front(&mut self) -> Option<Request> {
        self.requests.queue.pop_front()
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.requests.next < self.requests.queue.len()
            || with_mode!(&self.recovery, mode => mode.has_retransmission())
    }

    /// Puts the next request packet into `cx.packet`, if one may be sent now.
    pub(super) fn poll(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), Fault> {
        match &mut self.recovery {
            Mode::GoBackN(mode) => self.requests.poll(mode, cx),
            Mode::Selective(mode) => self.requests.poll(&mut **mode, cx),
        }
    }

    /// An acknowledgement, or a response to a READ or an atomic. Puts the placement of its payload,
    /// or of `cx.insert`, into `cx.pieces`.
    pub(super) fn handle_response(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault> {
        let requests = &mut self.requests;
        with_mode!(&mut self.recovery, mode => {
            mode.handle_response(requests, cx, packet)
        })
    }

    // ---- time ----------------------------------------------------------------------------------

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        let rnr_wait = self.requests.rnr_until.map(|at| (at, TimeoutReason::RnrWait));
        rnr_wait.or_else(|| with_mode!(&self.recovery, mode => mode.deadline(&self.requests)))
    }

    /// Restarts an expired ACK timer, without using a retry, if the peer is stalled or its
    /// responses could not be received. Nothing is retransmitted: the packets are queued at the
    /// peer.
    pub(super) fn handle_stall(
        &mut self,
        cx: &mut Scope<'_, '_>,
        is_stalled: impl FnOnce() -> bool,
    ) {
        if self.requests.rnr_until.is_some() {
            return;
        }
        let due = with_mode!(&self.recovery, mode => mode.ack_deadline());
        let (Some(due), Some(timeout)) = (due, ack_timeout(cx.qpc.peer.timeout)) else {
            return;
        };
        let since = self.requests.stalled_since.unwrap_or(cx.now);
        if due > cx.now || cx.now.since(since) >= MAX_STALL {
            return;
        }
        if cx.now.since(due) < LATE && !is_stalled() {
            return;
        }
        self.requests.stalled_since = Some(since);
        cx.count(|c| &mut c.stall_timeouts);
        with_mode!(&mut self.recovery, mode => mode.restart_ack_timer(cx.now, timeout));
    }

    /// The deadline has passed.
    pub(super) fn handle_timeout(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), Fault> {
        let requests = &mut self.requests;
        match requests.rnr_until {
            Some(at) if at > cx.now => Ok(()),
            Some(_) => {
                requests.rnr_until = None;
                with_mode!(&mut self.recovery, mode => mode.resume(cx.now));
                Ok(())
            }
            None => with_mode!(&mut self.recovery, mode => mode.handle_timeout(requests, cx)),
        }
    }

    /// Stops for good: nothing is sent and no timer runs.
    pub(super) fn stop(&mut self) {
        self.requests.next = 0;
        self.requests.next_packet = 0;
        self.requests.rnr_until = None;
        self.recovery = Mode::GoBackN(GoBackN::default());
    }
}
