//! Links and switches that fail while flows are under way, at times that are known before.
//!
//! Several faults may strike the same place at once: a link is up when none of them holds it down,
//! as slow as the worst of them makes it, and has the bit errors of all together.

use alloc::vec::Vec;

use roce::Time;

use crate::memory::NodeMemory;
use crate::network::Network;

/// Most faults of a run.
pub const MAX_FAULTS: usize = 4_096;

/// What is wrong, and where. Links are numbered in the order in which they were added to the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A link is down, in both directions.
    LinkDown(u32),
    /// A switch is down, with all its links.
    SwitchDown(u32),
    /// A link has a fraction of its rate.
    SlowLink {
        /// Which one.
        link: u32,
        /// What its rate is divided by, at least 2.
        by: u32,
    },
    /// Bits flip on a link, in both directions.
    BitErrors {
        /// Which one.
        link: u32,
        /// How many of 10^15.
        per_10_15: u64,
    },
}

impl Trouble {
    fn is_at_the_place_of(self, other: Trouble) -> bool {
        match (self, other) {
            (Trouble::LinkDown(a), Trouble::LinkDown(b)) => a == b,
            (Trouble::SwitchDown(a), Trouble::SwitchDown(b)) => a == b,
            (Trouble::SlowLink { link: a, .. }, Trouble::SlowLink { link: b, .. })
            | (Trouble::BitErrors { link: a, .. }, Trouble::BitErrors { link: b, .. }) => a == b,
            _ => false,
        }
    }
}

/// A fault and when it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedFault {
    /// What happens.
    pub trouble: Trouble,
    /// From when on.
    pub from: Time,
    /// Until when, if it ends; one that would end before it begins never strikes.
    pub until: Option<Time>,
}

/// A beginning or an end to come.
#[derive(Clone, Copy, Debug)]
struct Change {
    at: Time,
    fault: usize,
    begins: bool,
}

/// The faults of a run under way.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    faults: Vec<TimedFault>,
    /// By fault.
    is_active: Vec<bool>,
    /// The next one last.
    to_come: Vec<Change>,
    /// Faults that have begun.
    pub(super) begun: u32,
}

impl Schedule {
    pub(super) fn new(faults: &[TimedFault]) -> Schedule {
        let change = |(fault, timed): (usize, &TimedFault)| {
            let begins = Change { at: timed.from, fault, begins: true };
            let ends = timed.until.map(|at| Change { at, fault, begins: false });
            [Some(begins), ends]
        };
        let strikes = |timed: &TimedFault| timed.until.is_none_or(|until| until >= timed.from);
        let faults: Vec<TimedFault> = faults.iter().copied().filter(strikes).collect();
        let changes = faults.iter().enumerate().flat_map(change).flatten();
        let mut to_come: Vec<Change> = changes.collect();
        // At one instant what begins comes first: a place does not recover for no time between two
        // faults.
        to_come.sort_by_key(|change| core::cmp::Reverse((change.at, !change.begins, change.fault)));
        Schedule { is_active: alloc::vec![false; faults.len()], faults, to_come, begun: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// When the next one begins or ends.
    pub(super) fn next_at(&self) -> Option<Time> {
        self.to_come.last().map(|change| change.at)
    }

    /// Begins and ends what is due; returns whether anything was.
    pub(super) fn strike<M: NodeMemory>(&mut self, network: &mut Network<M>) -> bool {
        let mut has_changed = false;
        while let Some(change) = self.to_come.pop_if(|change| change.at <= network.now()) {
            let trouble = self.faults[change.fault].trouble;
            let before = self.state_at(trouble);
            self.is_active[change.fault] = change.begins;
            self.begun += u32::from(change.begins);
            let state = self.state_at(trouble);
            if state != before {
                apply(network, trouble, state);
            }
            has_changed = true;
        }
        has_changed
    }

    /// How bad it is where this strikes: 0 if it is not, or the divisor of a rate, or errors in
    /// 10^15 bits.
    fn state_at(&self, trouble: Trouble) -> u64 {
        let active = self.faults.iter().zip(&self.is_active).filter(|&(_, &is_active)| is_active);
        let here = active.map(|(fault, _)| fault.trouble);
        let here = here.filter(|other| other.is_at_the_place_of(trouble));
        here.fold(0, |state, one| match one {
            Trouble::LinkDown(_) | Trouble::SwitchDown(_) => 1,
            Trouble::SlowLink { by, .. } => state.max(by.into()),
            Trouble::BitErrors { per_10_15, .. } => state.saturating_add(per_10_15),
        })
    }
}

fn apply<M: NodeMemory>(network: &mut Network<M>, trouble: Trouble, state: u64) {
    // Of the two directions of a link, the first one.
    match trouble {
        Trouble::LinkDown(link) => network.set_link(2 * link, state == 0),
        Trouble::SwitchDown(switch) => network.set_switch(switch, state == 0),
        Trouble::SlowLink { link, .. } => network.slow_down(2 * link, state.max(1)),
        Trouble::BitErrors { link, .. } => network.set_bit_errors(2 * link, state),
    }
}
