//! Flows between hosts with several ports.
//!
//! Each port is a NIC with queue pairs of its own, so a flow leaves by one and arrives at one.
//! Ports of the same number form a *rail*: a flow stays on its rail where sender and receiver both
//! have a port on it, and switches join these. Which of several rails it takes is drawn by a hash
//! of the flow, or it is cut into as many parts as there are. Where ports of the same number are
//! not joined, it takes one of the pairs of ports that are.

use alloc::vec::Vec;

use thiserror::Error;

use super::workload::{Flow, MAX_FLOWS};
use crate::topology::Nics;

/// How flows use the rails between two hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rails {
    /// Each takes one, by a hash.
    #[default]
    Hash,
    /// Each is cut into parts, one for each.
    All,
}

/// Why flows cannot be put on ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RailError {
    /// No switches join the ports of sender and receiver.
    #[error("no switches join hosts {from} and {to}")]
    Apart {
        /// The sending host.
        from: u32,
        /// The receiving host.
        to: u32,
    },
    /// There are too many parts.
    #[error("the flows have more than {MAX_FLOWS} parts")]
    Parts,
}

impl Rails {
    /// Flows between NICs instead of hosts. A flow that waits for another one waits for all of its
    /// parts.
    ///
    /// # Errors
    /// When no switches join sender and receiver, or there are too many parts.
    pub fn assign(self, flows: &[Flow], nics: &Nics) -> Result<Vec<Flow>, RailError> {
        // The first part of each flow so far, and the end.
        let (mut parts, mut first) = (Vec::new(), Vec::new());
        for (number, flow) in (0_u64..).zip(flows) {
            first.push(parts.len() as u32);
            let after = flow.after.iter().flat_map(|&before| {
                let before = before as usize;
                first[before]..first.get(before + 1).copied().unwrap_or(0)
            });
            let after: Vec<u32> = after.collect();
            let ways = ways(nics, flow.from, flow.to);
            if ways.is_empty() {
                return Err(RailError::Apart { from: flow.from, to: flow.to });
            }
            let taken = match self {
                Rails::All => &ways[..],
                Rails::Hash => {
                    let place = hash([flow.from.into(), flow.to.into(), number]);
                    core::slice::from_ref(&ways[(place % ways.len() as u64) as usize])
                }
            };
            let count = taken.len() as u64;
            for (place, &[from, to]) in (0..).zip(taken) {
                let bytes = flow.bytes / count + u64::from(place < flow.bytes % count);
                if bytes > 0 {
                    parts.push(Flow { from, to, bytes, at: flow.at, after: after.clone() });
                }
            }
            if parts.len() as u64 > MAX_FLOWS {
                return Err(RailError::Parts);
            }
        }
        Ok(parts)
    }
}

/// The pairs of NICs that a flow may take.
fn ways(nics: &Nics, from: u32, to: u32) -> Vec<[u32; 2]> {
    let pairs = || nics.of(from).flat_map(|near| nics.of(to).map(move |far| (near, far)));
    let joined = || pairs().filter(|(near, far)| near.1.island == far.1.island);
    let on_rails = joined().filter(|(near, far)| near.1.port == far.1.port);
    let mut ways: Vec<[u32; 2]> = on_rails.map(|(near, far)| [near.0, far.0]).collect();
    if ways.is_empty() {
        ways.extend(joined().map(|(near, far)| [near.0, far.0]));
    }
    ways
}

/// Mixing as in SplitMix64.
fn hash(parts: [u64; 3]) -> u64 {
    parts.into_iter().fold(0, |state: u64, part| {
        let sum = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        let once = (sum ^ sum >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let twice = (once ^ once >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        twice ^ twice >> 31
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;

    use ::topology::graph::Capacity;
    use ::topology::shape::Shape;
    use roce::Time;

    fn nics(rule: &str) -> Nics {
        let topology = rule.parse::<Shape>().unwrap().build(Capacity::default()).unwrap();
        Nics::of_topology(&topology)
    }

    fn flow(from: u32, to: u32, bytes: u64) -> Flow {
        Flow { from, to, bytes, at: Time::ZERO, after: Vec::new() }
    }

    #[test]
    fn a_flow_stays_on_a_rail_and_flows_take_all_of_them() {
        // 4 rails: port p of host h is node 4 h + p.
        let nics = nics("rail:2x2x4x2");
        let flows: Vec<Flow> = (0..64).map(|_| flow(0, 3, 10)).collect();
        let parts = Rails::Hash.assign(&flows, &nics).unwrap();
        assert!(parts.iter().all(|part| part.from < 4 && part.to == 12 + part.from));
        let rails: BTreeSet<u32> = parts.iter().map(|part| part.from).collect();
        assert_eq!(rails.len(), 4, "{rails:?}");
    }

    #[test]
    fn parts_make_up_the_flow_and_followers_wait_for_all() {
        let nics = nics("rail:2x2x4x2");
        let flows =
            vec![flow(0, 1, 10), flow(2, 3, 2), Flow { after: vec![0, 1], ..flow(1, 2, 9) }];
        let parts = Rails::All.assign(&flows, &nics).unwrap();
        let bytes: Vec<u64> = parts.iter().map(|part| part.bytes).collect();
        assert_eq!(bytes, [3, 3, 2, 2, 1, 1, 3, 2, 2, 2]);
        assert!(parts[6..].iter().all(|part| part.after == [0, 1, 2, 3, 4, 5]));
        assert!(parts[..6].iter().all(|part| part.after.is_empty()));
    }

    #[test]
    fn servers_of_a_bcube_reach_those_with_which_they_share_a_switch() {
        let nics = nics("bcube:3x1");
        // Host 0 shares its switch of level 0 with 1 and 2, and that of level 1 with 3 and 6.
        let taken = |to| Rails::Hash.assign(&[flow(0, to, 1)], &nics).map(|parts| parts[0].clone());
        assert_eq!(taken(2).map(|part| (part.from, part.to)), Ok((0, 4)));
        assert_eq!(taken(6).map(|part| (part.from, part.to)), Ok((1, 13)));
        assert_eq!(taken(4), Err(RailError::Apart { from: 0, to: 4 }));
    }
}
