//! How long a flow takes in an empty network: the time that completion times are compared with.
//!
//! Packets follow each other at the rate of the slowest link so far, and every link has received a
//! packet completely before the next one sends it (store and forward).

use roce::Duration;
use roce::endpoint::Mtu;

use crate::link::LinkConfig;
use crate::packet::ETHERNET_BYTES;

/// BTH and ICRC.
const PACKET_BYTES: u64 = 12 + 4;

/// The extended transport header of a WRITE's first packet, and the immediate data of its last one.
const RETH_BYTES: u64 = 16;
const IMMEDIATE_BYTES: u64 = 4;

/// From the start of a WRITE of `bytes` until its last byte has arrived, over these links; in
/// packets with so many bytes between Ethernet's header and BTH: 28 of IPv4 and UDP.
pub fn completion_time(path: &[LinkConfig], bytes: u64, mtu: Mtu, network_bytes: u32) -> Duration {
    let mtu = u64::from(mtu.bytes());
    let around = PACKET_BYTES + u64::from(network_bytes + ETHERNET_BYTES);
    let packets = bytes.div_ceil(mtu).max(1);
    let last_payload = bytes - (packets - 1) * mtu;
    let only = if packets == 1 { RETH_BYTES } else { 0 };
    let last_bytes = last_payload + around + IMMEDIATE_BYTES + only;
    let full_bytes = mtu + around;
    // When a link has sent the packets before the last one, and when the last one has arrived
    // behind it.
    let (mut ahead, mut last) = (Duration::ZERO, Duration::ZERO);
    let (mut first, mut slowest) = (Duration::ZERO, Duration::ZERO);
    for link in path {
        if packets > 1 {
            // The header of the first packet delays all behind it.
            let full = link.serialization(full_bytes);
            first = first + link.serialization(full_bytes + RETH_BYTES);
            slowest = slowest.max(full);
            ahead = first + slowest * (packets - 2);
            first = first + link.delay;
        }
        last = last.max(ahead) + link.serialization(last_bytes) + link.delay;
        ahead = ahead + link.delay;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    const GBIT: u64 = 1_000_000_000;

    #[test]
    fn one_packet_is_stored_at_every_hop() {
        // 8 Gbit/s is a byte per nanosecond: 102 bytes around 100, twice, and two delays.
        let link = LinkConfig::new(8 * GBIT, Duration::from_nanos(1_000));
        let time = completion_time(&[link, link], 100, Mtu::M1024, 28);
        assert_eq!(time.as_nanos(), 2 * (100 + 82 + 20 + 1_000));
    }

    #[test]
    fn many_packets_follow_at_the_slowest_rate() {
        let fast = LinkConfig::new(80 * GBIT, Duration::ZERO);
        let slow = LinkConfig::new(8 * GBIT, Duration::ZERO);
        // All bytes at a byte per nanosecond, and 112 and 111 ns for a full packet on the fast
        // links around it.
        let time = completion_time(&[fast, slow, fast], 1_000 * 1_024, Mtu::M1024, 28).as_nanos();
        let all = 1_000 * (1_024 + 82) + 16 + 4;
        assert!(time.abs_diff(all + 112 + 111) <= 2, "{time} {all}");
    }
}
