//! TIMELY (Mittal et al., SIGCOMM 2015): a rate from the gradient of round-trip times, as published
//! and patched.
//!
//! Once per round trip, a new round-trip time changes the rate:
//!
//! | round-trip time | published | patched |
//! |---|---|---|
//! | below `low` | more | more |
//! | above `high` | times 1 - beta * (1 - high / rtt) | the same |
//! | between, and not rising | more | in between, by a weight of the gradient: more, and times |
//! | between, and rising | times 1 - beta * gradient | 1 - beta * (rtt - low) / low |
//!
//! "More" is a constant, and after five times in a row a larger one. The gradient is the smoothed
//! difference of round-trip times, divided by `min_rtt`.
//!
//! What is published has no unique fixed point: senders keep whatever shares they have when the
//! queue stops moving. The patch (Zhu et al., CoNEXT 2016) gives it one, by following the delay
//! itself where the gradient is about 0.
//!
//! Source of the parameters: the simulations published with HPCC (Li et al., SIGCOMM 2019).
//! Round-trip times include the time that packets spend in the sender's own queues.

use roce::congestion::{Controller, Event, Limits, window_of};
use roce::{Duration, Time};

use crate::rounds::Rounds;
use crate::scaled;

/// Fixed-point one of gradients and factors.
const ONE: i64 = 1 << 20;

/// Increases one after the other until they become larger.
const HYPER_AFTER: u32 = 5;

const MBIT: u64 = 1_000_000;

/// Parameters of TIMELY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelyParams {
    /// Name of the variant, for reports.
    pub name: &'static str,
    /// The link's rate: the initial and the maximum rate of a queue pair.
    pub line_bps: u64,
    /// The minimum rate.
    pub min_bps: u64,
    /// The weight of a new difference of round-trip times, in thousandths.
    pub weight_per_mille: u32,
    /// The strength of cuts, in thousandths.
    pub beta_per_mille: u32,
    /// The strength of cuts by the patch, in thousandths.
    pub patched_beta_per_mille: u32,
    /// The round-trip time below which the rate always grows.
    pub low: Duration,
    /// The round-trip time above which it always shrinks.
    pub high: Duration,
    /// The round-trip time of an idle path, by which gradients are divided.
    pub min_rtt: Duration,
    /// What an increase adds.
    pub additive_bps: u64,
    /// What an increase adds from the sixth in a row on.
    pub hyper_bps: u64,
    /// With the patch.
    pub is_patched: bool,
    /// The window is what the rate sends in this time; `None` for the queue pair's own.
    pub window_rtt: Option<Duration>,
}

impl TimelyParams {
    /// `timely` on a link of `line_bps`.
    pub const fn published(line_bps: u64) -> TimelyParams {
        TimelyParams {
            name: "timely",
            line_bps,
            min_bps: scaled(100 * MBIT, line_bps),
            weight_per_mille: 875,
            beta_per_mille: 800,
            patched_beta_per_mille: 0,
            low: Duration::from_micros(50),
            high: Duration::from_micros(500),
            min_rtt: Duration::from_micros(20),
            additive_bps: scaled(25 * MBIT, line_bps),
            hyper_bps: scaled(125 * MBIT, line_bps),
            is_patched: false,
            window_rtt: None,
        }
    }

    /// `timely-patched` on a link of `line_bps`. Its authors give the patch a beta of 0.008 for
    /// updates once per 16 KiB; once per round trip, which is several of these, its cuts are 10
    /// times as strong.
    pub const fn patched(line_bps: u64) -> TimelyParams {
        TimelyParams {
            name: "timely-patched",
            patched_beta_per_mille: 80,
            is_patched: true,
            ..TimelyParams::published(line_bps)
        }
    }

    /// The variant with this name on a link of `line_bps`.
    pub fn named(name: &str, line_bps: u64) -> Option<TimelyParams> {
        let all = [TimelyParams::published(line_bps), TimelyParams::patched(line_bps)];
        all.into_iter().find(|params| params.name == name)
    }
}

/// One sender's rate.
#[derive(Clone, Copy, Debug)]
pub struct Timely {
    params: TimelyParams,
    packet_bytes: u64,
    rate_bps: u64,
    rounds: Rounds,
    /// The last sample since the rate was last changed.
    latest: Option<Duration>,
    /// The sample that changed the rate last.
    previous: Option<Duration>,
    /// The smoothed difference of round-trip times in nanoseconds, in units of 1 / [`ONE`].
    difference: i64,
    /// Increases one after the other.
    increases: u32,
    /// The rate was cut for a loss in this round trip.
    has_lost: bool,
}

impl Timely {
    /// A sender at line rate, with packets of `packet_bytes`.
    pub fn new(params: TimelyParams, packet_bytes: u32) -> Timely {
        Timely {
            params,
            packet_bytes: packet_bytes.into(),
            rate_bps: params.line_bps,
            rounds: Rounds::default(),
            latest: None,
            previous: None,
            difference: 0,
            increases: 0,
            has_lost: false,
        }
    }

    /// The rate at which the queue pair may send now.
    pub fn rate_bps(&self) -> u64 {
        self.rate_bps
    }

    fn update(&mut self, rtt: Duration) {
        let Some(previous) = self.previous.replace(rtt) else {
            return;
        };
        let gradient = self.gradient(rtt, previous);
        let TimelyParams { low, high, is_patched, .. } = self.params;
        if rtt < low {
            self.increase();
        } else if rtt > high {
            let excess = ONE - ratio(high, rtt);
            self.scale(self.params.beta_per_mille, ONE, excess);
        } else if is_patched {
            self.follow_delay(rtt, gradient);
        } else if gradient <= 0 {
            self.increase();
        } else {
            self.scale(self.params.beta_per_mille, ONE, gradient);
        }
    }

    /// The gradient with a new sample in it.
    fn gradient(&mut self, rtt: Duration, previous: Duration) -> i64 {
        let new = (signed(rtt) - signed(previous)).saturating_mul(ONE);
        let weight = i128::from(self.params.weight_per_mille);
        let mixed = i128::from(self.difference) * (1_000 - weight) + i128::from(new) * weight;
        self.difference = (mixed / 1_000) as i64;
        self.difference / signed(self.params.min_rtt).max(1)
    }

    /// The patch: both changes, weighed by the gradient.
    fn follow_delay(&mut self, rtt: Duration, gradient: i64) {
        let weight = (2 * gradient + ONE / 2).clamp(0, ONE);
        let excess = ratio(rtt, self.params.low) - ONE;
        self.scale(self.params.patched_beta_per_mille, weight, excess);
        self.raise(part(self.params.additive_bps, ONE - weight));
    }

    fn increase(&mut self) {
        let TimelyParams { additive_bps, hyper_bps, .. } = self.params;
        let step = if self.increases < HYPER_AFTER { additive_bps } else { hyper_bps };
        self.raise(step);
        self.increases = self.increases.saturating_add(1);
    }

    fn raise(&mut self, step: u64) {
        self.rate_bps = self.rate_bps.saturating_add(step).min(self.params.line_bps);
    }

    /// Multiplies the rate by 1 - beta * `weight` * `excess`.
    fn scale(&mut self, beta_per_mille: u32, weight: i64, excess: i64) {
        self.increases = 0;
        let beta = i128::from(beta_per_mille);
        let cut = i128::from(weight) * i128::from(excess) * beta / (1_000 * i128::from(ONE));
        let kept = (i128::from(ONE) - cut).clamp(0, i128::from(ONE)) as i64;
        self.rate_bps = part(self.rate_bps, kept).max(self.params.min_bps);
    }
}

fn signed(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

/// `above` / `below` in units of 1 / [`ONE`].
fn ratio(above: Duration, below: Duration) -> i64 {
    let scaled = u128::from(above.as_nanos()) * ONE as u128 / u128::from(below.as_nanos().max(1));
    i64::try_from(scaled).unwrap_or(i64::MAX)
}

/// `factor` / [`ONE`] of `value`; the factor is neither negative nor above [`ONE`].
fn part(value: u64, factor: i64) -> u64 {
    (u128::from(value) * factor as u128 / ONE as u128) as u64
}

impl Controller for Timely {
    fn handle(&mut self, _now: Time, event: Event<'_>) {
        match event {
            Event::Acknowledged { packets, in_flight, rtt } => {
                self.latest = rtt.or(self.latest);
                if self.rounds.acknowledged(packets, in_flight) {
                    self.has_lost = false;
                    self.latest.take().into_iter().for_each(|rtt| self.update(rtt));
                }
            }
            // Once per round trip, like everything else.
            Event::Lost { .. } | Event::TimedOut => {
                if !core::mem::replace(&mut self.has_lost, true) {
                    self.scale(self.params.beta_per_mille, ONE, ONE);
                }
            }
            Event::Notified
            | Event::Telemetry(_)
            | Event::Watermark(_)
            | Event::Sent { .. }
            | Event::Timer => {}
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

    fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// One round trip of this time.
    fn round(sender: &mut Timely, rtt: u64) {
        let event = Event::Acknowledged { packets: 10, in_flight: 9, rtt: Some(us(rtt)) };
        sender.handle(Time::ZERO, event);
    }

    fn at(rate_bps: u64, params: TimelyParams) -> Timely {
        Timely { rate_bps, ..Timely::new(params, 1_068) }
    }

    #[test]
    fn short_delays_raise_the_rate_and_more_after_five() {
        let mut sender = at(LINE / 10, TimelyParams::published(LINE));
        round(&mut sender, 30);
        assert_eq!(sender.rate_bps(), LINE / 10, "a first sample has no gradient");
        (0..5).for_each(|_| round(&mut sender, 40));
        assert_eq!(sender.rate_bps(), LINE / 10 + 5 * 25 * MBIT);
        round(&mut sender, 20);
        assert_eq!(sender.rate_bps(), LINE / 10 + 5 * 25 * MBIT + 125 * MBIT);
        (0..1_000).for_each(|_| round(&mut sender, 20));
        assert_eq!(sender.rate_bps(), LINE);
    }

    #[test]
    fn long_delays_cut_it_by_how_long_they_are() {
        let mut sender = at(LINE, TimelyParams::published(LINE));
        round(&mut sender, 1_000);
        round(&mut sender, 1_000);
        // 1 - 0.8 * (1 - 500 / 1,000).
        assert!(sender.rate_bps().abs_diff(LINE * 6 / 10) < MBIT, "{}", sender.rate_bps());
        (0..100).for_each(|_| round(&mut sender, 1_000));
        assert_eq!(sender.rate_bps(), 100 * MBIT);
    }

    #[test]
    fn between_them_the_gradient_decides() {
        let mut sender = at(LINE / 2, TimelyParams::published(LINE));
        round(&mut sender, 100);
        round(&mut sender, 108);
        // The difference is 0.875 * 8 us, the gradient that over 20 us, and the cut 0.8 of it.
        let kept = 1.0 - 0.8 * (0.875 * 8.0 / 20.0);
        let expected = LINE as f64 / 2.0 * kept;
        assert!((sender.rate_bps() as f64 / expected - 1.0).abs() < 1e-4, "{}", sender.rate_bps());
        let before = sender.rate_bps();
        round(&mut sender, 80);
        assert_eq!(sender.rate_bps(), before + 25 * MBIT);
    }

    /// Senders of unequal rates over one queue, in steps of a round trip: the share of the slowest
    /// in percent of a fair one.
    fn slowest_share(params: TimelyParams) -> u64 {
        let rates = [LINE * 7 / 10, LINE * 2 / 10, LINE / 10];
        let mut senders = rates.map(|rate| at(rate, params));
        // Nanoseconds of queue, and of the path.
        let (mut queue, path) = (100_000_i64, 20_000_i64);
        for _ in 0..20_000 {
            let sum: u64 = senders.iter().map(Timely::rate_bps).sum();
            let rtt = path + queue;
            let surplus = (i128::from(sum) - i128::from(LINE)) * i128::from(rtt);
            queue = (queue + (surplus / i128::from(LINE)) as i64).max(0);
            for sender in &mut senders {
                let rtt = Some(Duration::from_nanos(rtt as u64));
                let event = Event::Acknowledged { packets: 10, in_flight: 9, rtt };
                sender.handle(Time::ZERO, event);
            }
        }
        let sum: u64 = senders.iter().map(Timely::rate_bps).sum();
        senders.iter().map(|sender| sender.rate_bps() * 300 / sum).min().unwrap()
    }

    #[test]
    fn only_the_patch_makes_shares_equal() {
        assert!(slowest_share(TimelyParams::patched(LINE)) > 80);
    }

    #[test]
    fn extreme_samples_do_not_overflow() {
        for params in [TimelyParams::published(LINE), TimelyParams::patched(LINE)] {
            let mut sender = Timely::new(params, 1_068);
            for ns in [u64::MAX / 16, 0, u64::MAX / 16, 1, u64::MAX / 16, 60_000] {
                let rtt = Some(Duration::from_nanos(ns));
                sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight: 0, rtt });
                assert!((100 * MBIT..=LINE).contains(&sender.rate_bps()));
            }
        }
    }

    #[test]
    fn losses_cut_once_per_round_trip() {
        let mut sender = Timely::new(TimelyParams::published(LINE), 1_000);
        let lost = Event::Lost { packets: 1 };
        let cut = |sender: &mut Timely| {
            sender.handle(Time::ZERO, lost);
            sender.rate_bps()
        };
        let first = cut(&mut sender);
        assert!((LINE / 6..=LINE / 4).contains(&first), "{first}");
        assert_eq!([cut(&mut sender), cut(&mut sender)], [first, first]);
        sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight: 0, rtt: None });
        assert!(cut(&mut sender) < first);
    }
}
