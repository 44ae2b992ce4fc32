//! Congestion control of one queue pair: when its next packet may be sent, and its notifications to the
//! peer.
//!
//! Connects a [`Controller`] to the queue pair: packets marked by the network become notifications to
//! the peer, the controller gets the peer's notifications and the progress of sent packets, and its
//! rate paces requests and READ responses. Acknowledgements and notifications are never delayed.

use core::num::NonZeroU32;

use super::context::QpContext;
use super::requests::Progress;
use super::{Context, TimeoutReason};
use crate::congestion::pacer::{NotificationPoint, Pacer};
use crate::congestion::{AnyController, Controller, Event, WindowReport};
use crate::planted::{Bug, Planted};
use crate::time::{Duration, Time};
use crate::verbs::{Ecn, Path};
use crate::wire::{ICRC_BYTES, Operation};

/// The traffic class customary for notifications, ahead of data.
const CNP_DSCP: u8 = 48;

/// IP and UDP headers, in bytes: the rate includes them.
const IPV4_UDP_BYTES: u64 = 28;
const IPV6_UDP_BYTES: u64 = 48;

/// Headers of a full packet, roughly: IPv4, UDP, BTH and ICRC.
const PACKET_OVERHEAD: u32 = 44;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    controller: AnyController,
    /// The program's rate limit, in bits per second.
    limit_bps: Option<u64>,
    pacer: Pacer,
    /// The next packet must not be sent before this time.
    held: Option<Time>,
    point: NotificationPoint,
    cnp_interval: Duration,
    cnp_due: bool,
}

impl Congestion {
    /// Starts with the given attributes.
    pub(super) fn start(qpc: &QpContext) -> Congestion {
        Congestion {
            controller: qpc
                .peer
                .congestion
                .controller(qpc.mtu + PACKET_OVERHEAD, qpc.peer.window_packets),
            limit_bps: (qpc.rate_limit_bps > 0).then_some(qpc.rate_limit_bps),
            cnp_interval: qpc.peer.congestion.cnp_interval(),
            ..Congestion::default()
        }
    }

    /// The program changed its limit. Packets no longer wait for their time at the old rate.
    pub(super) fn set_limit(&mut self, bps: u64) {
        self.limit_bps = (bps > 0).then_some(bps);
        (self.pacer, self.held) = (Pacer::default(), None);
    }

    /// The sending rate; `None` if not limited.
    pub(super) fn rate_bps(&self) -> Option<u64> {
        match (self.controller.limits().rate_bps, self.limit_bps) {
            (Some(controlled), Some(limit)) => Some(controlled.min(limit)),
            (controlled, limit) => controlled.or(limit),
        }
    }

    /// Request packets that may be in flight; `None` for the queue pair's own window.
    pub(super) fn window_packets(&self) -> Option<u32> {
        self.controller.limits().window_packets.map(NonZeroU32::get)
    }

    /// The state of the window that follows the delay, if it is that.
    pub(super) fn window_report(&self) -> Option<WindowReport> {
        self.controller.window_report()
    }

    // ---- notifications -------------------------------------------------------------------------

    /// A packet from the peer was marked.
    pub(super) fn marked(&mut self, now: Time, planted: Planted) {
        let is_due = self.point.marked(now, self.cnp_interval);
        self.cnp_due |= is_due || planted.is(Bug::NotificationStorm);
    }

    /// The peer reports that packets of ours were marked.
    pub(super) fn notified(&mut self, now: Time) {
        self.controller.handle(now, Event::Notified);
    }

    /// Reports the progress of request packets. Returns how many times the control began to compete
    /// because of it.
    pub(super) fn note_progress(&mut self, now: Time, progress: Progress) -> u64 {
        let before = self.controller.competitions();
        let Progress { acknowledged: packets, in_flight, rtt, lost, has_timed_out } = progress;
        if packets > 0 {
            self.controller.handle(now, Event::Acknowledged { packets, in_flight, rtt });
        }
        if lost > 0 {
            self.controller.handle(now, Event::Lost { packets: lost });
        }
        if has_timed_out {
            self.controller.handle(now, Event::TimedOut);
        }
        self.controller.competitions() - before
    }

    pub(super) fn has_notification(&self) -> bool {
        self.cnp_due
    }

    /// Puts the notification that is due into `cx.packet`, if one is.
    pub(super) fn poll_notification(&mut self, cx: &mut Context<'_>, qpc: &QpContext) {
        if core::mem::take(&mut self.cnp_due) {
            self.point.notified(cx.now);
            cx.count(|c| &mut c.cnps_sent);
            let path = Path { dscp: CNP_DSCP, ecn: Ecn::NotEct, ..qpc.peer.path };
            *cx.packet = Some((path, qpc.notification()));
        }
    }

    // ---- pacing --------------------------------------------------------------------------------

    /// Whether a packet may be sent now.
    pub(super) fn may_send(&mut self, cx: &mut Context<'_>) -> bool {
        let next = self.pacer.next_send();
        if self.rate_bps().is_none() || next <= cx.now {
            self.held = None;
            return true;
        }
        if self.held != Some(next) {
            cx.count(|c| &mut c.paced_packets);
        }
        self.pacer.waits();
        self.held = Some(next);
        false
    }

    /// Whether packets are held back by pacing.
    pub(super) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// The packet in `cx.packet` is sent, with this many bytes of payload.
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
        self.controller.handle(cx.now, Event::Sent { bytes });
    }

    // ---- time ----------------------------------------------------------------------------------

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        let change = self.controller.poll_timeout();
        [self.held, change].into_iter().flatten().min().map(|at| (at, TimeoutReason::Pacing))
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.controller.handle(now, Event::Timer);
        self.held = self.held.filter(|&at| at > now);
    }
}
