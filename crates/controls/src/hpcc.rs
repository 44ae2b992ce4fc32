//! HPCC (Li et al., SIGCOMM 2019): a window and a rate from what switches report.
//!
//! Every acknowledgement carries the [`Report`] of a data packet: for each link on its way the
//! bytes that had been sent, the time, and the queue. Two reports give the utilization of each
//! link,
//!
//! ```text
//! U = min(queue now, queue before) / (B * T) + (bytes sent between) / (B * time between)
//! ```
//!
//! with the link's rate B and the path's round-trip time T without queues. The highest one enters a
//! mean over T. The window becomes that of the round trip before, times eta / U, plus a constant;
//! where U is below eta, it only grows by the constant, `max_stage` times in a row at most. The
//! rate is the window over T.
//!
//! The authors' erratum: `maxStage = 5` in the paper is a mistake, and their simulations used 0.
//!
//! HPCC-PINT (Ben Basat et al., SIGCOMM 2020) is the same with [digests](roce::wire::digest): each
//! switch keeps the mean utilization of its links over T, the packet brings that of the busiest one
//! in a byte, and the sender takes it as it is. Not every packet needs to carry one; a round trip
//! then ends with the first digest after it.

use roce::congestion::{Controller, Event, Limits, window_of};
use roce::wire::digest::ONE;
use roce::wire::telemetry::{Form, Hop, Report};
use roce::{Duration, Time};

use crate::rounds::Rounds;
use crate::scaled;

const MBIT: u64 = 1_000_000;

/// Parameters of HPCC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HpccParams {
    /// The link's rate: the initial and the maximum rate of a queue pair.
    pub line_bps: u64,
    /// The minimum rate.
    pub min_bps: u64,
    /// T: slightly more than the longest round-trip time of the network without queues.
    pub base_rtt: Duration,
    /// Eta: the utilization aimed at, in thousandths.
    pub target_per_mille: u32,
    /// Increases in a row that do not look at the utilization.
    pub max_stage: u32,
    /// What each update adds to the rate (W_AI / T).
    pub additive_bps: u64,
    /// What switches report.
    pub telemetry: Form,
    /// One of so many data packets carries the header: 1 for all of them.
    pub sample_one_in: u32,
}

impl HpccParams {
    /// On a link of `line_bps`, with the settings of the published simulations.
    pub const fn new(line_bps: u64, base_rtt: Duration) -> HpccParams {
        HpccParams {
            line_bps,
            min_bps: scaled(100 * MBIT, line_bps),
            base_rtt,
            target_per_mille: 950,
            max_stage: 0,
            additive_bps: scaled(10 * MBIT, line_bps),
            telemetry: Form::Links,
            sample_one_in: 1,
        }
    }

    /// HPCC-PINT with the same settings; every packet carries a digest, as in the published
    /// simulations.
    pub const fn pint(line_bps: u64, base_rtt: Duration) -> HpccParams {
        HpccParams { telemetry: Form::Digest, ..HpccParams::new(line_bps, base_rtt) }
    }
}

/// One sender's rate and window.
#[derive(Clone, Copy, Debug)]
pub struct Hpcc {
    params: HpccParams,
    packet_bytes: u64,
    rate_bps: u64,
    /// The rate of the round trip before, from which updates start.
    reference_bps: u64,
    stage: u32,
    /// The mean utilization, in units of 1 / [`ONE`].
    utilization: u64,
    /// The report before.
    before: Option<(Time, Report)>,
    /// A report has come since the last acknowledgement, and has changed the utilization.
    is_heard: bool,
    is_fresh: bool,
    /// Packets acknowledged since the last report.
    unheard: u32,
    rounds: Rounds,
}

impl Hpcc {
    /// A sender at line rate, with packets of `packet_bytes`.
    pub fn new(params: HpccParams, packet_bytes: u32) -> Hpcc {
        Hpcc {
            params,
            packet_bytes: packet_bytes.max(1).into(),
            rate_bps: params.line_bps,
            reference_bps: params.line_bps,
            stage: 0,
            utilization: ONE,
            before: None,
            is_heard: false,
            is_fresh: false,
            unheard: 0,
            rounds: Rounds::default(),
        }
    }

    /// The rate at which the queue pair may send now.
    pub fn rate_bps(&self) -> u64 {
        self.rate_bps
    }

    /// The mean utilization of the busiest link in millionths.
    #[cfg(test)]
    fn utilization_ppm(&self) -> u64 {
        self.utilization.saturating_mul(1_000_000) / ONE
    }

    /// Takes a report, unless it is of the form that our packets do not collect.
    fn measure(&mut self, now: Time, report: &Report) {
        if report.form() != self.params.telemetry {
            return;
        }
        self.is_heard = true;
        let measured = match self.params.telemetry {
            Form::Links => self.compare(now, report),
            // The first one only begins a round trip, as the first report of links does.
            Form::Digest => {
                let before = self.before.replace((now, *report));
                before.and_then(|_| report.utilization())
            }
        };
        if let Some(utilization) = measured {
            self.utilization = utilization;
            self.is_fresh = true;
        }
    }

    /// The mean with what the busiest link did since the report before.
    fn compare(&mut self, now: Time, report: &Report) -> Option<u64> {
        let is_near = |at: Time| now.since(at).as_nanos() < Report::MAX_AGE_NS;
        let comparable =
            |(at, before): &(Time, Report)| is_near(*at) && before.is_same_path(report);
        let Some((_, before)) = self.before.filter(comparable) else {
            self.before = Some((now, *report));
            return None;
        };
        if report.is_older_than(&before) {
            return None;
        }
        self.before = Some((now, *report));
        let pairs = report.hops().zip(before.hops());
        let busiest = pairs.filter_map(|(now, before)| self.link_utilization(&now, &before));
        let (utilization, span) = busiest.max_by_key(|&(utilization, _)| utilization)?;
        let base = self.params.base_rtt.as_nanos().max(1);
        let span = span.min(base);
        let mixed = u128::from(self.utilization) * u128::from(base - span)
            + u128::from(utilization) * u128::from(span);
        Some(u64::try_from(mixed / u128::from(base)).unwrap_or(u64::MAX))
    }

    /// The utilization of one link between two reports, and the time between them in nanoseconds;
    /// none if they are of one moment.
    fn link_utilization(&self, now: &Hop, before: &Hop) -> Option<(u64, u64)> {
        let span = now.nanos_since(before);
        let bits = u128::from(now.bytes_since(before)) * 8;
        let line = u128::from(now.rate_bps());
        if span == 0 || line == 0 {
            return None;
        }
        let one = u128::from(ONE) * 1_000_000_000;
        let sent = bits * one / (u128::from(span) * line);
        let queue = u128::from(now.queue_bytes().min(before.queue_bytes())) * 8;
        let base = u128::from(self.params.base_rtt.as_nanos().max(1));
        let queued = queue * one / (base * line);
        Some((u64::try_from(sent + queued).unwrap_or(u64::MAX), span))
    }

    fn react(&mut self, is_round: bool) {
        let HpccParams { target_per_mille, max_stage, additive_bps, min_bps, line_bps, .. } =
            self.params;
        let target = u64::from(target_per_mille.max(1)) * ONE / 1_000;
        let adapts = self.utilization >= target || self.stage >= max_stage;
        let base = if adapts {
            let scaled = u128::from(self.reference_bps) * u128::from(target);
            u64::try_from(scaled / u128::from(self.utilization.max(1))).unwrap_or(u64::MAX)
        } else {
            self.reference_bps
        };
        self.rate_bps = base.saturating_add(additive_bps).min(line_bps).max(min_bps);
        if is_round {
            self.reference_bps = self.rate_bps;
            self.stage = if adapts { 0 } else { self.stage + 1 };
        }
    }
}

impl Controller for Hpcc {
    fn handle(&mut self, now: Time, event: Event<'_>) {
        match event {
            Event::Telemetry(report) => self.measure(now, report),
            Event::Acknowledged { packets, in_flight, .. } => {
                self.unheard = self.unheard.saturating_add(packets);
                if core::mem::take(&mut self.is_heard) {
                    let packets = core::mem::take(&mut self.unheard);
                    let is_round = self.rounds.acknowledged(packets, in_flight);
                    if core::mem::take(&mut self.is_fresh) {
                        self.react(is_round);
                    }
                }
            }
            Event::TimedOut => {
                self.rate_bps = (self.rate_bps / 2).max(self.params.min_bps);
                self.reference_bps = self.rate_bps;
            }
            Event::Lost { .. } | Event::Notified | Event::Sent { .. } | Event::Timer => {}
            Event::Advertised { .. } | Event::Watermark(_) | Event::Idle => {}
        }
    }

    fn limits(&self) -> Limits {
        let window = window_of(self.rate_bps, self.params.base_rtt, self.packet_bytes);
        Limits { rate_bps: Some(self.rate_bps), window_packets: Some(window) }
    }

    fn poll_timeout(&self) -> Option<Time> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const LINE: u64 = 25_000_000_000;
    const BASE: Duration = Duration::from_micros(24);

    fn sender(max_stage: u32) -> Hpcc {
        Hpcc::new(HpccParams { max_stage, ..HpccParams::new(LINE, BASE) }, 1_000)
    }

    /// A report of one link at `us` with so many bytes sent and queued.
    fn report(us: u64, sent: u64, queue: u64) -> Report {
        let mut report = Report::default();
        report.stamp(Hop::new(LINE, us.saturating_mul(1_000), sent, queue));
        report
    }

    fn acknowledge(sender: &mut Hpcc, report: &Report, in_flight: u32) {
        sender.handle(Time::ZERO, Event::Telemetry(report));
        sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight, rtt: None });
    }

    /// Bytes of the link in a time.
    fn line_bytes(us: u64) -> u64 {
        LINE / 8 * us / 1_000_000
    }

    #[test]
    fn utilization_is_rate_plus_queue() {
        let mut sender = sender(0);
        sender.measure(Time::ZERO, &report(100, 0, 50_000));
        // A whole T later: sent at 60 % of the line, and never less than 15,000 bytes queued, which
        // is 20 % of the 75,000 that the path holds.
        sender.measure(Time::ZERO, &report(124, line_bytes(24) * 6 / 10, 15_000));
        let got = sender.utilization_ppm();
        assert!((780_000..820_000).contains(&got), "{got}");
        // A quarter of T at 40 % takes a quarter of the mean.
        sender
            .measure(Time::ZERO, &report(130, line_bytes(24) * 6 / 10 + line_bytes(6) * 4 / 10, 0));
        let mean = sender.utilization_ppm();
        assert!((680_000..720_000).contains(&mean), "{mean}");
    }

    #[test]
    fn one_update_scales_the_rate_to_the_target() {
        let mut sender = sender(0);
        acknowledge(&mut sender, &report(0, 0, 75_000), 70);
        assert_eq!(sender.rate_bps(), LINE, "one report says nothing yet");
        // Full line and a queue of one product of bandwidth and delay: U is 2.
        acknowledge(&mut sender, &report(24, line_bytes(24), 75_000), 70);
        let expected = LINE as f64 * 0.95 / 2.0 + 10e6;
        assert!((sender.rate_bps() as f64 / expected - 1.0).abs() < 0.01, "{}", sender.rate_bps());
        // Updates within the round trip start from the same reference.
        acknowledge(&mut sender, &report(48, 2 * line_bytes(24), 75_000), 70);
        assert!((sender.rate_bps() as f64 / expected - 1.0).abs() < 0.01, "{}", sender.rate_bps());
        let window = sender.limits().window_packets.unwrap().get();
        assert!((34..=38).contains(&window), "{window}");
    }

    #[test]
    fn stages_add_without_a_look_at_the_utilization() {
        let mut sender = sender(3);
        (sender.rate_bps, sender.reference_bps) = (LINE / 100, LINE / 100);
        (sender.utilization, sender.is_fresh) = (ONE / 2, true);
        for stage in 1..=3 {
            sender.react(true);
            assert_eq!(sender.rate_bps(), LINE / 100 + stage * 10 * MBIT);
        }
        sender.react(true);
        // Half used, and the stages are over: almost twice the rate.
        assert!(sender.rate_bps() > LINE / 60 && sender.stage == 0);
    }

    #[test]
    fn reports_that_others_overtook_change_nothing() {
        let mut sender = sender(0);
        acknowledge(&mut sender, &report(100, line_bytes(100), 0), 4);
        acknowledge(&mut sender, &report(124, line_bytes(124), 0), 4);
        let rate = sender.rate_bps();
        acknowledge(&mut sender, &report(123, line_bytes(123), 0), 4);
        assert_eq!((sender.rate_bps(), sender.utilization_ppm() < 1_100_000), (rate, true));
        // The next one is compared with the latest.
        acknowledge(&mut sender, &report(148, line_bytes(148), 0), 4);
        assert!(sender.utilization_ppm() < 1_100_000, "{}", sender.utilization_ppm());
    }

    #[test]
    fn nothing_moves_without_reports_and_other_paths_start_anew() {
        let mut sender = sender(0);
        sender.handle(Time::ZERO, Event::Acknowledged { packets: 1, in_flight: 4, rtt: None });
        assert_eq!(sender.rate_bps(), LINE);
        acknowledge(&mut sender, &report(0, 0, 0), 4);
        let mut longer = report(10, 0, 1 << 20);
        longer.stamp(Hop::new(LINE, 0, 0, 1 << 20));
        acknowledge(&mut sender, &longer, 4);
        assert_eq!(sender.rate_bps(), LINE);
        for hops in [Report::default(), report(0, u64::MAX, u64::MAX), report(u64::MAX >> 14, 0, 0)]
        {
            acknowledge(&mut sender, &hops, 4);
            assert!((100 * MBIT..=LINE).contains(&sender.rate_bps()));
        }
        sender.handle(Time::ZERO, Event::TimedOut);
        assert!(sender.rate_bps() < LINE);
    }

    /// A digest of a link that is used so many percent.
    fn digest(percent: u64, random: u16) -> Report {
        let mut report = Report::empty(Form::Digest);
        report.raise(ONE * percent / 100, random);
        report
    }

    #[test]
    fn digests_move_the_rate_as_reports_of_links_do() {
        let mut sender = Hpcc::new(HpccParams::pint(LINE, BASE), 1_000);
        acknowledge(&mut sender, &digest(200, 0), 70);
        assert_eq!(sender.rate_bps(), LINE, "one digest begins the round trip");
        acknowledge(&mut sender, &digest(200, 0), 70);
        let expected = LINE as f64 * 0.95 / 2.0 + 10e6;
        assert!((sender.rate_bps() as f64 / expected - 1.0).abs() < 0.06, "{}", sender.rate_bps());
        // Nothing that it has to say.
        let rate = sender.rate_bps();
        for other in [Report::empty(Form::Digest), report(24, 0, 1 << 20)] {
            acknowledge(&mut sender, &other, 70);
            assert_eq!(sender.rate_bps(), rate);
        }
        for random in [0, u16::MAX] {
            acknowledge(&mut sender, &digest(u64::MAX >> 21, random), 70);
            assert_eq!(sender.rate_bps(), 100 * MBIT);
            acknowledge(&mut sender, &digest(0, random), 70);
            assert_eq!(sender.rate_bps(), LINE);
        }
    }

    /// A peer returns what it received. One that returns something else hides nothing.
    #[test]
    fn reports_of_the_other_form_are_as_if_none_had_come() {
        let base = || HpccParams::new(LINE, BASE);
        for (params, other) in
            [(base(), digest(1, 0)), (HpccParams::pint(LINE, BASE), report(1, 0, 1 << 20))]
        {
            let rates = |mixes: bool| {
                let mut sender = Hpcc::new(params, 1_000);
                let step = |us: u64| {
                    let own = match params.telemetry {
                        Form::Links => report(us, line_bytes(us), 75_000),
                        Form::Digest => digest(200, 0),
                    };
                    if mixes {
                        acknowledge(&mut sender, &other, 70);
                    } else {
                        let silent = Event::Acknowledged { packets: 1, in_flight: 70, rtt: None };
                        sender.handle(Time::ZERO, silent);
                    }
                    acknowledge(&mut sender, &own, 70);
                    sender.rate_bps()
                };
                (0..8).map(|round| 24 * round).map(step).collect::<Vec<u64>>()
            };
            assert_eq!(rates(true), rates(false), "{:?}", params.telemetry);
        }
    }

    #[test]
    fn on_the_slowest_links_senders_recover() {
        for line in [1, 50, 249, 2_499] {
            let mut sender = Hpcc::new(HpccParams::pint(line, BASE), 1_000);
            (0..9).for_each(|_| acknowledge(&mut sender, &digest(u64::MAX >> 21, 0), 0));
            assert!((1..=line).contains(&sender.rate_bps()), "{line}");
            (0..9).for_each(|_| acknowledge(&mut sender, &digest(0, 0), 0));
            assert_eq!(sender.rate_bps(), line);
        }
    }

    #[test]
    fn a_round_trip_of_samples_ends_with_a_sample() {
        let mut sender = Hpcc::new(HpccParams::pint(LINE, BASE), 1_000);
        let silent = Event::Acknowledged { packets: 1, in_flight: 16, rtt: None };
        acknowledge(&mut sender, &digest(95, 0), 16);
        // Seventeen packets later a round trip is over, but only the next digest says so.
        (0..20).for_each(|_| sender.handle(Time::ZERO, silent));
        assert_eq!(sender.reference_bps, LINE);
        acknowledge(&mut sender, &digest(190, 0), 16);
        assert!(sender.reference_bps < LINE * 6 / 10, "{}", sender.reference_bps);
        // It begins another one.
        let reference = sender.reference_bps;
        (0..8).for_each(|_| sender.handle(Time::ZERO, silent));
        acknowledge(&mut sender, &digest(190, 0), 16);
        assert_eq!(sender.reference_bps, reference);
        assert!(sender.rate_bps() < reference);
    }
}
