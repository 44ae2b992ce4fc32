//! Queue pairs of the reliable connection service: states, and what its two halves share.
//!
//! A queue pair is a [`requester`] and a [`responder`] that know nothing of each other. What joins
//! them is here: the state (IBA 10.3.1), the order in which their packets leave, and what happens
//! when either fails, which ends both.
//!
//! ```text
//!  Reset -> Init -> Rtr -> Rts -> Error      any state -> Error
//! ```
//!
//! | state | receives | arriving packets | sends |
//! |---|---|---|---|
//! | Reset, Init | queued | dropped | refused |
//! | Rtr | queued | requests served | refused |
//! | Rts | queued | served | carried out |
//! | Error | flushed | dropped | flushed |
//!
//! Nothing in here looks at payload, keeps time or allocates after creation.

mod codes;
pub(crate) mod link;
mod requester;
mod responder;

use crate::counters::Counters;
use crate::cq::CqTable;
use crate::region::{Purpose, Refusal, RegionTable};
use crate::sg::{self, Extent, Placements};
use crate::time::Time;
use crate::verbs::{
    Completion, CqId, MAX_MESSAGE_BYTES, PdId, Qpn, RecvWr, SendWr, Sge, VerbsError, WcOpcode,
    WcStatus,
};
use crate::wire::{DEFAULT_PKEY, Headers, Psn, Service};
use crate::world::Path;
use core::net::SocketAddr;
use link::{Connect, Link};
use requester::{Fault, Request, Requester};
use responder::{Fatal, Responder};

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Created.
    Reset,
    /// Keys, partition and port are set. Entered and left within a connect.
    Init,
    /// Ready to receive: the peer is known.
    Rtr,
    /// Ready to send.
    Rts,
    /// Broken, or told to stop: every work request is flushed.
    Error,
}

impl QpState {
    /// Its name in the specification.
    pub const fn name(self) -> &'static str {
        match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Error => "ERROR",
        }
    }
}

/// What a queue pair's deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeoutReason {
    /// Requests are unanswered: they are sent again.
    AckTimeout,
    /// The peer had no receive posted: sending resumes.
    RnrWait,
}

/// The rest of the endpoint, as a queue pair sees it while it handles one event.
pub(crate) struct Context<'a> {
    pub(crate) now: Time,
    pub(crate) regions: &'a RegionTable,
    pub(crate) cqs: &'a mut CqTable,
    /// The queue pair's counters.
    pub(crate) own: &'a mut Counters,
    /// The endpoint's counters.
    pub(crate) all: &'a mut Counters,
    /// Where the payload of the packet lies that is being placed or built. It is filled in place:
    /// handed up by value, it would cost more than everything else done for a packet.
    pub(crate) pieces: &'a mut Placements,
    /// A completion was lost because its queue was full.
    pub(crate) cq_overflowed: bool,
}

impl Context<'_> {
    pub(crate) fn count(&mut self, which: impl Fn(&mut Counters) -> &mut u64) {
        self.add(1, which);
    }

    pub(crate) fn add(&mut self, amount: u64, which: impl Fn(&mut Counters) -> &mut u64) {
        *which(self.own) += amount;
        *which(self.all) += amount;
    }

    fn count_refusal(&mut self, refusal: Refusal) {
        self.count(|c| match refusal {
            Refusal::Key => &mut c.bad_key,
            Refusal::Pd => &mut c.bad_pd,
            Refusal::Access => &mut c.bad_access,
            Refusal::Bounds => &mut c.bad_bounds,
        });
    }

    /// Finds a stretch of a message in registered memory, or counts why it may not be used.
    fn stretch(
        &mut self,
        link: &Link,
        purpose: Purpose,
        sges: &[Sge],
        extent: Extent,
    ) -> Result<(), Refusal> {
        sg::stretch(self.regions, link.pd, purpose, sges, extent, self.pieces)
            .inspect_err(|&refusal| self.count_refusal(refusal))
    }

    fn complete(&mut self, cq: CqId, completion: Completion) {
        if !self.cqs.push(cq, completion) {
            self.cq_overflowed = true;
            self.count(|c| &mut c.cq_overflows);
        }
    }

    fn complete_send(&mut self, link: &Link, request: &Request, status: WcStatus, byte_len: u32) {
        let opcode = requester::wc_opcode(request.wr.op);
        let (wr_id, qpn) = (request.wr.wr_id, link.qpn);
        self.complete(link.send_cq, Completion { wr_id, status, opcode, byte_len, imm: None, qpn });
    }

    fn complete_recv(
        &mut self,
        link: &Link,
        wr: &RecvWr,
        opcode: WcOpcode,
        byte_len: u32,
        imm: Option<u32>,
    ) {
        let (wr_id, qpn, status) = (wr.wr_id, link.qpn, WcStatus::Success);
        self.complete(link.recv_cq, Completion { wr_id, status, opcode, byte_len, imm, qpn });
    }

    fn fail_recv(&mut self, link: &Link, wr: &RecvWr, status: WcStatus) {
        let (wr_id, qpn) = (wr.wr_id, link.qpn);
        let opcode = WcOpcode::Recv;
        self.complete(
            link.recv_cq,
            Completion { wr_id, status, opcode, byte_len: 0, imm: None, qpn },
        );
    }
}

/// Which half of the queue pair sends next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Requests,
    Responses,
}

/// Which queues and how much room a queue pair gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpConfig {
    /// Protection domain: only its regions are reachable.
    pub pd: PdId,
    /// Where sends complete.
    pub send_cq: CqId,
    /// Where receives complete.
    pub recv_cq: CqId,
    /// Most sends posted and not completed.
    pub max_send_wr: u32,
    /// Most receives posted and not completed.
    pub max_recv_wr: u32,
}

/// One queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    state: QpState,
    link: Link,
    first_psn: Psn,
    requester: Requester,
    responder: Responder,
    turn: Turn,
}

impl Qp {
    /// `unconnected` stands in until [`connect`](Qp::connect).
    pub(crate) fn new(qpn: Qpn, config: &QpConfig, first_psn: Psn, unconnected: Connect) -> Qp {
        let QpConfig { pd, send_cq, recv_cq, max_send_wr, max_recv_wr } = *config;
        let mtu = unconnected.mtu.bytes();
        Qp {
            state: QpState::Reset,
            link: Link { qpn, pd, send_cq, recv_cq, mtu, peer: unconnected },
            first_psn,
            requester: Requester::new(max_send_wr, first_psn),
            responder: Responder::new(max_recv_wr),
            turn: Turn::Responses,
        }
    }

    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    pub(crate) fn cqs(&self) -> [CqId; 2] {
        [self.link.send_cq, self.link.recv_cq]
    }

    /// PSN of the first request.
    pub(crate) fn first_psn(&self) -> Psn {
        self.first_psn
    }

    fn expect_state(&self, allowed: &[QpState]) -> Result<(), VerbsError> {
        let (qpn, state) = (self.link.qpn.get(), self.state);
        let wrong = VerbsError::WrongState { qpn, state: state.name() };
        allowed.contains(&state).then_some(()).ok_or(wrong)
    }

    // ---- states --------------------------------------------------------------------------------

    /// Sets the PSN of the first request, instead of the one drawn at creation.
    pub(crate) fn set_first_psn(&mut self, psn: Psn) -> Result<(), VerbsError> {
        self.expect_state(&[QpState::Reset])?;
        self.first_psn = psn;
        self.requester = Requester::new(self.requester.limit(), psn);
        Ok(())
    }

    /// RESET to RTS.
    pub(crate) fn connect(&mut self, peer: &Connect) -> Result<(), VerbsError> {
        self.enter_init()?;
        self.enter_rtr(peer)?;
        self.enter_rts()
    }

    fn enter_init(&mut self) -> Result<(), VerbsError> {
        self.expect_state(&[QpState::Reset])?;
        self.state = QpState::Init;
        Ok(())
    }

    fn enter_rtr(&mut self, peer: &Connect) -> Result<(), VerbsError> {
        self.expect_state(&[QpState::Init])?;
        self.link.mtu = peer.mtu.bytes();
        self.link.peer = Connect { window_packets: peer.window_packets.max(1), ..*peer };
        self.responder.start(&self.link);
        self.state = QpState::Rtr;
        Ok(())
    }

    fn enter_rts(&mut self) -> Result<(), VerbsError> {
        self.expect_state(&[QpState::Rtr])?;
        self.requester.start(&self.link);
        self.state = QpState::Rts;
        Ok(())
    }

    /// Stops the queue pair and flushes its work requests; nothing more is sent.
    pub(crate) fn fail(&mut self, cx: &mut Context<'_>) {
        self.enter_error(cx, None, WcStatus::WrFlushError, false);
    }

    fn fail_send(&mut self, cx: &mut Context<'_>, fault: Fault) {
        match fault.status {
            WcStatus::RetryExceeded => cx.count(|c| &mut c.retries_exceeded),
            WcStatus::RnrRetryExceeded => cx.count(|c| &mut c.rnr_retries_exceeded),
            _ => {}
        }
        self.enter_error(cx, Some(fault), WcStatus::WrFlushError, false);
    }

    fn refuse_request(&mut self, cx: &mut Context<'_>, fatal: Fatal) {
        self.enter_error(cx, None, fatal.recv_status, true);
    }

    /// Every work request completes: `fault` says how one send does, `recv_status` how the oldest
    /// receive does, all others are flushed.
    fn enter_error(
        &mut self,
        cx: &mut Context<'_>,
        fault: Option<Fault>,
        recv_status: WcStatus,
        keep_answers: bool,
    ) {
        if self.state == QpState::Error {
            return;
        }
        self.state = QpState::Error;
        cx.count(|c| &mut c.qp_errors);
        let mut index = 0;
        while let Some(request) = self.requester.take_front() {
            let own = fault.filter(|fault| fault.index == index).map(|fault| fault.status);
            cx.complete_send(&self.link, &request, own.unwrap_or(WcStatus::WrFlushError), 0);
            index += 1;
        }
        let mut status = recv_status;
        while let Some(receive) = self.responder.take_front() {
            cx.fail_recv(&self.link, &receive.wr, status);
            status = WcStatus::WrFlushError;
        }
        self.requester.stop();
        self.responder.stop(keep_answers);
    }

    // ---- verbs ---------------------------------------------------------------------------------

    pub(crate) fn post_send(&mut self, cx: &mut Context<'_>, wr: SendWr) -> Result<(), VerbsError> {
        self.expect_state(&[QpState::Rts, QpState::Error])?;
        let len = message_len(sg::total_bytes(&wr.sges))?;
        if self.requester.is_full() {
            return Err(self.queue_full("send", self.requester.limit()));
        }
        self.requester.post(&self.link, wr, len);
        if self.state == QpState::Error
            && let Some(request) = self.requester.take_front()
        {
            cx.complete_send(&self.link, &request, WcStatus::WrFlushError, 0);
        }
        Ok(())
    }

    pub(crate) fn post_recv(&mut self, cx: &mut Context<'_>, wr: RecvWr) -> Result<(), VerbsError> {
        if self.state == QpState::Error {
            cx.fail_recv(&self.link, &wr, WcStatus::WrFlushError);
            return Ok(());
        }
        if self.responder.is_full() {
            return Err(self.queue_full("receive", self.responder.limit()));
        }
        self.responder.post(wr);
        Ok(())
    }

    fn queue_full(&self, queue: &'static str, limit: u32) -> VerbsError {
        VerbsError::QueueFull { qpn: self.link.qpn.get(), queue, limit }
    }

    // ---- packets and time ----------------------------------------------------------------------

    /// Leaves in `cx.pieces` where the payload goes.
    pub(crate) fn handle_packet(
        &mut self,
        cx: &mut Context<'_>,
        source: SocketAddr,
        headers: &Headers,
        payload_len: usize,
    ) {
        if !self.accepts(cx, source, headers) {
            return;
        }
        if headers.bth().opcode.is_response() {
            let handled = self.requester.handle_response(cx, &self.link, headers, payload_len);
            if let Err(fault) = handled {
                self.fail_send(cx, fault);
            }
        } else {
            let handled = self.responder.handle_request(cx, &self.link, headers, payload_len);
            if let Err(fatal) = handled {
                self.refuse_request(cx, fatal);
            }
        }
        let placed = sg::placed_bytes(cx.pieces);
        cx.add(placed, |c| &mut c.bytes_received);
    }

    /// The checks that hold for every packet (IBA 9.6), each with its counter.
    fn accepts(&self, cx: &mut Context<'_>, source: SocketAddr, headers: &Headers) -> bool {
        let bth = headers.bth();
        let state_accepts = match self.state {
            QpState::Rts => true,
            QpState::Rtr => bth.opcode.is_request(),
            QpState::Reset | QpState::Init | QpState::Error => false,
        };
        if !state_accepts {
            cx.count(|c| &mut c.wrong_state);
        } else if source.ip() != self.link.peer.path.remote.ip() {
            cx.count(|c| &mut c.wrong_source);
        } else if !same_partition(bth.pkey) {
            cx.count(|c| &mut c.bad_pkey);
        } else if bth.opcode.service() == Service::Cnp {
            cx.count(|c| &mut c.cnps_received);
        } else if bth.opcode.service() != Service::Rc {
            cx.count(|c| &mut c.bad_opcode);
        } else {
            return true;
        }
        false
    }

    pub(crate) fn handle_timeout(&mut self, cx: &mut Context<'_>) {
        if let Err(fault) = self.requester.handle_timeout(cx) {
            self.fail_send(cx, fault);
        }
    }

    pub(crate) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        self.requester.deadline()
    }

    /// Whether [`poll_transmit`](Qp::poll_transmit) is worth calling.
    pub(crate) fn wants_to_send(&self) -> bool {
        self.responder.has_answer() || self.requester.has_unsent()
    }

    /// Gives the other half the next burst.
    pub(crate) fn end_burst(&mut self) {
        self.turn = self.turn.other();
    }

    /// The next packet: an acknowledgement if one is due, else from the half whose turn it is.
    /// Leaves in `cx.pieces` where its payload lies.
    pub(crate) fn poll_transmit(&mut self, cx: &mut Context<'_>) -> Option<(Path, Headers)> {
        let headers = self.next_packet(cx)?;
        cx.count(|c| &mut c.packets_sent);
        let sent = sg::placed_bytes(cx.pieces);
        cx.add(sent, |c| &mut c.bytes_sent);
        Some((self.link.peer.path, headers))
    }

    fn next_packet(&mut self, cx: &mut Context<'_>) -> Option<Headers> {
        for turn in [self.turn, self.turn.other()] {
            let reply = self.responder.poll_reply(cx, &self.link);
            let packet = reply.or_else(|| self.next_of(turn, cx));
            if packet.is_some() {
                self.turn = turn;
                return packet;
            }
        }
        // A READ that failed just now has left a NAK behind.
        self.responder.poll_reply(cx, &self.link)
    }

    fn next_of(&mut self, turn: Turn, cx: &mut Context<'_>) -> Option<Headers> {
        match turn {
            Turn::Requests => match self.requester.poll(cx, &self.link) {
                Ok(packet) => packet,
                Err(fault) => {
                    self.fail_send(cx, fault);
                    None
                }
            },
            Turn::Responses => match self.responder.poll_read(cx, &self.link) {
                Ok(packet) => packet,
                Err(fatal) => {
                    self.refuse_request(cx, fatal);
                    None
                }
            },
        }
    }
}

impl Turn {
    fn other(self) -> Turn {
        match self {
            Turn::Requests => Turn::Responses,
            Turn::Responses => Turn::Requests,
        }
    }
}

/// Full and limited members of the default partition.
fn same_partition(pkey: u16) -> bool {
    pkey | 0x8000 == DEFAULT_PKEY
}

fn message_len(bytes: u64) -> Result<u32, VerbsError> {
    u32::try_from(bytes)
        .ok()
        .filter(|_| bytes <= MAX_MESSAGE_BYTES)
        .ok_or(VerbsError::TooLong(bytes))
}
