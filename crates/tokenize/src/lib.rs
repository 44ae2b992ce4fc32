//! Text to one flat file of token ids, the format of datasets.
//!
//! A document is a text file, a line of JSON or a row of Parquet, or a conversation in a line of
//! JSON. Its tokens are followed by the token that ends a document, and its length is kept in the
//! index beside the output. Plain text is cut into chunks that are encoded on all cores and written
//! in order. The result depends on the text and the vocabulary alone: cuts are made only where the
//! encoding's own splitting rule ends a piece ([`cut`]), so the tokens are those of the whole
//! document, whatever the chunk size and the number of threads.
//!
//! Memory is bounded by the chunk size times a small multiple of the threads, however large a file
//! is; a line, a row, and a document for a vocabulary from a file are held as a whole. The output
//! appears under its name when it is complete, and never before. A run that was killed can be
//! resumed and writes the same bytes. A token that does not fit the wanted type stops the run and
//! is named with its document and position; nothing wraps.
//!
//! | module | what it holds |
//! |---|---|
//! | [`sources`] | which files are read, in which order, and what they hold |
//! | `input` | opening and decompressing them |
//! | `readers`, `jsonl`, `parquet` | documents from the inputs |
//! | [`cut`] | where text may be cut without changing its tokens |
//! | [`vocabulary`] | what turns text into ids |
//! | [`encoding`], [`bpe`] | the four built-in encodings |
//! | `hugging_face` | vocabularies in a `tokenizer.json` |
//! | `chat` | conversations, rendered by a chat template and divided into turns |
//! | `guard` | panics of libraries as errors |
//! | [`holdout`] | which documents are held out for validation |
//! | `turns` | how the tokens of a conversation are divided |
//! | `batch` | what passes between the threads |
//! | [`pipeline`] | reader, encoders and writer, connected by bounded queues |
//! | `checkpoint` | what a killed run needs to go on |
//! | [`sink`], [`index`], `manifest`, `described` | the output file, the boundaries of documents, and what is said about both |
//! | `token_type` | how ids are stored |

mod batch;
pub mod bpe;
#[cfg_attr(not(feature = "hugging-face"), path = "no_chat.rs")]
mod chat;
mod checkpoint;
pub mod cut;
mod described;
pub mod encoding;
mod error;
#[cfg(any(feature = "hugging-face", feature = "parquet"))]
mod guard;
pub mod holdout;
#[cfg(feature = "hugging-face")]
mod hugging_face;
pub mod index;
mod input;
mod jsonl;
mod manifest;
#[cfg(feature = "parquet")]
mod parquet;
mod pipeline;
mod readers;
pub mod sink;
pub mod sources;
mod token_type;
mod turns;
pub mod vocabulary;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use batch::Reason;
pub use encoding::Encoding;
pub use error::TokenizeError;
pub use holdout::{Holdout, Rule, Share};
pub use pipeline::run;
pub use sink::Leftovers;
pub use sources::{CHAT_TEMPLATE, Format, Noted};
pub use token_type::TokenType;
pub use vocabulary::{Eos, VocabularyName};

/// What to tokenise and how.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// Files and folders; `-` is standard input.
    pub inputs: &'a [PathBuf],
    /// What the inputs hold; by their names when not given.
    pub format: Option<Format>,
    /// The field or column that holds the text, or the messages; the usual one when not given.
    pub field: Option<&'a str>,
    /// Whether documents are conversations, and what renders them.
    pub chat: Option<ChatTemplate>,
    /// Whether the weight of each token in the loss is written beside the output, as messages say
    /// it.
    pub loss_weights: bool,
    /// Whether a document that cannot be read ends the run.
    pub strict: bool,
    /// The file to write.
    pub output: &'a Path,
    /// Whether the lengths of documents are written beside it.
    pub with_index: bool,
    /// The documents that are held out for validation, and their output.
    pub holdout: Option<Holdout>,
    /// Whether an output of that name is extended.
    pub append: bool,
    /// Whether an output of that name is replaced.
    pub force: bool,
    /// Whether an interrupted run is continued, and this one kept when it is interrupted.
    pub resume: bool,
    /// The vocabulary.
    pub vocabulary: VocabularyName,
    /// What ends a document.
    pub eos: Eos,
    /// How an id is stored; as in the output that is extended, or else u32, when not given.
    pub dtype: Option<TokenType>,
    /// Ids of the model: one that is not below this number is an error.
    pub vocab: Option<u64>,
    /// Text per task of an encoder, in bytes.
    pub chunk_bytes: usize,
    /// Text between two states from which a killed run can go on, in bytes.
    pub checkpoint_bytes: u64,
    /// Encoders that run at the same time.
    pub threads: usize,
    /// Takes the names of unfinished files while they exist.
    pub leftovers: Leftovers,
}

impl Job<'_> {
    /// The field or column that holds the text when none is named.
    pub const FIELD: &'static str = "text";
}

/// What renders conversations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplate {
    /// The template beside the `tokenizer.json`.
    Beside,
    /// That in a file.
    File(PathBuf),
}

/// What has been written so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Documents.
    pub documents: u64,
    /// Bytes of text in them.
    pub text_bytes: u64,
    /// Tokens, those that end documents included.
    pub tokens: u64,
    /// Those of them that the assistant says in conversations.
    #[serde(default)]
    pub targets: u64,
    /// Conversations in which the assistant says nothing.
    #[serde(default)]
    pub without_targets: u64,
    /// The largest id; 0 when there are no tokens.
    pub max_id: u32,
    /// Files left out because they are not UTF-8.
    pub skipped_not_utf8: u64,
    /// Documents left out because they are empty.
    pub skipped_empty: u64,
    /// Lines and rows left out because they hold no text.
    pub skipped_broken: u64,
    /// The first of them, and why.
    pub first_broken: Option<String>,
    /// Cuts at a place that may change a token or two, in text without a place to cut.
    pub forced_cuts: u64,
}

impl Totals {
    /// These and others together.
    pub(crate) fn plus(&self, others: &Totals) -> Totals {
        Totals {
            documents: self.documents + others.documents,
            text_bytes: self.text_bytes + others.text_bytes,
            tokens: self.tokens + others.tokens,
            targets: self.targets + others.targets,
            without_targets: self.without_targets + others.without_targets,
            max_id: self.max_id.max(others.max_id),
            skipped_not_utf8: self.skipped_not_utf8 + others.skipped_not_utf8,
            skipped_empty: self.skipped_empty + others.skipped_empty,
            skipped_broken: self.skipped_broken + others.skipped_broken,
            first_broken: self.first_broken.clone().or_else(|| others.first_broken.clone()),
            forced_cuts: self.forced_cuts + others.forced_cuts,
        }
    }
}

/// What went to the output of held-out documents.
#[derive(Clone, Debug)]
pub struct HeldOut {
    /// What was written.
    pub totals: Totals,
    /// Tokens that were in the output before.
    pub tokens_before: u64,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was written to the output, by the interrupted run too if this one continued it; and all
    /// that was left out.
    pub totals: Totals,
    /// What was written to the output of held-out documents.
    pub held_out: Option<HeldOut>,
    /// How an id is stored.
    pub dtype: TokenType,
    /// The name of the vocabulary, and its hash if it is a file.
    pub vocabulary: String,
    /// The id that ends a document.
    pub eos: Option<u32>,
    /// Tokens that were in the output before.
    pub tokens_before: u64,
}

/// Progress and documents left out, for the caller.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The run continues one that wrote this much.
    Resumed(&'a Totals),
    /// An interrupted run is forgotten.
    StartedAnew,
    /// What is assumed of an input before it is read.
    Noted {
        /// The input.
        path: &'a Path,
        /// What.
        noted: Noted,
    },
    /// A document is left out.
    Skipped {
        /// Which one.
        place: &'a str,
        /// Why.
        reason: &'a Reason,
    },
    /// Some more has been written.
    Progress {
        /// In all.
        totals: &'a Totals,
        /// Bytes of the inputs read for it.
        input_bytes: u64,
        /// Bytes of all inputs; `None` with standard input.
        input_total: Option<u64>,
    },
}

/// How many documents were left out, by reason, without reasons that did not occur.
pub fn skipped(not_utf8: u64, empty: u64, broken: u64, verb: &str) -> String {
    let part = |(count, what)| format!("{count} {verb}{what}");
    let reasons = [(not_utf8, "not UTF-8"), (empty, "empty"), (broken, "broken")].into_iter();
    reasons.filter(|(count, _)| *count > 0).map(part).collect::<Vec<_>>().join(", ")
}
