//! Loss recovery of reliable connections, in two modes.
//!
//! | mode | peers | what is retransmitted |
//! |---|---|---|
//! | [`go_back_n`] | all | everything from the lost packet on, as the specification says |
//! | [`selective`] | our own, if both ends have agreed | lost packets only |
//!
//! Each mode has a requester and a responder half, with the state that only exists in that mode.
//! What the modes share is outside: [`Requests`](super::requests::Requests) sends requests in order
//! and completes them, as a [`SendRecovery`](super::requests::SendRecovery) decides, and
//! [`Executor`] executes the request packet whose turn it is.

pub(super) mod go_back_n;
pub(super) mod selective;

use alloc::boxed::Box;

use super::context::QpContext;
use super::executor::{Executor, Fatal};
use super::{RxPacket, Scope};

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
