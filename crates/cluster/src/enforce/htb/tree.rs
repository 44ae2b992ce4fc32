//! The classes of a port: what a plan asks for, and the steps from one tree to another. Nothing
//! here talks to the kernel.
//!
//! ```text
//! root daa0:           hierarchical token bucket, default class 2
//!  └ daa0:1            the port: rate and ceiling are the port's
//!     ├ daa0:2         all traffic that is no job's: what jobs leave, never nothing
//!     ├ daa0:130       congestion notifications (DSCP 48): a small rate, served first
//!     └ daa0:100+DSCP  a job: its guarantee as rate, at most the port's rate or its rate limit as ceiling
//! ```
//!
//! HTB has a class for each job, so the few queues of a [`Plan`] are not needed here: a job's rate
//! is its guarantee alone, whichever queue it is in. What the plan decides for the sake of few
//! queues, the rate limit, is kept as a ceiling, because on a sender's machine this class is what
//! rate limits it.
//!
//! A job's burst is the bucket of its class, and its latency class the priority: who waits for
//! every message is served first within guarantees, and gets what others leave first.
//!
//! - H1: the rates of the leaves never add up to more than the port's rate, in no step either. A
//!   class within its rate is served although the port is above its own, so otherwise nobody's rate
//!   would hold.
//! - H2: a job of both trees has at least the lower one of its two rates in every step.
//! - H3: a class is removed only after its packets have left, or the time for that is over.
//! - H4: buckets of jobs hold at most [`MOST_BURST_US`] of the port together, or what they hold at
//!   least if that is more. So nobody's guarantee is delayed by more than that, whatever the others
//!   save up.
//!
//! Hence the order of [`steps`]: a port that gets faster first, then what gets slower, then what
//! gets faster or is new, then the removal of what has gone, then a port that gets slower.

use std::collections::BTreeMap;

use parfait::job::Latency;
use parfait::queues::{Binding, Plan};

/// The number of the class of a port.
pub(super) const PORT: u16 = 1;
/// That of the class of other traffic.
pub(super) const OTHERS: u16 = 2;
/// That of a job is this and its DSCP.
pub(super) const JOBS: u16 = 0x100;
/// The DSCP of congestion notification packets (class selector 6).
const CNP_DSCP: u16 = 48;
/// The class of congestion notification packets.
pub(super) const NOTIFICATIONS: u16 = JOBS | CNP_DSCP;

/// The largest packet that Linux handles as one: segments are cut behind the queues (GSO).
pub(super) const LARGEST_PACKET_BYTES: u32 = 1 << 16;

/// Each of other traffic and congestion notifications has at least this part of the port: 0.5 %.
const LEAST_PART: u64 = 200;

/// Congestion notifications may use this part of the port: 5 %.
const NOTIFICATIONS_PART: u64 = 20;

/// Turns of those who share what is left are at most so many packets of the largest size.
const MOST_PACKETS: u32 = 16;

/// A class that was not served for this long may catch up. Less loses throughput where the
/// processor is late, more lets bursts through.
const BURST_US: u64 = 4_000;

/// A port may catch up with this much of its rate. What leaves faster than the physical link waits
/// behind it, in a queue without priorities. Jobs need no more: a class within its rate is served
/// whatever the port's bucket holds.
const PORT_BURST_US: u64 = 1_000;

/// The buckets of all jobs together hold this much of the port.
const MOST_BURST_US: u64 = 10_000;

/// The priority of other traffic: after all jobs.
const OTHERS_PRIORITY: u32 = 3;

/// The kernel's unit of bursts: 64 ns.
const TICK_NS: u128 = 64;

/// What a class that is to be removed keeps, in bytes per second: HTB has no rate of 0.
const LEAST_RATE: u64 = 1;

/// The parameters of a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// Bytes per second that it gets whatever others send.
    pub(super) rate: u64,
    /// Bytes per second that it gets at most.
    pub(super) ceil: u64,
    /// The burst at `rate`, as time in ticks.
    pub(super) burst_ticks: u32,
    /// The burst at `ceil`, as time in ticks.
    pub(super) ceil_burst_ticks: u32,
    /// Bytes of a turn where classes share what others leave.
    pub(super) quantum_bytes: u32,
    /// Lower ones are served first.
    pub(super) priority: u32,
}

impl Class {
    fn new(rate: u64, ceil: u64, quantum_bytes: u32, priority: u32) -> Class {
        let (rate, ceil) = (rate.max(LEAST_RATE), ceil.max(LEAST_RATE));
        Class {
            rate,
            ceil,
            burst_ticks: burst_ticks(rate, least_burst_bytes(rate)),
            ceil_burst_ticks: burst_ticks(ceil, least_burst_bytes(ceil)),
            quantum_bytes,
            priority,
        }
    }

    /// The class of a port, with a smaller bucket.
    fn port(rate: u64) -> Class {
        let ticks = burst_ticks(rate, bucket_bytes(rate, PORT_BURST_US));
        let port = Class::new(rate, rate, LARGEST_PACKET_BYTES, 0);
        Class { burst_ticks: ticks, ceil_burst_ticks: ticks, ..port }
    }

    /// The same with another bucket.
    fn with_burst(self, bytes: u64) -> Class {
        Class { burst_ticks: burst_ticks(self.rate, bytes), ..self }
    }
}

/// What a class holds at least.
fn least_burst_bytes(rate: u64) -> u64 {
    bucket_bytes(rate, BURST_US)
}

/// So many microseconds of a rate, but one packet of the largest size at least.
fn bucket_bytes(rate: u64, us: u64) -> u64 {
    let bytes = u128::from(rate) * u128::from(us) / 1_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX).max(u64::from(LARGEST_PACKET_BYTES))
}

/// How long bytes take at a rate, rounded up.
fn burst_ticks(rate: u64, bytes: u64) -> u32 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    u32::try_from(ns.div_ceil(TICK_NS)).unwrap_or(u32::MAX)
}

/// The bytes of each job's bucket: its burst, or what every class holds if that is more. Where they
/// are too much together (H4), what is beyond the least is scaled down. Jobs are their rates and
/// bursts.
fn burst_bytes(port: u64, jobs: &[(u64, u64)]) -> Vec<u64> {
    let most = u128::from(port) * u128::from(MOST_BURST_US) / 1_000_000;
    let least = |job: &(u64, u64)| least_burst_bytes(job.0);
    let beyond = |job: &(u64, u64)| job.1.saturating_sub(least(job));
    let sum_least: u128 = jobs.iter().map(|job| u128::from(least(job))).sum();
    let sum_beyond: u128 = jobs.iter().map(|job| u128::from(beyond(job))).sum();
    let room = most.saturating_sub(sum_least).min(sum_beyond);
    let scaled = |job: &(u64, u64)| {
        let part = u128::from(beyond(job)) * room / sum_beyond.max(1);
        least(job).saturating_add(u64::try_from(part).unwrap_or(u64::MAX))
    };
    jobs.iter().map(scaled).collect()
}

fn priority(latency: Latency) -> u32 {
    match latency {
        Latency::Low => 0,
        Latency::Normal => 1,
        Latency::Bulk => 2,
    }
}

/// A class with a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// Its parameters.
    pub(super) class: Class,
    /// Bytes that the queue holds; none where the queue is not the one that is made here.
    pub(super) limit_bytes: Option<u32>,
}

/// What is, or is to be, at an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// Whether the root is ours.
    pub(super) has_root: bool,
    /// The port's class.
    pub(super) port: Option<Class>,
    /// All others, by number.
    pub(super) leaves: BTreeMap<u16, Leaf>,
    /// Whether packets are classified as this version does it.
    pub(super) has_filter: bool,
}

impl Tree {
    /// What a plan asks for.
    ///
    /// Jobs have their guarantees to the byte as long as the port keeps 1 % for others. Where they
    /// have reserved more, their rates are scaled down by at most that; while the others are silent
    /// they share what is left as usual.
    pub(super) fn of(plan: &Plan) -> Tree {
        let port = (plan.port().rate_bps / 8).max(LEAST_RATE);
        let least = (port / LEAST_PART).max(LEAST_RATE);
        let bindings = plan.bindings();
        let guaranteed: u64 = bindings.iter().map(bytes_per_s).sum();
        let room = port.saturating_sub(2 * least);
        let rate = |own: &Binding| match guaranteed > room {
            true => scaled(bytes_per_s(own), room, guaranteed),
            false => bytes_per_s(own),
        };
        let for_others =
            port.saturating_sub(least + bindings.iter().map(rate).sum::<u64>()).max(least);
        let smallest = bindings.iter().map(bytes_per_s).min().unwrap_or(for_others).max(1);
        let buffer = plan.port().buffer_bytes.max(u64::from(2 * LARGEST_PACKET_BYTES));
        let leaf = |class| {
            let limit_bytes = Some(u32::try_from(buffer).unwrap_or(u32::MAX));
            Leaf { class, limit_bytes }
        };
        let asked: Vec<(u64, u64)> =
            bindings.iter().map(|own| (rate(own), own.guarantee.burst_bytes)).collect();
        let job = |(own, burst_bytes): (&Binding, u64)| {
            let ceil =
                own.rate_limit_bps.map_or(port, |limit| (limit / 8).min(port)).max(rate(own));
            let quantum = quantum_bytes(bytes_per_s(own), smallest);
            let number = JOBS | u16::from(own.guarantee.dscp.value());
            let class = Class::new(rate(own), ceil, quantum, priority(own.guarantee.latency));
            (number, leaf(class.with_burst(burst_bytes)))
        };
        let quantum = quantum_bytes(for_others, smallest);
        let others = Class::new(for_others, port, quantum, OTHERS_PRIORITY);
        let ceil = (port / NOTIFICATIONS_PART).max(least);
        let notifications = Class::new(least, ceil, LARGEST_PACKET_BYTES, 0);
        let mut leaves: BTreeMap<u16, Leaf> =
            bindings.iter().zip(burst_bytes(port, &asked)).map(job).collect();
        leaves.extend([(OTHERS, leaf(others)), (NOTIFICATIONS, leaf(notifications))]);
        let port = Some(Class::port(port));
        Tree { has_root: true, port, leaves, has_filter: true }
    }
}

/// What the job is guaranteed, at least 1 byte per second.
fn bytes_per_s(own: &Binding) -> u64 {
    (own.guarantee.bps / 8).max(LEAST_RATE)
}

fn scaled(rate: u64, room: u64, sum: u64) -> u64 {
    (u128::from(rate) * u128::from(room) / u128::from(sum.max(1))) as u64
}

/// Turns are in the ratio of guarantees, as far as [`MOST_PACKETS`] allows: what is left is shared
/// in that ratio.
fn quantum_bytes(rate: u64, smallest: u64) -> u32 {
    let quantum = u128::from(LARGEST_PACKET_BYTES) * u128::from(rate) / u128::from(smallest);
    let most = LARGEST_PACKET_BYTES * MOST_PACKETS;
    u32::try_from(quantum).unwrap_or(u32::MAX).clamp(LARGEST_PACKET_BYTES, most)
}

/// A change at an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The root is created.
    Root,
    /// The port's class is created, or changed.
    Port(Class),
    /// A class is created.
    Add(u16, Class),
    /// A class is changed; its packets stay.
    Change(u16, Class),
    /// The queue of a class is created, or gets another limit.
    Limit(u16, u32),
    /// Packets are classified from now on.
    Filter,
    /// A class is removed, once it is empty.
    Remove(u16),
}

/// The steps from one tree to another; none if they are the same. The order is the module's.
pub(super) fn steps(from: &Tree, to: &Tree) -> Vec<Step> {
    let mut steps = Vec::new();
    steps.extend((!from.has_root).then_some(Step::Root));
    let port_change = to.port.filter(|port| from.port != Some(*port));
    let is_faster = |port: &Class| from.port.is_none_or(|old| port.rate >= old.rate);
    steps.extend(port_change.filter(is_faster).map(Step::Port));
    for (number, old) in &from.leaves {
        match to.leaves.get(number) {
            Some(new) if new.class.rate < old.class.rate => {
                steps.push(Step::Change(*number, new.class));
            }
            Some(_) => {}
            None => steps.push(Step::Change(*number, Class { rate: LEAST_RATE, ..old.class })),
        }
    }
    let raised = |(number, new): (&u16, &Leaf)| raise(*number, from.leaves.get(number), new);
    // Without a class for others, packets pass at once: as long as it is missing, nothing can
    // overtake.
    let jobs = || to.leaves.iter().filter(|(number, _)| **number != OTHERS);
    steps.extend(jobs().flat_map(raised));
    steps.extend((to.has_filter && !from.has_filter).then_some(Step::Filter));
    steps.extend(to.leaves.get_key_value(&OTHERS).into_iter().flat_map(raised));
    let gone = from.leaves.keys().filter(|number| !to.leaves.contains_key(number));
    steps.extend(gone.map(|number| Step::Remove(*number)));
    steps.extend(port_change.filter(|port| !is_faster(port)).map(Step::Port));
    steps
}

/// What a class needs that is new, gets faster, or changes otherwise.
fn raise(number: u16, old: Option<&Leaf>, new: &Leaf) -> Vec<Step> {
    let mut steps = Vec::new();
    match old {
        None => steps.push(Step::Add(number, new.class)),
        Some(old) if old.class != new.class && new.class.rate >= old.class.rate => {
            steps.push(Step::Change(number, new.class));
        }
        Some(_) => {}
    }
    let limit = new.limit_bytes.filter(|_| old.and_then(|old| old.limit_bytes) != new.limit_bytes);
    steps.extend(limit.map(|limit| Step::Limit(number, limit)));
    steps
}

#[cfg(test)]
mod tests {
    use parfait::job::Latency;
    use parfait::queues::{Dscp, Guarantee, Port, Scheme};

    use super::*;

    const MBIT: u64 = 1_000_000;

    fn plan(rate_bps: u64, jobs: &[(u64, u8, u64)]) -> Plan {
        let port = Port {
            rate_bps,
            queues: 7,
            weight_units: 1000,
            quantum_bytes: 64,
            frame_bytes: 1518,
            buffer_bytes: 1 << 20,
        };
        let guarantee = |(job, dscp, bps): &(u64, u8, u64)| Guarantee {
            job: *job,
            dscp: Dscp::new(*dscp).expect("a code point"),
            bps: *bps,
            flows: 1,
            latency: Latency::Normal,
            burst_bytes: 0,
            is_contended: true,
        };
        let guarantees: Vec<Guarantee> = jobs.iter().map(guarantee).collect();
        Plan::new(port, Scheme::Paced, &guarantees).expect("a plan")
    }

    fn sum(tree: &Tree) -> u64 {
        tree.leaves.values().map(|leaf| leaf.class.rate).sum()
    }

    #[test]
    fn guarantees_are_rates_and_others_have_the_rest() {
        let tree = Tree::of(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT), (2, 12, 200 * MBIT)]));
        let rate = |number| tree.leaves[&number].class.rate;
        assert_eq!((rate(JOBS | 10), rate(JOBS | 12)), (50_000_000, 25_000_000));
        assert_eq!(rate(NOTIFICATIONS), 625_000);
        assert_eq!(rate(OTHERS), 125_000_000 - 75_000_000 - 625_000);
        assert_eq!(sum(&tree), tree.port.expect("a port").rate);
        let quantum = |number| tree.leaves[&number].class.quantum_bytes;
        assert_eq!((quantum(JOBS | 10), quantum(JOBS | 12)), (131_072, 65_536));
    }

    #[test]
    fn a_port_that_is_reserved_whole_keeps_a_hundredth_for_others() {
        let jobs = [(1, 10, 500 * MBIT), (2, 12, 300 * MBIT), (3, 14, 200 * MBIT)];
        let tree = Tree::of(&plan(1000 * MBIT, &jobs));
        assert!(sum(&tree) <= 125_000_000);
        for (_, dscp, bps) in jobs {
            let rate = tree.leaves[&(JOBS | u16::from(dscp))].class.rate;
            assert_eq!(rate, bps / 8 * 99 / 100);
        }
        assert_eq!(tree.leaves[&OTHERS].class.rate, 625_000);
    }

    #[test]
    fn a_pace_is_a_ceiling() {
        let jobs = [(1, 10, 500 * MBIT), (2, 12, 300 * MBIT), (3, 14, 190 * MBIT)];
        let whole = plan(1000 * MBIT, &jobs);
        let guarantees: Vec<Guarantee> = whole.bindings().iter().map(|own| own.guarantee).collect();
        // Three jobs in one queue: all but one are paced.
        let port = Port { queues: 1, ..*whole.port() };
        let plan = Plan::new(port, Scheme::Paced, &guarantees).expect("a plan");
        let tree = Tree::of(&plan);
        let paced: Vec<&Binding> =
            plan.bindings().iter().filter(|own| own.rate_limit_bps.is_some()).collect();
        assert_eq!(paced.len(), 2);
        for own in plan.bindings() {
            let class = tree.leaves[&(JOBS | u16::from(own.guarantee.dscp.value()))].class;
            assert_eq!(class.rate, own.guarantee.bps / 8);
            assert_eq!(class.ceil, own.rate_limit_bps.map_or(125_000_000, |limit| limit / 8));
        }
    }

    /// Jobs of 100 Mbit/s on a port of 1 Gbit/s, with these bursts and latency classes: bytes of
    /// their buckets.
    fn buckets_of(jobs: &[(u64, Latency)]) -> (Vec<u64>, Tree) {
        let numbered: Vec<(u64, u8, u64)> =
            (0..jobs.len()).map(|at| (at as u64, 10 + at as u8, 100 * MBIT)).collect();
        let simple = plan(1000 * MBIT, &numbered);
        let own = simple.bindings().iter().zip(jobs);
        let guarantees: Vec<Guarantee> = own
            .map(|(own, (burst_bytes, latency))| Guarantee {
                burst_bytes: *burst_bytes,
                latency: *latency,
                ..own.guarantee
            })
            .collect();
        let plan = Plan::new(*simple.port(), Scheme::Matched, &guarantees).expect("a plan");
        let tree = Tree::of(&plan);
        let bytes = |(_, dscp, _): &(u64, u8, u64)| {
            let class = tree.leaves[&(JOBS | u16::from(*dscp))].class;
            (u128::from(class.burst_ticks) * TICK_NS * u128::from(class.rate) / 1_000_000_000)
                as u64
        };
        (numbered.iter().map(bytes).collect(), tree)
    }

    #[test]
    fn bursts_are_buckets_and_together_at_most_a_hundredth_of_a_second_of_the_port() {
        let near = |bytes: &[u64], wanted: &[u64]| {
            assert!(bytes.iter().zip(wanted).all(|(a, b)| a.abs_diff(*b) < 10), "{bytes:?}");
        };
        use Latency::Normal;
        // Less than a packet of the largest size is as good as none.
        near(&buckets_of(&[(0, Normal), (64_000, Normal)]).0, &[65_536, 65_536]);
        near(&buckets_of(&[(0, Normal), (300_000, Normal)]).0, &[65_536, 300_000]);
        // 10 ms are 1.25 MB.
        let (bytes, _) = buckets_of(&[(0, Normal), (2_000_000, Normal), (600_000, Normal)]);
        assert!(bytes.iter().sum::<u64>() <= 1_250_100, "{bytes:?}");
        near(&bytes, &[65_536, 65_536 + 825_357, 65_536 + 228_034]);
        let (bytes, _) = buckets_of(&[(u64::MAX, Normal), (u64::MAX, Normal)]);
        near(&bytes, &[625_000, 625_000]);
        // On a slow port each class holds a packet of the largest size all the same.
        assert_eq!(burst_bytes(1000, &[(100, u64::MAX), (100, 0)]), [65_536, 65_536]);
    }

    #[test]
    fn a_port_catches_up_with_little_and_jobs_with_more() {
        let bytes = |class: Class, ticks| {
            u128::from(class.rate) * TICK_NS * u128::from(ticks) / 1_000_000_000
        };
        for (rate_bps, wanted) in [(1000 * MBIT, 125_000), (8 * MBIT, 65_536)] {
            let port = Tree::of(&plan(rate_bps, &[(1, 10, MBIT)])).port.expect("a port");
            for ticks in [port.burst_ticks, port.ceil_burst_ticks] {
                let bytes = bytes(port, ticks);
                assert!((wanted..wanted + 100).contains(&bytes), "{bytes} of {rate_bps}");
            }
        }
        let job = Tree::of(&plan(1000 * MBIT, &[(1, 10, 600 * MBIT)])).leaves[&(JOBS | 10)].class;
        assert!(bytes(job, job.burst_ticks).abs_diff(300_000) < 100);
    }

    #[test]
    fn latency_classes_are_priorities_and_others_come_last() {
        let classes = [(0, Latency::Bulk), (0, Latency::Low), (0, Latency::Normal)];
        let (_, tree) = buckets_of(&classes);
        let priority = |number| tree.leaves[&number].class.priority;
        assert_eq!([JOBS | 10, JOBS | 11, JOBS | 12].map(priority), [2, 0, 1]);
        assert_eq!((priority(NOTIFICATIONS), priority(OTHERS)), (0, 3));
    }

    #[test]
    fn no_class_is_without_a_rate_whatever_the_port() {
        for (rate_bps, bps) in [(8, 1), (1000, 999), (u64::MAX, u64::MAX), (u64::MAX, 1)] {
            let tree = Tree::of(&plan(rate_bps, &[(1, 10, bps)]));
            for leaf in tree.leaves.values() {
                let Class { rate, ceil, burst_ticks, quantum_bytes, .. } = leaf.class;
                assert!(rate > 0 && ceil >= rate && burst_ticks > 0, "{leaf:?}");
                assert!(quantum_bytes >= LARGEST_PACKET_BYTES);
            }
        }
    }

    #[test]
    fn the_same_tree_needs_no_steps() {
        let tree = Tree::of(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT)]));
        assert_eq!(steps(&tree, &tree), []);
    }

    #[test]
    fn a_new_port_classifies_before_others_have_a_class() {
        let tree = Tree::of(&plan(1000 * MBIT, &[(1, 10, 400 * MBIT)]));
        let all = steps(&Tree::default(), &tree);
        let at = |step: &dyn Fn(&Step) -> bool| all.iter().position(step).expect("there");
        assert_eq!(at(&|step| *step == Step::Root), 0);
        assert_eq!(at(&|step| matches!(step, Step::Port(_))), 1);
        let (filter, others) =
            (at(&|step| *step == Step::Filter), at(&|step| matches!(step, Step::Add(OTHERS, _))));
        assert!(at(&|step| matches!(step, Step::Add(number, _) if *number == JOBS | 10)) < filter);
        assert!(filter < others);
    }

    /// Runs a step on the tree, as the kernel does.
    fn run(tree: &mut Tree, step: Step) {
        let leaf = |class| Leaf { class, limit_bytes: None };
        match step {
            Step::Root => tree.has_root = true,
            Step::Port(class) => tree.port = Some(class),
            Step::Add(number, class) => {
                assert_eq!(tree.leaves.insert(number, leaf(class)), None, "added twice");
            }
            Step::Change(number, class) => {
                tree.leaves.get_mut(&number).expect("there").class = class;
            }
            Step::Limit(number, limit) => {
                tree.leaves.get_mut(&number).expect("there").limit_bytes = Some(limit);
            }
            Step::Filter => tree.has_filter = true,
            Step::Remove(number) => {
                let leaf = tree.leaves.remove(&number).expect("there");
                assert_eq!(leaf.class.rate, LEAST_RATE, "its rate was not taken away first");
            }
        }
    }

    /// Random plans, from a generator of the test: which jobs, at which rates, on how fast a port.
    fn random_plan(seed: &mut u64) -> Plan {
        let mut draw = |below: u64| {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (*seed >> 33) % below
        };
        let rate = [10 * MBIT, 1000 * MBIT, 400_000 * MBIT][draw(3) as usize];
        let mut left = rate;
        let mut jobs = Vec::new();
        for (job, dscp) in (0..).zip([8, 10, 12, 14, 18, 20]) {
            if draw(3) > 0 && left > 1 {
                let bps = 1 + draw(left - 1);
                left -= bps;
                jobs.push((job, dscp, bps));
            }
        }
        plan(rate, &jobs)
    }

    #[test]
    fn every_step_keeps_the_rules() {
        let mut seed = 1;
        let mut tree = Tree::default();
        for round in 0..2000 {
            let to = Tree::of(&random_plan(&mut seed));
            let from = tree.clone();
            for step in steps(&from, &to) {
                run(&mut tree, step);
                let port = tree.port.map_or(u64::MAX, |port| port.rate);
                let retired = 64 * LEAST_RATE;
                assert!(sum(&tree) <= port.saturating_add(retired), "H1, round {round}, {step:?}");
                for (number, old) in &from.leaves {
                    let Some(new) = to.leaves.get(number) else { continue };
                    let now = tree.leaves[number].class.rate;
                    assert!(now >= old.class.rate.min(new.class.rate), "H2, round {round}");
                }
            }
            assert_eq!(tree, to, "round {round}");
        }
    }
}
