//! The responder half of a reliable connection: the peer's requests are checked, placed and
//! answered (IBA 9.7.4 to 9.7.5, responder side; the checks are in the order of table 49).
//!
//! Every request packet is first judged by its PSN alone:
//!
//! | PSN | what happens |
//! |---|---|
//! | expected | checked and executed; the expected PSN moves on |
//! | earlier | executed before: SEND and WRITE are acknowledged again; READ is executed again and atomics are answered from what was kept, if they match what was executed |
//! | later | something was lost: one NAK, then silence until the expected packet comes |
//!
//! Answers leave in PSN order, as the requester takes one for an answer to all that came before. So
//! there is a queue of READs and atomics being answered ([`resources`](super::resources)), and *one*
//! pending acknowledgement or NAK, always the latest: acknowledging packet by packet would say
//! nothing that the last one does not.
//!
//! Invariants: nothing is placed before all checks of its packet have passed; keys are checked again
//! for every packet (C3); an atomic is carried out once, however often it arrives; a READ sent again
//! by the network can never end the connection, because its key may rightly be gone. A duplicate that
//! does not match the request that was executed gets no answer of any kind, so it tells nothing.

mod selective;

use alloc::boxed::Box;

use super::link::{Draft, Link};
use super::receives::Receives;
use super::resources::{Asked, Job, ReadWork, Resources, Work};
use super::{Arrival, Context};
use crate::endpoint::{AtomicJob, Insert};
use crate::planted::{Bug, Planted};
use crate::region::{Purpose, Range, Refusal};
use crate::sg::{Extent, Placement};
use crate::srq::{Receive, SrqTable};
use crate::verbs::{MAX_MESSAGE_BYTES, RecvWr, WcOpcode, WcStatus};
use crate::wire::{Aeth, AtomicAckEth, AtomicEth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};
use crate::world::AtomicOp;
use selective::Selective;

/// The message whose packets are arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    /// Between messages.
    None,
    /// A SEND into the current receive, `offset` bytes of which are filled.
    Send { offset: u32 },
    /// A WRITE, of which `left` bytes from `addr` are still to come.
    Write { addr: u64, rkey: u32, left: u32, len: u32 },
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
    /// Whether it asks for the next request.
    fn is_sequence_nak(self) -> bool {
        matches!(self, Reply::Nak { syndrome: Syndrome::SequenceError, .. })
    }

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
    pub(super) nak: Syndrome,
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
    /// The current receive completes: opcode and length.
    completes: Option<(WcOpcode, u32)>,
    /// A key of ours is taken away.
    invalidates: Option<u32>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Responder {
    receives: Receives,
    expected: Psn,
    /// Messages completed, 24 bits.
    msn: Psn,
    message: Message,
    /// The expected packet was asked for; asking again would make the peer send everything again.
    nak_sent: bool,
    reply: Option<Reply>,
    resources: Resources,
    /// The last credits the peer was told of were none.
    starved: bool,
    /// What selective repeat keeps; in go-back-N nothing.
    selective: Option<Box<Selective>>,
}

impl Responder {
    pub(super) fn new(receives: Receives) -> Responder {
        Responder {
            receives,
            expected: Psn::default(),
            msn: Psn::default(),
            message: Message::None,
            nak_sent: false,
            reply: None,
            resources: Resources::default(),
            starved: false,
            selective: None,
        }
    }

    pub(super) fn start(&mut self, link: &Link) {
        self.expected = link.peer.remote_psn;
        self.resources.reset(job_limit(link));
        self.start_selective(link);
    }

    /// PSN of the peer's next request.
    pub(super) fn expected(&self) -> Psn {
        self.expected
    }

    /// Receives posted and not completed; `None` if they are shared.
    pub(super) fn receives(&self) -> Option<u32> {
        self.receives.len()
    }

    /// Forgets everything, posted receives too: the queue pair goes back to RESET. Shared receives go
    /// back to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.receives.reset(srqs);
        self.expected = Psn::default();
        self.msn = Psn::default();
        self.message = Message::None;
        self.nak_sent = false;
        self.reply = None;
        self.resources.reset(0);
        self.starved = false;
        self.selective = None;
    }

    // ---- receives ------------------------------------------------------------------------------

    pub(super) fn is_full(&self) -> bool {
        self.receives.is_full()
    }

    pub(super) fn limit(&self) -> u32 {
        self.receives.limit()
    }

    pub(super) fn post(&mut self, wr: RecvWr) {
        self.receives.post(wr);
        if self.starved && self.reply.is_none() {
            // The peer sends single packets until it hears that there are receives again.
            self.reply = Some(Reply::Ack { psn: self.expected.minus(1) });
        }
    }

    /// The oldest receive, taken out; for flushing. The one in progress comes first.
    pub(super) fn take_front(&mut self) -> Option<Receive> {
        self.receives.take_own()
    }

    /// Puts receives that were taken ahead of their turn back into the shared queue.
    pub(super) fn give_back(&mut self, srqs: &mut SrqTable) {
        self.receives.give_back(srqs);
    }

    // ---- requests ------------------------------------------------------------------------------

    /// A request packet. Leaves in `cx.pieces` where its payload goes, in `cx.insert` the atomic that
    /// it asks for, or in `cx.owed_packets` how many answers have to be sent before it.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(headers, cx.planted) {
            *cx.owed_packets = self.owed_packets(link);
            return Ok(());
        }
        self.take_request(cx, link, headers, payload_len)
    }

    fn take_request(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        if self.selective.is_some() {
            return self.handle_selective(cx, link, headers, payload_len);
        }
        match cx.planted.distance(headers.bth().psn, self.expected) {
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
        let (psn, opcode) = (headers.bth().psn, headers.bth().opcode);
        if opcode.is_atomic_request() {
            self.repeat_atomic(cx, link, headers);
            return self.atomic_again(cx, link, headers);
        }
        match headers.ext().reth().filter(|_| opcode.is_read_request()) {
            Some(reth) => self.read_again(cx, link, psn, *reth),
            None => {
                cx.count(|c| &mut c.duplicates);
                self.receive_again(cx, link, headers);
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
        let executed = match headers.ext() {
            _ if !self.check_self_description(headers) => {
                cx.count(|c| &mut c.bad_opcode);
                Err(Refused::fatal(Syndrome::InvalidRequest))
            }
            Ext::Reth(reth) if headers.bth().opcode.is_read_request() => {
                self.begin_read(cx, link, headers.bth().psn, reth, payload_len)
            }
            Ext::AtomicEth(atomic) => self.begin_atomic(cx, link, headers, atomic, payload_len),
            _ => self
                .check_message(cx, link, headers, payload_len)
                .map(|effect| self.execute(cx, link, headers, effect)),
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

    /// Whether a request whose turn it is has to wait because READs before it are unanswered: it could
    /// change what they return, or tell a program that they are done.
    fn is_behind_read(&self, headers: &Headers, planted: Planted) -> bool {
        let Bth { opcode, psn, .. } = *headers.bth();
        psn == self.expected
            && self.owes_read()
            && !opcode.is_read_request()
            && !planted.is(Bug::ReadOvertaken)
    }

    fn owes_read(&self) -> bool {
        match &self.selective {
            Some(selective) => selective.has_answer(),
            None => self.resources.owes_read(),
        }
    }

    /// Answers to READs and atomics that are still to be sent.
    fn owed_packets(&self, link: &Link) -> u32 {
        let reads = self.selective.as_ref().map_or(0, |selective| selective.owed_packets(link));
        self.resources.owed_packets().saturating_add(reads)
    }

    /// A request packet that [`handle_request`](Responder::handle_request) held.
    pub(super) fn handle_held(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(headers, cx.planted) {
            self.hold_back(cx);
            return Ok(());
        }
        self.take_request(cx, link, headers, payload_len)
    }

    /// The request is dropped, and requested again once the READs are answered: a NAK leaves after
    /// the answers to what comes before it.
    fn hold_back(&mut self, cx: &mut Context<'_>) {
        cx.count(|c| &mut c.held_requests);
        self.nak_sent = true;
        self.reply = Some(Reply::Nak { psn: self.expected, syndrome: Syndrome::SequenceError });
    }

    /// What follows the packet in this message is dropped in silence until it is sent again.
    fn not_ready(&mut self, link: &Link) {
        self.nak_sent = true;
        let syndrome = Syndrome::RnrNak { timer: link.peer.min_rnr_timer & 31 };
        self.reply = Some(Reply::Nak { psn: self.expected, syndrome });
    }

    fn check_message(
        &mut self,
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
            self.check_send(cx, link, headers, len)
        } else {
            self.check_write(cx, link, headers, len)
        }
    }

    /// First and only start a message, middle and last continue one of their own kind.
    fn check_sequence(&self, opcode: Opcode) -> Result<(), Refused> {
        let in_order = match self.message {
            // The last packet of a WRITE stands alone in selective repeat.
            Message::None if opcode == Opcode::SrWriteLastImm => true,
            Message::None => opcode.starts_message() && (opcode.is_send() || opcode.is_write()),
            Message::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Message::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        };
        in_order.then_some(()).ok_or(Refused::fatal(Syndrome::InvalidRequest))
    }

    fn check_send(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        len: u32,
    ) -> Result<Effect, Refused> {
        let receive = self.receives.current(cx).ok_or(Refused::NotReady)?;
        let offset = match self.message {
            Message::Send { offset } => offset,
            _ => 0,
        };
        if u64::from(offset) + u64::from(len) > receive.len.min(MAX_MESSAGE_BYTES) {
            cx.count(|c| &mut c.receive_too_small);
            let status = WcStatus::LocalLengthError;
            return Err(Refused::fatal_with(Syndrome::InvalidRequest, status));
        }
        let invalidates = check_invalidate(cx, link, headers.ext())?;
        let extent = Extent { offset, len };
        cx.stretch(link, Purpose::LocalWrite, &receive.wr.sges, extent).map_err(|_| {
            let status = WcStatus::LocalProtectionError;
            Refused::fatal_with(Syndrome::RemoteOperation, status)
        })?;
        let filled = offset + len;
        let ends = headers.bth().opcode.ends_message();
        Ok(Effect {
            message: if ends { Message::None } else { Message::Send { offset: filled } },
            completes: ends.then_some((WcOpcode::Recv, filled)),
            invalidates,
        })
    }

    fn check_write(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        len: u32,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        check_enabled(cx, link.access.remote_write)?;
        let (target, total) = self.write_target(cx, link, headers)?;
        let fits = if opcode.ends_message() { len == target.len } else { len < target.len };
        if !fits {
            cx.count(|c| &mut c.bad_length);
            return Err(Refused::fatal(Syndrome::InvalidRequest));
        }
        let addr = check_remote(cx, link, Purpose::RemoteWrite, target)?;
        let takes_receive = opcode.carries_imm();
        if takes_receive && self.receives.current(cx).is_none() {
            return Err(Refused::NotReady);
        }
        let next = Message::Write {
            addr: target.addr.wrapping_add(u64::from(len)),
            rkey: target.key,
            left: target.len - len,
            len: total,
        };
        put_piece(cx, addr, len);
        Ok(Effect {
            message: if opcode.ends_message() { Message::None } else { next },
            completes: takes_receive.then_some((WcOpcode::RecvWriteImm, total)),
            invalidates: None,
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
                let before = self.written_before(link, headers, reth);
                let before = before.inspect_err(|_| cx.count(|c| &mut c.bad_length))?;
                let is_all = !cx.planted.is(Bug::LengthOfLastPacket);
                Ok((range_of(reth), reth.len + if is_all { before } else { 0 }))
            }
            _ => {
                cx.count(|c| &mut c.bad_length);
                Err(Refused::fatal(Syndrome::InvalidRequest))
            }
        }
    }

    /// Bytes of the WRITE that packets before this one have written, if what it says is true.
    fn written_before(&self, link: &Link, headers: &Headers, reth: &Reth) -> Result<u32, Refused> {
        let (Some(sreth), Some(selective)) = (headers.ext().sreth(), &self.selective) else {
            return Ok(0);
        };
        let is_true = selective.has_written(sreth.offset, reth, link.mtu)
            && u64::from(sreth.offset) + u64::from(reth.len) <= MAX_MESSAGE_BYTES;
        is_true.then_some(sreth.offset).ok_or(Refused::fatal(Syndrome::InvalidRequest))
    }

    fn execute(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers, effect: Effect) {
        let Bth { psn, opcode, ack_req, .. } = *headers.bth();
        self.message = effect.message;
        self.expected = psn.next();
        self.nak_sent = false;
        if match self.selective {
            Some(_) => effect.completes.is_some(),
            None => opcode.ends_message(),
        } {
            self.msn = self.msn.next();
        }
        if let Some(selective) = &mut self.selective {
            selective.note_executed(headers, link.mtu);
        }
        if let Some(rkey) = effect.invalidates
            && !cx.planted.is(Bug::InvalidateForgotten)
        {
            // Checked with this packet.
            let _ = cx.regions.invalidate(link.pd, link.qpn, rkey);
        }
        if let Some((opcode, byte_len)) = effect.completes
            && let Some(receive) = self.receives.finish()
        {
            let (imm, solicited) = (headers.ext().imm(), headers.bth().solicited);
            let invalidated = effect.invalidates;
            let src_qp = None;
            let ipv4 = link.peer.path.remote.ip().to_canonical().is_ipv4();
            let arrival = Arrival { opcode, byte_len, imm, invalidated, src_qp, ipv4, solicited };
            cx.complete_recv(link, &receive, arrival);
        }
        // A pending NAK for this very packet is out of date; one acknowledgement is enough.
        if ack_req || self.reply.is_some() {
            self.reply = Some(Reply::Ack { psn });
        }
    }

    // ---- READ and atomics ----------------------------------------------------------------------

    fn begin_read(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        reth: &Reth,
        payload_len: usize,
    ) -> Result<(), Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, link.access.remote_read)?;
        if payload_len != 0 || u64::from(reth.len) > MAX_MESSAGE_BYTES {
            cx.count(|c| &mut c.bad_length);
            return Err(Refused::fatal(Syndrome::InvalidRequest));
        }
        check_remote(cx, link, Purpose::RemoteRead, range_of(reth))?;
        self.make_room(cx, link)?;
        let psns = link.psns(reth.len, true);
        self.resources.keep(psn, psns, Asked::Read(range_of(reth)), job_limit(link));
        self.accept(psns);
        match &mut self.selective {
            Some(selective) => selective.begin_read(psn, reth),
            None => self.resources.begin_read(Job::read(psn, reth, link, self.msn.get())),
        }
        Ok(())
    }

    fn begin_atomic(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        atomic: &AtomicEth,
        payload_len: usize,
    ) -> Result<(), Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, link.access.remote_atomic)?;
        if payload_len != 0 {
            cx.count(|c| &mut c.bad_length);
            return Err(Refused::fatal(Syndrome::InvalidRequest));
        }
        let word = Range { key: atomic.rkey, addr: atomic.addr, len: 8 };
        let addr = check_remote(cx, link, Purpose::RemoteAtomic, word)?;
        // The rule is about the address that the peer names (IBA 9.4.5); the processor's atomics
        // need the other one aligned too.
        if !(atomic.addr | addr).is_multiple_of(8) {
            cx.count(|c| &mut c.misaligned_atomics);
            return Err(Refused::fatal(Syndrome::InvalidRequest));
        }
        self.make_room(cx, link)?;
        self.accept(1);
        let Bth { psn, opcode, .. } = *headers.bth();
        let op = operation(opcode, atomic);
        self.resources.keep(psn, 1, Asked::Atomic(word, op), job_limit(link));
        self.resources.begin_atomic(psn, self.msn.get());
        cx.count(|c| &mut c.atomics);
        *cx.insert = Insert::Atomic(AtomicJob { addr, op, qpn: link.qpn, psn });
        Ok(())
    }

    fn check_between_messages(&self, cx: &mut Context<'_>) -> Result<(), Refused> {
        if self.message == Message::None {
            return Ok(());
        }
        cx.count(|c| &mut c.bad_opcode);
        Err(Refused::fatal(Syndrome::InvalidRequest))
    }

    fn make_room(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Refused> {
        let others = self.selective.as_ref().map_or(0, |selective| selective.reads());
        if self.resources.make_room(others, job_limit(link)) {
            return Ok(());
        }
        cx.count(|c| &mut c.too_many_reads);
        Err(Refused::fatal(Syndrome::InvalidRequest))
    }

    /// Takes a request of `psns` PSNs whose answer acknowledges everything before it.
    fn accept(&mut self, psns: u32) {
        if let Some(selective) = &mut self.selective {
            selective.note_between();
            // Answers acknowledge nothing here.
            self.expected = self.expected.plus(psns);
            self.reply = Some(Reply::Ack { psn: self.expected.minus(1) });
            return;
        }
        self.msn = self.msn.next();
        self.expected = self.expected.plus(psns);
        self.nak_sent = false;
        self.reply = None;
    }

    /// The former value of the word that the atomic with this PSN was for.
    pub(super) fn complete_atomic(&mut self, psn: Psn, original: u64) {
        self.resources.complete_atomic(psn, original);
    }

    /// A READ that was executed before: its responses, or some of them, are wanted again.
    fn read_again(&mut self, cx: &mut Context<'_>, link: &Link, psn: Psn, reth: Reth) {
        let behind = psn.distance_from(self.expected).unsigned_abs();
        if u64::from(reth.len) > MAX_MESSAGE_BYTES || link.packets(reth.len) > behind {
            cx.count(|c| &mut c.bad_psn);
            return;
        }
        let offset = |first: Psn| u64::from(psn.minus(first.get()).get()) * u64::from(link.mtu);
        if self.may_read_again(cx, link, psn, range_of(&reth), offset) {
            let job = Job::read(psn, &reth, link, self.msn.get());
            self.resources.add_again(job, job_limit(link));
        }
    }

    /// Whether `part` is a part of the READ at `psn` that was executed, and may still be read;
    /// `offset` says where it begins in a READ by that one's first PSN. Nothing is answered if not:
    /// the network may have repeated what is rightly gone, and who makes READs up learns nothing.
    fn may_read_again(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        part: Range,
        offset: impl Fn(Psn) -> u64,
    ) -> bool {
        let is_known = match self.resources.kept(psn) {
            Some((first, Asked::Read(whole))) => part.is_part_of(whole, offset(first)),
            _ => false,
        };
        let is_unchecked = cx.planted.is(Bug::DuplicateReadUnchecked);
        if !is_known && !is_unchecked {
            cx.count(|c| &mut c.unmatched_duplicates);
            return false;
        }
        let is_enabled = link.access.remote_read && job_limit(link) > 0;
        let is_allowed = (is_unchecked || check_enabled(cx, is_enabled).is_ok())
            && check_remote(cx, link, Purpose::RemoteRead, part).is_ok();
        if is_allowed {
            cx.count(|c| &mut c.duplicate_reads);
        }
        is_allowed
    }

    /// An atomic that was carried out before: its result is wanted again.
    fn atomic_again(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers) {
        let Bth { psn, opcode, .. } = *headers.bth();
        let Ext::AtomicEth(atomic) = headers.ext() else {
            return;
        };
        let word = Range { key: atomic.rkey, addr: atomic.addr, len: 8 };
        let asked = Asked::Atomic(word, operation(opcode, atomic));
        match self.resources.kept(psn) {
            None => return cx.count(|c| &mut c.stale_atomics),
            Some((_, kept)) if kept != asked => {
                return cx.count(|c| &mut c.unmatched_duplicates);
            }
            Some(_) => {}
        }
        cx.count(|c| &mut c.duplicate_atomics);
        if let Some(job) = self.resources.performed(psn, self.msn.get()) {
            self.resources.add_again(job, job_limit(link));
        }
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn has_reply(&self) -> bool {
        self.reply.is_some()
    }

    /// Whether READs or atomics are to be answered.
    pub(super) fn has_answer(&self) -> bool {
        !self.resources.is_empty()
            || self.selective.as_ref().is_some_and(|selective| selective.has_answer())
    }

    /// Leaves in `cx.packet` the pending acknowledgement, unless answers to READs and atomics have to
    /// go before it.
    pub(super) fn poll_reply(&mut self, cx: &mut Context<'_>, link: &Link) {
        if self.selective.is_some() {
            return self.poll_report(cx, link);
        }
        let Some(reply) = self.reply else {
            return;
        };
        if self.resources.front().is_some_and(|job| !reply.psn().is_before(job.psn)) {
            return;
        }
        self.reply = None;
        let syndrome = match reply {
            Reply::Ack { .. } => cx.planted.promise(self.positive()),
            Reply::Nak { syndrome, .. } => syndrome,
        };
        count_reply(cx, syndrome);
        let aeth = Aeth { syndrome, msn: self.msn.get() };
        cx.emit(link, answer(Opcode::RcAcknowledge, reply.psn(), Ext::Aeth(aeth)), 0);
    }

    /// Leaves in `cx.packet` the next answer to a READ or an atomic. Fails when the region of a READ
    /// has gone since the request was accepted.
    pub(super) fn poll_answer(&mut self, cx: &mut Context<'_>, link: &Link) -> Result<(), Fatal> {
        if self.selective.is_some() {
            return self.poll_selective_answer(cx, link);
        }
        while let Some(&Job { psn, msn, again, work, .. }) = self.resources.front() {
            let read = match work {
                Work::Read(read) => read,
                Work::Atomic(Some(original)) => {
                    self.answer_atomic(cx, link, psn, msn, original);
                    return Ok(());
                }
                // The caller owes the value.
                Work::Atomic(None) => return Ok(()),
            };
            match check_remote(cx, link, Purpose::RemoteRead, read.remaining()) {
                Ok(addr) => {
                    self.answer_read(cx, link, addr);
                    return Ok(());
                }
                Err(_) if again => self.resources.pop_front(),
                Err(_) => return Err(self.fail_read(psn)),
            }
        }
        Ok(())
    }

    fn answer_atomic(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        psn: Psn,
        msn: u32,
        original: u64,
    ) {
        self.resources.pop_front();
        let aeth = Aeth { syndrome: self.positive(), msn };
        let ext = Ext::AethAtomicAck(aeth, AtomicAckEth { original });
        cx.emit(link, answer(Opcode::RcAtomicAcknowledge, psn, ext), 0);
    }

    fn fail_read(&mut self, psn: Psn) -> Fatal {
        self.clear_answers();
        let nak = Syndrome::RemoteAccess;
        self.reply = Some(Reply::Nak { psn, syndrome: nak });
        Fatal { recv_status: WcStatus::WrFlushError, nak }
    }

    /// The next response of the READ at the front, whose bytes lie at `addr`.
    fn answer_read(&mut self, cx: &mut Context<'_>, link: &Link, addr: u64) {
        let Some(&Job { psn, end, msn, work: Work::Read(read), .. }) = self.resources.front()
        else {
            return;
        };
        let is_last = psn.next() == end;
        let opcode = read_opcode(read, is_last);
        let ext = match opcode {
            Opcode::RcReadResponseMiddle => Ext::None,
            _ => Ext::Aeth(Aeth { syndrome: self.positive(), msn }),
        };
        let len = read.left.min(link.mtu);
        put_piece(cx, addr, len);
        if is_last {
            self.resources.pop_front();
        } else {
            self.resources.advance_read(len);
        }
        cx.emit(link, answer(opcode, psn, ext), len);
    }

    /// A positive syndrome with the credits of this moment.
    fn positive(&mut self) -> Syndrome {
        let credits = self.receives.credits();
        self.starved = credits == 0;
        Syndrome::Ack { credits }
    }

    // ---- planted mistakes ----------------------------------------------------------------------

    /// See [`Bug::AtomicRepeated`].
    fn repeat_atomic(&self, cx: &mut Context<'_>, link: &Link, headers: &Headers) {
        let Ext::AtomicEth(atomic) = headers.ext() else {
            return;
        };
        let word = Range { key: atomic.rkey, addr: atomic.addr, len: 8 };
        let Bth { psn, opcode, .. } = *headers.bth();
        if cx.planted.is(Bug::AtomicRepeated)
            && let Ok(addr) = check_remote(cx, link, Purpose::RemoteAtomic, word)
        {
            let op = operation(opcode, atomic);
            *cx.insert = Insert::Atomic(AtomicJob { addr, op, qpn: link.qpn, psn });
        }
    }

    /// See [`Bug::DuplicateSendReceived`].
    fn receive_again(&mut self, cx: &mut Context<'_>, link: &Link, headers: &Headers) {
        let is_whole = headers.bth().opcode == Opcode::RcSendOnly;
        if cx.planted.is(Bug::DuplicateSendReceived)
            && is_whole
            && self.receives.current(cx).is_some()
            && let Some(receive) = self.receives.finish()
        {
            let (opcode, byte_len) = (WcOpcode::Recv, 0);
            let ipv4 = link.peer.path.remote.ip().to_canonical().is_ipv4();
            let (imm, invalidated, src_qp, solicited) = (None, None, None, false);
            let arrival = Arrival { opcode, byte_len, imm, invalidated, src_qp, ipv4, solicited };
            cx.complete_recv(link, &receive, arrival);
        }
    }

    /// Stops for good. The answer to a fatal request, and what has to go before it, still leaves.
    pub(super) fn stop(&mut self, keep_answers: bool) {
        self.message = Message::None;
        if !keep_answers {
            self.reply = None;
            self.clear_answers();
        }
    }

    fn clear_answers(&mut self) {
        self.resources.clear_jobs();
        if let Some(selective) = &mut self.selective {
            selective.clear_answers();
        }
    }
}

/// A packet of the responder's.
fn answer(opcode: Opcode, psn: Psn, ext: Ext) -> Draft {
    Draft::new(opcode, psn, ext)
}

/// Most READs and atomics of the peer that may be unanswered.
fn job_limit(link: &Link) -> usize {
    usize::from(link.peer.max_dest_rd_atomic)
}

fn read_opcode(read: ReadWork, is_last: bool) -> Opcode {
    match (read.fresh, is_last) {
        (true, true) => Opcode::RcReadResponseOnly,
        (true, false) => Opcode::RcReadResponseFirst,
        (false, true) => Opcode::RcReadResponseLast,
        (false, false) => Opcode::RcReadResponseMiddle,
    }
}

fn operation(opcode: Opcode, atomic: &AtomicEth) -> AtomicOp {
    match opcode {
        Opcode::RcFetchAdd => AtomicOp::FetchAdd(atomic.swap_or_add),
        _ => AtomicOp::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add },
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

/// What the queue pair does not offer its peer at all is an invalid request, whatever it names
/// (IBA 9.7.4.1.4).
fn check_enabled(cx: &mut Context<'_>, is_enabled: bool) -> Result<(), Refused> {
    if is_enabled {
        return Ok(());
    }
    cx.count(|c| &mut c.bad_access);
    Err(Refused::fatal(Syndrome::InvalidRequest))
}

/// Where the bytes that the peer names lie.
fn check_remote(
    cx: &mut Context<'_>,
    link: &Link,
    purpose: Purpose,
    range: Range,
) -> Result<u64, Refused> {
    let checked = cx.regions.check_remote(link.pd, link.qpn, purpose, range);
    checked.map_err(|refusal| refuse_access(cx, refusal))
}

/// The key that a SEND's last packet takes away, if it may. A wrong one ends the message: it is a
/// protection error of the peer's, and the receive completes as one of an invalid request.
fn check_invalidate(cx: &mut Context<'_>, link: &Link, ext: &Ext) -> Result<Option<u32>, Refused> {
    let (Ext::Ieth(rkey) | Ext::SrethIeth(_, rkey)) = *ext else {
        return Ok(None);
    };
    cx.regions.check_invalidate(link.pd, link.qpn, rkey).map_err(|refusal| {
        cx.count_refusal(refusal);
        Refused::fatal_with(Syndrome::RemoteAccess, WcStatus::RemoteInvalidRequest)
    })?;
    Ok(Some(rkey))
}

fn refuse_access(cx: &mut Context<'_>, refusal: Refusal) -> Refused {
    cx.count_refusal(refusal);
    Refused::fatal(Syndrome::RemoteAccess)
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
