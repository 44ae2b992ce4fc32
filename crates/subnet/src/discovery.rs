//! Discovery of a fabric by directed routes: from one node, port by port, until nothing new is
//! found (IBA 14.4).
//!
//! A state machine; the order of calls is that of [`Requester`].
//!
//! Nothing that a node responds is trusted: numbers of ports and links are compared with what is
//! known, and what does not fit is listed as a [`Complaint`] and left out.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use thiserror::Error;

use crate::exchange::{Discarded, Done, Exchange, Fate, Numbering, Request, Requester};
use crate::mad::{
    Attribute, DirectedRoute, MAD_BYTES, NodeInfo, NodeType, PortInfo, PortState, node_description,
};
use topology::graph::{Capacity, End, Kind, MAX_PORTS, Topology, TopologyError};

/// Most nodes: as many as have LIDs.
pub const MAX_NODES: usize = 0xbfff;

/// Most ports of all nodes together: three times those of 48,000 hosts on two levels of switches.
const MAX_PORTS_IN_ALL: usize = 1 << 19;

/// Requests without a response after which no others are sent: minutes of waiting.
const MAX_SILENT: usize = 5_000;

/// Most complaints that are kept; the others are counted.
const MAX_COMPLAINTS: usize = 1_000;

/// What is wrong with a part of the fabric.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Complaint {
    /// No response came.
    #[error("the node at {route} does not respond for {attribute:?}")]
    Silent {
        /// Where the request went.
        route: DirectedRoute,
        /// What was asked for.
        attribute: Attribute,
    },
    /// The response is an error.
    #[error("the node at {route} refuses {attribute:?} with status {status:#06x}")]
    Refused {
        /// Where the request went.
        route: DirectedRoute,
        /// What was asked for.
        attribute: Attribute,
        /// The status of the response.
        status: u16,
    },
    /// The response makes no sense.
    #[error("the node at {route}: {what}")]
    Nonsense {
        /// Where the request went.
        route: DirectedRoute,
        /// What it said.
        what: &'static str,
    },
    /// A port is at the end of two links, or of one to its own node.
    #[error(
        "port {port} of {guid:#018x} is at the end of two links, or of one to its own node; the second end is by {route}"
    )]
    TwoLinks {
        /// The node.
        guid: u64,
        /// Its port.
        port: u8,
        /// The way of the second.
        route: DirectedRoute,
    },
    /// A node was reached by a port that says it is down.
    #[error(
        "port {port} of {guid:#018x} is down, but a link leads to it from {far:#018x}: two nodes have the GUID {guid:#018x}, or the link died just now"
    )]
    DownBehindLink {
        /// The node.
        guid: u64,
        /// Its port.
        port: u8,
        /// The node at the other end.
        far: u64,
    },
    /// A route cannot be longer.
    #[error("what is beyond {0} is too far away")]
    TooFar(DirectedRoute),
    /// So many requests got no response that the others are not sent.
    #[error("{MAX_SILENT} requests got no response; the discovery ends here")]
    TooSilent,
    /// There are more nodes than there can be.
    #[error("there are more nodes or ports than there can be; what is beyond {0} is left out")]
    TooMany(DirectedRoute),
}

/// A node that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundNode {
    /// What it says it is.
    pub info: NodeInfo,
    /// The attribute `NodeInfo` itself.
    pub raw_info: [u8; 64],
    /// Of an adapter, by port, the GUIDs of its ports.
    pub port_guids: BTreeMap<u8, u64>,
    /// The first way to it.
    pub route: DirectedRoute,
    /// What it calls itself; empty until it has said so.
    pub description: String,
    /// Of an adapter, by port: the first way that ends at it. What is set of a port goes there.
    pub port_routes: BTreeMap<u8, DirectedRoute>,
    /// The attribute `SwitchInfo`, of a switch that has answered.
    pub switch_info: Option<[u8; 64]>,
    /// By port, the attribute `PortInfo` of those that it was asked for.
    pub ports: BTreeMap<u8, [u8; 64]>,
}

/// A port of a node, by GUID.
pub type Place = (u64, u8);

/// Why a node is asked.
#[derive(Clone, Copy, Debug)]
enum Why {
    /// Who is there? By this port, or nothing where it is the node itself.
    Who(Option<Place>),
    /// A detail of the node with this GUID.
    Detail(u64),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Discovery {
    exchange: Exchange<Why>,
    nodes: BTreeMap<u64, FoundNode>,
    links: BTreeMap<Place, Place>,
    /// Of all nodes.
    ports: usize,
    /// Requests without a response.
    silent: usize,
    complaints: Vec<Complaint>,
    complaints_left_out: u64,
}

impl Default for Discovery {
    fn default() -> Discovery {
        Discovery::new()
    }
}

impl Discovery {
    /// One that begins at the node that it runs on.
    pub fn new() -> Discovery {
        Discovery::beginning(Numbering::default())
    }

    /// The same, with a numbering for its requests.
    pub fn beginning(numbering: Numbering) -> Discovery {
        let mut exchange = Exchange::beginning(numbering);
        exchange.request(Request::get(DirectedRoute::HERE, Attribute::NodeInfo, 0), Why::Who(None));
        Discovery {
            exchange,
            nodes: BTreeMap::new(),
            links: BTreeMap::new(),
            ports: 0,
            silent: 0,
            complaints: Vec::new(),
            complaints_left_out: 0,
        }
    }

    fn handle(&mut self, done: &Done<Why>) {
        let Request { route, attribute, .. } = done.request;
        match (done.fate, done.context) {
            (Fate::Silent, _) => {
                self.complain(Complaint::Silent { route, attribute });
                self.silent += 1;
                if self.silent == MAX_SILENT {
                    self.complain(Complaint::TooSilent);
                    self.exchange.drop_waiting();
                }
            }
            (Fate::Refused(status), _) => {
                self.complain(Complaint::Refused { route, attribute, status });
            }
            (Fate::Response(data), Why::Who(from)) => self.handle_node(route, from, &data),
            (Fate::Response(data), Why::Detail(guid)) => {
                self.handle_detail(guid, &done.request, &data);
            }
        }
    }

    // ---- responses ------------------------------------------------------------------------------

    fn handle_node(&mut self, route: DirectedRoute, from: Option<Place>, data: &[u8; 64]) {
        let nonsense = |what| Complaint::Nonsense { route, what };
        let Some(info) = NodeInfo::parse(data) else {
            return self.complain(nonsense("it is neither adapter nor switch nor router"));
        };
        let is_switch = info.node_type == NodeType::Switch;
        // A request from the switch itself comes by its port 0.
        let first_port = if is_switch && from.is_none() { 0 } else { 1 };
        if info.ports == 0 || info.ports > MAX_PORTS {
            return self.complain(nonsense("it has no ports, or more than there can be"));
        }
        if info.local_port < first_port || info.local_port > info.ports {
            return self.complain(nonsense("the request came by a port that it has not"));
        }
        if let Some(known) = self.nodes.get(&info.guid) {
            if (known.info.node_type, known.info.ports) != (info.node_type, info.ports) {
                return self.complain(nonsense("its GUID is that of another node"));
            }
            if self.join(route, from, &info) {
                self.ask_for_port(route, &info);
            }
        } else if self.nodes.len() >= MAX_NODES || self.ports >= MAX_PORTS_IN_ALL {
            self.complain(Complaint::TooMany(route));
        } else if self.join(route, from, &info) {
            self.add(route, info, *data);
        }
    }

    /// Notes the link by which a node was reached; whether it fits what is known.
    fn join(&mut self, route: DirectedRoute, from: Option<Place>, info: &NodeInfo) -> bool {
        let Some(near) = from else {
            return true;
        };
        let far = (info.guid, info.local_port);
        for (place, other) in [(near, far), (far, near)] {
            let is_other = self.links.get(&place).is_some_and(|known| *known != other);
            if is_other || near.0 == far.0 {
                let (guid, port) = place;
                self.complain(Complaint::TwoLinks { guid, port, route });
                return false;
            }
        }
        self.links.insert(near, far);
        self.links.insert(far, near);
        true
    }

    fn add(&mut self, route: DirectedRoute, info: NodeInfo, raw_info: [u8; 64]) {
        let mut ask = |attribute, port: u8| {
            let request = Request::get(route, attribute, port.into());
            self.exchange.request(request, Why::Detail(info.guid));
        };
        ask(Attribute::NodeDescription, 0);
        match info.node_type {
            NodeType::Switch => {
                ask(Attribute::SwitchInfo, 0);
                (0..=info.ports).for_each(|port| ask(Attribute::PortInfo, port));
            }
            NodeType::ChannelAdapter | NodeType::Router => {
                ask(Attribute::PortInfo, info.local_port);
            }
        }
        let port_routes = BTreeMap::from([(info.local_port, route)]);
        let (description, switch_info, ports) = (String::new(), None, BTreeMap::new());
        let port_guids = BTreeMap::from([(info.local_port, info.port_guid)]);
        let node = FoundNode {
            info,
            raw_info,
            port_guids,
            route,
            description,
            port_routes,
            switch_info,
            ports,
        };
        self.nodes.insert(info.guid, node);
        self.ports += usize::from(info.ports);
    }

    /// Another port of an adapter that is known: it responds where packets end at it.
    fn ask_for_port(&mut self, route: DirectedRoute, info: &NodeInfo) {
        let Some(node) = self.nodes.get_mut(&info.guid) else {
            return;
        };
        let is_adapter = info.node_type != NodeType::Switch;
        if is_adapter && !node.port_routes.contains_key(&info.local_port) {
            node.port_routes.insert(info.local_port, route);
            node.port_guids.insert(info.local_port, info.port_guid);
            let request = Request::get(route, Attribute::PortInfo, info.local_port.into());
            self.exchange.request(request, Why::Detail(info.guid));
        }
    }

    fn handle_detail(&mut self, guid: u64, request: &Request, data: &[u8; 64]) {
        let Some(node) = self.nodes.get_mut(&guid) else {
            return;
        };
        match request.attribute {
            Attribute::NodeDescription => node.description = node_description(data),
            Attribute::SwitchInfo => node.switch_info = Some(*data),
            Attribute::PortInfo => {
                // Requests for ports have their numbers as modifiers.
                let (port, info) = (request.modifier as u8, PortInfo::parse(data));
                node.ports.insert(port, *data);
                let is_start = request.route == DirectedRoute::HERE;
                let forwards = node.info.node_type == NodeType::Switch || is_start;
                if forwards && port > 0 && info.state.is_some_and(|state| state > PortState::Down) {
                    self.follow(request.route, (guid, port));
                }
            }
            _ => {}
        }
    }

    /// Requester who is at the other end of a link, if that is not known.
    fn follow(&mut self, route: DirectedRoute, from: Place) {
        if self.links.contains_key(&from) {
            return;
        }
        let Some(beyond) = route.then(from.1) else {
            return self.complain(Complaint::TooFar(route));
        };
        let request = Request::get(beyond, Attribute::NodeInfo, 0);
        self.exchange.request(request, Why::Who(Some(from)));
    }

    fn complain(&mut self, complaint: Complaint) {
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(complaint);
        } else {
            self.complaints_left_out += 1;
        }
    }

    // ---- what changes later ---------------------------------------------------------------------

    /// Takes links out, each given by one of its ends, what cannot be reached without them, and
    /// routes that pass them.
    pub fn cut(&mut self, links: &[Place]) {
        for near in links {
            if let Some(far) = self.links.remove(near) {
                self.links.remove(&far);
            }
        }
        let mut found = self.routes();
        self.nodes.retain(|guid, node| {
            let Some((route, port_routes)) = found.remove(guid) else {
                return false;
            };
            (node.route, node.port_routes) = (route, port_routes);
            true
        });
        let nodes = &self.nodes;
        self.links.retain(|near, far| nodes.contains_key(&near.0) && nodes.contains_key(&far.0));
    }

    /// Takes nodes over from an earlier discovery that have not responded now although a link to
    /// them is up, and what nodes have not responded to: a node that is too slow for its manager
    /// may well forward packets.
    pub fn keep_silent(&mut self, before: &Discovery) {
        for (guid, node) in &mut self.nodes {
            let Some(known) = before.nodes.get(guid) else {
                continue;
            };
            node.switch_info = node.switch_info.or(known.switch_info);
            let is_switch = node.info.node_type == NodeType::Switch;
            // A port of an adapter that was not reached now is not there.
            for (port, info) in &known.ports {
                if is_switch || node.port_routes.contains_key(port) {
                    node.ports.entry(*port).or_insert(*info);
                }
            }
        }
        loop {
            let mut is_changed = false;
            for (near, far) in &before.links {
                let is_known = self.links.contains_key(near) || self.links.contains_key(far);
                let is_up =
                    self.is_up(*near) && (self.is_up(*far) || !self.nodes.contains_key(&far.0));
                let Some(node) = before.nodes.get(&far.0).filter(|_| !is_known && is_up) else {
                    continue;
                };
                self.nodes.entry(far.0).or_insert_with(|| node.clone());
                self.links.insert(*near, *far);
                self.links.insert(*far, *near);
                is_changed = true;
            }
            if !is_changed {
                return;
            }
        }
    }

    /// Cuts links of which one end is up and the other says that it is down: a GUID that two nodes
    /// have makes such links. A link that died in the middle of the discovery looks the same.
    pub fn cut_contradictory(&mut self) {
        let is_down = |end: &Place| {
            let info = self.nodes.get(&end.0).and_then(|node| node.ports.get(&end.1));
            info.is_some_and(|info| PortInfo::parse(info).state == Some(PortState::Down))
        };
        let links = self.links.iter().filter(|(end, _)| is_down(end));
        let links: Vec<(Place, Place)> = links.map(|(end, far)| (*end, *far)).collect();
        for ((guid, port), far) in &links {
            self.complain(Complaint::DownBehindLink { guid: *guid, port: *port, far: far.0 });
        }
        if !links.is_empty() {
            let ends: Vec<Place> = links.into_iter().map(|(end, _)| end).collect();
            self.cut(&ends);
        }
    }

    /// Cuts switches off that did not say how large their tables are: one that is broken must not
    /// keep all others from being routed.
    pub fn cut_unreadable(&mut self) {
        let is_unreadable = |guid: &u64| {
            let node = self.nodes.get(guid);
            node.is_some_and(|node| {
                node.info.node_type == NodeType::Switch && node.switch_info.is_none()
            })
        };
        let ends = self.links.keys().filter(|end| is_unreadable(&end.0)).copied();
        let ends: Vec<Place> = ends.collect();
        if !ends.is_empty() {
            self.cut(&ends);
        }
    }

    fn is_up(&self, place: Place) -> bool {
        let info = self.nodes.get(&place.0).and_then(|node| node.ports.get(&place.1));
        info.is_some_and(|info| PortInfo::parse(info).state > Some(PortState::Down))
    }

    /// Notes what a port says now.
    pub fn set_port(&mut self, place: Place, info: &[u8; 64]) {
        if let Some(node) = self.nodes.get_mut(&place.0) {
            node.ports.insert(place.1, *info);
        }
    }

    /// Notes what a switch says now.
    pub fn set_switch_info(&mut self, guid: u64, info: &[u8; 64]) {
        if let Some(node) = self.nodes.get_mut(&guid) {
            node.switch_info = Some(*info);
        }
    }

    /// Shortest routes to all nodes that are reached, and of adapters to each of their ports.
    fn routes(&self) -> BTreeMap<u64, (DirectedRoute, BTreeMap<u8, DirectedRoute>)> {
        let mut found = BTreeMap::new();
        let Some((start, port)) = self.start() else {
            return found;
        };
        found.insert(start, (DirectedRoute::HERE, BTreeMap::from([(port, DirectedRoute::HERE)])));
        let mut open = VecDeque::from([(start, DirectedRoute::HERE)]);
        while let Some((guid, route)) = open.pop_front() {
            let ends = self.links.range((guid, 0)..=(guid, u8::MAX));
            for ((_, port), far) in ends {
                let Some(beyond) = route.then(*port) else {
                    continue;
                };
                let is_switch = self
                    .nodes
                    .get(&far.0)
                    .is_some_and(|node| node.info.node_type == NodeType::Switch);
                if let Some((_, port_routes)) = found.get_mut(&far.0) {
                    port_routes.entry(far.1).or_insert(beyond);
                    continue;
                }
                found.insert(far.0, (beyond, BTreeMap::from([(far.1, beyond)])));
                if is_switch {
                    open.push_back((far.0, beyond));
                }
            }
        }
        found
    }

    // ---- what was found ------------------------------------------------------------------------

    /// Nodes by GUID.
    pub fn nodes(&self) -> &BTreeMap<u64, FoundNode> {
        &self.nodes
    }

    /// The GUID of a port; of a switch, that of port 0.
    pub fn port_guid(&self, (guid, port): Place) -> Option<u64> {
        let node = self.nodes.get(&guid)?;
        match node.info.node_type {
            NodeType::Switch => Some(node.info.port_guid),
            _ => node.port_guids.get(&port).copied(),
        }
    }

    /// Links, each at both of its ends.
    pub fn links(&self) -> &BTreeMap<Place, Place> {
        &self.links
    }

    /// What is wrong, in the order in which it was found, and how much more there was.
    pub fn complaints(&self) -> (&[Complaint], u64) {
        (&self.complaints, self.complaints_left_out)
    }

    /// GUIDs of the nodes of a [`topology`](Discovery::topology), by their places in it.
    pub fn guids(&self) -> Vec<u64> {
        self.nodes.keys().copied().collect()
    }

    /// The node and port that requests leave by.
    pub fn start(&self) -> Option<Place> {
        let start = self.nodes.iter().find(|(_, node)| node.route == DirectedRoute::HERE);
        start.map(|(guid, node)| (*guid, node.info.local_port))
    }

    /// Ports that set IsSM: a subnet manager runs there, master or standby.
    pub fn managers(&self) -> Vec<Place> {
        let ports = self.nodes.iter().flat_map(|(guid, node)| {
            node.ports.iter().map(move |(port, info)| ((*guid, *port), PortInfo::parse(info)))
        });
        ports.filter(|(_, info)| info.is_manager).map(|(place, _)| place).collect()
    }

    /// The way to a port that has a LID: of an adapter, one that ends there; of a switch, port 0 is
    /// meant.
    pub fn route(&self, (guid, port): Place) -> Option<DirectedRoute> {
        let node = self.nodes.get(&guid)?;
        let is_switch = node.info.node_type == NodeType::Switch;
        match port {
            0 => is_switch.then_some(node.route),
            _ => node.port_routes.get(&port).copied(),
        }
    }

    /// The graph. Nodes have the names that they call themselves; where two call themselves alike,
    /// their GUIDs are behind. Links get `capacity`.
    ///
    /// # Errors
    /// When nodes do not fit together, which the checks before should have found.
    pub fn topology(&self, capacity: Capacity) -> Result<Topology, TopologyError> {
        let (mut topology, mut ids) = (Topology::new(), BTreeMap::new());
        let mut count: BTreeMap<&str, usize> = BTreeMap::new();
        for node in self.nodes.values() {
            *count.entry(&node.description).or_default() += 1;
        }
        for (guid, node) in &self.nodes {
            let description = node.description.as_str();
            let mut name = match (description, count[description]) {
                ("", _) => format!("{guid:#018x}"),
                (_, 1) => description.to_owned(),
                _ => format!("{description} {guid:#018x}"),
            };
            // Whoever calls itself as another one with its GUID gets its own behind it, too.
            while topology.named(&name).is_some() {
                name = format!("{name} {guid:#018x}");
            }
            let kind = match node.info.node_type {
                NodeType::Switch => Kind::Switch,
                NodeType::ChannelAdapter | NodeType::Router => Kind::Host,
            };
            ids.insert(*guid, topology.add(kind, &name, node.info.ports.into())?);
        }
        let end = |(guid, port): &Place| -> Option<End> {
            Some(End { node: *ids.get(guid)?, port: *port }).filter(|end: &End| end.port > 0)
        };
        for (near, far) in self.links.iter().filter(|(near, far)| near < far) {
            // Both nodes are known: a link is noted with its second node.
            if let (Some(a), Some(b)) = (end(near), end(far)) {
                topology.connect(a, b, capacity)?;
            }
        }
        Ok(topology)
    }
}

impl Requester for Discovery {
    fn poll_transmit(&mut self, now: Duration) -> Option<[u8; MAD_BYTES]> {
        self.exchange.poll_transmit(now)
    }

    fn poll_timeout(&self) -> Option<Duration> {
        self.exchange.poll_timeout()
    }

    fn handle_timeout(&mut self, now: Duration) {
        for done in self.exchange.handle_timeout(now) {
            self.handle(&done);
        }
    }

    fn handle_response(&mut self, bytes: &[u8]) {
        if let Some(done) = self.exchange.handle_response(bytes) {
            self.handle(&done);
        }
    }

    fn is_done(&self) -> bool {
        self.exchange.is_idle()
    }

    fn numbering(&self) -> Numbering {
        self.exchange.numbering()
    }

    fn sent(&self) -> u64 {
        self.exchange.sent()
    }

    fn discarded(&self) -> Discarded {
        self.exchange.discarded()
    }
}
