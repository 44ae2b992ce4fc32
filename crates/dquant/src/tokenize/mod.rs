//! Text files to one flat file of token ids, the format of datasets.
//!
//! Every input file is one document; its tokens are followed by the end-of-text token of the encoding. A document is
//! cut into chunks that are encoded on all cores and written in order. The result depends on the text and the encoding
//! alone: cuts are made only where the encoding's own splitting rule ends a piece ([`cut`]), so the tokens are those
//! of the whole document, whatever the chunk size and the number of threads.
//!
//! Memory is bounded by the chunk size times a small multiple of the threads, however large a file is. The output
//! appears under its name when it is complete, and never before. A token that does not fit the wanted type stops the
//! run and is named with its file and position; nothing wraps.
//!
//! | module | what it holds |
//! |---|---|
//! | [`sources`] | which files are read, and in which order |
//! | [`cut`] | where text may be cut without changing its tokens |
//! | [`encoding`] | the four encodings |
//! | [`pipeline`] | reader, encoders and writer, connected by bounded queues |
//! | [`sink`] | the output file |

pub mod cut;
pub mod encoding;
mod pipeline;
pub mod sink;
pub mod sources;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use encoding::Encoding;
pub use pipeline::run;
pub use sink::TokenType;

/// What to tokenise and how.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Files and folders.
    pub inputs: &'a [PathBuf],
    /// The file to write.
    pub output: &'a Path,
    /// The vocabulary and splitting rule.
    pub encoding: Encoding,
    /// How an id is stored.
    pub dtype: TokenType,
    /// Text per task of an encoder, in bytes.
    pub chunk_bytes: usize,
    /// Encoders that run at the same time.
    pub threads: usize,
}

/// What has been written so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Documents, each from one file.
    pub documents: u64,
    /// Bytes of text in them.
    pub text_bytes: u64,
    /// Tokens, the end-of-text tokens included.
    pub tokens: u64,
    /// The largest id; 0 when there are no tokens.
    pub max_id: u32,
    /// Files left out because they are not UTF-8.
    pub skipped_not_utf8: u64,
    /// Files left out because they are empty.
    pub skipped_empty: u64,
    /// Cuts at a place that may change a token or two, in text without a place to cut.
    pub forced_cuts: u64,
}

/// Progress and skipped files, for the caller.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A file is left out.
    Skipped {
        /// The file.
        path: &'a Path,
        /// Why.
        reason: Skip,
    },
    /// Some more has been written.
    Progress(&'a Totals),
}

/// How many files were left out, by reason, without reasons that did not occur.
pub(crate) fn skipped(not_utf8: u64, empty: u64, verb: &str) -> String {
    let part = |(count, what)| format!("{count} {verb}{what}");
    let reasons = [(not_utf8, "not UTF-8"), (empty, "empty")].into_iter();
    reasons.filter(|(count, _)| *count > 0).map(part).collect::<Vec<_>>().join(", ")
}

/// Why a file is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// It is not UTF-8 from this byte on.
    NotUtf8 {
        /// Offset of the first byte that is not part of UTF-8 text.
        valid_bytes: u64,
    },
    /// It holds no text.
    Empty,
}

/// Why a run ends without an output.
#[derive(Debug, Error)]
pub enum TokenizeError {
    /// An error of the operating system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// A verb: open, read, write.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An input is neither a file nor a folder.
    #[error("{} is neither a file nor a folder", path.display())]
    NotAFile {
        /// The input.
        path: PathBuf,
    },
    /// The output exists and is a device, a folder or a link.
    #[error("{} exists and is not a regular file", path.display())]
    OutputNotAFile {
        /// The output.
        path: PathBuf,
    },
    /// The inputs hold no file.
    #[error("there is no file in {inputs}")]
    NoFiles {
        /// The inputs as given.
        inputs: String,
    },
    /// Every file was left out.
    #[error("no file holds text: {}", skipped(*skipped_not_utf8, *skipped_empty, "are "))]
    NoDocuments {
        /// Files that are not UTF-8.
        skipped_not_utf8: u64,
        /// Files of no bytes.
        skipped_empty: u64,
    },
    /// The output would replace one of the inputs.
    #[error("{} is to be read and to be written", path.display())]
    OutputIsInput {
        /// The file.
        path: PathBuf,
    },
    /// A token cannot be stored in the wanted type.
    #[error("{}: token {position} of the document has id {id}, which does not fit {dtype}", path.display())]
    DoesNotFit {
        /// The file of the document.
        path: PathBuf,
        /// Which token of the document, counted from 0; the end-of-text token counts.
        position: u64,
        /// The id.
        id: u32,
        /// The wanted type.
        dtype: TokenType,
    },
    /// A file was valid text when it was checked and is not when it is read.
    #[error("{} changed while it was read", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The vocabulary in this binary cannot be loaded.
    #[error("the encoding {encoding} cannot be loaded: {reason}")]
    Encoding {
        /// Which one.
        encoding: Encoding,
        /// The loader's error.
        reason: String,
    },
    /// A thread of the run ended before its work was done.
    #[error("an encoder stopped while it worked on {}", path.display())]
    EncoderStopped {
        /// The file of the document.
        path: PathBuf,
    },
}

impl TokenizeError {
    fn io<'a>(
        action: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> TokenizeError + 'a {
        move |source| TokenizeError::Io { action, path: path.to_owned(), source }
    }
}
