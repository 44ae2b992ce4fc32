//! `dquant parfait prove`: an admitted set of jobs in the simulator, all of them sending at once.

use std::fmt;
use std::path::PathBuf;

use ::topology::graph::Capacity;
use clap::{Args, ValueEnum};
use controls::CongestionControl;
use lab::proof::admit::{self, Admitted, Way};
use lab::proof::summary::Summary;
use lab::proof::{self, Options, picture};
use lab::{input, topology, units};
use parfait::job::Job;
use parfait::outage::Outage;
use parfait::queues::Scheme;
use roce::Duration;
use serde::Serialize;
use sim::graph::Spread;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Largest file of jobs that is read.
const MAX_FILE: u64 = 1 << 20;

/// Run admitted jobs in the simulator and measure their guarantees
///
/// Admits the jobs one after the other, and lets all of them send at once on every edge of a phase, as fast
/// as they can, through simulated switches whose ports have the queues that Parfait plans. Measured is what
/// each pair of workers on different hosts gets against the rate of its edge, in windows of 10 ms on the
/// wire; a window is below when more than two frames are missing. Then the jobs go through iterations:
/// --compute, and --bytes on each edge, phase after phase.
///
/// Senders are queue pairs of this project's own transport: selective repeat, an MTU of 4096, windows of 64
/// packets, and no other congestion control unless --control names one. Switches are lossless (priority flow
/// control), mark as DCTCP wants it, and send each packet by the shortest queue of equal paths, which is what
/// reservations count on; --flow-hash keeps each connection on one path, as ECMP does.
/// Exits with 1 if a pair is below its guarantee on average, or no job was admitted.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Jobs are written as in docs/parfait.md: a pattern and KEY=VALUE, 'torus:2x4@1G,500M slots=2'.

Examples:
  dquant parfait prove --topology fat-tree:4 ring:8@2G mesh:4@500M
  dquant parfait prove --topology fat-tree:4 --slots 2 --placement locality ring:8@2G ring:8@2G
  dquant parfait prove --topology fat-tree:4 --oversubscription 4 --compare --jobs jobs.txt
  dquant parfait prove --topology leaf-spine:4x2x4 --queues 4 --picture links.svg ring:8@2G"
)]
pub(super) struct Prove {
    /// Jobs, in the order in which they are submitted
    #[arg(value_name = "JOB")]
    job: Vec<Job>,

    /// A file with a job on each line, before those of the command line
    #[arg(long, value_name = "FILE")]
    jobs: Option<PathBuf>,

    /// The network: a rule as in 'dquant subnet plan', or a file
    #[arg(long, value_name = "RULE|FILE")]
    topology: String,

    /// Rate of every link, where the topology says none
    #[arg(long, value_name = "RATE", default_value = "10Gbit/s", value_parser = units::rate_bps)]
    rate: u64,

    /// Links between switches carry this part only
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    oversubscription: u64,

    /// Slots of each host
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    slots: u32,

    /// Part of each link that may be promised
    ///
    /// The rest is for acknowledgements and rounding of weights.
    #[arg(long, value_name = "PART", default_value = "90%", value_parser = units::fraction_ppm)]
    reservable: u32,

    /// How jobs are placed
    #[arg(long, value_enum, default_value = "search", conflicts_with = "compare")]
    placement: Placement,

    /// Compare 'search' with 'locality': the same jobs, those that both admit
    #[arg(long)]
    compare: bool,

    /// Queues of each port for jobs
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=8))]
    queues: u8,

    /// Pace jobs at hosts where weights alone do not assure them
    #[arg(long)]
    paced: bool,

    /// Congestion control of every connection
    #[arg(long, default_value = "off", value_name = "NAME", value_parser = CongestionControl::NAMES, hide_possible_values = true)]
    control: String,

    /// Choose a path for each connection by hash, instead of one for each packet
    #[arg(long)]
    flow_hash: bool,

    /// Windows of 10 ms that are measured in each round
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    windows: u32,

    /// Time for iterations; 0s for none
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = units::duration)]
    iterate: Duration,

    /// Payload of each edge in an iteration, instead of 5 ms at its rate
    #[arg(long, value_name = "SIZE", value_parser = units::size_bytes)]
    bytes: Option<u64>,

    /// How long a job computes in each iteration
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = units::duration)]
    compute: Duration,

    /// Measure iterations of this job, by its place from 1, while all others are backlogged
    #[arg(long, value_name = "N")]
    subject: Option<u64>,

    /// Draw what is promised and used on each link (SVG)
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,

    /// Random seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Ways to place, as they are named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placement {
    /// Tree search that knows every edge.
    Search,
    /// Slots as close together as possible, whatever links carry (Kueue, SLURM).
    Locality,
    /// The greedy of Oktopus with a hose for each worker.
    Oktopus,
}

impl Placement {
    fn way(self) -> Way {
        match self {
            Placement::Search => Way::Search,
            Placement::Locality => Way::Locality,
            Placement::Oktopus => Way::Oktopus,
        }
    }
}

impl Prove {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let jobs = self.all_jobs()?;
        let capacity = Capacity { rate_bps: self.rate, ..Capacity::default() };
        let topology = topology::named(&self.topology, capacity)?;
        let topology = admit::oversubscribed(&topology, self.oversubscription);
        let topology = topology.map_err(CliError::from_cause)?;
        let network = admit::network(&topology, self.slots, self.reservable);
        let network = network.map_err(CliError::from_cause)?;
        let ways = if self.compare {
            vec![Way::Search, Way::Locality]
        } else {
            vec![self.placement.way()]
        };
        let mut sets = Vec::new();
        for way in ways {
            let admitted = admit::admit(&topology, &network, &jobs, way, self.seed);
            sets.push((way, admitted.map_err(CliError::from_cause)?));
        }
        if self.compare {
            let mut all: Vec<&mut Admitted> = sets.iter_mut().map(|(_, set)| set).collect();
            admit::keep_common(&mut all);
        }
        let (mut is_kept, mut is_any_admitted) = (true, false);
        for (way, admitted) in sets {
            let options = self.options();
            let nothing = Outage::none();
            let proof = proof::prove(&topology, &nothing, &network, &admitted.members, &options);
            let proof = proof.map_err(CliError::from_cause)?;
            if let Some(path) = self.picture.as_ref().filter(|_| way != Way::Locality) {
                std::fs::write(path, picture::svg(&topology, &proof)).map_err(|error| {
                    CliError::because(format_args!("cannot write {}", path.display()), &error)
                })?;
            }
            let how = (self.control.as_str(), self.queues);
            let summary = Summary::of(way.name(), how, &topology, &proof).with_refused(&admitted);
            is_kept &= way == Way::Locality || summary.is_kept;
            is_any_admitted |= !admitted.members.is_empty();
            console.report(&ProofReport(summary))?;
        }
        if !is_any_admitted {
            return Err(CliError::check_failed("no job was admitted: there is nothing to prove").hint(
                "the reasons are above: ask for less, or give more hosts, --slots, --rate or --reservable",
            ));
        }
        Ok(if is_kept { Exit::Good } else { Exit::CheckFailed })
    }

    fn all_jobs(&self) -> Result<Vec<Job>, CliError> {
        let mut jobs = Vec::new();
        if let Some(path) = &self.jobs {
            for (number, line) in (1..).zip(input::read(path, MAX_FILE)?.lines()) {
                let line = line.split('#').next().unwrap_or("").trim();
                if !line.is_empty() {
                    let what = format_args!("{}, line {number}", path.display());
                    jobs.push(line.parse().map_err(|error: parfait::job::JobError| {
                        CliError::because(what, &error)
                    })?);
                }
            }
        }
        jobs.extend_from_slice(&self.job);
        let none = || CliError::usage("there is no job to prove").hint("name one, as in ring:8@2G");
        if jobs.is_empty() { Err(none()) } else { Ok(jobs) }
    }

    fn options(&self) -> Options {
        let usual = Options::new();
        Options {
            queues: self.queues,
            scheme: if self.paced { Scheme::Paced } else { Scheme::Matched },
            transport: proof::transport(&self.control, self.rate).unwrap_or(usual.transport),
            spread: if self.flow_hash { Spread::Flow } else { usual.spread },
            windows: self.windows,
            iterate: self.iterate,
            bytes_per_edge: self.bytes,
            compute: self.compute,
            subject: self.subject,
            seed: self.seed,
            ..usual
        }
    }
}

/// What the simulator says of a set of jobs, for people and programs.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(in crate::cli) struct ProofReport(pub(in crate::cli) Summary);

impl Report for ProofReport {
    const SCHEMA: &'static str = "dquant.parfait.prove/1";
}

impl fmt::Display for ProofReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProofReport(summary) = self;
        let Summary { placement, topology, queues, control, .. } = summary;
        writeln!(f, "{topology}; placement {placement}, {queues} queues, {control}")?;
        writeln!(
            f,
            "  {:>3} {:<26} {:>5} {:>6} {:>16} {:>8} {:>24}",
            "job", "request", "pairs", "local", "worst pair Gb/s", "below", "iteration p50/p99 ms"
        )?;
        for row in &summary.jobs {
            let gbit =
                |bps: Option<u64>| bps.map_or("-".into(), |bps| format!("{:.3}", bps as f64 / 1e9));
            let ms =
                |ns: Option<u64>| ns.map_or("-".into(), |ns| format!("{:.2}", ns as f64 / 1e6));
            let worst =
                format!("{} / {}", gbit(row.worst_measured_bps), gbit(row.worst_guaranteed_bps));
            let spans = format!(
                "{} / {} ({})",
                ms(row.iteration_p50_ns),
                ms(row.iteration_p99_ns),
                ms(Some(row.iteration_promised_ns))
            );
            writeln!(
                f,
                "  {:>3} {:<26} {:>5} {:>6} {worst:>16} {:>6.2} % {spans:>24}",
                row.job, row.request, row.pairs, row.local_pairs, row.below_percent
            )?;
        }
        for refused in &summary.refused {
            writeln!(f, "      {:<26} refused: {}", refused.request, refused.reason)?;
        }
        if let Some(worst) = &summary.worst {
            writeln!(
                f,
                "  worst pair  job {}, {} to {}: {:.3} of {:.3} Gb/s, {:.1} %",
                worst.job,
                worst.from,
                worst.to,
                worst.measured_bps as f64 / 1e9,
                worst.guaranteed_bps as f64 / 1e9,
                worst.percent
            )?;
        }
        write!(
            f,
            "  in all      {:.2} % of windows below; {} ports promise too much, {} jobs at ports not assured; {} packets dropped",
            summary.below_percent, summary.overbooked_ports, summary.not_assured, summary.dropped
        )
    }
}
