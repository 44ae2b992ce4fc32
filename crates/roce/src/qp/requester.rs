//! The requester half of a reliable connection: posted sends become request packets, answers
//! complete them (IBA 9.7.3 to 9.7.7, requester side).
//!
//! Posted work requests stand in one queue, oldest first. Each is given its PSNs when it is posted,
//! so the queue is at the same time the map from PSN to request:
//!
//! ```text
//!   front                       next                         back
//!   | done | outstanding ....... | not yet sent ............. |
//!          una                   cursor (next, next_packet)
//! ```
//!
//! Invariants:
//! - only the front can be partly `done`; everything before `una` is acknowledged;
//! - going back (timeout, NAK, missing READ response) moves the cursor to `una` and nothing else:
//!   requests keep their PSNs, so the responder can tell old from new (go-back-N);
//! - a READ or atomic is done only by its responses. An acknowledgement beyond an unanswered one says
//!   that responses were lost; then it is asked for again under the same PSN, and the responder knows
//!   an atomic by that and carries it out no second time;
//! - local operations take no PSN. They are carried out when the cursor comes to them, once, and
//!   complete in their turn: one that was carried out is never the front;
//! - a request that cannot run locally stops the cursor, and fails when it has become the front,
//!   so that completions stay in order (C2).

mod selective;

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use super::codes::{NO_CREDITS, ack_timeout, credit_count, rnr_delay};
use super::link::{Draft, Link};
use super::request::{self, ATOMIC_BYTES, Request};
use super::{Context, HELD_RESPONSES, TimeoutReason};
use crate::attributes::AttrMask;
use crate::endpoint::Insert;
use crate::planted::Bug;
use crate::region::Purpose;
use crate::report::{Credits, Flow};
use crate::rtt::RttMeter;
use crate::sg::{self, Extent};
use crate::time::{Duration, Time};
use crate::verbs::{SendWr, WcStatus};
use crate::wire::{Aeth, Ext, Headers, Opcode, Psn, Syndrome};
use selective::Selective;

/// An acknowledgement is asked for at least this often, in packets.
const MAX_ACK_INTERVAL: u32 = 32;

/// `rnr_retry` that never gives up.
const RNR_FOREVER: u8 = 7;

/// An ACK timer that is handled this late tells nothing of the peer: this process did not run, and the
/// answers may be waiting.
const LATE: Duration = Duration::from_millis(100);

/// How long timeouts are excused before they spend retries all the same.
const PATIENCE: Duration = Duration::from_millis(300_000);

/// A request that ended badly, and with it the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Which one, counted from the front of the queue.
    pub(super) index: usize,
    /// How it ended. All others are flushed.
    pub(super) status: WcStatus,
}

/// How far the responder's credits reach (IBA 9.7.7.2).
#[derive(Clone, Copy, Debug)]
enum Credit {
    /// The responder has not said yet. A connection starts as if it did not count: receives are
    /// usually posted before, and the first messages then need no extra round trip. If there are
    /// none, the RNR NAK says so, which costs one window of packets, once: from then on there are
    /// no credits until an acknowledgement brings some.
    Unknown,
    /// The responder does not count.
    Unlimited,
    /// Messages up to this sequence number have a receive waiting.
    UpTo(Psn),
}

/// What the requester waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Nothing,
    /// An answer, until then.
    Answer(Time),
    /// The peer's receives: nothing is sent until then.
    Receiver(Time),
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Requester {
    queue: VecDeque<Request>,
    limit: u32,
    /// First PSN of the next work request to be posted.
    post_psn: Psn,
    /// Sequence number of the last work request posted.
    post_ssn: Psn,
    /// Request packets of all work requests posted.
    post_packets: u32,
    una: Psn,
    /// One past the highest PSN ever sent (or asked for, by READ).
    sent_end: Psn,
    next: usize,
    next_packet: u32,
    /// READs and atomics between `una` and the cursor.
    awaited: u32,
    packets_since_ack_req: u32,
    /// A NAK, sent or implied, has moved the cursor back to `una`, and since then there was neither
    /// progress nor a timeout.
    gone_back: bool,
    /// Last packet sent without credit; one at a time.
    probe: Option<Psn>,
    credit: Credit,
    /// How many packets may be unacknowledged, if less than the window. A timeout may mean that the
    /// peer cannot keep up, and a whole window of repetitions would only put it further behind: then
    /// one packet is sent, and each that is acknowledged allows one more.
    allowance: u32,
    retries_left: u8,
    /// When the first timeout was excused since the peer was last heard.
    excused_since: Option<Time>,
    rnr_retries_left: u8,
    wait: Wait,
    /// No request is begun.
    is_paused: bool,
    rtt: Box<RttMeter>,
    /// What selective repeat keeps; in go-back-N nothing.
    selective: Option<Box<Selective>>,
}

impl Requester {
    pub(super) fn new(limit: u32, first_psn: Psn) -> Requester {
        Requester::fresh(VecDeque::with_capacity(limit as usize), limit, first_psn)
    }

    /// Forgets everything, posted work requests too: the queue pair goes back to RESET.
    pub(super) fn reset(&mut self, first_psn: Psn) {
        let mut queue = core::mem::take(&mut self.queue);
        queue.clear();
        *self = Requester::fresh(queue, self.limit, first_psn);
    }

    fn fresh(queue: VecDeque<Request>, limit: u32, first_psn: Psn) -> Requester {
        Requester {
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
            gone_back: false,
            probe: None,
            credit: Credit::Unknown,
            allowance: u32::MAX,
            retries_left: 0,
            excused_since: None,
            rnr_retries_left: 0,
            wait: Wait::Nothing,
            is_paused: false,
            rtt: Box::default(),
            selective: None,
        }
    }

    pub(super) fn start(&mut self, link: &Link) {
        self.retries_left = link.peer.retry_count;
        self.rnr_retries_left = link.peer.rnr_retry;
        self.start_selective(link);
    }

    /// Attributes have changed while the connection runs: what was derived from them changes too.
    pub(super) fn follow(&mut self, link: &Link, changed: AttrMask) {
        if changed.has(AttrMask::RETRY_CNT) {
            self.retries_left = link.peer.retry_count;
        }
        if changed.has(AttrMask::RNR_RETRY) {
            self.rnr_retries_left = link.peer.rnr_retry;
        }
        if !changed.has(AttrMask::TIMEOUT) {
            return;
        }
        let timeout = ack_timeout(link.peer.timeout);
        self.follow_timeout(timeout);
        match (self.wait, timeout) {
            (Wait::Answer(_), None) => self.wait = Wait::Nothing,
            // Verbs carry no time. Sent once more, the packets start the timer that they had not.
            (Wait::Nothing, Some(_)) if self.selective.is_none() && self.is_waiting() => {
                self.rewind();
            }
            _ => {}
        }
    }

    /// Round-trip times of this connection.
    pub(super) fn rtt(&self) -> &RttMeter {
        &self.rtt
    }

    pub(super) fn is_full(&self) -> bool {
        self.vacant() == 0
    }

    /// Requests that may still be posted.
    pub(super) fn vacant(&self) -> usize {
        (self.limit as usize).saturating_sub(self.queue.len())
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    /// Stops before the next request that was not begun, or goes on.
    pub(super) fn pause(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    /// Whether everything that was begun is done.
    pub(super) fn is_drained(&self) -> bool {
        match &self.selective {
            Some(_) => self.next == 0 && self.next_packet == 0,
            None => {
                self.una == self.sent_end && self.queue.front().is_none_or(|front| front.done == 0)
            }
        }
    }

    /// Work requests posted and not completed.
    pub(super) fn len(&self) -> u32 {
        self.queue.len() as u32
    }

    /// The oldest PSN that is not acknowledged.
    pub(super) fn unacknowledged_psn(&self) -> Psn {
        self.una
    }

    /// Work request and first unanswered PSN of a request in the queue.
    pub(super) fn posted_at(&self, index: usize) -> Option<(u64, Psn)> {
        let request = self.queue.get(index)?;
        Some((request.wr.wr_id, request.first_psn.plus(request.done)))
    }

    /// Where it stands; what the responder knows is left at its default.
    pub(super) fn flow(&self, link: &Link) -> Flow {
        Flow {
            unacknowledged: self.una,
            next: self.sent_end,
            expected: Psn::default(),
            in_flight_packets: self.unacknowledged(),
            window_packets: link.peer.window_packets,
            credits: self.credits(),
            retries_left: self.retries_left,
            rnr_retries_left: self.rnr_retries_left,
        }
    }

    /// Credits for requests from the cursor on.
    fn credits(&self) -> Credits {
        match self.credit {
            Credit::Unknown => Credits::Unknown,
            Credit::Unlimited => Credits::Unlimited,
            Credit::UpTo(last) => {
                let begun = self.queue.get(self.next).map_or(self.post_ssn, |at| at.ssn.minus(1));
                Credits::Messages(last.distance_from(begun).max(0) as u32)
            }
        }
    }

    /// Queues a request of `len` bytes, which is within limits.
    pub(super) fn post(&mut self, link: &Link, wr: SendWr, len: u32) {
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
            request.packets = link.psns(len, request.is_read());
            // Selective repeat counts receives only: a WRITE may be several messages to the peer.
            if !link.is_selective() || request.takes_receive() {
                request.ssn = request.ssn.next();
            }
        }
        self.post_ssn = request.ssn;
        self.post_psn = self.post_psn.plus(request.packets);
        self.post_packets = self.post_packets.wrapping_add(request.request_packets());
        self.queue.push_back(request);
    }

    /// The oldest request, taken out; for flushing.
    pub(super) fn take_front(&mut self) -> Option<Request> {
        self.queue.pop_front()
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.next < self.queue.len()
            || self.selective.as_ref().is_some_and(|selective| selective.has_repetitions())
    }

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        match self.wait {
            Wait::Nothing => self.selective_deadline(),
            Wait::Answer(at) => Some((at, TimeoutReason::AckTimeout)),
            Wait::Receiver(at) => Some((at, TimeoutReason::RnrWait)),
        }
    }

    // ---- sending -------------------------------------------------------------------------------

    /// Leaves in `cx.packet` the next request packet, if one may be sent now.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fault> {
        if matches!(self.wait, Wait::Receiver(_)) {
            return Ok(());
        }
        self.poll_again(cx, link)?;
        if cx.packet.is_some() {
            return Ok(());
        }
        while let Some(request) = self.queue.get(self.next) {
            if request.fault.is_none() && !self.may_send(request, link) {
                return Ok(());
            }
            if !request.is_local() {
                return self.build(cx, link).or_else(|status| self.fail_at_cursor(status));
            }
            if let Err(status) = self.pass_local(cx, link) {
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

    /// Whether the request at the cursor may go on.
    fn may_send(&self, request: &Request, link: &Link) -> bool {
        if request.is_local() {
            return self.may_begin(request, request.is_executed);
        }
        let is_begun = request.first_psn.is_before(self.sent_end);
        self.window_is_open(link)
            && self.psns_are_distinct(request)
            && (self.next_packet > 0 || self.may_begin(request, is_begun))
            && (!request.awaits_response() || self.may_await(link))
            && (self.has_credit(request) || self.probe.is_none())
    }

    /// Whether a request may start, as far as a pause and the requests before it are concerned.
    fn may_begin(&self, request: &Request, is_begun: bool) -> bool {
        (is_begun || !self.is_paused)
            && (self.awaited == 0 || !(request.is_fenced() || self.would_be_held(request)))
    }

    /// Whether the peer would hold a request back, and have it retransmitted, because too much of the
    /// READs before it is unanswered.
    fn would_be_held(&self, request: &Request) -> bool {
        !request.is_read() && self.missing_responses(request) > HELD_RESPONSES.into()
    }

    /// Responses of READs and atomics before the request at the cursor that have not come.
    fn missing_responses(&self, request: &Request) -> u64 {
        match &self.selective {
            Some(selective) => selective.missing_responses(),
            None => {
                let psns = request.first_psn.distance_from(self.una).unsigned_abs();
                u64::from((psns + self.awaited).saturating_sub(self.unacknowledged()))
            }
        }
    }

    /// In selective repeat, what follows a READ or atomic must not be placed before it is executed.
    fn is_ordered(&self) -> bool {
        self.selective.is_some() && self.awaited > 0
    }

    /// Carries out the local operation at the cursor, unless it was before a going back.
    fn pass_local(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        let request = &mut self.queue[self.next];
        if let Some(status) = request.fault {
            return Err(status);
        }
        if !request.is_executed {
            request::execute_local(cx, link, request.wr.op)?;
            request.is_executed = true;
        }
        self.next += 1;
        self.complete_executed(cx, link);
        Ok(())
    }

    /// New packets that may be sent before an answer has to come.
    fn room(&self, link: &Link) -> u32 {
        let window = link.peer.window_packets.min(self.allowance);
        match &self.selective {
            Some(selective) => selective.room(),
            None => window.saturating_sub(self.unacknowledged()),
        }
    }

    fn window_is_open(&self, link: &Link) -> bool {
        self.room(link) > 0
    }

    /// Request packets between `una` and the cursor.
    fn unacknowledged(&self) -> u32 {
        let acknowledged = self.position(0, self.queue.front().map_or(0, |front| front.done));
        self.position(self.next, self.next_packet).wrapping_sub(acknowledged)
    }

    /// Request packets before packet `packet` of the request at `index`, since the first request.
    fn position(&self, index: usize, packet: u32) -> u32 {
        match self.queue.get(index) {
            Some(request) if request.is_read() => request.packets_before,
            Some(request) => request.packets_before.wrapping_add(packet),
            None => self.post_packets,
        }
    }

    /// Half the circle of PSNs may be outstanding, or old and new could not be told apart.
    fn psns_are_distinct(&self, request: &Request) -> bool {
        let last = match request.is_read() {
            true => request.last_psn(),
            false => request.first_psn.plus(self.next_packet),
        };
        last.distance_from(self.una) >= 0
    }

    /// A READ or atomic that is not allowed at all is built anyway, to fail there.
    fn may_await(&self, link: &Link) -> bool {
        let limit = u32::from(link.peer.max_rd_atomic);
        let is_open = self.selective.as_ref().is_none_or(|selective| selective.may_read());
        limit == 0 || (self.awaited < limit && is_open)
    }

    fn has_credit(&self, request: &Request) -> bool {
        match self.credit {
            Credit::Unknown | Credit::Unlimited => true,
            Credit::UpTo(last) => !request.takes_receive() || !last.is_before(request.ssn),
        }
    }

    /// Builds the packet at the cursor and moves the cursor past it.
    fn build(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        self.check(cx, link)?;
        let ack_req = self.ack_is_due(link);
        let request = &self.queue[self.next];
        let (draft, payload_len) = request.packet(self.next_packet, cx, link, ack_req)?;
        let draft = Draft { ordered: self.is_ordered(), ..draft };
        self.count_sent(cx, link, draft.psn, ack_req);
        cx.emit(link, draft, payload_len);
        Ok(())
    }

    /// Local conditions that hold for the whole request, checked when it starts.
    fn check(&self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        let request = &self.queue[self.next];
        if let Some(status) = request.fault {
            return Err(status);
        }
        // One that was begun before the limit fell is finished.
        let is_begun = request.first_psn.is_before(self.sent_end);
        if request.awaits_response() && link.peer.max_rd_atomic == 0 && !is_begun {
            return Err(WcStatus::LocalQpError);
        }
        if self.next_packet != 0 && !request.is_read() {
            return Ok(());
        }
        sg::check_all(cx.regions, link.pd, request.purpose(), &request.wr.sges).map_err(|refusal| {
            cx.count_refusal(refusal);
            WcStatus::LocalProtectionError
        })
    }

    /// Whether the packet at the cursor has to ask for an acknowledgement: the last of a message,
    /// every so often, and whenever sending stops until an answer comes.
    fn ack_is_due(&self, link: &Link) -> bool {
        let request = &self.queue[self.next];
        let window = link.peer.window_packets.min(self.allowance);
        let interval = (window / 4).clamp(1, MAX_ACK_INTERVAL);
        request.is_read()
            || self.next_packet + 1 == request.packets
            || self.packets_since_ack_req + 1 >= interval
            || (self.selective.is_none() && self.room(link) <= 1)
            || !self.has_credit(request)
    }

    fn count_sent(&mut self, cx: &mut Context<'_>, link: &Link, psn: Psn, ack_req: bool) {
        if psn.is_before(self.sent_end) {
            cx.count(|c| &mut c.retransmitted_packets);
        }
        self.packets_since_ack_req = if ack_req { 0 } else { self.packets_since_ack_req + 1 };
        if !self.has_credit(&self.queue[self.next]) {
            self.probe = Some(psn);
            cx.count(|c| &mut c.credit_probes);
        }
        self.keep_score(cx, link);
        let is_new = !psn.is_before(self.sent_end);
        let end = self.move_cursor();
        if self.sent_end.is_before(end) {
            self.sent_end = end;
        }
        if self.selective.is_some() {
            return;
        }
        if is_new && ack_req {
            self.rtt.probe.sent(psn, cx.now);
        }
        if let (Wait::Nothing, Some(timeout)) = (self.wait, ack_timeout(link.peer.timeout)) {
            self.wait = Wait::Answer(cx.now + timeout);
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

    /// An acknowledgement, or a response to a READ or an atomic. Leaves in `cx.pieces` where its
    /// payload, or `cx.insert`, goes.
    pub(super) fn handle_response(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fault> {
        if self.selective.is_some() {
            return self.handle_selective(cx, link, headers, payload_len);
        }
        let psn = headers.bth().psn;
        let aeth = headers.ext().aeth().copied();
        let is_known = cx.planted.distance(psn, self.sent_end) < 0;
        if !is_known && !cx.planted.is(Bug::AckBeyondWindow) {
            cx.count(|c| &mut c.bad_psn);
        } else if psn.is_before(self.una) {
            self.handle_duplicate(cx, psn, aeth);
        } else if headers.bth().opcode.is_read_response() {
            return self.handle_read_response(cx, link, headers, payload_len);
        } else if headers.bth().opcode == Opcode::RcAtomicAcknowledge {
            return self.handle_atomic_response(cx, link, headers, payload_len);
        } else if let (Opcode::RcAcknowledge, Some(aeth)) = (headers.bth().opcode, aeth) {
            self.handle_acknowledge(cx, link, psn, aeth)?;
        } else {
            return Err(self.bad_response(cx));
        }
        Ok(())
    }

    /// The responder may repeat its latest acknowledgement to give new credits.
    fn handle_duplicate(&mut self, cx: &mut Context<'_>, psn: Psn, aeth: Option<Aeth>) {
        cx.count(|c| &mut c.duplicate_acks);
        if let Some(aeth) = aeth.filter(|_| psn.next() == self.una) {
            self.take_credit(aeth);
        }
    }

    fn handle_acknowledge(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        aeth: Aeth,
    ) -> Result<(), Fault> {
        let ahead = psn.distance_from(self.una) as u32;
        match aeth.syndrome {
            Syndrome::Ack { .. } => {
                cx.count(|c| &mut c.acks_received);
                self.take_credit(aeth);
                if self.advance(cx, link, ahead + 1)? > 0 {
                    return self.handle_lost_response(cx);
                }
                Ok(())
            }
            Syndrome::SequenceError => {
                cx.count(|c| &mut c.seq_naks_received);
                if self.advance(cx, link, ahead)? > 0 {
                    return self.handle_lost_response(cx);
                }
                self.retry()
            }
            Syndrome::RnrNak { timer } => {
                cx.count(|c| &mut c.rnr_naks_received);
                self.note_no_credit(aeth);
                if self.advance(cx, link, ahead)? > 0 {
                    return self.handle_lost_response(cx);
                }
                self.handle_rnr(cx, link, timer)
            }
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => {
                self.refused(cx, link, ahead, WcStatus::RemoteInvalidRequest)
            }
            Syndrome::RemoteAccess => self.refused(cx, link, ahead, WcStatus::RemoteAccessError),
            Syndrome::RemoteOperation => {
                self.refused(cx, link, ahead, WcStatus::RemoteOperationError)
            }
        }
    }

    fn handle_read_response(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let ahead = headers.bth().psn.distance_from(self.una) as u32;
        if self.advance(cx, link, ahead)? > 0 && !cx.planted.is(Bug::LostReadIgnored) {
            return self.handle_lost_response(cx);
        }
        self.place_read(cx, link, headers.bth().opcode, payload_len)?;
        if let Some(&aeth) = headers.ext().aeth() {
            self.take_credit(aeth);
        }
        self.accept_response_packet(cx, link)
    }

    /// Checks a response against the READ at the front and finds where its payload goes.
    fn place_read(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        opcode: Opcode,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let Some(request) = self.queue.front().filter(|front| front.is_read()) else {
            return Err(self.bad_response(cx));
        };
        let is_end = request.left() == 1;
        if opcode.ends_message() != is_end {
            return Err(self.bad_response(cx));
        }
        let len = request.piece(request.done, link.mtu);
        if payload_len != len as usize {
            cx.count(|c| &mut c.bad_length);
            return Err(self.bad_response(cx));
        }
        let extent = Extent { offset: request.done * link.mtu, len };
        cx.stretch(link, Purpose::LocalWrite, &request.wr.sges, extent)
            .map_err(|_| Fault { index: 0, status: WcStatus::LocalProtectionError })
    }

    fn handle_atomic_response(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let Ext::AethAtomicAck(aeth, ack) = *headers.ext() else {
            return Err(self.bad_response(cx));
        };
        let ahead = headers.bth().psn.distance_from(self.una) as u32;
        if self.advance(cx, link, ahead)? > 0 {
            return self.handle_lost_response(cx);
        }
        self.place_former_value(cx, link, payload_len)?;
        *cx.insert = Insert::Value(ack.original);
        self.take_credit(aeth);
        self.accept_response_packet(cx, link)
    }

    /// Checks an answer against the atomic at the front and finds where the former value goes.
    fn place_former_value(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let Some(request) = self.queue.front().filter(|front| front.is_atomic()) else {
            return Err(self.bad_response(cx));
        };
        if payload_len != 0 {
            cx.count(|c| &mut c.bad_length);
            return Err(self.bad_response(cx));
        }
        let extent = Extent { offset: 0, len: ATOMIC_BYTES };
        cx.stretch(link, Purpose::LocalWrite, &request.wr.sges, extent)
            .map_err(|_| Fault { index: 0, status: WcStatus::LocalProtectionError })
    }

    fn accept_response_packet(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fault> {
        self.advance_front(1);
        if self.queue.front().is_some_and(|front| front.left() == 0) {
            self.complete_front(cx, link);
        }
        self.made_progress(cx, link)
    }

    fn bad_response(&self, cx: &mut Context<'_>) -> Fault {
        cx.count(|c| &mut c.bad_response);
        Fault { index: 0, status: WcStatus::BadResponse }
    }

    /// Acknowledges `psns` PSNs from `una`, up to an unanswered READ or atomic. Returns how many were
    /// not.
    fn advance(&mut self, cx: &mut Context<'_>, link: &Link, psns: u32) -> Result<u32, Fault> {
        let mut rest = psns;
        while rest > 0
            && let Some(front) = self.queue.front().filter(|front| !front.awaits_response())
        {
            let step = front.left().min(rest);
            let completes = step == front.left();
            self.advance_front(step);
            if completes {
                self.complete_front(cx, link);
            }
            rest -= step;
        }
        if rest < psns {
            self.made_progress(cx, link)?;
        }
        Ok(rest)
    }

    /// Marks `step` more PSNs of the front done. An answer to an earlier sending may overtake the
    /// cursor.
    fn advance_front(&mut self, step: u32) {
        self.una = self.una.plus(step);
        self.allowance = self.allowance.saturating_add(step);
        if let Some(front) = self.queue.front_mut() {
            front.done += step;
            if self.next == 0 && !front.is_read() {
                self.next_packet = self.next_packet.max(front.done);
            }
        }
    }

    /// Completes the front, and the local operations right behind it that were carried out.
    fn complete_front(&mut self, cx: &mut Context<'_>, link: &Link) {
        self.complete_one(cx, link);
        self.complete_executed(cx, link);
    }

    fn complete_executed(&mut self, cx: &mut Context<'_>, link: &Link) {
        while self.queue.front().is_some_and(|front| front.is_executed) {
            self.complete_one(cx, link);
        }
    }

    fn complete_one(&mut self, cx: &mut Context<'_>, link: &Link) {
        let Some(request) = self.queue.pop_front() else {
            return;
        };
        if self.next > 0 {
            self.next -= 1;
            self.awaited -= u32::from(request.awaits_response());
        } else {
            self.next_packet = 0;
        }
        if request.wr.signaled || cx.planted.is(Bug::UnsignaledCompleted) {
            cx.complete_send(link, &request, WcStatus::Success, request.bytes_brought());
        }
    }

    fn made_progress(&mut self, cx: &Context<'_>, link: &Link) -> Result<(), Fault> {
        self.rtt.answered(self.una, cx.now);
        self.gone_back = false;
        self.restore_retries(link);
        self.rnr_retries_left = link.peer.rnr_retry;
        self.probe = self.probe.filter(|probe| !probe.is_before(self.una));
        if !matches!(self.wait, Wait::Receiver(_)) {
            let timeout = ack_timeout(link.peer.timeout).filter(|_| self.is_waiting());
            self.wait = timeout.map_or(Wait::Nothing, |timeout| Wait::Answer(cx.now + timeout));
        }
        match self.queue.front().and_then(|front| front.fault) {
            Some(status) => Err(Fault { index: 0, status }),
            None => Ok(()),
        }
    }

    /// The peer was heard.
    fn restore_retries(&mut self, link: &Link) {
        self.retries_left = link.peer.retry_count;
        self.excused_since = None;
    }

    /// Whether anything before the cursor is unanswered.
    fn is_waiting(&self) -> bool {
        self.next > 0 || self.queue.front().is_some_and(|front| self.next_packet > front.done)
    }

    /// An RNR NAK says that there are no receives.
    fn note_no_credit(&mut self, aeth: Aeth) {
        if let Credit::Unknown = self.credit {
            self.credit = Credit::UpTo(Psn::new(aeth.msn));
        }
    }

    /// Limits only grow: an acknowledgement that was overtaken must not take credits back.
    fn take_credit(&mut self, aeth: Aeth) {
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

    // ---- going back ----------------------------------------------------------------------------

    /// A response to the READ or atomic at the front is missing. Later responses keep saying so until
    /// it has been asked for again and answered, so only the first counts.
    fn handle_lost_response(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
        if !self.gone_back {
            cx.count(|c| &mut c.implied_naks);
        }
        self.retry()
    }

    /// Goes back because of a NAK. A second one for the same PSN says nothing new: the network may
    /// have repeated it, or it answers packets sent before. Then only the timer decides.
    fn retry(&mut self) -> Result<(), Fault> {
        if self.gone_back || matches!(self.wait, Wait::Receiver(_)) {
            return Ok(());
        }
        self.go_back()?;
        self.gone_back = true;
        Ok(())
    }

    fn go_back(&mut self) -> Result<(), Fault> {
        if self.retries_left == 0 {
            return Err(Fault { index: 0, status: WcStatus::RetryExceeded });
        }
        self.retries_left -= 1;
        self.rewind();
        self.wait = Wait::Nothing;
        Ok(())
    }

    fn rewind(&mut self) {
        self.next = 0;
        self.next_packet = match self.queue.front() {
            Some(front) if !front.is_read() => front.done,
            _ => 0,
        };
        self.awaited = 0;
        self.packets_since_ack_req = 0;
        self.probe = None;
        self.gone_back = false;
        self.rtt.probe.cancel();
    }

    fn handle_rnr(&mut self, cx: &mut Context<'_>, link: &Link, timer: u8) -> Result<(), Fault> {
        if matches!(self.wait, Wait::Receiver(_)) {
            return Ok(());
        }
        if link.peer.rnr_retry != RNR_FOREVER {
            if self.rnr_retries_left == 0 {
                return Err(Fault { index: 0, status: WcStatus::RnrRetryExceeded });
            }
            self.rnr_retries_left -= 1;
        }
        // The peer answers, so the path works: what counts from here on are RNR retries.
        self.restore_retries(link);
        match &mut self.selective {
            Some(selective) => selective.refused_for_now(self.una),
            None => self.rewind(),
        }
        if !cx.planted.is(Bug::RnrWaitForgotten) {
            self.wait = Wait::Receiver(cx.now + rnr_delay(timer));
        }
        Ok(())
    }

    /// The responder ended the connection because of the request `ahead` PSNs after `una`. READs
    /// and atomics before it that were not answered never will be: they are flushed.
    fn refused(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        ahead: u32,
        status: WcStatus,
    ) -> Result<(), Fault> {
        cx.count(|c| &mut c.fatal_naks_received);
        let mut rest = self.advance(cx, link, ahead)?;
        let covers = |request: &Request| {
            let before = rest;
            rest = rest.saturating_sub(request.left());
            before < request.left()
        };
        let index = self.queue.iter().position(covers).unwrap_or(0);
        Err(Fault { index, status })
    }

    /// Starts an expired ACK timer anew, without a retry, if the peer cannot answer or could not be
    /// heard. Nothing is sent again: what was sent lies at the peer.
    pub(super) fn excuse(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        is_stalled: impl FnOnce() -> bool,
    ) {
        let due = match self.wait {
            Wait::Answer(at) => Some(at),
            Wait::Nothing => self.selective.as_ref().and_then(|selective| selective.verbs_time()),
            Wait::Receiver(_) => None,
        };
        let (Some(due), Some(timeout)) = (due, ack_timeout(link.peer.timeout)) else {
            return;
        };
        let since = self.excused_since.unwrap_or(cx.now);
        if due > cx.now || cx.now.since(since) >= PATIENCE {
            return;
        }
        if cx.now.since(due) < LATE && !is_stalled() {
            return;
        }
        self.excused_since = Some(since);
        cx.count(|c| &mut c.excused_timeouts);
        match &mut self.selective {
            Some(selective) => selective.quiet_since = cx.now,
            None => self.wait = Wait::Answer(cx.now + timeout),
        }
    }

    /// The deadline has passed.
    pub(super) fn handle_timeout(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
        if self.selective.is_some() {
            return self.selective_timeout(cx);
        }
        match self.wait {
            Wait::Answer(at) if at <= cx.now && cx.planted.is(Bug::TimeoutForgotten) => {
                self.wait = Wait::Nothing;
            }
            Wait::Answer(at) if at <= cx.now => {
                self.go_back()?;
                self.allowance = 1;
                cx.count(|c| &mut c.timeouts);
            }
            Wait::Receiver(at) if at <= cx.now => self.wait = Wait::Nothing,
            _ => {}
        }
        Ok(())
    }

    /// Stops for good: nothing is sent and no timer runs.
    pub(super) fn stop(&mut self) {
        self.next = 0;
        self.next_packet = 0;
        self.wait = Wait::Nothing;
        self.selective = None;
    }
}
