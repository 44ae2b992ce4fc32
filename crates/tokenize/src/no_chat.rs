//! Conversations, in a build that cannot read a `tokenizer.json`: there are none.

use std::path::Path;

use super::TokenizeError;

/// As much as a thread has anyway.
pub(super) const STACK_BYTES: usize = 2 << 20;

/// Stands for what this build does not have.
pub(super) enum Chat {}

impl Chat {
    pub(super) fn load(
        tokenizer: &Path,
        _: Option<&Path>,
        _: Option<&str>,
        _: u64,
    ) -> Result<Chat, TokenizeError> {
        Err(TokenizeError::NotBuilt { path: tokenizer.to_owned(), feature: "hugging-face" })
    }

    pub(super) fn with_weights(self, _: bool) -> Chat {
        self
    }

    pub(super) fn identity(&self) -> &str {
        match *self {}
    }

    pub(super) fn uses_time(&self) -> bool {
        match *self {}
    }

    pub(super) fn deciding(&self, _: &str) -> Result<String, String> {
        match *self {}
    }
}
