//! What hosts send to each other: flows with a size and a start.
//!
//! Starts are times, or the arrival of other flows, which is how the steps of a collective follow
//! each other. All hosts are numbered from 0.

use alloc::vec::Vec;

use roce::verbs::MAX_MESSAGE_BYTES;
use roce::{Duration, Time};
use thiserror::Error;

use super::sizes::FlowSizes;
use crate::chance::Chance;

/// Most flows of a workload: about a gigabyte of bookkeeping.
pub const MAX_FLOWS: u64 = 1 << 22;

/// A message from one host to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The sending host.
    pub from: u32,
    /// The receiving host.
    pub to: u32,
    /// Payload in bytes, 1 to 2³¹.
    pub bytes: u64,
    /// It does not start before.
    pub at: Time,
    /// Nor before these flows have arrived, by number.
    pub after: Vec<u32>,
}

impl Flow {
    fn at_once(from: u32, to: u32, bytes: u64) -> Flow {
        Flow { from, to, bytes, at: Time::ZERO, after: Vec::new() }
    }
}

/// Patterns of flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Hosts 1 to `senders` send to host 0 at once.
    Incast {
        /// How many.
        senders: u32,
        /// Bytes of each.
        bytes: u64,
    },
    /// Every host sends to another one, and receives from another one, at once.
    Permutation {
        /// Bytes of each.
        bytes: u64,
    },
    /// Every host sends to every other one, at once.
    AllToAll {
        /// Bytes to each.
        bytes: u64,
    },
    /// The first `hosts` hosts reduce in a ring: 2 (n - 1) steps, each of which sends a part to the
    /// next host.
    RingAllreduce {
        /// How many, at least 2.
        hosts: u32,
        /// Bytes to reduce on each; a part is an n-th of them.
        bytes: u64,
    },
    /// The first `hosts` hosts reduce up a binary tree, and the root's result goes down again, in
    /// pieces that follow each other.
    TreeAllreduce {
        /// How many, at least 2.
        hosts: u32,
        /// Bytes to reduce on each.
        bytes: u64,
        /// How many pieces.
        pieces: u32,
    },
    /// Flows at random: exponential distances between the flows of each host, and destinations at
    /// random.
    Poisson {
        /// How large they are.
        sizes: FlowSizes,
        /// Payload that every host offers on average, in parts per million of the rate of its link;
        /// not 0.
        load_ppm: u32,
        /// No flow starts later.
        span: Duration,
    },
    /// These.
    Trace(Vec<Flow>),
}

/// Why a workload does not fit its network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WorkloadError {
    /// It names more hosts than there are.
    #[error("the workload needs {needed} hosts; the topology has {there}")]
    Hosts {
        /// How many it needs.
        needed: u32,
        /// How many there are.
        there: u32,
    },
    /// There are too many flows.
    #[error("the workload has {flows} flows; at most {MAX_FLOWS} are simulated")]
    Flows {
        /// How many.
        flows: u64,
    },
    /// A flow is empty, or longer than a message can be.
    #[error("flow {flow} has {bytes} bytes; a message has 1 to {MAX_MESSAGE_BYTES}")]
    Bytes {
        /// Which one.
        flow: u64,
        /// How many.
        bytes: u64,
    },
    /// A flow stays on its host.
    #[error("flow {flow} goes from host {host} to itself")]
    Itself {
        /// Which one.
        flow: u32,
        /// The host.
        host: u32,
    },
    /// A flow waits for one that is not before it.
    #[error("flow {flow} waits for flow {after}, which does not come before it")]
    Order {
        /// Which one.
        flow: u32,
        /// What it waits for.
        after: u32,
    },
    /// Nothing is sent.
    #[error("the workload has no flows")]
    Nothing,
}

impl Workload {
    /// Whether flows between the same hosts use one connection after the other: a collective's
    /// steps do, and independent flows bring their own.
    pub const fn keeps_connections(&self) -> bool {
        matches!(self, Workload::RingAllreduce { .. } | Workload::TreeAllreduce { .. })
    }

    /// The flows on a network of this many hosts with links of `rate_bps`.
    ///
    /// # Errors
    /// When it does not fit the network.
    pub fn flows(
        &self,
        hosts: u32,
        rate_bps: u64,
        chance: &mut Chance,
    ) -> Result<Vec<Flow>, WorkloadError> {
        self.check(hosts, rate_bps)?;
        let flows = match *self {
            Workload::Incast { senders, bytes } => {
                (1..=senders).map(|from| Flow::at_once(from, 0, bytes)).collect()
            }
            Workload::Permutation { bytes } => permutation(hosts, bytes, chance),
            Workload::AllToAll { bytes } => all_to_all(hosts, bytes),
            Workload::RingAllreduce { hosts, bytes } => ring(hosts, bytes),
            Workload::TreeAllreduce { hosts, bytes, pieces } => tree(hosts, bytes, pieces),
            Workload::Poisson { sizes, load_ppm, span } => {
                let gap = mean_gap(sizes, load_ppm, rate_bps);
                poisson(hosts, sizes, gap, span, chance)
            }
            Workload::Trace(ref flows) => flows.clone(),
        };
        check_flows(&flows, hosts)?;
        Ok(flows)
    }

    /// Refuses what would not fit before it is made.
    fn check(&self, there: u32, rate_bps: u64) -> Result<(), WorkloadError> {
        let hosts = u64::from(there);
        let (needed, flows) = match *self {
            Workload::Incast { senders, .. } => (senders.saturating_add(1).max(2), 1),
            Workload::Permutation { .. } => (2, hosts),
            Workload::AllToAll { .. } => (2, hosts * hosts.saturating_sub(1)),
            Workload::RingAllreduce { hosts, .. } => {
                (hosts.max(2), 2 * u64::from(hosts) * u64::from(hosts))
            }
            Workload::TreeAllreduce { hosts, pieces, .. } => {
                (hosts.max(2), 2 * u64::from(hosts) * u64::from(pieces))
            }
            Workload::Poisson { sizes, load_ppm, span } => {
                if sizes.mean_bytes() == 0 || load_ppm == 0 {
                    return Err(WorkloadError::Nothing);
                }
                let gap = mean_gap(sizes, load_ppm, rate_bps);
                (2, (hosts as f64 * span.as_nanos() as f64 / gap) as u64)
            }
            Workload::Trace(ref flows) => (2, flows.len() as u64),
        };
        if needed > there {
            return Err(WorkloadError::Hosts { needed, there });
        }
        if flows > MAX_FLOWS { Err(WorkloadError::Flows { flows }) } else { Ok(()) }
    }
}

fn check_flows(flows: &[Flow], hosts: u32) -> Result<(), WorkloadError> {
    for (number, flow) in (0_u32..).zip(flows) {
        let highest = flow.from.max(flow.to);
        if highest >= hosts {
            return Err(WorkloadError::Hosts { needed: highest.saturating_add(1), there: hosts });
        }
        if flow.from == flow.to {
            return Err(WorkloadError::Itself { flow: number, host: flow.from });
        }
        if flow.bytes == 0 || flow.bytes > MAX_MESSAGE_BYTES {
            return Err(WorkloadError::Bytes { flow: number.into(), bytes: flow.bytes });
        }
        if let Some(&after) = flow.after.iter().find(|&&after| after >= number) {
            return Err(WorkloadError::Order { flow: number, after });
        }
    }
    if flows.is_empty() { Err(WorkloadError::Nothing) } else { Ok(()) }
}

/// A single cycle through all hosts (Sattolo's algorithm): nobody sends to itself.
fn permutation(hosts: u32, bytes: u64, chance: &mut Chance) -> Vec<Flow> {
    let mut to: Vec<u32> = (0..hosts).collect();
    for last in (1..to.len()).rev() {
        to.swap(last, chance.below(last as u64) as usize);
    }
    (0..).zip(to).map(|(from, to)| Flow::at_once(from, to, bytes)).collect()
}

/// In the order of rounds in which every host receives from one other.
fn all_to_all(hosts: u32, bytes: u64) -> Vec<Flow> {
    let round = |step| (0..hosts).map(move |from| (from, (from + step) % hosts));
    let pairs = (1..hosts).flat_map(round);
    pairs.map(|(from, to)| Flow::at_once(from, to, bytes)).collect()
}

fn ring(hosts: u32, bytes: u64) -> Vec<Flow> {
    let part = bytes.div_ceil(hosts.into());
    let step = |step: u32| {
        (0..hosts).map(move |from| {
            let before = step.checked_sub(1);
            let after = before.map(|before| before * hosts + (from + hosts - 1) % hosts);
            let after = after.into_iter().collect();
            Flow { after, ..Flow::at_once(from, (from + 1) % hosts, part) }
        })
    };
    (0..2 * (hosts - 1)).flat_map(step).collect()
}

/// The children of host `h` are `2 h + 1` and `2 h + 2`.
fn tree(hosts: u32, bytes: u64, pieces: u32) -> Vec<Flow> {
    let part = bytes.div_ceil(pieces.max(1).into());
    let edges = hosts - 1;
    let children = |host: u32| [2 * host + 1, 2 * host + 2].into_iter().filter(|&c| c < hosts);
    let mut flows = Vec::new();
    for piece in 0..pieces {
        let first = piece * 2 * edges;
        // Up: host h's flow has number h - 1 counted from the last host, so children come before
        // parents.
        let up = |host: u32| first + (hosts - 1 - host);
        let down = |host: u32| first + edges + host - 1;
        // A host sends one piece after the other.
        let behind = |number: u32| number.checked_sub(2 * edges);
        for host in (1..hosts).rev() {
            let after = children(host).map(up).chain(behind(up(host))).collect();
            flows.push(Flow { after, ..Flow::at_once(host, (host - 1) / 2, part) });
        }
        for host in 1..hosts {
            let parent = (host - 1) / 2;
            let got: Vec<u32> = match parent {
                0 => children(0).map(up).collect(),
                _ => [down(parent)].into(),
            };
            let after = got.into_iter().chain(behind(down(host))).collect();
            flows.push(Flow { after, ..Flow::at_once(parent, host, part) });
        }
    }
    flows
}

/// Nanoseconds between the flows of a host, on average; positive.
fn mean_gap(sizes: FlowSizes, load_ppm: u32, rate_bps: u64) -> f64 {
    let bits = sizes.mean_bytes() as f64 * 8e9 * 1e6;
    bits / (rate_bps as f64 * f64::from(load_ppm)).max(1.0)
}

fn poisson(
    hosts: u32,
    sizes: FlowSizes,
    gap_ns: f64,
    span: Duration,
    chance: &mut Chance,
) -> Vec<Flow> {
    let mut flows = Vec::new();
    for from in 0..hosts {
        let mut own = chance.fork();
        let mut at = exponential(gap_ns, &mut own);
        while at < span.as_nanos() as f64 && (flows.len() as u64) < MAX_FLOWS {
            let other = own.below(u64::from(hosts) - 1) as u32;
            let to = if other < from { other } else { other + 1 };
            let bytes = sizes.draw(&mut own);
            let start = Time::from_nanos(at as u64);
            flows.push(Flow { at: start, ..Flow::at_once(from, to, bytes) });
            at += exponential(gap_ns, &mut own);
        }
    }
    flows.sort_by_key(|flow| flow.at);
    flows
}

/// A time at random with this mean.
fn exponential(mean_ns: f64, chance: &mut Chance) -> f64 {
    // 53 bits are what a double holds; never 0.
    let uniform = ((chance.word() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
    mean_ns * -libm::log(uniform)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    const RATE: u64 = 100_000_000_000;

    fn flows(workload: &Workload, hosts: u32) -> Vec<Flow> {
        workload.flows(hosts, RATE, &mut Chance::new(7)).unwrap()
    }

    #[test]
    fn a_permutation_gives_everybody_one_flow_each_way() {
        let flows = flows(&Workload::Permutation { bytes: 5 }, 33);
        let to: BTreeSet<u32> = flows.iter().map(|flow| flow.to).collect();
        assert!(to.len() == 33 && flows.iter().all(|flow| flow.from != flow.to));
        assert!(flows.iter().zip(0..).all(|(flow, number)| flow.from == number));
    }

    #[test]
    fn all_pairs_send_once() {
        let flows = flows(&Workload::AllToAll { bytes: 5 }, 9);
        let pairs: BTreeSet<(u32, u32)> = flows.iter().map(|flow| (flow.from, flow.to)).collect();
        assert_eq!((flows.len(), pairs.len()), (72, 72));
    }

    #[test]
    fn a_ring_passes_every_part_all_the_way_round() {
        let flows = flows(&Workload::RingAllreduce { hosts: 5, bytes: 12 }, 6);
        assert_eq!(flows.len(), 8 * 5);
        assert!(flows.iter().all(|flow| flow.bytes == 3 && flow.to == (flow.from + 1) % 5));
        for flow in &flows[5..] {
            let [before] = flow.after[..] else { panic!("{flow:?}") };
            assert_eq!(flows[before as usize].to, flow.from);
        }
    }

    #[test]
    fn a_tree_reduces_before_it_broadcasts() {
        let flows = flows(&Workload::TreeAllreduce { hosts: 6, bytes: 12, pieces: 3 }, 6);
        assert_eq!(flows.len(), 3 * 2 * 5);
        for (number, flow) in flows.iter().enumerate() {
            assert_eq!(flow.bytes, 4);
            // What a host sends on has arrived there.
            let is_down = number % 10 >= 5;
            let sources = flow.after.iter().filter(|&&at| flows[at as usize].to == flow.from);
            let children = (1..6).filter(|&host| (host - 1) / 2 == flow.from).count();
            let expected = if is_down && flow.from != 0 { 1 } else { children };
            assert_eq!(sources.count(), expected, "{number}: {flow:?}");
        }
    }

    #[test]
    fn random_flows_offer_the_load() {
        let sizes = FlowSizes::Storage;
        let span = Duration::from_millis(50);
        let workload = Workload::Poisson { sizes, load_ppm: 300_000, span };
        let flows = flows(&workload, 16);
        let bits = flows.iter().map(|flow| 8 * flow.bytes).sum::<u64>();
        let offered = 16 * RATE / 20 * 3 / 10;
        assert!(bits.abs_diff(offered) < offered / 20, "{bits} {offered}");
        assert!(flows.is_sorted_by_key(|flow| flow.at));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let refused = |workload: Workload, hosts| {
            workload.flows(hosts, RATE, &mut Chance::new(1)).unwrap_err()
        };
        let flow = Flow::at_once(0, 1, 1);
        let trace = |flow| refused(Workload::Trace([flow].into()), 4);
        assert_eq!(
            refused(Workload::Incast { senders: 4, bytes: 1 }, 4),
            WorkloadError::Hosts { needed: 5, there: 4 }
        );
        assert_eq!(
            refused(Workload::AllToAll { bytes: 1 }, 4_096),
            WorkloadError::Flows { flows: 4_096 * 4_095 }
        );
        let endless = Workload::Poisson {
            sizes: FlowSizes::Fixed(1),
            load_ppm: 1_000_000,
            span: Duration::from_micros(400),
        };
        let idle = Workload::Poisson {
            sizes: FlowSizes::Fixed(0),
            load_ppm: 1_000_000,
            span: Duration::from_millis(1_000),
        };
        assert_eq!(refused(idle, 4), WorkloadError::Nothing);
        assert!(matches!(refused(endless, 4), WorkloadError::Flows { .. }));
        assert_eq!(
            trace(Flow { to: 0, ..flow.clone() }),
            WorkloadError::Itself { flow: 0, host: 0 }
        );
        assert_eq!(
            trace(Flow { to: 9, ..flow.clone() }),
            WorkloadError::Hosts { needed: 10, there: 4 }
        );
        assert_eq!(
            trace(Flow { bytes: 0, ..flow.clone() }),
            WorkloadError::Bytes { flow: 0, bytes: 0 }
        );
        assert_eq!(
            trace(Flow { after: [0].into(), ..flow }),
            WorkloadError::Order { flow: 0, after: 0 }
        );
        assert_eq!(refused(Workload::Trace(Vec::new()), 4), WorkloadError::Nothing);
    }
}
