//! Fabrics that are discovered, routed and set up: afterwards every port is active and packets find
//! every LID.

mod agents;

use std::collections::BTreeMap;

use agents::{Agents, honest};
use subnet::discovery::Discovery;
use subnet::mad::{Attribute, PortInfo, PortState};
use subnet::setup::{Setup, SetupComplaint, SetupError};
use topology::channels::Channels;
use topology::graph::{Capacity, Kind, NodeId};
use topology::routes::Engine;

fn discovered(agents: &mut Agents) -> Discovery {
    let mut discovery = Discovery::new();
    agents.run(&mut discovery, honest);
    discovery
}

fn set_up(
    agents: &mut Agents,
    engine: Engine,
    deliver: impl FnMut(u64, [u8; 256]) -> Vec<Vec<u8>>,
) -> Setup {
    let discovery = discovered(agents);
    let topology = discovery.topology(Capacity::default()).expect("a graph");
    let channels = Channels::of(&topology);
    let tables = engine.route(&topology, &channels).expect("it can be routed");
    let mut setup = Setup::new(&discovery, &channels, &tables).expect("enough LIDs");
    agents.run(&mut setup, deliver);
    setup
}

impl Agents {
    fn port_info(&self, node: NodeId, port: u8) -> Option<PortInfo> {
        let written = self.written.get(&(node, Attribute::PortInfo.id(), port.into()));
        written.map(PortInfo::parse)
    }

    /// Ports of hosts, and port 0 of switches, with their LIDs.
    fn lids(&self) -> BTreeMap<u16, (NodeId, u8)> {
        let mut lids = BTreeMap::new();
        for (id, node) in self.topology.nodes() {
            let ports = if node.kind() == Kind::Switch { 0..=0 } else { 1..=node.ports() };
            for port in ports {
                let Some(info) = self.port_info(id, port).filter(|info| info.lid > 0) else {
                    continue;
                };
                assert_eq!(lids.insert(info.lid, (id, port)), None, "LID {} twice", info.lid);
            }
        }
        lids
    }

    /// Where packets for a LID end that leave a host by a port: node and port.
    fn follow(&self, from: (NodeId, u8), lid: u16) -> Option<(NodeId, u8)> {
        let link = self.topology.node(from.0).link_at(from.1)?;
        let mut at = self.topology.link(link)?.beyond(from.0);
        for _ in 0..64 {
            if self.topology.node(at.node).kind() == Kind::Host {
                return Some((at.node, at.port));
            }
            let attribute = Attribute::LinearForwardingTable.id();
            let block = self.written.get(&(at.node, attribute, u32::from(lid) / 64))?;
            let port = block[usize::from(lid) % 64];
            if port == 0 {
                return Some((at.node, 0));
            }
            let link = self.topology.node(at.node).link_at(port)?;
            at = self.topology.link(link)?.beyond(at.node);
        }
        None
    }

    fn check_all_paths(&self, text: &str) {
        let lids = self.lids();
        let places = self
            .topology
            .hosts()
            .flat_map(|host| self.topology.neighbours(host).map(move |(port, _)| (host, port)));
        for from in places {
            for (lid, to) in lids.iter().filter(|(_, to)| to.0 != from.0) {
                assert_eq!(self.follow(from, *lid), Some(*to), "{text}: LID {lid} from {from:?}");
            }
        }
    }
}

#[test]
fn packets_find_every_lid_and_every_port_is_active() {
    let cases = [
        ("fat-tree:4", Engine::Balanced),
        ("torus:4x4:2", Engine::UpDown),
        ("rail:2x3x4x2", Engine::FatTree),
        ("dragonfly:4x2x2", Engine::UpDown),
        ("leaf-spine:10x6x12", Engine::Balanced),
    ];
    for (text, engine) in cases {
        let mut agents = Agents::of(text);
        let setup = set_up(&mut agents, engine, honest);
        assert_eq!(setup.complaints(), [], "{text}");
        agents.check_all_paths(text);
        let lids = agents.lids();
        assert_eq!(lids.len(), setup.lids().count(), "{text}");
        assert_eq!(
            lids.keys().copied().collect::<Vec<_>>(),
            (1..=setup.lids().top()).collect::<Vec<_>>()
        );
        for (_, link) in agents.topology.links() {
            for end in link.ends {
                let info = agents.port_info(end.node, end.port).expect("it was written");
                assert_eq!(info.state, Some(PortState::Active), "{text} {end:?}");
            }
        }
    }
}

/// A second manager keeps the LIDs, and a node that is new gets one that is free.
#[test]
fn lids_stay_and_those_that_collide_are_replaced() {
    let mut agents = Agents::of("fat-tree:4");
    set_up(&mut agents, Engine::FatTree, honest);
    let before = agents.lids();
    set_up(&mut agents, Engine::Balanced, honest);
    assert_eq!(agents.lids(), before);
    agents.check_all_paths("again");
    // One takes the LID of another.
    let (host, other) = (before[&1], before[&2]);
    let place = |(node, port): (NodeId, u8)| (node, Attribute::PortInfo.id(), u32::from(port));
    let mut data = agents.written[&place(host)];
    data[16..18].copy_from_slice(&2_u16.to_be_bytes());
    agents.written.insert(place(host), data);
    set_up(&mut agents, Engine::Balanced, honest);
    let after = agents.lids();
    assert_eq!(after.len(), before.len());
    let moved = before.iter().filter(|(lid, place)| after.get(lid) != Some(place)).count();
    assert!(moved <= 2, "{host:?} and {other:?} alone");
    agents.check_all_paths("after a collision");
}

#[test]
fn lost_answers_delay_the_setup_and_change_nothing() {
    for seed in 0..10_u64 {
        let mut agents = Agents::of("leaf-spine:4x2x3");
        let setup = set_up(&mut agents, Engine::Balanced, |count, response| {
            if (count * 11 + seed).is_multiple_of(7) { vec![] } else { vec![response.to_vec()] }
        });
        // Ports that entered a state refuse to enter it again, as those of ibsim do: no complaint.
        let is_silence = |one: &SetupComplaint| matches!(one, SetupComplaint::Silent(..));
        assert!(setup.complaints().iter().all(is_silence), "seed {seed}: {:?}", setup.complaints());
        if setup.complaints().is_empty() {
            agents.check_all_paths("with losses");
        }
    }
}

#[test]
fn tables_with_credit_loops_are_not_written() {
    let mut agents = Agents::of("torus:5x5:1");
    let discovery = discovered(&mut agents);
    let topology = discovery.topology(Capacity::default()).expect("a graph");
    let channels = Channels::of(&topology);
    let tables = Engine::DimensionOrder.route(&topology, &channels).expect("a torus");
    let refused = Setup::new(&discovery, &channels, &tables).expect_err("rings");
    assert_eq!(refused, SetupError::CreditLoop);
    assert!(agents.written.is_empty());
}

#[test]
fn a_node_that_says_all_is_well_and_changes_nothing_is_named() {
    let mut agents = Agents::of("leaf-spine:4x2x3");
    let deaf = agents.topology.named("host5").expect("a host");
    agents.deaf.push(deaf);
    let setup = set_up(&mut agents, Engine::Balanced, honest);
    let is_deaf =
        |one: &SetupComplaint| matches!(one, SetupComplaint::NotWritten(_, Attribute::PortInfo, 1));
    let complaints = setup.complaints();
    assert!(complaints.len() == 3 && complaints.iter().all(is_deaf), "{complaints:?}");
}

#[test]
fn a_switch_that_takes_no_table_is_named() {
    let mut agents = Agents::of("leaf-spine:4x2x3");
    let stubborn = agents.topology.named("leaf2").expect("a leaf");
    agents.stubborn.push(stubborn);
    let setup = set_up(&mut agents, Engine::Balanced, honest);
    let complaints = setup.complaints();
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(matches!(
        complaints[0],
        SetupComplaint::Refused(_, Attribute::LinearForwardingTable, 0, 0x0c)
    ));
}
