//! `dquant job submit`.

use std::fmt;
use std::path::PathBuf;

use ::topology::graph::Capacity;
use clap::Args;
use cluster::convert;
use cluster::proto::Held;
use lab::proof::set::Member;
use lab::proof::summary::Summary;
use lab::proof::{self, Options, picture};
use lab::topology::own;
use parfait::job::Job;
use parfait::log::{Reason, Refused};
use parfait::outage::Outage;
use parfait::site::Site;
use parfait::spread::Ecmp;
use serde::Serialize;
use service::text::one_line;

use super::caller;
use crate::cli::cluster::BrainsArgs;
use crate::cli::parfait::prove::ProofReport;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Ask for hosts and bandwidth for a job
///
/// The job is admitted as a whole, once that is durable, or refused with what is missing: which link
/// lacks how much. Start its workers where this command says. Nothing is started by itself.
/// Exits with 1 if the job is refused, or --prove finds a pair below its guarantee.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant job submit 'ring:8@5G' --name llm
  dquant job submit 'parallel:8x4x2@20G,2G,5G' --name gpt --brain 10.0.0.5,10.0.0.6
  dquant job submit 'mesh:16@1G' --name moe --try      where it would go, without admitting it
  dquant job submit 'ring:8@5G cycle=24ms/7ms' --name llm      it takes turns with others (docs/parfait.md)
  dquant job submit 'ring:8@5G' --name llm --prove --picture links.svg"
)]
pub(super) struct Submit {
    /// The job: its pattern, the rate of its edges, and options, as in 'ring:8@5G slots=2'
    ///
    /// Options: slots=N burst=BYTES latency=low|normal|bulk spread=hosts:N spread=leaves:N most=host:N
    /// most=leaf:N apart=JOB,JOB cycle=PERIOD/EXCHANGE. docs/parfait.md says what they do.
    #[arg(verbatim_doc_comment)]
    job: String,

    /// Its name: letters, digits, '.', '_' and '-'; no other running job has it
    #[arg(long, value_name = "NAME")]
    name: String,

    /// Only say where it would go; nothing is admitted
    #[arg(long = "try")]
    is_trial: bool,

    /// Admit it only if the simulator says that all jobs keep their guarantees
    ///
    /// All admitted jobs and this one send as much as they can, without what is down in the network.
    /// Shown are the worst pair of each job against its guarantee, and how long an iteration of this one
    /// takes.
    #[arg(long, verbatim_doc_comment)]
    prove: bool,

    /// Map of links with what is promised and used in the proof, as SVG
    #[arg(long, value_name = "FILE", requires = "prove")]
    picture: Option<PathBuf>,

    #[command(flatten)]
    brains: BrainsArgs,
}

impl Submit {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        self.job.parse::<Job>().map_err(|error| {
            CliError::from_cause(error)
                .hint("docs/parfait.md has all patterns and options: 'ring:8@5G slots=2' is a job")
        })?;
        let owner = caller();
        let (name, job) = (&self.name, &self.job);
        if self.is_trial {
            let placed = self.brains.call(async |client| client.place(name, &owner, job).await)?;
            let report = PlacedReport::new(None, &placed.0.map_err(refused)?);
            console.report(&report)?;
            return Ok(Exit::Good);
        }
        let unchanged_since = match self.prove {
            true => Some(self.prove_with(&owner, console)?),
            false => None,
        };
        let (outcome, held) = self.brains.call(async |client| {
            let outcome = client.submit(name, &owner, job, unchanged_since).await?;
            // Another client may have released it since: then there is nothing to show but its
            // number.
            let held = if outcome.is_ok() { client.topology().await?.held } else { Vec::new() };
            Ok((outcome, held))
        })?;
        let number = outcome.map_err(refused)?;
        let held = held.into_iter().find(|held| held.job == number).unwrap_or_default();
        console.report(&PlacedReport::new(Some(number), &held))?;
        Ok(Exit::Good)
    }
}

impl Submit {
    /// Runs the admitted set with this job in the simulator; the entry of the log since which that holds.
    ///
    /// # Errors
    /// When a pair of any job would not have its guarantee.
    fn prove_with(&self, owner: &str, console: &mut Console) -> Result<u64, CliError> {
        let (placed, cluster) = self.brains.call(async |client| {
            let placed = client.place(&self.name, owner, &self.job).await?;
            Ok((placed, client.topology().await?))
        })?;
        let (held, since) = (placed.0.map_err(refused)?, placed.1);
        if since != cluster.unchanged_since {
            return Err(
                CliError::check_failed("jobs came or went meanwhile").hint("submit it again")
            );
        }
        let odd =
            |error: &dyn fmt::Display| CliError::usage(format!("the brain's answer: {error}"));
        let topology =
            own::read(&cluster.topology, Capacity::default()).map_err(|error| odd(&error))?;
        let site = Site {
            topology,
            slots: cluster.slots,
            ecmp: if cluster.ecmp == "worst" { Ecmp::Worst } else { Ecmp::Even },
            reservable_ppm: cluster.reservable_ppm,
        };
        let down = convert::down(cluster.down.as_ref()).map_err(|error| odd(&error))?;
        let (outage, unknown) = Outage::named(&site.topology, &down);
        if let Some(name) = unknown.first() {
            return Err(odd(&format_args!("'{name}' is down, and the topology does not have it")));
        }
        let network = site.network(&outage).map_err(|error| odd(&error))?;
        let number = cluster.held.iter().map(|held| held.job).max().unwrap_or(0) + 1;
        // Nothing is reserved for degraded jobs, so there is nothing to prove for them.
        let whole = cluster.held.iter().filter(|held| !held.is_degraded);
        let degraded = cluster.held.len() - whole.clone().count();
        if degraded > 0 {
            console.note(format_args!("{degraded} degraded jobs are left out of the proof"));
        }
        let all = whole.map(|held| (held.job, held)).chain([(number, &held)]);
        let members = all.map(|(id, held)| {
            let held = convert::held(held, &network).map_err(|error| odd(&error))?;
            Ok(Member::of(id, &held, Some(held.dscp)))
        });
        let members: Vec<Member> = members.collect::<Result<_, CliError>>()?;
        let options = Options { subject: Some(number), ..Options::new() };
        let proof = proof::prove(&site.topology, &outage, &network, &members, &options);
        let proof = proof.map_err(CliError::from_cause)?;
        if let Some(path) = &self.picture {
            std::fs::write(path, picture::svg(&site.topology, &proof)).map_err(|error| {
                CliError::because(format_args!("cannot write {}", path.display()), &error)
            })?;
        }
        let how = ("windows", options.queues);
        let report = ProofReport(Summary::of("of the brain", how, &site.topology, &proof));
        console.report(&report)?;
        match report.0.is_kept {
            true => Ok(since),
            false => Err(CliError::check_failed(
                "not submitted: a pair would have less than its guarantee in the simulator",
            )
            .hint("ask for less, or submit it without --prove: the ledger has room for it")),
        }
    }
}

fn refused(refused: Refused) -> CliError {
    let hint = match refused.reason {
        Reason::NameTaken => {
            "choose another --name: running jobs differ in theirs (`dquant job list`)"
        }
        Reason::TooLarge => "submit parts of it as jobs of their own",
        _ => "ask for less, cancel another job (`dquant job list`), or wait for one to end",
    };
    CliError::check_failed(format!("not admitted: {}", one_line(&refused.text))).hint(hint)
}

/// Where a job is, or would be.
#[derive(Debug, Serialize)]
struct PlacedReport {
    /// Its number, if it is admitted.
    job: Option<u64>,
    name: String,
    dscp: u32,
    order: String,
    workers: Vec<Workers>,
}

/// Consecutive workers on a host.
#[derive(Debug, Serialize)]
struct Workers {
    host: String,
    first: u32,
    last: u32,
}

impl PlacedReport {
    fn new(job: Option<u64>, held: &Held) -> PlacedReport {
        let workers = held.pieces.iter().map(|piece| Workers {
            host: one_line(&piece.host).into_owned(),
            first: piece.first,
            last: (piece.first + piece.count).saturating_sub(1),
        });
        let (name, order) = (one_line(&held.name).into_owned(), one_line(&held.order).into_owned());
        PlacedReport { job, name, dscp: held.dscp, order, workers: workers.collect() }
    }
}

impl Report for PlacedReport {
    const SCHEMA: &'static str = "dquant.job-placed/1";
}

impl fmt::Display for PlacedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.job {
            Some(job) => write!(f, "job {job} '{}' is admitted: DSCP {}", self.name, self.dscp)?,
            None => write!(f, "'{}' would be admitted", self.name)?,
        }
        for Workers { host, first, last } in &self.workers {
            match first == last {
                true => write!(f, "\n  worker {first} on {host}")?,
                false => write!(f, "\n  workers {first} to {last} on {host}")?,
            }
        }
        Ok(())
    }
}
