//! Executes the peer's requests on a reliable connection, in PSN order: each packet is checked in
//! its turn, then placed or executed (IBA 9.7.4 to 9.7.5, responder side; the checks are in the
//! order of table 49).
//!
//! Both modes of loss recovery share this. The mode decides which packet's turn it is, what to do
//! with the others, and what an executed request ([`Executed`]) means for message numbers and
//! responses.
//!
//! Responses are sent in PSN order, because the requester takes each as an acknowledgement of
//! everything before it. So there is a queue of READs and atomics to respond to
//! ([`resources`](super::resources)), and *one* pending acknowledgement or NAK, always the latest:
//! the last acknowledgement covers all earlier ones.
//!
//! Invariants: nothing is placed before all checks of its packet have passed; keys are checked
//! again for every packet (C3).

use super::context::{PacketHeaders, QpContext};
use super::delivery::{AtomicJob, Insert};
use super::inbound::{
    Inbound, Message, Violation, bad_length, bad_opcode, check_enabled, check_remote, invalid,
    range_of,
};
use super::recv_queue::RecvQueue;
use super::resources::{PeerRequest, Resources};
use super::{RxPacket, Scope};
use crate::io::AtomicOp;
use crate::memory::region::{AccessKind, Range};
use crate::seeded::Bug;
use crate::srq::SrqTable;
use crate::verbs::{MAX_MESSAGE_BYTES, RecvWr, WcStatus};
use crate::wire::{Aeth, AtomicAckEth, AtomicEth, Bth, Ext, Headers, Opcode, Psn, Reth, Syndrome};

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
    /// The connection fails.
    Fatal(Fatal),
}

/// An error that ends the connection, and the completion status of the receive in progress if it is
/// not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fatal {
    pub(super) recv_status: WcStatus,
    pub(super) nak: Syndrome,
}

impl From<Violation> for Refused {
    fn from(violation: Violation) -> Refused {
        let (nak, recv_status) = match violation {
            Violation::NoReceive => return Refused::NotReady,
            Violation::Invalid => (Syndrome::InvalidRequest, WcStatus::WrFlushError),
            Violation::TooLong => (Syndrome::InvalidRequest, WcStatus::LocalLengthError),
            Violation::BadReceive => (Syndrome::RemoteOperation, WcStatus::LocalProtectionError),
            Violation::Protection => (Syndrome::RemoteAccess, WcStatus::WrFlushError),
            // A protection error of the peer's; its receive completes as one of an invalid request.
            Violation::BadInvalidate => (Syndrome::RemoteAccess, WcStatus::RemoteInvalidRequest),
        };
        Refused::Fatal(Fatal { recv_status, nak })
    }
}

/// What the mode knows about a packet whose turn it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Bytes of its WRITE written by packets before it; `None` if the packet contradicts them.
    pub(super) written: Option<u32>,
    /// READs whose responses the mode keeps.
    pub(super) kept_reads: usize,
}

/// What was executed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Executed {
    /// A packet of a message.
    Message { ends: bool, takes_receive: bool },
    /// A READ to respond to.
    Read(Reth),
    /// An atomic, whose response is queued once its message is numbered.
    Atomic,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Executor {
    pub(super) inbound: Inbound,
    pub(super) expected: Psn,
    /// Messages completed, 24 bits.
    pub(super) msn: Psn,
    pub(super) reply: Option<Reply>,
    pub(super) resources: Resources,
    /// The last credits sent to the peer were zero.
    starved: bool,
}

impl Executor {
    pub(super) fn new(receives: RecvQueue) -> Executor {
        Executor {
            inbound: Inbound::new(receives),
            expected: Psn::default(),
            msn: Psn::default(),
            reply: None,
            resources: Resources::default(),
            starved: false,
        }
    }

    pub(super) fn start(&mut self, qpc: &QpContext) {
        self.expected = qpc.peer.remote_psn;
        self.resources.reset(job_limit(qpc));
    }

    /// Clears everything, including posted receives. Shared receives return to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.inbound.reset(srqs);
        self.expected = Psn::default();
        self.msn = Psn::default();
        self.reply = None;
        self.resources.reset(0);
        self.starved = false;
    }

    pub(super) fn post(&mut self, wr: RecvWr) {
        self.inbound.receives.post(wr);
        if self.starved {
            // The peer sends single packets until it learns that there are receives again.
            self.acknowledge();
        }
    }

    /// Acknowledges everything executed so far, unless a NAK is pending.
    pub(super) fn acknowledge(&mut self) {
        self.reply.get_or_insert(Reply::Ack { psn: self.expected.minus(1) });
    }

    /// Acknowledges everything before the expected packet, and refuses that.
    pub(super) fn refuse_expected(&mut self, syndrome: Syndrome) {
        self.reply = Some(Reply::Nak { psn: self.expected, syndrome });
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Checks and executes the packet whose turn it is. Puts the placement of its payload into
    /// `cx.pieces`, and its atomic into `cx.insert`. Packets after one that is not executed are
    /// dropped silently until it is retransmitted.
    pub(super) fn execute(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        match packet.headers.ext() {
            Ext::Reth(reth) if packet.headers.bth().opcode.is_read_request() => {
                self.execute_read(cx, reth, packet.payload_len, turn)
            }
            Ext::AtomicEth(atomic) => {
                let opcode = packet.headers.bth().opcode;
                self.execute_atomic(cx, opcode, atomic, packet.payload_len, turn)
            }
            _ => {
                let Bth { psn, opcode, ack_req, .. } = *packet.headers.bth();
                let takes_receive = self.inbound.execute(cx, packet, turn.written)?;
                self.expected = psn.next();
                // A pending NAK for this packet is out of date; one acknowledgement is enough.
                if ack_req || self.reply.is_some() {
                    self.reply = Some(Reply::Ack { psn });
                }
                Ok(Executed::Message { ends: opcode.ends_message(), takes_receive })
            }
        }
    }

    /// Responds to a packet that was not executed.
    pub(super) fn refuse(&mut self, qpc: &QpContext, refused: Refused) -> Result<(), Fatal> {
        match refused {
            Refused::NotReady => {
                self.refuse_expected(Syndrome::RnrNak { timer: qpc.peer.min_rnr_timer & 31 });
                Ok(())
            }
            Refused::Fatal(fatal) => {
                self.refuse_expected(fatal.nak);
                Err(fatal)
            }
        }
    }

    // ---- READ and atomics ----------------------------------------------------------------------

    fn execute_read(
        &mut self,
        cx: &mut Scope<'_, '_>,
        reth: &Reth,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, |access| access.remote_read)?;
        if payload_len != 0 || u64::from(reth.len) > MAX_MESSAGE_BYTES {
            return Err(bad_length(cx).into());
        }
        check_remote(cx, AccessKind::RemoteRead, range_of(reth))?;
        self.make_room(cx, turn)?;
        let psns = cx.qpc.psns(reth.len, true);
        let request = PeerRequest::Read(range_of(reth));
        self.resources.keep(self.expected, psns, request, job_limit(cx.qpc));
        self.expected = self.expected.plus(psns);
        Ok(Executed::Read(*reth))
    }

    fn execute_atomic(
        &mut self,
        cx: &mut Scope<'_, '_>,
        opcode: Opcode,
        atomic: &AtomicEth,
        payload_len: usize,
        turn: Turn,
    ) -> Result<Executed, Refused> {
        self.check_between_messages(cx)?;
        check_enabled(cx, |access| access.remote_atomic)?;
        if payload_len != 0 {
            return Err(bad_length(cx).into());
        }
        let addr = check_remote(cx, AccessKind::RemoteAtomic, word_of(atomic))?;
        // The rule applies to the address that the peer sent (IBA 9.4.5); the processor's atomics
        // also need the backing address aligned.
        if !(atomic.addr | addr).is_multiple_of(8) {
            return Err(invalid(cx, |c| &mut c.misaligned_atomics).into());
        }
        self.make_room(cx, turn)?;
        let (psn, op) = (self.expected, operation(opcode, atomic));
        self.resources.keep(psn, 1, PeerRequest::Atomic(word_of(atomic), op), job_limit(cx.qpc));
        self.expected = psn.next();
        cx.count(|c| &mut c.atomics);
        *cx.insert = Insert::Atomic(AtomicJob { addr, op, qpn: cx.qpc.qpn, psn });
        Ok(Executed::Atomic)
    }

    fn check_between_messages(&self, cx: &mut Scope<'_, '_>) -> Result<(), Violation> {
        if self.inbound.message == Message::None { Ok(()) } else { Err(bad_opcode(cx)) }
    }

    fn make_room(&mut self, cx: &mut Scope<'_, '_>, turn: Turn) -> Result<(), Violation> {
        if self.resources.make_room(turn.kept_reads, job_limit(cx.qpc)) {
            return Ok(());
        }
        Err(invalid(cx, |c| &mut c.too_many_reads))
    }

    /// Whether the bytes of an executed READ may still be read; `is_known` tells whether `part` is
    /// part of it. If not, there is no response: a network duplicate may name a key that was
    /// legitimately revoked, and forged READs reveal nothing.
    pub(super) fn may_read_again(
        &self,
        cx: &mut Scope<'_, '_>,
        part: Range,
        is_known: bool,
    ) -> bool {
        let is_unchecked = cx.seeded.is(Bug::DuplicateReadUnchecked);
        if !is_known && !is_unchecked {
            cx.count(|c| &mut c.unmatched_duplicates);
            return false;
        }
        let limit = job_limit(cx.qpc);
        let is_allowed = (is_unchecked
            || check_enabled(cx, |access| access.remote_read && limit > 0).is_ok())
            && check_remote(cx, AccessKind::RemoteRead, part).is_ok();
        if is_allowed {
            cx.count(|c| &mut c.duplicate_reads);
        }
        is_allowed
    }

    /// Whether `part` begins `offset` bytes into the executed READ that contains `psn`; `offset`
    /// gets the number of PSNs between the READ's first one and `psn`.
    pub(super) fn is_part_of_read(
        &self,
        psn: Psn,
        part: Range,
        offset: impl FnOnce(u32) -> u64,
    ) -> bool {
        match self.resources.kept(psn) {
            Some((first, PeerRequest::Read(whole))) => {
                part.is_part_of(whole, offset(psn.minus(first.get()).get()))
            }
            _ => false,
        }
    }

    /// A duplicate atomic: its result is requested again.
    pub(super) fn resend_atomic_response(
        &mut self,
        cx: &mut Scope<'_, '_>,
        headers: &Headers,
        atomic: &AtomicEth,
    ) {
        let Bth { psn, opcode, .. } = *headers.bth();
        let request = PeerRequest::Atomic(word_of(atomic), operation(opcode, atomic));
        match self.resources.kept(psn) {
            None => return cx.count(|c| &mut c.stale_atomics),
            Some((_, kept)) if kept != request => {
                return cx.count(|c| &mut c.unmatched_duplicates);
            }
            Some(_) => {}
        }
        cx.count(|c| &mut c.duplicate_atomics);
        if let Some(job) = self.resources.performed(psn, self.msn.get()) {
            self.resources.retransmit(job, job_limit(cx.qpc));
        }
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn emit_atomic_response(
        &mut self,
        cx: &mut Scope<'_, '_>,
        psn: Psn,
        msn: u32,
        original: u64,
    ) {
        self.resources.pop_front();
        let aeth = Aeth { syndrome: self.positive(), msn };
        let ext = Ext::AethAtomicAck(aeth, AtomicAckEth { original });
        cx.emit(PacketHeaders::new(Opcode::RcAtomicAcknowledge, psn, ext), 0);
    }

    /// The region of a READ was deregistered after its request was accepted.
    pub(super) fn fail_read(&mut self, psn: Psn) -> Fatal {
        self.resources.clear_jobs();
        let nak = Syndrome::RemoteAccess;
        self.reply = Some(Reply::Nak { psn, syndrome: nak });
        Fatal { recv_status: WcStatus::WrFlushError, nak }
    }

    /// A positive syndrome with the current credits.
    pub(super) fn positive(&mut self) -> Syndrome {
        let credits = self.inbound.receives.credits();
        self.starved = credits == 0;
        Syndrome::Ack { credits }
    }

    /// The AETH of a reply about to be sent.
    pub(super) fn reply_aeth(&mut self, cx: &mut Scope<'_, '_>, reply: Reply) -> Aeth {
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

/// Most outstanding READs and atomics of the peer.
pub(super) fn job_limit(qpc: &QpContext) -> usize {
    usize::from(qpc.peer.max_dest_rd_atomic)
}

pub(super) fn operation(opcode: Opcode, atomic: &AtomicEth) -> AtomicOp {
    match opcode {
        Opcode::RcFetchAdd => AtomicOp::FetchAdd(atomic.swap_or_add),
        _ => AtomicOp::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add },
    }
}

pub(super) fn word_of(atomic: &AtomicEth) -> Range {
    Range { key: atomic.rkey, addr: atomic.addr, len: 8 }
}
