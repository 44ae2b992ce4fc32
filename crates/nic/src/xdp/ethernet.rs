//! Packets as Ethernet frames: written for the kernel to send, and opened as untrusted input.

use std::net::{IpAddr, SocketAddr};

use roce::wire::frame::{self, Ethernet, FrameError, Ip, Ipv4, Ipv6, Network, NotRoce, Packet};
use roce::world::{Memory, Origin, Path, TxFrame};

use super::XdpRefused;
use crate::udp::receive::origin;
use crate::udp::send::{USUAL_HOP_LIMIT, traffic_class_byte};
use crate::udp::staging::Staging;

/// Writes a packet from `local` into `frame`, with `body` as scratch space. `macs` are destination
/// and source.
pub(super) fn build(
    tx: &TxFrame<'_>,
    memory: &dyn Memory,
    local: SocketAddr,
    macs: [[u8; 6]; 2],
    body: &mut Staging,
    frame: &mut Vec<u8>,
) -> bool {
    let remote = tx.path.remote;
    let Some(ip) = ip_header(local.ip(), &tx.path) else {
        return false;
    };
    body.clear();
    body.push(local, remote, tx, memory, 0);
    let ethertype: [u8; 2] = if local.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] };
    frame.clear();
    macs.iter().for_each(|mac| frame.extend(mac));
    frame.extend(ethertype);
    frame::datagram(&ip, local.port(), remote.port(), [body.bytes()], frame).is_ok()
}

/// The IP header of a packet on this path; `None` between IP versions.
fn ip_header(from: IpAddr, path: &Path) -> Option<Ip> {
    let ttl = if path.hop_limit == 0 { USUAL_HOP_LIMIT } else { path.hop_limit };
    let tos = traffic_class_byte(path);
    match (from, path.remote.ip()) {
        // The identification of a datagram that is not to be fragmented, as the UDP wire expects
        // it.
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            Some(Ip::V4(Ipv4 { tos, id: 0, dont_fragment: true, ttl, src, dst }))
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            Some(Ip::V6(Ipv6 { traffic_class: tos, flow_label: 0, hop_limit: ttl, src, dst }))
        }
        _ => None,
    }
}

/// The packet in an Ethernet frame for `local`, and where it came from.
pub(super) fn open(frame: &[u8], local: SocketAddr) -> Result<(Origin, Packet<'_>), XdpRefused> {
    let (ethernet, ethertype, rest) = Ethernet::parse(frame).map_err(|_| XdpRefused::Malformed)?;
    if ethernet.vlan_tci.is_some() {
        return Err(XdpRefused::Foreign);
    }
    let (packet, _padding) = Packet::parse_as(ethertype, rest).map_err(|error| match error {
        FrameError::NotRoce(NotRoce::TooShort) | FrameError::Length { .. } => XdpRefused::Malformed,
        FrameError::NotRoce(_) => XdpRefused::Foreign,
        FrameError::Wire(_) => XdpRefused::Headers,
        _ => XdpRefused::Malformed,
    })?;
    let Network::Udp(ip, udp) = packet.network else {
        return Err(XdpRefused::Foreign);
    };
    let (src, dst, tos, hop_limit) = match ip {
        Ip::V4(ip) => (IpAddr::V4(ip.src), IpAddr::V4(ip.dst), ip.tos, ip.ttl),
        Ip::V6(ip) => (IpAddr::V6(ip.src), IpAddr::V6(ip.dst), ip.traffic_class, ip.hop_limit),
    };
    if SocketAddr::new(dst, udp.dst_port) != SocketAddr::new(local.ip(), local.port())
        || src.is_multicast()
        || src.is_unspecified()
    {
        return Err(XdpRefused::Foreign);
    }
    if !packet.icrc_is_right() {
        return Err(XdpRefused::Icrc);
    }
    let source = SocketAddr::new(src, udp.src_port);
    Ok((origin(source, dst, 0, tos, hop_limit), packet))
}
