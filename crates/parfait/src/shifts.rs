//! Time shifts: jobs whose exchanges take turns on the links that they share.
//!
//! A training job computes and exchanges in turn, with a period. Two jobs that meet on a link at
//! the same time slow each other down; if one begins later, they may not meet at all. The idea is
//! that of CASSINI (Rajasekaran et al., NSDI 2024): a job's demand is drawn on a circle whose
//! circumference is its period, all jobs of a link on one circle whose circumference is the least
//! common multiple of their periods, and turned against each other such that least of the demand is
//! above what the link carries. That least part is the link's *excess*.
//!
//! - Jobs and the links that they share are the *affinity graph*, and a job has one shift for all
//!   its links. Where the graph has no circle, each link is solved alone and turned as a whole to
//!   fit its neighbours, which changes no excess: what is best for each link is best for all. Where
//!   it has one, all jobs of the part are turned together.
//! - The circle is divided into slots, so that periods have a common multiple. A period is rounded
//!   up to a slot, since an agent can make a job wait and not hurry; [`Shifts::stretch_ppm`] says
//!   by how much. A burst takes every slot that it touches, so the true excess is never above what
//!   is said.
//! - All shifts in slots are tried where these are few ([`Part::is_exact`]); otherwise jobs are
//!   turned one at a time, from several beginnings, until none improves or what looking for it may
//!   cost ([`Limits`]) is spent.
//! - Of shifts with the same excess the one with most distance between bursts is taken, so that
//!   drift does no harm.
//! - A part of the graph that is too large, or whose periods have no common circle, is left alone
//!   ([`Left`]).
//! - Jobs drift: compute times vary. An agent lets a job's exchange begin at `shift + n * period`
//!   and no sooner; one that is later by more than the [`TOLERANCE_PARTS`]th part of its period
//!   waits for its next time, so that it does not meet the others.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use thiserror::Error;

/// Longest period: a minute.
pub const MAX_PERIOD_NS: u64 = 60_000_000_000;

/// A job that is later than its time by this part of its period waits for the next one.
pub const TOLERANCE_PARTS: u64 = 20;

/// Slots of the shortest period, at least and at most.
const SLOTS: (u64, u64) = (12, 240);

/// What finding shifts may cost. Slots are those of one job on one link that are looked at once:
/// about a nanosecond each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most jobs of a part.
    pub jobs: usize,
    /// Most links of a part.
    pub links: usize,
    /// Most jobs of all parts that are not left alone.
    pub all_jobs: usize,
    /// Most slots of a circle.
    pub circle: u64,
    /// By how much a period may be lengthened, in parts per million.
    pub stretch_ppm: u64,
    /// Slots to try everything on a link, or in a part that is solved as a whole.
    pub exhaustive: u64,
    /// Slots in all; every part may have the same number of them.
    pub slots: u64,
}

impl Limits {
    /// For people who wait for the answer: seconds, where there are many jobs.
    pub const AMPLE: Limits = Limits {
        jobs: 256,
        links: 1_024,
        all_jobs: 1_024,
        circle: 1 << 14,
        stretch_ppm: 1_000_000,
        exhaustive: 24_000_000,
        slots: 1 << 33,
    };

    /// Whether a part may have so many jobs and links.
    fn admit(&self, jobs: &[usize], links: &[usize]) -> bool {
        jobs.len() <= self.jobs && links.len() <= self.links
    }
}

/// Beginnings of the search where not everything is tried: the best of the coarse places, or as
/// many even ones.
const BEGINNINGS: usize = 8;

/// Parts of a period by which bursts are widened to tell shifts of equal excess apart.
const GUARD_PARTS: [u64; 5] = [48, 24, 12, 8, 6];

/// Demands of a job on a link: as they are, and with bursts that are longer by each of
/// [`GUARD_PARTS`].
const LEVELS: u64 = 1 + GUARD_PARTS.len() as u64;

/// Places of each job that are tried together to begin the search, the most that is affordable.
const COARSE: [u64; 5] = [24, 12, 8, 4, 2];

/// How often a circle can be looked at, at least: a shorter one is taken otherwise.
const MIN_LOOKS: u64 = 64;

/// What looking at a job on a link costs besides its slots.
const LOOK_SLOTS: u64 = 32;

/// A time in each period at which a job sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    /// When it begins, in a period; below that.
    pub start_ns: u64,
    /// How long it lasts, 1 to the period; it may go on in the next period.
    pub length_ns: u64,
    /// Bits per second on the link.
    pub bps: u64,
}

/// What a job does on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The job, by its place.
    pub job: usize,
    /// When it sends, and how much.
    pub bursts: Vec<Burst>,
}

/// A link that jobs share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Bits per second that it carries.
    pub capacity_bps: u64,
    /// Its jobs, each once.
    pub uses: Vec<Use>,
}

/// Why there are no shifts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ShiftError {
    /// A period is 0 or too long.
    #[error("job {job}: its period is {period_ns} ns; there can be 1 to {MAX_PERIOD_NS}")]
    Period {
        /// The job, by its place.
        job: usize,
        /// Its period.
        period_ns: u64,
    },
    /// A burst does not fit the period, or has no rate.
    #[error(
        "job {job}: a burst has to begin within its period, end within another, and have a rate"
    )]
    Burst {
        /// The job, by its place.
        job: usize,
    },
    /// A link names a job that is not there, or one twice.
    #[error("link {link} names job {job}, which is not there, or twice")]
    Job {
        /// The link, by its place.
        link: usize,
        /// The job, by its place.
        job: usize,
    },
    /// A link carries nothing.
    #[error("link {0} carries 0 bit/s")]
    Capacity(usize),
}

/// Why a part of the graph is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LeftAlone {
    /// Periods have no common multiple that is short enough.
    #[error("their periods have no common multiple, unless one is lengthened by too much")]
    NoCircle,
    /// It has too many jobs or links.
    #[error("{jobs} jobs on {links} links are too many")]
    TooLarge {
        /// How many jobs.
        jobs: usize,
        /// How many links.
        links: usize,
    },
    /// Too many jobs of other parts came before.
    #[error("too many other jobs have shifts")]
    Crowded,
}

/// What a link has of its shifts, in parts per million of what it carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    /// Demand above that if no job is shifted.
    pub before_ppm: u64,
    /// With the shifts.
    pub after_ppm: u64,
}

/// Jobs that share links with each other, and with no others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The jobs, by their places.
    pub jobs: Vec<usize>,
    /// The links, by their places.
    pub links: Vec<usize>,
    /// A slot of their circle.
    pub slot_ns: u64,
    /// How long the circle is.
    pub circle_ns: u64,
    /// Whether no other shifts in slots have less excess.
    pub is_exact: bool,
}

/// Jobs that share links and are not shifted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The jobs, by their places.
    pub jobs: Vec<usize>,
    /// Why.
    pub why: LeftAlone,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shifts {
    /// By job: by how much it begins later, below its period.
    pub shift_ns: Vec<u64>,
    /// By job: its period, rounded up.
    pub period_ns: Vec<u64>,
    /// By link; `None` where its jobs are left alone.
    pub links: Vec<Option<Excess>>,
    /// Jobs that share links.
    pub parts: Vec<Part>,
    /// Those that are left alone.
    pub left: Vec<Left>,
}

impl Shifts {
    /// By how much a job's period is longer than it was, in parts per million.
    pub fn stretch_ppm(&self, job: usize, period_ns: u64) -> u64 {
        let longer = self.period_ns[job].saturating_sub(period_ns);
        (u128::from(longer) * 1_000_000 / u128::from(period_ns.max(1))) as u64
    }
}

/// Shifts for jobs with these periods, in nanoseconds, on the links that they share. Where there
/// are more jobs than there may be, parts with a job of a low place come first.
///
/// # Errors
/// When a job or link is impossible.
pub fn plan(periods: &[u64], links: &[Shared], limits: &Limits) -> Result<Shifts, ShiftError> {
    check(periods, links)?;
    let mut shifts = Shifts {
        shift_ns: alloc::vec![0; periods.len()],
        period_ns: periods.to_vec(),
        links: alloc::vec![None; links.len()],
        parts: Vec::new(),
        left: Vec::new(),
    };
    let mut parts = parts(periods.len(), links);
    let (mut all, mut crowded) = (0, Vec::new());
    parts.retain_mut(|(jobs, own)| {
        // What is left alone anyway takes no room from others.
        let taken = if limits.admit(jobs, own) { jobs.len() } else { 0 };
        let has_room = all + taken <= limits.all_jobs;
        match has_room {
            true => all += taken,
            false => crowded.push(core::mem::take(jobs)),
        }
        has_room
    });
    shifts.left.extend(crowded.into_iter().map(|jobs| Left { jobs, why: LeftAlone::Crowded }));
    // In steps, so that few parts get other shifts when one comes or goes. Parts that are too large
    // need none.
    let solved = parts.iter().filter(|(jobs, own)| limits.admit(jobs, own)).count() as u64;
    let slots = limits.slots / solved.max(1).next_power_of_two();
    for (jobs, own) in parts {
        let solved = solve_part(periods, &jobs, links, &own, &Limits { slots, ..*limits });
        let Solved { circle, found, excesses, is_exact } = match solved {
            Ok(solved) => solved,
            Err(why) => {
                shifts.left.push(Left { jobs, why });
                continue;
            }
        };
        own.iter().zip(excesses).for_each(|(&link, excess)| shifts.links[link] = Some(excess));
        for (at, &job) in jobs.iter().enumerate() {
            let slots = circle.period(at);
            shifts.shift_ns[job] = found[at] % slots * circle.slot_ns;
            shifts.period_ns[job] = slots * circle.slot_ns;
        }
        let (slot_ns, circle_ns) = (circle.slot_ns, circle.length() * circle.slot_ns);
        shifts.parts.push(Part { jobs, links: own, slot_ns, circle_ns, is_exact });
    }
    Ok(shifts)
}

/// A part with its shifts, in slots.
struct Solved {
    circle: Circle,
    found: Vec<u64>,
    /// By link of the part.
    excesses: Vec<Excess>,
    is_exact: bool,
}

fn solve_part(
    periods: &[u64],
    jobs: &[usize],
    links: &[Shared],
    own: &[usize],
    limits: &Limits,
) -> Result<Solved, LeftAlone> {
    let too_large = LeftAlone::TooLarge { jobs: jobs.len(), links: own.len() };
    if !limits.admit(jobs, own) {
        return Err(too_large);
    }
    let edges: usize = own.iter().map(|link| links[*link].uses.len()).sum();
    // A circle that is looked at often enough.
    let look = limits.slots / MIN_LOOKS / LEVELS;
    let most = (look / edges.max(1) as u64).saturating_sub(LOOK_SLOTS).min(limits.circle);
    if most < SLOTS.0 {
        return Err(too_large);
    }
    let periods: Vec<u64> = jobs.iter().map(|&job| periods[job]).collect();
    let circle = Circle::of(&periods, &Limits { circle: most, ..*limits });
    let circle = circle.ok_or(LeftAlone::NoCircle)?;
    let place = |used: &Use| jobs.binary_search(&used.job).unwrap_or(0);
    let places = |link: &usize| links[*link].uses.iter().map(place).collect::<Vec<usize>>();
    let places = own.iter().map(places);
    let draw = |(&link, jobs)| circle.draw(&links[link], jobs);
    let drawn: Vec<Drawn> = own.iter().zip(places).map(draw).collect();
    let mut search = Search { circle: &circle, exhaustive: limits.exhaustive, left: limits.slots };
    let (found, is_exact) = search.solve(&drawn, jobs.len());
    let zero = alloc::vec![0; jobs.len()];
    let excess = |link: &Drawn| Excess {
        before_ppm: link.above(0, &zero),
        after_ppm: link.above(0, &found),
    };
    let excesses = drawn.iter().map(excess).collect();
    Ok(Solved { circle, found, excesses, is_exact })
}

fn check(periods: &[u64], links: &[Shared]) -> Result<(), ShiftError> {
    for (job, &period_ns) in periods.iter().enumerate() {
        if period_ns == 0 || period_ns > MAX_PERIOD_NS {
            return Err(ShiftError::Period { job, period_ns });
        }
    }
    for (link, shared) in links.iter().enumerate() {
        if shared.capacity_bps == 0 {
            return Err(ShiftError::Capacity(link));
        }
        let mut seen = BTreeSet::new();
        for Use { job, bursts } in &shared.uses {
            let period = periods.get(*job).filter(|_| seen.insert(*job));
            let period = *period.ok_or(ShiftError::Job { link, job: *job })?;
            let fits = |burst: &Burst| {
                burst.start_ns < period && (1..=period).contains(&burst.length_ns) && burst.bps > 0
            };
            if !bursts.iter().all(fits) {
                return Err(ShiftError::Burst { job: *job });
            }
        }
    }
    Ok(())
}

/// The connected parts of the affinity graph with links in them: their jobs and links, in order.
fn parts(jobs: usize, links: &[Shared]) -> Vec<(Vec<usize>, Vec<usize>)> {
    let mut root_of: Vec<usize> = (0..jobs).collect();
    for pair in links.iter().flat_map(|shared| shared.uses.windows(2)) {
        let [a, b] = [pair[0].job, pair[1].job].map(|job| root(&mut root_of, job));
        root_of[a.max(b)] = a.min(b);
    }
    // The root of a part is its first job.
    let mut found: BTreeMap<usize, (Vec<usize>, Vec<usize>)> = BTreeMap::new();
    for (link, shared) in links.iter().enumerate() {
        if let Some(used) = shared.uses.first() {
            found.entry(root(&mut root_of, used.job)).or_default().1.push(link);
        }
    }
    for job in 0..jobs {
        if let Some(part) = found.get_mut(&root(&mut root_of, job)) {
            part.0.push(job);
        }
    }
    found.into_values().collect()
}

/// The job that stands for the part of this one; ways there get shorter.
fn root(root_of: &mut [usize], mut job: usize) -> usize {
    while root_of[job] != job {
        root_of[job] = root_of[root_of[job]];
        job = root_of[job];
    }
    job
}

/// The slots of a part's jobs.
struct Circle {
    slot_ns: u64,
    /// By job: slots of its period.
    periods: Vec<u64>,
    /// Most slots that a circle may have.
    most: u64,
}

impl Circle {
    /// The one that lengthens periods least, and of these the finest.
    fn of(periods: &[u64], limits: &Limits) -> Option<Circle> {
        let shortest = periods.iter().copied().min()?;
        let most_stretch = limits.stretch_ppm.saturating_mul(1_000);
        let mut best: Option<(u64, Circle)> = None;
        for slots in (SLOTS.0..=SLOTS.1).rev() {
            let slot_ns = shortest.div_ceil(slots);
            let rounded = periods.iter().map(|period| period.div_ceil(slot_ns)).collect();
            let circle = Circle { slot_ns, periods: rounded, most: limits.circle };
            let is_short = circle.periods.iter().all(|slots| slots * slot_ns <= MAX_PERIOD_NS);
            let stretch = |(slots, period): (&u64, &u64)| {
                let longer = slots * slot_ns - period;
                (u128::from(longer) * 1_000_000_000 / u128::from(*period)) as u64
            };
            let worst = circle.periods.iter().zip(periods).map(stretch).max()?;
            let is_better = best.as_ref().is_none_or(|(least, _)| worst < *least);
            let is_even = is_short && worst <= most_stretch;
            if is_even && is_better && circle.length() <= limits.circle {
                best = Some((worst, circle));
            }
        }
        best.map(|(_, circle)| circle)
    }

    fn period(&self, job: usize) -> u64 {
        self.periods[job]
    }

    /// Slots after which all jobs begin anew; more than there can be if that is not a number.
    fn length(&self) -> u64 {
        self.periods.iter().fold(1, |length, &period| common(length, period, self.most))
    }

    /// The same for some jobs.
    fn length_of(&self, jobs: &[usize]) -> u64 {
        jobs.iter().fold(1, |length, &job| common(length, self.period(job), self.most))
    }

    fn draw(&self, link: &Shared, jobs: Vec<usize>) -> Drawn {
        let length = self.length_of(&jobs);
        let most = |used: &Use| used.bursts.iter().map(|burst| u128::from(burst.bps)).max();
        let most: u128 = link.uses.iter().filter_map(most).sum();
        // No sum over the circle overflows: rates of this world are counted exactly.
        let bits = (most * u128::from(length)).checked_ilog2().map_or(0, |bits| bits + 1);
        let unit = 1_u64 << bits.saturating_sub(62).min(63);
        let level = |parts: u64| {
            let demand = |(used, &job): (&Use, &usize)| {
                let period = self.period(job);
                self.demand(used, period, period.checked_div(parts).unwrap_or(0), unit)
            };
            link.uses.iter().zip(&jobs).map(demand).collect()
        };
        let levels = core::iter::once(0).chain(GUARD_PARTS).map(level).collect();
        Drawn { length, capacity: link.capacity_bps / unit, levels, jobs }
    }

    /// By slot of the period: the most that a job sends, with bursts that are longer by so many
    /// slots at either end.
    fn demand(&self, used: &Use, period: u64, guard: u64, unit: u64) -> Vec<u64> {
        let mut demand = alloc::vec![0; period as usize];
        for burst in &used.bursts {
            let first = burst.start_ns / self.slot_ns + period - guard.min(period);
            let end = (burst.start_ns + burst.length_ns).div_ceil(self.slot_ns) + guard + period;
            for slot in first..end.min(first + period) {
                let place = &mut demand[(slot % period) as usize];
                *place = (*place).max(burst.bps.div_ceil(unit));
            }
        }
        demand
    }
}

/// The least common multiple, or `most` + 1 if it is larger than that.
fn common(a: u64, b: u64, most: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b).min(most + 1)
}

/// A link with the demands of its jobs, in slots.
struct Drawn {
    jobs: Vec<usize>,
    length: u64,
    capacity: u64,
    /// By [level](LEVELS), job and slot.
    levels: Vec<Vec<Vec<u64>>>,
}

impl Drawn {
    /// By slot: what all of some jobs send together. Each is turned to the right by its shift.
    fn sum<'a>(&self, turned: impl Iterator<Item = (&'a Vec<u64>, u64)>) -> Vec<u64> {
        let mut sum = alloc::vec![0_u64; self.length as usize];
        for (demand, shift) in turned {
            let at = shift as usize % demand.len();
            let (first, last) = demand.split_at(demand.len() - at);
            for block in sum.chunks_exact_mut(demand.len()) {
                let (head, tail) = block.split_at_mut(at);
                let pairs = head.iter_mut().zip(last).chain(tail.iter_mut().zip(first));
                pairs.for_each(|(sum, own)| *sum += own);
            }
        }
        sum
    }

    /// Demand of a level above what the link carries with these shifts in slots, by job, in parts
    /// per million of that.
    fn above(&self, level: usize, shifts: &[u64]) -> u64 {
        let turned = self.levels[level].iter().zip(&self.jobs);
        let sum = self.sum(turned.map(|(demand, &job)| (demand, shifts[job])));
        self.ppm(sum.iter().map(|all| all.saturating_sub(self.capacity)).sum())
    }

    fn ppm(&self, above: u64) -> u64 {
        let whole = u128::from(self.capacity) * u128::from(self.length);
        u64::try_from(u128::from(above) * 1_000_000 / whole.max(1)).unwrap_or(u64::MAX)
    }

    /// What one look at a level costs.
    fn look(&self) -> u64 {
        (self.length + LOOK_SLOTS) * self.jobs.len() as u64
    }
}

/// A job that is turned while the others on a link stay.
struct Turning<'a> {
    link: &'a Drawn,
    /// By level: what the others send, and what the job does.
    levels: Vec<(Vec<u64>, &'a Vec<u64>)>,
}

impl<'a> Turning<'a> {
    fn new(link: &'a Drawn, job: usize, shifts: &[u64]) -> Option<Turning<'a>> {
        let own = link.jobs.iter().position(|other| *other == job)?;
        let level = |demands: &'a Vec<Vec<u64>>| {
            let others = demands.iter().zip(&link.jobs).filter(|(_, other)| **other != job);
            (link.sum(others.map(|(demand, &other)| (demand, shifts[other]))), &demands[own])
        };
        Some(Turning { link, levels: link.levels.iter().map(level).collect() })
    }

    fn above(&self, level: usize, shift: u64) -> u64 {
        let (others, own) = &self.levels[level];
        let at = shift as usize % own.len();
        let (first, last) = own.split_at(own.len() - at);
        let capacity = self.link.capacity;
        let over = |(a, b): (&u64, &u64)| (a + b).saturating_sub(capacity);
        let mut above = 0;
        for block in others.chunks_exact(own.len()) {
            let (head, tail) = block.split_at(at);
            above += head.iter().zip(last).map(over).sum::<u64>();
            above += tail.iter().zip(first).map(over).sum::<u64>();
        }
        self.link.ppm(above)
    }
}

/// The best shifts so far.
struct Best {
    excess: u64,
    closeness: u64,
    shifts: Vec<u64>,
}

/// Looks for the shifts of a part.
struct Search<'a> {
    circle: &'a Circle,
    exhaustive: u64,
    /// Slots that may still be looked at.
    left: u64,
}

impl Search<'_> {
    /// Shifts in slots, by job, and whether none are better.
    fn solve(&mut self, links: &[Drawn], jobs: usize) -> (Vec<u64>, bool) {
        let edges: usize = links.iter().map(|link| link.jobs.len()).sum();
        // A tree of jobs and links has one edge less than it has nodes.
        if edges + 1 == jobs + links.len() {
            return self.along_tree(links, jobs);
        }
        let all: Vec<&Drawn> = links.iter().collect();
        let jobs: Vec<usize> = (0..jobs).collect();
        self.turn(&all, &jobs, &alloc::vec![0; jobs.len()])
    }

    /// Solves each link alone, and turns each to agree with the one by which it was reached.
    fn along_tree(&mut self, links: &[Drawn], count: usize) -> (Vec<u64>, bool) {
        let mut shifts: Vec<Option<u64>> = alloc::vec![None; count];
        let mut left: Vec<&Drawn> = links.iter().collect();
        let mut is_exact = true;
        if let Some(first) = shifts.first_mut() {
            *first = Some(0);
        }
        while !left.is_empty() {
            let known = |link: &&Drawn| link.jobs.iter().any(|&job| shifts[job].is_some());
            let Some(place) = left.iter().position(known) else { break };
            let share = self.left / left.len() as u64;
            let link = left.swap_remove(place);
            let (own, is_best) =
                self.within(share, |own| own.turn(&[link], &link.jobs, &alloc::vec![0; count]));
            is_exact &= is_best;
            let anchor = link.jobs.iter().find_map(|&job| Some((job, shifts[job]?)));
            let Some((anchor, at)) = anchor else { break };
            for &job in &link.jobs {
                // By how much the whole link is turned: a multiple of the anchor's period more
                // changes nothing for it.
                let turned = at + self.circle.length() - own[anchor] % self.circle.period(anchor);
                shifts[job] = shifts[job].or(Some((own[job] + turned) % self.circle.period(job)));
            }
        }
        (shifts.into_iter().map(|shift| shift.unwrap_or(0)).collect(), is_exact)
    }

    /// Does something with a share of the slots that are left.
    fn within<T>(&mut self, share: u64, run: impl FnOnce(&mut Self) -> T) -> T {
        let rest = self.left - share.min(self.left);
        self.left -= rest;
        let done = run(self);
        self.left += rest;
        done
    }

    fn total(&mut self, links: &[&Drawn], shifts: &[u64]) -> u64 {
        self.left = self.left.saturating_sub(links.iter().map(|link| link.look()).sum());
        links.iter().map(|link| link.above(0, shifts)).fold(0, u64::saturating_add)
    }

    fn closeness(&mut self, links: &[&Drawn], shifts: &[u64]) -> u64 {
        let look: u64 = links.iter().map(|link| link.look()).sum();
        self.left = self.left.saturating_sub(look * (LEVELS - 1));
        let levels = |link: &&Drawn| {
            (1..LEVELS as usize).map(|level| link.above(level, shifts)).fold(0, u64::saturating_add)
        };
        links.iter().map(levels).fold(0, u64::saturating_add)
    }

    fn best(&mut self, links: &[&Drawn], shifts: Vec<u64>) -> Best {
        let excess = self.total(links, &shifts);
        Best { excess, closeness: self.closeness(links, &shifts), shifts }
    }

    /// Takes shifts that are better.
    fn offer(&mut self, best: &mut Best, links: &[&Drawn], shifts: &[u64]) {
        let excess = self.total(links, shifts);
        if excess > best.excess {
            return;
        }
        let closeness = self.closeness(links, shifts);
        if (excess, closeness) < (best.excess, best.closeness) {
            *best = Best { excess, closeness, shifts: shifts.to_vec() };
        }
    }

    /// Turns all jobs but the first against it.
    fn turn(&mut self, links: &[&Drawn], jobs: &[usize], zero: &[u64]) -> (Vec<u64>, bool) {
        let circle = self.circle;
        let others = jobs.get(1..).unwrap_or(&[]);
        let look: u64 = links.iter().map(|link| link.look()).sum();
        let affordable = |levels: u64, places: &dyn Fn(usize) -> u64| {
            let ways = others.iter().fold(1_u64, |ways, &job| ways.saturating_mul(places(job)));
            ways.saturating_mul(look * levels) <= self.exhaustive.min(self.left / 2)
        };
        let is_small = affordable(LEVELS, &|job| circle.period(job));
        let coarse = COARSE.into_iter().find(|&places| affordable(1, &|_| places));
        let mut best = self.best(links, zero.to_vec());
        if is_small {
            each(circle, others, zero, u64::MAX, |shifts| self.offer(&mut best, links, shifts));
            return (best.shifts, true);
        }
        let mut beginnings: Vec<(u64, Vec<u64>)> = Vec::new();
        match coarse {
            Some(places) => each(circle, others, zero, places, |shifts| {
                beginnings.push((self.total(links, shifts), shifts.to_vec()));
                if beginnings.len() > 64 * BEGINNINGS {
                    beginnings.sort_unstable();
                    beginnings.truncate(BEGINNINGS);
                }
            }),
            None => beginnings.extend((0..BEGINNINGS as u64).map(|beginning| {
                let mut shifts = zero.to_vec();
                for (place, &job) in (1_u64..).zip(others) {
                    let step = beginning * place % BEGINNINGS as u64;
                    shifts[job] = circle.period(job) * step / BEGINNINGS as u64;
                }
                (self.total(links, &shifts), shifts)
            })),
        }
        beginnings.sort_unstable();
        beginnings.truncate(BEGINNINGS);
        for (to_come, (_, shifts)) in (1..=beginnings.len() as u64).rev().zip(beginnings) {
            let share = self.left / to_come;
            let found = self.within(share, |own| own.descend(links, others, shifts));
            self.offer(&mut best, links, &found);
        }
        (best.shifts, false)
    }

    /// Turns one job at a time to its best place until none improves, or there are no slots left.
    fn descend(&mut self, links: &[&Drawn], others: &[usize], mut shifts: Vec<u64>) -> Vec<u64> {
        loop {
            let mut improves = false;
            for &job in others {
                let look: u64 = links.iter().map(|link| link.look()).sum();
                self.left = self.left.saturating_sub(look * LEVELS);
                let own: Vec<Turning<'_>> =
                    links.iter().filter_map(|link| Turning::new(link, job, &shifts)).collect();
                let place = self.best_place(&own, shifts[job], self.circle.period(job));
                improves |= place != shifts[job];
                shifts[job] = place;
            }
            if !improves || self.left == 0 {
                return shifts;
            }
        }
    }

    /// Where a job is best, the others staying where they are: where it is, if nothing is better.
    fn best_place(&mut self, links: &[Turning<'_>], now: u64, period: u64) -> u64 {
        let look: u64 = links.iter().map(|own| own.link.length + LOOK_SLOTS).sum();
        let excess = |at| links.iter().map(|own| own.above(0, at)).fold(0, u64::saturating_add);
        let closeness = |at| {
            let levels =
                links.iter().flat_map(|own| (1..LEVELS as usize).map(|l| own.above(l, at)));
            levels.fold(0, u64::saturating_add)
        };
        let mut best = (excess(now), closeness(now), now);
        for at in 0..period {
            if self.left < look * LEVELS {
                self.left = 0;
                break;
            }
            let excess = excess(at);
            self.left -= look;
            if excess <= best.0 {
                self.left -= look * (LEVELS - 1);
                let closeness = closeness(at);
                if (excess, closeness) < (best.0, best.1) {
                    best = (excess, closeness, at);
                }
            }
        }
        best.2
    }
}

/// Visits all shifts of these jobs, or so many even places of each.
fn each(
    circle: &Circle,
    others: &[usize],
    zero: &[u64],
    places: u64,
    mut visit: impl FnMut(&[u64]),
) {
    let most = |job: usize| circle.period(job).min(places);
    let mut at: Vec<u64> = others.iter().map(|_| 0).collect();
    let mut shifts = zero.to_vec();
    loop {
        for (&place, &job) in at.iter().zip(others) {
            shifts[job] = circle.period(job) * place / most(job);
        }
        visit(&shifts);
        // The next one, as digits are counted.
        let digit = (0..at.len()).find(|&digit| at[digit] + 1 < most(others[digit]));
        let Some(digit) = digit else { return };
        at[..digit].iter_mut().for_each(|lower| *lower = 0);
        at[digit] += 1;
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    const MS: u64 = 1_000_000;
    const GBIT: u64 = 1_000_000_000;

    fn burst(start: u64, length: u64, gbit: u64) -> Burst {
        Burst { start_ns: start * MS, length_ns: length * MS, bps: gbit * GBIT }
    }

    fn link(uses: Vec<(usize, Vec<Burst>)>) -> Shared {
        let uses = uses.into_iter().map(|(job, bursts)| Use { job, bursts }).collect();
        Shared { capacity_bps: 10 * GBIT, uses }
    }

    fn plan(periods: &[u64], links: &[Shared]) -> Result<Shifts, ShiftError> {
        super::plan(periods, links, &Limits::AMPLE)
    }

    fn excess(shifts: &Shifts, link: usize) -> Excess {
        shifts.links[link].expect("its jobs have shifts")
    }

    #[test]
    fn two_jobs_that_fit_do_not_meet() {
        let links = [link(vec![(0, vec![burst(17, 7, 10)]), (1, vec![burst(16, 8, 10)])])];
        let shifts = plan(&[24 * MS, 24 * MS], &links).expect("shifts");
        assert!(excess(&shifts, 0).before_ppm > 200_000, "{shifts:?}");
        assert_eq!(excess(&shifts, 0).after_ppm, 0);
        assert!(shifts.parts[0].is_exact);
        // In the middle of what is possible: 9 ms are free, about half before and half after.
        let begins = |job: usize, start: u64| (shifts.shift_ns[job] + start * MS) % (24 * MS);
        let gap = (begins(1, 16) + 24 * MS - (begins(0, 17) + 7 * MS)) % (24 * MS);
        assert!((3_900_000..=5_100_000).contains(&gap), "{gap}");
    }

    #[test]
    fn what_cannot_fit_has_the_least_excess() {
        let whole = |start| vec![burst(start, 16, 10)];
        let links = [link(vec![(0, whole(0)), (1, whole(0))])];
        let shifts = plan(&[24 * MS, 24 * MS], &links).expect("shifts");
        // 32 ms in 24 ms: 8 of 24 are above.
        assert_eq!(excess(&shifts, 0), Excess { before_ppm: 666_666, after_ppm: 333_333 });
    }

    #[test]
    fn periods_that_differ_share_a_circle_of_their_common_multiple() {
        let links = [link(vec![(0, vec![burst(0, 5, 10)]), (1, vec![burst(0, 5, 10)])])];
        let shifts = plan(&[20 * MS, 30 * MS], &links).expect("shifts");
        assert_eq!((shifts.parts[0].circle_ns, excess(&shifts, 0).after_ppm), (60 * MS, 0));
        // Nothing in 7 and 11 ms divides evenly, so they are rounded up a little.
        let odd = [7 * MS + 12_345, 11 * MS + 54_321];
        let shifts =
            plan(&odd, &[link(vec![(0, vec![burst(0, 1, 10)]), (1, vec![burst(0, 1, 10)])])]);
        let shifts = shifts.expect("shifts");
        for (job, period) in odd.into_iter().enumerate() {
            assert!(shifts.period_ns[job] >= period && shifts.stretch_ppm(job, period) < 20_000);
        }
    }

    /// Every shift of every job but the first, by slots, in a way that shares nothing with the
    /// module.
    fn by_force(periods: &[u64], links: &[Shared], slot: u64) -> u64 {
        let slots: Vec<u64> = periods.iter().map(|period| period / slot).collect();
        let circle = slots.iter().fold(1, |all, own| common(all, *own, Limits::AMPLE.circle));
        let mut best = u64::MAX;
        let ways: u64 = slots[1..].iter().product();
        for mut way in 0..ways {
            let mut shifts = vec![0; slots.len()];
            for job in 1..slots.len() {
                shifts[job] = way % slots[job];
                way /= slots[job];
            }
            let mut sum = 0;
            for link in links {
                let mut above = 0_u128;
                for at in 0..circle {
                    let mut all = 0;
                    for used in &link.uses {
                        let (job, own) = (used.job, slots[used.job]);
                        let place = (at + circle * own - shifts[job]) % own;
                        let (from, to) = (place * slot, (place + 1) * slot);
                        let meets = |burst: &&Burst| {
                            let period = own * slot;
                            [0, period].iter().any(|more| {
                                let start = burst.start_ns;
                                from + more < start + burst.length_ns && to + more > start
                            })
                        };
                        all +=
                            used.bursts.iter().filter(meets).map(|one| one.bps).max().unwrap_or(0);
                    }
                    above += u128::from(all.saturating_sub(link.capacity_bps));
                }
                let whole = u128::from(link.capacity_bps) * u128::from(circle);
                sum += (above * 1_000_000 / whole) as u64;
            }
            best = best.min(sum);
        }
        best
    }

    #[test]
    fn shifts_are_as_good_as_any_on_trees_and_circles_of_links() {
        let mut random = 7_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for case in 0..24 {
            // Jobs 0 and 1 on a link, 1 and 2 on another; in every third case 0 and 2 on one more,
            // which is a circle.
            let periods: Vec<u64> = (0..3).map(|_| [12, 24][draw(2) as usize] * MS).collect();
            let mut uses = |job: usize| {
                let period = periods[job] / MS;
                (job, vec![burst(draw(period), 1 + draw(period / 2), 3 + draw(8))])
            };
            let mut links = vec![link(vec![uses(0), uses(1)]), link(vec![uses(1), uses(2)])];
            if case % 3 == 0 {
                links.push(link(vec![uses(0), uses(2)]));
            }
            let shifts = plan(&periods, &links).expect("shifts");
            let own: u64 = shifts.links.iter().flatten().map(|link| link.after_ppm).sum();
            let slot = shifts.parts[0].slot_ns;
            // The finest circle: the test compares in its slots only where there are few.
            let coarse = if slot * 24 < periods[0] { MS } else { slot };
            let best = by_force(&periods, &links, coarse);
            assert!(own <= best + links.len() as u64, "case {case}: {own} {best} {shifts:?}");
        }
    }

    #[test]
    fn many_jobs_are_turned_one_at_a_time() {
        let uses = (0..8).map(|job| (job, vec![burst(0, 2, 10)])).collect();
        let shifts = plan(&[24 * MS; 8], &[link(uses)]).expect("shifts");
        assert!(!shifts.parts[0].is_exact);
        assert_eq!(excess(&shifts, 0).after_ppm, 0, "{shifts:?}");
    }

    #[test]
    fn jobs_without_links_stay_and_nonsense_is_refused() {
        let shifts = plan(&[MS, 2 * MS], &[]).expect("nothing to do");
        assert_eq!((shifts.shift_ns, shifts.parts.len()), (vec![0, 0], 0));
        let one = |uses| plan(&[24 * MS], &[link(uses)]);
        assert_eq!(plan(&[0], &[]), Err(ShiftError::Period { job: 0, period_ns: 0 }));
        assert_eq!(one(vec![(1, vec![])]), Err(ShiftError::Job { link: 0, job: 1 }));
        assert_eq!(one(vec![(0, vec![]), (0, vec![])]), Err(ShiftError::Job { link: 0, job: 0 }));
        assert_eq!(one(vec![(0, vec![burst(24, 1, 1)])]), Err(ShiftError::Burst { job: 0 }));
        assert_eq!(one(vec![(0, vec![burst(0, 25, 1)])]), Err(ShiftError::Burst { job: 0 }));
        let dead = Shared { capacity_bps: 0, uses: vec![] };
        assert_eq!(plan(&[MS], &[dead]), Err(ShiftError::Capacity(0)));
        let primes: Vec<u64> =
            [1_009, 1_013, 1_019, 1_021, 1_031, 2_003, 3_001, 9_973].map(|own| own * MS).into();
        let uses = (0..8).map(|job| (job, vec![burst(0, 1, 10)])).collect();
        let shifts = plan(&primes, &[link(uses)]).expect("it is possible");
        match &shifts.left[..] {
            [] => {
                let Part { circle_ns, slot_ns, .. } = shifts.parts[0];
                assert!(circle_ns / slot_ns <= Limits::AMPLE.circle);
            }
            left => assert_eq!(left[0].why, LeftAlone::NoCircle),
        }
    }

    /// So many jobs on one link, the first of them `first`.
    fn crowd(first: usize, jobs: usize) -> Shared {
        link((first..first + jobs).map(|job| (job, vec![burst(0, 2, 10)])).collect())
    }

    #[test]
    fn parts_that_are_left_alone_do_not_spoil_others() {
        let limits = Limits { jobs: 4, all_jobs: 6, stretch_ppm: 1, ..Limits::AMPLE };
        // Too large, fine, without a circle, fine, and too many.
        let links = [crowd(0, 5), crowd(5, 2), crowd(7, 2), crowd(9, 2), crowd(11, 2)];
        let mut periods = vec![24 * MS; 13];
        (periods[7], periods[8]) = (24 * MS + 1_234_567, 31 * MS + 7_654_321);
        let shifts = super::plan(&periods, &links, &limits).expect("all is possible");
        let left = |why: &Left| (why.jobs[0], why.why);
        let mut all: Vec<_> = shifts.left.iter().map(left).collect();
        all.sort_unstable_by_key(|(job, _)| *job);
        let expected = [
            (0, LeftAlone::TooLarge { jobs: 5, links: 1 }),
            (7, LeftAlone::NoCircle),
            (11, LeftAlone::Crowded),
        ];
        assert_eq!(all, expected);
        let whole: Vec<bool> = shifts.links.iter().map(Option::is_some).collect();
        assert_eq!(whole, [false, true, false, true, false]);
        for link in [1, 3] {
            let Excess { before_ppm, after_ppm } = excess(&shifts, link);
            assert!(before_ppm > 80_000 && after_ppm == 0, "{shifts:?}");
        }
        assert_eq!((shifts.shift_ns[7], shifts.period_ns[7]), (0, periods[7]));
    }

    #[test]
    fn parts_that_are_too_large_take_no_slots_from_others() {
        let limits = Limits { jobs: 2, slots: 1 << 20, ..Limits::AMPLE };
        let links: Vec<Shared> =
            (0..200).map(|part| crowd(3 * part, 3)).chain([crowd(600, 2)]).collect();
        let shifts = super::plan(&[24 * MS; 602], &links, &limits).expect("all is possible");
        assert_eq!(shifts.left.len(), 200);
        assert_eq!(excess(&shifts, 200).after_ppm, 0);
    }

    #[test]
    fn no_period_is_rounded_to_more_than_there_can_be() {
        let odd = [MAX_PERIOD_NS, MAX_PERIOD_NS - 7_777_777_777];
        let uses = |job| (job, vec![burst(0, 20_000, 10)]);
        let shifts = plan(&odd, &[link(vec![uses(0), uses(1)])]).expect("it is possible");
        assert!(shifts.period_ns.iter().all(|period| *period <= MAX_PERIOD_NS), "{shifts:?}");
    }

    #[test]
    fn rates_beyond_this_world_do_not_overflow() {
        let most = Burst { start_ns: 0, length_ns: 7 * MS, bps: u64::MAX };
        let uses = (0..8).map(|job| Use { job, bursts: vec![most] }).collect();
        let shared = Shared { capacity_bps: u64::MAX, uses };
        let shifts = plan(&[24 * MS; 8], &[shared]).expect("it is possible");
        let Excess { before_ppm, after_ppm } = excess(&shifts, 0);
        // Eight of 7 ms in 24 ms: 32 of 56 fit at best.
        assert!(after_ppm < before_ppm && after_ppm > 1_300_000, "{before_ppm} {after_ppm}");
    }

    #[test]
    fn what_looking_may_cost_is_kept_to() {
        let least = Limits { exhaustive: 0, slots: 1_000_000, ..Limits::AMPLE };
        let shifts = super::plan(&[24 * MS; 8], &[crowd(0, 8)], &least).expect("shifts");
        assert!(!shifts.parts[0].is_exact);
        let Excess { before_ppm, after_ppm } = excess(&shifts, 0);
        assert!(after_ppm < before_ppm, "{before_ppm} {after_ppm}");
        let nothing = Limits { slots: 40_000, ..least };
        let shifts = super::plan(&[24 * MS; 8], &[crowd(0, 8)], &nothing).expect("shifts");
        assert_eq!(shifts.left[0].why, LeftAlone::TooLarge { jobs: 8, links: 1 });
    }
}
