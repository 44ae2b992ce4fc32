//! Packets between local peers: through FIFOs in shared memory in place of sockets.
//!
//! Whatever is neither carried out directly nor handed over as a message (acknowledgements, what
//! was refused, everything on unreliable connections) is packets. Between local peers they need no
//! system call, no ICRC and no segmentation: [`LocalWire`] puts them into the FIFO of the process
//! that they are for, and leaves all others to the wire below.
//!
//! A FIFO loses nothing. Who writes into a full one waits, looking again at growing intervals, and
//! is not waited for: a reader that has stopped slows only those that send to it, and after
//! [`PATIENCE`] packets for it are lost as on a link, at a bounded rate, as they are on the
//! device's wire.
//!
//! A reader that sleeps is woken by the wire below ([`Doorbell`]), once for each time that it falls
//! asleep.
//!
//! Neither queue pairs nor the contents of packets belong here: what arrives is parsed like any
//! packet.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use roce::verbs::{Ecn, Path, Qpn, Transport};
use roce::wire::{Headers, ROCE_PORT};
use roce::world::{Memory, Origin, RxFrame, TxFrame, Wire};
use roce::{Duration, Time};

use super::fifo::{Kind, MAX_PACKET, Reader, Tag, Writer};
use super::segment::{ADDRESSES, ControlSegment};
use super::unacked::Unacked;
use super::words::Rung;
use super::{LocalPeers, OWN_PORT, SLOT_SHIFT, Target, locked};
use crate::fault::LossyWire;
use crate::udp::SocketWire;

/// Packets taken out of one FIFO before the next one's turn.
pub(super) const MAX_TAKEN: usize = 64;

/// Packets taken out of a FIFO before their lines are given back: a writer that waits for room
/// fills them while the others are read. A quarter of a full FIFO.
const RELEASED_TOGETHER: usize = 16;

/// FIFOs that this process reads. Each costs a look in every turn; the packets of further local
/// peers use sockets.
pub(super) const MAX_INCOMING: usize = 64;

/// First and longest interval between two looks at quiet sockets: a look costs a system call or
/// two, 1 to 2 us, and a turn otherwise about a tenth of that. Something there delays its packet,
/// and no other, by the interval.
const FIRST_QUIET: Duration = Duration::from_micros(2);
const LONGEST_QUIET: Duration = Duration::from_micros(32);

/// First and longest interval between two looks at a full FIFO.
const FIRST_LOOK: Duration = Duration::from_micros(5);
const LAST_LOOK: Duration = Duration::from_millis(1);

/// Longest that a full FIFO holds packets back while nothing is read.
const PATIENCE: Duration = Duration::from_millis(100);

/// Packets that may be lost after that, at each look.
const LOST_PER_LOOK: usize = 16;

/// Room for the ICRC that packets in a FIFO do not have.
const NO_ICRC: [u8; 4] = [0; 4];

/// Counters of the packets between local peers. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FifoCounters {
    /// Packets written.
    pub sent_packets: u64,
    /// Their bytes, from the BTH on.
    pub sent_bytes: u64,
    /// Packets read and delivered.
    pub received_packets: u64,
    /// Their bytes, from the BTH on.
    pub received_bytes: u64,
    /// Times that a sleeping process was woken for packets, messages or acknowledgements.
    pub doorbells: u64,
    /// Times that sending waited because a FIFO was full.
    pub waits: u64,
    /// Packets lost because their reader had stopped.
    pub lost_stopped: u64,
    /// Packets longer than any MTU allows.
    pub unfit: u64,
    /// Packets that do not parse, or name an address that does not exist.
    pub malformed: u64,
    /// FIFOs given up because their writer broke them.
    pub broken: u64,
}

impl FifoCounters {
    /// All of them, with their names.
    pub fn named(&self) -> [(&'static str, u64); 10] {
        [
            ("fifo_sent_packets", self.sent_packets),
            ("fifo_sent_bytes", self.sent_bytes),
            ("fifo_received_packets", self.received_packets),
            ("fifo_received_bytes", self.received_bytes),
            ("fifo_doorbells", self.doorbells),
            ("fifo_waits", self.waits),
            ("fifo_lost_stopped", self.lost_stopped),
            ("fifo_unfit", self.unfit),
            ("fifo_malformed", self.malformed),
            ("fifo_broken", self.broken),
        ]
    }
}

/// Wakes the process that packets are for, by a datagram that means nothing else.
pub trait Doorbell {
    /// Wakes the owner of the queue pair `dest` at the end of this path, if it sleeps on its
    /// sockets.
    fn wake(&mut self, path: &Path, dest: Qpn);
}

/// The port of such a device belongs to one process.
impl<W: SocketWire> Doorbell for LossyWire<W> {
    fn wake(&mut self, path: &Path, _dest: Qpn) {
        self.inner().wake(path.remote);
    }
}

/// A FIFO that this process writes.
pub(super) struct Outgoing {
    pub(super) writer: Writer,
    /// Index of the reader's address, which all packets are for.
    pub(super) dest: u8,
    /// Messages that the reader has not decided on.
    pub(super) unacked: Unacked,
    /// The sleep that the reader was last woken from.
    pub(super) rung: Rung,
    /// Burst number, and packets admitted since that burst.
    admitted: (u64, usize),
    full: Option<Full>,
    /// Progress of the reader when an ACK timer expired.
    suspected_at: Option<u64>,
}

/// A FIFO without room.
struct Full {
    /// Since when nothing was read.
    since: Time,
    progress: u64,
    look_at: Time,
    interval: Duration,
}

impl Outgoing {
    pub(super) fn new(writer: Writer, dest: u8) -> Outgoing {
        let (rung, admitted) = (Rung::default(), (0, 0));
        let unacked = Unacked::default();
        Outgoing { writer, dest, unacked, rung, admitted, full: None, suspected_at: None }
    }

    /// How many of `packets` may be sent in this burst.
    fn admits(&mut self, now: Time, burst: u64, service: Transport, packets: usize) -> usize {
        let before = if self.admitted.0 == burst { self.admitted.1 } else { 0 };
        let free = self.writer.room(before + packets).saturating_sub(before);
        let granted = if free > 0 { free } else { self.wait(now, service, packets) };
        if free > 0 {
            self.full = None;
        }
        self.admitted = (burst, before + granted);
        granted
    }

    /// Waits until the reader has read something; returns how many of `packets` may be lost
    /// instead.
    fn wait(&mut self, now: Time, service: Transport, packets: usize) -> usize {
        let progress = self.writer.progress();
        let (since, interval) = match &self.full {
            Some(full) if full.look_at > now => {
                return if service == Transport::Ud { self.lost(now, packets) } else { 0 };
            }
            Some(full) if full.progress == progress => {
                (full.since, Duration::from_nanos(full.interval.as_nanos() * 2).min(LAST_LOOK))
            }
            _ => (now, FIRST_LOOK),
        };
        self.full = Some(Full { since, progress, look_at: now + interval, interval });
        self.lost(now, if service == Transport::Ud { packets } else { LOST_PER_LOOK.min(packets) })
    }

    fn lost(&self, now: Time, packets: usize) -> usize {
        let is_stopped = self.full.as_ref().is_some_and(|full| now.since(full.since) >= PATIENCE);
        if is_stopped { packets } else { 0 }
    }

    /// Whether nothing was read since the last call, and something could have been.
    fn is_stalled(&mut self) -> bool {
        let progress = self.writer.progress();
        let before = self.suspected_at.replace(progress);
        self.writer.holds_packets() && before == Some(progress)
    }
}

/// A FIFO that this process reads.
pub(super) struct Incoming {
    pub(super) reader: Reader,
    pub(super) segment: Arc<ControlSegment>,
    /// The writer's addresses, by index.
    pub(super) addresses: Vec<IpAddr>,
    /// The sleep that the writer was last woken from.
    pub(super) rung: Rung,
    /// Its writer has not learnt that it is read.
    is_withdrawn: Arc<AtomicBool>,
    _place: Place,
}

/// One of [`MAX_INCOMING`] places.
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// Takes one, if there is one left.
    pub(super) fn take(taken: &Arc<AtomicUsize>) -> Option<Place> {
        let free = |count| (count < MAX_INCOMING).then_some(count + 1);
        let took = taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, free);
        took.is_ok().then(|| Place(Arc::clone(taken)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Incoming {
    pub(super) fn new(reader: Reader, segment: Arc<ControlSegment>, place: Place) -> Incoming {
        let addresses = segment.addresses();
        let (rung, is_withdrawn) = Default::default();
        Incoming { reader, segment, addresses, rung, is_withdrawn, _place: place }
    }

    /// Set when the writer cannot be told that this is read: then it goes on without it.
    pub(super) fn withdrawal(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_withdrawn)
    }

    /// Whether something may still come.
    fn is_of_use(&self) -> bool {
        !self.is_withdrawn.load(Ordering::Acquire)
            && (self.segment.is_owned() || self.holds_packets())
    }

    pub(super) fn holds_packets(&self) -> bool {
        self.reader.holds_packets()
    }

    /// Passes packets on, at most [`MAX_TAKEN`]. Returns how many, or `None` when the FIFO is
    /// broken.
    fn drain(
        &mut self,
        own: &[IpAddr],
        bytes: &mut Vec<u8>,
        counters: &mut FifoCounters,
        sink: &mut dyn FnMut(&RxFrame<'_>),
    ) -> Option<usize> {
        let mut taken = 0;
        while taken < MAX_TAKEN {
            let Some((tag, _)) = self.reader.pop(Kind::Packet, bytes).ok()? else {
                break;
            };
            taken += 1;
            if taken.is_multiple_of(RELEASED_TOGETHER) {
                self.reader.release();
            }
            counters.received_bytes += bytes.len() as u64;
            bytes.extend(NO_ICRC);
            let origin = self.origin(tag, own);
            match (origin, Headers::parse(bytes)) {
                (Some(origin), Ok((headers, payload))) => {
                    counters.received_packets += 1;
                    sink(&RxFrame { origin, headers, payload, telemetry: None });
                }
                _ => counters.malformed += 1,
            }
        }
        self.reader.release();
        Some(taken)
    }

    fn origin(&self, tag: Tag, own: &[IpAddr]) -> Option<Origin> {
        let Tag { source, dest, tos, hop_limit } = tag;
        let from = SocketAddr::new(*self.addresses.get(usize::from(source))?, ROCE_PORT);
        let to = *own.get(usize::from(dest))?;
        let ecn = match tos & 3 {
            0 => Ecn::NotEct,
            1 => Ecn::Ect1,
            2 => Ecn::Ect0,
            _ => Ecn::Ce,
        };
        Some(Origin { via: dest, dscp: tos >> 2, ecn, hop_limit, ..Origin::new(from, to) })
    }
}

/// The packets of one device to and from its local peers.
#[derive(Default)]
pub(super) struct Packets {
    pub(super) outgoing: Vec<Arc<Target>>,
    pub(super) incoming: Vec<Incoming>,
    /// The FIFO that is read first in the next turn.
    first: usize,
    burst: u64,
    /// When the next full FIFO is looked at.
    look_at: Option<Time>,
    /// How long the sockets are left alone after a look that found nothing, and until when. No
    /// interval: each turn looks.
    quiet: Duration,
    quiet_until: Time,
    pub(super) bytes: Vec<u8>,
    pub(super) counters: FifoCounters,
}

impl Packets {
    /// From now on packets for this process use its FIFO, if it has one.
    pub(super) fn add(&mut self, target: &Arc<Target>) {
        self.forget_ended();
        let is_known = self.outgoing.iter().any(|other| Arc::ptr_eq(other, target));
        if target.fifo.is_some() && !is_known {
            self.outgoing.push(Arc::clone(target));
        }
    }

    /// Leaves the segments, FIFOs and pools of processes that have ended. A process that a queue
    /// pair is connected to stays, because only those listed here are looked at for
    /// acknowledgements and for their end.
    pub(super) fn forget_ended(&mut self) {
        self.outgoing.retain(|target| target.is_of_use() || Arc::strong_count(target) > 1);
    }

    /// Takes in FIFOs that have arrived, and leaves those whose writers have ended.
    pub(super) fn adopt(&mut self, arrived: Vec<Incoming>) {
        self.incoming.extend(arrived);
        self.incoming.retain(Incoming::is_of_use);
    }

    pub(super) fn reads_fifos(&self) -> bool {
        !self.incoming.is_empty()
    }

    pub(super) fn holds_packets(&self) -> bool {
        self.incoming.iter().any(Incoming::holds_packets)
    }

    /// The next turn looks at the sockets: something there has ended a sleep.
    pub(super) fn look_at_sockets(&mut self) {
        self.quiet_until = Time::ZERO;
    }

    /// The sockets were looked at. Who reads no FIFO looks in each turn.
    fn note_look(&mut self, now: Time, received: usize) {
        let is_quiet = received == 0 && !self.incoming.is_empty();
        let longer = Duration::from_nanos(self.quiet.as_nanos() * 2).max(FIRST_QUIET);
        self.quiet = if is_quiet { longer.min(LONGEST_QUIET) } else { Duration::ZERO };
        self.quiet_until = now + self.quiet;
    }

    /// The local peer that packets on this path are for.
    fn target(&self, path: &Path, dest: Qpn) -> Option<usize> {
        if usize::from(path.source) >= ADDRESSES {
            return None;
        }
        let at = SocketAddr::new(path.remote.ip().to_canonical(), path.remote.port());
        let slot = (dest.get() >> SLOT_SHIFT) as u8;
        let is_for = |target: &Arc<Target>| {
            (target.slot == slot || target.slot == OWN_PORT)
                && target.at == at
                && target.segment.is_owned()
        };
        self.outgoing.iter().position(is_for)
    }

    fn push(&mut self, target: usize, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        let Packets { outgoing, bytes, counters, .. } = self;
        let Some(fifo) = outgoing.get(target).and_then(|target| target.fifo.as_ref()) else {
            return;
        };
        let mut fifo = locked(fifo);
        let dest = fifo.dest;
        for frame in frames {
            let Path { dscp, ecn, source, hop_limit, .. } = frame.path;
            let tos = dscp << 2 | ecn_bits(ecn);
            bytes.clear();
            bytes.extend_from_slice(&frame.header);
            frame.payload.append_to(bytes, memory);
            bytes.resize(bytes.len() + usize::from(frame.pad), 0);
            if bytes.len() > MAX_PACKET {
                counters.unfit += 1;
            } else if fifo.writer.push(Tag { source, dest, tos, hop_limit }, bytes) {
                counters.sent_packets += 1;
                counters.sent_bytes += bytes.len() as u64;
            } else {
                counters.lost_stopped += 1;
            }
        }
    }

    /// Whether the reader of packets that were just written sleeps and was not woken yet.
    fn must_ring(&mut self, target: usize) -> bool {
        let must = self.outgoing.get(target).is_some_and(|target| target.must_ring());
        self.counters.doorbells += u64::from(must);
        must
    }

    fn receive(&mut self, own: &[IpAddr], sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        let count = self.incoming.len();
        let mut taken = 0;
        let mut broken = None;
        for step in 0..count {
            let at = (self.first + step) % count;
            let one = &mut self.incoming[at];
            if !one.holds_packets() {
                continue;
            }
            match one.drain(own, &mut self.bytes, &mut self.counters, sink) {
                Some(packets) => taken += packets,
                None => broken = Some(at),
            }
        }
        if let Some(at) = broken {
            self.counters.broken += 1;
            self.incoming.swap_remove(at);
        }
        self.first = self.first.wrapping_add(1) % count.max(1);
        taken
    }
}

fn ecn_bits(ecn: Ecn) -> u8 {
    match ecn {
        Ecn::NotEct => 0,
        Ecn::Ect1 => 1,
        Ecn::Ect0 => 2,
        Ecn::Ce => 3,
    }
}

/// The wire of a device with its local peers in front of it.
pub struct LocalWire<'a, W> {
    peers: &'a mut LocalPeers,
    wire: &'a mut W,
}

impl<'a, W: Wire + Doorbell> LocalWire<'a, W> {
    pub(super) fn new(peers: &'a mut LocalPeers, wire: &'a mut W) -> LocalWire<'a, W> {
        LocalWire { peers, wire }
    }

    fn target(&self, path: &Path, dest: Qpn) -> Option<usize> {
        let packets = &self.peers.packets;
        if packets.outgoing.is_empty() {
            return None;
        }
        packets.target(path, dest)
    }
}

impl<W: Wire + Doorbell> Wire for LocalWire<'_, W> {
    fn send(&mut self, now: Time, frames: &[TxFrame<'_>], memory: &dyn Memory) {
        self.peers.packets.burst += 1;
        let mut rest = frames;
        while let Some(first) = rest.first() {
            let (path, dest) = (first.path, first.dest_qp());
            let target = self.target(&path, dest);
            let is_alike = |frame: &TxFrame<'_>| {
                let dest_qp = frame.dest_qp();
                frame.path == path && dest_qp == dest || self.target(&frame.path, dest_qp) == target
            };
            let same = 1 + rest[1..].iter().take_while(|frame| is_alike(frame)).count();
            let (run, later) = rest.split_at(same);
            rest = later;
            let Some(target) = target else {
                self.wire.send(now, run, memory);
                continue;
            };
            self.peers.packets.push(target, run, memory);
            if self.peers.packets.must_ring(target) {
                self.wire.wake(&path, dest);
            }
        }
    }

    fn receive(&mut self, now: Time, sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
        self.peers.adopt();
        let LocalPeers { packets, shared, .. } = &mut *self.peers;
        packets.burst += 1;
        packets.look_at = packets.look_at.filter(|at| *at > now);
        let taken = packets.receive(&shared.addresses, sink);
        if now < packets.quiet_until && self.wire.next_wakeup().is_none() {
            return taken;
        }
        let received = self.wire.receive(now, sink);
        packets.note_look(now, received);
        taken + received
    }

    fn admits(
        &mut self,
        now: Time,
        path: &Path,
        dest: Qpn,
        service: Transport,
        count: usize,
    ) -> usize {
        let Some(target) = self.target(path, dest) else {
            return self.wire.admits(now, path, dest, service, count);
        };
        let packets = &mut self.peers.packets;
        let Some(fifo) = &packets.outgoing[target].fifo else {
            return count;
        };
        let mut fifo = locked(fifo);
        let was_open = fifo.full.is_none();
        let admitted = fifo.admits(now, packets.burst, service, count);
        if let Some(full) = &fifo.full {
            packets.counters.waits += u64::from(was_open);
            packets.look_at = packets.look_at.into_iter().chain([full.look_at]).min();
        }
        admitted
    }

    fn next_wakeup(&self) -> Option<Time> {
        self.peers.packets.look_at.into_iter().chain(self.wire.next_wakeup()).min()
    }

    /// A process with a port to itself establishes its connections anew when a peer has stopped,
    /// and says so: as its own wire, it blames the peer.
    fn is_stalled(&mut self, path: &Path, dest: Qpn) -> bool {
        match self.target(path, dest) {
            Some(target) if self.peers.shared.slot != OWN_PORT => {
                let fifo = self.peers.packets.outgoing[target].fifo.as_ref();
                fifo.is_some_and(|fifo| locked(fifo).is_stalled())
            }
            _ => self.wire.is_stalled(path, dest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile::ip;
    use super::*;
    use roce::wire::{Bth, DEFAULT_PKEY, Ext, Opcode, Psn};
    use roce::world::{NoMemory, Payload, Telemetry};

    /// Remembers what reached it.
    #[derive(Default)]
    struct Sockets {
        sent: Vec<u32>,
        woken: Vec<Qpn>,
        looks: u32,
    }

    impl Doorbell for Sockets {
        fn wake(&mut self, _path: &Path, dest: Qpn) {
            self.woken.push(dest);
        }
    }

    impl Wire for Sockets {
        fn send(&mut self, _now: Time, frames: &[TxFrame<'_>], _memory: &dyn Memory) {
            self.sent.extend(frames.iter().map(psn_of));
        }

        fn receive(&mut self, _now: Time, _sink: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
            self.looks += 1;
            0
        }

        fn admits(&mut self, _: Time, _: &Path, _: Qpn, _: Transport, packets: usize) -> usize {
            packets
        }

        fn next_wakeup(&self) -> Option<Time> {
            None
        }

        fn is_stalled(&mut self, _path: &Path, _dest: Qpn) -> bool {
            false
        }
    }

    /// The numbers before are those of other tests.
    const FIRST_TEST: u8 = 20;

    /// One of two processes, in one.
    struct Process {
        peers: LocalPeers,
        sockets: Sockets,
        ip: IpAddr,
        slot: u8,
    }

    impl Process {
        fn new(slot: u8, test: u8) -> Process {
            let [other, ip] = [ip(2 * FIRST_TEST + test), ip(FIRST_TEST + test)];
            let addresses = [other, ip];
            let peers = LocalPeers::open(ROCE_PORT, slot, &addresses).expect("shared memory");
            Process { peers, sockets: Sockets::default(), ip, slot }
        }

        fn wire(&mut self) -> LocalWire<'_, Sockets> {
            self.peers.wire(&mut self.sockets)
        }

        fn discover(&mut self, other: &Process) {
            let remote = SocketAddr::new(other.ip, ROCE_PORT);
            let target = self.peers.shared().discover(remote, other.slot).expect("an exchange");
            assert!(target.has_fifo() && target.why_not().is_none());
            self.peers.route(Qpn::new(1), Some(target));
        }

        /// Everything that has arrived: PSN, payload, origin.
        fn received(&mut self, now: Time) -> Vec<(u32, Vec<u8>, Origin)> {
            let mut seen = Vec::new();
            let mut take = |frame: &RxFrame<'_>| {
                seen.push((frame.headers.bth().psn.get(), frame.payload.to_vec(), frame.origin));
            };
            while self.peers.wire(&mut self.sockets).receive(now, &mut take) > 0 {}
            seen
        }
    }

    /// Two processes; the first sends to the second. The number keeps tests apart that run at the
    /// same time.
    fn pair(number: u8) -> (Process, Process) {
        let mut from = Process::new(7, number);
        let to = Process::new(9, number);
        from.discover(&to);
        (from, to)
    }

    fn path(to: &Process) -> Path {
        let remote = SocketAddr::new(to.ip, ROCE_PORT);
        Path { source: 1, dscp: 26, hop_limit: 3, ..Path::new(remote) }
    }

    fn dest(slot: u8) -> Qpn {
        Qpn::new(u32::from(slot) << 16 | 5)
    }

    fn frame(path: Path, slot: u8, psn: u32, payload: &[u8]) -> TxFrame<'_> {
        let pad = (4 - payload.len() % 4) as u8 % 4;
        let (opcode, pkey, psn) = (Opcode::RcSendOnly, DEFAULT_PKEY, Psn::new(psn));
        let bth = Bth {
            opcode,
            solicited: false,
            mig_req: false,
            pad,
            pkey,
            fecn: false,
            becn: false,
            dest_qp: dest(slot),
            ack_req: false,
            psn,
        };
        let header = Headers::new(bth, Ext::None).expect("legal").emit();
        TxFrame { path, header, payload: Payload::Bytes(payload), pad, telemetry: Telemetry::None }
    }

    fn psn_of(frame: &TxFrame<'_>) -> u32 {
        frame.header[9..12].iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
    }

    const START: Time = Time::from_nanos(1_000_000_000);

    #[test]
    fn packets_for_a_local_peer_arrive_whole_and_others_take_the_sockets() {
        let (mut from, mut to) = pair(1);
        let (near, far) = (path(&to), Path::new("127.8.31.200:4791".parse().expect("literal")));
        let payloads: Vec<Vec<u8>> = (0..6).map(|psn| vec![psn as u8; 700 * psn]).collect();
        let of = |psn: u32, path, slot| frame(path, slot, psn, &payloads[psn as usize]);
        // Another address, another slot, and an address of ours that no segment names.
        let stray = Path { source: ADDRESSES as u8, ..near };
        let frames = [
            of(0, near, 9),
            of(1, far, 9),
            of(2, near, 9),
            of(3, near, 8),
            of(4, stray, 9),
            of(5, near, 9),
        ];
        from.wire().send(START, &frames, &NoMemory);
        assert_eq!(from.sockets.sent, [1, 3, 4]);
        let seen = to.received(START);
        let expected = Origin {
            via: 1,
            dscp: 26,
            ecn: Ecn::Ect0,
            hop_limit: 3,
            ..Origin::new(SocketAddr::new(from.ip, ROCE_PORT), to.ip)
        };
        let wanted = [0, 2, 5].map(|psn: usize| (psn as u32, payloads[psn].clone(), expected));
        assert_eq!(seen, wanted);
        let (sent, got) = (from.peers.counters(), to.peers.counters());
        assert_eq!((sent.sent_packets, got.received_packets, got.malformed), (3, 3, 0));
        assert_eq!(sent.sent_bytes, got.received_bytes);
    }

    #[test]
    fn a_full_fifo_holds_packets_back_until_it_is_read_and_loses_them_when_it_is_not() {
        let (mut from, mut to) = pair(2);
        let (near, bytes) = (path(&to), vec![3; 4096]);
        let admits = |from: &mut Process, now, service| {
            from.wire().admits(now, &near, dest(9), service, 1_000)
        };
        let room = admits(&mut from, START, Transport::Rc);
        assert!(room > 50);
        // What is admitted lapses with the burst, and is not admitted twice within it.
        assert_eq!(admits(&mut from, START, Transport::Rc), 0);
        assert_eq!(from.received(START).len(), 0);
        let frames: Vec<_> = (0..room as u32).map(|psn| frame(near, 9, psn, &bytes)).collect();
        let (mut left, mut sent) = (room, 0);
        while left > 0 {
            from.wire().send(START, &frames[..left], &NoMemory);
            sent += left;
            left = admits(&mut from, START, Transport::Rc);
        }
        for service in [Transport::Rc, Transport::Uc, Transport::Ud] {
            assert_eq!(admits(&mut from, START, service), 0);
        }
        let look_at = from.wire().next_wakeup().expect("it has to look again");
        assert!(look_at > START && look_at <= START + LAST_LOOK);
        assert!(!from.wire().is_stalled(&near, dest(9)), "the first look");
        assert!(from.wire().is_stalled(&near, dest(9)));
        // Nothing is read for a while: a few packets are lost at each look, datagrams at once.
        let late = START + PATIENCE + LAST_LOOK;
        assert_eq!(admits(&mut from, late, Transport::Rc), LOST_PER_LOOK);
        assert_eq!(admits(&mut from, late, Transport::Rc), 0);
        assert_eq!(admits(&mut from, late, Transport::Ud), 1_000);
        from.wire().send(late, &frames[..10], &NoMemory);
        let lost = from.peers.counters().lost_stopped as usize;
        assert!((1..=10).contains(&lost), "{lost}");
        sent += 10 - lost;
        // It is read again.
        assert_eq!(to.received(late).len(), sent);
        assert!(!from.wire().is_stalled(&near, dest(9)));
        assert!(admits(&mut from, late + LAST_LOOK, Transport::Rc) > 50);
        let after = late + LAST_LOOK + LAST_LOOK;
        assert_eq!(from.received(after).len(), 0);
        assert_eq!(from.wire().next_wakeup(), None);
    }

    #[test]
    fn a_process_with_a_port_of_its_own_does_not_excuse_stopped_peers() {
        let mut from = Process::new(OWN_PORT, 7);
        let mut to = Process::new(9, 7);
        from.discover(&to);
        let near = path(&to);
        from.wire().send(START, &[frame(near, 9, 1, b"unread")], &NoMemory);
        for _ in 0..3 {
            assert!(!from.wire().is_stalled(&near, dest(9)), "its own wire excuses nobody");
        }
        assert_eq!((from.sockets.sent.len(), to.received(START).len()), (0, 1));
    }

    #[test]
    fn a_sleeper_is_woken_once_for_each_sleep_and_never_when_awake() {
        let (mut from, mut to) = pair(3);
        let near = path(&to);
        let send = |from: &mut Process| {
            from.wire().send(START, &[frame(near, 9, 0, b"wake")], &NoMemory);
            from.sockets.woken.len()
        };
        assert_eq!(send(&mut from), 0);
        assert!(!to.peers.fall_asleep(), "a packet is there");
        to.peers.shared().wake_up();
        assert_eq!(send(&mut from), 0);
        assert_eq!(to.received(START).len(), 2);
        for sleep in 1..4 {
            assert!(to.peers.fall_asleep());
            assert_eq!((send(&mut from), send(&mut from)), (sleep, sleep));
            to.peers.shared().wake_up();
            assert_eq!((send(&mut from), to.received(START).len()), (sleep, 3));
        }
        assert_eq!(from.sockets.woken, [dest(9); 3]);
    }

    #[test]
    fn quiet_sockets_are_looked_at_now_and_then_and_after_each_sleep() {
        let (mut from, mut to) = pair(4);
        to.received(START);
        let before = to.sockets.looks;
        let steps = 1_000;
        for step in 1..=steps {
            to.received(START + Duration::from_micros(step));
        }
        let end = START + Duration::from_micros(steps);
        // The intervals double from the first to the longest.
        let seldom = steps / (LONGEST_QUIET.as_nanos() / 1_000);
        let looks = u64::from(to.sockets.looks - before);
        assert!((seldom..seldom + 6).contains(&looks), "{looks}");
        assert!(to.peers.fall_asleep());
        let before = to.sockets.looks;
        to.received(end);
        assert_eq!(to.sockets.looks - before, 1);
        // Who reads no FIFO looks in each turn.
        let before = from.sockets.looks;
        for _ in 0..5 {
            from.received(START);
        }
        assert_eq!(from.sockets.looks - before, 5);
    }

    #[test]
    fn one_local_peer_that_writes_nonsense_or_without_end_does_not_keep_the_others() {
        let (mut from, mut to) = pair(5);
        let (mut flood, mut liar) = (Process::new(11, 5), Process::new(12, 5));
        flood.discover(&to);
        liar.discover(&to);
        let near = path(&to);
        let frames: Vec<_> = (0..100).map(|psn| frame(near, 9, psn, b"much")).collect();
        flood.wire().send(START, &frames, &NoMemory);
        let mut bad = frame(near, 9, 1, b"nonsense");
        bad.header[0] = 0xff;
        liar.wire().send(START, &[bad], &NoMemory);
        from.wire().send(START, &[frame(near, 9, 2, b"good")], &NoMemory);
        let mut seen = 0;
        let taken = to.wire().receive(START, &mut |_| seen += 1);
        assert_eq!((taken, seen), (MAX_TAKEN + 2, MAX_TAKEN + 1));
        assert_eq!(to.peers.counters().malformed, 1);
        // An address that the liar does not have.
        let outgoing = &liar.peers.packets.outgoing[0];
        let tag = Tag { source: 2, dest: 1, tos: 0, hop_limit: 1 };
        let good = frame(near, 9, 1, b"good");
        let push = |tag| {
            let fifo = outgoing.fifo.as_ref().expect("accepted");
            assert!(locked(fifo).writer.push(tag, &good.header));
        };
        push(tag);
        push(Tag { source: 1, dest: 2, ..tag });
        to.received(START);
        assert_eq!(to.peers.counters().malformed, 3);
        assert_eq!(to.peers.counters().broken, 0);
    }

    #[test]
    fn who_has_ended_is_sent_nothing_and_its_place_is_free_again() {
        let (mut from, to) = pair(6);
        let near = path(&to);
        drop(to);
        from.wire().send(START, &[frame(near, 9, 4, b"late")], &NoMemory);
        assert_eq!(from.sockets.sent, [4]);
        // More than there are places for, one after the other: the last one is accepted as well.
        let mut to = Process::new(9, 6);
        for _ in 0..2 * MAX_INCOMING {
            let mut other = Process::new(13, 6);
            other.discover(&to);
            to.received(START);
        }
        // And at the same time: those that find no place use sockets.
        let many: Vec<_> = (20..20 + MAX_INCOMING as u8 + 3)
            .map(|slot| {
                let other = Process::new(slot, 6);
                let remote = SocketAddr::new(to.ip, ROCE_PORT);
                let target = other.peers.shared().discover(remote, to.slot).expect("an exchange");
                let accepted = target.has_fifo();
                to.received(START);
                (other, accepted)
            })
            .collect();
        assert_eq!(many.iter().filter(|(_, accepted)| *accepted).count(), MAX_INCOMING);
    }
}
