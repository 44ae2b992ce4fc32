//! The channel dependency graph: a packet that holds a buffer at the end of one channel waits for
//! the next of its path.
//!
//! Where it has no cycle, there is no credit loop: no packets that wait for each other's buffers
//! (Dally and Seitz, "Deadlock-free message routing in multiprocessor interconnection networks",
//! 1987).

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// A cycle among dependencies: channels each of which waits for the next, and the last for the
/// first. `next` has, by channel, those that it waits for.
pub fn cycle(next: &[Vec<u32>]) -> Option<Vec<u32>> {
    let mut seen = alloc::vec![Seen::No; next.len()];
    (0..next.len() as u32).find_map(|start| cycle_from(next, &mut seen, start))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    No,
    /// It is on the path that is being followed.
    OnPath,
    /// No cycle is behind it.
    Done,
}

/// A search in depth from one channel.
fn cycle_from(next: &[Vec<u32>], seen: &mut [Seen], start: u32) -> Option<Vec<u32>> {
    if seen[start as usize] != Seen::No {
        return None;
    }
    // Channels of the path, and how many of what each waits for were looked at.
    let mut path = alloc::vec![(start, 0_usize)];
    seen[start as usize] = Seen::OnPath;
    while let Some((at, looked)) = path.last_mut() {
        let Some(&other) = next[*at as usize].get(*looked) else {
            seen[*at as usize] = Seen::Done;
            path.pop();
            continue;
        };
        *looked += 1;
        match seen[other as usize] {
            Seen::Done => {}
            Seen::OnPath => {
                let from = path.iter().position(|(one, _)| *one == other).unwrap_or(0);
                return Some(path[from..].iter().map(|(one, _)| *one).collect());
            }
            Seen::No => {
                seen[other as usize] = Seen::OnPath;
                path.push((other, 0));
            }
        }
    }
    None
}

/// Dependencies of the channels of one lane, without a cycle, and the channels in an order in which
/// each is before those that it waits for.
///
/// The order is mended where a new dependency contradicts it, in the part between its two channels
/// (Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2007).
#[derive(Clone, Debug)]
pub struct Dependencies {
    /// By channel: those that it waits for, and those that wait for it.
    next: Vec<Vec<u32>>,
    previous: Vec<Vec<u32>>,
    /// By channel: its place.
    place: Vec<u32>,
}

impl Dependencies {
    /// Of so many channels, none of which waits for another.
    pub fn new(channels: usize) -> Dependencies {
        Dependencies {
            next: alloc::vec![Vec::new(); channels],
            previous: alloc::vec![Vec::new(); channels],
            place: (0..channels as u32).collect(),
        }
    }

    /// Adds the dependencies of a path, or none of them: whether they close no cycle.
    pub fn add(&mut self, path: &[u32]) -> bool {
        self.add_each(path.windows(2).map(|pair| (pair[0], pair[1])))
    }

    /// Adds dependencies, each of a channel on the next one, or none of them: whether they close no
    /// cycle.
    pub fn add_all(&mut self, turns: &[(u32, u32)]) -> bool {
        self.add_each(turns.iter().copied())
    }

    fn add_each(&mut self, turns: impl Iterator<Item = (u32, u32)>) -> bool {
        let mut added = Vec::new();
        for (from, to) in turns {
            if self.next[from as usize].contains(&to) {
                continue;
            }
            if !self.add_one(from, to) {
                added.iter().for_each(|(from, to)| self.remove(*from, *to));
                return false;
            }
            added.push((from, to));
        }
        true
    }

    fn remove(&mut self, from: u32, to: u32) {
        self.next[from as usize].retain(|one| *one != to);
        self.previous[to as usize].retain(|one| *one != from);
    }

    fn add_one(&mut self, from: u32, to: u32) -> bool {
        let (low, high) = (self.place[to as usize], self.place[from as usize]);
        if high >= low {
            let Some(after) = self.reached(&self.next, to, from, |place| place <= high) else {
                return false;
            };
            // None: it would have been found from the other side.
            let before =
                self.reached(&self.previous, from, to, |place| place >= low).unwrap_or_default();
            self.reorder(before, after);
        }
        self.next[from as usize].push(to);
        self.previous[to as usize].push(from);
        true
    }

    /// The channels that are reached from one, through places that are `within`; `None` if `goal`
    /// is one of them.
    fn reached(
        &self,
        edges: &[Vec<u32>],
        start: u32,
        goal: u32,
        within: impl Fn(u32) -> bool,
    ) -> Option<Vec<u32>> {
        let mut reached = alloc::vec![start];
        let mut marked = BTreeSet::from([start]);
        let mut at = 0;
        while let Some(&one) = reached.get(at) {
            if one == goal {
                return None;
            }
            at += 1;
            for other in &edges[one as usize] {
                if within(self.place[*other as usize]) && marked.insert(*other) {
                    reached.push(*other);
                }
            }
        }
        Some(reached)
    }

    /// Puts those `before` in front of those `after`, at the places that they have now.
    fn reorder(&mut self, mut before: Vec<u32>, mut after: Vec<u32>) {
        let by_place = |place: &Vec<u32>, list: &mut Vec<u32>| {
            list.sort_unstable_by_key(|channel| place[*channel as usize]);
        };
        by_place(&self.place, &mut before);
        by_place(&self.place, &mut after);
        before.append(&mut after);
        let mut places: Vec<u32> =
            before.iter().map(|channel| self.place[*channel as usize]).collect();
        places.sort_unstable();
        for (channel, place) in before.into_iter().zip(places) {
            self.place[channel as usize] = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_pcg::Pcg32;
    use rand_pcg::rand_core::Rng;

    #[test]
    fn a_cycle_is_found_and_named() {
        let next = |edges: &[(u32, u32)]| {
            let of = |from| edges.iter().filter(|edge| edge.0 == from).map(|edge| edge.1).collect();
            (0..6).map(of).collect::<Vec<Vec<u32>>>()
        };
        assert_eq!(cycle(&next(&[(0, 1), (1, 2), (0, 2), (3, 2), (2, 5)])), None);
        assert_eq!(cycle(&next(&[(4, 0), (0, 1), (1, 2), (2, 0)])), Some(alloc::vec![0, 1, 2]));
        assert_eq!(cycle(&next(&[(5, 5)])), Some(alloc::vec![5]));
    }

    #[test]
    fn a_cycle_is_refused_and_leaves_nothing_behind() {
        let mut graph = Dependencies::new(4);
        assert!(graph.add(&[3, 2, 1]) && graph.add(&[1, 0]));
        assert!(!graph.add(&[0, 3]), "0 3 2 1 0");
        assert!(!graph.add(&[2, 0, 3]), "the first half is well, the second is not");
        assert!(!graph.next[2].contains(&0));
        assert!(graph.add(&[3, 0]) && graph.add(&[2, 0]));
    }

    /// Against the obvious way: a dependency closes a cycle if its beginning is reached from its
    /// end.
    #[test]
    fn it_agrees_with_a_search_over_seeds() {
        for seed in 0..300 {
            let mut generator = Pcg32::new(seed, 1);
            let mut graph = Dependencies::new(12);
            let mut edges: Vec<(u32, u32)> = Vec::new();
            for _ in 0..60 {
                let mut any = || generator.next_u32() % 12;
                let (from, to) = (any(), any());
                if from == to || edges.contains(&(from, to)) {
                    continue;
                }
                let mut reached = alloc::vec![to];
                let mut at = 0;
                while let Some(&one) = reached.get(at) {
                    at += 1;
                    let others = edges.iter().filter(|edge| edge.0 == one).map(|edge| edge.1);
                    let new: Vec<u32> = others.filter(|other| !reached.contains(other)).collect();
                    reached.extend(new);
                }
                let closes = reached.contains(&from);
                assert_eq!(graph.add(&[from, to]), !closes, "seed {seed}");
                assert_eq!(cycle(&graph.next), None, "seed {seed}");
                if !closes {
                    edges.push((from, to));
                }
                for (from, to) in &edges {
                    assert!(graph.place[*from as usize] < graph.place[*to as usize], "seed {seed}");
                }
            }
        }
    }
}
