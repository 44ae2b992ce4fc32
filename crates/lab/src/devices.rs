//! The device of one side of a measurement: our own endpoint on a UDP, an AF_XDP or a packet
//! socket, or one behind a loaded libibverbs.

use std::net::{IpAddr, SocketAddr};

use adapter::connect::mtu_towards;
use adapter::owned::{self, Adapter, DeviceChoice, Loaded, OpenError, Software};
use nic::clock;
use nic::loaded::LoadError;
use nic::roce_v1::{RESOLVE_LIMIT, RoceV1Error, RoceV1Wire};
use nic::udp::UdpError;
#[cfg(feature = "xdp")]
use nic::xdp::{XdpConfig, XdpWire};
use roce::wire::ROCE_PORT;
use serde::Serialize;

use service::Error;

/// Registered memory beside what a test asks for: whole pages at its ends.
const SLACK: u64 = 1 << 16;

/// How messages travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MessagePath {
    /// In packets, through sockets.
    #[default]
    Udp,
    /// In packets, most of them through an AF_XDP socket.
    Xdp,
    /// In packets of RoCEv1, through a packet socket.
    #[serde(rename = "roce-v1")]
    RoceV1,
    /// In packets, through shared memory.
    Fifo,
    /// Without packets: one side reads and writes the other's memory.
    Direct,
    /// As a loaded library's device does it.
    Device,
}

impl MessagePath {
    /// As it is shown.
    pub const fn name(self) -> &'static str {
        match self {
            MessagePath::Udp => "udp",
            MessagePath::Xdp => "xdp",
            MessagePath::RoceV1 => "roce-v1",
            MessagePath::Fifo => "fifo",
            MessagePath::Direct => "direct",
            MessagePath::Device => "device",
        }
    }
}

/// Our own device at this address. Port 4791 belongs to the first; others get a free one. It
/// reaches a peer of this machine without packets, unless there is a reason against it.
pub(crate) fn software(
    ip: IpAddr,
    memory: u64,
    seed: u64,
    refused: Option<String>,
) -> Result<Software, Error> {
    let bind = |port| Software::bind(SocketAddr::new(ip, port), memory + SLACK, 0, seed);
    let bound = match bind(ROCE_PORT) {
        Err(OpenError::Udp(UdpError::Bind { .. })) => bind(0),
        bound => bound,
    };
    let mut device = bound.map_err(|error| Error::because("no device", &error))?;
    device.open_same_host(refused.or_else(owned::refused_by_environment));
    Ok(device)
}

/// Our own device on the AF_XDP wire of the interface that has this address.
///
/// # Errors
/// Why there is none, for people to read.
#[cfg(feature = "xdp")]
pub(crate) fn xdp(ip: IpAddr, memory: u64, seed: u64) -> Result<Software<XdpWire>, String> {
    let wire = XdpWire::open(&XdpConfig::new(ip)).map_err(|error| match error.hint() {
        Some(hint) => format!("{error} ({hint})"),
        None => error.to_string(),
    })?;
    Software::on(wire, memory + SLACK, 0, seed).map_err(|error| error.to_string())
}

/// The same in a program without that wire.
#[cfg(not(feature = "xdp"))]
pub(crate) fn xdp(_ip: IpAddr, _memory: u64, _seed: u64) -> Result<Software, String> {
    Err("AF_XDP: that needs the feature `xdp`, which this build does not have".to_owned())
}

/// Our own device on the RoCEv1 wire of the interface that has this address, once it knows the
/// Ethernet address of the peer. Nothing takes its place: both sides have to send packets of one
/// version.
///
/// # Errors
/// When there is no such interface or no right to use it, or the peer does not answer on it.
pub(crate) fn roce_v1(
    ip: IpAddr,
    peer: IpAddr,
    memory: u64,
    seed: u64,
) -> Result<Software<RoceV1Wire>, Error> {
    let refused = |error: RoceV1Error| {
        let failed = match error {
            RoceV1Error::Silent { .. } => Error::unreachable(&error),
            _ => Error::because("no RoCEv1", &error),
        };
        match error.hint() {
            Some(hint) => failed.hint(hint),
            None => failed,
        }
    };
    let mut wire = RoceV1Wire::open(ip).map_err(refused)?;
    wire.resolve(peer, RESOLVE_LIMIT).map_err(refused)?;
    Software::on(wire, memory + SLACK, 0, seed).map_err(Error::from_cause)
}

/// A device of a library.
pub(crate) fn loaded(choice: &DeviceChoice, memory: u64) -> Result<Loaded, Error> {
    Loaded::open(choice, memory + SLACK).map_err(|error| match &error {
        OpenError::Load { source: LoadError::NoDevice { .. }, .. } => {
            Error::invalid(&error).hint("name one of its devices, or another library")
        }
        OpenError::Load { .. } => {
            Error::invalid(&error).hint("name a libibverbs with --verbs-library")
        }
        OpenError::Pool(_) | OpenError::Udp(_) => Error::from_cause(error),
    })
}

/// The path MTU that this side can use towards the other, in payload bytes.
pub(crate) fn mtu<F: Adapter>(adapter: &F, peer: SocketAddr) -> u32 {
    adapter
        .largest_mtu()
        .min(mtu_towards(adapter.local().ip(), SocketAddr::new(peer.ip(), ROCE_PORT)))
}

/// How messages have travelled so far.
pub(crate) fn path<F: Adapter>(adapter: &F, is_loaded: bool) -> MessagePath {
    let (mut direct, mut fifo, mut udp, mut xdp, mut roce_v1) = (0, 0, 0, 0, 0);
    adapter.counters(&mut |name, value| match name {
        "roce.direct_writes"
        | "roce.direct_reads"
        | "roce.direct_atomics"
        | "roce.direct_sends" => direct += value,
        "neighbours.fifo_sent_packets" => fifo += value,
        "udp.tx.packets" => udp += value,
        "xdp.tx.packets" => xdp += value,
        "roce_v1.tx.packets" => roce_v1 += value,
        _ => {}
    });
    match () {
        () if is_loaded => MessagePath::Device,
        () if direct > fifo => MessagePath::Direct,
        () if fifo > 0 => MessagePath::Fifo,
        () if roce_v1 > 0 => MessagePath::RoceV1,
        () if xdp > udp => MessagePath::Xdp,
        () => MessagePath::Udp,
    }
}

/// Packets sent again so far; none where the device does not tell.
pub(crate) fn retransmitted<F: Adapter>(adapter: &F) -> Option<u64> {
    let mut total = None;
    adapter.counters(&mut |name, value| {
        if matches!(name, "roce.retransmitted_packets" | "roce.selective_retransmits") {
            *total.get_or_insert(0) += value;
        }
    });
    total
}

/// CPU time so far in nanoseconds: of this thread, which moves the packets, or of the process where
/// a library has threads of its own.
pub(crate) fn cpu_ns(is_loaded: bool) -> u64 {
    if is_loaded { clock::process_cpu().total_ns() } else { clock::thread_cpu_ns() }
}
