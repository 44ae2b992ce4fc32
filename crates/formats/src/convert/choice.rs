//! Which documents of a source are written: those that a list of hashes keeps, and of equal ones
//! the first.
//!
//! The hash of a document is known when all of it was read, so the source is read once before it is
//! copied. What is kept takes one bit a document, the hashes of a deduplication some 10 to 20 bytes
//! for each different one.

use std::collections::HashSet;
use std::path::Path;

use serde::Serialize;
use xio::documents::{HashList, Selection};

use crate::dochash::{self, Digest, Hashing};
use crate::error::Error;
use crate::reading::{self, Plan};
use crate::source::Source;

/// What was left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Dropped {
    /// Documents that the filter drops.
    pub filtered_documents: u64,
    /// Their tokens.
    pub filtered_tokens: u64,
    /// Of those that the filter leaves, documents that occurred before.
    pub duplicate_documents: u64,
    /// Their tokens.
    pub duplicate_tokens: u64,
}

/// A selection whose list was read.
pub(super) struct Rule {
    list: Option<(HashList, bool)>,
    dedup: bool,
    /// Differs when other documents are kept.
    pub(super) identity: String,
}

impl Rule {
    /// Reads the list of a selection; none when it keeps everything.
    pub(super) fn read(selection: &Selection) -> Result<Option<Rule>, Error> {
        if selection.is_empty() {
            return Ok(None);
        }
        let dedup = selection.dedup.is_some();
        let Some(filter) = &selection.filter else {
            return Ok(Some(Rule { list: None, dedup, identity: String::from("dedup") }));
        };
        let hashes = dochash::read_list(Path::new(&filter.list))?;
        let mut digest = Digest::default();
        digest.extend(&hashes);
        let (verb, digest) = (if filter.keep { "keep" } else { "drop" }, digest.value());
        let identity = format!("{verb} {digest:016x}{}", if dedup { ", dedup" } else { "" });
        Ok(Some(Rule { list: Some((HashList::new(hashes), filter.keep)), dedup, identity }))
    }

    fn passes(&self, hash: u64) -> bool {
        self.list.as_ref().is_none_or(|(list, keep)| list.contains(hash) == *keep)
    }
}

/// The documents that are kept, by their numbers in the source.
#[derive(Default)]
pub(super) struct Choice {
    bits: Vec<u64>,
    documents: u64,
    kept: u64,
    pub(super) dropped: Dropped,
}

impl Choice {
    pub(super) fn keeps(&self, document: u64) -> bool {
        let word = self.bits.get((document / 64) as usize);
        word.is_some_and(|word| word >> (document % 64) & 1 == 1)
    }

    fn push(&mut self, keep: bool) {
        if self.documents.is_multiple_of(64) {
            self.bits.push(0);
        }
        if let Some(word) = self.bits.last_mut() {
            *word |= u64::from(keep) << (self.documents % 64);
        }
        self.documents += 1;
        self.kept += u64::from(keep);
    }
}

/// Documents on their way past a rule.
struct Chooser<'a> {
    rule: &'a Rule,
    hasher: Hashing,
    /// Tokens of the document so far.
    tokens: u64,
    seen: HashSet<u64>,
    choice: Choice,
}

impl Chooser<'_> {
    fn end_document(&mut self) {
        let (hash, tokens) = (self.hasher.finish(), std::mem::take(&mut self.tokens));
        let dropped = &mut self.choice.dropped;
        let passes = self.rule.passes(hash);
        let keep = passes && (!self.rule.dedup || self.seen.insert(hash));
        if !passes {
            dropped.filtered_documents += 1;
            dropped.filtered_tokens += tokens;
        } else if !keep {
            dropped.duplicate_documents += 1;
            dropped.duplicate_tokens += tokens;
        }
        self.choice.push(keep);
    }
}

/// Reads a source and tells which of its documents are kept. `watch` receives the number of tokens
/// and the share of the parts. `plan` is in the type of the source.
///
/// # Errors
/// When the source cannot be read, has no documents, or none is kept.
pub(super) fn choose(
    source: &dyn Source,
    path: &Path,
    plan: Plan,
    rule: &Rule,
    watch: &mut dyn FnMut(u64, f64),
) -> Result<Choice, Error> {
    if !source.layout().kind.has_documents() && plan.eos.is_none() {
        let why = "has no documents to choose from";
        return Err(Error::refused(path, why, "name the id that ends them: --eos ID"));
    }
    let (hasher, seen, choice) = (Hashing::default(), HashSet::new(), Choice::default());
    let mut chooser = Chooser { rule, hasher, tokens: 0, seen, choice };
    let (mut total, parts) = (0, source.parts().max(1) as f64);
    let width = plan.dtype.bytes() as usize;
    reading::read(source, plan, 0, &mut |chunk| {
        let mut at = 0;
        let mut write = |chooser: &mut Chooser<'_>, end: usize| {
            chooser.tokens += (end - at) as u64;
            let written = chooser.hasher.write(&chunk.tokens[at * width..end * width], plan.dtype);
            at = end;
            written.map_err(Error::read(path))
        };
        for end in chunk.ends.iter().filter(|end| end.is_document) {
            write(&mut chooser, end.at)?;
            chooser.end_document();
        }
        write(&mut chooser, chunk.tokens.len() / width)?;
        total += (chunk.tokens.len() / width) as u64;
        watch(total, chunk.part as f64 / parts);
        Ok(())
    })?;
    if chooser.tokens > 0 {
        chooser.end_document();
    }
    let choice = chooser.choice;
    if choice.kept == 0 {
        let why = format!("none of its {} documents is kept", choice.documents);
        let hint = "`dquant documents FILE --hashes` shows the hashes of its documents";
        return Err(Error::refused(path, why, hint));
    }
    Ok(choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_kept_by_their_number() {
        let mut choice = Choice::default();
        let kept = |document: u64| document % 3 == 1 || document == 127;
        (0..200).for_each(|document| choice.push(kept(document)));
        assert!((0..200).all(|document| choice.keeps(document) == kept(document)));
        assert!(!choice.keeps(200) && !choice.keeps(u64::MAX));
        assert_eq!((choice.documents, choice.kept), (200, 67));
    }
}
