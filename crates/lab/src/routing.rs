//! What routing engines make of a topology: paths, loads of channels, and the lanes that they need.
//!
//! Engines and their judge are in the crate `topology`; times are those of this machine.

use std::time::Instant;

use ::topology::channels::Channels;
use ::topology::graph::Topology;
use ::topology::judge::{Verdict, judge};
use ::topology::lanes::{Lanes, MAX_LANES};
use ::topology::routes::{Engine, RouteError, Tables};
use serde::Serialize;

/// What one engine's tables do.
#[derive(Clone, Debug, Serialize)]
pub struct Routed {
    /// Its name.
    pub engine: String,
    /// Ordered pairs of hosts' ports.
    pub pairs: u64,
    /// Pairs without a path.
    pub lost: u64,
    /// Pairs with a path that goes round.
    pub looping: u64,
    /// Pairs with more hops than necessary.
    pub longer: u64,
    /// Switches that packets pass, on average.
    pub mean_hops: f64,
    /// The most of them.
    pub most_hops: u16,
    /// Pairs on the channel that has most.
    pub most_load: u32,
    /// Pairs on a channel that has some, on average.
    pub mean_load: f64,
    /// The least of them.
    pub least_load: u32,
    /// Channels that have some.
    pub links_used: usize,
    /// Virtual lanes that the paths need; none if more than there can be.
    pub vls: Option<u8>,
    /// On one VL: the switches of a credit loop.
    pub credit_loop: Option<Vec<String>>,
    /// Time of the engine.
    pub wall_ns: u64,
}

impl Routed {
    /// Routes a topology.
    ///
    /// # Errors
    /// When the engine cannot route it.
    pub fn by(
        engine: Engine,
        topology: &Topology,
        channels: &Channels,
    ) -> Result<Routed, RouteError> {
        let started = Instant::now();
        let tables = engine.route(topology, channels)?;
        let wall_ns = started.elapsed().as_nanos() as u64;
        let verdict = judge(channels, &tables, &Lanes::one(channels));
        Ok(Routed::new(engine, topology, channels, &tables, &verdict, wall_ns))
    }

    fn new(
        engine: Engine,
        topology: &Topology,
        channels: &Channels,
        tables: &Tables,
        verdict: &Verdict,
        wall_ns: u64,
    ) -> Routed {
        let name = |channel: &u32| {
            let switch = channels.switches()[channels.get(*channel).from as usize];
            topology.node(switch).name().to_owned()
        };
        let vls = match verdict.cycle {
            None => Some(1),
            Some(_) => Lanes::assign(channels, tables, MAX_LANES).ok().map(|lanes| lanes.count()),
        };
        Routed {
            engine: engine.to_string(),
            pairs: verdict.pairs,
            lost: verdict.lost,
            looping: verdict.looping,
            longer: verdict.longer,
            mean_hops: verdict.mean_hops_milli() as f64 / 1e3,
            most_hops: verdict.most_hops,
            most_load: verdict.most_load(),
            mean_load: verdict.mean_load_tenths() as f64 / 10.0,
            least_load: verdict.least_load(),
            links_used: verdict.used(),
            vls,
            credit_loop: verdict.cycle.as_ref().map(|cycle| cycle.iter().map(name).collect()),
            wall_ns,
        }
    }
}
