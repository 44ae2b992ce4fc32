//! `dquant parfait shifts`: when jobs that share links begin to send, so that they take turns.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use lab::proof::interleave::{self, Spans, Staggered};
use lab::proof::percentile;
use lab::units;
use parfait::shifts::{self, Burst, Limits, Shared, Use};
use roce::Duration;
use serde::Serialize;

use super::super::{Console, Report};
use crate::exit::{CliError, Exit};

/// The link of jobs that name none.
const LINK: &str = "link";

/// Shift jobs in time so that they take turns on the links they share, and show it in the simulator
///
/// Each job computes and sends with a period. The shifts are those that leave least demand above what links
/// carry; a job has one shift for all its links. Periods are rounded up to a slot of the common circle; jobs
/// whose periods have none keep their times, and the report says so. Then the jobs of each link run in the
/// simulator: alone, together as they are, and together with the shifts, each beginning its exchanges at its
/// times only. Exits with 1 if a median iteration with shifts takes more than 1.05 times as long as alone.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
A job is NAME:PERIOD:START+LENGTH@RATE[:LINK,LINK...]: in each period it sends for LENGTH from START on.

Examples:
  dquant parfait shifts a:24ms:17ms+7ms@10Gbit/s b:24ms:17ms+7ms@10Gbit/s
  dquant parfait shifts a:20ms:0ms+5ms@10gbit:up b:30ms:0ms+5ms@10gbit:up,down c:30ms:2ms+9ms@10gbit:down"
)]
pub(super) struct Shifts {
    /// The jobs
    #[arg(required = true, value_name = "JOB")]
    jobs: Vec<Timed>,

    /// What each link carries
    #[arg(long, value_name = "RATE", default_value = "10Gbit/s", value_parser = units::rate_bps)]
    capacity: u64,

    /// Longest periods that are simulated; 0 for none
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    periods: u64,
}

/// A job as it is written.
#[derive(Clone, Debug)]
struct Timed {
    name: String,
    period_ns: u64,
    burst: Burst,
    links: Vec<String>,
}

impl FromStr for Timed {
    type Err = String;

    fn from_str(text: &str) -> Result<Timed, String> {
        let form = || "write NAME:PERIOD:START+LENGTH@RATE[:LINK,LINK...]".to_owned();
        let mut fields = text.split(':');
        let mut field = || fields.next().ok_or_else(form);
        let (name, period, burst) = (field()?, field()?, field()?);
        let links = fields.next().unwrap_or(LINK).split(',').map(str::to_owned).collect();
        if fields.next().is_some() {
            return Err(form());
        }
        let (times, rate) = burst.split_once('@').ok_or_else(form)?;
        let (start, length) = times.split_once('+').ok_or_else(form)?;
        let time = |text: &str| units::duration(text).map(Duration::as_nanos);
        let time = |text: &str| time(text).map_err(|error| error.to_string());
        let bps = units::rate_bps(rate).map_err(|error| error.to_string())?;
        let burst = Burst { start_ns: time(start)?, length_ns: time(length)?, bps };
        Ok(Timed { name: name.to_owned(), period_ns: time(period)?, burst, links })
    }
}

impl Shifts {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let periods: Vec<u64> = self.jobs.iter().map(|job| job.period_ns).collect();
        let mut names: Vec<&str> =
            self.jobs.iter().flat_map(|job| &job.links).map(|n| &**n).collect();
        names.sort_unstable();
        names.dedup();
        let links: Vec<Shared> = names.iter().map(|name| self.link(name)).collect();
        let found = shifts::plan(&periods, &links, &Limits::AMPLE).map_err(CliError::from_cause)?;
        let mut report = ShiftReport::new(&self, &names, &found);
        for (name, link) in names.iter().zip(&links).filter(|_| self.periods > 0) {
            let staggered: Vec<Staggered> =
                link.uses.iter().map(|used| self.staggered(used.job)).collect();
            let spans = interleave::measure(self.capacity, &staggered, &found, self.periods);
            let spans = spans.map_err(CliError::from_cause)?;
            report.iterations.extend(
                staggered
                    .iter()
                    .zip(&spans)
                    .map(|(turn, spans)| Iterations::new(name, &self.jobs[turn.job].name, spans)),
            );
        }
        let is_kept = report.iterations.iter().all(|own| own.shifted_ratio <= MOST);
        console.report(&report)?;
        Ok(if is_kept { Exit::Good } else { Exit::CheckFailed })
    }

    fn link(&self, name: &str) -> Shared {
        let has = |job: &Timed| job.links.iter().any(|link| link == name);
        let own = self.jobs.iter().enumerate().filter(|(_, job)| has(job));
        let uses = own.map(|(at, job)| Use { job: at, bursts: vec![job.burst] });
        Shared { capacity_bps: self.capacity, uses: uses.collect() }
    }

    fn staggered(&self, job: usize) -> Staggered {
        let Timed { period_ns, burst, .. } = self.jobs[job];
        Staggered { job, period_ns, burst }
    }
}

/// An iteration with shifts may take so many times as long as alone.
const MOST: f64 = 1.05;

#[derive(Debug, Serialize)]
struct ShiftReport {
    jobs: Vec<JobRow>,
    links: Vec<LinkRow>,
    parts: Vec<PartRow>,
    left: Vec<LeftRow>,
    iterations: Vec<Iterations>,
}

#[derive(Debug, Serialize)]
struct JobRow {
    job: String,
    shift_ns: u64,
    period_ns: u64,
    stretch_ppm: u64,
}

#[derive(Debug, Serialize)]
struct LinkRow {
    link: String,
    /// `None` where its jobs are left alone.
    excess_before_ppm: Option<u64>,
    excess_after_ppm: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PartRow {
    jobs: usize,
    slot_ns: u64,
    circle_ns: u64,
    is_exact: bool,
}

/// Jobs that are not shifted.
#[derive(Debug, Serialize)]
struct LeftRow {
    jobs: Vec<String>,
    why: String,
}

#[derive(Debug, Serialize)]
struct Iterations {
    link: String,
    job: String,
    alone_p50_ns: u64,
    together_p50_ns: u64,
    together_p99_ns: u64,
    shifted_p50_ns: u64,
    shifted_p99_ns: u64,
    together_ratio: f64,
    shifted_ratio: f64,
}

impl Iterations {
    fn new(link: &str, job: &str, spans: &Spans) -> Iterations {
        let at =
            |spans: &[Duration], percent| percentile(spans, percent).map_or(0, Duration::as_nanos);
        let alone = at(&spans.alone, 50);
        let ratio = |span: u64| span as f64 / alone.max(1) as f64;
        let (together, shifted) = (at(&spans.together, 50), at(&spans.shifted, 50));
        Iterations {
            link: link.to_owned(),
            job: job.to_owned(),
            alone_p50_ns: alone,
            together_p50_ns: together,
            together_p99_ns: at(&spans.together, 99),
            shifted_p50_ns: shifted,
            shifted_p99_ns: at(&spans.shifted, 99),
            together_ratio: ratio(together),
            shifted_ratio: ratio(shifted),
        }
    }
}

impl ShiftReport {
    fn new(command: &Shifts, names: &[&str], found: &shifts::Shifts) -> ShiftReport {
        let job = |(at, job): (usize, &Timed)| JobRow {
            job: job.name.clone(),
            shift_ns: found.shift_ns[at],
            period_ns: found.period_ns[at],
            stretch_ppm: found.stretch_ppm(at, job.period_ns),
        };
        let link = |(name, excess): (&&str, &Option<shifts::Excess>)| LinkRow {
            link: (*name).to_owned(),
            excess_before_ppm: excess.map(|excess| excess.before_ppm),
            excess_after_ppm: excess.map(|excess| excess.after_ppm),
        };
        let left = |left: &shifts::Left| LeftRow {
            jobs: left.jobs.iter().map(|&job| command.jobs[job].name.clone()).collect(),
            why: left.why.to_string(),
        };
        let part = |part: &shifts::Part| PartRow {
            jobs: part.jobs.len(),
            slot_ns: part.slot_ns,
            circle_ns: part.circle_ns,
            is_exact: part.is_exact,
        };
        ShiftReport {
            jobs: command.jobs.iter().enumerate().map(job).collect(),
            links: names.iter().zip(&found.links).map(link).collect(),
            parts: found.parts.iter().map(part).collect(),
            left: found.left.iter().map(left).collect(),
            iterations: Vec::new(),
        }
    }
}

impl Report for ShiftReport {
    const SCHEMA: &'static str = "dquant.parfait.shifts/1";
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

impl fmt::Display for ShiftReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {:<12} {:>10} {:>10} {:>9}", "job", "shift ms", "period ms", "longer")?;
        for JobRow { job, shift_ns, period_ns, stretch_ppm } in &self.jobs {
            let longer = *stretch_ppm as f64 / 1e4;
            let (shift, period) = (ms(*shift_ns), ms(*period_ns));
            write!(f, "\n  {job:<12} {shift:>10.3} {period:>10.3} {longer:>7.2} %")?;
        }
        for LinkRow { link, excess_before_ppm, excess_after_ppm } in &self.links {
            let (Some(before), Some(after)) = (excess_before_ppm, excess_after_ppm) else {
                continue;
            };
            let [before, after] = [before, after].map(|ppm| *ppm as f64 / 1e4);
            write!(
                f,
                "\n  {link}: demand above what it carries {before:.2} %, with shifts {after:.2} %"
            )?;
        }
        for LeftRow { jobs, why } in &self.left {
            write!(f, "\n  {} keep their times: {why}", jobs.join(", "))?;
        }
        for PartRow { jobs, slot_ns, circle_ns, is_exact } in &self.parts {
            let how = if *is_exact { "none better in slots" } else { "the best found" };
            let (slot, circle) = (ms(*slot_ns), ms(*circle_ns));
            write!(
                f,
                "\n  {jobs} jobs on a circle of {circle:.3} ms in slots of {slot:.3} ms; {how}"
            )?;
        }
        for own in &self.iterations {
            write!(
                f,
                "\n  {} on {}: iteration p50 alone {:.2} ms; together {:.2} ms ({:.3} x), p99 {:.2} ms; \
                 with shifts {:.2} ms ({:.3} x), p99 {:.2} ms",
                own.job,
                own.link,
                ms(own.alone_p50_ns),
                ms(own.together_p50_ns),
                own.together_ratio,
                ms(own.together_p99_ns),
                ms(own.shifted_p50_ns),
                own.shifted_ratio,
                ms(own.shifted_p99_ns),
            )?;
        }
        Ok(())
    }
}
