//! Reader, encoders and writer: one run of the tokeniser.
//!
//! ```text
//!            tasks (bounded)             replies, one per batch
//!   reader ----------------> encoders ------------------------+
//!      |                                                      v
//!      +--------------- items in order (bounded) ---------> writer
//! ```
//!
//! The reader puts every batch into two queues: its text into that of the encoders, and the
//! receiver of its tokens into the ordered queue. The writer follows the ordered queue, so the
//! output is in order whichever encoder finishes first. Both queues are bounded, which bounds the
//! memory; the reader waits when either is full. When the writer stops early its queue closes, the
//! reader ends at its next send, and the encoders end with it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use formats::manifest::Part;

use super::batch::{After, Batch, Encoded, Encoder, Place, Reason, Segment, Shared};
use super::chat::{self, Chat};
use super::checkpoint::{
    CONVERSATIONS, EXTENDED, HELD_OUT, Marks, NOTHING, Position, State, TIME, WEIGHTS, Written,
};
use super::described::Described;
use super::index::Existing;
use super::input::BytesRead;
use super::manifest;
use super::readers::{Reader, Stop};
use super::sink::{Kept, Names, Sink, SinkError};
use super::sources::{self, Format, Source};
use super::turns::Turns;
use super::vocabulary::{Eos, Vocabulary, VocabularyName};
use super::{
    ChatTemplate, Event, HeldOut, Holdout, Job, Noted, Outcome, TokenType, TokenizeError, Totals,
};

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
    let outputs = outputs(job)?;
    let written = |names: &Names| {
        [&names.output, &names.index, &names.manifest, &names.weights].map(PathBuf::clone)
    };
    let written: Vec<_> = outputs.iter().flat_map(written).collect();
    let sources = sources(job, &written, watch)?;
    for Names { output, .. } in &outputs {
        if job.with_index && output.extension().is_none_or(|end| end != "bin") {
            return Err(TokenizeError::NoIndexName { path: output.clone() });
        }
    }
    refuse_existing(job, &outputs)?;
    let mut vocabulary = Vocabulary::load(&job.vocabulary)?;
    let (chat, time) = chat(job, &outputs[0], &mut vocabulary)?.unzip();
    let encoder = encoder(job, &vocabulary, chat.as_ref())?;
    let eos = encoder.eos;
    let dtype = dtype(job, &outputs[0])?;
    let mut identity = identity(job, &sources, &encoder, dtype);
    if let Some(time) = time.filter(|_| chat.as_ref().is_some_and(Chat::uses_time)) {
        identity.insert(TIME.to_owned(), time.to_string());
    }
    let spool = outputs[0].spool();
    let rule = job.holdout.as_ref().map(|holdout| holdout.rule);
    let written = Kept { index: job.with_index, weights: job.loss_weights };
    let mut sink = Sink::open(outputs, dtype, written, rule, job.leftovers.clone())?;
    if job.resume {
        sink.keep();
    }
    // What templates write between turns may be that id, too.
    let own = eos.filter(|eos| vocabulary.is_special(*eos) && chat.is_none());
    let described = Described::new(vocabulary.identity(), own, chat.is_some());
    let state = begin(job, &mut sink, identity, described, watch)?;
    let outcome = |state: State| outcome(state, dtype, vocabulary.identity(), eos);
    if state.complete {
        sink.finish(&state)?;
        return Ok(outcome(state));
    }
    let threads = job.threads.max(1);
    let (item_sender, items) = sync_channel(threads * ITEMS_PER_THREAD);
    let (task_sender, tasks) = sync_channel(threads);
    let tasks = Mutex::new(tasks);
    let begun = state.position;
    let written = thread::scope(|scope| {
        for _ in 0..threads {
            let mut builder = thread::Builder::new();
            if chat.is_some() {
                builder = builder.stack_size(chat::STACK_BYTES);
            }
            let started = builder.spawn_scoped(scope, || encode_all(&encoder, &tasks));
            started.map_err(TokenizeError::Thread)?;
        }
        let (sources, encoder) = (&sources, &encoder);
        scope.spawn(move || {
            read_all(job, sources, begun, encoder, &spool, &item_sender, &task_sender);
        });
        Writer { sink, job, sources, dtype, watch, state, unsaved_bytes: 0 }.write_all(items)
    });
    written.map(outcome)
}

/// The inputs. Conversations are read from JSON lines alone; what else lies in a folder is left
/// out.
fn sources(
    job: &Job<'_>,
    outputs: &[PathBuf],
    watch: &mut dyn FnMut(Event<'_>),
) -> Result<Vec<Source>, TokenizeError> {
    let is_chat = job.chat.is_some();
    let mut note = |path: &Path, noted| {
        if !(is_chat && noted == Noted::AsText) {
            watch(Event::Noted { path, noted });
        }
    };
    let sources = sources::list(job.inputs, job.format, outputs, &mut note)?;
    if !is_chat {
        return Ok(sources);
    }
    let mut left = Vec::new();
    for mut source in sources {
        if source.is_stdin() && job.format.is_none() {
            source.format = Format::Jsonl;
        }
        let what = match source.format {
            Format::Jsonl => {
                left.push(source);
                continue;
            }
            Format::Text => "plain text",
            Format::Parquet => "Parquet",
        };
        if job.format.is_none() && !job.inputs.contains(&source.path) {
            note(&source.path, Noted::LeftOut(what));
            continue;
        }
        return Err(TokenizeError::Chat {
            reason: format!("{source} is {what}, and conversations are read from JSON lines"),
            hint: "write one record with `messages` per line; --format jsonl reads a file of any name so, and \
                   `Dataset.from_parquet(FILE).to_json(FILE)` of the `datasets` library converts Parquet",
        });
    }
    if left.is_empty() {
        let inputs: Vec<_> = job.inputs.iter().map(|path| path.display().to_string()).collect();
        return Err(TokenizeError::NoFiles { inputs: inputs.join(", ") });
    }
    Ok(left)
}

/// What makes conversations of records, with the time that templates may write: that of the
/// interrupted run, or now.
fn chat(
    job: &Job<'_>,
    names: &Names,
    vocabulary: &mut Vocabulary,
) -> Result<Option<(Chat, u64)>, TokenizeError> {
    let Some(template) = &job.chat else {
        if job.loss_weights {
            let reason = String::from("only messages of conversations say what they weigh");
            return Err(TokenizeError::Chat {
                reason,
                hint: "add --chat, or leave out --loss-weights",
            });
        }
        return Ok(None);
    };
    let refused = |reason: &str, hint| Err(TokenizeError::Chat { reason: reason.to_owned(), hint });
    let VocabularyName::File(tokenizer) = &job.vocabulary else {
        return refused(
            "a built-in encoding has no chat template",
            "name the model's tokenizer with --tokenizer FOLDER/tokenizer.json",
        );
    };
    if !job.with_index {
        return refused(
            "ids alone do not tell what the assistant says",
            "leave out --flat, and end the name of the output with .bin: its index tells it",
        );
    }
    let file = match template {
        ChatTemplate::Beside => None,
        ChatTemplate::File(path) => Some(path.as_path()),
    };
    let then = job.resume.then(|| State::entry_in(&names.state, TIME)).flatten();
    let then = then.and_then(|time| time.parse().ok());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let time = then.unwrap_or_else(now);
    vocabulary.parse_special_tokens();
    let chat = Chat::load(tokenizer, file, job.field, time);
    Ok(Some((chat.map(|chat| chat.with_weights(job.loss_weights))?, time)))
}

/// What makes ids. A conversation ends as its template says: nothing is added unless the user asks
/// for it.
fn encoder<'a>(
    job: &Job<'_>,
    vocabulary: &'a Vocabulary,
    chat: Option<&'a Chat>,
) -> Result<Encoder<'a>, TokenizeError> {
    let eos = match (&job.eos, chat) {
        (Eos::Default, Some(_)) => None,
        (eos, _) => vocabulary.end_of_document(eos)?,
    };
    Ok(Encoder { vocabulary, eos, chat })
}

fn outcome(state: State, dtype: TokenType, vocabulary: String, eos: Option<u32>) -> Outcome {
    let held_out = state
        .validation
        .map(|written| HeldOut { tokens_before: written.tokens_before(), totals: written.totals });
    let tokens_before = state.train.tokens_before();
    Outcome { totals: state.train.totals, held_out, dtype, vocabulary, eos, tokens_before }
}

/// The files of the output, and of that of held-out documents.
fn outputs(job: &Job<'_>) -> Result<Vec<Names>, TokenizeError> {
    let first = Names::new(job.output)?;
    let Some(Holdout { output, .. }) = &job.holdout else {
        return Ok(vec![first]);
    };
    let second = Names::new(output)?;
    let files =
        |names: &Names| [&names.output, &names.index, &names.manifest].map(|path| place(path));
    let (firsts, seconds) = (files(&first), files(&second));
    // A flat output of any name removes the index of that name.
    if firsts.contains(&seconds[0]) || seconds.contains(&firsts[0]) {
        let (output, other) = (first.output, second.output);
        return Err(TokenizeError::SameOutput { output, other });
    }
    Ok(vec![first, second])
}

/// Where a file lies that may not exist yet.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = fs::canonicalize(folder.unwrap_or(Path::new(".")));
    folder.map_or_else(
        |_| path.to_owned(),
        |folder| folder.join(path.file_name().unwrap_or_default()),
    )
}

/// Refuses outputs that exist, unless they are to be replaced or extended, or belong to a killed
/// run that had begun to name them.
fn refuse_existing(job: &Job<'_>, outputs: &[Names]) -> Result<(), TokenizeError> {
    let is_file = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    let is_other = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let beside =
        |names: &Names| [&names.index, &names.manifest, &names.weights].map(PathBuf::clone);
    if let Some(path) = outputs.iter().flat_map(beside).find(|path| is_other(path)) {
        return Err(TokenizeError::OutputNotAFile { path });
    }
    let is_extended = job.append && outputs.iter().any(|names| is_file(&names.output));
    if is_extended || job.resume && State::is_complete_in(&outputs[0].state) {
        return Ok(());
    }
    if job.force {
        return refuse_leaving(outputs);
    }
    // An index alone is that of another file, such as a `.npy`, and so are weights alone.
    let mut paths = outputs.iter().flat_map(|names| [&names.output, &names.index, &names.weights]);
    match paths.find(|path| is_file(path)) {
        Some(path) => Err(TokenizeError::Exists { path: path.clone() }),
        None => Ok(()),
    }
}

/// Refuses to replace one part of a split alone: the other one would name a dataset that is gone.
fn refuse_leaving(outputs: &[Names]) -> Result<(), TokenizeError> {
    let places: Vec<PathBuf> = outputs.iter().map(|names| place(&names.output)).collect();
    for Names { output, .. } in outputs {
        let other = manifest::other_part(output);
        if let Some(other) = other.filter(|other| !places.contains(&place(other))) {
            return Err(TokenizeError::OtherPart { path: output.clone(), other });
        }
    }
    Ok(())
}

/// The type of ids: as wanted, as in the interrupted run, as in the output that is extended, or
/// u32.
fn dtype(job: &Job<'_>, names: &Names) -> Result<TokenType, TokenizeError> {
    if let Some(dtype) = job.dtype {
        return Ok(dtype);
    }
    if job.resume && State::entry_in(&names.state, "type").as_deref() == Some("u16") {
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
    encoder: &Encoder<'_>,
    dtype: TokenType,
) -> BTreeMap<String, String> {
    let Encoder { vocabulary, eos, chat } = encoder;
    let extended = |output: &Path| {
        let output = fs::metadata(output).ok().filter(|_| job.append);
        output.map_or(String::from(NOTHING), |found| {
            format!("{} bytes of {}.{:09}", found.len(), found.mtime(), found.mtime_nsec())
        })
    };
    let (mut extends, mut held_out) = (extended(job.output), String::from(NOTHING));
    if let Some(Holdout { rule, output }) = &job.holdout {
        if job.append {
            extends = format!("{extends}, {}", extended(output));
        }
        held_out = format!("{rule} in {}", output.display());
    }
    let field = job.field.unwrap_or(if chat.is_some() { "messages" } else { Job::FIELD });
    let entries = [
        ("inputs", sources::fingerprint(sources)),
        ("vocabulary", vocabulary.identity()),
        ("end of documents", eos.map_or(String::from("none"), |id| format!("id {id}"))),
        ("type", dtype.to_string()),
        ("index", if job.with_index { "written" } else { "left out" }.to_owned()),
        ("field", field.to_owned()),
        (CONVERSATIONS, chat.map_or(NOTHING, Chat::identity).to_owned()),
        // Where text has no place to cut, the cuts follow from the size of a chunk.
        ("chunk", format!("{} bytes", job.chunk_bytes)),
        (WEIGHTS, if job.loss_weights { "written" } else { NOTHING }.to_owned()),
        (EXTENDED, extends),
        (HELD_OUT, held_out),
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
        watch(Event::Resumed(&state.totals()));
        if !state.complete {
            sink.resume(&state)?;
        }
        return Ok(state);
    }
    if sink.has_state() {
        watch(Event::StartedAnew);
    }
    sink.start_anew()?;
    let validation = job.holdout.as_ref().map(|holdout| holdout.output.as_path());
    let is_extended = job.append && (job.output.exists() || validation.is_some_and(Path::exists));
    if is_extended {
        manifest::check_split(job.output, job.holdout.as_ref())?;
    }
    let mut written = |part, output: &Path| {
        if !is_extended {
            return Ok::<_, TokenizeError>(Written::new(Marks::default(), described.clone()));
        }
        let marks = sink.append(part)?;
        let described = described.clone().extends(output, job.with_index)?;
        Ok(Written::new(marks, described))
    };
    let train = written(Part::Train, job.output)?;
    let validation = validation.map(|output| written(Part::Validation, output)).transpose()?;
    Ok(State::new(identity, train, validation))
}

fn encode_all(encoder: &Encoder<'_>, tasks: &Mutex<Receiver<Task>>) {
    loop {
        // The guard protects only the receiver, which a panicking holder cannot leave half changed.
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { batch, reply }) = task else {
            return;
        };
        // Nothing waits for the reply when the writer has stopped.
        let _ = reply.send(batch.encode(encoder));
    }
}

/// Reads the inputs in order and feeds both queues.
fn read_all(
    job: &Job<'_>,
    sources: &[Source],
    position: Position,
    encoder: &Encoder<'_>,
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
        field: job.field.unwrap_or(Job::FIELD),
        chat: encoder.chat,
        rule: job.holdout.as_ref().map(|holdout| holdout.rule),
        cuts: encoder.vocabulary.cuts(),
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
            let (totals, input_bytes) = (&self.state.totals(), batch.input_bytes);
            (self.watch)(Event::Progress { totals, input_bytes, input_total });
            self.unsaved_bytes += batch.text.len() as u64;
            if self.unsaved_bytes >= self.job.checkpoint_bytes {
                self.sink.save(&mut self.state)?;
                self.unsaved_bytes = 0;
            }
        }
        self.check_parts()?;
        self.sink.commit(&mut self.state)?;
        Ok(self.state)
    }

    /// Whether there is something in each output.
    fn check_parts(&self) -> Result<(), TokenizeError> {
        let Totals {
            documents, skipped_not_utf8, skipped_empty, skipped_broken, first_broken, ..
        } = self.state.totals();
        if documents == 0 {
            let (not_utf8, empty, broken) = (skipped_not_utf8, skipped_empty, skipped_broken);
            let (first, chat) = (first_broken, self.job.chat.is_some());
            return Err(TokenizeError::NoDocuments { not_utf8, empty, broken, first, chat });
        }
        let validation = self.job.holdout.as_ref().map(|holdout| holdout.output.as_path());
        let outputs = [self.job.output].into_iter().chain(validation);
        match self.state.written().zip(outputs).find(|(written, _)| written.is_empty()) {
            Some((_, path)) => Err(TokenizeError::EmptyPart { path: path.to_owned(), documents }),
            None => Ok(()),
        }
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
            let turns = match encoded.conversations.get(index) {
                Some(Err(reason)) => {
                    self.leave_out(segment.place, &Reason::Broken(reason.clone()))?;
                    (text_start, start) = (segment.end, *end);
                    continue;
                }
                Some(Ok(turns)) => Some(turns),
                None => None,
            };
            let text_bytes = (segment.end - text_start) as u64;
            let text_bytes = turns.map_or(text_bytes, |turns| turns.text_bytes);
            let weights = turns.map_or(&[][..], |turns| &turns.weights);
            let tokens = &encoded.tokens[start..*end];
            let written = self.segment(segment, (tokens, weights), text_bytes);
            written.map_err(|error| self.explain(error, segment))?;
            (text_start, start) = (segment.end, *end);
            if segment.after == After::End {
                self.end_document(segment, turns)?;
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
        (tokens, weights): (&[u32], &[f32]),
        text_bytes: u64,
    ) -> Result<(), SinkError> {
        let document = &mut self.state.document;
        if segment.after == After::Discard {
            // A state that counts some of this document was saved before this batch, which holds no
            // other document before it. So the position and the totals of the state are still those
            // of the batch's beginning, and a run that resumes there meets the rest of the document
            // and discards that.
            *document = Totals::default();
            return self.sink.discard_document(segment.part, &mut self.state);
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
        self.sink.push(segment.part, tokens, weights)
    }

    fn end_document(
        &mut self,
        segment: &Segment,
        turns: Option<&Turns>,
    ) -> Result<(), TokenizeError> {
        let document = std::mem::take(&mut self.state.document);
        if document.tokens == 0 {
            return self.leave_out(segment.place, &Reason::Empty);
        }
        let ended = self.sink.end_document(segment.part, turns);
        ended.map_err(|error| self.explain(error, segment))?;
        let totals = &mut self.state.part(segment.part).totals;
        totals.documents += 1;
        totals.tokens += document.tokens;
        totals.text_bytes += document.text_bytes;
        totals.targets += turns.map_or(0, Turns::targets);
        totals.without_targets += u64::from(turns.is_some_and(|turns| turns.targets() == 0));
        totals.forced_cuts += document.forced_cuts;
        totals.max_id = totals.max_id.max(document.max_id);
        Ok(())
    }

    fn explain(&mut self, error: SinkError, segment: &Segment) -> TokenizeError {
        let place = self.name(segment.place);
        let mut position = |index: usize| self.sink.document_tokens(segment.part) + index as u64;
        match error {
            SinkError::Io(error) => TokenizeError::io("write", self.job.output)(error),
            SinkError::DoesNotFit { index, id } => {
                let position = position(index);
                TokenizeError::DoesNotFit { place, position, id, dtype: self.dtype }
            }
            SinkError::BeyondVocabulary { index, id } => {
                let (position, vocab) = (position(index), self.job.vocab.unwrap_or(0));
                TokenizeError::BeyondVocabulary { place, position, id, vocab }
            }
        }
    }

    fn leave_out(&mut self, place: Place, reason: &Reason) -> Result<(), TokenizeError> {
        let name = self.name(place);
        if self.job.strict && *reason != Reason::Empty {
            return Err(TokenizeError::Strict { place: name, reason: reason.to_string() });
        }
        let totals = &mut self.state.train.totals;
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
