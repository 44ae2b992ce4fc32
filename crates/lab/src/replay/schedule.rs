//! Who sends what to whom, phase by phase: the demand graph of a pattern, with bytes for rates.

use std::collections::BTreeMap;

use parfait::demand::Demand;
use parfait::pattern::Pattern;

use service::Error;

/// Most ranks of a replayed job: all of them meet at one.
pub const MAX_RANKS: u32 = 256;

/// Longest message: buffers for several of them are registered.
pub const MAX_MESSAGE_BYTES: u64 = 256 << 20;

/// Most times that a phase is exchanged in an iteration.
pub const MAX_STEPS: u32 = 4096;

/// What all ranks exchange in an iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    ranks: u32,
    /// Edges by step: sender and receiver, and the bytes of their message.
    steps: Vec<BTreeMap<(u32, u32), u64>>,
}

/// What one rank does in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The phase of the pattern, from 0.
    pub phase: usize,
    /// To whom it sends how much.
    pub sends: Vec<(u32, u64)>,
    /// From whom it receives how much.
    pub receives: Vec<(u32, u64)>,
}

impl Schedule {
    /// The edges with the highest rate carry `bytes` in an iteration, others in proportion to their
    /// rates. Each phase is exchanged in `steps` equal parts, one after the other, as rings do that
    /// reduce.
    ///
    /// # Errors
    /// When the pattern is too large to be replayed, or a message is too long or would have no
    /// bytes.
    pub fn new(pattern: &Pattern, bytes: u64, steps: u32) -> Result<Schedule, Error> {
        let demand = Demand::of(pattern).map_err(Error::from_cause)?;
        let ranks = demand.workers();
        if !(2..=MAX_RANKS).contains(&ranks) {
            let why = format!("{pattern} has {ranks} ranks; 2 to {MAX_RANKS} can be replayed");
            return Err(Error::invalid(why).hint("choose other sizes"));
        }
        if !(1..=MAX_STEPS).contains(&steps) {
            let why = format!("a phase has {steps} steps; it may have 1 to {MAX_STEPS}");
            return Err(Error::invalid(why).hint("choose another --steps"));
        }
        let phases: Vec<Vec<(u32, u32, u64)>> =
            (0..demand.phases()).map(|phase| demand.graph(phase)).collect();
        let top = phases.iter().flatten().map(|edge| edge.2).max().unwrap_or(1);
        let share = |rate: u64| {
            let whole = u128::from(bytes) * u128::from(rate) / u128::from(top) / u128::from(steps);
            u64::try_from(whole).unwrap_or(u64::MAX)
        };
        let mut all = Vec::new();
        for edges in &phases {
            let mut step = BTreeMap::new();
            for &(from, to, rate) in edges.iter().filter(|(from, to, _)| from != to) {
                *step.entry((from, to)).or_insert(0) += share(rate);
            }
            if let Some(((from, to), part)) =
                step.iter().find(|(_, part)| !(1..=MAX_MESSAGE_BYTES).contains(*part))
            {
                let why = format!("the message from rank {from} to {to} would have {part} bytes");
                let hint = format!("1 to {MAX_MESSAGE_BYTES}: choose another --bytes-per-edge");
                return Err(Error::invalid(why).hint(hint));
            }
            all.extend((0..steps).map(|_| step.clone()));
        }
        Ok(Schedule { ranks, steps: all })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// What a rank does in an iteration, step by step; steps in which it does nothing are left out.
    pub fn of_rank(&self, rank: u32, steps_per_phase: u32) -> Vec<Step> {
        let per_phase = steps_per_phase.max(1) as usize;
        let steps = self.steps.iter().enumerate().map(|(at, edges)| Step {
            phase: at / per_phase,
            sends: edges
                .iter()
                .filter(|((from, _), _)| *from == rank)
                .map(|((_, to), bytes)| (*to, *bytes))
                .collect(),
            receives: edges
                .iter()
                .filter(|((_, to), _)| *to == rank)
                .map(|((from, _), bytes)| (*from, *bytes))
                .collect(),
        });
        steps.filter(|step| !step.sends.is_empty() || !step.receives.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(pattern: &str, bytes: u64, steps: u32) -> Result<Schedule, Error> {
        Schedule::new(&pattern.parse().expect("a pattern"), bytes, steps)
    }

    #[test]
    fn a_ring_sends_to_the_next_and_waits_for_the_one_before() {
        let ring = schedule("ring:3@100M", 4096, 2).expect("small");
        let step = Step { phase: 0, sends: vec![(0, 2048)], receives: vec![(1, 2048)] };
        assert_eq!(ring.of_rank(2, 2), [step.clone(), step]);
    }

    #[test]
    fn slower_edges_carry_less_and_idle_phases_are_left_out() {
        let groups = schedule("hierarchical:2x2@1G,4G", 4000, 1).expect("small");
        let member = groups.of_rank(1, 1);
        assert_eq!(member.len(), 2, "{member:?}");
        assert_eq!((member[0].phase, &member[0].sends), (0, &vec![(0, 1000)]));
        assert_eq!((member[1].phase, &member[1].receives), (2, &vec![(0, 1000)]));
        assert_eq!(groups.of_rank(0, 1)[1].sends, [(2, 4000)]);
    }

    #[test]
    fn what_one_sends_the_other_receives_in_every_pattern() {
        for pattern in [
            "ring:5@1G",
            "tree:7@1G",
            "torus:3x2@5G,2G",
            "hierarchical:2x3@2G,10G",
            "ps:3+2@500M",
            "async-ps:3+2@500M",
            "mesh:4@1G",
            "pipeline:4@2G",
            "parallel:2x2x2@20G,5G,1G",
        ] {
            let all = schedule(pattern, 1 << 20, 1).expect(pattern);
            let ranks: Vec<Vec<Step>> = (0..all.ranks()).map(|rank| all.of_rank(rank, 1)).collect();
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for (rank, step) in
                (0..).zip(&ranks).flat_map(|(rank, own)| own.iter().map(move |step| (rank, step)))
            {
                sent.extend(step.sends.iter().map(|&(to, bytes)| (step.phase, rank, to, bytes)));
                let from =
                    step.receives.iter().map(|&(from, bytes)| (step.phase, from, rank, bytes));
                received.extend(from);
            }
            sent.sort_unstable();
            received.sort_unstable();
            assert!(!sent.is_empty() && sent == received, "{pattern}");
            assert_eq!(sent.iter().map(|edge| edge.3).max(), Some(1 << 20), "{pattern}");
        }
    }

    #[test]
    fn what_cannot_be_replayed_is_refused() {
        for (pattern, bytes, steps, why) in [
            ("ring:1@1G", 4096, 1, "has 1 ranks"),
            ("mesh:257@1", 4096, 1, "has 257 ranks"),
            ("ring:2@1G", MAX_MESSAGE_BYTES + 1, 1, "would have 268435457 bytes"),
            ("torus:2x2@1G,1", 4096, 1, "would have 0 bytes"),
            ("ring:2@1G", 4096, 0, "has 0 steps"),
            ("ring:2@1G", 4096, 4097, "has 4097 steps"),
        ] {
            let error = schedule(pattern, bytes, steps).expect_err(pattern).to_line();
            assert!(error.contains(why) && error.contains("hint: "), "{pattern}: {error}");
        }
    }
}
