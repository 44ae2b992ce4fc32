//! Reports on queue pairs, for troubleshooting.
//!
//! A completion says *that* a work request failed; the cause is spread over counters, timers and
//! the peer's last response, and lost once the queue pair is flushed. So a queue pair that fails
//! leaves a [`LastError`]: which packet, which peer, what it was waiting for. [`QpReport`] is the
//! current state of a queue pair.
//!
//! Plain values, copied out: they borrow nothing from the endpoint. Nothing here makes decisions,
//! and the packet path does not come here before a failure.

use core::fmt;
use core::net::IpAddr;

use crate::congestion::WindowReport;
use crate::congestion::rtt::RttMeter;
use crate::counters::Counters;
use crate::time::{Duration, Time};
use crate::verbs::{QpAttr, Qpn, Transport, WcStatus};
use crate::wire::{Psn, Syndrome};

/// The reason of a queue pair's deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeoutReason {
    /// Requests are unacknowledged: they are retransmitted.
    AckTimeout,
    /// The peer had no receive posted: sending resumes.
    RnrWait,
    /// Selective repeat: an acknowledgement or a response is overdue.
    LossProbe,
    /// Congestion control: the next packet may be sent.
    Pacing,
}

/// Why a queue pair stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No response after the last retry.
    NoResponse,
    /// The last retry was used up by a peer that responds and still misses packets.
    SequenceErrors,
    /// The peer had no receive posted after the last RNR retry.
    ReceiverNotReady,
    /// The peer's NAK: how the work request completed.
    PeerRefused(WcStatus),
    /// The peer's response does not belong to the request.
    BadResponse,
    /// A work request could not be executed here: its completion status.
    Local(WcStatus),
    /// A request of the peer's was refused here, with this NAK.
    Refused(Syndrome),
    /// The posted receive was not fit for a message of the peer's: its completion status.
    Receive(WcStatus),
    /// A completion queue was full, and a completion was lost.
    CqOverrun,
    /// The program requested the error state.
    Program,
}

impl Cause {
    /// Short name, for machine-readable output.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::NoResponse => "no_response",
            Cause::SequenceErrors => "sequence_errors",
            Cause::ReceiverNotReady => "receiver_not_ready",
            Cause::PeerRefused(_) => "peer_refused",
            Cause::BadResponse => "bad_response",
            Cause::Local(_) => "local",
            Cause::Refused(_) => "refused",
            Cause::Receive(_) => "receive",
            Cause::CqOverrun => "cq_overrun",
            Cause::Program => "program",
        }
    }
}

/// The other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub ip: IpAddr,
    /// Its queue pair.
    pub qpn: Qpn,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} qp {:#x}", self.ip, self.qpn.get())
    }
}

/// The latest failure of a queue pair. Its `Display` is one line for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastError {
    /// The queue pair.
    pub qpn: Qpn,
    /// Why.
    pub cause: Cause,
    /// The other end, where there is one.
    pub peer: Option<Peer>,
    /// The packet in question: ours, or the peer's if that was refused.
    pub psn: Option<Psn>,
    /// The last PSN of ours that the peer acknowledged. Only for reliable connections, after the
    /// first acknowledgement.
    pub acknowledged: Option<Psn>,
    /// The work request that failed, if any.
    pub wr_id: Option<u64>,
    /// How many retries were made, of the kind that ran out.
    pub retries: u8,
    /// When.
    pub at: Time,
}

impl fmt::Display for LastError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Named { psn, peer } = self.named();
        let retries = self.retries;
        match self.cause {
            Cause::NoResponse => {
                write!(f, "retry exceeded: {retries} retries, no response to {psn} from {peer}")?;
                match self.acknowledged {
                    Some(last) => write!(f, "; last acknowledged {:#08x}", last.get())?,
                    None => write!(f, "; nothing was ever acknowledged")?,
                }
            }
            Cause::SequenceErrors => {
                write!(f, "retry exceeded: {retries} retries, {peer} still reports {psn} missing")?;
            }
            Cause::ReceiverNotReady => write!(
                f,
                "RNR retry exceeded: {retries} retries, no receive posted for {psn} at {peer}"
            )?,
            Cause::PeerRefused(status) => {
                write!(f, "{} (NAK): {peer} refused {psn}", in_words(status))?;
            }
            Cause::BadResponse => {
                write!(f, "bad response: {peer} sent an invalid response to {psn}")?;
            }
            Cause::Local(status) => write!(f, "{}: {psn} to {peer}", in_words(status))?,
            Cause::Refused(nak) => write!(f, "refused {psn} of {peer}: {}", nak_in_words(nak))?,
            Cause::Receive(status) => {
                write!(f, "{}: {psn} of {peer} does not fit its receive", in_words(status))?;
            }
            Cause::CqOverrun => write!(f, "completion queue overrun: a completion is lost")?,
            Cause::Program => write!(f, "the program requested the error state")?,
        }
        self.wr_id.map_or(Ok(()), |wr_id| write!(f, " (wr_id {wr_id:#x})"))
    }
}

/// The optional parts of a failure, in words.
struct Named {
    psn: Shown<Psn>,
    peer: Shown<Peer>,
}

enum Shown<T> {
    Known(T),
    Unknown(&'static str),
}

impl fmt::Display for Shown<Psn> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shown::Known(psn) => write!(f, "PSN {:#08x}", psn.get()),
            Shown::Unknown(word) => f.write_str(word),
        }
    }
}

impl fmt::Display for Shown<Peer> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shown::Known(peer) => peer.fmt(f),
            Shown::Unknown(word) => f.write_str(word),
        }
    }
}

impl LastError {
    fn named(&self) -> Named {
        Named {
            psn: self.psn.map_or(Shown::Unknown("a request"), Shown::Known),
            peer: self.peer.map_or(Shown::Unknown("a peer"), Shown::Known),
        }
    }
}

/// A status in the words of the verbs API.
const fn in_words(status: WcStatus) -> &'static str {
    match status {
        WcStatus::Success => "success",
        WcStatus::LocalLengthError => "local length error",
        WcStatus::LocalQpError => "local queue pair operation error",
        WcStatus::LocalProtectionError => "local protection error",
        WcStatus::WrFlushError => "work request flushed",
        WcStatus::WindowBindError => "memory window bind error",
        WcStatus::BadResponse => "bad response",
        WcStatus::RemoteInvalidRequest => "remote invalid request error",
        WcStatus::RemoteAccessError => "remote access error",
        WcStatus::RemoteOperationError => "remote operation error",
        WcStatus::RetryExceeded => "retry exceeded",
        WcStatus::RnrRetryExceeded => "RNR retry exceeded",
        WcStatus::GeneralError => "general error",
    }
}

const fn nak_in_words(nak: Syndrome) -> &'static str {
    match nak {
        Syndrome::InvalidRequest | Syndrome::InvalidRdRequest => "invalid request",
        Syndrome::RemoteAccess => "remote access error (key, bounds or rights)",
        Syndrome::RemoteOperation => "remote operation error",
        Syndrome::SequenceError => "sequence error",
        Syndrome::RnrNak { .. } => "receiver not ready",
        Syndrome::Ack { .. } => "acknowledged",
    }
}

/// How many messages the peer has receives for, as far as known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credits {
    /// No credits received yet.
    Unknown,
    /// The peer does not count.
    Unlimited,
    /// This many more messages have a receive waiting.
    Messages(u32),
}

/// Positions of the requester and the responder of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Oldest PSN of ours that is not acknowledged.
    pub unacknowledged: Psn,
    /// PSN after the last one sent or requested.
    pub next: Psn,
    /// PSN of the peer's next request.
    pub expected: Psn,
    /// Request packets in flight.
    pub in_flight_packets: u32,
    /// Most request packets in flight now: the queue pair's own window, or that of congestion
    /// control if it is smaller.
    pub window_packets: u32,
    /// The peer's receives.
    pub credits: Credits,
    /// Retries left before giving up.
    pub retries_left: u8,
    /// RNR retries left before giving up.
    pub rnr_retries_left: u8,
}

/// How far a reliable connection has come and what it may send, at one moment: a sample of its
/// congestion control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpProgress {
    /// Oldest PSN of ours that is not acknowledged.
    pub unacknowledged: Psn,
    /// Request packets in flight.
    pub in_flight_packets: u32,
    /// Most request packets in flight now: the queue pair's own window, or that of congestion
    /// control if it is smaller.
    pub window_packets: u32,
    /// The rate that congestion control or the program's limit allows now, in bits per second.
    pub rate_bps: Option<u64>,
    /// Smoothed round-trip time.
    pub rtt: Option<Duration>,
}

/// The current state of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpReport {
    /// Its number.
    pub qpn: Qpn,
    /// Its transport service.
    pub transport: Transport,
    /// Its attributes, its state among them.
    pub attr: QpAttr,
    /// Sends posted and not completed.
    pub sends: u32,
    /// Receives posted and not completed; `None` if they come from a shared queue.
    pub receives: Option<u32>,
    /// Positions of a reliable connection.
    pub flow: Option<Flow>,
    /// Round-trip times of a reliable connection.
    pub rtt: Option<RttMeter>,
    /// The rate that congestion control or the program's limit allows now, in bits per second.
    pub rate_bps: Option<u64>,
    /// Congestion control by delay.
    pub window: Option<WindowReport>,
    /// What it is waiting for, and until when.
    pub deadline: Option<(Time, TimeoutReason)>,
    /// Why it last failed. Kept through RESET until it fails again.
    pub last_error: Option<LastError>,
    /// Its counters.
    pub counters: Counters,
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn error(cause: Cause) -> LastError {
        let peer = Peer { ip: IpAddr::from([10, 0, 0, 2]), qpn: Qpn::new(0x1a_0001) };
        LastError {
            qpn: Qpn::new(5),
            cause,
            peer: Some(peer),
            psn: Some(Psn::new(0x12ab)),
            acknowledged: Some(Psn::new(0x12a9)),
            wr_id: None,
            retries: 7,
            at: Time::ZERO,
        }
    }

    #[test]
    fn a_timeout_names_packet_peer_and_what_was_heard_last() {
        let text = error(Cause::NoResponse).to_string();
        let wanted = "retry exceeded: 7 retries, no response to PSN 0x0012ab from 10.0.0.2 qp \
                      0x1a0001; last acknowledged 0x0012a9";
        assert_eq!(text, wanted);
        let silent = LastError { acknowledged: None, ..error(Cause::NoResponse) }.to_string();
        assert!(silent.ends_with("; nothing was ever acknowledged"), "{silent}");
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let unknown = LastError { peer: None, psn: None, ..error(Cause::BadResponse) };
        assert_eq!(
            unknown.to_string(),
            "bad response: a peer sent an invalid response to a request"
        );
    }

    #[test]
    fn the_work_request_comes_last() {
        let cause = Cause::PeerRefused(WcStatus::RemoteAccessError);
        let text = LastError { wr_id: Some(0x2a), ..error(cause) }.to_string();
        let wanted = "remote access error (NAK): 10.0.0.2 qp 0x1a0001 refused PSN 0x0012ab \
                      (wr_id 0x2a)";
        assert_eq!(text, wanted);
    }
}
