//! Paths that never go up after they went down (Schroeder et al., "Autonet", 1991).
//!
//! Switches are ranked by their distance from the roots, and by their number where that is the
//! same; *up* leads to a lower rank. No cycle of channels can do without a turn from down to up, so
//! packets cannot wait for each other in one.
//!
//! The roots of a tree are the switches that are the furthest from any host. Where all switches
//! have hosts, the root is a switch whose furthest switch is the nearest.

use alloc::vec::Vec;

use super::{NO_ROUTE, Tables, by_switch};
use crate::channels::{Channels, FAR};

/// Tables for every end port.
pub fn route(channels: &Channels) -> Tables {
    route_by(channels, &Ranks::of(channels))
}

/// The same, by given ranks.
pub fn route_by(channels: &Channels, ranks: &Ranks) -> Tables {
    let mut tables = Tables::new(channels);
    let mut used = alloc::vec![0_u32; channels.all().len()];
    for (there, end_ports, _) in by_switch(channels) {
        let hops = Hops::to(channels, there, &ranks.rank, &ranks.order);
        for end_port in end_ports {
            for switch in (0..channels.switches().len() as u32).filter(|switch| *switch != there) {
                let best =
                    channels.leaving(switch).filter(|channel| hops.is_best(channels, *channel));
                if let Some(channel) = best.min_by_key(|channel| used[*channel as usize]) {
                    used[channel as usize] += 1;
                    tables.set(switch, end_port, channels.get(channel).port);
                }
            }
        }
    }
    tables
}

/// The order of the switches, from the roots down.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// By switch: its place.
    rank: Vec<u32>,
    /// By place: the switch.
    order: Vec<u32>,
}

impl Ranks {
    /// From the roots that fit a tree, if all switches reach all end ports so; from one of them if
    /// not, as in a tree that lost links.
    pub fn of(channels: &Channels) -> Ranks {
        let roots = roots(channels);
        let ranks = Ranks::below(channels, &roots);
        let one = &roots[..roots.len().min(1)];
        match roots.len() < 2 || reaches_all(channels, &ranks) {
            true => ranks,
            false => Ranks::below(channels, one),
        }
    }

    /// From roots that are given; `None` if not all switches reach all end ports so, or there is
    /// none.
    pub fn from_roots(channels: &Channels, roots: &[u32]) -> Option<Ranks> {
        let ranks = Ranks::below(channels, roots);
        (!roots.is_empty() && reaches_all(channels, &ranks)).then_some(ranks)
    }

    fn below(channels: &Channels, roots: &[u32]) -> Ranks {
        let distances = channels.distances_from_any(roots);
        let mut order: Vec<u32> = (0..distances.len() as u32).collect();
        order.sort_by_key(|switch| (distances[*switch as usize], *switch));
        Ranks::in_order(order)
    }

    /// Those of another manager or time: `order` has the switches from the roots down.
    pub fn in_order(order: Vec<u32>) -> Ranks {
        let mut rank = alloc::vec![0; order.len()];
        for (place, switch) in (0..).zip(&order) {
            rank[*switch as usize] = place;
        }
        Ranks { rank, order }
    }

    /// The same order but for switches that no link joins to one above them: these come behind a
    /// neighbour, so that every switch has a path up to the first.
    pub fn joined(&self, channels: &Channels) -> Ranks {
        let len = self.order.len();
        let (mut order, mut is_in) = (Vec::new(), alloc::vec![false; len]);
        let has_neighbour = |is_in: &[bool], switch: u32| {
            channels.leaving(switch).any(|channel| is_in[channels.get(channel).to as usize])
        };
        while order.len() < len {
            let open = self.order.iter().copied().filter(|switch| !is_in[*switch as usize]);
            let next =
                open.clone().find(|switch| order.is_empty() || has_neighbour(&is_in, *switch));
            // A switch without any link comes last.
            let Some(next) = next.or_else(|| open.clone().next()) else {
                break;
            };
            is_in[next as usize] = true;
            order.push(next);
        }
        Ranks::in_order(order)
    }

    /// The switches, from the roots down.
    pub fn order(&self) -> &[u32] {
        &self.order
    }

    /// By switch that forwards: the lowest port on a path to `there`; 0 at the switch itself.
    pub fn ports_to(&self, channels: &Channels, there: u32) -> Vec<u8> {
        let hops = Hops::to(channels, there, &self.rank, &self.order);
        let port = |switch: u32| {
            let mut best =
                channels.leaving(switch).filter(|channel| hops.is_best(channels, *channel));
            let first = best.next().map_or(NO_ROUTE, |channel| channels.get(channel).port);
            if switch == there { 0 } else { first }
        };
        (0..self.rank.len() as u32).map(port).collect()
    }
}

/// Whether every switch has an Up*/Down* path to every switch with end ports. Roots send nothing to
/// each other.
fn reaches_all(channels: &Channels, ranks: &Ranks) -> bool {
    (0..ranks.order.len() as u32).all(|there| {
        let hops = Hops::of(channels, there, ranks);
        channels.sources(there) == 0 || hops.used.iter().all(|hops| *hops != FAR)
    })
}

/// The switches of a fabric in the order of their ranks.
pub(super) fn by_rank(ranks: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..ranks.len() as u32).collect();
    order.sort_by_key(|switch| ranks[*switch as usize]);
    order
}

/// See the module's text.
fn roots(channels: &Channels) -> Vec<u32> {
    let all = 0..channels.switches().len() as u32;
    let with_hosts: Vec<u32> = all.clone().filter(|switch| channels.sources(*switch) > 0).collect();
    let height = channels.distances_from_any(&with_hosts);
    let top = height.iter().copied().filter(|height| *height != FAR).max().unwrap_or(0);
    if top > 0 {
        return all.filter(|switch| height[*switch as usize] == top).collect();
    }
    let furthest = |switch: &u32| channels.distances(*switch).into_iter().max();
    all.min_by_key(furthest).into_iter().collect()
}

/// Hops from each switch to one, of a fabric whose switches have a rank; no channel joins two of
/// one rank.
pub(super) struct Hops<'a> {
    rank: &'a [u32],
    /// By channels that lead down alone.
    down: Vec<u16>,
    /// By the paths that are used: down where that alone leads there, since packets may have come
    /// down already.
    used: Vec<u16>,
}

impl<'a> Hops<'a> {
    /// To one, by these ranks.
    pub(super) fn of(channels: &Channels, there: u32, ranks: &'a Ranks) -> Hops<'a> {
        Hops::to(channels, there, &ranks.rank, &ranks.order)
    }

    /// `order` is that of the ranks.
    pub(super) fn to(channels: &Channels, there: u32, rank: &'a [u32], order: &[u32]) -> Hops<'a> {
        let mut down = alloc::vec![FAR; rank.len()];
        down[there as usize] = 0;
        let fewest = |hops: &[u16], switch: u32, leads_up: bool| {
            let channels = channels.leaving(switch).map(|channel| channels.get(channel).to);
            let kept =
                channels.filter(|to| (rank[*to as usize] < rank[switch as usize]) == leads_up);
            kept.map(|to| hops[to as usize].saturating_add(1)).min().unwrap_or(FAR)
        };
        // From the lowest switches up: what is below is known.
        for switch in order.iter().rev().filter(|switch| **switch != there) {
            down[*switch as usize] = fewest(&down, *switch, false);
        }
        let mut used = down.clone();
        for switch in order {
            if used[*switch as usize] == FAR {
                used[*switch as usize] = fewest(&used, *switch, true);
            }
        }
        Hops { rank, down, used }
    }

    /// Whether the channel lies on a path that is used, and none is shorter.
    pub(super) fn is_best(&self, channels: &Channels, channel: u32) -> bool {
        let channel = channels.get(channel);
        let (from, to) = (channel.from as usize, channel.to as usize);
        let leads_up = self.rank[to] < self.rank[from];
        let goes_up = self.down[from] == FAR;
        let hops = if goes_up { &self.used } else { &self.down };
        leads_up == goes_up && hops[to] != FAR && hops[to] + 1 == hops[from]
    }
}
