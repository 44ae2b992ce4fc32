//! Setting up a fabric that was discovered: LIDs, forwarding tables, states of ports (IBA 14.4).
//!
//! Steps, each of which begins when every request of the one before has its response or was given
//! up: LIDs are assigned before tables are written, and tables before ports are armed. A request
//! that fails is listed as a complaint, and the setup goes on; but of later stages of tables what
//! depends on a block that was not written is left out, and the last one, that of drained LIDs, if
//! any block was not: together with old entries it could close a cycle.
//!
//! | step | what is written |
//! |---|---|
//! | 1 | `PortInfo` of end ports and of port 0 of switches that have not their LID, or not that of the manager |
//! | 2 | P_Key tables of end ports, and of the ports of switches before them, if partitions are set up |
//! | 3 | where paths have several lanes: SL2VL and VL arbitration tables of ports that have not got them |
//! | 4 | blocks of linear forwarding tables that change, in the stages of a [`transition`] |
//! | 5 | `SwitchInfo` with the last LID |
//! | 6 | `PortInfo` of both ends of every link that is not in use: armed |
//! | 7 | the same: active |
//!
//! Without all tables of step 3 of switches, those of step 4 could have credit loops: then nothing
//! else is written. Nothing passes a host, so a host that does not take its own is a complaint like
//! others.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use thiserror::Error;

use crate::discovery::{Discovery, Place};
use crate::exchange::{Discarded, Done, Exchange, Fate, Numbering, Request, Requester};
use crate::forwarding::{Detour, Forwarding};
use crate::levels::{self, Levels};
use crate::lids::{Lids, Order, Owner, TooFewLids};
use crate::mad::{
    Attribute, DirectedRoute, KeyGuard, MAD_BYTES, NodeType, PortInfo, PortSetting, PortState,
    can_reregister, enforces_partitions, linear_capacity, linear_top, manager_level,
    switch_setting,
};
use crate::partitions::{self, Memberships};
use crate::transition::{self, Flaw, Transition, Write};
use topology::channels::Channels;
use topology::graph::NodeId;
use topology::routes::{Tables, up_down::Ranks};

/// How long drained LIDs rest: a packet leaves the fabric in that time, or its switches discard it
/// (head-of-queue and switch lifetimes, IBA 18.2.5.4, are at most some hundreds of milliseconds in
/// practice).
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
    /// Paths need more lanes than all links between switches have.
    #[error(
        "paths without credit loops need more VLs than {0}, which all links between switches have"
    )]
    TooFewLanes(u8),
    /// Paths do not fit the service levels that connections have.
    #[error("paths without credit loops need other SLs than those that connections have")]
    OtherLevels,
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
    /// It is a member of more partitions than its table, or that of the switch before it, holds.
    #[error(
        "port {1} of {0:#018x} is a member of {2} partitions, and there is room for {3} P_Keys"
    )]
    TooManyKeys(u64, u8, usize, usize),
}

/// How something was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// No response came: it may be taken the next time.
    Silent,
    /// It was refused, or is not there afterwards.
    Refused,
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
    /// The service levels of paths.
    pub levels: Levels,
}

/// What ports get beside LIDs and states, and what of it they have got.
#[derive(Clone, Debug, Default)]
pub struct Ports {
    /// The lanes of ports that have got their tables of service levels.
    pub levels: BTreeMap<Place, u8>,
    /// The P_Keys of ports that have got them.
    pub keys: BTreeMap<Place, Vec<u16>>,
    /// Those that ports shall have, if their tables are not left as they are.
    pub memberships: Option<Memberships>,
    /// Switches discard packets of partitions that an end port is no member of.
    pub enforces: bool,
    /// Who may manage end ports and switches; none if that is left as it is.
    pub guard: Option<KeyGuard>,
}

/// What a fabric was set up to before, by the numbers that switches have now.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// The tables that switches hold; none where they are unknown.
    pub held: Vec<Option<Vec<u8>>>,
    /// The levels of paths, if they are known.
    pub levels: Option<Levels>,
}

impl Target {
    /// For the tables of an engine, whose paths may have so many lanes.
    ///
    /// # Errors
    /// When tables or lanes do not suffice, have a flaw, or the discovery has gaps.
    pub fn new(
        discovery: &Discovery,
        channels: &Channels,
        (tables, ranks): (&Tables, &Ranks),
        lids: Lids,
        before: &Before,
        most_lanes: u8,
    ) -> Result<Target, SetupError> {
        let guids = discovery.guids();
        let owners = lids.owners(channels, &guids);
        let top = lids.top();
        check_switches(discovery, channels, &guids, top)?;
        let old_levels = before.levels.as_ref();
        let has_lmc = lids.has_lmc();
        let routing = Routing { channels, tables, ranks, owners: &owners, most_lanes, has_lmc };
        let (target, levels) = routing.forwarding(old_levels)?;
        let mut old = Forwarding::empty(channels.switches().len(), top);
        for (switch, held) in (0..).zip(&before.held) {
            held.iter().for_each(|held| old.replace(switch, held));
        }
        let is_unknown = |switch: u32| before.held.get(switch as usize).is_none_or(Option::is_none);
        let transition =
            Transition::new(channels, (&old, old_levels), (target, &levels), top, is_unknown);
        Ok(Target { lids, transition, levels })
    }
}

/// The tables of an engine, to be made tables by LID.
struct Routing<'a> {
    channels: &'a Channels,
    tables: &'a Tables,
    ranks: &'a Ranks,
    owners: &'a [Owner],
    most_lanes: u8,
    /// Ports have several LIDs, which may lead over different paths.
    has_lmc: bool,
}

impl Routing<'_> {
    /// With paths between all switches if these close no cycle, without some of them if not; and
    /// with one lane for all paths if that will do. If there were more before, connections keep
    /// theirs. With an LMC, the LIDs of a port lead over different paths unless that closes a
    /// cycle.
    fn forwarding(&self, before: Option<&Levels>) -> Result<(Forwarding, Levels), SetupError> {
        let Routing { channels, tables, ranks, owners, most_lanes, .. } = *self;
        let top = owners.len().saturating_sub(1) as u16;
        let had_lanes = before.filter(|before| before.lanes.count() > 1);
        let mut refused = SetupError::CreditLoop;
        for is_divided in [had_lanes.is_some(), had_lanes.is_none()] {
            let spreads = [
                (true, Detour::Allowed),
                (true, Detour::Refused),
                (false, Detour::Allowed),
                (false, Detour::Refused),
            ];
            for (spreads, detour) in
                spreads.into_iter().filter(|(spreads, _)| self.has_lmc || !spreads)
            {
                let mut forwarding = Forwarding::new(channels, tables, ranks, owners, detour);
                if spreads {
                    forwarding.spread(channels, owners);
                }
                let one = Levels::one(channels, owners);
                let kept = before.map(|before| &before.lanes);
                let levels = match is_divided {
                    false => Some(one.clone()),
                    true if most_lanes < 2 => None,
                    true => {
                        let next = |switch, lid: u32| {
                            channels.at(switch, forwarding.port(switch, lid as u16))
                        };
                        one.clone().divided(channels, next, most_lanes, kept)
                    }
                };
                let Some(levels) = levels else {
                    refused = match before {
                        _ if most_lanes < 2 => refused,
                        Some(_) => SetupError::OtherLevels,
                        None => SetupError::TooFewLanes(most_lanes),
                    };
                    continue;
                };
                refused = match transition::flaw(channels, &forwarding, top, &levels) {
                    // What has no cycle in one lane has none in many, whatever levels connections
                    // have.
                    None if !is_divided => {
                        return Ok((forwarding, one.like(had_lanes)));
                    }
                    None => return Ok((forwarding, levels)),
                    Some(Flaw::Loop(lid)) => return Err(SetupError::Loop(lid)),
                    Some(Flaw::CreditLoop) if refused == SetupError::OtherLevels => refused,
                    Some(Flaw::CreditLoop) => SetupError::CreditLoop,
                };
            }
        }
        Err(refused)
    }
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
    /// A table of service levels of a port of a switch.
    Level(Place),
    /// The same of a host.
    HostLevel(Place),
    /// P_Keys of an end port, also at its switch.
    Keys(Place),
    /// A port refused to enter this state. It may be there already: a response got lost, or data
    /// made it active.
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
    /// Ports whose tables of service levels were written, and how many lanes they have; those of
    /// switches that did not take them.
    levels: BTreeMap<Place, u8>,
    failed_levels: BTreeMap<Place, Failure>,
    /// The same with P_Keys.
    keys: BTreeMap<Place, Vec<u16>>,
    failed_keys: BTreeSet<Place>,
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
        let before = Before::default();
        let target = Target::new(discovery, channels, (tables, &ranks), lids, &before, 1)?;
        let ports = Ports::default();
        Ok(Setup::to(discovery, channels, target, &ports, Numbering::default(), |_| false))
    }

    /// Of a fabric to a target, with the rest of what ports get. The numbering is that of the
    /// requests. Clients of ports that `is_new` names have to register with subnet administration
    /// anew, even if their port is in use and stays as it is.
    pub fn to(
        discovery: &Discovery,
        channels: &Channels,
        target: Target,
        ports: &Ports,
        numbering: Numbering,
        is_new: impl Fn(Place) -> bool,
    ) -> Setup {
        let plan = Plan::new(discovery, channels, &target, ports, &is_new);
        let (levels, keys) = (plan.levels(), plan.keys());
        let (key_requests, complaints) = plan.key_requests(&keys);
        let steps = plan.steps(&levels, key_requests);
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
            levels,
            failed_levels: BTreeMap::new(),
            keys,
            failed_keys: BTreeSet::new(),
            complaints,
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

    /// Ports that have got their tables of service levels now, and their lanes.
    pub fn levels(&self) -> impl Iterator<Item = (Place, u8)> {
        let taken =
            self.levels.iter().filter(|(place, _)| !self.failed_levels.contains_key(*place));
        taken.map(|(place, lanes)| (*place, *lanes))
    }

    /// Ports that have got their P_Keys now.
    pub fn keys(&self) -> impl Iterator<Item = (Place, &Vec<u16>)> {
        let taken = self.keys.iter().filter(|(place, _)| !self.failed_keys.contains(*place));
        taken.map(|(place, keys)| (*place, keys))
    }

    /// Ports of switches that did not take tables of service levels. Then no forwarding table was
    /// written.
    pub fn failed_levels(&self) -> &BTreeMap<Place, Failure> {
        &self.failed_levels
    }

    /// What went wrong.
    pub fn complaints(&self) -> &[SetupComplaint] {
        &self.complaints
    }

    /// How much more went wrong.
    pub fn complaints_left_out(&self) -> u64 {
        self.complaints_left_out
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
        if let (Some(_), Why::Keys(place)) = (complaint, done.context) {
            self.failed_keys.insert(place);
        }
        if let (Some(_), Why::Level(place)) = (complaint, done.context) {
            let silent = done.fate == Fate::Silent;
            let why = if silent { Failure::Silent } else { Failure::Refused };
            let known = self.failed_levels.entry(place).or_insert(why);
            *known = why.max(*known);
            self.is_cut_short = true;
            self.steps.clear();
        }
        // Whoever refuses is asked again when its port was down; whoever is silent, the next time.
        if let (Fate::Silent, Why::HostLevel(place)) = (done.fate, done.context) {
            self.levels.remove(&place);
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
            Why::Table(_) | Why::Level(_) | Why::HostLevel(_) | Why::Keys(_) => {}
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

/// What the steps are made from.
struct Plan<'a> {
    discovery: &'a Discovery,
    channels: &'a Channels,
    target: &'a Target,
    ports: &'a Ports,
    /// Ports whose clients register anew.
    is_new: &'a dyn Fn(Place) -> bool,
    /// By node of the topology.
    guids: Vec<u64>,
    /// Of switches, by GUID.
    numbers: BTreeMap<u64, u32>,
    manager_lid: u16,
}

impl<'a> Plan<'a> {
    fn new(
        discovery: &'a Discovery,
        channels: &'a Channels,
        target: &'a Target,
        ports: &'a Ports,
        is_new: &'a dyn Fn(Place) -> bool,
    ) -> Plan<'a> {
        let of = |(guid, port)| target.lids.of((guid, port)).or(target.lids.of((guid, 0)));
        let manager_lid = discovery.start().and_then(of).unwrap_or(0);
        let guids = discovery.guids();
        let guid = |switch: &NodeId| guids.get(switch.index()).copied().unwrap_or(0);
        let numbers = channels.switches().iter().map(guid).zip(0..).collect();
        Plan { discovery, channels, target, ports, is_new, guids, numbers, manager_lid }
    }

    /// Ports that have to get tables of service levels, and how many lanes they have; none where
    /// all paths have one lane.
    fn levels(&self) -> BTreeMap<Place, u8> {
        if self.target.levels.lanes.count() < 2 {
            return BTreeMap::new();
        }
        let mut wanted = levels::lanes_of_ports(self.discovery);
        wanted.retain(|place, lanes| {
            self.ports.levels.get(place) != Some(lanes)
                || !levels::is_in_use(self.discovery, *place)
        });
        wanted
    }

    /// Ports that have to get P_Keys.
    fn keys(&self) -> BTreeMap<Place, Vec<u16>> {
        let wanted = self.ports.memberships.iter().flat_map(Memberships::iter);
        let lacks = |(place, keys): &(Place, &[u16])| {
            let held = self.ports.keys.get(place).is_some_and(|held| held == keys);
            !held || place.1 > 0 && !levels::is_in_use(self.discovery, *place)
        };
        wanted.filter(lacks).map(|(place, keys)| (place, keys.to_vec())).collect()
    }

    /// What writes them, and which ports have more than fit. Ports of switches that are in use
    /// enforce them from now on.
    fn key_requests(
        &self,
        keys: &BTreeMap<Place, Vec<u16>>,
    ) -> (Vec<(Request, Why)>, Vec<SetupComplaint>) {
        let (mut all, mut complaints) = (Vec::new(), Vec::new());
        for (place, keys) in keys {
            let (requests, room) =
                partitions::requests(self.discovery, *place, keys, self.ports.enforces);
            if keys.len() > room && complaints.len() < MAX_COMPLAINTS {
                let (guid, port) = *place;
                complaints.push(SetupComplaint::TooManyKeys(guid, port, keys.len(), room));
            }
            all.extend(requests.into_iter().map(|request| (request, Why::Keys(*place))));
            let far = self.discovery.links().get(place).copied();
            let lacks_enforcement = |far: &Place| {
                let node = self.discovery.nodes().get(&far.0);
                levels::is_in_use(self.discovery, *far)
                    && node
                        .and_then(|node| node.ports.get(&far.1))
                        .is_some_and(|info| enforces_partitions(info) != self.ports.enforces)
            };
            all.extend(far.filter(lacks_enforcement).and_then(|far| self.port(far, None)));
        }
        (all, complaints)
    }

    /// Whether a port of a switch discards packets of other partitions; `None` where that is left
    /// as it is.
    fn enforcement(&self, place: Place) -> Option<bool> {
        let memberships = self.ports.memberships.as_ref()?;
        let far = self.discovery.links().get(&place)?;
        let is_before_end_port = far.1 > 0 && !memberships.of(*far).is_empty();
        is_before_end_port.then_some(self.ports.enforces)
    }

    fn steps(&self, levels: &BTreeMap<Place, u8>, keys: Vec<(Request, Why)>) -> VecDeque<Step> {
        let at_once = |requests| Step { requests, ..Step::default() };
        let Transition { stages, rests, .. } = &self.target.transition;
        let levels = levels.iter().flat_map(|(place, lanes)| {
            let requests = levels::requests(self.discovery, *place, *lanes).into_iter();
            let node = self.discovery.nodes().get(&place.0);
            let is_switch = node.is_some_and(|node| node.info.node_type == NodeType::Switch);
            let why = if is_switch { Why::Level(*place) } else { Why::HostLevel(*place) };
            requests.map(move |request| (request, why))
        });
        let mut steps = VecDeque::from([self.identities(), keys, levels.collect()].map(at_once));
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
        let manager_level = self.manager_level((guid, port));
        let setting = PortSetting {
            lid,
            manager_lid: self.manager_lid,
            manager_level,
            guard: self.ports.guard.filter(|_| lid > 0),
            enforces_partitions: self.enforcement((guid, port)),
            state,
            lmc,
        };
        let data = setting.emit(own, far);
        // A port of an adapter takes what arrives at it, and nothing else.
        let route = node.port_routes.get(&port).copied();
        let route = route.filter(|_| node.info.node_type != NodeType::Switch);
        let route = route.unwrap_or(node.route);
        let request = Request::set(route, Attribute::PortInfo, port.into(), data);
        Some((request, Why::Port((guid, port))))
    }

    /// The level of packets from an end port to the manager.
    fn manager_level(&self, place: Place) -> u8 {
        if self.target.levels.lanes.count() == 1 {
            return 0;
        }
        let switch = self.switch_of(place).and_then(|guid| self.numbers.get(&guid));
        switch.map_or(0, |switch| self.target.levels.level(*switch, self.manager_lid))
    }

    /// The switch that a port is at.
    fn switch_of(&self, place: Place) -> Option<u64> {
        match place.1 {
            0 => Some(place.0),
            _ => self.discovery.links().get(&place).map(|far| far.0),
        }
    }

    fn identities(&self) -> Vec<(Request, Why)> {
        let is_wrong = |(place, lid): &(Place, u16)| {
            let node = self.discovery.nodes().get(&place.0);
            let level = self.manager_level(*place);
            let wanted = (*lid, self.manager_lid, level, self.target.lids.lmc(*place));
            node.and_then(|node| node.ports.get(&place.1)).is_some_and(|own| {
                let info = PortInfo::parse(own);
                let is_unused = place.1 > 0 && info.state < Some(PortState::Armed);
                let is_told = place.1 > 0 && can_reregister(own) && (self.is_new)(*place);
                let now = (info.lid, info.manager_lid, manager_level(own), info.lmc);
                let is_unguarded =
                    self.ports.guard.is_some_and(|guard| KeyGuard::parse(own) != guard);
                is_unused || is_told || is_unguarded || now != wanted
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

    /// Of switches whose last LID is another. PortStateChange stays: a port may have changed since
    /// it was read, so only a look clears it, which reads all ports afterwards.
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
