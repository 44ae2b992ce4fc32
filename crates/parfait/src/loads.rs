//! What a placed job puts on each trunk.

use alloc::vec::Vec;

use crate::demand::{Abstraction, Cut, Demand};
use crate::network::{Loads, Network};
use crate::runs::Run;
use crate::spread::{Spread, WHOLE};

/// Workers of a job on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// The host, by number.
    pub host: u32,
    /// Its workers, by rank in the order of the demand.
    pub run: Run,
}

/// Bits per second on each link of a trunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Load {
    /// The trunk.
    pub trunk: u32,
    /// What each of its links carries, never 0.
    pub bps: u64,
}

/// Computes loads; keeps its memory from one job to the next.
#[derive(Clone, Debug, Default)]
pub struct Loader {
    pieces: Vec<Piece>,
    /// By piece: the group of the level at hand.
    group: Vec<u32>,
    runs: Vec<Run>,
    /// By trunk: parts of bits per second in the phase at hand.
    sums: Vec<u128>,
    /// By trunk: the most of all phases so far.
    most: Vec<u64>,
    /// Trunks with a sum in this phase, and in any.
    touched: Vec<u32>,
    loaded: Vec<u32>,
    shares: Vec<Share>,
    sides: Vec<(u32, u64)>,
}

/// The part of what one host sends to another that passes a trunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Share {
    trunk: u32,
    /// Places of pieces.
    from: u32,
    to: u32,
    part: u64,
}

/// Pairs that exchange nothing are so many times faster than a link on a path.
const LINK: u64 = 8;

/// Pairs whose effort is counted.
const SAMPLES: usize = 64;

impl Loader {
    /// One without memory yet.
    pub fn new() -> Loader {
        Loader::default()
    }

    /// What it takes to compute the loads of a placement: its pieces in a tree, and elsewhere its
    /// pairs of pieces in each phase, and [`LINK`] for each link on paths between those that
    /// exchange something. That of [`SAMPLES`] pairs is counted, and stands for all.
    pub(crate) fn effort(
        network: &Network,
        demand: &Demand,
        abstraction: Abstraction,
        pieces: &[Piece],
    ) -> u64 {
        let count = pieces.len();
        let Loads::Pairs(spread) = network.loads() else { return count as u64 };
        let mut links = 0_u64;
        for sample in 0..SAMPLES {
            // Spread over all pairs, and the same each time.
            let scattered = sample as u64 * 2_654_435_761 % count.max(1) as u64;
            let (from, to) = (sample * count / SAMPLES, scattered as usize);
            let Some((from, to)) = pieces.get(from).zip(pieces.get(to)) else { continue };
            let exchanges = |phase| demand.between(phase, from.run, to.run) > 0;
            let phases = match abstraction {
                Abstraction::Parfait => {
                    (0..demand.phases()).filter(|phase| exchanges(*phase)).count()
                }
                _ => 1,
            };
            if from.host != to.host && phases > 0 {
                let mut on_paths = 0;
                spread.each(from.host, to.host, |_, _| on_paths += 1);
                links += on_paths * phases as u64;
            }
        }
        let of_pair = demand.phases() as u64 + (LINK * links).div_ceil(SAMPLES as u64);
        (count as u64).saturating_mul(count as u64).saturating_mul(of_pair)
    }

    /// What a job puts on each trunk by an abstraction, into `loads`, sorted by trunk.
    ///
    /// In a tree, that is its reservation for the cut around each group of hosts. Pair by pair it
    /// is the sum over the edges of the pattern; for TAG and hose, which know no edges, it is the
    /// smaller of what all senders of a trunk can send over it and what all its receivers can
    /// receive, each by its largest part.
    pub fn loads(
        &mut self,
        network: &Network,
        demand: &Demand,
        abstraction: Abstraction,
        pieces: &[Piece],
        loads: &mut Vec<Load>,
    ) {
        loads.clear();
        self.pieces.clear();
        self.pieces.extend_from_slice(pieces);
        self.pieces.sort_unstable();
        match (network.loads(), abstraction) {
            (Loads::Groups(parts), _) => self.by_groups(network, parts, demand, abstraction, loads),
            (Loads::Pairs(spread), Abstraction::Parfait) => {
                self.by_pairs(network, spread, demand, loads);
            }
            (Loads::Pairs(spread), _) => {
                self.by_sides(spread, demand, abstraction, loads);
            }
        }
        loads.sort_unstable();
    }

    fn by_groups(
        &mut self,
        network: &Network,
        parts: &[u32],
        demand: &Demand,
        abstraction: Abstraction,
        loads: &mut Vec<Load>,
    ) {
        self.group.clear();
        self.group.extend(self.pieces.iter().map(|piece| piece.host));
        // Nothing leaves the lowest group that has all pieces.
        while self.group.first() != self.group.last() {
            let mut at = 0;
            for group in self.group.chunk_by(|a, b| a == b) {
                let pieces = &self.pieces[at..at + group.len()];
                at += group.len();
                joined(pieces, &mut self.runs);
                let cut = demand.reservation(abstraction, &self.runs);
                let Cut { out_bps, in_bps } = cut;
                for (trunk, bps) in [(2 * group[0], out_bps), (2 * group[0] + 1, in_bps)] {
                    if bps > 0 {
                        loads.push(Load {
                            trunk,
                            bps: bps.div_ceil(parts[group[0] as usize].into()),
                        });
                    }
                }
            }
            for group in &mut self.group {
                *group = network.groups().parent(*group);
            }
        }
    }

    fn by_pairs(
        &mut self,
        network: &Network,
        spread: &Spread,
        demand: &Demand,
        loads: &mut Vec<Load>,
    ) {
        self.sums.resize(network.trunks(), 0);
        self.most.resize(network.trunks(), 0);
        for phase in 0..demand.phases() {
            for from in &self.pieces {
                for to in self.pieces.iter().filter(|to| to.host != from.host) {
                    let rate = u128::from(demand.between(phase, from.run, to.run));
                    if rate == 0 {
                        continue;
                    }
                    spread.each(from.host, to.host, |link, part| {
                        let sum = &mut self.sums[link as usize];
                        if *sum == 0 {
                            self.touched.push(link);
                        }
                        *sum = sum.saturating_add(rate.saturating_mul(part.into()));
                    });
                }
            }
            for trunk in self.touched.drain(..) {
                let sum = core::mem::take(&mut self.sums[trunk as usize]);
                let bps = whole_bps(sum);
                let most = &mut self.most[trunk as usize];
                if *most == 0 {
                    self.loaded.push(trunk);
                }
                *most = bps.max(*most);
            }
        }
        let most = &mut self.most;
        loads.extend(self.loaded.drain(..).map(|trunk| {
            let bps = core::mem::take(&mut most[trunk as usize]);
            Load { trunk, bps }
        }));
    }

    fn by_sides(
        &mut self,
        spread: &Spread,
        demand: &Demand,
        abstraction: Abstraction,
        loads: &mut Vec<Load>,
    ) {
        self.shares.clear();
        let pieces = &self.pieces;
        for (from, a) in (0..).zip(pieces) {
            for (to, b) in (0..).zip(pieces).filter(|(_, b)| b.host != a.host) {
                let shares = &mut self.shares;
                spread.each(a.host, b.host, |trunk, part| {
                    shares.push(Share { trunk, from, to, part });
                });
            }
        }
        self.shares.sort_unstable();
        let sides = &mut self.sides;
        for shares in self.shares.chunk_by(|a, b| a.trunk == b.trunk) {
            let run = |piece: u32| pieces[piece as usize].run;
            let parts = match abstraction {
                Abstraction::Hose => smaller_side(
                    shares,
                    sides,
                    |at| demand.hose_of(run(at)),
                    |at| demand.hose_of(run(at)),
                ),
                _ => {
                    let phase = |phase| {
                        let edges = demand.tag_edges(phase).map(|(from, to, send, receive)| {
                            let sent = |at| demand.in_component(from, run(at)) * send;
                            let received = |at| demand.in_component(to, run(at)) * receive;
                            smaller_side(shares, sides, sent, received)
                        });
                        edges.fold(0, u128::saturating_add)
                    };
                    (0..demand.phases()).map(phase).max().unwrap_or(0)
                }
            };
            if parts > 0 {
                loads.push(Load { trunk: shares[0].trunk, bps: whole_bps(parts) });
            }
        }
    }
}

/// The runs of pieces, with neighbours in rank made one.
fn joined(pieces: &[Piece], runs: &mut Vec<Run>) {
    runs.clear();
    runs.extend(pieces.iter().map(|piece| piece.run));
    runs.sort_unstable();
    runs.dedup_by(|next, run| {
        let follows = next.first == run.end;
        if follows {
            run.end = next.end;
        }
        follows
    });
}

/// The smaller of what the senders of a trunk can send over it, and what its receivers can receive:
/// each counts with the largest part of what it has with any of the others. In parts of bits per
/// second.
fn smaller_side(
    shares: &[Share],
    sides: &mut Vec<(u32, u64)>,
    sent: impl Fn(u32) -> u64,
    received: impl Fn(u32) -> u64,
) -> u128 {
    let mut side = |own: fn(&Share) -> u32,
                    other: fn(&Share) -> u32,
                    rate: &dyn Fn(u32) -> u64,
                    others: &dyn Fn(u32) -> u64| {
        sides.clear();
        // A link may come more than once for a pair; its parts add up.
        for pair in shares.chunk_by(|a, b| (a.from, a.to) == (b.from, b.to)) {
            if others(other(&pair[0])) > 0 {
                sides.push((own(&pair[0]), pair.iter().map(|share| share.part).sum()));
            }
        }
        sides.sort_unstable();
        let largest = sides.chunk_by(|a, b| a.0 == b.0).filter_map(|own| own.last());
        let sum = largest.map(|(at, part)| u128::from(rate(*at)) * u128::from(*part));
        sum.fold(0, u128::saturating_add)
    };
    let senders = side(|share| share.from, |share| share.to, &sent, &received);
    let receivers = side(|share| share.to, |share| share.from, &received, &sent);
    senders.min(receivers)
}

/// Bits per second of a sum of parts, rounded up.
fn whole_bps(parts: u128) -> u64 {
    u64::try_from(parts.div_ceil(WHOLE.into())).unwrap_or(u64::MAX)
}
