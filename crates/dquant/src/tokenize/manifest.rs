//! The manifest of an output: its type, vocabulary, documents and checksums.
//!
//! What is said about an output that is extended must hold for both parts. A manifest that names another vocabulary or
//! another end of documents refuses the extension; what the old part does not say, the new manifest does not say either.

use std::path::Path;

use formats::manifest::{Contents, path_of};
use formats::{Manifest, ReadOptions};
use serde::{Deserialize, Serialize};

use super::checkpoint::State;
use super::index::Existing;
use super::sink::TokenType;
use super::{TokenizeError, index};

/// What a manifest says about the vocabulary, and about the part of the output that was there before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Described {
    pub(super) tokenizer: Option<String>,
    /// The id that ends every document and occurs nowhere else.
    pub(super) eos: Option<u32>,
    /// Documents before.
    documents: Option<u64>,
    /// The largest id before.
    max_id: Option<u32>,
}

impl Described {
    /// A new output.
    pub(super) fn new(tokenizer: String, eos: Option<u32>) -> Described {
        Described { tokenizer: Some(tokenizer), eos, documents: Some(0), max_id: Some(0) }
    }

    /// An output that extends `output`, whose ids were checked to be of the same type.
    ///
    /// # Errors
    /// When the manifest of `output` is broken, or names another vocabulary or another end of documents.
    pub(super) fn extends(
        self,
        output: &Path,
        with_index: bool,
    ) -> Result<Described, TokenizeError> {
        let counted = match with_index {
            true => Some(Existing::open(output)?.documents()),
            false => None,
        };
        let Some(old) = Manifest::load(output)? else {
            return Ok(Described { tokenizer: None, eos: None, documents: counted, max_id: None });
        };
        let refused = |reason: String| TokenizeError::Index { path: path_of(output), reason };
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

    /// Writes the manifest of a complete output.
    ///
    /// # Errors
    /// When the output cannot be read or its folder cannot be written.
    pub(super) fn write(
        output: &Path,
        dtype: TokenType,
        state: &State,
    ) -> Result<(), TokenizeError> {
        let Described { tokenizer, eos, documents, max_id } = &state.described;
        let totals = &state.totals;
        let contents = Contents {
            tokens: state.marks.tokens,
            min_id: None,
            max_id: max_id.map(|before| before.max(totals.max_id).into()),
            tokenizer: tokenizer.clone(),
            documents: documents.map(|before| before + totals.documents),
            eos: eos.map(u64::from),
        };
        let flat = dtype.in_file();
        let is_pair = index::path_of(output).exists();
        let options = ReadOptions {
            dtype: (!is_pair).then_some(flat),
            trusted: !is_pair,
            ignore_manifest: true,
            ..ReadOptions::default()
        };
        let source = formats::open(output, &options)?;
        let layout = source.layout();
        let described = (layout.kind.name(), layout.dtype);
        let manifest =
            Manifest::create(described, contents, &layout.folder, &layout.files, &|_| ())?;
        manifest.store(output)?;
        Ok(())
    }
}
