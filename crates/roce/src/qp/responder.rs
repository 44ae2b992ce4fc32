//! The responder half of a reliable connection: the peer's requests are checked, placed and
//! answered (IBA 9.7.4 to 9.7.5, responder side).
//!
//! [`Executor`] executes the packet whose turn it is. Which one that is by its PSN, what becomes of
//! others and how answers leave depends on the mode that both ends have agreed on: [`GoBackN`] or
//! [`Selective`].
//!
//! Invariants: an atomic is carried out once, however often it arrives; a READ duplicated by the
//! network can never end the connection, because its key may rightly be gone. A duplicate that does
//! not match the request that was executed gets no answer of any kind, so it tells nothing.

use alloc::boxed::Box;

use super::context::QpContext;
use super::executor::{Executor, Fatal};
use super::inbound::Message;
use super::recovery::go_back_n::responder::GoBackN;
use super::recovery::selective::responder::Selective;
use super::recovery::{Mode, ReceiveRecovery, with_mode};
use super::recv_queue::RecvQueue;
use super::{RxPacket, Scope};
use crate::planted::{Bug, Planted};
use crate::srq::{Receive, SrqTable};
use crate::verbs::RecvWr;
use crate::wire::{Bth, Headers, Psn, Syndrome};

type Recovery = Mode<GoBackN, Selective>;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Responder {
    executor: Executor,
    recovery: Recovery,
}

impl Responder {
    pub(super) fn new(receives: RecvQueue) -> Responder {
        let recovery = Mode::GoBackN(GoBackN::default());
        Responder { executor: Executor::new(receives), recovery }
    }

    pub(super) fn start(&mut self, qpc: &QpContext) {
        self.executor.start(qpc);
        self.recovery = match qpc.is_selective() {
            true => Mode::Selective(Box::new(Selective::new(qpc))),
            false => Mode::GoBackN(GoBackN::default()),
        };
    }

    /// PSN of the peer's next request.
    pub(super) fn expected(&self) -> Psn {
        self.executor.expected
    }

    /// Forgets everything, posted receives too: the queue pair goes back to RESET. Shared receives go
    /// back to their queue.
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

    /// The oldest receive, taken out; for flushing. The one in progress comes first.
    pub(super) fn take_front(&mut self) -> Option<Receive> {
        self.executor.inbound.receives.take_own()
    }

    /// Puts receives that were taken ahead of their turn back into the shared queue.
    pub(super) fn give_back(&mut self, srqs: &mut SrqTable) {
        self.executor.inbound.receives.give_back(srqs);
    }

    // ---- requests ------------------------------------------------------------------------------

    /// A request packet. Leaves in `cx.pieces` where its payload goes, in `cx.insert` the atomic that
    /// it asks for, or in `cx.owed_packets` how many answers have to be sent before it.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(packet.headers, cx.planted) {
            let executor = &self.executor;
            *cx.owed_packets =
                with_mode!(&self.recovery, mode => mode.owed_packets(executor, cx.qpc));
            return Ok(());
        }
        self.take_request(cx, packet)
    }

    /// A request packet that [`handle_request`](Responder::handle_request) held. If its turn still has
    /// not come, it is dropped, and requested again once the READs are answered: a NAK leaves after
    /// the answers to what comes before it.
    pub(super) fn handle_held(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal> {
        if self.is_behind_read(packet.headers, cx.planted) {
            cx.count(|c| &mut c.held_requests);
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

    /// Whether a request whose turn it is has to wait because READs before it are unanswered: it could
    /// change what they return, or tell a program that they are done.
    fn is_behind_read(&self, headers: &Headers, planted: Planted) -> bool {
        let Bth { opcode, psn, .. } = *headers.bth();
        psn == self.executor.expected
            && with_mode!(&self.recovery, mode => mode.owes_read(&self.executor))
            && !opcode.is_read_request()
            && !planted.is(Bug::ReadOvertaken)
    }

    /// The former value of the word that the atomic with this PSN was for.
    pub(super) fn complete_atomic(&mut self, psn: Psn, original: u64) {
        self.executor.resources.complete_atomic(psn, original);
    }

    // ---- answers -------------------------------------------------------------------------------

    pub(super) fn has_reply(&self) -> bool {
        self.executor.reply.is_some()
    }

    /// Whether READs or atomics are to be answered.
    pub(super) fn has_answer(&self) -> bool {
        with_mode!(&self.recovery, mode => mode.has_answer(&self.executor))
    }

    /// Leaves in `cx.packet` the pending acknowledgement, unless answers to READs and atomics have to
    /// go before it.
    pub(super) fn poll_reply(&mut self, cx: &mut Scope<'_, '_>) {
        let executor = &mut self.executor;
        with_mode!(&mut self.recovery, mode => mode.poll_reply(executor, cx));
    }

    /// Leaves in `cx.packet` the next answer to a READ or an atomic. Fails when the region of a READ
    /// has gone since the request was accepted.
    pub(super) fn poll_answer(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), Fatal> {
        let executor = &mut self.executor;
        with_mode!(&mut self.recovery, mode => mode.poll_answer(executor, cx))
    }

    /// Stops for good. The answer to a fatal request, and what has to go before it, still leaves.
    pub(super) fn stop(&mut self, keep_answers: bool) {
        self.executor.inbound.message = Message::None;
        if !keep_answers {
            self.executor.reply = None;
            self.executor.resources.clear_jobs();
            with_mode!(&mut self.recovery, mode => mode.clear_answers());
        }
    }
}
