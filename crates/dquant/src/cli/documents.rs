//! `dquant documents`: where the documents of a dataset are, as its index says.

use std::fmt;
use std::path::Path;

use clap::Args;
use engine::catalog::find_file;
use engine::control::target::TargetControl;
use engine::proto::{DatasetInfo, DatasetRef};
use serde::Serialize;
use xio::documents::Documents;

use super::daemons::TokenArgs;
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// List the documents of a dataset: number, first token and tokens of each
///
/// The documents are those of the Megatron index beside the file: NAME.idx beside NAME.bin or
/// NAME.npy. Documents count from 0.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant documents corpus.bin | head
  dquant documents dq://10.0.0.5/web --token-file token --json | jq .documents
  dquant documents corpus.bin | awk '$3 > 100000'"
)]
pub(super) struct DocumentsCommand {
    /// A file with an index beside it, or `dq://HOST[:PORT]/NAME`
    #[arg(value_name = "NAME")]
    name: String,

    #[command(flatten)]
    token: TokenArgs,
}

impl DocumentsCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let asked = |name: &str| DatasetRef {
            name: name.to_owned(),
            documents: true,
            ..DatasetRef::default()
        };
        let (info, documents) = match self.name.strip_prefix("dq://") {
            Some(rest) => {
                let (host, name) = rest.split_once('/').ok_or_else(|| {
                    CliError::usage(format!("{}: it names no dataset", self.name))
                        .hint("name one: dq://HOST[:PORT]/NAME")
                })?;
                let token = self.token.given()?.unwrap_or_default();
                let runtime = engine::runtime::current_thread()?;
                runtime.block_on(fetch(host, &token, asked(name)))?
            }
            None => {
                let found = find_file(Path::new(&self.name), &asked(""))?;
                (found.info, found.documents.unwrap_or_default())
            }
        };
        console.report(&Listing::new(info, documents))?;
        Ok(Exit::Good)
    }
}

/// Description and documents of a dataset at a target.
async fn fetch(
    host: &str,
    token: &str,
    asked: DatasetRef,
) -> Result<(DatasetInfo, Documents), engine::Error> {
    let control = TargetControl::connect(host, token).await?;
    let infos = control.describe(vec![asked.clone()]).await?;
    let tables = control.documents(vec![asked], &infos).await?;
    let both = infos.into_iter().zip(tables).next();
    both.ok_or_else(|| engine::Error::invalid(format!("target {host} describes no dataset")))
}

/// The result.
#[derive(Debug, Serialize)]
struct Listing {
    file: String,
    documents: usize,
    tokens: u64,
    fingerprint: String,
    /// First token of each.
    starts: Vec<u64>,
    /// Tokens of each.
    lengths: Vec<u32>,
}

impl Listing {
    fn new(info: DatasetInfo, documents: Documents) -> Listing {
        Listing {
            file: info.name,
            documents: documents.len(),
            tokens: documents.tokens(),
            fingerprint: format!("{:016x}", info.documents),
            starts: documents.iter().map(|range| range.start).collect(),
            lengths: documents.lengths().to_vec(),
        }
    }
}

impl Report for Listing {
    const SCHEMA: &'static str = "dquant.documents/1";
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "# document first-token tokens")?;
        for (document, (start, tokens)) in self.starts.iter().zip(&self.lengths).enumerate() {
            write!(f, "\n{document} {start} {tokens}")?;
        }
        Ok(())
    }
}
