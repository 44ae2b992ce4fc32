//! The main job in one command: corpora, a target, a DPU and a trainer, each a process of its own,
//! and a table of what it cost.
//!
//! | part | what it does |
//! |---|---|
//! | [`corpus`] | makes token files, or takes the user's |
//! | [`children`] | starts this program as target, DPU and trainer, and ends them |
//! | [`opening`] | how long a trainer waits for its first batch |
//! | [`trainer`] | reads batches, verifies them against the slow reference, measures itself |
//! | [`report`] | the table and the JSON object |
//!
//! CPU time is what each process used between two instants of the run; verification runs in a
//! thread of the trainer whose CPU time is subtracted and reported separately.

pub mod children;
pub mod corpus;
pub mod opening;
pub mod report;
pub mod trainer;

use std::path::PathBuf;
use std::time::Duration;

use tokio::runtime::Runtime;
use xio::plan::Plan;

use crate::exit::CliError;
use children::{Addresses, Daemon, Trainer, Workspace};
use corpus::Corpus;
use engine::control::status::daemon_status;
use engine::proto::StatusReply;
use report::{PlanRow, Run, Summary};
use trainer::{End, Event, Verify};

/// What to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Token files and weights; when empty, `corpora` are made.
    pub data: Vec<(PathBuf, String)>,
    /// How many corpora to make, 1 to 3.
    pub corpora: usize,
    /// Token type of flat files; empty when it is not given.
    pub dtype: String,
    /// Tokens per sample.
    pub window: u32,
    /// Samples per batch.
    pub batch: u32,
    /// Whether the DPU does the work.
    pub offload: bool,
    /// Packets to drop on every receiving side, in parts per million.
    pub loss_ppm: u32,
    /// What to verify.
    pub verify: Verify,
    /// Length of the measured part.
    pub seconds: Duration,
    /// Deliver exactly this many batches instead of running for a time.
    pub batches: Option<u64>,
    /// Seed of corpora, order and losses.
    pub seed: u64,
    /// Also run without offload, to compare.
    pub compare: bool,
    /// `auto`, `direct` or `buffered`.
    pub io: String,
}

/// Receives reports on the run.
pub trait Watch {
    /// Something was done.
    fn note(&mut self, text: &str);

    /// State of the run; may be shown and replaced.
    fn progress(&mut self, text: &str);
}

/// Runs the demo.
///
/// # Errors
/// When a process cannot start or ends early, and when the stream fails; not when batches mismatch,
/// which the summary reports.
pub fn run(config: &Config, watch: &mut dyn Watch) -> Result<Summary, CliError> {
    let workspace = Workspace::new()?;
    let corpora = corpus::prepare(config, workspace.path(), watch)?;
    let plan_text = plan_text(config, &corpora);
    let plan =
        Plan::parse(&plan_text, None).map_err(|error| CliError::usage(error.render(&plan_text)))?;
    let runtime = service::runtime::current_thread()?;
    let addresses = Addresses::of_this_process();
    let job = Job { config, workspace: &workspace, corpora: &corpora, plan: &plan_text, addresses };
    let first = job.measure(config.offload, config.seconds, &runtime, watch)?;
    let compared = match config.compare && config.offload && first.end.failure.is_none() {
        true => Some(job.measure(false, config.seconds, &runtime, watch)?),
        false => None,
    };
    let dtypes: Vec<_> = corpora.iter().map(|corpus| corpus.file.dtype).collect();
    let pipeline = plan.compile(&dtypes, config.offload).map_err(CliError::usage)?;
    let rows = PlanRow::of(&pipeline.table(), first.end.batches * u64::from(config.batch));
    Ok(Summary::new(config, plan.to_string(), rows, first, compared))
}

/// The plan the demo runs, in the plan language.
fn plan_text(config: &Config, corpora: &[Corpus]) -> String {
    let quote = |name: &str| name.replace('\\', "\\\\").replace('"', "\\\"");
    let part = |corpus: &Corpus| format!("\"{}\"={}", quote(&corpus.name), corpus.weight);
    let parts: Vec<String> = corpora.iter().map(part).collect();
    let Config { window, batch, seed, .. } = config;
    let blend = parts.join(",");
    format!("window({window}) | shuffle({seed}) | blend({blend}) | narrow(u16) | batch({batch})")
}

struct Job<'a> {
    config: &'a Config,
    workspace: &'a Workspace,
    corpora: &'a [Corpus],
    plan: &'a str,
    addresses: Addresses,
}

impl Job<'_> {
    /// Starts the processes, lets them work, and collects their figures.
    fn measure(
        &self,
        offload: bool,
        seconds: Duration,
        runtime: &Runtime,
        watch: &mut dyn Watch,
    ) -> Result<Run, CliError> {
        let target = Daemon::target(self)?;
        let dpu = offload.then(|| Daemon::dpu(self)).transpose()?;
        let shape = if offload { "target, DPU and trainer" } else { "target and trainer" };
        watch.note(&format!("{shape} are up; streaming"));
        // A stream that cannot be opened ends the run below, with its reason.
        let open = dpu.as_ref().and_then(|_| opening::measure(self, &target).ok());
        let mut trainer = Trainer::start(self, &target, dpu.as_ref(), seconds)?;
        let ask = |daemon: &Daemon| {
            runtime.block_on(daemon_status(&daemon.control, self.workspace.token()))
        };
        let both = |target: &Daemon, dpu: Option<&Daemon>| {
            Ok::<_, CliError>((ask(target)?, dpu.map(ask).transpose()?))
        };
        let mut before: Option<(StatusReply, Option<StatusReply>)> = None;
        let end: End = loop {
            match trainer.next_event()? {
                Event::Start => before = Some(both(&target, dpu.as_ref())?),
                Event::Progress(progress) => watch.progress(&progress.to_string()),
                Event::End(end) => break end,
            }
        };
        let after = both(&target, dpu.as_ref())?;
        trainer.finish()?;
        let before = before.unwrap_or_else(|| after.clone());
        Ok(Run { offload, open, end, target: (before.0, after.0), dpu: before.1.zip(after.1) })
    }
}
