//! One test: what is sent, how, and what a server allows.

use std::fmt;
use std::str::FromStr;

use comm::mesh::ROUTE_HEADER;
use roce::Duration;
use roce::verbs::Transport;
use serde::{Deserialize, Serialize};

/// What the client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// SEND into receives that the server posts.
    Send,
    /// WRITE into the server's memory.
    Write,
    /// READ from the server's memory.
    Read,
    /// Fetch-and-add on a word of the server.
    Atomic,
}

impl Operation {
    /// All of them, in the order in which a run without one takes them.
    pub const ALL: [Operation; 4] =
        [Operation::Send, Operation::Write, Operation::Read, Operation::Atomic];

    /// As it is typed and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::Send => "send",
            Operation::Write => "write",
            Operation::Read => "read",
            Operation::Atomic => "atomic",
        }
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(text: &str) -> Result<Operation, String> {
        let found = Operation::ALL.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| "there are send, write, read, atomic".to_owned())
    }
}

/// The transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagrams.
    Ud,
}

impl Service {
    /// As it is typed and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Service::Rc => "rc",
            Service::Uc => "uc",
            Service::Ud => "ud",
        }
    }

    /// The same for the verbs.
    pub const fn transport(self) -> Transport {
        match self {
            Service::Rc => Transport::Rc,
            Service::Uc => Transport::Uc,
            Service::Ud => Transport::Ud,
        }
    }
}

impl FromStr for Service {
    type Err = String;

    fn from_str(text: &str) -> Result<Service, String> {
        let found =
            [Service::Rc, Service::Uc, Service::Ud].into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| "there are rc, uc, ud".to_owned())
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One message at a time.
    Latency,
    /// As many as fit.
    Bandwidth,
}

impl Mode {
    /// As it is typed and shown.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Latency => "latency",
            Mode::Bandwidth => "bandwidth",
        }
    }
}

/// One test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// What the client does.
    pub operation: Operation,
    /// Transport service.
    pub service: Service,
    /// What is measured.
    pub mode: Mode,
    /// Bytes of a message.
    pub bytes: u32,
    /// Queue pairs.
    pub qps: u32,
    /// Messages in flight on each of them.
    pub depth: u32,
    /// Largest path MTU in payload bytes.
    pub mtu: u32,
    /// Whether loss recovery is the standard one even where both sides know a better one.
    pub go_back_n: bool,
    /// Whether packets take sockets even between two processes of one machine.
    pub by_sockets: bool,
    /// Whether packets take an AF_XDP socket on each side that can. Implies `by_sockets`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_xdp: bool,
    /// Whether packets are those of RoCEv1, on both sides. Implies `by_sockets`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_roce_v1: bool,
    /// The most that each queue pair of either side sends in bits per second, 0 for no limit.
    /// Implies `by_sockets`.
    #[serde(default, skip_serializing_if = "is_unlimited")]
    pub rate_limit_bps: u64,
    /// Whether both sides poll without sleeping.
    pub spin: bool,
    /// Length of the measured part in milliseconds. A server ends a test that takes much longer.
    pub millis: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_unlimited(rate_limit_bps: &u64) -> bool {
    *rate_limit_bps == 0
}

/// Longest message.
pub const MAX_BYTES: u32 = 64 << 20;

/// Most queue pairs of a test.
pub const MAX_QPS: u32 = 1024;

/// Most messages in flight on one of them.
pub const MAX_DEPTH: u32 = 1024;

/// Longest measured part: an hour.
pub const MAX_MILLIS: u32 = 3_600_000;

/// Registered memory that depth may use: beyond it, buffers are fewer than the depth asks for.
const DEPTH_MEMORY: u64 = 256 << 20;

/// Most registered memory of one side.
pub const MAX_MEMORY: u64 = 1 << 30;

/// How often a side that sleeps looks at memory which no event announces.
pub(super) const LOOK_AT_MEMORY: Duration = Duration::from_micros(50);

impl Test {
    /// Whether a side waits for bytes of which its device tells it nothing: the target of a WRITE
    /// gets no completion, and where a library moves the packets, or there are none, no socket
    /// becomes readable either.
    pub(super) fn is_silent(&self, is_loaded: bool) -> bool {
        (is_loaded || !self.needs_sockets())
            && self.operation == Operation::Write
            && self.has_pong()
    }

    fn needs_sockets(&self) -> bool {
        self.by_sockets || self.by_xdp || self.by_roce_v1 || self.rate_limit_bps > 0
    }

    /// Whether messages may take the same-host path.
    pub(super) fn may_be_direct(&self) -> bool {
        !self.needs_sockets() && self.service != Service::Ud
    }

    /// Why the same-host path is not to be used, if it is not.
    pub(super) fn refused(&self) -> Option<String> {
        self.needs_sockets().then(|| "the client wants packets".to_owned())
    }

    /// What is wrong with it, and what to try.
    pub fn complaint(&self) -> Option<(String, &'static str)> {
        let Test { operation, service, bytes, qps, depth, mtu, mode, .. } = *self;
        let within = |what: &str, value: u32, most: u32| {
            let is_wrong = !(1..=most).contains(&value);
            is_wrong
                .then(|| (format!("{what} is {value}; it may be 1 to {most}"), "choose another"))
        };
        let possible = match (service, operation) {
            (Service::Rc, _) | (_, Operation::Send) | (Service::Uc, Operation::Write) => true,
            (Service::Uc | Service::Ud, _) => false,
        };
        if !possible {
            let why = format!("{} has no {}", service.name().to_uppercase(), operation.name());
            return Some((why, "rc has every operation, uc send and write, ud send"));
        }
        if operation == Operation::Atomic && bytes != 8 {
            return Some((format!("an atomic has 8 bytes, not {bytes}"), "leave --size out"));
        }
        if service == Service::Ud && bytes > mtu {
            let why = format!("a datagram has one packet: at most {mtu} bytes, not {bytes}");
            return Some((why, "choose a smaller --size, or rc"));
        }
        if mode == Mode::Latency && qps != 1 {
            return Some(("latency is measured on one queue pair".to_owned(), "leave --qps out"));
        }
        if self.by_xdp && self.by_roce_v1 {
            return Some(("packets take one wire, AF_XDP or RoCEv1".to_owned(), "choose one"));
        }
        if self.memory() > MAX_MEMORY {
            let why = format!(
                "{qps} queue pairs with messages of {bytes} bytes need more than 1 GiB on each side"
            );
            return Some((why, "fewer queue pairs, or smaller messages"));
        }
        within("the size", bytes, MAX_BYTES)
            .or(within("the number of queue pairs", qps, MAX_QPS))
            .or(within("the depth", depth, MAX_DEPTH))
            .or(within("the time in milliseconds", self.millis, MAX_MILLIS))
    }

    /// Bytes from one buffer to the next.
    pub fn stride(&self) -> u64 {
        u64::from(self.bytes + ROUTE_HEADER).next_multiple_of(64)
    }

    /// Buffers of each direction of a queue pair. Messages in flight never share one.
    pub fn slots(&self) -> u32 {
        let wanted = if self.mode == Mode::Latency { 1 } else { self.depth };
        let all = 2 * u64::from(self.qps.max(1)) * self.stride();
        let affordable = u32::try_from(DEPTH_MEMORY / all).unwrap_or(u32::MAX);
        wanted.min(affordable).max(1)
    }

    /// Registered memory of one side in bytes.
    pub fn memory(&self) -> u64 {
        2 * u64::from(self.qps) * u64::from(self.slots()) * self.stride()
    }

    /// Whether the server answers a message with one of its own, so that half a round trip is one
    /// way.
    pub fn has_pong(&self) -> bool {
        self.mode == Mode::Latency && matches!(self.operation, Operation::Send | Operation::Write)
    }

    /// Whether the server's receives are used.
    pub fn has_receives(&self) -> bool {
        self.operation == Operation::Send || self.has_immediate()
    }

    /// WRITEs without acknowledgements carry a number, so that the server can count what arrived.
    pub fn has_immediate(&self) -> bool {
        self.operation == Operation::Write
            && self.service == Service::Uc
            && self.mode == Mode::Bandwidth
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Test { operation, service, mode, bytes, qps, .. } = self;
        let (operation, service, mode) = (operation.name(), service.name(), mode.name());
        let plural = if *qps == 1 { "" } else { "s" };
        write!(f, "{operation} {mode}, {service}, {bytes} bytes, {qps} queue pair{plural}")
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn sample() -> Test {
        Test {
            operation: Operation::Write,
            service: Service::Rc,
            mode: Mode::Bandwidth,
            bytes: 4096,
            qps: 2,
            depth: 8,
            mtu: 1024,
            go_back_n: false,
            by_sockets: false,
            by_xdp: false,
            by_roce_v1: false,
            rate_limit_bps: 0,
            spin: false,
            millis: 100,
        }
    }

    #[test]
    fn what_a_service_lacks_and_what_is_too_much_is_refused() {
        assert_eq!(sample().complaint(), None);
        let wrong = [
            Test { operation: Operation::Read, service: Service::Uc, ..sample() },
            Test { service: Service::Ud, ..sample() },
            Test { operation: Operation::Send, service: Service::Ud, bytes: 2048, ..sample() },
            Test { operation: Operation::Atomic, ..sample() },
            Test { bytes: 0, ..sample() },
            Test { bytes: MAX_BYTES + 1, ..sample() },
            Test { qps: 0, ..sample() },
            Test { qps: MAX_QPS + 1, bytes: 8, ..sample() },
            Test { depth: 0, ..sample() },
            Test { qps: 64, bytes: MAX_BYTES, ..sample() },
            Test { mode: Mode::Latency, ..sample() },
            Test { by_xdp: true, by_roce_v1: true, ..sample() },
        ];
        for test in wrong {
            assert!(test.complaint().is_some(), "{test:?}");
        }
    }

    #[test]
    fn memory_is_bounded_by_fewer_buffers() {
        let large = Test { bytes: MAX_BYTES, qps: 1, depth: 1024, ..sample() };
        assert_eq!(large.slots(), 1);
        assert!(large.memory() <= MAX_MEMORY);
        assert_eq!(sample().slots(), 8);
    }
}
