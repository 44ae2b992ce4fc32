//! Pauses as switches have them: they end by themselves, are refreshed, and are guarded by a
//! watchdog.
//!
//! A pause lasts [`Pfc::pause_quanta`](crate::buffer::Pfc::pause_quanta) unless its sender repeats
//! it, which it does after half of that as long as its class stays full. So a pause that is lost is
//! made up for, and one whose end is lost ends.
//!
//! A watchdog looks at each class of each link out of a switch. A class in which the same packet
//! has been held back for [`Watchdog::detection`] is stuck: what waits is dropped, and pauses are
//! ignored until none has come for [`Watchdog::restoration`] (as SONiC's PFC watchdog does; its
//! defaults are 200 ms each). On a link with credits, what waits is dropped, as the lifetime limit
//! at the head of an InfiniBand queue has it.

use alloc::vec;
use alloc::vec::Vec;

use roce::{Duration, Time};

use super::{Cause, Event, Network};
use crate::link::{MAX_CLASSES, Vertex, Waiting};
use crate::memory::NodeMemory;

/// When a switch gives up on a link that holds packets back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watchdog {
    /// How long the same packet is held back before what waits is dropped; up to a quarter more, as
    /// it looks four times in that.
    pub detection: Duration,
    /// How long no pause may have come until pauses are obeyed again.
    pub restoration: Duration,
}

impl Watchdog {
    /// The defaults of SONiC.
    pub const SONIC: Watchdog =
        Watchdog { detection: Duration::from_millis(200), restoration: Duration::from_millis(200) };

    fn interval(&self) -> Duration {
        Duration::from_nanos((self.detection.as_nanos() / 4).max(1))
    }
}

/// What is known of a class.
#[derive(Clone, Copy, Debug, Default)]
struct Guard {
    /// The packet that is held back, and since when.
    held: Option<(u32, Time)>,
    /// Until when pauses are ignored.
    ignores_until: Time,
}

/// The watchdogs of all switches.
#[derive(Debug)]
pub(super) struct Watch {
    config: Option<Watchdog>,
    /// By link.
    guards: Vec<[Guard; MAX_CLASSES]>,
    is_looking: bool,
}

impl Watch {
    pub(super) fn new(config: Option<Watchdog>, links: usize) -> Watch {
        let links = if config.is_some() { links } else { 0 };
        Watch { config, guards: vec![[Guard::default(); MAX_CLASSES]; links], is_looking: false }
    }
}

impl<M: NodeMemory> Network<M> {
    // ---- pauses that end -----------------------------------------------------------------------

    /// How long a pause lasts on a link, where it ends by itself.
    pub(super) fn pause_time(&self, link: u32) -> Option<Duration> {
        self.quanta.map(|quanta| self.links[link as usize].pause_time(quanta))
    }

    /// A class was paused, or the pause was repeated: it ends in time.
    pub(super) fn limit_pause(&mut self, link: u32, class: u8) {
        let Some(span) = self.pause_time(link) else {
            return;
        };
        let entry = &mut self.links[link as usize];
        entry.pause_ends[usize::from(class)] = self.now + span;
        if entry.ending & 1 << class == 0 {
            entry.ending |= 1 << class;
            self.events.add(self.now + span, Event::PauseEnds { link, class });
        }
    }

    /// The timer of a pause: it may have been repeated meanwhile.
    pub(super) fn pause_ends(&mut self, link: u32, class: u8) {
        let entry = &mut self.links[link as usize];
        let at = entry.pause_ends[usize::from(class)];
        let is_paused = entry.is_paused(class.into());
        if is_paused && at > self.now {
            return self.events.add(at, Event::PauseEnds { link, class });
        }
        entry.ending &= !(1 << class);
        if is_paused {
            self.end_pause(link, class);
        }
    }

    /// A pause was sent for a link: it is repeated while it is needed.
    pub(super) fn keep_paused(&mut self, link: u32, class: u8) {
        let Some(span) = self.pause_time(link) else {
            return;
        };
        let entry = &mut self.links[link as usize];
        if entry.refreshing & 1 << class == 0 {
            entry.refreshing |= 1 << class;
            let half = Duration::from_nanos(span.as_nanos() / 2);
            self.events.add(self.now + half, Event::RefreshDue { link, class });
        }
    }

    pub(super) fn refresh_pause(&mut self, link: u32, class: u8) {
        let entry = &mut self.links[link as usize];
        entry.refreshing &= !(1 << class);
        let (Vertex::Switch(switch), port) = (entry.end, entry.port) else {
            return;
        };
        let buffer = self.buffers.get(switch as usize);
        if buffer.is_some_and(|buffer| buffer.has_paused(port.into(), class.into())) {
            self.send_pause(link, class.into(), true);
        }
    }

    // ---- the watchdog --------------------------------------------------------------------------

    /// A packet waits: the watchdog looks from now on, until nothing does.
    #[inline]
    pub(super) fn watch_queues(&mut self) {
        if let Some(config) = self.watch.config
            && !self.watch.is_looking
        {
            self.watch.is_looking = true;
            self.events.add(self.now + config.interval(), Event::Look);
        }
    }

    pub(super) fn look_at_queues(&mut self) {
        let Some(config) = self.watch.config else {
            return;
        };
        self.watch.is_looking = false;
        for link in 0..self.links.len() as u32 {
            let entry = &self.links[link as usize];
            if !matches!(entry.start, Vertex::Switch(_)) || entry.total_bytes() == 0 {
                continue;
            }
            for class in 0..MAX_CLASSES {
                self.look_at(link, class, config);
            }
            self.watch_queues();
        }
    }

    fn look_at(&mut self, link: u32, class: usize, config: Watchdog) {
        let entry = &self.links[link as usize];
        let head = entry.head(class).filter(|_| entry.is_held(class));
        let guard = &mut self.watch.guards[link as usize][class];
        guard.held = match (head, guard.held) {
            (Some(head), Some((known, since))) if head == known => Some((head, since)),
            (head, _) => head.map(|head| (head, self.now)),
        };
        if guard.held.is_some_and(|(_, since)| self.now >= since + config.detection) {
            guard.held = None;
            guard.ignores_until = self.now + config.restoration;
            self.give_up_on(link, class);
        }
    }

    fn give_up_on(&mut self, link: u32, class: usize) {
        let entry = &mut self.links[link as usize];
        entry.is_disturbed = true;
        let dropped = entry.drain(self.now, class);
        self.failures.conduct.watchdog_trips += 1;
        self.failures.conduct.watchdog_drops += dropped.len() as u64;
        for Waiting { packet, bytes, ingress, .. } in dropped {
            self.discharge(link, ingress, bytes);
            self.vacate(ingress, bytes);
            self.lose(Cause::Watchdog, packet);
        }
        self.end_pause(link, class as u8);
    }

    /// Whether a pause that arrives is ignored.
    pub(super) fn ignores_pause(&mut self, link: u32, class: u8) -> bool {
        let (now, config) = (self.now, self.watch.config);
        let guards = self.watch.guards.get_mut(link as usize);
        let Some((guard, config)) = guards.map(|all| &mut all[usize::from(class)]).zip(config)
        else {
            return false;
        };
        let ignores = now < guard.ignores_until;
        if ignores {
            guard.ignores_until = now + config.restoration;
        }
        ignores
    }
}
