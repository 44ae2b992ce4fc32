//! The requester's side of selective repeat: reports are read, losses judged, and only what is
//! missing is sent again.
//!
//! The cursor of the [`Requester`] never goes back here; repetitions are chosen by the
//! [`Scoreboard`] (request packets) and by the [`Readings`] (responses). What is shared with
//! go-back-N: the queue of requests, credits, fences, the order of completions.
//!
//! Timers, all behind one deadline:
//! - *verbs*: nothing was heard for the local ACK timeout. This alone counts as a retry, so a
//!   connection never gives up sooner than its attributes allow (IBA 9.7.6.1.3);
//! - *probe*: nothing was heard for as long as an answer usually takes. The latest packet is sent
//!   again, at doubling intervals, to get a report;
//! - *loss*: a packet is overdue that was sent before one that has arrived;
//! - *answers*: READ responses that were asked for have not come.

use alloc::boxed::Box;

use super::super::request::{ATOMIC_BYTES, Request};
use super::super::selective::arrivals::horizon;
use super::super::selective::reads::{Ask, Readings, Response};
use super::super::selective::scoreboard::Scoreboard;
use super::{Context, Fault, Headers, Link, Requester, TimeoutReason, Wait, ack_timeout};
use crate::endpoint::Insert;
use crate::planted::Bug;
use crate::region::Purpose;
use crate::rtt::RttEstimator;
use crate::sg::Extent;
use crate::time::{Duration, Time};
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{Aeth, Ext, Opcode, Psn, Reth, Sack, Sreth, Syndrome};

/// How long an answer may take before there is a measurement.
const FIRST_TIMEOUT: Duration = Duration::from_millis(1);

/// The least time after which an answer counts as overdue.
const LEAST_TIMEOUT: Duration = Duration::from_micros(50);

/// Times that the probe interval doubles.
const MAX_BACKOFF: u32 = 12;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Selective {
    board: Scoreboard,
    readings: Readings,
    /// Most packets in flight.
    window: u32,
    /// The local ACK timeout.
    timeout: Option<Duration>,
    /// Since when nothing new was heard, or nothing was expected.
    pub(super) quiet_since: Time,
    /// Probes since then.
    backoff: u32,
    /// When the latest of them was decided on. It may leave much later, if at all.
    probed_at: Time,
}

impl Selective {
    fn new(link: &Link, first_psn: Psn) -> Selective {
        Selective {
            board: Scoreboard::new(first_psn, horizon(link.peer.window_packets)),
            window: link.peer.window_packets,
            readings: Readings::new(link.peer.max_rd_atomic.into()),
            timeout: ack_timeout(link.peer.timeout),
            quiet_since: Time::ZERO,
            backoff: 0,
            probed_at: Time::ZERO,
        }
    }

    fn is_waiting(&self) -> bool {
        !self.board.is_empty() || !self.readings.is_empty()
    }

    /// New packets that may be sent before something has to arrive.
    pub(super) fn room(&self) -> u32 {
        let in_flight = self.window.saturating_sub(self.board.in_flight());
        in_flight.min(horizon(self.window).saturating_sub(self.board.span()))
    }

    /// Whether another READ may be asked for: responses count for the window, too, or the peer would
    /// send into a queue on the way that repetitions have to wait in.
    pub(super) fn may_read(&self) -> bool {
        self.readings.missing() < self.window.into()
    }

    pub(super) fn missing_responses(&self) -> u64 {
        self.readings.missing()
    }

    pub(super) fn has_repetitions(&self) -> bool {
        self.board.has_lost() || self.readings.may_ask()
    }

    fn heard(&mut self, now: Time) {
        self.quiet_since = now;
        self.backoff = 0;
    }

    /// The report on `psn` asked for again: it is not there.
    pub(super) fn refused_for_now(&mut self, psn: Psn) {
        self.board.lose_one(psn);
    }

    /// How long an answer may take before it is asked for again.
    fn answer_timeout(&self, rtt: &RttEstimator) -> Duration {
        self.capped(rtt.timeout(LEAST_TIMEOUT).unwrap_or(FIRST_TIMEOUT))
    }

    /// No longer than the local ACK timeout: the retries that it counts are to ask for something.
    fn capped(&self, interval: Duration) -> Duration {
        self.timeout.map_or(interval, |timeout| interval.min(timeout))
    }

    fn probe_time(&self, rtt: &RttEstimator) -> Option<Time> {
        let since = self.board.latest_sent().unwrap_or(self.quiet_since).max(self.probed_at);
        let interval = self.capped(self.answer_timeout(rtt) * (1 << self.backoff.min(MAX_BACKOFF)));
        (!self.board.is_empty()).then_some(since.max(self.quiet_since) + interval)
    }

    pub(super) fn verbs_time(&self) -> Option<Time> {
        self.timeout.filter(|_| self.is_waiting()).map(|timeout| self.quiet_since + timeout)
    }

    fn deadline(&self, rtt: &RttEstimator) -> Option<(Time, TimeoutReason)> {
        let (una, patience) = (self.board.una(), patience(rtt));
        let others = [
            self.probe_time(rtt),
            self.board.loss_time(patience),
            self.readings.poll_timeout(una, self.answer_timeout(rtt)),
        ];
        let probe = others.into_iter().flatten().min().map(|at| (at, TimeoutReason::LossProbe));
        let verbs = self.verbs_time().map(|at| (at, TimeoutReason::AckTimeout));
        [verbs, probe].into_iter().flatten().min_by_key(|&(at, _)| at)
    }
}

/// How long after a packet was sent it is lost, if one sent later has arrived.
fn patience(rtt: &RttEstimator) -> Duration {
    let usual = rtt.smoothed().unwrap_or(FIRST_TIMEOUT).as_nanos();
    Duration::from_nanos(usual + usual / 8 + 1_000)
}

/// How many PSNs `psn` comes before `end`, if it does.
fn sent_before(psn: Psn, end: Psn) -> Option<u32> {
    psn.is_before(end).then(|| psn.distance_from(end).unsigned_abs())
}

impl Requester {
    /// Begins to keep score if both ends have agreed on it.
    pub(super) fn start_selective(&mut self, link: &Link) {
        self.selective = link.is_selective().then(|| Box::new(Selective::new(link, self.post_psn)));
    }

    /// The local ACK timeout has changed.
    pub(super) fn follow_timeout(&mut self, timeout: Option<Duration>) {
        if let Some(selective) = &mut self.selective {
            selective.timeout = timeout;
        }
    }

    pub(super) fn selective_deadline(&self) -> Option<(Time, TimeoutReason)> {
        self.selective.as_ref()?.deadline(&self.rtt.estimator)
    }

    // ---- sending -------------------------------------------------------------------------------

    /// The packet at the cursor was sent for the first time.
    pub(super) fn keep_score(&mut self, cx: &Context<'_>, link: &Link) {
        let now = cx.now;
        let Some(selective) = &mut self.selective else {
            return;
        };
        let request = &self.queue[self.next];
        if !selective.is_waiting() {
            selective.heard(now);
        }
        let forgets = cx.planted.is(Bug::ReadSlotsNotGrown) && selective.readings.is_full();
        if request.awaits_response() && !forgets {
            let (psn, is_prompt) = (request.first_psn, request.is_atomic());
            selective.readings.begin(psn, link.packets(request.len), is_prompt, now);
        }
        selective.board.sent_first(now);
    }

    /// Leaves in `cx.packet` the next packet that has to be sent again, if there is one.
    pub(super) fn poll_again(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fault> {
        let Some(selective) = &mut self.selective else {
            return Ok(());
        };
        if let Some(psn) = selective.board.next_lost() {
            return self.repeat(cx, link, psn);
        }
        match selective.readings.next_ask() {
            Some((psn, ask)) => self.ask(cx, link, psn, ask),
            None => Ok(()),
        }
    }

    /// The request that `psn` belongs to.
    fn request_at(&self, psn: Psn) -> Option<usize> {
        let first = self.queue.front()?.packets_before;
        // All that is posted may be more than the circle of PSNs; all that was sent is less than half.
        let back = sent_before(psn, self.sent_end)?;
        let packet = self.position(self.next, self.next_packet).wrapping_sub(back);
        let ahead = packet.wrapping_sub(first);
        if ahead >= Psn::MODULUS {
            return None;
        }
        // Local operations take no PSN: of several that start at one, the last owns it.
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

    fn repeat(&mut self, cx: &mut Context<'_>, link: &Link, psn: Psn) -> Result<(), Fault> {
        let index = self.request_at(psn).unwrap_or(0);
        let request = &self.queue[index];
        let packet = psn.distance_from(request.first_psn) as u32;
        let built = request.packet(packet, cx, link, true);
        let (draft, len) = built.map_err(|status| Fault { index, status })?;
        let draft = super::Draft { ordered: self.is_ordered(), ..draft };
        if let Some(selective) = &mut self.selective {
            selective.board.sent_again(psn, cx.now);
        }
        count_repetition(cx);
        cx.emit(link, draft, len);
        Ok(())
    }

    fn ask(&mut self, cx: &mut Context<'_>, link: &Link, psn: Psn, ask: Ask) -> Result<(), Fault> {
        let index = self.request_at(psn).unwrap_or(0);
        let request = &self.queue[index];
        let drafted = match request.wr.op {
            SendOp::Read { remote_addr, rkey } => {
                let ext = range(request, remote_addr, rkey, ask, link);
                Ok((super::Draft::new(Opcode::SrReadRequest, psn, ext), 0))
            }
            _ => request.packet(0, cx, link, true),
        };
        let (draft, len) = drafted.map_err(|status| Fault { index, status })?;
        if let Some(selective) = &mut self.selective {
            selective.readings.ask_sent(cx.now);
        }
        count_repetition(cx);
        cx.emit(link, draft, len);
        Ok(())
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn handle_selective(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fault> {
        let psn = headers.bth().psn;
        if !psn.is_before(self.sent_end) {
            cx.count(|c| &mut c.bad_psn);
            return Ok(());
        }
        match *headers.ext() {
            Ext::Aeth(aeth) if headers.bth().opcode == Opcode::RcAcknowledge => {
                self.handle_report(cx, link, psn, aeth, None)
            }
            Ext::AethSack(aeth, sack) => self.handle_report(cx, link, psn, aeth, Some(&sack)),
            Ext::AethSreth(aeth, sreth) => {
                let original = None;
                self.handle_piece(cx, link, Piece { psn, aeth, sreth, payload_len, original })
            }
            Ext::AethAtomicAck(aeth, ack) => {
                let sreth = Sreth { sequence: 0, offset: 0 };
                let original = Some(ack.original);
                self.handle_piece(cx, link, Piece { psn, aeth, sreth, payload_len, original })
            }
            _ if self.request_at(psn).is_some() => Err(self.bad_response(cx)),
            _ => {
                cx.count(|c| &mut c.duplicate_acks);
                Ok(())
            }
        }
    }

    fn handle_report(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        aeth: Aeth,
        sack: Option<&Sack>,
    ) -> Result<(), Fault> {
        match aeth.syndrome {
            Syndrome::Ack { .. } if psn.next().is_before(self.una) => {
                // An older report, overtaken; or a peer that takes back what it has acknowledged, which
                // must not be taken for progress.
                cx.count(|c| &mut c.acks_received);
                cx.count(|c| &mut c.duplicate_acks);
                Ok(())
            }
            Syndrome::Ack { .. } => {
                cx.count(|c| &mut c.acks_received);
                self.take_credit(aeth);
                self.settle(cx, link, psn.next(), sack)
            }
            Syndrome::SequenceError => {
                cx.count(|c| &mut c.seq_naks_received);
                self.settle(cx, link, psn, None)?;
                self.lose(psn);
                Ok(())
            }
            Syndrome::RnrNak { timer } => {
                cx.count(|c| &mut c.rnr_naks_received);
                self.note_no_credit(aeth);
                self.settle(cx, link, psn, None)?;
                if psn == self.una { self.handle_rnr(cx, link, timer) } else { Ok(()) }
            }
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => {
                self.end(cx, link, psn, sack, WcStatus::RemoteInvalidRequest)
            }
            Syndrome::RemoteAccess => self.end(cx, link, psn, sack, WcStatus::RemoteAccessError),
            Syndrome::RemoteOperation => {
                self.end(cx, link, psn, sack, WcStatus::RemoteOperationError)
            }
        }
    }

    /// Answers to what was settled long ago promise nothing: they are late, or made up.
    fn take_recent_credit(&mut self, psn: Psn, aeth: Aeth) {
        if !psn.next().is_before(self.una) {
            self.take_credit(aeth);
        }
    }

    fn lose(&mut self, psn: Psn) {
        if let Some(selective) = &mut self.selective {
            selective.board.lose_one(psn);
        }
    }

    /// The responder has executed everything before `psn` and ended the connection, because of the
    /// request there, or because of a later one that came out of order: then `sack` starts with it.
    fn end(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        sack: Option<&Sack>,
        status: WcStatus,
    ) -> Result<(), Fault> {
        // A refusal of what was completed long ago is late, or made up.
        if self.request_at(psn).is_none() {
            cx.count(|c| &mut c.duplicate_acks);
            return Ok(());
        }
        cx.count(|c| &mut c.fatal_naks_received);
        self.settle(cx, link, psn, None)?;
        let refused = sack.map_or(psn, |sack| sack.start);
        Err(Fault { index: self.request_at(refused).unwrap_or(0), status })
    }

    /// Everything before `una` has been executed, and what `sack` says has arrived.
    fn settle(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        una: Psn,
        sack: Option<&Sack>,
    ) -> Result<(), Fault> {
        let Some(selective) = &mut self.selective else {
            return Ok(());
        };
        let news = selective.board.report(una, sack, cx.now);
        if let Some(rtt) = news.rtt {
            self.rtt.sample(rtt);
        }
        cx.add(news.spurious.into(), |c| &mut c.spurious_retransmits);
        // As long as more is to come, what was not reported may have arrived all the same.
        if sack.is_none_or(|sack| !sack.more) {
            let lost = selective.board.detect(cx.now, patience(&self.rtt.estimator));
            cx.add(lost.into(), |c| &mut c.packets_judged_lost);
        }
        let una = selective.board.una();
        if news.delivered == 0 && una == self.una {
            cx.count(|c| &mut c.duplicate_acks);
            return Ok(());
        }
        selective.heard(cx.now);
        self.restore_retries(link);
        if self.una != una {
            self.una = una;
            self.rnr_retries_left = link.peer.rnr_retry;
            self.probe = self.probe.filter(|probe| !probe.is_before(una));
        }
        self.complete_ready(cx, link)
    }

    /// Completes what is done, oldest first, as far as nothing unfinished comes before.
    fn complete_ready(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fault> {
        while self.is_front_done() {
            let awaited = self.queue.front().is_some_and(Request::awaits_response);
            if let Some(selective) = self.selective.as_mut().filter(|_| awaited) {
                selective.readings.pop_front();
            }
            self.complete_front(cx, link);
        }
        match self.queue.front().and_then(|front| front.fault) {
            Some(status) => Err(Fault { index: 0, status }),
            None => Ok(()),
        }
    }

    fn is_front_done(&self) -> bool {
        let (Some(front), Some(selective)) = (self.queue.front(), &self.selective) else {
            return false;
        };
        match () {
            () if self.next == 0 => false,
            () if front.is_local() => front.is_executed,
            () if front.awaits_response() => selective.readings.is_front_complete(),
            () => front.last_psn().is_before(self.una),
        }
    }

    /// A response: it says that its request, and everything before, was executed.
    fn handle_piece(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        piece: Piece,
    ) -> Result<(), Fault> {
        self.take_recent_credit(piece.psn, piece.aeth);
        if !piece.psn.is_before(self.una) {
            self.settle(cx, link, piece.psn.next(), None)?;
        }
        let owner = self.request_at(piece.psn).filter(|&at| self.queue[at].awaits_response());
        match owner {
            Some(index) => self.take_piece(cx, link, index, &piece),
            None => {
                cx.count(|c| &mut c.duplicate_acks);
                Ok(())
            }
        }
    }

    fn take_piece(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        index: usize,
        piece: &Piece,
    ) -> Result<(), Fault> {
        let Some(selective) = &mut self.selective else {
            return Ok(());
        };
        let number = piece.sreth.offset / link.mtu;
        match selective.readings.judge(piece.psn, number) {
            Response::New => {}
            Response::Unknown => return Err(self.bad_response(cx)),
            Response::Duplicate => {
                cx.count(|c| &mut c.duplicate_acks);
                return Ok(());
            }
            Response::Beyond => {
                selective.readings.cut(piece.psn);
                return Ok(());
            }
        }
        self.place_piece(cx, link, index, piece)?;
        if let Some(selective) = &mut self.selective {
            selective.readings.accept(piece.psn, number, cx.now);
            selective.heard(cx.now);
        }
        self.restore_retries(link);
        self.complete_ready(cx, link)
    }

    /// Checks a response against its request and finds where its bytes go.
    fn place_piece(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        index: usize,
        piece: &Piece,
    ) -> Result<(), Fault> {
        let request = &self.queue[index];
        let offset = piece.sreth.offset;
        if request.is_atomic() != piece.original.is_some() {
            return Err(self.bad_response(cx));
        }
        let (carried, len) = match request.is_atomic() {
            true => (0, ATOMIC_BYTES),
            false => {
                let len = request.piece(offset / link.mtu, link.mtu);
                (len as usize, len)
            }
        };
        if piece.payload_len != carried || !offset.is_multiple_of(link.mtu) {
            cx.count(|c| &mut c.bad_length);
            return Err(self.bad_response(cx));
        }
        cx.stretch(link, Purpose::LocalWrite, &request.wr.sges, Extent { offset, len })
            .map_err(|_| Fault { index, status: WcStatus::LocalProtectionError })?;
        if let Some(original) = piece.original {
            *cx.insert = Insert::Value(original);
        }
        Ok(())
    }

    // ---- time ----------------------------------------------------------------------------------

    pub(super) fn selective_timeout(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
        let Some(selective) = &mut self.selective else {
            return Ok(());
        };
        match self.wait {
            Wait::Receiver(at) if at > cx.now => return Ok(()),
            Wait::Receiver(_) => {
                self.wait = Wait::Nothing;
                selective.heard(cx.now);
                return Ok(());
            }
            _ => {}
        }
        if selective.verbs_time().is_some_and(|at| at <= cx.now) {
            return self.retry_all(cx);
        }
        let rtt = &self.rtt.estimator;
        let lost = selective.board.detect(cx.now, patience(rtt));
        cx.add(lost.into(), |c| &mut c.packets_judged_lost);
        let timeout = selective.answer_timeout(rtt);
        selective.readings.handle_timeout(selective.board.una(), timeout, cx.now);
        if lost == 0 && selective.probe_time(rtt).is_some_and(|at| at <= cx.now) {
            selective.board.lose_latest();
            selective.backoff += 1;
            selective.probed_at = cx.now;
            cx.count(|c| &mut c.loss_probes);
        }
        Ok(())
    }

    /// The local ACK timeout has passed without a sign of the peer.
    fn retry_all(&mut self, cx: &mut Context<'_>) -> Result<(), Fault> {
        if self.retries_left == 0 {
            return Err(Fault { index: 0, status: WcStatus::RetryExceeded });
        }
        self.retries_left -= 1;
        cx.count(|c| &mut c.timeouts);
        if let Some(selective) = &mut self.selective {
            selective.board.lose_all();
            let (una, at_once) = (selective.board.una(), Duration::ZERO);
            selective.readings.handle_timeout(una, at_once, cx.now);
            selective.quiet_since = cx.now;
        }
        Ok(())
    }
}

/// A response packet.
struct Piece {
    psn: Psn,
    aeth: Aeth,
    sreth: Sreth,
    payload_len: usize,
    /// What an atomic found.
    original: Option<u64>,
}

/// What to ask for: the bytes of responses that are missing.
fn range(request: &Request, remote_addr: u64, rkey: u32, ask: Ask, link: &Link) -> Ext {
    let offset = ask.first * link.mtu;
    let end = (u64::from(ask.end) * u64::from(link.mtu)).min(request.len.into());
    let addr = remote_addr.wrapping_add(offset.into());
    let len = end as u32 - offset;
    Ext::RethSreth(Reth { addr, rkey, len }, Sreth { sequence: 0, offset })
}

fn count_repetition(cx: &mut Context<'_>) {
    cx.count(|c| &mut c.retransmitted_packets);
    cx.count(|c| &mut c.selective_retransmits);
}
