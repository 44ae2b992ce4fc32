//! `dquant cat`: a stream into a file or to stdout.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::daemons::span;
use super::datasets::note_guess;
use super::stream_args::StreamArgs;
use super::{Console, Report};
use crate::exit::{CliError, Exit, OUTPUT_HINT};
use client::{DatasetInfo, Options, Stream};

/// How often `--wait` checks whether the daemons are there.
const WAIT_LOOK: Duration = Duration::from_millis(100);

/// Write the batches of a stream to a file or to standard output
///
/// Batches follow one another without headers: samples in order, tokens little-endian. Without
/// --batches the stream has no end. Local files are read by this process itself: it needs neither
/// DPU nor target.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Plans are actions joined by `|`, in any order:
  window(N, overlap=K)    samples of N tokens, K of them also in the sample before; required
  pack(best, pad=ID)      samples of whole documents, and ID behind them; or pack(first), pack(single)
  shuffle(SEED)           mix samples; blocks=64, block=256KiB set the size of the groups
  order(megatron, seed=S, samples=N, split=\"A,B,C\")
                          the samples of a split of Megatron-core, in its order; part=valid
  blend(NAME=WEIGHT, …)   draw from several datasets in this ratio
  phases(N, …)            from sample N on, the next weights of blend(NAME=W1:W2, …)
  tokenizers(any)         blend datasets although manifests name different tokenizers
  filter(LIST)            drop the documents whose hash is in a list; filter(keep=LIST) keeps them
  dedup                   keep the first of documents with one hash; dedup(across) of all datasets
  split(\"98,1,1\", part=valid)
                          one part of every dataset, of train, valid and test
  remap(TABLE)            replace each token by its entry in a table of u32 beside the datasets
  wasm(MODULE, sha256=HEX) map each token by a WebAssembly module beside the datasets
  narrow(u16)             deliver tokens in this type, u16 or u32; refuse those that do not fit
  narrow(u16, overflow=P) P is error, saturate(ID), or escape for a plan with widen(u32)
  bitpack(N)              tokens cross the wire in N bits; refuse those that do not fit
  compress(zstd, level=1) blocks cross the wire compressed, with zstd or lz4, where that is faster
  quantize(int8)          values of floating point cross the wire in 8 bits: int8, e4m3 or e5m2
  widen(i64)              deliver tokens in a larger type: u32, i32 or i64
  pairs                   inputs and labels, which are one token later; pairs(ignore=ID) by document,
                          pairs(ignore=ID, labels=targets) without what a model is not to say
  positions               two more rows: where each token is in its document, and which one that is
  loss_weights            after the rows of a batch, how much each label weighs, as f32, from the file
                          NAME.loss_weights.npy beside NAME.bin; loss_weights(missing=1) without one
  batch(N)                samples of a batch [default: 32]

Examples:
  dquant cat dq://127.0.0.1/web.bin --batches 100 -o web.u16
  dquant cat dq://10.0.0.5/corpora --batches 1000 -o blend.u16 \\
      --plan 'window(2048) | shuffle(7) | blend(web=0.5,code=0.3,books=0.2) | narrow(u16)'
  dquant cat dq://10.0.0.5/web --offload false --batches 1 | od -An -tu2 | head
  dquant cat 'corpora/*.bin' --batches 100 -o all.u16     # local files, no daemon"
)]
pub(super) struct Cat {
    /// `dq://HOST[:PORT]/NAME`, or a path or pattern of local files; with a blend, their folder
    #[arg(value_name = "URL")]
    url: String,

    /// What to do with the tokens, see below
    #[arg(long, value_name = "PLAN", default_value = "window(2048) | narrow(u16)")]
    plan: String,

    /// File to write; standard output when not given, or for `-`
    #[arg(short, long, value_name = "PATH")]
    output: Option<PathBuf>,

    /// How long to wait for a DPU or a target that is not there yet
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = span)]
    wait: Duration,

    #[command(flatten)]
    stream: StreamArgs,
}

/// A file that is created or truncated when the first byte for it arrives: until then an earlier
/// output of that name is unchanged.
struct LateFile<'a> {
    path: &'a Path,
    file: Option<BufWriter<File>>,
}

impl LateFile<'_> {
    fn file(&mut self) -> io::Result<&mut BufWriter<File>> {
        if self.file.is_none() {
            self.file = Some(BufWriter::new(File::create(self.path)?));
        }
        self.file.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Write for LateFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file()?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file()?.flush()
    }
}

/// What was written.
#[derive(Debug, Serialize)]
struct Written {
    batches: u64,
    bytes: u64,
    seconds: f64,
    plan: String,
    offload: bool,
    /// Tokens of the blocks that were read that did not fit and became another id.
    replaced_tokens: u64,
    /// What the plan's filter and its deduplication dropped of all datasets: documents, and their tokens.
    filtered: Dropped,
    duplicates: Dropped,
    /// Share of the samples of an epoch that is padding, over all datasets; only where documents are packed.
    padding: Option<f64>,
}

/// Documents that were dropped.
#[derive(Debug, Default, Serialize)]
struct Dropped {
    documents: u64,
    tokens: u64,
}

impl Dropped {
    fn of<'a>(
        datasets: impl IntoIterator<Item = &'a DatasetInfo>,
        counts: impl Fn(&DatasetInfo) -> (u64, u64),
    ) -> Dropped {
        datasets.into_iter().map(counts).fold(Dropped::default(), |sum, (documents, tokens)| {
            Dropped { documents: sum.documents + documents, tokens: sum.tokens + tokens }
        })
    }
}

impl Report for Written {
    const SCHEMA: &'static str = "dquant.cat/1";
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Written { batches, bytes, seconds, plan, replaced_tokens, .. } = self;
        write!(f, "{batches} batches, {bytes} bytes in {seconds:.2} s: {plan}")?;
        if let count @ 1.. = replaced_tokens {
            write!(f, "; {count} tokens of the blocks read did not fit and were replaced")?;
        }
        for (how, Dropped { documents, tokens }) in
            [("filter", &self.filtered), ("dedup", &self.duplicates)]
        {
            if *documents > 0 {
                write!(f, "; {how} dropped {documents} documents with {tokens} tokens")?;
            }
        }
        if let Some(padding) = self.padding {
            write!(f, "; {:.2} % of the packed samples is padding", 100.0 * padding)?;
        }
        Ok(())
    }
}

/// The share of packed samples of `window` tokens that is padding.
fn padding(datasets: &[DatasetInfo], window: u64) -> Option<f64> {
    let sum = |of: fn(&DatasetInfo) -> u64| datasets.iter().map(of).sum::<u64>();
    let (samples, tokens) = (sum(|info| info.packed_samples), sum(|info| info.packed_tokens));
    let all = samples.saturating_mul(window);
    (all > 0).then(|| 1.0 - tokens as f64 / all as f64)
}

impl Cat {
    pub(super) fn run(self, console: &mut Console) -> Result<Exit, CliError> {
        let options = self.stream.options()?;
        let offload = self.stream.offload;
        let started = Instant::now();
        let mut stream = self.open(&options)?;
        for dataset in &stream.opened().datasets {
            note_guess(console, &dataset.name, &dataset.dtype, &dataset.dtype_origin);
        }
        for dataset in stream.opened().without_samples() {
            console.note(format_args!("{}: it has no sample and is never drawn", dataset.name));
        }
        let datasets = &stream.opened().datasets;
        let filtered =
            Dropped::of(datasets, |info| (info.filtered_documents, info.filtered_tokens));
        let duplicates =
            Dropped::of(datasets, |info| (info.duplicate_documents, info.duplicate_tokens));
        let opened = stream.opened();
        let window = u64::from(opened.window_tokens) + u64::from(opened.pairs);
        let padding = padding(datasets, window);
        let plan = stream.opened().plan.clone();
        let output = self.output.as_deref().filter(|path| *path != Path::new("-"));
        let (batches, bytes) = match output {
            Some(path) => {
                let failed = |error: io::Error| unwritable(path, &error);
                copy(&mut stream, &mut LateFile { path, file: None }, failed)?
            }
            None => {
                copy(&mut stream, &mut io::stdout().lock(), |error| CliError::from_output(&error))?
            }
        };
        let seconds = started.elapsed().as_secs_f64();
        // Everything was delivered; a daemon that has ended since cannot say what it counted.
        let replaced = stream.status().ok().map(|status| status.counters);
        let replaced =
            replaced.and_then(|counters| counters.get("stream.replaced_tokens").copied());
        let replaced_tokens = replaced.unwrap_or(0);
        let written = Written {
            batches,
            bytes,
            seconds,
            plan,
            offload,
            replaced_tokens,
            filtered,
            duplicates,
            padding,
        };
        match output {
            Some(_) => console.report(&written)?,
            None => console.note(&written),
        }
        Ok(Exit::Good)
    }

    /// Opens the stream, with retries while a daemon does not reply and there is time.
    fn open(&self, options: &Options) -> Result<Stream, CliError> {
        let started = Instant::now();
        loop {
            let opened = client::open(&self.url, &self.plan, self.stream.offload, options);
            match opened.map_err(CliError::from) {
                Err(error)
                    if error.exit() == Exit::PeerUnreachable && started.elapsed() < self.wait =>
                {
                    std::thread::sleep(WAIT_LOOK);
                }
                opened => return opened,
            }
        }
    }
}

fn unwritable(path: &Path, error: &io::Error) -> CliError {
    let failed = CliError::because(format_args!("cannot write {}", path.display()), error);
    match error.kind() {
        io::ErrorKind::StorageFull => failed.hint("free some space, or choose another --output"),
        _ => failed.hint(OUTPUT_HINT),
    }
}

fn copy(
    stream: &mut Stream,
    out: &mut impl Write,
    failed: impl Fn(io::Error) -> CliError,
) -> Result<(u64, u64), CliError> {
    let (mut batches, mut bytes) = (0, 0);
    for batch in stream.batches() {
        let batch = batch?;
        out.write_all(batch.bytes()).map_err(&failed)?;
        batches += 1;
        bytes += batch.bytes().len() as u64;
    }
    out.flush().map_err(failed)?;
    Ok((batches, bytes))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use xio::plan::Plan;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Program {
        #[command(flatten)]
        cat: Cat,
    }

    /// The parser names all actions when it meets one that it does not know.
    #[test]
    fn the_help_lists_every_action_of_plans() {
        let error = Plan::parse("zzzzzzzz(1)", None).expect_err("no action");
        let hint = error.hint().expect("the actions");
        let names = hint.strip_prefix("actions are ").expect("the actions").split(", ");
        let help = Program::command().render_long_help().to_string();
        let is_listed = |name: &str| {
            let entries = help.lines().filter_map(|line| line.strip_prefix("  "));
            let mut first = entries.map(|entry| entry.split(['(', ' ']).next());
            first.any(|word| word == Some(name))
        };
        let missing: Vec<&str> = names.clone().filter(|name| !is_listed(name)).collect();
        assert_eq!(missing, [""; 0]);
        assert!(names.count() >= 18);
    }
}
