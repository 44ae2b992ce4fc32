//! Why a run ends without an output.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Encoding, TokenType, skipped};

/// Why a run ends without an output.
#[derive(Debug, Error)]
pub enum TokenizeError {
    /// An error of the operating system, or of a decompressor.
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
    /// Standard input can be read once.
    #[error("standard input is named twice")]
    StdinTwice,
    /// An input promises compression by its name and is not compressed.
    #[error("{} is not compressed with {what}", path.display())]
    NotCompressed {
        /// The input.
        path: PathBuf,
        /// The format that its name promises.
        what: &'static str,
    },
    /// An input is neither text nor lines nor rows.
    #[error("{} is {what}, from which no documents are read", path.display())]
    NoDocumentsIn {
        /// The input.
        path: PathBuf,
        /// What it is, with its article.
        what: &'static str,
    },
    /// This build cannot read such a file.
    #[error("{} needs the feature `{feature}`, which this build does not have", path.display())]
    NotBuilt {
        /// The file.
        path: PathBuf,
        /// The feature of cargo.
        feature: &'static str,
    },
    /// A Parquet file is damaged or is none.
    #[error("{}: {reason}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The reader's reason.
        reason: String,
    },
    /// A Parquet file has no such text column.
    #[error("{} has no text column `{column}`: {reason}", path.display())]
    Column {
        /// The file.
        path: PathBuf,
        /// The column.
        column: String,
        /// What there is instead.
        reason: String,
    },
    /// The output exists and is a device, a folder or a link.
    #[error("{} exists and is not a regular file", path.display())]
    OutputNotAFile {
        /// The output.
        path: PathBuf,
    },
    /// An output of this name has no place for its index.
    #[error("{} is no name for a pair of .bin and .idx", path.display())]
    NoIndexName {
        /// The output.
        path: PathBuf,
    },
    /// The output exists, and nobody said that it may be replaced.
    #[error("{} exists", path.display())]
    Exists {
        /// The output, or its index.
        path: PathBuf,
    },
    /// The two outputs are not two.
    #[error("{} and {} cannot both be outputs", output.display(), other.display())]
    SameOutput {
        /// The output.
        output: PathBuf,
        /// That of held-out documents.
        other: PathBuf,
    },
    /// Outputs that are to be extended are not the parts of this split.
    #[error("cannot append: {}: {reason}", path.display())]
    Split {
        /// The output.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// The next thing to try.
        hint: String,
    },
    /// One part of a split would be replaced, and the other one left.
    #[error("{} is one part of a split, and {} the other", path.display(), other.display())]
    OtherPart {
        /// The output.
        path: PathBuf,
        /// The dataset that would be left.
        other: PathBuf,
    },
    /// One part of a split has no documents.
    #[error("none of {documents} documents went to {}", path.display())]
    EmptyPart {
        /// The output of the part.
        path: PathBuf,
        /// Documents of the run.
        documents: u64,
    },
    /// Another run writes this output.
    #[error("another run is writing {}", path.display())]
    Busy {
        /// The output.
        path: PathBuf,
    },
    /// The output that is to be extended, or its index, is not as it must be.
    #[error("cannot append: {}: {reason}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The output that is to be extended holds ids of another type.
    #[error("cannot append {dtype}: {} holds {found}", path.display())]
    OtherType {
        /// The output.
        path: PathBuf,
        /// Its type.
        found: TokenType,
        /// The wanted type.
        dtype: TokenType,
    },
    /// The manifest cannot be read or written.
    #[error(transparent)]
    Manifest(#[from] formats::Error),
    /// The interrupted run cannot be continued.
    #[error("cannot resume the interrupted run: {reason}")]
    Resume {
        /// What differs or is missing.
        reason: String,
    },
    /// The inputs hold no file.
    #[error("there is no file in {inputs}")]
    NoFiles {
        /// The inputs as given.
        inputs: String,
    },
    /// Every document was left out.
    #[error(
        "no file holds {}: {}{}",
        if *chat { "conversations" } else { "text" },
        skipped(*not_utf8, *empty, *broken, "are "),
        first_of(first.as_deref())
    )]
    NoDocuments {
        /// Files that are not UTF-8.
        not_utf8: u64,
        /// Documents of no text.
        empty: u64,
        /// Lines and rows without text.
        broken: u64,
        /// The first of them, and why.
        first: Option<String>,
        /// Whether conversations were to be read.
        chat: bool,
    },
    /// The output would replace one of the inputs.
    #[error("{} is to be read and to be written", path.display())]
    OutputIsInput {
        /// The file.
        path: PathBuf,
    },
    /// A document cannot be read, and the user wants all of them.
    #[error("{place}: {reason}")]
    Strict {
        /// Which document.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A token cannot be stored in the wanted type.
    #[error("{place}: token {position} of the document has id {id}, which does not fit {dtype}")]
    DoesNotFit {
        /// Which document.
        place: String,
        /// Which token of the document, counted from 0; the end-of-text token counts.
        position: u64,
        /// The id.
        id: u32,
        /// The wanted type.
        dtype: TokenType,
    },
    /// A token is none of those that the model has.
    #[error(
        "{place}: token {position} of the document has id {id}, beyond the vocabulary of {vocab}"
    )]
    BeyondVocabulary {
        /// Which document.
        place: String,
        /// Which token of the document, counted from 0; the end-of-text token counts.
        position: u64,
        /// The id.
        id: u32,
        /// Ids of the model.
        vocab: u64,
    },
    /// The vocabulary in this binary cannot be loaded.
    #[error("the encoding {encoding} cannot be loaded: {reason}")]
    Encoding {
        /// Which one.
        encoding: Encoding,
        /// The loader's error.
        reason: String,
    },
    /// A file is no `tokenizer.json`.
    #[error("{} is no usable tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The library's reason.
        reason: String,
    },
    /// A file is no chat template.
    #[error("{} is no usable chat template: {reason}", path.display())]
    ChatTemplate {
        /// The file.
        path: PathBuf,
        /// The reason, with the line where it is known.
        reason: String,
    },
    /// There is no chat template beside a tokenizer.
    #[error("there is no chat template beside {}", tokenizer.display())]
    NoChatTemplate {
        /// The `tokenizer.json`.
        tokenizer: PathBuf,
    },
    /// Conversations cannot be made so.
    #[error("--chat: {reason}")]
    Chat {
        /// What is wrong.
        reason: String,
        /// The next thing to try.
        hint: &'static str,
    },
    /// A vocabulary has no such token.
    #[error("{vocabulary} has no token {token}")]
    Eos {
        /// The token.
        token: String,
        /// The vocabulary.
        vocabulary: String,
    },
    /// A tokenizer does not say what ends a document.
    #[error("{vocabulary} does not say which token ends a document")]
    NoDefaultEos {
        /// The vocabulary.
        vocabulary: String,
    },
    /// A vocabulary has no ids for a document.
    #[error("{place} cannot be encoded: {reason}")]
    NotEncoded {
        /// Which document.
        place: String,
        /// The library's reason.
        reason: String,
    },
    /// The system starts no more threads.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// A thread of the run ended before its work was done.
    #[error("an encoder stopped while it worked on {place}")]
    EncoderStopped {
        /// Which document.
        place: String,
    },
}

impl TokenizeError {
    pub(super) fn io<'a>(
        action: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> TokenizeError + 'a {
        move |source| TokenizeError::Io { action, path: path.to_owned(), source }
    }
}

/// The first of several, behind their number.
fn first_of(first: Option<&str>) -> String {
    first.map(|first| format!("; the first is {first}")).unwrap_or_default()
}
