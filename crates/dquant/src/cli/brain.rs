//! `dquant brain`: admits jobs and tells agents what to enforce.

mod sign_log;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::topology::graph::Capacity;
use clap::{Args, Subcommand, ValueEnum};
use cluster::brain::{self, BRAIN_PORT, Cluster, Config, Looks, Ready};
use cluster::keys::Keys;
use cluster::store::etcd::{self, EtcdStore};
use cluster::store::file::FileStore;
use cluster::store::{SetupError, UNSIGNED_HINT};
use cluster::web::{Options, Sources, WEB_PORT, WebServer};
use cluster::words::counted;
use lab::topology::{self, own};
use lab::units;
use parfait::spread::Ecmp;
use serde::Serialize;
use service::address::{check_port, with_port};
use service::error::Error;
use service::tls;

use self::sign_log::SignLog;
use super::cluster::TlsArgs;
use super::daemons::{TokenArgs, die_with_parent, listen_at, report_ready};
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// A lease that is not renewed holds so long in one file, where only a killed process leaves it.
const FILE_LEASE: Duration = Duration::from_secs(2);

/// When a brain gives up leading without news from etcd: less than the 2 s that etcd grants where 1 s is asked for.
const ETCD_LEASE: Duration = Duration::from_millis(1500);

/// Where etcd serves clients.
const ETCD_PORT: u16 = 2379;

/// Run a brain: place jobs so that their bandwidth holds, and keep the ledger
///
/// Several brains with one etcd share a ledger: one leads, the others stand by, and one of them takes
/// over when the leader is gone. With --state the ledger is in a file of this machine.
/// Agents enforce what the brain decides, and go on while there is none.
/// Runs until SIGTERM, SIGINT or SIGHUP.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  dquant brain --topology fat-tree:8 --slots 8 --state brain.redb --token-file token
  dquant brain --topology cluster.toml --etcd 10.0.0.1,10.0.0.2 --etcd-ca ca.pem --etcd-cert brain.pem \\
      --etcd-key brain.key --listen 10.0.0.5 --token-file token    DQUANT_ETCD_USER has etcd's NAME:PASSWORD
  dquant brain --topology cluster.toml --state brain.redb --switch-agents all --http 127.0.0.1 --token-file token"
)]
pub(super) struct BrainCommand {
    #[command(subcommand)]
    verb: Option<Verb>,

    /// The network: a rule such as fat-tree:8, or a file (docs/routing.md)
    #[arg(long, value_name = "RULE|FILE", required = true)]
    topology: Option<String>,

    /// Rate of links whose rate the topology does not say
    #[arg(long, value_name = "RATE", default_value = "100Gbit", value_parser = units::rate_bps)]
    link_rate: u64,

    /// Slots of each host, such as GPUs
    ///
    /// A worker takes one unless its job says slots=N.
    #[arg(long, value_name = "N", default_value_t = 8)]
    slots: u32,

    /// Share of each link that jobs may reserve
    ///
    /// The rest is for traffic without guarantees.
    #[arg(long, value_name = "SHARE", default_value = "95%", value_parser = units::fraction_ppm)]
    reservable: u32,

    /// How equal paths are reserved
    #[arg(long, value_enum, default_value = "even")]
    ecmp: EcmpChoice,

    /// Switches whose ports an agent governs: names, or all
    #[arg(long, value_name = "NAME,...|all", value_delimiter = ',')]
    switch_agents: Vec<String>,

    /// Where it listens; the port is 4795 when none is given
    #[arg(long, value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    listen: String,

    /// Where agents, commands and other brains reach it [default: where it listens]
    ///
    /// Needed with --etcd and --listen 0.0.0.0: a standby brain names the leader by this address.
    ///
    /// Without a port, that of --listen.
    #[arg(long, value_name = "HOST[:PORT]")]
    advertise: Option<String>,

    #[command(flatten)]
    store: StoreArgs,

    #[command(flatten)]
    etcd: EtcdArgs,

    /// Serve the page, its JSON and metrics there; the port is 4796 when none is given
    #[arg(long, value_name = "HOST[:PORT]")]
    http: Option<String>,

    /// Whoever reaches the page may look, without the token
    #[arg(long, requires = "http")]
    web_open: bool,

    #[command(flatten)]
    token: TokenArgs,

    #[command(flatten)]
    tls: TlsArgs,

    /// Do not report on standard error what happens
    #[arg(long)]
    quiet: bool,

    /// End when the starting process ends
    #[arg(long, hide = true)]
    die_with_parent: bool,
}

/// What is done with a log instead.
#[derive(Debug, Subcommand)]
enum Verb {
    SignLog(SignLog),
}

/// Where the lease and the log are.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct StoreArgs {
    /// File with the ledger, for a single brain
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,

    /// Members of the etcd with the ledger; the port is 2379 when none is given
    #[arg(long, value_name = "HOST[:PORT],...", value_delimiter = ',')]
    etcd: Vec<String>,
}

/// How etcd is spoken to.
#[derive(Debug, Args)]
struct EtcdArgs {
    /// What all keys in etcd begin with
    ///
    /// The brains of one cluster have the same.
    #[arg(long, value_name = "PREFIX", default_value = "/dquant/brain/", requires = "etcd")]
    etcd_prefix: String,

    /// Authority that signed etcd's certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "etcd")]
    etcd_ca: Option<PathBuf>,

    /// Certificate for etcd, as PEM
    #[arg(long, value_name = "FILE", requires = "etcd_key")]
    etcd_cert: Option<PathBuf>,

    /// Key of that certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "etcd_cert")]
    etcd_key: Option<PathBuf>,

    /// Name and password for etcd, as NAME:PASSWORD
    #[arg(
        long,
        value_name = "NAME:PASSWORD",
        env = "DQUANT_ETCD_USER",
        hide_env_values = true,
        requires = "etcd"
    )]
    etcd_user: Option<String>,
}

impl EtcdArgs {
    fn config(&self, members: &[String]) -> Result<etcd::Config, CliError> {
        let files = tls::Files {
            authority: self.etcd_ca.clone(),
            certificate: self.etcd_cert.clone(),
            key: self.etcd_key.clone(),
        };
        let tls = files.client()?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = |member: &String| format!("{scheme}://{}", with_port(member, ETCD_PORT));
        let user = self.etcd_user.as_ref().map(|user| {
            let split = user.split_once(':').map(|(name, word)| (name.to_owned(), word.to_owned()));
            split
                .map(|(name, password)| etcd::User { name, password })
                .ok_or_else(|| CliError::usage("--etcd-user takes NAME:PASSWORD"))
        });
        Ok(etcd::Config {
            prefix: self.etcd_prefix.clone(),
            tls,
            user: user.transpose()?,
            ..etcd::Config::new(members.iter().map(url).collect())
        })
    }
}

/// How jobs count on equal paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EcmpChoice {
    /// Evenly over all of them
    Even,
    /// Each of them must be able to carry everything
    Worst,
}

impl BrainCommand {
    pub(super) fn run(mut self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb.take() {
            Some(Verb::SignLog(verb)) => verb.run(console),
            None => self.serve(console),
        }
    }

    fn serve(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.die_with_parent {
            die_with_parent()?;
        }
        let page_token = self.token.required()?;
        let keys = Keys::of_token(&page_token);
        if !self.quiet {
            service::log::enable();
        }
        let capacity = Capacity { rate_bps: self.link_rate, ..Capacity::default() };
        let topology = topology::named(self.topology.as_deref().unwrap_or_default(), capacity)?;
        let switches = match &self.switch_agents[..] {
            [all] if all == "all" => {
                let switches = topology.switches();
                switches.map(|node| topology.node(node).name().to_owned()).collect()
            }
            names => names.to_vec(),
        };
        let cluster = Cluster {
            text: own::write(&topology),
            topology,
            slots: self.slots,
            reservable_ppm: self.reservable,
            ecmp: match self.ecmp {
                EcmpChoice::Even => Ecmp::Even,
                EcmpChoice::Worst => Ecmp::Worst,
            },
        };
        let listen = listen_at("--listen", &self.listen, BRAIN_PORT)?;
        let address = self.advertised(listen)?;
        let config = |lease, store| Config {
            listen,
            address,
            keys: keys.clone(),
            tls: self.tls.files(),
            cluster,
            switches,
            lease,
            store,
        };
        let http =
            self.http.as_ref().map(|http| listen_at("--http", http, WEB_PORT)).transpose()?;
        let mut page = None;
        let web = |looks: Looks| {
            let Some(address) = http else { return Ok(()) };
            page = Some(serve_page(address, looks, (!self.web_open).then(|| page_token.clone()))?);
            Ok(())
        };
        let ready = |ready: &Ready| {
            report_ready(console, &ReadyReport { event: "ready", ready: ready.clone() })
        };
        if let Some(path) = &self.store.state {
            check_folder(path)?;
            let config = config(FILE_LEASE, format!("file {}", path.display()));
            let open = async || FileStore::new(path, &keys).map_err(unusable);
            brain::run(config, open, web, ready)?;
        } else {
            let etcd = self.etcd.config(&self.store.etcd)?;
            let place = format!("etcd {}", self.store.etcd.join(","));
            let config = config(ETCD_LEASE, place);
            let open = async || EtcdStore::new(&etcd, &keys).map_err(unusable);
            brain::run(config, open, web, ready)?;
        }
        Ok(Exit::Good)
    }

    /// Where others reach the brain, if the command line says so.
    ///
    /// # Errors
    /// When it is no address, or is needed and not given: brains that share an etcd name each other to agents and commands
    /// of any machine.
    fn advertised(&self, listen: SocketAddr) -> Result<Option<String>, CliError> {
        let hint =
            || format!("name an address of this machine: --advertise 10.0.0.5:{}", listen.port());
        let Some(address) = &self.advertise else {
            if listen.ip().is_unspecified() && !self.store.etcd.is_empty() {
                return Err(CliError::usage(format!(
                    "--listen {}: no other machine reaches a brain at that address, and the other brains would name it",
                    listen.ip()
                ))
                .hint(hint()));
            }
            return Ok(None);
        };
        check_port(address)?;
        // A port that the system is to choose is not known yet.
        let port = if listen.port() == 0 { BRAIN_PORT } else { listen.port() };
        let address = with_port(address, port);
        let host = address.rsplit_once(':').map_or("", |(host, _)| host);
        let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        if host.is_empty() || ip.is_ok_and(|ip| ip.is_unspecified()) {
            let why = format!("--advertise {address}: nobody reaches a brain there");
            return Err(CliError::usage(why).hint(hint()));
        }
        Ok(Some(address))
    }
}

/// A store that the brain cannot use, and what to do about it.
fn unusable(error: SetupError) -> Error {
    let is_unsigned = matches!(error, SetupError::Unsigned { .. });
    let error = Error::from_cause(error);
    if is_unsigned { error.hint(UNSIGNED_HINT) } else { error }
}

/// Refuses a file whose folder is not there: nothing that the brain waits for would make it.
fn check_folder(path: &Path) -> Result<(), CliError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder.filter(|folder| !folder.is_dir()) {
        None => Ok(()),
        Some(folder) => Err(CliError::usage(format!(
            "{}: there is no folder {}",
            path.display(),
            folder.display()
        ))
        .hint("make the folder, or choose another --state")),
    }
}

/// Serves the page until it is dropped.
fn serve_page(
    address: SocketAddr,
    looks: Looks,
    token: Option<String>,
) -> Result<WebServer, Error> {
    let failed = |error: std::io::Error| {
        Error::because(format_args!("cannot serve the page on {address}"), &error)
            .hint("choose another address or port with --http")
    };
    let listener = std::net::TcpListener::bind(address).map_err(failed)?;
    let sources = Sources { view: looks.view, events: looks.events };
    let needs_token = token.is_some();
    let server = WebServer::start(
        listener,
        sources,
        Options { token, hooks: looks.hooks, ..Options::default() },
    );
    let server = server.map_err(failed)?;
    service::log::line(format_args!("the page is at http://{}/", server.address()));
    if needs_token && !server.address().ip().is_loopback() {
        service::log::line(
            "the page has no TLS: its token goes over the network in clear, also with --tls-cert; \
             a proxy with TLS before --http 127.0.0.1 helps",
        );
    }
    Ok(server)
}

/// Reports that a brain serves.
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
        let Ready { listen, address, store, hosts, notes, .. } = &self.ready;
        write!(f, "brain ready: {listen}")?;
        if *address != listen.to_string() {
            write!(f, " (reached at {address})")?;
        }
        write!(f, ", {}, ledger in {store}", counted(*hosts, "host"))?;
        for note in notes {
            write!(f, "\n  {note}")?;
        }
        Ok(())
    }
}
