//! One end of a queue pair, as peers exchange it.
//!
//! A description comes from another process, so everything in it is checked or harmless: a path MTU
//! is the least of both sides', loss recovery is what both have, and IP addresses are compared by
//! those who know where the peer must be.

use core::net::SocketAddr;

use roce::endpoint::{Mtu, Reliability};
use roce::verbs::Qpn;
use roce::wire::Psn;

/// Queue pair numbers and PSNs have 24 bits.
const MASK: u32 = 0x00ff_ffff;

/// One end of a queue pair, as peers exchange it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAddress {
    /// IP address and UDP port of the endpoint.
    pub address: SocketAddr,
    /// The queue pair.
    pub qpn: Qpn,
    /// First packet sequence number it sends.
    pub psn: Psn,
    /// The best loss recovery that it supports.
    pub reliability: Reliability,
    /// Largest path MTU that it can have, in payload bytes.
    pub mtu: u32,
}

impl QpAddress {
    /// A description from another process: numbers are taken modulo 2^24.
    pub fn received(
        address: SocketAddr,
        (qpn, psn): (u32, u32),
        reliability: Reliability,
        mtu: u32,
    ) -> QpAddress {
        let (qpn, psn) = (Qpn::new(qpn & MASK), Psn::new(psn & MASK));
        QpAddress { address, qpn, psn, reliability, mtu }
    }

    /// The loss recovery of a connection between these ends: selective repeat where both have it.
    pub fn agreed(&self, peer: &QpAddress) -> Reliability {
        match (self.reliability, peer.reliability) {
            (Reliability::Selective, Reliability::Selective) => Reliability::Selective,
            _ => Reliability::GoBackN,
        }
    }
}

/// Largest path MTU whose packets fit both limits, in payload bytes.
pub fn path_mtu(ours: u32, theirs: u32) -> Option<Mtu> {
    let limit = ours.min(theirs);
    Mtu::ALL.into_iter().rev().find(|mtu| mtu.bytes() <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_mtu_fits_both_sides_and_none_is_below_256() {
        assert_eq!(path_mtu(5000, 4096), Some(Mtu::M4096));
        assert_eq!(path_mtu(1500, 4096), Some(Mtu::M1024));
        assert_eq!(path_mtu(256, 9000), Some(Mtu::M256));
        assert_eq!(path_mtu(255, 4096), None);
    }

    #[test]
    fn ends_agree_on_what_both_have() {
        let at = SocketAddr::from(([127, 0, 0, 1], 4791));
        let end = |reliability| QpAddress {
            address: at,
            qpn: Qpn::new(1),
            psn: Psn::new(1),
            reliability,
            mtu: 1024,
        };
        let (best, plain) = (end(Reliability::Selective), end(Reliability::GoBackN));
        assert_eq!(best.agreed(&best), Reliability::Selective);
        for (a, b) in [(best, plain), (plain, best), (plain, plain)] {
            assert_eq!(a.agreed(&b), Reliability::GoBackN);
        }
    }
}
