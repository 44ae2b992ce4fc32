//! Which pattern explains the edges of a job, and which worker has which rank.
//!
//! For each pattern, the structure of the graph suggests an order of ranks: where a ring leads, who
//! has one neighbour only, which edges are alike. The pattern in that order says which edges there
//! are and of which kind, and what remains unexplained is counted ([`Candidate::residual_ppm`]).
//! Small edges can be noise or a kind of their own, so graphs without edges below several shares of
//! the largest are tried.
//!
//! Edges of two kinds are told apart by when they are used and by their bytes: without either, a
//! torus whose rows and columns look the same is not recognised.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::{Edge, PARTS};
use crate::demand::Demand;
use crate::family::parent;
use crate::pattern::Pattern;

/// Shares of the largest edge below which edges are left out, in thousandths.
const THRESHOLDS: [u64; 4] = [300, 100, 20, 3];

/// Most workers of a tree that is recognised: each may be its root.
const MOST_OF_TREE: usize = 512;

/// What counts against a pattern whose phases overlap in what was seen, or the other way round, in
/// millionths.
const WRONG_PHASES_PPM: u64 = 20_000;

/// The edges of a job.
#[derive(Clone, Debug)]
pub struct Graph {
    workers: usize,
    /// By sender and receiver.
    edges: BTreeMap<Ends, Edge>,
}

/// A pattern in an order of ranks, and how well it explains a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// With the number of the kind, from 1, instead of each rate.
    shape: Pattern,
    /// By rank, the worker.
    pub ranks: Vec<u32>,
    /// By kind, in the order of the pattern's rates: mean bytes of its edges.
    pub bytes_of_kinds: Vec<u64>,
    /// By phase: the kinds of edges that it has.
    pub phases: Vec<Vec<usize>>,
    /// Bytes that are not explained, in millionths of all.
    pub residual_ppm: u64,
    /// The same with what counts against its phases.
    worth: u64,
}

impl Candidate {
    /// The pattern with these rates, by kind.
    pub(crate) fn with_rates(&self, rates: &[u64]) -> Option<Pattern> {
        let rate = |kind: u64| rates.get(usize::try_from(kind).ok()?.checked_sub(1)?).copied();
        Some(match self.shape {
            Pattern::Ring { workers, rate_bps } => {
                Pattern::Ring { workers, rate_bps: rate(rate_bps)? }
            }
            Pattern::Tree { workers, rate_bps } => {
                Pattern::Tree { workers, rate_bps: rate(rate_bps)? }
            }
            Pattern::Mesh { workers, rate_bps } => {
                Pattern::Mesh { workers, rate_bps: rate(rate_bps)? }
            }
            Pattern::Pipeline { stages, rate_bps } => {
                Pattern::Pipeline { stages, rate_bps: rate(rate_bps)? }
            }
            Pattern::Torus { columns, rows, row_bps, column_bps } => Pattern::Torus {
                columns,
                rows,
                row_bps: rate(row_bps)?,
                column_bps: rate(column_bps)?,
            },
            Pattern::Hierarchical { groups, group, local_bps, leader_bps } => {
                Pattern::Hierarchical {
                    groups,
                    group,
                    local_bps: rate(local_bps)?,
                    leader_bps: rate(leader_bps)?,
                }
            }
            Pattern::ParameterServer { workers, servers, rate_bps, is_async } => {
                let rate_bps = rate(rate_bps)?;
                Pattern::ParameterServer { workers, servers, rate_bps, is_async }
            }
            Pattern::Parallel { tensor, data, pipeline, tensor_bps, data_bps, pipeline_bps } => {
                Pattern::Parallel {
                    tensor,
                    data,
                    pipeline,
                    tensor_bps: rate(tensor_bps)?,
                    data_bps: rate(data_bps)?,
                    pipeline_bps: rate(pipeline_bps)?,
                }
            }
        })
    }
}

/// The pattern that explains most; simple ones come first. `None` if there are no edges.
pub fn best(graph: &Graph) -> Option<Candidate> {
    let mut candidates = Vec::new();
    for threshold in THRESHOLDS {
        let strong = graph.above(threshold);
        for (shape, ranks) in strong.suggestions() {
            candidates.extend(graph.judge(shape, ranks));
        }
    }
    // All workers that do something, if nothing else is known.
    let mesh = graph.above(0).mesh();
    candidates.extend(mesh.and_then(|(shape, ranks)| graph.judge(shape, ranks)));
    candidates.into_iter().min_by_key(|candidate| candidate.worth)
}

/// Whether edges are used at the same time: they share half of the shorter one's time.
fn overlap(one: u64, other: u64) -> bool {
    2 * (one & other).count_ones() > one.count_ones().min(other.count_ones())
}

type Suggestion = (Pattern, Vec<u32>);

/// Sender and receiver of an edge.
type Ends = (u32, u32);

impl Graph {
    /// That of edges between so many workers.
    pub fn new(workers: usize, edges: &[Edge]) -> Graph {
        let edges = edges.iter().map(|edge| ((edge.from, edge.to), *edge)).collect();
        Graph { workers, edges }
    }

    /// Without edges below so many thousandths of the largest.
    fn above(&self, thousandths: u64) -> Graph {
        let largest = self.edges.values().map(|edge| edge.bytes).max().unwrap_or(0);
        let least = u128::from(largest) * u128::from(thousandths) / 1_000;
        let kept = self.edges.iter().filter(|(_, edge)| u128::from(edge.bytes) >= least);
        Graph { workers: self.workers, edges: kept.map(|(ends, edge)| (*ends, *edge)).collect() }
    }

    fn has(&self, from: u32, to: u32) -> bool {
        self.edges.contains_key(&(from, to))
    }

    fn has_both(&self, one: u32, other: u32) -> bool {
        self.has(one, other) && self.has(other, one)
    }

    fn targets(&self, from: u32) -> impl Iterator<Item = u32> + '_ {
        self.edges.range((from, 0)..=(from, u32::MAX)).map(|((_, to), _)| *to)
    }

    /// Workers with edges.
    fn members(&self) -> Vec<u32> {
        let mut receives = alloc::vec![false; self.workers];
        self.edges.keys().for_each(|(_, to)| receives[*to as usize] = true);
        let sends = |worker: u32| self.targets(worker).next().is_some();
        (0..self.workers as u32).filter(|at| sends(*at) || receives[*at as usize]).collect()
    }

    /// Workers that each one sends to or receives from.
    fn neighbours(&self) -> Vec<Vec<u32>> {
        let mut neighbours = alloc::vec![Vec::new(); self.workers];
        for (from, to) in self.edges.keys() {
            neighbours[*from as usize].push(*to);
            neighbours[*to as usize].push(*from);
        }
        for own in &mut neighbours {
            own.sort_unstable();
            own.dedup();
        }
        neighbours
    }

    /// What each pattern suggests, simple ones first.
    fn suggestions(&self) -> Vec<Suggestion> {
        let mut all: Vec<Suggestion> = Vec::new();
        all.extend(self.ring());
        all.extend(self.pipeline());
        all.extend(self.tree());
        all.extend(self.parameter_servers());
        all.extend(self.hierarchical());
        all.extend(self.mesh());
        all.extend(self.products());
        all
    }

    /// The cycle that strongest edges lead through; `None` if it does not have all workers.
    fn cycle(&self, members: &[u32], is_member: impl Fn(u32) -> bool) -> Option<Vec<u32>> {
        let first = *members.first()?;
        let (mut cycle, mut at) = (alloc::vec![first], first);
        loop {
            let next = self.targets(at).filter(|to| is_member(*to));
            at = next.max_by_key(|to| self.edges[&(at, *to)].bytes)?;
            if at == first {
                return (cycle.len() == members.len() && cycle.len() > 1).then_some(cycle);
            }
            if cycle.len() == members.len() {
                return None;
            }
            cycle.push(at);
        }
    }

    fn ring(&self) -> Option<Suggestion> {
        let members = self.members();
        let ranks = self.cycle(&members, |_| true)?;
        Some((Pattern::Ring { workers: ranks.len() as u32, rate_bps: 1 }, ranks))
    }

    fn mesh(&self) -> Option<Suggestion> {
        let members = self.members();
        let shape = Pattern::Mesh { workers: members.len() as u32, rate_bps: 1 };
        (members.len() > 1).then_some((shape, members))
    }

    fn pipeline(&self) -> Option<Suggestion> {
        let (members, neighbours) = (self.members(), self.neighbours());
        let first = *members.iter().find(|at| neighbours[**at as usize].len() == 1)?;
        let mut ranks = alloc::vec![first];
        let mut before = first;
        let mut at = neighbours[first as usize][0];
        while ranks.len() < members.len() {
            ranks.push(at);
            let next = neighbours[at as usize].iter().find(|next| **next != before);
            (before, at) = (at, *next.unwrap_or(&first));
        }
        (at == first).then_some(())?;
        Some((Pattern::Pipeline { stages: ranks.len() as u32, rate_bps: 1 }, ranks))
    }

    fn tree(&self) -> Option<Suggestion> {
        let (members, neighbours) = (self.members(), self.neighbours());
        let count = members.len();
        let links: usize = neighbours.iter().map(Vec::len).sum();
        if !(3..=MOST_OF_TREE).contains(&count) || links != 2 * (count - 1) {
            return None;
        }
        let mut model = alloc::vec![Vec::new(); count];
        for rank in 0..count as u32 {
            if let Some(above) = parent(rank, count as u32) {
                model[rank as usize].push(above);
                model[above as usize].push(rank);
            }
        }
        let mut shapes = Shapes::default();
        let wanted = Rooted::new(&model, 0, &mut shapes)?;
        let is_root = |at: &&u32| neighbours[**at as usize].len() == model[0].len();
        let found = members.iter().filter(is_root).find_map(|root| {
            let rooted = Rooted::new(&neighbours, *root, &mut shapes)?;
            (rooted.shape_of(*root) == wanted.shape_of(0)).then_some(rooted)
        })?;
        let mut ranks = alloc::vec![0; count];
        let mut open = alloc::vec![(0, found.root)];
        while let Some((rank, worker)) = open.pop() {
            ranks[rank as usize] = worker;
            // Children of the same shape can be exchanged.
            open.extend(wanted.children(rank).into_iter().zip(found.children(worker)));
        }
        Some((Pattern::Tree { workers: count as u32, rate_bps: 1 }, ranks))
    }

    /// Both sides of a graph in which all edges lead from one side to the other, and each of both
    /// ways to place servers.
    fn parameter_servers(&self) -> Vec<Suggestion> {
        let (members, neighbours) = (self.members(), self.neighbours());
        let Some(first) = members.first() else { return Vec::new() };
        let others = neighbours[*first as usize].clone();
        let (one, other): (Vec<u32>, Vec<u32>) =
            members.iter().partition(|at| !others.contains(at));
        let is_split = !other.is_empty()
            && one.iter().all(|at| neighbours[*at as usize] == other)
            && other.iter().all(|at| neighbours[*at as usize] == one);
        if !is_split {
            return Vec::new();
        }
        let mut found = Vec::new();
        // Servers are mostly fewer.
        let sides = if one.len() < other.len() { [(other, one)] } else { [(one, other)] };
        let [(clients, servers)] = sides;
        for (clients, servers) in [(&clients, &servers), (&servers, &clients)] {
            for is_async in [false, true] {
                let (workers, count) = (clients.len() as u32, servers.len() as u32);
                let shape =
                    Pattern::ParameterServer { workers, servers: count, rate_bps: 1, is_async };
                found.push((shape, clients.iter().chain(servers).copied().collect()));
            }
        }
        found
    }

    /// Leaders have members that know nobody else.
    fn hierarchical(&self) -> Option<Suggestion> {
        let (members, neighbours) = (self.members(), self.neighbours());
        let is_member = |at: u32| neighbours[at as usize].len() == 1;
        let leaders: Vec<u32> = members.iter().copied().filter(|at| !is_member(*at)).collect();
        let ring = self.cycle(&leaders, |at| !is_member(at))?;
        let own = |leader: u32| {
            let own = neighbours[leader as usize].iter().copied();
            own.filter(|at| is_member(*at)).collect::<Vec<u32>>()
        };
        let group = 1 + own(ring[0]).len();
        let is_even = ring.iter().all(|leader| own(*leader).len() + 1 == group);
        if group < 2 || !is_even {
            return None;
        }
        let groups = ring.len() as u32;
        let shape =
            Pattern::Hierarchical { groups, group: group as u32, local_bps: 1, leader_bps: 2 };
        let ranks = ring.into_iter().flat_map(|leader| {
            let mut ranks = alloc::vec![leader];
            ranks.extend(own(leader));
            ranks
        });
        Some((shape, ranks.collect()))
    }

    /// Tori and products of parallelism: each kind of edge makes rings or lines of equal length
    /// through all workers.
    fn products(&self) -> Vec<Suggestion> {
        let mut found = Vec::new();
        for classes in [self.by_time(), self.by_bytes(), self.by_both()] {
            for classes in [classes.clone(), self.by_direction(&classes)] {
                if (2..=3).contains(&classes.len()) {
                    self.products_of(&classes, &mut found);
                }
            }
        }
        found
    }

    fn products_of(&self, classes: &[Vec<Ends>], found: &mut Vec<Suggestion>) {
        let members = self.members();
        let steps: Vec<[Option<Steps>; 2]> = classes
            .iter()
            .map(|class| [Steps::ring(class, &members), Steps::line(class, &members)])
            .collect();
        let pairs = (0..steps.len()).flat_map(|a| (0..steps.len()).map(move |b| (a, b)));
        let pairs: Vec<(usize, usize)> = pairs.filter(|(a, b)| a != b).collect();
        let third = |a: usize, b: usize| (0..steps.len()).find(|other| ![a, b].contains(other));
        // A torus with two columns is a pipeline of two stages as well, and is the simpler of both.
        for (a, b) in &pairs {
            if let (None, [Some(rows), _], [Some(columns), _]) =
                (third(*a, *b), &steps[*a], &steps[*b])
            {
                let (row_bps, column_bps) = (1, 2);
                let (columns_of, rows_of) = (rows.length, columns.length);
                let shape =
                    Pattern::Torus { columns: columns_of, rows: rows_of, row_bps, column_bps };
                let ranks = ranks_of(&members, [Some(rows), Some(columns), None]);
                found.extend(ranks.map(|ranks| (shape, ranks)));
            }
        }
        for (a, b) in pairs {
            let third = third(a, b).map(|third| &steps[third]);
            match (&steps[a], &steps[b], third) {
                ([Some(tensor), _], [Some(data), _], Some([_, Some(line)])) => {
                    found.extend(parallel(&members, [Some(tensor), Some(data), Some(line)]));
                }
                ([Some(ring), _], [_, Some(line)], None) => {
                    found.extend(parallel(&members, [Some(ring), None, Some(line)]));
                    found.extend(parallel(&members, [None, Some(ring), Some(line)]));
                }
                _ => {}
            }
        }
    }

    /// Edges by when they are used: those that overlap are together.
    fn by_time(&self) -> Vec<Vec<Ends>> {
        let mut classes: Vec<(u64, Vec<Ends>)> = Vec::new();
        for (ends, edge) in &self.edges {
            match classes.iter_mut().find(|(used, _)| overlap(*used, edge.used)) {
                Some((_, own)) => own.push(*ends),
                None => classes.push((edge.used, alloc::vec![*ends])),
            }
        }
        classes.into_iter().map(|(_, own)| own).collect()
    }

    /// Edges by bytes: a step of more than a quarter begins another kind.
    fn by_bytes(&self) -> Vec<Vec<Ends>> {
        let mut sorted: Vec<(u64, Ends)> =
            self.edges.iter().map(|(ends, edge)| (edge.bytes, *ends)).collect();
        sorted.sort_unstable();
        let alike = |a: &(u64, Ends), b: &(u64, Ends)| b.0 <= a.0.saturating_add(a.0 / 4);
        let kinds = sorted.chunk_by(alike);
        kinds.map(|kind| kind.iter().map(|(_, ends)| *ends).collect()).collect()
    }

    fn by_both(&self) -> Vec<Vec<Ends>> {
        let bytes = self.by_bytes();
        let time = self.by_time();
        let of = |kinds: &[Vec<Ends>]| -> BTreeMap<Ends, usize> {
            let numbered = kinds.iter().enumerate();
            numbered.flat_map(|(kind, own)| own.iter().map(move |ends| (*ends, kind))).collect()
        };
        let (bytes, time) = (of(&bytes), of(&time));
        let mut both: BTreeMap<(usize, usize), Vec<Ends>> = BTreeMap::new();
        for ends in self.edges.keys() {
            both.entry((bytes[ends], time[ends])).or_default().push(*ends);
        }
        both.into_values().collect()
    }

    /// Each kind in two: edges with one back, and those without.
    fn by_direction(&self, classes: &[Vec<Ends>]) -> Vec<Vec<Ends>> {
        let mut parted = Vec::new();
        for class in classes {
            let (both, one): (Vec<Ends>, Vec<Ends>) =
                class.iter().partition(|(from, to)| self.has_both(*from, *to));
            parted.extend([both, one].into_iter().filter(|part| !part.is_empty()));
        }
        parted
    }

    /// How well a pattern in that order explains all edges.
    fn judge(&self, shape: Pattern, ranks: Vec<u32>) -> Option<Candidate> {
        let demand = Demand::of(&shape).ok()?;
        let mut kind_of: BTreeMap<Ends, usize> = BTreeMap::new();
        let mut phases = Vec::new();
        let mut used = Vec::new();
        for phase in 0..demand.phases() {
            let (mut kinds, mut own) = (Vec::new(), Vec::new());
            for (from, to, kind) in demand.graph(phase) {
                let kind = kind as usize - 1;
                let ends = (*ranks.get(from as usize)?, *ranks.get(to as usize)?);
                kind_of.insert(ends, kind);
                kinds.push(kind);
                own.push(self.edges.get(&ends).map_or(0, |edge| edge.used));
            }
            kinds.sort_unstable();
            kinds.dedup();
            if !kinds.is_empty() {
                phases.push(kinds);
                used.push(own);
            }
        }
        let kinds = kind_of.values().copied().max()? + 1;
        let mut sums = alloc::vec![(0_u128, 0_u128); kinds];
        for (ends, kind) in &kind_of {
            let bytes = self.edges.get(ends).map_or(0, |edge| edge.bytes);
            sums[*kind] = (sums[*kind].0 + u128::from(bytes), sums[*kind].1 + 1);
        }
        let means: Vec<u64> =
            sums.iter().map(|(sum, count)| (sum / (*count).max(1)) as u64).collect();
        let all: u128 = self.edges.values().map(|edge| u128::from(edge.bytes)).sum();
        let known = kind_of.iter().map(|(ends, kind)| {
            let bytes = self.edges.get(ends).map_or(0, |edge| edge.bytes);
            u128::from(bytes.abs_diff(means[*kind]))
        });
        let others = self.edges.iter().filter(|(ends, _)| !kind_of.contains_key(*ends));
        let unknown: u128 = others.map(|(_, edge)| u128::from(edge.bytes)).sum();
        let residual = (known.sum::<u128>() + unknown) * 1_000_000 / all.max(1);
        let residual_ppm = u64::try_from(residual).unwrap_or(u64::MAX);
        let worth = residual_ppm.saturating_add(wrong_phases(&used));
        let mut bytes_of_kinds = means;
        bytes_of_kinds.resize(shape.rates().len(), 0);
        Some(Candidate { shape, ranks, bytes_of_kinds, phases, residual_ppm, worth })
    }
}

/// What counts against the phases of a pattern: that two overlap in what was seen or come the other
/// way round, or that edges of one do not overlap. `used` says by phase when each of its edges is
/// used.
fn wrong_phases(used: &[Vec<u64>]) -> u64 {
    let mostly = |own: &Vec<u64>| {
        let is_often = |part: &u64| {
            let count = own.iter().filter(|used| **used >> part & 1 == 1).count();
            2 * count > own.len()
        };
        (0..PARTS).filter(is_often).fold(0_u64, |used, part| used | 1 << part)
    };
    let whole: Vec<u64> = used.iter().map(mostly).collect();
    let is_wrong = |pair: &&[u64]| {
        let is_late = pair[0].trailing_zeros() > pair[1].trailing_zeros();
        overlap(pair[0], pair[1]) || is_late
    };
    let is_parted = |own: &&Vec<u64>| {
        let first = own.first().copied().unwrap_or(0);
        let apart = own.iter().filter(|used| !overlap(**used, first)).count();
        4 * apart > own.len()
    };
    let wrong = whole.windows(2).filter(is_wrong).count();
    let parted = used.iter().filter(is_parted).count();
    (wrong + parted) as u64 * WRONG_PHASES_PPM
}

/// Where edges of a kind lead from each worker.
struct Steps {
    length: u32,
    next: BTreeMap<u32, Vec<u32>>,
    is_line: bool,
}

impl Steps {
    fn of(class: &[Ends]) -> BTreeMap<u32, Vec<u32>> {
        let mut next: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (from, to) in class {
            next.entry(*from).or_default().push(*to);
        }
        next
    }

    /// Cycles through all workers; the length is that of the first's.
    fn ring(class: &[Ends], members: &[u32]) -> Option<Steps> {
        let next = Steps::of(class);
        let has_one = |at: &u32| next.get(at).is_some_and(|own| own.len() == 1);
        if class.len() != members.len() || !members.iter().all(has_one) {
            return None;
        }
        let first = *members.first()?;
        let (mut at, mut length) = (next[&first][0], 1);
        while at != first && length <= members.len() as u32 {
            (at, length) = (next[&at][0], length + 1);
        }
        Some(Steps { length, next, is_line: false })
    }

    /// Lines through all workers, with edges both ways; the length is that of the line of the first
    /// end.
    fn line(class: &[Ends], members: &[u32]) -> Option<Steps> {
        let next = Steps::of(class);
        let is_fit = |at: &u32| next.get(at).is_some_and(|own| own.len() <= 2);
        if !members.iter().all(is_fit) {
            return None;
        }
        let first = *members.iter().find(|at| next[*at].len() == 1)?;
        let mut steps = Steps { length: 1, next, is_line: true };
        let mut line = alloc::vec![first];
        while let Some(at) = steps.beyond(&line).filter(|_| line.len() < members.len()) {
            line.push(at);
        }
        steps.length = line.len() as u32;
        Some(steps)
    }

    /// The worker that follows on a way that is there already.
    fn beyond(&self, way: &[u32]) -> Option<u32> {
        let (at, before) = (way.last()?, way.len().checked_sub(2).map(|before| way[before]));
        let next = self.next.get(at)?;
        match self.is_line {
            true => next.iter().copied().find(|next| Some(*next) != before),
            false => next.first().copied(),
        }
    }

    /// All workers of the way that begins at one.
    fn way(&self, first: u32) -> Option<Vec<u32>> {
        let mut way = alloc::vec![first];
        while way.len() < self.length as usize {
            way.push(self.beyond(&way)?);
        }
        Some(way)
    }
}

/// Ranks whose digits are steps along each kind of edge, the fastest first.
fn ranks_of(members: &[u32], steps: [Option<&Steps>; 3]) -> Option<Vec<u32>> {
    let lengths = steps.iter().flatten().map(|steps| u64::from(steps.length));
    if lengths.product::<u64>() != members.len() as u64 {
        return None;
    }
    // Lines begin at an end.
    let is_end = |at: &&u32| {
        let lines = steps.iter().flatten().filter(|steps| steps.is_line);
        lines.into_iter().all(|steps| steps.next.get(*at).is_some_and(|own| own.len() == 1))
    };
    let mut ranks = alloc::vec![*members.iter().find(is_end)?];
    for steps in steps.into_iter().flatten() {
        let ways: Option<Vec<Vec<u32>>> = ranks.iter().map(|first| steps.way(*first)).collect();
        let ways = ways?;
        ranks = (0..steps.length as usize)
            .flat_map(|step| ways.iter().map(move |way| way[step]))
            .collect();
    }
    Some(ranks)
}

/// Products of tensor, data and pipeline parallelism.
fn parallel(members: &[u32], steps: [Option<&Steps>; 3]) -> Option<Suggestion> {
    let [tensor, data, pipeline] = steps.map(|steps| steps.map_or(1, |steps| steps.length));
    let ranks = ranks_of(members, steps)?;
    let shape =
        Pattern::Parallel { tensor, data, pipeline, tensor_bps: 1, data_bps: 2, pipeline_bps: 3 };
    Some((shape, ranks))
}

/// Shapes of rooted trees, by those of the children.
#[derive(Debug, Default)]
struct Shapes {
    known: BTreeMap<Vec<u32>, u32>,
}

/// A tree with a root.
struct Rooted {
    root: u32,
    children: BTreeMap<u32, Vec<u32>>,
    shape: BTreeMap<u32, u32>,
}

impl Rooted {
    /// `None` if there is a circle.
    fn new(neighbours: &[Vec<u32>], root: u32, shapes: &mut Shapes) -> Option<Rooted> {
        let mut rooted = Rooted { root, children: BTreeMap::new(), shape: BTreeMap::new() };
        let mut order = alloc::vec![(root, root)];
        let mut next = 0;
        while let Some((at, above)) = order.get(next).copied() {
            next += 1;
            let own = neighbours[at as usize].iter().copied().filter(|child| *child != above);
            let own: Vec<u32> = own.collect();
            order.extend(own.iter().map(|child| (*child, at)));
            if rooted.children.insert(at, own).is_some() || order.len() > neighbours.len() {
                return None;
            }
        }
        for (at, _) in order.into_iter().rev() {
            let mut own: Vec<u32> = rooted.children(at).iter().map(|at| rooted.shape[at]).collect();
            own.sort_unstable();
            let number = shapes.known.len() as u32;
            let shape = *shapes.known.entry(own).or_insert(number);
            rooted.shape.insert(at, shape);
            if let Some(children) = rooted.children.get_mut(&at) {
                let shape = &rooted.shape;
                children.sort_by_key(|child| shape[child]);
            }
        }
        Some(rooted)
    }

    fn shape_of(&self, at: u32) -> Option<u32> {
        self.shape.get(&at).copied()
    }

    /// Children in the order of their shapes.
    fn children(&self, at: u32) -> Vec<u32> {
        self.children.get(&at).cloned().unwrap_or_default()
    }
}
