//! Reports of a queue pair: its present state, and why it failed.
//!
//! Called where something fails, before the queues are flushed, while the requester still knows
//! which packet it was waiting for. Reads only; it writes nothing but [`Qp::last_error`].

use super::rc::Failure;
use super::uc::Uc;
use super::ud::Ud;
use super::{Context, Fault, Kind, Qp, Rc};
use crate::counters::Counters;
use crate::report::{Cause, Flow, LastError, Peer, QpProgress, QpReport};
use crate::verbs::{QpState, Transport, WcStatus};
use crate::wire::Psn;

/// A work request that failed, and which of its packets was outstanding.
struct Culprit {
    wr_id: u64,
    psn: Psn,
    peer: Option<Peer>,
}

impl Qp {
    pub(crate) fn last_error(&self) -> Option<LastError> {
        self.last_error
    }

    /// Records why the queue pair is about to stop. `psn` is that of the current packet, if any.
    pub(super) fn record_failure(&mut self, cx: &Context<'_>, failure: &Failure, psn: Option<Psn>) {
        match *failure {
            Failure::Send(fault) => {
                let cause = match fault.status {
                    WcStatus::RetryExceeded => Cause::SequenceErrors,
                    WcStatus::RnrRetryExceeded => Cause::ReceiverNotReady,
                    WcStatus::BadResponse => Cause::BadResponse,
                    WcStatus::RemoteInvalidRequest
                    | WcStatus::RemoteAccessError
                    | WcStatus::RemoteOperationError => Cause::PeerRefused(fault.status),
                    status => Cause::Local(status),
                };
                self.blame_send(cx, cause, fault, psn);
            }
            Failure::Request(fatal) => self.record_peer_failure(cx, Cause::Refused(fatal.nak), psn),
        }
    }

    /// There was no response after the last retry.
    pub(super) fn record_retry_exceeded(&mut self, cx: &Context<'_>, fault: Fault) {
        self.blame_send(cx, Cause::NoResponse, fault, None);
    }

    /// A send failed. A NAK names its packet; otherwise it is the oldest unacknowledged one.
    fn blame_send(&mut self, cx: &Context<'_>, cause: Cause, fault: Fault, psn: Option<Psn>) {
        let culprit = self.culprit(fault.index);
        let named = psn.filter(|_| cause != Cause::SequenceErrors);
        let peer = &self.qpc.peer;
        let retries = match cause {
            Cause::ReceiverNotReady => peer.rnr_retry,
            Cause::NoResponse | Cause::SequenceErrors => peer.retry_count,
            _ => 0,
        };
        let error = LastError {
            psn: named.or(culprit.as_ref().map(|culprit| culprit.psn)),
            wr_id: culprit.as_ref().map(|culprit| culprit.wr_id),
            retries,
            ..self.error(cx, cause)
        };
        let to = culprit.and_then(|culprit| culprit.peer);
        self.last_error = Some(LastError { peer: to.or(error.peer), ..error });
    }

    /// A failure of the peer's, or without a work request, stops the queue pair.
    pub(super) fn record_peer_failure(&mut self, cx: &Context<'_>, cause: Cause, psn: Option<Psn>) {
        if self.state != QpState::Error {
            self.last_error = Some(LastError { psn, ..self.error(cx, cause) });
        }
    }

    fn error(&self, cx: &Context<'_>, cause: Cause) -> LastError {
        let (ip, qpn) = (self.qpc.peer.path.remote.ip(), self.qpc.peer.dest_qp);
        let is_connected = self.qpc.transport != Transport::Ud && !ip.is_unspecified();
        LastError {
            qpn: self.qpc.qpn,
            cause,
            peer: is_connected.then_some(Peer { ip, qpn }),
            psn: None,
            acknowledged: self.acknowledged(),
            wr_id: None,
            retries: 0,
            at: cx.now,
        }
    }

    fn acknowledged(&self) -> Option<Psn> {
        match &self.kind {
            Kind::Rc(rc) => {
                let una = rc.requester.unacknowledged_psn();
                (una != self.first_psn).then(|| una.minus(1))
            }
            Kind::Uc(_) | Kind::Ud(_) => None,
        }
    }

    /// The work request at `index` of the send queue.
    fn culprit(&self, index: usize) -> Option<Culprit> {
        match &self.kind {
            Kind::Rc(rc) => {
                let (wr_id, psn) = rc.requester.posted_at(index)?;
                Some(Culprit { wr_id, psn, peer: None })
            }
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => {
                let front = sends.front().filter(|_| index == 0)?;
                let peer =
                    front.wr.to.map(|to| Peer { ip: to.ah.path.remote.ip(), qpn: to.dest_qp });
                Some(Culprit { wr_id: front.wr.wr_id, psn: sends.psn(), peer })
            }
        }
    }

    /// The full report of a queue pair, for troubleshooting.
    pub(crate) fn report(&self, counters: &Counters) -> QpReport {
        let sends = match &self.kind {
            Kind::Rc(rc) => rc.requester.len(),
            Kind::Uc(Uc { sends, .. }) | Kind::Ud(Ud { sends, .. }) => sends.len(),
        };
        let flow = match &self.kind {
            Kind::Rc(rc) if self.is_started() => Some(self.flow(rc)),
            _ => None,
        };
        QpReport {
            qpn: self.qpc.qpn,
            transport: self.qpc.transport,
            attr: self.query(),
            sends,
            receives: self.receives().len(),
            flow,
            rtt: self.rtt().copied(),
            rate_bps: self.rate_bps(),
            window: self.window_report().filter(|_| self.is_started()),
            deadline: self.deadline(),
            last_error: self.last_error,
            counters: *counters,
        }
    }

    /// How far it has come and what it may send, if it is a connected reliable connection.
    pub(crate) fn progress(&self) -> Option<QpProgress> {
        let Kind::Rc(rc) = &self.kind else {
            return None;
        };
        let Flow { unacknowledged, in_flight_packets, window_packets, .. } = self.flow(rc);
        self.is_started().then(|| QpProgress {
            unacknowledged,
            in_flight_packets,
            window_packets,
            rate_bps: self.rate_bps(),
            rtt: rc.requester.rtt().estimator.smoothed(),
        })
    }

    /// Whether its peer is known.
    fn is_started(&self) -> bool {
        !matches!(self.state, QpState::Reset | QpState::Init)
    }

    fn flow(&self, rc: &Rc) -> Flow {
        let expected = rc.responder.expected();
        Flow { expected, ..rc.requester.flow(&self.qpc) }
    }
}
