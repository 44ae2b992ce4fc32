//! `dquant parfait violations`: how often guarantees are violated at a port, by schemes and numbers
//! of queues.

use std::fmt;

use clap::Args;
use controls::CongestionControl;
use lab::proof;
use lab::proof::violations::{self, Count, Effort, Mix, SMALL};
use parfait::queues::Scheme;
use serde::Serialize;
use sim::tenants::Transport;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Measure how often guarantees are violated at a port, by scheme and number of queues
///
/// Twelve tenants, each on a host of its own, send to one receiver over a lossless switch; their guarantees, of
/// 1 to 20 parts, add up to 90 % of its port of 10 Gbit/s. Counted are windows of 10 ms of tenants that have
/// something to send, on the wire with Ethernet's framing; a window is below when more than two frames are
/// missing. Tenants that are not backlogged alternate between backlogged and silent, 50 ms each in the mean.
/// Senders are queue pairs with selective repeat, an MTU of 1024, windows of 16 packets and --control.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant parfait violations
  dquant parfait violations --queues 4 --backlogged 6 --flows 4 --seeds 20 --windows 100"
)]
pub(super) struct Violations {
    /// Queues of the port
    #[arg(long, value_delimiter = ',', default_value = "2,4,7,8", value_parser = clap::value_parser!(u8).range(1..=8))]
    queues: Vec<u8>,

    /// Tenants that always send, of 12
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u8).range(0..=12))]
    backlogged: u8,

    /// Most connections of a tenant
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    flows: u32,

    /// Random seeds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    seeds: u64,

    /// Windows of each seed
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    windows: u32,

    /// Congestion control of every connection
    #[arg(long, default_value = "off", value_name = "NAME", value_parser = CongestionControl::NAMES, hide_possible_values = true)]
    control: String,
}

/// Schemes, and what they are called.
const SCHEMES: [(Scheme, &str); 5] = [
    (Scheme::Hash, "static hash"),
    (Scheme::Contended, "contended alone (QShare)"),
    (Scheme::Levels, "levels (Crux)"),
    (Scheme::Matched, "matched"),
    (Scheme::Paced, "matched and paced"),
];

impl Violations {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let transport = proof::transport(&self.control, 10_000_000_000).map(|one| Transport {
            mtu: SMALL.mtu,
            window_packets: SMALL.window_packets,
            ..one
        });
        let effort = Effort {
            seeds: self.seeds,
            windows: self.windows,
            transport: transport.unwrap_or(SMALL),
        };
        let mix = Mix { backlogged: self.backlogged.into(), flows: self.flows };
        for (scheme, name) in SCHEMES {
            let cells = violations::measure_all(scheme, &self.queues, mix, &effort)
                .map_err(CliError::from_cause)?;
            console.report(&Row::new(&self, name, &cells))?;
        }
        Ok(Exit::Good)
    }
}

#[derive(Debug, Serialize)]
struct Row {
    scheme: &'static str,
    backlogged: u8,
    flows: u32,
    control: String,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    queues: u8,
    sending: u64,
    below: u64,
    percent: f64,
}

impl Row {
    fn new(command: &Violations, scheme: &'static str, cells: &[Count]) -> Row {
        let cell = |(&queues, count): (&u8, &Count)| Cell {
            queues,
            sending: count.sending,
            below: count.below,
            percent: 100.0 * count.share(),
        };
        Row {
            scheme,
            backlogged: command.backlogged,
            flows: command.flows,
            control: command.control.clone(),
            cells: command.queues.iter().zip(cells).map(cell).collect(),
        }
    }
}

impl Report for Row {
    const SCHEMA: &'static str = "dquant.parfait.violations/1";
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<26}", self.scheme)?;
        for cell in &self.cells {
            let text = format!("Q = {}: {:.2} %", cell.queues, cell.percent);
            write!(f, "{text:<18}")?;
        }
        Ok(())
    }
}
