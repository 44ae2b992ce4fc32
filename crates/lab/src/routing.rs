//! What routing engines make of a topology: paths, loads of channels, and the lanes that they need.
//!
//! Engines and their validator are in the crate `topology`; times are those of this machine.

use std::time::Instant;

use ::topology::channels::Channels;
use ::topology::graph::Topology;
use ::topology::lanes::{Lanes, MAX_LANES};
use ::topology::routes::{Engine, RouteError, Tables};
use ::topology::validator::{Findings, validate};
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
        let findings = validate(channels, &tables, &Lanes::one(channels));
        Ok(Routed::new(engine, topology, channels, &tables, &findings, wall_ns))
    }

    fn new(
        engine: Engine,
        topology: &Topology,
        channels: &Channels,
        tables: &Tables,
        findings: &Findings,
        wall_ns: u64,
    ) -> Routed {
        let name = |channel: &u32| {
            let switch = channels.switches()[channels.get(*channel).from as usize];
            topology.node(switch).name().to_owned()
        };
        let vls = match findings.cycle {
            None => Some(1),
            Some(_) => Lanes::assign(channels, tables, MAX_LANES).ok().map(|lanes| lanes.count()),
        };
        Routed {
            engine: engine.to_string(),
            pairs: findings.pairs,
            lost: findings.lost,
            looping: findings.looping,
            longer: findings.longer,
            mean_hops: findings.mean_hops_milli() as f64 / 1e3,
            most_hops: findings.most_hops,
            most_load: findings.most_load(),
            mean_load: findings.mean_load_tenths() as f64 / 10.0,
            least_load: findings.least_load(),
            links_used: findings.used(),
            vls,
            credit_loop: findings.cycle.as_ref().map(|cycle| cycle.iter().map(name).collect()),
            wall_ns,
        }
    }
}
