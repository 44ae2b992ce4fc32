//! Linear forwarding tables as switches hold them: by LID, in blocks; and what packets do that
//! follow them.
//!
//! Where a table is being replaced, a switch forwards by the old entry or by the new one. So what
//! is asked here can be asked of two sets of tables at once: each switch may use either. What holds
//! for both together holds for every state between them, in whatever order blocks are written.

use alloc::vec::Vec;

use crate::lids::Owner;
use crate::mad::LFT_BLOCK;
use topology::channels::Channels;
use topology::routes::{NO_ROUTE, Tables, up_down::Ranks};

/// The tables of all switches, by number and LID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarding {
    /// Of whole blocks, all alike long.
    ports: Vec<Vec<u8>>,
}

impl Forwarding {
    /// Tables without a route.
    pub fn empty(switches: usize, top: u16) -> Forwarding {
        let len = (usize::from(top) + 1).next_multiple_of(LFT_BLOCK);
        Forwarding { ports: alloc::vec![alloc::vec![NO_ROUTE; len]; switches] }
    }

    /// Tables that lead to every LID: to those of end ports as `tables` say, to those of switches
    /// with end ports as to the first of these, so that no path is new, and to other switches by
    /// Up*/Down*. From where that leads to no such switch, as between the roots of a tree, a
    /// `detour` leads to the nearest switch from where it does.
    pub fn new(
        channels: &Channels,
        tables: &Tables,
        ranks: &Ranks,
        owners: &[Owner],
        detour: Detour,
    ) -> Forwarding {
        let switches = channels.switches().len() as u32;
        let top = owners.len().saturating_sub(1) as u16;
        let mut forwarding = Forwarding::empty(switches as usize, top);
        let mut first = alloc::vec![None; switches as usize];
        for (at, end_port) in (0_u32..).zip(channels.end_ports()) {
            first[end_port.switch as usize].get_or_insert(at);
        }
        for (lid, owner) in owners.iter().enumerate() {
            let (there, end_port) = match owner {
                Owner::Nobody => continue,
                Owner::EndPort(end_port) => (None, Some(*end_port)),
                Owner::Switch(switch) => (Some(*switch), first[*switch as usize]),
            };
            match (there, end_port) {
                (_, Some(end_port)) => {
                    for switch in 0..switches {
                        forwarding.ports[switch as usize][lid] = tables.port(switch, end_port);
                    }
                }
                (Some(there), None) => {
                    let mut ports = ranks.ports_to(channels, there);
                    if detour == Detour::Allowed {
                        extend(channels, &mut ports);
                    }
                    for (own, port) in forwarding.ports.iter_mut().zip(ports) {
                        own[lid] = port;
                    }
                }
                (None, None) => {}
            }
            // Port 0 is the switch itself.
            if let Some(there) = there {
                forwarding.ports[there as usize][lid] = 0;
            }
        }
        forwarding
    }

    /// Leads the further LIDs of an end port by other ports than its first one: at each switch by
    /// those, in turn, that are as close to it as the port for the first LID. So no path goes
    /// round, and none is longer.
    pub fn spread(&mut self, channels: &Channels, owners: &[Owner]) {
        let mut ways = Ways::new(channels);
        // The first LID of the end port, and the depths of its paths once there is a second.
        let mut first: Option<(Owner, u16, Option<Vec<u16>>)> = None;
        for (lid, owner) in (0_u16..).zip(owners) {
            match &mut first {
                Some((own, base, depths)) if own == owner => {
                    let base = *base;
                    let depths = depths.get_or_insert_with(|| {
                        ways.follow(base, [self, self]);
                        ways.depths()
                    });
                    self.turn(channels, base, lid, depths);
                }
                _ if matches!(owner, Owner::EndPort(_)) => first = Some((*owner, lid, None)),
                _ => first = None,
            }
        }
    }

    /// Sets the entries of a LID, which is that much behind the first one of its port.
    fn turn(&mut self, channels: &Channels, base: u16, lid: u16, depths: &[u16]) {
        for switch in 0..channels.switches().len() as u32 {
            let own = channels.at(switch, self.port(switch, base));
            let leads_on = |channel: &u32| {
                let to = channels.get(*channel).to;
                depths[to as usize] + 1 == depths[switch as usize]
                    && self.port(to, base) != NO_ROUTE
            };
            let close: Vec<u32> = channels.leaving(switch).filter(leads_on).collect();
            if let Some(at) = own.and_then(|own| close.iter().position(|one| *one == own)) {
                let channel = close[(at + usize::from(lid - base)) % close.len()];
                self.set(switch, lid, channels.get(channel).port);
            }
        }
    }

    /// The entry of a switch for a LID.
    pub fn port(&self, switch: u32, lid: u16) -> u8 {
        let table = self.ports.get(switch as usize);
        table.and_then(|table| table.get(usize::from(lid))).copied().unwrap_or(NO_ROUTE)
    }

    /// Sets it, where the table has room.
    pub fn set(&mut self, switch: u32, lid: u16, port: u8) {
        let table = self.ports.get_mut(switch as usize);
        if let Some(entry) = table.and_then(|table| table.get_mut(usize::from(lid))) {
            *entry = port;
        }
    }

    /// The table of a switch.
    pub fn table(&self, switch: u32) -> &[u8] {
        &self.ports[switch as usize]
    }

    /// Puts a table in, cut or filled to the length of the others.
    pub fn replace(&mut self, switch: u32, table: &[u8]) {
        let own = &mut self.ports[switch as usize];
        let known = own.len().min(table.len());
        own[..known].copy_from_slice(&table[..known]);
        own[known..].fill(NO_ROUTE);
    }

    /// Blocks of each table.
    pub fn blocks(&self) -> usize {
        self.ports.first().map_or(0, |table| table.len() / LFT_BLOCK)
    }

    /// A block of a table.
    pub fn block(&self, switch: u32, block: usize) -> Option<&[u8; LFT_BLOCK]> {
        self.ports.get(switch as usize)?.as_chunks().0.get(block)
    }

    /// LIDs for which a switch of both has another entry, and whose tables are as long.
    pub fn differences(&self, other: &Forwarding) -> Vec<u16> {
        let len = self.blocks() * LFT_BLOCK;
        let mut differs = alloc::vec![false; len];
        for (own, others) in self.ports.iter().zip(&other.ports) {
            if own == others {
                continue;
            }
            for (differs, (own, other)) in differs.iter_mut().zip(own.iter().zip(others)) {
                *differs |= own != other;
            }
        }
        (0..).zip(differs).filter(|(_, differs)| *differs).map(|(lid, _)| lid).collect()
    }
}

/// Whether paths to switches may be none of Up*/Down*.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detour {
    /// If there is no other.
    Allowed,
    /// Then there is no path.
    Refused,
}

/// Leads switches without a port to a neighbour with one, the nearest first.
fn extend(channels: &Channels, ports: &mut [u8]) {
    let with_port = (0..).zip(ports.iter()).filter(|(_, port)| **port != NO_ROUTE);
    let mut open: alloc::collections::VecDeque<u32> = with_port.map(|(switch, _)| switch).collect();
    while let Some(switch) = open.pop_front() {
        for channel in channels.reaching(switch) {
            let channel = channels.get(*channel);
            if ports[channel.from as usize] == NO_ROUTE {
                ports[channel.from as usize] = channel.port;
                open.push_back(channel.from);
            }
        }
    }
}

/// Where packets for one LID go: by switch, the channels to leave by. Two where old and new tables
/// differ.
pub struct Ways<'a> {
    channels: &'a Channels,
    next: Vec<[u32; 2]>,
}

/// No channel: the packet is there, or dropped.
const NONE: u32 = u32::MAX;

impl<'a> Ways<'a> {
    /// Without a way.
    pub fn new(channels: &'a Channels) -> Ways<'a> {
        Ways { channels, next: alloc::vec![[NONE; 2]; channels.switches().len()] }
    }

    /// Those of a LID.
    pub fn follow(&mut self, lid: u16, tables: [&Forwarding; 2]) {
        for (switch, next) in (0..).zip(&mut self.next) {
            *next = tables.map(|tables| {
                let port = tables.port(switch, lid);
                let channel =
                    (port != NO_ROUTE && port != 0).then(|| self.channels.at(switch, port));
                channel.flatten().unwrap_or(NONE)
            });
        }
    }

    /// How many switches packets pass by the second tables from each switch on, itself counted.
    pub fn depths(&self) -> Vec<u16> {
        let mut depths = alloc::vec![0_u16; self.next.len()];
        for start in 0..self.next.len() as u32 {
            let (mut at, mut path) = (start, Vec::new());
            while depths[at as usize] == 0 && path.len() < self.next.len() {
                path.push(at);
                match self.next[at as usize][1] {
                    NONE => break,
                    channel => at = self.channels.get(channel).to,
                }
            }
            let known = depths[at as usize];
            for (more, switch) in (1..).zip(path.into_iter().rev()) {
                depths[switch as usize] = known + more;
            }
        }
        depths
    }

    fn of(&self, switch: u32) -> impl Iterator<Item = u32> + '_ {
        let [old, new] = self.next[switch as usize];
        let other = if new == old { NONE } else { new };
        [old, other].into_iter().filter(|channel| *channel != NONE)
    }

    /// Whether packets can come to a switch twice, wherever they begin.
    pub fn has_loop(&self) -> bool {
        let switches = self.next.len();
        let mut open = alloc::vec![0_u32; switches];
        for switch in 0..switches as u32 {
            self.of(switch).for_each(|channel| open[self.channels.get(channel).to as usize] += 1);
        }
        let mut ready: Vec<u32> =
            (0..).zip(&open).filter(|(_, open)| **open == 0).map(|(at, _)| at).collect();
        let mut removed = 0;
        while let Some(switch) = ready.pop() {
            removed += 1;
            for channel in self.of(switch) {
                let to = self.channels.get(channel).to;
                open[to as usize] -= 1;
                if open[to as usize] == 0 {
                    ready.push(to);
                }
            }
        }
        removed < switches
    }

    /// Calls `turn` with every two channels that packets from `sources` can pass one after the
    /// other. If switches get the second tables in order of their depths, packets that follow them
    /// go on following them, and no switch has an old entry that is less deep than one with a new
    /// entry.
    pub fn turns(
        &self,
        sources: impl Iterator<Item = u32>,
        depths: Option<&[u16]>,
        mut turn: impl FnMut(u32, u32),
    ) {
        let mut reached = alloc::vec![false; self.next.len()];
        let mut open: Vec<u32> = sources.collect();
        open.iter().for_each(|switch| reached[*switch as usize] = true);
        while let Some(switch) = open.pop() {
            for channel in self.of(switch) {
                let to = self.channels.get(channel).to;
                let [old, new] = self.next[switch as usize];
                let [next_old, next_new] = self.next[to as usize];
                let is_possible = |depths: &[u16], next: u32| {
                    let is_late = next != next_old && depths[switch as usize] < depths[to as usize];
                    (channel == old || next == next_new) && (channel == new || !is_late)
                };
                let next = self
                    .of(to)
                    .filter(|next| depths.is_none_or(|depths| is_possible(depths, *next)));
                next.for_each(|next| turn(channel, next));
                if !core::mem::replace(&mut reached[to as usize], true) {
                    open.push(to);
                }
            }
        }
    }
}

/// Turns that packets make: by lane and channel, which channels they pass next in that lane.
#[derive(Clone, Debug)]
pub struct Turns {
    /// By channel: where its turns begin.
    first: Vec<usize>,
    /// Turns of a lane.
    len: usize,
    made: Vec<bool>,
}

impl Turns {
    /// None, in so many lanes.
    pub fn new(channels: &Channels, lanes: u8) -> Turns {
        let mut first = Vec::with_capacity(channels.all().len());
        let mut len = 0;
        for channel in channels.all() {
            first.push(len);
            len += channels.leaving(channel.to).len();
        }
        Turns { first, len, made: alloc::vec![false; len * usize::from(lanes)] }
    }

    /// Adds one.
    pub fn add(&mut self, channels: &Channels, lane: u8, from: u32, to: u32) {
        let place = (to - channels.leaving(channels.get(from).to).start) as usize;
        self.made[usize::from(lane) * self.len + self.first[from as usize] + place] = true;
    }

    /// By lane and channel, those that packets pass next; channels of a lane are numbered behind
    /// those of the lanes before it.
    pub fn lists(&self, channels: &Channels) -> Vec<Vec<u32>> {
        let count = channels.all().len();
        let lanes = self.made.len().checked_div(self.len).unwrap_or(1);
        let next = |at: usize| {
            let (lane, channel) = (at / count, at % count);
            let leaving = channels.leaving(channels.get(channel as u32).to);
            let begin = lane * self.len + self.first[channel];
            let made = self.made[begin..begin + leaving.len()].iter();
            let made = leaving.zip(made).filter(|(_, made)| **made);
            made.map(|(channel, _)| channel + (lane * count) as u32).collect()
        };
        (0..count * lanes).map(next).collect()
    }
}
