//! Virtual lanes (VLs) that keep credit loops out.
//!
//! Where the channel dependency graph of all paths has cycles ([`dependencies`](crate::dependencies)), the paths are
//! divided among VLs, each with its own buffers, by first fit: a path goes to the first VL whose graph stays acyclic
//! with it (LASH; Skeie et al., 2002).
//!
//! The VL of a path depends on the switch that it begins at and on the end port, and is the same on the whole path; a
//! subnet manager hands it out as a service level (SL).

use alloc::vec::Vec;

use thiserror::Error;

use crate::channels::Channels;
use crate::dependencies::Dependencies;
use crate::routes::Tables;

/// Most lanes of data in InfiniBand; lane 15 is for management.
pub const MAX_LANES: u8 = 15;

/// The lane of each path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    count: u8,
    end_ports: usize,
    /// By switch and end port; empty where there is one lane.
    lanes: Vec<u8>,
}

/// The paths do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the paths need more than {most} lanes")]
pub struct TooFewLanes {
    /// How many there were.
    pub most: u8,
}

impl Lanes {
    /// One lane for all.
    pub fn one(channels: &Channels) -> Lanes {
        Lanes { count: 1, end_ports: channels.end_ports().len(), lanes: Vec::new() }
    }

    /// How many there are.
    pub fn count(&self) -> u8 {
        self.count
    }

    /// The lane of packets from the end ports of a switch to an end port.
    pub fn lane(&self, switch: u32, end_port: u32) -> u8 {
        let place = switch as usize * self.end_ports + end_port as usize;
        self.lanes.get(place).copied().unwrap_or(0)
    }

    /// As few lanes as the best of some orders of the paths allows: first fit, path by path.
    ///
    /// # Errors
    /// When they need more than `most`.
    pub fn assign(channels: &Channels, tables: &Tables, most: u8) -> Result<Lanes, TooFewLanes> {
        let mut best = None;
        for order in Order::ALL {
            let most = best.as_ref().map_or(most, |best: &Lanes| best.count - 1);
            best = Lanes::first_fit(channels, tables, most, order).ok().or(best);
            if best.as_ref().is_some_and(|best| best.count == 1) {
                break;
            }
        }
        best.ok_or(TooFewLanes { most })
    }

    fn first_fit(
        channels: &Channels,
        tables: &Tables,
        most: u8,
        order: Order,
    ) -> Result<Lanes, TooFewLanes> {
        let end_ports = channels.end_ports().len();
        let mut lanes = alloc::vec![0; channels.switches().len() * end_ports];
        let mut graphs: Vec<Dependencies> = Vec::new();
        for (switch, end_port) in order.pairs(channels, tables) {
            let path = tables.path(channels, switch, end_port);
            let fits = graphs.iter_mut().position(|graph| graph.add(&path));
            let lane = match fits {
                Some(lane) => lane,
                None if graphs.len() < usize::from(most) => {
                    let mut graph = Dependencies::new(channels.all().len());
                    // A path alone has no cycle, unless it is one; then no lane helps.
                    graph.add(&path);
                    graphs.push(graph);
                    graphs.len() - 1
                }
                None => return Err(TooFewLanes { most }),
            };
            lanes[switch as usize * end_ports + end_port as usize] = lane as u8;
        }
        let count = graphs.len().max(1) as u8;
        Ok(Lanes { count, end_ports, lanes: if count == 1 { Vec::new() } else { lanes } })
    }
}

/// An order of the paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Switch by switch.
    BySource,
    /// End port by end port.
    ByDestination,
    /// The longest first.
    LongestFirst,
    /// The shortest first.
    ShortestFirst,
}

impl Order {
    const ALL: [Order; 4] =
        [Order::BySource, Order::ByDestination, Order::LongestFirst, Order::ShortestFirst];

    /// The switches and end ports of all paths.
    fn pairs(self, channels: &Channels, tables: &Tables) -> Vec<(u32, u32)> {
        let switches = 0..channels.switches().len() as u32;
        let end_ports = 0..channels.end_ports().len() as u32;
        let sources = switches.filter(|switch| channels.sources(*switch) > 0);
        let mut pairs: Vec<(u32, u32)> = sources
            .flat_map(|switch| end_ports.clone().map(move |end_port| (switch, end_port)))
            .collect();
        let hops =
            |(switch, end_port): &(u32, u32)| tables.path(channels, *switch, *end_port).len();
        match self {
            Order::BySource => {}
            Order::ByDestination => pairs.sort_by_key(|(switch, end_port)| (*end_port, *switch)),
            Order::LongestFirst => pairs.sort_by_cached_key(|pair| core::cmp::Reverse(hops(pair))),
            Order::ShortestFirst => pairs.sort_by_cached_key(hops),
        }
        pairs
    }
}
