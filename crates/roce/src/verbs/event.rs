//! Asynchronous events.

use super::{CqId, Qpn, SrqId};

/// Something that happened to an object rather than to a work request (IBA 11.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// A queue pair failed without a work request to report it, or its completion queue overran.
    QpFatal(Qpn),
    /// An illegal request arrived.
    QpRequestError(Qpn),
    /// A request arrived without the right to access its target.
    QpAccessError(Qpn),
    /// A packet arrived on a queue pair in RTR.
    CommunicationEstablished(Qpn),
    /// A queue pair in SQD has nothing outstanding any more.
    SendQueueDrained(Qpn),
    /// A queue pair with a shared receive queue failed, and takes no more receives from it.
    LastWqeReached(Qpn),
    /// A shared receive queue fell below its limit.
    SrqLimitReached(SrqId),
    /// A completion queue overran.
    CqError(CqId),
}

impl AsyncEvent {
    /// The queue pair of the event, if it has one.
    pub const fn qpn(self) -> Option<Qpn> {
        match self {
            AsyncEvent::QpFatal(qpn)
            | AsyncEvent::QpRequestError(qpn)
            | AsyncEvent::QpAccessError(qpn)
            | AsyncEvent::CommunicationEstablished(qpn)
            | AsyncEvent::SendQueueDrained(qpn)
            | AsyncEvent::LastWqeReached(qpn) => Some(qpn),
            AsyncEvent::SrqLimitReached(_) | AsyncEvent::CqError(_) => None,
        }
    }
}
