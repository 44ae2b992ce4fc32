//! Placed jobs that move: away from hosts, and so that others have room.

use std::collections::BTreeMap;

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::{JobId, Ledger};
use parfait::loads::Piece;
use parfait::network::{Network, Routing};
use parfait::placement::Request;
use parfait::placement::defragmentation::{defragment, make_room, total_cost};
use parfait::placement::migration::{Limits, Plan, Standing, Stuck, drain};
use parfait::placement::search::{Memory, place};
use parfait::runs::Run;
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::Capacity;
use topology::shape::Shape;

const ABSTRACTION: Abstraction = Abstraction::Parfait;

type Placed = BTreeMap<JobId, (Job, Order, Vec<Piece>)>;

fn ledger(shape: &str, slots: u32) -> Ledger {
    let shape: Shape = shape.parse().expect("a shape");
    let topology = shape.build(Capacity::default()).expect("small");
    let relays = matches!(shape, Shape::Bcube { .. });
    let routing = if relays { Routing::Relayed(Ecmp::Even) } else { Routing::Ecmp(Ecmp::Even) };
    let network = Network::new(&topology, slots, routing, |_, link| {
        let [a, b] = link.ends.map(|end| topology.node(end.node).kind());
        if a == b { link.capacity.rate_bps / 2 } else { link.capacity.rate_bps }
    });
    Ledger::new(network.expect("connected"))
}

fn standings(placed: &Placed) -> Vec<Standing<'_>> {
    placed
        .iter()
        .map(|(id, (job, order, pieces))| Standing {
            id: *id,
            name: "",
            job,
            abstraction: ABSTRACTION,
            order: *order,
            pieces,
        })
        .collect()
}

fn admit(
    ledger: &mut Ledger,
    placed: &mut Placed,
    id: JobId,
    text: &str,
    pieces: Option<Vec<Piece>>,
) {
    let job: Job = text.parse().expect(text);
    let request = Request::new(&job, ABSTRACTION).expect(text);
    let (order, pieces) = match pieces {
        Some(pieces) => (Order::Ranks, pieces),
        None => match place(ledger, &request, &mut Memory::new(), id, 40) {
            Ok(found) => (found.order, found.pieces),
            Err(_) => return,
        },
    };
    let demand = request.demand(order);
    let slots = job.slots_per_worker;
    ledger.admit(id, demand, slots, ABSTRACTION, &pieces).expect("it fits");
    placed.insert(id, (job, order, pieces));
}

/// Jobs that came and went, so that what is left is scattered.
fn scattered(ledger: &mut Ledger, jobs: u64, random: &mut Pcg32) -> Placed {
    let mut placed = Placed::new();
    for id in 1..=jobs {
        let workers = 2 + random.next_u32() % 6;
        let text = match random.next_u32() % 3 {
            0 => format!("mesh:{workers}@{}G", 1 + random.next_u32() % 5),
            _ => format!("ring:{workers}@{}G", 2 + random.next_u32() % 20),
        };
        admit(ledger, &mut placed, id, &text, None);
    }
    for id in 1..=jobs {
        if random.next_u32() % 5 < 2 && placed.remove(&id).is_some() {
            ledger.release(id).expect("it was admitted");
        }
    }
    placed
}

/// Every step fits when it is taken, and the ledger is what they lead to.
fn check(before: &Ledger, placed: &Placed, plan: &Plan, most_moved: u32) {
    let mut ledger = before.clone();
    for step in &plan.steps {
        let (job, ..) = &placed[&step.job];
        let request = Request::new(job, ABSTRACTION).expect("a job");
        let demand = request.demand(step.order);
        let slots = job.slots_per_worker;
        ledger.relocate(step.job, demand, slots, ABSTRACTION, &step.pieces).expect("in this order");
        ledger.audit().expect("L1 to L3");
    }
    for trunk in 0..ledger.network().trunks() as u32 {
        assert_eq!(ledger.reserved_bps(trunk), plan.ledger.reserved_bps(trunk));
    }
    assert!(plan.workers_moved() <= most_moved);
}

#[test]
fn a_drained_host_is_empty_and_only_its_workers_move() {
    let mut random = Pcg32::new(41, 1);
    let (mut drained, mut stuck) = (0, 0);
    for shape in ["fat-tree:4", "leaf-spine:4x2x4", "rail:2x4x2x3", "bcube:3x2", "torus:3x3:2"] {
        for seed in 0..6 {
            let mut ledger = ledger(shape, 4);
            let placed = scattered(&mut ledger, 8, &mut random);
            let host = random.next_u32() % ledger.network().hosts();
            let limits = Limits { most_moved: 1_000, tries: 100, seed };
            let plan = drain(&ledger, &standings(&placed), &[host], limits);
            check(&ledger, &placed, &plan, limits.most_moved);
            stuck += plan.stuck.len();
            let on_host = |pieces: &[Piece]| -> u32 {
                let own = pieces.iter().filter(|piece| piece.host == host);
                own.map(|piece| piece.run.len()).sum()
            };
            for (id, (_, _, pieces)) in &placed {
                let is_stuck = plan.stuck.iter().any(|(job, _)| job == id);
                let held = &plan.ledger.admissions()[id].pieces;
                match (on_host(pieces), is_stuck) {
                    (0, _) | (_, true) => assert_eq!(held, pieces),
                    _ => {
                        assert_eq!(on_host(held), 0);
                        drained += 1;
                    }
                }
            }
            if plan.stuck.is_empty() {
                assert_eq!(plan.ledger.free_slots(host), 4);
            }
            let none =
                drain(&ledger, &standings(&placed), &[host], Limits { most_moved: 0, ..limits });
            assert!(none.steps.is_empty());
            assert!(none.stuck.iter().all(|(_, why)| matches!(why, Stuck::Bound { left: 0, .. })));
        }
    }
    assert!(drained > 10 && stuck * 4 < drained, "{drained} drained, {stuck} stuck");
}

#[test]
fn defragmentation_lowers_the_cost_within_its_bound() {
    let mut random = Pcg32::new(42, 1);
    let (mut lowered, mut before_all, mut after_all, mut moved) = (0, 0_u64, 0_u64, 0);
    for shape in ["fat-tree:4", "leaf-spine:4x2x4", "bcube:3x2", "torus:3x3:2"] {
        for seed in 0..4 {
            let mut ledger = ledger(shape, 4);
            let placed = scattered(&mut ledger, 14, &mut random);
            let limits = Limits { most_moved: 8, tries: 8, seed };
            let plan = defragment(&ledger, &standings(&placed), limits);
            check(&ledger, &placed, &plan, limits.most_moved);
            let before = total_cost(&ledger, &standings(&placed));
            let after = total_cost(&plan.ledger, &standings(&placed));
            assert!(after <= before, "{shape} {seed}");
            assert_eq!(after < before, !plan.steps.is_empty());
            lowered += u32::from(after < before);
            (before_all, after_all) = (before_all + before, after_all + after);
            moved += plan.workers_moved();
            assert!(
                defragment(&ledger, &standings(&placed), Limits { most_moved: 0, ..limits })
                    .steps
                    .is_empty()
            );
        }
    }
    println!("{lowered} of 16 lowered, {before_all} to {after_all}, {moved} workers moved");
    assert!(
        lowered >= 8 && after_all * 100 < before_all * 97,
        "{lowered}: {before_all} {after_all}"
    );
}

#[test]
fn room_is_made_for_a_job_that_does_not_fit() {
    // Two hosts of each leaf are half full; a mesh fits below one leaf only.
    let mut ledger = ledger("leaf-spine:2x1x2", 4);
    let mut placed = Placed::new();
    for host in 0..4 {
        let pieces = vec![Piece { host, run: Run::new(0, 2) }];
        admit(&mut ledger, &mut placed, host.into(), "ring:2@10G", Some(pieces));
    }
    let wanted: Job = "mesh:8@6G".parse().expect("a job");
    let wanted = Request::new(&wanted, ABSTRACTION).expect("a job");
    let limits = Limits { most_moved: 4, tries: 200, seed: 1 };
    assert!(place(&ledger, &wanted, &mut Memory::new(), 1, 200).is_err());
    let (plan, placement) =
        make_room(&ledger, &standings(&placed), &wanted, limits).expect("two jobs move");
    check(&ledger, &placed, &plan, limits.most_moved);
    assert_eq!((plan.steps.len(), plan.workers_moved()), (2, 4));
    let mut after = plan.ledger.clone();
    after
        .admit(99, wanted.demand(placement.order), 1, ABSTRACTION, &placement.pieces)
        .expect("there is room");
    let fewer = Limits { most_moved: 3, ..limits };
    let refusal =
        make_room(&ledger, &standings(&placed), &wanted, fewer).map(|(plan, _)| plan.steps);
    assert!(refusal.is_err(), "{refusal:?}");
}

#[test]
fn room_is_made_on_scattered_clusters_by_steps_that_fit() {
    let mut random = Pcg32::new(43, 1);
    let (mut made, mut impossible, mut moved) = (0, 0, 0);
    for shape in ["fat-tree:4", "leaf-spine:4x2x4", "bcube:3x2", "torus:3x3:2"] {
        for seed in 0..12 {
            let mut ledger = ledger(shape, 4);
            let placed = scattered(&mut ledger, 16, &mut random);
            // Whole hosts, of which there are too few without moves.
            let empty = (0..ledger.network().hosts()).filter(|host| ledger.free_slots(*host) == 4);
            let workers = empty.count() + 1;
            let wanted: Job = format!("ring:{workers}@9G slots=4").parse().expect("a job");
            let wanted = Request::new(&wanted, ABSTRACTION).expect("a job");
            if place(&ledger, &wanted, &mut Memory::new(), seed, 200).is_ok() {
                continue;
            }
            let limits = Limits { most_moved: 12, tries: 60, seed };
            match make_room(&ledger, &standings(&placed), &wanted, limits) {
                Ok((plan, placement)) => {
                    check(&ledger, &placed, &plan, limits.most_moved);
                    let mut after = plan.ledger.clone();
                    let demand = wanted.demand(placement.order);
                    after.admit(99, demand, 4, ABSTRACTION, &placement.pieces).expect("room");
                    made += 1;
                    moved += plan.workers_moved();
                }
                Err(_) => impossible += 1,
            }
        }
    }
    println!("{made} made with {moved} workers moved, {impossible} not");
    assert!(made >= 5, "{made} made, {impossible} not");
}
