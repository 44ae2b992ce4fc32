//! The responder half of a reliable connection: the peer's requests are checked, placed and
//! responded to (IBA 9.7.4 to 9.7.5, responder side).
//!
//! [`Executor`] executes the packet whose turn it is. Which one that is by its PSN, what happens to
//! others and how responses are sent depends on the mode that both ends have agreed on: [`GoBackN`]
//! or [`Selective`].
//!
//! Invariants: an atomic is executed once, however often it arrives; a READ duplicated by the
//! network can never end the connection, because its key may have been revoked legitimately. A
//! duplicate that does not match the executed request gets no response at all, so it reveals
//! nothing.

use alloc::boxed::Box;

use super::context::QpContext;
use super::executor::{Executor, Fatal, Reply};
use super::inbound::Message;
use super::recovery::go_back_n::responder::GoBackN;
use super::recovery::selective::responder::Selective;
use super::recovery::{Mode, ReceiveRecovery, with_mode};
use super::recv_queue::RecvQueue;
use super::{RxPacket, Scope};
use crate::direct::MessageHeader;
use crate::seeded::{Bug, Seeded};
use crate::srq::{Receive, SrqTable};
use crate::verbs::RecvWr;
use crate::wire::{Bth, Headers, Psn, Syndrome};

type Recovery = Mode<GoBackN, Selective>;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Responder {
    executor: Executor,
    recovery: Recovery,
    /// The round of the last message that came without packets, if it was refused.
    refused_round: Option<u32>,
}

impl Responder {
    pub(super) fn new(receives: RecvQueue) -> Responder {
        let recovery = Mode::GoBackN(GoBackN::default());
        Responder { executor: Executor::new(receives), recovery, refused_round: None }
    }

    pub(super) fn start(&mut self, qpc: &QpContext) {
        self.executor.start(qpc);
        self.refused_round = None;
        self.recovery = match qpc.is_selective() {
            true => Mode::Selective(Box::new(Selective::new(qpc))),
            false => Mode::GoBackN(GoBackN::default()),
        };
    }

    /// PSN of the peer's next request.
    pub(super) fn expected(&self) -> Psn {
        self.executor.expected
    }

    /// Clears everything, including posted receives: the queue pair goes back to RESET. Shared
    /// receives return to their queue.
    pub(super) fn reset(&mut self, srqs: &mut SrqTable) {
        self.executor.reset(srqs);
        self.recovery = Mode::GoBackN(GoBackN::default());
    }

    // ---- receives ------------------------------------------------------------------------------

    pub(super) fn receives(&self) -> &RecvQueue {
        &self.executor.inbound.receives
    }

    pub(super) fn post(&mut self, wr: RecvWr) {
        self.executor.post(wr);
    }

    /// Removes and returns the oldest receive; for flushing. The one in progress comes first.
    pub(super) fn take_front(&mut self) -> Option<Receive> {
        self.executor.inbound.receives.take_own()
    }

    /// Returns receives that were taken ahead of their turn to the shared queue.
    pub(super) fn give_back(&mut self, srqs: &mut SrqTable) {
        self.executor.inbound.receives.give_back(srqs);
    }

    // ---- requests ------------------------------------------------------------------------------

    /// A request packet. Puts the placement of its payload into `cx.pieces`, its atomic into
    /// `cx.insert`, or the number of responses that must precede it into `cx.owed_packets`.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(packet.headers, cx.seeded) {
            let executor = &self.executor;
            *cx.owed_packets =
                with_mode!(&self.recovery, mode => mode.owed_packets(executor, cx.qpc));
            return Ok(());
        }
        self.take_request(cx, packet)
    }

    /// A message without packets. All packets before it are acknowledged. Returns false for one
    /// that is refused, and for all others of its round then.
    pub(super) fn take_message(&mut self, cx: &mut Scope<'_, '_>, header: &MessageHeader) -> bool {
        let is_over = self.refused_round == Some(header.round);
        if is_over && !cx.seeded.is(Bug::DirectRoundIgnored) {
            return false;
        }
        let is_taken = self.executor.inbound.take_message(cx, header).is_some();
        self.refused_round = (!is_taken).then_some(header.round);
        is_taken
    }

    /// A request packet that [`handle_request`](Responder::handle_request) held. If its turn still
    /// has not come, it is dropped, and requested again after the READs: a NAK follows the
    /// responses to the requests before it.
    pub(super) fn handle_held(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(packet.headers, cx.seeded) {
            cx.count(|c| &mut c.deferred_requests);
            self.executor.refuse_expected(Syndrome::SequenceError);
            with_mode!(&mut self.recovery, mode => mode.note_nak());
            return Ok(());
        }
        self.take_request(cx, packet)
    }

    fn take_request(&mut self, cx: &mut Scope<'_, '_>, packet: RxPacket<'_>) -> Result<(), Fatal> {
        let executor = &mut self.executor;
        with_mode!(&mut self.recovery, mode => {
            mode.handle_request(executor, cx, packet)
        })
    }

    /// Whether a request whose turn it is must wait for responses of READs before it: it could
    /// change what they return, or signal to a program that they are done.
    fn is_behind_read(&self, headers: &Headers, seeded: Seeded) -> bool {
        let Bth { opcode, psn, .. } = *headers.bth();
        psn == self.executor.expected
            && with_mode!(&self.recovery, mode => mode.owes_read(&self.executor))
            && !opcode.is_read_request()
            && !seeded.is(Bug::ReadOvertaken)
    }

    /// The original value of the word of the atomic with this PSN.
    pub(super) fn complete_atomic(&mut self, psn: Psn, original: u64) {
        self.executor.resources.complete_atomic(psn, original);
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn has_reply(&self) -> bool {
        self.executor.reply.is_some()
    }

    /// Acknowledges once more: something else than the PSN is new. Not while READs or atomics wait
    /// for their responses: those acknowledge, and an acknowledgement ahead of them would say that
    /// they are lost.
    pub(super) fn acknowledge_again(&mut self) {
        if !self.has_response() {
            self.executor.acknowledge();
        }
    }

    /// Whether the pending acknowledgement, if there is one, tells the peer nothing that it has to
    /// act on.
    pub(super) fn ack_may_wait(&self) -> bool {
        let is_nak = matches!(self.executor.reply, Some(Reply::Nak { .. }));
        !is_nak && with_mode!(&self.recovery, mode => !mode.misses_packets())
    }

    /// Whether READs or atomics have responses to send.
    pub(super) fn has_response(&self) -> bool {
        with_mode!(&self.recovery, mode => mode.has_response(&self.executor))
    }

    /// Puts the pending acknowledgement into `cx.packet`, unless responses to READs and atomics
    /// must precede it.
    pub(super) fn poll_reply(&mut self, cx: &mut Scope<'_, '_>) {
        let executor = &mut self.executor;
        with_mode!(&mut self.recovery, mode => mode.poll_reply(executor, cx));
    }

    /// Puts the next response to a READ or an atomic into `cx.packet`. Fails if the region of a
    /// READ was deregistered after the request was accepted.
    pub(super) fn poll_response(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), Fatal> {
        let executor = &mut self.executor;
        with_mode!(&mut self.recovery, mode => mode.poll_response(executor, cx))
    }

    /// Stops for good. The NAK of a fatal request, and what must precede it, is still sent.
    pub(super) fn stop(&mut self, keep_answers: bool) {
        self.executor.inbound.message = Message::None;
        if !keep_answers {
            self.executor.reply = None;
            self.executor.resources.clear_jobs();
            with_mode!(&mut self.recovery, mode => mode.clear_answers());
        }
    }
}
