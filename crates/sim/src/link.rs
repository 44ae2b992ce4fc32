//! One direction of a cable, and the port that feeds it: queues, a rate, a propagation delay.
//!
//! A port has a queue for each traffic class, chosen by the DSCP, and serves the highest class that
//! has packets. Classes with a weight are served after those without, in turns of as many bytes as
//! their weights say (deficit round robin). Within a class packets leave in order of arrival. All
//! classes share one bounded buffer; a packet that does not fit is dropped (drop tail). A departing
//! packet may be marked according to the bytes still queued in its class, as switches do for DCQCN:
//! never up to `min_bytes`, always above `max_bytes`, and in between with a probability that grows
//! linearly to `max_probability`.
//!
//! A switch or host whose port is told so chooses queues by DSCP and weight instead
//! ([`queues`](crate::queues)).
//!
//! The other end may pause a class (priority flow control): its packets wait, and those of other
//! classes go on. Or, as in InfiniBand, a packet leaves only when the other end has a buffer for it
//! ([`credits`](crate::credits)).

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use core::fmt;

use roce::wire::digest;
use roce::wire::telemetry::Hop;
use roce::world::Ecn;
use roce::{Duration, Time};

use crate::chance::Chance;
use crate::credits::{BLOCK_BYTES, Receiver, Sender, blocks};
use crate::queues::{MAX_QUEUES, Queues};

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

    /// The threshold of DCTCP: everything above 30 kB at 10 Gbit/s, in proportion to the rate.
    pub const fn dctcp(rate_bps: u64) -> Marking {
        let bytes = 30_000 * (rate_bps / 1_000_000) / 10_000;
        Marking { min_bytes: bytes, max_bytes: bytes, max_probability_ppm: 1_000_000 }
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
pub const MAX_CLASSES: usize = MAX_QUEUES;

/// The largest frame on a link: MTU 4096 with all headers and framing.
pub(crate) const FRAME_BYTES: u32 = 4_400;

/// A buffer that is smaller than a frame would never take one.
const LEAST_BLOCKS: u32 = FRAME_BYTES.div_ceil(BLOCK_BYTES);

/// Bytes that a turn of deficit round robin gives a class for each unit of its weight: a frame of
/// an MTU of 1,500.
const QUANTUM: u64 = 1_538;

/// In place of a number of classes: a packet's queue is chosen by its DSCP ([`Queues`]).
const BY_DSCP: u8 = 0;

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
    /// By class: its share of what those without a weight leave; 0 for one that is always served
    /// first.
    pub weights: [u8; MAX_CLASSES],
    /// Congestion marking, if any.
    pub marking: Option<Marking>,
    /// Blocks of 64 bytes of each class's buffer at the other end, which is never overrun and takes
    /// a frame at least; `None` for a link without credits. Faults lose packets of such a link, and
    /// neither copy nor delay them.
    pub credits: Option<u32>,
}

impl LinkConfig {
    /// A link of this rate and delay whose queue never overflows in practice.
    pub const fn new(rate_bps: u64, delay: Duration) -> LinkConfig {
        let weights = [0; MAX_CLASSES];
        LinkConfig {
            rate_bps,
            delay,
            queue_bytes: 1 << 30,
            classes: 1,
            weights,
            marking: None,
            credits: None,
        }
    }

    /// The same with another rate.
    #[must_use]
    pub const fn with_rate(self, rate_bps: u64) -> LinkConfig {
        LinkConfig { rate_bps, ..self }
    }

    /// The same with another propagation delay.
    #[must_use]
    pub const fn with_delay(self, delay: Duration) -> LinkConfig {
        LinkConfig { delay, ..self }
    }

    /// A link that delays packets and does nothing else.
    pub const fn unlimited(delay: Duration) -> LinkConfig {
        LinkConfig::new(UNLIMITED, delay)
    }

    /// Serialization time of `bytes`, rounded up.
    pub fn serialization(&self, bytes: u64) -> Duration {
        const BITS_NS: u64 = 8_000_000_000;
        let rate = self.rate_bps.max(1);
        // Of a packet, it fits 64 bits, which are divided several times faster.
        let nanos = match bytes.checked_mul(BITS_NS) {
            Some(bits_ns) => bits_ns.div_ceil(rate),
            None => (u128::from(bytes) * u128::from(BITS_NS)).div_ceil(rate.into()) as u64,
        };
        Duration::from_nanos(nanos)
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

impl fmt::Display for Vertex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Vertex::Node(node) => write!(f, "node {node}"),
            Vertex::Switch(switch) => write!(f, "switch {switch}"),
        }
    }
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
    /// Times that the other end paused a class.
    pub pauses: u64,
    /// How long a class was paused, in all.
    pub paused: Duration,
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

/// The credits of a class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
}

/// A packet in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// Its number.
    pub(crate) packet: u32,
    pub(crate) bytes: u32,
    /// Its codepoint: to read it where the packet is kept would cost a cache miss for each that
    /// waited.
    pub(crate) ecn: Ecn,
    /// Switches write into it.
    pub(crate) has_telemetry: bool,
    /// How it came to this switch; none at the node that sent it.
    pub(crate) ingress: Option<Ingress>,
}

/// A link into a switch, and the class of a packet on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ingress {
    pub(crate) link: u32,
    /// The port at which it ends.
    pub(crate) port: u16,
    pub(crate) class: u8,
}

/// A packet that starts to depart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Started {
    pub(crate) waiting: Waiting,
    pub(crate) class: usize,
    /// When it will have left.
    pub(crate) left_at: Time,
}

/// A link and its queue. Packets are numbers here, resolved by the network.
///
/// A large network has tens of thousands of links, and every packet passes several: the fields are
/// in the order of use, so that a packet that finds its link idle touches few cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Link {
    /// Where it starts.
    pub(crate) start: Vertex,
    /// Where it ends.
    pub(crate) end: Vertex,
    /// When the packet that is departing has left.
    busy_until: Time,
    /// Bytes that ever left.
    sent_bytes: u64,
    /// Bytes and packets that wait, of all classes.
    queued_bytes: u64,
    queued_packets: u32,
    leaving: Option<u32>,
    /// Classes with packets that wait, and those that the other end has paused, as bits.
    backlog: u8,
    held: u8,
    /// Times that it went down or came up, with what its ends knew: what was on it before is lost.
    pub(crate) epoch: u8,
    pub(crate) is_up: bool,
    /// Faults are injected into packets that leave here.
    pub(crate) is_faulty: bool,
    /// The packet that is departing was cut off by an outage.
    pub(crate) is_cut: bool,
    /// Its rate is lower than it was built for, and no packet has noticed yet.
    pub(crate) slowness_unfelt: bool,
    pub(crate) config: LinkConfig,
    /// By class: both ends of its credits, on a link that has them.
    lanes: Option<Box<[Lane; MAX_CLASSES]>>,
    /// Its number among the links to that end.
    pub(crate) port: u16,
    stats: LinkStats,
    waiting: [VecDeque<Waiting>; MAX_CLASSES],
    /// By class.
    waiting_bytes: [u64; MAX_CLASSES],
    /// By class: bytes that it may still send in this turn of deficit round robin; and whose turn
    /// it is.
    deficits: [u64; MAX_CLASSES],
    turn: usize,
    /// By class: since when it is paused, if it is.
    held_since: [Time; MAX_CLASSES],
    /// Bit errors in 10^15 bits that it adds to frames.
    pub(crate) bit_errors: u64,
    /// By class, where pauses end by themselves: when.
    pub(crate) pause_ends: [Time; MAX_CLASSES],
    /// Classes with a timer for the end of their pause, and with one to refresh it, as bits.
    pub(crate) ending: u8,
    pub(crate) refreshing: u8,
    /// Its cable is plugged in; it is up if both of its ends are, too.
    pub(crate) is_plugged: bool,
    /// The current outage has lost a packet.
    pub(crate) outage_felt: bool,
    /// A fault has concerned its flow control: packets may be dropped at its end although it loses
    /// none.
    pub(crate) is_disturbed: bool,
    /// What took it down last.
    pub(crate) outage: Outage,
    /// The rate that it was built for.
    pub(crate) nominal_bps: u64,
    /// By class: the most bytes that waited since they were last read, at a switch whose collector
    /// reads them.
    pub(crate) watermarks: Option<Box<[u64; MAX_CLASSES]>>,
    /// Instead of the classes of its configuration: queues by DSCP. Its configuration has no
    /// classes then.
    queues: Option<Box<Queues>>,
    /// What digests say.
    gauge: Gauge,
}

/// The utilization of a link, as a switch keeps it for digests: the mean over a time T, in units of
/// 1 / [`digest::ONE`].
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    utilization: u64,
    at: Time,
    /// Bytes that had left by then.
    sent_bytes: u64,
}

/// Why a link is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outage {
    /// The cable of a node was unplugged.
    Cable,
    /// The link failed.
    Link,
    /// A switch failed.
    Switch(u32),
}

/// Lanes whose receivers have so many blocks, after the first flow control packet.
fn lanes(capacity: u32) -> Box<[Lane; MAX_CLASSES]> {
    let receiver = Receiver::new(capacity.max(LEAST_BLOCKS));
    let mut sender = Sender::new();
    sender.heard(receiver.limit());
    Box::new([Lane { sender, receiver }; MAX_CLASSES])
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
        let classes = edge.config.classes.clamp(1, MAX_CLASSES as u8);
        Link {
            config: LinkConfig { classes, ..edge.config },
            start: edge.from,
            end: edge.to,
            port: 0,
            is_up: true,
            is_plugged: true,
            outage: Outage::Cable,
            is_faulty: matches!(edge.from, Vertex::Node(_)),
            outage_felt: false,
            epoch: 0,
            is_cut: false,
            slowness_unfelt: false,
            is_disturbed: false,
            nominal_bps: edge.config.rate_bps,
            held_since: [Time::ZERO; MAX_CLASSES],
            bit_errors: 0,
            pause_ends: [Time::ZERO; MAX_CLASSES],
            ending: 0,
            refreshing: 0,
            waiting: [const { VecDeque::new() }; MAX_CLASSES],
            waiting_bytes: [0; MAX_CLASSES],
            watermarks: None,
            queues: None,
            lanes: edge.config.credits.filter(|_| edge.config.rate_bps != UNLIMITED).map(lanes),
            deficits: [0; MAX_CLASSES],
            turn: 0,
            queued_bytes: 0,
            queued_packets: 0,
            backlog: 0,
            held: 0,
            leaving: None,
            busy_until: Time::ZERO,
            sent_bytes: 0,
            gauge: Gauge::default(),
            stats: LinkStats::default(),
        }
    }

    /// The queue of packets with this DSCP; without weights the highest is served first.
    pub(crate) fn class(&self, dscp: u8) -> usize {
        match self.config.classes {
            BY_DSCP => self.queues.as_ref().map_or(0, |queues| queues.queue_of(dscp)),
            classes => usize::from(dscp & 63) * usize::from(classes) / 64,
        }
    }

    /// How many of its queues may have packets.
    fn class_count(&self) -> usize {
        match self.config.classes {
            BY_DSCP => MAX_CLASSES,
            classes => classes.into(),
        }
    }

    /// Chooses the queues of its packets by DSCP from now on; false on a link with credits, whose
    /// lanes both ends have agreed on. What waits stays where it is.
    pub(crate) fn set_queues(&mut self, queues: Queues) -> bool {
        if self.lanes.is_some() {
            return false;
        }
        self.config.classes = BY_DSCP;
        // Weights that are not 0 all: classes are not served by priority alone.
        self.config.weights = [1; MAX_CLASSES];
        self.queues = Some(Box::new(queues));
        true
    }

    /// Bytes of the turn of a class; 0 for one that is served first.
    fn turn_bytes(&self, class: usize) -> u64 {
        match &self.queues {
            Some(queues) => queues.turn_bytes(class),
            None => QUANTUM * u64::from(self.config.weights[class]),
        }
    }

    /// Whether the queue of a class that is chosen by DSCP has no room for so many bytes; without
    /// such queues all share one bound.
    fn is_full(&self, class: usize, bytes: u32) -> bool {
        let own = self.queues.as_ref().filter(|_| self.config.classes == BY_DSCP);
        own.is_some_and(|own| self.waiting_bytes[class] + u64::from(bytes) > own.buffer_bytes())
    }

    /// Whether a packet of so many bytes of this class would have to wait.
    pub(crate) fn is_busy(&self, class: usize, bytes: u32) -> bool {
        let is_occupied = self.leaving.is_some() || (self.backlog | self.held) >> class & 1 != 0;
        (is_occupied || !self.has_credit(class, bytes)) && self.config.rate_bps != UNLIMITED
    }

    fn has_credit(&self, class: usize, bytes: u32) -> bool {
        // What waits for a link that is down leaves into nothing.
        let lane = self.lanes.as_ref().map(|lanes| &lanes[class]).filter(|_| self.is_up);
        lane.is_none_or(|lane| lane.sender.may_send(blocks(bytes)))
    }

    /// The credits of a class, on a link that has them.
    pub(crate) fn lane(&mut self, class: usize) -> Option<&mut Lane> {
        self.lanes.as_mut().map(|lanes| &mut lanes[class])
    }

    pub(crate) fn enqueue(&mut self, now: Time, class: usize, waiting: Waiting) -> Enqueued {
        let Waiting { packet, bytes, .. } = waiting;
        if self.config.rate_bps == UNLIMITED {
            self.departure(now, bytes);
            return Enqueued::Left;
        }
        if !self.is_busy(class, bytes) {
            self.leaving = Some(packet);
            self.spend(class, bytes);
            return Enqueued::Leaves(self.departure(now, bytes));
        }
        let total_bytes = self.total_bytes() + u64::from(bytes);
        if total_bytes > self.config.queue_bytes || self.is_full(class, bytes) {
            self.stats.dropped += 1;
            return Enqueued::Dropped;
        }
        self.account(now);
        self.waiting[class].push_back(waiting);
        self.waiting_bytes[class] += u64::from(bytes);
        self.queued_bytes = total_bytes;
        self.queued_packets += 1;
        self.backlog |= 1 << class;
        if let Some(watermarks) = &mut self.watermarks {
            watermarks[class] = watermarks[class].max(self.waiting_bytes[class]);
        }
        self.stats.peak_bytes = self.stats.peak_bytes.max(total_bytes);
        Enqueued::Waits
    }

    /// Reads the watermarks; they begin anew with what waits now.
    pub(crate) fn take_watermarks(&mut self) -> [u64; MAX_CLASSES] {
        let now = self.waiting_bytes;
        self.watermarks.as_mut().map_or([0; MAX_CLASSES], |all| core::mem::replace(&mut **all, now))
    }

    /// A packet found no room in the switch.
    pub(crate) fn count_drop(&mut self) {
        self.stats.dropped += 1;
    }

    /// Bytes that have left since statistics were last reset.
    pub(crate) fn departed_bytes(&self) -> u64 {
        self.stats.sent_bytes
    }

    /// Bytes that wait in the queue of packets with this DSCP, and whether anything departs.
    pub(crate) fn waits_for(&self, dscp: u8) -> (u64, bool) {
        (self.waiting_bytes[self.class(dscp)], self.leaving.is_some())
    }

    /// Bytes that wait.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.queued_bytes
    }

    /// Packets that wait or are departing.
    pub(crate) fn packets(&self) -> usize {
        self.queued_packets as usize + usize::from(self.leaving.is_some())
    }

    fn spend(&mut self, class: usize, bytes: u32) {
        if let Some(lane) = self.lane(class) {
            lane.sender.send(blocks(bytes));
        }
    }

    fn departure(&mut self, now: Time, bytes: u32) -> Time {
        self.sent_bytes += u64::from(bytes);
        self.stats.sent_bytes += u64::from(bytes);
        self.stats.sent_packets += 1;
        self.busy_until = now + self.config.serialization(bytes.into());
        self.busy_until
    }

    /// When a short frame that goes ahead of all others has left.
    pub(crate) fn leaves_ahead(&self, now: Time, bytes: u64) -> Time {
        let is_limited = self.config.rate_bps != UNLIMITED;
        let start = if is_limited { self.busy_until.max(now) } else { now };
        // At a rate that never changes, so that none overtakes another when the link gets faster.
        start + self.config.with_rate(self.nominal_bps).serialization(bytes)
    }

    /// What a switch writes into a packet that starts to depart.
    pub(crate) fn hop(&self, now: Time) -> Hop {
        Hop::new(self.config.rate_bps, now.as_nanos(), self.sent_bytes, self.total_bytes())
    }

    /// The utilization of which a switch writes the digest into a packet that starts to depart:
    /// what was sent, and the queue over what the link sends in `base_rtt`, T. As in PINT, a mean
    /// over T; here it is updated when a packet wants it.
    pub(crate) fn utilization(&mut self, now: Time, base_rtt: Duration) -> u64 {
        let (span, base) = (now.since(self.gauge.at).as_nanos(), base_rtt.as_nanos().max(1));
        if span == 0 || self.config.rate_bps == UNLIMITED {
            return self.gauge.utilization;
        }
        let of_line = |bytes: u64, nanos: u64| {
            let one = u128::from(bytes) * 8_000_000_000 * u128::from(digest::ONE);
            one / (u128::from(nanos) * u128::from(self.config.rate_bps.max(1)))
        };
        let sent = self.sent_bytes.saturating_sub(self.gauge.sent_bytes);
        let present = of_line(sent, span) + of_line(self.total_bytes(), base);
        let weight = span.min(base);
        let mixed = u128::from(self.gauge.utilization) * u128::from(base - weight)
            + present * u128::from(weight);
        let utilization = u64::try_from(mixed / u128::from(base)).unwrap_or(u64::MAX);
        self.gauge = Gauge { utilization, at: now, sent_bytes: self.sent_bytes };
        utilization
    }

    /// The packet that has just left completely.
    pub(crate) fn take_departed(&mut self) -> Option<u32> {
        self.leaving.take()
    }

    /// The next packet starts to depart, unless one already does.
    pub(crate) fn start_next(&mut self, now: Time) -> Option<Started> {
        if self.leaving.is_some() {
            return None;
        }
        let class = self.choose()?;
        self.account(now);
        let waiting = self.waiting[class].pop_front()?;
        self.waiting_bytes[class] -= u64::from(waiting.bytes);
        self.queued_bytes -= u64::from(waiting.bytes);
        self.queued_packets -= 1;
        self.backlog &= !(u8::from(self.waiting[class].is_empty()) << class);
        self.stats.least_bytes = self.stats.least_bytes.min(self.total_bytes());
        self.leaving = Some(waiting.packet);
        self.spend(class, waiting.bytes);
        Some(Started { waiting, class, left_at: self.departure(now, waiting.bytes) })
    }

    fn may_go(&self, class: usize) -> bool {
        let head = self.waiting[class].front();
        let has_credit = head.is_some_and(|head| self.has_credit(class, head.bytes));
        has_credit && !self.is_paused(class)
    }

    /// The class that is served next.
    fn choose(&mut self) -> Option<usize> {
        let ready = self.backlog & !self.held;
        if ready == 0 {
            return None;
        }
        if self.lanes.is_none() && self.config.weights == [0; MAX_CLASSES] {
            return Some(ready.ilog2() as usize);
        }
        let classes = self.class_count();
        let is_strict = |&class: &usize| self.turn_bytes(class) == 0 && self.may_go(class);
        let strict = (0..classes).rev().find(is_strict);
        if strict.is_some() || !(0..classes).any(|class| self.may_go(class)) {
            return strict;
        }
        // Each round gives every class at least a quantum, so a few are enough.
        loop {
            let class = self.turn;
            let head = self.waiting[class].front().map_or(0, |waiting| u64::from(waiting.bytes));
            if self.turn_bytes(class) == 0 || !self.may_go(class) {
                self.deficits[class] = 0;
            } else if self.deficits[class] >= head {
                self.deficits[class] -= head;
                return Some(class);
            }
            self.turn = (class + 1) % MAX_CLASSES;
            self.deficits[self.turn] += self.turn_bytes(self.turn);
        }
    }

    /// The other end pauses a class, or resumes it.
    pub(crate) fn set_paused(&mut self, now: Time, class: usize, is_paused: bool) {
        match (self.is_paused(class), is_paused) {
            (false, true) => {
                self.stats.pauses += 1;
                self.held |= 1 << class;
                self.held_since[class] = now;
            }
            (true, false) => {
                let since = self.held_since[class].max(self.stats.since);
                self.stats.paused = self.stats.paused + now.since(since);
                self.held &= !(1 << class);
            }
            _ => {}
        }
    }

    /// How many classes the other end pauses.
    pub(crate) fn paused_classes(&self) -> u32 {
        self.held.count_ones()
    }

    /// Whether the other end has paused a class.
    pub(crate) fn is_paused(&self, class: usize) -> bool {
        self.held >> class & 1 != 0
    }

    /// How long a pause of so many quanta lasts on it.
    pub(crate) fn pause_time(&self, quanta: u16) -> Duration {
        let nominal = self.config.with_rate(self.nominal_bps);
        nominal.serialization(u64::from(quanta) * (512 / 8))
    }

    /// Both ends forget pauses and credits, and everything on it is lost.
    pub(crate) fn reset(&mut self, now: Time) {
        self.epoch = self.epoch.wrapping_add(1);
        self.is_cut = self.leaving.is_some();
        (0..MAX_CLASSES).for_each(|class| self.set_paused(now, class, false));
        for lane in self.lanes.iter_mut().flat_map(|lanes| lanes.iter_mut()) {
            lane.receiver.restart();
            lane.sender = Sender::new();
            lane.sender.heard(lane.receiver.limit());
        }
    }

    /// Whether no class is paused, and all credits are with the sender.
    pub(crate) fn is_at_rest(&self) -> bool {
        let mut lanes = self.lanes.iter().flat_map(|lanes| lanes.iter());
        self.held == 0 && lanes.all(|lane| lane.receiver.is_at_rest_with(&lane.sender))
    }

    /// The packet of a class that waits longest.
    pub(crate) fn head(&self, class: usize) -> Option<u32> {
        self.waiting[class].front().map(|waiting| waiting.packet)
    }

    /// Takes everything that waits in a class.
    pub(crate) fn drain(&mut self, now: Time, class: usize) -> VecDeque<Waiting> {
        self.account(now);
        self.queued_bytes -= core::mem::take(&mut self.waiting_bytes[class]);
        self.queued_packets -= self.waiting[class].len() as u32;
        self.backlog &= !(1 << class);
        self.stats.least_bytes = self.stats.least_bytes.min(self.total_bytes());
        core::mem::take(&mut self.waiting[class])
    }

    /// The switch that sends on it has started again, and counts from zero.
    pub(crate) fn restart_counts(&mut self) {
        self.sent_bytes = 0;
        self.gauge = Gauge::default();
    }

    /// Whether the other end holds back packets of a class.
    pub(crate) fn is_held(&self, class: usize) -> bool {
        !self.waiting[class].is_empty() && !self.may_go(class)
    }

    /// Whether the next packet of a class would get credit if no more than so many bytes remained
    /// in the buffer at the other end; true on a link without credits.
    pub(crate) fn would_get_credit(&self, class: usize, remaining: u64) -> bool {
        let head = self.waiting[class].front().map_or(0, |head| u64::from(head.bytes));
        let blocks = self.config.credits.map(|blocks| u64::from(blocks.max(LEAST_BLOCKS)));
        let room = blocks.map(|blocks| blocks * u64::from(BLOCK_BYTES));
        room.is_none_or(|room| remaining + head <= room)
    }

    /// Bytes of a class that wait here and came in by this link, of each packet in whole units.
    pub(crate) fn bytes_from(&self, ingress: u32, class: usize, unit: u32) -> u64 {
        let is_from_there =
            |entry: &&Waiting| entry.ingress.is_some_and(|came| came.link == ingress);
        let from_there = self.waiting[class].iter().filter(is_from_there);
        from_there.map(|entry| u64::from(entry.bytes.next_multiple_of(unit))).sum()
    }

    /// Whether the departing packet is to be marked, and as what.
    pub(crate) fn mark(&mut self, ecn: Ecn, class: usize, chance: &mut Chance) -> Ecn {
        let Some(marking) = self.config.marking.filter(|_| matches!(ecn, Ecn::Ect0 | Ecn::Ect1))
        else {
            return ecn;
        };
        if !chance.per_million(marking.probability_ppm(self.waiting_bytes[class])) {
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
        let since = self.stats.since;
        let held = (0..MAX_CLASSES).filter(|&class| self.is_paused(class));
        let running = held.map(|class| now.since(self.held_since[class].max(since)));
        let paused = running.fold(self.stats.paused, |sum, span| sum + span);
        LinkStats { paused, ..self.stats }
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
    use alloc::vec::Vec;

    use super::*;

    fn enqueue(link: &mut Link, at: Time, packet: u32, bytes: u32, dscp: u8) -> Enqueued {
        let (ecn, has_telemetry, ingress) = (Ecn::Ect0, false, None);
        let waiting = Waiting { packet, bytes, ecn, has_telemetry, ingress };
        link.enqueue(at, link.class(dscp), waiting)
    }

    fn start_next(link: &mut Link, at: Time) -> Option<(u32, Time)> {
        link.start_next(at).map(|started| (started.waiting.packet, started.left_at))
    }

    fn link(queue_bytes: u64) -> Link {
        let config = LinkConfig::new(8_000_000_000, Duration::ZERO);
        let config = LinkConfig { queue_bytes, ..config };
        Link::new(&Edge { from: Vertex::Switch(0), to: Vertex::Node(0), config })
    }

    #[test]
    fn one_leaves_others_wait_and_the_rest_is_dropped() {
        let mut link = link(250);
        let at = Time::from_nanos;
        assert_eq!(enqueue(&mut link, at(0), 1, 100, 0), Enqueued::Leaves(at(100)));
        assert_eq!(enqueue(&mut link, at(0), 2, 200, 0), Enqueued::Waits);
        assert_eq!(enqueue(&mut link, at(0), 3, 51, 0), Enqueued::Dropped);
        assert_eq!(enqueue(&mut link, at(0), 4, 50, 0), Enqueued::Waits);
        assert_eq!(link.take_departed(), Some(1));
        assert_eq!(start_next(&mut link, at(100)), Some((2, at(300))));
        let stats = link.stats(at(200));
        assert_eq!((stats.dropped, stats.peak_bytes), (1, 250));
        assert_eq!(stats.mean_bytes(), (250 * 100 + 50 * 100) / 200);
        assert_eq!(link.total_bytes(), 50);
    }

    #[test]
    fn short_frames_keep_their_order_when_a_link_gets_faster() {
        let mut link = link(250);
        let at = Time::from_nanos;
        link.config.rate_bps = link.nominal_bps / 100;
        let first = link.leaves_ahead(at(10), 8);
        link.config.rate_bps = link.nominal_bps;
        let second = link.leaves_ahead(at(11), 8);
        assert!(first < second, "{first:?} {second:?}");
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
        enqueue(&mut link, Time::ZERO, 1, 100, 0);
        enqueue(&mut link, Time::ZERO, 2, 100, 0);
        let mut chance = Chance::new(1);
        assert_eq!(link.mark(Ecn::Ect0, 0, &mut chance), Ecn::Ce);
        assert_eq!(link.mark(Ecn::NotEct, 0, &mut chance), Ecn::NotEct);
    }

    #[test]
    fn weights_divide_what_the_others_leave() {
        let mut link = link(1 << 30);
        link.config.classes = 4;
        link.config.weights[..3].copy_from_slice(&[1, 3, 2]);
        let at = Time::from_nanos;
        enqueue(&mut link, at(0), 0, 100, 0);
        // Packets of different sizes: shares are of bytes.
        for (class, bytes) in [(0, 200), (1, 1_000), (2, 4_200)] {
            for _ in 0..2_000_000 / bytes {
                enqueue(&mut link, at(0), class, bytes, class as u8 * 16);
            }
        }
        enqueue(&mut link, at(0), 9, 100, 63);
        link.take_departed();
        assert_eq!(start_next(&mut link, at(0)).unwrap().0, 9, "without a weight comes first");
        let mut sent = [0; 3];
        while sent.iter().sum::<u64>() < 600_000 {
            link.take_departed();
            let started = link.start_next(at(0)).unwrap();
            sent[started.class] += u64::from(started.waiting.bytes);
        }
        for (sent, expected) in sent.into_iter().zip([100_000_u64, 300_000, 200_000]) {
            assert!(sent.abs_diff(expected) < 10_000, "{sent} {expected}");
        }
        // Of two that have packets, one paused: the other gets all.
        link.set_paused(at(0), 1, true);
        link.set_paused(at(0), 2, true);
        link.take_departed();
        assert_eq!(link.start_next(at(0)).unwrap().class, 0);
    }

    /// By queue: packets of these sizes wait all the time; what left in turns of deficit round
    /// robin.
    fn served(queues: Queues, sizes: &[u32], until_bytes: u64) -> Vec<(usize, u64)> {
        let mut link = link(1 << 40);
        assert!(link.set_queues(queues));
        enqueue(&mut link, Time::ZERO, 0, 64, 1);
        let (mut left, mut sum, mut number) = (Vec::new(), 0, 1);
        while sum < until_bytes {
            for (queue, &bytes) in sizes.iter().enumerate() {
                while link.waiting[queue].len() < 3 {
                    enqueue(&mut link, Time::ZERO, number, bytes, 8 + queue as u8);
                    number += 1;
                }
            }
            link.take_departed();
            let started = link.start_next(Time::ZERO).unwrap();
            let bytes = u64::from(started.waiting.bytes);
            left.push((started.class, bytes));
            sum += bytes;
        }
        left
    }

    /// With what it may lag: two turns, and a frame for each queue and one more, as
    /// `parfait::queues::Plan::lag_bytes` says.
    #[test]
    fn a_backlogged_queue_never_lags_its_weight_by_more_than_the_bound() {
        let (weights, quantum, sizes) = ([7_u32, 60, 1, 30], 256_u64, [1_500, 300, 4_400, 1_106]);
        let queues = (0..4).fold(Queues::new(&weights, quantum as u32, 1 << 30), |queues, at| {
            queues.bind(8 + at, at)
        });
        let left = served(queues, &sizes, 4_000_000);
        for (queue, weight) in weights.into_iter().enumerate() {
            let turn = u64::from(weight) * quantum;
            let bound = (2 * turn + (1 + 4) * 4_400) as i64;
            // The most that it lags in any interval: the rise of (due - sent) above its least value
            // before.
            let (mut ahead, mut least, mut lag) = (0_i64, 0_i64, 0_i64);
            for &(served, bytes) in &left {
                let own = if served == queue { bytes as i64 } else { 0 };
                ahead += (bytes * u64::from(weight) / 98) as i64 - own;
                least = least.min(ahead);
                lag = lag.max(ahead - least);
            }
            assert!(lag <= bound, "queue {queue}: lags {lag} bytes, allowed {bound}");
            assert!(lag > 0, "nothing was measured");
        }
    }

    #[test]
    fn what_queues_leave_unused_goes_to_the_others_in_order() {
        let queues = Queues::new(&[90, 5, 5], 256, 1 << 20).bind(8, 0).bind(9, 1).bind(10, 2);
        let mut link = link(1 << 30);
        link.set_queues(queues);
        enqueue(&mut link, Time::ZERO, 0, 100, 8);
        for packet in 1..41 {
            enqueue(&mut link, Time::ZERO, packet, 1_000, 9 + (packet % 2) as u8);
        }
        link.take_departed();
        let order: Vec<u32> = core::iter::from_fn(|| {
            let next = start_next(&mut link, Time::ZERO)?.0;
            link.take_departed();
            Some(next)
        })
        .collect();
        assert_eq!(order.len(), 40, "the port never waits for a queue that is empty");
        for parity in [0, 1] {
            let own: Vec<u32> = order.iter().copied().filter(|one| one % 2 == parity).collect();
            assert!(own.is_sorted(), "{own:?}");
        }
    }

    #[test]
    fn a_queue_holds_what_it_may_and_what_is_bound_to_none_goes_first() {
        let mut link = link(1 << 30);
        assert!(link.set_queues(Queues::new(&[1, 1], 1_000, 250).bind(8, 0).bind(9, 1)));
        let at = Time::ZERO;
        enqueue(&mut link, at, 1, 100, 8);
        assert_eq!(enqueue(&mut link, at, 2, 200, 8), Enqueued::Waits);
        assert_eq!(enqueue(&mut link, at, 3, 100, 8), Enqueued::Dropped);
        assert_eq!(enqueue(&mut link, at, 4, 200, 9), Enqueued::Waits, "the others have their own");
        assert_eq!(enqueue(&mut link, at, 5, 64, 48), Enqueued::Waits);
        link.take_departed();
        assert_eq!(start_next(&mut link, at).unwrap().0, 5);
    }

    #[test]
    fn a_paused_class_waits_and_others_go_on() {
        let mut link = link(1 << 20);
        link.config.classes = 2;
        let at = Time::from_nanos;
        enqueue(&mut link, at(0), 1, 100, 0);
        link.set_paused(at(10), 0, true);
        enqueue(&mut link, at(20), 2, 100, 0);
        enqueue(&mut link, at(20), 3, 100, 63);
        assert_eq!(link.take_departed(), Some(1));
        assert_eq!(start_next(&mut link, at(100)), Some((3, at(200))));
        link.take_departed();
        assert_eq!(start_next(&mut link, at(200)), None);
        assert!(link.is_held(0) && !link.is_held(1));
        assert_eq!(enqueue(&mut link, at(200), 4, 100, 0), Enqueued::Waits);
        link.set_paused(at(300), 0, false);
        assert_eq!(start_next(&mut link, at(300)), Some((2, at(400))));
        assert_eq!(start_next(&mut link, at(300)), None, "one at a time");
        let stats = link.stats(at(300));
        assert_eq!((stats.pauses, stats.paused), (1, Duration::from_nanos(290)));
    }

    #[test]
    fn the_utilization_is_a_mean_of_rate_and_queue() {
        let mut link = link(1 << 30);
        let (at, base) = (Time::from_nanos, Duration::from_nanos(1_000));
        let percent = |link: &mut Link, ns| link.utilization(at(ns), base) * 100 / digest::ONE;
        // A byte per nanosecond: half of the time nothing leaves.
        for ns in (0..4_000).step_by(200) {
            enqueue(&mut link, at(ns), 1, 100, 0);
            link.take_departed();
            percent(&mut link, ns + 100);
        }
        let half = percent(&mut link, 4_000);
        assert!((40..=60).contains(&half), "{half}");
        // At the line's rate, with a queue of twice what leaves in T: a tenth of the way to 300 %.
        enqueue(&mut link, at(4_000), 1, 100, 0);
        enqueue(&mut link, at(4_000), 2, 2_000, 0);
        let queued = percent(&mut link, 4_100);
        assert!(queued.abs_diff(half + (300 - half) / 10) <= 1, "{queued}");
        assert_eq!(percent(&mut link, 4_100), queued, "nothing happens in no time");
        // What was longer ago than T no longer counts.
        assert_eq!(percent(&mut link, 9_000), 200);
    }

    #[test]
    fn the_highest_class_leaves_first_and_all_share_the_buffer() {
        let mut link = link(250);
        link.config.classes = 2;
        let at = Time::from_nanos;
        enqueue(&mut link, at(0), 1, 100, 0);
        assert_eq!(enqueue(&mut link, at(0), 2, 100, 31), Enqueued::Waits);
        assert_eq!(enqueue(&mut link, at(0), 3, 100, 32), Enqueued::Waits);
        assert_eq!(enqueue(&mut link, at(0), 4, 100, 63), Enqueued::Dropped);
        link.take_departed();
        assert_eq!(start_next(&mut link, at(100)), Some((3, at(200))));
        link.take_departed();
        assert_eq!(start_next(&mut link, at(200)), Some((2, at(300))));
    }
}
