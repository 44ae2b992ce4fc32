//! How others choose hosts: baselines for [`search`](super::search).
//!
//! | function | rule |
//! |---|---|
//! | [`first_fit`] | hosts in order, each takes as many workers as its slots and links hold |
//! | [`best_fit`] | the tightest group of the lowest level with enough slots, and in it the fewest groups, as Kueue and SLURM do; links do not count |
//! | [`oktopus`] | the first group of the lowest level that holds all, where each group holds as many as its links allow (Ballani et al., SIGCOMM 2011) |
//! | [`colocate`] | the same groups, but in each the child that costs least bandwidth per worker comes first (after CloudMirror: Lee et al., SIGCOMM 2014) |
//!
//! Each reserves by the abstraction of the request. The publications assume trees; elsewhere a
//! group is tried by its slots, and the links are checked once all workers are placed.

use alloc::vec::Vec;

use super::{Placement, Request, cost, link_cost};
use crate::demand::{Demand, Order};
use crate::ledger::{Ledger, Refusal};
use crate::loads::{Load, Loader, Piece};
use crate::network::Loads;
use crate::runs::Run;

/// First fit; see the module's text.
///
/// # Errors
/// When there are too few slots, or a link has too little left.
pub fn first_fit(ledger: &mut Ledger, request: &Request) -> Result<Placement, Refusal> {
    request.check_slots(ledger)?;
    let demand = request.demand(Order::Ranks);
    let (mut pieces, mut next) = (Vec::new(), 0);
    for host in 0..ledger.network().hosts() {
        let left = demand.workers() - next;
        let most = request.room(ledger, host).min(left);
        let leaf = ledger.network().groups().parent(host);
        let most = most.min(request.most_per_leaf - beside(ledger, &pieces, leaf));
        let count = held(ledger, request, demand, host, next, most);
        if count > 0 {
            pieces.push(Piece { host, run: Run::new(next, next + count) });
            next += count;
        }
        if next == demand.workers() {
            return checked(ledger, request, pieces);
        }
    }
    Err(why_not(ledger, request))
}

/// Workers that a leaf has already.
fn beside(ledger: &Ledger, pieces: &[Piece], leaf: u32) -> u32 {
    let groups = ledger.network().groups();
    // Hosts are taken in order, so those of the leaf are the last ones.
    let own = pieces.iter().rev().take_while(|piece| groups.parent(piece.host) == leaf);
    own.map(|piece| piece.run.len()).sum()
}

/// Best fit by distance; see the module's text. The links may not hold it.
///
/// # Errors
/// When there are too few slots.
pub fn best_fit(ledger: &Ledger, request: &Request) -> Result<Vec<Piece>, Refusal> {
    request.check_slots(ledger)?;
    let groups = ledger.network().groups();
    let workers = request.workers();
    for level in 0..=groups.top() {
        let fits = groups.level(level).filter(|group| request.room(ledger, *group) >= workers);
        let mut fits: Vec<u32> = fits.collect();
        fits.sort_by_key(|group| (request.room(ledger, *group), *group));
        for group in fits {
            let mut pieces = Vec::new();
            if fewest(ledger, request, group, workers, &mut pieces) == workers {
                return Ok(pieces);
            }
        }
    }
    let rooms = groups.level(0).map(|host| u64::from(request.room(ledger, host)));
    let (slots_per_worker, held) = (request.slots_per_worker, rooms.sum());
    Err(Refusal::Scattered { workers, slots_per_worker, held })
}

/// Places up to `count` workers in a group, in as few of its children as possible; returns how
/// many.
fn fewest(
    ledger: &Ledger,
    request: &Request,
    group: u32,
    count: u32,
    pieces: &mut Vec<Piece>,
) -> u32 {
    let groups = ledger.network().groups();
    let count = count.min(request.room(ledger, group));
    if groups.is_host(group) {
        let first = pieces.last().map_or(0, |last| last.run.end);
        if count > 0 {
            pieces.push(Piece { host: group, run: Run::new(first, first + count) });
        }
        return count;
    }
    let room = |child: &u32| request.room(ledger, *child);
    let mut children: Vec<u32> = groups.children(group).filter(|child| room(child) > 0).collect();
    let mut placed = 0;
    while placed < count && !children.is_empty() {
        let left = count - placed;
        // The tightest that holds the rest, or else the largest.
        let by_fit = |(_, child): &(usize, &u32)| match room(child) {
            room if room >= left => (0, room),
            room => (1, u32::MAX - room),
        };
        let best = children.iter().enumerate().min_by_key(by_fit).map(|(at, _)| at);
        let Some(best) = best else { break };
        let child = children.remove(best);
        placed += fewest(ledger, request, child, left, pieces);
    }
    placed
}

/// Oktopus' greedy; see the module's text.
///
/// # Errors
/// When there are too few slots, or no group of hosts has links that hold it.
pub fn oktopus(ledger: &mut Ledger, request: &Request) -> Result<Placement, Refusal> {
    lowest_group(ledger, request, Next::First)
}

/// CloudMirror's colocation; see the module's text.
///
/// # Errors
/// When there are too few slots, or no group of hosts has links that hold it.
pub fn colocate(ledger: &mut Ledger, request: &Request) -> Result<Placement, Refusal> {
    lowest_group(ledger, request, Next::Cheapest)
}

/// Which child of a group takes workers next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    First,
    Cheapest,
}

fn lowest_group(ledger: &mut Ledger, request: &Request, next: Next) -> Result<Placement, Refusal> {
    request.check_slots(ledger)?;
    let demand = request.demand(Order::Ranks);
    let workers = demand.workers();
    // Of each group, how many workers its slots and its own links hold, and those of all groups in
    // it.
    let mut holds: Vec<u32> = Vec::new();
    let levels = ledger.network().groups().top();
    for level in 0..=levels {
        let of_level = ledger.network().groups().level(level);
        for group in of_level.clone() {
            let children = ledger.network().groups().children(group);
            let room = match level {
                0 => request.room(ledger, group),
                _ => children
                    .fold(0_u32, |sum, child| sum.saturating_add(holds[child as usize]))
                    .min(request.room(ledger, group)),
            };
            if room >= workers {
                let mut pieces = Vec::new();
                let fill = Fill { ledger, request, demand, holds: &holds, next };
                if fill.place(group, workers, &mut pieces) == workers
                    && let Ok(placement) = checked(ledger, request, pieces)
                {
                    return Ok(placement);
                }
            }
            holds.push(held(ledger, request, demand, group, 0, room.min(workers)));
        }
    }
    Err(why_not(ledger, request))
}

/// Fills a group from what its children hold.
struct Fill<'a> {
    ledger: &'a Ledger,
    request: &'a Request,
    demand: &'a Demand,
    holds: &'a [u32],
    next: Next,
}

impl Fill<'_> {
    /// Places up to `count` workers; returns how many.
    fn place(&self, group: u32, count: u32, pieces: &mut Vec<Piece>) -> u32 {
        let groups = self.ledger.network().groups();
        let first = pieces.last().map_or(0, |last| last.run.end);
        if groups.is_host(group) {
            pieces.push(Piece { host: group, run: Run::new(first, first + count) });
            return count;
        }
        let mut children: Vec<u32> = groups.children(group).collect();
        let mut placed = 0;
        while placed < count && !children.is_empty() {
            let Some((at, most)) = self.choose(&children, first + placed, count - placed) else {
                break;
            };
            let child = children.remove(at);
            let got = if most == 0 { 0 } else { self.place(child, most, pieces) };
            placed += got;
        }
        placed
    }

    /// The child to fill next, by its place, and with how many.
    fn choose(&self, children: &[u32], first: u32, left: u32) -> Option<(usize, u32)> {
        let count = |child: u32| {
            let most = self.holds[child as usize].min(left);
            held(self.ledger, self.request, self.demand, child, first, most)
        };
        if self.next == Next::First {
            return children.first().map(|child| (0, count(*child)));
        }
        let counted = children.iter().enumerate().map(|(at, child)| (at, *child, count(*child)));
        let price = |child: u32, count: u32| {
            let loads = group_loads(self.ledger, self.request, self.demand, child, first, count);
            let bps = loads.iter().fold(0_u128, |sum, load| sum + u128::from(load.bps));
            (bps << 20) / u128::from(count)
        };
        let useful = counted.filter(|(.., count)| *count > 0);
        useful
            .min_by_key(|(_, child, count)| price(*child, *count))
            .map(|(at, _, count)| (at, count))
    }
}

/// What workers from rank `first` on put on the links of a group; nothing where loads do not follow
/// from groups, and for the group of all hosts.
pub(super) fn group_loads(
    ledger: &Ledger,
    request: &Request,
    demand: &Demand,
    group: u32,
    first: u32,
    count: u32,
) -> [Load; 2] {
    let [up, down] = [2 * group, 2 * group + 1];
    let nothing = [Load { trunk: up, bps: 0 }, Load { trunk: down, bps: 0 }];
    match ledger.network().loads() {
        Loads::Groups(parts) if count < demand.workers() => {
            let cut = demand.reservation(request.abstraction, &[Run::new(first, first + count)]);
            let parts = u64::from(parts[group as usize]);
            [
                Load { trunk: up, bps: cut.out_bps.div_ceil(parts) },
                Load { trunk: down, bps: cut.in_bps.div_ceil(parts) },
            ]
        }
        _ => nothing,
    }
}

/// The most of `most` workers from rank `first` on that the links of a group hold: all of them, or
/// the first number below that fits.
fn held(
    ledger: &Ledger,
    request: &Request,
    demand: &Demand,
    group: u32,
    first: u32,
    most: u32,
) -> u32 {
    if !ledger.network().is_tree() {
        return most;
    }
    let fits = |count: &u32| {
        let loads = group_loads(ledger, request, demand, group, first, *count);
        loads.into_iter().all(|load| load.bps == 0 || link_cost(ledger, load).is_some())
    };
    // Reservations grow up to half of the workers and shrink after that.
    let half = most.min(demand.workers() / 2);
    if fits(&most) {
        return most;
    }
    if let Some(count) = (half + 1..most).rev().take(64).find(&fits) {
        return count;
    }
    let (mut low, mut high) = (0, half + 1);
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(&middle) { low = middle } else { high = middle }
    }
    low
}

/// A placement whose links hold it.
fn checked(
    ledger: &mut Ledger,
    request: &Request,
    pieces: Vec<Piece>,
) -> Result<Placement, Refusal> {
    let demand = request.demand(Order::Ranks);
    let loads = ledger.check(demand, request.slots_per_worker, request.abstraction, &pieces)?;
    let cost = cost(ledger, request.slots_per_worker, &pieces, &loads).unwrap_or(u64::MAX);
    Ok(Placement { order: Order::Ranks, pieces, cost })
}

/// Where the workers are closest together, if the links hold them there; what is missing if not.
pub(super) fn closest(ledger: &Ledger, request: &Request) -> Result<Placement, Refusal> {
    let pieces = best_fit(ledger, request)?;
    let (order, mut loads) = (Order::Ranks, Vec::new());
    let demand = request.demand(order);
    Loader::new().loads(ledger.network(), demand, request.abstraction, &pieces, &mut loads);
    if let Some(cost) = cost(ledger, request.slots_per_worker, &pieces, &loads) {
        return Ok(Placement { order, pieces, cost });
    }
    let missing = |load: &&Load| load.bps.saturating_sub(ledger.free_bps(load.trunk));
    let worst = loads.iter().rev().max_by_key(missing);
    Err(worst.map_or(Refusal::NotFound, |load| ledger.shortage(*load)))
}

/// Why a way to place found nothing.
fn why_not(ledger: &Ledger, request: &Request) -> Refusal {
    closest(ledger, request).err().unwrap_or(Refusal::NotFound)
}
