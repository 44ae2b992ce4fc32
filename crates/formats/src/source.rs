//! Reading: a dataset as parts that are independent of each other, each a stream of tokens and ends
//! of documents.
//!
//! [`open`] detects the format and checks headers and indices; what a file holds is decided by
//! [`settle`]. Parts are a few MiB where the format allows it, so that several threads can read one
//! dataset and a run that was killed can go on at a part. Reading takes memory for a block, not for
//! a part or a document.

pub(crate) mod blocks;
#[cfg(feature = "parquet")]
pub(crate) mod columns;
pub(crate) mod contiguous;
mod hashes;
pub(crate) mod litdata;
pub(crate) mod mds;
pub(crate) mod shard;
mod turns;
pub(crate) mod webdataset;
pub(crate) mod weights;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use xio::dataset::{Container, Dtype, Sniff, TokenFile};

use crate::error::Error;
use crate::kind::Kind;
use crate::manifest::{Manifest, is_plain};
use crate::settle::{self, Identified, NoTokens, Origin, Refusal};

/// Bytes of a part where the format can be cut anywhere.
pub(crate) const PART_BYTES: u64 = 8 << 20;

/// Bytes read at once; a multiple of every token size.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

/// Names by which a column of tokens is known where several columns could be it.
pub(crate) const TOKEN_COLUMNS: [&str; 2] = ["tokens", "input_ids"];

/// Names by which columns are known that say which tokens are targets, or no padding.
const COLUMNS_BESIDE: [&str; 6] = [
    "labels",
    "loss_mask",
    "assistant_masks",
    "assistant_mask",
    "completion_mask",
    "attention_mask",
];

/// Names by which columns of loss weights are known.
const WEIGHT_COLUMNS: [&str; 3] = ["loss_weights", "token_weights", "weights"];

/// Whether a column of this name holds loss weights.
pub fn is_weights(name: &str) -> bool {
    WEIGHT_COLUMNS.contains(&name)
}

/// The first column beside the tokens that says something of each of them and is not read. `column`
/// is that of the tokens.
pub(crate) fn unread(
    names: &[&str],
    column: Option<&str>,
    options: &ReadOptions,
) -> Option<String> {
    let is_read = |name: &str| {
        let read = [column, options.targets.as_deref(), options.loss_weights.as_deref()];
        read.contains(&Some(name))
    };
    let is_meant = |name: &&&str| match **name {
        "attention_mask" => true,
        name if is_weights(name) => options.loss_weights.is_none(),
        _ => options.targets.is_none(),
    };
    let beside = COLUMNS_BESIDE.iter().chain(&WEIGHT_COLUMNS).filter(|name| !is_read(name));
    let mut beside = beside.filter(is_meant);
    beside.find(|name| names.contains(name)).map(|name| (*name).to_owned())
}

/// Largest `index.json` that is read.
pub(crate) const MAX_INDEX_BYTES: u64 = 256 << 20;

/// How to read a dataset.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The format, where the first bytes do not tell it.
    pub kind: Option<Kind>,
    /// The type of tokens that the format does not record.
    pub dtype: Option<Dtype>,
    /// Ids are below this number.
    pub vocabulary: Option<u64>,
    /// The column, field or member that holds the tokens, where there are several.
    pub column: Option<String>,
    /// The column that says which tokens are targets; Parquet, Arrow and MDS only.
    pub targets: Option<String>,
    /// The column with the loss weight of each token; Parquet, Arrow and MDS only.
    pub loss_weights: Option<String>,
    /// Read the loss weights beside a dataset in one run, if there are any.
    pub weights_beside: bool,
    /// Take the given type of a flat file without a look at its bytes or its manifest.
    pub trusted: bool,
    /// Do as if there were no manifest.
    pub ignore_manifest: bool,
}

impl ReadOptions {
    /// The manifest of the dataset at `path`, unless it is to be ignored.
    fn manifest(&self, path: &Path) -> Result<Option<Manifest>, Error> {
        if self.trusted || self.ignore_manifest { Ok(None) } else { Manifest::load(path) }
    }
}

/// What is known of a dataset before its tokens are read.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The format.
    pub kind: Kind,
    /// Type of the tokens.
    pub dtype: Dtype,
    /// Who says so.
    pub origin: Origin,
    /// Number of tokens, where the header or index tells it.
    pub tokens: Option<u64>,
    /// Number of documents, where the header or index tells it.
    pub documents: Option<u64>,
    /// Whether the sequences of each document take turns: see [`Manifest::targets`].
    pub targets: bool,
    /// Whether the loss weight of each token is read.
    pub loss_weights: bool,
    /// A column beside that of the tokens that says something of each token and is not read.
    pub unread: Option<String>,
    /// What else a user should know, such as the column that is read.
    pub note: Option<String>,
    /// Where the tokens lie, when they are one run in one file.
    pub run: Option<TokenFile>,
    /// The manifest beside it.
    pub manifest: Option<Manifest>,
    /// The folder that `files` are relative to.
    pub folder: PathBuf,
    /// All files of the dataset, those with tokens in their order.
    pub files: Vec<PathBuf>,
}

/// Receives the tokens of a part.
pub trait Sink {
    /// The loss weights of the tokens of the next call of [`tokens`](Sink::tokens), each a
    /// little-endian `f32`.
    ///
    /// # Errors
    /// When no more are wanted.
    fn weights(&mut self, _bytes: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    /// The next tokens, little-endian and whole, at most [`MAX_PIECE`] bytes.
    ///
    /// # Errors
    /// When no more are wanted.
    fn tokens(&mut self, bytes: &[u8]) -> Result<(), Error>;

    /// A sequence of the document ends here, and another one of the same document follows.
    ///
    /// # Errors
    /// When no more are wanted.
    fn end_sequence(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The document ends here.
    ///
    /// # Errors
    /// When no more are wanted.
    fn end_document(&mut self) -> Result<(), Error>;
}

/// Most bytes of one call of [`Sink::tokens`].
pub const MAX_PIECE: usize = BLOCK_BYTES as usize;

/// A dataset that was opened.
pub trait Source: Send + Sync {
    /// What is known of it.
    fn layout(&self) -> &Layout;

    /// Number of parts.
    fn parts(&self) -> u64;

    /// The file that holds a part, for messages.
    fn part_path(&self, part: u64) -> PathBuf;

    /// Reads one part, from its first token to its last.
    ///
    /// # Errors
    /// When the file cannot be read or contradicts its format, and every error of the sink.
    fn read(&self, part: u64, sink: &mut dyn Sink) -> Result<(), Error>;
}

/// Opens the dataset at `path`: a file, one half of a Megatron pair, an `index.json`, or a folder.
///
/// # Errors
/// Names the file and what is wrong with it.
pub fn open(path: &Path, options: &ReadOptions) -> Result<Box<dyn Source>, Error> {
    if let Some(dtype) = options.dtype.filter(|dtype| dtype.is_float()) {
        let why = format!("is to be read as {dtype}, which is no type of token ids");
        return Err(Error::refused(path, why, "name an integer type"));
    }
    let found = fs::metadata(path).map_err(Error::read(path))?;
    if !found.is_dir() && !found.is_file() {
        return Err(Error::refused(path, "is neither a file nor a folder", "name a token file"));
    }
    let is_index = path.file_name().is_some_and(|name| name == "index.json");
    let source = match (found.is_dir(), is_index, path.parent()) {
        (true, ..) => open_folder(path, options),
        (false, true, Some(folder)) => open_folder(folder, options),
        _ => open_file(path, options),
    }?;
    let kind = source.layout().kind;
    let of = match (&options.targets, &options.loss_weights) {
        (Some(_), _) => Some("targets"),
        (_, Some(_)) => Some("loss weights"),
        _ => None,
    };
    if let Some(of) = of
        && !matches!(kind, Kind::Parquet | Kind::Arrow | Kind::Mds)
    {
        let why =
            format!("is of the format {kind}: a column of {of} is read of parquet, arrow and mds");
        let hint = format!("save the rows as Parquet, tokens and {of} as columns of lists");
        return Err(Error::refused(path, why, hint));
    }
    Ok(source)
}

fn open_file(path: &Path, options: &ReadOptions) -> Result<Box<dyn Source>, Error> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if settle::is_sidecar(&name) {
        let why = "describes a dataset and holds no tokens";
        return Err(Error::refused(path, why, "name the file that it describes"));
    }
    let kind = match options.kind {
        Some(kind) => kind,
        None => kind_of(path, options)?,
    };
    match kind {
        Kind::Flat | Kind::Npy | Kind::Megatron => contiguous::open(path, kind, options),
        Kind::WebDataset => webdataset::open(path, vec![path.to_owned()], options),
        Kind::Parquet | Kind::Arrow => open_columns(path, vec![path.to_owned()], kind, options),
        Kind::Mds | Kind::LitData => {
            let why = format!("is a file, and a dataset in the format {kind} is a folder");
            Err(Error::refused(path, why, "name the folder that holds its index.json"))
        }
    }
}

/// How a file is opened. [`settle::describe`] tells flat files from arrays, and refuses what is not
/// read at all.
fn kind_of(path: &Path, options: &ReadOptions) -> Result<Kind, Error> {
    let file = File::open(path).map_err(Error::read(path))?;
    let len = file.metadata().map_err(Error::read(path))?.len();
    let sniffed = match settle::sniff(&file, len) {
        // With `--force`, a known header that does not fit is no reason to refuse.
        Err(NoTokens::Dataset(_)) if options.trusted => Sniff::Unmarked,
        sniffed => sniffed.map_err(|error| no_tokens(path, error))?,
    };
    let manifest = options.manifest(path)?;
    let index = || Ok::<_, Error>(settle::index_of(path).filter(|index| index.exists()));
    Ok(match settle::identify(path, sniffed, manifest.as_ref(), index)? {
        Identified::Alone => Kind::Flat,
        Identified::Indexed(_) | Identified::Index => Kind::Megatron,
        Identified::Samples(Container::Parquet) => Kind::Parquet,
        Identified::Samples(Container::Arrow) => Kind::Arrow,
        Identified::Samples(Container::Tar) => Kind::WebDataset,
    })
}

/// A file that is not read as tokens.
fn no_tokens(path: &Path, error: NoTokens) -> Error {
    match error {
        NoTokens::Io(source) => Error::read(path)(source),
        NoTokens::Dataset(source) => Error::dataset(path)(source),
        NoTokens::Refused(Refusal { why, hint, .. }) => Error::refused(path, why, hint),
    }
}

fn open_folder(folder: &Path, options: &ReadOptions) -> Result<Box<dyn Source>, Error> {
    let index = folder.join("index.json");
    if index.is_file() {
        let found = index_json(&index)?;
        return match (found.get("shards"), found.get("chunks")) {
            (Some(_), None) => mds::open(folder, &index, found, options),
            (None, Some(_)) => litdata::open(folder, &index, found, options),
            _ => Err(Error::refused(
                &index,
                "lists neither `shards` (MosaicML) nor `chunks` (LitData)",
                "name a folder that MDSWriter or litdata.optimize wrote",
            )),
        };
    }
    if let Some(files) = saved_files(folder)? {
        return open_columns(folder, files, Kind::Arrow, options);
    }
    let entries = fs::read_dir(folder).map_err(Error::read(folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<Result<Vec<_>, _>>().map_err(Error::read(folder))?;
    paths.sort();
    paths.retain(|path| is_data(path));
    let with = |ending: &str| -> Vec<PathBuf> {
        let ends = |path: &&PathBuf| path.extension().is_some_and(|found| found == ending);
        paths.iter().filter(ends).cloned().collect()
    };
    let found = [with("tar"), with("parquet"), with("arrow")];
    match found {
        [tars, none, nothing] if !tars.is_empty() && none.is_empty() && nothing.is_empty() => {
            webdataset::open(folder, tars, options)
        }
        [none, files, nothing] if !files.is_empty() && none.is_empty() && nothing.is_empty() => {
            open_columns(folder, files, Kind::Parquet, options)
        }
        [none, nothing, files] if !files.is_empty() && none.is_empty() && nothing.is_empty() => {
            open_columns(folder, files, Kind::Arrow, options)
        }
        _ => Err(Error::refused(
            folder,
            "holds no index.json, and not only .tar, .parquet or .arrow files either",
            "name one file, or a folder that holds one dataset",
        )),
    }
}

/// Whether a file of a folder without an index may be data: hidden files and those of tools, which
/// begin with `_`, are not, nor is what `map` and `filter` of Hugging Face datasets keep of what
/// they computed.
fn is_data(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_cache = name.starts_with("cache-") && name.ends_with(".arrow");
    !name.starts_with(['.', '_']) && !is_cache
}

/// The files of a dataset that `save_to_disk` of Hugging Face datasets wrote, in their order, which
/// `state.json` lists.
fn saved_files(folder: &Path) -> Result<Option<Vec<PathBuf>>, Error> {
    let state = folder.join("state.json");
    if !state.is_file() {
        return Ok(None);
    }
    let found = index_json(&state)?;
    let Some(listed) = found.get("_data_files").and_then(|files| files.as_array()) else {
        return Ok(None);
    };
    if !found["_indices_data_files"].is_null() {
        let why = "orders its rows by indices beside them, which are not read";
        return Err(Error::refused(&state, why, "save it after flatten_indices()"));
    }
    let name = |file: &serde_json::Value| {
        let name = file["filename"].as_str().filter(|name| is_plain(name));
        let why = "`_data_files` names no file in the folder";
        name.map(|name| folder.join(name)).ok_or_else(|| Error::corrupt(&state, why))
    };
    listed.iter().map(name).collect::<Result<_, _>>().map(Some)
}

#[cfg(feature = "parquet")]
fn open_columns(
    path: &Path,
    files: Vec<PathBuf>,
    kind: Kind,
    options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    columns::open(path, files, kind, options)
}

#[cfg(not(feature = "parquet"))]
fn open_columns(
    path: &Path,
    _files: Vec<PathBuf>,
    kind: Kind,
    _options: &ReadOptions,
) -> Result<Box<dyn Source>, Error> {
    Err(Error::not_built(path, &format!("is a dataset in the format {kind}"), "parquet"))
}

/// Reads an `index.json`.
fn index_json(path: &Path) -> Result<serde_json::Value, Error> {
    let file = File::open(path).map_err(Error::read(path))?;
    let mut text = Vec::new();
    file.take(MAX_INDEX_BYTES + 1).read_to_end(&mut text).map_err(Error::read(path))?;
    if text.len() as u64 > MAX_INDEX_BYTES {
        return Err(Error::corrupt(path, format!("is larger than {MAX_INDEX_BYTES} bytes")));
    }
    serde_json::from_slice(&text)
        .map_err(|error| Error::corrupt(path, format!("is no valid JSON: {error}")))
}

/// The paths relative to `folder`, for manifests and messages.
pub(crate) fn relative(folder: &Path, paths: &[PathBuf]) -> Vec<PathBuf> {
    paths.iter().map(|path| path.strip_prefix(folder).unwrap_or(path).to_owned()).collect()
}

/// The folder that holds `path`.
pub(crate) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}
