//! Settings from the environment. All are optional; `docs/verbs.md` has the table.

use std::io::ErrorKind;

use adapter::congestion::Choice;
use nic::capture::Capture;
use roce::endpoint::Reliability;

use super::errors::say;

/// Which interfaces become devices, in this order; all that are up when unset.
pub(crate) const DEVICES: &str = "DQUANT_DEVICES";
/// Most unacknowledged request packets of a queue pair.
pub(crate) const WINDOW: &str = "DQUANT_WINDOW";
/// `go-back-n` or `selective`.
pub(crate) const RELIABILITY: &str = "DQUANT_RELIABILITY";
/// `auto`, `off`, `delay`, or a variant of DCQCN with the link's rate in Gbit/s after a colon.
pub(crate) const CONGESTION: &str = "DQUANT_CONGESTION";
/// `auto` or `udp`: whether processes of this machine may reach each other without sockets.
pub(crate) const PATH: &str = "DQUANT_PATH";
/// `private` or `shared`: whether registered memory moves to where processes of this machine can
/// map it.
pub(crate) const MEMORY: &str = "DQUANT_MEMORY";
/// DSCP of every queue pair and address handle, whatever the program asks for.
pub(crate) const DSCP: &str = "DQUANT_DSCP";
/// File for every packet in and out; `%d` stands for the device, `%p` for the process.
pub(crate) const CAPTURE: &str = "DQUANT_CAPTURE";
/// Directory with the view of `/sys/class/infiniband`.
pub(crate) const SYSFS: &str = "DQUANT_SYSFS";

/// A DSCP has six bits.
const MAX_DSCP: u8 = 63;

/// Default window: the longest burst that the peer's socket buffer holds with ease.
const DEFAULT_WINDOW_PACKETS: u32 = 512;

/// Defaults for queue pairs of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) window_packets: u32,
    pub(crate) reliability: Reliability,
    pub(crate) congestion: Choice,
    pub(crate) path: PathChoice,
    /// Registered memory moves to where local peers can map it.
    pub(crate) shares_memory: bool,
    /// DSCP of every path; the program chooses where there is none.
    pub(crate) dscp: Option<u8>,
}

/// How requests to processes of this machine go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathChoice {
    /// Without packets or through shared memory, where possible.
    Auto,
    /// As packets through sockets.
    Udp,
}

impl Settings {
    /// The settings in the environment. Values that do not parse are reported on stderr and
    /// ignored.
    pub(crate) fn from_env() -> Settings {
        Settings {
            window_packets: window(),
            reliability: reliability(),
            congestion: congestion(),
            path: path(),
            shares_memory: shares_memory(),
            dscp: dscp(),
        }
    }
}

/// The requested interfaces.
pub(crate) fn devices() -> Option<Vec<String>> {
    // A list that is not UTF-8 names no interface, and must not open all of them.
    let list = text_of(DEVICES)?;
    Some(
        list.split(',')
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect(),
    )
}

fn window() -> u32 {
    let Some(text) = text_of(WINDOW) else {
        return DEFAULT_WINDOW_PACKETS;
    };
    text.parse().ok().filter(|&packets| packets > 0).unwrap_or_else(|| {
        complain(WINDOW, &text);
        DEFAULT_WINDOW_PACKETS
    })
}

fn reliability() -> Reliability {
    match text_of(RELIABILITY).as_deref() {
        Some("selective") => Reliability::Selective,
        Some("go-back-n") | None => Reliability::GoBackN,
        Some(other) => {
            complain(RELIABILITY, other);
            Reliability::GoBackN
        }
    }
}

fn path() -> PathChoice {
    match text_of(PATH).as_deref() {
        Some("auto") | None => PathChoice::Auto,
        Some("udp") => PathChoice::Udp,
        Some(other) => {
            complain(PATH, other);
            PathChoice::Auto
        }
    }
}

/// Whether the program asks for registered memory that local peers can map.
pub(crate) fn shares_memory() -> bool {
    match text_of(MEMORY).as_deref() {
        Some("shared") => true,
        Some("private") | None => false,
        Some(other) => {
            complain(MEMORY, other);
            false
        }
    }
}

fn dscp() -> Option<u8> {
    let text = text_of(DSCP)?;
    let dscp = text.parse().ok().filter(|dscp| *dscp <= MAX_DSCP);
    if dscp.is_none() {
        complain(DSCP, &text);
    }
    dscp
}

fn congestion() -> Choice {
    let Some(text) = text_of(CONGESTION) else {
        return Choice::default();
    };
    text.parse().unwrap_or_else(|_| {
        complain(CONGESTION, &text);
        Choice::default()
    })
}

/// Longest capture: a forgotten setting must not fill the disk.
const CAPTURE_LIMIT_BYTES: u64 = 1 << 30;

/// The capture requested by the environment. One that cannot be written is reported and left out.
pub(crate) fn capture(device: &str) -> Option<Capture> {
    let pattern = std::env::var_os(CAPTURE)?;
    let Some(pattern) = pattern.to_str() else {
        complain(CAPTURE, &pattern.to_string_lossy());
        return None;
    };
    let path = pattern.replace("%d", device).replace("%p", &std::process::id().to_string());
    let complain = |error: std::io::Error| {
        let hint = match error.kind() {
            ErrorKind::ResourceBusy => Some("with %p and %d in its name each has its own"),
            _ => None,
        };
        say(format_args!("no capture to {path}: {error}"), hint);
    };
    Capture::create(path.as_ref(), CAPTURE_LIMIT_BYTES).map_err(complain).ok()
}

/// The value of a variable; bytes that are not UTF-8 become replacement characters, which no
/// setting accepts.
fn text_of(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn complain(name: &str, value: &str) {
    let message = format_args!("{name}={value} is invalid and ignored");
    say(message, Some("docs/verbs.md has the settings"));
}
