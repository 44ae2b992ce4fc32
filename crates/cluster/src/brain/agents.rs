//! The agents that are connected, and what they say of their ports. What their plans are is a
//! matter of the state machine.

use std::collections::BTreeMap;
use std::time::Instant;

use parfait::agent::Command;
use parfait::brain::Brain;
use service::log;
use topology::graph::NodeId;

use super::cluster::Cluster;
use super::events::Events;
use super::inputs::Attached;
use crate::convert::{self, position_message, share_message};
use crate::keys::Key;
use crate::proto;

/// See the module's text.
pub(super) struct Agents {
    pub(super) attached: BTreeMap<NodeId, Attached>,
    /// Signs plans.
    plan_key: Key,
}

impl Agents {
    pub(super) fn new(plan_key: Key) -> Agents {
        Agents { attached: BTreeMap::new(), plan_key }
    }

    /// An agent came. It takes the place of one of the same node.
    pub(super) fn attach(
        &mut self,
        node: NodeId,
        mut agent: Attached,
        cluster: &Cluster,
        events: &Events,
    ) {
        let name = cluster.topology.node(node).name();
        let text = format!("the agent of '{name}' is here, with {}", agent.enforcer);
        let faults = port_faults(cluster, node, &agent.ports);
        agent.faults.clone_from(&faults);
        if self.attached.insert(node, agent).is_some() {
            log::line(format_args!("a second agent of '{name}' took the place of the first"));
        }
        events.note("agent", None, text);
        for fault in faults {
            log::refusal(&fault);
            events.note("alarm", None, fault);
        }
    }

    /// A connection is over. Returns whether it was that of the node's agent.
    pub(super) fn detach(&mut self, node: NodeId, number: u64) -> bool {
        let is_current = self.attached.get(&node).is_some_and(|agent| agent.number == number);
        is_current && self.attached.remove(&node).is_some()
    }

    /// An agent has spoken. Returns whether it is the one of the node.
    pub(super) fn hear(&mut self, node: NodeId, number: u64, note: &str) -> bool {
        let agent = self.attached.get_mut(&node).filter(|agent| agent.number == number);
        let Some(agent) = agent else { return false };
        agent.heard = Instant::now();
        note.clone_into(&mut agent.note);
        true
    }

    pub(super) fn send(&self, node: NodeId, command: &Command, brain: &Brain) {
        let Some(agent) = self.attached.get(&node) else { return };
        let book = brain.book().map(|(book, _)| book);
        let name = |job| {
            let held = book.and_then(|book| book.jobs().get(&job));
            held.map_or("", |held| held.label.name.as_str())
        };
        let plan = command.plan.iter().map(|share| share_message(share, name(share.job)));
        let order = proto::Order {
            node: brain.network().node_name(node).to_owned(),
            nonce: agent.nonce.clone(),
            position: position_message(command.position),
            plan: plan.collect(),
        };
        let message = convert::signed(&order, &self.plan_key);
        // A full queue is that of a slow agent: the state machine sends the plan again.
        let _ = agent.commands.try_send(message);
    }
}

fn reservable_bps(rate_bps: u64, ppm: u32) -> u64 {
    (u128::from(rate_bps) * u128::from(ppm) / 1_000_000) as u64
}

/// Where the ports of a node's agent are not those of the topology. An agent that names none is of
/// an older version.
fn port_faults(cluster: &Cluster, node: NodeId, named: &[proto::Port]) -> Vec<String> {
    if named.is_empty() {
        return Vec::new();
    }
    let topology = &cluster.topology;
    let own = topology.node(node);
    let name = own.name();
    let mut faults = Vec::new();
    for proto::Port { port, interface, rate_bps } in named {
        let link = u8::try_from(*port).ok().and_then(|port| own.link_at(port));
        let Some(link) = link.and_then(|link| topology.link(link)) else {
            let ports: Vec<String> = own.links().map(|(port, _)| port.to_string()).collect();
            faults.push(format!(
                "the agent of '{name}' has a port {port} ({interface}), and the topology gives '{name}' {}",
                match &ports[..] {
                    [port] => format!("port {port} only"),
                    ports => format!("ports {}", ports.join(", ")),
                }
            ));
            continue;
        };
        let most_bps = reservable_bps(link.capacity.rate_bps, cluster.reservable_ppm);
        if *rate_bps < most_bps {
            faults.push(format!(
                "port {port} ({interface}) of '{name}' carries {rate_bps} bit/s, and jobs may reserve {most_bps} there"
            ));
        }
    }
    let is_named = |port: u8| named.iter().any(|named| named.port == u32::from(port));
    for (port, link) in own.links().filter(|(port, _)| !is_named(*port)) {
        let ends = topology.link(link).map(|link| link.ends);
        let other = ends.into_iter().flatten().find(|end| end.node != node);
        let towards = other.map_or("", |end| topology.node(end.node).name());
        faults.push(format!(
            "the agent of '{name}' has no port {port}, which leads to '{towards}': it refuses plans that need it"
        ));
    }
    faults
}
