//! One direction of a cable, and the port that feeds it: queues, a rate, a propagation delay.
//!
//! A port has a queue for each traffic class, chosen by the DSCP, and serves the highest class that has
//! packets. Within a class packets leave in order of arrival. All classes share one bounded buffer; a
//! packet that does not fit is dropped (drop tail). A departing packet may be marked according to the
//! bytes still queued in its class, as switches do for DCQCN: never up to `min_bytes`, always above
//! `max_bytes`, and in between with a probability that grows linearly to `max_probability`.

use alloc::collections::VecDeque;

use roce::world::Ecn;
use roce::{Duration, Time};

use crate::chance::Chance;

/// When departing packets are marked (congestion experienced).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marking {
    /// Queue length up to which nothing is marked (Kmin).
    pub min_bytes: u64,
    /// Queue length above which everything is (Kmax).
    pub max_bytes: u64,
    /// Probability at `max_bytes`, in parts per million (Pmax).
    pub max_probability_ppm: u32,
}

impl Marking {
    /// The thresholds in common use with DCQCN, which scale with the rate: 100 kB and 400 kB at
    /// 25 Gbit/s, 20 %.
    pub const fn dcqcn(rate_bps: u64) -> Marking {
        let per_25g = rate_bps / 1_000_000;
        Marking {
            min_bytes: 100_000 * per_25g / 25_000,
            max_bytes: 400_000 * per_25g / 25_000,
            max_probability_ppm: 200_000,
        }
    }

    fn probability_ppm(&self, queued_bytes: u64) -> u32 {
        if queued_bytes <= self.min_bytes {
            0
        } else if queued_bytes > self.max_bytes {
            1_000_000
        } else {
            let span = (self.max_bytes - self.min_bytes).max(1);
            let over = queued_bytes - self.min_bytes;
            (u64::from(self.max_probability_ppm) * over / span) as u32
        }
    }
}

/// Most traffic classes of a link.
pub const MAX_CLASSES: usize = 8;

/// The rate of a link on which packets are never queued.
pub const UNLIMITED: u64 = u64::MAX;

/// The properties of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Bits per second, framing included; [`UNLIMITED`] for no serialization delay.
    pub rate_bps: u64,
    /// Propagation delay.
    pub delay: Duration,
    /// Queue size of all traffic classes, in bytes.
    pub queue_bytes: u64,
    /// Traffic classes, 1 to [`MAX_CLASSES`]: the 64 DSCPs are divided evenly among them.
    pub classes: u8,
    /// Congestion marking, if any.
    pub marking: Option<Marking>,
}

impl LinkConfig {
    /// A link of this rate and delay whose queue never overflows in practice.
    pub const fn new(rate_bps: u64, delay: Duration) -> LinkConfig {
        LinkConfig { rate_bps, delay, queue_bytes: 1 << 30, classes: 1, marking: None }
    }

    /// A link that delays packets and does nothing else.
    pub const fn unlimited(delay: Duration) -> LinkConfig {
        LinkConfig::new(UNLIMITED, delay)
    }

    /// The queue of packets with this DSCP; the highest is served first.
    fn class(&self, dscp: u8) -> usize {
        let classes = usize::from(self.classes).clamp(1, MAX_CLASSES);
        usize::from(dscp & 63) * classes / 64
    }

    /// Serialization time of `bytes`, rounded up.
    pub fn serialization(&self, bytes: u64) -> Duration {
        let bits_ns = u128::from(bytes) * 8_000_000_000;
        Duration::from_nanos(bits_ns.div_ceil(u128::from(self.rate_bps.max(1))) as u64)
    }
}

/// An end of a cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vertex {
    /// A host, by number.
    Node(u32),
    /// A switch, by number.
    Switch(u32),
}

/// One direction of a cable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) from: Vertex,
    pub(crate) to: Vertex,
    pub(crate) config: LinkConfig,
}

/// Statistics of a link since they were last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Bytes that left, framing included.
    pub sent_bytes: u64,
    /// Packets that left.
    pub sent_packets: u64,
    /// Packets dropped at a full queue.
    pub dropped: u64,
    /// Packets marked.
    pub marked: u64,
    /// Maximum queue length in bytes.
    pub peak_bytes: u64,
    /// Minimum queue length in bytes.
    pub least_bytes: u64,
    since: Time,
    until: Time,
    /// Queue length in bytes, times nanoseconds.
    area: u128,
}

impl LinkStats {
    /// Mean queue length in bytes.
    pub fn mean_bytes(&self) -> u64 {
        let span = u128::from(self.until.since(self.since).as_nanos());
        (self.area / span.max(1)) as u64
    }

    /// Departure rate in bits per second.
    pub fn rate_bps(&self) -> u64 {
        let span = u128::from(self.until.since(self.since).as_nanos());
        (u128::from(self.sent_bytes) * 8_000_000_000 / span.max(1)) as u64
    }
}

/// A link and its queue. Packets are numbers here, resolved by the fabric.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) config: LinkConfig,
    /// Where it ends.
    pub(crate) end: Vertex,
    pub(crate) is_up: bool,
    /// Faults are injected into packets that leave here.
    pub(crate) is_faulty: bool,
    /// The current outage has lost a packet.
    pub(crate) outage_felt: bool,
    waiting: [VecDeque<(u32, u32)>; MAX_CLASSES],
    /// By class.
    waiting_bytes: [u64; MAX_CLASSES],
    leaving: Option<u32>,
    stats: LinkStats,
}

/// The outcome of giving a packet to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enqueued {
    /// It is queued.
    Waits,
    /// The link was idle: it departs now and has left at this time.
    Leaves(Time),
    /// The link is [`UNLIMITED`]: it has left already.
    Left,
    /// The queue was full.
    Dropped,
}

impl Link {
    pub(crate) fn new(edge: &Edge) -> Link {
        Link {
            config: edge.config,
            end: edge.to,
            is_up: true,
            is_faulty: matches!(edge.from, Vertex::Node(_)),
            outage_felt: false,
            waiting: [const { VecDeque::new() }; MAX_CLASSES],
            waiting_bytes: [0; MAX_CLASSES],
            leaving: None,
            stats: LinkStats::default(),
        }
    }

    pub(crate) fn enqueue(&mut self, now: Time, packet: u32, bytes: u32, dscp: u8) -> Enqueued {
        if self.config.rate_bps == UNLIMITED {
            self.departure(now, bytes);
            return Enqueued::Left;
        }
        if self.leaving.is_none() {
            self.leaving = Some(packet);
            return Enqueued::Leaves(self.departure(now, bytes));
        }
        let total_bytes = self.total_bytes() + u64::from(bytes);
        if total_bytes > self.config.queue_bytes {
            self.stats.dropped += 1;
            return Enqueued::Dropped;
        }
        self.account(now);
        let class = self.config.class(dscp);
        self.waiting[class].push_back((packet, bytes));
        self.waiting_bytes[class] += u64::from(bytes);
        self.stats.peak_bytes = self.stats.peak_bytes.max(total_bytes);
        Enqueued::Waits
    }

    fn total_bytes(&self) -> u64 {
        self.waiting_bytes.iter().sum()
    }

    fn departure(&mut self, now: Time, bytes: u32) -> Time {
        self.stats.sent_bytes += u64::from(bytes);
        self.stats.sent_packets += 1;
        now + self.config.serialization(bytes.into())
    }

    /// The packet that has just left completely.
    pub(crate) fn take_departed(&mut self) -> Option<u32> {
        self.leaving.take()
    }

    /// The next packet starts to depart: its number, and when it will have left.
    pub(crate) fn start_next(&mut self, now: Time) -> Option<(u32, Time)> {
        self.account(now);
        let class = self.waiting.iter().rposition(|queue| !queue.is_empty())?;
        let (packet, bytes) = self.waiting[class].pop_front()?;
        self.waiting_bytes[class] -= u64::from(bytes);
        self.stats.least_bytes = self.stats.least_bytes.min(self.total_bytes());
        self.leaving = Some(packet);
        Some((packet, self.departure(now, bytes)))
    }

    /// Whether the departing packet is to be marked, and as what.
    pub(crate) fn mark(&mut self, ecn: Ecn, dscp: u8, chance: &mut Chance) -> Ecn {
        let Some(marking) = self.config.marking.filter(|_| matches!(ecn, Ecn::Ect0 | Ecn::Ect1))
        else {
            return ecn;
        };
        if !chance.per_million(marking.probability_ppm(self.waiting_bytes[self.config.class(dscp)]))
        {
            return ecn;
        }
        self.stats.marked += 1;
        Ecn::Ce
    }

    fn account(&mut self, now: Time) {
        let span = now.since(self.stats.until).as_nanos();
        self.stats.area += u128::from(span) * u128::from(self.total_bytes());
        self.stats.until = now;
    }

    /// Statistics from the last [`restart_stats`](Link::restart_stats) to `now`.
    pub(crate) fn stats(&mut self, now: Time) -> LinkStats {
        self.account(now);
        self.stats
    }

    pub(crate) fn restart_stats(&mut self, now: Time) {
        self.stats = LinkStats {
            since: now,
            until: now,
            peak_bytes: self.total_bytes(),
            least_bytes: self.total_bytes(),
            ..LinkStats::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(queue_bytes: u64) -> Link {
        let config = LinkConfig::new(8_000_000_000, Duration::ZERO);
        let config = LinkConfig { queue_bytes, ..config };
        Link::new(&Edge { from: Vertex::Switch(0), to: Vertex::Node(0), config })
    }

    #[test]
    fn one_leaves_others_wait_and_the_rest_is_dropped() {
        let mut link = link(250);
        let at = Time::from_nanos;
        assert_eq!(link.enqueue(at(0), 1, 100, 0), Enqueued::Leaves(at(100)));
        assert_eq!(link.enqueue(at(0), 2, 200, 0), Enqueued::Waits);
        assert_eq!(link.enqueue(at(0), 3, 51, 0), Enqueued::Dropped);
        assert_eq!(link.enqueue(at(0), 4, 50, 0), Enqueued::Waits);
        assert_eq!(link.take_departed(), Some(1));
        assert_eq!(link.start_next(at(100)), Some((2, at(300))));
        let stats = link.stats(at(200));
        assert_eq!((stats.dropped, stats.peak_bytes), (1, 250));
        assert_eq!(stats.mean_bytes(), (250 * 100 + 50 * 100) / 200);
        assert_eq!(link.total_bytes(), 50);
    }

    #[test]
    fn marking_grows_from_min_to_max() {
        let marking = Marking::dcqcn(25_000_000_000);
        assert_eq!((marking.min_bytes, marking.max_bytes), (100_000, 400_000));
        let at = |bytes| marking.probability_ppm(bytes);
        assert_eq!([at(100_000), at(250_000), at(400_000)], [0, 100_000, 200_000]);
        assert_eq!(at(400_001), 1_000_000);
    }

    #[test]
    fn only_capable_packets_are_marked() {
        let mut link = link(1 << 20);
        link.config.marking =
            Some(Marking { min_bytes: 0, max_bytes: 0, max_probability_ppm: 1_000_000 });
        link.enqueue(Time::ZERO, 1, 100, 0);
        link.enqueue(Time::ZERO, 2, 100, 0);
        let mut chance = Chance::new(1);
        assert_eq!(link.mark(Ecn::Ect0, 0, &mut chance), Ecn::Ce);
        assert_eq!(link.mark(Ecn::NotEct, 0, &mut chance), Ecn::NotEct);
    }

    #[test]
    fn the_highest_class_leaves_first_and_all_share_the_buffer() {
        let mut link = link(250);
        link.config.classes = 2;
        let at = Time::from_nanos;
        link.enqueue(at(0), 1, 100, 0);
        assert_eq!(link.enqueue(at(0), 2, 100, 31), Enqueued::Waits);
        assert_eq!(link.enqueue(at(0), 3, 100, 32), Enqueued::Waits);
        assert_eq!(link.enqueue(at(0), 4, 100, 63), Enqueued::Dropped);
        link.take_departed();
        assert_eq!(link.start_next(at(100)), Some((3, at(200))));
        link.take_departed();
        assert_eq!(link.start_next(at(200)), Some((2, at(300))));
    }
}
