//! Workers that are kept apart: every way to place honours it, and refusals name it.

use std::collections::BTreeMap;

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::{Ledger, Refusal};
use parfait::loads::Piece;
use parfait::network::{Network, Routing};
use parfait::placement::migration::{Standing, apart};
use parfait::placement::search::{Memory, place};
use parfait::placement::{Request, exhaustive, greedy};
use parfait::runs::Run;
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::Capacity;
use topology::shape::Shape;

const ABSTRACTION: Abstraction = Abstraction::Parfait;

fn ledger(shape: &str, slots: u32) -> Ledger {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let relays = matches!(shape, Shape::Bcube { .. });
    let routing = if relays { Routing::Relayed(Ecmp::Even) } else { Routing::Ecmp(Ecmp::Even) };
    let network = Network::new(&topology, slots, routing, |_, link| link.capacity.rate_bps);
    Ledger::new(network.expect("connected"))
}

fn request(text: &str) -> Request {
    let job: Job = text.parse().expect(text);
    Request::new(&job, ABSTRACTION).expect(text)
}

/// Workers on each host and below each leaf.
fn counts(ledger: &Ledger, pieces: &[Piece]) -> [BTreeMap<u32, u32>; 2] {
    let groups = ledger.network().groups();
    let [mut hosts, mut leaves] = [BTreeMap::new(), BTreeMap::new()];
    for piece in pieces {
        *hosts.entry(piece.host).or_default() += piece.run.len();
        *leaves.entry(groups.parent(piece.host)).or_default() += piece.run.len();
    }
    [hosts, leaves]
}

#[test]
fn every_way_to_place_keeps_workers_apart() {
    let mut random = Pcg32::new(31, 1);
    let (mut found, mut refused, mut missed) = (0, 0, 0);
    for shape in ["fat-tree:4", "leaf-spine:4x2x4", "rail:2x4x2x3", "bcube:3x2", "torus:3x3:2"] {
        let mut ledger = ledger(shape, 8);
        for id in 0..80 {
            let workers = 2 + random.next_u32() % 20;
            let (per_host, per_leaf) = (1 + random.next_u32() % 5, 1 + random.next_u32() % 12);
            let (hosts, leaves) = (1 + random.next_u32() % workers, 1 + random.next_u32() % 3);
            let separation = match random.next_u32() % 4 {
                0 => format!("most=host:{per_host}"),
                1 => format!("most=leaf:{per_leaf}"),
                2 => format!("spread=hosts:{hosts}"),
                _ => format!("spread=leaves:{} most=host:{per_host}", leaves.min(workers)),
            };
            let job: Job = format!("ring:{workers}@1G {separation}").parse().expect("a job");
            let taken = ledger.network().hosts();
            let avoided = [random.next_u32() % taken, random.next_u32() % taken];
            let request = Request::new(&job, ABSTRACTION).expect("a job").avoiding(avoided);
            let placed = match id % 5 {
                0 => greedy::first_fit(&mut ledger, &request).map(|placed| placed.pieces),
                1 => greedy::best_fit(&ledger, &request),
                2 => greedy::oktopus(&mut ledger, &request).map(|placed| placed.pieces),
                3 => greedy::colocate(&mut ledger, &request).map(|placed| placed.pieces),
                _ => {
                    place(&ledger, &request, &mut Memory::new(), id, 60).map(|placed| placed.pieces)
                }
            };
            let Ok(pieces) = placed else {
                missed += u32::from(place(&ledger, &request, &mut Memory::new(), id, 60).is_ok());
                refused += 1;
                continue;
            };
            found += 1;
            let most = job.separation.most(workers);
            let [on_hosts, on_leaves] = counts(&ledger, &pieces);
            assert!(on_hosts.values().all(|count| *count <= most.0), "{shape} {job}: {pieces:?}");
            assert!(on_leaves.values().all(|count| *count <= most.1), "{shape} {job}: {pieces:?}");
            let even = |over: u32| if over == 0 { 0 } else { workers / workers.div_ceil(over) };
            assert!(on_hosts.len() as u32 >= even(job.separation.hosts), "{shape} {job}");
            assert!(on_leaves.len() as u32 >= even(job.separation.leaves), "{shape} {job}");
            assert!(!avoided.iter().any(|host| on_hosts.contains_key(host)), "{shape} {job}");
            let demand = request.demand(Order::Ranks);
            let _ = ledger.admit(id, demand, 1, ABSTRACTION, &pieces);
            if id >= 10 {
                let _ = ledger.release(id - 10);
            }
        }
    }
    assert!(found > 150 && refused > 20, "{found} found, {refused} refused");
    assert!(missed * 20 < found, "{missed} of {refused} refused by others than the search alone");
}

#[test]
fn the_search_finds_what_is_there_where_workers_are_kept_apart() {
    let mut gaps = Vec::new();
    for shape in ["leaf-spine:3x2x2", "rail:2x3x2x2", "bcube:2x1", "torus:3x2:1"] {
        let mut ledger = ledger(shape, 3);
        ledger.hold(1, 1, &[Piece { host: 0, run: Run::new(0, 2) }]).expect("empty");
        for text in ["ring:5@9G", "mesh:4@9G", "ps:3+2@9G", "torus:2x3@9G,5G"] {
            for separation in ["most=host:2", "spread=hosts:3", "spread=leaves:2", "most=leaf:2"] {
                let request = request(&format!("{text} {separation}")).avoiding([1]);
                let truth = exhaustive::cheapest(&ledger, &request).expect("few");
                let found = place(&ledger, &request, &mut Memory::new(), 1, 600);
                assert_eq!(
                    truth.is_some(),
                    found.is_ok(),
                    "{shape} {text} {separation}: {found:?}"
                );
                if let (Some(truth), Ok(found)) = (truth, found) {
                    assert!(found.cost >= truth.cost, "{shape} {text} {separation}");
                    gaps.push((found.cost + 1) as f64 / (truth.cost + 1) as f64 - 1.0);
                }
            }
        }
    }
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    println!("{} cases, {mean:.4} above the cheapest", gaps.len());
    // Two are of a parameter server whose cheapest place mixes roles on a host in no order that is
    // tried.
    assert!(gaps.len() > 30 && mean <= 0.03, "{} cases, {mean:.4}", gaps.len());
}

#[test]
fn refusals_name_what_keeps_workers_apart() {
    let mut ledger = ledger("leaf-spine:2x2x2", 8);
    let wide = request("ring:8@1G most=host:1");
    let refusal = place(&ledger, &wide, &mut Memory::new(), 1, 50).expect_err("four hosts");
    assert_eq!(
        refusal.to_string(),
        "8 workers are to be placed with 'most=host:1' and 0 hosts left out: other hosts hold 4"
    );
    assert_eq!(greedy::oktopus(&mut ledger, &wide), Err(refusal.clone()));
    assert_eq!(greedy::best_fit(&ledger, &wide), Err(refusal));
    let near = request("ring:17@1G apart=other").avoiding([0, 1]);
    let refusal = place(&ledger, &near, &mut Memory::new(), 1, 50).expect_err("two hosts are left");
    assert!(matches!(refusal, Refusal::Separated { held: 16, avoided: 2, .. }), "{refusal}");
}

#[test]
fn jobs_are_kept_apart_from_both_sides() {
    let mut ledger = ledger("leaf-spine:2x2x2", 8);
    let jobs: Vec<Job> = ["ring:2@1G", "ring:2@1G apart=new", "ring:2@1G apart=9"]
        .map(|text| text.parse().expect("a job"))
        .into();
    let pieces: Vec<[Piece; 1]> =
        (0..3).map(|host| [Piece { host, run: Run::new(0, 2) }]).collect();
    let names = ["a", "b", "c"];
    let standings: Vec<Standing<'_>> = (0..3_usize)
        .map(|at| Standing {
            id: at as u64,
            name: names[at],
            job: &jobs[at],
            abstraction: ABSTRACTION,
            order: Order::Ranks,
            pieces: &pieces[at],
        })
        .collect();
    for standing in &standings {
        let request = Request::new(standing.job, ABSTRACTION).expect("a job");
        let demand = request.demand(Order::Ranks);
        ledger.admit(standing.id, demand, 1, ABSTRACTION, standing.pieces).expect("empty");
    }
    let plain: Job = "ring:2@1G".parse().expect("a job");
    let picky: Job = "ring:2@1G apart=a,2".parse().expect("a job");
    assert_eq!(apart(&ledger, (7, "other", &plain), &standings), vec![]);
    assert_eq!(apart(&ledger, (7, "new", &plain), &standings), vec![1]);
    assert_eq!(apart(&ledger, (9, "other", &plain), &standings), vec![2]);
    assert_eq!(apart(&ledger, (7, "other", &picky), &standings), vec![0, 2]);
}
