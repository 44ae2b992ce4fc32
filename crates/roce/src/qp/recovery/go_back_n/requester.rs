//! The requester's side of go-back-N: responses arrive in PSN order, and a loss moves the cursor
//! back.
//!
//! Invariants:
//! - only the front can be partly done;
//! - going back (timeout, NAK, missing response) moves the cursor to `una` and changes nothing
//!   else;
//! - an acknowledgement beyond an outstanding READ or atomic means that responses were lost. It is
//!   requested again under the same PSN, by which the responder recognizes a duplicate atomic and
//!   does not execute it again.

use crate::congestion::rtt::RttProbe;
use crate::qp::codes::ack_timeout;
use crate::qp::context::{PacketHeaders, QpContext};
use crate::qp::request::Request;
use crate::qp::requests::{Fault, Requests, Response, SendRecovery, bad_response};
use crate::qp::{RxPacket, Scope, TimeoutReason};
use crate::seeded::Bug;
use crate::time::{Duration, Time};
use crate::verbs::WcStatus;
use crate::wire::{Aeth, Ext, Opcode, Psn, Syndrome};

/// See the module's text.
#[derive(Debug)]
pub(in crate::qp) struct GoBackN {
    /// A NAK, sent or implied, has moved the cursor back to `una`, and there was neither progress
    /// nor a timeout since.
    gone_back: bool,
    /// How many packets may be unacknowledged, if less than the window. A timeout may mean that the
    /// peer cannot keep up, and retransmitting a whole window would make that worse: so one packet
    /// is sent, and each acknowledged packet allows one more.
    allowance: u32,
    /// When the local ACK timeout expires.
    ack_deadline: Option<Time>,
    rtt_probe: RttProbe,
}

impl Default for GoBackN {
    fn default() -> GoBackN {
        let rtt_probe = RttProbe::default();
        GoBackN { gone_back: false, allowance: u32::MAX, ack_deadline: None, rtt_probe }
    }
}

impl SendRecovery for GoBackN {
    fn room(&self, requests: &Requests, qpc: &QpContext) -> u32 {
        requests.room_in(self.window(qpc), requests.unacknowledged())
    }

    fn in_flight(&self, requests: &Requests) -> u32 {
        requests.unacknowledged()
    }

    fn may_await(&self) -> bool {
        true
    }

    /// A READ takes a PSN for each response and one request packet, an atomic one of each, and all
    /// other requests as many PSNs as packets. So the PSNs from `una` to the request, less the
    /// request packets among them, less one for each outstanding READ or atomic, are the responses
    /// to come.
    fn missing_responses(&self, requests: &Requests, request: &Request) -> u64 {
        let psns = request.first_psn.distance_from(requests.una).unsigned_abs();
        u64::from((psns + requests.awaited).saturating_sub(requests.unacknowledged()))
    }

    fn is_ordered(&self, _: &Requests) -> bool {
        false
    }

    /// At regular intervals, and whenever sending stops until an acknowledgement arrives.
    fn wants_ack(&self, requests: &Requests, qpc: &QpContext) -> bool {
        let window = requests.allowed(self.window(qpc));
        requests.ack_is_overdue(window, qpc) || self.room(requests, qpc) <= 1
    }

    fn sent(&mut self, requests: &Requests, cx: &Scope<'_, '_>, header: &PacketHeaders) {
        if header.ack_req && !header.psn.is_before(requests.sent_end) {
            let most = if cx.qpc.peer.congestion.needs().every_ack { RttProbe::MOST } else { 1 };
            self.rtt_probe.sent(header.psn, cx.now, most);
        }
        if self.ack_deadline.is_none() {
            self.ack_deadline = ack_timeout(cx.qpc.peer.timeout).map(|timeout| cx.now + timeout);
        }
    }

    fn has_retransmission(&self) -> bool {
        false
    }

    fn poll_retransmission(
        &mut self,
        _: &mut Requests,
        _: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        Ok(())
    }

    fn handle_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault> {
        let psn = packet.headers.bth().psn;
        let is_known = cx.seeded.distance(psn, requests.sent_end) < 0;
        if !is_known && !cx.seeded.is(Bug::AckBeyondWindow) {
            cx.count(|c| &mut c.bad_psn);
            return Ok(());
        }
        if psn.is_before(requests.una) {
            cx.count(|c| &mut c.duplicate_acks);
            // The responder may repeat its latest acknowledgement to give new credits.
            if let Some(&aeth) = packet.headers.ext().aeth().filter(|_| psn.next() == requests.una)
            {
                requests.take_credit(aeth);
            }
            return Ok(());
        }
        match *packet.headers.ext() {
            _ if packet.headers.bth().opcode.is_read_response() => {
                self.handle_read_response(requests, cx, packet)
            }
            Ext::AethAtomicAck(aeth, ack)
                if packet.headers.bth().opcode == Opcode::RcAtomicAcknowledge =>
            {
                let ahead = psn.distance_from(requests.una) as u32;
                if self.advance(requests, cx, ahead)? > 0 {
                    return self.handle_lost_response(requests, cx);
                }
                let original = Some(ack.original);
                let response = Response { offset: 0, payload_len: packet.payload_len, original };
                self.place_response(requests, cx, Request::is_atomic, &response)?;
                self.accept_response(requests, cx, Some(aeth))
            }
            Ext::Aeth(aeth) if packet.headers.bth().opcode == Opcode::RcAcknowledge => {
                self.handle_acknowledge(requests, cx, psn, aeth)
            }
            _ => Err(bad_response(cx)),
        }
    }

    fn resume(&mut self, _: Time) {}

    fn ack_deadline(&self) -> Option<Time> {
        self.ack_deadline
    }

    fn restart_ack_timer(&mut self, now: Time, timeout: Duration) {
        self.ack_deadline = Some(now + timeout);
    }

    fn set_ack_timeout(&mut self, requests: &mut Requests, timeout: Option<Duration>) {
        match (self.ack_deadline, timeout) {
            (Some(_), None) => self.ack_deadline = None,
            // Retransmitting the packets starts the timer that was not running.
            (None, Some(_)) if requests.is_waiting() => self.rewind(requests),
            _ => {}
        }
    }

    fn deadline(&self, _: &Requests) -> Option<(Time, TimeoutReason)> {
        self.ack_deadline.map(|at| (at, TimeoutReason::AckTimeout))
    }

    fn handle_timeout(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        if self.ack_deadline.is_none_or(|at| at > cx.now) {
            return Ok(());
        }
        if cx.seeded.is(Bug::TimeoutForgotten) {
            self.ack_deadline = None;
            return Ok(());
        }
        self.go_back(requests)?;
        requests.progress.has_timed_out = true;
        self.allowance = 1;
        cx.count(|c| &mut c.timeouts);
        Ok(())
    }

    fn is_drained(&self, requests: &Requests) -> bool {
        requests.una == requests.sent_end
            && requests.queue.front().is_none_or(|front| front.done == 0)
    }
}

impl GoBackN {
    fn window(&self, qpc: &QpContext) -> u32 {
        qpc.peer.window_packets.min(self.allowance)
    }

    // ---- answers -------------------------------------------------------------------------------

    fn handle_acknowledge(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        psn: Psn,
        aeth: Aeth,
    ) -> Result<(), Fault> {
        let ahead = psn.distance_from(requests.una) as u32;
        match aeth.syndrome {
            Syndrome::Ack { .. } => {
                cx.count(|c| &mut c.acks_received);
                requests.take_credit(aeth);
                if self.advance(requests, cx, ahead + 1)? > 0 {
                    return self.handle_lost_response(requests, cx);
                }
                Ok(())
            }
            Syndrome::SequenceError => {
                cx.count(|c| &mut c.seq_naks_received);
                if self.advance(requests, cx, ahead)? > 0 {
                    return self.handle_lost_response(requests, cx);
                }
                self.retry(requests)
            }
            Syndrome::RnrNak { timer } => {
                cx.count(|c| &mut c.rnr_naks_received);
                requests.note_no_credit(aeth);
                if self.advance(requests, cx, ahead)? > 0 {
                    return self.handle_lost_response(requests, cx);
                }
                if requests.wait_for_receiver(cx, timer)? {
                    self.rewind(requests);
                    self.ack_deadline = None;
                }
                Ok(())
            }
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => {
                self.refused(requests, cx, ahead, WcStatus::RemoteInvalidRequest)
            }
            Syndrome::RemoteAccess => {
                self.refused(requests, cx, ahead, WcStatus::RemoteAccessError)
            }
            Syndrome::RemoteOperation => {
                self.refused(requests, cx, ahead, WcStatus::RemoteOperationError)
            }
        }
    }

    /// The responder ended the connection because of the request `ahead` PSNs after `una`. READs
    /// and atomics before it without a response will not get one: they are flushed.
    fn refused(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        ahead: u32,
        status: WcStatus,
    ) -> Result<(), Fault> {
        cx.count(|c| &mut c.fatal_naks_received);
        let mut rest = self.advance(requests, cx, ahead)?;
        let covers = |request: &Request| {
            let before = rest;
            rest = rest.saturating_sub(request.left());
            before < request.left()
        };
        let index = requests.queue.iter().position(covers).unwrap_or(0);
        Err(Fault { index, status })
    }

    fn handle_read_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault> {
        let ahead = packet.headers.bth().psn.distance_from(requests.una) as u32;
        if self.advance(requests, cx, ahead)? > 0 && !cx.seeded.is(Bug::LostReadIgnored) {
            return self.handle_lost_response(requests, cx);
        }
        let ends = packet.headers.bth().opcode.ends_message();
        let is_wanted = |front: &Request| front.is_read() && ends == (front.left() == 1);
        let offset = requests.queue.front().map_or(0, |front| front.done * cx.qpc.mtu);
        let response = Response { offset, payload_len: packet.payload_len, original: None };
        self.place_response(requests, cx, is_wanted, &response)?;
        self.accept_response(requests, cx, packet.headers.ext().aeth().copied())
    }

    /// Resolves where a response is placed. It must be one that the front waits for.
    fn place_response(
        &self,
        requests: &Requests,
        cx: &mut Scope<'_, '_>,
        is_wanted: impl FnOnce(&Request) -> bool,
        response: &Response,
    ) -> Result<(), Fault> {
        if !requests.queue.front().is_some_and(is_wanted) {
            return Err(bad_response(cx));
        }
        requests.place_response(cx, 0, response)
    }

    fn accept_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        aeth: Option<Aeth>,
    ) -> Result<(), Fault> {
        if let Some(aeth) = aeth {
            requests.take_credit(aeth);
        }
        self.advance_front(requests, 1);
        if requests.queue.front().is_some_and(|front| front.left() == 0) {
            requests.complete_front(cx);
        }
        self.note_progress(requests, cx)
    }

    /// Acknowledges `psns` PSNs from `una`, up to an outstanding READ or atomic. Returns how many
    /// were not acknowledged.
    fn advance(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        psns: u32,
    ) -> Result<u32, Fault> {
        let mut rest = psns;
        while rest > 0
            && let Some(front) = requests.queue.front().filter(|front| !front.awaits_response())
        {
            let step = front.left().min(rest);
            let completes = step == front.left();
            self.advance_front(requests, step);
            if completes {
                requests.complete_front(cx);
            }
            rest -= step;
        }
        if rest < psns {
            self.note_progress(requests, cx)?;
        }
        Ok(rest)
    }

    /// Marks `step` more PSNs of the front done. A response to an earlier transmission may overtake
    /// the cursor.
    fn advance_front(&mut self, requests: &mut Requests, step: u32) {
        requests.una = requests.una.plus(step);
        requests.progress.acknowledged += step;
        self.allowance = self.allowance.saturating_add(step);
        if let Some(front) = requests.queue.front_mut() {
            front.done += step;
            if requests.next == 0 && !front.is_read() {
                requests.next_packet = requests.next_packet.max(front.done);
            }
        }
    }

    fn note_progress(&mut self, requests: &mut Requests, cx: &Scope<'_, '_>) -> Result<(), Fault> {
        if let Some(rtt) = self.rtt_probe.answered(requests.una, cx.now) {
            requests.sample_rtt(rtt);
        }
        self.gone_back = false;
        requests.restore_retries(cx.qpc);
        requests.note_acknowledged(cx.qpc);
        if requests.rnr_until.is_none() {
            let timeout = ack_timeout(cx.qpc.peer.timeout).filter(|_| requests.is_waiting());
            self.ack_deadline = timeout.map(|timeout| cx.now + timeout);
        }
        requests.check_front()
    }

    // ---- going back ----------------------------------------------------------------------------

    /// A response to the READ or atomic at the front is missing. Later responses keep reporting
    /// that until it has been requested again and received, so only the first report counts.
    fn handle_lost_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        if !self.gone_back {
            cx.count(|c| &mut c.implied_naks);
        }
        self.retry(requests)
    }

    /// Goes back because of a NAK. A second one for the same PSN is not new information: the
    /// network may have duplicated it, or it responds to packets sent before. Then only the timer
    /// decides.
    fn retry(&mut self, requests: &mut Requests) -> Result<(), Fault> {
        if self.gone_back || requests.rnr_until.is_some() {
            return Ok(());
        }
        self.go_back(requests)?;
        requests.progress.lost += 1;
        self.gone_back = true;
        Ok(())
    }

    fn go_back(&mut self, requests: &mut Requests) -> Result<(), Fault> {
        requests.spend_retry()?;
        self.rewind(requests);
        self.ack_deadline = None;
        Ok(())
    }

    fn rewind(&mut self, requests: &mut Requests) {
        requests.next = 0;
        requests.next_packet = match requests.queue.front() {
            Some(front) if !front.is_read() => front.done,
            _ => 0,
        };
        requests.awaited = 0;
        requests.packets_since_ack_req = 0;
        requests.probe = None;
        self.gone_back = false;
        self.rtt_probe.cancel();
    }
}
