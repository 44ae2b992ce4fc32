//! Which hosts a job gets.
//!
//! Workers are placed in the order of their ranks: a host takes the next run, and so do all hosts
//! below a switch together, which is what keeps [`cut`](crate::demand::Demand::cut)s cheap. Torus
//! and products of parallelism can also be placed across ([`Order`]).
//!
//! | module | how hosts are chosen |
//! |---|---|
//! | [`search`] | Monte Carlo tree search by cost |
//! | [`greedy`] | what others do: first fit, best fit by distance, Oktopus' and CloudMirror's greedy |
//! | [`exhaustive`] | every way there is, for small cases |
//! | [`migration`] | placed jobs that move: away from hosts, or to where they fit, with as few workers as possible |
//! | [`defragmentation`] | placed jobs that move so that others have room |
//!
//! The cost of a placement is that of what it takes away from later jobs: of each directed link the
//! share that it reserves of what is left there, so that scarce links are dear, and of each empty
//! host or group of hosts that it opens, the share that it leaves unused.

pub mod defragmentation;
pub mod exhaustive;
pub mod greedy;
pub mod migration;
pub mod search;

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::demand::{Abstraction, Demand, Order};
use crate::job::{Job, JobError};
use crate::ledger::{Ledger, Refusal};
use crate::loads::{Load, Piece};
use crate::pattern::{Pattern, PatternError};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    slots_per_worker: u32,
    abstraction: Abstraction,
    /// In each order in which the workers can be placed.
    demands: Vec<(Order, Demand)>,
    /// Workers that should not be parted if it can be avoided: a row, a group, a tensor-parallel
    /// ring.
    unit: u32,
    /// Hosts that it must not have, in order.
    avoided: Vec<u32>,
    /// Workers that a host, and a leaf, may have.
    most_per_host: u32,
    most_per_leaf: u32,
    /// How its separation is written.
    separation: String,
}

impl Request {
    /// One for a job whose links are reserved by that abstraction.
    ///
    /// # Errors
    /// When the job is impossible.
    pub fn new(job: &Job, abstraction: Abstraction) -> Result<Request, JobError> {
        job.check()?;
        let (pattern, slots_per_worker) = (&job.pattern, job.slots_per_worker);
        let orders = Order::of(pattern).iter();
        let demands = orders.map(|order| Ok((*order, Demand::in_order(pattern, *order)?)));
        let unit = match *pattern {
            Pattern::Torus { columns, .. } => columns,
            Pattern::Hierarchical { group, .. } => group,
            Pattern::Parallel { tensor, .. } => tensor,
            _ => 1,
        };
        let demands = demands.collect::<Result<_, PatternError>>()?;
        let (most_per_host, most_per_leaf) = job.separation.most(pattern.workers()?);
        let separation = job.separation.to_string();
        let avoided = Vec::new();
        Ok(Request {
            slots_per_worker,
            abstraction,
            demands,
            unit,
            avoided,
            most_per_host,
            most_per_leaf,
            separation,
        })
    }

    /// The same, but on none of these hosts, nor of those that it avoids already.
    pub fn avoiding(mut self, hosts: impl IntoIterator<Item = u32>) -> Request {
        self.avoided.extend(hosts);
        self.avoided.sort_unstable();
        self.avoided.dedup();
        self
    }

    /// Whether it must not have a host.
    pub fn avoids(&self, host: u32) -> bool {
        self.avoided.binary_search(&host).is_ok()
    }

    /// Slots that each worker takes.
    pub fn slots_per_worker(&self) -> u32 {
        self.slots_per_worker
    }

    /// How links are reserved.
    pub fn abstraction(&self) -> Abstraction {
        self.abstraction
    }

    /// How many workers there are.
    pub fn workers(&self) -> u32 {
        self.demands[0].1.workers()
    }

    /// The demand in an order; by rank if the pattern has no other.
    pub fn demand(&self, order: Order) -> &Demand {
        let own = self.demands.iter().find(|(own, _)| *own == order);
        &own.unwrap_or(&self.demands[0]).1
    }

    /// The orders in which the workers can be placed.
    pub fn orders(&self) -> impl Iterator<Item = Order> + '_ {
        self.demands.iter().map(|(order, _)| *order)
    }

    /// Free slots of the hosts of a group that it does not avoid.
    fn free_slots(&self, ledger: &Ledger, group: u32) -> u64 {
        let free = ledger.free_slots(group);
        if self.avoided.is_empty() {
            return free;
        }
        let hosts = ledger.network().groups().hosts_of(group);
        let first = self.avoided.partition_point(|host| *host < hosts.start);
        let avoided = self.avoided[first..].iter().take_while(|host| **host < hosts.end);
        free - avoided.map(|host| ledger.free_slots(*host)).sum::<u64>()
    }

    /// Workers that the free slots of a group hold, at most.
    fn room(&self, ledger: &Ledger, group: u32) -> u32 {
        let free = self.free_slots(ledger, group);
        let room =
            if self.slots_per_worker <= 1 { free } else { free / u64::from(self.slots_per_worker) };
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if self.is_separated() { room.min(self.most_of(ledger, group)) } else { room }
    }

    /// Whether hosts or leaves may have so many workers only.
    fn is_separated(&self) -> bool {
        self.most_per_host.min(self.most_per_leaf) < u32::MAX
    }

    /// Workers that a group may have, whatever its slots.
    fn most_of(&self, ledger: &Ledger, group: u32) -> u32 {
        let groups = ledger.network().groups();
        let hosts = groups.hosts_of(group);
        if groups.is_host(group) {
            return self.most_per_host.min(self.most_per_leaf);
        }
        let leaves = groups.level(1);
        let leaf_of = |host: u32| groups.parent(host);
        // Leaves are sorted as their hosts are.
        let leaves = match leaves.contains(&group) {
            true => 1,
            false => leaf_of(hosts.end - 1) - leaf_of(hosts.start) + 1,
        };
        let by_hosts = self.most_per_host.saturating_mul(hosts.len() as u32);
        by_hosts.min(self.most_per_leaf.saturating_mul(leaves))
    }

    /// Whether each host has the slots, and each leaf few enough workers; pieces of one host count
    /// together.
    fn fits_slots(&self, ledger: &Ledger, pieces: &[Piece]) -> bool {
        let groups = ledger.network().groups();
        let fits = |group: u32, level_of: &dyn Fn(u32) -> u32| {
            let own = pieces.iter().filter(|other| level_of(other.host) == group);
            own.map(|piece| piece.run.len()).sum::<u32>() <= self.room(ledger, group)
        };
        pieces.iter().all(|piece| fits(piece.host, &|host| host))
            && (self.most_per_leaf == u32::MAX
                || pieces
                    .iter()
                    .all(|piece| fits(groups.parent(piece.host), &|host| groups.parent(host))))
    }

    /// Refuses what all free slots together do not hold, or not as far apart as it is to be.
    fn check_slots(&self, ledger: &Ledger) -> Result<(), Refusal> {
        let groups = ledger.network().groups();
        let free = ledger.free_slots(groups.root());
        let needed = u64::from(self.workers()) * u64::from(self.slots_per_worker);
        if needed > free {
            return Err(Refusal::AllSlots { needed, free });
        }
        if !self.is_separated() && self.avoided.is_empty() {
            return Ok(());
        }
        let of_leaf = |leaf: u32| {
            let rooms = groups.hosts_of(leaf).map(|host| u64::from(self.room(ledger, host)));
            rooms.sum::<u64>().min(self.most_per_leaf.into())
        };
        let held: u64 = groups.level(1).map(of_leaf).sum();
        let (workers, avoided) = (self.workers(), self.avoided.len());
        let separation = self.separation.trim_start().to_string();
        let holds = held >= workers.into();
        holds.then_some(()).ok_or(Refusal::Separated { workers, held, separation, avoided })
    }
}

/// Where a job goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// In which order its workers are placed; ranks in `pieces` are of that order.
    pub order: Order,
    /// Its workers.
    pub pieces: Vec<Piece>,
    /// What it costs later jobs; see the module's text.
    pub cost: u64,
}

/// The cost of a whole link that is as good as full; an empty one costs a ninth.
const LINK: u128 = 1 << 20;

/// The cost of a host, or of all hosts below a switch, that was empty and is left almost so.
const OPENED: u64 = 1 << 15;

/// The cost of a load on all links of its trunk; `None` if it does not fit.
fn link_cost(ledger: &Ledger, load: Load) -> Option<u64> {
    let left = ledger.free_bps(load.trunk).checked_sub(load.bps)?;
    // An eighth of the link keeps the price of the last bit finite.
    let scarcity = u128::from(left) + u128::from(ledger.network().capacity_bps(load.trunk) / 8) + 1;
    let one = LINK * u128::from(load.bps) / scarcity;
    Some(
        u64::try_from(one)
            .unwrap_or(u64::MAX)
            .saturating_mul(ledger.network().width(load.trunk).into()),
    )
}

/// The cost of so many slots in a group that may be empty.
fn open_cost(ledger: &Ledger, group: u32, slots: u64) -> u64 {
    let all = ledger.network().slots_of(group).max(1);
    if ledger.free_slots(group) < all { 0 } else { OPENED * all.saturating_sub(slots) / all }
}

/// The cost of a placement with these loads; `None` if a load does not fit.
pub fn cost(
    ledger: &Ledger,
    slots_per_worker: u32,
    pieces: &[Piece],
    loads: &[Load],
) -> Option<u64> {
    let links = loads
        .iter()
        .try_fold(0_u64, |sum, load| Some(sum.saturating_add(link_cost(ledger, *load)?)))?;
    let mut slots: Vec<(u32, u64)> = pieces
        .iter()
        .map(|piece| (piece.host, u64::from(piece.run.len()) * u64::from(slots_per_worker)))
        .collect();
    slots.sort_unstable();
    let mut opened = 0_u64;
    for _ in 0..ledger.network().groups().top() {
        // Groups of one level, each once: groups of a level are sorted as their hosts are.
        slots.dedup_by(|next, group| {
            let is_same = next.0 == group.0;
            if is_same {
                group.1 += next.1;
            }
            is_same
        });
        for (group, slots) in &mut slots {
            opened = opened.saturating_add(open_cost(ledger, *group, *slots));
            *group = ledger.network().groups().parent(*group);
        }
    }
    Some(links.saturating_add(opened))
}
