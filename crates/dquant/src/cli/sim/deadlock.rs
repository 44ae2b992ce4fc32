//! `dquant sim deadlock`: whether lossless switches of a topology come to wait for each other.

use std::fmt;

use ::topology::shape::Shape;
use clap::Args;
use lab::units;
use roce::Duration;
use serde::Serialize;
use sim::circle::{self, Circle, CircleConfig};

use super::super::subnet::EngineName;
use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Load lossless switches until they wait for each other, or do not
///
/// Every host sends to others chosen at random, as fast as it can; switches pause instead of dropping
/// (priority flow control), or send only what the next one has a buffer for (--credits). If links come
/// to wait for each other in a circle, the command names it and exits with 1. With --lanes, paths that
/// depend on each other in a circle get lanes of their own.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant sim deadlock --topology torus:4x4:2
  dquant sim deadlock --topology torus:4x4:2 --lanes 4
  dquant sim deadlock --topology torus:4x4:2 --credits 16KiB
  dquant sim deadlock --topology fat-tree:4 --routing fat-tree"
)]
pub(super) struct Deadlock {
    /// The network, as in 'dquant subnet plan'
    #[arg(long, default_value = "torus:4x4:2", value_name = "RULE")]
    topology: Shape,

    /// Engine of the routes: min-hop, up-down, fat-tree, dor or balanced
    #[arg(
        long,
        value_enum,
        default_value = "dor",
        value_name = "ENGINE",
        hide_possible_values = true
    )]
    routing: EngineName,

    /// Most lanes
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    lanes: u8,

    /// InfiniBand's credits instead of pauses: the buffer of each link and lane
    #[arg(long, value_name = "SIZE", value_parser = units::size_bytes, conflicts_with = "buffer")]
    credits: Option<u64>,

    /// Buffer of each switch
    #[arg(long, default_value = "1MB", value_name = "SIZE", value_parser = units::size_bytes)]
    buffer: u64,

    /// Streams of each host
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    streams: u32,

    /// Simulated time
    #[arg(long, default_value = "5ms", value_name = "TIME", value_parser = units::duration)]
    time: Duration,

    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl Deadlock {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let config = CircleConfig {
            engine: self.routing.engine(),
            most_lanes: self.lanes,
            buffer_bytes: self.buffer,
            credits: self.credits.map(|bytes| (bytes / 64).clamp(64, 1 << 20) as u32),
            streams: self.streams,
            span: self.time,
            seed: self.seed,
            ..CircleConfig::new(self.topology.clone())
        };
        let got = circle::measure(&config).map_err(CliError::check_failed)?;
        let report = DeadlockReport::new(&self, got);
        let is_stuck = report.deadlock.is_some();
        console.report(&report)?;
        Ok(if is_stuck { Exit::CheckFailed } else { Exit::Good })
    }
}

#[derive(Debug, Serialize)]
struct DeadlockReport {
    topology: String,
    routing: String,
    lanes: u8,
    /// Where the links start that wait for each other, in order; the last one ends where the first one starts.
    deadlock: Option<Vec<String>>,
    deadlock_lane: Option<usize>,
    deadlock_ns: Option<u64>,
    arrived_bytes: u64,
    arrived_lately_bytes: u64,
    dropped: u64,
    paused_ns: u64,
    events: u64,
}

impl DeadlockReport {
    fn new(command: &Deadlock, got: Circle) -> DeadlockReport {
        let (at, circle) = got.deadlock.unzip();
        DeadlockReport {
            topology: command.topology.to_string(),
            routing: command.routing.engine().to_string(),
            lanes: got.lanes,
            deadlock: circle,
            deadlock_lane: got.lane,
            deadlock_ns: at.map(|at| at.as_nanos()),
            arrived_bytes: got.arrived,
            arrived_lately_bytes: got.arrived_lately,
            dropped: got.dropped,
            paused_ns: got.paused.as_nanos(),
            events: got.events,
        }
    }
}

impl Report for DeadlockReport {
    const SCHEMA: &'static str = "dquant.sim.deadlock/1";
}

impl fmt::Display for DeadlockReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.lanes == 1 { "" } else { "s" };
        writeln!(f, "{}, routed by {}, {} lane{plural}", self.topology, self.routing, self.lanes)?;
        writeln!(
            f,
            "  arrived     {:.1} MB, {:.1} MB in the last tenth of the time; {} packets dropped",
            self.arrived_bytes as f64 / 1e6,
            self.arrived_lately_bytes as f64 / 1e6,
            self.dropped
        )?;
        writeln!(f, "  paused      {:.3} ms, of all links together", self.paused_ns as f64 / 1e6)?;
        let Some(circle) = &self.deadlock else {
            return write!(f, "  deadlock    none");
        };
        let (at, lane) = (self.deadlock_ns.unwrap_or(0), self.deadlock_lane.unwrap_or(0));
        write!(f, "  deadlock    after {:.1} ms in lane {lane}: ", at as f64 / 1e6)?;
        for name in circle {
            write!(f, "{name} -> ")?;
        }
        write!(f, "{}", circle.first().map_or("", String::as_str))
    }
}
