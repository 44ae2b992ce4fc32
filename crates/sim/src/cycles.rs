//! Training jobs on a network: iterations of a compute pause and exchanges that follow each other.
//!
//! A [`Program`] is one job: in each iteration it computes, then goes through its phases; a phase
//! ends when all its bytes are acknowledged. With a [`Grid`] its first phase begins at fixed times
//! only, as an agent enforces time shifts: a job that is ready within the tolerance of its time
//! goes on at once, and one that has drifted further waits for the next time.

use alloc::vec::Vec;

use roce::{Duration, Time};

use crate::streams::StreamError;
use crate::tenants::Tenants;

/// Bytes that a connection sends in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Send {
    /// The connection, by number.
    pub line: u32,
    /// Payload in bytes, not 0.
    pub bytes: u64,
}

/// When exchanges may begin: each period, by so much later than 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// From one time to the next, not 0.
    pub period: Duration,
    /// The first time.
    pub shift: Duration,
    /// How far from its time a job may begin: what it drifts is corrected when it is more.
    pub tolerance: Duration,
}

impl Grid {
    /// When a job that is ready at that time may begin.
    fn begin(&self, ready: Time) -> Time {
        let since = ready.since(Time::ZERO + self.shift).as_nanos();
        if ready < Time::ZERO + self.shift {
            return Time::ZERO + self.shift;
        }
        let late = since % self.period.as_nanos().max(1);
        match late <= self.tolerance.as_nanos() {
            true => ready,
            false => ready + Duration::from_nanos(self.period.as_nanos() - late),
        }
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// What follows one after the other; phases without sends take no time.
    pub phases: Vec<Vec<Send>>,
    /// How long it computes before the exchanges of each iteration.
    pub compute: Duration,
    /// When its first iteration begins.
    pub start: Time,
    /// Times for its exchanges, if it has some.
    pub grid: Option<Grid>,
}

/// Where a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// It computes, or waits for its time.
    Computing,
    /// In a phase, with so many connections that have not finished.
    Phase { number: usize, open: u32 },
}

#[derive(Debug)]
struct Job {
    program: Program,
    at: At,
    began: Time,
    spans: Vec<Duration>,
}

/// Runs jobs until a time, from now on, and returns how long each of the iterations took that
/// ended, by job. A connection belongs to one job and comes once in a phase. A job whose phases are
/// all empty is not run.
///
/// # Errors
/// When a connection has ended.
pub fn run(
    tenants: &mut Tenants,
    programs: Vec<Program>,
    until: Time,
) -> Result<Vec<Vec<Duration>>, StreamError> {
    let mut owners = Vec::new();
    for (number, program) in (0_u32..).zip(&programs) {
        for send in program.phases.iter().flatten() {
            let line = send.line as usize;
            owners.resize(owners.len().max(line + 1), None);
            owners[line] = Some(number);
        }
    }
    let job = |program: Program| {
        let began = program.start.max(tenants.now());
        Job { program, at: At::Computing, began, spans: Vec::new() }
    };
    let jobs = programs.into_iter().map(job).collect();
    let mut run = Run { tenants, jobs, owners };
    run.begin();
    run.until(until)?;
    Ok(run.jobs.into_iter().map(|job| job.spans).collect())
}

struct Run<'a> {
    tenants: &'a mut Tenants,
    jobs: Vec<Job>,
    /// By connection: its job.
    owners: Vec<Option<u32>>,
}

impl Run<'_> {
    fn begin(&mut self) {
        for number in 0..self.jobs.len() {
            if self.jobs[number].program.phases.iter().any(|phase| !phase.is_empty()) {
                self.compute(number);
            }
        }
    }

    /// A job computes: its exchanges begin when it has, and may.
    fn compute(&mut self, number: usize) {
        let Job { program, at, began, .. } = &mut self.jobs[number];
        *at = At::Computing;
        let ready = *began + program.compute;
        let ready = program.grid.map_or(ready, |grid| grid.begin(ready));
        self.tenants.network().wake_at(ready, number as u32);
    }

    fn until(&mut self, until: Time) -> Result<(), StreamError> {
        self.tenants.network().wake_at(until, u32::MAX);
        while self.tenants.now() < until && self.tenants.advance(until)? {
            let due: Vec<u32> = self.tenants.network().wakes().to_vec();
            for number in due.into_iter().map(|number| number as usize) {
                if self.jobs.get(number).is_some_and(|job| job.at == At::Computing) {
                    self.enter(number, 0)?;
                }
            }
            for place in 0..self.tenants.finished().len() {
                let line = self.tenants.finished()[place] as usize;
                if let Some(number) = self.owners.get(line).copied().flatten() {
                    self.finished(number as usize)?;
                }
            }
        }
        Ok(())
    }

    /// A job enters its next phase that sends anything, or ends its iteration.
    fn enter(&mut self, number: usize, phase: usize) -> Result<(), StreamError> {
        let phases = &self.jobs[number].program.phases;
        let next = (phase..phases.len()).find(|&phase| !phases[phase].is_empty());
        let Some(next) = next else {
            let (now, job) = (self.tenants.now(), &mut self.jobs[number]);
            job.spans.push(now.since(job.began));
            job.began = now;
            self.compute(number);
            return Ok(());
        };
        let open = phases[next].len() as u32;
        self.jobs[number].at = At::Phase { number: next, open };
        for place in 0..open as usize {
            let Send { line, bytes } = self.jobs[number].program.phases[next][place];
            self.tenants.send(line, bytes)?;
        }
        Ok(())
    }

    /// A connection of a job has finished.
    fn finished(&mut self, number: usize) -> Result<(), StreamError> {
        let At::Phase { number: phase, open } = self.jobs[number].at else {
            return Ok(());
        };
        match open {
            0 | 1 => self.enter(number, phase + 1),
            _ => {
                self.jobs[number].at = At::Phase { number: phase, open: open - 1 };
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use controls::CongestionControl;
    use roce::shaping::{Exchanges, TransmissionGate};
    use roce::verbs::{Mtu, Reliability};

    use super::*;
    use crate::graph::Graph;
    use crate::link::LinkConfig;
    use crate::network::NetworkConfig;
    use crate::tenants::{Pair, Transport};

    const MS: u64 = 1_000_000;

    fn ms(span: u64) -> Duration {
        Duration::from_nanos(span * MS)
    }

    /// Two jobs into one host, each 8 MB in 24 ms, which is 6.7 ms alone at 10 Gbit/s.
    fn iterations(shifts: Option<[u64; 2]>) -> Vec<Vec<Duration>> {
        let mut tenants = network();
        iterations_on(&mut tenants, shifts)
    }

    fn network() -> Tenants {
        let link = LinkConfig::new(10_000_000_000, Duration::from_micros(1));
        let transport = Transport {
            mtu: Mtu::M4096,
            window_packets: 64,
            reliability: Reliability::Selective,
            congestion: CongestionControl::Off,
        };
        Tenants::new(&NetworkConfig::new(Graph::star(3, link, link), 1), transport)
    }

    fn iterations_on(tenants: &mut Tenants, shifts: Option<[u64; 2]>) -> Vec<Vec<Duration>> {
        let programs = [1, 2].map(|from| {
            let line = tenants.connect(Pair { from, to: 0, dscp: 8 }).unwrap();
            let shift = shifts.map(|shifts| ms(shifts[from as usize - 1]));
            let grid = shift.map(|shift| Grid { period: ms(24), shift, tolerance: ms(1) });
            let phases = alloc::vec![Vec::new(), alloc::vec![Send { line, bytes: 8_000_000 }]];
            Program { phases, compute: ms(17), start: Time::ZERO, grid }
        });
        run(tenants, programs.into(), Time::from_nanos(480 * MS)).unwrap()
    }

    #[test]
    fn iterations_are_computing_and_exchanges() {
        let spans = iterations(None);
        for own in &spans {
            assert!(own.len() >= 15, "{own:?}");
            // At once on one link: twice 6.5 ms.
            assert!(own.iter().all(|span| (ms(29)..ms(31)).contains(span)), "{own:?}");
        }
    }

    #[test]
    fn jobs_with_times_of_their_own_do_not_meet() {
        for own in iterations(Some([0, 12])) {
            // The first one waits for its time.
            assert!(own.len() >= 18, "{own:?}");
            assert!(own[1..].iter().all(|span| (ms(23)..ms(25)).contains(span)), "{own:?}");
        }
    }

    /// As above, but the jobs know nothing of their times: their hosts hold the exchanges back.
    #[test]
    fn jobs_behind_transmission_gates_do_not_meet() {
        let mut tenants = network();
        for (host, shift) in [(1, 0), (2, 12)] {
            let gate = TransmissionGate {
                period_ns: 24 * MS,
                shift_ns: shift * MS,
                tolerance_ns: MS,
                quiet_ns: 8 * MS,
            };
            tenants.network().set_gate(host, 8, Some(gate));
        }
        let spans = iterations_on(&mut tenants, None);
        let timed = iterations(Some([0, 12]));
        for (host, (own, timed)) in (1..).zip(spans.iter().zip(&timed)) {
            assert!(own.len() >= 18, "{own:?}");
            assert!(own[1..].iter().all(|span| (ms(23)..ms(25)).contains(span)), "{own:?}");
            assert!(
                own.len().abs_diff(timed.len()) <= 1,
                "as jobs that keep their times themselves"
            );
            let Exchanges { begun, waited_ns, .. } = tenants.network().exchanges(host, 8);
            assert!(begun.abs_diff(own.len() as u64) <= 1, "{begun} exchanges");
            // Each is ready after 23.7 ms of a period of 24.
            assert!((MS..begun * MS + 12 * MS).contains(&waited_ns), "{waited_ns} ns");
        }
        assert_eq!(tenants.network().exchanges(0, 8), Exchanges::default(), "it has no gate");
    }

    #[test]
    fn who_has_drifted_waits_for_the_next_time() {
        let grid = Grid { period: ms(10), shift: ms(3), tolerance: ms(1) };
        let at = |ms: u64| Time::from_nanos(ms * MS);
        let begin = |ready| grid.begin(at(ready));
        assert_eq!([begin(0), begin(3), begin(13), begin(14)], [at(3), at(3), at(13), at(14)]);
        assert_eq!([begin(15), begin(22)], [at(23), at(23)]);
    }
}
