//! `dquant parfait profile`: a job's demand from what was seen of it ([`parfait::profile`]).

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use lab::input;
use lab::profiling::{self, Names, Traffic};
use lab::units;
use parfait::pattern::Pattern;
use parfait::profile::{Options, Profile, ProfileError, profile};
use roce::Duration;
use serde::Serialize;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit, INPUT_HINT};

/// The largest file that is read; it is held in memory.
const MAX_BYTES: u64 = 2 << 30;

/// Largest map of addresses.
const MAX_MAP_BYTES: u64 = 1 << 20;

/// Edges that the text lists; JSON has all.
const LISTED: usize = 24;

/// Derive a job from a capture or from counters of a run, as `dquant job submit` takes it
///
/// FILE is a capture of RoCEv2 (pcap or pcapng; the first 64 bytes of packets are enough) that has the packets
/// of all workers, or a table of counters: `time,from,to,bytes` on the first line, then on each the time in
/// seconds, both ends, and the bytes since the line before of that edge (`total` instead of `bytes`: since any
/// beginning). Ten iterations are better than three.
///
/// The first line of the result is the job, with the cycle in which it computes and exchanges; `ranks` says
/// which worker has which rank. If no pattern explains four fifths of the bytes, the job is a mesh that covers
/// all of them, and the closest pattern is named.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 1: no pattern explains the traffic.

Examples:
  dquant capture live --interface any --duration 10s -o run.pcap; dquant parfait profile run.pcap
  dquant parfait profile run.pcapng --map workers.txt --iteration 250ms
  dquant parfait profile counters.csv --period 300ms --communication 20ms
  dquant parfait profile run.pcap --json"
)]
pub(super) struct ProfileCommand {
    /// A capture, or a table of counters
    file: PathBuf,

    /// Workers by address, `ADDRESS NAME` on each line; other addresses are left out
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,

    /// How long an iteration takes in the file, if it is known [default: found]
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    period: Option<Duration>,

    /// How long an iteration is to take: compute stays as it was, the rest is for communication
    #[arg(long, value_name = "TIME", value_parser = units::duration)]
    iteration: Option<Duration>,

    /// How long communication is to take in each iteration [default: as in the file]
    #[arg(long, value_name = "TIME", value_parser = units::duration, conflicts_with = "iteration")]
    communication: Option<Duration>,
}

/// What a file has to be.
const FORMAT_HINT: &str =
    "FILE is a pcap or pcapng capture, or a table that begins with `time,from,to,bytes`";

impl ProfileCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let names = match &self.map {
            Some(map) => Names::parse(&input::read(map, MAX_MAP_BYTES)?)
                .map_err(|error| CliError::because(map.display(), &error))?,
            None => Names::default(),
        };
        let bytes = read(&self.file)?;
        let traffic = profiling::read(&bytes, &names)
            .map_err(|error| CliError::because(self.file.display(), &error).hint(FORMAT_HINT))?;
        let ns = |time: Option<Duration>| time.map(Duration::as_nanos);
        let options = Options {
            period_ns: ns(self.period),
            iteration_ns: ns(self.iteration),
            communication_ns: ns(self.communication),
            overhead_ppm: traffic.overhead_ppm,
        };
        let found = profile(traffic.workers.len(), &traffic.samples, options)
            .map_err(|error| refused(&self.file, &error, &traffic))?;
        let exit = if found.is_custom() { Exit::CheckFailed } else { Exit::Good };
        console.report(&Profiled::new(&traffic, &found))?;
        Ok(exit)
    }
}

fn refused(file: &Path, error: &ProfileError, traffic: &Traffic) -> CliError {
    let refusal = CliError::because(file.display(), error);
    match error {
        ProfileError::Nothing => refusal.hint(format_args!(
            "{} packets or lines were read that are of no worker; is it RoCEv2, and does --map have all addresses?",
            traffic.others
        )),
        ProfileError::NoPeriod(_) => refusal.hint("say how long an iteration takes with --period"),
        _ => refusal,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    let name = path.display();
    let cannot =
        |error| CliError::because(format_args!("cannot read {name}"), &error).hint(INPUT_HINT);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(cannot)?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(CliError::usage(format_args!("{name} has more than {} MiB", MAX_BYTES >> 20))
            .hint("keep the headers alone: editcap -s 128 IN OUT"));
    }
    Ok(bytes)
}

/// The result.
#[derive(Debug, Serialize)]
struct Profiled {
    job: String,
    pattern: String,
    custom: bool,
    residual: f64,
    ranks: Vec<String>,
    iterations: usize,
    period_ns: u64,
    communication_ns: u64,
    edges: Vec<EdgeOf>,
    packets_counted: u64,
    packets_repeated: u64,
    packets_missing: u64,
    others: u64,
}

#[derive(Debug, Serialize)]
struct EdgeOf {
    from: String,
    to: String,
    bytes: u64,
}

impl Profiled {
    fn new(traffic: &Traffic, found: &Profile) -> Profiled {
        let name = |worker: u32| traffic.workers[worker as usize].clone();
        let edge = |edge: &parfait::profile::Edge| EdgeOf {
            from: name(edge.from),
            to: name(edge.to),
            bytes: edge.bytes,
        };
        let custom = found.is_custom();
        Profiled {
            job: found.job.to_string(),
            pattern: match custom {
                true => format!("custom; closest is {}", found.pattern),
                false => name_of(&found.pattern),
            },
            custom,
            residual: found.residual_ppm as f64 / 1e6,
            ranks: found.ranks.iter().map(|worker| name(*worker)).collect(),
            iterations: found.iterations,
            period_ns: found.period_ns,
            communication_ns: found.communication_ns,
            edges: found.edges.iter().map(edge).collect(),
            packets_counted: traffic.counts.counted,
            packets_repeated: traffic.counts.repeated,
            packets_missing: traffic.counts.filled,
            others: traffic.others,
        }
    }
}

fn name_of(pattern: &Pattern) -> String {
    pattern.to_string().split(':').next().unwrap_or_default().to_owned()
}

impl Report for Profiled {
    const SCHEMA: &'static str = "dquant.parfait.profile/1";
}

impl fmt::Display for Profiled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns as f64 / 1e6;
        writeln!(f, "{}", self.job)?;
        writeln!(
            f,
            "pattern      {}, {:.1} % of the bytes unexplained",
            self.pattern,
            self.residual * 100.0
        )?;
        writeln!(
            f,
            "iterations   {} of {:.1} ms, {:.1} ms of it communication",
            self.iterations,
            ms(self.period_ns),
            ms(self.communication_ns)
        )?;
        if self.packets_counted > 0 {
            writeln!(
                f,
                "packets      {} counted, {} repeated, {} missing and filled in, {} others",
                self.packets_counted, self.packets_repeated, self.packets_missing, self.others
            )?;
        }
        write!(f, "ranks        {}", self.ranks.join(" "))?;
        for edge in self.edges.iter().take(LISTED) {
            write!(f, "\n{:>15} bytes  {} -> {}", edge.bytes, edge.from, edge.to)?;
        }
        match self.edges.len().checked_sub(LISTED) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "\n… and {more} more edges; --json has all"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        profile: ProfileCommand,
    }

    #[test]
    fn times_are_read_as_what_they_are_kept_as() {
        for (option, other) in [("--iteration", "--period"), ("--communication", "--period")] {
            let line = Line::try_parse_from(["profile", "run.pcap", option, "250ms", other, "1s"]);
            let profile = line.expect("a command").profile;
            let time = profile.iteration.or(profile.communication).map(Duration::as_nanos);
            assert_eq!(
                (time, profile.period.map(Duration::as_nanos)),
                (Some(250_000_000), Some(1_000_000_000))
            );
        }
    }
}
