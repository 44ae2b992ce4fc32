//! Jobs at their places: the connections between their workers, what their links are promised, and
//! the queues of every port.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ::topology::graph::{Kind, NodeId, Topology};
use parfait::demand::{Abstraction, Demand, Order};
use parfait::job::{Job, JobError, Latency};
use parfait::ledger::JobId;
use parfait::loads::{Loader, Piece};
use parfait::log::Held;
use parfait::network::Network;
use parfait::queues::{Binding, Dscp, Guarantee, Plan, Port, Refusal, Scheme};
use parfait::spread::DirectedLink;
use thiserror::Error;

/// Most connections of a set: about a gigabyte of endpoints.
pub const MAX_LINES: usize = 20_000;

/// A job at its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number.
    pub id: JobId,
    /// The job.
    pub job: Job,
    /// In which order its workers are placed.
    pub order: Order,
    /// Where its workers are.
    pub pieces: Vec<Piece>,
    /// That of its packets; `None` for the lowest that no job on its links has.
    pub dscp: Option<Dscp>,
}

impl Member {
    /// A job of a brain's book.
    pub fn of(id: JobId, held: &Held, dscp: Option<Dscp>) -> Member {
        let Held { job, order, pieces, .. } = held;
        Member { id, job: job.clone(), order: *order, pieces: pieces.clone(), dscp }
    }
}

/// Why a set cannot be proved.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SetError {
    /// A job is impossible.
    #[error("job {0}: {1}")]
    Job(JobId, JobError),
    /// A worker is on no host.
    #[error("job {job}: worker {worker} is on no host of the topology")]
    Worker {
        /// The job.
        job: JobId,
        /// The worker, by its place in the job's order.
        worker: u32,
    },
    /// There are too many connections.
    #[error("the jobs have more than {MAX_LINES} pairs of workers on different hosts")]
    TooMany,
    /// A port has no plan.
    #[error("the port of '{from}' to '{to}': {refusal}")]
    Port {
        /// The sending end.
        from: String,
        /// The receiving end.
        to: String,
        /// Why.
        refusal: Refusal,
    },
    /// All code points are taken.
    #[error("{0}")]
    Dscp(Refusal),
}

/// A connection between two workers on different hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// The place of its job in the set.
    pub member: usize,
    /// The workers, by their places in the job's order.
    pub workers: (u32, u32),
    /// Their hosts, by number.
    pub hosts: (u32, u32),
}

/// What queues a port has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRules {
    /// Queues for jobs.
    pub queues: u8,
    /// How jobs are given queues.
    pub scheme: Scheme,
    /// Units of weight of a port.
    pub weight_units: u32,
    /// Bytes of the largest frame on the wire.
    pub frame_bytes: u32,
}

impl QueueRules {
    /// Bytes that a port of any weights sends in a round.
    const ROUND_BYTES: u32 = 25_600;

    /// Queues that are bound by `parfait::queues`' own rule, with weights in percent.
    pub const fn new(queues: u8, frame_bytes: u32) -> QueueRules {
        QueueRules { queues, scheme: Scheme::Matched, weight_units: 100, frame_bytes }
    }

    /// A port of that rate by these rules.
    pub fn port(&self, rate_bps: u64) -> Port {
        Port {
            rate_bps,
            queues: self.queues,
            weight_units: self.weight_units,
            quantum_bytes: (Self::ROUND_BYTES / self.weight_units.max(1)).max(1),
            frame_bytes: self.frame_bytes,
            buffer_bytes: 1 << 20,
        }
    }
}

/// Jobs at their places; see the module's text.
#[derive(Clone, Debug)]
pub struct Set {
    members: Vec<Member>,
    dscps: Vec<Dscp>,
    /// Connections, each once, whatever its phases.
    lines: Vec<Line>,
    /// By job and phase: connections, and what each has at least, in bits per second on the wire.
    phases: Vec<Vec<Vec<(u32, u64)>>>,
    /// By job: pairs of workers that share a host.
    local_pairs: Vec<usize>,
    /// By trunk: jobs and what each of its links promises them.
    promised: BTreeMap<u32, Vec<(usize, u64)>>,
}

impl Set {
    /// The set of these jobs.
    ///
    /// # Errors
    /// When a job is impossible, a worker has no host, or there are too many connections or jobs on
    /// a link.
    pub fn new(network: &Network, members: &[Member]) -> Result<Set, SetError> {
        let mut set = Set {
            members: members.to_vec(),
            dscps: Vec::new(),
            lines: Vec::new(),
            phases: Vec::new(),
            local_pairs: Vec::new(),
            promised: BTreeMap::new(),
        };
        let mut loader = Loader::new();
        for (place, member) in members.iter().enumerate() {
            member.job.check().map_err(|error| SetError::Job(member.id, error))?;
            let demand = Demand::in_order(&member.job.pattern, member.order)
                .map_err(|error| SetError::Job(member.id, error.into()))?;
            set.add_lines(network, place, &demand)?;
            let mut loads = Vec::new();
            loader.loads(network, &demand, Abstraction::Parfait, &member.pieces, &mut loads);
            for load in loads {
                set.promised.entry(load.trunk).or_default().push((place, load.bps));
            }
        }
        set.dscps = set.code_points()?;
        Ok(set)
    }

    fn add_lines(&mut self, network: &Network, at: usize, demand: &Demand) -> Result<(), SetError> {
        let member = &self.members[at];
        let mut host_of = vec![None; demand.workers() as usize];
        for piece in member.pieces.iter().filter(|piece| piece.host < network.hosts()) {
            let places = host_of.iter_mut().take(piece.run.end as usize);
            places.skip(piece.run.first as usize).for_each(|place| *place = Some(piece.host));
        }
        if let Some(worker) = host_of.iter().position(Option::is_none) {
            return Err(SetError::Worker { job: member.id, worker: worker as u32 });
        }
        let mut known = BTreeMap::new();
        let (mut phases, mut local) = (Vec::new(), BTreeSet::new());
        for phase in 0..demand.phases() {
            // Edges of a pair in one phase are one connection.
            let mut rates: BTreeMap<(u32, u32), u64> = BTreeMap::new();
            for (from, to, bps) in demand.graph(phase) {
                *rates.entry((from, to)).or_default() += bps;
            }
            let mut lines = Vec::new();
            for (workers, bps) in rates {
                let host = |worker: u32| host_of.get(worker as usize).copied().flatten();
                let (Some(from), Some(to)) = (host(workers.0), host(workers.1)) else {
                    continue;
                };
                if from == to {
                    local.insert(workers);
                    continue;
                }
                let number = *known.entry(workers).or_insert_with(|| {
                    self.lines.push(Line { member: at, workers, hosts: (from, to) });
                    self.lines.len() as u32 - 1
                });
                lines.push((number, bps));
            }
            phases.push(lines);
            if self.lines.len() > MAX_LINES {
                return Err(SetError::TooMany);
            }
        }
        self.phases.push(phases);
        self.local_pairs.push(local.len());
        Ok(())
    }

    /// A code point for each job, such that those on one trunk differ.
    fn code_points(&self) -> Result<Vec<Dscp>, SetError> {
        let mut meets: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.members.len()];
        for jobs in self.promised.values() {
            for &(own, _) in jobs {
                meets[own].extend(jobs.iter().map(|&(other, _)| other));
            }
        }
        let mut given: Vec<Option<Dscp>> = self.members.iter().map(|member| member.dscp).collect();
        for place in 0..given.len() {
            let others = meets[place].iter().filter(|&&other| other != place);
            let taken: BTreeSet<Dscp> = others.filter_map(|&other| given[other]).collect();
            let free = || Dscp::all().find(|dscp| !taken.contains(dscp));
            let none = || SetError::Dscp(Refusal::NoDscp(self.members[place].id));
            given[place] = Some(given[place].or_else(free).ok_or_else(none)?);
        }
        Ok(given.into_iter().flatten().collect())
    }

    /// The jobs.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The code point of a job, by its place.
    pub fn dscp(&self, member: usize) -> Dscp {
        self.dscps[member]
    }

    /// The connections of all jobs.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// By phase of a job: its connections, and what each has at least, in bits per second on the
    /// wire.
    pub fn phases(&self, member: usize) -> &[Vec<(u32, u64)>] {
        &self.phases[member]
    }

    /// Pairs of workers of a job that share a host.
    pub fn local_pairs(&self, member: usize) -> usize {
        self.local_pairs[member]
    }

    /// What is promised on each link of a trunk, in all.
    pub fn promised_bps(&self, trunk: u32) -> u64 {
        let jobs = self.promised.get(&trunk).into_iter().flatten();
        jobs.fold(0, |sum, &(_, bps)| sum.saturating_add(bps))
    }

    /// The plan of every directed link on which something is promised, and whether more is promised
    /// there than it has: then weights are in proportion.
    ///
    /// # Errors
    /// When a port has none.
    pub fn plans(
        &self,
        topology: &Topology,
        network: &Network,
        rules: &QueueRules,
    ) -> Result<Vec<(DirectedLink, Plan, bool)>, SetError> {
        let flows = self.flows(topology, network);
        let mut plans = Vec::new();
        for (id, link) in topology.links() {
            for side in 0..2_usize {
                let directed = 2 * id.index() as DirectedLink + side as DirectedLink;
                let trunk = network.trunk_of(directed);
                let Some(jobs) = trunk.and_then(|trunk| self.promised.get(&trunk)) else {
                    continue;
                };
                let port = rules.port(link.capacity.rate_bps);
                let guarantees = jobs.iter().map(|&(member, bps)| {
                    let flows = flows.get(&(directed, member)).copied().unwrap_or(1);
                    self.guarantee(member, bps, flows)
                });
                let guarantees: Vec<Guarantee> = guarantees.collect();
                let (plan, is_scaled) = plan(port, rules, &guarantees).map_err(|refusal| {
                    let name = |end: usize| topology.node(link.ends[end].node).name().to_owned();
                    SetError::Port { from: name(side), to: name(1 - side), refusal }
                })?;
                plans.push((directed, plan, is_scaled));
            }
        }
        Ok(plans)
    }

    fn guarantee(&self, member: usize, bps: u64, flows: u32) -> Guarantee {
        Guarantee {
            job: self.members[member].id,
            dscp: self.dscps[member],
            bps,
            flows,
            latency: Latency::Normal,
            burst_bytes: 0,
            is_contended: true,
        }
    }

    /// How many connections of a job may pass a directed link in any of its phases.
    fn flows(
        &self,
        topology: &Topology,
        network: &Network,
    ) -> BTreeMap<(DirectedLink, usize), u32> {
        let hosts = network.groups().hosts();
        let mut passed: BTreeMap<(u32, u32), Vec<DirectedLink>> = BTreeMap::new();
        let mut most = BTreeMap::new();
        for (member, phases) in self.phases.iter().enumerate() {
            for phase in phases {
                let mut own: BTreeMap<DirectedLink, u32> = BTreeMap::new();
                for &(line, _) in phase {
                    let (from, to) = self.lines[line as usize].hosts;
                    let ends = (hosts[from as usize], hosts[to as usize]);
                    let links =
                        passed.entry((from, to)).or_insert_with(|| on_the_way(topology, ends));
                    links.iter().for_each(|&link| *own.entry(link).or_default() += 1);
                }
                for (link, count) in own {
                    let all: &mut u32 = most.entry((link, member)).or_default();
                    *all = (*all).max(count);
                }
            }
        }
        most
    }
}

/// The plan of a port, and whether guarantees were scaled to what it has.
fn plan(port: Port, rules: &QueueRules, all: &[Guarantee]) -> Result<(Plan, bool), Refusal> {
    let mut parts = 1_000_u64;
    loop {
        let scaled: Vec<Guarantee> = all
            .iter()
            .map(|one| {
                let bps = u128::from(one.bps) * u128::from(parts) / 1_000;
                Guarantee { bps: u64::try_from(bps).unwrap_or(u64::MAX).max(1), ..*one }
            })
            .collect();
        match Plan::new(port, rules.scheme, &scaled) {
            Err(Refusal::Bandwidth { .. } | Refusal::Rounding { .. }) if parts > 10 => {
                parts = parts * 19 / 20;
            }
            plan => return plan.map(|plan| (plan, parts < 1_000)),
        }
    }
}

/// The binding of a job in a plan, by its code point.
pub fn binding(plan: &Plan, dscp: Dscp) -> Option<&Binding> {
    plan.bindings().iter().find(|binding| binding.guarantee.dscp == dscp)
}

/// The directed links of all shortest paths from one host to another, over switches, and over hosts
/// where switches alone do not lead there.
fn on_the_way(topology: &Topology, (from, to): (NodeId, NodeId)) -> Vec<DirectedLink> {
    let over_switches = distances(topology, from, to, false);
    let distance =
        over_switches.unwrap_or_else(|| distances(topology, from, to, true).unwrap_or_default());
    let mut links = Vec::new();
    let at = |node: NodeId| distance.get(&node.index()).copied();
    for (id, link) in topology.links() {
        for side in 0..2 {
            let (near, far) = (link.ends[side].node, link.ends[1 - side].node);
            // Distances are from the receiver.
            if let (Some(near), Some(far)) = (at(near), at(far))
                && near == far + 1
            {
                links.push(2 * id.index() as DirectedLink + side as DirectedLink);
            }
        }
    }
    links
}

/// Distances from the receiver of all nodes that are on a shortest path from the sender.
fn distances(
    topology: &Topology,
    from: NodeId,
    to: NodeId,
    over_hosts: bool,
) -> Option<BTreeMap<usize, u32>> {
    let walk = |start: NodeId| {
        let mut distance = BTreeMap::from([(start.index(), 0_u32)]);
        let mut open = VecDeque::from([start]);
        while let Some(at) = open.pop_front() {
            let is_end = at == start || topology.node(at).kind() == Kind::Switch || over_hosts;
            if !is_end {
                continue;
            }
            let next = distance[&at.index()] + 1;
            for (_, end) in topology.neighbours(at) {
                if let std::collections::btree_map::Entry::Vacant(entry) =
                    distance.entry(end.node.index())
                {
                    entry.insert(next);
                    open.push_back(end.node);
                }
            }
        }
        distance
    };
    let (there, back) = (walk(from), walk(to));
    let whole = *there.get(&to.index())?;
    let is_between = |(node, distance): (&usize, &u32)| {
        there.get(node).is_some_and(|before| before + distance == whole)
    };
    let between = back.iter().filter(|entry| is_between(*entry));
    Some(between.map(|(node, distance)| (*node, *distance)).collect())
}
