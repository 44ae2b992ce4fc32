//! `dquant parfait prove`: an admitted set of jobs in the simulator, all of them sending at once.

use std::fmt;
use std::path::PathBuf;

use ::topology::graph::{Capacity, Topology};
use clap::{Args, ValueEnum};
use lab::proof::admit::{self, Admitted, Way};
use lab::proof::{self, JobProof, Options, Proof, picture};
use lab::{input, topology, units};
use parfait::job::Job;
use parfait::outage::Outage;
use parfait::queues::Scheme;
use roce::Duration;
use roce::congestion::CongestionControl;
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
            keep_common(&mut sets);
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
            let report = ProofReport::new(&self, way, &topology, &admitted, &proof);
            is_kept &= way == Way::Locality || report.is_kept;
            is_any_admitted |= !admitted.members.is_empty();
            console.report(&report)?;
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

/// Jobs that all ways have admitted.
fn keep_common(sets: &mut [(Way, Admitted)]) {
    let has = |set: &Admitted, id| set.members.iter().any(|member| member.id == id);
    let ids: Vec<u64> = sets.iter().flat_map(|(_, set)| &set.members).map(|one| one.id).collect();
    let common: Vec<u64> =
        ids.into_iter().filter(|&id| sets.iter().all(|(_, set)| has(set, id))).collect();
    for (_, set) in sets {
        set.members.retain(|member| common.contains(&member.id));
    }
}

/// What the simulator says of a set of jobs.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct ProofReport {
    placement: &'static str,
    topology: String,
    control: String,
    queues: u8,
    jobs: Vec<JobRow>,
    refused: Vec<Refused>,
    worst: Option<Worst>,
    /// Whether every pair had its guarantee on average.
    pub(in crate::cli) is_kept: bool,
    /// Share of windows of pairs that were below, in all.
    below_percent: f64,
    overbooked_ports: usize,
    not_assured: usize,
    dropped: u64,
    events: u64,
    links: Vec<LinkRow>,
}

#[derive(Debug, Serialize)]
struct JobRow {
    job: u64,
    request: String,
    dscp: u8,
    pairs: usize,
    local_pairs: usize,
    worst_guaranteed_bps: Option<u64>,
    worst_measured_bps: Option<u64>,
    worst_window_bps: Option<u64>,
    below_percent: f64,
    iterations: usize,
    iteration_p50_ns: Option<u64>,
    iteration_p99_ns: Option<u64>,
    iteration_promised_ns: u64,
}

#[derive(Debug, Serialize)]
struct Refused {
    request: String,
    reason: String,
}

#[derive(Debug, Serialize)]
struct Worst {
    job: u64,
    from: String,
    to: String,
    guaranteed_bps: u64,
    measured_bps: u64,
    percent: f64,
}

#[derive(Debug, Serialize)]
struct LinkRow {
    from: String,
    to: String,
    capacity_bps: u64,
    promised_bps: u64,
    used_bps: u64,
}

/// A pair that lacks less than this part of its guarantee on average has it: what was on its way at both ends of the time.
const SLACK: f64 = 0.001;

impl ProofReport {
    fn new(
        command: &Prove,
        way: Way,
        topology: &Topology,
        admitted: &Admitted,
        proof: &Proof,
    ) -> ProofReport {
        let refused = admitted.refused.iter();
        let refused = refused
            .map(|(job, reason)| Refused { request: job.to_string(), reason: reason.clone() });
        let how = (command.control.as_str(), command.queues);
        let refused = refused.collect();
        ProofReport { refused, ..ProofReport::of(way.name(), how, topology, proof) }
    }

    /// Of jobs that have their places, by what put them there, congestion control and queues.
    pub(in crate::cli) fn of(
        placement: &'static str,
        (control, queues): (&str, u8),
        topology: &Topology,
        proof: &Proof,
    ) -> ProofReport {
        let hosts: Vec<_> = topology.hosts().collect();
        let name = |host: u32| topology.node(hosts[host as usize]).name().to_owned();
        let worst = proof.worst().map(|(job, pair)| Worst {
            job: job.id,
            from: name(pair.hosts.0),
            to: name(pair.hosts.1),
            guaranteed_bps: pair.guaranteed_bps,
            measured_bps: pair.measured_bps,
            percent: 100.0 * pair.ratio(),
        });
        let pairs = || proof.jobs.iter().flat_map(|job| &job.pairs);
        let windows: u64 = pairs().map(|pair| u64::from(pair.windows)).sum();
        let below: u64 = pairs().map(|pair| u64::from(pair.below)).sum();
        ProofReport {
            placement,
            topology: topology.to_string(),
            control: control.to_owned(),
            queues,
            jobs: proof.jobs.iter().map(JobRow::new).collect(),
            refused: Vec::new(),
            worst,
            is_kept: pairs().all(|pair| pair.ratio() >= 1.0 - SLACK),
            below_percent: 100.0 * below as f64 / windows.max(1) as f64,
            overbooked_ports: proof.overbooked_ports,
            not_assured: proof.not_assured,
            dropped: proof.dropped,
            events: proof.events,
            links: links(topology, proof),
        }
    }
}

fn links(topology: &Topology, proof: &Proof) -> Vec<LinkRow> {
    let rows = topology.links().flat_map(|(id, link)| {
        let of = move |side: usize| 2 * id.index() + side;
        (0..2).filter_map(move |side| {
            let own = proof.links.iter().find(|own| own.link as usize == of(side))?;
            let name = |end: usize| topology.node(link.ends[end].node).name().to_owned();
            Some(LinkRow {
                from: name(side),
                to: name(1 - side),
                capacity_bps: own.capacity_bps,
                promised_bps: own.promised_bps,
                used_bps: own.used_bps,
            })
        })
    });
    rows.collect()
}

impl JobRow {
    fn new(job: &JobProof) -> JobRow {
        let worst = job.worst();
        JobRow {
            job: job.id,
            request: job.request.clone(),
            dscp: job.dscp,
            pairs: job.pairs.len(),
            local_pairs: job.local_pairs,
            worst_guaranteed_bps: worst.map(|pair| pair.guaranteed_bps),
            worst_measured_bps: worst.map(|pair| pair.measured_bps),
            worst_window_bps: job.pairs.iter().map(|pair| pair.least_bps).min(),
            below_percent: 100.0 * job.below(),
            iterations: job.iterations.len(),
            iteration_p50_ns: job.percentile(50).map(Duration::as_nanos),
            iteration_p99_ns: job.percentile(99).map(Duration::as_nanos),
            iteration_promised_ns: job.promised.as_nanos(),
        }
    }
}

impl Report for ProofReport {
    const SCHEMA: &'static str = "dquant.parfait.prove/1";
}

impl fmt::Display for ProofReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProofReport { placement, topology, queues, control, .. } = self;
        writeln!(f, "{topology}; placement {placement}, {queues} queues, {control}")?;
        writeln!(
            f,
            "  {:>3} {:<26} {:>5} {:>6} {:>16} {:>8} {:>24}",
            "job", "request", "pairs", "local", "worst pair Gb/s", "below", "iteration p50/p99 ms"
        )?;
        for row in &self.jobs {
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
        for refused in &self.refused {
            writeln!(f, "      {:<26} refused: {}", refused.request, refused.reason)?;
        }
        if let Some(worst) = &self.worst {
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
            self.below_percent, self.overbooked_ports, self.not_assured, self.dropped
        )
    }
}
