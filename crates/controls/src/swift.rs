//! Swift (Kumar et al., SIGCOMM 2020): a window that keeps the delay at a target.
//!
//! Below the target the window grows by `ai` packets per round trip. Above it, at most once per
//! round trip, it is multiplied by 1 - beta * (delay - target) / delay, and never by less than 1 -
//! `max_cut`. Lost packets cut it by `max_cut`. The window may be less than a packet; packets are
//! then paced.
//!
//! The target is higher for small windows, so that many senders do not fight for a queue that is
//! shorter than a packet of each, and shares become equal:
//!
//! ```text
//! target = base + range * (1 / sqrt(window) - 1 / sqrt(most)) / (1 / sqrt(least) - 1 / sqrt(most))
//! ```
//!
//! with the second term between 0 and `range`. [`delay`](super::delay) is the control for links
//! that are shared with others: this one gets little beside TCP.

use core::num::NonZeroU32;

use roce::congestion::rtt::plausible;
use roce::congestion::{Controller, Event, Limits};
use roce::{Duration, Time};

/// One packet, in units of the window.
const ONE: u64 = 1 << 16;

/// Packets of the first window.
const FIRST_PACKETS: u64 = 16;

/// Timeouts one after the other after which the window is the least.
const RESET_AFTER: u32 = 5;

/// Parameters of Swift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwiftParams {
    /// The target for large windows: the path without queues, and the queue that is allowed.
    pub base: Duration,
    /// What small windows add to it at most.
    pub range: Duration,
    /// Packets that a round trip below the target adds, in thousandths.
    pub additive_millipackets: u32,
    /// The strength of cuts, in thousandths.
    pub beta_per_mille: u32,
    /// The most that one cut takes, in thousandths.
    pub max_cut_per_mille: u32,
    /// Windows at which the target is highest and lowest, in thousandths of a packet.
    pub least_millipackets: u32,
    /// See `least_millipackets`.
    pub most_millipackets: u32,
}

impl SwiftParams {
    /// For paths with a round-trip time of `base_rtt` without queues: the settings of `csg-htsim`,
    /// which calls several of them guesses. It has a target of 20 us for paths of 12 us, five times
    /// that as range, and adds 3 us for a switch.
    pub const fn new(base_rtt: Duration) -> SwiftParams {
        let base = base_rtt.as_nanos() * 20 / 12;
        SwiftParams {
            base: Duration::from_nanos(base + base * 100 / 655),
            range: Duration::from_nanos(5 * base),
            additive_millipackets: 1_000,
            beta_per_mille: 800,
            max_cut_per_mille: 500,
            least_millipackets: 100,
            most_millipackets: 100_000,
        }
    }
}

/// One sender's window.
#[derive(Clone, Copy, Debug)]
pub struct Swift {
    params: SwiftParams,
    packet_bytes: u64,
    /// The queue pair's own window, in units.
    most: u64,
    window: u64,
    rtt: Duration,
    /// When it was cut last, and the round-trip time then: no cut within that, or within the
    /// present one if it is shorter.
    cut_at: Option<(Time, Duration)>,
    timeouts: u32,
    /// Packets acknowledged since the last sample.
    acknowledged: u32,
}

impl Swift {
    /// A sender of packets of `packet_bytes` with at most `window_packets` in flight.
    pub fn new(params: SwiftParams, packet_bytes: u32, window_packets: u32) -> Swift {
        let most = u64::from(window_packets.max(1)) * ONE;
        Swift {
            params,
            packet_bytes: packet_bytes.into(),
            most,
            window: most.min(FIRST_PACKETS * ONE),
            rtt: params.base,
            cut_at: None,
            timeouts: 0,
            acknowledged: 0,
        }
    }

    /// Thousandths of a packet that may be in flight.
    pub fn window_millipackets(&self) -> u64 {
        self.window * 1_000 / ONE
    }

    /// The target for the present window.
    pub fn target(&self) -> Duration {
        let SwiftParams { base, range, least_millipackets, most_millipackets, .. } = self.params;
        let units = |millipackets: u32| u64::from(millipackets) * ONE / 1_000;
        let floor = inverse_root(units(most_millipackets));
        let ceiling = inverse_root(units(least_millipackets)).max(floor + 1);
        let place = inverse_root(self.window).clamp(floor, ceiling) - floor;
        let added = u128::from(range.as_nanos()) * u128::from(place) / u128::from(ceiling - floor);
        base + Duration::from_nanos(added as u64)
    }

    fn sample(&mut self, now: Time, rtt: Duration) {
        let rtt = plausible(rtt, self.rtt);
        self.rtt = rtt;
        let target = self.target();
        let packets = u64::from(core::mem::take(&mut self.acknowledged));
        if rtt < target {
            let step = u64::from(self.params.additive_millipackets) * ONE / 1_000;
            // A window below a packet is not divided among its packets.
            let packets_per_round = (self.window / ONE).max(1);
            // What was acknowledged without a sample says nothing about the delay.
            let packets = packets.min(packets_per_round);
            self.window = (self.window + step * packets / packets_per_round).min(self.most);
        } else {
            let excess = rtt.as_nanos() - target.as_nanos();
            let beta = u128::from(self.params.beta_per_mille);
            let cut = u128::from(excess) * beta / u128::from(rtt.as_nanos().max(1));
            self.cut(now, cut as u64);
        }
    }

    /// Takes so many thousandths of the window, but not twice in a round trip.
    fn cut(&mut self, now: Time, per_mille: u64) {
        if self.cut_at.is_some_and(|(at, rtt)| now < at + rtt.min(self.rtt)) {
            return;
        }
        self.cut_at = Some((now, self.rtt));
        let kept = 1_000 - per_mille.min(self.params.max_cut_per_mille.min(1_000).into());
        self.window = (self.window * kept / 1_000).max(self.least());
    }

    fn least(&self) -> u64 {
        (u64::from(self.params.least_millipackets) * ONE / 1_000 / 10).max(1)
    }
}

/// 1 / sqrt(window in packets), in units of 2^-20.
fn inverse_root(window: u64) -> u64 {
    // The root of the window in units is 256 times that in packets.
    const SCALE: u64 = 1 << 20;
    SCALE * SCALE.isqrt() * 256 / (window.max(1) * SCALE).isqrt()
}

impl Controller for Swift {
    fn handle(&mut self, now: Time, event: Event<'_>) {
        let most_cut = self.params.max_cut_per_mille.into();
        match event {
            Event::Acknowledged { packets, rtt, .. } => {
                self.timeouts = 0;
                self.acknowledged = self.acknowledged.saturating_add(packets);
                if let Some(rtt) = rtt {
                    self.sample(now, rtt);
                }
            }
            Event::Lost { .. } => self.cut(now, most_cut),
            Event::TimedOut => {
                self.timeouts = self.timeouts.saturating_add(1);
                match self.timeouts < RESET_AFTER {
                    true => self.cut(now, most_cut),
                    false => self.window = self.least(),
                }
            }
            Event::Telemetry(_)
            | Event::Watermark(_)
            | Event::Notified
            | Event::Sent { .. }
            | Event::Timer => {}
            Event::Advertised { .. } | Event::Idle => {}
        }
    }

    fn limits(&self) -> Limits {
        let rate_bps = (self.window < ONE).then(|| {
            let bits = u128::from(self.packet_bytes) * 8 * u128::from(self.window);
            let per_round = bits * 1_000_000_000 / u128::from(ONE);
            (per_round / u128::from(self.rtt.as_nanos().max(1))).max(1) as u64
        });
        let window_packets = NonZeroU32::new((self.window / ONE) as u32).or(NonZeroU32::new(1));
        Limits { rate_bps, window_packets }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: SwiftParams = SwiftParams::new(Duration::from_micros(12));

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    fn acknowledge(sender: &mut Swift, now: Time, packets: u32, rtt: u64) {
        let rtt = Some(Duration::from_micros(rtt));
        sender.handle(now, Event::Acknowledged { packets, in_flight: 0, rtt });
    }

    fn sender(packets: u64) -> Swift {
        Swift { window: packets * ONE, ..Swift::new(PARAMS, 1_000, 1_000) }
    }

    #[test]
    fn small_windows_have_a_higher_target() {
        let base = PARAMS.base;
        let at = |window| Swift { window, ..sender(1) }.target();
        assert_eq!(at(200 * ONE), base);
        assert_eq!(at(100 * ONE), base);
        assert_eq!(at(1), base + PARAMS.range);
        // Of 100 us: (1 / sqrt(1) - 1 / 10) / (1 / sqrt(0.1) - 1 / 10).
        let added = at(ONE).as_nanos() - base.as_nanos();
        let expected = 100_000.0 * 0.9 / (1.0 / 0.1_f64.sqrt() - 0.1);
        assert!((added as f64 / expected - 1.0).abs() < 0.02, "{added} {expected}");
    }

    #[test]
    fn it_grows_by_a_packet_per_round_trip() {
        let mut swift = sender(20);
        for _ in 0..5 {
            let packets = (swift.window / ONE) as u32;
            acknowledge(&mut swift, at(0), packets, 10);
        }
        assert_eq!(swift.window, 25 * ONE);
        let mut tiny = Swift { window: ONE / 4, ..sender(1) };
        acknowledge(&mut tiny, at(0), 1, 10);
        assert_eq!(tiny.window, ONE / 4 + ONE);
    }

    #[test]
    fn it_shrinks_once_per_round_trip_by_the_excess() {
        let mut swift = sender(100);
        let target = swift.target().as_nanos();
        acknowledge(&mut swift, at(100), 1, 40);
        assert_eq!(target, 20_000 + 3_053);
        let kept = 1.0 - 0.8 * (40_000 - target) as f64 / 40_000.0;
        assert!(
            (swift.window as f64 / (100 * ONE) as f64 - kept).abs() < 0.002,
            "{}",
            swift.window
        );
        let before = swift.window;
        acknowledge(&mut swift, at(120), 1, 40);
        assert_eq!(swift.window, before);
        acknowledge(&mut swift, at(141), 1, 100_000);
        assert_eq!(swift.window, before / 2, "half at most");
    }

    /// A minute late, because a process was stopped: it says nothing about the time to the next
    /// cut, or packet.
    #[test]
    fn a_late_acknowledgement_postpones_nothing() {
        let mut swift = sender(64);
        acknowledge(&mut swift, at(1_000), 1, 60_000_000);
        assert_eq!(swift.window, 32 * ONE);
        acknowledge(&mut swift, at(1_100), 1, 40);
        assert!(swift.window < 32 * ONE, "the next round trip is another");
        let mut tiny = Swift { window: ONE / 100, ..sender(1) };
        acknowledge(&mut tiny, at(1_000), 1, 60_000_000);
        // 8,000 bits, or a part of them, within some hundred times 100 ms.
        assert!(tiny.limits().rate_bps.unwrap() > 8_000 / 100, "{:?}", tiny.limits());
    }

    #[test]
    fn losses_cut_and_timeouts_reset_it() {
        let mut swift = sender(64);
        swift.handle(at(1_000), Event::Lost { packets: 3 });
        swift.handle(at(1_001), Event::Lost { packets: 3 });
        assert_eq!(swift.window, 32 * ONE);
        for round in 0..RESET_AFTER.into() {
            swift.handle(at(1_000 + 10 * round), Event::TimedOut);
        }
        assert_eq!(swift.window, swift.least());
        let limits = swift.limits();
        assert!(limits.rate_bps.is_some() && limits.window_packets == NonZeroU32::new(1));
        acknowledge(&mut swift, at(5_000), 1, 10);
        assert!(swift.limits().rate_bps.is_none());
    }
}
