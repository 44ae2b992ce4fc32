//! `dquant sim goodput`: one stream over a link that loses packets, go-back-N and selective repeat
//! side by side.

use std::fmt;

use clap::Args;
use lab::units;
use roce::Duration;
use roce::endpoint::Reliability;
use serde::Serialize;
use sim::goodput::{self, Goodput, GoodputConfig};
use sim::link::LinkConfig;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Loss rates measured by default, in parts per million.
const SWEEP_PPM: [u32; 6] = [100, 1_000, 5_000, 10_000, 20_000, 50_000];

/// Measure the goodput of one stream over a link that loses packets
///
/// WRITEs without pause in one direction; packets of both directions are lost at random. Goodput is
/// payload that arrived for good, per second of simulated time. Go-back-N and selective repeat are
/// measured side by side, each with its usual window, and compared with themselves without loss.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant sim goodput                           100 Gbit/s, 10 us, loss from 0.01 % to 5 %
  dquant sim goodput --loss 1% --delay 50us
  dquant sim goodput --loss 0.1% --gbit 25 --window 64 --json"
)]
pub(super) struct GoodputCommand {
    /// Loss to measure with, like 1% or 100ppm; may be given more than once
    #[arg(long, value_name = "SHARE", value_parser = units::fraction_ppm)]
    loss: Vec<u32>,

    /// Rate of the link in Gbit/s
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    gbit: u64,

    /// Propagation delay, each way
    #[arg(long, default_value = "10us", value_parser = units::duration)]
    delay: Duration,

    /// Most unacknowledged packets, instead of each mode's own
    #[arg(long, value_name = "PACKETS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    window: Option<u32>,

    /// Simulated time to measure
    #[arg(long, default_value = "20ms", value_parser = units::duration)]
    duration: Duration,

    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl GoodputCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let mut losses = if self.loss.is_empty() { SWEEP_PPM.to_vec() } else { self.loss.clone() };
        losses.retain(|&loss| loss > 0);
        losses.insert(0, 0);
        let mut modes = Vec::new();
        for reliability in [Reliability::GoBackN, Reliability::Selective] {
            console.progress(format_args!("{}", name(reliability)));
            modes.push(self.measure_mode(reliability, &losses)?);
        }
        console.report(&GoodputReport {
            gbit: self.gbit,
            delay_ns: self.delay.as_nanos(),
            duration_ns: self.duration.as_nanos(),
            seed: self.seed,
            modes,
        })?;
        Ok(Exit::Good)
    }

    fn measure_mode(&self, reliability: Reliability, losses: &[u32]) -> Result<Mode, CliError> {
        let bare = GoodputConfig::new(reliability, 0);
        let config = GoodputConfig {
            link: LinkConfig::new(self.gbit * 1_000_000_000, self.delay),
            window_packets: self.window.unwrap_or(bare.window_packets),
            span: self.duration,
            seed: self.seed,
            ..bare
        };
        let points = losses.iter().map(|&loss_ppm| {
            let got = goodput::measure(&GoodputConfig { loss_ppm, ..config });
            let got = got.map_err(|error| {
                CliError::check_failed(format_args!("{}: {error}", name(reliability)))
                    .hint("retries are few: try less loss or delay, or a smaller window")
            })?;
            Ok(Point::new(loss_ppm, &got))
        });
        let points = points.collect::<Result<Vec<Point>, CliError>>()?;
        Ok(Mode { name: name(reliability), window_packets: config.window_packets, points })
    }
}

fn name(reliability: Reliability) -> &'static str {
    match reliability {
        Reliability::GoBackN => "go-back-N",
        Reliability::Selective => "selective repeat",
    }
}

#[derive(Debug, Serialize)]
struct GoodputReport {
    gbit: u64,
    delay_ns: u64,
    duration_ns: u64,
    seed: u64,
    modes: Vec<Mode>,
}

#[derive(Debug, Serialize)]
struct Mode {
    name: &'static str,
    window_packets: u32,
    points: Vec<Point>,
}

#[derive(Debug, Serialize)]
struct Point {
    loss_ppm: u32,
    goodput_bps: u64,
    wire_bps: u64,
    packets: u64,
    retransmitted: u64,
    timeouts: u64,
}

impl Point {
    fn new(loss_ppm: u32, got: &Goodput) -> Point {
        let Goodput { goodput_bps, wire_bps, packets, retransmitted, timeouts, .. } = *got;
        Point { loss_ppm, goodput_bps, wire_bps, packets, retransmitted, timeouts }
    }
}

impl Report for GoodputReport {
    const SCHEMA: &'static str = "dquant.sim.goodput/1";
}

impl fmt::Display for GoodputReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [delay, duration] = [self.delay_ns, self.duration_ns].map(Duration::from_nanos);
        write!(
            f,
            "one stream of WRITEs, {} Gbit/s, {delay} each way, {duration} measured",
            self.gbit
        )?;
        for mode in &self.modes {
            write!(f, "\n{}, window {} packets", mode.name, mode.window_packets)?;
            write!(
                f,
                "\n  {:>8}{:>12}{:>14}{:>14}{:>15}",
                "loss", "goodput", "of loss-free", "packets", "retransmitted"
            )?;
            let clean = mode.points.first().map_or(1, |point| point.goodput_bps.max(1));
            for point in &mode.points {
                write_point(f, point, clean)?;
            }
            if mode.points.iter().any(|point| point.goodput_bps > clean) {
                write!(f, "\n{ABOVE_LOSS_FREE}")?;
            }
        }
        Ok(())
    }
}

const ABOVE_LOSS_FREE: &str = "\
  above 100 %: the window, not the link, limits the loss-free rate, and acknowledgements that losses
  provoke open the window sooner; compare with a larger --window";

fn write_point(f: &mut fmt::Formatter<'_>, point: &Point, clean: u64) -> fmt::Result {
    let loss = f64::from(point.loss_ppm) / 10_000.0;
    let gbit = point.goodput_bps as f64 / 1e9;
    let share = point.goodput_bps as f64 * 100.0 / clean as f64;
    let Point { packets, retransmitted, .. } = point;
    write!(f, "\n  {loss:>6.2} %{gbit:>7.1} Gb/s{share:>12.1} %{packets:>14}{retransmitted:>15}")
}
