//! The faults of the network, their rates, and whether they made a difference.
//!
//! A fault is *injected* when the network applies it, and *effective* when an endpoint could notice
//! it:
//!
//! | fault | injected | effective when |
//! |---|---|---|
//! | loss | a packet vanishes | its queue pair was there to receive it |
//! | duplicate | a packet arrives twice | both copies reached a queue pair that was there |
//! | reorder | a packet is delayed by microseconds | a later packet of its flow arrived first |
//! | delay | a packet is delayed by up to milliseconds | the same, or its sender had retransmitted meanwhile |
//! | flip | one bit is flipped | the receiver refused the packet |
//! | truncate | the end is cut off | the receiver refused the packet |
//! | stray | a copy with a sequence number out of range, ICRC right | it reached a queue pair that was there |
//! | flap | a link is down for a while | a packet was lost to it |
//! | restart | a node loses all state | a peer had work outstanding towards it |
//! | back-pressure | a destination admits no packets for a while | a queue pair with packets for it was parked |
//! | link down | a link between switches is down for a while | a packet was lost to it |
//! | switch down | a switch is down for a while, and loses all that it holds | a packet was lost to it |
//! | slow link | a link between switches has a fraction of its rate for a while | a packet left on it |
//! | bit error | a bit flips on a link behind a switch, or inside a switch | as loss, or the receiver refused the packet |
//! | pause loss | a pause, its end, or a flow control packet is lost | it would have changed what its receiver does |
//! | pause storm | a node pauses the switch for a while | packets waited for it |

use core::fmt;

use crate::chance::Chance;

/// Kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the table of the module says what they are")]
pub enum Fault {
    Loss,
    Duplicate,
    Reorder,
    Delay,
    Flip,
    Truncate,
    Stray,
    Flap,
    Restart,
    BackPressure,
    LinkDown,
    SwitchDown,
    SlowLink,
    BitError,
    PauseLoss,
    PauseStorm,
}

impl Fault {
    /// Every kind, those of single packets first.
    pub const ALL: [Fault; 16] = [
        Fault::Loss,
        Fault::Duplicate,
        Fault::Reorder,
        Fault::Delay,
        Fault::Flip,
        Fault::Truncate,
        Fault::Stray,
        Fault::Flap,
        Fault::Restart,
        Fault::BackPressure,
        Fault::LinkDown,
        Fault::SwitchDown,
        Fault::SlowLink,
        Fault::BitError,
        Fault::PauseLoss,
        Fault::PauseStorm,
    ];

    /// The number of kinds for single packets: the first ones of [`ALL`](Fault::ALL).
    pub const PER_PACKET: usize = 7;

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Fault::Loss => "loss",
            Fault::Duplicate => "duplicate",
            Fault::Reorder => "reorder",
            Fault::Delay => "delay",
            Fault::Flip => "flip",
            Fault::Truncate => "truncate",
            Fault::Stray => "stray",
            Fault::Flap => "flap",
            Fault::Restart => "restart",
            Fault::BackPressure => "back-pressure",
            Fault::LinkDown => "link down",
            Fault::SwitchDown => "switch down",
            Fault::SlowLink => "slow link",
            Fault::BitError => "bit error",
            Fault::PauseLoss => "pause loss",
            Fault::PauseStorm => "pause storm",
        }
    }
}

/// How likely each fault is for a packet, in parts per million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultMix([u32; Fault::PER_PACKET]);

impl FaultMix {
    /// No faults.
    pub const NONE: FaultMix = FaultMix([0; Fault::PER_PACKET]);

    /// Swarm testing: each kind is enabled or not, and if it is, rare or frequent.
    pub fn draw(chance: &mut Chance, severity: u32) -> FaultMix {
        FaultMix(core::array::from_fn(|_| match chance.per_mille(500) {
            true => severity * chance.pick(&[1_000, 2_000, 5_000, 10_000, 20_000, 40_000]),
            false => 0,
        }))
    }

    /// The same with another rate for one kind; kinds that do not apply to packets are ignored.
    #[must_use]
    pub fn with(mut self, fault: Fault, per_million: u32) -> FaultMix {
        if let Some(rate) = self.0.get_mut(fault as usize) {
            *rate = per_million;
        }
        self
    }

    /// Whether this fault is injected now.
    pub(crate) fn strikes(&self, fault: Fault, chance: &mut Chance) -> bool {
        chance.per_million(self.0[fault as usize])
    }

    /// Whether this fault is enabled.
    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.0[fault as usize] > 0
    }

    /// Whether all of these faults are disabled.
    pub(crate) fn has_none(&self, faults: &[Fault]) -> bool {
        faults.iter().all(|&fault| !self.has(fault))
    }

    /// Whether all faults are disabled.
    pub fn is_none(&self) -> bool {
        *self == FaultMix::NONE
    }
}

impl fmt::Display for FaultMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds = Fault::ALL.iter().zip(self.0).filter(|(_, rate)| *rate > 0).peekable();
        if kinds.peek().is_none() {
            return f.write_str("no faults");
        }
        kinds.try_for_each(|(fault, rate)| write!(f, "{} {rate} ppm ", fault.name()))
    }
}

/// Faults by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Applied.
    pub injected: [u64; Fault::ALL.len()],
    /// Applied and noticeable.
    pub effective: [u64; Fault::ALL.len()],
}

impl FaultCounts {
    pub(crate) fn inject(&mut self, fault: Fault) {
        self.injected[fault as usize] += 1;
    }

    pub(crate) fn effect(&mut self, fault: Fault) {
        self.effective[fault as usize] += 1;
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &FaultCounts) {
        let sums = self.injected.iter_mut().chain(&mut self.effective);
        let more = other.injected.iter().chain(&other.effective);
        sums.zip(more).for_each(|(sum, more)| *sum += more);
    }
}

impl fmt::Display for FaultCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds = Fault::ALL.iter().zip(self.injected);
        kinds.try_for_each(|(fault, count)| write!(f, "{}={count} ", fault.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn a_mix_strikes_as_often_as_it_says() {
        let mix = FaultMix::NONE.with(Fault::Flip, 250_000).with(Fault::Restart, 7);
        let mut chance = Chance::new(3);
        let mut count = |fault| (0..10_000).filter(|_| mix.strikes(fault, &mut chance)).count();
        assert!((2_300..2_700).contains(&count(Fault::Flip)));
        assert_eq!(count(Fault::Loss), 0);
        assert_eq!(mix.to_string(), "flip 250000 ppm ");
        assert!(FaultMix::NONE.is_none());
    }

    #[test]
    fn a_fault_is_its_place_in_the_list() {
        assert!(Fault::ALL.iter().enumerate().all(|(at, &fault)| fault as usize == at));
    }
}
