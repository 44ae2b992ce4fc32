//! Executes the peer's requests on a reliable connection, in PSN order: each packet is checked when
//! its turn has come, then placed or carried out (IBA 9.7.4 to 9.7.5, responder side; the checks are
//! in the order of table 49).
//!
//! This is what both modes of loss recovery share. Which packet's turn it is, and what becomes of
//! others, is up to the mode, and so is what an executed request means for message numbers and
//! answers: it is told by an [`Executed`].
//!
//! Answers leave in PSN order, as the requester takes one for an answer to all that came before. So
//! there is a queue of READs and atomics being answered ([`resources`](super::resources)), and *one*
//! pending acknowledgement or NAK, always the latest: acknowledging packet by packet would say
//! nothing that the last one does not.
//!
//! Invariants: nothing is placed before all checks of its packet have passed; keys are checked again
//! for every packet (C3).

use super::link::Link;
use super::receives::Receives;
use super::resources::{Asked, Resources};
use super::{Arrival, Context};
use crate::endpoint::{AtomicJob, Insert};
use crate::planted::Bug;
use crate::region::{Purpose, Range, Refusal};
use crate::sg::{Extent, Placement};
use crate::srq::SrqTable;
use crate::verbs::{MAX_MESSAGE_BYTES, RecvWr, WcOpcode, WcStatus};
use crate::wire::{Aeth, AtomicAckEth, AtomicEth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};
use crate::world::AtomicOp;

use super::link::Draft;

/// The message whose packets are arriving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Between messages.
    None,
    /// A SEND into the current receive, `offset` bytes of which are filled.
    Send { offset: u32 },
    /// A WRITE, of which `left` bytes from `addr` are still to come.
    Write { addr: u64, rkey: u32, left: u32, len: u32 },
}

/// The acknowledgement to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    /// Everything up to the PSN.
    Ack { psn: Psn },
    /// Everything before the PSN, which was refused.
    Nak { psn: Psn, syndrome: Syndrome },
}

impl Reply {
    /// Whether it requests a packet that is missing.
    pub(super) fn is_sequence_nak(self) -> bool {
        matches!(self, Reply::Nak { syndrome: Syndrome::SequenceError, .. })
    }

    pub(super) fn psn(self) -> Psn {
        match self {
            Reply::Ack { psn } | Reply::Nak { psn, .. } => psn,
        }
    }
}

/// Why a request packet is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
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
    pub(super) fn fatal(nak: Syndrome) -> Refused {
        Refused::fatal_with(nak, WcStatus::WrFlushError)
    }

    fn fatal_with(nak: Syndrome, recv_status: WcStatus) -> Refused {
        Refused::Fatal(Fatal { recv_status, nak })
    }
}

/// What the mode knows of a packet whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Bytes of its WRITE that packets before it have written; `None` if what it says about that is
    /// not true.
    pub(super) written: Option<u32>,
    /// READs whose answers the mode keeps.
    pub(super) kept_reads: usize,
}

/// What was executed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Executed {
    /// A packet of a message.
    Message { ends: bool, takes_receive: bool },
    /// A READ, to be answered.
    Read(Reth),
    /// An atomic, whose answer is queued once its message is numbered.
    Atomic,
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
pub(super) struct Executor {
    pub(super) receives: Receives,
    pub(super) expected: Psn,
    /// Messages completed, 24 bits.
    pub(super) msn: Psn,
    pub(super) message: Message,
    pub(super) reply: Option<Reply>,
    pub(super) resources: Resources,
    /// The last credits the peer was told of were none.
    starved: bool,
}

impl Executor {
    pub(super) fn new(receives: Receives) -> Executor {
        Executor {
            receives,
            expected: Psn::default(),
            msn: Psn::default(),
            message: Message::None,
            reply: None,
            resources: Resources::default(),
            starved: false,
        }
    }

    pub(super) fn start(&mut self, link: &Link) {
        self.expected = link.peer.remote_psn;
        self.resources.reset(job_limit(link));
    }

    /// Forgets everything, posted receives too. Shared receives go back to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.receives.reset(srqs);
        self.expected = Psn::default();
        self.msn = Psn::default();
        self.message = Message::None;
        self.reply = None;
        self.resources.reset(0);
        self.starved = false;
    }

    pub(super) fn post(&mut self, wr: RecvWr) {
        self.receives.post(wr);
        if self.starved {
            // The peer sends single packets until it hears that there are receives again.
            self.acknowledge();
        }
    }

    /// Everything executed so far is acknowledged, unless there is more to say already.
    pub(super) fn acknowledge(&mut self) {
        self.reply.get_or_insert(Reply::Ack { psn: self.expected.minus(1) });
    }

    /// Says that everything before the expected packet was executed, and why that was not.
    pub(super) fn refuse_expected(&mut self, syndrome: Syndrome) {
        self.reply = Some(Reply::Nak { psn: self.expected, syndrome });
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Checks and executes the packet whose turn it is. Leaves in `cx.pieces` where its payload goes,
    /// in `cx.insert` the atomic that it asks for. What follows a packet that is not executed is
    /// dropped in silence until it is sent again.
    pub(super) fn execute(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        match headers.ext() {
            Ext::Reth(reth) if headers.bth().opcode.is_read_request() => {
                self.execute_read(cx, link, reth, payload_len, turn)
            }
            Ext::AtomicEth(atomic) => {
                let opcode = headers.bth().opcode;
                self.execute_atomic(cx, link, opcode, atomic, payload_len, turn)
            }
            _ => self
                .check_message(cx, link, headers, payload_len, turn)
                .map(|effect| self.finish_message(cx, link, headers, effect)),
        }
    }

    /// Answers a packet that was not executed.
    pub(super) fn refuse(&mut self, link: &Link, refused: Refused) -> Result<(), Fatal> {
        match refused {
            Refused::NotReady => {
                self.refuse_expected(Syndrome::RnrNak { timer: link.peer.min_rnr_timer & 31 });
                Ok(())
            }
            Refused::Fatal(fatal) => {
                self.refuse_expected(fatal.nak);
                Err(fatal)
            }
        }
    }

    fn check_message(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        if !self.is_in_order(opcode) {
            return Err(bad_opcode(cx));
        }
        let len = legal_length(opcode, payload_len, link.mtu).ok_or_else(|| bad_length(cx))?;
        if opcode.is_send() {
            self.check_send(cx, link, headers, len)
        } else {
            self.check_write(cx, link, headers, len, turn)
        }
    }

    /// First and only start a message, middle and last continue one of their own kind.
    fn is_in_order(&self, opcode: Opcode) -> bool {
        match self.message {
            // The last packet of a WRITE stands alone in selective repeat.
            Message::None if opcode == Opcode::SrWriteLastImm => true,
            Message::None => opcode.starts_message() && (opcode.is_send() || opcode.is_write()),
            Message::Send { .. } => opcode.is_send() && !opcode.starts_message(),
            Message::Write { .. } => opcode.is_write() && !opcode.starts_message(),
        }
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
        turn: Turn,
    ) -> Result<Effect, Refused> {
        let opcode = headers.bth().opcode;
        check_enabled(cx, link.access.remote_write)?;
        let target =
            self.write_target(link, headers, turn, !cx.planted.is(Bug::LengthOfLastPacket));
        let (target, total) = target.ok_or_else(|| bad_length(cx))?;
        let fits = if opcode.ends_message() { len == target.len } else { len < target.len };
        if !fits {
            return Err(bad_length(cx));
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

    /// What the WRITE still has to fill, and its whole length, if the packet may say so.
    fn write_target(
        &self,
        link: &Link,
        headers: &Headers,
        turn: Turn,
        counts_all: bool,
    ) -> Option<(Range, u32)> {
        if let Message::Write { addr, rkey, left, len } = self.message {
            return Some((Range { key: rkey, addr, len: left }, len));
        }
        // The length in the first packet agrees with whether more packets follow.
        let is_legal = |reth: &&Reth| {
            let fits_one = reth.len <= link.mtu;
            fits_one == headers.bth().opcode.ends_message()
                && u64::from(reth.len) <= MAX_MESSAGE_BYTES
        };
        let reth = headers.ext().reth().filter(is_legal)?;
        let before = turn.written?;
        Some((range_of(reth), reth.len + if counts_all { before } else { 0 }))
    }

    fn finish_message(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        effect: Effect,
    ) -> Executed {
        let Bth { psn, opcode, ack_req, solicited, .. } = *headers.bth();
        self.message = effect.message;
        self.expected = psn.next();
        if let Some(rkey) = effect.invalidates
            && !cx.planted.is(Bug::InvalidateForgotten)
        {
            // Checked with this packet.
            let _ = cx.regions.invalidate(link.pd, link.qpn, rkey);
        }
        if let Some((opcode, byte_len)) = effect.completes
            && let Some(receive) = self.receives.finish()
        {
            let (imm, invalidated, src_qp) = (headers.ext().imm(), effect.invalidates, None);
            let ipv4 = link.peer.path.remote.ip().to_canonical().is_ipv4();
            let arrival = Arrival { opcode, byte_len, imm, invalidated, src_qp, ipv4, solicited };
            cx.complete_recv(link, &receive, arrival);
        }
        // A pending NAK for this very packet is out of date; one acknowledgement is enough.
        if ack_req || self.reply.is_some() {
            self.reply = Some(Reply::Ack { psn });
        }
        Executed::Message { ends: opcode.ends_message(), takes_receive: effect.completes.is_some() }
    }

    // ---- READ and atomics ----------------------------------------------------------------------

    fn execute_read(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        reth: &Reth,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, link.access.remote_read)?;
        if payload_len != 0 || u64::from(reth.len) > MAX_MESSAGE_BYTES {
            return Err(bad_length(cx));
        }
        check_remote(cx, link, Purpose::RemoteRead, range_of(reth))?;
        self.make_room(cx, link, turn)?;
        let psns = link.psns(reth.len, true);
        let asked = Asked::Read(range_of(reth));
        self.resources.keep(self.expected, psns, asked, job_limit(link));
        self.expected = self.expected.plus(psns);
        Ok(Executed::Read(*reth))
    }

    fn execute_atomic(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        opcode: Opcode,
        atomic: &AtomicEth,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, link.access.remote_atomic)?;
        if payload_len != 0 {
            return Err(bad_length(cx));
        }
        let addr = check_remote(cx, link, Purpose::RemoteAtomic, word_of(atomic))?;
        // The rule is about the address that the peer names (IBA 9.4.5); the processor's atomics
        // need the other one aligned too.
        if !(atomic.addr | addr).is_multiple_of(8) {
            return Err(invalid(cx, |c| &mut c.misaligned_atomics));
        }
        self.make_room(cx, link, turn)?;
        let (psn, op) = (self.expected, operation(opcode, atomic));
        self.resources.keep(psn, 1, Asked::Atomic(word_of(atomic), op), job_limit(link));
        self.expected = psn.next();
        cx.count(|c| &mut c.atomics);
        *cx.insert = Insert::Atomic(AtomicJob { addr, op, qpn: link.qpn, psn });
        Ok(Executed::Atomic)
    }

    fn check_between_messages(&self, cx: &mut Context<'_>) -> Result<(), Refused> {
        if self.message == Message::None { Ok(()) } else { Err(bad_opcode(cx)) }
    }

    fn make_room(&mut self, cx: &mut Context<'_>, link: &Link, turn: Turn) -> Result<(), Refused> {
        if self.resources.make_room(turn.kept_reads, job_limit(link)) {
            return Ok(());
        }
        Err(invalid(cx, |c| &mut c.too_many_reads))
    }

    /// Whether the bytes of a READ that was executed may still be read; `is_known` says that `part`
    /// is a part of it. Nothing is answered if not: the network may have duplicated what is rightly
    /// gone, and who makes READs up learns nothing.
    pub(super) fn may_read_again(
        &self,
        cx: &mut Context<'_>,
        link: &Link,
        part: Range,
        is_known: bool,
    ) -> bool {
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

    /// Whether `part` begins `offset` bytes into the READ that `psn` is one of, and was executed;
    /// `offset` is told the PSNs between the READ's first one and `psn`.
    pub(super) fn is_part_of_read(
        &self,
        psn: Psn,
        part: Range,
        offset: impl FnOnce(u32) -> u64,
    ) -> bool {
        match self.resources.kept(psn) {
            Some((first, Asked::Read(whole))) => {
                part.is_part_of(whole, offset(psn.minus(first.get()).get()))
            }
            _ => false,
        }
    }

    /// An atomic that was carried out before: its result is wanted again.
    pub(super) fn answer_atomic_again(
        &mut self,
        cx: &mut Context<'_>,
        link: &Link,
        headers: &Headers,
        atomic: &AtomicEth,
    ) {
        let Bth { psn, opcode, .. } = *headers.bth();
        let asked = Asked::Atomic(word_of(atomic), operation(opcode, atomic));
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

    pub(super) fn emit_atomic_answer(
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
        cx.emit(link, Draft::new(Opcode::RcAtomicAcknowledge, psn, ext), 0);
    }

    /// The region of a READ has gone since its request was accepted.
    pub(super) fn fail_read(&mut self, psn: Psn) -> Fatal {
        self.resources.clear_jobs();
        let nak = Syndrome::RemoteAccess;
        self.reply = Some(Reply::Nak { psn, syndrome: nak });
        Fatal { recv_status: WcStatus::WrFlushError, nak }
    }

    /// A positive syndrome with the credits of this moment.
    pub(super) fn positive(&mut self) -> Syndrome {
        let credits = self.receives.credits();
        self.starved = credits == 0;
        Syndrome::Ack { credits }
    }

    /// The AETH of a reply that is about to leave.
    pub(super) fn reply_aeth(&mut self, cx: &mut Context<'_>, reply: Reply) -> Aeth {
        let syndrome = match reply {
            Reply::Ack { .. } => self.positive(),
            Reply::Nak { syndrome, .. } => syndrome,
        };
        cx.count(|c| match syndrome {
            Syndrome::Ack { .. } => &mut c.acks_sent,
            Syndrome::RnrNak { .. } => &mut c.rnr_naks_sent,
            Syndrome::SequenceError => &mut c.seq_naks_sent,
            Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => {
                &mut c.invalid_request_naks_sent
            }
            Syndrome::RemoteAccess => &mut c.remote_access_naks_sent,
            Syndrome::RemoteOperation => &mut c.remote_operation_naks_sent,
        });
        Aeth { syndrome, msn: self.msn.get() }
    }
}

/// Most READs and atomics of the peer that may be unanswered.
pub(super) fn job_limit(link: &Link) -> usize {
    usize::from(link.peer.max_dest_rd_atomic)
}

pub(super) fn operation(opcode: Opcode, atomic: &AtomicEth) -> AtomicOp {
    match opcode {
        Opcode::RcFetchAdd => AtomicOp::FetchAdd(atomic.swap_or_add),
        _ => AtomicOp::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add },
    }
}

pub(super) fn range_of(reth: &Reth) -> Range {
    Range { key: reth.rkey, addr: reth.addr, len: reth.len }
}

pub(super) fn word_of(atomic: &AtomicEth) -> Range {
    Range { key: atomic.rkey, addr: atomic.addr, len: 8 }
}

pub(super) fn put_piece(cx: &mut Context<'_>, addr: u64, len: u32) {
    cx.pieces.extend((len > 0).then_some(Placement { addr, len }));
}

/// The payload's length, if the opcode allows it: first and middle packets are full, last ones are
/// not empty.
pub(super) fn legal_length(opcode: Opcode, payload_len: usize, mtu: u32) -> Option<u32> {
    let legal = match (opcode.starts_message(), opcode.ends_message()) {
        (_, false) => mtu..=mtu,
        (false, true) => 1..=mtu,
        (true, true) => 0..=mtu,
    };
    u32::try_from(payload_len).ok().filter(|len| legal.contains(len))
}

/// Counts an invalid request.
fn invalid(
    cx: &mut Context<'_>,
    which: impl Fn(&mut crate::counters::Counters) -> &mut u64,
) -> Refused {
    cx.count(which);
    Refused::fatal(Syndrome::InvalidRequest)
}

pub(super) fn bad_opcode(cx: &mut Context<'_>) -> Refused {
    invalid(cx, |c| &mut c.bad_opcode)
}

fn bad_length(cx: &mut Context<'_>) -> Refused {
    invalid(cx, |c| &mut c.bad_length)
}

/// What the queue pair does not offer its peer at all is an invalid request, whatever it names
/// (IBA 9.7.4.1.4).
pub(super) fn check_enabled(cx: &mut Context<'_>, is_enabled: bool) -> Result<(), Refused> {
    if is_enabled { Ok(()) } else { Err(invalid(cx, |c| &mut c.bad_access)) }
}

/// Where the bytes that the peer names lie.
pub(super) fn check_remote(
    cx: &mut Context<'_>,
    link: &Link,
    purpose: Purpose,
    range: Range,
) -> Result<u64, Refused> {
    let checked = cx.regions.check_remote(link.pd, link.qpn, purpose, range);
    checked.map_err(|refusal: Refusal| {
        cx.count_refusal(refusal);
        Refused::fatal(Syndrome::RemoteAccess)
    })
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
