//! How long a trainer waits for its first batch when both daemons are running already.

use std::time::{Duration, Instant};

use super::Job;
use super::children::Daemon;
use crate::exit::CliError;
use client::Options;

/// Streams opened one after the other.
pub const OPENINGS: usize = 20;

/// Opens streams through the DPU and takes one batch from each; the median time from the call to
/// the batch. The first stream warms up and is not counted.
///
/// # Errors
/// When a stream cannot be opened or fails.
pub(super) fn measure(job: &Job<'_>, target: &Daemon) -> Result<Duration, CliError> {
    let url = format!("dq://{}/", target.control);
    let options = Options {
        dpu: job.workspace.socket(),
        token: job.workspace.token().to_owned(),
        dtype: job.config.dtype.clone(),
        batches: Some(1),
        ..Options::from_env()
    };
    let open = |_| {
        let started = Instant::now();
        let mut stream = client::open(&url, job.plan, true, &options)?;
        stream.next_view()?;
        Ok(started.elapsed())
    };
    open(0)?;
    let mut times = (0..OPENINGS).map(open).collect::<Result<Vec<_>, CliError>>()?;
    times.sort_unstable();
    Ok((times[OPENINGS / 2 - 1] + times[OPENINGS / 2]) / 2)
}
