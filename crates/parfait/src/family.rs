//! Families of edges between the workers of a job, and how many of them lead from one run of ranks
//! to another.
//!
//! A pattern is made of a few families. Each knows its edges twice: one by one
//! ([`Family::targets`], the definition) and in closed form ([`Family::count`]), which costs the
//! same for a dozen workers and for a million. The tests compare the two.

use alloc::vec::Vec;

use crate::runs::{Run, congruent};

/// Lines of workers: those whose ranks differ by multiples of `stride` alone, `length` in each
/// line.
///
/// Ranks are digits, the fastest first, so an axis whose stride is the product of the lengths
/// before it has the workers that differ in one digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// From one worker of a line to the next, at least 1.
    pub stride: u32,
    /// Workers of a line, at least 1.
    pub length: u32,
}

impl Axis {
    /// The place of a rank in its line.
    pub fn place(self, rank: u32) -> u32 {
        rank / self.stride % self.length
    }

    /// The lines that lie beside each other, as one block of ranks.
    fn block(self) -> u64 {
        u64::from(self.stride) * u64::from(self.length)
    }

    /// How many ranks of a run have this place in their line.
    pub(crate) fn at_place(self, run: Run, place: u32) -> u64 {
        if run.is_empty() {
            return 0;
        }
        let (stride, block) = (u64::from(self.stride), self.block());
        let below = |end: u32| {
            let end = u64::from(end);
            let rest = (end % block).saturating_sub(stride * u64::from(place));
            end / block * stride + rest.min(stride)
        };
        below(run.end) - below(run.first)
    }

    /// Pairs of one line, the first with a rank below `x` and the second with one below `y`.
    fn pairs_below(self, x: u32, y: u32) -> u64 {
        let (x, y) = (u64::from(x.min(y)), u64::from(x.max(y)));
        let (stride, block) = (u64::from(self.stride), self.block());
        let whole = x / block;
        let (x, y) = (x - whole * block, (y - whole * block).min(block));
        // In a block each line has `x / stride` ranks below `x`, and the first `x % stride` lines
        // one more.
        let (x_all, x_more) = (x / stride, x % stride);
        let (y_all, y_more) = (y / stride, y % stride);
        whole * block * u64::from(self.length)
            + stride * x_all * y_all
            + x_all * y_more
            + y_all * x_more
            + x_more.min(y_more)
    }
}

/// Where servers are among the workers that they serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// After all of them.
    Last,
    /// Before all of them.
    First,
    /// Evenly among them.
    Even,
}

/// Clients and servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// How many clients there are.
    pub clients: u32,
    /// How many servers there are.
    pub servers: u32,
    /// Where the servers are.
    pub layout: Layout,
}

impl Roles {
    fn servers_below(self, end: u32) -> u64 {
        match self.layout {
            Layout::Last => end.saturating_sub(self.clients).min(self.servers).into(),
            Layout::First => end.min(self.servers).into(),
            Layout::Even => {
                let all = u64::from(self.clients) + u64::from(self.servers);
                u64::from(end) * u64::from(self.servers) / all
            }
        }
    }

    /// How many of a run are servers.
    pub fn servers(self, run: Run) -> u64 {
        if run.is_empty() { 0 } else { self.servers_below(run.end) - self.servers_below(run.first) }
    }

    /// How many of a run are clients.
    pub fn clients(self, run: Run) -> u64 {
        u64::from(run.len()) - self.servers(run)
    }

    /// Whether a worker is a server.
    pub fn is_server(self, rank: u32) -> bool {
        self.servers(Run::new(rank, rank + 1)) == 1
    }
}

/// Edges of one kind, each from a rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// From each worker of a line to the next.
    Line(Axis),
    /// The same, and from the last to the first.
    Ring(Axis),
    /// From each worker of a line to every other.
    Mesh(Axis),
    /// From each worker to its parent in a binary tree with rank 0 as its root, numbered so that
    /// neighbours in rank are close in the tree: a rank with `k` zeros at its end has its children
    /// `2^(k-1)` below and above.
    Tree {
        /// Workers of the tree.
        workers: u32,
    },
    /// From each worker to the first of its group of consecutive ranks.
    Star {
        /// Workers of a group.
        group: u32,
    },
    /// A ring through the first worker of each group.
    LeaderRing {
        /// Workers of a group.
        group: u32,
        /// Groups.
        groups: u32,
    },
    /// From each client to each server.
    Bipartite(Roles),
}

impl Family {
    /// Where the edges of a rank lead: the definition of the family.
    pub fn targets(self, rank: u32) -> Vec<u32> {
        match self {
            Family::Line(axis) if axis.place(rank) + 1 < axis.length => {
                alloc::vec![rank + axis.stride]
            }
            Family::Line(_) => Vec::new(),
            Family::Ring(axis) if axis.length < 2 => Vec::new(),
            Family::Ring(axis) => {
                let place = axis.place(rank);
                let first = rank - place * axis.stride;
                alloc::vec![first + (place + 1) % axis.length * axis.stride]
            }
            Family::Mesh(axis) => {
                let first = rank - axis.place(rank) * axis.stride;
                let line = (0..axis.length).map(|place| first + place * axis.stride);
                line.filter(|other| *other != rank).collect()
            }
            Family::Tree { workers } => parent(rank, workers).into_iter().collect(),
            Family::Star { group } if rank.is_multiple_of(group) => Vec::new(),
            Family::Star { group } => alloc::vec![rank - rank % group],
            Family::LeaderRing { group, groups } if !rank.is_multiple_of(group) || groups < 2 => {
                Vec::new()
            }
            Family::LeaderRing { group, groups } => {
                alloc::vec![(rank / group + 1) % groups * group]
            }
            Family::Bipartite(roles) if roles.is_server(rank) => Vec::new(),
            Family::Bipartite(roles) => {
                (0..roles.clients + roles.servers).filter(|other| roles.is_server(*other)).collect()
            }
        }
    }

    /// How many edges lead from a rank of `from` to a rank of `to`. Both lie within the ranks of
    /// the job; they may overlap.
    pub fn count(self, from: Run, to: Run) -> u64 {
        if from.is_empty() || to.is_empty() {
            return 0;
        }
        match self {
            Family::Line(axis) => steps(axis, from, to),
            Family::Ring(axis) => ring(axis, from, to),
            Family::Mesh(axis) => {
                let pairs = axis.pairs_below(from.end, to.end)
                    + axis.pairs_below(from.first, to.first)
                    - axis.pairs_below(from.first, to.end)
                    - axis.pairs_below(from.end, to.first);
                pairs - u64::from(from.and(to).len())
            }
            Family::Tree { workers } => to_parents(workers, from, to),
            Family::Star { group } => {
                let leaders = groups_led(group, to);
                let members =
                    from.and(Run::new(leaders.first * group, leaders.end.saturating_mul(group)));
                u64::from(members.len()) - congruent(members, 0, group)
            }
            Family::LeaderRing { group, groups } => {
                let axis = Axis { stride: 1, length: groups };
                ring(axis, groups_led(group, from), groups_led(group, to))
            }
            Family::Bipartite(roles) => roles.clients(from) * roles.servers(to),
        }
    }
}

/// Edges to the next worker of a line.
fn steps(axis: Axis, from: Run, to: Run) -> u64 {
    // The first line's first worker is nobody's next, so `to` may lose it when it moves down.
    let to = Run::new(to.first.max(axis.stride), to.end).down(axis.stride);
    let both = from.and(to);
    u64::from(both.len()) - axis.at_place(both, axis.length - 1)
}

/// Edges of rings: steps, and from each line's last worker to its first.
fn ring(axis: Axis, from: Run, to: Run) -> u64 {
    if axis.length < 2 {
        return 0;
    }
    let closing = from.and(to.up(axis.stride * (axis.length - 1)));
    steps(axis, from, to) + axis.at_place(closing, axis.length - 1)
}

/// The groups whose first worker is in the run.
fn groups_led(group: u32, run: Run) -> Run {
    Run::new(run.first.div_ceil(group), run.end.div_ceil(group))
}

/// The parent of a rank in the tree of [`Family::Tree`].
pub(crate) fn parent(rank: u32, workers: u32) -> Option<u32> {
    let bit = 1_u32.checked_shl(rank.trailing_zeros())?;
    let is_right = rank & (bit << 1) != 0;
    let above = if is_right { rank - bit } else { rank + bit };
    // The last ranks of a tree that is not whole hang from the nearest that is there.
    Some(if above < workers { above } else { rank - bit })
}

/// Edges to parents, by the height of the child.
fn to_parents(workers: u32, from: Run, to: Run) -> u64 {
    let (mut edges, mut bit) = (0, 1);
    while bit < workers {
        let is_above = Run::new(0, workers.saturating_sub(bit));
        let after = Run::new(to.first.max(bit), to.end).down(bit);
        edges += congruent(from.and(is_above).and(after), bit, 4 * bit);
        let before = from.and(to.up(bit));
        edges += congruent(before, 3 * bit, 4 * bit);
        edges += congruent(before.and(Run::new(workers - bit, workers)), bit, 4 * bit);
        bit <<= 1;
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every family with its number of workers, at sizes where their corners lie.
    fn small() -> Vec<(u32, Family)> {
        let mut all = Vec::new();
        let sides = [(1, 1, 1), (1, 2, 3), (2, 2, 2), (3, 2, 2), (1, 5, 2), (2, 1, 4), (4, 3, 1)];
        for (stride, length, blocks) in sides {
            let axis = Axis { stride, length };
            let workers = stride * length * blocks;
            for family in [Family::Line(axis), Family::Ring(axis), Family::Mesh(axis)] {
                all.push((workers, family));
            }
        }
        all.extend((1..18).map(|workers| (workers, Family::Tree { workers })));
        for (group, groups) in [(1, 1), (1, 4), (3, 1), (3, 2), (4, 3), (2, 5)] {
            all.push((group * groups, Family::Star { group }));
            all.push((group * groups, Family::LeaderRing { group, groups }));
        }
        for (clients, servers) in [(1, 1), (5, 2), (2, 5), (8, 1)] {
            for layout in [Layout::Last, Layout::First, Layout::Even] {
                let roles = Roles { clients, servers, layout };
                all.push((clients + servers, Family::Bipartite(roles)));
            }
        }
        all
    }

    #[test]
    fn counts_are_those_of_the_edges_one_by_one() {
        for (workers, family) in small() {
            let runs: Vec<Run> = (0..=workers)
                .flat_map(|first| (first..=workers).map(move |end| Run::new(first, end)))
                .collect();
            for (from, to) in runs.iter().flat_map(|from| runs.iter().map(move |to| (*from, *to))) {
                let targets = (from.first..from.end).flat_map(|rank| family.targets(rank));
                let found = targets.filter(|rank| (to.first..to.end).contains(rank)).count() as u64;
                assert_eq!(family.count(from, to), found, "{family:?} {from:?} {to:?}");
            }
        }
    }

    #[test]
    fn there_are_as_many_servers_as_there_should_be() {
        for (clients, servers) in (1..9).flat_map(|clients| (1..9).map(move |s| (clients, s))) {
            for layout in [Layout::Last, Layout::First, Layout::Even] {
                let roles = Roles { clients, servers, layout };
                let found = (0..clients + servers).filter(|rank| roles.is_server(*rank)).count();
                assert_eq!(found, servers as usize, "{roles:?}");
            }
        }
    }

    #[test]
    fn a_tree_has_one_root_and_a_path_to_it_from_everywhere() {
        for workers in 1..200 {
            for rank in 0..workers {
                let (mut at, mut steps) = (rank, 0);
                while let Some(above) = parent(at, workers) {
                    assert!(above < workers);
                    (at, steps) = (above, steps + 1);
                    assert!(steps <= 2 * workers.ilog2() + 2, "{rank} of {workers}");
                }
                assert_eq!(at, 0);
            }
        }
    }

    #[test]
    fn a_million_workers_do_not_overflow() {
        let most = 1 << 20;
        let (all, axis) = (Run::new(0, most), Axis { stride: 1, length: most });
        assert_eq!(Family::Mesh(axis).count(all, all), u64::from(most) * u64::from(most - 1));
        assert_eq!(Family::Tree { workers: most }.count(all, all), u64::from(most) - 1);
    }
}
