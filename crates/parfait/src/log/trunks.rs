//! Who has what on each link of a trunk. On every link, jobs differ in their DSCP; after an outage
//! they may not, until the entries behind it say what is done about that.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::ledger::JobId;
use crate::loads::Load;
use crate::queues::Dscp;

/// A job on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// The job.
    pub job: JobId,
    /// That of its packets.
    pub dscp: Dscp,
    /// What it has there, in bit/s.
    pub bps: u64,
}

/// By trunk: who has what on each of its links, in the order of admission.
#[derive(Clone, Debug)]
pub(super) struct Trunks(Vec<Vec<Reserved>>);

impl Trunks {
    pub(super) fn new(count: usize) -> Trunks {
        Trunks(alloc::vec![Vec::new(); count])
    }

    pub(super) fn on(&self, trunk: u32) -> &[Reserved] {
        &self.0[trunk as usize]
    }

    pub(super) fn add(&mut self, job: JobId, dscp: Dscp, loads: &[Load]) {
        for load in loads {
            self.0[load.trunk as usize].push(Reserved { job, dscp, bps: load.bps });
        }
    }

    pub(super) fn remove(&mut self, job: JobId, loads: &[Load]) {
        for load in loads {
            self.0[load.trunk as usize].retain(|one| one.job != job);
        }
    }

    /// A job has another DSCP from now on.
    pub(super) fn mark(&mut self, job: JobId, dscp: Dscp, loads: &[Load]) {
        for load in loads {
            let here = self.0[load.trunk as usize].iter_mut();
            here.filter(|one| one.job == job).for_each(|one| one.dscp = dscp);
        }
    }

    /// DSCPs that others than this job have where these loads are, as bits.
    pub(super) fn taken(&self, loads: &[Load], job: JobId) -> u64 {
        let here = loads.iter().flat_map(|load| self.on(load.trunk));
        here.filter(|one| one.job != job).fold(0, |bits, one| bits | 1 << one.dscp.value())
    }

    /// Jobs that meet another one with their DSCP on some link: of each pair the one that yields,
    /// or else the later one.
    pub(super) fn clashes(&self, yields: impl Fn(JobId) -> bool) -> BTreeSet<JobId> {
        let mut clashing = BTreeSet::new();
        for here in &self.0 {
            let mut first: BTreeMap<Dscp, JobId> = BTreeMap::new();
            let mut sorted: Vec<&Reserved> = here.iter().collect();
            sorted.sort_unstable_by_key(|one| (yields(one.job), one.job));
            for one in sorted {
                if *first.entry(one.dscp).or_insert(one.job) != one.job {
                    clashing.insert(one.job);
                }
            }
        }
        clashing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dscp(value: u8) -> Dscp {
        Dscp::new(value).expect("a DSCP")
    }

    #[test]
    fn of_jobs_that_meet_with_one_dscp_the_one_that_yields_clashes() {
        let mut trunks = Trunks::new(2);
        let load = |trunk| Load { trunk, bps: 1 };
        let [a, b] = [1, 2].map(|value| Dscp::all().nth(value).expect("there are more"));
        trunks.add(1, a, &[load(0), load(1)]);
        trunks.add(2, b, &[load(0)]);
        trunks.add(3, a, &[load(1)]);
        assert_eq!(trunks.clashes(|_| false), [3].into());
        assert_eq!(trunks.clashes(|job| job == 1), [1].into());
        assert_eq!(trunks.taken(&[load(0)], 1), 1 << b.value());
        trunks.mark(1, dscp(b.value()), &[load(0), load(1)]);
        assert_eq!(trunks.clashes(|_| false), [2].into());
        trunks.remove(2, &[load(0)]);
        assert!(trunks.clashes(|_| false).is_empty());
    }
}
