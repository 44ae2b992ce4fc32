//! Jobs that share a link in the simulator: how long their iterations take alone, together, and
//! with time shifts.
//!
//! Each job has a sender and a receiver of its own, and all of them one link in between. In each
//! iteration a job computes, and then sends what its burst has, at its rate. With shifts, its
//! exchange begins at its times only, as an agent enforces them.

use parfait::shifts::{Burst, Shifts, TOLERANCE_PARTS};
use roce::shaping::Limiter;
use roce::{Duration, Time};
use sim::buffer::BufferConfig;
use sim::cycles::{self, Grid, Program, Send};
use sim::graph::{Graph, Vertex};
use sim::link::{LinkConfig, MAX_CLASSES};
use sim::network::NetworkConfig;
use sim::tenants::{Pair, Tenants};

use super::{ProofError, WINDOWS, frame_bytes};

/// Code point of all packets: the jobs share a queue.
const DSCP: u8 = 8;

/// A job on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staggered {
    /// The job, by its place among those that were planned.
    pub job: usize,
    /// Its period.
    pub period_ns: u64,
    /// What it sends in each.
    pub burst: Burst,
}

/// How long iterations take, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spans {
    /// Alone on the link.
    pub alone: Vec<Duration>,
    /// With the others, all beginning as their bursts say.
    pub together: Vec<Duration>,
    /// With the others and the shifts.
    pub shifted: Vec<Duration>,
}

/// Runs the jobs of a link for so many of its longest periods, in each way.
///
/// # Errors
/// When a connection fails.
pub fn measure(
    capacity_bps: u64,
    staggered: &[Staggered],
    shifts: &Shifts,
    periods: u64,
) -> Result<Vec<Spans>, ProofError> {
    let together = run(capacity_bps, staggered, None, periods)?;
    let shifted = run(capacity_bps, staggered, Some(shifts), periods)?;
    let mut all = Vec::new();
    for ((turn, together), shifted) in staggered.iter().zip(together).zip(shifted) {
        let alone = run(capacity_bps, std::slice::from_ref(turn), None, periods)?;
        let alone = alone.into_iter().next().unwrap_or_default();
        all.push(Spans { alone, together, shifted });
    }
    Ok(all)
}

fn run(
    capacity_bps: u64,
    staggered: &[Staggered],
    shifts: Option<&Shifts>,
    periods: u64,
) -> Result<Vec<Vec<Duration>>, ProofError> {
    let mut tenants = Tenants::new(&network(capacity_bps, staggered.len() as u32), WINDOWS);
    let mut programs = Vec::new();
    for (place, turn) in (0..).zip(staggered) {
        let to = staggered.len() as u32 + place;
        let line = tenants.connect(Pair { from: place, to, dscp: DSCP })?;
        if turn.burst.bps < capacity_bps {
            let burst = 4 * u64::from(frame_bytes(WINDOWS.mtu));
            tenants.network().set_rate_limit(
                place,
                DSCP,
                Some(Limiter::exact(turn.burst.bps, burst)),
            );
        }
        programs.push(program(turn, line, capacity_bps, shifts));
    }
    let longest = staggered.iter().map(|turn| turn.period_ns).max().unwrap_or(0);
    let until = Time::ZERO + Duration::from_nanos(longest) * periods;
    let mut spans = cycles::run(&mut tenants, programs, until)?;
    for own in &mut spans {
        // The first iterations wait for their times.
        *own = own.split_off(own.len().min(2));
        own.sort_unstable();
    }
    Ok(spans)
}

fn program(turn: &Staggered, line: u32, capacity_bps: u64, shifts: Option<&Shifts>) -> Program {
    let Burst { start_ns, length_ns, bps } = turn.burst;
    let wire = u128::from(bps.min(capacity_bps)) * u128::from(length_ns) / 8_000_000_000;
    let mtu = u128::from(WINDOWS.mtu.bytes());
    let bytes = (wire * mtu / u128::from(frame_bytes(WINDOWS.mtu))).max(1) as u64;
    let grid = shifts.map(|shifts| {
        let period = shifts.period_ns[turn.job].max(1);
        Grid {
            period: Duration::from_nanos(period),
            shift: Duration::from_nanos((shifts.shift_ns[turn.job] + start_ns) % period),
            tolerance: Duration::from_nanos(period / TOLERANCE_PARTS),
        }
    });
    Program {
        phases: vec![vec![Send { line, bytes }]],
        compute: Duration::from_nanos(turn.period_ns - length_ns),
        // So that its first burst is a period later than its start says.
        start: Time::from_nanos(start_ns + length_ns),
        grid,
    }
}

/// Senders at one switch, their receivers at another one, and the link in between.
fn network(capacity_bps: u64, jobs: u32) -> NetworkConfig {
    let delay = Duration::from_micros(1);
    let link = LinkConfig { classes: MAX_CLASSES as u8, ..LinkConfig::new(capacity_bps, delay) };
    let edge = link.with_rate(capacity_bps.saturating_mul(4));
    let (left, right) = (Vertex::Switch(0), Vertex::Switch(1));
    let graph = Graph::new(2 * jobs, 2).join(left, right, link, link);
    let graph = (0..2 * jobs).fold(graph, |graph, node| {
        let switch = if node < jobs { left } else { right };
        graph.join(Vertex::Node(node), switch, edge, edge)
    });
    let buffer = Some(BufferConfig::lossless(16 << 20));
    NetworkConfig { buffer, is_sealed: false, ..NetworkConfig::new(graph, 1) }
}
