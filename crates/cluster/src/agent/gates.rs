//! When the exchanges of this machine's jobs may begin: transmission gates of the transport
//! ([`nic::rates`]), as the plan in force says.
//!
//! A gate can do harm. A job whose iterations take longer than it said misses each time by a
//! little, and would then wait for the rest of a period in every iteration. So the agent looks at
//! how long exchanges wait, and drops the gate of a job that waits too long twice in a row; it says
//! so, to its log and to the brain. The gate comes back with other times.

use std::collections::BTreeMap;
use std::sync::Arc;

use nic::rates::{Exchanges, Punctuality, RateTable, TransmissionGate};
use parfait::agent::{Phase, Share};
use parfait::ledger::JobId;
use parfait::shifts::TOLERANCE_PARTS;
use service::log;

/// A job whose exchanges have times.
#[derive(Clone, Debug)]
struct Timed {
    job: JobId,
    name: String,
    phase: Phase,
    punctuality: Punctuality,
    /// How long its exchanges waited on average, in nanoseconds, when its gate was dropped.
    dropped: Option<u64>,
}

impl Timed {
    /// How the log and the brain name it.
    fn title(&self) -> String {
        match self.name.is_empty() {
            true => format!("job {}", self.job),
            false => format!("job '{}'", self.name),
        }
    }

    fn gate(&self) -> TransmissionGate {
        let Phase { period_ns, shift_ns, exchange_ns } = self.phase;
        TransmissionGate {
            period_ns,
            shift_ns,
            tolerance_ns: period_ns / TOLERANCE_PARTS,
            quiet_ns: period_ns.saturating_sub(exchange_ns) / 2,
        }
    }
}

/// See the module's text. Gates stay in force when it is dropped.
#[derive(Debug)]
pub(super) struct Gates {
    table: Arc<RateTable>,
    /// By DSCP.
    timed: BTreeMap<u8, Timed>,
    /// The counters have another size and cannot be replaced.
    is_blind: bool,
}

impl Gates {
    pub(super) fn new(table: Arc<RateTable>) -> Gates {
        Gates { table, timed: BTreeMap::new(), is_blind: false }
    }

    /// Puts the times of a plan into force. A wire knows a packet's DSCP and not its port: where
    /// the shares of a DSCP differ in their times, there is no gate.
    pub(super) fn apply(&mut self, shares: &[Share], name: impl Fn(JobId) -> String) {
        let mut wanted: BTreeMap<u8, Option<(JobId, Phase)>> = BTreeMap::new();
        for share in shares {
            let own = share.phase.map(|phase| (share.job, phase));
            let known = wanted.entry(share.dscp.value()).or_insert(own);
            *known = known.filter(|known| own == Some(*known));
        }
        let mut timed = BTreeMap::new();
        for (dscp, (job, phase)) in wanted.into_iter().filter_map(|(dscp, one)| Some((dscp, one?)))
        {
            let before =
                self.timed.remove(&dscp).filter(|old| (old.job, old.phase) == (job, phase));
            let new = || Timed {
                job,
                name: name(job),
                phase,
                punctuality: Punctuality::since(self.table.exchanges(dscp)),
                dropped: None,
            };
            timed.insert(dscp, before.unwrap_or_else(new));
        }
        self.timed = timed;
        self.set();
    }

    /// To be called once a second: follows the clock, and drops the gates of jobs that do not keep
    /// their cycle.
    pub(super) fn check(&mut self) {
        self.table.follow_clock();
        self.mend();
        let table = Arc::clone(&self.table);
        self.assess(|dscp| table.exchanges(dscp));
    }

    /// Replaces counters that somebody truncated, and says so.
    fn mend(&mut self) {
        let mended = self.table.repair();
        match &mended {
            Ok(true) => log::line(
                "rate limits: 'buckets' had another size, and is replaced: see who is in the folder's group",
            ),
            Err(error) if !self.is_blind => {
                log::line(format!("rate limits: 'buckets' cannot be replaced: {error}"));
            }
            Ok(false) | Err(_) => {}
        }
        self.is_blind = mended.is_err();
    }

    fn assess(&mut self, counted: impl Fn(u8) -> Exchanges) {
        let mut is_changed = false;
        for (dscp, timed) in &mut self.timed {
            let late = timed.punctuality.assess(counted(*dscp), timed.phase.period_ns);
            if let Some(mean_ns) = late.filter(|_| timed.dropped.is_none()) {
                timed.dropped = Some(mean_ns);
                is_changed = true;
                log::line(complaint(timed, mean_ns));
            }
        }
        if is_changed {
            self.set();
        }
    }

    /// What is wrong, for people; empty if nothing is.
    pub(super) fn note(&self) -> String {
        let dropped =
            self.timed.values().filter_map(|timed| Some(complaint(timed, timed.dropped?)));
        dropped.collect::<Vec<String>>().join("; ")
    }

    fn set(&self) {
        let in_force = self.timed.iter().filter(|(_, timed)| timed.dropped.is_none());
        self.table.set_gates(in_force.map(|(dscp, timed)| (*dscp, timed.gate())));
    }
}

fn complaint(timed: &Timed, mean_ns: u64) -> String {
    format!(
        "{} does not keep its period of {:.1} ms: its exchanges waited {:.1} ms each, and are not held back any more; \
         submit it again with the cycle that it has when it runs alone",
        timed.title(),
        timed.phase.period_ns as f64 / 1e6,
        mean_ns as f64 / 1e6
    )
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use nic::rates::JUDGED_EXCHANGES;
    use parfait::job::Latency;
    use parfait::queues::Dscp;

    use super::*;

    const PHASE: Phase =
        Phase { period_ns: 200_000_000, shift_ns: 30_000_000, exchange_ns: 70_000_000 };

    struct Lab {
        folder: PathBuf,
        table: Arc<RateTable>,
        gates: Gates,
        counted: Exchanges,
    }

    impl Lab {
        fn new(name: &str) -> Lab {
            let folder = std::env::temp_dir().join(format!("gates-{name}-{}", std::process::id()));
            let table = Arc::new(RateTable::open(&folder).expect("a temporary folder"));
            let gates = Gates::new(Arc::clone(&table));
            Lab { folder, table, gates, counted: Exchanges::default() }
        }

        fn apply(&mut self, shares: &[Share]) {
            self.gates.apply(shares, |job| format!("n{job}"));
        }

        /// Judges after as many more exchanges of DSCP 26, which have waited so long each.
        fn assess(&mut self, exchanges: u64, wait_ns: u64) {
            self.counted.begun += exchanges;
            self.counted.waited_ns += exchanges * wait_ns;
            let counted = self.counted;
            self.gates.assess(|dscp| if dscp == 26 { counted } else { Exchanges::default() });
        }
    }

    impl Drop for Lab {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    fn share(port: u8, job: JobId, dscp: u8, phase: Option<Phase>) -> Share {
        let dscp = Dscp::new(dscp).expect("a job's");
        Share { port, job, dscp, bps: 1, burst_bytes: 0, latency: Latency::Normal, phase }
    }

    #[test]
    fn times_of_the_plan_are_gates_where_all_ports_agree() {
        let mut lab = Lab::new("plan");
        let later = Phase { shift_ns: 31_000_000, ..PHASE };
        lab.apply(&[
            share(1, 1, 26, Some(PHASE)),
            share(1, 2, 27, None),
            share(1, 3, 28, Some(PHASE)),
            share(1, 4, 29, Some(PHASE)),
            share(2, 1, 26, Some(PHASE)),
            share(2, 3, 28, Some(later)),
            share(2, 5, 29, None),
            share(3, 6, 28, Some(later)),
        ]);
        let gate = TransmissionGate {
            period_ns: 200_000_000,
            shift_ns: 30_000_000,
            tolerance_ns: 10_000_000,
            quiet_ns: 65_000_000,
        };
        assert_eq!(
            [26, 27, 28, 29].map(|dscp| lab.table.gate(dscp)),
            [Some(gate), None, None, None]
        );
        lab.apply(&[share(1, 1, 26, Some(later))]);
        assert_eq!(lab.table.gate(26).map(|gate| gate.shift_ns), Some(31_000_000));
        lab.apply(&[]);
        assert_eq!(lab.table.gate(26), None);
    }

    #[test]
    fn counters_that_were_set_back_are_followed() {
        let mut lab = Lab::new("back");
        lab.apply(&[share(1, 1, 26, Some(PHASE))]);
        lab.assess(u64::MAX, 0);
        lab.counted = Exchanges::default();
        lab.assess(1, 0);
        lab.assess(JUDGED_EXCHANGES, 21_000_000);
        lab.assess(JUDGED_EXCHANGES, 21_000_000);
        assert_eq!(lab.table.gate(26), None, "it is judged as before");
    }

    #[test]
    fn a_job_that_does_not_keep_its_cycle_loses_its_gate_until_its_times_change() {
        let mut lab = Lab::new("cycle");
        lab.apply(&[share(1, 1, 26, Some(PHASE))]);
        // The first exchange may have waited for long, others a little: so many and no fewer are
        // judged together.
        lab.assess(1, 199_000_000);
        lab.assess(JUDGED_EXCHANGES - 1, 14_000_000);
        assert!(lab.table.gate(26).is_some() && lab.gates.note().is_empty());
        for _ in 0..3 {
            lab.assess(JUDGED_EXCHANGES, 21_000_000);
            lab.assess(JUDGED_EXCHANGES, 19_000_000);
        }
        assert!(lab.table.gate(26).is_some(), "now and then is by chance");
        lab.assess(2 * JUDGED_EXCHANGES - 1, 21_000_000);
        lab.assess(JUDGED_EXCHANGES - 1, 21_000_000);
        assert!(lab.table.gate(26).is_some(), "one is missing");
        lab.assess(1, 21_000_000);
        assert_eq!(lab.table.gate(26), None);
        let note = lab.gates.note();
        assert!(note.contains("job 'n1' does not keep its period of 200.0 ms"), "{note}");
        assert!(note.contains("waited 21.0 ms each"), "{note}");
        // A plan that says the same of it, and exchanges that nothing holds back, change nothing.
        lab.assess(100, 0);
        lab.apply(&[share(1, 1, 26, Some(PHASE)), share(1, 2, 27, Some(PHASE))]);
        assert!(lab.table.gate(26).is_none() && lab.table.gate(27).is_some());
        assert_eq!(lab.gates.note(), note);
        lab.apply(&[share(1, 1, 26, Some(Phase { period_ns: 220_000_000, ..PHASE }))]);
        assert!(lab.table.gate(26).is_some() && lab.gates.note().is_empty());
    }
}
