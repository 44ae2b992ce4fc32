//! Switches that share a buffer among their ports: who is charged, who is paused, and who waits for
//! whom.
//!
//! The rules of the buffer are in [`buffer`](crate::buffer), those of a queue in
//! [`link`](crate::link). Here are the events between them, and the search for circular waiting.

use alloc::vec::Vec;
use core::fmt;

use roce::Duration;

use super::{Defect, Event, Network};
use crate::buffer::{Buffer, BufferConfig};
use crate::credits::{BLOCK_BYTES, blocks};
use crate::link::{FRAME_BYTES, Ingress, Link, LinkConfig, MAX_CLASSES, UNLIMITED, Vertex};
use crate::memory::NodeMemory;

/// A pause frame on the link: 64 bytes, preamble and gap.
const PAUSE_BYTES: u64 = 84;

/// A flow control packet of InfiniBand.
const CREDIT_BYTES: u64 = 8;

/// After a packet was lost, the time until the sender says what it has sent; it must within 65,536
/// symbol times, 262 us at 2.5 Gbit/s.
const TOTAL_AFTER: Duration = Duration::from_micros(26);

/// Numbers the links into each switch, and makes the switches' buffers.
pub(super) fn buffers(
    links: &mut [Link],
    switches: u32,
    config: Option<BufferConfig>,
) -> Vec<Buffer> {
    let mut headrooms = alloc::vec![Vec::new(); switches as usize];
    let mut classes = 1;
    for number in 0..links.len() {
        let back = links[number ^ 1].config;
        let link = &mut links[number];
        classes = classes.max(usize::from(link.config.classes));
        if let Vertex::Switch(switch) = link.end {
            link.port = headrooms[switch as usize].len() as u16;
            headrooms[switch as usize].push(headroom(&link.config, &back));
        }
    }
    let Some(config) = config else {
        return Vec::new();
    };
    let classes = classes.min(MAX_CLASSES);
    headrooms.into_iter().map(|headrooms| Buffer::new(config, headrooms, classes)).collect()
}

/// What a link can still deliver once a packet has found its class full: that packet; until the
/// frame that departs ahead of the pause has left on the way back, and the pause behind it; what is
/// on the cable in both directions; and the frame that has begun.
pub(crate) fn headroom(link: &LinkConfig, back: &LinkConfig) -> u64 {
    let frame = u64::from(FRAME_BYTES);
    if link.rate_bps == UNLIMITED {
        return 2 * frame;
    }
    let time = back.serialization(frame + PAUSE_BYTES) + back.delay + link.delay;
    let bits_ns = u128::from(link.rate_bps) * u128::from(time.as_nanos());
    (bits_ns / 8_000_000_000) as u64 + 2 * frame
}

/// Links that wait for each other: each is paused until packets leave that wait for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// The traffic class.
    pub class: usize,
    /// Where the links start, in order. The last one ends where the first one starts.
    pub at: Vec<Vertex>,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "class {}: ", self.class)?;
        for vertex in &self.at {
            write!(f, "{vertex} -> ")?;
        }
        self.at.first().map_or(Ok(()), |first| first.fmt(f))
    }
}

impl<M: NodeMemory> Network<M> {
    /// Charges a packet that has to wait for `link` to the port by which it came; false if the
    /// switch has no room for it.
    pub(super) fn charge(&mut self, link: u32, ingress: Option<Ingress>, bytes: u32) -> bool {
        let Some((ingress, buffer, port)) = self.account_of(link, ingress) else {
            return true;
        };
        let class = usize::from(ingress.class);
        let is_admitted = buffer.admit(port, class, bytes.into());
        if buffer.pauses(port, class) && self.failures.defect != Defect::PauseForgotten {
            self.send_pause(ingress.link, class, true);
        }
        is_admitted
    }

    /// A packet that waited for `link` has begun to depart. Every sender that this lets go on is
    /// told.
    pub(super) fn discharge(&mut self, link: u32, ingress: Option<Ingress>, bytes: u32) {
        let Some((ingress, buffer, port)) = self.account_of(link, ingress) else {
            return;
        };
        buffer.release(port, ingress.class.into(), bytes.into());
        let end = self.links[link as usize].start;
        while let Vertex::Switch(switch) = end
            && let Some((port, class)) = self.buffers[switch as usize].resumes()
        {
            let is_it = |link: &Link| link.end == end && usize::from(link.port) == port;
            if let Some(link) = self.links.iter().position(is_it) {
                self.send_pause(link as u32, class, false);
            }
        }
    }

    /// The buffer of the switch where `link` starts, and a packet's port in it. The link by which
    /// it came is not looked at: of many, it is hardly in the processor's cache.
    fn account_of(
        &mut self,
        link: u32,
        ingress: Option<Ingress>,
    ) -> Option<(Ingress, &mut Buffer, usize)> {
        let ingress = ingress?;
        let Vertex::Switch(switch) = self.links[link as usize].start else {
            return None;
        };
        Some((ingress, self.buffers.get_mut(switch as usize)?, ingress.port.into()))
    }

    /// Sends a pause, or its end, to the other end of a link: back on the other direction of the
    /// cable, ahead of everything that waits there.
    pub(super) fn send_pause(&mut self, link: u32, class: usize, is_paused: bool) {
        let (back, class) = (&self.links[link as usize ^ 1], class as u8);
        let at = back.leaves_ahead(self.now, PAUSE_BYTES) + back.config.delay;
        let epoch = back.epoch;
        self.events.add(at, Event::Flow { link, class, epoch, is_paused });
        if is_paused {
            self.keep_paused(link, class);
        }
    }

    pub(super) fn set_flow(&mut self, link: u32, class: u8, epoch: u8, is_paused: bool) {
        let entry = &self.links[link as usize];
        let would_change = entry.is_paused(class.into()) != is_paused;
        if self.is_void(link, epoch) || self.loses_control(link, would_change) {
            return;
        }
        if !is_paused {
            self.end_pause(link, class);
        } else if !self.ignores_pause(link, class) && self.failures.defect != Defect::PauseIgnored {
            self.links[link as usize].set_paused(self.now, class.into(), true);
            self.limit_pause(link, class);
        }
    }

    /// A class may go on.
    pub(super) fn end_pause(&mut self, link: u32, class: u8) {
        if self.failures.defect != Defect::ResumeLost {
            self.links[link as usize].set_paused(self.now, class.into(), false);
            self.start_next(link);
        }
    }

    /// Whether a frame for the start of a link was sent before the link was down, or is sent while
    /// it is.
    fn is_void(&self, link: u32, epoch: u8) -> bool {
        let Link { epoch: now, is_up, .. } = self.links[link as usize];
        epoch != now || !is_up && self.failures.resets_ports()
    }

    // ---- credits -------------------------------------------------------------------------------

    /// A packet takes its place in the buffer at the end of a link with credits; false if it has
    /// none, which would be a bug of the sender.
    pub(super) fn occupy(&mut self, link: u32, id: u32) -> bool {
        if self.links[link as usize].config.credits.is_none() {
            return true;
        }
        let (class, bytes) = self.size_on(link, id);
        let lane = self.links[link as usize].lane(class);
        let fits = lane.is_none_or(|lane| lane.receiver.receive(blocks(bytes)));
        if !fits {
            self.links[link as usize].count_drop();
            self.failures.conduct.overruns += 1;
        }
        fits
    }

    /// A packet has left the buffer at the end of the link by which it came.
    pub(super) fn vacate(&mut self, ingress: Option<Ingress>, bytes: u32) {
        let Some(Ingress { link, class, .. }) = ingress else {
            return;
        };
        let class = usize::from(class);
        let Some(lane) = self.links[link as usize].lane(class) else {
            return;
        };
        lane.receiver.free(blocks(bytes));
        self.send_limit(link, class);
    }

    /// A node takes a packet out of the buffer of its link at once.
    pub(super) fn consume(&mut self, link: u32, id: u32) {
        if self.links[link as usize].config.credits.is_some() {
            let (class, bytes) = self.size_on(link, id);
            let port = self.links[link as usize].port;
            self.vacate(Some(Ingress { link, port, class: class as u8 }), bytes);
        }
    }

    fn size_on(&mut self, link: u32, id: u32) -> (usize, u32) {
        let packet = self.pool.transit(id);
        (self.links[link as usize].class(packet.dscp), packet.bytes)
    }

    fn send_limit(&mut self, link: u32, class: usize) {
        let Some(lane) = self.links[link as usize].lane(class) else {
            return;
        };
        let limit = lane.receiver.limit();
        let back = &self.links[link as usize ^ 1];
        let at = back.leaves_ahead(self.now, CREDIT_BYTES) + back.config.delay;
        let epoch = back.epoch;
        self.events.add(at, Event::Limit { link, class: class as u8, epoch, limit });
    }

    pub(super) fn hear_limit(&mut self, link: u32, class: u8, epoch: u8, limit: u16) {
        if self.is_void(link, epoch) {
            return;
        }
        let lane = self.links[link as usize].lane(class.into());
        let would_change = lane.is_some_and(|lane| lane.sender.limit() != limit);
        if self.loses_control(link, would_change) {
            // The next one comes in time, as the sender's does.
            return self.events.add(self.now + TOTAL_AFTER, Event::TotalDue { link, class });
        }
        if let Some(lane) = self.links[link as usize].lane(class.into()) {
            lane.sender.heard(limit);
            self.start_next(link);
        }
    }

    /// A packet was lost on a link: the credit that it took comes back with the sender's next flow
    /// control packet.
    pub(super) fn resend_total(&mut self, link: u32, id: u32) {
        let (class, _) = self.size_on(link, id);
        let leaks = self.failures.defect == Defect::CreditLeaked;
        if self.links[link as usize].lane(class).is_some() && !leaks {
            self.events.add(self.now + TOTAL_AFTER, Event::TotalDue { link, class: class as u8 });
        }
    }

    /// The sending end of a link says what it has sent, behind what it is sending now.
    pub(super) fn send_total(&mut self, link: u32, class: u8) {
        let entry = &mut self.links[link as usize];
        let at = entry.leaves_ahead(self.now, CREDIT_BYTES) + entry.config.delay;
        if let Some(lane) = entry.lane(class.into()) {
            let total = lane.sender.total();
            let epoch = self.links[link as usize].epoch;
            self.events.add(at, Event::Total { link, class, epoch, total });
        }
    }

    pub(super) fn hear_total(&mut self, link: u32, class: u8, epoch: u8, total: u16) {
        if self.is_void(link, epoch) {
            return;
        }
        let lane = self.links[link as usize].lane(class.into());
        let would_change = lane.is_some_and(|lane| lane.receiver.received() != total);
        if self.loses_control(link, would_change) {
            return self.events.add(self.now + TOTAL_AFTER, Event::TotalDue { link, class });
        }
        if let Some(lane) = self.links[link as usize].lane(class.into()) {
            lane.receiver.heard(total);
            self.send_limit(link, class.into());
        }
    }

    // ---- circular waiting ----------------------------------------------------------------------

    /// Links that wait for each other for ever, if there are any, in a network whose links all have
    /// the same classes. Call it where nothing seems to move: it looks at every packet that waits
    /// behind a pause. Of packets of other classes it assumes that they leave.
    pub fn find_deadlock(&self) -> Option<Deadlock> {
        (0..MAX_CLASSES).find_map(|class| self.deadlock_of(class))
    }

    fn deadlock_of(&self, class: usize) -> Option<Deadlock> {
        let is_held = |&link: &u32| self.links[link as usize].is_held(class);
        let mut stuck: Vec<u32> = (0..self.links.len() as u32).filter(is_held).collect();
        // A link is not stuck if what waits for links that can move is enough to resume it.
        loop {
            let before = stuck.len();
            let kept = stuck.clone();
            stuck.retain(|&link| !self.can_resume(link, class, &kept));
            if stuck.len() == before {
                break;
            }
        }
        stuck.iter().find_map(|&first| self.circle_from(first, class, &stuck))
    }

    /// Follows the links that wait for each other from one of them until one comes again.
    fn circle_from(&self, first: u32, class: usize, stuck: &[u32]) -> Option<Deadlock> {
        let mut way = alloc::vec![first];
        loop {
            let next = self.waits_for(*way.last()?, class, stuck).next()?.0;
            if let Some(start) = way.iter().position(|&link| link == next) {
                let at = way[start..].iter().map(|&link| self.links[link as usize].start).collect();
                return Some(Deadlock { class, at });
            }
            way.push(next);
        }
    }

    /// Whether a link would go on once everything has left that waits for links outside `stuck`.
    fn can_resume(&self, link: u32, class: usize, stuck: &[u32]) -> bool {
        let Link { end: Vertex::Switch(switch), port, .. } = self.links[link as usize] else {
            return true;
        };
        let remaining =
            |link: u32| -> u64 { self.waits_for(link, class, stuck).map(|(_, bytes)| bytes).sum() };
        let would_resume = self.buffers.get(switch as usize).is_none_or(|buffer| {
            let end = Vertex::Switch(switch);
            let into = (0..).zip(&self.links).filter(|(_, other)| other.end == end);
            let shared = into.map(|(number, other)| {
                buffer.shared_left(other.port.into(), class, remaining(number))
            });
            let shared = shared.sum();
            buffer.would_resume(port.into(), class, remaining(link), shared)
        });
        would_resume && self.links[link as usize].would_get_credit(class, remaining(link))
    }

    /// The links of `stuck` for which packets wait that came by `link`, and how many bytes.
    fn waits_for<'a>(
        &'a self,
        link: u32,
        class: usize,
        stuck: &'a [u32],
    ) -> impl Iterator<Item = (u32, u64)> + 'a {
        let end = self.links[link as usize].end;
        let onward = stuck.iter().filter(move |&&next| self.links[next as usize].start == end);
        let unit = if self.links[link as usize].config.credits.is_some() { BLOCK_BYTES } else { 1 };
        let bytes = onward
            .map(move |&next| (next, self.links[next as usize].bytes_from(link, class, unit)));
        bytes.filter(|&(_, bytes)| bytes > 0)
    }

    /// How often the end of a link has paused a class of it, since statistics were last reset.
    pub fn pauses(&mut self) -> u64 {
        let now = self.now;
        self.links.iter_mut().map(|link| link.stats(now).pauses).sum()
    }

    /// How long the links out of nodes and switches were paused, in all, since statistics were last
    /// reset.
    pub fn paused(&mut self) -> Duration {
        let now = self.now;
        let paused = self.links.iter_mut().map(|link| link.stats(now).paused);
        paused.fold(Duration::ZERO, |sum, paused| sum + paused)
    }
}
