//! `dquant perf`: latency and bandwidth of the fabric, client and server ([`lab::perf`]).

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use adapter::congestion::Choice;
use adapter::owned::DeviceChoice;
use clap::{Args, Subcommand, ValueEnum};
use controls::CongestionControl;
use engine::budget::Bytes;
use lab::chart::{self, Curve, Diagram, Scale};
use lab::devices::MessagePath;
use lab::perf::client::{Client, Latency, Outcome};
use lab::perf::messages::PERF_PORT;
use lab::perf::server;
use lab::perf::test::{MAX_BYTES, Mode, Operation, Service, Test};
use lab::trace::file;
use lab::units;
use nic::loaded::DEFAULT_LIBRARY;
use roce::endpoint::Mtu;
use serde::Serialize;
use service::seed::fresh_seed;

use super::daemons::{listen_at, mtu, span};
use super::{Console, Report};
use crate::exit::{CliError, Exit, OUTPUT_HINT};

/// Measure latency and bandwidth between two machines, or two processes of one
///
/// Start `dquant perf serve` once on one side. Everything else is said on the other: each test is
/// sent to the server. Without more, every operation is measured over sizes from 8 bytes to 64 MiB,
/// latency and bandwidth. The content of messages is verified. docs/perf.md explains each column.
/// Within one machine, messages go through shared memory; DQUANT_PATH=udp makes them packets.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true,
    after_help = "\
Ends with 1 when a byte was wrong, with 3 when the server cannot be reached or is lost.

Examples:
  dquant perf serve 10.0.0.5
  dquant perf 10.0.0.5
  dquant perf 10.0.0.5 write --size 8..64MiB --qps 4
  dquant perf 10.0.0.5 send read --size 64,4KiB --mode latency --seconds 5s
  dquant perf 10.0.0.5 send --transport ud --size 8..1KiB
  dquant perf 10.0.0.5 write --device mlx5_0 --json
  dquant perf 10.0.0.5 write --rate 2Gbit/s --cc off
  dquant perf 10.0.0.5 send --size 64 --mode latency --wire xdp
  dquant perf 10.0.0.5 write --wire roce-v1
  dquant perf 10.0.0.5 write --plot write.svg
  dquant perf 10.0.0.5 write --size 64KiB --mode bandwidth --cc delay --samples write.csv"
)]
pub(super) struct PerfCommand {
    #[command(subcommand)]
    verb: Option<Verb>,

    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Serve(ServeArgs),
}

/// Wait for clients and do the tests that they ask for
///
/// A client needs no password: whoever reaches the address can make this process move up to 1 GiB of
/// its own memory per client. The default address is reachable from this machine only. Runs until it
/// is ended; says on stderr what it does.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant perf serve
  dquant perf serve 10.0.0.5
  dquant perf serve 0.0.0.0:5000
  dquant perf serve 10.0.0.5 --device mlx5_0"
)]
struct ServeArgs {
    /// Address to listen on; port 4792 when none is given
    #[arg(value_name = "HOST[:PORT]", default_value = "127.0.0.1")]
    listen: String,

    #[command(flatten)]
    device: DeviceArgs,
}

/// The device of this side.
#[derive(Debug, Args)]
pub(super) struct DeviceArgs {
    /// Use this RDMA device of a libibverbs instead of dquant's own
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// The libibverbs that has the device
    #[arg(long, value_name = "FILE", default_value = DEFAULT_LIBRARY, requires = "device")]
    verbs_library: PathBuf,
}

impl DeviceArgs {
    pub(super) fn choice(self) -> Option<DeviceChoice> {
        let DeviceArgs { device, verbs_library } = self;
        device.map(|name| DeviceChoice { library: verbs_library, name })
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Modes {
    Latency,
    Bandwidth,
    Both,
}

impl Modes {
    fn all(self) -> &'static [Mode] {
        match self {
            Modes::Latency => &[Mode::Latency],
            Modes::Bandwidth => &[Mode::Bandwidth],
            Modes::Both => &[Mode::Latency, Mode::Bandwidth],
        }
    }
}

/// The sockets that packets take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WireChoice {
    Udp,
    Xdp,
    RoceV1,
}

/// How both sides wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Wait {
    Spin,
    Sleep,
}

#[derive(Debug, Args)]
struct ClientArgs {
    /// Where `dquant perf serve` listens; port 4792 when none is given
    #[arg(value_name = "HOST[:PORT]", required = true)]
    host: Option<String>,

    /// send, write, read or atomic; all that the transport has without it
    #[arg(value_name = "OPERATION", value_parser = str::parse::<Operation>)]
    operations: Vec<Operation>,

    /// Sizes: a list, or FIRST..LAST with the powers of four between [default: 8..64MiB]
    #[arg(long, value_name = "SIZES", value_parser = sizes)]
    size: Option<Sizes>,

    /// Transport service: rc, uc, ud
    #[arg(long, value_name = "SERVICE", default_value = "rc", value_parser = str::parse::<Service>)]
    transport: Service,

    /// What to measure
    #[arg(long, value_enum, default_value = "both")]
    mode: Modes,

    /// Queue pairs, for bandwidth
    #[arg(long, value_name = "N", default_value_t = 1)]
    qps: u32,

    /// Messages in flight on each queue pair, for bandwidth
    ///
    /// Fewer where their buffers would need more than 256 MiB on a side.
    #[arg(long, value_name = "N", default_value_t = 64)]
    depth: u32,

    /// Length of the measured part of each test
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = span)]
    seconds: std::time::Duration,

    /// Largest path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = mtu)]
    mtu: Mtu,

    /// Standard loss recovery, also where both ends know better
    #[arg(long)]
    go_back_n: bool,

    /// Congestion control of this side: auto, off, delay, dcqcn-mlnx:GBPS
    ///
    /// auto: from measured delay towards other machines, off within one.
    /// delay: the same on one machine. READ responses are not controlled.
    /// advertised, dcqcn-mlnx, dcqcn-paper, dcqcn-uet, dctcp, timely, timely-patched take the link's rate
    /// in Gbit/s; swift takes none.
    #[arg(long, value_name = "NAME", default_value = "auto", verbatim_doc_comment)]
    cc: Choice,

    /// The most that each queue pair of both sides sends, headers included: 10Gbit/s
    ///
    /// [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = units::rate_bps, verbatim_doc_comment)]
    rate: Option<u64>,

    /// The sockets that both sides use
    ///
    /// xdp: AF_XDP, past the kernel's network stack. Each side that cannot (it needs root, an
    /// Ethernet interface and port 4791) takes UDP, and the reason is said. docs/xdp.md.
    /// roce-v1: packets of RoCE version 1 in Ethernet frames, between machines of one link. Both sides
    /// need root or CAP_NET_RAW; the client's choice is the server's. docs/roce-v1.md.
    #[arg(
        long,
        value_enum,
        default_value = "udp",
        conflicts_with = "device",
        verbatim_doc_comment
    )]
    wire: WireChoice,

    /// How both sides wait
    ///
    /// Without it they spin for latency and sleep for bandwidth.
    #[arg(long, value_enum)]
    wait: Option<Wait>,

    /// Draw the results into this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Write window, rate and round-trip time of every queue pair over time, 1 ms apart, as CSV
    ///
    /// For one test with --transport rc; `dquant sim compare` reads it.
    #[arg(long, value_name = "FILE", conflicts_with = "device")]
    samples: Option<PathBuf>,

    #[command(flatten)]
    device: DeviceArgs,
}

/// Sizes of messages, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes(Vec<u32>);

impl Sizes {
    fn range(first: u32, last: u32) -> Sizes {
        let powers = std::iter::successors(Some(1_u32), |size| size.checked_mul(4));
        let between = powers.filter(|size| (first..last).contains(size) && *size != first);
        let mut all = vec![first];
        all.extend(between);
        all.extend((last != first).then_some(last));
        Sizes(all)
    }
}

fn sizes(text: &str) -> Result<Sizes, String> {
    let one = |text: &str| match units::size_bytes(text) {
        Ok(bytes) => match u32::try_from(bytes) {
            Ok(bytes @ 1..=MAX_BYTES) => Ok(bytes),
            _ => Err(format!("{bytes} bytes; a message has 1 byte to 64 MiB")),
        },
        Err(error) => Err(error.to_string()),
    };
    if let Some((first, last)) = text.split_once("..") {
        let (first, last) = (one(first)?, one(last)?);
        return if first <= last {
            Ok(Sizes::range(first, last))
        } else {
            Err(format!("{text} is empty"))
        };
    }
    text.split(',').map(one).collect::<Result<Vec<u32>, String>>().map(Sizes)
}

impl PerfCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        match self.verb {
            Some(Verb::Serve(serve)) => serve.run(console),
            None => self.client.run(console),
        }
    }
}

/// A server that waits for clients.
#[derive(Debug, Serialize)]
struct Waiting {
    event: &'static str,
    control: SocketAddr,
    device: Option<String>,
}

impl Report for Waiting {
    const SCHEMA: &'static str = "dquant.perf.ready/1";
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "perf server ready: {}", self.control)?;
        self.device.iter().try_for_each(|name| write!(f, ", device {name}"))
    }
}

impl ServeArgs {
    fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let address = listen_at("--listen", &self.listen, PERF_PORT)?;
        let listener = TcpListener::bind(address).map_err(|error| {
            CliError::because(format_args!("cannot listen on {address}"), &error)
                .hint("does another one or `dquant dpu` run? `dquant perf serve HOST:PORT` takes another port")
        })?;
        let control = listener.local_addr().map_err(CliError::from_cause)?;
        service::log::enable();
        let device = self.device.choice();
        let name = device.as_ref().map(|choice| choice.name.clone());
        console.report(&Waiting { event: "ready", control, device: name })?;
        if control.ip().is_loopback() {
            console.note("for clients on other machines, name an address: dquant perf serve HOST");
        }
        server::serve(&listener, device.as_ref())
    }
}

/// One test and its result.
#[derive(Debug, Serialize)]
struct Measured {
    #[serde(skip)]
    with_heading: bool,
    operation: Operation,
    transport: Service,
    mode: Mode,
    bytes: u32,
    qps: u32,
    /// Messages in flight on each queue pair.
    depth: u32,
    mtu: u32,
    selective: bool,
    path: MessagePath,
    /// Why messages did not take the path that was wanted.
    fallbacks: Vec<String>,
    spin: bool,
    seconds: f64,
    messages: u64,
    latency_us: Option<LatencyUs>,
    gbps: f64,
    messages_per_s: f64,
    client_cpu_s_per_gb: Option<f64>,
    server_cpu_s_per_gb: Option<f64>,
    retransmitted: Option<u64>,
    lost: u64,
    verified_bytes: u64,
    mismatches: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct LatencyUs {
    min: f64,
    p50: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Measured {
    fn new(test: &Test, outcome: &Outcome, with_heading: bool) -> Measured {
        let bytes = outcome.messages as f64 * f64::from(test.bytes);
        let per_s =
            |amount: f64| if outcome.seconds > 0.0 { amount / outcome.seconds } else { 0.0 };
        let per_gb = |seconds: f64| (bytes > 0.0).then(|| seconds / bytes * 1e9);
        let [client, server] = outcome.cpu_s;
        let latency_us = outcome.latency.map(|Latency { min, p50, p99, p999, max }| LatencyUs {
            min,
            p50,
            p99,
            p999,
            max,
        });
        Measured {
            with_heading,
            operation: test.operation,
            transport: test.service,
            mode: test.mode,
            bytes: test.bytes,
            qps: test.qps,
            depth: test.slots(),
            mtu: outcome.mtu,
            selective: outcome.selective,
            path: outcome.path,
            fallbacks: outcome.fallbacks.clone(),
            spin: test.spin,
            seconds: outcome.seconds,
            messages: outcome.messages,
            latency_us,
            gbps: per_s(bytes * 8.0 / 1e9),
            messages_per_s: per_s(outcome.messages as f64),
            client_cpu_s_per_gb: per_gb(client),
            server_cpu_s_per_gb: per_gb(server),
            retransmitted: outcome.retransmitted,
            lost: outcome.lost,
            verified_bytes: outcome.verified_bytes,
            mismatches: outcome.mismatches,
        }
    }
}

impl Report for Measured {
    const SCHEMA: &'static str = "dquant.perf/1";
}

const HEADING: &str = "\
operation               bytes  qps   p50 us   p99 us p99.9 us   Gbit/s    Mmsg/s  CPU s/GB client  server   resent     lost  verified  path";

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.with_heading {
            writeln!(f, "{HEADING}")?;
        }
        let name =
            format!("{} {} {}", self.operation.name(), self.transport.name(), self.mode.name());
        write!(f, "{name:<19} {:>9} {:>4}", self.bytes, self.qps)?;
        match self.latency_us {
            Some(LatencyUs { p50, p99, p999, .. }) => {
                write!(f, " {p50:>8.2} {p99:>8.2} {p999:>8.2}")?;
            }
            None => write!(f, " {0:>8} {0:>8} {0:>8}", "-")?,
        }
        write!(f, " {:>8.3} {:>9.4}", self.gbps, self.messages_per_s / 1e6)?;
        let optional =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        write!(f, " {:>16}", optional(self.client_cpu_s_per_gb))?;
        write!(f, " {:>7}", optional(self.server_cpu_s_per_gb))?;
        let resent = self.retransmitted.map_or("-".to_owned(), |packets| packets.to_string());
        write!(
            f,
            " {resent:>8} {:>8} {:>9}  {}",
            self.lost,
            Bytes(self.verified_bytes).to_string(),
            self.path.name()
        )?;
        if self.mismatches > 0 {
            write!(f, "  {} WRONG", self.mismatches)?;
        }
        Ok(())
    }
}

impl ClientArgs {
    fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let tests = self.tests()?;
        service::log::enable();
        let ClientArgs { host, plot, samples, device, cc, .. } = self;
        let host = host.ok_or_else(|| CliError::usage("no server named"))?;
        if let Some(path) = &plot {
            check_writable(path)?;
        }
        if let Some(path) = &samples {
            check_writable(path)?;
        }
        let mut client = Client::connect(&host, device.choice(), cc, fresh_seed()?)?;
        if samples.is_some() {
            client.sample_progress();
        }
        let (mut results, mut is_wrong, mut said) = (Vec::new(), false, BTreeSet::new());
        for (number, test) in tests.iter().enumerate() {
            console.progress(format_args!("{} of {}: {test}", number + 1, tests.len()));
            let outcome = client.run(*test)?;
            for why in &outcome.fallbacks {
                if said.insert(why.clone()) {
                    console.note(why);
                }
            }
            if let Some(path) = &samples {
                fs::write(path, file::write(&outcome.progress))
                    .map_err(|error| cannot_write(path, &error))?;
            }
            let measured = Measured::new(test, &outcome, results.is_empty());
            console.report(&measured)?;
            is_wrong |= measured.mismatches > 0;
            results.push(measured);
        }
        if let Some(path) = plot {
            draw(&path, &host, &results)?;
        }
        Ok(if is_wrong { Exit::CheckFailed } else { Exit::Good })
    }

    /// Every test, checked before the first one runs.
    fn tests(&self) -> Result<Vec<Test>, CliError> {
        let possible = |operation: &Operation| match self.transport {
            Service::Rc => true,
            Service::Uc => matches!(operation, Operation::Send | Operation::Write),
            Service::Ud => *operation == Operation::Send,
        };
        let operations = match self.operations.is_empty() {
            true => Operation::ALL.into_iter().filter(possible).collect(),
            false => self.operations.clone(),
        };
        let last = if self.transport == Service::Ud {
            Mtu::M1024.bytes().min(self.mtu.bytes())
        } else {
            MAX_BYTES
        };
        let sizes = self.size.clone().unwrap_or_else(|| Sizes::range(8, last));
        let mut tests = Vec::new();
        for operation in operations {
            let sizes = match (operation, &self.size) {
                (Operation::Atomic, None) => Sizes(vec![8]),
                _ => sizes.clone(),
            };
            for &mode in self.mode.all() {
                tests.extend(sizes.0.iter().map(|&bytes| self.test(operation, mode, bytes)));
            }
        }
        let is_sampled_test = tests.len() == 1 && self.transport == Service::Rc;
        if self.samples.is_some() && !is_sampled_test {
            return Err(CliError::usage("--samples is for one test of reliable connections").hint(
                "name one operation, one size and one mode: write --size 64KiB --mode bandwidth",
            ));
        }
        match tests.iter().find_map(Test::complaint) {
            Some((why, hint)) => Err(CliError::usage(why).hint(hint)),
            None => Ok(tests),
        }
    }

    /// Whether nothing but packets through sockets is what is to be measured.
    fn needs_sockets(&self) -> bool {
        let is_controlled =
            !matches!(self.cc, Choice::Auto | Choice::Always(CongestionControl::Off));
        self.device.device.is_some()
            || is_controlled
            || adapter::owned::refused_by_environment().is_some()
    }

    fn test(&self, operation: Operation, mode: Mode, bytes: u32) -> Test {
        let spin = match self.wait {
            Some(wait) => wait == Wait::Spin,
            None => mode == Mode::Latency,
        };
        Test {
            operation,
            service: self.transport,
            mode,
            bytes,
            qps: if mode == Mode::Latency { 1 } else { self.qps },
            depth: self.depth,
            mtu: self.mtu.bytes(),
            go_back_n: self.go_back_n,
            by_sockets: self.needs_sockets(),
            by_xdp: self.wire == WireChoice::Xdp,
            by_roce_v1: self.wire == WireChoice::RoceV1,
            rate_limit_bps: self.rate.unwrap_or(0),
            spin,
            millis: u32::try_from(self.seconds.as_millis()).unwrap_or(u32::MAX),
        }
    }
}

/// Writes the picture.
fn draw(path: &Path, host: &str, results: &[Measured]) -> Result<(), CliError> {
    let curves =
        |mode: Mode, name: &str, dashed: bool, value: &dyn Fn(&Measured) -> Option<f64>| {
            let mut curves = Vec::new();
            for (colour, operation) in Operation::ALL.into_iter().enumerate() {
                let of =
                    results.iter().filter(|one| one.operation == operation && one.mode == mode);
                let mut points: Vec<(f64, f64)> =
                    of.filter_map(|one| Some((f64::from(one.bytes), value(one)?))).collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                let name = format!("{} {name}", operation.name());
                curves.push(Curve { name, colour, dashed, points });
            }
            curves
        };
    let p50 = curves(Mode::Latency, "p50", false, &|one| one.latency_us.map(|us| us.p50));
    let p99 = curves(Mode::Latency, "p99", true, &|one| one.latency_us.map(|us| us.p99));
    let rate = curves(Mode::Bandwidth, "bandwidth", false, &|one| Some(one.gbps));
    let paired = p50.into_iter().zip(p99).flat_map(|(p50, p99)| [p50, p99]);
    let is_there = |curve: &Curve| !curve.points.is_empty();
    let diagrams = [
        Diagram {
            title: "Latency, us".to_owned(),
            scales: [Scale::Sizes, Scale::Powers],
            curves: paired.filter(is_there).collect(),
            marks: Vec::new(),
        },
        Diagram {
            title: "Bandwidth, Gbit/s".to_owned(),
            scales: [Scale::Sizes, Scale::Powers],
            curves: rate.into_iter().filter(is_there).collect(),
            marks: Vec::new(),
        },
    ];
    let title = format!("dquant perf {host}");
    fs::write(path, chart::svg(&title, &diagrams)).map_err(|error| cannot_write(path, &error))
}

/// Before minutes are spent on what could not be kept. Pipes and devices are left alone: whoever reads them would see an
/// end.
fn check_writable(path: &Path) -> Result<(), CliError> {
    let is_new = match fs::metadata(path) {
        Ok(found) if !found.is_file() => return Ok(()),
        Ok(_) => false,
        Err(_) => true,
    };
    let opened = fs::OpenOptions::new().create(true).append(true).open(path);
    let checked = opened.map(drop).map_err(|error| cannot_write(path, &error));
    if is_new && checked.is_ok() {
        // Until there is something to keep.
        let _ = fs::remove_file(path);
    }
    checked
}

fn cannot_write(path: &Path, error: &std::io::Error) -> CliError {
    CliError::because(format_args!("cannot write {}", path.display()), error).hint(OUTPUT_HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_lists_or_ranges() {
        assert_eq!(sizes("8"), Ok(Sizes(vec![8])));
        assert_eq!(sizes("64,4KiB,8"), Ok(Sizes(vec![64, 4096, 8])));
        assert_eq!(sizes("8..64"), Ok(Sizes(vec![8, 16, 64])));
        assert_eq!(sizes("8..8"), Ok(Sizes(vec![8])));
        assert_eq!(sizes("1..20"), Ok(Sizes(vec![1, 4, 16, 20])));
        let all = sizes("8..64MiB").expect("a range").0;
        assert_eq!((all.len(), all[0], all[12]), (13, 8, MAX_BYTES));
        for wrong in ["", "0", "65MiB", "64..8", "8..", "8,,9", "x", "4M"] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }
}
