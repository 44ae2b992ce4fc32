//! `dquant serve`: a storage target.

use std::path::PathBuf;

use clap::Args;
use host::root::IoChoice;

use super::Console;
use super::daemons::{TokenArgs, WireArgs, die_with_parent, listen_at, ready_report, report_ready};
use crate::exit::{CliError, Exit};
use engine::control::CONTROL_PORT;
use engine::daemon::{self, ServeConfig};

/// Run a storage target: serve the token files below some folders over RoCE
///
/// No file outside these folders is ever opened. Clients that have the token may read all files
/// inside. Runs until SIGTERM, SIGINT or SIGHUP.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant serve --root /data/tokens --token-file token
  dquant serve --root /data --control 10.0.0.5:4790 --token-file token
  dquant serve --root . --io buffered --json     read through the page cache
  dquant serve --root /data --control 10.0.0.5 --device mlx5_0 --token-file token    on an adapter"
)]
pub(super) struct Serve {
    /// Folder to export; may be given more than once
    #[arg(long = "root", required = true, value_name = "DIR")]
    roots: Vec<PathBuf>,

    /// Address of the control plane, by number or name
    ///
    /// The port is 4790 when none is given.
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    control: String,

    /// Staging buffers of 1 MiB that all sessions share
    ///
    /// Each holds one block of 1 MiB, or up to 8 small ones; at most 4,096 reads are in flight.
    ///
    /// One more buffer is reserved for sessions that open later. A small number fits the processor's cache.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=4096))]
    staging_buffers: u32,

    /// How files are read
    ///
    /// Auto reads directly where the file system allows it.
    #[arg(long, value_enum, default_value = "auto")]
    io: Io,

    #[command(flatten)]
    wire: WireArgs,

    #[command(flatten)]
    token: TokenArgs,

    /// Write no line for each session on standard error
    ///
    /// By default one line reports each session that begins, ends, fails or is refused.
    #[arg(long)]
    quiet: bool,

    /// End when the starting process ends
    #[arg(long, hide = true)]
    die_with_parent: bool,
}

/// How files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Io {
    /// Direct where the file system allows it
    Auto,
    /// Past the page cache, or not at all
    Direct,
    /// Through the page cache
    Buffered,
}

impl Io {
    /// The word on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Io::Auto => "auto",
            Io::Direct => "direct",
            Io::Buffered => "buffered",
        }
    }
}

impl From<Io> for IoChoice {
    fn from(io: Io) -> IoChoice {
        match io {
            Io::Auto => IoChoice::Auto,
            Io::Direct => IoChoice::Direct,
            Io::Buffered => IoChoice::Buffered,
        }
    }
}

impl Serve {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let token = self.token.required()?;
        let control = listen_at("--control", &self.control, CONTROL_PORT)?;
        if !self.quiet {
            service::log::enable();
        }
        let config = ServeConfig {
            roots: self.roots,
            host: self.wire.host(control.ip(), 0)?,
            control,
            staging_buffers: self.staging_buffers,
            io: self.io.into(),
            token,
        };
        daemon::serve(config, |ready| report_ready(console, &ready_report(ready)))?;
        Ok(Exit::Good)
    }
}
