//! A window from measured delay, which competes where others fill the queue.
//!
//! In the manner of Swift (Kumar et al., SIGCOMM 2020), the sender keeps the queue of the path near a
//! target: above it, the window is cut by how far, at most by half and once per round trip; below it,
//! the window grows by one packet per round trip, or by an eighth while the queue is almost empty.
//! Acknowledgements clock the packets. They are paced only when the window is less than one packet.
//!
//! A sender that reacts to delay gets nothing beside one that fills the queue until it overflows, as
//! TCP CUBIC does. So, as in Copa (Arun and Balakrishnan, NSDI 2018), there is a second mode:
//!
//! | mode | the window follows | until |
//! |---|---|---|
//! | [`Mode::Start`] | doubling | delay or loss |
//! | [`Mode::Delay`] | delay | a drain shows that others fill the queue |
//! | [`Mode::Compete`] | loss, as CUBIC (RFC 9438) | a drain shows that they do not |
//! | [`Mode::Drain`] | a few packets for three round trips | |
//!
//! A drain empties our part of the queue. What remains is the path's own delay, which becomes the base
//! that delays are compared with, and the queue of others. Drains begin at full periods of the clock, so
//! that all queue pairs of a machine drain together and see the path and not each other.
//!
//! Loss alone is not congestion: links lose packets, too. It counts where the queue is long, where much is
//! lost, or where we compete.
//!
//! Delays below a few hundred microseconds are the noise of a software endpoint. The target is far
//! above that, so this control acts on paths whose queue the window can fill for that long, and leaves
//! faster ones alone.

use core::num::NonZeroU32;

use super::{Controller, Event, Limits};
use crate::time::{Duration, Time};

/// One packet, in units of the window.
const ONE: u64 = 1 << 10;

/// The least window after losses. Delay alone never cuts it below one packet.
const LEAST: u64 = ONE / 16;

/// Packets of the first window.
const FIRST_PACKETS: u64 = 32;

/// Rounds above the target after which a queue that remains is taken for that of others.
const PATIENCE: u32 = 8;

/// The window of a drain: with many queue pairs, more than a packet of each is a queue.
const DRAINED: u64 = ONE;

/// Time from drain to drain, a power of two of nanoseconds: about a second, and for long paths that
/// doubled until it has this many round trips.
const PERIOD_NS: u64 = 1 << 30;
const PERIOD_ROUNDS: u64 = 64;
const MAX_PERIOD_NS: u64 = 1 << 40;

/// After so many drains that all took longer, the path has become longer: the least of them is its own
/// delay.
const FORGET_AFTER: u32 = 30;

/// Packets over which the share of losses is taken, and the share that is congestion: 1 / that.
const LOSS_SAMPLE: u32 = 256;
const LOSS_SHARE: u32 = 10;

/// Parameters of the control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelayParams {
    /// The delay that the queue of the path may add.
    pub target: Duration,
}

impl DelayParams {
    /// 2 ms: above the noise of processes that share processors, below the buffers of slow links.
    pub const DEFAULT: DelayParams = DelayParams { target: Duration::from_micros(2_000) };
}

impl Default for DelayParams {
    fn default() -> DelayParams {
        DelayParams::DEFAULT
    }
}

/// What the window follows; see the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It doubles each round trip.
    Start,
    /// The delay.
    Delay,
    /// Losses.
    Compete,
    /// A few packets.
    Drain {
        /// When it ends.
        until: Time,
        /// The window before.
        window: u64,
        /// Its delay.
        rtt: Duration,
        /// The smallest delay since it began.
        least: Duration,
        /// It was [`Mode::Compete`].
        competes: bool,
    },
}

impl Mode {
    fn follows(self) -> Follows {
        match self {
            Mode::Start => Follows::Nothing,
            Mode::Compete | Mode::Drain { competes: true, .. } => Follows::Losses,
            Mode::Delay | Mode::Drain { competes: false, .. } => Follows::Delay,
        }
    }
}

/// What a window follows, drains aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follows {
    /// Nothing yet: it doubles each round trip.
    Nothing,
    /// The delay.
    Delay,
    /// Losses, beside others that fill the queue.
    Losses,
}

/// The present state of one sender's control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowReport {
    /// Thousandths of a packet that may be in flight. In a drain, that of before.
    pub window_millipackets: u64,
    /// What the window follows.
    pub follows: Follows,
    /// Since when it does.
    pub since: Time,
    /// It is measuring the path without its own queue.
    pub is_draining: bool,
    /// The delay of the path without a queue.
    pub base: Option<Duration>,
    /// The delay now, smoothed.
    pub smoothed: Option<Duration>,
    /// Times that it began to follow losses.
    pub competitions: u64,
}

impl WindowReport {
    /// What queues add to the delay of the path now.
    pub fn queue(&self) -> Duration {
        let nanos = |delay: Option<Duration>| delay.unwrap_or_default().as_nanos();
        Duration::from_nanos(nanos(self.smoothed).saturating_sub(nanos(self.base)))
    }
}

/// What was seen in one round trip.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    end: Time,
    min_rtt: Option<Duration>,
    /// The window limited the sender.
    is_full: bool,
    /// The window was cut because of a loss or a notification.
    is_cut: bool,
}

/// Packets and losses since the share of losses was last taken.
#[derive(Clone, Copy, Debug, Default)]
struct Losses {
    delivered: u32,
    lost: u32,
}

/// One sender's window.
#[derive(Clone, Copy, Debug)]
pub struct Delay {
    params: DelayParams,
    /// The queue pair's own window, in units.
    most: u64,
    packet_bytes: u64,
    window: u64,
    mode: Mode,
    /// Since when, drains aside, and how often it was [`Mode::Compete`].
    since: Time,
    competitions: u64,
    /// The delay of the path without a queue.
    base: Option<Duration>,
    smoothed: Duration,
    round: Round,
    /// The smallest delay of the round before.
    previous: Option<Duration>,
    /// Rounds above the target, one after the other, and the window before them.
    high_rounds: u32,
    window_before: u64,
    losses: Losses,
    /// When the next drain begins.
    drain_at: Time,
    /// Drains since the base was last confirmed, and the smallest delay of them.
    drains: u32,
    least_drained: Duration,
    cubic: Cubic,
}

impl Delay {
    /// A sender of packets of `packet_bytes` with at most `window_packets` in flight.
    pub fn new(params: DelayParams, packet_bytes: u32, window_packets: u32) -> Delay {
        let most = u64::from(window_packets.max(1)) * ONE;
        Delay {
            params,
            most,
            packet_bytes: packet_bytes.into(),
            window: most.min(FIRST_PACKETS * ONE),
            mode: Mode::Start,
            since: Time::ZERO,
            competitions: 0,
            base: None,
            smoothed: Duration::ZERO,
            round: Round::default(),
            previous: None,
            high_rounds: 0,
            window_before: 0,
            losses: Losses::default(),
            drain_at: Time::ZERO,
            drains: 0,
            least_drained: Duration::ZERO,
            cubic: Cubic::default(),
        }
    }

    /// What the window follows now.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Its present state.
    pub fn report(&self) -> WindowReport {
        let (window, is_draining) = match self.mode {
            Mode::Drain { window, .. } => (window, true),
            _ => (self.window, false),
        };
        WindowReport {
            window_millipackets: window * 1_000 / ONE,
            follows: self.mode.follows(),
            since: self.since,
            is_draining,
            base: self.base,
            smoothed: self.base.map(|_| self.smoothed),
            competitions: self.competitions,
        }
    }

    /// Times that it began to follow losses.
    pub fn competitions(&self) -> u64 {
        self.competitions
    }

    /// The delay of the path without a queue, as far as it is known.
    pub fn base(&self) -> Option<Duration> {
        self.base
    }

    fn handle_acknowledged(
        &mut self,
        now: Time,
        packets: u32,
        in_flight: u32,
        rtt: Option<Duration>,
    ) {
        self.losses.delivered = self.losses.delivered.saturating_add(packets);
        // An application that sends little proves nothing about a larger window.
        let in_use = u64::from(in_flight.saturating_add(packets)) * ONE;
        self.round.is_full |= in_use >= self.window / 2;
        if let Some(rtt) = rtt {
            self.sample(now, rtt);
        }
        match self.mode {
            Mode::Start if self.round.is_full => self.grow(u64::from(packets) * ONE),
            Mode::Compete if self.round.is_full && self.cubic.peak == 0 => {
                self.grow(u64::from(packets) * ONE);
            }
            Mode::Compete if self.round.is_full => {
                let wanted = self.cubic.window(now, self.smoothed);
                let step = u64::from(packets) * ONE / 2;
                self.grow(wanted.saturating_sub(self.window).min(step));
            }
            _ => {}
        }
        if now >= self.drain_at && matches!(self.mode, Mode::Delay | Mode::Compete) {
            self.begin_drain(now);
        }
        if now >= self.round.end
            && let Some(rtt) = self.round.min_rtt
        {
            self.end_round(now, rtt);
        }
    }

    fn sample(&mut self, now: Time, rtt: Duration) {
        if self.base.is_none() {
            (self.smoothed, self.since) = (rtt, now);
            self.round.end = now + rtt;
        }
        self.base = Some(self.base.map_or(rtt, |base| base.min(rtt)));
        let mixed = self.smoothed.as_nanos() - self.smoothed.as_nanos() / 8 + rtt.as_nanos() / 8;
        self.smoothed = Duration::from_nanos(mixed);
        self.round.min_rtt = Some(self.round.min_rtt.map_or(rtt, |least| least.min(rtt)));
    }

    fn grow(&mut self, by: u64) {
        self.window = (self.window + by).min(self.most);
    }

    fn shrink_to(&mut self, window: u64) {
        self.window = self.window.min(window.max(LEAST));
    }

    /// The part of `window` that fills the path and the target when all of it takes `rtt`.
    fn fitting(&self, window: u64, rtt: Duration) -> u64 {
        let fits = self.base.unwrap_or_default().as_nanos() + self.params.target.as_nanos();
        (u128::from(window) * u128::from(fits) / u128::from(rtt.as_nanos().max(fits).max(1))) as u64
    }

    /// A round trip is over; `least` is its smallest delay. The process of either end may have been off
    /// its processor for a whole round, so what counts is the smaller one of two rounds.
    fn end_round(&mut self, now: Time, least: Duration) {
        let rtt = self.previous.map_or(least, |previous| previous.min(least));
        let queue = Duration::from_nanos(
            rtt.as_nanos().saturating_sub(self.base.unwrap_or_default().as_nanos()),
        );
        let target = self.params.target;
        let Round { is_full, .. } = self.round;
        self.previous = Some(least);
        self.round = Round { end: now + least, ..Round::default() };
        match self.mode {
            Mode::Start => {
                if queue.as_nanos() > target.as_nanos() / 2 {
                    self.shrink_to(self.fitting(self.window, least));
                    self.enter(now, Mode::Delay);
                }
            }
            Mode::Delay if queue > target => self.back_off(now, queue),
            Mode::Delay => {
                self.high_rounds = 0;
                match is_full {
                    true if queue.as_nanos() < target.as_nanos() / 4 => {
                        self.grow(self.window / 8 + ONE);
                    }
                    true => self.grow(ONE),
                    false => {}
                }
            }
            Mode::Drain { until, least: before, .. } => {
                let least = before.min(least);
                match &mut self.mode {
                    Mode::Drain { least: kept, .. } if now < until => *kept = least,
                    _ => self.end_drain(now, least),
                }
            }
            Mode::Compete => {}
        }
    }

    fn enter(&mut self, now: Time, mode: Mode) {
        let before = self.mode.follows();
        (self.mode, self.high_rounds, self.previous) = (mode, 0, None);
        if mode.follows() != before {
            self.since = now;
            self.competitions += u64::from(mode == Mode::Compete);
        }
        self.plan_drain(now, self.smoothed * PERIOD_ROUNDS);
    }

    // ---- delay ---------------------------------------------------------------------------------

    /// The queue is longer than the target: cuts by 0.8 of the excess, at most by half.
    fn back_off(&mut self, now: Time, queue: Duration) {
        let target = self.params.target.as_nanos();
        let long = queue.as_nanos() > target + target / 2;
        if self.high_rounds == 0 {
            self.window_before = self.window;
        }
        self.high_rounds = if long { self.high_rounds.saturating_add(1) } else { 0 };
        if self.high_rounds == PATIENCE {
            // Whose queue this is should be known soon.
            self.plan_drain(now, Duration::ZERO);
        }
        let excess = u128::from(queue.as_nanos() - target) * 4 / 5;
        let cut = u128::from(self.window) * excess / u128::from(queue.as_nanos().max(1));
        self.shrink_to((self.window - (cut as u64).min(self.window / 2)).max(ONE));
    }

    // ---- drains --------------------------------------------------------------------------------

    /// The next drain begins with the next period that is at least that long.
    fn plan_drain(&mut self, now: Time, least: Duration) {
        let mut period = PERIOD_NS;
        while period < least.as_nanos().min(MAX_PERIOD_NS) {
            period *= 2;
        }
        self.drain_at = Time::from_nanos((now.as_nanos() / period + 1) * period);
    }

    fn begin_drain(&mut self, now: Time) {
        let (window, rtt, competes) = (self.window, self.smoothed, self.mode == Mode::Compete);
        // One that has little to send, or comes late, would see the queues of its neighbours.
        if !self.round.is_full || now.since(self.drain_at) > rtt * 2 {
            self.plan_drain(now, rtt * PERIOD_ROUNDS);
            return;
        }
        self.mode = Mode::Drain { until: now + rtt * 3, window, rtt, least: rtt, competes };
        self.round = Round { end: now + rtt, ..Round::default() };
        self.shrink_to(DRAINED);
    }

    /// `least` is the delay of the path and of the queue of others, as long as they kept it: neighbours
    /// that drain, too, are not always in step.
    fn end_drain(&mut self, now: Time, least: Duration) {
        let Mode::Drain { window, rtt, competes, .. } = self.mode else {
            return;
        };
        self.window = window;
        self.confirm_base(least);
        let base = self.base.unwrap_or(least);
        let is_ours = least.as_nanos() <= base.as_nanos() + self.params.target.as_nanos() / 2;
        let high_rounds = self.high_rounds;
        match competes {
            true if is_ours => {
                self.shrink_to(self.fitting(window, rtt));
                self.enter(now, Mode::Delay);
            }
            true => self.enter(now, Mode::Compete),
            false if !is_ours && high_rounds >= PATIENCE => {
                self.window = self.window_before.max(window).max(ONE);
                self.cubic = Cubic::default();
                self.enter(now, Mode::Compete);
            }
            false => {
                self.enter(now, Mode::Delay);
                self.high_rounds = if is_ours { 0 } else { high_rounds };
            }
        }
    }

    /// The base only falls, unless no drain gets near it for a long time.
    fn confirm_base(&mut self, drained: Duration) {
        let base = self.base.unwrap_or(drained);
        if drained.as_nanos() <= base.as_nanos() + self.params.target.as_nanos() / 8 {
            self.drains = 0;
            return;
        }
        self.least_drained =
            if self.drains == 0 { drained } else { self.least_drained.min(drained) };
        self.drains += 1;
        if self.drains == FORGET_AFTER {
            (self.base, self.drains) = (Some(self.least_drained), 0);
        }
    }

    // ---- losses --------------------------------------------------------------------------------

    /// Whether what was lost was lost to a queue.
    fn is_congestion(&mut self) -> bool {
        if matches!(self.mode, Mode::Compete | Mode::Drain { competes: true, .. }) {
            return true;
        }
        let target = self.params.target.as_nanos();
        let base = self.base.unwrap_or_default().as_nanos();
        if self.smoothed.as_nanos() > base + target / 2 {
            return true;
        }
        let Losses { delivered, lost } = self.losses;
        if delivered.saturating_add(lost) < LOSS_SAMPLE {
            return false;
        }
        self.losses = Losses::default();
        lost >= delivered / LOSS_SHARE
    }

    fn handle_lost(&mut self, now: Time, packets: u32) {
        self.losses.lost = self.losses.lost.saturating_add(packets);
        if self.is_congestion() {
            self.cut(now);
        }
    }

    /// To seven tenths, once per round trip.
    fn cut(&mut self, now: Time) {
        if core::mem::replace(&mut self.round.is_cut, true) {
            return;
        }
        match &mut self.mode {
            Mode::Drain { window, competes, .. } => {
                if *competes {
                    self.cubic.cut(now, *window);
                }
                *window = (*window * 7 / 10).max(LEAST);
            }
            Mode::Compete => {
                self.cubic.cut(now, self.window);
                self.shrink_to(self.window * 7 / 10);
            }
            Mode::Delay => self.shrink_to(self.window * 7 / 10),
            Mode::Start => {
                self.shrink_to(self.window * 7 / 10);
                self.enter(now, Mode::Delay);
            }
        }
    }

    fn handle_timed_out(&mut self, now: Time) {
        self.shrink_to((self.window / 2).max(ONE));
        match self.mode {
            Mode::Start => self.enter(now, Mode::Delay),
            Mode::Compete => self.cubic.cut(now, self.window),
            _ => {}
        }
    }
}

impl Controller for Delay {
    fn handle(&mut self, now: Time, event: Event) {
        match event {
            Event::Acknowledged { packets, in_flight, rtt } => {
                self.handle_acknowledged(now, packets, in_flight, rtt);
            }
            Event::Lost { packets } => self.handle_lost(now, packets),
            Event::Notified => self.cut(now),
            Event::TimedOut => self.handle_timed_out(now),
            Event::Sent { .. } | Event::Timer => {}
        }
    }

    fn limits(&self) -> Limits {
        if self.window >= self.most {
            return Limits::default();
        }
        let rate_bps = (self.window < ONE).then(|| {
            let bits = u128::from(self.packet_bytes) * 8 * u128::from(self.window);
            let per_round = bits * 1_000_000_000 / u128::from(ONE);
            (per_round / u128::from(self.smoothed.as_nanos().max(1))).max(1) as u64
        });
        let window_packets = NonZeroU32::new((self.window / ONE) as u32).or(NonZeroU32::new(1));
        Limits { rate_bps, window_packets }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }
}

/// The window of CUBIC since its last cut (RFC 9438), and at least that of Reno.
#[derive(Clone, Copy, Debug, Default)]
struct Cubic {
    /// The window before the cut, to which it returns.
    peak: u64,
    /// The window after it.
    floor: u64,
    begin: Time,
    /// Milliseconds until it is back at the peak.
    return_ms: u64,
}

impl Cubic {
    fn cut(&mut self, now: Time, window: u64) {
        // Fast convergence: others have come, so they get more.
        self.peak = if window < self.peak { window * 17 / 20 } else { window };
        self.floor = window * 7 / 10;
        self.begin = now;
        // K = cbrt((peak - floor) / 0.4) seconds.
        let cube_s = u128::from(self.peak.saturating_sub(self.floor)) * 5 / 2;
        self.return_ms = cube_root(cube_s * 1_000_000_000 / u128::from(ONE));
    }

    fn window(&self, now: Time, rtt: Duration) -> u64 {
        let elapsed = now.since(self.begin);
        let away_ms = i128::from(elapsed.as_nanos() / 1_000_000) - i128::from(self.return_ms);
        let away_ms = away_ms.clamp(-1_000_000, 1_000_000);
        // 0.4 packets per second cubed.
        let offset = away_ms * away_ms * away_ms * 2 * i128::from(ONE) / 5_000_000_000;
        let cubic = (i128::from(self.peak) + offset).max(0) as u64;
        // 3 * 0.3 / 1.7 packets per round trip.
        let rounds = u128::from(elapsed.as_nanos()) * u128::from(ONE) * 9
            / (17 * u128::from(rtt.as_nanos().max(1)));
        cubic.max(self.floor.saturating_add(rounds.min(u64::MAX.into()) as u64))
    }
}

/// The largest integer whose cube does not exceed `value`.
fn cube_root(value: u128) -> u64 {
    let (mut low, mut high) = (0u64, 1 << 32);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        let cube = u128::from(middle).pow(3);
        if cube <= value { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn at(micros: u64) -> Time {
        Time::from_nanos(micros * 1_000)
    }

    fn acknowledged(rtt_us: u64) -> Event {
        let rtt = Some(Duration::from_micros(rtt_us));
        Event::Acknowledged { packets: 8, in_flight: 600, rtt }
    }

    /// In packets; `None` for the queue pair's own.
    fn window(delay: &Delay) -> Option<u32> {
        delay.limits().window_packets.map(NonZeroU32::get)
    }

    #[test]
    fn without_a_queue_the_window_opens_and_stays_open() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        assert_eq!(window(&delay), Some(32));
        for round in 0..10_000 {
            delay.handle(at(round * 400), acknowledged(400));
            delay.handle(at(round * 400), Event::Lost { packets: u32::from(round % 10 == 0) });
        }
        assert_eq!(window(&delay), None);
    }

    #[test]
    fn a_queue_above_the_target_cuts_the_window_and_one_below_opens_it() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        (0..100).for_each(|round| delay.handle(at(round * 100), acknowledged(100)));
        (0..40).for_each(|round| delay.handle(at(10_000 + round * 5_000), acknowledged(5_000)));
        let low = window(&delay).unwrap();
        assert!(low <= 8, "{low}");
        (0..8).for_each(|round| delay.handle(at(250_000 + round * 1_500), acknowledged(1_500)));
        assert!((low + 4..=low + 8).contains(&window(&delay).unwrap()));
        assert_eq!(delay.base(), Some(Duration::from_micros(100)));
    }

    /// A queue that stays however little is sent is that of others: the report says so, from then on.
    #[test]
    fn the_report_tells_what_the_window_follows_and_since_when() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let fresh = delay.report();
        assert_eq!((fresh.follows, fresh.base, fresh.competitions), (Follows::Nothing, None, 0));
        (0..100).for_each(|round| delay.handle(at(round * 1_000), acknowledged(1_000)));
        assert_eq!(delay.report().follows, Follows::Nothing);
        let (mut seen, mut changed) = (Follows::Nothing, Vec::new());
        for round in 10..1_000 {
            delay.handle(at(round * 10_000), acknowledged(10_000));
            let report = delay.report();
            if report.follows != seen {
                assert_eq!(report.since, at(round * 10_000), "{report:?}");
                changed.push(report.follows);
            }
            seen = report.follows;
        }
        assert_eq!(changed, [Follows::Delay, Follows::Losses]);
        let report = delay.report();
        assert_eq!((report.competitions, delay.competitions()), (1, 1));
        assert_eq!(report.base, Some(Duration::from_micros(1_000)));
        assert!(report.queue() > Duration::from_millis(8), "{report:?}");
        // Now without others: it follows the delay again, and does not count that.
        for round in 5_000..10_000 {
            delay.handle(at(round * 2_000), acknowledged(1_000));
        }
        assert_eq!((delay.report().follows, delay.competitions()), (Follows::Delay, 1));
    }

    #[test]
    fn less_than_a_packet_is_paced() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_000, 512);
        for round in 0..100 {
            delay.handle(at(round * 1_000), acknowledged(1_000));
            delay.handle(at(round * 1_000), Event::TimedOut);
            delay.handle(at(round * 1_000), Event::Notified);
        }
        let limits = delay.limits();
        assert_eq!(limits.window_packets, NonZeroU32::new(1));
        // A sixteenth of 8,000 bits in each millisecond.
        assert!(
            limits.rate_bps.is_some_and(|bps| (400_000..6_000_000).contains(&bps)),
            "{limits:?}"
        );
    }

    #[test]
    fn no_sequence_of_events_stops_it_or_overflows() {
        for seed in 1..200u64 {
            let mut state = seed;
            // SplitMix64's increment and xorshift are random enough here.
            let mut next = || {
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 1
            };
            let mut delay = Delay::new(DelayParams::DEFAULT, 4_140, next() as u32);
            let mut now = 0u64;
            for _ in 0..400 {
                now = now.saturating_add(next() >> (next() % 64)).min(1 << 62);
                let rtt = Duration::from_nanos(next() >> (2 + next() % 61));
                let (packets, in_flight) = (next() as u32, next() as u32);
                let event = match next() % 5 {
                    0 => Event::Lost { packets },
                    1 => Event::TimedOut,
                    2 => Event::Notified,
                    _ => Event::Acknowledged { packets, in_flight, rtt: Some(rtt) },
                };
                delay.handle(Time::from_nanos(now), event);
                assert_ne!(delay.limits().rate_bps, Some(0), "seed {seed}");
            }
        }
    }

    #[test]
    fn cube_roots_are_rounded_down() {
        for (value, root) in [(0, 0), (1, 1), (7, 1), (8, 2), (26, 2), (27, 3), (1 << 90, 1 << 30)]
        {
            assert_eq!(cube_root(value), root);
        }
    }
}
