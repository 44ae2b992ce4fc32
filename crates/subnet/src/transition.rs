//! From one set of tables to another, without a state between them that has a loop or a cyclic
//! channel dependency.
//!
//! While tables are written, each switch forwards a LID by the old entry or by the new one. A LID
//! may *move* if no mix of both makes a loop, and if the turns of all such mixes close no cycle
//! with those of all other LIDs. Blocks of LIDs that move can be written in any order, and packets
//! under way do no harm: what holds for every mix holds for them.
//!
//! Where only a loop is in the way, switches get their new entries *in order*: first those next to
//! the destination, then those whose new path leads over them. A packet then follows old entries up
//! to some switch, and new ones from there to the end, so it cannot come back.
//!
//! The other LIDs are *drained*: their entries that change are removed first, time passes until no
//! packet is under way to them, and then they get the new entries. A table with fewer entries makes
//! fewer turns, so neither half of that adds any that the old or the new tables have not.
//!
//! Where paths are divided among lanes, all of this holds lane by lane: packets of a path are in
//! the lane of the service level that its sender has, which is the old one or the new one. Where
//! the old one is not known, as from another manager, packets that follow old entries may be in
//! any.
//!
//! | stage | what is written |
//! |---|---|
//! | first | all of LIDs that move; of LIDs in order what is next to the destination; nothing in place of what drains |
//! | further | of LIDs in order what is one switch further away |
//! | last, after a rest | LIDs that were drained |

use alloc::vec::Vec;

use crate::forwarding::{Forwarding, Turns, Ways};
use crate::levels::Levels;
use crate::mad::LFT_BLOCK;
use topology::channels::Channels;
use topology::dependencies::{self, Dependencies};
use topology::routes::NO_ROUTE;

/// A block of a table to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// The switch, by number.
    pub switch: u32,
    /// The block.
    pub block: u32,
    /// Its entries.
    pub ports: [u8; LFT_BLOCK],
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// What tables hold in the end.
    pub target: Forwarding,
    /// Written one after the other.
    pub stages: Vec<Vec<Write>>,
    /// Before the last stage packets leave the fabric.
    pub rests: bool,
    /// LIDs that change.
    pub changed: usize,
    /// Those of them that change in order.
    pub ordered: usize,
    /// Those of them that are drained.
    pub drained: usize,
    /// The old tables have a cycle themselves; the first stage removes it.
    pub was_cyclic: bool,
}

/// Where the tables cannot be the end of anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Packets for this LID go round.
    Loop(u16),
    /// Packets can wait for each other in a cycle.
    CreditLoop,
}

/// The sources of packets: switches with end ports.
fn sources(channels: &Channels) -> impl Iterator<Item = u32> + Clone + '_ {
    let all = 0..channels.switches().len() as u32;
    all.filter(|switch| channels.sources(*switch) > 0)
}

/// What is wrong with tables for LIDs up to `top`, whose paths have service levels.
pub fn flaw(channels: &Channels, tables: &Forwarding, top: u16, levels: &Levels) -> Option<Flaw> {
    let lanes = Lanes { channels, count: levels.lanes.count() };
    let (mut ways, mut turns) = (Ways::new(channels), Turns::new(channels, lanes.count));
    for lid in 1..=top {
        ways.follow(lid, [tables, tables]);
        if ways.has_loop() {
            return Some(Flaw::Loop(lid));
        }
        lanes.add(&ways, None, lid, &[Some(levels)], &mut turns);
    }
    dependencies::cycle(&turns.lists(channels)).map(|_| Flaw::CreditLoop)
}

/// The lanes that packets can be in.
struct Lanes<'a> {
    channels: &'a Channels,
    count: u8,
}

impl Lanes<'_> {
    /// By lane, the switches from which packets to a LID may be in it, by any of these levels.
    /// Without levels, and where they say nothing, they may be in every lane.
    fn sources(&self, lid: u16, levels: &[Option<&Levels>]) -> Vec<(u8, Vec<u32>)> {
        if self.count == 1 {
            return alloc::vec![(0, sources(self.channels).collect())];
        }
        let may_be = |lane: u8, from: u32| {
            levels.iter().any(|levels| {
                levels.and_then(|levels| levels.known(from, lid)).is_none_or(|own| own == lane)
            })
        };
        let of_lane = |lane| sources(self.channels).filter(|from| may_be(lane, *from)).collect();
        let lanes = (0..self.count).map(|lane| (lane, of_lane(lane)));
        lanes.filter(|(_, sources): &(u8, Vec<u32>)| !sources.is_empty()).collect()
    }

    /// Adds the turns of all packets to a LID.
    fn add(
        &self,
        ways: &Ways<'_>,
        depths: Option<&[u16]>,
        lid: u16,
        levels: &[Option<&Levels>],
        turns: &mut Turns,
    ) {
        for (lane, sources) in self.sources(lid, levels) {
            let add = |from, to| turns.add(self.channels, lane, from, to);
            ways.turns(sources.into_iter(), depths, add);
        }
    }
}

impl Transition {
    /// From what switches hold to what they shall hold, with the service levels of both; `None` if
    /// the old ones are not known. Both are for the channels that are there now; `target` has no
    /// flaw. All blocks of switches that `is_unknown` says are written.
    pub fn new(
        channels: &Channels,
        (old, old_levels): (&Forwarding, Option<&Levels>),
        (target, levels): (Forwarding, &Levels),
        top: u16,
        is_unknown: impl Fn(u32) -> bool,
    ) -> Transition {
        let changed = target.differences(old);
        let count = levels.lanes.count().max(old_levels.map_or(1, |old| old.lanes.count()));
        let lanes = Lanes { channels, count };
        let plan = Plan { channels, old, target: &target, lanes, old_levels, levels };
        let (kinds, was_cyclic) = plan.kinds(&changed, top);
        let mut staged = old.clone();
        // By depth: LID and switch.
        let mut later: Vec<(u16, u16, u32)> = Vec::new();
        let mut ways = Ways::new(channels);
        let switches = 0..channels.switches().len() as u32;
        for (lid, kind) in changed.iter().zip(&kinds) {
            let differs = |switch: &u32| old.port(*switch, *lid) != target.port(*switch, *lid);
            let differing = switches.clone().filter(differs);
            match kind {
                Kind::Moves => differing.for_each(|at| staged.set(at, *lid, target.port(at, *lid))),
                Kind::Drains => differing.for_each(|at| staged.set(at, *lid, NO_ROUTE)),
                Kind::InOrder => {
                    ways.follow(*lid, [old, &target]);
                    let depths = ways.depths();
                    later.extend(differing.map(|at| (depths[at as usize], *lid, at)));
                }
            }
        }
        later.sort_unstable();
        let mut stages = alloc::vec![writes(channels, old, &staged, is_unknown)];
        for same_depth in later.chunk_by(|one, other| one.0 == other.0) {
            let before = staged.clone();
            same_depth
                .iter()
                .for_each(|(_, lid, at)| staged.set(*at, *lid, target.port(*at, *lid)));
            let stage = writes(channels, &before, &staged, |_| false);
            stages.push(stage);
        }
        let count = |kind| kinds.iter().filter(|one| **one == kind).count();
        let (changed, ordered, drained) =
            (changed.len(), count(Kind::InOrder), count(Kind::Drains));
        if drained > 0 {
            stages.push(writes(channels, &staged, &target, |_| false));
        }
        stages.retain(|stage| !stage.is_empty());
        Transition { target, stages, rests: drained > 0, changed, ordered, drained, was_cyclic }
    }

    /// Blocks that are written.
    pub fn blocks(&self) -> usize {
        self.stages.iter().map(Vec::len).sum()
    }
}

/// Blocks in which tables differ, and all of switches whose tables are unknown.
fn writes(
    channels: &Channels,
    old: &Forwarding,
    new: &Forwarding,
    is_unknown: impl Fn(u32) -> bool,
) -> Vec<Write> {
    let mut writes = Vec::new();
    for switch in 0..channels.switches().len() as u32 {
        let is_unknown = is_unknown(switch);
        for block in 0..new.blocks() {
            let (old, new) = (old.block(switch, block), new.block(switch, block));
            if let Some(ports) = new.filter(|new| is_unknown || old != Some(new)) {
                writes.push(Write { switch, block: block as u32, ports: *ports });
            }
        }
    }
    writes
}

/// How a LID changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Moves,
    InOrder,
    Drains,
}

/// What it takes to say how LIDs change.
struct Plan<'a> {
    channels: &'a Channels,
    old: &'a Forwarding,
    target: &'a Forwarding,
    lanes: Lanes<'a>,
    old_levels: Option<&'a Levels>,
    levels: &'a Levels,
}

impl Plan<'_> {
    /// How each of the LIDs changes, and whether the old tables have a cycle.
    fn kinds(&self, changed: &[u16], top: u16) -> (Vec<Kind>, bool) {
        let channels = self.channels;
        let mut ways = Ways::new(channels);
        let mut old_turns = Turns::new(channels, self.lanes.count);
        let mut next_changed = changed.iter().copied().peekable();
        for lid in 1..=top {
            ways.follow(lid, [self.old, self.old]);
            self.lanes.add(&ways, None, lid, &[self.old_levels], &mut old_turns);
            // What stays as it is may get another level.
            if next_changed.next_if_eq(&lid).is_none() && self.lanes.count > 1 {
                self.lanes.add(&ways, None, lid, &[Some(self.levels)], &mut old_turns);
            }
        }
        let mut turns = old_turns.clone();
        let mut kinds = Vec::new();
        for lid in changed {
            ways.follow(*lid, [self.old, self.target]);
            let mut kind = if ways.has_loop() { Kind::InOrder } else { Kind::Moves };
            if kind == Kind::InOrder && self.had_loop(*lid) {
                kind = Kind::Drains;
            } else {
                let depths = (kind == Kind::InOrder).then(|| ways.depths());
                self.lanes.add(&ways, depths.as_deref(), *lid, &self.both(), &mut turns);
            }
            kinds.push(kind);
        }
        if dependencies::cycle(&turns.lists(channels)).is_none() {
            return (kinds, false);
        }
        let old_turns = old_turns.lists(channels);
        if dependencies::cycle(&old_turns).is_some() {
            return (alloc::vec![Kind::Drains; changed.len()], true);
        }
        (self.one_by_one(changed, &old_turns), false)
    }

    /// Senders have the old level or the new one. Those of another manager are told to ask anew
    /// before tables change.
    fn both(&self) -> [Option<&Levels>; 2] {
        [self.old_levels.or(Some(self.levels)), Some(self.levels)]
    }

    /// The same, where all together would close a cycle: LID by LID, after the old turns and those
    /// of the LIDs before.
    fn one_by_one(&self, changed: &[u16], old_turns: &[Vec<u32>]) -> Vec<Kind> {
        let channels = self.channels.all().len() as u32;
        let mut graph = Dependencies::new(old_turns.len());
        for (from, next) in (0..).zip(old_turns) {
            for to in next {
                graph.add(&[from, *to]);
            }
        }
        let mut ways = Ways::new(self.channels);
        let mut fits = |ways: &Ways<'_>, lid, in_order| {
            let mut new = Vec::new();
            let depths = if in_order { Some(ways.depths()) } else { None };
            for (lane, sources) in self.lanes.sources(lid, &self.both()) {
                let first = u32::from(lane) * channels;
                ways.turns(sources.into_iter(), depths.as_deref(), |from, to| {
                    new.push((first + from, first + to));
                });
            }
            graph.add_all(&new)
        };
        let mut kind = |lid: u16| {
            ways.follow(lid, [self.old, self.target]);
            if !ways.has_loop() && fits(&ways, lid, false) {
                Kind::Moves
            } else if !self.had_loop(lid) && fits(&ways, lid, true) {
                Kind::InOrder
            } else {
                Kind::Drains
            }
        };
        changed.iter().map(|lid| kind(*lid)).collect()
    }

    /// Whether packets for a LID go round by the old tables.
    fn had_loop(&self, lid: u16) -> bool {
        let mut ways = Ways::new(self.channels);
        ways.follow(lid, [self.old, self.old]);
        ways.has_loop()
    }
}
