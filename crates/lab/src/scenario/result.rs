//! What a run of a scenario came to: slowdowns by size, queues, pauses, and the cost of the
//! simulation.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use roce::Time;
use roce::verbs::WcStatus;
use serde::Serialize;
use sim::graph::Vertex;
use sim::network::Cause;
use sim::traffic::{GivenUp, Outcome, Record, Slowdowns};

use super::Prepared;
use super::file::FaultKind;

/// Sizes by which slowdowns are reported: above, up to, and the words.
const SIZES: [(u64, u64, &str); 4] = [
    (0, 100_000, "up to 100 kB"),
    (100_000, 1_000_000, "to 1 MB"),
    (1_000_000, u64::MAX, "above 1 MB"),
    (0, u64::MAX, "all"),
];

/// Slowdowns of the flows of one class of sizes. A slowdown is the completion time beside that of
/// the same flow in an empty network.
#[derive(Clone, Debug, Serialize)]
pub struct SizeRow {
    /// Flows longer than this, in bytes.
    pub above_bytes: u64,
    /// And not longer than this; none for no limit.
    pub up_to_bytes: Option<u64>,
    #[serde(skip)]
    name: &'static str,
    /// How many have arrived.
    pub flows: u64,
    /// Mean slowdown.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

/// See the module's text.
#[derive(Clone, Debug, Serialize)]
pub struct RunResult {
    /// What the scenario shows.
    pub title: String,
    /// Congestion control.
    pub control: String,
    /// Hosts of the network.
    pub hosts: u32,
    /// Ports of each that flows choose among.
    pub ports: u32,
    /// Its switches.
    pub switches: u32,
    /// Rate of a host's link.
    pub host_bps: u64,
    /// Round-trip time without queues.
    pub base_rtt_ns: u64,
    /// Flows of the workload.
    pub flows: u64,
    /// Those that had not arrived at the deadline.
    pub unfinished: u64,
    /// Those whose connection failed.
    pub failed: u32,
    /// When the last one arrived, or the run was ended.
    pub simulated_ns: u64,
    /// Slowdowns by size.
    pub slowdowns: Vec<SizeRow>,
    /// From the first start to the end, payload of all hosts.
    pub goodput_bps: u64,
    /// Jain's index over the rates of flows: 1 where all are equal.
    pub fairness: f64,
    /// The longest queue of a switch at any time.
    pub queue_peak_bytes: u64,
    /// The link in front of which it was.
    pub queue_peak_at: String,
    /// Packets dropped.
    pub dropped: u64,
    /// Packets that had no way to their host.
    pub unrouted: u64,
    /// Links that wait for each other for ever, where flows are missing.
    pub deadlock: Option<String>,
    /// What faults did, where the scenario has some.
    pub faults: Option<FaultResult>,
    /// Flows that gave up, or had not arrived at the end; the first ones of them.
    pub missing: Vec<MissingFlow>,
    /// Packets marked.
    pub marked: u64,
    /// How often links were paused.
    pub pauses: u64,
    /// How long, in all.
    pub paused_ns: u64,
    /// Packets that hosts have received.
    pub packets_received: u64,
    /// Packets that they have sent again.
    pub packets_resent: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Processor time that they took.
    pub cpu_ns: u64,
}

/// What faults did.
#[derive(Clone, Debug, Serialize)]
pub struct FaultResult {
    /// Those of the scenario.
    pub planned: Vec<PlannedFault>,
    /// How many had begun when the run ended.
    pub begun: u32,
    /// Packets lost, by cause.
    pub lost: BTreeMap<&'static str, u64>,
    /// Times that routes were computed anew.
    pub reroutes: u64,
    /// Times that a connection lost packets to a fault, until it had them again.
    pub hits: u64,
    /// From the first packet that a connection lost until all had come again.
    pub recovery: Recovery,
}

/// A fault of the scenario.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedFault {
    /// As in the scenario.
    pub kind: FaultKind,
    /// The link or switch.
    pub place: String,
    /// When it begins.
    pub from_ns: u64,
    /// When it ends, if it does.
    pub until_ns: Option<u64>,
    #[serde(skip)]
    text: String,
}

/// Quantiles of the time until connections had recovered.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Recovery {
    /// How many have.
    pub count: u64,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl FaultResult {
    fn new(prepared: &Prepared, outcome: &Outcome) -> FaultResult {
        let planned = prepared.faults.iter().map(|fault| PlannedFault {
            kind: fault.kind,
            place: fault.place.clone(),
            from_ns: fault.timed.from.as_nanos(),
            until_ns: fault.timed.until.map(Time::as_nanos),
            text: fault.to_string(),
        });
        let spans = outcome.losses.recoveries.iter().map(|span| span.as_nanos()).collect();
        let Slowdowns { flows: count, p50: p50_ns, p99: p99_ns, max: max_ns, .. } =
            Slowdowns::of(spans);
        FaultResult {
            planned: planned.collect(),
            begun: outcome.faults,
            lost: Cause::ALL.map(Cause::name).into_iter().zip(outcome.losses.packets).collect(),
            reroutes: outcome.reroutes,
            hits: outcome.losses.hits,
            recovery: Recovery { count, p50_ns, p99_ns, max_ns },
        }
    }
}

/// A flow that has not arrived.
#[derive(Clone, Debug, Serialize)]
pub struct MissingFlow {
    /// Its number, from 0.
    pub flow: u64,
    /// The sending host.
    pub from: String,
    /// The receiving host.
    pub to: String,
    /// Payload.
    pub bytes: u64,
    /// When it gave up, if it did.
    pub gave_up_ns: Option<u64>,
    /// Why it is missing.
    pub why: &'static str,
}

/// Most of them that are named.
const MAX_MISSING: usize = 1_000;

impl MissingFlow {
    fn all(prepared: &Prepared, outcome: &Outcome) -> Vec<MissingFlow> {
        let missing = (0..).zip(&outcome.records).filter(|(_, flow)| flow.arrived.is_none());
        let one = |(flow, record): (u64, &Record)| MissingFlow {
            flow,
            from: prepared.name(Vertex::Node(record.from)),
            to: prepared.name(Vertex::Node(record.to)),
            bytes: record.bytes,
            gave_up_ns: record.gave_up.map(|end| end.at.as_nanos()),
            why: match (record.gave_up, record.started) {
                (None, None) => "it waited for others",
                (None, _) if record.is_cut => "no way led to its receiver at the end",
                (None, _) => "the run ended",
                (Some(GivenUp { status: WcStatus::RetryExceeded, .. }), _) if record.is_cut => {
                    "retries exceeded, and no way led to its receiver"
                }
                (Some(GivenUp { status: WcStatus::RetryExceeded, .. }), _) => "retries exceeded",
                (Some(_), _) => "its connection failed",
            },
        };
        missing.take(MAX_MISSING).map(one).collect()
    }
}

impl RunResult {
    /// Of a run that took so much processor time.
    pub fn new(prepared: &Prepared, outcome: &Outcome, cpu: Duration) -> RunResult {
        let longest = outcome.links.iter().filter(|link| matches!(link.from, Vertex::Switch(_)));
        let longest = longest.max_by_key(|link| link.stats.peak_bytes);
        let [_, received, resent] = outcome.packets;
        RunResult {
            title: prepared.title.clone(),
            control: prepared.control.clone(),
            hosts: prepared.hosts.count,
            ports: prepared.hosts.ports(),
            switches: prepared.topology.switches().count() as u32,
            host_bps: prepared.host_bps,
            base_rtt_ns: prepared.base_rtt.as_nanos(),
            flows: outcome.records.len() as u64,
            unfinished: outcome.unfinished() - u64::from(outcome.failed),
            failed: outcome.failed,
            simulated_ns: outcome.ended.as_nanos(),
            slowdowns: SIZES.iter().filter_map(|size| SizeRow::new(outcome, *size)).collect(),
            goodput_bps: outcome.goodput_bps(),
            fairness: outcome.fairness_per_mille() as f64 / 1e3,
            queue_peak_bytes: longest.map_or(0, |link| link.stats.peak_bytes),
            queue_peak_at: longest.map_or(String::new(), |link| {
                format!("{} to {}", prepared.name(link.from), prepared.name(link.to))
            }),
            dropped: outcome.total(|stats| stats.dropped),
            unrouted: outcome.unrouted,
            deadlock: outcome.deadlock.as_ref().map(|deadlock| {
                let names: Vec<String> =
                    deadlock.at.iter().map(|&vertex| prepared.name(vertex)).collect();
                format!("class {}: {}", deadlock.class, names.join(" -> "))
            }),
            faults: (!prepared.faults.is_empty()).then(|| FaultResult::new(prepared, outcome)),
            missing: MissingFlow::all(prepared, outcome),
            marked: outcome.total(|stats| stats.marked),
            pauses: outcome.total(|stats| stats.pauses),
            paused_ns: outcome.paused().as_nanos(),
            packets_received: received,
            packets_resent: resent,
            events: outcome.events,
            cpu_ns: cpu.as_nanos() as u64,
        }
    }

    /// Whether every flow has arrived.
    pub fn is_complete(&self) -> bool {
        self.unfinished == 0 && self.failed == 0
    }

    /// The slowdowns of all flows up to a size class: the row with this name.
    pub fn row(&self, above_bytes: u64, up_to_bytes: Option<u64>) -> Option<&SizeRow> {
        let is_it =
            |row: &&SizeRow| (row.above_bytes, row.up_to_bytes) == (above_bytes, up_to_bytes);
        self.slowdowns.iter().find(is_it)
    }
}

impl SizeRow {
    fn new(outcome: &Outcome, (above, up_to, name): (u64, u64, &'static str)) -> Option<SizeRow> {
        let Slowdowns { flows, mean, p50, p99, p999, max } = outcome.slowdowns(above, up_to);
        let one = |per_mille: u64| per_mille as f64 / 1e3;
        (flows > 0).then(|| SizeRow {
            above_bytes: above,
            up_to_bytes: (up_to < u64::MAX).then_some(up_to),
            name,
            flows,
            mean: one(mean),
            p50: one(p50),
            p99: one(p99),
            p999: one(p999),
            max: one(max),
        })
    }
}

/// Flows and faults that are named in a text.
const MOST_NAMED: usize = 8;

impl RunResult {
    fn list_missing(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for MissingFlow { flow, from, to, bytes, gave_up_ns, why } in
            self.missing.iter().take(MOST_NAMED)
        {
            let kilobytes = *bytes as f64 / 1e3;
            write!(f, "              flow {flow}, {from} -> {to}, {kilobytes:.1} kB: {why}")?;
            match gave_up_ns {
                Some(at) => writeln!(f, ", at {:.3} ms", *at as f64 / 1e6)?,
                None => writeln!(f)?,
            }
        }
        let missing = self.unfinished + u64::from(self.failed);
        match missing.checked_sub(MOST_NAMED as u64) {
            None | Some(0) => Ok(()),
            Some(more) => writeln!(f, "              and {more} more"),
        }
    }
}

impl fmt::Display for FaultResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultResult { planned, begun, lost, reroutes, hits, recovery } = self;
        write!(f, "  faults      {begun} of {} had begun", planned.len())?;
        for fault in planned.iter().take(MOST_NAMED) {
            write!(f, "\n              {}", fault.text)?;
        }
        if planned.len() > MOST_NAMED {
            write!(f, "\n              and {} more", planned.len() - MOST_NAMED)?;
        }
        let some = lost.iter().filter(|(_, packets)| **packets > 0);
        let causes: Vec<String> =
            some.map(|(cause, packets)| format!("{cause} {packets}")).collect();
        let packets: u64 = lost.values().sum();
        let causes = if packets > 0 { format!(" ({})", causes.join(", ")) } else { String::new() };
        write!(
            f,
            "\n  lost        {packets} packets{causes}; routes computed anew {reroutes} times"
        )?;
        let us = |nanos: u64| nanos as f64 / 1e3;
        write!(f, "\n  recovery    {} of {hits} hits of a connection", recovery.count)?;
        if recovery.count == 0 {
            return Ok(());
        }
        write!(
            f,
            ": p50 {:.1} us, p99 {:.1} us, longest {:.1} us",
            us(recovery.p50_ns),
            us(recovery.p99_ns),
            us(recovery.max_ns)
        )
    }
}

impl fmt::Display for RunResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunResult { title, control, hosts, switches, flows, .. } = self;
        let ports =
            if self.ports > 1 { format!(" of {} ports", self.ports) } else { String::new() };
        writeln!(
            f,
            "{title}\n  {hosts} hosts{ports} at {} Gbit/s, {switches} switches, round trip {:.1} us; {control}; {flows} flows",
            self.host_bps as f64 / 1e9,
            self.base_rtt_ns as f64 / 1e3
        )?;
        writeln!(
            f,
            "\n  {:<14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
            "slowdown", "flows", "mean", "p50", "p99", "p99.9", "max"
        )?;
        for row in &self.slowdowns {
            writeln!(
                f,
                "  {:<14}{:>9}{:>9.2}{:>9.2}{:>9.2}{:>9.2}{:>9.2}",
                row.name, row.flows, row.mean, row.p50, row.p99, row.p999, row.max
            )?;
        }
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let (unit, unit_bps) =
            if self.goodput_bps < 1_000_000_000 { ("Mbit/s", 1e6) } else { ("Gbit/s", 1e9) };
        writeln!(
            f,
            "\n  goodput     {:.1} {unit} of payload over {:.3} ms; fairness of the flows' rates {:.3} (Jain)",
            self.goodput_bps as f64 / unit_bps,
            ms(self.simulated_ns),
            self.fairness
        )?;
        if !self.is_complete() {
            writeln!(
                f,
                "  missing     {} flows unfinished, {} failed",
                self.unfinished, self.failed
            )?;
            self.list_missing(f)?;
        }
        if let Some(faults) = &self.faults {
            writeln!(f, "{faults}")?;
        }
        if let Some(deadlock) = &self.deadlock {
            writeln!(f, "  deadlock    {deadlock}")?;
        }
        if self.unrouted > 0 {
            writeln!(f, "  routes      {} packets had none", self.unrouted)?;
        }
        writeln!(
            f,
            "  queues      longest {:.1} kB, {}; {} packets dropped, {} marked",
            self.queue_peak_bytes as f64 / 1e3,
            self.queue_peak_at,
            self.dropped,
            self.marked
        )?;
        writeln!(f, "  pauses      {}, {:.3} ms in all", self.pauses, ms(self.paused_ns))?;
        let seconds = (self.cpu_ns as f64 / 1e9).max(1e-9);
        write!(
            f,
            "  simulation  {} packets received, {} sent again; {} events in {seconds:.2} s of one core: {:.2} M/s",
            self.packets_received,
            self.packets_resent,
            self.events,
            self.events as f64 / seconds / 1e6
        )
    }
}
