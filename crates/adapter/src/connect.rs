//! Connecting queue pairs of RC and UC: describe one end, exchange the descriptions, connect.
//!
//! How descriptions ([`QpAddress`]) travel is left to the users: over gRPC, over a TCP connection,
//! through the bootstrap of a job's ranks.

use std::net::{IpAddr, SocketAddr};

pub use comm::address::{QpAddress, path_mtu};
use roce::Time;
use roce::device::{self, Device};
use roce::endpoint::{Connect, Mtu, QpConfig, Reliability};
use roce::verbs::{Path, VerbsError};
use roce::wire::Psn;

use crate::congestion::{Choice, window_packets};
use crate::owned::Adapter;
use crate::software::LocalPeer;

/// Largest path MTU of RoCE, in payload bytes: offered where the route to the peer is unknown.
pub const LARGEST_MTU: u32 = 4096;

/// Retries without end when the peer has no receive posted.
pub const RNR_RETRY_FOREVER: u8 = 7;

/// What a side decides for its connections.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The congestion control.
    pub congestion: Choice,
    /// Whether the peer is known to be this project's endpoint. Otherwise it is one if it repeats
    /// selectively, which no other does.
    pub is_ours: bool,
    /// Local ACK timeout code: 4.096 us * 2^timeout.
    pub timeout: u8,
    /// Retries when the peer has no receive posted.
    pub rnr_retry: u8,
    /// Unacknowledged packets where congestion control needs no more.
    pub window_packets: u32,
    /// The most that a connection may send in bits per second, 0 for no limit.
    pub rate_limit_bps: u64,
    /// DiffServ codepoint of its packets.
    pub dscp: u8,
}

/// A new queue pair in INIT, where receives can be posted before the peer is known, and its
/// description.
///
/// # Errors
/// Those of [`Device::create_qp`] and [`Device::modify_qp`]; nothing is left then.
pub fn create<A: Adapter>(
    adapter: &mut A,
    now: Time,
    config: QpConfig,
    psn: Psn,
    mtu: u32,
) -> Result<QpAddress, VerbsError> {
    let qpn = adapter.device().create_qp(config)?;
    if let Err(error) = device::initialize(adapter.device(), now, qpn) {
        let gone = adapter.device().destroy_qp(now, qpn);
        debug_assert!(gone.is_ok(), "{gone:?}");
        return Err(error);
    }
    let (address, reliability) = (adapter.local(), adapter.reliability());
    Ok(QpAddress { address, qpn, psn, reliability, mtu: adapter.largest_mtu().min(mtu) })
}

/// Connects our end of a queue pair with this path MTU. Its WRITEs and READs go to a local peer
/// through shared memory, if the other end is one.
///
/// # Errors
/// Those of [`Device::modify_qp`].
pub fn connect<A: Adapter>(
    adapter: &mut A,
    now: Time,
    terms: &Terms,
    (ours, peer): (&QpAddress, &QpAddress),
    mtu: Mtu,
    local: LocalPeer,
) -> Result<(), VerbsError> {
    let reliability = ours.agreed(peer);
    let is_ours = terms.is_ours || reliability == Reliability::Selective;
    let congestion = adapter.congestion(terms.congestion, peer.address.ip(), is_ours);
    let connect = Connect {
        mtu,
        local_psn: ours.psn,
        timeout: terms.timeout,
        rnr_retry: terms.rnr_retry,
        window_packets: window_packets(terms.window_packets, congestion, reliability, mtu),
        reliability,
        congestion: congestion.into(),
        ..Connect::new(Path { dscp: terms.dscp, ..Path::new(peer.address) }, peer.qpn, peer.psn)
    };
    device::connect(adapter.device(), now, ours.qpn, &connect)?;
    if terms.rate_limit_bps > 0 {
        device::limit_rate(adapter.device(), now, ours.qpn, terms.rate_limit_bps)?;
    }
    adapter.route(now, ours.qpn, local);
    Ok(())
}

/// Payload bytes that a packet from `local` to `remote` can carry, at most the largest path MTU.
pub fn mtu_towards(local: IpAddr, remote: SocketAddr) -> u32 {
    nic::udp::payload_limit(local, remote).map_or(LARGEST_MTU, |limit| limit.min(LARGEST_MTU))
}

/// Whether the address can be used by an endpoint: the ICRC covers it, so it must be a specific
/// one.
pub fn is_specific(address: IpAddr) -> bool {
    !address.is_unspecified() && !address.is_multicast()
}

#[cfg(test)]
mod tests {
    use roce::device::InitialPsns;
    use roce::verbs::Transport;

    use super::*;
    use crate::owned::Software;

    /// A device at an address, and what a queue pair needs there.
    fn device(host: u8) -> (Software, QpConfig) {
        let at = SocketAddr::from(([127, 7, 4, host], 0));
        let mut adapter = Software::bind(at, 1 << 16, 0, 7).expect("loopback");
        let device = adapter.device();
        let pd = device.alloc_pd().expect("one");
        let cq = device.create_cq(8).expect("one");
        (adapter, QpConfig::rc(pd, cq, 4, 4))
    }

    #[test]
    fn a_created_queue_pair_describes_itself() {
        let (mut adapter, config) = device(1);
        let psn = InitialPsns::new(7).draw();
        let end = create(&mut adapter, Time::ZERO, config, psn, 1024).expect("room");
        assert_eq!((end.address, end.psn, end.mtu), (adapter.local(), psn, 1024));
        assert_eq!(end.reliability, Reliability::Selective);
    }

    #[test]
    fn a_queue_pair_that_is_refused_leaves_nothing() {
        let (mut adapter, config) = device(2);
        let (pd, cq) = (config.pd, config.send_cq);
        let psn = InitialPsns::new(7).draw();
        // Only connections are initialized here, so the device refuses one for datagrams.
        let datagrams = QpConfig { transport: Transport::Ud, ..config };
        let end = create(&mut adapter, Time::ZERO, datagrams, psn, 1024);
        assert!(end.is_err(), "{end:?}");
        let device = adapter.device();
        assert_eq!((device.destroy_cq(cq), device.dealloc_pd(pd)), (Ok(()), Ok(())), "unused");
    }
}
