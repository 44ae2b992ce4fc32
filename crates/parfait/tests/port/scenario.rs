//! Twelve tenants at a port of 10 Gbit/s with 90 % of it guaranteed, and plans by each scheme.

use parfait::job::Latency;
use parfait::queues::rebinding::rebind;
use parfait::queues::{Dscp, Guarantee, Plan, Port, Refusal, Scheme};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

use super::port::{FLOW_WINDOW_BYTES, FRAME_BYTES, Model};

pub(crate) const TENANTS: u64 = 12;
/// Mean time of bursts and of silence.
const BURST_NS: u64 = 50_000_000;

pub(crate) fn port(queues: u8, weight_units: u32) -> Port {
    Port {
        rate_bps: 10_000_000_000,
        queues,
        weight_units,
        quantum_bytes: 25_600 / weight_units,
        frame_bytes: FRAME_BYTES as u32,
        buffer_bytes: TENANTS * 4 * FLOW_WINDOW_BYTES,
    }
}

/// Guarantees of 1 to 20 parts, which add up to 90 % of the port; each of 1 to `most_flows` flows.
pub(crate) fn guarantees(port: &Port, most_flows: u32, seed: u64) -> Vec<Guarantee> {
    let mut random = Pcg32::new(seed, 0x6a0b);
    let parts: Vec<u64> =
        (0..TENANTS).map(|_| 1_000 + u64::from(random.next_u32() % 19_001)).collect();
    let sum: u64 = parts.iter().sum();
    let guarantee = |((job, part), dscp): ((u64, &u64), Dscp)| Guarantee {
        job: job + u64::from(random.next_u32() % 1_000) * TENANTS,
        dscp,
        bps: port.rate_bps / 10 * 9 / sum * part,
        flows: 1 + random.next_u32() % most_flows,
        latency: Latency::Normal,
        burst_bytes: 0,
        is_contended: true,
    };
    (0..).zip(&parts).zip(Dscp::all()).map(guarantee).collect()
}

/// The first `backlogged` tenants always send, the others in bursts.
pub(crate) fn model(port: Port, guarantees: &[Guarantee], backlogged: usize, seed: u64) -> Model {
    let means = (0..).map(|at| (at >= backlogged).then_some(BURST_NS));
    let tenants: Vec<_> = guarantees.iter().copied().zip(means).collect();
    Model::new(port, &tenants, seed)
}

/// What came of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    /// Windows of tenants that had something to send, and those below the guarantee.
    pub(crate) sending: u64,
    pub(crate) below: u64,
    pub(crate) reordered: u64,
    pub(crate) moves: u64,
    /// Plans to which no order of moves led.
    pub(crate) refused: u64,
    /// Time in which the port had nothing to send.
    pub(crate) idle_ps: u64,
    /// The longest drain as a part of its bound.
    pub(crate) longest_drain: f64,
}

/// Runs for so many windows. After each, who sent in it is what the next plan takes to be
/// contended.
pub(crate) fn run(
    scheme: Scheme,
    guarantees: &[Guarantee],
    mut model: Model,
    port: Port,
    windows: u64,
) -> Outcome {
    let mut plan = Plan::new(port, scheme, guarantees).expect("a plan");
    let mut outcome = Outcome::default();
    model.enforce(&plan);
    for _ in 0..windows {
        model.run_window();
        let (sending, below) = model.violations();
        outcome.sending += sending;
        outcome.below += below;
        if matches!(scheme, Scheme::Contended | Scheme::Matched | Scheme::Paced)
            && model.is_settled()
        {
            follow(scheme, &mut plan, &mut model, &mut outcome);
        }
    }
    outcome.reordered = model.reordered;
    outcome.idle_ps = model.idle_ps;
    outcome.moves = model.moves;
    outcome.longest_drain = model.longest_drain;
    outcome
}

fn follow(scheme: Scheme, plan: &mut Plan, model: &mut Model, outcome: &mut Outcome) {
    let measured: Vec<Guarantee> = plan
        .bindings()
        .iter()
        .map(|binding| {
            let job = binding.guarantee.job;
            let tenant = model.tenants.iter().find(|tenant| tenant.guarantee.job == job);
            Guarantee { is_contended: tenant.expect("a tenant").on_ns > 0, ..binding.guarantee }
        })
        .collect();
    if measured.iter().zip(plan.bindings()).all(|(job, own)| *job == own.guarantee) {
        return;
    }
    let next = Plan::new(*plan.port(), scheme, &measured).expect("a plan");
    if scheme == Scheme::Contended {
        model.enforce(&next);
        *plan = next;
        return;
    }
    let free: Vec<Dscp> = Dscp::all().collect();
    let rebinding = match rebind(plan, &next, &free) {
        Err(Refusal::NoRoom { .. }) => {
            outcome.refused += 1;
            let is_contended = |job| next.binding(job).is_some_and(|b| b.guarantee.is_contended);
            let weighed = plan.reweighed(is_contended).expect("room for what was there");
            rebind(plan, &weighed, &free)
        }
        other => other,
    };
    let rebinding = rebinding.expect("an order of steps");
    model.begin(rebinding.steps);
    *plan = rebinding.plan;
}
