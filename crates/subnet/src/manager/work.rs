//! What takes a manager longer than a datagram: routing a fabric. It needs nothing but what it
//! carries, so the caller may do it in a thread of its own while the manager goes on answering.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::discovery::{Discovery, Place};
use crate::levels::{self, Levels};
use crate::lids::{Lids, Order};
use crate::setup::{Before, SetupError, Target};
use topology::channels::Channels;
use topology::graph::Capacity;
use topology::routes::mend::{Rule, mend};
use topology::routes::up_down::{self, Ranks};
use topology::routes::{Engine, NO_ROUTE, Tables};

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Work {
    pub(super) discovery: Discovery,
    pub(super) engine: Engine,
    pub(super) lmc: u8,
    pub(super) remembered: BTreeMap<Place, u16>,
    /// LIDs of ports that are in use stay, whatever is remembered: another manager gave them.
    pub(super) prefers_present: bool,
    /// The tables that switches hold, by GUID.
    pub(super) held: BTreeMap<u64, Arc<Vec<u8>>>,
    pub(super) previous: Option<Routed>,
    /// GUIDs of the roots of Up*/Down*; none if they are to be found.
    pub(super) roots: Vec<u64>,
    /// GUIDs of nodes that took no tables of service levels: paths through them have one lane.
    pub(super) without_levels: BTreeSet<u64>,
}

/// How a fabric is routed.
#[derive(Clone, Debug)]
pub struct Routed {
    /// GUIDs, by place in the topology.
    pub guids: Vec<u64>,
    /// Its switches and channels.
    pub channels: Channels,
    /// The ports to leave by.
    pub tables: Tables,
    /// The order of the switches that paths to switches use, and those of Up*/Down*.
    pub ranks: Ranks,
    /// The engine that made the tables.
    pub engine: Engine,
    /// The service levels of paths.
    pub levels: Levels,
}

impl Routed {
    /// The GUID of a switch, by its number.
    pub fn guid(&self, switch: u32) -> u64 {
        let node = self.channels.switches().get(switch as usize);
        node.and_then(|node| self.guids.get(node.index())).copied().unwrap_or(0)
    }
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Done {
    pub(super) discovery: Discovery,
    pub(super) held: BTreeMap<u64, Arc<Vec<u8>>>,
    /// Or why not.
    pub(super) result: Result<(Routed, Target, How), String>,
}

/// Where the tables came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Nothing has changed.
    Kept,
    /// Entries that led nowhere were replaced.
    Mended,
    /// An engine has computed them.
    Computed,
    /// Up*/Down* has, in place of the engine that was asked for.
    Fallback(Fallback),
}

/// Why Up*/Down* routes a fabric in place of another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// It cannot route this fabric.
    Unsuitable,
    /// Its paths need more lanes than so many, which all links between switches have.
    Lanes(u8),
    /// Its paths need other service levels than those that connections have.
    Levels,
}

impl Work {
    /// Nodes of the fabric: what it takes grows with their number, and that of the switches.
    pub fn nodes(&self) -> usize {
        self.discovery.nodes().len()
    }

    /// Routes the fabric.
    pub fn run(self) -> Done {
        let result = self.route();
        let Work { discovery, held, .. } = self;
        Done { discovery, held, result }
    }

    fn route(&self) -> Result<(Routed, Target, How), String> {
        let topology =
            self.discovery.topology(Capacity::default()).map_err(|error| error.to_string())?;
        let guids = self.discovery.guids();
        let channels = Channels::of(&topology);
        let order = if self.prefers_present { Order::InUseFirst } else { Order::RememberedFirst };
        let lids = Lids::assign(&self.discovery, &self.remembered, order, self.lmc)
            .map_err(|error| error.to_string())?;
        let most_lanes =
            levels::most_lanes(&self.discovery, |guid| !self.without_levels.contains(&guid));
        let target = |routed: &mut Routed| {
            let target = self.target(routed, lids.clone(), most_lanes)?;
            routed.levels = target.levels.clone();
            Ok(target)
        };
        if let Some((mut routed, how)) = self.mended(&guids, &channels)
            && let Ok(target) = target(&mut routed)
        {
            return Ok((routed, target, how));
        }
        let ranks = self.ranks(&guids, &channels);
        let is_rooted = self.engine == Engine::UpDown && !self.roots.is_empty();
        let by_engine = self.engine.route(&topology, &channels);
        let mut why = Fallback::Unsuitable;
        let levels = Levels::one(&channels, &[]);
        if let Ok(mut tables) = by_engine {
            let engine = self.engine;
            if is_rooted {
                tables = up_down::route_by(&channels, &ranks);
            }
            let (guids, channels) = (guids.clone(), channels.clone());
            let (ranks, levels) = (ranks.clone(), levels.clone());
            let mut routed = Routed { guids, channels, tables, ranks, engine, levels };
            match target(&mut routed) {
                Ok(target) => return Ok((routed, target, How::Computed)),
                Err(SetupError::CreditLoop | SetupError::TooFewLanes(_)) => {
                    why = Fallback::Lanes(most_lanes);
                }
                Err(SetupError::OtherLevels) => why = Fallback::Levels,
                Err(SetupError::Loop(_)) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        // Says why the topology itself cannot be routed.
        Engine::UpDown.route(&topology, &channels).map_err(|error| error.to_string())?;
        let tables = up_down::route_by(&channels, &ranks);
        let engine = Engine::UpDown;
        let mut routed = Routed { guids, channels, tables, ranks, engine, levels };
        let target = target(&mut routed).map_err(|error| format!("engine up-down: {error}"))?;
        Ok((routed, target, How::Fallback(why)))
    }

    /// By the roots that were given, if all paths can be; by those that fit if not.
    fn ranks(&self, guids: &[u64], channels: &Channels) -> Ranks {
        let numbers = Numbers { guids, channels }.switches();
        let roots: Vec<u32> =
            self.roots.iter().filter_map(|guid| numbers.get(guid).copied()).collect();
        Ranks::from_roots(channels, &roots).unwrap_or_else(|| Ranks::of(channels))
    }

    fn target(&self, routed: &Routed, lids: Lids, most_lanes: u8) -> Result<Target, SetupError> {
        let Routed { guids, channels, tables, ranks, .. } = routed;
        let held = |switch: &topology::graph::NodeId| {
            Some(self.held.get(guids.get(switch.index())?)?.as_ref().clone())
        };
        let held = channels.switches().iter().map(held).collect();
        let levels = self.previous.as_ref().map(|previous| {
            let (old, new) = (Numbers::new(previous).switches(), Numbers { guids, channels });
            let old_of =
                channels.switches().iter().map(|switch| old.get(&new.guid(*switch)).copied());
            previous.levels.renumbered(&old_of.collect::<Vec<_>>())
        });
        let before = Before { held, levels };
        Target::new(&self.discovery, channels, (tables, ranks), lids, &before, most_lanes)
    }

    /// The tables of before for the fabric of now, if it has lost something and gained nothing.
    fn mended(&self, guids: &[u64], channels: &Channels) -> Option<(Routed, How)> {
        let previous = self.previous.as_ref()?;
        // Tables that lead nowhere are a fault of the sweep, not of the fabric.
        (!channels.end_ports().is_empty()).then_some(())?;
        let (old, new) = (Numbers::new(previous), Numbers { guids, channels });
        let switches = old.switches();
        let to_old = |switch: &topology::graph::NodeId| switches.get(&new.guid(*switch)).copied();
        let old_of: Vec<u32> = channels.switches().iter().map(to_old).collect::<Option<_>>()?;
        let end_ports = old.end_ports();
        let old_end: Vec<u32> = (0..channels.end_ports().len())
            .map(|at| end_ports.get(&new.end_port(at)).copied())
            .collect::<Option<_>>()?;
        for channel in channels.all() {
            let before = previous.channels.at(old_of[channel.from as usize], channel.port)?;
            let is_same = previous.channels.get(before).to == old_of[channel.to as usize];
            is_same.then_some(())?;
        }
        let mut tables = Tables::new(channels);
        for (end_port, old_end) in (0..).zip(&old_end) {
            for (switch, old_switch) in (0..).zip(&old_of) {
                let port = previous.tables.port(*old_switch, *old_end);
                if port != NO_ROUTE && channels.end_ports()[end_port as usize].switch != switch {
                    tables.set(switch, end_port, port);
                }
            }
        }
        let mut new_of = alloc::vec![None; previous.channels.switches().len()];
        for (switch, old) in (0..).zip(&old_of) {
            new_of[*old as usize] = Some(switch);
        }
        let order = previous.ranks.order().iter().filter_map(|old| new_of[*old as usize]);
        let ranks = Ranks::in_order(order.collect());
        let is_same = previous.channels.all().len() == channels.all().len()
            && previous.channels.switches().len() == channels.switches().len()
            && old_end.len() == previous.channels.end_ports().len();
        let how = if is_same { How::Kept } else { How::Mended };
        let (tables, ranks) = match previous.engine {
            Engine::UpDown => by_ranks(channels, &tables, ranks)?,
            _ => (mend(channels, &tables, Rule::Shortest)?, ranks),
        };
        let (guids, channels, engine) = (guids.to_vec(), channels.clone(), previous.engine);
        let levels = Levels::one(&channels, &[]);
        Some((Routed { guids, channels, tables, ranks, engine, levels }, how))
    }
}

/// Mends Up*/Down* tables by their old ranks, or by as few others as lead everywhere.
fn by_ranks(channels: &Channels, tables: &Tables, ranks: Ranks) -> Option<(Tables, Ranks)> {
    if let Some(tables) = mend(channels, tables, Rule::UpDown(&ranks)) {
        return Some((tables, ranks));
    }
    let ranks = ranks.joined(channels);
    Some((mend(channels, tables, Rule::UpDown(&ranks))?, ranks))
}

/// Names of switches and end ports that stay the same when their numbers do not.
struct Numbers<'a> {
    guids: &'a [u64],
    channels: &'a Channels,
}

impl<'a> Numbers<'a> {
    fn new(routed: &'a Routed) -> Numbers<'a> {
        Numbers { guids: &routed.guids, channels: &routed.channels }
    }

    fn guid(&self, node: topology::graph::NodeId) -> u64 {
        self.guids.get(node.index()).copied().unwrap_or(0)
    }

    fn switches(&self) -> BTreeMap<u64, u32> {
        self.channels.switches().iter().map(|switch| self.guid(*switch)).zip(0..).collect()
    }

    /// An end port, and where it is connected.
    fn end_port(&self, at: usize) -> (Place, Place) {
        let end_port = self.channels.end_ports()[at];
        let switch = self.channels.switches()[end_port.switch as usize];
        ((self.guid(end_port.end.node), end_port.end.port), (self.guid(switch), end_port.port))
    }

    fn end_ports(&self) -> BTreeMap<(Place, Place), u32> {
        (0..self.channels.end_ports().len()).map(|at| self.end_port(at)).zip(0..).collect()
    }
}
