//! Setting up a fabric that was discovered: LIDs, forwarding tables, states of ports (IBA 14.4).
//!
//! Steps, each of which begins when every request of the one before has its response or was given up: LIDs are
//! assigned before tables are written, and tables before ports are armed. A request that fails is listed as a
//! complaint, and the setup goes on; but of later stages of tables what depends on a block that was not written is left
//! out, and the last one, that of drained LIDs, if any block was not: together with old entries it could close a cycle.
//!
//! | step | what is written |
//! |---|---|
//! | 1 | `PortInfo` of end ports and of port 0 of switches that have not their LID, or not that of the manager |
//! | 2 | blocks of linear forwarding tables that change, in the stages of a [`transition`] |
//! | 3 | `SwitchInfo` with the last LID |
//! | 4 | `PortInfo` of both ends of every link that is not in use: armed |
//! | 5 | the same: active |

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use thiserror::Error;

use crate::channels::Channels;
use crate::discovery::{Discovery, Place};
use crate::exchange::{Discarded, Done, Exchange, Fate, Numbering, Request, Requester};
use crate::forwarding::{Detour, Forwarding};
use crate::lids::{Lids, Order, Owner, TooFewLids};
use crate::mad::{
    Attribute, DirectedRoute, MAD_BYTES, NodeType, PortInfo, PortSetting, PortState,
    can_reregister, linear_capacity, linear_top, switch_setting,
};
use crate::routes::{Tables, up_down::Ranks};
use crate::topology::NodeId;
use crate::transition::{self, Flaw, Transition, Write};

/// How long drained LIDs rest: a packet leaves the fabric in that time, or its switches discard it (head-of-queue
/// and switch lifetimes, IBA 18.2.5.4, are at most some hundreds of milliseconds in practice).
pub const REST: Duration = Duration::from_millis(200);

/// Why a fabric cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SetupError {
    /// There are not so many LIDs.
    #[error(transparent)]
    TooMany(#[from] TooFewLids),
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
    /// Packets for a LID go round.
    #[error("packets for LID {0} would go round")]
    Loop(u16),
    /// A switch or port did not respond when it was discovered.
    #[error("switch {guid:#018x} did not respond to Get(SwitchInfo) when it was discovered")]
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

/// Complaints that are kept; the others are counted.
const MAX_COMPLAINTS: usize = 1_000;

/// What a fabric is set up to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Who has which LID.
    pub lids: Lids,
    /// The tables, and the way to them.
    pub transition: Transition,
}

impl Target {
    /// For the tables of an engine. `held` are the tables that switches hold, by their numbers; none where they are
    /// unknown.
    ///
    /// # Errors
    /// When tables do not suffice, have a flaw, or the discovery has gaps.
    pub fn new(
        discovery: &Discovery,
        channels: &Channels,
        (tables, ranks): (&Tables, &Ranks),
        lids: Lids,
        held: &[Option<Vec<u8>>],
    ) -> Result<Target, SetupError> {
        let guids = discovery.guids();
        let owners = lids.owners(channels, &guids);
        let top = lids.top();
        check_switches(discovery, channels, &guids, top)?;
        let target = forwarding(channels, (tables, ranks), &owners)?;
        let mut old = Forwarding::empty(channels.switches().len(), top);
        for (switch, held) in (0..).zip(held) {
            held.iter().for_each(|held| old.replace(switch, held));
        }
        let is_unknown = |switch: u32| held.get(switch as usize).is_none_or(Option::is_none);
        let transition = Transition::new(channels, &old, target, top, is_unknown);
        Ok(Target { lids, transition })
    }
}

/// The tables by LID: with paths between all switches, if that closes no cycle.
fn forwarding(
    channels: &Channels,
    (tables, ranks): (&Tables, &Ranks),
    owners: &[Owner],
) -> Result<Forwarding, SetupError> {
    let top = owners.len().saturating_sub(1) as u16;
    let mut refused = SetupError::CreditLoop;
    for detour in [Detour::Allowed, Detour::Refused] {
        let forwarding = Forwarding::new(channels, tables, ranks, owners, detour);
        refused = match transition::flaw(channels, &forwarding, top) {
            None => return Ok(forwarding),
            Some(Flaw::Loop(lid)) => SetupError::Loop(lid),
            Some(Flaw::CreditLoop) => SetupError::CreditLoop,
        };
    }
    Err(refused)
}

fn check_switches(
    discovery: &Discovery,
    channels: &Channels,
    guids: &[u64],
    top: u16,
) -> Result<(), SetupError> {
    for switch in channels.switches() {
        let guid = guids.get(switch.index()).copied().unwrap_or(0);
        let info = discovery.nodes().get(&guid).and_then(|node| node.switch_info);
        let capacity = linear_capacity(&info.ok_or(SetupError::Incomplete { guid })?);
        if capacity <= top {
            return Err(SetupError::SmallTable { guid, capacity, top });
        }
    }
    Ok(())
}

/// Why a request is sent.
#[derive(Clone, Copy, Debug)]
enum Why {
    /// A block of the table of the switch with this GUID.
    Table(u64),
    /// A port.
    Port(Place),
    /// A switch.
    Switch(u64),
    /// A port refused to enter this state. It may be there already: a response got lost, or data made it active.
    Verify(Place, Option<PortState>, u16),
}

/// Requests that are sent together.
#[derive(Clone, Debug, Default)]
struct Step {
    requests: Vec<(Request, Why)>,
    /// Before it.
    rest: Duration,
    needs: Needs,
}

/// What a step needs of those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Needs {
    #[default]
    Nothing,
    /// Of its own blocks, that all switches have taken those of earlier stages.
    SameBlocks,
    /// That all tables were written.
    AllTables,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Setup {
    exchange: Exchange<Why>,
    /// Those that have not begun.
    steps: VecDeque<Step>,
    /// When the rest before the next step ends.
    rests_until: Option<Duration>,
    target: Target,
    ports: BTreeMap<Place, [u8; 64]>,
    switches: BTreeMap<u64, [u8; 64]>,
    /// Switches whose tables are not as they should be.
    failed: BTreeSet<u64>,
    /// Blocks that a switch has not taken.
    failed_blocks: BTreeSet<u32>,
    /// Drained LIDs have no route, since a table was not written.
    is_cut_short: bool,
    complaints: Vec<SetupComplaint>,
    complaints_left_out: u64,
}

impl Setup {
    /// Of a fabric and the tables for its topology, whatever its switches hold.
    ///
    /// # Errors
    /// When LIDs or tables do not suffice, or the discovery has gaps.
    pub fn new(
        discovery: &Discovery,
        channels: &Channels,
        tables: &Tables,
    ) -> Result<Setup, SetupError> {
        let lids = Lids::assign(discovery, &BTreeMap::new(), Order::RememberedFirst, 0)?;
        let ranks = Ranks::of(channels);
        let target = Target::new(discovery, channels, (tables, &ranks), lids, &[])?;
        Ok(Setup::to(discovery, channels, target, Numbering::default(), |_| false))
    }

    /// Of a fabric to a target. The numbering is that of the requests. Clients of ports that `is_new` names have to
    /// register with subnet administration anew, even if their port is in use and stays as it is.
    pub fn to(
        discovery: &Discovery,
        channels: &Channels,
        target: Target,
        numbering: Numbering,
        is_new: impl Fn(Place) -> bool,
    ) -> Setup {
        let steps = Plan::new(discovery, channels, &target, &is_new).steps();
        Setup {
            exchange: Exchange::beginning(numbering),
            steps,
            rests_until: None,
            target,
            ports: BTreeMap::new(),
            switches: BTreeMap::new(),
            failed: BTreeSet::new(),
            failed_blocks: BTreeSet::new(),
            is_cut_short: false,
            complaints: Vec::new(),
            complaints_left_out: 0,
        }
    }

    /// The LIDs that ports get.
    pub fn lids(&self) -> &Lids {
        &self.target.lids
    }

    /// What is being set.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Whether the table of a switch is known to be as it should be, once all is done.
    pub fn has_table(&self, guid: u64) -> bool {
        !self.failed.contains(&guid) && !self.is_cut_short
    }

    /// What went wrong.
    pub fn complaints(&self) -> &[SetupComplaint] {
        &self.complaints
    }

    /// How much more went wrong.
    pub fn complaints_left_out(&self) -> u64 {
        self.complaints_left_out
    }

    /// The numbering that whoever sends next continues.
    pub fn numbering(&self) -> Numbering {
        self.exchange.numbering()
    }

    /// Begins the next step with requests once the last is over, and the rest before it.
    fn begin_step(&mut self, now: Duration) {
        while self.exchange.is_idle()
            && let Some(step) = self.steps.front()
        {
            if step.needs == Needs::AllTables && !self.failed.is_empty() {
                self.is_cut_short = true;
                self.steps.pop_front();
                continue;
            }
            let ends = *self.rests_until.get_or_insert(now + step.rest);
            if now < ends {
                return;
            }
            self.rests_until = None;
            let Step { requests, needs, .. } = self.steps.pop_front().unwrap_or_default();
            for (request, why) in requests {
                match why {
                    Why::Table(guid)
                        if needs == Needs::SameBlocks
                            && self.failed_blocks.contains(&request.modifier) =>
                    {
                        self.failed.insert(guid);
                    }
                    _ => self.exchange.request(request, why),
                }
            }
        }
    }

    fn handle(&mut self, done: &Done<Why>) {
        let Request { route, attribute, modifier, data, .. } = done.request;
        let refused = |status| SetupComplaint::Refused(route, attribute, modifier, status);
        let is_port = attribute == Attribute::PortInfo;
        let wanted = is_port.then(|| PortInfo::parse(&data).state).flatten();
        let complaint = match (done.fate, done.context) {
            (Fate::Silent, _) => Some(SetupComplaint::Silent(route, attribute, modifier)),
            (Fate::Refused(status), Why::Port(place)) if wanted.is_some() => {
                let request = Request::get(route, attribute, modifier);
                self.exchange.request(request, Why::Verify(place, wanted, status));
                None
            }
            (Fate::Refused(status), _) => Some(refused(status)),
            (Fate::Response(now), Why::Verify(_, state, status)) => {
                (PortInfo::parse(&now).state < state).then(|| refused(status))
            }
            (Fate::Response(now), _) => {
                let other = SetupComplaint::NotWritten(route, attribute, modifier);
                (!is_written(attribute, &data, &now)).then_some(other)
            }
        };
        if let Fate::Response(now) = done.fate {
            self.note(done.context, now);
        }
        if let (Some(_), Why::Table(guid)) = (complaint, done.context) {
            self.failed.insert(guid);
            self.failed_blocks.insert(modifier);
        }
        match complaint {
            Some(complaint) if self.complaints.len() < MAX_COMPLAINTS => {
                self.complaints.push(complaint);
            }
            Some(_) => self.complaints_left_out += 1,
            None => {}
        }
    }
}

impl Setup {
    fn note(&mut self, why: Why, now: [u8; 64]) {
        match why {
            Why::Port(place) | Why::Verify(place, ..) => drop(self.ports.insert(place, now)),
            Why::Switch(guid) => drop(self.switches.insert(guid, now)),
            Why::Table(_) => {}
        }
    }

    /// What ports said of themselves after they were set.
    pub fn ports(&self) -> impl Iterator<Item = (Place, &[u8; 64])> {
        self.ports.iter().map(|(place, info)| (*place, info))
    }

    /// What switches said, by GUID.
    pub fn switches(&self) -> impl Iterator<Item = (u64, &[u8; 64])> {
        self.switches.iter().map(|(guid, info)| (*guid, info))
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
        self.begin_step(now);
        self.exchange.poll_transmit(now)
    }

    fn poll_timeout(&self) -> Option<Duration> {
        self.exchange.poll_timeout().or(self.rests_until)
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
        self.exchange.is_idle() && self.steps.iter().all(|step| step.requests.is_empty())
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
    target: &'a Target,
    /// Ports whose clients register anew.
    is_new: &'a dyn Fn(Place) -> bool,
    /// By node of the topology.
    guids: Vec<u64>,
    manager_lid: u16,
}

impl<'a> Plan<'a> {
    fn new(
        discovery: &'a Discovery,
        channels: &'a Channels,
        target: &'a Target,
        is_new: &'a dyn Fn(Place) -> bool,
    ) -> Plan<'a> {
        let of = |(guid, port)| target.lids.of((guid, port)).or(target.lids.of((guid, 0)));
        let manager_lid = discovery.start().and_then(of).unwrap_or(0);
        Plan { discovery, channels, target, is_new, guids: discovery.guids(), manager_lid }
    }

    fn steps(&self) -> VecDeque<Step> {
        let at_once = |requests| Step { requests, ..Step::default() };
        let Transition { stages, rests, .. } = &self.target.transition;
        let mut steps = VecDeque::from([at_once(self.identities())]);
        for (at, stage) in stages.iter().enumerate() {
            let is_last = at + 1 == stages.len();
            let (rest, needs) = match at {
                _ if is_last && *rests => (REST, Needs::AllTables),
                0 => (Duration::ZERO, Needs::Nothing),
                _ => (Duration::ZERO, Needs::SameBlocks),
            };
            steps.push_back(Step { requests: self.blocks(stage), rest, needs });
        }
        steps.push_back(at_once(self.switches()));
        steps.push_back(at_once(self.states(PortState::Armed)));
        steps.push_back(at_once(self.states(PortState::Active)));
        steps.retain(|step| !step.requests.is_empty());
        steps
    }

    /// Sets a port; `None` where it did not say what it is.
    fn port(&self, (guid, port): Place, state: Option<PortState>) -> Option<(Request, Why)> {
        let node = self.discovery.nodes().get(&guid)?;
        let own = node.ports.get(&port)?;
        let far = self
            .discovery
            .links()
            .get(&(guid, port))
            .and_then(|(guid, port)| self.discovery.nodes().get(guid)?.ports.get(port));
        let lid = self.target.lids.of((guid, port)).unwrap_or(0);
        let lmc = if lid == 0 { 0 } else { self.target.lids.lmc((guid, port)) };
        let setting = PortSetting { lid, manager_lid: self.manager_lid, state, lmc };
        let data = setting.emit(own, far);
        // A port of an adapter takes what arrives at it, and nothing else.
        let route = node.port_routes.get(&port).copied();
        let route = route.filter(|_| node.info.node_type != NodeType::Switch);
        let route = route.unwrap_or(node.route);
        let request = Request::set(route, Attribute::PortInfo, port.into(), data);
        Some((request, Why::Port((guid, port))))
    }

    fn identities(&self) -> Vec<(Request, Why)> {
        let is_wrong = |(place, lid): &(Place, u16)| {
            let node = self.discovery.nodes().get(&place.0);
            let wanted = (*lid, self.manager_lid, self.target.lids.lmc(*place));
            node.and_then(|node| node.ports.get(&place.1)).is_some_and(|own| {
                let info = PortInfo::parse(own);
                let is_unused = place.1 > 0 && info.state < Some(PortState::Armed);
                let is_told = place.1 > 0 && can_reregister(own) && (self.is_new)(*place);
                is_unused || is_told || (info.lid, info.manager_lid, info.lmc) != wanted
            })
        };
        let wrong = self.target.lids.iter().filter(is_wrong);
        wrong.filter_map(|(place, _)| self.port(place, None)).collect()
    }

    fn states(&self, state: PortState) -> Vec<(Request, Why)> {
        let ends = self.discovery.links().keys();
        let is_behind = |place: &&Place| {
            let info =
                self.discovery.nodes().get(&place.0).and_then(|node| node.ports.get(&place.1));
            info.is_some_and(|info| PortInfo::parse(info).state.is_some_and(|now| now < state))
        };
        ends.filter(is_behind).filter_map(|place| self.port(*place, Some(state))).collect()
    }

    fn guid(&self, node: NodeId) -> u64 {
        self.guids.get(node.index()).copied().unwrap_or(0)
    }

    fn blocks(&self, writes: &[Write]) -> Vec<(Request, Why)> {
        let request = |write: &Write| {
            let guid = self.guid(*self.channels.switches().get(write.switch as usize)?);
            let route = self.discovery.nodes().get(&guid)?.route;
            let attribute = Attribute::LinearForwardingTable;
            Some((Request::set(route, attribute, write.block, write.ports), Why::Table(guid)))
        };
        writes.iter().filter_map(request).collect()
    }

    /// Of switches whose last LID is another. PortStateChange stays: a port may have changed since it was read, so only
    /// a look clears it, which reads all ports afterwards.
    fn switches(&self) -> Vec<(Request, Why)> {
        let top = self.target.lids.top();
        let request = |switch: &NodeId| {
            let guid = self.guid(*switch);
            let node = self.discovery.nodes().get(&guid)?;
            let info = node.switch_info?;
            let setting = switch_setting(&info, top);
            (linear_top(&info) != top).then(|| {
                (Request::set(node.route, Attribute::SwitchInfo, 0, setting), Why::Switch(guid))
            })
        };
        self.channels.switches().iter().filter_map(request).collect()
    }
}
