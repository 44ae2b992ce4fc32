//! Management agents of all nodes of a topology: they response as the specification says, remember
//! what is written, and can be silent or refuse.

#![allow(dead_code, reason = "every test that has it uses another part of it")]

use std::collections::BTreeMap;
use std::time::Duration;

use subnet::exchange::Requester;
use subnet::mad::{
    Attribute, DirectedRoute, KeyGuard, Method, NodeInfo, NodeType, PortInfo, PortState, Smp,
};
use topology::graph::{Capacity, End, Kind, NodeId, Topology};
use topology::shape::Shape;

/// The status of a response: this attribute is not supported.
const UNSUPPORTED: u16 = 0x0c;

/// The same: a field has a value that is not valid.
const INVALID: u16 = 0x1c;

/// In `SwitchInfo`: the state of a port has changed.
const PORT_CHANGE: u8 = 1 << 2;

/// In `PortInfo`, byte 51: clients have to register anew; in byte 20: the port can tell them.
const REREGISTER: u8 = 1 << 7;
const CAN_REREGISTER: u8 = 1 << 1;

/// See the module's text.
pub(crate) struct Agents {
    pub(crate) topology: Topology,
    start: NodeId,
    /// Nodes that response nothing.
    pub(crate) silent: Vec<NodeId>,
    /// Nodes that say who they are, and respond to nothing else.
    pub(crate) curt: Vec<NodeId>,
    /// Nodes that take nothing, and say that they did.
    pub(crate) deaf: Vec<NodeId>,
    /// GUIDs that nodes give for theirs.
    pub(crate) impostors: BTreeMap<NodeId, u64>,
    /// Nodes on which a subnet manager runs.
    pub(crate) managers: Vec<NodeId>,
    /// Nodes that refuse to have their tables written.
    pub(crate) stubborn: Vec<NodeId>,
    /// Nodes that refuse to map service levels to lanes.
    pub(crate) level: Vec<NodeId>,
    /// Nodes that say nothing to that.
    pub(crate) mute: Vec<NodeId>,
    /// Virtual lanes of every port, 1, 2, 4 or 8, with arbitration tables of as many entries; none
    /// if it is not set.
    pub(crate) lanes: Option<u8>,
    /// Switches take one mapping for all input ports.
    pub(crate) maps_all_inputs: bool,
    /// Nodes whose clients were told to register anew.
    pub(crate) reregistered: Vec<NodeId>,
    /// Requests with a wrong M_Key.
    pub(crate) violations: u64,
    /// What was written, by node, attribute and modifier.
    pub(crate) written: BTreeMap<(NodeId, u16, u32), [u8; 64]>,
}

impl Agents {
    pub(crate) fn of(text: &str) -> Agents {
        let shape: Shape = text.parse().expect(text);
        Agents::of_topology(shape.build(Capacity::default()).expect(text))
    }

    pub(crate) fn of_topology(topology: Topology) -> Agents {
        let start = topology.hosts().next().expect("a host");
        let [silent, curt, deaf, stubborn, level, mute, managers, reregistered] =
            [const { Vec::new() }; 8];
        let (impostors, written) = (BTreeMap::new(), BTreeMap::new());
        Agents {
            topology,
            start,
            silent,
            curt,
            deaf,
            impostors,
            managers,
            stubborn,
            level,
            mute,
            lanes: None,
            maps_all_inputs: false,
            reregistered,
            violations: 0,
            written,
        }
    }

    pub(crate) fn guid(node: NodeId) -> u64 {
        0x1000 + node.index() as u64
    }

    /// Of a port of a host.
    pub(crate) fn port_guid(node: NodeId, port: u8) -> u64 {
        0x10_0000 + 0x100 * node.index() as u64 + u64::from(port)
    }

    /// The response to a request of the node that everything begins at, as bytes; `None` where
    /// there is none.
    pub(crate) fn response(&mut self, request: &[u8; 256]) -> Option<[u8; 256]> {
        self.response_to(self.start, request)
    }

    /// The response to a request of a node.
    pub(crate) fn response_to(&mut self, start: NodeId, request: &[u8; 256]) -> Option<[u8; 256]> {
        // What it asks for is read by turning it into a response first.
        let (mut response, method) = (*request, request[3]);
        response[3] = 0x81;
        response[4] = 0x80;
        let mut smp = Smp::parse_response(&response).expect("our own request");
        let (node, by) = self.walk(start, smp.route)?;
        if !self.is_allowed(node, by, method, &smp) {
            return None;
        }
        let is_curt = self.curt.contains(&node) && smp.attribute != Attribute::NodeInfo;
        if is_curt || self.silent.contains(&node) {
            return None;
        }
        let is_table = smp.attribute == Attribute::LinearForwardingTable;
        let is_host = self.topology.node(node).kind() == Kind::Host;
        let is_other_port =
            is_host && smp.attribute == Attribute::PortInfo && smp.modifier != by.into();
        let is_level = matches!(smp.attribute, Attribute::SlToVl | Attribute::VlArbitration);
        if is_level && self.mute.contains(&node) {
            return None;
        }
        let refuses =
            is_table && self.stubborn.contains(&node) || is_level && self.level.contains(&node);
        if refuses {
            smp.status = UNSUPPORTED;
        } else if method == 2 && is_other_port {
            smp.status = INVALID;
        } else if method == 2 {
            let mut data = smp.data;
            let old = self.read(node, by, smp.attribute, smp.modifier)?;
            let is_port = smp.attribute == Attribute::PortInfo;
            if is_port && data[32] & 0xf == old[32] & 0xf {
                smp.status = INVALID;
            } else if !self.deaf.contains(&node) {
                // A state of 0 changes nothing.
                let keeps = is_port && data[32] & 0xf == 0;
                if is_port && data[51] & REREGISTER != 0 {
                    data[51] &= !REREGISTER;
                    self.reregistered.push(node);
                }
                data[32] |= if keeps { old[32] & 0xf } else { 0 };
                if is_port && data[43] >> 4 == 0 {
                    data[43] |= old[43] & 0xf0;
                }
                if smp.attribute == Attribute::SwitchInfo {
                    let changed =
                        if data[11] & PORT_CHANGE != 0 { 0 } else { old[11] & PORT_CHANGE };
                    data[11] = old[11] & !PORT_CHANGE | changed;
                }
                self.written.insert((node, smp.attribute.id(), smp.modifier), data);
                let [inputs, output] = [smp.modifier >> 16, smp.modifier & 0xff];
                if smp.attribute == Attribute::SlToVl && inputs == 2 {
                    for input in 0..=u32::from(self.topology.node(node).ports()) {
                        let modifier = input << 8 | output;
                        self.written.insert((node, smp.attribute.id(), modifier), data);
                    }
                }
            }
        }
        let m_key = smp.m_key;
        smp.method = Method::Response;
        smp.data = self.read(node, by, smp.attribute, smp.modifier)?;
        let guard = KeyGuard::parse(&smp.data);
        if smp.attribute == Attribute::PortInfo && m_key != guard.key && guard.protection > 0 {
            smp.data[..8].fill(0);
        }
        // Of a switch, port 0 says so.
        let is_own_port = smp.attribute == Attribute::PortInfo && (is_host || smp.modifier == 0);
        if is_own_port && self.managers.contains(&node) {
            smp.data[23] |= 1 << 1;
        }
        Some(smp.emit())
    }

    /// Whether a node takes a request, by the M_Key of its port (IBA 14.2.4.2).
    fn is_allowed(&mut self, node: NodeId, by: u8, method: u8, smp: &Smp) -> bool {
        let is_switch = self.topology.node(node).kind() == Kind::Switch;
        let port = if is_switch { 0 } else { u32::from(by) };
        let info = self.written.get(&(node, Attribute::PortInfo.id(), port));
        let guard = info.map(KeyGuard::parse).filter(|guard| guard.key != 0);
        let is_allowed =
            guard.is_none_or(|guard| smp.m_key == guard.key || method == 1 && guard.protection < 2);
        self.violations += u64::from(!is_allowed);
        is_allowed
    }

    /// A link dies, or a dead one comes back: both ends say so.
    pub(crate) fn set_ports(&mut self, ends: [End; 2], state: PortState) {
        for End { node, port } in ends {
            let mut info = self.read(node, port, Attribute::PortInfo, port.into()).expect("a port");
            info[32] = info[32] & 0xf0 | state.code();
            self.written.insert((node, Attribute::PortInfo.id(), port.into()), info);
            if self.topology.node(node).kind() == Kind::Switch {
                let mut info = self.read(node, 0, Attribute::SwitchInfo, 0).expect("a switch");
                info[11] |= PORT_CHANGE;
                self.written.insert((node, Attribute::SwitchInfo.id(), 0), info);
            }
        }
    }

    pub(crate) fn read(
        &self,
        node: NodeId,
        by: u8,
        attribute: Attribute,
        modifier: u32,
    ) -> Option<[u8; 64]> {
        if let Some(written) = self.written.get(&(node, attribute.id(), modifier)) {
            return Some(*written);
        }
        let is_switch = self.topology.node(node).kind() == Kind::Switch;
        Some(match attribute {
            Attribute::NodeInfo => {
                let mut data = NodeInfo {
                    node_type: if is_switch { NodeType::Switch } else { NodeType::ChannelAdapter },
                    ports: self.topology.node(node).ports(),
                    guid: self.impostors.get(&node).copied().unwrap_or(Agents::guid(node)),
                    port_guid: if is_switch {
                        Agents::guid(node)
                    } else {
                        Agents::port_guid(node, by)
                    },
                    local_port: by,
                }
                .emit();
                // PartitionCap.
                data[28..30].copy_from_slice(&64_u16.to_be_bytes());
                data
            }
            Attribute::NodeDescription => {
                let mut data = [0; 64];
                let name = self.topology.node(node).name().as_bytes();
                data[..name.len()].copy_from_slice(name);
                data
            }
            Attribute::PortInfo => {
                let link = self.topology.node(node).link_at(modifier as u8);
                let is_up = link.is_some() || modifier == 0;
                let state = Some(if is_up { PortState::Initialize } else { PortState::Down });
                let (lid, manager_lid, lmc, is_manager) = (0, 0, 0, false);
                let lanes = self.lanes.unwrap_or(4);
                let mut data = PortInfo { lid, manager_lid, state, lmc, lanes, is_manager }.emit();
                data[20] = CAN_REREGISTER;
                // VLArbitrationHighCap and LowCap.
                data[39..41].fill(self.lanes.unwrap_or(0));
                data
            }
            Attribute::SwitchInfo => {
                let mut data = [0; 64];
                data[..2].copy_from_slice(&0xc000_u16.to_be_bytes());
                data[4..6].copy_from_slice(&1_024_u16.to_be_bytes());
                data[11] = u8::from(self.maps_all_inputs);
                // PartitionEnforcementCap.
                data[14..16].copy_from_slice(&32_u16.to_be_bytes());
                data
            }
            Attribute::LinearForwardingTable => [255; 64],
            Attribute::PKeyTable
            | Attribute::SlToVl
            | Attribute::VlArbitration
            | Attribute::MulticastForwardingTable => [0; 64],
            Attribute::SmInfo => return None,
        })
    }

    /// The node at the end of a route, and the port by which it is reached.
    pub(crate) fn walk(&self, start: NodeId, route: DirectedRoute) -> Option<(NodeId, u8)> {
        let first = self.topology.neighbours(start).next().map_or(1, |(port, _)| port);
        route.ports().iter().try_fold((start, first), |(at, _), port| {
            let link = self.topology.node(at).link_at(*port)?;
            let End { node, port } = self.topology.link(link)?.beyond(at);
            Some((node, port))
        })
    }

    /// Runs a requester until it is done. `deliver` may change the responses, or lose them.
    pub(crate) fn run(
        &mut self,
        requester: &mut impl Requester,
        mut deliver: impl FnMut(u64, [u8; 256]) -> Vec<Vec<u8>>,
    ) {
        let (mut now, mut count) = (Duration::ZERO, 0);
        for _ in 0..1_000_000 {
            if requester.is_done() {
                return;
            }
            let mut responses = Vec::new();
            while let Some(request) = requester.poll_transmit(now) {
                count += 1;
                responses.extend(self.response(&request).map(|response| deliver(count, response)));
            }
            let nothing = responses.iter().all(Vec::is_empty);
            for response in responses.into_iter().flatten() {
                requester.handle_response(&response);
            }
            if nothing && let Some(at) = requester.poll_timeout() {
                now = at;
                requester.handle_timeout(now);
            }
        }
        panic!("it never ends");
    }
}

/// Every response arrives as it is.
pub(crate) fn honest(_: u64, response: [u8; 256]) -> Vec<Vec<u8>> {
    vec![response.to_vec()]
}
