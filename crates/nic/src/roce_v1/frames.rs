//! Packets as RoCEv1 frames: written side by side for one system call, and opened as untrusted
//! input.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::ops::Range;

use roce::wire::frame::{ETHERTYPE_ROCE_V1, Ethernet, Frame, FrameError, Network, Packet};
use roce::wire::grh::{GRH_BYTES, Grh, gid_of};
use roce::wire::icrc::{Pseudo, SEAL_BYTES, seal};
use roce::wire::{ROCE_PORT, WireError};
use roce::world::{Ecn, Memory, Origin, TxFrame};

use crate::link::ETHERNET_BYTES;
use crate::udp::send::USUAL_HOP_LIMIT;

/// Bytes in front of the BTH.
pub(super) const FRONT_BYTES: usize = ETHERNET_BYTES + GRH_BYTES;

/// Frames of one system call, in one buffer whose bytes are initialised once.
#[derive(Debug)]
pub(super) struct Burst {
    /// Room for the ICRC of the first packet, then frames.
    buffer: Vec<u8>,
    frames: Vec<Range<usize>>,
    /// Where the next frame begins.
    end: usize,
}

/// What sealing a packet uses in front of it and Ethernet header and GRH do not cover.
const SLACK: usize = SEAL_BYTES - FRONT_BYTES;

impl Burst {
    /// For so many frames of so many bytes.
    pub(super) fn new(frames: usize, longest: usize) -> Burst {
        let (buffer, frames) = (vec![0; SLACK + frames * longest], Vec::with_capacity(frames));
        Burst { buffer, frames, end: SLACK }
    }

    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.end = SLACK;
    }

    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// The frames since the last `clear`.
    pub(super) fn frames(&self) -> impl Iterator<Item = &[u8]> {
        self.frames.iter().map(|range| &self.buffer[range.clone()])
    }

    /// Adds the frame of a packet to this neighbour. `false` if it has no BTH or is too long for a
    /// GRH.
    pub(super) fn push(
        &mut self,
        ethernet: &Ethernet,
        local: IpAddr,
        tx: &TxFrame<'_>,
        memory: &dyn Memory,
    ) -> bool {
        let Ok(len) = u16::try_from(tx.udp_payload_len()) else {
            return false;
        };
        let (start, packet) = (self.end, self.end + FRONT_BYTES);
        let end = packet + usize::from(len);
        if self.buffer.len() < end {
            self.buffer.resize(end, 0);
        }
        let (header, rest) = self.buffer[packet..end].split_at_mut(tx.header.len());
        header.copy_from_slice(&tx.header);
        let (payload, tail) = rest.split_at_mut(tx.payload.len());
        tx.payload.copy_to(payload, memory);
        tail.fill(0);
        let grh = grh(local, tx);
        let pseudo = Pseudo::Grh { sgid: grh.sgid, dgid: grh.dgid };
        if !seal(&pseudo, &mut self.buffer[packet - SEAL_BYTES..end]) {
            return false;
        }
        let front = &mut self.buffer[start..packet];
        front[..6].copy_from_slice(&ethernet.dst);
        front[6..12].copy_from_slice(&ethernet.src);
        front[12..ETHERNET_BYTES].copy_from_slice(&ETHERTYPE_ROCE_V1.to_be_bytes());
        front[ETHERNET_BYTES..].copy_from_slice(&grh.encode(len));
        self.frames.push(start..end);
        self.end = end;
        true
    }
}

/// The GRH of a packet. Its traffic class has the DSCP and no ECN: no switch looks for IP's bits
/// there.
fn grh(local: IpAddr, tx: &TxFrame<'_>) -> Grh {
    let path = &tx.path;
    Grh {
        traffic_class: path.dscp << 2,
        flow_label: 0,
        hop_limit: if path.hop_limit == 0 { USUAL_HOP_LIMIT } else { path.hop_limit },
        sgid: gid_of(local),
        dgid: gid_of(path.remote.ip()),
    }
}

/// Why a received frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// For others, from nobody, or of another network.
    Foreign,
    /// Not a RoCEv1 frame as a whole.
    Malformed,
    /// The transport headers do not parse.
    Unparsable(WireError),
    /// The ICRC is wrong.
    Icrc,
}

/// The packet in a frame for `local`, and where it came from.
pub(super) fn open(frame: &[u8], local: IpAddr) -> Result<(Origin, Packet<'_>), Refused> {
    let Frame { ethernet, packet, .. } = Frame::parse(frame).map_err(|error| match error {
        FrameError::Wire(error) => Refused::Unparsable(error),
        _ => Refused::Malformed,
    })?;
    let Network::Grh(grh) = packet.network else {
        return Err(Refused::Malformed);
    };
    let (from, to) = (grh.sgid.to_canonical(), grh.dgid.to_canonical());
    let is_sender = !from.is_multicast() && !from.is_unspecified() && from != local;
    if ethernet.vlan_tci.is_some() || to != local || !is_sender {
        return Err(Refused::Foreign);
    }
    if !packet.icrc_is_right() {
        return Err(Refused::Icrc);
    }
    let first = 6 << 28 | u32::from(grh.traffic_class) << 20 | grh.flow_label;
    let origin = Origin {
        dscp: grh.traffic_class >> 2,
        ecn: if packet.headers.bth().fecn { Ecn::Ce } else { Ecn::NotEct },
        hop_limit: grh.hop_limit,
        version_tclass_flow: NonZeroU32::new(first),
        ..Origin::new(SocketAddr::new(from, ROCE_PORT), to)
    };
    Ok((origin, packet))
}
