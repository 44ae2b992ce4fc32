//! Congestion control of one queue pair: when its next packet may be sent, and its notifications to
//! the peer.
//!
//! Connects a [`Controller`] to the queue pair: packets marked by the network become notifications
//! to the peer, the controller gets the peer's notifications and the progress of sent packets, and
//! its rate paces requests and READ responses. Acknowledgements and notifications are never
//! delayed. What switches have written into the peer's data goes back to it with the next
//! acknowledgement.

use alloc::boxed::Box;
use core::num::NonZeroU32;

use super::context::QpContext;
use super::requests::Progress;
use super::{Context, TimeoutReason};
use crate::congestion::advertised::Level;
use crate::congestion::pacer::{NotificationPoint, Pacer};
use crate::congestion::{
    AdvertisedParams, Controller, Event, Limits, Needs, Watermark, WindowReport,
};
use crate::io::{BURST_PACKETS, Telemetry};
use crate::seeded::{Bug, Seeded};
use crate::time::{Duration, Time, earlier};
use crate::verbs::{Connect, Ecn, Path};
use crate::wire::telemetry::{Form, Report};
use crate::wire::{Headers, ICRC_BYTES, Operation};

/// The traffic class customary for notifications, ahead of data.
const CNP_DSCP: u8 = 48;

/// The traffic class of short messages and of acknowledgements where the receiver advertises
/// windows: expedited forwarding.
const URGENT_DSCP: u8 = 46;

/// IP and UDP headers, in bytes: the rate includes them.
const IPV4_UDP_BYTES: u64 = 28;
const IPV6_UDP_BYTES: u64 = 48;

/// Most notifications that wait to be sent: as many as a burst has packets.
const MAX_CNPS_DUE: u32 = BURST_PACKETS as u32;

/// Headers of a full packet, roughly: IPv4, UDP, BTH and ICRC.
const PACKET_OVERHEAD: u32 = 44;

/// Which data packets carry a telemetry header.
#[derive(Clone, Copy, Debug)]
struct Sampling {
    form: Form,
    /// One of so many.
    one_in: u32,
    /// Packets without one before the next that has one.
    skips: u32,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Congestion {
    /// None if nothing is controlled.
    controller: Option<Box<dyn Controller>>,
    /// What the controller said after the last event: asked for several times per packet.
    limits: Limits,
    timer: Option<Time>,
    /// The program's rate limit, in bits per second.
    limit_bps: Option<u64>,
    pacer: Pacer,
    /// The next packet must not be sent before this time.
    held: Option<Time>,
    point: NotificationPoint,
    cnp_interval: Duration,
    /// Notifications to be sent: one, or one for each marked packet where the control counts them.
    cnps_due: u32,
    counts_marks: bool,
    /// What data collects from switches, if anything.
    telemetry: Option<Sampling>,
    /// What the latest data of the peer has collected, to be returned.
    collected: Option<Box<Report>>,
    /// The parameters, where the receiver advertises windows; and what the peer's latest data said
    /// of its demand.
    advertised: Option<AdvertisedParams>,
    demand: Option<u32>,
    /// READs or atomics, or responses to them, have left: from then on all packets stay in the
    /// class of the path, since others must not overtake these.
    has_responses: bool,
}

impl Congestion {
    /// Starts with the given attributes.
    pub(super) fn start(qpc: &QpContext) -> Congestion {
        let Connect { congestion, window_packets, .. } = &qpc.peer;
        let controller = congestion.controller(qpc.mtu + PACKET_OVERHEAD, *window_packets);
        let Needs { cnp_interval, counts_marks, telemetry, advertised, .. } = *congestion.needs();
        Congestion {
            limits: controller.as_ref().map(|own| own.limits()).unwrap_or_default(),
            timer: controller.as_ref().and_then(|own| own.poll_timeout()),
            controller,
            limit_bps: (qpc.rate_limit_bps > 0).then_some(qpc.rate_limit_bps),
            cnp_interval,
            counts_marks,
            telemetry: telemetry.map(|(form, one_in)| Sampling { form, one_in, skips: 0 }),
            advertised,
            ..Congestion::default()
        }
    }

    /// Tells the controller, if there is one.
    fn tell(&mut self, now: Time, event: Event<'_>) {
        if let Some(controller) = &mut self.controller {
            controller.handle(now, event);
            (self.limits, self.timer) = (controller.limits(), controller.poll_timeout());
        }
    }

    /// The program changed its limit. Packets no longer wait for their time at the old rate.
    pub(super) fn set_limit(&mut self, bps: u64) {
        self.limit_bps = (bps > 0).then_some(bps);
        (self.pacer, self.held) = (Pacer::default(), None);
    }

    /// The sending rate; `None` if not limited.
    pub(super) fn rate_bps(&self) -> Option<u64> {
        match (self.limits.rate_bps, self.limit_bps) {
            (Some(controlled), Some(limit)) => Some(controlled.min(limit)),
            (controlled, limit) => controlled.or(limit),
        }
    }

    /// Request packets that may be in flight; `None` for the queue pair's own window.
    pub(super) fn window_packets(&self) -> Option<u32> {
        self.limits.window_packets.map(NonZeroU32::get)
    }

    /// The state of the window that follows the delay, if it is that.
    pub(super) fn window_report(&self) -> Option<WindowReport> {
        self.controller.as_ref()?.window_report()
    }

    // ---- notifications -------------------------------------------------------------------------

    /// A packet from the peer was marked.
    pub(super) fn marked(&mut self, now: Time, seeded: Seeded) {
        let is_due = self.point.marked(now, self.cnp_interval);
        if is_due || seeded.is(Bug::NotificationStorm) {
            let most = if self.counts_marks { MAX_CNPS_DUE } else { 1 };
            self.cnps_due = (self.cnps_due + 1).min(most);
        }
    }

    /// The peer reports that packets of ours were marked.
    pub(super) fn notified(&mut self, now: Time) {
        self.tell(now, Event::Notified);
    }

    /// Reports the progress of request packets. Returns how many times the control began to compete
    /// because of it.
    pub(super) fn note_progress(&mut self, now: Time, progress: Progress) -> u64 {
        let before = self.competitions();
        let Progress { acknowledged: packets, in_flight, is_idle, rtt, lost, has_timed_out } =
            progress;
        if packets > 0 {
            self.tell(now, Event::Acknowledged { packets, in_flight, rtt });
        }
        if lost > 0 {
            self.tell(now, Event::Lost { packets: lost });
        }
        if has_timed_out {
            self.tell(now, Event::TimedOut);
        }
        if is_idle && self.advertised.is_some() {
            self.tell(now, Event::Idle);
        }
        // Without a rate, no packet has to wait for its time any longer.
        self.held = self.held.filter(|_| self.rate_bps().is_some());
        self.competitions() - before
    }

    fn competitions(&self) -> u64 {
        self.controller.as_ref().map_or(0, |controller| controller.competitions())
    }

    pub(super) fn has_notification(&self) -> bool {
        self.cnps_due > 0
    }

    /// Puts the notification that is due into `cx.packet`, if one is.
    pub(super) fn poll_notification(&mut self, cx: &mut Context<'_>, qpc: &QpContext) {
        if let Some(left) = self.cnps_due.checked_sub(1) {
            self.cnps_due = left;
            self.point.notified(cx.now);
            cx.count(|c| &mut c.cnps_sent);
            let path = Path { dscp: CNP_DSCP, ecn: Ecn::NotEct, ..qpc.peer.path };
            *cx.packet = Some((path, qpc.notification()));
        }
    }

    // ---- telemetry -----------------------------------------------------------------------------

    /// What a packet of the peer carries.
    pub(super) fn handle_telemetry(&mut self, now: Time, operation: Operation, report: &Report) {
        if self.telemetry.is_none() {
            return;
        }
        match (operation, report.is_echo()) {
            (Operation::Acknowledge, true) => {
                self.tell(now, Event::Telemetry(report));
            }
            (Operation::Send | Operation::Write, false) => {
                self.collected = Some(Box::new(report.echoed()));
            }
            _ => {}
        }
    }

    /// The control plane reports the longest queue on the path.
    pub(super) fn handle_watermark(&mut self, now: Time, watermark: &Watermark) {
        self.tell(now, Event::Watermark(watermark));
        self.held = self.held.filter(|_| self.rate_bps().is_some());
    }

    /// Whether packets carry telemetry headers.
    #[inline]
    pub(super) fn has_telemetry(&self) -> bool {
        self.telemetry.is_some()
    }

    /// What a packet to the peer is to carry.
    pub(super) fn take_telemetry(&mut self, headers: &Headers) -> Telemetry {
        match headers.bth().opcode.operation() {
            Operation::Send | Operation::Write => self.sample(),
            Operation::Acknowledge => {
                self.collected.take().map_or(Telemetry::None, Telemetry::Return)
            }
            _ => Telemetry::None,
        }
    }

    /// A data packet leaves: what it is to collect.
    fn sample(&mut self) -> Telemetry {
        let Some(sampling) = &mut self.telemetry else {
            return Telemetry::None;
        };
        match sampling.skips.checked_sub(1) {
            Some(skips) => {
                sampling.skips = skips;
                Telemetry::None
            }
            None => {
                sampling.skips = sampling.one_in.saturating_sub(1);
                Telemetry::Collect(sampling.form)
            }
        }
    }

    // ---- advertised windows --------------------------------------------------------------------

    /// Whether the receiver advertises windows, and with which parameters.
    #[inline]
    pub(super) fn advertised(&self) -> Option<&AdvertisedParams> {
        self.advertised.as_ref()
    }

    /// What an accepted packet says: the demand of the peer, or our window.
    pub(super) fn handle_hint(&mut self, now: Time, operation: Operation, level: Level) {
        match operation {
            _ if self.advertised.is_none() => {}
            Operation::Acknowledge => {
                self.tell(now, Event::Advertised { packets: level.packets() });
            }
            Operation::Send | Operation::Write => self.demand = Some(level.packets()),
            _ => {}
        }
    }

    /// The demand that the peer's latest data has announced, once.
    pub(super) fn take_demand(&mut self) -> Option<u32> {
        self.demand.take()
    }

    /// Completes a packet: data says how many packets follow, an acknowledgement which window the
    /// peer has.
    pub(super) fn put_hint(
        &mut self,
        (path, headers): &mut (Path, Headers),
        unsent: u32,
        window: Option<u32>,
    ) {
        let (hint, is_urgent) = match headers.bth().opcode.operation() {
            Operation::Send | Operation::Write => {
                let sender = self.controller.as_mut();
                (Some(unsent), sender.is_some_and(|sender| sender.is_urgent(unsent)))
            }
            Operation::Acknowledge => (window, true),
            Operation::Cnp => (None, false),
            _ => {
                self.has_responses = true;
                (None, false)
            }
        };
        // A DSCP that was asked for may be what a share of the links was reserved for.
        if is_urgent && !self.has_responses && path.dscp == 0 {
            path.dscp = URGENT_DSCP;
        }
        if let Some(packets) = hint {
            *headers = headers.with_hint(Level::of(packets).bits());
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
        let is_data =
            matches!(headers.bth().opcode.operation(), Operation::Send | Operation::Write);
        let sampling = self.telemetry.filter(|sampling| is_data && sampling.skips == 0);
        let report = sampling.map_or(0, |sampling| sampling.form.encoded_len() as u64);
        let bytes = below + around + report + payload;
        self.pacer.sent(cx.now, bytes, rate);
        self.tell(cx.now, Event::Sent { bytes });
    }

    // ---- time ----------------------------------------------------------------------------------

    pub(super) fn deadline(&self) -> Option<(Time, TimeoutReason)> {
        earlier(self.held, self.timer).map(|at| (at, TimeoutReason::Pacing))
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.tell(now, Event::Timer);
        // A rate that has ended holds nothing back.
        self.held = self.held.filter(|&at| at > now && self.rate_bps().is_some());
    }
}
