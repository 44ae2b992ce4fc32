//! Megatron-core's `GPTDataset`: the documents of all epochs, shuffled and laid end to end, are cut
//! into samples, and the samples are shuffled.

use alloc::vec::Vec;
use core::ops::Range;

use crate::documents::Documents;

use super::random::RandomState;
use super::{MegatronError, Memory, Settings};

/// Samples from one mark of the sample index to the next. With one mark for each sample as in
/// megatron-core, the index takes 8 bytes per sample; this way 2, and a sample is found by walking
/// over at most three others.
const MARK_SAMPLES: u64 = 4;

/// The share of an epoch below which the last one is shuffled apart.
const LAST_EPOCH_SHARE: f64 = 0.80;

/// The samples of a dataset.
#[derive(Debug)]
pub(super) struct Sequences {
    documents: Documents,
    /// Tokens from the start of a sample to the start of the next.
    stride: u64,
    /// Tokens of a sample.
    window: u64,
    epochs: u64,
    /// Documents in the order in which they are laid end to end.
    order: Vec<u32>,
    /// Where every [`MARK_SAMPLES`]th sample begins: position in `order`, and token of that
    /// document.
    marks: Vec<(u32, u32)>,
    /// The number of each sample before it was shuffled.
    shuffled: Vec<u32>,
    most_pieces: u32,
}

/// How often the documents are needed, and how the samples are shuffled.
struct Extent {
    epochs: u64,
    samples: u64,
    /// Samples before a last epoch that is shuffled apart.
    before_last: Option<u64>,
}

impl Extent {
    fn new(tokens: u64, wanted: Option<u64>, settings: &Settings) -> Extent {
        let (stride, extra) = (u64::from(settings.sequence_tokens), settings.extra());
        let samples = |epochs: u64| (epochs * tokens).saturating_sub(extra) / stride;
        let Some(wanted) = wanted else {
            return Extent { epochs: 1, samples: samples(1), before_last: None };
        };
        let epochs = (wanted * stride + extra).div_ceil(tokens).max(1);
        let before_last = samples(epochs - 1);
        let few = (LAST_EPOCH_SHARE * samples(1) as f64) as u64;
        let apart = epochs > 1 && wanted - before_last < few;
        Extent { epochs, samples: samples(epochs), before_last: apart.then_some(before_last) }
    }
}

impl Sequences {
    /// At least `wanted` samples of the documents in `part`, or one epoch of them.
    pub(super) fn new(
        documents: Documents,
        part: Range<usize>,
        wanted: Option<u64>,
        settings: &Settings,
        memory: &mut Memory,
    ) -> Result<Sequences, MegatronError> {
        let tokens =
            documents.lengths()[part.clone()].iter().map(|tokens| u64::from(*tokens)).sum();
        if tokens == 0 {
            return Err(MegatronError::NoTokens { dataset: memory.dataset });
        }
        let Extent { epochs, samples, before_last } = Extent::new(tokens, wanted, settings);
        if samples == 0 {
            let window = settings.window_tokens();
            return Err(MegatronError::NoSample { dataset: memory.dataset, tokens, window });
        }
        memory.check_samples(samples)?;
        let entries = memory.entries(epochs, part.len())?;
        let mut order = memory.table(entries)?;
        let mut marks = memory.table(samples.div_ceil(MARK_SAMPLES) as usize)?;
        let mut shuffled = memory.table(samples as usize)?;
        let mut random = RandomState::new(settings.seed);
        // Documents of a dataset are fewer than 2^32.
        let once = part.start as u32..part.end as u32;
        let last = usize::from(before_last.is_some());
        order.extend((last as u64..epochs).flat_map(|_| once.clone()));
        random.shuffle(&mut order);
        if before_last.is_some() {
            let first = order.len();
            order.extend(once);
            random.shuffle(&mut order[first..]);
        }
        // They are shuffled with the others, but are in no sample: walking over a run of them would
        // take long.
        order.retain(|document| documents.lengths()[*document as usize] > 0);
        let stride = u64::from(settings.sequence_tokens);
        let count = samples.div_ceil(MARK_SAMPLES) as usize;
        marks.extend(starts(&documents, &order, stride * MARK_SAMPLES).take(count));
        shuffled.extend(0..samples as u32);
        let (first, last) = shuffled.split_at_mut(before_last.unwrap_or(samples) as usize);
        random.shuffle(first);
        random.shuffle(last);
        let window = settings.window_tokens();
        let most_pieces = most_pieces(&documents, &order, window);
        Ok(Sequences { documents, stride, window, epochs, order, marks, shuffled, most_pieces })
    }

    pub(super) fn samples(&self) -> u64 {
        self.shuffled.len() as u64
    }

    pub(super) fn most_pieces(&self) -> u32 {
        self.most_pieces
    }

    pub(super) fn epochs(&self) -> u64 {
        self.epochs
    }

    /// The tokens of the `k`-th sample; none if there are fewer.
    pub(super) fn pieces(&self, k: u64) -> Pieces<'_> {
        let found = usize::try_from(k).ok().and_then(|k| self.shuffled.get(k));
        let sample = found.map_or(0, |sample| u64::from(*sample));
        let (entry, token) = self.marks[(sample / MARK_SAMPLES) as usize];
        let mut pieces = Pieces {
            documents: &self.documents,
            order: self.order[entry as usize..].iter(),
            skip: u64::from(token) + sample % MARK_SAMPLES * self.stride,
            left: if found.is_some() { self.window } else { 0 },
        };
        pieces.skip_documents();
        pieces
    }
}

/// At most how many documents `window` tokens of the documents laid end to end are of; empty ones
/// do not count.
fn most_pieces(documents: &Documents, order: &[u32], window: u64) -> u32 {
    let length = |document: &u32| u64::from(documents.lengths()[*document as usize]);
    let tokens = || order.iter().map(length).filter(|tokens| *tokens > 0);
    // A window takes all tokens of the documents between its first and its last, and one of each of
    // these at least.
    let mut between = tokens().skip(1);
    let (mut inner, mut pieces, mut most) = (0, 0, 1);
    for last in tokens() {
        pieces += 1;
        while pieces > 2 && inner + 2 > window {
            inner -= between.next().unwrap_or(0);
            pieces -= 1;
        }
        most = most.max(pieces);
        inner += if pieces > 1 { last } else { 0 };
    }
    most.min(window as u32)
}

/// Where every `step`th token of the documents laid end to end is: position in `order`, and token
/// of that document.
fn starts(documents: &Documents, order: &[u32], step: u64) -> impl Iterator<Item = (u32, u32)> {
    let (mut end, mut next) = (0, 0);
    order.iter().enumerate().flat_map(move |(entry, document)| {
        let start = end;
        end += u64::from(documents.lengths()[*document as usize]);
        let found = next..end;
        next += end.saturating_sub(next).div_ceil(step) * step;
        // The offset lies in the document, whose length has 32 bits.
        found.step_by(step as usize).map(move |token| (entry as u32, (token - start) as u32))
    })
}

/// The tokens of a sample as ranges of the file, in order: one for each document that it takes part
/// of.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    documents: &'a Documents,
    order: core::slice::Iter<'a, u32>,
    /// Tokens to leave out first.
    skip: u64,
    /// Tokens of the sample that are still to come.
    left: u64,
}

impl Pieces<'_> {
    /// Leaves whole documents out.
    fn skip_documents(&mut self) {
        while let Some(document) = self.order.as_slice().first() {
            let tokens = u64::from(self.documents.lengths()[*document as usize]);
            if tokens > self.skip {
                return;
            }
            self.skip -= tokens;
            self.order.next();
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        while self.left > 0 {
            let document = self.documents.range(*self.order.next()? as usize);
            let start = document.start + self.skip;
            self.skip = 0;
            let end = document.end.min(start + self.left);
            self.left -= end - start;
            if start < end {
                return Some(start..end);
            }
        }
        None
    }
}
