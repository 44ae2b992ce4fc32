//! What a pattern can put across a link, in closed form, and what older abstractions would reserve
//! there.
//!
//! A link parts the workers of a job in two: those behind it and those before it. What can cross
//! it, per direction, is the sum of the rates of the edges from one side to the other, and of
//! phases that do not overlap the largest sum counts. [`Demand::cut`] counts those edges by runs of
//! ranks, so its cost grows with the square of the number of runs and not with the number of
//! workers; placements give a host, and what lies below a switch, one run.
//!
//! The same type holds two older abstractions, so that they can be compared on the same cut:
//!
//! - [`Abstraction::Tag`], the tenant application graph (Lee et al., "Application-Driven Bandwidth
//!   Guarantees in Datacenters", SIGCOMM 2014): components whose workers are alike, and edges
//!   between components with a rate that each worker sends at most and one that each receives at
//!   most. An edge needs, across a cut, the smaller of what its senders on one side send and its
//!   receivers on the other side receive.
//! - [`Abstraction::Hose`], the virtual cluster (Ballani et al., "Towards Predictable Datacenter
//!   Networks", SIGCOMM 2011): each worker has one rate, and a cut needs the smaller of the sums of
//!   both sides. Workers of one component have the same rate, those of different components need
//!   not, which is less than the single rate of the publication.
//!
//! Neither knows phases. Here both have them, as if a tenant described each phase by itself: they
//! reserve the largest of all phases too, so what a cut gains by `Parfait` is gained by knowing the
//! edges. On every cut Parfait needs at most what TAG needs, and TAG at most what a hose needs.

use alloc::string::ToString;
use alloc::vec::Vec;
use core::fmt;

use crate::family::{Axis, Family, Layout, Roles};
use crate::pattern::{Pattern, PatternError};
use crate::runs::{Run, congruent};

/// What a reservation knows of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Abstraction {
    /// Every edge of the pattern.
    Parfait,
    /// Components, and what their workers send and receive at most.
    Tag,
    /// What each worker sends or receives at most.
    Hose,
}

impl Abstraction {
    /// All, from the one that reserves the least.
    pub const ALL: [Abstraction; 3] = [Abstraction::Parfait, Abstraction::Tag, Abstraction::Hose];
}

impl fmt::Display for Abstraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Abstraction::Parfait => "parfait",
            Abstraction::Tag => "tag",
            Abstraction::Hose => "hose",
        })
    }
}

/// Bits per second across a link, in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// From the workers of the runs to the others.
    pub out_bps: u64,
    /// From the others to the workers of the runs.
    pub in_bps: u64,
}

impl Cut {
    /// The larger one, of each direction.
    pub fn max(self, other: Cut) -> Cut {
        Cut { out_bps: self.out_bps.max(other.out_bps), in_bps: self.in_bps.max(other.in_bps) }
    }

    /// Whether nothing crosses.
    pub fn is_zero(self) -> bool {
        self == Cut::default()
    }
}

/// Workers of a job that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Component {
    /// Ranks that follow each other.
    Span(Run),
    /// Those with one place along an axis.
    Place(Axis, u32),
    /// The first of each group.
    Leaders(u32),
    /// All others of the groups.
    Members(u32),
    Clients(Roles),
    Servers(Roles),
}

impl Component {
    /// How many of the run are in the component.
    fn count(self, run: Run) -> u64 {
        match self {
            Component::Span(span) => u64::from(run.and(span).len()),
            Component::Place(axis, place) => axis.at_place(run, place),
            Component::Leaders(group) => congruent(run, 0, group),
            Component::Members(group) => u64::from(run.len()) - congruent(run, 0, group),
            Component::Clients(roles) => roles.clients(run),
            Component::Servers(roles) => roles.servers(run),
        }
    }
}

/// An edge of a tenant application graph.
#[derive(Clone, Copy, Debug)]
struct TagEdge {
    from: usize,
    to: usize,
    /// Most that a worker of `from` sends.
    send_bps: u64,
    /// Most that a worker of `to` receives.
    receive_bps: u64,
}

/// Edges of a family at one rate.
#[derive(Clone, Copy, Debug)]
struct Flow {
    family: Family,
    /// Whether the edges lead the other way.
    is_reversed: bool,
    rate_bps: u64,
}

impl Flow {
    fn new(family: Family, rate_bps: u64) -> Flow {
        Flow { family, is_reversed: false, rate_bps }
    }

    fn reversed(self) -> Flow {
        Flow { is_reversed: !self.is_reversed, ..self }
    }

    fn count(&self, from: Run, to: Run) -> u64 {
        if self.is_reversed { self.family.count(to, from) } else { self.family.count(from, to) }
    }
}

/// Edges that may carry traffic at the same time.
#[derive(Clone, Debug, Default)]
struct Phase {
    flows: Vec<Flow>,
    tag: Vec<TagEdge>,
}

/// The order in which workers of a pattern are placed: neighbours in this order share hosts and
/// switches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// By rank.
    #[default]
    Ranks,
    /// Columns of a torus before rows, stages of a pipeline before replicas.
    Across,
    /// Parameter servers evenly among the workers, so that each host has its part of both.
    Mixed,
    /// Parameter servers before the workers.
    ServersFirst,
}

impl Order {
    /// The orders that differ for a pattern.
    pub fn of(pattern: &Pattern) -> &'static [Order] {
        match pattern {
            Pattern::Torus { .. } | Pattern::Parallel { .. } => &[Order::Ranks, Order::Across],
            Pattern::ParameterServer { .. } => &[Order::Ranks, Order::Mixed, Order::ServersFirst],
            _ => &[Order::Ranks],
        }
    }

    /// The rank of the worker at a place of this order.
    pub fn rank(self, pattern: &Pattern, place: u32) -> u32 {
        match *pattern {
            Pattern::Torus { columns, rows, .. } if self == Order::Across => {
                place / rows + place % rows * columns
            }
            Pattern::Parallel { tensor, data, pipeline, .. } if self == Order::Across => {
                let (ring, rest) = (place % tensor, place / tensor);
                let (stage, replica) = (rest % pipeline, rest / pipeline);
                ring + tensor * (replica + data * stage)
            }
            Pattern::ParameterServer { workers, servers, .. } => {
                let roles = Roles { clients: workers, servers, layout: self.layout() };
                let before = Run::new(0, place);
                match roles.is_server(place) {
                    true => workers + roles.servers(before) as u32,
                    false => roles.clients(before) as u32,
                }
            }
            _ => place,
        }
    }

    fn layout(self) -> Layout {
        match self {
            Order::Ranks | Order::Across => Layout::Last,
            Order::Mixed => Layout::Even,
            Order::ServersFirst => Layout::First,
        }
    }
}

/// See the module's text. Ranks are those of the order in which workers are placed.
#[derive(Clone, Debug)]
pub struct Demand {
    workers: u32,
    phases: Vec<Phase>,
    components: Vec<Component>,
    /// The hose of each component's workers.
    hose_bps: Vec<u64>,
}

impl Demand {
    /// That of a pattern whose workers are placed by rank.
    ///
    /// # Errors
    /// When a size or rate is 0, there are too many workers, or all rates together exceed 64 bits.
    pub fn of(pattern: &Pattern) -> Result<Demand, PatternError> {
        Demand::in_order(pattern, Order::Ranks)
    }

    /// The same for another order.
    ///
    /// # Errors
    /// As of [`of`](Demand::of).
    pub fn in_order(pattern: &Pattern, order: Order) -> Result<Demand, PatternError> {
        let workers = pattern.workers()?;
        let (components, phases) = translated(pattern, order, workers);
        let mut demand = Demand { workers, phases, components, hose_bps: Vec::new() };
        let overflow = || PatternError::Overflow(pattern.to_string());
        demand.hose_bps = demand.hoses().ok_or_else(overflow)?;
        demand.check_sums().ok_or_else(overflow)?;
        Ok(demand)
    }

    /// How many workers there are, parameter servers among them.
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// How many phases there are.
    pub fn phases(&self) -> usize {
        self.phases.len()
    }

    /// The most that a worker of each component sends or receives in any phase.
    fn hoses(&self) -> Option<Vec<u64>> {
        let mut hoses = alloc::vec![0; self.components.len()];
        for phase in &self.phases {
            let mut sums = alloc::vec![(0_u64, 0_u64); hoses.len()];
            for edge in &phase.tag {
                sums[edge.from].0 = sums[edge.from].0.checked_add(edge.send_bps)?;
                sums[edge.to].1 = sums[edge.to].1.checked_add(edge.receive_bps)?;
            }
            for (hose, (send, receive)) in hoses.iter_mut().zip(sums) {
                *hose = send.max(receive).max(*hose);
            }
        }
        Some(hoses)
    }

    /// Whether no sum over workers or edges can exceed 64 bits. Every other sum is part of one of
    /// these.
    fn check_sums(&self) -> Option<()> {
        let all = self.all();
        for phase in &self.phases {
            phase.flows.iter().try_fold(0_u64, |sum, flow| {
                sum.checked_add(flow.count(all, all).checked_mul(flow.rate_bps)?)
            })?;
        }
        // What TAG sends and receives is at most the hoses of the workers concerned.
        self.components.iter().zip(&self.hose_bps).try_fold(0_u64, |sum, (component, hose)| {
            sum.checked_add(component.count(all).checked_mul(*hose)?)
        })?;
        Some(())
    }

    fn all(&self) -> Run {
        Run::new(0, self.workers)
    }

    /// The demand graph of a phase, by definition: edges from one rank to another, each with its
    /// rate in bits per second. One entry per edge, so it is for tests and pictures of small jobs.
    pub fn graph(&self, phase: usize) -> Vec<(u32, u32, u64)> {
        let mut edges = Vec::new();
        for flow in self.phases.get(phase).map_or(&[][..], |phase| &phase.flows) {
            for rank in 0..self.workers {
                edges.extend(flow.family.targets(rank).into_iter().map(
                    |to| match flow.is_reversed {
                        false => (rank, to, flow.rate_bps),
                        true => (to, rank, flow.rate_bps),
                    },
                ));
            }
        }
        edges
    }

    /// Bits per second from the workers of one run to those of another, in one phase; 0 if there is
    /// no such phase.
    pub fn between(&self, phase: usize, from: Run, to: Run) -> u64 {
        let flows = self.phases.get(phase).map_or(&[][..], |phase| &phase.flows);
        flows.iter().map(|flow| flow.count(from, to) * flow.rate_bps).sum()
    }

    /// The most that the pattern can put across a link that parts the workers of `runs` from the
    /// others. The runs do not overlap, and have ranks of the job only.
    pub fn cut(&self, runs: &[Run]) -> Cut {
        let across = |phase: &Phase| {
            let flows = phase.flows.iter().map(|flow| self.flow_across(flow, runs));
            flows.fold(Cut::default(), |sum, cut| Cut {
                out_bps: sum.out_bps + cut.out_bps,
                in_bps: sum.in_bps + cut.in_bps,
            })
        };
        self.phases.iter().map(across).fold(Cut::default(), Cut::max)
    }

    fn flow_across(&self, flow: &Flow, runs: &[Run]) -> Cut {
        let (mut leaving, mut arriving, mut within) = (0, 0, 0);
        for run in runs {
            leaving += flow.count(*run, self.all());
            arriving += flow.count(self.all(), *run);
            within += runs.iter().map(|other| flow.count(*run, *other)).sum::<u64>();
        }
        Cut {
            out_bps: (leaving - within) * flow.rate_bps,
            in_bps: (arriving - within) * flow.rate_bps,
        }
    }

    /// What is reserved, by an abstraction, on a link that parts the workers of `runs` from the
    /// others.
    pub fn reservation(&self, abstraction: Abstraction, runs: &[Run]) -> Cut {
        match abstraction {
            Abstraction::Parfait => self.cut(runs),
            Abstraction::Tag => {
                let across = |phase: &Phase| self.tag_across(phase, runs);
                self.phases.iter().map(across).fold(Cut::default(), Cut::max)
            }
            Abstraction::Hose => {
                let (inside, outside) = self.hose_sums(runs);
                let rate = inside.min(outside);
                Cut { out_bps: rate, in_bps: rate }
            }
        }
    }

    /// Workers of a component in the runs, and all others of it.
    fn sides(&self, component: usize, runs: &[Run]) -> (u64, u64) {
        let component = self.components[component];
        let inside = runs.iter().map(|run| component.count(*run)).sum();
        (inside, component.count(self.all()) - inside)
    }

    fn tag_across(&self, phase: &Phase, runs: &[Run]) -> Cut {
        let mut cut = Cut::default();
        for edge in &phase.tag {
            let ((from_in, from_out), (to_in, to_out)) =
                (self.sides(edge.from, runs), self.sides(edge.to, runs));
            cut.out_bps += (from_in * edge.send_bps).min(to_out * edge.receive_bps);
            cut.in_bps += (from_out * edge.send_bps).min(to_in * edge.receive_bps);
        }
        cut
    }

    fn hose_sums(&self, runs: &[Run]) -> (u64, u64) {
        let sides = (0..self.components.len()).map(|component| self.sides(component, runs));
        sides.zip(&self.hose_bps).fold((0, 0), |sums, ((inside, outside), hose)| {
            (sums.0 + inside * hose, sums.1 + outside * hose)
        })
    }

    /// How many groups of workers TAG tells apart.
    pub fn components(&self) -> usize {
        self.components.len()
    }

    /// Workers of a run in a component.
    pub(crate) fn in_component(&self, component: usize, run: Run) -> u64 {
        self.components[component].count(run)
    }

    /// Edges of the tenant application graph of a phase: components, and what each worker sends and
    /// receives at most.
    pub(crate) fn tag_edges(
        &self,
        phase: usize,
    ) -> impl Iterator<Item = (usize, usize, u64, u64)> + '_ {
        let edges = self.phases[phase].tag.iter();
        edges.map(|edge| (edge.from, edge.to, edge.send_bps, edge.receive_bps))
    }

    /// The sum of the hoses of a run's workers.
    pub(crate) fn hose_of(&self, run: Run) -> u64 {
        let hoses = self.components.iter().zip(&self.hose_bps);
        hoses.map(|(component, hose)| component.count(run) * hose).sum()
    }
}

/// The components of a pattern and its phases: its edges, and its translation to a tenant
/// application graph. A hose follows from that: the most that a worker of a component sends or
/// receives in any phase.
///
/// | pattern | components | edges of TAG |
/// |---|---|---|
/// | ring | all workers | to itself, R |
/// | tree | all workers | to itself, sending R and receiving 2·R, as a parent of two does; then the other way |
/// | torus | all workers | to itself, R; then S |
/// | hierarchical | leaders, members | members send R, leaders receive (M-1)·R; leaders to leaders, S; leaders to members |
/// | parameter server | workers, servers | workers send P·R, servers receive W·R; and back |
/// | mesh | all workers | to itself, (N-1)·R |
/// | pipeline | each stage | to the next, R; and back |
/// | parallel | each stage | to itself, R of tensor; to the next, U, and back; then to itself, S |
fn translated(pattern: &Pattern, order: Order, workers: u32) -> (Vec<Component>, Vec<Phase>) {
    let all = Axis { stride: 1, length: workers };
    let everyone = || alloc::vec![Component::Span(Run::new(0, workers))];
    match *pattern {
        Pattern::Ring { rate_bps, .. } => (everyone(), alloc::vec![ring_phase(all, rate_bps)]),
        Pattern::Tree { rate_bps, .. } => (everyone(), tree_phases(workers, rate_bps)),
        Pattern::Torus { columns, rows, row_bps, column_bps } => {
            let [row, column] = match order {
                Order::Across => {
                    let [column, row] = axes([rows, columns]);
                    [row, column]
                }
                _ => axes([columns, rows]),
            };
            (everyone(), alloc::vec![ring_phase(row, row_bps), ring_phase(column, column_bps)])
        }
        Pattern::Hierarchical { groups, group, local_bps, leader_bps } => {
            let components = alloc::vec![Component::Leaders(group), Component::Members(group)];
            (components, hierarchical_phases(groups, group, local_bps, leader_bps))
        }
        Pattern::ParameterServer { workers: clients, servers, rate_bps, is_async } => {
            let roles = Roles { clients, servers, layout: order.layout() };
            let components = alloc::vec![Component::Clients(roles), Component::Servers(roles)];
            (components, server_phases(roles, rate_bps, is_async))
        }
        Pattern::Mesh { rate_bps, .. } => {
            let rate = rate_bps.saturating_mul(u64::from(workers - 1));
            let phase = Phase {
                flows: alloc::vec![Flow::new(Family::Mesh(all), rate_bps)],
                tag: alloc::vec![tag(0, 0, rate, rate)],
            };
            (everyone(), alloc::vec![phase])
        }
        Pattern::Pipeline { rate_bps, .. } => {
            let phase = pipeline_phase(all, rate_bps);
            (stages(all), alloc::vec![phase])
        }
        Pattern::Parallel { tensor, data, pipeline, tensor_bps, data_bps, pipeline_bps } => {
            let [tensor, data, pipeline] = match order {
                Order::Across => {
                    let [tensor, pipeline, data] = axes([tensor, pipeline, data]);
                    [tensor, data, pipeline]
                }
                _ => axes([tensor, data, pipeline]),
            };
            let rings = |axis: Axis, rate| {
                let loops = |stage| loop_of(stage, axis, rate);
                let tag = (0..pipeline.length as usize).map(loops).collect();
                Phase { flows: alloc::vec![Flow::new(Family::Ring(axis), rate)], tag }
            };
            let mut compute = pipeline_phase(pipeline, pipeline_bps);
            let tensors = rings(tensor, tensor_bps);
            compute.flows.extend(tensors.flows);
            compute.tag.extend(tensors.tag);
            (stages(pipeline), alloc::vec![compute, rings(data, data_bps)])
        }
    }
}

/// Axes whose digits come in this order.
fn axes<const N: usize>(lengths: [u32; N]) -> [Axis; N] {
    let mut stride = 1;
    lengths.map(|length| {
        let axis = Axis { stride, length };
        stride *= length;
        axis
    })
}

fn tag(from: usize, to: usize, send_bps: u64, receive_bps: u64) -> TagEdge {
    TagEdge { from, to, send_bps, receive_bps }
}

/// A component's edge to itself for rings along an axis; a ring of one worker sends nothing.
fn loop_of(component: usize, axis: Axis, rate_bps: u64) -> TagEdge {
    let rate = if axis.length < 2 { 0 } else { rate_bps };
    tag(component, component, rate, rate)
}

/// Rings along an axis, of workers that are all alike.
fn ring_phase(axis: Axis, rate_bps: u64) -> Phase {
    Phase {
        flows: alloc::vec![Flow::new(Family::Ring(axis), rate_bps)],
        tag: alloc::vec![loop_of(0, axis, rate_bps)],
    }
}

fn tree_phases(workers: u32, rate_bps: u64) -> Vec<Phase> {
    // Rank 0 has one child, and the smallest tree with a parent of two has four workers.
    let children = if workers < 4 { 1 } else { 2 };
    let (one, some) = match workers {
        1 => (0, 0),
        _ => (rate_bps, rate_bps.saturating_mul(children)),
    };
    let up = Flow::new(Family::Tree { workers }, rate_bps);
    alloc::vec![
        Phase { flows: alloc::vec![up], tag: alloc::vec![tag(0, 0, one, some)] },
        Phase { flows: alloc::vec![up.reversed()], tag: alloc::vec![tag(0, 0, some, one)] },
    ]
}

fn hierarchical_phases(groups: u32, group: u32, local_bps: u64, leader_bps: u64) -> Vec<Phase> {
    const LEADERS: usize = 0;
    const MEMBERS: usize = 1;
    let all_members = local_bps.saturating_mul(u64::from(group - 1));
    let up = Flow::new(Family::Star { group }, local_bps);
    let leaders = Axis { stride: group, length: groups };
    alloc::vec![
        Phase {
            flows: alloc::vec![up],
            tag: alloc::vec![tag(MEMBERS, LEADERS, local_bps, all_members)],
        },
        Phase {
            flows: alloc::vec![Flow::new(Family::LeaderRing { group, groups }, leader_bps)],
            tag: alloc::vec![loop_of(LEADERS, leaders, leader_bps)],
        },
        Phase {
            flows: alloc::vec![up.reversed()],
            tag: alloc::vec![tag(LEADERS, MEMBERS, all_members, local_bps)],
        },
    ]
}

fn server_phases(roles: Roles, rate_bps: u64, is_async: bool) -> Vec<Phase> {
    let of_client = rate_bps.saturating_mul(u64::from(roles.servers));
    let of_server = rate_bps.saturating_mul(u64::from(roles.clients));
    let push = Flow::new(Family::Bipartite(roles), rate_bps);
    let to_servers = tag(0, 1, of_client, of_server);
    let to_clients = tag(1, 0, of_server, of_client);
    match is_async {
        true => alloc::vec![Phase {
            flows: alloc::vec![push, push.reversed()],
            tag: alloc::vec![to_servers, to_clients],
        }],
        false => alloc::vec![
            Phase { flows: alloc::vec![push], tag: alloc::vec![to_servers] },
            Phase { flows: alloc::vec![push.reversed()], tag: alloc::vec![to_clients] },
        ],
    }
}

/// A component for each stage.
fn stages(axis: Axis) -> Vec<Component> {
    (0..axis.length).map(|stage| Component::Place(axis, stage)).collect()
}

/// Stages along an axis exchange in both directions at once.
fn pipeline_phase(axis: Axis, rate_bps: u64) -> Phase {
    let forward = Flow::new(Family::Line(axis), rate_bps);
    let steps = 1..axis.length as usize;
    let edges = steps.flat_map(|next| [(next - 1, next), (next, next - 1)]);
    Phase {
        flows: alloc::vec![forward, forward.reversed()],
        tag: edges.map(|(from, to)| tag(from, to, rate_bps, rate_bps)).collect(),
    }
}
