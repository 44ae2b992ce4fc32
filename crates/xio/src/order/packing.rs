//! Packing: documents laid into samples of one length, without joining two where a sample does not
//! say so.
//!
//! A document is cut into *chunks* of at most a window. Consecutive chunks make up a *block*, so
//! that a block is one run of the file; inside it chunks are laid into samples, the longest first,
//! and what is left of a sample is padding. Every block but the last has the same number of
//! samples, so the shuffle of blocks and samples is that of any other dataset. A block takes as
//! many chunks as fit its samples:
//!
//! ```text
//! documents  |--a--|-b-|---------c---------|--d--|-e-| …
//! chunks     |  a  | b |    c0    |   c1   |  d  | e |        c is longer than a window
//! samples    | c0       | a   | d  |p| c1   | b |pp|          best fit, longest first; p is padding
//! ```
//!
//! The table is where each block begins: 12 bytes for each. The samples of a block are laid out
//! again when it is needed.

use alloc::collections::{BTreeSet, BinaryHeap};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::ops::Range;

use thiserror::Error;

use super::BLOCK_BYTES;
use crate::documents::Documents;

/// Most chunks of a block: what bounds the time that laying one out takes.
pub const MAX_CHUNKS: usize = 4_096;

/// Which sample a chunk goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The one with the least room that suffices, of several the first.
    Best,
    /// The first that has room.
    First,
    /// One of its own.
    Single,
}

impl Fit {
    /// All of them.
    pub const ALL: [Fit; 3] = [Fit::Best, Fit::First, Fit::Single];

    /// As written in a plan.
    pub const fn name(self) -> &'static str {
        match self {
            Fit::Best => "best",
            Fit::First => "first",
            Fit::Single => "single",
        }
    }

    /// The policy of this name.
    pub fn from_name(name: &str) -> Option<Fit> {
        Fit::ALL.into_iter().find(|fit| fit.name() == name)
    }
}

/// Why documents cannot be packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PackingError {
    /// There is no token in any document.
    #[error("no document holds a token")]
    Empty,
    /// The last document ends beyond the file.
    #[error("the documents end at token {end}, the file at token {tokens}")]
    Beyond {
        /// The token after the last document.
        end: u64,
        /// Tokens of the file.
        tokens: u64,
    },
    /// Documents lie so far apart in the file, or are so short, that a block of it does not fill
    /// its samples.
    #[error(
        "the documents from token {token} on are too few or too short to fill {samples} samples of {window} tokens from \
         one block of the file"
    )]
    Sparse {
        /// First token of the block.
        token: u64,
        /// Samples of a block.
        samples: u32,
        /// Tokens of a sample.
        window: u32,
    },
}

/// The samples of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Tokens of the file, counted from the first of the block: sample by sample, in the order of
    /// the file.
    pieces: Vec<Range<u32>>,
    /// By sample, the piece after its last.
    ends: Vec<u32>,
}

impl Packed {
    /// How many.
    pub fn samples(&self) -> usize {
        self.ends.len()
    }

    /// The pieces of a sample, each of one document; none where there is no such sample.
    pub fn sample(&self, sample: u32) -> &[Range<u32>] {
        let sample = sample as usize;
        let Some(&end) = self.ends.get(sample) else { return &[] };
        let begin = sample.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.pieces[begin as usize..end as usize]
    }
}

/// Where a block begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Start {
    document: u32,
    /// Tokens of that document before the block.
    token: u32,
}

/// How the documents of a file are packed. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packing {
    documents: Documents,
    fit: Fit,
    window: u32,
    samples_per_block: u32,
    /// Tokens of the file that a block may span.
    span: u32,
    /// By block, and where the next would begin.
    starts: Arc<[Start]>,
    samples: u64,
    tokens: u64,
    longest_block: u32,
}

impl Packing {
    /// Packs documents into samples of `window` tokens, `samples_per_block` in a block; of a token
    /// `token_bytes` are read at most. Takes time in proportion to the documents and the samples of
    /// a block.
    ///
    /// # Errors
    /// When there is nothing to pack, and when a block of [`BLOCK_BYTES`] does not fill its
    /// samples.
    pub fn new(
        documents: Documents,
        fit: Fit,
        window: u32,
        samples_per_block: u32,
        token_bytes: u32,
    ) -> Result<Packing, PackingError> {
        let (span, starts) = (BLOCK_BYTES / token_bytes.max(1), Arc::from([]));
        let (samples, tokens, longest_block) = (0, 0, 0);
        let mut packing = Packing {
            // None of them is in a sample, and a run of them would be walked over again and again.
            documents: documents.without_empty(),
            fit,
            window: window.max(1),
            samples_per_block: samples_per_block.max(1),
            span,
            starts,
            samples,
            tokens,
            longest_block,
        };
        let (mut starts, mut at) = (Vec::new(), Start { document: 0, token: 0 });
        while let Some((first, chunks)) = packing.chunks_from(at) {
            let laid = packing.lay(first, &chunks)?;
            starts.push(at);
            packing.samples += laid.packed.samples() as u64;
            let taken = &chunks[..laid.chunks];
            packing.tokens += taken.iter().map(|chunk| u64::from(chunk.tokens)).sum::<u64>();
            let end = taken.last().map_or(0, |last| last.start + last.tokens);
            packing.longest_block = packing.longest_block.max(end);
            at = laid.next;
        }
        starts.push(at);
        packing.starts = starts.into();
        if packing.samples == 0 { Err(PackingError::Empty) } else { Ok(packing) }
    }

    /// Samples in all.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The documents that are packed.
    pub fn documents(&self) -> &Documents {
        &self.documents
    }

    /// Tokens of documents in them; the others are padding.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Share of the samples' tokens that is padding.
    pub fn waste(&self) -> f64 {
        1.0 - self.tokens as f64 / (self.samples as f64 * f64::from(self.window))
    }

    /// Tokens of the file that the longest block spans.
    pub fn longest_block(&self) -> u32 {
        self.longest_block
    }

    /// The tokens of the file in a block, from its first chunk to its last; none past the last
    /// block.
    pub fn block(&self, block: u64) -> Range<u64> {
        let Some((first, chunks)) = self.chunks_of(block) else { return 0..0 };
        let end = chunks.last().map_or(0, |last| last.start + last.tokens);
        first..first + u64::from(end)
    }

    /// The samples of a block; none past the last block.
    pub fn packed(&self, block: u64) -> Packed {
        let laid = self.chunks_of(block).and_then(|(first, chunks)| self.lay(first, &chunks).ok());
        laid.map(|laid| laid.packed).unwrap_or_default()
    }

    /// Exactly the chunks of a block.
    fn chunks_of(&self, block: u64) -> Option<(u64, Vec<Chunk>)> {
        let block = usize::try_from(block).ok()?;
        let (start, next) = (*self.starts.get(block)?, *self.starts.get(block + 1)?);
        let (first, mut chunks) = self.chunks_from(start)?;
        let end = chunks.iter().position(|chunk| chunk.place == next);
        chunks.truncate(end.unwrap_or(chunks.len()));
        Some((first, chunks))
    }

    /// The first token of the first chunk from `at` on, and the chunks that a block from there on
    /// can hold at most.
    fn chunks_from(&self, at: Start) -> Option<(u64, Vec<Chunk>)> {
        let room = match self.fit {
            Fit::Single => u64::MAX,
            Fit::Best | Fit::First => u64::from(self.samples_per_block) * u64::from(self.window),
        };
        let most = match self.fit {
            Fit::Single => self.samples_per_block as usize,
            Fit::Best | Fit::First => MAX_CHUNKS.max(self.samples_per_block as usize),
        };
        let (mut chunks, mut first, mut total): (Vec<Chunk>, _, _) = (Vec::new(), None, 0);
        let (mut document, mut token) = (at.document as usize, at.token);
        while document < self.documents.len() && chunks.len() < most {
            let range = self.documents.range(document);
            let begin = range.start + u64::from(token);
            let tokens = (range.end - begin).min(self.window.into()) as u32;
            if tokens == 0 {
                (document, token) = (document + 1, 0);
                continue;
            }
            let first = *first.get_or_insert(begin);
            let (start, end) = (begin - first, begin - first + u64::from(tokens));
            total += u64::from(tokens);
            if total > room || end > self.span.into() {
                break;
            }
            let place = Start { document: document as u32, token };
            chunks.push(Chunk { place, start: start as u32, tokens });
            token += tokens;
        }
        first.map(|first| (first, chunks))
    }

    /// Lays as many of the chunks from token `first` on into the samples of a block as fit them.
    fn lay(&self, first: u64, chunks: &[Chunk]) -> Result<Laid, PackingError> {
        let (window, samples) = (self.window, self.samples_per_block);
        let sparse = PackingError::Sparse { token: first, samples, window };
        let most = samples as usize;
        let mut taken = chunks.len();
        let mut bins = loop {
            match self.bins(&chunks[..taken], most) {
                Ok(bins) => break bins,
                Err(fewer) => taken = fewer,
            }
        };
        if taken == 0 {
            return Err(sparse);
        }
        let next = match chunks.get(taken) {
            Some(chunk) => chunk.place,
            None => chunks.last().map_or(Start { document: 0, token: 0 }, |last| Start {
                token: last.place.token + last.tokens,
                ..last.place
            }),
        };
        let is_last = taken == chunks.len() && self.chunks_from(next).is_none();
        if !is_last {
            split(&mut bins, most).ok_or(sparse)?;
        }
        let mut packed = Packed::default();
        for mut bin in bins {
            bin.sort_unstable();
            packed.pieces.extend(bin.iter().map(|chunk| chunks[*chunk].range()));
            packed.ends.push(packed.pieces.len() as u32);
        }
        Ok(Laid { packed, chunks: taken, next })
    }

    /// Chunks by sample. If they need more than `most` samples, how many of the first chunks may
    /// need no more.
    fn bins(&self, chunks: &[Chunk], most: usize) -> Result<Vec<Vec<usize>>, usize> {
        let mut by_length: Vec<usize> = (0..chunks.len()).collect();
        if self.fit != Fit::Single {
            by_length.sort_by_key(|chunk| (u32::MAX - chunks[*chunk].tokens, *chunk));
        }
        let (mut bins, mut rooms): (Vec<Vec<usize>>, _) = (Vec::new(), Rooms::new(self.fit, most));
        for (place, &chunk) in by_length.iter().enumerate() {
            let tokens = chunks[chunk].tokens;
            let (bin, room) = match rooms.take(tokens) {
                Some(found) => found,
                // With all the chunks laid so far, it goes the same way: one of them has to leave.
                None if bins.len() == most => {
                    return Err(by_length[..=place].iter().copied().max().unwrap_or(0));
                }
                None => {
                    bins.push(Vec::new());
                    (bins.len() - 1, self.window)
                }
            };
            bins[bin].push(chunk);
            rooms.put(bin, room - tokens);
        }
        Ok(bins)
    }
}

/// The room in the samples of a block. Finding one takes time with the logarithm of their number.
enum Rooms {
    /// Room and number of each.
    Best(BTreeSet<(u32, usize)>),
    /// A tree over all samples that there may be: the most room below each node, from the root at 1
    /// on.
    First(Vec<u32>),
    Single,
}

impl Rooms {
    fn new(fit: Fit, most: usize) -> Rooms {
        match fit {
            Fit::Best => Rooms::Best(BTreeSet::new()),
            Fit::First => Rooms::First(vec![0; 2 * most.next_power_of_two()]),
            Fit::Single => Rooms::Single,
        }
    }

    /// The sample for so many tokens, at least one, and its room. What is left of that is
    /// [`put`](Rooms::put) back.
    fn take(&mut self, tokens: u32) -> Option<(usize, u32)> {
        match self {
            Rooms::Best(rooms) => {
                let (room, bin) = *rooms.range((tokens, 0)..).next()?;
                rooms.remove(&(room, bin));
                Some((bin, room))
            }
            Rooms::First(most) => {
                let mut node = if most[1] < tokens { return None } else { 1 };
                while node < most.len() / 2 {
                    node = 2 * node + usize::from(most[2 * node] < tokens);
                }
                Some((node - most.len() / 2, most[node]))
            }
            Rooms::Single => None,
        }
    }

    fn put(&mut self, bin: usize, room: u32) {
        match self {
            Rooms::Best(rooms) => drop(rooms.insert((room, bin))),
            Rooms::First(most) => {
                let mut node = most.len() / 2 + bin;
                most[node] = room;
                while node > 1 {
                    node /= 2;
                    most[node] = most[2 * node].max(most[2 * node + 1]);
                }
            }
            Rooms::Single => {}
        }
    }
}

/// Part of a document, in a block.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    place: Start,
    /// Tokens of the file from the first of the block to this.
    start: u32,
    tokens: u32,
}

impl Chunk {
    fn range(&self) -> Range<u32> {
        self.start..self.start + self.tokens
    }
}

/// A block that is laid out.
struct Laid {
    packed: Packed,
    /// Of the chunks given, so many are in it.
    chunks: usize,
    /// Where the next block begins.
    next: Start,
}

/// Makes `samples` bins of fewer: the last chunk of the bin with the most chunks, of several the
/// first, becomes a bin of its own. None if there are fewer chunks.
fn split(bins: &mut Vec<Vec<usize>>, samples: usize) -> Option<()> {
    let mut fullest: BinaryHeap<(usize, Reverse<usize>)> =
        bins.iter().enumerate().map(|(bin, chunks)| (chunks.len(), Reverse(bin))).collect();
    while bins.len() < samples {
        let (chunks, Reverse(bin)) = fullest.pop().filter(|(chunks, _)| *chunks > 1)?;
        let chunk = bins[bin].pop()?;
        bins.push(vec![chunk]);
        fullest.push((chunks - 1, Reverse(bin)));
    }
    Some(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packing(lengths: &[u32], fit: Fit, window: u32, per_block: u32) -> Packing {
        let documents = Documents::contiguous(lengths.iter().copied()).unwrap();
        Packing::new(documents, fit, window, per_block, 4).unwrap()
    }

    #[test]
    fn the_longest_come_first() {
        // As in the picture of the module: a 4, b 3, c 15, d 5, e 3, with windows of 10.
        let lengths = [4, 3, 15, 5, 3];
        let best = packing(&lengths, Fit::Best, 10, 3).packed(0);
        assert_eq!(best.sample(0).first(), Some(&(7..17)));
        assert_eq!(best.sample(1), [17..22, 22..27]);
        assert_eq!(best.sample(2), [0..4, 4..7, 27..30]);
        assert_eq!((best.samples(), best.sample(3)), (3, &[][..]));
        let single = packing(&lengths, Fit::Single, 10, 3);
        assert_eq!((single.samples(), single.block(0), single.block(1)), (6, 0..17, 17..30));
        assert_eq!(single.packed(1).sample(0).first(), Some(&(0..5)));
        assert!((packing(&[10, 10], Fit::Best, 10, 3).waste()).abs() < 1e-9);
    }

    #[test]
    fn documents_too_far_apart_are_refused() {
        let far = (0..8).map(|i| i * 200_000..i * 200_000 + 5);
        let refused = Packing::new(Documents::new(far).unwrap(), Fit::Best, 10, 8, 4);
        assert_eq!(refused, Err(PackingError::Sparse { token: 0, samples: 8, window: 10 }));
        let empty = Packing::new(Documents::new([3..3, 4..4]).unwrap(), Fit::Best, 10, 8, 4);
        assert_eq!(empty, Err(PackingError::Empty));
    }

    /// As the page has it, step by step: the samples of a block, and how many chunks are in it.
    fn slowly(packing: &Packing, chunks: &[Chunk]) -> (Vec<Vec<usize>>, usize) {
        let most = packing.samples_per_block as usize;
        let lay = |chunks: &[Chunk]| {
            let mut by_length: Vec<usize> = (0..chunks.len()).collect();
            by_length.sort_by_key(|chunk| (u32::MAX - chunks[*chunk].tokens, *chunk));
            let mut bins: Vec<(u32, Vec<usize>)> = Vec::new();
            for chunk in by_length {
                let tokens = chunks[chunk].tokens;
                let mut fitting = bins.iter_mut().filter(|(room, _)| *room >= tokens);
                let bin = match packing.fit {
                    Fit::Best => fitting.min_by_key(|(room, _)| *room),
                    Fit::First => fitting.next(),
                    Fit::Single => None,
                };
                match bin {
                    Some((room, bin)) => {
                        bin.push(chunk);
                        *room -= tokens;
                    }
                    None => bins.push((packing.window - tokens, vec![chunk])),
                }
            }
            bins.into_iter().map(|(_, bin)| bin).collect::<Vec<_>>()
        };
        let fits = |taken: &usize| lay(&chunks[..*taken]).len() <= most;
        let taken = (0..=chunks.len()).rev().find(fits).unwrap();
        (lay(&chunks[..taken]), taken)
    }

    /// Two of these documents do not fit one sample, so half of the chunks that a block has room
    /// for have to leave.
    #[test]
    fn documents_of_an_unlucky_length_are_packed_in_time() {
        for (tokens, window, fit) in
            [(33, 64, Fit::Best), (129, 256, Fit::First), (22, 64, Fit::First)]
        {
            let lengths = vec![tokens; 200_000];
            let per_block = BLOCK_BYTES / 2 / window;
            let documents = Documents::contiguous(lengths).unwrap();
            let packing = Packing::new(documents, fit, window, per_block, 2).unwrap();
            let in_a_sample = u64::from(window / tokens);
            assert!(packing.samples() >= 200_000 / in_a_sample);
        }
        // One token in a sample: the block has half a million of them.
        let documents = Documents::contiguous(vec![1; 600_000]).unwrap();
        let packing = Packing::new(documents, Fit::Best, 1, BLOCK_BYTES / 2, 2).unwrap();
        assert_eq!((packing.samples(), packing.packed(0).samples()), (600_000, 1 << 19));
    }

    #[test]
    fn documents_without_tokens_cost_nothing() {
        let empty = core::iter::repeat_n(0, 5_000_000);
        let lengths: Vec<u32> = [7].into_iter().chain(empty).chain([3]).collect();
        let packing = packing(&lengths, Fit::Best, 10, 1);
        (0..1_000).for_each(|_| assert_eq!(packing.block(0), 0..10));
        assert_eq!(packing.documents.len(), 2);
    }

    proptest! {
        /// Shortcuts lead to the same samples.
        #[test]
        fn samples_are_those_of_the_page(
            lengths in prop::collection::vec(1..60u32, 1..120),
            window in 1..80u32,
            per_block in 1..20u32,
            fit in prop::sample::select(vec![Fit::Best, Fit::First]),
        ) {
            let packing = packing(&lengths, fit, window, per_block);
            for block in 0..packing.samples().div_ceil(per_block.into()) {
                let start = packing.starts[block as usize];
                let (_, chunks) = packing.chunks_from(start).unwrap();
                let (mut bins, taken) = slowly(&packing, &chunks);
                prop_assert_eq!(packing.chunks_of(block).unwrap().1.len(), taken);
                let packed = packing.packed(block);
                while bins.len() < packed.samples() {
                    let most = bins.iter().map(Vec::len).max().unwrap();
                    let chunk = bins.iter_mut().find(|bin| bin.len() == most).unwrap().pop().unwrap();
                    bins.push(vec![chunk]);
                }
                for (sample, mut bin) in (0..).zip(bins) {
                    bin.sort_unstable();
                    let pieces: Vec<_> = bin.into_iter().map(|chunk| chunks[chunk].range()).collect();
                    prop_assert_eq!(packed.sample(sample), &pieces[..]);
                }
            }
        }

        /// Every token of every document is in one sample, no sample is too long, only the last
        /// block is short, and packing wastes no more than documents alone do.
        #[test]
        fn nothing_is_lost(
            spans in prop::collection::vec((0..40u32, 0..60u32), 1..300),
            window in 1..50u32,
            per_block in 1..20u32,
            fit in prop::sample::select(Fit::ALL.to_vec()),
        ) {
            let mut at = 0u64;
            let ranges: Vec<Range<u64>> = spans
                .iter()
                .map(|(gap, tokens)| {
                    let start = at + u64::from(*gap);
                    at = start + u64::from(*tokens);
                    start..at
                })
                .collect();
            prop_assume!(ranges.iter().any(|range| !range.is_empty()));
            let documents = Documents::new(ranges.iter().cloned()).unwrap();
            let packing = Packing::new(documents, fit, window, per_block, 4).unwrap();
            let blocks = packing.samples().div_ceil(per_block.into());
            let mut seen = vec![0u8; at as usize];
            for block in 0..blocks {
                let (tokens, packed) = (packing.block(block), packing.packed(block));
                let all = packing.samples() - block * u64::from(per_block);
                prop_assert_eq!(packed.samples() as u64, all.min(per_block.into()));
                prop_assert!(tokens.end - tokens.start <= packing.longest_block().into());
                for sample in 0..packed.samples() as u32 {
                    let pieces = packed.sample(sample);
                    let length: u32 = pieces.iter().map(|piece| piece.end - piece.start).sum();
                    prop_assert!((1..=window).contains(&length));
                    prop_assert!(fit != Fit::Single || pieces.len() == 1);
                    for piece in pieces {
                        let from = tokens.start + u64::from(piece.start);
                        let to = tokens.start + u64::from(piece.end);
                        prop_assert!(to <= tokens.end);
                        prop_assert!(ranges.iter().any(|document| document.start <= from && to <= document.end));
                        seen[from as usize..to as usize].iter_mut().for_each(|token| *token += 1);
                    }
                }
            }
            for (token, seen) in seen.iter().enumerate() {
                let is_in_one = ranges.iter().any(|range| range.contains(&(token as u64)));
                prop_assert_eq!(*seen, u8::from(is_in_one), "token {}", token);
            }
            prop_assert!(packing.packed(blocks).samples() == 0 && packing.block(blocks).is_empty());
        }
    }
}
