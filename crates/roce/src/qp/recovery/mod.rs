//! Loss recovery of reliable connections, in two modes.
//!
//! | mode | peers | what is retransmitted |
//! |---|---|---|
//! | [`go_back_n`] | all | everything from the lost packet on, as the specification says |
//! | [`selective`] | our own, if both ends have agreed | what was lost |
//!
//! Each mode has a requester and a responder half, which hold the state that only exists in that mode.
//! What the modes share is outside: [`Requests`] sends requests in order and completes them, and
//! [`Executor`] executes the request packet whose turn it is.

pub(super) mod go_back_n;
pub(super) mod selective;

use alloc::boxed::Box;

use super::context::{PacketHeaders, QpContext};
use super::executor::{Executor, Fatal};
use super::request::Request;
use super::requests::{Fault, Requests};
use super::{RxPacket, Scope, TimeoutReason};
use crate::time::{Duration, Time};

/// A half of a connection in its mode.
#[derive(Debug)]
pub(super) enum Mode<G, S> {
    GoBackN(G),
    Selective(Box<S>),
}

/// Evaluates an expression with the half, whichever mode it is in.
macro_rules! with_mode {
    ($recovery:expr, $mode:ident => $body:expr) => {
        match $recovery {
            Mode::GoBackN($mode) => $body,
            Mode::Selective($mode) => $body,
        }
    };
}

pub(super) use with_mode;

/// What the sending of requests leaves to the mode.
pub(super) trait SendRecovery {
    /// Request packets not sent before that may leave before an answer has to come.
    fn room(&self, requests: &Requests, qpc: &QpContext) -> u32;

    /// Whether the responses still to come leave room for those of another READ or atomic.
    fn may_await(&self) -> bool;

    /// Responses of READs and atomics before `request`, which is at the cursor, that have not come.
    fn missing_responses(&self, requests: &Requests, request: &Request) -> u64;

    /// Whether the next packet must not be placed before its turn.
    fn is_ordered(&self, requests: &Requests) -> bool;

    /// Whether the packet at the cursor has to request an acknowledgement, beside what its message
    /// and credits call for.
    fn wants_ack(&self, requests: &Requests, qpc: &QpContext) -> bool;

    /// The packet at the cursor is being sent. The cursor is still at it.
    fn sent(&mut self, requests: &Requests, cx: &Scope<'_, '_>, header: &PacketHeaders);

    /// Whether there may be something for [`poll_retransmission`](SendRecovery::poll_retransmission).
    fn has_retransmission(&self) -> bool;

    /// Leaves in `cx.packet` the next packet to be retransmitted, unless the cursor does that.
    fn poll_retransmission(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault>;

    /// An acknowledgement, or a response to a READ or an atomic.
    fn handle_response(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fault>;

    /// The wait that an RNR NAK demanded is over.
    fn resume(&mut self, now: Time);

    /// When the local ACK timeout expires, if something is unanswered.
    fn ack_deadline(&self) -> Option<Time>;

    /// The local ACK timeout of `timeout` starts anew.
    fn restart_ack_timer(&mut self, now: Time, timeout: Duration);

    /// The local ACK timeout was changed: it holds from the next packet on.
    fn set_ack_timeout(&mut self, requests: &mut Requests, timeout: Option<Duration>);

    /// When [`handle_timeout`](SendRecovery::handle_timeout) has something to do, and what.
    fn deadline(&self, requests: &Requests) -> Option<(Time, TimeoutReason)>;

    /// Carries out what is due.
    fn handle_timeout(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault>;

    /// Whether everything that was begun is done.
    fn is_drained(&self, requests: &Requests) -> bool;
}

/// What the receiving of requests leaves to the mode.
pub(super) trait ReceiveRecovery {
    /// A request packet. Leaves in `cx.pieces` where its payload goes, and in `cx.insert` the atomic
    /// that it asks for.
    fn handle_request(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal>;

    /// The expected packet was requested by a NAK; asking again would make the peer send it twice.
    fn note_nak(&mut self);

    /// Whether a READ is not answered to the end.
    fn owes_read(&self, executor: &Executor) -> bool;

    /// Answers to READs and atomics that are still to be sent.
    fn owed_packets(&self, executor: &Executor, qpc: &QpContext) -> u32;

    /// Whether there are such answers.
    fn has_answer(&self, executor: &Executor) -> bool;

    /// Leaves in `cx.packet` the pending acknowledgement, unless answers have to go before it.
    fn poll_reply(&mut self, executor: &mut Executor, cx: &mut Scope<'_, '_>);

    /// Leaves in `cx.packet` the next answer to a READ or an atomic.
    fn poll_answer(&mut self, executor: &mut Executor, cx: &mut Scope<'_, '_>)
    -> Result<(), Fatal>;

    /// Drops the answers that the mode keeps.
    fn clear_answers(&mut self);
}
