//! `dquant sim incast`: many senders and one receiver behind one queue, under a named congestion control.

use std::fmt;

use clap::Args;
use roce::Duration;
use roce::congestion::{CongestionControl, DcqcnParams};
use serde::Serialize;
use sim::incast::{self, Incast, IncastConfig};

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};
use crate::units;

/// Names accepted by `--cc`.
const NAMES: [&str; 4] = ["dcqcn-mlnx", "dcqcn-paper", "dcqcn-uet", "off"];

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
Congestion controls: dcqcn-mlnx, dcqcn-paper, dcqcn-uet, off.

Examples:
  dquant sim incast --senders 10 --cc dcqcn-mlnx
  dquant sim incast --senders 10 --cc dcqcn-mlnx --increase-timer 900us
  dquant sim incast --senders 32 --gbit 100 --cc dcqcn-uet --json"
)]
pub(super) struct IncastCommand {
    /// Senders that start together
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    senders: u32,

    /// Congestion control of every connection
    #[arg(long, default_value = "dcqcn-mlnx", value_name = "NAME", value_parser = NAMES, hide_possible_values = true)]
    cc: String,

    /// Rate of every link in Gbit/s
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u64).range(1..=800))]
    gbit: u64,

    /// DCQCN's increase timer, instead of the variant's own
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    increase_timer: Option<Duration>,

    /// Let all senders start together, without one that is there before
    #[arg(long)]
    no_long_flow: bool,

    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl IncastCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let rate_bps = self.gbit * 1_000_000_000;
        let congestion = self.congestion(rate_bps);
        let config = IncastConfig {
            long_flow: !self.no_long_flow,
            seed: self.seed,
            ..IncastConfig::new(self.senders, self.gbit)
        };
        let got = incast::measure(&config, |connect| connect.congestion = congestion);
        let got = got.map_err(CliError::check_failed)?;
        console.report(&IncastReport::new(&self, &got))?;
        Ok(Exit::Good)
    }

    fn congestion(&self, rate_bps: u64) -> CongestionControl {
        let Some(params) = DcqcnParams::named(&self.cc, rate_bps) else {
            return CongestionControl::Off;
        };
        let increase_period = self.increase_timer.unwrap_or(params.increase_period);
        CongestionControl::Dcqcn(DcqcnParams { increase_period, ..params })
    }
}

/// Results of the same case elsewhere: 10:1 at 25 Gbit/s in ns-3, with an increase timer of 900 us.
const REFERENCE: &str = "\
  reference   DCQCN in ns-3 (10 senders, 25 Gbit/s, increase timer 900 us): peak 1,623 kB, mean 90.2 kB,
              range 0 to 235 kB, link 24.72 Gb/s";

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
            "\n  signals     {} packets marked, {} notifications\n{REFERENCE}",
            self.marked, self.notifications
        )
    }
}
