//! Writing: tokens and ends of documents into the files of a format.
//!
//! A writer works in a folder of its own, where nothing has its final name. It can say at any time
//! how much of what it was given is in its files for good ([`Writer::save`]), and a later run goes
//! on from there: files are only appended to, and cut back to their length of that moment.

pub(crate) mod append;
#[cfg(feature = "parquet")]
pub(crate) mod columns;
pub(crate) mod contiguous;
pub(crate) mod shards;
pub(crate) mod tar;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xio::dataset::Dtype;

use crate::error::Error;
use crate::kind::Kind;

/// What a writer has in its files, or would have after [`Writer::save`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// No more than before.
    Same,
    /// Everything before the document that ended.
    BeforeDocument,
    /// Everything.
    All,
}

/// Writes a dataset.
pub(crate) trait Writer {
    /// The next tokens of the document, in the type of the output.
    fn tokens(&mut self, bytes: &[u8]) -> Result<Settled, Error>;

    /// A sequence of the document ends, and another one follows. Only Megatron keeps sequences.
    fn end_sequence(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The document ends.
    fn end_document(&mut self) -> Result<Settled, Error>;

    /// Puts what is settled on the disk; returns what [`create`] needs to go on from there.
    fn save(&mut self) -> Result<Value, Error>;

    /// Completes the files.
    fn finish(self: Box<Self>) -> Result<(), Error>;
}

/// How to write a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOptions {
    /// The format.
    pub kind: Kind,
    /// Compress shards with zstd at this level; MosaicML and LitData only.
    pub zstd_level: Option<i32>,
    /// Bytes of a shard, before compression.
    pub shard_bytes: u64,
    /// Name of the column, field or member for the tokens.
    pub column: Option<String>,
}

/// Where a writer puts its files.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The folder of the output, or of its one file.
    pub(crate) folder: PathBuf,
    /// For scratch files.
    pub(crate) scratch: PathBuf,
    /// Name of the one file; none where the output is a folder.
    pub(crate) file: Option<String>,
}

impl Place {
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join(self.file.as_deref().unwrap_or("tokens"))
    }
}

/// Starts a writer, or goes on where `saved` was.
pub(crate) fn create(
    place: Place,
    options: &WriteOptions,
    dtype: Dtype,
    threads: usize,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    match options.kind {
        Kind::Flat | Kind::Npy => contiguous::run(&place, options.kind, dtype, saved),
        Kind::Megatron => contiguous::megatron(&place, dtype, saved),
        Kind::Mds | Kind::LitData => shards::create(place, options, dtype, threads, saved),
        Kind::WebDataset => tar::create(place, options, dtype, saved),
        Kind::Parquet | Kind::Arrow => create_columns(place, options, dtype, saved),
    }
}

#[cfg(feature = "parquet")]
fn create_columns(
    place: Place,
    options: &WriteOptions,
    dtype: Dtype,
    saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    columns::create(place, options, dtype, saved)
}

#[cfg(not(feature = "parquet"))]
fn create_columns(
    place: Place,
    options: &WriteOptions,
    _dtype: Dtype,
    _saved: Option<Value>,
) -> Result<Box<dyn Writer>, Error> {
    let what = format!("{} is to have the format {}", place.file().display(), options.kind);
    Err(Error::not_built(&place.folder, &what, "parquet"))
}

/// Longest document of a format that needs it whole in memory.
pub(crate) const MAX_DOCUMENT_BYTES: usize = 256 << 20;

/// Why a document is not written.
pub(crate) fn too_long(path: &Path) -> Error {
    let why =
        format!("a document is longer than {MAX_DOCUMENT_BYTES} bytes, the most of this format");
    let hint =
        "cut it: --split 2048 for samples of 2048 tokens, or --eos ID where an id ends documents";
    Error::refused(path, why, hint)
}

/// Reads what [`Writer::save`] returned.
pub(crate) fn restore<T: for<'a> Deserialize<'a>>(path: &Path, saved: Value) -> Result<T, Error> {
    serde_json::from_value(saved)
        .map_err(|error| Error::corrupt(path, format!("its journal is invalid: {error}")))
}

/// A state as [`Writer::save`] returns it.
pub(crate) fn state<T: Serialize>(path: &Path, state: &T) -> Result<Value, Error> {
    serde_json::to_value(state).map_err(|error| Error::write(path)(error.into()))
}
