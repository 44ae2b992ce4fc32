//! `dquant tokenize`: the command in front of [`mod@::tokenize`].

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args};
use engine::budget::Bytes;
use lab::units::{self, Count, Wait};
use serde::Serialize;
use tokenize::{
    ChatTemplate, Encoding, Eos, Event, Format, HeldOut, Holdout, Job, Leftovers, Noted, Outcome,
    Reason, Rule, Share, TokenType, TokenizeError, Totals, VocabularyName, holdout, skipped,
};

use super::targets::Targets;
use super::{Console, Report, console};
use crate::exit::{CliError, Exit, on_end_signal};

/// Turn text into one flat file of token ids, with an index of documents
///
/// A document is a text file, a line of JSON (.jsonl, .ndjson, or .json that holds lines) or a row of
/// Parquet (.parquet), each also compressed (.gz, .zst), or standard input (-). Files that hold none
/// of these, such as .csv, are refused without --format, or left out of a folder. It ends with the vocabulary's end-of-text
/// token. Folders are read with everything below them, sorted by path; hidden files and symbolic
/// links inside are left out. Documents without text and files that are not UTF-8 are skipped and
/// counted. The tokens are those of each whole document, whatever the chunk size and the number
/// of jobs; text that spells a special token is plain text.
///
/// The output is a Megatron pair: NAME.bin holds the ids, NAME.idx the boundaries of documents. The
/// manifest NAME.bin.dquant.json says which vocabulary made them.
///
/// With --chat, a document is a conversation: a line of JSON with `messages` (role, content) or `conversations`
/// (from, value). Its sequences in the index take turns: what the assistant does not say, then what it says.
///
/// With --holdout, a share of the documents goes to a second output for validation. The text of a document
/// and the seed decide, so documents of one text are all in one part, whatever their order and the
/// vocabulary.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    group = ArgGroup::new("vocabulary").required(true).args(["encoding", "tokenizer"]),
    after_help = "\
Examples:
  dquant tokenize corpus/ --encoding r50k_base -o corpus.bin
  dquant tokenize corpus/ --encoding r50k_base --dtype u16 -o corpus.u16.bin
  dquant tokenize web.jsonl.zst --field text --encoding cl100k_base -o web.bin --resume
  dquant tokenize part-*.parquet --field content --tokenizer llama/tokenizer.json -o code.bin
  dquant tokenize new.jsonl --encoding cl100k_base -o web.bin --append
  dquant tokenize web.jsonl --encoding r50k_base -o web.bin --holdout 1%    # and web-valid.bin
  dquant tokenize web.jsonl --encoding r50k_base -o web.bin --holdout 0.5% --seed 7 --force
  dquant tokenize chat.jsonl --tokenizer llama/tokenizer.json --chat -o chat.bin
  dquant tokenize chat.jsonl --tokenizer llama/tokenizer.json --chat=my.jinja -o chat.bin
  zcat dump.gz | dquant tokenize - --format jsonl --encoding o200k_base -o dump.bin --json"
)]
pub(super) struct Tokenize {
    /// Files or folders of them; - is standard input
    #[arg(required = true, value_name = "FILES")]
    inputs: Vec<PathBuf>,

    /// Built-in vocabulary
    #[arg(long, value_enum)]
    encoding: Option<Encoding>,

    /// Vocabulary in a tokenizer.json of Hugging Face
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,

    /// What ends a document: a token, an id, or `none`; by default what the vocabulary says
    #[arg(long, value_name = "TOKEN", value_parser = |text: &str| Ok::<_, String>(Eos::from(text)))]
    eos: Option<Eos>,

    /// What the inputs hold, whatever their names say
    #[arg(long, value_enum)]
    format: Option<Format>,

    /// Field of JSON lines or column of Parquet that holds the text [default: text]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,

    /// Read conversations; the template beside --tokenizer renders them, or that in FILE
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    chat: Option<Option<PathBuf>>,

    /// With --chat: write how much each token weighs in the loss, as the `weight` of messages
    ///
    /// NAME.loss_weights.npy holds 0 for what the assistant does not say, and the weight of its message,
    /// or 1, for what it says. Without it, messages of weights other than 0 and 1 are left out.
    #[arg(long, requires = "chat", verbatim_doc_comment)]
    loss_weights: bool,

    /// Fail at the first document that cannot be read, instead of counting it
    #[arg(long)]
    strict: bool,

    /// File to write, NAME.bin; it appears when it is complete
    #[arg(short, long, value_name = "NAME")]
    output: PathBuf,

    /// Write ids only, to a file of any name: the boundaries of documents are lost
    #[arg(long)]
    flat: bool,

    /// Share of the documents to hold out for validation, in an output of their own, such as 1%
    #[arg(long, value_name = "SHARE")]
    holdout: Option<Share>,

    /// With --holdout: which documents are held out; another seed holds out others
    #[arg(long, value_name = "N", requires = "holdout", default_value_t = 0)]
    seed: u64,

    /// With --holdout: the file for them [default: NAME-valid.bin beside NAME.bin]
    #[arg(long, value_name = "NAME", requires = "holdout")]
    holdout_output: Option<PathBuf>,

    /// Add to the output of that name, if there is one
    #[arg(long, conflicts_with = "force")]
    append: bool,

    /// Replace an output that exists
    #[arg(long)]
    force: bool,

    /// Continue an interrupted run of the same arguments; if this one is interrupted, keep it
    #[arg(long)]
    resume: bool,

    /// How an id is stored, little-endian [default: u32]
    #[arg(long, value_enum)]
    dtype: Option<TokenType>,

    /// Size of the model's vocabulary: an id that is not below it is an error
    #[arg(long, value_name = "N")]
    vocab: Option<u64>,

    /// Text handed to a core at once, 64KiB to 64MiB; bounds memory
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = chunk_bytes)]
    chunk: usize,

    /// Text after which the state for --resume is saved
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = checkpoint_bytes)]
    checkpoint: u64,

    /// Cores to use; all of them when not given
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
}

impl Tokenize {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let threads = self.jobs.or_else(|| thread::available_parallelism().ok());
        let leftovers = Leftovers::default();
        let vocabulary = match (self.encoding, self.tokenizer) {
            (Some(encoding), _) => VocabularyName::Encoding(encoding),
            (None, path) => VocabularyName::File(path.unwrap_or_default()),
        };
        let holdout = self.holdout.map(|share| Holdout {
            rule: Rule { share, seed: self.seed },
            output: self.holdout_output.unwrap_or_else(|| holdout::beside(&self.output)),
        });
        let job = Job {
            inputs: &self.inputs,
            format: self.format,
            field: self.field.as_deref(),
            chat: self.chat.map(|file| file.map_or(ChatTemplate::Beside, ChatTemplate::File)),
            loss_weights: self.loss_weights,
            strict: self.strict,
            output: &self.output,
            with_index: !self.flat,
            holdout,
            append: self.append,
            force: self.force,
            resume: self.resume,
            vocabulary,
            eos: self.eos.unwrap_or_default(),
            dtype: self.dtype,
            vocab: self.vocab,
            chunk_bytes: self.chunk,
            checkpoint_bytes: self.checkpoint,
            threads: threads.map_or(1, NonZeroUsize::get),
            leftovers: leftovers.clone(),
        };
        on_end_signal(move || leftovers.remove_for_good())?;
        let mut narrator = Narrator::new(console);
        let outcome = tokenize::run(&job, &mut |event| narrator.tell(event));
        let (elapsed, before) = (narrator.started.elapsed(), narrator.bytes_before);
        let summary = Summary::new(&job, outcome.map_err(explain)?, elapsed, before);
        summary.warn();
        console.report(&summary)?;
        Ok(Exit::Good)
    }
}

fn checkpoint_bytes(text: &str) -> Result<u64, String> {
    units::size_bytes(text).map_err(|error| error.to_string())
}

fn chunk_bytes(text: &str) -> Result<usize, String> {
    let bytes = units::size_bytes(text).map_err(|error| error.to_string())?;
    let allowed = 64 << 10..=64 << 20;
    if !allowed.contains(&bytes) {
        return Err("a chunk is between 64KiB and 64MiB".to_owned());
    }
    usize::try_from(bytes).map_err(|error| error.to_string())
}

/// Reports events while they happen.
struct Narrator<'a> {
    console: &'a mut Console,
    started: Instant,
    shown: Instant,
    skipped: u64,
    noted: u64,
    /// Bytes of text that an interrupted run has done.
    bytes_before: u64,
    /// Bytes of the inputs at the first event: what an interrupted run has read.
    input_before: Option<u64>,
}

impl<'a> Narrator<'a> {
    const REFRESH: Duration = Duration::from_millis(200);

    /// Documents named as skipped; the rest are only counted.
    const NAMED: u64 = 5;

    fn new(console: &'a mut Console) -> Narrator<'a> {
        let now = Instant::now();
        Narrator {
            console,
            started: now,
            shown: now,
            skipped: 0,
            noted: 0,
            bytes_before: 0,
            input_before: None,
        }
    }

    fn skipped(&mut self, place: &str, reason: &Reason) {
        self.skipped += 1;
        if self.skipped <= Narrator::NAMED {
            self.console.note(format_args!("skipped {place}: {reason}"));
        } else if self.skipped == Narrator::NAMED + 1 {
            self.console.note("further skipped documents are counted, not named");
        }
    }

    /// Names the first few inputs of which something is assumed.
    fn noted(&mut self, path: &Path, noted: Noted) {
        self.noted += 1;
        let path = path.display();
        match noted {
            _ if self.noted > Narrator::NAMED + 1 => {}
            _ if self.noted > Narrator::NAMED => {
                self.console.note("further such files are not named");
            }
            Noted::LeftOut(what) => self.console.note(format_args!(
                "{path} is left out: it is {what}; --format reads every file of the folder"
            )),
            Noted::AsText => self.console.note(format_args!(
                "{path} is read as plain text, one document: --format says otherwise"
            )),
        }
    }

    fn tell(&mut self, event: Event<'_>) {
        match event {
            Event::Noted { path, noted } => self.noted(path, noted),
            Event::Skipped { place, reason } => self.skipped(place, reason),
            Event::Resumed(totals) => {
                self.bytes_before = totals.text_bytes;
                let (documents, tokens) = (Count(totals.documents), Count(totals.tokens));
                self.console
                    .note(format_args!("resumed after {documents} documents, {tokens} tokens"));
            }
            Event::StartedAnew => {
                let text = "an interrupted run is dropped; --resume would have continued it";
                self.console.note(text);
            }
            Event::Progress { totals, input_bytes, input_total } => {
                let before = *self.input_before.get_or_insert(input_bytes);
                if self.shown.elapsed() >= Narrator::REFRESH {
                    self.shown = Instant::now();
                    let left = remaining(before, input_bytes, input_total, self.started.elapsed());
                    self.progress(totals, left);
                }
            }
        }
    }

    fn progress(&mut self, totals: &Totals, left: Option<(f64, Duration)>) {
        let (text, tokens) = (Bytes(totals.text_bytes), Count(totals.tokens));
        let done = totals.text_bytes.saturating_sub(self.bytes_before);
        let rate = megabytes_per_second(done, self.started.elapsed());
        let left = left.map_or(String::new(), |(percent, left)| {
            format!(", {percent:.0} %, {} left", Wait(left))
        });
        let line = format_args!("{text} read, {tokens} tokens, {rate:.1} MB/s{left}");
        self.console.progress(line);
    }
}

/// The share that is done, in percent, and the time left at the rate of this run.
fn remaining(
    before: u64,
    done: u64,
    total: Option<u64>,
    elapsed: Duration,
) -> Option<(f64, Duration)> {
    let total = total.filter(|total| *total > 0)?;
    let left = total.saturating_sub(done) as f64;
    let rate = done.saturating_sub(before) as f64 / elapsed.as_secs_f64().max(1e-9);
    let left = Duration::try_from_secs_f64((left / rate).ceil()).ok()?;
    Some((100.0 * done.min(total) as f64 / total as f64, left))
}

fn explain(error: TokenizeError) -> CliError {
    let error = match error {
        TokenizeError::Manifest(error) => return error.into(),
        error => error,
    };
    match &error {
        TokenizeError::DoesNotFit { .. } => CliError::check_failed(&error).hint(
            "write u32 (--dtype u32), or use an encoding below 65,536 ids (r50k_base, p50k_base)",
        ),
        TokenizeError::BeyondVocabulary { .. } => CliError::check_failed(&error)
            .hint("is it the vocabulary of the model? Without --vocab, every id is written"),
        TokenizeError::EmptyPart { .. } => CliError::check_failed(&error)
            .hint("nothing was written; choose another --holdout, or another --seed"),
        TokenizeError::Split { hint, .. } => CliError::usage(&error).hint(hint),
        TokenizeError::Chat { hint, .. } => CliError::usage(&error).hint(*hint),
        TokenizeError::NoDocuments { broken: 1.., chat: true, .. } => {
            CliError::check_failed(&error)
                .hint("nothing was written; --field names the field of the messages")
        }
        TokenizeError::NoDocuments { broken: 1.., .. } => CliError::check_failed(&error).hint(
            "nothing was written; --field names the field or column of the text, and --chat reads conversations",
        ),
        TokenizeError::NoDocuments { .. } => CliError::check_failed(&error).hint(
            "nothing was written; name files of UTF-8 text, or say what they hold with --format",
        ),
        TokenizeError::Strict { .. } => CliError::check_failed(&error)
            .hint("without --strict, such documents are skipped and counted"),
        TokenizeError::NotEncoded { .. } => CliError::check_failed(&error)
            .hint("the tokenizer has no token for this text and no unknown token"),
        TokenizeError::Io { .. } => explain_io(&error),
        _ => CliError::usage(&error).hint(hint(&error)),
    }
}

fn explain_io(error: &TokenizeError) -> CliError {
    let TokenizeError::Io { action, source, .. } = error else {
        return CliError::usage(error);
    };
    let hint = match (*action, source.kind()) {
        ("create" | "rename", _) => "the folder of the output must exist and be writable",
        ("write", _) => "is there space on the output's disk?",
        (_, std::io::ErrorKind::UnexpectedEof) => "the file is incomplete: copy it again",
        (
            "read",
            std::io::ErrorKind::InvalidData
            | std::io::ErrorKind::InvalidInput
            | std::io::ErrorKind::Other,
        ) => "the compressed file is damaged: test it with `gzip -t` or `zstd -t`",
        _ => "name files and folders that exist and that this user may read",
    };
    CliError::usage(error).hint(hint).caused_by(error)
}

fn hint(error: &TokenizeError) -> &'static str {
    match error {
        TokenizeError::OutputIsInput { .. } | TokenizeError::OutputNotAFile { .. } => {
            "choose another name with -o"
        }
        TokenizeError::Exists { .. } => "--force replaces it, --append adds to it",
        TokenizeError::OtherPart { .. } => {
            "replace both with --holdout and --holdout-output, or remove the other one first"
        }
        TokenizeError::SameOutput { .. } => "name another file with --holdout-output",
        TokenizeError::NoIndexName { .. } => {
            "end the name with .bin, or give --flat to write ids without the boundaries of documents"
        }
        TokenizeError::Busy { .. } => "wait for it, or choose another name with -o",
        TokenizeError::NoFiles { .. } => {
            "hidden files and symbolic links below a folder are left out; name them"
        }
        TokenizeError::NotAFile { .. } => {
            "name files and folders that exist and that this user may read"
        }
        TokenizeError::StdinTwice => "name - once",
        TokenizeError::NotCompressed { .. } => "rename it, or copy it again if it is damaged",
        TokenizeError::NoDocumentsIn { what: tokenize::CHAT_TEMPLATE, .. } => {
            "join it to its option: --chat=FILE"
        }
        TokenizeError::NoDocumentsIn { .. } => {
            "write its texts as JSON lines (of a list: jq -c '.[]' FILE) or as plain text; --format text takes it as \
             it is, --format jsonl line by line"
        }
        TokenizeError::NotBuilt { .. } => "build with `cargo build --release --features full`",
        TokenizeError::Parquet { .. } => "the file may be incomplete: copy it again",
        TokenizeError::Column { .. } => "name a column of strings with --field",
        TokenizeError::Index { .. } => {
            "`dquant inspect` shows what is in it; --force instead of --append replaces it"
        }
        TokenizeError::OtherType { .. } => "leave --dtype out to write the type of the output",
        TokenizeError::Resume { .. } => {
            "run it with the same arguments and inputs, or without --resume to begin anew"
        }
        TokenizeError::Tokenizer { .. } => {
            "name a tokenizer.json as the `tokenizers` library saves it"
        }
        TokenizeError::ChatTemplate { .. } => {
            "name a chat template as `transformers` saves it: --chat=FILE"
        }
        TokenizeError::NoChatTemplate { .. } => {
            "chat_template.jinja, or `chat_template` in tokenizer_config.json, is looked for; or give --chat=FILE"
        }
        TokenizeError::Thread(_) => "give a smaller number with --jobs",
        TokenizeError::Eos { .. } => "name another token with --eos, or --eos none",
        TokenizeError::NoDefaultEos { .. } => {
            "name the token with --eos, for example --eos '</s>', or give --eos none"
        }
        _ => "this is a bug: report it with the command line",
    }
}

/// The result of one run.
#[derive(Debug, Serialize)]
struct Summary {
    output: String,
    encoding: String,
    eos: Option<u32>,
    dtype: String,
    documents: u64,
    text_bytes: u64,
    tokens: u64,
    /// Those of them that the assistant says.
    #[serde(skip_serializing_if = "Option::is_none")]
    targets: Option<u64>,
    /// Conversations in which it says nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    documents_without_targets: Option<u64>,
    /// The file with the loss weight of each token, where it is written; that of held-out documents lies beside theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_weights: Option<PathBuf>,
    /// Tokens that were in the output before; not part of the others.
    tokens_before: u64,
    bytes_per_token: f64,
    max_id: u32,
    fits_u16: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    held_out: Option<Validation>,
    skipped_not_utf8: u64,
    skipped_empty: u64,
    skipped_broken: u64,
    first_broken: Option<String>,
    forced_cuts: u64,
    threads: usize,
    seconds: f64,
    megabytes_per_second: f64,
}

/// What went to the output of held-out documents.
#[derive(Debug, Serialize)]
struct Validation {
    output: String,
    share: String,
    seed: u64,
    documents: u64,
    text_bytes: u64,
    tokens: u64,
    /// Tokens that were in the output before; not part of the others.
    tokens_before: u64,
    max_id: u32,
}

impl Validation {
    fn new(holdout: &Holdout, HeldOut { totals, tokens_before }: HeldOut) -> Validation {
        Validation {
            output: holdout.output.display().to_string(),
            share: holdout.rule.share.to_string(),
            seed: holdout.rule.seed,
            documents: totals.documents,
            text_bytes: totals.text_bytes,
            tokens: totals.tokens,
            tokens_before,
            max_id: totals.max_id,
        }
    }
}

impl fmt::Display for Validation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Validation { output, share, seed, tokens_before, .. } = self;
        let (documents, tokens) = (Count(self.documents), Count(self.tokens));
        write!(f, "{output}: {documents} documents, {tokens} tokens, {share} by seed {seed}")?;
        if let before @ 1.. = *tokens_before {
            write!(f, "; appended to {} tokens", Count(before))?;
        }
        Ok(())
    }
}

impl Summary {
    fn new(job: &Job<'_>, outcome: Outcome, elapsed: Duration, bytes_before: u64) -> Summary {
        let totals = outcome.totals;
        let held_out = job.holdout.as_ref().zip(outcome.held_out);
        let held_out = held_out.map(|(holdout, found)| Validation::new(holdout, found));
        let text_bytes = totals.text_bytes + held_out.as_ref().map_or(0, |part| part.text_bytes);
        let done = text_bytes.saturating_sub(bytes_before);
        Summary {
            output: job.output.display().to_string(),
            encoding: outcome.vocabulary,
            eos: outcome.eos,
            dtype: outcome.dtype.to_string(),
            documents: totals.documents,
            text_bytes: totals.text_bytes,
            tokens: totals.tokens,
            targets: job.chat.as_ref().map(|_| totals.targets),
            documents_without_targets: job.chat.as_ref().map(|_| totals.without_targets),
            loss_weights: job.loss_weights.then(|| formats::settle::loss_weights_of(job.output)),
            tokens_before: outcome.tokens_before,
            bytes_per_token: totals.text_bytes as f64 / totals.tokens.max(1) as f64,
            max_id: totals.max_id,
            fits_u16: totals.max_id <= u32::from(u16::MAX),
            held_out,
            skipped_not_utf8: totals.skipped_not_utf8,
            skipped_empty: totals.skipped_empty,
            skipped_broken: totals.skipped_broken,
            first_broken: totals.first_broken,
            forced_cuts: totals.forced_cuts,
            threads: job.threads,
            seconds: elapsed.as_secs_f64(),
            megabytes_per_second: megabytes_per_second(done, elapsed),
        }
    }
}

impl Summary {
    /// Warns of what is rarely meant.
    fn warn(&self) {
        let skipped = self.skipped_not_utf8 + self.skipped_broken;
        let written = self.documents + self.held_out.as_ref().map_or(0, |part| part.documents);
        if skipped > written {
            let (skipped, written) = (Count(skipped), Count(written));
            let what = format!("{skipped} documents are skipped, and {written} written");
            console::warn(&what, "the first ones are named above, with their reasons");
        }
        let hint = "messages of the role assistant are targets, in ShareGPT's shape those from gpt";
        match (self.targets, self.documents_without_targets) {
            (Some(0), _) => Targets(0, self.tokens).check(hint),
            (_, Some(without)) if without > self.documents / 2 => {
                let what = format!("{} documents have no targets", Count(without));
                console::warn(&what, hint);
            }
            _ => {}
        }
    }
}

impl Report for Summary {
    const SCHEMA: &'static str = "dquant.tokenize/1";
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = if self.fits_u16 { "fits u16" } else { "does not fit u16" };
        writeln!(
            f,
            "{}: {} {} tokens, {}",
            self.output,
            Count(self.tokens),
            self.dtype,
            self.encoding
        )?;
        if self.tokens_before > 0 {
            writeln!(f, "  appended to  {} tokens", Count(self.tokens_before))?;
        }
        if let Some(targets) = self.targets {
            writeln!(f, "  targets      {}", Targets(targets, self.tokens))?;
        }
        if let Some(without @ 1..) = self.documents_without_targets {
            writeln!(f, "  no targets   {} of the documents", Count(without))?;
        }
        if let Some(weights) = &self.loss_weights {
            writeln!(f, "  loss weights {}", weights.display())?;
        }
        let ends = self.eos.map_or(String::from("nothing"), |id| format!("id {id}"));
        writeln!(f, "  documents    {}, ended by {ends}", Count(self.documents))?;
        writeln!(
            f,
            "  text         {}, {:.2} bytes per token",
            Bytes(self.text_bytes),
            self.bytes_per_token
        )?;
        writeln!(f, "  largest id   {}, {fits}", Count(self.max_id.into()))?;
        if let Some(held_out) = &self.held_out {
            writeln!(f, "  held out     {held_out}")?;
        }
        let (not_utf8, empty) = (self.skipped_not_utf8, self.skipped_empty);
        let skipped = skipped(not_utf8, empty, self.skipped_broken, "");
        if !skipped.is_empty() {
            writeln!(f, "  skipped      {skipped}")?;
        }
        if let Some(first) = &self.first_broken {
            writeln!(f, "  first broken {first}")?;
        }
        if self.forced_cuts > 0 {
            let cuts = self.forced_cuts;
            writeln!(
                f,
                "  forced cuts  {cuts}: text without white space; tokens there may differ"
            )?;
        }
        let (rate, threads) = (self.megabytes_per_second, self.threads);
        write!(f, "  took         {:.2} s, {rate:.1} MB/s on {threads} threads", self.seconds)
    }
}

fn megabytes_per_second(bytes: u64, elapsed: Duration) -> f64 {
    bytes as f64 / 1e6 / elapsed.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_the_rate_of_this_run() {
        let second = Duration::from_secs(1);
        let left = |before, done, total| remaining(before, done, total, second * 10);
        assert_eq!(left(0, 50, Some(200)), Some((25.0, second * 30)));
        // A run that was resumed at 100 has done 50 itself.
        assert_eq!(left(100, 150, Some(200)), Some((75.0, second * 10)));
        assert_eq!(left(0, 250, Some(200)), Some((100.0, Duration::ZERO)), "the file grew");
        assert_eq!(left(0, 50, None), None, "standard input");
        assert_eq!(left(0, 0, Some(200)), None, "nothing yet");
        assert_eq!(left(0, 0, Some(0)), None);
    }
}
