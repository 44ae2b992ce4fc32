//! The port of this machine by which a fabric is reached, and the loop that sends and receives.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use nic::umad::{DEFAULT_LIBRARY, Umad};
use subnet::exchange::Requester;

use super::super::Console;
use crate::exit::CliError;

/// The options of every command that reaches a fabric.
#[derive(Debug, Args)]
pub(super) struct PortArgs {
    /// The device [default: chosen by libibumad]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Its port
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    port: u8,

    /// The libibumad that reaches it
    #[arg(long, value_name = "FILE", default_value = DEFAULT_LIBRARY)]
    library: PathBuf,
}

const HINT: &str = "install libibumad3, load ib_umad, and have read and write access to /dev/infiniband/umad*; \
    RoCE devices have no subnet manager";

/// Datagrams between two progress lines.
const PROGRESS: u64 = 1_024;

impl PortArgs {
    pub(super) fn open(&self) -> Result<Umad, CliError> {
        let opened = Umad::open(&self.library, self.device.as_deref(), self.port);
        opened.map_err(|error| CliError::because("no InfiniBand port", &error).hint(HINT))
    }

    /// For a manager that others can reach.
    pub(super) fn open_manager(&self) -> Result<Umad, CliError> {
        let opened = Umad::open_manager(&self.library, self.device.as_deref(), self.port);
        opened.map_err(|error| CliError::because("no InfiniBand port", &error).hint(MANAGER_HINT))
    }
}

/// For whoever may not use the file of a manager.
const MANAGER_HINT: &str = "install libibumad3, load ib_umad, and have read and write access to /dev/infiniband/umad* \
    and issm*; no other subnet manager may use this port";

/// Sends and receives until `requester` is done. `what` is said meanwhile.
pub(super) fn run(
    umad: &mut Umad,
    requester: &mut impl Requester,
    console: &mut Console,
    what: &str,
) -> Result<(), CliError> {
    let broken = |error| CliError::because("the InfiniBand port", &error);
    let (started, mut said) = (Instant::now(), 0);
    while !requester.is_done() {
        let now = started.elapsed();
        while let Some(mad) = requester.poll_transmit(now) {
            umad.send(&mad).map_err(broken)?;
        }
        let left = requester.poll_timeout().map_or(Duration::ZERO, |at| at.saturating_sub(now));
        if let Some(response) = umad.receive(left).map_err(broken)? {
            requester.handle_response(&response);
        }
        requester.handle_timeout(started.elapsed());
        if requester.sent() / PROGRESS != said {
            said = requester.sent() / PROGRESS;
            console.progress(format_args!("{what}: {} datagrams", requester.sent()));
        }
    }
    Ok(())
}

/// A line for each complaint, behind the line of a result.
pub(super) fn write_complaints(
    f: &mut fmt::Formatter<'_>,
    complaints: &[String],
    left_out: u64,
) -> fmt::Result {
    complaints.iter().try_for_each(|complaint| write!(f, "\n{complaint}"))?;
    if left_out > 0 { write!(f, "\nand {left_out} more") } else { Ok(()) }
}
