//! `dquant inspect`: what a dataset on this machine holds, and its manifest.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::budget::Bytes;
use formats::convert::{Census, all_cores, census};
use formats::manifest::{Contents, Split};
use formats::{Kind, Layout, Manifest, ReadOptions, Weights, settle};
use lab::units::Count;
use serde::Serialize;
use xio::dataset::{Dtype, Format};

use super::datasets::{Bar, note_guess, shown, token_type};
use super::targets::Targets;
use super::{Console, Report};
use crate::exit::{CliError, Exit};

/// Show the contents of a token dataset, and write or verify its manifest
///
/// The format is detected: flat, NumPy, a Megatron pair (name either half), MosaicML, LitData,
/// WebDataset, Parquet, Arrow. The type of a flat file comes from its manifest or --dtype; without
/// both it is guessed where its bytes leave no doubt. Every token is read once.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant inspect corpus.bin --dtype u32
  dquant inspect corpus.npy --json
  dquant inspect my-corpus_text_document.idx
  dquant inspect corpus.bin --dtype u16 --vocab 50257 --eos 50256 --write-manifest
  dquant inspect corpus.bin --verify"
)]
pub(super) struct Inspect {
    /// A token file, one half of a Megatron pair, or a folder
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Type of the tokens of a flat file
    #[arg(long, value_name = "TYPE", value_parser = token_type)]
    dtype: Option<Dtype>,

    /// Size of the vocabulary: it is an error if an id is not below it
    #[arg(long, value_name = "N")]
    vocab: Option<u64>,

    /// Column, field or member that holds the tokens
    #[arg(long, value_name = "NAME")]
    column: Option<String>,

    /// Compare every block with the manifest
    #[arg(long, conflicts_with = "write_manifest")]
    verify: bool,

    /// Write the manifest; it replaces an earlier one
    #[arg(long)]
    write_manifest: bool,

    /// With --write-manifest: name of the encoding that made the tokens
    #[arg(long, value_name = "NAME", requires = "write_manifest")]
    tokenizer: Option<String>,

    /// With --write-manifest: id that ends every document and occurs nowhere else
    #[arg(long, value_name = "ID", requires = "write_manifest")]
    eos: Option<u64>,

    /// With --write-manifest: believe --dtype whatever the bytes look like
    #[arg(long, requires = "write_manifest", requires = "dtype")]
    force: bool,
}

impl Inspect {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        if self.file.starts_with("dq:/") {
            let text = format!(
                "{}: every token is read, so it has to be a file of this machine",
                self.file.display()
            );
            return Err(CliError::usage(text).hint(
                "`dquant datasets dq://HOST/NAME` shows what a target says of its datasets",
            ));
        }
        let name = self.file.file_name().unwrap_or_default().to_string_lossy();
        if settle::is_loss_weights(&name) {
            return self.weights(console);
        }
        let options = ReadOptions {
            dtype: self.dtype,
            vocabulary: self.vocab,
            column: self.column.clone(),
            trusted: self.force,
            ignore_manifest: self.write_manifest,
            ..ReadOptions::default()
        };
        let source = formats::open(&self.file, &options)?;
        let layout = source.layout();
        note_guess(console, self.file.display(), layout.dtype.name(), &layout.origin.to_string());
        let mut bar = Bar::new("reading", 0);
        let mut show = |tokens, share| bar.show(console, tokens, share);
        let eos = self.eos.map(i128::from);
        let found = census(&*source, eos, all_cores(), &mut show)?;
        self.check_vocabulary(&found)?;
        let manifest = match (self.write_manifest, self.verify) {
            (true, _) => Some(self.write(layout, &found)?),
            (_, true) => Some(self.verify(layout, &found)?),
            _ => None,
        };
        let beside = layout.run.map(|_| Weights::beside(&self.named(layout)));
        let weights = beside.transpose()?.flatten();
        if let Some(weights) = weights.as_ref().filter(|_| self.verify) {
            weights.verify()?;
        }
        let weights = weights.map(LossWeights);
        console.report(&Holding {
            loss_weights: weights,
            ..Holding::new(&self.file, layout, &found, manifest)
        })?;
        Ok(Exit::Good)
    }

    /// Shows a file of loss weights, and writes or verifies its manifest.
    fn weights(&self, console: &mut Console) -> Result<Exit, CliError> {
        let weights = Weights::read(&self.file)?;
        let manifest = match (self.write_manifest, self.verify) {
            (true, _) => Some(format!("written: {}", weights.write_manifest()?.display())),
            (_, true) if weights.verify()? => Some("verified: every block is as it was".to_owned()),
            (_, true) => {
                let why = format!("{} has no manifest", self.file.display());
                let hint = "write one: dquant inspect FILE --write-manifest";
                return Err(CliError::usage(why).hint(hint));
            }
            _ => None,
        };
        console.report(&Alone { loss_weights: LossWeights(weights), manifest })?;
        Ok(Exit::Good)
    }

    fn check_vocabulary(&self, found: &Census) -> Result<(), CliError> {
        match (self.vocab, found.range) {
            (Some(vocabulary), Some((min, max))) if min < 0 || max >= i128::from(vocabulary) => {
                let id = if min < 0 { min } else { max };
                let why = format!(
                    "{}: id {id} is beyond the vocabulary of {vocabulary}",
                    self.file.display()
                );
                let hint = if id < 0 { formats::BELOW_ZERO_HINT } else { formats::VOCABULARY_HINT };
                Err(CliError::check_failed(why).hint(hint))
            }
            _ => Ok(()),
        }
    }

    /// What the manifest of a file is named after: of a Megatron pair the `.bin`.
    fn named(&self, layout: &Layout) -> PathBuf {
        match layout.run {
            Some(_) => layout.folder.join(layout.files.first().unwrap_or(&self.file)),
            None if self.file.ends_with("index.json") => layout.folder.clone(),
            None => self.file.clone(),
        }
    }

    fn write(&self, layout: &Layout, found: &Census) -> Result<String, CliError> {
        let ends = self.eos.map(|eos| {
            let ends = found.last.is_none_or(|last| last == i128::from(eos));
            (eos, ends.then_some(found.occurrences))
        });
        if let Some((eos, None)) = ends {
            let why = format!("{}: its last token is not {eos}", self.file.display());
            return Err(CliError::check_failed(why)
                .hint("name the id that ends documents, or leave --eos out"));
        }
        // What the bytes do not tell is kept; a manifest that cannot be read tells nothing.
        let before = Manifest::load(&self.named(layout)).ok().flatten();
        let of_format = layout.kind.has_documents().then_some(found.documents());
        let contents = Contents {
            tokens: found.tokens(),
            min_id: found.range.map(|(min, _)| min),
            max_id: found.range.map(|(_, max)| max),
            tokenizer: self
                .tokenizer
                .clone()
                .or(before.as_ref().and_then(|before| before.tokenizer.clone())),
            documents: of_format.or(ends.and_then(|(_, documents)| documents)),
            eos: self.eos,
            targets: layout.kind == Kind::Megatron
                && before.as_ref().is_some_and(|before| before.targets),
        };
        let described = (layout.kind.name(), layout.dtype);
        let mut manifest =
            Manifest::create(described, contents, &layout.folder, &layout.files, &|_| ())?;
        manifest.split = before.and_then(|before| before.split);
        let path = manifest.store(&self.named(layout))?;
        Ok(format!("written: {}", path.display()))
    }

    fn verify(&self, layout: &Layout, found: &Census) -> Result<String, CliError> {
        let Some(manifest) = &layout.manifest else {
            let why = format!("{} has no manifest", self.file.display());
            return Err(
                CliError::usage(why).hint("write one: dquant inspect FILE --write-manifest")
            );
        };
        manifest.verify(&layout.folder, &|_| ())?;
        let largest = found.range.map(|(_, max)| max);
        let documents = manifest.documents.filter(|_| layout.kind.has_documents());
        let same = manifest.tokens == found.tokens()
            && manifest.dtype() == layout.dtype
            && manifest.max_id.is_none_or(|max| Some(max) == largest)
            && documents.is_none_or(|documents| documents == found.documents());
        match same {
            true => Ok("verified: every block is as it was".to_owned()),
            false => Err(CliError::check_failed(format_args!(
                "{}: its bytes are those of the manifest, its tokens are not",
                self.file.display()
            ))
            .hint(formats::manifest::REWRITE_HINT)),
        }
    }
}

/// The result: what the dataset holds.
#[derive(Debug, Serialize)]
struct Holding {
    file: String,
    format: &'static str,
    dtype: &'static str,
    dtype_origin: String,
    tokens: u64,
    data_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<u64>,
    /// Bytes behind the array of a `.npy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    trailing_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
    min_id: Option<i128>,
    max_id: Option<i128>,
    fits_u16: bool,
    digest: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer: Option<String>,
    /// Whether every second sequence of a document is a target.
    targets: bool,
    /// The tokens of these.
    #[serde(skip_serializing_if = "Option::is_none")]
    target_tokens: Option<u64>,
    /// Those beside it, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_weights: Option<LossWeights>,
    /// The other part, of documents that were split, as the manifest says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
}

impl Holding {
    fn new(path: &Path, layout: &Layout, found: &Census, manifest: Option<String>) -> Holding {
        let (mut sequences, mut trailing_bytes) = (None, None);
        match layout.run.map(|run| run.format) {
            Some(Format::Megatron { sequences: count, .. }) => sequences = Some(count),
            Some(Format::Npy { trailing_bytes: bytes @ 1.., .. }) => trailing_bytes = Some(bytes),
            _ => {}
        }
        let file = match (&layout.run, layout.files.first()) {
            (Some(_), Some(name)) => shown(&layout.folder, name),
            _ => path.display().to_string(),
        };
        let documents = match layout.kind.has_documents() {
            true => Some(found.documents()),
            false => layout.documents,
        };
        let recorded = layout.manifest.as_ref();
        Holding {
            file,
            format: layout.kind.name(),
            dtype: layout.dtype.name(),
            dtype_origin: layout.origin.to_string(),
            tokens: found.tokens(),
            data_bytes: found.tokens() * u64::from(layout.dtype.bytes()),
            sequences,
            documents,
            trailing_bytes,
            note: layout.note.clone(),
            min_id: found.range.map(|(min, _)| min),
            max_id: found.range.map(|(_, max)| max),
            fits_u16: found.range.is_none_or(|(min, max)| min >= 0 && max <= i128::from(u16::MAX)),
            digest: found.digest(),
            tokenizer: recorded.and_then(|manifest| manifest.tokenizer.clone()),
            targets: recorded.is_some_and(|manifest| manifest.targets),
            target_tokens: layout.targets.then_some(found.targets),
            loss_weights: None,
            split: recorded.and_then(|manifest| manifest.split.clone()),
            manifest,
        }
    }
}

/// What loss weights are like.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct LossWeights(Weights);

impl fmt::Display for LossWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Weights { min, max, mean, zeros, not_finite, .. } = &self.0;
        write!(f, "{min} to {max}, mean {mean:.3}, {} are 0", Count(*zeros))?;
        match not_finite {
            0 => Ok(()),
            count => write!(f, ", {} are NaN or infinite, where streams end", Count(*count)),
        }
    }
}

/// The result: what a file of loss weights holds.
#[derive(Debug, Serialize)]
struct Alone {
    #[serde(flatten)]
    loss_weights: LossWeights,
    #[serde(skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
}

impl Report for Alone {
    const SCHEMA: &'static str = "dquant.inspect.loss_weights/1";
}

impl fmt::Display for Alone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Weights { file, values, .. } = &self.loss_weights.0;
        writeln!(f, "{}: npy, {} loss weights", file.display(), Count(*values))?;
        if let Some(manifest) = &self.manifest {
            writeln!(f, "  manifest     {manifest}")?;
        }
        write!(f, "  weights      {}", self.loss_weights)
    }
}

impl Report for Holding {
    const SCHEMA: &'static str = "dquant.inspect/1";
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, bytes) = (Count(self.tokens), Bytes(self.data_bytes));
        writeln!(f, "{}: {}, {tokens} {} tokens, {bytes}", self.file, self.format, self.dtype)?;
        match (self.documents, self.sequences) {
            (Some(documents), Some(sequences)) => {
                writeln!(
                    f,
                    "  documents    {} in {} sequences",
                    Count(documents),
                    Count(sequences)
                )?;
            }
            (Some(documents), None) => writeln!(f, "  documents    {}", Count(documents))?,
            (None, _) => {}
        }
        if let Some(bytes) = self.trailing_bytes {
            writeln!(f, "  note         {bytes} bytes behind the array are ignored")?;
        }
        if let Some(note) = &self.note {
            writeln!(f, "  note         {note}")?;
        }
        if let Some(tokenizer) = &self.tokenizer {
            writeln!(f, "  tokenizer    {tokenizer}")?;
        }
        match self.target_tokens {
            Some(targets) => writeln!(f, "  targets      {}", Targets(targets, self.tokens))?,
            None if self.targets => {
                writeln!(f, "  targets      told by an index that is not here")?;
            }
            None => {}
        }
        if let Some(weights) = &self.loss_weights {
            writeln!(f, "  loss weights {weights}, {}", weights.0.file.display())?;
        }
        if let Some(Split { part, seed, share, other, other_fingerprint }) = &self.split {
            let (part, rest) = (part.name(), part.other().name());
            writeln!(
                f,
                "  split        {part} part, {share} held out by seed {seed}; {rest} part: {other}, fingerprint \
                 {other_fingerprint}"
            )?;
        }
        if let Some(manifest) = &self.manifest {
            writeln!(f, "  manifest     {manifest}")?;
        }
        let (Some(min), Some(max)) = (self.min_id, self.max_id) else {
            return write!(f, "  ids          none");
        };
        let fits = if self.fits_u16 {
            format!("fits u16: {} on the wire", Bytes(self.tokens * 2))
        } else {
            "does not fit u16".to_owned()
        };
        write!(f, "  ids          {min} to {max}, {fits}")
    }
}
