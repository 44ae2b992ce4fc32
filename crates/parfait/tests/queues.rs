//! Plans of queues: what they promise (Q1 to Q4, R1, R2 of the modules' texts), against a port
//! packet by packet.

mod port;
#[path = "port/scenario.rs"]
mod scenario;

use std::collections::{BTreeMap, BTreeSet};

use parfait::demand::{Abstraction, Order};
use parfait::job::Job;
use parfait::ledger::Ledger;
use parfait::network::{Network, Routing};
use parfait::placement::{Request, search};
use parfait::queues::rebinding::{self, Step, rebind};
use parfait::queues::{
    Binding, Dscp, Guarantee, Plan, Port, Refusal, Scheme, code_points, guarantees,
};
use parfait::spread::Ecmp;
use rand_pcg::Pcg32;
use rand_pcg::rand_core::Rng;
use scenario::{Outcome, TENANTS};

const SCHEMES: [Scheme; 5] =
    [Scheme::Hash, Scheme::Contended, Scheme::Levels, Scheme::Matched, Scheme::Paced];

fn sum_bps(plan: &Plan, queue: u8) -> u64 {
    let own = plan.bindings().iter().filter(|own| own.queue == queue);
    own.map(|own| own.guarantee.bps).sum()
}

/// Q1, and that every job has one queue.
fn check(plan: &Plan, guarantees: &[Guarantee]) {
    let port = plan.port();
    assert!(plan.weights().iter().sum::<u32>() <= port.weight_units);
    assert_eq!(plan.weights().len(), usize::from(port.queues));
    assert_eq!(plan.bindings().len(), guarantees.len());
    for guarantee in guarantees {
        let own = plan.binding(guarantee.job).expect("a queue");
        assert!(own.queue < port.queues);
        assert!(own.rate_limit_bps.is_none_or(|pace| pace >= guarantee.bps));
    }
    for queue in 0..port.queues {
        assert!(plan.queue_bps(queue) >= sum_bps(plan, queue), "queue {queue} of {plan:?}");
    }
}

fn shuffled(guarantees: &[Guarantee], random: &mut Pcg32) -> Vec<Guarantee> {
    let mut shuffled = guarantees.to_vec();
    for at in (1..shuffled.len()).rev() {
        shuffled.swap(at, random.next_u32() as usize % (at + 1));
    }
    shuffled
}

#[test]
fn every_plan_holds_all_guarantees_by_queue_and_is_the_same_in_any_order_of_jobs() {
    for seed in 0..300 {
        let mut random = Pcg32::new(seed, 1);
        let queues = 1 + (random.next_u32() % 8) as u8;
        let units = [100, 1_000][random.next_u32() as usize % 2];
        let port = scenario::port(queues, units);
        let mut jobs = scenario::guarantees(&port, 1 + random.next_u32() % 4, seed);
        jobs.truncate(random.next_u32() as usize % 13);
        jobs.iter_mut().for_each(|job| job.is_contended = random.next_u32().is_multiple_of(2));
        for scheme in SCHEMES {
            let plan = Plan::new(port, scheme, &jobs).expect("room for 90 %");
            check(&plan, &jobs);
            let again = Plan::new(port, scheme, &shuffled(&jobs, &mut random));
            assert_eq!(again.as_ref(), Ok(&plan));
            let summed = matches!(scheme, Scheme::Hash | Scheme::Contended | Scheme::Levels);
            for queue in (0..queues).filter(|_| summed) {
                let unit_bps = port.rate_bps / u64::from(units);
                let excess = plan.queue_bps(queue) - sum_bps(&plan, queue);
                assert!(excess < unit_bps, "rounding takes less than a unit");
            }
            if scheme == Scheme::Paced {
                let contended = plan.bindings().iter().filter(|own| own.guarantee.is_contended);
                assert!(contended.clone().all(|own| own.is_assured()), "Q4: {plan:?}");
            }
            let kept = plan.reweighed(|job| job % 2 == 0).expect("room for the same queues");
            check(&kept, &jobs);
            let queue =
                |plan: &Plan| plan.bindings().iter().map(|own| own.queue).collect::<Vec<_>>();
            assert_eq!(queue(&kept), queue(&plan));
        }
    }
}

/// The least part of the port that assures all jobs, over all ways to give them queues.
fn least_bps(jobs: &[Guarantee], queues: usize) -> f64 {
    let all = queues.pow(jobs.len() as u32);
    let cost = |way: usize| -> f64 {
        let queue = |at: usize| way / queues.pow(at as u32) % queues;
        let part = |own: usize| {
            let jobs = || (0..).zip(jobs).filter(|(at, _)| queue(*at) == own).map(|(_, job)| job);
            let flows: f64 = jobs().map(|job| f64::from(job.flows)).sum();
            jobs().map(|job| job.bps as f64 / f64::from(job.flows)).fold(0.0, f64::max) * flows
        };
        (0..queues).map(part).sum()
    };
    (0..all).map(cost).fold(f64::INFINITY, f64::min)
}

#[test]
fn matched_queues_take_the_least_of_all_ways_to_give_jobs_queues() {
    let mut assured = 0;
    for seed in 0..60 {
        let queues = 2 + (seed % 2) as u8;
        let port = scenario::port(queues, 12_800);
        let mut jobs = scenario::guarantees(&port, 1 + seed as u32 % 3, seed);
        jobs.truncate(7);
        let least = least_bps(&jobs, queues.into());
        let plan = Plan::new(port, Scheme::Matched, &jobs).expect("room");
        let taken: u64 = (0..queues).map(|queue| plan.queue_bps(queue)).sum();
        let unit_bps = port.rate_bps as f64 / 12_800.0;
        let is_assured = plan.bindings().iter().all(|own| own.is_assured());
        if is_assured {
            let rounding = f64::from(queues) * unit_bps;
            assert!((taken as f64 - least).abs() <= rounding, "seed {seed}: {taken}, {least}");
            assured += 1;
        } else {
            assert!(least > port.rate_bps as f64 - f64::from(queues) * unit_bps, "seed {seed}");
        }
    }
    assert!(assured > 30, "only {assured} were assured");
}

/// Over seeds, with so many backlogged tenants; the others send in bursts.
fn outcome(scheme: Scheme, queues: u8, backlogged: usize, flows: u32) -> Outcome {
    let mut sum = Outcome::default();
    for seed in 0..4 {
        let port = scenario::port(queues, 100);
        let jobs = scenario::guarantees(&port, flows, seed);
        let model = scenario::model(port, &jobs, backlogged, seed);
        let outcome = scenario::run(scheme, &jobs, model, port, 12);
        sum.sending += outcome.sending;
        sum.below += outcome.below;
        sum.reordered += outcome.reordered;
        sum.idle_ps += outcome.idle_ps;
        sum.refused += outcome.refused;
        sum.moves += outcome.moves;
        sum.longest_drain = sum.longest_drain.max(outcome.longest_drain);
    }
    assert!(sum.sending > 100, "tenants send");
    assert!(sum.longest_drain <= 1.0, "a drain took longer than its bound");
    sum
}

#[test]
fn matched_and_paced_queues_violate_less_than_a_static_hash() {
    for (queues, backlogged) in [2, 4, 7, 8].into_iter().flat_map(|q| [(q, 12), (q, 6), (q, 2)]) {
        let hash = outcome(Scheme::Hash, queues, backlogged, 1);
        for scheme in [Scheme::Matched, Scheme::Paced] {
            let ours = outcome(scheme, queues, backlogged, 1);
            let what = format!("{scheme:?}, {queues} queues, {backlogged} backlogged");
            assert!(ours.below < hash.below, "{what}: {ours:?}, {hash:?}");
            assert_eq!((ours.reordered, ours.idle_ps), (0, 0), "{what}");
            if queues >= 7 {
                assert_eq!(ours.below, 0, "{what}");
            }
            // Nobody begins to send, so what is left is a turn of DWRR or a burst of a rate limit.
            if scheme == Scheme::Paced && backlogged == 12 {
                assert!(1_000 * ours.below <= 10 * ours.sending, "{what}: {ours:?}");
            }
        }
    }
}

#[test]
fn a_queue_for_each_tenant_violates_nothing() {
    for seed in 0..4 {
        let port = scenario::port(8, 1_000);
        let jobs = scenario::guarantees(&port, 1, seed);
        let mut model = scenario::model(port, &jobs, 6, seed);
        let unit_bps = port.rate_bps / u64::from(port.weight_units);
        let weights: Vec<u32> = jobs.iter().map(|job| job.bps.div_ceil(unit_bps) as u32).collect();
        model.enforce_alone(&weights);
        for _ in 0..20 {
            model.run_window();
            assert_eq!(model.violations().1, 0, "seed {seed}");
        }
    }
}

#[test]
fn who_sends_alone_gets_the_whole_port() {
    for scheme in [Scheme::Matched, Scheme::Paced, Scheme::Hash] {
        let port = scenario::port(4, 100);
        let mut jobs = scenario::guarantees(&port, 1, 5);
        jobs.iter_mut().skip(1).for_each(|job| job.is_contended = false);
        let mut model = scenario::model(port, &jobs, 12, 5);
        model.tenants.iter_mut().skip(1).for_each(|tenant| tenant.is_on = false);
        model.enforce(&Plan::new(port, scheme, &jobs).expect("room"));
        model.run_window();
        let whole = port.rate_bps / 8 * port::WINDOW_NS / 1_000_000_000;
        let left = model.tenants[0].left_bytes;
        assert!(left + 2 * port::FRAME_BYTES >= whole, "{scheme:?}: {left} of {whole}");
    }
}

#[test]
fn who_sends_more_flows_than_declared_harms_its_own_queue_only() {
    let port = scenario::port(7, 100);
    let declared = scenario::guarantees(&port, 1, 3);
    let plan = Plan::new(port, Scheme::Matched, &declared).expect("room");
    let shared = |own: &&Binding| {
        plan.bindings().iter().filter(|other| other.queue == own.queue).count() > 1
    };
    let rogue = *plan.bindings().iter().find(shared).expect("twelve jobs in seven queues");
    let mut sent = declared.clone();
    let at = sent.iter().position(|job| job.job == rogue.guarantee.job).expect("there");
    sent[at].flows = 16;
    let mut model = scenario::model(port, &sent, 12, 3);
    model.enforce(&plan);
    model.run_window();
    model.run_window();
    let below = model.tenants.iter().filter(|tenant| {
        let window_bytes = tenant.guarantee.bps / 8 / (1_000_000_000 / port::WINDOW_NS);
        tenant.left_bytes + 2 * port::FRAME_BYTES < window_bytes
    });
    let queues: Vec<u8> =
        below.map(|t| plan.binding(t.guarantee.job).expect("bound").queue).collect();
    assert!(!queues.is_empty(), "the others of its queue are harmed");
    assert!(queues.iter().all(|queue| *queue == rogue.queue), "{queues:?}, {}", rogue.queue);
}

/// Two sets of jobs for a port, of which most are in both, with other guarantees.
fn two_sets(port: &Port, seed: u64) -> (Vec<Guarantee>, Vec<Guarantee>) {
    let mut random = Pcg32::new(seed, 9);
    let mut jobs = scenario::guarantees(port, 2, seed);
    // Some room is what moves need.
    jobs.iter_mut().for_each(|job| job.bps = job.bps * 3 / 4);
    let mut later = jobs.clone();
    let at = random.next_u32() as usize % 6;
    (later[at].bps, later[at + 6].bps) = (later[at + 6].bps, later[at].bps);
    later.remove(random.next_u32() as usize % 12);
    jobs.remove(random.next_u32() as usize % 12);
    (jobs, later)
}

#[test]
fn rebinding_keeps_order_and_guarantees_on_the_way() {
    let (mut moves, mut refused) = (0, 0);
    for seed in 0..200 {
        let port = scenario::port([2, 4, 7, 8][seed as usize % 4], 100);
        let (before, after) = two_sets(&port, seed);
        let scheme = [Scheme::Matched, Scheme::Paced][seed as usize / 4 % 2];
        let old = Plan::new(port, scheme, &before).expect("room");
        let new = Plan::new(port, scheme, &after).expect("room");
        let free: Vec<Dscp> = Dscp::all().collect();
        let rebinding = match rebind(&old, &new, &free) {
            Ok(rebinding) => rebinding,
            Err(Refusal::NoRoom { needed, units, .. }) => {
                assert!(needed > units.into());
                refused += 1;
                continue;
            }
            Err(other) => panic!("seed {seed}: {other}"),
        };
        check(
            &rebinding.plan,
            &after.iter().map(|job| renamed(job, &rebinding.plan)).collect::<Vec<_>>(),
        );
        check_steps(&old, &rebinding.plan, &rebinding.steps);
        // Those that are in both plans send all the time, with the lower of both guarantees.
        let stay: Vec<Guarantee> = before
            .iter()
            .filter_map(|job| {
                let later = new.binding(job.job)?;
                let is_assured = old.binding(job.job)?.is_assured() && later.is_assured();
                let bps = if is_assured { job.bps.min(later.guarantee.bps) } else { 1 };
                Some(Guarantee { bps, ..*job })
            })
            .collect();
        let mut model = scenario::model(port, &stay, 12, seed);
        model.enforce_for(&old);
        model.run_window();
        model.begin(rebinding.steps);
        for _ in 0..8 {
            model.run_window();
            assert_eq!(model.violations().1, 0, "seed {seed}, {scheme:?}");
        }
        assert!(model.is_settled(), "seed {seed}: all steps are done");
        assert_eq!(model.reordered, 0, "seed {seed}");
        assert!(model.longest_drain <= 1.0, "seed {seed}: {}", model.longest_drain);
        moves += model.moves;
    }
    assert!(moves > 100, "only {moves} moves, {refused} refused");
}

fn renamed(job: &Guarantee, plan: &Plan) -> Guarantee {
    Guarantee { dscp: plan.binding(job.job).expect("bound").guarantee.dscp, ..*job }
}

#[test]
fn renaming_moves_few_jobs_and_changes_nothing_else() {
    let (mut moved, mut without) = (0, 0);
    for seed in 0..200 {
        let port = scenario::port([2, 4, 7, 8][seed as usize % 4], 100);
        let (before, after) = two_sets(&port, seed);
        let old = Plan::new(port, Scheme::Matched, &before).expect("room");
        let new = Plan::new(port, Scheme::Matched, &after).expect("room");
        let plan = rebinding::renamed(&old, &new);
        check(&plan, &after);
        let shares = |plan: &Plan| {
            let queue = |queue: u8| plan.bindings().iter().filter(move |own| own.queue == queue);
            let jobs = |at| queue(at).map(|own| own.guarantee.job).collect::<Vec<_>>();
            let weights = plan.weights().iter().zip(0..);
            weights.map(|(weight, at)| (*weight, jobs(at))).collect::<BTreeSet<_>>()
        };
        assert_eq!(shares(&plan), shares(&new), "seed {seed}: queues are the same ones");
        let moves = |plan: &Plan| {
            let stays = |own: &&Binding| {
                old.binding(own.guarantee.job).is_some_and(|was| was.queue != own.queue)
            };
            plan.bindings().iter().filter(stays).count()
        };
        (moved, without) = (moved + moves(&plan), without + moves(&new));
        let other = Plan::new(scenario::port(5, 100), Scheme::Matched, &before).expect("room");
        assert_eq!(rebinding::renamed(&other, &new), new, "another port");
    }
    assert!(4 * moved < 3 * without, "{moved} moves, {without} without renaming");
}

/// What is in force between steps.
struct State<'a> {
    old: &'a Plan,
    new: &'a Plan,
    weights: Vec<u32>,
    bound: BTreeMap<Dscp, u8>,
    /// By job: the queues that may have packets of it.
    queues: BTreeMap<u64, BTreeSet<u8>>,
    has_rate_limits: bool,
}

impl State<'_> {
    /// What a job of both plans is to have on the way.
    fn bps(&self, job: u64) -> Option<u64> {
        let [old, new] = [self.old.binding(job)?, self.new.binding(job)?];
        Some(old.guarantee.bps.min(new.guarantee.bps))
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Weights(weights) => self.weights.clone_from(weights),
            Step::Bind(dscp, queue) => {
                assert!(self.bound.insert(*dscp, *queue).is_none(), "bound already");
                assert!(*queue < self.old.port().queues);
            }
            Step::Unbind(dscp) => assert!(self.bound.remove(dscp).is_some(), "bound before"),
            Step::Switch(job, dscp) => {
                let queue = self.bound[dscp];
                assert!(self.queues.get_mut(job).expect("there before").insert(queue), "moves");
            }
            Step::Drain { job, at_most_ns } => {
                assert!(*at_most_ns > 0);
                let queue = self.new.binding(*job).expect("in both").queue;
                self.queues.insert(*job, BTreeSet::from([queue]));
            }
            Step::RateLimit(job, pace) => {
                self.has_rate_limits = true;
                let new = self.new.binding(*job).expect("of the new plan");
                assert!(pace.is_none_or(|pace| pace >= new.guarantee.bps));
            }
        }
    }

    /// R1.
    fn check(&self) {
        let port = self.old.port();
        assert!(self.weights.iter().sum::<u32>() <= port.weight_units);
        for (queue, weight) in (0..).zip(&self.weights) {
            let members = self.queues.iter().filter(|(_, queues)| queues.contains(&queue));
            let jobs: Vec<u64> = members.map(|(job, _)| *job).collect();
            let queue_bps = port.rate_bps / u64::from(port.weight_units) * u64::from(*weight);
            let sum: u64 = jobs.iter().filter_map(|job| self.bps(*job)).sum();
            assert!(queue_bps >= sum, "queue {queue} has {queue_bps} of {sum}");
            let flows =
                |job: &u64| u64::from(self.new.binding(*job).expect("in both").guarantee.flows);
            let all: u64 = jobs.iter().map(flows).sum();
            for job in jobs.iter().filter(|_| !self.has_rate_limits) {
                let is_assured = [self.old, self.new]
                    .iter()
                    .all(|plan| plan.binding(*job).expect("in both").is_assured());
                let share_bps = queue_bps * flows(job) / all;
                let bps = self.bps(*job).expect("in both");
                assert!(!is_assured || share_bps >= bps, "job {job} has {share_bps} of {bps}");
            }
        }
    }
}

fn check_steps(old: &Plan, new: &Plan, steps: &[Step]) {
    let stay = old.bindings().iter().filter(|own| new.binding(own.guarantee.job).is_some());
    let mut state = State {
        old,
        new,
        weights: old.weights().to_vec(),
        bound: old.bindings().iter().map(|own| (own.guarantee.dscp, own.queue)).collect(),
        queues: stay.map(|own| (own.guarantee.job, BTreeSet::from([own.queue]))).collect(),
        has_rate_limits: old.bindings().iter().any(|own| own.rate_limit_bps.is_some()),
    };
    for step in steps {
        state.step(step);
        state.check();
    }
    let bound = new.bindings().iter().map(|own| (own.guarantee.dscp, own.queue));
    assert_eq!(state.bound, bound.collect(), "what the plan says is bound at the end");
    assert_eq!(state.weights, new.weights());
}

#[test]
fn without_the_steps_packets_are_reordered() {
    assert!(outcome(Scheme::Contended, 4, 2, 1).reordered > 0, "the model sees it");
}

#[test]
fn a_plan_that_stays_needs_no_moves() {
    let port = scenario::port(4, 100);
    let jobs = scenario::guarantees(&port, 1, 0);
    let plan = Plan::new(port, Scheme::Matched, &jobs).expect("room");
    let rebinding = rebind(&plan, &plan, &[]).expect("nothing to do");
    assert_eq!(rebinding.plan, plan);
    assert_eq!(rebinding.steps, [Step::Weights(plan.weights().to_vec())]);
}

#[test]
fn a_rebinding_needs_code_points_that_are_free() {
    let port = scenario::port(8, 100);
    let mut before = scenario::guarantees(&port, 1, 2);
    before.iter_mut().for_each(|job| job.bps /= 2);
    let mut after = before.clone();
    let smallest = (0..12).min_by_key(|at| before[*at].bps).expect("twelve");
    let largest = (0..12).max_by_key(|at| before[*at].bps).expect("twelve");
    (after[smallest].bps, after[largest].bps) = (before[largest].bps, before[smallest].bps);
    let plan = |jobs: &[Guarantee]| Plan::new(port, Scheme::Matched, jobs).expect("room");
    let (old, new) = (plan(&before), plan(&after));
    let used: Vec<Dscp> = before.iter().map(|job| job.dscp).collect();
    assert!(matches!(rebind(&old, &new, &used), Err(Refusal::NoDscp(_))), "none but those used");
    let free: Vec<Dscp> = Dscp::all().collect();
    let moved = rebind(&old, &new, &free).expect("room for moves");
    assert!(moved.steps.iter().any(|step| matches!(step, Step::Drain { .. })));
    // Job 1 leaves, and a new one has the code point of job 0, which stays where it is.
    let mut later = before.clone();
    later[1] = Guarantee { job: 99_999, dscp: before[0].dscp, ..before[1] };
    later[0].dscp = before[1].dscp;
    let refused = rebind(&old, &plan(&later), &free);
    let expected = Refusal::DuplicateDscp(before[0].job, 99_999, before[0].dscp);
    assert_eq!(refused, Err(expected));
}

#[test]
fn as_many_jobs_as_there_are_code_points_are_planned() {
    let port = Port { rate_bps: 400_000_000_000, ..scenario::port(8, 1_000) };
    let mut random = Pcg32::new(4, 4);
    let template = scenario::guarantees(&port, 1, 0)[0];
    let job = |(job, dscp): (u64, Dscp)| Guarantee {
        job,
        dscp,
        bps: 1_000_000_000 + u64::from(random.next_u32()) * 2,
        flows: 1 + random.next_u32() % 8,
        ..template
    };
    let jobs: Vec<Guarantee> = (0..).zip(Dscp::all()).map(job).collect();
    for scheme in SCHEMES {
        check(&Plan::new(port, scheme, &jobs).expect("room"), &jobs);
    }
}

#[test]
fn code_points_are_legal_and_few() {
    for value in 0..=255 {
        let is_legal = (1..64).contains(&value) && value != 46 && value != 48;
        assert_eq!(Dscp::new(value).is_ok(), is_legal, "{value}");
    }
    assert_eq!(Dscp::all().count(), 61);
}

#[test]
fn what_makes_no_sense_is_refused_with_the_reason() {
    let port = scenario::port(4, 100);
    let jobs = scenario::guarantees(&port, 1, 1);
    let changed = |change: fn(&mut Port, &mut Vec<Guarantee>)| {
        let (mut port, mut jobs) = (port, jobs.clone());
        change(&mut port, &mut jobs);
        Plan::new(port, Scheme::Matched, &jobs).expect_err("a refusal").to_string()
    };
    let refused = [
        (changed(|port, _| port.queues = 0), "0 queues for jobs; there can be 1 to 8"),
        (changed(|port, _| port.queues = 9), "9 queues for jobs; there can be 1 to 8"),
        (
            changed(|port, _| port.weight_units = 3),
            "a port needs a rate, a quantum, a largest frame, and 4 to",
        ),
        (changed(|port, _| port.rate_bps = 0), "a port needs a rate"),
        (changed(|_, jobs| jobs[0].bps = 0), "job "),
        (changed(|_, jobs| jobs[0].flows = 0), "job "),
        (changed(|_, jobs| jobs[1].job = jobs[0].job), "job "),
        (changed(|_, jobs| jobs[1].dscp = jobs[0].dscp), "jobs "),
        (
            changed(|_, jobs| jobs.iter_mut().for_each(|job| job.bps = u64::MAX)),
            "221360928884514619380 bit/s are guaranteed",
        ),
        (changed(|port, jobs| jobs[0].bps += port.rate_bps / 5), ""),
    ];
    for (error, reason) in &refused {
        assert!(error.starts_with(reason), "{error}");
    }
    assert!(refused[6].0.ends_with("is there twice"), "{}", refused[6].0);
    assert!(refused[7].0.ends_with("both have DSCP 1"), "{}", refused[7].0);
    assert!(refused[9].0.ends_with("are missing"), "{}", refused[9].0);
    // Eight jobs of 1/8 each in eight queues need 13 percent each.
    let mut eighths: Vec<Guarantee> = jobs[..8].to_vec();
    eighths.iter_mut().for_each(|job| job.bps = port.rate_bps / 8);
    let spread = Plan::new(scenario::port(8, 100), Scheme::Contended, &eighths);
    assert_eq!(spread, Err(Refusal::Rounding { needed: 104, units: 100 }));
    let plan = Plan::new(port, Scheme::Matched, &jobs).expect("room");
    let other = Plan::new(scenario::port(7, 100), Scheme::Matched, &jobs).expect("room");
    assert_eq!(rebind(&plan, &other, &[]), Err(Refusal::OtherPort));
}

/// Jobs on a leaf-spine until none fits.
fn filled() -> Ledger {
    let shape: topology::shape::Shape = "leaf-spine:4x2x4".parse().expect("a shape");
    let topology = shape.build(topology::graph::Capacity::default()).expect("small");
    let routing = Routing::Ecmp(Ecmp::Even);
    let reservable = |_, link: &topology::graph::Link| link.capacity.rate_bps / 10 * 9;
    let mut ledger = Ledger::new(Network::new(&topology, 8, routing, reservable).expect("a tree"));
    let mut memory = search::Memory::new();
    for id in 0..TENANTS {
        let job: Job = format!("ring:8@{}G slots=2", 3 + id).parse().expect("a job");
        let request = Request::new(&job, Abstraction::Parfait).expect("possible");
        let Ok(place) = search::place(&ledger, &request, &mut memory, id, 50) else { continue };
        let demand = request.demand(Order::Ranks);
        let _ = ledger.admit(id, demand, 2, Abstraction::Parfait, &place.pieces);
    }
    ledger
}

#[test]
fn a_ledger_says_what_each_port_guarantees() {
    let mut ledger = filled();
    let links: Vec<(u32, u32)> = ledger.network().links().collect();
    for id in 0..30 {
        let (link, trunk) = links[id as usize * 7 % links.len()];
        let bps = ledger.free_bps(trunk) / 3;
        let _ = ledger.reserve(100 + id, &[(link, bps.max(1))]);
    }
    let given = code_points(&ledger).expect("few jobs");
    let mut planned = 0;
    for trunk in 0..ledger.network().trunks() as u32 {
        let jobs = guarantees(&ledger, trunk, &given).expect("all have code points");
        let sum: u64 = jobs.iter().map(|job| job.bps).sum();
        assert_eq!(sum, ledger.reserved_bps(trunk));
        let rate_bps = ledger.network().capacity_bps(trunk) / 9 * 10;
        if rate_bps == 0 {
            continue;
        }
        let port = Port { rate_bps, ..scenario::port(7, 100) };
        let plan = Plan::new(port, Scheme::Matched, &jobs).expect("the ledger holds L1");
        check(&plan, &jobs);
        planned += jobs.len();
    }
    assert!(planned > 20, "only {planned}");
    // More jobs on one link than code points.
    for id in 0..70 {
        ledger.reserve(1_000 + id, &[(links[0].0, 1)]).expect("room for a bit");
    }
    assert!(matches!(code_points(&ledger), Err(Refusal::NoDscp(_))));
}
