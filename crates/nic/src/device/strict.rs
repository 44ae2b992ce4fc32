//! The strict ICRC check over IPv4: packets to the shared port come from a packet socket, which
//! shows the identification that a UDP socket hides, so all 32 bits are checked for every sender.
//!
//! The UDP socket stays open: it holds the port, keeps the kernel from sending ICMP port
//! unreachable, and receives packets for other processes, which are forwarded as usual. Packets for
//! this process that it receives, or that other processes forward, are ignored in favour of the
//! packet socket.
//!
//! The check costs a second copy of every packet, and joined packets are split here. A packet
//! socket also sees packets before the firewall, so rules that drop RoCE packets do not apply to
//! this process. It is therefore optional and needs CAP_NET_RAW; without that the shared port is
//! checked as usual, and the wire reports so.

use std::io;
use std::net::{IpAddr, SocketAddr};

use roce::wire::ROCE_PORT;
use roce::wire::frame::{FrameError, Ip, Network, Packet};
use roce::world::RxFrame;

use super::{DeviceConfig, forward};
use crate::capture::{Capture, Seen};
use crate::packet::PacketTap;
use crate::udp::receive::origin;
use crate::udp::{IcrcCheck, RxCounters};

/// Opens the packet socket if the check needs one: `None` without a reason when it does not.
pub(super) fn open(config: &DeviceConfig) -> (Option<PacketTap>, Option<String>) {
    let wanted = config.check == IcrcCheck::Strict && config.addresses.iter().any(IpAddr::is_ipv4);
    if !wanted {
        return (None, None);
    }
    if config.port != ROCE_PORT {
        return (None, Some(format!("packet sockets listen for port {ROCE_PORT} only")));
    }
    let interface = (config.ifindex != 0).then_some(config.ifindex);
    match PacketTap::incoming(interface) {
        Ok(tap) => (Some(tap), None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            (None, Some(String::from("no packet socket without CAP_NET_RAW")))
        }
        Err(error) => (None, Some(format!("no packet socket: {error}"))),
    }
}

/// The packet socket being emptied.
pub(super) struct Inspection<'a> {
    pub(super) config: &'a DeviceConfig,
    pub(super) slot: u8,
    pub(super) capture: &'a mut Option<Capture>,
    pub(super) sink: &'a mut dyn FnMut(&RxFrame<'_>),
}

impl Inspection<'_> {
    /// Delivers an IP packet if it is for this process.
    pub(super) fn take(&mut self, bytes: &[u8], counters: &mut RxCounters) {
        let packet = match Packet::parse(bytes) {
            Ok((packet, _)) => packet,
            Err(error) => {
                count_unparsable(error, bytes, counters);
                return;
            }
        };
        let Some((seen, via)) = self.arrival(&packet) else {
            return;
        };
        counters.packets += 1;
        counters.bytes += packet.udp_payload_len() as u64;
        if !packet.icrc_is_right() {
            counters.bad_icrc += 1;
            return;
        }
        if let Some(capture) = self.capture {
            let body = bytes.get(28..28 + packet.udp_payload_len()).unwrap_or_default();
            capture.record(&seen, [body]);
        }
        counters.accepted += 1;
        let origin = origin(seen.from, seen.to.ip(), via, seen.tos, seen.hop_limit);
        (self.sink)(&RxFrame {
            origin,
            headers: packet.headers,
            payload: packet.payload,
            telemetry: None,
        });
    }

    /// The sender of a packet and the IPv4 address of ours that it is for, if it is for a queue
    /// pair of this process.
    fn arrival(&self, packet: &Packet<'_>) -> Option<(Seen, u8)> {
        let Network::Udp(Ip::V4(ip), udp) = packet.network else {
            return None;
        };
        let via = self.config.addresses.iter().position(|own| *own == IpAddr::V4(ip.dst))?;
        let ours =
            udp.dst_port == self.config.port && forward::slot_of(&packet.headers) == self.slot;
        let seen = Seen {
            from: SocketAddr::new(ip.src.into(), udp.src_port),
            to: SocketAddr::new(ip.dst.into(), udp.dst_port),
            tos: ip.tos,
            hop_limit: ip.ttl,
            id: ip.id,
        };
        ours.then_some((seen, u8::try_from(via).ok()?))
    }
}

/// Counts RoCE packets that are damaged; other traffic is ignored.
fn count_unparsable(error: FrameError, bytes: &[u8], counters: &mut RxCounters) {
    if let FrameError::Wire(error) = error {
        counters.packets += 1;
        counters.bytes += bytes.len().saturating_sub(28) as u64;
        counters.unparsable.count(error);
    }
}
