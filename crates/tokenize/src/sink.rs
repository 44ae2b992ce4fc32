//! The outputs: a flat little-endian file of ids, with an index of documents beside it; and another
//! such pair for documents that are held out.
//!
//! Ids and the lengths of documents go to hidden files in the same folder. [`Sink::commit`] flushes
//! them to the disk, makes the index of the lengths, and renames both, so the output under its name
//! is always complete and always matches its index. A sink that is dropped before that removes its
//! files, unless a later run may resume from them.
//!
//! A pair cannot be replaced in one step. The old `.bin` is removed first, and the new one gets its
//! name last: a reader in between finds no dataset, never one of two halves. A run that is killed
//! there leaves a state that says so, and `--resume` renames what is left. One state counts what is
//! in both outputs, so it is never that of one alone.
//!
//! The file of ids is locked while a run writes it, so two runs cannot write one output at the same
//! time. Whoever can open a file can lock it, so it is closed to other users until it gets its
//! name.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use formats::Weights;
use formats::manifest::Part;
use xio::dataset::Dtype;

use super::TokenizeError;
use super::checkpoint::{self, Marks, State};
use super::holdout::Rule;
use super::index::{self, Existing};
use super::manifest;
use super::token_type::TokenType;
use super::turns::Turns;

/// Why tokens cannot be written.
#[derive(Debug)]
pub enum SinkError {
    /// An id is too large for the type.
    DoesNotFit {
        /// Index among the tokens of the call, counted from 0.
        index: usize,
        /// The id.
        id: u32,
    },
    /// An id is none of the model's.
    BeyondVocabulary {
        /// Index among the tokens of the call, counted from 0.
        index: usize,
        /// The id.
        id: u32,
    },
    /// An error of the operating system.
    Io(io::Error),
}

/// The files of an output.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// The output itself.
    pub(super) output: PathBuf,
    /// Its index; removed when the output has none, because an old one would not match.
    pub(super) index: PathBuf,
    /// Its manifest.
    pub(super) manifest: PathBuf,
    /// Its loss weights; removed when the output has none, because they are those of other tokens.
    pub(super) weights: PathBuf,
    tokens: PathBuf,
    lengths: PathBuf,
    next_index: PathBuf,
    next_weights: PathBuf,
    pub(super) state: PathBuf,
}

impl Names {
    pub(super) fn new(output: &Path) -> Result<Names, TokenizeError> {
        let name = output.file_name();
        let name = name.ok_or_else(|| TokenizeError::NotAFile { path: output.to_owned() })?;
        let hidden = |end: &str| {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(end);
            output.with_file_name(hidden)
        };
        Ok(Names {
            output: output.to_owned(),
            index: index::path_of(output),
            manifest: formats::manifest::path_of(output),
            weights: formats::settle::loss_weights_of(output),
            tokens: hidden(".part"),
            lengths: hidden(".lengths"),
            next_index: hidden(".index"),
            next_weights: hidden(".weights"),
            state: hidden(".state"),
        })
    }

    /// Where a Parquet file that cannot be read in place is kept while it is read.
    pub(super) fn spool(&self) -> PathBuf {
        self.tokens.with_extension("spool")
    }

    /// What is left to do for a complete output of so many tokens: nothing, or to name it, and
    /// whether its loss weights are to be named, too. A file that this run has opened is there, and
    /// says nothing; its length does.
    fn steps(
        &self,
        tokens: u64,
        dtype: TokenType,
        kept: Kept,
    ) -> Result<Option<bool>, TokenizeError> {
        let has = |path: &Path, bytes| fs::metadata(path).is_ok_and(|found| found.len() == bytes);
        let less = |path: &Path| {
            let reason = format!("{} holds less than was written", path.display());
            Err(TokenizeError::Resume { reason })
        };
        let bytes = tokens * dtype.bytes();
        let is_unnamed = has(&self.tokens, bytes);
        if !is_unnamed && !has(&self.output, bytes) {
            return less(&self.tokens);
        }
        let bytes = weights_bytes(tokens);
        let weights_are_unnamed = kept.weights && has(&self.next_weights, bytes);
        if kept.weights && !weights_are_unnamed && !has(&self.weights, bytes) {
            return less(&self.next_weights);
        }
        Ok(is_unnamed.then_some(weights_are_unnamed))
    }

    fn hidden(&self) -> Vec<PathBuf> {
        let (lengths, index) = (self.lengths.clone(), self.next_index.clone());
        let state = [checkpoint::next_path(&self.state), self.state.clone()];
        let weights = self.next_weights.clone();
        let hidden = [lengths, index, weights, self.spool()].into_iter().chain(state);
        // The locked file goes last: as long as it exists, no other run begins.
        hidden.chain([self.tokens.clone()]).collect()
    }
}

/// The unfinished files of a run, for whoever must remove them when a signal ends the process.
#[derive(Clone, Debug, Default)]
pub struct Leftovers(Arc<Mutex<Unfinished>>);

#[derive(Debug, Default)]
struct Unfinished {
    paths: Vec<PathBuf>,
    /// A state from which a later run wants to go on: while it exists, nothing is removed.
    wanted: Option<PathBuf>,
}

impl Unfinished {
    fn remove(&mut self) {
        if !self.wanted.as_ref().is_some_and(|state| state.exists()) {
            remove(&self.paths);
        }
        self.paths.clear();
    }
}

fn remove(paths: &[PathBuf]) {
    for path in paths {
        // A failure here cannot be handled, and files with these names are known to be unfinished.
        let _ = fs::remove_file(path);
    }
}

impl Leftovers {
    fn lock(&self) -> MutexGuard<'_, Unfinished> {
        // A list of paths cannot be half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the files for good: a run that would write one of them afterwards waits until the
    /// process has ended.
    pub fn remove_for_good(&self) {
        let mut unfinished = self.lock();
        unfinished.remove();
        std::mem::forget(unfinished);
    }
}

/// A token file that is being written.
#[derive(Debug)]
struct Output {
    tokens: BufWriter<File>,
    lengths: BufWriter<File>,
    /// Loss weights, where they are kept: an array of NumPy, whose header comes last.
    weights: Option<BufWriter<File>>,
    names: Names,
    marks: Marks,
    /// Tokens that the state on the disk counts.
    saved_tokens: u64,
}

impl Output {
    fn open(names: Names, tokens: File, kept: Kept) -> Result<Output, TokenizeError> {
        let usual = |path: &Path| open(path, USUAL).map_err(TokenizeError::io("create", path));
        let weights = kept.weights.then(|| usual(&names.next_weights)).transpose()?;
        let lengths = usual(&names.lengths)?;
        let buffered = |file| BufWriter::with_capacity(1 << 20, file);
        let (tokens, lengths, weights) =
            (buffered(tokens), buffered(lengths), weights.map(buffered));
        Ok(Output { tokens, lengths, weights, names, marks: Marks::default(), saved_tokens: 0 })
    }

    /// Cuts all files, which must hold at least as much.
    fn truncate(&mut self, marks: Marks, dtype: TokenType) -> io::Result<()> {
        let files = [
            (&mut self.tokens, marks.tokens * dtype.bytes()),
            (&mut self.lengths, marks.lengths * 4),
        ];
        let weights = self.weights.iter_mut().map(|file| (file, weights_bytes(marks.tokens)));
        for (file, end) in files.into_iter().chain(weights) {
            file.flush()?;
            file.get_ref().set_len(end)?;
            file.seek(SeekFrom::Start(end))?;
        }
        self.marks = marks;
        Ok(())
    }

    /// Copies the output of that name, and the lengths of its sequences, to the beginning.
    fn append(&mut self, dtype: TokenType, with_index: bool) -> Result<Marks, TokenizeError> {
        let path = &self.names.output;
        let unreadable = || TokenizeError::io("read", path);
        let mut old = File::open(path).map_err(TokenizeError::io("open", path))?;
        let bytes = old.metadata().map_err(unreadable())?.len();
        let mut lengths = 0;
        if with_index {
            let existing = Existing::open(path)?;
            let found = existing.dtype()?;
            if found != dtype {
                return Err(TokenizeError::OtherType { path: path.clone(), found, dtype });
            }
            lengths = existing.import(bytes, &mut self.lengths)?;
        }
        if !bytes.is_multiple_of(dtype.bytes()) {
            let reason = format!("{bytes} bytes are no whole number of {dtype} ids");
            return Err(TokenizeError::Index { path: path.clone(), reason });
        }
        let (from, to) = (&mut old, self.tokens.get_mut());
        io::copy(from, to).map_err(TokenizeError::io("write", &self.names.tokens))?;
        let tokens = bytes / dtype.bytes();
        self.append_weights(tokens)?;
        self.marks = Marks { tokens, lengths, document_start: tokens };
        Ok(self.marks)
    }

    /// Copies the loss weights of the output of that name, which has so many tokens, to the
    /// beginning.
    fn append_weights(&mut self, tokens: u64) -> Result<(), TokenizeError> {
        let Names { output, weights: path, next_weights, .. } = &self.names;
        let refused = |reason: &str| {
            let reason = reason.to_owned();
            Err(TokenizeError::Index { path: output.clone(), reason })
        };
        let file = match (File::open(path), &mut self.weights) {
            (Err(error), None) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            (Err(error), Some(_)) if error.kind() == io::ErrorKind::NotFound => {
                return refused("it has no loss weights: leave --loss-weights out");
            }
            (Err(error), _) => return Err(TokenizeError::io("read", path)(error)),
            (Ok(_), None) => return refused("it has loss weights: add --loss-weights"),
            (Ok(file), Some(_)) => file,
        };
        let head = formats::npy_header(Dtype::F32, tokens);
        let mut found = vec![0; head.len()];
        let len = file.metadata().map_err(TokenizeError::io("read", path))?.len();
        let is_whole = len == weights_bytes(tokens) && (&file).read_exact(&mut found).is_ok();
        if !is_whole || found != head {
            let reason = format!("{} is not as dquant writes it", path.display());
            return refused(&reason);
        }
        if let Some(to) = &mut self.weights {
            // Behind the place for a header, as the old ones are behind theirs.
            io::copy(&mut &file, to.get_mut()).map_err(TokenizeError::io("write", next_weights))?;
        }
        Ok(())
    }

    /// Goes on where an earlier run was.
    fn resume(&mut self, marks: Marks, dtype: TokenType) -> Result<(), TokenizeError> {
        let path = &self.names.tokens;
        let found = |file: &BufWriter<File>| file.get_ref().metadata().map(|found| found.len());
        let have = found(&self.tokens).map_err(TokenizeError::io("read", path))?;
        let have_lengths = found(&self.lengths).map_err(TokenizeError::io("read", path))?;
        let have_weights = self.weights.as_ref().map(found).transpose();
        let have_weights = have_weights.map_err(TokenizeError::io("read", path))?;
        if have < marks.tokens * dtype.bytes()
            || have_lengths < marks.lengths * 4
            || have_weights.is_some_and(|have| have < weights_bytes(marks.tokens))
        {
            let reason = format!("{} holds less than was written", path.display());
            return Err(TokenizeError::Resume { reason });
        }
        let path = path.clone();
        self.saved_tokens = marks.tokens;
        self.truncate(marks, dtype).map_err(TokenizeError::io("write", &path))
    }

    fn document_tokens(&self) -> u64 {
        self.marks.tokens - self.marks.document_start
    }

    /// Puts what was written on the disk.
    fn sync(&mut self) -> io::Result<()> {
        for file in [&mut self.tokens, &mut self.lengths].into_iter().chain(&mut self.weights) {
            file.flush()?;
            file.get_ref().sync_data()?;
        }
        Ok(())
    }

    /// Writes the header of the loss weights, which are complete.
    fn finish_weights(&mut self) -> io::Result<()> {
        let Some(file) = &mut self.weights else { return Ok(()) };
        file.flush()?;
        file.get_ref().write_all_at(&formats::npy_header(Dtype::F32, self.marks.tokens), 0)
    }
}

/// Bytes of the loss weights of so many tokens, header and all.
fn weights_bytes(tokens: u64) -> u64 {
    formats::npy_header(Dtype::F32, tokens).len() as u64 + tokens * u64::from(Dtype::F32.bytes())
}

/// What is written beside the ids.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// The lengths of documents.
    pub(super) index: bool,
    /// The loss weight of each token.
    pub(super) weights: bool,
}

/// The outputs of a run.
#[derive(Debug)]
pub(super) struct Sink {
    /// The output, and that of held-out documents. The state of both lies beside the first.
    outputs: Vec<Output>,
    dtype: TokenType,
    kept: Kept,
    /// What splits documents into two outputs.
    rule: Option<Rule>,
    leftovers: Leftovers,
    encoded: Vec<u8>,
}

impl Sink {
    /// Locks the unfinished files of the outputs, of which there is at least one; what an earlier
    /// run left in them is still there.
    ///
    /// # Errors
    /// When the folder does not exist or cannot be written, or another run writes the same output.
    pub(super) fn open(
        all: Vec<Names>,
        dtype: TokenType,
        kept: Kept,
        rule: Option<Rule>,
        leftovers: Leftovers,
    ) -> Result<Sink, TokenizeError> {
        for names in &all {
            // Renaming over a device or a link would replace it: such an output is a mistake.
            if fs::symlink_metadata(&names.output).is_ok_and(|found| !found.is_file()) {
                return Err(TokenizeError::OutputNotAFile { path: names.output.clone() });
            }
        }
        // A signal that arrives here waits until the files that it must remove are known.
        let mut unfinished = leftovers.lock();
        let files = lock_all(&all)?;
        // Those of the first output go last: as long as its locked file exists, no other run
        // begins.
        unfinished.paths = all.iter().rev().flat_map(Names::hidden).collect();
        let outputs = all.into_iter().zip(files);
        let outputs = outputs.map(|(names, file)| Output::open(names, file, kept));
        let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        drop(unfinished);
        Ok(Sink { outputs, dtype, kept, rule, leftovers, encoded: Vec::new() })
    }

    fn first(&self) -> &Names {
        // There is at least one.
        &self.outputs[0].names
    }

    /// The output of a part; without a split, the one output.
    fn output(&mut self, part: Part) -> &mut Output {
        let last = self.outputs.len() - 1;
        &mut self.outputs[if part == Part::Validation { last } else { 0 }]
    }

    /// The state that an earlier run left.
    pub(super) fn state_path(&self) -> &Path {
        &self.first().state
    }

    /// Whether an earlier run left a state of any of the outputs.
    pub(super) fn has_state(&self) -> bool {
        self.outputs.iter().any(|output| output.names.state.exists())
    }

    /// Forgets what an earlier run left.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub(super) fn start_anew(&mut self) -> Result<(), TokenizeError> {
        for output in &mut self.outputs {
            let state = &output.names.state;
            remove_if_there(state).map_err(TokenizeError::io("write", state))?;
            let path = output.names.tokens.clone();
            let truncated = output.truncate(Marks::default(), self.dtype);
            truncated.map_err(TokenizeError::io("write", &path))?;
        }
        Ok(())
    }

    /// Copies the output of a part, and the lengths of its sequences, to the beginning.
    ///
    /// # Errors
    /// When the output cannot be read, is broken, or is of another type.
    pub(super) fn append(&mut self, part: Part) -> Result<Marks, TokenizeError> {
        let (dtype, with_index) = (self.dtype, self.kept.index);
        self.output(part).append(dtype, with_index)
    }

    /// Goes on where an earlier run was.
    ///
    /// # Errors
    /// When the files hold less than the state counts.
    pub(super) fn resume(&mut self, state: &State) -> Result<(), TokenizeError> {
        let mut outputs = self.outputs.iter_mut().zip(state.written());
        outputs.try_for_each(|(output, written)| output.resume(written.marks, self.dtype))
    }

    /// Appends tokens of the current document, which goes to this part, and their loss weights, if
    /// these are kept.
    ///
    /// # Errors
    /// Names the first id that does not fit; what came before it may have been written.
    pub(super) fn push(
        &mut self,
        part: Part,
        tokens: &[u32],
        weights: &[f32],
    ) -> Result<(), SinkError> {
        let mut encoded = std::mem::take(&mut self.encoded);
        encoded.clear();
        match self.dtype {
            TokenType::U32 => encoded.extend(tokens.iter().flat_map(|id| id.to_le_bytes())),
            TokenType::U16 => {
                for (index, &id) in tokens.iter().enumerate() {
                    let narrow =
                        u16::try_from(id).map_err(|_| SinkError::DoesNotFit { index, id })?;
                    encoded.extend(narrow.to_le_bytes());
                }
            }
        }
        let output = self.output(part);
        output.marks.tokens += tokens.len() as u64;
        let mut written = output.tokens.write_all(&encoded);
        if let Some(file) = &mut output.weights {
            encoded.clear();
            encoded.extend(weights.iter().flat_map(|weight| weight.to_le_bytes()));
            written = written.and_then(|()| file.write_all(&encoded));
        }
        self.encoded = encoded;
        written.map_err(SinkError::Io)
    }

    /// Tokens of the current document so far.
    pub(super) fn document_tokens(&mut self, part: Part) -> u64 {
        self.output(part).document_tokens()
    }

    /// Ends the current document, in one sequence, or in its turns.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub(super) fn end_document(
        &mut self,
        part: Part,
        turns: Option<&Turns>,
    ) -> Result<(), SinkError> {
        let with_index = self.kept.index;
        let output = self.output(part);
        if with_index {
            let lengths: Vec<u32> = match turns {
                Some(turns) => index::turns(&turns.lengths).collect(),
                None => index::lengths(output.document_tokens()).collect(),
            };
            for length in &lengths {
                output.lengths.write_all(&length.to_le_bytes()).map_err(SinkError::Io)?;
            }
            output.marks.lengths += lengths.len() as u64;
        }
        output.marks.document_start = output.marks.tokens;
        Ok(())
    }

    /// Removes what has been written of the current document. A state on the disk that counts some
    /// of it is replaced by this one first: a run that is killed afterwards would find less than
    /// the old one counts, or tokens of other documents in their place.
    ///
    /// # Errors
    /// When the disk is full or fails.
    pub(super) fn discard_document(
        &mut self,
        part: Part,
        state: &mut State,
    ) -> Result<(), SinkError> {
        let dtype = self.dtype;
        let output = self.output(part);
        if output.document_tokens() == 0 {
            return Ok(());
        }
        output.marks.tokens = output.marks.document_start;
        if output.marks.tokens < output.saved_tokens {
            let leftovers = self.leftovers.clone();
            let _no_removal_meanwhile = leftovers.lock();
            self.save_locked(state).map_err(SinkError::Io)?;
        }
        let output = self.output(part);
        output.truncate(output.marks, dtype).map_err(SinkError::Io)
    }

    /// Saves a state from which a killed run can go on.
    ///
    /// # Errors
    /// When the disk is full or fails; then the previous state is still there.
    pub(super) fn save(&mut self, state: &mut State) -> Result<(), TokenizeError> {
        let leftovers = self.leftovers.clone();
        let _no_removal_meanwhile = leftovers.lock();
        let saved = self.save_locked(state);
        saved.map_err(TokenizeError::io("write", &self.first().tokens))
    }

    fn save_locked(&mut self, state: &mut State) -> io::Result<()> {
        for (part, output) in [Part::Train, Part::Validation].into_iter().zip(&mut self.outputs) {
            output.sync()?;
            state.part(part).marks = output.marks;
        }
        state.save(self.state_path())?;
        for output in &mut self.outputs {
            output.saved_tokens = output.marks.tokens;
            sync_folder(&output.names.output)?;
        }
        Ok(())
    }

    /// From the first saved state on, keeps the files for a later run if this one fails.
    pub(super) fn keep(&mut self) {
        self.leftovers.lock().wanted = Some(self.first().state.clone());
    }

    /// Makes the outputs appear under their names, on the disk and not only in memory.
    ///
    /// # Errors
    /// When the disk is full or fails; then there is no output.
    pub(super) fn commit(mut self, state: &mut State) -> Result<(), TokenizeError> {
        let leftovers = self.leftovers.clone();
        let mut unfinished = leftovers.lock();
        let prepared = self.prepare(state);
        prepared.map_err(TokenizeError::io("write", &self.first().tokens))?;
        self.finish(state)?;
        unfinished.paths.clear();
        Ok(())
    }

    /// Puts everything on the disk, and then a state that says so.
    fn prepare(&mut self, state: &mut State) -> io::Result<()> {
        for output in &mut self.outputs {
            output.lengths.flush()?;
            output.finish_weights()?;
            if self.kept.index {
                index::write(&output.names.lengths, &output.names.next_index, self.dtype)?;
            }
        }
        state.complete = true;
        self.save_locked(state)
    }

    /// Gives complete files their names and describes them. It may be repeated after a kill between
    /// two steps.
    ///
    /// # Errors
    /// When neither the unfinished files nor the output are as long as the state says.
    pub(super) fn finish(&self, state: &State) -> Result<(), TokenizeError> {
        let mut unnamed = Vec::new();
        let mut complete = Vec::new();
        for (Output { names, .. }, written) in self.outputs.iter().zip(state.written()) {
            let steps = names.steps(written.marks.tokens, self.dtype, self.kept)?;
            unnamed.extend(steps.map(|weights_are_unnamed| (names, weights_are_unnamed)));
            complete.push((names.output.as_path(), written));
        }
        // All old outputs go first: nobody finds an old part and a new one.
        for (names, weights_are_unnamed) in &unnamed {
            let removed = remove_old(names, self.kept, *weights_are_unnamed);
            removed.map_err(TokenizeError::io("rename", &names.output))?;
        }
        for (names, weights_are_unnamed) in &unnamed {
            let renamed = self.rename(names, *weights_are_unnamed);
            renamed.map_err(TokenizeError::io("rename", &names.output))?;
        }
        manifest::write(&complete, self.dtype, self.rule)?;
        for Output { names, .. } in self.outputs.iter().filter(|_| self.kept.weights) {
            Weights::read(&names.weights)?.write_manifest()?;
        }
        for Output { names, .. } in self.outputs.iter().rev() {
            remove(&names.hidden());
            let output = &names.output;
            sync_folder(output).map_err(TokenizeError::io("write", output))?;
        }
        Ok(())
    }

    fn rename(&self, names: &Names, weights_are_unnamed: bool) -> io::Result<()> {
        let Names { output, index, tokens, lengths, next_index, weights, next_weights, .. } = names;
        if !self.kept.index {
            remove_if_there(index)?;
        } else if next_index.exists() {
            fs::rename(next_index, index)?;
        }
        if weights_are_unnamed {
            fs::rename(next_weights, weights)?;
        }
        // As the system makes files in this folder.
        let usual = fs::metadata(lengths)?.permissions();
        fs::set_permissions(tokens, usual)?;
        fs::rename(tokens, output)?;
        sync_folder(output)
    }
}

fn remove_old(names: &Names, kept: Kept, weights_are_unnamed: bool) -> io::Result<()> {
    remove_if_there(&names.output)?;
    remove_if_there(&names.manifest)?;
    // Those that an interrupted run has named already are not old.
    if !kept.weights || weights_are_unnamed {
        remove_if_there(&names.weights)?;
        remove_if_there(&formats::manifest::path_of(&names.weights))?;
    }
    Ok(())
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.leftovers.lock().remove();
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn open(path: &Path, mode: u32) -> io::Result<File> {
    // A link of that name would be written through, and get the name of the output.
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        let why = format!("{} is a link, or no file: remove it", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(mode).open(path)
}

/// Modes of files that only this user can open, and of others, which the umask narrows.
const PRIVATE: u32 = 0o600;
const USUAL: u32 = 0o666;

/// Opens and locks the files of ids of all outputs.
fn lock_all(all: &[Names]) -> Result<Vec<File>, TokenizeError> {
    let mut files: Vec<File> = Vec::new();
    for names in all {
        match lock(names) {
            Ok(file) => files.push(file),
            Err(error) => {
                for (file, Names { tokens, .. }) in files.iter().zip(all) {
                    // What an earlier run left is kept.
                    if file.metadata().is_ok_and(|found| found.len() == 0) {
                        remove(std::slice::from_ref(tokens));
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(files)
}

/// Opens and locks the file of ids.
fn lock(names: &Names) -> Result<File, TokenizeError> {
    let failed = || TokenizeError::io("create", &names.tokens);
    loop {
        let file = open(&names.tokens, PRIVATE).map_err(failed())?;
        // An earlier run may have left it open to others.
        let _ = file.set_permissions(Permissions::from_mode(PRIVATE));
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(TokenizeError::Busy { path: names.output.clone() });
            }
            Err(TryLockError::Error(error)) => return Err(failed()(error)),
        }
        // The run that held the lock may have renamed or removed the file meanwhile.
        let locked = file.metadata().map_err(failed())?;
        if fs::metadata(&names.tokens).is_ok_and(|found| found.ino() == locked.ino()) {
            return Ok(file);
        }
    }
}

/// A rename survives a power cut only once the folder is on the disk too.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::checkpoint::Written;
    use super::super::described::Described;
    use super::*;

    const INDEX: Kept = Kept { index: true, weights: false };

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("dquant-sink-{name}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn sink(&self, dtype: TokenType) -> Result<Sink, TokenizeError> {
            let names = vec![Names::new(&self.path("a.bin"))?];
            let mut sink = Sink::open(names, dtype, INDEX, None, Leftovers::default())?;
            sink.start_anew()?;
            Ok(sink)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn state() -> State {
        let described = Described::new(String::from("test"), None, false);
        State::new(BTreeMap::new(), Written::new(Marks::default(), described), None)
    }

    #[test]
    fn an_output_replaces_nothing_but_a_file() {
        let folder = Folder::new("link");
        let link = folder.path("link.bin");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        for path in [Path::new("/dev/null"), &link, Path::new("/tmp")] {
            let names = vec![Names::new(path).unwrap()];
            let refused = Sink::open(names, TokenType::U32, INDEX, None, Leftovers::default());
            assert!(matches!(refused, Err(TokenizeError::OutputNotAFile { .. })), "{path:?}");
        }
        assert_eq!(folder.names(), ["link.bin"]);
    }

    #[test]
    fn an_output_appears_only_when_committed() {
        let folder = Folder::new("commit");
        let mut sink = folder.sink(TokenType::U32).unwrap();
        sink.push(Part::Train, &[1, 0x0102_0304], &[]).unwrap();
        sink.end_document(Part::Train, None).unwrap();
        assert!(!folder.path("a.bin").exists());
        assert!(matches!(folder.sink(TokenType::U32), Err(TokenizeError::Busy { .. })));
        sink.commit(&mut state()).unwrap();
        assert_eq!(fs::read(folder.path("a.bin")).unwrap(), [1, 0, 0, 0, 4, 3, 2, 1]);
        drop(folder.sink(TokenType::U16).unwrap());
        assert_eq!(folder.names(), ["a.bin", "a.bin.dquant.json", "a.idx"]);
        assert_eq!(fs::read(folder.path("a.bin")).unwrap().len(), 8);
    }

    /// Who could open the file of ids could keep a run from beginning.
    #[test]
    fn other_users_cannot_lock_what_is_being_written() {
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let folder = Folder::new("lock");
        let part = folder.path(".a.bin.part");
        fs::write(&part, "").unwrap();
        fs::set_permissions(&part, Permissions::from_mode(0o644)).unwrap();
        let mut sink = folder.sink(TokenType::U32).unwrap();
        assert_eq!(mode(&part), PRIVATE);
        sink.push(Part::Train, &[1], &[]).unwrap();
        sink.end_document(Part::Train, None).unwrap();
        sink.commit(&mut state()).unwrap();
        // The output is for whoever may read others of this user.
        fs::write(folder.path("other"), "").unwrap();
        assert_eq!(mode(&folder.path("a.bin")), mode(&folder.path("other")));
    }

    #[test]
    fn an_id_beyond_16_bits_is_named_and_not_wrapped() {
        let folder = Folder::new("narrow");
        let mut sink = folder.sink(TokenType::U16).unwrap();
        sink.push(Part::Train, &[0, 65_535], &[]).unwrap();
        let error = sink.push(Part::Train, &[7, 65_536], &[]).unwrap_err();
        assert!(matches!(error, SinkError::DoesNotFit { index: 1, id: 65_536 }));
    }

    #[test]
    fn a_discarded_document_leaves_nothing() {
        let folder = Folder::new("discard");
        let mut sink = folder.sink(TokenType::U16).unwrap();
        // More than the buffer of the file.
        let large = vec![3; 2_000_000];
        for (ids, discarded) in [(&[1, 2][..], false), (&large, true), (&[4], false)] {
            sink.push(Part::Train, ids, &[]).unwrap();
            let state = &mut state();
            if discarded {
                sink.discard_document(Part::Train, state)
            } else {
                sink.end_document(Part::Train, None)
            }
            .unwrap();
        }
        sink.commit(&mut state()).unwrap();
        assert_eq!(fs::read(folder.path("a.bin")).unwrap(), [1, 0, 2, 0, 4, 0]);
    }

    /// A broken document may be larger than what is written between two states.
    #[test]
    fn a_state_never_counts_tokens_that_were_discarded() {
        for killed_after in [0, 2, 9] {
            let folder = Folder::new(&format!("discard-saved-{killed_after}"));
            let mut sink = folder.sink(TokenType::U16).unwrap();
            sink.keep();
            sink.push(Part::Train, &[1, 2], &[]).unwrap();
            sink.end_document(Part::Train, None).unwrap();
            sink.push(Part::Train, &[3, 3, 3], &[]).unwrap();
            sink.save(&mut state()).unwrap();
            sink.push(Part::Train, &[3], &[]).unwrap();
            sink.discard_document(Part::Train, &mut state()).unwrap();
            sink.push(Part::Train, &vec![4; killed_after], &[]).unwrap();
            // What a kill leaves is in the file, not in the buffer.
            sink.outputs[0].tokens.flush().unwrap();
            drop(sink);
            let names = Names::new(&folder.path("a.bin")).unwrap();
            let mut state = State::load(&names.state, &BTreeMap::new()).unwrap().unwrap();
            let mut sink =
                Sink::open(vec![names], TokenType::U16, INDEX, None, Leftovers::default()).unwrap();
            sink.keep();
            sink.resume(&state).unwrap();
            sink.push(Part::Train, &[5], &[]).unwrap();
            sink.end_document(Part::Train, None).unwrap();
            sink.commit(&mut state).unwrap();
            assert_eq!(fs::read(folder.path("a.bin")).unwrap(), [1, 0, 2, 0, 5, 0]);
        }
    }

    /// An old pair is replaced; a kill between any two steps leaves no pair, an index alone, or the
    /// new pair, and a run that resumes finishes the work.
    #[test]
    fn a_killed_commit_is_finished() {
        for steps_done in 0..=4 {
            let folder = Folder::new(&format!("killed-{steps_done}"));
            fs::write(folder.path("a.bin"), "old").unwrap();
            fs::write(folder.path("a.idx"), "old index").unwrap();
            let mut sink = folder.sink(TokenType::U32).unwrap();
            sink.keep();
            sink.push(Part::Train, &[5, 6, 7], &[]).unwrap();
            sink.end_document(Part::Train, None).unwrap();
            sink.prepare(&mut state()).unwrap();
            drop(sink);
            let index = fs::read(folder.path(".a.bin.index")).unwrap();
            let steps: [&dyn Fn() -> io::Result<()>; 4] = [
                &|| fs::remove_file(folder.path("a.bin")),
                &|| fs::rename(folder.path(".a.bin.index"), folder.path("a.idx")),
                &|| fs::rename(folder.path(".a.bin.part"), folder.path("a.bin")),
                &|| fs::remove_file(folder.path(".a.bin.lengths")),
            ];
            for step in &steps[..steps_done] {
                step().unwrap();
            }
            let names = Names::new(&folder.path("a.bin")).unwrap();
            let state = State::load(&names.state, &BTreeMap::new()).unwrap().unwrap();
            assert!(state.complete);
            let mut sink =
                Sink::open(vec![names], TokenType::U32, INDEX, None, Leftovers::default()).unwrap();
            sink.keep();
            sink.finish(&state).unwrap();
            assert_eq!(
                folder.names(),
                ["a.bin", "a.bin.dquant.json", "a.idx"],
                "after {steps_done} steps"
            );
            assert_eq!(fs::read(folder.path("a.bin")).unwrap().len(), 12);
            assert_eq!(fs::read(folder.path("a.idx")).unwrap(), index);
        }
    }

    /// Of two outputs, a kill between any two steps leaves no old part beside a new one, and a run
    /// that resumes finishes both.
    #[test]
    fn a_killed_commit_of_two_parts_is_finished() {
        let rule = Some(Rule { share: "1%".parse().unwrap(), seed: 7 });
        for weights in [false, true] {
            for steps_done in 0..=13 {
                killed_after(steps_done, Kept { index: true, weights }, rule);
            }
        }
    }

    /// What the last steps of a run do to two outputs, in their order.
    fn steps(weights: bool) -> Vec<(&'static str, Option<&'static str>)> {
        let with_weights = [
            ("a.loss_weights.npy", None),
            ("v.loss_weights.npy", None),
            (".a.bin.weights", Some("a.loss_weights.npy")),
            (".v.bin.weights", Some("v.loss_weights.npy")),
        ];
        let [old_a, old_v, a, v] = with_weights.map(|step| Some(step).filter(|_| weights));
        let all = [
            Some(("a.bin", None)),
            old_a,
            Some(("v.bin", None)),
            old_v,
            Some((".a.bin.index", Some("a.idx"))),
            a,
            Some((".a.bin.part", Some("a.bin"))),
            Some((".v.bin.index", Some("v.idx"))),
            v,
            Some((".v.bin.part", Some("v.bin"))),
            Some((".v.bin.lengths", None)),
            Some((".a.bin.lengths", None)),
        ];
        all.into_iter().flatten().collect()
    }

    fn killed_after(steps_done: usize, kept: Kept, rule: Option<Rule>) {
        let both = ["a", "v"];
        let folder = Folder::new(&format!("killed-parts-{}-{steps_done}", kept.weights));
        let open = || {
            let names = both.map(|name| Names::new(&folder.path(&format!("{name}.bin"))));
            let names = names.into_iter().map(Result::unwrap).collect();
            let mut sink =
                Sink::open(names, TokenType::U32, kept, rule, Leftovers::default()).unwrap();
            sink.keep();
            sink
        };
        let ends = [".bin", ".idx", ".loss_weights.npy"];
        for end in &ends[..2 + usize::from(kept.weights)] {
            for name in both {
                fs::write(folder.path(&format!("{name}{end}")), "old").unwrap();
            }
        }
        let mut sink = open();
        sink.start_anew().unwrap();
        for (part, ids) in [(Part::Train, &[5, 6, 7][..]), (Part::Validation, &[8])] {
            let weights: Vec<f32> = ids.iter().map(|id| *id as f32 / 2.0).collect();
            sink.push(part, ids, &weights).unwrap();
            sink.end_document(part, None).unwrap();
        }
        let mut written = state();
        written.validation = Some(written.train.clone());
        sink.prepare(&mut written).unwrap();
        drop(sink);
        for (from, to) in steps(kept.weights).into_iter().take(steps_done) {
            let from = folder.path(from);
            match to {
                Some(to) => fs::rename(from, folder.path(to)).unwrap(),
                None => fs::remove_file(from).unwrap(),
            }
        }
        if steps_done > 9 {
            fs::write(folder.path("a.bin.dquant.json"), "half of it").unwrap();
        }
        let sink = open();
        let state = State::load(sink.state_path(), &BTreeMap::new()).unwrap().unwrap();
        assert!(state.complete);
        sink.finish(&state).unwrap();
        drop(sink);
        let mut ends = vec![".bin", ".bin.dquant.json", ".idx"];
        if kept.weights {
            ends.extend([".loss_weights.npy", ".loss_weights.npy.dquant.json"]);
        }
        let files: Vec<String> = both
            .iter()
            .flat_map(|name| ends.iter().map(move |end| format!("{name}{end}")))
            .collect();
        assert_eq!(folder.names(), files, "after {steps_done} steps");
        let ids = both.map(|name| fs::read(folder.path(&format!("{name}.bin"))).unwrap());
        assert_eq!(ids.map(|ids| ids.len()), [12, 4]);
        let split = |name: &str| {
            formats::Manifest::load(&folder.path(name)).unwrap().unwrap().split.unwrap().other
        };
        assert_eq!([split("a.bin"), split("v.bin")], ["v.bin", "a.bin"]);
        let of =
            |name: &str| Weights::beside(&folder.path(name)).unwrap().map(|of| (of.min, of.max));
        let found = kept.weights.then_some([(2.5, 3.5), (4.0, 4.0)]);
        assert_eq!([of("a.bin"), of("v.bin")], found.map_or([None; 2], |found| found.map(Some)));
    }

    /// A second output that another run writes leaves nothing of the first.
    #[test]
    fn a_busy_part_leaves_no_file_of_the_other() {
        let folder = Folder::new("busy-part");
        let names = |name: &str| Names::new(&folder.path(name)).unwrap();
        let open = |names| Sink::open(names, TokenType::U32, INDEX, None, Leftovers::default());
        let busy = open(vec![names("v.bin")]).unwrap();
        let refused = open(vec![names("a.bin"), names("v.bin")]);
        assert!(matches!(refused, Err(TokenizeError::Busy { path }) if path.ends_with("v.bin")));
        assert!(folder.names().iter().all(|name| name.starts_with(".v.")), "{:?}", folder.names());
        drop(busy);
        assert_eq!(folder.names(), [""; 0]);
    }
}
