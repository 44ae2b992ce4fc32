//! Jobs admitted one after the other by a way to place, for a proof.

use ::topology::graph::{Capacity, Kind, Link, Topology, TopologyError};
use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::Ledger;
use parfait::network::{Network, NetworkError, Routing};
use parfait::placement::search::{self, Memory};
use parfait::placement::{Request, greedy};
use parfait::spread::Ecmp;

use super::set::Member;

/// A way to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Tree search that knows every edge.
    Search,
    /// Slots as close together as possible, whatever links carry (Kueue, SLURM).
    Locality,
    /// The greedy of Oktopus with a hose for each worker.
    Oktopus,
}

impl Way {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Way::Search => "search",
            Way::Locality => "locality",
            Way::Oktopus => "oktopus",
        }
    }
}

/// Iterations of the search for each job.
const ITERATIONS: u32 = 600;

/// What became of jobs: those with a place, and those without, with the reason.
#[derive(Clone, Debug, Default)]
pub struct Admitted {
    /// Those that have a place.
    pub members: Vec<Member>,
    /// The others.
    pub refused: Vec<(Job, String)>,
}

/// Leaves the jobs that all of the sets have.
pub fn keep_common(sets: &mut [&mut Admitted]) {
    let has = |set: &Admitted, id| set.members.iter().any(|member| member.id == id);
    let ids = sets.iter().flat_map(|set| &set.members).map(|member| member.id);
    let common: Vec<u64> = ids.filter(|&id| sets.iter().all(|set| has(set, id))).collect();
    for set in sets {
        set.members.retain(|member| common.contains(&member.id));
    }
}

/// More than any link carries.
const UNLIMITED_BPS: u64 = 1 << 50;

/// The network of a topology, of whose links so many parts per million may be reserved. Packets
/// take all shortest paths evenly, over hosts where there are none over switches.
///
/// # Errors
/// When the topology or the number of slots is impossible.
pub fn network(
    topology: &Topology,
    slots: u32,
    reservable_ppm: u32,
) -> Result<Network, NetworkError> {
    let routing = match sim::topology::separate_hosts(topology) {
        Some(_) => Routing::Relayed(Ecmp::Even),
        None => Routing::Ecmp(Ecmp::Even),
    };
    Network::new(topology, slots, routing, |_, link| {
        let bps = u128::from(link.capacity.rate_bps) * u128::from(reservable_ppm) / 1_000_000;
        bps as u64
    })
}

/// The same topology with other rates.
///
/// # Errors
/// When a rate is 0.
pub fn with_rates(
    topology: &Topology,
    rate: impl Fn(&Link) -> u64,
) -> Result<Topology, TopologyError> {
    let mut other = Topology::new();
    for (_, node) in topology.nodes() {
        other.add(node.kind(), node.name(), node.ports().into())?;
    }
    for (_, link) in topology.links() {
        let [a, b] = link.ends;
        other.connect(a, b, Capacity { rate_bps: rate(link), ..link.capacity })?;
    }
    Ok(other)
}

/// The same topology whose links between switches carry a part only.
///
/// # Errors
/// When that leaves no rate.
pub fn oversubscribed(topology: &Topology, factor: u64) -> Result<Topology, TopologyError> {
    with_rates(topology, |link| {
        let is_switch = |end: usize| topology.node(link.ends[end].node).kind() == Kind::Switch;
        let between = is_switch(0) && is_switch(1);
        if between { link.capacity.rate_bps / factor.max(1) } else { link.capacity.rate_bps }
    })
}

/// Admits the jobs in this order; job `n` has the number `n + 1`.
///
/// # Errors
/// When the topology is impossible.
pub fn admit(
    topology: &Topology,
    network: &Network,
    jobs: &[Job],
    way: Way,
    seed: u64,
) -> Result<Admitted, NetworkError> {
    let mut ledger = match way {
        // Only slots count: links carry anything.
        Way::Locality => {
            let unlimited = with_rates(topology, |_| UNLIMITED_BPS)?;
            Ledger::new(self::network(&unlimited, network.slots(), 1_000_000)?)
        }
        Way::Search | Way::Oktopus => Ledger::new(network.clone()),
    };
    let (mut admitted, mut memory) = (Admitted::default(), Memory::new());
    for (id, job) in (1..).zip(jobs) {
        match place(&mut ledger, &mut memory, way, (id, job), seed) {
            Ok(member) => admitted.members.push(member),
            Err(reason) => admitted.refused.push((job.clone(), reason)),
        }
    }
    Ok(admitted)
}

fn place(
    ledger: &mut Ledger,
    memory: &mut Memory,
    way: Way,
    (id, job): (u64, &Job),
    seed: u64,
) -> Result<Member, String> {
    let abstraction = match way {
        Way::Search | Way::Locality => Abstraction::Parfait,
        Way::Oktopus => Abstraction::Hose,
    };
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let request = Request::new(job, abstraction).map_err(|error| text(&error))?;
    let (order, pieces) = match way {
        Way::Search => {
            let found = search::place(ledger, &request, memory, seed, ITERATIONS);
            found.map(|found| (found.order, found.pieces))
        }
        Way::Locality => greedy::best_fit(ledger, &request).map(|pieces| (Order::Ranks, pieces)),
        Way::Oktopus => greedy::oktopus(ledger, &request).map(|found| (found.order, found.pieces)),
    }
    .map_err(|refusal| text(&refusal))?;
    let demand = request.demand(order);
    let taken = ledger.admit(id, demand, job.slots_per_worker, abstraction, &pieces);
    taken.map_err(|refusal| text(&refusal))?;
    Ok(Member { id, job: job.clone(), order, pieces, dscp: None })
}
