//! `dquant datasets`: what a storage target serves.

use std::fmt;

use clap::Args;
use engine::control::target::TargetControl;
use engine::proto::{DatasetRefusal, ListReply, ListedDataset};
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
    /// The same for programs; `unspecified` where it has no name here, or the target is older.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'static str>,
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
        let (reason, info) = (listed.reason(), listed.info.unwrap_or_default());
        let refused = Some(line(&listed.refused)).filter(|why| !why.is_empty());
        Line {
            name: line(&info.name),
            reason: refused.as_ref().map(|_| name_of(reason)),
            hint: refused.as_ref().and_then(|_| hint(reason)),
            refused,
            format: line(&info.format),
            dtype: line(&info.dtype),
            dtype_origin: line(&info.dtype_origin),
            tokens: info.tokens,
            tokenizer: line(&info.tokenizer),
            max_id: info.max_id,
        }
    }
}

/// The reason as programs read it.
fn name_of(reason: DatasetRefusal) -> String {
    let name = reason.as_str_name();
    name.strip_prefix("DATASET_REFUSAL_").unwrap_or(name).to_ascii_lowercase()
}

/// What to try with a file that no stream can read.
fn hint(reason: DatasetRefusal) -> Option<&'static str> {
    Some(match reason {
        DatasetRefusal::Unspecified => return None,
        DatasetRefusal::Unreadable => "the kernel's log at the target may say why",
        DatasetRefusal::Denied => "the user that runs `dquant serve` needs read permission",
        DatasetRefusal::Foreign => "at the target: `dquant convert FILE NAME.bin`",
        DatasetRefusal::Type => {
            "at the target: `dquant inspect FILE --dtype u32 --write-manifest`, with its type"
        }
        DatasetRefusal::Invalid => "at the target: `dquant inspect FILE` shows what is in it",
        DatasetRefusal::Manifest => {
            "at the target: write it anew with `dquant inspect FILE --write-manifest --force`"
        }
        DatasetRefusal::Index => "at the target: remove the index beside it, or write it anew",
    })
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
        // Once for all files of one kind.
        let mut hinted = Vec::new();
        for line in &self.datasets {
            let Line { name, format, dtype, tokens, .. } = line;
            write!(f, "{name:width$}  ")?;
            match &line.refused {
                Some(why) => write!(f, "no stream can read it: {why}")?,
                None => write!(f, "{format:<8}  {dtype:<4} {:>18} tokens", Count(*tokens))?,
            }
            let hint = line.hint.filter(|hint| !hinted.contains(hint));
            if let Some(hint) = hint {
                hinted.push(hint);
                write!(f, "\n{:width$}  hint: {hint}", "")?;
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

#[cfg(test)]
mod tests {
    use engine::proto::DatasetInfo;

    use super::*;

    fn listed(name: &str, refused: &str, reason: i32) -> ListedDataset {
        let info = Some(DatasetInfo { name: name.into(), ..DatasetInfo::default() });
        ListedDataset { info, refused: refused.into(), reason }
    }

    #[test]
    fn the_reason_gives_the_hint_once_and_the_text_of_an_old_target_none() {
        let foreign = DatasetRefusal::Foreign.into();
        let datasets = [
            listed("a.bin", "is a Parquet file", foreign),
            listed("b.bin", "is a Parquet file", foreign),
            listed("old.bin", "is a Parquet file", 0),
            listed("new.bin", "is too new", 99),
            listed("good.bin", "", 0),
        ];
        let datasets: Vec<Line> = datasets.into_iter().map(Line::new).collect();
        let reasons: Vec<_> = datasets.iter().map(|line| line.reason.as_deref()).collect();
        let none = Some("unspecified");
        assert_eq!(reasons, [Some("foreign"), Some("foreign"), none, none, None]);
        let shown = Served { datasets, truncated: false, skipped: 0 }.to_string();
        assert_eq!(shown.matches("hint: at the target: `dquant convert").count(), 1, "{shown}");
        assert_eq!(shown.matches("no stream can read it").count(), 4, "{shown}");
    }
}
