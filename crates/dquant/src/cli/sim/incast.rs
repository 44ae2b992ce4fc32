//! `dquant sim incast`: many senders and one receiver behind one queue, under a named congestion
//! control.

use std::fmt;

use ::topology::shape::Shape;
use clap::Args;
use controls::{CongestionControl, DcqcnParams};
use lab::units;
use roce::Duration;
use roce::congestion::watermark::MAX_AGE;
use serde::Serialize;
use sim::incast::{self, Incast, IncastConfig, IncastError, Reference};
use sim::network::Collector;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Let many senders collide at one receiver
///
/// One stream has the receiver's link to itself; after 20 ms all others start at the same moment.
/// Measured are the peak of the queue in the first 2 ms, its mean and range and the link's rate from
/// 10 to 20 ms, and from 20 to 100 ms the rate of each sender against its fair share. The queue holds
/// 4 MB and marks between 100 and 400 kB (at 25 Gbit/s; thresholds grow with the rate).
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Congestion controls: dcqcn-mlnx, dcqcn-paper, dcqcn-uet, dctcp, timely, timely-patched, hpcc,
hpcc-pint, swift, advertised, delay, off.

Examples:
  dquant sim incast --senders 10 --cc dcqcn-mlnx
  dquant sim incast --senders 10 --cc dcqcn-mlnx --increase-timer 900us
  dquant sim incast --senders 127 --cc hpcc --pfc --topology fat-tree:8 --no-long-flow
  dquant sim incast --senders 15 --pfc --no-ecn --watermarks 1ms
  dquant sim incast --reference"
)]
pub(super) struct IncastCommand {
    /// Senders that start together
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    senders: u32,

    /// Congestion control of every connection
    #[arg(long, default_value = "dcqcn-mlnx", value_name = "NAME", value_parser = CongestionControl::NAMES, hide_possible_values = true)]
    cc: String,

    /// Rate of every link in Gbit/s
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(1..=800))]
    gbit: u64,

    /// DCQCN's increase timer, instead of the variant's own
    #[arg(long, value_name = "TIME", value_parser = period)]
    increase_timer: Option<Duration>,

    /// Let all senders start together, without one that is there before
    #[arg(long)]
    no_long_flow: bool,

    /// Switches pause senders instead of dropping packets, and their ports share the 4 MB
    #[arg(long)]
    pfc: bool,

    /// Switches mark nothing
    #[arg(long)]
    no_ecn: bool,

    /// Read the watermarks of switch buffers this often, and tell the hosts half of that later
    #[arg(long, value_name = "TIME", value_parser = interval)]
    watermarks: Option<Duration>,

    /// The network, instead of one switch, as in 'dquant subnet plan'
    #[arg(long, value_name = "RULE")]
    topology: Option<Shape>,

    /// Run the 10:1 case of ns-3 with its parameters, and print its figures beside ours
    #[arg(long, conflicts_with_all = ["senders", "cc", "gbit", "increase_timer", "no_long_flow", "pfc", "no_ecn", "watermarks", "topology"])]
    reference: bool,

    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// A period that is not 0.
fn period(text: &str) -> Result<Duration, String> {
    let period = units::duration(text).map_err(|error| error.to_string())?;
    let is_possible = period > Duration::ZERO;
    is_possible.then_some(period).ok_or_else(|| "it has to be more than 0".to_owned())
}

/// An interval at which registers can be read.
fn interval(text: &str) -> Result<Duration, String> {
    let least = Duration::from_micros(10);
    let every = units::duration(text).map_err(|error| error.to_string())?;
    let is_possible = (least..=MAX_AGE).contains(&every);
    is_possible.then_some(every).ok_or_else(|| format!("it can be {least} to {MAX_AGE}"))
}

impl IncastCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.reference {
            console.report(&ReferenceReport::measure(self.seed)?)?;
            return Ok(Exit::Good);
        }
        let config = IncastConfig {
            long_flow: !self.no_long_flow,
            shape: self.topology.clone(),
            seed: self.seed,
            ..IncastConfig::new(self.senders, self.gbit)
        };
        let mut config = if self.pfc { config.lossless() } else { config };
        config.link.marking = config.link.marking.filter(|_| !self.no_ecn);
        config.watermarks = self.watermarks.map(|every| {
            let late = Duration::from_nanos(every.as_nanos() / 2);
            Collector { every, late }
        });
        let base_rtt = config.base_rtt().map_err(failed)?;
        let congestion = self.congestion(base_rtt)?;
        let got = incast::measure(&config, |connect| connect.congestion = congestion.into());
        let got = got.map_err(failed)?;
        console.report(&IncastReport::new(&self, &got))?;
        Ok(Exit::Good)
    }

    fn congestion(&self, base_rtt: Duration) -> Result<CongestionControl, CliError> {
        let named = CongestionControl::named(&self.cc, self.gbit * 1_000_000_000, base_rtt);
        match (named, self.increase_timer) {
            (Some(CongestionControl::Dcqcn(params)), Some(increase_period)) => {
                Ok(CongestionControl::Dcqcn(DcqcnParams { increase_period, ..params }))
            }
            (_, Some(_)) => {
                let cc = &self.cc;
                Err(CliError::usage(format_args!("--increase-timer is DCQCN's, and --cc is {cc}")))
            }
            (named, None) => Ok(named.unwrap_or_default()),
        }
    }
}

/// A topology that does not fit is a mistake of the command line, a stream that fails is a finding.
fn failed(error: IncastError) -> CliError {
    match error {
        IncastError::Stream(_) => CliError::check_failed(error),
        IncastError::Shape(_) | IncastError::Route(_) | IncastError::Hosts { .. } => {
            CliError::from_cause(error)
        }
    }
}

/// Our figures of the case that ns-3 measured, beside its own.
#[derive(Debug, Serialize)]
struct ReferenceReport {
    rows: Vec<ReferenceRow>,
}

#[derive(Debug, Serialize)]
struct ReferenceRow {
    congestion_control: &'static str,
    queue_peak_bytes: u64,
    queue_mean_bytes: u64,
    link_bps: u64,
    max_unfairness_per_mille: u64,
    dropped: u64,
    reference_queue_peak_bytes: u64,
    reference_queue_mean_bytes: u64,
    reference_link_bps: u64,
}

impl ReferenceReport {
    fn measure(seed: u64) -> Result<ReferenceReport, CliError> {
        let rows = incast::reference().into_iter().map(|row| ReferenceRow::measure(&row, seed));
        Ok(ReferenceReport { rows: rows.collect::<Result<_, _>>()? })
    }
}

impl ReferenceRow {
    fn measure(row: &Reference, seed: u64) -> Result<ReferenceRow, CliError> {
        let case = incast::reference_case();
        let config = IncastConfig { seed, ..case };
        let got = incast::measure(&config, |connect| connect.congestion = row.control.into());
        let got = got.map_err(failed)?;
        Ok(ReferenceRow {
            congestion_control: row.name,
            queue_peak_bytes: got.peak_bytes,
            queue_mean_bytes: got.mean_bytes,
            link_bps: got.wire_bps,
            max_unfairness_per_mille: got.unfairness_per_mille(),
            dropped: got.dropped,
            reference_queue_peak_bytes: row.peak_bytes,
            reference_queue_mean_bytes: row.mean_bytes,
            reference_link_bps: row.wire_bps,
        })
    }
}

impl Report for ReferenceReport {
    const SCHEMA: &'static str = "dquant.sim.incast-reference/1";
}

impl fmt::Display for ReferenceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "10 senders meet a long flow, 25 Gbit/s: ours / ns-3")?;
        write!(f, "  {:<16} {:>15} {:>15} {:>15}", "control", "peak kB", "mean kB", "link Gb/s")?;
        let pair = |ours: u64, theirs: u64, unit: f64, digits: usize| {
            format!("{:.digits$} / {:.digits$}", ours as f64 / unit, theirs as f64 / unit)
        };
        for row in &self.rows {
            let peak = pair(row.queue_peak_bytes, row.reference_queue_peak_bytes, 1e3, 0);
            let mean = pair(row.queue_mean_bytes, row.reference_queue_mean_bytes, 1e3, 1);
            let link = pair(row.link_bps, row.reference_link_bps, 1e9, 2);
            write!(f, "\n  {:<16} {peak:>15} {mean:>15} {link:>15}", row.congestion_control)?;
        }
        Ok(())
    }
}

#[derive(Debug, Serialize)]
struct IncastReport {
    congestion_control: String,
    senders: u32,
    /// Whether one more stream was there before.
    long_flow: bool,
    gbit: u64,
    queue_peak_bytes: u64,
    queue_mean_bytes: u64,
    queue_min_bytes: u64,
    queue_max_bytes: u64,
    link_bps: u64,
    fair_share_bps: u64,
    max_unfairness_per_mille: u64,
    shares_bps: Vec<u64>,
    dropped: u64,
    marked: u64,
    paused_ns: u64,
    notifications: u64,
    events: u64,
}

impl IncastReport {
    fn new(command: &IncastCommand, got: &Incast) -> IncastReport {
        IncastReport {
            congestion_control: command.cc.clone(),
            senders: command.senders,
            long_flow: !command.no_long_flow,
            gbit: command.gbit,
            queue_peak_bytes: got.peak_bytes,
            queue_mean_bytes: got.mean_bytes,
            queue_min_bytes: got.range_bytes.0,
            queue_max_bytes: got.range_bytes.1,
            link_bps: got.wire_bps,
            fair_share_bps: got.fair_bps(),
            max_unfairness_per_mille: got.unfairness_per_mille(),
            shares_bps: got.shares_bps.clone(),
            dropped: got.dropped,
            marked: got.marked,
            paused_ns: got.paused.as_nanos(),
            notifications: got.notifications,
            events: got.events,
        }
    }
}

impl Report for IncastReport {
    const SCHEMA: &'static str = "dquant.sim.incast/1";
}

impl fmt::Display for IncastReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gbit = |bps: u64| bps as f64 / 1e9;
        let kb = |bytes: u64| bytes as f64 / 1e3;
        let long_flow = if self.long_flow { " and 1 long flow" } else { "" };
        let IncastReport { senders, gbit: rate, congestion_control, .. } = self;
        writeln!(f, "{senders} senders{long_flow}, {rate} Gbit/s, {congestion_control}")?;
        writeln!(
            f,
            "  queue       peak {:.0} kB, mean {:.1} kB, range {:.0} to {:.0} kB; {} dropped",
            kb(self.queue_peak_bytes),
            kb(self.queue_mean_bytes),
            kb(self.queue_min_bytes),
            kb(self.queue_max_bytes),
            self.dropped
        )?;
        writeln!(f, "  link        {:.2} Gb/s", gbit(self.link_bps))?;
        write!(
            f,
            "  shares      fair {:.3} Gb/s, largest deviation {:.1} %:",
            gbit(self.fair_share_bps),
            self.max_unfairness_per_mille as f64 / 10.0
        )?;
        for &share in &self.shares_bps {
            write!(f, " {:.2}", gbit(share))?;
        }
        write!(
            f,
            "\n  signals     {} packets marked, {} notifications; links paused for {:.3} ms in all",
            self.marked,
            self.notifications,
            self.paused_ns as f64 / 1e6
        )
    }
}
