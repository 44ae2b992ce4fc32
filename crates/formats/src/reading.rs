//! Reading a dataset on all cores, in order.
//!
//! ```text
//!             tasks (bounded)            chunks of one part (bounded)
//!   feeder ----------------> readers --------------------------------+
//!      |                                                            v
//!      +------------- parts in order (bounded) ---------------> the caller
//! ```
//!
//! Every reader opens parts and casts their tokens to the wanted type; the caller follows the parts
//! in order, whichever reader finishes first. All queues are bounded, which bounds the memory. When
//! the caller stops, its queue closes and the readers end at their next chunk.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use xio::dataset::Dtype;

use crate::error::Error;
use crate::source::{MAX_PIECE, Sink, Source};
use crate::value;

/// Chunks of a part that may wait.
const CHUNKS_PER_PART: usize = 2;

/// Ends of documents and sequences in a chunk.
const MAX_ENDS: usize = 1 << 16;

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The type to deliver.
    pub dtype: Dtype,
    /// The id that ends a document, where the dataset does not keep documents apart.
    pub eos: Option<i128>,
    /// Readers that run at the same time.
    pub threads: usize,
    /// The part to begin with.
    pub first_part: u64,
}

/// The end of a document or of a sequence of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// After how many tokens of the chunk.
    pub at: usize,
    /// The document ends, not only a sequence.
    pub is_document: bool,
}

/// Tokens in a row, and the documents that end among them.
#[derive(Debug, Default)]
pub struct Chunk {
    /// Which part they are of.
    pub part: u64,
    /// Little-endian, of the wanted type.
    pub tokens: Vec<u8>,
    /// What ends in the chunk, in order.
    pub ends: Vec<End>,
    /// The loss weight of each token, a `f32`; empty where they are not read.
    pub weights: Vec<u8>,
}

/// A reader's message: a chunk, or why there are no more.
enum Message {
    Chunk(Chunk),
    /// A value does not fit; its position in the part.
    Unfit {
        position: u64,
        id: i128,
    },
    Failed(Error),
}

/// Reads the parts of `source` in order and passes their chunks to `each`.
///
/// # Errors
/// The first error in the order of the dataset, or of `each`. A value that does not fit the wanted
/// type is named with its position after `base` tokens, which is that of the first part read.
pub fn read(
    source: &dyn Source,
    plan: Plan,
    base: u64,
    each: &mut dyn FnMut(Chunk) -> Result<(), Error>,
) -> Result<(), Error> {
    let threads = plan.threads.max(1);
    let (task_sender, tasks) = sync_channel(threads);
    let (part_sender, parts) = sync_channel(threads);
    let tasks = Mutex::new(tasks);
    let readers = || read_tasks(source, plan, &tasks);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(readers);
        }
        scope.spawn(move || {
            for part in plan.first_part..source.parts() {
                let (chunks, receiver) = sync_channel(CHUNKS_PER_PART);
                // A closed queue: the caller has stopped.
                if part_sender.send((part, receiver)).is_err()
                    || task_sender.send((part, chunks)).is_err()
                {
                    return;
                }
            }
        });
        follow(source, plan, base, parts, each)
    })
}

type Task = (u64, SyncSender<Message>);

fn read_tasks(source: &dyn Source, plan: Plan, tasks: &Mutex<Receiver<Task>>) {
    loop {
        // The guard protects only the receiver, which a panicking holder cannot leave half changed.
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((part, chunks)) = task else {
            return;
        };
        let from = source.layout().dtype;
        let mut reader = Reader {
            plan,
            from,
            chunk: Chunk { part, ..Chunk::default() },
            position: 0,
            just_ended: false,
            chunks: &chunks,
            ending: None,
        };
        // Decoders of other projects may panic on a hostile file; the part is then an error, as the
        // closed queue tells.
        let read = catch_unwind(AssertUnwindSafe(|| {
            source.read(part, &mut reader).and_then(|()| reader.flush())
        }));
        let message = match (reader.ending.take(), read) {
            (Some(message), _) => message,
            (None, Ok(Ok(()))) => continue,
            (None, Ok(Err(error))) => Message::Failed(error),
            (None, Err(_)) => {
                let why = "its decoder gave up on it: the file is damaged";
                Message::Failed(Error::corrupt(&source.part_path(part), why))
            }
        };
        let _ = reader.chunks.send(message);
    }
}

/// The sink of one part: casts tokens, finds ends, and fills chunks.
struct Reader<'a> {
    plan: Plan,
    from: Dtype,
    chunk: Chunk,
    /// Tokens of the part so far.
    position: u64,
    /// Whether the last token was the end of a document that the source may report as well.
    just_ended: bool,
    chunks: &'a SyncSender<Message>,
    /// Why reading stops before the part ends.
    ending: Option<Message>,
}

impl Reader<'_> {
    fn width(&self) -> usize {
        self.plan.dtype.bytes() as usize
    }

    fn stopped(&self) -> Error {
        // Never shown: either `ending` tells more, or nobody listens.
        Error::corrupt(std::path::Path::new(""), "stopped")
    }

    fn flush(&mut self) -> Result<(), Error> {
        if self.chunk.tokens.is_empty() && self.chunk.ends.is_empty() {
            return Ok(());
        }
        let next = Chunk { part: self.chunk.part, ..Chunk::default() };
        let full = std::mem::replace(&mut self.chunk, next);
        self.chunks.send(Message::Chunk(full)).map_err(|_| self.stopped())
    }

    fn end(&mut self, is_document: bool) -> Result<(), Error> {
        let at = self.chunk.tokens.len() / self.width();
        self.chunk.ends.push(End { at, is_document });
        if self.chunk.ends.len() >= MAX_ENDS { self.flush() } else { Ok(()) }
    }
}

impl Sink for Reader<'_> {
    fn weights(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.chunk.weights.extend_from_slice(bytes);
        Ok(())
    }

    fn tokens(&mut self, bytes: &[u8]) -> Result<(), Error> {
        debug_assert!(bytes.len() <= MAX_PIECE, "a source passes at most a piece");
        if bytes.is_empty() {
            return Ok(());
        }
        let first = self.chunk.tokens.len() / self.width();
        if let Err(unfit) = value::cast(bytes, self.from, self.plan.dtype, &mut self.chunk.tokens) {
            let position = self.position + unfit.index as u64;
            self.ending = Some(Message::Unfit { position, id: unfit.value });
            return Err(self.stopped());
        }
        let count = bytes.len() / self.from.bytes() as usize;
        self.position += count as u64;
        self.just_ended = false;
        if let Some(eos) = self.plan.eos {
            let ends = value::positions(bytes, self.from, eos);
            self.just_ended = ends.last() == Some(&(count - 1));
            let end = |at: &usize| End { at: first + at + 1, is_document: true };
            self.chunk.ends.extend(ends.iter().map(end));
        }
        if self.chunk.tokens.len() >= MAX_PIECE || self.chunk.ends.len() >= MAX_ENDS {
            self.flush()?;
        }
        Ok(())
    }

    fn end_sequence(&mut self) -> Result<(), Error> {
        self.end(false)
    }

    fn end_document(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.just_ended) {
            return Ok(());
        }
        self.end(true)
    }
}

/// Passes on the chunks of all parts, in order.
fn follow(
    source: &dyn Source,
    plan: Plan,
    base: u64,
    parts: Receiver<(u64, Receiver<Message>)>,
    each: &mut dyn FnMut(Chunk) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut before, mut seen) = (base, plan.first_part);
    for (part, chunks) in parts {
        let mut in_part = 0;
        for message in chunks {
            match message {
                Message::Chunk(chunk) => {
                    in_part += (chunk.tokens.len() / plan.dtype.bytes() as usize) as u64;
                    each(chunk)?;
                }
                Message::Unfit { position, id } => {
                    let (path, dtype) = (source.part_path(part), plan.dtype);
                    return Err(Error::DoesNotFit { path, position: before + position, id, dtype });
                }
                Message::Failed(error) => return Err(error),
            }
        }
        before += in_part;
        seen += 1;
    }
    // Fewer when a thread could not be started.
    match seen == source.parts().max(plan.first_part) {
        true => Ok(()),
        false => Err(Error::Stopped { path: source.part_path(seen) }),
    }
}
