//! Lossless switches under load: whether packets come to wait for each other in a circle.
//!
//! Every host sends to some others, chosen at random, as fast as it can. Switches lose nothing, by
//! pauses or by credits, so where paths depend on each other in a circle, a time comes in which
//! each link of it waits for the next: a deadlock, which nothing resolves. Paths in lanes without
//! such a circle ([`::topology::lanes`]) go through the same load.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use ::topology::channels::Channels;
use ::topology::graph::{Capacity, Topology};
use ::topology::lanes::{Lanes, TooFewLanes};
use ::topology::routes::{Engine, RouteError};
use ::topology::shape::{Shape, ShapeError};
use roce::endpoint::{Connect, EndpointConfig};
use roce::{Duration, Time};

use crate::buffer::BufferConfig;
use crate::chance::Chance;
use crate::graph::Vertex;
use crate::link::{LinkConfig, MAX_CLASSES};
use crate::memory::Phantom;
use crate::network::{Network, NetworkConfig};
use crate::streams::{Stream, StreamError, run_until};
use crate::topology;

/// How often the network is searched for a deadlock in a run.
const LOOKS: u64 = 50;

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct CircleConfig {
    /// The network.
    pub shape: Shape,
    /// The engine of its routes.
    pub engine: Engine,
    /// Most lanes, 1 to 8; 1 for all paths in one, whatever they depend on.
    pub most_lanes: u8,
    /// Bytes of each switch's buffer, where switches pause.
    pub buffer_bytes: u64,
    /// Blocks of 64 bytes of each link's and lane's buffer: InfiniBand's credits, instead of
    /// pauses.
    pub credits: Option<u32>,
    /// Streams of each host.
    pub streams: u32,
    /// Most unacknowledged packets of a stream.
    pub window_packets: u32,
    /// How long it runs, unless a deadlock ends it.
    pub span: Duration,
    /// Random seed.
    pub seed: u64,
}

impl CircleConfig {
    /// Four streams from every host for 5 ms, and 1 MB of buffer.
    pub const fn new(shape: Shape) -> CircleConfig {
        CircleConfig {
            shape,
            engine: Engine::DimensionOrder,
            most_lanes: 1,
            buffer_bytes: 1_000_000,
            credits: None,
            streams: 4,
            window_packets: 256,
            span: Duration::from_millis(5),
            seed: 1,
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circle {
    /// Lanes in use.
    pub lanes: u8,
    /// When the deadlock was found, and the switches and hosts that wait for each other, if there
    /// was one.
    pub deadlock: Option<(Time, Vec<String>)>,
    /// The lane of the deadlock.
    pub lane: Option<usize>,
    /// Payload that arrived until then, in bytes.
    pub arrived: u64,
    /// The same in the last tenth of the run.
    pub arrived_lately: u64,
    /// Packets that switches dropped.
    pub dropped: u64,
    /// How long links were paused, in all.
    pub paused: Duration,
    /// Events of the simulation.
    pub events: u64,
}

/// Why it was not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CircleError {
    /// The shape cannot be built.
    Shape(ShapeError),
    /// It cannot be routed.
    Route(RouteError),
    /// The paths need more lanes.
    Lanes(TooFewLanes),
    /// A stream failed.
    Stream(StreamError),
}

impl fmt::Display for CircleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CircleError::Shape(error) => error.fmt(f),
            CircleError::Route(error) => error.fmt(f),
            CircleError::Lanes(error) => error.fmt(f),
            CircleError::Stream(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for CircleError {}

impl From<StreamError> for CircleError {
    fn from(error: StreamError) -> CircleError {
        CircleError::Stream(error)
    }
}

/// Runs the load until a deadlock or the end.
///
/// # Errors
/// When the shape cannot be built or routed in so many lanes, or a stream fails.
pub fn measure(config: &CircleConfig) -> Result<Circle, CircleError> {
    let mut run = Run::new(config)?;
    let end = Time::ZERO + config.span;
    let late = Time::ZERO + Duration::from_nanos(config.span.as_nanos() / 10 * 9);
    let (mut found, mut seen, mut before) = (None, None, 0);
    while found.is_none() && run.network.now() < end {
        let until =
            run.network.now() + Duration::from_nanos((config.span.as_nanos() / LOOKS).max(1));
        run_until(&mut run.network, &mut run.streams, until.min(end))?;
        // Without an event left, time stands still before `until`.
        run.network.advance_to(until.min(end));
        if run.network.now() <= late {
            before = run.arrived();
        }
        // A pause that ends is on its way for a while: what is there twice stays.
        let look = run.network.find_deadlock();
        found = look.clone().filter(|look| seen.as_ref() == Some(look));
        seen = look;
    }
    let arrived = run.arrived();
    let (at, lane) = (run.network.now(), found.as_ref().map(|deadlock| deadlock.class));
    let names = |at: &[Vertex]| at.iter().map(|&vertex| run.names.of(vertex)).collect();
    Ok(Circle {
        lanes: run.lanes,
        deadlock: found.map(|deadlock| (at, names(&deadlock.at))),
        lane,
        arrived,
        arrived_lately: arrived - before,
        dropped: run.network.queue_drops(),
        paused: run.network.paused(),
        events: run.network.events_handled(),
    })
}

/// The names of a topology's hosts and switches, by number.
struct Names {
    hosts: Vec<String>,
    switches: Vec<String>,
}

impl Names {
    fn new(topology: &Topology) -> Names {
        let name = |id| topology.node(id).name().to_string();
        Names {
            hosts: topology.hosts().map(name).collect(),
            switches: topology.switches().map(name).collect(),
        }
    }

    fn of(&self, vertex: Vertex) -> String {
        let name = match vertex {
            Vertex::Node(node) => self.hosts.get(node as usize),
            Vertex::Switch(switch) => self.switches.get(switch as usize),
        };
        name.cloned().unwrap_or_default()
    }
}

struct Run {
    network: Network<Phantom>,
    streams: Vec<Stream>,
    names: Names,
    lanes: u8,
}

impl Run {
    fn new(config: &CircleConfig) -> Result<Run, CircleError> {
        let topology = config.shape.build(Capacity::default()).map_err(CircleError::Shape)?;
        let channels = Channels::of(&topology);
        let tables = config.engine.route(&topology, &channels).map_err(CircleError::Route)?;
        let lanes = match config.most_lanes.clamp(1, MAX_CLASSES as u8) {
            1 => Lanes::one(&channels),
            most => Lanes::assign(&channels, &tables, most).map_err(CircleError::Lanes)?,
        };
        let like = LinkConfig {
            queue_bytes: u64::MAX,
            classes: lanes.count(),
            credits: config.credits,
            ..LinkConfig::unlimited(Duration::ZERO)
        };
        let graph = topology::graph(&topology, &channels, &tables, like);
        let endpoint =
            EndpointConfig { max_qps: 1 << 12, max_regions: 1 << 12, ..EndpointConfig::default() };
        let mut network = Network::new(
            &NetworkConfig {
                buffer: config
                    .credits
                    .is_none()
                    .then(|| BufferConfig::lossless(config.buffer_bytes)),
                nic_packets: Some(1),
                endpoint,
                ..NetworkConfig::new(graph, config.seed)
            },
            |_| Phantom,
        );
        let end_ports = topology::end_ports(&topology, &channels);
        let lane = |from: u32, to: u32| {
            let (from, to) = (end_ports[from as usize], end_ports[to as usize]);
            let switch = |end_port: u32| channels.end_ports()[end_port as usize].switch;
            from.zip(to).map_or(0, |(from, to)| lanes.lane(switch(from), switch(to)))
        };
        let streams = open(config, &mut network, lanes.count(), lane)?;
        Ok(Run { network, streams, names: Names::new(&topology), lanes: lanes.count() })
    }

    fn arrived(&self) -> u64 {
        self.streams.iter().map(|stream| stream.arrived(&self.network)).sum()
    }
}

/// Streams from every host to others, each in the lane of its path.
fn open(
    config: &CircleConfig,
    network: &mut Network<Phantom>,
    lanes: u8,
    lane: impl Fn(u32, u32) -> u8,
) -> Result<Vec<Stream>, CircleError> {
    let hosts = network.len();
    let mut chance = Chance::new(config.seed);
    let mut streams = Vec::new();
    for from in 0..hosts {
        for _ in 0..config.streams {
            let distance = 1 + chance.below(u64::from(hosts).saturating_sub(1).max(1)) as u32;
            let to = (from + distance) % hosts;
            let dscp =
                |from: u32, to: u32| (u32::from(lane(from, to)) * 64).div_ceil(lanes.into()) as u8;
            let there = network.path_to(to).remote;
            let stream = Stream::open(network, from, to, 1 << 16, |connect: &mut Connect| {
                connect.window_packets = config.window_packets;
                // A timeout would send again what a deadlock holds.
                connect.timeout = 0;
                let is_sender = connect.path.remote == there;
                connect.path.dscp = if is_sender { dscp(from, to) } else { dscp(to, from) };
            })?;
            streams.push(stream);
        }
    }
    Ok(streams)
}
