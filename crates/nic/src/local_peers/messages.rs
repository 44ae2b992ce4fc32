//! SENDs between local peers without packets (`roce::direct`): through the same FIFOs, one message
//! each.
//!
//! The sender puts a message into the FIFO of the process that it is for, with what the receiver
//! needs to know of it ([`MessageHeader`]). The receiver's endpoint takes it into a receive or
//! refuses it. The acknowledgement costs nothing: the lines that the reader gives back are those
//! that it has decided on, and it lists the few that it refuses ([`fifo`](super::fifo)).
//!
//! Who sends a message wakes the receiver if it sleeps, and who decides on one wakes the sender.
//!
//! A header comes from another process. It is compared with the queue pair that it names, whose
//! peer must have the address and the queue pair number of the sender, and nothing in this process
//! is addressed by it.

use std::net::SocketAddr;

use roce::direct::{DirectRefusal, Handed, Message, MessageAck, MessageHeader};
use roce::endpoint::Endpoint;
use roce::verbs::{Path, Qpn};
use roce::wire::Psn;
use roce::world::{self, Memory};
use roce::{Duration, Time};

use super::fifo::{Kind, Tag};
use super::packets::{Doorbell, Incoming, MAX_TAKEN, Outgoing};
use super::segment::ADDRESSES;
use super::{LocalPeers, OWN_PORT, SLOT_SHIFT, Target, locked};

/// Messages to one process without an acknowledgement: its FIFO has as many lines.
const MAX_UNACKED: usize = 4096;

/// How long a local peer may read nothing before its connections fail. A process with a port to
/// itself gives a stopped peer up soon, as with packets; the others excuse it for as long.
const OWN_PATIENCE: Duration = Duration::from_millis(1_000);
const PATIENCE: Duration = Duration::from_millis(300_000);

/// A header in a FIFO.
const HEADER_BYTES: usize = 20;

/// Where the destination is in a header, in words, and the number that no queue pair of a program
/// has: its reader refuses the message.
const DEST_WORD: usize = 1;
const NOBODY: u32 = 0;

const HAS_IMM: u32 = 1 << 24;
const IS_SOLICITED: u32 = 1 << 25;

fn encode(header: &MessageHeader) -> [u8; HEADER_BYTES] {
    let flag = |set: bool, flag: u32| if set { flag } else { 0 };
    let flags = flag(header.imm.is_some(), HAS_IMM) | flag(header.solicited, IS_SOLICITED);
    let words = [
        header.source.get(),
        header.dest.get(),
        header.first_psn.get() | flags,
        header.round,
        header.imm.unwrap_or(0),
    ];
    let mut bytes = [0; HEADER_BYTES];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// A header and the message's bytes; `None` where there are too few.
fn decode(bytes: &[u8]) -> Option<(MessageHeader, &[u8])> {
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let mut words = header.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
    let mut next = || words.next().unwrap_or(0);
    let (source, dest, psn, round, imm) = (next(), next(), next(), next(), next());
    let header = MessageHeader {
        source: Qpn::new(source),
        dest: Qpn::new(dest),
        first_psn: Psn::new(psn),
        round,
        imm: (psn & HAS_IMM != 0).then_some(imm),
        solicited: psn & IS_SOLICITED != 0,
        len: u32::try_from(payload.len()).ok()?,
    };
    Some((header, payload))
}

/// Puts a message into the FIFO of a process.
pub(super) fn hand_over(target: &Target, message: &Message<'_>) -> Result<(), DirectRefusal> {
    let fifo = target.fifo.as_ref().ok_or(DirectRefusal::NotDirect)?;
    if !target.segment.is_owned() {
        return Err(DirectRefusal::System);
    }
    // The reader knows no others.
    if usize::from(message.path.source) >= ADDRESSES {
        return Err(DirectRefusal::NotDirect);
    }
    let mut fifo = locked(fifo);
    if fifo.unacked.messages.len() >= MAX_UNACKED {
        return Err(DirectRefusal::Full);
    }
    let Message { header, path, local } = message;
    let tag = Tag { source: path.source, dest: fifo.dest, tos: 0, hop_limit: path.hop_limit };
    let len = HEADER_BYTES + header.len as usize;
    let head = encode(header);
    let begin = fifo.writer.push_message(tag, len, |mut to| {
        let mut left = header.len;
        // SAFETY: the FIFO has room for the header and the bytes that it counts, and no more are
        // copied. The pieces lie in registered memory, which is readable: the endpoint has checked
        // its rights.
        unsafe {
            to.copy_from_nonoverlapping(head.as_ptr(), head.len());
            to = to.add(head.len());
            for piece in *local {
                let len = piece.len.min(left);
                to.copy_from(piece.addr as *const u8, len as usize);
                to = to.add(len as usize);
                left -= len;
            }
        }
    });
    let begin = begin.ok_or(DirectRefusal::Full)?;
    let handed = Handed { source: header.source, round: header.round };
    if fifo.unacked.is_empty() {
        fifo.unacked.progress = None;
    }
    fifo.unacked.messages.push_back((begin, handed));
    Ok(())
}

impl Outgoing {
    /// Whether there are acknowledgements to take.
    pub(super) fn has_acks(&mut self) -> bool {
        let tail = self.writer.progress();
        self.unacked.is_decided(tail)
    }

    /// The connection of a queue pair has ended: its messages that were not read must not reach a
    /// later one.
    pub(super) fn withdraw_messages(&mut self, source: Qpn) {
        let Outgoing { writer, unacked, .. } = self;
        unacked.forget(source, |begin| writer.overwrite(begin, DEST_WORD, NOBODY));
    }

    /// Passes acknowledgements on; returns how many.
    fn take_acks(
        &mut self,
        now: Time,
        (lives, patience): (bool, Duration),
        mut sink: impl FnMut(Handed, MessageAck),
    ) -> usize {
        let Outgoing { writer, unacked, .. } = self;
        let tail = writer.progress();
        writer.take_refusals(|begin| {
            if unacked.refused.len() < MAX_UNACKED {
                unacked.refused.push_back(begin);
            }
        });
        let mut taken = 0;
        while let Some((handed, ack)) = unacked.next(tail) {
            sink(handed, ack);
            taken += 1;
        }
        if unacked.is_given_up(tail, now, patience) || !lives {
            taken += unacked.messages.len();
            unacked.messages.drain(..).for_each(|(_, handed)| sink(handed, MessageAck::Lost));
        }
        taken
    }
}

impl Incoming {
    fn holds_messages(&mut self) -> bool {
        self.holds_packets() && self.reader.front() == Ok(Some(Kind::Message))
    }
}

impl LocalPeers {
    /// Whether there are acknowledgements on messages of this process.
    pub(super) fn has_acks(&self) -> bool {
        let fifos = self.packets.outgoing.iter().filter_map(|target| target.fifo.as_ref());
        fifos.into_iter().any(|fifo| locked(fifo).has_acks())
    }

    /// Takes messages of local peers, a bounded number, and their acknowledgements on those of this
    /// process. Returns how many of both.
    pub fn exchange_messages<M: Memory>(
        &mut self,
        endpoint: &mut Endpoint,
        memory: &mut M,
        wire: &mut impl Doorbell,
        now: Time,
    ) -> usize {
        self.exchange_acks(endpoint, now) + self.exchange_incoming(endpoint, memory, wire, now)
    }

    /// The part of [`exchange_messages`](LocalPeers::exchange_messages) that takes
    /// acknowledgements, also those that the endpoint does not await any more because the queue
    /// pair has failed: they would end each sleep.
    pub fn exchange_acks(&mut self, endpoint: &mut Endpoint, now: Time) -> usize {
        if self.may_be_awaited { self.take_acks(endpoint, now) } else { 0 }
    }

    /// The part of [`exchange_messages`](LocalPeers::exchange_messages) that takes messages.
    pub fn exchange_incoming<M: Memory>(
        &mut self,
        endpoint: &mut Endpoint,
        memory: &mut M,
        wire: &mut impl Doorbell,
        now: Time,
    ) -> usize {
        self.adopt();
        let (mut done, mut at) = (0, 0);
        while at < self.packets.incoming.len() {
            if self.packets.incoming[at].holds_messages() {
                let taken = self.take_messages(at, endpoint, memory, wire, now);
                done += taken.unwrap_or(0);
                if taken.is_none() {
                    self.packets.counters.broken += 1;
                    self.packets.incoming.swap_remove(at);
                    continue;
                }
            }
            at += 1;
        }
        done
    }

    fn take_acks(&mut self, endpoint: &mut Endpoint, now: Time) -> usize {
        endpoint.note_acks_looked_for(now);
        let patience = if self.shared.slot == OWN_PORT { OWN_PATIENCE } else { PATIENCE };
        let (mut done, mut is_awaited) = (0, false);
        for target in &self.packets.outgoing {
            // Before the look at what it has read: nothing is read after its end.
            let lives = target.segment.is_owned();
            let Some(mut fifo) = target.fifo.as_ref().map(locked) else { continue };
            if !fifo.unacked.is_empty() {
                done += fifo.take_acks(now, (lives, patience), |handed, ack| {
                    endpoint.handle_message_ack(now, handed, ack);
                });
                is_awaited |= !fifo.unacked.is_empty();
            }
        }
        self.may_be_awaited = is_awaited;
        done
    }

    /// Takes messages out of one FIFO. `None` when it is broken.
    fn take_messages<M: Memory>(
        &mut self,
        at: usize,
        endpoint: &mut Endpoint,
        memory: &mut M,
        wire: &mut impl Doorbell,
        now: Time,
    ) -> Option<usize> {
        let packets = &mut self.packets;
        let (one, bytes) = (&mut packets.incoming[at], &mut packets.bytes);
        let (mut taken, mut read_at) = (0, None);
        while taken < MAX_TAKEN {
            let Some((tag, begin)) = one.reader.pop(Kind::Message, bytes).ok()? else {
                break;
            };
            taken += 1;
            let from = one.addresses.get(usize::from(tag.source)).copied();
            let decoded = decode(bytes);
            packets.counters.malformed += u64::from(from.is_none() || decoded.is_none());
            let is_taken = from.zip(decoded).is_some_and(|(from, (header, payload))| {
                read_at = Some((tag.dest, from));
                world::take_message(endpoint, memory, now, from, (&header, payload))
            });
            if !is_taken {
                one.reader.refuse(begin);
            }
        }
        one.reader.release();
        if let Some((source, from)) = read_at
            && let Some(sleep) = one.segment.sleep()
            && one.rung.must_ring(sleep)
        {
            packets.counters.doorbells += 1;
            // Not by one of the queue pairs: the sender waits for its acknowledgements also where
            // they are gone.
            let (port, slot) = one.segment.at();
            let path = Path { source, ..Path::new(SocketAddr::new(from, port)) };
            wire.wake(&path, Qpn::new(u32::from(slot) << SLOT_SHIFT));
        }
        Some(taken)
    }

    /// Wakes the local peers for messages that were just handed over, if they sleep.
    pub fn wake_for_messages(&mut self, endpoint: &Endpoint, wire: &mut impl Doorbell) {
        if self.to_wake.is_empty() {
            return;
        }
        let LocalPeers { to_wake, routes, packets, .. } = self;
        for source in to_wake.drain(..) {
            let must = routes.get(&source.get()).is_some_and(|target| target.must_ring());
            if must && let Some((path, dest)) = endpoint.destination(source) {
                packets.counters.doorbells += 1;
                wire.wake(&path, dest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use roce::device;
    use roce::direct::{Direct, Posted};
    use roce::endpoint::{Connect, EndpointConfig, QpConfig, QpState};
    use roce::verbs::{
        Access, Completion, CqId, MemoryRegion, PdId, RecvWr, SendOp, SendWr, Sge, Transport,
        WcOpcode, WcStatus,
    };
    use roce::wire::ROCE_PORT;
    use roce::world::{RxFrame, TxFrame, Wire};

    use super::super::hostile::ip;
    use super::*;
    use crate::pool::Pool;

    /// Longer after the clock's beginning than any patience.
    const START: Time = Time::from_nanos(1_000_000_000_000);
    const BYTES: u64 = 1 << 16;

    /// The numbers before are those of other tests.
    const FIRST_TEST: u8 = 80;

    /// Sockets that carry nothing and count doorbells.
    #[derive(Default)]
    struct Sockets {
        woken: Vec<Qpn>,
    }

    impl Doorbell for Sockets {
        fn wake(&mut self, _path: &Path, dest: Qpn) {
            self.woken.push(dest);
        }
    }

    impl Wire for Sockets {
        fn send(&mut self, _: Time, _: &[TxFrame<'_>], _: &dyn Memory) {}

        fn receive(&mut self, _: Time, _: &mut dyn FnMut(&RxFrame<'_>)) -> usize {
            0
        }

        fn admits(&mut self, _: Time, _: &Path, _: Qpn, _: Transport, packets: usize) -> usize {
            packets
        }

        fn next_wakeup(&self) -> Option<Time> {
            None
        }

        fn is_stalled(&mut self, _: &Path, _: Qpn) -> bool {
            false
        }
    }

    /// One of two processes, in one.
    struct Side {
        endpoint: Endpoint,
        peers: LocalPeers,
        sockets: Sockets,
        memory: Pool,
        region: MemoryRegion,
        pd: PdId,
        cq: CqId,
        qpn: Qpn,
        slot: u8,
        ip: IpAddr,
    }

    impl Side {
        fn new(slot: u8, ip: IpAddr) -> Side {
            let config =
                EndpointConfig { qpn_prefix: slot, seed: slot.into(), ..Default::default() };
            let mut endpoint = Endpoint::new(config);
            let peers = LocalPeers::open(ROCE_PORT, slot, &[ip]).expect("shared memory");
            let mut memory = Pool::on_demand(BYTES).expect("a small pool");
            let base = memory.alloc(BYTES, 4096).expect("room").addr;
            let pd = endpoint.alloc_pd();
            let region = endpoint.register(pd, base, BYTES, Access::ALL).expect("room");
            let cq = endpoint.create_cq(512).expect("room");
            let qpn = endpoint.create_qp(QpConfig::rc(pd, cq, 64, 64)).expect("room");
            let sockets = Sockets::default();
            Side { endpoint, peers, sockets, memory, region, pd, cq, qpn, slot, ip }
        }

        fn first_psn(&self) -> Psn {
            self.endpoint.query_qp(self.qpn).expect("it exists").sq_psn
        }

        fn at(&self) -> SocketAddr {
            SocketAddr::new(self.ip, ROCE_PORT)
        }

        fn connect(&mut self, other: &Side) {
            let peer = Connect::new(Path::new(other.at()), other.qpn, other.first_psn());
            device::connect(&mut self.endpoint, START, self.qpn, &peer).expect("legal");
            let target = self.peers.shared().discover(other.at(), other.slot);
            self.peers.route(self.qpn, Some(target.expect("an exchange")));
        }

        fn send(&mut self, wr_id: u64, op: SendOp, bytes: &[u8]) -> Posted {
            let addr = self.region.addr + wr_id % 32 * 1024;
            self.memory.scatter(addr, bytes);
            let sge = Sge { addr, len: bytes.len() as u32, lkey: self.region.lkey };
            let sges = std::iter::once(sge).collect();
            let wr = SendWr { wr_id, op, sges, signaled: true, ..SendWr::default() };
            let posted = self.endpoint.post_send_direct(START, self.qpn, wr, &mut self.peers);
            self.peers.wake_for_messages(&self.endpoint, &mut self.sockets);
            posted.expect("legal")
        }

        fn receive(&mut self, wr_id: u64, len: u32) {
            let addr = self.region.addr + wr_id % 32 * 1024;
            let sge = Sge { addr, len, lkey: self.region.lkey };
            let wr = RecvWr { wr_id, sges: std::iter::once(sge).collect() };
            self.endpoint.post_recv(START, self.qpn, wr).expect("room");
        }

        fn bytes(&self, wr_id: u64, len: usize) -> Vec<u8> {
            let mut bytes = vec![0; len];
            self.memory.gather(self.region.addr + wr_id % 32 * 1024, &mut bytes);
            bytes
        }

        /// A turn; returns what it did.
        fn turn(&mut self, now: Time) -> usize {
            let Side { endpoint, peers, sockets, memory, qpn, .. } = self;
            let messages = peers.exchange_messages(endpoint, memory, sockets, now);
            let mut budget = 1 << 20;
            let _ = endpoint.carry_out_held(now, *qpn, peers, &mut budget);
            peers.wake_for_messages(endpoint, sockets);
            let wire = &mut peers.wire(sockets);
            let packets = world::turn(endpoint, wire, memory, now, |_, _| false);
            messages + packets.received + packets.sent
        }

        fn completions(&mut self) -> Vec<Completion> {
            std::iter::from_fn(|| self.endpoint.poll_cq(self.cq)).collect()
        }

        fn done(&mut self) -> Vec<(u64, WcStatus)> {
            self.completions().iter().map(|done| (done.wr_id, done.status)).collect()
        }
    }

    /// Two connected processes. The number keeps tests apart that run at the same time.
    fn pair(test: u8, slots: [u8; 2]) -> [Side; 2] {
        let ips = [ip(FIRST_TEST + 2 * test), ip(FIRST_TEST + 2 * test + 1)];
        let [mut a, mut b] = [0, 1].map(|side| Side::new(slots[side], ips[side]));
        a.connect(&b);
        b.connect(&a);
        [a, b]
    }

    fn run(a: &mut Side, b: &mut Side, mut now: Time) -> Time {
        for _ in 0..10_000 {
            if a.turn(now) + b.turn(now) == 0 && a.endpoint.poll_timeout().is_none() {
                break;
            }
            now += Duration::from_micros(50);
        }
        now
    }

    #[test]
    fn messages_arrive_whole_and_complete_both_sides_without_a_packet() {
        let [mut a, mut b] = pair(0, [7, 9]);
        for wr_id in 0..20_u64 {
            b.receive(wr_id, 1024);
            let len = [0, 1, 31, 32, 33, 700][wr_id as usize % 6];
            let bytes = vec![wr_id as u8 + 1; len];
            let op = if wr_id % 3 == 0 { SendOp::SendImm(wr_id as u32) } else { SendOp::Send };
            assert_eq!(a.send(wr_id, op, &bytes), Posted::HandedOver);
        }
        assert!(a.endpoint.awaits_message_acks() && a.completions().is_empty());
        run(&mut a, &mut b, START);
        assert!(!a.endpoint.awaits_message_acks());
        for (wr_id, done) in (0..).zip(b.completions()) {
            let len = [0, 1, 31, 32, 33, 700][wr_id as usize % 6];
            assert_eq!(
                (done.wr_id, done.opcode, done.status),
                (wr_id, WcOpcode::Recv, WcStatus::Success)
            );
            assert_eq!(done.byte_len as usize, len);
            assert_eq!(done.imm, (wr_id % 3 == 0).then_some(wr_id as u32));
            assert_eq!(b.bytes(wr_id, len), vec![wr_id as u8 + 1; len]);
        }
        assert_eq!(a.done(), (0..20).map(|wr_id| (wr_id, WcStatus::Success)).collect::<Vec<_>>());
        assert_eq!(a.endpoint.counters().packets_sent + b.endpoint.counters().packets_sent, 0);
        assert_eq!(b.endpoint.counters().direct_receives, 20);
    }

    #[test]
    fn messages_without_a_receive_become_packets_and_keep_their_order() {
        let [mut a, mut b] = pair(1, [7, 9]);
        (0..2).for_each(|wr_id| b.receive(wr_id, 64));
        for wr_id in 0..6_u64 {
            assert_eq!(a.send(wr_id, SendOp::Send, &[wr_id as u8; 8]), Posted::HandedOver);
        }
        let now = START;
        (0..20).for_each(|_| {
            b.turn(now);
            a.turn(now);
        });
        assert_eq!((a.done().len(), b.done().len()), (2, 2));
        assert_eq!(a.endpoint.counters().direct_sends_refused, 4);
        // It waits for packets, and so does what is behind it.
        assert_eq!(a.send(6, SendOp::Send, &[6; 8]), Posted::Queued);
        (2..7).for_each(|wr_id| b.receive(wr_id, 64));
        run(&mut a, &mut b, now);
        let order: Vec<u64> = (2..7).collect();
        assert_eq!(b.completions().iter().map(|done| done.wr_id).collect::<Vec<_>>(), order);
        for wr_id in 2..7 {
            assert_eq!(b.bytes(wr_id, 8), [wr_id as u8; 8]);
        }
        assert_eq!(a.done().len(), 5);
    }

    #[test]
    fn a_local_peer_that_ends_fails_the_connection_at_once() {
        let [mut a, mut b] = pair(2, [7, 9]);
        b.receive(0, 64);
        a.send(0, SendOp::Send, b"taken");
        b.turn(START);
        a.send(1, SendOp::Send, b"not");
        a.send(2, SendOp::Send, b"nor this");
        drop(b);
        a.turn(START);
        let failed =
            [(0, WcStatus::Success), (1, WcStatus::RetryExceeded), (2, WcStatus::WrFlushError)];
        assert_eq!(a.done(), failed);
        assert_eq!(a.endpoint.qp_state(a.qpn), Some(QpState::Error));
    }

    #[test]
    fn a_stopped_local_peer_is_excused_but_not_by_a_process_with_a_port_to_itself() {
        for (test, slot) in [(3, 7), (4, OWN_PORT)] {
            let [mut a, _b] = pair(test, [slot, 9]);
            a.send(0, SendOp::Send, b"unread");
            for at in 0..20 {
                a.turn(START + Duration::from_millis(100 * at));
            }
            let is_given_up = !a.done().is_empty();
            assert_eq!(is_given_up, slot == OWN_PORT, "slot {slot}");
        }
    }

    #[test]
    fn sleepers_are_woken_for_messages_and_for_acks() {
        let [mut a, mut b] = pair(5, [7, 9]);
        b.receive(0, 64);
        b.receive(1, 64);
        a.send(0, SendOp::Send, b"awake");
        assert!(a.sockets.woken.is_empty());
        b.turn(START);
        assert!(b.sockets.woken.is_empty());
        a.turn(START);
        assert!(b.peers.fall_asleep());
        a.send(1, SendOp::Send, b"wake up");
        assert_eq!(a.sockets.woken, [b.qpn]);
        assert!(a.peers.fall_asleep());
        b.peers.shared().wake_up();
        b.turn(START);
        let slots: Vec<_> = b.sockets.woken.iter().map(|qpn| qpn.get() >> SLOT_SHIFT).collect();
        assert_eq!(slots, [u32::from(a.slot)]);
        a.peers.shared().wake_up();
        a.turn(START);
        assert_eq!((a.done().len(), b.done().len()), (2, 2));
        // A acknowledgement that comes before the sleep keeps it from beginning.
        b.receive(2, 64);
        a.send(2, SendOp::Send, b"early");
        b.turn(START);
        assert!(!a.peers.fall_asleep());
        a.peers.shared().wake_up();
        a.turn(START);
        assert!(a.peers.fall_asleep());
    }

    #[test]
    fn messages_of_a_queue_pair_that_is_gone_keep_nothing() {
        let [mut a, b] = pair(7, [7, 9]);
        a.send(0, SendOp::Send, b"unread");
        a.endpoint.destroy_qp(START, a.qpn).expect("it exists");
        assert!(!a.endpoint.awaits_message_acks());
        drop(b);
        a.peers.route(a.qpn, None);
        assert!(a.peers.packets.outgoing.is_empty());
    }

    #[test]
    fn messages_of_liars_are_refused_and_place_nothing() {
        let [mut a, mut b] = pair(6, [7, 9]);
        b.receive(0, 64);
        let honest = MessageHeader {
            source: a.qpn,
            dest: b.qpn,
            first_psn: a.first_psn(),
            round: 99,
            imm: None,
            solicited: false,
            len: 4,
        };
        let lies = [
            MessageHeader { source: Qpn::new(a.qpn.get() ^ 1), ..honest },
            MessageHeader { dest: Qpn::new(b.qpn.get() ^ 1), ..honest },
            MessageHeader { first_psn: honest.first_psn.next(), ..honest },
            MessageHeader { len: 65, ..honest },
        ];
        let bytes = [0xee_u8; 128];
        let local = |len| [roce::endpoint::Placement { addr: bytes.as_ptr() as u64, len }];
        for header in lies {
            let message = Message { header, path: Path::new(b.at()), local: &local(header.len) };
            let target = a.peers.routes[&a.qpn.get()].clone();
            hand_over(&target, &message).expect("room");
            b.turn(START);
        }
        // From an address that the process has not, and less than a header.
        let target = a.peers.routes[&a.qpn.get()].clone();
        let mut fifo = locked(target.fifo.as_ref().expect("one"));
        let tag = Tag { source: 9, dest: 0, tos: 0, hop_limit: 0 };
        fifo.writer.push_message(tag, HEADER_BYTES, |_| ()).expect("room");
        let short = Tag { source: 0, ..tag };
        fifo.writer.push_message(short, 3, |_| ()).expect("room");
        drop(fifo);
        b.turn(START);
        assert!(b.done().is_empty());
        assert_eq!(b.endpoint.counters().direct_receives_refused, 4);
        assert_eq!(b.peers.counters().malformed, 2);
        assert_eq!(b.bytes(0, 64), [0; 64]);
        let _ = a.turn(START);
        // The connection itself is as well as before.
        assert_eq!(a.send(1, SendOp::Send, b"good"), Posted::HandedOver);
        run(&mut a, &mut b, START);
        assert_eq!((b.done(), b.bytes(0, 4)), (vec![(0, WcStatus::Success)], b"good".to_vec()));
        assert!(a.peers.takes_messages(a.qpn) && a.pd == b.pd);
    }

    /// A second connection between the two; returns its queue pairs.
    fn second(a: &mut Side, b: &mut Side) -> [Qpn; 2] {
        let first = [a.qpn, b.qpn];
        a.qpn = a.endpoint.create_qp(QpConfig::rc(a.pd, a.cq, 64, 64)).expect("room");
        b.qpn = b.endpoint.create_qp(QpConfig::rc(b.pd, b.cq, 64, 64)).expect("room");
        a.connect(b);
        b.connect(a);
        let second = [a.qpn, b.qpn];
        [a.qpn, b.qpn] = first;
        second
    }

    fn send_on(side: &mut Side, qpn: Qpn, wr_id: u64, bytes: &[u8]) -> Posted {
        let first = std::mem::replace(&mut side.qpn, qpn);
        let posted = side.send(wr_id, SendOp::Send, bytes);
        side.qpn = first;
        posted
    }

    #[test]
    fn a_sleeping_sender_is_woken_also_for_messages_to_queue_pairs_that_are_gone() {
        for gone in [0, 1, 2] {
            let [mut a, mut b] = pair(12 + gone, [7, 9]);
            let [a2, b2] = second(&mut a, &mut b);
            b.receive(0, 64);
            a.send(0, SendOp::Send, b"first");
            send_on(&mut a, a2, 1, b"second");
            for qpn in [b2, b.qpn].into_iter().take(gone.into()) {
                b.peers.withdraw_qp(qpn);
                b.endpoint.destroy_qp(START, qpn).expect("it exists");
            }
            assert!(a.peers.fall_asleep());
            b.turn(START);
            assert!(a.peers.has_acks());
            assert_eq!(b.sockets.woken.len(), 1, "{gone} of two queue pairs are gone");
            assert_eq!(b.sockets.woken[0].get() >> SLOT_SHIFT, 7);
        }
    }

    #[test]
    fn a_sender_with_acks_does_not_fall_asleep_whatever_it_has_looked_at_before() {
        for look in 0..4 {
            let [mut a, mut b] = pair(15 + look, [7, 9]);
            b.receive(0, 64);
            a.send(0, SendOp::Send, b"first");
            b.turn(START);
            let path = Path::new(b.at());
            let Side { peers, sockets, .. } = &mut a;
            let mut wire = peers.wire(sockets);
            match look {
                0 => {}
                1 => assert!(wire.admits(START, &path, b.qpn, Transport::Rc, 64) > 0),
                2 => assert!(!wire.is_stalled(&path, b.qpn)),
                _ => drop(a.send(1, SendOp::Send, &[0; 3000])),
            }
            assert!(!a.peers.fall_asleep(), "look {look}: there is an acknowledgement");
            a.peers.shared().wake_up();
            a.turn(START);
            assert_eq!(a.done()[0], (0, WcStatus::Success));
        }
    }

    #[test]
    fn a_message_of_an_earlier_connection_is_not_taken_by_a_later_one() {
        let [mut a, mut b] = pair(19, [7, 9]);
        a.send(0, SendOp::Send, b"ghost");
        for side in [&mut a, &mut b] {
            let reset = roce::endpoint::QpAttr::to(QpState::Reset);
            side.endpoint.modify_qp(START, side.qpn, &reset).expect("legal");
            side.peers.route(side.qpn, None);
        }
        a.connect(&b);
        b.connect(&a);
        b.receive(1, 64);
        a.send(2, SendOp::Send, b"alive");
        run(&mut a, &mut b, START);
        assert_eq!(b.done(), [(1, WcStatus::Success)]);
        assert_eq!(b.bytes(1, 5), b"alive");
        assert_eq!(a.done(), [(2, WcStatus::Success)]);
    }

    /// Its peer takes what it handed over before it failed, and the acknowledgements are for
    /// nobody.
    #[test]
    fn a_queue_pair_that_fails_with_messages_in_the_fifo_keeps_nobody_awake() {
        let [mut a, mut b] = pair(22, [7, 9]);
        b.receive(0, 64);
        assert_eq!(a.send(0, SendOp::Send, b"last words"), Posted::HandedOver);
        let error = roce::endpoint::QpAttr::to(QpState::Error);
        a.endpoint.modify_qp(START, a.qpn, &error).expect("legal");
        assert!(!a.endpoint.awaits_message_acks());
        b.turn(START);
        a.turn(START);
        assert!(a.peers.fall_asleep(), "it would take turns for ever");
        a.peers.shared().wake_up();
    }

    /// The reader finds a sender's address by its place on the segment, which has room for so many.
    #[test]
    fn messages_from_addresses_beyond_the_board_are_packets() {
        let [mut a, b] = pair(23, [7, 9]);
        let header = MessageHeader {
            source: a.qpn,
            dest: b.qpn,
            first_psn: Psn::new(1),
            round: 0,
            imm: None,
            solicited: false,
            len: 0,
        };
        for (source, done) in [(0, Ok(())), (ADDRESSES as u8, Err(DirectRefusal::NotDirect))] {
            let path = Path { source, ..Path::new(b.at()) };
            let handed = a.peers.hand_over(&Message { header, path, local: &[] });
            assert_eq!(handed, done, "{source}");
        }
    }

    /// Two exchanges with one process, as two threads at once have made them.
    #[test]
    fn each_of_two_fifos_to_one_process_has_its_acks_and_its_end() {
        let [mut a, mut b] = pair(20, [7, 9]);
        let a2 = a.endpoint.create_qp(QpConfig::rc(a.pd, a.cq, 64, 64)).expect("room");
        let b2 = b.endpoint.create_qp(QpConfig::rc(b.pd, b.cq, 64, 64)).expect("room");
        let first = [std::mem::replace(&mut a.qpn, a2), std::mem::replace(&mut b.qpn, b2)];
        let peer = Connect::new(Path::new(b.at()), b.qpn, b.first_psn());
        device::connect(&mut a.endpoint, START, a.qpn, &peer).expect("legal");
        let another = a.peers.shared().swap(b.at(), b.slot).expect("an exchange");
        a.peers.route(a.qpn, Some(Arc::new(another)));
        b.connect(&a);
        b.receive(1, 64);
        [a.qpn, b.qpn] = first;
        b.receive(0, 64);
        for (wr_id, qpn) in [(0, a.qpn), (1, a2)] {
            assert_eq!(send_on(&mut a, qpn, wr_id, b"bytes"), Posted::HandedOver);
        }
        run(&mut a, &mut b, START);
        let mut done = a.done();
        done.sort_unstable_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(done, [(0, WcStatus::Success), (1, WcStatus::Success)]);
        // Nobody reads any more: after the patience both connections fail.
        for (wr_id, qpn) in [(2, a.qpn), (3, a2)] {
            assert_eq!(send_on(&mut a, qpn, wr_id, b"bytes"), Posted::HandedOver);
        }
        a.turn(START);
        a.turn(START + PATIENCE);
        let failed: Vec<_> = a.done().iter().map(|(_, status)| *status).collect();
        assert_eq!(failed, [WcStatus::RetryExceeded; 2]);
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        for imm in [None, Some(0), Some(u32::MAX)] {
            for solicited in [false, true] {
                let (source, dest) = (Qpn::new(0xff_ffff), Qpn::new(1));
                let (first_psn, round) = (Psn::new(0xff_fffe), u32::MAX);
                let header =
                    MessageHeader { source, dest, first_psn, round, imm, solicited, len: 2 };
                let bytes = [&encode(&header)[..], b"ab"].concat();
                assert_eq!(decode(&bytes), Some((header, &b"ab"[..])));
            }
        }
        assert_eq!(decode(&[0; HEADER_BYTES - 1]), None);
    }
}
