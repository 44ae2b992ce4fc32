//! Shortest paths that share all links: this project's own engine, by rip-up and reroute.
//!
//! The load of a channel is the number of pairs of end ports whose packets pass it. The tree of
//! paths to each end port is routed by least total weight, where the weight of a channel grows
//! steeply with its load. Then each tree is ripped up and routed again against the load of all
//! others.
//!
//! | step | what it does |
//! |---|---|
//! | first tables | each tree once, against those before it; among equals by the end port's place in turn |
//! | rounds | each tree is ripped up and rerouted; the best tables so far are kept |
//! | repair | where a tree passes one of the most loaded channels, single switches leave by another port |
//!
//! Where the paths have credit loops on one VL, a second run begins with the lowest ports on
//! shortest paths and avoids turns, from one channel to the next, that no other tree makes: each
//! turn is a dependency, and with fewer of them fewer VLs do. Its tables are taken unless they load
//! a channel by a sixteenth more.
//!
//! A run ends when the most loaded channel is at a bound that no shortest paths can be below, after
//! [`ROUNDS`] rounds, after [`PATIENCE`] without gain, and when the work is done: [`WORK`] looks at
//! a channel. So large fabrics get fewer rounds, and beyond some ten thousand hosts the first
//! tables alone.

use alloc::vec::Vec;

use super::Tables;
use crate::channels::Channels;
use crate::dependencies;

/// Looks at a channel after which no other round begins.
const WORK: u64 = 400_000_000;

/// Most rounds.
const ROUNDS: u32 = 40;

/// Rounds without gain after which it ends.
const PATIENCE: u32 = 6;

/// What a turn weighs that no other tree makes, where turns are spared: more than any path of full
/// channels.
const NEW_TURN: u64 = 1 << 56;

/// Few turns are worth one part in so many of the fullest channel's load.
const TOLERANCE: u64 = 16;

/// Weights are in sixteenths of the mean load, to this power: high enough that one full channel
/// outweighs a detour of loads.
const POWER: u32 = 6;

/// Tables for every end port.
pub fn route(channels: &Channels) -> Tables {
    let mut freely = Balance::new(channels, 0);
    (0..channels.end_ports().len() as u32).for_each(|end_port| freely.route(end_port));
    freely.improve();
    if !freely.has_cycle() {
        return freely.tables();
    }
    let mut sparingly = Balance::new(channels, NEW_TURN);
    (0..channels.end_ports().len() as u32).for_each(|end_port| sparingly.route_lowest(end_port));
    sparingly.improve();
    let (free, spare) = (u64::from(freely.score().0), u64::from(sparingly.score().0));
    if spare * TOLERANCE <= free * (TOLERANCE + 1) { sparingly.tables() } else { freely.tables() }
}

/// The trees so far, and what they load.
struct Balance<'a> {
    channels: &'a Channels,
    /// By the switch of an end port: switches by distance, the nearest first, and the distances.
    /// Only where there are end ports.
    near: Vec<Option<(Vec<u32>, Vec<u16>)>>,
    /// By end port, by switch: the channel to leave by, or [`NONE`].
    tree_of: Vec<Vec<u32>>,
    load: Vec<u32>,
    /// By channel, and by the channel behind it in the order of [`Channels::leaving`]: trees with
    /// that turn.
    turns: Vec<Vec<u32>>,
    /// What a turn weighs that no other tree makes.
    new_turn: u64,
    /// Looks at a channel so far.
    work: u64,
    /// Scratch: by switch, the weight of its path, and the pairs that come through.
    weight: Vec<u64>,
    through: Vec<u32>,
}

/// No channel.
const NONE: u32 = u32::MAX;

impl<'a> Balance<'a> {
    fn new(channels: &'a Channels, new_turn: u64) -> Balance<'a> {
        let switches = channels.switches().len();
        let near = (0..switches as u32).map(|switch| {
            (channels.sources(switch) > 0).then(|| {
                let distances = channels.distances(switch);
                let mut order: Vec<u32> = (0..switches as u32).collect();
                order.sort_by_key(|other| (distances[*other as usize], *other));
                (order, distances)
            })
        });
        Balance {
            channels,
            near: near.collect(),
            tree_of: alloc::vec![Vec::new(); channels.end_ports().len()],
            load: alloc::vec![0; channels.all().len()],
            turns: channels
                .all()
                .iter()
                .map(|channel| alloc::vec![0; channels.leaving(channel.to).len()])
                .collect(),
            new_turn,
            work: 0,
            weight: alloc::vec![0; switches],
            through: alloc::vec![0; switches],
        }
    }

    /// Routes trees again until that gains nothing, and keeps the best.
    fn improve(&mut self) {
        let (mut best, mut score, mut without_gain) = (self.tree_of.clone(), self.score(), 0);
        // Half of a round makes things worse; so none begins that may not end.
        let per_round = 3 * (self.tree_of.len() * self.load.len()) as u64;
        for _ in 0..ROUNDS {
            let is_balanced = u64::from(score.0) <= self.bound();
            if is_balanced || without_gain >= PATIENCE || self.work + per_round > WORK {
                break;
            }
            self.reroute_all();
            self.repair();
            let reached = self.score();
            without_gain += 1;
            if reached < score {
                (best, score, without_gain) = (self.tree_of.clone(), reached, 0);
            }
        }
        for (end_port, tree) in (0..).zip(best) {
            let _ = self.rip_up(end_port);
            self.put(end_port, tree);
        }
    }

    /// Whether packets could wait for each other in a cycle on one lane.
    fn has_cycle(&self) -> bool {
        let waits = |(channel, turns): (u32, &Vec<u32>)| {
            let first = self.channels.leaving(self.channels.get(channel).to).start;
            let made = (first..).zip(turns).filter(|(_, trees)| **trees > 0);
            made.map(|(next, _)| next).collect()
        };
        let waits: Vec<Vec<u32>> = (0..).zip(&self.turns).map(waits).collect();
        dependencies::cycle(&waits).is_some()
    }

    /// Load of the fullest channel, how many are as full, and the squares of all loads: less is
    /// better.
    fn score(&self) -> (u32, usize, u64) {
        let most = self.load.iter().copied().max().unwrap_or(0);
        let full = self.load.iter().filter(|load| **load == most).count();
        let squares = self.load.iter().map(|load| u64::from(*load) * u64::from(*load)).sum();
        (most, full, squares)
    }

    fn mean(&self) -> u64 {
        (self.sum() / self.load.len().max(1) as u64).max(1)
    }

    /// What the most loaded channel cannot be below: the mean, since shortest paths pass as many
    /// channels whichever they are, and an equal share of the pairs that leave the end ports of one
    /// switch.
    fn bound(&self) -> u64 {
        let mean = self.sum().div_ceil(self.load.len().max(1) as u64);
        let all = self.channels.end_ports().len() as u64;
        let share = |switch: u32| {
            let own = u64::from(self.channels.sources(switch));
            let ways = self.channels.leaving(switch).len().max(1) as u64;
            (own * (all - own)).div_ceil(ways)
        };
        let shares = (0..self.channels.switches().len() as u32).map(share);
        shares.fold(mean, u64::max)
    }

    fn sum(&self) -> u64 {
        self.load.iter().map(|load| u64::from(*load)).sum()
    }

    /// Takes every tree out and routes it again.
    fn reroute_all(&mut self) {
        for end_port in 0..self.tree_of.len() as u32 {
            let _ = self.rip_up(end_port);
            self.route(end_port);
        }
    }

    /// Takes a tree out.
    fn rip_up(&mut self, end_port: u32) -> Vec<u32> {
        let tree = core::mem::take(&mut self.tree_of[end_port as usize]);
        self.count_turns(&tree, |trees| *trees -= 1);
        self.flow(end_port, &tree, |load, through| *load -= through);
        tree
    }

    /// Routes a tree by the lightest paths; those of one weight are taken in turn by the end port's
    /// place.
    fn route(&mut self, end_port: u32) {
        let there = self.channels.end_ports()[end_port as usize].switch;
        let Some((order, distances)) = self.near[there as usize].take() else {
            return;
        };
        self.work += self.load.len() as u64;
        let mean = self.mean();
        let mut tree = alloc::vec![NONE; order.len()];
        self.weight[there as usize] = 0;
        for &switch in order.iter().filter(|switch| **switch != there) {
            let closer = self.channels.leaving(switch).filter(|channel| {
                distances[self.channels.get(*channel).to as usize] < distances[switch as usize]
            });
            let weighed = closer.map(|channel| {
                let to = self.channels.get(channel).to;
                let beyond = self.weight[to as usize];
                let own = weight(self.load[channel as usize] + self.channels.sources(switch), mean);
                let turn = self.turn(channel, tree[to as usize]).map_or(0, |turn| {
                    if self.turns[channel as usize][turn] == 0 { self.new_turn } else { 0 }
                });
                (beyond.saturating_add(own).saturating_add(turn), channel)
            });
            let mut ways: Vec<(u64, u32)> = weighed.collect();
            let Some(&(least, _)) = ways.iter().min() else {
                continue;
            };
            ways.retain(|(weight, _)| *weight == least);
            let (_, channel) = ways[end_port as usize % ways.len()];
            (tree[switch as usize], self.weight[switch as usize]) = (channel, least);
        }
        self.near[there as usize] = Some((order, distances));
        self.put(end_port, tree);
    }

    /// Routes a tree by the lowest ports.
    fn route_lowest(&mut self, end_port: u32) {
        let there = self.channels.end_ports()[end_port as usize].switch;
        let Some((order, distances)) = &self.near[there as usize] else {
            return;
        };
        let mut tree = alloc::vec![NONE; order.len()];
        for &switch in order {
            let mut closer = self.channels.leaving(switch).filter(|channel| {
                distances[self.channels.get(*channel).to as usize] < distances[switch as usize]
            });
            tree[switch as usize] = closer.next().unwrap_or(NONE);
        }
        self.put(end_port, tree);
    }

    /// The place of a turn in the list of a channel; `None` where the path ends.
    fn turn(&self, channel: u32, next: u32) -> Option<usize> {
        let first = self.channels.leaving(self.channels.get(channel).to).start;
        (next != NONE).then(|| (next - first) as usize)
    }

    fn count_turns(&mut self, tree: &[u32], by: impl Fn(&mut u32)) {
        for channel in tree.iter().copied().filter(|channel| *channel != NONE) {
            let next = tree[self.channels.get(channel).to as usize];
            if let Some(turn) = self.turn(channel, next) {
                by(&mut self.turns[channel as usize][turn]);
            }
        }
    }

    /// Puts a tree in.
    fn put(&mut self, end_port: u32, tree: Vec<u32>) {
        self.count_turns(&tree, |trees| *trees += 1);
        self.flow(end_port, &tree, |load, through| *load += through);
        self.tree_of[end_port as usize] = tree;
    }

    /// Applies `to` to the load of each channel of a tree, with the number of pairs that pass it.
    fn flow(&mut self, end_port: u32, tree: &[u32], to: impl Fn(&mut u32, u32)) {
        let there = self.channels.end_ports()[end_port as usize].switch;
        self.work += self.through.len() as u64;
        let Some((order, _)) = &self.near[there as usize] else {
            return;
        };
        for (switch, through) in (0..).zip(&mut self.through) {
            *through = self.channels.sources(switch);
        }
        // The furthest first: what passes a switch is known when its turn comes.
        for switch in order.iter().rev().filter(|switch| **switch != there) {
            let (channel, through) = (tree[*switch as usize], self.through[*switch as usize]);
            if channel != NONE {
                to(&mut self.load[channel as usize], through);
                self.through[self.channels.get(channel).to as usize] += through;
            }
        }
    }

    /// Moves single switches of trees from the fullest channels to others, as long as that leaves
    /// the new path less full.
    fn repair(&mut self) {
        let most = self.load.iter().copied().max().unwrap_or(0);
        for end_port in 0..self.tree_of.len() as u32 {
            let there = self.channels.end_ports()[end_port as usize].switch;
            for switch in 0..self.near.len() as u32 {
                let channel = self.tree_of[end_port as usize].get(switch as usize).copied();
                let Some(channel) = channel.filter(|channel| *channel != NONE) else {
                    continue;
                };
                if switch != there && self.load[channel as usize] + 1 >= most && self.work < WORK {
                    self.try_move(end_port, there, switch, channel);
                }
            }
        }
    }

    /// Moves a switch of a tree to another channel if the fullest channel of the path from there on
    /// becomes less full.
    fn try_move(&mut self, end_port: u32, there: u32, switch: u32, old: u32) {
        let tree = self.rip_up(end_port);
        let mut best = (self.fullest(&tree, switch, there), old);
        let passing = self.through[switch as usize];
        for channel in self.channels.leaving(switch).filter(|channel| *channel != old) {
            let to = self.channels.get(channel).to;
            let Some((_, distances)) = &self.near[there as usize] else { continue };
            let is_closer = distances[to as usize] < distances[switch as usize];
            if is_closer && self.makes_known_turns(&tree, switch, channel) {
                let mut moved = tree.clone();
                moved[switch as usize] = channel;
                best = best.min((self.fullest(&moved, switch, there), channel));
            }
        }
        let mut tree = tree;
        let current = self.fullest(&tree, switch, there);
        if best.0 < current && passing > 0 {
            tree[switch as usize] = best.1;
        }
        self.put(end_port, tree);
    }

    /// Whether a tree that is taken out makes no turn that no other makes, where turns are spared
    /// and a switch moves to this channel.
    fn makes_known_turns(&self, tree: &[u32], switch: u32, channel: u32) -> bool {
        let is_known = |from: u32, next: u32| {
            self.turn(from, next).is_none_or(|turn| self.turns[from as usize][turn] > 0)
        };
        let next = tree[self.channels.get(channel).to as usize];
        let mut before = self
            .channels
            .reaching(switch)
            .iter()
            .filter(|one| tree[self.channels.get(**one).from as usize] == **one);
        self.new_turn == 0 || is_known(channel, next) && before.all(|one| is_known(*one, channel))
    }

    /// The fullest channel from a switch on, by a tree that is taken out.
    fn fullest(&self, tree: &[u32], from: u32, there: u32) -> u32 {
        let (mut at, mut most) = (from, 0);
        while at != there {
            let channel = tree[at as usize];
            if channel == NONE {
                break;
            }
            most = most.max(self.load[channel as usize]);
            at = self.channels.get(channel).to;
        }
        most
    }

    fn tables(&self) -> Tables {
        let mut tables = Tables::new(self.channels);
        for (end_port, tree) in (0..).zip(&self.tree_of) {
            for (switch, channel) in (0..).zip(tree).filter(|(_, channel)| **channel != NONE) {
                tables.set(switch, end_port, self.channels.get(*channel).port);
            }
        }
        tables
    }
}

/// Of a channel with this load, where the mean of all is `mean`.
fn weight(load: u32, mean: u64) -> u64 {
    let relative = (u64::from(load) * 16 / mean).min(256);
    // At most 2^48, so that paths of some thousand channels do not overflow.
    1 + relative.pow(POWER)
}
