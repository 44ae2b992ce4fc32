//! Vocabularies of Hugging Face: a `tokenizer.json` and the crate that wrote the format.
//!
//! The file may ask for truncation and padding, which would change what a document says; both are
//! switched off.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;
use twox_hash::XxHash3_128;

use super::TokenizeError;
use super::guard::guarded;

/// Ids, and the first character and the one behind the last of each.
pub(super) type Encoded = (Vec<u32>, Vec<(usize, usize)>);

/// A loaded `tokenizer.json`.
pub struct HuggingFace {
    tokenizer: Tokenizer,
    path: PathBuf,
    identity: String,
    ids: u32,
}

impl HuggingFace {
    /// Reads the file.
    ///
    /// # Errors
    /// When it cannot be read or is no tokenizer.
    pub fn read(path: &Path) -> Result<HuggingFace, TokenizeError> {
        let broken = |reason: String| TokenizeError::Tokenizer { path: path.to_owned(), reason };
        let bytes = fs::read(path).map_err(TokenizeError::io("open", path))?;
        let parsed = guarded(|| Tokenizer::from_bytes(&bytes)).map_err(broken)?;
        let mut tokenizer = parsed.map_err(|error| broken(error.to_string()))?;
        tokenizer.with_truncation(None).map_err(|e| broken(e.to_string()))?;
        tokenizer.with_padding(None);
        tokenizer.set_encode_special_tokens(true);
        let largest = tokenizer.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| broken(String::from("the vocabulary is empty")))?;
        if largest > i32::MAX as u32 {
            return Err(broken(format!("it has id {largest}, and 31 bits are stored")));
        }
        let name = path.file_name().unwrap_or_default().display();
        let identity = format!("{name} (xxh3 {:032x})", XxHash3_128::oneshot(&bytes));
        let ids = largest + 1;
        Ok(HuggingFace { tokenizer, path: path.to_owned(), identity, ids })
    }

    /// Appends the ids of `text`.
    ///
    /// # Errors
    /// With the library's reason.
    pub fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), String> {
        let encoded = guarded(|| self.tokenizer.encode_fast(text, false))?;
        tokens.extend_from_slice(encoded.map_err(|error| error.to_string())?.get_ids());
        Ok(())
    }

    /// From now on, text that spells a special token is that token.
    pub fn parse_special_tokens(&mut self) {
        self.tokenizer.set_encode_special_tokens(false);
    }

    /// The ids of `text`, and the characters of each: from the first to behind the last.
    ///
    /// # Errors
    /// With the library's reason.
    pub(super) fn encode_with_offsets(&self, text: &str) -> Result<Encoded, String> {
        let encoded = guarded(|| self.tokenizer.encode_char_offsets(text, false))?;
        let encoded = encoded.map_err(|error| error.to_string())?;
        Ok((encoded.get_ids().to_vec(), encoded.get_offsets().to_vec()))
    }

    /// Whether no text has this id.
    pub fn is_special(&self, id: u32) -> bool {
        self.tokenizer.get_added_tokens_decoder().get(&id).is_some_and(|token| token.special)
    }

    /// The id of a token.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// The token that ends a document, which is not in the file itself but in
    /// `tokenizer_config.json` beside it.
    pub fn default_eos(&self) -> Option<String> {
        let config = fs::read(self.path.with_file_name("tokenizer_config.json")).ok()?;
        let config: Value = serde_json::from_slice(&config).ok()?;
        let eos = config.get("eos_token")?;
        eos.as_str().or_else(|| eos.get("content")?.as_str()).map(str::to_owned)
    }

    /// One more than the largest id.
    pub fn ids(&self) -> u32 {
        self.ids
    }

    /// The name and the hash of the file.
    pub fn identity(&self) -> &str {
        &self.identity
    }
}
