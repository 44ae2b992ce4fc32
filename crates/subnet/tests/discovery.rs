//! Discovery of whole fabrics whose nodes response as they should, late, wrongly, or not at all.

mod agents;

use std::collections::BTreeMap;

use agents::{Agents, honest};
use subnet::discovery::{Complaint, Discovery};
use subnet::exchange::Requester;
use subnet::mad::{Attribute, PortState};
use topology::graph::{Capacity, End, Link, Topology};

fn run(agents: &mut Agents, deliver: impl FnMut(u64, [u8; 256]) -> Vec<Vec<u8>>) -> Discovery {
    let mut discovery = Discovery::new();
    agents.run(&mut discovery, deliver);
    discovery
}

/// Names and ports of the links of a topology.
fn links(topology: &Topology) -> BTreeMap<(String, u8), (String, u8)> {
    let name = |end: End| (topology.node(end.node).name().to_owned(), end.port);
    let both = |ends: [End; 2]| [(name(ends[0]), name(ends[1])), (name(ends[1]), name(ends[0]))];
    topology.links().flat_map(|(_, link)| both(link.ends)).collect()
}

#[test]
fn every_shape_is_found_as_it_is() {
    for text in ["fat-tree:8", "torus:4x4:2", "dragonfly:4x2x2", "random:32x4x2:5", "vl2:4x4x3"] {
        let mut agents = Agents::of(text);
        let discovery = run(&mut agents, honest);
        assert_eq!(discovery.complaints(), (&[][..], 0), "{text}");
        let found = discovery.topology(Capacity::default()).expect(text);
        assert_eq!(links(&found), links(&agents.topology), "{text}");
        assert_eq!(found.to_string(), agents.topology.to_string(), "{text}");
    }
}

#[test]
fn lost_repeated_and_reordered_answers_change_nothing() {
    let mut agents = Agents::of("torus:4x4:2");
    for seed in 0..20_u64 {
        let discovery = run(&mut agents, |count, response| match (count * 7 + seed) % 5 {
            0 => vec![],
            1 => vec![response.to_vec(), response.to_vec()],
            _ => vec![response.to_vec()],
        });
        let found = discovery.topology(Capacity::default()).expect("whole");
        let (complaints, _) = discovery.complaints();
        if complaints.is_empty() {
            assert_eq!(links(&found), links(&agents.topology), "seed {seed}");
        }
        assert!(discovery.discarded().unasked > 0, "seed {seed}");
    }
}

#[test]
fn a_silent_switch_is_named_and_the_rest_is_found() {
    let mut agents = Agents::of("fat-tree:4");
    let silent = agents.topology.named("core0").expect("a core");
    agents.silent.push(silent);
    let discovery = run(&mut agents, honest);
    let (complaints, _) = discovery.complaints();
    // One for each link that leads there.
    assert_eq!(complaints.len(), 4, "{complaints:?}");
    assert!(complaints.iter().all(|one| matches!(one, Complaint::Silent { .. })));
    let found = discovery.topology(Capacity::default()).expect("whole");
    assert_eq!(found.to_string(), "16 hosts, 19 switches, 44 links");
}

#[test]
fn forged_answers_are_discarded_by_reason() {
    let mut agents = Agents::of("fat-tree:4");
    let discovery = run(&mut agents, |_, response| {
        let changed = |at: usize, to: u8| {
            let mut response = response.to_vec();
            response[at] = to;
            response
        };
        // Another transaction, another attribute, another route, too short; then the honest one.
        let other_route = response[7].saturating_add(1);
        vec![
            changed(12, 0xee),
            changed(17, 0x20),
            changed(7, other_route),
            response[..200].to_vec(),
            response.to_vec(),
        ]
    });
    let (sent, discarded) = (discovery.sent(), discovery.discarded());
    assert_eq!((discarded.unasked, discarded.mismatched), (sent, 2 * sent));
    assert_eq!(discarded.malformed, sent);
    let found = discovery.topology(Capacity::default()).expect("whole");
    assert_eq!(links(&found), links(&agents.topology));
}

/// Every byte of every response replaced, one run each: it ends, and what it finds is a graph.
#[test]
fn no_answer_breaks_it() {
    let mut agents = Agents::of("leaf-spine:2x2x2");
    for at in 0..256 {
        for to in [0, 1, 0x7f, 0xff] {
            let discovery = run(&mut agents, |count, mut response| {
                if count % 3 == 0 {
                    response[at] = to;
                }
                vec![response.to_vec()]
            });
            let found = discovery.topology(Capacity::default());
            assert!(found.is_ok(), "byte {at} to {to}: {found:?}");
            assert!(discovery.nodes().len() <= 200, "byte {at} to {to}");
        }
    }
}

#[test]
fn a_switch_with_the_guid_of_another_is_named() {
    let mut agents = Agents::of("leaf-spine:2x2x2");
    let spine = agents.topology.named("spine1").expect("one");
    let other = agents.topology.named("spine0").expect("one");
    let discovery = run(&mut agents, |_, mut response| {
        let is_node_info = response[17] == Attribute::NodeInfo.id() as u8;
        if is_node_info && response[76..84] == Agents::guid(spine).to_be_bytes() {
            response[76..84].copy_from_slice(&Agents::guid(other).to_be_bytes());
        }
        vec![response.to_vec()]
    });
    let (complaints, _) = discovery.complaints();
    assert!(
        complaints.iter().any(|one| matches!(one, Complaint::TwoLinks { .. })),
        "{complaints:?}"
    );
    discovery.topology(Capacity::default()).expect("a graph");
}

/// Its GUID is that of a switch one of whose links is missing, so that the link of the impostor
/// fits in there.
#[test]
fn a_link_to_a_port_that_is_down_is_not_believed() {
    let mut agents = Agents::of("leaf-spine:4x3x3");
    let [twin, impostor] =
        ["leaf1", "leaf3"].map(|name| agents.topology.named(name).expect("a leaf"));
    let spine = agents.topology.named("spine2").expect("a spine");
    let is_missing = |link: &Link| {
        [twin, spine].iter().all(|node| link.ends.iter().any(|end| end.node == *node))
    };
    let missing = agents.topology.links().find(|(_, link)| is_missing(link)).expect("an uplink").0;
    let missing = agents.topology.remove(missing).expect("it was there");
    agents.set_ports(missing.ends, PortState::Down);
    agents.impostors.insert(impostor, Agents::guid(twin));
    let mut discovery = run(&mut agents, honest);
    let far_of_missing = missing.ends.iter().find(|end| end.node == twin).expect("its own end");
    let place = (Agents::guid(twin), far_of_missing.port);
    assert!(discovery.links().contains_key(&place), "the impostor fits in");
    discovery.cut_contradictory();
    assert!(!discovery.links().contains_key(&place), "but its own node says that it is down");
    let is_named = |one: &Complaint| matches!(one, Complaint::DownBehindLink { guid, port, .. } if (*guid, *port) == place);
    assert!(discovery.complaints().0.iter().any(is_named), "{:?}", discovery.complaints());
    discovery.topology(Capacity::default()).expect("a graph");
}
