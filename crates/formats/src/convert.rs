//! From one format into another.
//!
//! ```text
//! readers (all cores) -> tokens in order -> writer -> read back and compared -> manifest -> final name
//! ```
//!
//! A selection of documents by their hashes costs a pass over the source before.
//!
//! Everything is written in a hidden folder beside the output, which gets its name only when it was
//! read back and its tokens and documents are those of the source. Now and then the writer puts its
//! files on the disk, and the journal in that folder says how far the source is in them: the same
//! command goes on from there after a crash, whatever the moment. A journal of another command or
//! of files that have changed is not used.

mod choice;
mod copy;
mod journal;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use serde::Serialize;
use xio::dataset::Dtype;
use xio::documents::Selection;
use xio::kernel::{self, Scan};

use crate::digest::Digest;
use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::{self, Contents, Manifest, Split};
use crate::reading::{self, Chunk, Plan};
use crate::settle;
use crate::source::blocks::Blocks;
use crate::source::weights::Weights;
use crate::source::{self, Layout, ReadOptions, Source};
use crate::value;
use crate::writer::{self, Place, WriteOptions};

pub use choice::Dropped;
use choice::{Choice, Rule};
use copy::{Copier, Cut, Progress, Saved};
use journal::{Identity, Staging};

/// What to convert, and how.
#[derive(Clone, Debug)]
pub struct Job {
    /// The dataset to read.
    pub source: PathBuf,
    /// The file or folder to write, which must not exist.
    pub output: PathBuf,
    /// How to read.
    pub read: ReadOptions,
    /// How to write.
    pub write: WriteOptions,
    /// Type of the tokens in the output; that of the source when not given.
    pub dtype: Option<Dtype>,
    /// The id that ends a document of a source without documents.
    pub eos: Option<u64>,
    /// Cut documents into pieces of this many tokens.
    pub split: Option<u64>,
    /// Leave documents without tokens out.
    pub drop_empty: bool,
    /// The documents of the source that are written. The list of a filter is a path.
    pub selection: Selection,
    /// Name of the encoding, for the manifest.
    pub tokenizer: Option<String>,
    /// Readers and compressors that run at the same time.
    pub threads: usize,
    /// Bytes of tokens between two points from which a killed run can go on.
    pub save_bytes: u64,
    /// Start over, whatever an earlier run has left.
    pub restart: bool,
}

/// What a run is doing.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// It goes on where an earlier run ended, after so many tokens.
    Resumed {
        /// Tokens that are in the output already.
        tokens: u64,
    },
    /// More was read to choose documents.
    Hashed {
        /// Tokens so far.
        tokens: u64,
        /// Share of the parts of the source, 0 to 1.
        share: f64,
    },
    /// More was read and written.
    Copied {
        /// Tokens so far.
        tokens: u64,
        /// Share of the parts of the source, 0 to 1.
        share: f64,
    },
    /// More was read back.
    Verified {
        /// Tokens so far.
        tokens: u64,
        /// Share of the output, 0 to 1.
        share: f64,
    },
}

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Format of the source.
    pub from: Kind,
    /// Format of the output.
    pub to: Kind,
    /// Type in the source.
    pub from_dtype: &'static str,
    /// Type in the output.
    pub dtype: &'static str,
    /// Who says the type of the source: see `docs/formats.md`.
    pub dtype_origin: String,
    /// Number of tokens.
    pub tokens: u64,
    /// Those that a model is trained to say, where the output tells them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<u64>,
    /// The file with the loss weight of each token, where they are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_weights: Option<PathBuf>,
    /// A column beside the tokens that says something of each token and was not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unread: Option<String>,
    /// Number of documents; none where neither format keeps them apart.
    pub documents: Option<u64>,
    /// What the selection left out, where there is one.
    #[serde(flatten)]
    pub dropped: Option<Dropped>,
    /// The id that ends every document, where there is one.
    pub eos: Option<u64>,
    /// Smallest id.
    pub min_id: Option<i128>,
    /// Largest id.
    pub max_id: Option<i128>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Digest of the tokens, the same in every format and type.
    pub digest: String,
    /// Tokens that an earlier run had written.
    pub resumed_tokens: u64,
    /// The manifest.
    pub manifest: PathBuf,
}

/// What a dataset holds, from reading all of it.
#[derive(Clone, Debug)]
pub struct Census {
    /// Digest of the tokens.
    pub(crate) tokens: Digest,
    /// Digest of the lengths of the documents.
    pub(crate) documents: Digest,
    /// Digest of where documents go on with another sequence.
    pub(crate) sequences: Digest,
    /// Tokens of every second sequence of a document: the targets, where sequences take turns.
    pub targets: u64,
    /// Smallest and largest id.
    pub range: Option<(i128, i128)>,
    /// How often the id occurs that was looked for.
    pub occurrences: u64,
    /// The last token.
    pub last: Option<i128>,
}

impl Census {
    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens.count
    }

    /// Number of documents.
    pub fn documents(&self) -> u64 {
        self.documents.count
    }

    /// The digest of the tokens, as text.
    pub fn digest(&self) -> String {
        self.tokens.hex()
    }
}

/// Reads all of a dataset. `watch` receives the number of tokens and the share of the parts.
///
/// # Errors
/// When it cannot be read or contradicts its format.
pub fn census(
    source: &dyn Source,
    eos: Option<i128>,
    threads: usize,
    watch: &mut dyn FnMut(u64, f64),
) -> Result<Census, Error> {
    let dtype = source.layout().dtype;
    let (mut tokens, mut documents, mut scan) = (Digest::default(), Digest::default(), Scan::EMPTY);
    let (mut sequences, mut targets, mut is_target) = (Digest::default(), 0, false);
    let (mut occurrences, mut in_document, mut last) = (0, 0, None);
    let plan = Plan { dtype, eos: None, threads, first_part: 0 };
    // Documents that end with `eos` are not cut here: what the format keeps apart is counted.
    reading::read(source, plan, 0, &mut |chunk| {
        tokens.extend(&chunk.tokens, dtype);
        scan = scan.merge(kernel::scan(&chunk.tokens, dtype));
        if let Some(eos) = eos {
            occurrences += value::positions(&chunk.tokens, dtype, eos).len() as u64;
        }
        last = value::last(&chunk.tokens, dtype).or(last);
        let mut at = 0;
        let mut count = |end: usize, is_target: bool| {
            let tokens = (end - at) as u64;
            at = end;
            targets += if is_target { tokens } else { 0 };
            tokens
        };
        for end in &chunk.ends {
            in_document += count(end.at, is_target);
            is_target = !end.is_document && !is_target;
            if end.is_document {
                documents.push(std::mem::take(&mut in_document));
            } else {
                sequences.push(documents.count);
                sequences.push(in_document);
            }
        }
        in_document += count(chunk.tokens.len() / dtype.bytes() as usize, is_target);
        watch(tokens.count, chunk.part as f64 / source.parts().max(1) as f64);
        Ok(())
    })?;
    let range = scan.range;
    Ok(Census { tokens, documents, sequences, targets, range, occurrences, last })
}

/// Converts a dataset.
///
/// # Errors
/// Nothing has the name of the output then. After an error of the disk, the same command goes on
/// where this one ended.
pub fn convert(job: &Job, watch: &mut dyn FnMut(Event)) -> Result<Summary, Error> {
    Staging::recall(&job.output)?;
    check_output(job)?;
    let source = source::open(&job.source, &job.read)?;
    check_targets(job, source.layout())?;
    check_weights(job, source.layout())?;
    let staging = Staging::open(&job.output)?;
    let done = Run { job, source: &*source, staging: &staging }.run(watch);
    match &done {
        Ok(_) => {}
        // The next run can go on.
        Err(Error::Io { .. }) if staging.can_go_on() => return done,
        Err(_) => {}
    }
    staging.remove();
    done
}

/// The names that the output will take.
fn outputs(job: &Job) -> Vec<PathBuf> {
    match job.write.kind {
        // The index first: a `.bin` without one is a flat file.
        Kind::Megatron => vec![job.output.with_extension("idx"), job.output.with_extension("bin")],
        _ => vec![job.output.clone()],
    }
}

/// The name that the loss weights of the output take.
fn weights_of(job: &Job) -> PathBuf {
    settle::loss_weights_of(&job.output)
}

fn check_output(job: &Job) -> Result<(), Error> {
    // Loss weights that lie there would be taken for those of the output.
    let weights = Some(weights_of(job)).filter(|_| keeps_weights(job.write.kind));
    for output in outputs(job).into_iter().chain(weights) {
        if fs::symlink_metadata(&output).is_ok() {
            return Err(Error::refused(&output, "exists", "remove it, or choose another name"));
        }
    }
    let ending = job.output.extension();
    let is_half = ending.is_none_or(|ending| ending == "idx" || ending == "bin");
    if job.write.kind == Kind::Megatron && !is_half {
        let why = "is no name of a Megatron pair";
        return Err(Error::refused(&job.output, why, "let it end with .idx or .bin"));
    }
    if job.output.file_name().is_none_or(|name| name.to_str().is_none()) {
        return Err(Error::refused(&job.output, "is no name of a file", "choose another name"));
    }
    Ok(())
}

/// Whether the output can say which tokens of the source are targets.
fn check_targets(job: &Job, layout: &Layout) -> Result<(), Error> {
    let refused = |why: String, hint| Err(Error::refused(&job.source, why, hint));
    let recorded = layout.manifest.as_ref().is_some_and(|manifest| manifest.targets);
    if recorded && matches!(layout.kind, Kind::Flat | Kind::Npy) {
        let why = "has targets according to its manifest, and no index that says where they are";
        return refused(why.into(), "put the index back beside it: NAME.idx beside NAME.bin");
    }
    if !layout.targets {
        return Ok(());
    }
    let kind = job.write.kind;
    if kind != Kind::Megatron {
        let why = format!("says which tokens are targets, which {kind} does not keep");
        return refused(why, "write a Megatron pair: name it NAME.idx, or add --to megatron");
    }
    let option = if job.eos.is_some() { "--eos" } else { "--split" };
    if job.eos.is_some() || job.split.is_some() {
        let why = format!("says which tokens are targets, and {option} cuts its documents anew");
        return refused(why, "leave it out: plans cut documents when they are read");
    }
    Ok(())
}

/// Whether loss weights lie beside a dataset of this format.
fn keeps_weights(kind: Kind) -> bool {
    matches!(kind, Kind::Flat | Kind::Npy | Kind::Megatron)
}

/// Whether the output can have the loss weights of the source beside it.
fn check_weights(job: &Job, layout: &Layout) -> Result<(), Error> {
    let kind = job.write.kind;
    if !layout.loss_weights || keeps_weights(kind) {
        return Ok(());
    }
    let why = format!("has loss weights, which {kind} does not keep");
    let hint = "write a flat file, .npy or a Megatron pair: DST.bin, DST.npy or DST.idx";
    Err(Error::refused(&job.source, why, hint))
}

/// Whether the output is a folder: always, or by its name.
fn is_folder(write: &WriteOptions, output: &Path) -> bool {
    let has_ending = |ending: &str| output.extension().is_some_and(|found| found == ending);
    match write.kind {
        Kind::WebDataset => !has_ending("tar"),
        Kind::Parquet => !has_ending("parquet"),
        Kind::Arrow => !has_ending("arrow"),
        kind => kind.is_folder(),
    }
}

/// One run.
struct Run<'a> {
    job: &'a Job,
    source: &'a dyn Source,
    staging: &'a Staging,
}

impl Run<'_> {
    fn dtype(&self) -> Dtype {
        self.job.dtype.unwrap_or(self.job.write.kind.stored(self.source.layout().dtype))
    }

    /// The id that ends documents of a source that does not keep them apart.
    fn eos(&self) -> Option<u64> {
        let layout = self.source.layout();
        let recorded = layout.manifest.as_ref().and_then(|manifest| manifest.eos);
        self.job.eos.or(recorded.filter(|_| !layout.kind.has_documents()))
    }

    fn place(&self) -> Place {
        let folder = is_folder(&self.job.write, &self.job.output);
        let name = match self.job.write.kind {
            Kind::Megatron => self.job.output.with_extension("bin"),
            _ => self.job.output.clone(),
        };
        let name = name.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        Place {
            folder: self.staging.data(),
            scratch: self.staging.scratch(),
            file: name.filter(|_| !folder),
        }
    }

    /// Where the loss weights of the output are written.
    fn weights_place(&self) -> Place {
        let name = weights_of(self.job).file_name().map(|name| name.to_string_lossy().into_owned());
        Place { folder: self.staging.scratch(), scratch: self.staging.scratch(), file: name }
    }

    fn run(&self, watch: &mut dyn FnMut(Event)) -> Result<Summary, Error> {
        let rule = Rule::read(&self.job.selection)?;
        let chosen_by = rule.as_ref().map(|rule| rule.identity.clone());
        let identity = Identity::new(self.job, self.source, chosen_by)?;
        let saved = self.staging.load(&identity).filter(|_| !self.job.restart);
        let resumed_tokens = saved.as_ref().map_or(0, |(progress, _)| progress.tokens.count);
        let choice = rule.map(|rule| self.choose(&rule, watch)).transpose()?;
        if saved.is_some() {
            watch(Event::Resumed { tokens: resumed_tokens });
        } else {
            self.staging.clear()?;
        }
        let progress = self.copy(&identity, saved, choice.as_ref(), watch)?;
        self.check_documents(&progress)?;
        let census = self.verify(&progress, watch)?;
        let dropped = choice.map(|choice| choice.dropped);
        self.publish(&progress, &census, dropped, resumed_tokens)
    }

    /// Finds the documents that are written.
    fn choose(&self, rule: &Rule, watch: &mut dyn FnMut(Event)) -> Result<Choice, Error> {
        let (dtype, threads) = (self.source.layout().dtype, self.job.threads);
        let plan = Plan { dtype, eos: self.eos().map(i128::from), threads, first_part: 0 };
        let mut show = |tokens, share| watch(Event::Hashed { tokens, share });
        choice::choose(self.source, &self.job.source, plan, rule, &mut show)
    }

    /// Reads the source and writes the output.
    fn copy(
        &self,
        identity: &Identity,
        saved: Option<(Progress, Saved)>,
        choice: Option<&Choice>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Progress, Error> {
        let Job { write, threads, save_bytes, split, drop_empty, .. } = self.job;
        let (progress, state) = saved.unzip();
        let progress = progress.unwrap_or_default();
        let (tokens, weights) = state.map(|state| (state.tokens, state.weights)).unzip();
        let writer = writer::create(self.place(), write, self.dtype(), *threads, tokens)?;
        let weights = self.source.layout().loss_weights.then(|| {
            let npy = WriteOptions { kind: Kind::Npy, ..write.clone() };
            writer::create(self.weights_place(), &npy, Dtype::F32, *threads, weights.flatten())
        });
        let eos = self.eos().map(i128::from);
        let plan = Plan { dtype: self.dtype(), eos, threads: *threads, first_part: progress.part };
        let base = progress.source_tokens - progress.part_tokens;
        let targets = self.source.layout().targets;
        let cut = Cut { choice, split: *split, drop_empty: *drop_empty, sequences: targets };
        let mut copier = Copier::new(writer, weights.transpose()?, progress, cut, self.dtype());
        let width = u64::from(self.dtype().bytes());
        let (mut saved_tokens, mut position) = (progress.tokens.count, base);
        let parts = self.source.parts().max(1) as f64;
        reading::read(self.source, plan, base, &mut |chunk| {
            let share = chunk.part as f64 / parts;
            self.check_vocabulary(&chunk, position)?;
            position += chunk.tokens.len() as u64 / width;
            copier.take(&chunk)?;
            let tokens = copier.tokens();
            if (copier.settled_tokens() - saved_tokens) * width >= *save_bytes {
                let (progress, state) = copier.save()?;
                self.staging.store(identity, &progress, state)?;
                saved_tokens = progress.tokens.count;
            }
            watch(Event::Copied { tokens, share });
            Ok(())
        })?;
        copier.finish()
    }

    /// Whether the ids of a chunk, which begins at this token of the source, are below the
    /// vocabulary.
    fn check_vocabulary(&self, chunk: &Chunk, position: u64) -> Result<(), Error> {
        let Some(vocab) = self.job.read.vocabulary else { return Ok(()) };
        let dtype = self.dtype();
        let Some((min, max)) = kernel::scan(&chunk.tokens, dtype).range else { return Ok(()) };
        match if min < 0 { min } else { max } {
            id if id < 0 || id >= i128::from(vocab) => {
                let at = value::positions(&chunk.tokens, dtype, id).first().copied().unwrap_or(0);
                let (path, position) = (self.source.part_path(chunk.part), position + at as u64);
                Err(Error::BeyondVocabulary { path, position, id, vocab })
            }
            _ => Ok(()),
        }
    }

    /// Compares the documents that an id has ended with the manifest that names the id.
    fn check_documents(&self, progress: &Progress) -> Result<(), Error> {
        let Job { eos: None, split: None, drop_empty: false, selection, .. } = self.job else {
            return Ok(());
        };
        if !selection.is_empty() {
            return Ok(());
        }
        let recorded = self.source.layout().manifest.as_ref().and_then(|found| found.documents);
        match recorded {
            Some(recorded) if self.eos().is_some() && recorded != progress.documents.count => {
                let ended = progress.documents.count;
                let why = format!("{ended} documents end in it, its manifest says {recorded}");
                Err(Error::Differs { path: self.job.source.clone(), why })
            }
            _ => Ok(()),
        }
    }

    /// Reads the output back and compares it with what was to be written.
    fn verify(&self, wanted: &Progress, watch: &mut dyn FnMut(Event)) -> Result<Census, Error> {
        let kind = self.job.write.kind;
        let place = self.place();
        let path = if place.file.is_some() { place.file() } else { place.folder };
        let is_empty_folder =
            wanted.documents.count == 0 && is_folder(&self.job.write, &self.job.output);
        if is_empty_folder && kind != Kind::Mds && kind != Kind::LitData {
            let why = "the source holds no document, and a folder without files is no dataset";
            return Err(Error::refused(
                &self.job.source,
                why,
                "write one file instead of a folder",
            ));
        }
        let options = ReadOptions {
            kind: (!is_folder(&self.job.write, &self.job.output)).then_some(kind),
            dtype: Some(self.dtype()),
            column: self.job.write.column.clone().filter(|_| kind != Kind::LitData),
            trusted: true,
            ..ReadOptions::default()
        };
        let written = source::open(&path, &options)?;
        let mut show = |tokens, share| watch(Event::Verified { tokens, share });
        let census = census(&*written, wanted.first_end, self.job.threads, &mut show)?;
        let differs = |why: String| Err(Error::Differs { path: self.job.output.clone(), why });
        if census.tokens != wanted.tokens {
            let (wrote, read) = (wanted.tokens.count, census.tokens());
            return differs(format!("read back differs: {wrote} tokens written, {read} read"));
        }
        if kind.has_documents() && census.documents != wanted.documents {
            let (wrote, read) = (wanted.documents.count, census.documents());
            return differs(format!("read back differs: {wrote} documents written, {read} read"));
        }
        if self.source.layout().targets && census.sequences != wanted.sequences {
            return differs("read back differs: other tokens are targets".into());
        }
        if self.source.layout().loss_weights && self.weights_on_disk(wanted)? != wanted.weights {
            return differs("read back differs: the loss weights are others".into());
        }
        Ok(census)
    }

    /// Reads the loss weights back.
    fn weights_on_disk(&self, wanted: &Progress) -> Result<Digest, Error> {
        let path = self.weights_place().file();
        let file = fs::File::open(&path).map_err(Error::read(&path))?;
        let len = file.metadata().map_err(Error::read(&path))?.len();
        let data = wanted.tokens.count * u64::from(Dtype::F32.bytes());
        let mut blocks = Blocks::new(&file, &path, len - data.min(len), len);
        let (mut digest, mut left) = (Digest::default(), data.min(len));
        while left > 0 {
            let block = blocks.next(left)?;
            if block.is_empty() {
                break;
            }
            digest.extend(block, Dtype::F32);
            left -= block.len() as u64;
        }
        Ok(digest)
    }

    /// Writes the manifest and gives the output its name.
    fn publish(
        &self,
        progress: &Progress,
        census: &Census,
        dropped: Option<Dropped>,
        resumed_tokens: u64,
    ) -> Result<Summary, Error> {
        let kind = self.job.write.kind;
        let layout = self.source.layout();
        let recorded = layout.manifest.as_ref();
        let eos = progress.common_end(census.occurrences).and_then(|id| u64::try_from(id).ok());
        let knows_documents = kind.has_documents() || eos.is_some();
        let contents = Contents {
            tokens: census.tokens(),
            min_id: census.range.map(|(min, _)| min),
            max_id: census.range.map(|(_, max)| max),
            tokenizer: self
                .job
                .tokenizer
                .clone()
                .or(recorded.and_then(|found| found.tokenizer.clone())),
            documents: knows_documents.then_some(progress.documents.count),
            eos,
            targets: layout.targets,
        };
        let data = self.staging.data();
        let files = files_below(&data)?;
        let described = (kind.name(), self.dtype());
        let mut manifest = Manifest::create(described, contents.clone(), &data, &files, &|_| ())?;
        manifest.split = self.split();
        let path = self.publish_files(&manifest)?;
        let loss_weights = layout.loss_weights.then(|| weights_of(self.job));
        Ok(Summary {
            from: layout.kind,
            to: kind,
            from_dtype: layout.dtype.name(),
            dtype: self.dtype().name(),
            dtype_origin: layout.origin.to_string(),
            tokens: census.tokens(),
            targets: layout.targets.then_some(census.targets),
            loss_weights,
            unread: layout.unread.clone(),
            documents: contents.documents,
            dropped,
            eos,
            min_id: census.range.map(|(min, _)| min),
            max_id: census.range.map(|(_, max)| max),
            bytes: manifest.files.iter().map(|file| file.bytes).sum(),
            digest: census.digest(),
            resumed_tokens,
            manifest: path,
        })
    }

    /// The part of a split that the source is: so is the output, whose documents are documents of
    /// the source. It names the other part as that was.
    fn split(&self) -> Option<Split> {
        let layout = self.source.layout();
        let split = layout.manifest.as_ref()?.split.clone()?;
        let other = layout.folder.join(&split.other);
        let from = match is_folder(&self.job.write, &self.job.output) {
            true => self.job.output.join(manifest::IN_FOLDER),
            false => self.job.output.clone(),
        };
        Some(Split { other: manifest::relative(&from, &other), ..split })
    }

    /// Gives all files their names; returns that of the manifest.
    fn publish_files(&self, manifest: &Manifest) -> Result<PathBuf, Error> {
        let data = self.staging.data();
        if is_folder(&self.job.write, &self.job.output) {
            manifest.store_as(&data.join(manifest::IN_FOLDER))?;
            self.staging.name(&[(data, self.job.output.clone())])?;
            return Ok(self.job.output.join(manifest::IN_FOLDER));
        }
        let mut named = Vec::new();
        // Before the tokens, which would otherwise be there without them for a moment.
        if self.source.layout().loss_weights {
            let (staged, output) = (self.weights_place().file(), weights_of(self.job));
            let manifest = Weights::read(&staged)?.write_manifest()?;
            named.extend([(staged, output.clone()), (manifest, manifest::path_of(&output))]);
        }
        let outputs = outputs(self.job);
        // The file that readers name: for Megatron the `.bin`.
        let path = manifest::path_of(outputs.last().unwrap_or(&self.job.output));
        let staged = |output: &PathBuf| data.join(output.file_name().unwrap_or_default());
        named.extend(outputs.iter().map(|output| (staged(output), output.clone())));
        let staged = self.staging.scratch().join("manifest");
        manifest.store_as(&staged)?;
        named.push((staged, path.clone()));
        self.staging.name(&named).map(|()| path)
    }
}

/// Names of the files in a folder, in order.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(folder).map_err(Error::read(folder))?;
    let names = entries.map(|entry| entry.map(|entry| PathBuf::from(entry.file_name())));
    let mut names = names.collect::<Result<Vec<_>, _>>().map_err(Error::read(folder))?;
    names.sort();
    Ok(names)
}

/// One thread per core.
pub fn all_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}
