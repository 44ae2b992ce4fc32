//! The trainer of the demo: a host process that reads batches, and verifies them as configured.
//!
//! The first [`PREFIX`] batches are always verified and hashed, before the clock starts: their hash
//! is the same for every run with the same data, plan and seed, with and without offload or loss.
//! After that, `all` verifies every batch (and so sets the pace), `sample` one in [`SAMPLE_EVERY`].
//!
//! Verification runs in a thread of its own on batches that are still views of the ring.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use nic::clock;
use serde::{Deserialize, Serialize};
use twox_hash::xxhash3_128;
use xio::dataset::{Dtype, TokenFile};
use xio::plan::Plan;
use xio::reference::{Reference, TokenReader};

use crate::exit::{CliError, Exit};
use client::{Batch, Stream};

/// Batches that are verified and hashed before the clock starts.
pub const PREFIX: u64 = 256;

/// Of how many batches one is verified in `sample` mode.
pub const SAMPLE_EVERY: u64 = 64;

/// How long the stream runs before the clock starts, after the prefix.
const WARM_UP: Duration = Duration::from_millis(500);

/// How often progress is reported.
const TELL_EVERY: Duration = Duration::from_millis(250);

/// What is verified after the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Verify {
    /// Every batch
    All,
    /// One batch in 64, and the first 256
    Sample,
}

impl Verify {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Verify::All => "all",
            Verify::Sample => "sample",
        }
    }
}

/// A line of the trainer's report.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "event")]
pub enum Event {
    /// The clock starts.
    Start,
    /// State of the run.
    Progress(Progress),
    /// The run is over.
    End(End),
}

/// State of the run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Progress {
    /// Since the clock started.
    pub seconds: f64,
    /// Since the clock started.
    pub tokens: u64,
    /// Verified so far.
    pub verified: u64,
    /// CPU time of the trainer without verification, since the clock started.
    pub cpu_s: f64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mtok = self.tokens as f64 / 1e6;
        let rate = mtok / self.seconds.max(1e-9);
        let host = self.cpu_s / (self.tokens.max(1) as f64 / 1e9);
        write!(
            f,
            "{:5.1} s  {mtok:8.0} Mtokens  {rate:6.0} Mtokens/s  host {host:.3} CPU s per 10^9  {} batches verified",
            self.seconds, self.verified
        )
    }
}

/// What the trainer measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End {
    /// Length of the measured part.
    pub seconds: f64,
    /// Tokens delivered in it.
    pub tokens: u64,
    /// Batches delivered in it.
    pub batches: u64,
    /// CPU time of the process in it, without verification.
    pub cpu_s: f64,
    /// CPU time of the verification in the whole run.
    pub verify_cpu_s: f64,
    /// Batches verified in the whole run.
    pub verified: u64,
    /// Batches that differ from the reference.
    pub mismatches: u64,
    /// Hash of the first batches, in hexadecimal.
    pub stream_hash: String,
    /// How many batches that hash covers.
    pub stream_hash_batches: u64,
    /// Largest resident memory seen, in bytes.
    pub resident_bytes: u64,
    /// Why the stream ended early, if it did.
    pub failure: Option<String>,
    /// The exit code that goes with the failure.
    pub failure_code: u8,
}

/// Reads tokens of a file one at a time, a page of them at once.
struct FileTokens {
    file: File,
    layout: TokenFile,
    page: Vec<u8>,
    first: u64,
}

/// Tokens read at once.
const PAGE_TOKENS: u64 = 4096;

impl TokenReader for FileTokens {
    fn token(&mut self, index: u64) -> Option<i128> {
        let width = u64::from(self.layout.dtype.bytes());
        let page = index - index % PAGE_TOKENS;
        if self.page.is_empty() || self.first != page {
            let count = PAGE_TOKENS.min(self.layout.tokens.checked_sub(page)?);
            self.page.resize((count * width) as usize, 0);
            let offset = self.layout.data_offset + page * width;
            self.file.read_exact_at(&mut self.page, offset).ok()?;
            self.first = page;
        }
        let at = ((index - page) * width) as usize;
        let bytes = self.page.get(at..at + width as usize)?;
        let mut raw = [0; 16];
        raw[..bytes.len()].copy_from_slice(bytes);
        let value = u128::from_le_bytes(raw);
        Some(match self.layout.dtype {
            Dtype::I32 => i128::from(value as u32 as i32),
            Dtype::I64 => i128::from(value as u64 as i64),
            _ => value as i128,
        })
    }
}

/// Shared between the reading and the verifying thread.
#[derive(Debug, Default)]
struct Verdict {
    verified: AtomicU64,
    mismatches: AtomicU64,
    cpu_ns: AtomicU64,
}

/// The verifying thread.
struct Verifier {
    batches: SyncSender<Batch>,
    verdict: Arc<Verdict>,
    thread: std::thread::JoinHandle<(String, u64)>,
}

impl Verifier {
    fn start(plan: &Plan, files: &[PathBuf], dtype: Option<Dtype>) -> Result<Verifier, CliError> {
        let mut sources = Vec::with_capacity(files.len());
        for path in files {
            let layout = super::corpus::layout_of(path, dtype)?;
            let file =
                File::open(path).map_err(|error| CliError::because(path.display(), &error))?;
            sources.push((layout, FileTokens { file, layout, page: Vec::new(), first: 0 }));
        }
        let reference = Reference::new(plan, sources).map_err(CliError::usage)?;
        let (batches, incoming) = sync_channel(4);
        let verdict = Arc::new(Verdict::default());
        let shared = Arc::clone(&verdict);
        let thread = std::thread::Builder::new()
            .name("verify".into())
            .spawn(move || verify(reference, &incoming, &shared))
            .map_err(CliError::usage)?;
        Ok(Verifier { batches, verdict, thread })
    }
}

/// Compares batches until there are no more; returns the hash of the prefix and how many batches it
/// covers.
fn verify(
    mut reference: Reference<FileTokens>,
    incoming: &Receiver<Batch>,
    verdict: &Verdict,
) -> (String, u64) {
    let mut hash = xxhash3_128::Hasher::new();
    let mut hashed = 0;
    for batch in incoming {
        let expected = reference.batch(batch.number());
        if expected.is_ok_and(|expected| expected == batch.bytes()) {
            verdict.verified.fetch_add(1, Ordering::Relaxed);
        } else {
            verdict.mismatches.fetch_add(1, Ordering::Relaxed);
        }
        if batch.number() == hashed && hashed < PREFIX {
            hash.write(batch.bytes());
            hashed += 1;
        }
        verdict.cpu_ns.store(clock::thread_cpu_ns(), Ordering::Relaxed);
    }
    (format!("{:032x}", hash.finish_128()), hashed)
}

/// What the trainer is to do.
#[derive(Debug)]
pub struct Task {
    /// The plan, for the reference.
    pub plan: String,
    /// Token files in the order of the blend, for the reference.
    pub files: Vec<PathBuf>,
    /// Token type of flat files, where it is given.
    pub dtype: Option<Dtype>,
    /// What to verify.
    pub verify: Verify,
    /// Length of the measured part, when the stream has no end.
    pub seconds: Duration,
    /// Whether the stream ends by itself.
    pub counted: bool,
}

/// The measured part.
struct Meter {
    started: Instant,
    cpu_ns: u64,
    tokens: u64,
    batches: u64,
    told: Instant,
}

impl Meter {
    fn start(verdict: &Verdict) -> Meter {
        let now = Instant::now();
        Meter { started: now, cpu_ns: own_cpu_ns(verdict), tokens: 0, batches: 0, told: now }
    }

    fn progress(&self, verdict: &Verdict) -> Progress {
        Progress {
            seconds: self.started.elapsed().as_secs_f64(),
            tokens: self.tokens,
            verified: verdict.verified.load(Ordering::Relaxed),
            cpu_s: own_cpu_ns(verdict).saturating_sub(self.cpu_ns) as f64 / 1e9,
        }
    }
}

/// CPU time of the process without the verifying thread.
fn own_cpu_ns(verdict: &Verdict) -> u64 {
    clock::process_cpu().total_ns().saturating_sub(verdict.cpu_ns.load(Ordering::Relaxed))
}

/// Runs the trainer on an open stream. `tell` receives every event.
///
/// # Errors
/// When the reference cannot be made or `tell` fails. A stream that fails is reported as
/// [`End::failure`].
pub fn run(
    mut stream: Stream,
    task: &Task,
    tell: &mut dyn FnMut(Event) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let plan =
        Plan::parse(&task.plan, None).map_err(|error| CliError::usage(error.render(&task.plan)))?;
    let tokens_per_batch = u64::from(plan.window()) * u64::from(plan.batch());
    let verifier = Verifier::start(&plan, &task.files, task.dtype)?;
    let opened = Instant::now();
    let mut meter: Option<Meter> = None;
    let mut failure = None;
    if task.counted {
        tell(Event::Start)?;
        meter = Some(Meter::start(&verifier.verdict));
    }
    for batch in stream.batches() {
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => {
                failure = Some(CliError::from(error));
                break;
            }
        };
        let number = batch.number();
        check(&verifier, batch, task.verify);
        match &mut meter {
            Some(meter) => {
                meter.tokens += tokens_per_batch;
                meter.batches += 1;
                if meter.told.elapsed() >= TELL_EVERY {
                    meter.told = Instant::now();
                    tell(Event::Progress(meter.progress(&verifier.verdict)))?;
                }
                if !task.counted && meter.started.elapsed() >= task.seconds {
                    break;
                }
            }
            None if number >= PREFIX && opened.elapsed() >= WARM_UP => {
                tell(Event::Start)?;
                meter = Some(Meter::start(&verifier.verdict));
            }
            None => {}
        }
    }
    tell(Event::End(end(meter, verifier, failure)))
}

/// Passes a batch to the verifier, if it is to be verified; waits where it must be.
fn check(verifier: &Verifier, batch: Batch, verify: Verify) {
    let number = batch.number();
    if verify == Verify::All || number < PREFIX {
        // The thread ends only after this sender is dropped.
        let _ = verifier.batches.send(batch);
    } else if number.is_multiple_of(SAMPLE_EVERY) {
        match verifier.batches.try_send(batch) {
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}

fn end(meter: Option<Meter>, verifier: Verifier, failure: Option<CliError>) -> End {
    let last = meter.as_ref().map(|meter| meter.progress(&verifier.verdict));
    let resident_bytes = clock::resident_bytes().unwrap_or(0);
    let Verifier { batches, verdict, thread } = verifier;
    drop(batches);
    let (stream_hash, stream_hash_batches) = thread.join().unwrap_or_default();
    let failure_code = failure.as_ref().map_or(Exit::Good, CliError::exit) as u8;
    End {
        seconds: last.map_or(0.0, |last| last.seconds),
        tokens: last.map_or(0, |last| last.tokens),
        batches: meter.map_or(0, |meter| meter.batches),
        cpu_s: last.map_or(0.0, |last| last.cpu_s),
        verify_cpu_s: verdict.cpu_ns.load(Ordering::Relaxed) as f64 / 1e9,
        verified: verdict.verified.load(Ordering::Relaxed),
        mismatches: verdict.mismatches.load(Ordering::Relaxed),
        stream_hash,
        stream_hash_batches,
        resident_bytes,
        failure: failure.map(|error| error.to_string()),
        failure_code,
    }
}
