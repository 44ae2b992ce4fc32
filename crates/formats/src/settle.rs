//! Which type the tokens of a file have, and who says so.
//!
//! A flat file does not record its type. It comes from the manifest or from the user, and what the bytes of the file
//! rule out is refused, whoever says it. Without both, the bytes decide when they leave no doubt, and the caller has
//! to report that it is a guess ([`Origin::Guess`]). The same rules hold at the target and on this machine.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use xio::dataset::Dtype;
use xio::dataset::guess::{Evidence, SAMPLE_BYTES, sample_offsets};

use crate::manifest::{Manifest, REWRITE_HINT};

/// Who says which type the tokens have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The header of the file, or the index beside it.
    File,
    /// The manifest beside it.
    Manifest,
    /// The user.
    Given,
    /// Nobody: the bytes look like it, for this reason.
    Guess(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File => f.write_str("file"),
            Origin::Manifest => f.write_str("manifest"),
            Origin::Given => f.write_str("given"),
            Origin::Guess(why) => write!(f, "guess: {why}"),
        }
    }
}

/// Why no type is accepted, and the next thing to try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong, to follow the name of the file.
    pub why: String,
    /// The next thing to try.
    pub hint: String,
}

impl Refusal {
    fn new(why: impl Into<String>, hint: impl Into<String>) -> Refusal {
        Refusal { why: why.into(), hint: hint.into() }
    }
}

const FLAT_HINT: &str = "name the type with --dtype, for example --dtype u32, or write a manifest: \
                         dquant inspect FILE --dtype u32 --write-manifest";

/// Reads samples of the tokens in this range of a file, in bytes.
///
/// # Errors
/// When the file cannot be read.
pub fn sample(file: &File, range: Range<u64>, vocabulary: Option<u64>) -> io::Result<Evidence> {
    let len = range.end.saturating_sub(range.start);
    let mut evidence = Evidence::new(len, vocabulary);
    let mut buffer = [0; SAMPLE_BYTES as usize];
    for at in sample_offsets(len) {
        let want = SAMPLE_BYTES.min(len - at) as usize;
        let mut have = 0;
        while have < want {
            match file.read_at(&mut buffer[have..want], range.start + at + have as u64)? {
                0 => break,
                read => have += read,
            }
        }
        evidence.add(&buffer[..have]);
    }
    Ok(evidence)
}

/// The type of a flat file, from the manifest, the user, or its bytes.
///
/// # Errors
/// When the user contradicts the manifest, the bytes contradict the user, or nothing tells the type.
pub fn flat_type(
    given: Option<Dtype>,
    manifest: Option<&Manifest>,
    evidence: &Evidence,
) -> Result<(Dtype, Origin), Refusal> {
    match (manifest.map(Manifest::dtype), given) {
        (Some(recorded), Some(given)) if recorded != given => Err(Refusal::new(
            format!("holds {recorded} according to its manifest, not {given}"),
            "leave --dtype out: the manifest tells the type",
        )),
        (Some(recorded), _) => Ok((recorded, Origin::Manifest)),
        (None, Some(given)) => match evidence.against(given) {
            None => Ok((given, Origin::Given)),
            Some(why) => Err(Refusal::new(why, against_hint(given))),
        },
        (None, None) => match evidence.guess() {
            Ok((guess, why)) => Ok((guess, Origin::Guess(why))),
            Err(why) => {
                let why = format!("has no header that tells the type of its tokens, and {why}");
                Err(Refusal::new(why, FLAT_HINT))
            }
        },
    }
}

fn against_hint(given: Dtype) -> String {
    format!(
        "leave --dtype out; if it is {given} after all, record it: \
         dquant inspect FILE --dtype {given} --write-manifest --force"
    )
}

/// Checks that the manifest is of this file.
///
/// # Errors
/// Says in what they differ.
pub fn agrees(
    manifest: &Manifest,
    (name, bytes): (&str, u64),
    (dtype, tokens): (Dtype, u64),
) -> Result<(), Refusal> {
    let refuse = |why| Err(Refusal::new(why, REWRITE_HINT));
    let base = name.rsplit('/').next().unwrap_or(name);
    let Some(recorded) = manifest.files.iter().find(|file| file.name == base) else {
        return refuse(format!("its manifest describes other files, not {base}"));
    };
    if recorded.bytes != bytes {
        let recorded = recorded.bytes;
        return refuse(format!("has {bytes} bytes, its manifest describes {recorded}"));
    }
    if (manifest.dtype(), manifest.tokens) != (dtype, tokens) {
        let (was, count) = (manifest.dtype(), manifest.tokens);
        return refuse(format!("holds {tokens} {dtype} tokens, its manifest says {count} {was}"));
    }
    Ok(())
}

/// Checks the ids against the vocabulary of the user, as far as they are known.
///
/// # Errors
/// Names the id that is beyond it.
pub fn within_vocabulary(
    vocabulary: u64,
    manifest: Option<&Manifest>,
    dtype: Dtype,
    evidence: &Evidence,
) -> Result<(), Refusal> {
    let hint = "is it the tokenizer that made the file, and the right --dtype?";
    match manifest.and_then(|manifest| manifest.max_id) {
        Some(largest) if largest >= i128::from(vocabulary) => {
            let why = format!("holds id {largest}, beyond the vocabulary of {vocabulary}");
            Err(Refusal::new(why, hint))
        }
        Some(_) => Ok(()),
        None => evidence.against(dtype).map_or(Ok(()), |why| Err(Refusal::new(why, hint))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn evidence(bytes: usize) -> Evidence {
        let ids = (0..5_000_u64).map(|i| i * i * 2_654_435_761 % 50_257);
        let data: Vec<u8> = ids.flat_map(|id| id.to_le_bytes()[..bytes].to_vec()).collect();
        let mut evidence = Evidence::new(data.len() as u64, None);
        evidence.add(&data);
        evidence
    }

    #[test]
    fn a_given_type_is_checked_and_a_missing_one_is_guessed() {
        let (narrow, wide) = (evidence(2), evidence(4));
        let given = |dtype, evidence| flat_type(Some(dtype), None, evidence);
        assert_eq!(given(Dtype::U16, &narrow).unwrap(), (Dtype::U16, Origin::Given));
        assert_eq!(given(Dtype::U32, &wide).unwrap(), (Dtype::U32, Origin::Given));
        for (dtype, evidence, right) in [(Dtype::U16, &wide, "u32"), (Dtype::U32, &narrow, "u16")] {
            let refusal = given(dtype, evidence).unwrap_err();
            assert!(refusal.why.contains(&format!("is not {dtype} but {right}")), "{refusal:?}");
            assert!(refusal.hint.contains("--force"), "{refusal:?}");
        }
        let (dtype, origin) = flat_type(None, None, &narrow).unwrap();
        assert!(dtype == Dtype::U16 && matches!(origin, Origin::Guess(_)), "{origin}");
        let refusal = flat_type(None, None, &Evidence::new(0, None)).unwrap_err();
        assert!(refusal.why.contains("too few") && refusal.hint.contains("--dtype"), "{refusal:?}");
    }
}
