//! `dquant datasets`: what a storage target serves.

use std::fmt;

use clap::Args;
use engine::control::target::TargetControl;
use engine::proto::{ListReply, ListedDataset};
use lab::units::Count;
use serde::Serialize;
use service::text::one_line;

use super::daemons::TokenArgs;
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// List the datasets that a storage target serves
///
/// Each with what a stream would take it for: format, type, tokens, and what its manifest says of its
/// tokenizer and its largest id. A file that no stream can read is listed with the reason.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant datasets dq://10.0.0.5 --token-file token
  dquant datasets dq://10.0.0.5/corpora --json"
)]
pub(super) struct Datasets {
    /// The target, and the beginning of the names that are wanted
    #[arg(value_name = "dq://HOST[:PORT][/PREFIX]")]
    url: String,

    #[command(flatten)]
    token: TokenArgs,
}

/// What the target serves.
#[derive(Debug, Serialize)]
struct Served {
    datasets: Vec<Line>,
    /// There are more than are listed.
    truncated: bool,
    /// Files that cannot be served at all.
    skipped: u64,
}

/// A dataset, or why it is none.
#[derive(Debug, Serialize)]
struct Line {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    format: String,
    dtype: String,
    dtype_origin: String,
    tokens: u64,
    #[serde(skip_serializing_if = "String::is_empty")]
    tokenizer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_id: Option<u64>,
}

impl Line {
    fn new(listed: ListedDataset) -> Line {
        let line = |text: &str| one_line(text).into_owned();
        let info = listed.info.unwrap_or_default();
        Line {
            name: line(&info.name),
            refused: Some(line(&listed.refused)).filter(|why| !why.is_empty()),
            format: line(&info.format),
            dtype: line(&info.dtype),
            dtype_origin: line(&info.dtype_origin),
            tokens: info.tokens,
            tokenizer: line(&info.tokenizer),
            max_id: info.max_id,
        }
    }
}

impl Report for Served {
    const SCHEMA: &'static str = "dquant.datasets/1";
}

impl Datasets {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let place = self.url.strip_prefix("dq://").filter(|place| !place.is_empty());
        let place = place.ok_or_else(|| {
            CliError::usage(format_args!("{:?} is no dq://HOST[:PORT][/PREFIX]", self.url))
                .hint("files of this machine are described by `dquant inspect FILE`")
        })?;
        let (host, prefix) = place.split_once('/').unwrap_or((place, ""));
        let token = self.token.required()?;
        let runtime = service::runtime::current_thread()?;
        let listed = runtime
            .block_on(async { TargetControl::connect(host, &token).await?.list(prefix).await });
        let ListReply { datasets, truncated, skipped } = listed?;
        let datasets = datasets.into_iter().map(Line::new).collect();
        console.report(&Served { datasets, truncated, skipped })?;
        Ok(Exit::Good)
    }
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.datasets.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
        for line in &self.datasets {
            let Line { name, format, dtype, tokens, .. } = line;
            write!(f, "{name:width$}  ")?;
            match &line.refused {
                Some(why) => write!(f, "no stream can read it: {why}")?,
                None => write!(f, "{format:<8}  {dtype:<4} {:>18} tokens", Count(*tokens))?,
            }
            if !line.tokenizer.is_empty() {
                write!(f, "  {}", line.tokenizer)?;
            }
            if let Some(id) = line.max_id {
                write!(f, "  ids to {}", Count(id))?;
            }
            writeln!(f)?;
        }
        match (self.datasets.len(), self.truncated) {
            (0, _) => write!(f, "no dataset of this name")?,
            (1, false) => write!(f, "1 dataset")?,
            (count, false) => write!(f, "{count} datasets")?,
            (count, true) => write!(f, "{count} datasets, and more: name a folder")?,
        }
        match self.skipped {
            0 => Ok(()),
            skipped => write!(f, "; {skipped} entries are no files that can be served"),
        }
    }
}
