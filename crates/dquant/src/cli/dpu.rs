//! `dquant dpu`: a software DPU.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::Console;
use super::daemons::{
    TokenArgs, WireArgs, die_with_parent, listen_at, ready_report, report_ready, span,
};
use crate::exit::{CliError, Exit};
use crate::units;
use client::default_socket;
use engine::control::CONTROL_PORT;
use engine::daemon::{self, DpuConfig};

/// Run a software DPU: fetch, blend and shuffle token data for the processes of this machine
///
/// Host processes find it by its local socket. Its memory is bounded by --memory, by the rings
/// of its streams, and by their tables of documents. Runs until SIGTERM, SIGINT or SIGHUP.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant dpu --roce 10.0.0.7:4791 --token-file token
  dquant dpu --roce 127.0.0.2:4791 --token-file token    beside a target on this machine
  dquant dpu --socket /run/dquant/dpu.sock --roce 10.0.0.7:4791 --memory 256MiB
  dquant dpu --control 127.0.0.1:0 --json                any free port for the control plane
  dquant run -- dquant dpu --device dq_eth0 --token-file token    on a device of dquant's libibverbs"
)]
pub(super) struct DpuCommand {
    /// Local socket [default: $XDG_RUNTIME_DIR/dquant-dpu.sock]
    ///
    /// Without that variable it is in $TMPDIR, else in /tmp.
    #[arg(long, value_name = "PATH", env = "DQUANT_DPU")]
    socket: Option<PathBuf>,

    /// Address of the control plane, by number or name
    ///
    /// The port is 4792 when none is given.
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    control: String,

    /// Registered memory for blocks in flight
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = units::size_bytes)]
    memory: u64,

    /// Memory for the rings of all streams together
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = units::size_bytes)]
    rings: u64,

    /// Memory for the tables of documents of all streams together
    ///
    /// A document takes 28 bytes while a stream opens, and 12 later.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = units::size_bytes)]
    documents: u64,

    /// How long to retry a lost target before its streams fail
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = span)]
    reconnect: Duration,

    #[command(flatten)]
    wire: WireArgs,

    #[command(flatten)]
    token: TokenArgs,

    /// Write no line for each stream on standard error
    ///
    /// By default one line reports each stream that begins, ends, fails or is refused.
    #[arg(long)]
    quiet: bool,

    /// End when the starting process ends
    #[arg(long, hide = true)]
    die_with_parent: bool,
}

impl DpuCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let token = self.token.required()?;
        let control = listen_at("--control", &self.control, CONTROL_PORT + 2)?;
        if !self.quiet {
            engine::log::enable();
        }
        let config = DpuConfig {
            socket: self.socket.unwrap_or_else(default_socket),
            host: self.wire.host(control.ip(), self.memory)?,
            control,
            token,
            reconnect: self.reconnect,
            rings: self.rings,
            documents: self.documents,
        };
        daemon::run_dpu(config, |ready| report_ready(console, &ready_report(ready)))?;
        Ok(Exit::Good)
    }
}
