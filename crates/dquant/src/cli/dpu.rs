//! `dquant dpu`: a software DPU.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lab::units;

use super::Console;
use super::daemons::{
    TokenArgs, WireArgs, die_with_parent, listen_at, ready_report, report_ready, span,
};
use crate::exit::{CliError, Exit};
use client::default_socket;
use engine::control::CONTROL_PORT;
use engine::daemon::{self, DpuConfig};
use host::accounts;
use host::attach::{Access, Callers};

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
  dquant dpu --socket /run/dquant/dpu.sock --socket-group trainers    for other users of this machine
  dquant dpu --control 127.0.0.1:0 --json                any free port for the control plane
  dquant run -- dquant dpu --device dq_eth0 --token-file token    on a device of dquant's libibverbs"
)]
pub(super) struct DpuCommand {
    /// Local socket [default: $XDG_RUNTIME_DIR/dquant-dpu.sock]
    ///
    /// Without that variable it is in $TMPDIR, else in /tmp.
    #[arg(long, value_name = "PATH", env = "DQUANT_DPU")]
    socket: Option<PathBuf>,

    /// Who may connect to it: 0600 this user, 0660 its group too, 0666 everyone [default: 0600]
    ///
    /// With --socket-group the default is 0660. Whoever may connect shares the memory of this DPU;
    /// each stream uses the token of the trainer that opens it. A trainer sends its token to a DPU of
    /// another user only if it names that user: --dpu-user or DQUANT_DPU_USER.
    #[arg(long, value_name = "MODE", value_parser = socket_mode, verbatim_doc_comment)]
    socket_mode: Option<Callers>,

    /// Group of the socket, by name or number
    ///
    /// The daemon's user must be in it, or be root. Names are those of /etc/group.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,

    /// Address of the control plane, by number or name
    ///
    /// The port is 4792 when none is given.
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    control: String,

    /// Registered memory for blocks in flight
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = units::size_bytes)]
    memory: u64,

    /// Memory for the rings of all streams together
    ///
    /// A ring takes --slots times --slot-size of its stream, 16 MiB by default. Eight trainers with two
    /// streams each take half of it, which leaves room for a job that starts again while the old one ends.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = units::size_bytes, verbatim_doc_comment)]
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

/// A mode of the socket's file, in octal.
fn socket_mode(text: &str) -> Result<Callers, String> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let is_octal =
        (1..=5).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_digit());
    let mode = u32::from_str_radix(digits, 8).ok().filter(|_| is_octal);
    mode.and_then(Callers::of_mode).ok_or_else(|| {
        "there are 0600 for this user, 0660 for its group too, and 0666 for every user: who connects needs to read and write, and \
         nothing else has a meaning"
            .to_owned()
    })
}

/// Who may connect to the socket.
fn access(mode: Option<Callers>, group: Option<&str>) -> Result<Access, CliError> {
    let Some(name) = group else {
        return Ok(Access { callers: mode.unwrap_or_default(), group: None });
    };
    let callers = mode.unwrap_or(Callers::Group);
    if callers == Callers::Owner {
        let why = format!("--socket-mode 0600 keeps out --socket-group {name}");
        return Err(CliError::usage(why).hint("give --socket-mode 0660, or leave it out"));
    }
    let group = accounts::group(name).map_err(|error| {
        CliError::usage(format!("--socket-group: {error}")).hint(format!(
            "give its number: `getent group {name}` prints it, also of a directory service"
        ))
    })?;
    Ok(Access { callers, group: Some(group) })
}

impl DpuCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let token = self.token.required()?;
        let control = listen_at("--control", &self.control, CONTROL_PORT + 2)?;
        if !self.quiet {
            service::log::enable();
        }
        let config = DpuConfig {
            access: access(self.socket_mode, self.socket_group.as_deref())?,
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

#[cfg(test)]
mod tests {
    use clap::Parser;
    use client::Options;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        dpu: DpuCommand,
    }

    fn parsed(args: &[&str]) -> Result<DpuCommand, clap::Error> {
        Line::try_parse_from([&["dpu"], args].concat()).map(|line| line.dpu)
    }

    #[test]
    fn the_rings_of_eight_ranks_that_train_and_evaluate_leave_room_for_as_many() {
        let stream = Options::from_env();
        // A slot has a MiB where batches are small.
        let ring = u64::from(stream.slots) << 20;
        let eight_ranks_with_two = 8 * 2 * ring;
        let rings = parsed(&[]).expect("nothing is required").rings;
        assert!(rings >= 2 * eight_ranks_with_two, "{rings} of {eight_ranks_with_two}");
        assert_eq!(parsed(&["--rings", "1GiB"]).expect("a size").rings, 1 << 30);
    }

    #[test]
    fn modes_are_octal_and_let_somebody_connect() {
        let mode = |text: &str| parsed(&["--socket-mode", text]).map(|dpu| dpu.socket_mode);
        for (text, callers) in [
            ("0600", Callers::Owner),
            ("660", Callers::Group),
            ("0o660", Callers::Group),
            ("00666", Callers::Everyone),
        ] {
            assert_eq!(mode(text).expect("a mode"), Some(callers), "{text}");
        }
        for wrong in
            ["", "0777", "0640", "0606", "0620", "06660", "1660", "rw", "+660", "432", "0o"]
        {
            let refused = mode(wrong).expect_err(wrong).to_string();
            assert!(refused.contains("socket-mode"), "{refused}");
        }
    }

    #[test]
    fn a_group_that_is_named_may_connect() {
        let granted =
            |mode, group| access(mode, group).ok().map(|access| (access.callers, access.group));
        assert_eq!(granted(None, None), Some((Callers::Owner, None)));
        assert_eq!(granted(None, Some("4321")), Some((Callers::Group, Some(4_321))));
        assert_eq!(
            granted(Some(Callers::Everyone), Some("4321")),
            Some((Callers::Everyone, Some(4_321)))
        );
        assert_eq!(granted(Some(Callers::Group), None), Some((Callers::Group, None)));
        let refused = access(Some(Callers::Owner), Some("4321")).expect_err("a contradiction");
        assert!(refused.to_string().contains("keeps out"), "{refused}");
        let refused = access(None, Some("no such group")).expect_err("a name of none").to_string();
        assert!(
            refused.contains("has no group 'no such group'") && refused.contains("getent"),
            "{refused}"
        );
    }
}
