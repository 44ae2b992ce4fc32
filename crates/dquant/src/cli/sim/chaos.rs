//! `dquant sim chaos`: random programs under random faults, every completion and byte checked.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::{Duration, Instant};

use ::topology::graph::{Capacity, Topology};
use ::topology::shape::{Shape, ShapeError};
use clap::Args;
use lab::chaos::{self, Outcomes};
use lab::units::Count;
use serde::Serialize;
use sim::chaos::{Options, Summary};
use sim::faults::Fault;
use sim::topology::separate_hosts;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Run random programs under random faults, and check every completion and every byte
///
/// A seed draws machines, links, connections, programs and a mix of faults: loss, duplicates,
/// reordering, delay, bit flips, truncation, strays, link flaps, restarts, back-pressure. In 15 %
/// of the seeds the network is a fat tree of 20 switches, where links and switches fail, pauses are lost
/// and NICs pause their switch. Then everything heals, and what is outstanding has to finish within a
/// bound. A seed always gives the same run; one that fails is named with the command that replays it, and
/// the exit code is 1.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant sim chaos --seeds 0..2000
  dquant sim chaos --seeds 1417         one seed again
  dquant sim chaos --seeds 0..500 --json
  dquant sim chaos --seeds 0..500 --topology fat-tree:4"
)]
pub(super) struct Chaos {
    /// Seeds to run: FIRST..END, without END, or a single one
    #[arg(long, default_value = "0..200", value_parser = parse_seeds)]
    seeds: Range<u64>,

    /// Send work requests per seed, instead of the 200 to 900 that each draws
    #[arg(long, value_name = "COUNT")]
    sends: Option<u64>,

    /// Network of every seed, like fat-tree:4 or leaf-spine:4x2x8; its links and switches fail
    #[arg(long, value_name = "RULE", value_parser = parse_network)]
    topology: Option<Network>,

    /// Seeds at once; as many as there are cores if not given
    #[arg(long, value_name = "COUNT")]
    threads: Option<NonZeroUsize>,

    /// Make the transport make this mistake
    #[cfg(feature = "seeded-bugs")]
    #[arg(long, value_name = "NAME", value_parser = parse_bug)]
    bug: Option<roce::seeded::Bug>,
}

#[cfg(feature = "seeded-bugs")]
fn parse_bug(text: &str) -> Result<roce::seeded::Bug, String> {
    let all = roce::seeded::Bug::ALL;
    all.into_iter().find(|bug| bug.to_string() == text).ok_or_else(|| {
        let names: Vec<String> = all.iter().map(ToString::to_string).collect();
        format!("there are: {}", names.join(", "))
    })
}

/// A topology for programs, and the rule that made it.
#[derive(Clone, Debug)]
struct Network {
    shape: Shape,
    topology: Topology,
}

fn parse_network(text: &str) -> Result<Network, String> {
    let shape: Shape = text.parse().map_err(|error: ShapeError| error.to_string())?;
    let topology = shape.build(Capacity::default()).map_err(|error| error.to_string())?;
    let name = |id| topology.node(id).name();
    if topology.hosts().nth(1).is_none() {
        return Err(String::from("programs need two hosts"));
    }
    if let Some([a, b]) = separate_hosts(&topology) {
        return Err(format!("no way over switches joins {} and {}", name(a), name(b)));
    }
    Ok(Network { shape, topology })
}

pub(super) fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let number = |part: &str| part.trim().parse::<u64>().map_err(|error| error.to_string());
    match text.split_once("..") {
        None => {
            let seed = number(text)?;
            let end = seed.checked_add(1).ok_or("the last seed is 18446744073709551614")?;
            Ok(seed..end)
        }
        Some((first, end)) => {
            let seeds = number(first)?..number(end)?;
            if seeds.is_empty() { Err(format!("there is no seed in {text}")) } else { Ok(seeds) }
        }
    }
}

impl Chaos {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let options = self.options();
        let started = Instant::now();
        let total = self.seeds.end - self.seeds.start;
        let outcomes = chaos::run(self.seeds.clone(), self.threads, &options, |done| {
            if done.is_multiple_of(16) {
                console.progress(format_args!("{done} of {total} seeds"));
            }
        });
        let report = ChaosReport::new(&self, outcomes, started.elapsed());
        for failure in &report.failures {
            console.note(format_args!("seed {}: {}", failure.seed, failure.what));
            console.note(format_args!("replay: {}", failure.replay));
        }
        let exit = if report.failures.is_empty() { Exit::Good } else { Exit::CheckFailed };
        console.report(&report)?;
        Ok(exit)
    }

    fn options(&self) -> Options {
        Options {
            sends: self.sends,
            topology: self.topology.as_ref().map(|network| network.topology.clone()),
            #[cfg(feature = "seeded-bugs")]
            bug: self.bug,
            ..Options::default()
        }
    }

    /// The command that replays one seed.
    fn replay(&self, seed: u64) -> String {
        let sends = self.sends.map_or(String::new(), |sends| format!(" --sends {sends}"));
        let topology = self.topology.as_ref();
        let topology = topology.map_or(String::new(), |it| format!(" --topology {}", it.shape));
        #[cfg(feature = "seeded-bugs")]
        let bug = self.bug.map_or(String::new(), |bug| format!(" --bug {bug}"));
        #[cfg(not(feature = "seeded-bugs"))]
        let bug = "";
        format!("dquant sim chaos --seeds {seed}{sends}{topology}{bug}")
    }
}

/// The result of a range of seeds.
#[derive(Debug, Serialize)]
struct ChaosReport {
    seeds: u64,
    failed: u64,
    failures: Vec<Failure>,
    sends: u64,
    receives: u64,
    completions_checked: u64,
    completions_not_success: u64,
    bytes_checked: u64,
    atomics_checked: u64,
    /// Atomic operations on words whose history allows too many orders to try them all.
    atomics_open: u64,
    /// Request packets of reliable connections that were checked against the rules of the wire, and
    /// not.
    requests_checked: u64,
    requests_skipped: u64,
    requests_checked_per_mille: u64,
    /// Packets forged by hostile peers.
    packets_forged: u64,
    connections: u64,
    connections_broken: u64,
    packets: u64,
    retransmitted_packets: u64,
    queue_drops: u64,
    pauses: u64,
    /// Packets that watchdogs dropped, that ended at their hop limit, and for which a switch had no route.
    watchdog_drops: u64,
    expired_packets: u64,
    unrouted_packets: u64,
    harmless_damage: u64,
    faults: Vec<FaultLine>,
    recovery: Recovery,
    events: u64,
    simulated_ns: u64,
    wall_ns: u64,
    events_per_second: u64,
    counters: Vec<(&'static str, u64)>,
}

#[derive(Debug, Serialize)]
struct Failure {
    seed: u64,
    what: String,
    replay: String,
}

#[derive(Debug, Serialize)]
struct FaultLine {
    kind: &'static str,
    injected: u64,
    effective: u64,
}

/// From the end of the faults until everything outstanding had finished.
#[derive(Debug, Serialize)]
struct Recovery {
    median_ns: u64,
    p99_ns: u64,
    max_ns: u64,
    /// The seed that used most of its bound, in per mille of it.
    closest_to_bound_per_mille: u64,
}

impl ChaosReport {
    fn new(command: &Chaos, outcomes: Outcomes, wall: Duration) -> ChaosReport {
        let Outcomes { sum, failures } = outcomes;
        let failures = failures.into_iter();
        let failures: Vec<Failure> = failures
            .map(|(seed, what)| Failure { seed, what, replay: command.replay(seed) })
            .collect();
        let wall_ns = wall.as_nanos() as u64;
        ChaosReport {
            seeds: command.seeds.end - command.seeds.start,
            failed: failures.len() as u64,
            failures,
            sends: sum.sends,
            receives: sum.receives,
            completions_checked: sum.completions,
            completions_not_success: sum.failures,
            bytes_checked: sum.bytes_checked,
            atomics_checked: sum.atomics,
            atomics_open: sum.atomics_open,
            requests_checked: sum.requests_checked,
            requests_skipped: sum.requests_skipped,
            requests_checked_per_mille: sum.requests_checked_per_mille(),
            packets_forged: sum.forged,
            connections: sum.connections,
            connections_broken: sum.broken,
            packets: sum.packets,
            retransmitted_packets: sum.retransmitted,
            queue_drops: sum.queue_drops,
            pauses: sum.pauses,
            watchdog_drops: sum.conduct.watchdog_drops,
            expired_packets: sum.conduct.expired,
            unrouted_packets: sum.conduct.unrouted,
            harmless_damage: sum.harmless,
            faults: fault_lines(&sum),
            recovery: Recovery {
                median_ns: sum.recovery_ns(50),
                p99_ns: sum.recovery_ns(99),
                max_ns: sum.recovery_ns(100),
                closest_to_bound_per_mille: sum.closest_to_bound_per_mille(),
            },
            events: sum.events,
            simulated_ns: sum.simulated_ns,
            wall_ns,
            events_per_second: (u128::from(sum.events) * 1_000_000_000 / u128::from(wall_ns.max(1)))
                as u64,
            counters: sum.counters,
        }
    }
}

fn fault_lines(sum: &Summary) -> Vec<FaultLine> {
    let line = |&fault: &Fault| FaultLine {
        kind: fault.name(),
        injected: sum.faults.injected[fault as usize],
        effective: sum.faults.effective[fault as usize],
    };
    Fault::ALL.iter().map(line).collect()
}

impl Report for ChaosReport {
    const SCHEMA: &'static str = "dquant.sim.chaos/1";
}

impl fmt::Display for ChaosReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.failed == 0 { "all good" } else { "FAILED" };
        writeln!(f, "{} seeds, {} failed: {verdict}", Count(self.seeds), Count(self.failed))?;
        self.write_work(f)?;
        writeln!(f, "  {:<14}{:>10}{:>12}", "fault", "injected", "effective")?;
        for FaultLine { kind, injected, effective } in &self.faults {
            writeln!(f, "  {kind:<14}{:>10}{:>12}", Count(*injected), Count(*effective))?;
        }
        let Recovery { median_ns, p99_ns, max_ns, closest_to_bound_per_mille } = self.recovery;
        let ns = roce::Duration::from_nanos;
        writeln!(
            f,
            "  recovery    median {}, p99 {}, max {}; at most {} % of its bound",
            ns(median_ns),
            ns(p99_ns),
            ns(max_ns),
            closest_to_bound_per_mille / 10
        )?;
        write!(
            f,
            "  {} events in {}, {} events/s; {} simulated",
            Count(self.events),
            ns(self.wall_ns),
            Count(self.events_per_second),
            ns(self.simulated_ns)
        )
    }
}

impl ChaosReport {
    fn write_work(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (sends, receives) = (Count(self.sends), Count(self.receives));
        writeln!(f, "  posted      {sends} sends, {receives} receives")?;
        writeln!(
            f,
            "  checked     {} completions ({} not success), {} bytes, {} atomics",
            Count(self.completions_checked),
            Count(self.completions_not_success),
            Count(self.bytes_checked),
            Count(self.atomics_checked)
        )?;
        writeln!(
            f,
            "  on the wire {} of {} request packets checked ({}.{} %)",
            Count(self.requests_checked),
            Count(self.requests_checked + self.requests_skipped),
            self.requests_checked_per_mille / 10,
            self.requests_checked_per_mille % 10
        )?;
        writeln!(
            f,
            "  connections {} made, {} broke",
            Count(self.connections),
            Count(self.connections_broken)
        )?;
        writeln!(
            f,
            "  packets     {} sent, {} of them retransmissions; {} dropped by full queues; {} forged",
            Count(self.packets),
            Count(self.retransmitted_packets),
            Count(self.queue_drops),
            Count(self.packets_forged)
        )?;
        writeln!(
            f,
            "  switches    {} pauses; packets without a route {}, at their hop limit {}, dropped by watchdogs {}",
            Count(self.pauses),
            Count(self.unrouted_packets),
            Count(self.expired_packets),
            Count(self.watchdog_drops)
        )
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_a_range_or_one() {
        assert_eq!(parse_seeds("3..7"), Ok(3..7));
        assert_eq!(parse_seeds("17"), Ok(17..18));
        assert!(parse_seeds("7..3").is_err() && parse_seeds("x").is_err());
        let last = u64::MAX - 1;
        assert_eq!(parse_seeds(&last.to_string()), Ok(last..u64::MAX));
        assert!(parse_seeds(&u64::MAX.to_string()).is_err());
    }

    #[test]
    fn a_network_has_hosts_that_reach_each_other() {
        let refused = |rule: &str| parse_network(rule).unwrap_err();
        assert!(refused("bcube:2x1").contains("joins"), "{}", refused("bcube:2x1"));
        assert!(refused("leaf-spine:1x1x1").contains("two hosts"));
        assert!(refused("tree").contains("topology rule"));
    }

    #[test]
    fn a_failure_is_named_with_its_replay() {
        let command = Chaos {
            seeds: 4..6,
            sends: Some(9),
            topology: Some(parse_network("fat-tree:4").unwrap()),
            threads: None,
            #[cfg(feature = "seeded-bugs")]
            bug: None,
        };
        let mut outcomes = Outcomes::default();
        outcomes.add(5, Err(String::from("lost")));
        outcomes.add(4, Ok(Summary { seeds: 1, ..Summary::default() }));
        let report = ChaosReport::new(&command, outcomes, Duration::from_secs(1));
        assert_eq!((report.seeds, report.failed), (2, 1));
        assert_eq!(
            report.failures[0].replay,
            "dquant sim chaos --seeds 5 --sends 9 --topology fat-tree:4"
        );
        assert!(report.to_string().contains("FAILED"));
    }
}
