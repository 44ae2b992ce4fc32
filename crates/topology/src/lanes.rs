//! Virtual lanes (VLs) that keep credit loops out.
//!
//! Where the channel dependency graph of all paths has cycles
//! ([`dependencies`](crate::dependencies)), the paths are divided among VLs, each with its own
//! buffers, by first fit: a path goes to the first VL whose graph stays acyclic with it (LASH;
//! Skeie et al., 2002).
//!
//! All paths between two switches, in both directions, have one VL: a connection sends and receives
//! by one service level (SL), which the subnet manager hands out, so a lane for one direction alone
//! could not be used.
//!
//! Where paths change, a pair of switches keeps its lane, since connections that are up go on with
//! the SL that they began with. So paths that will have to change are spread over all lanes that
//! there are: that leaves room in each of them.

use alloc::vec::Vec;
use core::cmp::Reverse;

use thiserror::Error;

use crate::channels::Channels;
use crate::dependencies::Dependencies;
use crate::routes::Tables;

/// Most lanes of data in InfiniBand; lane 15 is for management.
pub const MAX_LANES: u8 = 15;

/// Turns of paths after which no further order of them is tried, each counted in every lane that
/// was tried for it, and pairs that were sorted.
const WORK: u64 = 4_000_000;

/// Most orders at random. In a 6 x 6 torus with four hosts at a switch, one in about 130 does with
/// three lanes.
const SHUFFLES: u32 = 512;

/// No lane is known.
const UNKNOWN: u8 = u8::MAX;

/// The lane of the paths between each two switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    count: u8,
    switches: usize,
    /// By both switches; empty where there is one lane.
    lanes: Vec<u8>,
}

/// The paths do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the paths need more than {most} lanes")]
pub struct TooFewLanes {
    /// How many there were.
    pub most: u8,
}

/// Paths that are divided among lanes: from every switch with end ports to every destination.
#[derive(Clone, Copy, Debug)]
pub struct Paths<'a, N> {
    /// The switches.
    pub channels: &'a Channels,
    /// By switch: the numbers of the destinations at it.
    pub destinations: &'a [Vec<u32>],
    /// The channel by which a switch forwards to a destination; `None` where it is, and where there
    /// is no route.
    pub next: N,
}

impl Lanes {
    /// One lane for all.
    pub fn one(channels: &Channels) -> Lanes {
        Lanes { count: 1, switches: channels.switches().len(), lanes: Vec::new() }
    }

    /// How many there are.
    pub fn count(&self) -> u8 {
        self.count
    }

    /// The lane of packets between two switches.
    pub fn lane(&self, one: u32, other: u32) -> u8 {
        self.known(one, other).unwrap_or(0)
    }

    /// The same, if it was ever assigned.
    pub fn known(&self, one: u32, other: u32) -> Option<u8> {
        if self.lanes.is_empty() {
            return Some(0);
        }
        let lane = self.lanes.get(one as usize * self.switches + other as usize);
        lane.copied().filter(|lane| *lane != UNKNOWN)
    }

    /// The lanes of all pairs.
    fn all(&self) -> Vec<u8> {
        match self.lanes.is_empty() {
            true => alloc::vec![0; self.switches * self.switches],
            false => self.lanes.clone(),
        }
    }

    fn set(&mut self, one: u32, other: u32, lane: u8) {
        self.lanes[one as usize * self.switches + other as usize] = lane;
        self.lanes[other as usize * self.switches + one as usize] = lane;
    }

    /// The same lanes where switches have other numbers; `old_of` has, by the new number, the old
    /// one, or none.
    pub fn renumbered(&self, old_of: &[Option<u32>]) -> Lanes {
        let switches = old_of.len();
        let lanes = old_of.iter().flat_map(|one| {
            old_of.iter().map(move |other| {
                one.zip(*other).and_then(|(one, other)| self.known(one, other)).unwrap_or(UNKNOWN)
            })
        });
        Lanes { count: self.count, switches, lanes: lanes.collect() }
    }

    /// As few lanes as the best of some orders of the paths allows: first fit, pair by pair.
    ///
    /// # Errors
    /// When they need more than `most`.
    pub fn assign(channels: &Channels, tables: &Tables, most: u8) -> Result<Lanes, TooFewLanes> {
        let mut destinations = alloc::vec![Vec::new(); channels.switches().len()];
        for (at, end_port) in (0..).zip(channels.end_ports()) {
            destinations[end_port.switch as usize].push(at);
        }
        let next = |switch, end_port| tables.channel(channels, switch, end_port);
        Lanes::divide(&Paths { channels, destinations: &destinations, next }, most)
    }

    /// The same for any paths.
    ///
    /// # Errors
    /// When they need more than `most`.
    pub fn divide<N: Fn(u32, u32) -> Option<u32>>(
        paths: &Paths<'_, N>,
        most: u8,
    ) -> Result<Lanes, TooFewLanes> {
        let (mut best, mut work): (Option<Lanes>, u64) = (None, 0);
        let pairs = paths.pairs();
        let mut hops = None;
        for order in Order::all() {
            let fewer = best.as_ref().map_or(most, |best| best.count - 1);
            let mut division = Division::new(paths, fewer);
            let pairs = match order {
                Order::ByPair => pairs.clone(),
                _ => order.sorted(hops.get_or_insert_with(|| paths.with_hops(&pairs))),
            };
            // An order that fails at once has been sorted nevertheless.
            work += pairs.len() as u64;
            let is_placed = pairs.into_iter().all(|(one, other)| division.place(one, other));
            work += division.work;
            if is_placed {
                best = Some(division.lanes());
            }
            // First fit opens a second lane only where one would have a cycle.
            if best.as_ref().is_some_and(|best| best.count <= 2) || work > WORK {
                break;
            }
        }
        best.ok_or(TooFewLanes { most })
    }

    /// All lanes that there are, each with about as many pairs of switches as the others.
    ///
    /// # Errors
    /// When they need more than `most`.
    pub fn spread<N: Fn(u32, u32) -> Option<u32>>(
        paths: &Paths<'_, N>,
        most: u8,
    ) -> Result<Lanes, TooFewLanes> {
        let mut division = Division::new(paths, most);
        division.open(most);
        let pairs = paths.pairs();
        let mut turn = 0..;
        let is_placed = pairs.into_iter().all(|(one, other)| {
            division.first = turn.next().unwrap_or(0);
            division.place(one, other)
        });
        // First fit needs fewer lanes than taking them in turn.
        if is_placed { Ok(division.lanes()) } else { Lanes::divide(paths, most) }
    }

    /// The same where paths have changed: pairs keep the lanes of `before`, and new ones get the
    /// first that they fit.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn keep<N: Fn(u32, u32) -> Option<u32>>(
        paths: &Paths<'_, N>,
        most: u8,
        before: &Lanes,
    ) -> Result<Lanes, TooFewLanes> {
        let mut division = Division::new(paths, most);
        division.open(before.count.min(most));
        // A pair without a path has its lane when it has one again.
        division.lanes.lanes = before.all();
        let (old, new): (Vec<_>, Vec<_>) = paths
            .pairs()
            .into_iter()
            .partition(|(one, other)| before.known(*one, *other).is_some());
        let keeps = |(one, other): (u32, u32)| {
            before.known(one, other).is_some_and(|lane| division.fits(one, other, lane))
        };
        let is_kept = old.into_iter().all(keeps);
        let is_placed = is_kept && new.into_iter().all(|(one, other)| division.place(one, other));
        if is_placed { Ok(division.lanes()) } else { Err(TooFewLanes { most }) }
    }
}

/// A division of paths among lanes that is being made.
struct Division<'a, N> {
    paths: &'a Paths<'a, N>,
    most: u8,
    /// By lane.
    graphs: Vec<Dependencies>,
    lanes: Lanes,
    /// The lane that is tried first.
    first: usize,
    /// Turns looked at so far.
    work: u64,
}

impl<'a, N: Fn(u32, u32) -> Option<u32>> Division<'a, N> {
    fn new(paths: &'a Paths<'a, N>, most: u8) -> Division<'a, N> {
        let switches = paths.channels.switches().len();
        let lanes = Lanes { count: 1, switches, lanes: alloc::vec![0; switches * switches] };
        Division { paths, most, graphs: Vec::new(), lanes, first: 0, work: 0 }
    }

    fn open(&mut self, lanes: u8) {
        let channels = self.paths.channels.all().len();
        self.graphs.resize_with(lanes.into(), || Dependencies::new(channels));
    }

    /// Puts the paths of a pair into a lane; whether they fit.
    fn fits(&mut self, one: u32, other: u32, lane: u8) -> bool {
        let turns = self.paths.turns(one, other);
        self.work += turns.len() as u64;
        let fits =
            self.graphs.get_mut(usize::from(lane)).is_some_and(|graph| graph.add_all(&turns));
        if fits {
            self.lanes.set(one, other, lane);
        }
        fits
    }

    /// Puts them into the first lane that they fit; whether there is one.
    fn place(&mut self, one: u32, other: u32) -> bool {
        let turns = self.paths.turns(one, other);
        let open = self.graphs.len();
        let mut in_turn = (0..open).map(|at| (self.first + at) % open);
        let (graphs, work) = (&mut self.graphs, &mut self.work);
        let mut lane = in_turn.find(|lane| {
            *work += turns.len() as u64;
            graphs[*lane].add_all(&turns)
        });
        if lane.is_none() && self.graphs.len() < self.most.into() {
            let last = self.graphs.len();
            self.open(last as u8 + 1);
            // Paths that close a cycle among themselves fit no lane at all.
            lane = self.graphs[last].add_all(&turns).then_some(last);
        }
        if let Some(lane) = lane {
            self.lanes.set(one, other, lane as u8);
        }
        lane.is_some()
    }

    fn lanes(self) -> Lanes {
        let count = self.graphs.len().max(1) as u8;
        let Lanes { switches, lanes, .. } = self.lanes;
        Lanes { count, switches, lanes: if count == 1 { Vec::new() } else { lanes } }
    }
}

impl<N: Fn(u32, u32) -> Option<u32>> Paths<'_, N> {
    /// Calls `with` with the channels of each path from a switch to the destinations at another.
    fn each(&self, from: u32, to: u32, mut with: impl FnMut(&[u32])) {
        let most = self.channels.switches().len();
        let mut path = Vec::new();
        for destination in &self.destinations[to as usize] {
            path.clear();
            let mut at = from;
            while let Some(channel) = (self.next)(at, *destination)
                && path.len() < most
            {
                path.push(channel);
                at = self.channels.get(channel).to;
            }
            with(&path);
        }
    }

    /// Directions of a pair of switches in which there are senders.
    fn directions(&self, one: u32, other: u32) -> impl Iterator<Item = (u32, u32)> + '_ {
        let both = [(one, other), (other, one)].into_iter();
        both.filter(|(from, _)| self.channels.sources(*from) > 0)
    }

    /// Turns of all paths between two switches, each once.
    fn turns(&self, one: u32, other: u32) -> Vec<(u32, u32)> {
        let mut turns = Vec::new();
        for (from, to) in self.directions(one, other) {
            self.each(from, to, |path| {
                turns.extend(path.windows(2).map(|pair| (pair[0], pair[1])));
            });
        }
        turns.sort_unstable();
        turns.dedup();
        turns
    }

    /// All pairs of switches with a path between them.
    fn pairs(&self) -> Vec<(u32, u32)> {
        let switches = 0..self.channels.switches().len() as u32;
        let has_path = |(one, other): &(u32, u32)| {
            let mut directions = self.directions(*one, *other);
            directions.any(|(_, to)| !self.destinations[to as usize].is_empty())
        };
        let pairs = switches.flat_map(|one| (0..one).map(move |other| (one, other)));
        pairs.filter(has_path).collect()
    }

    /// Pairs with the channels of their longest paths.
    fn with_hops(&self, pairs: &[(u32, u32)]) -> Vec<((u32, u32), usize)> {
        pairs.iter().map(|&(one, other)| ((one, other), self.hops(one, other))).collect()
    }

    /// Channels of the longest path between two switches.
    fn hops(&self, one: u32, other: u32) -> usize {
        let mut most = 0;
        for (from, to) in self.directions(one, other) {
            self.each(from, to, |path| most = most.max(path.len()));
        }
        most
    }
}

/// An order of the pairs of switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Switch by switch.
    ByPair,
    /// The last switch first.
    Backwards,
    /// The longest paths first.
    LongestFirst,
    /// The shortest first.
    ShortestFirst,
    /// The longest first, those of one length at random: each number is another order.
    Shuffled(u32),
}

impl Order {
    fn all() -> impl Iterator<Item = Order> {
        let plain = [Order::ByPair, Order::Backwards, Order::LongestFirst, Order::ShortestFirst];
        plain.into_iter().chain((0..SHUFFLES).map(Order::Shuffled))
    }

    /// Pairs of switches in this order, of those that are given with the channels of their longest
    /// paths.
    fn sorted(self, pairs: &[((u32, u32), usize)]) -> Vec<(u32, u32)> {
        let mut sorted = pairs.to_vec();
        match self {
            Order::ByPair => {}
            Order::Backwards => sorted.reverse(),
            Order::LongestFirst => sorted.sort_by_key(|(_, hops)| Reverse(*hops)),
            Order::ShortestFirst => sorted.sort_by_key(|(_, hops)| *hops),
            Order::Shuffled(number) => {
                sorted.sort_by_cached_key(|(pair, hops)| (Reverse(*hops), drawn(number, *pair)));
            }
        }
        sorted.into_iter().map(|(pair, _)| pair).collect()
    }
}

/// A number drawn for a pair: mixing as in SplitMix64.
fn drawn(order: u32, (one, other): (u32, u32)) -> u64 {
    let parts = [order, one, other];
    parts.into_iter().fold(0, |state: u64, part| {
        let sum = (state ^ u64::from(part)).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let once = (sum ^ sum >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let twice = (once ^ once >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        twice ^ twice >> 31
    })
}
