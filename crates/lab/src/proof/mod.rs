//! The proof of guarantees: an admitted set of jobs on the simulated network, all of them sending
//! at once.
//!
//! [`prove`] builds the topology in [`sim`], with a connection of the real transport for each pair
//! of workers on different hosts, gives every port the queues of its plan, and lets all jobs send
//! on all edges of a phase as fast as they can. What each pair gets in windows of 10 ms is compared
//! with the rate of its edge. Phases of a job do not overlap, by its pattern, so there are as many
//! rounds as the job with most phases has; a job with fewer goes through its own again. Then jobs
//! go through iterations, with the pauses and bytes that are asked for.
//!
//! What a run assumes is in [`Options`]. Two of its choices matter. Packets take the shortest queue
//! of equal paths (adaptive routing), since reservations count on an even split: by flow, hashes
//! collide and links carry more than was promised, and at random, queues differ so much that
//! packets which are late count as lost. And senders have [`WINDOWS`].
//!
//! | part | what it does |
//! |---|---|
//! | [`set`] | connections, promises and queues of jobs at their places |
//! | [`admit`] | jobs one after the other by a way to place |
//! | [`summary`] | the result with names, by job and link |
//! | [`picture`] | the map of links |
//! | [`violations`] | twelve tenants at one port, by schemes and numbers of queues |
//! | [`interleave`] | jobs whose exchanges take turns on a link |

pub mod admit;
pub mod interleave;
pub mod picture;
pub mod set;
pub mod summary;
#[cfg(test)]
mod tests;
pub mod violations;

use ::topology::graph::{Kind, Link, NodeId, Topology};
use controls::CongestionControl;
use parfait::ledger::JobId;
use parfait::network::Network;
use parfait::outage::Outage;
use parfait::queues::Scheme;
use parfait::spread::DirectedLink;
use roce::shaping::Limiter;
use roce::verbs::{Mtu, Reliability};
use roce::{Duration, Time};
use sim::StreamError;
use sim::buffer::BufferConfig;
use sim::cycles::{self, Program, Send};
use sim::graph::{Graph, Spread, Vertex};
use sim::link::{LinkConfig, MAX_CLASSES, Marking};
use sim::network::NetworkConfig;
use sim::queues::Queues;
use sim::tenants::{Pair, Tenants, Transport};
use sim::topology;
use thiserror::Error;

use set::{Member, QueueRules, Set, SetError};

/// Over which time a guarantee is looked at.
pub const WINDOW: Duration = Duration::from_millis(10);

/// Bytes of the largest frame of an MTU on the wire: 4,096 of payload, 28 of BTH and RETH, 4 of
/// ICRC, IPv4, UDP and Ethernet with preamble and gap.
pub const fn frame_bytes(mtu: Mtu) -> u32 {
    mtu.bytes() + 28 + 4 + 28 + 38
}

/// How a proof is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Queues of each port for jobs, 1 to 8.
    pub queues: u8,
    /// How jobs are given queues.
    pub scheme: Scheme,
    /// How senders send.
    pub transport: Transport,
    /// Which of several equal paths a packet takes.
    pub spread: Spread,
    /// Time that is not looked at, for senders to find their rates.
    pub warm_up: Duration,
    /// Windows of [`WINDOW`] that are looked at in each round.
    pub windows: u32,
    /// How long jobs go through iterations; zero for not at all.
    pub iterate: Duration,
    /// Bytes of each edge in an iteration; `None` for what its rate sends in
    /// [`Options::EDGE_TIME`].
    pub bytes_per_edge: Option<u64>,
    /// How long each job computes in an iteration.
    pub compute: Duration,
    /// The job whose iterations are wanted, while all others are backlogged; `None` for iterations
    /// of all at once.
    pub subject: Option<JobId>,
    /// Random seed.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options::new()
    }
}

impl Options {
    /// How long an exchange of an iteration takes at the rate of its edge.
    pub const EDGE_TIME: Duration = Duration::from_millis(5);

    /// The usual ones.
    pub const fn new() -> Options {
        Options {
            queues: 8,
            scheme: Scheme::Matched,
            transport: WINDOWS,
            spread: Spread::Shortest,
            warm_up: Duration::from_millis(20),
            windows: 5,
            iterate: Duration::from_millis(200),
            bytes_per_edge: None,
            compute: Duration::ZERO,
            subject: None,
            seed: 1,
        }
    }
}

/// Selective repeat and windows of 64 packets, and no congestion control: what queues of ports
/// divide, senders then have, and flows in one queue share it by their equal windows. Controls that
/// take a late packet for a lost one, or a mark for a reason to go far below a queue's weight, get
/// less than was promised where packets are spread over paths.
pub const WINDOWS: Transport = Transport {
    mtu: Mtu::M4096,
    window_packets: 64,
    reliability: Reliability::Selective,
    congestion: CongestionControl::Off,
};

/// Senders with selective repeat and a named congestion control.
pub fn transport(control: &str, line_bps: u64) -> Option<Transport> {
    let base_rtt = Duration::from_micros(30);
    let congestion = CongestionControl::named(control, line_bps, base_rtt)?;
    Some(Transport { congestion, ..WINDOWS })
}

/// Why there is no proof.
#[derive(Debug, Error)]
pub enum ProofError {
    /// The set is impossible.
    #[error(transparent)]
    Set(#[from] SetError),
    /// A connection failed.
    #[error("a connection failed: {0}")]
    Stream(#[from] StreamError),
}

/// What a pair of workers got.
#[derive(Clone, Debug, PartialEq)]
pub struct PairProof {
    /// Their places in the job's order.
    pub workers: (u32, u32),
    /// Their hosts.
    pub hosts: (u32, u32),
    /// The phase.
    pub phase: usize,
    /// What it is to have, in bits per second on the wire.
    pub guaranteed_bps: u64,
    /// What it got on average.
    pub measured_bps: u64,
    /// In the worst window.
    pub least_bps: u64,
    /// Windows in which it got less, by more than two frames, and all.
    pub below: u32,
    /// All windows.
    pub windows: u32,
}

impl PairProof {
    /// What it got of its guarantee.
    pub fn ratio(&self) -> f64 {
        self.measured_bps as f64 / self.guaranteed_bps.max(1) as f64
    }
}

/// What came out for a job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobProof {
    /// Its number.
    pub id: JobId,
    /// What was asked for.
    pub request: String,
    /// The code point of its packets.
    pub dscp: u8,
    /// Pairs of workers on different hosts, by phase.
    pub pairs: Vec<PairProof>,
    /// Pairs that share a host: they need no network.
    pub local_pairs: usize,
    /// How long its iterations took, sorted; those of the first tenth of the time are left out.
    pub iterations: Vec<Duration>,
    /// How long an iteration takes if every edge has its guarantee and no more.
    pub promised: Duration,
}

impl JobProof {
    /// The pair that got least of its guarantee.
    pub fn worst(&self) -> Option<&PairProof> {
        self.pairs.iter().min_by(|a, b| a.ratio().total_cmp(&b.ratio()))
    }

    /// The share of windows in which a pair got less than its guarantee.
    pub fn below(&self) -> f64 {
        let sum =
            |of: fn(&PairProof) -> u32| self.pairs.iter().map(|pair| u64::from(of(pair))).sum();
        let (below, windows): (u64, u64) = (sum(|pair| pair.below), sum(|pair| pair.windows));
        below as f64 / windows.max(1) as f64
    }

    /// The time within which so many of a hundred iterations end.
    pub fn percentile(&self, percent: usize) -> Option<Duration> {
        percentile(&self.iterations, percent)
    }
}

/// The time within which so many of a hundred sorted spans are.
pub fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get((last * percent).div_ceil(100)).copied()
}

/// A directed link in the proof.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkProof {
    /// The link.
    pub link: DirectedLink,
    /// What it can carry.
    pub capacity_bps: u64,
    /// What is promised on it.
    pub promised_bps: u64,
    /// What it carried while all were backlogged: the most of all rounds.
    pub used_bps: u64,
}

/// The result.
#[derive(Clone, Debug, PartialEq)]
pub struct Proof {
    /// By job.
    pub jobs: Vec<JobProof>,
    /// By directed link.
    pub links: Vec<LinkProof>,
    /// Ports whose jobs are promised more than may be promised there.
    pub overbooked_ports: usize,
    /// Jobs that their ports' plans do not assure, by job and port.
    pub not_assured: usize,
    /// Packets that were dropped.
    pub dropped: u64,
    /// Events of the simulation.
    pub events: u64,
}

impl Proof {
    /// The pair of all jobs that got least of its guarantee, and its job.
    pub fn worst(&self) -> Option<(&JobProof, &PairProof)> {
        let worst = self.jobs.iter().filter_map(|job| Some((job, job.worst()?)));
        worst.min_by(|a, b| a.1.ratio().total_cmp(&b.1.ratio()))
    }
}

/// Runs the jobs of a set at their places; see the module's text. Links have the capacities of the
/// topology, and what is down carries nothing: the network is the one of that outage.
///
/// # Errors
/// When the set is impossible, or a connection fails.
pub fn prove(
    topology: &Topology,
    outage: &Outage,
    network: &Network,
    members: &[Member],
    options: &Options,
) -> Result<Proof, ProofError> {
    let set = Set::new(network, members)?;
    let rules = QueueRules {
        scheme: options.scheme,
        ..QueueRules::new(options.queues, frame_bytes(options.transport.mtu))
    };
    let left = outage.left(topology);
    let plans = set.plans(&left, network, &rules)?;
    // A host that is cut off makes no other forward.
    let hosts_forward = topology::separate_hosts(topology).is_some();
    let site = Site {
        topology: &left,
        hosts_forward,
        buffer: buffer(topology),
        network,
        set: &set,
        plans: &plans,
        options,
    };
    let mut jobs = site.empty();
    let mut used = vec![0_u64; site.directed_links()];
    let (mut dropped, mut events) = (0, 0);
    let rounds = (0..members.len()).map(|at| set.phases(at).len()).max().unwrap_or(0);
    for round in 0..rounds {
        let mut tenants = site.round(round, &mut jobs, &mut used)?;
        dropped += tenants.network().queue_drops();
        events += tenants.network().events_handled();
    }
    if options.iterate > Duration::ZERO {
        site.iterate(&mut jobs)?;
    }
    let not_assured = plans.iter().flat_map(|(_, plan, _)| plan.bindings());
    Ok(Proof {
        jobs,
        links: site.links(&used),
        overbooked_ports: site.overbooked(),
        not_assured: not_assured.filter(|binding| !binding.is_assured()).count(),
        dropped,
        events,
    })
}

/// The graph of a topology, each of whose links is like this and has its own rate and delay. Hosts
/// that have to forward are behind a switch of their own.
fn graph(topology: &Topology, hosts_forward: bool, spread: Spread) -> Graph {
    let config = |link: &Link| {
        let rate = link.capacity.rate_bps;
        let delay = Duration::from_nanos(link.capacity.delay_ns);
        let marking = Some(Marking::dctcp(rate));
        LinkConfig { marking, classes: MAX_CLASSES as u8, ..LinkConfig::new(rate, delay) }
    };
    let graph = match hosts_forward {
        true => topology::relaying(topology, config),
        false => topology::cables(topology, config),
    };
    graph.spread(spread)
}

/// The buffer of a switch: 1 MiB for each port of the one with most, shared, and pauses before it
/// overflows.
fn buffer(topology: &Topology) -> BufferConfig {
    let ports = topology.switches().map(|node| topology.node(node).links().count() as u64);
    BufferConfig::lossless(ports.max().unwrap_or(1) << 20)
}

/// Queues as a plan says; jobs that are not bound share one that goes first.
pub fn queues(plan: &parfait::queues::Plan) -> Queues {
    let port = plan.port();
    // Switches pause senders before their shared buffer is full, and hosts queue no more than
    // windows.
    let queues = Queues::new(plan.weights(), port.quantum_bytes, u64::MAX);
    plan.bindings()
        .iter()
        .fold(queues, |queues, binding| queues.bind(binding.guarantee.dscp.value(), binding.queue))
}

/// A set on its network.
struct Site<'a> {
    /// What works of it.
    topology: &'a Topology,
    hosts_forward: bool,
    buffer: BufferConfig,
    network: &'a Network,
    set: &'a Set,
    plans: &'a [(DirectedLink, parfait::queues::Plan, bool)],
    options: &'a Options,
}

impl Site<'_> {
    /// Jobs without results.
    fn empty(&self) -> Vec<JobProof> {
        let job = |(at, member): (usize, &Member)| JobProof {
            id: member.id,
            request: member.job.to_string(),
            dscp: self.set.dscp(at).value(),
            pairs: Vec::new(),
            local_pairs: self.set.local_pairs(at),
            iterations: Vec::new(),
            promised: self.promised(at),
        };
        self.set.members().iter().enumerate().map(job).collect()
    }

    fn directed_links(&self) -> usize {
        self.topology.links().map(|(id, _)| 2 * id.index() + 2).max().unwrap_or(0)
    }

    /// The numbers of hosts of the network are those of nodes in its topology's order in the graph.
    fn node(&self, host: u32) -> u32 {
        let id = self.network.groups().hosts()[host as usize];
        self.number(id)
    }

    fn number(&self, id: NodeId) -> u32 {
        let kind = self.topology.node(id).kind();
        let before = self.topology.nodes().filter(|(_, node)| node.kind() == kind);
        before.take_while(|(other, _)| *other != id).count() as u32
    }

    fn vertex(&self, id: NodeId) -> Vertex {
        match self.topology.node(id).kind() {
            Kind::Host => Vertex::Node(self.number(id)),
            Kind::Switch => Vertex::Switch(self.number(id)),
        }
    }

    /// The ends of a directed link in the graph, sender first. Hosts with several ports that
    /// forward are behind a switch.
    fn ends(&self, directed: DirectedLink, relays: &[NodeId]) -> Option<(Vertex, Vertex)> {
        let switches = self.topology.switches().count();
        let vertex = |id: NodeId| match relays.binary_search(&id) {
            Ok(place) => Vertex::Switch((switches + place) as u32),
            Err(_) => self.vertex(id),
        };
        let (_, link) =
            self.topology.links().find(|(id, _)| id.index() == directed as usize / 2)?;
        let side = directed as usize % 2;
        Some((vertex(link.ends[side].node), vertex(link.ends[1 - side].node)))
    }

    /// The network with all connections and the queues of all ports.
    fn tenants(&self) -> Result<Tenants, ProofError> {
        let graph = graph(self.topology, self.hosts_forward, self.options.spread);
        let config = NetworkConfig {
            buffer: Some(self.buffer),
            is_sealed: false,
            ..NetworkConfig::new(graph, self.options.seed)
        };
        let mut tenants = Tenants::new(&config, self.options.transport);
        let relays = match self.hosts_forward {
            true => topology::relays(self.topology),
            false => Vec::new(),
        };
        for (directed, plan, _) in self.plans {
            if let Some((from, to)) = self.ends(*directed, &relays) {
                tenants.network().set_queues(from, to, &queues(plan));
                self.pace(&mut tenants, from, plan);
            }
        }
        for line in self.set.lines() {
            let (from, to) = (self.node(line.hosts.0), self.node(line.hosts.1));
            let dscp = self.set.dscp(line.member).value();
            tenants.connect(Pair { from, to, dscp })?;
        }
        Ok(tenants)
    }

    /// Hosts pace jobs as the plans of their ports say.
    fn pace(&self, tenants: &mut Tenants, from: Vertex, plan: &parfait::queues::Plan) {
        let Vertex::Node(node) = from else { return };
        for own in plan.bindings() {
            if let Some(bps) = own.rate_limit_bps {
                let burst = 4 * u64::from(frame_bytes(self.options.transport.mtu));
                let limiter = Limiter::exact(bps, burst);
                tenants.network().set_rate_limit(node, own.guarantee.dscp.value(), Some(limiter));
            }
        }
    }

    /// All jobs backlogged in a phase of theirs.
    fn round(
        &self,
        round: usize,
        jobs: &mut [JobProof],
        used: &mut [u64],
    ) -> Result<Tenants, ProofError> {
        let mut tenants = self.tenants()?;
        let mut watched = Vec::new();
        for (member, job) in jobs.iter_mut().enumerate() {
            let phases = self.set.phases(member);
            let phase = round % phases.len().max(1);
            for &(line, bps) in phases.get(phase).into_iter().flatten() {
                tenants.set_backlogged(line, true)?;
                // Phases that come again are looked at once.
                if round < phases.len() {
                    let entry = self.set.lines()[line as usize];
                    job.pairs.push(PairProof {
                        workers: entry.workers,
                        hosts: entry.hosts,
                        phase,
                        guaranteed_bps: bps,
                        measured_bps: 0,
                        least_bps: u64::MAX,
                        below: 0,
                        windows: 0,
                    });
                    watched.push((line, member, job.pairs.len() - 1));
                }
            }
        }
        tenants.run_until(Time::ZERO + self.options.warm_up)?;
        tenants.network().restart_stats();
        let begin: Vec<u64> = watched.iter().map(|&(line, ..)| tenants.arrived(line)).collect();
        let mut before = begin.clone();
        for _ in 0..self.options.windows {
            let until = tenants.now() + WINDOW;
            tenants.run_until(until)?;
            for (&(line, member, place), before) in watched.iter().zip(&mut before) {
                let arrived = tenants.arrived(line);
                let pair = &mut jobs[member].pairs[place];
                judge(pair, tenants.wire_bytes(arrived - *before), self.options);
                *before = arrived;
            }
        }
        let span = WINDOW * u64::from(self.options.windows);
        for (&(line, member, place), begin) in watched.iter().zip(&begin) {
            let bytes = tenants.wire_bytes(tenants.arrived(line) - begin);
            jobs[member].pairs[place].measured_bps = per_second(bytes, span);
        }
        for (report, used) in tenants.network().link_reports().iter().zip(self.used_by(used)) {
            *used = (*used).max(report.stats.rate_bps());
        }
        Ok(tenants)
    }

    /// The use of directed links in the order of the graph's: a cable's links one after the other.
    fn used_by<'u>(&self, used: &'u mut [u64]) -> impl Iterator<Item = &'u mut u64> {
        let numbers: Vec<usize> = self.topology.links().map(|(id, _)| id.index()).collect();
        let is_there = move |place: usize| numbers.binary_search(&(place / 2)).is_ok();
        used.iter_mut().enumerate().filter(move |(place, _)| is_there(*place)).map(|(_, used)| used)
    }

    /// Jobs go through iterations.
    fn iterate(&self, jobs: &mut [JobProof]) -> Result<(), ProofError> {
        let mut tenants = self.tenants()?;
        let mut programs = Vec::new();
        for (member, job) in jobs.iter().enumerate() {
            let is_run = self.options.subject.is_none_or(|subject| subject == job.id);
            let phases = self.set.phases(member);
            if !is_run {
                for &(line, _) in phases.iter().flatten() {
                    tenants.set_backlogged(line, true)?;
                }
            }
            programs.push(self.program(&tenants, if is_run { phases } else { &[] }));
        }
        let begin = Time::ZERO + self.options.iterate;
        let spans = cycles::run(&mut tenants, programs, begin)?;
        for (job, spans) in jobs.iter_mut().zip(spans) {
            job.iterations = spans.into_iter().skip(1).collect();
            job.iterations.sort_unstable();
        }
        Ok(())
    }

    fn program(&self, tenants: &Tenants, phases: &[Vec<(u32, u64)>]) -> Program {
        let sends = |phase: &Vec<(u32, u64)>| {
            let send = |&(line, bps): &(u32, u64)| Send { line, bytes: self.edge_bytes(bps) };
            phase.iter().map(send).collect()
        };
        Program {
            phases: phases.iter().map(sends).collect(),
            compute: self.options.compute,
            start: tenants.now(),
            grid: None,
        }
    }

    /// Payload of an edge in an iteration.
    fn edge_bytes(&self, bps: u64) -> u64 {
        let of_rate = u128::from(bps) * u128::from(Options::EDGE_TIME.as_nanos()) / 8_000_000_000;
        self.options.bytes_per_edge.unwrap_or(of_rate as u64).max(1)
    }

    /// How long an iteration of a job takes with its guarantees.
    fn promised(&self, member: usize) -> Duration {
        let mtu = u128::from(self.options.transport.mtu.bytes());
        let frame = u128::from(frame_bytes(self.options.transport.mtu));
        let phase = |phase: &Vec<(u32, u64)>| {
            let nanos = phase.iter().map(|&(_, bps)| {
                let bits = 8 * u128::from(self.edge_bytes(bps)) * frame / mtu;
                (bits * 1_000_000_000 / u128::from(bps.max(1))) as u64
            });
            nanos.max().unwrap_or(0)
        };
        let exchanges: u64 = self.set.phases(member).iter().map(phase).sum();
        self.options.compute + Duration::from_nanos(exchanges)
    }

    fn links(&self, used: &[u64]) -> Vec<LinkProof> {
        let mut links = Vec::new();
        for (id, link) in self.topology.links() {
            for directed in [2 * id.index(), 2 * id.index() + 1] {
                let trunk = self.network.trunk_of(directed as DirectedLink);
                links.push(LinkProof {
                    link: directed as DirectedLink,
                    capacity_bps: link.capacity.rate_bps,
                    promised_bps: trunk.map_or(0, |trunk| self.set.promised_bps(trunk)),
                    used_bps: used[directed],
                });
            }
        }
        links
    }

    fn overbooked(&self) -> usize {
        let trunks = self.plans.iter().filter_map(|(link, ..)| self.network.trunk_of(*link));
        trunks
            .filter(|&trunk| self.set.promised_bps(trunk) > self.network.capacity_bps(trunk))
            .count()
    }
}

/// Adds a window in which so many bytes on the wire arrived.
fn judge(pair: &mut PairProof, bytes: u64, options: &Options) {
    let owed = u128::from(pair.guaranteed_bps) * u128::from(WINDOW.as_nanos()) / 8_000_000_000;
    let frames = 2 * u128::from(frame_bytes(options.transport.mtu));
    pair.windows += 1;
    pair.below += u32::from(u128::from(bytes) + frames < owed);
    pair.least_bps = pair.least_bps.min(per_second(bytes, WINDOW));
}

fn per_second(bytes: u64, span: Duration) -> u64 {
    let bits = u128::from(bytes) * 8_000_000_000 / u128::from(span.as_nanos().max(1));
    u64::try_from(bits).unwrap_or(u64::MAX)
}
