//! DCTCP (Alizadeh et al., SIGCOMM 2010) as a rate, as NICs would do it.
//!
//! Once per round trip the share of marked packets enters a mean, `alpha`. The first notification
//! of a round trip cuts the rate by half of `alpha`; a round trip without one adds a constant. The
//! receiver has to notify the sender of every marked packet. A window that follows the rate may
//! limit what is in flight, so that notifications that are late do no harm. READ responses are not
//! acknowledged: they leave at the rate that requests have got.
//!
//! Source: the simulations published with HPCC (Li et al., SIGCOMM 2019). They start at line rate,
//! where TCP would start slowly.

use roce::congestion::{Controller, Event, Limits, window_of};
use roce::{Duration, Time};

use crate::rounds::Rounds;
use crate::scaled;

/// Fixed-point one of `alpha`.
const ONE: u64 = 1 << 20;

const MBIT: u64 = 1_000_000;

/// Parameters of DCTCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DctcpParams {
    /// The link's rate: the initial and the maximum rate of a queue pair.
    pub line_bps: u64,
    /// The minimum rate.
    pub min_bps: u64,
    /// `g` is 2^-gain_shift.
    pub gain_shift: u32,
    /// What a round trip without a notification adds.
    pub additive_bps: u64,
    /// The window is what the rate sends in this time, slightly more than a round trip without
    /// queues; `None` for the queue pair's own.
    pub window_rtt: Option<Duration>,
}

impl DctcpParams {
    /// Notifications for every marked packet.
    pub const CNP_INTERVAL: Duration = Duration::ZERO;

    /// On a link of `line_bps`: g = 1/16, and one packet of 1,000 bytes per round trip of 13 us.
    pub const fn new(line_bps: u64, window_rtt: Option<Duration>) -> DctcpParams {
        DctcpParams {
            line_bps,
            min_bps: scaled(100 * MBIT, line_bps),
            gain_shift: 4,
            additive_bps: 615 * MBIT,
            window_rtt,
        }
    }
}

/// One sender's rate.
#[derive(Clone, Copy, Debug)]
pub struct Dctcp {
    params: DctcpParams,
    packet_bytes: u64,
    rate_bps: u64,
    /// The mean share of marked packets, in units of 1 / [`ONE`].
    alpha: u64,
    rounds: Rounds,
    /// Packets acknowledged in this round trip, and notifications.
    acknowledged: u32,
    marked: u32,
    /// Packets on their way: those not acknowledged at the last acknowledgement, and those sent
    /// since.
    in_flight: u32,
    /// Packets were acknowledged.
    is_heard: bool,
    /// Packets to be acknowledged until marks are of packets that were sent after the last cut.
    cut_left: u32,
}

impl Dctcp {
    /// A sender at line rate, with packets of `packet_bytes`.
    pub fn new(params: DctcpParams, packet_bytes: u32) -> Dctcp {
        Dctcp {
            params,
            packet_bytes: packet_bytes.max(1).into(),
            rate_bps: params.line_bps,
            alpha: ONE,
            rounds: Rounds::default(),
            acknowledged: 0,
            marked: 0,
            in_flight: 0,
            is_heard: false,
            cut_left: 0,
        }
    }

    /// The rate at which the queue pair may send now.
    pub fn rate_bps(&self) -> u64 {
        self.rate_bps
    }

    /// The mean share of marked packets in millionths.
    #[cfg(test)]
    fn alpha_ppm(&self) -> u64 {
        self.alpha * 1_000_000 / ONE
    }

    fn handle_acknowledged(&mut self, packets: u32, in_flight: u32) {
        (self.in_flight, self.is_heard) = (in_flight, true);
        let was_cut = self.cut_left > 0;
        self.cut_left = self.cut_left.saturating_sub(packets);
        self.acknowledged = self.acknowledged.saturating_add(packets);
        if self.rounds.acknowledged(packets, in_flight) {
            self.end_round(was_cut);
        }
    }

    /// Takes half of `share` from the rate, unless it was cut for packets sent before.
    fn cut(&mut self, share: u64) {
        if self.cut_left > 0 {
            return;
        }
        let cut = u128::from(self.rate_bps) * u128::from(share) / u128::from(2 * ONE);
        self.rate_bps = (self.rate_bps - cut as u64).max(self.params.min_bps);
        self.cut_left = self.in_flight.max(1);
    }

    fn end_round(&mut self, was_cut: bool) {
        let share = u64::from(self.marked.min(self.acknowledged)) * ONE
            / u64::from(self.acknowledged.max(1));
        let gain = |value: u64| value.checked_shr(self.params.gain_shift).unwrap_or(0);
        self.alpha = (self.alpha - gain(self.alpha) + gain(share)).min(ONE);
        if !was_cut {
            let raised = self.rate_bps.saturating_add(self.params.additive_bps);
            self.rate_bps = raised.min(self.params.line_bps);
        }
        (self.acknowledged, self.marked) = (0, 0);
    }
}

impl Controller for Dctcp {
    fn handle(&mut self, _now: Time, event: Event<'_>) {
        match event {
            Event::Acknowledged { packets, in_flight, .. } => {
                self.handle_acknowledged(packets, in_flight);
            }
            Event::Notified => {
                self.marked = self.marked.saturating_add(1);
                // Without acknowledgements no round trip ends, and the rate would never grow again:
                // what was marked is a READ response.
                if self.is_heard {
                    self.cut(self.alpha);
                }
            }
            // A lost packet is more than a marked one.
            Event::Lost { .. } | Event::TimedOut => self.cut(ONE),
            Event::Sent { .. } => self.in_flight = self.in_flight.saturating_add(1),
            Event::Telemetry(_) | Event::Watermark(_) | Event::Timer => {}
            Event::Advertised { .. } | Event::Idle => {}
        }
    }

    fn limits(&self) -> Limits {
        let window = |rtt| window_of(self.rate_bps, rtt, self.packet_bytes);
        Limits { rate_bps: Some(self.rate_bps), window_packets: self.params.window_rtt.map(window) }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: u64 = 25_000_000_000;

    fn sender() -> Dctcp {
        Dctcp::new(DctcpParams::new(LINE, Some(Duration::from_micros(24))), 1_000)
    }

    fn acknowledge(sender: &mut Dctcp, in_flight: u32) {
        sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight, rtt: None });
    }

    /// A round trip of `packets`, of which `marked` are.
    fn round(sender: &mut Dctcp, packets: u32, marked: u32) {
        for packet in 0..packets {
            if packet < marked {
                sender.handle(Time::ZERO, Event::Notified);
            }
            acknowledge(sender, packets - 1);
        }
    }

    fn alpha(sender: &Dctcp) -> f64 {
        sender.alpha as f64 / ONE as f64
    }

    #[test]
    fn alpha_is_the_mean_share_of_marks() {
        let mut sender = sender();
        round(&mut sender, 10, 0);
        let mut expected = alpha(&sender);
        for (packets, marked) in [(10, 10), (10, 5), (20, 0), (10, 10)] {
            // The first acknowledgement ends the round before; this one's share enters with the
            // next.
            round(&mut sender, packets, marked);
            let before = alpha(&sender);
            round(&mut sender, packets, marked);
            expected = before * 15.0 / 16.0 + f64::from(marked) / f64::from(packets) / 16.0;
            assert!((alpha(&sender) - expected).abs() < 0.01, "{packets} {marked}");
        }
        assert!(expected > 0.5);
    }

    #[test]
    fn a_round_trip_is_cut_once_and_one_without_marks_adds() {
        let mut sender = sender();
        sender.handle(Time::ZERO, Event::Notified);
        assert_eq!(sender.rate_bps(), LINE, "nothing was acknowledged yet");
        acknowledge(&mut sender, 9);
        sender.handle(Time::ZERO, Event::Notified);
        assert_eq!(sender.rate_bps(), LINE / 2);
        // 12.5 Gbit/s in 24 us are 37.5 packets.
        assert_eq!(sender.limits().window_packets.unwrap().get(), 38);
        // Marks and losses of packets that were sent before.
        for event in [Event::Notified, Event::Lost { packets: 1 }, Event::Notified] {
            sender.handle(Time::ZERO, event);
            acknowledge(&mut sender, 9);
        }
        assert_eq!(sender.rate_bps(), LINE / 2);
        for _ in 0..3 {
            round(&mut sender, 10, 0);
        }
        let rate = sender.rate_bps();
        assert!(rate > LINE / 2 && (rate - LINE / 2).is_multiple_of(615 * MBIT), "{rate}");
        for _ in 0..1_000 {
            round(&mut sender, 10, 0);
        }
        assert_eq!(sender.rate_bps(), LINE);
        assert!(sender.alpha_ppm() < 100);
    }

    #[test]
    fn the_rate_stays_above_its_minimum() {
        let mut sender = sender();
        for _ in 0..1_000 {
            round(&mut sender, 4, 4);
            sender.handle(Time::ZERO, Event::TimedOut);
        }
        assert_eq!(sender.rate_bps(), sender.params.min_bps);
    }
}
