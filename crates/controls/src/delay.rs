//! A window from losses, and from delay where that is enough.
//!
//! A sender that reacts to delay gets nothing beside one that fills the queue until it overflows,
//! as TCP CUBIC does. So the window follows losses, as that of CUBIC (RFC 9438), until measurements
//! show that the queue is nobody else's. From then on it follows the delay, in the manner of Swift
//! (Kumar et al., SIGCOMM 2020), until backing off no longer helps.
//!
//! | mode | the window follows | until |
//! |---|---|---|
//! | [`Mode::Start`] | doubling | delay or loss |
//! | [`Mode::Compete`] | loss, as CUBIC | two steps find the queue our own |
//! | [`Mode::Step`] | less, for a few round trips | they are over |
//! | [`Mode::Delay`] | delay | it has fallen to half and the queue remains |
//! | [`Mode::Drain`] | one packet for three round trips | they are over |
//!
//! A *step* tells whose queue it is: a window that is smaller by what we send in a time `t`
//! shortens the queue by `t` if all of it is ours, and by our share of `t` if not. This needs no
//! knowledge of the path's own delay, which a sender that came after others has never seen.
//!
//! A *drain* empties our part of the queue. What remains is the path's own delay: the base that
//! delays are compared with. Drains and steps begin at full periods of the clock, so that all queue
//! pairs of a machine make them together, measure what all of them have in the queue, and see the
//! path and not each other.
//!
//! In [`Mode::Delay`], the sender keeps the queue near a target: above it, the window is cut by how
//! far, at most by half and once per round trip; below it, the window grows by one packet per round
//! trip, or by an eighth while the queue is almost empty. Acknowledgements clock the packets. They
//! are paced only when the window is less than one packet.
//!
//! Loss alone is not congestion: links lose packets, too. It counts where the queue is long, where
//! much is lost, where others were found in the queue, and on a long path of which nothing is known
//! yet.
//!
//! Delays below a few hundred microseconds are the noise of a software endpoint. The target is far
//! above that, so this control acts on paths whose queue the window can fill for that long, and
//! leaves faster ones alone.

use core::num::NonZeroU32;

use roce::congestion::rtt::plausible;
use roce::congestion::{Controller, Event, Follows, Limits, WindowReport};
use roce::{Duration, Time};

use crate::cap::Cap;
use crate::first_packets;

/// One packet, in units of the window.
const ONE: u64 = 1 << 10;

/// The least window after losses. Delay alone never cuts it below one packet.
const LEAST: u64 = ONE / 16;

/// Steps, one after the other, that must find the queue our own.
const QUIET_STEPS: u32 = 2;

/// [`Mode::Delay`] may begin only every `cycle`-th period of the clock. A wrong decision doubles
/// `cycle`, so that disagreeing queue pairs of a machine start together; `TRUSTED_DRAINS` drains
/// reset it.
const FIRST_CYCLE: u64 = 2;
const MAX_CYCLE: u64 = 16;
const TRUSTED_DRAINS: u32 = 8;

/// Round trips above the target, one after the other, after which backing off must have helped.
const PATIENCE: u32 = 8;

/// The length of a step in round trips: one until the smaller window shows, the others to measure.
const STEP_ROUNDS: u32 = 3;

/// The window of a drain: with many queue pairs, more than a packet of each is a queue.
const DRAINED: u64 = ONE;

/// Time from drain to drain, a power of two of nanoseconds: about a second, and for long paths that
/// doubled until it has this many round trips.
const PERIOD_NS: u64 = 1 << 30;
const PERIOD_ROUNDS: u64 = 64;
const MAX_PERIOD_NS: u64 = 1 << 40;

/// After so many drains that all took longer, the path has become longer: the least of them is its
/// own delay.
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
    /// Losses.
    Compete,
    /// Less than losses allow, to see what that does to the queue.
    Step {
        /// The window before.
        window: u64,
        /// The delay before.
        rtt: Duration,
        /// By how much the delay falls if the queue is ours.
        expected: Duration,
        /// Round trips that are over.
        rounds: u32,
        /// When it ends without a result.
        deadline: Time,
    },
    /// The delay.
    Delay,
    /// A packet.
    Drain {
        /// When it ends.
        until: Time,
        /// When it ends without a result.
        deadline: Time,
        /// The window before.
        window: u64,
        /// The delay before.
        rtt: Duration,
        /// The smallest delay since it began.
        least: Duration,
        /// The mode after it is [`Mode::Compete`], or [`Mode::Delay`].
        competes: bool,
    },
}

impl Mode {
    fn follows(self) -> Follows {
        match self {
            Mode::Start => Follows::Nothing,
            Mode::Compete | Mode::Step { .. } | Mode::Drain { competes: true, .. } => {
                Follows::Losses
            }
            Mode::Delay | Mode::Drain { competes: false, .. } => Follows::Delay,
        }
    }
}

/// What was seen in one round trip.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    end: Time,
    min_rtt: Option<Duration>,
    /// The window limited the sender.
    is_full: bool,
}

/// A time in which nothing was heard, much longer than round trips are. A process was stopped at
/// one of the ends, so acknowledgements of what was sent before tell how long that was, and nothing
/// of the path.
#[derive(Clone, Copy, Debug)]
struct Silence {
    end: Time,
    length: Duration,
}

impl Silence {
    /// Whether what is acknowledged now, after `rtt`, was under way then.
    fn delayed(&self, now: Time, rtt: Duration) -> bool {
        now.since(self.end) < rtt && rtt.as_nanos() >= self.length.as_nanos() / 2
    }
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
    /// Since when, steps and drains aside, and how often [`Mode::Compete`] has followed
    /// [`Mode::Delay`].
    since: Time,
    competitions: u64,
    /// The delay of the path without a queue.
    base: Option<Duration>,
    smoothed: Duration,
    /// The longest of it that was seen lately.
    longest: Duration,
    latest: Duration,
    /// When an acknowledgement came last.
    heard: Time,
    silence: Option<Silence>,
    /// The last sample was much longer than others are.
    has_doubted: bool,
    round: Round,
    /// The smallest delay of the round before.
    previous: Option<Duration>,
    /// The largest window since the delay is followed, of rounds whose queue was below the target.
    peak: u64,
    /// Rounds above the target, one after the other.
    high_rounds: u32,
    /// The window before the delay was followed, to which it returns if that was soon found wrong.
    resume: u64,
    /// Steps, one after the other, that found the queue our own.
    quiet_steps: u32,
    /// Periods after which the delay may be followed.
    cycle: u64,
    /// Drains since the delay is followed, and the smallest delay of the last one.
    calm_drains: u32,
    drained: Duration,
    /// Whether the last step found others in the queue; `None` until something is known.
    has_others: Option<bool>,
    losses: Losses,
    /// Packets were lost in this step or drain. Whether that was congestion is better known after
    /// it.
    has_lost: bool,
    /// Losses before this time belong to the last cut.
    cut_until: Time,
    /// When the next step or drain begins, and nanoseconds between them.
    measure_at: Time,
    period: u64,
    /// Drains since the base was last confirmed, and the smallest delay of them.
    drains: u32,
    least_drained: Duration,
    cubic: Cubic,
    /// By watermarks, where a full buffer adds less than the target.
    cap: Cap,
}

impl Delay {
    /// A sender of packets of `packet_bytes` with at most `window_packets` in flight.
    pub fn new(params: DelayParams, packet_bytes: u32, window_packets: u32) -> Delay {
        let most = u64::from(window_packets.max(1)) * ONE;
        Delay {
            params,
            most,
            packet_bytes: packet_bytes.into(),
            window: most.min(u64::from(first_packets(packet_bytes)) * ONE),
            mode: Mode::Start,
            since: Time::ZERO,
            competitions: 0,
            base: None,
            smoothed: Duration::ZERO,
            longest: Duration::ZERO,
            latest: Duration::ZERO,
            heard: Time::ZERO,
            silence: None,
            has_doubted: false,
            round: Round::default(),
            previous: None,
            peak: 0,
            high_rounds: 0,
            resume: 0,
            quiet_steps: 0,
            cycle: FIRST_CYCLE,
            calm_drains: 0,
            drained: Duration::ZERO,
            has_others: None,
            losses: Losses::default(),
            has_lost: false,
            cut_until: Time::ZERO,
            measure_at: Time::ZERO,
            period: PERIOD_NS,
            drains: 0,
            least_drained: Duration::ZERO,
            cubic: Cubic::default(),
            cap: Cap::default(),
        }
    }

    /// What the window follows now.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Its present state.
    pub fn report(&self) -> WindowReport {
        let (window, is_draining) = match self.mode {
            Mode::Step { window, .. } | Mode::Drain { window, .. } => (window, true),
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

    /// Times that it went from the delay to losses.
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
        let elapsed = now.since(core::mem::replace(&mut self.heard, now));
        let rtt = rtt.filter(|&rtt| self.is_of_the_path(now, rtt, elapsed));
        // An application that sends little proves nothing about a larger window.
        let in_use = u64::from(in_flight.saturating_add(packets)) * ONE;
        self.round.is_full |= in_use >= self.window / 2;
        if self.round.is_full {
            // Cap the elapsed time: in longer gaps the sender was idle or stopped. Windows below
            // one packet have longer rounds.
            let most = self.smoothed * 2 * (ONE / self.window).max(1);
            self.cubic.elapsed = self.cubic.elapsed + elapsed.min(most);
        }
        if let Some(rtt) = rtt {
            self.sample(now, rtt);
        }
        match self.mode {
            Mode::Start if self.round.is_full => self.grow(u64::from(packets) * ONE),
            Mode::Compete if self.round.is_full => {
                let wanted = self.cubic.window(self.smoothed);
                // Less than a packet grows by less, or it would never be less.
                let step = if self.window < ONE { self.window / 8 } else { ONE / 2 };
                let step = u64::from(packets) * step;
                self.grow(wanted.saturating_sub(self.window).min(step));
            }
            _ => {}
        }
        if now >= self.measure_at {
            match self.mode {
                Mode::Compete => self.begin_step(now),
                Mode::Delay => self.begin_drain(now),
                Mode::Step { deadline, .. } | Mode::Drain { deadline, .. } => {
                    if now >= deadline {
                        self.abandon(now);
                    }
                }
                Mode::Start => {}
            }
        }
        if now >= self.round.end
            && let Some(rtt) = self.round.min_rtt
        {
            self.end_round(now, rtt);
        }
    }

    /// Whether a round-trip time is that of the path, and neither that of a packet that went astray
    /// nor that of a silence, which has just ended if nothing was heard for `elapsed`. A second one
    /// in a row is believed: the path may have become that long.
    fn is_of_the_path(&mut self, now: Time, rtt: Duration, elapsed: Duration) -> bool {
        let is_silence = plausible(elapsed, self.smoothed) < elapsed && self.base.is_some();
        if is_silence && self.silence.is_none() {
            self.silence = Some(Silence { end: now, length: elapsed });
        } else if is_silence || !self.silence.is_some_and(|silence| silence.delayed(now, rtt)) {
            self.silence = None;
        }
        let is_doubted = plausible(rtt, self.smoothed) < rtt && self.base.is_some();
        let was_doubted = core::mem::replace(&mut self.has_doubted, is_doubted);
        (was_doubted || !is_doubted)
            && !self.silence.is_some_and(|silence| silence.delayed(now, rtt))
    }

    fn sample(&mut self, now: Time, rtt: Duration) {
        let rtt = self.base.map_or(rtt, |_| plausible(rtt, self.smoothed));
        if self.base.is_none() {
            (self.smoothed, self.since) = (rtt, now);
            self.round.end = now + rtt;
        }
        self.base = Some(self.base.map_or(rtt, |base| base.min(rtt)));
        self.latest = rtt;
        let mixed = self.smoothed.as_nanos() - self.smoothed.as_nanos() / 8 + rtt.as_nanos() / 8;
        self.smoothed = Duration::from_nanos(mixed);
        // The first packets of a sender may have waited for more than the queue.
        if self.mode != Mode::Start {
            self.longest = self.longest.max(self.smoothed.min(rtt));
        }
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

    /// A round trip is over; `least` is its smallest delay. The process of either end may have been
    /// off its processor for a whole round, so what counts is the smaller one of two rounds.
    fn end_round(&mut self, now: Time, least: Duration) {
        let rtt = self.previous.map_or(least, |previous| previous.min(least));
        let queue = Duration::from_nanos(
            rtt.as_nanos().saturating_sub(self.base.unwrap_or_default().as_nanos()),
        );
        let Round { is_full, .. } = self.round;
        self.previous = Some(least);
        self.round = Round { end: now + self.latest, ..Round::default() };
        match self.mode {
            Mode::Start if queue.as_nanos() > self.params.target.as_nanos() / 2 => {
                self.shrink_to(self.fitting(self.window, least));
                self.compete(now);
            }
            Mode::Delay => self.follow_delay(now, queue, is_full),
            Mode::Step { .. } => self.continue_step(now, rtt),
            Mode::Drain { until, least: before, .. } => {
                let least = before.min(least);
                match &mut self.mode {
                    Mode::Drain { least: kept, .. } if now < until => *kept = least,
                    _ => self.end_drain(now, least),
                }
            }
            Mode::Start | Mode::Compete => {}
        }
    }

    fn enter(&mut self, now: Time, mode: Mode) {
        let before = self.mode.follows();
        (self.mode, self.previous) = (mode, None);
        if mode.follows() != before {
            self.since = now;
        }
        self.plan_measurement(now);
        if core::mem::take(&mut self.has_lost) && self.is_congestion() {
            self.cut(now);
        }
    }

    /// Follows losses from the present window on.
    fn compete(&mut self, now: Time) {
        self.cubic = Cubic::at(self.window);
        self.quiet_steps = 0;
        self.enter(now, Mode::Compete);
    }

    // ---- delay ---------------------------------------------------------------------------------

    fn follow_delay(&mut self, now: Time, queue: Duration, is_full: bool) {
        let target = self.params.target.as_nanos();
        if queue.as_nanos() > target {
            self.back_off(now, queue);
            return;
        }
        self.peak = self.peak.max(self.window);
        self.high_rounds = 0;
        match is_full {
            true if queue.as_nanos() < target / 4 => self.grow(self.window / 8 + ONE),
            true => self.grow(ONE),
            false => {}
        }
    }

    /// The queue is longer than the target: cuts by 0.8 of the excess, at most by half. Alone, a
    /// sender finds the target long before it has cut half of the window that kept it.
    fn back_off(&mut self, now: Time, queue: Duration) {
        let excess = u128::from(queue.as_nanos() - self.params.target.as_nanos()) * 4 / 5;
        let cut = u128::from(self.window) * excess / u128::from(queue.as_nanos().max(1));
        self.shrink_to((self.window - (cut as u64).min(self.window / 2)).max(ONE));
        self.high_rounds += 1;
        // With one packet of each, the queue is what it was in the drain, unless others fill it.
        let rtt = self.base.unwrap_or_default() + queue;
        let is_refilled = self.window <= ONE && rtt > self.drained + self.params.target;
        if self.high_rounds >= PATIENCE && (self.window < self.peak / 2 || is_refilled) {
            let is_early = self.calm_drains < TRUSTED_DRAINS;
            self.window = if is_early { self.peak.max(self.resume) } else { self.peak };
            self.competitions += 1;
            self.cycle = (self.cycle * 2).min(MAX_CYCLE);
            self.compete(now);
        }
    }

    // ---- steps and drains ----------------------------------------------------------------------

    /// The next one begins with the next period of the clock.
    fn plan_measurement(&mut self, now: Time) {
        let past = self.longest.as_nanos().saturating_sub(self.smoothed.as_nanos()) / 8;
        self.longest = Duration::from_nanos(self.longest.as_nanos() - past);
        let least = (self.smoothed * PERIOD_ROUNDS).as_nanos();
        self.period = least.clamp(PERIOD_NS, MAX_PERIOD_NS).next_power_of_two();
        self.measure_at = Time::from_nanos((now.as_nanos() / self.period + 1) * self.period);
    }

    /// Whether a measurement makes sense. One that has little to send, or comes late, would see the
    /// queues of its local peers.
    fn may_measure(&self, now: Time) -> bool {
        self.round.is_full && now.since(self.measure_at) <= self.smoothed * 2
    }

    /// Cuts the window by a third, which is more than the delay of the path if there is a queue to
    /// speak of. If there seems to be none, the base may be that of a queue: drains.
    fn begin_step(&mut self, now: Time) {
        if !self.may_measure(now) {
            self.plan_measurement(now);
            return;
        }
        let rtt = self.round.min_rtt.map_or(self.smoothed, |least| {
            self.previous.map_or(least, |previous| previous.min(least))
        });
        let queue = rtt.as_nanos().saturating_sub(self.base.unwrap_or_default().as_nanos());
        let expected = rtt.as_nanos() / 3;
        if queue < expected.max(self.params.target.as_nanos() / 2) {
            self.drain(now, self.smoothed, true);
            return;
        }
        let expected = Duration::from_nanos(expected);
        let deadline = now + self.smoothed * (2 * STEP_ROUNDS).into();
        self.mode = Mode::Step { window: self.window, rtt, expected, rounds: 0, deadline };
        self.round = Round { end: now + self.smoothed, ..Round::default() };
        self.shrink_to((self.window - self.window / 3).max(ONE));
    }

    fn continue_step(&mut self, now: Time, least: Duration) {
        let Mode::Step { window, rtt, expected, rounds, .. } = &mut self.mode else {
            return;
        };
        *rounds += 1;
        if *rounds < STEP_ROUNDS {
            if *rounds == 1 {
                self.previous = None;
            }
            return;
        }
        let (window, rtt, fallen) =
            (*window, *rtt, rtt.as_nanos().saturating_sub(least.as_nanos()));
        let is_ours = fallen >= expected.as_nanos() * 2 / 3;
        self.window = window;
        self.has_others = Some(!is_ours);
        self.quiet_steps = if is_ours { self.quiet_steps + 1 } else { 0 };
        let begins_cycle = self.measure_at.as_nanos().is_multiple_of(self.period * self.cycle);
        if self.quiet_steps < QUIET_STEPS || !begins_cycle {
            self.enter(now, Mode::Compete);
        } else {
            (self.calm_drains, self.high_rounds, self.resume) = (0, 0, window);
            self.drain(now, rtt, false);
        }
    }

    fn begin_drain(&mut self, now: Time) {
        if self.may_measure(now) {
            self.drain(now, self.smoothed, false);
        } else {
            self.plan_measurement(now);
        }
    }

    fn drain(&mut self, now: Time, rtt: Duration, competes: bool) {
        let (until, deadline) = (now + rtt * 3, now + rtt * 6);
        self.mode = Mode::Drain { until, deadline, window: self.window, rtt, least: rtt, competes };
        self.round = Round { end: now + rtt, ..Round::default() };
        self.shrink_to(DRAINED);
    }

    fn end_drain(&mut self, now: Time, least: Duration) {
        let Mode::Drain { window, rtt, competes, .. } = self.mode else {
            return;
        };
        self.window = window;
        self.confirm_base(least);
        if competes {
            self.has_others = Some(false);
            self.enter(now, Mode::Compete);
        } else {
            self.calm_drains += 1;
            if self.calm_drains == TRUSTED_DRAINS {
                self.cycle = FIRST_CYCLE;
            }
            self.drained = least;
            self.shrink_to(self.fitting(window, rtt).max(ONE));
            // In the middle of backing off, the window of before it is still what tells whether
            // that helps.
            if self.high_rounds == 0 {
                self.peak = self.window;
            }
            self.enter(now, Mode::Delay);
        }
    }

    /// Ends a step or drain without a result: the network asks for less, or all that arrived had
    /// been sent twice.
    fn abandon(&mut self, now: Time) {
        let (window, mode) = match self.mode {
            Mode::Step { window, .. } | Mode::Drain { window, competes: true, .. } => {
                (window, Mode::Compete)
            }
            Mode::Drain { window, competes: false, .. } => (window, Mode::Delay),
            Mode::Start | Mode::Compete | Mode::Delay => return,
        };
        self.window = window;
        self.enter(now, mode);
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
        let excess = |delay: Duration| {
            delay.as_nanos().saturating_sub(self.base.unwrap_or_default().as_nanos())
        };
        // A queue overflows when it is as long as it gets.
        let (now, longest) = (excess(self.smoothed), excess(self.longest));
        let least = self.params.target.as_nanos() / 2;
        let is_full = match self.has_others {
            // All of the delay may be that of a queue.
            None => self.smoothed.as_nanos() > least,
            Some(true) => now >= longest / 2,
            Some(false) => now > least && now >= longest / 4 * 3,
        };
        if is_full {
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
        if matches!(self.mode, Mode::Step { .. } | Mode::Drain { .. }) {
            self.has_lost = true;
        } else if self.is_congestion() {
            self.cut(now);
        }
    }

    /// To seven tenths, once for all packets that were in flight.
    fn cut(&mut self, now: Time) {
        if now < self.cut_until {
            return;
        }
        self.cut_until = now + Duration::from_nanos(self.smoothed.as_nanos() / 2 * 3);
        self.abandon(now);
        match self.mode {
            Mode::Compete => self.cubic.cut(self.window),
            Mode::Start => self.compete(now),
            _ => {}
        }
        self.shrink_to(self.window * 7 / 10);
    }

    fn handle_timed_out(&mut self, now: Time) {
        self.abandon(now);
        self.shrink_to((self.window / 2).max(ONE));
        match self.mode {
            Mode::Start => self.compete(now),
            Mode::Compete => self.cubic.cut(self.window),
            _ => {}
        }
    }
}

impl Controller for Delay {
    fn window_report(&self) -> Option<WindowReport> {
        Some(self.report())
    }

    fn competitions(&self) -> u64 {
        Delay::competitions(self)
    }

    fn handle(&mut self, now: Time, event: Event<'_>) {
        match event {
            Event::Acknowledged { packets, in_flight, rtt } => {
                self.cap.acknowledged(u64::from(packets) * self.packet_bytes);
                self.handle_acknowledged(now, packets, in_flight, rtt);
            }
            Event::Lost { packets } => {
                self.cap.lost();
                self.handle_lost(now, packets);
            }
            Event::Notified => {
                self.cap.notified(now);
                self.cut(now);
            }
            Event::TimedOut => {
                self.cap.lost();
                self.handle_timed_out(now);
            }
            Event::Watermark(watermark) => self.cap.hear(now, watermark),
            Event::Timer => self.cap.handle_timeout(now),
            Event::Sent { bytes } => self.cap.sent(bytes, self.packet_bytes),
            Event::Telemetry(_) => {}
            Event::Advertised { .. } | Event::Idle => {}
        }
    }

    fn limits(&self) -> Limits {
        if self.window >= self.most {
            return Limits { rate_bps: self.cap.rate_bps(), window_packets: None };
        }
        let rate_bps = (self.window < ONE).then(|| {
            let bits = u128::from(self.packet_bytes) * 8 * u128::from(self.window);
            let per_round = bits * 1_000_000_000 / u128::from(ONE);
            (per_round / u128::from(self.smoothed.as_nanos().max(1))).max(1) as u64
        });
        let window_packets = NonZeroU32::new((self.window / ONE) as u32).or(NonZeroU32::new(1));
        Limits { rate_bps: self.cap.limit(rate_bps), window_packets }
    }

    fn poll_timeout(&self) -> Option<Time> {
        self.cap.poll_timeout()
    }
}

/// The window of CUBIC since its last cut (RFC 9438), and at least that of Reno.
#[derive(Clone, Copy, Debug, Default)]
struct Cubic {
    /// The window before the cut, to which it returns.
    peak: u64,
    /// The window after it.
    floor: u64,
    /// The time since then in which the window limited the sender.
    elapsed: Duration,
    /// Milliseconds until it is back at the peak.
    return_ms: u64,
}

impl Cubic {
    /// As if it had returned to `window` now.
    fn at(window: u64) -> Cubic {
        Cubic { peak: window, floor: window, ..Cubic::default() }
    }

    fn cut(&mut self, window: u64) {
        // Fast convergence: others have come, so they get more.
        self.peak = if window < self.peak { window * 17 / 20 } else { window };
        self.floor = window * 7 / 10;
        self.elapsed = Duration::ZERO;
        // K = cbrt((peak - floor) / 0.4) seconds.
        let cube_s = u128::from(self.peak.saturating_sub(self.floor)) * 5 / 2;
        self.return_ms = cube_root(cube_s * 1_000_000_000 / u128::from(ONE));
    }

    fn window(&self, rtt: Duration) -> u64 {
        let elapsed = self.elapsed;
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
    use super::*;
    use std::format;

    fn at(micros: u64) -> Time {
        Time::from_nanos(micros * 1_000)
    }

    fn acknowledged(rtt_us: u64) -> Event<'static> {
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
        assert_eq!(window(&delay), Some(16));
        for round in 0..10_000 {
            delay.handle(at(round * 400), acknowledged(400));
            delay.handle(at(round * 400), Event::Lost { packets: u32::from(round % 10 == 0) });
        }
        assert_eq!(window(&delay), None);
    }

    /// Follows `rounds` round trips from `now` on, of a sender that always has something to send,
    /// through a queue from which `PER_MS` packets leave in a millisecond, and in which others keep
    /// `others`. Returns the time after them.
    fn drive(delay: &mut Delay, mut now: Time, rounds: u32, others: Duration) -> Time {
        for _ in 0..rounds {
            let in_flight = (delay.window / ONE).max(1);
            let rtt = BASE + others + Duration::from_micros(1_000 * in_flight / PER_MS);
            now += rtt;
            for _ in 0..4 {
                let (packets, in_flight) = ((in_flight / 4).max(1) as u32, in_flight as u32);
                delay.handle(now, Event::Acknowledged { packets, in_flight, rtt: Some(rtt) });
            }
        }
        now
    }

    const PER_MS: u64 = 20;
    const BASE: Duration = Duration::from_micros(100);

    fn is_near_the_target(delay: &Delay) -> bool {
        (1_000..3_000).contains(&(delay.report().queue().as_nanos() / 1_000))
    }

    /// A queue that stays however little is sent is that of others, one that follows the window our
    /// own: the report says so, from then on.
    #[test]
    fn it_competes_where_others_fill_the_queue_and_only_there() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let fresh = delay.report();
        assert_eq!((fresh.follows, fresh.base, fresh.competitions), (Follows::Nothing, None, 0));
        let now = drive(&mut delay, Time::ZERO, 5_000, Duration::ZERO);
        let alone = delay.report();
        assert_eq!((alone.follows, alone.competitions), (Follows::Delay, 0), "{alone:?}");
        assert!(alone.since < now && is_near_the_target(&delay), "{alone:?}");
        assert!(alone.base.is_some_and(|base| base < BASE + Duration::from_micros(200)));

        let now = drive(&mut delay, now, 100, Duration::from_millis(20));
        let beside = delay.report();
        assert_eq!((beside.follows, beside.competitions), (Follows::Losses, 1), "{beside:?}");
        assert!(beside.since > alone.since && beside.window_millipackets >= 20_000, "{beside:?}");
        let now = drive(&mut delay, now, 2_000, Duration::from_millis(20));
        assert_eq!((delay.report().since, delay.competitions()), (beside.since, 1));

        drive(&mut delay, now, 20_000, Duration::ZERO);
        assert_eq!((delay.report().follows, delay.competitions()), (Follows::Delay, 1));
        assert!(is_near_the_target(&delay), "{:?}", delay.report());
    }

    /// One that comes later takes the queue of others for the delay of the path.
    #[test]
    fn it_competes_with_others_that_came_first() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let now = drive(&mut delay, Time::ZERO, 3_000, Duration::from_millis(20));
        let report = delay.report();
        assert_eq!((report.follows, report.competitions), (Follows::Losses, 0), "{report:?}");
        assert!(report.window_millipackets > 200_000, "{report:?}");
        drive(&mut delay, now, 30_000, Duration::ZERO);
        assert_eq!(delay.report().follows, Follows::Delay, "{:?}", delay.report());
    }

    /// Acknowledgements of packets that were sent twice tell no delay, so nothing would end a
    /// measurement.
    #[test]
    fn a_measurement_without_measured_delays_ends() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let mut now = drive(&mut delay, Time::ZERO, 5_000, Duration::ZERO);
        let window = delay.report().window_millipackets;
        while !delay.report().is_draining {
            now = drive(&mut delay, now, 1, Duration::ZERO);
        }
        for _ in 0..20 {
            now += Duration::from_millis(1);
            delay.handle(now, Event::Acknowledged { packets: 1, in_flight: 1, rtt: None });
        }
        assert!(!delay.report().is_draining);
        assert!(delay.report().window_millipackets > window / 2);
    }

    /// One that competes with others, who keep 20 ms in the queue, some losses later.
    fn competing() -> (Delay, Time) {
        let mut delay = Delay::new(DelayParams::DEFAULT, 4_140, 512);
        let now = drive(&mut delay, Time::ZERO, 3, Duration::ZERO);
        let mut now = drive(&mut delay, now, 400, OTHERS);
        for _ in 0..8 {
            delay.handle(now, Event::Lost { packets: 1 });
            now = drive(&mut delay, now, 4, OTHERS);
        }
        assert_eq!(delay.report().follows, Follows::Losses);
        (delay, now)
    }

    const OTHERS: Duration = Duration::from_millis(20);

    /// CUBIC grows with time, of which that without anything to send is no part (RFC 9438, 5.8).
    #[test]
    fn time_in_which_little_is_sent_is_no_growth() {
        let after = |idle_ms: u64, in_flight: u32| {
            let (mut delay, mut now) = competing();
            let before = delay.report().window_millipackets;
            // It is idle, or sends a packet now and then.
            for _ in 0..10 {
                now += Duration::from_millis(idle_ms / 10);
                let rtt = Some(BASE + OTHERS);
                delay.handle(now, Event::Acknowledged { packets: in_flight, in_flight, rtt });
            }
            drive(&mut delay, now, 12, OTHERS);
            (before, delay.report().window_millipackets)
        };
        for idle_ms in [10_000, 30_000, 120_000, 10_000_000] {
            for in_flight in [0, 1] {
                let (before, window) = after(idle_ms, in_flight);
                assert!(window <= before + 12_000, "{idle_ms} ms: from {before} to {window}");
            }
        }
    }

    /// A process was stopped, at this end or the other, or a packet went astray: how late its
    /// acknowledgement is says nothing about the path.
    #[test]
    fn late_acknowledgements_postpone_nothing() {
        for (late_ms, packets, is_silent) in [5_000, 60_000]
            .into_iter()
            .flat_map(|late_ms| [(late_ms, 1, true), (late_ms, 1, false), (late_ms, 500, true)])
        {
            let (mut delay, mut now) = competing();
            let (window, usual) = (delay.report().window_millipackets, delay.smoothed);
            if is_silent {
                now += Duration::from_millis(late_ms);
            }
            let rtt = Some(Duration::from_millis(late_ms));
            for _ in 0..packets {
                delay.handle(now, Event::Acknowledged { packets: 1, in_flight: 100, rtt });
            }
            let case = format!("{packets} packets late by {late_ms} ms, silence {is_silent}");
            // A loss counts, although the queue was never as long as the delay of the late ones.
            now = drive(&mut delay, now, 4, OTHERS);
            delay.handle(now, Event::Lost { packets: 1 });
            assert!(delay.report().window_millipackets < window * 8 / 10, "{case}: no cut");
            let mut rounds = 0;
            while !delay.report().is_draining {
                now = drive(&mut delay, now, 1, OTHERS);
                rounds += 1;
                assert!(rounds < 2 * PERIOD_ROUNDS * 2, "{case}: no measurement");
            }
            assert!(delay.smoothed < usual * 2, "{case}: {}", delay.smoothed);
        }
    }

    /// Packets of one round trip are lost together, and count once.
    #[test]
    fn it_is_cut_once_per_round_trip() {
        let (mut delay, now) = competing();
        let window = delay.report().window_millipackets;
        let half = Duration::from_nanos(delay.smoothed.as_nanos() / 2);
        for at in [now, now + half, now + half * 2] {
            delay.handle(at, Event::Lost { packets: 3 });
            delay.handle(at, Event::Notified);
        }
        let cut = delay.report().window_millipackets;
        assert!((window * 6 / 10..=window * 7 / 10).contains(&cut), "from {window} to {cut}");
        delay.handle(now + half * 4, Event::Lost { packets: 1 });
        assert!(delay.report().window_millipackets <= cut * 7 / 10);
    }

    /// Links lose packets, too, but not a tenth: a short buffer drops before the delay tells.
    #[test]
    fn without_a_queue_only_many_losses_count() {
        for (lost, follows) in [(1, Follows::Nothing), (5, Follows::Losses)] {
            let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
            let mut now = Time::ZERO;
            for _ in 0..20 {
                now += BASE;
                let (packets, rtt) = (30, Some(BASE));
                delay.handle(now, Event::Acknowledged { packets, in_flight: 0, rtt });
                delay.handle(now, Event::Lost { packets: lost });
            }
            assert_eq!(delay.report().follows, follows, "{lost} of 30");
        }
    }

    /// An application that sends a packet per round trip proves nothing about a larger window,
    /// whatever the window follows.
    #[test]
    fn what_the_application_limits_does_not_grow() {
        let starting = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let mut following = starting;
        let now = drive(&mut following, Time::ZERO, 5_000, Duration::ZERO);
        let (competes, later) = competing();
        for (mut delay, now) in [(starting, Time::ZERO), (following, now), (competes, later)] {
            let follows = delay.report().follows;
            let one = Event::Acknowledged { packets: 1, in_flight: 0, rtt: Some(BASE) };
            // The round trip that has begun is still one that the window limited.
            let begun = now + delay.smoothed * 2;
            delay.handle(begun, one);
            let before = delay.report().window_millipackets;
            assert!(before >= 8_000 && window(&delay).is_some(), "{:?}", delay.report());
            for round in 0..10_000 {
                delay.handle(begun + BASE * round, one);
            }
            let after = delay.report();
            assert!(after.window_millipackets <= before, "{follows:?}: from {before}, {after:?}");
        }
    }

    /// From two packets backing off ends at one, which is no less than half. Where the queue is
    /// much longer than in the drain, others fill it, and it competes again.
    #[test]
    fn one_packet_is_no_trap() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_068, 512);
        let now = drive(&mut delay, Time::ZERO, 3, Duration::ZERO);
        (delay.mode, delay.window, delay.peak, delay.resume) = (Mode::Delay, ONE, ONE, 4 * ONE);
        delay.drained = BASE;
        let mut alike = Delay { drained: BASE + OTHERS, ..delay };
        drive(&mut delay, now, 10, OTHERS);
        assert_eq!((delay.report().follows, delay.competitions()), (Follows::Losses, 1));
        assert!(delay.window >= 4 * ONE, "{:?}", delay.report());
        // Many with one packet each have the queue that they have in a drain.
        drive(&mut alike, now, 10, OTHERS);
        assert_eq!((alike.report().follows, alike.window), (Follows::Delay, ONE));
    }

    /// A path that has become as long as that is believed in the end.
    #[test]
    fn a_path_that_has_become_long_is_measured() {
        let (mut delay, now) = competing();
        drive(&mut delay, now, 60, Duration::from_millis(2_000));
        assert!(delay.smoothed > Duration::from_millis(1_500), "{}", delay.smoothed);
    }

    #[test]
    fn less_than_a_packet_is_paced() {
        let mut delay = Delay::new(DelayParams::DEFAULT, 1_000, 512);
        for round in 0..100 {
            let rtt = Some(Duration::from_micros(1_000));
            let one = Event::Acknowledged { packets: 1, in_flight: 1, rtt };
            delay.handle(at(round * 1_000), one);
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
