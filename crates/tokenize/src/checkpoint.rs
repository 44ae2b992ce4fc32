//! What a run needs to go on after it was killed.
//!
//! The state is written after the tokens that it counts are on the disk, under another name and
//! then renamed, so that there is always either the previous state or the next one, and the files
//! hold at least what it counts.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use formats::manifest::Part;
use serde::{Deserialize, Serialize};

use super::described::Described;
use super::{TokenizeError, Totals};

/// Version of the file.
const VERSION: u32 = 1;

/// The entry of the identity that tells which output is extended.
pub(super) const EXTENDED: &str = "extended output";

/// The entry that tells which documents are held out, and where they go. States of earlier versions
/// have none.
pub(super) const HELD_OUT: &str = "held-out share";

/// The entry that tells how conversations are rendered. States of earlier versions have none.
pub(super) const CONVERSATIONS: &str = "chat template";

/// The entry that tells whether loss weights are written. States of earlier versions have none.
pub(super) const WEIGHTS: &str = "loss weights";

/// The entry with the time that a template may write, in seconds since 1970.
pub(super) const TIME: &str = "time of the template";

/// The value of an entry for nothing.
pub(super) const NOTHING: &str = "nothing";

/// A place in the inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Position {
    /// Which source, counted from 0.
    pub(super) source: usize,
    /// Documents of the source before this place.
    pub(super) record: u64,
    /// Bytes of the source before this place, decompressed; 0 in Parquet.
    pub(super) bytes: u64,
    /// CRC-32C of those bytes.
    pub(super) crc: u32,
    /// The part of the document at this place, where the place is inside one.
    #[serde(default)]
    pub(super) part: Part,
}

/// How much of the unfinished output counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Marks {
    /// Tokens.
    pub(super) tokens: u64,
    /// Lengths of sequences.
    pub(super) lengths: u64,
    /// Where the last document that ended ends, in tokens.
    pub(super) document_start: u64,
}

/// What a run has written to one output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) marks: Marks,
    pub(super) totals: Totals,
    /// What the manifest will say.
    pub(super) described: Described,
}

impl Written {
    /// Nothing yet: `marks` are those of an output that is extended.
    pub(super) fn new(marks: Marks, described: Described) -> Written {
        Written { marks, totals: Totals::default(), described }
    }

    /// Tokens that were in the output before.
    pub(super) fn tokens_before(&self) -> u64 {
        self.marks.tokens - self.totals.tokens
    }

    /// Whether no document is known to be in the output.
    pub(super) fn is_empty(&self) -> bool {
        self.totals.documents == 0 && self.described.starts_empty()
    }
}

/// Everything a run knows between two batches.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    /// What must be equal for the same bytes to come out.
    pub(super) identity: BTreeMap<String, String>,
    /// Whether all tokens are written and only names are missing.
    pub(super) complete: bool,
    pub(super) position: Position,
    /// The output, or that of the training documents. Counts documents that are left out, too.
    #[serde(flatten)]
    pub(super) train: Written,
    /// The output of held-out documents.
    #[serde(default)]
    pub(super) validation: Option<Written>,
    /// The part of the totals that belongs to a document that has not ended.
    pub(super) document: Totals,
}

impl State {
    /// The state at the beginning of a run.
    pub(super) fn new(
        identity: BTreeMap<String, String>,
        train: Written,
        validation: Option<Written>,
    ) -> State {
        State {
            version: VERSION,
            identity,
            complete: false,
            position: Position::default(),
            train,
            validation,
            document: Totals::default(),
        }
    }

    /// What was written of one part; without a split, of all documents.
    pub(super) fn part(&mut self, part: Part) -> &mut Written {
        match (part, &mut self.validation) {
            (Part::Validation, Some(validation)) => validation,
            _ => &mut self.train,
        }
    }

    /// What was written to each output.
    pub(super) fn written(&self) -> impl Iterator<Item = &Written> {
        [&self.train].into_iter().chain(&self.validation)
    }

    /// The totals of all outputs.
    pub(super) fn totals(&self) -> Totals {
        let held_out = self.validation.as_ref().map(|written| &written.totals);
        held_out.map_or_else(|| self.train.totals.clone(), |totals| self.train.totals.plus(totals))
    }

    /// Reads a state; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or belongs to a run with another `identity`.
    pub(super) fn load(
        path: &Path,
        identity: &BTreeMap<String, String>,
    ) -> Result<Option<State>, TokenizeError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(TokenizeError::io("read", path)(error)),
        };
        let refused = |reason: String| TokenizeError::Resume { reason };
        let damaged = |error| refused(format!("{} is damaged: {error}", path.display()));
        let state: State = serde_json::from_slice(&bytes).map_err(damaged)?;
        if state.version != VERSION {
            return Err(refused(String::from("it was made by another version")));
        }
        // Once everything is written, the output may have been replaced already.
        let compared =
            identity.iter().filter(|(name, _)| !(state.complete && name.as_str() == EXTENDED));
        for (name, now) in compared {
            let is_new = [HELD_OUT, CONVERSATIONS, WEIGHTS].contains(&name.as_str());
            let unnamed = if is_new { NOTHING } else { "unknown" };
            let then = state.identity.get(name).map_or(unnamed, String::as_str);
            if then != now {
                return Err(refused(format!("its {name} was {then}, and is {now} now")));
            }
        }
        Ok(Some(state))
    }

    /// An entry of the identity in the state of an interrupted run, if there is one.
    pub(super) fn entry_in(path: &Path, name: &str) -> Option<String> {
        let state: State = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        state.identity.get(name).cloned()
    }

    /// Whether the state of an interrupted run says that only names are missing.
    pub(super) fn is_complete_in(path: &Path) -> bool {
        let state =
            fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<State>(&bytes).ok());
        state.is_some_and(|state| state.complete)
    }

    /// Makes this the state that the next run finds.
    ///
    /// # Errors
    /// When the disk is full or fails; then the previous state is still there.
    pub(super) fn save(&self, path: &Path) -> io::Result<()> {
        let next = next_path(path);
        let mut file = File::create(&next)?;
        serde_json::to_writer(&mut file, self)?;
        file.flush()?;
        file.sync_all()?;
        fs::rename(&next, path)
    }
}

/// The name of a state until it is on the disk.
pub(super) fn next_path(path: &Path) -> PathBuf {
    path.with_extension("state-next")
}
