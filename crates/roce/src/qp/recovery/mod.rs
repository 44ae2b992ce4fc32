//! Loss recovery of reliable connections, in two modes.
//!
//! | mode | peers | what is retransmitted |
//! |---|---|---|
//! | [`go_back_n`] | all | everything from the lost packet on, as the specification says |
//! | [`selective`] | our own, if both ends have agreed | lost packets only |
//!
//! Each mode has a requester and a responder half, with the state that only exists in that mode. What
//! the modes share is outside: [`Requests`] sends requests in order and completes them, and
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

/// Decisions of the mode when sending requests.
pub(super) trait SendRecovery {
    /// New request packets that may be sent before an acknowledgement arrives.
    fn room(&self, requests: &Requests, qpc: &QpContext) -> u32;

    /// Request packets in flight.
    fn in_flight(&self, requests: &Requests) -> u32;

    /// Whether the outstanding responses leave room for those of another READ or atomic.
    fn may_await(&self) -> bool;

    /// Responses of READs and atomics before `request`, which is at the cursor, that have not arrived.
    fn missing_responses(&self, requests: &Requests, request: &Request) -> u64;

    /// Whether the next packet must not be placed out of order.
    fn is_ordered(&self, requests: &Requests) -> bool;

    /// Whether the packet at the cursor has to request an acknowledgement, besides what its message and
    /// credits require.
    fn wants_ack(&self, requests: &Requests, qpc: &QpContext) -> bool;

    /// The packet at the cursor is being sent. The cursor is still at it.
    fn sent(&mut self, requests: &Requests, cx: &Scope<'_, '_>, header: &PacketHeaders);

    /// Whether there may be something for [`poll_retransmission`](SendRecovery::poll_retransmission).
    fn has_retransmission(&self) -> bool;

    /// Puts the next packet to be retransmitted into `cx.packet`, unless the cursor does that.
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

    /// The delay that an RNR NAK requested is over.
    fn resume(&mut self, now: Time);

    /// When the local ACK timeout expires, if anything is unacknowledged.
    fn ack_deadline(&self) -> Option<Time>;

    /// Restarts the local ACK timeout of `timeout`.
    fn restart_ack_timer(&mut self, now: Time, timeout: Duration);

    /// The local ACK timeout was changed: it holds from the next packet on.
    fn set_ack_timeout(&mut self, requests: &mut Requests, timeout: Option<Duration>);

    /// When [`handle_timeout`](SendRecovery::handle_timeout) is due, and why.
    fn deadline(&self, requests: &Requests) -> Option<(Time, TimeoutReason)>;

    /// Handles expired timers.
    fn handle_timeout(
        &mut self,
        requests: &mut Requests,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fault>;

    /// Whether all started requests are done.
    fn is_drained(&self, requests: &Requests) -> bool;
}

/// Decisions of the mode when receiving requests.
pub(super) trait ReceiveRecovery {
    /// A request packet. Puts the placement of its payload into `cx.pieces`, and its atomic into
    /// `cx.insert`.
    fn handle_request(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Fatal>;

    /// A NAK requested the expected packet; another one would make the peer send it twice.
    fn note_nak(&mut self);

    /// Whether packets before some that arrived are missing.
    fn misses_packets(&self) -> bool;

    /// Whether a READ has responses to send.
    fn owes_read(&self, executor: &Executor) -> bool;

    /// Responses to READs and atomics still to be sent.
    fn owed_packets(&self, executor: &Executor, qpc: &QpContext) -> u32;

    /// Whether there are such responses.
    fn has_response(&self, executor: &Executor) -> bool;

    /// Puts the pending acknowledgement into `cx.packet`, unless responses must precede it.
    fn poll_reply(&mut self, executor: &mut Executor, cx: &mut Scope<'_, '_>);

    /// Puts the next response to a READ or an atomic into `cx.packet`.
    fn poll_response(
        &mut self,
        executor: &mut Executor,
        cx: &mut Scope<'_, '_>,
    ) -> Result<(), Fatal>;

    /// Drops the responses that the mode keeps.
    fn clear_answers(&mut self);
}
