//! The buffer of a switch: shared by all its ports, and guarded by priority flow control.
//!
//! Every packet that waits in a switch is charged to where it came in: its ingress port and its
//! traffic class. Up to `reserve` bytes, each has its own place; beyond, it takes from what all
//! share, up to a threshold that shrinks as the shared part fills:
//!
//! ```text
//! threshold = (buffer - all reserves - all headrooms - shared bytes in use) >> shift
//! ```
//!
//! With priority flow control (PFC, IEEE 802.1Qbb) a class that reaches its threshold pauses its
//! sender, and what still arrives until the pause is felt goes to the port's *headroom*. The sender
//! may go on when the headroom is empty and the class is `resume_offset` below its threshold. A
//! packet is dropped when neither the shared part nor the headroom takes it; without PFC there is
//! no headroom, so that is at the threshold. A pause ends by itself after some time, and is
//! refreshed before while the class stays paused, so a frame that is lost does no lasting harm. A
//! buffer that is less than all reserves and headrooms has them all the same, and nothing to share.
//!
//! Source: the switch of the simulations published with HPCC (Li et al., SIGCOMM 2019). How
//! switches queue packets on their way out is in [`link`](crate::link).

use alloc::vec::Vec;

use crate::link::MAX_CLASSES;

/// The buffer of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferConfig {
    /// All of it, in bytes.
    pub bytes: u64,
    /// Bytes that each ingress port and class has for itself.
    pub reserve: u64,
    /// A class may use the free shared bytes divided by 2^shift.
    pub shift: u32,
    /// Priority flow control.
    pub pfc: Option<Pfc>,
}

/// Priority flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pfc {
    /// Bytes below the threshold at which a paused sender may go on.
    pub resume_offset: u64,
    /// Bytes of headroom of each ingress port and class; `None` for what the link can still deliver
    /// until the pause is felt.
    pub headroom: Option<u64>,
    /// How long a pause lasts unless it is refreshed, in quanta of 512 bit times; it is refreshed
    /// after half of that while the class stays paused. `None` for pauses that last until they are
    /// ended.
    pub pause_quanta: Option<u16>,
}

impl Pfc {
    /// The longest pause that a frame can ask for (IEEE 802.1Qbb), which switches use.
    pub const LONGEST: u16 = u16::MAX;
}

impl BufferConfig {
    /// A lossless switch with a buffer of so many bytes.
    pub const fn lossless(bytes: u64) -> BufferConfig {
        let pause_quanta = Some(Pfc::LONGEST);
        let pfc = Pfc { resume_offset: 3 * 1024, headroom: None, pause_quanta };
        BufferConfig { pfc: Some(pfc), ..BufferConfig::lossy(bytes) }
    }

    /// A switch that drops packets, with a buffer of so many bytes.
    pub const fn lossy(bytes: u64) -> BufferConfig {
        BufferConfig { bytes, reserve: 4 * 1024, shift: 3, pfc: None }
    }
}

/// What a port and class use.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    /// Of its reserve, and of what all share.
    bytes: u64,
    headroom: u64,
    is_paused: bool,
}

/// The buffer of one switch.
#[derive(Debug)]
pub(crate) struct Buffer {
    config: BufferConfig,
    ports: Vec<[Used; MAX_CLASSES]>,
    /// By port: bytes of headroom of each class.
    headrooms: Vec<u64>,
    /// Bytes of the buffer that no port has for itself.
    shared: u64,
    shared_used: u64,
    /// Ports and classes whose senders are paused.
    paused: Vec<(usize, usize)>,
}

impl Buffer {
    /// For ports with these headrooms, unless the configuration says how much, and so many classes
    /// in use.
    pub(crate) fn new(config: BufferConfig, headrooms: Vec<u64>, classes: usize) -> Buffer {
        let fixed = config.pfc.and_then(|pfc| pfc.headroom);
        let headrooms: Vec<u64> = match config.pfc {
            Some(_) => headrooms.into_iter().map(|bytes| fixed.unwrap_or(bytes)).collect(),
            None => headrooms.into_iter().map(|_| 0).collect(),
        };
        let own: u64 = headrooms.iter().map(|headroom| headroom + config.reserve).sum();
        Buffer {
            config,
            ports: alloc::vec![[Used::default(); MAX_CLASSES]; headrooms.len()],
            shared: config.bytes.saturating_sub(own * classes as u64),
            headrooms,
            shared_used: 0,
            paused: Vec::new(),
        }
    }

    fn threshold(&self) -> u64 {
        self.threshold_with(self.shared_used)
    }

    /// The threshold if so many shared bytes were in use.
    fn threshold_with(&self, shared_used: u64) -> u64 {
        let free = self.shared.saturating_sub(shared_used);
        free.checked_shr(self.config.shift).unwrap_or(0)
    }

    fn beyond_reserve(&self, bytes: u64) -> u64 {
        bytes.saturating_sub(self.config.reserve)
    }

    /// What a port and class would have of the shared bytes if no more than `remaining` remained of
    /// what they have here. The headroom empties first.
    pub(crate) fn shared_left(&self, port: usize, class: usize, remaining: u64) -> u64 {
        self.beyond_reserve(remaining.min(self.ports[port][class].bytes))
    }

    /// What a port and class have beyond their reserve.
    fn shared_of(&self, used: &Used) -> u64 {
        self.beyond_reserve(used.bytes)
    }

    /// A packet of so many bytes came in; false if there is no room for it.
    pub(crate) fn admit(&mut self, port: usize, class: usize, bytes: u64) -> bool {
        let used = self.ports[port][class];
        let beyond = (used.bytes + bytes).saturating_sub(self.config.reserve);
        let is_within = beyond == 0 || beyond <= self.threshold();
        if is_within {
            self.shared_used += beyond - self.shared_of(&used);
            self.ports[port][class].bytes += bytes;
            return true;
        }
        let has_room = used.headroom + bytes <= self.headrooms[port];
        if has_room {
            self.ports[port][class].headroom += bytes;
        }
        has_room
    }

    /// A packet that came in there has left. The headroom empties first.
    pub(crate) fn release(&mut self, port: usize, class: usize, bytes: u64) {
        let before = self.ports[port][class];
        let from_headroom = bytes.min(before.headroom);
        let after = Used {
            bytes: before.bytes - (bytes - from_headroom),
            headroom: before.headroom - from_headroom,
            ..before
        };
        self.shared_used -= self.shared_of(&before) - self.shared_of(&after);
        self.ports[port][class] = after;
    }

    /// Whether the sender of a port's class must be told to pause, once.
    pub(crate) fn pauses(&mut self, port: usize, class: usize) -> bool {
        let used = self.ports[port][class];
        let (shared, threshold) = (self.shared_of(&used), self.threshold());
        let is_full = used.headroom > 0 || shared > 0 && shared >= threshold;
        let begins = self.config.pfc.is_some() && is_full && !used.is_paused;
        if begins {
            self.ports[port][class].is_paused = true;
            self.paused.push((port, class));
        }
        begins
    }

    /// A port and class whose sender must be told to go on, once: the threshold of all has risen.
    pub(crate) fn resumes(&mut self) -> Option<(usize, usize)> {
        let threshold = self.threshold();
        let is_free = |&(port, class): &(usize, usize)| {
            let used = &self.ports[port][class];
            used.headroom == 0 && self.is_below(self.shared_of(used), threshold)
        };
        let place = self.paused.iter().position(is_free)?;
        let (port, class) = self.paused.swap_remove(place);
        self.ports[port][class].is_paused = false;
        Some((port, class))
    }

    /// Whether packets are dropped only where the rules of priority flow control were broken.
    pub(crate) fn is_lossless(&self) -> bool {
        self.config.pfc.is_some()
    }

    /// Whether the sender of a port's class was told to pause, and not yet to go on.
    pub(crate) fn has_paused(&self, port: usize, class: usize) -> bool {
        self.ports[port][class].is_paused
    }

    /// A port whose link was down forgets what it told its sender.
    pub(crate) fn forget_pauses(&mut self, port: usize) {
        self.paused.retain(|&(other, _)| other != port);
        self.ports[port].iter_mut().for_each(|used| used.is_paused = false);
    }

    /// The switch has lost all packets, and forgotten all pauses.
    pub(crate) fn clear(&mut self) {
        self.ports.iter_mut().for_each(|port| *port = [Used::default(); MAX_CLASSES]);
        self.paused.clear();
        self.shared_used = 0;
    }

    /// Whether it holds nothing and pauses nobody.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_unused = |used: &Used| used.bytes == 0 && used.headroom == 0 && !used.is_paused;
        self.ports.iter().flatten().all(is_unused)
    }

    fn is_below(&self, shared: u64, threshold: u64) -> bool {
        let offset = self.config.pfc.map_or(0, |pfc| pfc.resume_offset);
        shared == 0 || shared + offset <= threshold
    }

    /// Whether the sender of a port's class would go on if no more than `remaining` bytes remained
    /// of what it has here, and `shared_used` shared bytes of all.
    pub(crate) fn would_resume(
        &self,
        port: usize,
        class: usize,
        remaining: u64,
        shared_used: u64,
    ) -> bool {
        let used = &self.ports[port][class];
        // The headroom empties first.
        let is_empty = remaining <= used.bytes;
        let threshold = self.threshold_with(shared_used);
        !used.is_paused || is_empty && self.is_below(self.beyond_reserve(remaining), threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ports and one class: 2 kB reserves, 4 kB headrooms, 64 kB shared.
    fn buffer(pfc: bool) -> Buffer {
        let (headroom, pause_quanta) = (Some(4_000), None);
        let pfc = pfc.then_some(Pfc { resume_offset: 1_000, headroom, pause_quanta });
        let bytes = 64_000 + 2 * 2_000 + if pfc.is_some() { 2 * 4_000 } else { 0 };
        let config = BufferConfig { bytes, reserve: 2_000, shift: 1, pfc };
        Buffer::new(config, alloc::vec![0, 0], 1)
    }

    #[test]
    fn the_threshold_shrinks_as_the_buffer_fills() {
        let mut buffer = buffer(false);
        // A port alone: x beyond its reserve as long as x <= (64,000 - what it has) / 2.
        let admitted = (0..100).filter(|_| buffer.admit(0, 0, 1_000)).count();
        assert_eq!(admitted, 2 + 21);
        // The other one gets half of what is left.
        let other = (0..100).filter(|_| buffer.admit(1, 0, 1_000)).count();
        assert_eq!(other, 2 + 14);
        for _ in 0..admitted {
            buffer.release(0, 0, 1_000);
        }
        for _ in 0..other {
            buffer.release(1, 0, 1_000);
        }
        assert_eq!((buffer.shared_used, buffer.ports[0][0].bytes), (0, 0));
        assert!(!buffer.admit(0, 0, 40_000));
    }

    #[test]
    fn a_full_class_pauses_uses_its_headroom_and_resumes() {
        let mut buffer = buffer(true);
        let mut admitted = 0;
        while !buffer.pauses(0, 0) {
            assert!(buffer.admit(0, 0, 1_000));
            admitted += 1;
        }
        assert!(buffer.ports[0][0].is_paused && !buffer.pauses(0, 0), "told once");
        // What is on its way: to the threshold, then into the headroom, then nowhere.
        let late = (0..100).filter(|_| buffer.admit(0, 0, 1_000)).count();
        assert_eq!(late, 3);
        assert_eq!(buffer.ports[0][0].headroom, 4_000);
        assert!(buffer.admit(1, 0, 1_000), "others are not concerned");
        let mut left = 0;
        while buffer.resumes().is_none() {
            buffer.release(0, 0, 1_000);
            left += 1;
        }
        assert!(!buffer.ports[0][0].is_paused && left >= 5, "{left}");
        for _ in left..admitted + late {
            buffer.release(0, 0, 1_000);
        }
        buffer.release(1, 0, 1_000);
        assert_eq!((buffer.shared_used, buffer.resumes()), (0, None));
    }

    #[test]
    fn a_sender_goes_on_when_others_have_left() {
        let mut buffer = buffer(true);
        while !buffer.pauses(0, 0) {
            assert!(buffer.admit(0, 0, 1_000));
        }
        // Another port takes much of the buffer, so the threshold of all is lower.
        while !buffer.pauses(1, 0) {
            assert!(buffer.admit(1, 0, 1_000));
        }
        for _ in 0..5 {
            buffer.release(0, 0, 1_000);
        }
        assert_eq!((buffer.ports[0][0].bytes, buffer.resumes()), (19_000, None));
        assert!(!buffer.would_resume(0, 0, 19_000, buffer.shared_used));
        assert!(buffer.would_resume(0, 0, 19_000, 17_000));
        // All of it leaves, and the first port may go on, too, with what it has.
        let total = buffer.ports[1][0].bytes + buffer.ports[1][0].headroom;
        let mut resumed = Vec::new();
        for _ in 0..total / 1_000 {
            buffer.release(1, 0, 1_000);
            resumed.extend(core::iter::from_fn(|| buffer.resumes()));
        }
        resumed.sort_unstable();
        assert_eq!(resumed, [(0, 0), (1, 0)]);
    }
}
