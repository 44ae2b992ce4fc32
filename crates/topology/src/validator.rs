//! What a set of tables does: whether every end port is reached from every other, without loops, by
//! how many hops, with how much load on each channel, and whether there are credit loops.
//!
//! The validator follows the tables as switches would, whatever engine made them. The load of a
//! channel (its edge forwarding index) is the number of ordered pairs of end ports whose packets
//! pass it.

use alloc::vec::Vec;

use crate::channels::{Channels, FAR};
use crate::dependencies;
use crate::lanes::Lanes;
use crate::routes::Tables;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Ordered pairs of different end ports.
    pub pairs: u64,
    /// Pairs whose packets come to a switch without a route, or to the wrong end.
    pub lost: u64,
    /// Pairs whose packets go round for ever.
    pub looping: u64,
    /// Pairs whose packets pass more switches than the shortest path has.
    pub longer: u64,
    /// Switches that packets of all pairs pass, together.
    pub hops: u64,
    /// The most that packets of one pair pass.
    pub most_hops: u16,
    /// Load of each channel, by number.
    pub load: Vec<u32>,
    /// Lanes of the paths.
    pub lanes: u8,
    /// Channels of one lane that can wait for each other in a cycle, each for the next and the last
    /// for the first.
    pub cycle: Option<Vec<u32>>,
}

impl Findings {
    /// Whether every pair has a path.
    pub fn is_whole(&self) -> bool {
        self.lost == 0 && self.looping == 0
    }

    /// Mean number of switches that packets pass, in thousandths, rounded.
    pub fn mean_hops_milli(&self) -> u64 {
        let reached = self.pairs - self.lost - self.looping;
        (self.hops * 1_000 + reached / 2).checked_div(reached).unwrap_or(0)
    }

    /// Load of the fullest channel.
    pub fn most_load(&self) -> u32 {
        self.load.iter().copied().max().unwrap_or(0)
    }

    /// Channels that carry something.
    pub fn used(&self) -> usize {
        self.load.iter().filter(|load| **load > 0).count()
    }

    /// Load of the emptiest channel that carries something.
    pub fn least_load(&self) -> u32 {
        self.load.iter().copied().filter(|load| *load > 0).min().unwrap_or(0)
    }

    /// Mean load of the channels that carry something, in tenths.
    pub fn mean_load_tenths(&self) -> u64 {
        let sum: u64 = self.load.iter().map(|load| u64::from(*load)).sum();
        (sum * 10).checked_div(self.used() as u64).unwrap_or(0)
    }
}

/// Validates tables and the lanes of their paths.
pub fn validate(channels: &Channels, tables: &Tables, lanes: &Lanes) -> Findings {
    let mut findings = Findings {
        load: alloc::vec![0; channels.all().len()],
        lanes: lanes.count(),
        ..Findings::default()
    };
    let mut shortest = (u32::MAX, Vec::new());
    for end_port in 0..channels.end_ports().len() as u32 {
        let there = channels.end_ports()[end_port as usize].switch;
        if shortest.0 != there {
            shortest = (there, channels.distances(there));
        }
        validate_one(channels, tables, end_port, &shortest.1, &mut findings);
    }
    findings.cycle = cycle(channels, tables, lanes);
    findings
}

/// Where packets of a switch end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Unknown,
    /// It is being followed.
    Open,
    /// There, after so many channels.
    Arrives(u16),
    Lost,
    Loops,
}

fn validate_one(
    channels: &Channels,
    tables: &Tables,
    end_port: u32,
    shortest: &[u16],
    findings: &mut Findings,
) {
    let fates = fates(channels, tables, end_port);
    let there = channels.end_ports()[end_port as usize].switch;
    let mut through: Vec<u32> = Vec::new();
    for switch in 0..fates.len() as u32 {
        // An end port sends nothing to itself.
        let senders = channels.sources(switch) - u32::from(switch == there);
        let pairs = u64::from(senders);
        findings.pairs += pairs;
        match fates[switch as usize] {
            Fate::Arrives(hops) => {
                findings.hops += pairs * (u64::from(hops) + 1);
                let is_longer =
                    hops > shortest[switch as usize] && shortest[switch as usize] != FAR;
                findings.longer += if is_longer { pairs } else { 0 };
                if senders > 0 {
                    findings.most_hops = findings.most_hops.max(hops + 1);
                }
            }
            Fate::Loops => findings.looping += pairs,
            Fate::Lost | Fate::Unknown | Fate::Open => findings.lost += pairs,
        }
        through.push(senders);
    }
    let mut furthest: Vec<(u16, u32)> = (0..)
        .zip(&fates)
        .filter_map(|(switch, fate)| match fate {
            Fate::Arrives(hops) => Some((*hops, switch)),
            _ => None,
        })
        .collect();
    furthest.sort_unstable_by(|a, b| b.cmp(a));
    for (_, switch) in furthest {
        if let Some(channel) = tables.channel(channels, switch, end_port) {
            let passing = through[switch as usize];
            findings.load[channel as usize] += passing;
            through[channels.get(channel).to as usize] += passing;
        }
    }
}

/// Where the packets for an end port come to from each switch.
fn fates(channels: &Channels, tables: &Tables, end_port: u32) -> Vec<Fate> {
    let goal = channels.end_ports()[end_port as usize];
    let mut fates = alloc::vec![Fate::Unknown; channels.switches().len()];
    let is_delivered = tables.port(goal.switch, end_port) == goal.port;
    fates[goal.switch as usize] = if is_delivered { Fate::Arrives(0) } else { Fate::Lost };
    let mut open = Vec::new();
    for switch in 0..fates.len() as u32 {
        let mut at = switch;
        let mut end = loop {
            match fates[at as usize] {
                Fate::Unknown => {}
                Fate::Open => break Fate::Loops,
                known => break known,
            }
            fates[at as usize] = Fate::Open;
            open.push(at);
            match tables.channel(channels, at, end_port) {
                Some(channel) => at = channels.get(channel).to,
                None => break Fate::Lost,
            }
        };
        while let Some(passed) = open.pop() {
            if let Fate::Arrives(hops) = end {
                end = Fate::Arrives(hops + 1);
            }
            fates[passed as usize] = end;
        }
    }
    fates
}

/// Channels of one lane that can wait for each other in a cycle.
fn cycle(channels: &Channels, tables: &Tables, lanes: &Lanes) -> Option<Vec<u32>> {
    let mut waits =
        alloc::vec![alloc::vec![Vec::new(); channels.all().len()]; lanes.count().into()];
    for switch in (0..channels.switches().len() as u32).filter(|one| channels.sources(*one) > 0) {
        for end_port in 0..channels.end_ports().len() as u32 {
            let to = channels.end_ports()[end_port as usize].switch;
            let of_lane: &mut Vec<Vec<u32>> = &mut waits[usize::from(lanes.lane(switch, to))];
            for pair in tables.path(channels, switch, end_port).windows(2) {
                let next = &mut of_lane[pair[0] as usize];
                if !next.contains(&pair[1]) {
                    next.push(pair[1]);
                }
            }
        }
    }
    waits.iter().find_map(|waits| dependencies::cycle(waits))
}
