//! `dquant subnet status`: what a subnet manager of this machine is and has done.

use std::io::ErrorKind;

use clap::Args;

use super::super::{Console, local};
use super::manage::{SOCKET_PREFIX, StatusReport};
use crate::exit::{CliError, Exit};

/// Show the state of a subnet manager that runs on this machine
///
/// Master or standby, when it swept and set the fabric up, what it refused and counted, and its last
/// events. Replies go to root and to the user of the manager.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Exit code 3: no manager replies.

Examples:
  dquant subnet status
  dquant subnet status --pid 4711
  dquant subnet status --json | jq '.counters.refused_controls'"
)]
pub(super) struct StatusCommand {
    /// Its process [default: the only one]
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

impl StatusCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let pid = self.pid.map_or_else(only_one, Ok)?;
        let (reply, _) = local::fetch(&format!("{SOCKET_PREFIX}{pid}")).map_err(|error| {
            let what = format_args!("the subnet manager {pid}: {error}");
            match error.kind() {
                ErrorKind::ConnectionRefused | ErrorKind::NotFound | ErrorKind::TimedOut => {
                    CliError::peer_unreachable(what)
                        .hint("has it ended? 'dquant subnet manage' starts one")
                }
                _ => CliError::usage(what),
            }
        })?;
        let status: StatusReport = serde_json::from_slice(&reply).map_err(|error| {
            let what =
                format_args!("the subnet manager {pid} replied what this version does not know");
            CliError::because(what, &error)
        })?;
        console.report(&status)?;
        Ok(Exit::Good)
    }
}

fn only_one() -> Result<u32, CliError> {
    let pids = local::pids(SOCKET_PREFIX)?;
    match pids.as_slice() {
        [pid] => Ok(*pid),
        [] => Err(CliError::peer_unreachable("no subnet manager of dquant runs on this machine")
            .hint("'dquant subnet manage' starts one; sminfo asks for one elsewhere")),
        [first, ..] => {
            let what = format_args!("{} subnet managers run on this machine", pids.len());
            Err(CliError::usage(what).hint(format_args!("name one: --pid {first}")))
        }
    }
}
