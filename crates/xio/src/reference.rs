//! Batches by slow and obvious code, to check the fast path against.
//!
//! This is the definition of a batch, written for reading: the blend is simulated from sample zero
//! by its rule, the shuffle is built as a table of all samples of the epoch, and tokens are read
//! and range-checked one at a time as whole numbers. It shares with [`order`](crate::order) only
//! the keyed permutations, which have their own tests; the block arithmetic, the seeking, the
//! caching and the narrowing loops have no counterpart here. Where the two disagree, one has a bug.
//!
//! The layout of a batch: batch `b` holds global samples `b * batch .. (b + 1) * batch`, row after
//! row; a row is one window of tokens, each replaced by its entry in the table of `remap`, mapped
//! by the action of `wasm` and converted to the type of `narrow`, or quantized and back,
//! little-endian, in the delivered type. Sample `i` of a file is its `window` tokens from
//! `i * (window - overlap)` on; tokens after the last whole window are not delivered. With `pairs`
//! a batch holds the rows without their last tokens, then the rows without their first tokens.
//! Packed samples, ignored labels and rows of positions are defined by `rows` below. Loss weights
//! follow all rows, after zeros up to a multiple of 4 bytes, one `f32` for each token of a row:
//! that of the token, or of the label; then zeros up to a multiple of 8 bytes.
//!
//! Cost: O(datasets) for each sample since sample zero (or since the last requested batch, going
//! forward), and a table of 8 bytes for each sample of a dataset. Not for production.

pub mod quantized;

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use thiserror::Error;

use crate::dataset::{Dtype, TokenFile};
use crate::order::{
    BLOCK_BYTES, Fit, MAX_CHUNKS, OrderError, SampleLayout, Split, SplitPart, block_permutation,
    dataset_key, sample_permutation, tail_slot,
};
use crate::plan::{Deliver, Narrow, Overflow, Pack, Plan};
use crate::stage::{CompileError, Limit};

/// Reads single tokens as whole numbers; values of floating point as their bits.
pub trait TokenReader {
    /// The token at `index`, counted from the first of the file; none if it cannot be read.
    fn token(&mut self, index: u64) -> Option<i128>;
}

impl<F: FnMut(u64) -> Option<i128>> TokenReader for F {
    fn token(&mut self, index: u64) -> Option<i128> {
        self(index)
    }
}

/// Why there is no batch. Datasets are counted in the order of the blend.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReferenceError {
    /// The files do not match the plan.
    #[error(transparent)]
    Types(#[from] CompileError),
    /// A file cannot be divided as the plan requires.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// A token could not be read.
    #[error("token {token} of dataset {dataset} cannot be read")]
    Unreadable {
        /// Which dataset.
        dataset: usize,
        /// Index of the token in the file.
        token: u64,
    },
    /// A token that the plan cannot deliver.
    #[error("token {token} of dataset {dataset} is {value}: {limit}")]
    Overflow {
        /// Which dataset.
        dataset: usize,
        /// Index of the token in the file.
        token: u64,
        /// Its value.
        value: i128,
        /// What it does not fit.
        limit: Limit,
    },
    /// A loss weight that is no finite number.
    #[error("the loss weight of token {token} of dataset {dataset} is not finite")]
    Weight {
        /// Which dataset.
        dataset: usize,
        /// Index of the token in the file.
        token: u64,
    },
    /// A batch so far out that its sample numbers overflow.
    #[error("batch {batch} lies beyond the last sample that can be counted")]
    BatchNumber {
        /// The requested batch.
        batch: u64,
    },
}

/// A token with its position in its document and the number of that.
type Placed = (i128, (i128, i128));

/// The rows of a sample, and its loss weights.
type Sample = (Vec<Vec<i128>>, Vec<f32>);

/// Computes batches the slow way.
#[derive(Debug)]
pub struct Reference<R> {
    plan: Plan,
    /// Type that every token must fit.
    must_fit: Dtype,
    dtype: Dtype,
    /// The table of `remap`.
    table: Vec<u32>,
    /// What `wasm` does to a token of this number in its file.
    action: fn(u64, i128) -> i128,
    datasets: Vec<Dataset<R>>,
    /// Samples drawn so far, over all datasets.
    drawn: u64,
}

#[derive(Debug)]
struct Dataset<R> {
    layout: SampleLayout,
    reader: R,
    documents: Vec<Range<u64>>,
    /// Which tokens are targets; none where all are.
    targets: Option<Vec<Range<u64>>>,
    /// The loss weight of each token; none where it has none.
    loss_weights: Option<Vec<f32>>,
    /// The samples that documents are packed into, each by document.
    packed: Option<Vec<Vec<Range<u64>>>>,
    /// In each phase.
    weights: Vec<i128>,
    /// Samples drawn so far from this dataset.
    drawn: u64,
    /// The same since the phase began.
    drawn_in_phase: u64,
    /// An epoch and its file samples, in order of delivery.
    table: Option<(u64, Vec<u64>)>,
}

impl<R: TokenReader> Reference<R> {
    /// Takes the files in the order of the blend.
    pub fn new(plan: &Plan, files: Vec<(TokenFile, R)>) -> Result<Reference<R>, ReferenceError> {
        let sources: Vec<Dtype> = files.iter().map(|(file, _)| file.dtype).collect();
        let dtype = plan.delivered_dtype(&sources)?;
        if plan.megatron().is_some() {
            return Err(OrderError::NeedsDocuments.into());
        }
        let mut datasets = Vec::new();
        for (i, (file, reader)) in files.into_iter().enumerate() {
            let part = plan.blend().get(i);
            let weights = part.map_or(Vec::from([1]), |part| {
                part.weights.iter().map(|weight| i128::from(*weight)).collect()
            });
            let layout = plan.layout(i, file)?;
            let (drawn, drawn_in_phase) = (0, 0);
            datasets.push(Dataset {
                layout,
                reader,
                documents: Vec::new(),
                targets: None,
                loss_weights: None,
                packed: None,
                weights,
                drawn,
                drawn_in_phase,
                table: None,
            });
        }
        let must_fit = plan.sample_dtype(&sources)?;
        let (plan, table, action) = (plan.clone(), Vec::new(), |_, value| value);
        Ok(Reference { plan, must_fit, dtype, table, action, datasets, drawn: 0 })
    }

    /// The same with the documents of each dataset, in ascending order.
    ///
    /// # Errors
    /// When no document of a dataset that is packed holds a token.
    pub fn with_documents(
        mut self,
        documents: Vec<Vec<Range<u64>>>,
    ) -> Result<Reference<R>, ReferenceError> {
        for (dataset, documents) in self.datasets.iter_mut().zip(documents) {
            if let Some(Pack { fit, .. }) = self.plan.pack() {
                // Blocks have half as many samples where documents do not fill them, and half of
                // that.
                let packed = loop {
                    match packed(&documents, fit, &dataset.layout) {
                        Some(packed) => break packed,
                        None => dataset.layout.samples_per_block /= 2,
                    }
                };
                let samples = packed.len() as u64;
                dataset.layout.samples = samples;
                let SampleLayout { window, file, .. } = dataset.layout;
                let tokens = file.tokens;
                if samples == 0 {
                    return Err(OrderError::NoSample { tokens, window }.into());
                }
                dataset.packed = Some(packed);
            }
            dataset.documents = documents;
        }
        Ok(self)
    }

    /// The same with the runs of targets of each dataset; of one without all tokens are targets.
    #[must_use]
    pub fn with_targets(mut self, targets: Vec<Option<Vec<Range<u64>>>>) -> Reference<R> {
        for (dataset, targets) in self.datasets.iter_mut().zip(targets) {
            dataset.targets = targets;
        }
        self
    }

    /// The same with the loss weights of the tokens of each dataset, where it has any.
    #[must_use]
    pub fn with_loss_weights(mut self, weights: Vec<Option<Vec<f32>>>) -> Reference<R> {
        for (dataset, weights) in self.datasets.iter_mut().zip(weights) {
            dataset.loss_weights = weights;
        }
        self
    }

    /// Whether a token of a dataset is a target, as far as the plan asks.
    fn is_target(&self, dataset: usize, token: u64) -> bool {
        let targets = self.datasets[dataset].targets.as_ref().filter(|_| self.plan.hides_others());
        targets.is_none_or(|runs| runs.iter().any(|run| run.contains(&token)))
    }

    /// The same with a table for `remap`; every token is refused without one.
    #[must_use]
    pub fn with_table(self, table: Vec<u32>) -> Reference<R> {
        Reference { table, ..self }
    }

    /// The same with what `wasm` does to a token, given its number in its file; nothing without it.
    #[must_use]
    pub fn with_action(self, action: fn(u64, i128) -> i128) -> Reference<R> {
        Reference { action, ..self }
    }

    /// Type of the delivered tokens.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The bytes of batch `batch`.
    pub fn batch(&mut self, batch: u64) -> Result<Vec<u8>, ReferenceError> {
        let samples = u64::from(self.plan.batch());
        let first = batch.checked_mul(samples).filter(|first| first.checked_add(samples).is_some());
        let first = first.ok_or(ReferenceError::BatchNumber { batch })?;
        if first < self.drawn {
            self.drawn = 0;
            self.datasets.iter_mut().for_each(|d| (d.drawn, d.drawn_in_phase) = (0, 0));
        }
        while self.drawn < first {
            self.draw();
        }
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..samples {
            let (dataset, k) = self.draw();
            let sample = self.rows(dataset, k)?;
            rows.push(sample.0);
            weights.extend(sample.1);
        }
        // The first row of all samples, then the second of all samples, and so on.
        let count = rows[0].len();
        let by_row = (0..count).flat_map(|row| rows.iter().flat_map(move |rows| &rows[row]));
        let width = self.dtype.bytes() as usize;
        let mut bytes: Vec<u8> =
            by_row.flat_map(|value| value.to_le_bytes()[..width].to_vec()).collect();
        if self.plan.loss_weights().is_some() {
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(weights.iter().flat_map(|weight: &f32| weight.to_le_bytes()));
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        Ok(bytes)
    }

    /// Draws the next sample: returns its dataset, and how many were drawn from that before.
    fn draw(&mut self) -> (usize, u64) {
        if self.plan.phases().contains(&self.drawn) {
            self.datasets.iter_mut().for_each(|dataset| dataset.drawn_in_phase = 0);
        }
        let pick = self.due();
        let dataset = &mut self.datasets[pick];
        let k = dataset.drawn;
        dataset.drawn += 1;
        dataset.drawn_in_phase += 1;
        self.drawn += 1;
        (pick, k)
    }

    /// The dataset to draw from, by Tijdeman's rule within the phase. With `e = 1/(2D - 2)`, a
    /// dataset may be drawn as step `n` if its count is then at most `n * p/Q + 1 - e`; of those,
    /// the one whose count, if unchanged, soonest falls below `n * p/Q - (1 - e)`; of several, the
    /// first.
    fn due(&self) -> usize {
        let begun: Vec<u64> =
            self.plan.phases().iter().copied().filter(|start| *start <= self.drawn).collect();
        let (phase, start) = (begun.len(), begun.last().copied().unwrap_or(0));
        let weight = |d: &Dataset<R>| d.weights[phase];
        let total: i128 = self.datasets.iter().map(weight).sum();
        let weighted = self.datasets.iter().filter(|d| weight(d) > 0).count() as i128;
        let slack = 2 * weighted - 2;
        let step = i128::from(self.drawn - start) + 1;
        let may = |d: &Dataset<R>| {
            let after = i128::from(d.drawn_in_phase) + 1;
            slack == 0 || (after * total - step * weight(d)) * slack <= total * (slack - 1)
        };
        let safe_until = |d: &Dataset<R>| match slack {
            0 => 0,
            _ => (i128::from(d.drawn_in_phase) * slack + slack - 1) * total / (weight(d) * slack),
        };
        let open = self.datasets.iter().enumerate().filter(|(_, d)| weight(d) > 0 && may(d));
        open.min_by_key(|(_, d)| safe_until(d)).map_or(0, |(i, _)| i)
    }

    /// The rows of the `k`-th sample drawn from a dataset, and the loss weights of one of them.
    fn rows(&mut self, dataset: usize, k: u64) -> Result<Sample, ReferenceError> {
        let pieces = self.pieces(dataset, k);
        let mut values = Vec::new();
        for token in pieces.iter().cloned().flatten() {
            let value = self.datasets[dataset].reader.token(token);
            let value = value.ok_or(ReferenceError::Unreadable { dataset, token })?;
            values.push((token, value));
        }
        if self.plan.quantize().is_some() {
            let delivered = self.quantized(dataset, &values)?;
            // Codes and scales are one row; values go on as if they were in the file.
            if delivered.len() != values.len() {
                return Ok((Vec::from([delivered]), Vec::new()));
            }
            values.iter_mut().zip(delivered).for_each(|(value, delivered)| value.1 = delivered);
        }
        // One action after the other, over the whole sample: the first that refuses a token is the
        // error.
        let actions =
            [Reference::remapped, Reference::mapped, Reference::narrowed, Reference::fitting];
        for action in actions {
            for (token, value) in &mut values {
                let (token, old) = (*token, *value);
                let refused =
                    |limit| ReferenceError::Overflow { dataset, token, value: old, limit };
                *value = action(self, token, old).map_err(refused)?;
            }
        }
        let bad = |(token, _): &&(u64, i128)| {
            let weights = self.datasets[dataset].loss_weights.as_ref();
            weights.is_some_and(|weights| !weights[*token as usize].is_finite())
        };
        if let Some((token, _)) =
            values.iter().find(bad).filter(|_| self.plan.loss_weights().is_some())
        {
            return Err(ReferenceError::Weight { dataset, token: *token });
        }
        let weight = |(token, _): &(u64, i128)| match &self.datasets[dataset].loss_weights {
            Some(weights) => weights[*token as usize],
            None => self.plan.loss_weights().map_or(0.0, |all| all.of_missing()),
        };
        let mut weights: Vec<f32> = values.iter().map(weight).collect();
        weights.resize(self.plan.window() as usize, 0.0);
        let target = |(token, _): &(u64, i128)| self.is_target(dataset, *token);
        let targets: Vec<bool> = values.iter().map(target).collect();
        // Each token with its position in its document and the number of that, from 1; 0 is
        // padding.
        let numbers = (1..).zip(&pieces).flat_map(|(document, piece)| {
            (0..(piece.end - piece.start) as i128).map(move |position| (position, document))
        });
        let mut tokens: Vec<Placed> =
            values.into_iter().map(|(_, value)| value).zip(numbers).collect();
        let pad = self.plan.pack().map_or(0, |pack| pack.pad.into());
        tokens.resize(self.plan.window() as usize, (pad, (0, 0)));
        let inputs = tokens.len() - usize::from(self.plan.pairs());
        let mut rows = Vec::from([tokens[..inputs].iter().map(|token| token.0).collect()]);
        if self.plan.pairs() {
            let is_ignored = |(at, pair): (usize, &[Placed])| {
                pair[0].1.1 != pair[1].1.1 || pair[1].1.1 == 0 || !targets[at + 1]
            };
            let ignored = tokens.windows(2).enumerate().map(is_ignored);
            let ignored: Vec<Option<i64>> =
                ignored.map(|is| self.plan.ignore().filter(|_| is)).collect();
            let labels = tokens[1..].iter().zip(&ignored);
            rows.push(labels.map(|(token, id)| id.map_or(token.0, i128::from)).collect());
            // A label that is ignored weighs nothing.
            let labels = weights[1..].iter().zip(&ignored);
            weights = labels.map(|(weight, id)| id.map_or(*weight, |_| 0.0)).collect();
        }
        if self.plan.positions() {
            rows.push(tokens[..inputs].iter().map(|token| token.1.0).collect());
            rows.push(tokens[..inputs].iter().map(|token| token.1.1).collect());
        }
        Ok((rows, weights))
    }

    /// The tokens of the `k`-th sample drawn from a dataset, by document.
    fn pieces(&mut self, dataset: usize, k: u64) -> Vec<Range<u64>> {
        let sample = self.file_sample(dataset, k);
        if let Some(packed) = &self.datasets[dataset].packed {
            return packed[sample as usize].clone();
        }
        let (window, overlap) = (u64::from(self.plan.window()), u64::from(self.plan.overlap()));
        let first = sample * (window - overlap);
        let ends = self.datasets[dataset].documents.iter();
        let borders = ends.flat_map(|document| [document.start, document.end]);
        let mut borders: Vec<u64> =
            borders.filter(|token| (first + 1..first + window).contains(token)).collect();
        borders.push(first + window);
        borders.dedup();
        let mut start = first;
        borders.into_iter().map(|end| core::mem::replace(&mut start, end)..end).collect()
    }

    /// What is delivered of a sample of values, which are given with their places and as bits.
    fn quantized(
        &self,
        dataset: usize,
        values: &[(u64, i128)],
    ) -> Result<Vec<i128>, ReferenceError> {
        let Some(quantize) = self.plan.quantize() else {
            return Ok(Vec::new());
        };
        let stored = self.datasets[dataset].layout.file.dtype;
        let row: Vec<f64> =
            values.iter().map(|(_, bits)| quantized::read(*bits as u64, stored)).collect();
        let refused = |index: usize, limit, value: f64| {
            let (token, value) = (values[index].0, (value as f32).to_bits().into());
            ReferenceError::Overflow { dataset, token, value, limit }
        };
        let codes = quantized::quantize(&row, quantize.to);
        let codes = codes.map_err(|(index, limit)| refused(index, limit, row[index]))?;
        if quantize.deliver == Deliver::Quantized {
            return Ok(codes.into_iter().map(i128::from).collect());
        }
        let back = quantized::dequantize(&codes, quantize.to, row.len()).into_iter().enumerate();
        let delivered = back.map(|(index, value)| {
            let bits = quantized::write(value, self.dtype);
            bits.map(i128::from).map_err(|limit| refused(index, limit, value))
        });
        delivered.collect()
    }

    /// The entry of the table for a token, if there is a table.
    fn remapped(&self, _: u64, value: i128) -> Result<i128, Limit> {
        if self.plan.remap().is_none() {
            return Ok(value);
        }
        let entry = usize::try_from(value).ok().and_then(|index| self.table.get(index));
        entry.map(|entry| i128::from(*entry)).ok_or(Limit::Table(self.table.len() as u32))
    }

    /// What the user's action makes of a token.
    fn mapped(&self, token: u64, value: i128) -> Result<i128, Limit> {
        Ok(if self.plan.wasm().is_some() { (self.action)(token, value) } else { value })
    }

    /// A token in the type of the samples.
    fn narrowed(&self, _: u64, value: i128) -> Result<i128, Limit> {
        let (low, high) = self.must_fit.range();
        match self.plan.narrow() {
            _ if value >= low && value <= high => Ok(value),
            Some(Narrow { overflow: Overflow::Saturate(id), .. }) => Ok(id.into()),
            _ => Err(Limit::Type(self.must_fit)),
        }
    }

    /// A token that fits the bits on the wire, if they are given.
    fn fitting(&self, _: u64, value: i128) -> Result<i128, Limit> {
        match self.plan.bitpack() {
            Some(bits) if value >> bits != 0 => Err(Limit::Bits(bits)),
            _ => Ok(value),
        }
    }

    /// The sample of the file that is the `k`-th drawn from a dataset.
    fn file_sample(&mut self, dataset: usize, k: u64) -> u64 {
        let samples = self.datasets[dataset].layout.samples;
        let (epoch, index) = (k / samples, k % samples);
        let stale = self.datasets[dataset].table.as_ref().is_none_or(|(known, _)| *known != epoch);
        if stale {
            let table = self.epoch_table(dataset, epoch);
            self.datasets[dataset].table = Some((epoch, table));
        }
        self.datasets[dataset].table.as_ref().map_or(0, |(_, table)| table[index as usize])
    }

    /// All samples of an epoch in the order of delivery.
    fn epoch_table(&self, dataset: usize, epoch: u64) -> Vec<u64> {
        let layout = &self.datasets[dataset].layout;
        let delivered =
            part_samples(layout, self.plan.split().filter(|_| self.plan.pack().is_none()));
        let Some(shuffle) = self.plan.shuffle() else {
            return delivered;
        };
        let own = dataset_key(shuffle.seed, dataset as u64);
        let per_block = u64::from(layout.samples_per_block);
        let full = layout.samples / per_block;

        let permutation = block_permutation(own, epoch, full);
        let mut blocks: Vec<u64> = (0..full).map(|slot| permutation.apply(slot)).collect();
        if !layout.samples.is_multiple_of(per_block) {
            blocks.insert(tail_slot(own, epoch, full) as usize, full);
        }
        let samples_of = |block: &u64| {
            let first = block * per_block;
            delivered[first as usize..(first + per_block).min(layout.samples) as usize]
                .iter()
                .copied()
        };
        let mut table = Vec::new();
        for (group, blocks) in blocks.chunks(self.group_blocks(dataset)).enumerate() {
            let samples: Vec<u64> = blocks.iter().flat_map(samples_of).collect();
            let count = samples.len() as u64;
            let permutation = sample_permutation(own, epoch, group as u64, count);
            table.extend((0..count).map(|i| samples[permutation.apply(i) as usize]));
        }
        table
    }

    /// Blocks of a group: as the plan says, else 16 MiB in proportion to the dataset's largest
    /// share of a phase, in blocks of 256 KiB or of one longer sample, and at least 2. If more than
    /// 128 datasets are drawn from, and not packed, blocks are 48 MiB in the same proportion, from
    /// 4 KiB to 256 KiB, and a group may have 1.
    fn group_blocks(&self, dataset: usize) -> usize {
        let groups = self.plan.shuffle().and_then(|shuffle| shuffle.groups);
        if let Some(groups) = groups {
            return groups.blocks as usize;
        }
        let drawn = self.datasets.iter().filter(|d| d.weights.iter().any(|weight| *weight > 0));
        let many = drawn.count() > 128 && self.plan.pack().is_none();
        let total = |phase: usize| self.datasets.iter().map(|d| d.weights[phase]).sum::<i128>();
        let own = || self.datasets[dataset].weights.iter().enumerate();
        let shares = own().map(|(phase, weight)| (48 << 20) * weight / total(phase));
        let many_bytes = shares.max().unwrap_or(0).clamp(4 << 10, 256 << 10);
        let block_bytes = if many { many_bytes } else { 256 << 10 };
        let layout = &self.datasets[dataset].layout;
        let asked = layout.in_blocks(block_bytes as u32).samples_per_block;
        let is_sparse = self.plan.pack().is_some() && layout.samples_per_block < asked;
        let block_bytes = if is_sparse { 1 << 20 } else { block_bytes };
        let block_bytes = block_bytes.max(self.datasets[dataset].layout.sample_bytes().into());
        let blocks = own().map(|(phase, weight)| {
            let parts = total(phase) * block_bytes;
            ((16 << 20) * weight + parts - 1) / parts
        });
        blocks.max().unwrap_or(0).max(if many { 1 } else { 2 }) as usize
    }
}

/// The samples of the file that are delivered, in the order of its blocks. With a split they are
/// those of every unit of the part, one unit after the other, and for training the rest of the
/// file.
fn part_samples(layout: &SampleLayout, split: Option<Split>) -> Vec<u64> {
    let Some(split) = split else { return (0..layout.samples).collect() };
    let SampleLayout { file, window, overlap, .. } = *layout;
    let all = file.tokens.saturating_sub(overlap.into()) / u64::from(window - overlap);
    let block_tokens = (256 << 10) / file.dtype.bytes();
    let most = (block_tokens.saturating_sub(overlap) / (window - overlap)).max(1);
    let mut unit = 1;
    while 2 * unit <= u64::from(most) && 2 * unit <= all / 1_024 {
        unit *= 2;
    }
    let units = split.units(all / unit);
    let mut samples: Vec<u64> = units.flat_map(|at| at * unit..(at + 1) * unit).collect();
    if split.part == SplitPart::Train {
        samples.extend(all / unit * unit..all);
    }
    samples
}

/// Packs documents: the samples of all blocks, one block after the other. `None` if some block has
/// too few.
fn packed(
    documents: &[Range<u64>],
    fit: Fit,
    layout: &SampleLayout,
) -> Option<Vec<Vec<Range<u64>>>> {
    let (window, per_block) = (u64::from(layout.window), layout.samples_per_block as usize);
    let span = u64::from(BLOCK_BYTES / layout.widest);
    let mut chunks = Vec::new();
    for document in documents {
        let mut rest = document.clone();
        while !rest.is_empty() {
            let end = rest.end.min(rest.start + window);
            chunks.push(rest.start..end);
            rest.start = end;
        }
    }
    let mut samples = Vec::new();
    let mut rest = &chunks[..];
    while !rest.is_empty() {
        // As many chunks as the block has room for by their sum, then fewer until they fit.
        let can_hold = |count: &usize| {
            let (tokens, count) = (rest[..*count].iter().map(length).sum::<u64>(), *count);
            let room = match fit {
                Fit::Single => count <= per_block,
                Fit::Best | Fit::First => {
                    tokens <= per_block as u64 * window && count <= MAX_CHUNKS.max(per_block)
                }
            };
            room && rest[count - 1].end - rest[0].start <= span
        };
        let mut count = (1..=rest.len()).take_while(can_hold).last().unwrap_or(1);
        let mut bins = laid(&rest[..count], fit, window);
        while bins.len() > per_block {
            count -= 1;
            bins = laid(&rest[..count], fit, window);
        }
        while bins.len() < per_block && count < rest.len() {
            let most = bins.iter().map(Vec::len).max().unwrap_or(0);
            if most < 2 {
                return None;
            }
            let fullest = bins.iter().position(|bin| bin.len() == most).unwrap_or(0);
            let last = bins[fullest].pop();
            bins.extend(last.map(|chunk| vec![chunk]));
        }
        for mut bin in bins {
            bin.sort_by_key(|chunk| chunk.start);
            samples.push(bin);
        }
        rest = &rest[count..];
    }
    Some(samples)
}

/// Lays chunks into samples, the longest first.
fn laid(chunks: &[Range<u64>], fit: Fit, window: u64) -> Vec<Vec<Range<u64>>> {
    let mut by_length = chunks.to_vec();
    if fit != Fit::Single {
        by_length.sort_by_key(|chunk| core::cmp::Reverse(length(chunk)));
    }
    let mut bins: Vec<Vec<Range<u64>>> = Vec::new();
    for chunk in by_length {
        let room = |bin: &Vec<Range<u64>>| window - bin.iter().map(length).sum::<u64>();
        let fitting = bins.iter().enumerate().filter(|(_, bin)| room(bin) >= length(&chunk));
        let found = match fit {
            Fit::Best => fitting.min_by_key(|(_, bin)| room(bin)),
            Fit::First => fitting.min_by_key(|(number, _)| *number),
            Fit::Single => None,
        };
        match found.map(|(number, _)| number) {
            Some(number) => bins[number].push(chunk),
            None => bins.push(vec![chunk]),
        }
    }
    bins
}

fn length(chunk: &Range<u64>) -> u64 {
    chunk.end - chunk.start
}
