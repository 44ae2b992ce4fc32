//! The encodings: byte-pair vocabularies with the rule that splits text into pieces first.
//!
//! The ranks are compiled in, so tokenising needs no network and no file. Ids are data: a dataset made with one version
//! must match a model made with another, which is why the crate that ships the ranks is pinned to one exact version
//! and known ids are tested here.

use std::collections::HashSet;
use std::fmt;

use clap::ValueEnum;
use tiktoken_rs::CoreBPE;

use super::{TokenizeError, cut};

/// A vocabulary and its splitting rule, by their public name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Encoding {
    /// 50,257 ids, that of GPT-2; fits u16
    #[value(name = "r50k_base")]
    R50kBase,
    /// 50,281 ids, for code; fits u16
    #[value(name = "p50k_base")]
    P50kBase,
    /// 100,277 ids, that of GPT-4
    #[value(name = "cl100k_base")]
    Cl100kBase,
    /// 200,019 ids, that of GPT-4o
    #[value(name = "o200k_base")]
    O200kBase,
}

impl Encoding {
    /// Every encoding, small vocabularies first.
    pub const ALL: [Encoding; 4] =
        [Encoding::R50kBase, Encoding::P50kBase, Encoding::Cl100kBase, Encoding::O200kBase];

    /// Its public name, such as `r50k_base`.
    pub const fn name(self) -> &'static str {
        match self {
            Encoding::R50kBase => "r50k_base",
            Encoding::P50kBase => "p50k_base",
            Encoding::Cl100kBase => "cl100k_base",
            Encoding::O200kBase => "o200k_base",
        }
    }

    /// The id that ends a document.
    pub const fn end_of_text(self) -> u32 {
        match self {
            Encoding::R50kBase | Encoding::P50kBase => 50_256,
            Encoding::Cl100kBase => 100_257,
            Encoding::O200kBase => 199_999,
        }
    }

    /// Loads the vocabulary; a fraction of a second.
    ///
    /// # Errors
    /// When the ranks in this binary cannot be read.
    pub fn load(self) -> Result<Encoder, TokenizeError> {
        let bpe = match self {
            Encoding::R50kBase => tiktoken_rs::r50k_base(),
            Encoding::P50kBase => tiktoken_rs::p50k_base(),
            Encoding::Cl100kBase => tiktoken_rs::cl100k_base(),
            Encoding::O200kBase => tiktoken_rs::o200k_base(),
        };
        let bpe = bpe.map_err(|error| TokenizeError::Encoding {
            encoding: self,
            reason: error.to_string(),
        })?;
        Ok(Encoder { bpe })
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A loaded vocabulary; threads share it.
pub struct Encoder {
    bpe: CoreBPE,
}

/// The tokens of a piece of text.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Ids in order.
    pub tokens: Vec<u32>,
    /// How often the text had to be cut at a place that may change a token or two.
    pub forced_cuts: u64,
}

impl Encoder {
    /// Encodes text as plain text: what looks like a special token in a document is not one.
    pub fn encode(&self, text: &str) -> Encoded {
        let mut encoded = Encoded::default();
        self.encode_into(text, &mut encoded);
        encoded
    }

    /// Runs of a million spaces exhaust the splitting rule's backtracking; the text is halved until it succeeds.
    fn encode_into(&self, text: &str, encoded: &mut Encoded) {
        match self.bpe.encode(text, &HashSet::new()) {
            Ok((tokens, _)) if encoded.tokens.is_empty() => encoded.tokens = tokens,
            Ok((tokens, _)) => encoded.tokens.extend(tokens),
            Err(_) => {
                let middle = cut::last_char_boundary(text, text.len() / 2);
                encoded.forced_cuts += 1;
                self.encode_into(&text[..middle], encoded);
                self.encode_into(&text[middle..], encoded);
            }
        }
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn known_ids() {
        let cases = [
            (Encoding::R50kBase, "hello world", &[31373, 995][..]),
            (Encoding::P50kBase, "hello world", &[31373, 995]),
            (Encoding::Cl100kBase, "hello world", &[15339, 1917]),
            (Encoding::O200kBase, "hello world", &[24912, 2375]),
        ];
        for (encoding, text, ids) in cases {
            assert_eq!(encoding.load().unwrap().encode(text).tokens, ids, "{encoding}");
        }
    }

    #[test]
    fn a_special_token_in_a_document_is_plain_text() {
        for encoding in [Encoding::R50kBase, Encoding::O200kBase] {
            let encoded = encoding.load().unwrap().encode("a<|endoftext|>b");
            assert!(!encoded.tokens.contains(&encoding.end_of_text()), "{encoding}");
            assert!(encoded.tokens.len() > 3);
        }
    }

    #[test]
    fn text_that_exhausts_the_splitting_rule_is_halved_and_counted() {
        let encoder = Encoding::R50kBase.load().unwrap();
        let text = " ".repeat(3_000_000) + "x";
        let encoded = encoder.encode(&text);
        assert!(encoded.forced_cuts > 0);
        assert_eq!(encoder.bpe.decode_bytes(&encoded.tokens).unwrap(), text.as_bytes());
    }
}
