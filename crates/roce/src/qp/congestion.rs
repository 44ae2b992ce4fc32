//! Congestion control of one queue pair: when its next packet may leave, and what it tells its peer.
//!
//! Joins the parts of [`dcqcn`](crate::dcqcn) to the queue pair: packets marked by the network become
//! notifications to the peer, notifications of the peer's change the rate, and the rate decides when
//! requests and READ responses leave. Acknowledgements and notifications never wait.

use super::context::QpContext;
use super::{Context, TimeoutReason};
use crate::dcqcn::{CongestionControl, Dcqcn, NotificationPoint, Pacer};
use crate::planted::{Bug, Planted};
use crate::time::{Duration, Time};
use crate::wire::{ICRC_BYTES, Operation};
use crate::world::{Ecn, Path};

/// Least time between two notifications to a peer, unless the parameters say otherwise.
const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// The traffic class customary for notifications, ahead of data.
const CNP_DSCP: u8 = 48;

/// IP and UDP headers, in bytes: the rate counts packets as IP carries them.
const IPV4_UDP_BYTES: u64 = 28;
const IPV6_UDP_BYTES: u64 = 48;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    /// The rate as notifications leave it.
    sender: Option<Dcqcn>,
    /// The most that the program allows, in bits per second.
    limit_bps: Option<u64>,
    pacer: Pacer,
    /// Something is to be sent that may not leave before then.
    held: Option<Time>,
    point: NotificationPoint,
    cnp_interval: Duration,
    cnp_due: bool,
}

impl Congestion {
    /// Starts as the attributes say.
    pub(super) fn start(qpc: &QpContext) -> Congestion {
        let mut limit = (qpc.rate_limit_bps > 0).then_some(qpc.rate_limit_bps);
        let mut sender = None;
        let mut cnp_interval = CNP_INTERVAL;
        match qpc.peer.congestion {
            CongestionControl::Off => {}
            CongestionControl::Fixed(bps) => limit = Some(limit.map_or(bps, |own| own.min(bps))),
            CongestionControl::Dcqcn(params) => {
                cnp_interval = params.cnp_interval;
                sender = Some(Dcqcn::new(params));
            }
        }
        Congestion { sender, limit_bps: limit, cnp_interval, ..Congestion::default() }
    }

    /// The program has changed its limit.
    pub(super) fn set_limit(&mut self, bps: u64) {
        self.limit_bps = (bps > 0).then_some(bps);
    }

    /// The rate at which packets leave; `None` for as fast as they come.
    pub(super) fn rate_bps(&self) -> Option<u64> {
        let adapted = self.sender.as_ref().map(Dcqcn::rate_bps);
        [adapted, self.limit_bps].into_iter().flatten().min()
    }

    // ---- notifications -------------------------------------------------------------------------

    /// A packet of the peer's met congestion.
    pub(super) fn marked(&mut self, now: Time, planted: Planted) {
        let is_due = self.point.marked(now, self.cnp_interval);
        self.cnp_due |= is_due || planted.is(Bug::NotificationStorm);
    }

    /// The peer says that packets of ours met congestion.
    pub(super) fn notified(&mut self, now: Time) {
        if let Some(sender) = &mut self.sender {
            sender.handle_cnp(now);
        }
    }

    pub(super) fn has_notification(&self) -> bool {
        self.cnp_due
    }

    /// Leaves in `cx.packet` the notification that is due, if one is.
    pub(super) fn poll_notification(&mut self, cx: &mut Context<'_>, qpc: &QpContext) {
        if core::mem::take(&mut self.cnp_due) {
            cx.count(|c| &mut c.cnps_sent);
            let path = Path { dscp: CNP_DSCP, ecn: Ecn::NotEct, ..qpc.peer.path };
            *cx.packet = Some((path, qpc.notification()));
        }
    }

    // ---- pacing --------------------------------------------------------------------------------

    /// Whether a packet may leave now.
    pub(super) fn may_send(&mut self, cx: &mut Context<'_>) -> bool {
        let next = self.pacer.next_send();
        if self.rate_bps().is_none() || next <= cx.now {
            self.held = None;
            return true;
        }
        if self.held != Some(next) {
            cx.count(|c| &mut c.paced_packets);
        }
        self.held = Some(next);
        false
    }

    /// Whether packets wait for their time.
    pub(super) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// The packet in `cx.packet` leaves, with this many bytes of payload.
    pub(super) fn sent(&mut self, cx: &Context<'_>, payload: u64) {
        let Some(rate) = self.rate_bps() else {
            return;
        };
        let Some((path, headers)) = &*cx.packet else {
            return;
        };
        if matches!(headers.bth().opcode.operation(), Operation::Acknowledge | Operation::Cnp) {
            return;
        }
        let below = if path.remote.is_ipv4() { IPV4_UDP_BYTES } else { IPV6_UDP_BYTES };
        let around = (headers.encoded_len() + usize::from(headers.bth().pad) + ICRC_BYTES) as u64;
        let bytes = below + around + payload;
        self.pacer.sent(cx.now, bytes, rate);
        if let Some(sender) = &mut self.sender {
            sender.handle_sent(bytes);
        }
    }

    // ---- time ----------------------------------------------------------------------------------

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        let change = self.sender.as_ref().and_then(Dcqcn::poll_timeout);
        [self.held, change].into_iter().flatten().min().map(|at| (at, TimeoutReason::Pacing))
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        if let Some(sender) = &mut self.sender {
            sender.handle_timeout(now);
        }
        self.held = self.held.filter(|&at| at > now);
    }
}
