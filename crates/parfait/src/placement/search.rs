//! Monte Carlo tree search over hosts, by what a placement costs later jobs.
//!
//! A placement is a sequence of decisions. The first is the scope: in which order workers are
//! placed, and the group of hosts that gets all of them. Each further one is the child of the group
//! at hand that takes the next run of ranks, and how long that run is, down to hosts. In a tree of
//! switches a decision settles what the child's links carry, so a run that does not fit is never
//! tried, and the cost is known at once; a child whose own children hold fewer takes those, and the
//! next child the rest. Elsewhere the cost is computed when all workers are placed.
//!
//! Children that look alike (same free slots, same free bandwidth) are one move, and only the
//! [`MOVES`] cheapest per worker are kept. Each iteration descends by value, prior and visits
//! (PUCT), adds one node, and completes the placement at random with a preference for the cheapest
//! move. The first iteration of each scope takes the cheapest everywhere. Between iterations the
//! best placement so far is changed at random, a run moved to another host or a few workers to its
//! neighbour, and kept where that is cheaper: off a tree the decisions do not see what links cost.
//!
//! A search may be stopped after any number of iterations and has its best placement then. The same
//! ledger, request, seed and number give the same placement. It stops by itself once it has taken
//! [`MOST_EFFORT`], whatever the size of the job: a brain has to keep its lease meanwhile. Effort
//! is counted, not measured, so it is the same everywhere.

use alloc::vec::Vec;
use core::cell::Cell;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

use super::greedy::{closest, group_loads};
use super::{Placement, Request, cost, link_cost, open_cost};
use crate::demand::Order;
use crate::ledger::{Ledger, Refusal};
use crate::loads::{Load, Loader, Piece};
use crate::runs::Run;

/// Most moves of a decision.
pub const MOVES: usize = 8;

/// Most effort of a search, in runs whose cost is computed. So many take about 0.1 s on one core
/// (docs/parfait-brain.md); a search that has found nothing yet may take twice as much.
pub const MOST_EFFORT: u64 = 1 << 20;

/// Most effort of the loads of one placement. They are computed when it is found, when it is
/// checked, and when it is admitted.
const MOST_OF_LOADS: u64 = MOST_EFFORT / 2;

/// Pairs of hosts that take as long as a run where loads are computed pair by pair.
const PAIRS_OF_EFFORT: u64 = 64;

/// Children of a group that are passed over in the time of a run, in a tree.
const CHILDREN_OF_EFFORT: u64 = 16;

/// Most groups of a level that are tried as scopes.
const SCOPES_OF_LEVEL: usize = 6;

/// A job of which no placement was found in so many iterations is refused: most of these fit no
/// network.
const HOPELESS: u32 = 128;

/// One of so many iterations changes the best placement.
const CHANGE_EVERY: u32 = 4;

/// Most pieces of a placement that is changed: a change is judged as a whole.
const MOST_CHANGED: usize = 256;

/// No node.
const NONE: u32 = u32::MAX;

/// The value of a placement that costs nothing.
const BEST_VALUE: u64 = 1 << 20;

/// How much the prior counts against values.
const EXPLORATION: u64 = BEST_VALUE / 4;

/// What moves are worth before they are tried, by their place.
const PRIOR: [u64; MOVES] = [12, 6, 4, 3, 2, 2, 1, 1];

/// A child of a group takes so many workers.
#[derive(Clone, Copy, Debug, Default)]
struct Move {
    child: u32,
    count: u32,
    cost: u64,
}

/// The moves of a decision, best first.
#[derive(Clone, Copy, Debug, Default)]
struct Moves {
    list: [Move; MOVES],
    /// What they are sorted by.
    keys: [(u64, u32); MOVES],
    len: usize,
}

impl Moves {
    fn add(&mut self, key: (u64, u32), new: Move) {
        let at = self.keys[..self.len].partition_point(|other| *other <= key);
        if at < MOVES {
            self.len = (self.len + 1).min(MOVES);
            self.keys[at..self.len].rotate_right(1);
            self.list[at..self.len].rotate_right(1);
            (self.keys[at], self.list[at]) = (key, new);
        }
    }
}

/// A decision that was met before.
#[derive(Clone, Copy, Debug)]
struct Node {
    moves: Moves,
    visits: [u32; MOVES],
    values: [u64; MOVES],
    /// The largest value of each move: one good placement counts, whatever the others behind it are
    /// worth.
    largest: [u64; MOVES],
    next: [u32; MOVES],
}

/// An order and a group that gets all workers.
#[derive(Clone, Copy, Debug)]
struct Scope {
    order: Order,
    group: u32,
    /// Of opening the groups above it, and itself.
    cost: u64,
    visits: u32,
    value: u64,
    largest: u64,
    root: u32,
}

/// Where an iteration is in the tree of decisions.
#[derive(Clone, Copy, Debug)]
enum Cursor {
    At(u32),
    /// The next decision becomes the node behind this move, or behind the scope.
    Expand(Option<(u32, usize)>),
    Beyond,
}

/// What a search needs, kept from one to the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    scopes: Vec<Scope>,
    nodes: Vec<Node>,
    /// By group: the iteration that used it.
    used: Vec<u64>,
    iteration: u64,
    pieces: Vec<Piece>,
    path: Vec<(u32, usize)>,
    best: Vec<Piece>,
    loads: Vec<Load>,
    loader: Loader,
    /// Of all searches.
    effort: u64,
}

impl Memory {
    /// None yet.
    pub fn new() -> Memory {
        Memory::default()
    }

    /// What all searches took together, as [`MOST_EFFORT`] is counted.
    pub fn effort(&self) -> u64 {
        self.effort
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct Search<'a> {
    ledger: &'a Ledger,
    request: &'a Request,
    memory: &'a mut Memory,
    random: Pcg32,
    is_tree: bool,
    /// Of the iteration at hand.
    scope: usize,
    cursor: Cursor,
    cost: u64,
    is_greedy: bool,
    /// Whether the iteration at hand cannot find anything cheaper than the best.
    is_given_up: bool,
    /// Iterations of all runs.
    tried: u32,
    /// What they took.
    effort: Cell<u64>,
    /// Whether some placement was not looked at since that alone takes too much.
    is_too_large: bool,
    /// Order and cost of the best placement.
    best: Option<(Order, u64)>,
}

impl<'a> Search<'a> {
    /// One that has tried nothing yet.
    ///
    /// # Errors
    /// When all hosts together have too few slots.
    pub fn new(
        ledger: &'a Ledger,
        request: &'a Request,
        memory: &'a mut Memory,
        seed: u64,
    ) -> Result<Search<'a>, Refusal> {
        request.check_slots(ledger)?;
        memory.scopes.clear();
        memory.nodes.clear();
        memory.used.resize(ledger.network().groups().len(), 0);
        let is_tree = ledger.network().is_tree();
        let mut search = Search {
            ledger,
            request,
            memory,
            random: Pcg32::new(seed, 0x05ea_4c41),
            is_tree,
            scope: 0,
            cursor: Cursor::Beyond,
            cost: 0,
            is_greedy: true,
            is_given_up: false,
            tried: 0,
            effort: Cell::new(0),
            is_too_large: false,
            best: None,
        };
        search.find_scopes();
        Ok(search)
    }

    /// Of each level the tightest groups that hold all workers, and the emptiest.
    fn find_scopes(&mut self) {
        let groups = self.ledger.network().groups();
        let workers = self.request.workers();
        for level in 0..=groups.top() {
            let mut tightest: [(u32, u32); SCOPES_OF_LEVEL] = [(u32::MAX, NONE); SCOPES_OF_LEVEL];
            let mut emptiest = (0, NONE);
            for group in groups.level(level) {
                let room = self.request.room(self.ledger, group);
                if room < workers {
                    continue;
                }
                if room > emptiest.0 {
                    emptiest = (room, group);
                }
                let own = (room, group);
                if own < tightest[SCOPES_OF_LEVEL - 1] {
                    let at = tightest.partition_point(|other| *other < own);
                    tightest[at..].rotate_right(1);
                    tightest[at] = own;
                }
            }
            let has_emptiest = tightest.iter().any(|(_, group)| *group == emptiest.1);
            let last = if has_emptiest { NONE } else { emptiest.1 };
            let found = tightest.iter().map(|(_, group)| *group).chain([last]);
            for group in found.filter(|group| *group != NONE) {
                self.add_scope(group);
            }
        }
    }

    fn add_scope(&mut self, group: u32) {
        let groups = self.ledger.network().groups();
        let slots = u64::from(self.request.workers()) * u64::from(self.request.slots_per_worker);
        let (mut above, mut cost) = (group, 0);
        while above != groups.root() {
            cost += open_cost(self.ledger, above, slots);
            above = groups.parent(above);
        }
        for order in self.request.orders() {
            let scope = Scope { order, group, cost, visits: 0, value: 0, largest: 0, root: NONE };
            self.memory.scopes.push(scope);
            // On one host the order does not matter.
            if groups.is_host(group) {
                break;
            }
        }
    }

    /// Runs so many more iterations, or fewer if no better placement can be found, or none was
    /// found for long.
    pub fn run(&mut self, iterations: u32) {
        for number in 0..iterations {
            let changes_best = number % CHANGE_EVERY == CHANGE_EVERY - 1;
            let is_hopeless = self.best.is_none() && self.tried >= HOPELESS;
            let is_best = self.best.is_some_and(|(_, cost)| cost == 0);
            if is_hopeless || is_best || self.is_exhausted() {
                return;
            }
            self.tried += 1;
            self.spend(1 + self.memory.scopes.len() as u64 / CHILDREN_OF_EFFORT);
            let is_open = (self.best.is_none() || !changes_best) && self.choose_scope();
            match self.best {
                _ if is_open => self.iterate(),
                Some((order, cost)) => self.change_best(order, cost),
                None => return,
            }
        }
    }

    /// Whether nothing is left to spend.
    fn is_exhausted(&self) -> bool {
        let most = if self.best.is_some() { MOST_EFFORT } else { 2 * MOST_EFFORT };
        self.effort.get() >= most
    }

    fn spend(&self, effort: u64) {
        self.effort.set(self.effort.get().saturating_add(effort));
    }

    /// What it takes to compute the loads of the placement at hand.
    fn effort_of_loads(&self, order: Order) -> u64 {
        let (network, demand) = (self.ledger.network(), self.request.demand(order));
        let pieces = &self.memory.pieces;
        let effort = Loader::effort(network, demand, self.request.abstraction, pieces);
        if self.is_tree { effort } else { effort / PAIRS_OF_EFFORT }
    }

    /// Changes the best placement at random, and keeps what is cheaper.
    fn change_best(&mut self, order: Order, cost_of_best: u64) {
        let Memory { pieces, best, .. } = &mut *self.memory;
        if best.len() > MOST_CHANGED {
            return;
        }
        pieces.clone_from(best);
        let mut number = |below: usize| self.random.next_u32() as usize % below.max(1);
        let groups = self.ledger.network().groups();
        // Sometimes two changes, where one alone makes it worse.
        for _ in 0..1 + number(2) {
            let (one, other) = (number(pieces.len()), number(pieces.len()));
            match number(3) {
                // Another host: one beside a host that the job has, or any.
                0 => {
                    let beside = groups.hosts_of(groups.parent(pieces[other].host));
                    let all = 0..groups.hosts().len() as u32;
                    let hosts = if number(2) == 0 { beside } else { all };
                    pieces[one].host = hosts.start + number(hosts.len()) as u32;
                }
                1 => {
                    let host = pieces[one].host;
                    pieces[one].host = core::mem::replace(&mut pieces[other].host, host);
                }
                _ => {
                    let Some([a, b]) = pieces.get_mut(one..one + 2) else { continue };
                    let end =
                        a.run.first + 1 + number((b.run.end - a.run.first - 1) as usize) as u32;
                    (a.run.end, b.run.first) = (end, end);
                }
            }
        }
        if !self.request.fits_slots(self.ledger, pieces) {
            return;
        }
        self.spend(self.effort_of_loads(order));
        let Memory { pieces, loads, loader, .. } = &mut *self.memory;
        let demand = self.request.demand(order);
        loader.loads(self.ledger.network(), demand, self.request.abstraction, pieces, loads);
        if let Some(cost) = cost(self.ledger, self.request.slots_per_worker, pieces, loads)
            && cost < cost_of_best
        {
            self.best = Some((order, cost));
            self.memory.best.clone_from(&self.memory.pieces);
        }
    }

    /// Each scope once, and then by value and visits; `false` if none is left. A single host has
    /// one placement.
    fn choose_scope(&mut self) -> bool {
        let groups = self.ledger.network().groups();
        let all: u64 = self.memory.scopes.iter().map(|scope| u64::from(scope.visits)).sum();
        let promise = |scope: &Scope| {
            if scope.visits == 0 {
                return u64::MAX;
            }
            let spread = EXPLORATION * (all << 8).isqrt() / 16 / u64::from(1 + scope.visits);
            (scope.value / u64::from(scope.visits)).midpoint(scope.largest) + spread
        };
        let cheapest = self.best.map_or(u64::MAX, |(_, cost)| cost);
        let open = self.memory.scopes.iter().enumerate().filter(|(_, scope)| {
            let is_done = scope.visits > 0 && groups.is_host(scope.group);
            !is_done && scope.cost < cheapest
        });
        // The first of the best: lower levels come first.
        let best = open.rev().max_by_key(|(_, scope)| promise(scope));
        let found = best.map(|(at, _)| at);
        self.scope = found.unwrap_or(self.scope);
        found.is_some()
    }

    fn iterate(&mut self) {
        let scope = self.memory.scopes[self.scope];
        self.memory.iteration += 1;
        self.memory.pieces.clear();
        self.memory.path.clear();
        self.cursor =
            if scope.root == NONE { Cursor::Expand(None) } else { Cursor::At(scope.root) };
        self.is_greedy = scope.visits == 0;
        self.is_given_up = false;
        self.cost = scope.cost;
        let workers = self.request.workers();
        let placed = self.fill(scope.group, 0, workers);
        let is_whole = placed == workers && !self.is_given_up && self.finish(scope.order);
        let value = match (is_whole, self.best) {
            (true, Some((_, best))) => value(best, self.cost),
            (false, Some((_, best))) if self.is_given_up => value(best, self.cost) / 2,
            // What comes further before it fails is closer to a placement.
            _ => BEST_VALUE / 8 * u64::from(placed) / u64::from(workers),
        };
        let scope = &mut self.memory.scopes[self.scope];
        scope.visits += 1;
        scope.value += value;
        scope.largest = value.max(scope.largest);
        for (node, at) in &self.memory.path {
            let node = &mut self.memory.nodes[*node as usize];
            node.visits[*at] += 1;
            node.values[*at] += value;
            node.largest[*at] = value.max(node.largest[*at]);
        }
    }

    /// Completes the cost, and keeps the placement if it is the best; `false` if its links do not
    /// hold it.
    fn finish(&mut self, order: Order) -> bool {
        if !self.is_tree {
            let effort = self.effort_of_loads(order);
            if effort > MOST_OF_LOADS {
                self.is_too_large = true;
                return false;
            }
            self.spend(effort);
            let Memory { loader, loads, pieces, .. } = &mut *self.memory;
            let demand = self.request.demand(order);
            loader.loads(self.ledger.network(), demand, self.request.abstraction, pieces, loads);
            match cost(self.ledger, self.request.slots_per_worker, pieces, loads) {
                Some(cost) => self.cost = cost,
                None => return false,
            }
        }
        if self.best.is_none_or(|(_, best)| self.cost < best) {
            self.best = Some((order, self.cost));
            self.memory.best.clone_from(&self.memory.pieces);
        }
        true
    }

    /// Places up to `count` workers from rank `first` on in a group; returns how many. It stops
    /// where no child's links hold another one, and gives up where the cost is that of the best.
    fn fill(&mut self, group: u32, first: u32, count: u32) -> u32 {
        if self.ledger.network().groups().is_host(group) {
            self.memory.pieces.push(Piece { host: group, run: Run::new(first, first + count) });
            return count;
        }
        let (mut next, end) = (first, first + count);
        while next < end {
            let Some(chosen) = self.decide(group, next, end - next) else { break };
            self.memory.used[chosen.child as usize] = self.memory.iteration;
            let (pieces, cost) = (self.memory.pieces.len(), self.cost);
            self.cost = cost.saturating_add(chosen.cost);
            // The whole iteration ends here: to go on elsewhere would take the moves of another
            // decision.
            self.is_given_up |= self.best.is_some_and(|(_, best)| self.cost >= best);
            self.is_too_large |= self.best.is_none() && self.is_exhausted();
            self.is_given_up |= self.is_exhausted();
            if self.is_given_up {
                break;
            }
            let mut placed = self.fill(chosen.child, next, chosen.count);
            if self.is_given_up {
                break;
            }
            if placed < chosen.count {
                // The links of the child carry fewer than they were asked for.
                match self.price(chosen.child, next, placed) {
                    Some(price) if placed > 0 => self.cost = self.cost - chosen.cost + price,
                    _ => {
                        self.memory.pieces.truncate(pieces);
                        (self.cost, placed) = (cost, 0);
                    }
                }
            }
            next += placed;
        }
        next - first
    }

    fn decide(&mut self, group: u32, first: u32, left: u32) -> Option<Move> {
        match self.cursor {
            Cursor::At(node) => {
                let at = self.select(node)?;
                self.memory.path.push((node, at));
                let node_of = &self.memory.nodes[node as usize];
                self.cursor = match node_of.next[at] {
                    NONE => Cursor::Expand(Some((node, at))),
                    next => Cursor::At(next),
                };
                Some(node_of.moves.list[at])
            }
            Cursor::Expand(behind) => {
                let moves = self.moves(group, first, left);
                let node = self.memory.nodes.len() as u32;
                let empty = [0; MOVES];
                let (values, largest, next) = ([0; MOVES], [0; MOVES], [NONE; MOVES]);
                let new = Node { moves, visits: empty, values, largest, next };
                self.memory.nodes.push(new);
                match behind {
                    Some((before, at)) => self.memory.nodes[before as usize].next[at] = node,
                    None => self.memory.scopes[self.scope].root = node,
                }
                self.cursor = Cursor::Beyond;
                let at = self.pick(moves.len)?;
                self.memory.path.push((node, at));
                Some(moves.list[at])
            }
            Cursor::Beyond => {
                let moves = self.moves(group, first, left);
                self.pick(moves.len).map(|at| moves.list[at])
            }
        }
    }

    /// The move of a node with the best value for its visits.
    fn select(&self, node: u32) -> Option<usize> {
        let node = &self.memory.nodes[node as usize];
        let visits: u64 = node.visits.iter().map(|visits| u64::from(*visits)).sum();
        let mean = node.values.iter().sum::<u64>() / visits.max(1);
        let promise = |at: &usize| {
            let own = u64::from(node.visits[*at]);
            let value = node.values[*at].checked_div(own);
            value.map_or(mean, |value| value.midpoint(node.largest[*at]))
                + EXPLORATION * PRIOR[*at] * (visits << 8).isqrt() / (16 * 16) / (1 + own)
        };
        (0..node.moves.len).rev().max_by_key(promise)
    }

    /// Mostly the cheapest move, at times another.
    fn pick(&mut self, len: usize) -> Option<usize> {
        if len < 2 || self.is_greedy {
            return (len > 0).then_some(0);
        }
        let number = self.random.next_u32() as usize;
        Some(if number % 8 < 5 { 0 } else { number / 8 % len })
    }

    /// The moves of a decision; children that look alike are one.
    fn moves(&self, group: u32, first: u32, left: u32) -> Moves {
        let mut moves = Moves::default();
        let mut seen = [(0, 0, 0); 4];
        let mut seen_at = 0;
        let children = self.ledger.network().groups().children(group);
        let passed = children.len() as u64;
        self.spend(if self.is_tree { passed / CHILDREN_OF_EFFORT } else { passed });
        for child in children {
            let room = self.request.room(self.ledger, child);
            if room == 0 || self.memory.used[child as usize] == self.memory.iteration {
                continue;
            }
            if self.is_tree {
                let looks =
                    (room, self.ledger.free_bps(2 * child), self.ledger.free_bps(2 * child + 1));
                if seen.contains(&looks) {
                    continue;
                }
                seen[seen_at] = looks;
                seen_at = (seen_at + 1) % seen.len();
            }
            let Some((count, cost)) = self.most(child, first, room.min(left)) else { continue };
            self.add(&mut moves, Move { child, count, cost }, room, left);
            for shorter in self.shorter(first, count, left).into_iter().flatten() {
                if let Some(cost) = self.price(child, first, shorter) {
                    self.add(&mut moves, Move { child, count: shorter, cost }, room, left);
                }
            }
        }
        moves
    }

    /// Shorter runs that are worth a try: to the end of a row, group or ring; half of the rest; one
    /// host's.
    fn shorter(&self, first: u32, count: u32, left: u32) -> [Option<u32>; 3] {
        let to_unit = count.saturating_sub((first + count) % self.request.unit);
        let host = self.ledger.network().slots() / self.request.slots_per_worker.max(1);
        let useful = |shorter: u32| (shorter > 0 && shorter < count).then_some(shorter);
        let unit = if count < left { useful(to_unit) } else { None };
        let half = useful(left.div_ceil(2)).filter(|half| Some(*half) != unit);
        let host = useful(host).filter(|host| ![unit, half].contains(&Some(*host)));
        [unit, half, host]
    }

    fn add(&self, moves: &mut Moves, new: Move, room: u32, left: u32) {
        let key = match self.is_tree {
            true => new.cost.saturating_mul(64) / u64::from(new.count),
            false => u64::from(left - new.count),
        };
        moves.add((key, room - new.count), new);
    }

    /// The longest run that the child's links hold, of those tried, and its cost.
    fn most(&self, child: u32, first: u32, most: u32) -> Option<(u32, u64)> {
        let step = (most / 8).max(1);
        let counts = (0..8.min(most)).map(|tried| most - tried * step);
        counts
            .filter(|count| *count > 0)
            .find_map(|count| Some((count, self.price(child, first, count)?)))
    }

    /// The cost of a run in a child; `None` if its links do not hold it.
    fn price(&self, child: u32, first: u32, count: u32) -> Option<u64> {
        // Off a tree the runs of a child take as long together as one in a tree.
        self.spend(u64::from(self.is_tree));
        let slots = u64::from(count) * u64::from(self.request.slots_per_worker);
        let opened = open_cost(self.ledger, child, slots);
        if !self.is_tree {
            return Some(opened);
        }
        let order = self.memory.scopes[self.scope].order;
        let demand = self.request.demand(order);
        let loads = group_loads(self.ledger, self.request, demand, child, first, count);
        loads
            .into_iter()
            .filter(|load| load.bps > 0)
            .try_fold(opened, |sum, load| Some(sum.saturating_add(link_cost(self.ledger, load)?)))
    }

    /// The best placement so far.
    pub fn best(&self) -> Option<Placement> {
        let (order, cost) = self.best?;
        Some(Placement { order, pieces: self.memory.best.clone(), cost })
    }
}

/// The value of a placement, against the best.
fn value(best: u64, cost: u64) -> u64 {
    let (best, cost) = (u128::from(best) + 1, u128::from(cost) + 1);
    (u128::from(BEST_VALUE) * best / (best + (cost - best.min(cost)) * 2)) as u64
}

/// Searches for so many iterations.
///
/// # Errors
/// When there are too few slots, or no placement was found whose links hold it: what is missing
/// where the workers would be closest together. Also when the job is so large that one placement
/// takes more than [`MOST_EFFORT`].
pub fn place(
    ledger: &Ledger,
    request: &Request,
    memory: &mut Memory,
    seed: u64,
    iterations: u32,
) -> Result<Placement, Refusal> {
    let mut search = Search::new(ledger, request, memory, seed)?;
    search.run(iterations);
    let (best, is_too_large, effort) = (search.best(), search.is_too_large, search.effort.get());
    memory.effort = memory.effort.saturating_add(effort);
    match best {
        Some(best) => Ok(best),
        None if is_too_large => Err(Refusal::TooLarge { workers: request.workers() }),
        None => closest(ledger, request),
    }
}
