//! The posted requests of a reliable connection, and the cursor that sends them (IBA 9.7.3 to
//! 9.7.7, requester side).
//!
//! Requests are in one queue, oldest first. Each gets its PSNs when it is posted, so the queue is
//! also the map from PSN to request:
//!
//! ```text
//!   front                       next                         back
//!   | done | outstanding ....... | not yet sent ............. |
//!          una                   cursor (next, next_packet)
//! ```
//!
//! Both modes of loss recovery share this: numbering, windows and fences, credits, building
//! packets, completions in order. A [`SendRecovery`] decides what is retransmitted, and when;
//! nothing in here depends on the mode.
//!
//! Invariants:
//! - everything before `una` is acknowledged, and requests keep their PSNs when they are
//!   retransmitted, so the responder can recognize duplicates;
//! - a READ or atomic is done only by its responses;
//! - local operations take no PSN. They are executed once, when the cursor reaches them, and
//!   complete in their turn: an executed one is never at the front;
//! - a request that cannot run locally stops the cursor, and fails when it reaches the front, so
//!   that completions stay in order (C2).

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::codes::{NO_CREDITS, credit_count, rnr_delay};
use super::context::{PacketHeaders, QpContext};
use super::delivery::Insert;
use super::request::{self, ATOMIC_BYTES, Request};
use super::{HELD_RESPONSES, RxPacket, Scope, TimeoutReason};
use crate::congestion::rtt::RttMeter;
use crate::memory::region::AccessKind;
use crate::memory::sg::{self, Extent};
use crate::report::Credits;
use crate::seeded::Bug;
use crate::time::{Duration, Time};
use crate::verbs::{SendWr, WcStatus};
use crate::wire::{Aeth, Psn, Syndrome};

/// An acknowledgement is requested at least this often, in packets.
const MAX_ACK_INTERVAL: u32 = 32;

/// `rnr_retry` that never gives up.
const RNR_FOREVER: u8 = 7;

/// A request that failed, and the connection with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Its position, counted from the front of the queue.
    pub(super) index: usize,
    /// Its status. All others are flushed.
    pub(super) status: WcStatus,
}

/// How far the responder's credits reach (IBA 9.7.7.2).
#[derive(Clone, Copy, Debug)]
pub(super) enum Credit {
    /// Nothing received yet. A connection starts as if credits were unlimited: receives are usually
    /// posted before, and the first messages then need no extra round trip. If there are none, the
    /// RNR NAK reports that, which costs one window of packets, once: from then on there are no
    /// credits until an acknowledgement brings some.
    Unknown,
    /// The responder does not use credits.
    Unlimited,
    /// Messages up to this sequence number have a receive waiting.
    UpTo(Psn),
}

/// Progress of request packets, for congestion control.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    pub(super) acknowledged: u32,
    /// Request packets still unacknowledged.
    pub(super) in_flight: u32,
    /// Everything posted is acknowledged.
    pub(super) is_idle: bool,
    /// Not while READs or atomics are outstanding: the peer's responses to them delay its answers.
    pub(super) rtt: Option<Duration>,
    /// Marked lost; in go-back-N one for each loss.
    pub(super) lost: u32,
    pub(super) has_timed_out: bool,
}

/// A response to a READ or an atomic.
pub(super) struct Response {
    /// Offset of its payload in the READ's message.
    pub(super) offset: u32,
    pub(super) payload_len: usize,
    /// The original value returned by an atomic.
    pub(super) original: Option<u64>,
}

/// Decisions of a mode of loss recovery when sending requests.
pub(super) trait SendRecovery {
    /// New request packets that may be sent before an acknowledgement arrives.
    fn room(&self, requests: &Requests, qpc: &QpContext) -> u32;

    /// Request packets in flight.
    fn in_flight(&self, requests: &Requests) -> u32;

    /// Whether the outstanding responses leave room for those of another READ or atomic.
    fn may_await(&self) -> bool;

    /// Responses of READs and atomics before `request`, which is at the cursor, that have not
    /// arrived.
    fn missing_responses(&self, requests: &Requests, request: &Request) -> u64;

    /// Whether the next packet must not be placed out of order.
    fn is_ordered(&self, requests: &Requests) -> bool;

    /// Whether the packet at the cursor has to request an acknowledgement, besides what its message
    /// and credits require.
    fn wants_ack(&self, requests: &Requests, qpc: &QpContext) -> bool;

    /// The packet at the cursor is being sent. The cursor is still at it.
    fn sent(&mut self, requests: &Requests, cx: &Scope<'_, '_>, header: &PacketHeaders);

    /// Whether there may be something for
    /// [`poll_retransmission`](SendRecovery::poll_retransmission).
    fn has_retransmission(&self) -> bool;

    /// Puts the next packet to be retransmitted into `cx.packet`, unless the cursor does that.
    fn poll_retransmission(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault>;

    /// An acknowledgement, or a response to a READ or an atomic.
    fn handle_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault>;

    /// The delay that an RNR NAK requested is over.
    fn resume(&mut self, now: Time);

    /// When the local ACK timeout expires, if anything is unacknowledged.
    fn ack_deadline(&self) -> Option<Time>;

    /// Restarts the local ACK timeout of `timeout`.
    fn restart_ack_timer(&mut self, now: Time, timeout: Duration);

    /// The local ACK timeout was changed: it holds from the next packet on.
    fn set_ack_timeout(&mut self, requests: &mut Requests, timeout: Option<Duration>);

    /// When [`handle_timeout`](SendRecovery::handle_timeout) is due, and why.
    fn deadline(&self, requests: &Requests) -> Option<(Time, TimeoutReason)>;

    /// Handles expired timers.
    fn handle_timeout(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault>;

    /// Whether all started requests are done.
    fn is_drained(&self, requests: &Requests) -> bool;
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) queue: VecDeque<Request>,
    pub(super) limit: u32,
    /// First PSN of the next work request to be posted.
    pub(super) post_psn: Psn,
    /// Sequence number of the last work request posted.
    post_ssn: Psn,
    /// Request packets of all work requests posted.
    post_packets: u32,
    pub(super) una: Psn,
    /// One past the highest PSN ever sent (or requested, by READ).
    pub(super) sent_end: Psn,
    pub(super) next: usize,
    pub(super) next_packet: u32,
    /// READs and atomics between `una` and the cursor.
    pub(super) awaited: u32,
    pub(super) packets_since_ack_req: u32,
    /// Last packet sent without credit; one at a time.
    pub(super) probe: Option<Psn>,
    credit: Credit,
    pub(super) retries_left: u8,
    pub(super) rnr_retries_left: u8,
    /// When the first timeout was excused since the last packet from the peer.
    pub(super) stalled_since: Option<Time>,
    /// The peer has no receives: nothing is sent until this time.
    pub(super) rnr_until: Option<Time>,
    /// No request is started.
    pub(super) is_paused: bool,
    pub(super) rtt: Box<RttMeter>,
    /// Since the last report to congestion control.
    pub(super) progress: Progress,
    /// Request packets that congestion control allows in flight.
    pub(super) congestion_window: Option<u32>,
}

impl Requests {
    pub(super) fn new(limit: u32, first_psn: Psn) -> Requests {
        Requests::fresh(VecDeque::with_capacity(limit as usize), limit, first_psn)
    }

    /// Clears everything, including posted work requests.
    pub(super) fn reset(&mut self, first_psn: Psn) {
        let mut queue = core::mem::take(&mut self.queue);
        queue.clear();
        *self = Requests::fresh(queue, self.limit, first_psn);
    }

    fn fresh(queue: VecDeque<Request>, limit: u32, first_psn: Psn) -> Requests {
        Requests {
            queue,
            limit,
            post_psn: first_psn,
            post_ssn: Psn::default(),
            post_packets: 0,
            una: first_psn,
            sent_end: first_psn,
            next: 0,
            next_packet: 0,
            awaited: 0,
            packets_since_ack_req: 0,
            probe: None,
            credit: Credit::Unknown,
            retries_left: 0,
            rnr_retries_left: 0,
            stalled_since: None,
            rnr_until: None,
            is_paused: false,
            rtt: Box::default(),
            progress: Progress::default(),
            congestion_window: None,
        }
    }

    /// Queues a request of `len` bytes, which must be within limits.
    pub(super) fn post(&mut self, qpc: &QpContext, wr: SendWr, len: u32) {
        let mut request = Request {
            wr,
            len,
            first_psn: self.post_psn,
            packets: 0,
            done: 0,
            ssn: self.post_ssn,
            packets_before: self.post_packets,
            is_executed: false,
            fault: None,
        };
        if !request.is_local() {
            request.packets = qpc.psns(len, request.is_read());
            // Selective repeat counts receives only: a WRITE may be several messages to the peer.
            if !qpc.is_selective() || request.takes_receive() {
                request.ssn = request.ssn.next();
            }
        }
        self.post_ssn = request.ssn;
        self.post_psn = self.post_psn.plus(request.packets);
        self.post_packets = self.post_packets.wrapping_add(request.request_packets());
        self.queue.push_back(request);
    }

    // ---- sending -------------------------------------------------------------------------------

    /// Puts the next request packet into `cx.packet`, if one may be sent now.
    pub(super) fn poll<R: SendRecovery>(
        &mut self,
        recovery: &mut R,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        if self.rnr_until.is_some() {
            return Ok(());
        }
        recovery.poll_retransmission(self, cx)?;
        if cx.packet.is_some() {
            return Ok(());
        }
        while let Some(request) = self.queue.get(self.next) {
            if request.fault.is_none() && !self.may_send(recovery, request, cx.qpc) {
                return Ok(());
            }
            if !request.is_local() {
                let built = self.build(recovery, cx);
                return built.or_else(|status| self.fail_at_cursor(status));
            }
            if let Err(status) = self.pass_local(cx) {
                return self.fail_at_cursor(status);
            }
        }
        Ok(())
    }

    /// The request at the cursor cannot run. Those before it still complete.
    fn fail_at_cursor(&mut self, status: WcStatus) -> Result<(), Fault> {
        let index = self.next;
        if index == 0 {
            return Err(Fault { index, status });
        }
        if let Some(request) = self.queue.get_mut(index) {
            request.fault = Some(status);
        }
        Ok(())
    }

    /// Whether the request at the cursor may continue.
    fn may_send<R: SendRecovery>(&self, recovery: &R, request: &Request, qpc: &QpContext) -> bool {
        if request.is_local() {
            return self.may_begin(recovery, request, request.is_executed);
        }
        let is_begun = request.first_psn.is_before(self.sent_end);
        recovery.room(self, qpc) > 0
            && self.psns_are_distinct(request)
            && (self.next_packet > 0 || self.may_begin(recovery, request, is_begun))
            && (!request.awaits_response() || self.may_await(recovery, qpc))
            && (self.has_credit(request) || self.probe.is_none())
    }

    /// Whether a request may start, with regard to a pause and the requests before it. A request
    /// waits here if the peer would hold it back, and cause its retransmission, because too many
    /// responses of the READs before it are missing.
    fn may_begin<R: SendRecovery>(&self, recovery: &R, request: &Request, is_begun: bool) -> bool {
        let would_be_held = || {
            !request.is_read() && recovery.missing_responses(self, request) > HELD_RESPONSES.into()
        };
        (is_begun || !self.is_paused)
            && (self.awaited == 0 || !(request.is_fenced() || would_be_held()))
    }

    /// Whether another READ or atomic may be outstanding. One that is not allowed at all is built
    /// anyway, and fails there.
    fn may_await<R: SendRecovery>(&self, recovery: &R, qpc: &QpContext) -> bool {
        let limit = u32::from(qpc.peer.max_rd_atomic);
        limit == 0 || (self.awaited < limit && recovery.may_await())
    }

    /// Executes the local operation at the cursor, unless that was done before the cursor went
    /// back.
    fn pass_local(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), WcStatus> {
        let request = &mut self.queue[self.next];
        if let Some(status) = request.fault {
            return Err(status);
        }
        if !request.is_executed {
            request::execute_local(cx, request.wr.op)?;
            request.is_executed = true;
        }
        self.next += 1;
        self.complete_executed(cx);
        Ok(())
    }

    /// The window, as far as congestion control allows.
    pub(super) fn allowed(&self, window: u32) -> u32 {
        self.congestion_window.map_or(window, |most| window.min(most))
    }

    /// New packets for which a window has room. A window that has shrunk takes one more, which
    /// requests an acknowledgement, if the latest packet did not: otherwise none would come.
    pub(super) fn room_in(&self, window: u32, in_flight: u32) -> u32 {
        let is_unasked = self.packets_since_ack_req > 0 && in_flight < window;
        let allowed = self.allowed(window);
        match allowed.saturating_sub(in_flight) {
            0 if allowed < window && is_unasked => 1,
            room => room,
        }
    }

    /// Request packets between `una` and the cursor.
    pub(super) fn unacknowledged(&self) -> u32 {
        let acknowledged = self.position(0, self.queue.front().map_or(0, |front| front.done));
        self.position(self.next, self.next_packet).wrapping_sub(acknowledged)
    }

    /// Request packets behind the cursor: those that were never sent, and those that will be sent
    /// again.
    pub(super) fn unsent(&self) -> u32 {
        self.post_packets.wrapping_sub(self.position(self.next, self.next_packet))
    }

    /// Request packets before packet `packet` of the request at `index`, since the first request.
    fn position(&self, index: usize, packet: u32) -> u32 {
        match self.queue.get(index) {
            Some(request) if request.is_read() => request.packets_before,
            Some(request) => request.packets_before.wrapping_add(packet),
            None => self.post_packets,
        }
    }

    /// The request that the sent `psn` belongs to, if it is still in the queue.
    pub(super) fn index_of(&self, psn: Psn) -> Option<usize> {
        let first = self.queue.front()?.packets_before;
        // The posted requests may exceed the PSN space; those sent take less than half of it.
        let back = psn.distance_from(self.sent_end);
        let back = (back < 0).then_some(back.unsigned_abs())?;
        let packet = self.position(self.next, self.next_packet).wrapping_sub(back);
        let ahead = packet.wrapping_sub(first);
        if ahead >= Psn::MODULUS {
            return None;
        }
        // Local operations take no PSN: if several start at one PSN, the last owns it.
        let (mut low, mut high) = (0, self.queue.len().min(self.next + 1));
        while low < high {
            let middle = low.midpoint(high);
            match self.queue[middle].packets_before.wrapping_sub(first) <= ahead {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low.checked_sub(1)
    }

    /// Half of the PSN space may be outstanding, or old and new PSNs could not be distinguished.
    fn psns_are_distinct(&self, request: &Request) -> bool {
        let last = match request.is_read() {
            true => request.last_psn(),
            false => request.first_psn.plus(self.next_packet),
        };
        last.distance_from(self.una) >= 0
    }

    fn has_credit(&self, request: &Request) -> bool {
        match self.credit {
            Credit::Unknown | Credit::Unlimited => true,
            Credit::UpTo(last) => !request.takes_receive() || !last.is_before(request.ssn),
        }
    }

    /// Builds the packet at the cursor and moves the cursor past it.
    fn build<R: SendRecovery>(
        &mut self,
        recovery: &mut R,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), WcStatus> {
        self.check(cx)?;
        let request = &self.queue[self.next];
        let ack_req = request.is_read()
            || self.next_packet + 1 == request.packets
            || recovery.wants_ack(self, cx.qpc)
            || !self.has_credit(request);
        let (header, payload_len) = request.packet(self.next_packet, cx, ack_req)?;
        let header = PacketHeaders { ordered: recovery.is_ordered(self), ..header };
        self.count_sent(recovery, cx, &header);
        cx.emit(header, payload_len);
        Ok(())
    }

    /// Local conditions that hold for the whole request, checked when it starts.
    fn check(&self, cx: &mut Scope<'_, '_>) -> Result<(), WcStatus> {
        let request = &self.queue[self.next];
        if let Some(status) = request.fault {
            return Err(status);
        }
        // A request started before the limit was lowered is finished.
        let is_begun = request.first_psn.is_before(self.sent_end);
        if request.awaits_response() && cx.qpc.peer.max_rd_atomic == 0 && !is_begun {
            return Err(WcStatus::LocalQpError);
        }
        if self.next_packet != 0 && !request.is_read() {
            return Ok(());
        }
        sg::check_all(cx.regions, cx.qpc.pd, request.access_kind(), &request.wr.sges).map_err(
            |error| {
                cx.count_protection_error(error);
                WcStatus::LocalProtectionError
            },
        )
    }

    /// Whether so many packets were sent without requesting an acknowledgement that the next one
    /// must, with a window of `window` packets.
    pub(super) fn ack_is_overdue(&self, window: u32, qpc: &QpContext) -> bool {
        let most = if qpc.peer.congestion.needs().every_ack { 1 } else { MAX_ACK_INTERVAL };
        self.packets_since_ack_req + 1 >= (window / 4).clamp(1, most)
    }

    fn count_sent<R: SendRecovery>(
        &mut self,
        recovery: &mut R,
        cx: &mut Scope<'_, '_>,
        header: &PacketHeaders,
    ) {
        let PacketHeaders { psn, ack_req, .. } = *header;
        if psn.is_before(self.sent_end) {
            cx.count(|c| &mut c.retransmitted_packets);
        }
        self.packets_since_ack_req = if ack_req { 0 } else { self.packets_since_ack_req + 1 };
        if !self.has_credit(&self.queue[self.next]) {
            self.probe = Some(psn);
            cx.count(|c| &mut c.credit_probes);
        }
        recovery.sent(self, cx, header);
        let end = self.move_cursor();
        if self.sent_end.is_before(end) {
            self.sent_end = end;
        }
    }

    /// Moves the cursor one packet on and returns the PSN that follows what was sent.
    fn move_cursor(&mut self) -> Psn {
        let request = &self.queue[self.next];
        let sent = if request.is_read() { request.packets } else { self.next_packet + 1 };
        let end = request.first_psn.plus(sent);
        self.awaited += u32::from(request.awaits_response());
        if sent == request.packets {
            self.next += 1;
            self.next_packet = 0;
        } else {
            self.next_packet = sent;
        }
        end
    }

    // ---- answers -------------------------------------------------------------------------------

    /// Checks the payload of a response against the request at `index` and resolves its placement.
    pub(super) fn place_response(
        &self,
        cx: &mut Scope<'_, '_>,
        index: usize,
        response: &Response,
    ) -> Result<(), Fault> {
        let request = &self.queue[index];
        let Response { offset, payload_len, original } = *response;
        let (carried, len) = match original {
            Some(_) => (0, ATOMIC_BYTES),
            None => {
                let len = request.piece(offset / cx.qpc.mtu, cx.qpc.mtu);
                (len as usize, len)
            }
        };
        if payload_len != carried || !offset.is_multiple_of(cx.qpc.mtu) {
            cx.count(|c| &mut c.bad_length);
            return Err(bad_response(cx));
        }
        cx.resolve(AccessKind::LocalWrite, &request.wr.sges, Extent { offset, len })
            .map_err(|_| Fault { index, status: WcStatus::LocalProtectionError })?;
        if let Some(original) = original {
            *cx.insert = Insert::Value(original);
        }
        Ok(())
    }

    /// Completes the front, and executed local operations right behind it.
    pub(super) fn complete_front(&mut self, cx: &mut Scope<'_, '_>) {
        self.complete_one(cx);
        self.complete_executed(cx);
    }

    fn complete_executed(&mut self, cx: &mut Scope<'_, '_>) {
        while self.queue.front().is_some_and(|front| front.is_executed) {
            self.complete_one(cx);
        }
    }

    fn complete_one(&mut self, cx: &mut Scope<'_, '_>) {
        let Some(request) = self.queue.front() else {
            return;
        };
        if self.next > 0 {
            self.next -= 1;
            self.awaited -= u32::from(request.awaits_response());
        } else {
            self.next_packet = 0;
        }
        if request.wr.signaled || cx.seeded.is(Bug::UnsignaledCompleted) {
            cx.complete_send(request, WcStatus::Success, request.bytes_brought());
        }
        self.queue.pop_front();
    }

    /// Fails if the front cannot run: everything before it has completed.
    pub(super) fn check_front(&self) -> Result<(), Fault> {
        match self.queue.front().and_then(|front| front.fault) {
            Some(status) => Err(Fault { index: 0, status }),
            None => Ok(()),
        }
    }

    /// Whether anything before the cursor is unacknowledged.
    pub(super) fn is_waiting(&self) -> bool {
        self.next > 0 || self.queue.front().is_some_and(|front| self.next_packet > front.done)
    }

    // ---- credits and retries -------------------------------------------------------------------

    /// Credits for requests from the cursor on.
    pub(super) fn credits(&self) -> Credits {
        match self.credit {
            Credit::Unknown => Credits::Unknown,
            Credit::Unlimited => Credits::Unlimited,
            Credit::UpTo(last) => {
                let begun = self.queue.get(self.next).map_or(self.post_ssn, |at| at.ssn.minus(1));
                Credits::Messages(last.distance_from(begun).max(0) as u32)
            }
        }
    }

    /// Limits only grow: an acknowledgement that was overtaken must not withdraw credits.
    pub(super) fn take_credit(&mut self, aeth: Aeth) {
        let Syndrome::Ack { credits } = aeth.syndrome else {
            return;
        };
        let Some(receives) = credit_count(credits) else {
            debug_assert_eq!(credits, NO_CREDITS);
            self.credit = Credit::Unlimited;
            return;
        };
        let last = Psn::new(aeth.msn).plus(receives);
        self.credit = match self.credit {
            Credit::UpTo(known) if last.is_before(known) => Credit::UpTo(known),
            _ => Credit::UpTo(last),
        };
    }

    /// Messages that are no packets have taken receives: the peer is asked anew.
    pub(super) fn forget_credits(&mut self) {
        if let Credit::UpTo(_) = self.credit {
            self.credit = Credit::UpTo(self.post_ssn);
        }
    }

    /// An RNR NAK reports that there are no receives.
    pub(super) fn note_no_credit(&mut self, aeth: Aeth) {
        if let Credit::Unknown = self.credit {
            self.credit = Credit::UpTo(Psn::new(aeth.msn));
        }
    }

    /// A round-trip time was measured.
    pub(super) fn sample_rtt(&mut self, rtt: Duration) {
        self.rtt.sample(rtt);
        self.progress.rtt = Some(rtt).filter(|_| self.awaited == 0);
    }

    /// A packet from the peer restores the retries.
    pub(super) fn restore_retries(&mut self, qpc: &QpContext) {
        self.retries_left = qpc.peer.retry_count;
        self.stalled_since = None;
    }

    /// `una` has moved.
    pub(super) fn note_acknowledged(&mut self, qpc: &QpContext) {
        self.rnr_retries_left = qpc.peer.rnr_retry;
        self.probe = self.probe.filter(|probe| !probe.is_before(self.una));
    }

    /// Uses one of the retries after timeouts and sequence errors.
    pub(super) fn spend_retry(&mut self) -> Result<(), Fault> {
        let fault = Fault { index: 0, status: WcStatus::RetryExceeded };
        self.retries_left = self.retries_left.checked_sub(1).ok_or(fault)?;
        Ok(())
    }

    /// The peer has no receive for the request at `una`: sending pauses for the delay in its RNR
    /// NAK. Returns whether that is new.
    pub(super) fn wait_for_receiver(
        &mut self,
        cx: &mut Scope<'_, '_>,
        timer: u8,
    ) -> Result<bool, Fault> {
        if self.rnr_until.is_some() {
            return Ok(false);
        }
        if cx.qpc.peer.rnr_retry != RNR_FOREVER {
            let fault = Fault { index: 0, status: WcStatus::RnrRetryExceeded };
            self.rnr_retries_left = self.rnr_retries_left.checked_sub(1).ok_or(fault)?;
        }
        // The peer responds, so the path works: only RNR retries count from here on.
        self.restore_retries(cx.qpc);
        if !cx.seeded.is(Bug::RnrWaitForgotten) {
            self.rnr_until = Some(cx.now + rnr_delay(timer));
        }
        Ok(true)
    }
}

/// Counts a response that does not belong to its request, and ends the connection.
pub(super) fn bad_response(cx: &mut Scope<'_, '_>) -> Fault {
    cx.count(|c| &mut c.bad_response);
    Fault { index: 0, status: WcStatus::BadResponse }
}
