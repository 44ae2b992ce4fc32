//! How long a brain is held by time shifts: what one client can submit at worst, and a large
//! network.
//!
//! ```console
//! $ cargo run --release -p parfait --example staggering_bench
//! ```

use parfait::brain::place_job;
use parfait::demand::Abstraction;
use parfait::log::{Book, Change, Entry, Label};
use parfait::placement::search::Memory;
use parfait::shifts::{self, Burst, Shared, Use};
use parfait::site::{Ground, Site};
use parfait::spread::Ecmp;
use parfait::staggering::{Alone, LIMITS, Staggering};
use topology::graph::Capacity;
use topology::shape::Shape;

const MS: u64 = 1_000_000;
const GBIT: u64 = 1_000_000_000;

/// Periods that have no common multiple that is short.
fn odd(job: usize) -> u64 {
    20 * MS + (job as u64 * 7_919_341) % (40 * MS)
}

/// Periods that have one in hundreds of slots.
fn even(job: usize) -> u64 {
    [20, 24, 30, 40][job % 4] * MS
}

fn link(jobs: impl Iterator<Item = usize>, periods: &[u64], gbit: u64) -> Shared {
    let uses = jobs.map(|job| {
        let burst = Burst { start_ns: 0, length_ns: periods[job] / 3, bps: gbit * GBIT };
        Use { job, bursts: vec![burst] }
    });
    Shared { capacity_bps: 100 * GBIT, uses: uses.collect() }
}

/// Parts of so many jobs, each with a link for all of them and links for windows of neighbours.
fn parts(periods: &[u64], size: usize, windows: usize, width: usize) -> Vec<Shared> {
    let mut links = Vec::new();
    for first in (0..periods.len()).step_by(size) {
        links.push(link(first..first + size, periods, 60));
        for window in 0..windows {
            let at = |job: usize| first + (window + job) % size;
            let mut own: Vec<usize> = (0..width.min(size)).map(at).collect();
            own.sort_unstable();
            links.push(link(own.into_iter(), periods, 61 + window as u64 % 30));
        }
    }
    links
}

/// A chain: each link joins two neighbours.
fn chains(periods: &[u64], size: usize) -> Vec<Shared> {
    let pairs = (0..periods.len() - 1).filter(|job| (job + 1) % size > 0);
    pairs.map(|job| link(job..job + 2, periods, 80)).collect()
}

/// What something gives, and how many milliseconds it takes.
#[expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "measures time")]
fn timed<T>(run: impl FnOnce() -> T) -> (T, f64) {
    let begin = std::time::Instant::now();
    let result = run();
    (result, begin.elapsed().as_secs_f64() * 1e3)
}

fn worst_of_all() {
    let own = |kind: &str, job: usize| match kind {
        "odd" => odd(job),
        "even" => even(job),
        _ => 24 * MS,
    };
    for name in ["odd", "even", "equal"] {
        let periods: Vec<u64> = (0..256).map(|job| own(name, job)).collect();
        let mut cases = Vec::new();
        for size in [2, 4, 8, 16, 32, 64, 256] {
            cases.push((format!("{size} on a link"), parts(&periods, size, 0, 0)));
            cases.push((format!("chains of {size}"), chains(&periods, size)));
        }
        for (size, windows, width) in [(4, 4, 2), (8, 8, 4), (16, 40, 8), (32, 63, 2), (32, 63, 32)]
        {
            let name = format!("{size} on {} links, {width} on each", windows + 1);
            cases.push((name, parts(&periods, size, windows, width)));
        }
        for (case, links) in cases {
            let mut times = Vec::new();
            let mut found = None;
            for _ in 0..3 {
                let (result, ms) = timed(|| shifts::plan(&periods, &links, &LIMITS));
                found = result.ok();
                times.push(ms);
            }
            let found = found.expect("nothing is impossible");
            let all = found.links.iter().flatten();
            let sum = |of: fn(&shifts::Excess) -> u64| all.clone().map(of).sum::<u64>();
            let (before, after) = (sum(|own| own.before_ppm), sum(|own| own.after_ppm));
            println!(
                "256 {name} jobs, {case}: {:.1} to {:.1} ms, {} parts ({} exact), {} left alone, excess {:.3} of what it was",
                times.iter().copied().fold(f64::MAX, f64::min),
                times.iter().copied().fold(0.0, f64::max),
                found.parts.len(),
                found.parts.iter().filter(|part| part.is_exact).count(),
                found.left.len(),
                after as f64 / before.max(1) as f64,
            );
        }
    }
}

/// A fat tree with as many jobs that say their cycle as find a place.
fn large(shape: &str, jobs: usize) {
    let topology = shape.parse::<Shape>().expect("a shape").build(Capacity::default());
    let site = Site {
        topology: topology.expect("a topology"),
        slots: 8,
        ecmp: Ecmp::Even,
        reservable_ppm: 1_000_000,
    };
    let ground = Ground::new(site).expect("connected");
    let hosts = ground.network.hosts();
    let (mut book, mut memory) = (Book::new(ground), Memory::new());
    for job in 0..jobs {
        let own = odd(job);
        // 13 workers of 3 slots: they scatter, and meet.
        let text = format!("ring:13@30G slots=3 most=host:1 cycle={own}ns/{}ns", own / 5);
        let label = Label { name: format!("job{job}"), owner: String::new() };
        let parsed = text.parse().expect("a job");
        let held = place_job(&mut book, Abstraction::Parfait, 100, &mut memory, label, parsed);
        let Ok(held) = held else { continue };
        let entry = Entry { client: 1, sequence: job as u64, change: Change::Admit(held) };
        book.apply(1, &entry).expect("it fits");
    }
    let (mut staggering, ms) = timed(|| Staggering::of(&book));
    let phase = |job: &u64| staggering.stagger(*job).map(|stagger| stagger.phase);
    let all: Vec<_> = book.jobs().keys().filter_map(phase).collect();
    let left = all.iter().filter(|phase| matches!(phase, Err(Alone::Left(_)))).count();
    let shifted = all.iter().filter(|phase| phase.is_ok()).count();
    println!(
        "{shape}, {hosts} hosts: {ms:.1} ms for {} jobs, {shifted} with a shift, {left} left alone",
        all.len()
    );
    let label = Label { name: "other".to_owned(), owner: String::new() };
    let other = "ring:2@1M".parse().expect("a job");
    let held = place_job(&mut book, Abstraction::Parfait, 100, &mut memory, label, other);
    let change = Change::Admit(held.expect("a place"));
    book.apply(1, &Entry { client: 2, sequence: 1, change }).expect("it fits");
    let (changed, ms) = timed(|| staggering.update(&book));
    assert!(changed.is_empty(), "a job without a cycle changes no time");
    println!("{shape}: {ms:.3} ms for another job");
}

fn main() {
    worst_of_all();
    large("fat-tree:16", 256);
    large("fat-tree:40", 1_000);
}
