//! `dquant top --cluster`: what a cluster's links, jobs and nodes do now.
//!
//! A [`View`] comes from whoever has one: the brain that leads, the page's server ([`fetch`]) or a
//! file. It is drawn as text ([`text`]), again and again on a terminal, once elsewhere.

mod fetch;
mod text;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use cluster::view::View;
use serde::Serialize;

use super::cluster::BrainsArgs;
use super::daemons::span;
use super::{Console, Report};
use crate::exit::{CliError, Exit, INPUT_HINT};

/// Rows of a snapshot that is not on a terminal.
const SNAPSHOT_ROWS: usize = 60;

/// Show the busiest links, the jobs, the nodes and the alarms of a cluster
///
/// On a terminal the picture is refreshed until Ctrl-C; elsewhere it is printed once. --json prints
/// the whole view: every node, link and job.
///
/// The bar of a link is as long as what is used of it; | marks what is reserved.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    group = clap::ArgGroup::new("source"),
    after_help = "\
Examples:
  dquant top --cluster --brain 10.0.0.5,10.0.0.6 --token-file token
  dquant top --cluster --from http://10.0.0.5:4796 --token-file token
  dquant top --cluster --from http://10.0.0.5:4796 --interval 5s
  dquant top --cluster --from http://10.0.0.5:4796 --once
  dquant top --cluster --from http://10.0.0.5:4796 --json | jq '.jobs[].name'
  dquant top --cluster --view view.json"
)]
pub(super) struct Top {
    /// Show a whole cluster
    #[arg(long, required = true)]
    cluster: bool,

    /// Web server of a brain, in place of the brains' own port
    #[arg(long, value_name = "URL", group = "source")]
    from: Option<String>,

    /// File with a view as JSON: what --json printed, or the page's /api/view
    #[arg(long, value_name = "FILE", group = "source")]
    view: Option<PathBuf>,

    /// Refresh at this interval
    #[arg(long, value_name = "TIME", value_parser = span, default_value = "1s")]
    interval: Duration,

    /// Print once, also on a terminal
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    brains: BrainsArgs,
}

/// A view as this command shows it.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    view: View,
    /// Rows that there are for it.
    #[serde(skip)]
    rows: usize,
}

impl Report for Shown {
    const SCHEMA: &'static str = "dquant.cluster/1";
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::of(&self.view, self.rows))
    }
}

impl Top {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if let Some(path) = &self.view {
            return watch(console, None, || read(path));
        }
        let interval = Some(self.interval).filter(|_| !self.once);
        let Some(from) = &self.from else {
            return watch(console, interval, || {
                self.brains.call(async |client| Ok(client.view().await?.cleaned()))
            });
        };
        let (token, url) = (self.brains.token()?, fetch::Url::parse(from)?);
        watch(console, interval, || fetch::view(&url, token.as_deref()))
    }
}

/// Shows what `newest` returns: at each interval on a terminal, once elsewhere or without an interval.
pub(super) fn watch(
    console: &mut Console,
    interval: Option<Duration>,
    mut newest: impl FnMut() -> Result<View, CliError>,
) -> Result<Exit, CliError> {
    let mut view = newest()?;
    while let Some((interval, rows)) = interval.zip(console.screen_rows()) {
        console.redraw(&Shown { view, rows })?;
        std::thread::sleep(interval);
        view = newest()?;
    }
    console.report(&Shown { view, rows: SNAPSHOT_ROWS })?;
    Ok(Exit::Good)
}

fn read(path: &Path) -> Result<View, CliError> {
    let failed = |error: std::io::Error| {
        CliError::because(format_args!("cannot read {}", path.display()), &error).hint(INPUT_HINT)
    };
    let mut json = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(fetch::MAX_BYTES).read_to_end(&mut json).map_err(failed)?;
    fetch::parse(&json, &path.display().to_string())
}
