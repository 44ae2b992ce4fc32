//! How often guarantees are violated at a port of the simulator: twelve tenants, schemes and
//! numbers of queues.
//!
//! Each tenant is a host of its own behind a lossless switch, and all send to one receiver, whose
//! port has the queues. Flows are connections of the real transport. Tenants are backlogged, or
//! alternate between backlogged and silent; a window counts for a tenant as far as it has something
//! to send. `docs/parfait-queues.md` has the same for a model of a port, packet by packet.

use parfait::job::Latency;
use parfait::queues::{Dscp, Guarantee, Plan, Scheme};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use roce::shaping::Limiter;
use roce::verbs::Mtu;
use roce::{Duration, Time};
use sim::buffer::BufferConfig;
use sim::graph::{Graph, Vertex};
use sim::link::{LinkConfig, MAX_CLASSES, Marking};
use sim::network::NetworkConfig;
use sim::tenants::{Pair, Tenants, Transport};

use super::set::QueueRules;
use super::{ProofError, WINDOW, WINDOWS, frame_bytes, queues};
use crate::workers;

/// Tenants at the port.
const TENANTS: u64 = 12;

/// Rate of the port; senders' own links carry more.
const PORT_BPS: u64 = 10_000_000_000;
const SENDER_BPS: u64 = 25_000_000_000;

/// Mean time of a burst, and of silence.
const BURST_NS: u64 = 50_000_000;

/// Windows before those that count.
const WARM_UP: u32 = 2;

/// Frames that a rate limit lets go at once.
const RATE_LIMIT_FRAMES: u64 = 4;

/// Who is at the port.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Tenants that always send; the others do in bursts.
    pub backlogged: usize,
    /// Most connections of a tenant.
    pub flows: u32,
}

/// How a table is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Seeds of each cell.
    pub seeds: u64,
    /// Windows of each seed.
    pub windows: u32,
    /// How tenants send.
    pub transport: Transport,
}

/// Frames of 1,122 bytes, so that the two that a window may lack are little, and windows of 16 of
/// them.
pub const SMALL: Transport = Transport { mtu: Mtu::M1024, window_packets: 16, ..WINDOWS };

/// Windows of tenants that had something to send, and those below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// All.
    pub sending: u64,
    /// Those in which less than the guarantee arrived.
    pub below: u64,
}

impl Count {
    /// The share below.
    pub fn share(self) -> f64 {
        self.below as f64 / self.sending.max(1) as f64
    }
}

/// A cell of the table.
///
/// # Errors
/// When a connection fails.
pub fn measure(scheme: Scheme, queues: u8, mix: Mix, effort: &Effort) -> Result<Count, ProofError> {
    let mut all = Count::default();
    for seed in 0..effort.seeds {
        let mut run = Run::new(scheme, queues, mix, effort, seed)?;
        for window in 0..WARM_UP + effort.windows {
            let count = run.window()?;
            if window >= WARM_UP {
                all.sending += count.sending;
                all.below += count.below;
            }
            run.follow();
        }
    }
    Ok(all)
}

/// The cells of a scheme for these numbers of queues, on all cores.
///
/// # Errors
/// When a connection fails.
pub fn measure_all(
    scheme: Scheme,
    queues: &[u8],
    mix: Mix,
    effort: &Effort,
) -> Result<Vec<Count>, ProofError> {
    let mut cells = vec![Count::default(); queues.len()];
    let cell = |at: u64| measure(scheme, queues[at as usize], mix, effort);
    workers::each(0..queues.len() as u64, None, cell, |at, count| {
        cells[at as usize] = count?;
        Ok::<(), ProofError>(())
    })?;
    Ok(cells)
}

/// Guarantees of 1 to 20 parts, which add up to 90 % of the port.
fn guarantees(mix: Mix, seed: u64) -> Vec<Guarantee> {
    let mut random = Pcg32::new(seed, 0x6a0b);
    let parts: Vec<u64> =
        (0..TENANTS).map(|_| 1_000 + u64::from(random.next_u32() % 19_001)).collect();
    let sum: u64 = parts.iter().sum();
    let guarantee = |((job, part), dscp): ((u64, &u64), Dscp)| Guarantee {
        job: job + u64::from(random.next_u32() % 1_000) * TENANTS,
        dscp,
        bps: PORT_BPS / 10 * 9 / sum * part,
        flows: 1 + random.next_u32() % mix.flows.max(1),
        latency: Latency::Normal,
        burst_bytes: 0,
        is_contended: true,
    };
    (0..).zip(&parts).zip(Dscp::all()).map(guarantee).collect()
}

struct Tenant {
    guarantee: Guarantee,
    node: u32,
    lines: Vec<u32>,
    is_on: bool,
    /// When it begins or stops; `None` if it always sends.
    toggles_at: Option<Time>,
    /// In this window: whether it began, and arrived bytes and time with something to send before
    /// it.
    has_begun: bool,
    arrived: u64,
    busy: Duration,
}

struct Run {
    tenants: Tenants,
    all: Vec<Tenant>,
    plan: Plan,
    scheme: Scheme,
    transport: Transport,
    random: Pcg32,
}

impl Run {
    fn new(
        scheme: Scheme,
        queues: u8,
        mix: Mix,
        effort: &Effort,
        seed: u64,
    ) -> Result<Run, ProofError> {
        let transport = effort.transport;
        let mut tenants = Tenants::new(&network(seed), transport);
        let mut random = Pcg32::new(seed, 0x7e4a);
        let guarantees = guarantees(mix, seed);
        let mut all = Vec::new();
        for (at, guarantee) in guarantees.iter().enumerate() {
            let node = at as u32 + 1;
            let pair = Pair { from: node, to: 0, dscp: guarantee.dscp.value() };
            let lines =
                (0..guarantee.flows).map(|_| tenants.connect(pair)).collect::<Result<_, _>>()?;
            let is_bursty = at >= mix.backlogged;
            all.push(Tenant {
                guarantee: *guarantee,
                node,
                lines,
                is_on: !is_bursty || random.next_u32().is_multiple_of(2),
                toggles_at: is_bursty.then(|| Time::ZERO + exponential(&mut random)),
                has_begun: false,
                arrived: 0,
                busy: Duration::ZERO,
            });
        }
        let rules = QueueRules { scheme, ..QueueRules::new(queues, frame_bytes(transport.mtu)) };
        let plan = Plan::new(rules.port(PORT_BPS), scheme, &guarantees);
        let plan = plan.map_err(|refusal| super::set::SetError::Port {
            from: "the switch".to_owned(),
            to: "the receiver".to_owned(),
            refusal,
        })?;
        let mut run = Run { tenants, all, plan, scheme, transport, random };
        run.enforce();
        for at in 0..run.all.len() {
            run.switch(at, run.all[at].is_on)?;
        }
        Ok(run)
    }

    fn enforce(&mut self) {
        let network = self.tenants.network();
        network.set_queues(Vertex::Switch(0), Vertex::Node(0), &queues(&self.plan));
        let burst = RATE_LIMIT_FRAMES * u64::from(frame_bytes(self.transport.mtu));
        for tenant in &self.all {
            let own = self.plan.binding(tenant.guarantee.job);
            let pace = own.and_then(|own| own.rate_limit_bps).map(|bps| Limiter::exact(bps, burst));
            network.set_rate_limit(tenant.node, tenant.guarantee.dscp.value(), pace);
        }
    }

    fn switch(&mut self, at: usize, is_on: bool) -> Result<(), ProofError> {
        for &line in &self.all[at].lines {
            self.tenants.set_backlogged(line, is_on)?;
        }
        self.all[at].is_on = is_on;
        self.all[at].has_begun |= is_on;
        Ok(())
    }

    /// Runs for a window and judges it.
    fn window(&mut self) -> Result<Count, ProofError> {
        for at in 0..self.all.len() {
            (self.all[at].arrived, self.all[at].busy) = self.state(at);
            self.all[at].has_begun = false;
        }
        let end = self.tenants.now() + WINDOW;
        loop {
            let next = self.all.iter().filter_map(|tenant| tenant.toggles_at).min();
            let until = next.map_or(end, |next| next.min(end));
            self.tenants.run_until(until)?;
            if until == end {
                break;
            }
            for at in 0..self.all.len() {
                if self.all[at].toggles_at == Some(until) {
                    self.switch(at, !self.all[at].is_on)?;
                    self.all[at].toggles_at = Some(until + exponential(&mut self.random));
                }
            }
        }
        let mut count = Count::default();
        for at in 0..self.all.len() {
            let (arrived, busy) = self.state(at);
            let tenant = &self.all[at];
            let on = Duration::from_nanos(busy.as_nanos() - tenant.busy.as_nanos());
            if on > Duration::ZERO {
                let bytes = self.tenants.wire_bytes(arrived - tenant.arrived);
                count.sending += 1;
                count.below += u64::from(self.is_below(tenant, bytes, on));
            }
        }
        Ok(count)
    }

    /// Payload of a tenant that has arrived, and how long it has had something to send.
    fn state(&self, at: usize) -> (u64, Duration) {
        let lines = &self.all[at].lines;
        let arrived = lines.iter().map(|&line| self.tenants.arrived(line)).sum();
        let busy = lines.iter().map(|&line| self.tenants.busy(line)).max();
        (arrived, busy.unwrap_or(Duration::ZERO))
    }

    /// Whether a tenant lacks more than two frames, or than its windows if it has begun within this
    /// one.
    fn is_below(&self, tenant: &Tenant, bytes: u64, on: Duration) -> bool {
        let owed = u128::from(tenant.guarantee.bps) * u128::from(on.as_nanos()) / 8_000_000_000;
        let frame = u64::from(frame_bytes(self.transport.mtu));
        let window = tenant.lines.len() as u64 * u64::from(self.transport.window_packets) * frame;
        let begun = u64::from(tenant.has_begun) * window;
        u128::from(bytes + 2 * frame + begun) < owed
    }

    /// The next plan takes those to be contended that have sent in this window. `Matched` and
    /// `Paced` keep their queues.
    fn follow(&mut self) {
        let sent: Vec<u64> = (0..self.all.len())
            .filter(|&at| self.state(at).1 > self.all[at].busy)
            .map(|at| self.all[at].guarantee.job)
            .collect();
        let is_contended = |job| sent.contains(&job);
        let is_same = |own: &parfait::queues::Binding| {
            own.guarantee.is_contended == is_contended(own.guarantee.job)
        };
        if self.plan.bindings().iter().all(is_same) {
            return;
        }
        let next = match self.scheme {
            Scheme::Hash | Scheme::Levels => return,
            Scheme::Contended => {
                let all = self.all.iter().map(|tenant| Guarantee {
                    is_contended: is_contended(tenant.guarantee.job),
                    ..tenant.guarantee
                });
                Plan::new(*self.plan.port(), self.scheme, &all.collect::<Vec<_>>())
            }
            Scheme::Matched | Scheme::Paced => self.plan.reweighed(is_contended),
        };
        // What does not fit leaves the plan before in force.
        if let Ok(next) = next {
            self.plan = next;
            self.enforce();
        }
    }
}

/// Twelve senders and a receiver, node 0, at a lossless switch that marks.
fn network(seed: u64) -> NetworkConfig {
    let delay = Duration::from_micros(1);
    let up = LinkConfig { classes: MAX_CLASSES as u8, ..LinkConfig::new(SENDER_BPS, delay) };
    let down = LinkConfig { marking: Some(Marking::dctcp(PORT_BPS)), ..up.with_rate(PORT_BPS) };
    let buffer = Some(BufferConfig::lossless(16 << 20));
    let graph = Graph::star(TENANTS as u32 + 1, up, down);
    NetworkConfig { buffer, is_sealed: false, ..NetworkConfig::new(graph, seed) }
}

/// A time of exponential distribution, at least 1 ns.
fn exponential(random: &mut Pcg32) -> Duration {
    let uniform = (f64::from(random.next_u32()) + 1.0) / (f64::from(u32::MAX) + 2.0);
    Duration::from_nanos((-uniform.ln() * BURST_NS as f64) as u64 + 1)
}
