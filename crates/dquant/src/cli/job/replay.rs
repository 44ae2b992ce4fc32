//! `dquant job replay`: the command line of [`lab::replay`], and the form of its results.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::OnceLock;
use std::time::Duration;

use adapter::congestion::Choice;
use clap::Args;
use cluster::words::counted;
use lab::replay::exchange::{Edge, Iteration, Outcome};
use lab::replay::rank::{self, Place, Setup};
use lab::replay::rendezvous::JOB_PORT;
use lab::replay::schedule::Schedule;
use lab::replay::wire::Terms;
use lab::units;
use parfait::pattern::{Pattern, PatternError};
use serde::Serialize;
use service::seed::fresh_seed;

use crate::cli::daemons::span;
use crate::cli::perf::DeviceArgs;
use crate::cli::run::membership;
use crate::cli::{Console, Report};
use crate::exit::{CliError, Exit};

/// Replay a training job: pauses for its computing, and the exchanges of its pattern over the network
///
/// Each rank is a process, started in any order with the same options but --rank. An iteration is a
/// pause and then the pattern's phases; a phase of a rank ends when all that it sends is acknowledged
/// and all that it receives is there and compared. Edges with the highest rate of the pattern carry
/// --bytes-per-edge, others in proportion. Rates set no pace: messages go as fast as they can.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Ends with 1 when a byte was wrong, with 3 when a rank does not come or ends; the others say which.

Examples:
  dquant job replay ring:3@100M --all
  dquant job replay ring:3@100M --rank 0 --peers 10.0.0.1,10.0.0.2,10.0.0.3
  dquant job replay ring:3@100M --rank 2 --peers 10.0.0.1,10.0.0.2,10.0.0.3 --job llm
  dquant job replay hierarchical:2x4@2G,10G --all --iterations 20 --compute 10ms
  dquant job replay ring:3@1G --all --bytes-per-edge 16MiB --steps 4 --json
  dquant job replay ring:3@1G --rank 0 --peers 10.0.0.1,10.0.0.2,10.0.0.3 --device mlx5_0
  dquant job replay mesh:4@1G --all --dscp 26 --start-at 1767225600.5 --shift 40ms"
)]
pub(in crate::cli) struct Replay {
    /// The pattern, as in ring:16@5G; docs/parfait.md has all of them
    #[arg(value_name = "PATTERN")]
    pattern: String,

    /// The rank of this process, from 0
    #[arg(long, value_name = "R", required_unless_present = "all", requires = "peers")]
    rank: Option<u32>,

    /// Addresses of the ranks, in their order
    ///
    /// The others come to the first, at port 4793 unless it has one.
    #[arg(long, value_name = "IP[:PORT],...", value_delimiter = ',', value_parser = peer)]
    peers: Vec<SocketAddr>,

    /// All ranks in this process, on loopback unless --peers says where
    #[arg(long, conflicts_with = "rank")]
    all: bool,

    /// Iterations that are measured
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: u32,

    /// Iterations before them that are not
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=1000))]
    warm_up: u32,

    /// What the edges with the highest rate carry in an iteration
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = units::size_bytes)]
    bytes_per_edge: u64,

    /// Parts of each phase, one after the other
    ///
    /// A part begins when the part before has arrived.
    #[arg(long, value_name = "N", default_value_t = 1)]
    steps: u32,

    /// The pause of each iteration, in place of computing
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = span)]
    compute: Duration,

    /// DSCP of all packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=63))]
    dscp: Option<u8>,

    /// Take part in this job: the machine's agent says which DSCP its packets have
    #[arg(long, value_name = "NAME", conflicts_with = "dscp")]
    job: Option<String>,

    /// When the first iteration begins, in seconds since 1970
    ///
    /// Without it as soon as all ranks are there.
    #[arg(long, value_name = "SECONDS", value_parser = unix_ms)]
    start_at: Option<u64>,

    /// Delay of the first iteration, so that jobs on one link take turns
    #[arg(long, value_name = "TIME", value_parser = span)]
    shift: Option<Duration>,

    /// How long ranks wait for each other
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = span)]
    wait: Duration,

    /// Congestion control: auto, off, delay, swift, or one of docs/congestion.md
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = str::parse::<Choice>)]
    cc: Choice,

    #[command(flatten)]
    device: DeviceArgs,
}

/// An address of a rank; only the port of rank 0 is used.
fn peer(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let without_port = bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, JOB_PORT));
    without_port.or_else(|_| text.parse()).map_err(|_| "it is not IP[:PORT]".into())
}

/// Seconds with at most three decimals, in milliseconds.
fn unix_ms(text: &str) -> Result<u64, String> {
    let wrong = || "write seconds since 1970, as in 1767225600.250".to_owned();
    let (seconds, rest) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(seconds) || !is_number(rest) || rest.len() > 3 {
        return Err(wrong());
    }
    let seconds: u64 = seconds.parse().map_err(|_| wrong())?;
    let millis: u64 = format!("{rest:0<3}").parse().map_err(|_| wrong())?;
    seconds.checked_mul(1000).and_then(|ms| ms.checked_add(millis)).ok_or_else(wrong)
}

impl Replay {
    pub(in crate::cli) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let pattern: Pattern = self.pattern.parse().map_err(|error: PatternError| {
            CliError::from_cause(error).hint("docs/parfait.md has all patterns")
        })?;
        let schedule = Schedule::new(&pattern, self.bytes_per_edge, self.steps)?;
        let (peers, listener) = self.places(schedule.ranks())?;
        let dscp = match &self.job {
            Some(name) => membership(name, console)?.dscp,
            None => self.dscp.unwrap_or(0),
        };
        // Ranks report what they cannot do.
        service::log::enable();
        let setup = Setup {
            device: self.device.choice(),
            terms: Terms {
                pattern: pattern.to_string(),
                bytes: self.bytes_per_edge,
                steps: self.steps,
                iterations: self.iterations + self.warm_up,
            },
            schedule,
            peers,
            warm_up: self.warm_up,
            compute: roce_duration(self.compute),
            dscp,
            congestion: self.cc,
            wait: self.wait,
            start_at_ms: self.start_at,
            shift: roce_duration(self.shift.unwrap_or_default()),
            seed: fresh_seed()?,
        };
        let outcomes = match (self.rank, listener) {
            (Some(rank), None) => vec![rank::run(&setup, &Place::Guest(rank))?],
            (Some(_), Some(listener)) => vec![rank::run(&setup, &Place::Host(listener))?],
            (None, listener) => all(&setup, listener)?,
        };
        let mut exit = Exit::Good;
        for outcome in &outcomes {
            if outcome.wrong_messages > 0 {
                exit = Exit::CheckFailed;
            }
            if console.is_json() {
                for (number, iteration) in (0..).zip(&outcome.iterations) {
                    console.report(&IterationReport::new(outcome, number, iteration))?;
                }
            }
            console.report(&RankReport::new(&setup, outcome))?;
        }
        Ok(exit)
    }

    /// Where the ranks are, and rank 0's ear if that is here.
    fn places(&self, ranks: u32) -> Result<(Vec<SocketAddr>, Option<TcpListener>), CliError> {
        let mut peers = self.peers.clone();
        if self.all && peers.is_empty() {
            // Each rank has an address of its own: 127.77.0.1 and so on.
            let address = |rank: u32| Ipv4Addr::from_bits((127 << 24 | 77 << 16) + rank + 1);
            peers = (0..ranks).map(|rank| SocketAddr::from((address(rank), 0))).collect();
        }
        if peers.len() != ranks as usize {
            let why =
                format!("{} has {ranks} ranks, and --peers names {}", self.pattern, peers.len());
            return Err(CliError::usage(why).hint("name each rank's address, in their order"));
        }
        if let Some(rank) = self.rank.filter(|rank| *rank >= ranks) {
            let why = format!("there is no rank {rank}: {} has 0 to {}", self.pattern, ranks - 1);
            return Err(CliError::usage(why).hint("--rank is a place in --peers, from 0"));
        }
        if self.rank.is_some_and(|rank| rank > 0) {
            return Ok((peers, None));
        }
        let listener = TcpListener::bind(peers[0]).map_err(|error| {
            CliError::because(format_args!("rank 0 cannot listen at {}", peers[0]), &error)
                .hint("name an address of this machine, and a free port: IP:PORT")
        })?;
        peers[0] = listener.local_addr().map_err(CliError::from_cause)?;
        Ok((peers, Some(listener)))
    }
}

fn roce_duration(time: Duration) -> roce::Duration {
    roce::Duration::from_nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

/// Every rank on a thread of its own. The first failure explains the others, which follow from it:
/// all ranks end when one does.
fn all(setup: &Setup, listener: Option<TcpListener>) -> Result<Vec<Outcome>, service::Error> {
    let places =
        listener.map(Place::Host).into_iter().chain((1..setup.schedule.ranks()).map(Place::Guest));
    let failure = OnceLock::new();
    let outcomes: Vec<Option<Outcome>> = std::thread::scope(|scope| {
        // Those after the first are dropped.
        let failed = |error| drop(failure.set(error));
        let threads: Vec<_> = places
            .map(|place| scope.spawn(move || rank::run(setup, &place).map_err(failed).ok()))
            .collect();
        let panicked = |_| {
            failed(service::Error::invalid("a rank's thread has panicked"));
            None
        };
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    match failure.into_inner() {
        Some(first) => Err(first),
        None => Ok(outcomes.into_iter().flatten().collect()),
    }
}

/// One iteration of one rank.
#[derive(Serialize)]
struct IterationReport {
    rank: u32,
    iteration: u32,
    seconds: f64,
    exchange_seconds: f64,
    edges: Vec<EdgeReport>,
}

/// An edge in one iteration, or on average.
#[derive(Serialize)]
struct EdgeReport {
    phase: usize,
    to: u32,
    bytes: u64,
    gbps: f64,
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn gbps(bytes: u64, ns: u64) -> f64 {
    if ns == 0 { 0.0 } else { bytes as f64 * 8.0 / ns as f64 }
}

impl IterationReport {
    fn new(outcome: &Outcome, number: u32, iteration: &Iteration) -> IterationReport {
        let edges = outcome.edges.iter().zip(&iteration.edges_ns);
        IterationReport {
            rank: outcome.rank,
            iteration: number,
            seconds: seconds(iteration.total_ns),
            exchange_seconds: seconds(iteration.exchange_ns),
            edges: edges
                .map(|(&Edge { phase, to, bytes }, ns)| EdgeReport {
                    phase,
                    to,
                    bytes,
                    gbps: gbps(bytes, *ns),
                })
                .collect(),
        }
    }
}

impl Report for IterationReport {
    const SCHEMA: &'static str = "dquant.job.replay.iteration.v1";
}

impl fmt::Display for IterationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} iteration {}: {:.3} ms", self.rank, self.iteration, self.seconds * 1e3)
    }
}

/// Times that shares of the iterations do not exceed, in milliseconds.
#[derive(Serialize)]
struct Shares {
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Shares {
    /// Of times in nanoseconds, by rank in their order: exact, not from buckets.
    fn of(mut times: Vec<u64>) -> Shares {
        times.sort_unstable();
        let at = |percent: usize| {
            let place = (times.len() * percent).div_ceil(100).max(1) - 1;
            times.get(place).map_or(0.0, |ns| *ns as f64 / 1e6)
        };
        Shares { p50: at(50), p90: at(90), p99: at(99), max: at(100) }
    }
}

/// What a rank measured.
#[derive(Serialize)]
struct RankReport {
    pattern: String,
    rank: u32,
    iterations: usize,
    dscp: u8,
    iteration_ms: Shares,
    exchange_ms: Shares,
    edges: Vec<EdgeReport>,
    verified_bytes: u64,
    wrong_messages: u64,
    retransmitted: Option<u64>,
}

impl RankReport {
    fn new(setup: &Setup, outcome: &Outcome) -> RankReport {
        let times =
            |of: fn(&Iteration) -> u64| Shares::of(outcome.iterations.iter().map(of).collect());
        let count = outcome.iterations.len() as u64;
        let mean = |(at, &Edge { phase, to, bytes }): (usize, &Edge)| {
            let ns = outcome.iterations.iter().filter_map(|one| one.edges_ns.get(at)).sum();
            EdgeReport { phase, to, bytes, gbps: gbps(bytes * count, ns) }
        };
        RankReport {
            pattern: setup.terms.pattern.clone(),
            rank: outcome.rank,
            iterations: outcome.iterations.len(),
            dscp: setup.dscp,
            iteration_ms: times(|one| one.total_ns),
            exchange_ms: times(|one| one.exchange_ns),
            edges: outcome.edges.iter().enumerate().map(mean).collect(),
            verified_bytes: outcome.verified_bytes,
            wrong_messages: outcome.wrong_messages,
            retransmitted: outcome.retransmitted,
        }
    }
}

impl Report for RankReport {
    const SCHEMA: &'static str = "dquant.job.replay.v1";
}

impl fmt::Display for RankReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RankReport { pattern, rank, iterations, iteration_ms, exchange_ms, .. } = self;
        let iterations = counted(*iterations, "iteration");
        writeln!(f, "rank {rank} of {pattern}, {iterations}, DSCP {}", self.dscp)?;
        writeln!(f, "  {:<13} {:>10} {:>10} {:>10} {:>10}", "ms", "p50", "p90", "p99", "max")?;
        for (name, Shares { p50, p90, p99, max }) in
            [("iteration", iteration_ms), ("exchange", exchange_ms)]
        {
            writeln!(f, "  {name:<13} {p50:>10.3} {p90:>10.3} {p99:>10.3} {max:>10.3}")?;
        }
        for EdgeReport { phase, to, bytes, gbps } in &self.edges {
            writeln!(f, "  phase {phase}, {bytes} bytes to rank {to}: {gbps:.3} Gbit/s")?;
        }
        let RankReport { verified_bytes, wrong_messages, retransmitted, .. } = self;
        let again = match retransmitted {
            Some(packets) => format!("{} retransmitted", counted(*packets, "packet")),
            None => "retransmissions not counted by this device".to_owned(),
        };
        write!(
            f,
            "  {} compared, {} wrong, {again}",
            counted(*verified_bytes, "byte"),
            counted(*wrong_messages, "message")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_exact() {
        let Shares { p50, p90, p99, max } =
            Shares::of((1..=200).rev().map(|ms| ms * 1_000_000).collect());
        assert_eq!([p50, p90, p99, max].map(|ms| ms as u32), [100, 180, 198, 200]);
        assert_eq!(Shares::of(vec![7_000_000]).p99 as u32, 7);
        assert_eq!(Shares::of(Vec::new()).max as u32, 0);
    }

    #[test]
    fn retransmissions_that_nobody_counts_are_not_reported_as_none() {
        let report = |retransmitted| RankReport {
            pattern: "ring:2@1G".to_owned(),
            rank: 0,
            iterations: 1,
            dscp: 0,
            iteration_ms: Shares::of(vec![1]),
            exchange_ms: Shares::of(vec![1]),
            edges: Vec::new(),
            verified_bytes: 0,
            wrong_messages: 0,
            retransmitted,
        };
        assert!(report(Some(0)).to_string().ends_with("0 packets retransmitted"));
        assert!(report(None).to_string().ends_with("not counted by this device"));
        let json = serde_json::to_value(report(None)).expect("it is JSON");
        assert!(json["retransmitted"].is_null());
    }

    #[test]
    fn times_since_1970_have_milliseconds() {
        assert_eq!(unix_ms("1767225600.25"), Ok(1_767_225_600_250));
        assert_eq!(unix_ms("7"), Ok(7000));
        for wrong in ["", ".", "1.", ".5", "1.2345", "-1", "1e3", "99999999999999999999"] {
            assert!(unix_ms(wrong).is_err(), "{wrong}");
        }
    }
}
