//! Hosts and links that fail and come back: who is hit, what moves, against the truth on small
//! cases.

use std::collections::BTreeMap;

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::{JobId, Ledger};
use parfait::loads::Piece;
use parfait::network::{Network, Routing};
use parfait::outage::Outage;
use parfait::placement::Request;
use parfait::placement::migration::{Limits, Standing, Stuck, difference};
use parfait::placement::search::{Memory, place};
use parfait::repair::{Repair, Struck, repair, strike};
use parfait::runs::Run;
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::graph::{Capacity, Kind, LinkId, NodeId, Topology};
use topology::shape::Shape;

const ABSTRACTION: Abstraction = Abstraction::Parfait;

/// A topology, and what of it is down.
struct World {
    topology: Topology,
    slots: u32,
    relays: bool,
    outage: Outage,
}

impl World {
    fn new(shape: &str, slots: u32) -> World {
        let shape: Shape = shape.parse().expect("a shape");
        let topology = shape.build(Capacity::default()).expect("small");
        let relays = matches!(shape, Shape::Bcube { .. });
        World { topology, slots, relays, outage: Outage::none() }
    }

    /// Links between switches can carry half of what hosts' links can.
    fn network(&self) -> Network {
        let topology = &self.topology;
        let routing =
            if self.relays { Routing::Relayed(Ecmp::Even) } else { Routing::Ecmp(Ecmp::Even) };
        let reservable = |_, link: &topology::graph::Link| {
            let [a, b] = link.ends.map(|end| topology.node(end.node).kind());
            if a == b { link.capacity.rate_bps / 2 } else { link.capacity.rate_bps }
        };
        Network::with_outage(topology, self.slots, routing, reservable, &self.outage)
            .expect("some hosts are left")
    }

    fn named(&self, name: &str) -> NodeId {
        self.topology.named(name).expect(name)
    }

    fn links_between(&self, a: &str, b: &str) -> Vec<LinkId> {
        let nodes = [self.named(a), self.named(b)];
        let joins =
            |link: &topology::graph::Link| link.ends.iter().all(|end| nodes.contains(&end.node));
        self.topology.links().filter(|(_, link)| joins(link)).map(|(id, _)| id).collect()
    }

    /// One to three links, hosts or switches go down.
    fn fail(&mut self, random: &mut Pcg32) {
        let links: Vec<LinkId> = self.topology.links().map(|(id, _)| id).collect();
        let nodes: Vec<NodeId> = self.topology.nodes().map(|(id, _)| id).collect();
        for _ in 0..1 + random.next_u32() % 3 {
            if random.next_u32().is_multiple_of(3) {
                self.outage.set_node(nodes[random.next_u32() as usize % nodes.len()], true);
            } else {
                self.outage.set_link(links[random.next_u32() as usize % links.len()], true);
            }
        }
    }
}

type Placed = BTreeMap<JobId, (Job, Order, Vec<Piece>)>;

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

/// Jobs that a search has placed, with a few workers each.
fn filled(ledger: &mut Ledger, jobs: u64, most_workers: u32, random: &mut Pcg32) -> Placed {
    let mut placed = Placed::new();
    for id in 1..=jobs {
        let workers = 2 + random.next_u32() % (most_workers - 1);
        let rate = 5 + random.next_u32() % 40;
        let text = match random.next_u32() % 4 {
            0 => format!("mesh:{workers}@{}G", 1 + rate / 3),
            1 => format!("ps:{workers}+1@{}G", 1 + rate / 4),
            _ => format!("ring:{workers}@{rate}G"),
        };
        let job: Job = text.parse().expect("a job");
        let request = Request::new(&job, ABSTRACTION).expect("a job");
        if let Ok(found) = place(ledger, &request, &mut Memory::new(), id, 40) {
            let demand = request.demand(found.order);
            ledger.admit(id, demand, 1, ABSTRACTION, &found.pieces).expect("it was found");
            placed.insert(id, (job, found.order, found.pieces));
        }
    }
    placed
}

fn limits(seed: u64) -> Limits {
    Limits { most_moved: u32::MAX, tries: 200, seed }
}

/// What holds after every repair.
fn check(world: &World, placed: &Placed, struck: &Struck, done: &Repair) {
    done.ledger.audit().expect("L1 to L3");
    struck.ledger.audit().expect("L1 to L3");
    let network = world.network();
    for (id, (job, order, pieces)) in placed {
        let held = &done.ledger.admissions()[id];
        let step = done.steps.iter().find(|step| step.job == *id);
        let degraded = done.degraded.iter().find(|degraded| degraded.job == *id);
        let is_hit = struck.hits.contains_key(id);
        assert_eq!(is_hit, step.is_some() || degraded.is_some(), "{id}");
        assert_eq!(held.is_degraded(), degraded.is_some());
        match step {
            Some(step) => {
                assert_eq!(held.pieces, step.pieces);
                assert!(step.pieces.iter().all(|piece| !network.is_lost(piece.host)));
                let before = (*order, pieces.as_slice());
                let after = (step.order, step.pieces.as_slice());
                assert_eq!(difference(&job.pattern, before, after), step.moved);
            }
            // Others are not touched, and what is degraded keeps its place.
            None => assert_eq!(&held.pieces, pieces),
        }
    }
    // Each step fits when it is taken.
    let mut ledger = struck.ledger.clone();
    for step in &done.steps {
        let job = &placed[&step.job].0;
        let request = Request::new(job, ABSTRACTION).expect("a job");
        let demand = request.demand(step.order);
        ledger.relocate(step.job, demand, 1, ABSTRACTION, &step.pieces).expect("in this order");
        ledger.audit().expect("L1 to L3");
    }
}

/// The fewest workers that have to move so that all jobs that are hit have bandwidth; `None` if
/// they cannot.
fn truth(struck: &Struck, placed: &Placed) -> Option<u32> {
    let mut ledger = struck.ledger.clone();
    let hit: Vec<JobId> = struck.hits.keys().copied().collect();
    for id in &hit {
        ledger.release(*id).expect("it is held");
    }
    least_moved(&mut ledger, placed, &hit, u32::MAX)
}

fn least_moved(ledger: &mut Ledger, placed: &Placed, hit: &[JobId], mut below: u32) -> Option<u32> {
    let Some((id, others)) = hit.split_first() else { return Some(0) };
    let (job, order, pieces) = &placed[id];
    let request = Request::new(job, ABSTRACTION).expect("a job");
    let demand = request.demand(*order);
    let hosts = ledger.network().hosts();
    let host_of = |place: u32| {
        let own = pieces.iter().find(|piece| (piece.run.first..piece.run.end).contains(&place));
        own.expect("each has one").host
    };
    let workers = request.workers();
    let mut best = None;
    for number in 0..u64::from(hosts).pow(workers) {
        let mut rest = number;
        let mut tried = Vec::new();
        for place in 0..workers {
            let run = Run::new(place, place + 1);
            tried.push(Piece { host: (rest % u64::from(hosts)) as u32, run });
            rest /= u64::from(hosts);
        }
        let moved = tried.iter().filter(|piece| host_of(piece.run.first) != piece.host).count();
        let moved = moved as u32;
        if moved >= below || ledger.admit(*id, demand, 1, ABSTRACTION, &tried).is_err() {
            continue;
        }
        if let Some(more) = least_moved(ledger, placed, others, below - moved) {
            below = moved + more;
            best = Some(below);
        }
        ledger.release(*id).expect("it was admitted");
    }
    best
}

#[test]
fn repairs_move_as_few_workers_as_any_assignment_would() {
    let mut random = Pcg32::new(21, 1);
    let (mut cases, mut impossible, mut more, mut missed, mut moves) = (0, 0, 0, 0, 0);
    for shape in
        ["leaf-spine:3x2x2", "leaf-spine:2x2x3", "rail:2x3x2x2", "bcube:2x1", "torus:3x2:1"]
    {
        for seed in 0..40 {
            let mut world = World::new(shape, 3);
            let mut ledger = Ledger::new(world.network());
            let placed = filled(&mut ledger, 5, 3, &mut random);
            world.fail(&mut random);
            let struck = strike(world.network(), &standings(&placed)).expect("placed there");
            let workers: u32 = struck.hits.keys().map(|id| count(&placed[id].2)).sum();
            if struck.hits.is_empty() || u64::from(ledger.network().hosts()).pow(workers) > 1 << 16
            {
                continue;
            }
            let done = repair(&struck, &standings(&placed), limits(seed));
            check(&world, &placed, &struck, &done);
            cases += 1;
            moves += done.workers_moved();
            match truth(&struck, &placed) {
                None => {
                    assert!(!done.degraded.is_empty(), "{shape} {seed}: nothing fits");
                    impossible += 1;
                }
                Some(_) if !done.degraded.is_empty() => missed += 1,
                Some(least) => {
                    assert!(done.workers_moved() >= least, "{shape} {seed}: fewer than the truth");
                    more += u32::from(done.workers_moved() > least);
                }
            }
        }
    }
    println!(
        "{cases} cases, {impossible} impossible, {missed} missed, {more} with more moves; {moves} moves"
    );
    assert!(cases >= 60 && impossible >= 5, "{cases} cases, {impossible} impossible");
    assert!(missed == 0 && more * 50 <= cases, "{missed} missed, {more} with more moves");
}

fn count(pieces: &[Piece]) -> u32 {
    pieces.iter().map(|piece| piece.run.len()).sum()
}

#[test]
fn what_comes_back_makes_degraded_jobs_whole_and_the_ledger_the_old_one() {
    let mut random = Pcg32::new(22, 1);
    let (mut degraded, mut moved) = (0, 0);
    for shape in
        ["fat-tree:4", "leaf-spine:4x3x4", "vl2:4x4x3", "rail:2x4x2x3", "bcube:3x2", "torus:3x3:2"]
    {
        for seed in 0..6 {
            let mut world = World::new(shape, 4);
            let mut ledger = Ledger::new(world.network());
            let placed = filled(&mut ledger, 8, 7, &mut random);
            for _ in 0..1 + seed {
                world.fail(&mut random);
            }
            let struck = strike(world.network(), &standings(&placed)).expect("placed there");
            // Without moves all keep their place, and some their bandwidth.
            let still =
                repair(&struck, &standings(&placed), Limits { most_moved: 0, ..limits(seed) });
            check(&world, &placed, &struck, &still);
            assert_eq!(still.workers_moved(), 0);
            degraded += still.degraded.len();
            world.outage = Outage::none();
            let back = strike(world.network(), &standings(&placed)).expect("placed there");
            assert!(back.hits.is_empty());
            assert!(same(&back.ledger, &ledger), "{shape} {seed}");
            // With moves no more are degraded; what has moved stays where it is when all is back.
            let done = repair(&struck, &standings(&placed), limits(seed));
            assert!(done.degraded.len() <= still.degraded.len(), "{shape} {seed}");
            moved += done.workers_moved();
            let mut placed = placed;
            for step in &done.steps {
                let (_, order, pieces) = placed.get_mut(&step.job).expect("placed");
                (*order, *pieces) = (step.order, step.pieces.clone());
            }
            let back = strike(world.network(), &standings(&placed)).expect("placed there");
            let whole = repair(&back, &standings(&placed), limits(seed));
            check(&world, &placed, &back, &whole);
        }
    }
    assert!(degraded > 20 && moved > 20, "{degraded} degraded, {moved} moved");
}

/// Whether both have the same jobs in the same places, and the same reserved.
fn same(one: &Ledger, other: &Ledger) -> bool {
    let trunks = 0..one.network().trunks() as u32;
    let groups = 0..one.network().groups().len() as u32;
    let places = |ledger: &Ledger| -> Vec<(JobId, Vec<Piece>)> {
        ledger.admissions().iter().map(|(id, held)| (*id, held.pieces.clone())).collect()
    };
    places(one) == places(other)
        && trunks.into_iter().all(|trunk| one.reserved_bps(trunk) == other.reserved_bps(trunk))
        && groups.into_iter().all(|group| one.free_slots(group) == other.free_slots(group))
}

#[test]
fn a_dead_host_moves_its_workers_and_nobody_else() {
    let mut world = World::new("leaf-spine:3x2x3", 4);
    let mut ledger = Ledger::new(world.network());
    let mut random = Pcg32::new(23, 1);
    let placed = filled(&mut ledger, 6, 4, &mut random);
    let (job, _, pieces) = &placed[&1];
    let host = ledger.network().host_name(pieces[0].host).to_string();
    let number = pieces[0].host;
    world.outage.set_node(world.named(&host), true);
    let network = world.network();
    assert!(network.is_tree() && network.is_lost(number) && network.slots_of(number) == 0);
    assert_eq!(network.host_named(&host), Some(number));
    let struck = strike(network, &standings(&placed)).expect("placed there");
    let done = repair(&struck, &standings(&placed), limits(1));
    check(&world, &placed, &struck, &done);
    let lost: u32 = placed
        .values()
        .flat_map(|(.., pieces)| pieces)
        .filter(|piece| piece.host == number)
        .map(|piece| piece.run.len())
        .sum();
    assert!(done.degraded.is_empty(), "{job}: {:?}", done.degraded);
    assert_eq!(done.workers_moved(), lost);
}

#[test]
fn what_cannot_be_repaired_says_which_link_lacks_how_much() {
    // Two leaves of one host each, two spines: 50 Gbit/s over each.
    let mut world = World::new("leaf-spine:2x2x1", 4);
    let mut ledger = Ledger::new(world.network());
    let job: Job = "ring:8@80G".parse().expect("a job");
    let request = Request::new(&job, ABSTRACTION).expect("a job");
    let pieces =
        vec![Piece { host: 0, run: Run::new(0, 4) }, Piece { host: 1, run: Run::new(4, 8) }];
    let order = Order::Ranks;
    ledger
        .admit(7, request.demand(order), 1, ABSTRACTION, &pieces)
        .expect("two links of 50 Gbit/s");
    let placed = Placed::from([(7, (job, order, pieces))]);
    let spine = world.named("spine1");
    world.outage.set_node(spine, true);
    // The other spine alone is a tree as well.
    assert!(world.network().is_tree());
    let struck = strike(world.network(), &standings(&placed)).expect("placed there");
    let done = repair(&struck, &standings(&placed), limits(1));
    check(&world, &placed, &struck, &done);
    let [degraded] = done.degraded.as_slice() else { panic!("{done:?}") };
    let missing = degraded.missing.as_ref().expect("no host is lost").to_string();
    assert!(missing.contains("50000000000 bit/s left, and 80000000000 are needed"), "{missing}");
    assert!(missing.contains("spine0"), "{missing}");
    assert!(matches!(degraded.why, Stuck::Refused(_)), "{}", degraded.why);
    // A bound on moves is named, too.
    let mut moving = World::new("leaf-spine:2x2x1", 8);
    moving.outage.set_node(spine, true);
    let struck = strike(moving.network(), &standings(&placed)).expect("placed there");
    let bounded = Limits { most_moved: 3, ..limits(1) };
    let done = repair(&struck, &standings(&placed), bounded);
    let [degraded] = done.degraded.as_slice() else { panic!("{done:?}") };
    assert_eq!(degraded.why, Stuck::Bound { needed: 4, left: 3 });
    let done = repair(&struck, &standings(&placed), limits(1));
    assert!(done.degraded.is_empty());
    assert_eq!(done.workers_moved(), 4);
}

#[test]
fn jobs_on_paths_that_stay_are_not_hit_even_where_links_are_full() {
    // All links of each job's hosts are full; a link that no job uses fails, and the network is no
    // tree any more.
    for (shape, spare) in
        [("leaf-spine:4x3x2", ("leaf3", "spine1")), ("fat-tree:4", ("edge7", "agg6"))]
    {
        let mut world = World::new(shape, 2);
        let mut ledger = Ledger::new(world.network());
        let mut placed = Placed::new();
        for (id, hosts) in [(1, [0, 1]), (2, [2, 3])] {
            let job: Job = "ring:2@100G".parse().expect("a job");
            let pieces: Vec<Piece> = (0..)
                .zip(hosts)
                .map(|(rank, host)| Piece { host, run: Run::new(rank, rank + 1) })
                .collect();
            let request = Request::new(&job, ABSTRACTION).expect("a job");
            let demand = request.demand(Order::Ranks);
            ledger.admit(id, demand, 1, ABSTRACTION, &pieces).expect("hosts of one leaf");
            placed.insert(id, (job, Order::Ranks, pieces));
        }
        let links = world.links_between(spare.0, spare.1);
        assert!(!links.is_empty(), "{shape}: {spare:?}");
        for link in links {
            world.outage.set_link(link, true);
        }
        assert!(!world.network().is_tree(), "{shape}");
        let struck = strike(world.network(), &standings(&placed)).expect("placed there");
        assert!(struck.hits.is_empty(), "{shape}: {:?}", struck.hits);
    }
}

#[test]
fn hosts_without_a_path_to_most_others_are_lost() {
    let mut world = World::new("leaf-spine:3x2x2", 2);
    let leaf = world.named("leaf1");
    let below: Vec<NodeId> = {
        let hosts = world.topology.neighbours(leaf).map(|(_, end)| end.node);
        hosts.filter(|node| world.topology.node(*node).kind() == Kind::Host).collect()
    };
    world.outage.set_node(leaf, true);
    let network = world.network();
    assert!(network.is_tree());
    assert_eq!(below.len(), 2);
    for host in below {
        let number = network.host_named(world.topology.node(host).name()).expect("numbered");
        assert!(network.is_lost(number));
    }
    assert_eq!(network.slots_of(network.groups().root()), 8);
    // Both rails of a host: one is enough.
    let mut world = World::new("rail:2x3x2x2", 2);
    let host = world.topology.hosts().next().expect("a host");
    let link = world.topology.node(host).links().next().expect("a link").1;
    world.outage.set_link(link, true);
    let network = world.network();
    let number = network.host_named(world.topology.node(host).name()).expect("numbered");
    assert!(!network.is_lost(number));
}
