//! Reader, encoders and writer: one run of the tokeniser.
//!
//! ```text
//!            tasks (bounded)             replies, one per batch
//!   reader ----------------> encoders ------------------------+
//!      |                                                      v
//!      +--------------- items in order (bounded) ---------> writer
//! ```
//!
//! The reader puts every batch into two queues: its text into that of the encoders, and the receiver of its tokens
//! into the ordered queue. The writer follows the ordered queue, so the output is in order whichever encoder finishes
//! first. Both queues are bounded, which bounds the memory; the reader waits when either is full. When the writer
//! stops early its queue closes, the reader ends at its next send, and the encoders end with it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::batch::{After, Batch, Encoded, Place, Reason, Segment, Shared};
use super::checkpoint::{EXTENDED, Marks, Position, State};
use super::index::Existing;
use super::input::BytesRead;
use super::manifest::Described;
use super::readers::{Reader, Stop};
use super::sink::{Names, Sink, SinkError};
use super::sources::{self, Format, Source};
use super::vocabulary::Vocabulary;
use super::{Event, Job, Outcome, TokenType, TokenizeError, Totals};

/// Ordered items that may wait, per encoder.
const ITEMS_PER_THREAD: usize = 2;

/// The tokens of a batch, or the document that cannot be encoded and why.
type Reply = Result<Encoded, (Place, String)>;

/// Text on its way to an encoder.
struct Task {
    batch: Shared,
    reply: SyncSender<Reply>,
}

/// An item of the ordered queue.
enum Item {
    Batch(Shared, Receiver<Reply>),
    Failed(TokenizeError),
}

/// Tokenises the job's inputs into its output.
///
/// # Errors
/// On an error there is no output; an earlier one of that name is unchanged.
pub fn run(job: &Job<'_>, watch: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, TokenizeError> {
    let names = Names::new(job.output)?;
    let outputs = [names.output.clone(), names.index.clone(), names.manifest.clone()];
    let mut note = |path: &Path, noted| watch(Event::Noted { path, noted });
    let sources = sources::list(job.inputs, job.format, &outputs, &mut note)?;
    if job.with_index && job.output.extension().is_none_or(|end| end != "bin") {
        return Err(TokenizeError::NoIndexName { path: names.output });
    }
    refuse_existing(job, &names)?;
    let vocabulary = Vocabulary::load(&job.vocabulary)?;
    let eos = vocabulary.end_of_document(&job.eos)?;
    let dtype = dtype(job, &names)?;
    let identity = identity(job, &sources, &vocabulary, eos, dtype);
    let spool = names.spool();
    let mut sink = Sink::open(names, dtype, job.with_index, job.leftovers.clone())?;
    if job.resume {
        sink.keep();
    }
    let described =
        Described::new(vocabulary.identity(), eos.filter(|eos| vocabulary.is_special(*eos)));
    let state = begin(job, &mut sink, identity, described, watch)?;
    let outcome = |totals: Totals, marks: Marks| {
        let tokens_before = marks.tokens - totals.tokens;
        Outcome { totals, dtype, vocabulary: vocabulary.identity(), eos, tokens_before }
    };
    if state.complete {
        sink.finish_killed(&state)?;
        return Ok(outcome(state.totals, state.marks));
    }
    let threads = job.threads.max(1);
    let (item_sender, items) = sync_channel(threads * ITEMS_PER_THREAD);
    let (task_sender, tasks) = sync_channel(threads);
    let tasks = Mutex::new(tasks);
    let begun = state.position;
    let written = thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| encode_all(&vocabulary, eos, &tasks));
        }
        let (sources, cuts) = (&sources, vocabulary.cuts());
        scope.spawn(move || {
            read_all(job, sources, begun, cuts, &spool, &item_sender, &task_sender);
        });
        Writer { sink, job, sources, dtype, watch, state, unsaved_bytes: 0 }.write_all(items)
    });
    written.map(|state| outcome(state.totals, state.marks))
}

/// Refuses an output that exists, unless it is to be replaced or extended, or belongs to a killed run that had begun to
/// name it.
fn refuse_existing(job: &Job<'_>, names: &Names) -> Result<(), TokenizeError> {
    let is_file = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    let is_extended = job.append && is_file(&names.output);
    if job.force || is_extended || job.resume && State::is_complete_in(&names.state) {
        return Ok(());
    }
    // An index alone is that of another file, such as a `.npy`.
    match [&names.output, &names.index].into_iter().find(|path| is_file(path)) {
        Some(path) => Err(TokenizeError::Exists { path: path.clone() }),
        None => Ok(()),
    }
}

/// The type of ids: as wanted, as in the interrupted run, as in the output that is extended, or u32.
fn dtype(job: &Job<'_>, names: &Names) -> Result<TokenType, TokenizeError> {
    if let Some(dtype) = job.dtype {
        return Ok(dtype);
    }
    if job.resume && State::type_in(&names.state).as_deref() == Some("u16") {
        return Ok(TokenType::U16);
    }
    if job.append && job.with_index && names.output.exists() {
        return Existing::open(&names.output)?.dtype();
    }
    Ok(TokenType::U32)
}

/// What must be equal for a resumed run to write the same bytes, by the names users know.
fn identity(
    job: &Job<'_>,
    sources: &[Source],
    vocabulary: &Vocabulary,
    eos: Option<u32>,
    dtype: TokenType,
) -> BTreeMap<String, String> {
    let output = fs::metadata(job.output).ok().filter(|_| job.append);
    let extended = output.map_or(String::from("nothing"), |found| {
        format!("{} bytes of {}.{:09}", found.len(), found.mtime(), found.mtime_nsec())
    });
    let entries = [
        ("inputs", sources::fingerprint(sources)),
        ("vocabulary", vocabulary.identity()),
        ("end of documents", eos.map_or(String::from("none"), |id| format!("id {id}"))),
        ("type", dtype.to_string()),
        ("index", if job.with_index { "written" } else { "left out" }.to_owned()),
        ("field", job.field.to_owned()),
        // Where text has no place to cut, the cuts follow from the size of a chunk.
        ("chunk", format!("{} bytes", job.chunk_bytes)),
        (EXTENDED, extended),
    ];
    entries.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Prepares the output and returns where to begin.
fn begin(
    job: &Job<'_>,
    sink: &mut Sink,
    identity: BTreeMap<String, String>,
    described: Described,
    watch: &mut dyn FnMut(Event<'_>),
) -> Result<State, TokenizeError> {
    if job.resume
        && let Some(state) = State::load(sink.state_path(), &identity)?
    {
        watch(Event::Resumed(&state.totals));
        if !state.complete {
            sink.resume(state.marks)?;
        }
        return Ok(state);
    }
    if sink.state_path().exists() {
        watch(Event::StartedAnew);
    }
    sink.start_anew()?;
    if job.append && job.output.exists() {
        let marks = sink.append()?;
        let described = described.extends(job.output, job.with_index)?;
        return Ok(State::new(identity, marks, described));
    }
    Ok(State::new(identity, Marks::default(), described))
}

fn encode_all(vocabulary: &Vocabulary, eos: Option<u32>, tasks: &Mutex<Receiver<Task>>) {
    loop {
        // The guard protects only the receiver, which a panicking holder cannot leave half changed.
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { batch, reply }) = task else {
            return;
        };
        // Nothing waits for the reply when the writer has stopped.
        let _ = reply.send(batch.encode(vocabulary, eos));
    }
}

/// Reads the inputs in order and feeds both queues.
fn read_all(
    job: &Job<'_>,
    sources: &[Source],
    position: Position,
    cuts: bool,
    spool: &Path,
    items: &SyncSender<Item>,
    tasks: &SyncSender<Task>,
) {
    let mut send = |batch: Batch| {
        let (batch, (reply, encoded)) = (Arc::new(batch), sync_channel(1));
        items.send(Item::Batch(Arc::clone(&batch), encoded)).is_ok()
            && tasks.send(Task { batch, reply }).is_ok()
    };
    let mut reader = Reader {
        sources,
        field: job.field,
        cuts,
        chunk_bytes: job.chunk_bytes,
        spool,
        send: &mut send,
        batch: Batch::default(),
        position,
        bytes_read: BytesRead::default(),
    };
    if let Err(Stop::Failed(error)) = reader.read_all() {
        // Nothing waits for the error when the writer has stopped.
        let _ = items.send(Item::Failed(error));
    }
}

/// Writes the tokens to the output in order and counts them.
struct Writer<'a> {
    sink: Sink,
    job: &'a Job<'a>,
    sources: &'a [Source],
    dtype: TokenType,
    watch: &'a mut dyn FnMut(Event<'_>),
    state: State,
    /// Bytes of text since the last saved state, discarded documents included.
    unsaved_bytes: u64,
}

impl Writer<'_> {
    fn write_all(mut self, items: Receiver<Item>) -> Result<State, TokenizeError> {
        let input_total = self.sources.iter().map(|source| source.bytes).sum();
        for item in items {
            let batch = match item {
                Item::Failed(error) => return Err(error),
                Item::Batch(batch, encoded) => {
                    let encoded = encoded.recv().map_err(|_| TokenizeError::EncoderStopped {
                        place: self.first_place(&batch),
                    })?;
                    let encoded = encoded.map_err(|(place, reason)| TokenizeError::NotEncoded {
                        place: self.name(place),
                        reason,
                    })?;
                    self.batch(&batch, &encoded)?;
                    batch
                }
            };
            self.state.position = batch.position;
            let (totals, input_bytes) = (&self.state.totals, batch.input_bytes);
            (self.watch)(Event::Progress { totals, input_bytes, input_total });
            self.unsaved_bytes += batch.text.len() as u64;
            if self.unsaved_bytes >= self.job.checkpoint_bytes {
                self.sink.save(&mut self.state)?;
                self.unsaved_bytes = 0;
            }
        }
        let Totals { documents, skipped_not_utf8, skipped_empty, skipped_broken, .. } =
            self.state.totals;
        if documents == 0 {
            let (not_utf8, empty, broken) = (skipped_not_utf8, skipped_empty, skipped_broken);
            return Err(TokenizeError::NoDocuments { not_utf8, empty, broken });
        }
        self.sink.commit(&mut self.state)?;
        Ok(self.state)
    }

    fn first_place(&self, batch: &Batch) -> String {
        batch.segments.first().map_or(String::new(), |segment| self.name(segment.place))
    }

    /// How users find a document: file, file and line, file and row.
    fn name(&self, place: Place) -> String {
        // Places are made from this list.
        let source = &self.sources[place.source];
        match source.format {
            Format::Text => source.to_string(),
            Format::Jsonl => format!("{source}:{}", place.record + 1),
            Format::Parquet => format!("{source}, row {}", place.record),
        }
    }

    fn batch(&mut self, batch: &Batch, encoded: &Encoded) -> Result<(), TokenizeError> {
        let mut left_out = batch.left_out.iter().peekable();
        let (mut text_start, mut start) = (0, 0);
        for (index, (segment, end)) in batch.segments.iter().zip(&encoded.ends).enumerate() {
            while let Some((_, place, reason)) = left_out.next_if(|(before, ..)| *before <= index) {
                self.leave_out(*place, reason)?;
            }
            let text_bytes = segment.end - text_start;
            let written = self.segment(segment, &encoded.tokens[start..*end], text_bytes as u64);
            written.map_err(|error| self.explain(error, segment.place))?;
            (text_start, start) = (segment.end, *end);
            if segment.after == After::End {
                self.end_document(segment.place)?;
            }
        }
        for (_, place, reason) in left_out {
            self.leave_out(*place, reason)?;
        }
        Ok(())
    }

    fn segment(
        &mut self,
        segment: &Segment,
        tokens: &[u32],
        text_bytes: u64,
    ) -> Result<(), SinkError> {
        let document = &mut self.state.document;
        if segment.after == After::Discard {
            // A state that counts some of this document was saved before this batch, which holds no other document
            // before it. So the position and the totals of the state are still those of the batch's beginning, and
            // a run that resumes there meets the rest of the document and discards that.
            *document = Totals::default();
            return self.sink.discard_document(&mut self.state);
        }
        document.tokens += tokens.len() as u64;
        document.text_bytes += text_bytes;
        document.max_id = tokens.iter().copied().fold(document.max_id, u32::max);
        document.forced_cuts += u64::from(segment.after == After::More { forced: true });
        if let Some(vocab) = self.job.vocab.filter(|vocab| u64::from(document.max_id) >= *vocab) {
            let beyond = tokens.iter().zip(0..).find(|(id, _)| u64::from(**id) >= vocab);
            if let Some((&id, index)) = beyond {
                return Err(SinkError::BeyondVocabulary { index, id });
            }
        }
        self.sink.push(tokens)
    }

    fn end_document(&mut self, place: Place) -> Result<(), TokenizeError> {
        let document = std::mem::take(&mut self.state.document);
        if document.tokens == 0 {
            return self.leave_out(place, &Reason::Empty);
        }
        let ended = self.sink.end_document();
        ended.map_err(|error| self.explain(error, place))?;
        let totals = &mut self.state.totals;
        totals.documents += 1;
        totals.tokens += document.tokens;
        totals.text_bytes += document.text_bytes;
        totals.forced_cuts += document.forced_cuts;
        totals.max_id = totals.max_id.max(document.max_id);
        Ok(())
    }

    fn explain(&self, error: SinkError, place: Place) -> TokenizeError {
        match error {
            SinkError::Io(error) => TokenizeError::io("write", self.job.output)(error),
            SinkError::DoesNotFit { index, id } => TokenizeError::DoesNotFit {
                place: self.name(place),
                position: self.sink.document_tokens() + index as u64,
                id,
                dtype: self.dtype,
            },
            SinkError::BeyondVocabulary { index, id } => TokenizeError::BeyondVocabulary {
                place: self.name(place),
                position: self.sink.document_tokens() + index as u64,
                id,
                vocab: self.job.vocab.unwrap_or(0),
            },
        }
    }

    fn leave_out(&mut self, place: Place, reason: &Reason) -> Result<(), TokenizeError> {
        let name = self.name(place);
        if self.job.strict && *reason != Reason::Empty {
            return Err(TokenizeError::Strict { place: name, reason: reason.to_string() });
        }
        let totals = &mut self.state.totals;
        match reason {
            Reason::NotUtf8 { .. } => totals.skipped_not_utf8 += 1,
            Reason::Empty => totals.skipped_empty += 1,
            Reason::Broken(reason) => {
                totals.skipped_broken += 1;
                totals.first_broken.get_or_insert_with(|| format!("{name}: {reason}"));
            }
        }
        (self.watch)(Event::Skipped { place: &name, reason });
        Ok(())
    }
}
