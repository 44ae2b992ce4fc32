//! The manifest of an output: its type, vocabulary, documents and checksums.
//!
//! What is said about an output that is extended must hold for both parts. A manifest that names another vocabulary or
//! another end of documents refuses the extension; what the old part does not say, the new manifest does not say either.
//!
//! Where documents are held out, each of the two manifests names the other output with its fingerprint. Outputs are
//! extended together, by the rule that split them.

use std::path::{Path, PathBuf};

use formats::manifest::{Contents, Part, Split, path_of, relative};
use formats::{Manifest, ReadOptions};
use serde::{Deserialize, Serialize};

use super::checkpoint::Written;
use super::holdout::{self, Holdout, Rule};
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
    /// Whether documents are conversations, in turns.
    #[serde(default)]
    targets: bool,
}

impl Described {
    /// A new output.
    pub(super) fn new(tokenizer: String, eos: Option<u32>, targets: bool) -> Described {
        Described { tokenizer: Some(tokenizer), eos, documents: Some(0), max_id: Some(0), targets }
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

/// Writes the manifests of complete outputs: of one, or of the two parts that `rule` splits.
///
/// # Errors
/// When an output cannot be read or its folder cannot be written.
pub(super) fn write(
    outputs: &[(&Path, &Written)],
    dtype: TokenType,
    rule: Option<Rule>,
) -> Result<(), TokenizeError> {
    let create = |(output, written): &(&Path, &Written)| create(output, dtype, written);
    let mut manifests = outputs.iter().map(create).collect::<Result<Vec<_>, _>>()?;
    if let (Some(rule), [(train, _), (validation, _)], [first, second]) =
        (rule, outputs, &mut manifests[..])
    {
        first.split = Some(split(Part::Train, rule, train, (validation, second.fingerprint())));
        second.split =
            Some(split(Part::Validation, rule, validation, (train, first.fingerprint())));
    }
    for ((output, _), manifest) in outputs.iter().zip(&manifests) {
        manifest.store(output)?;
    }
    Ok(())
}

fn create(output: &Path, dtype: TokenType, written: &Written) -> Result<Manifest, TokenizeError> {
    let Written { marks, totals, described } = written;
    let Described { tokenizer, eos, documents, max_id, targets } = described;
    let contents = Contents {
        tokens: marks.tokens,
        min_id: None,
        max_id: max_id.map(|before| before.max(totals.max_id).into()),
        tokenizer: tokenizer.clone(),
        documents: documents.map(|before| before + totals.documents),
        eos: eos.map(u64::from),
        targets: *targets,
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
    Ok(Manifest::create(described, contents, &layout.folder, &layout.files, &|_| ())?)
}

fn split(part: Part, rule: Rule, output: &Path, (other, fingerprint): (&Path, u64)) -> Split {
    Split {
        part,
        seed: rule.seed,
        share: rule.share.to_string(),
        other: relative(output, other),
        other_fingerprint: format!("{fingerprint:016x}"),
    }
}

/// Checks that outputs may be extended: without `holdout`, one that was not split; with it, the parts that it splits.
///
/// # Errors
/// Says which output is another, and how to extend it.
pub(super) fn check_split(train: &Path, holdout: Option<&Holdout>) -> Result<(), TokenizeError> {
    let Some(Holdout { rule, output: validation }) = holdout else {
        return match Manifest::load(train)?.and_then(|manifest| manifest.split) {
            None => Ok(()),
            Some(split) => Err(is_split(train, &split)),
        };
    };
    let [first, second] = [train, validation].map(|path| part(path, *rule));
    let ((first, first_split), (second, second_split)) = (first?, second?);
    for (path, split, wanted) in
        [(train, &first_split, Part::Train), (validation, &second_split, Part::Validation)]
    {
        if split.part != wanted {
            let (found, wanted) = (split.part.name(), wanted.name());
            let reason = format!("it is the {found} part of a split, not the {wanted} part");
            return Err(refused(path, reason, "exchange the two outputs"));
        }
    }
    let names = |split: &Split, other: &Manifest| {
        u64::from_str_radix(&split.other_fingerprint, 16) == Ok(other.fingerprint())
    };
    if names(&first_split, &second) && names(&second_split, &first) {
        return Ok(());
    }
    let reason = format!("it and {} are not parts of one split", validation.display());
    let hint = format!("its manifest names {}: give that with --holdout-output", first_split.other);
    Err(refused(train, reason, hint))
}

/// The dataset that is left of a split when `output` is replaced, if its manifest names it and the other way round.
pub(super) fn other_part(output: &Path) -> Option<PathBuf> {
    // What is to be replaced may be broken.
    let manifest = Manifest::load(output).ok().flatten()?;
    let other =
        output.parent().unwrap_or(Path::new("")).join(manifest.split.as_ref()?.other.as_str());
    let named = Manifest::load(&other).ok().flatten()?.other_part();
    (named == Some(manifest.fingerprint()) && other.exists()).then_some(other)
}

/// The manifest of an output that was split by this rule.
fn part(path: &Path, rule: Rule) -> Result<(Manifest, Split), TokenizeError> {
    let manifest = match path.exists() {
        true => Manifest::load(path)?,
        false => return Err(refused(path, "it does not exist, the other part does", AGAIN)),
    };
    let Some(manifest) = manifest else {
        return Err(refused(path, "it has no manifest that tells how it was split", AGAIN));
    };
    let Some(split) = manifest.split.clone() else {
        return Err(refused(path, "it was written without --holdout", AGAIN));
    };
    let then = split.share.parse().map(|share| Rule { share, seed: split.seed });
    if then != Ok(rule) {
        let reason = format!("it was split at {} by seed {}, not {rule}", split.share, split.seed);
        let hint = format!("give --holdout {} --seed {}", split.share, split.seed);
        return Err(refused(path, reason, hint));
    }
    Ok((manifest, split))
}

const AGAIN: &str = "tokenize all documents with --holdout, into new outputs";

/// Why a part is not extended alone: it would get documents of the other one.
fn is_split(path: &Path, split: &Split) -> TokenizeError {
    let Split { part, seed, share, other, .. } = split;
    let reason = format!("it is the {} part of a split, {share} by seed {seed}", part.name());
    let folder = path.parent().unwrap_or(Path::new(""));
    let other = folder.join(other);
    let (train, validation) = match part {
        Part::Train => (path, other.as_path()),
        Part::Validation => (other.as_path(), path),
    };
    let named = match holdout::beside(train) == validation {
        true => String::new(),
        false => format!(" --holdout-output {}", validation.display()),
    };
    let hint =
        format!("extend both: -o {} --holdout {share} --seed {seed}{named}", train.display());
    refused(path, reason, hint)
}

fn refused(path: &Path, reason: impl Into<String>, hint: impl Into<String>) -> TokenizeError {
    TokenizeError::Split { path: path.to_owned(), reason: reason.into(), hint: hint.into() }
}
