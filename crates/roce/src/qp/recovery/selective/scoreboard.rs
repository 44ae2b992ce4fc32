//! The sender's record of every unacknowledged packet.
//!
//! Packets are kept by PSN, in a ring, and linked in a list in the order of their *latest*
//! transmission. Losses are found by that order: a packet sent clearly before one that has arrived,
//! and which has not arrived itself, is lost. As a retransmitted packet moves to the end of the
//! list, a lost retransmission is found the same way (the idea of RACK, RFC 8985).
//!
//! ```text
//!   una                                    end
//!   | delivered | in flight | lost | in flight |        by PSN
//!   oldest -> ... -> latest                             in flight only, by transmission
//! ```
//!
//! The receiver may withdraw what it has reported (it discards packets that it turns out not to be
//! able to use). Its SACKs are numbered, and the latest one counts.
//!
//! The ring grows with the packets that are unacknowledged at a time, up to the window: most
//! connections never fill theirs, a receiver sends nothing, and a small ring stays in the cache.
//!
//! No packet format and no clock in here: PSNs, times and SACKs come in, losses go out.

use alloc::boxed::Box;
use alloc::vec;

use crate::time::{Duration, Time};
use crate::wire::{Psn, Sack};

/// Packets delivered that were sent after a missing one, until that counts as lost.
const REORDER_PACKETS: u32 = 3;

/// That number grows when packets turn out to have been reordered, up to this.
const MAX_REORDER_PACKETS: u32 = 256;

/// Most packets of a scoreboard, a power of two: packets are known by this many of their PSNs,
/// however large the ring is.
const MAX_PACKETS: u32 = 1 << 15;

/// Packets that the first ring holds.
const FIRST_PACKETS: usize = 16;

/// No packet.
const NONE: u16 = u16::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Delivered,
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    state: State,
    /// Transmitted more than once.
    is_retransmitted: bool,
    /// Was marked lost because packets sent after it had arrived.
    marked_by_order: bool,
    sent_at: Time,
    /// Number of its latest transmission.
    order: u64,
    earlier: u16,
    later: u16,
}

const UNUSED: Packet = Packet {
    state: State::Delivered,
    is_retransmitted: false,
    marked_by_order: false,
    sent_at: Time::ZERO,
    order: 0,
    earlier: NONE,
    later: NONE,
};

/// The result of an acknowledgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AckSummary {
    /// Packets newly known to have arrived.
    pub(crate) delivered: u32,
    /// The round-trip time of the latest of them that was sent only once.
    pub(crate) rtt: Option<Duration>,
    /// Packets marked lost that arrived after all: before they were retransmitted, or too soon
    /// after that to be the retransmission.
    pub(crate) spurious: u32,
    /// Those of them that were marked by order, so reordering was mistaken for loss.
    reordered: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Scoreboard {
    /// By PSN modulo its length, a power of two; empty until the first packet is sent.
    ring: Box<[Packet]>,
    /// Most packets.
    limit: u32,
    una: Psn,
    end: Psn,
    oldest: u16,
    latest: u16,
    in_flight: u32,
    lost: u32,
    /// No packet before it is lost.
    lost_from: Psn,
    transmissions: u64,
    /// Transmission number and time of the latest transmitted packet that has arrived.
    newest: Option<(u64, Time)>,
    /// Number of the latest SACK.
    serial: Option<u32>,
    reorder_packets: u32,
    /// The latest round-trip time of a packet that was sent only once.
    recent_rtt: Option<Duration>,
    min_rtt: Option<Duration>,
}

impl Scoreboard {
    /// For up to `window` packets, at most [`MAX_PACKETS`], the first of which is `first`.
    pub(crate) fn new(first: Psn, window: u32) -> Scoreboard {
        Scoreboard {
            ring: Box::default(),
            limit: window.clamp(1, MAX_PACKETS),
            una: first,
            end: first,
            oldest: NONE,
            latest: NONE,
            in_flight: 0,
            lost: 0,
            lost_from: first,
            transmissions: 0,
            newest: None,
            serial: None,
            reorder_packets: REORDER_PACKETS,
            recent_rtt: None,
            min_rtt: None,
        }
    }

    /// The oldest packet that is not acknowledged.
    pub(crate) fn una(&self) -> Psn {
        self.una
    }

    /// Packets from `una` to the latest one sent.
    pub(crate) fn span(&self) -> u32 {
        self.end.distance_from(self.una) as u32
    }

    /// Packets sent and neither known to have arrived nor marked lost.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether [`next_lost`](Scoreboard::next_lost) returns something.
    pub(crate) fn has_lost(&self) -> bool {
        self.lost > 0
    }

    /// Whether everything is acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.una == self.end
    }

    /// The number by which a packet is known in here.
    fn number(psn: Psn) -> u16 {
        (psn.get() % MAX_PACKETS) as u16
    }

    #[inline]
    fn index(&self, number: u16) -> usize {
        usize::from(number) & self.ring.len().wrapping_sub(1)
    }

    fn packet(&mut self, number: u16) -> &mut Packet {
        let index = self.index(number);
        &mut self.ring[index]
    }

    /// A packet in flight, if there is one of this number.
    fn get(&self, number: u16) -> Option<&Packet> {
        self.ring.get(self.index(number)).filter(|_| number != NONE)
    }

    /// Doubles the ring.
    #[cold]
    fn grow(&mut self) {
        let packets = (2 * self.ring.len()).max(FIRST_PACKETS);
        let mut ring = vec![UNUSED; packets].into_boxed_slice();
        for ahead in 0..self.span() {
            let psn = self.una.plus(ahead);
            ring[psn.get() as usize & (packets - 1)] = *self.packet(Scoreboard::number(psn));
        }
        self.ring = ring;
    }

    fn contains(&self, psn: Psn) -> bool {
        !psn.is_before(self.una) && psn.is_before(self.end)
    }

    // ---- sending -------------------------------------------------------------------------------

    /// The packet at `end` was sent for the first time. There is room for it.
    pub(crate) fn sent_first(&mut self, now: Time) {
        debug_assert!(self.span() < self.limit);
        if self.span() as usize == self.ring.len() {
            self.grow();
        }
        let number = Scoreboard::number(self.end);
        *self.packet(number) = Packet { sent_at: now, ..UNUSED };
        self.end = self.end.next();
        self.launch(number, now);
    }

    /// A lost packet was retransmitted.
    pub(crate) fn retransmitted(&mut self, psn: Psn, now: Time) {
        let number = Scoreboard::number(psn);
        debug_assert!(self.contains(psn) && self.packet(number).state == State::Lost);
        self.lost -= 1;
        self.packet(number).is_retransmitted = true;
        self.launch(number, now);
    }

    fn launch(&mut self, number: u16, now: Time) {
        let (order, earlier) = (self.transmissions, self.latest);
        self.transmissions += 1;
        self.in_flight += 1;
        let packet = self.packet(number);
        packet.state = State::InFlight;
        (packet.sent_at, packet.order) = (now, order);
        (packet.earlier, packet.later) = (earlier, NONE);
        match earlier {
            NONE => self.oldest = number,
            earlier => self.packet(earlier).later = number,
        }
        self.latest = number;
    }

    /// Removes a packet in flight from the list.
    #[inline]
    fn land(&mut self, number: u16, packet: &Packet, state: State) {
        let &Packet { earlier, later, .. } = packet;
        match earlier {
            NONE => self.oldest = later,
            earlier => self.packet(earlier).later = later,
        }
        match later {
            NONE => self.latest = earlier,
            later => self.packet(later).earlier = earlier,
        }
        self.packet(number).state = state;
        self.in_flight -= 1;
    }

    /// The first lost packet, to be retransmitted.
    pub(crate) fn next_lost(&mut self) -> Option<Psn> {
        if self.lost == 0 {
            return None;
        }
        let mut psn = self.lost_from;
        while psn.is_before(self.end) {
            let number = Scoreboard::number(psn);
            if self.packet(number).state == State::Lost {
                self.lost_from = psn;
                return Some(psn);
            }
            psn = psn.next();
        }
        debug_assert!(false, "lost packets are between una and end");
        None
    }

    // ---- acknowledgements ----------------------------------------------------------------------

    /// Everything before `una` has arrived, and of the packets after that those in `sack`.
    pub(crate) fn handle_ack(&mut self, una: Psn, sack: Option<&Sack>, now: Time) -> AckSummary {
        let mut tally = Tally { now, summary: AckSummary::default(), timed: None };
        self.acknowledge(una, &mut tally);
        if let Some(sack) = sack.filter(|sack| self.is_latest(sack.serial)) {
            self.serial = Some(sack.serial);
            self.take_bits(sack, &mut tally);
        }
        self.take_back_first();
        if let Some(rtt) = tally.summary.rtt {
            self.recent_rtt = Some(rtt);
            self.min_rtt = Some(self.min_rtt.map_or(rtt, |least| least.min(rtt)));
        }
        if tally.summary.reordered > 0 {
            self.reorder_packets = (self.reorder_packets * 2).min(MAX_REORDER_PACKETS);
        }
        tally.summary
    }

    fn is_latest(&self, serial: u32) -> bool {
        self.serial.is_none_or(|known| (serial.wrapping_sub(known) as i32) > 0)
    }

    fn acknowledge(&mut self, una: Psn, tally: &mut Tally) {
        while self.una.is_before(una) && self.una.is_before(self.end) {
            let number = Scoreboard::number(self.una);
            self.deliver(number, tally);
            self.una = self.una.next();
        }
        if self.lost_from.is_before(self.una) {
            self.lost_from = self.una;
        }
    }

    fn deliver(&mut self, number: u16, tally: &mut Tally) {
        let packet = *self.packet(number);
        match packet.state {
            State::Delivered => return,
            State::InFlight => self.land(number, &packet, State::Delivered),
            State::Lost => {
                self.lost -= 1;
                self.packet(number).state = State::Delivered;
            }
        }
        let is_late = packet.state == State::Lost || self.is_too_soon(&packet, tally.now);
        tally.count(&packet, is_late);
        // An earlier transmission arrived: that proves nothing about the packets in between.
        if is_late {
            return;
        }
        if self.newest.is_none_or(|(order, _)| order < packet.order) {
            self.newest = Some((packet.order, packet.sent_at));
        }
    }

    /// Whether a retransmitted packet is acknowledged too soon for that to be the cause. If it was
    /// marked by order, an earlier transmission may still have been queued in the network; queues
    /// grow and shrink, but not by much within a round trip. If it was overdue, that one is long
    /// gone.
    fn is_too_soon(&self, packet: &Packet, now: Time) -> bool {
        let usual = if packet.marked_by_order { self.recent_rtt } else { self.min_rtt };
        let usual = usual.map_or(0, |rtt| rtt.as_nanos());
        packet.is_retransmitted && (now - packet.sent_at).as_nanos() < usual - usual / 8
    }

    fn take_bits(&mut self, sack: &Sack, tally: &mut Tally) {
        for bit in 0..Sack::BITS {
            let psn = sack.start.plus(bit);
            if !self.contains(psn) {
                continue;
            }
            let number = Scoreboard::number(psn);
            match (sack.bits() >> bit & 1 == 1, self.packet(number).state) {
                (true, _) => self.deliver(number, tally),
                (false, State::Delivered) => self.take_back(psn),
                (false, _) => {}
            }
        }
    }

    /// The receiver expects `una`, so that has not arrived, whatever was reported before: a packet
    /// that is there when its turn comes is acknowledged with those before it.
    fn take_back_first(&mut self) {
        let number = Scoreboard::number(self.una);
        if !self.is_empty() && self.packet(number).state == State::Delivered {
            self.take_back(self.una);
        }
    }

    fn take_back(&mut self, psn: Psn) {
        let number = Scoreboard::number(psn);
        let packet = self.packet(number);
        (packet.state, packet.is_retransmitted, packet.marked_by_order) =
            (State::Lost, true, false);
        self.note_lost(psn);
    }

    fn note_lost(&mut self, psn: Psn) {
        if self.lost == 0 || psn.is_before(self.lost_from) {
            self.lost_from = psn;
        }
        self.lost += 1;
    }

    // ---- losses --------------------------------------------------------------------------------

    /// Marks packets in flight lost that were sent before one that has arrived, by
    /// [`REORDER_PACKETS`] transmissions or by the reorder timeout. Returns how many.
    pub(crate) fn mark_lost(&mut self, now: Time, reorder_timeout: Duration) -> u32 {
        let before = self.lost;
        let Some((newest, _)) = self.newest else {
            return 0;
        };
        while self.oldest != NONE {
            let number = self.oldest;
            let packet = *self.packet(number);
            let by_order = packet.order + u64::from(self.reorder_packets) <= newest;
            let by_time = packet.order < newest && packet.sent_at + reorder_timeout <= now;
            if !by_order && !by_time {
                break;
            }
            self.packet(number).marked_by_order = true;
            self.lose(number);
        }
        self.lost - before
    }

    /// When [`mark_lost`](Scoreboard::mark_lost) would mark a packet by time alone.
    pub(crate) fn loss_time(&self, reorder_timeout: impl FnOnce() -> Duration) -> Option<Time> {
        let (newest, _) = self.newest?;
        let oldest = self.get(self.oldest)?;
        (oldest.order < newest).then(|| oldest.sent_at + reorder_timeout())
    }

    fn lose(&mut self, number: u16) {
        // The only PSN between una and end that has this number.
        let offset = u32::from(number).wrapping_sub(self.una.get()) % MAX_PACKETS;
        let packet = *self.packet(number);
        self.land(number, &packet, State::Lost);
        self.note_lost(self.una.plus(offset));
    }

    /// Marks everything in flight lost.
    pub(crate) fn mark_all_lost(&mut self) {
        while self.oldest != NONE {
            self.lose(self.oldest);
        }
    }

    /// Marks `psn` lost: the receiver was not ready for it.
    pub(crate) fn mark_one_lost(&mut self, psn: Psn) {
        let number = Scoreboard::number(psn);
        if !self.contains(psn) {
            return;
        }
        match self.packet(number).state {
            State::InFlight => self.lose(number),
            State::Delivered => self.take_back(psn),
            State::Lost => {}
        }
    }

    /// Marks the packet in flight that was sent last: retransmitted, it requests a SACK of
    /// everything.
    pub(crate) fn mark_latest_lost(&mut self) {
        if self.latest != NONE {
            self.lose(self.latest);
        }
    }

    /// When the latest transmission was, if anything is in flight.
    pub(crate) fn latest_sent(&self) -> Option<Time> {
        self.get(self.latest).map(|packet| packet.sent_at)
    }
}

/// Findings while an acknowledgement is processed.
struct Tally {
    now: Time,
    summary: AckSummary,
    /// Transmission number of the packet that the RTT sample is from.
    timed: Option<u64>,
}

impl Tally {
    /// `is_late`: an earlier transmission arrived, not the latest.
    fn count(&mut self, packet: &Packet, is_late: bool) {
        self.summary.delivered += 1;
        self.summary.spurious += u32::from(is_late);
        self.summary.reordered += u32::from(is_late && packet.marked_by_order);
        let rtt = self.now - packet.sent_at;
        if is_late || packet.is_retransmitted {
            return;
        }
        if self.timed.is_none_or(|order| order < packet.order) {
            self.timed = Some(packet.order);
            self.summary.rtt = Some(rtt);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use alloc::vec::Vec;

    const REORDER_TIMEOUT: Duration = Duration::from_micros(1_000);

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    fn sent(first: u32, count: u32) -> Scoreboard {
        let mut board = Scoreboard::new(Psn::new(first), 512);
        (0..count).for_each(|packet| board.sent_first(at(packet.into())));
        board
    }

    fn sack(serial: u32, start: u32, bits: u128) -> Sack {
        Sack::new(serial, Psn::new(start), bits)
    }

    #[test]
    fn a_hole_is_lost_after_three_later_transmissions() {
        let mut board = sent(0, 10);
        let summary = board.handle_ack(Psn::new(2), Some(&sack(1, 2, 0b110)), at(30));
        assert_eq!((summary.delivered, summary.rtt), (4, Some(Duration::from_micros(26))));
        assert_eq!(board.mark_lost(at(30), REORDER_TIMEOUT), 0);
        board.handle_ack(Psn::new(2), Some(&sack(2, 2, 0b1110)), at(31));
        assert_eq!(board.mark_lost(at(31), REORDER_TIMEOUT), 1);
        assert_eq!(board.next_lost(), Some(Psn::new(2)));
        assert_eq!((board.una(), board.span(), board.in_flight()), (Psn::new(2), 8, 4));
    }

    #[test]
    fn patience_decides_when_too_little_follows() {
        let mut board = sent(0, 3);
        board.handle_ack(Psn::new(0), Some(&sack(1, 0, 0b100)), at(20));
        assert_eq!(board.loss_time(|| Duration::from_micros(25)), Some(at(25)));
        assert_eq!(board.mark_lost(at(24), Duration::from_micros(25)), 0);
        assert_eq!(board.mark_lost(at(25), Duration::from_micros(25)), 1);
        assert_eq!(board.mark_lost(at(26), Duration::from_micros(25)), 1);
        assert_eq!(board.loss_time(|| REORDER_TIMEOUT), None);
    }

    #[test]
    fn a_lost_repetition_is_found_like_a_lost_packet() {
        let mut board = sent(0, 5);
        board.handle_ack(Psn::new(0), Some(&sack(1, 0, 0b11110)), at(10));
        board.mark_lost(at(10), REORDER_TIMEOUT);
        assert_eq!(board.next_lost(), Some(Psn::new(0)));
        board.retransmitted(Psn::new(0), at(11));
        assert_eq!(board.next_lost(), None);
        (5..8).for_each(|packet| board.sent_first(at(10 + packet)));
        board.handle_ack(Psn::new(0), Some(&sack(2, 0, 0b111_1110)), at(40));
        assert_eq!(board.mark_lost(at(40), REORDER_TIMEOUT), 0);
        board.handle_ack(Psn::new(0), Some(&sack(3, 0, 0b1111_1110)), at(41));
        assert_eq!(board.mark_lost(at(41), REORDER_TIMEOUT), 1);
        assert_eq!(board.next_lost(), Some(Psn::new(0)));
    }

    #[test]
    fn packets_that_were_only_late_make_it_more_patient() {
        let mut board = sent(0, 20);
        board.handle_ack(Psn::new(0), Some(&sack(1, 0, 0b1000)), at(30));
        assert_eq!(board.mark_lost(at(30), REORDER_TIMEOUT), 1);
        // The packet arrives without having been retransmitted.
        let summary = board.handle_ack(Psn::new(1), None, at(31));
        assert_eq!((summary.spurious, summary.rtt), (1, None));
        board.handle_ack(Psn::new(1), Some(&sack(2, 1, 0b1_0000)), at(32));
        assert_eq!(board.mark_lost(at(32), REORDER_TIMEOUT), 0);
        // A retransmission acknowledged faster than any packet before was spurious, too.
        board.handle_ack(Psn::new(1), Some(&sack(3, 1, 0b100_0000)), at(33));
        assert_eq!(board.mark_lost(at(33), REORDER_TIMEOUT), 1);
        board.retransmitted(Psn::new(1), at(34));
        let summary = board.handle_ack(Psn::new(2), None, at(35));
        assert_eq!((summary.spurious, summary.rtt), (1, None));
    }

    #[test]
    fn the_latest_report_decides_what_was_taken_back() {
        let mut board = sent(0xff_fffe, 6);
        board.handle_ack(Psn::new(0xff_fffe), Some(&sack(5, 0xff_fffe, 0b11_1100)), at(9));
        assert_eq!(board.next_lost(), None);
        // An older SACK is used for its cumulative acknowledgement only.
        board.handle_ack(Psn::new(0xff_ffff), Some(&sack(4, 0xff_ffff, 0)), at(10));
        assert_eq!((board.una(), board.next_lost()), (Psn::new(0xff_ffff), None));
        board.handle_ack(Psn::new(0xff_ffff), Some(&sack(6, 0xff_ffff, 0b1_1010)), at(10));
        assert_eq!(board.next_lost(), Some(Psn::new(1)));
        board.retransmitted(Psn::new(1), at(11));
        // A packet far from the SACK's bits: that it is expected is information enough.
        board.handle_ack(Psn::new(2), Some(&sack(7, 500, 1)), at(12));
        assert_eq!(board.next_lost(), Some(Psn::new(2)));
    }

    #[test]
    fn everything_can_be_given_up_for_lost() {
        let mut board = sent(100, 4);
        board.handle_ack(Psn::new(100), Some(&sack(1, 100, 0b10)), at(5));
        board.mark_latest_lost();
        assert_eq!(board.next_lost(), Some(Psn::new(103)));
        board.mark_one_lost(Psn::new(101));
        assert_eq!(board.next_lost(), Some(Psn::new(101)));
        board.mark_all_lost();
        assert_eq!((board.next_lost(), board.in_flight()), (Some(Psn::new(100)), 0));
        assert_eq!((board.latest_sent(), board.loss_time(|| REORDER_TIMEOUT)), (None, None));
        board.handle_ack(Psn::new(104), None, at(6));
        assert!(board.is_empty());
        assert_eq!(board.next_lost(), None);
    }

    /// A packet in the slow model.
    #[derive(Clone, Copy, Debug)]
    struct Plain {
        state: State,
        is_retransmitted: bool,
        marked_by_order: bool,
        order: u64,
        sent_at: Time,
    }

    struct Model {
        first: Psn,
        una: usize,
        packets: Vec<Plain>,
        sent: u64,
        newest: Option<(u64, Time)>,
        serial: u32,
        recent_rtt: Duration,
        min_rtt: Option<Duration>,
        /// Transmission number and round-trip time of the sample of this acknowledgement.
        sample: Option<(u64, Duration)>,
    }

    impl Model {
        fn new(first: Psn) -> Self {
            Self {
                first,
                una: 0,
                packets: Vec::new(),
                sent: 0,
                newest: None,
                serial: 0,
                recent_rtt: Duration::ZERO,
                min_rtt: None,
                sample: None,
            }
        }

        fn deliver(&mut self, index: usize, now: Time) {
            let packet = &mut self.packets[index];
            if packet.state == State::Delivered {
                return;
            }
            let was_lost = packet.state == State::Lost;
            packet.state = State::Delivered;
            let rtt = now - packet.sent_at;
            let usual = match packet.marked_by_order {
                true => self.recent_rtt.as_nanos(),
                false => self.min_rtt.unwrap_or_default().as_nanos(),
            };
            let least = usual - usual / 8;
            if was_lost || (packet.is_retransmitted && rtt.as_nanos() < least) {
                return;
            }
            if !packet.is_retransmitted {
                self.sample = self.sample.max(Some((packet.order, rtt)));
            }
            self.newest = self.newest.max(Some((packet.order, packet.sent_at)));
        }

        fn acknowledge(&mut self, una: usize, sack: Option<&Sack>, now: Time) {
            self.sample = None;
            (self.una..una).for_each(|index| self.deliver(index, now));
            self.una = self.una.max(una);
            if let Some(sack) = sack.filter(|sack| sack.serial > self.serial) {
                self.take_bits(sack, now);
            }
            if let Some((_, rtt)) = self.sample {
                self.recent_rtt = rtt;
                self.min_rtt = Some(self.min_rtt.map_or(rtt, |least| least.min(rtt)));
            }
            if let Some(packet) = self.packets.get_mut(self.una)
                && packet.state == State::Delivered
            {
                (packet.state, packet.is_retransmitted, packet.marked_by_order) =
                    (State::Lost, true, false);
            }
        }

        fn take_bits(&mut self, sack: &Sack, now: Time) {
            self.serial = sack.serial;
            let start = sack.start.distance_from(self.first) as usize;
            for index in self.una..self.packets.len() {
                let bit = index.wrapping_sub(start);
                if bit >= Sack::BITS as usize {
                    continue;
                }
                if sack.bits() >> bit & 1 == 1 {
                    self.deliver(index, now);
                } else if self.packets[index].state == State::Delivered {
                    let packet = &mut self.packets[index];
                    (packet.state, packet.is_retransmitted, packet.marked_by_order) =
                        (State::Lost, true, false);
                }
            }
        }

        fn mark_lost(&mut self, now: Time, reorder: u64) {
            let Some((newest, _)) = self.newest else {
                return;
            };
            for packet in &mut self.packets[self.una..] {
                let late = packet.order < newest && packet.sent_at + REORDER_TIMEOUT <= now;
                if packet.state == State::InFlight && (packet.order + reorder <= newest || late) {
                    (packet.state, packet.marked_by_order) = (State::Lost, true);
                }
            }
        }

        fn first_lost(&self) -> Option<Psn> {
            let lost = |packet: &Plain| packet.state == State::Lost;
            let index = self.packets[self.una..].iter().position(lost)?;
            Some(self.first.plus((self.una + index) as u32))
        }
    }

    /// Random transmissions and SACKs, old and wrong ones among them, against the slow model.
    #[test]
    fn agrees_with_a_scan_of_all_packets() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let first = Psn::new(rng.next_u32() | 0xff_ff00);
            let mut board = Scoreboard::new(first, 200);
            let mut model = Model::new(first);
            let mut now = Time::ZERO;
            for _ in 0..1_500 {
                now += Duration::from_micros(u64::from(rng.next_u32() % 40));
                let span = model.packets.len() - model.una;
                match rng.next_u32() % 10 {
                    0..=4 if span < 200 => {
                        board.sent_first(now);
                        let (order, sent_at) = (model.sent, now);
                        model.packets.push(Plain {
                            state: State::InFlight,
                            is_retransmitted: false,
                            marked_by_order: false,
                            order,
                            sent_at,
                        });
                        model.sent += 1;
                    }
                    5 | 6 => {
                        if let Some(psn) = board.next_lost() {
                            board.retransmitted(psn, now);
                            let packet = &mut model.packets[psn.distance_from(first) as usize];
                            (packet.state, packet.is_retransmitted) = (State::InFlight, true);
                            (packet.order, packet.sent_at) = (model.sent, now);
                            model.sent += 1;
                        }
                    }
                    7 => {
                        let una = model.una + rng.next_u32() as usize % (span / 4 + 1);
                        board.handle_ack(first.plus(una as u32), None, now);
                        model.acknowledge(una, None, now);
                    }
                    8 => {
                        let start = model.una + rng.next_u32() as usize % (span + 1);
                        let bits = u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64());
                        let serial = (model.serial + rng.next_u32() % 4).saturating_sub(1);
                        let sack = Sack::new(serial.max(1), first.plus(start as u32), bits);
                        // Bits for packets that were never sent must have no effect.
                        let una = model.una;
                        board.handle_ack(first.plus(una as u32), Some(&sack), now);
                        model.acknowledge(una, Some(&sack), now);
                    }
                    _ => {
                        let reorder = board.reorder_packets.into();
                        board.mark_lost(now, REORDER_TIMEOUT);
                        model.mark_lost(now, reorder);
                    }
                }
                assert_eq!(board.next_lost(), model.first_lost(), "seed {seed}");
                let flying = |packet: &&Plain| packet.state == State::InFlight;
                let in_flight = model.packets[model.una..].iter().filter(flying).count();
                assert_eq!(board.in_flight() as usize, in_flight, "seed {seed}");
                assert_eq!(board.una(), first.plus(model.una as u32), "seed {seed}");
            }
        }
    }
}
