//! What turns text into ids: one of the built-in encodings, or a Hugging Face `tokenizer.json`.
//!
//! Both treat text that spells a special token as plain text, and neither adds tokens of its own:
//! the only id beyond those of the text is the one that ends a document.

use std::fmt;
use std::path::{Path, PathBuf};

use super::chat::Chat;
use super::encoding::BytePairs;
#[cfg(feature = "hugging-face")]
use super::hugging_face::HuggingFace;
use super::turns::Turns;
use super::{Encoding, TokenizeError};

/// The vocabulary a user wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VocabularyName {
    /// One of tiktoken's.
    Encoding(Encoding),
    /// A `tokenizer.json`.
    File(PathBuf),
}

impl fmt::Display for VocabularyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VocabularyName::Encoding(encoding) => encoding.fmt(f),
            VocabularyName::File(path) => path.display().fmt(f),
        }
    }
}

/// What ends a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Eos {
    /// The token the vocabulary has for this purpose.
    #[default]
    Default,
    /// Nothing.
    None,
    /// The token with this id.
    Id(u32),
    /// The token of this spelling.
    Token(String),
}

impl From<&str> for Eos {
    /// `none`, a number, or else the spelling of a token.
    fn from(text: &str) -> Eos {
        match (text, text.parse()) {
            ("none", _) => Eos::None,
            (_, Ok(id)) => Eos::Id(id),
            _ => Eos::Token(text.to_owned()),
        }
    }
}

/// A loaded vocabulary; threads share it.
pub enum Vocabulary {
    /// One of tiktoken's.
    BytePairs(Encoding, BytePairs),
    /// Read from a `tokenizer.json`.
    #[cfg(feature = "hugging-face")]
    HuggingFace(Box<HuggingFace>),
}

impl Vocabulary {
    /// Loads a vocabulary; a fraction of a second.
    ///
    /// # Errors
    /// When its file cannot be read or is broken, or this build cannot read such files.
    pub fn load(name: &VocabularyName) -> Result<Vocabulary, TokenizeError> {
        match name {
            VocabularyName::Encoding(encoding) => {
                Ok(Vocabulary::BytePairs(*encoding, encoding.load()?))
            }
            VocabularyName::File(path) => Vocabulary::read(path),
        }
    }

    #[cfg(feature = "hugging-face")]
    fn read(path: &Path) -> Result<Vocabulary, TokenizeError> {
        HuggingFace::read(path).map(Box::new).map(Vocabulary::HuggingFace)
    }

    #[cfg(not(feature = "hugging-face"))]
    fn read(path: &Path) -> Result<Vocabulary, TokenizeError> {
        Err(TokenizeError::NotBuilt { path: path.to_owned(), feature: "hugging-face" })
    }

    /// Appends the ids of `text`.
    ///
    /// # Errors
    /// With the library's reason when the vocabulary has no id for a part of the text.
    pub fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), String> {
        match self {
            Vocabulary::BytePairs(_, pairs) => {
                pairs.encode(text, tokens);
                Ok(())
            }
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.encode(text, tokens),
        }
    }

    /// Prepares for conversations, in whose rendered text special tokens are spelt.
    pub(super) fn parse_special_tokens(&mut self) {
        match self {
            Vocabulary::BytePairs(..) => {}
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.parse_special_tokens(),
        }
    }

    /// Appends the ids of a conversation.
    ///
    /// # Errors
    /// Says why there are none.
    #[cfg_attr(not(feature = "hugging-face"), expect(unused_variables))]
    pub(super) fn encode_conversation(
        &self,
        chat: &Chat,
        record: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<Turns, String> {
        match self {
            Vocabulary::BytePairs(..) => Err(String::from("the encoding has no chat template")),
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => chat.encode(record, tokenizer, tokens),
        }
    }

    /// Whether a document may be encoded in parts that [`cut`](super::cut) chooses. Nothing is
    /// known about the rules in a file, so those documents are encoded whole.
    pub fn cuts(&self) -> bool {
        match self {
            Vocabulary::BytePairs(..) => true,
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(_) => false,
        }
    }

    /// Ids there are, special tokens included.
    pub fn ids(&self) -> u32 {
        match self {
            Vocabulary::BytePairs(encoding, _) => encoding.ids(),
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.ids(),
        }
    }

    /// Distinguishes vocabularies: the name of an encoding, the name and the hash of a file.
    pub fn identity(&self) -> String {
        match self {
            Vocabulary::BytePairs(encoding, _) => encoding.name().to_owned(),
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.identity().to_owned(),
        }
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        match self {
            Vocabulary::BytePairs(_, pairs) => pairs.id_of(token),
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.id_of(token),
        }
    }

    /// Whether no text has this id.
    pub fn is_special(&self, id: u32) -> bool {
        match self {
            Vocabulary::BytePairs(_, pairs) => pairs.is_special(id),
            #[cfg(feature = "hugging-face")]
            Vocabulary::HuggingFace(tokenizer) => tokenizer.is_special(id),
        }
    }

    /// The id that ends a document; `None` when nothing does.
    ///
    /// # Errors
    /// When the vocabulary has no such token, or does not say which token ends a document.
    pub fn end_of_document(&self, eos: &Eos) -> Result<Option<u32>, TokenizeError> {
        let unknown = |token: String| TokenizeError::Eos { token, vocabulary: self.identity() };
        let named = |token: &str| self.id_of(token).ok_or_else(|| unknown(format!("`{token}`")));
        match eos {
            Eos::None => Ok(None),
            Eos::Id(id) if *id < self.ids() => Ok(Some(*id)),
            Eos::Id(id) => Err(unknown(format!("with id {id}"))),
            Eos::Token(token) => named(token).map(Some),
            Eos::Default => match self {
                Vocabulary::BytePairs(..) => named(Encoding::END_OF_TEXT).map(Some),
                #[cfg(feature = "hugging-face")]
                Vocabulary::HuggingFace(tokenizer) => {
                    let token = tokenizer.default_eos().ok_or_else(|| {
                        TokenizeError::NoDefaultEos { vocabulary: self.identity() }
                    })?;
                    named(&token).map(Some)
                }
            },
        }
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Vocabulary").field(&self.identity()).finish()
    }
}
