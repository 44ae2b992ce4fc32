//! `dquant convert`: the command in front of [`formats::convert`].

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::budget::Bytes;
use formats::convert::{self, Event, Job, all_cores};
use formats::source::is_weights;
use formats::{Kind, ReadOptions, WriteOptions};
use lab::units::{self, Count};
use serde::Serialize;
use xio::dataset::Dtype;

use super::datasets::{Bar, note_guess, token_type};
use super::documents::SelectionArgs;
use super::targets::Targets;
use super::{Console, Report, console};
use crate::exit::{CliError, Exit};

/// Largest shard, in bytes.
const MAX_SHARD: u64 = 1 << 30;

/// Convert token datasets from one format into another
///
/// Formats: flat (.bin), npy, megatron (.bin with .idx), mds (MosaicML), litdata, webdataset (.tar,
/// or a folder of them), parquet, arrow. That of SRC is detected; that of DST follows from its name,
/// or is given with --to.
///
/// DST appears when everything was read back and is equal, and beside it a manifest. An id that DST's
/// type cannot hold is an error. A run that was killed goes on when it is started again.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant convert mds/ corpus.bin
  dquant convert corpus.bin documents.idx --eos 50256
  dquant convert corpus.npy narrow.bin --to-dtype u16
  dquant convert documents.idx mds/ --to mds --zstd 3
  dquant convert corpus.bin litdata/ --to litdata --split 2049
  dquant convert web.bin clean.idx --filter short.txt --dedup within
  dquant convert tokenized.parquet corpus.bin --column input_ids --json
  dquant convert sft.parquet sft.bin --targets labels         # a pair that says what is trained on
  dquant convert sft.parquet sft.bin --targets mask --loss-weights weights"
)]
pub(super) struct Convert {
    /// A file, one half of a Megatron pair, or a folder
    #[arg(value_name = "SRC")]
    source: PathBuf,

    /// The file or folder to write; it must not exist
    #[arg(value_name = "DST")]
    output: PathBuf,

    /// Format of DST, where its name does not tell it
    #[arg(long, value_name = "FORMAT", value_parser = kind)]
    to: Option<Kind>,

    /// Type of the tokens in DST [default: as in SRC; i32 for u32 in Megatron, which has no u32]
    #[arg(long, value_name = "TYPE", value_parser = token_type)]
    to_dtype: Option<Dtype>,

    /// Type of the tokens in SRC, where it does not record it
    #[arg(long, value_name = "TYPE", value_parser = token_type)]
    dtype: Option<Dtype>,

    /// Size of the vocabulary: refuse a SRC that holds an id that is not below it
    #[arg(long, value_name = "N")]
    vocab: Option<u64>,

    /// Column, field or member of SRC that holds the tokens
    #[arg(long, value_name = "NAME")]
    column: Option<String>,

    /// Column of SRC that says which tokens a model is trained to say; DST is a Megatron pair
    ///
    /// A value for each token: a mask of 0 and 1 or booleans, or labels, -100 or the token itself.
    ///
    /// SRC is parquet, arrow or mds.
    #[arg(long, value_name = "COLUMN")]
    targets: Option<String>,

    /// Column of SRC with the weight of each token in the loss, for plans with `loss_weights`
    ///
    /// A number for each token. SRC is parquet, arrow or mds; DST is flat, npy or megatron, and
    /// NAME.loss_weights.npy lies beside NAME.bin. The weights beside a SRC in one file go along without it.
    #[arg(long, value_name = "COLUMN", verbatim_doc_comment)]
    loss_weights: Option<String>,

    /// Column or field of DST for the tokens
    #[arg(long, value_name = "NAME")]
    to_column: Option<String>,

    /// Id that ends a document, for a SRC that does not keep documents apart
    #[arg(long, value_name = "ID")]
    eos: Option<u64>,

    /// Cut documents into pieces of N tokens; the last one may be shorter
    ///
    /// --filter, --keep and --dedup choose documents before the cut: those of SRC, or of --eos.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    split: Option<u64>,

    #[command(flatten)]
    selection: SelectionArgs,

    /// Leave out documents without tokens
    #[arg(long)]
    drop_empty: bool,

    /// Compress shards at this level; mds and litdata only
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(i32).range(-7..=19))]
    zstd: Option<i32>,

    /// Size of a shard before compression, at most 1GiB
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = units::size_bytes)]
    shard_size: u64,

    /// Name of the encoding, for the manifest [default: that in the manifest of SRC]
    #[arg(long, value_name = "NAME")]
    tokenizer: Option<String>,

    /// Cores to use; all of them when not given
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,

    /// Size of the tokens after which a killed run loses nothing
    #[arg(long, value_name = "SIZE", default_value = "128MiB", value_parser = units::size_bytes)]
    save_every: u64,

    /// Start over, whatever a killed run has left
    #[arg(long)]
    restart: bool,
}

fn kind(name: &str) -> Result<Kind, String> {
    let names = || Kind::ALL.map(Kind::name).join(", ");
    Kind::from_name(name).ok_or_else(|| format!("formats are {}", names()))
}

impl Convert {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let job = self.job()?;
        let mut bar = Bar::new("converting", 0);
        let mut verb = "converting";
        let summary = convert::convert(&job, &mut |event| {
            let (now, tokens, share) = match event {
                Event::Resumed { tokens } => {
                    console.note(format_args!("going on after {} tokens", Count(tokens)));
                    (verb, bar) = ("converting", Bar::new("converting", tokens));
                    return;
                }
                Event::Hashed { tokens, share } => ("hashing   ", tokens, share),
                Event::Copied { tokens, share } => ("converting", tokens, share),
                Event::Verified { tokens, share } => ("verifying ", tokens, share),
            };
            if now != verb {
                (verb, bar) = (now, Bar::new(now, 0));
            }
            bar.show(console, tokens, share);
        })?;
        note_guess(console, job.source.display(), summary.from_dtype, &summary.dtype_origin);
        warn_of(&summary, job.read.targets.is_some());
        console.report(&Converted { output: job.output.display().to_string(), summary })?;
        Ok(Exit::Good)
    }

    /// Whether rows with columns beside the tokens are read.
    fn is_of_rows(&self) -> bool {
        self.targets.is_some() || self.loss_weights.is_some()
    }

    fn job(self) -> Result<Job, CliError> {
        let kind = match self.to {
            Some(kind) => kind,
            // Only a pair keeps targets, and the documents that weights are of; either half names
            // it.
            None if self.is_of_rows() && is_bin(&self.output) => Kind::Megatron,
            None => kind_of(&self.output)?,
        };
        if self.shard_size > MAX_SHARD {
            return Err(
                CliError::usage("a shard is larger than 1 GiB").hint("use --shard-size 64MiB")
            );
        }
        if self.zstd.is_some() && !matches!(kind, Kind::Mds | Kind::LitData) {
            let why = format!("--zstd does not go with {kind}");
            return Err(CliError::usage(why).hint("only shards of mds and litdata are compressed"));
        }
        let read = ReadOptions {
            dtype: self.dtype,
            vocabulary: self.vocab,
            column: self.column,
            targets: self.targets,
            loss_weights: self.loss_weights,
            weights_beside: true,
            ..ReadOptions::default()
        };
        Ok(Job {
            source: self.source,
            output: self.output,
            read,
            write: WriteOptions {
                kind,
                zstd_level: self.zstd,
                shard_bytes: self.shard_size,
                column: self.to_column,
            },
            dtype: self.to_dtype,
            eos: self.eos,
            split: self.split,
            drop_empty: self.drop_empty,
            selection: self.selection.selection(),
            tokenizer: self.tokenizer,
            threads: self.jobs.map_or_else(all_cores, NonZeroUsize::get),
            save_bytes: self.save_every.max(1),
            restart: self.restart,
        })
    }
}

/// Warns of what is rarely meant.
fn warn_of(summary: &convert::Summary, is_column: bool) {
    if let Some(targets) = summary.targets {
        let hint = match is_column {
            true => "is it the column that says which tokens are trained on?",
            false => "so says the index of the source: `dquant inspect` shows both",
        };
        Targets(targets, summary.tokens).check(hint);
    }
    if let Some(id) = summary.min_id.filter(|id| *id < 0) {
        console::warn(&format!("ids begin at {id}"), formats::BELOW_ZERO_HINT);
    }
    match summary.unread.as_deref() {
        Some("attention_mask") => console::warn(
            "column `attention_mask` is not read: where it holds 0, padding is kept as tokens",
            "write rows without padding; streams cut and pack documents of any length",
        ),
        Some(column) if is_weights(column) => console::warn(
            &format!("column `{column}` is not read: all tokens weigh the same"),
            &format!("--loss-weights {column} writes them beside the tokens"),
        ),
        Some(column) => console::warn(
            &format!("column `{column}` is not read: all tokens are trained on"),
            &format!("--targets {column} keeps which tokens are trained on, in a pair"),
        ),
        None => {}
    }
}

fn is_bin(output: &Path) -> bool {
    output.extension().is_some_and(|ending| ending == "bin")
}

/// The format that a name stands for.
fn kind_of(output: &Path) -> Result<Kind, CliError> {
    match output.extension().and_then(|ending| ending.to_str()) {
        Some("bin") => Ok(Kind::Flat),
        Some("npy") => Ok(Kind::Npy),
        Some("idx") => Ok(Kind::Megatron),
        Some("tar") => Ok(Kind::WebDataset),
        Some("parquet") => Ok(Kind::Parquet),
        Some("arrow") => Ok(Kind::Arrow),
        _ => {
            let why = format!("the name {} tells no format", output.display());
            Err(CliError::usage(why).hint("name it with --to: mds, litdata, webdataset, …"))
        }
    }
}

/// The result.
#[derive(Debug, Serialize)]
struct Converted {
    output: String,
    #[serde(flatten)]
    summary: convert::Summary,
}

impl Report for Converted {
    const SCHEMA: &'static str = "dquant.convert/1";
}

impl fmt::Display for Converted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Converted { output, summary } = self;
        let convert::Summary { from, to, from_dtype, dtype, tokens, .. } = summary;
        writeln!(f, "{output}: {from} {from_dtype} to {to} {dtype}, {} tokens", Count(*tokens))?;
        if let Some(targets) = summary.targets {
            writeln!(f, "  targets      {}", Targets(targets, *tokens))?;
        }
        if let Some(weights) = &summary.loss_weights {
            writeln!(f, "  loss weights {}", weights.display())?;
        }
        if let Some(documents) = summary.documents {
            write!(f, "  documents    {}", Count(documents))?;
            match summary.eos {
                Some(eos) => writeln!(f, ", each ends with id {eos}")?,
                None => writeln!(f)?,
            }
        }
        if let Some(dropped) = &summary.dropped {
            let of = |documents, tokens| {
                format!("{} documents with {} tokens", Count(documents), Count(tokens))
            };
            let filtered = of(dropped.filtered_documents, dropped.filtered_tokens);
            let repeated = of(dropped.duplicate_documents, dropped.duplicate_tokens);
            writeln!(f, "  left out     filter {filtered}, duplicates {repeated}")?;
        }
        if let (Some(min), Some(max)) = (summary.min_id, summary.max_id) {
            writeln!(f, "  ids          {min} to {max}")?;
        }
        let bytes = Bytes(summary.bytes);
        writeln!(f, "  verified     {bytes} read back, digest {}", summary.digest)?;
        write!(f, "  manifest     {}", summary.manifest.display())
    }
}
