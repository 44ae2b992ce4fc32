//! Setting up a fabric that was discovered: LIDs, forwarding tables, states of ports (IBA 14.4).
//!
//! Four steps, each of which begins when every request of the one before has its response or was given up: LIDs are
//! assigned before tables are written, and tables before ports are armed. A request that fails is listed as a
//! complaint, and the setup goes on.
//!
//! | step | what is written |
//! |---|---|
//! | 1 | `PortInfo` of every end port and of port 0 of every switch: its LID, that of the manager |
//! | 2 | `SwitchInfo` and the linear forwarding table of every switch |
//! | 3 | `PortInfo` of both ends of every link: armed |
//! | 4 | the same: active |
//!
//! LIDs that are valid, fit every table and are unique stay; of duplicates the first. The LMC is always 0.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use thiserror::Error;

use crate::channels::Channels;
use crate::dependencies::Dependencies;
use crate::discovery::{Discovery, Place};
use crate::exchange::{Discarded, Done, Exchange, Fate, Request, Requester};
use crate::mad::{
    Attribute, DirectedRoute, LFT_BLOCK, MAD_BYTES, NodeType, PortInfo, PortSetting, PortState,
    linear_capacity, linear_top, switch_setting,
};
use crate::routes::{NO_ROUTE, Tables, up_down};
use crate::topology::NodeId;

/// The largest unicast LID; what is above is multicast.
pub const LAST_LID: u16 = 0xbfff;

/// Why a fabric cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SetupError {
    /// There are not so many LIDs.
    #[error("{0} ports need a LID; there are {LAST_LID}")]
    TooMany(usize),
    /// The tables of a switch are too small.
    #[error("the table of switch {guid:#018x} holds {capacity} LIDs, and the last one is {top}")]
    SmallTable {
        /// The switch.
        guid: u64,
        /// What it holds.
        capacity: u16,
        /// The last LID.
        top: u16,
    },
    /// The paths to end ports and to switches together have credit loops on one VL.
    #[error("the paths to end ports and those to switches together have credit loops on one VL")]
    CreditLoop,
    /// A switch or port did not respond when it was discovered.
    #[error("{guid:#018x} did not say enough when it was discovered")]
    Incomplete {
        /// The node.
        guid: u64,
    },
}

/// A request of the setup that went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SetupComplaint {
    /// No response came.
    #[error("the node at {0} does not take {1:?} {2}: no response")]
    Silent(DirectedRoute, Attribute, u32),
    /// It refuses.
    #[error("the node at {0} does not take {1:?} {2}: status {3:#06x}")]
    Refused(DirectedRoute, Attribute, u32, u16),
    /// It says that it has taken something else.
    #[error("the node at {0} has not taken {1:?} {2}, and says that all is well")]
    NotWritten(DirectedRoute, Attribute, u32),
}

/// The LIDs of a fabric, by node and port; of switches by port 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lids(BTreeMap<Place, u16>);

impl Lids {
    /// Of everything that was discovered.
    ///
    /// # Errors
    /// When there are too many.
    pub fn assign(discovery: &Discovery) -> Result<Lids, SetupError> {
        let places = places(discovery);
        if places.len() > usize::from(LAST_LID) {
            return Err(SetupError::TooMany(places.len()));
        }
        // What a table cannot hold would make all tables too small.
        let tables = discovery.nodes().values().filter_map(|node| node.switch_info);
        let smallest = tables.map(|info| linear_capacity(&info)).min();
        let most = smallest.map_or(LAST_LID, |smallest| LAST_LID.min(smallest.saturating_sub(1)));
        let (mut lids, mut taken) = (BTreeMap::new(), BTreeSet::new());
        for (place, info) in &places {
            let lid = PortInfo::parse(info).lid;
            if (1..=most).contains(&lid) && taken.insert(lid) {
                lids.insert(*place, lid);
            }
        }
        let mut free = (1..=LAST_LID).filter(|lid| !taken.contains(lid));
        for (place, _) in &places {
            // There are as many as places, as was checked.
            lids.entry(*place).or_insert_with(|| free.next().unwrap_or(LAST_LID));
        }
        Ok(Lids(lids))
    }

    /// The LID of a port.
    pub fn of(&self, place: Place) -> Option<u16> {
        self.0.get(&place).copied()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The largest.
    pub fn top(&self) -> u16 {
        self.0.values().copied().max().unwrap_or(0)
    }
}

/// What gets a LID: ports of adapters and routers, port 0 of switches; and what they say of themselves.
fn places(discovery: &Discovery) -> Vec<(Place, [u8; 64])> {
    let ports = discovery.nodes().iter().flat_map(|(guid, node)| {
        let is_switch = node.info.node_type == NodeType::Switch;
        let gets = node.ports.iter().filter(move |(port, _)| (**port == 0) == is_switch);
        gets.map(move |(port, info)| ((*guid, *port), *info))
    });
    ports.collect()
}

/// Why a request is sent.
#[derive(Clone, Copy, Debug)]
enum Why {
    Write,
    /// A port refused to enter this state. It may be there already: a response got lost, or data made it active.
    Verify(Option<PortState>, u16),
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Setup {
    exchange: Exchange<Why>,
    /// Requests of the steps that have not begun.
    steps: VecDeque<Vec<Request>>,
    lids: Lids,
    complaints: Vec<SetupComplaint>,
}

impl Setup {
    /// Of a fabric and the tables for its topology.
    ///
    /// # Errors
    /// When LIDs or tables do not suffice, or the discovery has gaps.
    pub fn new(
        discovery: &Discovery,
        channels: &Channels,
        tables: &Tables,
    ) -> Result<Setup, SetupError> {
        let lids = Lids::assign(discovery)?;
        let plan = Plan::new(discovery, channels, &lids);
        let steps = [
            plan.identities(),
            plan.tables(tables)?,
            plan.states(PortState::Armed),
            plan.states(PortState::Active),
        ];
        let steps = steps.into_iter().collect();
        let mut setup =
            Setup { exchange: Exchange::default(), steps, lids, complaints: Vec::new() };
        setup.begin_step();
        Ok(setup)
    }

    /// The LIDs that ports get.
    pub fn lids(&self) -> &Lids {
        &self.lids
    }

    /// What went wrong.
    pub fn complaints(&self) -> &[SetupComplaint] {
        &self.complaints
    }

    /// Begins the next step with requests once the last is over.
    fn begin_step(&mut self) {
        while self.exchange.is_idle()
            && let Some(requests) = self.steps.pop_front()
        {
            requests.into_iter().for_each(|request| self.exchange.request(request, Why::Write));
        }
    }

    fn handle(&mut self, done: &Done<Why>) {
        let Request { route, attribute, modifier, data, .. } = done.request;
        let refused = |status| SetupComplaint::Refused(route, attribute, modifier, status);
        let is_port = attribute == Attribute::PortInfo;
        let wanted = is_port.then(|| PortInfo::parse(&data).state).flatten();
        let complaint = match (done.fate, done.context) {
            (Fate::Silent, _) => Some(SetupComplaint::Silent(route, attribute, modifier)),
            (Fate::Refused(status), Why::Write) if wanted.is_some() => {
                let request = Request::get(route, attribute, modifier);
                self.exchange.request(request, Why::Verify(wanted, status));
                None
            }
            (Fate::Refused(status), _) => Some(refused(status)),
            (Fate::Response(now), Why::Verify(state, status)) => {
                (PortInfo::parse(&now).state < state).then(|| refused(status))
            }
            (Fate::Response(now), Why::Write) => {
                let other = SetupComplaint::NotWritten(route, attribute, modifier);
                (!is_written(attribute, &data, &now)).then_some(other)
            }
        };
        self.complaints.extend(complaint);
        self.begin_step();
    }
}

/// Whether a response says that the node is now as was written.
fn is_written(attribute: Attribute, wanted: &[u8; 64], now: &[u8; 64]) -> bool {
    match attribute {
        Attribute::PortInfo => {
            let (wanted, now) = (PortInfo::parse(wanted), PortInfo::parse(now));
            wanted.lid == now.lid && now.state >= wanted.state
        }
        Attribute::SwitchInfo => linear_top(wanted) == linear_top(now),
        _ => wanted == now,
    }
}

impl Requester for Setup {
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
        self.exchange.is_idle() && self.steps.is_empty()
    }

    fn sent(&self) -> u64 {
        self.exchange.sent()
    }

    fn discarded(&self) -> Discarded {
        self.exchange.discarded()
    }
}

/// What the steps are made from.
struct Plan<'a> {
    discovery: &'a Discovery,
    channels: &'a Channels,
    lids: &'a Lids,
    /// By node of the topology.
    guids: Vec<u64>,
    manager_lid: u16,
}

impl<'a> Plan<'a> {
    fn new(discovery: &'a Discovery, channels: &'a Channels, lids: &'a Lids) -> Plan<'a> {
        let of = |(guid, port)| lids.of((guid, port)).or(lids.of((guid, 0)));
        let manager_lid = discovery.start().and_then(of).unwrap_or(0);
        Plan { discovery, channels, lids, guids: discovery.guids(), manager_lid }
    }

    /// Sets a port; `None` where it did not say what it is.
    fn port(&self, (guid, port): Place, state: Option<PortState>) -> Option<Request> {
        let node = self.discovery.nodes().get(&guid)?;
        let own = node.ports.get(&port)?;
        let far = self
            .discovery
            .links()
            .get(&(guid, port))
            .and_then(|(guid, port)| self.discovery.nodes().get(guid)?.ports.get(port));
        let lid = self.lids.of((guid, port)).unwrap_or(0);
        let setting = PortSetting { lid, manager_lid: self.manager_lid, state };
        let data = setting.emit(own, far);
        // A port of an adapter takes what arrives at it, and nothing else.
        let route = node.port_routes.get(&port).copied();
        let route = route.filter(|_| node.info.node_type != NodeType::Switch);
        Some(Request::set(route.unwrap_or(node.route), Attribute::PortInfo, port.into(), data))
    }

    fn identities(&self) -> Vec<Request> {
        self.lids.0.keys().filter_map(|place| self.port(*place, None)).collect()
    }

    fn states(&self, state: PortState) -> Vec<Request> {
        let ends = self.discovery.links().keys();
        let is_behind = |place: &&Place| {
            let info =
                self.discovery.nodes().get(&place.0).and_then(|node| node.ports.get(&place.1));
            info.is_some_and(|info| PortInfo::parse(info).state.is_some_and(|now| now < state))
        };
        ends.filter(is_behind).filter_map(|place| self.port(*place, Some(state))).collect()
    }

    fn tables(&self, tables: &Tables) -> Result<Vec<Request>, SetupError> {
        let mut requests = Vec::new();
        let top = self.lids.top();
        let to_switches = self.to_switches(tables)?;
        for (number, switch) in (0_u32..).zip(self.channels.switches()) {
            let guid = self.guid(*switch);
            let node = self.discovery.nodes().get(&guid);
            let found = node.and_then(|node| Some((node.route, node.switch_info?)));
            let (route, info) = found.ok_or(SetupError::Incomplete { guid })?;
            if linear_capacity(&info) <= top {
                return Err(SetupError::SmallTable { guid, capacity: linear_capacity(&info), top });
            }
            let setting = switch_setting(&info, top);
            requests.push(Request::set(route, Attribute::SwitchInfo, 0, setting));
            let ports = self.forwarding(number, tables, &to_switches);
            for (block, ports) in (0..).zip(ports.as_chunks::<LFT_BLOCK>().0) {
                let attribute = Attribute::LinearForwardingTable;
                requests.push(Request::set(route, attribute, block, *ports));
            }
        }
        Ok(requests)
    }

    fn guid(&self, node: NodeId) -> u64 {
        self.guids.get(node.index()).copied().unwrap_or(0)
    }

    /// The table of a switch by LID, in whole blocks.
    fn forwarding(&self, switch: u32, tables: &Tables, to_switches: &[Vec<u8>]) -> Vec<u8> {
        let len = (usize::from(self.lids.top()) + 1).next_multiple_of(LFT_BLOCK);
        let mut ports = alloc::vec![NO_ROUTE; len];
        for (at, end_port) in (0..).zip(self.channels.end_ports()) {
            let place = (self.guid(end_port.end.node), end_port.end.port);
            if let Some(lid) = self.lids.of(place) {
                ports[usize::from(lid)] = tables.port(switch, at);
            }
        }
        for (to, other) in self.channels.switches().iter().enumerate() {
            if let Some(lid) = self.lids.of((self.guid(*other), 0)) {
                ports[usize::from(lid)] = to_switches[to][switch as usize];
            }
        }
        ports
    }

    /// By switch that is addressed, by switch that forwards: the port. To one with end ports as to the first of
    /// those, so that no path is new; to others by Up*/Down*.
    fn to_switches(&self, tables: &Tables) -> Result<Vec<Vec<u8>>, SetupError> {
        let end_ports = self.channels.end_ports();
        let rank = up_down::Ranks::of(self.channels);
        let mut ports = Vec::new();
        for there in 0..self.channels.switches().len() as u32 {
            let first = end_ports.iter().position(|end_port| end_port.switch == there);
            let port = |switch: u32| match first {
                // Port 0 is the switch itself.
                _ if switch == there => 0,
                Some(end_port) => tables.port(switch, end_port as u32),
                None => NO_ROUTE,
            };
            let as_to_end_port = (0..self.channels.switches().len() as u32).map(port).collect();
            ports.push(match first {
                Some(_) => as_to_end_port,
                None => rank.ports_to(self.channels, there),
            });
        }
        match self.has_credit_loop(tables, &ports) {
            true => Err(SetupError::CreditLoop),
            false => Ok(ports),
        }
    }

    fn has_credit_loop(&self, tables: &Tables, to_switches: &[Vec<u8>]) -> bool {
        let mut graph = Dependencies::new(self.channels.all().len());
        let count = self.channels.switches().len();
        let senders = (0..count as u32).filter(|switch| self.channels.sources(*switch) > 0);
        for from in senders {
            for end_port in 0..self.channels.end_ports().len() as u32 {
                if !graph.add(&tables.path(self.channels, from, end_port)) {
                    return true;
                }
            }
            for ports in to_switches {
                let mut path = Vec::new();
                let mut at = from;
                while let Some(channel) = self.channels.at(at, ports[at as usize])
                    && path.len() < count
                {
                    path.push(channel);
                    at = self.channels.get(channel).to;
                }
                if !graph.add(&path) {
                    return true;
                }
            }
        }
        false
    }
}
