//! DCQCN (Zhu et al., SIGCOMM 2015): the sender's rate as a state machine per queue pair.
//!
//! [`Dcqcn`] turns notifications, time and sent bytes into a rate.
//!
//! DCQCN differs from source to source, so each set of parameters has a name:
//!
//! | name | from |
//! |---|---|
//! | `dcqcn-mlnx` | the simulations published with HPCC, in the manner of ConnectX NICs |
//! | `dcqcn-paper` | the same simulations with the periods of the DCQCN paper |
//! | `dcqcn-uet` | the Ultra Ethernet consortium's simulator |
//!
//! Rates are bits per second of transport packets, headers included. Everything is integer
//! arithmetic, so a run replays on any machine.

use core::num::NonZeroU32;

use roce::congestion::{Controller, Event, Limits, window_of};
use roce::{Duration, Time};

use crate::cap::Cap;
use crate::{first_packets, scaled};

/// The largest window of a slow start: from there on only the rate limits.
const MOST_PACKETS: u32 = 1 << 10;

/// Fixed-point one for `alpha`.
const ONE: u64 = 1 << 30;

/// After this many periods without a notification `alpha` is as good as zero.
const FORGOTTEN_PERIODS: u64 = 1 << 13;

/// When the rate is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decrease {
    /// At once, for every notification.
    EachCnp,
    /// At the end of each such period in which a notification arrived.
    Every(Duration),
}

/// What a cut does to the rate that recovery aims at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// It becomes the rate before the cut.
    Always,
    /// The same, but only after an increase since the last cut.
    AfterIncrease,
}

/// Parameters of DCQCN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DcqcnParams {
    /// Name of the variant, for reports.
    pub name: &'static str,
    /// The link's rate: the initial and the maximum rate of a queue pair.
    pub line_bps: u64,
    /// The minimum rate.
    pub min_bps: u64,
    /// How often `alpha`, the estimate of congestion, is updated.
    pub alpha_period: Duration,
    /// `g` is 2^-gain_shift.
    pub gain_shift: u32,
    /// When the rate is cut.
    pub decrease: Decrease,
    /// How often the rate is raised.
    pub increase_period: Duration,
    /// The rate is also raised after this many bytes, if not 0.
    pub increase_bytes: u64,
    /// Increases after a cut that only halve the distance to the target.
    pub fast_recovery: u32,
    /// What an additive increase adds to the target.
    pub additive_bps: u64,
    /// What a hyper increase adds to the target.
    pub hyper_bps: u64,
    /// What a cut does to the target.
    pub target: Target,
    /// Minimum time between two notifications of one queue pair.
    pub cnp_interval: Duration,
    /// The window is what the rate sends in this time; `None` for the queue pair's own.
    pub window_rtt: Option<Duration>,
    /// Whether a small window grows by what is acknowledged at first, and after losses. No source
    /// has that. A sender at line rate hears nothing before its packets have passed the queue, and
    /// many of them fill any buffer before that: where switches do not pause them, most is lost.
    pub slow_start: bool,
}

const MBIT: u64 = 1_000_000;

impl DcqcnParams {
    /// `dcqcn-mlnx` on a link of `line_bps`. The published minimum rate, 1 Gbit/s at 100 Gbit/s,
    /// scales with the link as the other rates do: with more senders than line and minimum allow,
    /// pauses decide who sends how much.
    pub const fn mlnx(line_bps: u64) -> DcqcnParams {
        DcqcnParams {
            name: "dcqcn-mlnx",
            line_bps,
            min_bps: scaled(250 * MBIT, line_bps),
            alpha_period: Duration::from_micros(1),
            gain_shift: 8,
            decrease: Decrease::Every(Duration::from_micros(4)),
            increase_period: Duration::from_micros(300),
            increase_bytes: 0,
            fast_recovery: 1,
            additive_bps: scaled(5 * MBIT, line_bps),
            hyper_bps: scaled(50 * MBIT, line_bps),
            target: Target::AfterIncrease,
            cnp_interval: Duration::ZERO,
            window_rtt: None,
            slow_start: true,
        }
    }

    /// `dcqcn-paper` on a link of `line_bps`.
    pub const fn paper(line_bps: u64) -> DcqcnParams {
        DcqcnParams {
            name: "dcqcn-paper",
            alpha_period: Duration::from_micros(50),
            decrease: Decrease::Every(Duration::from_micros(50)),
            increase_period: Duration::from_micros(55),
            ..DcqcnParams::mlnx(line_bps)
        }
    }

    /// `dcqcn-uet` on a link of `line_bps`. The source has no minimum rate; 1 Mbit/s is the NIC
    /// vendor's default.
    pub const fn uet(line_bps: u64) -> DcqcnParams {
        DcqcnParams {
            name: "dcqcn-uet",
            min_bps: if line_bps < MBIT { line_bps } else { MBIT },
            alpha_period: Duration::from_micros(55),
            decrease: Decrease::EachCnp,
            increase_period: Duration::from_micros(55),
            increase_bytes: 10_000_000,
            fast_recovery: 5,
            additive_bps: line_bps / 20,
            hyper_bps: line_bps / 10,
            target: Target::Always,
            cnp_interval: Duration::from_micros(50),
            ..DcqcnParams::mlnx(line_bps)
        }
    }

    /// The variant with this name on a link of `line_bps`.
    pub fn named(name: &str, line_bps: u64) -> Option<DcqcnParams> {
        let all = [DcqcnParams::mlnx, DcqcnParams::paper, DcqcnParams::uet];
        all.into_iter().map(|variant| variant(line_bps)).find(|params| params.name == name)
    }
}

/// The reaction point: one sender's rate.
///
/// A queue pair starts at line rate, and no timer runs while it has it.
#[derive(Clone, Copy, Debug)]
pub struct Dcqcn {
    params: DcqcnParams,
    packet_bytes: u64,
    rate_bps: u64,
    target_bps: u64,
    /// In units of 1 / [`ONE`].
    alpha: u64,
    /// When `alpha` is due for an update; it is updated on use. `None` before the first
    /// notification.
    alpha_at: Option<Time>,
    /// A notification arrived in this period of `alpha`.
    alpha_marked: bool,
    decrease_at: Time,
    /// A notification arrived and the rate has not been cut for it.
    decrease_pending: bool,
    increase_at: Time,
    bytes: u64,
    /// Increases since the last cut, by time and by bytes.
    timer_steps: u32,
    byte_steps: u32,
    /// By watermarks, where the network does not mark.
    cap: Cap,
    /// The window of a slow start, while there is one.
    start: Option<u32>,
}

impl Dcqcn {
    /// A sender of packets of `packet_bytes`, at line rate as far as a slow start lets it.
    pub fn new(params: DcqcnParams, packet_bytes: u32) -> Dcqcn {
        Dcqcn {
            params,
            packet_bytes: packet_bytes.into(),
            rate_bps: params.line_bps,
            target_bps: params.line_bps,
            alpha: ONE,
            alpha_at: None,
            alpha_marked: false,
            decrease_at: Time::ZERO,
            decrease_pending: false,
            increase_at: Time::ZERO,
            bytes: 0,
            timer_steps: 0,
            byte_steps: 0,
            cap: Cap::default(),
            start: params.slow_start.then(|| first_packets(packet_bytes)),
        }
    }

    /// The rate at which the queue pair may send now.
    pub fn rate_bps(&self) -> u64 {
        self.rate_bps
    }

    /// Parameters.
    pub fn params(&self) -> &DcqcnParams {
        &self.params
    }

    /// A congestion notification arrived.
    pub fn handle_cnp(&mut self, now: Time) {
        self.handle_timeout(now);
        if self.alpha_at.is_none() {
            self.begin(now);
        } else {
            self.renew_alpha(now);
            self.alpha_marked = true;
        }
        match self.params.decrease {
            Decrease::EachCnp => self.cut_for_cnp(now),
            Decrease::Every(period) => {
                // Periods pass without events; those that have passed were empty.
                let gone = (now - self.decrease_at).as_nanos() / period.as_nanos().max(1);
                if self.decrease_at <= now {
                    self.decrease_at += period * (gone + 1);
                }
                self.decrease_pending = true;
            }
        }
    }

    fn begin(&mut self, now: Time) {
        self.alpha = ONE;
        self.alpha_at = Some(now + self.params.alpha_period);
        self.alpha_marked = false;
        if let Decrease::Every(period) = self.params.decrease {
            self.decrease_at = now + period;
        }
        self.increase_at = now + self.params.increase_period;
    }

    /// Cuts by the estimate so far, then includes this notification in it.
    fn cut_for_cnp(&mut self, now: Time) {
        self.cut(now);
        self.alpha = self.alpha - self.gain(self.alpha) + self.gain(ONE);
        self.alpha_at = Some(now + self.params.alpha_period);
        self.alpha_marked = false;
    }

    fn cut(&mut self, now: Time) {
        let increased = self.timer_steps > 0 || self.byte_steps > 0;
        if self.params.target == Target::Always || increased {
            self.target_bps = self.rate_bps;
        }
        let cut = u128::from(self.rate_bps) * u128::from(self.alpha) / u128::from(2 * ONE);
        self.rate_bps = (self.rate_bps - cut as u64).max(self.params.min_bps);
        (self.timer_steps, self.byte_steps, self.bytes) = (0, 0, 0);
        self.increase_at = now + self.params.increase_period;
    }

    /// `g` times `value`.
    fn gain(&self, value: u64) -> u64 {
        value >> self.params.gain_shift
    }

    /// Brings `alpha` up to date: it decays once per period without a notification.
    fn renew_alpha(&mut self, now: Time) {
        let Some(at) = self.alpha_at.filter(|&at| at <= now) else {
            return;
        };
        let period = self.params.alpha_period;
        let periods = 1 + (now - at).as_nanos() / period.as_nanos().max(1);
        self.alpha_at = Some(at + period * periods);
        self.alpha -= self.gain(self.alpha);
        if self.alpha_marked {
            self.alpha += self.gain(ONE);
            self.alpha_marked = false;
        }
        if periods > FORGOTTEN_PERIODS {
            self.alpha = 0;
        }
        for _ in 1..periods.min(FORGOTTEN_PERIODS) {
            self.alpha -= self.gain(self.alpha);
        }
    }

    /// `bytes` were sent.
    pub fn handle_sent(&mut self, bytes: u64) {
        if self.params.increase_bytes == 0 || self.is_unlimited() {
            return;
        }
        self.bytes += bytes;
        while self.bytes >= self.params.increase_bytes {
            self.bytes -= self.params.increase_bytes;
            self.byte_steps = self.byte_steps.saturating_add(1);
            self.increase();
        }
    }

    /// Carries out what is due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(at) = self.poll_timeout().filter(|&at| at <= now) {
            self.renew_alpha(at);
            match self.params.decrease {
                Decrease::Every(period) if self.decrease_pending && self.decrease_at == at => {
                    self.decrease_pending = false;
                    self.decrease_at = at + period;
                    self.cut(at);
                }
                _ => {
                    self.timer_steps = self.timer_steps.saturating_add(1);
                    self.increase_at = at + self.params.increase_period;
                    self.increase();
                }
            }
        }
    }

    /// When [`handle_timeout`](Dcqcn::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let decrease = self.decrease_pending.then_some(self.decrease_at);
        let increase = (!self.is_unlimited()).then_some(self.increase_at);
        [decrease, increase].into_iter().flatten().min()
    }

    /// At line rate there is nothing to raise.
    fn is_unlimited(&self) -> bool {
        self.rate_bps >= self.params.line_bps
    }

    /// One step up: half way to the target, which itself moves up once fast recovery is over.
    fn increase(&mut self) {
        let step = match self.stage() {
            Stage::FastRecovery => 0,
            Stage::Additive => self.params.additive_bps,
            Stage::Hyper => self.params.hyper_bps,
        };
        self.target_bps = self.target_bps.saturating_add(step).min(self.params.line_bps);
        // Rounded up, so that the target is reached.
        self.rate_bps = self.rate_bps + (self.target_bps - self.rate_bps).div_ceil(2);
    }

    /// With both counters the stages are those of the paper; with the timer alone, those of
    /// ConnectX NICs.
    fn stage(&self) -> Stage {
        let fast = self.params.fast_recovery;
        let (timer, bytes) = (self.timer_steps, self.byte_steps);
        if self.params.increase_bytes == 0 {
            return match timer {
                steps if steps <= fast => Stage::FastRecovery,
                steps if steps == fast + 1 => Stage::Additive,
                _ => Stage::Hyper,
            };
        }
        match () {
            () if timer.max(bytes) < fast => Stage::FastRecovery,
            () if timer.min(bytes) > fast => Stage::Hyper,
            () => Stage::Additive,
        }
    }
}

/// How fast the rate may rise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    FastRecovery,
    Additive,
    Hyper,
}

impl Controller for Dcqcn {
    fn handle(&mut self, now: Time, event: Event<'_>) {
        match event {
            Event::Notified => {
                self.cap.notified(now);
                self.handle_cnp(now);
            }
            Event::Sent { bytes } => {
                self.cap.sent(bytes, self.packet_bytes);
                self.handle_sent(bytes);
            }
            Event::Timer => {
                self.handle_timeout(now);
                self.cap.handle_timeout(now);
            }
            Event::Watermark(watermark) => self.cap.hear(now, watermark),
            Event::Acknowledged { packets, .. } => {
                self.cap.acknowledged(u64::from(packets) * self.packet_bytes);
                let grown = self.start.map(|window| window.saturating_add(packets));
                self.start = grown.filter(|&window| window < MOST_PACKETS);
            }
            Event::Telemetry(_) => {}
            Event::Advertised { .. } | Event::Idle => {}
            Event::Lost { .. } | Event::TimedOut => {
                self.cap.lost();
                let first = first_packets(self.packet_bytes as u32);
                self.start = self.params.slow_start.then_some(first);
            }
        }
    }

    fn limits(&self) -> Limits {
        let rate_bps = self.cap.limit(Some(self.rate_bps));
        let window = |(rate, rtt)| window_of(rate, rtt, self.packet_bytes);
        let of_rate = rate_bps.zip(self.params.window_rtt).map(window);
        let of_start = self.start.and_then(NonZeroU32::new);
        Limits { rate_bps, window_packets: of_rate.into_iter().chain(of_start).min() }
    }

    fn poll_timeout(&self) -> Option<Time> {
        [Dcqcn::poll_timeout(self), self.cap.poll_timeout()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 1_000_000_000;
    const LINE: u64 = 100 * GBIT;

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    /// `alpha` as a fraction.
    fn alpha(sender: &Dcqcn) -> f64 {
        sender.alpha as f64 / ONE as f64
    }

    fn close(value: f64, expected: f64) -> bool {
        (value - expected).abs() <= expected.abs() * 1e-6 + 1e-9
    }

    #[test]
    fn parameters_are_those_of_the_sources() {
        let mlnx = DcqcnParams::named("dcqcn-mlnx", LINE).unwrap();
        assert_eq!((mlnx.additive_bps, mlnx.hyper_bps), (20 * MBIT, 200 * MBIT));
        assert_eq!(mlnx.increase_period, Duration::from_micros(300));
        let paper = DcqcnParams::named("dcqcn-paper", LINE).unwrap();
        assert_eq!(paper.decrease, Decrease::Every(Duration::from_micros(50)));
        assert_eq!((paper.additive_bps, paper.fast_recovery), (20 * MBIT, 1));
        let uet = DcqcnParams::named("dcqcn-uet", LINE).unwrap();
        assert_eq!((uet.additive_bps, uet.hyper_bps), (5 * GBIT, 10 * GBIT));
        assert_eq!((uet.increase_bytes, uet.fast_recovery), (10_000_000, 5));
        assert_eq!(DcqcnParams::named("dcqcn", LINE), None);
        // The minimum rate is a hundredth of the link.
        assert_eq!((mlnx.min_bps, paper.min_bps), (GBIT, GBIT));
        assert_eq!(DcqcnParams::mlnx(25 * GBIT).min_bps, 250 * MBIT);
    }

    /// At most what is acknowledged comes on top, until the window is no limit; losses begin anew.
    #[test]
    fn it_starts_with_a_small_window_and_again_after_losses() {
        let mut sender = Dcqcn::new(DcqcnParams::mlnx(LINE), 1_068);
        let window = |sender: &Dcqcn| sender.limits().window_packets.map(NonZeroU32::get);
        assert_eq!(window(&sender), Some(16));
        let acknowledge = |sender: &mut Dcqcn, packets| {
            sender.handle(at(1), Event::Acknowledged { packets, in_flight: 8, rtt: None });
        };
        acknowledge(&mut sender, 16);
        assert_eq!(window(&sender), Some(32));
        acknowledge(&mut sender, MOST_PACKETS - 33);
        assert_eq!(window(&sender), Some(MOST_PACKETS - 1));
        acknowledge(&mut sender, 1);
        assert_eq!(window(&sender), None);
        acknowledge(&mut sender, 1);
        for loss in [Event::Lost { packets: 1 }, Event::TimedOut] {
            sender.handle(at(2), loss);
            assert_eq!(window(&sender), Some(16));
            acknowledge(&mut sender, u32::MAX);
            assert_eq!(window(&sender), None);
        }
        let params = DcqcnParams { slow_start: false, ..DcqcnParams::mlnx(LINE) };
        let mut sender = Dcqcn::new(params, 1_068);
        sender.handle(at(2), Event::TimedOut);
        assert_eq!(window(&sender), None);
        // Packets of 4 KiB: the same bytes.
        assert_eq!(window(&Dcqcn::new(DcqcnParams::mlnx(LINE), 4_140)), Some(4));
    }

    #[test]
    fn nothing_runs_at_line_rate() {
        let mut sender = Dcqcn::new(DcqcnParams::mlnx(LINE), 1_068);
        assert_eq!((sender.rate_bps(), sender.poll_timeout()), (LINE, None));
        sender.handle_sent(1 << 40);
        sender.handle_timeout(at(1 << 40));
        assert_eq!((sender.rate_bps(), sender.poll_timeout()), (LINE, None));
    }

    /// One notification at 10 us: the cut comes 4 us later, after four renewals of alpha, the first
    /// of which is at 11 us.
    #[test]
    fn mlnx_cuts_once_per_period_with_the_alpha_of_that_moment() {
        let mut sender = Dcqcn::new(DcqcnParams::mlnx(LINE), 1_068);
        sender.handle_cnp(at(10));
        assert_eq!(sender.rate_bps(), LINE);
        assert_eq!(sender.poll_timeout(), Some(at(14)));
        sender.handle_cnp(at(10));
        sender.handle_timeout(at(14));
        // The second notification marked the first period: 1 stays 1, then three decays.
        let expected_alpha = (255.0_f64 / 256.0).powi(3);
        assert!(close(alpha(&sender), expected_alpha), "{}", alpha(&sender));
        let expected = LINE as f64 * (1.0 - expected_alpha / 2.0);
        assert!(close(sender.rate_bps() as f64, expected), "{}", sender.rate_bps());
        // The first cut since the start leaves the target alone: it is line rate.
        assert_eq!(sender.target_bps, LINE);
        assert_eq!(sender.poll_timeout(), Some(at(314)));
        // A cut without an increase in between leaves the target alone, too.
        let before = sender.rate_bps();
        sender.handle_cnp(at(15));
        sender.handle_timeout(at(18));
        assert!(sender.rate_bps() < before);
        assert_eq!(sender.target_bps, LINE);
    }

    #[test]
    fn mlnx_recovers_fast_once_then_adds_then_leaps() {
        let mut sender = Dcqcn::new(DcqcnParams::mlnx(LINE), 1_068);
        sender.handle_cnp(at(0));
        sender.handle_timeout(at(4));
        let cut = sender.rate_bps();
        sender.handle_timeout(at(303));
        assert_eq!(sender.rate_bps(), cut);
        sender.handle_timeout(at(304));
        let first = cut + (LINE - cut).div_ceil(2);
        assert_eq!(sender.rate_bps(), first);
        // A cut after an increase aims at where the rate was.
        sender.handle_cnp(at(304));
        sender.handle_timeout(at(308));
        assert_eq!(sender.target_bps, first);
        let low = sender.rate_bps();
        let mut rate = low;
        let mut target = first;
        for (step, add) in [0, 20 * MBIT, 200 * MBIT, 200 * MBIT].into_iter().enumerate() {
            sender.handle_timeout(at(308 + 300 * (step as u64 + 1)));
            target += add;
            rate += (target - rate).div_ceil(2);
            assert_eq!((sender.rate_bps(), sender.target_bps), (rate, target), "step {step}");
        }
    }

    /// With a notification in every period alpha stays at 1; without any it decays as (1 - g)^n. A
    /// late update gives the same value as one in time.
    #[test]
    fn alpha_follows_its_closed_form_however_late_it_is_asked_for() {
        let mut lazy = Dcqcn::new(DcqcnParams::mlnx(LINE), 1_068);
        lazy.handle_cnp(at(0));
        lazy.handle_timeout(at(4));
        let mut eager = lazy;
        for us in 5..=1_000 {
            eager.renew_alpha(at(us));
        }
        lazy.renew_alpha(at(1_000));
        assert_eq!(lazy.alpha, eager.alpha);
        assert!((alpha(&lazy) - (255.0_f64 / 256.0).powi(1_000)).abs() < 1e-6);
        lazy.renew_alpha(at(1_000_000));
        assert!(lazy.alpha < ONE >> 20);
        let mut marked = eager;
        for us in 1_001..=4_000 {
            marked.alpha_marked = true;
            marked.renew_alpha(at(us));
        }
        assert!(alpha(&marked) > 0.99999 && marked.alpha <= ONE, "{}", alpha(&marked));
    }

    #[test]
    fn uet_cuts_for_each_notification_and_counts_bytes() {
        let mut sender = Dcqcn::new(DcqcnParams::uet(LINE), 1_068);
        sender.handle_cnp(at(0));
        assert_eq!((sender.rate_bps(), sender.target_bps), (LINE / 2, LINE));
        sender.handle_cnp(at(50));
        assert_eq!((sender.rate_bps(), sender.target_bps), (LINE / 4, LINE / 2));
        assert_eq!(sender.poll_timeout(), Some(at(105)));
        // Four steps of fast recovery by bytes: 25 -> 37.5 -> 43.75 -> 46.875 -> 48.4375.
        sender.handle_sent(39_999_999);
        assert_eq!(sender.rate_bps(), 46_875 * MBIT);
        sender.handle_sent(1);
        assert_eq!(sender.rate_bps(), 48_437_500_000);
        // The fifth is additive, as the counter has reached F: target 55, half way there.
        sender.handle_sent(10_000_000);
        assert_eq!((sender.rate_bps(), sender.target_bps), (51_718_750_000, 55 * GBIT));
        // Hyper only when both counters are beyond F.
        sender.handle_sent(10_000_000);
        assert_eq!(sender.target_bps, 60 * GBIT);
        for step in 0..5 {
            sender.handle_timeout(at(105 + 55 * step));
            assert_eq!(sender.target_bps, (65 + 5 * step) * GBIT);
        }
        sender.handle_timeout(at(105 + 55 * 5));
        assert_eq!(sender.target_bps, 95 * GBIT);
        sender.handle_timeout(at(10_000));
        assert_eq!(sender.rate_bps(), LINE);
        assert_eq!(sender.poll_timeout(), None);
    }

    #[test]
    fn the_rate_stays_between_its_bounds() {
        for name in ["dcqcn-mlnx", "dcqcn-paper", "dcqcn-uet"] {
            let params = DcqcnParams::named(name, 25 * GBIT).unwrap();
            let mut sender = Dcqcn::new(params, 1_068);
            for us in 0..20_000 {
                sender.handle_cnp(at(us));
            }
            // An increase may come between two cuts, and is cut again.
            let floor = params.min_bps..params.min_bps + params.hyper_bps;
            assert!(floor.contains(&sender.rate_bps()), "{name}: {}", sender.rate_bps());
            sender.handle_timeout(at(100_000_000));
            assert_eq!(sender.rate_bps(), 25 * GBIT, "{name}");
        }
    }

    #[test]
    fn on_the_slowest_links_senders_recover() {
        for line in [1, 50, 99, 400, 4_999] {
            let mut sender = Dcqcn::new(DcqcnParams::mlnx(line), 1_000);
            // Between notifications the rate rises, too, so that cuts begin at lower and lower
            // ones.
            (1..400).for_each(|round| sender.handle_cnp(at(round * 700)));
            assert!((1..=line).contains(&sender.rate_bps()), "{line}");
            let mut steps = 0;
            while let Some(next) = sender.poll_timeout().filter(|_| steps < 10_000) {
                sender.handle_timeout(next);
                steps += 1;
            }
            assert_eq!(sender.rate_bps(), line);
        }
    }
}
