//! Jobs that are admitted and whose guarantee then holds, by ways to place and to reserve, on
//! several topologies and loads.
//!
//! ```console
//! $ cargo run --release -p parfait --example acceptance
//! $ cargo run --release -p parfait --example acceptance -- --topology vl2 --load 80 --seeds 5
//! ```
//!
//! Jobs arrive at random (Poisson) and stay for an exponential time; the load is the slots that
//! they ask for against those that there are. Sizes are geometric with mean 12, at least 2. 40 %
//! are rings, 20 % parameter servers, 15 % tori, 15 % hierarchical, 10 % meshes. The rate of an
//! edge is uniform from 1 to 20 Gbit/s; with `--rates worker` the most that a worker sends or
//! receives is. Hosts have 8 slots and ports of 100 Gbit/s; links between switches carry a quarter
//! of what hosts could send over them.
//!
//! A job counts if it is admitted and at no time of its life one of its links is to carry more than
//! it can, by what the patterns of all jobs put there. That is always so where links are reserved.
//! Jobs of the first two mean lifetimes do not count: the network fills.

use std::collections::BTreeMap;

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::Ledger;
use parfait::network::{Network, Routing};
use parfait::pattern::Pattern;
use parfait::placement::search::{Memory, place};
use parfait::placement::{Placement, Request, greedy};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::{Capacity, Kind, Link, Topology};
use topology::lingjun;
use topology::shape::Shape;

const SLOTS: u32 = 8;
const HOST_BPS: u64 = 100_000_000_000;
const MEAN_WORKERS: f64 = 12.0;

/// A topology, how it is called, and what a link between switches carries.
struct Site {
    name: &'static str,
    rule: &'static str,
    switch_bps: u64,
}

const SITES: &[Site] = &[
    Site { name: "fat-tree", rule: "fat-tree:8", switch_bps: HOST_BPS / 4 },
    Site { name: "vl2", rule: "vl2:8x8x20", switch_bps: 20 * HOST_BPS / 8 },
    Site { name: "bcube-1", rule: "bcube:8x1", switch_bps: HOST_BPS / 4 },
    Site { name: "bcube-2", rule: "bcube:4x2", switch_bps: HOST_BPS / 4 },
    Site { name: "rail", rule: "rail:4x32x8x8", switch_bps: 32 * HOST_BPS / 32 },
    Site { name: "lingjun", rule: "", switch_bps: HOST_BPS / 4 },
];

/// Chooses hosts; the seed and the number of iterations are for the search.
type Place = fn(&mut Ledger, &Request, &mut Memory, u64, u32) -> Option<Placement>;

const BY_FIRST_FIT: Place = |ledger, request, _, _, _| greedy::first_fit(ledger, request).ok();
const BY_OKTOPUS: Place = |ledger, request, _, _, _| greedy::oktopus(ledger, request).ok();
const BY_COLOCATION: Place = |ledger, request, _, _, _| greedy::colocate(ledger, request).ok();
const BY_LOCALITY: Place = |ledger, request, _, _, _| {
    let pieces = greedy::best_fit(ledger, request).ok()?;
    Some(Placement { order: Order::Ranks, pieces, cost: 0 })
};
const BY_SEARCH: Place = |ledger, request, memory, seed, iterations| {
    place(ledger, request, memory, seed, iterations).ok()
};

/// A way to choose hosts, and what is reserved for them.
struct Way {
    name: &'static str,
    place: Place,
    /// `None` reserves nothing.
    abstraction: Option<Abstraction>,
    bound: Option<Bound>,
}

/// What no way can exceed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Bound {
    /// Links carry anything.
    SlotsAlone,
    /// Every job leaves before the next one comes.
    EmptyNetwork,
}

const fn way(name: &'static str, place: Place, abstraction: Abstraction) -> Way {
    Way { name, place, abstraction: Some(abstraction), bound: None }
}

const WAYS: &[Way] = &[
    Way {
        name: "bound: slots alone",
        place: BY_LOCALITY,
        abstraction: None,
        bound: Some(Bound::SlotsAlone),
    },
    Way {
        name: "bound: each job alone",
        place: BY_SEARCH,
        abstraction: Some(Abstraction::Parfait),
        bound: Some(Bound::EmptyNetwork),
    },
    Way { name: "locality only", place: BY_LOCALITY, abstraction: None, bound: None },
    way("first fit, hose", BY_FIRST_FIT, Abstraction::Hose),
    way("Oktopus (greedy, hose)", BY_OKTOPUS, Abstraction::Hose),
    way("CloudMirror (colocate, TAG)", BY_COLOCATION, Abstraction::Tag),
    way("search, hose", BY_SEARCH, Abstraction::Hose),
    way("greedy, Parfait", BY_OKTOPUS, Abstraction::Parfait),
    way("search, Parfait", BY_SEARCH, Abstraction::Parfait),
];

/// What to run.
struct Options {
    topology: Option<String>,
    /// Only ways whose names have it.
    way: Option<String>,
    loads: Vec<u32>,
    seeds: u64,
    iterations: u32,
    /// Whether rates are those of workers, not of edges.
    by_worker: bool,
}

fn options() -> Option<Options> {
    let mut options = Options {
        topology: None,
        way: None,
        loads: vec![60, 80, 90, 100],
        seeds: 20,
        iterations: 600,
        by_worker: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--topology" => options.topology = Some(value),
            "--way" => options.way = Some(value),
            "--load" => options.loads = vec![value.parse().ok()?],
            "--seeds" => options.seeds = value.parse().ok()?,
            "--rates" => options.by_worker = value == "worker",
            "--iterations" => options.iterations = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(options)
}

fn main() {
    let Some(options) = options() else {
        eprintln!(
            "usage: acceptance [--topology NAME] [--way TEXT] [--load PERCENT] [--seeds N] [--iterations N] [--rates edge|worker]"
        );
        std::process::exit(2);
    };
    let loads: Vec<String> = options.loads.iter().map(|load| format!("{load} %")).collect();
    println!("| topology | way | {} |", loads.join(" | "));
    println!("|---|---|{}", "---|".repeat(loads.len()));
    for site in SITES {
        if options.topology.as_ref().is_some_and(|name| name != site.name) {
            continue;
        }
        let Some(topology) = topology(site) else {
            eprintln!("{}: skipped, no file; set DQUANT_LINGJUN", site.name);
            continue;
        };
        for way in WAYS {
            if options.way.as_ref().is_some_and(|part| !way.name.contains(part.as_str())) {
                continue;
            }
            let cells = options.loads.iter().map(|load| {
                let seeds = 1..=options.seeds;
                let shares: Vec<Share> =
                    seeds.map(|seed| run(site, &topology, way, *load, seed, &options)).collect();
                interval(&shares)
            });
            let cells: Vec<String> = cells.collect();
            println!("| {} | {} | {} |", site.name, way.name, cells.join(" | "));
        }
    }
}

fn topology(site: &Site) -> Option<Topology> {
    // What links carry is said to the ledger; here they are wide enough for anything.
    let capacity = Capacity { rate_bps: 1 << 60, ..Capacity::default() };
    if !site.rule.is_empty() {
        let shape: Shape = site.rule.parse().expect("a rule");
        return Some(shape.build(capacity).expect("small"));
    }
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/lingjun/topo.csv");
    let path = std::env::var("DQUANT_LINGJUN").unwrap_or_else(|_| beside.to_string());
    let text = std::fs::read_to_string(path).ok()?;
    Some(lingjun::read(&text, capacity).expect("a topology"))
}

fn network(site: &Site, topology: &Topology, is_limited: bool) -> Network {
    let routing = match site.name {
        "bcube-1" | "bcube-2" => Routing::Relayed(Ecmp::Even),
        _ => Routing::Ecmp(Ecmp::Even),
    };
    let reservable = |_, link: &Link| {
        let ends = link.ends.map(|end| topology.node(end.node));
        let between_switches = ends.iter().all(|node| node.kind() == Kind::Switch);
        // Every link of BCube ends at a host; those of the higher levels stand for the links
        // between switches.
        let is_higher = site.name.starts_with("bcube")
            && ends
                .iter()
                .any(|node| node.kind() == Kind::Switch && !node.name().starts_with("l0"));
        match is_limited {
            true if between_switches || is_higher => site.switch_bps,
            true => HOST_BPS,
            false => link.capacity.rate_bps,
        }
    };
    Network::new(topology, SLOTS, routing, reservable).expect("connected")
}

/// The mean and its 95 % interval by Student's t for 20 samples, of jobs, and the mean of slots.
fn interval(shares: &[Share]) -> String {
    let count = shares.len() as f64;
    let mean = shares.iter().map(|share| share.jobs).sum::<f64>() / count;
    let slots = shares.iter().map(|share| share.slots).sum::<f64>() / count;
    if shares.len() < 2 {
        return format!("{mean:.1} [{slots:.1}]");
    }
    let squares = shares.iter().map(|share| (share.jobs - mean).powi(2));
    let variance = squares.sum::<f64>() / (count - 1.0);
    let t = if shares.len() == 20 { 2.093 } else { 1.96 };
    format!("{mean:.1} ± {:.1} [{slots:.1}]", t * (variance / count).sqrt())
}

/// A number uniform between 0 and 1, neither of which it is.
fn uniform(random: &mut Pcg32) -> f64 {
    (f64::from(random.next_u32()) + 0.5) / 4_294_967_296.0
}

fn exponential(random: &mut Pcg32, mean: f64) -> f64 {
    -mean * uniform(random).ln()
}

fn pattern(random: &mut Pcg32, by_worker: bool) -> Pattern {
    // Geometric from 2 on.
    let workers = 2 + (uniform(random).ln() / (1.0 - 1.0 / (MEAN_WORKERS - 1.0)).ln()) as u32;
    let bps = 1_000_000_000 + (uniform(random) * 19e9) as u64;
    let by_four = (workers / 4).max(2);
    // The rate of each of so many edges of one worker.
    let shared = |edges: u32| if by_worker { bps / u64::from(edges) } else { bps };
    match random.next_u32() % 100 {
        0..40 => Pattern::Ring { workers, rate_bps: bps },
        40..60 => {
            let servers = (workers / 4).max(1);
            let workers = workers - servers;
            let rate_bps = shared(workers.max(servers));
            Pattern::ParameterServer { workers, servers, rate_bps, is_async: false }
        }
        60..75 => {
            let (columns, rows) = (by_four, workers.div_ceil(by_four));
            Pattern::Torus { columns, rows, row_bps: bps, column_bps: bps }
        }
        75..90 => {
            let (group, groups) = (by_four, workers.div_ceil(by_four));
            let local_bps = shared(group - 1);
            Pattern::Hierarchical { groups, group, local_bps, leader_bps: bps }
        }
        _ => Pattern::Mesh { workers, rate_bps: shared(workers - 1) },
    }
}

/// Of the jobs that arrive after the network filled, those that are admitted and whose guarantee
/// holds, in percent.
struct Share {
    jobs: f64,
    /// By the slots that they ask for.
    slots: f64,
}

/// Runs one network from empty to the end.
fn run(
    site: &Site,
    topology: &Topology,
    way: &Way,
    load: u32,
    seed: u64,
    options: &Options,
) -> Share {
    let limited = network(site, topology, true);
    let mut ledger = match way.abstraction {
        Some(_) => Ledger::new(limited.clone()),
        None => Ledger::new(network(site, topology, false)),
    };
    let slots = f64::from(limited.hosts() * SLOTS);
    let at_once = slots * f64::from(load) / 100.0 / MEAN_WORKERS;
    let (warm_up, counted) = ((2.0 * at_once) as u64, (at_once as u64).max(400));
    let mut random = Pcg32::new(seed, 0x0a11_0c8d);
    let mut memory = Memory::new();
    let mut now = 0.0;
    // By the time in bits, which sorts as the time does.
    let mut ends: BTreeMap<(u64, u64), ()> = BTreeMap::new();
    let mut is_held: BTreeMap<u64, bool> = BTreeMap::new();
    let mut workers: BTreeMap<u64, u32> = BTreeMap::new();
    for id in 0..warm_up + counted {
        now += exponential(&mut random, 1.0 / at_once);
        let (pattern, stay) =
            (pattern(&mut random, options.by_worker), exponential(&mut random, 1.0));
        while let Some(((end, gone), ())) = ends.first_key_value().map(|(key, ())| (*key, ())) {
            if f64::from_bits(end) > now {
                break;
            }
            ends.pop_first();
            ledger.release(gone).expect("it was admitted");
        }
        let abstraction = way.abstraction.unwrap_or(Abstraction::Parfait);
        let request = Request::new(&Job::new(pattern), abstraction).expect("small");
        workers.insert(id, request.workers());
        let Some(placement) =
            (way.place)(&mut ledger, &request, &mut memory, id, options.iterations)
        else {
            continue;
        };
        let demand = request.demand(placement.order);
        let admitted = ledger.admit(id, demand, 1, abstraction, &placement.pieces);
        admitted.expect("it was found");
        is_held.insert(id, true);
        if way.bound == Some(Bound::EmptyNetwork) {
            ledger.release(id).expect("it was admitted");
            continue;
        }
        ends.insert(((now + stay).to_bits(), id), ());
        if way.abstraction.is_none() && way.bound.is_none() {
            break_overloaded(&ledger, &limited, id, &mut is_held);
        }
    }
    let held = is_held.range(warm_up..).filter(|(_, held)| **held).map(|(id, _)| *id);
    let slots: u32 = held.clone().map(|id| workers[&id]).sum();
    let all_slots: u32 = workers.range(warm_up..).map(|(_, workers)| *workers).sum();
    let jobs = 100.0 * held.count() as f64 / counted as f64;
    Share { jobs, slots: 100.0 * f64::from(slots) / f64::from(all_slots) }
}

/// Marks all jobs on links that a new job overloads.
fn break_overloaded(
    ledger: &Ledger,
    limited: &Network,
    id: u64,
    is_held: &mut BTreeMap<u64, bool>,
) {
    let loads = ledger.admissions()[&id].loads.iter().map(|load| load.trunk);
    let overloaded: Vec<u32> =
        loads.filter(|trunk| ledger.reserved_bps(*trunk) > limited.capacity_bps(*trunk)).collect();
    if overloaded.is_empty() {
        return;
    }
    for (other, admission) in ledger.admissions() {
        if admission.loads.iter().any(|load| overloaded.contains(&load.trunk)) {
            is_held.insert(*other, false);
        }
    }
}
