//! Placed jobs that move: away from hosts that are to be empty, or to where they fit.
//!
//! A worker that moves is stopped on one host and started on another, so what a move costs is the
//! number of workers whose host changes, and only then what the new place takes from later jobs
//! ([`cost`]). [`relocate`] leaves as many workers where they are as it can: it moves those that
//! have to leave, and of the others one run after the other, parts of runs, and more of them at
//! random. Only if none of that fits, the whole job is placed anew by the search.
//!
//! It may be stopped after any number of tries, and the same seed and number give the same moves.

use alloc::vec::Vec;

use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

use super::search::{self, Memory};
use super::{Request, cost};
use crate::demand::{Abstraction, Order};
use crate::job::{Job, JobError};
use crate::ledger::{JobId, Ledger, Refusal};
use crate::loads::{Load, Loader, Piece};
use crate::pattern::Pattern;
use crate::runs::Run;

/// Iterations of the search where the whole job is placed anew.
const SEARCH_ITERATIONS: u32 = 300;

/// A job that has a place.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    /// Its number in the ledger.
    pub id: JobId,
    /// Its name; may be empty.
    pub name: &'a str,
    /// The job.
    pub job: &'a Job,
    /// How its links are reserved.
    pub abstraction: Abstraction,
    /// In which order its workers are placed.
    pub order: Order,
    /// Where its workers are.
    pub pieces: &'a [Piece],
}

/// Workers that go from one host to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Their ranks, by the pattern.
    pub ranks: Run,
    /// The host that they leave.
    pub from: u32,
    /// The host that they get.
    pub to: u32,
}

/// A job's new place. The ledger's [`relocate`](Ledger::relocate) carries it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The job.
    pub job: JobId,
    /// In which order its workers are placed now.
    pub order: Order,
    /// Where all its workers are afterwards.
    pub pieces: Vec<Piece>,
    /// Those whose host changes; none where a degraded job is whole again at its old place.
    pub moved: Vec<Moved>,
}

impl Move {
    /// How many workers change their host.
    pub fn workers(&self) -> u32 {
        self.moved.iter().map(|moved| moved.ranks.len()).sum()
    }
}

/// How far to go.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most workers that may change their host, of all jobs together.
    pub most_moved: u32,
    /// Tries for each job that has to move.
    pub tries: u32,
    /// What chance follows from.
    pub seed: u64,
}

/// Why a job does not get another place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stuck {
    /// It would take more moves than may be.
    #[error("{needed} workers would have to move, and {left} more may: allow more moves")]
    Bound {
        /// Workers that would have to move.
        needed: u32,
        /// How many may.
        left: u32,
    },
    /// No hosts were found.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// It is no job.
    #[error(transparent)]
    Job(#[from] JobError),
}

/// Hosts that a job must not have: those of jobs that it is kept apart from, or that are kept apart
/// from it. Where the others are is what the ledger says.
pub fn apart(
    ledger: &Ledger,
    (id, name, job): (JobId, &str, &Job),
    others: &[Standing<'_>],
) -> Vec<u32> {
    let is_apart = |other: &&Standing<'_>| {
        let names = job.separation.names(other.id, other.name);
        other.id != id && (names || other.job.separation.names(id, name))
    };
    let others = others.iter().filter(is_apart);
    let held = others.filter_map(|other| ledger.admissions().get(&other.id));
    held.flat_map(|held| held.pieces.iter().map(|piece| piece.host)).collect()
}

/// The hosts of all workers, by their rank in the pattern.
fn hosts_by_rank(pattern: &Pattern, order: Order, pieces: &[Piece]) -> Vec<u32> {
    let workers = pieces.iter().map(|piece| piece.run.end).max().unwrap_or(0);
    let mut hosts = alloc::vec![u32::MAX; workers as usize];
    for piece in pieces {
        for place in piece.run.first..piece.run.end {
            if let Some(host) = hosts.get_mut(order.rank(pattern, place) as usize) {
                *host = piece.host;
            }
        }
    }
    hosts
}

/// The workers whose hosts differ between two places of a job, in runs of ranks.
pub fn difference(
    pattern: &Pattern,
    before: (Order, &[Piece]),
    after: (Order, &[Piece]),
) -> Vec<Moved> {
    let from = hosts_by_rank(pattern, before.0, before.1);
    let to = hosts_by_rank(pattern, after.0, after.1);
    let mut moved: Vec<Moved> = Vec::new();
    for (rank, (from, to)) in (0..).zip(from.into_iter().zip(to)).filter(|(_, (a, b))| a != b) {
        match moved.last_mut() {
            Some(last) if (last.ranks.end, last.from, last.to) == (rank, from, to) => {
                last.ranks.end += 1;
            }
            _ => moved.push(Moved { ranks: Run::new(rank, rank + 1), from, to }),
        }
    }
    moved
}

/// Another place for a job that the ledger does not hold, with as few workers moved as possible:
/// its own if that fits. Hosts that the request avoids are left.
///
/// # Errors
/// Says what is missing, or that more workers would have to move than may.
pub fn relocate(
    ledger: &Ledger,
    request: &Request,
    standing: &Standing<'_>,
    limits: Limits,
    memory: &mut Memory,
) -> Result<Move, Stuck> {
    let must_leave = |host: u32| request.avoids(host) || ledger.network().is_lost(host);
    let leaving = standing.pieces.iter().filter(|piece| must_leave(piece.host));
    let needed = leaving.map(|piece| piece.run.len()).sum::<u32>();
    if needed > limits.most_moved {
        return Err(Stuck::Bound { needed, left: limits.most_moved });
    }
    let mut shifting = Shifting {
        ledger,
        request,
        standing,
        random: Pcg32::new(limits.seed, 0x5348_4946),
        loader: Loader::new(),
        loads: Vec::new(),
        placed: alloc::vec![0; ledger.network().hosts() as usize],
        best: None,
        most_moved: limits.most_moved,
    };
    for number in 0..limits.tries.max(1) {
        shifting.attempt(number, needed, &must_leave);
        // Nothing moves less, and where nothing moves there is nothing to choose.
        if shifting.best.as_ref().is_some_and(|best| best.0 == 0) {
            break;
        }
    }
    if let Some((_, _, pieces)) = shifting.best {
        let before = (standing.order, standing.pieces);
        let moved = difference(&standing.job.pattern, before, (standing.order, &pieces));
        return Ok(Move { job: standing.id, order: standing.order, pieces, moved });
    }
    anew(ledger, request, standing, limits, memory)
}

/// The whole job at a place that the search finds.
fn anew(
    ledger: &Ledger,
    request: &Request,
    standing: &Standing<'_>,
    limits: Limits,
    memory: &mut Memory,
) -> Result<Move, Stuck> {
    let found = search::place(ledger, request, memory, limits.seed, SEARCH_ITERATIONS)?;
    let before = (standing.order, standing.pieces);
    let moved = difference(&standing.job.pattern, before, (found.order, &found.pieces));
    let found = Move { job: standing.id, order: found.order, pieces: found.pieces, moved };
    let (needed, left) = (found.workers(), limits.most_moved);
    if needed > left { Err(Stuck::Bound { needed, left }) } else { Ok(found) }
}

/// Tries that move some workers of a job and leave the others.
struct Shifting<'a> {
    ledger: &'a Ledger,
    request: &'a Request,
    standing: &'a Standing<'a>,
    random: Pcg32,
    loader: Loader,
    loads: Vec<Load>,
    /// By host: workers that a try has placed there.
    placed: Vec<u32>,
    /// Workers moved, cost, and the place.
    best: Option<(u32, u64, Vec<Piece>)>,
    most_moved: u32,
}

impl Shifting<'_> {
    fn below(&mut self, below: usize) -> usize {
        self.random.next_u32() as usize % below.max(1)
    }

    /// One try: first with those alone that must leave, then with one piece more after the other,
    /// then at random.
    fn attempt(&mut self, number: u32, needed: u32, must_leave: &dyn Fn(u32) -> bool) {
        let pieces = self.standing.pieces;
        let (mut staying, mut leaving): (Vec<Piece>, Vec<Piece>) =
            pieces.iter().partition(|piece| !must_leave(piece.host));
        // If some have to leave, every second try moves no others.
        let more = number.checked_sub(1).filter(|_| needed == 0 || number % 2 == 1);
        if let Some(more) = more.filter(|_| self.most_useful(needed) > needed) {
            let at = if needed == 0 { more } else { more / 2 } as usize;
            if at < staying.len() {
                leaving.push(staying.remove(at));
            } else {
                for _ in 0..1 + self.below(3) {
                    self.take_some(&mut staying, &mut leaving);
                }
            }
        }
        let moved: u32 = leaving.iter().map(|piece| piece.run.len()).sum();
        if moved <= self.most_useful(needed) && self.settle(&mut staying, &leaving, number == 0) {
            self.judge(staying, moved);
        }
    }

    /// The most workers that a try may move to be of use.
    fn most_useful(&self, needed: u32) -> u32 {
        let best = self.best.as_ref().map_or(u32::MAX, |(moved, ..)| *moved);
        best.min(self.most_moved).max(needed)
    }

    /// Takes a piece, or a part of one, away from those that stay.
    fn take_some(&mut self, staying: &mut Vec<Piece>, leaving: &mut Vec<Piece>) {
        if staying.is_empty() {
            return;
        }
        let at = self.below(staying.len());
        let piece = staying[at];
        let count = match self.below(3) {
            0 => piece.run.len(),
            1 => 1,
            _ => 1 + self.below(piece.run.len() as usize) as u32,
        };
        if count == piece.run.len() {
            leaving.push(staying.swap_remove(at));
            return;
        }
        let cut = match self.below(2) {
            0 => piece.run.first + count,
            _ => piece.run.end - count,
        };
        let (low, high) = (Run::new(piece.run.first, cut), Run::new(cut, piece.run.end));
        let (left, kept) = if low.len() == count { (low, high) } else { (high, low) };
        leaving.push(Piece { run: left, ..piece });
        staying[at].run = kept;
    }

    /// Gives each run that leaves a host, or several; `false` if some worker finds none.
    fn settle(&mut self, placed: &mut Vec<Piece>, leaving: &[Piece], is_first: bool) -> bool {
        self.placed.fill(0);
        for piece in placed.iter() {
            self.placed[piece.host as usize] += piece.run.len();
        }
        for piece in leaving {
            let mut run = piece.run;
            while !run.is_empty() {
                let Some((host, room)) = self.host_for(placed, piece.host, run.len(), is_first)
                else {
                    return false;
                };
                let most = room.min(run.len());
                let count = match is_first || self.below(4) > 0 {
                    true => most,
                    false => 1 + self.below(most as usize) as u32,
                };
                placed.push(Piece { host, run: Run::new(run.first, run.first + count) });
                self.placed[host as usize] += count;
                run.first += count;
            }
        }
        true
    }

    /// Workers that a host can get beside those that are placed already.
    fn room(&self, host: u32) -> u32 {
        match self.ledger.network().is_lost(host) {
            true => 0,
            false => {
                let own = self.placed[host as usize];
                self.request.room(self.ledger, host).saturating_sub(own)
            }
        }
    }

    /// A host other than the one that is left, and its room: the closest that holds all, or at
    /// random a close or any one.
    fn host_for(
        &mut self,
        placed: &[Piece],
        left: u32,
        count: u32,
        is_first: bool,
    ) -> Option<(u32, u32)> {
        let groups = self.ledger.network().groups();
        let hosts = groups.hosts().len();
        if !is_first {
            for _ in 0..8 {
                let host = match self.below(4) {
                    0 if !placed.is_empty() => placed[self.below(placed.len())].host,
                    0 | 1 => {
                        let near = if placed.is_empty() {
                            left
                        } else {
                            placed[self.below(placed.len())].host
                        };
                        let beside = groups.hosts_of(groups.parent(near));
                        beside.start + self.below(beside.len()) as u32
                    }
                    _ => self.below(hosts) as u32,
                };
                let room = self.room(host);
                if host != left && room > 0 {
                    return Some((host, room));
                }
            }
        }
        // Around the host that is left, level by level: the tightest that holds all, or else the
        // emptiest.
        let mut around = left;
        while around != groups.root() {
            around = groups.parent(around);
            let rooms = groups.hosts_of(around).filter(|host| *host != left);
            let rooms = rooms.map(|host| (host, self.room(host))).filter(|(_, room)| *room > 0);
            let by_fit = |(host, room): &(u32, u32)| match *room {
                room if room >= count => (0, room, *host),
                room => (1, u32::MAX - room, *host),
            };
            let best = rooms.min_by_key(by_fit);
            if best.is_some_and(|(_, room)| room >= count) || around == groups.root() {
                return best;
            }
        }
        None
    }

    /// Keeps a place if its links hold it and it is better than the best.
    fn judge(&mut self, mut pieces: Vec<Piece>, moved: u32) {
        pieces.sort_unstable_by_key(|piece| piece.run);
        pieces.dedup_by(|next, piece| {
            let follows = (next.host, next.run.first) == (piece.host, piece.run.end);
            if follows {
                piece.run.end = next.run.end;
            }
            follows
        });
        if !self.request.fits_slots(self.ledger, &pieces) {
            return;
        }
        let demand = self.request.demand(self.standing.order);
        let (network, abstraction) = (self.ledger.network(), self.request.abstraction());
        self.loader.loads(network, demand, abstraction, &pieces, &mut self.loads);
        let slots = self.request.slots_per_worker();
        let Some(cost) = cost(self.ledger, slots, &pieces, &self.loads) else { return };
        if self.best.as_ref().is_none_or(|best| (moved, cost) < (best.0, best.1)) {
            self.best = Some((moved, cost, pieces));
        }
    }
}

/// What a plan of moves leads to.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The ledger afterwards.
    pub ledger: Ledger,
    /// Moves, in an order in which each fits: what a job leaves is free for the next, and not
    /// before.
    pub steps: Vec<Move>,
    /// Jobs that should have moved and could not; they are where they were.
    pub stuck: Vec<(JobId, Stuck)>,
}

impl Plan {
    /// How many workers change their host.
    pub fn workers_moved(&self) -> u32 {
        self.steps.iter().map(Move::workers).sum()
    }
}

/// Takes a job out of the ledger and puts it where `choose` says.
///
/// # Errors
/// As of `choose`, or when the ledger refuses; then the job is where it was.
fn migrate(
    ledger: &mut Ledger,
    standing: &Standing<'_>,
    request: &Request,
    choose: impl FnOnce(&Ledger) -> Result<Move, Stuck>,
) -> Result<Move, Stuck> {
    let mut without = ledger.clone();
    without.release(standing.id)?;
    let step = choose(&without)?;
    let (demand, slots) = (request.demand(step.order), request.slots_per_worker());
    without.admit(standing.id, demand, slots, standing.abstraction, &step.pieces)?;
    *ledger = without;
    Ok(step)
}

/// Moves all workers away from hosts, as before these are serviced. Jobs without workers there are
/// not moved, and of others as few workers as possible. Jobs with the fewest workers there go
/// first.
pub fn drain(ledger: &Ledger, standings: &[Standing<'_>], hosts: &[u32], limits: Limits) -> Plan {
    let there = |standing: &Standing<'_>| -> u32 {
        let own = standing.pieces.iter().filter(|piece| hosts.contains(&piece.host));
        own.map(|piece| piece.run.len()).sum()
    };
    let mut leaving: Vec<&Standing<'_>> =
        standings.iter().filter(|standing| there(standing) > 0).collect();
    leaving.sort_by_key(|standing| (there(standing), standing.id));
    let mut plan = Plan { ledger: ledger.clone(), steps: Vec::new(), stuck: Vec::new() };
    let (mut memory, mut left) = (Memory::new(), limits.most_moved);
    for standing in leaving {
        let own = Limits { most_moved: left, ..limits };
        let others = apart(&plan.ledger, (standing.id, standing.name, standing.job), standings);
        let avoided = hosts.iter().copied().chain(others);
        let step = match Request::new(standing.job, standing.abstraction) {
            Ok(request) => {
                let request = request.avoiding(avoided);
                let choose =
                    |without: &Ledger| relocate(without, &request, standing, own, &mut memory);
                migrate(&mut plan.ledger, standing, &request, choose)
            }
            Err(error) => Err(error.into()),
        };
        match step {
            Ok(step) => {
                left -= step.workers();
                plan.steps.push(step);
            }
            Err(why) => plan.stuck.push((standing.id, why)),
        }
    }
    plan
}
