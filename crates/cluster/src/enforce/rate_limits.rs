//! Rate limits of what this machine sends, kept by the senders themselves: the table that every
//! wire of the transport reads ([`nic::rates`]), also where packets pass no queue of the kernel, as
//! over AF_XDP.
//!
//! A wire knows the DSCP of a packet and not its port. So a job has one rate limit for its machine:
//! the sum of its rate limits at the ports, or none where one of them lets it send what it can.

use std::collections::BTreeMap;
use std::sync::Arc;

use nic::rates::{RateLimit, RateTable};
use parfait::ledger::JobId;

use super::{EnforceError, Enforcer, PortPlan, Sent};

/// A job that the plans in force name.
#[derive(Clone, Debug)]
struct Member {
    /// The first port that names it: what it has sent is told for that one.
    interface: String,
    dscp: u8,
    /// What its DSCP had sent before.
    before: u64,
}

/// See the module's text. Rate limits stay in force when it is dropped.
#[derive(Debug)]
pub struct RateLimits {
    table: Arc<RateTable>,
    members: BTreeMap<JobId, Member>,
}

impl RateLimits {
    /// Sets the rate limits of this table, usually that in [`nic::rates::FOLDER`].
    pub fn new(table: Arc<RateTable>) -> RateLimits {
        RateLimits { table, members: BTreeMap::new() }
    }
}

impl Enforcer for RateLimits {
    /// Never fails: a table can be written once it is open.
    fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError> {
        let mut rate_limits: BTreeMap<u8, Option<RateLimit>> = BTreeMap::new();
        let mut members = BTreeMap::new();
        let all =
            ports.iter().flat_map(|port| port.plan.bindings().iter().map(move |own| (port, own)));
        for (port, binding) in all {
            let (job, dscp) = (binding.guarantee.job, binding.guarantee.dscp.value());
            let sum = rate_limits.entry(dscp).or_insert(Some(RateLimit::default()));
            *sum = sum.zip(binding.rate_limit_bps).map(|(sum, own)| RateLimit {
                bps: sum.bps.saturating_add(own),
                burst_bytes: sum.burst_bytes.saturating_add(binding.guarantee.burst_bytes),
            });
            members.entry(job).or_insert_with(|| match self.members.get(&job) {
                Some(known) if known.dscp == dscp => known.clone(),
                _ => {
                    let before = self.table.sent_bytes(dscp);
                    Member { interface: port.interface.clone(), dscp, before }
                }
            });
        }
        // A pace of 0 would be none.
        let least = |limit: RateLimit| RateLimit { bps: limit.bps.max(1), ..limit };
        self.table.set(rate_limits.into_iter().filter_map(|(dscp, sum)| Some((dscp, least(sum?)))));
        self.members = members;
        Ok(())
    }

    /// Packets that wait have not left their queue pairs, so none are dropped and none are counted
    /// as waiting.
    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
        let sent = |(job, member): (&JobId, &Member)| {
            let bytes = self.table.sent_bytes(member.dscp);
            Sent {
                interface: member.interface.clone(),
                job: *job,
                // Counters begin anew with another file.
                bytes: bytes.checked_sub(member.before).unwrap_or(bytes),
                dropped_packets: 0,
                backlog_bytes: 0,
            }
        };
        Ok(self.members.iter().map(sent).collect())
    }
}

/// Rate limits beside queues that are too few for all jobs: what the queues do not assure, senders
/// keep. The use by job is what senders count.
#[derive(Debug)]
pub struct WithRateLimits<E> {
    queues: E,
    rate_limits: RateLimits,
}

impl<E: Enforcer> WithRateLimits<E> {
    /// Both.
    pub fn new(queues: E, rate_limits: RateLimits) -> WithRateLimits<E> {
        WithRateLimits { queues, rate_limits }
    }
}

impl<E: Enforcer> Enforcer for WithRateLimits<E> {
    /// Rate limits are set once the queues are as they should be, and stay as they were otherwise.
    fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError> {
        self.queues.apply(ports)?;
        self.rate_limits.apply(ports)
    }

    fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
        self.rate_limits.sent()
    }
}

#[cfg(test)]
mod tests {
    use parfait::job::Latency;
    use parfait::queues::{Dscp, Guarantee, Plan, Port, Scheme};

    use super::*;

    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("cluster-rate-limits-{name}-{}", std::process::id());
            Folder(std::env::temp_dir().join(name))
        }

        fn rate_limits(&self) -> RateLimits {
            RateLimits::new(Arc::new(RateTable::open(&self.0).expect("a temporary folder")))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn plan(interface: &str, scheme: Scheme, jobs: &[(u64, u8, u64)]) -> PortPlan {
        let port = Port {
            rate_bps: 1_000_000_000,
            queues: 1,
            weight_units: 100,
            quantum_bytes: 1500,
            frame_bytes: 1538,
            buffer_bytes: 1 << 20,
        };
        let guarantees: Vec<Guarantee> = jobs
            .iter()
            .map(|&(job, dscp, bps)| Guarantee {
                job,
                dscp: Dscp::new(dscp).expect("a job's"),
                bps,
                flows: 1,
                latency: Latency::Normal,
                burst_bytes: 0,
                is_contended: true,
            })
            .collect();
        let plan = Plan::new(port, scheme, &guarantees).expect("it fits");
        PortPlan { interface: interface.to_owned(), plan }
    }

    #[test]
    fn jobs_have_the_sum_of_their_rate_limits_and_none_where_a_port_has_none() {
        let folder = Folder::new("sum");
        let mut rate_limits = folder.rate_limits();
        // In one queue, all but the job with the largest ratio are paced.
        let jobs = [(1, 10, 600_000_000), (2, 18, 300_000_000)];
        let both = [plan("a", Scheme::Paced, &jobs), plan("b", Scheme::Paced, &jobs)];
        let limit = both[0].plan.bindings().iter().find(|own| own.guarantee.job == 2);
        let limit = limit.and_then(|own| own.rate_limit_bps).expect("it is paced");
        rate_limits.apply(&both).expect("it is ours");
        assert_eq!((rate_limits.table.bps(18), rate_limits.table.bps(10)), (2 * limit, 0));
        let sent = rate_limits.sent().expect("it is ours");
        assert_eq!(sent.len(), 2);
        assert!(sent.iter().all(|sent| sent.interface == "a" && sent.bytes == 0));
        // At the second port job 2 is alone, and not paced.
        rate_limits
            .apply(&[both[0].clone(), plan("b", Scheme::Paced, &jobs[1..])])
            .expect("it is ours");
        assert_eq!(rate_limits.table.bps(18), 0);
        rate_limits.apply(&both[..1]).expect("it is ours");
        assert_eq!(rate_limits.table.bps(18), limit);
        rate_limits.apply(&[]).expect("it is ours");
        assert_eq!(rate_limits.table.bps(18), 0);
        assert_eq!(rate_limits.sent().expect("it is ours"), []);
    }

    #[test]
    fn counters_of_a_file_that_was_truncated_never_wrap() {
        use std::os::unix::fs::FileExt;
        let folder = Folder::new("truncated");
        let mut rate_limits = folder.rate_limits();
        let buckets = std::fs::OpenOptions::new().write(true).open(folder.0.join("buckets"));
        let buckets = buckets.expect("it is ours");
        let count = |bytes: u64| {
            // The second word of the bucket of DSCP 18.
            buckets.write_all_at(&bytes.to_ne_bytes(), 18 * 64 + 8).expect("it is ours");
        };
        count(1000);
        let plan = plan("a", Scheme::Paced, &[(2, 18, 300_000_000)]);
        rate_limits.apply(&[plan]).expect("it is ours");
        count(5000);
        assert_eq!(rate_limits.sent().expect("it is ours")[0].bytes, 4000);
        buckets.set_len(0).expect("it is ours");
        assert_eq!(rate_limits.sent().expect("it is ours")[0].bytes, 0);
    }

    /// Queues that refuse, or not.
    struct Queues(bool);

    impl Enforcer for Queues {
        fn apply(&mut self, ports: &[PortPlan]) -> Result<(), EnforceError> {
            let refused = || EnforceError::NoInterface(ports[0].interface.clone());
            self.0.then_some(()).ok_or_else(refused)
        }

        fn sent(&mut self) -> Result<Vec<Sent>, EnforceError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn rate_limits_stay_as_they_were_where_the_queues_refuse() {
        let folder = Folder::new("beside");
        let jobs = [(1, 10, 600_000_000), (2, 18, 300_000_000)];
        let mut both = WithRateLimits::new(Queues(true), folder.rate_limits());
        both.apply(&[plan("a", Scheme::Paced, &jobs)]).expect("it is ours");
        let limit = both.rate_limits.table.bps(18);
        assert!(limit > 0);
        assert_eq!(both.sent().expect("counters").len(), 2, "senders count");
        both.queues = Queues(false);
        both.apply(&[plan("a", Scheme::Paced, &[(2, 18, 200_000_000), (3, 20, 300_000_000)])])
            .expect_err("the queues refuse");
        assert_eq!((both.rate_limits.table.bps(18), both.rate_limits.table.bps(20)), (limit, 0));
    }
}
