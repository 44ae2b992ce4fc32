//! Loads of links, and the ledger of them.

use std::collections::BTreeMap;

use parfait::demand::{Abstraction, Demand};
use parfait::ledger::{Ledger, Refusal};
use parfait::loads::{Load, Loader, Piece};
use parfait::network::{Network, NetworkError, Routing};
use parfait::pattern::Pattern;
use parfait::runs::Run;
use parfait::spread::{DirectedLink, Ecmp};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use topology::channels::Channels;
use topology::graph::{Capacity, Kind, Topology};
use topology::routes::Engine;
use topology::shape::Shape;

const PATTERNS: &[&str] = &[
    "ring:12@5G",
    "tree:12@3G",
    "torus:4x3@2G,1G",
    "hierarchical:3x4@1G,4G",
    "ps:9+3@1G",
    "async-ps:9+3@1G",
    "mesh:12@700M",
    "pipeline:12@3G",
    "parallel:2x3x2@4G,2G,1G",
];

const TREES: &[&str] = &["fat-tree:4", "leaf-spine:3x2x4", "vl2:4x4x3", "rail:2x4x2x3"];

fn topology(shape: &str) -> Topology {
    let shape: Shape = shape.parse().expect(shape);
    shape.build(Capacity::default()).expect("small")
}

fn network(topology: &Topology, routing: Routing<'_>) -> Network {
    Network::new(topology, 4, routing, |_, link| link.capacity.rate_bps).expect("connected")
}

fn demand(text: &str) -> Demand {
    let pattern: Pattern = text.parse().expect(text);
    Demand::of(&pattern).expect(text)
}

/// Workers in runs of 1 to 4 on hosts at random, each host once.
fn scattered(demand: &Demand, hosts: u32, random: &mut Pcg32) -> Vec<Piece> {
    let mut free: Vec<u32> = (0..hosts).collect();
    let (mut pieces, mut next) = (Vec::new(), 0);
    while next < demand.workers() {
        let host = free.swap_remove(random.next_u32() as usize % free.len());
        let least = (demand.workers() - next).div_ceil(free.len() as u32 + 1);
        let end = (next + least.max(1 + random.next_u32() % 4)).min(demand.workers());
        pieces.push(Piece { host, run: Run::new(next, end) });
        next = end;
    }
    pieces
}

/// The load of every directed link that carries something.
fn by_link(
    network: &Network,
    demand: &Demand,
    abstraction: Abstraction,
    pieces: &[Piece],
) -> BTreeMap<DirectedLink, u64> {
    let mut loads = Vec::new();
    Loader::new().loads(network, demand, abstraction, pieces, &mut loads);
    let by_trunk: BTreeMap<u32, u64> = loads.iter().map(|load| (load.trunk, load.bps)).collect();
    assert_eq!(by_trunk.len(), loads.len());
    let links = network.links();
    links.filter_map(|(link, trunk)| Some((link, *by_trunk.get(&trunk)?))).collect()
}

/// The same placement by host names: networks number their hosts differently.
fn moved(from: &Network, to: &Network, pieces: &[Piece]) -> Vec<Piece> {
    let host = |host| to.host_named(from.host_name(host)).expect("the same hosts");
    pieces.iter().map(|piece| Piece { host: host(piece.host), ..*piece }).collect()
}

#[test]
fn loads_of_groups_are_the_sums_over_pairs() {
    let mut random = Pcg32::new(1, 1);
    for shape in TREES {
        let topology = topology(shape);
        for ecmp in [Ecmp::Even, Ecmp::Worst] {
            let tree = network(&topology, Routing::Ecmp(ecmp));
            // No shortest path leads through a host here, but these loads are computed pair by
            // pair.
            let pairs = network(&topology, Routing::Relayed(ecmp));
            assert!(tree.is_tree() && !pairs.is_tree(), "{shape}");
            for (text, _) in PATTERNS.iter().flat_map(|text| [(text, 0), (text, 1), (text, 2)]) {
                let demand = demand(text);
                let pieces = scattered(&demand, tree.hosts(), &mut random);
                let elsewhere = moved(&tree, &pairs, &pieces);
                let ours = by_link(&tree, &demand, Abstraction::Parfait, &pieces);
                let sums = by_link(&pairs, &demand, Abstraction::Parfait, &elsewhere);
                assert_eq!(
                    ours.keys().collect::<Vec<_>>(),
                    sums.keys().collect::<Vec<_>>(),
                    "{shape} {text}"
                );
                for (link, bps) in &ours {
                    assert!(sums[link].abs_diff(*bps) <= 2, "{shape} {text}: {bps} {}", sums[link]);
                }
            }
        }
    }
}

#[test]
fn on_every_link_parfait_reserves_at_most_what_tag_does_and_tag_what_a_hose_does() {
    let mut random = Pcg32::new(2, 1);
    for shape in TREES.iter().chain(&["bcube:3x2", "torus:3x3:2", "random:8x3x2:5"]) {
        let topology = topology(shape);
        let network = network(&topology, Routing::Relayed(Ecmp::Even));
        for text in PATTERNS {
            let demand = demand(text);
            let pieces = scattered(&demand, network.hosts(), &mut random);
            let [parfait, tag, hose] = Abstraction::ALL
                .map(|abstraction| by_link(&network, &demand, abstraction, &pieces));
            for (link, bps) in &parfait {
                assert!(bps <= &tag[link], "{shape} {text} link {link}: {bps} {}", tag[link]);
            }
            for (link, bps) in &tag {
                assert!(bps <= &hose[link], "{shape} {text} link {link}");
            }
        }
    }
}

/// Whatever the paths are, what a host sends leaves it, and what it receives arrives.
#[test]
fn links_of_a_host_carry_what_its_workers_send_and_receive() {
    let mut random = Pcg32::new(3, 1);
    for shape in ["fat-tree:4", "torus:3x3:2", "rail:2x4x2x3", "random:8x3x2:5"] {
        let topology = topology(shape);
        let channels = Channels::of(&topology);
        let tables = Engine::MinHop.route(&topology, &channels).expect("a route");
        let routings = [
            Routing::Tables(&channels, &tables),
            Routing::Ecmp(Ecmp::Even),
            Routing::Relayed(Ecmp::Even),
        ];
        for routing in routings {
            let network = network(&topology, routing);
            // One phase: a sum over ports of the most of several phases would be too large.
            for text in ["ring:12@5G", "mesh:12@700M", "pipeline:12@3G", "async-ps:9+3@1G"] {
                let demand = demand(text);
                let pieces = scattered(&demand, network.hosts(), &mut random);
                let loads = by_link(&network, &demand, Abstraction::Parfait, &pieces);
                for piece in &pieces {
                    let host = topology.named(network.host_name(piece.host)).expect("a host");
                    let (mut sent, mut received) = (0, 0);
                    for (_, id) in topology.node(host).links() {
                        let link = topology.link(id).expect("there");
                        let out = 2 * id.index() as u32 + u32::from(link.ends[1].node == host);
                        sent += loads.get(&out).copied().unwrap_or(0);
                        received += loads.get(&(out ^ 1)).copied().unwrap_or(0);
                    }
                    let cut = demand.cut(&[piece.run]);
                    assert!(sent.abs_diff(cut.out_bps) <= 4, "{shape} {text}: {sent} {cut:?}");
                    assert!(
                        received.abs_diff(cut.in_bps) <= 4,
                        "{shape} {text}: {received} {cut:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_tree_that_lost_a_link_is_routed_pair_by_pair() {
    let mut topology = topology("fat-tree:4");
    let (agg, core) = (topology.named("agg0"), topology.named("core0"));
    let up = topology.links().find(|(_, link)| {
        let ends = link.ends.map(|end| Some(end.node));
        ends == [agg, core] || ends == [core, agg]
    });
    let (up, _) = up.expect("an uplink");
    assert!(network(&topology, Routing::Ecmp(Ecmp::Even)).is_tree());
    topology.remove(up);
    let network = network(&topology, Routing::Ecmp(Ecmp::Even));
    assert!(!network.is_tree());
    // Of eight hosts' ring from one pod to another, the switch with one link left sends half over
    // it, not a quarter.
    let demand = demand("ring:2@8G");
    let host = |name: &str| network.host_named(name).expect("a host");
    let pieces = [("host0", 0), ("host15", 1)]
        .map(|(name, rank)| Piece { host: host(name), run: Run::new(rank, rank + 1) });
    let loads = by_link(&network, &demand, Abstraction::Parfait, &pieces);
    let most = loads.iter().filter(|(link, _)| {
        let link = topology.links().find(|(id, _)| 2 * id.index() as u32 == **link & !1);
        let kinds = link.expect("there").1.ends.map(|end| topology.node(end.node).kind());
        kinds == [Kind::Switch, Kind::Switch]
    });
    assert_eq!(most.map(|(_, bps)| *bps).max(), Some(4_000_000_000));
}

#[test]
fn admitting_and_releasing_at_random_keeps_the_ledger_right() {
    for shape in TREES.iter().chain(&["bcube:3x2", "torus:3x3:2"]) {
        let topology = topology(shape);
        let routing = if shape.starts_with("bcube") {
            Routing::Relayed(Ecmp::Even)
        } else {
            Routing::Ecmp(Ecmp::Even)
        };
        // A fifth of each link, so that links are as scarce as slots.
        let network = Network::new(&topology, 9, routing, |_, link| link.capacity.rate_bps / 5);
        let mut ledger = Ledger::new(network.expect("connected"));
        let all_slots = ledger.free_slots(ledger.network().groups().root());
        let mut random = Pcg32::new(4, 1);
        let (mut admitted, mut fit, mut full, mut narrow) = (Vec::new(), 0, 0, 0);
        for id in 0..400 {
            if random.next_u32().is_multiple_of(3) && !admitted.is_empty() {
                let id = admitted.swap_remove(random.next_u32() as usize % admitted.len());
                ledger.release(id).expect("it is there");
            }
            let demand = demand(PATTERNS[random.next_u32() as usize % PATTERNS.len()]);
            let abstraction = Abstraction::ALL[random.next_u32() as usize % 3];
            let pieces = scattered(&demand, ledger.network().hosts(), &mut random);
            match ledger.admit(id, &demand, 1, abstraction, &pieces) {
                Ok(()) => {
                    admitted.push(id);
                    fit += 1;
                }
                Err(Refusal::Slots { needed, free, .. }) => {
                    assert!(needed > free);
                    full += 1;
                }
                Err(Refusal::Bandwidth { needed_bps, free_bps, .. }) => {
                    assert!(needed_bps > free_bps);
                    narrow += 1;
                }
                Err(other) => panic!("{other}"),
            }
            ledger.audit().expect("L1 to L3");
        }
        assert!(fit > 20 && full + narrow > 20 && narrow > 5, "{shape}: {fit} {full} {narrow}");
        for id in admitted {
            ledger.release(id).expect("it is there");
        }
        assert_eq!(ledger.free_slots(ledger.network().groups().root()), all_slots);
        assert!((0..ledger.network().trunks() as u32).all(|trunk| ledger.reserved_bps(trunk) == 0));
        ledger.audit().expect("L3");
    }
}

#[test]
fn what_cannot_be_is_refused_with_what_is_missing() {
    let topology = topology("leaf-spine:2x1x2");
    let mut ledger = Ledger::new(network(&topology, Routing::Ecmp(Ecmp::Even)));
    let ring = demand("ring:4@60G");
    let piece = |host, first, end| Piece { host, run: Run::new(first, end) };
    let refused = |ledger: &mut Ledger, slots: u32, pieces: &[Piece]| {
        let refusal = ledger.admit(1, &ring, slots, Abstraction::Parfait, pieces);
        refusal.expect_err("refused").to_string()
    };
    let twice = refused(&mut ledger, 1, &[piece(0, 0, 2), piece(1, 1, 4)]);
    assert!(twice.contains("rank 1 is missing, twice there, or too large"), "{twice}");
    let missing = refused(&mut ledger, 1, &[piece(0, 0, 2)]);
    assert!(missing.contains("rank 2 is missing"), "{missing}");
    let large = refused(&mut ledger, 1, &[piece(0, 0, 2), piece(1, 2, 9)]);
    assert!(large.contains("rank 4 is missing, twice there, or too large"), "{large}");
    assert_eq!(refused(&mut ledger, 1, &[piece(9, 0, 4)]), "there is no host 9; there are 4");
    let slots = refused(&mut ledger, 2, &[piece(0, 0, 3), piece(1, 3, 4)]);
    assert_eq!(slots, "host 'host0' has 4 free slots, and 6 are needed: 2 are missing");
    let huge = refused(&mut ledger, u32::MAX, &[piece(0, 0, 3), piece(1, 3, 4)]);
    assert!(huge.starts_with("host 'host0' has 4 free slots, and 4294967295 are needed"), "{huge}");
    let split = [piece(0, 0, 1), piece(2, 1, 2), piece(1, 2, 3), piece(3, 3, 4)];
    assert_eq!(
        refused(&mut ledger, 1, &split),
        "the link from 'leaf0' to 'spine0' has 100000000000 bit/s left, and 120000000000 are needed: \
         20000000000 are missing"
    );
    assert!(ledger.admissions().is_empty());
    ledger.admit(1, &ring, 1, Abstraction::Parfait, &[piece(0, 0, 4)]).expect("one host");
    let again = ledger.admit(1, &ring, 1, Abstraction::Parfait, &split);
    assert_eq!(again, Err(Refusal::Duplicate(1)));
    assert_eq!(ledger.release(2).map(drop), Err(Refusal::Unknown(2)));
    ledger.audit().expect("unchanged");
}

#[test]
fn reservations_take_from_what_jobs_can_have() {
    let topology = topology("leaf-spine:2x2x2");
    let mut ledger = Ledger::new(network(&topology, Routing::Ecmp(Ecmp::Even)));
    let (link, trunk) = ledger
        .network()
        .links()
        .find(|(_, trunk)| ledger.network().width(*trunk) == 2)
        .expect("an uplink");
    assert_eq!(ledger.reserve(7, &[(u32::MAX, 1)]), Err(Refusal::NoLink(u32::MAX)));
    ledger.reserve(7, &[(link, 60), (link, 40)]).expect("it is free");
    assert_eq!(ledger.reserved_bps(trunk), 100);
    let most = ledger.free_bps(trunk);
    assert!(matches!(ledger.reserve(8, &[(link, most + 1)]), Err(Refusal::Bandwidth { .. })));
    assert!(matches!(
        ledger.reserve(8, &[(link, u64::MAX), (link, u64::MAX)]),
        Err(Refusal::Bandwidth { .. })
    ));
    ledger.reserve(8, &[(link, most)]).expect("all that is left");
    ledger.audit().expect("L1");
    let loads = ledger.release(7).expect("it is there").loads;
    assert_eq!(loads, [Load { trunk, bps: 100 }]);
    assert_eq!(ledger.free_bps(trunk), 100);
}

#[test]
fn networks_that_cannot_be_used_are_refused() {
    let refused = |topology: &Topology, slots, routing| {
        let made = Network::new(topology, slots, routing, |_, link| link.capacity.rate_bps);
        made.map(drop).expect_err("refused")
    };
    let even = Routing::Ecmp(Ecmp::Even);
    let tree = topology("fat-tree:4");
    assert_eq!(refused(&tree, 0, even), NetworkError::Slots(0));
    assert_eq!(refused(&tree, 1 << 20, even), NetworkError::Slots(1 << 20));
    assert!(matches!(refused(&Topology::new(), 1, even), NetworkError::Topology(_)));
    // Without hosts that forward, half of BCube cannot reach the other.
    assert_eq!(refused(&topology("bcube:4x1"), 1, even), NetworkError::NoPath);
    let large = topology("torus:50x50:4");
    assert!(matches!(refused(&large, 1, even), NetworkError::TooLarge { hosts: 10_000, .. }));
}
