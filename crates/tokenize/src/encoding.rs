//! The encodings: tiktoken's byte-pair vocabularies, by their public names.
//!
//! The ranks are compiled in, so tokenising needs no network and no file. Ids are data: a dataset
//! made with one version must match a model made with another, which is why the crate that ships
//! the ranks is pinned to one exact version and known ids are tested here. Text is encoded by
//! [`bpe`], whose ids equal those of that crate.

use std::fmt;

use clap::ValueEnum;
use tiktoken_rs::CoreBPE;

use super::TokenizeError;
use super::bpe::split::{Pattern, Splitter};
use super::bpe::{self, Ranks};

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

    /// Ids of the vocabulary, special tokens included.
    pub const fn ids(self) -> u32 {
        match self {
            Encoding::R50kBase => 50_257,
            Encoding::P50kBase => 50_281,
            Encoding::Cl100kBase => 100_277,
            Encoding::O200kBase => 200_019,
        }
    }

    /// The token that ends a document.
    pub const END_OF_TEXT: &'static str = "<|endoftext|>";

    /// Loads the vocabulary; a fraction of a second.
    ///
    /// # Errors
    /// When the ranks in this binary cannot be read.
    pub fn load(self) -> Result<BytePairs, TokenizeError> {
        let refused = |reason: String| TokenizeError::Encoding { encoding: self, reason };
        let bpe = self.original().map_err(refused)?;
        let specials: Vec<(String, u32)> = bpe
            .special_tokens()
            .into_iter()
            .filter_map(|name| {
                Some((name.to_owned(), *bpe.encode_with_special_tokens(name).first()?))
            })
            .collect();
        let mut ranks = Ranks::default();
        for id in 0..self.ids() {
            // Some encodings have gaps before their special tokens.
            let bytes = bpe.decode_bytes(&[id]).ok();
            if let Some(bytes) =
                bytes.filter(|_| specials.iter().all(|(_, special)| *special != id))
            {
                ranks.insert(&bytes, id);
            }
        }
        if !ranks.is_complete() {
            return Err(refused(String::from("a byte has no token")));
        }
        let pattern = match self {
            Encoding::R50kBase | Encoding::P50kBase => Pattern::R50k,
            Encoding::Cl100kBase => Pattern::Cl100k,
            Encoding::O200kBase => Pattern::O200k,
        };
        let splitter = Splitter::new(pattern).map_err(refused)?;
        Ok(BytePairs { splitter, ranks, specials })
    }

    /// The encoder of the crate that ships the ranks.
    fn original(self) -> Result<CoreBPE, String> {
        let bpe = match self {
            Encoding::R50kBase => tiktoken_rs::r50k_base(),
            Encoding::P50kBase => tiktoken_rs::p50k_base(),
            Encoding::Cl100kBase => tiktoken_rs::cl100k_base(),
            Encoding::O200kBase => tiktoken_rs::o200k_base(),
        };
        bpe.map_err(|error| error.to_string())
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A loaded encoding; threads share it.
pub struct BytePairs {
    splitter: Splitter,
    ranks: Ranks,
    specials: Vec<(String, u32)>,
}

impl BytePairs {
    /// Appends the ids of `text`; what looks like a special token is plain text.
    pub fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        bpe::encode(&self.splitter, &self.ranks, text, tokens);
    }

    /// Whether no text has this id.
    pub fn is_special(&self, id: u32) -> bool {
        self.specials.iter().any(|(_, special)| *special == id)
    }

    /// The id of a special token, or of one with these bytes.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        let special = self.specials.iter().find(|(name, _)| name == token);
        special.map(|(_, id)| *id).or_else(|| self.ranks.id_of(token.as_bytes()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::cut::tests::text_of;

    fn encode(encoder: &BytePairs, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        encoder.encode(text, &mut tokens);
        tokens
    }

    #[test]
    fn known_ids() {
        let cases = [
            (Encoding::R50kBase, "hello world", &[31373, 995][..]),
            (Encoding::P50kBase, "hello world", &[31373, 995]),
            (Encoding::Cl100kBase, "hello world", &[15339, 1917]),
            (Encoding::O200kBase, "hello world", &[24912, 2375]),
        ];
        for (encoding, text, ids) in cases {
            assert_eq!(encode(&encoding.load().unwrap(), text), ids, "{encoding}");
        }
    }

    #[test]
    fn special_tokens_are_found_by_name_and_are_plain_text_in_a_document() {
        let cases = [
            (Encoding::R50kBase, 50_256),
            (Encoding::P50kBase, 50_256),
            (Encoding::Cl100kBase, 100_257),
            (Encoding::O200kBase, 199_999),
        ];
        for (encoding, end_of_text) in cases {
            let encoder = encoding.load().unwrap();
            assert_eq!(encoder.id_of(Encoding::END_OF_TEXT), Some(end_of_text), "{encoding}");
            let tokens = encode(&encoder, "a<|endoftext|>b");
            assert!(!tokens.contains(&end_of_text) && tokens.len() > 3, "{encoding}");
        }
    }

    /// The encoder of the crate that ships the ranks is the reference: same ids on delicate text
    /// and on every character of Unicode.
    #[test]
    fn ids_equal_those_of_the_original_encoder() {
        let every = |step: usize| -> String {
            (0..=char::MAX as u32).filter_map(char::from_u32).step_by(step).collect()
        };
        let source = include_str!("cut.rs");
        for encoding in Encoding::ALL {
            let (original, encoder) = (encoding.original().unwrap(), encoding.load().unwrap());
            let compare = |text: &str, what: &str| {
                let (theirs, _) = original.encode(text, &HashSet::new()).unwrap();
                assert!(encode(&encoder, text) == theirs, "{encoding}: {what}: {text:.100?}");
            };
            for seed in 0..20_000 {
                compare(&text_of(seed), &format!("text_of({seed})"));
            }
            compare(source, "cut.rs");
            compare(&every(17), "every 17th character");
            let spread: String = every(5).chars().flat_map(|c| [c, 'a', c, ' ', c, '\'']).collect();
            compare(&spread, "every 5th character between others");
            compare(&"ab".repeat(3_000), "a long piece");
            compare(&"é".repeat(500), "a long piece of two-byte characters");
        }
    }

    /// The original encoder gives up on this text: its pattern engine runs out of steps.
    #[test]
    fn a_run_of_a_million_spaces_is_encoded() {
        let encoding = Encoding::R50kBase;
        let text = " ".repeat(3_000_000) + "x";
        let tokens = encode(&encoding.load().unwrap(), &text);
        assert_eq!(encoding.original().unwrap().decode_bytes(&tokens).unwrap(), text.as_bytes());
    }
}
