//! The agent of a host or switch: enforces the last good plan of the highest term that it knows,
//! port by port.
//!
//! What it keeps to:
//!
//! - A1: it never accepts a command of a lower term than one that it accepted or refused before,
//!   nor, within a term, one with a lower sequence.
//! - A2: a repeated command gets the same answer and changes nothing.
//! - A3: if nobody answers, or a plan is refused, the last good plan stays in force (fail static).
//! - A4: from one command to the next, term and sequence grow by [`MAX_STEP`] at most, so a damaged
//!   number cannot shut out all commands after it.
//!
//! The caller makes [`Saved`] durable before it enforces a plan or sends an answer, and starts
//! again from it; an agent that forgets its term cannot keep to A1.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use thiserror::Error;

use crate::job::Latency;
use crate::ledger::JobId;
use crate::queues::Dscp;
use crate::seeded::{Bug, Seeded};
use crate::shifts::MAX_PERIOD_NS;

/// Most shares of a plan: 255 ports, on each of which jobs with a guarantee differ by one of 61
/// DSCPs, and jobs without one, each of which has one of at most 4,096 slots of the host.
pub const MAX_SHARES: usize = 255 * 61 + 4096;

/// Most by which a term, or a sequence within a term, exceeds the one before. Terms may be
/// revisions of etcd: 30,000 writes a second reach this after 290 years.
pub const MAX_STEP: u64 = 1 << 48;

/// What a job is guaranteed at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The port through which packets leave, as the topology numbers it.
    pub port: u8,
    /// The job.
    pub job: JobId,
    /// That of its packets; jobs with a guarantee at a port differ in it.
    pub dscp: Dscp,
    /// Bits per second that it may send there whatever others do; 0 for a job that is only known,
    /// and gets no queue.
    pub bps: u64,
    /// Bytes that each of its workers may send at once.
    pub burst_bytes: u64,
    /// How much it minds waiting.
    pub latency: Latency,
    /// When its exchanges may begin; `None` for whenever it likes.
    pub phase: Option<Phase>,
}

/// When the exchanges of a job may begin, so that jobs take turns on the links that they share
/// ([`crate::shifts`]): at `shift_ns + n * period_ns` of Unix time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// From one exchange to the next, in nanoseconds; at most [`MAX_PERIOD_NS`].
    pub period_ns: u64,
    /// Below the period.
    pub shift_ns: u64,
    /// How long an exchange lasts; at least 1 and below the period.
    pub exchange_ns: u64,
}

impl Phase {
    /// Whether it can be meant.
    pub fn is_valid(&self) -> bool {
        let Phase { period_ns, shift_ns, exchange_ns } = *self;
        period_ns <= MAX_PERIOD_NS && shift_ns < period_ns && (1..period_ns).contains(&exchange_ns)
    }
}

/// What is guaranteed at the ports of a node, sorted by port and job.
pub type Plan = Vec<Share>;

/// Orders commands: terms first, then the sequence within a term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The leader's term: the revision with which it took the lease.
    pub term: u64,
    /// The leader's number of the command, from 1; it grows from command to command, also to
    /// different agents.
    pub sequence: u64,
}

/// A whole plan. Commands that say what changes would depend on each other; these do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its place in the order of commands.
    pub position: Position,
    /// The plan.
    pub plan: Plan,
}

/// Why a command is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Objection {
    /// A leader with a higher term was here.
    #[error("the term is over: a leader of term {seen} was here")]
    LowerTerm {
        /// Its term.
        seen: u64,
    },
    /// A later command of this term was here.
    #[error("overtaken by command {seen} of the same term")]
    Overtaken {
        /// Its sequence.
        seen: u64,
    },
    /// The term or the sequence is too far beyond the last one.
    #[error(
        "its term or sequence is more than {MAX_STEP} beyond {seen}, the last one here: it is damaged"
    )]
    Leap {
        /// The term or sequence that was seen.
        seen: u64,
    },
    /// The plan has too many shares.
    #[error("{0} shares for one node; there can be {MAX_SHARES}")]
    TooManyShares(usize),
    /// The shares of the plan are not sorted, or one is there twice.
    #[error("job {0} is out of order, or twice at one port")]
    Unsorted(JobId),
    /// Packets of two jobs could not be told apart.
    #[error("two jobs with a guarantee at port {port} have DSCP {dscp}")]
    SharedDscp {
        /// The port.
        port: u8,
        /// The code point.
        dscp: Dscp,
    },
    /// The plan names a port that this node does not have.
    #[error("there is no port {0}")]
    NoPort(u8),
    /// The plan guarantees more than a port carries.
    #[error("the plan guarantees {planned_bps} bit/s at port {port}, which carries {port_bps}")]
    Overbooked {
        /// The port.
        port: u8,
        /// What the plan guarantees there.
        planned_bps: u64,
        /// What it carries.
        port_bps: u64,
    },
    /// The plan has a time for a job that cannot be one.
    #[error("the times of job {0} at a port are impossible")]
    Phase(JobId),
    /// The node could not enforce it; the plan before it is in force.
    #[error("the plan could not be enforced; the one before is in force")]
    NotEnforced,
}

/// What a job was measured to use at a port since the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measure {
    /// The port.
    pub port: u8,
    /// The job.
    pub job: JobId,
    /// Bits per second that it sent.
    pub bps: u64,
    /// Bytes that wait.
    pub backlog_bytes: u64,
    /// Packets that found no room since the agent began.
    pub dropped_packets: u64,
}

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The command.
    pub position: Position,
    /// Whether the plan is in force.
    pub verdict: Result<(), Objection>,
    /// What was measured last, of jobs of the plan in force only.
    pub measures: Vec<Measure>,
}

/// What must survive a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// The last command that was not refused for its position.
    pub position: Position,
    /// The verdict on it; `None` while it is not known.
    pub verdict: Option<Result<(), Objection>>,
    /// The plan in force, or, without a verdict, the one being enforced.
    pub plan: Plan,
}

/// What has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands whose plan is in force or was.
    pub accepted: u64,
    /// Commands that were answered before.
    pub repeated: u64,
    /// Commands of leaders whose term is over.
    pub lower_term: u64,
    /// Commands that a later one overtook.
    pub overtaken: u64,
    /// Commands whose term or sequence was too far beyond the last one.
    pub leaps: u64,
    /// Commands with an impossible plan.
    pub impossible: u64,
    /// Plans that the node could not enforce.
    pub not_enforced: u64,
    /// Measurements of jobs and ports that are not in the plan.
    pub unknown_jobs: u64,
}

/// What to do with a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make [`Agent::saved`] durable and send this.
    Answer(Reply),
    /// Make [`Agent::saved`] durable, enforce its plan, and call [`Agent::enforced`] before
    /// anything else.
    Enforce,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Agent {
    /// By port: what it carries in bit/s.
    ports_bps: BTreeMap<u8, u64>,
    saved: Saved,
    /// The plan before the one being enforced.
    before: Plan,
    measures: BTreeMap<(u8, JobId), Measure>,
    heard_ns: Option<u64>,
    counters: Counters,
    seeded: Seeded,
}

impl Agent {
    /// One of a node whose ports carry so many bit/s each, with what it saved last.
    ///
    /// The caller enforces [`plan`](Agent::plan) again first: it cannot know how far it came before
    /// the restart. A command that was refused is judged anew when it comes again: ports may be
    /// others, and what was missing there.
    pub fn new(ports_bps: BTreeMap<u8, u64>, mut saved: Saved) -> Agent {
        saved.verdict = saved.verdict.filter(Result::is_ok);
        Agent {
            ports_bps,
            before: saved.plan.clone(),
            saved,
            measures: BTreeMap::new(),
            heard_ns: None,
            counters: Counters::default(),
            seeded: Seeded::default(),
        }
    }

    /// Gives it a bug.
    #[cfg(feature = "seeded-bugs")]
    pub fn plant(&mut self, bug: Bug) {
        self.seeded = Seeded::new(bug);
    }

    /// What must be durable before anything is enforced or sent.
    pub fn saved(&self) -> &Saved {
        &self.saved
    }

    /// The plan in force.
    pub fn plan(&self) -> &[Share] {
        &self.saved.plan
    }

    /// What has happened.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Nanoseconds since a leader was last heard, 0 if the clock went back; `None` if none was. For
    /// reports only: the plan stays, however long that is.
    pub fn silent_ns(&self, now_ns: u64) -> Option<u64> {
        self.heard_ns.map(|heard| now_ns.saturating_sub(heard))
    }

    /// Notes what a job sent through a port; jobs that are not in the plan there are counted only.
    pub fn measure(&mut self, measure: Measure) {
        match place(&self.saved.plan, measure.port, measure.job) {
            Ok(_) => {
                self.measures.insert((measure.port, measure.job), measure);
            }
            Err(_) => self.counters.unknown_jobs += 1,
        }
    }

    /// The answer to the last command again, with what was measured since; `None` before the first.
    pub fn report(&self) -> Option<Reply> {
        self.saved.verdict.map(|verdict| self.reply(self.saved.position, verdict))
    }

    /// Takes a command.
    pub fn handle_command(&mut self, command: Command, now_ns: u64) -> Step {
        let Command { position, plan } = command;
        if let Err(objection) = self.check_position(position) {
            match objection {
                Objection::LowerTerm { .. } => self.counters.lower_term += 1,
                Objection::Leap { .. } => self.counters.leaps += 1,
                _ => self.counters.overtaken += 1,
            }
            return Step::Answer(self.reply(position, Err(objection)));
        }
        self.heard_ns = Some(now_ns);
        if position == self.saved.position
            && let Some(verdict) = self.saved.verdict
        {
            self.counters.repeated += 1;
            return Step::Answer(self.reply(position, verdict));
        }
        self.saved.position = position;
        if let Err(objection) = check_plan(&plan, &self.ports_bps) {
            self.counters.impossible += 1;
            self.saved.verdict = Some(Err(objection));
            return Step::Answer(self.reply(position, Err(objection)));
        }
        self.before = core::mem::replace(&mut self.saved.plan, plan);
        self.saved.verdict = None;
        Step::Enforce
    }

    /// The node enforced the plan, or could not and enforces the one before. Make
    /// [`saved`](Agent::saved) durable, then send the answer.
    pub fn enforced(&mut self, is_enforced: bool) -> Reply {
        let verdict = match is_enforced {
            true => {
                self.counters.accepted += 1;
                Ok(())
            }
            false => {
                self.counters.not_enforced += 1;
                self.saved.plan = self.before.clone();
                Err(Objection::NotEnforced)
            }
        };
        self.saved.verdict = Some(verdict);
        let plan = &self.saved.plan;
        self.measures.retain(|(port, job), _| place(plan, *port, *job).is_ok());
        self.reply(self.saved.position, verdict)
    }

    fn check_position(&self, position: Position) -> Result<(), Objection> {
        let seen = self.saved.position;
        if position.term < seen.term && !self.seeded.is(Bug::LowerTermAccepted) {
            return Err(Objection::LowerTerm { seen: seen.term });
        }
        let is_overtaken = position.term == seen.term && position.sequence < seen.sequence;
        if is_overtaken && !self.seeded.is(Bug::OvertakenAccepted) {
            return Err(Objection::Overtaken { seen: seen.sequence });
        }
        // The sequence begins anew with each term.
        let sequence = if position.term == seen.term { seen.sequence } else { 0 };
        for (number, seen) in [(position.term, seen.term), (position.sequence, sequence)] {
            if number.saturating_sub(seen) > MAX_STEP {
                return Err(Objection::Leap { seen });
            }
        }
        Ok(())
    }

    fn reply(&self, position: Position, verdict: Result<(), Objection>) -> Reply {
        Reply { position, verdict, measures: self.measures.values().copied().collect() }
    }
}

/// Where the share of a job at a port is in a plan, or would be.
pub(crate) fn place(plan: &[Share], port: u8, job: JobId) -> Result<usize, usize> {
    plan.binary_search_by_key(&(port, job), |share| (share.port, share.job))
}

/// Refuses a plan that cannot be meant.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_plan(plan: &[Share], ports_bps: &BTreeMap<u8, u64>) -> Result<(), Objection> {
    if plan.len() > MAX_SHARES {
        return Err(Objection::TooManyShares(plan.len()));
    }
    let key = |share: &Share| (share.port, share.job);
    if let Some(pair) = plan.windows(2).find(|pair| key(&pair[0]) >= key(&pair[1])) {
        return Err(Objection::Unsorted(pair[1].job));
    }
    let has_impossible_phase = |share: &&Share| share.phase.is_some_and(|phase| !phase.is_valid());
    if let Some(share) = plan.iter().find(has_impossible_phase) {
        return Err(Objection::Phase(share.job));
    }
    for shares in plan.chunk_by(|a, b| a.port == b.port) {
        let port = shares[0].port;
        let port_bps = *ports_bps.get(&port).ok_or(Objection::NoPort(port))?;
        let mut seen = BTreeSet::new();
        let mut guaranteed = shares.iter().filter(|share| share.bps > 0);
        if let Some(share) = guaranteed.find(|share| !seen.insert(share.dscp)) {
            return Err(Objection::SharedDscp { port, dscp: share.dscp });
        }
        let planned_bps = shares.iter().map(|share| share.bps).fold(0, u64::saturating_add);
        if planned_bps > port_bps {
            return Err(Objection::Overbooked { port, planned_bps, port_bps });
        }
    }
    Ok(())
}
