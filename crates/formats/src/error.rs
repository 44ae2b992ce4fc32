//! Why a dataset cannot be read, written or described, and what to try next.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use xio::dataset::{DatasetError, Dtype};

/// Why an operation on a dataset failed. Every variant names the file.
#[derive(Debug, Error)]
pub enum Error {
    /// An error of the operating system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// A verb: read, write.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The header or index of a flat, NumPy or Megatron file is invalid.
    #[error("{}: {source}", path.display())]
    Dataset {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: DatasetError,
    },
    /// A file contradicts its format.
    #[error("{}: {why}", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file is valid, but is not read here, or not without more information.
    #[error("{}: {why}", path.display())]
    Refused {
        /// Which file.
        path: PathBuf,
        /// Why.
        why: String,
        /// The next thing to try.
        hint: String,
    },
    /// An id cannot be stored in the type of the output.
    #[error("{}: token {position} has id {id}, which {dtype} cannot hold", path.display())]
    DoesNotFit {
        /// The file that holds it.
        path: PathBuf,
        /// Which token of the dataset, counted from 0.
        position: u64,
        /// The id.
        id: i128,
        /// The type of the output.
        dtype: Dtype,
    },
    /// An id is none of the vocabulary's.
    #[error("{}: token {position} has id {id}, beyond the vocabulary of {vocab}", path.display())]
    BeyondVocabulary {
        /// The file that holds it.
        path: PathBuf,
        /// Which token of the dataset, counted from 0.
        position: u64,
        /// The id.
        id: i128,
        /// Ids of the vocabulary.
        vocab: u64,
    },
    /// Data read back, or checked against a manifest, differs.
    #[error("{}: {why}", path.display())]
    Differs {
        /// Which file.
        path: PathBuf,
        /// What differs.
        why: String,
    },
    /// A thread of the operation ended before its work was done.
    #[error("{}: a reader stopped unexpectedly", path.display())]
    Stopped {
        /// The dataset.
        path: PathBuf,
    },
}

/// What to do about sequences that belong to no document.
pub const DOCUMENTLESS_HINT: &str = "Megatron-core refuses it, too: merge the files anew; to stream the tokens without \
                                     documents, move the index away and name the type with --dtype";

/// What to do about ids that are none of the vocabulary's.
pub const VOCABULARY_HINT: &str = "is it the tokenizer that made the file, and the right --dtype?";

/// What ids below 0 may be.
pub const BELOW_ZERO_HINT: &str = "ids below 0 are no tokens: labels hold -100 where a token is no target, and `convert --targets` names their column";

impl Error {
    pub(crate) fn read(path: &Path) -> impl Fn(io::Error) -> Error + Copy + '_ {
        |source| Error::Io { action: "read", path: path.to_owned(), source }
    }

    pub(crate) fn write(path: &Path) -> impl Fn(io::Error) -> Error + Copy + '_ {
        |source| Error::Io { action: "write", path: path.to_owned(), source }
    }

    pub(crate) fn dataset(path: &Path) -> impl Fn(DatasetError) -> Error + Copy + '_ {
        |source| Error::Dataset { path: path.to_owned(), source }
    }

    pub(crate) fn corrupt(path: &Path, why: impl Into<String>) -> Error {
        Error::Corrupt { path: path.to_owned(), why: why.into() }
    }

    pub(crate) fn refused(path: &Path, why: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Refused { path: path.to_owned(), why: why.into(), hint: hint.into() }
    }

    /// What is asked for needs a feature that this build does not have. Every program of the
    /// project says it so.
    #[cfg(not(all(feature = "parquet", feature = "zstd")))]
    pub(crate) fn not_built(path: &Path, what: &str, feature: &str) -> Error {
        let why =
            format!("{what}: that needs the feature `{feature}`, which this build does not have");
        Error::refused(path, why, "build with `cargo build --release --features full`")
    }

    /// The next thing to try.
    pub fn hint(&self) -> &str {
        match self {
            Error::Refused { hint, .. } => hint,
            Error::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                "free some space and run the same command again: it continues; or choose another disk"
            }
            Error::Io { action: "write", .. } => {
                "name an output in a folder that exists and is writable"
            }
            Error::Io { .. } => "name a file that exists and that this user may read",
            Error::Dataset { source: DatasetError::Ragged { .. }, .. } => {
                "the file is of another type, or incomplete"
            }
            Error::Dataset { source: DatasetError::Documentless { .. }, .. } => DOCUMENTLESS_HINT,
            Error::Dataset { .. } => {
                "token files are flat, .npy of integers, Megatron .bin + .idx, or of a format in \
                 docs/formats.md; this one may be incomplete"
            }
            Error::Corrupt { .. } => {
                "the file may be incomplete: compare it with its origin, or write it again"
            }
            Error::DoesNotFit { .. } => {
                "choose a wider type for the output, such as --to-dtype u32"
            }
            Error::BeyondVocabulary { id: ..0, .. } => BELOW_ZERO_HINT,
            Error::BeyondVocabulary { .. } => VOCABULARY_HINT,
            Error::Differs { .. } => "something else wrote to the files, or the disk is faulty",
            Error::Stopped { .. } => "this is a bug: report it with the command line",
        }
    }

    /// Whether the data itself is the reason, not the command line or the machine.
    pub fn is_about_data(&self) -> bool {
        matches!(
            self,
            Error::DoesNotFit { .. } | Error::BeyondVocabulary { .. } | Error::Differs { .. }
        )
    }
}
