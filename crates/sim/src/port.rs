//! A node's end of the network: the [`Wire`] that the transport sends to and receives from.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::net::IpAddr;

use roce::Time;
use roce::shaping::Arrivals;
use roce::verbs::{Qpn, Transport};
use roce::wire::icrc;
use roce::wire::telemetry::Report;
use roce::wire::{Headers, ICRC_BYTES};
use roce::world::{Memory, MemoryKind, Origin, Path, RxFrame, Telemetry, TxFrame, Wire};

use crate::faults::{Fault, FaultCounts};
use crate::packet::{Addressing, Direction, Marks, Packet, Sighting, Stamps};
use crate::pressure::BackPressure;
use crate::rates::HostLimits;

/// Payload of phantom packets.
pub(crate) static ZEROS: [u8; 8192] = [0; 8192];

/// Buffers kept for later packets.
const MOST_SPARE: usize = 1024;

/// The contents of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// Bytes, and an ICRC that receivers verify.
    Sealed,
    /// Bytes, and zeros in place of the ICRC, which is not checked.
    Plain,
    /// A length.
    Phantom,
}

impl Body {
    /// Of packets that carry bytes of this kind of memory.
    pub(crate) fn of(kind: MemoryKind, is_sealed: bool) -> Body {
        match kind {
            MemoryKind::Phantom => Body::Phantom,
            MemoryKind::Host if is_sealed => Body::Sealed,
            MemoryKind::Host => Body::Plain,
        }
    }
}

/// What a node's cables take before they are full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    packets: usize,
    /// Of the packets admitted, those not sent yet.
    granted: usize,
    /// A packet found none: its queue pair waits for room.
    pub(crate) is_refused: bool,
}

impl Room {
    /// Room for so many packets. What was refused before still waits if there is none.
    pub(crate) fn new(packets: usize, before: Option<Room>) -> Room {
        let was_refused = before.is_some_and(|room| room.is_refused);
        Room { packets, granted: 0, is_refused: was_refused && packets == 0 }
    }

    fn admits(&mut self, packets: usize) -> usize {
        let granted = packets.min(self.packets);
        self.packets -= granted;
        self.granted += granted;
        self.is_refused |= granted == 0;
        granted
    }

    fn sends(&mut self) {
        match self.granted.checked_sub(1) {
            Some(granted) => self.granted = granted,
            None => self.packets = self.packets.saturating_sub(1),
        }
    }

    /// Packets admitted and not sent are admitted no longer.
    fn lapse(&mut self) {
        self.packets += core::mem::take(&mut self.granted);
    }
}

/// What holds packets of a node back besides room on its cables.
#[derive(Debug, Default)]
pub(crate) struct Brakes {
    /// Back-pressure, if its destinations exert any.
    pub(crate) pressure: Option<BackPressure>,
    /// Rate limits and gates by DSCP, if there are any.
    pub(crate) limits: Option<Box<HostLimits>>,
}

/// When a wire that refused a packet admits one, as far as it knows: its node is told.
pub(crate) const NEVER: Time = Time::from_nanos(u64::MAX);

#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) node: u32,
    pub(crate) addressing: Addressing,
    /// The contents of packets.
    pub(crate) body: Body,
    /// Most packets handed over per `receive`.
    pub(crate) batch: usize,
    pub(crate) now: Time,
    pub(crate) outbox: Vec<Packet>,
    pub(crate) inbox: VecDeque<Packet>,
    next_id: u16,
    /// Buffers of packets that arrived, for reuse.
    spare: Vec<Vec<u8>>,
    pub(crate) effects: FaultCounts,
    /// Damaged packets accepted because the ICRC does not cover the damage.
    pub(crate) harmless: u64,
    /// Packets refused without being damaged.
    pub(crate) refused_intact: u64,
    /// Every packet sent and accepted, if recording.
    pub(crate) sightings: Option<Vec<Sighting>>,
    /// Flips a bit of every n-th payload after the ICRC was checked, if not 0: a broken wire that a
    /// history checker must notice.
    pub(crate) corrupt_every: u64,
    accepted: u64,
    /// The node that leaves its packets unread.
    pub(crate) stalled: Option<IpAddr>,
    /// What holds its packets back besides its cables, if anything does.
    pub(crate) brakes: Option<Box<Brakes>>,
    /// Room on its cables, if that is limited.
    pub(crate) room: Option<Room>,
    /// Queue pairs whose packets are kept when they are sent, and the packets.
    pub(crate) taps: Vec<u32>,
    pub(crate) tapped: Vec<Vec<u8>>,
}

impl Port {
    pub(crate) fn new(node: u32, addressing: Addressing, body: Body, batch: usize) -> Port {
        Port {
            node,
            addressing,
            body,
            batch: batch.max(1),
            now: Time::ZERO,
            outbox: Vec::new(),
            inbox: VecDeque::new(),
            next_id: 0,
            spare: Vec::new(),
            effects: FaultCounts::default(),
            harmless: 0,
            refused_intact: 0,
            sightings: None,
            corrupt_every: 0,
            accepted: 0,
            stalled: None,
            brakes: None,
            room: None,
            taps: Vec::new(),
            tapped: Vec::new(),
        }
    }

    fn note(
        &mut self,
        direction: Direction,
        peer: u32,
        headers: Headers,
        payload_len: u32,
        telemetry: Option<&Report>,
    ) {
        let (at, node) = (self.now, self.node);
        if let Some(sightings) = &mut self.sightings {
            let telemetry = telemetry.and_then(Stamps::of);
            sightings.push(Sighting { at, node, peer, direction, headers, payload_len, telemetry });
        }
    }

    fn note_sent(&mut self, packet: &Packet) {
        if self.sightings.is_some()
            && let Ok((headers, payload)) = Headers::parse(&packet.bytes)
        {
            let phantom = self.body == Body::Phantom;
            let len = if phantom { packet.phantom_payload } else { payload.len() as u32 };
            self.note(Direction::Sent, packet.to, headers, len, packet.telemetry.as_deref());
        }
    }

    pub(crate) fn packet(&mut self, frame: &TxFrame<'_>, memory: &dyn Memory) -> Packet {
        self.next_id = self.next_id.wrapping_add(1);
        let udp_len = frame.udp_payload_len() as u32;
        let behind = frame.header.len() as u32 + u32::from(frame.pad) + ICRC_BYTES as u32;
        let dest = frame.path.remote.ip();
        let mut packet = Packet {
            source: self.addressing.source(self.node),
            dest,
            from: self.node,
            to: self.addressing.node(dest),
            id: self.next_id,
            dscp: frame.path.dscp,
            ecn: self.addressing.ecn(frame.path.ecn),
            is_v1: self.addressing.is_v1,
            hop_limit: frame.path.hop_limit,
            bytes: self.spare.pop().unwrap_or_default(),
            phantom_payload: udp_len - behind,
            frame_bytes: self.addressing.frame_bytes(udp_len),
            marks: Marks::default(),
            telemetry: match &frame.telemetry {
                // Switches find no place for stamps behind a GRH.
                _ if self.addressing.is_v1 => None,
                Telemetry::None => None,
                Telemetry::Collect(form) => Some(Box::new(Report::empty(*form))),
                Telemetry::Return(report) => Some(report.clone()),
            },
        };
        if let Some(report) = &packet.telemetry {
            packet.frame_bytes += report.as_bytes().len() as u32;
        }
        let bytes = &mut packet.bytes;
        bytes.clear();
        bytes.extend_from_slice(&frame.header);
        if self.body == Body::Phantom {
            // Four bytes stand for any payload with its pad, and four for the ICRC.
            let body = if udp_len > frame.header.len() as u32 + 4 { 4 } else { 0 };
            bytes.resize(bytes.len() + body + ICRC_BYTES, 0);
            return packet;
        }
        bytes.reserve(udp_len as usize);
        frame.payload.append_to(bytes, memory);
        bytes.resize(udp_len as usize, 0);
        if self.body == Body::Sealed {
            packet.seal();
        }
        packet
    }

    /// Headers and payload, unless the packet must be refused.
    fn open<'p>(&self, packet: &'p Packet) -> Option<(Headers, &'p [u8])> {
        match self.body {
            Body::Sealed => icrc::verify(&packet.pseudo(), &packet.bytes)
                .then(|| Headers::parse(&packet.bytes))
                .and_then(Result::ok),
            Body::Plain => Headers::parse(&packet.bytes).ok(),
            Body::Phantom if packet.marks.is_damaged() => None,
            Body::Phantom => {
                let (headers, _) = Headers::parse(&packet.bytes).ok()?;
                Some((headers, ZEROS.get(..packet.phantom_payload as usize)?))
            }
        }
    }

    fn refuse(&mut self, marks: Marks) {
        self.refused_intact += u64::from(!marks.is_damaged() && !marks.forged);
        if marks.flipped {
            self.effects.effect(Fault::Flip);
        }
        if marks.truncated {
            self.effects.effect(Fault::Truncate);
        }
        if marks.corrupted {
            self.effects.effect(Fault::BitError);
        }
    }

    fn accept(&mut self, packet: &Packet, sink: &mut dyn FnMut(&RxFrame<'_>)) {
        let Some((headers, payload)) = self.open(packet) else {
            self.refuse(packet.marks);
            return;
        };
        self.harmless += u64::from(packet.marks.is_damaged());
        self.accepted += 1;
        let telemetry = packet.telemetry.as_deref();
        self.note(Direction::Accepted, packet.from, headers, payload.len() as u32, telemetry);
        let origin = Origin {
            dscp: packet.dscp,
            ecn: packet.ecn,
            hop_limit: packet.hop_limit,
            version_tclass_flow: packet.first_word_of_grh(),
            ..Origin::new(packet.source, packet.dest)
        };
        if self.corrupt_every > 0 && self.accepted.is_multiple_of(self.corrupt_every) {
            let mut broken = payload.to_vec();
            broken.iter_mut().take(1).for_each(|byte| *byte ^= 1);
            sink(&RxFrame { origin, headers, payload: &broken, telemetry });
        } else {
            sink(&RxFrame { origin, headers, payload, telemetry });
        }
    }
}

impl Port {
    /// Keeps a buffer for a later packet, up to a limit: a node may receive more than it sends.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if self.spare.len() < MOST_SPARE {
            self.spare.push(buffer);
        }
    }

    fn receive_packets(&mut self, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let count = self.batch.min(self.inbox.len());
        for _ in 0..count {
            if let Some(packet) = self.inbox.pop_front() {
                self.accept(&packet, sink);
                self.recycle(packet.bytes);
            }
        }
        count
    }

    fn lapse(&mut self, now: Time) {
        if let Some(brakes) = &mut self.brakes {
            brakes.limits.iter_mut().for_each(|limits| limits.shaper.lapse(now));
            brakes.pressure.iter_mut().for_each(BackPressure::lapse);
        }
        if let Some(room) = &mut self.room {
            room.lapse();
        }
    }
}

impl Wire for Port {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        if let Some(limits) = self.brakes.as_mut().and_then(|brakes| brakes.limits.as_mut()) {
            let HostLimits { table, shaper } = &mut **limits;
            let bytes_of = |frame: &TxFrame<'_>| {
                self.addressing.frame_bytes(frame.udp_payload_len() as u32).into()
            };
            shaper.sent(table, now, frames.iter().map(|frame| (frame.path.dscp, bytes_of(frame))));
        }
        for frame in frames {
            if let Some(pressure) = self.brakes.as_mut().and_then(|brakes| brakes.pressure.as_mut())
            {
                pressure.sends(frame.path.remote.ip());
            }
            if let Some(room) = &mut self.room {
                room.sends();
            }
            let packet = self.packet(frame, memory);
            self.note_sent(&packet);
            if self.taps.contains(&packet.dest_qpn()) {
                self.tapped.push(packet.bytes.clone());
            }
            self.outbox.push(packet);
        }
        self.lapse(now);
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        self.lapse(now);
        let limits = self.brakes.as_ref().and_then(|brakes| brakes.limits.as_ref());
        if !limits.is_some_and(|limits| limits.watches()) {
            return self.receive_packets(sink);
        }
        let mut arrivals = Arrivals::default();
        let count = self.receive_packets(&mut |frame| {
            arrivals.note(frame.origin.dscp, frame.origin.source.ip());
            sink(frame);
        });
        if let Some(limits) = self.brakes.as_mut().and_then(|brakes| brakes.limits.as_mut()) {
            limits.received(now, &arrivals);
        }
        count
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        _dest: Qpn,
        _service: Transport,
        packets: usize,
    ) -> usize {
        let Some(brakes) = &mut self.brakes else {
            return self.room.as_mut().map_or(packets, |room| room.admits(packets));
        };
        let ip = path.remote.ip();
        // Rate limits and gates first: what they refuse takes no room from others.
        let packets = match &mut brakes.limits {
            Some(limits) => {
                let HostLimits { table, shaper } = &mut **limits;
                shaper.admits(table, now, (path.dscp, ip), packets)
            }
            None => packets,
        };
        let packets = match &mut self.room {
            Some(room) if packets > 0 => room.admits(packets),
            _ => packets,
        };
        let counts = &mut self.effects;
        match &mut brakes.pressure {
            Some(pressure) if packets > 0 => pressure.admits(now, ip, packets, counts),
            _ => packets,
        }
    }

    fn next_wakeup(&self) -> Option<Time> {
        let is_refused = self.room.is_some_and(|room| room.is_refused);
        let room = is_refused.then_some(NEVER);
        let Some(brakes) = &self.brakes else {
            return room;
        };
        let pressure = brakes.pressure.as_ref().and_then(|own| own.next_wakeup(self.now));
        let limits = brakes.limits.as_ref().and_then(|limits| limits.shaper.next_wakeup());
        [pressure.or(room), limits].into_iter().flatten().min()
    }

    /// Its node leaves packets unread, or the gate of this side holds them back.
    fn is_stalled(&mut self, path: &Path, _dest: Qpn) -> bool {
        let (now, flow) = (self.now, (path.dscp, path.remote.ip()));
        let limits = self.brakes.as_ref().and_then(|brakes| brakes.limits.as_ref());
        let is_held = limits.is_some_and(|own| own.shaper.holds_back(&own.table, now, flow));
        is_held || self.stalled == Some(path.remote.ip())
    }
}
