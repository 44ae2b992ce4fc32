//! `dquant trainer`: the host process of the demo. Hidden: `demo` starts it and reads its lines.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::Console;
use super::daemons::die_with_parent;
use super::demo::seconds;
use super::stream_args::StreamArgs;
use crate::demo::corpus::flat_type;
use crate::demo::trainer::{self, Event, Task, Verify};
use crate::exit::{CliError, Exit};

/// Read and verify batches for the demo.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  dquant demo     starts it as it should be")]
pub(super) struct Trainer {
    /// dq://HOST:PORT/
    url: String,

    /// The plan, its seed filled in
    #[arg(long)]
    plan: String,

    /// Token files in the order of the blend, for the reference
    #[arg(long = "file")]
    files: Vec<PathBuf>,

    /// What to verify
    #[arg(long, value_enum)]
    verify: Verify,

    /// Length of the measured part
    #[arg(long, value_parser = seconds)]
    seconds: Duration,

    /// End when the starting process ends
    #[arg(long)]
    die_with_parent: bool,

    #[command(flatten)]
    stream: StreamArgs,
}

impl Trainer {
    pub(super) fn run(self, _console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let options = self.stream.options()?;
        let dtype = flat_type(&options.dtype)?;
        let stream = client::open(&self.url, &self.plan, self.stream.offload, &options)?;
        let task = Task {
            plan: self.plan,
            files: self.files,
            dtype,
            verify: self.verify,
            seconds: self.seconds,
            counted: options.batches.is_some(),
        };
        trainer::run(stream, &task, &mut tell)?;
        Ok(Exit::Good)
    }
}

/// Writes an event as a line of JSON.
fn tell(event: Event) -> Result<(), CliError> {
    let text = serde_json::to_string(&event).map_err(CliError::usage)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|error| CliError::from_output(&error))
}
