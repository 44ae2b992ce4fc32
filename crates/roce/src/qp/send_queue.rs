//! The send queue of an unreliable service: requests are sent in order, each is done when its last
//! packet has been sent, and nothing is ever retransmitted.

use alloc::collections::VecDeque;

use super::{Scope, request};
use crate::verbs::{Completion, SendWr, WcStatus};
use crate::wire::Psn;

/// A posted send work request.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) wr: SendWr,
    pub(super) len: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct SendQueue {
    queue: VecDeque<Posted>,
    limit: u32,
    /// PSN of the next packet.
    psn: Psn,
    /// Packets of the front request that were sent.
    sent: u32,
    /// No request is started.
    paused: bool,
}

impl SendQueue {
    pub(super) fn new(limit: u32) -> SendQueue {
        let queue = VecDeque::with_capacity(limit as usize);
        SendQueue { queue, limit, psn: Psn::default(), sent: 0, paused: false }
    }

    pub(super) fn start(&mut self, psn: Psn) {
        self.psn = psn;
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    /// Requests that may still be posted.
    pub(super) fn vacant(&self) -> usize {
        (self.limit as usize).saturating_sub(self.queue.len())
    }

    pub(super) fn post(&mut self, wr: SendWr, len: u32) {
        self.queue.push_back(Posted { wr, len });
    }

    pub(super) fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Work requests posted and not completed.
    pub(super) fn len(&self) -> u32 {
        self.queue.len() as u32
    }

    /// The oldest work request.
    pub(super) fn front(&self) -> Option<&Posted> {
        self.queue.front()
    }

    /// Whether all started requests are done.
    pub(super) fn is_drained(&self) -> bool {
        self.sent == 0
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.next().is_some()
    }

    /// The request of the next packet, and the packet's index.
    pub(super) fn next(&self) -> Option<(&Posted, u32)> {
        let front = self.queue.front().filter(|_| self.sent > 0 || !self.paused)?;
        Some((front, self.sent))
    }

    pub(super) fn psn(&self) -> Psn {
        self.psn
    }

    /// Moves past the packet that was built; the last one of a request completes it.
    pub(super) fn advance(&mut self, cx: &mut Scope<'_, '_>, is_last: bool) {
        self.psn = self.psn.next();
        self.sent += 1;
        if is_last {
            self.finish(cx);
        }
    }

    /// The front request is done.
    pub(super) fn finish(&mut self, cx: &mut Scope<'_, '_>) {
        if let Some(posted) = self.take_front().filter(|posted| posted.wr.signaled) {
            posted.complete(cx, WcStatus::Success);
        }
    }

    /// Removes and returns the oldest request.
    pub(super) fn take_front(&mut self) -> Option<Posted> {
        self.sent = 0;
        self.queue.pop_front()
    }

    /// Clears everything without completions.
    pub(super) fn reset(&mut self) {
        self.queue.clear();
        self.sent = 0;
        self.paused = false;
    }
}

impl Posted {
    /// Executed locally, nothing is sent.
    pub(super) fn is_local(&self) -> bool {
        request::is_local(self.wr.op)
    }

    pub(super) fn complete(&self, cx: &mut Scope<'_, '_>, status: WcStatus) {
        let opcode = request::wc_opcode(self.wr.op);
        let completion = Completion::new(self.wr.wr_id, status, opcode, cx.qpc.qpn);
        let send_cq = cx.qpc.send_cq;
        cx.complete(send_cq, completion, None);
    }
}
