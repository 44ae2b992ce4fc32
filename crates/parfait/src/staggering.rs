//! Admitted jobs that take staggering: the time shifts that the brain puts into plans, and why a
//! job has none.
//!
//! Shifts follow from the [`Book`] alone, from jobs that say their cycle, where their workers are
//! and what is down: every brain that replays the same log computes the same ones. They are
//! computed anew when one of these changed.
//!
//! What a job puts on a link in an exchange is not known. It is at most what the job has reserved
//! there for a whole period, sent in the time of an exchange (`reserved * period / exchange`),
//! since a job that sends more would not keep up on its reservation, and at most what the link
//! carries. Links on which all these bounds fit at once need no turns, and jobs without a cycle do
//! not count.
//!
//! | a job has no shift | because |
//! |---|---|
//! | [`Alone::Free`] | it fills no link together with other jobs that say their cycle |
//! | [`Alone::Degraded`] | a failure took its guarantee, so what it sends where is not known |
//! | [`Alone::Left`] | the part of the graph that it belongs to is too large, or has no common circle |
//! | [`Alone::NoGain`] | no shifts of its part lower the demand above what links carry |

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use thiserror::Error;
use topology::graph::NodeId;

use crate::agent::Phase;
use crate::demand::Order;
use crate::job::Cycle;
use crate::ledger::JobId;
use crate::loads::Piece;
use crate::log::Book;
use crate::outage::Outage;
use crate::seeded::{Bug, Seeded};
use crate::shifts::{self, Burst, LeftAlone, Limits, MAX_PERIOD_NS, Part, Shared, Shifts, Use};

/// By how much periods of jobs are made longer, in parts: no job keeps its own exactly, and one
/// that is late more often than early misses its time in the end.
const SLACK_PARTS: u64 = 50;

/// What the brain may spend on shifts while it decides on nothing else: about 50 ms
/// (docs/parfait-staggering.md).
pub const LIMITS: Limits = Limits {
    jobs: 32,
    links: 64,
    all_jobs: 256,
    circle: 1 << 11,
    // With the slack less than what `dquant parfait shifts` takes for a failure, 5 %.
    stretch_ppm: 29_000,
    exhaustive: 1_500_000,
    slots: 24_000_000,
};

/// Why a job's exchanges begin whenever it likes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Alone {
    /// It fills no link together with other jobs that say their cycle.
    #[error("it fills no link together with other jobs that say their cycle")]
    Free,
    /// It has lost its guarantee.
    #[error("it is without its guarantee")]
    Degraded,
    /// Its part of the graph is left alone.
    #[error("the jobs that it shares links with, directly or through others, get no shifts: {0}")]
    Left(LeftAlone),
    /// No shifts of its part lower the demand above what links carry.
    #[error("no shifts lower the demand above what its links carry")]
    NoGain,
}

/// A job that says its cycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stagger {
    /// When its exchanges begin, or why that does not matter.
    pub phase: Result<Phase, Alone>,
    /// The others with which it fills a link, by number. Empty where its part is left alone: it may
    /// have any size.
    pub with: Vec<JobId>,
}

/// What shifts follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Basis {
    outage: Outage,
    /// By number: whether it is degraded, and where it is.
    jobs: Vec<(JobId, bool, Order, Vec<Piece>)>,
}

impl Basis {
    fn of(book: &Book) -> Basis {
        let cyclic = book.jobs().iter().filter(|(_, held)| held.job.cycle.is_some());
        let jobs = cyclic
            .map(|(job, held)| (*job, book.is_degraded(*job), held.order, held.pieces.clone()));
        Basis { outage: book.outage().clone(), jobs: jobs.collect() }
    }
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Staggering {
    basis: Option<Basis>,
    /// The last entry of the book that was looked at.
    changed_index: u64,
    staggering: BTreeMap<JobId, Stagger>,
    /// How often shifts were computed.
    computed: u64,
}

impl Staggering {
    /// Those of a book.
    pub fn of(book: &Book) -> Staggering {
        let mut staggering = Staggering::default();
        staggering.update(book);
        staggering
    }

    /// Looks at the book again, and returns the jobs whose phase is another one than before.
    pub fn update(&mut self, book: &Book) -> BTreeSet<JobId> {
        self.follow(book, Seeded::default())
    }

    pub(crate) fn follow(&mut self, book: &Book, seeded: Seeded) -> BTreeSet<JobId> {
        if self.basis.is_some() && self.changed_index == book.changed_index() {
            return BTreeSet::new();
        }
        self.changed_index = book.changed_index();
        let basis = Basis::of(book);
        if self.basis.as_ref() == Some(&basis) {
            return BTreeSet::new();
        }
        let had = self.basis.as_ref().map_or(0, |before| before.jobs.len());
        if seeded.is(Bug::ShiftsStale) && basis.jobs.len() < had {
            return BTreeSet::new();
        }
        self.basis = Some(basis);
        self.computed += 1;
        let before = core::mem::replace(&mut self.staggering, compute(book));
        let phase = |staggering: &BTreeMap<JobId, Stagger>, job: &JobId| {
            staggering.get(job).and_then(|stagger| stagger.phase.ok())
        };
        let all = before.keys().chain(self.staggering.keys()).copied();
        all.filter(|job| phase(&before, job) != phase(&self.staggering, job)).collect()
    }

    /// What there is to say of a job that says its cycle.
    pub fn stagger(&self, job: JobId) -> Option<&Stagger> {
        self.staggering.get(&job)
    }

    /// How often shifts were computed.
    pub fn computed(&self) -> u64 {
        self.computed
    }

    /// Phases, by job and the hosts of its workers: others forward what these send.
    pub(crate) fn phases(&self, book: &Book) -> BTreeMap<JobId, (Phase, BTreeSet<NodeId>)> {
        let phased =
            self.staggering.iter().filter_map(|(job, stagger)| Some((*job, stagger.phase.ok()?)));
        phased.map(|(job, phase)| (job, (phase, hosts(book, job)))).collect()
    }
}

/// The hosts of a job's workers.
pub(crate) fn hosts(book: &Book, job: JobId) -> BTreeSet<NodeId> {
    let network = book.ledger().network();
    let pieces = book.jobs().get(&job).map_or(&[][..], |held| &held.pieces);
    pieces.iter().map(|piece| network.node_of(piece.host)).collect()
}

fn compute(book: &Book) -> BTreeMap<JobId, Stagger> {
    let cyclic = book.jobs().iter().filter_map(|(job, held)| Some((*job, held.job.cycle?)));
    let jobs: Vec<(JobId, Cycle)> = cyclic.collect();
    let links = full_links(book, &jobs);
    let periods: Vec<u64> = jobs.iter().map(|(_, cycle)| with_slack(cycle.period_ns)).collect();
    let alone = |(job, _): &(JobId, Cycle)| match book.is_degraded(*job) {
        true => Alone::Degraded,
        false => Alone::Free,
    };
    let mut found: Vec<Result<Phase, Alone>> = jobs.iter().map(|job| Err(alone(job))).collect();
    let mut with: Vec<BTreeSet<JobId>> = alloc::vec![BTreeSet::new(); jobs.len()];
    // Cycles are checked when jobs are read, so no part of this is impossible.
    if let Ok(shifts) = shifts::plan(&periods, &links, &LIMITS) {
        for left in &shifts.left {
            left.jobs.iter().for_each(|&job| found[job] = Err(Alone::Left(left.why)));
        }
        for part in &shifts.parts {
            for link in &part.links {
                let all = links[*link].uses.iter().map(|used| used.job);
                let others = all.clone().map(|other| jobs[other].0);
                all.for_each(|job| with[job].extend(others.clone()));
            }
            for &job in &part.jobs {
                found[job] = match gains(&shifts, part) {
                    true => Ok(Phase {
                        period_ns: shifts.period_ns[job],
                        shift_ns: shifts.shift_ns[job],
                        exchange_ns: jobs[job].1.exchange_ns,
                    }),
                    false => Err(Alone::NoGain),
                };
            }
        }
    }
    let staggering = jobs.iter().zip(found).zip(with).map(|(((job, _), phase), mut with)| {
        with.remove(job);
        (*job, Stagger { phase, with: with.into_iter().collect() })
    });
    staggering.collect()
}

fn with_slack(period_ns: u64) -> u64 {
    (period_ns + period_ns / SLACK_PARTS).min(MAX_PERIOD_NS)
}

fn gains(shifts: &Shifts, part: &Part) -> bool {
    let excesses = || part.links.iter().filter_map(|link| shifts.links[*link]);
    let before: u64 = excesses().map(|link| link.before_ppm).fold(0, u64::saturating_add);
    let after: u64 = excesses().map(|link| link.after_ppm).fold(0, u64::saturating_add);
    after < before
}

/// Links that these jobs can fill together, each as different from all others.
fn full_links(book: &Book, jobs: &[(JobId, Cycle)]) -> Vec<Shared> {
    if jobs.len() < 2 {
        return Vec::new();
    }
    let network = book.ledger().network();
    let places: BTreeMap<JobId, usize> = jobs.iter().map(|(job, _)| *job).zip(0..).collect();
    let rates = rates(book);
    let mut found: BTreeSet<(u64, Vec<(usize, u64)>)> = BTreeSet::new();
    for trunk in 0..network.trunks() as u32 {
        let own = book.on_trunk(trunk).iter();
        let mut own: Vec<(usize, u64)> =
            own.filter_map(|one| Some((*places.get(&one.job)?, one.bps))).collect();
        if own.len() < 2 {
            continue;
        }
        let link = network.links_of(trunk).first().map(|link| *link as usize / 2);
        let rate = link.and_then(|link| rates.get(link).copied());
        let rate = rate.unwrap_or(0).max(network.capacity_bps(trunk)).max(1);
        for (job, bps) in &mut own {
            *bps = most_bps(*bps, jobs[*job].1).clamp(1, rate);
        }
        let sum: u128 = own.iter().map(|(_, bps)| u128::from(*bps)).sum();
        if sum > u128::from(rate) {
            own.sort_unstable();
            found.insert((rate, own));
        }
    }
    let shared = found.into_iter().map(|(capacity_bps, own)| {
        let uses = own.into_iter().map(|(job, bps)| {
            let burst = Burst { start_ns: 0, length_ns: jobs[job].1.exchange_ns, bps };
            Use { job, bursts: alloc::vec![burst] }
        });
        Shared { capacity_bps, uses: uses.collect() }
    });
    shared.collect()
}

/// The most that a job sends in an exchange, in bit/s, of which it has reserved `bps`.
fn most_bps(bps: u64, cycle: Cycle) -> u64 {
    let bits = u128::from(bps) * u128::from(cycle.period_ns);
    u64::try_from(bits.div_ceil(u128::from(cycle.exchange_ns.max(1)))).unwrap_or(u64::MAX)
}

/// By index of the link: what it carries, in bit/s. Empty where there is no topology: what may be
/// reserved counts then.
fn rates(book: &Book) -> Vec<u64> {
    let links = book.site().into_iter().flat_map(|site| site.topology.links());
    let mut rates = Vec::new();
    for (link, about) in links {
        rates.resize(link.index(), 0);
        rates.push(about.capacity.rate_bps);
    }
    rates
}
