//! The reliable connection service: the [`requester`](super::requester) and the
//! [`responder`](super::responder), which are independent of each other, and the order in which
//! their packets are sent.

use super::executor::Fatal;
use super::requester::Requester;
use super::requests::Fault;
use super::responder::Responder;
use super::{RxPacket, Scope};
use crate::verbs::WcStatus;

/// Requests that leave before an acknowledgement: about as many as one segmented send takes at the
/// largest MTU.
const MAX_AHEAD_OF_ACK: u32 = 16;

/// The half that sends next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Requests,
    Responses,
}

/// What ended the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A request of ours.
    Send(Fault),
    /// A request of the peer's.
    Request(Fatal),
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        Failure::Send(fault)
    }
}

impl From<Fatal> for Failure {
    fn from(fatal: Fatal) -> Failure {
        Failure::Request(fatal)
    }
}

impl From<WcStatus> for Failure {
    fn from(status: WcStatus) -> Failure {
        Failure::Send(Fault { index: 0, status })
    }
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Rc {
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    turn: Turn,
    /// Requests sent since an acknowledgement began to wait for them.
    ahead_of_ack: u32,
}

impl Rc {
    pub(super) fn new(requester: Requester, responder: Responder) -> Rc {
        Rc { requester, responder, turn: Turn::Responses, ahead_of_ack: 0 }
    }

    /// Puts the placement of the payload into `cx`.
    pub(super) fn handle_packet(
        &mut self,
        cx: &mut Scope<'_, '_>,
        packet: RxPacket<'_>,
    ) -> Result<(), Failure> {
        if packet.headers.bth().opcode.is_response() {
            self.requester.handle_response(cx, packet)?;
        } else {
            self.responder.handle_request(cx, packet)?;
        }
        Ok(())
    }

    /// Whether there are packets besides acknowledgements.
    pub(super) fn has_data(&self) -> bool {
        self.responder.has_response() || self.requester.has_unsent()
    }

    /// Gives the other half the next burst.
    pub(super) fn end_burst(&mut self) {
        self.turn = self.turn.other();
    }

    /// Puts the next packet into `cx.packet`: an acknowledgement if one is due, else a packet of
    /// the half whose turn it is. After a failure there may still be responses to send.
    ///
    /// A few requests leave before an acknowledgement that is not urgent: a wire can send it as the
    /// shorter last packet of a segmented send.
    pub(super) fn poll(&mut self, cx: &mut Scope<'_, '_>) -> Result<(), Failure> {
        let lets_pass = self.responder.has_reply()
            && self.responder.ack_may_wait()
            && !self.responder.has_response()
            && self.ahead_of_ack < MAX_AHEAD_OF_ACK;
        if lets_pass {
            self.requester.poll(cx)?;
            if cx.packet.is_some() {
                self.ahead_of_ack += 1;
                self.turn = Turn::Requests;
                return Ok(());
            }
        }
        self.ahead_of_ack = 0;
        for turn in [self.turn, self.turn.other()] {
            self.responder.poll_reply(cx);
            if cx.packet.is_none() {
                self.poll_half(turn, cx)?;
            }
            if cx.packet.is_some() {
                self.turn = turn;
                break;
            }
        }
        Ok(())
    }

    fn poll_half(&mut self, turn: Turn, cx: &mut Scope<'_, '_>) -> Result<(), Failure> {
        match turn {
            Turn::Requests => self.requester.poll(cx)?,
            Turn::Responses => self.responder.poll_response(cx)?,
        }
        Ok(())
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
