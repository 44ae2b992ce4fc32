//! Which documents are held out for validation: a function of the text of each and of a seed.
//!
//! A document is held out if the XXH3 hash (64 bits) of the first 64 KiB of its text, with the
//! seed, is below the share of 2^64. So documents of the same text are in the same part, whatever
//! the inputs, their order, the vocabulary and the number of threads: no text is trained on that is
//! validated with. A run that is resumed, or extends its outputs, decides as the first one did. A
//! larger share of the same seed holds out what a smaller one does, and more.
//!
//! The beginning of a text decides because long texts are read and written in parts: the part has
//! to be known at the first.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use formats::manifest::Part;
use twox_hash::XxHash3_64;

/// Bytes of a text that decide.
pub const DECIDING_BYTES: usize = 64 << 10;

/// Decimals of a percentage.
const DECIMALS: usize = 6;

/// One percent, in the units of a share.
const PERCENT: u64 = 10_u64.pow(DECIMALS as u32);

/// A share of documents: more than none, and not all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// In millionths of a percent.
    millionths: u64,
}

impl Share {
    /// Hashes below this number are in the share.
    fn bound(self) -> u64 {
        // A share is below 100 %, so this is below 2^64.
        ((u128::from(self.millionths) << 64) / u128::from(100 * PERCENT)) as u64
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let Some(percent) = text.strip_suffix('%') else {
            return Err(String::from(
                "a share is a percentage, such as 1% or 0.5%; a number of documents cannot be held out, because the \
                 text of each alone decides",
            ));
        };
        let (whole, decimals) = percent.split_once('.').unwrap_or((percent, "0"));
        let is_number =
            |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
        if !is_number(whole) || !is_number(decimals) {
            return Err(format!("`{percent}` is no decimal number; a share is such as 1% or 0.5%"));
        }
        if decimals.len() > DECIMALS {
            return Err(format!("a percentage has at most {DECIMALS} decimals"));
        }
        // Both fit unless the share is too large: there are at most six decimals.
        let whole = whole.parse().ok().and_then(|whole: u64| whole.checked_mul(PERCENT));
        let decimals = format!("{decimals:0<DECIMALS$}").parse::<u64>().ok();
        let millionths = whole.zip(decimals).and_then(|(whole, part)| whole.checked_add(part));
        match millionths {
            Some(millionths @ 1..) if millionths < 100 * PERCENT => Ok(Share { millionths }),
            _ => Err(String::from("a share is more than 0% and less than 100%")),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.millionths / PERCENT)?;
        let decimals = format!("{:0DECIMALS$}", self.millionths % PERCENT);
        match decimals.trim_end_matches('0') {
            "" => f.write_str("%"),
            decimals => write!(f, ".{decimals}%"),
        }
    }
}

/// What decides which part a document goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// How many documents are held out.
    pub share: Share,
    /// Which ones: another seed holds out others.
    pub seed: u64,
}

impl Rule {
    /// The part of a document. Of its text, the first [`DECIDING_BYTES`] decide.
    pub fn part(self, text: &[u8]) -> Part {
        let beginning = &text[..text.len().min(DECIDING_BYTES)];
        match XxHash3_64::oneshot_with_seed(self.seed, beginning) < self.share.bound() {
            true => Part::Validation,
            false => Part::Train,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by seed {}", self.share, self.seed)
    }
}

/// The documents that are held out, and where they go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdout {
    /// Which documents.
    pub rule: Rule,
    /// The file to write.
    pub output: PathBuf,
}

/// The output of held-out documents beside another: `web-valid.bin` beside `web.bin`.
pub fn beside(output: &Path) -> PathBuf {
    let mut name = output.file_stem().unwrap_or_default().to_owned();
    name.push("-valid");
    if let Some(ending) = output.extension() {
        name.push(".");
        name.push(ending);
    }
    output.with_file_name(name)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn rule(share: &str, seed: u64) -> Rule {
        Rule { share: share.parse().unwrap(), seed }
    }

    #[test]
    fn shares_are_percentages_and_others_are_refused_with_the_reason() {
        for (text, canonical) in [
            ("1%", "1%"),
            ("0.5%", "0.5%"),
            ("007.250%", "7.25%"),
            ("0.000001%", "0.000001%"),
            ("99.999999%", "99.999999%"),
        ] {
            assert_eq!(text.parse::<Share>().unwrap().to_string(), canonical);
        }
        for (text, why) in [
            ("1", "percentage"),
            ("1000", "a number of documents cannot be held out"),
            ("0.01", "percentage"),
            ("", "percentage"),
            ("%", "no decimal number"),
            (".5%", "no decimal number"),
            ("5.%", "no decimal number"),
            ("-1%", "no decimal number"),
            ("1e1%", "no decimal number"),
            ("1 %", "no decimal number"),
            ("١%", "no decimal number"),
            ("0%", "more than 0%"),
            ("0.000000%", "more than 0%"),
            ("100%", "less than 100%"),
            ("18446744073709551616%", "less than 100%"),
            ("18446744073709551615%", "less than 100%"),
            ("0.0000001%", "at most 6 decimals"),
        ] {
            let error = text.parse::<Share>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    /// As `xxhash.xxh3_64_intdigest(text.encode()[:65536], seed=SEED) < SHARE / 100 * 2**64` in
    /// Python.
    #[test]
    fn the_rule_is_the_one_of_the_documentation() {
        assert_eq!(rule("50%", 0).share.bound(), 1 << 63);
        assert_eq!(rule("25%", 0).share.bound(), 1 << 62);
        assert_eq!(XxHash3_64::oneshot_with_seed(0, b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(rule("17.58%", 0).part(b""), Part::Train);
        assert_eq!(rule("17.59%", 0).part(b""), Part::Validation);
    }

    #[test]
    fn the_beginning_of_a_long_text_decides() {
        let mut text = "a long line of text\n".repeat(10_000).into_bytes();
        let parts = |text: &[u8]| (0..200).map(|seed| rule("50%", seed).part(text)).collect();
        let before: Vec<Part> = parts(&text);
        text[DECIDING_BYTES] ^= 1;
        assert_eq!(parts(&text), before);
        text[DECIDING_BYTES - 1] ^= 1;
        assert_ne!(parts(&text), before);
    }

    /// Texts of a corpus in which some occur several times, and a share, all drawn from the seed.
    fn corpus(seed: u64) -> (Vec<String>, Share) {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) % bound
        };
        let texts = (0..600).map(|_| {
            let number = below(400);
            format!("document {number} ").repeat(1 + (number % 40) as usize)
        });
        let texts = texts.collect();
        let share = Share { millionths: 1 + below(100 * PERCENT - 1) };
        (texts, share)
    }

    /// For any seed, the parts are disjoint and complete, one text is in one part, and neither
    /// order nor other documents matter. The share is what was asked for, as closely as chance
    /// allows.
    #[test]
    fn every_seed_splits_by_the_text_alone() {
        let (mut held_out, mut expected, mut variance) = (0.0, 0.0, 0.0);
        for seed in 0..2_500 {
            let (texts, share) = corpus(seed);
            let rule = Rule { share, seed };
            let is_held_out = |text: &&String| rule.part(text.as_bytes()) == Part::Validation;
            let (validation, train): (Vec<&String>, Vec<&String>) =
                texts.iter().partition(is_held_out);
            assert_eq!(validation.len() + train.len(), texts.len(), "seed {seed}");
            let found = validation.len() as f64;
            let distinct = |texts: &[&String]| texts.iter().copied().cloned().collect();
            let (validation, train): (BTreeSet<String>, BTreeSet<String>) =
                (distinct(&validation), distinct(&train));
            assert!(validation.is_disjoint(&train), "seed {seed}");
            let every_third = texts.iter().rev().step_by(3);
            let again: BTreeSet<String> = every_third.filter(is_held_out).cloned().collect();
            assert!(again.is_subset(&validation), "seed {seed}");
            // A larger share holds out the same documents, and more.
            let larger = Share { millionths: share.millionths.midpoint(100 * PERCENT) };
            let larger = Rule { share: larger, seed };
            assert!(validation.iter().all(|text| larger.part(text.as_bytes()) == Part::Validation));
            // Documents of one text go together.
            let mut times = BTreeMap::new();
            texts.iter().for_each(|text| *times.entry(text).or_insert(0.0) += 1.0);
            let share = share.millionths as f64 / (100 * PERCENT) as f64;
            let spread: f64 = times.values().map(|times: &f64| times * times).sum();
            let spread = spread * share * (1.0 - share);
            let wanted = texts.len() as f64 * share;
            assert!((found - wanted).abs() <= 6.0 * spread.sqrt() + 3.0, "seed {seed}: {found}");
            (held_out, expected, variance) =
                (held_out + found, expected + wanted, variance + spread);
        }
        let off: f64 = held_out - expected;
        assert!(off.abs() <= 4.0 * f64::sqrt(variance), "{held_out} of {expected} expected");
    }

    #[test]
    fn the_output_of_held_out_documents_is_beside_the_other() {
        for (output, expected) in [
            ("web.bin", "web-valid.bin"),
            ("a/web.u16.bin", "a/web.u16-valid.bin"),
            ("tokens", "tokens-valid"),
        ] {
            assert_eq!(beside(Path::new(output)), Path::new(expected));
        }
    }
}
