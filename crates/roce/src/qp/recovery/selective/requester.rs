//! The requester's side of selective repeat: reads SACKs, marks packets lost, and retransmits only
//! what is missing.
//!
//! The cursor of [`Requests`] never goes back here; the [`Scoreboard`] (request packets) and the
//! [`ReadTracker`] (responses) choose the retransmissions.
//!
//! Timers, all behind one deadline:
//! - *verbs*: nothing was received for the local ACK timeout. Only this counts as a retry, so a
//!   connection never gives up sooner than its attributes allow (IBA 9.7.6.1.3);
//! - *probe*: nothing was received for as long as an acknowledgement usually takes. The latest
//!   packet is retransmitted, at doubling intervals, to get a SACK;
//! - *loss*: a packet sent before one that has arrived is overdue;
//! - *responses*: requested READ responses have not arrived.

use super::arrivals::horizon;
use super::reads::{RangeRequest, ReadTracker, Verdict};
use super::scoreboard::Scoreboard;
use crate::congestion::rtt::RttEstimator;
use crate::qp::codes::ack_timeout;
use crate::qp::context::{PacketHeaders, QpContext};
use crate::qp::request::Request;
use crate::qp::requests::{Fault, Requests, Response, SendRecovery, bad_response};
use crate::qp::{RxPacket, Scope, TimeoutReason};
use crate::seeded::Bug;
use crate::time::{Duration, Time, earlier};
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{Aeth, Ext, Opcode, Psn, Reth, Sack, Sreth, Syndrome};

/// How long to wait for an acknowledgement before the first measurement.
const FIRST_TIMEOUT: Duration = Duration::from_millis(1);

/// Minimum time after which an acknowledgement or response counts as overdue.
const LEAST_TIMEOUT: Duration = Duration::from_micros(50);

/// The same for an acknowledgement while congestion control allows no more than this. The queues of
/// others come and go, and if all of a few packets are retransmitted too early, no round-trip time
/// is measured.
const LEAST_SMALL_TIMEOUT: Duration = Duration::from_millis(10);
const SMALL_WINDOW: u32 = 4;

/// How often the probe interval doubles.
const MAX_BACKOFF: u32 = 12;

/// See the module's text.
#[derive(Debug)]
pub(in crate::qp) struct Selective {
    board: Scoreboard,
    reads: ReadTracker,
    /// Most packets in flight.
    window: u32,
    /// The local ACK timeout.
    timeout: Option<Duration>,
    /// Since when nothing new was received, or nothing was outstanding.
    quiet_since: Time,
    /// Probes since then, and before as long as no round-trip time was measured.
    backoff: u32,
    /// When the latest probe was scheduled. It may be sent much later, if at all.
    probed_at: Time,
    /// The local ACK timeout has passed, and nothing has been delivered since then.
    has_timed_out: bool,
    /// A probe is to be sent, also where congestion control has no room for a packet.
    owes_probe: bool,
}

impl SendRecovery for Selective {
    /// The window counts packets in flight; the scoreboard holds all since `una`. Lost ones that
    /// must wait come first.
    fn room(&self, requests: &Requests, _: &QpContext) -> u32 {
        if self.board.has_lost() {
            return 0;
        }
        let room = requests.room_in(self.window, self.board.in_flight());
        room.min(horizon(self.window).saturating_sub(self.board.span()))
    }

    fn in_flight(&self, _: &Requests) -> u32 {
        self.board.in_flight()
    }

    /// Responses count towards the window, too, or the peer would fill a queue on the path in which
    /// retransmissions have to wait.
    fn may_await(&self) -> bool {
        self.reads.missing() < self.window.into()
    }

    fn missing_responses(&self, _: &Requests, _: &Request) -> u64 {
        self.reads.missing()
    }

    /// Packets after a READ or atomic must not be placed before that is executed.
    fn is_ordered(&self, requests: &Requests) -> bool {
        requests.awaited > 0
    }

    fn wants_ack(&self, requests: &Requests, qpc: &QpContext) -> bool {
        let window = requests.allowed(self.window);
        // A small window must not wait for an acknowledgement that nobody requested.
        let is_last = || window < self.window && self.room(requests, qpc) <= 1;
        requests.ack_is_overdue(window, qpc) || is_last()
    }

    fn sent(&mut self, requests: &Requests, cx: &Scope<'_, '_>, _: &PacketHeaders) {
        let request = &requests.queue[requests.next];
        if !self.is_waiting() {
            self.quiet_since = cx.now;
        }
        let forgets = cx.seeded.is(Bug::ReadSlotsNotGrown) && self.reads.is_full();
        if request.awaits_response() && !forgets {
            let (psn, is_prompt) = (request.first_psn, request.is_atomic());
            self.reads.begin(psn, cx.qpc.packets(request.len), is_prompt, cx.now);
        }
        self.board.sent_first(cx.now);
    }

    fn has_retransmission(&self) -> bool {
        self.board.has_lost() || self.reads.may_request()
    }

    fn poll_retransmission(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        let lost = self.board.next_lost().filter(|_| self.may_retransmit(requests));
        let range = if lost.is_none() { self.reads.next_range_request() } else { None };
        let Some(psn) = lost.or(range.map(|(psn, _)| psn)) else {
            return Ok(());
        };
        let index = requests.index_of(psn).unwrap_or(0);
        let request = &requests.queue[index];
        let built = match range {
            None => {
                let packet = psn.distance_from(request.first_psn) as u32;
                // A READ or atomic behind it may be outstanding: only those before it matter.
                let mut before = requests.queue.iter().take(index);
                let ordered = self.is_ordered(requests) && before.any(Request::awaits_response);
                let built = request.packet(packet, cx, true);
                built.map(|(header, len)| (PacketHeaders { ordered, ..header }, len))
            }
            Some((_, range)) => range_request_packet(request, psn, range, cx),
        };
        let (header, len) = built.map_err(|status| Fault { index, status })?;
        match lost {
            Some(psn) => {
                self.board.retransmitted(psn, cx.now);
                self.owes_probe = false;
            }
            None => self.reads.range_request_sent(cx.now),
        }
        cx.count(|c| &mut c.retransmitted_packets);
        cx.count(|c| &mut c.selective_retransmits);
        cx.emit(header, len);
        Ok(())
    }

    fn handle_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault> {
        let psn = packet.headers.bth().psn;
        if !psn.is_before(requests.sent_end) {
            cx.count(|c| &mut c.bad_psn);
            return Ok(());
        }
        match *packet.headers.ext() {
            Ext::Aeth(aeth) if packet.headers.bth().opcode == Opcode::RcAcknowledge => {
                self.handle_acknowledge(requests, cx, psn, aeth, None)
            }
            Ext::AethSack(aeth, sack) => {
                self.handle_acknowledge(requests, cx, psn, aeth, Some(&sack))
            }
            Ext::AethSreth(aeth, sreth) => {
                let response = Response {
                    offset: sreth.offset,
                    payload_len: packet.payload_len,
                    original: None,
                };
                self.handle_piece(requests, cx, psn, aeth, &response)
            }
            Ext::AethAtomicAck(aeth, ack) => {
                let response = Response {
                    offset: 0,
                    payload_len: packet.payload_len,
                    original: Some(ack.original),
                };
                self.handle_piece(requests, cx, psn, aeth, &response)
            }
            _ if requests.index_of(psn).is_some() => Err(bad_response(cx)),
            _ => {
                cx.count(|c| &mut c.duplicate_acks);
                Ok(())
            }
        }
    }

    fn resume(&mut self, now: Time) {
        self.heard(now);
    }

    fn ack_deadline(&self) -> Option<Time> {
        self.timeout.filter(|_| self.is_waiting()).map(|timeout| self.quiet_since + timeout)
    }

    fn restart_ack_timer(&mut self, now: Time, _: Duration) {
        self.quiet_since = now;
    }

    fn set_ack_timeout(&mut self, _: &mut Requests, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    fn deadline(&self, requests: &Requests) -> Option<(Time, TimeoutReason)> {
        // Every event asks, and receivers wait for nothing.
        if self.board.is_empty() && self.reads.is_at_rest() {
            return None;
        }
        let rtt = &requests.rtt.estimator;
        let loss = self.board.loss_time(|| reorder_timeout(rtt));
        let mut probe = earlier(self.probe_time(requests), loss);
        if !self.reads.is_at_rest() {
            let reads = self.reads.poll_timeout(self.board.una(), self.response_timeout(rtt));
            probe = earlier(probe, reads);
        }
        match (self.ack_deadline(), probe) {
            (Some(verbs), probe) if probe.is_none_or(|probe| verbs <= probe) => {
                Some((verbs, TimeoutReason::AckTimeout))
            }
            (_, probe) => probe.map(|at| (at, TimeoutReason::LossProbe)),
        }
    }

    fn handle_timeout(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        if self.ack_deadline().is_some_and(|at| at <= cx.now) {
            requests.spend_retry()?;
            requests.progress.has_timed_out = true;
            cx.count(|c| &mut c.timeouts);
            self.board.mark_all_lost();
            self.has_timed_out = true;
            self.reads.handle_timeout(self.board.una(), Duration::ZERO, cx.now);
            self.quiet_since = cx.now;
            return Ok(());
        }
        let rtt = &requests.rtt.estimator;
        let lost = self.board.mark_lost(cx.now, reorder_timeout(rtt));
        cx.add(lost.into(), |c| &mut c.packets_marked_lost);
        requests.progress.lost += lost;
        let timeout = self.response_timeout(rtt);
        self.reads.handle_timeout(self.board.una(), timeout, cx.now);
        if lost == 0 && self.probe_time(requests).is_some_and(|at| at <= cx.now) {
            self.board.mark_latest_lost();
            self.backoff += 1;
            (self.probed_at, self.owes_probe) = (cx.now, true);
            cx.count(|c| &mut c.loss_probes);
        }
        Ok(())
    }

    fn is_drained(&self, requests: &Requests) -> bool {
        requests.next == 0 && requests.next_packet == 0
    }
}

impl Selective {
    pub(in crate::qp) fn new(qpc: &QpContext, first_psn: Psn) -> Selective {
        Selective {
            board: Scoreboard::new(first_psn, horizon(qpc.peer.window_packets)),
            window: qpc.peer.window_packets,
            reads: ReadTracker::new(qpc.peer.max_rd_atomic.into()),
            timeout: ack_timeout(qpc.peer.timeout),
            quiet_since: Time::ZERO,
            backoff: 0,
            probed_at: Time::ZERO,
            has_timed_out: false,
            owes_probe: false,
        }
    }

    fn is_waiting(&self) -> bool {
        !self.board.is_empty() || !self.reads.is_empty()
    }

    /// After a timeout, retransmissions stay within the window of congestion control until one
    /// arrives: all that was lost, sent at once, would be a burst that a full queue on the path
    /// drops again, each time.
    fn may_retransmit(&self, requests: &Requests) -> bool {
        let has_room = self.board.in_flight() < requests.allowed(self.window);
        has_room || self.owes_probe || !self.has_timed_out
    }

    fn heard(&mut self, now: Time) {
        self.quiet_since = now;
        self.backoff = 0;
    }

    /// How long to wait for a READ response before it is requested again.
    fn response_timeout(&self, rtt: &RttEstimator) -> Duration {
        self.capped(rtt.timeout(LEAST_TIMEOUT).unwrap_or(FIRST_TIMEOUT))
    }

    /// At most the local ACK timeout, so that each retry it counts retransmits something.
    fn capped(&self, interval: Duration) -> Duration {
        self.timeout.map_or(interval, |timeout| interval.min(timeout))
    }

    fn probe_time(&self, requests: &Requests) -> Option<Time> {
        let since = self.board.latest_sent().unwrap_or(self.quiet_since).max(self.probed_at);
        let usual = self.response_timeout(&requests.rtt.estimator);
        let is_small = requests.allowed(self.window) <= SMALL_WINDOW.min(self.window - 1);
        let usual = if is_small { usual.max(LEAST_SMALL_TIMEOUT) } else { usual };
        let interval = self.capped(usual * (1 << self.backoff.min(MAX_BACKOFF)));
        (!self.board.is_empty()).then_some(since.max(self.quiet_since) + interval)
    }

    // ---- answers -------------------------------------------------------------------------------

    fn handle_acknowledge(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        psn: Psn,
        aeth: Aeth,
        sack: Option<&Sack>,
    ) -> Result<(), Fault> {
        let status = match aeth.syndrome {
            Syndrome::Ack { .. } => {
                cx.count(|c| &mut c.acks_received);
                if psn.next().is_before(requests.una) {
                    // An older one, overtaken; or a peer that withdraws what it has acknowledged,
                    // which must not be taken for progress.
                    cx.count(|c| &mut c.duplicate_acks);
                    return Ok(());
                }
                requests.take_credit(aeth);
                return self.settle(requests, cx, psn.next(), sack);
            }
            Syndrome::SequenceError => {
                cx.count(|c| &mut c.seq_naks_received);
                self.settle(requests, cx, psn, None)?;
                self.board.mark_one_lost(psn);
                return Ok(());
            }
            Syndrome::RnrNak { timer } => {
                cx.count(|c| &mut c.rnr_naks_received);
                requests.note_no_credit(aeth);
                self.settle(requests, cx, psn, None)?;
                if psn == requests.una && requests.wait_for_receiver(cx, timer)? {
                    self.board.mark_one_lost(psn);
                }
                return Ok(());
            }
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => WcStatus::RemoteInvalidRequest,
            Syndrome::RemoteAccess => WcStatus::RemoteAccessError,
            Syndrome::RemoteOperation => WcStatus::RemoteOperationError,
        };
        // A NAK for a request completed long ago is late, or forged.
        if requests.index_of(psn).is_none() {
            cx.count(|c| &mut c.duplicate_acks);
            return Ok(());
        }
        cx.count(|c| &mut c.fatal_naks_received);
        self.settle(requests, cx, psn, None)?;
        // The responder has executed everything before `psn` and ended the connection, because of
        // the request there, or because of a later one that arrived out of order: the SACK starts
        // with it.
        let refused = sack.map_or(psn, |sack| sack.start);
        Err(Fault { index: requests.index_of(refused).unwrap_or(0), status })
    }

    /// Everything before `una` has been executed, and the packets in `sack` have arrived.
    fn settle(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        una: Psn,
        sack: Option<&Sack>,
    ) -> Result<(), Fault> {
        let summary = self.board.handle_ack(una, sack, cx.now);
        if let Some(rtt) = summary.rtt {
            requests.sample_rtt(rtt);
        }
        requests.progress.acknowledged += summary.delivered;
        self.has_timed_out &= summary.delivered == 0;
        cx.add(summary.spurious.into(), |c| &mut c.spurious_retransmits);
        // While more SACKs follow, packets not reported may have arrived.
        if sack.is_none_or(|sack| !sack.more) {
            let lost = self.board.mark_lost(cx.now, reorder_timeout(&requests.rtt.estimator));
            cx.add(lost.into(), |c| &mut c.packets_marked_lost);
            requests.progress.lost += lost;
        }
        let una = self.board.una();
        if summary.delivered == 0 && una == requests.una {
            cx.count(|c| &mut c.duplicate_acks);
            return Ok(());
        }
        let backoff = self.backoff;
        self.heard(cx.now);
        if summary.delivered > 0 && summary.rtt.is_none() {
            // As Karn's algorithm has it (RFC 6298): if all was sent twice, the path may have
            // become longer than the estimate, which only a packet that is not probed too early can
            // mend.
            self.backoff = backoff;
        }
        requests.restore_retries(cx.qpc);
        if requests.una != una {
            requests.una = una;
            requests.note_acknowledged(cx.qpc);
        }
        self.complete_ready(requests, cx)
    }

    /// Completes finished requests, oldest first, up to the first unfinished one.
    fn complete_ready(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault> {
        while let Some(front) = requests.queue.front().filter(|front| self.is_done(requests, front))
        {
            if front.awaits_response() {
                self.reads.pop_front();
            }
            requests.complete_front(cx);
        }
        requests.check_front()
    }

    fn is_done(&self, requests: &Requests, front: &Request) -> bool {
        match () {
            () if requests.next == 0 => false,
            () if front.is_local() => front.is_executed,
            () if front.awaits_response() => self.reads.is_front_complete(),
            () => front.last_psn().is_before(requests.una),
        }
    }

    /// A response: it implies that its request, and everything before, was executed.
    fn handle_piece(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        psn: Psn,
        aeth: Aeth,
        response: &Response,
    ) -> Result<(), Fault> {
        // Responses to requests settled long ago prove nothing: they are late, or forged.
        if !psn.next().is_before(requests.una) {
            requests.take_credit(aeth);
        }
        if !psn.is_before(requests.una) {
            self.settle(requests, cx, psn.next(), None)?;
        }
        let owner = requests.index_of(psn).filter(|&at| requests.queue[at].awaits_response());
        let Some(index) = owner else {
            cx.count(|c| &mut c.duplicate_acks);
            return Ok(());
        };
        let number = response.offset / cx.qpc.mtu;
        match self.reads.classify(psn, number) {
            Verdict::New => {}
            Verdict::Unknown => return Err(bad_response(cx)),
            Verdict::Duplicate => {
                cx.count(|c| &mut c.duplicate_acks);
                return Ok(());
            }
            Verdict::Beyond => {
                self.reads.cut(psn);
                return Ok(());
            }
        }
        if requests.queue[index].is_atomic() != response.original.is_some() {
            return Err(bad_response(cx));
        }
        requests.place_response(cx, index, response)?;
        self.reads.accept(psn, number, cx.now);
        self.heard(cx.now);
        requests.restore_retries(cx.qpc);
        self.complete_ready(requests, cx)
    }
}

/// The reorder timeout: how long after its transmission a packet is lost, if one sent later has
/// arrived.
fn reorder_timeout(rtt: &RttEstimator) -> Duration {
    let usual = rtt.smoothed().unwrap_or(FIRST_TIMEOUT).as_nanos();
    Duration::from_nanos(usual + usual / 8 + 1_000)
}

/// A request for the missing responses of a READ, or for the result of an atomic.
fn range_request_packet(
    request: &Request,
    psn: Psn,
    range: RangeRequest,
    cx: &mut Scope<'_, '_>,
) -> Result<(PacketHeaders, u32), WcStatus> {
    let SendOp::Read { remote_addr, rkey } = request.wr.op else {
        return request.packet(0, cx, true);
    };
    let offset = range.first * cx.qpc.mtu;
    let end = (u64::from(range.end) * u64::from(cx.qpc.mtu)).min(request.len.into());
    let addr = remote_addr.wrapping_add(offset.into());
    let reth = Reth { addr, rkey, len: end as u32 - offset };
    let ext = Ext::RethSreth(reth, Sreth { sequence: 0, offset });
    Ok((PacketHeaders::new(Opcode::SrReadRequest, psn, ext), 0))
}
