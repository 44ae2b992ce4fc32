//! `dquant job list`.

use std::fmt;

use clap::Args;
use cluster::view::View;
use cluster::words::counted;
use serde::Serialize;

use crate::cli::cluster::BrainsArgs;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// List the jobs of the cluster
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant job list
  dquant job list --json --brain 10.0.0.5")]
pub(super) struct List {
    #[command(flatten)]
    brains: BrainsArgs,
}

#[derive(Debug, Serialize)]
struct Jobs {
    jobs: Vec<Job>,
    hosts: usize,
    slots: u64,
    free_slots: u64,
}

#[derive(Debug, Serialize)]
struct Job {
    job: u64,
    name: String,
    owner: String,
    request: String,
    dscp: u8,
    workers: u32,
    hosts: Vec<String>,
    state: String,
}

impl Jobs {
    fn new(view: &View) -> Jobs {
        let name =
            |host: u32| view.nodes.get(host as usize).map_or("", |node| &node.name).to_owned();
        let job = |job: &cluster::view::JobView| {
            let mut hosts: Vec<String> =
                job.workers.iter().map(|placed| name(placed.host)).collect();
            hosts.sort_unstable();
            hosts.dedup();
            Job {
                job: job.id,
                name: job.name.clone(),
                owner: job.owner.clone(),
                request: job.request.clone(),
                dscp: job.dscp,
                workers: job.workers.iter().map(|placed| placed.count).sum(),
                hosts,
                state: job.state.clone(),
            }
        };
        let hosts = view.nodes.iter().filter(|node| node.kind == "host");
        Jobs {
            jobs: view.jobs.iter().map(job).collect(),
            hosts: hosts.clone().count(),
            slots: hosts.clone().map(|host| u64::from(host.slots)).sum(),
            free_slots: hosts.map(|host| u64::from(host.free_slots)).sum(),
        }
    }
}

impl Report for Jobs {
    const SCHEMA: &'static str = "dquant.jobs/1";
}

impl fmt::Display for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |cells: &dyn Fn(&Job) -> usize, least: usize| {
            self.jobs.iter().map(cells).max().unwrap_or(0).max(least)
        };
        let names = width(&|job| job.name.len(), 4);
        let owners = width(&|job| job.owner.len(), 5);
        let requests = width(&|job| job.request.len(), 7);
        let Jobs { hosts, slots, free_slots, .. } = self;
        writeln!(
            f,
            "{} on {}; {free_slots} of {} free",
            counted(self.jobs.len(), "job"),
            counted(*hosts, "host"),
            match slots {
                1 => "1 slot is".to_owned(),
                slots => format!("{slots} slots are"),
            }
        )?;
        write!(
            f,
            "{:>6}  {:names$}  {:owners$}  {:requests$}  {:>4}  {:>7}  {:8}  hosts",
            "job", "name", "owner", "request", "DSCP", "workers", "state"
        )?;
        for job in &self.jobs {
            write!(
                f,
                "\n{:>6}  {:names$}  {:owners$}  {:requests$}  {:>4}  {:>7}  {:8}  {}",
                job.job,
                job.name,
                job.owner,
                job.request,
                job.dscp,
                job.workers,
                job.state,
                shortened(&job.hosts)
            )?;
        }
        Ok(())
    }
}

/// The first of many hosts.
fn shortened(hosts: &[String]) -> String {
    match hosts.len() {
        0..=6 => hosts.join(" "),
        all => format!("{} and {} more", hosts[..5].join(" "), all - 5),
    }
}

impl List {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let view = self.brains.call(async |client| Ok(client.view().await?.cleaned()))?;
        console.report(&Jobs::new(&view))?;
        Ok(Exit::Good)
    }
}
