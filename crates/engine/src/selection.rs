//! Which documents a stream draws from: what is left after the plan's filter and deduplication.
//!
//! Tables, hashes and list come from a target or from files of this machine;
//! [`xio::documents::select`] decides. What was dropped is told in the descriptions of the
//! datasets, and so is the fingerprint of what is left: positions of streams over other documents
//! do not agree.

use std::hash::Hasher;

use service::error::Error;
use service::event::Event;
use twox_hash::XxHash3_64;
use xio::documents::{Documents, HashList, Hashed, Kept, Selection, select};
use xio::order::Split;

use crate::control::documents::Received;
use crate::proto::DatasetInfo;

static FILTERED: Event = Event::new("dpu.filtered_documents");
static DUPLICATES: Event = Event::new("dpu.duplicate_documents");

/// Documents dropped by the streams of this process.
pub(crate) static EVENTS: [&Event; 2] = [&FILTERED, &DUPLICATES];

/// Applies a selection, and the split of packed documents, to what was received for the datasets
/// that `infos` describe; `draws` says whether the plan draws from one.
///
/// # Errors
/// When nothing is left of a dataset that is drawn from.
pub fn apply(
    selection: &Selection,
    split: Option<Split>,
    draws: impl Fn(usize) -> bool,
    // Of several files that are blended by their samples, one may be left without any.
    is_one_of_many: bool,
    infos: &mut [DatasetInfo],
    received: Received,
) -> Result<Vec<Documents>, Error> {
    if selection.is_empty() && split.is_none() {
        return Ok(received.tables);
    }
    let list = HashList::new(received.list);
    // Without a selection no hashes were asked for.
    let hashes = received.hashes.into_iter().chain(std::iter::repeat(Vec::new()));
    let tables = received.tables.into_iter().zip(hashes).enumerate();
    let datasets = tables.map(|(dataset, (documents, hashes))| {
        let drawn = draws(dataset);
        Hashed { documents, hashes, drawn }
    });
    let datasets: Vec<Hashed> = datasets.collect();
    let kept = select(selection, &|documents| part_of(split, documents), &list, &datasets)
        .map_err(Error::invalid)?;
    for (info, (kept, dataset)) in infos.iter_mut().zip(kept.iter().zip(&datasets)) {
        if dataset.drawn && !is_one_of_many && kept.documents.tokens() == 0 && info.tokens > 0 {
            return Err(nothing_left(&info.name, split));
        }
        describe(info, kept);
    }
    Ok(kept.into_iter().map(|kept| kept.documents).collect())
}

/// Which of so many documents are of the part; all of them without a split.
fn part_of(split: Option<Split>, documents: usize) -> Vec<bool> {
    let mut marks = vec![split.is_none(); documents];
    let units = split.into_iter().flat_map(|split| split.units(documents as u64));
    units.for_each(|document| marks[document as usize] = true);
    marks
}

/// Nothing of a dataset is left that samples are drawn from.
fn nothing_left(name: &str, split: Option<Split>) -> Error {
    match split {
        Some(Split { part, .. }) => {
            let text = format!("{name}: nothing of it is left for the part {part} of the split");
            Error::invalid(text).hint("give the part a larger share, or the dataset weight 0")
        }
        None => Error::invalid(format!("{name}: filter and dedup leave no token of it"))
            .hint("give it weight 0, or check the list of the filter"),
    }
}

/// Writes down what is left and what was dropped.
fn describe(info: &mut DatasetInfo, Kept { documents, filtered, duplicates }: &Kept) {
    info.documents = fingerprint(documents);
    info.document_count = documents.len() as u64;
    (info.filtered_documents, info.filtered_tokens) = (filtered.documents, filtered.tokens);
    (info.duplicate_documents, info.duplicate_tokens) = (duplicates.documents, duplicates.tokens);
    FILTERED.add(filtered.documents);
    DUPLICATES.add(duplicates.documents);
}

/// The XXH3 hash (64 bits) of the first token and the tokens of each document, as 64-bit
/// little-endian numbers; 1 in place of 0.
fn fingerprint(documents: &Documents) -> u64 {
    let mut hash = XxHash3_64::new();
    for range in documents.iter() {
        hash.write(&range.start.to_le_bytes());
        hash.write(&(range.end - range.start).to_le_bytes());
    }
    hash.finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xio::documents::Dedup;

    fn received() -> Received {
        let table = |lengths: &[u32]| Documents::contiguous(lengths.iter().copied()).expect("few");
        let tables = vec![table(&[3, 4]), table(&[5])];
        Received { tables, hashes: vec![vec![7, 8], vec![7]], ..Received::default() }
    }

    fn infos() -> Vec<DatasetInfo> {
        let info = |name: &str, tokens, document_count| DatasetInfo {
            name: name.into(),
            tokens,
            document_count,
            documents: 1,
            ..DatasetInfo::default()
        };
        vec![info("a.bin", 7, 2), info("b.bin", 5, 1)]
    }

    #[test]
    fn descriptions_tell_what_was_dropped() {
        let across = Selection { filter: None, dedup: Some(Dedup::Across) };
        let mut described = infos();
        let error =
            apply(&across, None, |_| true, false, &mut described, received()).expect_err("empty");
        assert!(error.parts().0.contains("b.bin: filter and dedup leave no token"));
        let mut described = infos();
        let left = apply(&across, None, |dataset| dataset == 1, false, &mut described, received());
        assert_eq!(left.expect("what is not drawn displaces nothing")[1].len(), 1);
        let within = Selection { filter: None, dedup: Some(Dedup::Within) };
        let mut same = received();
        same.hashes[0] = vec![8, 8];
        let left =
            apply(&within, None, |_| true, false, &mut described, same).expect("something is left");
        assert_eq!((left[0].len(), left[0].range(0)), (1, 0..3));
        let [a, b] = &described[..] else { panic!("two") };
        assert_eq!((a.duplicate_documents, a.duplicate_tokens, a.document_count), (1, 4, 1));
        assert_eq!((b.duplicate_documents, b.filtered_documents), (0, 0));
        assert!(a.documents > 1 && a.documents != b.documents);
    }

    #[test]
    fn without_a_selection_nothing_changes() {
        let mut described = infos();
        let all = apply(&Selection::default(), None, |_| true, false, &mut described, received());
        assert_eq!((all.expect("all").len(), described), (2, infos()));
    }
}
