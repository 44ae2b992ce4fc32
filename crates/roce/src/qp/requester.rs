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
//! - a READ is done only by its responses. An acknowledgement beyond an unanswered READ says that
//!   responses were lost;
//! - a request that cannot run locally stops the cursor, and fails when it has become the front,
//!   so that completions stay in order (C2).

use alloc::collections::VecDeque;

use super::codes::{NO_CREDITS, ack_timeout, credit_count, rnr_delay};
use super::link::{Draft, Link};
use super::{Context, TimeoutReason};
use crate::region::Purpose;
use crate::sg::{self, Extent};
use crate::time::Time;
use crate::verbs::{SendOp, SendWr, WcOpcode, WcStatus};
use crate::wire::{Aeth, Ext, Headers, Opcode, Psn, Reth, Syndrome};

/// An acknowledgement is asked for at least this often, in packets.
const MAX_ACK_INTERVAL: u32 = 32;

/// `rnr_retry` that never gives up.
const RNR_FOREVER: u8 = 7;

/// A request that ended badly, and with it the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    /// Which one, counted from the front of the queue.
    pub(super) index: usize,
    /// How it ended. All others are flushed.
    pub(super) status: WcStatus,
}

/// A posted send work request.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) wr: SendWr,
    len: u32,
    first_psn: Psn,
    /// PSNs it takes: request packets, or for READ response packets.
    packets: u32,
    /// PSNs acknowledged, or for READ responses placed.
    done: u32,
    /// Message sequence number, 24 bits: same circle as PSNs.
    ssn: Psn,
    /// Request packets of all work requests posted before this one.
    packets_before: u32,
    /// Why it cannot run.
    fault: Option<WcStatus>,
}

/// How far the responder's credits reach (IBA 9.7.7.2).
#[derive(Clone, Copy, Debug)]
enum Credit {
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
    reads_in_flight: u32,
    packets_since_ack_req: u32,
    /// A NAK, sent or implied, has moved the cursor back to `una`, and since then there was neither
    /// progress nor a timeout.
    gone_back: bool,
    /// Last packet sent without credit; one at a time.
    probe: Option<Psn>,
    credit: Credit,
    retries_left: u8,
    rnr_retries_left: u8,
    wait: Wait,
}

impl Request {
    fn is_read(&self) -> bool {
        matches!(self.wr.op, SendOp::Read { .. })
    }

    fn left(&self) -> u32 {
        self.packets - self.done
    }

    /// PSN of the last packet.
    fn last_psn(&self) -> Psn {
        self.first_psn.plus(self.packets - 1)
    }

    fn request_packets(&self) -> u32 {
        if self.is_read() { 1 } else { self.packets }
    }

    /// Whether the responder needs a posted receive for it.
    fn takes_receive(&self) -> bool {
        matches!(self.wr.op, SendOp::Send | SendOp::SendImm(_) | SendOp::WriteImm { .. })
    }

    /// What its local buffers are used for.
    fn purpose(&self) -> Purpose {
        if self.is_read() { Purpose::LocalWrite } else { Purpose::LocalRead }
    }

    /// Bytes that packet `index` carries, or for READ that response `index` brings.
    fn piece(&self, index: u32, mtu: u32) -> u32 {
        (self.len - index * mtu).min(mtu)
    }
}

impl Requester {
    pub(super) fn new(limit: u32, first_psn: Psn) -> Requester {
        Requester {
            queue: VecDeque::with_capacity(limit as usize),
            limit,
            post_psn: first_psn,
            post_ssn: Psn::default(),
            post_packets: 0,
            una: first_psn,
            sent_end: first_psn,
            next: 0,
            next_packet: 0,
            reads_in_flight: 0,
            packets_since_ack_req: 0,
            gone_back: false,
            probe: None,
            credit: Credit::UpTo(Psn::default()),
            retries_left: 0,
            rnr_retries_left: 0,
            wait: Wait::Nothing,
        }
    }

    pub(super) fn start(&mut self, link: &Link) {
        self.retries_left = link.peer.retry_count;
        self.rnr_retries_left = link.peer.rnr_retry;
    }

    pub(super) fn is_full(&self) -> bool {
        self.queue.len() >= self.limit as usize
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    /// Queues a request of `len` bytes, which is within limits.
    pub(super) fn post(&mut self, link: &Link, wr: SendWr, len: u32) {
        self.post_ssn = self.post_ssn.next();
        let request = Request {
            wr,
            len,
            first_psn: self.post_psn,
            packets: link.packets(len),
            done: 0,
            ssn: self.post_ssn,
            packets_before: self.post_packets,
            fault: None,
        };
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
    }

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        match self.wait {
            Wait::Nothing => None,
            Wait::Answer(at) => Some((at, TimeoutReason::AckTimeout)),
            Wait::Receiver(at) => Some((at, TimeoutReason::RnrWait)),
        }
    }

    // ---- sending -------------------------------------------------------------------------------

    /// The next request packet, if one may be sent now.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
    ) -> Result<Option<Headers>, Fault> {
        if matches!(self.wait, Wait::Receiver(_)) || !self.has_unsent() {
            return Ok(None);
        }
        let index = self.next;
        if self.queue[index].fault.is_none() && !self.may_send(link) {
            return Ok(None);
        }
        match self.build(cx, link) {
            Ok(headers) => Ok(Some(headers)),
            Err(status) if index == 0 => Err(Fault { index, status }),
            Err(status) => {
                self.queue[index].fault = Some(status);
                Ok(None)
            }
        }
    }

    fn may_send(&self, link: &Link) -> bool {
        let request = &self.queue[self.next];
        self.window_is_open(link)
            && self.psns_are_distinct(request)
            && (!request.is_read() || self.may_read(link))
            && (self.has_credit(request) || self.probe.is_none())
    }

    fn window_is_open(&self, link: &Link) -> bool {
        self.unacknowledged() < link.peer.window_packets
    }

    /// Request packets between `una` and the cursor.
    fn unacknowledged(&self) -> u32 {
        let position = |index: usize, packet: u32| match self.queue.get(index) {
            Some(request) if request.is_read() => request.packets_before,
            Some(request) => request.packets_before.wrapping_add(packet),
            None => self.post_packets,
        };
        let acknowledged = position(0, self.queue.front().map_or(0, |front| front.done));
        position(self.next, self.next_packet).wrapping_sub(acknowledged)
    }

    /// Half the circle of PSNs may be outstanding, or old and new could not be told apart.
    fn psns_are_distinct(&self, request: &Request) -> bool {
        let last = match request.is_read() {
            true => request.last_psn(),
            false => request.first_psn.plus(self.next_packet),
        };
        last.distance_from(self.una) >= 0
    }

    /// A READ that is not allowed at all is built anyway, to fail there.
    fn may_read(&self, link: &Link) -> bool {
        let limit = u32::from(link.peer.max_rd_atomic);
        limit == 0 || self.reads_in_flight < limit
    }

    fn has_credit(&self, request: &Request) -> bool {
        match self.credit {
            Credit::Unlimited => true,
            Credit::UpTo(last) => !request.takes_receive() || !last.is_before(request.ssn),
        }
    }

    /// Builds the packet at the cursor and moves the cursor past it.
    fn build(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<Headers, WcStatus> {
        self.check(cx, link)?;
        let ack_req = self.ack_is_due(link);
        let request = &self.queue[self.next];
        let (draft, payload_len) = match request.is_read() {
            true => (read_request(request, link), 0),
            false => message_packet(request, self.next_packet, cx, link, ack_req)?,
        };
        self.count_sent(cx, link, draft.psn, ack_req);
        Ok(link.headers(draft, payload_len))
    }

    /// Local conditions that hold for the whole request, checked when it starts.
    fn check(&self, cx: &mut Context<'_>, link: &Link) -> Result<(), WcStatus> {
        let request = &self.queue[self.next];
        if let Some(status) = request.fault {
            return Err(status);
        }
        if request.is_read() && link.peer.max_rd_atomic == 0 {
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
        let interval = (link.peer.window_packets / 4).clamp(1, MAX_ACK_INTERVAL);
        request.is_read()
            || self.next_packet + 1 == request.packets
            || self.packets_since_ack_req + 1 >= interval
            || self.unacknowledged() + 1 >= link.peer.window_packets
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
        let end = self.move_cursor();
        if self.sent_end.is_before(end) {
            self.sent_end = end;
        }
        if let (Wait::Nothing, Some(timeout)) = (self.wait, ack_timeout(link.peer.timeout)) {
            self.wait = Wait::Answer(cx.now + timeout);
        }
    }

    /// Moves the cursor one packet on and returns the PSN that follows what was sent.
    fn move_cursor(&mut self) -> Psn {
        let request = &self.queue[self.next];
        let is_read = request.is_read();
        let sent = if is_read { request.packets } else { self.next_packet + 1 };
        let end = request.first_psn.plus(sent);
        self.reads_in_flight += u32::from(is_read);
        if sent == request.packets {
            self.next += 1;
            self.next_packet = 0;
        } else {
            self.next_packet = sent;
        }
        end
    }

    // ---- answers -------------------------------------------------------------------------------

    /// An acknowledgement or a READ response.
    pub(super) fn handle_response(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let psn = headers.bth().psn;
        let aeth = headers.ext().aeth().copied();
        if !psn.is_before(self.sent_end) {
            cx.count(|c| &mut c.bad_psn);
        } else if psn.is_before(self.una) {
            self.handle_duplicate(cx, psn, aeth);
        } else if headers.bth().opcode.is_read_response() {
            return self.handle_read_response(cx, link, headers, payload_len);
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
                    return self.handle_lost_read(cx);
                }
                Ok(())
            }
            Syndrome::SequenceError => {
                cx.count(|c| &mut c.seq_naks_received);
                if self.advance(cx, link, ahead)? > 0 {
                    return self.handle_lost_read(cx);
                }
                self.retry()
            }
            Syndrome::RnrNak { timer } => {
                cx.count(|c| &mut c.rnr_naks_received);
                if self.advance(cx, link, ahead)? > 0 {
                    return self.handle_lost_read(cx);
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
        if self.advance(cx, link, ahead)? > 0 {
            return self.handle_lost_read(cx);
        }
        self.place_read(cx, link, headers.bth().opcode, payload_len)?;
        if let Some(&aeth) = headers.ext().aeth() {
            self.take_credit(aeth);
        }
        self.accept_read_packet(cx, link)
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

    fn accept_read_packet(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fault> {
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

    /// Acknowledges `psns` PSNs from `una`, up to an unanswered READ. Returns how many were not.
    fn advance(&mut self, cx: &mut Context<'_>, link: &Link, psns: u32) -> Result<u32, Fault> {
        let mut rest = psns;
        while rest > 0
            && let Some(front) = self.queue.front().filter(|front| !front.is_read())
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
        if let Some(front) = self.queue.front_mut() {
            front.done += step;
            if self.next == 0 && !front.is_read() {
                self.next_packet = self.next_packet.max(front.done);
            }
        }
    }

    fn complete_front(&mut self, cx: &mut Context<'_>, link: &Link) {
        let Some(request) = self.queue.pop_front() else {
            return;
        };
        if self.next > 0 {
            self.next -= 1;
            self.reads_in_flight -= u32::from(request.is_read());
        } else {
            self.next_packet = 0;
        }
        if request.wr.signaled {
            let byte_len = if request.is_read() { request.len } else { 0 };
            cx.complete_send(link, &request, WcStatus::Success, byte_len);
        }
    }

    fn made_progress(&mut self, cx: &Context<'_>, link: &Link) -> Result<(), Fault> {
        self.gone_back = false;
        self.retries_left = link.peer.retry_count;
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

    /// Whether anything before the cursor is unanswered.
    fn is_waiting(&self) -> bool {
        self.next > 0 || self.queue.front().is_some_and(|front| self.next_packet > front.done)
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

    /// A response to the READ at the front is missing. Later responses keep saying so until the
    /// READ has been asked for again and answered, so only the first counts.
    fn handle_lost_read(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
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
        self.reads_in_flight = 0;
        self.packets_since_ack_req = 0;
        self.probe = None;
        self.gone_back = false;
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
        self.retries_left = link.peer.retry_count;
        self.rewind();
        self.wait = Wait::Receiver(cx.now + rnr_delay(timer));
        Ok(())
    }

    /// The responder ended the connection because of the request `ahead` PSNs after `una`. READs
    /// before it that were not answered never will be: they are flushed.
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

    /// The deadline has passed.
    pub(super) fn handle_timeout(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
        match self.wait {
            Wait::Answer(at) if at <= cx.now => {
                self.go_back()?;
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
    }
}

/// The request for what is still missing of a READ.
fn read_request(request: &Request, link: &Link) -> Draft {
    let done_bytes = request.done * link.mtu;
    let (remote_addr, rkey) = remote(request.wr.op);
    let addr = remote_addr.wrapping_add(u64::from(done_bytes));
    Draft {
        opcode: Opcode::RcReadRequest,
        psn: request.first_psn.plus(request.done),
        ext: Ext::Reth(Reth { addr, rkey, len: request.len - done_bytes }),
        ack_req: true,
        solicited: false,
    }
}

/// Packet `index` of a SEND or WRITE.
fn message_packet(
    request: &Request,
    index: u32,
    cx: &mut Context<'_>,
    link: &Link,
    ack_req: bool,
) -> Result<(Draft, u32), WcStatus> {
    let is_last = index + 1 == request.packets;
    let extent = Extent { offset: index * link.mtu, len: request.piece(index, link.mtu) };
    cx.stretch(link, Purpose::LocalRead, &request.wr.sges, extent)
        .map_err(|_| WcStatus::LocalProtectionError)?;
    let (opcode, ext) = form(request.wr.op, request.len, index == 0, is_last);
    let solicited = request.wr.solicited && is_last;
    let psn = request.first_psn.plus(index);
    Ok((Draft { opcode, psn, ext, ack_req, solicited }, extent.len))
}

fn remote(op: SendOp) -> (u64, u32) {
    match op {
        SendOp::Write { remote_addr, rkey }
        | SendOp::WriteImm { remote_addr, rkey, .. }
        | SendOp::Read { remote_addr, rkey } => (remote_addr, rkey),
        SendOp::Send | SendOp::SendImm(_) => (0, 0),
    }
}

/// Opcode and extension headers of a packet by its place in the message (IBA table 35).
fn form(op: SendOp, len: u32, is_first: bool, is_last: bool) -> (Opcode, Ext) {
    let (addr, rkey) = remote(op);
    let reth = Reth { addr, rkey, len };
    match (op, is_first, is_last) {
        (SendOp::Send | SendOp::SendImm(_), true, false) => (Opcode::RcSendFirst, Ext::None),
        (SendOp::Send | SendOp::SendImm(_), false, false) => (Opcode::RcSendMiddle, Ext::None),
        (SendOp::Send, false, true) => (Opcode::RcSendLast, Ext::None),
        (SendOp::SendImm(imm), false, true) => (Opcode::RcSendLastImm, Ext::Imm(imm)),
        (SendOp::Send, true, true) => (Opcode::RcSendOnly, Ext::None),
        (SendOp::SendImm(imm), true, true) => (Opcode::RcSendOnlyImm, Ext::Imm(imm)),
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, true, false) => {
            (Opcode::RcWriteFirst, Ext::Reth(reth))
        }
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, false, false) => {
            (Opcode::RcWriteMiddle, Ext::None)
        }
        (SendOp::Write { .. }, false, true) => (Opcode::RcWriteLast, Ext::None),
        (SendOp::WriteImm { imm, .. }, false, true) => (Opcode::RcWriteLastImm, Ext::Imm(imm)),
        (SendOp::Write { .. }, true, true) => (Opcode::RcWriteOnly, Ext::Reth(reth)),
        (SendOp::WriteImm { imm, .. }, true, true) => {
            (Opcode::RcWriteOnlyImm, Ext::RethImm(reth, imm))
        }
        (SendOp::Read { .. }, ..) => (Opcode::RcReadRequest, Ext::Reth(reth)),
    }
}

/// What kind of completion a send work request makes.
pub(super) fn wc_opcode(op: SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::Write,
        SendOp::Read { .. } => WcOpcode::Read,
    }
}
