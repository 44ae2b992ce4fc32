//! Results of the demo: a table for people, one object for programs.
//!
//! | figure | how it is taken |
//! |---|---|
//! | tokens, seconds | by the trainer, between its start and its end |
//! | source bytes | read from storage by the target in that time |
//! | wire bytes | between the target and its reader, both ways: IP packets with headers, acknowledgements and retransmissions, and what moves within the machine instead |
//! | via shared memory | the part of these that the target copied into its reader's memory, or that went through shared memory |
//! | delivered bytes | written into the trainer's memory: tokens times their width |
//! | open to first batch | median over streams that are opened one after the other, daemons running; offload only |
//! | CPU s per 10^9 tokens | user and system time of the process in that time; the trainer's without its verifying thread |

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use xio::stage::{Row, Table};

use super::Config;
use super::trainer::End;
use crate::exit::Exit;
use engine::proto::StatusReply;

/// One run of the processes.
#[derive(Clone, Debug)]
pub struct Run {
    /// Whether the DPU did the work.
    pub offload: bool,
    /// Median time from opening a stream to its first batch, where it was measured.
    pub open: Option<Duration>,
    /// The trainer's final report.
    pub end: End,
    /// The target before and after.
    pub target: (StatusReply, StatusReply),
    /// The DPU before and after.
    pub dpu: Option<(StatusReply, StatusReply)>,
}

type Pair = (StatusReply, StatusReply);

fn counted(pair: &Pair, name: &str) -> u64 {
    let value = |status: &StatusReply| status.counters.get(name).copied().unwrap_or(0);
    value(&pair.1).saturating_sub(value(&pair.0))
}

fn cpu_s(pair: &Pair) -> f64 {
    let total = |status: &StatusReply| status.cpu_user_ns + status.cpu_system_ns;
    total(&pair.1).saturating_sub(total(&pair.0)) as f64 / 1e9
}

/// Bytes of the target's IP packets, both ways.
fn packet_bytes(target: &Pair) -> u64 {
    let headers = target.1.counters.get("udp.ip_udp_header_bytes").copied().unwrap_or(28);
    let packets = counted(target, "udp.tx.packets") + counted(target, "udp.rx.packets");
    counted(target, "udp.tx.bytes") + counted(target, "udp.rx.bytes") + packets * headers
}

/// Bytes that took the same-host path instead, both ways.
fn same_host_bytes(target: &Pair) -> u64 {
    let counters = [
        "roce.direct_bytes",
        "roce.direct_bytes_received",
        "neighbours.fifo_sent_bytes",
        "neighbours.fifo_received_bytes",
    ];
    counters.iter().map(|name| counted(target, name)).sum()
}

/// CPU seconds per 10^9 tokens, by process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CpuPerGtok {
    /// The trainer, without verification.
    pub host: f64,
    /// The DPU; 0 without offload, when there is none.
    pub dpu: f64,
    /// The storage target.
    pub target: f64,
}

/// The figures of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Tokens delivered.
    pub tokens: u64,
    /// In this time.
    pub seconds: f64,
    /// Tokens per second, in millions.
    pub mtokens_per_s: f64,
    /// Bytes read from storage.
    pub source_bytes: u64,
    /// Bytes between the target and its reader.
    pub wire_bytes: u64,
    /// Of these, bytes that were no packets.
    pub same_host_bytes: u64,
    /// Bytes written into host memory.
    pub delivered_bytes: u64,
    /// Milliseconds from opening a stream to its first batch, the median of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_ms: Option<f64>,
    /// CPU by process.
    pub cpu_s_per_gtok: CpuPerGtok,
    /// Batches delivered.
    pub batches: u64,
    /// Batches verified, those before the clock started included.
    pub verified_batches: u64,
    /// Batches that were wrong.
    pub mismatches: u64,
    /// Whether the DPU did the work.
    pub offload: bool,
    /// Packets that the target and the DPU retransmitted.
    pub retransmitted_packets: u64,
    /// Packets dropped on purpose.
    pub dropped_packets: u64,
    /// Hash of the first batches.
    pub stream_hash: String,
    /// How many batches that hash covers.
    pub stream_hash_batches: u64,
    /// CPU seconds of verification in the trainer, not part of the host's figure.
    pub verify_cpu_s: f64,
    /// Resident memory at the end, by process.
    pub resident_bytes: Resident,
    /// Why the stream ended early, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Resident memory by process, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Resident {
    /// The trainer.
    pub host: u64,
    /// The DPU.
    pub dpu: u64,
    /// The storage target.
    pub target: u64,
}

impl Figures {
    fn of(run: &Run) -> Figures {
        let end = &run.end;
        let gtok = end.tokens as f64 / 1e9;
        let per_gtok = |seconds: f64| if gtok > 0.0 { seconds / gtok } else { 0.0 };
        let both = |name| {
            counted(&run.target, name) + run.dpu.as_ref().map_or(0, |dpu| counted(dpu, name))
        };
        Figures {
            tokens: end.tokens,
            seconds: end.seconds,
            mtokens_per_s: if end.seconds > 0.0 {
                end.tokens as f64 / end.seconds / 1e6
            } else {
                0.0
            },
            source_bytes: counted(&run.target, "target.source_bytes"),
            wire_bytes: packet_bytes(&run.target) + same_host_bytes(&run.target),
            same_host_bytes: same_host_bytes(&run.target),
            delivered_bytes: end.tokens * 2,
            open_ms: run.open.map(|open| open.as_secs_f64() * 1e3),
            cpu_s_per_gtok: CpuPerGtok {
                host: per_gtok(end.cpu_s),
                dpu: per_gtok(run.dpu.as_ref().map_or(0.0, cpu_s)),
                target: per_gtok(cpu_s(&run.target)),
            },
            batches: end.batches,
            verified_batches: end.verified,
            mismatches: end.mismatches,
            offload: run.offload,
            retransmitted_packets: both("roce.retransmitted_packets"),
            dropped_packets: both("udp.injected_drops"),
            stream_hash: end.stream_hash.clone(),
            stream_hash_batches: end.stream_hash_batches,
            verify_cpu_s: end.verify_cpu_s,
            resident_bytes: Resident {
                host: end.resident_bytes,
                dpu: run.dpu.as_ref().map_or(0, |dpu| dpu.1.resident_bytes),
                target: run.target.1.resident_bytes,
            },
            failure: end.failure.clone(),
        }
    }
}

/// One action of the plan, and its input and output bytes in the run.
#[derive(Clone, Debug, Serialize)]
pub struct PlanRow {
    /// The action.
    pub action: String,
    /// Where it ran.
    pub runs_at: &'static str,
    /// Why there.
    pub why: &'static str,
    /// Bytes in.
    pub bytes_in: u64,
    /// Bytes out.
    pub bytes_out: u64,
}

impl PlanRow {
    /// The rows of a table, for this number of samples.
    pub fn of(table: &Table, samples: u64) -> Vec<PlanRow> {
        let period = u128::from(table.samples.max(1));
        let scale = |bytes: u64| (u128::from(bytes) * u128::from(samples) / period) as u64;
        let row = |row: &Row| PlanRow {
            action: row.action.clone(),
            runs_at: row.place.name(),
            why: row.why,
            bytes_in: scale(row.bytes_in),
            bytes_out: scale(row.bytes_out),
        };
        table.rows.iter().map(row).collect()
    }
}

/// All results of the demo.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The figures of the run.
    #[serde(flatten)]
    pub figures: Figures,
    /// The plan in its own language.
    pub plan_text: String,
    /// Where each action ran.
    pub plan: Vec<PlanRow>,
    /// Seed of corpora, order and losses.
    pub seed: u64,
    /// Share of injected packet drops.
    pub loss: f64,
    /// Number of corpora.
    pub corpora: usize,
    /// The same work without offload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without_offload: Option<Figures>,
    #[serde(skip)]
    failure_code: u8,
}

impl Summary {
    pub(super) fn new(
        config: &Config,
        plan_text: String,
        plan: Vec<PlanRow>,
        run: Run,
        compared: Option<Run>,
    ) -> Summary {
        let corpora = if config.data.is_empty() { config.corpora } else { config.data.len() };
        Summary {
            failure_code: run.end.failure_code,
            figures: Figures::of(&run),
            plan_text,
            plan,
            seed: config.seed,
            loss: f64::from(config.loss_ppm) / 1e6,
            corpora,
            without_offload: compared.map(|run| Figures::of(&run)),
        }
    }

    /// Batches that were wrong, in both runs.
    pub fn mismatches(&self) -> u64 {
        self.figures.mismatches + self.without_offload.as_ref().map_or(0, |run| run.mismatches)
    }

    /// Whether both runs delivered the same bytes at the start, as far as both hashed.
    pub fn same_stream(&self) -> bool {
        self.without_offload.as_ref().is_none_or(|other| {
            other.stream_hash_batches != self.figures.stream_hash_batches
                || other.stream_hash == self.figures.stream_hash
        })
    }

    /// The exit code of the command.
    pub fn exit(&self) -> Exit {
        match self.failure_code {
            2 => Exit::Usage,
            3 => Exit::PeerUnreachable,
            0 if self.mismatches() == 0 && self.same_stream() => Exit::Good,
            _ => Exit::CheckFailed,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan: {}", self.plan_text)?;
        for row in &self.plan {
            let PlanRow { action, runs_at, why, bytes_in, bytes_out } = row;
            let (bytes_in, bytes_out) = (mib(*bytes_in), mib(*bytes_out));
            writeln!(
                f,
                "  {action:<24} at {runs_at:<7} {bytes_in:>9} -> {bytes_out:>9} MiB  {why}"
            )?;
        }
        writeln!(f)?;
        let columns: Vec<&Figures> =
            [&self.figures].into_iter().chain(&self.without_offload).collect();
        table(f, &columns)?;
        let Figures { stream_hash, stream_hash_batches, .. } = &self.figures;
        if columns.iter().any(|run| run.verified_batches > run.batches) {
            writeln!(
                f,
                "batches: delivered since the clock started; verified ones include the warm-up"
            )?;
        }
        writeln!(f)?;
        if *stream_hash_batches > 0 {
            writeln!(f, "hash of the first {stream_hash_batches} batches: {stream_hash}")?;
        }
        if !self.same_stream() {
            writeln!(f, "WRONG: with and without offload the first batches differ")?;
        }
        let verified: u64 = columns.iter().map(|run| run.verified_batches).sum();
        let wrong = self.mismatches();
        if let Some(failure) = &self.figures.failure {
            return write!(f, "FAILED after {verified} right and {wrong} wrong batches: {failure}");
        }
        match wrong {
            0 => write!(f, "{verified} batches verified against the reference, all right"),
            _ => write!(f, "{verified} batches right, {wrong} WRONG"),
        }
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

type Cell = fn(&Figures) -> String;

/// The rows of the table.
const ROWS: [(&str, Cell); 13] = [
    ("Mtokens/s", |run| format!("{:.0}", run.mtokens_per_s)),
    ("disk bytes per token", |run| per_token(run, run.source_bytes)),
    ("wire bytes per token", |run| per_token(run, run.wire_bytes)),
    ("via shared memory, %", |run| {
        format!("{:.0}", 100.0 * run.same_host_bytes as f64 / run.wire_bytes.max(1) as f64)
    }),
    ("host memory bytes per token", |run| per_token(run, run.delivered_bytes)),
    ("host CPU s per 10^9 tokens", |run| format!("{:.3}", run.cpu_s_per_gtok.host)),
    ("DPU CPU s per 10^9 tokens", |run| match run.offload {
        true => format!("{:.3}", run.cpu_s_per_gtok.dpu),
        false => "-".into(),
    }),
    ("target CPU s per 10^9 tokens", |run| format!("{:.3}", run.cpu_s_per_gtok.target)),
    ("open to first batch, median ms", |run| {
        run.open_ms.map_or("-".into(), |open_ms| format!("{open_ms:.1}"))
    }),
    ("packets dropped / retransmitted", |run| {
        format!("{} / {}", run.dropped_packets, run.retransmitted_packets)
    }),
    ("resident MiB host / DPU / target", |run| {
        let Resident { host, dpu, target } = run.resident_bytes;
        format!("{} / {} / {}", mib(host), mib(dpu), mib(target))
    }),
    ("batches (verified, wrong)", |run| {
        format!("{} ({}, {})", run.batches, run.verified_batches, run.mismatches)
    }),
    ("seconds", |run| format!("{:.2}", run.seconds)),
];

fn per_token(run: &Figures, bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / run.tokens.max(1) as f64)
}

fn table(f: &mut fmt::Formatter<'_>, columns: &[&Figures]) -> fmt::Result {
    write!(f, "{:34}", "")?;
    for run in columns {
        write!(f, "{:>22}", if run.offload { "offload" } else { "without offload" })?;
    }
    writeln!(f)?;
    for (name, cell) in ROWS {
        write!(f, "{name:34}")?;
        for run in columns {
            write!(f, "{:>22}", cell(run))?;
        }
        writeln!(f)?;
    }
    Ok(())
}
