//! The manifest of an output: its type, vocabulary, documents and checksums.
//!
//! Where documents are held out, each of the two manifests names the other output with its
//! fingerprint. Outputs are extended together, by the rule that split them.

use std::path::{Path, PathBuf};

use formats::manifest::{Contents, Part, Split, relative};
use formats::{Manifest, ReadOptions};

use super::checkpoint::Written;
use super::described::Described;
use super::holdout::{self, Holdout, Rule};
use super::token_type::TokenType;
use super::{TokenizeError, index};

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

/// Checks that outputs may be extended: without `holdout`, one that was not split; with it, the
/// parts that it splits.
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

/// The dataset that is left of a split when `output` is replaced, if its manifest names it and the
/// other way round.
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
