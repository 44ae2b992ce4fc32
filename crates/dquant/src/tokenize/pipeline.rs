//! Reader, encoders and writer: one run of the tokeniser.
//!
//! ```text
//!            tasks (bounded)             replies, one per chunk
//!   reader ----------------> encoders ------------------------+
//!      |                                                      v
//!      +--------------- items in order (bounded) ---------> writer
//! ```
//!
//! The reader puts every chunk into two queues: its text into that of the encoders, and the receiver of its tokens
//! into the ordered queue. The writer follows the ordered queue, so the output is in order whichever encoder finishes
//! first. Both queues are bounded, which bounds the memory; the reader waits when either is full. When the writer
//! stops early its queue closes, the reader ends at its next send, and the encoders end with it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::cut::{ChunkReader, ReadError, first_invalid_byte};
use super::encoding::{Encoded, Encoder};
use super::sink::{Sink, SinkError};
use super::{Event, Job, Skip, TokenizeError, Totals, sources};

/// Ordered items that may wait, per encoder.
const ITEMS_PER_THREAD: usize = 2;

/// Text on its way to an encoder.
struct Task {
    text: String,
    reply: SyncSender<Encoded>,
}

/// An item of the ordered queue.
enum Item {
    Begin(PathBuf),
    Chunk { encoded: Receiver<Encoded>, text_bytes: u64, forced_cut: bool },
    End,
    Skipped(PathBuf, Skip),
    Failed(TokenizeError),
}

/// Tokenises the job's files into its output.
///
/// # Errors
/// On an error there is no output; an earlier one of that name is unchanged.
pub fn run(job: &Job<'_>, watch: &mut dyn FnMut(Event<'_>)) -> Result<Totals, TokenizeError> {
    let files = sources::list(job.inputs, job.output)?;
    let sink = Sink::create(job.output, job.dtype)?;
    let encoder = job.encoding.load()?;
    let threads = job.threads.max(1);
    let (item_sender, items) = sync_channel(threads * ITEMS_PER_THREAD);
    let (task_sender, tasks) = sync_channel(threads);
    let tasks = Mutex::new(tasks);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| encode_all(&encoder, &tasks));
        }
        let reader =
            Reader { items: item_sender, tasks: task_sender, chunk_bytes: job.chunk_bytes };
        scope.spawn(move || reader.read_all(&files));
        Writer::new(sink, job, watch).write_all(items)
    })
}

fn encode_all(encoder: &Encoder, tasks: &Mutex<Receiver<Task>>) {
    loop {
        // The guard protects only the receiver, which a panicking holder cannot leave half changed.
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { text, reply }) = task else {
            return;
        };
        // Nothing waits for the reply when the writer has stopped.
        let _ = reply.send(encoder.encode(&text));
    }
}

/// The queues have no reader any more: the run has ended.
struct Over;

impl<T> From<SendError<T>> for Over {
    fn from(_: SendError<T>) -> Over {
        Over
    }
}

/// Reads the files in order and feeds both queues.
struct Reader {
    items: SyncSender<Item>,
    tasks: SyncSender<Task>,
    chunk_bytes: usize,
}

impl Reader {
    fn read_all(&self, files: &[PathBuf]) {
        for path in files {
            if self.read(path).is_err() {
                return;
            }
        }
    }

    fn read(&self, path: &Path) -> Result<(), Over> {
        match judge(path) {
            Ok(None) => self.document(path),
            Ok(Some(skip)) => Ok(self.items.send(Item::Skipped(path.to_owned(), skip))?),
            Err(error) => self.fail(error),
        }
    }

    fn document(&self, path: &Path) -> Result<(), Over> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) => return self.fail(TokenizeError::io("open", path)(error)),
        };
        self.items.send(Item::Begin(path.to_owned()))?;
        let mut chunks = ChunkReader::new(file, self.chunk_bytes);
        loop {
            match chunks.next_chunk() {
                Ok(None) => return Ok(self.items.send(Item::End)?),
                Ok(Some(chunk)) => self.chunk(chunk.text, chunk.forced_cut)?,
                Err(ReadError::Io(error)) => {
                    return self.fail(TokenizeError::io("read", path)(error));
                }
                Err(ReadError::NotUtf8) => {
                    return self.fail(TokenizeError::Changed { path: path.to_owned() });
                }
            }
        }
    }

    fn chunk(&self, text: String, forced_cut: bool) -> Result<(), Over> {
        let (reply, encoded) = sync_channel(1);
        let text_bytes = text.len() as u64;
        self.items.send(Item::Chunk { encoded, text_bytes, forced_cut })?;
        Ok(self.tasks.send(Task { text, reply })?)
    }

    fn fail(&self, error: TokenizeError) -> Result<(), Over> {
        self.items.send(Item::Failed(error))?;
        Err(Over)
    }
}

/// Checks a whole file before any of it is written: half a document in the output would be worse than none.
fn judge(path: &Path) -> Result<Option<Skip>, TokenizeError> {
    let file = File::open(path).map_err(TokenizeError::io("open", path))?;
    let metadata = file.metadata().map_err(TokenizeError::io("read", path))?;
    if metadata.len() == 0 {
        return Ok(Some(Skip::Empty));
    }
    let invalid = first_invalid_byte(file).map_err(TokenizeError::io("read", path))?;
    Ok(invalid.map(|valid_bytes| Skip::NotUtf8 { valid_bytes }))
}

/// Writes the tokens to the output in order and counts them.
struct Writer<'a> {
    sink: Sink,
    job: &'a Job<'a>,
    watch: &'a mut dyn FnMut(Event<'_>),
    totals: Totals,
    /// The document that is being written.
    path: PathBuf,
    /// Tokens of that document so far.
    position: u64,
}

impl<'a> Writer<'a> {
    fn new(sink: Sink, job: &'a Job<'a>, watch: &'a mut dyn FnMut(Event<'_>)) -> Writer<'a> {
        Writer { sink, job, watch, totals: Totals::default(), path: PathBuf::new(), position: 0 }
    }

    fn write_all(mut self, items: Receiver<Item>) -> Result<Totals, TokenizeError> {
        for item in items {
            self.write(item)?;
        }
        let Totals { documents, skipped_not_utf8, skipped_empty, .. } = self.totals;
        if documents == 0 {
            return Err(TokenizeError::NoDocuments { skipped_not_utf8, skipped_empty });
        }
        self.sink.commit()?;
        Ok(self.totals)
    }

    fn write(&mut self, item: Item) -> Result<(), TokenizeError> {
        match item {
            Item::Begin(path) => {
                self.path = path;
                self.position = 0;
            }
            Item::Chunk { encoded, text_bytes, forced_cut } => {
                let stopped = |_| TokenizeError::EncoderStopped { path: self.path.clone() };
                let encoded = encoded.recv().map_err(stopped)?;
                self.totals.forced_cuts += encoded.forced_cuts + u64::from(forced_cut);
                self.totals.text_bytes += text_bytes;
                self.tokens(&encoded.tokens)?;
            }
            Item::End => {
                self.tokens(&[self.job.encoding.end_of_text()])?;
                self.totals.documents += 1;
            }
            Item::Skipped(path, reason) => self.skip(&path, reason),
            Item::Failed(error) => return Err(error),
        }
        Ok(())
    }

    fn tokens(&mut self, tokens: &[u32]) -> Result<(), TokenizeError> {
        self.sink.push(tokens).map_err(|error| self.explain(error))?;
        self.position += tokens.len() as u64;
        self.totals.tokens += tokens.len() as u64;
        let largest = tokens.iter().copied().max().unwrap_or(0);
        self.totals.max_id = self.totals.max_id.max(largest);
        (self.watch)(Event::Progress(&self.totals));
        Ok(())
    }

    fn explain(&self, error: SinkError) -> TokenizeError {
        match error {
            SinkError::Io(error) => TokenizeError::io("write", self.job.output)(error),
            SinkError::DoesNotFit { index, id } => TokenizeError::DoesNotFit {
                path: self.path.clone(),
                position: self.position + index as u64,
                id,
                dtype: self.job.dtype,
            },
        }
    }

    fn skip(&mut self, path: &Path, reason: Skip) {
        match reason {
            Skip::NotUtf8 { .. } => self.totals.skipped_not_utf8 += 1,
            Skip::Empty => self.totals.skipped_empty += 1,
        }
        (self.watch)(Event::Skipped { path, reason });
    }
}
