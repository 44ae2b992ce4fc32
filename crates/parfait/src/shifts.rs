//! Time shifts: jobs whose exchanges take turns on the links that they share.
//!
//! A training job computes and exchanges in turn, with a period. Two jobs that meet on a link at the same time slow each
//! other down; if one begins later, they may not meet at all. The idea is that of CASSINI (Rajasekaran et al., NSDI 2024): a
//! job's demand is drawn on a circle whose circumference is its period, all jobs of a link on one circle whose circumference
//! is the least common multiple of their periods, and turned against each other such that least of the demand is above what
//! the link carries. That least part is the link's *excess*.
//!
//! - Jobs and the links that they share are the *affinity graph*, and a job has one shift for all its links. Where the graph
//!   has no circle, each link is solved alone and turned as a whole to fit its neighbours, which changes no excess: what is
//!   best for each link is best for all. Where it has one, all jobs of the part are turned together.
//! - The circle is divided into slots, so that periods have a common multiple. A period is rounded up to a slot, since an
//!   agent can make a job wait and not hurry; [`Shifts::stretch_ppm`] says by how much. A burst takes every slot that it
//!   touches, so the true excess is never above what is said.
//! - All shifts in slots are tried where these are few ([`Part::is_exact`]); otherwise jobs are turned one at a time, from
//!   several beginnings, until none improves.
//! - Of shifts with the same excess the one with most distance between bursts is taken, so that drift does no harm.
//! - Jobs drift: compute times vary. An agent lets a job's exchange begin at `shift + n * period` and no sooner; one that is
//!   later by more than the [`TOLERANCE_PARTS`]th part of its period waits for its next time, so that it does not meet
//!   the others.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use thiserror::Error;

/// Most jobs, and most links that they share.
pub const MAX_JOBS: usize = 256;
/// See [`MAX_JOBS`].
pub const MAX_LINKS: usize = 1_024;

/// Longest period: a minute.
pub const MAX_PERIOD_NS: u64 = 60_000_000_000;

/// A job that is later than its time by this part of its period waits for the next one.
pub const TOLERANCE_PARTS: u64 = 20;

/// Slots of the shortest period, at least and at most.
const SLOTS: (u64, u64) = (12, 240);

/// Slots of a circle, at most.
const MAX_CIRCLE: u64 = 1 << 14;

/// Slots that are looked at to solve a link or a part by trying everything.
const EXHAUSTIVE: u64 = 4_000_000;

/// Beginnings of the search where not everything is tried: the best of the coarse places, or as many even ones.
const BEGINNINGS: usize = 8;

/// Parts of a period by which bursts are widened to tell shifts of equal excess apart.
const GUARD_PARTS: [u64; 5] = [48, 24, 12, 8, 6];

/// Places of each job that are tried together to begin the search, the most that is affordable.
const COARSE: [u64; 5] = [24, 12, 8, 4, 2];

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
    /// There are too many.
    #[error("{jobs} jobs on {links} links; there can be {MAX_JOBS} on {MAX_LINKS}")]
    TooMany {
        /// How many jobs.
        jobs: usize,
        /// How many links.
        links: usize,
    },
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
    /// Periods have no common multiple that is short enough.
    #[error(
        "the periods of the jobs that meet job {job} have no common circle of {MAX_CIRCLE} slots"
    )]
    NoCircle {
        /// One of the jobs, by its place.
        job: usize,
    },
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
    /// A slot of their circle.
    pub slot_ns: u64,
    /// How long the circle is.
    pub circle_ns: u64,
    /// Whether no other shifts in slots have less excess.
    pub is_exact: bool,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shifts {
    /// By job: by how much it begins later, below its period.
    pub shift_ns: Vec<u64>,
    /// By job: its period, rounded up.
    pub period_ns: Vec<u64>,
    /// By link.
    pub links: Vec<Excess>,
    /// Jobs that share links.
    pub parts: Vec<Part>,
}

impl Shifts {
    /// By how much a job's period is longer than it was, in parts per million.
    pub fn stretch_ppm(&self, job: usize, period_ns: u64) -> u64 {
        let longer = self.period_ns[job].saturating_sub(period_ns);
        (u128::from(longer) * 1_000_000 / u128::from(period_ns.max(1))) as u64
    }
}

/// Shifts for jobs with these periods, in nanoseconds, on the links that they share.
///
/// # Errors
/// When a job or link is impossible, or periods have no common circle.
pub fn plan(periods: &[u64], links: &[Shared]) -> Result<Shifts, ShiftError> {
    check(periods, links)?;
    let mut shifts = Shifts {
        shift_ns: alloc::vec![0; periods.len()],
        period_ns: periods.to_vec(),
        links: alloc::vec![Excess::default(); links.len()],
        parts: Vec::new(),
    };
    for (jobs, own) in parts(periods.len(), links) {
        let circle = Circle::of(periods, &jobs).ok_or(ShiftError::NoCircle { job: jobs[0] })?;
        let drawn: Vec<Drawn> = own.iter().map(|&link| circle.draw(&links[link])).collect();
        let zero = alloc::vec![0; periods.len()];
        let (found, is_exact) = solve(&circle, &drawn, &jobs, periods.len());
        for (&link, drawn) in own.iter().zip(&drawn) {
            let before_ppm = drawn.excess(&zero);
            shifts.links[link] = Excess { before_ppm, after_ppm: drawn.excess(&found) };
        }
        for &job in &jobs {
            let slots = circle.period(job);
            shifts.shift_ns[job] = found[job] % slots * circle.slot_ns;
            shifts.period_ns[job] = slots * circle.slot_ns;
        }
        let circle_ns = circle.length() * circle.slot_ns;
        shifts.parts.push(Part { jobs, slot_ns: circle.slot_ns, circle_ns, is_exact });
    }
    Ok(shifts)
}

fn check(periods: &[u64], links: &[Shared]) -> Result<(), ShiftError> {
    if periods.len() > MAX_JOBS || links.len() > MAX_LINKS {
        return Err(ShiftError::TooMany { jobs: periods.len(), links: links.len() });
    }
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
    let mut part_of: Vec<usize> = (0..jobs).collect();
    for shared in links {
        let all: Vec<usize> = shared.uses.iter().map(|used| part_of[used.job]).collect();
        if let Some(&least) = all.iter().min() {
            part_of.iter_mut().filter(|part| all.contains(part)).for_each(|part| *part = least);
        }
    }
    let mut found: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
    for part in 0..jobs {
        let own = |job: &usize| part_of[*job] == part;
        let is_here = |link: &usize| links[*link].uses.first().is_some_and(|used| own(&used.job));
        let links: Vec<usize> = (0..links.len()).filter(is_here).collect();
        if !links.is_empty() {
            found.push(((0..jobs).filter(own).collect(), links));
        }
    }
    found
}

/// The slots of a part's jobs.
struct Circle {
    slot_ns: u64,
    /// By job: slots of its period; 1 for those of other parts.
    periods: Vec<u64>,
}

impl Circle {
    /// The one that lengthens periods least, and of these the finest.
    fn of(periods: &[u64], jobs: &[usize]) -> Option<Circle> {
        let shortest = jobs.iter().map(|&job| periods[job]).min()?;
        let mut best: Option<(u64, Circle)> = None;
        for slots in (SLOTS.0..=SLOTS.1).rev() {
            let slot_ns = shortest.div_ceil(slots);
            let rounded = (0..periods.len()).map(|job| match jobs.contains(&job) {
                true => periods[job].div_ceil(slot_ns),
                false => 1,
            });
            let circle = Circle { slot_ns, periods: rounded.collect() };
            let stretch = |&job: &usize| {
                let longer = circle.periods[job] * slot_ns - periods[job];
                (u128::from(longer) * 1_000_000_000 / u128::from(periods[job])) as u64
            };
            let worst = jobs.iter().map(stretch).max()?;
            let is_better = best.as_ref().is_none_or(|(least, _)| worst < *least);
            if circle.length() <= MAX_CIRCLE && is_better {
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
        self.periods.iter().fold(1, |length, &period| common(length, period))
    }

    fn draw(&self, link: &Shared) -> Drawn {
        let jobs: Vec<usize> = link.uses.iter().map(|used| used.job).collect();
        let length = jobs.iter().fold(1, |length, &job| common(length, self.period(job)));
        let hard = link.uses.iter().map(|used| self.demand(used, 0)).collect();
        let wide = |parts: u64| {
            let demand = |used: &Use| self.demand(used, self.period(used.job) / parts);
            link.uses.iter().map(demand).collect()
        };
        let soft = GUARD_PARTS.map(wide).into();
        Drawn { jobs, length, capacity: link.capacity_bps, hard, soft }
    }

    /// By slot of the period: the most that a job sends, with bursts that are longer by so many slots at either end.
    fn demand(&self, used: &Use, guard: u64) -> Vec<u64> {
        let period = self.period(used.job);
        let mut demand = alloc::vec![0; period as usize];
        for burst in &used.bursts {
            let first = burst.start_ns / self.slot_ns + period - guard.min(period);
            let end = (burst.start_ns + burst.length_ns).div_ceil(self.slot_ns) + guard + period;
            for slot in first..end.min(first + period) {
                let place = &mut demand[(slot % period) as usize];
                *place = (*place).max(burst.bps);
            }
        }
        demand
    }
}

/// The least common multiple, or [`MAX_CIRCLE`] + 1 if it is larger than that.
fn common(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b).min(MAX_CIRCLE + 1)
}

/// A link with the demands of its jobs, in slots.
struct Drawn {
    jobs: Vec<usize>,
    length: u64,
    capacity: u64,
    /// By job and slot; and the same with bursts that are longer by each of [`GUARD_PARTS`].
    hard: Vec<Vec<u64>>,
    soft: Vec<Vec<Vec<u64>>>,
}

impl Drawn {
    /// Demand above what the link carries with these shifts in slots, by job, in parts per million of that.
    fn excess(&self, shifts: &[u64]) -> u64 {
        self.above(&self.hard, shifts)
    }

    /// The same with longer bursts, in all.
    fn closeness(&self, shifts: &[u64]) -> u64 {
        let levels = self.soft.iter().map(|demands| self.above(demands, shifts));
        levels.fold(0, u64::saturating_add)
    }

    fn above(&self, demands: &[Vec<u64>], shifts: &[u64]) -> u64 {
        let mut sum = 0_u128;
        for slot in 0..self.length {
            let at = |(demand, &job): (&Vec<u64>, &usize)| {
                let period = demand.len() as u64;
                demand[((slot + period - shifts[job] % period) % period) as usize]
            };
            let all = demands.iter().zip(&self.jobs).map(at).fold(0, u64::saturating_add);
            sum += u128::from(all.saturating_sub(self.capacity));
        }
        let whole = u128::from(self.capacity) * u128::from(self.length);
        u64::try_from(sum * 1_000_000 / whole.max(1)).unwrap_or(u64::MAX)
    }
}

/// Shifts in slots, by job, and whether none are better.
fn solve(circle: &Circle, links: &[Drawn], jobs: &[usize], count: usize) -> (Vec<u64>, bool) {
    let edges: usize = links.iter().map(|link| link.jobs.len()).sum();
    // A tree of jobs and links has one edge less than it has nodes.
    if edges + 1 == jobs.len() + links.len() {
        return along_tree(circle, links, jobs, count);
    }
    let all: Vec<&Drawn> = links.iter().collect();
    turn(circle, &all, jobs, &alloc::vec![0; count])
}

/// Solves each link alone, and turns each to agree with the one by which it was reached.
fn along_tree(circle: &Circle, links: &[Drawn], jobs: &[usize], count: usize) -> (Vec<u64>, bool) {
    let mut shifts: Vec<Option<u64>> = alloc::vec![None; count];
    let mut left: Vec<&Drawn> = links.iter().collect();
    let mut is_exact = true;
    if let Some(first) = jobs.first() {
        shifts[*first] = Some(0);
    }
    while !left.is_empty() {
        let known = |link: &&Drawn| link.jobs.iter().any(|&job| shifts[job].is_some());
        let Some(place) = left.iter().position(known) else { break };
        let link = left.swap_remove(place);
        let (own, is_best) = turn(circle, &[link], &link.jobs, &alloc::vec![0; count]);
        is_exact &= is_best;
        let anchor = link.jobs.iter().find_map(|&job| Some((job, shifts[job]?)));
        let Some((anchor, at)) = anchor else { break };
        for &job in &link.jobs {
            // By how much the whole link is turned: a multiple of the anchor's period more changes nothing for it.
            let turned = at + circle.length() - own[anchor] % circle.period(anchor);
            shifts[job] = shifts[job].or(Some((own[job] + turned) % circle.period(job)));
        }
    }
    (shifts.into_iter().map(|shift| shift.unwrap_or(0)).collect(), is_exact)
}

fn total(links: &[&Drawn], shifts: &[u64]) -> u64 {
    links.iter().map(|link| link.excess(shifts)).fold(0, u64::saturating_add)
}

/// The best shifts so far.
struct Best {
    excess: u64,
    closeness: u64,
    shifts: Vec<u64>,
}

impl Best {
    fn new(links: &[&Drawn], shifts: Vec<u64>) -> Best {
        Best { excess: total(links, &shifts), closeness: closeness(links, &shifts), shifts }
    }

    /// Takes shifts that are better; returns whether they were.
    fn offer(&mut self, links: &[&Drawn], shifts: &[u64]) -> bool {
        let excess = total(links, shifts);
        if excess > self.excess {
            return false;
        }
        let closeness = closeness(links, shifts);
        let is_better = (excess, closeness) < (self.excess, self.closeness);
        if is_better {
            *self = Best { excess, closeness, shifts: shifts.to_vec() };
        }
        is_better
    }
}

fn closeness(links: &[&Drawn], shifts: &[u64]) -> u64 {
    links.iter().map(|link| link.closeness(shifts)).fold(0, u64::saturating_add)
}

/// Turns all jobs but the first against it.
fn turn(circle: &Circle, links: &[&Drawn], jobs: &[usize], zero: &[u64]) -> (Vec<u64>, bool) {
    let others = jobs.get(1..).unwrap_or(&[]);
    let work: u64 = links.iter().map(|link| link.length * link.jobs.len() as u64).sum();
    let affordable = |places: &dyn Fn(usize) -> u64| {
        let ways = others.iter().fold(1_u64, |ways, &job| ways.saturating_mul(places(job)));
        ways.saturating_mul(work) <= EXHAUSTIVE
    };
    if affordable(&|job| circle.period(job)) {
        let mut best = Best::new(links, zero.to_vec());
        each(circle, others, zero, u64::MAX, |shifts| {
            best.offer(links, shifts);
        });
        return (best.shifts, true);
    }
    let coarse = COARSE.into_iter().find(|&places| affordable(&|_| places));
    let mut beginnings: Vec<(u64, Vec<u64>)> = Vec::new();
    match coarse {
        Some(places) => each(circle, others, zero, places, |shifts| {
            beginnings.push((total(links, shifts), shifts.to_vec()));
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
            (total(links, &shifts), shifts)
        })),
    }
    beginnings.sort_unstable();
    let mut best = Best::new(links, zero.to_vec());
    for (_, shifts) in beginnings.into_iter().take(BEGINNINGS) {
        let found = descend(circle, links, others, shifts);
        best.offer(links, &found);
    }
    (best.shifts, false)
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

/// Turns one job at a time to its best place until none improves.
fn descend(circle: &Circle, links: &[&Drawn], others: &[usize], shifts: Vec<u64>) -> Vec<u64> {
    let mut best = Best::new(links, shifts);
    loop {
        let mut improves = false;
        for &job in others {
            let mut shifts = best.shifts.clone();
            for at in 0..circle.period(job) {
                shifts[job] = at;
                improves |= best.offer(links, &shifts);
            }
        }
        if !improves {
            return best.shifts;
        }
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

    #[test]
    fn two_jobs_that_fit_do_not_meet() {
        let links = [link(vec![(0, vec![burst(17, 7, 10)]), (1, vec![burst(16, 8, 10)])])];
        let shifts = plan(&[24 * MS, 24 * MS], &links).expect("shifts");
        assert!(shifts.links[0].before_ppm > 200_000, "{shifts:?}");
        assert_eq!(shifts.links[0].after_ppm, 0);
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
        assert_eq!(shifts.links[0], Excess { before_ppm: 666_666, after_ppm: 333_333 });
    }

    #[test]
    fn periods_that_differ_share_a_circle_of_their_common_multiple() {
        let links = [link(vec![(0, vec![burst(0, 5, 10)]), (1, vec![burst(0, 5, 10)])])];
        let shifts = plan(&[20 * MS, 30 * MS], &links).expect("shifts");
        assert_eq!((shifts.parts[0].circle_ns, shifts.links[0].after_ppm), (60 * MS, 0));
        // Nothing in 7 and 11 ms divides evenly, so they are rounded up a little.
        let odd = [7 * MS + 12_345, 11 * MS + 54_321];
        let shifts =
            plan(&odd, &[link(vec![(0, vec![burst(0, 1, 10)]), (1, vec![burst(0, 1, 10)])])]);
        let shifts = shifts.expect("shifts");
        for (job, period) in odd.into_iter().enumerate() {
            assert!(shifts.period_ns[job] >= period && shifts.stretch_ppm(job, period) < 20_000);
        }
    }

    /// Every shift of every job but the first, by slots, in a way that shares nothing with the module.
    fn by_force(periods: &[u64], links: &[Shared], slot: u64) -> u64 {
        let slots: Vec<u64> = periods.iter().map(|period| period / slot).collect();
        let circle = slots.iter().fold(1, |all, own| common(all, *own));
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
            // Jobs 0 and 1 on a link, 1 and 2 on another; in every third case 0 and 2 on one more, which is a circle.
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
            let own: u64 = shifts.links.iter().map(|link| link.after_ppm).sum();
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
        assert_eq!(shifts.links[0].after_ppm, 0, "{shifts:?}");
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
        match plan(&primes, &[link(uses)]) {
            Ok(shifts) => {
                assert!(shifts.parts[0].circle_ns / shifts.parts[0].slot_ns <= MAX_CIRCLE);
            }
            Err(error) => assert_eq!(error, ShiftError::NoCircle { job: 0 }),
        }
    }
}
