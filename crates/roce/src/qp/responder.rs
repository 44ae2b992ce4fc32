//! The responder half of a reliable connection: the peer's requests are checked, placed and
//! answered (IBA 9.7.4 to 9.7.5, responder side; the checks are in the order of table 49).
//!
//! Every request packet is first judged by its PSN alone:
//!
//! | PSN | what happens |
//! |---|---|
//! | expected | checked and executed; the expected PSN moves on |
//! | earlier | executed before: SEND and WRITE are acknowledged again, READ is executed again |
//! | later | something was lost: one NAK, then silence until the expected packet comes |
//!
//! Answers leave in PSN order, as the requester takes one for an answer to all that came before. So
//! there is a queue of READs being answered, and *one* pending acknowledgement or NAK, always the
//! latest: acknowledging packet by packet would say nothing that the last one does not.
//!
//! Invariants: nothing is placed before all checks of its packet have passed; keys are checked again
//! for every packet (C3); a READ sent again by the network can never end the connection, because its
//! key may rightly be gone.

use alloc::collections::VecDeque;

use super::Context;
use super::codes::credit_code;
use super::link::{Draft, Link};
use crate::region::{Purpose, Range, Refusal};
use crate::sg::{self, Extent, Placement};
use crate::verbs::{MAX_MESSAGE_BYTES, RecvWr, WcOpcode, WcStatus};
use crate::wire::{Aeth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};

/// A posted receive.
#[derive(Debug)]
pub(super) struct Receive {
    pub(super) wr: RecvWr,
    len: u64,
}

/// The message whose packets are arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// Between messages.
    None,
    /// A SEND into the receive at the front of the queue, `offset` bytes of which are filled.
    Send { offset: u32 },
    /// A WRITE, of which `left` bytes from `addr` are still to come.
    Write { addr: u64, rkey: u32, left: u32, len: u32 },
}

/// A READ that is being answered.
#[derive(Debug)]
struct ReadJob {
    /// PSN of the next response.
    psn: Psn,
    /// PSN after the last response.
    end: Psn,
    addr: u64,
    rkey: u32,
    /// Bytes still to be sent.
    left: u32,
    msn: u32,
    /// No response has been sent since it was (last) requested.
    fresh: bool,
    /// Requested for the second time or more. Gives way to READs that were not.
    again: bool,
}

/// The acknowledgement to be sent.
#[derive(Clone, Copy, Debug)]
enum Reply {
    /// Everything up to the PSN.
    Ack { psn: Psn },
    /// Everything before the PSN, which was refused.
    Nak { psn: Psn, syndrome: Syndrome },
}

impl Reply {
    fn psn(self) -> Psn {
        match self {
            Reply::Ack { psn } | Reply::Nak { psn, .. } => psn,
        }
    }
}

/// Why a request packet is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    /// No receive is posted; the peer will try again.
    NotReady,
    /// The connection ends.
    Fatal(Fatal),
}

/// An error that ends the connection, and how it ends the receive in progress if not by flushing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fatal {
    pub(super) recv_status: WcStatus,
    nak: Syndrome,
}

impl Refused {
    fn fatal(nak: Syndrome) -> Refused {
        Refused::Fatal(Fatal { recv_status: WcStatus::WrFlushError, nak })
    }

    fn fatal_with(nak: Syndrome, recv_status: WcStatus) -> Refused {
        Refused::Fatal(Fatal { recv_status, nak })
    }
}

/// What executing a packet does once all its checks have passed.
struct Effect {
    /// The message that is in progress afterwards.
    message: Message,
    /// A receive to complete: opcode and length.
    completes: Option<(WcOpcode, u32)>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Responder {
    receives: VecDeque<Receive>,
    limit: u32,
    expected: Psn,
    /// Messages completed, 24 bits.
    msn: Psn,
    message: Message,
    /// The expected packet was asked for; asking again would make the peer send everything again.
    nak_sent: bool,
    reply: Option<Reply>,
    reads: VecDeque<ReadJob>,
    /// The last credits the peer was told of were none.
    starved: bool,
}

impl Responder {
    pub(super) fn new(limit: u32) -> Responder {
        Responder {
            receives: VecDeque::with_capacity(limit as usize),
            limit,
            expected: Psn::default(),
            msn: Psn::default(),
            message: Message::None,
            nak_sent: false,
            reply: None,
            reads: VecDeque::new(),
            starved: false,
        }
    }

    pub(super) fn start(&mut self, link: &Link) {
        self.expected = link.peer.remote_psn;
        self.reads.reserve_exact(usize::from(link.peer.max_dest_rd_atomic));
    }

    // ---- receives ------------------------------------------------------------------------------

    pub(super) fn is_full(&self) -> bool {
        self.receives.len() >= self.limit as usize
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    pub(super) fn post(&mut self, wr: RecvWr) {
        let len = sg::total_bytes(&wr.sges);
        self.receives.push_back(Receive { wr, len });
        if self.starved && self.reply.is_none() {
            // The peer sends single packets until it hears that there are receives again.
            self.reply = Some(Reply::Ack { psn: self.expected.minus(1) });
        }
    }

    /// The oldest receive, taken out; for flushing.
    pub(super) fn take_front(&mut self) -> Option<Receive> {
        self.receives.pop_front()
    }

    // ---- requests ------------------------------------------------------------------------------

    /// A request packet.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        match headers.bth().psn.distance_from(self.expected) {
            0 => return self.handle_expected(cx, link, headers, payload_len),
            1.. => self.handle_later(cx),
            _ => self.handle_earlier(cx, link, headers),
        }
        Ok(())
    }

    fn handle_later(&mut self, cx: &mut Context<'_>) {
        cx.count(|c| &mut c.out_of_sequence);
        if !self.nak_sent {
            self.nak_sent = true;
            self.reply = Some(Reply::Nak { psn: self.expected, syndrome: Syndrome::SequenceError });
        }
    }

    fn handle_earlier(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers) {
        match headers.ext().reth().filter(|_| headers.bth().opcode.is_read_request()) {
            Some(reth) => self.read_again(cx, link, headers.bth().psn, *reth),
            None => {
                cx.count(|c| &mut c.duplicates);
                let latest = Reply::Ack { psn: self.expected.minus(1) };
                self.reply.get_or_insert(latest);
            }
        }
    }

    fn handle_expected(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        let opcode = headers.bth().opcode;
        let executed = if opcode.is_read_request() {
            self.begin_read(cx, link, headers, payload_len)
        } else {
            self.check_message(cx, link, headers, payload_len)
                .map(|effect| self.execute(cx, link, headers, effect))
        };
        match executed {
            Ok(()) => Ok(()),
            Err(Refused::NotReady) => {
                self.not_ready(link);
                Ok(())
            }
            Err(Refused::Fatal(fatal)) => {
                self.reply = Some(Reply::Nak { psn: self.expected, syndrome: fatal.nak });
                Err(fatal)
            }
        }
    }

    /// What follows the packet in this message is dropped in silence until it is sent again.
    fn not_ready(&mut self, link: &Link) {
        self.nak_sent = true;
        let syndrome = Syndrome::RnrNak { timer: link.peer.min_rnr_timer & 31 };
        self.reply = Some(Reply::Nak { psn: self.expected, syndrome });
    }

    fn check_message(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        self.check_sequence(opcode).inspect_err(|_| cx.count(|c| &mut c.bad_opcode))?;
        let len = check_length(opcode, payload_len, link.mtu)
            .inspect_err(|_| cx.count(|c| &mut c.bad_length))?;
        if opcode.is_send() {
            self.check_send(cx, link, opcode, len)
        } else {
            self.check_write(cx, link, headers, len)
        }
    }

    /// First and only start a message, middle and last continue one of their own kind.
    fn check_sequence(&self, opcode: Opcode) -> Result<(), Refused> {
        let supported = (opcode.is_send() || opcode.is_write()) && !opcode.carries_invalidate();
        let in_order = match self.message {
            Message::None => opcode.starts_message(),
            Message::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Message::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        };
        let legal = supported && in_order;
        legal.then_some(()).ok_or(Refused::fatal(Syndrome::InvalidRequest))
    }

    fn check_send(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        opcode: Opcode,
        len: u32,
    ) -> Result<Effect, Refused> {
        let receive = self.receives.front().ok_or(Refused::NotReady)?;
        let offset = match self.message {
            Message::Send { offset } => offset,
            _ => 0,
        };
        if u64::from(offset) + u64::from(len) > receive.len.min(MAX_MESSAGE_BYTES) {
            cx.count(|c| &mut c.receive_too_small);
            let status = WcStatus::LocalLengthError;
            return Err(Refused::fatal_with(Syndrome::InvalidRequest, status));
        }
        let extent = Extent { offset, len };
        cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent).map_err(|_| {
            let status = WcStatus::LocalProtectionError;
            Refused::fatal_with(Syndrome::RemoteOperation, status)
        })?;
        let filled = offset + len;
        let ends = opcode.ends_message();
        Ok(Effect {
            message: if ends { Message::None } else { Message::Send { offset: filled } },
            completes: ends.then_some((WcOpcode::Recv, filled)),
        })
    }

    fn check_write(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        len: u32,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        let (target, total) = self.write_target(cx, link, headers)?;
        let fits = if opcode.ends_message() { len == target.len } else { len < target.len };
        if !fits {
            cx.count(|c| &mut c.bad_length);
            return Err(Refused::fatal(Syndrome::InvalidRequest));
        }
        check_remote(cx, link, Purpose::RemoteWrite, target)?;
        let takes_receive = opcode.carries_imm();
        if takes_receive && self.receives.is_empty() {
            return Err(Refused::NotReady);
        }
        let next = Message::Write {
            addr: target.addr.wrapping_add(u64::from(len)),
            rkey: target.key,
            left: target.len - len,
            len: total,
        };
        put_piece(cx, target.addr, len);
        Ok(Effect {
            message: if opcode.ends_message() { Message::None } else { next },
            completes: takes_receive.then_some((WcOpcode::RecvWriteImm, total)),
        })
    }

    /// What the WRITE still has to fill, and its whole length.
    fn write_target(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
    ) -> Result<(Range, u32), Refused> {
        if let Message::Write { addr, rkey, left, len } = self.message {
            return Ok((Range { key: rkey, addr, len: left }, len));
        }
        match headers.ext().reth() {
            Some(reth) if length_is_legal(reth, headers.bth().opcode, link.mtu) => {
                Ok((range_of(reth), reth.len))
            }
            _ => {
                cx.count(|c| &mut c.bad_length);
                Err(Refused::fatal(Syndrome::InvalidRequest))
            }
        }
    }

    fn execute(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers, effect: Effect) {
        let Bth { psn, opcode, ack_req, .. } = *headers.bth();
        self.message = effect.message;
        self.expected = psn.next();
        self.nak_sent = false;
        if opcode.ends_message() {
            self.msn = self.msn.next();
        }
        if let Some((wc_opcode, byte_len)) = effect.completes
            && let Some(receive) = self.receives.pop_front()
        {
            cx.complete_recv(link, &receive.wr, wc_opcode, byte_len, headers.ext().imm());
        }
        // A pending NAK for this very packet is out of date; one acknowledgement is enough.
        if ack_req || self.reply.is_some() {
            self.reply = Some(Reply::Ack { psn });
        }
    }

    // ---- READ ----------------------------------------------------------------------------------

    fn begin_read(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Refused> {
        let invalid = Refused::fatal(Syndrome::InvalidRequest);
        let reth = *headers.ext().reth().ok_or(invalid)?;
        if self.message != Message::None {
            cx.count(|c| &mut c.bad_opcode);
            return Err(invalid);
        }
        if payload_len != 0 || u64::from(reth.len) > MAX_MESSAGE_BYTES {
            cx.count(|c| &mut c.bad_length);
            return Err(invalid);
        }
        check_remote(cx, link, Purpose::RemoteRead, range_of(&reth))?;
        if !self.make_room(link) {
            cx.count(|c| &mut c.too_many_reads);
            return Err(invalid);
        }
        self.msn = self.msn.next();
        self.reads.push_back(ReadJob::new(headers.bth().psn, &reth, link, self.msn.get(), false));
        self.expected = self.expected.plus(link.packets(reth.len));
        self.nak_sent = false;
        // The responses acknowledge everything before them.
        self.reply = None;
        Ok(())
    }

    /// Room for a new READ. A peer that keeps to the limit has as many unanswered READs as there are
    /// slots only if all others are repetitions, so those go first.
    fn make_room(&mut self, link: &Link) -> bool {
        let limit = usize::from(link.peer.max_dest_rd_atomic);
        if self.reads.len() >= limit
            && let Some(index) = self.reads.iter().position(|job| job.again)
        {
            self.reads.remove(index);
        }
        self.reads.len() < limit
    }

    /// A READ that was executed before: its responses, or the rest of them, are wanted again.
    fn read_again(&mut self, cx: &mut Context<'_>, link: &Link, psn: Psn, reth: Reth) {
        cx.count(|c| &mut c.duplicate_reads);
        let behind = psn.distance_from(self.expected).unsigned_abs();
        if u64::from(reth.len) > MAX_MESSAGE_BYTES || link.packets(reth.len) > behind {
            cx.count(|c| &mut c.bad_psn);
            return;
        }
        if let Err(refusal) = cx.regions.check(link.pd, Purpose::RemoteRead, range_of(&reth)) {
            cx.count_refusal(refusal);
            return;
        }
        let end = psn.plus(link.packets(reth.len));
        let at =
            self.reads.iter().position(|job| psn.is_before(job.end)).unwrap_or(self.reads.len());
        let covered = self.reads.get_mut(at).filter(|job| end == job.end);
        let mut job = ReadJob::new(psn, &reth, link, self.msn.get(), true);
        if let Some(running) = covered {
            (job.msn, job.again) = (running.msn, running.again);
            *running = job;
        } else if self.reads.len() < usize::from(link.peer.max_dest_rd_atomic) {
            self.reads.insert(at, job);
        }
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn has_answer(&self) -> bool {
        self.reply.is_some() || !self.reads.is_empty()
    }

    /// The pending acknowledgement, unless READ responses have to go before it.
    pub(super) fn poll_reply(&mut self, cx: &mut Context<'_>, link: &Link) -> Option<Headers> {
        let waits =
            |reply: &Reply| self.reads.front().is_none_or(|job| reply.psn().is_before(job.psn));
        let reply = self.reply.filter(waits)?;
        self.reply = None;
        let syndrome = match reply {
            Reply::Ack { .. } => self.positive(),
            Reply::Nak { syndrome, .. } => syndrome,
        };
        count_reply(cx, syndrome);
        let aeth = Aeth { syndrome, msn: self.msn.get() };
        let draft = Draft {
            opcode: Opcode::RcAcknowledge,
            psn: reply.psn(),
            ext: Ext::Aeth(aeth),
            ack_req: false,
            solicited: false,
        };
        Some(link.headers(draft, 0))
    }

    /// The next READ response. Fails when its region has gone since the request was accepted.
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
    ) -> Result<Option<Headers>, Fatal> {
        while let Some(job) = self.reads.front() {
            match check_remote(cx, link, Purpose::RemoteRead, job.remaining()) {
                Ok(()) => return Ok(self.read_response(cx, link)),
                Err(_) if job.again => {
                    self.reads.pop_front();
                }
                Err(_) => return Err(self.fail_read(job.psn)),
            }
        }
        Ok(None)
    }

    fn fail_read(&mut self, psn: Psn) -> Fatal {
        self.reads.clear();
        let nak = Syndrome::RemoteAccess;
        self.reply = Some(Reply::Nak { psn, syndrome: nak });
        Fatal { recv_status: WcStatus::WrFlushError, nak }
    }

    fn read_response(&mut self, cx: &mut Context<'_>, link: &Link) -> Option<Headers> {
        let front = self.reads.front()?;
        let (msn, is_last) = (front.msn, front.psn.next() == front.end);
        let opcode = match (front.fresh, is_last) {
            (true, true) => Opcode::RcReadResponseOnly,
            (true, false) => Opcode::RcReadResponseFirst,
            (false, true) => Opcode::RcReadResponseLast,
            (false, false) => Opcode::RcReadResponseMiddle,
        };
        let ext = match opcode {
            Opcode::RcReadResponseMiddle => Ext::None,
            _ => Ext::Aeth(Aeth { syndrome: self.positive(), msn }),
        };
        let job = self.reads.front_mut()?;
        let len = job.left.min(link.mtu);
        let draft = Draft { opcode, psn: job.psn, ext, ack_req: false, solicited: false };
        put_piece(cx, job.addr, len);
        job.addr = job.addr.wrapping_add(u64::from(len));
        job.left -= len;
        job.psn = job.psn.next();
        job.fresh = false;
        if is_last {
            self.reads.pop_front();
        }
        Some(link.headers(draft, len))
    }

    /// A positive syndrome with the credits of this moment. A message in progress is not counted in
    /// the MSN, so its receive counts as a credit.
    fn positive(&mut self) -> Syndrome {
        let credits = credit_code(self.receives.len() as u32);
        self.starved = credits == 0;
        Syndrome::Ack { credits }
    }

    /// Stops for good. The answer to a fatal request, and what has to go before it, still leaves.
    pub(super) fn stop(&mut self, keep_answers: bool) {
        self.message = Message::None;
        if !keep_answers {
            self.reply = None;
            self.reads.clear();
        }
    }
}

impl ReadJob {
    fn new(psn: Psn, reth: &Reth, link: &Link, msn: u32, again: bool) -> ReadJob {
        ReadJob {
            psn,
            end: psn.plus(link.packets(reth.len)),
            addr: reth.addr,
            rkey: reth.rkey,
            left: reth.len,
            msn,
            fresh: true,
            again,
        }
    }

    fn remaining(&self) -> Range {
        Range { key: self.rkey, addr: self.addr, len: self.left }
    }
}

fn range_of(reth: &Reth) -> Range {
    Range { key: reth.rkey, addr: reth.addr, len: reth.len }
}

fn put_piece(cx: &mut Context<'_>, addr: u64, len: u32) {
    cx.pieces.extend((len > 0).then_some(Placement { addr, len }));
}

/// First and middle packets are full, last ones are not empty.
fn check_length(opcode: Opcode, payload_len: usize, mtu: u32) -> Result<u32, Refused> {
    let legal = match (opcode.starts_message(), opcode.ends_message()) {
        (_, false) => mtu..=mtu,
        (false, true) => 1..=mtu,
        (true, true) => 0..=mtu,
    };
    u32::try_from(payload_len)
        .ok()
        .filter(|len| legal.contains(len))
        .ok_or(Refused::fatal(Syndrome::InvalidRequest))
}

/// The length in a WRITE's first packet agrees with whether more packets follow.
fn length_is_legal(reth: &Reth, opcode: Opcode, mtu: u32) -> bool {
    let fits_one = reth.len <= mtu;
    fits_one == opcode.ends_message() && u64::from(reth.len) <= MAX_MESSAGE_BYTES
}

fn check_remote(
    cx: &mut Context<'_>,
    link: &Link,
    purpose: Purpose,
    range: Range,
) -> Result<(), Refused> {
    cx.regions.check(link.pd, purpose, range).map_err(|refusal: Refusal| {
        cx.count_refusal(refusal);
        Refused::fatal(Syndrome::RemoteAccess)
    })
}

fn count_reply(cx: &mut Context<'_>, syndrome: Syndrome) {
    cx.count(|c| match syndrome {
        Syndrome::Ack { .. } => &mut c.acks_sent,
        Syndrome::RnrNak { .. } => &mut c.rnr_naks_sent,
        Syndrome::SequenceError => &mut c.seq_naks_sent,
        Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => &mut c.invalid_request_naks_sent,
        Syndrome::RemoteAccess => &mut c.remote_access_naks_sent,
        Syndrome::RemoteOperation => &mut c.remote_operation_naks_sent,
    });
}
