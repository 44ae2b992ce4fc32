//! Every engine on every kind of fabric: whole, without loops, and as well balanced as the best
//! engine of opensm 3.3.23, whose tables for the same fabrics were counted in the same way.

use topology::channels::Channels;
use topology::graph::{Capacity, Kind, LinkId, Topology};
use topology::lanes::{Lanes, MAX_LANES};
use topology::routes::{Engine, RouteError};
use topology::shape::Shape;
use topology::validator::{Findings, validate};

fn built(text: &str) -> Topology {
    let shape: Shape = text.parse().expect(text);
    shape.build(Capacity::default()).expect(text)
}

fn validated(topology: &Topology, engine: Engine) -> Result<Findings, RouteError> {
    let channels = Channels::of(topology);
    let tables = engine.route(topology, &channels)?;
    let lanes = match engine {
        Engine::Balanced => Lanes::assign(&channels, &tables, MAX_LANES).expect("enough lanes"),
        _ => Lanes::one(&channels),
    };
    Ok(validate(&channels, &tables, &lanes))
}

/// Removes every `each`-th link between switches.
fn damage(topology: &mut Topology, each: usize) -> usize {
    let is_switch = |id| topology.node(id).kind() == Kind::Switch;
    let between =
        topology.links().filter(|(_, link)| link.ends.iter().all(|end| is_switch(end.node)));
    let dead: Vec<LinkId> = between.map(|(id, _)| id).step_by(each).collect();
    dead.iter().filter(|id| topology.remove(**id).is_some()).count()
}

const SHAPES: [&str; 10] = [
    "leaf-spine:18x18x18",
    "fat-tree:8",
    "torus:6x6:4",
    "torus:4x4x4:2",
    "dragonfly:4x2x2",
    "vl2:8x8x5",
    "rail:4x8x4x8",
    "random:32x4x4:1",
    "random:40x3x2:2",
    "torus:2x3:1",
];

#[test]
fn every_pair_has_a_path_and_no_engine_loops() {
    for text in SHAPES {
        let topology = built(text);
        for engine in Engine::ALL {
            let findings = match validated(&topology, engine) {
                Ok(findings) => findings,
                Err(why @ RouteError::Unsuitable { .. }) => {
                    assert_eq!(engine, Engine::FatTree, "{text}: {why}");
                    continue;
                }
                Err(why) => panic!("{text}, {engine}: {why}"),
            };
            let ends = Channels::of(&topology).end_ports().len() as u64;
            assert_eq!(findings.pairs, ends * (ends - 1), "{text}, {engine}");
            assert!(findings.is_whole(), "{text}, {engine}");
            if matches!(engine, Engine::MinHop | Engine::DimensionOrder | Engine::Balanced) {
                assert_eq!(findings.longer, 0, "{text}, {engine}");
            }
            if matches!(engine, Engine::UpDown | Engine::FatTree | Engine::Balanced) {
                assert_eq!(findings.cycle, None, "{text}, {engine}");
            }
        }
    }
}

#[test]
fn damaged_fabrics_are_routed_too() {
    for text in SHAPES {
        let mut topology = built(text);
        assert!(damage(&mut topology, 9) > 0, "{text}");
        if topology.check().is_err() {
            continue;
        }
        for engine in [Engine::UpDown, Engine::MinHop, Engine::Balanced] {
            let findings = validated(&topology, engine).expect(text);
            assert!(findings.is_whole(), "{text}, {engine}");
            assert!(findings.cycle.is_none() || engine == Engine::MinHop, "{text}, {engine}");
        }
    }
}

/// The only path between two leaves goes down and up again, seen from both spines: one root, then.
#[test]
fn a_tree_that_lost_links_is_routed_from_one_root() {
    let mut topology = built("leaf-spine:3x2x1");
    for (leaf, spine) in [("leaf0", "spine1"), ("leaf1", "spine0")] {
        let ends = [leaf, spine].map(|name| topology.named(name).expect("there"));
        let between = |(_, link): &(LinkId, &topology::graph::Link)| {
            ends.iter().all(|end| link.ends.iter().any(|one| one.node == *end))
        };
        let dead = topology.links().find(between).expect("a link").0;
        topology.remove(dead);
    }
    for engine in [Engine::UpDown, Engine::Balanced, Engine::MinHop] {
        let findings = validated(&topology, engine).expect("one part");
        assert!(findings.is_whole() && findings.cycle.is_none(), "{engine}");
    }
    let refused = validated(&topology, Engine::FatTree).expect_err("no tree any more").to_string();
    assert!(refused.contains("links are missing"), "{refused}");
}

/// What the best engine of opensm reaches, and where that is the bound already, the same.
#[test]
fn balanced_is_at_least_as_good_as_the_best_of_opensm() {
    // Shape, fullest channel of opensm's best engine, mean hops in thousandths, most lanes.
    let asked = [
        ("leaf-spine:18x18x18", 306, 2_895, 1),
        ("fat-tree:8", 124, 4_717, 1),
        ("torus:6x6:4", 460, 4_021, 3),
    ];
    for (text, most_load, mean_hops, most_lanes) in asked {
        let findings = validated(&built(text), Engine::Balanced).expect(text);
        let found = (findings.most_load(), findings.mean_hops_milli(), findings.lanes);
        println!("{text}: load {}, hops {}, lanes {}", found.0, found.1, found.2);
        assert!(found.0 <= most_load, "{text}: {found:?}");
        assert_eq!(found.1, mean_hops, "{text}: {found:?}");
        assert!(found.2 <= most_lanes, "{text}: {found:?}");
    }
}

/// The engines that have opensm's names share its weaknesses: they are the peers in the same
/// program.
#[test]
fn dimension_order_needs_lanes_in_a_torus_and_none_in_a_tree() {
    let findings = validated(&built("torus:6x6:4"), Engine::DimensionOrder).expect("a torus");
    assert_eq!((findings.most_load(), findings.used()), (576, 144), "as opensm's dor");
    let cycle = findings.cycle.expect("rings");
    assert!(cycle.len() >= 3, "{cycle:?}");
    let findings = validated(&built("fat-tree:8"), Engine::FatTree).expect("a tree");
    assert_eq!((findings.most_load(), findings.used()), (124, 512), "as opensm's ftree");
    for engine in [Engine::MinHop, Engine::UpDown] {
        let findings = validated(&built("fat-tree:8"), engine).expect("a tree");
        assert_eq!((findings.most_load(), findings.used()), (448, 320), "as opensm's minhop, updn");
    }
}

#[test]
fn hosts_do_not_forward() {
    let topology = built("bcube:4x1");
    assert_eq!(topology.check(), Ok(()));
    for engine in Engine::ALL {
        let why =
            validated(&topology, engine).expect_err("levels are joined by hosts alone").to_string();
        assert!(why.ends_with("hosts do not forward"), "{why}");
    }
}
