//! `dquant status`: what a daemon is doing and what it counted.

use std::collections::BTreeMap;
use std::fmt;

use clap::Args;
use engine::budget::Bytes;
use lab::units::Count;
use serde::Serialize;

use super::daemons::TokenArgs;
use super::{Console, Report};
use crate::exit::{CliError, Exit};
use engine::control::CONTROL_PORT;
use engine::control::status::daemon_status;
use engine::proto::StatusReply;
use service::text::one_line;

/// Show the state and the counters of a storage target or a DPU
///
/// Counters at zero are omitted; --json includes them. A daemon that was started with --device has
/// no roce.* and udp.* counters; on the library of dquant, `dquant explain PID` shows them.
///
/// Times of the engine (engine.longest_us.*) are wall time: the scheduler's share is in them.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant status --token-file token
  dquant status --control 10.0.0.5:4790
  dquant status --control 127.0.0.1:4792 --json | jq '.counters[\"dpu.memory_free_bytes\"]'"
)]
pub(super) struct StatusCommand {
    /// Control address of the daemon
    #[arg(long, value_name = "HOST[:PORT]", default_value_t = format!("127.0.0.1:{CONTROL_PORT}"))]
    control: String,

    #[command(flatten)]
    token: TokenArgs,
}

/// The daemon's reply.
#[derive(Debug, Serialize)]
struct DaemonStatus {
    role: String,
    version: String,
    control: String,
    roce: String,
    sessions: u32,
    cpu_user_ns: u64,
    cpu_system_ns: u64,
    resident_bytes: u64,
    counters: BTreeMap<String, u64>,
    notes: Vec<String>,
}

impl DaemonStatus {
    fn new(reply: StatusReply) -> DaemonStatus {
        let line = |text: &String| one_line(text).into_owned();
        DaemonStatus {
            role: line(&reply.role),
            version: line(&reply.version),
            control: line(&reply.control_address),
            roce: line(&reply.roce_address),
            sessions: reply.sessions,
            cpu_user_ns: reply.cpu_user_ns,
            cpu_system_ns: reply.cpu_system_ns,
            resident_bytes: reply.resident_bytes,
            counters: reply.counters.iter().map(|(name, value)| (line(name), *value)).collect(),
            notes: reply.notes.iter().map(line).collect(),
        }
    }
}

impl DaemonStatus {
    /// Which blocks a target compressed, and why it did not compress the others.
    fn compression(&self) -> Option<String> {
        let count = |name: &str| self.counters.get(name).copied().unwrap_or(0);
        let compressed = count("target.compressed_blocks");
        let no_gain = count("target.plain_blocks_no_gain");
        let fast_link = count("target.plain_blocks_fast_link");
        (compressed + no_gain + fast_link > 0).then(|| {
            format!(
                "{} blocks compressed; sent as they are: {} because the link outruns the codec, {} because \
                 they did not become smaller",
                Count(compressed),
                Count(fast_link),
                Count(no_gain)
            )
        })
    }
}

impl Report for DaemonStatus {
    const SCHEMA: &'static str = "dquant.status/1";
}

impl fmt::Display for DaemonStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DaemonStatus { role, version, control, roce, sessions, .. } = self;
        let what = if role == "dpu" { "stream" } else { "session" };
        let plural = if *sessions == 1 { "" } else { "s" };
        writeln!(f, "{role} {version}: control {control}, RoCE {roce}, {sessions} {what}{plural}")?;
        let seconds = |ns: u64| ns as f64 / 1e9;
        let (user, system) = (seconds(self.cpu_user_ns), seconds(self.cpu_system_ns));
        writeln!(f, "  CPU          {user:.2} s user, {system:.2} s system")?;
        write!(f, "  resident     {}", Bytes(self.resident_bytes))?;
        for note in &self.notes {
            write!(f, "\n  {note}")?;
        }
        if let Some(text) = self.compression() {
            write!(f, "\n  compression  {text}")?;
        }
        for (name, value) in self.counters.iter().filter(|(_, value)| **value > 0) {
            write!(f, "\n  {name:<36} {:>20}", Count(*value))?;
        }
        Ok(())
    }
}

impl StatusCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let token = self.token.given()?.unwrap_or_default();
        let runtime = service::runtime::current_thread()?;
        let reply = runtime.block_on(daemon_status(&self.control, &token))?;
        console.report(&DaemonStatus::new(reply))?;
        Ok(Exit::Good)
    }
}
