//! What the manifest of an output will say about its vocabulary, and about what was there before.
//!
//! What is said about an output that is extended must hold for both parts. A manifest that names
//! another vocabulary or another end of documents refuses the extension; what the old part does not
//! say, the new manifest does not say either.
//!
//! It is settled when a run begins, and kept in the state of an interrupted one. What the run adds
//! does not belong here.

use std::path::Path;

use formats::Manifest;
use formats::manifest::path_of;
use serde::{Deserialize, Serialize};

use super::TokenizeError;
use super::index::Existing;

/// What a manifest says about the vocabulary, and about the part of the output that was there
/// before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Described {
    pub(super) tokenizer: Option<String>,
    /// The id that ends every document and occurs nowhere else.
    pub(super) eos: Option<u32>,
    /// Documents before.
    pub(super) documents: Option<u64>,
    /// The largest id before.
    pub(super) max_id: Option<u32>,
    /// Whether documents are conversations, in turns.
    #[serde(default)]
    pub(super) targets: bool,
}

impl Described {
    /// A new output.
    pub(super) fn new(tokenizer: String, eos: Option<u32>, targets: bool) -> Described {
        Described { tokenizer: Some(tokenizer), eos, documents: Some(0), max_id: Some(0), targets }
    }

    /// An output that extends `output`, whose ids were checked to be of the same type.
    ///
    /// # Errors
    /// When the manifest of `output` is broken, or names another vocabulary or another end of
    /// documents.
    pub(super) fn extends(
        self,
        output: &Path,
        with_index: bool,
    ) -> Result<Described, TokenizeError> {
        let counted = match with_index {
            true => Some(Existing::open(output)?.documents()),
            false => None,
        };
        let refused = |reason: String| TokenizeError::Index { path: path_of(output), reason };
        let old = Manifest::load(output)?;
        match (old.as_ref().is_some_and(|old| old.targets), self.targets) {
            (true, false) => {
                return Err(refused(String::from("it holds conversations, made with --chat")));
            }
            (false, true) => {
                let reason = "it does not say that it holds conversations, made with --chat";
                return Err(refused(String::from(reason)));
            }
            _ => {}
        }
        let Some(old) = old else {
            let (tokenizer, eos, max_id) = (None, None, None);
            return Ok(Described { tokenizer, eos, documents: counted, max_id, targets: false });
        };
        if let Some(tokenizer) = old.tokenizer.filter(|old| Some(old) != self.tokenizer.as_ref()) {
            return Err(refused(format!("the ids are those of {tokenizer}")));
        }
        let ends = |id: Option<u64>| {
            id.map_or(String::from("no id of their own"), |id| format!("id {id}"))
        };
        let eos = self.eos.map(u64::from);
        if old.eos != eos {
            let (old, new) = (ends(old.eos), ends(eos));
            return Err(refused(format!("documents end with {old} there, and with {new} now")));
        }
        let max_id = old.max_id.and_then(|max| u32::try_from(max).ok());
        Ok(Described { documents: counted.or(old.documents), max_id, ..self })
    }

    /// Whether an output begins without documents.
    pub(super) fn starts_empty(&self) -> bool {
        self.documents == Some(0)
    }
}
