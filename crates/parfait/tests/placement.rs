//! Placement: the search against the truth on small cases, and what all ways to place have in
//! common.

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::{Ledger, Refusal};
use parfait::network::{Network, Routing};
use parfait::placement::search::{MOST_EFFORT, Memory, Search, place};
use parfait::placement::{Placement, Request, exhaustive, greedy};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::Capacity;
use topology::shape::Shape;

/// A network whose links between switches have a quarter of the rate of hosts' links.
fn ledger(shape: &str, slots: u32) -> Ledger {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let relays = matches!(shape, Shape::Bcube { .. });
    let routing = if relays { Routing::Relayed(Ecmp::Even) } else { Routing::Ecmp(Ecmp::Even) };
    let network = Network::new(&topology, slots, routing, |_, link| {
        let [a, b] = link.ends.map(|end| topology.node(end.node).kind());
        if a == b { link.capacity.rate_bps / 4 } else { link.capacity.rate_bps }
    });
    Ledger::new(network.expect("connected"))
}

fn request(text: &str, abstraction: Abstraction) -> Request {
    let job: Job = text.parse().expect(text);
    Request::new(&job, abstraction).expect(text)
}

/// Takes slots and links away at random.
fn occupy(ledger: &mut Ledger, jobs: u64, random: &mut Pcg32) {
    let mut memory = Memory::new();
    for id in 0..jobs {
        let workers = 1 + random.next_u32() % 4;
        let rate = 1 + random.next_u32() % 15;
        let request = request(&format!("ring:{workers}@{rate}G"), Abstraction::Parfait);
        // Ranks far apart, so that links are used, too.
        let pieces: Vec<_> = match place(ledger, &request, &mut memory, id, 20) {
            Ok(placement) => placement.pieces,
            Err(_) => continue,
        };
        let order = Order::Ranks;
        let _ = ledger.admit(1_000 + id, request.demand(order), 1, Abstraction::Parfait, &pieces);
    }
    for id in 0..jobs {
        if random.next_u32().is_multiple_of(2) {
            let _ = ledger.release(1_000 + id);
        }
    }
    let links: Vec<(u32, u32)> = ledger.network().links().collect();
    for id in 0..jobs {
        let (link, trunk) = links[random.next_u32() as usize % links.len()];
        let part = u64::from(random.next_u32() % 80);
        let _ = ledger.reserve(2_000 + id, &[(link, ledger.free_bps(trunk) * part / 100)]);
    }
}

const PATTERNS: &[&str] = &[
    "ring:6@9G",
    "ring:5@4G",
    "tree:6@7G",
    "torus:3x2@6G,3G",
    "torus:2x3@6G,9G",
    "hierarchical:2x3@3G,9G",
    "ps:4+2@4G",
    "async-ps:3+2@4G",
    "mesh:5@3G",
    "pipeline:6@8G",
    "parallel:2x3x1@9G,4G,1G",
    "parallel:2x1x3@9G,1G,4G",
];

#[test]
fn the_search_comes_close_to_the_cheapest_of_all_placements() {
    let mut random = Pcg32::new(11, 1);
    let mut memory = Memory::new();
    let (mut gaps, mut impossible, mut missed) = (Vec::new(), 0, 0);
    for shape in
        ["leaf-spine:3x2x2", "leaf-spine:2x1x3", "rail:2x3x2x2", "bcube:2x1", "torus:3x2:1"]
    {
        for text in PATTERNS {
            for jobs in [0, 3, 6] {
                let mut ledger = ledger(shape, 4);
                occupy(&mut ledger, jobs, &mut random);
                let request = request(text, Abstraction::Parfait);
                let truth = exhaustive::cheapest(&ledger, &request).expect("few assignments");
                let found = place(&ledger, &request, &mut memory, 1, 600);
                match (truth, found) {
                    (None, Err(_)) => impossible += 1,
                    (None, Ok(found)) => panic!("{shape} {text}: {found:?} cannot be"),
                    (Some(_), Err(_)) => missed += 1,
                    (Some(truth), Ok(found)) => {
                        assert!(found.cost >= truth.cost, "{shape} {text}: {found:?} {truth:?}");
                        let gap = (found.cost + 1) as f64 / (truth.cost + 1) as f64 - 1.0;
                        gaps.push(gap);
                    }
                }
            }
        }
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let worst = gaps.iter().copied().fold(0.0, f64::max);
    println!(
        "{} cases, {impossible} impossible, {missed} missed: mean {mean:.4}, worst {worst:.4}",
        gaps.len()
    );
    assert!(gaps.len() > 100 && missed == 0);
    assert!(mean <= 0.02 && worst <= 0.10, "mean {mean:.4}, worst {worst:.4}");
}

/// The pieces are a placement of all workers that the ledger admits, and the cost is that of the
/// loads.
fn admit(ledger: &mut Ledger, id: u64, request: &Request, placement: &Placement) {
    let demand = request.demand(placement.order);
    let abstraction = request.abstraction();
    let loads = ledger.check(demand, 1, abstraction, &placement.pieces).expect("it was found");
    let own = parfait::placement::cost(ledger, 1, &placement.pieces, &loads);
    assert_eq!(own, Some(placement.cost));
    ledger.admit(id, demand, 1, abstraction, &placement.pieces).expect("it was checked");
}

#[test]
fn what_any_way_finds_is_admitted_at_the_cost_it_names() {
    let mut random = Pcg32::new(12, 1);
    let mut memory = Memory::new();
    let (mut found, mut refused) = (0, 0);
    for shape in ["fat-tree:4", "vl2:4x4x3", "rail:2x4x2x3", "bcube:3x2", "torus:3x3:2"] {
        let mut ledger = ledger(shape, 8);
        for id in 0..120 {
            let text = PATTERNS[random.next_u32() as usize % PATTERNS.len()];
            let abstraction = Abstraction::ALL[random.next_u32() as usize % 3];
            let request = request(text, abstraction);
            let placed = match random.next_u32() % 4 {
                0 => greedy::first_fit(&mut ledger, &request),
                1 => greedy::oktopus(&mut ledger, &request),
                2 => greedy::colocate(&mut ledger, &request),
                _ => place(&ledger, &request, &mut memory, id, 60),
            };
            match placed {
                Ok(placement) => {
                    admit(&mut ledger, id, &request, &placement);
                    found += 1;
                }
                Err(_) => refused += 1,
            }
            if id >= 12 {
                let _ = ledger.release(random.next_u32() as u64 % id);
            }
        }
        ledger.audit().expect("L1 to L3");
    }
    assert!(found > 300 && refused > 20, "{found} found, {refused} refused");
}

#[test]
fn the_same_seed_finds_the_same_and_more_iterations_find_nothing_worse() {
    let mut random = Pcg32::new(13, 1);
    let mut ledger = ledger("fat-tree:4", 8);
    occupy(&mut ledger, 20, &mut random);
    for text in PATTERNS {
        let request = request(text, Abstraction::Parfait);
        let (mut fresh, mut memory) = (Memory::new(), Memory::new());
        // What the memory holds from other searches does not matter.
        let _ = place(&ledger, &request, &mut memory, 99, 37);
        let mut search = Search::new(&ledger, &request, &mut memory, 5).expect("slots");
        let mut before = u64::MAX;
        for _ in 0..10 {
            search.run(20);
            let cost = search.best().map_or(u64::MAX, |placement| placement.cost);
            assert!(cost <= before, "{text}");
            before = cost;
        }
        let first = place(&ledger, &request, &mut fresh, 5, 200).expect("it fits");
        let again = place(&ledger, &request, &mut memory, 5, 200).expect("it fits");
        assert_eq!(first, again, "{text}");
    }
}

#[test]
fn best_fit_takes_the_tightest_group_and_ignores_links() {
    let mut ledger = ledger("fat-tree:4", 8);
    let small = request("ring:3@1G", Abstraction::Parfait);
    let placement = greedy::first_fit(&mut ledger, &small).expect("empty");
    admit(&mut ledger, 1, &small, &placement);
    let pieces =
        greedy::best_fit(&ledger, &request("ring:5@1G", Abstraction::Parfait)).expect("empty");
    assert_eq!(pieces.len(), 1);
    assert_eq!(pieces[0].host, placement.pieces[0].host);
    // A mesh that no link holds.
    let wide = request("mesh:16@90G", Abstraction::Parfait);
    assert_eq!(greedy::best_fit(&ledger, &wide).expect("slots").len(), 2);
    let refusal = greedy::oktopus(&mut ledger, &wide).expect_err("too wide");
    assert!(matches!(refusal, Refusal::Bandwidth { .. }), "{refusal}");
    let refusal = place(&ledger, &wide, &mut Memory::new(), 1, 50).expect_err("too wide");
    assert!(matches!(refusal, Refusal::Bandwidth { .. }), "{refusal}");
    let refusal = greedy::best_fit(&ledger, &request("ring:500@1G", Abstraction::Parfait));
    assert_eq!(refusal, Err(Refusal::AllSlots { needed: 500, free: 125 }));
}

#[test]
fn workers_of_several_slots_get_them() {
    let mut ledger = ledger("leaf-spine:2x2x2", 8);
    let request = request("ring:6@1G slots=3", Abstraction::Parfait);
    let mut memory = Memory::new();
    let placement =
        place(&ledger, &request, &mut memory, 1, 100).expect("two workers on each of three hosts");
    assert!(placement.pieces.iter().all(|piece| piece.run.len() <= 2), "{placement:?}");
    let demand = request.demand(placement.order);
    ledger.admit(1, demand, 3, Abstraction::Parfait, &placement.pieces).expect("it was found");
    assert_eq!(ledger.free_slots(ledger.network().groups().root()), 32 - 18);
    // 14 slots are free, but only the empty host has three for a worker.
    let request = self::request("ring:3@1G slots=3", Abstraction::Parfait);
    let scattered = Refusal::Scattered { workers: 3, slots_per_worker: 3, held: 2 };
    assert_eq!(place(&ledger, &request, &mut memory, 1, 100), Err(scattered.clone()));
    assert_eq!(greedy::first_fit(&mut ledger, &request), Err(scattered.clone()));
    assert_eq!(greedy::oktopus(&mut ledger, &request), Err(scattered));
}

/// Links are as scarce as can be: an iteration that is given up in a group must not go on in
/// another.
#[test]
fn what_the_search_finds_on_crowded_links_is_admitted() {
    let mut random = Pcg32::new(14, 1);
    let mut memory = Memory::new();
    let mut found = 0;
    for shape in ["fat-tree:4", "fat-tree:6", "leaf-spine:8x2x8"] {
        let mut ledger = ledger(shape, 8);
        for id in 0..150 {
            let workers = 2 + random.next_u32() % 40;
            let text = match random.next_u32() % 3 {
                0 => format!("ring:{workers}@{}G", 1 + random.next_u32() % 20),
                1 => format!(
                    "ps:{}+{}@{}M",
                    workers,
                    1 + workers / 4,
                    100 + random.next_u32() % 2_000
                ),
                _ => format!("hierarchical:{}x4@2G,9G", 1 + workers / 4),
            };
            let abstraction = Abstraction::ALL[random.next_u32() as usize % 3];
            let request = request(&text, abstraction);
            if let Ok(placement) = place(&ledger, &request, &mut memory, id, 300) {
                admit(&mut ledger, id, &request, &placement);
                found += 1;
            }
            if id >= 8 {
                let _ = ledger.release(u64::from(random.next_u32()) % id);
            }
        }
    }
    assert!(found > 150, "{found} found");
}

/// Hosts of a shape with so many slots.
fn large(shape: &str, slots: u32) -> Ledger {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("a topology");
    let rate = |_, link: &topology::graph::Link| link.capacity.rate_bps;
    let routing = Routing::Ecmp(Ecmp::Even);
    Ledger::new(Network::new(&topology, slots, routing, rate).expect("connected"))
}

/// The effort of a placement, and what came of it.
fn effort(ledger: &Ledger, job: &str, iterations: u32) -> (u64, Result<u32, Refusal>) {
    let request = Request::new(&job.parse().expect("a job"), Abstraction::Parfait).expect("a job");
    let mut memory = Memory::new();
    let placed = place(ledger, &request, &mut memory, 1, iterations);
    let workers = |placement: Placement| placement.pieces.iter().map(|piece| piece.run.len()).sum();
    (memory.effort(), placed.map(workers))
}

#[test]
fn a_search_stops_by_itself_however_large_the_job_is() {
    let ledger = large("fat-tree:16", 1024);
    for (job, workers) in [
        ("ring:1000000@1k", 1_000_000),
        ("hierarchical:8x100000@1k,1k", 800_000),
        ("mesh:100000@1", 100_000),
        ("parallel:8x400x200@1k,1k,1k", 640_000),
    ] {
        let (effort, placed) = effort(&ledger, job, u32::MAX);
        assert_eq!(placed, Ok(workers), "{job}");
        assert!(effort < MOST_EFFORT + MOST_EFFORT / 8, "{job}: {effort}");
    }
    let (effort, placed) = effort(&ledger, "ring:1000000@1T", u32::MAX);
    assert!(matches!(placed, Err(Refusal::Bandwidth { .. })), "{placed:?}");
    assert!(effort < 2 * MOST_EFFORT + MOST_EFFORT / 8, "{effort}");
}

#[test]
fn small_jobs_have_all_their_iterations() {
    for shape in ["fat-tree:16", "torus:4x4:4", "leaf-spine:16x8x16"] {
        let ledger = large(shape, 8);
        for job in ["ring:48@1G", "mesh:48@100M", "torus:8x6@1G,1G", "hierarchical:8x8@1G,1G"] {
            let (effort, placed) = effort(&ledger, job, 600);
            assert!(placed.is_ok() && effort < MOST_EFFORT, "{shape}, {job}: {effort}");
        }
    }
}

#[test]
fn off_a_tree_a_job_whose_pairs_take_too_long_is_refused_and_says_so() {
    let ledger = large("torus:12x12:6", 2);
    let (effort_of_mesh, placed) = effort(&ledger, "mesh:1700@1", 600);
    assert_eq!(placed, Err(Refusal::TooLarge { workers: 1700 }));
    assert!(effort_of_mesh < 3 * MOST_EFFORT, "{effort_of_mesh}");
    let (_, placed) = effort(&ledger, "ring:1700@1k", 600);
    assert_eq!(placed, Ok(1700), "a ring has few pairs that exchange something");
}
