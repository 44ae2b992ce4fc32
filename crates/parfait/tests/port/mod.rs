//! A port with DWRR queues and the tenants behind it, packet by packet: what plans are measured
//! against.
//!
//! Each flow keeps a window of bytes in the port while its tenant sends, and puts the next packet
//! at the end of its queue when one has left: flows that share a queue share it evenly, as with
//! congestion control that is fair by flow. Tenants are backlogged, or alternate between backlogged
//! and silent.

use std::collections::VecDeque;

use parfait::queues::rebinding::Step;
use parfait::queues::{Dscp, Guarantee, Plan, Port};
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;

/// Bytes of a packet on the wire.
pub(crate) const FRAME_BYTES: u64 = 1_500;
/// Bytes that a flow keeps in the port.
pub(crate) const FLOW_WINDOW_BYTES: u64 = 16 * FRAME_BYTES;
/// Packets that a rate limit lets go at once.
const RATE_LIMIT_BURST_FRAMES: u64 = 4;
/// A guarantee is looked at over this time.
pub(crate) const WINDOW_NS: u64 = 10_000_000;

struct Packet {
    tenant: usize,
    flow: usize,
    number: u64,
}

struct Flow {
    dscp: Dscp,
    /// Where it goes once nothing of it is in the port.
    next_dscp: Option<Dscp>,
    queued_bytes: u64,
    sent: u64,
    left: u64,
}

pub(crate) struct Tenant {
    pub(crate) guarantee: Guarantee,
    /// Mean time of a burst and of silence; none if always backlogged.
    mean_ns: Option<u64>,
    pub(crate) is_on: bool,
    toggles_at_ns: u64,
    flows: Vec<Flow>,
    rate_limit_bps: Option<u64>,
    /// When its rate limit lets the next packet go.
    next_ps: u64,
    /// Whether it began to send in this window.
    has_begun: bool,
    /// In this window: what left the port, and how long it had something to send.
    pub(crate) left_bytes: u64,
    pub(crate) on_ns: u64,
}

/// A step that waits for a job's flows to go over.
struct Draining {
    job: u64,
    began_ns: u64,
    at_most_ns: u64,
}

pub(crate) struct Model {
    port: Port,
    weights: Vec<u64>,
    queue_of: [Option<usize>; 64],
    queues: Vec<VecDeque<Packet>>,
    deficits: Vec<u64>,
    turn: usize,
    now_ps: u64,
    pub(crate) tenants: Vec<Tenant>,
    steps: VecDeque<Step>,
    draining: Option<Draining>,
    random: Pcg32,
    /// Time in which nothing was in the port.
    pub(crate) idle_ps: u64,
    /// Packets that left after a later one of their flow.
    pub(crate) reordered: u64,
    /// Moves that were done, and the longest of their drains against its bound.
    pub(crate) moves: u64,
    pub(crate) longest_drain: f64,
}

impl Model {
    pub(crate) fn new(port: Port, tenants: &[(Guarantee, Option<u64>)], seed: u64) -> Model {
        let mut random = Pcg32::new(seed, 0x7e4a);
        let tenants = tenants.iter().map(|(guarantee, mean_ns)| {
            let is_on = mean_ns.is_none() || random.next_u32().is_multiple_of(2);
            let flow = || Flow {
                dscp: guarantee.dscp,
                next_dscp: None,
                queued_bytes: 0,
                sent: 0,
                left: 0,
            };
            Tenant {
                guarantee: *guarantee,
                mean_ns: *mean_ns,
                is_on,
                toggles_at_ns: mean_ns.map_or(u64::MAX, |mean| exponential(mean, &mut random)),
                flows: (0..guarantee.flows).map(|_| flow()).collect(),
                rate_limit_bps: None,
                next_ps: 0,
                has_begun: false,
                left_bytes: 0,
                on_ns: 0,
            }
        });
        let tenants = tenants.collect();
        Model {
            port,
            weights: Vec::new(),
            queue_of: [None; 64],
            queues: Vec::new(),
            deficits: Vec::new(),
            turn: 0,
            now_ps: 0,
            tenants,
            steps: VecDeque::new(),
            draining: None,
            random,
            idle_ps: 0,
            reordered: 0,
            moves: 0,
            longest_drain: 0.0,
        }
    }

    /// Enforces a plan at once: packets that are queued stay where they are.
    pub(crate) fn enforce(&mut self, plan: &Plan) {
        self.set_weights(plan.weights());
        for binding in plan.bindings() {
            self.queue_of[usize::from(binding.guarantee.dscp.value())] = Some(binding.queue.into());
            self.pace(binding.guarantee.job, binding.rate_limit_bps);
        }
    }

    /// The same for the tenants that are there.
    pub(crate) fn enforce_for(&mut self, plan: &Plan) {
        self.set_weights(plan.weights());
        for at in 0..self.tenants.len() {
            let own = plan.binding(self.tenants[at].guarantee.job).expect("a queue");
            self.queue_of[usize::from(own.guarantee.dscp.value())] = Some(own.queue.into());
            self.tenants[at].rate_limit_bps = own.rate_limit_bps;
        }
    }

    /// Binds each tenant to a queue of its own.
    pub(crate) fn enforce_alone(&mut self, units: &[u32]) {
        self.set_weights(units);
        for (queue, tenant) in self.tenants.iter().enumerate() {
            self.queue_of[usize::from(tenant.guarantee.dscp.value())] = Some(queue);
        }
    }

    fn pace(&mut self, job: u64, rate_limit_bps: Option<u64>) {
        let mut tenants = self.tenants.iter_mut();
        if let Some(tenant) = tenants.find(|tenant| tenant.guarantee.job == job) {
            tenant.rate_limit_bps = rate_limit_bps;
        }
    }

    fn set_weights(&mut self, weights: &[u32]) {
        self.weights = weights.iter().map(|weight| u64::from(*weight)).collect();
        self.queues.resize_with(self.weights.len(), VecDeque::new);
        self.deficits.resize(self.weights.len(), 0);
    }

    /// Begins to carry out steps; those before must be done.
    pub(crate) fn begin(&mut self, steps: Vec<Step>) {
        assert!(self.is_settled(), "two changes at once");
        self.steps = steps.into();
        self.carry_out();
    }

    pub(crate) fn is_settled(&self) -> bool {
        self.steps.is_empty() && self.draining.is_none()
    }

    fn now_ns(&self) -> u64 {
        self.now_ps / 1_000
    }

    /// Carries out steps up to one that has to wait.
    fn carry_out(&mut self) {
        loop {
            if let Some(Draining { job, began_ns, at_most_ns }) = self.draining {
                let tenant = self.tenants.iter().find(|tenant| tenant.guarantee.job == job);
                let flows = &tenant.expect("a tenant").flows;
                if flows.iter().any(|flow| flow.next_dscp.is_some()) {
                    return;
                }
                let took = (self.now_ns() - began_ns) as f64 / at_most_ns as f64;
                self.longest_drain = self.longest_drain.max(took);
                self.moves += 1;
                self.draining = None;
            }
            match self.steps.pop_front() {
                None => return,
                Some(Step::Weights(weights)) => self.set_weights(&weights),
                Some(Step::Bind(dscp, queue)) => {
                    self.queue_of[usize::from(dscp.value())] = Some(queue.into());
                }
                Some(Step::Unbind(dscp)) => self.queue_of[usize::from(dscp.value())] = None,
                Some(Step::RateLimit(job, rate_limit_bps)) => self.pace(job, rate_limit_bps),
                Some(Step::Switch(job, dscp)) => self.switch(job, dscp),
                Some(Step::Drain { job, at_most_ns }) => {
                    self.draining = Some(Draining { job, began_ns: self.now_ns(), at_most_ns });
                }
            }
        }
    }

    fn switch(&mut self, job: u64, dscp: Dscp) {
        let at = self.tenants.iter().position(|tenant| tenant.guarantee.job == job);
        let at = at.expect("a tenant");
        for flow in 0..self.tenants[at].flows.len() {
            self.tenants[at].flows[flow].next_dscp = Some(dscp);
            self.fill(at, flow);
        }
    }

    /// Lets a flow put into the port what its window allows.
    fn fill(&mut self, at: usize, flow_at: usize) {
        let tenant = &mut self.tenants[at];
        let flow = &mut tenant.flows[flow_at];
        if flow.queued_bytes == 0
            && let Some(dscp) = flow.next_dscp.take()
        {
            flow.dscp = dscp;
        }
        if !tenant.is_on || flow.next_dscp.is_some() {
            return;
        }
        let queue = self.queue_of[usize::from(flow.dscp.value())].expect("a bound code point");
        while flow.queued_bytes + FRAME_BYTES <= FLOW_WINDOW_BYTES {
            if let Some(rate_limit_bps) = tenant.rate_limit_bps {
                if tenant.next_ps > self.now_ps {
                    return;
                }
                let frame_ps = FRAME_BYTES * 8 * 1_000_000 * 1_000_000 / rate_limit_bps;
                let earliest_ps = self.now_ps.saturating_sub(RATE_LIMIT_BURST_FRAMES * frame_ps);
                tenant.next_ps = tenant.next_ps.max(earliest_ps) + frame_ps;
            }
            flow.queued_bytes += FRAME_BYTES;
            self.queues[queue].push_back(Packet { tenant: at, flow: flow_at, number: flow.sent });
            flow.sent += 1;
        }
    }

    fn toggle(&mut self) {
        let now_ns = self.now_ns();
        for at in 0..self.tenants.len() {
            let tenant = &mut self.tenants[at];
            while tenant.toggles_at_ns <= now_ns {
                tenant.is_on = !tenant.is_on;
                tenant.has_begun |= tenant.is_on;
                let mean_ns = tenant.mean_ns.expect("only those that alternate do");
                tenant.toggles_at_ns += exponential(mean_ns, &mut self.random);
            }
            for flow in 0..self.tenants[at].flows.len() {
                self.fill(at, flow);
            }
        }
    }

    /// The next packet by DWRR.
    fn next_packet(&mut self) -> Option<Packet> {
        if self.queues.iter().all(VecDeque::is_empty) {
            return None;
        }
        loop {
            let queue = self.turn;
            if !self.queues[queue].is_empty() && self.deficits[queue] >= FRAME_BYTES {
                self.deficits[queue] -= FRAME_BYTES;
                return self.queues[queue].pop_front();
            }
            if self.queues[queue].is_empty() {
                self.deficits[queue] = 0;
            }
            self.turn = (queue + 1) % self.queues.len();
            if !self.queues[self.turn].is_empty() {
                let quantum = u64::from(self.port.quantum_bytes) * self.weights[self.turn];
                self.deficits[self.turn] += quantum;
            }
        }
    }

    /// Runs for a window, with counters from 0.
    pub(crate) fn run_window(&mut self) {
        let end_ns = self.now_ns() / WINDOW_NS * WINDOW_NS + WINDOW_NS;
        for tenant in &mut self.tenants {
            (tenant.left_bytes, tenant.on_ns, tenant.has_begun) = (0, 0, false);
        }
        let frame_ps = FRAME_BYTES * 8 * 1_000_000 / (self.port.rate_bps / 1_000_000);
        let mut toggled_ns = self.now_ns();
        self.toggle();
        while self.now_ns() < end_ns {
            let toggle_ns = self.tenants.iter().map(|tenant| tenant.toggles_at_ns).min();
            let until_ns = toggle_ns.unwrap_or(u64::MAX).min(end_ns);
            while self.now_ns() < until_ns {
                self.fill_paced();
                let Some(packet) = self.next_packet() else {
                    self.idle(until_ns * 1_000);
                    continue;
                };
                self.now_ps += frame_ps;
                self.leave(&packet);
            }
            let passed = self.now_ns() - toggled_ns;
            self.tenants.iter_mut().filter(|t| t.is_on).for_each(|t| t.on_ns += passed);
            toggled_ns = self.now_ns();
            self.toggle();
            self.carry_out();
        }
    }

    /// Lets paced flows go on whose time has come.
    fn fill_paced(&mut self) {
        for at in 0..self.tenants.len() {
            let tenant = &self.tenants[at];
            if tenant.rate_limit_bps.is_some() && tenant.is_on && tenant.next_ps <= self.now_ps {
                let flows = tenant.flows.len();
                let first = self.random.next_u32() as usize;
                (0..flows).for_each(|flow| self.fill(at, (first + flow) % flows));
            }
        }
    }

    /// Nothing is in the port: waits for the next paced packet, or until a time.
    fn idle(&mut self, until_ps: u64) {
        let paced = self.tenants.iter().filter(|t| t.is_on && t.rate_limit_bps.is_some());
        let next_ps = paced.map(|tenant| tenant.next_ps).min().unwrap_or(until_ps);
        self.idle_ps += next_ps.clamp(self.now_ps, until_ps) - self.now_ps;
        self.now_ps = next_ps.clamp(self.now_ps + 1, until_ps.max(self.now_ps + 1));
    }

    fn leave(&mut self, packet: &Packet) {
        let tenant = &mut self.tenants[packet.tenant];
        tenant.left_bytes += FRAME_BYTES;
        let flow = &mut tenant.flows[packet.flow];
        flow.queued_bytes -= FRAME_BYTES;
        self.reordered += u64::from(packet.number != flow.left);
        flow.left = flow.left.max(packet.number + 1);
        self.fill(packet.tenant, packet.flow);
        if self.draining.is_some() {
            self.carry_out();
        }
    }

    /// How many tenants had something to send in the window, and how many of these got less than
    /// their guarantee for that time, by more than two packets; by more than their flows keep in
    /// the port, too, if they began in this window.
    pub(crate) fn violations(&self) -> (u64, u64) {
        let sending = self.tenants.iter().filter(|tenant| tenant.on_ns > 0);
        let is_below = |tenant: &&Tenant| {
            let owed = u128::from(tenant.guarantee.bps) * u128::from(tenant.on_ns) / 8_000_000_000;
            let begun = u64::from(tenant.has_begun) * tenant.flows.len() as u64 * FLOW_WINDOW_BYTES;
            u128::from(tenant.left_bytes + 2 * FRAME_BYTES + begun) < owed
        };
        (sending.clone().count() as u64, sending.filter(is_below).count() as u64)
    }
}

/// Of exponential distribution, at least 1.
fn exponential(mean_ns: u64, random: &mut Pcg32) -> u64 {
    let uniform = (f64::from(random.next_u32()) + 1.0) / (f64::from(u32::MAX) + 2.0);
    (-uniform.ln() * mean_ns as f64) as u64 + 1
}
