//! `dquant tokenize`: the command in front of [`crate::tokenize`].

use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use formats::Manifest;
use formats::manifest::Contents;
use serde::Serialize;
use xio::dataset::Dtype;

use super::{Console, Report};
use crate::exit::{CliError, Exit, on_end_signal};
use crate::tokenize::sink::unfinished_path;
use crate::tokenize::{
    self, Encoding, Event, Job, Skip, TokenType, TokenizeError, Totals, skipped,
};
use crate::units::{self, Bytes, Count};

/// Turn text files into one flat file of token ids
///
/// Every file is one document and ends with the encoding's end-of-text token. Folders are read
/// with everything below them, sorted by path; hidden files and symbolic links inside are left out.
/// Files that are not UTF-8 are skipped and counted. The tokens are those of each whole document,
/// whatever the chunk size and the number of jobs.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  dquant tokenize corpus/ --encoding r50k_base -o corpus.bin
  dquant tokenize corpus/ --encoding r50k_base --dtype u16 -o corpus.u16.bin
  dquant tokenize a.txt b.txt --encoding o200k_base -o ab.bin --json"
)]
pub(super) struct Tokenize {
    /// Text files, or folders of them
    #[arg(required = true, value_name = "FILES")]
    inputs: Vec<PathBuf>,

    /// Vocabulary
    #[arg(long, value_enum)]
    encoding: Encoding,

    /// File to write; it appears when it is complete
    #[arg(short, long, value_name = "NAME")]
    output: PathBuf,

    /// How an id is stored, little-endian
    #[arg(long, value_enum, default_value = "u32")]
    dtype: TokenType,

    /// Text handed to a core at once, 64KiB to 64MiB; bounds memory
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = chunk_bytes)]
    chunk: usize,

    /// Cores to use; all of them when not given
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
}

impl Tokenize {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let threads = self.jobs.or_else(|| thread::available_parallelism().ok());
        let job = Job {
            inputs: &self.inputs,
            output: &self.output,
            encoding: self.encoding,
            dtype: self.dtype,
            chunk_bytes: self.chunk,
            threads: threads.map_or(1, NonZeroUsize::get),
        };
        if let Some(path) = unfinished_path(&self.output) {
            on_end_signal(move || drop(std::fs::remove_file(path)))?;
        }
        let mut narrator =
            Narrator { console, started: Instant::now(), shown: Instant::now(), skipped: 0 };
        let totals = tokenize::run(&job, &mut |event| narrator.tell(event));
        let elapsed = narrator.started.elapsed();
        let totals = totals.map_err(explain)?;
        describe(&job, &totals)?;
        let summary = Summary::new(&job, &totals, elapsed);
        console.report(&summary)?;
        Ok(Exit::Good)
    }
}

/// Writes the manifest of the output.
fn describe(job: &Job<'_>, totals: &Totals) -> Result<(), CliError> {
    let contents = Contents {
        tokens: totals.tokens,
        min_id: None,
        max_id: Some(totals.max_id.into()),
        tokenizer: Some(job.encoding.name().to_owned()),
        documents: Some(totals.documents),
        eos: Some(job.encoding.end_of_text().into()),
    };
    let dtype = match job.dtype {
        TokenType::U32 => Dtype::U32,
        TokenType::U16 => Dtype::U16,
    };
    let folder = job.output.parent().unwrap_or(Path::new(""));
    let file = PathBuf::from(job.output.file_name().unwrap_or_default());
    let manifest = Manifest::create(("flat", dtype), contents, folder, &[file], &|_| ())?;
    manifest.store(job.output)?;
    Ok(())
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
}

impl Narrator<'_> {
    const REFRESH: Duration = Duration::from_millis(200);

    /// Files named as skipped; the rest are only counted.
    const NAMED: u64 = 5;

    fn skipped(&mut self, path: &Path, reason: &Skip) {
        self.skipped += 1;
        let path = path.display();
        match (self.skipped, reason) {
            (..=Narrator::NAMED, Skip::Empty) => {
                self.console.note(format_args!("skipped {path}: empty"));
            }
            (..=Narrator::NAMED, Skip::NotUtf8 { valid_bytes }) => {
                self.console.note(format_args!("skipped {path}: not UTF-8 at byte {valid_bytes}"));
            }
            (n, _) if n == Narrator::NAMED + 1 => {
                self.console.note("further skipped files are counted, not named");
            }
            _ => {}
        }
    }

    fn tell(&mut self, event: Event<'_>) {
        match event {
            Event::Skipped { path, reason } => self.skipped(path, &reason),
            Event::Progress(totals) if self.shown.elapsed() >= Narrator::REFRESH => {
                self.shown = Instant::now();
                let (text, tokens) = (Bytes(totals.text_bytes), Count(totals.tokens));
                let rate = megabytes_per_second(totals.text_bytes, self.started.elapsed());
                self.console.progress(format_args!("{text} read, {tokens} tokens, {rate:.1} MB/s"));
            }
            Event::Progress(_) => {}
        }
    }
}

fn explain(error: TokenizeError) -> CliError {
    match &error {
        TokenizeError::DoesNotFit { .. } => CliError::check_failed(&error).hint(
            "write u32 (--dtype u32), or use an encoding below 65,536 ids (r50k_base, p50k_base)",
        ),
        TokenizeError::NoDocuments { .. } => {
            CliError::check_failed(&error).hint("nothing was written; name files of UTF-8 text")
        }
        TokenizeError::OutputIsInput { .. } | TokenizeError::OutputNotAFile { .. } => {
            CliError::usage(&error).hint("choose another name with -o")
        }
        TokenizeError::Changed { .. } => {
            CliError::usage(&error).hint("run it again when nothing writes to the inputs")
        }
        TokenizeError::NoFiles { .. } => CliError::usage(&error)
            .hint("hidden files and symbolic links below a folder are left out; name them"),
        TokenizeError::Io { action: "create", .. } => CliError::usage(&error)
            .caused_by(&error)
            .hint("the folder of the output must exist and be writable"),
        TokenizeError::Io { action: "write", .. } => {
            CliError::usage(&error).caused_by(&error).hint("is there space on the output's disk?")
        }
        TokenizeError::Io { .. } | TokenizeError::NotAFile { .. } => CliError::usage(&error)
            .caused_by(&error)
            .hint("name files and folders that exist and that this user may read"),
        TokenizeError::Encoding { .. } | TokenizeError::EncoderStopped { .. } => {
            CliError::usage(&error).hint("this is a bug: report it with the command line")
        }
    }
}

/// The result of one run.
#[derive(Debug, Serialize)]
struct Summary {
    output: String,
    encoding: &'static str,
    dtype: String,
    documents: u64,
    text_bytes: u64,
    tokens: u64,
    bytes_per_token: f64,
    max_id: u32,
    fits_u16: bool,
    skipped_not_utf8: u64,
    skipped_empty: u64,
    forced_cuts: u64,
    threads: usize,
    seconds: f64,
    megabytes_per_second: f64,
}

impl Summary {
    fn new(job: &Job<'_>, totals: &Totals, elapsed: Duration) -> Summary {
        Summary {
            output: job.output.display().to_string(),
            encoding: job.encoding.name(),
            dtype: job.dtype.to_string(),
            documents: totals.documents,
            text_bytes: totals.text_bytes,
            tokens: totals.tokens,
            bytes_per_token: totals.text_bytes as f64 / totals.tokens.max(1) as f64,
            max_id: totals.max_id,
            fits_u16: totals.max_id <= u32::from(u16::MAX),
            skipped_not_utf8: totals.skipped_not_utf8,
            skipped_empty: totals.skipped_empty,
            forced_cuts: totals.forced_cuts,
            threads: job.threads,
            seconds: elapsed.as_secs_f64(),
            megabytes_per_second: megabytes_per_second(totals.text_bytes, elapsed),
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
        writeln!(f, "  documents    {}", Count(self.documents))?;
        writeln!(
            f,
            "  text         {}, {:.2} bytes per token",
            Bytes(self.text_bytes),
            self.bytes_per_token
        )?;
        writeln!(f, "  largest id   {}, {fits}", Count(self.max_id.into()))?;
        let skipped = skipped(self.skipped_not_utf8, self.skipped_empty, "");
        if !skipped.is_empty() {
            writeln!(f, "  skipped      {skipped}")?;
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
