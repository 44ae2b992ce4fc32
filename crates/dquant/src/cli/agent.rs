//! `dquant agent`: enforces on this machine what the brain decides.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use cluster::agent::{self, Config, Jobs, PortConfig, Ready};
use cluster::enforce::dcb::Dcb;
use cluster::enforce::htb::Htb;
use cluster::enforce::rate_limits::{RateLimits, WithRateLimits};
use cluster::enforce::{EnforceError, Enforcer, Nothing, link};
use cluster::local::{self, Membership, Refusal};
use cluster::words::counted;
use lab::units;
use nic::local_files::make_shared_folder;
use nic::rates::RateTable;
use parfait::queues::Scheme;
use serde::Serialize;
use service::error::Error;

use super::cluster::BrainsArgs;
use super::daemons::{die_with_parent, report_ready};
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Run an agent: enforce the guarantees of jobs at the ports of this host or switch
///
/// It follows whichever brain leads, keeps the last good plan while none does, and reports what each
/// job sends. What it must not forget is in the file --state. When it ends, the plan stays in force.
/// HTB needs CAP_NET_ADMIN. Runs until SIGTERM, SIGINT or SIGHUP.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant agent --node host0 --port 1=eth0:1Gbit --brain 10.0.0.5 --state agent.state --token-file token
  dquant agent --node leaf0 --port 1=swp1:25Gbit --port 2=swp2:25Gbit --brain 10.0.0.5,10.0.0.6 \\
      --state leaf0.state --token-file token
  dquant agent --node host0 --port 1=eth0:1Gbit --enforce none --state agent.state --token-file token
  dquant agent --node host0 --port 1=eth0:100Gbit --enforce rate-limits --brain 10.0.0.5 --token-file token
  dquant agent --node host0 --port 1=eth0:25Gbit --brain 10.0.0.5 --rate-limits /run/dquant/host0 --token-file token"
)]
pub(super) struct AgentCommand {
    /// This node's name in the topology
    #[arg(long, value_name = "NAME")]
    node: String,

    /// A port of the node: its number in the topology, the interface, and what it carries
    ///
    /// Once for each port. `dquant top --cluster` shows the numbers.
    ///
    /// Without a rate, that of the interface, which virtual ones do not know.
    #[arg(long = "port", required = true, value_name = "N=INTERFACE[:RATE]", value_parser = port)]
    ports: Vec<PortArg>,

    /// What enforces plans
    #[arg(long, value_enum, default_value = "htb")]
    enforce: Choice,

    /// Folder by which senders here keep rate limits and times of exchanges; empty for none
    ///
    /// Senders find another one than the usual /run/dquant/paces by DQUANT_PACES.
    #[arg(long, value_name = "FOLDER", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    rate_limits: Option<PathBuf>,

    /// Replace what an administrator has configured at these ports
    #[arg(long)]
    replace: bool,

    /// Queues for jobs at each port; HTB has a class for each job instead
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..=8))]
    queues: u8,

    /// The last command and the plan in force
    #[arg(long, value_name = "FILE", default_value = "/var/lib/dquant/agent.state")]
    state: PathBuf,

    /// Socket that tells programs the DSCP of their job
    ///
    /// Empty for none.
    #[arg(long, value_name = "PATH", default_value = cluster::local::SOCKET,
          value_parser = OsStringValueParser::new().map(PathBuf::from))]
    socket: PathBuf,

    #[command(flatten)]
    brains: BrainsArgs,

    /// Do not report on standard error what happens
    #[arg(long)]
    quiet: bool,

    /// End when the starting process ends
    #[arg(long, hide = true)]
    die_with_parent: bool,
}

/// What enforces plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// Queues of Linux, a class for each job
    Htb,
    /// Traffic classes of a network card, and rate limits of senders where classes are too few
    Dcb,
    /// Rate limits of senders alone: for AF_XDP, and interfaces without queues to configure
    #[value(alias = "paces")]
    RateLimits,
    /// Nothing: plans are kept and reported, and not put into force
    None,
}

/// A port as it is named on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PortArg {
    port: u8,
    interface: String,
    rate_bps: Option<u64>,
}

fn port(text: &str) -> Result<PortArg, String> {
    let (number, rest) =
        text.split_once('=').ok_or("it is not N=INTERFACE[:RATE], such as 1=eth0:1Gbit")?;
    let port = number.parse().ok().filter(|port| (1..=254).contains(port));
    let port = port.ok_or_else(|| format!("'{number}' is no port of a topology, 1 to 254"))?;
    let (interface, rate_bps) = match rest.rsplit_once(':') {
        Some((interface, rate)) => {
            (interface, Some(units::rate_bps(rate).map_err(|error| error.to_string())?))
        }
        None => (rest, None),
    };
    // Longest name of an interface, in bytes: IFNAMSIZ with its final zero is 16.
    if interface.is_empty() || interface.len() > 15 || interface.contains('/') {
        return Err(format!("'{interface}' is no interface"));
    }
    Ok(PortArg { port, interface: interface.to_owned(), rate_bps })
}

impl PortArg {
    fn config(self) -> Result<PortConfig, CliError> {
        let PortArg { port, interface, rate_bps } = self;
        let rate_bps = match rate_bps {
            Some(rate) => rate,
            None => speed_bps(&interface)?,
        };
        Ok(PortConfig { port, interface, rate_bps })
    }
}

/// What the kernel says that an interface carries.
fn speed_bps(interface: &str) -> Result<u64, CliError> {
    let path = format!("/sys/class/net/{interface}/speed");
    let unknown = |why: String| {
        CliError::usage(format!("interface '{interface}': its rate is not known: {why}"))
            .hint(format!("say it, as in --port 1={interface}:25Gbit"))
    };
    let text = std::fs::read_to_string(&path).map_err(|error| unknown(error.to_string()))?;
    match text.trim().parse::<i64>() {
        Ok(megabits @ 1..) => Ok(megabits as u64 * 1_000_000),
        _ => Err(unknown(format!("{path} has {}", text.trim()))),
    }
}

impl Choice {
    fn name(self) -> &'static str {
        match self {
            Choice::Htb => "htb",
            Choice::Dcb => "dcb",
            Choice::RateLimits => "rate-limits",
            Choice::None => "none",
        }
    }

    fn open(
        self,
        replace: bool,
        rate_limits: Option<Arc<RateTable>>,
    ) -> Result<Box<dyn Enforcer>, EnforceError> {
        let others = rate_limits.clone().filter(|_| matches!(self, Choice::Htb | Choice::None));
        let enforcer: Box<dyn Enforcer> = match (self, rate_limits.map(RateLimits::new)) {
            (Choice::Htb, _) if replace => Box::new(Htb::open()?.replacing()),
            (Choice::Htb, _) => Box::new(Htb::open()?),
            (Choice::Dcb, Some(rate_limits)) => {
                Box::new(WithRateLimits::new(Dcb::open()?, rate_limits))
            }
            (Choice::Dcb, None) => Box::new(Dcb::open()?),
            (Choice::RateLimits, Some(rate_limits)) => Box::new(rate_limits),
            (Choice::RateLimits | Choice::None, _) => Box::new(Nothing),
        };
        // Rate limits of an agent that was here before stay in force until they are set.
        others.iter().for_each(|table| table.set([]));
        Ok(enforcer)
    }

    /// The queues for jobs at each port, and how jobs are given them.
    fn queues(self, queues: u8, has_rate_limits: bool) -> (u8, Scheme) {
        match (self, has_rate_limits) {
            // Nothing divides the port but its senders.
            (Choice::RateLimits, _) => (1, Scheme::Paced),
            (Choice::Dcb, true) => (queues, Scheme::Paced),
            _ => (queues, Scheme::Matched),
        }
    }

    /// The table that senders read. A folder that is named, or needed, has to be there; the usual one is kept where it can be.
    fn table(self, named: Option<&Path>) -> Result<Option<Arc<RateTable>>, CliError> {
        let folder = named.unwrap_or(Path::new(nic::rates::FOLDER));
        let needs_it = self == Choice::RateLimits;
        if folder.as_os_str().is_empty() {
            let why = "--enforce rate-limits needs a folder to tell senders their limits";
            let unusable = || CliError::usage(why).hint("name one by --rate-limits");
            return if needs_it { Err(unusable()) } else { Ok(None) };
        }
        let error = match RateTable::open(folder) {
            Ok(table) => return Ok(Some(Arc::new(table))),
            Err(error) => error,
        };
        let (why, hint) = match error.kind() {
            io::ErrorKind::WouldBlock => (
                format!("{error}: one agent keeps a folder"),
                "each agent has a folder of its own: name another one by --rate-limits",
            ),
            _ => (
                error.to_string(),
                "name a folder that this user may write, or '' for none, by --rate-limits",
            ),
        };
        let why = format!("paces in {}: {why}", folder.display());
        if named.is_some() || needs_it {
            return Err(CliError::usage(why).hint(hint));
        }
        service::log::line(format_args!("{why}: exchanges of jobs begin when they like; {hint}"));
        Ok(None)
    }
}

/// Refuses ports that no plan could be enforced at, and reports those that are switched off: a plan would be the first to meet
/// them.
fn check_ports(ports: &[PortArg], enforce: Choice) -> Result<(), CliError> {
    for (at, port) in ports.iter().enumerate() {
        let others = &ports[..at];
        if others.iter().any(|other| other.port == port.port) {
            return Err(CliError::usage(format!("port {} is given twice", port.port))
                .hint("one --port for each port of the node, by its number in the topology"));
        }
        if enforce == Choice::None {
            continue;
        }
        let PortArg { port, interface, .. } = port;
        if let Some(other) = others.iter().find(|other| other.interface == *interface) {
            let why =
                format!("interface '{interface}' is given for ports {} and {port}", other.port);
            return Err(CliError::usage(why)
                .hint("each port has an interface of its own: `ip link` lists them"));
        }
        match link::is_up(interface) {
            Ok(true) => {}
            Ok(false) => service::log::line(format_args!(
                "interface '{interface}' of port {port} is down: `ip link set {interface} up`"
            )),
            Err(error) => {
                return Err(CliError::usage(format!("port {port}: {error}")).hint(error.hint()));
            }
        }
    }
    Ok(())
}

impl AgentCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let brains = self.brains.brains()?;
        if !self.quiet {
            service::log::enable();
        }
        check_ports(&self.ports, self.enforce)?;
        let ports: Vec<PortConfig> =
            self.ports.into_iter().map(PortArg::config).collect::<Result<_, _>>()?;
        let rate_limits = self.enforce.table(self.rate_limits.as_deref())?;
        let enforcer = self.enforce.open(self.replace, rate_limits.clone()).map_err(|error| {
            CliError::from_cause(error).hint("HTB needs CAP_NET_ADMIN; --enforce none only reports")
        })?;
        let (queues, scheme) = self.enforce.queues(self.queues, rate_limits.is_some());
        let config = Config {
            node: self.node,
            brains,
            state: self.state,
            ports,
            queues,
            scheme,
            rate_limits,
            enforcer: self.enforce.name().to_owned(),
        };
        let mut listener = None;
        let socket = self.socket;
        let local = |jobs: Jobs| {
            if !socket.as_os_str().is_empty() {
                listener = Some(serve_local(&socket, jobs)?);
            }
            Ok(())
        };
        agent::run(config, enforcer, local, |ready| {
            report_ready(console, &ReadyReport { event: "ready", ready: ready.clone() })
        })?;
        drop(listener);
        Ok(Exit::Good)
    }
}

/// Tells programs of this machine which DSCP their job has.
fn serve_local(path: &Path, jobs: Jobs) -> Result<local::Server, Error> {
    if let Some(folder) = path.parent() {
        // Where that fails, so does what follows, with the path.
        let _ = make_shared_folder(folder);
    }
    let answer = move |_: &local::Asker, name: &str| {
        let known = jobs.named(name).ok_or_else(|| Refusal {
            error: format!("job '{name}' has nothing on this machine"),
            hint: match jobs.names() {
                names if names.is_empty() => {
                    "no job has anything here: `dquant job list` shows where".to_owned()
                }
                names => format!("here are: {}", names.join(", ")),
            },
        })?;
        Ok(Membership { job: known.job, name: name.to_owned(), dscp: known.dscp, pace_bps: None })
    };
    local::Server::start(path, Arc::new(answer)).map_err(|error| {
        Error::because(format_args!("socket {}", path.display()), &error)
            .hint("choose another --socket, or an empty one for none")
    })
}

/// Reports that an agent runs.
#[derive(Debug, Serialize)]
struct ReadyReport {
    event: &'static str,
    #[serde(flatten)]
    ready: Ready,
}

impl Report for ReadyReport {
    const SCHEMA: &'static str = "dquant.ready/1";
}

impl fmt::Display for ReadyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ready { node, enforcer, keeps_times, ports, jobs, .. } = &self.ready;
        let (times, jobs) =
            (if *keeps_times { "" } else { ", keeps no times" }, counted(*jobs, "job"));
        write!(f, "agent ready: {node}, enforces with {enforcer}{times}, {jobs} from before")?;
        for PortConfig { port, interface, rate_bps } in ports {
            write!(f, "\n  port {port}: {interface}, {:.3} Gbit/s", *rate_bps as f64 / 1e9)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        agent: AgentCommand,
    }

    #[test]
    fn an_agent_without_a_socket_has_an_empty_path() {
        let line =
            Line::try_parse_from(["agent", "--node", "host0", "--port", "1=lo", "--socket", ""]);
        assert!(line.expect("an empty path is one").agent.socket.as_os_str().is_empty());
    }

    #[test]
    fn ports_that_cannot_be_enforced_are_refused_at_the_start() {
        let ports = |texts: &[&str]| texts.iter().map(|text| port(text).expect("a port")).collect();
        let refused = |texts: &[&str], enforce| -> Option<String> {
            let ports: Vec<PortArg> = ports(texts);
            check_ports(&ports, enforce).err().map(|error| error.to_string())
        };
        assert_eq!(refused(&["1=lo:1Gbit"], Choice::Htb), None);
        let missing = refused(&["1=lo:1Gbit", "2=none-such:1Gbit"], Choice::Dcb).expect("refused");
        assert!(
            missing.contains("port 2: there is no interface 'none-such'\nhint: `ip link`"),
            "{missing}"
        );
        assert!(refused(&["1=lo:1Gbit", "2=lo:1Gbit"], Choice::Htb).is_some());
        assert_eq!(refused(&["1=lo:1Gbit", "2=none-such:1Gbit"], Choice::None), None);
        assert!(refused(&["1=lo:1Gbit", "1=lo:1Gbit"], Choice::None).is_some());
    }

    #[test]
    fn a_folder_that_is_named_or_needed_has_to_be_there() {
        let folder = std::env::temp_dir().join(format!("agent-rate-limits-{}", std::process::id()));
        let table = Choice::None.table(Some(&folder)).expect("a temporary folder");
        assert!(table.is_some());
        let busy = Choice::Htb.table(Some(&folder)).expect_err("one agent keeps it");
        assert!(busy.to_string().contains(") has locked it: one agent keeps a folder"), "{busy}");
        drop(table);
        std::fs::remove_dir_all(&folder).expect("it is ours");
        // A file in its place cannot be written into by root either.
        std::fs::write(&folder, "").expect("a temporary file");
        assert!(Choice::Dcb.table(Some(&folder)).is_err());
        std::fs::remove_file(&folder).expect("it is ours");
        let none = Path::new("");
        assert!(Choice::Dcb.table(Some(none)).expect("none is asked for").is_none());
        assert!(Choice::RateLimits.table(Some(none)).is_err());
        assert_eq!(Choice::RateLimits.queues(7, true), (1, Scheme::Paced));
        assert_eq!(Choice::Dcb.queues(4, true), (4, Scheme::Paced));
        assert_eq!(Choice::Dcb.queues(4, false), (4, Scheme::Matched));
        assert_eq!(Choice::Htb.queues(4, true), (4, Scheme::Matched));
    }

    #[test]
    fn rate_limits_of_an_agent_before_end_with_another_way_to_enforce() {
        let folder = std::env::temp_dir().join(format!("agent-before-{}", std::process::id()));
        let table = Choice::RateLimits.table(Some(&folder)).expect("a folder").expect("a table");
        table.set([(26, nic::rates::RateLimit::of(7_000_000))]);
        Choice::RateLimits.open(false, Some(Arc::clone(&table))).expect("it needs no privilege");
        assert_eq!(table.bps(26), 7_000_000, "the plan of its state is put into force first");
        Choice::None.open(false, Some(Arc::clone(&table))).expect("it needs no privilege");
        assert_eq!(table.bps(26), 0);
        std::fs::remove_dir_all(&folder).expect("it is ours");
    }

    #[test]
    fn ports_are_read_with_and_without_a_rate() {
        let with = port("2=swp1:25Gbit").expect("a port");
        assert_eq!((with.port, &*with.interface, with.rate_bps), (2, "swp1", Some(25_000_000_000)));
        assert_eq!(port("1=eth0").expect("a port").rate_bps, None);
        for wrong in [
            "0=eth0",
            "255=eth0",
            "eth0",
            "x=eth0",
            "1=",
            "300=eth0",
            "1=eth0:fast",
            "1=a/b",
            "1=abcdefghijklmnop",
        ] {
            assert!(port(wrong).is_err(), "{wrong}");
        }
    }
}
