//! `dquant documents`: where the documents of datasets are, their hashes, and what a filter or
//! deduplication keeps.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use engine::budget::Budget;
use engine::catalog::{find_file, read_list, subject};
use engine::control::documents::Received;
use engine::control::target::TargetControl;
use engine::proto::{DatasetInfo, DatasetRef, DocumentsRequest};
use engine::selection::apply;
use formats::dochash;
use lab::units::Count;
use serde::Serialize;
use xio::documents::{Dedup, Documents, Filter, Selection};

use super::daemons::TokenArgs;
use super::datasets::Bar;
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// List the documents of datasets: number, first token and tokens of each, and their hashes
///
/// The documents are those of the Megatron index beside the file: NAME.idx beside NAME.bin or
/// NAME.npy. Documents count from 0. The hash of a document is the XXH3 hash (64 bits) of its ids
/// as 64-bit numbers, so it does not depend on the type of the file. With --filter, --keep or --dedup
/// only the documents that a plan with these actions keeps are listed.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant documents corpus.bin | head
  dquant documents corpus.bin --hash                      # write corpus.bin.dochash
  dquant documents corpus.bin --hashes | awk '!/^#/ && $3 < 20 {print $4}' > short.txt
  dquant documents corpus.bin --filter short.txt --dedup within
  dquant documents web.bin code.bin --dedup across --json | jq .duplicate_tokens
  dquant documents dq://10.0.0.5/web --token-file token --hashes"
)]
pub(super) struct DocumentsCommand {
    /// Files with an index beside them, or `dq://HOST[:PORT]/NAME`, all at the same target
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Compute the hashes of the documents and write them beside the file, into NAME.dochash
    #[arg(long, conflicts_with_all = ["hashes", "filter", "keep", "dedup"])]
    hash: bool,

    /// Show the hash of each document
    #[arg(long)]
    hashes: bool,

    #[command(flatten)]
    selection: SelectionArgs,

    #[command(flatten)]
    token: TokenArgs,
}

/// The documents that are listed or written, as the actions of a plan choose them.
#[derive(Clone, Debug, Args)]
pub(super) struct SelectionArgs {
    /// Leave out documents whose hash is in LIST: a .npy of u64, or text, a hash in each line
    ///
    /// `dquant documents` shows the hashes. Of datasets at a target, LIST is the name of a file there.
    #[arg(long, value_name = "LIST")]
    filter: Option<String>,

    /// Keep only documents whose hash is in LIST
    #[arg(long, value_name = "LIST", conflicts_with = "filter")]
    keep: Option<String>,

    /// Keep the first of documents with the same hash
    #[arg(long, value_name = "WHERE")]
    dedup: Option<Where>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Where {
    Within,
    Across,
}

impl SelectionArgs {
    /// What a plan with these actions keeps.
    pub(super) fn selection(&self) -> Selection {
        let list = |list: &Option<String>, keep| list.clone().map(|list| Filter { list, keep });
        let dedup = self.dedup.map(|place| match place {
            Where::Within => Dedup::Within,
            Where::Across => Dedup::Across,
        });
        Selection { filter: list(&self.filter, false).or(list(&self.keep, true)), dedup }
    }
}

impl DocumentsCommand {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let host = self.host()?;
        if self.hash {
            if host.is_some() {
                return Err(CliError::usage("hashes are written where the file is")
                    .hint("run it at the target, with the path of the file"));
            }
            for name in &self.names {
                let written = write_hashes(console, name)?;
                console.report(&written)?;
            }
            return Ok(Exit::Good);
        }
        let selection = self.selection.selection();
        let hashes = self.hashes || !selection.is_empty();
        let (mut infos, mut received) = match host {
            Some(host) => self.fetch(&host, &selection, hashes)?,
            None => self.read(&selection, hashes)?,
        };
        let shown = match selection.is_empty() && self.hashes {
            true => std::mem::take(&mut received.hashes),
            false => Vec::new(),
        };
        let tables = apply(&selection, None, |_| true, false, &mut infos, received)?;
        for (dataset, (info, documents)) in infos.into_iter().zip(tables).enumerate() {
            let hashes = shown.get(dataset).map_or(&[][..], Vec::as_slice);
            console.report(&Listing::new(info, &documents, hashes))?;
        }
        Ok(Exit::Good)
    }

    /// The target of all datasets; none for files of this machine.
    fn host(&self) -> Result<Option<String>, CliError> {
        let host = |name: &String| {
            name.strip_prefix("dq://").map(|rest| rest.split('/').next().unwrap_or("").to_owned())
        };
        let mut hosts = self.names.iter().map(host);
        let first = hosts.next().flatten();
        match hosts.all(|host| host == first) {
            true => Ok(first),
            false => Err(CliError::usage("the datasets are not at one place")
                .hint("name files of this machine, or datasets of one target")),
        }
    }

    /// Documents of files of this machine.
    fn read(
        &self,
        selection: &Selection,
        hashes: bool,
    ) -> Result<(Vec<DatasetInfo>, Received), CliError> {
        let (mut infos, mut received) = (Vec::new(), Received::default());
        for name in &self.names {
            let found = find_file(Path::new(name), &asked("", hashes))?;
            infos.push(found.info);
            received.tables.extend(found.documents);
            received.hashes.extend(found.hashes);
        }
        if let Some(filter) = &selection.filter {
            received.list = read_list(&filter.list)?;
        }
        Ok((infos, received))
    }

    /// Documents of datasets at a target.
    fn fetch(
        &self,
        host: &str,
        selection: &Selection,
        hashes: bool,
    ) -> Result<(Vec<DatasetInfo>, Received), CliError> {
        let name = |url: &String| url.splitn(4, '/').nth(3).unwrap_or("").to_owned();
        let datasets: Vec<_> = self.names.iter().map(|url| asked(&name(url), hashes)).collect();
        let list = selection.filter.as_ref().map_or(String::new(), |filter| filter.list.clone());
        let token = self.token.given()?.unwrap_or_default();
        let fetch = async {
            let control = TargetControl::connect(host, &token).await?;
            let infos = control.describe(datasets.clone()).await?;
            let request = DocumentsRequest { datasets, hashes, list };
            let budget = Budget::documents(u64::MAX);
            let received = control.documents(request, &infos, &budget).await?;
            Ok::<_, service::Error>((infos, received))
        };
        Ok(service::runtime::current_thread()?.block_on(fetch)?)
    }
}

fn asked(name: &str, hashes: bool) -> DatasetRef {
    DatasetRef {
        name: name.to_owned(),
        documents: true,
        document_hashes: hashes,
        ..DatasetRef::default()
    }
}

/// Computes the hashes of a file's documents and writes them beside it.
fn write_hashes(console: &mut Console, name: &str) -> Result<Hashed, CliError> {
    let found = find_file(Path::new(name), &asked("", false))?;
    let (of, documents) = (subject(&found.info), found.documents.unwrap_or_default());
    // The sidecar lies where the file is, and so does that of a link.
    let path = PathBuf::from(&found.info.name);
    let path = path.canonicalize().unwrap_or(path);
    let done = AtomicU64::new(0);
    let watch = |tokens| {
        done.fetch_add(tokens, Ordering::Relaxed);
    };
    let mut bar = Bar::new("hashing", 0);
    let hashes = std::thread::scope(|scope| {
        let work = || dochash::compute((&path, &found.file), &found.layout, &documents, &watch);
        let work = scope.spawn(work);
        while !work.is_finished() {
            let tokens = done.load(Ordering::Relaxed);
            bar.show(console, tokens, tokens as f64 / of.tokens.max(1) as f64);
            std::thread::park_timeout(Duration::from_millis(20));
        }
        work.join()
    });
    let stopped = || CliError::usage(format!("{name}: a reader stopped unexpectedly"));
    let hashes = hashes.map_err(|_| stopped())??;
    // Hashes of two contents of the file are none: what it is now has to be what it was.
    let now = find_file(Path::new(name), &asked("", false))?;
    if let Some(why) = of.difference(&subject(&now.info)) {
        let text = format!("{name}: it was changed while its documents were hashed: {why}");
        return Err(CliError::check_failed(text).hint("run it again when nothing writes the file"));
    }
    let written = dochash::store(&path, of, &hashes)?;
    Ok(Hashed {
        file: found.info.name,
        hashes: written.display().to_string(),
        documents: of.documents,
        tokens: of.tokens,
    })
}

/// The result of `--hash`.
#[derive(Debug, Serialize)]
struct Hashed {
    file: String,
    /// The sidecar.
    hashes: String,
    documents: u64,
    tokens: u64,
}

impl Report for Hashed {
    const SCHEMA: &'static str = "dquant.dochash/1";
}

impl fmt::Display for Hashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (documents, tokens) = (Count(self.documents), Count(self.tokens));
        write!(f, "{}: {documents} documents, {tokens} tokens", self.hashes)
    }
}

/// The documents of a dataset.
#[derive(Debug, Serialize)]
struct Listing {
    file: String,
    documents: usize,
    tokens: u64,
    fingerprint: String,
    filtered_documents: u64,
    filtered_tokens: u64,
    duplicate_documents: u64,
    duplicate_tokens: u64,
    /// First token of each.
    starts: Vec<u64>,
    /// Tokens of each.
    lengths: Vec<u32>,
    /// As hexadecimal digits, where they were asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hashes: Vec<String>,
}

impl Listing {
    fn new(info: DatasetInfo, documents: &Documents, hashes: &[u64]) -> Listing {
        Listing {
            file: info.name,
            documents: documents.len(),
            tokens: documents.tokens(),
            fingerprint: format!("{:016x}", info.documents),
            filtered_documents: info.filtered_documents,
            filtered_tokens: info.filtered_tokens,
            duplicate_documents: info.duplicate_documents,
            duplicate_tokens: info.duplicate_tokens,
            starts: documents.iter().map(|range| range.start).collect(),
            lengths: documents.lengths().to_vec(),
            hashes: hashes.iter().map(|hash| format!("{hash:016x}")).collect(),
        }
    }
}

impl Report for Listing {
    const SCHEMA: &'static str = "dquant.documents/1";
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "# {}: {} documents, {} tokens", self.file, self.documents, self.tokens)?;
        if let dropped @ 1.. = self.filtered_documents {
            write!(f, "; filtered {dropped} with {} tokens", self.filtered_tokens)?;
        }
        if let dropped @ 1.. = self.duplicate_documents {
            write!(f, "; duplicates {dropped} with {} tokens", self.duplicate_tokens)?;
        }
        write!(f, "\n# document first-token tokens")?;
        write!(f, "{}", if self.hashes.is_empty() { "" } else { " hash" })?;
        for (document, (start, tokens)) in self.starts.iter().zip(&self.lengths).enumerate() {
            write!(f, "\n{document} {start} {tokens}")?;
            if let Some(hash) = self.hashes.get(document) {
                write!(f, " {hash}")?;
            }
        }
        Ok(())
    }
}
