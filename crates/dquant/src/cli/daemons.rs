//! What the commands that run or call daemons share: tokens, addresses, the report that a daemon is
//! ready, also to the service manager.

use std::ffi::OsStr;
use std::fmt;
use std::io::Read;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{self, UnixDatagram};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use clap::Args;
use lab::units;
use roce::endpoint::Mtu;
use roce::wire::ROCE_PORT;
use serde::Serialize;

use super::{Console, Report, console};
use crate::exit::CliError;
use adapter::congestion::Choice;
use adapter::connect::is_specific;
use adapter::owned::DeviceChoice;
use engine::daemon::Ready;
use engine::data::HostConfig;
use nic::loaded::DEFAULT_LIBRARY;
use service::address::{check_port, with_port};
use service::seed::fresh_seed;

/// A time as people write it.
pub(super) fn span(text: &str) -> Result<Duration, units::UnitError> {
    units::duration(text).map(|span| Duration::from_nanos(span.as_nanos()))
}

/// An address of a RoCE endpoint; its port is 4791 when none is given.
pub(super) fn roce_address(text: &str) -> Result<SocketAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let without_port = bare.parse().map(|ip| SocketAddr::new(ip, ROCE_PORT));
    without_port.or_else(|_| text.parse()).map_err(|_| "it is not IP[:PORT]".into())
}

/// How long a service manager may take for the report that a daemon serves.
const NOTIFY_LIMIT: Duration = Duration::from_secs(1);

/// Longest token that is read from a file.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Where the token comes from.
#[derive(Debug, Args)]
pub(super) struct TokenArgs {
    /// Secret that daemons and those who call them share
    ///
    /// Prefer the file or the variable: other users of the machine can see arguments.
    #[arg(long, value_name = "TOKEN", env = "DQUANT_TOKEN", hide_env_values = true)]
    token: Option<String>,

    /// File that holds the token; takes precedence over --token and the variable
    #[arg(long, value_name = "PATH")]
    token_file: Option<PathBuf>,
}

/// The token in a file.
pub(super) fn read_token(path: &Path) -> Result<String, CliError> {
    let failed = |error: std::io::Error| {
        CliError::because(format_args!("token file {}", path.display()), &error)
    };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    warn_of_readers(path, file.metadata().map_err(failed)?.mode());
    file.take(MAX_TOKEN_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(text.trim().to_owned())
}

impl TokenArgs {
    /// The token, if one was given.
    pub(super) fn given(&self) -> Result<Option<String>, CliError> {
        match &self.token_file {
            Some(path) => read_token(path).map(Some),
            None => Ok(self.token.clone()),
        }
    }

    /// The token; a daemon does not start without one.
    pub(super) fn required(&self) -> Result<String, CliError> {
        match self.given()? {
            Some(token) if token.len() >= 8 && token.is_ascii() => Ok(token),
            Some(_) => Err(CliError::usage("the token is shorter than 8 characters or not ASCII")
                .hint(
                    "make one with `openssl rand -hex 16` or `head -c 16 /dev/urandom | xxd -p`",
                )),
            None => Err(CliError::usage("no token given").hint(
                "set DQUANT_TOKEN or --token-file: daemons and those who call them share it, and `openssl rand -hex 16` makes one",
            )),
        }
    }
}

/// Warns, once, of a token file that every user of the machine may read.
fn warn_of_readers(path: &Path, mode: u32) {
    static WARNED: Once = Once::new();
    if mode & 0o004 != 0 {
        let path = path.display();
        let text = format!("token file {path}: every user of this machine can read it");
        WARNED.call_once(|| console::warn(&text, &format!("`chmod 600 {path}`")));
    }
}

/// The RoCE endpoint of a daemon.
#[derive(Debug, Args)]
pub(super) struct WireArgs {
    /// Address of the RoCE endpoint [default: the control address, port 4791]
    #[arg(long, value_name = "IP[:PORT]", value_parser = roce_address)]
    roce: Option<SocketAddr>,

    /// Run on this RDMA device (`ibv_devices` lists them)
    ///
    /// Its library is found like any shared library, or by --verbs-library. On one machine, this
    /// daemon and one without --device need different addresses: give that one --roce.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["roce", "loss"], verbatim_doc_comment)]
    device: Option<String>,

    /// The libibverbs that has the device
    #[arg(long, value_name = "FILE", default_value = DEFAULT_LIBRARY, requires = "device")]
    verbs_library: PathBuf,

    /// Congestion control of its connections: auto, off, delay, dcqcn-mlnx:GBPS
    ///
    /// auto: from measured delay towards other machines that run this program, DCQCN towards other
    /// implementations, off within a machine.
    /// advertised, dcqcn-mlnx, dcqcn-paper, dcqcn-uet, dctcp, timely, timely-patched take the link's rate
    /// in Gbit/s; swift takes none.
    #[arg(long, value_name = "NAME", default_value = "auto", verbatim_doc_comment)]
    cc: Choice,

    /// The most that each of its connections sends, headers included: 10Gbit/s
    ///
    /// READ responses count. [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = units::rate_bps, verbatim_doc_comment)]
    rate: Option<u64>,

    /// Largest path MTU of its connections: 256, 512, 1024, 2048 or 4096
    ///
    /// Less where a link is smaller, or where the path drops large packets.
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = mtu, verbatim_doc_comment)]
    mtu: Mtu,

    /// Drop this share of received packets, for tests: 1%, 0.1%
    #[arg(long, value_name = "SHARE", default_value = "0%", value_parser = units::fraction_ppm)]
    loss: u32,

    /// Seed of keys, queue pair numbers and losses [default: drawn by the system]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl WireArgs {
    pub(super) fn host(&self, control: IpAddr, memory: u64) -> Result<HostConfig, CliError> {
        let roce = self.roce.unwrap_or(SocketAddr::new(control, ROCE_PORT));
        if !is_specific(roce.ip()) {
            return Err(CliError::usage(format!("{roce} is not the address of one interface"))
                .hint(
                    "name the interface's own address with --roce: the packet checksum covers it",
                ));
        }
        let seed = self.seed.map_or_else(fresh_seed, Ok)?;
        let (library, name) = (self.verbs_library.clone(), self.device.clone());
        let device = name.map(|name| DeviceChoice { library, name });
        let (congestion, mtu, loss_ppm) = (self.cc, self.mtu, self.loss);
        let rate_limit_bps = self.rate.unwrap_or(0);
        Ok(HostConfig { roce, device, memory, congestion, rate_limit_bps, mtu, loss_ppm, seed })
    }
}

/// A path MTU on the command line.
pub(super) fn mtu(text: &str) -> Result<Mtu, String> {
    let found = text.parse().ok().and_then(Mtu::from_bytes);
    found.ok_or_else(|| "there are 256, 512, 1024, 2048 and 4096".to_owned())
}

/// The first address of `host[:port]` that this machine has: what a daemon listens on. `option` is where it was given.
pub(super) fn listen_at(
    option: &str,
    host: &str,
    default_port: u16,
) -> Result<SocketAddr, CliError> {
    check_port(host)?;
    let name = with_port(host, default_port);
    let found = name.to_socket_addrs().map_err(|error| {
        CliError::because(format_args!("{option} {host}"), &error)
            .hint("give an address or a name of this machine: HOST[:PORT]")
    })?;
    let found: Vec<SocketAddr> = found.collect();
    let is_here = |address: &&SocketAddr| UdpSocket::bind((address.ip(), 0)).is_ok();
    // An address that is not here is refused when it is listened on, with the system's reason.
    let chosen = found.iter().find(is_here).or(found.first()).copied();
    chosen.ok_or_else(|| CliError::usage(format!("{option} {host}: the name has no address")))
}

/// Makes the kernel end this process when its parent ends.
pub(super) fn die_with_parent() -> Result<(), CliError> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
        .map_err(|error| CliError::because("cannot follow the starting process", &error))
}

/// Reports that a daemon serves, to the user and to the service manager that started it, if one did.
pub(super) fn report_ready<R: Report>(console: &mut Console, report: &R) -> Result<(), CliError> {
    console.report(report)?;
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return Ok(());
    };
    // The daemon serves whether or not anybody hears of it.
    if let Err(error) = notify(&socket) {
        let text = format!("NOTIFY_SOCKET {}: {error}", socket.display());
        console::warn(
            &text,
            "the service manager does not learn that the daemon serves: Type=exec needs no report",
        );
    }
    Ok(())
}

/// `sd_notify(3)`: one datagram. A name that begins with `@` is abstract.
fn notify(socket: &OsStr) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => net::SocketAddr::from_abstract_name(name)?,
        None => net::SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_write_timeout(Some(NOTIFY_LIMIT))?;
    sender.send_to_addr(b"READY=1\n", &address).map(|_| ())
}

/// Reports that a daemon is ready.
#[derive(Debug, Serialize)]
pub(super) struct ReadyReport {
    event: &'static str,
    #[serde(flatten)]
    ready: Ready,
}

pub(super) fn ready_report(ready: &Ready) -> ReadyReport {
    ReadyReport { event: "ready", ready: ready.clone() }
}

impl Report for ReadyReport {
    const SCHEMA: &'static str = "dquant.ready/1";
}

impl fmt::Display for ReadyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ready { role, control, roce, socket, notes, .. } = &self.ready;
        write!(f, "{role} ready: control {control}, RoCE {roce}")?;
        if let Some(socket) = socket {
            write!(f, ", socket {}", socket.display())?;
        }
        for note in notes {
            write!(f, "\n  {note}")?;
        }
        Ok(())
    }
}
