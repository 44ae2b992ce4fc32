//! A fabric with managers on some of its hosts. Datagrams arrive at once; time passes when nobody
//! has anything to send.

#![allow(dead_code, reason = "every test that has it uses another part of it")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use subnet::discovery::Place;
use subnet::mad::{Attribute, LFT_BLOCK, PortInfo, PortState, Smp};
use subnet::manager::event::Event;
use subnet::manager::{Config, Counters, Datagram, Manager, Peer};
use subnet::sm_info::{SmInfo, Standing, respond};
use topology::graph::{Kind, Link, LinkId, NodeId};

use crate::agents::Agents;

/// A node and one of its ports.
type Port = (NodeId, u8);

/// See the module's text.
pub(crate) struct World {
    pub(crate) agents: Agents,
    /// By the place of a host in the list of hosts.
    managers: BTreeMap<usize, Manager>,
    pub(crate) now: Duration,
    events: Vec<(usize, Event)>,
    /// States of tables that were walked.
    pub(crate) walks: u64,
    /// Also when a link comes into use.
    pub(crate) walks_links: bool,
    /// Of messages.
    pub(crate) context: String,
    /// A node with a manager that answers `Get(SMInfo)` with this, and nothing else.
    pub(crate) foreign: Option<(NodeId, SmInfo)>,
    next_transaction: u32,
    /// Every response comes twice, and again much later.
    pub(crate) replays: bool,
    past: VecDeque<[u8; 256]>,
    /// One response of so many is lost, if it is not 0.
    pub(crate) loses: u64,
    count: u64,
    /// Service levels of connections, by where they begin and the LID: what subnet administration
    /// said when they were made. Only where ports have lanes.
    levels: BTreeMap<(Port, u16), u8>,
    /// Reports to subscribers that were sent meanwhile.
    pub(crate) reports: Vec<Datagram>,
}

impl World {
    pub(crate) fn of(text: &str) -> World {
        World {
            agents: Agents::of(text),
            managers: BTreeMap::new(),
            now: Duration::ZERO,
            events: Vec::new(),
            walks: 0,
            walks_links: false,
            context: text.to_owned(),
            foreign: None,
            next_transaction: 1,
            replays: false,
            past: VecDeque::new(),
            loses: 0,
            count: 1,
            levels: BTreeMap::new(),
            reports: Vec::new(),
        }
    }

    // ---- managers -------------------------------------------------------------------------------

    pub(crate) fn host(&self, at: usize) -> NodeId {
        self.agents.topology.hosts().nth(at).expect("a host")
    }

    pub(crate) fn start(&mut self, at: usize, config: Config) {
        self.start_with(at, config, BTreeMap::new());
    }

    pub(crate) fn start_with(&mut self, at: usize, config: Config, lids: BTreeMap<Place, u16>) {
        self.start_as(at, |transaction| Manager::new(config, lids, transaction));
    }

    /// One that is made with the first number of its requests.
    pub(crate) fn start_as(&mut self, at: usize, make: impl FnOnce(u32) -> Manager) {
        self.agents.managers.push(self.host(at));
        self.next_transaction += 1_000_000;
        self.managers.insert(at, make(self.next_transaction));
    }

    /// Its process is killed: from now on it says nothing.
    pub(crate) fn kill(&mut self, at: usize) {
        let host = self.host(at);
        self.agents.managers.retain(|node| *node != host);
        self.managers.remove(&at);
    }

    pub(crate) fn standing(&self, at: usize) -> Standing {
        self.managers[&at].standing()
    }

    pub(crate) fn counters(&self, at: usize) -> Counters {
        self.managers[&at].counters()
    }

    pub(crate) fn manager(&mut self, at: usize) -> &mut Manager {
        self.managers.get_mut(&at).expect("a manager")
    }

    pub(crate) fn remembered(&mut self, at: usize) -> BTreeMap<Place, u16> {
        self.manager(at).take_lids().cloned().unwrap_or_default()
    }

    pub(crate) fn take_events(&mut self) -> Vec<(usize, Event)> {
        std::mem::take(&mut self.events)
    }

    // ---- time -----------------------------------------------------------------------------------

    /// Runs for a time.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            while self.send_one() {}
            let next = self.managers.values().filter_map(Manager::poll_timeout).min();
            match next {
                Some(next) if next <= end => {
                    self.pass(next.max(self.now + Duration::from_micros(1)));
                }
                _ => break,
            }
        }
        self.now = end;
    }

    /// Handles so many datagrams, and lets no time pass if it can do without.
    pub(crate) fn step(&mut self, datagrams: u32) {
        for _ in 0..datagrams {
            if !self.send_one() {
                self.pass(self.now + Duration::from_millis(1));
            }
        }
    }

    fn pass(&mut self, to: Duration) {
        self.now = to;
        for manager in self.managers.values_mut() {
            manager.handle_timeout(to);
        }
    }

    /// One datagram of each manager; whether there was one.
    fn send_one(&mut self) -> bool {
        let places: Vec<usize> = self.managers.keys().copied().collect();
        let mut any = false;
        for at in places {
            let Some(manager) = self.managers.get_mut(&at) else {
                continue;
            };
            let mut is_set_up = false;
            while let Some(event) = manager.poll_event() {
                is_set_up |= matches!(event, Event::SetUp(_));
                self.events.push((at, event));
            }
            if is_set_up && self.agents.lanes.is_some() {
                self.learn_levels(at);
            }
            let Some(manager) = self.managers.get_mut(&at) else {
                continue;
            };
            if let Some(work) = manager.poll_work() {
                manager.handle_work(self.now, work.run());
                any = true;
            }
            if let Some(datagram) = manager.poll_transmit(self.now) {
                any = true;
                self.deliver(at, &datagram);
            }
        }
        any
    }

    /// Brings a datagram to a node, and the response back.
    fn deliver(&mut self, from: usize, datagram: &Datagram) {
        let mad = &datagram.mad;
        if (mad[1], mad[3]) == (0x03, 0x06) {
            self.reports.push(*datagram);
        }
        if datagram.peer != Peer::Directed || mad[3] & 0x80 != 0 {
            return;
        }
        let start = self.host(from);
        let is_sm_info = mad[16..18] == Attribute::SmInfo.id().to_be_bytes();
        let response = if is_sm_info {
            self.ask_manager(start, mad)
        } else {
            let sets = |attribute: Attribute| {
                mad[3] == 0x02 && mad[16..18] == attribute.id().to_be_bytes()
            };
            let activates =
                sets(Attribute::PortInfo) && mad[64 + 32] & 0xf == PortState::Armed.code();
            let response = self.agents.response_to(start, mad);
            if sets(Attribute::LinearForwardingTable) || activates && self.walks_links {
                self.walk_all();
            }
            response
        };
        let Some(manager) = self.managers.get_mut(&from) else {
            return;
        };
        self.count += 1;
        if self.loses > 0 && self.count.is_multiple_of(self.loses) {
            return;
        }
        if let Some(response) = response {
            manager.handle_datagram(self.now, Peer::Directed, &response);
            if self.replays {
                // The same again, and one from long ago.
                manager.handle_datagram(self.now, Peer::Directed, &response);
                self.past.push_back(response);
                if self.past.len() > 500 {
                    let old = self.past.pop_front().expect("it is not empty");
                    manager.handle_datagram(self.now, Peer::Directed, &old);
                }
            }
        }
    }

    fn ask_manager(&mut self, start: NodeId, mad: &[u8; 256]) -> Option<[u8; 256]> {
        let mut as_response = *mad;
        (as_response[3], as_response[4]) = (0x81, 0x80);
        let route = Smp::parse_response(&as_response).expect("a request of ours").route;
        let (node, _) = self.agents.walk(start, route)?;
        if let Some((_, info)) = self.foreign.filter(|(at, _)| *at == node) {
            return (mad[3] == 0x01).then(|| respond(mad, 0, &info.emit()));
        }
        let at = self.agents.topology.hosts().position(|host| host == node)?;
        let manager = self.managers.get_mut(&at)?;
        manager.handle_datagram(self.now, Peer::Directed, mad);
        let reply = manager.poll_transmit(self.now)?;
        if reply.mad[3] & 0x80 == 0 {
            self.deliver(at, &reply);
            return None;
        }
        Some(reply.mad)
    }

    /// Throws bytes at a manager.
    pub(crate) fn throw(&mut self, at: usize, bytes: &[u8]) {
        let now = self.now;
        self.manager(at).handle_datagram(now, Peer::Directed, bytes);
    }

    /// Sends a trap, and returns what comes back.
    pub(crate) fn trap(&mut self, at: usize, issuer: u16, number: u16) -> Option<[u8; 256]> {
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 0x01, 1, 0x05]);
        mad[17] = 0x02;
        mad[64] = 0x81;
        mad[68..70].copy_from_slice(&number.to_be_bytes());
        mad[70..72].copy_from_slice(&issuer.to_be_bytes());
        let peer = Peer::Lid { lid: issuer, queue_pair: 0, service_level: 0 };
        let now = self.now;
        let manager = self.manager(at);
        manager.handle_datagram(now, peer, &mad);
        let reply = manager.poll_transmit(now)?;
        if reply.peer == peer {
            return Some(reply.mad);
        }
        self.deliver(at, &reply);
        None
    }

    /// Asks a manager for the service level of a path; none where there is no path.
    pub(crate) fn level(&mut self, at: usize, from: u16, to: u16) -> Option<u8> {
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 0x03, 2, 0x01]);
        mad[16..18].copy_from_slice(&0x35_u16.to_be_bytes());
        mad[48..56].copy_from_slice(&(1_u64 << 4 | 1 << 5).to_be_bytes());
        mad[56 + 40..56 + 42].copy_from_slice(&to.to_be_bytes());
        mad[56 + 42..56 + 44].copy_from_slice(&from.to_be_bytes());
        let peer = Peer::Lid { lid: from, queue_pair: 1, service_level: 0 };
        let now = self.now;
        let manager = self.manager(at);
        manager.handle_datagram(now, peer, &mad);
        let reply = loop {
            let reply = manager.poll_transmit(now).expect("a response");
            if reply.mad[1] == 0x03 {
                break reply;
            }
        };
        (reply.mad[4..6] == [0, 0]).then_some(reply.mad[56 + 53] & 0xf)
    }

    /// Connections are made. Those that are up keep the level that they have, which has to be right
    /// still.
    fn learn_levels(&mut self, at: usize) {
        let lids = self.lids();
        for from in self.sources() {
            let own = lids.iter().find(|(_, place)| **place == from).map(|(lid, _)| *lid);
            for lid in lids.keys() {
                if let Some(now) = own.and_then(|own| self.level(at, own, *lid)) {
                    let before = *self.levels.entry((from, *lid)).or_insert(now);
                    assert_eq!(before, now, "{}: {from:?} to {lid}", self.context);
                }
            }
        }
    }

    fn far(&self, (node, port): Port) -> Option<Port> {
        let topology = &self.agents.topology;
        let link = topology.node(node).link_at(port).and_then(|link| topology.link(link))?;
        let far = link.beyond(node);
        Some((far.node, far.port))
    }

    /// The lane that a switch sends packets of a level on, which came by one port and leave by
    /// another.
    fn lane(&self, node: NodeId, [input, output]: [u8; 2], level: u8) -> u8 {
        let modifier = u32::from(input) << 8 | u32::from(output);
        let table = self.agents.written.get(&(node, Attribute::SlToVl.id(), modifier));
        table.map_or(0, |table| {
            let pair = table[usize::from(level) / 2];
            if level.is_multiple_of(2) { pair >> 4 } else { pair & 0xf }
        })
    }

    // ---- what happens to the fabric -------------------------------------------------------------

    pub(crate) fn links_between_switches(&self) -> Vec<LinkId> {
        let topology = &self.agents.topology;
        let is_switch = |node| topology.node(node).kind() == Kind::Switch;
        let links =
            topology.links().filter(|(_, link)| link.ends.iter().all(|end| is_switch(end.node)));
        links.map(|(id, _)| id).collect()
    }

    /// A link without which everybody still reaches everybody.
    pub(crate) fn spare(&self, links: &[LinkId], pick: usize) -> Option<LinkId> {
        (0..links.len()).map(|at| links[(at + pick) % links.len()]).find(|link| {
            let mut topology = self.agents.topology.clone();
            topology.remove(*link);
            topology.check().is_ok()
        })
    }

    pub(crate) fn cut(&mut self, link: LinkId) -> Link {
        let link = self.agents.topology.remove(link).expect("it was there");
        self.agents.set_ports(link.ends, PortState::Down);
        self.trap_from(&link);
        link
    }

    /// A link dies, and no trap arrives.
    pub(crate) fn cut_silently(&mut self, link: LinkId) -> Link {
        let link = self.agents.topology.remove(link).expect("it was there");
        self.agents.set_ports(link.ends, PortState::Down);
        link
    }

    pub(crate) fn cut_all(&mut self, node: NodeId) -> Vec<Link> {
        let links: Vec<LinkId> =
            self.agents.topology.node(node).links().map(|(_, id)| id).collect();
        links.into_iter().map(|link| self.cut(link)).collect()
    }

    pub(crate) fn join(&mut self, link: Link) {
        let [a, b] = link.ends;
        self.agents.topology.connect(a, b, link.capacity).expect("both are free");
        self.agents.set_ports(link.ends, PortState::Initialize);
        self.trap_from(&link);
    }

    fn trap_from(&mut self, link: &Link) {
        let masters: Vec<usize> = self
            .managers
            .iter()
            .filter(|(_, manager)| manager.standing() == Standing::Master)
            .map(|(at, _)| *at)
            .filter(|at| self.agents.topology.neighbours(self.host(*at)).next().is_some())
            .collect();
        for end in link.ends {
            let lid = self.agents.written.get(&(end.node, Attribute::PortInfo.id(), 0));
            if let Some(lid) = lid.map(|info| PortInfo::parse(info).lid) {
                for at in &masters {
                    self.trap(*at, lid, 128);
                }
            }
        }
    }

    /// A switch loses all that was written to it.
    pub(crate) fn restart(&mut self, switch: &str) {
        let switch = self.agents.topology.named(switch).expect("a switch");
        self.agents.written.retain(|(node, ..), _| *node != switch);
    }

    pub(crate) fn shrink_table(&mut self, switch: &str, capacity: u16) {
        let node = self.agents.topology.named(switch).expect("a switch");
        let key = (node, Attribute::SwitchInfo.id(), 0);
        let mut info = self.agents.read(node, 0, Attribute::SwitchInfo, 0).expect("a switch");
        info[..2].copy_from_slice(&capacity.to_be_bytes());
        self.agents.written.insert(key, info);
    }

    // ---- what the fabric is ---------------------------------------------------------------------

    fn port_info(&self, node: NodeId, port: u8) -> Option<PortInfo> {
        let written = self.agents.written.get(&(node, Attribute::PortInfo.id(), port.into()));
        written.map(PortInfo::parse)
    }

    pub(crate) fn lid_of_switch(&self, name: &str) -> u16 {
        let node = self.agents.topology.named(name).expect("a switch");
        self.port_info(node, 0).expect("it was written").lid
    }

    /// Every LID, with the node and port that have it.
    pub(crate) fn lids(&self) -> BTreeMap<u16, (NodeId, u8)> {
        let mut lids = BTreeMap::new();
        for (id, node) in self.agents.topology.nodes() {
            let ports = if node.kind() == Kind::Switch { 0..=0 } else { 1..=node.ports() };
            for port in ports {
                let Some(info) = self.port_info(id, port).filter(|info| info.lid > 0) else {
                    continue;
                };
                for lid in info.lid..info.lid + (1 << info.lmc) {
                    assert_eq!(lids.insert(lid, (id, port)), None, "{}: LID {lid}", self.context);
                }
            }
        }
        lids
    }

    /// Every block that switches hold.
    pub(crate) fn tables(&self) -> BTreeMap<(NodeId, u32), [u8; 64]> {
        let id = Attribute::LinearForwardingTable.id();
        let blocks = self.agents.written.iter().filter(|((_, attribute, _), _)| *attribute == id);
        blocks.map(|((node, _, block), data)| ((*node, *block), *data)).collect()
    }

    /// The port that a switch leaves by for a LID.
    fn port(&self, switch: NodeId, lid: u16) -> Option<u8> {
        let block = u32::from(lid) / LFT_BLOCK as u32;
        let id = Attribute::LinearForwardingTable.id();
        let data = self.agents.written.get(&(switch, id, block))?;
        Some(data[usize::from(lid) % LFT_BLOCK]).filter(|port| *port != 255)
    }

    /// Where packets for a LID end that leave a node by a port, and the ports of switches that they
    /// leave by.
    fn follow(&self, from: Port, lid: u16) -> (Option<Port>, Vec<Port>) {
        let topology = &self.agents.topology;
        let mut path = Vec::new();
        // Ports that are not armed yet discard data.
        let is_armed = |node, port| {
            self.port_info(node, port).is_some_and(|info| info.state >= Some(PortState::Armed))
        };
        let beyond = |node, port| {
            let link = topology.node(node).link_at(port)?;
            let far = topology.link(link)?.beyond(node);
            (is_armed(node, port) && is_armed(far.node, far.port)).then_some(far)
        };
        let mut at = beyond(from.0, from.1);
        while let Some(end) = at {
            if topology.node(end.node).kind() == Kind::Host {
                return (Some((end.node, end.port)), path);
            }
            let Some(port) = self.port(end.node, lid) else {
                return (None, path);
            };
            if port == 0 {
                return (Some((end.node, 0)), path);
            }
            assert!(path.len() < 64, "{}: LID {lid} goes round: {path:?}", self.context);
            path.push((end.node, port));
            at = beyond(end.node, port);
        }
        (None, path)
    }

    pub(crate) fn hosts(&self) -> Vec<Port> {
        self.sources()
    }

    /// The first switch, and the port that it forwards by, of packets that leave a host for a LID.
    pub(crate) fn first_hop(&self, from: Port, lid: u16) -> Option<Port> {
        self.follow(from, lid).1.first().copied()
    }

    /// Ports of hosts by which packets get into the fabric.
    fn sources(&self) -> Vec<(NodeId, u8)> {
        let topology = &self.agents.topology;
        let ports = |host| topology.neighbours(host).map(move |(port, _)| (host, port));
        topology.hosts().flat_map(ports).collect()
    }

    /// Walks all tables from all hosts and switches.
    fn walk_all(&mut self) {
        self.walks += 1;
        let lids: Vec<u16> = self.lids_in_tables();
        // Port and lane.
        type Buffer = (NodeId, u8, u8);
        let mut waits: BTreeMap<Buffer, BTreeSet<Buffer>> = BTreeMap::new();
        let topology = &self.agents.topology;
        // One host of each switch will do.
        let mut sources = self.sources();
        let at = |from: &(NodeId, u8)| {
            let link = topology.node(from.0).link_at(from.1).and_then(|link| topology.link(link));
            link.map(|link| link.beyond(from.0).node)
        };
        sources.dedup_by_key(|from| at(from));
        for from in sources {
            for lid in &lids {
                let (_, path) = self.follow(from, *lid);
                let is_between_switches = |(node, port): &(NodeId, u8)| {
                    let link =
                        topology.node(*node).link_at(*port).and_then(|link| topology.link(link));
                    link.is_some_and(|link| {
                        topology.node(link.beyond(*node).node).kind() == Kind::Switch
                    })
                };
                let level = self.levels.get(&(from, *lid)).copied();
                // Whoever was told no level has not sent anything yet.
                let Some(level) = level.or(self.agents.lanes.is_none().then_some(0)) else {
                    continue;
                };
                let mut input = from;
                let mut path: Vec<Buffer> = path
                    .into_iter()
                    .map(|(node, port)| {
                        let by = self.far(input).map_or(0, |(_, port)| port);
                        input = (node, port);
                        (node, port, self.lane(node, [by, port], level))
                    })
                    .collect();
                path.retain(|(node, port, _)| is_between_switches(&(*node, *port)));
                for pair in path.windows(2) {
                    waits.entry(pair[0]).or_default().insert(pair[1]);
                }
            }
        }
        // Channels that wait for nobody are taken away until none is left.
        loop {
            let before = waits.len();
            let ended: BTreeSet<_> = waits.keys().copied().collect();
            waits.retain(|_, next| next.iter().any(|channel| ended.contains(channel)));
            match (waits.len(), before) {
                (0, _) => return,
                (after, before) if after == before => {
                    let last = self.events.iter().rev().take(6).collect::<Vec<_>>();
                    panic!("{}: channels wait for each other: {waits:?}, {last:?}", self.context)
                }
                _ => {}
            }
        }
    }

    fn lids_in_tables(&self) -> Vec<u16> {
        let most = self.tables().keys().map(|(_, block)| *block).max().unwrap_or(0);
        (1..(most as u16 + 1) * LFT_BLOCK as u16).collect()
    }

    /// Every LID is reached from every port of a host, and every link is active.
    pub(crate) fn check_all_paths(&self, what: &str) {
        self.check_paths(what, |_| true);
    }

    /// The same for LIDs of ports of hosts: where paths to switches would close a cycle, there are
    /// none.
    pub(crate) fn check_paths_to_hosts(&self, what: &str) {
        self.check_paths(what, |port| port > 0);
    }

    fn check_paths(&self, what: &str, is_meant: impl Fn(u8) -> bool) {
        let mut lids = self.lids();
        lids.retain(|_, (node, port)| {
            is_meant(*port) && self.agents.topology.neighbours(*node).next().is_some()
        });
        for from in self.sources() {
            for (lid, to) in lids.iter().filter(|(_, to)| to.0 != from.0) {
                let (end, _) = self.follow(from, *lid);
                assert_eq!(end, Some(*to), "{}, {what}: LID {lid} from {from:?}", self.context);
            }
        }
        for (_, link) in self.agents.topology.links() {
            for end in link.ends {
                let state = self.port_info(end.node, end.port).and_then(|info| info.state);
                assert_eq!(state, Some(PortState::Active), "{}, {what}: {end:?}", self.context);
            }
        }
    }
}
