//! Scenarios as TOML: what a file may say, and its values until they are read.
//!
//! Every table refuses names that it does not know, and every quantity has its unit ([`units`]).

use std::fmt;
use std::path::PathBuf;

use controls::CongestionControl;
use roce::Duration;
use serde::{Deserialize, Deserializer, Serialize, de};
use sim::traffic::FlowSizes;

use crate::units;

/// A scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// What it shows, for reports and pictures.
    pub title: Option<String>,
    /// Hosts, switches and links.
    pub topology: Topology,
    /// What switches do.
    #[serde(default)]
    pub switches: Switches,
    /// What hosts do.
    #[serde(default)]
    pub transport: Transport,
    /// Who sends what to whom.
    pub workload: Workload,
    /// What fails, and when.
    #[serde(default)]
    pub faults: Vec<Fault>,
    /// When the run ends, and its seed.
    #[serde(default)]
    pub run: Run,
}

/// Hosts, switches and links.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// As in `dquant subnet plan`: `fat-tree:8`.
    pub rule: Option<String>,
    /// Instead: a net file, `topo.csv` or TOML, relative to the scenario.
    pub file: Option<PathBuf>,
    /// Rate of the links of hosts; of a file's, where it does not say so itself.
    #[serde(default = "hundred_gbit", deserialize_with = "rate")]
    pub host: u64,
    /// Rate of the links between switches, if it is another.
    #[serde(default, deserialize_with = "some_rate")]
    pub fabric: Option<u64>,
    /// Propagation delay of every link.
    #[serde(default = "one_microsecond", deserialize_with = "span")]
    pub delay: Duration,
    /// Whether hosts with several ports forward packets between them.
    #[serde(default)]
    pub relay: bool,
}

/// What switches do.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Switches {
    /// The buffer of each, shared by its ports; 32 MB if absent.
    #[serde(deserialize_with = "some_bytes")]
    pub buffer: Option<u64>,
    /// Instead: what each port has for itself, which drops what it cannot hold.
    #[serde(deserialize_with = "some_bytes")]
    pub port_buffer: Option<u64>,
    /// Whether they pause senders instead of dropping packets.
    pub pfc: bool,
    /// What they mark.
    pub ecn: Ecn,
    /// How often a collector reads the watermarks of their buffers and tells the hosts, if one
    /// does.
    #[serde(deserialize_with = "some_span")]
    pub watermarks: Option<Duration>,
    /// How much later it does; half of that if absent.
    #[serde(deserialize_with = "some_span")]
    pub watermarks_delay: Option<Duration>,
    /// Traffic classes.
    pub classes: u8,
    /// How they choose among paths.
    pub routing: Routing,
    /// Whether they find other ways when links or switches fail; if absent, unless their tables are
    /// those of an engine.
    pub rerouting: Option<bool>,
    /// From the moment at which something fails until routes are computed anew.
    #[serde(deserialize_with = "span")]
    pub detection: Duration,
    /// Longest time until each uses them.
    #[serde(deserialize_with = "span")]
    pub convergence: Duration,
    /// How long a packet may be held back until a watchdog drops what waits, if there is one; and
    /// how long no pause may have come until pauses are obeyed again.
    #[serde(deserialize_with = "some_span")]
    pub watchdog: Option<Duration>,
}

impl Default for Switches {
    fn default() -> Switches {
        Switches {
            buffer: None,
            port_buffer: None,
            pfc: true,
            ecn: Ecn::Dcqcn,
            watermarks: None,
            watermarks_delay: None,
            classes: 2,
            routing: Routing::Ecmp,
            rerouting: None,
            detection: Duration::from_millis(1),
            convergence: Duration::from_micros(500),
            watchdog: None,
        }
    }
}

/// When switches mark packets.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Ecn {
    /// Never.
    None,
    /// From 100 to 400 kB at 25 Gbit/s, with up to 20 %.
    Dcqcn,
    /// From 30 kB on at 10 Gbit/s, always.
    Dctcp,
}

/// How switches choose among paths.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// Always the first shortest one.
    First,
    /// By a hash of the flow.
    Ecmp,
    /// Every packet at random.
    Spray,
    /// The tables of the subnet manager's engine of this name.
    Balanced,
}

/// What hosts do.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Transport {
    /// Name of the congestion control.
    #[serde(deserialize_with = "control")]
    pub control: String,
    /// What is around transport headers.
    pub frames: Frames,
    /// How flows use hosts with several ports.
    pub rails: HostRails,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Loss recovery.
    pub recovery: Recovery,
    /// Most unacknowledged packets of a flow.
    pub window: u32,
    /// How long an acknowledgement may take; a queue pair rounds it up to 4.096 us times a power of
    /// two.
    #[serde(deserialize_with = "span")]
    pub timeout: Duration,
    /// Retries before a connection fails.
    pub retries: u8,
}

impl Default for Transport {
    fn default() -> Transport {
        Transport {
            control: "dcqcn-mlnx".to_owned(),
            frames: Frames::Ipv4,
            rails: HostRails::Hash,
            mtu: 1_024,
            recovery: Recovery::Selective,
            window: 4_096,
            // 67 ms: queues of a lossless network take long, and its packets are not lost.
            timeout: Duration::from_nanos(4_096 << 14),
            retries: 7,
        }
    }
}

/// What is around transport headers.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Frames {
    /// RoCEv2 over IPv4.
    Ipv4,
    /// RoCEv2 over IPv6.
    Ipv6,
    /// A global route header.
    RoceV1,
}

/// How flows use hosts with several ports.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum HostRails {
    /// Each takes one, by a hash.
    Hash,
    /// Each is cut into parts, one for each.
    All,
}

/// Loss recovery.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Recovery {
    /// From the lost packet on.
    GoBackN,
    /// Only lost packets.
    Selective,
}

/// Who sends what to whom.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Workload {
    /// Many hosts to one.
    Incast {
        /// How many.
        senders: u32,
        /// Bytes of each.
        #[serde(deserialize_with = "bytes")]
        bytes: u64,
    },
    /// Every host to another one.
    Permutation {
        /// Bytes of each.
        #[serde(deserialize_with = "bytes")]
        bytes: u64,
    },
    /// Every host to every other one.
    AllToAll {
        /// Bytes of each.
        #[serde(deserialize_with = "bytes")]
        bytes: u64,
    },
    /// A ring.
    RingAllreduce {
        /// How many hosts; all if absent.
        hosts: Option<u32>,
        /// Bytes to reduce on each.
        #[serde(deserialize_with = "bytes")]
        bytes: u64,
    },
    /// A binary tree.
    TreeAllreduce {
        /// How many hosts; all if absent.
        hosts: Option<u32>,
        /// Bytes to reduce on each.
        #[serde(deserialize_with = "bytes")]
        bytes: u64,
        /// In so many pieces.
        #[serde(default = "eight")]
        pieces: u32,
    },
    /// Flows at random.
    Poisson {
        /// How large they are.
        #[serde(deserialize_with = "sizes")]
        sizes: FlowSizes,
        /// Share of the rate of a host's link that its payload takes.
        #[serde(deserialize_with = "fraction")]
        load: u32,
        /// How long flows start.
        #[serde(deserialize_with = "span")]
        span: Duration,
    },
    /// A file of flows, relative to the scenario.
    Trace {
        /// Its name.
        file: PathBuf,
    },
}

/// Something that fails.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What happens.
    pub kind: FaultKind,
    /// Where: a link, like `leaf0 -> spine1`, or `random`.
    pub link: Option<String>,
    /// A switch, or `random`.
    pub switch: Option<String>,
    /// A port, like `leaf0:3`, or `random`.
    pub port: Option<String>,
    /// When it begins.
    #[serde(deserialize_with = "span")]
    pub at: Duration,
    /// How long it lasts; to the end of the run, if neither is given.
    #[serde(default, rename = "for", deserialize_with = "some_span")]
    pub lasts: Option<Duration>,
    /// Or when it ends.
    #[serde(default, deserialize_with = "some_span")]
    pub until: Option<Duration>,
    /// From one beginning to the next, where it is repeated.
    #[serde(default, deserialize_with = "some_span")]
    pub every: Option<Duration>,
    /// How often it happens; once if absent.
    pub times: Option<u32>,
    /// At how many random places.
    #[serde(default = "one")]
    pub count: u32,
    /// Bit errors per bit.
    pub rate: Option<f64>,
    /// What the rate of a link is divided by.
    pub by: Option<u32>,
}

/// What fails.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum FaultKind {
    /// A link carries nothing.
    LinkDown,
    /// The link at a port carries nothing.
    PortDown,
    /// A switch loses all that it holds, and its links.
    SwitchDown,
    /// A link has a fraction of its rate.
    SlowLink,
    /// Bits flip on a link.
    BitErrors,
}

impl FaultKind {
    /// The key that says where it strikes.
    pub const fn place(self) -> &'static str {
        match self {
            FaultKind::SwitchDown => "switch",
            FaultKind::PortDown => "port",
            FaultKind::LinkDown | FaultKind::SlowLink | FaultKind::BitErrors => "link",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultKind::LinkDown => "link-down",
            FaultKind::PortDown => "port-down",
            FaultKind::SwitchDown => "switch-down",
            FaultKind::SlowLink => "slow-link",
            FaultKind::BitErrors => "bit-errors",
        })
    }
}

/// When the run ends, and its seed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Run {
    /// Of all that is drawn.
    pub seed: u64,
    /// Simulated time after which flows that have not arrived are reported as unfinished.
    #[serde(deserialize_with = "span")]
    pub deadline: Duration,
}

impl Default for Run {
    fn default() -> Run {
        Run { seed: 1, deadline: Duration::from_millis(1_000) }
    }
}

const fn hundred_gbit() -> u64 {
    100_000_000_000
}

const fn one_microsecond() -> Duration {
    Duration::from_micros(1)
}

const fn eight() -> u32 {
    8
}

const fn one() -> u32 {
    1
}

/// A quantity: a text with its unit.
fn read<'de, D, T, E>(from: D, parse: impl Fn(&str) -> Result<T, E>) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    E: fmt::Display,
{
    let text = match toml::Value::deserialize(from)? {
        toml::Value::String(text) => text,
        // Sizes and shares need no unit.
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        other => {
            let what = other.type_str();
            return Err(de::Error::custom(format!("a text with a unit is expected, not {what}")));
        }
    };
    parse(&text).map_err(de::Error::custom)
}

fn rate<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    read(from, units::rate_bps)
}

fn some_rate<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    rate(from).map(Some)
}

fn span<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    read(from, units::duration)
}

fn some_span<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    span(from).map(Some)
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    read(from, units::size_bytes)
}

fn some_bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    bytes(from).map(Some)
}

fn fraction<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    read(from, units::fraction_ppm)
}

fn sizes<'de, D: Deserializer<'de>>(from: D) -> Result<FlowSizes, D::Error> {
    let sizes = |text: &str| match FlowSizes::named(text) {
        Some(sizes) => Ok(sizes),
        None => units::size_bytes(text).map(FlowSizes::Fixed).map_err(|_| {
            format!("'{text}' is neither a size like 64KiB nor {}", FlowSizes::NAMES.join(", "))
        }),
    };
    read(from, sizes)
}

fn control<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    read(from, |text| match CongestionControl::NAMES.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "there is no congestion control '{text}'; there are {}",
            CongestionControl::NAMES.join(", ")
        )),
    })
}
